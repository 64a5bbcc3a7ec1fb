//! Balls in bins: what is hidden when every unit throws itself into one of `b` bins, in secret, and takes part whenever its
//! bin's turn comes.
//!
//! With `m_p` the sum of the columns of `C` at the steps of bin `p`, and `C ≥ 0`, the worst that one unit can do is described
//! by the pair `P = (1/b) Σ_p N(m_p, σ²I)` and `Q = N(0, σ²I)`, in both directions. Only the Gram matrix `G_pq = ⟨m_p, m_q⟩/σ²`
//! matters: with `u_p = ⟨m_p, x⟩/σ² − G_pp/2` the privacy loss is `L = log (1/b) Σ_p e^{u_p}`, and
//! `δ(ε) = E_P[(1 − e^{ε − L})_+]` or `E_Q[(1 − e^{ε + L})_+]`, whichever is larger. No closed form is known; both are
//! estimated from random numbers, by samplers that look where it counts and whose values are bounded, so that a bound on δ holds
//! but for a probability of [`FAILURE`]. The random numbers of a proof are seeded by a hash of what is proved, the coefficients
//! with σ and ε, so coefficients cannot be chosen to suit them.
//!
//! *Joining.* Draw `k` bins one after the other, the `j`-th equal to `q` with probability proportional to
//! `e^{Σ_{i<j} G_{q_i q}}`, of total `z_j`, then `x` from `N(Σ_i m_{q_i}, σ²I)`. With `e^{Σ u_{q_i} − kL}/b^k` as the law of the
//! bins given `x`, the density of `P` over that of the draw is `W = e^{−(k−1)L} Π_j z_j/b`. By Hölder's inequality
//! `z_j/b ≤ ζ_{j−1} = max_r (1/b) Σ_q e^{(j−1)G_rq}`, so `W (1 − e^{ε−L})_+` is at most
//! `e^{−(k−1)ε} Π_{j<k} ζ_j · (1/k)(1 − 1/k)^{k−1}` where it is not zero. `k` is the number that makes this least.
//!
//! *Leaving.* Draw `x` from `N(−λ m̄, σ²I)`, `m̄` the mean of the `m_p`. The density of `Q` over that is `e^{λȳ + λ²v/2}`, `ȳ` the
//! mean of the `⟨m_p, x⟩/σ²` and `v` that of all `G_pq`. By Jensen's inequality `ȳ − d̄/2 ≤ L`, `d̄` the mean of the `G_pp`, so the
//! value is at most `e^{−λ(ε − d̄/2) + λ²v/2} λ^λ/(λ + 1)^{λ+1}`. The λ that makes this least is too small for most samples to
//! count, since `L` is above Jensen's bound by about half of `d̄ − v`. So samples are drawn from a mixture of two such laws; the
//! one with the least bound has a share α of it, and no value exceeds its bound over α.
//!
//! *From values to a bound.* For values in `[0, R]` of mean μ and a stake `λ ≤ 1/R`, the wealth `Π_i (1 + λ(μ − X_i))` is a
//! martingale that starts at 1 and stays positive, so that it reaches `1/α` with a probability of at most α. All means at which it
//! would have reached that are rejected; the least of them is the bound. The stake is chosen by samples that are used for
//! nothing else.
//!
//! Entries of `G` may be rounded up, as long as it stays a Gram matrix: δ is the mean of a convex function of `Σ e^{u_p}`, and by
//! Kahane's convexity inequality that grows with every entry.
//!
//! *Beside.* A Gaussian release of μ beside the bins has the pair `N(μ, 1)` and `N(0, 1)`. Its product with the pair above is the
//! same mixture with one more coordinate, which is μ for every bin: the pair of bins with `G + μ²`, entry by entry. So the two
//! together are proved by the same samplers, and nothing is lost.
//!
//! Reference: Chua et al., "Balls-and-bins sampling for DP-SGD", 2024, and Choquette-Choo et al., "Near exact privacy
//! amplification for matrix mechanisms", 2024, for the pair; Kahane, "Sur le chaos multiplicatif", 1985;
//! Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", 2024.

pub(crate) mod bet;
mod sample;
mod stream;

use super::interval::Interval;
use super::{check_delta, check_epsilon, check_positive};
use crate::error::{Error, Result};
use crate::linalg::exponentials::Exponentials;
use faer::Mat;
use sample::Sampler;
pub(crate) use sample::{Boundary, Purpose, Side, TABLE, exp_all, log_peak, pick, sum};
use sha2::{Digest, Sha256};
use std::ops::ControlFlow;
use stream::Stream;

