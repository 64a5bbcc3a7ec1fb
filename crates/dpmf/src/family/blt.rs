//! Buffered linear Toeplitz matrices: a few exponentials.

use super::observed_fit::Watched;
use super::toeplitz::Measure;
use super::{Budget, Family, Knob, bins_fit};
use crate::error::{Error, Result};
use crate::factorize::Observer;
use crate::form::state_space::{Parts, triangle};
use crate::form::{Form, StateSpace};
use crate::linalg::lbfgs::Point;
use crate::participation::Sampling;
use crate::problem::Problem;
use faer::{Mat, Side};

/// `C` Toeplitz with `c_0 = 1`, `c_k = Σ_i ω_i θ_i^{k−1}`, `ω > 0` and `0 < θ < 1`: non-negative coefficients that do not
/// increase, so that the sensitivity is that of the first steps.
///
/// Reference: McMahan, Xu, Zhang, "A hassle-free algorithm for private learning in practice", 2024.
pub(super) struct Blt;

/// Buffers where nothing is chosen, and the most that may be.
const BUFFERS: usize = 3;
const MOST: usize = 12;

/// Steps of the minimisation.
const STEPS: usize = 2000;

/// Slowest rates, relative to one over the separation, that the search starts from, and what further exponentials start with.
const STARTS: [f64; 3] = [0.3, 2.0, 10.0];
const ADDED: [f64; 5] = [0.02, 0.3, 2.0, 10.0, 50.0];

/// Weight of a further exponential at first.
const LIGHT: f64 = 0.01;

impl Family for Blt {
    fn name(&self) -> &'static str {
        "blt"
    }

    fn about(&self) -> &'static str {
        "a Toeplitz matrix of a few exponentials, as a stream"
    }

    fn knobs(&self) -> &'static [Knob] {
        &[Knob::Buffers]
    }

    fn fit(&self, problem: &Problem, budget: &Budget, observe: Observer<'_>) -> Result<Form> {
        let problem = problem.streamable()?;
        let (n, r) = (problem.steps(), budget.buffers.unwrap_or(BUFFERS));
        if r > MOST {
            return Err(Error::argument("buffers", r, "a BLT has at most 12, because more do not help"));
        }
        if let Some(goal) = problem.goal()
            && let Sampling::BallsInBins { bins } | Sampling::ReshuffledBins { bins } = goal.sampling
        {
            return Ok(Form::Blt(bins_fit::exponentials(problem, r, bins, goal, observe)?));
        }
        let lower_bound = problem.optimum(observe)?.certificate.lower_bound;
        let mut watched = Watched::new(lower_bound, observe);
        let measure = Measure::new(problem)?;
        let slowest = |start: f64| start / measure.separation as f64;
        // Local minima abound: from spread rates, and from the best of fewer exponentials with one more.
        // What fewer give is kept unless more are better.
        let (mut best, mut kept) = (Vec::new(), Vec::new());
        let mut least = evaluate(&measure, n, &best).0;
        for count in 1..=r {
            let spread = STARTS.map(|start| self::start(count, slowest(start))).into_iter();
            let more = ADDED.map(|start| with_one_more(&best, slowest(start))).into_iter();
            let mut found: Option<Point> = None;
            for start in spread.chain(more) {
                let end = watched.minimise(start, STEPS, |x| evaluate(&measure, n, x))?;
                if found.as_ref().is_none_or(|found| end.value < found.value) {
                    found = Some(end);
                }
            }
            let Some(found) = found else { continue };
            if found.value < least {
                (least, kept) = (found.value, found.x.clone());
            }
            best = found.x;
        }
        let (weights, decays) = decode(&kept);
        let gamma = measure.sensitivity_sq(&series(&weights, &decays, n)).0.sqrt();
        Ok(Form::StateSpace(filter(&weights, &decays, n, gamma)?))
    }
}

/// Logarithms of weights and odds of rates, for about the square root of the prefix sum.
fn start(r: usize, slowest: f64) -> Vec<f64> {
    let slowest = slowest.clamp(1e-7, 0.3);
    let rate = |i: usize| {
        if r < 2 { slowest.sqrt() } else { 0.6 * (slowest / 0.6).powf(i as f64 / (r as f64 - 1.0)) }
    };
    let total: f64 = (0..r).map(|i| rate(i).sqrt()).sum();
    let weights = (0..r).map(|i| (0.5 * rate(i).sqrt() / total).ln());
    weights.chain((0..r).map(|i| (rate(i) / (1.0 - rate(i))).ln())).collect()
}

/// The same exponentials and a light one.
fn with_one_more(x: &[f64], rate: f64) -> Vec<f64> {
    let (weights, odds) = x.split_at(x.len() / 2);
    let rate = rate.clamp(1e-7, 0.9);
    [weights, &[LIGHT.ln()], odds, &[(rate / (1.0 - rate)).ln()]].concat()
}

/// `ω` and `θ`.
fn decode(x: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let (weights, odds) = x.split_at(x.len() / 2);
    (weights.iter().map(|x| x.exp()).collect(), odds.iter().map(|x| 1.0 / (1.0 + x.exp())).collect())
}

/// The first column of `C`.
fn series(weights: &[f64], decays: &[f64], n: usize) -> Vec<f64> {
    let mut powers = weights.to_vec();
    let mut out = vec![1.0];
    for _ in 1..n {
        out.push(powers.iter().sum());
        powers.iter_mut().zip(decays).for_each(|(power, decay)| *power *= decay);
    }
    out
}

