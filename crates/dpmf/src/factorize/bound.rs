//! The lower bound as a proof: evaluated at a given dual point, with every error bounded, and rounded down.
//!
//! For any `D = G Gᵀ` no factorization has a loss below `‖A G‖_*² / Σ_p v_p`, so a lower bound on one number, the sum of the
//! singular values, is all there is to prove. It need not be tight for wild `D`, but it must hold for every `D`: those of a file are chosen by whoever wrote it. See `docs/explanation/certificate.md`.

mod filter;
mod phases;
mod polar;

use crate::error::{Error, Result};
use crate::factorize::point::Dual;
use crate::factorize::within_dense_limit;
use crate::workload::Workload;

/// Relative distance that proving puts between the bound and its exact value, where rounding does not matter.
pub(super) const COST: f64 = 1e-12;

/// The lower bound `tr(X(D) D)² / Σ_p v_p` at any dual point, rounded down.
///
/// Guarantee: no factorization of the workload has a loss below it, under any participation that lets the users of the dual
/// point take part, for every point: rounding and quadrature are bounded, nothing is assumed about the spectrum. For one
/// participation it is evaluated where `v` is raised to 10⁻³⁰ of its largest entry.
/// Cost: O(n) double-double operations for each octave of the spectrum, O(nK²) for `K` participations; or O(n³) for a dense
/// workload, and for several participations where a step size is zero or epochs are as short as the optimizer reaches back.
///
/// Errors: a point for other steps; a loss outside the range of f64; more steps than a dense matrix holds, where one is needed.
pub fn lower_bound_at(workload: &Workload, dual: &Dual) -> Result<f64> {
    let (actual, expected) = (dual.steps(), workload.steps());
    if actual != expected {
        return Err(Error::WrongLength { name: "dual variable", actual, expected });
    }
    let v = tamed(dual.v());
    let ((nuclear_norm, exponent), sum) = if dual.times() == 1 {
        // Sums of n positive numbers, one at a time, lose less than n ε.
        let sum = v.iter().sum::<f64>() * (1.0 + v.len() as f64 * f64::EPSILON);
        let factor = Factor::diagonal(&v);
        let norm = match workload.realisation() {
            Some(realisation) => filter::nuclear_norm(realisation, &v),
            None => polar::nuclear_norm(workload.to_dense().as_ref(), &factor)?,
        };
        (norm, sum)
    } else {
        let factor = Factor::new(dual, &v);
        let norm = match workload.realisation() {
            Some(realisation) => {
                let dense = || {
                    let (a, errors) = realisation.enclosed();
                    polar::enclosed(a.as_ref(), Some(errors.as_ref()), &factor)
                };
                match phases::nuclear_norm(workload, realisation, &factor)? {
                    // Either is a bound. Step sizes that differ much cost the first one digits.
                    Some(norm) if expected <= BOTH => larger(norm, dense()?),
                    Some(norm) => norm,
                    None => {
                        within_dense_limit(expected)?;
                        dense()?
                    }
                }
            }
            None => polar::nuclear_norm(workload.to_dense().as_ref(), &factor)?,
        };
        (norm, factor.sum())
    };
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

/// Steps up to which several participations have both bounds, since a decomposition takes milliseconds.
const BOTH: usize = 128;

/// The larger of two numbers, each with a power of two that multiplies it.
fn larger(a: (f64, i32), b: (f64, i32)) -> (f64, i32) {
    if libm::scalbn(b.0, b.1 - a.1) > a.0 { b } else { a }
}

/// `G` with `D = G Gᵀ`, lower triangular within the phases: numbers that are taken as they are.
///
/// Whatever they are, `‖A G‖_*² / Σ_p max_i ‖g_i‖²` is a lower bound, the maximum over the rows of a phase: raising the shorter
/// rows to the longest by directions of their own adds to `D`.
struct Factor {
    steps: usize,
    separation: usize,
    /// Rows, `K` numbers each.
    rows: Vec<f64>,
}

impl Factor {
    fn diagonal(v: &[f64]) -> Self {
        Self { steps: v.len(), separation: v.len(), rows: v.iter().map(|v| v.sqrt()).collect() }
    }

    fn new(dual: &Dual, v: &[f64]) -> Self {
        let (separation, times) = (dual.separation(), dual.times());
        let row = |(i, y): (usize, &[f64])| {
            let root = v[i % separation].sqrt();
            y.iter().map(|y| root * y).collect::<Vec<f64>>()
        };
        let rows = dual.directions().chunks_exact(times).enumerate().flat_map(row).collect();
        Self { steps: dual.steps(), separation, rows }
    }

    fn times(&self) -> usize {
        self.steps.div_ceil(self.separation)
    }

    fn row(&self, i: usize) -> &[f64] {
        &self.rows[i * self.times()..][..self.times()]
    }

    /// `Σ_p max_i ‖g_i‖²`, rounded up.
    fn sum(&self) -> f64 {
        let norm_sq = |i: usize| self.row(i).iter().map(|g| g * g).sum::<f64>();
        let longest = |p: usize| (p..self.steps).step_by(self.separation).map(norm_sq).fold(0.0, f64::max);
        let sum: f64 = (0..self.separation).map(longest).sum();
        sum * (1.0 + (self.steps + 8) as f64 * f64::EPSILON)
    }
}

/// `v` in units in which its largest entry lies between 1 and 2, no entry below 2⁻¹⁰⁰: another dual variable, with a
/// bound of its own.
fn tamed(v: &[f64]) -> Vec<f64> {
    let exponent = libm::ilogb(v.iter().copied().fold(0.0, f64::max));
    let floor = libm::scalbn(1.0, -100);
    v.iter().map(|&v| libm::scalbn(v, -exponent).max(floor)).collect()
}
