//! The backward sweep: control laws of the processes, and what their states do to the iterates.

use super::modes::Modes;
use super::plant::PlantStep;
use super::processes::{CostToGo, Law, Processes, Workspace};
use crate::linalg::gramian::Root;

/// What the backward sweep carries from step to step, and all it needs to start again.
#[derive(Clone)]
pub(super) struct Checkpoint {
    cost: CostToGo,
    /// Observability Gramian of `A N`, for the joint state `(a, s)` of the workload and the processes: the
    /// energy that it sends into the iterates ahead. Of use are the columns of `s`, for an `a` that is
    /// zero: truncation disturbs the gradient noise, not the workload.
    pub energy: Root,
}

/// The sweep with its work space.
pub(super) struct Backward<'p, 'a> {
    processes: &'p Processes<'a>,
    work: Workspace,
    plant: PlantStep,
    transition: Modes,
    h: Vec<f64>,
    row: Vec<f64>,
    old: Vec<f64>,
}

impl Checkpoint {
    /// After the last step.
    pub fn terminal(processes: &Processes<'_>) -> Self {
        Self {
            cost: processes.terminal_cost(),
            energy: Root::new(processes.plant.order() + processes.states()),
        }
    }
}

impl<'p, 'a> Backward<'p, 'a> {
    pub fn new(processes: &'p Processes<'a>) -> Self {
        let (states, m) = (processes.states(), processes.plant.order());
        Self {
            processes,
            work: processes.workspace(),
            plant: PlantStep::default(),
            transition: Modes::zeros(m, processes.len()),
            h: vec![0.0; states],
            row: vec![0.0; m + states],
            old: vec![0.0; m],
        }
    }

    /// Takes `at` from after step `i` to before it and writes the law of the step.
    ///
    /// Joint system: `u = h s`, `y = read·a + direct·u`, `a ← Φa + Γu`, `s ← F s`; so
    /// `R ← R [Φ Γh; 0 F]` and the row of `y` joins.
    pub fn step(&mut self, i: usize, at: &mut Checkpoint, gains: &mut [f64], spread: &mut [f64]) {
        let Self { processes, work, plant, transition: f, h, row, old } = self;
        let m = processes.plant.order();
        processes.plant.step(i, plant);
        processes.step_back(i, plant, &mut at.cost, gains, spread, work);
        let law = Law { gains, spread };
        processes.transition(plant, law, f);
        processes.output(law, h);
        if m == 0 {
            return;
        }
        at.energy.transform(0, m, |k, row| {
            if k >= m {
                let first = k / m - 1;
                f.apply_left(first, &mut row[(first + 1) * m..]);
                return;
            }
            let (a, s) = row.split_at_mut(m);
            let drive: f64 = a.iter().zip(&plant.input).map(|(a, g)| a * g).sum();
            old.copy_from_slice(a);
            for (k, a) in a.iter_mut().enumerate() {
                *a = old.iter().zip(plant.transition[k..].iter().step_by(m)).map(|(a, f)| a * f).sum();
            }
            f.apply_left(0, s);
            s.iter_mut().zip(h.iter()).for_each(|(s, h)| *s += drive * h);
        });
        row[..m].copy_from_slice(&plant.read);
        row[m..].iter_mut().zip(h.iter()).for_each(|(r, h)| *r = plant.direct * h);
        at.energy.append(row);
    }
}
