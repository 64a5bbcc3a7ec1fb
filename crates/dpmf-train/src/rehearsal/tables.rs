//! Made-up tables: what is known of a table before anybody looks at it, and tables that look like it.

use chacha20::ChaCha20Rng;
use rand::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};

/// The sizes of a table. They are public, or were released before: nothing else of the data enters a rehearsal.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Shape {
    /// Users to train on.
    pub users: usize,
    /// Columns that become one feature each.
    pub numbers: usize,
    /// Values of every column of categories.
    pub categories: Vec<usize>,
    /// Buckets of every column of words.
    pub words: Vec<usize>,
    /// Classes; nothing where a number is predicted.
    pub classes: Option<usize>,
    /// Widths of the hidden layers.
    pub hidden: Vec<usize>,
}

impl Shape {
    /// Number of features after encoding.
    pub fn features(&self) -> usize {
        self.numbers + self.categories.iter().chain(&self.words).sum::<usize>()
    }

    /// Outputs of a model.
    pub fn outputs(&self) -> usize {
        self.classes.unwrap_or(1)
    }

    /// Root of the expected squared norm of a row with its constant: how long the gradient of a row is for an error of one.
    pub fn length(&self) -> f64 {
        ((1 + self.numbers + self.categories.len() + self.words.len()) as f64).sqrt()
    }
}

/// Common factors behind the columns.
const FACTORS: usize = 3;
/// Share of rows whose numbers lie far out, and how far.
const OUTLIERS: (f64, f32) = (0.03, 3.0);
/// Scales from the centre beyond which a number counts as that far, as in a schema.
const FARTHEST: f32 = 8.0;
/// Words of a text.
const WORDS: usize = 10;
/// Rows that a model is judged by.
const TEST: usize = 1000;
/// Tables of a rehearsal.
pub(super) const TABLES: usize = 6;

/// Numbers for a made-up table.
pub(super) struct TableRng(ChaCha20Rng);

impl TableRng {
    pub(super) fn new(seed: u64, stream: u64) -> Self {
        let mut rng = ChaCha20Rng::seed_from_u64(seed);
        rng.set_stream(stream);
        Self(rng)
    }

    /// In (0, 1).
    pub(super) fn uniform(&mut self) -> f64 {
        ((self.0.next_u64() >> 11) as f64 + 0.5) / (1_u64 << 53) as f64
    }

    pub(super) fn normal(&mut self) -> f64 {
        let (u, v) = (self.uniform(), self.uniform());
        (-2.0 * libm::log(u)).sqrt() * libm::cos(2.0 * std::f64::consts::PI * v)
    }

    /// An index by its weight.
    fn index(&mut self, cumulative: &[f64]) -> usize {
        let total = cumulative.last().copied().unwrap_or(1.0);
        let u = self.uniform() * total;
        cumulative.partition_point(|edge| *edge < u).min(cumulative.len().saturating_sub(1))
    }
}

/// Edges of frequencies that fall like 1, 1/2, 1/3, …
fn falling(values: usize) -> Vec<f64> {
    let mut sum = 0.0;
    (0..values)
        .map(|at| {
            sum += 1.0 / (at + 1) as f64;
            sum
        })
        .collect()
}

/// Features with what belongs to them: a number, or the probability of every class.
pub(super) struct Rows {
    pub(super) features: Vec<f32>,
    /// Numbers, or classes.
    pub(super) targets: Vec<f32>,
    /// Of the teacher: expected numbers, or probabilities by class.
    pub(super) truth: Vec<f32>,
    /// ‖x‖² + 1 of every row.
    pub(super) norms_sq: Vec<f32>,
}

/// A made-up table, with what is left out of training to judge by.
pub(super) struct MadeUp {
    pub(super) train: Rows,
    pub(super) test: Rows,
    /// Merit of the best constant and of the teacher: accuracy, or RMSE below zero.
    pub(super) trivial: f64,
    pub(super) optimum: f64,
}

/// How columns come about.
struct Columns {
    /// For every number and category the loadings on the factors and the share of its own noise.
    loadings: Vec<([f64; FACTORS], f64)>,
    shifts: Vec<f64>,
}

/// A teacher: weights and constants of every output.
struct Teacher {
    weights: Vec<f64>,
    constants: Vec<f64>,
}

