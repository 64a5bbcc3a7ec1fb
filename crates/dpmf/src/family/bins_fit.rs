//! Encoders of a few exponentials for units that hide in bins, made for one budget.
//!
//! `C = diag(α) T diag(β)` with a Toeplitz matrix `T` of exponentials. The noise that (ε, δ) needs depends on the Gram matrix `G`
//! of the bins alone, and moves with it by `d log σ = ⟨H, dG⟩/(2⟨H, G⟩)`, where `H = E[w wᵀ]` is that of the posterior over bins
//! where the privacy loss is ε. So one minimises `⟨H, G⟩‖A N‖_F²` at a fixed `H`, which is smooth and knows no chance, then
//! looks at `H` again; its averages over such steps settle where the error of the sampled mechanism does. `H` is made the same
//! for all rotations of the bins: that costs little and keeps thousands of scales from fitting the random numbers. Where bins are
//! drawn anew, the circle is one of two epochs.
//!
//! With `F_t = f_tᵀH f_t`, `f_t` row `t` of `T diag(β)` folded into bins, and `E_t = ‖A diag(1/β) T⁻¹e_t‖²`, the product is
//! `(Σ α_t²F_t)(Σ E_t/α_t²)`: the best `α_t² = √(E_t/F_t)` leaves `(Σ √(E_tF_t))²`. Rows are folded in the Fourier basis of the
//! bins, in which `H` is diagonal, and `E` is a Gramian of the exponentials and the optimizer's states together.

use super::stationary;
use crate::accounting::allocation::Boundary;
use crate::error::{Error, Result};
use crate::factorize::{Observer, Progress, Stage};
use crate::form::recall::Parts;
use crate::form::{Blt, Form, Recall, Representation};
use crate::linalg::lbfgs::{Lbfgs, Point};
use crate::participation::Sampling;
use crate::problem::{Goal, Problem};
use crate::sensitivity;
use std::time::Instant;

/// Random samples behind one look at the posterior, fewer where each takes longer.
fn samples(bins: usize) -> usize {
    ((1_usize << 28) / (bins * bins)).clamp(1 << 11, 1 << 13)
}

/// Looks at the posterior at most, steps of the minimisation between two of them, and points whose curvature it remembers.
const LOOKS: usize = 14;
const STEPS: usize = 30;
const MEMORY: usize = 20;

/// The least part of the way to the best point under a posterior that is tried.
const LEAST_WAY: f64 = 0.03;

/// Decrease of the logarithm of the error below which looking again is not worth it.
const SETTLED: f64 = 5e-4;

/// Where bins are drawn anew, an exponential falls by e to the power of that within an epoch, or more: what reaches further than an epoch is
/// charged to all patterns alike (`accounting/reshuffled`), and slopes do not see that. The more epochs there are, the more it costs. Both
/// are tried; the last is no limit.
const FADED: [f64; 2] = [3.0, 0.0];

/// What is added to the logarithms of weights and to the log odds of decays where they are tried, at first and at last, and how often.
const TRIED: [f64; 2] = [0.5, 0.05];
const TRIES: usize = 48;

/// A weight of an exponential that counts for nothing.
const NOTHING: f64 = 1e-12;

/// Most numbers of folded rows that are kept, and from where on a fit of few numbers does about as well.
const MOST: usize = 1 << 26;
const MANY: usize = 1 << 23;

/// The best encoder of `order` exponentials.
///
/// Errors: those of the accountant; sizes that do not fit in memory; [`Error::Interrupted`].
pub(super) fn exponentials(
    problem: &Problem,
    order: usize,
    bins: usize,
    goal: Goal,
    observe: Observer<'_>,
) -> Result<Blt> {
    if bins.saturating_mul(problem.steps()).saturating_mul(order + 1) > MANY {
        return stationary::exponentials(problem, order, bins, goal, observe);
    }
    // What was best for another budget is nearly there.
    let whole = Fit::new(problem, order, false, bins, 0.0)?;
    if let Some(near) = whole.near() {
        match whole.descend(goal, near, true, observe) {
            Err(error) if !matches!(error, Error::Interrupted { .. }) => {}
            found => return whole.blt(&found?),
        }
    }
    let (fit, best) = faded(problem, order, false, bins, goal, observe)?;
    fit.blt(&best)
}

