//! Numbers with as many binary digits as it takes, each with a bound on its error.
//!
//! A [`Fixed`] has one 64-bit limb before the binary point and `L − 1` behind it. A [`Ball`] is such a number and a
//! radius within which the true one lies. Every operation rounds towards zero and widens the radius by what that may
//! have cost, so whatever is computed here is an inclusion; where a number leaves the range, its radius is infinite and
//! nothing is claimed.

use std::cmp::Ordering;

/// A binary fixed-point number, sign and magnitude; limbs from the lowest on, the last one before the point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fixed<const L: usize> {
    negative: bool,
    limbs: [u64; L],
}

/// A number within `radius` of `middle`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ball<const L: usize> {
    pub(crate) middle: Fixed<L>,
    pub(crate) radius: f64,
}

/// Rounds a radius up past a handful of roundings to nearest, and off zero.
fn up(radius: f64) -> f64 {
    radius * (1.0 + 8.0 * f64::EPSILON) + f64::MIN_POSITIVE
}

impl<const L: usize> Fixed<L> {
    pub(crate) const ZERO: Self = Self { negative: false, limbs: [0; L] };

    /// Binary digits behind the point.
    pub(crate) const DIGITS: usize = 64 * (L - 1);

    /// `2^−DIGITS`, or a little more where that is below the range of f64.
    fn ulp() -> f64 {
        2.0_f64.powi(-(Self::DIGITS.min(1000) as i32))
    }

    /// A number between 0 and 2⁶⁴ by its limbs.
    pub(crate) fn from_limbs(limbs: [u64; L]) -> Self {
        Self { negative: false, limbs }
    }

    pub(crate) fn whole(value: u64) -> Self {
        let mut limbs = [0; L];
        limbs[L - 1] = value;
        Self::from_limbs(limbs)
    }

    fn is_zero(&self) -> bool {
        self.limbs == [0; L]
    }

    /// The magnitude, rounded up.
    fn size(&self) -> f64 {
        let mut size = 0.0;
        for limb in self.limbs {
            size = size * 2.0_f64.powi(-64) + limb as f64;
        }
        up(size)
    }

    /// The nearest f64, but for a few units in the last place.
    pub(crate) fn approximate(&self) -> f64 {
        let size = self.limbs.iter().fold(0.0, |size, &limb| size * 2.0_f64.powi(-64) + limb as f64);
        if self.negative { -size } else { size }
    }

    fn compare_size(&self, other: &Self) -> Ordering {
        self.limbs.iter().rev().cmp(other.limbs.iter().rev())
    }

    /// The sum, and whether it left the range.
    fn add(&self, other: &Self) -> (Self, bool) {
        let mut sum = *self;
        if self.negative == other.negative {
            let mut carry = false;
            for (a, b) in sum.limbs.iter_mut().zip(other.limbs) {
                (*a, carry) = carrying_add(*a, b, carry);
            }
            return (sum, carry);
        }
        let (large, small) =
            if self.compare_size(other) == Ordering::Less { (other, self) } else { (self, other) };
        sum = *large;
        let mut borrow = false;
        for (a, b) in sum.limbs.iter_mut().zip(small.limbs) {
            (*a, borrow) = borrowing_sub(*a, b, borrow);
        }
        (sum, false)
    }

    /// The product rounded towards zero, and whether it left the range.
    fn mul(&self, other: &Self) -> (Self, bool) {
        // Column k of the schoolbook product has weight 2^(64 (k − 2 (L − 1))); columns from L − 1 on are kept.
        let mut product = [0_u64; L];
        let mut lost = false;
        let mut high = [[0_u64; L]; 2];
        for (i, &a) in self.limbs.iter().enumerate() {
            let mut carry = 0_u128;
            for (j, &b) in other.limbs.iter().enumerate() {
                let k = i + j;
                let place = &mut high[k / L][k % L];
                let sum = u128::from(a) * u128::from(b) + u128::from(*place) + carry;
                (*place, carry) = (sum as u64, sum >> 64);
            }
            high[1][i] = carry as u64;
        }
        for (k, place) in product.iter_mut().enumerate() {
            let at = k + L - 1;
            *place = high[at / L][at % L];
        }
        lost |= high[1][L - 1] != 0;
        (Self { negative: self.negative != other.negative, limbs: product }, lost)
    }

