//! Enclosures: pairs `lo ≤ x ≤ hi` that every operation rounds outwards.
//!
//! A privacy guarantee may be reported too large but never too small, so each formula is evaluated on
//! intervals and the public functions return the end that is safe to report. IEEE arithmetic rounds to
//! nearest, so one step of `next_down` / `next_up` encloses a sum, product, quotient or square root. The
//! elementary functions come from `libm`, whose error is below one unit in the last place and, being pure
//! Rust, the same on every platform; they are widened by [`MARGIN`] units.

use std::ops::{Add, Div, Mul, Neg, Sub};

/// Units in the last place by which an elementary function is widened; `libm` documents less than 1.
const MARGIN: usize = 4;

/// A real number known to lie between `lo` and `hi`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Interval {
    pub lo: f64,
    pub hi: f64,
}

/// Encloses a correctly rounded result.
fn rounded(lo: f64, hi: f64) -> Interval {
    Interval { lo: lo.next_down(), hi: hi.next_up() }
}

/// Encloses the image of `[lo, hi]` under an increasing elementary function.
fn increasing(x: Interval, f: impl Fn(f64) -> f64) -> Interval {
    let (mut lo, mut hi) = (f(x.lo), f(x.hi));
    for _ in 0..MARGIN {
        (lo, hi) = (lo.next_down(), hi.next_up());
    }
    Interval { lo, hi }
}

impl Interval {
    /// A number known exactly.
    pub fn exact(x: f64) -> Self {
        Self { lo: x, hi: x }
    }

    /// ln √(2π), to the nearest number and one unit either way.
    pub fn ln_sqrt_2pi() -> Self {
        let x = 0.918_938_533_204_672_8;
        rounded(x, x)
    }

    /// √(π/2), to the nearest number and one unit either way.
    pub fn sqrt_half_pi() -> Self {
        let x = 1.253_314_137_315_500_3;
        rounded(x, x)
    }

    /// `x²`, which is never negative even if `x` straddles zero.
    pub fn square(self) -> Self {
        let (small, large) = (self.lo.abs().min(self.hi.abs()), self.lo.abs().max(self.hi.abs()));
        let small = if self.lo <= 0.0 && self.hi >= 0.0 { 0.0 } else { small };
        let square = rounded(small * small, large * large);
        Self { lo: square.lo.max(0.0), ..square }
    }

    /// `√x` for `x ≥ 0`.
    pub fn sqrt(self) -> Self {
        let root = rounded(self.lo.max(0.0).sqrt(), self.hi.sqrt());
        Self { lo: root.lo.max(0.0), ..root }
    }

    /// `eˣ`.
    pub fn exp(self) -> Self {
        let e = increasing(self, libm::exp);
        Self { lo: e.lo.max(0.0), ..e }
    }

    /// `ln x`; minus infinity at and below zero, where only an enclosure can have strayed.
    pub fn ln(self) -> Self {
        increasing(self, |x| if x > 0.0 { libm::log(x) } else { f64::NEG_INFINITY })
    }

    /// `ln(1 + x)`, minus infinity at and below −1.
    pub fn ln_1p(self) -> Self {
        increasing(self, |x| if x > -1.0 { libm::log1p(x) } else { f64::NEG_INFINITY })
    }

    /// The image under a decreasing function that encloses its own value at a point.
    pub fn decreasing(self, f: impl Fn(f64) -> Interval) -> Self {
        if self.lo == self.hi { f(self.lo) } else { Self { lo: f(self.hi).lo, hi: f(self.lo).hi } }
    }

    /// The part at or above zero, for a quantity known not to be negative.
    pub fn non_negative(self) -> Self {
        Self { lo: self.lo.max(0.0), hi: self.hi.max(0.0) }
    }
}

impl From<f64> for Interval {
    fn from(x: f64) -> Self {
        Self::exact(x)
    }
}

impl Neg for Interval {
    type Output = Self;
    fn neg(self) -> Self {
        Self { lo: -self.hi, hi: -self.lo }
    }
}

impl<T: Into<Interval>> Add<T> for Interval {
    type Output = Self;
    fn add(self, right: T) -> Self {
        let right = right.into();
        rounded(self.lo + right.lo, self.hi + right.hi)
    }
}

impl<T: Into<Interval>> Sub<T> for Interval {
    type Output = Self;
    fn sub(self, right: T) -> Self {
        let right = right.into();
        rounded(self.lo - right.hi, self.hi - right.lo)
    }
}

impl<T: Into<Interval>> Mul<T> for Interval {
    type Output = Self;
    fn mul(self, right: T) -> Self {
        let right = right.into();
        // 0·∞ is 0 here: an infinite end only says that the number is finite and unbounded.
        let product = |a: f64, b: f64| if a == 0.0 || b == 0.0 { 0.0 } else { a * b };
        if self.lo >= 0.0 && right.lo >= 0.0 {
            return Self {
                lo: product(self.lo, right.lo).next_down().max(0.0),
                hi: product(self.hi, right.hi).next_up(),
            };
        }
        let ends = [
            product(self.lo, right.lo),
            product(self.lo, right.hi),
            product(self.hi, right.lo),
            product(self.hi, right.hi),
        ];
        rounded(
            ends.into_iter().fold(f64::INFINITY, f64::min),
            ends.into_iter().fold(-f64::INFINITY, f64::max),
        )
    }
}