/// The best fit, and what it is a fit of. A limit that is best for one exponential need not be for two, so each is fitted to the end.
fn faded<'a>(
    problem: &'a Problem,
    order: usize,
    tied: bool,
    bins: usize,
    goal: Goal,
    observe: Observer<'_>,
) -> Result<(Fit<'a>, Found)> {
    let mut best: Option<(Fit<'a>, Found)> = None;
    let faded = match goal.sampling {
        Sampling::ReshuffledBins { .. } => &FADED[..],
        _ => &FADED[..1],
    };
    let mut grown = |faded: f64| {
        let mut fit = Fit::new(problem, order.min(1), tied, bins, faded)?;
        let mut found = fit.descend(goal, fit.start(), false, observe)?;
        for count in 2..=order {
            fit = Fit { order: count, ..fit };
            found = fit.with_more(goal, &found, observe)?;
        }
        Ok((fit, found))
    };
    for &faded in faded {
        match grown(faded) {
            Ok((fit, found)) if best.as_ref().is_none_or(|(_, best)| found.value < best.value) => {
                best = Some((fit, found));
            }
            Err(error) if best.is_none() || matches!(error, Error::Interrupted { .. }) => return Err(error),
            _ => {}
        }
    }
    let (fit, found) = best.ok_or(Error::Numerical {
        what: "mechanism for bins",
        index: 0,
        reason: "no point of the fit was finite",
    })?;
    let found = match goal.sampling {
        Sampling::ReshuffledBins { bins } => fit.try_around(goal, bins, found, observe)?,
        _ => found,
    };
    Ok((fit, found))
}

/// The best encoder of one exponential whose inverse looks back one step: its noise is regenerated, and no buffer is kept.
///
/// Errors: those of [`exponentials`].
pub(super) fn recalled(problem: &Problem, bins: usize, goal: Goal, observe: Observer<'_>) -> Result<Recall> {
    let (fit, found) = faded(problem, 1, true, bins, goal, observe)?;
    let Shape { decays, direct, scale, .. } = fit.shape(&found)?;
    let n = direct.len();
    let own: Vec<f64> = (0..n).map(|t| direct[t] * scale[t]).collect();
    let last = (0..n).map(|t| match t {
        0 => 0.0,
        t => -decays[0] * direct[t - 1] * scale[t],
    });
    let parts = Parts { direct: own, recalled: last.collect(), ..Parts::default() };
    Recall::from_parts(1, 0, 1, parts)
}

/// What is fitted: variables are the logarithms of weights, the log odds of decays, and the logarithms of `β`. With `tied`
/// weights they are the decays.
struct Fit<'a> {
    problem: &'a Problem,
    order: usize,
    tied: bool,
    bins: usize,
    /// Steps after which the posterior is taken to repeat: the bins where they are dealt once, two epochs where they are drawn anew.
    period: usize,
    /// No exponential decays more slowly.
    slowest: f64,
    /// `F` and `g` of the optimizer at every step, and its number of states.
    states: usize,
    transitions: Vec<f64>,
    inputs: Vec<f64>,
    /// `cos` and `sin` of the multiples of a turn over the bins.
    turn: Vec<[f64; 2]>,
}

/// Where a fit ends, and the posterior that scales of rows are best for.
struct Found {
    x: Vec<f64>,
    spectrum: Vec<f64>,
    /// The logarithm of the error, as samples see it.
    value: f64,
}

/// A point in words of the form.
struct Shape {
    weights: Vec<f64>,
    decays: Vec<f64>,
    direct: Vec<f64>,
    scale: Vec<f64>,
}

impl<'a> Fit<'a> {
    fn new(problem: &'a Problem, order: usize, tied: bool, bins: usize, faded: f64) -> Result<Self> {
        let n = problem.steps();
        if bins.saturating_mul(n).saturating_mul(order + 1) > MOST {
            return Err(Error::Unsupported {
                what: format!("a fit for {bins} bins over {n} steps"),
                hint: "it does not fit in memory: use fewer steps per epoch",
            });
        }
        let realisation = problem.workload().realisation().ok_or_else(|| Error::Unsupported {
            what: "streaming for a matrix".into(),
            hint: "a dense workload has no recurrence; use its dense optimum",
        })?;
        let (mut transitions, mut inputs) = (Vec::new(), Vec::new());
        let (mut f, mut g) = (Vec::new(), Vec::new());
        for t in 0..n {
            realisation.write(t, &mut f, &mut g);
            transitions.extend(&f);
            inputs.extend(&g);
        }
        let (period, slowest) = match problem.goal() {
            Some(Goal { sampling: Sampling::ReshuffledBins { .. }, .. }) => {
                (2 * bins, (-faded / bins as f64).exp())
            }
            _ => (bins, 1.0),
        };
        let angle = |k: usize| std::f64::consts::TAU * k as f64 / period as f64;
        let turn = (0..period).map(|k| [libm::cos(angle(k)), libm::sin(angle(k))]).collect();
        let states = realisation.states();
        Ok(Self { problem, order, tied, bins, period, slowest, states, transitions, inputs, turn })
    }

    fn steps(&self) -> usize {
        self.problem.steps()
    }

    /// Variables before those of the scales.
    fn head(&self) -> usize {
        if self.tied { 1 } else { 2 * self.order }
    }