    /// The number over a small one, rounded towards zero.
    fn over(&self, divisor: u64) -> Self {
        let mut rest = 0_u64;
        let mut quotient = *self;
        for limb in quotient.limbs.iter_mut().rev() {
            let wide = u128::from(rest) << 64 | u128::from(*limb);
            (*limb, rest) = ((wide / u128::from(divisor)) as u64, (wide % u128::from(divisor)) as u64);
        }
        quotient
    }

    /// The number times `2^by`; what leaves below is cut off, and whether something left above.
    fn shifted(&self, by: i32) -> (Self, bool) {
        let (whole, bits) = (by.div_euclid(64), by.rem_euclid(64) as u32);
        let at = |i: i32| if (0..L as i32).contains(&i) { self.limbs[i as usize] } else { 0 };
        let mut limbs = [0; L];
        for (i, limb) in (0_i32..).zip(&mut limbs) {
            let low = at(i - whole - 1);
            *limb = at(i - whole) << bits | if bits == 0 { 0 } else { low >> (64 - bits) };
        }
        // Above the range: limbs that moved past the last one, and the bits that its shift pushed out.
        let top = L as i32 - 1 - whole;
        let past = (0..L as i32).any(|i| i > top && self.limbs[i as usize] != 0);
        let pushed = bits != 0 && at(top) >> (64 - bits) != 0;
        (Self { negative: self.negative, limbs }, past || pushed)
    }
}

fn carrying_add(a: u64, b: u64, carry: bool) -> (u64, bool) {
    let (sum, first) = a.overflowing_add(b);
    let (sum, second) = sum.overflowing_add(carry.into());
    (sum, first || second)
}

fn borrowing_sub(a: u64, b: u64, borrow: bool) -> (u64, bool) {
    let (difference, first) = a.overflowing_sub(b);
    let (difference, second) = difference.overflowing_sub(borrow.into());
    (difference, first || second)
}

impl<const L: usize> Ball<L> {
    pub(crate) const ZERO: Self = Self { middle: Fixed::ZERO, radius: 0.0 };

    /// Exactly this number.
    pub(crate) fn exact(middle: Fixed<L>) -> Self {
        Self { middle, radius: 0.0 }
    }

    pub(crate) fn whole(value: u64) -> Self {
        Self::exact(Fixed::whole(value))
    }

    /// A number by its first digits: the true one is larger by less than one in the last place.
    pub(crate) fn digits(limbs: [u64; L]) -> Self {
        Self { middle: Fixed::from_limbs(limbs), radius: Fixed::<L>::ulp() }
    }

    /// A finite f64.
    pub(crate) fn from_f64(value: f64) -> Self {
        let bits = value.abs().to_bits();
        let (exponent, fraction) = ((bits >> 52) as i32, bits & ((1 << 52) - 1));
        let (mantissa, exponent) =
            if exponent == 0 { (fraction, -1074) } else { (fraction | 1 << 52, exponent - 1075) };
        let whole = Self::whole(mantissa);
        let scaled = whole.times_power_of_two(exponent);
        if value < 0.0 { scaled.negated() } else { scaled }
    }

    fn claimed(middle: Fixed<L>, radius: f64, lost: bool) -> Self {
        Self { middle, radius: if lost { f64::INFINITY } else { radius } }
    }

    pub(crate) fn negated(mut self) -> Self {
        self.middle.negative = !self.middle.negative && !self.middle.is_zero();
        self
    }

    pub(crate) fn plus(&self, other: &Self) -> Self {
        let (sum, lost) = self.middle.add(&other.middle);
        Self::claimed(sum, up(self.radius + other.radius), lost)
    }

    pub(crate) fn minus(&self, other: &Self) -> Self {
        self.plus(&other.negated())
    }

    pub(crate) fn times(&self, other: &Self) -> Self {
        let (product, lost) = self.middle.mul(&other.middle);
        let (a, b) = (self.middle.size(), other.middle.size());
        let radius = a * other.radius + b * self.radius + self.radius * other.radius + Fixed::<L>::ulp();
        Self::claimed(product, up(radius), lost)
    }

    pub(crate) fn over(&self, divisor: u64) -> Self {
        Self {
            middle: self.middle.over(divisor),
            radius: up(self.radius / divisor as f64 + Fixed::<L>::ulp()),
        }
    }

