use super::*;
use crate::workload::{Average, Optimizer, Schedule};
use std::ops::ControlFlow;

fn quiet(_: &Progress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn solve_with(workload: &Workload, solver: Solver, iteration: Iteration, gap: f64) -> Optimum {
    let options = Options { gap, iteration, ..Options::default() };
    optimal(workload, solver, &options, &mut quiet).unwrap()
}

fn momentum(n: usize, beta: f64, schedule: &str) -> Workload {
    let optimizer = Optimizer { momentum: beta, ..Default::default() };
    Workload::sgd(schedule.parse::<Schedule>().unwrap().values(n), optimizer).unwrap()
}

/// Golden: certified optima of the prefix sum, from the closed two-sided bound; see golden/PROVENANCE.md.
#[test]
fn small_prefix_sums_reach_the_golden_loss() {
    for (n, loss) in [(3, 4.6078616), (4, 6.8741441), (8, 17.8661773), (16, 45.6653568), (32, 114.5597028)] {
        let found = solve_with(&Workload::prefix_sum(n).unwrap(), Solver::Dense, Iteration::Anderson, 1e-9);
        assert!((found.certificate.loss - loss).abs() < 1e-6, "{n}: {}", found.certificate.loss);
        assert!(found.certificate.lower_bound <= found.certificate.loss);
        assert!(found.certificate.gap <= 1e-9);
    }
}

#[test]
fn a_gap_of_any_size_may_be_asked_for() {
    for (solver, gap) in [(Solver::Linear, 0.5), (Solver::Dense, 64.0), (Solver::Linear, 1e300)] {
        let found = solve_with(&Workload::prefix_sum(8).unwrap(), solver, Iteration::Anderson, gap);
        assert!(found.certificate.lower_bound <= 17.8661773 && found.certificate.gap <= gap, "{gap}");
    }
}

/// The golden √loss, known to the given digits, lies between bound and loss, and these are close.
fn encloses(workload: &Workload, golden: f64, digit: f64) {
    let found = solve_with(workload, Solver::Linear, Iteration::Anderson, 1e-6).certificate;
    let (n, half) = (workload.steps(), 0.5 * digit);
    assert!(found.lower_bound.sqrt() <= golden + half, "{n}: {found:?}");
    assert!(found.loss.sqrt() >= golden - half, "{n}: {found:?}");
    assert!(found.gap <= 1e-6 && found.loss <= found.lower_bound * (1.0 + 1e-6), "{n}: {found:?}");
}

/// Golden: "prefix_sum_optimal_sqrt_loss" and "momentum_optimal_sqrt_loss_constant_schedule"; see
/// golden/PROVENANCE.md.
#[test]
fn larger_optima_enclose_the_golden_loss() {
    let golden = [
        (256, 40.390631, 1e-6),
        (512, 61.985199, 1e-6),
        (1024, 94.574464, 1e-6),
        (2048, 143.562585, 1e-6),
        (4096, 216.945401, 1e-6),
        (8192, 326.5304, 1e-4),
        (16384, 489.7225, 1e-4),
    ];
    for (n, loss, digit) in golden {
        encloses(&Workload::prefix_sum(n).unwrap(), loss, digit);
    }
    for (n, beta, loss, digit) in
        [(512, 0.9, 411.62442, 1e-5), (512, 0.95, 719.989262, 1e-6), (2048, 0.95, 1834.954978, 1e-6)]
    {
        encloses(&momentum(n, beta, "constant"), loss, digit);
    }
}

#[test]
#[ignore = "a million steps: half a minute"]
fn a_million_steps_enclose_the_golden_loss() {
    for (n, loss, digit) in [(65_536, 1091.4084, 1e-4), (100_000, 1390.39, 1e-2), (1_000_000, 5125.172, 1e-3)]
    {
        encloses(&Workload::prefix_sum(n).unwrap(), loss, digit);
    }
}

/// The filter before truncation and the singular value decomposition give one matrix.
#[test]
fn dense_rows_from_the_filter_equal_those_from_the_decomposition() {
    let nesterov = Optimizer { momentum: 0.9, nesterov: true, weight_decay: 0.01, ..Default::default() };
    let rates = "cosine:0.1".parse::<Schedule>().unwrap().values(40);
    let workloads = [
        Workload::prefix_sum(1).unwrap(),
        Workload::prefix_sum(64).unwrap(),
        momentum(50, 0.95, "cooldown:0.25:0.05"),
        Workload::sgd(rates, nesterov).unwrap(),
    ];
    for workload in workloads {
        let linear = solve_with(&workload, Solver::Linear, Iteration::Anderson, 1e-8);
        let decomposed = Optimum { solver: Solver::Dense, ..linear.clone() };
        let (filter, certificate) = linear.to_dense(&workload).unwrap();
        let (svd, _) = decomposed.to_dense(&workload).unwrap();
        let distance = (filter.coloring() - svd.coloring()).norm_max() / svd.coloring().norm_max();
        assert!(distance < 1e-8, "{} steps: {distance:e}", workload.steps());
        assert!(certificate.gap < 1.1e-8, "{certificate:?}");
    }
}

#[test]
fn one_and_two_steps_in_closed_form() {
    let one = solve_with(&Workload::prefix_sum(1).unwrap(), Solver::Dense, Iteration::Plain, 1e-11);
    assert!((one.certificate.loss - 1.0).abs() < 1e-11);
    // n = 2: X = [[1, c], [c, 1]], tr(SᵀS X⁻¹) = (3 − 2c)/(1 − c²) is least at c = (3 − √5)/2.
    let two = solve_with(&Workload::prefix_sum(2).unwrap(), Solver::Dense, Iteration::Relaxed, 1e-11);
    let c = (3.0 - 5.0_f64.sqrt()) / 2.0;
    assert!((two.certificate.loss - (3.0 - 2.0 * c) / (1.0 - c * c)).abs() < 1e-10);
}

#[test]
fn the_dual_variable_is_the_golden_one() {
    let found = solve_with(&Workload::prefix_sum(3).unwrap(), Solver::Dense, Iteration::Anderson, 1e-11);
    let sum: f64 = found.dual.v().iter().sum();
    let golden = [2.65186345, 1.25735178, 0.69864641];
    let golden_sum: f64 = golden.iter().sum();
    for (v, g) in found.dual.v().iter().zip(golden) {
        assert!((v / sum - g / golden_sum).abs() < 1e-6, "{:?}", found.dual);
    }
}

/// The outer loop is the same lines for every oracle, so the linear one counts for all.
#[test]
fn acceleration_pays_as_promised() {
    let iterations = |workload: &Workload, iteration| {
        solve_with(workload, Solver::Linear, iteration, 1e-6).certificate.iterations as f64
    };
    let workload = Workload::prefix_sum(512).unwrap();
    let anderson = iterations(&workload, Iteration::Anderson);
    assert!(iterations(&workload, Iteration::Relaxed) >= 2.5 * anderson);
    assert!(iterations(&workload, Iteration::Plain) >= 5.0 * anderson);
    let workload = momentum(512, 0.95, "constant");
    assert!(iterations(&workload, Iteration::Relaxed) >= 10.0 * iterations(&workload, Iteration::Anderson));
}

#[test]
fn all_solvers_agree_within_their_gaps() {
    let nesterov = Optimizer { momentum: 0.8, nesterov: true, ..Default::default() };
    let averaged = Optimizer { weight_decay: 0.1, average: Average::Uniform, ..Default::default() };
    let workloads = [
        Workload::prefix_sum(24).unwrap(),
        momentum(24, 0.9, "cooldown:0.25:0.05"),
        Workload::sgd(vec![0.5; 24], nesterov).unwrap(),
        Workload::sgd(vec![0.5; 24], averaged).unwrap(),
    ];
    for workload in &workloads {
        let fixed_point = solve_with(workload, Solver::Dense, Iteration::Anderson, 1e-9);
        for (solver, gap) in [(Solver::Newton, 1e-7), (Solver::Gradient, 1e-3)] {
            let rival = solve_with(workload, solver, Iteration::Anderson, gap);
            let ratio = rival.certificate.loss / fixed_point.certificate.loss;
            assert!(ratio > 1.0 - 2e-9 && ratio <= 1.0 + gap, "{solver:?}: {ratio}");
            assert!(rival.certificate.lower_bound <= fixed_point.certificate.loss);
            let (_, certificate) = rival.to_dense(workload).unwrap();
            assert!(certificate.gap <= 1.01 * gap + 1e-12);
        }
    }
}

#[test]
fn the_dense_factorization_attains_the_certified_loss() {
    for workload in [Workload::prefix_sum(64).unwrap(), momentum(64, 0.99, "cooldown:0.25:0.05")] {
        let found = solve_with(&workload, Solver::Dense, Iteration::Anderson, 1e-6);
        let (dense, certificate) = found.to_dense(&workload).unwrap();
        assert!(certificate.gap <= 1.1e-6 && certificate.gap > -1e-12, "{certificate:?}");
        let gamma = dense.encoder_column_norms_sq().into_iter().fold(0.0, f64::max);
        assert!((gamma - 1.0).abs() < 1e-12);
    }
}

/// A workload so badly scaled that f64 cannot certify it says how far it came.
#[test]
fn an_unreachable_gap_is_an_error_with_the_gap_reached() {
    let workload = momentum(64, 0.99, "exp:0.5");
    let options = Options { gap: 1e-13, ..Options::default() };
    let error = optimal(&workload, Solver::Dense, &options, &mut quiet).unwrap_err();
    let Error::NotConverged { gap, target, dual, .. } = &error else { panic!("{error}") };
    assert!(*gap > 1e-13 && *target == 1e-13 && dual.steps == 64);
}

#[test]
fn the_observer_can_stop_the_solver() {
    let mut seen = Vec::new();
    let mut observe = |progress: &Progress| {
        seen.push(progress.gap);
        if seen.len() == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let workload = Workload::prefix_sum(32).unwrap();
    let error = optimal(&workload, Solver::Dense, &Options::default(), &mut observe).unwrap_err();
    assert!(matches!(error, Error::Interrupted { iterations: 3, .. }));
    assert!(seen[2] < seen[0]);
}

#[test]
fn the_observer_hears_of_a_stream_and_can_stop_it() {
    let workload = momentum(400, 0.9, "constant");
    let optimum = solve_with(&workload, Solver::Auto, Iteration::Anderson, 1e-6);
    let mut seen = Vec::new();
    let mut observe = |progress: &Progress| {
        seen.push(*progress);
        ControlFlow::Continue(())
    };
    let stream = optimum.to_state_space(&workload, Target::default(), &mut observe).unwrap();
    assert!(seen.iter().all(|told| told.stage == Stage::Fitting && told.gap == optimum.certificate.gap));
    assert!(seen[0].share.is_some_and(|share| 0.0 < share && share < 0.1));
    // Every stream that is tried is told of.
    let tried: Vec<usize> =
        seen.iter().filter(|told| told.share.is_none()).map(|told| told.iteration).collect();
    assert_eq!(tried, (0..tried.len()).collect::<Vec<usize>>());
    assert!(!tried.is_empty() && stream.order() > 0);
    for target in [Target::default(), Target::Buffers(3)] {
        for in_pass in [true, false] {
            let mut observe = |progress: &Progress| match in_pass || progress.share.is_none() {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            };
            let error = optimum.to_state_space(&workload, target, &mut observe).unwrap_err();
            assert!(matches!(error, Error::Interrupted { iterations: 0, .. }));
        }
    }
}

#[test]
fn bad_options_are_refused() {
    let workload = Workload::prefix_sum(4).unwrap();
    for gap in [0.0, -1.0, f64::NAN] {
        let options = Options { gap, ..Options::default() };
        let error = optimal(&workload, Solver::Dense, &options, &mut quiet).unwrap_err();
        assert!(error.to_string().starts_with("gap is"), "{error}");
    }
    let huge = Workload::prefix_sum(DENSE_LIMIT + 1).unwrap();
    assert!(optimal(&huge, Solver::Dense, &Options::default(), &mut quiet).is_err());
}

fn epochs(workload: &Workload, times: usize, solver: Solver, gap: f64) -> Certificate {
    let options = Options { gap, ..Options::default() };
    let participation = Participation::Epochs { times };
    optimal_for(workload, participation, solver, &options, &mut quiet).unwrap().certificate
}

/// Golden: brackets of the root loss for several epochs, found by another program; see golden/PROVENANCE.md.
#[test]
fn several_epochs_meet_the_golden_brackets() {
    let prefix = |n| Workload::prefix_sum(n).unwrap();
    let cases = [
        (prefix(64), 4, 35.26282708233788, 35.26282992580478),
        (prefix(128), 8, 84.95708281942346, 84.95709614042522),
        (prefix(256), 4, 83.3911143918912, 83.3911262606185),
        (prefix(100), 3, 39.17842534027558, 39.178432643044694),
        (momentum(128, 0.9, "constant"), 4, 341.0148664886399, 341.02687461432316),
        (momentum(192, 0.95, "cosine:0.05"), 4, 507.4905259777851, 511.15635434764863),
    ];
    for (workload, times, lower, upper) in cases {
        let found = epochs(&workload, times, Solver::Linear, 1e-6);
        assert!(found.gap <= 1e-6 && found.loss >= found.lower_bound, "{found:?}");
        // Both brackets hold the optimum.
        assert!(found.lower_bound.sqrt() <= upper && found.loss.sqrt() >= lower, "{found:?} {lower} {upper}");
    }
    let found = epochs(&prefix(1024), 4, Solver::Linear, 1e-6);
    assert!((found.lower_bound.sqrt() - 193.4910).abs() < 1e-4, "{found:?}");
}

#[test]
#[ignore = "sixteen epochs of 512 steps, eight of 16384: half a minute"]
fn many_epochs_meet_the_golden_brackets() {
    let found = epochs(&Workload::prefix_sum(512).unwrap(), 16, Solver::Linear, 1e-6);
    assert!(found.lower_bound.sqrt() <= 316.10258 && found.loss.sqrt() >= 316.102306, "{found:?}");
    let found = epochs(&Workload::prefix_sum(16_384).unwrap(), 8, Solver::Linear, 1e-6);
    assert!(found.gap <= 1e-6 && (found.lower_bound.sqrt() - 1463.3965).abs() < 1e-3, "{found:?}");
}

/// Two steps, both by every user: X is diagonal, and (√2/x₁)² + 1/x₂² … is least at √2 : 1, a loss of 3 + 2√2.
#[test]
fn two_epochs_of_one_step_in_closed_form() {
    let found = epochs(&Workload::prefix_sum(2).unwrap(), 2, Solver::Dense, 1e-10);
    assert!((found.loss - (3.0 + 8.0_f64.sqrt())).abs() < 1e-8, "{found:?}");
    assert!((found.lower_bound - (3.0 + 8.0_f64.sqrt())).abs() < 1e-8, "{found:?}");
}

#[test]
fn one_epoch_is_one_participation() {
    let workload = momentum(40, 0.9, "cosine:0.1");
    let single = solve_with(&workload, Solver::Linear, Iteration::Anderson, 1e-6).certificate;
    assert_eq!(epochs(&workload, 1, Solver::Linear, 1e-6), single);
}

/// Both oracles, and a matrix of which nobody knows that it is a recurrence.
#[test]
fn solvers_agree_on_several_epochs() {
    let nesterov = Optimizer { momentum: 0.8, nesterov: true, ..Default::default() };
    let averaged = Optimizer { weight_decay: 0.1, average: Average::Uniform, ..Default::default() };
    for workload in [
        momentum(30, 0.9, "cooldown:0.25:0.05"),
        Workload::sgd(vec![0.5; 30], nesterov).unwrap(),
        Workload::sgd(vec![0.5; 31], averaged).unwrap(),
    ] {
        let matrix = Workload::dense(workload.to_dense()).unwrap();
        for times in [2, 3, 7] {
            let [a, b, c] = [
                epochs(&workload, times, Solver::Linear, 1e-7),
                epochs(&workload, times, Solver::Dense, 1e-7),
                epochs(&matrix, times, Solver::Auto, 1e-7),
            ];
            for (a, b) in [(a, b), (b, c), (c, a)] {
                assert!(a.lower_bound <= b.loss && a.loss <= b.loss * (1.0 + 2e-7), "{times}: {a:?} {b:?}");
            }
        }
    }
}

/// The dense rows attain what the dual point promises, and no plain iteration is worse than its acceleration.
#[test]
fn dense_rows_for_several_epochs_attain_the_certified_loss() {
    for iteration in [Iteration::Anderson, Iteration::Relaxed, Iteration::Plain] {
        let workload = momentum(48, 0.5, "constant");
        let options = Options { gap: 1e-5, iteration, ..Options::default() };
        let participation = Participation::Epochs { times: 4 };
        let found = optimal_for(&workload, participation, Solver::Linear, &options, &mut quiet).unwrap();
        let (_, certificate) = found.to_dense(&workload).unwrap();
        assert!(certificate.gap <= 1.01e-5 && certificate.gap > -1e-12, "{certificate:?}");
        assert_eq!(
            found.to_state_space(&workload, Target::default(), &mut quiet).unwrap_err().kind(),
            "unsupported"
        );
    }
    let rival = optimal_for(
        &Workload::prefix_sum(8).unwrap(),
        Participation::Epochs { times: 2 },
        Solver::Newton,
        &Options::default(),
        &mut quiet,
    );
    assert_eq!(rival.unwrap_err().kind(), "unsupported");
}

/// The bound of a separation is that of the epochs it allows; fewer participations have a smaller one.
#[test]
fn separated_participations_have_the_bound_of_their_epochs() {
    let workload = Workload::prefix_sum(48).unwrap();
    let found = |text: &str| {
        let participation: Participation = text.parse().unwrap();
        optimal_for(&workload, participation, Solver::Auto, &Options::default(), &mut quiet).unwrap()
    };
    let (four, separated) = (found("epochs:4").certificate, found("min-separation:12").certificate);
    assert_eq!(separated.lower_bound, four.lower_bound);
    assert!(separated.loss >= four.lower_bound && separated.gap < 0.5, "{separated:?}");
    let fewer = found("min-separation:12:3");
    assert_eq!(fewer.dual.separation(), 16);
    assert_eq!(fewer.certificate.lower_bound, found("epochs:3").certificate.lower_bound);
}
