//! Models that train on made-up tables: the arithmetic of a run without its keys, journals and exact sums.

use super::tables::{MadeUp, Rows, Shape};
use crate::model::{Mlp, Model, Regressor};
use crate::{LabelledExample, ValuedExample};
use dpmf::Workload;

/// One training: what a setting means for a made-up table.
pub(super) struct Course<'a> {
    /// Step sizes and optimizer.
    pub(super) workload: &'a Workload,
    /// Rounds that pass over the rows once.
    pub(super) turns: usize,
    /// Norm that the gradient of a row is clipped to.
    pub(super) clip: f64,
    /// What noise adds to the mean of a round, in clips: a row of the model's parameters for every round.
    pub(super) noise: &'a [Vec<f32>],
}

/// Trains on a made-up table; how much of the gap it closes.
pub(super) fn closed_gap(shape: &Shape, table: &MadeUp, course: &Course<'_>) -> f64 {
    let mut student = Student::new(shape);
    let parameters = student.parameters();
    let mut server = match crate::Server::new(course.workload, student.initial()) {
        Ok(server) => server,
        Err(_) => return -1.0,
    };
    let rows = table.train.targets.len();
    let mut gradient = vec![0.0_f32; parameters];
    for round in 0..course.workload.steps() {
        let (start, end) = turn(rows, course.turns, round);
        gradient.fill(0.0);
        student.sum(&table.train, start..end, server.parameters(), course.clip as f32, &mut gradient);
        let share = 1.0 / (end - start).max(1) as f32;
        let noise = course.noise.get(round).map_or(&[][..], Vec::as_slice);
        gradient.iter_mut().for_each(|g| *g *= share);
        gradient.iter_mut().zip(noise).for_each(|(g, z)| *g += course.clip as f32 * z);
        server.apply(&gradient, 1.0);
    }
    table.closed_gap(shape.classes, &student.outputs(&table.test, server.released()))
}

/// The rows of a round.
fn turn(rows: usize, turns: usize, round: usize) -> (usize, usize) {
    let turn = round % turns.max(1);
    (turn * rows / turns.max(1), (turn + 1) * rows / turns.max(1))
}

/// A model that learns.
enum Student {
    /// Linear and logistic models: the norm of a row's gradient is known before the gradient is.
    Linear {
        features: usize,
        outputs: usize,
        classes: bool,
        values: Vec<f32>,
    },
    Classes(Mlp, Box<<Mlp as Model>::Workspace>, Vec<f32>),
    Numbers(Regressor, Box<<Regressor as Model>::Workspace>, Vec<f32>),
}

impl Student {
    fn new(shape: &Shape) -> Self {
        let (features, outputs) = (shape.features(), shape.outputs());
        let hidden = shape.hidden.clone();
        match (hidden.is_empty(), shape.classes) {
            (true, classes) => {
                Self::Linear { features, outputs, classes: classes.is_some(), values: vec![0.0; outputs] }
            }
            (false, Some(classes)) => {
                let model = Mlp { features, hidden, classes };
                let (space, gradient) = (Box::new(model.workspace()), vec![0.0; model.parameters()]);
                Self::Classes(model, space, gradient)
            }
            (false, None) => {
                let model = Regressor { features, hidden };
                let (space, gradient) = (Box::new(model.workspace()), vec![0.0; model.parameters()]);
                Self::Numbers(model, space, gradient)
            }
        }
    }

    fn parameters(&self) -> usize {
        match self {
            Self::Linear { features, outputs, .. } => (features + 1) * outputs,
            Self::Classes(model, ..) => model.parameters(),
            Self::Numbers(model, ..) => model.parameters(),
        }
    }

    fn initial(&self) -> Vec<f32> {
        match self {
            Self::Linear { .. } => vec![0.0; self.parameters()],
            Self::Classes(model, ..) => model.initial(0),
            Self::Numbers(model, ..) => model.initial(0),
        }
    }

    /// Adds the clipped gradients of some rows.
    fn sum(
        &mut self,
        rows: &Rows,
        range: std::ops::Range<usize>,
        parameters: &[f32],
        clip: f32,
        sum: &mut [f32],
    ) {
        match self {
            Self::Linear { features, outputs, classes, values } => {
                let (width, outputs) = (*features, *outputs);
                let (weights, constants) = parameters.split_at(width * outputs);
                let (slopes, levels) = sum.split_at_mut(width * outputs);
                for row in range {
                    let x = &rows.features[row * width..][..width];
                    for (k, value) in values.iter_mut().enumerate() {
                        *value = constants[k] + inner(x, &weights[k * width..][..width]);
                    }
                    match classes {
                        true => {
                            softmax(values);
                            values[rows.targets[row] as usize] -= 1.0;
                        }
                        false => values[0] -= rows.targets[row],
                    }
                    let error = values.iter().map(|e| e * e).sum::<f32>();
                    let norm = (error * rows.norms_sq[row]).sqrt();
                    let scale = if norm > clip { clip / norm } else { 1.0 };
                    for (k, error) in values.iter().enumerate() {
                        let factor = scale * error;
                        levels[k] += factor;
                        slopes[k * width..][..width].iter_mut().zip(x).for_each(|(g, x)| *g += factor * x);
                    }
                }
            }
            Self::Classes(model, space, gradient) => {
                for row in range {
                    let features = &rows.features[row * model.features..][..model.features];
                    let example = LabelledExample { features, label: rows.targets[row] as u16 };
                    gradient.fill(0.0);
                    model.gradient(parameters, &[example], space, gradient);
                    add_clipped(gradient, clip, sum);
                }
            }
            Self::Numbers(model, space, gradient) => {
                for row in range {
                    let features = &rows.features[row * model.features..][..model.features];
                    let example = ValuedExample { features, value: rows.targets[row] };
                    gradient.fill(0.0);
                    model.gradient(parameters, &[example], space, gradient);
                    add_clipped(gradient, clip, sum);
                }
            }
        }
    }

    /// Outputs for all rows: log-odds, or numbers.
    fn outputs(&self, rows: &Rows, parameters: &[f32]) -> Vec<f32> {
        match self {
            Self::Linear { features, outputs, .. } => {
                let (width, outputs) = (*features, *outputs);
                let (weights, constants) = parameters.split_at(width * outputs);
                let of = |x: &[f32]| {
                    let value = |k: usize| constants[k] + inner(x, &weights[k * width..][..width]);
                    (0..outputs).map(value).collect::<Vec<f32>>()
                };
                rows.features.chunks_exact(width.max(1)).flat_map(of).collect()
            }
            Self::Classes(model, ..) => model.logits(parameters, &rows.features),
            Self::Numbers(model, ..) => model.values(parameters, &rows.features),
        }
    }
}

fn add_clipped(gradient: &[f32], clip: f32, sum: &mut [f32]) {
    let norm = inner(gradient, gradient).sqrt();
    let scale = if norm > clip { clip / norm } else { 1.0 };
    sum.iter_mut().zip(gradient).for_each(|(s, g)| *s += scale * g);
}

/// An inner product in eight sums, which processors take side by side.
fn inner(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0_f32; 8];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<8>(), b.as_chunks::<8>());
    for (a, b) in a.iter().zip(b) {
        for lane in 0..8 {
            sums[lane] += a[lane] * b[lane];
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}

fn softmax(values: &mut [f32]) {
    let most = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for value in values.iter_mut() {
        *value = libm::expf(*value - most);
        sum += *value;
    }
    values.iter_mut().for_each(|value| *value /= sum);
}
