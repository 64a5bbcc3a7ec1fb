//! The blocks of `X(D)` for several participations, in linear time, for every workload that is a recurrence.

use crate::error::{Error, Result};
use crate::factorize::dual::Blocks;
use crate::factorize::linear::Linear;
use crate::factorize::point::Dual;
use crate::linalg::lanes::Lanes;
use crate::linalg::phases::{Layout, Terms};
use crate::simd::dispatch;
use rayon::prelude::*;

/// Nodes in one pass.
const LANES: usize = 8;

/// What rounding may lose in an entry of `X`, relative to the diagonal, in units of that of the recurrence: here the matrix
/// `P Pᵀ` is formed, which squares its condition number.
const FORMED: f64 = 64.0;

impl Linear {
    /// The blocks `X_p = Σ_q ω_q [(P Pᵀ + t_q D)⁻¹]_p`, or those of `Rᵀ(R D Rᵀ + t_q P Pᵀ)⁻¹R`.
    ///
    /// Cost: O(Q n w²K²) time, `n K (2w + 1)` numbers for each node of a pass. Nodes share SIMD lanes and are spread over
    /// threads; neither changes a bit of the result.
    pub(super) fn blocks_of_phases(&self, dual: &Dual, tolerance: f64) -> Result<Blocks> {
        let layout = self.layout(dual)?;
        let terms = self.terms(dual, layout);
        let (largest, smallest) = eigenvalues(dual);
        let root = self.quadrature_between(&smallest, &largest, tolerance, LANES)?;
        let columns = self.right_columns();
        let parts: Vec<Vec<f64>> = root
            .nodes
            .par_chunks(LANES)
            .zip(root.weights.par_chunks(LANES))
            .map(|(t, omega)| {
                let lanes = |x: &[f64]| Lanes::<LANES>(std::array::from_fn(|q| x[q]));
                sweep(&terms, columns, lanes(t), lanes(omega))
            })
            .collect();
        let mut x = vec![0.0; dual.steps() * dual.times()];
        x.par_iter_mut().enumerate().with_min_len(1 << 14).for_each(|(i, x)| {
            *x = parts.iter().map(|part| part[i]).sum();
        });
        let times = dual.times();
        let bad = |(i, row): (usize, &[f64])| {
            let own = row[i / dual.separation()];
            !(own > 0.0 && row.iter().all(|x| x.is_finite()))
        };
        if let Some(index) = x.chunks_exact(times).enumerate().position(bad) {
            let reason = "an entry is not finite, or not positive on the diagonal";
            return Err(Error::Numerical { what: "X(D)", index, reason });
        }
        Ok(Blocks { x, relative_error: root.relative_error + FORMED * self.rounding() })
    }

    /// Errors: epochs not longer than the memory of the recurrence.
    fn layout(&self, dual: &Dual) -> Result<Layout> {
        let (phases, reach) = (dual.separation(), self.bandwidth());
        if phases <= reach {
            return Err(Error::Unsupported {
                what: format!("the linear solver for epochs of {phases} steps"),
                hint: "they must be longer than the recurrence reaches back; use the dense solver",
            });
        }
        Ok(Layout { n: dual.steps(), phases, epochs: dual.times(), reach })
    }

    fn terms(&self, dual: &Dual, layout: Layout) -> Terms<f64> {
        let (n, w) = (layout.n, self.bandwidth());
        let mut terms = Terms::new(layout);
        for j in 0..n {
            let (pivot, column) = (layout.pivot(j % layout.phases), self.left_column(j));
            for k in 0..=w.min(n - 1 - j) {
                for l in 0..=k {
                    let product = column[k] * column[l];
                    let (constant, shifted) =
                        if self.right_columns().is_some() { (0.0, product) } else { (product, 0.0) };
                    if product != 0.0 {
                        terms.add(pivot, (j + k, j + l), constant, shifted);
                    }
                }
            }
            for i in (j % layout.phases..=j).step_by(layout.phases) {
                let d = dual.at(j, i);
                match self.right_columns() {
                    None => terms.add(pivot, (j, i), 0.0, d),
                    Some(right) => {
                        let column = |j: usize| right[j * (w + 1)..][..w + 1].iter().enumerate();
                        for (k, r) in column(j).filter(|(k, r)| **r != 0.0 && j + k < n) {
                            for (l, s) in column(i).filter(|(_, s)| **s != 0.0) {
                                if i < j || l <= k {
                                    terms.add(pivot, (j + k, i + l), d * r * s, 0.0);
                                }
                            }
                        }
                    }
                }
            }
        }
        terms.fill(1.0, 0.0);
        terms
    }
}

/// For every step bounds on the largest and on the smallest eigenvalue of its block of `D`.
///
/// With `D_p = v Y Yᵀ` of unit diagonal but for `v`: at most `v‖YYᵀ‖_F` and at least `v/‖Y⁻¹‖_F²`.
fn eigenvalues(dual: &Dual) -> (Vec<f64>, Vec<f64>) {
    let (n, b, times) = (dual.steps(), dual.separation(), dual.times());
    let (mut largest, mut smallest) = (vec![0.0; n], vec![0.0; n]);
    for p in 0..b {
        let v = dual.v()[p];
        let y: Vec<&[f64]> = dual.phase(p).map(|i| &dual.directions()[i * times..][..times]).collect();
        let k = y.len();
        let (mut inverse, mut norm_sq, mut gram_sq) = (vec![0.0; k * k], 0.0, 0.0);
        for e in 0..k {
            for c in 0..=e {
                let unit = if c == e { 1.0 } else { 0.0 };
                let known: f64 = (c..e).map(|f| y[e][f] * inverse[f * k + c]).sum();
                inverse[e * k + c] = (unit - known) / y[e][e];
                norm_sq += inverse[e * k + c].powi(2);
                let product: f64 = y[e].iter().zip(y[c]).map(|(a, b)| a * b).sum();
                gram_sq += product * product * if c == e { 1.0 } else { 2.0 };
            }
        }
        for i in dual.phase(p) {
            (largest[i], smallest[i]) = (v * gram_sq.sqrt() * 1.000_001, v / norm_sq * 0.999_999);
        }
    }
    (largest, smallest)
}

