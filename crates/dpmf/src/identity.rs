//! The identity of a mechanism, to which its noise is bound: a hash of everything that determines the noise, and of nothing else.

use crate::form::{Form, Representation};
use crate::participation::{Participation, Sampling};
use crate::tensors::Tensors;
use crate::workload::{Average, Workload};
use sha2::{Digest, Sha256};
use std::fmt;

/// Version of the layout below; a change of it is a new version, and other noise.
pub const IDENTITY_FORMAT: u32 = 1;

/// A name for all mechanisms that make the same noise: part of the key of every stream.
///
/// SHA-256 over fields, each after its length as a `u64`, little endian:
///
/// 1. `"dpmf identity"` and the version;
/// 2. the number of steps;
/// 3. the kind of the form, then name, type, shape and content of its tensors in the order of names;
/// 4. the workload: 1, momentum, Nesterov, weight decay, coupled, the average and its parameter, the step sizes; or 2
///    and the rows of its matrix up to the diagonal;
/// 5. the participation: its number, the times, the separation, zero where there is none;
/// 6. the sampling: its number and parameters;
/// 7. the noise: nothing for unit noise; or the multiplier σ, the sensitivity γ and the clip ζ;
/// 8. the grid that releases are rounded to: nothing, as they are f32 numbers.
///
/// No word that is written for people is in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Identity(pub [u8; 32]);

impl Identity {
    /// The identity of a mechanism; `noise` is σ, γ and ζ, or nothing for unit noise.
    pub(crate) fn new(
        workload: &Workload,
        form: &Form,
        participation: Participation,
        sampling: Sampling,
        noise: Option<[f64; 3]>,
    ) -> Self {
        let mut hash = Sha256::new();
        let mut field = |bytes: &[u8]| {
            hash.update((bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        field(b"dpmf identity");
        field(&IDENTITY_FORMAT.to_le_bytes());
        field(&(workload.steps() as u64).to_le_bytes());

        field(form.kind().as_bytes());
        let mut tensors = Tensors::default();
        form.write(&mut tensors);
        tensors.fields(&mut field);

        match workload.optimizer() {
            Some((optimizer, learning_rates)) => {
                let (average, parameter) = match optimizer.average {
                    Average::None => (0, 0.0),
                    Average::Uniform => (1, 0.0),
                    Average::Ema(alpha) => (2, alpha),
                };
                field(&[1, optimizer.nesterov.into(), optimizer.coupled.into(), average]);
                field(&numbers(&[optimizer.momentum, optimizer.weight_decay, parameter]));
                field(&numbers(learning_rates));
            }
            None => {
                field(&[2]);
                let a = workload.to_dense();
                for i in 0..a.nrows() {
                    field(&numbers(&(0..=i).map(|j| a[(i, j)]).collect::<Vec<_>>()));
                }
            }
        }

        let (kind, parameters) = participation.code();
        field(&[kind]);
        field(&counts(&parameters));
        let (kind, count, rate) = sampling.code();
        field(&[kind]);
        field(&counts(&[count]));
        field(&numbers(&[rate]));

        field(&noise.map_or_else(Vec::new, |noise| numbers(&noise)));
        field(&[]);
        Self(hash.finalize().into())
    }
}

fn numbers(values: &[f64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn counts(values: &[usize]) -> Vec<u8> {
    values.iter().flat_map(|&value| (value as u64).to_le_bytes()).collect()
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&crate::tensors::hex(&self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::form::StateSpace;

    /// Also those that no mechanism covers yet: each has an identity of its own.
    #[test]
    fn participation_sampling_and_scale_are_told_apart() {
        let (workload, form) =
            (Workload::prefix_sum(8).unwrap(), Form::StateSpace(StateSpace::independent(8).unwrap()));
        let of = |participation: &str, sampling: &str, noise| {
            let (participation, sampling) = (participation.parse().unwrap(), sampling.parse().unwrap());
            Identity::new(&workload, &form, participation, sampling, noise)
        };
        let all = [
            of("single", "none", None),
            of("epochs:1", "none", None),
            of("epochs:2", "none", None),
            of("min-separation:2", "none", None),
            of("min-separation:2:1", "none", None),
            of("min-separation:1:2", "none", None),
            of("single", "cyclic-poisson:1:0.5", None),
            of("single", "cyclic-poisson:1:0.25", None),
            of("single", "cyclic-poisson:2:0.5", None),
            of("single", "balls-in-bins:1", None),
            of("single", "balls-in-bins:2", None),
            of("single", "none", Some([1.0, 1.0, 2.0])),
            of("single", "none", Some([1.0, 2.0, 1.0])),
            of("single", "none", Some([2.0, 1.0, 1.0])),
        ];
        for (i, identity) in all.iter().enumerate() {
            assert!(!all[..i].contains(identity), "{i}");
        }
    }
}