    /// Weights and decays.
    fn exponentials(&self, x: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let odds = |x: &f64| self.slowest / (1.0 + (-x).exp());
        if self.tied {
            let decays: Vec<f64> = x[..1].iter().map(odds).collect();
            return (decays.clone(), decays);
        }
        let (weights, decays) = x[..2 * self.order].split_at(self.order);
        (weights.iter().map(|x| x.exp()).collect(), decays.iter().map(odds).collect())
    }

    /// Whether a variable is of an exponential that counts for nothing.
    fn is_nothing(&self, x: &[f64], variable: usize) -> bool {
        !self.tied && x[variable % self.order] < (1e3 * NOTHING).ln()
    }

    /// The log odds of a decay, as a share of the slowest.
    fn odds(&self, decay: f64) -> f64 {
        let share = (decay / self.slowest).clamp(1e-6, 1.0 - 1e-7);
        (share / (1.0 - share)).ln()
    }

    /// A form that was best for another budget.
    fn near(&self) -> Option<Vec<f64>> {
        match self.problem.start() {
            Some(Form::Blt(blt)) if !self.tied && blt.order() == self.order => {
                let (weights, decays) = blt.exponentials();
                // What vanished in single precision is light, not nothing.
                let weights = weights.iter().map(|x| x.max(NOTHING).ln());
                let decays = decays.iter().map(|x| self.odds(*x));
                let scales = blt.scales().iter().map(|s| -s.ln());
                Some(weights.chain(decays).chain(scales).collect())
            }
            _ => None,
        }
    }

    /// The exponentials of a fit with one less, and another.
    fn with_one_more(&self, x: &[f64], weight: f64, decay: f64) -> Vec<f64> {
        let (weights, rest) = x.split_at(self.order - 1);
        let (decays, scales) = rest.split_at(self.order - 1);
        [weights, &[weight.ln()], decays, &[self.odds(decay)], scales].concat()
    }

    /// Rates spread from a fraction of an epoch to a step, columns of the same norm.
    fn start(&self) -> Vec<f64> {
        let (n, r) = (self.steps(), self.order);
        let slowest = (4.0 / self.bins as f64).clamp(0.01, 0.3);
        let rate = |i: usize| slowest * (0.6 / slowest).powf(i as f64 / (r.max(2) - 1) as f64);
        let odds = |i: usize| self.odds(1.0 - rate(i));
        let mut x: Vec<f64> = match self.tied {
            true => vec![self.odds(0.7)],
            false => {
                let weight = |i: usize| (0.35 * (1.0 + i as f64) / r as f64).ln();
                (0..r).map(weight).chain((0..r).map(odds)).collect()
            }
        };
        let (weights, decays) = self.exponentials(&x);
        let mut powers = weights;
        let mut norm_sq = 1.0_f64;
        let mut logs = vec![0.0; n];
        for log in logs.iter_mut().rev() {
            *log = -0.5 * norm_sq.ln();
            norm_sq += powers.iter().sum::<f64>().powi(2);
            powers.iter_mut().zip(&decays).for_each(|(power, decay)| *power *= decay);
        }
        x.extend(logs);
        x
    }

    /// The best with one exponential more than those of a fit, which is not worse than that fit. More exponentials have more local
    /// minima, so one that is fast is tried, and one that is slow.
    fn with_more(&self, goal: Goal, fewer: &Found, observe: Observer<'_>) -> Result<Found> {
        const LIGHT: f64 = 0.05;
        let alone = self.with_one_more(&fewer.x, NOTHING, 0.5);
        let mut best = Found { x: alone, spectrum: fewer.spectrum.clone(), value: fewer.value };
        let slow = 1.0 - (4.0 / self.bins as f64).clamp(0.01, 0.3);
        // Looks take longer where bins are drawn anew.
        let decays: &[f64] = match goal.sampling {
            Sampling::ReshuffledBins { .. } => &[0.5],
            _ => &[0.5, slow],
        };
        for &decay in decays {
            match self.descend(goal, self.with_one_more(&fewer.x, LIGHT, decay), false, observe) {
                Ok(found) if found.value < best.value => best = found,
                Err(error @ Error::Interrupted { .. }) => return Err(error),
                _ => {}
            }
        }
        Ok(best)
    }

