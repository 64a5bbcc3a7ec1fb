//! The two samplers, and their confidence bounds.

use super::stream::Stream;
use super::{Allocation, Estimate, Source, Watch, bet, log_failure};
use crate::error::{Error, Result};
use crate::simd::dispatch;
use chacha20::ChaCha8Rng;
use faer::linalg::matmul::matmul;
use faer::{Accum, Mat, MatMut, Par};
use rand::{RngExt, SeedableRng};
use rand_distr::{Distribution, StandardNormal};
use rayon::prelude::*;
use rustfft::FftPlanner;
use rustfft::num_complex::Complex;
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
    /// over rotations, `d log σ = ⟨H, dG⟩/(2⟨H, G⟩)` with the circulant matrix `H = E[w wᵀ]` that has these eigenvalues. Where
    /// joining and leaving need about as much noise, it is the mean of both, each over its `⟨H, G⟩`.
    /// Nothing where no sample came near the boundary.
    pub spectrum: Option<Vec<f64>>,
}

/// The two directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// A unit joins: `P` against `Q`.
    Joining,
    /// A unit leaves: `Q` against `P`.
    Leaving,
}

/// The mixture that samples of leaving are drawn from.
pub(super) struct Away {
    /// `⟨m̄, m_p⟩/σ²` of every bin, and their mean.
    pub toward: Vec<f64>,
    spread: f64,
    /// λ of the law that bounds all values, and of the law that most samples count under.
    tilts: [f64; 2],
    log_range: f64,
}

/// Share of the samples of leaving that are drawn from the law that bounds them.
const BOUNDING: f64 = 0.25;

/// Samples that one generator makes, one after the other.
const CHUNK: usize = 512;

/// Most bins that are joined to tilt a sample.
const JOINED: usize = 48;

/// Most bins that a table of the Gram matrix and of its exponentials is made for.
pub(crate) const TABLE: usize = 2048;

/// Numbers that the samples of one generator take together, where that is more than a table would.
const TOGETHER: usize = 1 << 22;

/// What the loss of a stream may be off by, for the rounding of its sums: many times over.
const LOOSE: f64 = 1e-8;

/// A Gram matrix over σ², ready to be sampled.
pub(super) struct Sampler<'a> {
    bins: usize,
    epsilon: f64,
    seed: [u8; 32],
    /// Half the diagonal of `G`.
    half: Vec<f64>,
    products: Products<'a>,
    /// Samples that one generator makes, one after the other.
    chunk: usize,
}

/// Where rows of `G` and numbers with that covariance come from.
enum Products<'a> {
    /// `G`, its entries' exponentials, and its Cholesky factor.
    Table { gram: Vec<f64>, exponentials: Vec<f64>, root: Mat<f64> },
    /// A stream in units of the sensitivity, its number of steps, and `1/σ`.
    Stream { stream: &'a Stream, steps: usize, over: f64 },
}

/// What one sample is worth: its weight and its privacy loss.
struct Sample {
    log_weight: f64,
    loss: f64,
}

