//! The fit of a filter with recalled noise to participations that are far apart, at any distances.
//!
//! A user who may return at any step from `B` later on sees all of `X_ij` with `|i − j| ≥ B`, not single diagonals, and no
//! step is special. So coefficients are the same at every step, and for the first column `c` of `C`
//!
//! ```text
//! γ² ≈ K ρ_0 + 2 Σ_{l=1}^{K−1} (K − l) max_{m ≥ lB} |ρ_m|,        ρ_m = Σ_t c_t c_{t+m},
//! ```
//!
//! with a norm of high power in the place of the maximum. What recalls are for is to make `c` end after `B` steps, about, as
//! that of a banded encoder does.

use super::shape::{Coefficients, Shape};
use crate::error::Result;
use crate::family::observed_fit::Watched;
use crate::family::toeplitz::Measure;
use rayon::prelude::*;

/// Powers of the norm, one after the other.
const POWERS: [i32; 4] = [8, 16, 32, 64];

/// Steps of the minimisation for each.
const STEPS: usize = 250;

/// Rate at which the fastest state forgets, and steps of the separation times that of the slowest.
const FASTEST: f64 = 0.6;
const SLOWEST: f64 = 3.0;

/// Coefficients of a filter that stay the same, or the gradient by them.
struct Constant {
    /// `a_0 = d, a_1, …, a_J`.
    direct: Vec<f64>,
    /// `h`.
    output: Vec<f64>,
    /// `g_0, …, g_J`, `r` numbers each.
    input: Vec<f64>,
    decay: Vec<f64>,
}

/// The fit for steps, stride, states and recalls; the participation is that of the measure.
pub(super) struct Separated<'a> {
    pub shape: Shape,
    pub times: usize,
    pub measure: &'a Measure<'a>,
}

