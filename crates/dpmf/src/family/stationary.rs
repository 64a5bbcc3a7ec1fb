//! Encoders of a few exponentials for many bins: fits of few numbers.
//!
//! Where there are thousands of bins, most of them have the same neighbours, and scales of single steps do not pay for their fit:
//! `C = diag(α) T diag(β)` with columns of `T diag(β)` of the same norm. With `H(d)` the correlation of the posterior of two bins
//! at a distance, `⟨H, G⟩` is about `F = Σ_d H(d) g(d)`, `g` the autocorrelation of the first column of `T`, for all rows alike, and
//! with `E_t = ‖A diag(1/β) T⁻¹e_t‖²` the best `α_t² = √E_t` leave `√F Σ √E_t`. That is a function of the exponentials alone.

use super::bins_fit::{product, quadratic, transposed_product};
use crate::accounting::allocation::Boundary;
use crate::error::{Error, Result};
use crate::factorize::{Observer, Progress, Stage};
use crate::form::{Blt, Form, Representation};
use crate::linalg::lbfgs::{Lbfgs, Point};
use crate::problem::{Goal, Problem};
use crate::sensitivity;
use rustfft::FftPlanner;
use rustfft::num_complex::Complex;
use std::time::Instant;

/// Looks at the posterior at most, steps of the minimisation between two of them, and curvatures it remembers.
const LOOKS: usize = 5;
const STEPS: usize = 25;
const MEMORY: usize = 8;

/// Change of a variable that slopes are measured by.
const NUDGE: f64 = 1e-5;

/// Decrease of the logarithm of the error below which looking again is not worth it.
const SETTLED: f64 = 2e-3;

/// Random samples behind one look at the posterior.
fn samples(steps: usize) -> usize {
    ((1_usize << 24) / steps).clamp(1 << 8, 1 << 11)
}

/// The best encoder of `order` exponentials.
///
/// Cost: O(n(r + w)³) an evaluation, some hundreds of them.
/// Errors: those of the accountant; [`Error::Interrupted`].
pub(super) fn exponentials(
    problem: &Problem,
    order: usize,
    bins: usize,
    goal: Goal,
    observe: Observer<'_>,
) -> Result<Blt> {
    let fit = Fit::new(problem, order, bins)?;
    let clock = Instant::now();
    let (mut x, mut iterations) = (fit.start(), 0);
    let mut best: Option<(f64, Blt)> = None;
    let (mut last, mut near) = (f64::INFINITY, None);
    for look in 0..LOOKS {
        let blt = fit.blt(&x)?;
        let allocation = sensitivity::allocation(&blt, bins, 1.0)?;
        let seen = allocation.boundary(goal.epsilon, goal.delta, samples(fit.steps()), near);
        let Boundary { log_sigma, spectrum } = match seen {
            Ok(boundary) => boundary,
            Err(error) if best.is_none() => return Err(error),
            Err(_) => break,
        };
        near = Some(log_sigma);
        let energy: f64 = blt.decoder_row_norms_sq(problem.workload()).iter().sum();
        let value = log_sigma + 0.5 * energy.ln();
        if best.as_ref().is_none_or(|(best, _)| value < *best) {
            best = Some((value, blt));
        }
        let settled = (last - value).abs() < SETTLED || (value > last && look > 1);
        last = value;
        let Some(spectrum) = spectrum.filter(|_| !settled) else { break };
        let kernel = correlation(&spectrum);
        let mut evaluate = |x: &[f64]| fit.with_slopes(x, &kernel);
        let (at, gradient) = evaluate(&x);
        let mut point = Point { x, value: at, gradient };
        let mut minimiser = Lbfgs::new(MEMORY);
        for _ in 0..STEPS {
            let Some(next) = minimiser.step(&point, &mut evaluate) else { break };
            let decrease = point.value - next.value;
            point = next;
            iterations += 1;
            let progress = Progress {
                stage: Stage::Fitting,
                share: None,
                iteration: iterations,
                loss: (2.0 * value).exp(),
                lower_bound: 0.0,
                gap: f64::INFINITY,
                seconds: clock.elapsed().as_secs_f64(),
            };
            if observe(&progress).is_break() {
                return Err(Error::Interrupted { iterations, gap: f64::INFINITY });
            }
            if decrease < 1e-6 {
                break;
            }
        }
        x = point.x;
    }
    let none =
        Error::Numerical { what: "mechanism for bins", index: 0, reason: "no point of the fit was finite" };
    best.map(|(_, blt)| blt).ok_or(none)
}

