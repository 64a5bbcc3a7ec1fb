//! The square root of the prefix sum.

use super::{Budget, Family};
use crate::error::Result;
use crate::factorize::Observer;
use crate::form::{Form, Toeplitz};
use crate::problem::Problem;

/// `B = C = S^{1/2}`.
pub(super) struct SqrtToeplitz;

impl Family for SqrtToeplitz {
    fn name(&self) -> &'static str {
        "sqrt-toeplitz"
    }

    fn about(&self) -> &'static str {
        "the square root of the prefix sum, dense"
    }

    fn fit(&self, problem: &Problem, _: &Budget, _: Observer<'_>) -> Result<Form> {
        Ok(Form::Toeplitz(Toeplitz::sqrt_prefix_sum(problem.steps())?))
    }
}
