//! What a form makes of sampling: the sensitivity that counts, and how well a unit is hidden.

use crate::accounting::allocation::TABLE;
use crate::accounting::{Allocation, Amplification, Reshuffled};
use crate::error::{Error, Result};
use crate::form::Representation;
use crate::participation::{Participation, Pattern, Sampling};
use crate::tensors::Tensors;
use faer::MatRef;
use sha2::{Digest, Sha256};
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
    // One participation is the same by any name.
    let shape = |participation: Participation| {
        let Pattern { kind, times, separation } = participation.pattern(n)?;
        Ok::<_, Error>((times, separation, (times > 1).then_some(kind)))
    };
    if let Some(meant) = sampling.participation(n)?
        && shape(meant)? != shape(participation)?
    {
        return Err(Error::Unsupported {
            what: format!("sampling {sampling} of units that take part {participation}"),
            hint: "balls-in-bins:B goes with epochs:K for ⌈n/K⌉ = B, reshuffled-bins:B with min-separation:1:K, \
                   cyclic-poisson:G:Q with min-separation:G",
        });
    }
    match sampling {
        Sampling::None => Ok(participation.sensitivity(form)?.gamma),
        Sampling::CyclicPoisson { bands, .. } => {
            if form.encoder_bands() > bands {
                return Err(Error::Unsupported {
                    what: format!("sampling {sampling} of an encoder with more than {bands} diagonals"),
                    hint: "contributions of one unit at different steps must not overlap: use as many parts as the encoder has bands",
                });
            }
            Ok(Participation::Single.sensitivity(form)?.gamma)
        }
        Sampling::BallsInBins { .. } | Sampling::ReshuffledBins { .. } => {
            if !form.encoder_is_nonnegative() {
                return Err(Error::Unsupported {
                    what: format!("sampling {sampling} of an encoder that is not known to be non-negative"),
                    hint: "amplification by bins holds only for non-negative encoders: use banded, blt or banded-inverse mechanisms",
                });
            }
            match sampling {
                Sampling::ReshuffledBins { bins } => {
                    Ok(reshuffled(form, bins)?.longest_sq().sqrt().next_up())
                }
                _ => Ok(participation.sensitivity(form)?.gamma),
            }
        }
    }
}

/// How well a unit is hidden, in units of a sensitivity that [`under`] does not exceed.
///
/// Errors: bins and rows that do not fit in memory.
pub(crate) fn hidden(
    sampling: Sampling,
    form: &dyn Representation,
    sensitivity: f64,
) -> Result<Amplification> {
    Ok(match sampling {
        Sampling::None => Amplification::None,
        Sampling::CyclicPoisson { bands, rate } => {
            Amplification::CyclicPoisson { bands, rate, rounds: form.steps().div_ceil(bands) as u64 }
        }
        Sampling::BallsInBins { bins } => {
            Amplification::BallsInBins(Arc::new(allocation(form, bins, sensitivity)?))
        }
        Sampling::ReshuffledBins { bins } => {
            Amplification::ReshuffledBins(Arc::new(reshuffled(form, bins)?.over(sensitivity)))
        }
    })
}

/// The Gram matrix of the sums of columns, each entry raised by what rounding may hide, by the same number: so it stays one.
pub(crate) fn allocation(form: &dyn Representation, bins: usize, sensitivity: f64) -> Result<Allocation> {
    let (n, rows) = (form.steps(), form.noise_rows());
    if bins > TABLE
        && let Some(mut filter) = form.as_exponentials()
    {
        filter.rows.iter_mut().for_each(|a| *a /= sensitivity);
        return Ok(Allocation::streamed(filter, bins)?.about(subject(b"dpmf bins", form, bins)));
    }
    if bins > TABLE || bins.saturating_mul(rows) > MOST {
        return Err(Error::Unsupported {
            what: format!("balls in {bins} bins over {n} steps"),
            hint: "above 2048 bins, only blt mechanisms are supported, because their columns need not be stored",
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
    Ok(Allocation::new(bins, (0..bins * bins).map(entry).collect())?.about(subject(b"dpmf bins", form, bins)))
}

/// The columns of an encoder for bins that are drawn anew.
pub(crate) fn reshuffled(form: &dyn Representation, bins: usize) -> Result<Reshuffled> {
    let n = form.steps();
    if form.noise_rows() != n {
        return Err(Error::Unsupported {
            what: format!("reshuffled bins with {} of {n} steps", form.kind()),
            hint: "its rows of noise do not correspond to steps: use banded, blt or banded-inverse mechanisms",
        });
    }
    let columns = form.encoder_columns();
    let mut column = |step: usize, out: &mut [f64]| {
        let off = columns.write(&[step], out)[0];
        // Rounding of what is zero or positive, which the distance covers.
        out.iter_mut().for_each(|x| *x = x.max(0.0));
        off
    };
    Ok(Reshuffled::new(bins, n, &mut column)?.about(subject(b"dpmf reshuffled bins", form, bins)))
}

/// A hash of the coefficients and the bins.
fn subject(scheme: &[u8], form: &dyn Representation, bins: usize) -> [u8; 32] {
    let mut hash = Sha256::new();
    let mut field = |bytes: &[u8]| {
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    field(scheme);
    field(&(bins as u64).to_le_bytes());
    field(form.kind().as_bytes());
    let mut tensors = Tensors::default();
    form.write(&mut tensors);
    tensors.fields(&mut field);
    hash.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::form::{Banded, StateSpace};

    #[test]
    fn a_sampling_covers_the_participation_that_it_means_and_no_other() {
        let form = StateSpace::independent(12).unwrap();
        let fits = |participation: &str, sampling: &str| {
            under(participation.parse().unwrap(), sampling.parse().unwrap(), &form).is_ok()
        };
        assert!(fits("epochs:3", "balls-in-bins:4") && fits("single", "balls-in-bins:12"));
        assert!(fits("min-separation:4", "cyclic-poisson:4:0.5") && fits("single", "cyclic-poisson:12:0.5"));
        // Bins as many as steps come once; whoever comes three times is not hidden by them.
        assert!(!fits("epochs:3", "balls-in-bins:12") && !fits("epochs:3", "cyclic-poisson:12:0.5"));
        assert!(!fits("single", "balls-in-bins:4") && !fits("epochs:2", "balls-in-bins:4"));
        assert!(
            !fits("epochs:3", "cyclic-poisson:4:0.5") && !fits("min-separation:3", "cyclic-poisson:4:0.5")
        );
    }

    #[test]
    fn encoders_that_a_sampling_does_not_fit_are_refused() {
        let refused = |form: &Banded, participation: &str, sampling: &str| {
            under(participation.parse().unwrap(), sampling.parse().unwrap(), form).unwrap_err().to_string()
        };
        let negative = Banded::toeplitz(&[1.0, -0.5], vec![1.0; 12]).unwrap();
        assert!(refused(&negative, "epochs:3", "balls-in-bins:4").contains("non-negative"));
        let wide = Banded::toeplitz(&[1.0, 0.5, 0.25], vec![1.0; 12]).unwrap();
        assert!(refused(&wide, "min-separation:2", "cyclic-poisson:2:0.5").contains("more than 2 diagonals"));
    }
}
