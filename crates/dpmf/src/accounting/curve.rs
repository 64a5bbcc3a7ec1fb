//! The privacy curve: δ as a function of ε, for any mechanism.

use super::interval::Interval;
use super::pld::{self, Bracket, Phase, PoissonCurve};
use super::{
    Accountant, Adjacency, Allocation, Reshuffled, check_delta, check_epsilon, check_positive, gaussian,
    search, shown,
};
use crate::error::{Error, Result};
use std::sync::Arc;

/// The privacy of a mechanism at every ε: δ as a function of ε.
///
/// Guarantee: δ(ε) and ε(δ) are rounded up, so that whatever pair is read off holds.
///
/// ```
/// use dpmf::accounting::{Accountant, PrivacyCurve};
///
/// let one = PrivacyCurve::gaussian(0.5, Accountant::Exact)?;
/// let three = PrivacyCurve::compose(&[one.clone(), one.clone(), one.clone()])?;
/// assert!(three.epsilon(1e-6)? < 3.0 * one.epsilon(1e-6)?);
/// assert!(three.satisfies(three.epsilon(1e-6)?, 1e-6)?);
/// # Ok::<(), dpmf::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum PrivacyCurve {
    /// The curve of the Gaussian mechanism, in closed form.
    Gaussian {
        /// Sensitivity over standard deviation.
        mu: f64,
        /// By which of its descriptions ε and δ are read.
        accountant: Accountant,
    },
    /// The curve of steps that sample their records, by privacy loss distributions.
    Poisson(PoissonCurve),
    /// The curve of units that hide in bins, from random numbers that follow from what is proved.
    Allocation {
        /// Where they hide.
        allocation: Arc<Allocation>,
        /// Standard deviation of the noise over the sensitivity.
        noise_multiplier: f64,
    },
    /// The curve of units that hide in bins drawn anew in every epoch, likewise.
    Reshuffled {
        /// Where they hide.
        reshuffled: Arc<Reshuffled>,
        /// Standard deviation of the noise over the sensitivity.
        noise_multiplier: f64,
    },
}

impl PrivacyCurve {
    /// The curve of a Gaussian mechanism with `μ = Δ/s`.
    ///
    /// Errors: `μ` not positive and finite.
    pub fn gaussian(mu: f64, accountant: Accountant) -> Result<Self> {
        check_positive("mu", mu)?;
        Ok(Self::Gaussian { mu, accountant })
    }

    /// The curve of phases of rounds, each of which takes every record with some probability, in secret: DP-SGD, or a
    /// banded mechanism whose parts of the data take turns.
    ///
    /// Guarantee: for records added, removed, or replaced with zero; without sampling it is the Gaussian's own curve.
    /// Errors: those of [`PoissonCurve::new`]; replacing a record with another one.
    ///
    /// ```
    /// use dpmf::accounting::{Adjacency, Phase, PrivacyCurve};
    ///
    /// let steps = Phase { noise_multiplier: 1.0, rate: 0.01, rounds: 1000 };
    /// let curve = PrivacyCurve::poisson(&[steps], Adjacency::AddOrRemove)?;
    /// assert!((curve.epsilon(1e-5)? - 1.8282).abs() < 1e-3);
    /// # Ok::<(), dpmf::Error>(())
    /// ```
    pub fn poisson(phases: &[Phase], adjacency: Adjacency) -> Result<Self> {
        let curve = PoissonCurve::new(phases)?;
        if adjacency == Adjacency::ReplaceOne && phases.iter().any(|p| p.rate < 1.0) {
            return Err(Error::Unsupported {
                what: "the relation replace-one with sampling".into(),
                hint: "with sampling, use add-or-remove or replace-with-zero",
            });
        }
        match curve.mu() {
            // The factor is 1 or 2: exact.
            Some(mu) => Self::gaussian(mu * adjacency.sensitivity_factor(), Accountant::Exact),
            None => Ok(Self::Poisson(curve)),
        }
    }

