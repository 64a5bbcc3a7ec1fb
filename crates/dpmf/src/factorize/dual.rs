//! The outer loop: a fixed point in the dual point `D`, stopped by a certificate.
//!
//! For any `D = ⊕_p D_p`, `D_p = v_p R_p` with ones on the diagonal of `R_p`, with `X = X(D)`, `φ_p = ⟨X_p, D_p⟩` and
//! `x̄ = Σ φ_p / Σ v_p`,
//!
//! - `X / max_p Σ|X_p|` is feasible, with loss `max_p Σ|X_p| · Σ φ_p`;
//! - no factorization has a loss below `(Σ φ_p)² / Σ v_p`, the paper's dual bound at its best scale of `v`: `R_p` is the Gram
//!   matrix of one way to take part, so `Σ φ_p = tr(XD) ≤ γ² Σ v_p` for every feasible `X`.
//!
//! Their ratio is `max_p Σ|X_p| / x̄`, so the gap closes where the sums of all blocks become equal and nothing is left for
//! other directions to gain: `X_p R_p = Λ_p R_p` with `Λ_p` diagonal. One participation is the case of blocks of one number,
//! `φ_i = v_i X_ii`. The loop never sees a matrix: an [`Oracle`] turns `D` into the blocks of `X`. Nothing here is a proof: the
//! bound is proved once, at the point that is returned, by [`lower_bound_at`](crate::factorize::lower_bound_at).

use crate::error::{Error, Result};
use crate::factorize::anderson::Anderson;
use crate::factorize::point::Dual;
use crate::linalg::udu::check_weights;
use serde::{Deserialize, Serialize};
use std::ops::ControlFlow;
use std::time::Instant;

/// Evaluates the blocks of `X(D) = Aᵀ(A D Aᵀ)^{-1/2}A`.
pub trait Oracle {
    /// Number of steps `n`.
    fn steps(&self) -> usize;

    /// The blocks of `X(D)`, with a relative error near `tolerance` or the best that f64 allows.
    fn blocks(&mut self, dual: &Dual, tolerance: f64) -> Result<Blocks>;

    /// `diag X(v)` for positive `v`: [`Oracle::blocks`] for one participation.
    fn diagonal(&mut self, v: &[f64], tolerance: f64) -> Result<Blocks> {
        check_weights(self.steps(), v)?;
        self.blocks(&Dual::single(v.to_vec())?, tolerance)
    }
}

/// The blocks `X_p` of `X(D)`, and how far they are believed to be off.
#[derive(Clone, Debug, PartialEq)]
pub struct Blocks {
    /// Row after row, `K` numbers each: entry `l` of row `i` is `X_ij` with `j` the step of epoch `l` and the phase of `i`,
    /// zero past the last step. For one participation the diagonal of `X`.
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
    /// come arbitrarily close to; infinite where that was not measured.
    pub loss: f64,
    /// Lower bound on the loss of every factorization.
    pub lower_bound: f64,
    /// `loss / lower_bound − 1`.
    pub gap: f64,
    /// Evaluations of `X(D)` spent.
    pub iterations: usize,
}

impl Certificate {
    /// Compares a loss with a lower bound.
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

/// The work that a [`Progress`] reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stage {
    /// The optimum is solved for.
    Solving,
    /// A mechanism of few coefficients is fitted.
    Fitting,
}

/// One evaluation, as reported to the caller.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Progress {
    /// What is being done.
    pub stage: Stage,
    /// The share of the pass at hand that is done, where there is one to measure.
    pub share: Option<f64>,
    /// Evaluations so far, of this stage.
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

/// Called after every evaluation, and some times a second within a long one; `Break` stops the solver with [`Error::Interrupted`].
pub type Observer<'a> = &'a mut dyn FnMut(&Progress) -> ControlFlow<()>;

