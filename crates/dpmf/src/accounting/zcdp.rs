//! Zero-concentrated differential privacy.
//!
//! ρ-zCDP bounds the Rényi divergence of every order α by `αρ`. A Gaussian with `μ = Δ/s` has `ρ = μ²/2`
//! exactly, i.e. `ρ = γ²ζ²/(2σ²)` for noise of standard deviation σ under sensitivity `γζ`.

use super::interval::Interval;
use super::{check_delta, check_epsilon, check_positive, search, shown};
use crate::error::{Error, Result};

/// `ρ = μ²/2` of a Gaussian.
///
/// Guarantee: rounded up.
/// Errors: `μ` not positive and finite.
pub fn rho(mu: f64) -> Result<f64> {
    check_positive("mu", mu)?;
    Ok((Interval::exact(mu).square() * 0.5).hi)
}

/// `μ = √(2ρ)` of the Gaussian whose concentrated privacy is ρ.
///
/// Guarantee: rounded up. It speaks of Gaussians only: ρ-zCDP in general implies no μ-GDP.
/// Errors: ρ not positive and finite.
pub fn gaussian_mu(rho: f64) -> Result<f64> {
    check_positive("rho", rho)?;
    Ok((Interval::exact(rho) * 2.0).sqrt().hi)
}

/// The bound on ε that the Rényi divergence `divergence` of one order α gives at δ,
/// `divergence + ln(1 − 1/α) − ln(αδ)/(α − 1)`.
///
/// Reference: Proposition 12 of \[CKS20\].
pub(crate) fn epsilon_at_order(order: f64, divergence: Interval, ln_delta: Interval) -> Interval {
    let order = Interval::exact(order);
    let ln_ratio = (-(Interval::exact(1.0) / order)).ln_1p();
    divergence + ln_ratio - (order.ln() + ln_delta) / (order - 1.0)
}

/// The bound on `ln δ` that the Rényi divergence of one order α gives at ε,
/// `(α − 1)(divergence − ε) + α ln(1 − 1/α) − ln(α − 1)`.
///
/// Reference: Proposition 12 of \[CKS20\].
pub(crate) fn ln_delta_at_order(order: f64, divergence: Interval, epsilon: f64) -> Interval {
    let order = Interval::exact(order);
    let ln_ratio = (-(Interval::exact(1.0) / order)).ln_1p();
    (order - 1.0) * (divergence - epsilon) + order * ln_ratio - (order - 1.0).ln()
}

/// Smallest ε that the conversion over all real orders `α > 1` proves for ρ-zCDP at δ.
///
/// `ε = inf_α  αρ + ln(1 − 1/α) − ln(αδ)/(α − 1)`; the best order solves `ρ(α − 1)² = ln(1/(αδ))`.
///
/// Guarantee: rounded up. Every order proves a valid bound, so an order that is only nearly the best costs
/// tightness, never truth.
/// Errors: ρ not positive and finite, or so large that ε overflows; δ outside (0, 1).
pub fn epsilon(rho: f64, delta: f64) -> Result<f64> {
    check_positive("rho", rho)?;
    check_delta(delta)?;
    let ln_delta = Interval::exact(delta).ln();
    let excess = search::first_true(0.0, 1e300, |x| rho * x * x + ln_delta.hi + libm::log1p(x) >= 0.0);
    // An order this close to 1 proves nothing; the next floating-point orders are as good.
    let order = (1.0 + excess).max(1.0 + 4.0 * f64::EPSILON);
    let epsilon = epsilon_at_order(order, Interval::exact(rho) * order, ln_delta).hi.max(0.0);
    if epsilon.is_infinite() {
        return Err(Error::argument("rho", shown(rho), "its epsilon is too large to be a number"));
    }
    Ok(epsilon)
}

/// `ε = ρ + 2√(ρ ln(1/δ))`, the plain conversion.
///
/// Guarantee: rounded up; never below [`epsilon`].
/// Errors: as [`epsilon`].
///
/// Reference: Proposition 1.3 of \[BS16\].
pub fn epsilon_simple(rho: f64, delta: f64) -> Result<f64> {
    check_positive("rho", rho)?;
    check_delta(delta)?;
    let epsilon = ((-Interval::exact(delta).ln() * rho).sqrt() * 2.0 + rho).hi;
    if epsilon.is_infinite() {
        return Err(Error::argument("rho", shown(rho), "its epsilon is too large to be a number"));
    }
    Ok(epsilon)
}

/// Smallest δ that the conversion over all real orders proves for ρ-zCDP at ε.
///
/// Guarantee: rounded up; at most 1 and never zero.
/// Errors: ρ or ε not positive and finite.
pub fn delta(rho: f64, epsilon: f64) -> Result<f64> {
    check_positive("rho", rho)?;
    check_epsilon(epsilon)?;
    // The derivative (2α − 1)ρ − ε + ln(1 − 1/α) grows with α; x = α − 1, ln(1 − 1/α) = −ln(1 + 1/x).
    let excess =
        search::first_true(0.0, 1e300, |x| (2.0 * x + 1.0) * rho - epsilon - libm::log1p(1.0 / x) >= 0.0);
    let order = (1.0 + excess).max(1.0 + 4.0 * f64::EPSILON);
    let ln = ln_delta_at_order(order, Interval::exact(rho) * order, epsilon);
    Ok(ln.exp().hi.min(1.0))
}

