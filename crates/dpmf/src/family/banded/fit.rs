//! The loss of a banded encoder by all its entries, and its minimum.

use crate::error::Result;
use crate::family::watched::Watched;
use crate::linalg::banded::LowerBanded;
use crate::simd::dispatch;
use crate::workload::Recurrence;
use rayon::prelude::*;

/// Columns of `N` that are computed side by side.
const LANES: usize = 8;

type Lanes = [f64; LANES];

/// Multiply-adds that a fit may take, about, and its most and least steps.
const WORK: f64 = 1e11;
const MOST: f64 = 400.0;
const LEAST: f64 = 40.0;

/// Encoders with `G` diagonals, columns scaled so that those of each group have squared norms that add up to 1.
pub(super) struct Bands<'a> {
    pub recurrence: &'a Recurrence,
    pub steps: usize,
    pub bands: usize,
    /// Column `t` is of group `t mod groups`.
    pub groups: usize,
}

impl Bands<'_> {
    /// Where the entry `(t, t − k)` stands.
    pub fn place(&self, t: usize, k: usize) -> usize {
        t * self.bands + k
    }

    /// The entries, scaled, of the best encoder, from a Toeplitz one.
    ///
    /// Cost: O(n² G) a step.
    ///
    /// Errors: those of the watcher.
    pub fn minimise(&self, coefficients: &[f64], watched: &mut Watched<'_>) -> Result<Vec<f64>> {
        let (n, g) = (self.steps, self.bands);
        let mut start = vec![0.0; n * g];
        for t in 0..n {
            (0..g.min(t + 1)).for_each(|k| start[t * g + k] = coefficients[k]);
        }
        let steps = (WORK / (2.0 * (n * n * g) as f64)).clamp(LEAST, MOST) as usize;
        let found = watched.minimise(start, steps, |x| self.evaluate(x))?;
        let norms = self.norms(&found.x);
        let scaled = |(place, x): (usize, f64)| {
            let (t, k) = (place / g, place % g);
            if k <= t { x / norms[(t - k) % self.groups] } else { 0.0 }
        };
        Ok(found.x.into_iter().enumerate().map(scaled).collect())
    }

    /// Norms of the columns of each group together.
    fn norms(&self, entries: &[f64]) -> Vec<f64> {
        let mut sums = vec![0.0; self.groups];
        for (t, row) in entries.chunks_exact(self.bands).enumerate() {
            row.iter().enumerate().take(t + 1).for_each(|(k, c)| sums[(t - k) % self.groups] += c * c);
        }
        sums.into_iter().map(f64::sqrt).collect()
    }

    /// `log ‖A diag(s) C⁻¹‖_F²`, with `s` the norms of the groups, and its gradient.
    pub fn evaluate(&self, entries: &[f64]) -> (f64, Vec<f64>) {
        let (n, g) = (self.steps, self.bands);
        if (0..n).any(|t| !(entries[t * g] > 0.0)) {
            return (f64::INFINITY, vec![0.0; entries.len()]);
        }
        let norms = self.norms(entries);
        let scales: Vec<f64> = (0..n).map(|t| norms[t % self.groups]).collect();
        let zero = || (0.0, vec![0.0; n * g], vec![0.0; n]);
        let starts: Vec<usize> = (0..n).step_by(LANES).collect();
        let part = |mut sum: (f64, Vec<f64>, Vec<f64>), first: usize| {
            let encoder = Encoder { entries, bands: g, recurrence: self.recurrence, scales: &scales };
            sum.0 += columns(&encoder, first, &mut sum.1, &mut sum.2);
            sum
        };
        let add = |mut a: (f64, Vec<f64>, Vec<f64>), b: (f64, Vec<f64>, Vec<f64>)| {
            a.1.iter_mut().zip(&b.1).for_each(|(a, b)| *a += b);
            a.2.iter_mut().zip(&b.2).for_each(|(a, b)| *a += b);
            (a.0 + b.0, a.1, a.2)
        };
        let (energy, mut slope, by_scales) = starts.into_par_iter().fold(zero, part).reduce(zero, add);
        let mut by_norms = vec![0.0; self.groups];
        by_scales.iter().enumerate().for_each(|(t, by)| by_norms[t % self.groups] += by);
        for (place, slope) in slope.iter_mut().enumerate() {
            let (t, k) = (place / g, place % g);
            let group = t.wrapping_sub(k) % self.groups;
            *slope = match k <= t {
                true => (*slope + by_norms[group] * entries[place] / norms[group]) / energy,
                false => 0.0,
            };
        }
        (energy.ln(), slope)
    }
}

/// What all columns share.
struct Encoder<'a> {
    entries: &'a [f64],
    bands: usize,
    recurrence: &'a Recurrence,
    scales: &'a [f64],
}

