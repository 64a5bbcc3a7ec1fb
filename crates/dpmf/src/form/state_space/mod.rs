//! The factorization as a time-varying filter of low order.

mod deploy;
mod engine;
mod measure;
mod responses;

use crate::error::{Error, Result};
use crate::tensors::{Tensors, damaged};

pub(super) const KIND: &str = "state-space";

const DIRECT: &str = "state_space.direct";
const OUTPUT: &str = "state_space.output";
const INPUT: &str = "state_space.input";
const INCREMENT: &str = "state_space.increment";

/// A causal filter of `r` states that turns white noise `z` into gradient noise `u = N z`:
///
/// ```text
/// u_i = d_i z_i + h_iᵀ s_i,        s_{i+1} = s_i + E_i s_i + g_i z_i,        s_0 = 0,
/// ```
///
/// with upper triangular `E_i`. Its inverse, the encoder `C`, is a filter of the same order.
///
/// Increments `E = F − 1` in place of transitions `F` keep the rates of slow states, `1 − F ≈ 1/n`, to full
/// relative precision in f32; the triangle halves the work of a step and lets it run in place, first state
/// first.
///
/// ```
/// use dpmf::factorize::{Options, Order, Solver, optimal};
/// use dpmf::form::StateSpace;
/// use dpmf::{Representation, Workload};
/// use std::ops::ControlFlow;
///
/// let workload = Workload::prefix_sum(256)?;
/// let optimum = optimal(&workload, Solver::Auto, &Options::default(), &mut |_| ControlFlow::Continue(()))?;
/// let recurrence = workload.recurrence().expect("a prefix sum is a recurrence");
/// let filter = StateSpace::truncated(recurrence, optimum.dual.v(), Order::Fixed(4))?;
/// let loss: f64 = filter.decoder_row_norms_sq(&workload).iter().sum();
/// assert!(filter.encoder_column_norms_sq().iter().all(|&norm_sq| norm_sq <= 1.0));
/// assert!((loss / optimum.certificate.lower_bound).sqrt() < 1.00001);
/// # Ok::<(), dpmf::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct StateSpace {
    order: usize,
    parts: Parts,
}

/// The coefficients of a [`StateSpace`] as flat arrays, step after step: what is stored.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Parts {
    /// `d_i`, one a step.
    pub direct: Vec<f64>,
    /// `h_i`, `r` a step.
    pub output: Vec<f64>,
    /// `g_i`, `r` a step.
    pub input: Vec<f64>,
    /// `E_i`, the rows of its upper triangle, `r(r + 1)/2` a step.
    pub increment: Vec<f64>,
}

/// The coefficients of one step.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a> {
    /// `d_i > 0`.
    pub direct: f64,
    /// `h_i`.
    pub output: &'a [f64],
    /// `g_i`.
    pub input: &'a [f64],
    /// The rows of the upper triangle of `E_i`, one after the other.
    pub increment: &'a [f64],
}

impl StateSpace {
    /// Independent noise, `N = C = I`: the filter of no states, the mechanism of DP-SGD.
    ///
    /// Errors: no steps.
    pub fn independent(steps: usize) -> Result<Self> {
        Self::from_parts(0, Parts { direct: vec![1.0; steps], ..Default::default() })
    }

    /// Puts coefficients together.
    ///
    /// Errors: lengths that do not fit `direct.len()` steps of `order` states, no steps, entries that are not
    /// finite, `d_i ≤ 0`.
    pub fn from_parts(order: usize, parts: Parts) -> Result<Self> {
        let n = parts.direct.len();
        if n == 0 {
            return Err(Error::argument("steps", 0, "at least one step is needed"));
        }
        let too_large = || Error::argument("order", order, "all coefficients must fit the address space");
        let vector = n.checked_mul(order).ok_or_else(too_large)?;
        let triangles =
            vector.checked_mul(order).and_then(|x| x.checked_add(vector)).ok_or_else(too_large)? / 2;
        let lengths = [
            ("output coefficients", &parts.output, vector),
            ("input coefficients", &parts.input, vector),
            ("increment coefficients", &parts.increment, triangles),
        ];
        for (name, values, expected) in lengths {
            if values.len() != expected {
                return Err(Error::WrongLength { name, actual: values.len(), expected });
            }
            if let Some((index, &value)) = values.iter().enumerate().find(|(_, x)| !x.is_finite()) {
                return Err(Error::InvalidEntry { name, index, value, rule: "it must be finite" });
            }
        }
        let bad = parts.direct.iter().enumerate().find(|(_, d)| !(**d > 0.0 && d.is_finite()));
        if let Some((index, &value)) = bad {
            let rule = "it must be positive and finite";
            return Err(Error::InvalidEntry { name: "direct coefficients", index, value, rule });
        }
        Ok(Self { order, parts })
    }