/// The probability, over the random numbers, that a bound on δ does not hold.
pub const FAILURE: f64 = 1e-9;

/// Noise multipliers that may be tried until a bound holds.
pub(crate) const TRIES: usize = 64;

/// Mechanisms of which one plan may try that. Each bound must fail [`TRIES`] times as many times less.
pub(crate) const PROOFS: usize = 8;

/// The shares of the samples that looking around takes, one over this: at first, and then to be exact.
const PILOT: [usize; 2] = [16, 4];

/// Difference of log σ at which, of two directions, the one that needs more counts e times as much for a fit.
pub(super) const BESIDE: f64 = 0.01;

/// By how much a bound must be kept when it is first found, so that other machines, which round otherwise, find it too.
const MARGIN: f64 = 1e-6;

/// How units are hidden among bins: the Gram matrix of the sums of columns, in units of the sensitivity.
#[derive(Clone, Debug, PartialEq)]
pub struct Allocation {
    bins: usize,
    source: Source,
    /// μ² of a Gaussian release beside, which is no secret of any bin.
    common: f64,
    /// A hash of what the matrix was made from.
    subject: [u8; 32],
}

/// Where inner products come from.
#[derive(Clone, Debug, PartialEq)]
enum Source {
    /// The Gram matrix, row by row.
    Gram(Vec<f64>),
    /// A stream, where the matrix would be too large.
    Stream(Box<Stream>),
}

/// Told the share of the samples at hand that were drawn; [`ControlFlow::Break`] ends the proof.
pub type Watch<'a> = &'a mut dyn FnMut(f64) -> ControlFlow<()>;

/// δ of one direction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// The mean of the values.
    pub mean: f64,
    /// An upper bound that holds but for [`FAILURE`].
    pub upper: f64,
    /// The largest that a value could have been.
    pub range: f64,
}

impl Allocation {
    /// From the Gram matrix `⟨m_p, m_q⟩`, row by row.
    ///
    /// Errors: a matrix that is not square, symmetric and positive semi-definite with entries that are finite and not
    /// negative; no bins.
    pub fn new(bins: usize, gram: Vec<f64>) -> Result<Self> {
        let (actual, expected) = (gram.len(), bins.saturating_mul(bins));
        if bins == 0 {
            return Err(Error::argument("bins", 0, "at least one is needed"));
        }
        if actual != expected {
            return Err(Error::WrongLength { name: "Gram matrix", actual, expected });
        }
        for (index, &value) in gram.iter().enumerate() {
            if !(value >= 0.0 && value.is_finite()) {
                let rule = "it must be finite and not negative";
                return Err(Error::InvalidEntry { name: "Gram matrix", index, value, rule });
            }
        }
        let mut hash = Sha256::new();
        gram.iter().for_each(|entry| hash.update(entry.to_le_bytes()));
        let (source, subject) = (Source::Gram(gram), hash.finalize().into());
        let allocation = Self { bins, source, common: 0.0, subject };
        allocation.root(1.0)?;
        Ok(allocation)
    }

    /// From a stream of exponentials, for more bins than a Gram matrix is made for.
    ///
    /// Nothing is rounded up here: [`Allocation::delta`] allows for the rounding of double precision, which is smaller by far.
    ///
    /// Errors: no bins, more exponentials than twelve.
    pub(crate) fn streamed(filter: Exponentials, bins: usize) -> Result<Self> {
        if bins == 0 {
            return Err(Error::argument("bins", 0, "at least one is needed"));
        }
        if filter.weights.len() > Exponentials::MOST {
            return Err(Error::argument("exponentials", filter.weights.len(), "at most 12 are possible"));
        }
        let source = Source::Stream(Box::new(Stream::new(filter, bins)));
        Ok(Self { bins, source, common: 0.0, subject: [0; 32] })
    }

    /// The same with a hash of the coefficients that the matrix was computed from. Unlike the matrix, they have the same bits
    /// on every machine, so that every machine proves with the same random numbers.
    pub(crate) fn about(self, subject: [u8; 32]) -> Self {
        Self { subject, ..self }
    }

