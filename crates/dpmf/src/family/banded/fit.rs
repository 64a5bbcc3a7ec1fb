//! The loss of a banded encoder by all its entries, and its minimum.
//!
//! With `C y = z` the last `G − 1` rows of `y` and the states of the optimizer are a state `x` of few numbers, which a step
//! moves by `x ← M x + q z`, `M = M_0 + d φᵀ`: what is older leaves, the optimizer takes its step, and `y_t = φᵀx + z_t/C_tt`
//! enters along `d`. The covariance of `x` gives the loss, and its gradient comes from the energy that `x` sends into the
//! steps ahead, both in O(G²) a step.

use crate::error::Result;
use crate::family::observed_fit::Watched;
use crate::family::plant::Plant;
use crate::linalg::product::Rows;
use crate::simd::dispatch;

/// Multiply-adds that a fit may take, about, and its most and least steps.
const WORK: f64 = 4e10;
const MOST: f64 = 400.0;
const LEAST: f64 = 40.0;

/// Encoders with `G` diagonals, columns scaled so that those of each group have squared norms that add up to 1.
pub(super) struct Bands<'a> {
    pub plant: &'a Plant,
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

    /// The entries of a Toeplitz encoder whose columns are scaled.
    pub fn toeplitz(&self, coefficients: &[f64], scale: impl Fn(usize) -> f64) -> Vec<f64> {
        let (n, g) = (self.steps, self.bands);
        let mut entries = vec![0.0; n * g];
        for t in 0..n {
            (0..g.min(t + 1)).for_each(|k| entries[t * g + k] = coefficients[k] * scale(t - k));
        }
        entries
    }

    /// The entries of an encoder with fewer diagonals.
    pub fn widened(&self, smaller: &Bands<'_>, entries: &[f64]) -> Vec<f64> {
        let mut out = vec![0.0; self.steps * self.bands];
        let rows = out.chunks_exact_mut(self.bands).zip(entries.chunks_exact(smaller.bands));
        rows.for_each(|(out, row)| out[..row.len()].copy_from_slice(row));
        out
    }

    /// The entries, scaled, of the best encoder, from the best of some starts.
    ///
    /// Cost: O(n G²) a step.
    ///
    /// Errors: those of the watcher.
    pub fn minimise(&self, starts: Vec<Vec<f64>>, watched: &mut Watched<'_>) -> Result<Vec<f64>> {
        let (n, g) = (self.steps, self.bands);
        let valued = starts.into_iter().map(|start| (self.evaluate(&start).0, start));
        let start = valued.min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, start)| start).unwrap_or_default();
        let steps = (WORK / (5.0 * (n * g * g) as f64)).clamp(LEAST, MOST) as usize;
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
        let invertible = (0..n).all(|t| entries[t * g] > 0.0);
        if !invertible {
            return (f64::INFINITY, vec![0.0; entries.len()]);
        }
        let norms = self.norms(entries);
        let scales: Vec<f64> = (0..n).map(|t| norms[t % self.groups]).collect();
        let encoder = Encoder { entries, bands: g, plant: self.plant, scales: &scales };
        let (energy, mut slope, by_scales) = encoder.energy();
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

/// An encoder before its columns are scaled.
struct Encoder<'a> {
    entries: &'a [f64],
    bands: usize,
    plant: &'a Plant,
    scales: &'a [f64],
}

/// One step as it moves the state.
struct Motion<'a> {
    /// Where `y_t` takes the place of the oldest.
    slot: Option<usize>,
    /// `φ`.
    feedback: Vec<f64>,
    /// `1/C_tt`.
    own: f64,
    /// `d`.
    entering: Vec<f64>,
    transition: &'a [f64],
}

