//! What families of Toeplitz matrices share: loss, sensitivity and their gradients from one column.

use crate::error::Result;
use crate::problem::Problem;
use crate::workload::Recurrence;
use rayon::prelude::*;

/// Loss and sensitivity of Toeplitz factors for a workload and a participation.
pub(super) struct Measure<'a> {
    recurrence: &'a Recurrence,
    /// Whether the workload is Toeplitz too.
    constant: bool,
    /// `K`.
    pub times: usize,
    /// `b`.
    pub separation: usize,
}

impl<'a> Measure<'a> {
    /// For a problem with a recurrence.
    ///
    /// Errors: a workload that is a matrix; a participation that does not fit the steps.
    pub fn new(problem: &'a Problem) -> Result<Self> {
        let (recurrence, n) = (problem.recurrence()?, problem.steps());
        let pattern = problem.participation().pattern(n)?;
        let separation = pattern.separation.unwrap_or(n);
        Ok(Self { recurrence, constant: recurrence.is_constant(), times: pattern.times, separation })
    }

    /// `‖A N‖_F²` for the first column `ν` of `N`, and its gradient.
    ///
    /// Cost: O(n w) for a workload with constant coefficients, O(n² w) for any other.
    pub fn energy(&self, coloring: &[f64]) -> (f64, Vec<f64>) {
        let n = coloring.len();
        if self.constant {
            let mut column = coloring.to_vec();
            self.recurrence.apply(&mut column);
            let mut total = 0.0;
            for (k, x) in column.iter_mut().enumerate() {
                let weight = (n - k) as f64;
                total += weight * *x * *x;
                *x *= 2.0 * weight;
            }
            self.recurrence.apply_transposed(&mut column);
            return (total, column);
        }
        let shifted = |shift: usize| {
            let mut column = vec![0.0; n];
            column[shift..].copy_from_slice(&coloring[..n - shift]);
            self.recurrence.apply(&mut column);
            let total: f64 = column.iter().map(|x| x * x).sum();
            column.iter_mut().for_each(|x| *x *= 2.0);
            self.recurrence.apply_transposed(&mut column);
            column.rotate_left(shift);
            column[n - shift..].fill(0.0);
            (total, column)
        };
        let add = |mut a: (f64, Vec<f64>), b: (f64, Vec<f64>)| {
            a.1.iter_mut().zip(b.1).for_each(|(a, b)| *a += b);
            (a.0 + b.0, a.1)
        };
        (0..n).into_par_iter().map(shifted).reduce(|| (0.0, vec![0.0; n]), add)
    }

    /// `Σ|X_ij|` over steps `0, b, 2b, …`, for the first column `c` of `C`, and its gradient.
    ///
    /// That is γ² for coefficients that neither increase nor are negative, and for fewer of them than `b`. What is deployed
    /// is measured without such assumptions.
    /// Cost: O(n K²).
    pub fn sensitivity_sq(&self, encoder: &[f64]) -> (f64, Vec<f64>) {
        let (n, b) = (encoder.len(), self.separation);
        let count = self.times.min(n.div_ceil(b));
        let mut slope = vec![0.0; n];
        let mut total = 0.0;
        for i in 0..count {
            for j in i..count {
                let (near, far) = (&encoder[(j - i) * b..], &encoder[..n - j * b]);
                let product: f64 = near.iter().zip(far).map(|(x, y)| x * y).sum();
                let factor = if i == j { 1.0 } else { 2.0 } * product.signum();
                total += factor * product;
                for k in 0..n - j * b {
                    slope[k] += factor * encoder[k + (j - i) * b];
                    slope[k + (j - i) * b] += factor * encoder[k];
                }
            }
        }
        (total, slope)
    }

    /// `log ‖A N‖_F² + log γ²`, and its gradients by `ν` and by `c`.
    pub fn objective(&self, coloring: &[f64], encoder: &[f64]) -> (f64, [Vec<f64>; 2]) {
        let relative = |(value, mut slope): (f64, Vec<f64>)| {
            slope.iter_mut().for_each(|x| *x /= value);
            (value.ln(), slope)
        };
        let (energy, by_coloring) = relative(self.energy(coloring));
        let (sensitivity, by_encoder) = relative(self.sensitivity_sq(encoder));
        (energy + sensitivity, [by_coloring, by_encoder])
    }
}

/// The first `n` terms of `1/a(x)`, `a` short with `a_0 = 1`. Cost: O(n·len).
pub(super) fn inverse(a: &[f64], n: usize) -> Vec<f64> {
    let mut out = vec![0.0; n];
    for t in 0..n {
        let known: f64 = a.iter().enumerate().skip(1).take(t).map(|(k, a)| a * out[t - k]).sum();
        out[t] = f64::from(u8::from(t == 0)) - known;
    }
    out
}

/// The gradient by `a`, from that by `1/a`.
pub(super) fn inverse_pull_back(a: &[f64], inverse: &[f64], slope: &[f64]) -> Vec<f64> {
    let n = inverse.len();
    // T(a) x = e_0, so that T(a)ᵀy = slope gives −y xᵀ.
    let mut y = slope.to_vec();
    for t in (0..n).rev() {
        let known: f64 = a.iter().enumerate().skip(1).take(n - 1 - t).map(|(k, a)| a * y[t + k]).sum();
        y[t] -= known;
    }
    let product = |k: usize| y[k.min(n)..].iter().zip(inverse).map(|(y, x)| y * x).sum::<f64>();
    (0..a.len()).map(|k| -product(k)).collect()
}

/// The first terms of `(1 − x)^{power/2}` for a power of 1 or −1.
pub(super) fn square_root(power: f64, terms: usize) -> Vec<f64> {
    let mut term = 1.0;
    let next = |k: usize| {
        let now = term;
        term *= (k as f64 - power / 2.0) / (k as f64 + 1.0);
        now
    };
    (0..terms).map(next).collect()
}
