//! Double-double arithmetic: numbers of 106 bits, as unevaluated sums of two.

use super::lanes::Lanes;
use std::ops::{Add, Mul, Neg, Sub};

/// `M` numbers `hi + lo` with `|lo|` at most half a unit in the last place of `hi`.
///
/// Guarantee: unless something under- or overflows, every operation has a relative error of at most
/// [`Double::UNIT`], also where a sum cancels.
///
/// Reference: Joldes, Muller and Popescu, "Tight and rigorous error bounds for basic building blocks of double-word
/// arithmetic", ACM Trans. Math. Softw. 44 (2017): 3u² for sums, 5u² for products, u = 2⁻⁵³.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Double<const M: usize> {
    hi: Lanes<M>,
    lo: Lanes<M>,
}

impl<const M: usize> Double<M> {
    /// Relative error of any operation: 16u².
    pub const UNIT: f64 = 16.0 * (f64::EPSILON / 2.0) * (f64::EPSILON / 2.0);

    pub const ZERO: Self = Self { hi: Lanes::ZERO, lo: Lanes::ZERO };

    #[inline(always)]
    pub fn new(hi: Lanes<M>) -> Self {
        Self { hi, lo: Lanes::ZERO }
    }

    /// The nearest f64.
    #[inline(always)]
    pub fn hi(self) -> Lanes<M> {
        self.hi
    }

    /// What [`Double::hi`] leaves.
    #[inline(always)]
    pub fn lo(self) -> Lanes<M> {
        self.lo
    }

    /// The product with powers of two: exact.
    #[inline(always)]
    pub fn scaled(self, power: Lanes<M>) -> Self {
        Self { hi: self.hi * power, lo: self.lo * power }
    }

    /// The same with lane `l` multiplied by a power of two.
    #[inline(always)]
    pub fn scaled_lane(mut self, l: usize, power: f64) -> Self {
        self.hi.0[l] *= power;
        self.lo.0[l] *= power;
        self
    }

    /// `1/x`: the rounded reciprocal and one step of Newton's method. With `|1 − q·hi| ≤ u` and `|q·lo| ≤ u`, the
    /// residual is below 2u + u² and known to 4u², and its square, which Newton leaves, is below 5u².
    #[inline(always)]
    pub fn reciprocal(self) -> Self {
        let q = self.hi.reciprocal();
        let residual = (Lanes::ZERO - q).fused(self.hi, Lanes::splat(1.0)) - q * self.lo;
        let (hi, lo) = fast_two_sum(q, q * residual);
        Self { hi, lo }
    }

    /// The same with the lanes in `keep`, and zero elsewhere.
    #[inline(always)]
    pub fn keep(self, keep: [bool; M]) -> Self {
        Self { hi: self.hi.keep(keep), lo: self.lo.keep(keep) }
    }
}

impl Double<1> {
    pub const ONE: Self = Self { hi: Lanes([1.0]), lo: Lanes::ZERO };

    #[inline(always)]
    pub fn scalar(x: f64) -> Self {
        Self::new(Lanes([x]))
    }

    /// `x` in every lane.
    #[inline(always)]
    pub fn splat<const M: usize>(self) -> Double<M> {
        Double { hi: Lanes::splat(self.hi.0[0]), lo: Lanes::splat(self.lo.0[0]) }
    }

    /// `x` as an f64, to nearest.
    #[inline(always)]
    pub fn to_f64(self) -> f64 {
        self.hi.0[0]
    }
}

/// The sum and its rounding error, exactly.
#[inline(always)]
fn two_sum<const M: usize>(a: Lanes<M>, b: Lanes<M>) -> (Lanes<M>, Lanes<M>) {
    let sum = a + b;
    let b_part = sum - a;
    let a_part = sum - b_part;
    (sum, (a - a_part) + (b - b_part))
}

/// The same where `|a| ≥ |b|`, or `a` is zero and so is `b`.
#[inline(always)]
fn fast_two_sum<const M: usize>(a: Lanes<M>, b: Lanes<M>) -> (Lanes<M>, Lanes<M>) {
    let sum = a + b;
    (sum, b - (sum - a))
}

impl<const M: usize> Add for Double<M> {
    type Output = Self;

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        let (s, e) = two_sum(self.hi, other.hi);
        let (t, f) = two_sum(self.lo, other.lo);
        let (s, e) = fast_two_sum(s, e + t);
        let (hi, lo) = fast_two_sum(s, e + f);
        Self { hi, lo }
    }
}

impl<const M: usize> Neg for Double<M> {
    type Output = Self;

    #[inline(always)]
    fn neg(self) -> Self {
        Self { hi: Lanes::ZERO - self.hi, lo: Lanes::ZERO - self.lo }
    }
}

impl<const M: usize> Sub for Double<M> {
    type Output = Self;

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        self + -other
    }
}

impl<const M: usize> Mul for Double<M> {
    type Output = Self;

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        let product = self.hi * other.hi;
        let error = self.hi.fused(other.hi, Lanes::ZERO - product);
        let cross = self.hi.fused(other.lo, self.lo * other.lo);
        let cross = self.lo.fused(other.hi, cross);
        let (hi, lo) = fast_two_sum(product, error + cross);
        Self { hi, lo }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn double(hi: i64, lo: i64) -> (Double<1>, i128) {
        // hi·2⁶² + lo, exactly: hi has at most 40 bits, lo at most 60.
        let exact = (i128::from(hi) << 62) + i128::from(lo);
        let x = Double::scalar(hi as f64 * 2f64.powi(62))
            + Double::scalar(lo as f64)
            + Double::scalar((lo - (lo as f64) as i64) as f64);
        (x, exact)
    }

    fn to_i128(x: Double<1>) -> i128 {
        x.hi.0[0] as i128 + x.lo.0[0] as i128
    }

    proptest! {
        /// Integers of a hundred bits show every digit.
        #[test]
        fn sums_and_products_keep_a_hundred_bits(
            a in -(1_i64 << 40)..1 << 40, b in -(1_i64 << 60)..1 << 60,
            c in -(1_i64 << 40)..1 << 40, d in -(1_i64 << 60)..1 << 60,
            p in -(1_i64 << 55)..1 << 55, q in -(1_i64 << 55)..1 << 55,
        ) {
            let ((x, exact_x), (y, exact_y)) = (double(a, b), double(c, d));
            let (sum, difference) = (exact_x + exact_y, exact_x - exact_y);
            let within = |x: Double<1>, exact: i128| {
                (to_i128(x) - exact).unsigned_abs() as f64 <= Double::<1>::UNIT * exact.unsigned_abs() as f64
            };
            prop_assert!(within(x + y, sum) && within(x - y, difference));
            let small = |x: i64| Double::scalar(x as f64) + Double::scalar((x - (x as f64) as i64) as f64);
            prop_assert!(within(small(p) * small(q), i128::from(p) * i128::from(q)));
        }

        #[test]
        fn reciprocals_multiply_to_one(a in 1_i64..1 << 40, b in -(1_i64 << 60)..1 << 60) {
            let (x, _) = double(a, b);
            let error = x * x.reciprocal() - Double::ONE;
            prop_assert!(error.to_f64().abs() <= 2.0 * Double::<1>::UNIT);
        }
    }

    #[test]
    fn what_cancels_in_f64_is_kept() {
        let x = Double::scalar(1.0) + Double::scalar(1e-25);
        assert_eq!((x - Double::ONE).to_f64(), 1e-25);
        assert_eq!((x - Double::ONE).lo().0, [0.0]);
    }
}
