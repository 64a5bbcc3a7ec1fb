//! Independent noise at every step, as in DP-SGD.

use super::{Budget, Family};
use crate::error::Result;
use crate::factorize::Observer;
use crate::form::{Form, StateSpace};
use crate::problem::Problem;

/// `N = C = I`.
pub(super) struct Independent;

impl Family for Independent {
    fn name(&self) -> &'static str {
        "independent"
    }

    fn about(&self) -> &'static str {
        "independent noise at every step, as in DP-SGD"
    }

    fn fit(&self, problem: &Problem, _: &Budget, _: Observer<'_>) -> Result<Form> {
        Ok(Form::StateSpace(StateSpace::independent(problem.steps())?))
    }
}
