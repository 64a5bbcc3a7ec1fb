//! The Gaussian mechanism exactly: μ-Gaussian differential privacy and its (ε, δ) curve.
//!
//! A mechanism that adds `N(0, s²)` to a function of L2 sensitivity `Δ` is μ-GDP with `μ = Δ/s`, and no
//! accountant can say more about it: its (ε, δ) curve is
//!
//! `δ(ε) = Φ(−a) − e^ε Φ(−b)`, `a = ε/μ − μ/2`, `b = ε/μ + μ/2`.
//!
//! Because `e^ε φ(b) = φ(a)`, this is `φ(a) (R(a) − R(b))` with `R` the Mills ratio, which has no large
//! exponential left in it: `ln δ` is available far below the smallest double.
//!
//! Reference: Theorem 8 of \[BW18\]; Corollary 2.13 of \[DRS22\].

use super::interval::Interval;
use super::{check_delta, check_epsilon, check_positive, normal, search, shown};
use crate::error::{Error, Result};

/// Below this `R(a) − R(b)` would cancel, and its Taylor series about the midpoint is used instead.
const SERIES_BELOW: f64 = 1.0;
/// Last moment of the series; the terms beyond it sum to less than 1e-19 of the first.
const LAST_MOMENT: usize = 25;

/// Encloses `ln δ(ε)` for `μ > 0`, `ε ≥ 0`.
pub(crate) fn ln_delta_enclosure(mu: f64, epsilon: f64) -> Interval {
    let midpoint = Interval::exact(epsilon) / mu;
    let half = Interval::exact(mu) * 0.5;
    let (a, b) = (midpoint - half, midpoint + half);
    let ln = if mu < SERIES_BELOW {
        normal::ln_density(a) + mills_difference(midpoint, half).ln()
    } else if a.lo >= 0.0 {
        let difference = a.decreasing(normal::mills) - b.decreasing(normal::mills);
        normal::ln_density(a) + difference.ln()
    } else {
        // The first term is at least 1/2 and, as μ ≥ 1, the second at most about 1/4.
        let below = (normal::ln_density(a) + b.decreasing(normal::mills).ln()).exp();
        (normal::upper_tail(a) - below).ln()
    };
    Interval { hi: ln.hi.min(0.0), ..ln }
}

/// `R(m − h) − R(m + h) = 2 Σ_{k odd} I_k(m) hᵏ/k!` for `0 < h < 1/2`: a sum of positive terms.
fn mills_difference(midpoint: Interval, half: Interval) -> Interval {
    let moments = normal::moments(midpoint.non_negative(), LAST_MOMENT);
    let mut sum = Interval::exact(0.0);
    let mut last = sum;
    let mut power = Interval::exact(2.0);
    for (k, &moment) in moments.iter().enumerate().skip(1) {
        power = power * half / k as f64;
        if k % 2 == 1 {
            last = moment.non_negative() * power;
            sum = sum + last;
        }
    }
    // I_{k+2}/I_k ≤ √((k+1)(k+2)), so the terms left out shrink by h²/(k + 1) < 1/100 each.
    sum.hi = (sum + last * 0.02).hi;
    sum.non_negative()
}

/// Natural logarithm of the smallest δ for which μ-GDP implies (ε, δ)-differential privacy.
///
/// Guarantee: rounded up, by about 1e-13 relative to the larger of 1 and `|ln δ|`.
/// Cost: microseconds.
/// Errors: `μ` or `ε` not positive and finite.
pub fn ln_delta(mu: f64, epsilon: f64) -> Result<f64> {
    check_positive("mu", mu)?;
    check_epsilon(epsilon)?;
    Ok(ln_delta_enclosure(mu, epsilon).hi)
}

/// Smallest δ for which μ-GDP implies (ε, δ)-differential privacy.
///
/// Guarantee: rounded up; never zero, so that a δ below the smallest double is still an upper bound.
/// Errors: `μ` or `ε` not positive and finite.
pub fn delta(mu: f64, epsilon: f64) -> Result<f64> {
    let delta = Interval::exact(ln_delta(mu, epsilon)?).exp();
    Ok(delta.hi.min(1.0))
}

/// Whether μ-GDP implies (ε, δ)-differential privacy, proved in interval arithmetic.
///
/// Guarantee: `true` is a proof; `false` within about 1e-13 of the boundary may only be doubt.
/// Errors: an argument outside its domain.
pub fn satisfies(mu: f64, epsilon: f64, delta: f64) -> Result<bool> {
    check_positive("mu", mu)?;
    check_epsilon(epsilon)?;
    check_delta(delta)?;
    // An upper bound of ln δ(ε) against a lower bound of ln δ.
    Ok(ln_delta_enclosure(mu, epsilon).hi <= Interval::exact(delta).ln().lo)
}

