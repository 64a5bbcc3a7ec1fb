//! Newton directions by conjugate gradients, the method of Yuan, Yang, Zhang and Hao (2016).

use crate::factorize::primal::{Direction, Point, inner};
use faer::Mat;

/// Conjugate-gradient steps for one direction: the default of \[YYZH16\].
const INNER_ITERATIONS: usize = 5;

/// Solves `min ⟨∇, D⟩ + ½⟨D, H D⟩` over symmetric `D` with zero diagonal, inexactly.
///
/// The Hessian `H D = X⁻¹ D E + E D X⁻¹` with `E = X⁻¹AᵀA X⁻¹` has n⁴ entries and is only ever applied: two
/// matrix products a step, by symmetry.
///
/// Reference: Algorithm 1 of \[YYZH16\].
pub(crate) struct Newton;

impl Direction for Newton {
    fn direction(&mut self, point: &Point) -> Mat<f64> {
        let n = point.x.nrows();
        let hessian = |d: &Mat<f64>| {
            let half = &point.inverse * (d * &point.descent);
            Mat::from_fn(n, n, |i, j| if i == j { 0.0 } else { half[(i, j)] + half[(j, i)] })
        };
        let mut residual = Mat::from_fn(n, n, |i, j| if i == j { 0.0 } else { point.descent[(i, j)] });
        let mut search = residual.clone();
        let mut direction = Mat::<f64>::zeros(n, n);
        let mut norm_sq = inner(&residual, &residual);
        let target = 1e-20 * norm_sq;
        for _ in 0..INNER_ITERATIONS {
            let curved = hessian(&search);
            let alpha = norm_sq / inner(&search, &curved);
            direction = Mat::from_fn(n, n, |i, j| direction[(i, j)] + alpha * search[(i, j)]);
            residual = Mat::from_fn(n, n, |i, j| residual[(i, j)] - alpha * curved[(i, j)]);
            let next = inner(&residual, &residual);
            if !next.is_finite() || next <= target {
                break;
            }
            let beta = next / norm_sq;
            search = Mat::from_fn(n, n, |i, j| residual[(i, j)] + beta * search[(i, j)]);
            norm_sq = next;
        }
        direction
    }

    fn first_step(&self, _last: Option<f64>) -> f64 {
        1.0
    }
}
