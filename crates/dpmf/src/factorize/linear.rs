//! `diag X(v)` in linear time, for every workload that is a recurrence.

use crate::error::{Error, Result};
use crate::factorize::dual::{Blocks, Oracle};
use crate::factorize::point::Dual;
use crate::linalg::banded::LowerBanded;
use crate::linalg::lanes::Lanes;
use crate::linalg::pencil::Pencil;
use crate::linalg::rational::InverseSqrt;
use crate::linalg::udu::check_weights;
use crate::linalg::{MAX_BANDWIDTH, with_band};
use crate::workload::Recurrence;
use crate::workload::spectrum::{Spectrum, array_bandwidth};
use rayon::prelude::*;

/// Nodes in one pass over the band: two AVX2 registers.
const LANES: usize = 8;

/// Nodes in one pass over a bidiagonal workload, whose front is small: four registers, to hide the latency of the
/// one division a step.
const LANES_BIDIAGONAL: usize = 2 * LANES;

/// `diag X(v)` of a recurrence `A = P⁻¹R`, in O(n) a node.
///
/// ```text
/// X(v) = Σ_q ω_q (P Pᵀ + t_q D)⁻¹              without R, nodes on the spectrum of D^{-1/2} P Pᵀ D^{-1/2},
/// X(v) = Σ_q ω_q Rᵀ(R D Rᵀ + t_q P Pᵀ)⁻¹ R     with R, nodes on the spectrum of A D Aᵀ.
/// ```
///
/// The quadrature's bound ([`InverseSqrt`]) holds for each entry of the diagonal, because each is an average of
/// `λ^{-1/2}` (or, with `R`, a multiple of one) over the spectrum with non-negative weights. To it comes an estimate of
/// rounding, see [`Linear::rounding`]; so the sum is an estimate, and no certificate rests on it.
///
/// Cost: O(Q n w²) time with `Q = O(log(κ) log(1/tolerance))` nodes, κ the squared condition number of `AD^{1/2}`;
/// `n` numbers for every 8 nodes. Nodes share SIMD lanes and are spread over threads; neither changes
/// a bit of the result.
///
/// ```
/// use dpmf::Workload;
/// use dpmf::factorize::{LinearOracle, Oracle};
/// let workload = Workload::prefix_sum(1)?;
/// let mut linear = LinearOracle::new(workload.recurrence().unwrap())?;
/// let diagonal = linear.diagonal(&[4.0], 1e-12)?;
/// assert!((diagonal.x[0] - 0.5).abs() < 1e-12);
/// # Ok::<(), dpmf::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Linear {
    n: usize,
    spectrum: Spectrum,
    rounding: f64,
    /// Places a column takes in `left` and `right`: the bandwidth of the array algorithm plus one.
    width: usize,
    /// Columns of `P`, from the diagonal down.
    left: Vec<f64>,
    /// Columns of `R`, if any.
    right: Option<Vec<f64>>,
}

impl Linear {
    /// Prepares what does not depend on `v`. Cost: O(n w²).
    ///
    /// Errors: a bandwidth above [`MAX_BANDWIDTH`], a left or right matrix whose diagonal is not positive or whose
    /// entries are not finite.
    pub fn new(recurrence: &Recurrence) -> Result<Self> {
        recurrence.left.check("left matrix of the recurrence")?;
        let n = recurrence.left.n();
        if let Some(right) = &recurrence.right {
            right.check("right matrix of the recurrence")?;
            if right.n() != n {
                return Err(Error::WrongLength { name: "right matrix", actual: right.n(), expected: n });
            }
        }
        let (width, left, right) = with_band!(array_bandwidth(recurrence), N => {
            let columns = |m: &LowerBanded| (0..n).flat_map(|j| m.column::<N>(j)).collect::<Vec<f64>>();
            (N, columns(&recurrence.left), recurrence.right.as_ref().map(columns))
        })?;
        let spectrum = Spectrum::new(recurrence)?;
        Ok(Self { n, spectrum, rounding: f64::EPSILON / 4.0 * growth(recurrence), width, left, right })
    }

