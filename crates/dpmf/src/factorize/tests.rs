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
    let sum: f64 = found.v.iter().sum();
    let golden = [2.65186345, 1.25735178, 0.69864641];
    let golden_sum: f64 = golden.iter().sum();
    for (v, g) in found.v.iter().zip(golden) {
        assert!((v / sum - g / golden_sum).abs() < 1e-6, "{:?}", found.v);
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
    let Error::NotConverged { gap, target, v, .. } = &error else { panic!("{error}") };
    assert!(*gap > 1e-13 && *target == 1e-13 && v.len() == 64);
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
