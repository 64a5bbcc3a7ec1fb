//! The two samplers, and their confidence bounds.

use super::Reshuffled;
use super::lanes::{LANES, Lanes, couple, multiply, project, scale, total};
use super::tail::{self, Counts, Planes};
use super::zeta::Classes;
use crate::accounting::allocation::{
    Estimate, Purpose, Side, Watch, bet, exp_all, log_failure, log_peak, pick, sum,
};
use crate::error::{Error, Result};
use chacha20::ChaCha8Rng;
use rand::{RngExt, SeedableRng};
use rand_distr::{Distribution, StandardNormal};
use rayon::prelude::*;
use sha2::{Digest, Sha256};
use std::ops::ControlFlow;
use std::sync::OnceLock;

/// Samples that one generator makes, one after the other.
const CHUNK: usize = 512;

/// Most patterns that are joined to tilt a sample.
const JOINED: usize = 64;

/// What the bound of leaving may add to that of joining, as a share of it, without being sampled.
const ADDED: f64 = 0.02;

/// Samples that choose where leaving is cut, twice, and the share of it that is to be beyond the cut.
const CHOOSING: usize = 2048;
const BEYOND: f64 = 0.003;

/// Tilts and cuts are multiples of that, in standard deviations, so that rounding on another machine does not change them.
const GRID: f64 = 1.0 / 16.0;

/// How much larger the logarithm of the bound of all values may be without a cut.
const UNCUT: f64 = 2.3;

/// Most steps of the grid between the two planes beyond which the rest is extrapolated.
const APART: usize = 16;

/// Where the numbers of samples on planes begin among those of leaving.
const ON_PLANES: usize = 1 << 40;

/// Samples that tell whether so many patterns are enough, and where their numbers begin.
const TRIED: usize = 64;
const FOR_PATTERNS: usize = 1 << 20;

/// What rounding may move a loss by, many times over.
const ROUNDING: f64 = 1e-9;

/// The chain at a noise multiplier, ready to be sampled.
pub(super) struct Sampler {
    pub bins: usize,
    pub epochs: usize,
    pub width: usize,
    epsilon: f64,
    /// Seeds for joining, for leaving, and for choosing how to sample it.
    seeds: [[u8; 32]; 3],
    /// Columns over σ.
    root: Vec<f64>,
    /// `X_st` for `|s − t| < w`, `2w − 1` numbers a step, and their exponentials.
    pub gram: Vec<f64>,
    raise: Vec<f64>,
    half: Vec<f64>,
    /// `e^{−X} − 1` for bins of neighbouring epochs: by the first epoch, the bin in the second, and that in the first, of which
    /// only the last `w − 1` count.
    cross: Vec<f64>,
    common: f64,
    joined: OnceLock<(usize, f64)>,
}

/// What one sample is worth: its weight and its privacy loss.
#[derive(Clone, Copy)]
struct Sample {
    log_weight: f64,
    loss: f64,
}

/// Room for samples side by side, a row a step.
struct Batch {
    white: Vec<Lanes>,
    /// `e^{a_s}`.
    terms: Vec<Lanes>,
    /// What patterns that are joined multiply that by.
    raised: Vec<Lanes>,
    /// What was summed up over the epochs before, for each bin of each epoch, normalised.
    forward: Vec<Lanes>,
    /// Weights of the steps of one sample, their sums over epochs, and a pattern.
    weights: Vec<f64>,
    totals: Vec<f64>,
    steps: Vec<usize>,
}

/// A sample that leans away: the mean of the patterns along its noise, and its loss.
struct Leaning {
    mean: f64,
    loss: f64,
}

/// How samples lean away from all patterns.
pub(super) struct Away {
    /// `⟨C1/b, Ce_s⟩/σ²`, and the variance of `ȳ`.
    toward: Vec<f64>,
    spread: f64,
    /// The logarithm of what no value exceeds under the law that bounds them best.
    log_range: f64,
    /// λ of the law that samples are drawn from.
    tilt: f64,
    /// Up to which `ȳ` samples are weighed, where the lower plane is, and from where on all values are zero, in standard deviations.
    cut: f64,
    lower: f64,
    end: f64,
}

