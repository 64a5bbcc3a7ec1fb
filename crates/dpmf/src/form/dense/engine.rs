//! Any `N`, row by row: `Z` is regenerated from its key at every step instead of being kept.

use super::Dense;
use crate::engine::Field;
use crate::engine::exact::program::{Draw, OUTPUT, Place, Program, Step};
use crate::engine::{Engine, Kernel, PACKET, Packet, fill_packets, singles};
use crate::error::{Error, Result};
use crate::form::Toeplitz;
use crate::simd::dispatch;

/// Dense rows over regenerated noise: O(i) work at step `i`, and no state unless it looks ahead.
///
/// With `ahead` rows computed at a time, which then wait in as many buffers, each draw of `Z` serves them all: the
/// same bits, with `ahead` times fewer draws.
///
/// Reference: the implementation of the experiments in \[DMRST22\].
pub(in crate::form) struct DenseEngine {
    steps: usize,
    rows: Rows,
    ahead: usize,
}

enum Rows {
    /// The lower triangle, row by row.
    Packed(Vec<f32>),
    /// The first column.
    Toeplitz(Vec<f32>),
}

impl DenseEngine {
    pub(super) fn new(dense: &Dense, ahead: usize) -> Result<Self> {
        const NAME: &str = "dense noise matrix";
        let matrix = dense.coloring();
        let steps = matrix.nrows();
        let mut packed = Vec::new();
        let refused = |_| Error::Memory { what: NAME, bytes: steps as u128 * (steps as u128 + 1) * 2 };
        packed.try_reserve_exact(steps * (steps + 1) / 2).map_err(refused)?;
        for row in 0..steps {
            for column in 0..=row {
                let value = matrix[(row, column)];
                if f64::from(value as f32) != value {
                    let rule =
                        "only single-precision coefficients are deployed: round the factorization first";
                    return Err(Error::InvalidMatrixEntry { name: NAME, row, column, value, rule });
                }
                packed.push(value as f32);
            }
        }
        Ok(Self { steps, rows: Rows::Packed(packed), ahead })
    }

    pub(in crate::form) fn toeplitz(toeplitz: &Toeplitz, ahead: usize) -> Result<Self> {
        let column = singles("Toeplitz coefficients", toeplitz.coloring())?;
        Ok(Self { steps: column.len(), rows: Rows::Toeplitz(column), ahead })
    }

    /// Row `i` up to its diagonal.
    fn row(&self, i: usize) -> Vec<f32> {
        match &self.rows {
            Rows::Packed(entries) => entries[i * (i + 1) / 2..][..=i].to_vec(),
            Rows::Toeplitz(column) => column[..=i].iter().rev().copied().collect(),
        }
    }
}

impl Engine for DenseEngine {
    fn steps(&self) -> usize {
        self.steps
    }

    fn buffers(&self) -> usize {
        if self.ahead > 1 { self.ahead } else { 0 }
    }

    fn kernel<'a>(&'a self, field: &'a Field, step: usize) -> Box<dyn Kernel + 'a> {
        let waiting = step % self.ahead;
        if waiting > 0 {
            return Box::new(WaitingRow { row: waiting, ahead: self.ahead });
        }
        let rows = (step..self.steps.min(step + self.ahead)).map(|i| self.row(i)).collect();
        Box::new(DenseKernel { field, rows, ahead: self.ahead })
    }
}

impl Program for DenseEngine {
    fn steps(&self) -> usize {
        self.steps
    }

    fn buffers(&self) -> usize {
        Engine::buffers(self)
    }

    fn step(&self, t: usize) -> Step {
        let mut step = Step::default();
        let waiting = t % self.ahead;
        if waiting > 0 {
            step.assign(OUTPUT, [(Place::Buffer(waiting), 1.0)]);
            return step;
        }
        let end = self.steps.min(t + self.ahead);
        step.draws = (0..end).map(Draw::first).collect();
        for i in t..end {
            let to = if i == t { OUTPUT } else { Place::Buffer(i - t) };
            step.assign(to, self.row(i).into_iter().enumerate().map(|(s, weight)| (Place::Draw(s), weight)));
        }
        step
    }

    fn origin(&self, t: usize) -> usize {
        t - t % self.ahead
    }
}

/// Computes rows `step, step + 1, …`, of which the first is due now.
struct DenseKernel<'a> {
    field: &'a Field,
    rows: Vec<Vec<f32>>,
    ahead: usize,
}

/// Packets whose sums are in the nearest caches together.
const PIECE: usize = 8;

impl Kernel for DenseKernel<'_> {
    fn run(&self, first: u64, state: &mut [Packet], noise: &mut [Packet]) {
        let mut sums = vec![[[0.0; PACKET]; PIECE]; self.rows.len()];
        let last = self.rows.last().map_or(0, Vec::len);
        for (piece, noise) in noise.chunks_mut(PIECE).enumerate() {
            let start = piece * PIECE;
            // Sums of thousands of terms: double precision keeps the error at that of the last rounding.
            sums.fill([[0.0; PACKET]; PIECE]);
            for t in 0..last {
                let used =
                    self.rows.iter().zip(&mut sums).filter_map(|(row, sums)| Some((*row.get(t)?, sums)));
                let mut drawn = false;
                for (weight, sums) in used.filter(|(weight, _)| *weight != 0.0) {
                    if !drawn {
                        fill_packets(&self.field.row(t as u64), first + start as u64, noise);
                        drawn = true;
                    }
                    accumulate(&mut sums[..noise.len()], weight, noise);
                }
            }
            for (p, noise) in noise.iter_mut().enumerate() {
                *noise = sums[0][p].map(|x| x as f32);
                if self.ahead > 1 {
                    for (row, sums) in sums.iter().enumerate() {
                        state[(start + p) * self.ahead + row] = sums[p].map(|x| x as f32);
                    }
                }
            }
        }
    }
}

/// A row that was computed before.
struct WaitingRow {
    row: usize,
    ahead: usize,
}

impl Kernel for WaitingRow {
    fn run(&self, _: u64, state: &mut [Packet], noise: &mut [Packet]) {
        for (noise, state) in noise.iter_mut().zip(state.chunks_exact(self.ahead)) {
            *noise = state[self.row];
        }
    }
}

#[inline(always)]
fn accumulate_any(sums: &mut [[f64; PACKET]], weight: f32, noise: &[Packet]) {
    for (sums, noise) in sums.iter_mut().zip(noise) {
        for l in 0..PACKET {
            sums[l] += f64::from(weight) * f64::from(noise[l]);
        }
    }
}

dispatch! {
    fn accumulate / accumulate_portable / accumulate_avx2 = accumulate_any(
        sums: &mut [[f64; PACKET]], weight: f32, noise: &[Packet]
    );
}