    /// The best on the way down from a point: `known` if it was best for another budget.
    ///
    /// The posterior at a point leads to another point, of which only a part of the way may lead down, since the posterior changes.
    ///
    /// Errors: those of the first look. A later one that fails ends the descent, and what was found before stays.
    fn descend(&self, goal: Goal, start: Vec<f64>, known: bool, observe: Observer<'_>) -> Result<Found> {
        let clock = Instant::now();
        let mut iterations = 0;
        // What was best for another budget is nearly there.
        let all = samples(self.bins);
        let (samples, steps) = if known { (all / 2, STEPS / 2) } else { (all, STEPS) };
        // The first posterior is that of a unit that is found out: all weight on its own bin.
        let mut best = Found { x: start, spectrum: vec![1.0; self.period], value: f64::INFINITY };
        let (mut near, value, mut seen) = self.look(&best, goal, samples, None)?;
        best.value = value;
        let (mut share, mut way, mut looks) = (1.0, 1.0_f64, 1);
        // Looks take longer where bins are drawn anew, and slopes end earlier.
        let most = match goal.sampling {
            Sampling::ReshuffledBins { .. } => LOOKS / 2,
            _ => LOOKS,
        };
        while looks < most {
            let mean = |(old, new): (&f64, &f64)| old + share * (new - old);
            let spectrum: Vec<f64> = best.spectrum.iter().zip(&seen).map(mean).collect();
            share = 0.5;
            let mut evaluate = |x: &[f64]| self.evaluate(x, &spectrum);
            let (at, gradient) = evaluate(&best.x);
            let mut point = Point { x: best.x.clone(), value: at, gradient };
            let mut minimiser = Lbfgs::new(MEMORY);
            for _ in 0..steps {
                let Some(next) = minimiser.step(&point, &mut evaluate) else { break };
                let decrease = point.value - next.value;
                point = next;
                iterations += 1;
                let progress = Progress {
                    stage: Stage::Fitting,
                    share: None,
                    iteration: iterations,
                    loss: (2.0 * best.value).exp(),
                    lower_bound: 0.0,
                    gap: f64::INFINITY,
                    seconds: clock.elapsed().as_secs_f64(),
                };
                if observe(&progress).is_break() {
                    return Err(Error::Interrupted { iterations, gap: f64::INFINITY });
                }
                if decrease < 1e-7 {
                    break;
                }
            }
            let mut decrease = None;
            while looks < most && way > LEAST_WAY {
                let along = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a + way * (b - a)).collect();
                let (x, spectrum) = (along(&best.x, &point.x), along(&best.spectrum, &spectrum));
                let next = Found { x, spectrum, value: f64::INFINITY };
                looks += 1;
                match self.look(&next, goal, samples, Some(near)) {
                    Ok((log_sigma, value, new)) if value < best.value => {
                        decrease = Some(best.value - value);
                        (near, seen) = (log_sigma, new);
                        best = Found { value, ..next };
                        break;
                    }
                    // A little beyond the half, so that no way is tried twice.
                    Ok(_) => way *= 0.4,
                    Err(_) => return Ok(best),
                }
            }
            way = (1.5 * way).min(1.0);
            let settled = if known { 6.0 * SETTLED } else { SETTLED };
            if decrease.is_none_or(|decrease| decrease < settled) {
                break;
            }
        }
        Ok(best)
    }

    /// Goes on from where slopes lead no further by trying larger and smaller exponentials one by one: slopes are those of a posterior that
    /// is known roughly, and leave out what is charged to all patterns alike.
    ///
    /// Errors: those of the first look; [`Error::Interrupted`].
    fn try_around(&self, goal: Goal, bins: usize, start: Found, observe: Observer<'_>) -> Result<Found> {
        let (clock, samples) = (Instant::now(), samples(self.bins));
        let (first, value, seen) = self.look(&start, goal, samples, None)?;
        let start = Found { value, ..start };
        // Of units that join alone, which decide nearly always.
        let tried = |found: &Found, near: f64| -> Result<(f64, f64)> {
            let blt = self.blt(found)?;
            let hidden = sensitivity::reshuffled(&blt, bins)?;
            let log_sigma = hidden.joining_near(goal.epsilon, goal.delta, samples / 4, near)?;
            Ok((log_sigma, log_sigma + 0.5 * self.energy(&blt).ln()))
        };
        let (mut near, value) = tried(&start, first)?;
        let mut best = Found { x: start.x.clone(), spectrum: start.spectrum.clone(), value };
        let (mut step, mut tries) = (TRIED[0], 0);
        while step > TRIED[1] && tries < TRIES {
            let mut better = false;
            let variables = (0..self.head()).filter(|i| !self.is_nothing(&best.x, *i)).chain([self.head()]);
            for variable in variables.collect::<Vec<usize>>() {
                for direction in [step, -step] {
                    let (mut x, mut spectrum) = (best.x.clone(), best.spectrum.clone());
                    if variable < self.head() {
                        x[variable] += direction;
                    } else if direction > 0.0 {
                        // Scales of rows that are best for what was seen.
                        spectrum
                            .iter_mut()
                            .zip(&seen)
                            .for_each(|(old, new)| *old += direction * (new - *old));
                    } else {
                        continue;
                    }
                    tries += 1;
                    let progress = Progress {
                        stage: Stage::Fitting,
                        share: None,
                        iteration: tries,
                        loss: (2.0 * best.value).exp(),
                        lower_bound: 0.0,
                        gap: f64::INFINITY,
                        seconds: clock.elapsed().as_secs_f64(),
                    };
                    if observe(&progress).is_break() {
                        return Err(Error::Interrupted { iterations: tries, gap: f64::INFINITY });
                    }
                    let next = Found { x, spectrum, value: f64::INFINITY };
                    if let Ok((log_sigma, value)) = tried(&next, near)
                        && value < best.value
                    {
                        better |= value < best.value - SETTLED;
                        near = log_sigma;
                        best = Found { value, ..next };
                        break;
                    }
                }
            }
            if !better {
                step *= 0.4;
            }
        }
        Ok(match self.look(&best, goal, samples, Some(near)) {
            Ok((_, value, _)) if value < start.value => Found { value, ..best },
            _ => start,
        })
    }

    /// The squared error of unit noise, over all iterates.
    fn energy(&self, blt: &Blt) -> f64 {
        blt.decoder_row_norms_sq(self.problem.workload()).iter().sum()
    }

    /// The noise that a point needs and what its error then is, as logarithms, and the posterior there.
    fn look(
        &self,
        found: &Found,
        goal: Goal,
        samples: usize,
        near: Option<f64>,
    ) -> Result<(f64, f64, Vec<f64>)> {
        let blt = self.blt(found)?;
        let Goal { epsilon, delta, .. } = goal;
        let Boundary { log_sigma, spectrum } = match goal.sampling {
            Sampling::ReshuffledBins { bins } => {
                // A sample takes longer here.
                sensitivity::reshuffled(&blt, bins)?.boundary(epsilon, delta, samples / 4, near)?
            }
            _ => sensitivity::allocation(&blt, self.bins, 1.0)?.boundary(epsilon, delta, samples, near)?,
        };
        let value = log_sigma + 0.5 * self.energy(&blt).ln();
        if !value.is_finite() {
            return Err(Error::Numerical {
                what: "mechanism for bins",
                index: 0,
                reason: "its error is not a finite number",
            });
        }
        // Where nothing was seen, the posterior is taken for what it was.
        Ok((log_sigma, value, spectrum.unwrap_or_else(|| found.spectrum.clone())))
    }

    /// `log Σ √(E_tF_t)` and its gradient.
    ///
    /// Cost: O(n b r + n(r + w)³).
    fn evaluate(&self, x: &[f64], spectrum: &[f64]) -> (f64, Vec<f64>) {
        let (weights, decays) = self.exponentials(x);
        let beta: Vec<f64> = x[self.head()..].iter().map(|x| x.exp()).collect();
        let folded = Folded::new(self, &weights, &decays, &beta, spectrum);
        let gramian = Gramian::new(self, &weights, &decays, &beta);
        let least = gramian.energies.iter().copied().fold(0.0, f64::max) * 1e-12;
        let pairs = folded.squares.iter().zip(&gramian.energies).map(|(f, e)| (*f, e.max(least)));
        let total: f64 = pairs.clone().map(|(f, e)| (f * e).sqrt()).sum();
        if !total.is_finite() {
            return (f64::INFINITY, vec![0.0; x.len()]);
        }
        let (by_square, by_energy): (Vec<f64>, Vec<f64>) =
            pairs.map(|(f, e)| (0.5 * (e / f).sqrt() / total, 0.5 * (f / e).sqrt() / total)).unzip();
        let (mut slope, mut by_beta) = (vec![0.0; 2 * self.order], vec![0.0; beta.len()]);
        folded.pull_back(self, &by_square, &mut slope, &mut by_beta);
        gramian.pull_back(self, &by_energy, &mut slope, &mut by_beta);
        let r = self.order;
        let odds = |k: usize| decays[k] * (1.0 - decays[k] / self.slowest);
        let mut gradient: Vec<f64> = match self.tied {
            true => vec![(slope[0] + slope[1]) * odds(0)],
            false => {
                let by_weight = (0..r).map(|k| slope[k] * weights[k]);
                by_weight.chain((0..r).map(|k| slope[r + k] * odds(k))).collect()
            }
        };
        gradient.extend(by_beta.iter().zip(&beta).map(|(by, beta)| by * beta));
        match gradient.iter().all(|slope| slope.is_finite()) {
            true => (total.ln(), gradient),
            // A step too far.
            false => (f64::INFINITY, vec![0.0; x.len()]),
        }
    }

    /// The point as coefficients, with the best scales of rows and a sensitivity of about one.
    fn shape(&self, found: &Found) -> Result<Shape> {
        let (weights, decays) = self.exponentials(&found.x);
        let beta: Vec<f64> = found.x[self.head()..].iter().map(|x| x.exp()).collect();
        let gramian = Gramian::new(self, &weights, &decays, &beta);
        let folded = Folded::new(self, &weights, &decays, &beta, &found.spectrum);
        let least = gramian.energies.iter().copied().fold(0.0, f64::max) * 1e-12;
        let rows = folded.squares.iter().zip(&gramian.energies);
        let mut direct: Vec<f64> = rows.map(|(f, e)| (f / e.max(least)).sqrt().sqrt()).collect();
        let scale: Vec<f64> = beta.iter().map(|b| 1.0 / b).collect();
        let form = Blt::new(weights.clone(), decays.clone(), direct.clone(), scale.clone())?;
        let gamma = self.problem.participation().sensitivity(&form)?.gamma;
        direct.iter_mut().for_each(|q| *q *= gamma);
        Ok(Shape { weights, decays, direct, scale })
    }

    fn blt(&self, found: &Found) -> Result<Blt> {
        let Shape { weights, decays, direct, scale } = self.shape(found)?;
        Blt::new(weights, decays, direct, scale)
    }
}