    /// δ at ε; 1 where nothing is proved.
    ///
    /// Guarantee: rounded up.
    /// Errors: ε not positive and finite.
    pub fn delta(&self, epsilon: f64) -> Result<f64> {
        match self {
            Self::Gaussian { mu, accountant } => accountant.delta(*mu, epsilon),
            Self::Poisson(curve) => curve.delta(epsilon),
            Self::Allocation { allocation, noise_multiplier } => allocation.delta(*noise_multiplier, epsilon),
            Self::Reshuffled { reshuffled, noise_multiplier } => reshuffled.delta(*noise_multiplier, epsilon),
        }
    }

    /// ε at δ from below and from above, no further apart than `width` where the arithmetic allows it.
    ///
    /// Guarantee: the lower end is at most ε, the upper at least. By an accountant other than the exact one, the lower
    /// end is still that of the mechanism, the upper one what the accountant proves.
    /// Errors: δ outside (0, 1); a width that is not positive and finite; an ε too large to be a number.
    pub fn epsilon_bracket(&self, delta: f64, width: f64) -> Result<Bracket> {
        check_positive("width", width)?;
        match self {
            Self::Gaussian { mu, accountant } => Ok(Bracket {
                lower: gaussian::epsilon_lower(*mu, delta)?,
                upper: accountant.epsilon(*mu, delta)?,
            }),
            Self::Poisson(curve) => curve.epsilon_bracket(delta, width),
            Self::Allocation { .. } | Self::Reshuffled { .. } => {
                Ok(Bracket { lower: 0.0, upper: self.epsilon(delta)? })
            }
        }
    }

    /// δ at ε from below and from above, as near to each other as `width` in ε makes them.
    ///
    /// Guarantee: the lower end is at most δ, the upper at least.
    /// Errors: ε or the width not positive and finite.
    pub fn delta_bracket(&self, epsilon: f64, width: f64) -> Result<Bracket> {
        check_positive("width", width)?;
        match self {
            Self::Gaussian { mu, accountant } => {
                let upper = accountant.delta(*mu, epsilon)?;
                Ok(Bracket { lower: gaussian::ln_delta_enclosure(*mu, epsilon).exp().lo, upper })
            }
            Self::Poisson(curve) => curve.delta_bracket(epsilon, width),
            Self::Allocation { .. } | Self::Reshuffled { .. } => {
                Ok(Bracket { lower: 0.0, upper: self.delta(epsilon)? })
            }
        }
    }

    /// ε at δ; 0 where δ alone covers the difference.
    ///
    /// Guarantee: rounded up.
    /// Errors: δ outside (0, 1); an ε too large to be a number.
    pub fn epsilon(&self, delta: f64) -> Result<f64> {
        match self {
            Self::Gaussian { mu, accountant } => accountant.epsilon(*mu, delta),
            Self::Poisson(curve) => curve.epsilon(delta),
            Self::Allocation { allocation, noise_multiplier } => allocation.epsilon(*noise_multiplier, delta),
            Self::Reshuffled { reshuffled, noise_multiplier } => reshuffled.epsilon(*noise_multiplier, delta),
        }
    }

    /// Whether (ε, δ) is proved.
    ///
    /// Guarantee: `true` is a proof; `false` within rounding of the curve may only be doubt.
    /// Errors: those of [`PrivacyCurve::epsilon`].
    pub fn satisfies(&self, epsilon: f64, delta: f64) -> Result<bool> {
        match self {
            // One look at the random numbers, and not at whatever ε they like best.
            Self::Allocation { .. } | Self::Reshuffled { .. } if epsilon > 0.0 => {
                Ok(self.delta(epsilon)? <= delta)
            }
            _ => Ok(self.epsilon(delta)? <= epsilon),
        }
    }

