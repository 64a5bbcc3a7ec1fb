//! Balanced truncation of the optimal filter, in two sweeps over the steps and bounded memory.
//!
//! Backward, the control laws of the processes and the observability Gramian, kept at the ends of blocks only. Then
//! forward, block after block: both again within the block, the innovations form with its controllability
//! Gramian, a balanced basis at every step, and the filter seen through it. Only the innovations form has to run
//! through the steps in order; the rest of several blocks runs in parallel.

use super::assemble::Assembly;
use super::balance::{Balance, multiply};
use super::innovations::Innovations;
use super::modes::Modes;
use super::plant::{Plant, PlantStep};
use super::processes::{CostToGo, Law, Processes, Workspace};
use super::{Representation, StateSpace};
use crate::error::{Error, Result};
use crate::workload::Recurrence;
use faer::MatRef;
use rayon::prelude::*;

/// How many states to keep.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Order {
    /// As many as given, or fewer when the filter has no more.
    Fixed(usize),
    /// As few as keep `√(loss/lower_bound)` of what is deployed within `1 + excess`.
    Tolerance {
        /// Admissible relative excess of the root loss over the bound.
        excess: f64,
        /// A lower bound on the total loss of every factorization of the workload.
        lower_bound: f64,
        /// States not to be exceeded.
        max: usize,
    },
}

/// Longest block: memory and the cost of restarting the basis are balanced around it.
const BLOCK: usize = 256;

/// Columns that the basis carries beyond those kept, to converge faster.
const GUARD: usize = 2;

/// Observability Gramian of `A N`: energy in the iterates, from the state of the processes (`states`) and that of the
/// workload (`plants`), which starts apart from them.
#[derive(Clone)]
struct Observability {
    states: Vec<f64>,
    /// One vector of `states` for each plant state.
    cross: Vec<f64>,
    plants: Vec<f64>,
}

/// What a backward sweep carries.
#[derive(Clone)]
struct Checkpoint {
    cost: CostToGo,
    observability: Observability,
}

/// Buffers of a backward sweep.
struct Backward {
    work: Workspace,
    plant: PlantStep,
    transition: Modes,
    scratch: Vec<f64>,
    h: Vec<f64>,
    moved: Vec<f64>,
}

/// One block, step by step.
struct Block {
    start: usize,
    gains: Vec<f64>,
    spread: Vec<f64>,
    /// Gramians at all steps of the block and the step after it.
    observability: Vec<f64>,
    controllability: Vec<f64>,
    h: Vec<f64>,
    g: Vec<f64>,
    direct: Vec<f64>,
}

/// A step of the reduced filter, not yet triangular.
pub(super) struct Reduced<'b> {
    pub direct: f64,
    pub h: &'b [f64],
    pub f: &'b [f64],
    pub g: &'b [f64],
}

pub(super) struct Sweep<'a> {
    processes: Processes<'a>,
}

impl Backward {
    fn new(processes: &Processes<'_>) -> Self {
        let (states, m) = (processes.states(), processes.plant.order());
        Self {
            work: processes.workspace(),
            plant: PlantStep::default(),
            transition: Modes::zeros(m, processes.len()),
            scratch: vec![0.0; states * states],
            h: vec![0.0; states],
            moved: vec![0.0; states],
        }
    }

    /// Takes `at` from after step `i` to before it and writes the law of the step.
    fn step(
        &mut self,
        processes: &Processes<'_>,
        i: usize,
        at: &mut Checkpoint,
        gains: &mut [f64],
        spread: &mut [f64],
    ) {
        processes.plant.step(i, &mut self.plant);
        processes.step_back(i, &self.plant, &mut at.cost, gains, spread, &mut self.work);
        let law = Law { gains, spread };
        processes.transition(&self.plant, law, &mut self.transition);
        processes.output(law, &mut self.h);
        at.observability.pull_back(self);
    }
}

impl Observability {
    fn new(states: usize, plants: usize) -> Self {
        Self {
            states: vec![0.0; states * states],
            cross: vec![0.0; states * plants],
            plants: vec![0.0; plants * plants],
        }
    }