/// Largest ρ whose [`epsilon`] at δ is at most ε.
///
/// Guarantee: rounded down; `epsilon(result, delta) ≤ epsilon` as evaluated.
/// Errors: ε not positive and finite, δ outside (0, 1).
pub fn rho_for(epsilon: f64, delta: f64) -> Result<f64> {
    check_epsilon(epsilon)?;
    check_delta(delta)?;
    let holds = |rho: f64| self::epsilon(rho, delta).is_ok_and(|e| e <= epsilon);
    // The plain conversion solved for ρ, ε²/(√(L + ε) + √L)², is never above; half of it is safely below.
    let ln = -Interval::exact(delta).ln();
    let sum = ln.sqrt() + (ln + epsilon).sqrt();
    let below = (Interval::exact(epsilon) / sum).square().lo * 0.5;
    let mut above = 4.0 * below;
    while holds(above) && above < f64::MAX / 4.0 {
        above *= 2.0;
    }
    Ok(-search::first_true(-above, -below, |negative| holds(-negative)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::accounting::gaussian;
    use proptest::prelude::*;

    #[test]
    fn golden_noise_multipliers() {
        // golden/PROVENANCE.md, ε of the Gaussian mechanism by zCDP: optimal order, then the simple conversion.
        let rows = [
            (0.341, 18.688, 19.715),
            (0.682, 8.100, 8.782),
            (1.364, 3.687, 4.123),
            (2.728, 1.726, 1.994),
            (5.456, 0.820, 0.980),
        ];
        for (sigma, optimal, simple) in rows {
            let rho = rho(1.0 / sigma).unwrap();
            assert!((epsilon(rho, 1e-6).unwrap() - optimal).abs() < 6e-4, "{sigma}");
            assert!((epsilon_simple(rho, 1e-6).unwrap() - simple).abs() < 6e-4, "{sigma}");
        }
    }

    proptest! {
        #[test]
        fn no_order_does_better(ln_rho in -18.0..9.0_f64, exponent in -300.0..-0.2_f64, ln_excess in -6.0..16.0_f64) {
            let (rho, delta_) = (ln_rho.exp(), 10f64.powf(exponent));
            let best = epsilon(rho, delta_).unwrap();
            let order = 1.0 + ln_excess.exp();
            let other = epsilon_at_order(order, Interval::exact(rho) * order, Interval::exact(delta_).ln());
            prop_assert!(best <= other.hi.max(0.0) * (1.0 + 1e-9) + 1e-12, "{best} {other:?}");
            if best > 1e-9 {
                let back = delta(rho, best).unwrap();
                prop_assert!((back.ln() / delta_.ln() - 1.0).abs() < 1e-9 * (1.0 + rho), "{back} {delta_}");
                let other = ln_delta_at_order(order, Interval::exact(rho) * order, best);
                prop_assert!(back.ln() <= other.hi + 1e-9 * other.hi.abs());
            }
        }

        #[test]
        fn between_the_exact_and_the_simple(ln_mu in -9.0..4.0_f64, exponent in -300.0..-0.3_f64) {
            let (mu, delta) = (ln_mu.exp(), 10f64.powf(exponent));
            let rho = rho(mu).unwrap();
            let e = epsilon(rho, delta).unwrap();
            prop_assert!(gaussian::epsilon(mu, delta).unwrap() <= e);
            prop_assert!(e <= epsilon_simple(rho, delta).unwrap());
            prop_assert!((gaussian_mu(rho).unwrap() / mu - 1.0).abs() < 1e-15 * 8.0);
        }

        #[test]
        fn rho_inverts_epsilon(ln_epsilon in -7.0..9.0_f64, exponent in -300.0..-0.3_f64) {
            let (target, delta) = (ln_epsilon.exp(), 10f64.powf(exponent));
            let rho = rho_for(target, delta).unwrap();
            prop_assert!(epsilon(rho, delta).unwrap() <= target);
            prop_assert!(epsilon(rho * (1.0 + 1e-9), delta).unwrap() > target * (1.0 - 1e-12));
        }
    }

    #[test]
    fn bad_input_is_named() {
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(epsilon(bad, 1e-6).unwrap_err().to_string().starts_with("rho is"));
            assert!(delta(1.0, bad).unwrap_err().to_string().starts_with("epsilon is"));
            assert!(rho(bad).unwrap_err().to_string().starts_with("mu is"));
        }
        assert!(epsilon(1.0, 1.0).unwrap_err().to_string().starts_with("delta is 1,"));
        assert!(rho_for(1.0, 0.0).unwrap_err().to_string().starts_with("delta is 0,"));
        assert!(epsilon(f64::MAX, 1e-6).unwrap_err().to_string().contains("too large"));
    }
}
