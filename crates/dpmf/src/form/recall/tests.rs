use super::*;
use crate::form::{Cost, Representation};
use crate::workload::{Optimizer, Workload};
use faer::Mat;
use proptest::prelude::*;

/// Numbers that look random, on the grid of single precision, zero where there is no noise yet.
pub(super) fn example(n: usize, stride: usize, order: usize, recalls: usize, seed: &[f64]) -> Recall {
    let mut seed = seed.iter().copied().cycle();
    let mut next = |scale: f64| f64::from((scale * seed.next().unwrap_or(0.5)) as f32);
    let mut parts =
        Parts { increment: (0..order).map(|k| -0.1 - 0.2 * k as f64).collect(), ..Parts::default() };
    for t in 0..n {
        let known = recalls.min(t / stride);
        parts.direct.push(1.0 + next(0.5));
        parts.recalled.extend((1..=recalls).map(|j| if j <= known { next(0.3) } else { 0.0 }));
        parts.output.extend((0..order).map(|_| next(0.4)));
        for j in 0..=recalls {
            parts.input.extend((0..order).map(|_| if j <= known { next(0.5) } else { 0.0 }));
        }
    }
    Recall::from_parts(stride, order, recalls, parts).unwrap().rounded().unwrap()
}

#[test]
fn one_two_and_three_steps_in_closed_form() {
    // u_t = z_t + z_{t−1}/2 + x_t/4, x_{t+1} = x_t/2 + z_t + 2 z_{t−1}.
    let of = |n: usize| {
        let old = |t: usize, x: f64| if t > 0 { x } else { 0.0 };
        let parts = Parts {
            direct: vec![1.0; n],
            recalled: (0..n).map(|t| old(t, 0.5)).collect(),
            output: vec![0.25; n],
            input: (0..n).flat_map(|t| [1.0, old(t, 2.0)]).collect(),
            increment: vec![-0.5],
        };
        Recall::from_parts(1, 1, 1, parts).unwrap()
    };
    assert_eq!((of(1).coloring()[(0, 0)], of(1).encoder()[(0, 0)]), (1.0, 1.0));
    assert_eq!(of(1).cost(), Cost { buffers: Some(1), recalls: Some(0), work: 4.0 });
    let rows =
        |m: Mat<f64>| (0..m.nrows()).map(|i| m.row(i).iter().copied().collect()).collect::<Vec<Vec<_>>>();
    assert_eq!(rows(of(2).coloring()), [[1.0, 0.0], [0.75, 1.0]]);
    assert_eq!(rows(of(2).encoder()), [[1.0, 0.0], [-0.75, 1.0]]);
    // x_2 = x_1/2 + z_1 + 2 z_0 = 2.5 z_0 + z_1.
    assert_eq!(rows(of(3).coloring()), [[1.0, 0.0, 0.0], [0.75, 1.0, 0.0], [0.625, 0.75, 1.0]]);
    assert_eq!(rows(of(3).encoder()), [[1.0, 0.0, 0.0], [-0.75, 1.0, 0.0], [-0.0625, -0.75, 1.0]]);
    assert_eq!(of(3).cost(), Cost { buffers: Some(1), recalls: Some(1), work: 4.0 + 4.0 / 3.0 });
    let norms = of(3).encoder_column_norms_sq();
    assert!(
        norms
            .iter()
            .zip([1.56640625, 1.5625, 1.0])
            .all(|(x, exact)| (0.0..1e-13).contains(&(x / exact - 1.0)))
    );
}

