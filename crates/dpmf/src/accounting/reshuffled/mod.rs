//! Reshuffled bins: what is hidden when every unit picks one of `b` bins anew in every epoch, as a reshuffling loader does.
//!
//! A unit's steps are a pattern `π` with one step in each of `K` epochs, all `b^K` patterns as likely. With `C ≥ 0` the worst
//! that it can do is the pair `P = E_π N(C1_π, σ²I)` and `Q = N(0, σ²I)`, in both directions. Let `X = CᵀC/σ²`. If `C` has at most
//! `b` bands, `X` couples neighbouring epochs only, and the likelihood ratio is a chain,
//!
//! ```text
//! R = Σ_{p_1 … p_K} Π_e e^{a_{e, p_e}}/b · Π_e e^{−X_{(e, p_e), (e+1, p_{e+1})}},    a_s = ⟨Ce_s, x⟩/σ² − X_ss/2 ,
//! ```
//!
//! which one pass over the epochs sums up. For `w` bands a pass takes O(Kb + Kw²).
//!
//! *Tails.* A `C` of more bands is cut at `w ≤ b` of them. What is cut off is put back as a constant for every pair of epochs:
//! entries of a Gram matrix may be raised (Kahane's inequality), and a matrix `M ⊗ 11ᵀ` with `M` positive semi-definite and not
//! below what was cut off adds the same number `κ = Σ M` to all products of patterns, which is one more Gaussian number that
//! all patterns share.
//!
//! *Joining.* Let `G(π, π') = 1_πᵀX1_π'`. Draw `k` patterns one after the other, the `j`-th with probability proportional to
//! `e^{Σ_{i<j} G(π_i, π)}`, of mean `z_j` over all patterns, then `x` from `N(Σ_i C1_{π_i}, σ²I)`. `Σ_i G(π_i, π)` is a sum over the
//! epochs of `π`, so that its bins are drawn independently of one another. With the `k` patterns as draws from the posterior
//! given `x`, the density of `P` over that of the draw is `W = e^{−(k−1)L} Π_j z_j`, `L = log R`. By Hölder's inequality
//! `z_j ≤ ζ_{j−1} = max_π E_π' e^{(j−1)G(π, π')}`, and `W(1 − e^{ε−L})_+` is at most `e^{−(k−1)ε} Π_{j<k} ζ_j · (1/k)(1 − 1/k)^{k−1}`. The
//! maximum is that of a product over epochs, each factor a function of a bin and its two neighbours: a dynamic programme bounds
//! it, over classes of neighbours (`zeta.rs`).
//!
//! *Leaving.* Draw `x` from `N(−λ C1/b, σ²I)`. The density of `Q` over that is `e^{λȳ + λ²v/2}`, `ȳ = ⟨C1, x⟩/bσ²` and `v` its variance. Where
//! `ȳ` is below a cut `a`, values are at most `e^{λa + λ²v/2}`. The little that is beyond the cut is extrapolated from slices by Ehrhard's
//! inequality (`tail.rs`). Samples of their own choose λ and `a`. By Jensen's inequality `ȳ − d̄/2 ≤ L`, `d̄` the mean of the `G(π, π)`, so that no
//! value exceeds `e^{−λ(ε − d̄/2) + λ²v/2} λ^λ/(λ + 1)^{λ+1}` for any λ: where that is small beside the bound of joining, nothing is drawn.
//!
//! Bounds, random numbers and their seeds are those of [`allocation`].

mod lanes;
mod sample;
mod tail;
mod zeta;

use super::allocation::{self, BESIDE, Boundary, Estimate, Purpose, Side, Watch};
use super::interval::Interval;
use super::{check_delta, check_epsilon, check_positive};
use crate::error::{Error, Result};
use sample::Sampler;
use sha2::{Digest, Sha256};
use std::ops::ControlFlow;

/// Noise multipliers, or ε's, that may be tried until a bound holds.
const TRIES: usize = allocation::TRIES;

/// The shares of the samples that looking around takes, one over this: at first, and then to be exact.
const PILOT: [usize; 2] = [64, 8];

/// By how much a bound must be kept when it is first found, so that other machines, which round otherwise, find it too.
const MARGIN: f64 = 1e-6;

/// Samples of joining, and of leaving.
const JOINING: usize = 1 << 17;
const LEAVING: usize = 1 << 17;

