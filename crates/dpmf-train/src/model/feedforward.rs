//! Models of feature vectors: logistic regression and the multilayer perceptron for classes, and both for numbers.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::activation::{cross_entropy, tanh_all, tanh_backward};
use super::initial::Uniform;
use super::product::{
    Interleaved, Matrix, Panels, accumulate, accumulate_few, accumulate_inner, accumulate_rows,
};
use super::{Block, Model, Score, check_lengths, checked_size};
use crate::{Labelled, LabelledExample, Result, Valued, ValuedExample};

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

/// A number from features: `w·x + b`, or the same of hidden layers as an [`Mlp`] has them; the loss is half the squared error.
///
/// For each layer the parameters are `W`, row-major with one row an output, then `b`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Regressor {
    /// Number of features.
    pub features: usize,
    /// Widths of the hidden layers, from the features on; empty for a linear model.
    pub hidden: Vec<usize>,
}

/// Memory of a [`Logistic`], an [`Mlp`] or a [`Regressor`] for one thread.
#[derive(Debug, Clone, Default)]
pub struct FeedforwardWorkspace {
    /// Examples of the batch that fit the model.
    rows: Vec<usize>,
    /// What each layer reads, then the outputs, which become the gradient of the loss by them.
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

/// An example of either kind, as the layers see it.
trait Target: Copy {
    fn features(&self) -> &[f32];

    /// Whether a model of so many outputs can be asked for it.
    fn fits(&self, outputs: usize) -> bool;

    /// Loss of the outputs, and whether they are right; the outputs become the gradient of `scale` times the loss.
    fn loss(&self, outputs: &mut [f32], scale: f32) -> (f64, bool);
}

impl Target for LabelledExample<'_> {
    fn features(&self) -> &[f32] {
        self.features
    }

    fn fits(&self, outputs: usize) -> bool {
        usize::from(self.label) < outputs
    }

    fn loss(&self, outputs: &mut [f32], scale: f32) -> (f64, bool) {
        cross_entropy(outputs, usize::from(self.label), scale)
    }
}

impl Target for ValuedExample<'_> {
    fn features(&self) -> &[f32] {
        self.features
    }

    fn fits(&self, _outputs: usize) -> bool {
        self.value.is_finite()
    }

    fn loss(&self, outputs: &mut [f32], scale: f32) -> (f64, bool) {
        let error = f64::from(outputs[0]) - f64::from(self.value);
        outputs[0] = scale * error as f32;
        (0.5 * error * error, false)
    }
}

/// The models seen as one: their shape.
#[derive(Clone, Copy)]
struct Shape<'a> {
    features: usize,
    hidden: &'a [usize],
    outputs: usize,
}

impl Shape<'_> {
    /// Layers from the features to the outputs.
    fn layers(&self) -> impl DoubleEndedIterator<Item = Layer> {
        let outputs = |index: usize| self.hidden.get(index).copied().unwrap_or(self.outputs);
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
        checked_size("classes", self.outputs, 1 << 16)?;
        checked_size("layers", self.hidden.len() + 1, 64)?;
        for &width in self.hidden {
            checked_size("hidden", width, 1 << 20)?;
        }
        checked_size("parameters", self.parameters(), 1 << 31)
    }

    fn layout(&self) -> Vec<Block> {
        self.layers()
            .flat_map(|layer| {
                let (index, inputs, outputs) = (layer.index, layer.inputs, layer.outputs);
                [
                    Block::new(format!("layer{index}.weight"), layer.weights, &[outputs, inputs]),
                    Block::new(format!("layer{index}.bias"), layer.bias, &[outputs]),
                ]
            })
            .collect()
    }

    fn admits(&self, example: &impl Target) -> bool {
        example.features().len() == self.features && example.fits(self.outputs)
    }

    fn workspace(&self) -> FeedforwardWorkspace {
        FeedforwardWorkspace { values: vec![Vec::new(); self.hidden.len() + 2], ..Default::default() }
    }

    fn gradient<T: Target>(
        &self,
        parameters: &[f32],
        batch: &[T],
        space: &mut FeedforwardWorkspace,
        gradient: &mut [f32],
    ) -> Score {
        check_lengths(self.parameters(), parameters, gradient);
        let scale = 1.0 / batch.iter().filter(|example| self.admits(*example)).count() as f32;
        let mut score = Score::default();
        for batch in batch.chunks(TOGETHER) {
            score += self.forward(parameters, batch, scale, space);
            self.backward(parameters, space, gradient);
        }
        score
    }

    fn score<T: Target>(&self, parameters: &[f32], batch: &[T], space: &mut FeedforwardWorkspace) -> Score {
        check_lengths(self.parameters(), parameters, parameters);
        let mut score = Score::default();
        for batch in batch.chunks(TOGETHER) {
            score += self.forward(parameters, batch, 0.0, space);
        }
        score
    }

    /// Outputs for feature vectors that lie one after the other.
    fn outputs(&self, parameters: &[f32], features: &[f32]) -> Vec<f32> {
        check_lengths(self.parameters(), parameters, parameters);
        assert_eq!(features.len() % self.features, 0, "whole feature vectors");
        let (mut space, mut outputs) = (self.workspace(), Vec::new());
        for features in features.chunks(TOGETHER * self.features) {
            space.values[0].clear();
            space.values[0].extend_from_slice(features);
            self.propagate(parameters, features.len() / self.features, &mut space);
            outputs.extend_from_slice(&space.values[self.hidden.len() + 1]);
        }
        outputs
    }

    /// Leaves the gradient of `scale` times the loss in the outputs.
    fn forward<T: Target>(
        &self,
        parameters: &[f32],
        batch: &[T],
        scale: f32,
        space: &mut FeedforwardWorkspace,
    ) -> Score {
        space.rows.clear();
        space.values[0].clear();
        for (row, example) in batch.iter().enumerate().filter(|(_, example)| self.admits(*example)) {
            space.rows.push(row);
            space.values[0].extend_from_slice(example.features());
        }
        self.propagate(parameters, space.rows.len(), space);
        let mut score = Score { predictions: space.rows.len() as u64, ..Score::default() };
        let outputs = space.values[self.hidden.len() + 1].chunks_exact_mut(self.outputs.max(1));
        for (outputs, &row) in outputs.zip(&space.rows) {
            let (loss, correct) = batch[row].loss(outputs, scale);
            score.loss += loss;
            score.correct += u64::from(correct);
        }
        score
    }

    /// Takes the features of some rows through the layers.
    fn propagate(&self, parameters: &[f32], rows: usize, space: &mut FeedforwardWorkspace) {
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
    }

    /// Adds the gradient of what `forward` left in the outputs.
    fn backward(&self, parameters: &[f32], space: &mut FeedforwardWorkspace, gradient: &mut [f32]) {
        let rows = space.rows.len();
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
        Shape { features: self.features, hidden: &[], outputs: self.classes }
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

    /// Logits of every class for feature vectors that lie one after the other: as many rows.
    ///
    /// # Panics
    /// For parameters of another length than the model's, and features that are no whole number of vectors.
    pub fn logits(&self, parameters: &[f32], features: &[f32]) -> Vec<f32> {
        self.shape().outputs(parameters, features)
    }
}

