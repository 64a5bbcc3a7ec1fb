//! The blocks of `X(D)` for several participations, in linear time, for every workload that is a recurrence.

use crate::error::{Error, Result};
use crate::factorize::dual::Blocks;
use crate::factorize::linear::Linear;
use crate::factorize::point::Dual;
use crate::linalg::lanes::Lanes;
use crate::linalg::phases::{Layout, Rows};
use crate::simd::dispatch;
use rayon::prelude::*;

/// Share of the largest entry of a diagonal below which another may be rounding alone.
const NOTHING: f64 = 1e-9;

/// Nodes in one pass.
const LANES: usize = 8;

impl Linear {
    /// The blocks `X_p = Σ_q ω_q [(P Pᵀ + t_q D)⁻¹]_p`, or those of `Rᵀ(R D Rᵀ + t_q P Pᵀ)⁻¹R`.
    ///
    /// Cost: O(Q n w²K²) time, `n K (2w + 1)` numbers for each node of a pass. Nodes share SIMD lanes and are spread over
    /// threads; neither changes a bit of the result.
    pub(super) fn blocks_of_phases(&self, dual: &Dual, tolerance: f64) -> Result<Blocks> {
        let layout = self.layout(dual)?;
        let rows = self.rows(dual, layout);
        let (largest, smallest) = eigenvalues(dual);
        let root = self.quadrature_between(&smallest, &largest, tolerance, LANES)?;
        let columns = self.right_columns();
        let parts: Vec<Vec<f64>> = root
            .nodes
            .par_chunks(LANES)
            .zip(root.weights.par_chunks(LANES))
            .map(|(t, omega)| {
                let lanes = |x: &[f64]| Lanes::<LANES>(std::array::from_fn(|q| x[q]));
                sweep(&rows, columns, lanes(t), lanes(omega))
            })
            .collect();
        let mut x = vec![0.0; dual.steps() * dual.times()];
        x.par_iter_mut().enumerate().with_min_len(1 << 14).for_each(|(i, x)| {
            *x = parts.iter().map(|part| part[i]).sum();
        });
        let times = dual.times();
        let own = |i: usize| x[i * times + i / dual.separation()];
        let least = -NOTHING * (0..dual.steps()).map(own).fold(0.0, f64::max);
        // A step of size zero may have nothing there, to rounding.
        let bad = |(i, row): (usize, &[f64])| {
            !(row[i / dual.separation()] > least && row.iter().all(|x| x.is_finite()))
        };
        if let Some(index) = x.chunks_exact(times).enumerate().position(bad) {
            let reason = "an entry is not finite, or negative on the diagonal";
            return Err(Error::Numerical { what: "X(D)", index, reason });
        }
        Ok(Blocks { x, relative_error: root.relative_error + self.rounding() })
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

    /// `[P, √t G]`, or `[R G, √t P]`, by columns: `G` is the factor of `D`.
    fn rows(&self, dual: &Dual, layout: Layout) -> Rows {
        let (n, w, b) = (layout.n, self.bandwidth(), layout.phases);
        let mut rows = Rows::new(layout);
        let right = self.right_columns();
        for p in 0..b {
            let pivot = layout.pivot(p);
            // Column k of G has entries from epoch k on; R moves each to the steps after it.
            for k in 0..dual.phase(p).len() {
                let column = dual.phase(p).skip(k).flat_map(|i| {
                    let g = dual.factor(i, k);
                    let taps = right.map_or(&[1.0][..], |right| &right[i * (w + 1)..][..w + 1]);
                    taps.iter().enumerate().filter(move |(l, _)| i + l < n).map(move |(l, r)| (i + l, g * r))
                });
                rows.add(pivot, column, right.is_none());
            }
            for j in dual.phase(p) {
                let column = self.left_column(j).iter().enumerate().filter(|(k, _)| j + k < n);
                rows.add(pivot, column.map(|(k, p)| (j + k, *p)), right.is_some());
            }
        }
        rows.fill();
        rows
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
fn sweep_any(rows: &Rows, right: Option<&[f64]>, t: Lanes<LANES>, omega: Lanes<LANES>) -> Vec<f64> {
    let layout = rows.layout;
    let Layout { n, phases, epochs, reach } = layout;
    let size = layout.size();
    let mut x = vec![0.0; n * epochs];
    rows.factor(t).inverse(layout, |pivot, z| {
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
        rows: &Rows, right: Option<&[f64]>, t: Lanes<LANES>, omega: Lanes<LANES>
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