impl Sampler {
    pub fn new(reshuffled: &Reshuffled, noise_multiplier: f64, epsilon: f64, purpose: Purpose) -> Self {
        let &Reshuffled { bins, epochs, width: w, ref columns, ref near, common, beside, ref subject } =
            reshuffled;
        let (over, over_sq) = (1.0 / noise_multiplier, noise_multiplier.powi(-2));
        let size = bins * epochs;
        let side = 2 * w - 1;
        let mut gram = vec![0.0; size * side];
        for s in 0..size {
            for lag in 0..w.min(size - s) {
                let x = near[s * w + lag] * over_sq;
                gram[s * side + w - 1 + lag] = x;
                gram[(s + lag) * side + w - 1 - lag] = x;
            }
        }
        let mut raise = gram.clone();
        exp_all(&mut raise);
        let mut cross = vec![0.0; (epochs - 1) * (w - 1) * (w - 1)];
        for e in 0..epochs - 1 {
            for q in 0..w - 1 {
                for i in q..w - 1 {
                    let (s, t) = (e * bins + bins + 1 + i - w, (e + 1) * bins + q);
                    let x = near[s * w + t - s] * over_sq;
                    cross[(e * (w - 1) + q) * (w - 1) + i] = (-x).exp_m1();
                }
            }
        }
        let seed = |purpose: Purpose, direction: &[u8]| {
            let mut hash = Sha256::new();
            match purpose {
                Purpose::Search => hash.update(b"dpmf reshuffled search"),
                Purpose::Proof => {
                    hash.update(b"dpmf reshuffled proof");
                    hash.update(subject);
                    hash.update(noise_multiplier.to_le_bytes());
                    hash.update(epsilon.to_le_bytes());
                }
            }
            hash.update(direction);
            hash.finalize().into()
        };
        Self {
            bins,
            epochs,
            width: w,
            epsilon,
            seeds: [
                seed(purpose, b"joining"),
                seed(purpose, b"leaving"),
                seed(Purpose::Search, b"where to cut leaving"),
            ],
            root: columns.iter().map(|x| x * over).collect(),
            half: gram.iter().skip(w - 1).step_by(side).map(|x| 0.5 * x).collect(),
            gram,
            raise,
            cross,
            common: (common * over_sq + beside) * (1.0 + 4.0 * f64::EPSILON),
            joined: OnceLock::new(),
        }
    }

    /// `X_st` of steps less than `w` apart, the first before the second.
    pub fn product(&self, s: usize, t: usize) -> f64 {
        self.gram[s * (2 * self.width - 1) + self.width - 1 + t - s]
    }

    fn batch(&self) -> Batch {
        let size = self.bins * self.epochs;
        let rows = |count: usize| vec![[0.0; LANES]; count];
        Batch {
            white: rows(size + self.width),
            terms: rows(size),
            raised: rows(size),
            forward: rows(size),
            weights: vec![0.0; size],
            totals: vec![0.0; self.epochs],
            steps: vec![0; self.epochs],
        }
    }

    /// `E_P[(1 − e^{ε−L})_+]`, from a share of the samples, with the bound that all of them would be expected to give.
    ///
    /// Errors: [`Error::Interrupted`].
    pub fn joining(&self, samples: usize, share: usize, watch: Watch<'_>) -> Result<Estimate> {
        let (joined, log_range) = self.joined();
        let value = |sample: Sample| {
            let over = -(self.epsilon - sample.loss).exp_m1();
            if over > 0.0 { sample.log_weight.exp() * over } else { 0.0 }
        };
        self.bound(0, log_range, samples, share, watch, |rng, batch| self.join(joined, rng, batch).map(value))
    }

