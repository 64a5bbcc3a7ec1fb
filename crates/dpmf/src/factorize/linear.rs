//! `diag X(v)` in linear time, for every workload that is a recurrence.

use crate::error::{Error, Result};
use crate::factorize::dual::{Diagonal, Oracle};
use crate::linalg::banded::LowerBanded;
use crate::linalg::front::{Front, InverseFront};
use crate::linalg::lanes::Lanes;
use crate::linalg::rational::InverseSqrt;
use crate::linalg::spectrum::Spectrum;
use crate::linalg::udu::check_weights;
use crate::linalg::{MAX_BANDWIDTH, with_band};
use crate::workload::Recurrence;
use rayon::prelude::*;

/// Nodes that share a pass: two AVX2 registers, enough to hide the latency of a division.
const LANES: usize = 8;

/// Steps between checkpoints. A block of factors, `(w + 1)·LANES` numbers a step, stays in the second-level cache.
const BLOCK: usize = 256;

#[derive(Clone, Debug)]
pub struct Linear {
    n: usize,
    spectrum: Spectrum,
    /// Places a column takes in `left` and `right`: the bandwidth of the array algorithm plus one.
    width: usize,
    /// Columns of `P`, from the diagonal down.
    left: Vec<f64>,
    /// Columns of `R`, if any.
    right: Option<Vec<f64>>,
}

impl Linear {
    pub fn new(recurrence: &Recurrence) -> Result<Self> {
        let n = recurrence.left.n();
        let reach = recurrence.right.as_ref().map_or(0, LowerBanded::bandwidth);
        let bandwidth = recurrence.left.bandwidth().max(reach + 1);
        let (width, left, right) = with_band!(bandwidth, N => {
            let columns = |m: &LowerBanded| (0..n).flat_map(|j| m.column::<N>(j)).collect::<Vec<f64>>();
            (N, columns(&recurrence.left), recurrence.right.as_ref().map(columns))
        })?;
        Ok(Self { n, spectrum: Spectrum::new(recurrence)?, width, left, right })
    }

    pub fn quadrature(&self, v: &[f64], tolerance: f64) -> Result<InverseSqrt> {
        let (min, max) = self.spectrum.bounds(v);
        let (min, max) = match self.right {
            None => (1.0 / max, 1.0 / min),
            Some(_) => (min, max),
        };
        let fewest = InverseSqrt::on(min, max, tolerance)?.len();
        InverseSqrt::with_nodes(min, max, fewest.next_multiple_of(LANES))
    }
}

impl Oracle for Linear {
    fn steps(&self) -> usize {
        self.n
    }

    fn diagonal(&mut self, v: &[f64], tolerance: f64) -> Result<Diagonal> {
        check_weights(self.n, v)?;
        let root = self.quadrature(v, tolerance)?;
        let groups: Vec<_> =
            root.nodes.as_chunks::<LANES>().0.iter().zip(root.weights.as_chunks::<LANES>().0).collect();
        let parts: Vec<Vec<f64>> = groups
            .into_par_iter()
            .map(|(t, omega)| {
                with_band!(self.width - 1, N => {
                    let bands = Bands::<N> {
                        left: self.left.as_chunks().0,
                        right: self.right.as_ref().map(|r| r.as_chunks().0),
                        v,
                    };
                    sweep(&bands, Lanes(*t), Lanes(*omega))
                })
            })
            .collect::<Result<_>>()?;
        let mut x = vec![0.0; self.n];
        x.par_iter_mut().enumerate().with_min_len(1 << 14).for_each(|(i, x)| {
            *x = parts.iter().map(|part| part[i]).sum();
        });
        if let Some(index) = x.iter().position(|x| !(x.is_finite() && *x > 0.0)) {
            return Err(Error::Numerical {
                what: "diag X(v)",
                index,
                reason: "an entry is not positive and finite",
            });
        }
        Ok(Diagonal { x, relative_error: root.relative_error })
    }
}

struct Bands<'a, const N: usize> {
    left: &'a [[f64; N]],
    right: Option<&'a [[f64; N]]>,
    v: &'a [f64],
}

const ENTERING: f64 = 1e-250;

fn sweep<const N: usize>(bands: &Bands<'_, N>, t: Lanes<LANES>, omega: Lanes<LANES>) -> Vec<f64> {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2")]
        fn with_avx2<const N: usize>(bands: &Bands<'_, N>, t: Lanes<LANES>, omega: Lanes<LANES>) -> Vec<f64> {
            sweep_lanes(bands, t, omega)
        }
        if std::arch::is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has AVX2, which is all the function asks for.
            return unsafe { with_avx2(bands, t, omega) };
        }
    }
    sweep_lanes(bands, t, omega)
}

#[inline(always)]
fn sweep_lanes<const N: usize>(bands: &Bands<'_, N>, t: Lanes<LANES>, omega: Lanes<LANES>) -> Vec<f64> {
    match bands.right {
        None => sweep_form::<N, false>(bands, &[], t, omega),
        Some(right) => sweep_form::<N, true>(bands, right, t, omega),
    }
}

