//! How the rows of `u = N Z` are computed: one engine for each structure of `N`.
//!
//! The coordinates are independent of each other, so a step is cut into tiles that threads take one by one: a
//! tile draws its part of `Z`, moves its part of the state and adds to its part of the caller's slice while
//! all of it is in the cache. Every coordinate sees the same operations in the same order, whatever the tile
//! or the thread.

mod dense;
mod independent;
mod recurrence;
mod state_space;
mod structured;
mod tree;

pub use recurrence::IterateStage;

use super::field::{Field, Row};
use super::gauss::GROUP;
use crate::error::{Error, Result};
use crate::factorization::Factorization;
use rayon::prelude::*;
use std::ops::Range;

/// Coordinates in a packet, the unit of state: packet `p` holds coordinates `64p … 64p + 63`.
pub const PACKET: usize = 64;

/// One buffer's share of a packet.
pub type Packet = [f32; PACKET];

/// Packets in a tile: 4096 coordinates, whose noise and state stay in the nearer caches.
pub const TILE: usize = 64;

/// A way to compute the rows of `N Z` in order, with a state of whole buffers.
pub trait Engine: Send + Sync {
    /// Number of steps `n`.
    fn steps(&self) -> usize;

    /// Model-sized buffers kept from one step to the next.
    fn buffers(&self) -> usize;

    /// What all tiles of a step share.
    fn kernel<'a>(&'a self, field: &'a Field, step: usize) -> Box<dyn Kernel + 'a>;
}

/// The engine of a factorization, with a copy of its coefficients in single precision.
///
/// Errors: a coefficient that single precision would change, or rows that use noise of later steps: what is
/// streamed is [`Factorization::deployed`], and nothing else. [`Error::Memory`].
pub fn engine(factorization: &Factorization) -> Result<Box<dyn Engine>> {
    engine_ahead(factorization, 1)
}

/// [`engine`], but rows that need all noise before them are computed `ahead` at a time and wait in as many
/// buffers; the others have no use for it. The rows are the same to the bit.
///
/// Errors: those of [`engine`]; `ahead` is zero.
pub fn engine_ahead(factorization: &Factorization, ahead: usize) -> Result<Box<dyn Engine>> {
    if ahead == 0 {
        return Err(Error::argument("rows ahead", ahead, "at least the next row is computed"));
    }
    Ok(match factorization {
        Factorization::Independent(independent) => Box::new(independent::IndependentEngine::new(independent)),
        Factorization::Dense(dense) => Box::new(dense::DenseEngine::new(dense, ahead)?),
        Factorization::StateSpace(filter) => Box::new(state_space::StateSpaceEngine::new(filter)?),
        Factorization::Structured(structured) => Box::new(structured::StructuredEngine::new(structured)?),
        Factorization::Toeplitz(toeplitz) => Box::new(dense::DenseEngine::toeplitz(toeplitz, ahead)?),
        Factorization::Tree(tree) => Box::new(tree::TreeEngine::new(tree)?),
    })
}

/// One step of an engine.
pub trait Kernel: Sync {
    /// Writes a tile of `(N Z)[step, ·]` over `noise` and moves its state on.
    ///
    /// `first` is the first packet of the tile; the state holds the buffers of its first packet, then those
    /// of the next, and so on. A tile has at most [`TILE`] packets.
    fn run(&self, first: u64, state: &mut [Packet], noise: &mut [Packet]);
}

/// End of all coordinates: far from where counts of cipher blocks would overflow.
const LAST: u64 = 1 << 62;

/// A range of coordinates and the packets that cover it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Shard {
    coordinates: Range<u64>,
}

impl Shard {
    pub(crate) fn new(coordinates: Range<u64>) -> Result<Self> {
        let Range { start, end } = coordinates;
        if start >= end {
            let rule = "the range of coordinates must not be empty";
            return Err(Error::argument("coordinates", format!("{start}..{end}"), rule));
        }
        if end > LAST || usize::try_from(end - start).is_err() {
            let rule = "coordinates must lie below 2⁶² and fit the memory";
            return Err(Error::argument("coordinates", format!("{start}..{end}"), rule));
        }
        Ok(Self { coordinates })
    }

    pub(crate) fn coordinates(&self) -> &Range<u64> {
        &self.coordinates
    }

    pub(crate) fn len(&self) -> usize {
        (self.coordinates.end - self.coordinates.start) as usize
    }

    fn packets(&self) -> Range<u64> {
        self.coordinates.start / PACKET as u64..self.coordinates.end.div_ceil(PACKET as u64)
    }

    /// Bytes of state for a number of buffers, packets at the edges being whole.
    pub(crate) fn bytes(&self, buffers: usize) -> u128 {
        let packets = self.packets();
        u128::from(packets.end - packets.start) * buffers as u128 * size_of::<Packet>() as u128
    }