    /// The same beside a Gaussian release of μ: their curve is that of bins again.
    ///
    /// Errors: μ not positive and finite, or so large that its square is not; bins that are worked with in time.
    pub fn beside(&self, mu: f64) -> Result<Self> {
        check_positive("mu", mu)?;
        if matches!(self.source, Source::Stream(_)) {
            return Err(Error::Unsupported {
                what: format!("a release beside {} bins", self.bins),
                hint: "use larger batches, or drop the other release",
            });
        }
        let common = (Interval::exact(mu).square() + self.common).hi;
        check_positive("square of mu", common)?;
        let mut hash = Sha256::new();
        hash.update(b"beside a Gaussian");
        hash.update(self.subject);
        hash.update(mu.to_le_bytes());
        Ok(Self { common, subject: hash.finalize().into(), ..self.clone() })
    }

    /// μ against an adversary who knows the bin: the largest over all bins.
    ///
    /// Guarantee: rounded up.
    pub(crate) fn mu(&self, noise_multiplier: f64) -> f64 {
        let largest = (0..self.bins).map(|p| self.gram(p, p)).fold(0.0, f64::max);
        let scaled = Interval::exact(largest) / Interval::exact(noise_multiplier).square();
        (scaled + self.common).sqrt().hi
    }

    /// Number of bins `b`.
    pub fn bins(&self) -> usize {
        self.bins
    }

    /// `⟨m_p, m_q⟩`.
    pub fn gram(&self, p: usize, q: usize) -> f64 {
        match &self.source {
            Source::Gram(gram) => gram[p * self.bins + q],
            Source::Stream(stream) if p == q => stream.squares()[p],
            Source::Stream(stream) => stream.entry(p, q),
        }
    }

    /// δ at ε for a noise multiplier, joining or leaving, whichever is larger.
    ///
    /// Guarantee: not below the true one but for a probability of [`FAILURE`] over the random numbers, which follow from the
    /// mechanism, σ and ε.
    /// Cost: O(b²) for each of 2¹⁴ to 2¹⁹ samples; of a stream O(n r) for each of 2¹² to 2¹⁶.
    /// Errors: ε or σ not positive and finite.
    pub fn delta(&self, noise_multiplier: f64, epsilon: f64) -> Result<f64> {
        let [joining, leaving] = self.estimate(noise_multiplier, epsilon)?;
        Ok(joining.upper.max(leaving.upper).min(1.0))
    }

    /// The two values of which [`Allocation::delta`] is the larger: joining, then leaving.
    ///
    /// Errors: those of it.
    pub fn estimate(&self, noise_multiplier: f64, epsilon: f64) -> Result<[Estimate; 2]> {
        self.estimate_for(noise_multiplier, epsilon, Purpose::Proof, 1, &mut unwatched)
    }

    fn estimate_for(
        &self,
        noise_multiplier: f64,
        epsilon: f64,
        purpose: Purpose,
        share: usize,
        watch: Watch<'_>,
    ) -> Result<[Estimate; 2]> {
        check_positive("noise multiplier", noise_multiplier)?;
        check_epsilon(epsilon)?;
        let sampler = Sampler::new(self, noise_multiplier, epsilon, purpose)?;
        let joining = sampler.joining(self.samples(), share, watch)?;
        // Leaving that cannot be as large as joining need not be looked at.
        Ok([joining, sampler.leaving(self.samples(), share, joining.mean, watch)?])
    }

    /// The smallest noise multiplier that satisfies (ε, δ), to about a thousandth.
    ///
    /// Candidates are found with other random numbers than those of the proof, so that looking at several does not bias it.
    ///
    /// Guarantee: [`Allocation::delta`] was seen to be below δ.
    /// Errors: ε not positive and finite, δ outside (0, 1), a target that no finite noise reaches.
    pub fn noise_multiplier(&self, epsilon: f64, delta: f64) -> Result<f64> {
        self.watched_noise_multiplier(epsilon, delta, None, &mut unwatched)
    }

    /// [`Allocation::noise_multiplier`] with an observer, who may stop it. It takes less time if a noise multiplier is given that is
    /// about right.
    ///
    /// Errors: those of it; [`Error::Interrupted`].
    pub fn watched_noise_multiplier(
        &self,
        epsilon: f64,
        delta: f64,
        near: Option<f64>,
        watch: Watch<'_>,
    ) -> Result<f64> {
        let start = self.searched_noise_multiplier(epsilon, delta, near, watch)?;
        for step in 0..TRIES {
            let sigma = start * (1.0 + 1e-3 * step as f64);
            let [joining, leaving] = self.estimate_for(sigma, epsilon, Purpose::Proof, 1, watch)?;
            if joining.upper.max(leaving.upper) <= delta * (1.0 - MARGIN) {
                return Ok(sigma);
            }
        }
        Err(out_of_reach(epsilon))
    }

