//! A problem that mechanisms are made for: a workload and a participation, with what was solved for them so far.

use crate::accounting::{check_delta, check_epsilon};
use crate::error::{Error, Result};
use crate::factorize::{Observer, Optimum, Options, Solver, best_for};
use crate::form::Form;
use crate::participation::{Participation, Sampling};
use crate::workload::{Recurrence, Workload};
use faer::{Mat, MatRef};
use std::cell::OnceCell;

/// What noise is to be least for, where that depends on it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Goal {
    /// How units come into steps.
    pub sampling: Sampling,
    /// ε of the budget.
    pub epsilon: f64,
    /// δ of the budget.
    pub delta: f64,
}

/// A workload under a participation. Every optimum is solved for only once.
///
/// ```
/// use dpmf::factorize::quiet;
/// use dpmf::{Participation, Problem, Workload};
///
/// let problem = Problem::new(Workload::prefix_sum(64)?, Participation::default())?;
/// let tree = problem.mechanism("honaker-online".parse()?, &mut quiet)?;
/// let best = problem.mechanism("optimal".parse()?, &mut quiet)?;
/// assert!(tree.loss().sqrt_total() > 1.5 * best.loss().sqrt_total());
/// # Ok::<(), dpmf::Error>(())
/// ```
#[derive(Clone)]
pub struct Problem {
    workload: Workload,
    participation: Participation,
    goal: Option<Goal>,
    /// Where the fit of a form of the same kind may start from.
    near: Option<Form>,
    solver: Solver,
    options: Options,
    optimum: OnceCell<Optimum>,
    prefix_sum: OnceCell<Box<Problem>>,
    /// The decoder that structured forms are fitted to, O(n³) to make.
    decoder: OnceCell<Mat<f64>>,
}

impl Problem {
    /// A problem for the solver of its kind of workload, to a gap of 1e-6; nothing is solved yet.
    ///
    /// Errors: a participation that does not fit the steps.
    pub fn new(workload: Workload, participation: Participation) -> Result<Self> {
        Self::with_solver(workload, participation, Solver::default(), Options::default())
    }

    /// [`Problem::new`] with a solver and its options.
    ///
    /// Errors: those of it.
    pub fn with_solver(
        workload: Workload,
        participation: Participation,
        solver: Solver,
        options: Options,
    ) -> Result<Self> {
        participation.pattern(workload.steps())?;
        let (optimum, prefix_sum, decoder) = (OnceCell::new(), OnceCell::new(), OnceCell::new());
        Ok(Self {
            workload,
            participation,
            goal: None,
            near: None,
            solver,
            options,
            optimum,
            prefix_sum,
            decoder,
        })
    }

    /// A problem for units that are sampled, under the participation that the sampling means, where the best mechanism is
    /// another for every budget.
    ///
    /// Errors: those of [`Problem::new`] and of [`Sampling::participation`]; ε not positive and finite, δ outside (0, 1).
    pub fn sampled(workload: Workload, goal: Goal) -> Result<Self> {
        check_epsilon(goal.epsilon)?;
        check_delta(goal.delta)?;
        let participation = goal.sampling.participation(workload.steps())?.unwrap_or_default();
        Ok(Self { goal: Some(goal), ..Self::new(workload, participation)? })
    }

    /// The same problem, with a form that was best for another budget to start from.
    pub fn near(self, form: Form) -> Self {
        Self { near: Some(form), ..self }
    }

    /// A form to start from.
    pub(crate) fn start(&self) -> Option<&Form> {
        self.near.as_ref()
    }

    /// The budget that noise is to be least for, where units are sampled.
    pub fn goal(&self) -> Option<Goal> {
        self.goal
    }

    /// The workload.
    pub fn workload(&self) -> &Workload {
        &self.workload
    }

    /// Number of steps.
    pub fn steps(&self) -> usize {
        self.workload.steps()
    }

    /// The participation.
    pub fn participation(&self) -> Participation {
        self.participation
    }

    /// The optimum of the workload under the participation. For several participations the gap may be larger than was asked
    /// for; [`Optimum::stopped`] says why.
    ///
    /// Errors: those of [`optimal_for`](crate::factorize::optimal_for).
    pub fn optimum(&self, observe: Observer<'_>) -> Result<&Optimum> {
        let solve = || {
            let best = best_for(&self.workload, self.participation, self.solver, &self.options, observe)?;
            if best.dual.times() > 1 { Ok(best) } else { best.within(&self.options) }
        };
        solved(&self.optimum, solve)
    }

    /// The recurrence of the workload.
    ///
    /// Errors: a workload that is a matrix.
    pub fn recurrence(&self) -> Result<&Recurrence> {
        self.workload.recurrence().ok_or_else(|| Error::Unsupported {
            what: "streaming for a matrix".into(),
            hint: "a dense workload has no recurrence; use its dense optimum",
        })
    }

    /// The same problem for the prefix sum with as many steps.
    pub fn prefix_sum(&self) -> Result<&Problem> {
        if self.workload.is_prefix_sum() && self.workload.recurrence().is_some() {
            return Ok(self);
        }
        let problem = solved(&self.prefix_sum, || {
            let workload = Workload::prefix_sum(self.steps())?;
            Self::with_solver(workload, self.participation, Solver::Auto, self.options).map(Box::new)
        })?;
        Ok(problem)
    }

    /// This problem if its workload is a recurrence, else that of the prefix sum.
    pub fn streamable(&self) -> Result<&Problem> {
        if self.workload.recurrence().is_some() { Ok(self) } else { self.prefix_sum() }
    }

    /// The decoder `B` of the dense optimum, after the recurrence that designs use: its diagonal is positive also where a
    /// step size is zero.
    ///
    /// Errors: those of the solver; more steps than a dense matrix holds; a workload that is a matrix.
    pub fn decoder(&self, observe: Observer<'_>) -> Result<MatRef<'_, f64>> {
        let decoder = solved(&self.decoder, || {
            let mut decoder = self.optimum(observe)?.to_dense(&self.workload)?.0.coloring().to_owned();
            let recurrence = self.recurrence()?;
            (0..decoder.ncols()).for_each(|j| recurrence.apply(decoder.col_as_slice_mut(j)));
            Ok(decoder)
        })?;
        Ok(decoder.as_ref())
    }
}

fn solved<T>(cell: &OnceCell<T>, solve: impl FnOnce() -> Result<T>) -> Result<&T> {
    if let Some(value) = cell.get() {
        return Ok(value);
    }
    let value = solve()?;
    Ok(cell.get_or_init(|| value))
}
