//! Factorizations whose coloring `N` is a lower-triangular Toeplitz matrix.

use super::dense::DenseEngine;
use super::{Cost, EncoderColumns, Form, Products, Representation, Rows};
use crate::engine::Engine;
use crate::engine::exact::program::Program;
use crate::error::{Error, Result};
use crate::tensors::Tensors;
use crate::workload::Workload;
use faer::Mat;

pub(super) const KIND: &str = "toeplitz";

const COLUMN: &str = "toeplitz.first_column";

/// `N_ij = ν_{i−j}` and `C_ij = c_{i−j}`, with `c` the power series `1/ν`.
#[derive(Clone, Debug, PartialEq)]
pub struct Toeplitz {
    coloring: Vec<f64>,
    encoder: Vec<f64>,
    /// `Σ_k |s_k|` of the series with `c = ĉ(1 + s)`, `c` the exact inverse and `ĉ` the one held; a bound.
    error: f64,
}

impl Toeplitz {
    /// The factorization with `ν` as first column of `N`.
    ///
    /// Cost: O(n²) time for the inverse series, O(n) memory.
    ///
    /// Errors: no coefficients, one that is not finite, `ν_0 ≤ 0`; an inverse series that overflows.
    pub fn new(coloring: Vec<f64>) -> Result<Self> {
        if coloring.is_empty() {
            return Err(Error::argument("steps", 0, "at least one step is needed"));
        }
        for (index, &value) in coloring.iter().enumerate() {
            let rule = match index {
                _ if !value.is_finite() => "it must be finite",
                0 if value <= 0.0 => "the diagonal must be positive",
                _ => continue,
            };
            return Err(Error::InvalidEntry { name: "Toeplitz coefficient", index, value, rule });
        }
        let encoder = inverse_series(&coloring)?;
        let error = inversion_error(&coloring, &encoder);
        Ok(Self { coloring, encoder, error })
    }

    /// The square root of the prefix sum: `B = C = S^{1/2}`, `N = S^{−1/2}`.
    ///
    /// `c_k = binom(2k, k)/4^k` and `ν_k = −c_k/(2k − 1)`: the series of `(1 − x)^{∓1/2}`.
    ///
    /// Cost: O(n).
    ///
    /// Errors: no steps.
    ///
    /// Reference: \[FHU22\].
    pub fn sqrt_prefix_sum(steps: usize) -> Result<Self> {
        if steps == 0 {
            return Err(Error::argument("steps", 0, "at least one step is needed"));
        }
        let mut encoder = Vec::with_capacity(steps);
        let mut c = 1.0;
        for k in 0..steps {
            encoder.push(c);
            let k = k as f64;
            c *= (2.0 * k + 1.0) / (2.0 * k + 2.0);
        }
        let coloring = encoder.iter().enumerate().map(|(k, c)| -c / (2.0 * k as f64 - 1.0)).collect();
        // Both series are known to 2kε in term k. The inverse of the second is a sum of products of its positive −ν_k, whose
        // indices add up to that of the term: nothing cancels, and the errors add up to 2kε again.
        let error = 4.0 * steps as f64 * f64::EPSILON;
        Ok(Self { coloring, encoder, error })
    }

    /// First column of `N`.
    pub fn coloring(&self) -> &[f64] {
        &self.coloring
    }

    /// First column of `C`.
    pub fn encoder_series(&self) -> &[f64] {
        &self.encoder
    }

    /// The factorization whose `N` is this one's, rounded to the `f32` grid; `C` follows it.
    ///
    /// Cost: O(n²), as for [`Toeplitz::new`].
    ///
    /// Errors: a diagonal that underflows or a coefficient that overflows `f32`.
    pub fn rounded(&self) -> Result<Self> {
        Self::new(self.coloring.iter().map(|&x| f64::from(x as f32)).collect())
    }

    pub(super) fn read(n: usize, tensors: &mut Tensors) -> Result<Self> {
        Self::new(tensors.take(COLUMN, &[Some(n)])?.1)
    }
}