    /// `Ω ← ΨᵀΩΨ + ηηᵀ` for the joint system: `u = h s`, `y = read·a[0] + direct·u`, `s ← F s`, `a ← Φa + Γu`.
    fn pull_back(&mut self, step: &mut Backward) {
        let Backward { plant, transition: f, scratch, h, moved, .. } = step;
        let (m, n) = (plant.input.len(), h.len());
        if n == 0 {
            return;
        }
        // Ω_aa Γ and its product with Γ; Fᵀ Ω_sa in place.
        let weighted: Vec<f64> = (0..m)
            .map(|a| plant.input.iter().enumerate().map(|(b, g)| self.plants[a * m + b] * g).sum())
            .collect();
        let energy: f64 =
            plant.direct * plant.direct + weighted.iter().zip(&plant.input).map(|(w, g)| w * g).sum::<f64>();
        for column in self.cross.chunks_exact_mut(n) {
            f.apply_transposed(column, moved);
            column.copy_from_slice(moved);
        }
        moved.fill(0.0);
        for (column, g) in self.cross.chunks_exact(n).zip(&plant.input) {
            moved.iter_mut().zip(column).for_each(|(x, c)| *x += g * c);
        }
        f.pull_back(&mut self.states, scratch);
        for a in 0..n {
            let (x, y) = (h[a], moved[a] + energy * h[a]);
            let row = &mut self.states[a * n..][..n];
            for ((o, h), m) in row.iter_mut().zip(h.iter()).zip(moved.iter()) {
                *o += x * m + y * h;
            }
        }
        // (FᵀΩ_sa + h ΓᵀΩ_aa)Φ + direct·read·h e₀ᵀ, with Φ = shift + feedback e₀ᵀ.
        for (column, w) in self.cross.chunks_exact_mut(n).zip(&weighted) {
            column.iter_mut().zip(h.iter()).for_each(|(c, h)| *c += w * h);
        }
        moved.iter_mut().zip(h.iter()).for_each(|(x, h)| *x = plant.direct * plant.read * h);
        for (column, f) in self.cross.chunks_exact(n).zip(&plant.feedback) {
            moved.iter_mut().zip(column).for_each(|(x, c)| *x += f * c);
        }
        self.cross.copy_within(..(m - 1) * n, n);
        self.cross[..n].copy_from_slice(moved);

        let open = |a: usize, b: usize| {
            f64::from(u8::from(b == a + 1)) + if b == 0 { plant.feedback[a] } else { 0.0 }
        };
        let mut next = vec![0.0; m * m];
        for a in 0..m {
            for b in 0..m {
                for c in 0..m {
                    for d in 0..m {
                        next[a * m + b] += open(c, a) * self.plants[c * m + d] * open(d, b);
                    }
                }
            }
        }
        next[0] += plant.read * plant.read;
        self.plants = next;
    }
}

impl<'a> Sweep<'a> {
    fn new(recurrence: &'a Recurrence, v: &'a [f64], tolerance: f64) -> Result<Self> {
        let plant = Plant::new(recurrence);
        if v.len() != plant.steps() {
            return Err(Error::WrongLength {
                name: "dual variable",
                actual: v.len(),
                expected: plant.steps(),
            });
        }
        if let Some((index, &value)) = v.iter().enumerate().find(|(_, v)| !(**v > 0.0 && v.is_finite())) {
            let rule = "it must be positive and finite";
            return Err(Error::InvalidEntry { name: "dual variable", index, value, rule });
        }
        Ok(Self { processes: Processes::new(plant, v, tolerance)? })
    }

    fn steps(&self) -> usize {
        self.processes.plant.steps()
    }

    fn terminal(&self) -> Checkpoint {
        Checkpoint {
            cost: self.processes.terminal_cost(),
            observability: Observability::new(self.processes.states(), self.processes.plant.order()),
        }
    }

    /// Ends of blocks: short where the filter changes fast, near the first and the last step.
    fn boundaries(&self) -> Vec<usize> {
        let n = self.steps();
        let mut ends = vec![0];
        let mut at = 0;
        while at < n {
            let room = at.min(n - at).max(1);
            at += room.div_ceil(2).min(BLOCK);
            ends.push(at.min(n));
        }
        ends
    }

