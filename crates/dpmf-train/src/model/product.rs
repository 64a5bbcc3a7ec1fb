//! Matrix products in single precision, the same bits on every machine.
//!
//! Every sum is taken in an order that depends on its length alone: not on the instruction set, the tile, the
//! block or the number of rows beside it. A product and a sum are never fused. So a run that resumes on another
//! machine goes on bit by bit, and a sequence scores the same alone and within a batch.

use super::packet::{self, LANES, Packet, joined};
use dpmf::simd::dispatch;

/// Columns of a panel: two packets.
const PANEL: usize = 2 * LANES;
/// Rows of a tile: 6 × 2 packets of sums leave four of sixteen registers for the factors.
const TILE: usize = 6;
/// Terms of a sum between two visits of its destination: one panel then fills half of a first-level cache.
const DEPTH: usize = 256;
/// Rows repacked at a time: they fill a fraction of a second-level cache.
const BLOCK: usize = 16 * TILE;
/// Terms of an inner product between two visits of its destination.
const STRETCH: usize = 512;

/// A matrix seen through two strides, so that a transpose costs nothing.
#[derive(Debug, Clone, Copy)]
pub(super) struct Matrix<'a> {
    data: &'a [f32],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a> Matrix<'a> {
    /// Row-major matrix whose rows lie `stride` apart.
    pub(super) fn new(data: &'a [f32], rows: usize, columns: usize, stride: usize) -> Self {
        Self { data, rows, columns, row_stride: stride, column_stride: 1 }
    }

    /// The transpose.
    pub(super) fn transposed(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }
}

/// The right factor of a product, cut into panels of 16 columns that lie one after the other.
#[derive(Debug, Clone, Default)]
pub(super) struct Panels {
    data: Vec<[f32; PANEL]>,
    depth: usize,
    width: usize,
}

impl Panels {
    /// Takes a row-major `depth × width` matrix whose rows lie `width` apart.
    pub(super) fn pack(&mut self, matrix: &[f32], depth: usize, width: usize) {
        (self.depth, self.width) = (depth, width);
        self.data.resize(depth * width.div_ceil(PANEL), [0.0; PANEL]);
        if depth == 0 || width == 0 {
            return;
        }
        for (panel, rows) in self.data.chunks_exact_mut(depth).enumerate() {
            let first = panel * PANEL;
            let columns = PANEL.min(width - first);
            for (packed, row) in rows.iter_mut().zip(matrix.chunks_exact(width)) {
                if let Ok(whole) = <&[f32; PANEL]>::try_from(&row[first..first + columns]) {
                    *packed = *whole;
                } else {
                    *packed = [0.0; PANEL];
                    packed[..columns].copy_from_slice(&row[first..]);
                }
            }
        }
    }
}

/// Rows of the left factor, interleaved for the tiles; kept to be reused.
#[derive(Debug, Clone, Default)]
pub(super) struct Interleaved(Vec<f32>);

impl Interleaved {
    /// Rows `first..first + rows`, columns `start..start + depth`, as tiles in which a column lies together.
    #[inline(always)]
    fn pack(&mut self, matrix: Matrix<'_>, first: usize, rows: usize, start: usize, depth: usize) {
        self.0.resize(rows * depth, 0.0);
        let mut tiles = self.0.as_mut_slice();
        let mut row = 0;
        while row < rows {
            let height = TILE.min(rows - row);
            let (tile, rest) = tiles.split_at_mut(height * depth);
            let base = (first + row) * matrix.row_stride + start * matrix.column_stride;
            if matrix.column_stride == 1 {
                for within in 0..height {
                    let source = &matrix.data[base + within * matrix.row_stride..][..depth];
                    for (column, &value) in tile.chunks_exact_mut(height).zip(source) {
                        column[within] = value;
                    }
                }
            } else {
                for (index, column) in tile.chunks_exact_mut(height).enumerate() {
                    let source = &matrix.data[base + index * matrix.column_stride..];
                    for (within, value) in column.iter_mut().enumerate() {
                        *value = source[within * matrix.row_stride];
                    }
                }
            }
            tiles = rest;
            row += height;
        }
    }
}

dispatch! {
    /// `out += left · right`, where `out` is row-major and its rows lie `stride` apart.
    ///
    /// Each element adds its terms to itself one by one, first to last.
    pub(super) fn accumulate / accumulate_portable / accumulate_avx2 =
        accumulate_any<packet::Baseline | packet::Avx2>(
            out: &mut [f32], stride: usize, left: Matrix<'_>, right: &Panels, scratch: &mut Interleaved
        );
}

