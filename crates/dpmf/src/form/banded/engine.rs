//! Substitution: the last rows of `y` in a ring of buffers.

use super::Banded;
use crate::engine::exact::program::{Draw, OUTPUT, Place, Program, Step as ProgramStep};
use crate::engine::{Engine, Kernel, PACKET, Packet, fill_packets, singles};
use crate::engine::{Field, Row};
use crate::error::Result;
use crate::simd::dispatch;

/// Every coordinate does `y = q z + w₁y_{t−1} + w₂y_{t−2} + …` from left to right, rounds it once, keeps it in the place of
/// the oldest, and puts out `s y`.
pub(super) struct BandedEngine {
    bands: usize,
    feedback: Vec<f32>,
    scale: Vec<f32>,
}

impl BandedEngine {
    pub(super) fn new(banded: &Banded) -> Result<Self> {
        Ok(Self {
            bands: banded.bands,
            feedback: singles("feedback coefficients", &banded.feedback)?,
            scale: singles("scales", &banded.scale)?,
        })
    }
}

impl Engine for BandedEngine {
    fn steps(&self) -> usize {
        self.scale.len()
    }

    fn buffers(&self) -> usize {
        self.bands - 1
    }

    fn kernel<'a>(&'a self, field: &'a Field, t: usize) -> Box<dyn Kernel + 'a> {
        let (ring, row) = (self.bands - 1, self.row(t));
        let terms = row.iter().enumerate().skip(1).filter(|(_, w)| **w != 0.0);
        Box::new(BandedKernel {
            row: field.row(t as u64),
            step: Step {
                own: row[0],
                terms: terms.map(|(k, &w)| ((t - k) % ring, w)).collect(),
                slot: t.checked_rem(ring),
                buffers: ring,
                scale: self.scale[t],
            },
        })
    }
}

impl BandedEngine {
    /// The coefficients of a step, the own one first, as far as there are steps before it.
    fn row(&self, t: usize) -> &[f32] {
        let rows = self.feedback.len() / self.bands;
        &self.feedback[t.min(rows - 1) * self.bands..][..self.bands.min(t + 1)]
    }
}

impl Program for BandedEngine {
    fn steps(&self) -> usize {
        self.scale.len()
    }

    fn buffers(&self) -> usize {
        self.bands - 1
    }

    fn scratch(&self) -> usize {
        2
    }

    fn step(&self, t: usize) -> ProgramStep {
        let (ring, row, y) = (self.bands - 1, self.row(t), Place::Scratch(1));
        let mut step = ProgramStep { draws: vec![Draw::first(t)], ..ProgramStep::default() };
        let past = row.iter().enumerate().skip(1).map(|(k, &w)| (Place::Buffer((t - k) % ring), w));
        step.assign(y, [(Place::Draw(0), row[0])].into_iter().chain(past));
        if let Some(slot) = t.checked_rem(ring) {
            step.assign(Place::Buffer(slot), [(y, 1.0)]);
        }
        step.assign(OUTPUT, [(y, self.scale[t])]);
        step
    }
}

struct BandedKernel {
    row: Row,
    step: Step,
}

struct Step {
    own: f32,
    /// Buffers and their weights.
    terms: Vec<(usize, f32)>,
    /// Buffer that takes `y`.
    slot: Option<usize>,
    buffers: usize,
    scale: f32,
}

impl Kernel for BandedKernel {
    fn run(&self, first: u64, state: &mut [Packet], noise: &mut [Packet]) {
        fill_packets(&self.row, first, noise);
        advance(&self.step, state, noise);
    }
}

#[inline(always)]
fn advance_any(step: &Step, state: &mut [Packet], noise: &mut [Packet]) {
    for (p, noise) in noise.iter_mut().enumerate() {
        let state = &mut state[p * step.buffers..][..step.buffers];
        // Sums of many terms that are fed back: double precision keeps the error at that of the last rounding.
        let mut sum = noise.map(|z| f64::from(step.own) * f64::from(z));
        for &(buffer, weight) in &step.terms {
            for l in 0..PACKET {
                sum[l] += f64::from(weight) * f64::from(state[buffer][l]);
            }
        }
        let y = sum.map(|x| x as f32);
        if let Some(slot) = step.slot {
            state[slot] = y;
        }
        *noise = y.map(|y| step.scale * y);
    }
}

dispatch! {
    fn advance / advance_portable / advance_avx2 = advance_any(
        step: &Step, state: &mut [Packet], noise: &mut [Packet]
    );
}
