//! Factorizations `A = BC`, held as the pair `(N, C)` with `N C = I` and `B = A N`.
//!
//! `N`, the *coloring* operator, turns white noise `Z` into the noise `u = N Z` that is added to the
//! gradients; the optimizer itself turns `u` into the iterate noise `B Z = A N Z`. So a factorization does not
//! depend on the workload it serves: a prefix-sum mechanism `S = B_S C` serves every `A` by post-processing,
//! `B = A S⁻¹B_S = A N`, without a line of code.
//!
//! `N` is what is deployed, and `C` follows from it.

mod dense;
mod independent;
pub mod state_space;
mod structured;
mod toeplitz;
pub mod tree;

pub use dense::Dense;
pub use independent::Independent;
pub use state_space::StateSpace;
pub use structured::Structured;
pub use toeplitz::Toeplitz;
pub use tree::Tree;

use crate::error::Result;
use crate::workload::Workload;
use faer::Mat;

/// What a stream of noise costs a step, in model-sized units.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// Model-sized arrays kept from one step to the next.
    pub buffers: usize,
    /// Mean number of model-sized multiply-adds a step.
    pub work: f64,
}

/// Writes the rows of an operator, first to last, one a call, into a slice of zeros.
pub type Rows<'a> = Box<dyn FnMut(&mut [f64]) + 'a>;

/// What every representation of a factorization answers.
pub trait Representation {
    /// Number of steps `n`: rows of `N`, columns of `C`.
    fn steps(&self) -> usize;

    /// Number of white noise rows `m ≥ n`: columns of `N`, rows of `C`.
    fn noise_rows(&self) -> usize {
        self.steps()
    }

    /// The rows of `N`, each of length `m`, in order.
    fn coloring_rows(&self) -> Rows<'_>;

    /// `C`, dense, `m × n`.
    fn encoder(&self) -> Mat<f64>;

    /// Squared column norms of `C`, not rounded down.
    fn encoder_column_norms_sq(&self) -> Vec<f64>;

    /// Squared row norms of `B = A N`.
    ///
    /// Cost: O(n · m · w) unless the representation knows better.
    fn decoder_row_norms_sq(&self, workload: &Workload) -> Vec<f64> {
        let mut rows = self.coloring_rows();
        workload.row_norms_sq_of_product(self.noise_rows(), |_, out| rows(out))
    }

    /// What streaming gradient noise costs.
    fn cost(&self) -> Cost;
}

/// A factorization in one of the representations this library knows.
#[derive(Clone, Debug)]
pub enum Factorization {
    /// Independent noise.
    Independent(Independent),
    /// A lower-triangular matrix.
    Dense(Dense),
    /// A filter of a few states.
    StateSpace(StateSpace),
    /// A few diagonals and a masked low-rank part.
    Structured(Structured),
    /// A lower-triangular Toeplitz matrix.
    Toeplitz(Toeplitz),
    /// Tree aggregation.
    Tree(Tree),
}

impl Factorization {
    /// What is deployed: the same factorization with every coefficient of `N` on the f32 grid, in a form whose
    /// rows use no later noise.
    ///
    /// Errors: a coefficient that leaves the range of f32.
    pub fn deployed(&self) -> Result<Self> {
        Ok(match self {
            Self::Independent(independent) => Self::Independent(*independent),
            Self::Dense(dense) => Self::Dense(dense.rounded()?),
            Self::StateSpace(filter) => Self::StateSpace(filter.rounded()?),
            Self::Structured(structured) => Self::Structured(structured.rounded()?),
            Self::Toeplitz(toeplitz) => Self::Toeplitz(toeplitz.rounded()?),
            Self::Tree(tree) if tree.decoder() == tree::Decoder::HonakerFull => {
                Self::Dense(Dense::from_coloring(tree.to_lower_triangular()?)?.rounded()?)
            }
            Self::Tree(tree) => Self::Tree(tree.rounded()?),
        })
    }

    fn representation(&self) -> &dyn Representation {
        match self {
            Self::Independent(independent) => independent,
            Self::Dense(dense) => dense,
            Self::StateSpace(filter) => filter,
            Self::Structured(structured) => structured,
            Self::Toeplitz(toeplitz) => toeplitz,
            Self::Tree(tree) => tree,
        }
    }
}

impl Representation for Factorization {
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

    fn decoder_row_norms_sq(&self, workload: &Workload) -> Vec<f64> {
        self.representation().decoder_row_norms_sq(workload)
    }

    fn cost(&self) -> Cost {
        self.representation().cost()
    }
}