/// Rows of `T diag(β)` folded into bins, in the Fourier basis: `cos` and `sin` parts of `b/2 + 1` frequencies.
struct Folded {
    width: usize,
    /// What the square of a part counts.
    weight: Vec<f64>,
    /// `f_t`, and the exponentials before each step, `r` times the width a step.
    rows: Vec<f64>,
    states: Vec<f64>,
    squares: Vec<f64>,
    weights: Vec<f64>,
    decays: Vec<f64>,
    beta: Vec<f64>,
}

impl Folded {
    fn new(fit: &Fit<'_>, weights: &[f64], decays: &[f64], beta: &[f64], spectrum: &[f64]) -> Self {
        let (b, r, n) = (fit.period, weights.len(), beta.len());
        let width = 2 * (b / 2 + 1);
        let mut weight = Vec::with_capacity(width);
        for j in 0..=b / 2 {
            // A frequency stands for itself and its mirror image.
            let twice = if j == 0 || 2 * j == b { 1.0 } else { 2.0 };
            weight.extend([twice * spectrum[j]; 2]);
        }
        let (mut rows, mut states) = (vec![0.0; n * width], vec![0.0; (n + 1) * r * width]);
        let mut squares = Vec::with_capacity(n);
        for t in 0..n {
            let (now, next) = states[t * r * width..].split_at_mut(r * width);
            let row = &mut rows[t * width..][..width];
            for (w, v) in weights.iter().zip(now.chunks_exact(width)) {
                row.iter_mut().zip(v).for_each(|(f, v)| *f += w * v);
            }
            for ((decay, v), new) in
                decays.iter().zip(now.chunks_exact(width)).zip(next.chunks_exact_mut(width))
            {
                new.iter_mut().zip(v).for_each(|(new, v)| *new = decay * v);
            }
            for j in 0..=b / 2 {
                let [cos, sin] = fit.turn[j * t % b];
                let own = [beta[t] * cos, beta[t] * sin];
                for part in 0..2 {
                    row[2 * j + part] += own[part];
                    for k in 0..r {
                        next[k * width + 2 * j + part] += own[part];
                    }
                }
            }
            squares.push(row.iter().zip(&weight).map(|(f, w)| w * f * f).sum());
        }
        let (weights, decays, beta) = (weights.to_vec(), decays.to_vec(), beta.to_vec());
        Self { width, weight, rows, states, squares, weights, decays, beta }
    }

