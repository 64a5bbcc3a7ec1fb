//! What one unit can change when it takes part several times, from the columns of the encoder.
//!
//! Contributions are vectors of norm at most one, of any directions, so over a pattern `π` of steps the squared change is
//! at most `Σ_{i,j∈π} |X_ij|`, `X = CᵀC`, and that is attained where signs `s` make all `s_i s_j X_ij` non-negative. Nothing
//! else is assumed of `C`. Computed columns `Ĉe_j` come with bounds `e_j` on their distances from the exact ones, so
//!
//! ```text
//! |X_ij| ≤ |fl(Ĉe_i · Ĉe_j)| + (m + 4)ε a_i a_j + a_i e_j + e_i a_j + e_i e_j,     a_j ≥ ‖Ĉe_j‖.
//! ```
//!
//! Reference: \[CMRT23\] for sensitivities over participation patterns.

mod sampled;

pub(crate) use sampled::{allocation, hidden, reshuffled, under};

use crate::error::{Error, Result};
use crate::form::blt::LONG;
use crate::form::{EncoderColumns, Products, Representation};
use crate::participation::{Participation, Sensitivity};
use faer::linalg::matmul::matmul;
use faer::{Accum, Mat, MatRef, Par};
use rayon::prelude::*;
use std::ops::Range;

impl Participation {
    /// The sensitivity `γ` of a form's encoder.
    ///
    /// With `X = CᵀC` it is the root of the largest `Σ_{i,j} |X_ij|` over the steps `i, j` of one unit: contributions are
    /// vectors of any directions. For [`Participation::MinSeparation`] a bound on that, which is attained where `X` vanishes
    /// from the separation on, and by Toeplitz encoders whose coefficients do not increase.
    ///
    /// Guarantee: `‖C(G − H)‖_F ≤ γζ` for all neighbouring streams whose rows differ by at most `ζ`, for any coefficients;
    /// infinite where rounding hides it.
    /// Cost: that of [`Representation::encoder_column_norms_sq`] for one participation; for `K` epochs `n` columns of
    /// [`Representation::encoder_columns`] and `K n²` multiply-adds; for a separation `n²/16` columns at most and `n³/6`
    /// multiply-adds.
    /// Errors: those of [`Participation::pattern`].
    pub fn sensitivity(self, form: &dyn Representation) -> Result<Sensitivity> {
        let pattern = self.pattern(form.steps())?;
        Ok(match (self, pattern.separation) {
            (Participation::Epochs { .. }, Some(separation)) => epochs(form, separation),
            (Participation::MinSeparation { .. }, Some(separation)) => {
                min_separation(form, separation, pattern.times)
            }
            _ => {
                // What is no number is larger than any.
                let larger = |a: f64, b: f64| if b.is_nan() { f64::INFINITY } else { a.max(b) };
                let largest = form.encoder_column_norms_sq().into_iter().fold(0.0, larger);
                // The square root may round down by half a unit in the last place.
                Sensitivity { gamma: largest.sqrt().next_up(), exact: true }
            }
        })
    }

    /// The sensitivity of the first `1, 2, …, n` rows of a form's encoder: what has been spent after each step. For
    /// [`Participation::MinSeparation`] a bound on it, by the norms of columns.
    ///
    /// Guarantee: non-decreasing; the last is not above [`Participation::sensitivity`] but for rounding.
    /// Cost: O(n²), times the number of epochs.
    /// Errors: those of [`Participation::sensitivity`]; [`Error::Unsupported`] for a form whose rows of noise are not its
    /// steps.
    pub fn sensitivities(self, form: &dyn Representation) -> Result<Vec<f64>> {
        let pattern = self.pattern(form.steps())?;
        if form.noise_rows() != form.steps() {
            return Err(Error::Unsupported {
                what: "the sensitivity of the first steps of a tree".into(),
                hint: "the rows of its encoder are nodes, not steps; take the sensitivity of all",
            });
        }
        let encoder = form.encoder();
        let mut spent: Vec<f64> = match (self, pattern.separation) {
            (Participation::Epochs { .. }, Some(separation)) => {
                epochs_by_row(encoder.as_ref(), separation).into_iter().map(f64::sqrt).collect()
            }
            (_, separation) => separated_by_row(encoder.as_ref(), separation.unwrap_or(form.steps())),
        };
        // Blocks of X need not grow entry by entry; what was spent once stays spent.
        let total = if pattern.times > 1 { self.sensitivity(form)?.gamma } else { f64::INFINITY };
        let mut most = 0.0_f64;
        for gamma in &mut spent {
            most = most.max(*gamma);
            *gamma = most.min(total);
        }
        Ok(spent)
    }
}

