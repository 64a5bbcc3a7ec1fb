//! The two samplers, and their confidence bounds.

use super::Reshuffled;
use super::tail::{self, Counts};
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
use std::sync::OnceLock;

/// Samples that one generator makes, one after the other.
const CHUNK: usize = 512;

/// Most patterns that are joined to tilt a sample.
const JOINED: usize = 64;

/// Share of the samples of leaving that are drawn from the law that bounds their values.
const BOUNDING: f64 = 0.6;

/// What the bound of leaving may add to that of joining, as a share of it.
const ADDED: f64 = 0.02;

/// How many times the samples of leaving that there are may be asked for before their values are not bounded but their tail is extrapolated.
const BEYOND: f64 = 100.0;

/// What rounding may move a loss by, many times over.
const ROUNDING: f64 = 1e-9;

/// The chain at a noise multiplier, ready to be sampled.
pub(super) struct Sampler {
    pub bins: usize,
    pub epochs: usize,
    pub width: usize,
    epsilon: f64,
    /// Seeds for joining and for leaving.
    seeds: [[u8; 32]; 2],
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
struct Sample {
    log_weight: f64,
    loss: f64,
}

/// Room for one sample.
struct Scratch {
    white: Vec<f64>,
    /// `e^{a_s}` at first.
    terms: Vec<f64>,
    weights: Vec<f64>,
    totals: Vec<f64>,
    /// What was summed up over the epochs before, for each bin of each epoch, normalised.
    forward: Vec<f64>,
}

/// How samples lean away from all patterns.
pub(super) struct Away {
    /// `⟨C1/b, Ce_s⟩/σ²`, and the variance of `ȳ`.
    toward: Vec<f64>,
    spread: f64,
    /// λ of the law that bounds all values, and of the law that most samples count under.
    tilts: [f64; 2],
    log_range: f64,
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
        let seed = |direction: &[u8]| {
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
            seeds: [seed(b"joining"), seed(b"leaving")],
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

    fn scratch(&self) -> Scratch {
        let size = self.bins * self.epochs;
        Scratch {
            white: vec![0.0; size + self.width],
            terms: vec![0.0; size],
            weights: vec![0.0; size],
            totals: vec![0.0; self.epochs],
            forward: vec![0.0; size],
        }
    }

    /// `E_P[(1 − e^{ε−L})_+]`, from a share of the samples, with the bound that all of them would be expected to give.
    ///
    /// Errors: [`Error::Interrupted`].
    pub fn joining(&self, samples: usize, share: usize, watch: Watch<'_>) -> Result<Estimate> {
        let (joined, log_range) = self.joined();
        self.bound(0, log_range, samples, share, watch, |rng, scratch| {
            let sample = self.join(joined, rng, scratch);
            let over = -(self.epsilon - sample.loss).exp_m1();
            if over > 0.0 { sample.log_weight.exp() * over } else { 0.0 }
        })
    }

    /// `E_Q[(1 − e^{ε+L})_+]`, likewise, from as many samples, up to a limit, as bound it well enough beside a bound of joining.
    pub fn leaving(&self, beside: f64, most: usize, share: usize, watch: Watch<'_>) -> Result<Estimate> {
        let away = self.away();
        let log_range = away.log_range - BOUNDING.ln();
        let range = log_range.exp();
        // Where nothing is asked of it, it is small.
        if range <= ADDED * beside || log_range < -200.0 {
            return Ok(Estimate { mean: 0.0, upper: range, range });
        }
        // The joining bound has other random numbers: looking at it is free. A power of two, so that rounding on another machine
        // does not change it.
        let enough = 1.5 * range * log_failure() / (ADDED * beside).max(1e-300);
        if enough > BEYOND * most as f64 {
            return self.extrapolated(&away, most, share, watch);
        }
        let samples = (enough.min(most as f64) as usize).max(1 << 14).next_power_of_two();
        self.bound(1, log_range, samples, share, watch, |rng, scratch| {
            let sample = self.leave(&away, rng, scratch);
            let over = -(self.epsilon + sample.loss).exp_m1();
            if over > 0.0 { sample.log_weight.exp() * over } else { 0.0 }
        })
    }

    /// The same from the tail of the loss, with no bound on values: half of the samples have a loss about −ε, half are on the way there.
    ///
    /// Errors: [`Error::Interrupted`].
    pub fn extrapolated(
        &self,
        away: &Away,
        samples: usize,
        share: usize,
        watch: Watch<'_>,
    ) -> Result<Estimate> {
        let twice = away.tilts[1];
        let tilts = [0.5 * twice, twice];
        let chunks = samples.div_ceil(CHUNK * share).next_multiple_of(2).max(2);
        let part = |chunk: usize| {
            let (mut rng, mut scratch) = (self.rng(1, chunk), self.scratch());
            let (mut counts, mut total) = (Counts::new(), 0.0);
            let side = chunk % 2;
            // Rounding makes the one more and the other less.
            let slack = if side == 0 { ROUNDING } else { -ROUNDING };
            for _ in 0..CHUNK {
                let (mean, loss) = self.lean(tilts[side], &away.toward, &mut rng, &mut scratch);
                let beyond = -self.epsilon - loss;
                counts.take(beyond + slack);
                if side == 1 && beyond > 0.0 {
                    let log_weight = twice * mean + 0.5 * twice * twice * away.spread;
                    total += log_weight.exp() * -(-beyond).exp_m1();
                }
            }
            (counts, total)
        };
        let mut counts = [Counts::new(), Counts::new()];
        let mut total = 0.0;
        self.in_chunks(chunks, watch, part, |chunk, (part, value)| {
            counts[chunk % 2].add(&part);
            total += value;
        })?;
        let mean = total / (chunks / 2 * CHUNK) as f64;
        let upper = tail::bound(&counts[0], &counts[1], share as f64);
        Ok(Estimate { mean, upper, range: 1.0 })
    }

    /// The same that joins as many patterns as bring the loss to ε: for estimates, of which nothing is bounded.
    pub fn joining_enough(self) -> Self {
        let side = 2 * self.width - 1;
        let mean = self.gram.iter().sum::<f64>() / (self.bins * self.bins) as f64 + self.common;
        let largest = self.gram.chunks_exact(side).map(|row| row.iter().sum::<f64>()).fold(0.0, f64::max);
        // Weights of bins are products of as many exponentials: they must not overflow.
        let most = ((600.0 / largest.max(1e-9)) as usize).clamp(1, JOINED);
        let patterns = (self.epsilon / mean + 0.5).round().clamp(1.0, most as f64) as usize;
        Self { joined: OnceLock::from((patterns, f64::INFINITY)), ..self }
    }

    /// The number of patterns to join that bounds the values best, and the logarithm of the bound.
    pub fn joined(&self) -> (usize, f64) {
        *self.joined.get_or_init(|| {
            let side = 2 * self.width - 1;
            let largest = self.gram.chunks_exact(side).map(|row| row.iter().sum::<f64>()).fold(0.0, f64::max);
            // Weights of bins are products of as many exponentials: they must not overflow.
            let most = ((600.0 / largest.max(1e-9)) as usize).clamp(1, JOINED);
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

    /// A sample that joins `k` patterns; leaves the terms of the chain at the scratch.
    fn join(&self, k: usize, rng: &mut ChaCha8Rng, scratch: &mut Scratch) -> Sample {
        let (b, w, side) = (self.bins, self.width, 2 * self.width - 1);
        let size = b * self.epochs;
        self.white(rng, scratch);
        let Scratch { terms, weights, totals, .. } = scratch;
        weights.fill(1.0);
        totals.fill(b as f64);
        let mut log_weight = 0.5 * self.common * (k * (k - 1)) as f64;
        let mut steps = [0_usize; 64];
        let mut many = Vec::new();
        let steps: &mut [usize] = match self.epochs {
            epochs @ 0..=64 => &mut steps[..epochs],
            epochs => {
                many.resize(epochs, 0);
                &mut many
            }
        };
        for _ in 0..k {
            let mut product = 1.0_f64;
            for (e, step) in steps.iter_mut().enumerate() {
                product *= totals[e] / b as f64;
                if product > 1e250 {
                    (log_weight, product) = (log_weight + product.ln(), 1.0);
                }
                *step = e * b + pick(&weights[e * b..][..b], rng.random::<f64>() * totals[e]);
            }
            log_weight += product.ln();
            for &s in &*steps {
                let (from, to) = ((s + 1).saturating_sub(w), (s + w).min(size));
                let raise = &self.raise[s * side + w - 1 + from - s..];
                weights[from..to].iter_mut().zip(raise).for_each(|(weight, by)| *weight *= by);
            }
            totals.iter_mut().zip(weights.chunks_exact(b)).for_each(|(total, bins)| *total = sum(bins));
        }
        terms.iter_mut().zip(&*weights).for_each(|(term, weight)| *term *= weight);
        let shift = self.shared(rng) + (k as f64 - 0.5) * self.common;
        let loss = self.chain(scratch) + shift;
        Sample { log_weight: log_weight - (k as f64 - 1.0) * loss, loss }
    }

    /// A sample that leans away from all patterns.
    fn leave(&self, away: &Away, rng: &mut ChaCha8Rng, scratch: &mut Scratch) -> Sample {
        let tilt = away.tilts[usize::from(rng.random::<f64>() >= BOUNDING)];
        let (mean, loss) = self.lean(tilt, &away.toward, rng, scratch);
        let log_density = |tilt: f64, share: f64| share.ln() - tilt * mean - 0.5 * tilt * tilt * away.spread;
        let (p, q) = (log_density(away.tilts[0], BOUNDING), log_density(away.tilts[1], 1.0 - BOUNDING));
        let log_weight = -(p.max(q) + (-(p - q).abs()).exp().ln_1p());
        Sample { log_weight, loss }
    }

    /// The mean of the patterns along noise that leans away from them, and the loss there.
    fn lean(&self, tilt: f64, toward: &[f64], rng: &mut ChaCha8Rng, scratch: &mut Scratch) -> (f64, f64) {
        self.normal(rng, scratch);
        let Scratch { terms, .. } = scratch;
        terms.iter_mut().zip(toward).for_each(|(y, m)| *y -= tilt * m);
        let shared = self.shared(rng) - tilt * self.common;
        let mean = sum(terms) / self.bins as f64 + shared;
        terms.iter_mut().zip(&self.half).for_each(|(y, half)| *y -= half);
        exp_all(terms);
        (mean, self.chain(scratch) + shared - 0.5 * self.common)
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
        let typical = ((self.epsilon - 0.5 * spread) / spread).max(bounding);
        Away { toward, spread, tilts: [bounding, typical], log_range: log_range(bounding) }
    }

    /// The number that all patterns share.
    fn shared(&self, rng: &mut ChaCha8Rng) -> f64 {
        let white: f64 = StandardNormal.sample(rng);
        self.common.sqrt() * white
    }

    /// `⟨Ce_s, z⟩/σ` for white noise `z`.
    fn normal(&self, rng: &mut ChaCha8Rng, scratch: &mut Scratch) {
        let (w, size) = (self.width, self.bins * self.epochs);
        let Scratch { white, terms, .. } = scratch;
        white[..size].iter_mut().for_each(|z| *z = StandardNormal.sample(rng));
        for (s, (y, column)) in terms.iter_mut().zip(self.root.chunks_exact(w)).enumerate() {
            *y = dot(column, &white[s..s + w]);
        }
    }

    /// `e^{⟨Ce_s, z⟩/σ − X_ss/2}`.
    fn white(&self, rng: &mut ChaCha8Rng, scratch: &mut Scratch) {
        self.normal(rng, scratch);
        scratch.terms.iter_mut().zip(&self.half).for_each(|(y, half)| *y -= half);
        exp_all(&mut scratch.terms);
    }

    /// `L` from `e^{a_s}`, but for what all patterns share.
    fn chain(&self, scratch: &mut Scratch) -> f64 {
        let (b, reach) = (self.bins, self.width - 1);
        let Scratch { terms, forward, .. } = scratch;
        let mut loss = 0.0;
        for e in 0..self.epochs {
            let (done, rest) = forward.split_at_mut(e * b);
            let now = &mut rest[..b];
            now.copy_from_slice(&terms[e * b..][..b]);
            if e > 0 {
                let last = &done[e * b - reach..];
                let cross = &self.cross[(e - 1) * reach * reach..][..reach * reach];
                for (q, row) in cross.chunks_exact(reach.max(1)).enumerate() {
                    now[q] *= 1.0 + dot(&row[q..], &last[q..]);
                }
            }
            let total = sum(now).max(f64::MIN_POSITIVE);
            loss += (total / b as f64).ln();
            now.iter_mut().for_each(|x| *x /= total);
        }
        loss
    }

    /// The posterior probability of every step, from what a chain left at the scratch.
    fn posterior(&self, scratch: &Scratch) -> Vec<f64> {
        let (b, reach) = (self.bins, self.width - 1);
        let mut backward = vec![1.0; b];
        let mut out = vec![0.0; b * self.epochs];
        for e in (0..self.epochs).rev() {
            let now = &mut out[e * b..][..b];
            now.iter_mut().zip(&scratch.forward[e * b..]).zip(&backward).for_each(|((w, f), g)| *w = f * g);
            let total = sum(now);
            now.iter_mut().for_each(|w| *w /= total);
            if e > 0 {
                let term: Vec<f64> =
                    scratch.terms[e * b..][..b].iter().zip(&backward).map(|(term, g)| term * g).collect();
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
                let (mut rng, mut scratch) = (self.rng(0, chunk), self.scratch());
                let mut total = vec![0.0; lags + 1];
                for _ in 0..CHUNK {
                    // Both are means under Q of what happens at the boundary.
                    let (log_weight, off) = match side {
                        Side::Joining => {
                            let Sample { log_weight, loss } = self.join(joined, &mut rng, &mut scratch);
                            (log_weight - loss, loss - self.epsilon)
                        }
                        Side::Leaving => {
                            let Sample { log_weight, loss } = self.leave(&away, &mut rng, &mut scratch);
                            (log_weight, loss + self.epsilon)
                        }
                    };
                    let off = off / width;
                    if off.abs() > 4.0 {
                        continue;
                    }
                    let weight = (log_weight - 0.5 * off * off).exp();
                    let w = self.posterior(&scratch);
                    for (lag, sum) in total[..lags.min(w.len())].iter_mut().enumerate() {
                        *sum += weight * dot(&w[lag..], &w[..w.len() - lag]) / (w.len() - lag) as f64;
                    }
                    total[lags] += weight;
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
        value: impl Fn(&mut ChaCha8Rng, &mut Scratch) -> f64 + Sync,
    ) -> Result<Estimate> {
        let chunks = samples.div_ceil(CHUNK * share).max(2);
        let part = |chunk: usize| {
            let (mut rng, mut scratch) = (self.rng(direction, chunk), self.scratch());
            (0..CHUNK).map(|_| value(&mut rng, &mut scratch)).collect::<Vec<f64>>()
        };
        let mut values: Vec<f64> = Vec::with_capacity(chunks * CHUNK);
        self.in_chunks(chunks, watch, part, |_, part| values.extend(part))?;
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        // What rounding in double precision may hide, many times over.
        let range = log_range.exp() * (1.0 + 1e-9);
        let upper = match range.is_finite() {
            true => bet::upper(&values, range, log_failure(), share as f64),
            false => f64::INFINITY,
        };
        Ok(Estimate { mean, upper: upper.min(range) * (1.0 + 1e-9), range })
    }
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
