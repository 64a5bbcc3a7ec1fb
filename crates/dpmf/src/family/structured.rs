//! The paper's streaming approximation of the optimum.

mod fit;

use super::{Budget, Family, Knob};
use crate::error::Result;
use crate::factorize::Observer;
use crate::form::{self, Form};
use crate::problem::Problem;

/// `h` diagonals and a masked part of rank `r`, fitted to the optimum of the workload, or of the prefix sum where the
/// workload is a matrix, which has no recurrence to stream.
pub(super) struct Structured;

impl Family for Structured {
    fn name(&self) -> &'static str {
        "structured"
    }

    fn about(&self) -> &'static str {
        "the paper's approximation of the optimum: a few diagonals and a masked low-rank part"
    }

    fn knobs(&self) -> &'static [Knob] {
        &[Knob::Diagonals, Knob::Rank]
    }

    fn fit(&self, problem: &Problem, budget: &Budget, observe: Observer<'_>) -> Result<Form> {
        let (diagonals, rank) = form::Structured::default_shape(problem.steps());
        let (diagonals, rank) = (budget.diagonals.unwrap_or(diagonals), budget.rank.unwrap_or(rank));
        let problem = problem.streamable()?;
        let decoder = problem.decoder(observe)?;
        let recurrence = problem.recurrence()?;
        Ok(Form::Structured(form::Structured::fit(decoder, recurrence, diagonals, rank)?))
    }
}
