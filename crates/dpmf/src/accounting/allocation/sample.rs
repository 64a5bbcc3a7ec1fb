//! The two samplers, and their confidence bounds.

use super::{Allocation, Estimate, FAILURE, PROOFS, TRIES, Watch};
use crate::error::{Error, Result};
use crate::simd::dispatch;
use chacha20::ChaCha8Rng;
use faer::linalg::matmul::matmul;
use faer::{Accum, Mat, MatMut, Par};
use rand::{RngExt, SeedableRng};
use rand_distr::{Distribution, StandardNormal};
use rayon::prelude::*;
use sha2::{Digest, Sha256};

/// What random numbers are for. Those of a proof are used for nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Looking around.
    Search,
    /// The bound that is stated.
    Proof,
}

/// Where (ε, δ) is reached, and in what direction it moves with the Gram matrix.
pub(crate) struct Boundary {
    /// Logarithm of the noise multiplier.
    pub log_sigma: f64,
    /// `E|ŵ_j|²` for `j = 0, …, b − 1`, `w` the posterior over bins at the boundary and `ŵ` its Fourier transform. On average
    /// over rotations, `d log σ = ⟨H, dG⟩/(2⟨H, G⟩)` with the circulant matrix `H = E[w wᵀ]` that has these eigenvalues.
    /// Nothing where no sample came near the boundary.
    pub spectrum: Option<Vec<f64>>,
}

/// Samples that one generator makes, one after the other.
const CHUNK: usize = 512;

/// Most bins that are joined to tilt a sample.
const JOINED: usize = 48;

/// A Gram matrix over σ², ready to be sampled.
pub(super) struct Sampler {
    bins: usize,
    epsilon: f64,
    seed: [u8; 32],
    /// `G`, its entries' exponentials, and half its diagonal.
    gram: Vec<f64>,
    exponentials: Vec<f64>,
    half: Vec<f64>,
    root: Mat<f64>,
}

/// What one sample is worth: its weight and its privacy loss.
struct Sample {
    log_weight: f64,
    loss: f64,
}

impl Sampler {
    pub fn new(
        allocation: &Allocation,
        noise_multiplier: f64,
        epsilon: f64,
        purpose: Purpose,
    ) -> Result<Self> {
        let over = noise_multiplier.powi(-2);
        let gram: Vec<f64> = allocation.gram.iter().map(|g| g * over).collect();
        let bins = allocation.bins;
        let half = (0..bins).map(|p| 0.5 * gram[p * bins + p]).collect();
        let mut exponentials = gram.clone();
        exp_all(&mut exponentials);
        let root = allocation.root(noise_multiplier)?;
        let mut hash = Sha256::new();
        match purpose {
            Purpose::Search => hash.update(b"dpmf bins search"),
            Purpose::Proof => {
                hash.update(b"dpmf bins proof");
                hash.update(allocation.subject);
                hash.update(noise_multiplier.to_le_bytes());
                hash.update(epsilon.to_le_bytes());
            }
        }
        let seed = hash.finalize().into();
        Ok(Self { bins, epsilon, seed, gram, exponentials, half, root })
    }

    /// `E_P[(1 − e^{ε−L})_+]`, from a share of the samples, with the bound that all of them would be expected to give.
    ///
    /// Errors: [`Error::Interrupted`].
    pub fn joining(&self, samples: usize, share: usize, watch: Watch<'_>) -> Result<Estimate> {
        let (joined, log_range) = self.joined();
        let value = |sample: Sample, _: &[f64]| {
            let over = -(self.epsilon - sample.loss).exp_m1();
            if over > 0.0 { (sample.log_weight).exp() * over } else { 0.0 }
        };
        self.bound(log_range, samples, share, watch, |rng, out| self.join(joined, rng, out, value))
    }

