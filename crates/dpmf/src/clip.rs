//! Clipping: how a contribution becomes whole numbers of bounded norm, everywhere in the same way.
//!
//! A contribution `g` in `d` coordinates, clipped to `ζ`, becomes the integers
//!
//! ```text
//! k_j = round(s · g_j / u),    s = min(1, ζ' / ‖g‖),    ζ' = ζ(1 − 2⁻³³√d − 2⁻⁵³d − 2⁻⁴⁸)
//! ```
//!
//! in units `u` of a power of two, `2⁻³³ζ < u ≤ 2⁻³²ζ`, with `s` and the products in double precision and ties rounded to
//! even. A contribution whose norm is not finite becomes zero. Sums are of integers: they are the same in any order, on any
//! number of threads, ranks and devices.
//!
//! Guarantee: `u‖k‖ ≤ ζ` as real numbers. The norm, a sum of `d` squares in any order, is off by at most `(d + 2)·2⁻⁵³` of
//! itself, quotient and product by less than 2⁻⁵⁰, and rounding moves `g` by at most `½u√d ≤ 2⁻³³√d·ζ`. So one contribution moves
//! a sum by at most `ζ`, exactly.
//!
//! Other implementations (PyTorch on any device, NumPy) compute the same numbers, but for the order of the sum of squares, which
//! may move an integer by one. One that has no double precision (JAX) keeps the guarantee with another `ζ'`. All of them run the
//! vectors of `golden/clip.json`.

use crate::engine::Value;
use crate::error::{Error, Result};
use rayon::prelude::*;

/// Contributions whose sum a double holds without error: 2²⁰ of at most 2³³ units each.
pub const MOST_CONTRIBUTIONS: usize = 1 << 20;

/// Share of the clip that may be given up for the errors of a sum that was taken elsewhere.
pub const MOST_CHARGED: f64 = 0.25;

/// Coordinates that are summed at once: their sums stay in the first cache.
const BLOCK: usize = 1024;

/// Below so many numbers, threads take longer to start than to finish.
const ALONE: usize = 1 << 16;

/// Adding it to a number of magnitude below 2⁵¹ leaves the nearest integer, ties to even, in the low bits.
const TO_WHOLE: f64 = 1.5 * (1_u64 << 52) as f64;

/// Bounds contributions to a norm, as integers.
///
/// ```
/// use dpmf::Clip;
///
/// let clip = Clip::new(1.0, 2)?;
/// let mut sum = [0; 2];
/// clip.add(&[3.0_f32, 4.0], &mut sum);
/// assert!((sum[0] as f64 * clip.unit() - 0.6).abs() < 1e-9 && (sum[1] as f64 * clip.unit() - 0.8).abs() < 1e-9);
/// # Ok::<(), dpmf::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Clip {
    norm: f64,
    unit: f64,
    target: f64,
}

impl Clip {
    /// Clipping to `norm` in so many coordinates.
    ///
    /// Errors: a norm outside `[1e-20, 1e20]`, no coordinates or more than 2⁵⁰.
    pub fn new(norm: f64, dimension: u64) -> Result<Self> {
        if !(1e-20..=1e20).contains(&norm) {
            return Err(Error::argument("clip", norm, "it must lie between 1e-20 and 1e20"));
        }
        if !(1..=1 << 50).contains(&dimension) {
            return Err(Error::argument("dimension", dimension, "it must lie between 1 and 2⁵⁰"));
        }
        let mut unit = 2.0_f64.powi(norm.log2().floor() as i32 - 32);
        // The logarithm may have been rounded across a power of two.
        while unit * 2.0_f64.powi(33) <= norm {
            unit *= 2.0;
        }
        while unit * 2.0_f64.powi(32) > norm {
            unit *= 0.5;
        }
        let d = dimension as f64;
        let slack = 2.0_f64.powi(-33) * d.sqrt() + 2.0_f64.powi(-53) * d + 2.0_f64.powi(-48);
        Ok(Self { norm, unit, target: norm * (1.0 - slack) })
    }

    /// The norm `ζ`.
    pub fn norm(&self) -> f64 {
        self.norm
    }

