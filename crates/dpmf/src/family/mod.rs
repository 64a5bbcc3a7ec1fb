//! Families of mechanisms. A family finds, for a [`Problem`] and a [`Budget`], the coefficients of one of the [forms](crate::form).
//!
//! One family is one file here and one line in [`ALL`], which makes it known by name to the command line, to recipes,
//! to files and to Python, and covers it by the tests of the registry.

mod banded;
mod banded_inverse;
mod bins_fit;
mod blt;
mod independent;
mod nested;
mod observed_fit;
mod optimal;
#[cfg(test)]
mod peers_tests;
mod plant;
mod recall;
mod selector;
mod sqrt_toeplitz;
mod stationary;
mod structured;
mod toeplitz;
#[cfg(test)]
mod toy;
mod tree;

pub use selector::{Budget, Knob, Selector, nearest};

use crate::error::Result;
use crate::factorize::Observer;
use crate::form::Form;
use crate::problem::Problem;

/// A way to choose the coefficients of a mechanism.
pub trait Family: Send + Sync {
    /// Its name in every table, flag and file.
    fn name(&self) -> &'static str;

    /// What it is, in a few words that stand beside the name.
    fn about(&self) -> &'static str;

    /// The choices it leaves to a [`Budget`].
    fn knobs(&self) -> &'static [Knob] {
        &[]
    }

    /// The coefficients for a problem, before they are rounded.
    ///
    /// A family that was made for the prefix sum serves any other workload by post-processing, `B = A S⁻¹B_S`.
    ///
    /// Errors: those of the solver, and of sizes that do not fit a dense matrix.
    fn fit(&self, problem: &Problem, budget: &Budget, observe: Observer<'_>) -> Result<Form>;
}

/// The registry: every family, in the order of the tables.
pub const ALL: &[&dyn Family] = &[
    &independent::Independent,
    &tree::Binary,
    &tree::HonakerOnline,
    &tree::HonakerFull,
    &sqrt_toeplitz::SqrtToeplitz,
    &optimal::OptimalPrefix,
    &structured::Structured,
    &optimal::Optimal,
    &optimal::StateSpace,
    &banded::Banded,
    &banded::BandedToeplitz,
    &blt::Blt,
    &banded_inverse::BandedInverse,
    &recall::Recall,
    #[cfg(test)]
    &toy::Toy,
];

/// Every family with nothing chosen, in the order of the tables.
pub fn all() -> impl Iterator<Item = Selector> {
    ALL.iter().map(|family| Selector::plain(*family))
}

/// The rows of a table: the given mechanisms, or every family if none is given. Where nothing was chosen, an optimum is
/// shown as dense rows, and streams of the optimum within a tolerance of 1e-4 and with the given numbers of buffers.
pub fn table(selectors: &[Selector], buffers: &[usize]) -> Vec<Selector> {
    let shown = if selectors.is_empty() { all().collect() } else { selectors.to_vec() };
    let mut rows = Vec::new();
    for selector in shown {
        if selector.budget() != Budget::default() {
            rows.push(selector);
            continue;
        }
        let dense = Budget { dense: true, ..Budget::default() };
        rows.push(selector.with(dense).unwrap_or(selector));
        if selector.takes(Knob::Buffers) && !selector.takes(Knob::Dense) && !selector.takes(Knob::Recalls) {
            let of = |&buffers| selector.with(Budget { buffers: Some(buffers), ..Budget::default() });
            rows.extend(buffers.iter().filter_map(|count| of(count).ok()));
        }
    }
    rows
}