impl Encoder<'_> {
    fn steps(&self) -> usize {
        self.scales.len()
    }

    /// Numbers in the state.
    fn size(&self) -> usize {
        self.bands - 1 + self.plant.states
    }

    fn motion(&self, t: usize) -> Motion<'_> {
        let (ring, w) = (self.bands - 1, self.plant.states);
        let row = &self.entries[t * self.bands..][..self.bands.min(t + 1)];
        let mut feedback = vec![0.0; self.size()];
        row.iter().enumerate().skip(1).for_each(|(k, c)| feedback[(t - k) % ring] = -c / row[0]);
        let mut entering = vec![0.0; self.size()];
        let slot = t.checked_rem(ring);
        if let Some(slot) = slot {
            entering[slot] = 1.0;
        }
        let inputs = &self.plant.input[t * w..][..w];
        entering[ring..].iter_mut().zip(inputs).for_each(|(x, g)| *x = g * self.scales[t]);
        Motion {
            slot,
            feedback,
            own: 1.0 / row[0],
            entering,
            transition: &self.plant.transition[t * w * w..][..w * w],
        }
    }

    /// `‖A diag(s) C⁻¹‖_F²`, and its gradients by `C` and `s`.
    ///
    /// Covariances are kept at the beginnings of segments and made again within one.
    fn energy(&self) -> (f64, Vec<f64>, Vec<f64>) {
        let (n, g, m) = (self.steps(), self.bands, self.size());
        let length = (n as f64).sqrt().ceil() as usize;
        let mut kept = Vec::with_capacity(n.div_ceil(length));
        let (mut covariance, mut energy) = (Rows::zeros(m, m), 0.0);
        for t in 0..n {
            if t % length == 0 {
                kept.push(covariance.clone());
            }
            self.motion(t).advance(&mut covariance);
            energy += covariance.at(m - 1, m - 1);
        }
        let (mut by_entries, mut by_scales) = (vec![0.0; n * g], vec![0.0; n]);
        let mut ahead = Rows::zeros(m, m);
        for (segment, first) in kept.into_iter().enumerate().rev() {
            let steps = segment * length..((segment + 1) * length).min(n);
            let mut covariances = vec![first];
            for t in steps.clone().take(steps.len() - 1) {
                let mut next = covariances[covariances.len() - 1].clone();
                self.motion(t).advance(&mut next);
                covariances.push(next);
            }
            for (t, covariance) in steps.zip(&covariances).rev() {
                let motion = self.motion(t);
                *ahead.at_mut(m - 1, m - 1) += 1.0;
                let slope = motion.pull_back(covariance, &mut ahead);
                let w = self.plant.states;
                let inputs = &self.plant.input[t * w..][..w];
                by_scales[t] = inputs.iter().zip(&slope.states).map(|(g, x)| g * x).sum();
                let (row, out) = (&self.entries[t * g..][..g], &mut by_entries[t * g..][..g]);
                out[0] = -slope.own * motion.own * motion.own;
                for k in 1..g.min(t + 1) {
                    let by = slope.feedback[(t - k) % (g - 1)];
                    out[k] = -by * motion.own;
                    out[0] += by * row[k] * motion.own * motion.own;
                }
            }
        }
        (energy, by_entries, by_scales)
    }
}

/// Gradients by the parts of a motion.
struct MotionSlope {
    feedback: Vec<f64>,
    own: f64,
    /// By what the optimizer's states take.
    states: Vec<f64>,
}

