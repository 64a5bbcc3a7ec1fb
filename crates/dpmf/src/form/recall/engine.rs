//! The filter with recalled noise: the row of the step first, then the recalled ones, each drawn, used and forgotten.

use super::Recall;
use crate::engine::exact::program::{Draw, OUTPUT, Place, Program, Step};
use crate::engine::{Engine, Kernel, PACKET, Packet, TILE, fill_packets, singles};
use crate::engine::{Field, Row};
use crate::error::Result;
use crate::simd::dispatch;

/// Every coordinate does `u = d z + h₀x₀ + h₁x₁ + …` from left to right and `x_k ← x_k + (g_k z + E_k x_k)`; then for each
/// recalled row `z'`, the nearest first, `u ← u + a z'` and `x_k ← x_k + g'_k z'`.
pub(super) struct RecallEngine {
    stride: usize,
    order: usize,
    recalls: usize,
    direct: Vec<f32>,
    recalled: Vec<f32>,
    output: Vec<f32>,
    input: Vec<f32>,
    increment: Vec<f32>,
}

impl RecallEngine {
    pub(super) fn new(filter: &Recall) -> Result<Self> {
        let parts = filter.parts();
        Ok(Self {
            stride: filter.stride(),
            order: filter.order(),
            recalls: filter.recalls(),
            direct: singles("direct coefficients", &parts.direct)?,
            recalled: singles("recalled coefficients", &parts.recalled)?,
            output: singles("output coefficients", &parts.output)?,
            input: singles("input coefficients", &parts.input)?,
            increment: singles("increment coefficients", &parts.increment)?,
        })
    }
}

impl Engine for RecallEngine {
    fn steps(&self) -> usize {
        self.direct.len()
    }

    fn buffers(&self) -> usize {
        self.order
    }

    fn kernel<'a>(&'a self, field: &'a Field, t: usize) -> Box<dyn Kernel + 'a> {
        let (r, rows) = (self.order, self.recalls + 1);
        let inputs = &self.input[t * r * rows..][..r * rows];
        let recalled = (1..rows).map_while(|j| {
            let input = &inputs[j * r..][..r];
            let row = t.checked_sub(j.checked_mul(self.stride)?)?;
            Some((row, Past { weight: self.recalled[t * self.recalls + j - 1], input }))
        });
        // A row that has no effect need not be drawn.
        let used = recalled.filter(|(_, past)| past.weight != 0.0 || past.input.iter().any(|g| *g != 0.0));
        Box::new(RecallKernel {
            own: field.row(t as u64),
            step: Own {
                direct: self.direct[t],
                output: &self.output[t * r..][..r],
                input: &inputs[..r],
                increment: &self.increment,
            },
            recalled: used.map(|(row, past)| (field.row(row as u64), past)).collect(),
        })
    }
}

impl Program for RecallEngine {
    fn steps(&self) -> usize {
        self.direct.len()
    }

    fn buffers(&self) -> usize {
        self.order
    }

    fn step(&self, t: usize) -> Step {
        let (r, rows) = (self.order, self.recalls + 1);
        let inputs = &self.input[t * r * rows..][..r * rows];
        let (z, x) = (Place::Draw, Place::Buffer);
        let mut step = Step::default();
        // Lag by lag: in each, a row comes once.
        let within = (0..rows).map_while(|j| Some((j, t.checked_sub(j.checked_mul(self.stride)?)?)));
        step.draws.extend(within.map(|(j, row)| Draw { row: row as u64, time: j }));
        let drawn = step.draws.len();
        let recalled = (1..drawn).map(|j| (z(j), self.recalled[t * self.recalls + j - 1]));
        let output = self.output[t * r..][..r].iter().enumerate().map(|(k, &h)| (x(k), h));
        step.assign(OUTPUT, [(z(0), self.direct[t])].into_iter().chain(recalled).chain(output));
        for k in 0..r {
            let kicks = (0..drawn).map(|j| (z(j), inputs[j * r + k]));
            step.assign(x(k), kicks.chain([(x(k), self.increment[k]), (x(k), 1.0)]));
        }
        step
    }
}

struct RecallKernel<'a> {
    own: Row,
    step: Own<'a>,
    recalled: Vec<(Row, Past<'a>)>,
}

/// What a step does with its own row of noise.
#[derive(Clone, Copy)]
struct Own<'a> {
    direct: f32,
    output: &'a [f32],
    input: &'a [f32],
    increment: &'a [f32],
}

/// What it does with an earlier one.
#[derive(Clone, Copy)]
struct Past<'a> {
    weight: f32,
    input: &'a [f32],
}

impl Kernel for RecallKernel<'_> {
    fn run(&self, first: u64, state: &mut [Packet], noise: &mut [Packet]) {
        fill_packets(&self.own, first, noise);
        advance(self.step, state, noise);
        let mut drawn = [[0.0; PACKET]; TILE];
        let drawn = &mut drawn[..noise.len()];
        for (row, past) in &self.recalled {
            fill_packets(row, first, drawn);
            recall(*past, drawn, state, noise);
        }
    }
}

#[inline(always)]
fn advance_any(step: Own<'_>, state: &mut [Packet], noise: &mut [Packet]) {
    let r = step.output.len();
    for (p, noise) in noise.iter_mut().enumerate() {
        let z = *noise;
        let mut u = z.map(|z| step.direct * z);
        for (k, x) in state[p * r..][..r].iter_mut().enumerate() {
            let (h, g, e) = (step.output[k], step.input[k], step.increment[k]);
            for l in 0..PACKET {
                u[l] += h * x[l];
                x[l] += g * z[l] + e * x[l];
            }
        }
        *noise = u;
    }
}

#[inline(always)]
fn recall_any(past: Past<'_>, drawn: &[Packet], state: &mut [Packet], noise: &mut [Packet]) {
    let r = past.input.len();
    for (p, (z, u)) in drawn.iter().zip(noise).enumerate() {
        for l in 0..PACKET {
            u[l] += past.weight * z[l];
        }
        for (x, &g) in state[p * r..][..r].iter_mut().zip(past.input) {
            for l in 0..PACKET {
                x[l] += g * z[l];
            }
        }
    }
}

dispatch! {
    fn advance / advance_portable / advance_avx2 = advance_any(
        step: Own<'_>, state: &mut [Packet], noise: &mut [Packet]
    );
}
dispatch! {
    fn recall / recall_portable / recall_avx2 = recall_any(
        past: Past<'_>, drawn: &[Packet], state: &mut [Packet], noise: &mut [Packet]
    );
}
