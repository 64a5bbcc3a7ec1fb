//! Balls in bins: what is hidden when every unit throws itself into one of `b` bins, in secret, and takes part whenever its
//! bin's turn comes.
//!
//! With `m_p` the sum of the columns of `C` at the steps of bin `p`, and `C ≥ 0`, the worst that one unit can do is described
//! by the pair `P = (1/b) Σ_p N(m_p, σ²I)` and `Q = N(0, σ²I)`, in both directions. Only the Gram matrix `G_pq = ⟨m_p, m_q⟩/σ²`
//! matters: with `u_p = ⟨m_p, x⟩/σ² − G_pp/2` the privacy loss is `L = log (1/b) Σ_p e^{u_p}`, and
//! `δ(ε) = E_P[(1 − e^{ε − L})_+]` or `E_Q[(1 − e^{ε + L})_+]`, whichever is larger. No closed form is known; both are
//! estimated from random numbers, by samplers that look where it counts and whose values are bounded, so that a bound on δ holds
//! but for a probability of [`FAILURE`]. The random numbers of a proof are seeded by a hash of what is proved, the coefficients
//! with σ and ε: nobody can choose coefficients to suit them.
//!
//! *Joining.* Draw `k` bins one after the other, the `j`-th equal to `q` with probability proportional to
//! `e^{Σ_{i<j} G_{q_i q}}`, of total `z_j`, then `x` from `N(Σ_i m_{q_i}, σ²I)`. With `e^{Σ u_{q_i} − kL}/b^k` as the law of the
//! bins given `x`, the density of `P` over that of the draw is `W = e^{−(k−1)L} Π_j z_j/b`. By Hölder's inequality
//! `z_j/b ≤ ζ_{j−1} = max_r (1/b) Σ_q e^{(j−1)G_rq}`, so `W (1 − e^{ε−L})_+` is at most
//! `e^{−(k−1)ε} Π_{j<k} ζ_j · (1/k)(1 − 1/k)^{k−1}` where it is not zero. `k` is the number that makes this least.
//!
//! *Leaving.* Draw `x` from `N(−λ m̄, σ²I)`, `m̄` the mean of the `m_p`. The density of `Q` over that is `e^{λȳ + λ²v/2}`, `ȳ` the
//! mean of the `⟨m_p, x⟩/σ²` and `v` that of all `G_pq`. By Jensen's inequality `ȳ − d̄/2 ≤ L`, `d̄` the mean of the `G_pp`, so the
//! value is at most `e^{−λ(ε − d̄/2) + λ²v/2} λ^λ/(λ + 1)^{λ+1}`.
//!
//! Entries of `G` may be rounded up, as long as it stays a Gram matrix: δ is the mean of a convex function of `Σ e^{u_p}`, and by
//! Kahane's convexity inequality that grows with every entry.
//!
//! Reference: Chua et al., "Balls-and-bins sampling for DP-SGD", 2024, and Choquette-Choo et al., "Near exact privacy
//! amplification for matrix mechanisms", 2024, for the pair; Kahane, "Sur le chaos multiplicatif", 1985; Maurer and Pontil,
//! "Empirical Bernstein bounds and sample variance penalization", 2009.

mod sample;

use super::{check_delta, check_epsilon, check_positive};
use crate::error::{Error, Result};
use faer::{Mat, Side};
use sample::Sampler;
pub(crate) use sample::{Boundary, Purpose};
use sha2::{Digest, Sha256};
use std::ops::ControlFlow;

/// The probability, over the random numbers, that a bound on δ does not hold.
pub const FAILURE: f64 = 1e-9;

/// Noise multipliers that may be tried until a bound holds.
const TRIES: usize = 64;

/// Mechanisms of which one plan may try that. Each bound must fail [`TRIES`] times as many times less.
pub(crate) const PROOFS: usize = 8;

/// The share of the samples that looking around takes, one over this.
const PILOT: usize = 4;

