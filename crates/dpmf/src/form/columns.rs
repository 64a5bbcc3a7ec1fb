//! Columns of the encoder, a few at a time: what a sensitivity for several participations is computed from.

use super::Rows;
use faer::{Mat, MatRef};

/// Columns of `C`, each with a bound on how far the computed one is from the exact one.
pub trait EncoderColumns: Sync {
    /// Writes column `steps[k]` of `C` into the `k`-th of as many equal parts of `out`, which holds zeros, and returns for
    /// each a bound on `‖Ĉe_j − Ce_j‖`, the distance of what was written from the column of the exact encoder.
    ///
    /// Guarantee: the bounds hold for any coefficients; one that is infinite, or not a number, says that nothing is known.
    fn write(&self, steps: &[usize], out: &mut [f64]) -> Vec<f64>;

    /// The inner products of all columns, where the form knows a quicker way to them than column by column.
    fn products(&self) -> Option<Products<'_>> {
        None
    }
}

/// `ĈᵀĈ`, row by row.
pub struct Products<'a> {
    /// Bounds on `‖Ĉe_j‖`.
    pub norms: Vec<f64>,
    /// Bounds on `‖Ĉe_j − Ce_j‖`.
    pub distances: Vec<f64>,
    /// Writes the rows from the last to the first, each from its diagonal to the right: `n − i` numbers for row `i`, each off by
    /// at most `(n + 4)ε` times the norms of both columns.
    pub rows: Rows<'a>,
}

/// An encoder that is held whole.
pub(crate) struct Whole {
    encoder: Mat<f64>,
    distances: Vec<f64>,
}

impl Whole {
    /// A computed inverse `Ĉ` of a square `N`, verified.
    ///
    /// With `N Ĉ = I + R`, `C = Ĉ(I + R)⁻¹`, so `‖C e_j − Ĉ e_j‖ ≤ ‖|Ĉ| |R| e_j‖ + ‖Ĉ‖‖R‖‖R e_j‖/(1 − ‖R‖)`. The
    /// computed `R` is off by at most `(i − j + 2)ε(|N||Ĉ|)_ij`, and that is added to it.
    ///
    /// Cost: four products of n × n matrices.
    pub fn inverse(coloring: MatRef<'_, f64>, encoder: Mat<f64>) -> Self {
        let n = encoder.ncols();
        let size = |m: MatRef<'_, f64>| Mat::from_fn(n, n, |i, j| m[(i, j)].abs());
        let sizes = size(encoder.as_ref());
        let product = coloring * &encoder;
        let terms = size(coloring) * &sizes;
        let residual = Mat::from_fn(n, n, |i, j| {
            let unit = if i == j { 1.0 } else { 0.0 };
            let length = i.saturating_sub(j) as f64 + 3.0;
            (product[(i, j)] - unit).abs() + length * f64::EPSILON * terms[(i, j)]
        });
        let room = room(n);
        let total = residual.norm_l2() * room;
        let first = &sizes * &residual;
        let second =
            if total < 0.5 { encoder.norm_l2() * room * total / (1.0 - total) } else { f64::INFINITY };
        let distance = |j| first.col(j).norm_l2() + second * residual.col(j).norm_l2();
        Self { distances: (0..n).map(distance).collect(), encoder }
    }

    /// Squared column norms of `C`, not rounded down.
    pub fn norms_sq(&self) -> Vec<f64> {
        let room = room(self.encoder.ncols());
        let raised = |(j, distance): (usize, &f64)| {
            let norm = (self.encoder.col(j).norm_l2() + distance) * room;
            if norm.is_nan() { f64::INFINITY } else { norm * norm * room }
        };
        self.distances.iter().enumerate().map(raised).collect()
    }
}

/// What sums of up to n² squares and products, all positive, may lose.
fn room(n: usize) -> f64 {
    1.0 + (2 * n + 16) as f64 * f64::EPSILON
}

impl EncoderColumns for Whole {
    fn write(&self, steps: &[usize], out: &mut [f64]) -> Vec<f64> {
        let rows = self.encoder.nrows();
        for (&j, column) in steps.iter().zip(out.chunks_exact_mut(rows)) {
            column.copy_from_slice(self.encoder.col_as_slice(j));
        }
        let room = room(self.encoder.ncols());
        steps.iter().map(|&j| self.distances[j] * room).collect()
    }
}