/// Energy of columns `first, first + 1, …` of `A diag(s) C⁻¹`, and its gradients by `C` and `s`, added.
#[inline(always)]
fn columns_any(encoder: &Encoder<'_>, first: usize, by_entries: &mut [f64], by_scales: &mut [f64]) -> f64 {
    let Encoder { entries, bands: g, recurrence, scales } = *encoder;
    let n = scales.len();
    let mut y: Vec<Lanes> = vec![[0.0; LANES]; n];
    for t in first..n {
        let row = &entries[t * g..][..g.min(t - first + 1)];
        let mut sum: Lanes = std::array::from_fn(|l| if t == first + l { 1.0 } else { 0.0 });
        for (k, c) in row.iter().enumerate().skip(1) {
            let past = &y[t - k];
            (0..LANES).for_each(|l| sum[l] -= c * past[l]);
        }
        y[t] = sum.map(|x| x / row[0]);
    }
    let mut v: Vec<Lanes> = y.iter().zip(scales).map(|(y, s)| y.map(|y| s * y)).collect();
    if let Some(right) = &recurrence.right {
        for t in (first..n).rev() {
            v[t] = gather(right, t, first, &v, |k| t - k);
        }
    }
    substitute(&recurrence.left, first, &mut v);
    let mut energy = 0.0;
    for v in &mut v[first..] {
        energy += v.iter().map(|x| x * x).sum::<f64>();
        *v = v.map(|x| 2.0 * x);
    }
    substitute_back(&recurrence.left, first, &mut v);
    if let Some(right) = &recurrence.right {
        for t in first..n {
            let mut sum = [0.0; LANES];
            for k in 0..=right.bandwidth().min(n - 1 - t) {
                let r = right.row(t + k)[k];
                (0..LANES).for_each(|l| sum[l] += r * v[t + k][l]);
            }
            v[t] = sum;
        }
    }
    for t in first..n {
        by_scales[t] += (0..LANES).map(|l| v[t][l] * y[t][l]).sum::<f64>();
        v[t] = v[t].map(|x| scales[t] * x);
    }
    // Cᵀw = v in place of v, and the gradient −w yᵀ.
    for t in (first..n).rev() {
        let own = entries[t * g];
        v[t] = v[t].map(|x| x / own);
        let w = v[t];
        let reach = g.min(t - first + 1);
        let (row, slopes) = (&entries[t * g..][..reach], &mut by_entries[t * g..][..reach]);
        for k in 0..reach {
            let past = &y[t - k];
            slopes[k] -= (0..LANES).map(|l| w[l] * past[l]).sum::<f64>();
        }
        for (k, c) in row.iter().enumerate().skip(1) {
            let target = &mut v[t - k];
            (0..LANES).for_each(|l| target[l] -= c * w[l]);
        }
    }
    energy
}

/// `Σ_k M_{t,t−k} v_{at(k)}` as far as column `first`.
#[inline(always)]
fn gather(matrix: &LowerBanded, t: usize, first: usize, v: &[Lanes], at: impl Fn(usize) -> usize) -> Lanes {
    let mut sum = [0.0; LANES];
    for (k, m) in matrix.row(t).iter().enumerate().take(t - first + 1) {
        let v = &v[at(k)];
        (0..LANES).for_each(|l| sum[l] += m * v[l]);
    }
    sum
}

/// `P⁻¹v`, in place.
#[inline(always)]
fn substitute(left: &LowerBanded, first: usize, v: &mut [Lanes]) {
    for t in first..v.len() {
        let row = left.row(t);
        let mut sum = v[t];
        for k in 1..row.len().min(t - first + 1) {
            (0..LANES).for_each(|l| sum[l] -= row[k] * v[t - k][l]);
        }
        v[t] = sum.map(|x| x / row[0]);
    }
}

/// `P⁻ᵀv`, in place, from row `first` on.
#[inline(always)]
fn substitute_back(left: &LowerBanded, first: usize, v: &mut [Lanes]) {
    let n = v.len();
    for t in (first..n).rev() {
        let mut sum = v[t];
        for k in 1..=left.bandwidth().min(n - 1 - t) {
            let p = left.row(t + k)[k];
            (0..LANES).for_each(|l| sum[l] -= p * v[t + k][l]);
        }
        v[t] = sum.map(|x| x / left.row(t)[0]);
    }
}

dispatch! {
    fn columns / columns_portable / columns_avx2 = columns_any(
        encoder: &Encoder<'_>, first: usize, by_entries: &mut [f64], by_scales: &mut [f64]
    ) -> f64;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::form::{self, Representation};
    use crate::workload::{Optimizer, Workload};

    #[test]
    fn values_and_gradients_are_those_of_the_matrix() {
        let nesterov = Optimizer { momentum: 0.5, nesterov: true, ..Default::default() };
        for (n, bands, groups) in [(11, 3, 4), (11, 4, 11), (9, 1, 3)] {
            let rates = (0..n).map(|t| 1.0 + 0.1 * t as f64).collect();
            let workload = Workload::sgd(rates, nesterov).unwrap();
            let fit = Bands { recurrence: workload.recurrence().unwrap(), steps: n, bands, groups };
            let entries: Vec<f64> = (0..n * bands)
                .map(|i| if i % bands == 0 { 1.2 } else { 0.4 } + 0.2 * (i as f64).sin())
                .collect();
            let (value, gradient) = fit.evaluate(&entries);
            let norms = fit.norms(&entries);
            let scaled = |t: usize, k: usize| entries[fit.place(t, k)] / norms[(t - k) % groups];
            let form = form::Banded::from_encoder(n, bands, scaled).unwrap();
            let exact: f64 = form.decoder_row_norms_sq(&workload).iter().sum();
            assert!((value - exact.ln()).abs() < 1e-12, "{value} {}", exact.ln());
            for (i, slope) in gradient.iter().enumerate() {
                let moved = |step: f64| {
                    let mut entries = entries.clone();
                    entries[i] += step;
                    fit.evaluate(&entries).0
                };
                let difference = (moved(1e-5) - moved(-1e-5)) / 2e-5;
                let expected = if i % bands <= i / bands { difference } else { 0.0 };
                assert!((expected - slope).abs() < 1e-8, "{i}: {difference} {slope}");
            }
        }
    }
}
