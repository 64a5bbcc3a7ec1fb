//! Any `N`, row by row: `Z` is drawn again from its key at every step instead of being kept.

use super::{Engine, Field, Kernel, PACKET, Packet, TILE, fill_packets, singles};
use crate::error::{Error, Result};
use crate::factorization::{Dense, Toeplitz};
use crate::noise::simd::dispatch;

/// Dense rows over regenerated noise: no state, O(i) work at step `i`.
///
/// Reference: the implementation of the experiments in \[DMRST22\].
pub(super) struct DenseEngine {
    steps: usize,
    rows: Rows,
}

enum Rows {
    /// The lower triangle, row by row.
    Packed(Vec<f32>),
    /// The first column.
    Toeplitz(Vec<f32>),
}

impl DenseEngine {
    pub(super) fn new(dense: &Dense) -> Result<Self> {
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
        Ok(Self { steps, rows: Rows::Packed(packed) })
    }

    pub(super) fn toeplitz(toeplitz: &Toeplitz) -> Result<Self> {
        let column = singles("Toeplitz coefficients", toeplitz.coloring())?;
        Ok(Self { steps: column.len(), rows: Rows::Toeplitz(column) })
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
        0
    }

    fn kernel<'a>(&'a self, field: &'a Field, step: usize) -> Box<dyn Kernel + 'a> {
        Box::new(DenseKernel { field, row: self.row(step) })
    }
}

struct DenseKernel<'a> {
    field: &'a Field,
    row: Vec<f32>,
}

impl Kernel for DenseKernel<'_> {
    fn run(&self, first: u64, _: &mut [Packet], noise: &mut [Packet]) {
        // Sums of thousands of terms: double precision keeps the error at that of the last rounding.
        let mut sums = [[0.0; PACKET]; TILE];
        let sums = &mut sums[..noise.len()];
        for (t, &weight) in self.row.iter().enumerate() {
            if weight != 0.0 {
                fill_packets(&self.field.row(t as u64), first, noise);
                accumulate(sums, weight, noise);
            }
        }
        for (noise, sum) in noise.iter_mut().zip(sums) {
            *noise = sum.map(|x| x as f32);
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