#[inline(always)]
fn accumulate_any<P: Packet>(
    out: &mut [f32],
    stride: usize,
    left: Matrix<'_>,
    right: &Panels,
    scratch: &mut Interleaved,
) {
    debug_assert_eq!(left.columns, right.depth);
    for start in (0..right.depth).step_by(DEPTH) {
        let depth = DEPTH.min(right.depth - start);
        for first in (0..left.rows).step_by(BLOCK) {
            let rows = BLOCK.min(left.rows - first);
            scratch.pack(left, first, rows, start, depth);
            let panels = right.width.div_ceil(PANEL);
            // A right factor that stays in the first-level cache lets the destination be walked along its rows.
            let along_rows = panels * depth <= DEPTH;
            let (mut panel, mut row) = (0, 0);
            while panel < panels && row < rows {
                let terms = &right.data[panel * right.depth + start..][..depth];
                let column = panel * PANEL;
                let columns = PANEL.min(right.width - column);
                let height = TILE.min(rows - row);
                let tile = &scratch.0[row * depth..][..height * depth];
                let out = &mut out[(first + row) * stride + column..];
                match height {
                    6 => accumulate_tile::<P, 6>(out, stride, columns, tile, terms),
                    5 => accumulate_tile::<P, 5>(out, stride, columns, tile, terms),
                    4 => accumulate_tile::<P, 4>(out, stride, columns, tile, terms),
                    3 => accumulate_tile::<P, 3>(out, stride, columns, tile, terms),
                    2 => accumulate_tile::<P, 2>(out, stride, columns, tile, terms),
                    _ => accumulate_tile::<P, 1>(out, stride, columns, tile, terms),
                }
                if along_rows {
                    panel += 1;
                    if panel == panels {
                        (panel, row) = (0, row + TILE);
                    }
                } else {
                    row += TILE;
                    if row >= rows {
                        (panel, row) = (panel + 1, 0);
                    }
                }
            }
        }
    }
}

#[inline(always)]
fn accumulate_tile<P: Packet, const ROWS: usize>(
    out: &mut [f32],
    stride: usize,
    columns: usize,
    tile: &[f32],
    terms: &[[f32; PANEL]],
) {
    let mut sums = [[P::splat(0.0); 2]; ROWS];
    for (row, sum) in sums.iter_mut().enumerate() {
        let source = &out[row * stride..][..columns];
        if let Ok(whole) = <&[f32; PANEL]>::try_from(source) {
            *sum = halves(whole);
        } else {
            let mut padded = [0.0; PANEL];
            padded[..columns].copy_from_slice(source);
            *sum = halves(&padded);
        }
    }
    let (tile, _) = tile.as_chunks::<ROWS>();
    for (left, right) in tile.iter().zip(terms) {
        let [first, second] = halves::<P>(right);
        for row in 0..ROWS {
            let factor = P::splat(left[row]);
            sums[row][0] = sums[row][0].plus(factor.times(first));
            sums[row][1] = sums[row][1].plus(factor.times(second));
        }
    }
    for (row, sum) in sums.iter().enumerate() {
        let target = &mut out[row * stride..][..columns];
        if let Ok(whole) = <&mut [f32; PANEL]>::try_from(&mut *target) {
            let (packets, _) = whole.as_chunks_mut::<LANES>();
            (packets[0], packets[1]) = (sum[0].lanes(), sum[1].lanes());
        } else {
            for (value, sum) in target.iter_mut().zip(sum.iter().flat_map(|packet| packet.lanes())) {
                *value = sum;
            }
        }
    }
}

/// The two packets of one row of a panel.
#[inline(always)]
fn halves<P: Packet>(row: &[f32; PANEL]) -> [P; 2] {
    let (packets, _) = row.as_chunks::<LANES>();
    [P::load(&packets[0]), P::load(&packets[1])]
}

dispatch! {
    /// The same bits as `accumulate` for row-major matrices, without packing: for few rows of `left`.
    pub(super) fn accumulate_few / accumulate_few_portable / accumulate_few_avx2 =
        accumulate_few_any<packet::Baseline | packet::Avx2>(
            out: &mut [f32], left: &[f32], right: &[f32], depth: usize, columns: usize
        );
}

#[inline(always)]
fn accumulate_few_any<P: Packet>(out: &mut [f32], left: &[f32], right: &[f32], depth: usize, columns: usize) {
    if depth == 0 || columns == 0 {
        return;
    }
    for (out, left) in out.chunks_exact_mut(columns).zip(left.chunks_exact(depth)) {
        let (fours, rest) = left.as_chunks::<4>();
        let blocks = right.chunks_exact(4 * columns);
        let last = &right[fours.len() * 4 * columns..];
        for ([a, b, c, d], rows) in fours.iter().zip(blocks) {
            let (first, rows) = rows.split_at(columns);
            let (second, rows) = rows.split_at(columns);
            let (third, fourth) = rows.split_at(columns);
            for ((((sum, w), x), y), z) in out.iter_mut().zip(first).zip(second).zip(third).zip(fourth) {
                *sum = (((*sum + a * w) + b * x) + c * y) + d * z;
            }
        }
        for (factor, row) in rest.iter().zip(last.chunks_exact(columns)) {
            for (sum, value) in out.iter_mut().zip(row) {
                *sum += factor * value;
            }
        }
    }
}

