use super::*;
use proptest::prelude::*;

/// The optimizer written as the loop a training framework runs, on scalar gradients.
fn simulate(eta: &[f64], optimizer: &Optimizer, gradients: &[f64]) -> Vec<f64> {
    let (mut theta, mut m, mut average) = (0.0, 0.0, 0.0);
    let mut total = 0.0;
    let beta = optimizer.momentum;
    let released = eta.iter().zip(gradients).enumerate().map(|(i, (&eta, &g))| {
        let g = if optimizer.coupled { g + optimizer.weight_decay * theta } else { g };
        m = beta * m + g;
        let step = if optimizer.nesterov { g + beta * m } else { m };
        let shrink = if optimizer.coupled { 1.0 } else { 1.0 - eta * optimizer.weight_decay };
        theta = shrink * theta - eta * step;
        total += theta;
        match optimizer.average {
            Average::None => theta,
            Average::Uniform => total / (i as f64 + 1.0),
            Average::Ema(alpha) => {
                average = alpha * average + (1.0 - alpha) * theta;
                average
            }
        }
    });
    released.map(|theta| -theta).collect()
}

fn any_optimizer() -> impl Strategy<Value = Optimizer> {
    let average =
        prop_oneof![Just(Average::None), Just(Average::Uniform), (0.0..0.99).prop_map(Average::Ema)];
    (
        prop_oneof![Just(0.0), 0.01..0.99],
        any::<bool>(),
        prop_oneof![Just(0.0), 0.001..0.4],
        any::<bool>(),
        average,
    )
        .prop_map(|(momentum, nesterov, weight_decay, coupled, average)| Optimizer {
            momentum,
            nesterov: nesterov && momentum > 0.0,
            weight_decay,
            coupled: coupled && weight_decay > 0.0,
            average,
        })
}

proptest! {
    #[test]
    fn the_matrix_is_the_optimizer(
        optimizer in any_optimizer(),
        rows in prop::collection::vec((0.05..2.0_f64, -1.0..1.0_f64), 1..24),
    ) {
        let (eta, gradients): (Vec<_>, Vec<_>) = rows.into_iter().unzip();
        let workload = Workload::sgd(eta.clone(), optimizer).unwrap();
        let expected = simulate(&eta, &optimizer, &gradients);

        let mut iterates = gradients.clone();
        workload.apply(&mut iterates);
        let dense = workload.to_dense();
        for i in 0..eta.len() {
            let row: f64 = (0..eta.len()).map(|j| dense[(i, j)] * gradients[j]).sum();
            prop_assert!((iterates[i] - expected[i]).abs() < 1e-9, "{iterates:?} {expected:?}");
            prop_assert!((row - expected[i]).abs() < 1e-9);
        }

        let mut back = iterates.clone();
        workload.recurrence().unwrap().apply_inverse(&mut back);
        for (b, g) in back.iter().zip(&gradients) {
            prop_assert!((b - g).abs() < 1e-8);
        }

        let norms = workload.column_norms_sq().unwrap();
        for j in 0..eta.len() {
            let exact = dense.col(j).squared_norm_l2();
            prop_assert!((norms[j] - exact).abs() < 1e-10 * exact, "column {j}: {} {exact}", norms[j]);
        }
    }
}

#[test]
fn momentum_matrix_of_the_paper() {
    // M = M^(η) M^(β) at n = 3, β = 1/2, η = (1, 2, 3), multiplied out by hand.
    let optimizer = Optimizer { momentum: 0.5, ..Default::default() };
    let a = Workload::sgd(vec![1.0, 2.0, 3.0], optimizer).unwrap().to_dense();
    let expected = [[1.0, 0.0, 0.0], [2.0, 2.0, 0.0], [2.75, 3.5, 3.0]];
    for i in 0..3 {
        for j in 0..3 {
            assert!((a[(i, j)] - expected[i][j]).abs() < 1e-15);
        }
    }
}