impl Representation for Toeplitz {
    fn kind(&self) -> &'static str {
        KIND
    }

    fn steps(&self) -> usize {
        self.coloring.len()
    }

    fn coloring_rows(&self) -> Rows<'_> {
        let mut steps = 0..self.steps();
        Box::new(move |out| {
            if let Some(i) = steps.next() {
                out.iter_mut().zip(self.coloring[..=i].iter().rev()).for_each(|(out, x)| *out = *x);
            }
        })
    }

    fn encoder(&self) -> Mat<f64> {
        let n = self.steps();
        Mat::from_fn(n, n, |i, j| if j <= i { self.encoder[i - j] } else { 0.0 })
    }

    /// `c_0² + … + c_{n−1−j}²` for column `j`, raised by what the rounding of the series may hide.
    ///
    /// Guarantee: ≥ the exact values, for any coefficients; infinite where nothing is known.
    fn encoder_column_norms_sq(&self) -> Vec<f64> {
        let slack = (1.0 + self.error).powi(2) * (1.0 + (self.steps() + 8) as f64 * f64::EPSILON);
        let mut norms: Vec<f64> = running_squares(&self.encoder).map(|sum| sum * slack).collect();
        norms.reverse();
        norms
    }

    /// Cost: a copy for each column.
    /// The inverse of a matrix with no positive number off its diagonal.
    fn encoder_is_nonnegative(&self) -> bool {
        self.coloring[1..].iter().all(|x| *x <= 0.0)
    }

    fn encoder_columns(&self) -> Box<dyn EncoderColumns + '_> {
        Box::new(Shifted { toeplitz: self, norms_sq: self.encoder_column_norms_sq() })
    }

    /// Cost: O(n w) for a recurrence with constant coefficients, whose `A N` is Toeplitz too; O(n² w) for
    /// any other, O(n³) for a dense workload.
    fn decoder_row_norms_sq(&self, workload: &Workload) -> Vec<f64> {
        assert_eq!(workload.steps(), self.steps(), "the workload and the factorization differ in length");
        match workload.recurrence() {
            Some(recurrence) if recurrence.is_constant() => {
                let mut first_column = self.coloring.clone();
                recurrence.apply(&mut first_column);
                running_squares(&first_column).collect()
            }
            _ => {
                let mut rows = self.coloring_rows();
                workload.row_norms_sq_of_product(self.steps(), |_, out| rows(out))
            }
        }
    }

    /// Dense rows over regenerated noise: nothing is kept.
    fn cost(&self) -> Cost {
        Cost::dense((self.steps() as f64 + 1.0) / 2.0)
    }

    fn deployed(&self) -> Result<Form> {
        Ok(Form::Toeplitz(self.rounded()?))
    }

    fn engine(&self, ahead: usize) -> Result<Box<dyn Engine>> {
        Ok(Box::new(DenseEngine::toeplitz(self, ahead)?))
    }

    fn program(&self, ahead: usize) -> Result<Box<dyn Program>> {
        Ok(Box::new(DenseEngine::toeplitz(self, ahead)?))
    }

    fn write(&self, tensors: &mut Tensors) {
        tensors.put_f32(COLUMN, &[self.steps()], self.coloring.iter().copied());
    }
}

/// The series, shifted down. The exact column is a sum of these with weights `1, s_1, s_2, …`, and none is longer.
struct Shifted<'a> {
    toeplitz: &'a Toeplitz,
    norms_sq: Vec<f64>,
}

impl Shifted<'_> {
    fn norm(&self, j: usize) -> f64 {
        self.norms_sq[j].sqrt() * (1.0 + f64::EPSILON)
    }

    fn distance(&self, j: usize) -> f64 {
        self.toeplitz.error * self.norm(j) * (1.0 + f64::EPSILON)
    }
}

impl EncoderColumns for Shifted<'_> {
    fn write(&self, steps: &[usize], out: &mut [f64]) -> Vec<f64> {
        let series = self.toeplitz.encoder_series();
        for (&j, column) in steps.iter().zip(out.chunks_exact_mut(series.len())) {
            column[j..].copy_from_slice(&series[..series.len() - j]);
        }
        steps.iter().map(|&j| self.distance(j)).collect()
    }

    /// `X_ij` and `X_{i+1,j+1}` differ by one product. Cost: n²/2 multiply-adds.
    fn products(&self) -> Option<Products<'_>> {
        let c = self.toeplitz.encoder_series();
        let mut sums = vec![0.0; c.len()];
        let mut lengths = 1..=c.len();
        let rows = move |out: &mut [f64]| {
            if let Some(length) = lengths.next() {
                let last = c[length - 1];
                sums[..length].iter_mut().zip(c[..length].iter().rev()).for_each(|(x, c)| *x += last * c);
                out.copy_from_slice(&sums[..length]);
            }
        };
        Some(Products {
            norms: (0..c.len()).map(|j| self.norm(j)).collect(),
            distances: (0..c.len()).map(|j| self.distance(j)).collect(),
            rows: Box::new(rows),
        })
    }
}

fn running_squares(series: &[f64]) -> impl Iterator<Item = f64> {
    series.iter().scan(0.0, |sum, x| {
        *sum += x * x;
        Some(*sum)
    })
}