/// Smallest ε for which μ-GDP implies (ε, δ)-differential privacy.
///
/// Guarantee: rounded up. Zero when the total variation distance is already at most δ.
/// Cost: about 64 evaluations of δ(ε).
/// Errors: `μ` not positive and finite, or so large that ε overflows; δ outside (0, 1).
pub fn epsilon(mu: f64, delta: f64) -> Result<f64> {
    check_positive("mu", mu)?;
    check_delta(delta)?;
    let target = Interval::exact(delta).ln().lo;
    let holds = |epsilon: f64| ln_delta_enclosure(mu, epsilon).hi <= target;
    if holds(0.0) {
        return Ok(0.0);
    }
    // μ²/2 + μ √(2 ln(1/δ)) is the plain zCDP bound, never below the exact ε; both roundings go up.
    let square = Interval::exact(mu).square();
    let mut above = (square * 0.5 + (-Interval::exact(delta).ln() * square * 2.0).sqrt()).hi;
    let mut step = 1e-12;
    while above.is_finite() && !holds(above) {
        above *= 1.0 + step;
        step *= 2.0;
    }
    if above.is_infinite() {
        return Err(Error::argument("mu", shown(mu), "its epsilon is too large to be a number"));
    }
    Ok(search::first_true(0.0, above, holds))
}

/// Largest ε below the smallest one for which μ-GDP implies (ε, δ)-differential privacy.
///
/// The other end of the enclosure of [`epsilon`], for statements that a mechanism is *not* more private.
///
/// Guarantee: rounded down.
/// Errors: as [`epsilon`].
pub fn epsilon_lower(mu: f64, delta: f64) -> Result<f64> {
    let above = epsilon(mu, delta)?;
    let target = Interval::exact(delta).ln().hi;
    let holds = |epsilon: f64| ln_delta_enclosure(mu, epsilon).lo >= target;
    if above == 0.0 || !holds(0.0) {
        return Ok(0.0);
    }
    // Negated, so that the search ends at a point where the predicate was seen to hold.
    Ok(-search::first_true(-above, -0.0, |negative| holds(-negative)))
}

/// Largest μ for which μ-GDP implies (ε, δ)-differential privacy.
///
/// Guarantee: rounded down, far enough that [`satisfies`] holds at the result and at every smaller μ.
/// Errors: ε not positive and finite, δ outside (0, 1).
pub fn mu(epsilon: f64, delta: f64) -> Result<f64> {
    check_epsilon(epsilon)?;
    check_delta(delta)?;
    let ln = Interval::exact(delta).ln().lo;
    let target = ln - 1e-13 * (1.0 - ln);
    let holds = |mu: f64| ln_delta_enclosure(mu, epsilon).hi <= target;
    // The paper's closed form is never above the exact μ, and half of it is safely below.
    let below = super::paper::mu(epsilon, delta)? * 0.5;
    let mut above = 4.0 * below;
    while holds(above) && above < f64::MAX / 4.0 {
        above *= 2.0;
    }
    Ok(-search::first_true(-above, -below, |negative| holds(-negative)))
}

/// Trade-off function `T(α) = Φ(Φ⁻¹(1 − α) − μ)`: the smallest false negative rate of any test between
/// neighbouring data sets whose false positive rate is α.
///
/// Guarantee: rounded down, so every test errs at least this often.
/// Errors: `μ` not positive and finite, α outside [0, 1].
///
/// Reference: Definition 2.6 of \[DRS22\].
pub fn trade_off(mu: f64, false_positive_rate: f64) -> Result<f64> {
    check_positive("mu", mu)?;
    let alpha = false_positive_rate;
    if !(0.0..=1.0).contains(&alpha) {
        return Err(Error::argument("false positive rate", alpha, "it must lie in [0, 1]"));
    }
    if alpha == 0.0 || alpha == 1.0 {
        return Ok(1.0 - alpha);
    }
    // Φ(x − μ) = Φ(−(μ − x)) grows with x, so the lower end of the quantile gives the lower end of T.
    Ok(normal::upper_tail(Interval::exact(mu) - normal::upper_quantile(alpha)).lo)
}