    /// What one stands for in a sum, a power of two.
    pub fn unit(&self) -> f64 {
        self.unit
    }

    /// The norm `ζ'` that longer contributions are scaled to, a hair below `ζ`.
    pub fn target(&self) -> f64 {
        self.target
    }

    /// Adds one contribution; `true` if it was longer than [`Clip::target`] or not finite.
    ///
    /// # Panics
    /// For slices of different lengths.
    pub fn add<V: Value>(&self, contribution: &[V], sum: &mut [i64]) -> bool {
        assert_eq!(contribution.len(), sum.len(), "one entry for each coordinate");
        let norm = norm_sq(contribution).sqrt();
        let scale = self.scale(norm, self.target);
        if scale != 0.0 {
            add_scaled(contribution, scale, sum);
        }
        norm.is_nan() || norm > self.target
    }

    /// Adds contributions to the parts of a sum, on all threads; tells which were longer than the target or not finite.
    ///
    /// A part of `rows` has the share of `count` contributions in it, one after the other, as long as the part of `sums`. `share` is
    /// the part of the target that they are scaled to, where several groups of parts are clipped each by itself: the root of the sum
    /// of the squares of the shares must be at most 1.
    ///
    /// Cost: all of `rows` is read twice, and nothing of its size is written.
    /// Errors: parts that do not match; a share outside `(0, 1]`.
    pub fn add_rows<V: Value>(
        &self,
        rows: &[&[V]],
        count: usize,
        sums: &mut [&mut [i64]],
        share: f64,
    ) -> Result<Vec<bool>> {
        if rows.len() != sums.len() {
            return Err(Error::WrongLength {
                name: "parts of the sum",
                actual: sums.len(),
                expected: rows.len(),
            });
        }
        for (row, sum) in rows.iter().zip(sums.iter()) {
            if row.len() != count * sum.len() {
                return Err(Error::WrongLength {
                    name: "contributions to a part",
                    actual: row.len(),
                    expected: count * sum.len(),
                });
            }
        }
        if !(share > 0.0 && share <= 1.0) {
            return Err(Error::argument("share", share, "it must lie in (0, 1]"));
        }
        let target = share * self.target;
        let alone = rows.iter().map(|row| row.len()).sum::<usize>() < ALONE;
        let norm = |index: usize| rows.iter().map(|row| norm_sq(part(row, index, count))).sum::<f64>().sqrt();
        let norms: Vec<f64> = match alone {
            true => (0..count).map(norm).collect(),
            false => (0..count).into_par_iter().map(norm).collect(),
        };
        let scales: Vec<f64> = norms.iter().map(|norm| self.scale(*norm, target)).collect();
        for (row, sum) in rows.iter().zip(sums.iter_mut()) {
            let width = sum.len();
            let add = |(block, sum): (usize, &mut [i64])| {
                for (index, scale) in scales.iter().enumerate().filter(|(_, scale)| **scale != 0.0) {
                    let start = index * width + block * BLOCK;
                    add_scaled(&row[start..start + sum.len()], *scale, sum);
                }
            };
            match alone {
                true => sum.chunks_mut(BLOCK).enumerate().for_each(add),
                false => sum.par_chunks_mut(BLOCK).enumerate().for_each(add),
            }
        }
        Ok(norms.iter().map(|norm| norm.is_nan() || *norm > target).collect())
    }

    /// Units for each unit of a contribution of a norm; zero for what is not finite, and for nothing else.
    fn scale(&self, norm: f64, target: f64) -> f64 {
        match norm.is_finite() {
            true => (if norm > target { target / norm } else { 1.0 }) / self.unit,
            false => 0.0,
        }
    }
}

