//! The factorization as a filter of a few states that also uses noise of earlier steps, regenerated from the key.

mod engine;
mod measure;

use crate::error::{Error, Result};
use crate::tensors::{Tensors, damaged};

pub(super) const KIND: &str = "recall";

const DIRECT: &str = "recall.direct";
const RECALLED: &str = "recall.recalled";
const OUTPUT: &str = "recall.output";
const INPUT: &str = "recall.input";
const INCREMENT: &str = "recall.increment";
const STRIDE: &str = "recall.stride";

/// A causal filter of `r` states that turns white noise `z` into gradient noise `u = N z`, with `J` earlier rows of
/// noise, `b` steps apart, that it draws again instead of keeping them:
///
/// ```text
/// u_t = d_t z_t + Σ_{j=1}^J a_{j,t} z_{t−jb} + h_tᵀ x_t,
/// x_{t+1} = x_t + E x_t + g_{0,t} z_t + Σ_{j=1}^J g_{j,t} z_{t−jb},        x_0 = 0,
/// ```
///
/// with a diagonal `E` that stays the same. Noise before the first step is zero.
///
/// Where data is seen again every `b` steps, the optimum remembers what it did to the same data before: as a filter it
/// would need `b` states, here a few and a few draws. Without states and with `b = 1`, `N` is a banded matrix.
///
/// ```
/// use dpmf::form::recall::{Parts, Recall};
/// use dpmf::Representation;
///
/// // u_t = z_t − z_{t−2}/2: no state, one regenerated row.
/// let recalled = vec![0.0, 0.0, -0.5, -0.5];
/// let parts = Parts { direct: vec![1.0; 4], recalled, ..Parts::default() };
/// let recall = Recall::from_parts(2, 0, 1, parts)?;
/// assert_eq!(recall.coloring()[(3, 1)], -0.5);
/// assert_eq!((recall.cost().buffers, recall.cost().recalls), (Some(0), Some(1)));
/// # Ok::<(), dpmf::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Recall {
    stride: usize,
    order: usize,
    recalls: usize,
    parts: Parts,
}

/// The coefficients of a [`Recall`] as flat arrays, step after step: what is stored.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Parts {
    /// `d_t`, one a step.
    pub direct: Vec<f64>,
    /// `a_{1,t}, …, a_{J,t}`, `J` a step.
    pub recalled: Vec<f64>,
    /// `h_t`, `r` a step.
    pub output: Vec<f64>,
    /// `g_{0,t}, …, g_{J,t}`, `r` numbers each, `(J + 1)r` a step.
    pub input: Vec<f64>,
    /// The diagonal of `E`, `r` in all.
    pub increment: Vec<f64>,
}

/// The coefficients of one step.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a> {
    /// `d_t > 0`.
    pub direct: f64,
    /// `a_{1,t}, …, a_{J,t}`.
    pub recalled: &'a [f64],
    /// `h_t`.
    pub output: &'a [f64],
    /// `g_{0,t}, …, g_{J,t}`, `r` numbers each.
    pub input: &'a [f64],
}