/// What tails may add to the mean product of two patterns before more bands are kept.
const TAIL: f64 = 1e-3;

/// Most numbers of the columns that are kept.
const MOST: usize = 1 << 26;

/// Most multiplications for their products.
const MOST_WORK: usize = 1 << 34;

/// How units are hidden among bins that are drawn anew in every epoch: the columns of an encoder, in units of the sensitivity.
#[derive(Clone, Debug, PartialEq)]
pub struct Reshuffled {
    bins: usize,
    epochs: usize,
    width: usize,
    /// `C_{s+i, s}` for `i < w`, column after column, zero for steps after the last.
    columns: Vec<f64>,
    /// `⟨Ce_s, Ce_{s+i}⟩` of these, likewise.
    near: Vec<f64>,
    /// What tails add to the product of any two patterns.
    common: f64,
    /// What Gaussian releases beside the bins add to it, whatever the noise.
    beside: f64,
    /// A hash of what the columns are of.
    subject: [u8; 32],
}

/// The columns of an encoder: writes that of a step, and returns how far it may be from the true one.
pub type Column<'a> = &'a mut dyn FnMut(usize, &mut [f64]) -> f64;

impl Reshuffled {
    /// From the columns of a lower-triangular encoder that has no negative entries.
    ///
    /// Guarantee: δ is that of the encoder or larger.
    /// Cost: all columns, twice.
    /// Errors: no bins or more than steps; entries that are negative or not finite; sizes that do not fit in memory.
    ///
    /// ```
    /// use dpmf::accounting::Reshuffled;
    ///
    /// // Independent noise over ten epochs of twenty steps.
    /// let mut column = |step: usize, column: &mut [f64]| {
    ///     column[step] = 1.0;
    ///     0.0
    /// };
    /// let hidden = Reshuffled::new(20, 200, &mut column)?;
    /// assert!(hidden.delta(2.0, 2.0)? < 1e-5);
    /// # Ok::<(), dpmf::Error>(())
    /// ```
    pub fn new(bins: usize, steps: usize, column: Column<'_>) -> Result<Self> {
        if bins == 0 || bins > steps {
            return Err(Error::argument(
                "bins",
                bins,
                "it must be at least 1 and not above the number of steps",
            ));
        }
        let b = bins;
        let epochs = steps.div_ceil(b);
        // The largest norms of what is beyond a number of bands, and beyond the start of the d-th epoch after.
        let (mut beyond, mut far) = (vec![0.0_f64; b + 1], vec![0.0_f64; epochs + 1]);
        let (mut sums, mut room) = (vec![0.0; steps], 0.0_f64);
        let mut scratch = vec![0.0; steps];
        for s in 0..steps {
            scratch.fill(0.0);
            let off = column(s, &mut scratch);
            if let Some(index) = scratch.iter().position(|x| !(*x >= 0.0 && x.is_finite())) {
                let (value, rule) = (scratch[index], "it must be finite and not negative");
                return Err(Error::InvalidEntry { name: "column of the encoder", index, value, rule });
            }
            room = room.max(if off.is_nan() { f64::INFINITY } else { off });
            sums.iter_mut().zip(&scratch).for_each(|(sum, x)| *sum += x);
            let mut suffix_sq = 0.0;
            for t in (s..steps).rev() {
                suffix_sq += scratch[t] * scratch[t];
                if t - s <= b {
                    beyond[t - s] = beyond[t - s].max(suffix_sq);
                }
                if t.is_multiple_of(b) && t / b >= s / b + 2 {
                    let distance = t / b - s / b;
                    far[distance] = far[distance].max(suffix_sq);
                }
            }
        }
        // Sums of positive numbers: rounded up.
        let up = 1.0 + (steps + 8) as f64 * f64::EPSILON;
        beyond.iter_mut().chain(&mut far).for_each(|x| *x = x.sqrt() * up);
        let norm = beyond[0];
        let errors = 2.0 * room * norm + room * room + norm * norm * (steps + 8) as f64 * f64::EPSILON;
        if !errors.is_finite() {
            return Err(Error::Numerical {
                what: "encoder under reshuffled bins",
                index: 0,
                reason: "rounding hides its columns: no bound on them can be proved",
            });
        }
        // What is cut off for steps of one epoch, of neighbours, and of those further apart.
        let common = |width: usize| {
            let near = beyond[width] * norm + errors;
            let others = (2..epochs).map(|d| far[d] * norm + errors);
            let beside = if epochs > 1 { near } else { 0.0 };
            let k = epochs as f64;
            // The same for all epochs, or a band of constants with a diagonal that outweighs it.
            let sum: f64 = beside + others.clone().sum::<f64>();
            let counts: f64 =
                (k - 1.0) * beside + others.enumerate().map(|(i, x)| (k - 2.0 - i as f64) * x).sum::<f64>();
            (k * k * near).min(k * near.max(2.0 * sum) + 2.0 * counts) * up
        };
        let mean = sums.iter().map(|x| x * x).sum::<f64>() / (b * b) as f64;
        let width = (1..b).find(|&width| common(width) <= TAIL * mean).unwrap_or(b);
        let size = epochs * b;
        if size.saturating_mul(width) > MOST || size.saturating_mul(width).saturating_mul(width) > MOST_WORK {
            return Err(Error::Unsupported {
                what: format!("{b} reshuffled bins over {steps} steps"),
                hint: "its columns overlap too much to be computed in memory or time: use fewer steps per epoch, or balls-in-bins",
            });
        }
        let mut columns = vec![0.0; size * width];
        for s in 0..steps {
            scratch.fill(0.0);
            column(s, &mut scratch);
            let end = (s + width).min(steps);
            columns[s * width..][..end - s].copy_from_slice(&scratch[s..end]);
        }
        let mut near = vec![0.0; size * width];
        for s in 0..steps {
            for lag in 0..width.min(size - s) {
                let (from, to) = (&columns[s * width + lag..(s + 1) * width], &columns[(s + lag) * width..]);
                near[s * width + lag] = from.iter().zip(to).map(|(x, y)| x * y).sum();
            }
        }
        let mut hash = Sha256::new();
        hash.update((bins as u64).to_le_bytes());
        columns.iter().for_each(|x| hash.update(x.to_le_bytes()));
        let (common, subject) = (common(width), hash.finalize().into());
        Ok(Self { bins, epochs, width, columns, near, common, beside: 0.0, subject })
    }

