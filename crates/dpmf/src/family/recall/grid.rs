//! The variables of a fit: coefficients of the iterates at some phases of each epoch, linear in between.
//!
//! The running sum of the noise is `ψ_t = Σ_{s≤t} Σ_j q_{j,s} z_{s−jb} − R_{t+1}ᵀx_{t+1}`, with
//!
//! ```text
//! a_{j,t} = q_{j,t} − g_{j,t}ᵀR_{t+1},        h_t = R_t − Λ R_{t+1},        R_n = 0.
//! ```
//!
//! In `q` and `R` a fit is well conditioned: a change of `R` moves the iterates of one step alone, one of `h` or `d` all
//! that follow. `q`, what stays for ever, is nearly zero and steep, hence its scale; states are scaled to unit variance.
//!
//! Within an epoch coefficients vary slowly, but for its first and last steps. Knots that lie close together at both ends
//! and farther apart in the middle make a fit one of few variables, whose minimum a finer grid starts from.

use super::shape::{Coefficients, Shape};

/// Phases at which variables are free.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Grid {
    shape: Shape,
    knots: Vec<usize>,
    /// For every phase the knot at or before it, and how far it lies towards the next, from 0 to 1.
    places: Vec<(usize, f64)>,
    /// Root of the number of phases that a knot speaks for: variables are scaled by it, or those of the middle would be
    /// steeper.
    scales: Vec<f64>,
    /// What `q` is multiplied by.
    pub steepness: f64,
}

impl Grid {
    /// Knots whose distance is a part `1/fineness` of that to the nearer end, and at least 1.
    pub fn new(shape: Shape, fineness: usize) -> Self {
        let last = shape.stride - 1;
        let mut knots = vec![0];
        let mut p = 0;
        while p < last {
            let end = (p + 1).min(last - p);
            p = (p + (end / fineness).max(1)).min(last);
            knots.push(p);
        }
        let mut places = Vec::with_capacity(shape.stride);
        for (i, pair) in knots.windows(2).enumerate() {
            let length = (pair[1] - pair[0]) as f64;
            places.extend((pair[0]..pair[1]).map(|p| (i, (p - pair[0]) as f64 / length)));
        }
        places.push((knots.len() - 1, 0.0));
        let mut masses = vec![0.0; knots.len()];
        for &(i, part) in &places {
            masses[i] += 1.0 - part;
            if part > 0.0 {
                masses[i + 1] += part;
            }
        }
        let steepness = (shape.stride as f64).sqrt();
        Self { shape, knots, places, scales: masses.into_iter().map(f64::sqrt).collect(), steepness }
    }

    /// Number of variables.
    pub fn variables(&self) -> usize {
        self.shape.epochs() * self.knots.len() * self.shape.width() + self.shape.order
    }

    /// Where the variables of a knot begin.
    fn start(&self, e: usize, knot: usize) -> usize {
        (e * self.knots.len() + knot) * self.shape.width()
    }

    /// The variables whose coefficients agree with the given ones at the knots.
    pub fn encode(&self, coefficients: &Coefficients) -> Vec<f64> {
        let Shape { stride, steps, order: r, recalls, .. } = self.shape;
        let shape = self.shape;
        let mut smooth = coefficients.clone();
        let spread: Vec<f64> = coefficients.decay.iter().map(|decay| (1.0 - decay * decay).sqrt()).collect();
        let mut remaining = vec![0.0; r];
        for t in (0..steps).rev() {
            let step = &mut smooth.steps[t * shape.width()..][..shape.width()];
            for j in 0..=recalls {
                let sent: f64 = (0..r).map(|k| step[shape.input(j, k)] * remaining[k]).sum();
                step[shape.direct(j)] = (step[shape.direct(j)] + sent) * self.steepness;
                (0..r).for_each(|k| step[shape.input(j, k)] /= spread[k]);
            }
            for k in 0..r {
                remaining[k] = step[shape.output(k)] + coefficients.decay[k] * remaining[k];
                step[shape.output(k)] = remaining[k];
            }
        }
        let mut x = Vec::with_capacity(self.variables());
        for e in 0..shape.epochs() {
            for (&p, scale) in self.knots.iter().zip(&self.scales) {
                // A short last epoch ends before some knots.
                let step = smooth.step(e, p.min(steps - e * stride - 1));
                x.extend(step.iter().map(|v| v * scale));
            }
        }
        x.extend(coefficients.decay.iter().map(|decay| (1.0 - decay).ln()));
        x
    }