#[inline(always)]
fn sweep_form<const N: usize, const RATIO: bool>(
    bands: &Bands<'_, N>,
    right: &[[f64; N]],
    t: Lanes<LANES>,
    omega: Lanes<LANES>,
) -> Vec<f64> {
    let n = bands.v.len();
    let left = &bands.left[..n];
    let v = bands.v;
    let alpha = omega.reciprocal();
    let tau = t * alpha;
    let entering = |i: usize| match (RATIO, v.get(i)) {
        (true, _) => Lanes::splat(ENTERING),
        (false, Some(&v)) => tau * Lanes::splat(v),
        (false, None) => tau,
    };
    let step = |front: &mut Front<N, LANES>, i: usize| {
        let inverse = if RATIO {
            front.add(tau, left[i].map(Lanes::splat));
            front.add(alpha * Lanes::splat(v[i]), right[i].map(Lanes::splat))
        } else {
            front.add(alpha, left[i].map(Lanes::splat))
        };
        let mut row = front.advance(entering(i + N));
        row[0] = inverse;
        row
    };

    let mut front = Front::<N, LANES>::diagonal(std::array::from_fn(entering));
    let mut checkpoints = Vec::with_capacity(n.div_ceil(BLOCK));
    for start in (0..n).step_by(BLOCK) {
        checkpoints.push(front);
        if start + BLOCK < n {
            for i in start..start + BLOCK {
                step(&mut front, i);
            }
        }
    }

    let mut x = vec![0.0; n];
    let mut rows = [[Lanes::<LANES>::ZERO; N]; BLOCK];
    let mut inverse = InverseFront::<N, LANES>::empty();
    for (block, mut front) in checkpoints.into_iter().enumerate().rev() {
        let start = block * BLOCK;
        let end = (start + BLOCK).min(n);
        for i in start..end {
            rows[i - start] = step(&mut front, i);
        }
        for i in (start..end).rev() {
            let row = &rows[i - start];
            let diagonal = inverse.retreat(row[0], row);
            x[i] = if RATIO { inverse.quadratic(&right[i]).sum() } else { diagonal.sum() };
        }
    }
    x
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::{Average, Optimizer, Schedule, Workload};
    use faer::Mat;

    /// diag X and Σφ from the SVD of `A D^{1/2}`: `X = D^{-1/2} V Σ Vᵀ D^{-1/2}`.
    fn by_svd(workload: &Workload, v: &[f64]) -> (Vec<f64>, f64) {
        let mut a = workload.to_dense();
        for (j, v) in v.iter().enumerate() {
            a.col_mut(j).iter_mut().for_each(|x| *x *= v.sqrt());
        }
        let n = v.len();
        let svd = a.svd().unwrap();
        let (values, vectors): (_, Mat<f64>) = (svd.S(), svd.V().to_owned());
        let x =
            (0..n).map(|i| (0..n).map(|k| vectors[(i, k)].powi(2) * values[k]).sum::<f64>() / v[i]).collect();
        (x, (0..n).map(|k| values[k]).sum())
    }

    #[test]
    fn explore() {
        let n = 300;
        let cases: Vec<(&str, Optimizer, &str)> = vec![
            ("prefix", Optimizer::default(), "constant"),
            ("cooldown", Optimizer::default(), "cooldown:0.25:0.05"),
            ("mom.95", Optimizer { momentum: 0.95, ..Default::default() }, "cooldown:0.25:0.05"),
            ("mom.99", Optimizer { momentum: 0.99, ..Default::default() }, "cooldown:0.25:0.05"),
            (
                "nest.99",
                Optimizer { momentum: 0.99, nesterov: true, ..Default::default() },
                "cooldown:0.25:0.05",
            ),
            (
                "avg.95",
                Optimizer { momentum: 0.95, average: Average::Uniform, ..Default::default() },
                "cooldown:0.25:0.05",
            ),
            (
                "ema.95",
                Optimizer { momentum: 0.95, average: Average::Ema(0.9), ..Default::default() },
                "cooldown:0.25:0.05",
            ),
            (
                "nest avg.95",
                Optimizer { momentum: 0.95, nesterov: true, average: Average::Uniform, ..Default::default() },
                "cooldown:0.25:0.05",
            ),
        ];
        for (name, optimizer, schedule) in cases {
            let eta = schedule.parse::<Schedule>().unwrap().values(n);
            let workload = Workload::sgd(eta, optimizer).unwrap();
            let mut state = 12345u64;
            let v: Vec<f64> = (0..n)
                .map(|_| {
                    state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    ((state >> 11) as f64 / (1u64 << 53) as f64 * 7.0 - 3.5).exp()
                })
                .collect();
            for v in [workload.column_norms_sq().into_iter().map(f64::sqrt).collect(), v] {
                let mut linear = Linear::new(workload.recurrence().unwrap()).unwrap();
                let q = linear.quadrature(&v, 1e-13).unwrap();
                let d = linear.diagonal(&v, 1e-13).unwrap();
                let (x, sum) = by_svd(&workload, &v);
                let worst = d.x.iter().zip(&x).map(|(a, b)| (a / b - 1.0).abs()).fold(0.0, f64::max);
                let phi: f64 = d.x.iter().zip(&v).map(|(a, b)| a * b).sum();
                println!(
                    "{name}: Q {} worst {worst:e} sum {:e} bound {:e}",
                    q.len(),
                    phi / sum - 1.0,
                    d.relative_error
                );
            }
        }
    }
}
