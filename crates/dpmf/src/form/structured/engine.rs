//! The paper's `(h, r)` form, `N = A⁻¹B̂`: the last rows of noise, and `r` accumulators of those before.

use super::Structured;
use crate::engine::exact::program::{
    Assignment, Draw, OUTPUT, Place, Program, Ratio, Step as ProgramStep, Weight,
};
use crate::engine::{Engine, Kernel, PACKET, Packet, fill_packets, singles};
use crate::engine::{Field, Row};
use crate::error::Result;
use crate::linalg::banded::LowerBanded;
use crate::simd::dispatch;
use std::ops::Range;

/// `h` diagonals and rank `r` for a workload `A = P⁻¹R` of bandwidth `w`: `R u = P B̂ Z`, row by row.
///
/// Row `i` of `P B̂` has `h + w` free entries, then rank `r`. They are put together in double precision before
/// any noise is touched: `y = B̂ Z` is large beside its differences, which `P` takes, and is never formed.
///
/// Buffers: the last `h − 1 + w` rows of noise, `r` accumulators, the past `u` that `R` reaches.
///
/// Reference: Algorithm 2 of \[DMRST22\], for noise on the gradient.
pub(super) struct StructuredEngine {
    /// `D`, the diagonals of `B̂`.
    diagonals: Band,
    rank: usize,
    /// Rows `h, h + 1, …` of `U`.
    left: Vec<f32>,
    /// Rows `0, 1, …` of `V`.
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

    /// The entry `k` places left of the diagonal in row `i`.
    fn at(&self, i: usize, k: usize) -> Option<f64> {
        self.row(i).get(k).map(|&x| x.into())
    }
}

impl StructuredEngine {
    pub(super) fn new(structured: &Structured) -> Result<Self> {
        let recurrence = structured.recurrence();
        let denominator = recurrence.right.as_ref().map(|r| Band::new("right factor of the recurrence", r));
        Ok(Self {
            diagonals: Band::new("diagonals of the decoder", structured.band())?,
            rank: structured.rank(),
            left: singles("left low-rank factor", structured.left())?,
            right: singles("right low-rank factor", structured.right())?,
            numerator: Band::new("left factor of the recurrence", &recurrence.left)?,
            denominator: denominator.transpose()?,
        })
    }

    /// Rows of noise that are kept, then accumulators, then past outputs: where each ends.
    fn layout(&self) -> [usize; 3] {
        let noise = self.diagonals.width - 1 + self.numerator.width - 1;
        let sums = noise + self.rank;
        [noise, sums, sums + self.denominator.as_ref().map_or(0, |r| r.width - 1)]
    }

    /// Row `i ≥ h` of `U`; nothing above.
    fn left_row(&self, i: usize) -> Option<&[f32]> {
        let row = i.checked_sub(self.diagonals.width)?;
        Some(&self.left[row * self.rank..][..self.rank])
    }

    /// Row `j` of `V`; nothing below the last.
    fn right_row(&self, j: usize) -> Option<&[f32]> {
        self.right.get(j * self.rank..(j + 1) * self.rank)
    }

    /// `B̂_{i,i−k}`.
    fn decoder_at(&self, i: usize, k: usize) -> f64 {
        match (self.diagonals.at(i, k), self.left_row(i), self.right_row(i - k)) {
            (Some(entry), ..) => entry,
            (None, Some(u), Some(v)) => u.iter().zip(v).map(|(&u, &v)| f64::from(u) * f64::from(v)).sum(),
            _ => 0.0,
        }
    }
}

/// The buffer of row `i` in a ring of buffers.
fn slot(ring: Range<usize>, i: usize) -> Option<usize> {
    (!ring.is_empty()).then(|| ring.start + i % ring.len())
}

impl Engine for StructuredEngine {
    fn steps(&self) -> usize {
        self.diagonals.entries.len() / self.diagonals.width
    }

    fn buffers(&self) -> usize {
        self.layout()[2]
    }

    fn kernel<'a>(&'a self, field: &'a Field, i: usize) -> Box<dyn Kernel + 'a> {
        let [noise, sums, all] = self.layout();
        let numerator = self.numerator.row(i);
        let denominator = self.denominator.as_ref().map_or(&[1.0][..], |r| r.row(i));
        let scale = f64::from(denominator[0]);
        // Entry (i, i − m) of P B̂, over R_ii.
        let entry = |m: usize| {
            let terms = numerator.iter().enumerate().take(m + 1);
            terms.map(|(k, &p)| f64::from(p) * self.decoder_at(i - k, m - k)).sum::<f64>() / scale
        };
        let mut terms = Vec::with_capacity(all);
        terms.extend((1..=noise.min(i)).filter_map(|m| Some((slot(0..noise, i - m)?, entry(m)))));
        for q in 0..self.rank {
            let rows = numerator.iter().enumerate().filter_map(|(k, &p)| Some((p, self.left_row(i - k)?[q])));
            terms.push((noise + q, rows.map(|(p, u)| f64::from(p) * f64::from(u)).sum::<f64>() / scale));
        }
        let past = denominator.iter().enumerate().skip(1);
        terms.extend(past.filter_map(|(k, &r)| Some((slot(sums..all, i - k)?, -f64::from(r) / scale))));
        // The row of noise that leaves after this step joins the accumulators.
        let leaving = i.checked_sub(noise).and_then(|j| self.right_row(j)).unwrap_or_default();
        Box::new(StructuredKernel {
            row: field.row(i as u64),
            buffers: all,
            step: Step {
                own: entry(0),
                terms,
                accumulate: leaving.iter().enumerate().map(|(q, &v)| (noise + q, v.into())).collect(),
                noise: slot(0..noise, i),
                output: slot(sums..all, i),
            },
        })
    }
}