    /// The coefficients, for storage.
    pub fn parts(&self) -> &Parts {
        &self.parts
    }

    /// Number of states `r`.
    pub fn order(&self) -> usize {
        self.order
    }

    /// The coefficients of step `i`.
    pub fn step(&self, i: usize) -> Step<'_> {
        let (r, t) = (self.order, triangle(self.order));
        Step {
            direct: self.parts.direct[i],
            output: &self.parts.output[i * r..][..r],
            input: &self.parts.input[i * r..][..r],
            increment: &self.parts.increment[i * t..][..t],
        }
    }

    /// The filter whose coefficients are the nearest f32 numbers.
    ///
    /// Errors: a coefficient that leaves the range of f32.
    pub fn rounded(&self) -> Result<Self> {
        let Parts { direct, output, input, increment } = &self.parts;
        let round = |values: &[f64]| values.iter().map(|&x| f64::from(x as f32)).collect();
        let parts = Parts {
            direct: round(direct),
            output: round(output),
            input: round(input),
            increment: round(increment),
        };
        Self::from_parts(self.order, parts)
    }

    pub(super) fn read(n: usize, tensors: &mut Tensors) -> Result<Self> {
        let (shape, output) = tensors.take(OUTPUT, &[Some(n), None])?;
        let order = shape[1];
        let triangle = order.checked_mul(order.saturating_add(1)).map(|twice| twice / 2);
        let triangle = triangle.ok_or_else(|| damaged(format!("{order} states are too many")))?;
        let parts = Parts {
            direct: tensors.take(DIRECT, &[Some(n)])?.1,
            output,
            input: tensors.take(INPUT, &[Some(n), Some(order)])?.1,
            increment: tensors.take(INCREMENT, &[Some(n), Some(triangle)])?.1,
        };
        Self::from_parts(order, parts)
    }

    fn write(&self, tensors: &mut Tensors) {
        let (n, r, parts) = (self.parts.direct.len(), self.order, &self.parts);
        tensors.put_f32(DIRECT, &[n], parts.direct.iter().copied());
        tensors.put_f32(OUTPUT, &[n, r], parts.output.iter().copied());
        tensors.put_f32(INPUT, &[n, r], parts.input.iter().copied());
        tensors.put_f32(INCREMENT, &[n, triangle(r)], parts.increment.iter().copied());
    }
}

/// Numbers in the upper triangle of an `r × r` matrix.
pub(crate) fn triangle(r: usize) -> usize {
    r * (r + 1) / 2
}

/// The rows of a packed upper triangle: `(k, entries (k, k), (k, k + 1), …)`.
fn triangle_rows(packed: &[f64], r: usize) -> impl Iterator<Item = (usize, &[f64])> {
    (0..r).map(move |k| (k, &packed[k * r - k * k.saturating_sub(1) / 2..][..r - k]))
}

impl Step<'_> {
    /// `S ← S + E S + g zᵀ`, in place, for states that are the rows of `S`.
    fn advance(&self, states: &mut [f64], columns: usize) {
        let r = self.input.len();
        for (k, row) in triangle_rows(self.increment, r) {
            // Rows below k still hold the old state.
            let (head, tail) = states.split_at_mut((k + 1) * columns);
            let target = &mut head[k * columns..];
            target.iter_mut().for_each(|t| *t += row[0] * *t);
            for (e, source) in row[1..].iter().zip(tail.chunks_exact(columns)) {
                target.iter_mut().zip(source).for_each(|(t, s)| *t += e * s);
            }
        }
    }

    /// The transition of the inverse filter, `1 + E − g hᵀ/d`, and the sizes of what was summed.
    fn inverse_transition(&self, f: &mut [f64], size: &mut [f64]) {
        let r = self.input.len();
        for k in 0..r {
            for l in 0..r {
                let x = self.input[k] * self.output[l] / self.direct;
                f[k * r + l] = -x;
                size[k * r + l] = x.abs();
            }
        }
        for (k, row) in triangle_rows(self.increment, r) {
            for (l, &e) in (k..r).zip(row) {
                let open = if k == l { 1.0 + e } else { e };
                f[k * r + l] += open;
                size[k * r + l] += open.abs();
            }
        }
    }
}

#[cfg(test)]
mod tests;