/// Standard deviations that a normal variable exceeds with probability at most `p`.
///
/// Guarantee: rounded up.
/// Errors: `p` outside (0, 1).
pub fn tail_deviations(p: f64) -> Result<f64> {
    check_delta(p)?;
    Ok(super::normal::upper_quantile(p).hi)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn delta_encloses_known_values() {
        // mpmath 1.4 at 400 digits, log(ncdf(-a) - exp(eps) ncdf(-b)); columns μ, ε, ln δ.
        let known = [
            (1e-15, 1e-16, -35.585_929_708_983_53_f64),
            (1e-15, 3.6e-14, -690.627_061_399_889_3),
            (1e-14, 1.955246277e-13, -230.258_509_152_378_4),
            (1e-12, 1.97854019e-11, -230.258_508_779_216_76),
            (1e-12, 3.7e-11, -720.273_981_279_180_5),
            (1e-9, 2.0129806805e-8, -230.258_509_298_130_67),
            (1e-8, 1e-9, -19.467_834_057_525_21),
            (1e-06, 1e-05, -69.368_627_594_086_76),
            (0.001, 0.03, -464.61740916430445),
            (0.01, 1e-05, -5.525_361_490_637_897),
            (0.1, 0.5, -18.798056703623703),
            (0.3, 0.1, -2.5286095442580858),
            (0.3, 11.0, -676.062_328_688_959_8),
            (0.5, 0.25, -2.2045659153987204),
            (0.75, 0.75, -2.442_308_261_721_222),
            (0.999, 0.999, -2.065_409_933_079_175),
            (0.999, 30.0, -443.753_475_995_437_9),
            (1.0, 0.5, -1.4337142903236976),
            (1.0, 37.0, -674.2677784588983),
            (1.5, 1.0, -1.1382103006532425),
            (2.0, 4.0, -2.465_653_365_458_088),
            (2.932551319648094, 17.648, -13.816173910621106),
            (5.0, 1.0, -0.020354067659902644),
            (5.0, 30.0, -8.937_825_712_028_71),
            (20.0, 100.0, -3.853_315_177_933_76e-7),
            (20.0, 900.0, -617.987_550_371_116_9),
            (120.0, 10000.0, -276.47089968446504),
            (141.0, 10000.0, -1.0968023661609446),
            (1000.0, 530000.0, -454.3508359904952),
            (1000.0, 540000.0, -804.647_687_659_059_8),
        ];
        for (mu, epsilon, value) in known {
            let ln = ln_delta_enclosure(mu, epsilon);
            let scale = 1.0 + value.abs();
            assert!(
                ln.lo <= value + 4e-16 * scale && value - 4e-16 * scale <= ln.hi,
                "{mu} {epsilon}: {ln:?} {value}"
            );
            assert!(ln.hi - ln.lo < 2e-13 * scale, "{mu} {epsilon}: width {:e}", ln.hi - ln.lo);
        }
    }

    #[test]
    fn golden_noise_multipliers() {
        // golden/PROVENANCE.md, ε of the Gaussian mechanism by the analytic formula.
        let rows = [(0.341, 17.648), (0.682, 7.601), (1.364, 3.444), (2.728, 1.606), (5.456, 0.759)];
        for (sigma, expected) in rows {
            let epsilon = epsilon(1.0 / sigma, 1e-6).unwrap();
            assert!((epsilon - expected).abs() < 6e-4, "{sigma}: {epsilon}");
        }
    }

    #[test]
    fn golden_deployments() {
        // golden/PROVENANCE.md, two deployments: σ, squared sensitivity, ρ, ε as published.
        for (sigma, sensitivity_sq, rho, expected) in [
            (1.411, 0.6_f64, 0.1506840301548885, 3.4240072731),
            (8.35, 2.0, 0.014342572340349278, 0.993549957),
        ] {
            let mu = sensitivity_sq.sqrt() / sigma;
            assert!((mu * mu / 2.0 - rho).abs() < 1e-15);
            let epsilon = epsilon(mu, 1e-10).unwrap();
            assert!((epsilon - expected).abs() < 1e-9, "{sigma}: {epsilon}");
        }
    }

    #[test]
    fn total_variation_distance_in_closed_form() {
        // δ(0) = 2Φ(μ/2) − 1 = 1 − 2Φ(−μ/2): an ε of zero suffices from there on.
        for mu in [1e-6, 0.3, 0.999, 1.0, 3.0, 9.0] {
            let distance = (Interval::exact(1.0) - normal::upper_tail((mu / 2.0).into()) * 2.0).hi;
            let ln = ln_delta_enclosure(mu, 0.0);
            assert!((ln.hi.exp() / distance - 1.0).abs() < 1e-8, "{mu}");
            if distance < 0.99 {
                assert_eq!(epsilon(mu, distance * (1.0 + 1e-9)).unwrap(), 0.0);
                assert!(epsilon(mu, distance * (1.0 - 1e-6)).unwrap() > 0.0);
            }
        }
    }

    #[test]
    fn series_and_difference_meet_at_one() {
        for epsilon in [0.01, 0.2, 1.0, 5.0, 30.0] {
            let (below, above) =
                (ln_delta_enclosure(1.0_f64.next_down(), epsilon), ln_delta_enclosure(1.0, epsilon));
            // δ grows with μ, by far less than the widths over one unit in the last place.
            assert!(
                (below.lo - above.hi).abs() < 1e-11 && (above.lo - below.hi).abs() < 1e-11,
                "{below:?} {above:?}"
            );
        }
    }

    #[test]
    fn extremes_stay_finite_and_ordered() {
        assert!(epsilon(1.0, 1e-300).unwrap() > 37.0);
        assert!(delta(1e-3, 1e4).unwrap() > 0.0);
        assert!(ln_delta(1.0, 1e4).unwrap() < -4.9e7);
        assert!(ln_delta(1e-300, 1e4).unwrap() < -1e300);
        assert_eq!(epsilon(1e-300, 0.5).unwrap(), 0.0);
        let mu_at = |epsilon| mu(epsilon, 1e-300).unwrap();
        assert!(mu_at(1e-10) > 0.0 && mu_at(1e4) > 100.0 && mu_at(1e4) < mu_at(1.001e4));
        assert!(epsilon(1e200, 1e-6).unwrap_err().to_string().contains("too large"));
    }

    proptest! {
        #[test]
        fn epsilon_and_delta_invert_each_other(ln_mu in -12.0..5.0_f64, exponent in -300.0..-0.3_f64) {
            let (mu, delta) = (ln_mu.exp(), 10f64.powf(exponent));
            let epsilon = epsilon(mu, delta).unwrap();
            let lower = epsilon_lower(mu, delta).unwrap();
            prop_assert!(lower <= epsilon && epsilon - lower <= 1e-11 * epsilon + 1e-300, "{lower} {epsilon}");
            if epsilon > 0.0 {
                prop_assert!(satisfies(mu, epsilon, delta).unwrap());
                prop_assert!(!satisfies(mu, epsilon * (1.0 - 1e-9), delta).unwrap());
            }
        }

        #[test]
        fn mu_inverts_epsilon(ln_epsilon in -7.0..9.2_f64, exponent in -300.0..-0.3_f64) {
            let (target, delta) = (ln_epsilon.exp(), 10f64.powf(exponent));
            let mu = mu(target, delta).unwrap();
            prop_assert!(epsilon(mu, delta).unwrap() <= target);
            prop_assert!(epsilon(mu * (1.0 + 1e-10), delta).unwrap() > target * (1.0 - 1e-12));
            prop_assert!(satisfies(mu, target, delta).unwrap() && satisfies(mu * 0.999, target, delta).unwrap());
            prop_assert!(!satisfies(mu * 1.000001, target, delta).unwrap());
        }

        #[test]
        fn delta_is_the_envelope_of_the_trade_off(mu in 0.05..6.0_f64, epsilon in 0.01..8.0_f64, alpha in 1e-6..0.999_f64) {
            // (ε, δ) says T(α) ≥ 1 − δ − e^ε α everywhere, with equality at the tangent point.
            let (delta, e) = (delta(mu, epsilon).unwrap(), epsilon.exp());
            prop_assert!(trade_off(mu, alpha).unwrap() >= 1.0 - delta - e * alpha - 1e-12);
            let tangent = normal::upper_tail((epsilon / mu + mu / 2.0).into()).hi;
            let touch = trade_off(mu, tangent).unwrap() - (1.0 - delta - e * tangent);
            prop_assert!(touch.abs() < 1e-11, "{touch}");
        }
    }

    #[test]
    fn bad_input_is_named() {
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(epsilon(bad, 1e-6).unwrap_err().to_string().starts_with("mu is"));
            assert!(delta(1.0, bad).unwrap_err().to_string().starts_with("epsilon is"));
            assert!(mu(bad, 1e-6).unwrap_err().to_string().starts_with("epsilon is"));
        }
        for bad in [0.0, 1.0, -1e-6, 1.5, f64::NAN] {
            assert!(epsilon(1.0, bad).unwrap_err().to_string().starts_with("delta is"));
            assert!(mu(1.0, bad).unwrap_err().to_string().starts_with("delta is"));
            assert!(satisfies(1.0, 1.0, bad).unwrap_err().to_string().starts_with("delta is"));
        }
        assert!(trade_off(1.0, 1.1).unwrap_err().to_string().starts_with("false positive rate is 1.1"));
    }
}
