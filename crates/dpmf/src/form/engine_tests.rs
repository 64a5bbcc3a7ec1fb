//! Every engine against the dense rows of its form, and against every way to cut the work.

use super::*;
use crate::engine::IterateStage;
use crate::error::Error;
use crate::form::state_space::Parts;
use crate::form::tree::Decoder;
use crate::identity::Identity;
use crate::linalg::banded::LowerBanded;
use crate::noise::{Field, NoiseKey, NoiseStream, RunId, StreamKey};
use crate::workload::{Average, Optimizer};
use proptest::prelude::*;
use std::ops::Range;

fn key() -> StreamKey {
    NoiseKey::from_seed(5).stream(Identity([1; 32]), RunId([2; 16]))
}

fn single(x: f64) -> f64 {
    f64::from(x as f32)
}

/// Numbers that look random, on the grid of single precision.
fn numbers() -> impl FnMut(f64, f64) -> f64 {
    let mut seed = 1_u64;
    move |low: f64, high: f64| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        single(low + (high - low) * (seed >> 40) as f64 / (1_u64 << 24) as f64)
    }
}

fn filter(steps: usize, order: usize, diagonal: bool) -> StateSpace {
    let mut next = numbers();
    let mut parts = Parts::default();
    for _ in 0..steps {
        parts.direct.push(next(0.5, 1.5));
        parts.output.extend((0..order).map(|_| next(-0.5, 0.5)));
        parts.input.extend((0..order).map(|_| next(-0.5, 0.5)));
        let increment = upper_places(order).map(|(k, l)| match k == l {
            true => next(-0.3, -0.01),
            false if diagonal => 0.0,
            false => next(-0.1, 0.1),
        });
        parts.increment.extend(increment);
    }
    StateSpace::from_parts(order, parts).unwrap()
}

fn upper_places(order: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..order).flat_map(move |k| (k..order).map(move |l| (k, l)))
}

fn structured(workload: &Workload, diagonals: usize, rank: usize) -> Structured {
    let (n, mut next) = (workload.steps(), numbers());
    let band =
        LowerBanded::from_fn(n, diagonals - 1, |_, k| if k == 0 { next(0.8, 1.2) } else { next(-0.5, 0.5) });
    let mut factor = || (0..(n - diagonals) * rank).map(|_| next(-0.3, 0.3)).collect();
    let (left, right) = (factor(), factor());
    Structured::new(band, rank, left, right, workload.recurrence().unwrap().clone())
        .unwrap()
        .rounded()
        .unwrap()
}

fn recall(steps: usize, stride: usize, order: usize, recalls: usize) -> Recall {
    let mut next = numbers();
    let mut parts =
        recall::Parts { increment: (0..order).map(|_| next(-0.3, -0.01)).collect(), ..Default::default() };
    for t in 0..steps {
        let known = recalls.min(t / stride);
        parts.direct.push(next(0.5, 1.5));
        parts.recalled.extend((1..=recalls).map(|j| if j <= known { next(-0.5, 0.5) } else { 0.0 }));
        parts.output.extend((0..order).map(|_| next(-0.5, 0.5)));
        parts.input.extend(
            (0..=recalls)
                .flat_map(|j| std::iter::repeat_n(j, order))
                .map(|j| if j <= known { next(-0.5, 0.5) } else { 0.0 }),
        );
    }
    Recall::from_parts(stride, order, recalls, parts).unwrap()
}

fn banded(steps: usize, bands: usize, constant: bool) -> Banded {
    let mut next = numbers();
    let rows = if constant { 1 } else { steps };
    let feedback =
        (0..rows * bands).map(|i| if i % bands == 0 { next(0.5, 1.5) } else { next(-0.2, 0.2) }).collect();
    Banded::new(bands, feedback, (0..steps).map(|_| next(0.5, 1.5)).collect()).unwrap()
}