    /// The same with a hash of the coefficients that the columns were computed from, which has the same bits on every machine.
    pub(crate) fn about(self, subject: [u8; 32]) -> Self {
        Self { subject, ..self }
    }

    /// The same beside a Gaussian release of μ: it is one more coordinate, in which all patterns are at μ, so that it adds μ² to the
    /// product of any two of them.
    ///
    /// Errors: μ not positive and finite, or so large that its square is not.
    pub fn beside(&self, mu: f64) -> Result<Self> {
        check_positive("mu", mu)?;
        let beside = (Interval::exact(mu).square() + self.beside).hi;
        check_positive("square of mu", beside)?;
        let mut hash = Sha256::new();
        hash.update(b"beside a Gaussian");
        hash.update(self.subject);
        hash.update(mu.to_le_bytes());
        Ok(Self { beside, subject: hash.finalize().into(), ..self.clone() })
    }

    /// The same in units of a sensitivity.
    pub(crate) fn over(mut self, sensitivity: f64) -> Self {
        let (over, over_sq) = (1.0 / sensitivity, sensitivity.powi(-2));
        self.columns.iter_mut().for_each(|x| *x *= over);
        self.near.iter_mut().for_each(|x| *x *= over_sq);
        self.common *= over_sq;
        self
    }

    /// Number of bins `b`.
    pub fn bins(&self) -> usize {
        self.bins
    }

    /// Number of epochs `K`.
    pub fn epochs(&self) -> usize {
        self.epochs
    }

    /// Number of bands `w` that are kept.
    pub fn width(&self) -> usize {
        self.width
    }

    /// The amount that the tails add to the product of any two patterns.
    pub fn common(&self) -> f64 {
        self.common
    }

    /// `⟨Ce_s, Ce_t⟩`, without tails.
    pub fn gram(&self, s: usize, t: usize) -> f64 {
        let (s, lag) = (s.min(t), s.abs_diff(t));
        if lag < self.width { self.near[s * self.width + lag] } else { 0.0 }
    }

