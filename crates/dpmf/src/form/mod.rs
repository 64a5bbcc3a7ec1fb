//! Forms: how mechanisms run. A form is the pair `(N, C)` with `N C = I`, given by a few coefficients.
//!
//! `N`, the *coloring* operator, turns white noise `Z` into the noise `u = N Z` that is added to the
//! gradients; the optimizer itself turns `u` into the iterate noise `B Z = A N Z`. So a form does not depend on the workload: a
//! prefix-sum mechanism `S = B_S C` works for every `A` by post-processing, `B = A S⁻¹B_S = A N`.
//!
//! `N` is what is deployed, and `C` follows from it. A form owns all that depends on how its coefficients are
//! held: the engine that streams it, its layout in files, its column norms and its loss. A [family](crate::family) chooses the
//! coefficients.

mod banded;
pub(crate) mod blt;
mod columns;
mod dense;
pub mod recall;
pub mod state_space;
pub(crate) mod structured;
mod toeplitz;
pub mod tree;
mod verified;

pub use banded::Banded;
pub use blt::Blt;
pub use columns::{EncoderColumns, Products};
pub use dense::Dense;
pub use recall::Recall;
pub use state_space::StateSpace;
pub use structured::Structured;
pub use toeplitz::Toeplitz;
pub use tree::Tree;

use crate::engine::Engine;
use crate::engine::exact::program::Program;
use crate::error::Result;
use crate::linalg::exponentials::Exponentials;
use crate::tensors::{Tensors, damaged};
use crate::workload::Workload;
use faer::Mat;

/// What a stream of noise costs a step, in model-sized units.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// Model-sized arrays kept from one step to the next; `None` for dense rows, which draw all earlier noise
    /// again instead.
    pub buffers: Option<usize>,
    /// Most earlier rows of noise that a step draws again beside its own; `None` for dense rows, which draw all.
    pub recalls: Option<usize>,
    /// Mean number of model-sized multiply-adds a step.
    pub work: f64,
}

impl Cost {
    /// Of dense rows, over noise that is regenerated.
    pub(crate) fn dense(work: f64) -> Self {
        Self { buffers: None, recalls: None, work }
    }

    /// Of a stream that draws nothing twice.
    pub(crate) fn stream(buffers: usize, work: f64) -> Self {
        Self { buffers: Some(buffers), recalls: Some(0), work }
    }
}

/// Writes the rows of an operator, first to last, one a call, into a slice of zeros.
pub type Rows<'a> = Box<dyn FnMut(&mut [f64]) + 'a>;

/// What every form answers.
pub trait Representation {
    /// The word for it in files and tables.
    fn kind(&self) -> &'static str;

    /// Number of steps `n`: rows of `N`, columns of `C`.
    fn steps(&self) -> usize;

    /// Number of white noise rows `m ≥ n`: columns of `N`, rows of `C`.
    fn noise_rows(&self) -> usize {
        self.steps()
    }

    /// The rows of `N`, each of length `m`, in order.
    fn coloring_rows(&self) -> Rows<'_>;

    /// `N`, dense, `n × m`.
    fn coloring(&self) -> Mat<f64> {
        let (n, m) = (self.steps(), self.noise_rows());
        let mut rows = self.coloring_rows();
        let mut transposed = Mat::zeros(m, n);
        (0..n).for_each(|i| rows(transposed.col_as_slice_mut(i)));
        transposed.transpose().to_owned()
    }

    /// `C`, dense, `m × n`.
    fn encoder(&self) -> Mat<f64>;

    /// Squared column norms of `C`, not rounded down.
    fn encoder_column_norms_sq(&self) -> Vec<f64>;

    /// Columns of `C`, a few at a time, each with a bound on its distance from the exact one.
    ///
    /// Cost: unless the form knows better, and for square forms only, four products of n × n matrices here and a copy for
    /// each column.
    fn encoder_columns(&self) -> Box<dyn EncoderColumns + '_> {
        Box::new(columns::Whole::inverse(self.coloring().as_ref(), self.encoder()))
    }

    /// A number of diagonals, from the main one down, outside of which `C` is zero.
    ///
    /// Guarantee: for the coefficients as they are, exactly.
    fn encoder_bands(&self) -> usize {
        self.steps()
    }

    /// Whether no entry of `C` is negative, as far as the coefficients show it.
    ///
    /// Guarantee: `true` is a proof, for the coefficients as they are; `false` may only be doubt.
    fn encoder_is_nonnegative(&self) -> bool {
        false
    }

    /// `C` as a stream of exponentials, where it is one.
    #[doc(hidden)]
    fn as_exponentials(&self) -> Option<Exponentials> {
        None
    }

    /// Squared row norms of `B = A N`.
    ///
    /// Cost: O(n · m · w) unless the form knows better.
    fn decoder_row_norms_sq(&self, workload: &Workload) -> Vec<f64> {
        let mut rows = self.coloring_rows();
        workload.row_norms_sq_of_product(self.noise_rows(), |_, out| rows(out))
    }

    /// What streaming gradient noise costs.
    fn cost(&self) -> Cost;

    /// What is deployed: the same pair with every coefficient of `N` on the f32 grid, in a form whose rows use
    /// no later noise.
    ///
    /// Errors: a coefficient that leaves the range of f32.
    fn deployed(&self) -> Result<Form>;

    /// The engine that streams the rows of `N Z`, with a copy of the coefficients in single precision. Rows that
    /// need all noise before them are computed `ahead` at a time and wait in as many buffers; the others have no
    /// use for it. The rows are the same to the bit.
    ///
    /// Errors: a coefficient that single precision would change, or rows that use noise of later steps: what is
    /// streamed is [`Representation::deployed`], and nothing else. [`Error::Memory`](crate::Error::Memory).
    fn engine(&self, ahead: usize) -> Result<Box<dyn Engine>>;

    /// The same rows as arithmetic, for [exact noise](crate::engine::exact): the weights are the deployed coefficients, as
    /// real numbers. `ahead` is that of [`Representation::engine`].
    ///
    /// Errors: those of [`Representation::engine`].
    fn program(&self, ahead: usize) -> Result<Box<dyn Program>>;

    /// The coefficients of `N`, by name: what stands in a file, and what the noise is bound to.
    fn write(&self, tensors: &mut Tensors);
}

