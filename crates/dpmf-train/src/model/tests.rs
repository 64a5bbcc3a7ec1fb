//! Every model against a plain reference in double precision, and the laws a gradient obeys.

use super::initial::Uniform;
use super::*;
use crate::{LabelledExample, ValuedExample};

/// Parameters of unit scale in every block, so that no gate is near linear and no bias near zero.
fn lively(length: usize, seed: u64) -> Vec<f32> {
    let mut values = vec![0.0; length];
    Uniform::new(seed).fill(&mut values, 0.5);
    values
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| f64::from(x)).collect()
}

fn norm(values: &[f32]) -> f64 {
    values.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt()
}

fn gradient_of<M: Model>(
    model: &M,
    parameters: &[f32],
    batch: &[<M::Domain as Domain>::Example<'_>],
) -> (Score, Vec<f32>) {
    let mut gradient = vec![0.0; model.parameters()];
    let score = model.gradient(parameters, batch, &mut model.workspace(), &mut gradient);
    (score, gradient)
}

fn cross_entropy_of(logits: &[f64], target: usize) -> f64 {
    logits.iter().map(|x| x.exp()).sum::<f64>().ln() - logits[target]
}

/// `bias + values · weights` with one row of weights an input.
fn affine(values: &[f64], weights: &[f64], bias: &[f64]) -> Vec<f64> {
    (0..bias.len())
        .map(|to| {
            let sum: f64 =
                values.iter().enumerate().map(|(from, x)| x * weights[from * bias.len() + to]).sum();
            bias[to] + sum
        })
        .collect()
}

/// Mean cross-entropy of the language model, one sequence and one number at a time.
fn lstm_reference(model: &Lstm, parameters: &[f64], batch: &[&[u16]]) -> f64 {
    let block = |name: &str| {
        let block = model.layout().into_iter().find(|block| block.name == name).unwrap();
        parameters[block.range].to_vec()
    };
    let (table, input, recurrent) = (block("embedding"), block("lstm.input"), block("lstm.recurrent"));
    let (bias, output, output_bias) = (block("lstm.bias"), block("output.weight"), block("output.bias"));
    let projection = model.projection.map(|_| (block("projection.weight"), block("projection.bias")));
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let (mut loss, mut predictions) = (0.0, 0.0);
    for sequence in batch {
        let (mut state, mut cell) = (vec![0.0; model.hidden], vec![0.0; model.hidden]);
        for pair in sequence.windows(2) {
            let read = &table[usize::from(pair[0]) * model.embedding..][..model.embedding];
            let gates = affine(&state, &recurrent, &affine(read, &input, &bias));
            for unit in 0..model.hidden {
                let gate = |kind: usize| gates[kind * model.hidden + unit];
                cell[unit] = sigmoid(gate(1)) * cell[unit] + sigmoid(gate(0)) * gate(2).tanh();
                state[unit] = sigmoid(gate(3)) * cell[unit].tanh();
            }
            let features = match &projection {
                Some((weights, bias)) => affine(&state, weights, bias),
                None => state.clone(),
            };
            let logits = affine(&features, &output, &output_bias);
            loss += cross_entropy_of(&logits, usize::from(pair[1]));
            predictions += 1.0;
        }
    }
    loss / predictions
}

/// Mean cross-entropy of the classifier, one example and one number at a time.
fn mlp_reference(model: &Mlp, parameters: &[f64], batch: &[LabelledExample<'_>]) -> f64 {
    let blocks = model.layout();
    let mut loss = 0.0;
    for example in batch {
        let mut values = wide(example.features);
        for (index, layer) in blocks.chunks(2).enumerate() {
            let (weights, bias) = (&parameters[layer[0].range.clone()], &parameters[layer[1].range.clone()]);
            let written = weights
                .chunks(values.len())
                .zip(bias)
                .map(|(row, bias)| bias + row.iter().zip(&values).map(|(w, x)| w * x).sum::<f64>());
            values =
                if index < model.hidden.len() { written.map(f64::tanh).collect() } else { written.collect() };
        }
        loss += cross_entropy_of(&values, usize::from(example.label));
    }
    loss / batch.len() as f64
}

/// Every coordinate of the gradient against central differences of the reference in double precision.
fn assert_gradient(
    blocks: &[Block],
    parameters: &[f32],
    (score, gradient): &(Score, Vec<f32>),
    reference: impl Fn(&[f64]) -> f64,
) {
    let mut point = wide(parameters);
    let mean = score.loss / score.predictions as f64;
    assert!((mean - reference(&point)).abs() < 2e-6, "loss {mean}, reference {}", reference(&point));
    assert_eq!(blocks.last().unwrap().range.end, parameters.len());
    for (index, block) in blocks.iter().enumerate() {
        let start = if index == 0 { 0 } else { blocks[index - 1].range.end };
        assert_eq!(block.range.start, start, "{}", block.name);
        let exact: Vec<f64> = block
            .range
            .clone()
            .map(|place| {
                const STEP: f64 = 1e-5;
                let value = point[place];
                point[place] = value + STEP;
                let above = reference(&point);
                point[place] = value - STEP;
                let below = reference(&point);
                point[place] = value;
                (above - below) / (2.0 * STEP)
            })
            .collect();
        let scale = exact.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
        assert!(scale > 1e-4, "{} has no gradient to compare", block.name);
        for (offset, exact) in exact.iter().enumerate() {
            let error = (f64::from(gradient[block.range.start + offset]) - exact).abs();
            assert!(error < 2e-5 * scale + 1e-8, "{} {offset}: {exact} is off by {error:e}", block.name);
        }
    }
}

const RAGGED: [&[u16]; 7] = [
    &[1, 2, 0, 3, 4],
    &[3],
    &[2, 2],
    &[],
    &[0, 1, 2, 3, 4, 4, 3, 10, 5, 6, 7],
    &[8, 9, 10, 1, 0],
    &[7, 6, 5],
];

fn languages() -> [Lstm; 3] {
    [
        Lstm { vocabulary: 11, embedding: 3, hidden: 9, projection: Some(5) },
        Lstm { vocabulary: 11, embedding: 2, hidden: 4, projection: None },
        Lstm { vocabulary: 17, embedding: 8, hidden: 8, projection: Some(8) },
    ]
}

struct Points {
    features: Vec<Vec<f32>>,
    classes: u16,
}

impl Points {
    fn new(count: usize, features: usize, classes: u16) -> Self {
        let features = (0..count).map(|index| lively(features, 100 + index as u64)).collect();
        Self { features, classes }
    }

    fn examples(&self) -> Vec<LabelledExample<'_>> {
        let label = |index: usize| (index * 7 % usize::from(self.classes)) as u16;
        let examples = self.features.iter().enumerate();
        examples.map(|(index, features)| LabelledExample { features, label: label(index) }).collect()
    }
}

fn classifiers() -> [Mlp; 4] {
    [
        Mlp { features: 5, hidden: vec![], classes: 3 },
        Mlp { features: 7, hidden: vec![9], classes: 4 },
        Mlp { features: 3, hidden: vec![17, 6], classes: 10 },
        Mlp { features: 16, hidden: vec![8, 8, 8], classes: 2 },
    ]
}

#[test]
fn lstm_gradient_is_that_of_the_reference() {
    for model in languages() {
        let parameters = lively(model.parameters(), 5);
        let found = gradient_of(&model, &parameters, &RAGGED);
        assert_gradient(&model.layout(), &parameters, &found, |point| lstm_reference(&model, point, &RAGGED));
    }
}

#[test]
fn mlp_gradient_is_that_of_the_reference() {
    for model in classifiers() {
        let points = Points::new(11, model.features, model.classes as u16);
        let parameters = lively(model.parameters(), 6);
        let found = gradient_of(&model, &parameters, &points.examples());
        let reference = |point: &[f64]| mlp_reference(&model, point, &points.examples());
        assert_gradient(&model.layout(), &parameters, &found, reference);
    }
}

#[test]
fn logistic_is_the_perceptron_without_hidden_layers() {
    let points = Points::new(300, 5, 3);
    let logistic = Logistic { features: 5, classes: 3 };
    let perceptron = Mlp { features: 5, hidden: vec![], classes: 3 };
    let parameters = lively(logistic.parameters(), 7);
    assert_eq!(logistic.layout(), perceptron.layout());
    assert_eq!(
        gradient_of(&logistic, &parameters, &points.examples()),
        gradient_of(&perceptron, &parameters, &points.examples())
    );
}

/// At the size that is trained, each block moved along the signs of its gradient.
#[test]
fn lstm_gradient_predicts_the_change_of_its_own_loss() {
    let model = Lstm { vocabulary: 40, embedding: 16, hidden: 64, projection: Some(32) };
    let names = names(8, 3);
    let batch: Vec<&[u16]> = names.iter().map(Vec::as_slice).collect();
    let parameters = lively(model.parameters(), 8);
    let (_, gradient) = gradient_of(&model, &parameters, &batch);
    let mut workspace = model.workspace();
    for block in model.layout() {
        let slope: f64 = gradient[block.range.clone()].iter().map(|&x| f64::from(x).abs()).sum();
        let step = (1e-2 / slope) as f32;
        let mut loss_at = |step: f32| {
            let mut moved = parameters.clone();
            for place in block.range.clone() {
                moved[place] += step * gradient[place].signum();
            }
            let score = model.score(&moved, &batch, &mut workspace);
            score.loss / score.predictions as f64
        };
        let change = loss_at(step) - loss_at(-step);
        let expected = 2.0 * f64::from(step) * slope;
        assert!((change / expected - 1.0).abs() < 1e-3, "{}: {change} for {expected}", block.name);
    }
}

fn assert_mean_of_singles<M: Model>(model: &M, batch: &[<M::Domain as Domain>::Example<'_>]) {
    let parameters = lively(model.parameters(), 9);
    let (score, together) = gradient_of(model, &parameters, batch);
    let mut sum = Score::default();
    let mut weighted = vec![0.0f64; together.len()];
    for example in batch {
        let (score, gradient) = gradient_of(model, &parameters, &[*example]);
        for (sum, value) in weighted.iter_mut().zip(&gradient) {
            *sum += f64::from(*value) * score.predictions as f64;
        }
        sum += score;
    }
    assert!((score.loss - sum.loss).abs() <= 1e-12 * sum.loss, "the rows beside it change the loss of a row");
    assert_eq!((score.correct, score.predictions), (sum.correct, sum.predictions));
    assert_eq!(model.score(&parameters, batch, &mut model.workspace()), score);
    let off = together
        .iter()
        .zip(&weighted)
        .map(|(one, sum)| (f64::from(*one) - sum / score.predictions as f64).powi(2))
        .sum::<f64>()
        .sqrt();
    assert!(off < 1e-6 * norm(&together), "{off}");
}

/// More examples than are worked on together, so that the seams are covered too.
#[test]
fn batch_gradient_is_the_weighted_mean_of_single_gradients() {
    for model in languages() {
        assert_mean_of_singles(&model, &RAGGED);
        assert_mean_of_singles(&model, &RAGGED.repeat(25));
    }
    for model in classifiers() {
        let points = Points::new(600, model.features, model.classes as u16);
        assert_mean_of_singles(&model, &points.examples());
    }
}

#[test]
fn gradient_is_added_and_workspaces_leave_no_trace() {
    let model = languages()[0];
    let parameters = lively(model.parameters(), 10);
    let (_, fresh) = gradient_of(&model, &parameters, &RAGGED);
    let mut workspace = model.workspace();
    let mut gradient = vec![0.0; model.parameters()];
    model.gradient(&parameters, &RAGGED.repeat(9), &mut workspace, &mut gradient);
    model.gradient(&parameters, &RAGGED[4..5], &mut workspace, &mut gradient);
    gradient.fill(0.0);
    model.gradient(&parameters, &RAGGED, &mut workspace, &mut gradient);
    assert_eq!(gradient, fresh);
    gradient.fill(1.0);
    model.gradient(&parameters, &RAGGED, &mut workspace, &mut gradient);
    for (sum, value) in gradient.iter().zip(&fresh) {
        assert!((sum - 1.0 - value).abs() < 1e-6);
    }
}

#[test]
fn nothing_to_predict_moves_nothing() {
    let model = languages()[0];
    let parameters = lively(model.parameters(), 11);
    let one_token: [&[u16]; 3] = [&[], &[4], &[0]];
    let outside: [&[u16]; 2] = [&[1, 11, 2], &[u16::MAX, 0]];
    for batch in [&[][..], &one_token, &outside] {
        let (score, gradient) = gradient_of(&model, &parameters, batch);
        assert_eq!(score, Score::default());
        assert!(gradient.iter().all(|&x| x == 0.0));
    }
    let classifier = Mlp { features: 2, hidden: vec![3], classes: 2 };
    let parameters = lively(classifier.parameters(), 12);
    let wrong = [
        LabelledExample { features: &[1.0], label: 0 },
        LabelledExample { features: &[1.0, 2.0, 3.0], label: 0 },
        LabelledExample { features: &[1.0, 2.0], label: 2 },
    ];
    for batch in [&[][..], &wrong] {
        let (score, gradient) = gradient_of(&classifier, &parameters, batch);
        assert_eq!(score, Score::default());
        assert!(gradient.iter().all(|&x| x == 0.0));
    }
}

/// An example that is not admitted is as if it were not there.
#[test]
fn examples_outside_the_model_do_not_dilute_the_rest() {
    let model = languages()[1];
    let parameters = lively(model.parameters(), 13);
    let mixed: [&[u16]; 3] = [&[1, 2, 3], &[1, 99, 3, 4], &[4, 5]];
    assert!(model.admits(mixed[0]) && !model.admits(mixed[1]));
    assert_eq!(
        gradient_of(&model, &parameters, &mixed),
        gradient_of(&model, &parameters, &[mixed[0], mixed[2]])
    );
}

#[test]
fn zero_parameters_leave_every_class_as_likely() {
    let model = Lstm { vocabulary: 11, embedding: 3, hidden: 5, projection: Some(2) };
    let (score, gradient) = gradient_of(&model, &vec![0.0; model.parameters()], &[&[0, 1, 2, 0]]);
    assert!((score.loss / 3.0 - 11f64.ln()).abs() < 1e-6);
    // The state is zero, so that only the output bias moves: by 1/11 less the frequency of the token.
    let bias = model.layout().pop().unwrap().range;
    assert!(gradient[..bias.start].iter().all(|&x| x == 0.0));
    for (token, value) in gradient[bias].iter().enumerate() {
        let frequency = if token < 3 { 1.0 / 3.0 } else { 0.0 };
        assert!((value - (1.0 / 11.0 - frequency)).abs() < 1e-6, "{token}: {value}");
    }
}

/// One weight of each kind, in closed form.
#[test]
fn smallest_models_in_closed_form() {
    let model = Logistic { features: 1, classes: 2 };
    let (w0, w1, b0, b1, x) = (0.5f32, -0.25f32, 0.1f32, 0.2f32, 2.0f32);
    let (score, gradient) =
        gradient_of(&model, &[w0, w1, b0, b1], &[LabelledExample { features: &[x], label: 1 }]);
    let odds = f64::from((w0 - w1) * x + b0 - b1).exp();
    let wrong = (odds / (1.0 + odds)) as f32;
    assert!((score.loss - (1.0 + odds).ln()).abs() < 1e-6);
    for (value, expected) in gradient.iter().zip([wrong * x, -wrong * x, wrong, -wrong]) {
        assert!((value - expected).abs() < 1e-6);
    }

    let model = Lstm { vocabulary: 1, embedding: 1, hidden: 1, projection: None };
    let (score, gradient) = gradient_of(&model, &lively(model.parameters(), 1), &[&[0, 0, 0]]);
    assert_eq!((score.loss, score.correct, score.predictions), (0.0, 2, 2));
    assert!(gradient.iter().all(|&x| x == 0.0), "one token alone is certain");
}

#[test]
fn parameter_counts_are_exact() {
    let words = Lstm { vocabulary: 10_004, embedding: 96, hidden: 670, projection: Some(96) };
    assert_eq!(words.parameters(), 4_050_748);
    let letters = Lstm { vocabulary: 40, embedding: 16, hidden: 64, projection: Some(32) };
    assert_eq!(letters.parameters(), 640 + 4 * 64 * (16 + 64 + 1) + 33 * 40 + 65 * 32);
    assert_eq!(Logistic { features: 784, classes: 10 }.parameters(), 7850);
    assert_eq!(Mlp { features: 4, hidden: vec![3, 2], classes: 5 }.parameters(), 15 + 8 + 15);
}

#[test]
fn senseless_sizes_are_refused_by_name() {
    let model = Lstm { vocabulary: 40, embedding: 16, hidden: 64, projection: Some(32) };
    assert_eq!(model.checked().unwrap(), model);
    for (model, name) in [
        (Lstm { vocabulary: 0, ..model }, "vocabulary"),
        (Lstm { vocabulary: 65_537, ..model }, "vocabulary"),
        (Lstm { embedding: 0, ..model }, "embedding"),
        (Lstm { hidden: 1 << 40, ..model }, "hidden"),
        (Lstm { projection: Some(0), ..model }, "projection"),
    ] {
        assert!(model.checked().unwrap_err().to_string().starts_with(name));
    }
    assert!(Mlp { features: 3, hidden: vec![2, 0], classes: 2 }.checked().is_err());
    assert!(Logistic { features: 3, classes: 1 << 17 }.checked().is_err());
}

/// A language with something to learn: each letter follows from the last two, most of the time.
fn names(count: usize, seed: u64) -> Vec<Vec<u16>> {
    let mut draws = vec![0.0; 16 * count];
    Uniform::new(seed).fill(&mut draws, 1.0);
    let bits = |x: f32| (f64::from(x).abs() * 1e6) as usize;
    let name = |draws: &[f32]| {
        let mut name = vec![0, (bits(draws[0]) % 40) as u16];
        for &draw in &draws[1..9 + bits(draws[15]) % 6] {
            let (last, before) = (name[name.len() - 1], name[name.len() - 2]);
            let surprise = if draw > 1.2 { bits(draw) % 7 } else { 0 };
            name.push(((usize::from(last) * 3 + usize::from(before) + 1 + surprise) % 40) as u16);
        }
        name
    };
    draws.chunks(16).map(name).collect()
}

fn descend<M: Model>(
    model: &M,
    batch: &[<M::Domain as Domain>::Example<'_>],
    steps: usize,
    rate: f32,
) -> (f64, f64) {
    let mut parameters = model.initial(1);
    let mut workspace = model.workspace();
    let mut gradient = vec![0.0; parameters.len()];
    let mean = |score: Score| score.loss / score.predictions as f64;
    let before = mean(model.score(&parameters, batch, &mut workspace));
    for _ in 0..steps {
        gradient.fill(0.0);
        model.gradient(&parameters, batch, &mut workspace, &mut gradient);
        for (value, slope) in parameters.iter_mut().zip(&gradient) {
            *value -= rate * slope;
        }
    }
    (before, mean(model.score(&parameters, batch, &mut workspace)))
}

#[test]
fn descent_learns_a_small_language() {
    let model = Lstm { vocabulary: 40, embedding: 8, hidden: 16, projection: Some(8) };
    let names = names(30, 2);
    let batch: Vec<&[u16]> = names.iter().map(Vec::as_slice).collect();
    let (before, after) = descend(&model, &batch, 200, 2.0);
    assert!((before / 40f64.ln() - 1.0).abs() < 0.01, "{before}");
    assert!(after < 0.8 * before, "{before} to {after}");
}

#[test]
fn descent_learns_what_no_line_separates() {
    let corners: [([f32; 2], u16); 4] =
        [([1.0, 1.0], 0), ([-1.0, -1.0], 0), ([1.0, -1.0], 1), ([-1.0, 1.0], 1)];
    let batch: Vec<_> =
        corners.iter().map(|(features, label)| LabelledExample { features, label: *label }).collect();
    let (before, after) = descend(&Mlp { features: 2, hidden: vec![16], classes: 2 }, &batch, 300, 0.5);
    assert!((before / 2f64.ln() - 1.0).abs() < 0.03 && after < 0.05, "{before} to {after}");
    let (before, after) = descend(&Logistic { features: 2, classes: 2 }, &batch, 300, 0.5);
    assert!((before - 2f64.ln()).abs() < 1e-6 && (after - before).abs() < 1e-6, "{before} to {after}");
}

#[test]
fn untrained_loss_is_that_of_a_guess() {
    let letters = Lstm { vocabulary: 40, embedding: 16, hidden: 64, projection: Some(32) };
    let names = names(100, 4);
    let batch: Vec<&[u16]> = names.iter().map(Vec::as_slice).collect();
    for model in [letters, Lstm { projection: None, ..letters }] {
        for seed in 0..5 {
            let score = model.score(&model.initial(seed), &batch, &mut model.workspace());
            let mean = score.loss / score.predictions as f64;
            assert!((mean / 40f64.ln() - 1.0).abs() < 0.01, "{mean}");
        }
    }
    assert_eq!(letters.initial(3), letters.initial(3));
    assert_ne!(letters.initial(3), letters.initial(4));
}

/// A digest of the bits of a gradient: a change here breaks the resumption of runs begun before it.
fn digest(values: &[f32]) -> u64 {
    values
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, x| (hash ^ u64::from(x.to_bits())).wrapping_mul(0x0100_0000_01b3))
}

/// With the instructions of this machine and with those of any.
#[test]
fn bits_are_stable() {
    let model = Lstm { vocabulary: 40, embedding: 16, hidden: 64, projection: Some(32) };
    let names = names(16, 1);
    let batch: Vec<&[u16]> = names.iter().map(Vec::as_slice).collect();
    let classifier = Mlp { features: 21, hidden: vec![13], classes: 5 };
    let points = Points::new(9, 21, 5);
    for baseline in [false, true] {
        dpmf::simd::baseline_only(baseline);
        let (_, gradient) = gradient_of(&model, &model.initial(1), &batch);
        let (_, other) = gradient_of(&classifier, &classifier.initial(1), &points.examples());
        dpmf::simd::baseline_only(false);
        assert_eq!(
            (digest(&gradient), digest(&other)),
            (18_395_653_456_499_460_155, 1_901_694_241_626_614_234),
            "baseline: {baseline}"
        );
    }
}

#[test]
fn what_comes_next_has_the_probabilities_that_the_loss_is_of() {
    for projection in [None, Some(3)] {
        let model = Lstm { vocabulary: 7, embedding: 3, hidden: 5, projection }.checked().unwrap();
        let parameters = model.initial(3);
        let (mut state, sequence) = (model.state(), [0_u16, 4, 2, 6]);
        let mut next = Vec::new();
        sequence.iter().for_each(|token| next = model.read(&parameters, *token, &mut state));
        assert!((next.iter().sum::<f32>() - 1.0).abs() < 1e-5);
        for token in 0..7 {
            // The loss of one more token is the logarithm of its probability.
            let longer = [&sequence[..], &[token]].concat();
            let loss = |sequence: &[u16]| model.score(&parameters, &[sequence], &mut model.workspace()).loss;
            let expected = loss(&sequence) - loss(&longer);
            let found = f64::from(next[usize::from(token)]).ln();
            assert!((found - expected).abs() < 1e-4, "{token}: {found} {expected}");
        }
    }
}

#[test]
fn numbers_are_fitted_by_the_gradient_of_half_the_squared_error() {
    let rows: Vec<([f32; 2], f32)> =
        (0..9).map(|i| ([i as f32 / 4.0 - 1.0, (i % 3) as f32], 0.3 * i as f32)).collect();
    let batch: Vec<ValuedExample<'_>> =
        rows.iter().map(|(features, value)| ValuedExample { features, value: *value }).collect();
    for hidden in [vec![], vec![4], vec![3, 2]] {
        let model = Regressor { features: 2, hidden }.checked().unwrap();
        let mut parameters = model.initial(5);
        parameters.iter_mut().enumerate().for_each(|(i, x)| *x += 0.05 * (i as f32 % 7.0 - 3.0));
        let (mut space, mut gradient) = (model.workspace(), vec![0.0; model.parameters()]);
        let score = model.gradient(&parameters, &batch, &mut space, &mut gradient);
        let flat: Vec<f32> = rows.iter().flat_map(|(features, _)| *features).collect();
        let values = model.values(&parameters, &flat);
        let expected: f64 =
            values.iter().zip(&rows).map(|(y, (_, t))| 0.5 * (f64::from(*y) - f64::from(*t)).powi(2)).sum();
        assert!((score.loss - expected).abs() < 1e-5 * expected, "{} {expected}", score.loss);
        assert_eq!((score.predictions, score.correct, model.classifies()), (9, 0, false));
        for at in 0..parameters.len() {
            let mut shifted = |by: f32| {
                let mut moved = parameters.clone();
                moved[at] += by;
                model.score(&moved, &batch, &mut space).loss / 9.0
            };
            let slope = (shifted(1e-2) - shifted(-1e-2)) / 2e-2;
            assert!((slope - f64::from(gradient[at])).abs() < 2e-3 * (1.0 + slope.abs()), "{at}: {slope}");
        }
        let odd = [
            ValuedExample { features: &[1.0], value: 0.0 },
            ValuedExample { features: &[1.0, 2.0], value: f32::NAN },
        ];
        assert!(odd.iter().all(|example| !model.admits(*example)));
    }
}

/// Runs are bound to these words: another one here, and runs that began before cannot be resumed.
#[test]
fn kinds_are_those_that_runs_are_bound_to() {
    let kinds = [
        Lstm { vocabulary: 5, embedding: 2, hidden: 3, projection: None }.kind(),
        Logistic { features: 2, classes: 3 }.kind(),
        Mlp { features: 2, hidden: vec![3], classes: 3 }.kind(),
        Regressor { features: 2, hidden: vec![] }.kind(),
    ];
    assert_eq!(kinds, ["lstm", "logistic", "mlp", "regressor"]);
}