impl<T: Into<Interval>> Div<T> for Interval {
    type Output = Self;
    /// The divisor must be positive.
    fn div(self, right: T) -> Self {
        let right = right.into();
        debug_assert!(right.lo >= 0.0, "division by {right:?}");
        let quotient = |a: f64, b: f64| if a == 0.0 { 0.0 } else { a / b };
        let lo = if self.lo >= 0.0 {
            quotient(self.lo, right.hi).next_down().max(0.0)
        } else {
            quotient(self.lo, right.lo).next_down()
        };
        let hi = if self.hi >= 0.0 {
            quotient(self.hi, right.lo).next_up()
        } else {
            quotient(self.hi, right.hi).next_up()
        };
        Self { lo, hi }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Exact product or sum of two doubles as an unevaluated pair, to test enclosures beyond f64.
    fn two_sum(a: f64, b: f64) -> (f64, f64) {
        let s = a + b;
        let bb = s - a;
        (s, (a - (s - bb)) + (b - bb))
    }

    fn encloses(x: Interval, value: f64, error: f64) -> bool {
        // value + error, with |error| below half a unit of value.
        let above = x.lo < value || (x.lo == value && error >= 0.0);
        let below = value < x.hi || (value == x.hi && error <= 0.0);
        above && below
    }

    proptest! {
        #[test]
        fn arithmetic_encloses_the_exact_result(a in -1e6..1e6_f64, b in -1e6..1e6_f64, c in 1e-6..1e6_f64) {
            let (x, y) = (Interval::exact(a), Interval::exact(b));
            let (s, e) = two_sum(a, b);
            prop_assert!(encloses(x + y, s, e));
            let p = a * b;
            prop_assert!(encloses(x * y, p, a.mul_add(b, -p)));
            let q = a / c;
            // a − q·c has the sign of the error of q.
            prop_assert!(encloses(x / c, q, (-q).mul_add(c, a)));
            let r = c.sqrt();
            prop_assert!(encloses(Interval::exact(c).sqrt(), r, (-r).mul_add(r, c)));
            prop_assert!((x - y).lo < (a - b) && (x - y).hi > (a - b));
            prop_assert!(x.square().lo >= 0.0 && x.square().hi >= a * a);
        }

        #[test]
        fn wide_intervals_contain_every_point_image(
            a in -20.0..20.0_f64, wa in 0.0..5.0_f64, b in -20.0..20.0_f64, wb in 0.0..5.0_f64,
            s in 0.0..=1.0_f64, t in 0.0..=1.0_f64,
        ) {
            let (x, y) = (Interval { lo: a, hi: a + wa }, Interval { lo: b, hi: b + wb });
            let (p, q) = ((a + s * wa).clamp(x.lo, x.hi), (b + t * wb).clamp(y.lo, y.hi));
            let inside = |i: Interval, v: f64| i.lo <= v && v <= i.hi;
            prop_assert!(inside(x + y, p + q) && inside(x - y, p - q) && inside(x * y, p * q));
            prop_assert!(inside(x.square(), p * p) && inside(x.exp(), p.exp()) && inside(-x, -p));
            let positive = y.square() + 0.5;
            prop_assert!(inside(x / positive, p / (q * q + 0.5)));
            prop_assert!(inside(positive.ln(), (q * q + 0.5).ln()));
            prop_assert!(inside(positive.sqrt(), (q * q + 0.5).sqrt()));
            prop_assert!(inside(y.square().ln_1p(), (q * q).ln_1p()));
        }
    }

    #[test]
    fn constants_enclose_their_values() {
        // mpmath, 40 digits: ln √(2π) = 0.918938533204672741780329…, √(π/2) = 1.253314137315500251207882….
        let x = Interval::ln_sqrt_2pi();
        assert!(x.lo < 0.918_938_533_204_672_8 && x.hi > 0.918_938_533_204_672_8 && x.hi - x.lo < 3e-16);
        let x = Interval::sqrt_half_pi();
        assert!(x.lo < 1.253_314_137_315_500_3 && x.hi > 1.253_314_137_315_500_3 && x.hi - x.lo < 5e-16);
    }

    #[test]
    fn ends_never_become_nan() {
        let infinite = Interval { lo: f64::MAX, hi: f64::INFINITY };
        for x in [
            infinite * 0.0,
            infinite.square(),
            Interval::exact(1.0) / infinite,
            (-infinite).exp(),
            infinite.ln(),
        ] {
            assert!(!x.lo.is_nan() && !x.hi.is_nan() && x.lo <= x.hi, "{x:?}");
        }
    }
}