    /// About the noise multiplier that [`Allocation::noise_multiplier`] finds, from fewer samples: nothing is proved of it.
    ///
    /// Errors: those of it.
    pub fn estimated_noise_multiplier(&self, epsilon: f64, delta: f64) -> Result<f64> {
        Ok(self.looked_for(epsilon, delta, &mut unwatched)?.exp())
    }

    /// The logarithm of a noise multiplier that is about right.
    fn looked_for(&self, epsilon: f64, delta: f64, watch: Watch<'_>) -> Result<f64> {
        check_epsilon(epsilon)?;
        check_delta(delta)?;
        let pilot = |log_sigma: f64| self.pilot(log_sigma.exp(), epsilon, delta, PILOT[0], watch);
        let found = solve(self.guess(epsilon, delta), pilot)?;
        found.ok_or_else(|| out_of_reach(epsilon))
    }

    fn searched_noise_multiplier(
        &self,
        epsilon: f64,
        delta: f64,
        near: Option<f64>,
        watch: Watch<'_>,
    ) -> Result<f64> {
        let start = match near {
            Some(near) => near.ln(),
            None => self.looked_for(epsilon, delta, watch)?,
        };
        let pilot = |log_sigma: f64| self.pilot(log_sigma.exp(), epsilon, delta, PILOT[1], watch);
        Ok(polish(start, pilot)?.ok_or_else(|| out_of_reach(epsilon))?.exp())
    }

    /// The smallest ε that holds at δ for a noise multiplier, to about a thousandth.
    ///
    /// Guarantee: [`Allocation::delta`] was seen to be below δ.
    /// Errors: σ not positive and finite, δ outside (0, 1), an ε above 1000.
    pub fn epsilon(&self, noise_multiplier: f64, delta: f64) -> Result<f64> {
        let out_of_reach = || {
            let rule = "it is too small for any guarantee";
            Error::argument("noise multiplier", noise_multiplier, rule)
        };
        let alone = super::gaussian::epsilon(self.mu(noise_multiplier), delta)?.clamp(1e-6, 1e3);
        // The noise that would reach an ε, against what there is.
        let pilot = |share: usize| {
            move |log_epsilon: f64| {
                self.pilot(noise_multiplier, log_epsilon.exp(), delta, share, &mut unwatched)
            }
        };
        let start = solve(alone.ln(), pilot(PILOT[0]))?.ok_or_else(out_of_reach)?;
        let start = polish(start, pilot(PILOT[1]))?.ok_or_else(out_of_reach)?.exp();
        for step in 0..TRIES {
            let epsilon = start * (1.0 + 1e-3 * step as f64);
            if self.delta(noise_multiplier, epsilon)? <= delta * (1.0 - MARGIN) {
                return Ok(epsilon);
            }
        }
        Err(out_of_reach())
    }

    /// `log δ̂ − log δ`, δ̂ the bound with random numbers for looking around.
    fn pilot(
        &self,
        noise_multiplier: f64,
        epsilon: f64,
        delta: f64,
        share: usize,
        watch: Watch<'_>,
    ) -> Result<f64> {
        let estimates = self.estimate_for(noise_multiplier, epsilon, Purpose::Search, share, watch)?;
        Ok((estimates[0].upper.max(estimates[1].upper).max(1e-300) / delta).ln())
    }

    /// The logarithm of a noise multiplier to start from: that of as many Gaussians as count.
    fn guess(&self, epsilon: f64, delta: f64) -> f64 {
        let mean = (0..self.bins).map(|p| self.gram(p, p)).sum::<f64>() / self.bins as f64;
        // One bin of b is as good as ε + log b, at a δ that b units share.
        let reach = epsilon.exp_m1().mul_add(self.bins as f64, 1.0).ln();
        let mu = super::gaussian::mu(reach, (delta * self.bins as f64).min(0.5)).unwrap_or(1.0);
        0.5 * mean.ln() - mu.ln()
    }

