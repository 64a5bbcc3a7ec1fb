use super::sweep::Sweep;
use super::*;
use crate::factorize::{self, Options, Solver};
use crate::workload::{Average, Optimizer, Schedule, Workload};
use faer::Mat;
use proptest::prelude::*;
use std::ops::ControlFlow;

/// `X(v)` from the singular value decomposition of `A D^{1/2} = U Σ Wᵀ`: `D^{-1/2} W Σ Wᵀ D^{-1/2}`.
fn dense_x(a: &Mat<f64>, v: &[f64]) -> Mat<f64> {
    let n = v.len();
    let scaled = Mat::from_fn(n, n, |i, j| a[(i, j)] * v[j].sqrt());
    let svd = scaled.svd().unwrap();
    let sigma = svd.S().column_vector();
    let w = Mat::from_fn(n, n, |i, k| svd.V()[(i, k)] * (sigma[k] / v[i]).sqrt());
    &w * w.transpose()
}

fn dense_coloring(filter: &StateSpace) -> Mat<f64> {
    let n = filter.steps();
    let mut rows = filter.coloring_rows();
    let mut coloring = Mat::zeros(n, n);
    for i in 0..n {
        let mut row = vec![0.0; n];
        rows(&mut row);
        (0..n).for_each(|j| coloring[(i, j)] = row[j]);
    }
    coloring
}

fn deviation(actual: &Mat<f64>, expected: &Mat<f64>) -> f64 {
    (actual - expected).norm_max() / expected.norm_max()
}

fn loss(filter: &StateSpace, workload: &Workload) -> f64 {
    let gamma_sq = filter.encoder_column_norms_sq().into_iter().fold(0.0, f64::max);
    gamma_sq * filter.decoder_row_norms_sq(workload).iter().sum::<f64>()
}

/// The optimal dual variable and the lower bound.
fn optimum(workload: &Workload, gap: f64) -> (Vec<f64>, f64) {
    let options = Options { gap, ..Options::default() };
    let found =
        factorize::optimal(workload, Solver::Auto, &options, &mut |_| ControlFlow::Continue(())).unwrap();
    (found.dual.v().to_vec(), found.certificate.lower_bound)
}

fn sgd(n: usize, schedule: &str, optimizer: Optimizer) -> Workload {
    Workload::sgd(schedule.parse::<Schedule>().unwrap().values(n), optimizer).unwrap()
}

fn momentum(momentum: f64) -> Optimizer {
    Optimizer { momentum, ..Optimizer::default() }
}

