//! Brackets against closed forms, against each other, and at the ends of their domain.

use super::*;
use crate::accounting::{Accountant, Adjacency, PrivacyCurve, gaussian, poisson_noise_multiplier};
use proptest::prelude::*;

fn phase(noise_multiplier: f64, rate: f64, rounds: u64) -> Phase {
    Phase { noise_multiplier, rate, rounds }
}

fn curve(noise_multiplier: f64, rate: f64, rounds: u64) -> PoissonCurve {
    PoissonCurve::new(&[phase(noise_multiplier, rate, rounds)]).unwrap()
}

/// The phases as they are, Gaussians not taken together.
fn unmerged(phases: &[Phase]) -> PoissonCurve {
    PoissonCurve { phases: phases.into(), merged: phases.into() }
}

/// δ of one round in closed form: where a record is removed, where one is added.
fn one_round(sigma: f64, q: f64, epsilon: f64) -> f64 {
    let tail = |x: f64| 0.5 * libm::erfc(x / 2f64.sqrt());
    // The z at which the loss is `loss`.
    let place = |loss: f64| sigma * ((loss.exp_m1() + q) / q).ln() + 0.5 / sigma;
    let z = place(epsilon);
    let (null, other) = (tail(z), (1.0 - q) * tail(z) + q * tail(z - 1.0 / sigma));
    let removed = other - epsilon.exp() * null;
    let added = if (-epsilon).exp() > 1.0 - q {
        let z = place(-epsilon);
        tail(-z) - epsilon.exp() * ((1.0 - q) * tail(-z) + q * tail(1.0 / sigma - z))
    } else {
        0.0
    };
    removed.max(added)
}

#[test]
fn without_sampling_it_is_the_gaussian() {
    for (sigma, rounds, delta) in [
        (1.0, 1, 1e-5),
        (2.0, 10, 1e-12),
        (0.3, 1, 1e-3),
        (20.0, 1000, 1e-8),
        (0.5, 100, 1e-14),
        (1e3, 1, 1e-14),
    ] {
        let exact = gaussian::epsilon((rounds as f64).sqrt() / sigma, delta).unwrap();
        for width in [1e-2, 1e-3, 1e-4] {
            let found = unmerged(&[phase(sigma, 1.0, rounds)]).epsilon_bracket(delta, width).unwrap();
            assert!(
                found.lower <= exact && exact <= found.upper,
                "{sigma} {rounds} {delta}: {found:?} {exact}"
            );
            assert!(found.width() <= width, "{sigma} {rounds} {delta}: {found:?}");
        }
        let delta_found = unmerged(&[phase(sigma, 1.0, rounds)]).delta_bracket(exact, 1e-3).unwrap();
        assert!(
            delta_found.lower <= delta && delta <= delta_found.upper * (1.0 + 1e-9),
            "{delta_found:?} {delta}"
        );
    }
}

#[test]
fn one_round_in_closed_form() {
    for (sigma, rate) in [(0.3, 0.1), (0.7, 1e-3), (1.0, 0.5), (3.0, 0.9), (0.1, 1e-2), (2.0, 1e-4)] {
        for epsilon in [0.01, 0.1, 0.5, 2.0, 6.0] {
            let exact = one_round(sigma, rate, epsilon);
            let found = curve(sigma, rate, 1).delta_bracket(epsilon, 1e-4).unwrap();
            let slack = 1e-13;
            assert!(
                found.lower <= exact + slack && exact <= found.upper + slack,
                "{sigma} {rate} {epsilon}: {found:?} {exact:e}"
            );
            if exact > 1e-12 && exact < 0.1 {
                let found = curve(sigma, rate, 1).epsilon_bracket(exact, 1e-4).unwrap();
                let slack = 1e-9 * epsilon;
                assert!(
                    found.lower <= epsilon + slack && epsilon <= found.upper + slack,
                    "{found:?} {epsilon}"
                );
                // Where δ hardly moves with ε, no δ is known well enough.
                assert!(found.width() <= 1e-4 || exact > 1e-3, "{sigma} {rate} {epsilon}: {found:?}");
            }
        }
    }
}

#[test]
fn golden_values() {
    // dp-accounting 0.6.0, from_gaussian_mechanism with value_discretization_interval 1e-4, pessimistic.
    let rows = [
        (1.0, 0.01, 1000, 1e-5, 1.828_244),
        (0.8, 1.0 / 60.0, 600, 1e-5, 4.211_342),
        (0.5, 1e-3, 10_000, 1e-6, 6.346_137),
        (0.3, 0.1, 1, 1e-3, 10.255_488),
    ];
    for (sigma, rate, rounds, delta, epsilon) in rows {
        let found = curve(sigma, rate, rounds).epsilon_bracket(delta, 1e-3).unwrap();
        assert!((found.upper - epsilon).abs() < 1e-3 && found.width() <= 1e-3, "{found:?}");
    }
}