#[test]
fn bandwidths_are_those_of_the_table() {
    let bandwidth = |optimizer| {
        let workload = Workload::sgd(vec![0.5; 8], optimizer).unwrap();
        let recurrence = workload.recurrence().unwrap();
        (recurrence.left.bandwidth(), recurrence.right.as_ref().map_or(0, LowerBanded::bandwidth))
    };
    let momentum = Optimizer { momentum: 0.9, ..Default::default() };
    assert_eq!(bandwidth(Optimizer::default()), (1, 0));
    assert_eq!(bandwidth(momentum), (2, 0));
    assert_eq!(bandwidth(Optimizer { weight_decay: 0.1, coupled: true, ..momentum }), (2, 0));
    assert_eq!(bandwidth(Optimizer { average: Average::Uniform, ..momentum }), (3, 0));
    assert_eq!(bandwidth(Optimizer { nesterov: true, ..momentum }), (2, 1));
}

#[test]
fn bad_input_names_the_value_and_the_place() {
    let sgd = |eta: &[f64], optimizer| Workload::sgd(eta.to_vec(), optimizer).unwrap_err().to_string();
    let with_momentum = |momentum| Optimizer { momentum, ..Default::default() };
    assert!(Workload::prefix_sum(0).unwrap_err().to_string().contains("steps is 0"));
    assert!(sgd(&[1.0, f64::NAN], Optimizer::default()).contains("learning rate[1] is NaN"));
    assert!(sgd(&[1.0, 1.0, -2.0], Optimizer::default()).contains("learning rate[2] is -2"));
    assert!(sgd(&[1.0], with_momentum(1.0)).contains("momentum is 1"));
    assert!(sgd(&[1.0], with_momentum(f64::NAN)).contains("momentum is NaN"));
    let decay = Optimizer { weight_decay: 0.5, ..Default::default() };
    assert!(sgd(&[1.0, 2.0], decay).contains("learning rate[1] is 2"));
    let ema = Optimizer { average: Average::Ema(1.0), ..Default::default() };
    assert!(sgd(&[1.0], ema).contains("average decay is 1"));
    assert!(sgd(&[1e-320], with_momentum(0.5)).contains("learning rate[0] is 0.0000"));
    assert!(sgd(&[0.0, 1e51], with_momentum(0.5)).contains("between 1e-50 and 1e50"));
    assert!(sgd(&[0.0; 3], with_momentum(0.5)).contains("it must not be 0 at every step"));

    let dense = |a| Workload::dense(a).unwrap_err().to_string();
    assert!(dense(Mat::zeros(0, 0)).contains("steps is 0"));
    assert!(dense(Mat::zeros(2, 3)).contains("2 × 3"));
    assert!(
        dense(Mat::from_fn(2, 2, |_, _| 1.0))
            .contains("[0, 1] is 1, but a workload must be lower triangular")
    );
    assert!(dense(Mat::from_fn(2, 2, |i, j| f64::from(u8::from(i == 0 && j == 0)))).contains("[1, 1] is 0"));
    assert!(dense(Mat::from_fn(2, 2, |i, _| if i == 1 { f64::NAN } else { 0.0 })).contains("[0, 0] is 0"));
}

/// Steps of size zero move nothing, and are counted: by momentum, by decay, by averages.
#[test]
fn rates_of_zero_are_what_the_optimizer_does() {
    let rates = vec![0.0, 1.0, 0.0, 0.0, 0.5, 0.0];
    let heavy = Optimizer { momentum: 0.5, ..Default::default() };
    let a = Workload::sgd(rates.clone(), heavy).unwrap().to_dense();
    // ψ = (0, m_2, m_2, m_2, m_2 + m_5/2, the same), m_i = Σ_j 2^{j−i} g_j.
    let m = |i: usize, j: usize| if j <= i { 0.5_f64.powi((i - j) as i32) } else { 0.0 };
    for j in 0..6 {
        let rows = [0.0, m(1, j), m(1, j), m(1, j), m(1, j) + 0.5 * m(4, j), m(1, j) + 0.5 * m(4, j)];
        for (i, exact) in rows.into_iter().enumerate() {
            assert!((a[(i, j)] - exact).abs() < 1e-15, "({i}, {j}): {}", a[(i, j)]);
        }
    }
    let averaged = Optimizer { average: Average::Uniform, ..Default::default() };
    let a = Workload::sgd(rates, averaged).unwrap().to_dense();
    assert_eq!((a[(0, 0)], a[(1, 1)], a[(2, 1)]), (0.0, 0.5, 2.0 / 3.0));
}
