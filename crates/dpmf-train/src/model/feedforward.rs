//! Classifiers of feature vectors: logistic regression and the multilayer perceptron.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::activation::{cross_entropy, tanh_all, tanh_backward};
use super::initial::Uniform;
use super::product::{
    Interleaved, Matrix, Panels, accumulate, accumulate_few, accumulate_inner, accumulate_rows,
};
use super::{Block, Model, Score, check_lengths, checked_size};
use crate::{Labelled, LabelledExample, Result};

/// Examples worked on together: bounds the memory.
const TOGETHER: usize = 256;
/// Examples from which packing the weights pays; below it a single example is the case that matters.
const FEW: usize = 4;

/// Multinomial logistic regression: `softmax(W·x + b)`.
///
/// The parameters are `W`, row-major with one row a class, then `b`. Cost: four operations per parameter and example.
///
/// # Examples
///
/// ```
/// use dpmf_train::LabelledExample;
/// use dpmf_train::model::{Logistic, Model};
///
/// let model = Logistic { features: 2, classes: 3 }.checked()?;
/// let parameters = model.initial(0);
/// let batch = [LabelledExample { features: &[1.0, -1.0], label: 2 }];
/// let mut gradient = vec![0.0; model.parameters()];
/// let score = model.gradient(&parameters, &batch, &mut model.workspace(), &mut gradient);
/// assert!((score.loss - 3f64.ln()).abs() < 1e-6); // at zero, every class is as likely
/// # Ok::<(), dpmf_train::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Logistic {
    /// Number of features.
    pub features: usize,
    /// Number of classes; a label is below it.
    pub classes: usize,
}

/// A multilayer perceptron: `softmax(W·tanh(… tanh(W·x + b) …) + b)`.
///
/// The hidden units are tanh: bounded activations bound the gradient of an example, which clipping then distorts
/// less than with rectifiers (Papernot et al., *Tempered sigmoid activations for deep learning with differential
/// privacy*, 2021). For each layer the parameters are `W`, row-major with one row an output, then `b`.
/// Cost: six operations per parameter and example.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Mlp {
    /// Number of features.
    pub features: usize,
    /// Widths of the hidden layers, from the features on; may be empty.
    pub hidden: Vec<usize>,
    /// Number of classes; a label is below it.
    pub classes: usize,
}

/// Memory of a [`Logistic`] or an [`Mlp`] for one thread.
#[derive(Debug, Clone, Default)]
pub struct FeedforwardWorkspace {
    labels: Vec<usize>,
    /// What each layer reads, then the logits, which become their gradient.
    values: Vec<Vec<f32>>,
    /// Gradient of what a layer writes, and of what it reads.
    above: Vec<f32>,
    below: Vec<f32>,
    right: Panels,
    interleaved: Interleaved,
}

/// One layer: its shape and place.
#[derive(Debug, Clone)]
struct Layer {
    index: usize,
    inputs: usize,
    outputs: usize,
    weights: Range<usize>,
    bias: Range<usize>,
}

/// The two models seen as one: their shape.
#[derive(Clone, Copy)]
struct Shape<'a> {
    features: usize,
    hidden: &'a [usize],
    classes: usize,
}