#[test]
fn phases_of_one_kind_are_one_phase() {
    let (delta, width) = (1e-6, 1e-3);
    let whole = curve(0.9, 0.02, 500).epsilon_bracket(delta, width).unwrap();
    let halves = [phase(0.9, 0.02, 250), phase(0.9, 0.02, 250)];
    assert_eq!(PoissonCurve::new(&halves).unwrap().epsilon_bracket(delta, width).unwrap(), whole);
    // Composed as different ones they agree within their brackets.
    let apart = unmerged(&halves).epsilon_bracket(delta, width).unwrap();
    assert!(apart.lower <= whole.upper && whole.lower <= apart.upper, "{apart:?} {whole:?}");
    assert!(apart.width() <= width);
    // Of different ones, each alone is more private.
    let mixed = PoissonCurve::new(&[phase(0.9, 0.02, 250), phase(1.5, 0.1, 100)]).unwrap();
    let mixed = mixed.epsilon_bracket(delta, width).unwrap();
    assert!(mixed.width() <= width, "{mixed:?}");
    assert!(mixed.lower > curve(0.9, 0.02, 250).epsilon(delta).unwrap());
    assert!(mixed.lower > curve(1.5, 0.1, 100).epsilon(delta).unwrap());
}

#[test]
fn gaussians_compose_with_sampled_rounds() {
    let sampled = PrivacyCurve::poisson(&[phase(1.0, 0.01, 200)], Adjacency::AddOrRemove).unwrap();
    let gaussian = PrivacyCurve::gaussian(0.8, Accountant::Exact).unwrap();
    let both = PrivacyCurve::compose(&[sampled.clone(), gaussian.clone(), gaussian.clone()]).unwrap();
    let found = both.epsilon_bracket(1e-6, 1e-3).unwrap();
    assert!(found.width() <= 1e-3);
    let two = PrivacyCurve::compose(&[gaussian.clone(), gaussian]).unwrap();
    let (one, other) = (sampled.epsilon(1e-6).unwrap(), two.epsilon(1e-6).unwrap());
    assert!(found.lower > other && found.upper < one + other, "{found:?} {one} {other}");
    // A Gaussian so small that it hardly counts.
    let small = PrivacyCurve::gaussian(1e-6, Accountant::Exact).unwrap();
    let with = PrivacyCurve::compose(&[sampled, small]).unwrap().epsilon_bracket(1e-6, 1e-3).unwrap();
    assert!(with.lower <= one + 1e-5 && one <= with.upper + 1e-4, "{with:?} {one}");
    let rdp = PrivacyCurve::gaussian(1.0, Accountant::Rdp).unwrap();
    let error = PrivacyCurve::compose(&[rdp, both]).unwrap_err().to_string();
    assert!(error.starts_with("accountant is rdp, but together with sampled steps"), "{error}");
}

#[test]
fn calibration_is_seen_to_hold_and_is_nearly_the_least() {
    for (rate, rounds, epsilon, delta) in [
        (1.0 / 60.0, 600, 1.0, 1e-5),
        (1.0 / 60.0, 600, 8.0, 1e-5),
        (0.1, 1, 0.5, 1e-6),
        (0.5, 20, 2.0, 1e-10),
    ] {
        let sigma = poisson_noise_multiplier(epsilon, delta, rate, rounds).unwrap();
        assert!(curve(sigma, rate, rounds).epsilon(delta).unwrap() <= epsilon);
        let less = curve(sigma * (1.0 - 1e-4), rate, rounds).epsilon_bracket(delta, 1e-5).unwrap();
        assert!(less.lower > epsilon, "{rate} {rounds} {epsilon}: {sigma} {less:?}");
        assert_eq!(sigma, poisson_noise_multiplier(epsilon, delta, rate, rounds).unwrap());
    }
    // Without sampling it is the Gaussian's calibration.
    let sigma = poisson_noise_multiplier(2.0, 1e-6, 1.0, 4).unwrap();
    let once =
        crate::accounting::calibrate::noise_multiplier(2.0, 1e-6, Adjacency::AddOrRemove, Accountant::Exact);
    assert!((sigma / (2.0 * once.unwrap()) - 1.0).abs() < 1e-12);
}