    /// `E_Q[(1 − e^{ε+L})_+]`, likewise, if its bound may add something to one of joining.
    ///
    /// Errors: [`Error::Interrupted`].
    pub fn leaving(&self, beside: f64, samples: usize, share: usize, watch: Watch<'_>) -> Result<Estimate> {
        let away = self.away();
        let range = away.log_range.exp();
        // Where nothing is asked of it, it is small.
        if range <= ADDED * beside || away.log_range < -200.0 {
            return Ok(Estimate { mean: 0.0, upper: range, range });
        }
        let (near, mean_beyond) = self.below_the_cut(&away, samples, share, watch)?;
        let beyond = self.beyond_the_cut(&away, samples / 2, share, watch)?;
        let mean = near.mean + mean_beyond;
        Ok(Estimate { mean, upper: (near.upper + beyond).min(range), range: near.range + 1.0 })
    }

    /// The mean of it, of which nothing is bounded.
    ///
    /// Errors: none.
    pub fn mean_of_leaving(&self, samples: usize) -> Result<f64> {
        let (near, beyond) =
            self.below_the_cut(&self.away(), samples, 1, &mut |_| ControlFlow::Continue(()))?;
        Ok(near.mean + beyond)
    }

    /// The part of it in which `ȳ` is below the cut, where weights are bounded, and the mean of the other.
    fn below_the_cut(
        &self,
        away: &Away,
        samples: usize,
        share: usize,
        watch: Watch<'_>,
    ) -> Result<(Estimate, f64)> {
        let (cut, log_range) = (away.cut * away.spread.sqrt(), away.log_most(away.cut));
        let part = |chunk: usize| {
            let (mut rng, mut batch) = (self.rng(1, chunk), self.batch());
            let mut beyond = 0.0;
            let values: Vec<f64> = (0..CHUNK / LANES)
                .flat_map(|_| self.lean(away, &mut rng, &mut batch))
                .map(|Leaning { mean, loss }| {
                    let over = -(self.epsilon + loss).exp_m1();
                    let value = if over > 0.0 { away.log_weight(mean).exp() * over } else { 0.0 };
                    if mean < cut {
                        return value;
                    }
                    beyond += value;
                    0.0
                })
                .collect();
            (values, beyond)
        };
        let chunks = samples.div_ceil(CHUNK * share).max(2);
        let (mut values, mut beyond) = (Vec::with_capacity(chunks * CHUNK), 0.0);
        self.in_chunks(chunks, watch, part, |_, (part, more)| {
            values.extend(part);
            beyond += more;
        })?;
        let count = values.len() as f64;
        // There are two parts, each of which may fail half as often.
        Ok((estimate(&values, log_range, log_failure() + std::f64::consts::LN_2, share), beyond / count))
    }

    /// A bound on the other part, from samples on two planes (`tail.rs`).
    fn beyond_the_cut(&self, away: &Away, samples: usize, share: usize, watch: Watch<'_>) -> Result<f64> {
        if away.cut >= away.end {
            return Ok(0.0);
        }
        let planes = Planes { lower: away.lower, upper: away.cut, end: away.end };
        let part = |chunk: usize| {
            let (mut rng, mut batch) = (self.rng(1, ON_PLANES + chunk), self.batch());
            let mut counts = [Counts::new(), Counts::new()];
            for _ in 0..CHUNK / LANES {
                let losses = self.on_planes(planes, away, &mut rng, &mut batch);
                for loss in losses {
                    // Rounding makes the one more and the other less.
                    counts[0].take(-self.epsilon - loss[0] - ROUNDING);
                    counts[1].take(-self.epsilon - loss[1] + ROUNDING);
                }
            }
            counts
        };
        let mut counts = [Counts::new(), Counts::new()];
        self.in_chunks(samples.div_ceil(CHUNK * share).max(2), watch, part, |_, part| {
            counts.iter_mut().zip(&part).for_each(|(sum, part)| sum.add(part));
        })?;
        Ok(tail::bound(planes, &counts[0], &counts[1], share as f64))
    }