impl Shape<'_> {
    /// Layers from the features to the logits.
    fn layers(&self) -> impl DoubleEndedIterator<Item = Layer> {
        let outputs = |index: usize| self.hidden.get(index).copied().unwrap_or(self.classes);
        let inputs = move |index: usize| if index == 0 { self.features } else { outputs(index - 1) };
        (0..=self.hidden.len()).map(move |index| {
            let start = (0..index).map(|before| (inputs(before) + 1) * outputs(before)).sum::<usize>();
            let (inputs, outputs) = (inputs(index), outputs(index));
            let end = start + inputs * outputs;
            Layer { index, inputs, outputs, weights: start..end, bias: end..end + outputs }
        })
    }

    fn parameters(&self) -> usize {
        self.layers().map(|layer| layer.bias.end).max().unwrap_or(0)
    }

    fn check(&self) -> Result<()> {
        checked_size("features", self.features, 1 << 24)?;
        checked_size("classes", self.classes, 1 << 16)?;
        for &width in self.hidden {
            checked_size("hidden", width, 1 << 20)?;
        }
        checked_size("parameters", self.parameters(), 1 << 31)
    }

    fn layout(&self) -> Vec<Block> {
        self.layers()
            .flat_map(|layer| {
                [
                    Block::new(format!("layer{}.weight", layer.index), layer.weights),
                    Block::new(format!("layer{}.bias", layer.index), layer.bias),
                ]
            })
            .collect()
    }

    fn admits(&self, example: &LabelledExample<'_>) -> bool {
        example.features.len() == self.features && usize::from(example.label) < self.classes
    }

    fn workspace(&self) -> FeedforwardWorkspace {
        FeedforwardWorkspace { values: vec![Vec::new(); self.hidden.len() + 2], ..Default::default() }
    }

    fn gradient(
        &self,
        parameters: &[f32],
        batch: &[LabelledExample<'_>],
        space: &mut FeedforwardWorkspace,
        gradient: &mut [f32],
    ) -> Score {
        check_lengths(self.parameters(), parameters, gradient);
        let scale = 1.0 / batch.iter().filter(|example| self.admits(example)).count() as f32;
        let mut score = Score::default();
        for batch in batch.chunks(TOGETHER) {
            score += self.forward(parameters, batch, scale, space);
            self.backward(parameters, space, gradient);
        }
        score
    }

    fn score(
        &self,
        parameters: &[f32],
        batch: &[LabelledExample<'_>],
        space: &mut FeedforwardWorkspace,
    ) -> Score {
        check_lengths(self.parameters(), parameters, parameters);
        let mut score = Score::default();
        for batch in batch.chunks(TOGETHER) {
            score += self.forward(parameters, batch, 0.0, space);
        }
        score
    }

    /// Leaves the gradient of `scale` times the loss in the logits.
    fn forward(
        &self,
        parameters: &[f32],
        batch: &[LabelledExample<'_>],
        scale: f32,
        space: &mut FeedforwardWorkspace,
    ) -> Score {
        space.labels.clear();
        space.values[0].clear();
        for example in batch.iter().filter(|example| self.admits(example)) {
            space.labels.push(usize::from(example.label));
            space.values[0].extend_from_slice(example.features);
        }
        let rows = space.labels.len();
        for layer in self.layers() {
            let (read, written) = space.values.split_at_mut(layer.index + 1);
            let (read, written) = (&read[layer.index], &mut written[0]);
            written.clear();
            for _ in 0..rows {
                written.extend_from_slice(&parameters[layer.bias.clone()]);
            }
            let weights = &parameters[layer.weights];
            accumulate_inner(written, read, weights, rows, layer.outputs, layer.inputs);
            if layer.index < self.hidden.len() {
                tanh_all(written);
            }
        }
        let mut score = Score { predictions: rows as u64, ..Score::default() };
        let logits = &mut space.values[self.hidden.len() + 1];
        for (logits, &label) in logits.chunks_exact_mut(self.classes.max(1)).zip(&space.labels) {
            let (loss, correct) = cross_entropy(logits, label, scale);
            score.loss += loss;
            score.correct += u64::from(correct);
        }
        score
    }

    /// Adds the gradient of what `forward` left in the logits.
    fn backward(&self, parameters: &[f32], space: &mut FeedforwardWorkspace, gradient: &mut [f32]) {
        let rows = space.labels.len();
        std::mem::swap(&mut space.above, &mut space.values[self.hidden.len() + 1]);
        for layer in self.layers().rev() {
            let read = &space.values[layer.index];
            accumulate_rows(&mut gradient[layer.bias], &space.above);
            space.right.pack(read, rows, layer.inputs);
            let above = Matrix::new(&space.above, rows, layer.outputs, layer.outputs);
            let target = &mut gradient[layer.weights.clone()];
            accumulate(target, layer.inputs, above.transposed(), &space.right, &mut space.interleaved);
            if layer.index > 0 {
                space.below.clear();
                space.below.resize(rows * layer.inputs, 0.0);
                let weights = &parameters[layer.weights];
                if rows < FEW {
                    accumulate_few(&mut space.below, &space.above, weights, layer.outputs, layer.inputs);
                } else {
                    space.right.pack(weights, layer.outputs, layer.inputs);
                    accumulate(&mut space.below, layer.inputs, above, &space.right, &mut space.interleaved);
                }
                tanh_backward(&mut space.below, read);
                std::mem::swap(&mut space.above, &mut space.below);
            }
        }
    }
}

impl Logistic {
    fn shape(&self) -> Shape<'_> {
        Shape { features: self.features, hidden: &[], classes: self.classes }
    }

    /// The model itself if its sizes make sense.
    ///
    /// Errors: a size of zero; more than 65536 classes, the number of `u16` labels; more than 2³¹ parameters.
    pub fn checked(self) -> Result<Self> {
        self.shape().check()?;
        Ok(self)
    }

    /// Names and places of the blocks, in order; they cover the parameters.
    pub fn layout(&self) -> Vec<Block> {
        self.shape().layout()
    }
}

impl Mlp {
    fn shape(&self) -> Shape<'_> {
        Shape { features: self.features, hidden: &self.hidden, classes: self.classes }
    }

    /// The model itself if its sizes make sense.
    ///
    /// Errors: a size of zero; more than 65536 classes, the number of `u16` labels; more than 2³¹ parameters.
    pub fn checked(self) -> Result<Self> {
        self.shape().check()?;
        Ok(self)
    }

    /// Names and places of the blocks, in order; they cover the parameters.
    pub fn layout(&self) -> Vec<Block> {
        self.shape().layout()
    }
}