impl Mlp {
    fn shape(&self) -> Shape<'_> {
        Shape { features: self.features, hidden: &self.hidden, outputs: self.classes }
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

    /// Logits of every class for feature vectors that lie one after the other: as many rows.
    ///
    /// # Panics
    /// For parameters of another length than the model's, and features that are no whole number of vectors.
    pub fn logits(&self, parameters: &[f32], features: &[f32]) -> Vec<f32> {
        self.shape().outputs(parameters, features)
    }
}

impl Regressor {
    fn shape(&self) -> Shape<'_> {
        Shape { features: self.features, hidden: &self.hidden, outputs: 1 }
    }

    /// The model itself if its sizes make sense.
    ///
    /// Errors: a size of zero; more than 2³¹ parameters.
    pub fn checked(self) -> Result<Self> {
        self.shape().check()?;
        Ok(self)
    }

    /// Names and places of the blocks, in order; they cover the parameters.
    pub fn layout(&self) -> Vec<Block> {
        self.shape().layout()
    }

    /// The numbers for feature vectors that lie one after the other.
    ///
    /// # Panics
    /// For parameters of another length than the model's, and features that are no whole number of vectors.
    pub fn values(&self, parameters: &[f32], features: &[f32]) -> Vec<f32> {
        self.shape().outputs(parameters, features)
    }
}

/// Uniform weights of mean zero and variance one over the number of inputs, a hundredth of that in the last layer; biases zero.
fn scattered(shape: Shape<'_>, seed: u64) -> Vec<f32> {
    let mut parameters = vec![0.0; shape.parameters()];
    let mut uniform = Uniform::new(seed);
    for layer in shape.layers() {
        let gain = if layer.index < shape.hidden.len() { 1.0 } else { 0.1 };
        uniform.fill_layer(&mut parameters[layer.weights], layer.inputs, gain);
    }
    parameters
}

/// What all do by their shape.
macro_rules! by_shape {
    ($kind:literal, $domain:ty, $example:ident) => {
        type Domain = $domain;
        type Workspace = FeedforwardWorkspace;

        fn kind(&self) -> &'static str {
            $kind
        }

        fn parameters(&self) -> usize {
            self.shape().parameters()
        }

        fn workspace(&self) -> FeedforwardWorkspace {
            self.shape().workspace()
        }

        /// Whether the number of features is the model's, and the class one of its own or the number finite.
        fn admits(&self, example: $example<'_>) -> bool {
            self.shape().admits(&example)
        }

        fn gradient(
            &self,
            parameters: &[f32],
            batch: &[$example<'_>],
            workspace: &mut FeedforwardWorkspace,
            gradient: &mut [f32],
        ) -> Score {
            self.shape().gradient(parameters, batch, workspace, gradient)
        }

        fn score(
            &self,
            parameters: &[f32],
            batch: &[$example<'_>],
            workspace: &mut FeedforwardWorkspace,
        ) -> Score {
            self.shape().score(parameters, batch, workspace)
        }
    };
}

impl Model for Logistic {
    by_shape!("logistic", Labelled, LabelledExample);

    /// Zero: the loss is convex, and `ln classes` there, whatever the seed.
    fn initial(&self, _seed: u64) -> Vec<f32> {
        vec![0.0; self.parameters()]
    }
}

impl Model for Mlp {
    by_shape!("mlp", Labelled, LabelledExample);

    /// Parameters before training: a pure function of `seed`, which is public.
    ///
    /// Uniform weights of mean zero and variance one over the number of inputs, a hundredth of that in the last
    /// layer; biases zero. For features of unit scale the untrained loss is within about 1 % of `ln classes`.
    fn initial(&self, seed: u64) -> Vec<f32> {
        scattered(self.shape(), seed)
    }
}

impl Model for Regressor {
    by_shape!("regressor", Valued, ValuedExample);

    fn classifies(&self) -> bool {
        false
    }

    /// Parameters before training: zero for a linear model, and as an [`Mlp`]'s with hidden layers.
    fn initial(&self, seed: u64) -> Vec<f32> {
        match &*self.hidden {
            [] => vec![0.0; self.parameters()],
            _ => scattered(self.shape(), seed),
        }
    }
}
