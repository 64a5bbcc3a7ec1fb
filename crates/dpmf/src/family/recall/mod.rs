//! A filter of a few states that also sees noise of earlier epochs, drawn again from its key.

mod energy;
mod fit;
mod gram;
mod grid;
mod objective;
mod shape;

use super::watched::Watched;
use super::{Budget, Family, Knob};
use crate::error::{Error, Result};
use crate::factorize::Observer;
use crate::form::{self, Form};
use crate::problem::Problem;
use crate::workload::Workload;
use energy::Plant;
use fit::Fit;
use shape::{Coefficients, Shape};

/// The best filter of `r` states and `J` recalled rows for a workload whose data is seen again every `b` steps.
///
/// Where nothing is seen twice, nothing needs to be recalled: the optimum as a stream of a few states.
pub(super) struct Recall;

/// Buffers and recalls where only the other is chosen.
const BUFFERS: usize = 2;
const RECALLS: usize = 3;

/// Relative excess of the root loss over the bound that is asked for where nothing is chosen.
const TOLERANCE: f64 = 1e-2;

/// Most buffers and recalls that a tolerance may ask for.
const MOST_BUFFERS: usize = 4;
const MOST_RECALLS: usize = 15;

/// By how much the first two levels of a fit may lie above the last, in the root loss: below what is seen by far.
const COARSE: [f64; 2] = [0.03, 0.006];

impl Family for Recall {
    fn name(&self) -> &'static str {
        "recall"
    }

    fn about(&self) -> &'static str {
        "a stream of a few states that draws the noise of earlier epochs again"
    }

    fn knobs(&self) -> &'static [Knob] {
        &[Knob::Buffers, Knob::Recalls, Knob::Tolerance]
    }

    fn fit(&self, problem: &Problem, budget: &Budget, observe: Observer<'_>) -> Result<Form> {
        let problem = problem.streamable()?;
        let workload = problem.workload();
        let pattern = problem.participation().pattern(problem.steps())?;
        let Some(stride) = pattern.separation else {
            let optimum = problem.optimum(observe)?;
            return Ok(Form::StateSpace(optimum.to_state_space(workload, budget.target())?));
        };
        let steps = problem.steps();
        let most = steps.div_ceil(stride) - 1;
        let shape = |order: usize, recalls: usize| Shape { steps, stride, order, recalls: recalls.min(most) };
        let lower_bound = problem.optimum(observe)?.certificate.lower_bound;
        let plant = plant(workload)?;
        let mut search = Search { plant: &plant, watched: Watched::new(lower_bound, observe) };
        let found = match (budget.buffers, budget.recalls) {
            (None, None) => search.within(budget.tolerance.unwrap_or(TOLERANCE), most, shape)?,
            (buffers, recalls) => {
                let shape = shape(buffers.unwrap_or(BUFFERS), recalls.unwrap_or(RECALLS));
                search.run(Fit::new(shape, &plant))?.0
            }
        };
        let Shape { order, recalls, .. } = found.shape;
        Ok(Form::Recall(form::Recall::from_parts(stride, order, recalls, found.parts())?))
    }
}

/// The optimizer, for the step sizes that designs see.
fn plant(workload: &Workload) -> Result<Plant> {
    let realisation = workload.design_realisation().ok_or_else(|| Error::Unsupported {
        what: "a stream for a matrix".into(),
        hint: "a dense workload has no recurrence; use its dense optimum",
    })?;
    let (mut transition, mut input) = (Vec::new(), Vec::new());
    let (mut f, mut g) = (Vec::new(), Vec::new());
    for t in 0..workload.steps() {
        realisation.write(t, &mut f, &mut g);
        transition.extend_from_slice(&f);
        input.extend_from_slice(&g);
    }
    Ok(Plant { states: realisation.states(), transition, input })
}

/// Fits, and who watches them.
struct Search<'a> {
    plant: &'a Plant,
    watched: Watched<'a>,
}

impl Search<'_> {
    /// Runs a fit to the end of a level; the smooth loss there, if the level was not left to the next.
    fn advance(&mut self, fit: &mut Fit<'_>, level: usize) -> Result<Option<f64>> {
        fit.advance(level, &mut |loss| self.watched.tell(loss))
    }

    /// Runs a fit to its end.
    fn run(&mut self, mut fit: Fit<'_>) -> Result<(Coefficients, f64)> {
        self.advance(&mut fit, usize::MAX)?;
        Ok(fit.finish())
    }

    /// The cheapest filter within a tolerance. A buffer counts twice: it is read, written and kept, and a recalled row only
    /// computed.
    ///
    /// Errors: [`Error::NotConverged`] when the largest filter that is tried does not reach it.
    fn within(
        &mut self,
        tolerance: f64,
        most: usize,
        shape: impl Fn(usize, usize) -> Shape,
    ) -> Result<Coefficients> {
        let mut sizes: Vec<(usize, usize)> =
            (0..=MOST_BUFFERS).flat_map(|r| (0..=most.min(MOST_RECALLS)).map(move |j| (r, j))).collect();
        sizes.sort_by_key(|(r, j)| (2 * r + j, *r));
        let lower_bound = self.watched.lower_bound;
        let excess = |loss: f64| (loss / lower_bound).sqrt() - 1.0;
        let mut nearest = f64::INFINITY;
        for (r, j) in sizes {
            let mut fit = Fit::new(shape(r, j), self.plant);
            let mut hopeful = true;
            for (level, margin) in COARSE.into_iter().enumerate() {
                hopeful = hopeful
                    && self.advance(&mut fit, level)?.is_none_or(|loss| excess(loss) <= tolerance + margin);
            }
            if !hopeful {
                continue;
            }
            let (coefficients, loss) = self.run(fit)?;
            nearest = nearest.min(excess(loss));
            if nearest <= tolerance {
                return Ok(coefficients);
            }
        }
        Err(Error::NotConverged {
            gap: (1.0 + nearest).powi(2) - 1.0,
            target: (1.0 + tolerance).powi(2) - 1.0,
            iterations: self.watched.iterations,
            reason: "no filter of few states and recalled rows comes so close",
            v: Vec::new(),
        })
    }
}

#[cfg(test)]
mod tests;