    /// What a fit asks: `log σ` that can be expected to be proved to reach (ε, δ), and how it depends on `G`. `near` is where the last
    /// answer was.
    pub(crate) fn boundary(
        &self,
        epsilon: f64,
        delta: f64,
        samples: usize,
        near: Option<f64>,
    ) -> Result<Boundary> {
        let sampler = |log_sigma: f64| Sampler::new(self, f64::exp(log_sigma), epsilon, Purpose::Search);
        // The bound that a proof can be expected to find, not the mean: values of few samples have long tails, and a fit that looked at
        // means would move to where it sees less of them.
        let (all, share) = (self.samples().max(samples), (self.samples() / samples).max(1));
        let excess = |estimate: Estimate| (estimate.upper.max(1e-300) / delta).ln();
        let joining = |log_sigma: f64| Ok(excess(sampler(log_sigma)?.joining(all, share, &mut unwatched)?));
        let leaving =
            |log_sigma: f64| Ok(excess(sampler(log_sigma)?.leaving(all, share, 0.0, &mut unwatched)?));
        let join = match near {
            Some(near) => polish(near, joining)?,
            None => solve(self.guess(epsilon, delta), joining)?,
        };
        let join = join.ok_or_else(|| out_of_reach(epsilon))?;
        let spectrum = sampler(join)?.spectrum(Side::Joining, samples);
        // A unit that leaves counts where hiding it takes nearly as much noise.
        if leaving(join - 4.0 * BESIDE)? <= 0.0 {
            return Ok(Boundary { log_sigma: join, spectrum });
        }
        let leave = polish(join, leaving)?.ok_or_else(|| out_of_reach(epsilon))?;
        let other = sampler(leave)?.spectrum(Side::Leaving, samples);
        let share = 1.0 / (1.0 + ((join - leave) / BESIDE).exp());
        let spectrum = match (spectrum, other) {
            (Some(joining), Some(leaving)) => {
                let sizes = [&joining, &leaving].map(|spectrum| self.product(spectrum));
                let [a, b] = [(1.0 - share) / sizes[0], share / sizes[1]];
                Some(joining.iter().zip(&leaving).map(|(x, y)| (a * x + b * y) / (a + b)).collect())
            }
            (joining, leaving) => joining.or(leaving),
        };
        Ok(Boundary { log_sigma: join.max(leave), spectrum })
    }

    /// `⟨H, G⟩`, up to a factor, with the circulant matrix `H` of a spectrum. For a stream only how it compares counts: its mean.
    fn product(&self, spectrum: &[f64]) -> f64 {
        let b = self.bins;
        if let Source::Stream(_) = self.source {
            return spectrum.iter().sum::<f64>();
        }
        let diagonal = |d: usize| (0..b).map(|p| self.gram(p, (p + d) % b)).sum::<f64>();
        let cos: Vec<f64> = (0..b).map(|k| libm::cos(std::f64::consts::TAU * k as f64 / b as f64)).collect();
        (0..b)
            .map(|d| diagonal(d) * spectrum.iter().enumerate().map(|(j, s)| s * cos[j * d % b]).sum::<f64>())
            .sum()
    }

    /// Samples of a bound: many while they cost little.
    fn samples(&self) -> usize {
        match &self.source {
            // Few bins have values that are nearly alike.
            Source::Gram(_) => {
                let most = (self.bins << 12).clamp(1 << 16, 1 << 19);
                ((1_usize << 34) / (self.bins * self.bins)).clamp(1 << 14, most)
            }
            Source::Stream(_) => ((1_usize << 29) / self.bins).clamp(1 << 12, 1 << 16),
        }
    }

    /// The Cholesky factor of `G/σ²`, its diagonal raised by what rounding may hide.
    fn root(&self, noise_multiplier: f64) -> Result<Mat<f64>> {
        let b = self.bins;
        let largest = (0..b).map(|p| self.gram(p, p)).fold(f64::MIN_POSITIVE, f64::max);
        let over = noise_multiplier.powi(-2);
        let entry = |p: usize, q: usize| {
            // A Gram matrix of computed vectors may miss being one by its rounding.
            let room = if p == q { largest * b as f64 * 4.0 * f64::EPSILON } else { 0.0 };
            (self.gram(p, q) + room) * over + self.common
        };
        let refused = |_| Error::Numerical {
            what: "Gram matrix of the bins",
            index: 0,
            reason: "it is not positive semi-definite",
        };
        Ok(Mat::from_fn(b, b, entry).llt(faer::Side::Lower).map_err(refused)?.L().to_owned())
    }
}

