//! Alternating least squares for a low-rank matrix that is known on a triangle.
//!
//! With `T` the part of `B` below its diagonals, shifted so that it is lower triangular with its diagonal, row
//! `u_i` solves `(Σ_{j≤i} v_j v_jᵀ + λ) u_i = Σ_{j≤i} T_ij v_j`. On a triangle the Gram matrices are running
//! sums, so a sweep costs two products of `T` with `r` columns.

use crate::error::{Error, Result};
use crate::form::Structured;
use crate::form::structured::check_shape;
use crate::linalg::banded::LowerBanded;
use crate::workload::Recurrence;
use faer::linalg::matmul::triangular::{BlockStructure, matmul};
use faer::{Accum, Mat, MatRef};

/// Penalty on the squared norms of the factors, the paper's.
const RIDGE: f64 = 1e-6;

/// Sweeps after which the iterate is offered; spaced like the Fibonacci numbers, since progress is in ratios.
const OFFERS: [usize; 11] = [1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144];

/// Sweeps have come to rest when the left factor moves by less than this, relatively.
const REST: f64 = 1e-10;

impl Structured {
    /// Approximates a lower-triangular `B`, made for the workload of `recurrence`, with `h` diagonals and
    /// rank `r`.
    ///
    /// The diagonals are those of `B`. The rest minimises `‖B̂ − B‖_F² + 10⁻⁶(‖U‖_F² + ‖V‖_F²)` (for `B` of unit
    /// root-mean-square diagonal) by alternating least squares from a fixed start. The fit improves for
    /// hundreds of sweeps but the loss does not follow it all the way, so sweeps end at 144 and, of those
    /// tried on the way, the one with the smallest loss `γ²(Ĉ)‖B̂‖_F²` is returned.
    ///
    /// Cost: O(n² r) a sweep, O(n²(h + r)) for each of at most 12 evaluations of the loss.
    ///
    /// Errors: `h` outside `1 … n`, `r > n − h`, `B` not square, not of the length of the recurrence, not
    /// finite, not lower triangular, or without a positive diagonal; a fit that is singular at every sweep.
    pub fn fit(b: MatRef<'_, f64>, recurrence: &Recurrence, diagonals: usize, rank: usize) -> Result<Self> {
        let n = b.nrows();
        check_shape(n, diagonals, rank)?;
        check_decoder(b)?;
        let band = LowerBanded::from_fn(n, diagonals - 1, |i, k| b[(i, i - k)]);
        let build = |left, right| Self::new(band.clone(), rank, left, right, recurrence.clone());
        if rank == 0 {
            return build(Vec::new(), Vec::new());
        }
        let mut best: Option<(f64, Self)> = None;
        let mut failure = None;
        alternate(b, diagonals, rank, |left, right| match build(left, right) {
            Ok(candidate) => {
                let loss = candidate.loss();
                if best.as_ref().is_none_or(|(least, _)| loss < *least) {
                    best = Some((loss, candidate));
                }
            }
            Err(error) => failure = Some(error),
        });
        match (best, failure) {
            (Some((_, best)), _) => Ok(best),
            (None, Some(error)) => Err(error),
            (None, None) => {
                let reason = "no sweep was evaluated";
                Err(Error::Numerical { what: "alternating least squares", index: 0, reason })
            }
        }
    }

    /// The paper's choice `(h, r)`: `h = ⌈log₂n / 2⌉`, at least 1, and `r = ⌊log₂n / 2⌋`.
    pub fn default_shape(steps: usize) -> (usize, usize) {
        let ceiling = (usize::BITS - steps.saturating_sub(1).leading_zeros()) as usize;
        let floor = steps.max(1).ilog2() as usize;
        (ceiling.div_ceil(2).max(1), floor / 2)
    }
}

fn check_decoder(b: MatRef<'_, f64>) -> Result<()> {
    if b.nrows() != b.ncols() {
        let value = format!("{} × {}", b.nrows(), b.ncols());
        return Err(Error::argument("decoder", value, "it must be square"));
    }
    for column in 0..b.ncols() {
        for row in 0..b.nrows() {
            let value = b[(row, column)];
            let rule = if !value.is_finite() {
                "it must be finite"
            } else if column > row && value != 0.0 {
                "it must be lower triangular"
            } else if column == row && value <= 0.0 {
                "the diagonal must be positive"
            } else {
                continue;
            };
            return Err(Error::InvalidMatrixEntry { name: "decoder", row, column, value, rule });
        }
    }
    Ok(())
}