    /// A state of zeros.
    ///
    /// Errors: [`Error::Memory`] when the system does not grant it.
    pub(crate) fn allocate(&self, buffers: usize) -> Result<Vec<Packet>> {
        let refused = || Error::Memory { what: "the state of the noise stream", bytes: self.bytes(buffers) };
        let count =
            usize::try_from(self.bytes(buffers) / size_of::<Packet>() as u128).map_err(|_| refused())?;
        let mut state = Vec::new();
        state.try_reserve_exact(count).map_err(|_| refused())?;
        state.resize(count, [0.0; PACKET]);
        Ok(state)
    }

    /// Where buffer `b` lies in a state: packets, and in each the places that belong to the range, in order.
    pub(crate) fn places(&self, buffers: usize, b: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
        let packets = self.packets();
        let start = packets.start * PACKET as u64;
        let (skip, end) =
            ((self.coordinates.start - start) as usize, (self.coordinates.end - start) as usize);
        (0..(packets.end - packets.start) as usize).map(move |p| {
            let at = p * PACKET;
            (p * buffers + b, skip.saturating_sub(at)..(end - at).min(PACKET))
        })
    }

    /// Runs a step on all tiles: `out += scale · stage(kernel(Z))`, or without `out` only the states move.
    pub(crate) fn run(&self, step: StepOf<'_>, out: Option<&mut [f32]>) {
        let packets = self.packets();
        let tile = TILE as u64;
        let mut out = out;
        let (mut states, mut stages) = (step.state, step.stage_state);
        let mut tasks = Vec::with_capacity((packets.end - packets.start).div_ceil(tile) as usize);
        // Tiles begin at multiples of the tile, so only the first and the last may be short.
        let mut first = packets.start;
        while first < packets.end {
            let next = ((first / tile + 1) * tile).min(packets.end);
            let count = (next - first) as usize;
            let begin = self.coordinates.start.max(first * PACKET as u64);
            let end = self.coordinates.end.min(next * PACKET as u64);
            tasks.push(Task {
                first,
                count,
                offset: (begin - first * PACKET as u64) as usize,
                state: take(&mut states, count * step.buffers),
                stage_state: take(&mut stages, count * step.stage.map_or(0, |s| s.buffers())),
                out: out.as_mut().map(|out| take(out, (end - begin) as usize)),
            });
            first = next;
        }
        let scratch = || Box::new([[0.0; PACKET]; TILE]);
        tasks.into_par_iter().for_each_init(scratch, |noise, task| {
            let noise = &mut noise[..task.count];
            step.kernel.run(task.first, task.state, noise);
            if let Some(stage) = step.stage {
                stage.run(step.index, task.stage_state, noise);
            }
            if let Some(out) = task.out {
                add_scaled(out, step.scale, &noise.as_flattened()[task.offset..]);
            }
        });
    }
}

/// What [`Shard::run`] works on.
pub(crate) struct StepOf<'a> {
    pub(crate) index: usize,
    pub(crate) kernel: &'a dyn Kernel,
    pub(crate) state: &'a mut [Packet],
    pub(crate) buffers: usize,
    pub(crate) stage: Option<&'a IterateStage>,
    pub(crate) stage_state: &'a mut [Packet],
    pub(crate) scale: f32,
}

struct Task<'a> {
    first: u64,
    count: usize,
    /// Where the caller's coordinates begin within the first packet.
    offset: usize,
    state: &'a mut [Packet],
    stage_state: &'a mut [Packet],
    out: Option<&'a mut [f32]>,
}

fn take<'a, T>(rest: &mut &'a mut [T], count: usize) -> &'a mut [T] {
    let (head, tail) = std::mem::take(rest).split_at_mut(count);
    *rest = tail;
    head
}

/// Writes packets `first, first + 1, …` of a row.
pub(crate) fn fill_packets(row: &Row, first: u64, out: &mut [Packet]) {
    let (groups, _) = out.as_flattened_mut().as_chunks_mut();
    row.fill_groups(first * (PACKET / GROUP) as u64, groups);
}

#[inline(always)]
fn add_scaled_any(out: &mut [f32], scale: f32, noise: &[f32]) {
    out.iter_mut().zip(noise).for_each(|(out, noise)| *out += scale * noise);
}

crate::simd::dispatch! {
    fn add_scaled / add_scaled_portable / add_scaled_avx2 = add_scaled_any(
        out: &mut [f32], scale: f32, noise: &[f32]
    );
}

/// Numbers in single precision, refused where that would change them: loss and sensitivity belong to what is
/// deployed.
pub(crate) fn singles(name: &'static str, values: &[f64]) -> Result<Vec<f32>> {
    let bytes = size_of_val(values) as u128 / 2;
    let mut rounded = Vec::new();
    rounded.try_reserve_exact(values.len()).map_err(|_| Error::Memory { what: name, bytes })?;
    for (index, &value) in values.iter().enumerate() {
        let single = value as f32;
        if f64::from(single) != value {
            let rule = "only single-precision coefficients are deployed: round the factorization first";
            return Err(Error::InvalidEntry { name, index, value, rule });
        }
        rounded.push(single);
    }
    Ok(rounded)
}

#[cfg(test)]
mod tests;