    pub(crate) fn times_power_of_two(&self, exponent: i32) -> Self {
        let (middle, lost) = self.middle.shifted(exponent);
        let cut = if exponent < 0 { Fixed::<L>::ulp() } else { 0.0 };
        Self::claimed(middle, up(self.radius * 2.0_f64.powi(exponent) + cut), lost)
    }

    /// The magnitude, rounded up.
    pub(crate) fn size(&self) -> f64 {
        up(self.middle.size() + self.radius)
    }

    /// `1/x` for `x` between ½ and 4: Newton's iteration from 50 digits, judged by its residual.
    pub(crate) fn reciprocal(&self) -> Self {
        let one = Self::whole(1);
        let middle = Self::exact(self.middle);
        let mut r = Self::from_f64(1.0 / self.middle.approximate());
        let mut digits = 48;
        while digits < Fixed::<L>::DIGITS {
            let residual = one.minus(&middle.times(&r));
            r = Self::exact(r.plus(&r.times(&residual)).middle);
            digits *= 2;
        }
        // |r − 1/x| = |1 − r x|/x for every x of the ball, and x > 0.4.
        let residual = one.minus(&self.times(&r)).size();
        Self { middle: r.middle, radius: up(residual / 0.4) }
    }

    /// `√x` for a ball that reaches above zero, below 2⁶⁰.
    pub(crate) fn square_root(&self) -> Self {
        let (size, radius) = (self.middle.approximate(), self.radius);
        if size <= 4.0 * radius {
            // √ is at most the root of the largest.
            let largest = up((size.abs() + radius).sqrt());
            return Self { middle: Fixed::ZERO, radius: largest };
        }
        // x 4^k between 1/4 and 1.
        let exponent = (size.to_bits() >> 52) as i32 - 1022;
        let k = -exponent.div_euclid(2) - exponent.rem_euclid(2);
        let middle = Self::exact(self.middle.shifted(2 * k).0);
        let three = Self::whole(3);
        let mut r = Self::from_f64(1.0 / middle.middle.approximate().sqrt());
        let mut digits = 48;
        while digits < Fixed::<L>::DIGITS {
            let error = three.minus(&middle.times(&r.times(&r)));
            r = Self::exact(r.times(&error).times_power_of_two(-1).middle);
            digits *= 2;
        }
        let root = Self::exact(middle.times(&r).middle.shifted(-k).0);
        // |y − √x| ≤ |y² − x|/y for every x ≥ 0 of the ball.
        let residual = root.times(&root).minus(self).size();
        let least = root.middle.approximate() * (1.0 - 8.0 * f64::EPSILON);
        Self { middle: root.middle, radius: up(residual / least) }
    }

    /// The same ball with more digits.
    #[cfg(test)]
    pub(crate) fn lengthened<const M: usize>(&self) -> Ball<M> {
        let mut limbs = [0; M];
        limbs[M - L..].copy_from_slice(&self.middle.limbs);
        Ball { middle: Fixed { negative: self.middle.negative, limbs }, radius: self.radius }
    }

    /// A number from 0 to 1 by its decimals, less than one in the last of them off.
    #[cfg(test)]
    pub(crate) fn from_decimals(decimals: &str) -> Self {
        let digits = decimals.bytes().rev().map(|digit| Self::whole(u64::from(digit - b'0')));
        let value = digits.fold(Self::ZERO, |value, digit| value.plus(&digit).over(10));
        Self { radius: value.radius + 10.0_f64.powi(-(decimals.len() as i32)), ..value }
    }