/// Share `x` of the clip by which to scale down a sum that was taken elsewhere, before it is put on the grid, so that one
/// contribution moves what comes out by at most `ζ`. `unit` is the largest relative error of one operation: 2⁻⁵³ in double
/// precision, 2⁻²⁴ in single.
///
/// Adding `n` contributions in any order goes through sums of at most 2, 3, …, n of them, or shorter ones. Each is off by at most
/// `unit` times its norm: `(n² + n − 2)/2 · unit · ζ` together, and `nζ` times `unit` more for one conversion of the result. Two
/// neighbours move apart by twice that, `y = (n² + 3n)·unit` of `ζ`, and by `z` for the product with `1 − x` and for the grid. With
/// `x = y + z` that is `(1 − x)(1 + y) + z ≤ 1 − xy`, and `xy` covers the errors of errors.
pub fn charge(contributions: usize, dimension: u64, unit: f64) -> f64 {
    let n = contributions as f64;
    (n * n + 3.0 * n) * unit + 2.0_f64.powi(-51) * n + 2.0_f64.powi(-32) * (dimension as f64).sqrt()
}

/// One contribution to one part.
fn part<V>(row: &[V], index: usize, count: usize) -> &[V] {
    let width = row.len() / count.max(1);
    &row[index * width..(index + 1) * width]
}

/// Adds the integers nearest to `scale · values`.
#[inline(always)]
fn add_scaled<V: Value>(values: &[V], scale: f64, sum: &mut [i64]) {
    for (sum, &value) in sum.iter_mut().zip(values) {
        let whole = (value.into() * scale + TO_WHOLE).to_bits() as i64 - TO_WHOLE.to_bits() as i64;
        *sum = sum.wrapping_add(whole);
    }
}