    /// `E_Q[(1 − e^{ε+L})_+]`, likewise.
    pub fn leaving(&self, samples: usize, share: usize, watch: Watch<'_>) -> Result<Estimate> {
        let b = self.bins as f64;
        let toward: Vec<f64> =
            self.gram.chunks_exact(self.bins).map(|row| row.iter().sum::<f64>() / b).collect();
        let spread = toward.iter().sum::<f64>() / b;
        let distance = self.epsilon - self.half.iter().sum::<f64>() / b;
        let tilt = (distance / spread).max(0.0);
        let log_range = 0.5 * tilt * tilt * spread - tilt * distance + log_peak(tilt);
        if log_range < -100.0 {
            let range = log_range.exp();
            return Ok(Estimate { mean: 0.0, upper: range, range });
        }
        let log_shift = 0.5 * tilt * tilt * spread;
        self.bound(log_range, samples, share, watch, |rng, out| {
            let mut y = self.normal(rng, out.len());
            for (k, out) in out.iter_mut().enumerate() {
                let y = y.col_as_slice_mut(k);
                y.iter_mut().zip(&toward).for_each(|(y, m)| *y -= tilt * m);
                let log_weight = tilt * y.iter().sum::<f64>() / b + log_shift;
                let over = -(self.epsilon + self.loss(y)).exp_m1();
                *out = if over > 0.0 { log_weight.exp() * over } else { 0.0 };
            }
        })
    }

    /// `E|ŵ_j|²` where the loss is about ε, or as near to it as samples came.
    pub fn spectrum(&self, samples: usize) -> Option<Vec<f64>> {
        /// Standard deviations of the losses that count as ε.
        const WIDTHS: [f64; 3] = [0.1, 0.4, 1.6];
        WIDTHS.into_iter().find_map(|width| self.spectrum_within(width, samples))
    }

    fn spectrum_within(&self, width: f64, samples: usize) -> Option<Vec<f64>> {
        let (b, (joined, _)) = (self.bins, self.joined());
        let table: Vec<[f64; 2]> = (0..b)
            .map(|k| std::f64::consts::TAU * k as f64 / b as f64)
            .map(|angle| [libm::cos(angle), libm::sin(angle)])
            .collect();
        let chunks = samples.div_ceil(CHUNK);
        let parts: Vec<Vec<f64>> = (0..chunks)
            .into_par_iter()
            .map(|chunk| {
                let mut total = vec![0.0; b + 1];
                let value = |sample: Sample, terms: &[f64]| {
                    let off = (sample.loss - self.epsilon) / width;
                    let weight = (sample.log_weight - sample.loss - 0.5 * off * off).exp();
                    if off.abs() < 5.0 {
                        let sum: f64 = terms.iter().sum();
                        for j in 0..=b / 2 {
                            let mut parts = [0.0; 2];
                            for (p, term) in terms.iter().enumerate() {
                                let [cos, sin] = table[p * j % b];
                                parts[0] += term * cos;
                                parts[1] += term * sin;
                            }
                            total[j] += weight * (parts[0].powi(2) + parts[1].powi(2)) / (sum * sum);
                        }
                        total[b] += weight;
                    }
                    0.0
                };
                let mut unused = vec![0.0; CHUNK];
                self.join(joined, &mut self.rng(chunk), &mut unused, value);
                total
            })
            .collect();
        let mut total = vec![0.0; b + 1];
        parts.iter().for_each(|part| total.iter_mut().zip(part).for_each(|(a, b)| *a += b));
        (total[b] > 0.0).then(|| (0..b).map(|j| total[j.min(b - j)] / total[b]).collect())
    }

    /// The number of bins to join that bounds the values best, and the logarithm of the bound.
    fn joined(&self) -> (usize, f64) {
        let b = self.bins;
        let largest = self.gram.iter().copied().fold(0.0, f64::max);
        // Weights of bins are products of as many exponentials: they must not overflow.
        let most = ((600.0 / largest.max(1e-9)) as usize).clamp(1, JOINED);
        let mut best = (1, 0.0);
        let mut powers = vec![1.0; b * b];
        let mut log_zeta = 0.0;
        for k in 2..=most {
            powers.iter_mut().zip(&self.exponentials).for_each(|(power, e)| *power *= e);
            let rows = powers.chunks_exact(b).map(|row| row.iter().sum::<f64>() / b as f64);
            // A sum of positive terms, each a product of k: rounded up.
            log_zeta += (rows.fold(0.0, f64::max) * (1.0 + (b + 8 * k) as f64 * f64::EPSILON)).ln();
            let log_range = log_zeta - (k as f64 - 1.0) * self.epsilon + log_peak(k as f64 - 1.0);
            // Every bin takes its time: one that hardly lowers the bound is not worth it.
            if log_range < best.1 - 0.02 * (k - best.0) as f64 {
                best = (k, log_range);
            }
        }
        best
    }

