//! The exponentials, one buffer each.

use super::Blt;
use crate::engine::exact::program::{Draw, OUTPUT, Place, Program, Step as ProgramStep};
use crate::engine::{Engine, Kernel, PACKET, Packet, fill_packets, singles};
use crate::engine::{Field, Row};
use crate::error::Result;
use crate::simd::dispatch;

/// Every coordinate does `y = q z − ω₀x₀ − ω₁x₁ − …` from left to right in double precision and rounds it once,
/// `x_k ← θ_k x_k + y`, and puts out `s y`.
pub(super) struct BltEngine {
    weights: Vec<f32>,
    decays: Vec<f32>,
    direct: Vec<f32>,
    scale: Vec<f32>,
}

impl BltEngine {
    pub(super) fn new(blt: &Blt) -> Result<Self> {
        Ok(Self {
            weights: singles("weights", &blt.weights)?,
            decays: singles("decays", &blt.decays)?,
            direct: singles("direct coefficients", &blt.direct)?,
            scale: singles("scales", &blt.scale)?,
        })
    }
}

impl Engine for BltEngine {
    fn steps(&self) -> usize {
        self.direct.len()
    }

    fn buffers(&self) -> usize {
        self.weights.len()
    }

    fn kernel<'a>(&'a self, field: &'a Field, t: usize) -> Box<dyn Kernel + 'a> {
        let step = Step {
            weights: &self.weights,
            decays: &self.decays,
            direct: self.direct[t],
            scale: self.scale[t],
        };
        Box::new(BltKernel { row: field.row(t as u64), step })
    }
}

impl Program for BltEngine {
    fn steps(&self) -> usize {
        self.direct.len()
    }

    fn buffers(&self) -> usize {
        self.weights.len()
    }

    fn scratch(&self) -> usize {
        2
    }

    fn step(&self, t: usize) -> ProgramStep {
        let y = Place::Scratch(1);
        let mut step = ProgramStep { draws: vec![Draw::first(t)], ..ProgramStep::default() };
        let past = self.weights.iter().enumerate().map(|(k, &w)| (Place::Buffer(k), -w));
        step.assign(y, [(Place::Draw(0), self.direct[t])].into_iter().chain(past));
        for (k, &decay) in self.decays.iter().enumerate() {
            step.assign(Place::Buffer(k), [(Place::Buffer(k), decay), (y, 1.0)]);
        }
        step.assign(OUTPUT, [(y, self.scale[t])]);
        step
    }
}

struct BltKernel<'a> {
    row: Row,
    step: Step<'a>,
}

struct Step<'a> {
    weights: &'a [f32],
    decays: &'a [f32],
    direct: f32,
    scale: f32,
}

impl Kernel for BltKernel<'_> {
    fn run(&self, first: u64, state: &mut [Packet], noise: &mut [Packet]) {
        fill_packets(&self.row, first, noise);
        advance(&self.step, state, noise);
    }
}

#[inline(always)]
fn advance_any(step: &Step<'_>, state: &mut [Packet], noise: &mut [Packet]) {
    let r = step.weights.len();
    for (p, noise) in noise.iter_mut().enumerate() {
        let state = &mut state[p * r..][..r];
        let mut sum = noise.map(|z| f64::from(step.direct) * f64::from(z));
        for (weight, x) in step.weights.iter().zip(&*state) {
            for l in 0..PACKET {
                sum[l] -= f64::from(*weight) * f64::from(x[l]);
            }
        }
        let y = sum.map(|x| x as f32);
        for (decay, x) in step.decays.iter().zip(state) {
            for l in 0..PACKET {
                x[l] = decay * x[l] + y[l];
            }
        }
        *noise = y.map(|y| step.scale * y);
    }
}

dispatch! {
    fn advance / advance_portable / advance_avx2 = advance_any(
        step: &Step<'_>, state: &mut [Packet], noise: &mut [Packet]
    );
}
