//! The normal distribution, enclosed: Mills ratio and its moments, tails, quantiles.
//!
//! With `φ` the density and `Φ` the distribution function, everything is built from the moments
//! `I_k(x) = ∫₀^∞ tᵏ e^{−xt − t²/2} dt`, of which `I_0(x) = Φ(−x)/φ(x)` is the Mills ratio. They satisfy
//! `k I_{k−1} = I_{k+1} + x I_k`, so that the ratios `r_k = I_k / I_{k−1}` form the continued fraction
//! `r_k = k / (x + r_{k+1})`: positive terms only, run backwards.

use super::interval::Interval;
use super::search;

/// Above this the continued fraction is short; below it the power series is.
const SERIES_BELOW: f64 = 1.0;

/// The Mills ratio `Φ(−x)/φ(x)` for `x ≥ 0`, a decreasing function.
pub(crate) fn mills(x: f64) -> Interval {
    debug_assert!(x >= 0.0);
    if x < SERIES_BELOW {
        mills_series(x)
    } else {
        Interval::exact(1.0) / (moment_ratios(x.into(), 1)[0] + x)
    }
}

/// `√(π/2) e^{x²/2} − Σ_k x^{2k+1} / (1·3·…·(2k+1))`.
fn mills_series(x: f64) -> Interval {
    let x = Interval::exact(x);
    let square = x.square();
    let (mut term, mut sum) = (x, x);
    for k in 1..20 {
        term = term * square / f64::from(2 * k + 1);
        sum = sum + term;
    }
    // Later terms shrink at least threefold each, so they add less than half the last one.
    sum.hi = (sum + term * 0.5).hi;
    Interval::sqrt_half_pi() * (square * 0.5).exp() - sum
}

/// `r_1, …, r_count` at `x ≥ 1`.
///
/// The fraction is started from the bounds `k/(x + u_{k+1}) ≤ r_k ≤ u_k = (√(x² + 4k) − x)/2`, which follow
/// from the log-convexity of the moments, and every step contracts the enclosure.
fn moment_ratios(x: Interval, count: usize) -> Vec<Interval> {
    let start = count + 30 + (350.0 / (x.lo * x.lo)) as usize;
    // u_k = 2k / (√(x² + 4k) + x), free of cancellation.
    let bound = |k: usize| (Interval::exact(2.0 * k as f64) / ((x.square() + 4.0 * k as f64).sqrt() + x)).hi;
    let mut ratio =
        Interval { lo: (Interval::exact(start as f64) / (x + bound(start + 1))).lo, hi: bound(start) };
    let mut ratios = vec![ratio; count];
    for k in (1..start).rev() {
        ratio = Interval::exact(k as f64) / (x + ratio);
        if k <= count {
            ratios[k - 1] = ratio;
        }
    }
    ratios
}

/// The moments `I_0(x), …, I_count(x)` for `x ≥ 0`.
pub(crate) fn moments(x: Interval, count: usize) -> Vec<Interval> {
    let mut moments = Vec::with_capacity(count + 1);
    if x.lo < SERIES_BELOW {
        // Forward recursion: loses a digit or two by I_25, where callers give the moment little weight.
        moments.push(x.decreasing(mills));
        moments.push(Interval::exact(1.0) - x * moments[0]);
        for k in 1..count {
            moments.push(moments[k - 1] * k as f64 - x * moments[k]);
        }
    } else {
        let ratios = moment_ratios(x, count);
        moments.push(Interval::exact(1.0) / (ratios[0] + x));
        for (k, &ratio) in ratios.iter().enumerate() {
            moments.push(moments[k] * ratio);
        }
    }
    moments.truncate(count + 1);
    moments
}

/// `ln φ(x)`.
pub(crate) fn ln_density(x: Interval) -> Interval {
    -(x.square() * 0.5 + Interval::ln_sqrt_2pi())
}

/// `ln Φ(−x)`.
pub(crate) fn ln_upper_tail(x: f64) -> Interval {
    let tail = ln_density(x.into()) + mills(x.abs()).ln();
    // Φ(−x) = 1 − Φ(x) left of zero, where Φ(x) ≤ 1/2.
    let ln = if x >= 0.0 { tail } else { (-tail.exp()).ln_1p() };
    Interval { hi: ln.hi.min(0.0), ..ln }
}

/// `Φ(−x)`.
pub(crate) fn upper_tail(x: Interval) -> Interval {
    let tail = x.decreasing(ln_upper_tail).exp();
    Interval { hi: tail.hi.min(1.0), ..tail }
}

