//! Honest mechanisms keep their promise, broken ones are caught.

use super::adversary::Informed;
use super::*;
use crate::accounting::{Accountant, Adjacency, Calibration, Terms, gaussian};
use crate::participation::Sampling;
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
fn inverse(c: &Mat<f64>) -> Mat<f64> {
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
    Terms { adjacency, accountant: Accountant::Exact, sampling: Sampling::None, sensitivity, clip }
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
        let adversary = Informed::worst_column(&model, &neighbours);
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
        for adversary in [Informed::first_answer(&model, &neighbours), Informed::descent(&model, &neighbours)]
        {
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
    let adversary = Informed::worst_column(&model, &neighbours);
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
        let adversary = Informed::worst_column(&model, &neighbours);
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
    let adversary = Informed::worst_column(&model, &neighbours);
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
