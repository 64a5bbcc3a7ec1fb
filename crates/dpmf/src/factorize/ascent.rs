//! An interior-point method for the dual of several participations: it finishes what the fixed point is slow to find.
//!
//! The optimum maximises the concave `2 tr(A D Aᵀ)^{1/2} − Σ_p v_p` over positive definite blocks `D_p` with the constant diagonal
//! `v_p`. Newton's method maximises `h(D) = 2 tr(A D Aᵀ)^{1/2} − Σ_p v_p + μ Σ_p log det D_p` for a falling `μ`. The gradient of `h` is
//! `X' = X(D) + μ ⊕_p D_p⁻¹`, less one by `v_p`. Where it vanishes, the blocks of `X'` are diagonal with traces of 1, so the
//! sensitivity of `X'` is 1; and as `X' ⪰ X(D)` its loss is at most `Σφ = tr(X(D) D) = Σv − μn`. The gap there is `μn/Σφ`, also
//! where `A` is singular, as it is with step sizes of zero, and the best `D` with it. At any other point, `max_p Σ|X'_p| · Σφ` is a loss
//! that factorizations come arbitrarily close to.
//!
//! With `D = G Gᵀ`, `A G = U Σ Vᵀ` and `W = G⁻ᵀV`, `X = W Σ Wᵀ` moves by `dX = −W(κ∘(Wᵀ dD W))Wᵀ`, `κ_ab = σ_aσ_b/(σ_a + σ_b)`. That
//! matrix is positive semidefinite: with `κ = Σ_q u_q u_qᵀ` and `S_q = W diag(u_q) Wᵀ`, the derivative of `X_ij` by `D_kl` is
//! `−Σ_q (S_q)_ik (S_q)_jl`. That of `μD⁻¹` is one more such term, `S = √μ D⁻¹`.

use crate::error::{Error, Result};
use crate::factorize::dense::{Decomposed, Dense};
use crate::factorize::dual::{DualSolution, Observer, Options, Progress, Stage, measured};
use crate::factorize::point::Dual;
use faer::linalg::solvers::Solve;
use faer::{Mat, Side};
use rayon::prelude::*;
use std::time::Instant;

/// Most steps of Newton's method, entries of `D` that move, and numbers in all `S_q`.
const STEPS: usize = 100;
const ENTRIES: usize = 1900;
const NUMBERS: usize = 1 << 24;

/// `μ` at first, as a part of the mean singular value; what is left of it at each stage; and at last, as a part of the gap that is
/// asked for.
const FIRST: f64 = 0.1;
const LEFT: f64 = 0.1;
const LAST: f64 = 0.1;

/// A stage ends where a step promises to raise `h` by less than this part of `μn`.
const CENTRED: f64 = 0.1;

/// Share of the identity that the first point is mixed with, and of the mean that no `v` is below there.
const INTERIOR: f64 = 0.2;
const LEAST: f64 = 1e-3;

/// Share of the largest eigenvalue of `κ`, scaled to the diagonal ½, that counts.
const COUNTS: f64 = 1e-12;

/// Parts of its diagonal that are added to the matrix of the equations until it has a factor.
const RIDGES: [f64; 5] = [1e-15, 1e-13, 1e-11, 1e-9, 1e-7];

/// Share of the increase that the slope promises, which a step must reach; and the shortest step.
const SUFFICIENT: f64 = 1e-4;
const SHORTEST: f64 = 1e-8;

/// How much farther along a step blocks must still be positive definite.
const BEYOND: f64 = 1.1;

/// Parts of `h` by which rounding may move it, and below which no slope leads anywhere.
const ROUNDING: f64 = 1e-14;
const FLAT: f64 = 1e-22;

/// Whether a dual point is small enough for this.
pub(super) fn is_affordable(dual: &Dual) -> bool {
    let n = dual.steps();
    let pairs: usize = (0..dual.separation()).map(|p| dual.phase(p).len()).map(|k| k * (k - 1) / 2).sum();
    dual.times() > 1 && dual.separation() + pairs <= ENTRIES && n * n * n.min(64) <= NUMBERS
}

