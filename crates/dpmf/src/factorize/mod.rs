//! Solvers: they find the optimum of a workload, with its certificate.

mod anderson;
mod ascent;
mod bound;
mod dense;
mod dual;
mod gradient;
mod linear;
mod newton;
mod phased;
mod point;
mod primal;
mod state_space;

pub use crate::linalg::DENSE_LIMIT;
pub use bound::lower_bound_at;
pub use dense::Dense as DenseOracle;
pub use dual::{
    Blocks, Certificate, DualSolution, Iteration, Observer, Options, Oracle, Progress, Stage, solve,
};
pub use linear::Linear as LinearOracle;
pub use point::Dual;
pub use state_space::Order;

use crate::error::{DualPoint, Error, Result};
use crate::form::{self, Representation};
use crate::linalg::within_dense_limit;
use crate::participation::Participation;
use crate::workload::{SMALLEST_RATE, Workload};
use faer::Mat;
use serde::{Deserialize, Serialize};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

/// Steps up to which the loss of the linear solver may be measured anew by a decomposition, which takes milliseconds.
const REMEASURED: usize = 256;

/// Ratio of the smallest to the largest step size below which the coefficients of a recurrence lose digits that count.
const ROUGH: f64 = 1e-3;

/// Steps up to which several participations are left to the dense solver at once where step sizes are zero or differ much: its
/// decompositions take milliseconds, and a recurrence would lose digits.
const DECOMPOSED: usize = 128;

/// Iterations of the fixed point before the interior-point method takes over, where that is affordable.
const FIRST: usize = 40;

/// Iterations of the linear solver for several participations where the dense one can follow.
const TRIED: usize = 400;

/// Values of `μ`, as parts of the mean of `φ`, for matrices of a workload that is singular, or nearly so: without it coefficients may
/// be large and cancel, which single precision does not hold.
const REGULAR: [f64; 4] = [1e-13, 1e-11, 1e-9, 1e-7];

/// Multiples of the identity that are added to `X` for the same reason, as parts of the mean of its diagonal. Each costs no more than its
/// share of the sensitivity, since the loss of an `X` falls when anything is added to it.
const RIDGES: [f64; 4] = [1e-11, 1e-9, 1e-7, 1e-5];

/// Steps up to which a recurrence that the linear solver loses to rounding is left to the dense one.
const SHORT: usize = 1024;

/// Steps up to which the loss of an optimum is measured under a separation, which takes its dense rows and their inner products.
const MEASURED: usize = 1024;

/// States that a tolerance may ask for; a tree has log₂ n, and ours needs fewer.
const MAX_STATES: usize = 32;

/// How often a pass over the steps is reported.
const PACE: Duration = Duration::from_millis(100);

/// How the optimum is found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Solver {
    /// `Linear` for recurrences, `Dense` for matrices, and for short recurrences where rounding stops `Linear`.
    #[default]
    Auto,
    /// The fixed point with banded selected inversions, O(n log n) an iteration.
    Linear,
    /// The fixed point with dense decompositions, O(n³) an iteration.
    Dense,
    /// Newton directions on the primal problem, the rival of the paper's Figure 4.
    Newton,
    /// Projected gradient descent on the primal problem, the paper's other rival.
    Gradient,
}

