//! The privacy curve: δ as a function of ε, whatever mechanism it belongs to.

use super::interval::Interval;
use super::{Accountant, check_delta, check_epsilon, check_positive, search, shown};
use crate::error::{Error, Result};

/// What a mechanism promises at every ε at once.
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
}

impl PrivacyCurve {
    /// The curve of a Gaussian mechanism with `μ = Δ/s`.
    ///
    /// Errors: `μ` not positive and finite.
    pub fn gaussian(mu: f64, accountant: Accountant) -> Result<Self> {
        check_positive("mu", mu)?;
        Ok(Self::Gaussian { mu, accountant })
    }

    /// δ at ε; 1 where nothing is proved.
    ///
    /// Guarantee: rounded up.
    /// Errors: ε not positive and finite.
    pub fn delta(&self, epsilon: f64) -> Result<f64> {
        match *self {
            Self::Gaussian { mu, accountant } => accountant.delta(mu, epsilon),
        }
    }

    /// ε at δ; 0 where δ alone covers the difference.
    ///
    /// Guarantee: rounded up.
    /// Errors: δ outside (0, 1); an ε too large to be a number.
    pub fn epsilon(&self, delta: f64) -> Result<f64> {
        match *self {
            Self::Gaussian { mu, accountant } => accountant.epsilon(mu, delta),
        }
    }

    /// Whether (ε, δ) is proved.
    ///
    /// Guarantee: `true` is a proof; `false` within rounding of the curve may only be doubt.
    /// Errors: those of [`PrivacyCurve::epsilon`].
    pub fn satisfies(&self, epsilon: f64, delta: f64) -> Result<bool> {
        Ok(self.epsilon(delta)? <= epsilon)
    }

    /// The curve of all the mechanisms together, chosen adaptively.
    ///
    /// Gaussian mechanisms compose to one whose μ² is the sum of theirs: nothing is lost.
    ///
    /// Guarantee: μ is rounded up.
    /// Errors: no mechanism; curves that are read by different accountants.
    ///
    /// Reference: Corollary 3.3 of \[DRS22\].
    pub fn compose(curves: &[Self]) -> Result<Self> {
        let accountant = match curves {
            [] => return Err(Error::argument("curves", 0, "at least one mechanism is needed")),
            // Alone, a mechanism is as private as it is, without another rounding.
            [alone] => return Ok(alone.clone()),
            [Self::Gaussian { accountant, .. }, ..] => accountant,
        };
        let largest = curves.iter().map(|Self::Gaussian { mu, .. }| *mu).fold(0.0, f64::max);
        // Scaled by the largest μ, so that no square overflows.
        let mut total = Interval::exact(0.0);
        for Self::Gaussian { mu, accountant: other } in curves {
            if other != accountant {
                return Err(Error::argument("accountant", other, "all curves must be read by the same one"));
            }
            total = total + (Interval::exact(*mu) / largest).square();
        }
        Self::gaussian((total.sqrt() * largest).hi, *accountant)
    }

    /// μ, where the mechanism is Gaussian.
    pub fn mu(&self) -> Option<f64> {
        match *self {
            Self::Gaussian { mu, .. } => Some(mu),
        }
    }
}

/// The smallest noise multiplier σ whose curve satisfies (ε, δ), by bisection.
///
/// `curve` must promise more the larger σ is.
///
/// Guarantee: rounded up: the curve was seen to satisfy (ε, δ) at the result.
/// Cost: some hundred evaluations of the curve.
/// Errors: ε not positive and finite, δ outside (0, 1), a target that no finite noise reaches.
pub fn calibrate(epsilon: f64, delta: f64, curve: impl Fn(f64) -> Result<PrivacyCurve>) -> Result<f64> {
    check_epsilon(epsilon)?;
    check_delta(delta)?;
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
            let rule = "no finite noise can be shown to reach it";
            return Err(Error::argument("epsilon", shown(epsilon), rule));
        }
    }
    Ok(sigma)
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