/// Continues from a dual solution until its gap reaches the target, or gets no smaller. What is returned has no larger gap.
///
/// Cost: a singular value decomposition and a Cholesky factor of as many rows as entries of `D` move, each step.
///
/// Errors: [`Error::Interrupted`].
pub(super) fn ascend(
    oracle: &Dense,
    found: DualSolution,
    options: &Options,
    observe: Observer<'_>,
) -> Result<DualSolution> {
    let clock = Instant::now();
    let places = Places::new(&found.dual);
    let before = found.iterations;
    let n = found.dual.steps() as f64;
    let mut best = found;
    let Some(mut point) = Point::first(oracle, &places, &best.dual) else { return Ok(best) };
    let mut steps = 0;
    let reason = loop {
        steps += 1;
        let now =
            measured(point.dual.clone(), point.parts.blocks(oracle, &point.dual)?, point.mu, before + steps);
        if now.gap() < best.gap() {
            best = now;
        }
        best.iterations = before + steps;
        let DualSolution { loss, lower_bound, iterations: iteration, .. } = best;
        let (gap, seconds) = (best.gap(), clock.elapsed().as_secs_f64());
        let (stage, share) = (Stage::Solving, None);
        if observe(&Progress { stage, share, iteration, loss, lower_bound, gap, seconds }).is_break() {
            return Err(Error::Interrupted { iterations: iteration, gap });
        }
        if gap <= options.gap {
            best.stopped = None;
            return Ok(best);
        }
        if steps >= STEPS.min(options.max_iterations) {
            break "the iterations ran out";
        }
        let last = LAST * options.gap.min(1.0) * point.parts.sigma.iter().sum::<f64>() / n;
        let step = point.direction(&places);
        let moved = step.as_ref().and_then(|(step, slope)| point.searched(oracle, &places, step, *slope));
        let slope = step.map_or(0.0, |(_, slope)| slope);
        let stuck = moved.is_none();
        point = moved.unwrap_or(point);
        if point.mu <= last && (stuck || slope < FLAT * point.value.abs()) {
            break "no step raises the bound further in 64-bit arithmetic";
        }
        if stuck || slope < CENTRED * point.mu * n {
            let mu = (LEFT * point.mu).max(last).min(point.mu);
            point = point.with_mu(mu);
        }
    };
    best.stopped = Some(reason);
    Ok(best)
}

/// What moves: `v_p` of every phase, then the pairs of steps `i > j` of one phase.
struct Places {
    phases: Vec<Vec<usize>>,
    pairs: Vec<(usize, usize)>,
}

impl Places {
    fn new(dual: &Dual) -> Self {
        let phases: Vec<Vec<usize>> = (0..dual.separation()).map(|p| dual.phase(p).collect()).collect();
        let of = |steps: &Vec<usize>| {
            let below = |e: usize| (0..e).map(move |f| (e, f));
            (0..steps.len()).flat_map(below).map(|(e, f)| (steps[e], steps[f])).collect::<Vec<_>>()
        };
        let pairs = phases.iter().flat_map(of).collect();
        Self { phases, pairs }
    }

    /// A dual point by its `v` and the entries of its pairs, or nothing where it is not positive definite.
    fn dual(&self, like: &Dual, v: Vec<f64>, pairs: &[f64]) -> Option<Dual> {
        let times = like.times();
        let mut directions = vec![0.0; like.steps * times];
        let mut pairs = pairs.iter();
        for (steps, v) in self.phases.iter().zip(&v) {
            if !(*v > 0.0 && v.is_finite()) {
                return None;
            }
            for (e, &i) in steps.iter().enumerate() {
                // Row e of the Cholesky factor of D_p/v_p.
                let mut own = 1.0;
                let mut row = vec![0.0; times];
                for (f, &j) in steps[..e].iter().enumerate() {
                    let before = &directions[j * times..][..times];
                    let known: f64 = row[..f].iter().zip(before).map(|(x, y)| x * y).sum();
                    row[f] = (pairs.next()? / v - known) / before[f];
                    own -= row[f] * row[f];
                }
                if !(own > 0.0 && own.is_finite()) {
                    return None;
                }
                row[e] = own.sqrt();
                directions[i * times..][..times].copy_from_slice(&row);
            }
        }
        Dual::new(like.steps, like.separation, v, directions).ok()
    }
}

