//! Logarithm, sine and cosine of balls, from their series.

use super::fixed::{Ball, Fixed};
use std::sync::OnceLock;

/// Constants and coefficients with the digits of [`Fixed<L>`].
pub(crate) struct Tables<const L: usize> {
    pub(crate) ln_2: Ball<L>,
    pub(crate) quarter_pi: Ball<L>,
    /// `1/(2k + 1)`, as far as the series of the logarithm needs them.
    odd: Vec<Ball<L>>,
    /// `1/k!`, as far as sine and cosine need them.
    inverse_factorials: Vec<Ball<L>>,
}

/// The lengths of numbers there are tables for.
pub(crate) trait Length {
    /// The tables, made when they are first needed.
    fn tables() -> &'static Self;
}

macro_rules! lengths {
    ($($limbs:literal)*) => {
        $(impl Length for Tables<$limbs> {
            fn tables() -> &'static Self {
                static TABLES: OnceLock<Tables<$limbs>> = OnceLock::new();
                TABLES.get_or_init(Tables::new)
            }
        })*
    };
}

lengths!(3 5 9);

impl<const L: usize> Tables<L> {
    fn new() -> Self {
        let digits = Fixed::<L>::DIGITS as i32;
        // (1/26)² < 2^−9 …, and (3 − 2√2)² < 2^−5: terms until the rest is below the last digit.
        let odd = (0..digits as u64 / 5 + 3).map(|k| Ball::whole(1).over(2 * k + 1)).collect();
        let mut inverse_factorials = vec![Ball::whole(1)];
        let mut size = 1.0_f64;
        for k in 1_u64.. {
            let last = inverse_factorials[inverse_factorials.len() - 1];
            inverse_factorials.push(last.over(k));
            size -= (k as f64).log2();
            if size < f64::from(-digits - 8) {
                break;
            }
        }
        // ln 2 = 18 artanh 1/26 − 2 artanh 1/4801 + 8 artanh 1/8749; π/4 = 4 arctan 1/5 − arctan 1/239.
        let times = |ball: Ball<L>, factor: u64| ball.times(&Ball::whole(factor));
        let ln_2 = times(inverse_tangent(26, false), 18)
            .minus(&times(inverse_tangent(4801, false), 2))
            .plus(&times(inverse_tangent(8749, false), 8));
        let quarter_pi = times(inverse_tangent(5, true), 4).minus(&inverse_tangent(239, true));
        Self { ln_2, quarter_pi, odd, inverse_factorials }
    }

    /// `ln x` for `x` between √½ and √2, or a hair beyond.
    ///
    /// With `s = (x − 1)/(x + 1)`, `|s| < 0.172`: `ln x = 2 s Σ_k s^{2k}/(2k + 1)`, and the terms from `K` on add up to
    /// less than `|s| s^{2K}`.
    pub(crate) fn logarithm(&self, x: &Ball<L>) -> Ball<L> {
        let one = Ball::whole(1);
        let s = x.minus(&one).times(&x.plus(&one).reciprocal());
        let s_sq = s.times(&s);
        let sum = series(&s_sq, &self.odd);
        let size = s.size();
        let rest = size.powi(2 * self.odd.len() as i32 + 1);
        let mut logarithm = s.times(&sum).times_power_of_two(1);
        logarithm.radius = (logarithm.radius + 2.0 * rest) * (1.0 + 1e-12);
        logarithm
    }

    /// Cosine and sine of an angle of at most π/4, or a hair more.
    ///
    /// The first term that is left out bounds what is.
    pub(crate) fn cosine_and_sine(&self, angle: &Ball<L>) -> (Ball<L>, Ball<L>) {
        let square = angle.times(angle).negated();
        let even: Vec<Ball<L>> = self.inverse_factorials.iter().step_by(2).copied().collect();
        let odd: Vec<Ball<L>> = self.inverse_factorials.iter().skip(1).step_by(2).copied().collect();
        let cosine = series(&square, &even);
        let sine = angle.times(&series(&square, &odd));
        let rest = 2.0_f64.powi(-(Fixed::<L>::DIGITS as i32) - 4);
        let wider = |ball: Ball<L>| Ball { radius: (ball.radius + rest) * (1.0 + 1e-12), ..ball };
        (wider(cosine), wider(sine))
    }
}

