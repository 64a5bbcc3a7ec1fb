//! The workload itself as a state space.

use super::StateSpace;
use crate::factorization::Representation;
use crate::linalg::banded::LowerBanded;
use crate::workload::Recurrence;

/// `y = A u` with `P y = R u`, in observer form.
///
/// The state `a` holds what past steps still owe to the equations ahead: `a[k]` is the part of equation
/// `i + k` of `P y = R u` that is known before step `i`. Its length is the longer of the two bandwidths,
/// and no division but that by the diagonal of `P` occurs, so nothing has to be assumed about common
/// factors of `P` and `R`.
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
}

impl StateSpace {
    /// Squared row norms of `A N` for `A = P⁻¹R`, whose output joins its states.
    pub(super) fn row_norms_sq_after_recurrence(&self, recurrence: &Recurrence) -> Vec<f64> {
        let plant = Plant::new(recurrence);
        assert_eq!(plant.steps(), self.steps(), "filter and workload have the same number of steps");
        let m = plant.order();
        let mut step = PlantStep::default();
        self.row_norms_sq_after(m + 1, |i, (f, g)| {
            plant.step(i, &mut step);
            f.fill(0.0);
            for k in 0..m {
                f[k * (m + 1)] += step.feedback[k];
                if k + 1 < m {
                    f[k * (m + 1) + k + 1] += 1.0;
                }
            }
            if m > 0 {
                f[m * (m + 1)] = step.read;
            }
            g[..m].copy_from_slice(&step.input);
            g[m] = step.direct;
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::{Average, Optimizer, Workload};

    fn workloads() -> Vec<Workload> {
        let eta = vec![1.0, 0.5, 0.8, 2.0, 0.1, 1.0, 0.3];
        let heavy = Optimizer { momentum: 0.9, ..Optimizer::default() };
        let nesterov = Optimizer { nesterov: true, weight_decay: 0.1, coupled: true, ..heavy };
        let averaged = Optimizer { average: Average::Uniform, ..heavy };
        [Optimizer::default(), heavy, nesterov, averaged]
            .map(|optimizer| Workload::sgd(eta.clone(), optimizer).unwrap())
            .to_vec()
    }

    #[test]
    fn the_plant_is_the_workload() {
        for workload in workloads() {
            let plant = Plant::new(workload.recurrence().unwrap());
            let u = [1.0, -2.0, 0.5, 3.0, 0.25, -1.0, 2.0];
            let mut expected = u.to_vec();
            workload.apply(&mut expected);
            let mut state = vec![0.0; plant.order() + 1];
            let mut step = PlantStep::default();
            for i in 0..u.len() {
                plant.step(i, &mut step);
                let y = step.read * state[0] + step.direct * u[i];
                assert!((y - expected[i]).abs() < 1e-12, "{y} {}", expected[i]);
                let head = state[0];
                state.rotate_left(1);
                state[plant.order()] = 0.0;
                for k in 0..plant.order() {
                    state[k] += step.feedback[k] * head + step.input[k] * u[i];
                }
            }
            // Nothing is owed beyond the last step.
            assert!(state.iter().all(|s| s.abs() < 1e-12), "{state:?}");
        }
    }
}