    /// Adds the gradients by weights, decays and `β`, from those by the squares.
    fn pull_back(&self, fit: &Fit<'_>, by_square: &[f64], slope: &mut [f64], by_beta: &mut [f64]) {
        let (b, r, width) = (fit.period, self.weights.len(), self.width);
        let mut by_states = vec![0.0; r * width];
        let mut by_row = vec![0.0; width];
        for t in (0..self.beta.len()).rev() {
            let row = &self.rows[t * width..][..width];
            let scale = 2.0 * by_square[t];
            for (k, by) in by_row.iter_mut().enumerate() {
                *by = scale * self.weight[k] * row[k];
            }
            let states = &self.states[t * r * width..][..r * width];
            for k in 0..r {
                let v = &states[k * width..][..width];
                let by = &mut by_states[k * width..][..width];
                slope[k] += v.iter().zip(&by_row).map(|(v, by)| v * by).sum::<f64>();
                slope[r + k] += v.iter().zip(&*by).map(|(v, by)| v * by).sum::<f64>();
            }
            let mut own = 0.0;
            for j in 0..=b / 2 {
                let [cos, sin] = fit.turn[j * t % b];
                for (part, turned) in [cos, sin].into_iter().enumerate() {
                    let after: f64 = (0..r).map(|k| by_states[k * width + 2 * j + part]).sum();
                    own += turned * (by_row[2 * j + part] + after);
                }
            }
            by_beta[t] += own;
            for k in 0..r {
                let (decay, weight) = (self.decays[k], self.weights[k]);
                let by = &mut by_states[k * width..][..width];
                by.iter_mut().zip(&by_row).for_each(|(by, row)| *by = decay * *by + weight * row);
            }
        }
    }
}