/// Runs the sweeps and hands `(U, V)`, by rows, to `offer` at those of [`OFFERS`] and when they come to rest.
fn alternate(b: MatRef<'_, f64>, diagonals: usize, rank: usize, mut offer: impl FnMut(Vec<f64>, Vec<f64>)) {
    let m = b.nrows() - diagonals;
    // The entries above the diagonal of this block belong to the band; the products never read them.
    let target = b.submatrix(diagonals, 0, m, m);
    let mean_sq = (0..b.nrows()).map(|i| b[(i, i)] * b[(i, i)]).sum::<f64>() / b.nrows() as f64;
    let scale = mean_sq.sqrt();

    let mut right = start(m, rank);
    let mut left = Mat::zeros(m, rank);
    let mut sums = Mat::zeros(m, rank);
    for sweep in 1..=OFFERS[OFFERS.len() - 1] {
        multiply(&mut sums, target, BlockStructure::TriangularLower, &right, 1.0 / scale);
        let moved = solve_rows(&mut left, &sums, &right, 0..m);
        multiply(&mut sums, target.transpose(), BlockStructure::TriangularUpper, &left, 1.0 / scale);
        solve_rows(&mut right, &sums, &left, (0..m).rev());

        let rest = moved <= REST;
        if rest || OFFERS.contains(&sweep) {
            let by_rows = |factor: &Mat<f64>| {
                let row = |i| (0..rank).map(move |q| scale.sqrt() * factor[(i, q)]);
                (0..m).flat_map(row).collect()
            };
            offer(by_rows(&left), by_rows(&right));
        }
        if rest {
            break;
        }
    }
}

/// Exponentials `exp(s_q (j/m − 1))` with rates `s_q` in geometric progression, from 1 towards `m`.
///
/// Of eight smooth starts tried on the optimal prefix-sum factor (cosines, powers, exponentials with other
/// ratios, inverse square roots) this one led to the smallest loss within a hundred sweeps.
fn start(m: usize, rank: usize) -> Mat<f64> {
    let ratio = 2.0_f64.min((m as f64).powf(1.0 / rank as f64));
    Mat::from_fn(m, rank, |j, q| (ratio.powi(q as i32) * ((j as f64 + 0.5) / m as f64 - 1.0)).exp())
}

fn multiply(
    out: &mut Mat<f64>,
    target: MatRef<'_, f64>,
    shape: BlockStructure,
    factor: &Mat<f64>,
    scale: f64,
) {
    let full = BlockStructure::Rectangular;
    let threads = faer::get_global_parallelism();
    matmul(out.as_mut(), full, Accum::Replace, target, shape, factor.as_ref(), full, scale, threads);
}

/// Solves for the rows of `factor` in the given order, which is that of the running Gram matrix of `other`;
/// returns the relative change.
fn solve_rows(
    factor: &mut Mat<f64>,
    sums: &Mat<f64>,
    other: &Mat<f64>,
    order: impl Iterator<Item = usize>,
) -> f64 {
    let r = factor.ncols();
    let mut gram = vec![0.0; r * r];
    for q in 0..r {
        gram[q * r + q] = RIDGE;
    }
    let (mut chol, mut x) = (vec![0.0; r * r], vec![0.0; r]);
    let (mut moved, mut size) = (0.0, 0.0);
    for i in order {
        for p in 0..r {
            for q in 0..=p {
                gram[p * r + q] += other[(i, p)] * other[(i, q)];
            }
            x[p] = sums[(i, p)];
        }
        chol.copy_from_slice(&gram);
        solve_in_place(&mut chol, &mut x);
        for q in 0..r {
            moved += (x[q] - factor[(i, q)]).powi(2);
            size += x[q] * x[q];
            factor[(i, q)] = x[q];
        }
    }
    if size > 0.0 { (moved / size).sqrt() } else { 0.0 }
}

/// Solves `G x = b` by Cholesky, with `G` in the lower triangle of `chol`, which it overwrites.
///
/// The ridge keeps the pivots of `G` at `RIDGE` and above, but for rounding; that is what the floor is for.
fn solve_in_place(chol: &mut [f64], x: &mut [f64]) {
    let r = x.len();
    for j in 0..r {
        for k in 0..j {
            let factor = chol[j * r + k];
            for i in j..r {
                chol[i * r + j] -= chol[i * r + k] * factor;
            }
        }
        let pivot = chol[j * r + j].max(RIDGE).sqrt();
        for i in j + 1..r {
            chol[i * r + j] /= pivot;
        }
        chol[j * r + j] = pivot;
    }
    for i in 0..r {
        let known: f64 = (0..i).map(|k| chol[i * r + k] * x[k]).sum();
        x[i] = (x[i] - known) / chol[i * r + i];
    }
    for i in (0..r).rev() {
        let known: f64 = (i + 1..r).map(|k| chol[k * r + i] * x[k]).sum();
        x[i] = (x[i] - known) / chol[i * r + i];
    }
}