    /// The same that joins as few patterns as bring half of the losses to ε: for estimates, of which nothing is bounded. More of them would
    /// draw noise so far out that what counts is not seen.
    pub fn joining_enough(self) -> Self {
        let brings = |k: usize| {
            let (mut rng, mut batch) = (self.rng(2, FOR_PATTERNS + k), self.batch());
            let losses = (0..TRIED / LANES).flat_map(|_| self.join(k, &mut rng, &mut batch));
            2 * losses.filter(|sample| sample.loss >= self.epsilon).count() >= TRIED
        };
        let (mut few, mut enough) = (0, 1);
        while enough < self.most_joined() && !brings(enough) {
            (few, enough) = (enough, 2 * enough);
        }
        enough = enough.min(self.most_joined());
        while enough - few > 1 {
            let middle = few.midpoint(enough);
            if brings(middle) {
                enough = middle;
            } else {
                few = middle;
            }
        }
        Self { joined: OnceLock::from((enough, f64::INFINITY)), ..self }
    }

    /// Weights of bins are products of as many exponentials: they must not overflow.
    fn most_joined(&self) -> usize {
        let side = 2 * self.width - 1;
        let largest = self.gram.chunks_exact(side).map(|row| row.iter().sum::<f64>()).fold(0.0, f64::max);
        ((600.0 / largest.max(1e-9)) as usize).clamp(1, JOINED)
    }

    /// The number of patterns to join that bounds the values best, and the logarithm of the bound.
    pub fn joined(&self) -> (usize, f64) {
        *self.joined.get_or_init(|| {
            let most = self.most_joined();
            let classes = Classes::new(self);
            let (mut best, mut log_zeta) = ((1, 0.0), 0.0);
            for k in 2..=most {
                let m = k as f64 - 1.0;
                log_zeta += classes.log_zeta(self, m) + m * self.common;
                let log_range = log_zeta - m * self.epsilon + log_peak(m);
                // Every pattern takes its time: one that hardly lowers the bound is not worth it.
                if log_range < best.1 - 0.02 * (k - best.0) as f64 {
                    best = (k, log_range);
                } else if k > best.0 + 3 {
                    break;
                }
            }
            best
        })
    }

    /// Samples that join `k` patterns; leaves the terms of the chain at the batch.
    fn join(&self, k: usize, rng: &mut ChaCha8Rng, batch: &mut Batch) -> [Sample; LANES] {
        let mut samples = [Sample { log_weight: 0.0, loss: 0.0 }; LANES];
        for (lane, sample) in samples.iter_mut().enumerate() {
            self.whiten(lane, rng, batch);
            sample.log_weight = 0.5 * self.common * (k * (k - 1)) as f64 + self.draw(k, rng, batch);
            batch.raised.iter_mut().zip(&batch.weights).for_each(|(row, weight)| row[lane] = *weight);
            sample.loss = self.shared(rng) + (k as f64 - 0.5) * self.common;
        }
        self.project(batch);
        self.exponentials(batch);
        multiply(batch.terms.as_flattened_mut(), batch.raised.as_flattened());
        for (sample, loss) in samples.iter_mut().zip(self.chain(batch)) {
            sample.loss += loss;
            sample.log_weight -= (k as f64 - 1.0) * sample.loss;
        }
        samples
    }

    /// Draws `k` patterns, whose weights are left at the batch; the logarithm of the product of all `z_j`, but for what they share.
    fn draw(&self, k: usize, rng: &mut ChaCha8Rng, batch: &mut Batch) -> f64 {
        let (b, w, side) = (self.bins, self.width, 2 * self.width - 1);
        let size = b * self.epochs;
        let Batch { weights, totals, steps, .. } = batch;
        weights.fill(1.0);
        totals.fill(b as f64);
        let mut log_means = 0.0;
        for _ in 0..k {
            let mut product = 1.0_f64;
            for (e, step) in steps.iter_mut().enumerate() {
                product *= totals[e] / b as f64;
                if product > 1e250 {
                    (log_means, product) = (log_means + product.ln(), 1.0);
                }
                *step = e * b + pick(&weights[e * b..][..b], rng.random::<f64>() * totals[e]);
            }
            log_means += product.ln();
            for &s in &*steps {
                let (from, to) = ((s + 1).saturating_sub(w), (s + w).min(size));
                multiply(&mut weights[from..to], &self.raise[s * side + w - 1 + from - s..][..to - from]);
            }
            totals.iter_mut().zip(weights.chunks_exact(b)).for_each(|(total, bins)| *total = sum(bins));
        }
        log_means
    }