impl Motion<'_> {
    fn states(&self) -> usize {
        self.transition.len().isqrt()
    }

    /// `M_0 x`.
    fn keep(&self, x: &[f64]) -> Vec<f64> {
        let w = self.states();
        let ring = x.len() - w;
        let mut out = x.to_vec();
        if let Some(slot) = self.slot {
            out[slot] = 0.0;
        }
        for i in 0..w {
            out[ring + i] = self.transition[i * w..][..w].iter().zip(&x[ring..]).map(|(f, x)| f * x).sum();
        }
        out
    }

    /// `M_0ᵀx`.
    fn keep_transposed(&self, x: &[f64]) -> Vec<f64> {
        let w = self.states();
        let ring = x.len() - w;
        let mut out = x.to_vec();
        if let Some(slot) = self.slot {
            out[slot] = 0.0;
        }
        for i in 0..w {
            out[ring + i] = (0..w).map(|j| self.transition[j * w + i] * x[ring + j]).sum();
        }
        out
    }

    /// `P ← M P Mᵀ + q qᵀ`.
    fn advance(&self, covariance: &mut Rows) {
        let (with, variance) = self.covariance_of_entry(covariance);
        self.keep_both(covariance, |i, j| i * self.states() + j);
        // d is zero but for the slot and the optimizer.
        let kept = self.keep(&with);
        let w = self.states();
        let places = self.slot.into_iter().chain(kept.len() - w..kept.len());
        for i in places {
            let d = self.entering[i];
            for (j, x) in kept.iter().enumerate() {
                *covariance.at_mut(i, j) += d * x;
                *covariance.at_mut(j, i) += d * x;
            }
        }
        let places = self.slot.into_iter().chain(kept.len() - w..kept.len());
        for (i, j) in places.clone().flat_map(|i| places.clone().map(move |j| (i, j))) {
            *covariance.at_mut(i, j) += variance * self.entering[i] * self.entering[j];
        }
    }

    /// Covariances of `y_t` with the state, and its variance.
    fn covariance_of_entry(&self, covariance: &Rows) -> (Vec<f64>, f64) {
        let with = times(covariance, &self.feedback);
        let variance = dot(&with, &self.feedback) + self.own * self.own;
        (with, variance)
    }

    /// `M_0 P M_0ᵀ` for a symmetric `P`, in place, where `at(i, j)` is the place of `F_ij`; `M_0ᵀP M_0` with `F_ji`.
    fn keep_both(&self, matrix: &mut Rows, at: impl Fn(usize, usize) -> usize) {
        let (m, w) = (matrix.rows, self.states());
        let ring = m - w;
        if let Some(slot) = self.slot {
            for i in 0..m {
                (*matrix.at_mut(i, slot), *matrix.at_mut(slot, i)) = (0.0, 0.0);
            }
        }
        let mut old = vec![0.0; w];
        for i in 0..m {
            old.copy_from_slice(&matrix.row(i)[ring..]);
            for j in 0..w {
                *matrix.at_mut(i, ring + j) = (0..w).map(|l| self.transition[at(j, l)] * old[l]).sum();
            }
        }
        for i in 0..ring {
            for j in 0..w {
                *matrix.at_mut(ring + j, i) = matrix.at(i, ring + j);
            }
        }
        for i in ring..m {
            (0..w).for_each(|l| old[l] = matrix.at(ring + l, i));
            for j in 0..w {
                *matrix.at_mut(ring + j, i) = (0..w).map(|l| self.transition[at(j, l)] * old[l]).sum();
            }
        }
    }

    /// Gradients of `tr(Q⁺P⁺)`, and `Q = MᵀQ⁺M` in the place of `Q⁺`.
    fn pull_back(&self, covariance: &Rows, ahead: &mut Rows) -> MotionSlope {
        let (with, variance) = self.covariance_of_entry(covariance);
        let sent = times(ahead, &self.entering);
        let energy = dot(&sent, &self.entering);
        let kept = self.keep_transposed(&sent);
        let direction: Vec<f64> =
            kept.iter().zip(&self.feedback).map(|(x, f)| 2.0 * (x + energy * f)).collect();
        let feedback = times(covariance, &direction);
        let mut moved = self.keep(&with);
        moved.iter_mut().zip(&self.entering).for_each(|(x, d)| *x = 2.0 * (*x + variance * d));
        let w = self.states();
        let by_states = (ahead.rows - w..ahead.rows).map(|i| dot(ahead.row(i), &moved)).collect();
        self.keep_both(ahead, |i, j| j * self.states() + i);
        // Q += φ kᵀ + k φᵀ + e φ φᵀ.
        let half: Vec<f64> = kept.iter().zip(&self.feedback).map(|(k, f)| k + 0.5 * energy * f).collect();
        add_symmetric(ahead, &self.feedback, &half);
        MotionSlope { feedback, own: 2.0 * energy * self.own, states: by_states }
    }
}

/// `P x` for a symmetric `P`.
fn times(matrix: &Rows, x: &[f64]) -> Vec<f64> {
    Rows { rows: 1, columns: x.len(), values: x.to_vec() }.times(matrix).values
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// `P ← P + x yᵀ + y xᵀ`.
#[inline(always)]
fn add_symmetric_any(matrix: &mut Rows, x: &[f64], y: &[f64]) {
    for i in 0..matrix.rows {
        let (a, b) = (x[i], y[i]);
        let row = matrix.row_mut(i);
        row.iter_mut().zip(x).zip(y).for_each(|((p, x), y)| *p += a * y + b * x);
    }
}

dispatch! {
    fn add_symmetric / add_symmetric_portable / add_symmetric_avx2 = add_symmetric_any(
        matrix: &mut Rows, x: &[f64], y: &[f64]
    );
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
            let plant = Plant::new(&workload).unwrap();
            let fit = Bands { plant: &plant, steps: n, bands, groups };
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