/// The first terms of `1/a(x)`, as many as `a` has. Cost: O(n²).
fn inverse_series(a: &[f64]) -> Result<Vec<f64>> {
    let n = a.len();
    // Last term first, so that a product sum runs over two ascending slices.
    let mut reversed = vec![0.0; n];
    for i in 0..n {
        let known = dot(&a[1..=i], &reversed[n - i..]);
        let unit = if i == 0 { 1.0 } else { 0.0 };
        let term = (unit - known) / a[0];
        if !term.is_finite() {
            let reason = "the inverse series of the coloring overflows";
            return Err(Error::Numerical { what: "Toeplitz encoder", index: i, reason });
        }
        reversed[n - 1 - i] = term;
    }
    reversed.reverse();
    Ok(reversed)
}

/// A bound on `Σ_k |s_k|`, `c = ĉ(1 + s)`, for the exact inverse `c` of `a` and a computed one `ĉ`; infinite if there is
/// none.
///
/// With `a ĉ = 1 + r`, `s = −r/(1 + r)`, and norms of series multiply. The computed `r` is off by the rounding of
/// [`dot`], at most `DOT_ERROR Σ_k |a_k||ĉ_{i−k}|` in a term. Cost: O(n²).
fn inversion_error(a: &[f64], encoder: &[f64]) -> f64 {
    let n = a.len();
    let reversed: Vec<f64> = encoder.iter().rev().copied().collect();
    let residual = |i: usize| (dot(&a[..=i], &reversed[n - 1 - i..]) - if i == 0 { 1.0 } else { 0.0 }).abs();
    let size = |series: &[f64]| series.iter().map(|x| x.abs()).sum::<f64>();
    let rounding = DOT_ERROR * size(a) * size(encoder);
    let total = ((0..n).map(residual).sum::<f64>() + rounding) * (1.0 + 4.0 * n as f64 * f64::EPSILON);
    if total < 0.5 { total / (1.0 - total) * (1.0 + 4.0 * f64::EPSILON) } else { f64::INFINITY }
}

/// Relative error of [`dot`] against the sum of sizes: 10 roundings in a block, one for each halving of up to 2⁴⁸ terms.
const DOT_ERROR: f64 = 32.0 * f64::EPSILON;