impl StructuredEngine {
    /// Entry `(i, i − m)` of `P B̂`, over `R_ii`, without rounding.
    fn exact_entry(&self, i: usize, m: usize) -> Weight {
        let mut products = Vec::new();
        for (k, &p) in self.numerator.row(i).iter().enumerate().take(m + 1) {
            let (row, left) = (i - k, m - k);
            match (self.diagonals.row(row).get(left), self.left_row(row), self.right_row(row - left)) {
                (Some(&entry), ..) => products.push([p, entry, 1.0]),
                (None, Some(u), Some(v)) => products.extend(u.iter().zip(v).map(|(&u, &v)| [p, u, v])),
                _ => {}
            }
        }
        self.over(i, products)
    }

    /// A sum of products over `R_ii`.
    fn over(&self, i: usize, products: Vec<[f32; 3]>) -> Weight {
        let over = self.denominator.as_ref().map_or(1.0, |r| r.row(i)[0]);
        Weight::Ratio(Box::new(Ratio { products, over }))
    }
}

impl Program for StructuredEngine {
    fn steps(&self) -> usize {
        Engine::steps(self)
    }

    fn buffers(&self) -> usize {
        Engine::buffers(self)
    }

    fn step(&self, i: usize) -> ProgramStep {
        let [noise, sums, all] = self.layout();
        let (z, buffer) = (Place::Draw(0), Place::Buffer);
        let mut terms = vec![(z, self.exact_entry(i, 0))];
        for m in 1..=noise.min(i) {
            terms.extend(slot(0..noise, i - m).map(|slot| (buffer(slot), self.exact_entry(i, m))));
        }
        for q in 0..self.rank {
            let rows = self.numerator.row(i).iter().enumerate();
            let products = rows.filter_map(|(k, &p)| Some([p, self.left_row(i - k)?[q], 1.0])).collect();
            terms.push((buffer(noise + q), self.over(i, products)));
        }
        let past = self.denominator.as_ref().map_or(&[][..], |r| r.row(i)).iter().enumerate().skip(1);
        for (k, &r) in past {
            terms.extend(
                slot(sums..all, i - k).map(|slot| (buffer(slot), self.over(i, vec![[-r, 1.0, 1.0]]))),
            );
        }
        let mut step = ProgramStep { draws: vec![Draw::first(i)], ..ProgramStep::default() };
        step.assignments.push(Assignment { to: OUTPUT, terms });
        let leaving = i.checked_sub(noise).and_then(|j| self.right_row(j)).unwrap_or_default();
        let row = slot(0..noise, i).map_or(z, buffer);
        for (q, &v) in leaving.iter().enumerate() {
            step.assign(buffer(noise + q), [(row, v), (buffer(noise + q), 1.0)]);
        }
        if let Some(slot) = slot(0..noise, i) {
            step.assign(buffer(slot), [(z, 1.0)]);
        }
        if let Some(slot) = slot(sums..all, i) {
            step.assign(buffer(slot), [(OUTPUT, 1.0)]);
        }
        step
    }
}

struct StructuredKernel {
    row: Row,
    buffers: usize,
    step: Step,
}

/// `u = own·z + Σ terms`, then the accumulators. Terms are buffers and their weights.
struct Step {
    own: f64,
    terms: Vec<(usize, f64)>,
    accumulate: Vec<(usize, f64)>,
    /// Buffer that the row just drawn takes from the row that leaves; `None` when they are the same.
    noise: Option<usize>,
    output: Option<usize>,
}

impl Kernel for StructuredKernel {
    fn run(&self, first: u64, state: &mut [Packet], noise: &mut [Packet]) {
        fill_packets(&self.row, first, noise);
        if self.buffers == 0 {
            noise.as_flattened_mut().iter_mut().for_each(|z| *z = (self.step.own * f64::from(*z)) as f32);
        } else {
            advance(&self.step, self.buffers, state, noise);
        }
    }
}

#[inline(always)]
fn advance_any(step: &Step, buffers: usize, state: &mut [Packet], noise: &mut [Packet]) {
    for (state, noise) in state.chunks_exact_mut(buffers).zip(noise) {
        let z = *noise;
        let mut sum = z.map(|z| step.own * f64::from(z));
        for &(buffer, weight) in &step.terms {
            for l in 0..PACKET {
                sum[l] += weight * f64::from(state[buffer][l]);
            }
        }
        let u = sum.map(|x| x as f32);
        let leaving = step.noise.map_or(z, |slot| state[slot]);
        for &(buffer, weight) in &step.accumulate {
            for l in 0..PACKET {
                state[buffer][l] = (f64::from(state[buffer][l]) + weight * f64::from(leaving[l])) as f32;
            }
        }
        for (slot, value) in [(step.noise, &z), (step.output, &u)] {
            if let Some(slot) = slot {
                state[slot] = *value;
            }
        }
        *noise = u;
    }
}

dispatch! {
    fn advance / advance_portable / advance_avx2 = advance_any(
        step: &Step, buffers: usize, state: &mut [Packet], noise: &mut [Packet]
    );
}