/// A dual point, decomposed, with `μ` and `h` there.
struct Point {
    dual: Dual,
    parts: Decomposed,
    mu: f64,
    value: f64,
}

impl Point {
    /// Well inside, at the best scale.
    fn first(oracle: &Dense, places: &Places, dual: &Dual) -> Option<Self> {
        let least = LEAST * dual.v.iter().sum::<f64>() / dual.v.len() as f64;
        let mut v: Vec<f64> = dual.v.iter().map(|v| v.max(least)).collect();
        let b = dual.separation;
        let pair =
            |v: &[f64], (i, j): (usize, usize)| (1.0 - INTERIOR) * dual.at(i, j) / dual.v[i % b] * v[i % b];
        let pairs: Vec<f64> = places.pairs.iter().map(|at| pair(&v, *at)).collect();
        let inside = places.dual(dual, v.clone(), &pairs)?;
        let sum: f64 = oracle.decomposed(&inside).ok()?.sigma.iter().sum();
        // 2√c Σσ − cΣv is largest for √c = Σσ/Σv.
        let root = sum / v.iter().sum::<f64>();
        v.iter_mut().for_each(|v| *v *= root * root);
        let scaled = Dual { v, ..inside };
        Self::new(oracle, scaled, FIRST * sum * root / dual.steps as f64)
    }

    fn new(oracle: &Dense, dual: Dual, mu: f64) -> Option<Self> {
        let parts = oracle.decomposed(&dual).ok()?;
        let point = Self { dual, parts, mu, value: 0.0 }.with_mu(mu);
        (point.value.is_finite() && mu > 0.0).then_some(point)
    }

    fn with_mu(self, mu: f64) -> Self {
        let Self { dual, parts, .. } = self;
        let (b, times) = (dual.separation, dual.times());
        let own = |i: usize| dual.directions[i * times + i / b].abs();
        let log_det: f64 = (0..dual.steps).map(|i| dual.v[i % b].ln() + 2.0 * own(i).ln()).sum();
        let value = 2.0 * parts.sigma.iter().sum::<f64>() - dual.v.iter().sum::<f64>() + mu * log_det;
        Self { dual, parts, mu, value }
    }

    /// The first point along a step, halved from its whole length on, where `h` is enough larger.
    fn searched(&self, oracle: &Dense, places: &Places, step: &[f64], slope: f64) -> Option<Self> {
        let b = self.dual.separation;
        let mut length = 1.0;
        let at = |length: f64| {
            let v = self.dual.v.iter().zip(step).map(|(v, step)| v + length * step).collect();
            let pairs = places.pairs.iter().zip(&step[b..]);
            let pairs: Vec<f64> = pairs.map(|((i, j), step)| self.dual.at(*i, *j) + length * step).collect();
            places.dual(&self.dual, v, &pairs)
        };
        while length > SHORTEST {
            // Not too near the boundary: from there Newton's method only doubles its distance in a step.
            let next = at(BEYOND * length).and_then(|_| Self::new(oracle, at(length)?, self.mu));
            let enough = self.value + SUFFICIENT * length * slope - ROUNDING * self.value.abs();
            if let Some(next) = next
                && next.value >= enough
            {
                return Some(next);
            }
            length *= 0.5;
        }
        None
    }