    /// The curve of all the mechanisms together. What each of them is applied to may depend on what earlier ones released;
    /// the mechanisms themselves must be fixed in advance, or else it takes a [`Filter`](super::Filter).
    ///
    /// Gaussian mechanisms compose to one whose μ² is the sum of theirs: nothing is lost. With sampled steps among them
    /// all become phases of one composition.
    ///
    /// Guarantee: μ is rounded up.
    /// Errors: no mechanism; curves that are read by different accountants; sampled steps beside a Gaussian that is
    /// not read by the exact one.
    ///
    /// Reference: Corollary 3.3 of \[DRS22\].
    pub fn compose(curves: &[Self]) -> Result<Self> {
        match curves {
            [] => return Err(Error::argument("curves", 0, "at least one mechanism is needed")),
            // Alone, a mechanism is as private as it is, without another rounding.
            [alone] => return Ok(alone.clone()),
            _ => {}
        }
        let mut gaussians = Vec::new();
        let mut phases: Vec<Phase> = Vec::new();
        for curve in curves {
            match curve {
                Self::Gaussian { mu, accountant } => gaussians.push((*mu, *accountant)),
                Self::Poisson(curve) => phases.extend_from_slice(curve.phases()),
                Self::Allocation { .. } | Self::Reshuffled { .. } => {
                    return Err(Error::Unsupported {
                        what: "composing balls in bins, dealt once or reshuffled, with another mechanism"
                            .into(),
                        hint: "its privacy curve is known at one point only; add up ε and δ instead",
                    });
                }
            }
        }
        let accountant = match gaussians[..] {
            [] => Accountant::Exact,
            [(_, accountant), ..] => accountant,
        };
        if let Some((_, other)) = gaussians.iter().find(|(_, other)| *other != accountant) {
            return Err(Error::argument("accountant", other, "all curves must use the same accountant"));
        }
        if !phases.is_empty() {
            if accountant != Accountant::Exact {
                let rule = "together with sampled steps, only the exact accountant can be used";
                return Err(Error::argument("accountant", accountant, rule));
            }
            for (mu, _) in gaussians {
                let noise_multiplier = (Interval::exact(1.0) / mu).lo;
                phases.push(Phase { noise_multiplier, rate: 1.0, rounds: 1 });
            }
            return Ok(Self::Poisson(PoissonCurve::new(&phases)?));
        }
        let largest = gaussians.iter().map(|(mu, _)| *mu).fold(0.0, f64::max);
        // Scaled by the largest μ, so that no square overflows.
        let total = gaussians
            .iter()
            .fold(Interval::exact(0.0), |total, (mu, _)| total + (Interval::exact(*mu) / largest).square());
        Self::gaussian((total.sqrt() * largest).hi, accountant)
    }

    /// μ, where the mechanism is Gaussian.
    pub fn mu(&self) -> Option<f64> {
        match *self {
            Self::Gaussian { mu, .. } => Some(mu),
            Self::Poisson(_) | Self::Allocation { .. } | Self::Reshuffled { .. } => None,
        }
    }
}

/// The smallest noise multiplier σ whose curve satisfies (ε, δ): by bisection, or for sampled steps by secants to a
/// relative 1e-5.
///
/// `curve` must promise more the larger σ is.
///
/// Guarantee: rounded up: the curve was seen to satisfy (ε, δ) at the result.
/// Cost: some hundred evaluations of a closed form, or a few compositions.
/// Errors: ε not positive and finite, δ outside (0, 1), a target that no finite noise reaches.
pub fn calibrate(epsilon: f64, delta: f64, curve: impl Fn(f64) -> Result<PrivacyCurve>) -> Result<f64> {
    check_epsilon(epsilon)?;
    check_delta(delta)?;
    // What has no curve at all has none at any noise.
    match curve(1.0)? {
        PrivacyCurve::Poisson(_) => return secants(epsilon, delta, curve),
        PrivacyCurve::Allocation { allocation, .. } => return allocation.noise_multiplier(epsilon, delta),
        PrivacyCurve::Reshuffled { reshuffled, .. } => return reshuffled.noise_multiplier(epsilon, delta),
        _ => {}
    }
    // Asking for δ at ε is one evaluation; asking for ε at δ is a search of its own.
    let close = |sigma: f64| curve(sigma).and_then(|curve| curve.delta(epsilon)).is_ok_and(|d| d <= delta);
    let (mut below, mut above) = (1.0, 1.0);
    while !close(above) {
        below = above;
        above *= 16.0;
        if !f64::is_finite(above) {
            let rule = "it is too small: the noise would be infinite";
            return Err(Error::argument("epsilon", shown(epsilon), rule));
        }
    }
    while below > f64::MIN_POSITIVE && close(below) {
        above = below;
        below /= 16.0;
    }
    let mut sigma = if below < above { search::first_true(below, above, close) } else { above };
    // The two questions round apart by a few units; the noise goes up until both are answered.
    let mut step = 2.0 * f64::EPSILON;
    while !curve(sigma)?.satisfies(epsilon, delta)? {
        sigma *= 1.0 + step;
        step *= 2.0;
        if !sigma.is_finite() {
            let rule = "no finite amount of noise can be proved to reach it";
            return Err(Error::argument("epsilon", shown(epsilon), rule));
        }
    }
    Ok(sigma)
}