    /// δ at ε for a noise multiplier, joining or leaving, whichever is larger.
    ///
    /// Guarantee: not below the true one but for a probability of [`FAILURE`](allocation::FAILURE) over the random numbers, which
    /// follow from the mechanism, σ and ε.
    /// Cost: O(Kbw + Kw² + kKw) for each of 2¹⁷ samples of `k` patterns, and as much for each of 2¹⁸ of none.
    /// Errors: ε or σ not positive and finite.
    pub fn delta(&self, noise_multiplier: f64, epsilon: f64) -> Result<f64> {
        let [joining, leaving] = self.estimate(noise_multiplier, epsilon)?;
        Ok(joining.upper.max(leaving.upper).min(1.0))
    }

    /// The two values of which [`Reshuffled::delta`] is the larger: joining, then leaving.
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
        let sampler = Sampler::new(self, noise_multiplier, epsilon, purpose);
        let joining = sampler.joining(JOINING, share, watch)?;
        Ok([joining, sampler.leaving(joining.upper, LEAVING, share, watch)?])
    }

    /// The smallest noise multiplier that satisfies (ε, δ), to about a thousandth.
    ///
    /// Guarantee: [`Reshuffled::delta`] was seen to be below δ.
    /// Errors: ε not positive and finite, δ outside (0, 1), a target that no finite noise reaches.
    pub fn noise_multiplier(&self, epsilon: f64, delta: f64) -> Result<f64> {
        self.watched_noise_multiplier(epsilon, delta, None, &mut unwatched)
    }

    /// [`Reshuffled::noise_multiplier`] with an observer, who may stop it. It takes less time if a noise multiplier is given that is
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
        Err(allocation::out_of_reach(epsilon))
    }

    /// About the noise multiplier that [`Reshuffled::noise_multiplier`] finds, from fewer samples: nothing is proved of it.
    ///
    /// Errors: those of it.
    pub fn estimated_noise_multiplier(&self, epsilon: f64, delta: f64) -> Result<f64> {
        self.searched_noise_multiplier(epsilon, delta, None, &mut unwatched)
    }

    fn searched_noise_multiplier(
        &self,
        epsilon: f64,
        delta: f64,
        near: Option<f64>,
        watch: Watch<'_>,
    ) -> Result<f64> {
        check_epsilon(epsilon)?;
        check_delta(delta)?;
        let at = |log_sigma: f64| Sampler::new(self, log_sigma.exp(), epsilon, Purpose::Search);
        let start = match near {
            Some(near) => near.ln(),
            None => Self::looked_for(self.guess(epsilon, delta), delta, at, watch)?
                .ok_or_else(|| allocation::out_of_reach(epsilon))?,
        };
        let found = Self::polished(start, delta, at, watch)?;
        Ok(found.ok_or_else(|| allocation::out_of_reach(epsilon))?.exp())
    }

    /// The smallest ε that holds at δ for a noise multiplier, to about a thousandth.
    ///
    /// Guarantee: [`Reshuffled::delta`] was seen to be below δ.
    /// Errors: σ not positive and finite, δ outside (0, 1), an ε above 1000.
    pub fn epsilon(&self, noise_multiplier: f64, delta: f64) -> Result<f64> {
        check_positive("noise multiplier", noise_multiplier)?;
        check_delta(delta)?;
        let out_of_reach = || {
            let rule = "it is too small for any guarantee";
            Error::argument("noise multiplier", noise_multiplier, rule)
        };
        // That of one Gaussian with the variance of the likelihood ratio, to begin with.
        let mu = self.spread().sqrt() / noise_multiplier;
        let start = super::gaussian::epsilon(mu, delta)?.clamp(1e-3, 1e2);
        let at = |log_epsilon: f64| Sampler::new(self, noise_multiplier, log_epsilon.exp(), Purpose::Search);
        let start = Self::looked_for(start.ln(), delta, at, &mut unwatched)?.ok_or_else(out_of_reach)?;
        let start = Self::polished(start, delta, at, &mut unwatched)?.ok_or_else(out_of_reach)?.exp();
        for step in 0..TRIES {
            let epsilon = start * (1.0 + 1e-3 * step as f64);
            if self.delta(noise_multiplier, epsilon)? <= delta * (1.0 - MARGIN) {
                return Ok(epsilon);
            }
        }
        Err(out_of_reach())
    }

    /// The largest `‖C1_π‖²`: what a unit can change whose pattern is known.
    ///
    /// Guarantee: not below the true one; for encoders of at most `b` bands it is that, up to rounding.
    pub fn longest_sq(&self) -> f64 {
        let (b, w) = (self.bins, self.width);
        let mut best: Vec<f64> = vec![0.0; b];
        for e in 0..self.epochs {
            let before = best.iter().copied().fold(0.0, f64::max);
            let reached = |p: usize| {
                let t = e * b + p;
                // Pairs of neighbours count twice; those that do not meet count nothing.
                let met = (b + 1 + p).saturating_sub(w)..b;
                let met = met.filter(|_| e > 0).map(|q| best[q] + 2.0 * self.gram((e - 1) * b + q, t));
                met.fold(before, f64::max) + self.gram(t, t)
            };
            best = (0..b).map(reached).collect();
        }
        let up = 1.0 + (8 * self.epochs + w + 8) as f64 * f64::EPSILON;
        (best.into_iter().fold(0.0, f64::max) + self.common) * up
    }

    /// The mean of all products of two patterns.
    fn spread(&self) -> f64 {
        let (w, b) = (self.width, self.bins as f64);
        let own: f64 = self.near.iter().step_by(w).sum();
        (2.0 * self.near.iter().sum::<f64>() - own) / (b * b) + self.common
    }

    /// About where joining reaches δ, by few samples; `at` makes the sampler.
    fn looked_for(
        start: f64,
        delta: f64,
        at: impl Fn(f64) -> Sampler,
        watch: Watch<'_>,
    ) -> Result<Option<f64>> {
        allocation::solve(start, |x| Ok(over(at(x).joining(JOINING, PILOT[0], watch)?.upper, delta)))
    }

    /// Where joining and leaving both reach δ, from a start that is nearly there.
    fn polished(
        start: f64,
        delta: f64,
        at: impl Fn(f64) -> Sampler,
        watch: Watch<'_>,
    ) -> Result<Option<f64>> {
        let joining = |x: f64| Ok(over(at(x).joining(JOINING, PILOT[1], watch)?.upper, delta));
        let Some(x) = allocation::polish(start, joining)? else { return Ok(None) };
        // Joining needs more noise nearly always.
        let mut leaving = |x: f64| Ok(over(at(x).leaving(delta, LEAVING, PILOT[1], watch)?.upper, delta));
        if leaving(x)? <= 0.0 { Ok(Some(x)) } else { allocation::polish(x, leaving) }
    }

    /// The logarithm of a noise multiplier to start from: that of the Gaussian whose likelihood ratio has as much variance.
    fn guess(&self, epsilon: f64, delta: f64) -> f64 {
        let mu = super::gaussian::mu(epsilon, delta).unwrap_or(1.0);
        0.5 * (self.spread().max(1e-300)).ln() - mu.ln() + 0.1
    }

    /// What a fit asks: the mean estimate of `log σ` that reaches (ε, δ), and how it depends on products of columns, by their
    /// distance modulo the bins. `near` is where the last answer was.
    pub(crate) fn boundary(
        &self,
        epsilon: f64,
        delta: f64,
        samples: usize,
        near: Option<f64>,
    ) -> Result<Boundary> {
        /// How fast `log δ` falls with `log σ` at first, how near a root must be, the longest way at a time, and how often it is gone.
        const SLOPE: f64 = 14.0;
        const CLOSE: f64 = 5e-4;
        const FAR: f64 = 0.2;
        const LOOKS: usize = 12;
        /// Where few samples see nothing, the logarithm of nothing counts as that.
        const MOST: f64 = 4.0;
        let sampler = |log_sigma: f64| Sampler::new(self, log_sigma.exp(), epsilon, Purpose::Search);
        let excess = |estimate: Estimate| over(estimate.mean, delta);
        let start = near.unwrap_or_else(|| self.guess(epsilon, delta));
        let sampler = |log_sigma: f64| sampler(log_sigma).joining_enough();
        let joining = |log_sigma: f64| Ok(excess(sampler(log_sigma).joining(samples, 1, &mut unwatched)?));
        let (mut x, mut slope, mut last) = (start, SLOPE, None::<(f64, f64)>);
        let mut found = None;
        for _ in 0..LOOKS {
            let value = f64::clamp(joining(x)?, -MOST, MOST);
            if let Some((before, at_before)) = last.filter(|(before, _)| (before - x).abs() > 1e-6) {
                slope = ((at_before - value) / (x - before)).clamp(4.0, 60.0);
            }
            last = Some((x, value));
            let step = (value / slope).clamp(-FAR, FAR);
            x += step;
            if step.abs() < CLOSE {
                found = Some(x);
                break;
            }
        }
        let join = match found {
            Some(found) => found,
            None => allocation::solve(start, joining)?.ok_or_else(|| allocation::out_of_reach(epsilon))?,
        };
        let at = sampler(join);
        let leave = join + over(at.mean_of_leaving(samples)?, delta).max(-MOST) / slope;
        let correlation = at.correlation(Side::Joining, samples);
        // A unit that leaves counts where hiding it takes nearly as much noise.
        if leave < join - 4.0 * BESIDE {
            return Ok(Boundary { log_sigma: join, spectrum: correlation.map(|c| spectrum(&c)) });
        }
        let share = 1.0 / (1.0 + ((join - leave) / BESIDE).exp());
        let correlation = match (correlation, sampler(leave).correlation(Side::Leaving, samples)) {
            (Some(joining), Some(leaving)) => {
                let [a, c] = [(1.0 - share) / self.product(&joining), share / self.product(&leaving)];
                Some(joining.iter().zip(&leaving).map(|(x, y)| (a * x + c * y) / (a + c)).collect())
            }
            (joining, leaving) => joining.or(leaving),
        };
        Ok(Boundary { log_sigma: join.max(leave), spectrum: correlation.map(|c: Vec<f64>| spectrum(&c)) })
    }

    /// About the noise of [`Reshuffled::boundary`] for a unit that joins, in a fraction of the time, where a noise is known that is nearly
    /// right.
    ///
    /// Errors: none.
    pub(crate) fn joining_near(&self, epsilon: f64, delta: f64, samples: usize, near: f64) -> Result<f64> {
        /// How fast `log δ` falls with `log σ`, mostly, and the longest way.
        const SLOPE: f64 = 18.0;
        const FAR: f64 = 0.15;
        let value = |log_sigma: f64| -> Result<f64> {
            let sampler = Sampler::new(self, log_sigma.exp(), epsilon, Purpose::Search).joining_enough();
            Ok(over(sampler.joining(samples, 1, &mut unwatched)?.mean, delta).clamp(-4.0, 4.0))
        };
        let first = value(near)?;
        let x = near + (first / SLOPE).clamp(-FAR, FAR);
        if (x - near).abs() < 2e-3 {
            return Ok(x);
        }
        let second = value(x)?;
        let slope = ((first - second) / (x - near)).clamp(4.0, 60.0);
        Ok(x + (second / slope).clamp(-FAR, FAR))
    }

    /// `⟨H, G⟩`, but for the tails, with the matrix `H` of correlations by distance.
    fn product(&self, correlation: &[f64]) -> f64 {
        let at = |lag: usize| self.near.iter().skip(lag).step_by(self.width).sum::<f64>();
        let twice = |lag: usize| if lag == 0 { 1.0 } else { 2.0 };
        (0..self.width).map(|lag| twice(lag) * correlation[lag] * at(lag)).sum()
    }
}

/// `log δ̂ − log δ`.
fn over(upper: f64, delta: f64) -> f64 {
    (upper.max(1e-300) / delta).ln()
}

/// The spectrum of correlations by distance, up to an epoch, on a circle of two: a unit has one step in an epoch, so that the same bin of
/// the next is a stranger's, and products of columns reach less than an epoch.
fn spectrum(correlation: &[f64]) -> Vec<f64> {
    let period = 2 * (correlation.len() - 1);
    let turn = |k: usize| libm::cos(std::f64::consts::TAU * k as f64 / period as f64);
    let turns: Vec<f64> = (0..period).map(turn).collect();
    let at =
        |j: usize| (0..period).map(|lag| correlation[lag.min(period - lag)] * turns[j * lag % period]).sum();
    let spectrum: Vec<f64> = (0..period).map(at).collect();
    // Estimates may be negative where the true one is small.
    let least = 1e-6 * spectrum[0];
    spectrum.into_iter().map(|x| x.max(least)).collect()
}

/// A [`Watch`] that sees nothing and never ends a proof.
fn unwatched(_: f64) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

#[cfg(test)]
mod tests;
