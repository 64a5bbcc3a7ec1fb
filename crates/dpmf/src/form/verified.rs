//! Columns of an encoder, computed side by side, with what rounding hides of their norms.

use super::EncoderColumns;
use rayon::prelude::*;

/// Columns that are computed side by side.
pub(super) const LANES: usize = 8;

/// One number of each of them.
pub(super) type Lanes = [f64; LANES];

/// Columns of a computed encoder `Ĉ` at some steps, in ascending order, from the row of the first on, and for each a bound
/// on `‖e_j − N ĉ_j‖²`.
pub(super) struct Verified {
    pub z: Vec<Lanes>,
    pub residual_sq: Lanes,
}

/// Something whose columns are computed side by side.
pub(super) trait Simulated: Sync {
    fn steps(&self) -> usize;

    /// The columns of `steps`, ascending; some may be the same.
    fn columns(&self, steps: [usize; LANES]) -> Verified;
}

/// What all columns together say of the distance of each from the exact one.
///
/// With `N Ĉ = I − R`, `C = Ĉ + C R`, so `‖C‖(1 − ‖R‖) ≤ ‖Ĉ‖` and `‖C e_j − ĉ_j‖ ≤ ‖C‖‖R e_j‖`.
pub(super) struct Columns<'a, T: ?Sized> {
    form: &'a T,
    /// A bound on `‖C‖`; infinite where `R` is not small, and nothing is known.
    size: f64,
    norms_sq: Vec<f64>,
    residuals_sq: Vec<f64>,
}

impl<'a, T: Simulated + ?Sized> Columns<'a, T> {
    /// Cost: that of all columns, in threads.
    pub fn new(form: &'a T) -> Self {
        let n = form.steps();
        let measure = |first: usize| {
            let Verified { z, residual_sq } = form.columns(std::array::from_fn(|l| (first + l).min(n - 1)));
            let norms_sq =
                z.iter().fold([0.0; LANES], |sum, z| std::array::from_fn(|l| sum[l] + z[l] * z[l]));
            (norms_sq, residual_sq)
        };
        let starts: Vec<usize> = (0..n).step_by(LANES).collect();
        let (norms, residuals): (Vec<Lanes>, Vec<Lanes>) = starts.into_par_iter().map(measure).unzip();
        let each = |lanes: Vec<Lanes>| lanes.into_iter().flatten().take(n).collect::<Vec<f64>>();
        let (norms_sq, residuals_sq) = (each(norms), each(residuals));
        let room = room(n);
        let total = |squares: &[f64]| (squares.iter().sum::<f64>() * room).sqrt() * room;
        let (size, residual) = (total(&norms_sq), total(&residuals_sq));
        let size = if residual < 0.5 { size / (1.0 - residual) * room } else { f64::INFINITY };
        Self { form, size, norms_sq, residuals_sq }
    }

    /// A bound on `‖C e_j − ĉ_j‖`.
    fn distance(&self, j: usize) -> f64 {
        let distance = self.size * self.residuals_sq[j].sqrt() * room(self.norms_sq.len());
        if distance.is_nan() { f64::INFINITY } else { distance }
    }

    /// Squared column norms of `C`.
    ///
    /// Guarantee: ≥ the exact values if the residuals are bounds.
    pub fn norms_sq(&self) -> Vec<f64> {
        let room = room(self.norms_sq.len());
        let norm = |(j, norm_sq): (usize, &f64)| (norm_sq.sqrt() * room + self.distance(j)) * room;
        self.norms_sq.iter().enumerate().map(norm).map(|norm| norm * norm * room).collect()
    }
}

impl<T: Simulated + ?Sized> EncoderColumns for Columns<'_, T> {
    fn write(&self, steps: &[usize], out: &mut [f64]) -> Vec<f64> {
        let n = self.form.steps();
        // Columns close to each other share a pass: little of it is spent before the first.
        let mut order: Vec<usize> = (0..steps.len()).collect();
        order.sort_unstable_by_key(|&k| steps[k]);
        for group in order.chunks(LANES) {
            let impulses = std::array::from_fn(|l| steps[group[l.min(group.len() - 1)]]);
            let found = self.form.columns(impulses);
            for (l, &k) in group.iter().enumerate() {
                let column = &mut out[k * n + impulses[0]..(k + 1) * n];
                column.iter_mut().zip(&found.z).for_each(|(x, z)| *x = z[l]);
            }
        }
        steps.iter().map(|&j| self.distance(j)).collect()
    }
}

/// What sums of up to n² squares, all positive, may lose.
fn room(n: usize) -> f64 {
    1.0 + (2 * n + 16) as f64 * f64::EPSILON
}
