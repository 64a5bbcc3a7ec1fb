//! A filter of a few states that also uses noise of earlier epochs, regenerated from the key.

mod energy;
mod fit;
mod gram;
mod grid;
mod objective;
mod separated;
mod shape;

use super::nested::least;
use super::observed_fit::Watched;
use super::plant::Plant;
use super::toeplitz::Measure;
use super::{Budget, Family, Knob};
use crate::error::{Error, Result};
use crate::factorize::Observer;
use crate::form::{self, Form};
use crate::participation::Participation;
use crate::problem::Problem;
use fit::Fit;
use separated::Separated;
use shape::{Coefficients, Shape};

/// The best filter of `r` states and `J` recalled rows for a workload whose data is seen again every `b` steps.
///
/// Where nothing is seen twice, nothing needs to be recalled: the optimum as a stream of a few states. Where data may come
/// again at any distance from `b` on, coefficients are the same at every step.
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
        "a stream of a few states that also regenerates noise of earlier epochs"
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
            return Ok(Form::StateSpace(optimum.to_state_space(workload, budget.target(), observe)?));
        };
        let steps = problem.steps();
        let most = steps.div_ceil(stride) - 1;
        let shape = |order: usize, recalls: usize| Shape { steps, stride, order, recalls: recalls.min(most) };
        let lower_bound = problem.optimum(observe)?.certificate.lower_bound;
        let watched = Watched::new(lower_bound, observe);
        let chosen = match (budget.buffers, budget.recalls) {
            (None, None) => None,
            (buffers, recalls) => Some((buffers.unwrap_or(BUFFERS), recalls.unwrap_or(RECALLS))),
        };
        // What was asked for by number is met or an error; where nothing was asked for, the best will do.
        let asked = |(coefficients, excess): (Coefficients, f64)| match budget.tolerance {
            Some(target) if excess > target => {
                let reason = "a few states and recalled rows come no closer";
                Err(Error::TooFewStates { states: MOST_BUFFERS, excess, target, reason })
            }
            _ => Ok(coefficients),
        };
        let found = match problem.participation() {
            Participation::MinSeparation { .. } => {
                let measure = Measure::new(problem)?;
                let mut search = Free { measure: &measure, times: pattern.times, watched };
                // The bound may be far from what is possible where distances are free, so it decides only if asked.
                match (chosen, budget.tolerance) {
                    (None, Some(tolerance)) => vec![asked(within(&mut search, tolerance, most, shape)?)?],
                    _ => halves(&mut search, chosen.unwrap_or((BUFFERS, RECALLS)), shape)?,
                }
            }
            _ => {
                let plant = Plant::new(workload)?;
                let mut search = Fixed { plant: &plant, watched };
                match chosen {
                    None => {
                        vec![asked(within(&mut search, budget.tolerance.unwrap_or(TOLERANCE), most, shape)?)?]
                    }
                    Some(sizes) => halves(&mut search, sizes, shape)?,
                }
            }
        };
        let form = |found: Coefficients| -> Result<Form> {
            let Shape { order, recalls, .. } = found.shape;
            Ok(Form::Recall(form::Recall::from_parts(stride, order, recalls, found.parts())?))
        };
        least(problem, found.into_iter().map(form).collect::<Result<_>>()?)
    }
}

/// Fits of half as many states and recalls, halved until one state is left, and that of all: many coefficients have many minima, and
/// a poor one may be worse than what fewer give.
fn halves<'a>(
    search: &mut impl Search<'a>,
    (order, recalls): (usize, usize),
    shape: impl Fn(usize, usize) -> Shape,
) -> Result<Vec<Coefficients>> {
    let smaller = std::iter::successors(Some((order, recalls)), |(r, j)| (*r > 1).then_some((r / 2, j / 2)));
    let mut sizes: Vec<(usize, usize)> = smaller.collect();
    sizes.reverse();
    sizes.into_iter().map(|(r, j)| Ok(search.run(shape(r, j))?.0)).collect()
}