impl Recall {
    /// Puts coefficients together: noise that is `stride, 2·stride, …, recalls·stride` steps old, and `order` states.
    ///
    /// Errors: no steps, a stride of zero, lengths that do not fit `direct.len()` steps, entries that are not finite,
    /// `d_t ≤ 0`, a coefficient of noise before the first step that is not zero.
    pub fn from_parts(stride: usize, order: usize, recalls: usize, parts: Parts) -> Result<Self> {
        let n = parts.direct.len();
        if n == 0 {
            return Err(Error::argument("steps", 0, "at least one step is needed"));
        }
        if stride == 0 {
            return Err(Error::argument("stride", 0, "recalled noise is at least one step old"));
        }
        let too_large = || Error::argument("order", order, "all coefficients must fit the address space");
        let times = |a: usize, b: usize| a.checked_mul(b).ok_or_else(too_large);
        let rows = recalls.checked_add(1).ok_or_else(too_large)?;
        for (name, values, expected) in [
            ("recalled coefficients", &parts.recalled, times(n, recalls)?),
            ("output coefficients", &parts.output, times(n, order)?),
            ("input coefficients", &parts.input, times(times(n, order)?, rows)?),
            ("increment coefficients", &parts.increment, order),
        ] {
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
        let recall = Self { stride, order, recalls, parts };
        for t in 0..n {
            let step = recall.step(t);
            let rule = "noise before the first step is zero, and so must be its coefficients";
            let place = |values: &[f64], first: usize| {
                values[first.min(values.len())..].iter().position(|x| *x != 0.0).map(|k| first + k)
            };
            let known = recall.known(t);
            if let Some(k) = place(step.recalled, known) {
                let (name, index) = ("recalled coefficients", t * recalls + k);
                return Err(Error::InvalidEntry { name, index, value: step.recalled[k], rule });
            }
            if let Some(k) = place(step.input, (known + 1) * order) {
                let (name, index) = ("input coefficients", t * order * rows + k);
                return Err(Error::InvalidEntry { name, index, value: step.input[k], rule });
            }
        }
        Ok(recall)
    }

    /// The coefficients, for storage.
    pub fn parts(&self) -> &Parts {
        &self.parts
    }

    /// Distance `b` of recalled rows, in steps.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// Number of states `r`.
    pub fn order(&self) -> usize {
        self.order
    }

    /// Number of recalled rows `J`.
    pub fn recalls(&self) -> usize {
        self.recalls
    }

    /// The coefficients of step `t`.
    pub fn step(&self, t: usize) -> Step<'_> {
        let (r, j) = (self.order, self.recalls);
        Step {
            direct: self.parts.direct[t],
            recalled: &self.parts.recalled[t * j..][..j],
            output: &self.parts.output[t * r..][..r],
            input: &self.parts.input[t * r * (j + 1)..][..r * (j + 1)],
        }
    }

    /// How many of the recalled rows lie within the steps, at step `t`.
    fn known(&self, t: usize) -> usize {
        self.recalls.min(t / self.stride)
    }

    /// The filter whose coefficients are the nearest f32 numbers.
    ///
    /// Errors: a coefficient that leaves the range of f32.
    pub fn rounded(&self) -> Result<Self> {
        let Parts { direct, recalled, output, input, increment } = &self.parts;
        let round = |values: &[f64]| values.iter().map(|&x| f64::from(x as f32)).collect();
        let parts = Parts {
            direct: round(direct),
            recalled: round(recalled),
            output: round(output),
            input: round(input),
            increment: round(increment),
        };
        Self::from_parts(self.stride, self.order, self.recalls, parts)
    }

    pub(super) fn read(n: usize, tensors: &mut Tensors) -> Result<Self> {
        let stride = tensors.take(STRIDE, &[Some(1)])?.1[0];
        if !(stride >= 1.0 && stride < 2_f64.powi(53) && stride.fract() == 0.0) {
            return Err(damaged(format!("{stride} is not a valid number of steps")));
        }
        let (shape, recalled) = tensors.take(RECALLED, &[Some(n), None])?;
        let recalls = shape[1];
        let (shape, output) = tensors.take(OUTPUT, &[Some(n), None])?;
        let order = shape[1];
        let rows =
            recalls.checked_add(1).ok_or_else(|| damaged(format!("{recalls} recalls are too many")))?;
        let parts = Parts {
            direct: tensors.take(DIRECT, &[Some(n)])?.1,
            recalled,
            output,
            input: tensors.take(INPUT, &[Some(n), Some(rows), Some(order)])?.1,
            increment: tensors.take(INCREMENT, &[Some(order)])?.1,
        };
        Self::from_parts(stride as usize, order, recalls, parts)
    }

    fn write(&self, tensors: &mut Tensors) {
        let (n, r, j, parts) = (self.parts.direct.len(), self.order, self.recalls, &self.parts);
        tensors.put_f64(STRIDE, &[1], [self.stride as f64]);
        tensors.put_f32(DIRECT, &[n], parts.direct.iter().copied());
        tensors.put_f32(RECALLED, &[n, j], parts.recalled.iter().copied());
        tensors.put_f32(OUTPUT, &[n, r], parts.output.iter().copied());
        tensors.put_f32(INPUT, &[n, j + 1, r], parts.input.iter().copied());
        tensors.put_f32(INCREMENT, &[r], parts.increment.iter().copied());
    }
}

#[cfg(test)]
mod tests;