/// An [`Observer`] that says nothing and never stops.
pub fn quiet(_: &Progress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// An optimal factorization in its dual form.
#[derive(Clone, Debug)]
pub struct Optimum {
    /// The dual point; `X(D) + μ ⊕_p D_p⁻¹` is the optimum up to the gap.
    pub dual: Dual,
    mu: f64,
    /// The participation that it is the optimum for.
    pub participation: Participation,
    /// Loss, lower bound and gap.
    pub certificate: Certificate,
    /// The solver that found it, never `Auto`.
    pub solver: Solver,
    /// Why the gap is above the target, if it is.
    pub stopped: Option<&'static str>,
    /// The primal point, from a solver that works with it.
    primal: Option<Mat<f64>>,
}

/// Finds the factorization of least loss for one participation, to a certified gap.
///
/// Errors: those of [`optimal_for`].
pub fn optimal(
    workload: &Workload,
    solver: Solver,
    options: &Options,
    observe: Observer<'_>,
) -> Result<Optimum> {
    optimal_for(workload, Participation::Single, solver, options, observe)
}

/// Finds the factorization of least loss under a participation, to a certified gap.
///
/// For [`Participation::MinSeparation`] it is that of the epochs which the separation allows: units that take part every `b`
/// steps, `b` the separation, or `⌈n/K⌉` where fewer than all participations are allowed. Such units are among those that
/// the separation allows, so the lower bound holds; the loss is measured for the separation itself, up to 1024 steps, and is
/// infinite for more: the gap stays open.
///
/// Errors: [`Error::NotConverged`] with the gap reached, [`Error::Interrupted`] when `observe` says so,
/// [`Error::Unsupported`] when a dense solver is asked for more than [`DENSE_LIMIT`] steps, or a rival for several
/// participations; those of [`Participation::pattern`].
///
/// ```
/// use dpmf::factorize::{Options, Solver, optimal_for, quiet};
/// use dpmf::{Participation, Workload};
///
/// let (workload, four) = (Workload::prefix_sum(64)?, Participation::Epochs { times: 4 });
/// let optimum = optimal_for(&workload, four, Solver::Auto, &Options::default(), &mut quiet)?;
/// assert!((optimum.certificate.loss.sqrt() - 35.26283).abs() < 1e-4);
/// assert_eq!((optimum.dual.separation(), optimum.dual.times()), (16, 4));
/// # Ok::<(), dpmf::Error>(())
/// ```
pub fn optimal_for(
    workload: &Workload,
    participation: Participation,
    solver: Solver,
    options: &Options,
    observe: Observer<'_>,
) -> Result<Optimum> {
    best_for(workload, participation, solver, options, observe)?.within(options)
}

/// [`optimal_for`] that keeps what it found where the gap stays open: [`Optimum::stopped`] says why.
///
/// Errors: those of it, but for [`Error::NotConverged`].
pub(crate) fn best_for(
    workload: &Workload,
    participation: Participation,
    solver: Solver,
    options: &Options,
    observe: Observer<'_>,
) -> Result<Optimum> {
    let n = workload.steps();
    let several = participation.spacing(n)? < n;
    let mut by =
        |solver, options: &Options| solved_by(workload, participation, solver, options, &mut *observe);
    let found = if solver == Solver::Auto && workload.recurrence().is_some() {
        let rough = !workload.is_invertible() || workload.smallest_rate() < ROUGH;
        let short = several && n <= DECOMPOSED;
        let most = if short { TRIED.min(options.max_iterations) } else { options.max_iterations };
        let linear = match short && rough {
            true => None,
            false => Some(by(Solver::Linear, &Options { max_iterations: most, ..*options })),
        };
        let follows = |linear: &Result<Optimum>| match linear {
            Ok(found) => found.stopped.is_some(),
            Err(Error::Unsupported { .. } | Error::Numerical { .. }) => true,
            Err(_) => false,
        };
        match linear {
            Some(linear) if n > SHORT || !follows(&linear) => linear,
            linear => match (linear, by(Solver::Dense, options)) {
                (Some(Ok(linear)), Ok(dense)) => {
                    Ok(if linear.certificate.gap < dense.certificate.gap { linear } else { dense })
                }
                (Some(Ok(linear)), Err(Error::Numerical { .. })) => Ok(linear),
                (_, dense) => dense,
            },
        }
    } else {
        by(solver, options)
    };
    match found {
        Err(Error::Numerical { .. }) if several => unsolved(workload, participation),
        found => found,
    }
}

/// Where no solver gets anywhere: the point at which they start, with what it proves.
fn unsolved(workload: &Workload, participation: Participation) -> Result<Optimum> {
    let dual = start(workload, participation)?;
    let lower_bound = lower_bound_at(workload, &dual)?;
    let certificate = Certificate::new(f64::INFINITY, lower_bound, 0);
    let stopped = Some("64-bit arithmetic overflows or breaks down");
    let (solver, primal, mu) = (Solver::Dense, None, 0.0);
    let mut optimum = Optimum { dual, mu, participation, certificate, solver, stopped, primal };
    if workload.steps() <= MEASURED {
        optimum.certificate = optimum.to_dense(workload)?.1;
    }
    Ok(optimum)
}

/// One solver, whether it reaches the gap or not.
fn solved_by(
    workload: &Workload,
    participation: Participation,
    solver: Solver,
    options: &Options,
    observe: Observer<'_>,
) -> Result<Optimum> {
    let start = start(workload, participation)?;
    match solver {
        Solver::Newton => descend(workload, start, &mut newton::Newton, solver, options, observe),
        Solver::Gradient => descend(workload, start, &mut gradient::Gradient, solver, options, observe),
        Solver::Auto | Solver::Linear | Solver::Dense => {
            let solver = if solver == Solver::Linear { solver } else { Solver::Dense };
            let found = match solver == Solver::Dense && start.times() > 1 {
                true => solve_phases(workload, start, options, observe)?,
                false => {
                    let mut found = solve(oracle(workload, solver)?.as_mut(), start, options, observe)?;
                    if solver == Solver::Linear {
                        remeasure(workload, &mut found)?;
                    }
                    found
                }
            };
            let largest = found.largest;
            let (certificate, stopped) = prove(workload, &found, |sum_phi| largest * sum_phi, options)?;
            let DualSolution { dual, mu, .. } = found;
            let mut optimum = Optimum { dual, mu, participation, certificate, solver, stopped, primal: None };
            if matches!(participation, Participation::MinSeparation { .. }) && optimum.dual.times() > 1 {
                optimum.certificate = match workload.steps() <= MEASURED {
                    true => optimum.to_dense(workload)?.1,
                    false => optimum.certificate.for_loss(f64::INFINITY),
                };
            }
            Ok(optimum)
        }
    }
}

/// The dense solver for several participations: the fixed point, then the interior-point method for what it leaves.
fn solve_phases(
    workload: &Workload,
    start: Dual,
    options: &Options,
    observe: Observer<'_>,
) -> Result<DualSolution> {
    let mut oracle = DenseOracle::new(dense_matrix(workload)?);
    let follows = ascent::is_affordable(&start) && options.iteration == Iteration::Anderson;
    let max_iterations = if follows { options.max_iterations.min(FIRST) } else { options.max_iterations };
    let first = Options { max_iterations, ..*options };
    let found = match solve(&mut oracle, start.clone(), &first, &mut *observe) {
        // The fixed point may run into a singular block; the interior-point method keeps away from them.
        Err(Error::Numerical { .. }) if follows => {
            let blocks = oracle.blocks(&start, f64::EPSILON)?;
            DualSolution {
                stopped: Some("the fixed point broke down"),
                ..dual::measured(start, blocks, 0.0, 1)
            }
        }
        found => found?,
    };
    match follows && found.stopped.is_some() && options.max_iterations > FIRST {
        true => ascent::ascend(&oracle, found, options, observe),
        false => Ok(found),
    }
}

/// Where the iteration starts: `v` the norms of the columns of `A`, for several participations their means over a phase, and
/// contributions that point the same way in part.
fn start(workload: &Workload, participation: Participation) -> Result<Dual> {
    let norms: Vec<f64> = workload.column_norms_sq()?.into_iter().map(f64::sqrt).collect();
    let n = workload.steps();
    let separation = participation.spacing(n)?;
    let times = n.div_ceil(separation);
    if times == 1 {
        return Dual::single(norms);
    }
    let mean = |p: usize| {
        let (sum, count) = (p..n).step_by(separation).fold((0.0, 0.0), |(s, c), i| (s + norms[i], c + 1.0));
        sum / count
    };
    // Rows of the Cholesky factor of a correlation matrix with COMMON off its diagonal.
    let mut factor = vec![0.0; times * times];
    for e in 0..times {
        for k in 0..=e {
            let product: f64 = (0..k).map(|l| factor[e * times + l] * factor[k * times + l]).sum();
            factor[e * times + k] =
                if k == e { (1.0 - product).sqrt() } else { (COMMON - product) / factor[k * times + k] };
        }
    }
    let directions = (0..n).flat_map(|i| factor[i / separation * times..][..times].to_vec()).collect();
    Dual::new(n, separation, (0..separation).map(mean).collect(), directions)
}

/// Correlation of the contributions of one user at the start.
const COMMON: f64 = 0.3;

/// Where step sizes differ much, replaces the blocks of `X(D)`, found for the recurrence, by those of the workload if a
/// decomposition is cheap; else allows for the step sizes that the recurrence has raised.
fn remeasure(workload: &Workload, found: &mut DualSolution) -> Result<()> {
    if workload.steps() <= REMEASURED && workload.smallest_rate() < ROUGH {
        let blocks = DenseOracle::new(workload.to_dense()).blocks(&found.dual, f64::EPSILON)?;
        (found.x, found.relative_error) = (blocks.x, blocks.relative_error);
        found.largest = found.dual.largest_change(&found.x);
    } else if !workload.is_invertible() {
        found.relative_error += 16.0 * SMALLEST_RATE;
    }
    Ok(())
}

/// The certificate of a dual solution: the bound that its point proves, and a loss, given `Σφ` by that bound.
///
/// The bound is exact to a dozen digits, so it also tells how far the oracle was off: by so much the loss is raised. It is
/// then not below the bound, for `max x ≥ x̄`.
///
/// Beside it, why the gap is above the target, where it is.
fn prove(
    workload: &Workload,
    found: &DualSolution,
    loss: impl Fn(f64) -> f64,
    options: &Options,
) -> Result<(Certificate, Option<&'static str>)> {
    let lower_bound = lower_bound_at(workload, &found.dual)?;
    let error =
        found.relative_error.max(((found.lower_bound / lower_bound).sqrt() - 1.0).abs()) + bound::COST;
    let sum_phi = (lower_bound * found.dual.v.iter().sum::<f64>()).sqrt();
    let raised = if error < 0.1 { loss(sum_phi) * (1.0 + error) / (1.0 - error) } else { f64::INFINITY };
    let certificate = Certificate::new(raised.max(lower_bound), lower_bound, found.iterations);
    let stopped = match found.stopped {
        _ if certificate.gap <= options.gap => None,
        reason => {
            Some(reason.unwrap_or("the proof has to allow for more rounding than the gap that is left"))
        }
    };
    Ok((certificate, stopped))
}

fn oracle(workload: &Workload, solver: Solver) -> Result<Box<dyn Oracle>> {
    Ok(match (solver, workload.recurrence()) {
        (Solver::Linear, Some(recurrence)) => Box::new(LinearOracle::new(recurrence)?),
        (Solver::Linear, None) => {
            return Err(Error::Unsupported {
                what: "the linear solver for a matrix".into(),
                hint: "a dense workload has no recurrence; use the dense solver",
            });
        }
        _ => Box::new(DenseOracle::new(dense_matrix(workload)?)),
    })
}

fn descend(
    workload: &Workload,
    start: Dual,
    direction: &mut dyn primal::Direction,
    solver: Solver,
    options: &Options,
    observe: Observer<'_>,
) -> Result<Optimum> {
    if !workload.is_invertible() {
        return Err(Error::Unsupported {
            what: "this solver for step sizes that vanish".into(),
            hint: "it inverts the workload; use the linear or the dense solver",
        });
    }
    if start.times() > 1 {
        return Err(Error::Unsupported {
            what: "this solver for several participations".into(),
            hint: "it handles one participation only; use the linear or the dense solver",
        });
    }
    let found = primal::descend(dense_matrix(workload)?, &start, direction, options, observe)?;
    let (certificate, stopped) = prove(workload, &found.dual, |_| found.dual.loss, options)?;
    let (dual, participation, mu) = (found.dual.dual, Participation::Single, 0.0);
    Ok(Optimum { dual, mu, participation, certificate, solver, stopped, primal: Some(found.x) })
}

fn dense_matrix(workload: &Workload) -> Result<Mat<f64>> {
    within_dense_limit(workload.steps())?;
    Ok(workload.to_dense())
}

/// How small a streaming factorization should be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Target {
    /// As many states, one model-sized buffer each, as given, or fewer where that is better.
    Buffers(usize),
    /// As few states as keep the root loss within this relative excess over the lower bound.
    Tolerance(f64),
}