    /// The filter in balanced bases of `keep` states, step by step, in order.
    fn run(&self, keep: usize, mut sink: impl FnMut(Reduced<'_>)) -> Result<()> {
        let ends = self.boundaries();
        let processes = &self.processes;
        let (states, q) = (processes.states(), processes.len());
        let mut checkpoints = Vec::with_capacity(ends.len());
        let mut at = self.terminal();
        let mut backward = Backward::new(processes);
        let (mut gains, mut spread) = (vec![0.0; states], vec![0.0; q]);
        for ends in ends.windows(2).rev() {
            checkpoints.push(at.clone());
            for i in (ends[0]..ends[1]).rev() {
                backward.step(processes, i, &mut at, &mut gains, &mut spread);
            }
        }
        checkpoints.reverse();
        let _ = gains;

        let mut filter = Innovations::new(states);
        let spans: Vec<(usize, usize)> = ends.windows(2).map(|e| (e[0], e[1])).collect();
        let wave = 2 * rayon::current_num_threads();
        for (spans, checkpoints) in spans.chunks(wave).zip(checkpoints.chunks(wave)) {
            let mut blocks: Vec<Block> = spans
                .par_iter()
                .zip(checkpoints)
                .map(|(&(start, end), after)| self.look_back(start, end, after))
                .collect();
            for block in &mut blocks {
                self.filter(block, &mut filter)?;
            }
            let reduced: Vec<Vec<f64>> = blocks.par_iter().map(|block| self.reduce(block, keep)).collect();
            for steps in &reduced {
                for step in steps.chunks_exact(1 + 2 * keep + keep * keep) {
                    let (h, rest) = step[1..].split_at(keep);
                    let (g, f) = rest.split_at(keep);
                    sink(Reduced { direct: step[0], h, f, g });
                }
            }
        }
        Ok(())
    }

    /// Laws and observability Gramians of a block, from the checkpoint after it.
    fn look_back(&self, start: usize, end: usize, after: &Checkpoint) -> Block {
        let processes = &self.processes;
        let (states, q) = (processes.states(), processes.len());
        let (len, square) = (end - start, states * states);
        let mut block = Block {
            start,
            gains: vec![0.0; len * states],
            spread: vec![0.0; len * q],
            observability: vec![0.0; (len + 1) * square],
            controllability: vec![0.0; (len + 1) * square],
            h: vec![0.0; len * states],
            g: vec![0.0; len * states],
            direct: vec![0.0; len],
        };
        let mut at = after.clone();
        let mut backward = Backward::new(processes);
        block.observability[len * square..].copy_from_slice(&at.observability.states);
        for k in (0..len).rev() {
            let gains = &mut block.gains[k * states..][..states];
            let spread = &mut block.spread[k * q..][..q];
            backward.step(processes, start + k, &mut at, gains, spread);
            block.observability[k * square..][..square].copy_from_slice(&at.observability.states);
        }
        block
    }

    /// Runs the innovations form through a block.
    fn filter(&self, block: &mut Block, filter: &mut Innovations) -> Result<()> {
        let processes = &self.processes;
        let (states, q) = (processes.states(), processes.len());
        let square = states * states;
        let mut plant = PlantStep::default();
        let mut transition = Modes::zeros(processes.plant.order(), q);
        block.controllability[..square].copy_from_slice(&filter.spread);
        for k in 0..block.direct.len() {
            let i = block.start + k;
            let law =
                Law { gains: &block.gains[k * states..][..states], spread: &block.spread[k * q..][..q] };
            processes.plant.step(i, &mut plant);
            processes.transition(&plant, law, &mut transition);
            let h = &mut block.h[k * states..][..states];
            processes.output(law, h);
            let g = &mut block.g[k * states..][..states];
            block.direct[k] = filter.step(i, processes, (&plant, law), (h, &transition), g)?;
            block.controllability[(k + 1) * square..][..square].copy_from_slice(&filter.spread);
        }
        Ok(())
    }

    /// The block through balanced bases: direct term, `h`, `g` and `F` of each step, one after the other.
    fn reduce(&self, block: &Block, keep: usize) -> Vec<f64> {
        let processes = &self.processes;
        let (states, q) = (processes.states(), processes.len());
        let (len, square) = (block.direct.len(), states * states);
        let mut basis = Balance::new(states, keep + GUARD);
        let columns = basis.columns();
        let kept = keep.min(columns);
        let gramians = |k: usize| {
            (&block.controllability[k * square..][..square], &block.observability[k * square..][..square])
        };
        let (pi, omega) = gramians(0);
        basis.find(pi, omega);
        let mut plant = PlantStep::default();
        let mut transition = Modes::zeros(processes.plant.order(), q);
        let mut moved = vec![0.0; states * columns];
        let mut f = vec![0.0; columns * columns];
        let mut out = Vec::with_capacity(len * (1 + 2 * keep + keep * keep));
        let project = |basis: &[f64], x: &[f64], c: usize| -> f64 {
            if c >= kept { 0.0 } else { x.iter().enumerate().map(|(a, x)| x * basis[a * columns + c]).sum() }
        };
        for k in 0..len {
            let law =
                Law { gains: &block.gains[k * states..][..states], spread: &block.spread[k * q..][..q] };
            processes.plant.step(block.start + k, &mut plant);
            processes.transition(&plant, law, &mut transition);
            out.push(block.direct[k]);
            let h = &block.h[k * states..][..states];
            out.extend((0..keep).map(|c| project(&basis.v, h, c)));
            transition.apply_rows(&basis.v, columns, &mut moved);
            let (pi, omega) = gramians(k + 1);
            // The next block starts from the same basis.
            if k + 1 == len {
                basis.find(pi, omega)
            } else {
                basis.refine(pi, omega)
            }
            let g = &block.g[k * states..][..states];
            out.extend((0..keep).map(|c| project(&basis.w, g, c)));
            if columns > 0 {
                let row = |x| MatRef::from_row_major_slice(x, states, columns);
                multiply(&mut f, row(&basis.w).transpose(), row(&moved));
            }
            for a in 0..keep {
                out.extend((0..keep).map(|b| if a < kept && b < kept { f[a * columns + b] } else { 0.0 }));
            }
        }
        out
    }
}

pub(super) fn optimal(recurrence: &Recurrence, v: &[f64], tolerance: f64) -> Result<StateSpace> {
    let sweep = Sweep::new(recurrence, v, tolerance)?;
    let processes = &sweep.processes;
    let (n, states, q) = (sweep.steps(), processes.states(), processes.len());
    let mut block = sweep.look_back(0, n, &sweep.terminal());
    sweep.filter(&mut block, &mut Innovations::new(states))?;
    let mut plant = PlantStep::default();
    let mut transition = Modes::zeros(processes.plant.order(), q);
    let mut assembly = Assembly::new(n, states);
    let mut f = vec![0.0; states * states];
    for k in 0..n {
        let law = Law { gains: &block.gains[k * states..][..states], spread: &block.spread[k * q..][..q] };
        processes.plant.step(k, &mut plant);
        processes.transition(&plant, law, &mut transition);
        for c in 0..plant.input.len() {
            for d in 0..plant.input.len() {
                for (l, &x) in transition.at(c, d).iter().enumerate() {
                    f[(c * q + l) * states + d * q + l] = x;
                }
            }
        }
        assembly.push(
            block.direct[k],
            &block.h[k * states..][..states],
            &f,
            &block.g[k * states..][..states],
        );
    }
    assembly.finish()
}

pub(super) fn truncated(recurrence: &Recurrence, v: &[f64], order: Order) -> Result<StateSpace> {
    let Order::Fixed(keep) = order else { todo!() };
    let sweep = Sweep::new(recurrence, v, 1e-4)?;
    let keep = keep.min(sweep.steps() - 1);
    let mut assembly = Assembly::new(sweep.steps(), keep);
    sweep.run(keep, |step| assembly.push(step.direct, step.h, step.f, step.g))?;
    let mut result = assembly.finish()?;
    result.equalise();
    result.round();
    Ok(result)
}
