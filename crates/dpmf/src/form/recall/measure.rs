//! Sensitivity and loss of the filter, for the coefficients it has.

use super::engine::RecallEngine;
use super::{KIND, Recall};
use crate::engine::Engine;
use crate::engine::exact::program::Program;
use crate::error::Result;
use crate::form::verified::{Columns, LANES, Lanes, Simulated, Verified};
use crate::form::{Cost, EncoderColumns, Form, Representation, Rows};
use crate::tensors::Tensors;
use faer::Mat;

impl Simulated for Recall {
    fn steps(&self) -> usize {
        self.parts.direct.len()
    }

    /// By feedback, `z_t = (u_t − Σ_j a_{j,t} z_{t−jb} − h_tᵀx_t)/d_t`.
    ///
    /// The residual bounds `|u − N z|` for the `z` that was computed: in each sum every term is off by the roundings of
    /// the sum, and the states by `drift`, which follows the recursion of their own errors.
    fn columns(&self, steps: [usize; LANES]) -> Verified {
        let (n, r, first) = (self.parts.direct.len(), self.order, steps[0]);
        let (mut z, mut residual_sq) = (vec![[0.0; LANES]; n - first], [0.0; LANES]);
        let (mut state, mut drift) = (vec![[0.0; LANES]; r], vec![[0.0; LANES]; r]);
        // Products and sums of J + r + 2 terms, the quotient, and as much again for the sizes themselves.
        let unit = (2 * (self.recalls + r) + 16) as f64 * f64::EPSILON;
        for t in first..n {
            let step = self.step(t);
            let mut known: Lanes = [0.0; LANES];
            let mut size: Lanes = [0.0; LANES];
            let mut hidden: Lanes = [0.0; LANES];
            for (&h, (x, e)) in step.output.iter().zip(state.iter().zip(&drift)) {
                for l in 0..LANES {
                    known[l] += h * x[l];
                    size[l] += (h * x[l]).abs();
                    hidden[l] += h.abs() * e[l];
                }
            }
            let lags = (1..=self.known(t)).map(|j| (j, t - j * self.stride)).filter(|(_, s)| *s >= first);
            for (j, s) in lags.clone() {
                let (a, past) = (step.recalled[j - 1], &z[s - first]);
                for l in 0..LANES {
                    known[l] += a * past[l];
                    size[l] += (a * past[l]).abs();
                }
            }
            let mut own: Lanes = [0.0; LANES];
            for l in 0..LANES {
                let u = if t == steps[l] { 1.0 } else { 0.0 };
                own[l] = (u - known[l]) / step.direct;
                let bound = (unit * (size[l] + u) + hidden[l]) * (1.0 + unit);
                residual_sq[l] += bound * bound;
            }
            z[t - first] = own;
            for k in 0..r {
                let (increment, x, e) = (self.parts.increment[k], &mut state[k], &mut drift[k]);
                let decay = 1.0 + increment;
                let mut size: Lanes = [0.0; LANES];
                for l in 0..LANES {
                    size[l] = (decay.abs() + increment.abs()) * x[l].abs() + (step.input[k] * own[l]).abs();
                    x[l] += increment * x[l] + step.input[k] * own[l];
                }
                for (j, s) in lags.clone() {
                    let (g, past) = (step.input[j * r + k], &z[s - first]);
                    for l in 0..LANES {
                        size[l] += (g * past[l]).abs();
                        x[l] += g * past[l];
                    }
                }
                let decay = decay.abs() * (1.0 + 4.0 * f64::EPSILON);
                for l in 0..LANES {
                    e[l] = (decay * e[l] + unit * size[l]) * (1.0 + 4.0 * f64::EPSILON);
                }
            }
        }
        Verified { z, residual_sq }
    }
}

impl Representation for Recall {
    fn kind(&self) -> &'static str {
        KIND
    }

    fn steps(&self) -> usize {
        self.parts.direct.len()
    }

    fn coloring_rows(&self) -> Rows<'_> {
        let (n, r) = (self.parts.direct.len(), self.order);
        let mut states = vec![0.0; r * n];
        let mut t = 0;
        Box::new(move |out| {
            let step = self.step(t);
            let lags = (0..=self.known(t)).map(|j| (j, t - j * self.stride));
            for (k, state) in states.chunks_exact_mut(n).enumerate() {
                let (h, decay) = (step.output[k], 1.0 + self.parts.increment[k]);
                for (out, x) in out.iter_mut().zip(&mut state[..t]) {
                    *out += h * *x;
                    *x *= decay;
                }
                lags.clone().for_each(|(j, s)| state[s] += step.input[j * r + k]);
            }
            out[t] += step.direct;
            lags.skip(1).for_each(|(j, s)| out[s] += step.recalled[j - 1]);
            t += 1;
        })
    }

    /// Cost: O(n²(r + 1)(J + 1)).
    fn encoder(&self) -> Mat<f64> {
        let n = self.parts.direct.len();
        let mut encoder = Mat::zeros(n, n);
        for first in (0..n).step_by(LANES) {
            let steps = std::array::from_fn(|l| (first + l).min(n - 1));
            for (t, z) in (first..n).zip(self.columns(steps).z) {
                (first..n.min(first + LANES)).for_each(|j| encoder[(t, j)] = z[j - first]);
            }
        }
        encoder
    }

    /// Guarantee: ≥ the exact values, for any coefficients: a bound on the residual says what rounding hides; infinite
    /// where nothing is known.
    /// Cost: O(n²(r + 1)(J + 1)), in threads.
    fn encoder_column_norms_sq(&self) -> Vec<f64> {
        Columns::new(self).norms_sq()
    }

    /// Cost: that of the column norms here, and O(n(r + 1)(J + 1)) for each column.
    fn encoder_bands(&self) -> usize {
        if self.order() == 0 && self.parts().recalled.iter().all(|x| *x == 0.0) {
            1
        } else {
            Representation::steps(self)
        }
    }

    /// The inverse of a matrix with no positive number off its diagonal.
    fn encoder_is_nonnegative(&self) -> bool {
        self.order() == 0 && self.parts().recalled.iter().all(|x| *x <= 0.0)
    }

    fn encoder_columns(&self) -> Box<dyn EncoderColumns + '_> {
        Box::new(Columns::new(self))
    }

    /// Work: `u` takes a multiply-add of every row and state, a state one of every row and its own.
    fn cost(&self) -> Cost {
        let (n, r, b) = (self.parts.direct.len(), self.order, self.stride);
        let recalled: usize = (1..=self.recalls).map(|j| n.saturating_sub(j.saturating_mul(b))).sum();
        let work = (1 + 3 * r) as f64 + (recalled * (r + 1)) as f64 / n as f64;
        Cost { recalls: Some(self.known(n - 1)), ..Cost::stream(r, work) }
    }

    fn deployed(&self) -> Result<Form> {
        Ok(Form::Recall(self.rounded()?))
    }

    fn engine(&self, _: usize) -> Result<Box<dyn Engine>> {
        Ok(Box::new(RecallEngine::new(self)?))
    }

    fn program(&self, _: usize) -> Result<Box<dyn Program>> {
        Ok(Box::new(RecallEngine::new(self)?))
    }

    fn write(&self, tensors: &mut Tensors) {
        self.write(tensors);
    }
}