/// Every engine with the form it stands for.
fn registry(steps: usize) -> Vec<(String, Form)> {
    let mut all = vec![
        ("independent".into(), Form::StateSpace(StateSpace::independent(steps).unwrap())),
        ("toeplitz".into(), Form::Toeplitz(Toeplitz::sqrt_prefix_sum(steps).unwrap())),
    ];
    for decoder in [Decoder::HonakerFull, Decoder::Binary, Decoder::HonakerOnline] {
        all.push((format!("{decoder:?}"), Form::Tree(Tree::new(steps, decoder).unwrap())));
    }
    for order in [0, 1, 2, 3, 4, 7, 9, 10, 13] {
        for diagonal in [false, true] {
            let name = format!("state space {order}, diagonal: {diagonal}");
            all.push((name, Form::StateSpace(filter(steps, order, diagonal))));
        }
    }
    for (stride, order, recalls) in [(1, 0, 0), (1, 0, 2), (2, 1, 1), (3, 2, 3), (7, 4, 1), (100, 1, 2)] {
        let name = format!("recall {order}, {recalls} every {stride}");
        all.push((name, Form::Recall(recall(steps, stride, order, recalls))));
    }
    for (bands, constant) in [(1, true), (2, true), (3, false), (9, true), (9, false)] {
        let name = format!("banded {bands}, constant: {constant}");
        all.push((name, Form::Banded(banded(steps, bands, constant))));
    }
    let heavy = Optimizer { momentum: 0.75, ..Default::default() };
    for (name, optimizer) in [
        ("prefix sum", Optimizer::default()),
        ("momentum", heavy),
        ("nesterov", Optimizer { nesterov: true, ..heavy }),
    ] {
        let workload = Workload::sgd(vec![0.5; steps], optimizer).unwrap();
        for (h, r) in [(1, 0), (1, 2), (2, 1), (3, 0), (4, 3)] {
            if h + r <= steps {
                let name = format!("structured {h}, {r} for {name}");
                all.push((name, Form::Structured(structured(&workload, h, r))));
            }
        }
    }
    all.into_iter().map(|(name, form)| (name, form.deployed().unwrap())).collect()
}

/// `N Z` in double precision with the sum of the sizes of its terms, `[step][coordinate]`.
fn dense_product(form: &Form, coordinates: Range<u64>) -> Vec<Vec<(f64, f64)>> {
    let (n, m) = (form.steps(), form.noise_rows());
    let mut coloring = form.coloring_rows();
    let mut rows = vec![vec![0.0; m]; n];
    rows.iter_mut().for_each(|row| coloring(row));
    let d = (coordinates.end - coordinates.start) as usize;
    let field = Field::new(&key());
    let mut products = vec![vec![(0.0, 0.0); d]; n];
    let mut z = vec![0.0; d];
    for t in 0..m {
        field.row(t as u64).fill(coordinates.start, &mut z);
        for (i, products) in products.iter_mut().enumerate() {
            let weight = rows[i][t];
            for (product, &z) in products.iter_mut().zip(&z) {
                product.0 += weight * f64::from(z);
                product.1 += (weight * f64::from(z)).abs();
            }
        }
    }
    products
}

fn stream_rows(form: &Form, coordinates: Range<u64>, stage: Option<IterateStage>) -> Vec<Vec<f32>> {
    let d = (coordinates.end - coordinates.start) as usize;
    let engine = form.engine(1).unwrap();
    let mut stream = NoiseStream::assemble(engine, stage, key(), coordinates, 1.0).unwrap();
    (0..stream.steps())
        .map(|i| {
            let mut row = vec![0.0; d];
            assert_eq!(stream.add_next(&mut row).unwrap(), i);
            row
        })
        .collect()
}

fn to_bits(rows: &[Vec<f32>]) -> Vec<Vec<u32>> {
    rows.iter().map(|row| row.iter().map(|x| x.to_bits()).collect()).collect()
}

#[test]
fn every_engine_is_its_dense_matrix_times_the_field() {
    for steps in [1, 2, 3, 5, 8, 31, 64] {
        for (name, form) in registry(steps) {
            let coordinates = 50..250;
            let expected = dense_product(&form, coordinates.clone());
            let streamed = stream_rows(&form, coordinates, None);
            for (i, (row, expected)) in streamed.iter().zip(&expected).enumerate() {
                for (x, (product, size)) in row.iter().zip(expected) {
                    let error = (f64::from(*x) - product).abs();
                    assert!(error < 4e-6 * (1.0 + size), "{name}, step {i} of {steps}: {x} is not {product}");
                }
            }
        }
    }
}

