//! The optimum: of the workload or of the prefix sum, as a stream of a few states or as dense rows.

use super::{Budget, Family, Knob};
use crate::error::Result;
use crate::factorize::Observer;
use crate::form::Form;
use crate::problem::Problem;

/// The optimum of the workload; a stream, unless dense rows are asked for, the workload is a matrix, or units take part several
/// times.
pub(super) struct Optimal;

impl Family for Optimal {
    fn name(&self) -> &'static str {
        "optimal"
    }

    fn about(&self) -> &'static str {
        "the optimum of the workload, as a stream of a few states or as dense rows"
    }

    fn knobs(&self) -> &'static [Knob] {
        &[Knob::Dense, Knob::Buffers, Knob::Tolerance]
    }

    fn fit(&self, problem: &Problem, budget: &Budget, observe: Observer<'_>) -> Result<Form> {
        optimum(problem, budget, observe)
    }
}

/// The optimum of the prefix sum with as many steps.
pub(super) struct OptimalPrefix;

impl Family for OptimalPrefix {
    fn name(&self) -> &'static str {
        "optimal-prefix"
    }

    fn about(&self) -> &'static str {
        "the optimum of the prefix sum, for any optimizer"
    }

    fn knobs(&self) -> &'static [Knob] {
        Optimal.knobs()
    }

    fn fit(&self, problem: &Problem, budget: &Budget, observe: Observer<'_>) -> Result<Form> {
        optimum(problem.prefix_sum()?, budget, observe)
    }
}

/// The optimum as a stream, always; of the prefix sum where the workload is a matrix.
pub(super) struct StateSpace;

impl Family for StateSpace {
    fn name(&self) -> &'static str {
        "state-space"
    }

    fn about(&self) -> &'static str {
        "the optimum as a stream of a few states"
    }

    fn knobs(&self) -> &'static [Knob] {
        &[Knob::Buffers, Knob::Tolerance]
    }

    fn fit(&self, problem: &Problem, budget: &Budget, observe: Observer<'_>) -> Result<Form> {
        let problem = problem.streamable()?;
        let optimum = problem.optimum(observe)?;
        Ok(Form::StateSpace(optimum.to_state_space(problem.workload(), budget.target(), observe)?))
    }
}

/// Dense rows where they are asked for, and where nothing is and no stream of a few states exists: for a matrix, and for
/// several participations.
fn optimum(problem: &Problem, budget: &Budget, observe: Observer<'_>) -> Result<Form> {
    let (workload, optimum) = (problem.workload(), problem.optimum(observe)?);
    let several = optimum.dual.times() > 1 && *budget == Budget::default();
    if budget.dense || several || workload.recurrence().is_none() {
        return Ok(Form::Dense(optimum.to_dense(workload)?.0));
    }
    Ok(Form::StateSpace(optimum.to_state_space(workload, budget.target(), observe)?))
}