/// By how much a bound must be kept when it is first found, so that other machines, which round otherwise, find it too.
const MARGIN: f64 = 1e-6;

/// How units are hidden among bins: the Gram matrix of the sums of columns, in units of the sensitivity.
#[derive(Clone, Debug, PartialEq)]
pub struct Allocation {
    bins: usize,
    gram: Vec<f64>,
    /// A hash of what the matrix was made from.
    subject: [u8; 32],
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
        let allocation = Self { bins, gram, subject: hash.finalize().into() };
        allocation.root(1.0)?;
        Ok(allocation)
    }

    /// The same with a hash of the coefficients that the matrix was computed from. Unlike the matrix, they have the same bits
    /// on every machine, so that every machine proves with the same random numbers.
    pub(crate) fn about(self, subject: [u8; 32]) -> Self {
        Self { subject, ..self }
    }

    /// Number of bins `b`.
    pub fn bins(&self) -> usize {
        self.bins
    }

    /// `⟨m_p, m_q⟩`.
    pub fn gram(&self, p: usize, q: usize) -> f64 {
        self.gram[p * self.bins + q]
    }

    /// δ at ε for a noise multiplier, joining or leaving, whichever is larger.
    ///
    /// Guarantee: not below the true one but for a probability of [`FAILURE`] over the random numbers, which follow from the
    /// mechanism, σ and ε.
    /// Cost: O(b²) for each of 2¹⁴ to 2¹⁶ samples.
    /// Errors: ε or σ not positive and finite.
    pub fn delta(&self, noise_multiplier: f64, epsilon: f64) -> Result<f64> {
        let [joining, leaving] = self.estimate(noise_multiplier, epsilon)?;
        Ok(joining.upper.max(leaving.upper).min(1.0))
    }

    /// What [`Allocation::delta`] is the larger of: joining, then leaving.
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
        Ok([joining, sampler.leaving(self.samples() / 4, share, watch)?])
    }

    /// The smallest noise multiplier that satisfies (ε, δ), to about a thousandth.
    ///
    /// Candidates are found with other random numbers than those of the proof, so that looking at several does not bias it.
    ///
    /// Guarantee: [`Allocation::delta`] was seen to be below δ.
    /// Errors: ε not positive and finite, δ outside (0, 1), a target that no finite noise reaches.
    pub fn noise_multiplier(&self, epsilon: f64, delta: f64) -> Result<f64> {
        self.watched_noise_multiplier(epsilon, delta, &mut unwatched)
    }

    /// [`Allocation::noise_multiplier`] that somebody watches, and may end.
    ///
    /// Errors: those of it; [`Error::Interrupted`].
    pub fn watched_noise_multiplier(&self, epsilon: f64, delta: f64, watch: Watch<'_>) -> Result<f64> {
        let start = self.searched_noise_multiplier(epsilon, delta, watch)?;
        for step in 0..TRIES {
            let sigma = start * (1.0 + 1e-3 * step as f64);
            let [joining, leaving] = self.estimate_for(sigma, epsilon, Purpose::Proof, 1, watch)?;
            if joining.upper.max(leaving.upper) <= delta * (1.0 - MARGIN) {
                return Ok(sigma);
            }
        }
        Err(Error::argument("epsilon", epsilon, "no noise can be shown to reach it"))
    }

    /// About the noise multiplier that [`Allocation::noise_multiplier`] finds, from fewer samples: nothing is proved of it.
    ///
    /// Errors: those of it.
    pub fn estimated_noise_multiplier(&self, epsilon: f64, delta: f64) -> Result<f64> {
        self.searched_noise_multiplier(epsilon, delta, &mut unwatched)
    }

    fn searched_noise_multiplier(&self, epsilon: f64, delta: f64, watch: Watch<'_>) -> Result<f64> {
        check_epsilon(epsilon)?;
        check_delta(delta)?;
        let pilot = |log_sigma: f64| self.pilot(log_sigma.exp(), epsilon, delta, watch);
        let found = solve(self.guess(epsilon, delta), pilot)?;
        let out_of_reach = || Error::argument("epsilon", epsilon, "no noise can be shown to reach it");
        Ok(found.ok_or_else(out_of_reach)?.exp())
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
        let largest = (0..self.bins).map(|p| self.gram(p, p)).fold(0.0, f64::max);
        let alone = super::gaussian::epsilon(largest.sqrt() / noise_multiplier, delta)?.clamp(1e-6, 1e3);
        // The noise that would reach an ε, against what there is.
        let pilot = |log_epsilon: f64| self.pilot(noise_multiplier, log_epsilon.exp(), delta, &mut unwatched);
        let start = solve(alone.ln(), pilot)?.ok_or_else(out_of_reach)?.exp();
        for step in 0..TRIES {
            let epsilon = start * (1.0 + 1e-3 * step as f64);
            if self.delta(noise_multiplier, epsilon)? <= delta * (1.0 - MARGIN) {
                return Ok(epsilon);
            }
        }
        Err(out_of_reach())
    }

    /// `log δ̂ − log δ`, δ̂ the bound with random numbers for looking around.
    fn pilot(&self, noise_multiplier: f64, epsilon: f64, delta: f64, watch: Watch<'_>) -> Result<f64> {
        let estimates = self.estimate_for(noise_multiplier, epsilon, Purpose::Search, PILOT, watch)?;
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

    /// What a fit asks: the mean estimate of `log σ` that reaches (ε, δ), and how it depends on `G`. `near` is where the last
    /// answer was.
    pub(crate) fn boundary(
        &self,
        epsilon: f64,
        delta: f64,
        samples: usize,
        near: Option<f64>,
    ) -> Result<Boundary> {
        let mean = |log_sigma: f64| {
            let sampler = Sampler::new(self, log_sigma.exp(), epsilon, Purpose::Search)?;
            Ok((sampler.joining(samples, 1, &mut unwatched)?.mean.max(1e-300) / delta).ln())
        };
        let log_sigma = solve(near.unwrap_or_else(|| self.guess(epsilon, delta)), mean)?
            .ok_or_else(|| Error::argument("epsilon", epsilon, "no noise can be shown to reach it"))?;
        let spectrum = Sampler::new(self, log_sigma.exp(), epsilon, Purpose::Search)?.spectrum(samples);
        Ok(Boundary { log_sigma, spectrum })
    }

    /// Samples of a bound: many while they cost little.
    fn samples(&self) -> usize {
        ((1_usize << 30) / (self.bins * self.bins)).clamp(1 << 14, 1 << 16)
    }

    /// The Cholesky factor of `G/σ²`, its diagonal raised by what rounding may hide.
    fn root(&self, noise_multiplier: f64) -> Result<Mat<f64>> {
        let b = self.bins;
        let largest = (0..b).map(|p| self.gram(p, p)).fold(f64::MIN_POSITIVE, f64::max);
        let over = noise_multiplier.powi(-2);
        let entry = |p: usize, q: usize| {
            // A Gram matrix of computed vectors may miss being one by its rounding.
            let room = if p == q { largest * b as f64 * 4.0 * f64::EPSILON } else { 0.0 };
            (self.gram(p, q) + room) * over
        };
        let refused = |_| Error::Numerical {
            what: "Gram matrix of the bins",
            index: 0,
            reason: "it is not positive semi-definite",
        };
        Ok(Mat::from_fn(b, b, entry).llt(Side::Lower).map_err(refused)?.L().to_owned())
    }
}

/// A [`Watch`] that sees nothing and never ends a proof.
fn unwatched(_: f64) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// Where a decreasing function is zero, to 2·10⁻⁴; `None` if it is above zero up to 40 beyond the start.
///
/// Few samples see nothing at all where δ is small, and the logarithm of nothing would lead every secant astray: values count no
/// more than [`MOST`], and a bracket that two steps have not halved is bisected.
fn solve(start: f64, mut f: impl FnMut(f64) -> Result<f64>) -> Result<Option<f64>> {
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