/// Fits for one kind of participation, with who watches them.
trait Search<'a> {
    fn watched(&mut self) -> &mut Watched<'a>;

    /// A fit, and its loss.
    fn run(&mut self, shape: Shape) -> Result<(Coefficients, f64)>;

    /// Whether a fit may come within a tolerance of the bound, in the root loss, as far as a part of it shows.
    fn is_hopeful(&mut self, shape: Shape, tolerance: f64) -> Result<bool>;
}

/// Fits to epochs in a fixed order.
struct Fixed<'a> {
    plant: &'a Plant,
    watched: Watched<'a>,
}

impl<'a> Search<'a> for Fixed<'a> {
    fn watched(&mut self) -> &mut Watched<'a> {
        &mut self.watched
    }

    fn run(&mut self, shape: Shape) -> Result<(Coefficients, f64)> {
        let mut fit = Fit::new(shape, self.plant);
        fit.advance(usize::MAX, &mut |loss| self.watched.tell(loss))?;
        Ok(fit.finish())
    }

    fn is_hopeful(&mut self, shape: Shape, tolerance: f64) -> Result<bool> {
        let mut fit = Fit::new(shape, self.plant);
        for (level, margin) in COARSE.into_iter().enumerate() {
            let reached = fit.advance(level, &mut |loss| self.watched.tell(loss))?;
            if reached.is_some_and(|loss| excess(loss, &self.watched) > tolerance + margin) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Fits to participations at any distances from the separation on.
struct Free<'a> {
    measure: &'a Measure<'a>,
    times: usize,
    watched: Watched<'a>,
}

impl<'a> Search<'a> for Free<'a> {
    fn watched(&mut self) -> &mut Watched<'a> {
        &mut self.watched
    }

    fn run(&mut self, shape: Shape) -> Result<(Coefficients, f64)> {
        Separated { shape, times: self.times, measure: self.measure }.fit(&mut self.watched)
    }

    fn is_hopeful(&mut self, shape: Shape, tolerance: f64) -> Result<bool> {
        let (_, loss) = self.run(shape)?;
        Ok(excess(loss, &self.watched) <= tolerance)
    }
}

/// Of the root loss over that of the bound, relative.
fn excess(loss: f64, watched: &Watched<'_>) -> f64 {
    (loss / watched.lower_bound).sqrt() - 1.0
}

/// The cheapest filter within a tolerance, or the best that was found. A buffer counts twice: it is read, written and kept,
/// and a recalled row only computed.
///
/// More recalls and more buffers never hurt, so for each number of buffers the recalls are found by bisection.
fn within<'a>(
    search: &mut impl Search<'a>,
    tolerance: f64,
    most: usize,
    shape: impl Fn(usize, usize) -> Shape,
) -> Result<(Coefficients, f64)> {
    let most = most.min(MOST_RECALLS);
    let mut chosen: Option<(usize, usize)> = None;
    for r in 1..=MOST_BUFFERS {
        // Only what is cheaper is of interest.
        let cap = chosen.map_or(Some(most), |(s, j)| (2 * s + j).checked_sub(2 * r + 1));
        let Some(mut high) = cap.map(|cap| cap.min(most)) else { break };
        if !search.is_hopeful(shape(r, high), tolerance)? {
            continue;
        }
        let mut low = 0;
        while low < high {
            let middle = (low + high) / 2;
            match search.is_hopeful(shape(r, middle), tolerance)? {
                true => high = middle,
                false => low = middle + 1,
            }
        }
        chosen = Some((r, high));
    }
    let (mut r, mut j) = chosen.unwrap_or((MOST_BUFFERS, most));
    let mut best: Option<(Coefficients, f64)> = None;
    loop {
        let (coefficients, loss) = search.run(shape(r, j))?;
        let excess = excess(loss, search.watched());
        if best.as_ref().is_none_or(|(_, least)| excess < *least) {
            best = Some((coefficients, excess));
        }
        // What part of a fit promised, the whole of it may miss by little.
        match best {
            Some(found) if found.1 <= tolerance || (r, j) >= (MOST_BUFFERS, most) => return Ok(found),
            _ if j < most => j += 1,
            _ => r += 1,
        }
    }
}

#[cfg(test)]
mod tests;