/// A dual iterate, and the gap there.
#[derive(Clone, Debug)]
pub struct DualSolution {
    /// The dual point.
    pub dual: Dual,
    /// `μ` of the factorization at hand, `X(D) + μ ⊕_p D_p⁻¹`.
    pub mu: f64,
    /// Its blocks, as in [`Blocks::x`].
    pub x: Vec<f64>,
    /// The largest change by any user, squared: `max_p Σ|X_p|`.
    pub largest: f64,
    /// Its loss over that, raised by the error that the oracle expects of itself.
    pub loss: f64,
    /// The dual bound there: an estimate, not a proof.
    pub lower_bound: f64,
    /// The oracle's estimate of its own error.
    pub relative_error: f64,
    /// Evaluations of `X(D)` spent.
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

/// Moves the dual point from `start` until its gap reaches the target, or gets no smaller.
///
/// `v_p ← v_p (φ_p/v_p x̄)²` and, within the blocks, `R_p ← X_p R_p X_p` scaled to ones on its diagonal: for directions `Y_p`, the
/// rows of `X_p Y_p` scaled to norm one. Both are the map `D ← X D X`, whose fixed points are the optima.
///
/// No entry of `v` falls below a twentieth of the gap times the mean: where a constraint does not bind, its `v` tends to zero,
/// and this is close enough, for all such entries together hold up so much of the gap.
///
/// Errors: [`Error::Interrupted`], and whatever the oracle reports.
///
/// Reference: Theorem 3.2 of \[DMRST22\] for the fixed point of one participation.
pub fn solve(
    oracle: &mut dyn Oracle,
    start: Dual,
    options: &Options,
    observe: Observer<'_>,
) -> Result<DualSolution> {
    check(oracle.steps(), &start, options)?;
    let clock = Instant::now();
    let mut anderson = Anderson::new();
    let mut best: Option<DualSolution> = None;
    let mut dual = Dual { v: tamed(start.v, options.gap), ..start };
    let mut gap = f64::INFINITY;
    let mut best_at = 0;
    let mut movement = options.iteration;

    for iteration in 1..=options.max_iterations {
        // The quadrature or rounding error need only be small beside the gap that is still open.
        // Any gap may be asked for, also one whose hundredth is above the cap.
        let tolerance = (1e-3 * gap).max(0.01 * options.gap).min(1e-4);
        let blocks = oracle.blocks(&dual, tolerance)?;
        let Sums { inner, mut residual, .. } = sums(&dual, &blocks.x, options);
        residual.splice(0..0, log_step(&dual.v, &inner, options));
        let coordinates = dual.coordinates();
        let mut next = match movement {
            Iteration::Anderson => anderson.step(&coordinates, &weights(&dual), &residual),
            Iteration::Relaxed | Iteration::Plain => advance(&coordinates, &residual),
        };
        let found = measured(dual, blocks, 0.0, iteration);
        let relative_error = found.relative_error;
        if best.as_ref().is_none_or(|best| found.gap() < best.gap()) {
            best = Some(found);
            best_at = iteration;
        }
        let Some(solution) = &mut best else { unreachable!("the first iterate is the best so far") };
        solution.iterations = iteration;
        gap = solution.gap();

        let seconds = clock.elapsed().as_secs_f64();
        let (loss, lower_bound) = (solution.loss, solution.lower_bound);
        let (stage, share) = (Stage::Solving, None);
        let progress = Progress { stage, share, iteration, loss, lower_bound, gap, seconds };
        if observe(&progress).is_break() {
            return Err(Error::Interrupted { iterations: iteration, gap });
        }
        solution.stopped = if gap <= options.gap {
            None
        } else if 4.0 * relative_error >= gap
            && relative_error > 0.01 * options.gap
            && (solution.dual.times() == 1 || iteration - best_at >= PATIENCE)
        {
            // Within blocks one point may be rounded badly and the next one well: only if it stays so is it the end.
            Some("the estimated rounding error is as large as the gap")
        } else if iteration == options.max_iterations {
            Some("the iterations ran out")
        } else if iteration - best_at >= 1000 {
            Some("the loss stopped falling")
        } else {
            if movement == Iteration::Anderson && iteration - best_at >= PATIENCE {
                // The map contracts even where its extrapolation goes astray.
                movement = Iteration::Relaxed;
                let Sums { inner, mut residual, .. } = sums(&solution.dual, &solution.x, options);
                residual.splice(0..0, log_step(&solution.dual.v, &inner, options));
                next = advance(&solution.dual.coordinates(), &residual);
            }
            dual = solution.dual.with_coordinates(&next);
            dual.v = tamed(dual.v, options.gap);
            continue;
        };
        return Ok(best.expect("set above"));
    }
    Err(Error::argument("maximum of iterations", options.max_iterations, "at least one is needed"))
}

/// A dual point with the blocks of `X' = X(D) + μ ⊕_p D_p⁻¹`, given those of `X(D)`, and the gap that they show.
///
/// `X' ⪰ X(D)`, so its loss before scaling is at most `Σφ`, that of `X(D)`.
pub(super) fn measured(dual: Dual, blocks: Blocks, mu: f64, iterations: usize) -> DualSolution {
    let Blocks { mut x, relative_error } = blocks;
    let inner = sums(&dual, &x, &Options::default()).inner;
    let sum_phi: f64 = dual.v.iter().zip(&inner).map(|(v, x)| v * x).sum();
    if mu > 0.0 {
        x.iter_mut().zip(dual.inverse_blocks()).for_each(|(x, inverse)| *x += mu * inverse);
    }
    let largest = dual.largest_change(&x);
    let loss = largest * sum_phi * (1.0 + relative_error).powi(2);
    let lower_bound = sum_phi * sum_phi / dual.v.iter().sum::<f64>();
    DualSolution { dual, mu, x, largest, loss, lower_bound, relative_error, iterations, stopped: None }
}

/// What a dual point makes of its blocks, phase by phase.
struct Sums {
    /// `⟨X_p, R_p⟩ = φ_p/v_p`.
    inner: Vec<f64>,
    /// The step of the directions.
    residual: Vec<f64>,
}

fn sums(dual: &Dual, x: &[f64], options: &Options) -> Sums {
    let (n, b, times) = (dual.steps, dual.separation, dual.times());
    if times == 1 {
        return Sums { inner: x.to_vec(), residual: Vec::new() };
    }
    let mut inner = vec![0.0; b];
    let mut residual = vec![0.0; n * times];
    let mut moved = vec![0.0; times * times];
    for p in 0..b {
        let rows = dual.phase(p).len();
        for (e, i) in dual.phase(p).enumerate() {
            let target = &mut moved[e * times..][..times];
            target.fill(0.0);
            for (x, j) in x[i * times..][..times].iter().zip(dual.phase(p)) {
                let y = &dual.directions[j * times..][..times];
                target.iter_mut().zip(y).for_each(|(t, y)| *t += x * y);
            }
            let y = &dual.directions[i * times..][..times];
            inner[p] += target.iter().zip(y).map(|(t, y)| t * y).sum::<f64>();
            let norm = target.iter().map(|t| t * t).sum::<f64>().sqrt();
            let plain = if options.iteration == Iteration::Plain { 1.0 } else { 0.0 };
            // A step that changes nothing, as one of size zero, keeps its direction.
            let scale = if norm > 0.0 { 1.0 / norm } else { 0.0 };
            let plain = if norm > 0.0 { plain } else { 1.0 };
            target.iter_mut().zip(y).for_each(|(t, y)| *t = *t * scale + plain * y);
        }
        triangular(&mut moved[..rows * times], times);
        for (e, i) in dual.phase(p).enumerate() {
            let row = &moved[e * times..][..times];
            let norm = row.iter().map(|t| t * t).sum::<f64>().sqrt();
            let y = &dual.directions[i * times..][..times];
            let target = &mut residual[i * times..][..times];
            target.iter_mut().zip(row.iter().zip(y)).for_each(|(r, (t, y))| *r = t / norm - y);
        }
    }
    Sums { inner, residual }
}

/// Rotates the columns of a matrix, given by rows, so that it becomes lower triangular with a positive diagonal.
fn triangular(rows: &mut [f64], width: usize) {
    for e in 0..rows.len() / width {
        for k in e + 1..width {
            let (a, b) = (rows[e * width + e], rows[e * width + k]);
            if b == 0.0 {
                continue;
            }
            let norm = a.hypot(b);
            let (c, s) = (a / norm, b / norm);
            for row in rows[e * width..].chunks_exact_mut(width) {
                let (a, b) = (row[e], row[k]);
                (row[e], row[k]) = (c * a + s * b, c * b - s * a);
            }
            rows[e * width + k] = 0.0;
        }
        if rows[e * width + e] < 0.0 {
            rows[e * width..].chunks_exact_mut(width).for_each(|row| row[e] = -row[e]);
        }
    }
}

/// Weights of the least squares of the acceleration: `v`, the metric in which the map is proved a contraction, with a floor, so
/// that the few phases with small `v` near the end of a schedule, which hold up the gap at last, are seen.
fn weights(dual: &Dual) -> Vec<f64> {
    let (b, times) = (dual.separation, dual.times());
    let floor = WEIGHT_FLOOR * dual.v.iter().sum::<f64>() / dual.v.len() as f64;
    let of_phase: Vec<f64> = dual.v.iter().map(|v| v + floor).collect();
    let of_directions = (0..dual.directions.len()).map(|at| of_phase[at / times % b] / times as f64);
    let mut weights = of_phase.clone();
    weights.extend(of_directions);
    weights
}

/// Share of the mean of `v` added to every weight.
const WEIGHT_FLOOR: f64 = 0.1;

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

fn advance(coordinates: &[f64], residual: &[f64]) -> Vec<f64> {
    coordinates.iter().zip(residual).map(|(u, f)| u + f).collect()
}

fn check(steps: usize, start: &Dual, options: &Options) -> Result<()> {
    if !(options.gap > 0.0 && options.gap.is_finite()) {
        return Err(Error::argument("gap", options.gap, "it must be positive and finite"));
    }
    if start.steps != steps {
        return Err(Error::WrongLength { name: "dual start", actual: start.steps, expected: steps });
    }
    Ok(())
}
