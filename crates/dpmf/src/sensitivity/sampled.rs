//! What a form makes of sampling: the sensitivity that counts, and how well a unit is hidden.

use crate::accounting::{Allocation, Sampled};
use crate::error::{Error, Result};
use crate::form::Representation;
use crate::participation::{Participation, Sampling};
use faer::MatRef;
use std::sync::Arc;

/// Most numbers of the sums of columns, bins times rows.
const MOST: usize = 1 << 28;

/// The sensitivity that noise is measured in: of all participations of a unit, or of one of them where the privacy curve
/// counts the others.
///
/// Guarantee: not below the exact one.
/// Errors: those of [`Participation::sensitivity`]; a participation that the sampling does not mean; an encoder that the
/// sampling does not fit.
pub(crate) fn under(
    participation: Participation,
    sampling: Sampling,
    form: &dyn Representation,
) -> Result<f64> {
    let n = form.steps();
    let meant = sampling.participation(n)?;
    if let Some(meant) = meant
        && meant.pattern(n)? != participation.pattern(n)?
        && meant.pattern(n)?.times > 1
    {
        return Err(Error::Unsupported {
            what: format!("sampling {sampling} of units that take part {participation}"),
            hint: "balls-in-bins:B goes with epochs:K for ⌈n/K⌉ = B, cyclic-poisson:G:Q with min-separation:G",
        });
    }
    match sampling {
        Sampling::None => Ok(participation.sensitivity(form)?.gamma),
        Sampling::CyclicPoisson { bands, .. } => {
            if form.encoder_bands() > bands {
                return Err(Error::Unsupported {
                    what: format!("sampling {sampling} of an encoder with more than {bands} diagonals"),
                    hint: "what a unit adds at its steps must not meet: take as many parts as the encoder has bands",
                });
            }
            Ok(Participation::Single.sensitivity(form)?.gamma)
        }
        Sampling::BallsInBins { .. } => {
            if !form.encoder_is_nonnegative() {
                return Err(Error::Unsupported {
                    what: format!("sampling {sampling} of an encoder that is not seen to be non-negative"),
                    hint: "only then are bins as good as they are counted: use banded, blt or banded-inverse mechanisms",
                });
            }
            Ok(participation.sensitivity(form)?.gamma)
        }
    }
}

/// How well a unit is hidden, in units of a sensitivity that [`under`] does not exceed.
///
/// Errors: bins and rows that do not fit in memory.
pub(crate) fn hidden(sampling: Sampling, form: &dyn Representation, sensitivity: f64) -> Result<Sampled> {
    Ok(match sampling {
        Sampling::None => Sampled::None,
        Sampling::CyclicPoisson { bands, rate } => {
            Sampled::CyclicPoisson { bands, rate, rounds: form.steps().div_ceil(bands) as u64 }
        }
        Sampling::BallsInBins { bins } => {
            Sampled::BallsInBins(Arc::new(allocation(form, bins, sensitivity)?))
        }
    })
}

/// The Gram matrix of the sums of columns, each entry raised by what rounding may hide, by the same number: so it stays one.
pub(crate) fn allocation(form: &dyn Representation, bins: usize, sensitivity: f64) -> Result<Allocation> {
    let (n, rows) = (form.steps(), form.noise_rows());
    if bins.saturating_mul(rows) > MOST {
        return Err(Error::Unsupported {
            what: format!("balls in {bins} bins over {n} steps"),
            hint: "the sums of columns do not fit in memory: take fewer bins or steps",
        });
    }
    let columns = form.encoder_columns();
    let mut sums = vec![0.0; bins * rows];
    let mut room = 0.0_f64;
    let mut largest = 0.0_f64;
    for (bin, sum) in sums.chunks_exact_mut(rows).enumerate() {
        let steps: Vec<usize> = (bin..n).step_by(bins).collect();
        let mut parts = vec![0.0; steps.len() * rows];
        let distances = columns.write(&steps, &mut parts);
        for part in parts.chunks_exact(rows) {
            sum.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
        }
        let norm = sum.iter().map(|x| x * x).sum::<f64>().sqrt();
        // Positive terms: a sum of K is off by at most K units of itself.
        let off = distances.iter().sum::<f64>() + norm * (steps.len() + 2) as f64 * f64::EPSILON;
        largest = largest.max(norm);
        room = room.max(if off.is_nan() { f64::INFINITY } else { off });
    }
    let sums = MatRef::from_column_major_slice(&sums, rows, bins);
    let products = sums.transpose() * sums;
    let room = 2.0 * room * largest + room * room + largest * largest * (rows + 8) as f64 * f64::EPSILON;
    let over = sensitivity.powi(-2);
    let entry = |k: usize| {
        // Symmetric to the bit, whatever the order of the sums.
        let (p, q) = ((k / bins).max(k % bins), (k / bins).min(k % bins));
        (products[(p, q)].max(0.0) + room) * over
    };
    Allocation::new(bins, (0..bins * bins).map(entry).collect())
}