#[test]
fn bad_coefficients_are_named() {
    let parts = || example(4, 2, 1, 1, &[0.5, -0.25]).parts().clone();
    let refused = |stride, order, recalls, parts| {
        Recall::from_parts(stride, order, recalls, parts).unwrap_err().to_string()
    };
    assert!(refused(2, 0, 0, Parts::default()).contains("at least one step"));
    assert!(refused(0, 1, 1, parts()).contains("stride"));
    assert!(refused(2, 1, 2, parts()).contains("recalled coefficients"));
    assert!(refused(2, 2, 1, parts()).contains("output coefficients"));
    assert!(refused(2, 1, usize::MAX, parts()).contains("address space"));
    assert!(refused(3, 1, 1, parts()).contains("recalled coefficients[2]"));
    let mut early = parts();
    (early.recalled[2], early.input[3]) = (0.0, 1.0);
    assert!(refused(2, 1, 1, early).contains("input coefficients[3]"));
    let mut nan = parts();
    nan.output[1] = f64::NAN;
    assert!(refused(2, 1, 1, nan).contains("output coefficients[1]"));
    let mut flat = parts();
    flat.direct[2] = 0.0;
    assert!(refused(2, 1, 1, flat).contains("direct coefficients[2]"));
}

/// In f64 the third row hides 2²⁰ behind 2⁸⁰: the computed inverse has short columns.
#[test]
fn no_sensitivity_hides_in_rounding() {
    let (a, b) = (2f64.powi(40), 2f64.powi(80));
    let parts = Parts {
        direct: vec![1.0, a, b, 1.0],
        recalled: vec![0.0, 0.0, 0.0, -a, 0.0, 0.0, 0.0, -b, 0.0, b, 2f64.powi(20), -b],
        ..Parts::default()
    };
    let recall = Recall::from_parts(1, 0, 3, parts).unwrap();
    assert!(recall.encoder().col(0).norm_l2() < 2.0);
    assert!(recall.encoder_column_norms_sq()[0] >= a);
}

proptest! {
    #[test]
    fn structured_equals_dense(
        n in 1..30_usize,
        stride in 1..9_usize,
        order in 0..4_usize,
        recalls in 0..4_usize,
        seed in prop::collection::vec(-1.0..1.0_f64, 31),
    ) {
        let recall = example(n, stride, order, recalls, &seed);
        let (coloring, encoder) = (recall.coloring(), recall.encoder());
        // The definition, run on unit vectors.
        for s in 0..n {
            let z = |t: usize| if t == s { 1.0 } else { 0.0 };
            let mut x = vec![0.0; order];
            for t in 0..n {
                let step = recall.step(t);
                let lags: Vec<(usize, f64)> =
                    (0..=recall.known(t)).map(|j| (j, z(t - j * stride))).collect();
                let mut u = step.direct * z(t);
                u += lags[1..].iter().map(|(j, z)| step.recalled[j - 1] * z).sum::<f64>();
                u += x.iter().zip(step.output).map(|(x, h)| x * h).sum::<f64>();
                prop_assert!((u - coloring[(t, s)]).abs() < 1e-12);
                for k in 0..order {
                    x[k] += recall.parts().increment[k] * x[k];
                    x[k] += lags.iter().map(|(j, z)| step.input[j * order + k] * z).sum::<f64>();
                }
            }
        }
        let distance = (&coloring * &encoder - Mat::<f64>::identity(n, n)).norm_max();
        prop_assert!(distance < 1e-9 * encoder.norm_max(), "{distance:e}");
        for (j, bound) in recall.encoder_column_norms_sq().into_iter().enumerate() {
            let exact = encoder.col(j).squared_norm_l2();
            prop_assert!(bound >= exact && bound < exact * (1.0 + 1e-9), "{bound} {exact}");
        }
        let workload = Workload::sgd(vec![0.5; n], Optimizer { momentum: 0.5, ..Default::default() }).unwrap();
        let decoder = workload.to_dense() * &coloring;
        for (i, norm) in recall.decoder_row_norms_sq(&workload).into_iter().enumerate() {
            let exact = decoder.row(i).squared_norm_l2();
            prop_assert!((norm - exact).abs() < 1e-10 * exact);
        }
        let mut tensors = crate::tensors::Tensors::default();
        recall.write(&mut tensors);
        prop_assert_eq!(Recall::read(n, &mut tensors).unwrap(), recall);
    }
}