/// Numbers in the columns that are looked at together, where there is a choice.
const TILE: usize = 1 << 22;

/// Share by which attained and largest may differ where a bound is called exact.
const ROUNDING: f64 = 1e-9;

/// The columns of a form, and how to bound inner products of the exact ones.
struct Encoder<'a> {
    columns: Box<dyn EncoderColumns + 'a>,
    norms_sq: Vec<f64>,
    rows: usize,
}

/// Some columns side by side.
struct Tile {
    steps: Vec<usize>,
    columns: Vec<f64>,
    /// The first row in which one of them is not zero.
    first: usize,
    norms: Vec<f64>,
    distances: Vec<f64>,
}

/// A bound on `Σ|X_ij|` over a pattern, and what streams with the best signs that are easily found attain, about.
#[derive(Clone, Copy)]
struct Sum {
    bound: f64,
    attained: f64,
}

impl<'a> Encoder<'a> {
    fn new(form: &'a dyn Representation) -> Self {
        Self {
            columns: form.encoder_columns(),
            norms_sq: form.encoder_column_norms_sq(),
            rows: form.noise_rows(),
        }
    }

    /// Columns that fit in a tile.
    fn width(&self) -> usize {
        (TILE / self.rows).clamp(16, 256)
    }

    fn tile(&self, steps: Vec<usize>) -> Tile {
        let mut columns = vec![0.0; self.rows * steps.len()];
        let distances = self.columns.write(&steps, &mut columns);
        let room = 1.0 + (self.rows + 8) as f64 * f64::EPSILON;
        let (mut first, mut norms) = (self.rows, Vec::with_capacity(steps.len()));
        for column in columns.chunks_exact(self.rows) {
            first = first.min(column.iter().position(|x| *x != 0.0).unwrap_or(self.rows));
            norms.push(column.iter().map(|x| x * x).sum::<f64>().sqrt() * room);
        }
        Tile { steps, columns, first, norms, distances }
    }

    /// Computed inner products of the columns `range` of two tiles.
    fn products(&self, a: (&Tile, Range<usize>), b: (&Tile, Range<usize>)) -> Mat<f64> {
        let first = a.0.first.max(b.0.first);
        let mut products = Mat::zeros(a.1.len(), b.1.len());
        let [left, right] = [a, b].map(|(tile, range)| {
            let columns = &tile.columns[range.start * self.rows..range.end * self.rows];
            MatRef::from_column_major_slice(columns, self.rows, range.len()).subrows(first, self.rows - first)
        });
        matmul(products.as_mut(), Accum::Replace, left.transpose(), right, 1.0, Par::Seq);
        products
    }

    /// A bound on `|X_ij|` for columns of two tiles, given their computed inner product.
    fn bound(&self, (a, i): (&Tile, usize), (b, j): (&Tile, usize), product: f64) -> f64 {
        let steps = (a.steps[i], b.steps[j]);
        self.raised(steps, product, (a.norms[i], a.distances[i]), (b.norms[j], b.distances[j]))
    }

    /// The same for two steps, given norms and distances of their columns.
    #[inline(always)]
    fn raised(
        &self,
        (i, j): (usize, usize),
        product: f64,
        (ai, ei): (f64, f64),
        (aj, ej): (f64, f64),
    ) -> f64 {
        let rounding = (self.rows + 4) as f64 * f64::EPSILON * ai * aj;
        let bound = (product.abs() + rounding + ai * ej + ei * aj + ei * ej) * (1.0 + 8.0 * f64::EPSILON);
        let bound = if bound.is_nan() { f64::INFINITY } else { bound };
        if i == j { bound.min(self.norms_sq[i]) } else { bound }
    }

    /// Tells bounds on `|X_ij|`, and about `X_ij` itself, for rows `i` from the last to the first and `j = i, i + stride, …`.
    /// Whether the form knows its inner products.
    fn by_rows(&self, n: usize, stride: usize, mut tell: impl FnMut(usize, &[f64], &[f64])) -> bool {
        let Some(Products { norms, distances, mut rows }) = self.columns.products() else { return false };
        let (mut row, mut bounds, mut values) = (vec![0.0; n], Vec::new(), Vec::new());
        for i in (0..n).rev() {
            rows(&mut row[..n - i]);
            let of = |j: usize| (norms[j], distances[j]);
            let own = of(i);
            bounds.clear();
            bounds.extend((i..n).step_by(stride).map(|j| self.raised((i, j), row[j - i], own, of(j))));
            values.clear();
            values.extend(row[..n - i].iter().step_by(stride));
            tell(i, &bounds, &values);
        }
        true
    }

