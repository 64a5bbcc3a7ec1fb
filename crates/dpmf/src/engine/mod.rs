//! Engines compute the rows of `u = N Z`; every [form](crate::form) has its own.
//!
//! The coordinates are independent of each other, so a step is cut into segments that threads take one by one, and these
//! into tiles: a tile draws its part of `Z`, moves its part of the state and adds to its part of the caller's slice while
//! all of it is in the cache. Every coordinate sees the same operations in the same order, whatever the tile
//! or the thread.

pub mod exact;
pub mod field;
pub(crate) mod gauss;
mod iterate;

pub use field::{FIELD_FORMAT, Field, Row};
pub(crate) use iterate::IterateStage;

use crate::error::{Error, Result};
use gauss::GROUP;
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
            let rule = "coordinates must lie below 2⁶² and fit in memory";
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

    /// Bytes of state for a number of buffers, each with packets of type `P`; those at the edges are whole.
    pub(crate) fn bytes<P>(&self, buffers: usize) -> u128 {
        let packets = self.packets();
        u128::from(packets.end - packets.start) * buffers as u128 * size_of::<P>() as u128
    }

    /// A state of zeros.
    ///
    /// Errors: [`Error::Memory`] when the system does not grant it.
    pub(crate) fn allocate<T: Copy + Default>(&self, buffers: usize) -> Result<Vec<[T; PACKET]>> {
        let bytes = self.bytes::<[T; PACKET]>(buffers);
        let refused = || Error::Memory { what: "the state of the noise stream", bytes };
        let count = usize::try_from(bytes / size_of::<[T; PACKET]>() as u128).map_err(|_| refused())?;
        let mut state = Vec::new();
        state.try_reserve_exact(count).map_err(|_| refused())?;
        state.resize(count, [T::default(); PACKET]);
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

    /// The tiles of at most `size` packets that cover the range, in order.
    pub(crate) fn tiles(&self, size: u64) -> impl Iterator<Item = Tile> {
        let (packets, coordinates) = (self.packets(), self.coordinates.clone());
        // Tiles begin at multiples of their size, so only the first and the last may be short.
        let mut first = packets.start;
        std::iter::from_fn(move || {
            if first >= packets.end {
                return None;
            }
            let next = ((first / size + 1) * size).min(packets.end);
            let begin = coordinates.start.max(first * PACKET as u64);
            let end = coordinates.end.min(next * PACKET as u64);
            let tile = Tile {
                first,
                count: (next - first) as usize,
                packet: (first - packets.start) as usize,
                offset: (begin - first * PACKET as u64) as usize,
                length: (end - begin) as usize,
                place: (begin - coordinates.start) as usize,
            };
            first = next;
            Some(tile)
        })
    }

    /// Parts of the range that are worked on as one, in order: whole tiles, a good sixty of them, or as many as take a
    /// millisecond each.
    pub(crate) fn segments(&self) -> impl Iterator<Item = Shard> {
        let packets = self.packets();
        let (tile, count) = (TILE as u64, packets.end - packets.start);
        let size = (count / 64).clamp(tile, 16 * tile).next_multiple_of(tile);
        let coordinates = self.coordinates.clone();
        let step = size * PACKET as u64;
        (packets.start / size..packets.end.div_ceil(size)).map(move |index| {
            let begin = coordinates.start.max(index * step);
            Shard { coordinates: begin..coordinates.end.min((index + 1) * step) }
        })
    }

    /// Runs a step in single precision, on the calling thread.
    pub(crate) fn run<T: Target>(&self, step: StepOf<'_>, mut sink: Sink<'_, T, f32>) {
        let stage_buffers = step.stage.map_or(0, IterateStage::buffers);
        let mut scratch = Box::new([[0.0; PACKET]; TILE]);
        for tile in self.tiles(TILE as u64) {
            let noise = &mut scratch[..tile.count];
            step.kernel.run(tile.first, tile.of(step.state, step.buffers), noise);
            if let Some(recurrence) = step.stage {
                recurrence.run(step.index, tile.of(step.stage_state, stage_buffers), noise);
            }
            let noise = &noise.as_flattened()[tile.offset..][..tile.length];
            match &mut sink {
                Sink::Skip => {}
                Sink::Add(values) => values.add_scaled(tile.place, step.scale, noise),
                Sink::Keep(row) => row[tile.place..][..tile.length].copy_from_slice(noise),
            }
        }
    }
}

/// What becomes of the noise of a step.
pub(crate) enum Sink<'a, T, N> {
    /// Nothing: only the states move.
    Skip,
    /// It is added, and what comes out is released.
    Add(T),
    /// It is kept as it is, before any scale.
    Keep(&'a mut [N]),
}

/// A part of a range that is small enough for the nearer caches.
pub(crate) struct Tile {
    /// The first packet.
    pub(crate) first: u64,
    /// Number of packets.
    pub(crate) count: usize,
    /// The first packet, counted from the first of the range.
    packet: usize,
    /// Where the coordinates begin within the first packet.
    pub(crate) offset: usize,
    /// Number of coordinates.
    pub(crate) length: usize,
    /// The first coordinate, counted from the first of the range.
    pub(crate) place: usize,
}

impl Tile {
    /// The places of packet `p` that belong to the range.
    pub(crate) fn lanes(&self, p: usize) -> Range<usize> {
        let at = p * PACKET;
        self.offset.saturating_sub(at)..(self.offset + self.length - at).min(PACKET)
    }