/// Inner product, halves summed pairwise down to blocks of eight lanes: few roundings in sequence, vector instructions.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    if a.len() > 64 {
        let half = (a.len() / 2).next_multiple_of(8);
        return dot(&a[..half], &b[..half]) + dot(&a[half..], &b[half..]);
    }
    let mut lanes = [0.0; 8];
    let (a_blocks, b_blocks) = (a.chunks_exact(8), b.chunks_exact(8));
    let rest: f64 = a_blocks.remainder().iter().zip(b_blocks.remainder()).map(|(a, b)| a * b).sum();
    for (a, b) in a_blocks.zip(b_blocks) {
        for lane in 0..8 {
            lanes[lane] += a[lane] * b[lane];
        }
    }
    lanes.iter().sum::<f64>() + rest
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::{Average, Optimizer};
    use proptest::prelude::*;

    fn coloring(toeplitz: &Toeplitz) -> Mat<f64> {
        let n = toeplitz.steps();
        let mut rows = toeplitz.coloring_rows();
        let mut dense = Mat::zeros(n, n);
        for i in 0..n {
            let mut row = vec![0.0; n];
            rows(&mut row);
            row.iter().enumerate().for_each(|(j, &x)| dense[(i, j)] = x);
        }
        dense
    }

    fn sqrt_loss(toeplitz: &Toeplitz) -> f64 {
        let workload = Workload::prefix_sum(toeplitz.steps()).unwrap();
        let loss: f64 = toeplitz.decoder_row_norms_sq(&workload).iter().sum();
        (loss * toeplitz.encoder_column_norms_sq()[0]).sqrt()
    }

    #[test]
    fn one_two_and_three_steps() {
        let root = Toeplitz::sqrt_prefix_sum(3).unwrap();
        assert_eq!(root.encoder_series(), [1.0, 0.5, 0.375]);
        assert_eq!(root.coloring(), [1.0, -0.5, -0.125]);
        assert_eq!(Toeplitz::sqrt_prefix_sum(1).unwrap().coloring(), [1.0]);
        assert_eq!(Toeplitz::sqrt_prefix_sum(2).unwrap().cost(), Cost::dense(1.5));
        let norms = root.encoder_column_norms_sq();
        for (norm, exact) in norms.iter().zip([1.390625, 1.25, 1.0]) {
            assert!(*norm >= exact && *norm < exact * (1.0 + 1e-14));
        }
    }

    #[test]
    fn losses_equal_the_reference() {
        // See golden/PROVENANCE.md.
        let golden =
            [(256, 42.700517), (512, 65.374533), (1024, 99.513277), (2048, 150.721985), (4096, 227.282732)];
        for (n, exact) in golden {
            let root = Toeplitz::sqrt_prefix_sum(n).unwrap();
            assert!((sqrt_loss(&root) - exact).abs() < 6e-7, "{n}: {}", sqrt_loss(&root));
            // What is deployed, in f32, is worse by less than its precision.
            let deployed = sqrt_loss(&root.rounded().unwrap());
            assert!((deployed / exact - 1.0).abs() < 1e-6, "{n}: {deployed}");
        }
    }

    #[test]
    fn inversion_stays_within_the_slack() {
        let root = Toeplitz::sqrt_prefix_sum(20_000).unwrap();
        let inverted = Toeplitz::new(root.coloring().to_vec()).unwrap();
        let exact: Vec<f64> = running_squares(root.encoder_series()).collect();
        for (norm, exact) in inverted.encoder_column_norms_sq().iter().rev().zip(exact) {
            assert!(*norm >= exact && *norm < exact * (1.0 + 1e-10));
        }
    }

    /// The series 1/(1 − x³ − 2²⁰x⁵) in f32: its inverse, in f64, looks like the polynomial and is not.
    #[test]
    fn no_sensitivity_hides_in_rounding() {
        let mut coloring = vec![0.0; 34];
        coloring[0] = 1.0;
        for k in 1..34 {
            let back = |by: usize| if k >= by { coloring[k - by] } else { 0.0 };
            coloring[k] = back(3) + 2f64.powi(20) * back(5);
        }
        let rounded = coloring.into_iter().map(|x| f64::from(x as f32)).collect();
        let norms = Toeplitz::new(rounded).unwrap().encoder_column_norms_sq();
        assert_eq!(norms[0], f64::INFINITY);
    }

    #[test]
    fn bad_input_is_refused() {
        assert!(Toeplitz::sqrt_prefix_sum(0).is_err());
        for bad in [vec![], vec![0.0, 1.0], vec![-1.0], vec![1.0, f64::NAN]] {
            assert_eq!(Toeplitz::new(bad).unwrap_err().kind(), "invalid-argument");
        }
        assert_eq!(Toeplitz::new(vec![1e-200, 1.0, 1.0]).unwrap_err().kind(), "numerical");
        assert!(Toeplitz::new(vec![1e-60, 0.0]).unwrap().rounded().is_err());
    }

    proptest! {
        #[test]
        fn encoder_inverts_the_coloring(
            first in 0.5..2.0_f64,
            rest in prop::collection::vec(-0.4..0.4_f64, 0..24),
        ) {
            let mut coefficients = vec![first];
            coefficients.extend(rest);
            let toeplitz = Toeplitz::new(coefficients).unwrap();
            for toeplitz in [toeplitz.rounded().unwrap(), toeplitz.clone()] {
                let n = toeplitz.steps();
                let c = toeplitz.encoder();
                let error = coloring(&toeplitz) * &c - Mat::<f64>::identity(n, n);
                prop_assert!(error.norm_max() < 1e-12 * (1.0 + c.norm_max()));
                for (j, norm) in toeplitz.encoder_column_norms_sq().into_iter().enumerate() {
                    let exact = c.col(j).squared_norm_l2();
                    prop_assert!(norm >= exact * (1.0 - 1e-14));
                    let sizes = |series: &[f64]| series.iter().map(|x| x.abs()).sum::<f64>();
                    let size = sizes(toeplitz.coloring()) * sizes(toeplitz.encoder_series());
                    prop_assert!(norm <= exact * (1.0 + 1e-13 * size), "{} {}", norm, exact);
                }
            }
            prop_assert!(toeplitz.rounded().unwrap().coloring().iter().all(|&x| f64::from(x as f32) == x));
        }

        #[test]
        fn row_norms_equal_dense_rows(
            n in 1_usize..40,
            rate in 0.1..2.0_f64,
            kink in any::<bool>(),
            momentum in prop_oneof![Just(0.0), 0.1..0.95],
            nesterov in any::<bool>(),
            average in prop_oneof![Just(Average::None), Just(Average::Uniform), Just(Average::Ema(0.7))],
        ) {
            let optimizer =
                Optimizer { momentum, nesterov: nesterov && momentum > 0.0, average, ..Default::default() };
            let mut rates = vec![rate; n];
            rates[n / 2] *= if kink { 0.5 } else { 1.0 };
            let workload = Workload::sgd(rates, optimizer).unwrap();
            let root = Toeplitz::sqrt_prefix_sum(n).unwrap();
            let b = workload.to_dense() * coloring(&root);
            let constant = workload.recurrence().unwrap().is_constant();
            prop_assert_eq!(constant, n == 1 || !kink && average != Average::Uniform);
            for (i, norm) in root.decoder_row_norms_sq(&workload).into_iter().enumerate() {
                let exact = b.row(i).squared_norm_l2();
                prop_assert!((norm - exact).abs() < 1e-10 * exact, "row {}: {} {}", i, norm, exact);
            }
        }
    }
}
