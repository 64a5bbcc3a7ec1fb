//! Honest mechanisms keep their promise, broken ones are caught.

use super::adversary::Informed;
use super::*;
use crate::accounting::{Accountant, Adjacency, Amplification, Calibration, Terms, gaussian};
use crate::participation::Participation;
use faer::Mat;

/// `C` of the square-root factorization of the prefix sum: Toeplitz with coefficients `binom(2k, k)/4ᵏ`.
fn encoder(n: usize) -> Mat<f64> {
    let mut c = vec![1.0; n];
    for k in 1..n {
        c[k] = c[k - 1] * (2 * k - 1) as f64 / (2 * k) as f64;
    }
    Mat::from_fn(n, n, |i, j| if i >= j { c[i - j] } else { 0.0 })
}

/// `C⁻¹` of a lower-triangular matrix by forward substitution.
pub(super) fn inverse(c: &Mat<f64>) -> Mat<f64> {
    let n = c.nrows();
    let mut inverse = Mat::<f64>::identity(n, n);
    for j in 0..n {
        for i in j..n {
            let known: f64 = (j..i).map(|k| c[(i, k)] * inverse[(k, j)]).sum();
            inverse[(i, j)] = (inverse[(i, j)] - known) / c[(i, i)];
        }
    }
    inverse
}

fn sensitivity(c: &Mat<f64>) -> f64 {
    (0..c.ncols()).map(|j| c.col(j).norm_l2()).fold(0.0, f64::max)
}

fn calibrated(epsilon: f64, sensitivity: f64, clip: f64, adjacency: Adjacency) -> Calibration {
    Terms {
        adjacency,
        accountant: Accountant::Exact,
        sampled: Amplification::None,
        sensitivity,
        clip,
        beside: None,
    }
    .calibrate_noise(epsilon, 1e-6)
    .unwrap()
}

fn options(trials: u64) -> AuditOptions {
    AuditOptions { trials, seed: 20_220_216, ..Default::default() }
}

#[test]
fn honest_mechanisms_are_audited_to_within_eight_percent() {
    let n = 16;
    let c = encoder(n);
    for epsilon in [1.0, 4.0] {
        let calibration = calibrated(epsilon, sensitivity(&c), 0.3, Adjacency::ReplaceWithZero);
        let mechanism = MatrixMechanism::new(inverse(&c), calibration.noise_std(), 1).unwrap();
        let neighbours = Neighbours::single(Adjacency::ReplaceWithZero, 0.3).unwrap();
        let model = mechanism.noise_model().unwrap();
        let adversary = Informed::worst_column(&model, &neighbours, mechanism.dimension());
        assert!((adversary.mu() / calibration.mu().unwrap() - 1.0).abs() < 1e-8);
        let promise = Promise::try_from(&calibration).unwrap();
        let report = audit(&mechanism, &adversary, &neighbours, promise, options(1_000_000)).unwrap();
        // The measured point lies on the promised trade-off curve; α = 1e-5 for its two rates.
        let (alpha, beta) = (report.test.false_positive_rate(), report.test.false_negative_rate());
        assert!(
            (gaussian::trade_off(promise.mu, alpha).unwrap() - beta).abs() < 9.0 * (0.25_f64 / 1e6).sqrt()
        );
        assert!(report.epsilon_lower > 0.92 * epsilon && report.epsilon_lower <= epsilon, "{report:?}");
        assert!(report.epsilon_assumption_free > 0.3 && !report.refuted(), "{report:?}");
    }
}

