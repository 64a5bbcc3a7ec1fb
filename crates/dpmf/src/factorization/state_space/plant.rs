//! The workload itself as a state space.

use crate::linalg::banded::LowerBanded;
use crate::workload::Recurrence;

/// `y = A u` with `P y = R u`, in observer form.
///
/// The state `a` holds what past steps still owe to the equations ahead: `a[k]` is the part of equation `i + k`
/// of `P y = R u` that is known before step `i`. Its length is the longer of the two bandwidths, and no division
/// but that by the diagonal of `P` occurs, so nothing has to be assumed about common factors of `P` and `R`.
pub(super) struct Plant<'a> {
    recurrence: &'a Recurrence,
    order: usize,
}

/// One step: `y = read·a[0] + direct·u`, then `a[k] ← a[k + 1] + feedback[k]·a[0] + input[k]·u`.
#[derive(Clone, Debug, Default)]
pub(super) struct PlantStep {
    pub read: f64,
    pub direct: f64,
    pub feedback: Vec<f64>,
    pub input: Vec<f64>,
}

impl<'a> Plant<'a> {
    pub fn new(recurrence: &'a Recurrence) -> Self {
        let reach = recurrence.right.as_ref().map_or(0, LowerBanded::bandwidth);
        Self { recurrence, order: recurrence.left.bandwidth().max(reach) }
    }

    pub fn order(&self) -> usize {
        self.order
    }

    pub fn steps(&self) -> usize {
        self.recurrence.left.n()
    }

    /// Writes the coefficients of step `i`.
    pub fn step(&self, i: usize, out: &mut PlantStep) {
        let Recurrence { left, right } = self.recurrence;
        let pivot = left.row(i)[0];
        out.read = 1.0 / pivot;
        out.direct = right.as_ref().map_or(1.0, |r| r.row(i)[0]) / pivot;
        out.feedback.clear();
        out.input.clear();
        // Equations past the last step are owed nothing.
        let entry = |m: &LowerBanded, k: usize| {
            if k <= m.bandwidth() && i + k < m.n() { m.row(i + k)[k] } else { 0.0 }
        };
        for k in 1..=self.order {
            let owed = -entry(left, k);
            out.feedback.push(owed * out.read);
            out.input.push(right.as_ref().map_or(0.0, |r| entry(r, k)) + owed * out.direct);
        }
    }

    /// `Σ_i v_i ‖A e_i‖²`, the trace of `A D Aᵀ`: the variance that white gradients of variance `v` give the
    /// iterates, summed forward without cancellation.
    pub fn trace(&self, v: &[f64]) -> f64 {
        let m = self.order;
        let mut covariance = vec![0.0; m * m];
        let mut next = covariance.clone();
        let mut step = PlantStep::default();
        let mut trace = 0.0;
        for (i, &variance) in v.iter().enumerate() {
            self.step(i, &mut step);
            let head = if m > 0 { covariance[0] } else { 0.0 };
            trace += step.read * step.read * head + step.direct * step.direct * variance;
            let at = |a: usize, b: usize| if a < m && b < m { covariance[a * m + b] } else { 0.0 };
            for a in 0..m {
                for b in 0..m {
                    next[a * m + b] = at(a + 1, b + 1)
                        + step.feedback[a] * at(0, b + 1)
                        + at(a + 1, 0) * step.feedback[b]
                        + step.feedback[a] * head * step.feedback[b]
                        + step.input[a] * variance * step.input[b];
                }
            }
            std::mem::swap(&mut covariance, &mut next);
        }
        trace
    }

    /// An interval that holds the spectrum of `K = (A D Aᵀ)⁻¹`. Cost: O(n w²).
    ///
    /// Below, the trace of the inverse. Above, the largest row sum of `|Y|ᵀ|Y| ≥ |K|`, where `K = YᵀY` with
    /// `Y = D^{-1/2}R⁻¹P`, and `R⁻¹` is bounded by the inverse of `R`'s comparison matrix.
    pub fn spectrum(&self, v: &[f64]) -> (f64, f64) {
        let n = self.steps();
        let Recurrence { left, right } = self.recurrence;
        let mut x: Vec<f64> = (0..n).map(|i| left.row(i).iter().map(|p| p.abs()).sum()).collect();
        if let Some(right) = right {
            for i in 0..n {
                let row = right.row(i);
                let known: f64 = (1..row.len().min(i + 1)).map(|k| row[k].abs() * x[i - k]).sum();
                x[i] = (x[i] + known) / row[0].abs();
            }
        }
        x.iter_mut().zip(v).for_each(|(x, v)| *x /= v);
        if let Some(right) = right {
            for i in (0..n).rev() {
                let last = right.bandwidth().min(n - 1 - i);
                let known: f64 = (1..=last).map(|k| right.row(i + k)[k].abs() * x[i + k]).sum();
                x[i] = (x[i] + known) / right.row(i)[0].abs();
            }
        }
        let max = (0..n)
            .map(|i| {
                let last = left.bandwidth().min(n - 1 - i);
                (0..=last).map(|k| left.row(i + k)[k].abs() * x[i + k]).sum()
            })
            .fold(0.0, f64::max);
        (1.0 / self.trace(v), max)
    }
}
