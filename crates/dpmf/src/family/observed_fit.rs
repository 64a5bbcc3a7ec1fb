//! Fits with an observer, who may stop them.

use crate::error::{Error, Result};
use crate::factorize::{Observer, Progress, Stage};
use crate::linalg::lbfgs::{Lbfgs, Point};
use std::time::Instant;

/// An observer, and what is reported to it in addition to the loss.
pub(super) struct Watched<'a> {
    pub lower_bound: f64,
    clock: Instant,
    pub iterations: usize,
    observe: Observer<'a>,
}

/// Points whose curvature a minimisation remembers.
const MEMORY: usize = 30;

/// Decrease of the logarithm of a loss below which a minimisation ends.
const STALLED: f64 = 1e-11;

impl<'a> Watched<'a> {
    pub fn new(lower_bound: f64, observe: Observer<'a>) -> Self {
        Self { lower_bound, clock: Instant::now(), iterations: 0, observe }
    }

    /// One more step, and the loss there.
    ///
    /// Errors: [`Error::Interrupted`] when the watcher says so.
    pub fn tell(&mut self, loss: f64) -> Result<()> {
        self.iterations += 1;
        let (iteration, lower_bound) = (self.iterations, self.lower_bound);
        let gap = loss / lower_bound - 1.0;
        let seconds = self.clock.elapsed().as_secs_f64();
        let (stage, share) = (Stage::Fitting, None);
        let progress = Progress { stage, share, iteration, loss, lower_bound, gap, seconds };
        match (self.observe)(&progress).is_break() {
            true => Err(Error::Interrupted { iterations: self.iterations, gap }),
            false => Ok(()),
        }
    }

    /// Minimises the logarithm of a loss, given with its gradient, in at most so many steps.
    ///
    /// Errors: those of [`Watched::tell`].
    pub fn minimise(
        &mut self,
        start: Vec<f64>,
        steps: usize,
        mut evaluate: impl FnMut(&[f64]) -> (f64, Vec<f64>),
    ) -> Result<Point> {
        let (value, gradient) = evaluate(&start);
        let mut point = Point { x: start, value, gradient };
        let mut minimiser = Lbfgs::new(MEMORY);
        for _ in 0..steps {
            let Some(next) = minimiser.step(&point, &mut evaluate) else { break };
            let decrease = point.value - next.value;
            point = next;
            self.tell(point.value.exp())?;
            if decrease < STALLED {
                break;
            }
        }
        Ok(point)
    }

    /// Minima for some numbers of coefficients less one, each from the better of a start of its own and the minimum before with
    /// zeros added: so none is above that of fewer.
    ///
    /// Errors: those of [`Watched::tell`].
    pub fn nested(
        &mut self,
        sizes: &[usize],
        steps: usize,
        start: impl Fn(usize) -> Vec<f64>,
        mut evaluate: impl FnMut(&[f64]) -> (f64, Vec<f64>),
    ) -> Result<Vec<Vec<f64>>> {
        let mut found: Vec<Vec<f64>> = Vec::new();
        for size in sizes {
            let mut from = start(*size);
            if let Some(smaller) = found.last() {
                let mut widened = smaller.clone();
                widened.resize(from.len(), 0.0);
                if evaluate(&widened).0 < evaluate(&from).0 {
                    from = widened;
                }
            }
            let least = self.minimise(from, steps, &mut evaluate)?;
            found.push(least.x);
        }
        Ok(found)
    }
}