#[test]
fn adaptive_adversaries_gain_nothing_and_lose_nothing() {
    // C = 0.8 I + 0.6 P with P the cyclic shift: columns of norm 1, so that waiting costs an adversary nothing, and
    // neither C nor N triangular, so that adaptive privacy is not plain to see (Theorem 2.1).
    let n = 12;
    let c = Mat::from_fn(n, n, |i, j| {
        if i == j {
            0.8
        } else if (i + 1) % n == j {
            0.6
        } else {
            0.0
        }
    });
    let coloring = {
        // The circulant inverse, column by column, from the Neumann series of 0.8 (I + 0.75 P).
        Mat::from_fn(n, n, |i, j| {
            let k = (j + n - i) % n;
            (-0.75_f64).powi(k as i32) / (0.8 * (1.0 - 0.75_f64.powi(n as i32)))
        })
    };
    assert!((&coloring * &c - Mat::<f64>::identity(n, n)).norm_max() < 1e-12);
    for adjacency in [Adjacency::ReplaceWithZero, Adjacency::ReplaceOne] {
        let calibration = calibrated(4.0, 1.0, 2.0, adjacency);
        let mechanism = MatrixMechanism::new(coloring.clone(), calibration.noise_std(), 2).unwrap();
        let neighbours = Neighbours::single(adjacency, 2.0).unwrap();
        let model = mechanism.noise_model().unwrap();
        for adversary in [
            Informed::first_answer(&model, &neighbours, mechanism.dimension()),
            Informed::descent(&model, &neighbours, mechanism.dimension()),
        ] {
            let promise = Promise::try_from(&calibration).unwrap();
            let report = audit(&mechanism, &adversary, &neighbours, promise, options(200_000)).unwrap();
            assert!(report.epsilon_lower > 3.8 && report.epsilon_lower <= 4.0, "{report:?}");
        }
    }
}

/// Audits a mechanism against a promise it may not keep.
fn caught(coloring: Mat<f64>, noise_std: f64, clip: f64, promise: &Calibration, trials: u64) -> AuditReport {
    let mechanism = MatrixMechanism::new(coloring, noise_std, 1).unwrap();
    let neighbours = Neighbours::single(Adjacency::ReplaceWithZero, clip).unwrap();
    let model = mechanism.noise_model().unwrap();
    let adversary = Informed::worst_column(&model, &neighbours, mechanism.dimension());
    let report =
        audit(&mechanism, &adversary, &neighbours, promise.try_into().unwrap(), options(trials)).unwrap();
    assert_eq!(report.refuted(), report.epsilon_lower > report.promise.epsilon);
    report
}

#[test]
fn understated_sensitivity_is_caught() {
    let c = encoder(16);
    for epsilon in [1.0, 4.0] {
        let claimed = calibrated(epsilon, sensitivity(&c) * 0.9, 1.0, Adjacency::ReplaceWithZero);
        let report = caught(inverse(&c), claimed.noise_std(), 1.0, &claimed, 1_000_000);
        assert!(report.refuted(), "{report:?}");
        // The truth: μ/0.9.
        assert!(
            report.mu_lower > claimed.mu().unwrap() && report.mu_lower < claimed.mu().unwrap() / 0.9,
            "{report:?}"
        );
    }
}

#[test]
fn noise_repeated_past_the_horizon_is_caught() {
    // Built for 16 steps, run for 17: the last row of N serves twice.
    let c = encoder(16);
    let claimed = calibrated(1.0, sensitivity(&c), 1.0, Adjacency::ReplaceWithZero);
    let n = inverse(&c);
    let overrun = Mat::from_fn(17, 16, |i, j| n[(i.min(15), j)]);
    let report = caught(overrun, claimed.noise_std(), 1.0, &claimed, 20_000);
    assert!(report.epsilon_lower > 10.0 * report.promise.epsilon, "{report:?}");
    // So bad that it shows without assumptions.
    assert!(report.epsilon_assumption_free > report.promise.epsilon);
}

#[test]
fn normalised_rows_instead_of_columns_are_caught() {
    let c = encoder(16);
    let rows = Mat::from_fn(16, 16, |i, j| c[(i, j)] / c.row(i).norm_l2());
    assert!(sensitivity(&rows) > 1.2);
    let claimed = calibrated(1.0, 1.0, 1.0, Adjacency::ReplaceWithZero);
    let report = caught(inverse(&rows), claimed.noise_std(), 1.0, &claimed, 200_000);
    assert!(report.refuted(), "{report:?}");
}

