//! The lower bound as a proof: evaluated at a given `v`, with every error bounded, and rounded down.
//!
//! For any `v > 0` no factorization has a loss below `‖A D^{1/2}‖_*² / Σv`, `D = diag(v)`, so a lower bound on one
//! number, the sum of the singular values, is all there is to prove. It need not be tight for wild `v`, but it must hold
//! for every `v`: those of a file are chosen by whoever wrote it. See `docs/explanation/certificate.md`.

mod filter;
mod polar;

use crate::error::{Error, Result};
use crate::workload::Workload;

/// Relative distance that proving puts between the bound and its exact value, where rounding does not matter.
pub(super) const COST: f64 = 1e-12;

/// The lower bound `(Σ v_i x_i)² / Σ v_i` with `x = diag X(v)` at any positive `v`, rounded down.
///
/// Guarantee: no factorization of the workload has a loss below it, for every `v`: rounding and quadrature are bounded,
/// nothing is assumed about the spectrum. The bound is evaluated where `v` is raised to 10⁻³⁰ of its largest entry.
/// Cost: O(n) double-double operations for each octave of the spectrum, or O(n³) for a dense workload.
///
/// Errors: `v` of the wrong length, not positive or not finite; a loss outside the range of f64.
pub fn lower_bound_at(workload: &Workload, v: &[f64]) -> Result<f64> {
    let (actual, expected) = (v.len(), workload.steps());
    if actual != expected {
        return Err(Error::WrongLength { name: "dual variable", actual, expected });
    }
    if let Some(index) = v.iter().position(|v| !(*v > 0.0 && v.is_finite())) {
        let rule = "it must be positive and finite";
        return Err(Error::InvalidEntry { name: "dual variable", index, value: v[index], rule });
    }
    let v = tamed(v);
    let (nuclear_norm, exponent) = match workload.realisation() {
        Some(realisation) => filter::nuclear_norm(realisation, &v),
        None => polar::nuclear_norm(workload.to_dense().as_ref(), &v)?,
    };
    // Sums of n positive numbers, one at a time, lose less than n ε.
    let sum = v.iter().sum::<f64>() * (1.0 + v.len() as f64 * f64::EPSILON);
    let bound = libm::scalbn(nuclear_norm * nuclear_norm / sum * (1.0 - 8.0 * f64::EPSILON), 2 * exponent);
    if !(bound > 0.0 && bound.is_finite()) {
        return Err(Error::Numerical {
            what: "the lower bound",
            index: 0,
            reason: "the loss of this workload leaves the range of 64-bit numbers; rescale it",
        });
    }
    Ok(bound)
}

/// `v` in units in which its largest entry lies between 1 and 2, no entry below 2⁻¹⁰⁰: another dual variable, with a
/// bound of its own.
fn tamed(v: &[f64]) -> Vec<f64> {
    let exponent = libm::ilogb(v.iter().copied().fold(0.0, f64::max));
    let floor = libm::scalbn(1.0, -100);
    v.iter().map(|&v| libm::scalbn(v, -exponent).max(floor)).collect()
}
