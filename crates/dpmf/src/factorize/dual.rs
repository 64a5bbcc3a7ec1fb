//! The outer loop: a fixed point in the dual variable `v`, stopped by a certificate.
//!
//! For any `v > 0`, with `x = diag X(v)` and `x̄ = Σ v_i x_i / Σ v_i`,
//!
//! - `X(v) / max x` is feasible, with loss `max x · Σ v_i x_i`;
//! - no factorization has a loss below `(Σ v_i x_i)² / Σ v_i`, the paper's dual bound at its best scale of `v`.
//!
//! Their ratio is `max x / x̄`, so the gap closes where `x` becomes constant. The loop never sees a matrix: an
//! [`Oracle`] turns `v` into `x`. Nothing here is a proof: the bound is proved once, at the `v` that is returned, by
//! [`lower_bound_at`](crate::factorize::lower_bound_at).

use crate::error::{Error, Result};
use crate::factorize::anderson::Anderson;
use serde::{Deserialize, Serialize};
use std::ops::ControlFlow;
use std::time::Instant;

/// Evaluates `diag X(v)`, where `X(v) = D^{-1/2} (D^{1/2} AᵀA D^{1/2})^{1/2} D^{-1/2}` and `D = diag(v)`.
pub trait Oracle {
    /// Number of steps `n`, the length of `v`.
    fn steps(&self) -> usize;

    /// `diag X(v)` for positive `v`, with a relative error near `tolerance` or the best that f64 allows.
    fn diagonal(&mut self, v: &[f64], tolerance: f64) -> Result<Diagonal>;
}

/// `diag X(v)`, and how far it is believed to be off.
#[derive(Clone, Debug, PartialEq)]
pub struct Diagonal {
    /// The diagonal.
    pub x: Vec<f64>,
    /// Relative error of the entries, estimated: by it the iteration knows when rounding stops it. No certificate
    /// rests on it.
    pub relative_error: f64,
}

/// Proof of near-optimality that travels with a factorization.
///
/// Guarantee: no factorization of the workload has a loss below `lower_bound`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Certificate {
    /// Total squared loss `γ²‖B‖_F²` of the factorization at hand; of an optimum in its dual form, what factorizations
    /// come arbitrarily close to.
    pub loss: f64,
    /// Lower bound on the loss of every factorization.
    pub lower_bound: f64,
    /// `loss / lower_bound − 1`.
    pub gap: f64,
    /// Evaluations of `diag X(v)` spent.
    pub iterations: usize,
}

impl Certificate {
    /// Puts a loss beside a lower bound.
    pub fn new(loss: f64, lower_bound: f64, iterations: usize) -> Self {
        Self { loss, lower_bound, gap: loss / lower_bound - 1.0, iterations }
    }

    /// The certificate of another factorization of the same workload, with this lower bound.
    pub fn for_loss(&self, loss: f64) -> Self {
        Self { loss, gap: loss / self.lower_bound - 1.0, ..*self }
    }

    /// `√loss / √lower_bound`.
    pub fn ratio_to_bound(&self) -> f64 {
        (self.loss / self.lower_bound).sqrt()
    }
}

/// How `v` moves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Iteration {
    /// `v ← v∘x²` with Anderson acceleration in `log v`.
    #[default]
    Anderson,
    /// `v ← v∘x²`. The derivative of the plain map has its spectrum in `[1/2, 1)`, so doubling the step in
    /// `log v` still contracts, twice as fast.
    Relaxed,
    /// `v ← v∘x`, the paper's `v ← φ(v)`.
    Plain,
}

/// When to stop, and how to move.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Target for the certified relative gap.
    pub gap: f64,
    /// How `v` moves.
    pub iteration: Iteration,
    /// Evaluations after which to give up.
    pub max_iterations: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self { gap: 1e-6, iteration: Iteration::default(), max_iterations: 20_000 }
    }
}

/// One evaluation, as told to the caller.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Progress {
    /// Evaluations so far.
    pub iteration: usize,
    /// Loss of the best iterate so far.
    pub loss: f64,
    /// Best lower bound so far.
    pub lower_bound: f64,
    /// `loss / lower_bound − 1`.
    pub gap: f64,
    /// Time since the start.
    pub seconds: f64,
}

/// Called after every evaluation; `Break` stops the solver with [`Error::Interrupted`].
pub type Observer<'a> = &'a mut dyn FnMut(&Progress) -> ControlFlow<()>;

/// A dual iterate, and the gap there.
#[derive(Clone, Debug)]
pub struct DualSolution {
    /// The dual variable.
    pub v: Vec<f64>,
    /// `diag X(v)`.
    pub x: Vec<f64>,
    /// Loss of `X(v) / max x`, raised by the error that the oracle expects of itself.
    pub loss: f64,
    /// The dual bound at `v`: an estimate, not a proof.
    pub lower_bound: f64,
    /// The oracle's estimate of its own error.
    pub relative_error: f64,
    /// Evaluations of `diag X(v)` spent.
    pub iterations: usize,
    /// Why it stopped, if not because the target was reached.
    pub stopped: Option<&'static str>,
}

impl DualSolution {
    /// `loss / lower_bound − 1`, with the bound lowered by that error.
    pub fn gap(&self) -> f64 {
        self.loss / (self.lower_bound * (1.0 - self.relative_error).max(0.0).powi(2)) - 1.0
    }
}