/// The logarithm of one over the probability that one bound may fail with: there are two directions, and many may be looked at.
pub(crate) fn log_failure() -> f64 {
    (2.0 * (TRIES * PROOFS) as f64 / FAILURE).ln()
}

/// The error of an ε that no noise is seen to reach.
pub(crate) fn out_of_reach(epsilon: f64) -> Error {
    Error::argument("epsilon", epsilon, "no amount of noise can be proved to reach it")
}

/// A [`Watch`] that sees nothing and never ends a proof.
fn unwatched(_: f64) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// [`solve`] from a start that is nearly there: a few steps of the secant rule, the last of them below 2·10⁻⁴, or the least point at which the
/// function was seen not to be above zero.
pub(crate) fn polish(start: f64, mut f: impl FnMut(f64) -> Result<f64>) -> Result<Option<f64>> {
    /// How fast the function falls at first, and the slowest and fastest that is believed.
    const SLOPE: f64 = 20.0;
    const SLOPES: [f64; 2] = [3.0, 200.0];
    const CLOSE: f64 = 2e-4;
    const STEPS: usize = 8;
    /// How far from the last point that may be.
    const APART: f64 = 0.01;
    let (mut x, mut slope, mut last) = (start, SLOPE, None::<[f64; 2]>);
    let mut enough = None::<f64>;
    for _ in 0..STEPS {
        let value = f(x)?;
        if value <= 0.0 {
            enough = Some(enough.map_or(x, |enough| enough.min(x)));
        }
        if let Some([before, at_before]) = last {
            let seen = (at_before - value) / (x - before);
            slope = if seen.is_nan() { slope } else { seen.clamp(SLOPES[0], SLOPES[1]) };
        }
        last = Some([x, value]);
        let step = (value / slope).clamp(-0.2, 0.2);
        x += step;
        if step.abs() < CLOSE {
            return Ok(Some(x));
        }
    }
    // Bounds of few samples may jump.
    match enough {
        Some(enough) if (enough - x).abs() < APART => Ok(Some(enough)),
        _ => solve(start, f),
    }
}

/// Where a decreasing function is zero, to 2·10⁻⁴; `None` if it is above zero up to 40 beyond the start.
///
/// Few samples see nothing at all where δ is small, and the logarithm of nothing would lead every secant astray: values count no
/// more than [`MOST`], and a bracket that two steps have not halved is bisected.
pub(crate) fn solve(start: f64, mut f: impl FnMut(f64) -> Result<f64>) -> Result<Option<f64>> {
    const CLOSE: f64 = 2e-4;
    const MOST: f64 = 4.0;
    const REACH: f64 = 40.0;
    let (mut x, mut step) = (start, 0.0_f64);
    let (mut left, mut right) = (None::<(f64, f64)>, None::<(f64, f64)>);
    let mut widths = [f64::INFINITY; 2];
    for _ in 0..120 {
        let value = f(x)?.clamp(-MOST, MOST);
        // Above zero to the left, not above it to the right.
        if value > 0.0 {
            left = Some((x, value));
        } else {
            right = Some((x, value));
        }
        x = match (left, right) {
            (Some((a, at_a)), Some((b, at_b))) => {
                let width = b - a;
                if width < CLOSE {
                    return Ok(Some(b));
                }
                let slow = width > 0.5 * widths[0];
                widths = [widths[1], width];
                // A secant aims a little to the side of the end that would otherwise stay.
                let secant = a + width * at_a / (at_a - at_b);
                let aim = if value > 0.0 { secant + 0.4 * CLOSE } else { secant - 0.4 * CLOSE };
                if slow { 0.5 * (a + b) } else { aim.clamp(a + 0.01 * width, b - 0.01 * width) }
            }
            // Steps that go a little too far: δ falls with a power of about 20 of what is searched for.
            _ => {
                step = (2.0 * step).max(value.abs() / 12.0).clamp(0.001, 4.0);
                if value > 0.0 { x + step } else { x - step }
            }
        };
        if x > start + REACH {
            return Ok(None);
        }
        if x < start - REACH {
            return Ok(right.map(|(b, _)| b));
        }
    }
    Ok(right.map(|(b, _)| b))
}

#[cfg(test)]
mod tests;