impl MadeUp {
    /// The `index`th of [`TABLES`] tables, with so many rows to train on.
    ///
    /// Easy, middling and hard tables take turns: a teacher explains 90, 60 or 30 % of the variance of a number, or has
    /// log-odds of standard deviation 12, 4 or 1.5. Half of the tables have a teacher with few weights, skewed errors and
    /// classes of unequal frequency.
    pub(super) fn new(shape: &Shape, rows: usize, index: usize) -> Self {
        let mut random = TableRng::new(0x7265_6865, index as u64);
        let (hardness, uneven) = (index % 3, index / 3 % 2 == 1);
        let columns = Columns::new(shape, &mut random);
        let sample: Vec<f32> = columns.rows(shape, 500, &mut random);
        let teacher = Teacher::new(shape, &sample, hardness, uneven, &mut random);
        let offset = random.normal() / (shape.users as f64 / 10.0).max(10.0).sqrt();
        let mut rows_of = |count| {
            let features = columns.rows(shape, count, &mut random);
            teacher.teach(shape, features, hardness, uneven, offset as f32, &mut random)
        };
        let (train, test) = (rows_of(rows), rows_of(TEST));
        let (trivial, optimum) = match shape.classes {
            None => {
                let count = test.targets.len() as f64;
                let mean = test.targets.iter().map(|y| f64::from(*y)).sum::<f64>() / count;
                let rmse = |of: &dyn Fn(usize) -> f64| {
                    let errors =
                        test.targets.iter().enumerate().map(|(i, y)| (f64::from(*y) - of(i)).powi(2));
                    (errors.sum::<f64>() / count).sqrt()
                };
                (-rmse(&|_| mean), -rmse(&|i| f64::from(test.truth[i])))
            }
            Some(classes) => {
                let mut shares = vec![0.0; classes];
                let mut best = 0.0;
                for row in test.truth.chunks_exact(classes) {
                    shares.iter_mut().zip(row).for_each(|(share, p)| *share += f64::from(*p));
                    best += f64::from(row.iter().copied().fold(0.0, f32::max));
                }
                (shares.into_iter().fold(0.0, f64::max) / TEST as f64, best / TEST as f64)
            }
        };
        Self { train, test, trivial, optimum }
    }

    /// How much of the way from the trivial model to the teacher a model has come, by its outputs on the test rows.
    pub(super) fn closed_gap(&self, classes: Option<usize>, outputs: &[f32]) -> f64 {
        let merit = match classes {
            None => {
                let errors = outputs.iter().zip(&self.test.targets).map(|(f, y)| f64::from(f - y).powi(2));
                -(errors.sum::<f64>() / TEST as f64).sqrt()
            }
            Some(classes) => {
                let rows = outputs.chunks_exact(classes).zip(self.test.truth.chunks_exact(classes));
                let right = rows.map(|(outputs, truth)| f64::from(truth[largest(outputs)]));
                right.sum::<f64>() / TEST as f64
            }
        };
        let gap = (merit - self.trivial) / (self.optimum - self.trivial).max(1e-6);
        // A model that ran away is as bad as any other that did.
        if gap.is_finite() { gap.clamp(-1.0, 1.0) } else { -1.0 }
    }
}

/// Place of the first of the largest.
fn largest(values: &[f32]) -> usize {
    let mut best = 0;
    for (at, value) in values.iter().enumerate() {
        if *value > values[best] {
            best = at;
        }
    }
    best
}

impl Columns {
    fn new(shape: &Shape, random: &mut TableRng) -> Self {
        let count = shape.numbers + shape.categories.len();
        let loadings = (0..count)
            .map(|_| {
                let mut loading = [0.0; FACTORS].map(|_| random.normal());
                let length = loading.iter().map(|x| x * x).sum::<f64>().sqrt();
                let common = 0.1 + 0.8 * random.uniform();
                loading.iter_mut().for_each(|x| *x *= common.sqrt() / length);
                (loading, (1.0 - common).sqrt())
            })
            .collect();
        // Centres are known from few rows, or with noise.
        let spread = 1.0 / (shape.users as f64 / 10.0).max(10.0).sqrt();
        let shifts = (0..shape.numbers).map(|_| spread * random.normal()).collect();
        Self { loadings, shifts }
    }

    /// Encoded rows, one after the other.
    fn rows(&self, shape: &Shape, count: usize, random: &mut TableRng) -> Vec<f32> {
        let width = shape.features();
        let mut features = vec![0.0; count * width];
        let edges: Vec<Vec<f64>> = shape.categories.iter().map(|values| falling(*values)).collect();
        let common: Vec<Vec<f64>> = shape.words.iter().map(|buckets| falling(*buckets)).collect();
        for row in features.chunks_exact_mut(width.max(1)) {
            let factors = [0.0; FACTORS].map(|_| random.normal());
            let far = if random.uniform() < OUTLIERS.0 { OUTLIERS.1 } else { 1.0 };
            let mut latent = self.loadings.iter().map(|(loading, own)| {
                let shared: f64 = loading.iter().zip(&factors).map(|(a, b)| a * b).sum();
                (shared, *own)
            });
            for (x, shift) in row.iter_mut().zip(&self.shifts) {
                let (shared, own) = latent.next().unwrap_or_default();
                let value = far * (shared + own * random.normal()) as f32 - *shift as f32;
                *x = value.clamp(-FARTHEST, FARTHEST);
            }
            let mut start = shape.numbers;
            for (edges, values) in edges.iter().zip(&shape.categories) {
                let (shared, own) = latent.next().unwrap_or_default();
                let at = 0.5 * libm::erfc(-(shared + own * random.normal()) / std::f64::consts::SQRT_2);
                let total = edges.last().copied().unwrap_or(1.0);
                let value = edges.partition_point(|edge| *edge < at * total).min(values - 1);
                row[start + value] = 1.0;
                start += values;
            }
            for (edges, buckets) in common.iter().zip(&shape.words) {
                let words = &mut row[start..start + buckets];
                (0..WORDS).for_each(|_| words[random.index(edges)] += 1.0);
                let length = words.iter().map(|x| x * x).sum::<f32>().sqrt();
                words.iter_mut().for_each(|x| *x /= length);
                start += buckets;
            }
        }
        features
    }
}

