//! The primal problem `min tr(AᵀA X⁻¹)` over positive definite `X` with unit diagonal, for the paper's two
//! rivals of the fixed point: Newton directions and projected gradients.

use crate::error::{Error, Result};
use crate::factorize::dense::Dense;
use crate::factorize::dual::{DualSolution, Observer, Options, Oracle, Progress, Stage};
use crate::factorize::point::Dual;
use faer::linalg::solvers::{DenseSolveCore, Llt};
use faer::{Mat, Side};
use std::time::{Duration, Instant};

/// Fraction of the predicted decrease that a step must achieve.
const SUFFICIENT_DECREASE: f64 = 1e-2;
/// Shrinking of a refused step.
const BACKTRACK: f64 = 0.5;
/// Steps between two evaluations of the dual bound, which the methods themselves do not need.
const CERTIFY_EVERY: usize = 5;

/// A feasible point with what one Cholesky factorization gives.
pub(crate) struct Point {
    pub(crate) x: Mat<f64>,
    pub(crate) inverse: Mat<f64>,
    /// `−∇ = X⁻¹AᵀA X⁻¹`.
    pub(crate) descent: Mat<f64>,
    pub(crate) loss: f64,
}

/// The objective, with `AᵀA` formed once.
pub(crate) struct Objective {
    gram: Mat<f64>,
}

impl Objective {
    /// The loss, or `None` where `X` has no Cholesky factor.
    fn factor(&self, x: &Mat<f64>) -> Option<(Llt<f64>, f64)> {
        let cholesky = x.llt(Side::Lower).ok()?;
        let loss: f64 = {
            use faer::linalg::solvers::Solve;
            let solved = cholesky.solve(&self.gram);
            (0..x.nrows()).map(|i| solved[(i, i)]).sum()
        };
        (loss.is_finite() && loss > 0.0).then_some((cholesky, loss))
    }

    pub(crate) fn point(&self, x: Mat<f64>) -> Option<Point> {
        let (cholesky, loss) = self.factor(&x)?;
        let inverse = cholesky.inverse();
        let descent = &inverse * (&self.gram * &inverse);
        Some(Point { x, inverse, descent, loss })
    }

    /// Armijo search along `direction` from step `first`: halves until the step is positive definite and
    /// decreases the loss enough.
    fn search(&self, from: &Point, direction: &Mat<f64>, first: f64) -> Option<(f64, Mat<f64>)> {
        let slope = -inner(&from.descent, direction);
        let mut step = first;
        while step > 1e-14 * first {
            let n = from.x.nrows();
            let x = Mat::from_fn(n, n, |i, j| from.x[(i, j)] + step * direction[(i, j)]);
            if let Some((_, loss)) = self.factor(&x)
                && loss <= from.loss + SUFFICIENT_DECREASE * step * slope
            {
                return Some((step, x));
            }
            step *= BACKTRACK;
        }
        None
    }
}

/// A feasible descent direction with zero diagonal, and the step length to try first.
pub(crate) trait Direction {
    fn direction(&mut self, point: &Point) -> Mat<f64>;
    /// First trial step, given the last accepted one.
    fn first_step(&self, last: Option<f64>) -> f64;
}

/// The primal optimum that was found, and the multipliers with the best bound.
pub(crate) struct PrimalSolution {
    pub(crate) x: Mat<f64>,
    pub(crate) dual: DualSolution,
}

/// Line-search descent from `X(v₀)`, scaled to unit diagonal, until the gap is reached.
///
/// The lower bound is the dual at `v = diag(X⁻¹AᵀA X⁻¹)`, the multipliers at the optimum; its time is not
/// counted in [`Progress::seconds`], since only the certificate needs it.
pub(crate) fn descend(
    a: Mat<f64>,
    start: &Dual,
    direction: &mut dyn Direction,
    options: &Options,
    observe: Observer<'_>,
) -> Result<PrimalSolution> {
    let n = a.nrows();
    let mut oracle = Dense::new(a.clone());
    let clock = Instant::now();
    let mut paused = Duration::ZERO;
    let objective = Objective { gram: a.transpose() * &a };
    let scaled = oracle.primal(start, 1e-9)?;
    let root: Vec<f64> = (0..n).map(|i| scaled[(i, i)].sqrt()).collect();
    let x = Mat::from_fn(n, n, |i, j| if i == j { 1.0 } else { scaled[(i, j)] / (root[i] * root[j]) });
    let not_definite =
        || Error::Numerical { what: "start X(v₀)", index: 0, reason: "it is not positive definite" };
    let mut point = objective.point(x).ok_or_else(not_definite)?;
    let mut last_step = None;
    let (mut lower_bound, mut multipliers) = (0.0_f64, start.clone());
    for iteration in 1..=options.max_iterations {
        let movement = direction.direction(&point);
        let moved = objective.search(&point, &movement, direction.first_step(last_step));
        let stuck = moved.is_none();
        if let Some((step, x)) = moved {
            last_step = Some(step);
            point = objective.point(x).ok_or_else(not_definite)?;
        }
        if iteration % CERTIFY_EVERY == 1 || stuck || iteration == options.max_iterations {
            let pause = Instant::now();
            let v: Vec<f64> = (0..n).map(|i| point.descent[(i, i)]).collect();
            let dual = Dual::single(v)?;
            let diagonal = oracle.blocks(&dual, 0.01 * options.gap)?;
            let v = dual.v();
            let phi: f64 = v.iter().zip(&diagonal.x).map(|(v, x)| v * x).sum();
            let bound = phi * phi / v.iter().sum::<f64>();
            if bound > lower_bound {
                (lower_bound, multipliers) = (bound, dual);
            }
            paused += pause.elapsed();
        }
        let gap = point.loss / lower_bound - 1.0;
        let seconds = (clock.elapsed() - paused).as_secs_f64();
        let (stage, share, loss) = (Stage::Solving, None, point.loss);
        let progress = Progress { stage, share, iteration, loss, lower_bound, gap, seconds };
        if observe(&progress).is_break() {
            return Err(Error::Interrupted { iterations: iteration, gap });
        }
        let stopped = match gap <= options.gap {
            true => None,
            false if stuck => Some("no step decreases the loss further"),
            false if iteration == options.max_iterations => Some("the iterations ran out"),
            false => continue,
        };
        let (dual, loss, iterations) = (multipliers, point.loss, iteration);
        let dual = DualSolution {
            dual,
            mu: 0.0,
            x: vec![1.0; n],
            largest: 1.0,
            loss,
            lower_bound,
            relative_error: 0.0,
            iterations,
            stopped,
        };
        return Ok(PrimalSolution { x: point.x, dual });
    }
    Err(Error::argument("maximum of iterations", options.max_iterations, "at least one is needed"))
}

pub(crate) fn inner(a: &Mat<f64>, b: &Mat<f64>) -> f64 {
    (0..a.ncols())
        .map(|j| a.col_as_slice(j).iter().zip(b.col_as_slice(j)).map(|(x, y)| x * y).sum::<f64>())
        .sum()
}