    /// The coefficients that variables stand for; `None` where a direct one is not positive, or a state not stable.
    pub fn decode(&self, x: &[f64]) -> Option<(Coefficients, Coefficients)> {
        let shape = self.shape;
        let (width, r) = (shape.width(), shape.order);
        let mut smooth = Coefficients::zeros(shape);
        let decays = &x[x.len() - r..];
        smooth.decay.iter_mut().zip(decays).for_each(|(decay, x)| *decay = 1.0 - x.exp());
        let stable = smooth.decay.iter().all(|decay| decay.abs() < 1.0);
        if !stable {
            return None;
        }
        for e in 0..shape.epochs() {
            for p in (0..shape.stride).take_while(|p| shape.exists(e, *p)) {
                let step = smooth.step_mut(e, p);
                for (knot, part) in self.near(p) {
                    let part = part / self.scales[knot];
                    let values = &x[self.start(e, knot)..][..width];
                    step.iter_mut().zip(values).for_each(|(s, v)| *s += part * v);
                }
            }
        }
        let mut out = smooth.clone();
        let mut remaining = vec![0.0; r];
        for t in (0..shape.steps).rev() {
            let step = &mut out.steps[t * width..][..width];
            for j in 0..=shape.recalls {
                let mut sent = 0.0;
                for k in 0..r {
                    let decay = smooth.decay[k];
                    let input = &mut step[shape.input(j, k)];
                    *input *= (1.0 - decay * decay).sqrt();
                    sent += *input * remaining[k];
                }
                let direct = &mut step[shape.direct(j)];
                *direct = *direct / self.steepness - sent;
            }
            let invertible = step[0] > 0.0;
            if !invertible {
                return None;
            }
            for k in 0..r {
                let output = &mut step[shape.output(k)];
                let here = *output;
                *output -= smooth.decay[k] * remaining[k];
                remaining[k] = here;
            }
        }
        Some((out, smooth))
    }

    fn near(&self, p: usize) -> impl Iterator<Item = (usize, f64)> + use<> {
        let (knot, part) = self.places[p];
        [(knot, 1.0 - part), (knot + 1, part)].into_iter().filter(|(_, part)| *part > 0.0)
    }

    /// The gradient by the variables, from that by the coefficients; both results of [`Grid::decode`] are needed.
    pub fn pull_back(
        &self,
        coefficients: &Coefficients,
        smooth: &Coefficients,
        mut gradient: Coefficients,
    ) -> Vec<f64> {
        let shape = self.shape;
        let (width, r) = (shape.width(), shape.order);
        let mut carried = vec![0.0; r];
        for t in 0..shape.steps {
            // `carried` is the gradient by R_t that step t − 1 left.
            let (given, next) = (
                &coefficients.steps[t * width..][..width],
                smooth.steps.get((t + 1) * width..(t + 2) * width),
            );
            let own = &smooth.steps[t * width..][..width];
            let slope = &mut gradient.steps[t * width..][..width];
            for k in 0..r {
                let decay = smooth.decay[k];
                let spread = (1.0 - decay * decay).sqrt();
                let remaining = next.map_or(0.0, |next| next[shape.output(k)]);
                let by_output = slope[shape.output(k)];
                slope[shape.output(k)] = by_output + carried[k];
                carried[k] = -decay * by_output;
                gradient.decay[k] -= by_output * remaining;
                for j in 0..=shape.recalls {
                    let by_direct = slope[shape.direct(j)];
                    carried[k] -= by_direct * given[shape.input(j, k)];
                    let by_input = slope[shape.input(j, k)] - by_direct * remaining;
                    gradient.decay[k] -= by_input * own[shape.input(j, k)] * decay / spread;
                    slope[shape.input(j, k)] = by_input * spread;
                }
            }
            (0..=shape.recalls).for_each(|j| slope[shape.direct(j)] /= self.steepness);
        }
        let mut out = vec![0.0; self.variables()];
        for e in 0..shape.epochs() {
            for p in (0..shape.stride).take_while(|p| shape.exists(e, *p)) {
                let slope = gradient.step(e, p);
                for (knot, part) in self.near(p) {
                    let part = part / self.scales[knot];
                    let values = &mut out[self.start(e, knot)..][..width];
                    values.iter_mut().zip(slope).for_each(|(v, s)| *v += part * s);
                }
            }
        }
        let first = out.len() - r;
        for (k, out) in out[first..].iter_mut().enumerate() {
            *out = -(1.0 - smooth.decay[k]) * gradient.decay[k];
        }
        out
    }
}
