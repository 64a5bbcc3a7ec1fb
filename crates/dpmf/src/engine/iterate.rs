//! From gradient noise to iterate noise: the optimizer's own recurrence.

use super::{PACKET, Packet};
use crate::error::{Error, Result};
use crate::linalg::banded::LowerBanded;
use crate::simd::dispatch;
use crate::workload::Workload;

/// Turns the rows of `u = N Z` into those of `ψ = A u`, `A = P⁻¹R`:
/// `ψ_i = (Σ_k R_{i,i−k} u_{i−k} − Σ_{k≥1} P_{i,i−k} ψ_{i−k}) / P_ii`.
///
/// The state holds the backward differences `ψ, ∇ψ, …, ∇^{w−1}ψ` in place of the last `w` outputs: the poles
/// of an optimizer lie at 1 or near it, where single precision would cancel outputs against each other and
/// move the poles. Past inputs follow, as far as `R` reaches.
///
/// This is post-processing: its rounding costs no privacy.
#[derive(Clone, Debug)]
pub(crate) struct IterateStage {
    left: LowerBanded,
    right: Option<LowerBanded>,
}

impl IterateStage {
    /// The recurrence of a workload.
    ///
    /// Errors: [`Error::Unsupported`] for a dense workload, which has none.
    pub fn new(workload: &Workload) -> Result<Self> {
        match workload.recurrence() {
            Some(recurrence) => Ok(Self { left: recurrence.left.clone(), right: recurrence.right.clone() }),
            None => Err(Error::Unsupported {
                what: "iterate noise of a dense workload".into(),
                hint: "a dense workload has no recurrence; apply its matrix to the gradient noise",
            }),
        }
    }

    /// Model-sized buffers beside those of the engine.
    pub fn buffers(&self) -> usize {
        self.left.bandwidth() + self.reach()
    }

    fn reach(&self) -> usize {
        self.right.as_ref().map_or(0, LowerBanded::bandwidth)
    }

    /// Replaces a tile of `u_i` by `ψ_i` and moves the state on.
    pub(super) fn run(&self, i: usize, state: &mut [Packet], noise: &mut [Packet]) {
        let (left, right) = (self.left.row(i), self.right.as_ref().map(|r| r.row(i)));
        let (orders, inputs) = (self.left.bandwidth(), self.reach());
        let own = (right.map_or(1.0, |r| r[0]) / left[0]) as f32;
        if orders + inputs == 0 {
            noise.as_flattened_mut().iter_mut().for_each(|u| *u *= own);
            return;
        }
        // ψ_{i−k} = Σ_j (−1)^j binom(k − 1, j) ∇^jψ_{i−1}, and ∇^{w−1}ψ_i = ψ_i − Σ_{j<w−1} ∇^jψ_{i−1}.
        let mut weights: Vec<f64> = (0..orders).map(|j| if j + 1 < orders { -1.0 } else { 0.0 }).collect();
        for k in 1..=orders.min(i) {
            let mut factor = -left[k] / left[0];
            for j in 0..k {
                weights[j] += factor;
                factor *= -((k - 1 - j) as f64) / (j + 1) as f64;
            }
        }
        let mut terms: Vec<(usize, f32)> = weights.iter().map(|&x| x as f32).enumerate().collect();
        // Slot i mod reach holds u_{i−reach} until u_i takes its place.
        if let Some(right) = right {
            terms.extend(
                (1..=inputs.min(i)).map(|k| (orders + (i - k) % inputs, (right[k] / left[0]) as f32)),
            );
        }
        let input = (inputs > 0).then(|| orders + i % inputs);
        apply(&RecurrenceStep { own, terms, orders, input }, orders + inputs, state, noise);
    }
}

struct RecurrenceStep {
    own: f32,
    /// Buffers and their weights.
    terms: Vec<(usize, f32)>,
    /// Number of differences.
    orders: usize,
    /// Buffer that takes the input.
    input: Option<usize>,
}

#[inline(always)]
fn apply_any(step: &RecurrenceStep, buffers: usize, state: &mut [Packet], noise: &mut [Packet]) {
    for (state, noise) in state.chunks_exact_mut(buffers).zip(noise) {
        let mut sum = noise.map(|u| step.own * u);
        for &(buffer, weight) in &step.terms {
            for l in 0..PACKET {
                sum[l] += weight * state[buffer][l];
            }
        }
        if let Some(input) = step.input {
            state[input] = *noise;
        }
        if let Some((highest, lower)) = state[..step.orders].split_last_mut() {
            *highest = sum;
            for difference in lower.iter_mut().rev() {
                for l in 0..PACKET {
                    sum[l] += difference[l];
                }
                *difference = sum;
            }
        }
        *noise = sum;
    }
}

dispatch! {
    fn apply / apply_portable / apply_avx2 = apply_any(
        step: &RecurrenceStep, buffers: usize, state: &mut [Packet], noise: &mut [Packet]
    );
}