impl Teacher {
    fn new(shape: &Shape, sample: &[f32], hardness: usize, uneven: bool, random: &mut TableRng) -> Self {
        let (width, outputs) = (shape.features(), shape.outputs());
        let mut weights = Vec::with_capacity(width * outputs);
        for _ in 0..width * outputs {
            let weight = random.normal();
            let silent = uneven && random.uniform() < 0.7;
            weights.push(if silent { 0.0 } else { weight });
        }
        let mut constants = vec![0.0; outputs];
        let strength = match shape.classes {
            None => [0.9_f64, 0.6, 0.3][hardness].sqrt(),
            // The log-odds of two classes differ by twice the variance of one output.
            Some(_) => [12.0, 4.0, 1.5][hardness] / std::f64::consts::SQRT_2,
        };
        for (output, weights) in weights.chunks_exact_mut(width.max(1)).enumerate() {
            let values: Vec<f64> =
                sample.chunks_exact(width.max(1)).map(|row| product(row, weights)).collect();
            let count = values.len() as f64;
            let mean = values.iter().sum::<f64>() / count;
            let spread = (values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / count).sqrt().max(1e-9);
            weights.iter_mut().for_each(|w| *w *= strength / spread);
            constants[output] = -mean * strength / spread;
            if uneven && shape.classes.is_some() {
                constants[output] -= 0.5 * strength * libm::log((output + 1) as f64);
            }
        }
        Self { weights, constants }
    }

    fn teach(
        &self,
        shape: &Shape,
        features: Vec<f32>,
        hardness: usize,
        uneven: bool,
        offset: f32,
        random: &mut TableRng,
    ) -> Rows {
        let (width, outputs) = (shape.features(), shape.outputs());
        let (mut targets, mut truth, mut norms_sq) = (Vec::new(), Vec::new(), Vec::new());
        let noise = [0.1_f64, 0.4, 0.7][hardness].sqrt();
        for row in features.chunks_exact(width.max(1)) {
            norms_sq.push(1.0 + row.iter().map(|x| x * x).sum::<f32>());
            let values = self.weights.chunks_exact(width.max(1)).zip(&self.constants);
            let values: Vec<f64> =
                values.map(|(weights, constant)| constant + product(row, weights)).collect();
            if shape.classes.is_none() {
                let error = if uneven { skewed(random) } else { heavy(random) };
                let expected = values[0] as f32 - offset;
                truth.push(expected);
                targets.push(expected + (noise * error) as f32);
                continue;
            }
            let most = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let raised: Vec<f64> = values.iter().map(|v| libm::exp(v - most)).collect();
            let sum: f64 = raised.iter().sum();
            truth.extend(raised.iter().map(|p| (p / sum) as f32));
            let mut left = random.uniform() * sum;
            let class = raised.iter().position(|p| {
                left -= p;
                left < 0.0
            });
            targets.push(class.unwrap_or(outputs - 1) as f32);
        }
        Rows { features, targets, truth, norms_sq }
    }
}

fn product(row: &[f32], weights: &[f64]) -> f64 {
    row.iter().zip(weights).map(|(x, w)| f64::from(*x) * w).sum()
}

/// Symmetric with heavy tails, of unit variance: Student's t with five degrees of freedom.
fn heavy(random: &mut TableRng) -> f64 {
    let square: f64 = (0..5).map(|_| random.normal().powi(2)).sum();
    random.normal() / (square / 5.0).sqrt() * (3.0_f64 / 5.0).sqrt()
}

/// Skewed to the right as incomes and prices are, of mean 0 and unit variance: a power of an exponential.
fn skewed(random: &mut TableRng) -> f64 {
    let value = libm::pow(-libm::log(random.uniform()), 1.5);
    // Γ(2.5) and Γ(4) − Γ(2.5)².
    const MEAN: f64 = 1.329_340_388_179_137;
    (value - MEAN) / (6.0 - MEAN * MEAN).sqrt()
}