/// What both classifiers do by their shape.
macro_rules! by_shape {
    () => {
        type Domain = Labelled;
        type Workspace = FeedforwardWorkspace;

        fn parameters(&self) -> usize {
            self.shape().parameters()
        }

        fn workspace(&self) -> FeedforwardWorkspace {
            self.shape().workspace()
        }

        /// Whether the number of features is the model's and the label is one of its classes.
        fn admits(&self, example: LabelledExample<'_>) -> bool {
            self.shape().admits(&example)
        }

        fn gradient(
            &self,
            parameters: &[f32],
            batch: &[LabelledExample<'_>],
            workspace: &mut FeedforwardWorkspace,
            gradient: &mut [f32],
        ) -> Score {
            self.shape().gradient(parameters, batch, workspace, gradient)
        }

        fn score(
            &self,
            parameters: &[f32],
            batch: &[LabelledExample<'_>],
            workspace: &mut FeedforwardWorkspace,
        ) -> Score {
            self.shape().score(parameters, batch, workspace)
        }
    };
}

impl Model for Logistic {
    by_shape!();

    /// Zero: the loss is convex, and `ln classes` there, whatever the seed.
    fn initial(&self, _seed: u64) -> Vec<f32> {
        vec![0.0; self.parameters()]
    }
}

impl Model for Mlp {
    by_shape!();

    /// Parameters before training: a pure function of `seed`, which is public.
    ///
    /// Uniform weights of mean zero and variance one over the number of inputs, a hundredth of that in the last
    /// layer; biases zero. For features of unit scale the untrained loss is within about 1 % of `ln classes`.
    fn initial(&self, seed: u64) -> Vec<f32> {
        let mut parameters = vec![0.0; self.parameters()];
        let mut uniform = Uniform::new(seed);
        for layer in self.shape().layers() {
            let gain = if layer.index < self.hidden.len() { 1.0 } else { 0.1 };
            uniform.fill_layer(&mut parameters[layer.weights], layer.inputs, gain);
        }
        parameters
    }
}