fn evaluate(measure: &Measure<'_>, n: usize, x: &[f64]) -> (f64, Vec<f64>) {
    let (weights, decays) = decode(x);
    let r = weights.len();
    let encoder = series(&weights, &decays, n);
    // u = z − ωᵀy, y ← Θ y + u: the inverse, with its states kept.
    let (mut coloring, mut states) = (Vec::with_capacity(n), vec![0.0; r * (n + 1)]);
    for t in 0..n {
        let (now, next) = states[t * r..].split_at_mut(r);
        let u = f64::from(u8::from(t == 0)) - weights.iter().zip(&*now).map(|(w, y)| w * y).sum::<f64>();
        next.iter_mut().zip(now).zip(&decays).for_each(|((next, y), decay)| *next = decay * *y + u);
        coloring.push(u);
    }
    let (value, [by_coloring, by_encoder]) = measure.objective(&coloring, &encoder);
    let (mut by_weights, mut by_decays, mut by_states) = (vec![0.0; r], vec![0.0; r], vec![0.0; r]);
    for t in (0..n).rev() {
        let by_u = by_coloring[t] + by_states.iter().sum::<f64>();
        for i in 0..r {
            let y = states[t * r + i];
            by_decays[i] += by_states[i] * y;
            by_weights[i] -= by_u * y;
            by_states[i] = decays[i] * by_states[i] - weights[i] * by_u;
        }
    }
    for i in 0..r {
        let (mut power, mut slope) = (1.0, 0.0);
        for by in &by_encoder[1..] {
            by_weights[i] += by * power;
            by_decays[i] += by * weights[i] * slope;
            (power, slope) = (power * decays[i], slope * decays[i] + power);
        }
    }
    let by_weights = by_weights.iter().zip(&weights).map(|(by, w)| by * w);
    let by_decays = by_decays.iter().zip(&decays).map(|(by, decay)| -by * decay * (1.0 - decay));
    (value, by_weights.chain(by_decays).collect())
}

/// `γ N` as a filter whose states do not mix.
///
/// In the coordinates `√ω∘y` the transition of the inverse, `Θ − √ω√ωᵀ`, is symmetric.
fn filter(weights: &[f64], decays: &[f64], n: usize, gamma: f64) -> Result<StateSpace> {
    let r = weights.len();
    let root: Vec<f64> = weights.iter().map(|w| w.sqrt()).collect();
    let transition = Mat::from_fn(r, r, |i, j| if i == j { decays[i] } else { 0.0 } - root[i] * root[j]);
    let not_found =
        |_| Error::Numerical { what: "poles of the noise", index: 0, reason: "they did not converge" };
    let (poles, gains) = match r {
        0 => (Vec::new(), Vec::new()),
        _ => {
            let eigen = transition.self_adjoint_eigen(Side::Lower).map_err(not_found)?;
            let gain = |k: usize| (0..r).map(|i| eigen.U()[(i, k)] * root[i]).sum::<f64>();
            ((0..r).map(|k| eigen.S()[k]).collect::<Vec<f64>>(), (0..r).map(gain).collect())
        }
    };
    let mut increment = vec![0.0; triangle(r)];
    for k in 0..r {
        increment[k * r - k * k.saturating_sub(1) / 2] = poles[k] - 1.0;
    }
    let output: Vec<f64> = gains.iter().map(|g| -gamma * g).collect();
    StateSpace::from_parts(
        r,
        Parts {
            direct: vec![gamma; n],
            output: output.repeat(n),
            input: gains.repeat(n),
            increment: increment.repeat(n),
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::form::Representation;
    use crate::participation::Participation;
    use crate::workload::{Optimizer, Workload};

    #[test]
    fn the_filter_is_the_inverse_of_the_exponentials() {
        let (weights, decays) = ([0.3, 0.1, 0.05], [0.4, 0.8, 0.97]);
        let filter = filter(&weights, &decays, 20, 2.0).unwrap();
        let encoder = filter.encoder();
        for (k, c) in series(&weights, &decays, 20).into_iter().enumerate() {
            assert!((encoder[(k, 0)] - 0.5 * c).abs() < 1e-14);
            assert!((encoder[(19, 19 - k)] - 0.5 * c).abs() < 1e-14);
        }
    }

    #[test]
    fn gradients_are_those_of_differences() {
        let momentum = Optimizer { momentum: 0.5, ..Default::default() };
        let rates = (0..13).map(|t| 1.0 + 0.1 * f64::from(t)).collect();
        for workload in [Workload::prefix_sum(13).unwrap(), Workload::sgd(rates, momentum).unwrap()] {
            let problem = Problem::new(workload, Participation::Epochs { times: 3 }).unwrap();
            let measure = Measure::new(&problem).unwrap();
            let x = start(2, 0.1);
            let (_, gradient) = evaluate(&measure, 13, &x);
            for (i, slope) in gradient.iter().enumerate() {
                let moved = |step: f64| {
                    let mut x = x.clone();
                    x[i] += step;
                    evaluate(&measure, 13, &x).0
                };
                let difference = (moved(1e-5) - moved(-1e-5)) / 2e-5;
                assert!((difference - slope).abs() < 1e-8, "{i}: {difference} {slope}");
            }
        }
    }
}
