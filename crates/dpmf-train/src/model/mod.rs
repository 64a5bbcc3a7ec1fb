//! Models with hand-written gradients over one flat parameter slice.
//!
//! All sums are taken in an order that the sizes alone determine, and no function of the platform's mathematics
//! library is called: the same parameters and batch give the same bits on every machine.

mod activation;
mod feedforward;
mod initial;
mod lstm;
mod network;
mod packet;
mod product;

use std::ops::{AddAssign, Range};

pub use feedforward::{FeedforwardWorkspace, Logistic, Mlp, Regressor};
pub use lstm::{Lstm, LstmState, LstmWorkspace};
pub use network::Network;

use crate::{Domain, Error, Result};

/// Sums over the predictions of a batch.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Score {
    /// Sum of the losses: cross-entropies in nats, or half the squared errors of numbers.
    pub loss: f64,
    /// Number of predictions whose most likely class is the right one; the first of equals counts as most likely. 0 for
    /// numbers.
    pub correct: u64,
    /// Number of predictions.
    pub predictions: u64,
}

impl AddAssign for Score {
    fn add_assign(&mut self, other: Self) {
        self.loss += other.loss;
        self.correct += other.correct;
        self.predictions += other.predictions;
    }
}

/// A named part of the parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// What it is, for instance `"lstm.bias"`.
    pub name: String,
    /// Where it lies in the flat slice.
    pub range: Range<usize>,
    /// Its shape, row-major: as many numbers as the range.
    pub shape: Vec<usize>,
}

impl Block {
    fn new(name: impl Into<String>, range: Range<usize>, shape: &[usize]) -> Self {
        Self { name: name.into(), range, shape: shape.to_vec() }
    }
}

/// A differentiable model whose parameters lie in one slice.
pub trait Model: Sync {
    /// Kind of example it learns from.
    type Domain: Domain;
    /// Memory that calls reuse; one for each thread.
    type Workspace: Send;

    /// What it is, in a word that never changes: runs are bound to it, so that other gradients never meet the same noise.
    fn kind(&self) -> &'static str;

    /// Number of parameters.
    fn parameters(&self) -> usize;

    /// Parameters before training: a pure function of `seed`, which is public.
    fn initial(&self, seed: u64) -> Vec<f32>;

    /// Memory for batches of any size; it grows as needed.
    fn workspace(&self) -> Self::Workspace;

    /// Whether the example fits the model, by its tokens or by its label and number of features.
    ///
    /// An example that does not fit yields no prediction, so it moves neither gradient nor score. Data should be
    /// checked once, when it meets the model.
    fn admits(&self, example: <Self::Domain as Domain>::Example<'_>) -> bool {
        let _ = example;
        true
    }

    /// Whether predictions are classes, of which a share is right; a number is only near or far.
    fn classifies(&self) -> bool {
        true
    }

    /// Adds the gradient of the mean loss per prediction over the batch to `gradient`.
    ///
    /// A batch without predictions adds nothing.
    ///
    /// # Panics
    ///
    /// If a slice is not [`parameters`](Self::parameters) long.
    fn gradient(
        &self,
        parameters: &[f32],
        batch: &[<Self::Domain as Domain>::Example<'_>],
        workspace: &mut Self::Workspace,
        gradient: &mut [f32],
    ) -> Score;

    /// Score of the parameters on the batch.
    ///
    /// # Panics
    ///
    /// If `parameters` is not [`parameters`](Self::parameters) long.
    fn score(
        &self,
        parameters: &[f32],
        batch: &[<Self::Domain as Domain>::Example<'_>],
        workspace: &mut Self::Workspace,
    ) -> Score;
}

/// The contract on the two slices of a model.
fn check_lengths(expected: usize, parameters: &[f32], gradient: &[f32]) {
    assert_eq!(parameters.len(), expected, "the slice of parameters has the length of the model");
    assert_eq!(gradient.len(), expected, "the slice of the gradient has the length of the model");
}

/// Refuses a size of zero or above `most`.
fn checked_size(name: &'static str, value: usize, most: usize) -> Result<()> {
    if value == 0 {
        return Err(Error::InvalidArgument { name, value: value.to_string(), rule: "a size is at least 1" });
    }
    if value > most {
        let rule = "this is above what a model may have";
        return Err(Error::InvalidArgument { name, value: value.to_string(), rule });
    }
    Ok(())
}

#[cfg(test)]
mod tests;
