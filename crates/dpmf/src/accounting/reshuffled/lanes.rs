//! Sums of a chain for eight samples side by side: a number of each sample in every row.

use crate::simd::dispatch;

/// Samples side by side.
pub(super) const LANES: usize = 8;

/// A number of each sample.
pub(super) type Lanes = [f64; LANES];

/// Rows of sums that are in registers together.
const ROWS: usize = 4;

dispatch! {
    /// `y_s = Σ_{i < width} c_{s, i} z_{s + i}`, with the coefficients of one row after those of another.
    pub(super) fn project / project_portable / project_avx2 =
        project_any(columns: &[f64], width: usize, white: &[Lanes], out: &mut [Lanes]);
}

dispatch! {
    /// Multiplies row `q` of `now` by `1 + Σ_{i ≥ q} x_{q, i} y_i`, `x` a square matrix as large as there are rows `y`.
    pub(super) fn couple / couple_portable / couple_avx2 =
        couple_any(matrix: &[f64], last: &[Lanes], now: &mut [Lanes]);
}

dispatch! {
    /// Multiplies numbers one by one.
    pub(super) fn multiply / multiply_portable / multiply_avx2 = multiply_any(numbers: &mut [f64], by: &[f64]);
}

dispatch! {
    /// The sum of all rows.
    pub(super) fn total / total_portable / total_avx2 = total_any(rows: &[Lanes]) -> Lanes;
}

dispatch! {
    /// Multiplies every row by another.
    pub(super) fn scale / scale_portable / scale_avx2 = scale_any(rows: &mut [Lanes], by: &Lanes);
}

#[inline(always)]
fn project_any(columns: &[f64], width: usize, white: &[Lanes], out: &mut [Lanes]) {
    for (block, out) in out.chunks_mut(ROWS).enumerate() {
        let start = block * ROWS;
        let columns = &columns[start * width..][..out.len() * width];
        let white = &white[start..][..out.len() + width - 1];
        let mut sums = [[0.0; LANES]; ROWS];
        if out.len() == ROWS && width >= ROWS {
            // First what only some rows see, then what all of them do, then what the last ones do.
            for i in 0..ROWS - 1 {
                for j in 0..=i {
                    add(&mut sums[j], columns[j * width + i - j], &white[i]);
                }
            }
            let shared = width - (ROWS - 1);
            let of: [&[f64]; ROWS] = std::array::from_fn(|j| &columns[j * width + ROWS - 1 - j..][..shared]);
            for (i, z) in white[ROWS - 1..][..shared].iter().enumerate() {
                for j in 0..ROWS {
                    add(&mut sums[j], of[j][i], z);
                }
            }
            for i in width..width + ROWS - 1 {
                for j in i + 1 - width..ROWS {
                    add(&mut sums[j], columns[j * width + i - j], &white[i]);
                }
            }
        } else {
            for (j, sum) in sums[..out.len()].iter_mut().enumerate() {
                columns[j * width..][..width].iter().zip(&white[j..]).for_each(|(c, z)| add(sum, *c, z));
            }
        }
        out.copy_from_slice(&sums[..out.len()]);
    }
}

#[inline(always)]
fn couple_any(matrix: &[f64], last: &[Lanes], now: &mut [Lanes]) {
    let reach = last.len();
    for (block, now) in now[..reach].chunks_mut(ROWS).enumerate() {
        let (start, rows) = (block * ROWS, now.len());
        let mut sums = [[1.0; LANES]; ROWS];
        for j in 0..rows {
            for i in start + j..start + rows {
                add(&mut sums[j], matrix[(start + j) * reach + i], &last[i]);
            }
        }
        // A block that is not whole is the last, and has seen everything.
        if rows == ROWS {
            let rest = &last[start + ROWS..];
            let of: [&[f64]; ROWS] =
                std::array::from_fn(|j| &matrix[(start + j) * reach + start + ROWS..][..rest.len()]);
            for (i, y) in rest.iter().enumerate() {
                for j in 0..ROWS {
                    add(&mut sums[j], of[j][i], y);
                }
            }
        }
        for (now, sum) in now.iter_mut().zip(&sums) {
            now.iter_mut().zip(sum).for_each(|(now, sum)| *now *= sum);
        }
    }
}

#[inline(always)]
fn add(sum: &mut Lanes, factor: f64, row: &Lanes) {
    for (sum, x) in sum.iter_mut().zip(row) {
        *sum += factor * x;
    }
}

#[inline(always)]
fn multiply_any(numbers: &mut [f64], by: &[f64]) {
    numbers.iter_mut().zip(by).for_each(|(x, by)| *x *= by);
}

#[inline(always)]
fn total_any(rows: &[Lanes]) -> Lanes {
    let mut total = [0.0; LANES];
    rows.iter().for_each(|row| add(&mut total, 1.0, row));
    total
}

#[inline(always)]
fn scale_any(rows: &mut [Lanes], by: &Lanes) {
    for row in rows {
        row.iter_mut().zip(by).for_each(|(x, by)| *x *= by);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers without a pattern.
    fn numbers(count: usize, seed: f64) -> Vec<f64> {
        (0..count).map(|k| ((k as f64 + seed) * 12.9898).sin()).collect()
    }

    fn rows(count: usize, seed: f64) -> Vec<Lanes> {
        numbers(count * LANES, seed).chunks_exact(LANES).map(|row| row.try_into().unwrap()).collect()
    }

    #[test]
    fn blocks_are_sums_of_products() {
        for (size, width) in [(1, 1), (3, 2), (4, 4), (9, 3), (10, 5), (13, 13), (24, 7)] {
            let (columns, white) = (numbers(size * width, 0.5), rows(size + width, 3.0));
            let mut out = vec![[0.0; LANES]; size];
            project(&columns, width, &white, &mut out);
            for (s, row) in out.iter().enumerate() {
                for (lane, y) in row.iter().enumerate() {
                    let sum: f64 = (0..width).map(|i| columns[s * width + i] * white[s + i][lane]).sum();
                    assert!((y - sum).abs() < 1e-13, "{size} {width} {s}: {y} {sum}");
                }
            }
        }
        for reach in [0, 1, 3, 4, 5, 8, 11] {
            let (matrix, last, before) =
                (numbers(reach * reach, 0.1), rows(reach, 2.0), rows(reach + 2, 7.0));
            let mut now = before.clone();
            couple(&matrix, &last, &mut now);
            for (q, row) in now.iter().enumerate() {
                for (lane, x) in row.iter().enumerate() {
                    let met: f64 = (q..reach).map(|i| matrix[q * reach + i] * last[i][lane]).sum();
                    let expected = before[q][lane] * if q < reach { 1.0 + met } else { 1.0 };
                    assert!((x - expected).abs() < 1e-13, "{reach} {q}: {x} {expected}");
                }
            }
        }
    }

    #[test]
    fn the_baseline_has_the_same_bits() {
        let (columns, white) = (numbers(18 * 7, 0.5), rows(25, 3.0));
        let mut out = [vec![[0.0; LANES]; 18], vec![[0.0; LANES]; 18]];
        project(&columns, 7, &white, &mut out[0]);
        project_portable(&columns, 7, &white, &mut out[1]);
        assert_eq!(out[0], out[1]);
        couple(&columns[..36], &white[..6], &mut out[0]);
        couple_portable(&columns[..36], &white[..6], &mut out[1]);
        assert_eq!(out[0], out[1]);
        assert_eq!(total(&out[0]), total_portable(&out[1]));
    }
}