impl Default for Target {
    fn default() -> Self {
        Target::Tolerance(1e-4)
    }
}

impl Optimum {
    /// Itself, if its gap is within the target.
    ///
    /// Errors: [`Error::NotConverged`] with the gap reached.
    pub(crate) fn within(self, options: &Options) -> Result<Self> {
        let Some(reason) = self.stopped else { return Ok(self) };
        let Certificate { gap, iterations, .. } = self.certificate;
        let dual = Box::new(DualPoint::from(&self.dual));
        Err(Error::NotConverged { gap, target: options.gap, iterations, reason, dual })
    }

    /// The optimum as a stream of a few states, coefficients on the f32 grid.
    ///
    /// `observe` is called at least some times a second, with the optimum's loss and the number of streams tried.
    ///
    /// Errors: a workload without recurrence; several participations, for which the optimum has about as many states as an
    /// epoch has steps; a tolerance that no order up to 32 reaches; [`Error::Interrupted`] when `observe` says so.
    pub fn to_state_space(
        &self,
        workload: &Workload,
        target: Target,
        observe: Observer<'_>,
    ) -> Result<form::StateSpace> {
        if self.dual.times() > 1 {
            return Err(Error::Unsupported {
                what: "the optimum for several participations as a stream of a few states".into(),
                hint: "it needs about as many states as an epoch has steps: use its dense rows, or the mechanism recall",
            });
        }
        let order = match target {
            Target::Buffers(states) => Order::AtMost(states),
            Target::Tolerance(excess) => {
                Order::Tolerance { excess, lower_bound: self.certificate.lower_bound, max: MAX_STATES }
            }
        };
        let Certificate { loss, lower_bound, gap, .. } = self.certificate;
        let (clock, mut last) = (Instant::now(), None);
        let mut tell = |iteration: usize, share: Option<f64>| {
            let now = Instant::now();
            if share.is_some() && last.is_some_and(|last| now.duration_since(last) < PACE) {
                return Ok(());
            }
            last = Some(now);
            let (stage, seconds) = (Stage::Fitting, clock.elapsed().as_secs_f64());
            match observe(&Progress { stage, share, iteration, loss, lower_bound, gap, seconds }) {
                ControlFlow::Break(()) => Err(Error::Interrupted { iterations: iteration, gap }),
                ControlFlow::Continue(()) => Ok(()),
            }
        };
        form::StateSpace::truncated_for(workload, self.dual.v(), order, &mut tell)
    }