/// `E_t` for all steps: what noise at a step adds to the iterates from there on.
struct Gramian {
    /// `R_t`, what a state after step `t` adds, `m²` numbers a step.
    values: Vec<f64>,
    energies: Vec<f64>,
    weights: Vec<f64>,
    decays: Vec<f64>,
    beta: Vec<f64>,
}

impl Gramian {
    fn new(fit: &Fit<'_>, weights: &[f64], decays: &[f64], beta: &[f64]) -> Self {
        let (r, n) = (weights.len(), beta.len());
        let m = r + fit.states;
        let mut values = vec![0.0; n * m * m];
        let mut energies = vec![0.0; n];
        let (weights, decays, beta) = (weights.to_vec(), decays.to_vec(), beta.to_vec());
        let mut gramian = Self { values: Vec::new(), energies: Vec::new(), weights, decays, beta };
        let mut after = vec![0.0; m * m];
        let (mut f, mut g) = (vec![0.0; m * m], vec![0.0; m]);
        let mut half = vec![0.0; m * m];
        for t in (0..n).rev() {
            after[m * m - 1] += 1.0;
            values[t * m * m..][..m * m].copy_from_slice(&after);
            gramian.transition(fit, t, &mut f, &mut g);
            energies[t] = quadratic(&after, &g);
            // P_t = FᵀR F.
            product(&after, &f, &mut half, m);
            transposed_product(&f, &half, &mut after, m);
        }
        (gramian.values, gramian.energies) = (values, energies);
        gramian
    }

    /// `F_t = diag(Θ, Φ_t) − g_t[ω, 0]ᵀ` and `g_t = (1, Γ_t/β_t)`.
    fn transition(&self, fit: &Fit<'_>, t: usize, f: &mut [f64], g: &mut [f64]) {
        let (r, w) = (self.weights.len(), fit.states);
        let m = r + w;
        g[..r].fill(1.0);
        for a in 0..w {
            g[r + a] = fit.inputs[t * w + a] / self.beta[t];
        }
        f.fill(0.0);
        for a in 0..m {
            for k in 0..r {
                f[a * m + k] = -g[a] * self.weights[k];
            }
        }
        for k in 0..r {
            f[k * m + k] += self.decays[k];
        }
        for a in 0..w {
            for c in 0..w {
                f[(r + a) * m + r + c] = fit.transitions[(t * w + a) * w + c];
            }
        }
    }

    /// Adds the gradients by weights, decays and `β`, from those by the energies.
    fn pull_back(&self, fit: &Fit<'_>, by_energy: &[f64], slope: &mut [f64], by_beta: &mut [f64]) {
        let (r, w) = (self.weights.len(), fit.states);
        let m = r + w;
        let mut covariance = vec![0.0; m * m];
        let (mut f, mut g) = (vec![0.0; m * m], vec![0.0; m]);
        let (mut moved, mut by_f) = (vec![0.0; m * m], vec![0.0; m * m]);
        let mut by_g = vec![0.0; m];
        for t in 0..self.beta.len() {
            self.transition(fit, t, &mut f, &mut g);
            let value = &self.values[t * m * m..][..m * m];
            // ∂F = 2 R F Σ, ∂g = 2ψ R g − ∂F[ω, 0].
            product(&f, &covariance, &mut moved, m);
            product(value, &moved, &mut by_f, m);
            by_f.iter_mut().for_each(|x| *x *= 2.0);
            for a in 0..m {
                let own: f64 = value[a * m..][..m].iter().zip(&g).map(|(v, g)| v * g).sum();
                let fed: f64 = by_f[a * m..][..r].iter().zip(&self.weights).map(|(by, w)| by * w).sum();
                by_g[a] = 2.0 * by_energy[t] * own - fed;
            }
            for k in 0..r {
                slope[k] -= (0..m).map(|a| g[a] * by_f[a * m + k]).sum::<f64>();
                slope[r + k] += by_f[k * m + k];
            }
            let by_scale: f64 = (0..w).map(|a| fit.inputs[t * w + a] * by_g[r + a]).sum();
            by_beta[t] -= by_scale / (self.beta[t] * self.beta[t]);
            // Σ ← F Σ Fᵀ + ψ g gᵀ.
            let old = std::mem::take(&mut moved);
            for a in 0..m {
                for c in 0..m {
                    let sum: f64 = (0..m).map(|k| old[a * m + k] * f[c * m + k]).sum();
                    covariance[a * m + c] = sum + by_energy[t] * g[a] * g[c];
                }
            }
            moved = old;
        }
    }
}

/// `xᵀM x`.
pub(super) fn quadratic(matrix: &[f64], x: &[f64]) -> f64 {
    let rows = matrix.chunks_exact(x.len()).zip(x);
    rows.map(|(row, a)| a * row.iter().zip(x).map(|(m, b)| m * b).sum::<f64>()).sum()
}