    /// The largest sum over patterns, each of which `pattern(p)` lists.
    ///
    /// Cost: that of one column for every step of every pattern, and `K² n` multiply-adds a pattern of `K` steps.
    fn largest(&self, count: usize, pattern: impl Fn(usize) -> Vec<usize> + Sync) -> Sum {
        let longest = (0..count).map(|p| pattern(p).len()).max().unwrap_or(0);
        let together = (self.width() / longest.max(1)).max(1);
        let groups = (0..count.div_ceil(together)).into_par_iter().map(|group| {
            let patterns: Vec<Vec<usize>> =
                (group * together..((group + 1) * together).min(count)).map(&pattern).collect();
            if longest > self.width() {
                return self.long(&patterns[0]);
            }
            let tile = self.tile(patterns.concat());
            let mut start = 0;
            let sums = patterns.iter().map(|steps| {
                let range = start..start + steps.len();
                start = range.end;
                self.short(&tile, range)
            });
            sums.fold(Sum::ZERO, Sum::larger)
        });
        groups.reduce(|| Sum::ZERO, Sum::larger)
    }

    /// The sum over one pattern that is some columns of a tile.
    fn short(&self, tile: &Tile, range: Range<usize>) -> Sum {
        let products = self.products((tile, range.clone()), (tile, range.clone()));
        let mut total = Sum::ZERO;
        for j in 0..range.len() {
            for i in 0..range.len() {
                let x = products[(i, j)];
                total.bound += self.bound((tile, range.start + i), (tile, range.start + j), x);
                total.attained += sign(products[(0, i)]) * sign(products[(0, j)]) * x;
            }
        }
        total.raised(range.len())
    }

    /// The sum over one pattern that does not fit in a tile.
    fn long(&self, steps: &[usize]) -> Sum {
        let mut total = Sum::ZERO;
        let parts: Vec<&[usize]> = steps.chunks(self.width()).collect();
        let mut signs = Vec::with_capacity(steps.len());
        for (k, part) in parts.iter().enumerate() {
            let tile = self.tile(part.to_vec());
            for (l, other) in parts.iter().enumerate().skip(k) {
                let loaded = (l > k).then(|| self.tile(other.to_vec()));
                let other = loaded.as_ref().unwrap_or(&tile);
                let products = self.products((&tile, 0..part.len()), (other, 0..other.steps.len()));
                if k == 0 {
                    signs.extend((0..other.steps.len()).map(|j| sign(products[(0, j)])));
                }
                let twice = if l > k { 2.0 } else { 1.0 };
                for j in 0..other.steps.len() {
                    for i in 0..part.len() {
                        let x = products[(i, j)];
                        total.bound += twice * self.bound((&tile, i), (other, j), x);
                        total.attained +=
                            twice * signs[k * self.width() + i] * signs[l * self.width() + j] * x;
                    }
                }
            }
        }
        total.raised(steps.len())
    }
}

impl Sum {
    const ZERO: Self = Self { bound: 0.0, attained: 0.0 };

    fn larger(self, other: Self) -> Self {
        // What is no number is larger than any.
        let number = |x: f64| if x.is_nan() { f64::INFINITY } else { x };
        let bound = number(self.bound).max(number(other.bound));
        Sum { bound, attained: self.attained.max(other.attained) }
    }

    /// Not rounded down, after the sum of squarely many terms.
    fn raised(self, steps: usize) -> Self {
        let room = 1.0 + (steps * steps + 8) as f64 * f64::EPSILON;
        let bound = if self.bound.is_nan() { f64::INFINITY } else { self.bound * room };
        Self { bound, ..self }
    }

    fn sensitivity(self) -> Sensitivity {
        // The square root may round down by half a unit in the last place.
        let exact = self.bound.is_finite() && self.attained >= self.bound * (1.0 - ROUNDING);
        Sensitivity { gamma: self.bound.sqrt().next_up(), exact }
    }
}