/// The `x` with `Φ(−x) = p`, for `0 < p < 1`.
pub(crate) fn upper_quantile(p: f64) -> Interval {
    if p > 0.5 {
        // 1 − p is exact here.
        return -upper_quantile(1.0 - p);
    }
    let target = Interval::exact(p).ln();
    // Φ(−39) < 5e-324 ≤ p ≤ 1/2 = Φ(0), so the quantile lies in [0, 39).
    let hi = search::first_true(0.0, 39.0, |x| ln_upper_tail(x).hi <= target.lo);
    let lo = -search::first_true(-hi, 0.0, |x| ln_upper_tail(-x).lo >= target.hi);
    Interval { lo: lo.max(0.0), hi }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn relative_width(x: Interval) -> f64 {
        (x.hi - x.lo) / x.lo.abs()
    }

    #[test]
    fn mills_ratio_encloses_known_values() {
        // mpmath 1.4 at 40 digits, sqrt(pi/2) * exp(x²/2) * erfc(x/√2), rounded to the nearest double.
        let known = [
            (0.0, 1.2533141373155003),
            (1e-8, 1.2533141273155003),
            (0.5, 0.8763644564536923),
            (0.99, 0.6591383780619517),
            (1.0, 0.6556795424187985),
            (1.5, 0.5158156382179634),
            (3.0, 0.3045902987101033),
            (8.0, 0.1231319632579323),
            (37.5, 0.02664774401489855),
            (1e4, 0.000_099_999_999_000_000_04),
        ];
        for (x, value) in known {
            let mills = mills(x);
            assert!(mills.lo <= value && value <= mills.hi, "{x}: {mills:?} {value}");
            assert!(relative_width(mills) < 3e-14, "{x}: {:e}", relative_width(mills));
        }
    }

    #[test]
    fn enclosures_are_tight_and_agree_where_the_methods_meet() {
        for k in 0..2000 {
            let x = k as f64 * 0.01;
            assert!(relative_width(mills(x)) < 3e-14, "{x}: {:e}", relative_width(mills(x)));
        }
        let (series, fraction) = (mills_series(1.0), mills(1.0));
        assert!(series.lo <= fraction.hi && fraction.lo <= series.hi);
    }

    #[test]
    fn moments_at_zero_are_factorials() {
        // I_k(0) = 2^{(k−1)/2} Γ((k+1)/2): √(π/2), 1, √(π/2), 2, 3√(π/2), 8.
        let root = 1.2533141373155003;
        for (moment, value) in moments(0.0.into(), 5).iter().zip([root, 1.0, root, 2.0, 3.0 * root, 8.0]) {
            assert!(moment.lo <= value && value <= moment.hi && relative_width(*moment) < 1e-14);
        }
    }

    proptest! {
        #[test]
        fn moments_are_the_integrals(x in 0.0..30.0_f64, k in 0_usize..26) {
            // Trapezium rule on t = e^{s − e^{−s}}: a doubly exponential rule, exact to rounding here.
            let h = 1.0 / 64.0;
            let integral: f64 = (-256..=320).map(|j| {
                let s = j as f64 * h;
                let t = (s - (-s).exp()).exp();
                let weight = t * (1.0 + (-s).exp()) * h;
                if t < 60.0 && t > 0.0 { (k as f64 * t.ln() - x * t - t * t / 2.0).exp() * weight } else { 0.0 }
            }).sum();
            let moment = moments(x.into(), 25)[k];
            let slack = 1e-12 * integral;
            prop_assert!(moment.lo <= integral + slack && integral - slack <= moment.hi, "{moment:?} {integral}");
        }

        #[test]
        fn quantile_inverts_the_tail(exponent in -300.0..-0.0001_f64) {
            let p = 10f64.powf(exponent);
            let x = upper_quantile(p);
            prop_assert!(x.lo <= x.hi && x.hi - x.lo < 1e-13 * (1.0 + x.hi.abs()), "{p}: {x:?}");
            prop_assert!(upper_tail(x.lo.into()).hi >= p && upper_tail(x.hi.into()).lo <= p);
        }

        #[test]
        fn tails_add_up_to_one(x in -38.0..38.0_f64) {
            let sum = upper_tail(x.into()) + upper_tail((-x).into());
            prop_assert!(sum.lo <= 1.0 && sum.hi >= 1.0 && sum.hi - sum.lo < 1e-12);
        }
    }

    #[test]
    fn known_tails_and_quantiles() {
        // mpmath: ln Φ(−38) = −726.5572…, Φ(−1.959963984540054) = 0.025.
        assert!((ln_upper_tail(38.0).hi + 726.557_216_018_820_1).abs() < 1e-10);
        assert!((upper_tail(1.959963984540054.into()).hi - 0.025).abs() < 1e-15);
        assert!((upper_quantile(0.025).hi - 1.959963984540054).abs() < 1e-13);
        assert!((upper_quantile(0.975).lo + 1.959963984540054).abs() < 1e-13);
        assert!(upper_quantile(0.5).lo <= 0.0 && upper_quantile(0.5).hi < 1e-14);
        assert!(upper_quantile(f64::MIN_POSITIVE).hi < 39.0);
    }
}