    /// Its part of a state: the buffers of the first packet, then those of the next, and so on.
    pub(crate) fn of<'a, P>(&self, state: &'a mut [P], buffers: usize) -> &'a mut [P] {
        &mut state[self.packet * buffers..][..self.count * buffers]
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

/// What noise is added to: numbers that are replaced by what is released.
pub(crate) trait Target: Send + Sized {
    /// How many numbers.
    fn len(&self) -> usize;

    /// The first so many, and the others.
    fn split_at(self, count: usize) -> (Self, Self);

    /// Reads the numbers from `place` on, times a power of two.
    fn load(&self, place: usize, factor: f64, to: &mut [f64]);

    /// Writes what is released in their place.
    fn store(&mut self, place: usize, from: &[f64]);

    /// Adds scaled noise of single precision.
    fn add_scaled(&mut self, place: usize, scale: f32, noise: &[f32]);
}

impl<V: Value> Target for &mut [V] {
    fn len(&self) -> usize {
        <[V]>::len(self)
    }

    fn split_at(self, count: usize) -> (Self, Self) {
        self.split_at_mut(count)
    }

    fn load(&self, place: usize, factor: f64, to: &mut [f64]) {
        to.iter_mut().zip(&self[place..]).for_each(|(to, value)| *to = (*value).into() * factor);
    }

    fn store(&mut self, place: usize, from: &[f64]) {
        self[place..].iter_mut().zip(from).for_each(|(value, y)| *value = V::narrow(*y));
    }

    fn add_scaled(&mut self, place: usize, scale: f32, noise: &[f32]) {
        V::add_scaled(&mut self[place..][..noise.len()], scale, noise);
    }
}

/// A sum of whole numbers in units of a power of two, of magnitude at most 2⁵³, which becomes zero; what is released is
/// written elsewhere.
pub(crate) struct Sum<'a> {
    pub(crate) whole: &'a mut [i64],
    pub(crate) released: &'a mut [f32],
    pub(crate) unit: f64,
}

impl Target for Sum<'_> {
    fn len(&self) -> usize {
        self.whole.len()
    }

    fn split_at(self, count: usize) -> (Self, Self) {
        let (whole, other) = self.whole.split_at_mut(count);
        let (released, elsewhere) = self.released.split_at_mut(count);
        let unit = self.unit;
        (Self { whole, released, unit }, Self { whole: other, released: elsewhere, unit })
    }

    fn load(&self, place: usize, factor: f64, to: &mut [f64]) {
        let factor = factor * self.unit;
        to.iter_mut().zip(&self.whole[place..]).for_each(|(to, whole)| *to = *whole as f64 * factor);
    }

    fn store(&mut self, place: usize, from: &[f64]) {
        self.released[place..].iter_mut().zip(from).for_each(|(released, y)| *released = *y as f32);
        self.whole[place..][..from.len()].fill(0);
    }

    fn add_scaled(&mut self, place: usize, scale: f32, noise: &[f32]) {
        let both = self.released[place..].iter_mut().zip(&mut self.whole[place..]);
        for ((released, whole), noise) in both.zip(noise) {
            *released = (*whole as f64 * self.unit + f64::from(scale) * f64::from(*noise)) as f32;
            *whole = 0;
        }
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
}

/// The numbers that noise is added to: f32, or f64 for sums that f32 does not hold.
pub trait Value: Copy + Send + Sync + Into<f64> + sealed::Sealed {
    /// Bytes of a number.
    #[doc(hidden)]
    const BYTES: usize;

    /// The nearest number, or the largest there is.
    #[doc(hidden)]
    fn narrow(value: f64) -> Self;

    /// Writes the bytes, little endian.
    #[doc(hidden)]
    fn write(self, to: &mut [u8]);

    /// Adds scaled noise of single precision.
    #[doc(hidden)]
    fn add_scaled(out: &mut [Self], scale: f32, noise: &[f32]);

    /// Whether all numbers are finite, quickly.
    #[doc(hidden)]
    fn all_finite(values: &[Self]) -> bool;
}

impl Value for f32 {
    const BYTES: usize = 4;

    #[inline(always)]
    fn narrow(value: f64) -> Self {
        value.clamp(f64::from(f32::MIN), f64::from(f32::MAX)) as f32
    }

    fn write(self, to: &mut [u8]) {
        to.copy_from_slice(&self.to_le_bytes());
    }

    fn add_scaled(out: &mut [Self], scale: f32, noise: &[f32]) {
        add_scaled(out, scale, noise);
    }

    fn all_finite(values: &[Self]) -> bool {
        largest_magnitude(values) < f32::INFINITY.to_bits()
    }
}

impl Value for f64 {
    const BYTES: usize = 8;

    #[inline(always)]
    fn narrow(value: f64) -> Self {
        value
    }

    fn write(self, to: &mut [u8]) {
        to.copy_from_slice(&self.to_le_bytes());
    }

    fn add_scaled(out: &mut [Self], scale: f32, noise: &[f32]) {
        out.iter_mut().zip(noise).for_each(|(out, noise)| *out += f64::from(scale) * f64::from(*noise));
    }

    fn all_finite(values: &[Self]) -> bool {
        values.iter().all(|x| x.is_finite())
    }
}

/// The largest of the bits of `|x|`: the order of numbers, with infinity and NaN above all.
#[inline(always)]
fn largest_magnitude_any(values: &[f32]) -> u32 {
    values.iter().fold(0, |largest, x| largest.max(x.to_bits() & !(1 << 31)))
}

crate::simd::dispatch! {
    fn largest_magnitude / largest_magnitude_portable / largest_magnitude_avx2 = largest_magnitude_any(
        values: &[f32]
    ) -> u32;
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