    /// Rounding in the relative error of every entry, estimated.
    ///
    /// `ε/4` times the factor by which relative errors in the coefficients of `P` can grow in `A`,
    /// `max_i (A|P|A1)_i/(A1)_i`: `n` for the prefix sum, about `4n/(1 − β)` with momentum, `n²/3` for uniform
    /// averages. Against 70-digit arithmetic (n ≤ 3000, all kinds of recurrences, `v` constant to six
    /// decades wide) the error was at most `0.11 ε` times that factor, and mostly far less.
    pub fn rounding(&self) -> f64 {
        self.rounding
    }

    /// The nodes and weights that [`Oracle::diagonal`] uses: the fewest for the tolerance, filled up to a multiple of 8.
    ///
    /// Errors: as [`Oracle::diagonal`].
    pub fn quadrature(&self, v: &[f64], tolerance: f64) -> Result<InverseSqrt> {
        check_weights(self.n, v)?;
        self.quadrature_between(v, v, tolerance, LANES)
    }

    /// The same for a `D` between two diagonal matrices, in multiples of some number of nodes.
    pub(super) fn quadrature_between(
        &self,
        smallest: &[f64],
        largest: &[f64],
        tolerance: f64,
        multiple: usize,
    ) -> Result<InverseSqrt> {
        let min = self.spectrum.bounds(smallest).0;
        let max = self.spectrum.bounds(largest).1;
        if !(min > 0.0 && max >= min && max.is_finite() && min.recip().is_finite()) {
            return Err(Error::Numerical {
                what: "the spectrum of A D Aᵀ",
                index: 0,
                reason: "its bounds leave the range of f64",
            });
        }
        let (min, max) = match self.right {
            None => (1.0 / max, 1.0 / min),
            Some(_) => (min, max),
        };
        let fewest = InverseSqrt::on(min, max, tolerance)?.len();
        InverseSqrt::with_nodes(min, max, fewest.next_multiple_of(multiple))
    }

    /// Bandwidth of the array algorithm.
    pub(super) fn bandwidth(&self) -> usize {
        self.width - 1
    }

    /// Column `j` of `P` from the diagonal down, [`Linear::bandwidth`]` + 1` places.
    pub(super) fn left_column(&self, j: usize) -> &[f64] {
        &self.left[j * self.width..][..self.width]
    }

    /// The columns of `R`, laid out likewise, if there is one.
    pub(super) fn right_columns(&self) -> Option<&[f64]> {
        self.right.as_deref()
    }

    /// `diag X(v)` for one participation.
    fn diagonal_of(&self, v: &[f64], tolerance: f64) -> Result<Blocks> {
        let root = self.quadrature(v, tolerance)?;
        let lanes = if self.width == 2 { LANES_BIDIAGONAL } else { LANES };
        let parts: Vec<Vec<f64>> = root
            .nodes
            .par_chunks(lanes)
            .zip(root.weights.par_chunks(lanes))
            .map(|(t, omega)| match t.len() {
                LANES_BIDIAGONAL => Ok(self.part::<2, LANES_BIDIAGONAL>(v, t, omega)),
                _ => with_band!(self.width - 1, N => self.part::<N, LANES>(v, t, omega)),
            })
            .collect::<Result<_>>()?;
        // Summed in the order of the nodes, whichever thread was first.
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
        Ok(Blocks { x, relative_error: root.relative_error + self.rounding })
    }

    /// What `M` nodes contribute to `diag X`.
    fn part<const N: usize, const M: usize>(&self, v: &[f64], nodes: &[f64], weights: &[f64]) -> Vec<f64> {
        let lanes = |x: &[f64]| Lanes::<M>(std::array::from_fn(|q| x[q]));
        let alpha = lanes(weights).reciprocal();
        let tau = lanes(nodes) * alpha;
        let (left, _) = self.left.as_chunks::<N>();
        match &self.right {
            None => Pencil::<N, M, false> { left, right: &[], v, alpha, tau }.diagonal(),
            Some(right) => {
                Pencil::<N, M, true> { left, right: right.as_chunks().0, v, alpha, tau }.diagonal()
            }
        }
    }
}

impl Oracle for Linear {
    fn steps(&self) -> usize {
        self.n
    }

    fn blocks(&mut self, dual: &Dual, tolerance: f64) -> Result<Blocks> {
        match dual.times() {
            1 => self.diagonal_of(dual.v(), tolerance),
            _ => self.blocks_of_phases(dual, tolerance),
        }
    }
}

