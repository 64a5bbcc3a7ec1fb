//! Trees with a decoder that reads them from below, in one buffer a level.

use super::{Decoder, Tree};
use crate::engine::exact::program::{Draw, OUTPUT, Place, Program, Step};
use crate::engine::{Engine, Kernel, PACKET, Packet, TILE, fill_packets, singles};
use crate::engine::{Field, Row};
use crate::error::{Error, Result};
use crate::form::Representation;
use crate::simd::dispatch;
use std::ops::RangeInclusive;

/// The streaming tree: buffer `k` holds the estimate of a node of level `k` that waits for its right sibling.
///
/// A step draws the nodes it completes, at most `log₂ n + 1` and two on average.
pub(super) struct TreeEngine {
    steps: usize,
    /// Weights of a node's own noise and of the estimates below it, leaves first.
    own: Vec<f32>,
    below: Vec<f32>,
}

impl TreeEngine {
    pub(super) fn new(tree: &Tree) -> Result<Self> {
        if tree.decoder() == Decoder::HonakerFull {
            return Err(Error::Unsupported {
                what: "a stream of the full Honaker estimator".into(),
                hint: "it uses nodes of later steps; stream its deployed, lower-triangular form",
            });
        }
        let (own, below): (Vec<_>, Vec<_>) =
            tree.levels().iter().map(|level| (level.own, level.below)).unzip();
        let (own, below) = (singles("own weights", &own)?, singles("weights from below", &below)?);
        Ok(Self { steps: tree.steps(), own, below })
    }
}

impl Engine for TreeEngine {
    fn steps(&self) -> usize {
        self.steps
    }

    fn buffers(&self) -> usize {
        self.own.len() - 1
    }

    fn kernel<'a>(&'a self, field: &'a Field, step: usize) -> Box<dyn Kernel + 'a> {
        let levels = self.levels(step);
        let bottom = *levels.start();
        let nodes = levels.map(|k| Node {
            row: field.row((completed(step) + k) as u64),
            own: self.own[k],
            below: self.below[k],
        });
        Box::new(TreeKernel { buffers: Engine::buffers(self), bottom, nodes: nodes.collect() })
    }
}

impl TreeEngine {
    /// Levels of the nodes that a step completes and needs.
    fn levels(&self, step: usize) -> RangeInclusive<usize> {
        let top = (step + 1).trailing_zeros() as usize;
        // Nodes under one that takes nothing from below are not needed.
        (0..=top).rev().find(|&k| self.below[k] == 0.0).unwrap_or(0)..=top
    }
}

/// Complete nodes over the steps before this one, in postorder.
fn completed(step: usize) -> usize {
    2 * step - step.count_ones() as usize
}

impl Program for TreeEngine {
    fn steps(&self) -> usize {
        self.steps
    }

    fn buffers(&self) -> usize {
        Engine::buffers(self)
    }

    fn scratch(&self) -> usize {
        2
    }

    fn step(&self, t: usize) -> Step {
        let (levels, estimate) = (self.levels(t), Place::Scratch(1));
        let top = *levels.end();
        let mut step = Step::default();
        for (i, k) in levels.enumerate() {
            step.draws.push(Draw::first(completed(t) + k));
            let own = (Place::Draw(i), self.own[k]);
            match i {
                0 => step.assign(estimate, [own]),
                _ => {
                    let below = self.below[k];
                    step.assign(estimate, [own, (Place::Buffer(k - 1), below), (estimate, below)]);
                }
            }
        }
        step.assign(OUTPUT, (0..top).map(|k| (Place::Buffer(k), -1.0)).chain([(estimate, 1.0)]));
        // The root of the whole tree merges with nothing.
        if top < Engine::buffers(self) {
            step.assign(Place::Buffer(top), [(estimate, 1.0)]);
        }
        step
    }
}

struct Node {
    row: Row,
    own: f32,
    below: f32,
}

struct TreeKernel {
    buffers: usize,
    /// Level of the first of the nodes.
    bottom: usize,
    nodes: Vec<Node>,
}

impl Kernel for TreeKernel {
    fn run(&self, first: u64, state: &mut [Packet], noise: &mut [Packet]) {
        let top = self.bottom + self.nodes.len() - 1;
        let (mut estimates, mut draws) = ([[0.0; PACKET]; TILE], [[0.0; PACKET]; TILE]);
        let (estimates, draws) = (&mut estimates[..noise.len()], &mut draws[..noise.len()]);
        let buffer = |k: usize| Buffer { stride: self.buffers, index: k };
        noise.fill([0.0; PACKET]);
        for k in 0..self.bottom {
            subtract(noise, state, buffer(k));
        }
        for (k, node) in (self.bottom..).zip(&self.nodes) {
            fill_packets(&node.row, first, draws);
            if k == self.bottom {
                begin(estimates, node.own, draws);
            } else {
                subtract(noise, state, buffer(k - 1));
                merge(estimates, (node.own, node.below), draws, state, buffer(k - 1));
            }
        }
        finish(noise, estimates);
        // The root of the whole tree merges with nothing.
        if top < self.buffers {
            for (state, estimate) in state.iter_mut().skip(top).step_by(self.buffers).zip(estimates) {
                *state = *estimate;
            }
        }
    }
}

/// One buffer among those of every packet.
#[derive(Clone, Copy)]
struct Buffer {
    stride: usize,
    index: usize,
}

impl Buffer {
    #[inline(always)]
    fn of(self, state: &[Packet]) -> impl Iterator<Item = &Packet> {
        state.iter().skip(self.index).step_by(self.stride)
    }
}

#[inline(always)]
fn subtract_any(noise: &mut [Packet], state: &[Packet], left: Buffer) {
    for (noise, left) in noise.iter_mut().zip(left.of(state)) {
        for l in 0..PACKET {
            noise[l] -= left[l];
        }
    }
}

#[inline(always)]
fn begin_any(estimates: &mut [Packet], own: f32, draws: &[Packet]) {
    for (estimate, draw) in estimates.iter_mut().zip(draws) {
        for l in 0..PACKET {
            estimate[l] = own * draw[l];
        }
    }
}

/// `e ← own·z + below·(left + e)`.
#[inline(always)]
fn merge_any(
    estimates: &mut [Packet],
    weights: (f32, f32),
    draws: &[Packet],
    state: &[Packet],
    left: Buffer,
) {
    for ((estimate, draw), left) in estimates.iter_mut().zip(draws).zip(left.of(state)) {
        for l in 0..PACKET {
            estimate[l] = weights.0 * draw[l] + weights.1 * (left[l] + estimate[l]);
        }
    }
}

#[inline(always)]
fn finish_any(noise: &mut [Packet], estimates: &[Packet]) {
    for (noise, estimate) in noise.iter_mut().zip(estimates) {
        for l in 0..PACKET {
            noise[l] += estimate[l];
        }
    }
}

dispatch! {
    fn subtract / subtract_portable / subtract_avx2 = subtract_any(
        noise: &mut [Packet], state: &[Packet], left: Buffer
    );
}
dispatch! {
    fn begin / begin_portable / begin_avx2 = begin_any(estimates: &mut [Packet], own: f32, draws: &[Packet]);
}
dispatch! {
    fn merge / merge_portable / merge_avx2 = merge_any(
        estimates: &mut [Packet], weights: (f32, f32), draws: &[Packet], state: &[Packet], left: Buffer
    );
}
dispatch! {
    fn finish / finish_portable / finish_avx2 = finish_any(noise: &mut [Packet], estimates: &[Packet]);
}