    /// Fills `out` with values of samples that join `k` bins.
    fn join(
        &self,
        k: usize,
        rng: &mut ChaCha8Rng,
        out: &mut [f64],
        mut value: impl FnMut(Sample, &[f64]) -> f64,
    ) {
        let b = self.bins;
        let mut y = self.normal(rng, out.len());
        let mut weights = vec![0.0; b];
        for (sample, out) in out.iter_mut().enumerate() {
            let y = y.col_as_slice_mut(sample);
            weights.fill(1.0);
            let mut log_totals = 0.0;
            let mut product = 1.0;
            for _ in 0..k {
                let total = sum(&weights);
                product *= total / b as f64;
                if product > 1e250 {
                    (log_totals, product) = (log_totals + product.ln(), 1.0);
                }
                let row = pick(&weights, rng.random::<f64>() * total) * b;
                multiply(&mut weights, &self.exponentials[row..][..b]);
                y.iter_mut().zip(&self.gram[row..]).for_each(|(y, g)| *y += g);
            }
            log_totals += product.ln();
            let loss = self.loss(y);
            let log_weight = log_totals - (k as f64 - 1.0) * loss;
            // `loss` left the exponentials of u in y.
            *out = value(Sample { log_weight, loss }, y);
        }
    }

    /// `L`, from `⟨m_p, x⟩/σ²`, of which `e^{u_p}` are left.
    fn loss(&self, y: &mut [f64]) -> f64 {
        y.iter_mut().zip(&self.half).for_each(|(y, half)| *y -= half);
        exp_all(y);
        (sum(y) / self.bins as f64).max(f64::MIN_POSITIVE).ln()
    }

    /// Columns of Gaussian numbers with covariance `G`.
    fn normal(&self, rng: &mut ChaCha8Rng, count: usize) -> Mat<f64> {
        let b = self.bins;
        let white: Vec<f64> = (0..b * count).map(|_| StandardNormal.sample(rng)).collect();
        let mut out = Mat::zeros(b, count);
        let white = faer::MatRef::from_column_major_slice(&white, b, count);
        let destination: MatMut<'_, f64> = out.as_mut();
        matmul(destination, Accum::Replace, self.root.as_ref(), white, 1.0, Par::Seq);
        out
    }

    fn rng(&self, chunk: usize) -> ChaCha8Rng {
        let mut rng = ChaCha8Rng::from_seed(self.seed);
        rng.set_stream(chunk as u64);
        rng
    }

    /// The mean of values in `[0, e^{log_range}]`, bounded by the empirical Bernstein inequality. The same to the bit on any
    /// number of threads.
    fn bound(
        &self,
        log_range: f64,
        samples: usize,
        share: usize,
        watch: Watch<'_>,
        fill: impl Fn(&mut ChaCha8Rng, &mut [f64]) + Sync,
    ) -> Result<Estimate> {
        let chunks = samples.div_ceil(CHUNK * share).max(1);
        let part = |chunk: usize| {
            let mut values = vec![0.0; CHUNK];
            fill(&mut self.rng(chunk), &mut values);
            let sum: f64 = values.iter().sum();
            let mean = sum / CHUNK as f64;
            (mean, values.iter().map(|x| (x - mean).powi(2)).sum::<f64>())
        };
        let together = rayon::current_num_threads();
        let mut parts: Vec<(f64, f64)> = Vec::with_capacity(chunks);
        while parts.len() < chunks {
            if watch(parts.len() as f64 / chunks as f64).is_break() {
                return Err(Error::Interrupted { iterations: 0, gap: f64::INFINITY });
            }
            let next = parts.len()..(parts.len() + together).min(chunks);
            parts.par_extend(next.into_par_iter().map(part));
        }
        let count = (chunks * CHUNK) as f64;
        let mean = parts.iter().map(|(mean, _)| mean).sum::<f64>() / chunks as f64;
        let within: f64 = parts.iter().map(|(_, within)| within).sum();
        let between: f64 = parts.iter().map(|(part, _)| CHUNK as f64 * (part - mean).powi(2)).sum();
        let variance = (within + between) / (count - 1.0);
        let (range, count) = (log_range.exp(), count * share as f64);
        // Two directions, and all the bounds that may be looked at.
        let log = (2.0 * 2.0 * (TRIES * PROOFS) as f64 / FAILURE).ln();
        let upper = mean + (2.0 * variance * log / count).sqrt() + 7.0 * range * log / (3.0 * (count - 1.0));
        // What rounding in double precision may hide, many times over.
        Ok(Estimate { mean, upper: upper.min(range) * (1.0 + 1e-9), range })
    }
}