/// `Σ_k c_k x^k`.
fn series<const L: usize>(x: &Ball<L>, coefficients: &[Ball<L>]) -> Ball<L> {
    coefficients.iter().rev().fold(Ball::ZERO, |sum, c| sum.times(x).plus(c))
}

/// `arctan 1/m`, or `artanh 1/m` if it does not alternate: `Σ_k (±1)^k / ((2k + 1) m^{2k+1})`.
fn inverse_tangent<const L: usize>(m: u64, alternating: bool) -> Ball<L> {
    let mut power = Ball::whole(1).over(m);
    let mut sum = Ball::ZERO;
    let mut k = 0;
    // Terms fall by at least m² ≥ 25, so what is left out is below the last one that was added.
    while power.middle != Fixed::ZERO {
        let term = power.over(2 * k + 1);
        sum = if alternating && k % 2 == 1 { sum.minus(&term) } else { sum.plus(&term) };
        power = power.over(m).over(m);
        k += 1;
    }
    let last = 2.0_f64.powi(-(Fixed::<L>::DIGITS as i32));
    Ball { radius: sum.radius + 2.0 * last, ..sum }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agree(a: &Ball<5>, b: &Ball<5>) {
        let off = a.minus(b);
        assert!(
            off.middle.approximate().abs() <= off.radius,
            "{:e} {:e}",
            off.middle.approximate(),
            off.radius
        );
    }

    /// Reference digits: mpmath 1.3 with 80 digits.
    #[test]
    fn sixty_digits_of_constants_and_functions() {
        let tables = Tables::<5>::tables();
        agree(
            &tables.ln_2,
            &Ball::from_decimals("693147180559945309417232121458176568075500134360255254120680"),
        );
        agree(
            &tables.quarter_pi,
            &Ball::from_decimals("785398163397448309615660845819875721049292349843776455243736"),
        );
        assert!(tables.ln_2.radius < 1e-73 && tables.quarter_pi.radius < 1e-73);
        let quarter = Ball::from_f64(0.25);
        let (c, s) = tables.cosine_and_sine(&quarter);
        agree(&c, &Ball::from_decimals("968912421710644784144595449494189199804134190287442831148128"));
        agree(&s, &Ball::from_decimals("247403959254522929596848704849389195893390980386965810676544"));
        let l = tables.logarithm(&Ball::from_f64(1.25));
        agree(&l, &Ball::from_decimals("223143551314209755766295090309834503374601085548007213671287"));
        assert!(c.radius < 1e-73 && s.radius < 1e-73 && l.radius < 1e-73);
    }

    /// Longer numbers lie within the balls of shorter ones, at the ends of the ranges and between.
    #[test]
    fn longer_numbers_lie_within_shorter_balls() {
        for i in 0..200 {
            let x = std::f64::consts::FRAC_1_SQRT_2 * (1.0 + f64::from(i) / 199.0);
            let angle = std::f64::consts::FRAC_PI_4 * (f64::from(i) / 99.5 - 1.0);
            let short = Tables::<3>::tables().logarithm(&Ball::from_f64(x));
            let long = Tables::<5>::tables().logarithm(&Ball::from_f64(x));
            assert!(
                short.radius < 2.0_f64.powi(-120) && long.radius < 2.0_f64.powi(-248),
                "{:e}",
                short.radius
            );
            assert!((long.middle.approximate() - x.ln()).abs() < 1e-15);
            within(&short, &long);
            let (short, long) = (
                Tables::<3>::tables().cosine_and_sine(&Ball::from_f64(angle)),
                Tables::<5>::tables().cosine_and_sine(&Ball::from_f64(angle)),
            );
            assert!((long.0.middle.approximate() - angle.cos()).abs() < 1e-15);
            assert!((long.1.middle.approximate() - angle.sin()).abs() < 1e-15);
            within(&short.0, &long.0);
            within(&short.1, &long.1);
        }
    }

    fn within(short: &Ball<3>, long: &Ball<5>) {
        let off = long.minus(&short.lengthened());
        assert!(off.middle.approximate().abs() <= off.radius, "{short:?} {long:?}");
    }
}