    /// Samples of noise that leans away from the patterns.
    fn lean(&self, away: &Away, rng: &mut ChaCha8Rng, batch: &mut Batch) -> [Leaning; LANES] {
        let mut shared = [0.0; LANES];
        for (lane, shared) in shared.iter_mut().enumerate() {
            self.whiten(lane, rng, batch);
            *shared = self.shared(rng) - away.tilt * self.common;
        }
        self.project(batch);
        for (row, m) in batch.terms.iter_mut().zip(&away.toward) {
            row.iter_mut().for_each(|y| *y -= away.tilt * m);
        }
        let means = total(&batch.terms);
        self.exponentials(batch);
        let losses = self.chain(batch);
        std::array::from_fn(|lane| Leaning {
            mean: means[lane] / self.bins as f64 + shared[lane],
            loss: losses[lane] + shared[lane] - 0.5 * self.common,
        })
    }

    /// Losses of samples that are moved to the one plane, and to the other.
    fn on_planes(
        &self,
        planes: Planes,
        away: &Away,
        rng: &mut ChaCha8Rng,
        batch: &mut Batch,
    ) -> [[f64; 2]; LANES] {
        let mut shared = [0.0; LANES];
        for (lane, shared) in shared.iter_mut().enumerate() {
            self.whiten(lane, rng, batch);
            *shared = self.shared(rng);
        }
        self.project(batch);
        let (b, sd) = (self.bins as f64, away.spread.sqrt());
        let sums = total(&batch.terms);
        let means: Lanes = std::array::from_fn(|lane| sums[lane] / b + shared[lane]);
        let mut moved = [0.0; LANES];
        let mut out = [[0.0; 2]; LANES];
        for (side, place) in [planes.lower, planes.upper].into_iter().enumerate() {
            // From where the samples are, or from the plane that they were moved to.
            let step: Lanes =
                std::array::from_fn(|lane| (place * sd - means[lane]) / away.spread - moved[lane]);
            if side == 0 {
                batch.raised.copy_from_slice(&batch.terms);
            }
            for (row, m) in batch.raised.iter_mut().zip(&away.toward) {
                row.iter_mut().zip(&step).for_each(|(y, step)| *y += step * m);
            }
            moved.iter_mut().zip(&step).for_each(|(moved, step)| *moved += step);
            batch.terms.copy_from_slice(&batch.raised);
            self.exponentials(batch);
            for (lane, loss) in self.chain(batch).into_iter().enumerate() {
                out[lane][side] = loss + shared[lane] + moved[lane] * self.common - 0.5 * self.common;
            }
        }
        out
    }

    pub fn away(&self) -> Away {
        let (b, w, side) = (self.bins as f64, self.width, 2 * self.width - 1);
        let toward: Vec<f64> = self.gram.chunks_exact(side).map(|row| row.iter().sum::<f64>() / b).collect();
        let spread = toward.iter().sum::<f64>() / b + self.common;
        let mut own = 2.0 * self.half.iter().sum::<f64>() / b;
        for e in 1..self.epochs {
            for q in 0..w - 1 {
                let t = e * self.bins + q;
                let before: f64 = (t + 1 - w..e * self.bins).map(|s| self.product(s, t)).sum();
                own += 2.0 * before / (b * b);
            }
        }
        let distance = self.epsilon - 0.5 * (own + self.common);
        let log_range = |tilt: f64| 0.5 * tilt * tilt * spread - tilt * distance + log_peak(tilt);
        // Any λ would do; the bound is convex where it matters.
        let (mut low, mut high) = (0.0, 2.0 * (distance.max(0.0) / spread + 1.0) + 2.0 / spread.sqrt());
        for _ in 0..60 {
            let third = (high - low) / 3.0;
            if log_range(low + third) < log_range(high - third) {
                high -= third;
            } else {
                low += third;
            }
        }
        let bounding = 0.5 * (low + high);
        let tilt = ((self.epsilon - 0.5 * spread) / spread).max(bounding);
        // Any tilt and any cut give a bound.
        let sd = spread.sqrt();
        let (cut, end) = (2.0 - tilt * sd, -distance / sd + 1e-9 * (1.0 + (distance / sd).abs()));
        self.chosen(Away { toward, spread, log_range: log_range(bounding), tilt, cut, lower: cut - 1.0, end })
    }