#[test]
fn one_two_and_three_steps_in_closed_form() {
    let field = Field::new(&key());
    let z = |t: u64| {
        let mut z = [0.0];
        field.row(t).fill(7, &mut z);
        z[0]
    };
    let of = |form: Form| -> Vec<f32> { stream_rows(&form, 7..8, None).iter().map(|row| row[0]).collect() };
    assert_eq!(of(Form::StateSpace(StateSpace::independent(3).unwrap())), [z(0), z(1), z(2)]);

    // Nodes in postorder: leaf, leaf, their parent, leaf. The parent's estimate is (2 node + left + right)/3.
    let tree = |steps| of(Form::Tree(Tree::new(steps, Decoder::HonakerOnline).unwrap().rounded().unwrap()));
    let (own, below) = ((2.0_f64 / 3.0) as f32, 1.0 - (2.0_f64 / 3.0) as f32);
    let second = -z(0) + (own * z(2) + below * (z(0) + z(1)));
    assert_eq!(tree(1), [z(0)]);
    assert_eq!(tree(2), [z(0), second]);
    assert_eq!(tree(3), [z(0), second, z(3)]);

    // u = z + s/2, s ← s − s/4 + z/8.
    let parts = Parts {
        direct: vec![1.0; 3],
        output: vec![0.5; 3],
        input: vec![0.125; 3],
        increment: vec![-0.25; 3],
    };
    let filter = StateSpace::from_parts(1, parts).unwrap();
    let first = 0.125 * z(0);
    let state = first + (0.125 * z(1) + -0.25 * first);
    assert_eq!(of(Form::StateSpace(filter)), [z(0), z(1) + 0.5 * first, z(2) + 0.5 * state]);

    // u = z − z_{t−1}/2 + x/4, x ← x − x/2 + z.
    let parts = recall::Parts {
        direct: vec![1.0; 3],
        recalled: vec![0.0, -0.5, -0.5],
        output: vec![0.25; 3],
        input: vec![1.0, 0.0, 1.0, 0.0, 1.0, 0.0],
        increment: vec![-0.5],
    };
    let recall = Recall::from_parts(1, 1, 1, parts).unwrap();
    let state = z(0) + (z(1) + -0.5 * z(0));
    let exact = [z(0), (z(1) + 0.25 * z(0)) + -0.5 * z(0), (z(2) + 0.25 * state) + -0.5 * z(1)];
    assert_eq!(of(Form::Recall(recall)), exact);

    // C has ones, and halves below: u_t = z_t − u_{t−1}/2, at the last step doubled.
    let banded = Banded::toeplitz(&[1.0, 0.5], vec![1.0, 1.0, 0.5]).unwrap();
    let second = (f64::from(z(1)) - 0.5 * f64::from(z(0))) as f32;
    let third = (f64::from(z(2)) - 0.5 * f64::from(second)) as f32;
    assert_eq!(of(Form::Banded(banded)), [z(0), second, 2.0 * third]);

    // B̂ has diagonal 1, 0.5 below it and 0.25·0.5 in the corner; N is the difference of its rows.
    let band = LowerBanded::from_fn(3, 1, |_, k| if k == 0 { 1.0 } else { 0.5 });
    let recurrence = Workload::prefix_sum(3).unwrap().recurrence().unwrap().clone();
    let structured = Structured::new(band, 1, vec![0.25], vec![0.5], recurrence).unwrap();
    let z = |t: u64| f64::from(z(t));
    let exact = [z(0), z(1) - 0.5 * z(0), z(2) - 0.5 * z(1) - 0.375 * z(0)];
    assert_eq!(of(Form::Structured(structured)), exact.map(|x| x as f32));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn shards_tiles_and_threads_never_change_a_bit(
        start in 0_u64..5000,
        length in 1_usize..9000,
        cut in 0.0..1.0_f64,
        threads in 1_usize..5,
    ) {
        let whole = start..start + length as u64;
        let middle = start + (cut * length as f64) as u64;
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let nesterov = Optimizer { momentum: 0.9, nesterov: true, ..Default::default() };
        let workload = Workload::sgd(vec![0.5; 7], nesterov).unwrap();
        let stage = IterateStage::new(&workload).unwrap();
        for (index, (name, form)) in registry(7).into_iter().enumerate() {
            let stage = || (index % 2 == 1).then(|| stage.clone());
            let expected = to_bits(&stream_rows(&form, whole.clone(), stage()));
            let mut joined = vec![Vec::new(); expected.len()];
            for part in [whole.start..middle, middle..whole.end] {
                if !part.is_empty() {
                    let rows = pool.install(|| stream_rows(&form, part, stage()));
                    joined.iter_mut().zip(to_bits(&rows)).for_each(|(joined, row)| joined.extend(row));
                }
            }
            prop_assert!(joined == expected, "{name}");
        }
    }
}