#[test]
fn noise_that_ignores_the_clip_is_caught() {
    let c = encoder(16);
    let claimed = calibrated(1.0, sensitivity(&c), 1.5, Adjacency::ReplaceWithZero);
    let unscaled = claimed.noise_multiplier() * sensitivity(&c);
    let report = caught(inverse(&c), unscaled, 1.5, &claimed, 200_000);
    assert!(report.refuted() && report.mu_lower > 1.3 * claimed.mu().unwrap(), "{report:?}");
}

#[test]
fn the_audit_does_not_depend_on_threads() {
    let c = encoder(8);
    let claimed = calibrated(4.0, sensitivity(&c), 1.0, Adjacency::ReplaceWithZero);
    let mechanism = MatrixMechanism::new(inverse(&c), claimed.noise_std(), 1).unwrap();
    let neighbours = Neighbours::single(Adjacency::ReplaceWithZero, 1.0).unwrap();
    let model = mechanism.noise_model().unwrap();
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let adversary = Informed::worst_column(&model, &neighbours, mechanism.dimension());
        pool.install(|| {
            audit(&mechanism, &adversary, &neighbours, (&claimed).try_into().unwrap(), options(10_001))
                .unwrap()
        })
    };
    let (one, three) = (run(1), run(3));
    assert_eq!(one, three);
    assert_eq!(one.test.first_games + one.test.second_games, 10_001);
}

#[test]
fn a_bound_fails_no_more_often_than_it_says() {
    // 300 audits at confidence 90 %: each μ bound exceeds the truth with probability ≤ 10 %. α = 1e-4: at most 55.
    let mechanism = MatrixMechanism::new(Mat::identity(1, 1), 1.0, 1).unwrap();
    let neighbours = Neighbours::single(Adjacency::ReplaceWithZero, 1.0).unwrap();
    let model = mechanism.noise_model().unwrap();
    let adversary = Informed::worst_column(&model, &neighbours, mechanism.dimension());
    let promise = Promise { epsilon: gaussian::epsilon(1.0, 1e-6).unwrap(), delta: 1e-6, mu: 1.0 };
    let bounds: Vec<f64> = (0..300)
        .map(|seed| {
            let options = AuditOptions { trials: 1000, confidence: 0.9, seed };
            audit(&mechanism, &adversary, &neighbours, promise, options).unwrap().mu_lower
        })
        .collect();
    let above = |mu: f64| bounds.iter().filter(|&&bound| bound > mu).count();
    assert!(above(1.0) <= 55, "{} of 300", above(1.0));
    // Power: the bound is not vacuous.
    assert!(above(0.6) >= 285, "{} of 300", above(0.6));
}

/// The largest `Σ|X_ij|`, or `Σ X_ij`, over the phases of `epochs` passes.
fn gram_sum(c: &Mat<f64>, epochs: usize, entry: fn(f64) -> f64) -> f64 {
    let (n, x) = (c.ncols(), c.transpose() * c);
    let b = n.div_ceil(epochs);
    let phase = |p: usize| -> f64 {
        let steps: Vec<usize> = (p..n).step_by(b).collect();
        steps.iter().flat_map(|&i| steps.iter().map(move |&j| (i, j))).map(|(i, j)| entry(x[(i, j)])).sum()
    };
    (0..b).map(phase).fold(0.0, f64::max)
}

