use super::energy::energy;
use super::gram::Grams;
use super::grid::Grid;
use super::*;
use crate::factorize::quiet;
use crate::form::Representation;
use crate::linalg::product::Rows;
use crate::participation::Participation;
use crate::workload::{Optimizer, Workload};
use faer::Mat;

fn example(shape: Shape) -> Coefficients {
    let mut seed = 1_u64;
    let mut next = || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 40) as f64 / (1_u64 << 24) as f64 - 0.5
    };
    let mut out = Coefficients::zeros(shape);
    out.steps.iter_mut().for_each(|x| *x = next());
    out.steps.chunks_exact_mut(shape.width()).for_each(|step| step[0] += 1.5);
    out.decay.iter_mut().enumerate().for_each(|(k, x)| *x = 0.5 + 0.2 * k as f64);
    out
}

fn shapes() -> [Shape; 5] {
    let shape = |(steps, stride, order, recalls)| Shape { steps, stride, order, recalls };
    [(10, 5, 2, 1), (14, 5, 1, 2), (12, 3, 2, 3), (9, 4, 3, 2), (7, 2, 0, 2)].map(shape)
}

fn dense(coefficients: &Coefficients) -> form::Recall {
    let Shape { stride, order, recalls, .. } = coefficients.shape;
    form::Recall::from_parts(stride, order, recalls, coefficients.parts()).unwrap()
}

/// Norms and blocks equal those of the dense matrices, also where the last epoch is short.
#[test]
fn structured_equals_dense() {
    let momentum = Optimizer { momentum: 0.5, ..Default::default() };
    for shape in shapes() {
        let coefficients = example(shape);
        let form = dense(&coefficients);
        let workload =
            Workload::sgd((0..shape.steps).map(|t| 1.0 + 0.1 * t as f64).collect(), momentum).unwrap();
        let mut unused = Coefficients::zeros(shape);
        let found = energy(&coefficients, &Plant::new(&workload).unwrap(), |_| 0.0, &mut unused);
        let exact: f64 = form.decoder_row_norms_sq(&workload).iter().sum();
        assert!((found / exact - 1.0).abs() < 1e-12, "{shape:?}: {found} {exact}");
        assert!(unused.steps.iter().all(|x| *x == 0.0));

        let encoder = form.encoder();
        let x: Mat<f64> = encoder.transpose() * &encoder;
        let grams = Grams::new(&coefficients);
        for (p, block) in grams.blocks.iter().enumerate() {
            for (i, j) in (0..shape.epochs()).flat_map(|i| (0..shape.epochs()).map(move |j| (i, j))) {
                if shape.exists(i, p) && shape.exists(j, p) {
                    let exact = x[(i * shape.stride + p, j * shape.stride + p)];
                    assert!((block.at(i, j) - exact).abs() < 1e-12 * x.norm_max(), "{shape:?} {p} {i} {j}");
                }
            }
        }
    }
}

/// The gradient of a function of all that a fit looks at, by its variables, against differences.
#[test]
fn gradients_are_those_of_differences() {
    for shape in shapes() {
        let workload =
            Workload::sgd(vec![0.5; shape.steps], Optimizer { momentum: 0.5, ..Default::default() });
        let plant = Plant::new(&workload.unwrap()).unwrap();
        let k = shape.epochs();
        let weight = |p: usize| {
            let mut weight = Rows::zeros(k, k);
            for (i, j) in (0..k).flat_map(|i| (0..k).map(move |j| (i, j))) {
                *weight.at_mut(i, j) = ((i * j + i + j + p) as f64).sin();
            }
            weight
        };
        let weights: Vec<Rows> = (0..shape.stride).map(weight).collect();
        for fineness in [1, usize::MAX] {
            let grid = Grid::new(shape, fineness);
            let evaluate = |x: &[f64]| {
                let (coefficients, smooth) = grid.decode(x).unwrap();
                let mut gradient = Coefficients::zeros(shape);
                let grams = Grams::new(&coefficients);
                grams.pull_back(&weights, &mut gradient);
                let inner =
                    |(a, b): (&Rows, &Rows)| a.values.iter().zip(&b.values).map(|(a, b)| a * b).sum::<f64>();
                let value = energy(&coefficients, &plant, |_| 1.0, &mut gradient)
                    + grams.blocks.iter().zip(&weights).map(inner).sum::<f64>();
                (value, grid.pull_back(&coefficients, &smooth, gradient))
            };
            let x = grid.encode(&example(shape));
            let Some(_) = grid.decode(&x) else { continue };
            let (value, gradient) = evaluate(&x);
            for (i, slope) in gradient.iter().enumerate() {
                let moved = |step: f64| {
                    let mut x = x.clone();
                    x[i] += step;
                    evaluate(&x).0
                };
                let difference = (moved(1e-5) - moved(-1e-5)) / 2e-5;
                let size = 1.0 + value.abs() + difference.abs();
                assert!((difference - slope).abs() < 1e-7 * size, "{shape:?} {i}: {difference} {slope}");
            }
        }
    }
}

#[test]
fn a_full_grid_loses_nothing() {
    for shape in shapes() {
        let grid = Grid::new(shape, usize::MAX);
        let coefficients = example(shape);
        let (back, _) = grid.decode(&grid.encode(&coefficients)).unwrap();
        let close = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-12;
        assert!(back.steps.iter().zip(&coefficients.steps).all(close), "{shape:?}");
        assert!(back.decay.iter().zip(&coefficients.decay).all(close));
    }
}

/// Root losses as deployed over the certified ones of `golden/PROVENANCE.md`; the last epoch of the third is short.
#[test]
fn ratios_to_the_golden_bounds() {
    for (n, times, buffers, recalls, bound, ratio) in [
        (64, 4, 2, 3, 35.262_827_082, 1.0004),
        (64, 4, 2, 1, 35.262_827_082, 1.02),
        (128, 8, 2, 3, 84.957_082_819, 1.012),
        (100, 3, 2, 2, 39.178_425_340, 1.0005),
    ] {
        let problem =
            Problem::new(Workload::prefix_sum(n).unwrap(), Participation::Epochs { times }).unwrap();
        let budget = Budget { buffers: Some(buffers), recalls: Some(recalls), ..Budget::default() };
        let form = Recall.fit(&problem, &budget, &mut quiet).unwrap().deployed().unwrap();
        let gamma = problem.participation().sensitivity(&form).unwrap().gamma;
        let loss: f64 = form.decoder_row_norms_sq(problem.workload()).iter().sum();
        let found = gamma * loss.sqrt() / bound;
        assert!(found < ratio, "{n} steps, {times} epochs, {recalls} recalls: {found}");
        assert!(found > 1.0 - 1e-6, "{n} steps, {times} epochs, {recalls} recalls: {found}");
        assert_eq!((form.cost().buffers, form.cost().recalls), (Some(buffers), Some(recalls)));
        assert!((gamma - 1.0).abs() < 1e-6);
    }
}