    /// The canonical lower-triangular factorization, scaled to columns of norm 1 at most, with the certificate of its own
    /// measured loss.
    ///
    /// Cost: O(n³) time, a few n × n matrices.
    pub fn to_dense(&self, workload: &Workload) -> Result<(form::Dense, Certificate)> {
        // Under a separation the gap says nothing of how far the dual point was moved.
        let gap = if self.dual.times() > 1 {
            1e-6_f64.min(self.certificate.gap.abs())
        } else {
            self.certificate.gap.abs()
        };
        let tolerance = (1e-2 * gap).clamp(1e-13, 1e-4);
        let dense = match (&self.primal, workload.recurrence()) {
            (Some(x), _) => form::Dense::from_primal(x.as_ref())?,
            // The filter before truncation has the same rows, at some n² operations a state pair.
            (None, Some(_)) if self.solver == Solver::Linear && self.dual.times() == 1 => {
                within_dense_limit(workload.steps())?;
                let filter = form::StateSpace::optimal_for(workload, self.dual.v(), tolerance)?;
                form::Dense::from_coloring(filter.coloring())?.normalised()
            }
            _ if self.dual.times() > 1 => self.dense_of_phases(workload, tolerance)?,
            _ => {
                within_dense_limit(workload.steps())?;
                let x = DenseOracle::new(workload.design_matrix()).primal(&self.dual, tolerance)?;
                form::Dense::from_primal(x.as_ref())?
            }
        };
        let gamma_sq = self.participation.sensitivity(&dense)?.gamma.powi(2);
        let loss = gamma_sq * dense.decoder_row_norms_sq(workload).iter().sum::<f64>();
        Ok((dense, self.certificate.for_loss(loss)))
    }
}