#[test]
fn extremes_answer() {
    for sigma in [0.1, 1.0, 1e3] {
        for rate in [1e-6, 1e-2, 0.999] {
            for rounds in [1, 1_000_000] {
                for delta in [1e-2, 1e-14] {
                    let found = curve(sigma, rate, rounds).epsilon_bracket(delta, 1.0).unwrap();
                    assert!(
                        found.lower <= found.upper && found.upper.is_finite() && found.lower >= 0.0,
                        "{sigma} {rate} {rounds} {delta}: {found:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn delta_far_out_is_bounded() {
    let found = curve(1.0, 0.01, 10).delta_bracket(500.0, 1e-3).unwrap();
    assert!(found.lower == 0.0 && found.upper < 1e-30, "{found:?}");
    let found = curve(10.0, 1e-6, 1).delta_bracket(1e-9, 1e-3).unwrap();
    assert!(found.lower <= found.upper && found.upper < 1e-6, "{found:?}");
}

/// Losses of a round are lost to rounding here; the same rounds without sampling are a bound all the same.
#[test]
fn budgets_too_small_to_compose_have_the_answer_without_sampling() {
    let (sigma, rounds, delta) = (1e6, 1000_u32, 1e-15);
    let unsampled = gaussian::epsilon(f64::from(rounds).sqrt() / sigma * (1.0 + 1e-12), delta).unwrap();
    let found = curve(sigma, 0.01, u64::from(rounds)).epsilon(delta).unwrap();
    assert!(found > 0.0 && found <= unsampled, "{found} {unsampled}");
}

#[test]
fn bad_input_is_named() {
    let message = |p: &[Phase]| PoissonCurve::new(p).unwrap_err().to_string();
    assert!(message(&[]).starts_with("phases is 0, but"));
    assert!(message(&[phase(0.0, 0.5, 1)]).starts_with("noise multiplier is 0, but"));
    assert!(message(&[phase(0.01, 0.5, 1)]).contains("with sampling it must lie between"));
    for bad in [0.0, 1.5, -0.1, f64::NAN] {
        assert!(message(&[phase(1.0, bad, 1)]).starts_with("rate is"));
    }
    assert!(message(&[phase(1.0, 0.5, 0)]).starts_with("rounds is 0, but"));
    let one = curve(1.0, 0.5, 1);
    assert!(one.epsilon(1.0).unwrap_err().to_string().starts_with("delta is 1,"));
    assert!(one.epsilon_bracket(0.1, 0.0).unwrap_err().to_string().starts_with("width is 0,"));
    assert!(one.delta(f64::NAN).unwrap_err().to_string().starts_with("epsilon is NaN"));
    let refused =
        PrivacyCurve::poisson(&[phase(1.0, 0.5, 1)], Adjacency::ReplaceOne).unwrap_err().to_string();
    assert!(refused.starts_with("the relation replace-one with sampling"), "{refused}");
    // Without sampling it costs twice.
    let twice = PrivacyCurve::poisson(&[phase(1.0, 1.0, 1)], Adjacency::ReplaceOne).unwrap();
    assert!((twice.mu().unwrap() - 2.0).abs() < 1e-14);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn more_noise_fewer_rounds_and_rarer_sampling_are_more_private(
        ln_sigma in -1.0..2.0_f64, ln_rate in -7.0..-0.1_f64, rounds in 1..2000_u64, exponent in -12.0..-3.0_f64,
    ) {
        let (sigma, rate, delta) = (ln_sigma.exp(), ln_rate.exp(), 10f64.powf(exponent));
        let width = 1e-2;
        let at = |sigma, rate, rounds| curve(sigma, rate, rounds).epsilon_bracket(delta, width).unwrap();
        let found = at(sigma, rate, rounds);
        // An ε of thousands has no more digits on the largest grid.
        prop_assert!(found.lower <= found.upper && found.width() <= width.max(1e-5 * found.upper), "{found:?}");
        prop_assert!(at(sigma * 1.2, rate, rounds).lower <= found.upper);
        prop_assert!(at(sigma, rate * 0.8, rounds).lower <= found.upper);
        prop_assert!(at(sigma, rate, 2 * rounds).upper >= found.lower);
        // Sampling is never worse than none.
        let mu = (rounds as f64).sqrt() / sigma;
        prop_assert!(found.lower <= gaussian::epsilon(mu, delta).unwrap());
        // A finer bracket lies within the error of a coarse one, and δ inverts ε.
        let finer = curve(sigma, rate, rounds).epsilon_bracket(delta, 1e-3).unwrap();
        prop_assert!(finer.lower <= found.upper && found.lower <= finer.upper, "{finer:?} {found:?}");
        if finer.lower > 1e-3 {
            let back = curve(sigma, rate, rounds).delta_bracket(finer.upper, 1e-3).unwrap();
            prop_assert!(back.lower <= delta * (1.0 + 1e-9), "{back:?} {delta}");
            let back = curve(sigma, rate, rounds).delta_bracket(finer.lower, 1e-3).unwrap();
            prop_assert!(back.upper >= delta * (1.0 - 1e-9), "{back:?} {delta}");
        }
    }
}
