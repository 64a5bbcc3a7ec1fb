//! The paper's `(h, r)` form: `y = B̂ Z` from the last rows of noise and `r` accumulators, then `u = A⁻¹y`.

use super::{Engine, Field, Kernel, PACKET, Packet, Row, fill_packets, singles};
use crate::error::Result;
use crate::factorization::Structured;
use crate::linalg::banded::LowerBanded;
use crate::noise::simd::dispatch;

/// `h` diagonals and rank `r` for a workload `A = P⁻¹R`: `R u = P y`, row by row.
///
/// Buffers: the last `h − 1` rows of noise, `r` accumulators of those before, the past `y` that `P` reaches
/// and the past `u` that `R` reaches. `u` is made of `y` as it is kept, after rounding, so the rounding of
/// one step leaves again with the next and does not add up in the iterates.
///
/// Reference: Algorithm 2 of \[DMRST22\].
pub(super) struct StructuredEngine {
    band: Band,
    rank: usize,
    left: Vec<f32>,
    right: Vec<f32>,
    /// `P`.
    numerator: Band,
    /// `R`.
    denominator: Option<Band>,
}

/// The rows of a lower banded matrix, from the diagonal leftwards.
struct Band {
    width: usize,
    entries: Vec<f32>,
}

impl Band {
    fn new(name: &'static str, matrix: &LowerBanded) -> Result<Self> {
        let entries: Vec<f64> = (0..matrix.n()).flat_map(|i| matrix.row(i).iter().copied()).collect();
        Ok(Self { width: matrix.bandwidth() + 1, entries: singles(name, &entries)? })
    }

    fn row(&self, i: usize) -> &[f32] {
        &self.entries[i * self.width..][..self.width.min(i + 1)]
    }
}

/// Buffers of a step and their weights.
type Terms = Vec<(usize, f32)>;

impl StructuredEngine {
    pub(super) fn new(structured: &Structured) -> Result<Self> {
        let recurrence = structured.recurrence();
        let denominator = recurrence.right.as_ref().map(|r| Band::new("right factor of the recurrence", r));
        Ok(Self {
            band: Band::new("diagonals of the decoder", structured.band())?,
            rank: structured.rank(),
            left: singles("left low-rank factor", structured.left())?,
            right: singles("right low-rank factor", structured.right())?,
            numerator: Band::new("left factor of the recurrence", &recurrence.left)?,
            denominator: denominator.transpose()?,
        })
    }

    fn layout(&self) -> Layout {
        let noise = self.band.width - 1;
        let sums = noise + self.rank;
        let decoded = sums + self.numerator.width - 1;
        Layout { noise, sums, decoded, all: decoded + self.denominator.as_ref().map_or(0, |r| r.width - 1) }
    }
}

/// Where each kind of buffer ends.
#[derive(Clone, Copy)]
struct Layout {
    /// `z_{i−k}` at `(i − k) mod (h − 1)`.
    noise: usize,
    sums: usize,
    /// `y_{i−k}` at `sums + (i − k) mod` their number.
    decoded: usize,
    /// `u_{i−k}` likewise.
    all: usize,
}

/// Terms for the rows `i − 1, i − 2, …` of a ring of buffers, with weights from `weights[1]` on.
fn past(i: usize, ring: std::ops::Range<usize>, weights: &[f32], factor: f32) -> Terms {
    let slot = |k: usize| ring.start + (i - k) % ring.len();
    weights.iter().enumerate().skip(1).map(|(k, &w)| (slot(k), factor * w)).collect()
}

impl Engine for StructuredEngine {
    fn steps(&self) -> usize {
        self.band.entries.len() / self.band.width
    }

    fn buffers(&self) -> usize {
        self.layout().all
    }