/// The sensitivity for users of phase `p` in `0..separation`, who take part at `p, p + separation, …`.
///
/// Guarantee: not below the exact one. Cost: `n` columns of `C`, and `K n²` multiply-adds; or the inner products, where the form
/// knows them.
pub(crate) fn epochs(form: &dyn Representation, separation: usize) -> Sensitivity {
    // No entry is negative: what a unit changes is the sum of its columns.
    if form.steps() > LONG
        && form.encoder_is_nonnegative()
        && let Some(filter) = form.as_exponentials()
    {
        let larger = |a: f64, b: f64| if b.is_nan() { f64::INFINITY } else { a.max(b) };
        let largest = filter.folded_squares(separation).into_iter().fold(0.0, larger);
        return Sensitivity { gamma: (largest * (1.0 + filter.rounding())).sqrt().next_up(), exact: true };
    }
    let (n, encoder) = (form.steps(), Encoder::new(form));
    let mut sums = vec![Sum::ZERO; separation.min(n)];
    let add = |i: usize, bounds: &[f64], values: &[f64]| {
        let sum = &mut sums[i % separation];
        sum.bound += bounds[0] + 2.0 * bounds[1..].iter().sum::<f64>();
        sum.attained += values[0] + 2.0 * values[1..].iter().sum::<f64>();
    };
    if encoder.by_rows(n, separation, add) {
        let largest = sums.into_iter().fold(Sum::ZERO, Sum::larger);
        return largest.raised(n.div_ceil(separation)).sensitivity();
    }
    encoder.largest(separation.min(n), |p| (p..n).step_by(separation).collect()).sensitivity()
}

/// The sensitivity for users who take part at most `times` times, at least `separation` steps apart.
///
/// With `μ_{i,l} = max_{j ≥ i + lB} |X_ij|`, the participation that comes `l` after that of step `i` adds at most `2μ_{i,l}`, so
/// the largest of `Σ_i (X_ii + 2 Σ_{l ≤ left} μ_{i,l})` over chains, `left` participations still to come, is a bound. It is
/// attained where `X` vanishes from distance `B` on, and by Toeplitz encoders whose coefficients do not increase.
///
/// Guarantee: not below the exact one. Cost: `n²/width` columns of `C` with a width of 16 to 256, `n³/6` multiply-adds,
/// memory for `n + width` columns; or the inner products, where the form knows them.
pub(crate) fn min_separation(form: &dyn Representation, separation: usize, times: usize) -> Sensitivity {
    let (n, encoder) = (form.steps(), Encoder::new(form));
    let mut chains = Chains::new(n, separation, times);
    let mut evenly = vec![0.0_f64; separation.min(n)];
    let known = encoder.by_rows(n, 1, |i, bounds, values| {
        let mut largest = vec![0.0_f64; times];
        largest[0] = bounds[0];
        for (l, part) in bounds.chunks(separation).enumerate().skip(1) {
            let entry = &mut largest[l.min(times - 1)];
            *entry = part.iter().copied().fold(*entry, f64::max);
        }
        chains.push(i, &largest);
        let phase = i % separation;
        let members = values.iter().step_by(separation).take(times.saturating_sub(i / separation));
        evenly[phase] += 2.0 * members.clone().sum::<f64>() - members.take(1).sum::<f64>();
    });
    let attained = if known {
        evenly.into_iter().fold(0.0, f64::max)
    } else {
        chains.push_all(&encoder);
        let pattern = |p: usize| (p..n).step_by(separation).take(times).collect();
        encoder.largest(separation.min(n), pattern).attained
    };
    Sum { bound: chains.longest(), attained }.raised(times).sensitivity()
}

/// The dynamic programme of [`min_separation`], over steps from the last to the first.
struct Chains {
    n: usize,
    separation: usize,
    times: usize,
    /// The largest sum of a chain that starts at step `i` or later, in row `i` modulo their number, by how many more
    /// participations it has.
    best: Vec<f64>,
}

impl Chains {
    fn new(n: usize, separation: usize, times: usize) -> Self {
        Self { n, separation, times, best: vec![0.0; (separation + 1) * times] }
    }

    /// Step `i`, given `X_ii` and, for `l` from 1 on, the largest `|X_ij|` for `j − i` from `lB` to below `(l + 1)B`, the last
    /// open.
    fn push(&mut self, i: usize, largest: &[f64]) {
        let Self { n, separation, times, ref mut best } = *self;
        let window = separation + 1;
        let mut reach = largest.to_vec();
        for l in (1..times - 1).rev() {
            reach[l] = reach[l].max(reach[l + 1]);
        }
        let (mut sum, mut chain) = (0.0, vec![0.0; times]);
        for left in 0..times {
            sum += if left == 0 { reach[0] } else { 2.0 * reach[left] };
            let behind = if left > 0 && i + separation < n {
                best[(i + separation) % window * times + left - 1]
            } else {
                0.0
            };
            let later = if i + 1 < n { best[(i + 1) % window * times + left] } else { 0.0 };
            chain[left] = (sum + behind).max(later);
        }
        best[i % window * times..][..times].copy_from_slice(&chain);
    }