/// Four epochs of the square-root factorization, whose Gram matrix is positive: one direction throughout is best.
#[test]
fn several_participations_are_audited_to_within_ten_percent_and_one_is_not_enough() {
    let (n, epochs) = (16, 4);
    let c = encoder(n);
    let adjacency = Adjacency::ReplaceWithZero;
    let neighbours = Neighbours::new(Participation::Epochs { times: epochs }, n, adjacency, 1.0).unwrap();
    let play = |gamma: f64, kind, trials| {
        let calibration = calibrated(2.0, gamma, 1.0, adjacency);
        let mechanism = MatrixMechanism::new(inverse(&c), calibration.noise_std(), 1).unwrap();
        let model = mechanism.noise_model().unwrap();
        let adversary = Informed::of(kind, &model, &neighbours, 1);
        let promise = Promise::try_from(&calibration).unwrap();
        audit(&mechanism, &adversary, &neighbours, promise, options(trials)).unwrap()
    };
    let gamma = gram_sum(&c, epochs, f64::abs).sqrt();
    let honest = play(gamma, AdversaryKind::WorstColumn, 1_000_000);
    assert!(!honest.refuted() && honest.epsilon_lower > 0.9 * 2.0, "{honest:?}");
    for kind in AdversaryKind::ALL {
        let report = play(gamma, kind, 50_000);
        assert!(!report.refuted(), "{report:?}");
        // Planted: the sensitivity of one participation.
        let report = play(sensitivity(&c), kind, 50_000);
        assert!(report.refuted() && report.epsilon_lower > 3.0, "{kind:?}: {report:?}");
    }
}

/// Where steps of one unit are negatively correlated in `C`, contributions of changing sign show more than equal ones. A
/// sensitivity without absolute values misses them.
#[test]
fn signs_are_found_and_a_sensitivity_without_absolute_values_is_refuted() {
    let (n, epochs) = (12, 3);
    let b = n / epochs;
    let c = Mat::from_fn(n, n, |i, j| match i.checked_sub(j) {
        Some(0) => 1.0,
        Some(lag) if lag == b => -0.6,
        _ => 0.0,
    });
    let adjacency = Adjacency::ReplaceOne;
    let neighbours = Neighbours::new(Participation::Epochs { times: epochs }, n, adjacency, 0.5).unwrap();
    let play = |gamma: f64, kind| {
        let calibration = calibrated(3.0, gamma, 0.5, adjacency);
        let mechanism = MatrixMechanism::new(inverse(&c), calibration.noise_std(), 3).unwrap();
        let model = mechanism.noise_model().unwrap();
        let adversary = Informed::of(kind, &model, &neighbours, 3);
        let promise = Promise::try_from(&calibration).unwrap();
        let mu = adversary.mu() / promise.mu;
        (audit(&mechanism, &adversary, &neighbours, promise, options(100_000)).unwrap(), mu)
    };
    let (with, without) = (gram_sum(&c, epochs, f64::abs).sqrt(), gram_sum(&c, epochs, |x| x).sqrt());
    assert!(without < 0.7 * with);
    for kind in AdversaryKind::ALL {
        let (report, mu) = play(with, kind);
        assert!(!report.refuted() && (0.9..1.0 + 1e-6).contains(&mu), "{kind:?} {mu}: {report:?}");
        let (report, _) = play(without, kind);
        assert!(report.refuted(), "{kind:?}: {report:?}");
    }
}

/// Three steps, each pair with `X_ij = −ρ`: in one dimension two signs must agree, `Q = 3 + 2ρ`; in two, the directions are
/// a third of a turn apart, `Q = 3 + 3ρ`.
#[test]
fn vectors_are_stronger_than_signs() {
    let rho = 0.3_f64;
    let a = (1.0 + rho).sqrt();
    let shift = (-2.0 * a + (4.0 * a * a - 12.0 * rho).sqrt()) / 6.0;
    let shape = |x: f64, y: f64| Mat::from_fn(3, 3, |i, j| if i == j { x + y } else { y });
    let mechanism = MatrixMechanism::new(shape(1.0 / a, -shift / (a * (a + 3.0 * shift))), 1.0, 2).unwrap();
    let model = mechanism.noise_model().unwrap();
    let participation = Participation::MinSeparation { separation: 1, times: None };
    let neighbours = Neighbours::new(participation, 3, Adjacency::ReplaceWithZero, 1.0).unwrap();
    for (dimension, strength) in [(1, 3.0 + 2.0 * rho), (2, 3.0 + 3.0 * rho)] {
        let mu = Informed::worst_column(&model, &neighbours, dimension).mu();
        assert!((mu * mu - strength).abs() < 1e-6, "{dimension}: {mu}");
    }
}