pub(super) fn product(a: &[f64], b: &[f64], out: &mut [f64], m: usize) {
    for i in 0..m {
        for j in 0..m {
            out[i * m + j] = (0..m).map(|k| a[i * m + k] * b[k * m + j]).sum();
        }
    }
}

pub(super) fn transposed_product(a: &[f64], b: &[f64], out: &mut [f64], m: usize) {
    for i in 0..m {
        for j in 0..m {
            out[i * m + j] = (0..m).map(|k| a[k * m + i] * b[k * m + j]).sum();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::factorize::quiet;
    use crate::workload::{Optimizer, Workload};
    use faer::Mat;

    fn problem(workload: Workload, bins: usize) -> Problem {
        let goal = Goal { sampling: Sampling::BallsInBins { bins }, epsilon: 2.0, delta: 1e-5 };
        Problem::sampled(workload, goal).unwrap()
    }

    #[test]
    fn the_objective_is_that_of_dense_matrices() {
        let momentum = Optimizer { momentum: 0.5, ..Default::default() };
        let workload = Workload::sgd((0..12).map(|t| 1.0 + 0.1 * f64::from(t)).collect(), momentum).unwrap();
        let problem = problem(workload, 4);
        let fit = Fit::new(&problem, 2, false, 4, 1.0).unwrap();
        let mut x = fit.start();
        x.iter_mut().enumerate().for_each(|(k, x)| *x += 0.1 * (k as f64).sin());
        let spectrum = [1.0, 0.5, 0.3, 0.5];
        let found = Found { x, spectrum: spectrum.to_vec(), value: 0.0 };
        let Shape { weights, decays, scale, .. } = fit.shape(&found).unwrap();
        let plain = Blt::new(weights, decays, vec![1.0; 12], scale).unwrap();
        let (c, b) = (plain.encoder(), problem.workload().to_dense() * plain.coloring());
        let folded = Mat::from_fn(12, 4, |i, p| (p..12).step_by(4).map(|j| c[(i, j)]).sum::<f64>());
        let h = Mat::from_fn(4, 4, |p, q| {
            (0..4)
                .map(|j| spectrum[j] * (std::f64::consts::FRAC_PI_2 * (j * p.abs_diff(q)) as f64).cos())
                .sum::<f64>()
        });
        let total: f64 = (0..12)
            .map(|t| {
                let row = folded.row(t);
                let square: f64 = (0..16).map(|k| h[(k / 4, k % 4)] * row[k / 4] * row[k % 4]).sum();
                (square * b.col(t).squared_norm_l2()).sqrt()
            })
            .sum();
        assert!((fit.evaluate(&found.x, &spectrum).0 - total.ln()).abs() < 1e-12);
    }

    #[test]
    fn gradients_are_those_of_differences() {
        let momentum = Optimizer { momentum: 0.5, ..Default::default() };
        let workload = Workload::sgd((0..15).map(|t| 1.0 + 0.1 * f64::from(t)).collect(), momentum).unwrap();
        let problem = problem(workload, 5);
        for (order, tied) in [(1, false), (2, false), (1, true)] {
            let fit = Fit::new(&problem, order, tied, 5, 1.0).unwrap();
            let spectrum = [1.0, 0.4, 0.2, 0.2, 0.4];
            let x = fit.start();
            let (_, gradient) = fit.evaluate(&x, &spectrum);
            for (i, slope) in gradient.iter().enumerate() {
                let moved = |step: f64| {
                    let mut x = x.clone();
                    x[i] += step;
                    fit.evaluate(&x, &spectrum).0
                };
                let difference = (moved(1e-5) - moved(-1e-5)) / 2e-5;
                assert!((difference - slope).abs() < 1e-8, "{order} {tied} {i}: {difference} {slope}");
            }
        }
    }

    #[test]
    fn a_tied_encoder_is_one_look_back() {
        let problem = problem(Workload::prefix_sum(24).unwrap(), 6);
        let goal = problem.goal().unwrap();
        let recall = recalled(&problem, 6, goal, &mut quiet).unwrap();
        assert!(recall.encoder_is_nonnegative());
        let free = exponentials(&problem, 2, 6, goal, &mut quiet).unwrap();
        let error = |form: &dyn Representation| {
            let allocation = sensitivity::allocation(form, 6, 1.0).unwrap();
            let energy: f64 = form.decoder_row_norms_sq(problem.workload()).iter().sum();
            allocation.noise_multiplier(2.0, 1e-5).unwrap() * energy.sqrt()
        };
        let independent = crate::form::StateSpace::independent(24).unwrap();
        assert!(error(&free) < 1.005 * error(&recall) && error(&recall) < 0.9 * error(&independent));
    }
}