/// The least noise multiplier of sampled steps that gives (ε, δ): DP-SGD with `rounds` steps, each of which takes every
/// record with probability `rate`.
///
/// Guarantee: rounded up, by about 1e-5 of it; for records added, removed, or replaced with zero.
/// Cost: a few compositions: milliseconds for hundreds of rounds.
/// Errors: ε not positive and finite, δ outside (0, 1), a rate outside (0, 1], no rounds.
pub fn poisson_noise_multiplier(epsilon: f64, delta: f64, rate: f64, rounds: u64) -> Result<f64> {
    // The rate and the rounds are checked at a noise multiplier that is beyond doubt.
    PoissonCurve::new(&[Phase { noise_multiplier: 1.0, rate, rounds }])?;
    calibrate(epsilon, delta, |noise_multiplier| {
        PrivacyCurve::poisson(&[Phase { noise_multiplier, rate, rounds }], Adjacency::AddOrRemove)
    })
}

/// [`calibrate`] for curves that take milliseconds: a guess by the saddle point, then secants on what is proved.
fn secants(epsilon: f64, delta: f64, curve: impl Fn(f64) -> Result<PrivacyCurve>) -> Result<f64> {
    const TOLERANCE: f64 = 1e-5;
    // Guessed: too little noise for a curve is too much ε.
    let guess = |sigma: f64| match curve(sigma) {
        Ok(PrivacyCurve::Poisson(curve)) => curve.guess(delta),
        _ => f64::INFINITY,
    };
    let (mut low, mut high) = (libm::log(pld::LEAST_NOISE), libm::log(1e8));
    while high - low > 1e-3 {
        let middle = 0.5 * (low + high);
        if guess(libm::exp(middle)) <= epsilon {
            high = middle;
        } else {
            low = middle;
        }
    }
    // ln ε falls by so much as ln σ grows by one.
    let at = libm::exp(high);
    let ratio = guess(at * 0.99) / guess(at);
    let slope = if ratio.is_finite() { (libm::log(ratio) / 0.01).clamp(0.2, 20.0) } else { 1.0 };

    // Proved: the noise at which too much was seen, and at which enough was, with ln of ε over its target.
    let excess = |sigma: f64| Ok::<_, Error>(libm::log(curve(sigma)?.epsilon(delta)?.max(1e-300) / epsilon));
    let mut too_little: Option<(f64, f64)> = None;
    let mut enough: Option<(f64, f64)> = None;
    let mut sigma = at.max(pld::LEAST_NOISE);
    for _ in 0..60 {
        let over = excess(sigma)?;
        if over <= 0.0 {
            enough = Some((sigma, over));
            // Within the tolerance, or as little noise as there can be.
            if over > -0.9 * TOLERANCE * slope || sigma <= pld::LEAST_NOISE {
                return Ok(sigma);
            }
        } else {
            too_little = Some((sigma, over));
        }
        // A little to the safe side of where the line through the two, or the slope guessed, meets the target.
        let next = match (too_little, enough) {
            (Some((a, over)), Some((b, under))) => {
                if b <= a * (1.0 + TOLERANCE) {
                    return Ok(b);
                }
                let share = (over / (over - under)).clamp(0.02, 0.98);
                let line = a * libm::exp(libm::log(b / a) * share);
                (line * (1.0 + 0.4 * TOLERANCE)).min(0.5 * (line + b))
            }
            _ => {
                let step = (over / slope).clamp(-1.0, 1.0);
                sigma * libm::exp(step) * (1.0 + 0.5 * TOLERANCE)
            }
        };
        sigma = next.max(pld::LEAST_NOISE);
    }
    match enough {
        Some((sigma, _)) => Ok(sigma),
        None => Err(Error::argument(
            "epsilon",
            shown(epsilon),
            "no finite amount of noise can be proved to reach it",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn gaussian(mu: f64) -> PrivacyCurve {
        PrivacyCurve::gaussian(mu, Accountant::Exact).unwrap()
    }

    #[test]
    fn composition_adds_squares() {
        let composed = PrivacyCurve::compose(&[gaussian(3.0), gaussian(4.0)]).unwrap();
        let mu = composed.mu().unwrap();
        assert!((5.0..5.0 + 1e-14).contains(&mu), "{mu}");
        let extremes = PrivacyCurve::compose(&[gaussian(1e-200), gaussian(1e200)]).unwrap().mu().unwrap();
        assert!((1e200..1e200 * (1.0 + 1e-14)).contains(&extremes), "{extremes}");
        assert!(PrivacyCurve::compose(&[]).is_err());
        let other = PrivacyCurve::gaussian(1.0, Accountant::Rdp).unwrap();
        assert!(
            PrivacyCurve::compose(&[gaussian(1.0), other]).unwrap_err().to_string().contains("accountant")
        );
    }

    #[test]
    fn targets_out_of_reach_are_said_to_be() {
        for accountant in Accountant::ALL {
            match calibrate(1e-300, 1e-6, |sigma| PrivacyCurve::gaussian(1.0 / sigma, accountant)) {
                Ok(sigma) => assert!(sigma.is_finite() && sigma > 1e5, "{accountant}: {sigma}"),
                Err(error) => assert!(error.to_string().starts_with("epsilon is 1e-300, but"), "{error}"),
            }
        }
    }

    #[test]
    fn three_models_at_epsilon_two_cost_3_67_together() {
        // The review's figure for three mechanisms trained on the same users at (2, 1e-6) each.
        let sigma = calibrate(2.0, 1e-6, |sigma| Ok(gaussian(1.0 / sigma))).unwrap();
        let all =
            PrivacyCurve::compose(&[gaussian(1.0 / sigma), gaussian(1.0 / sigma), gaussian(1.0 / sigma)]);
        assert!((all.unwrap().epsilon(1e-6).unwrap() - 3.67).abs() < 5e-3);
    }

    proptest! {
        #[test]
        fn calibration_is_the_least_noise(ln_epsilon in -5.0..6.0_f64, exponent in -30.0..-1.0_f64, which in 0..4_usize) {
            let (epsilon, delta) = (ln_epsilon.exp(), 10f64.powf(exponent));
            let accountant = Accountant::ALL[which];
            let curve = |sigma: f64| PrivacyCurve::gaussian(1.0 / sigma, accountant);
            match calibrate(epsilon, delta, curve) {
                Ok(sigma) => {
                    prop_assert!(curve(sigma).unwrap().satisfies(epsilon, delta).unwrap());
                    prop_assert!(!curve(sigma * (1.0 - 1e-9)).unwrap().satisfies(epsilon, delta).unwrap());
                }
                // Rényi orders up to 512 prove no small ε at a tiny δ, whatever the noise.
                Err(error) => prop_assert!(accountant == Accountant::Rdp, "{error}"),
            }
        }
    }
}