dispatch! {
    /// `out += left · rightᵀ` for two matrices with contiguous rows of `depth` elements, `rows` and `columns` many.
    ///
    /// Each element is an inner product in eight interleaved sums, joined pairwise every 512 terms.
    pub(super) fn accumulate_inner / accumulate_inner_portable / accumulate_inner_avx2 =
        accumulate_inner_any<packet::Baseline | packet::Avx2>(
            out: &mut [f32], left: &[f32], right: &[f32], rows: usize, columns: usize, depth: usize
        );
}

#[inline(always)]
fn accumulate_inner_any<P: Packet>(
    out: &mut [f32],
    left: &[f32],
    right: &[f32],
    rows: usize,
    columns: usize,
    depth: usize,
) {
    for start in (0..depth).step_by(STRETCH) {
        let length = STRETCH.min(depth - start);
        let mut row = 0;
        while row < rows {
            let height = 4.min(rows - row);
            let out = &mut out[row * columns..];
            let left = &left[row * depth + start..];
            let right = &right[start..];
            match height {
                4 => inner_strip::<P, 4, 2>(out, left, right, columns, depth, length),
                3 => inner_strip::<P, 3, 2>(out, left, right, columns, depth, length),
                2 => inner_strip::<P, 2, 4>(out, left, right, columns, depth, length),
                _ => inner_strip::<P, 1, 4>(out, left, right, columns, depth, length),
            }
            row += height;
        }
    }
}

#[inline(always)]
fn inner_strip<P: Packet, const ROWS: usize, const COLUMNS: usize>(
    out: &mut [f32],
    left: &[f32],
    right: &[f32],
    columns: usize,
    depth: usize,
    length: usize,
) {
    let mut column = 0;
    while column + COLUMNS <= columns {
        inner_tile::<P, ROWS, COLUMNS>(
            &mut out[column..],
            left,
            &right[column * depth..],
            columns,
            depth,
            length,
        );
        column += COLUMNS;
    }
    while column < columns {
        inner_tile::<P, ROWS, 1>(&mut out[column..], left, &right[column * depth..], columns, depth, length);
        column += 1;
    }
}

#[inline(always)]
fn inner_tile<P: Packet, const ROWS: usize, const COLUMNS: usize>(
    out: &mut [f32],
    left: &[f32],
    right: &[f32],
    stride: usize,
    depth: usize,
    length: usize,
) {
    let packets = length / LANES;
    let left: [&[f32]; ROWS] = std::array::from_fn(|row| &left[row * depth..][..length]);
    let right: [&[f32]; COLUMNS] = std::array::from_fn(|column| &right[column * depth..][..length]);
    let left_packets: [&[[f32; LANES]]; ROWS] =
        std::array::from_fn(|row| &left[row].as_chunks::<LANES>().0[..packets]);
    let right_packets: [&[[f32; LANES]]; COLUMNS] =
        std::array::from_fn(|column| &right[column].as_chunks::<LANES>().0[..packets]);
    let mut sums = [[P::splat(0.0); COLUMNS]; ROWS];
    for packet in 0..packets {
        for row in 0..ROWS {
            let factor = P::load(&left_packets[row][packet]);
            for column in 0..COLUMNS {
                let other = P::load(&right_packets[column][packet]);
                sums[row][column] = sums[row][column].plus(factor.times(other));
            }
        }
    }
    for row in 0..ROWS {
        for column in 0..COLUMNS {
            let mut sum = sums[row][column].lanes();
            for (lane, index) in (packets * LANES..length).enumerate() {
                sum[lane] += left[row][index] * right[column][index];
            }
            out[row * stride + column] += joined(&sum);
        }
    }
}

dispatch! {
    /// `out += Σ_row rows`, row after row, for contiguous rows as long as `out`.
    pub(super) fn accumulate_rows / accumulate_rows_portable / accumulate_rows_avx2 =
        accumulate_rows_any<packet::Baseline | packet::Avx2>(
            out: &mut [f32], rows: &[f32]
        );
}

