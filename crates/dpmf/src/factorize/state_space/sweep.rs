//! Balanced truncation of the optimal filter, in two sweeps over the steps and bounded memory.
//!
//! Backward, the control laws of the processes and the observability Gramian, kept at the ends of blocks
//! only. Then forward, block after block: both again within the block, the innovations form with its
//! controllability Gramian, a balanced basis at every step, and the filter seen through it. Only the
//! innovations form has to run through the steps in order; the rest of several blocks runs in parallel.

use super::balance::{Balance, Roots, by_rows, multiply};
use super::innovations::Innovations;
use super::modes::Modes;
use super::observability::{Backward, Checkpoint};
use super::plant::{Plant, PlantStep};
use super::processes::{Law, Processes};
use crate::error::{Error, Result};
use rayon::prelude::*;
use std::ops::Range;

/// Longest block: within it a basis is carried from step to step, at its ends found anew.
const BLOCK: usize = 128;

/// Factor within which singular values follow each other from step to step while a basis is carried along.
const ABRUPT: f64 = 1.1;

/// Columns that a basis carries beyond those kept, to follow them more closely.
const GUARD: usize = 2;

/// A step of a filter whose transition may be full.
#[derive(Clone, Copy)]
pub(super) struct FullStep<'b> {
    pub direct: f64,
    pub output: &'b [f64],
    pub input: &'b [f64],
    /// By rows.
    pub transition: &'b [f64],
    /// Hankel singular values after the step.
    pub hankel: &'b [f64],
}

/// The optimal filter of a workload, ready to be run.
pub(super) struct Sweep<'a> {
    processes: Processes<'a>,
}

/// Buffers for one block of steps.
struct Block {
    steps: Range<usize>,
    gains: Vec<f64>,
    spread: Vec<f64>,
    /// Roots of the Gramians before every step of the block, and after the last.
    observability: Vec<f64>,
    controllability: Vec<f64>,
    direct: Vec<f64>,
    output: Vec<f64>,
    input: Vec<f64>,
    /// [`FullStep`]s, one after the other.
    reduced: Vec<f64>,
}

impl Block {
    fn new(longest: usize, processes: &Processes<'_>) -> Self {
        let (states, q, joint) = (processes.states(), processes.len(), processes.joint_states());
        Self {
            steps: 0..0,
            gains: vec![0.0; longest * states],
            spread: vec![0.0; longest * q],
            observability: vec![0.0; (longest + 1) * joint * joint],
            controllability: vec![0.0; (longest + 1) * states * states],
            direct: vec![0.0; longest],
            output: vec![0.0; longest * states],
            input: vec![0.0; longest * states],
            reduced: Vec::new(),
        }
    }

    fn law(&self, k: usize, processes: &Processes<'_>) -> Law<'_> {
        let (states, q) = (processes.states(), processes.len());
        Law { gains: &self.gains[k * states..][..states], spread: &self.spread[k * q..][..q] }
    }
}

impl<'a> Sweep<'a> {
    /// Errors: `v` not positive and finite or not of length `n`; `tolerance`, the relative error of the
    /// covariance, outside `(0, 1)`.
    pub fn new(plant: Plant<'a>, v: &'a [f64], tolerance: f64) -> Result<Self> {
        if v.len() != plant.steps() {
            let (actual, expected) = (v.len(), plant.steps());
            return Err(Error::WrongLength { name: "dual variable", actual, expected });
        }
        if let Some((index, &value)) = v.iter().enumerate().find(|(_, v)| !(**v > 0.0 && v.is_finite())) {
            let rule = "it must be positive and finite";
            return Err(Error::InvalidEntry { name: "dual variable", index, value, rule });
        }
        Ok(Self { processes: Processes::new(plant, v, tolerance)? })
    }

    pub fn steps(&self) -> usize {
        self.processes.plant.steps()
    }

    /// Number of states before truncation.
    pub fn states(&self) -> usize {
        self.processes.states()
    }

    /// Number of states beyond which truncation has nothing to keep: a state joins some past to some future.
    pub fn useful_states(&self) -> usize {
        self.states().min(self.steps() / 2)
    }