    fn kernel<'a>(&'a self, field: &'a Field, i: usize) -> Box<dyn Kernel + 'a> {
        let (layout, h, r) = (self.layout(), self.band.width, self.rank);
        let rank_row = |rows: &'a [f32], j: usize| rows.get(j * r..(j + 1) * r).unwrap_or_default();
        let sum = |k: usize| layout.noise + k;
        let slot = |range: std::ops::Range<usize>| (!range.is_empty()).then(|| range.start + i % range.len());

        let (diagonals, numerator) = (self.band.row(i), self.numerator.row(i));
        let mut decode = past(i, 0..layout.noise, diagonals, 1.0);
        if let Some(row) = i.checked_sub(h) {
            decode.extend(rank_row(&self.left, row).iter().enumerate().map(|(k, &u)| (sum(k), u)));
        }
        let denominator = self.denominator.as_ref().map(|r| r.row(i));
        let mut invert = past(i, layout.sums..layout.decoded, numerator, 1.0);
        let mut scale = 1.0;
        if let Some(row) = denominator {
            invert.extend(past(i, layout.decoded..layout.all, row, -1.0));
            scale = row[0];
        }
        // The row of noise that leaves the band after this step joins the accumulators.
        let accumulate = match (i + 1).checked_sub(h) {
            Some(row) => rank_row(&self.right, row).iter().enumerate().map(|(k, &v)| (sum(k), v)).collect(),
            None => Vec::new(),
        };
        Box::new(StructuredKernel {
            row: field.row(i as u64),
            buffers: layout.all,
            step: Step {
                diagonal: diagonals[0],
                decode,
                accumulate,
                noise: slot(0..layout.noise),
                decoded: slot(layout.sums..layout.decoded),
                own: numerator[0],
                invert,
                scale,
                output: slot(layout.decoded..layout.all),
            },
        })
    }
}

struct StructuredKernel {
    row: Row,
    buffers: usize,
    step: Step,
}

/// `y = diagonal·z + decode`, then the accumulators, then `u = (own·y + invert)/scale`.
struct Step {
    diagonal: f32,
    decode: Terms,
    accumulate: Terms,
    /// Buffer that the row just drawn takes from the row that leaves the band; `None` when they are the same.
    noise: Option<usize>,
    decoded: Option<usize>,
    own: f32,
    invert: Terms,
    scale: f32,
    output: Option<usize>,
}

impl Kernel for StructuredKernel {
    fn run(&self, first: u64, state: &mut [Packet], noise: &mut [Packet]) {
        fill_packets(&self.row, first, noise);
        if self.buffers == 0 {
            let weight = self.step.own * self.step.diagonal / self.step.scale;
            noise.as_flattened_mut().iter_mut().for_each(|z| *z *= weight);
        } else {
            advance(&self.step, self.buffers, state, noise);
        }
    }
}

#[inline(always)]
fn advance_any(step: &Step, buffers: usize, state: &mut [Packet], noise: &mut [Packet]) {
    for (state, noise) in state.chunks_exact_mut(buffers).zip(noise) {
        let z = *noise;
        let y = weighted(z, step.diagonal, &step.decode, state);
        let leaving = step.noise.map_or(z, |slot| state[slot]);
        for &(sum, weight) in &step.accumulate {
            for l in 0..PACKET {
                state[sum][l] += weight * leaving[l];
            }
        }
        let mut u = weighted(y, step.own, &step.invert, state);
        u.iter_mut().for_each(|u| *u /= step.scale);
        for (slot, value) in [(step.noise, &z), (step.decoded, &y), (step.output, &u)] {
            if let Some(slot) = slot {
                state[slot] = *value;
            }
        }
        *noise = u;
    }
}

#[inline(always)]
fn weighted(own: Packet, weight: f32, terms: &Terms, state: &[Packet]) -> Packet {
    let mut sum = own.map(|x| weight * x);
    for &(buffer, weight) in terms {
        for l in 0..PACKET {
            sum[l] += weight * state[buffer][l];
        }
    }
    sum
}

dispatch! {
    fn advance / advance_portable / advance_avx2 = advance_any(
        step: &Step, buffers: usize, state: &mut [Packet], noise: &mut [Packet]
    );
}