    /// All steps, from the columns of the encoder, tile by tile.
    fn push_all(&mut self, encoder: &Encoder<'_>) {
        let (n, separation, times, width) = (self.n, self.separation, self.times, encoder.width());
        let tiles: Vec<Range<usize>> =
            (0..n).step_by(width).map(|start| start..(start + width).min(n)).collect();
        for (k, rows) in tiles.iter().enumerate().rev() {
            let tile = encoder.tile(rows.clone().collect());
            let parts = tiles[k..].par_iter().map(|columns| {
                let loaded = (columns != rows).then(|| encoder.tile(columns.clone().collect()));
                let other = loaded.as_ref().unwrap_or(&tile);
                let products = encoder.products((&tile, 0..rows.len()), (other, 0..columns.len()));
                let mut largest = vec![0.0_f64; rows.len() * times];
                for (b, j) in columns.clone().enumerate() {
                    for (a, i) in rows.clone().enumerate().take_while(|(_, i)| *i <= j) {
                        let l = ((j - i) / separation).min(times - 1);
                        if i == j || l > 0 {
                            let entry = &mut largest[a * times + l];
                            *entry = entry.max(encoder.bound((&tile, a), (other, b), products[(a, b)]));
                        }
                    }
                }
                largest
            });
            let largest = parts.reduce(
                || vec![0.0; rows.len() * times],
                |mut a, b| {
                    a.iter_mut().zip(b).for_each(|(a, b)| *a = a.max(b));
                    a
                },
            );
            for (i, entries) in rows.clone().zip(largest.chunks_exact(times)).rev() {
                self.push(i, entries);
            }
        }
    }

    /// The largest sum of all.
    fn longest(&self) -> f64 {
        self.best[self.times - 1]
    }
}

/// After each row, the largest `Σ|X_ij|` over the patterns of [`epochs`], `X` that of the rows so far.
///
/// Cost: O(n²K).
pub(crate) fn epochs_by_row(encoder: MatRef<'_, f64>, separation: usize) -> Vec<f64> {
    let n = encoder.ncols();
    let patterns: Vec<Vec<usize>> = (0..separation).map(|p| (p..n).step_by(separation).collect()).collect();
    let sums: Vec<Vec<f64>> = patterns
        .par_iter()
        .map(|steps| {
            let k = steps.len();
            let mut x = vec![0.0_f64; k * k];
            let rows = (0..encoder.nrows()).map(|i| {
                for (a, &s) in steps.iter().enumerate().take_while(|(_, s)| **s <= i) {
                    for (b, &t) in steps.iter().enumerate().take(a + 1) {
                        x[a * k + b] += encoder[(i, s)] * encoder[(i, t)] * if a == b { 1.0 } else { 2.0 };
                    }
                }
                x.iter().map(|x| x.abs()).sum()
            });
            rows.collect()
        })
        .collect();
    (0..encoder.nrows()).map(|i| sums.iter().map(|sums| sums[i]).fold(0.0, f64::max)).collect()
}

/// After each row, the largest sum of column norms over steps at least `separation` apart: a bound on what they change
/// together, by the triangle inequality, however many they are.
///
/// Cost: O(n²).
pub(crate) fn separated_by_row(encoder: MatRef<'_, f64>, separation: usize) -> Vec<f64> {
    let n = encoder.ncols();
    let mut norms_sq = vec![0.0_f64; n];
    let mut best = vec![0.0_f64; n + 1];
    let rows = (0..encoder.nrows()).map(|i| {
        norms_sq.iter_mut().enumerate().for_each(|(j, norm)| *norm += encoder[(i, j)].powi(2));
        for j in (0..n).rev() {
            best[j] = best[j + 1].max(norms_sq[j].sqrt() + best[(j + separation).min(n)]);
        }
        best[0]
    });
    rows.collect()
}

fn sign(x: f64) -> f64 {
    if x < 0.0 { -1.0 } else { 1.0 }
}

#[cfg(test)]
mod tests;