impl<'a> Sampler<'a> {
    pub fn new(
        allocation: &'a Allocation,
        noise_multiplier: f64,
        epsilon: f64,
        purpose: Purpose,
    ) -> Result<Self> {
        let (bins, over, common) = (allocation.bins, noise_multiplier.powi(-2), allocation.common);
        let half = (0..bins).map(|p| 0.5 * (over * allocation.gram(p, p) + common)).collect();
        let (products, chunk) = match &allocation.source {
            Source::Gram(gram) => {
                let gram: Vec<f64> = gram.iter().map(|g| g * over + common).collect();
                let mut exponentials = gram.clone();
                exp_all(&mut exponentials);
                (Products::Table { gram, exponentials, root: allocation.root(noise_multiplier)? }, CHUNK)
            }
            // Nothing is ever released beside a stream: `Allocation::beside` refuses it.
            Source::Stream(stream) => {
                let steps = stream.steps();
                let chunk = (TOGETHER / steps).clamp(1, CHUNK);
                (Products::Stream { stream, steps, over: 1.0 / noise_multiplier }, chunk)
            }
        };
        // Losses of a stream are rounded: the bound is for an ε that is smaller by more than that.
        let asked = epsilon;
        let epsilon = match products {
            Products::Table { .. } => epsilon,
            Products::Stream { .. } => epsilon - LOOSE,
        };
        let mut hash = Sha256::new();
        match purpose {
            Purpose::Search => hash.update(b"dpmf bins search"),
            Purpose::Proof => {
                hash.update(b"dpmf bins proof");
                hash.update(allocation.subject);
                hash.update(noise_multiplier.to_le_bytes());
                hash.update(asked.to_le_bytes());
            }
        }
        let seed = hash.finalize().into();
        Ok(Self { bins, epsilon, seed, half, products, chunk })
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

    /// `E_Q[(1 − e^{ε+L})_+]`, likewise; nothing is sampled where that is at most `negligible`.
    pub fn leaving(
        &self,
        samples: usize,
        share: usize,
        negligible: f64,
        watch: Watch<'_>,
    ) -> Result<Estimate> {
        let away = self.away();
        let range = away.log_range.exp();
        if range <= negligible.max(1e-100) {
            return Ok(Estimate { mean: 0.0, upper: range, range });
        }
        let value = |sample: Sample, _: &[f64]| {
            let over = -(self.epsilon + sample.loss).exp_m1();
            if over > 0.0 { sample.log_weight.exp() * over } else { 0.0 }
        };
        let log_range = away.log_range - BOUNDING.ln();
        self.bound(log_range, samples, share, watch, |rng, out| self.leave(&away, rng, out, value))
    }

    pub(super) fn away(&self) -> Away {
        let b = self.bins as f64;
        let toward: Vec<f64> = match &self.products {
            Products::Table { gram, .. } => {
                gram.chunks_exact(self.bins).map(|row| row.iter().sum::<f64>() / b).collect()
            }
            Products::Stream { stream, over, .. } => {
                stream.toward().into_iter().map(|x| x * over * over).collect()
            }
        };
        let spread = toward.iter().sum::<f64>() / b;
        let distance = self.epsilon - self.half.iter().sum::<f64>() / b;
        let log_range = |tilt: f64| 0.5 * tilt * tilt * spread - tilt * distance + log_peak(tilt);
        // The bound is convex in λ where it matters; any λ would do.
        let (mut low, mut high) = (0.0, 2.0 * (distance.max(0.0) / spread + 1.0) + 2.0 / spread.sqrt());
        for _ in 0..60 {
            let [a, c] = [low + (high - low) / 3.0, high - (high - low) / 3.0];
            if log_range(a) < log_range(c) { high = c } else { low = a }
        }
        let bounding = 0.5 * (low + high);
        let typical = ((self.epsilon - 0.5 * spread) / spread).max(bounding);
        Away { toward, spread, tilts: [bounding, typical], log_range: log_range(bounding) }
    }

    /// Fills `out` with values of samples that lean away from all bins.
    fn leave(
        &self,
        away: &Away,
        rng: &mut ChaCha8Rng,
        out: &mut [f64],
        mut value: impl FnMut(Sample, &[f64]) -> f64,
    ) {
        let mut y = self.normal(rng, out.len());
        let shares = [BOUNDING, 1.0 - BOUNDING];
        for (k, out) in out.iter_mut().enumerate() {
            let tilt = away.tilts[usize::from(rng.random::<f64>() >= BOUNDING)];
            let y = y.col_as_slice_mut(k);
            y.iter_mut().zip(&away.toward).for_each(|(y, m)| *y -= tilt * m);
            let mean = sum(y) / self.bins as f64;
            let density =
                |(tilt, share): (f64, f64)| share.ln() - tilt * mean - 0.5 * tilt * tilt * away.spread;
            let [a, c] = [0, 1].map(|k| density((away.tilts[k], shares[k])));
            let log_weight = -(a.max(c) + (-(a - c).abs()).exp().ln_1p());
            let loss = self.loss(y);
            *out = value(Sample { log_weight, loss }, y);
        }
    }

    /// `E|ŵ_j|²` where the loss is about ε, or −ε for a unit that leaves, or as near to it as samples came.
    pub fn spectrum(&self, side: Side, samples: usize) -> Option<Vec<f64>> {
        /// Standard deviations of the losses that count as ε.
        const WIDTHS: [f64; 3] = [0.1, 0.4, 1.6];
        WIDTHS.into_iter().find_map(|width| self.spectrum_within(side, width, samples))
    }

    fn spectrum_within(&self, side: Side, width: f64, samples: usize) -> Option<Vec<f64>> {
        let (b, (joined, _), away) = (self.bins, self.joined(), self.away());
        let fft = FftPlanner::new().plan_fft_forward(b);
        let chunks = samples.div_ceil(self.chunk);
        let parts: Vec<Vec<f64>> = (0..chunks)
            .into_par_iter()
            .map(|chunk| {
                let mut total = vec![0.0; b + 1];
                let mut posterior = vec![Complex::default(); b];
                let value = |sample: Sample, terms: &[f64]| {
                    // Both are means under Q of what happens at the boundary.
                    let (off, log_weight) = match side {
                        Side::Joining => (sample.loss - self.epsilon, sample.log_weight - sample.loss),
                        Side::Leaving => (sample.loss + self.epsilon, sample.log_weight),
                    };
                    let off = off / width;
                    let weight = (log_weight - 0.5 * off * off).exp();
                    if off.abs() < 5.0 {
                        let over = 1.0 / terms.iter().sum::<f64>();
                        posterior.iter_mut().zip(terms).for_each(|(w, x)| *w = Complex::new(x * over, 0.0));
                        fft.process(&mut posterior);
                        total.iter_mut().zip(&posterior).for_each(|(t, w)| *t += weight * w.norm_sqr());
                        total[b] += weight;
                    }
                    0.0
                };
                let mut unused = vec![0.0; self.chunk];
                let mut rng = self.rng(chunk);
                match side {
                    Side::Joining => self.join(joined, &mut rng, &mut unused, value),
                    Side::Leaving => self.leave(&away, &mut rng, &mut unused, value),
                }
                total
            })
            .collect();
        let mut total = vec![0.0; b + 1];
        parts.iter().for_each(|part| total.iter_mut().zip(part).for_each(|(a, b)| *a += b));
        (total[b] > 0.0).then(|| (0..b).map(|j| total[j.min(b - j)] / total[b]).collect())
    }

    /// The number of bins to join that bounds the values best, and the logarithm of the bound.
    pub(super) fn joined(&self) -> (usize, f64) {
        let (exponentials, gram) = match &self.products {
            Products::Table { exponentials, gram, .. } => (exponentials, gram),
            Products::Stream { stream, over, .. } => return self.joined_stream(stream, over * over),
        };
        let b = self.bins;
        let largest = gram.iter().copied().fold(0.0, f64::max);
        // Weights of bins are products of as many exponentials: they must not overflow.
        let most = ((600.0 / largest.max(1e-9)) as usize).clamp(1, JOINED);
        let mut best = (1, 0.0);
        let mut powers = vec![1.0; b * b];
        let mut log_zeta = 0.0;
        for k in 2..=most {
            powers.iter_mut().zip(exponentials).for_each(|(power, e)| *power *= e);
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

    /// The same by upper bounds of the rows of `G`.
    fn joined_stream(&self, stream: &Stream, over: f64) -> (usize, f64) {
        let b = self.bins as f64;
        let rows = stream.envelopes();
        let largest = rows.iter().flatten().fold(0.0_f64, |a, [g, _]| a.max(g * over));
        let most = ((600.0 / largest.max(1e-9)) as usize).clamp(1, JOINED);
        let (mut best, mut log_zeta) = ((1, 0.0), 0.0);
        for k in 2..=most {
            let power = (k - 1) as f64 * over;
            // Bins that no envelope counts twice: at most b in all, the rest at 1.
            let mean = |row: &Vec<[f64; 2]>| {
                let raised: f64 = row.iter().map(|[g, count]| count * (power * g).exp_m1()).sum();
                1.0 + raised / b
            };
            let zeta = rows.iter().map(mean).fold(0.0, f64::max) * (1.0 + 1e-9);
            log_zeta += zeta.ln();
            let log_range = log_zeta - (k as f64 - 1.0) * self.epsilon + log_peak(k as f64 - 1.0);
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
        let mut scratch = self.scratch();
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
                let bin = pick(&weights, rng.random::<f64>() * total);
                self.add(bin, &mut weights, y, &mut scratch);
            }
            log_totals += product.ln();
            let loss = self.loss(y);
            let log_weight = log_totals - (k as f64 - 1.0) * loss;
            // `loss` left the exponentials of u in y.
            *out = value(Sample { log_weight, loss }, y);
        }
    }

    /// Room for [`Sampler::add`].
    fn scratch(&self) -> [Vec<f64>; 2] {
        match self.products {
            Products::Table { .. } => [Vec::new(), Vec::new()],
            Products::Stream { steps, .. } => [vec![0.0; steps], vec![0.0; self.bins]],
        }
    }

    /// Adds a row of `G` to the sums, and multiplies the weights by its exponentials.
    fn add(&self, bin: usize, weights: &mut [f64], y: &mut [f64], [work, row]: &mut [Vec<f64>; 2]) {
        let b = self.bins;
        match &self.products {
            Products::Table { gram, exponentials, .. } => {
                multiply(weights, &exponentials[bin * b..][..b]);
                y.iter_mut().zip(&gram[bin * b..]).for_each(|(y, g)| *y += g);
            }
            Products::Stream { stream, over, .. } => {
                stream.row(bin, work, row);
                let blocks = row.chunks_mut(64).zip(weights.chunks_mut(64)).zip(y.chunks_mut(64));
                for ((row, weights), y) in blocks {
                    // Most bins are too far away to be met.
                    if row.iter().all(|g| *g == 0.0) {
                        continue;
                    }
                    row.iter_mut().for_each(|g| *g *= over * over);
                    y.iter_mut().zip(&*row).for_each(|(y, g)| *y += g);
                    exp_all(row);
                    multiply(weights, row);
                }
            }
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
        let mut out = Mat::zeros(b, count);
        let root = match &self.products {
            Products::Table { root, .. } => root,
            Products::Stream { stream, steps, over } => {
                let mut white = vec![0.0; *steps];
                for k in 0..count {
                    white.iter_mut().for_each(|x| {
                        let normal: f64 = StandardNormal.sample(rng);
                        *x = over * normal;
                    });
                    stream.project(&mut white, out.col_as_slice_mut(k));
                }
                return out;
            }
        };
        let white: Vec<f64> = (0..b * count).map(|_| StandardNormal.sample(rng)).collect();
        let white = faer::MatRef::from_column_major_slice(&white, b, count);
        let destination: MatMut<'_, f64> = out.as_mut();
        matmul(destination, Accum::Replace, root.as_ref(), white, 1.0, Par::Seq);
        out
    }

    fn rng(&self, chunk: usize) -> ChaCha8Rng {
        let mut rng = ChaCha8Rng::from_seed(self.seed);
        rng.set_stream(chunk as u64);
        rng
    }

    /// The mean of values in `[0, e^{log_range}]`, bounded by bets. The same to the bit on any number of threads.
    fn bound(
        &self,
        log_range: f64,
        samples: usize,
        share: usize,
        watch: Watch<'_>,
        fill: impl Fn(&mut ChaCha8Rng, &mut [f64]) + Sync,
    ) -> Result<Estimate> {
        let size = self.chunk;
        let chunks = samples.div_ceil(size * share).max(2);
        let part = |chunk: usize| {
            let mut values = vec![0.0; size];
            fill(&mut self.rng(chunk), &mut values);
            values
        };
        let together = 4 * rayon::current_num_threads();
        let mut values: Vec<f64> = Vec::with_capacity(chunks * size);
        while values.len() < chunks * size {
            if watch(values.len() as f64 / (chunks * size) as f64).is_break() {
                return Err(Error::Interrupted { iterations: 0, gap: f64::INFINITY });
            }
            let done = values.len() / size;
            let next = done..(done + together).min(chunks);
            let parts: Vec<Vec<f64>> = next.into_par_iter().map(part).collect();
            parts.iter().for_each(|part| values.extend(part));
        }
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        // What rounding in double precision may hide, many times over.
        let range = log_range.exp() * (1.0 + 1e-7);
        let upper = bet::upper(&values, range, log_failure(), share as f64);
        Ok(Estimate { mean, upper: upper.min(range) * (1.0 + 1e-7), range })
    }
}

/// Numbers that are added up side by side.
const LANES: usize = 8;

/// The sum, in an order that suits the processor and is always the same.
#[inline]
pub(crate) fn sum(x: &[f64]) -> f64 {
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
pub(crate) fn pick(weights: &[f64], mut left: f64) -> usize {
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
pub(crate) fn log_peak(t: f64) -> f64 {
    if t > 0.0 { t * t.ln() - (t + 1.0) * (t + 1.0).ln() } else { 0.0 }
}

dispatch! {
    /// `e^x` of every number, to a few units in the last place; numbers beyond ±700 count as that.
    pub(crate) fn exp_all / exp_all_portable / exp_all_avx2 = exp_all_any(x: &mut [f64]);
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