#[test]
fn iterate_noise_is_the_optimizer_run_over_gradient_noise() {
    let base = Optimizer::default();
    let optimizers = [
        base,
        Optimizer { momentum: 0.9, ..base },
        Optimizer { momentum: 0.9, nesterov: true, ..base },
        Optimizer { weight_decay: 0.1, ..base },
        Optimizer {
            momentum: 0.5,
            nesterov: true,
            weight_decay: 0.1,
            coupled: true,
            average: Average::Uniform,
        },
        Optimizer { average: Average::Ema(0.8), ..base },
    ];
    let steps = 23;
    for optimizer in optimizers {
        let rates = (0..steps).map(|i| 0.1 + 0.05 * f64::from(i as u32 % 5)).collect();
        let workload = Workload::sgd(rates, optimizer).unwrap();
        let filter = Form::StateSpace(filter(steps, 2, false));
        let gradient = stream_rows(&filter, 0..100, None);
        let iterate = stream_rows(&filter, 0..100, Some(IterateStage::new(&workload).unwrap()));
        for j in 0..100 {
            let mut column: Vec<f64> = gradient.iter().map(|row| row[j].into()).collect();
            workload.apply(&mut column);
            for (row, expected) in iterate.iter().zip(&column) {
                let error = (f64::from(row[j]) - expected).abs();
                assert!(error < 2e-6 * (1.0 + expected.abs()), "{optimizer:?}: {} {expected}", row[j]);
            }
        }
    }
    // No drift: 20 000 steps of momentum, where a pole that single precision moved would show.
    let steps = 20_000;
    let workload = Workload::sgd(vec![0.1; steps], Optimizer { momentum: 0.95, ..base }).unwrap();
    let stage = Some(IterateStage::new(&workload).unwrap());
    let independent = Form::StateSpace(StateSpace::independent(steps).unwrap());
    let iterate = stream_rows(&independent, 0..1, stage);
    let gradient = stream_rows(&independent, 0..1, None);
    let mut column: Vec<f64> = gradient.iter().map(|row| row[0].into()).collect();
    workload.apply(&mut column);
    let size = column.iter().fold(0.0_f64, |size, x| size.max(x.abs()));
    for (row, expected) in iterate.iter().zip(&column) {
        assert!((f64::from(row[0]) - expected).abs() < 1e-4 * size, "{} {expected}", row[0]);
    }

    let dense = Workload::dense(Mat::identity(2, 2)).unwrap();
    assert!(matches!(IterateStage::new(&dense), Err(Error::Unsupported { .. })));
}

#[test]
fn coefficients_that_single_precision_would_change_are_refused() {
    let refused = |form: Form| match form.engine(1) {
        Err(Error::InvalidEntry { index, .. }) => (index, 0),
        Err(Error::InvalidMatrixEntry { row, column, .. }) => (row, column),
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("accepted"),
    };
    let mut third = filter(2, 1, false).parts().clone();
    third.output[1] = 1.0 / 3.0;
    assert_eq!(refused(Form::StateSpace(StateSpace::from_parts(1, third).unwrap())), (1, 0));
    assert_eq!(refused(Form::Tree(Tree::new(4, Decoder::HonakerOnline).unwrap())), (1, 0));
    assert_eq!(refused(Form::Toeplitz(Toeplitz::new(vec![1.0, 0.1]).unwrap())), (1, 0));
    let tenth = Mat::from_fn(2, 2, |i, j| if i == j { 1.0 } else { 0.1 * i as f64 });
    assert_eq!(refused(Form::Dense(Dense::from_coloring(tenth).unwrap())), (1, 0));
    let recurrence = Workload::sgd(vec![0.3; 2], Optimizer::default()).unwrap().recurrence().unwrap().clone();
    let structured = Structured::new(LowerBanded::identity(2), 0, vec![], vec![], recurrence).unwrap();
    assert_eq!(refused(Form::Structured(structured)), (0, 0));

    let full = Form::Tree(Tree::new(4, Decoder::HonakerFull).unwrap());
    assert!(matches!(full.engine(1), Err(Error::Unsupported { .. })));
}

#[test]
fn rows_computed_ahead_are_the_same_to_the_bit() {
    let (steps, coordinates) = (23, 5..1500);
    for (name, form) in registry(steps) {
        let alone = stream_rows(&form, coordinates.clone(), None);
        for ahead in [2, 4, 23, 64] {
            let engine = form.engine(ahead).unwrap();
            let mut stream = NoiseStream::assemble(engine, None, key(), coordinates.clone(), 1.0).unwrap();
            let mut rows = vec![vec![0.0; 1495]; steps];
            rows.iter_mut().for_each(|row| _ = stream.add_next(row).unwrap());
            assert_eq!(to_bits(&rows), to_bits(&alone), "{name}, {ahead} ahead");
        }
    }
}

#[test]
fn buffers_are_what_the_form_says() {
    for steps in [1, 2, 3, 4, 100] {
        for (name, form) in registry(steps) {
            let engine = form.engine(1).unwrap();
            assert_eq!(
                (engine.buffers(), engine.steps()),
                (form.cost().buffers.unwrap_or(0), steps),
                "{name}"
            );
        }
    }
    let tree = Tree::new(256, Decoder::Binary).unwrap();
    let memory = |coordinates| {
        let engine = tree.engine(1).unwrap();
        NoiseStream::assemble(engine, None, key(), coordinates, 1.0).unwrap().memory()
    };
    assert_eq!(memory(0..1000), 8 * 1024 * 4);
    // The edges of a shard are whole packets.
    assert_eq!(memory(63..65), 8 * 128 * 4);
}

#[test]
fn memory_that_is_not_there_is_an_error() {
    let engine = filter(2, 4, false).engine(1).unwrap();
    let result = NoiseStream::assemble(engine, None, key(), 0..1 << 58, 1.0);
    assert!(matches!(result, Err(Error::Memory { bytes, .. }) if bytes == 1 << 62));
}