impl Separated<'_> {
    /// The coefficients, for a sensitivity of about 1, and the loss.
    ///
    /// Cost: O(n²) an evaluation.
    ///
    /// Errors: those of the watcher.
    pub fn fit(&self, watched: &mut Watched<'_>) -> Result<(Coefficients, f64)> {
        let mut x = self.start();
        let mut value = f64::INFINITY;
        for power in POWERS {
            let found = watched.minimise(x, STEPS, |x| self.evaluate(x, power))?;
            (x, value) = (found.x, found.value);
        }
        let constant = self.decode(&x);
        let gamma = self.sensitivity_sq(&self.encoder(&constant).0, POWERS[POWERS.len() - 1]).0.sqrt();
        let Shape { order: r, recalls, .. } = self.shape;
        let mut out = Coefficients::zeros(self.shape);
        out.decay = constant.decay;
        for step in out.steps.chunks_exact_mut(self.shape.width()) {
            (0..=recalls).for_each(|j| step[self.shape.direct(j)] = gamma * constant.direct[j]);
            (0..r).for_each(|k| step[self.shape.output(k)] = gamma * constant.output[k]);
            step[1 + recalls + r..].copy_from_slice(&constant.input);
        }
        Ok((out, value.exp()))
    }

    /// Variables: `q_1 … q_J` and the excess of `q_0`, `R`, inputs over their spread, logarithms of rates.
    fn start(&self) -> Vec<f64> {
        let Shape { stride, order: r, recalls, .. } = self.shape;
        let slowest = (SLOWEST / stride as f64).min(FASTEST / 2.0);
        let rate = |k: usize| match r {
            1 => (FASTEST * slowest).sqrt(),
            _ => FASTEST * (slowest / FASTEST).powf(k as f64 / (r as f64 - 1.0)),
        };
        let total: f64 = (0..r).map(|k| rate(k).sqrt()).sum();
        let mut x = vec![0.0; recalls + 1];
        if r == 0 {
            x[0] = self.steepness();
        }
        x.extend((0..r).map(|k| -rate(k).sqrt() / (total * spread(1.0 - rate(k)))));
        x.extend(std::iter::repeat_n(1.0, r).chain(std::iter::repeat_n(0.0, r * recalls)));
        x.extend((0..r).map(|k| rate(k).ln()));
        x
    }

    fn steepness(&self) -> f64 {
        (self.shape.stride as f64).sqrt()
    }

    fn decode(&self, x: &[f64]) -> Constant {
        let Shape { order: r, recalls, .. } = self.shape;
        let (q, rest) = x.split_at(recalls + 1);
        let (remaining, rest) = rest.split_at(r);
        let (inputs, rates) = rest.split_at(r * (recalls + 1));
        let decay: Vec<f64> = rates.iter().map(|x| 1.0 - x.exp()).collect();
        let input: Vec<f64> = inputs.iter().enumerate().map(|(i, y)| y * spread(decay[i % r])).collect();
        let sent = |j: usize| (0..r).map(|k| input[j * r + k] * remaining[k]).sum::<f64>();
        Constant {
            direct: q.iter().enumerate().map(|(j, q)| q / self.steepness() - sent(j)).collect(),
            output: remaining.iter().zip(&decay).map(|(x, decay)| x * (1.0 - decay)).collect(),
            input,
            decay,
        }
    }

    /// The gradient by the variables, from that by the coefficients.
    fn pull_back(&self, x: &[f64], given: &Constant, mut slope: Constant) -> Vec<f64> {
        let Shape { order: r, recalls, .. } = self.shape;
        let (remaining, inputs) = (&x[recalls + 1..][..r], &x[recalls + 1 + r..][..r * (recalls + 1)]);
        let mut by_remaining = vec![0.0; r];
        for k in 0..r {
            by_remaining[k] += slope.output[k] * (1.0 - given.decay[k]);
            slope.decay[k] -= slope.output[k] * remaining[k];
            for j in 0..=recalls {
                by_remaining[k] -= slope.direct[j] * given.input[j * r + k];
                let by_input = slope.input[j * r + k] - slope.direct[j] * remaining[k];
                slope.decay[k] -= by_input * inputs[j * r + k] * given.decay[k] / spread(given.decay[k]);
                slope.input[j * r + k] = by_input * spread(given.decay[k]);
            }
        }
        let by_rates = slope.decay.iter().zip(&given.decay).map(|(by, decay)| -by * (1.0 - decay));
        let by_q = slope.direct.iter().map(|by| by / self.steepness());
        by_q.chain(by_remaining).chain(slope.input.iter().copied()).chain(by_rates).collect()
    }

    /// First column of `N`, and the states before each step.
    fn coloring(&self, given: &Constant) -> (Vec<f64>, Vec<f64>) {
        let Shape { steps: n, stride: b, order: r, recalls } = self.shape;
        let (mut out, mut states) = (vec![0.0; n], vec![0.0; r * (n + 1)]);
        for t in 0..n {
            let kick = (t % b == 0 && t / b <= recalls).then_some(t / b);
            let (now, next) = states[t * r..].split_at_mut(r);
            out[t] = kick.map_or(0.0, |j| given.direct[j]);
            for k in 0..r {
                out[t] += given.output[k] * now[k];
                next[k] = given.decay[k] * now[k] + kick.map_or(0.0, |j| given.input[j * r + k]);
            }
        }
        (out, states)
    }

    /// First column of `C` by feedback, and the states before each step.
    fn encoder(&self, given: &Constant) -> (Vec<f64>, Vec<f64>) {
        let Shape { steps: n, stride: b, order: r, recalls } = self.shape;
        let (mut z, mut states) = (vec![0.0; n], vec![0.0; r * (n + 1)]);
        for t in 0..n {
            let (now, next) = states[t * r..].split_at_mut(r);
            let known: f64 = given.output.iter().zip(&*now).map(|(h, x)| h * x).sum();
            let recalled: f64 = (1..=recalls.min(t / b)).map(|j| given.direct[j] * z[t - j * b]).sum();
            z[t] = (f64::from(u8::from(t == 0)) - known - recalled) / given.direct[0];
            for k in 0..r {
                let inputs = (0..=recalls.min(t / b)).map(|j| given.input[j * r + k] * z[t - j * b]);
                next[k] = given.decay[k] * now[k] + inputs.sum::<f64>();
            }
        }
        (z, states)
    }

    /// The smooth γ² of a Toeplitz encoder, and its gradient.
    fn sensitivity_sq(&self, encoder: &[f64], power: i32) -> (f64, Vec<f64>) {
        let (n, b, times) = (encoder.len(), self.shape.stride, self.times);
        let product = |m: usize| encoder[m..].iter().zip(encoder).map(|(x, y)| x * y).sum::<f64>();
        let far: Vec<f64> = (b.min(n)..n).into_par_iter().map(product).collect();
        let own = product(0);
        let mut total = times as f64 * own;
        // Weights of ρ_m, for m from b on.
        let mut weights = vec![0.0; far.len()];
        for l in 1..times {
            let seen = &far[((l - 1) * b).min(far.len())..];
            let largest = seen.iter().fold(0.0_f64, |most, x| most.max(x.abs()));
            if largest == 0.0 {
                continue;
            }
            let sum: f64 = seen.iter().map(|x| (x.abs() / largest).powi(power)).sum();
            let norm = sum.powf(1.0 / f64::from(power));
            let factor = 2.0 * (times - l) as f64;
            total += factor * largest * norm;
            for (weight, x) in weights[((l - 1) * b).min(far.len())..].iter_mut().zip(seen) {
                *weight += factor * x.signum() * (x.abs() / largest).powi(power - 1) * norm / sum;
            }
        }
        let slope = |t: usize| {
            let mut sum = 2.0 * times as f64 * encoder[t];
            // c_t stands in ρ_m beside c_{t+m} and beside c_{t−m}.
            if t + b < n {
                sum += weights.iter().zip(&encoder[t + b..]).map(|(w, c)| w * c).sum::<f64>();
            }
            if t >= b {
                sum += weights.iter().zip(encoder[..=t - b].iter().rev()).map(|(w, c)| w * c).sum::<f64>();
            }
            sum
        };
        (total, (0..n).into_par_iter().map(slope).collect())
    }

    /// `log ‖A N‖_F² + log γ²`, and its gradient by the variables.
    fn evaluate(&self, x: &[f64], power: i32) -> (f64, Vec<f64>) {
        let Shape { steps: n, stride: b, order: r, recalls } = self.shape;
        let given = self.decode(x);
        let invertible = given.direct[0] > 0.0 && given.decay.iter().all(|decay| decay.abs() < 1.0);
        if !invertible {
            return (f64::INFINITY, vec![0.0; x.len()]);
        }
        let (coloring, states) = self.coloring(&given);
        let (encoder, encoder_states) = self.encoder(&given);
        let (energy, by_coloring) = self.measure.energy(&coloring);
        let (sensitivity, by_encoder) = self.sensitivity_sq(&encoder, power);
        let mut slope = Constant {
            direct: vec![0.0; recalls + 1],
            output: vec![0.0; r],
            input: vec![0.0; r * (recalls + 1)],
            decay: vec![0.0; r],
        };
        let mut by_states = vec![0.0; r];
        for t in (0..n).rev() {
            let by_out = by_coloring[t] / energy;
            let kick = (t % b == 0 && t / b <= recalls).then_some(t / b);
            if let Some(j) = kick {
                slope.direct[j] += by_out;
                (0..r).for_each(|k| slope.input[j * r + k] += by_states[k]);
            }
            for k in 0..r {
                let state = states[t * r + k];
                slope.output[k] += by_out * state;
                slope.decay[k] += by_states[k] * state;
                by_states[k] = given.decay[k] * by_states[k] + given.output[k] * by_out;
            }
        }
        let mut by_z: Vec<f64> = by_encoder.iter().map(|x| x / sensitivity).collect();
        by_states.fill(0.0);
        for t in (0..n).rev() {
            let lags = recalls.min(t / b);
            for k in 0..r {
                for j in 0..=lags {
                    by_z[t - j * b] += by_states[k] * given.input[j * r + k];
                    slope.input[j * r + k] += by_states[k] * encoder[t - j * b];
                }
            }
            // z = (u − h x − Σ a z)/d.
            let by_sum = by_z[t] / given.direct[0];
            slope.direct[0] -= by_sum * encoder[t];
            for j in 1..=lags {
                by_z[t - j * b] -= by_sum * given.direct[j];
                slope.direct[j] -= by_sum * encoder[t - j * b];
            }
            for k in 0..r {
                let state = encoder_states[t * r + k];
                slope.decay[k] += by_states[k] * state;
                slope.output[k] -= by_sum * state;
                by_states[k] = given.decay[k] * by_states[k] - by_sum * given.output[k];
            }
        }
        (energy.ln() + sensitivity.ln(), self.pull_back(x, &given, slope))
    }
}

