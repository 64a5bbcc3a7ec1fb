//! Anderson acceleration of a fixed point.

use faer::{Mat, Side};
use rayon::prelude::*;

/// Steps remembered.
const MEMORY: usize = 12;

/// Farthest that a coordinate moves at once: extrapolation knows no bounds.
const LONGEST_STEP: f64 = 8.0;

/// Combines the last steps of `u ← u + f` so that the combined residual is smallest in the norm `Σ w_i f_i²`.
///
/// Safeguard: when the residual grows instead of shrinking, the memory is dropped and the plain step is taken
/// from the last good iterate.
pub(crate) struct Anderson {
    /// Differences of successive (u, f), newest last.
    history: Vec<(Vec<f64>, Vec<f64>)>,
    last: Option<Iterate>,
    best: Option<Iterate>,
}

#[derive(Clone)]
struct Iterate {
    u: Vec<f64>,
    residual: Vec<f64>,
    norm: f64,
}

impl Anderson {
    pub(crate) fn new() -> Self {
        Self { history: Vec::new(), last: None, best: None }
    }

    /// The next `u`, given the residual `f` at `u` and the weights there.
    pub(crate) fn step(&mut self, u: &[f64], weights: &[f64], residual: &[f64]) -> Vec<f64> {
        let norm = weights.iter().zip(residual).map(|(w, f)| w * f * f).sum::<f64>().sqrt();
        let now = Iterate { u: u.to_vec(), residual: residual.to_vec(), norm };

        if let Some(best) = &self.best
            && now.norm > 4.0 * best.norm
        {
            // Diverged: forget the subspace and restart from the best iterate with a plain step.
            let restart = best.clone();
            self.history.clear();
            let next = advance(&restart.u, &restart.residual);
            self.last = Some(restart);
            if let Some(best) = &mut self.best {
                best.norm = f64::INFINITY;
            }
            return next;
        }
        if let Some(last) = &self.last {
            self.history.push((difference(&now.u, &last.u), difference(&now.residual, &last.residual)));
            if self.history.len() > MEMORY {
                self.history.remove(0);
            }
        }
        let gamma = self.coefficients(weights, &now.residual);
        let mut next: Vec<f64> = now.u.iter().zip(&now.residual).map(|(u, f)| u + f).collect();
        for ((du, df), &g) in self.history.iter().zip(&gamma) {
            next.par_iter_mut().zip(du.par_iter().zip(df)).for_each(|(x, (du, df))| *x -= g * (du + df));
        }
        let held = |(next, now): (&f64, &f64)| now + (next - now).clamp(-LONGEST_STEP, LONGEST_STEP);
        let next = next.iter().zip(&now.u).map(held).collect();
        if self.best.as_ref().is_none_or(|best| now.norm < best.norm) {
            self.best = Some(now.clone());
        }
        self.last = Some(now);
        next
    }

    /// Least-squares coefficients of the residual on the stored differences.
    fn coefficients(&self, weights: &[f64], residual: &[f64]) -> Vec<f64> {
        let m = self.history.len();
        if m == 0 {
            return Vec::new();
        }
        let mut columns: Vec<&[f64]> = self.history.iter().map(|(_, df)| df.as_slice()).collect();
        columns.push(residual);
        let gram = weighted_gram(weights, &columns);
        // Columns shrink by orders of magnitude from one step to the next: scale before solving.
        let scale: Vec<f64> = (0..m).map(|a| gram[(a, a)].sqrt().max(f64::MIN_POSITIVE)).collect();
        let normal = Mat::from_fn(m, m, |a, b| gram[(a, b)] / (scale[a] * scale[b]));
        let right: Vec<f64> = (0..m).map(|a| gram[(a, m)] / scale[a]).collect();
        match normal.self_adjoint_eigen(Side::Lower) {
            Ok(eigen) => {
                let (values, vectors) = (eigen.S(), eigen.U());
                let floor = 1e-14 * values[m - 1];
                (0..m)
                    .map(|a| {
                        let sum: f64 = (0..m)
                            .filter(|&k| values[k] > floor)
                            .map(|k| {
                                let projection: f64 = (0..m).map(|b| vectors[(b, k)] * right[b]).sum();
                                vectors[(a, k)] * projection / values[k]
                            })
                            .sum();
                        sum / scale[a]
                    })
                    .collect()
            }
            Err(_) => vec![0.0; m],
        }
    }
}

fn advance(u: &[f64], residual: &[f64]) -> Vec<f64> {
    u.iter().zip(residual).map(|(u, f)| u + f).collect()
}

fn difference(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a - b).collect()
}

/// `Σ_i w_i c_a[i] c_b[i]` for all pairs, in one pass over memory.
fn weighted_gram(weights: &[f64], columns: &[&[f64]]) -> Mat<f64> {
    const CHUNK: usize = 4096;
    let m = columns.len();
    let n = weights.len();
    let partial: Vec<Vec<f64>> = (0..n.div_ceil(CHUNK))
        .into_par_iter()
        .map(|chunk| {
            let range = chunk * CHUNK..((chunk + 1) * CHUNK).min(n);
            let mut sums = vec![0.0; m * m];
            for a in 0..m {
                for b in 0..=a {
                    let pairs = columns[a][range.clone()].iter().zip(&columns[b][range.clone()]);
                    sums[a * m + b] = pairs.zip(&weights[range.clone()]).map(|((x, y), w)| w * x * y).sum();
                }
            }
            sums
        })
        .collect();
    // Summed in order, so that the result does not depend on the number of threads.
    let mut gram = Mat::zeros(m, m);
    for sums in &partial {
        for a in 0..m {
            for b in 0..=a {
                gram[(a, b)] += sums[a * m + b];
            }
        }
    }
    for a in 0..m {
        for b in 0..a {
            gram[(b, a)] = gram[(a, b)];
        }
    }
    gram
}