fn any_workload(steps: std::ops::Range<usize>) -> impl Strategy<Value = (Workload, Vec<f64>)> {
    let average =
        prop_oneof![Just(Average::None), Just(Average::Uniform), (0.0..0.95).prop_map(Average::Ema)];
    let optimizer = (prop_oneof![Just(0.0), 0.01..0.99], any::<bool>(), prop_oneof![Just(0.0), 0.001..0.4])
        .prop_flat_map(move |(momentum, nesterov, weight_decay)| {
            (Just((momentum, nesterov, weight_decay)), any::<bool>(), average.clone())
        })
        .prop_map(|((momentum, nesterov, weight_decay), coupled, average)| Optimizer {
            momentum,
            nesterov: nesterov && momentum > 0.0,
            weight_decay,
            coupled: coupled && weight_decay > 0.0,
            average,
        });
    // Step sizes and dual variables over two decades.
    (optimizer, prop::collection::vec((-3.0..0.7_f64, -2.0..2.0_f64), steps)).prop_map(|(optimizer, rows)| {
        let (eta, v): (Vec<_>, Vec<_>) = rows.into_iter().map(|(a, b)| (a.exp(), b.exp())).unzip();
        (Workload::sgd(eta, optimizer).unwrap(), v)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn untruncated_is_the_dense_optimum((workload, v) in any_workload(1..16)) {
        let recurrence = workload.recurrence().unwrap();
        let filter = StateSpace::optimal(recurrence, &v, 1e-12).unwrap();
        let encoder = filter.encoder();
        let a = workload.to_dense();
        let x = encoder.transpose() * &encoder;
        prop_assert!(deviation(&x, &dense_x(&a, &v)) < 1e-9, "{}", deviation(&x, &dense_x(&a, &v)));
        let product = dense_coloring(&filter) * &encoder;
        prop_assert!(deviation(&product, &Mat::identity(v.len(), v.len())) < 1e-9);
    }

    #[test]
    fn deployed_filters_multiply_out_and_state_their_own_norms(
        (workload, v) in any_workload(1..40),
        order in 0..6_usize,
    ) {
        let n = v.len();
        let filter = StateSpace::truncated(workload.recurrence().unwrap(), &v, Order::Fixed(order)).unwrap();
        prop_assert!(filter.order() <= order);
        prop_assert_eq!(&filter.rounded().unwrap(), &filter);

        let (coloring, encoder, a) = (dense_coloring(&filter), filter.encoder(), workload.to_dense());
        let decoder = &a * &coloring;
        prop_assert!(deviation(&(&decoder * &encoder), &a) < 1e-9);

        let norms = filter.encoder_column_norms_sq();
        let rows = filter.decoder_row_norms_sq(&workload);
        for i in 0..n {
            let exact = encoder.col(i).squared_norm_l2();
            prop_assert!(norms[i] >= exact * (1.0 - 1e-14), "column {i}: {} below {exact}", norms[i]);
            prop_assert!(norms[i] <= exact * (1.0 + 1e-9), "column {i}: {} above {exact}", norms[i]);
            prop_assert!(norms[i] <= 1.0 && norms[i] > 1.0 - 3e-7, "column {i}: {}", norms[i]);
            let exact = decoder.row(i).squared_norm_l2();
            prop_assert!((rows[i] - exact).abs() <= 1e-9 * exact, "row {i}: {} {exact}", rows[i]);
        }
    }

    #[test]
    fn enough_states_leave_the_optimum_as_it_is((workload, v) in any_workload(1..24)) {
        // Only the scale of the columns differs.
        let n = v.len();
        let filter = StateSpace::truncated(workload.recurrence().unwrap(), &v, Order::Fixed(n)).unwrap();
        let encoder = filter.encoder();
        let x = dense_x(&workload.to_dense(), &v);
        let scaled = Mat::from_fn(n, n, |i, j| x[(i, j)] / (x[(i, i)] * x[(j, j)]).sqrt());
        let deviation = deviation(&(encoder.transpose() * &encoder), &scaled);
        prop_assert!(deviation < 2e-4, "{deviation}");
    }
}

#[test]
fn one_step_is_white_noise() {
    let workload = sgd(1, "constant", momentum(0.9));
    let filter = StateSpace::truncated(workload.recurrence().unwrap(), &[7.0], Order::Fixed(3)).unwrap();
    assert_eq!(filter.order(), 0);
    assert_eq!(filter.parts().direct, [1.0]);
    assert_eq!(filter.cost().work, 1.0);
}

#[test]
fn two_steps_in_closed_form() {
    // M = D^{1/2}AᵀAD^{1/2} is 2 × 2, so M^{1/2} = (M + √det M)/√(tr M + 2√det M).
    let (v, workload) = ([3.0, 0.5], sgd(2, "exp:0.7", Optimizer::default()));
    let (x, y): (f64, f64) = (1.0 + 0.0, 0.7);
    let gram = [x * x + x * x, x * y, y * y];
    let m = [gram[0] * v[0], gram[1] * (v[0] * v[1]).sqrt(), gram[2] * v[1]];
    let root = (m[0] * m[2] - m[1] * m[1]).sqrt();
    let scale = (m[0] + m[2] + 2.0 * root).sqrt();
    let expected =
        [(m[0] + root) / scale / v[0], m[1] / scale / (v[0] * v[1]).sqrt(), (m[2] + root) / scale / v[1]];

    let a = workload.to_dense();
    assert!((a[(1, 0)] - x).abs() < 1e-15 && (a[(1, 1)] - y).abs() < 1e-15);
    let filter = StateSpace::optimal(workload.recurrence().unwrap(), &v, 1e-13).unwrap();
    let c = filter.encoder();
    let actual = c.transpose() * &c;
    for (k, (i, j)) in [(0, 0), (1, 0), (1, 1)].into_iter().enumerate() {
        assert!((actual[(i, j)] - expected[k]).abs() < 1e-12, "{} {}", actual[(i, j)], expected[k]);
    }
}

/// Dual variable and loss at n = 3 from the reference values of the project (certified by both bounds).
#[test]
fn three_steps_match_the_reference() {
    let workload = Workload::prefix_sum(3).unwrap();
    let v = [2.65186345, 1.25735178, 0.69864641];
    let filter = StateSpace::truncated(workload.recurrence().unwrap(), &v, Order::Fixed(1)).unwrap();
    assert_eq!(filter.order(), 1);
    let excess = loss(&filter, &workload) / 4.6078616 - 1.0;
    assert!((0.0..5e-7).contains(&excess), "{excess:e}");
}

#[test]
fn a_diagonal_workload_needs_no_state() {
    let recurrence = Recurrence { left: LowerBanded::from_fn(3, 0, |i, _| 1.0 + i as f64), right: None };
    let filter = StateSpace::truncated(&recurrence, &[1.0, 2.0, 3.0], Order::Fixed(2)).unwrap();
    assert_eq!((filter.order(), filter.parts().direct.as_slice()), (0, [1.0; 3].as_slice()));
}

/// Excess of the root loss over the bound, from the table of the design (balanced truncation weighted by
/// the workload, coefficients in f32, columns not rescaled), and what is left of it by rescaling them.
#[test]
fn truncation_reproduces_the_design_table_and_rescaling_halves_it() {
    let workload = Workload::prefix_sum(1024).unwrap();
    let recurrence = workload.recurrence().unwrap();
    let (v, bound) = optimum(&workload, 1e-9);
    for (order, expected, deployed) in [(3, 1.54e-3, 8.06e-4), (4, 1.24e-4, 5.05e-5), (5, 7.0e-6, 2.9e-6)] {
        let sweep = Sweep::new(Plant::new(recurrence).unwrap(), &v, 1e-5).unwrap();
        let mut assembly = assemble::Assembly::new(1024, order);
        sweep.truncated(order, &mut |_| Ok(()), |step| assembly.push(&step)).unwrap();
        let plain = assembly.finish().unwrap().rounded().unwrap();
        let excess = (loss(&plain, &workload) / bound).sqrt() - 1.0;
        assert!((excess / expected - 1.0).abs() < 0.1, "order {order}: {excess:e}");

        let filter = StateSpace::truncated(recurrence, &v, Order::Fixed(order)).unwrap();
        let excess = (loss(&filter, &workload) / bound).sqrt() - 1.0;
        assert!((excess / deployed - 1.0).abs() < 0.1, "order {order} deployed: {excess:e}");
    }
}

#[test]
fn few_buffers_stay_close_to_the_bound() {
    let nesterov = Optimizer { nesterov: true, ..momentum(0.9) };
    let averaged = Optimizer { average: Average::Uniform, ..momentum(0.9) };
    let cases = [
        (Workload::prefix_sum(4096).unwrap(), 4, 5e-4),
        (Workload::prefix_sum(4096).unwrap(), 6, 5e-6),
        (sgd(512, "constant", momentum(0.95)), 4, 3e-7),
        (sgd(512, "cooldown:0.25:0.05", momentum(0.99)), 3, 3e-7),
        (sgd(512, "warmup:20+decay:0.3:0.1", momentum(0.9)), 4, 1e-5),
        (sgd(512, "cooldown:0.25:0.05", nesterov), 4, 3e-6),
        (sgd(512, "constant", averaged), 4, 1e-5),
    ];
    for (case, (workload, order, limit)) in cases.into_iter().enumerate() {
        let (v, bound) = optimum(&workload, 1e-7);
        let filter = StateSpace::truncated(workload.recurrence().unwrap(), &v, Order::Fixed(order)).unwrap();
        let excess = (loss(&filter, &workload) / bound).sqrt() - 1.0;
        assert!(excess < limit, "case {case}: {excess:e}");
        assert_eq!(filter.cost().buffers, Some(order));
    }
}

#[test]
fn more_states_never_hurt() {
    // Directions that drown in rounding must be dropped, not followed.
    let workload = sgd(256, "cooldown:0.25:0.05", momentum(0.99));
    let (v, bound) = optimum(&workload, 1e-8);
    for order in [5, 8, 16, 40] {
        let filter = StateSpace::truncated(workload.recurrence().unwrap(), &v, Order::Fixed(order)).unwrap();
        let excess = (loss(&filter, &workload) / bound).sqrt() - 1.0;
        assert!(excess < 3e-7, "order {order}: {excess:e}");
    }
}

#[test]
fn the_tolerance_is_met_with_the_fewest_states() {
    let workload = Workload::prefix_sum(512).unwrap();
    let recurrence = workload.recurrence().unwrap();
    let (v, lower_bound) = optimum(&workload, 1e-8);
    let excess_of = |filter: &StateSpace| (loss(filter, &workload) / lower_bound).sqrt() - 1.0;
    for (excess, expected) in [(10.0, 0), (1e-2, 2), (1e-4, 4), (1e-6, 5)] {
        let filter =
            StateSpace::truncated(recurrence, &v, Order::Tolerance { excess, lower_bound, max: 14 }).unwrap();
        assert!(excess_of(&filter) <= excess);
        assert_eq!(filter.order(), expected, "{excess:e}");
        if expected > 0 {
            let fewer = StateSpace::truncated(recurrence, &v, Order::Fixed(expected - 1)).unwrap();
            assert!(excess_of(&fewer) > excess);
        }
    }

    match StateSpace::truncated(recurrence, &v, Order::Tolerance { excess: 1e-4, lower_bound, max: 3 }) {
        Err(Error::TooFewStates { states: 3, excess, target: 1e-4, .. }) => {
            assert!(excess < 1e-3, "{excess:e}")
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn sixteen_thousand_steps() {
    // Reference loss from the project's golden values; half the buffers of a tree (14).
    let workload = Workload::prefix_sum(16_384).unwrap();
    let (v, lower_bound) = optimum(&workload, 1e-6);
    let order = Order::Tolerance { excess: 1e-4, lower_bound, max: 16 };
    let filter = StateSpace::truncated(workload.recurrence().unwrap(), &v, order).unwrap();
    assert_eq!(filter.order(), 6);
    let excess = loss(&filter, &workload).sqrt() / 489.7225 - 1.0;
    assert!((0.0..1e-4).contains(&excess), "{excess:e}");
}

#[test]
fn the_result_does_not_depend_on_the_number_of_threads() {
    let workload = sgd(600, "cooldown:0.25:0.05", momentum(0.9));
    let v = workload.column_norms_sq().unwrap();
    let build = || StateSpace::truncated(workload.recurrence().unwrap(), &v, Order::Fixed(3)).unwrap();
    let with = |threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(build);
    assert_eq!(with(1), with(3));
}

#[test]
fn bad_duals_and_tolerances_are_refused() {
    let workload = Workload::prefix_sum(2).unwrap();
    let recurrence = workload.recurrence().unwrap();
    let kind = |v: &[f64], order| StateSpace::truncated(recurrence, v, order).unwrap_err().kind();
    assert_eq!(kind(&[1.0], Order::Fixed(1)), "wrong-length");
    assert_eq!(kind(&[1.0, 0.0], Order::Fixed(1)), "invalid-argument");
    assert_eq!(kind(&[1.0, f64::INFINITY], Order::Fixed(1)), "invalid-argument");
    let right = Some(LowerBanded::identity(3));
    let uneven = Recurrence { left: LowerBanded::identity(2), right };
    assert_eq!(
        StateSpace::truncated(&uneven, &[1.0; 2], Order::Fixed(1)).unwrap_err().kind(),
        "wrong-length"
    );
    for (excess, lower_bound) in [(0.0, 1.0), (f64::NAN, 1.0), (1e-4, -1.0)] {
        assert_eq!(kind(&[1.0; 2], Order::Tolerance { excess, lower_bound, max: 4 }), "invalid-argument");
    }
}

#[test]
fn slow_poles_keep_their_digits() {
    // Up to three poles near 1, where recursions on covariances, instead of their roots, lose most of theirs.
    for (beta, average) in [(0.99, Average::None), (0.95, Average::Ema(0.99)), (0.9, Average::Uniform)] {
        let workload = sgd(100, "cooldown:0.25:0.05", Optimizer { average, ..momentum(beta) });
        let recurrence = workload.recurrence().unwrap();
        let (v, a) = (workload.column_norms_sq().unwrap(), workload.to_dense());
        let encoder = StateSpace::optimal(recurrence, &v, 1e-8).unwrap().encoder();
        let error = deviation(&(encoder.transpose() * &encoder), &dense_x(&a, &v));
        assert!(error < 1e-8, "{error:e}");

        let filter = StateSpace::truncated(recurrence, &v, Order::Fixed(4)).unwrap();
        let decoder = &a * dense_coloring(&filter);
        for (i, norm_sq) in filter.decoder_row_norms_sq(&workload).into_iter().enumerate() {
            let error = norm_sq / decoder.row(i).squared_norm_l2() - 1.0;
            assert!(error.abs() < 1e-9, "row {i}: {error:e}");
        }
    }
}