/// Correlations at all distances up to half of the bins, from a spectrum, up to a factor.
fn correlation(spectrum: &[f64]) -> Vec<f64> {
    let b = spectrum.len();
    let mut values: Vec<Complex<f64>> = spectrum.iter().map(|s| Complex::new(*s, 0.0)).collect();
    FftPlanner::new().plan_fft_forward(b).process(&mut values);
    values[..=b / 2].iter().map(|value| value.re / b as f64).collect()
}

struct Fit<'a> {
    problem: &'a Problem,
    order: usize,
    bins: usize,
    /// `F` and `g` of the optimizer at every step, and its number of states.
    states: usize,
    transitions: Vec<f64>,
    inputs: Vec<f64>,
}

impl<'a> Fit<'a> {
    fn new(problem: &'a Problem, order: usize, bins: usize) -> Result<Self> {
        let realisation = problem.workload().realisation().ok_or_else(|| Error::Unsupported {
            what: "streaming for a matrix".into(),
            hint: "a dense workload has no recurrence; use its dense optimum",
        })?;
        let (mut transitions, mut inputs) = (Vec::new(), Vec::new());
        let (mut f, mut g) = (Vec::new(), Vec::new());
        for t in 0..problem.steps() {
            realisation.write(t, &mut f, &mut g);
            transitions.extend(&f);
            inputs.extend(&g);
        }
        Ok(Self { problem, order, bins, states: realisation.states(), transitions, inputs })
    }

    fn steps(&self) -> usize {
        self.problem.steps()
    }

    /// Weights and decays.
    fn exponentials(&self, x: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let (weights, decays) = x.split_at(self.order);
        (weights.iter().map(|x| x.exp()).collect(), decays.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect())
    }

    /// Those of a form for another budget, or rates spread from a hundred steps to one.
    fn start(&self) -> Vec<f64> {
        if let Some(Form::Blt(blt)) = self.problem.start()
            && blt.order() == self.order
        {
            let (weights, decays) = blt.exponentials();
            let odds = |x: &f64| (x / (1.0 - x)).ln();
            let weights = weights.iter().map(|x| x.max(1e-12).ln());
            return weights.chain(decays.iter().map(|x| odds(&x.clamp(1e-6, 1.0 - 1e-7)))).collect();
        }
        let r = self.order;
        let slowest = (4.0 / self.bins as f64).clamp(0.01, 0.3);
        let rate = |i: usize| slowest * (0.6 / slowest).powf(i as f64 / (r.max(2) - 1) as f64);
        let weight = |i: usize| (0.35 * (1.0 + i as f64) / r as f64).ln();
        (0..r).map(weight).chain((0..r).map(|i| ((1.0 - rate(i)) / rate(i)).ln())).collect()
    }

    /// `1/‖T e_j‖` for all columns.
    fn columns(&self, weights: &[f64], decays: &[f64]) -> Vec<f64> {
        let mut powers = weights.to_vec();
        let mut norm_sq = 1.0_f64;
        let mut out = vec![0.0; self.steps()];
        for out in out.iter_mut().rev() {
            *out = norm_sq.sqrt().recip();
            norm_sq += powers.iter().sum::<f64>().powi(2);
            powers.iter_mut().zip(decays).for_each(|(power, decay)| *power *= decay);
        }
        out
    }

    /// `E_t` for all steps. Cost: O(n(r + w)³).
    fn energies(&self, weights: &[f64], decays: &[f64], beta: &[f64]) -> Vec<f64> {
        let (r, w) = (self.order, self.states);
        let m = r + w;
        let (mut after, mut half) = (vec![0.0; m * m], vec![0.0; m * m]);
        let (mut f, mut g) = (vec![0.0; m * m], vec![0.0; m]);
        let mut energies = vec![0.0; self.steps()];
        for t in (0..self.steps()).rev() {
            after[m * m - 1] += 1.0;
            g[..r].fill(1.0);
            for a in 0..w {
                g[r + a] = self.inputs[t * w + a] / beta[t];
            }
            for a in 0..m {
                for k in 0..r {
                    f[a * m + k] = -g[a] * weights[k] + if a == k { decays[k] } else { 0.0 };
                }
                for c in 0..w {
                    f[a * m + r + c] = if a < r { 0.0 } else { self.transitions[(t * w + a - r) * w + c] };
                }
            }
            energies[t] = quadratic(&after, &g);
            product(&after, &f, &mut half, m);
            transposed_product(&f, &half, &mut after, m);
        }
        let least = energies.iter().copied().fold(0.0, f64::max) * 1e-12;
        energies.iter_mut().for_each(|e| *e = e.max(least));
        energies
    }