/// Standard deviation of the kicks that give a state unit variance.
fn spread(decay: f64) -> f64 {
    (1.0 - decay * decay).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::participation::Participation;
    use crate::problem::Problem;
    use crate::workload::{Optimizer, Workload};

    #[test]
    fn gradients_are_those_of_differences() {
        let momentum = Optimizer { momentum: 0.5, ..Default::default() };
        let rates: Vec<f64> = (0..23).map(|t| 1.0 + 0.05 * f64::from(t)).collect();
        let participation = Participation::MinSeparation { separation: 5, times: Some(3) };
        let problem = Problem::new(Workload::sgd(rates, momentum).unwrap(), participation).unwrap();
        let measure = Measure::new(&problem).unwrap();
        for (order, recalls) in [(2, 2), (1, 4), (0, 1), (2, 0)] {
            let shape = Shape { steps: 23, stride: 5, order, recalls };
            let fit = Separated { shape, times: 3, measure: &measure };
            let x: Vec<f64> =
                fit.start().iter().enumerate().map(|(i, x)| x + 0.1 * (i as f64).sin()).collect();
            let (_, gradient) = fit.evaluate(&x, 8);
            for (i, slope) in gradient.iter().enumerate() {
                let moved = |step: f64| {
                    let mut x = x.clone();
                    x[i] += step;
                    fit.evaluate(&x, 8).0
                };
                let difference = (moved(1e-5) - moved(-1e-5)) / 2e-5;
                assert!((difference - slope).abs() < 1e-7 * (1.0 + slope.abs()), "{i}: {difference} {slope}");
            }
        }
    }
}
