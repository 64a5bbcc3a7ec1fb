//! The workload itself as a state space.

use crate::error::Result;
use crate::form::{Representation, StateSpace};
use crate::linalg::banded::LowerBanded;
use crate::workload::realisation::Realisation;
use crate::workload::spectrum::Spectrum;
use crate::workload::{Recurrence, Workload};

/// `y = A u` in states of its own.
#[derive(Clone)]
pub(super) struct Plant<'a> {
    form: Form<'a>,
    order: usize,
    spectrum: Spectrum,
}

#[derive(Clone, Copy)]
enum Form<'a> {
    /// Observer form of `P y = R u`: the state `a` holds what past steps still owe to the equations ahead, `a[k]` the part
    /// of equation `i + k` that is known before step `i`. Its length is the longer of the two bandwidths, and no division
    /// but that by the diagonal of `P` occurs, so nothing has to be assumed about common factors of `P` and `R`.
    Observer(&'a Recurrence),
    /// The optimizer's momentum, displacement and average: well scaled whatever the step sizes do.
    Optimizer(Realisation<'a>),
}

/// One step: `y = read·a + direct·u`, then `a ← transition·a + input·u`.
#[derive(Clone, Debug, Default)]
pub(super) struct PlantStep {
    pub read: Vec<f64>,
    pub direct: f64,
    /// By rows.
    pub transition: Vec<f64>,
    pub input: Vec<f64>,
}

impl<'a> Plant<'a> {
    /// A recurrence in observer form.
    ///
    /// Errors: a bandwidth above [`MAX_BANDWIDTH`](crate::linalg::MAX_BANDWIDTH).
    pub fn new(recurrence: &'a Recurrence) -> Result<Self> {
        let reach = recurrence.right.as_ref().map_or(0, LowerBanded::bandwidth);
        let order = recurrence.left.bandwidth().max(reach);
        Ok(Self { form: Form::Observer(recurrence), order, spectrum: Spectrum::new(recurrence)? })
    }

    /// The optimizer that factorizations of a workload are designed for; `None` for a matrix.
    pub fn of(workload: &'a Workload) -> Option<Result<Self>> {
        let (recurrence, realisation) = (workload.recurrence()?, workload.design_realisation()?);
        let form = Form::Optimizer(realisation);
        let build = |spectrum| Self { form, order: realisation.states(), spectrum };
        Some(Spectrum::new(recurrence).map(build))
    }

    pub fn order(&self) -> usize {
        self.order
    }

    pub fn steps(&self) -> usize {
        match self.form {
            Form::Observer(recurrence) => recurrence.left.n(),
            Form::Optimizer(realisation) => realisation.steps(),
        }
    }

    /// An interval that holds the spectrum of `A D Aᵀ`, `D = diag(v)`.
    pub fn spectrum(&self, v: &[f64]) -> (f64, f64) {
        self.spectrum.bounds(v)
    }

    /// Writes the coefficients of step `i`.
    pub fn step(&self, i: usize, out: &mut PlantStep) {
        match self.form {
            Form::Observer(recurrence) => observer(recurrence, self.order, i, out),
            Form::Optimizer(realisation) => {
                // The last state after the step is the output.
                realisation.write(i, &mut out.transition, &mut out.input);
                let last = self.order - 1;
                out.read.clear();
                out.read.extend_from_slice(&out.transition[last * self.order..]);
                out.direct = out.input[last];
            }
        }
    }
}

fn observer(Recurrence { left, right }: &Recurrence, order: usize, i: usize, out: &mut PlantStep) {
    let pivot = left.row(i)[0];
    out.direct = right.as_ref().map_or(1.0, |r| r.row(i)[0]) / pivot;
    for (values, length) in
        [(&mut out.read, order), (&mut out.transition, order * order), (&mut out.input, 0)]
    {
        values.clear();
        values.resize(length, 0.0);
    }
    // Equations past the last step are owed nothing.
    let entry =
        |m: &LowerBanded, k: usize| if k <= m.bandwidth() && i + k < m.n() { m.row(i + k)[k] } else { 0.0 };
    for k in 1..=order {
        let owed = -entry(left, k);
        out.transition[(k - 1) * order] = owed / pivot;
        out.input.push(right.as_ref().map_or(0.0, |r| entry(r, k)) + owed * out.direct);
        if k < order {
            out.transition[(k - 1) * order + k] += 1.0;
        }
    }
    out.read.iter_mut().take(1).for_each(|x| *x = 1.0 / pivot);
}

impl StateSpace {
    /// Squared row norms of `A N` for a plant `A`, whose output joins its states.
    pub(super) fn row_norms_sq_after_plant(&self, plant: &Plant<'_>) -> Vec<f64> {
        assert_eq!(plant.steps(), self.steps(), "filter and workload have the same number of steps");
        let m = plant.order();
        let mut step = PlantStep::default();
        self.row_norms_sq_after(m + 1, |i, (f, g)| {
            plant.step(i, &mut step);
            f.fill(0.0);
            for k in 0..m {
                f[k * (m + 1)..][..m].copy_from_slice(&step.transition[k * m..][..m]);
            }
            f[m * (m + 1)..][..m].copy_from_slice(&step.read);
            g[..m].copy_from_slice(&step.input);
            g[m] = step.direct;
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::{Average, Optimizer};

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
    fn both_plants_are_the_workload() {
        for workload in workloads() {
            let observer = Plant::new(workload.recurrence().unwrap()).unwrap();
            let optimizer = Plant::of(&workload).unwrap().unwrap();
            assert_eq!(observer.order(), optimizer.order());
            for (plant, forgets) in [(observer, true), (optimizer, false)] {
                let u = [1.0, -2.0, 0.5, 3.0, 0.25, -1.0, 2.0];
                let mut expected = u.to_vec();
                workload.apply(&mut expected);
                let m = plant.order();
                let mut state = vec![0.0; m];
                let mut step = PlantStep::default();
                let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
                for i in 0..u.len() {
                    plant.step(i, &mut step);
                    let y = dot(&step.read, &state) + step.direct * u[i];
                    assert!((y - expected[i]).abs() < 1e-12, "{y} {}", expected[i]);
                    let rows = step.transition.chunks_exact(m).zip(&step.input);
                    state = rows.map(|(row, input)| dot(row, &state) + input * u[i]).collect();
                }
                // Nothing is owed beyond the last step.
                assert!(!forgets || state.iter().all(|s| s.abs() < 1e-12), "{state:?}");
            }
        }
    }
}