    /// Newton's step, and the slope of `h` along it.
    fn direction(&self, places: &Places) -> Option<(Vec<f64>, f64)> {
        let (n, b, times) = (self.dual.steps, self.dual.separation, self.dual.times());
        let w = self.parts.directions(&self.dual);
        let inverse = self.dual.inverse_blocks();
        let sigma = &self.parts.sigma;
        let x = |i: usize, j: usize| {
            (0..n).map(|a| sigma[a] * w[(i, a)] * w[(j, a)]).sum::<f64>()
                + self.mu * inverse[i * times + j / b]
        };
        let trace = |steps: &Vec<usize>| steps.iter().map(|i| x(*i, *i)).sum::<f64>();
        let mut gradient: Vec<f64> = places.phases.iter().map(|steps| trace(steps) - 1.0).collect();
        gradient.extend(places.pairs.iter().map(|(i, j)| 2.0 * x(*i, *j)));

        let roots: Vec<f64> = sigma.iter().map(|s| s.sqrt()).collect();
        let kernel = Mat::from_fn(n, n, |a, c| match sigma[a] + sigma[c] {
            sum if sum > 0.0 => roots[a] * roots[c] / sum,
            _ => 0.5,
        });
        let eigen = kernel.self_adjoint_eigen(Side::Lower).ok()?;
        let floor = COUNTS * eigen.S()[n - 1];
        let kept: Vec<usize> = (0..n).filter(|q| eigen.S()[*q] > floor).collect();
        let parts: Vec<Mat<f64>> = kept
            .par_iter()
            .map(|q| {
                let weight = |a: usize| eigen.S()[*q].sqrt() * eigen.U()[(a, *q)] * roots[a];
                let scaled = Mat::from_fn(n, n, |i, a| w[(i, a)] * weight(a));
                &scaled * w.transpose()
            })
            .collect();
        let count = parts.len() + 1;
        let mut s = vec![0.0; n * n * count];
        s.par_chunks_exact_mut(count).enumerate().for_each(|(at, s)| {
            let (i, k) = (at / n, at % n);
            s.iter_mut().zip(&parts).for_each(|(s, part)| *s = part[(i, k)]);
            if i % b == k % b {
                s[count - 1] = self.mu.sqrt() * inverse[i * times + k / b];
            }
        });
        let of = |i: usize, k: usize| &s[(i * n + k) * count..][..count];
        let entry = |r: usize, c: usize| match (r.checked_sub(b), c.checked_sub(b)) {
            (Some(r), Some(c)) => {
                let ((i, j), (k, l)) = (places.pairs[r], places.pairs[c]);
                2.0 * (dot(of(i, k), of(j, l)) + dot(of(i, l), of(j, k)))
            }
            (Some(r), None) => {
                let (i, j) = places.pairs[r];
                2.0 * places.phases[c].iter().map(|k| dot(of(i, *k), of(j, *k))).sum::<f64>()
            }
            _ => {
                let of_step =
                    |i: &usize| places.phases[c].iter().map(|k| dot(of(*i, *k), of(*i, *k))).sum::<f64>();
                places.phases[r].iter().map(of_step).sum()
            }
        };
        // The lower triangle, by rows.
        let m = gradient.len();
        let rows: Vec<Vec<f64>> =
            (0..m).into_par_iter().map(|r| (0..=r).map(|c| entry(r, c)).collect()).collect();
        let scale: Vec<f64> = (0..m).map(|r| 1.0 / rows[r][r].sqrt()).collect();
        let right = Mat::from_fn(m, 1, |r, _| scale[r] * gradient[r]);
        let step = RIDGES.into_iter().find_map(|ridge| {
            let scaled = Mat::from_fn(m, m, |r, c| match r >= c {
                true => rows[r][c] * scale[r] * scale[c] + if r == c { ridge } else { 0.0 },
                false => 0.0,
            });
            let solved = scaled.llt(Side::Lower).ok()?.solve(&right);
            let step: Vec<f64> = (0..m).map(|r| scale[r] * solved[(r, 0)]).collect();
            step.iter().all(|x| x.is_finite()).then_some(step)
        })?;
        let slope = dot(&gradient, &step);
        (slope > 0.0).then_some((step, slope))
    }
}

fn dot(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}