#[inline(always)]
fn accumulate_rows_any<P: Packet>(out: &mut [f32], rows: &[f32]) {
    for row in rows.chunks_exact(out.len().max(1)) {
        for (sum, value) in out.iter_mut().zip(row) {
            *sum += value;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::initial::Uniform;

    fn matrix(seed: u64, length: usize) -> Vec<f32> {
        let mut values = vec![0.0; length];
        Uniform::new(seed).fill(&mut values, 1.0);
        values
    }

    const SIZES: [(usize, usize, usize); 9] = [
        (1, 1, 1),
        (4, 3, 7),
        (6, 16, 64),
        (7, 17, 9),
        (13, 40, 32),
        (100, 33, 258),
        (2, 5, 1030),
        (5, 8, 0),
        (0, 3, 2),
    ];

    #[test]
    fn products_add_terms_first_to_last() {
        for (rows, columns, depth) in SIZES {
            let (left, right) = (matrix(1, rows * depth), matrix(2, depth * columns));
            let start = matrix(3, rows * columns);
            let mut expected = start.clone();
            for row in 0..rows {
                for column in 0..columns {
                    for term in 0..depth {
                        expected[row * columns + column] +=
                            left[row * depth + term] * right[term * columns + column];
                    }
                }
            }
            let mut panels = Panels::default();
            panels.pack(&right, depth, columns);
            let mut out = start.clone();
            accumulate(
                &mut out,
                columns,
                Matrix::new(&left, rows, depth, depth),
                &panels,
                &mut Interleaved::default(),
            );
            assert_eq!(out, expected, "{rows} {columns} {depth}");
            let mut out = start.clone();
            accumulate_few(&mut out, &left, &right, depth, columns);
            assert_eq!(out, expected, "unpacked {rows} {columns} {depth}");

            let mut flipped = vec![0.0; left.len()];
            for row in 0..rows {
                for term in 0..depth {
                    flipped[term * rows + row] = left[row * depth + term];
                }
            }
            let mut out = start.clone();
            let left = Matrix::new(&flipped, depth, rows, rows).transposed();
            accumulate(&mut out, columns, left, &panels, &mut Interleaved::default());
            assert_eq!(out, expected, "transposed {rows} {columns} {depth}");
        }
    }

    #[test]
    fn inner_products_match_double_precision() {
        for (rows, columns, depth) in SIZES {
            let (left, right) = (matrix(4, rows * depth), matrix(5, columns * depth));
            let mut out = vec![0.0; rows * columns];
            accumulate_inner(&mut out, &left, &right, rows, columns, depth);
            for row in 0..rows {
                for column in 0..columns {
                    let exact: f64 = (0..depth)
                        .map(|term| {
                            f64::from(left[row * depth + term]) * f64::from(right[column * depth + term])
                        })
                        .sum();
                    let error = (f64::from(out[row * columns + column]) - exact).abs();
                    assert!(
                        error <= 1e-6 * (1.0 + depth as f64).sqrt(),
                        "{rows} {columns} {depth}: {error:e}"
                    );
                }
            }
        }
    }

    #[test]
    fn inner_products_ignore_the_rows_beside_them() {
        let (rows, columns, depth) = (7, 5, 1030);
        let (left, right) = (matrix(6, rows * depth), matrix(7, columns * depth));
        let mut together = vec![0.0; rows * columns];
        accumulate_inner(&mut together, &left, &right, rows, columns, depth);
        for row in 0..rows {
            for column in 0..columns {
                let mut alone = [0.0];
                let (left, right) = (&left[row * depth..][..depth], &right[column * depth..][..depth]);
                accumulate_inner(&mut alone, left, right, 1, 1, depth);
                assert_eq!(alone[0].to_bits(), together[row * columns + column].to_bits());
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn avx2_and_baseline_agree_bit_by_bit() {
        if !std::arch::is_x86_feature_detected!("avx2") {
            return;
        }
        for (rows, columns, depth) in SIZES {
            let (left, right) = (matrix(8, rows * depth), matrix(9, columns * depth));
            let mut panels = Panels::default();
            panels.pack(&right, depth, columns);
            let view = Matrix::new(&left, rows, depth, depth);
            let (mut one, mut other) = (matrix(10, rows * columns), matrix(10, rows * columns));
            let mut scratch = Interleaved::default();
            accumulate_portable(&mut one, columns, view, &panels, &mut scratch);
            // SAFETY: the feature was detected above.
            unsafe { accumulate_avx2(&mut other, columns, view, &panels, &mut scratch) };
            assert_eq!(one, other);
            accumulate_inner_portable(&mut one, &left, &right, rows, columns, depth);
            // SAFETY: the feature was detected above.
            unsafe { accumulate_inner_avx2(&mut other, &left, &right, rows, columns, depth) };
            assert_eq!(one, other);
            accumulate_few_portable(&mut one, &left, &right, depth, columns);
            // SAFETY: the feature was detected above.
            unsafe { accumulate_few_avx2(&mut other, &left, &right, depth, columns) };
            assert_eq!(one, other);
            let mut sums = (matrix(11, columns), matrix(11, columns));
            accumulate_rows_portable(&mut sums.0, &one);
            // SAFETY: the feature was detected above.
            unsafe { accumulate_rows_avx2(&mut sums.1, &one) };
            assert_eq!(sums.0, sums.1);
        }
    }
}