/// `max_i (A|P|A1)_i/(A1)_i`, the growth of relative errors from the coefficients of `P` to the response `A1`.
fn growth(recurrence: &Recurrence) -> f64 {
    let mut response = vec![1.0; recurrence.left.n()];
    recurrence.apply(&mut response);
    let mut errors: Vec<f64> = response.iter().map(|y| y.abs()).collect();
    recurrence.left.map(f64::abs).multiply(&mut errors);
    recurrence.left.solve(&mut errors);
    // Maxima over the steps so far: a response may pass through zero.
    let (mut growth, mut error, mut size) = (1.0_f64, 0.0_f64, 0.0_f64);
    for (e, y) in errors.iter().zip(&response) {
        error = error.max(e.abs());
        size = size.max(y.abs());
        growth = growth.max(error / size);
    }
    growth
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::{Average, Optimizer, Schedule, Workload};
    use proptest::prelude::*;
    use std::f64::consts::PI;

    fn linear(workload: &Workload) -> Linear {
        Linear::new(workload.recurrence().unwrap()).unwrap()
    }

    fn sgd(schedule: &str, n: usize, optimizer: Optimizer) -> Workload {
        Workload::sgd(schedule.parse::<Schedule>().unwrap().values(n), optimizer).unwrap()
    }

    /// `diag X` and `Σφ = tr (D^{1/2}AᵀAD^{1/2})^{1/2}` from the singular values of `A D^{1/2}`.
    fn by_svd(workload: &Workload, v: &[f64]) -> (Vec<f64>, f64) {
        let n = v.len();
        let mut a = workload.to_dense();
        for (j, v) in v.iter().enumerate() {
            a.col_mut(j).iter_mut().for_each(|x| *x *= v.sqrt());
        }
        let svd = a.svd().unwrap();
        let x = (0..n)
            .map(|i| (0..n).map(|k| svd.V()[(i, k)].powi(2) * svd.S()[k]).sum::<f64>() / v[i])
            .collect();
        (x, (0..n).map(|k| svd.S()[k]).sum())
    }

    /// Largest relative difference of entries, and the relative difference of Σφ.
    fn distance(diagonal: &Blocks, v: &[f64], (x, sum): &(Vec<f64>, f64)) -> (f64, f64) {
        let entries = diagonal.x.iter().zip(x).map(|(a, b)| (a / b - 1.0).abs()).fold(0.0, f64::max);
        let phi: f64 = diagonal.x.iter().zip(v).map(|(x, v)| x * v).sum();
        (entries, (phi / sum - 1.0).abs())
    }

    #[test]
    fn one_and_two_steps_in_closed_form() {
        // n = 1: X = η/√v.
        let workload = Workload::sgd(vec![3.0], Optimizer::default()).unwrap();
        let diagonal = linear(&workload).diagonal(&[0.25], 1e-13).unwrap();
        assert!((diagonal.x[0] - 6.0).abs() < 1e-13);

        // n = 2: the root of a 2 × 2 matrix M is (M + √det M)/√(tr M + 2√det M).
        let v = [5.0, 0.3];
        let m = [[2.0 * v[0], f64::sqrt(v[0] * v[1])], [f64::sqrt(v[0] * v[1]), v[1]]];
        let root_det = (m[0][0] * m[1][1] - m[0][1] * m[1][0]).sqrt();
        let scale = (m[0][0] + m[1][1] + 2.0 * root_det).sqrt();
        let diagonal = linear(&Workload::prefix_sum(2).unwrap()).diagonal(&v, 1e-13).unwrap();
        for i in 0..2 {
            let exact = (m[i][i] + root_det) / scale / v[i];
            assert!((diagonal.x[i] / exact - 1.0).abs() < 1e-13);
        }
    }

    #[test]
    fn the_optimal_dual_of_three_steps_is_a_fixed_point() {
        // Golden: the optimal v for the prefix sum at n = 3, to nine digits; there φ(v) = v, so diag X = 1.
        let v = [2.65186345, 1.25735178, 0.69864641];
        let diagonal = linear(&Workload::prefix_sum(3).unwrap()).diagonal(&v, 1e-13).unwrap();
        for x in &diagonal.x {
            assert!((x - 1.0).abs() < 1e-8, "{x}");
        }
    }

    #[test]
    fn prefix_sum_with_equal_weights_in_closed_form() {
        // SᵀS has eigenvalues σ_k² = 1/(2 sin(θ_k/2))², θ_k = (2k − 1)π/(2n + 1), and eigenvectors
        // 2/√(2n + 1) · cos((i − ½)θ_k), i = 1…n. Lengths around the block size, where checkpoints begin and end.
        for n in [1, 2, 3, 17, 255, 256, 257, 511, 512, 513, 769] {
            let diagonal = linear(&Workload::prefix_sum(n).unwrap()).diagonal(&vec![1.0; n], 1e-14).unwrap();
            let angle = |k: usize| (2 * k + 1) as f64 * PI / (2 * n + 1) as f64;
            let sigma: Vec<f64> = (0..n).map(|k| 0.5 / (angle(k) / 2.0).sin()).collect();
            for i in 0..n {
                let exact: f64 = (0..n)
                    .map(|k| {
                        sigma[k] * (((i as f64 + 0.5) * angle(k)).cos()).powi(2) * 4.0 / (2 * n + 1) as f64
                    })
                    .sum();
                assert!((diagonal.x[i] / exact - 1.0).abs() < 1e-12, "n = {n}, i = {i}: {exact}");
            }
        }
    }

    #[test]
    fn badly_scaled_recurrences_agree_with_the_svd() {
        let momentum = |momentum| Optimizer { momentum, ..Default::default() };
        let average = |average, optimizer| Optimizer { average, ..optimizer };
        let cooldown = "cooldown:0.25:0.05";
        for (schedule, optimizer) in [
            (cooldown, Optimizer::default()),
            ("exp:0.95", Optimizer::default()),
            (cooldown, momentum(0.95)),
            (cooldown, momentum(0.99)),
            ("constant", momentum(0.999)),
            ("constant", Optimizer { weight_decay: 0.01, coupled: true, ..momentum(0.9) }),
            (cooldown, Optimizer { nesterov: true, ..momentum(0.99) }),
            ("constant", average(Average::Uniform, Optimizer::default())),
            (cooldown, average(Average::Ema(0.9), momentum(0.95))),
            (cooldown, average(Average::Uniform, Optimizer { nesterov: true, ..momentum(0.95) })),
        ] {
            let n = 300;
            let workload = sgd(schedule, n, optimizer);
            let norms: Vec<f64> = workload.column_norms_sq().unwrap().into_iter().map(f64::sqrt).collect();
            let wild: Vec<f64> = (0..n).map(|i| (3.5 * ((i * i) as f64).sin()).exp()).collect();
            for v in [norms, wild] {
                let diagonal = linear(&workload).diagonal(&v, 1e-13).unwrap();
                let (entries, sum) = distance(&diagonal, &v, &by_svd(&workload, &v));
                assert!(sum < 1e-11, "{schedule} {optimizer:?}: Σφ differs by {sum:e}");
                assert!(entries < 1e-10, "{schedule} {optimizer:?}: an entry differs by {entries:e}");
            }
        }
    }

    fn any_optimizer() -> impl Strategy<Value = Optimizer> {
        let average =
            prop_oneof![Just(Average::None), Just(Average::Uniform), (0.0..0.95).prop_map(Average::Ema)];
        let momentum = prop_oneof![Just(0.0), 0.01..0.99];
        let decay = prop_oneof![Just(0.0), 0.001..0.3];
        (momentum, any::<bool>(), decay, any::<bool>(), average).prop_map(
            |(momentum, nesterov, weight_decay, coupled, average)| Optimizer {
                momentum,
                nesterov: nesterov && momentum > 0.0,
                weight_decay,
                coupled: coupled && weight_decay > 0.0,
                average,
            },
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(96))]

        #[test]
        fn every_recurrence_agrees_with_the_svd(
            optimizer in any_optimizer(),
            steps in prop::collection::vec((0.05..2.0_f64, -5.0..5.0_f64), 1..40),
        ) {
            let (eta, log_v): (Vec<f64>, Vec<f64>) = steps.into_iter().unzip();
            let v: Vec<f64> = log_v.into_iter().map(f64::exp).collect();
            let workload = Workload::sgd(eta, optimizer).unwrap();
            let exact = by_svd(&workload, &v);

            let mut linear = linear(&workload);
            let (entries, sum) = distance(&linear.diagonal(&v, 1e-13).unwrap(), &v, &exact);
            prop_assert!(sum < 1e-11, "Σφ differs by {sum:e}");
            prop_assert!(entries < 1e-9, "an entry differs by {entries:e}");

            // The error of a loose tolerance is owned up to.
            let loose = linear.diagonal(&v, 1e-3).unwrap();
            let (entries, _) = distance(&loose, &v, &exact);
            prop_assert!(entries <= loose.relative_error && loose.relative_error < 1.1e-3);
        }
    }

    #[test]
    fn nodes_follow_the_tolerance_in_eights() {
        let nodes = |workload: &Workload, tolerance| {
            let v: Vec<f64> = workload.column_norms_sq().unwrap().into_iter().map(f64::sqrt).collect();
            linear(workload).quadrature(&v, tolerance).unwrap().len()
        };
        // A prototype needed 37 for 1e-13 at n = 4096; filled up to a multiple of 8.
        let prefix = Workload::prefix_sum(4096).unwrap();
        assert_eq!((nodes(&prefix, 1e-13), nodes(&prefix, 1e-3)), (40, 16));
        let momentum = sgd("cooldown:0.25:0.05", 4096, Optimizer { momentum: 0.95, ..Default::default() });
        assert_eq!((nodes(&momentum, 1e-13), nodes(&momentum, 1e-3)), (72, 24));
    }

    #[test]
    fn threads_do_not_change_a_bit() {
        for optimizer in [Optimizer::default(), Optimizer { momentum: 0.9, ..Default::default() }] {
            let workload = sgd("cosine:0.1", 20_000, optimizer);
            let v: Vec<f64> = workload.column_norms_sq().unwrap().into_iter().map(f64::sqrt).collect();
            let run = |threads: usize| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                pool.install(|| linear(&workload).diagonal(&v, 1e-12).unwrap())
            };
            assert_eq!(run(1), run(3));
        }
    }

    #[test]
    fn rounding_grows_with_the_memory_of_the_recurrence() {
        let units = |workload: &Workload| linear(workload).rounding() / (f64::EPSILON / 4.0);
        // Prefix sum: A1 = (1, …, n), |P|A1 = 2i − 1, and A of that is i².
        assert!((units(&Workload::prefix_sum(50).unwrap()) - 50.0).abs() < 1e-9);
        let momentum = |momentum| sgd("constant", 1000, Optimizer { momentum, ..Default::default() });
        let ratio = units(&momentum(0.99)) / units(&momentum(0.9));
        assert!((5.0..10.0).contains(&ratio), "{ratio}");
    }

    #[test]
    fn bad_input_is_refused() {
        let workload = Workload::prefix_sum(3).unwrap();
        let mut oracle = linear(&workload);
        assert_eq!(oracle.steps(), 3);
        let mut message = |v: &[f64], tolerance| oracle.diagonal(v, tolerance).unwrap_err().to_string();
        assert!(message(&[1.0; 2], 1e-9).contains("v has length 2"));
        assert!(message(&[1.0, -1.0, 1.0], 1e-9).contains("v[1] is -1"));
        assert!(message(&[1.0, 1.0, f64::INFINITY], 1e-9).contains("v[2] is inf"));
        assert!(message(&[1.0; 3], 0.0).contains("tolerance is 0"));
        assert!(message(&[1.0; 3], f64::NAN).contains("tolerance is NaN"));
        assert!(message(&[1e-320, 1.0, 1.0], 1e-9).contains("leave the range of f64"));

        let band = |n, bandwidth, diagonal| {
            LowerBanded::from_fn(n, bandwidth, |_, k| if k == 0 { diagonal } else { 0.1 })
        };
        let refused = |left, right| Linear::new(&Recurrence { left, right }).unwrap_err();
        assert_eq!(refused(band(9, MAX_BANDWIDTH + 1, 1.0), None).kind(), "unsupported");
        assert_eq!(refused(band(9, 1, 1.0), Some(band(9, MAX_BANDWIDTH, 1.0))).kind(), "unsupported");
        assert_eq!(refused(band(3, 1, 1.0), Some(band(4, 1, 1.0))).kind(), "wrong-length");
        assert_eq!(refused(band(3, 1, 0.0), None).kind(), "invalid-argument");
        assert_eq!(refused(band(3, 1, 1.0), Some(band(3, 1, f64::NAN))).kind(), "invalid-argument");
    }
}
