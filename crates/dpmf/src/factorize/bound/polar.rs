//! The sum of singular values of a dense matrix, from below, by an approximate polar factor.
//!
//! For any `W`, `‖G‖_* ≥ tr(WᵀG)/‖W‖₂`. With `W = UVᵀ` of a computed singular value decomposition the two sides agree to
//! rounding; but whatever `W` is, the inequality holds, so only the trace and a bound on `‖W‖₂` have to be proved.

use super::Factor;
use crate::error::{Error, Result};
use crate::linalg::double::Double;
use faer::{Mat, MatRef};

/// A lower bound on `‖A G‖_*`, as a number and the power of two to multiply it by; `G` has entries below 2.
///
/// `‖W‖₂² ≤ 1 + ‖WᵀW − I‖_F`. A computed product of matrices is off by at most `nε|W|ᵀ|W|`, in any order of summation,
/// so its Frobenius norm by `nε‖W‖_F²`.
pub(super) fn nuclear_norm(a: MatRef<'_, f64>, factor: &Factor) -> Result<(f64, i32)> {
    enclosed(a, None, factor)
}

/// The same for a matrix whose entries may be off by `errors`.
pub(super) fn enclosed(
    a: MatRef<'_, f64>,
    errors: Option<MatRef<'_, f64>>,
    factor: &Factor,
) -> Result<(f64, i32)> {
    let (n, b, times) = (factor.steps, factor.separation, factor.times());
    let exponent = libm::ilogb(a.norm_max());
    // A G, the sizes of what is summed for it, and what it may be off by.
    let [mut scaled, mut sizes, mut off] = std::array::from_fn(|_| Mat::<f64>::zeros(n, n));
    for j in 0..n {
        for i in (j..n).step_by(b) {
            let g = factor.row(i)[if times == 1 { 0 } else { j / b }];
            for row in 0..n {
                let term = libm::scalbn(a[(row, i)], -exponent) * g;
                scaled[(row, j)] += term;
                sizes[(row, j)] += term.abs();
                if let Some(errors) = errors {
                    off[(row, j)] += libm::scalbn(errors[(row, i)], -exponent) * g.abs();
                }
            }
        }
    }
    let svd = scaled.svd().map_err(|_| Error::Numerical {
        what: "the lower bound",
        index: 0,
        reason: "the singular value decomposition did not converge",
    })?;
    let w = svd.U() * svd.V().transpose();

    let (unit, size) = (n as f64 * f64::EPSILON, w.squared_norm_l2());
    let mut gram = w.transpose() * &w;
    (0..n).for_each(|i| gram[(i, i)] -= 1.0);
    let excess = gram.norm_l2() * (1.0 + unit) + unit * size * (1.0 + unit);
    let norm = (1.0 + excess).sqrt() * (1.0 + f64::EPSILON);

    // Rounded roots, products and sums of K of them cost as many units of each term, sums in double-double nothing that
    // matters.
    let lost = (times + 3) as f64 * f64::EPSILON;
    let (mut trace, mut terms) = (Double::ZERO, 0.0);
    for j in 0..n {
        for (i, w) in w.col_as_slice(j).iter().enumerate() {
            trace = trace + Double::scalar(*w) * Double::scalar(scaled[(i, j)]);
            terms += w.abs() * (lost * sizes[(i, j)] + off[(i, j)]);
        }
    }
    // A sum of n² positive terms, each of which carries a few units.
    let trace = trace.to_f64() - terms * (1.0 + (n + times + 8) as f64 * n as f64 * f64::EPSILON);
    let bound = trace / norm * (1.0 - 4.0 * f64::EPSILON);
    Ok((bound.max(0.0), exponent))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_steps_in_closed_form() {
        // ‖G‖_*² = ‖G‖_F² + 2|det G| for 2 × 2 matrices.
        let a = Mat::from_fn(2, 2, |i, j| if i >= j { 3.0 } else { 0.0 });
        let v = [1.5_f64, 0.25];
        let exact = (9.0 * (2.0 * v[0] + v[1]) + 2.0 * 9.0 * (v[0] * v[1]).sqrt()).sqrt();
        let (norm, exponent) = nuclear_norm(a.as_ref(), &Factor::diagonal(&v)).unwrap();
        let short = 1.0 - libm::scalbn(norm, exponent) / exact;
        assert!((0.0..1e-14).contains(&short), "{short:e}");
    }
}