/// A matrix with a part of the mean of its diagonal added to the diagonal.
fn with_ridge(mut x: Mat<f64>, share: f64) -> Mat<f64> {
    let n = x.nrows();
    let ridge = share * (0..n).map(|i| x[(i, i)]).sum::<f64>() / n as f64;
    (0..n).for_each(|i| x[(i, i)] += ridge);
    x
}

impl Optimum {
    /// The matrix for several participations. Where step sizes are zero or differ much, of some values of `μ` and some ridges the one
    /// whose matrix has the least loss in single precision.
    fn dense_of_phases(&self, workload: &Workload, tolerance: f64) -> Result<form::Dense> {
        let oracle = DenseOracle::new(dense_matrix(workload)?);
        let rough = !workload.is_invertible() || workload.smallest_rate() < ROUGH;
        let unit = (self.certificate.lower_bound * self.dual.v().iter().sum::<f64>()).sqrt()
            / workload.steps() as f64;
        let more = REGULAR.iter().map(|share| share * unit).filter(|mu| rough && *mu > self.mu);
        let mut made: Vec<Result<Mat<f64>>> =
            std::iter::once(self.mu).chain(more).map(|mu| oracle.primal_with(&self.dual, mu)).collect();
        if rough {
            made.push(DenseOracle::new(workload.design_matrix()).primal(&self.dual, tolerance));
            for share in RIDGES {
                made.push(oracle.primal_with(&self.dual, self.mu).map(|x| with_ridge(x, share)));
            }
        }
        let mut forms: Vec<Result<form::Dense>> =
            made.into_iter().map(|x| form::Dense::from_primal(x?.as_ref())).collect();
        if forms.len() == 1 {
            return forms.remove(0);
        }
        let deployed = |form: &form::Dense| -> Result<f64> {
            let form = form.rounded()?;
            let gamma_sq = self.participation.sensitivity(&form)?.gamma.powi(2);
            Ok(gamma_sq * form.decoder_row_norms_sq(workload).iter().sum::<f64>())
        };
        let loss = |form: &Result<form::Dense>| match form {
            Ok(form) => deployed(form).unwrap_or(f64::INFINITY),
            Err(_) => f64::INFINITY,
        };
        let losses: Vec<f64> = forms.iter().map(loss).collect();
        let best = (0..forms.len()).min_by(|a, b| losses[*a].total_cmp(&losses[*b])).unwrap_or(0);
        forms.swap_remove(best)
    }
}

#[cfg(test)]
mod tests;