/// Solves `diag X(v) = 1` from `start` until the gap at one `v` is as small as asked for, or as it gets.
///
/// No entry of `v` falls below a twentieth of the gap times the mean: where a constraint does not bind, its `v` tends to zero,
/// and this is close enough, for all such entries together hold up so much of the gap.
///
/// Errors: [`Error::Interrupted`], and whatever the oracle reports.
///
/// Reference: Theorem 3.2 of \[DMRST22\] for the fixed point.
pub fn solve(
    oracle: &mut dyn Oracle,
    start: Vec<f64>,
    options: &Options,
    observe: Observer<'_>,
) -> Result<DualSolution> {
    check(oracle.steps(), &start, options)?;
    let clock = Instant::now();
    let mut anderson = Anderson::new();
    let mut best: Option<DualSolution> = None;
    let mut v = tamed(start, options.gap);
    let mut gap = f64::INFINITY;
    let mut best_at = 0;
    let mut movement = options.iteration;

    for iteration in 1..=options.max_iterations {
        // The quadrature or rounding error need only be small beside the gap that is still open.
        let tolerance = (1e-3 * gap).clamp(0.01 * options.gap, 1e-4);
        let Diagonal { x, relative_error } = oracle.diagonal(&v, tolerance)?;
        let sum_v: f64 = v.iter().sum();
        let sum_phi: f64 = v.iter().zip(&x).map(|(v, x)| v * x).sum();
        let max_x = x.iter().copied().fold(0.0, f64::max);

        let loss = max_x * sum_phi * (1.0 + relative_error).powi(2);
        let lower_bound = sum_phi * sum_phi / sum_v;
        let residual = log_step(&v, &x, options);
        let mut next = match movement {
            Iteration::Anderson => anderson.step(&v, &residual),
            Iteration::Relaxed | Iteration::Plain => advance(&v, &residual),
        };
        let found =
            DualSolution { v, x, loss, lower_bound, relative_error, iterations: iteration, stopped: None };
        if best.as_ref().is_none_or(|best| found.gap() < best.gap()) {
            best = Some(found);
            best_at = iteration;
        }
        let Some(solution) = &mut best else { unreachable!("the first iterate is the best so far") };
        solution.iterations = iteration;
        gap = solution.gap();

        let seconds = clock.elapsed().as_secs_f64();
        let (loss, lower_bound) = (solution.loss, solution.lower_bound);
        let progress = Progress { iteration, loss, lower_bound, gap, seconds };
        if observe(&progress).is_break() {
            return Err(Error::Interrupted { iterations: iteration, gap });
        }
        solution.stopped = if gap <= options.gap {
            None
        } else if 4.0 * relative_error >= gap && relative_error > 0.01 * options.gap {
            Some("the rest is within the rounding of 64-bit arithmetic")
        } else if iteration == options.max_iterations {
            Some("the iterations ran out")
        } else if iteration - best_at >= 1000 {
            Some("the loss stopped falling")
        } else {
            if movement == Iteration::Anderson && iteration - best_at >= PATIENCE {
                // The map contracts even where its extrapolation goes astray.
                movement = Iteration::Relaxed;
                next = advance(&solution.v, &log_step(&solution.v, &solution.x, options));
            }
            v = tamed(next, options.gap);
            continue;
        };
        return Ok(best.expect("set above"));
    }
    Err(Error::argument("maximum of iterations", options.max_iterations, "at least one is needed"))
}

/// Evaluations without progress after which acceleration is given up.
const PATIENCE: usize = 100;

/// Share of the gap that entries of `v` on their floor may hold up.
const FLOOR: f64 = 0.05;

/// Below this no entry of `v` falls.
fn floor(v: &[f64], gap: f64) -> f64 {
    FLOOR * gap.min(1.0) * v.iter().sum::<f64>() / v.len() as f64
}

/// `v` with the floor under its entries, and of a size that products of it cannot leave the range of f64.
fn tamed(mut v: Vec<f64>, gap: f64) -> Vec<f64> {
    let floor = floor(&v, gap);
    let exponent = libm::ilogb(floor / gap);
    let unit = if exponent.abs() > 64 { libm::scalbn(1.0, -exponent) } else { 1.0 };
    v.iter_mut().for_each(|v| *v = v.max(floor) * unit);
    v
}

/// Step in `log v`, free of the scale of `x`, that ends on the floor at the lowest.
fn log_step(v: &[f64], x: &[f64], options: &Options) -> Vec<f64> {
    let factor = if options.iteration == Iteration::Plain { 1.0 } else { 2.0 };
    let mean = v.iter().zip(x).map(|(v, x)| v * x).sum::<f64>() / v.iter().sum::<f64>();
    let floor = floor(v, options.gap);
    v.iter().zip(x).map(|(v, x)| (factor * (x / mean).ln()).max((floor / v).ln())).collect()
}

fn advance(v: &[f64], residual: &[f64]) -> Vec<f64> {
    v.iter().zip(residual).map(|(v, f)| v * f.exp()).collect()
}

fn check(steps: usize, start: &[f64], options: &Options) -> Result<()> {
    if !(options.gap > 0.0 && options.gap.is_finite()) {
        return Err(Error::argument("gap", options.gap, "it must be positive and finite"));
    }
    if start.len() != steps {
        return Err(Error::WrongLength { name: "dual start", actual: start.len(), expected: steps });
    }
    match start.iter().position(|v| !(v.is_finite() && *v > 0.0)) {
        Some(index) => Err(Error::InvalidEntry {
            name: "dual start",
            index,
            value: start[index],
            rule: "it must be positive and finite",
        }),
        None => Ok(()),
    }
}