    /// The nearest whole number, if it is the same for all numbers of the ball, none of them being a tie.
    pub(crate) fn nearest(&self) -> Option<i64> {
        let negative = self.middle.negative;
        let magnitude = Self { middle: Fixed { negative: false, ..self.middle }, radius: self.radius };
        let half = Self { middle: Self::whole(1).times_power_of_two(-1).middle, radius: 0.0 };
        let shifted = magnitude.plus(&half);
        let whole = shifted.middle.limbs[L - 1];
        // Distance of the shifted number from the whole numbers around it.
        let mut fraction = shifted.middle;
        fraction.limbs[L - 1] = 0;
        let below = fraction.approximate() * (1.0 - 8.0 * f64::EPSILON);
        let (above, _) = Fixed::whole(1).add(&Fixed { negative: true, ..fraction });
        let above = above.approximate() * (1.0 - 8.0 * f64::EPSILON);
        if below.min(above) <= shifted.radius || whole >= 1 << 62 {
            return None;
        }
        Some(if negative { -(whole as i64) } else { whole as i64 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    type Three = Ball<3>;

    fn holds<const L: usize>(ball: &Ball<L>, value: f64) {
        let off = ball.minus(&Ball::from_f64(value));
        assert!(off.middle.size() <= off.radius + value.abs() * 1e-14, "{ball:?} {value}");
    }

    #[test]
    fn whole_numbers_halves_and_signs() {
        let (three, half) = (Three::whole(3), Three::from_f64(0.5));
        holds(&three.times(&half), 1.5);
        holds(&half.minus(&three), -2.5);
        holds(&three.negated().times(&half.negated()), 1.5);
        holds(&three.over(7), 3.0 / 7.0);
        holds(&Three::from_f64(-0.1), -0.1);
        assert_eq!(Three::from_f64(2.5).nearest(), None);
        assert_eq!(Three::from_f64(-2.5).nearest(), None);
        assert_eq!(Three::from_f64(-2.75).nearest(), Some(-3));
        assert_eq!(Three::from_f64(-0.25).nearest(), Some(0));
        let tiny = Three { middle: Three::from_f64(2.5).middle, radius: 1e-30 };
        assert_eq!(tiny.nearest(), None);
        let off = Three::from_f64(2.5).plus(&Three::from_f64(1e-20));
        assert_eq!(off.nearest(), Some(3));
        assert_eq!(Three { radius: 1e-19, ..off }.nearest(), None);
    }

    #[test]
    fn what_leaves_the_range_claims_nothing() {
        let large = Three::from_f64(2.0_f64.powi(40));
        assert_eq!(large.times(&large).radius, f64::INFINITY);
        assert_eq!(large.times_power_of_two(30).radius, f64::INFINITY);
        let top = Three::from_f64(2.0_f64.powi(63));
        assert_eq!(top.plus(&top).radius, f64::INFINITY);
        assert!(Three { radius: f64::INFINITY, ..Three::whole(1) }.nearest().is_none());
        assert!(Three::from_f64(1e300).radius.is_infinite());
    }

    #[test]
    fn roots_and_reciprocals_have_all_their_digits() {
        // 30 digits of √2 and √½, from tables.
        let two = Ball::<5>::whole(2).square_root();
        assert!(two.radius < 2.0_f64.powi(-250), "{:e}", two.radius);
        let square = two.times(&two).minus(&Ball::whole(2));
        assert!(square.middle.size() <= square.radius && square.radius < 1e-74);
        for x in [0.25_f64, 1e-30, 3.0, 0.999_999, 123_456.0] {
            let root = Ball::<5>::from_f64(x).square_root();
            holds(&root, x.sqrt());
            let square = root.times(&root).minus(&Ball::from_f64(x));
            assert!(square.middle.size() <= square.radius, "{x}");
        }
        for x in [0.51_f64, 1.0, 1.7, 2.4, 3.9] {
            let r = Ball::<5>::from_f64(x).reciprocal();
            let one = r.times(&Ball::from_f64(x)).minus(&Ball::whole(1));
            assert!(one.middle.size() <= one.radius && one.radius < 1e-74, "{x} {:e}", one.radius);
        }
        let around_zero = Three { middle: Fixed::ZERO, radius: 1e-20 }.square_root();
        assert!(around_zero.radius >= 1e-10 && around_zero.radius < 1.1e-10);
    }

    proptest! {
        #[test]
        fn operations_include_the_truth(a in -1e6..1e6_f64, b in -1e6..1e6_f64, shift in -20_i32..20) {
            let (x, y) = (Ball::<5>::from_f64(a), Ball::<5>::from_f64(b));
            holds(&x.plus(&y), a + b);
            holds(&x.times(&y), a * b);
            holds(&x.times_power_of_two(shift), a * 2.0_f64.powi(shift));
            // Short and long digits agree within their radii.
            let short = Three::from_f64(a).times(&Three::from_f64(b));
            let mut low = [0; 3];
            low.copy_from_slice(&x.times(&y).middle.limbs[2..]);
            let cut = Three { middle: Fixed { negative: x.times(&y).middle.negative, limbs: low }, radius: 0.0 };
            let off = short.minus(&cut);
            prop_assert!(off.middle.size() <= off.radius + 2.0_f64.powi(-127));
            prop_assert_eq!(x.nearest(), (a.fract().abs() != 0.5).then(|| a.round() as i64));
        }
    }
}