/// The sum of squares in eight sums side by side: the order is fixed, and the lanes of the processor are used.
fn norm_sq<V: Value>(values: &[V]) -> f64 {
    let square = |value: V| {
        let value: f64 = value.into();
        value * value
    };
    let (chunks, rest) = values.as_chunks::<8>();
    let mut lanes = [0.0_f64; 8];
    for chunk in chunks {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane += square(value);
        }
    }
    lanes.iter().sum::<f64>() + rest.iter().map(|value| square(*value)).sum::<f64>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Whether integers have a norm of at most `ζ`, without rounding: `Σk² ≤ (ζ/u)²`, `ζ/u` a double below 2³³.
    fn within(clip: &Clip, whole: &[i64]) -> bool {
        let norm_sq: u128 = whole.iter().map(|k| u128::from(k.unsigned_abs()).pow(2)).sum();
        // ζ/u has 53 bits, 33 of them before the point: times 2²⁰ it is an integer.
        let limit = (clip.norm() / clip.unit() * f64::from(1 << 20)) as u128;
        norm_sq << 40 <= limit * limit
    }

    /// Numbers of any size with a seed.
    fn numbers(seed: u64, count: usize, size: f64) -> Vec<f32> {
        let mut state = seed | 1;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f64 / f64::from(1 << 23) - 1.0
        };
        (0..count).map(|_| (size * next() * 2.0_f64.powf(8.0 * next())) as f32).collect()
    }

    proptest! {
        #[test]
        fn norms_stay_within_the_clip(
            norm in 1e-6..1e6_f64,
            size in 1e-6..1e6_f64,
            dimension in 1_usize..200,
            seed in any::<u64>(),
        ) {
            let clip = Clip::new(norm, dimension as u64).unwrap();
            let values = numbers(seed, dimension, norm * size);
            let mut single = vec![0; dimension];
            let longer = clip.add(&values, &mut single);
            prop_assert!(within(&clip, &single));
            let length = values.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
            prop_assert_eq!(longer, length > clip.target());
            // Nothing is lost but what the clip takes: direction and length to a part in 2³².
            let scale = (clip.norm() / length).min(1.0);
            for (k, x) in single.iter().zip(&values) {
                prop_assert!((*k as f64 * clip.unit() - f64::from(*x) * scale).abs() < 2.0_f64.powi(-29) * norm);
            }
            let doubles: Vec<f64> = values.iter().map(|x| f64::from(*x)).collect();
            let mut double = vec![0; dimension];
            clip.add(&doubles, &mut double);
            prop_assert_eq!(single, double);
        }

        #[test]
        fn rows_in_parts_are_contributions_one_by_one(
            count in 0_usize..9,
            widths in prop::collection::vec(0_usize..3000, 1..4),
            seed in any::<u64>(),
        ) {
            let dimension = widths.iter().sum::<usize>().max(1);
            let clip = Clip::new(0.7, dimension as u64).unwrap();
            let parts: Vec<Vec<f32>> = (seed..).zip(&widths).map(|(seed, w)| numbers(seed, w * count, 0.01)).collect();
            let mut sums: Vec<Vec<i64>> = widths.iter().map(|width| vec![5; *width]).collect();
            let longer = clip
                .add_rows(
                    &parts.iter().map(Vec::as_slice).collect::<Vec<_>>(),
                    count,
                    &mut sums.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>(),
                    1.0,
                )
                .unwrap();
            prop_assert_eq!(longer.len(), count);
            // Norms by part are added in another order, which may move an integer by one.
            let mut expected = vec![5_i64; widths.iter().sum()];
            for index in 0..count {
                let whole: Vec<f32> = parts.iter().flat_map(|row| part(row, index, count)).copied().collect();
                clip.add(&whole, &mut expected);
            }
            let joined: Vec<i64> = sums.concat();
            for (a, b) in joined.iter().zip(&expected) {
                prop_assert!((a - b).unsigned_abs() <= count as u64);
            }
        }
    }

    #[test]
    fn what_is_not_finite_contributes_nothing() {
        let clip = Clip::new(1.0, 3).unwrap();
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut sum = [1, 2, 3];
            assert!(clip.add(&[1.0, bad, 2.0], &mut sum));
            assert_eq!(sum, [1, 2, 3]);
        }
        let mut sum = [0; 3];
        assert!(clip.add(&[f64::MAX, 1.0, 2.0], &mut sum));
        assert_eq!(sum, [0; 3]);
        assert!(clip.add(&[f32::MAX, -f32::MAX, 1.0], &mut sum));
        assert!(within(&clip, &sum) && sum[0] > 0 && sum[0] == -sum[1]);
    }

    #[test]
    fn units_are_powers_of_two_between_two_bounds() {
        for norm in [1e-20, 0.3, 0.5, 1.0 - 1e-16, 1.0, 1.0 + 1e-15, 2.0, 3.0, 1e20] {
            let clip = Clip::new(norm, 10).unwrap();
            let ratio = norm / clip.unit();
            assert!((2.0_f64.powi(32)..2.0_f64.powi(33)).contains(&ratio), "{norm}: {ratio}");
            assert_eq!(clip.unit().log2().fract(), 0.0);
            assert!(clip.target() < norm && clip.target() > norm * (1.0 - 1e-8));
        }
    }

    #[test]
    fn shares_are_clipped_each_by_itself() {
        let clip = Clip::new(1.0, 2).unwrap();
        let (mut a, mut b) = ([0; 1], [0; 1]);
        let share = 0.5_f64.sqrt();
        assert_eq!(clip.add_rows(&[&[9.0_f32]], 1, &mut [&mut a], share).unwrap(), [true]);
        assert_eq!(clip.add_rows(&[&[-9.0_f32]], 1, &mut [&mut b], share).unwrap(), [true]);
        assert!(within(&clip, &[a[0], b[0]]));
        assert!((a[0] as f64 * clip.unit() - share).abs() < 1e-9);
    }

    #[test]
    fn bad_arguments_are_refused() {
        for norm in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e-30] {
            assert_eq!(Clip::new(norm, 1).unwrap_err().kind(), "invalid-argument");
        }
        assert_eq!(Clip::new(1.0, 0).unwrap_err().kind(), "invalid-argument");
        let clip = Clip::new(1.0, 2).unwrap();
        let mut sum = [0; 2];
        for (row, parts, share) in
            [(&[0.0_f32; 3][..], 1, 1.0), (&[0.0; 4], 2, 1.0), (&[0.0; 4], 1, 0.0), (&[0.0; 4], 1, 1.5)]
        {
            let rows = vec![row; parts];
            assert!(clip.add_rows(&rows, 2, &mut [&mut sum], share).is_err());
        }
    }
}
