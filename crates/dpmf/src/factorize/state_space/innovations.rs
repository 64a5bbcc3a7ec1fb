//! The Cholesky factor of a sum of processes, as a stream: their innovations form.

use super::modes::Modes;
use super::plant::PlantStep;
use super::processes::{Law, Processes};
use crate::error::{Error, Result};
use crate::linalg::gramian::Root;

/// Kalman filter that watches the gradient noise `u = Σ_q √ω_q u^{(q)}` of independent processes.
///
/// The stacked state `x` has the law `x ← F x + (process noise)`, `u = h x + (noise)`, and what the filter
/// does not predict of `u` is the fresh noise `√S z`. So with the filter's mean `s`,
///
/// ```text
/// u_i = h_i s_i + √S_i z_i,    s_{i+1} = F_i s_i + g_i z_i
/// ```
///
/// is a causal filter with `N Nᵀ = cov u = Σ_q ω_q A⁻¹(K + t_q)⁻¹A⁻ᵀ`: the Cholesky factor of `X⁻¹`.
///
/// The filter watches `u` and not `y = A u`, which tells it the same (`A` is causal and known), because
/// little of `u` is predictable: `S` has the size of `cov u`, and nothing large is subtracted to find it.
/// Its uncertainty is not carried along but taken as the difference `cov x − cov s`; `cov x` is
/// block-diagonal, and the square root of `cov s`, the controllability Gramian of the stream, is what
/// truncation needs next.
pub(super) struct Innovations {
    /// `cov x`, process after process.
    total: Vec<f64>,
    /// Root of `cov s`.
    pub mean: Root,
    seen: Vec<f64>,
}

impl Innovations {
    /// Before the first step: everything is zero, and known.
    pub fn new(processes: &Processes<'_>) -> Self {
        let states = processes.states();
        Self {
            total: vec![0.0; states * processes.plant.order()],
            mean: Root::new(states),
            seen: vec![0.0; states],
        }
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
        let m = plant.input.len();
        // (cov x − cov s) h and its product with h.
        let Self { total, mean, seen } = self;
        mean.apply(h, seen);
        seen.iter_mut().for_each(|x| *x = -*x);
        let blocks = total.chunks_exact((m * m).max(1));
        for ((block, h), seen) in blocks.zip(h.chunks_exact(m.max(1))).zip(seen.chunks_exact_mut(m.max(1))) {
            for (row, seen) in block.chunks_exact(m).zip(seen) {
                *seen += row.iter().zip(h).map(|(c, h)| c * h).sum::<f64>();
            }
        }
        let fresh: f64 = law.spread.iter().zip(&processes.sqrt_weights).map(|(s, w)| (s * w) * (s * w)).sum();
        let variance = fresh + h.iter().zip(seen.iter()).map(|(h, x)| h * x).sum::<f64>();
        if !(variance > 0.0 && variance.is_finite()) {
            return Err(Error::Numerical {
                what: "innovations form",
                index: i,
                reason: "the variance of the innovation is not positive and finite",
            });
        }

        let root = variance.sqrt();
        f.apply(seen, g);
        let noise = law.spread.iter().zip(&processes.sqrt_weights).map(|(s, w)| s * s * w);
        for (g, noise) in g.chunks_exact_mut(m.max(1)).zip(noise) {
            g.iter_mut().zip(&plant.input).for_each(|(g, input)| *g = (*g + input * noise) / root);
        }

        mean.transform(0, m, |k, row| f.apply_left_transposed(k / m, &mut row[k / m * m..]));
        seen.copy_from_slice(g);
        mean.append(seen);
        let mut half = vec![0.0; m * m];
        for ((c, f), spread) in total.chunks_exact_mut((m * m).max(1)).zip(f.blocks()).zip(law.spread) {
            congruence(f, c, &mut half, m);
            for a in 0..m {
                for b in 0..m {
                    c[a * m + b] += plant.input[a] * plant.input[b] * spread * spread;
                }
            }
        }
        Ok(root)
    }
}

/// `C ← F C Fᵀ` for small matrices.
fn congruence(f: &[f64], c: &mut [f64], half: &mut [f64], m: usize) {
    for a in 0..m {
        for b in 0..m {
            half[a * m + b] = (0..m).map(|k| f[a * m + k] * c[k * m + b]).sum();
        }
    }
    for a in 0..m {
        for b in 0..m {
            c[a * m + b] = (0..m).map(|k| half[a * m + k] * f[b * m + k]).sum();
        }
    }
}