    /// The same with the tilt that brings samples to where they count, and a cut beyond which little is left. Random numbers of their own
    /// choose both.
    fn chosen(&self, mut away: Away) -> Away {
        let sd = away.spread.sqrt();
        for round in 0..2 {
            let (mut rng, mut batch) = (self.rng(2, round), self.batch());
            // Places, and logarithms of values, of which most may be nothing.
            let mut values: Vec<(f64, f64)> = (0..CHOOSING / LANES)
                .flat_map(|_| self.lean(&away, &mut rng, &mut batch))
                .map(|Leaning { mean, loss }| {
                    let over = (-(self.epsilon + loss).exp_m1()).max(0.0);
                    (mean / sd, away.log_weight(mean) + over.ln())
                })
                .collect();
            let most = values.iter().map(|value| value.1).fold(f64::NEG_INFINITY, f64::max);
            if !most.is_finite() {
                break;
            }
            values.iter_mut().for_each(|value| value.1 = (value.1 - most).exp());
            let whole: f64 = values.iter().map(|value| value.1).sum();
            let mean = values.iter().map(|(place, value)| place * value).sum::<f64>() / whole;
            values.sort_by(|a, b| b.0.total_cmp(&a.0));
            let mut left = BEYOND * whole;
            let cut = values.iter().find(|value| {
                left -= value.1;
                left < 0.0
            });
            let on_grid = |x: f64| (x / GRID).round() * GRID;
            away.tilt = on_grid(-mean).max(0.0) / sd;
            away.cut = on_grid(cut.map_or(mean, |cut| cut.0));
            // Where values are bounded nearly as well without a cut, there is none.
            if away.log_most(away.end) < away.log_most(away.cut) + UNCUT {
                away.cut = away.end;
            }
            // Half of the samples on the lower plane are to count: more say little about how fast their share falls.
            let counts = |place: f64| {
                let near = values.iter().filter(|value| (value.0 - place).abs() < 2.0 * GRID);
                near.fold([0, 0], |[all, count], value| [all + 1, count + usize::from(value.1 > 0.0)])
            };
            let half = (2..APART).find(|&steps| {
                let [all, count] = counts(away.cut - steps as f64 * GRID);
                2 * count >= all
            });
            away.lower = away.cut - half.unwrap_or(APART) as f64 * GRID;
        }
        away
    }

    /// The number that all patterns share.
    fn shared(&self, rng: &mut ChaCha8Rng) -> f64 {
        let white: f64 = StandardNormal.sample(rng);
        self.common.sqrt() * white
    }

    /// White noise for one sample.
    fn whiten(&self, lane: usize, rng: &mut ChaCha8Rng, batch: &mut Batch) {
        let size = self.bins * self.epochs;
        batch.white[..size].iter_mut().for_each(|row| row[lane] = StandardNormal.sample(rng));
    }

    /// `⟨Ce_s, z⟩/σ` of the white noise `z`.
    fn project(&self, batch: &mut Batch) {
        project(&self.root, self.width, &batch.white, &mut batch.terms);
    }

    /// `e^{a_s}` from `a_s + X_ss/2`.
    fn exponentials(&self, batch: &mut Batch) {
        for (row, half) in batch.terms.iter_mut().zip(&self.half) {
            row.iter_mut().for_each(|y| *y -= half);
        }
        exp_all(batch.terms.as_flattened_mut());
    }

    /// `L` from `e^{a_s}`, but for what all patterns share.
    fn chain(&self, batch: &mut Batch) -> Lanes {
        let (b, reach) = (self.bins, self.width - 1);
        let Batch { terms, forward, .. } = batch;
        let mut losses = [0.0; LANES];
        for e in 0..self.epochs {
            let (done, rest) = forward.split_at_mut(e * b);
            let now = &mut rest[..b];
            now.copy_from_slice(&terms[e * b..][..b]);
            if e > 0 {
                couple(&self.cross[(e - 1) * reach * reach..][..reach * reach], &done[e * b - reach..], now);
            }
            let totals = total(now).map(|total| total.max(f64::MIN_POSITIVE));
            losses.iter_mut().zip(totals).for_each(|(loss, total)| *loss += (total / b as f64).ln());
            scale(now, &totals.map(|total| 1.0 / total));
        }
        losses
    }