    /// Blocks of steps: short where the filter changes fast, near the first and the last step.
    fn blocks(&self) -> Vec<Range<usize>> {
        let n = self.steps();
        let mut blocks = Vec::new();
        let mut at = 0;
        while at < n {
            let length = at.min(n - at).div_ceil(2).clamp(1, BLOCK);
            blocks.push(at..at + length);
            at += length;
        }
        blocks
    }

    /// The filter in balanced bases of `keep` states, step by step, in order.
    ///
    /// `tell` hears the share of the sweep that is done, after every few blocks.
    pub fn truncated(
        &self,
        keep: usize,
        tell: &mut dyn FnMut(f64) -> Result<()>,
        mut sink: impl FnMut(FullStep<'_>),
    ) -> Result<()> {
        let processes = &self.processes;
        let blocks = self.blocks();
        let mut after = Vec::with_capacity(blocks.len());
        let mut at = Checkpoint::terminal(processes);
        let mut backward = Backward::new(processes);
        let (mut gains, mut spread) = (vec![0.0; self.states()], vec![0.0; processes.len()]);
        let mut done = 0;
        let mut past = |count: usize| {
            done += count;
            tell(done as f64 / (2 * blocks.len()) as f64)
        };
        for steps in blocks.iter().rev() {
            past(1)?;
            after.push(at.clone());
            for i in steps.clone().rev() {
                backward.step(i, &mut at, &mut gains, &mut spread);
            }
        }
        after.reverse();

        let wave = 2 * rayon::current_num_threads();
        let mut buffers: Vec<Block> =
            (0..wave.min(blocks.len())).map(|_| Block::new(BLOCK.min(self.steps()), processes)).collect();
        let mut filter = Innovations::new(processes);
        for (blocks, after) in blocks.chunks(wave).zip(after.chunks(wave)) {
            past(blocks.len())?;
            let buffers = &mut buffers[..blocks.len()];
            buffers.par_iter_mut().zip(blocks).zip(after).for_each(|((buffer, steps), after)| {
                self.look_back(steps.clone(), after, buffer);
            });
            for buffer in buffers.iter_mut() {
                self.filter(buffer, &mut filter)?;
            }
            buffers.par_iter_mut().try_for_each(|buffer| self.reduce(buffer, keep))?;
            for buffer in buffers.iter() {
                for step in buffer.reduced.chunks_exact(1 + 3 * keep + keep * keep) {
                    let (output, rest) = step[1..].split_at(keep);
                    let (input, rest) = rest.split_at(keep);
                    let (hankel, transition) = rest.split_at(keep);
                    sink(FullStep { direct: step[0], output, input, transition, hankel });
                }
            }
        }
        Ok(())
    }

    /// The filter with all its states, step by step, in order. Memory: that of all steps at once.
    pub fn untruncated(&self, mut sink: impl FnMut(FullStep<'_>)) -> Result<()> {
        let processes = &self.processes;
        let (states, m) = (self.states(), processes.plant.order());
        let mut block = Block::new(self.steps(), processes);
        self.look_back(0..self.steps(), &Checkpoint::terminal(processes), &mut block);
        self.filter(&mut block, &mut Innovations::new(processes))?;
        let mut plant = PlantStep::default();
        let mut modes = Modes::zeros(m, processes.len());
        let mut transition = vec![0.0; states * states];
        for k in 0..self.steps() {
            processes.plant.step(k, &mut plant);
            processes.transition(&plant, block.law(k, processes), &mut modes);
            for (q, f) in modes.blocks().enumerate() {
                for (c, row) in f.chunks_exact(m).enumerate() {
                    transition[(q * m + c) * states + q * m..][..m].copy_from_slice(row);
                }
            }
            sink(FullStep {
                direct: block.direct[k],
                output: &block.output[k * states..][..states],
                input: &block.input[k * states..][..states],
                transition: &transition,
                hankel: &[],
            });
        }
        Ok(())
    }

    /// Laws and observability Gramians of a block, from the checkpoint after it.
    fn look_back(&self, steps: Range<usize>, after: &Checkpoint, block: &mut Block) {
        let processes = &self.processes;
        let (states, q, joint) = (processes.states(), processes.len(), processes.joint_states());
        let length = steps.len();
        let mut at = after.clone();
        let mut backward = Backward::new(processes);
        let mut keep = |k: usize, at: &Checkpoint| {
            block.observability[k * joint * joint..][..joint * joint].copy_from_slice(at.energy.rows());
        };
        keep(length, &at);
        for k in (0..length).rev() {
            let gains = &mut block.gains[k * states..][..states];
            backward.step(steps.start + k, &mut at, gains, &mut block.spread[k * q..][..q]);
            keep(k, &at);
        }
        block.steps = steps;
    }

    /// Runs the innovations form through a block.
    fn filter(&self, block: &mut Block, filter: &mut Innovations) -> Result<()> {
        let processes = &self.processes;
        let (states, q) = (processes.states(), processes.len());
        let square = states * states;
        let mut plant = PlantStep::default();
        let mut transition = Modes::zeros(processes.plant.order(), q);
        block.controllability[..square].copy_from_slice(filter.mean.rows());
        for (k, i) in block.steps.clone().enumerate() {
            let law =
                Law { gains: &block.gains[k * states..][..states], spread: &block.spread[k * q..][..q] };
            processes.plant.step(i, &mut plant);
            processes.transition(&plant, law, &mut transition);
            let output = &mut block.output[k * states..][..states];
            processes.output(law, output);
            let input = &mut block.input[k * states..][..states];
            block.direct[k] = filter.step(i, processes, (&plant, law), (output, &transition), input)?;
            block.controllability[(k + 1) * square..][..square].copy_from_slice(filter.mean.rows());
        }
        Ok(())
    }

    /// The block seen through balanced bases.
    fn reduce(&self, block: &mut Block, keep: usize) -> Result<()> {
        let processes = &self.processes;
        let (states, m, joint) = (processes.states(), processes.plant.order(), processes.joint_states());
        let mut reduced = std::mem::take(&mut block.reduced);
        reduced.clear();
        let mut basis = Balance::new(states, keep + GUARD, joint);
        let columns = basis.columns();
        let kept = keep.min(columns);
        let roots = |k: usize| Roots {
            controllability: by_rows(
                &block.controllability[k * states * states..][..states * states],
                states,
            ),
            observability: by_rows(&block.observability[k * joint * joint..][..joint * joint], joint)
                .subcols(m, states),
        };
        basis.find(roots(0), block.steps.start)?;
        let mut plant = PlantStep::default();
        let mut modes = Modes::zeros(m, processes.len());
        let mut moved = vec![0.0; states * columns];
        let mut transition = vec![0.0; columns * columns];
        let mut hankel = vec![0.0; columns];
        // Columns beyond those of the basis are states that stay zero.
        let project = |basis: &[f64], x: &[f64], c: usize| -> f64 {
            if c >= kept {
                0.0
            } else {
                x.iter().zip(basis.chunks_exact(columns)).map(|(x, b)| x * b[c]).sum()
            }
        };
        for (k, i) in block.steps.clone().enumerate() {
            processes.plant.step(i, &mut plant);
            processes.transition(&plant, block.law(k, processes), &mut modes);
            reduced.push(block.direct[k]);
            let output = &block.output[k * states..][..states];
            reduced.extend((0..keep).map(|c| project(&basis.v, output, c)));
            modes.apply_rows(&basis.v, columns, &mut moved);
            // The next block starts from the same basis; and while each step adds a direction, none is
            // carried over.
            if i + 1 == block.steps.end || i < columns {
                basis.find(roots(k + 1), i + 1)?;
            } else {
                hankel.copy_from_slice(&basis.hankel);
                basis.refine(roots(k + 1));
                // A spike in the schedule turns the Gramians at once: the basis cannot be carried across.
                let same = |(old, new): (&f64, &f64)| *new <= ABRUPT * old && *old <= ABRUPT * new;
                if !hankel.iter().zip(&basis.hankel).take(kept).all(same) {
                    basis.find(roots(k + 1), i + 1)?;
                }
            }
            let input = &block.input[k * states..][..states];
            reduced.extend((0..keep).map(|c| project(&basis.w, input, c)));
            reduced.extend((0..keep).map(|c| if c < kept { basis.hankel[c] } else { 0.0 }));
            if columns > 0 {
                multiply(&mut transition, by_rows(&basis.w, states).transpose(), by_rows(&moved, states));
            }
            for a in 0..keep {
                let entry = |b: usize| if a < kept && b < kept { transition[a * columns + b] } else { 0.0 };
                reduced.extend((0..keep).map(entry));
            }
        }
        block.reduced = reduced;
        Ok(())
    }
}