    /// `log √F Σ √E_t`.
    fn evaluate(&self, x: &[f64], kernel: &[f64]) -> f64 {
        let (weights, decays) = self.exponentials(x);
        let beta = self.columns(&weights, &decays);
        let energies = self.energies(&weights, &decays, &beta);
        // g(d), over that of a column with itself.
        let gains: Vec<f64> = (0..self.order)
            .map(|k| {
                let sum = (0..self.order).map(|l| weights[l] / (1.0 - decays[k] * decays[l])).sum::<f64>();
                weights[k] * (1.0 + decays[k] * sum)
            })
            .collect();
        let pairs = |k: usize| (0..self.order).map(move |l| (k, l));
        let tail: f64 = (0..self.order)
            .flat_map(pairs)
            .map(|(k, l)| weights[k] * weights[l] / (1.0 - decays[k] * decays[l]))
            .sum();
        let mut powers = gains;
        let mut total = kernel[0] * (1.0 + tail);
        for h in &kernel[1..] {
            total += 2.0 * h * powers.iter().sum::<f64>();
            powers.iter_mut().zip(&decays).for_each(|(power, decay)| *power *= decay);
        }
        let value = 0.5 * (total / (1.0 + tail)).ln() + energies.iter().map(|e| e.sqrt()).sum::<f64>().ln();
        if value.is_finite() { value } else { f64::INFINITY }
    }

    fn with_slopes(&self, x: &[f64], kernel: &[f64]) -> (f64, Vec<f64>) {
        let value = self.evaluate(x, kernel);
        let slope = |k: usize| {
            let mut moved = x.to_vec();
            moved[k] += NUDGE;
            (self.evaluate(&moved, kernel) - value) / NUDGE
        };
        let gradient: Vec<f64> = (0..x.len()).map(slope).collect();
        match value.is_finite() && gradient.iter().all(|x| x.is_finite()) {
            true => (value, gradient),
            false => (f64::INFINITY, vec![0.0; x.len()]),
        }
    }

    /// A point as coefficients, with a sensitivity of about one.
    fn blt(&self, x: &[f64]) -> Result<Blt> {
        let (weights, decays) = self.exponentials(x);
        let beta = self.columns(&weights, &decays);
        let energies = self.energies(&weights, &decays, &beta);
        let mut direct: Vec<f64> = energies.iter().map(|e| e.powf(-0.25)).collect();
        let scale: Vec<f64> = beta.iter().map(|b| 1.0 / b).collect();
        let form = Blt::new(weights.clone(), decays.clone(), direct.clone(), scale.clone())?;
        let gamma = self.problem.participation().sensitivity(&form)?.gamma;
        direct.iter_mut().for_each(|q| *q *= gamma);
        Blt::new(weights, decays, direct, scale)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::factorize::quiet;
    use crate::participation::Sampling;
    use crate::workload::Workload;

    #[test]
    fn few_numbers_come_near_to_many() {
        let sampling = Sampling::BallsInBins { bins: 120 };
        let goal = Goal { sampling, epsilon: 3.0, delta: 1e-6 };
        let problem = Problem::sampled(Workload::prefix_sum(120).unwrap(), goal).unwrap();
        let error = |blt: &Blt| {
            let allocation = sensitivity::allocation(blt, 120, 1.0).unwrap();
            let log_sigma = allocation.boundary(3.0, 1e-6, 1 << 13, None).unwrap().log_sigma;
            let energy: f64 = blt.decoder_row_norms_sq(problem.workload()).iter().sum();
            log_sigma.exp() * energy.sqrt()
        };
        let few = error(&exponentials(&problem, 2, 120, goal, &mut quiet).unwrap());
        let many = error(&super::super::bins_fit::exponentials(&problem, 2, 120, goal, &mut quiet).unwrap());
        let plain = Blt::new(vec![], vec![], vec![1.0; 120], vec![1.0; 120]).unwrap();
        assert!(few < 1.1 * many && few < 0.7 * error(&plain), "{few} {many} {}", error(&plain));
    }
}