/// Numbers that are added up side by side.
const LANES: usize = 8;

/// The sum, in an order that suits the processor and is always the same.
#[inline]
fn sum(x: &[f64]) -> f64 {
    let chunks = x.chunks_exact(LANES);
    let rest: f64 = chunks.remainder().iter().sum();
    let mut lanes = [0.0; LANES];
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane += x;
        }
    }
    lanes.iter().sum::<f64>() + rest
}

/// The place at which the running sum of weights passes a number.
#[inline]
fn pick(weights: &[f64], mut left: f64) -> usize {
    let mut place = 0;
    for chunk in weights.chunks(LANES) {
        let part: f64 = chunk.iter().sum();
        if left < part {
            break;
        }
        left -= part;
        place += chunk.len();
    }
    let place = place.min(weights.len() - 1);
    for (k, weight) in weights[place..].iter().enumerate() {
        left -= weight;
        if left < 0.0 {
            return place + k;
        }
    }
    weights.len() - 1
}

#[inline]
fn multiply(weights: &mut [f64], by: &[f64]) {
    weights.iter_mut().zip(by).for_each(|(weight, by)| *weight *= by);
}

/// The logarithm of `max_a e^{−ta}(1 − e^{−a}) = t^t/(t + 1)^{t+1}`.
fn log_peak(t: f64) -> f64 {
    if t > 0.0 { t * t.ln() - (t + 1.0) * (t + 1.0).ln() } else { 0.0 }
}

dispatch! {
    /// `e^x` of every number, to a few units in the last place; numbers beyond ±700 count as that.
    fn exp_all / exp_all_portable / exp_all_avx2 = exp_all_any(x: &mut [f64]);
}

#[inline(always)]
fn exp_all_any(x: &mut [f64]) {
    const LN_2: [f64; 2] = [0.693_147_180_369_123_8, 1.908_214_929_270_587_7e-10];
    // Numbers of this size have no fraction, and their last bits are the integer that was added.
    const WHOLE: f64 = 6_755_399_441_055_744.0;
    for x in x {
        let clamped = x.clamp(-700.0, 700.0);
        let shifted = clamped * std::f64::consts::LOG2_E + WHOLE;
        let whole = shifted - WHOLE;
        let r = (clamped - whole * LN_2[0]) - whole * LN_2[1];
        let mut sum = 1.0 / 6_227_020_800.0;
        for k in (0..13).rev() {
            sum = sum * r + RECIPROCAL_FACTORIALS[k];
        }
        *x = sum * f64::from_bits(shifted.to_bits().wrapping_add(1023) << 52);
    }
}

const RECIPROCAL_FACTORIALS: [f64; 13] = {
    let mut out = [1.0; 13];
    let mut k = 1;
    let mut factorial = 1.0;
    while k < 13 {
        factorial *= k as f64;
        out[k] = 1.0 / factorial;
        k += 1;
    }
    out
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponentials() {
        let mut x: Vec<f64> = (-7000..7000).map(|k| f64::from(k) * 0.1).collect();
        let exact: Vec<f64> = x.iter().map(|x| libm::exp(*x)).collect();
        exp_all(&mut x);
        for (x, exact) in x.iter().zip(&exact) {
            assert!((x - exact).abs() <= 4.0 * f64::EPSILON * exact, "{x} {exact}");
        }
    }
}
