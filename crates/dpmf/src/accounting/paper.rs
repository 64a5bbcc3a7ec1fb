//! The closed form of the paper's privacy theorem, kept for comparison with what it prints.
//!
//! `σ² = (2 ln(1/δ) + ε)/ε²` for unit sensitivity. It is weaker than the plain zCDP conversion it rests on:
//! with `L = ln(1/δ)`, that one asks for `ρ ≤ ε²/(√(L + ε) + √L)²`, and `(√(L + ε) + √L)² ≤ 2(2L + ε)`.
//! (The proof prints `ρ = γ²ζ²/σ²`; a Gaussian has half of that.)
//!
//! Reference: Theorem 3.1 of \[DMRST22\].

use super::interval::Interval;
use super::{check_delta, check_epsilon, check_positive, shown};
use crate::error::{Error, Result};

/// ε of the closed form: the positive root of `σ²ε² − ε − 2 ln(1/δ) = 0` at `σ = 1/μ`.
///
/// Guarantee: rounded up.
/// Errors: `μ` not positive and finite, or so large that ε overflows; δ outside (0, 1).
pub fn epsilon(mu: f64, delta: f64) -> Result<f64> {
    check_positive("mu", mu)?;
    check_delta(delta)?;
    // ε = (μ² + √(μ⁴ + 8 μ² L))/2 = μ (μ + √(μ² + 8 L))/2, every operation rounded up.
    let mu = Interval::exact(mu);
    let root = (mu.square() - Interval::exact(delta).ln() * 8.0).sqrt();
    let epsilon = (mu * (mu + root) * 0.5).hi;
    if epsilon.is_infinite() {
        return Err(Error::argument("mu", shown(mu.hi), "its epsilon is too large to be a number"));
    }
    Ok(epsilon)
}

/// δ of the closed form, `exp(−(ε²/μ² − ε)/2)`, at most 1.
///
/// Guarantee: rounded up.
/// Errors: `μ` or `ε` not positive and finite.
pub fn delta(mu: f64, epsilon: f64) -> Result<f64> {
    check_positive("mu", mu)?;
    check_epsilon(epsilon)?;
    let exponent = ((Interval::exact(epsilon) / mu).square() - epsilon) * 0.5;
    Ok((-exponent).exp().hi.min(1.0))
}

/// `μ = ε/√(2 ln(1/δ) + ε)`, the reciprocal of the theorem's noise multiplier.
///
/// Guarantee: rounded down.
/// Errors: ε not positive and finite, δ outside (0, 1).
pub fn mu(epsilon: f64, delta: f64) -> Result<f64> {
    check_epsilon(epsilon)?;
    check_delta(delta)?;
    let variance = -Interval::exact(delta).ln() * 2.0 + epsilon;
    Ok((Interval::exact(epsilon) / variance.sqrt()).lo)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::accounting::{gaussian, zcdp};
    use proptest::prelude::*;

    #[test]
    fn golden_noise_multipliers() {
        // golden/PROVENANCE.md, ε of the Gaussian mechanism by the closed form of the paper.
        let rows = [(0.341, 20.303), (0.682, 8.857), (1.364, 4.132), (2.728, 1.995), (5.456, 0.980)];
        for (sigma, expected) in rows {
            let epsilon = epsilon(1.0 / sigma, 1e-6).unwrap();
            assert!((epsilon - expected).abs() < 6e-4, "{sigma}: {epsilon}");
        }
    }

    proptest! {
        #[test]
        fn the_three_forms_agree_and_never_beat_the_accountants(ln_mu in -9.0..4.0_f64, exponent in -300.0..-0.1_f64) {
            let (m, d) = (ln_mu.exp(), 10f64.powf(exponent));
            let e = epsilon(m, d).unwrap();
            prop_assert!((mu(e, d).unwrap() / m - 1.0).abs() < 1e-12);
            prop_assert!((delta(m, e).unwrap().ln() / d.ln() - 1.0).abs() < 1e-10);
            prop_assert!(zcdp::epsilon_simple(m * m / 2.0, d).unwrap() <= e * (1.0 + 1e-12));
            prop_assert!(gaussian::epsilon(m, d).unwrap() <= e);
        }
    }
}
