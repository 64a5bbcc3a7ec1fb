//! The factorization as a time-varying filter of low order.

mod assemble;
mod balance;
mod innovations;
mod modes;
mod plant;
mod processes;
mod truncate;

pub use truncate::Order;

use super::{Cost, Representation, Rows};
use crate::error::{Error, Result};
use crate::linalg::gramian::Energy;
use crate::workload::{Recurrence, Workload};
use faer::Mat;
use plant::{Plant, PlantStep};

/// A causal filter of `r` states that turns white noise `z` into gradient noise `u = N z`:
///
/// ```text
/// u_i = d_i z_i + h_iᵀ s_i,        s_{i+1} = s_i + E_i s_i + g_i z_i,        s_0 = 0,
/// ```
///
/// with upper triangular `E_i`. Its inverse, the encoder `C`, is a filter of the same order.
///
/// Increments `E = F − 1` in place of transitions `F` keep the rates of slow states, `1 − F ≈ 1/n`, to full relative
/// precision in f32; the triangle halves the work of a step and lets it run in place, first state first.
///
/// Reference: §4 of `DESIGN.md`.
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
    /// The optimal factorization for the dual variable `v`, not truncated, up to a relative error `tolerance` in
    /// `X(v)`.
    ///
    /// `N Nᵀ = X(v)⁻¹` with `X = D^{-1/2}(D^{1/2}AᵀAD^{1/2})^{1/2}D^{-1/2}`. The order, some tens, is the number of terms of
    /// the rational square root times the order of the workload: of use as a reference, not for streaming.
    ///
    /// Cost: O(n·order³).
    /// Errors: `v` not positive and finite or not of length `n`; `tolerance` outside `(0, 1)`.
    pub fn optimal(recurrence: &Recurrence, v: &[f64], tolerance: f64) -> Result<Self> {
        truncate::optimal(recurrence, v, tolerance)
    }

    /// The factorization for the dual variable `v`, truncated to few states, as it is deployed: coefficients on the
    /// f32 grid, all column norms of the encoder equal to 1 before that rounding.
    ///
    /// Loss and sensitivity are those of the result, asked of it like of any other factorization.
    ///
    /// Cost: O(n·k²r) with `k` the order of [`StateSpace::optimal`]; the memory of the result and O(√n·k²) more.
    /// Errors: `v` not positive and finite or not of length `n`; [`Error::NotConverged`] when no order up to the
    /// given maximum reaches the tolerance.
    pub fn truncated(recurrence: &Recurrence, v: &[f64], order: Order) -> Result<Self> {
        truncate::truncated(recurrence, v, order)
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
        let lengths = [
            ("output coefficients", &parts.output, order),
            ("input coefficients", &parts.input, order),
            ("increment coefficients", &parts.increment, triangle(order)),
        ];
        for (name, values, per_step) in lengths {
            let expected = n.checked_mul(per_step).ok_or_else(|| {
                Error::argument("order", order, "steps times coefficients must fit the address space")
            })?;
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
    pub fn rounded(&self) -> Self {
        let mut result = self.clone();
        result.round();
        result
    }

    fn round(&mut self) {
        let Parts { direct, output, input, increment } = &mut self.parts;
        for values in [direct, output, input, increment] {
            values.iter_mut().for_each(|x| *x = f64::from(*x as f32));
        }
    }

    /// Scales the columns of the encoder to norm 1, `C ← C·E`, by scaling the rows of `N`.
    ///
    /// At the optimum the loss is stationary under every change of `X` that keeps its diagonal, so after this the
    /// loss differs from the optimum only in second order of what truncation and quadrature did to `X`.
    fn equalise(&mut self) {
        let r = self.order;
        for (i, norm_sq) in self.encoder_column_norms_sq().into_iter().enumerate() {
            let scale = norm_sq.sqrt();
            self.parts.direct[i] *= scale;
            self.parts.output[i * r..][..r].iter_mut().for_each(|h| *h *= scale);
        }
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

impl Representation for StateSpace {
    fn steps(&self) -> usize {
        self.parts.direct.len()
    }

    fn coloring_rows(&self) -> Rows<'_> {
        let n = self.steps();
        let mut states = vec![0.0; self.order * n];
        let mut i = 0;
        Box::new(move |out| {
            let step = self.step(i);
            for (h, state) in step.output.iter().zip(states.chunks_exact(n)) {
                out.iter_mut().zip(state).for_each(|(o, s)| *o += h * s);
            }
            out[i] += step.direct;
            step.advance(&mut states, n);
            for (g, state) in step.input.iter().zip(states.chunks_exact_mut(n)) {
                state[i] += g;
            }
            i += 1;
        })
    }

    /// Runs the inverse filter over the unit vectors: `z = (u − hᵀs)/d`. Cost: O(n²r²).
    fn encoder(&self) -> Mat<f64> {
        let n = self.steps();
        let mut encoder = Mat::zeros(n, n);
        for j in 0..n {
            let column = encoder.col_as_slice_mut(j);
            let mut state = vec![0.0; self.order];
            for i in j..n {
                let step = self.step(i);
                let known: f64 = step.output.iter().zip(&state).map(|(h, s)| h * s).sum();
                let z = (f64::from(u8::from(i == j)) - known) / step.direct;
                column[i] = z;
                step.advance(&mut state, 1);
                state.iter_mut().zip(step.input).for_each(|(s, g)| *s += g * z);
            }
        }
        encoder
    }

    /// Guarantee: at least the exact squared norms of the columns of `C = N⁻¹` for the coefficients as they are;
    /// a backward recursion for the energy of the inverse filter, with a bound on its rounding added.
    /// Cost: O(n·r³).
    fn encoder_column_norms_sq(&self) -> Vec<f64> {
        let r = self.order;
        let mut energy = Energy::new(r);
        let (mut f, mut size) = (vec![0.0; r * r], vec![0.0; r * r]);
        let mut h = vec![0.0; r];
        let mut norms = vec![0.0; self.steps()];
        for (i, norm) in norms.iter_mut().enumerate().rev() {
            let step = self.step(i);
            let (d, up) = (step.direct, 1.0 + 4.0 * f64::EPSILON);
            *norm = (1.0 + energy.of(step.input)) / (d * d) * up;
            step.inverse_transition(&mut f, &mut size);
            h.iter_mut().zip(step.output).for_each(|(h, o)| *h = o / d);
            energy.pull_back(&f, &size, &h);
        }
        norms
    }

    /// A forward recursion for the covariance of the filter's state and the workload's together.
    /// Cost: O(n(r + w)³), or that of the dense rows for a dense workload.
    fn decoder_row_norms_sq(&self, workload: &Workload) -> Vec<f64> {
        match workload.recurrence() {
            Some(recurrence) => self.row_norms_sq_after(recurrence),
            None => {
                let mut rows = self.coloring_rows();
                workload.row_norms_sq_of_product(self.noise_rows(), |_, out| rows(out))
            }
        }
    }

    fn cost(&self) -> Cost {
        let r = self.order;
        Cost { buffers: r, work: (triangle(r) + 2 * r + 1) as f64 }
    }
}

impl StateSpace {
    /// Squared row norms of `A N`, `A = P⁻¹R`.
    fn row_norms_sq_after(&self, recurrence: &Recurrence) -> Vec<f64> {
        let plant = Plant::new(recurrence);
        let (r, m) = (self.order, plant.order());
        let mut states = vec![0.0; r * r];
        // Column c: covariance of the filter's state with the plant's state c.
        let mut cross = vec![0.0; m * r];
        let mut plants = vec![0.0; m * m];
        let mut at_plant = PlantStep::default();
        let mut norms = vec![0.0; self.steps()];
        for (i, norm) in norms.iter_mut().enumerate() {
            let step = self.step(i);
            plant.step(i, &mut at_plant);
            let (d, h, g) = (step.direct, step.output, step.input);
            let dot = |x: &[f64]| h.iter().zip(x).map(|(h, x)| h * x).sum::<f64>();

            // Covariances of u = d z + h s with s and with the plant's state.
            let mut with_state: Vec<f64> = states.chunks_exact(r.max(1)).map(dot).collect();
            let with_plant: Vec<f64> = (0..m).map(|c| dot(&cross[c * r..][..r])).collect();
            let variance = d * d + dot(&with_state);
            let head = plants.first().copied().unwrap_or(0.0);
            let head_with_u = with_plant.first().copied().unwrap_or(0.0);
            let (read, direct) = (at_plant.read, at_plant.direct);
            *norm = read * read * head + 2.0 * read * direct * head_with_u + direct * direct * variance;

            // Plant: a[c] ← a[c + 1] + feedback[c]·a[0] + input[c]·u.
            let (feedback, input) = (&at_plant.feedback, &at_plant.input);
            let at = |a: usize, b: usize| if a < m && b < m { plants[a * m + b] } else { 0.0 };
            let next_with_u =
                |c: usize| with_plant.get(c + 1).copied().unwrap_or(0.0) + feedback[c] * head_with_u;
            let mut next = vec![0.0; m * m];
            for a in 0..m {
                for b in 0..m {
                    next[a * m + b] = at(a + 1, b + 1)
                        + feedback[a] * at(0, b + 1)
                        + at(a + 1, 0) * feedback[b]
                        + feedback[a] * head * feedback[b]
                        + next_with_u(a) * input[b]
                        + input[a] * next_with_u(b)
                        + input[a] * variance * input[b];
                }
            }
            plants = next;

            // Filter and cross terms: first s ← s + E s, then the noise that both share.
            step.advance(&mut with_state, 1);
            with_state.iter_mut().zip(g).for_each(|(x, g)| *x += g * d);
            let mut moved = vec![0.0; m * r];
            for c in 0..m {
                let target = &mut moved[c * r..][..r];
                target.iter_mut().zip(&cross[..r]).for_each(|(t, x)| *t = feedback[c] * x);
                if c + 1 < m {
                    target.iter_mut().zip(&cross[(c + 1) * r..]).for_each(|(t, x)| *t += x);
                }
                step.advance(target, 1);
                target.iter_mut().zip(&with_state).for_each(|(t, x)| *t += input[c] * x);
            }
            cross = moved;
            step.advance(&mut states, r);
            transpose(&mut states, r);
            step.advance(&mut states, r);
            for a in 0..r {
                states[a * r..][..r].iter_mut().zip(g).for_each(|(s, b)| *s += g[a] * b);
            }
        }
        norms
    }
}

fn transpose(x: &mut [f64], n: usize) {
    for a in 0..n {
        for b in 0..a {
            x.swap(a * n + b, b * n + a);
        }
    }
}

#[cfg(test)]
mod tests;
