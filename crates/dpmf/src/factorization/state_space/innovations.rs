//! The Cholesky factor of a sum of processes, as a stream: their innovations form.

use super::modes::Modes;
use super::plant::PlantStep;
use super::processes::{Law, Processes};
use crate::error::{Error, Result};

/// Kalman filter that watches the gradient noise `u = Σ_q √ω_q u^{(q)}` of independent processes.
///
/// The stacked state `x` has the law `x ← F x + (process noise)`, `u = h x + (noise)`, and what the filter does not
/// predict of `u` is the fresh noise `√S z`. So with the filter's mean `s`,
///
/// ```text
/// u_i = h_i s_i + √S_i z_i,    s_{i+1} = F_i s_i + g_i z_i
/// ```
///
/// is a causal filter with `N Nᵀ = cov u = Σ_q ω_q A⁻¹(K + t_q)⁻¹A⁻ᵀ`: the Cholesky factor of `X⁻¹`.
///
/// It watches `u` and not `y = A u`, which tells it the same (`A` is causal and known), since `u` has no large
/// predictable part: `S` is then a sum of positive terms of its own size, and the recursion needs no square roots.
pub(super) struct Innovations {
    /// Covariance of `x − s`.
    uncertainty: Vec<f64>,
    /// Covariance of `s`: the controllability Gramian of the filter.
    pub spread: Vec<f64>,
    scratch: Vec<f64>,
    seen: Vec<f64>,
}

impl Innovations {
    /// Before the first step: everything is zero, and known.
    pub fn new(states: usize) -> Self {
        let zeros = vec![0.0; states * states];
        Self { uncertainty: zeros.clone(), spread: zeros.clone(), scratch: zeros, seen: vec![0.0; states] }
    }

    /// Runs step `i`: given `h` and `F`, writes the gain `g` and returns `√S`.
    ///
    /// Errors: [`Error::Numerical`] when the prediction is not finite, or leaves nothing unpredicted.
    pub fn step(
        &mut self,
        i: usize,
        processes: &Processes<'_>,
        (plant, law): (&PlantStep, Law<'_>),
        (h, f): (&[f64], &Modes),
        g: &mut [f64],
    ) -> Result<f64> {
        let (q, states) = (processes.len(), processes.states());
        let mut variance: f64 =
            law.spread.iter().zip(&processes.sqrt_weights).map(|(s, w)| (s * w) * (s * w)).sum();
        for a in 0..states {
            let row = &self.uncertainty[a * states..][..states];
            self.seen[a] = row.iter().zip(h).map(|(p, h)| p * h).sum();
            variance += h[a] * self.seen[a];
        }
        if !(variance > 0.0 && variance.is_finite()) {
            return Err(Error::Numerical {
                what: "innovations form",
                index: i,
                reason: "the variance of the innovation is not positive",
            });
        }
        let root = variance.sqrt();
        f.apply(&self.seen, g);
        for (c, &input) in plant.input.iter().enumerate() {
            for (l, g) in g[c * q..][..q].iter_mut().enumerate() {
                *g = (*g + input * processes.sqrt_weights[l] * law.spread[l] * law.spread[l]) / root;
            }
        }

        f.propagate(&mut self.uncertainty, &mut self.scratch);
        f.propagate(&mut self.spread, &mut self.scratch);
        for a in 0..states {
            let rows = a * states..(a + 1) * states;
            let outer = g.iter().map(|b| g[a] * b);
            let (p, s) = (&mut self.uncertainty[rows.clone()], &mut self.spread[rows]);
            p.iter_mut().zip(s).zip(outer).for_each(|((p, s), x)| {
                *p -= x;
                *s += x;
            });
        }
        for (c, &left) in plant.input.iter().enumerate() {
            for (d, &right) in plant.input.iter().enumerate() {
                for l in 0..q {
                    self.uncertainty[(c * q + l) * states + d * q + l] +=
                        left * right * law.spread[l] * law.spread[l];
                }
            }
        }
        Ok(root)
    }
}