/// A form that this library can stream, store and measure.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Form {
    /// The inverse of a banded matrix.
    Banded(Banded),
    /// The inverse of a Toeplitz matrix of a few exponentials, rows and columns scaled.
    Blt(Blt),
    /// A lower-triangular matrix.
    Dense(Dense),
    /// A filter of a few states and of regenerated noise.
    Recall(Recall),
    /// A filter of a few states; independent noise is one of none.
    StateSpace(StateSpace),
    /// A few diagonals and a masked low-rank part.
    Structured(Structured),
    /// A lower-triangular Toeplitz matrix.
    Toeplitz(Toeplitz),
    /// Tree aggregation.
    Tree(Tree),
}

impl Form {
    fn representation(&self) -> &dyn Representation {
        match self {
            Self::Banded(banded) => banded,
            Self::Blt(blt) => blt,
            Self::Dense(dense) => dense,
            Self::Recall(recall) => recall,
            Self::StateSpace(filter) => filter,
            Self::Structured(structured) => structured,
            Self::Toeplitz(toeplitz) => toeplitz,
            Self::Tree(tree) => tree,
        }
    }

    /// The form of a kind with the coefficients that [`Representation::write`] wrote.
    ///
    /// Errors: [`Error::Format`](crate::Error::Format) for an unknown kind, tensors that are missing or have
    /// another shape; those of the form's constructor.
    pub(crate) fn read(kind: &str, steps: usize, tensors: &mut Tensors) -> Result<Self> {
        Ok(match kind {
            banded::KIND => Self::Banded(Banded::read(steps, tensors)?),
            blt::KIND => Self::Blt(Blt::read(steps, tensors)?),
            dense::KIND => Self::Dense(Dense::read(steps, tensors)?),
            recall::KIND => Self::Recall(Recall::read(steps, tensors)?),
            state_space::KIND => Self::StateSpace(StateSpace::read(steps, tensors)?),
            structured::KIND => Self::Structured(Structured::read(steps, tensors)?),
            toeplitz::KIND => Self::Toeplitz(Toeplitz::read(steps, tensors)?),
            tree::KIND => Self::Tree(Tree::read(steps, tensors)?),
            other => return Err(damaged(format!("this version does not know the form {other:?}"))),
        })
    }
}

impl Representation for Form {
    fn kind(&self) -> &'static str {
        self.representation().kind()
    }

    fn steps(&self) -> usize {
        self.representation().steps()
    }

    fn noise_rows(&self) -> usize {
        self.representation().noise_rows()
    }

    fn coloring_rows(&self) -> Rows<'_> {
        self.representation().coloring_rows()
    }

    fn encoder(&self) -> Mat<f64> {
        self.representation().encoder()
    }

    fn encoder_column_norms_sq(&self) -> Vec<f64> {
        self.representation().encoder_column_norms_sq()
    }

    fn encoder_columns(&self) -> Box<dyn EncoderColumns + '_> {
        self.representation().encoder_columns()
    }

    fn encoder_bands(&self) -> usize {
        self.representation().encoder_bands()
    }

    fn encoder_is_nonnegative(&self) -> bool {
        self.representation().encoder_is_nonnegative()
    }

    fn as_exponentials(&self) -> Option<Exponentials> {
        self.representation().as_exponentials()
    }

    fn decoder_row_norms_sq(&self, workload: &Workload) -> Vec<f64> {
        self.representation().decoder_row_norms_sq(workload)
    }

    fn cost(&self) -> Cost {
        self.representation().cost()
    }

    fn deployed(&self) -> Result<Form> {
        self.representation().deployed()
    }

    fn engine(&self, ahead: usize) -> Result<Box<dyn Engine>> {
        self.representation().engine(ahead)
    }

    fn program(&self, ahead: usize) -> Result<Box<dyn Program>> {
        self.representation().program(ahead)
    }

    fn write(&self, tensors: &mut Tensors) {
        self.representation().write(tensors);
    }
}

#[cfg(test)]
mod engine_tests;