    /// The posterior probability of every step of one sample, from what a chain left at the batch.
    fn posterior(&self, batch: &Batch, lane: usize) -> Vec<f64> {
        let (b, reach) = (self.bins, self.width - 1);
        let [terms, forward] =
            [&batch.terms, &batch.forward].map(|rows| rows.iter().map(|row| row[lane]).collect::<Vec<f64>>());
        let mut backward = vec![1.0; b];
        let mut out = vec![0.0; b * self.epochs];
        for e in (0..self.epochs).rev() {
            let now = &mut out[e * b..][..b];
            now.iter_mut().zip(&forward[e * b..]).zip(&backward).for_each(|((w, f), g)| *w = f * g);
            let total = sum(now);
            now.iter_mut().for_each(|w| *w /= total);
            if e > 0 {
                let term: Vec<f64> =
                    terms[e * b..][..b].iter().zip(&backward).map(|(term, g)| term * g).collect();
                let total = sum(&term);
                backward.fill(1.0);
                let cross = &self.cross[(e - 1) * reach * reach..][..reach * reach];
                for (q, row) in cross.chunks_exact(reach.max(1)).enumerate() {
                    for i in q..reach {
                        backward[b - reach + i] += row[i] * term[q] / total;
                    }
                }
            }
        }
        out
    }

    /// `E[w_s w_t]` by the distance of `s` and `t`, up to an epoch, `w` the posterior of the steps where the loss is about ε, or −ε for a
    /// unit that leaves, or as near to it as samples came.
    pub fn correlation(&self, side: Side, samples: usize) -> Option<Vec<f64>> {
        /// Standard deviations of the losses that count as ε.
        const WIDTHS: [f64; 3] = [0.2, 0.4, 1.6];
        WIDTHS.into_iter().find_map(|width| self.correlation_within(side, width, samples))
    }

    fn correlation_within(&self, side: Side, width: f64, samples: usize) -> Option<Vec<f64>> {
        let (joined, away) = (self.joined().0, self.away());
        let lags = self.bins + 1;
        let parts: Vec<Vec<f64>> = (0..samples.div_ceil(CHUNK))
            .into_par_iter()
            .map(|chunk| {
                let (mut rng, mut batch) = (self.rng(0, chunk), self.batch());
                let mut total = vec![0.0; lags + 1];
                for _ in 0..CHUNK / LANES {
                    // Both are means under Q of what happens at the boundary.
                    let samples = match side {
                        Side::Joining => self
                            .join(joined, &mut rng, &mut batch)
                            .map(|Sample { log_weight, loss }| (log_weight - loss, loss - self.epsilon)),
                        Side::Leaving => self
                            .lean(&away, &mut rng, &mut batch)
                            .map(|Leaning { mean, loss }| (away.log_weight(mean), loss + self.epsilon)),
                    };
                    for (lane, (log_weight, off)) in samples.into_iter().enumerate() {
                        let off = off / width;
                        if off.abs() > 4.0 {
                            continue;
                        }
                        let weight = (log_weight - 0.5 * off * off).exp();
                        let w = self.posterior(&batch, lane);
                        for (lag, sum) in total[..lags.min(w.len())].iter_mut().enumerate() {
                            *sum += weight * dot(&w[lag..], &w[..w.len() - lag]) / (w.len() - lag) as f64;
                        }
                        total[lags] += weight;
                    }
                }
                total
            })
            .collect();
        let mut total = vec![0.0; lags + 1];
        parts.iter().for_each(|part| total.iter_mut().zip(part).for_each(|(a, b)| *a += b));
        let weight = total.pop().filter(|weight| *weight > 0.0)?;
        total.iter_mut().for_each(|x| *x /= weight);
        Some(total)
    }