/// What some nodes contribute to the blocks.
#[inline(always)]
fn sweep_any(terms: &Terms<f64>, right: Option<&[f64]>, t: Lanes<LANES>, omega: Lanes<LANES>) -> Vec<f64> {
    let layout = terms.layout;
    let Layout { n, phases, epochs, reach } = layout;
    let size = layout.size();
    let mut x = vec![0.0; n * epochs];
    terms.factor(t, true, |_| ()).inverse(layout, |pivot, z| {
        let first = if pivot == reach { 0 } else { pivot };
        let told = (first..reach.min(pivot)).chain([pivot]);
        for phase in told {
            for i in (phase..n).step_by(phases) {
                for j in (phase..=i).step_by(phases) {
                    let entry = match right {
                        None => z[layout.place(i, pivot) * size + layout.place(j, pivot)],
                        Some(right) => {
                            let width = reach + 1;
                            let mut sum = Lanes::ZERO;
                            for (k, r) in right[i * width..][..width].iter().enumerate() {
                                for (l, s) in right[j * width..][..width].iter().enumerate() {
                                    if *r != 0.0 && *s != 0.0 && i + k < n {
                                        let at =
                                            layout.place(i + k, pivot) * size + layout.place(j + l, pivot);
                                        sum += z[at] * Lanes::splat(r * s);
                                    }
                                }
                            }
                            sum
                        }
                    };
                    let value = (entry * omega).sum();
                    x[i * epochs + j / phases] = value;
                    x[j * epochs + i / phases] = value;
                }
            }
        }
    });
    x
}

dispatch! {
    fn sweep / sweep_portable / sweep_avx2 = sweep_any(
        terms: &Terms<f64>, right: Option<&[f64]>, t: Lanes<LANES>, omega: Lanes<LANES>
    ) -> Vec<f64>;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::factorize::{DenseOracle, Oracle};
    use crate::workload::{Average, Optimizer, Workload};

    /// A point whose correlations have both signs.
    fn point(n: usize, separation: usize) -> Dual {
        let wave = |i: usize| (2.3 * i as f64).sin();
        let times = n.div_ceil(separation);
        let v = (0..separation).map(|p| (2.0 * wave(p)).exp()).collect();
        let entry = |i: usize, k: usize| match k.cmp(&(i / separation)) {
            std::cmp::Ordering::Less => wave(7 * i + k),
            std::cmp::Ordering::Equal => 1.0,
            std::cmp::Ordering::Greater => 0.0,
        };
        let directions = (0..n).flat_map(|i| (0..times).map(move |k| entry(i, k))).collect();
        Dual::new(n, separation, v, directions).unwrap()
    }

    /// Every kind of recurrence, epochs that end early, and epochs hardly longer than the recurrence.
    #[test]
    fn blocks_agree_with_the_decomposition() {
        let momentum = Optimizer { momentum: 0.9, ..Default::default() };
        let optimizers = [
            Optimizer::default(),
            momentum,
            Optimizer { nesterov: true, ..momentum },
            Optimizer { average: Average::Uniform, ..Default::default() },
            Optimizer { weight_decay: 0.1, coupled: true, average: Average::Ema(0.8), ..momentum },
            Optimizer { nesterov: true, average: Average::Ema(0.8), ..momentum },
        ];
        for optimizer in optimizers {
            for (n, separation) in [(12, 6), (23, 6), (25, 5), (29, 4), (40, 20), (41, 20)] {
                let rates = (0..n).map(|i| 1.0 + 0.5 * (i as f64).cos()).collect();
                let workload = Workload::sgd(rates, optimizer).unwrap();
                let mut linear = Linear::new(workload.recurrence().unwrap()).unwrap();
                if separation <= linear.bandwidth() {
                    continue;
                }
                let dual = point(n, separation);
                let exact = DenseOracle::new(workload.to_dense()).blocks(&dual, f64::EPSILON).unwrap().x;
                let found = linear.blocks(&dual, 1e-12).unwrap();
                let scale = exact.iter().copied().fold(0.0, f64::max);
                for (i, (a, b)) in found.x.iter().zip(&exact).enumerate() {
                    assert!((a - b).abs() < 1e-9 * scale, "{optimizer:?} {n} {separation} {i}: {a} {b}");
                }
            }
        }
    }

    #[test]
    fn threads_do_not_change_a_bit() {
        let workload = Workload::prefix_sum(600).unwrap();
        let run = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let linear = Linear::new(workload.recurrence().unwrap()).unwrap();
            pool.install(|| linear.blocks_of_phases(&point(600, 100), 1e-12).unwrap())
        };
        assert_eq!(run(1), run(3));
    }

    #[test]
    fn epochs_as_short_as_the_recurrence_are_refused() {
        let workload = Workload::prefix_sum(4).unwrap();
        let mut linear = Linear::new(workload.recurrence().unwrap()).unwrap();
        assert_eq!(linear.blocks(&point(4, 1), 1e-9).unwrap_err().kind(), "unsupported");
    }
}