    fn rng(&self, direction: usize, chunk: usize) -> ChaCha8Rng {
        let mut rng = ChaCha8Rng::from_seed(self.seeds[direction]);
        rng.set_stream(chunk as u64);
        rng
    }

    /// Parts of the samples, on all threads, taken in order.
    ///
    /// Errors: [`Error::Interrupted`].
    fn in_chunks<T: Send>(
        &self,
        chunks: usize,
        watch: Watch<'_>,
        part: impl Fn(usize) -> T + Sync,
        mut take: impl FnMut(usize, T),
    ) -> Result<()> {
        let together = 4 * rayon::current_num_threads();
        let mut done = 0;
        while done < chunks {
            if watch(done as f64 / chunks as f64).is_break() {
                return Err(Error::Interrupted { iterations: 0, gap: f64::INFINITY });
            }
            let next = done..(done + together).min(chunks);
            let parts: Vec<T> = next.clone().into_par_iter().map(&part).collect();
            next.clone().zip(parts).for_each(|(chunk, part)| take(chunk, part));
            done = next.end;
        }
        Ok(())
    }

    /// The mean of values in `[0, e^{log_range}]` and a bound on it, by bets. The same to the bit on any number of threads.
    fn bound(
        &self,
        direction: usize,
        log_range: f64,
        samples: usize,
        share: usize,
        watch: Watch<'_>,
        values_of: impl Fn(&mut ChaCha8Rng, &mut Batch) -> [f64; LANES] + Sync,
    ) -> Result<Estimate> {
        let chunks = samples.div_ceil(CHUNK * share).max(2);
        let part = |chunk: usize| {
            let (mut rng, mut batch) = (self.rng(direction, chunk), self.batch());
            (0..CHUNK / LANES).flat_map(|_| values_of(&mut rng, &mut batch)).collect::<Vec<f64>>()
        };
        let mut values: Vec<f64> = Vec::with_capacity(chunks * CHUNK);
        self.in_chunks(chunks, watch, part, |_, part| values.extend(part))?;
        Ok(estimate(&values, log_range, log_failure(), share))
    }
}

impl Away {
    /// The logarithm of the density of noise over that of noise that leans away, by the mean of the patterns along it.
    fn log_weight(&self, mean: f64) -> f64 {
        self.tilt * mean + 0.5 * self.tilt * self.tilt * self.spread
    }

    /// The logarithm of what no value exceeds where `ȳ` is below a number of standard deviations. By Jensen's inequality a value is at most
    /// its weight times `1 − e^{−a}`, `a` the distance to where all values are zero.
    fn log_most(&self, cut: f64) -> f64 {
        let sd = self.spread.sqrt();
        // Largest where e^{−a} = λ/(1 + λ), or at the cut.
        let best = (self.end * sd - (1.0 / self.tilt).ln_1p()).min(cut * sd);
        self.log_weight(best) + (-(best - self.end * sd).exp_m1()).ln()
    }
}

/// The mean of values in `[0, e^{log_range}]`, and a bound on it that fails with a probability of `e^{−log}`.
fn estimate(values: &[f64], log_range: f64, log: f64, share: usize) -> Estimate {
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    // What rounding in double precision may hide, many times over.
    let range = log_range.exp() * (1.0 + 1e-9);
    let upper = match range.is_finite() {
        true => bet::upper(values, range, log, share as f64),
        false => f64::INFINITY,
    };
    Estimate { mean, upper: upper.min(range) * (1.0 + 1e-9), range }
}

/// The inner product, in an order that suits the processor and is always the same.
#[inline]
fn dot(x: &[f64], y: &[f64]) -> f64 {
    const LANES: usize = 8;
    let n = x.len().min(y.len());
    let (x, y) = (&x[..n], &y[..n]);
    let mut lanes = [0.0; LANES];
    let (xs, ys) = (x.chunks_exact(LANES), y.chunks_exact(LANES));
    let rest: f64 = xs.remainder().iter().zip(ys.remainder()).map(|(x, y)| x * y).sum();
    for (x, y) in xs.zip(ys) {
        for k in 0..LANES {
            lanes[k] += x[k] * y[k];
        }
    }
    lanes.iter().sum::<f64>() + rest
}
