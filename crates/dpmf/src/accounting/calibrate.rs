//! Solving for the noise, for ε, for δ or for the clipping norm, and composing mechanisms.

use super::allocation::Watch;
use super::curve::{self, PrivacyCurve};
use super::interval::Interval;
use super::{Accountant, Adjacency, Amplification, check_delta, check_epsilon, check_positive, shown, zcdp};
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// `μ = factor/σ`: what a noise multiplier is worth under an adjacency.
///
/// Guarantee: rounded up.
/// Errors: σ not positive and finite, or so small that μ overflows.
pub fn mu(noise_multiplier: f64, adjacency: Adjacency) -> Result<f64> {
    check_positive("noise multiplier", noise_multiplier)?;
    let mu = (Interval::exact(adjacency.sensitivity_factor()) / noise_multiplier).hi;
    if mu.is_infinite() {
        return Err(Error::argument(
            "noise multiplier",
            noise_multiplier,
            "it is too small for any guarantee",
        ));
    }
    Ok(mu)
}

/// Smallest noise multiplier that gives (ε, δ) without sampling.
///
/// Guarantee: rounded up, so that the accountant's ε at the result, itself rounded up, is at most ε.
/// Errors: ε not positive and finite, δ outside (0, 1), a target out of the accountant's reach.
pub fn noise_multiplier(
    epsilon: f64,
    delta: f64,
    adjacency: Adjacency,
    accountant: Accountant,
) -> Result<f64> {
    curve::calibrate(epsilon, delta, |sigma| PrivacyCurve::gaussian(mu(sigma, adjacency)?, accountant))
}

/// The noise multiplier of one mechanism that is exactly as private as all the given ones together:
/// `σ = 1/√(Σ σ_i⁻²)`, since the μ of Gaussian mechanisms add in quadrature and their ρ simply add.
///
/// Guarantee: rounded down, so that the noise is not overstated; the mechanisms may be chosen adaptively as long as their noise
/// multipliers are fixed in advance.
/// Errors: no mechanism, or a multiplier that is not positive and finite, with its index.
///
/// Reference: Corollary 3.3 of \[DRS22\].
pub fn compose(noise_multipliers: &[f64]) -> Result<f64> {
    if noise_multipliers.is_empty() {
        return Err(Error::argument("noise multipliers", 0, "at least one mechanism is needed"));
    }
    let mut total = Interval::exact(0.0);
    // Scaled by the smallest multiplier, so that no square overflows.
    let mut smallest = f64::INFINITY;
    for (index, &value) in noise_multipliers.iter().enumerate() {
        if !(value > 0.0 && value.is_finite()) {
            let rule = "it must be positive and finite";
            return Err(Error::InvalidEntry { name: "noise multipliers", index, value, rule });
        }
        smallest = smallest.min(value);
    }
    for &value in noise_multipliers {
        total = total + (Interval::exact(smallest) / value).square();
    }
    Ok((Interval::exact(smallest) / total.sqrt()).lo)
}

/// One noise multiplier seen by every accountant.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Account {
    /// Standard deviation of the noise in units of `γζ`.
    pub noise_multiplier: f64,
    /// Which data sets are neighbours.
    pub adjacency: Adjacency,
    /// The δ at which every ε below holds.
    pub delta: f64,
    /// Gaussian differential privacy, rounded up.
    pub mu: f64,
    /// Zero-concentrated differential privacy, rounded up.
    pub rho: f64,
    /// ε of the Gaussian mechanism itself.
    pub epsilon_exact: f64,
    /// ε by the best real Rényi order.
    pub epsilon_zcdp: f64,
    /// ε by the best integer Rényi order from 2 to 512.
    pub epsilon_rdp: f64,
    /// ε by the closed form of the paper's theorem.
    pub epsilon_paper: f64,
}

impl Account {
    /// Evaluates every accountant.
    ///
    /// Guarantee: every ε, μ and ρ is rounded up.
    /// Errors: σ not positive and finite or too small for any guarantee, δ outside (0, 1).
    pub fn new(noise_multiplier: f64, delta: f64, adjacency: Adjacency) -> Result<Self> {
        check_delta(delta)?;
        let mu = mu(noise_multiplier, adjacency)?;
        let overflow = |_| {
            Error::argument("noise multiplier", shown(noise_multiplier), "it is too small for any guarantee")
        };
        let epsilon = |accountant: Accountant| accountant.epsilon(mu, delta).map_err(overflow);
        Ok(Self {
            noise_multiplier,
            adjacency,
            delta,
            mu,
            rho: zcdp::rho(mu)?,
            epsilon_exact: epsilon(Accountant::Exact)?,
            epsilon_zcdp: epsilon(Accountant::Zcdp)?,
            epsilon_rdp: epsilon(Accountant::Rdp)?,
            epsilon_paper: epsilon(Accountant::Paper)?,
        })
    }

    /// The ε of one accountant.
    pub fn epsilon(&self, accountant: Accountant) -> f64 {
        match accountant {
            Accountant::Exact => self.epsilon_exact,
            Accountant::Zcdp => self.epsilon_zcdp,
            Accountant::Rdp => self.epsilon_rdp,
            Accountant::Paper => self.epsilon_paper,
        }
    }
}

/// A release about the same data that the same (ε, δ) pays for: a Gaussian one, which may tell more with some probability.
///
/// `dpmf train` finds the schema of a table by one.
///
/// It must be decided together with the mechanism that it stands beside: neither the noise, the sampling nor the number of steps
/// of one may depend on what the other released.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExtraRelease {
    /// μ of Gaussian differential privacy, under the adjacency of the terms.
    pub mu: f64,
    /// The probability with which it may tell more than that, such as that of a value that one unit alone has.
    pub delta: f64,
}

impl ExtraRelease {
    /// The release itself if it makes sense.
    ///
    /// Errors: μ not positive and finite; δ outside [0, 1).
    pub fn checked(self) -> Result<Self> {
        check_positive("mu", self.mu)?;
        if !(0.0..1.0).contains(&self.delta) {
            return Err(Error::argument("delta", self.delta, "it must lie in [0, 1)"));
        }
        Ok(self)
    }

    /// ε of it alone at a δ.
    ///
    /// Guarantee: rounded up.
    /// Errors: a δ that is not above its own.
    pub fn epsilon(&self, delta: f64) -> Result<f64> {
        super::gaussian::epsilon(self.mu, left(delta, Some(self))?)
    }
}

/// What is left of δ, rounded down.
///
/// Errors: nothing is left.
fn left(delta: f64, beside: Option<&ExtraRelease>) -> Result<f64> {
    let Some(beside) = beside else { return Ok(delta) };
    match (delta - beside.delta).next_down() {
        left if left > 0.0 => Ok(left),
        _ => Err(Error::argument("delta", delta, "the other release uses up all of it")),
    }
}

/// The terms that stay fixed while noise, ε and δ are traded against each other.
#[derive(Clone, Debug, PartialEq)]
pub struct Terms {
    /// Which data sets are neighbours.
    pub adjacency: Adjacency,
    /// How ε and δ follow from the noise.
    pub accountant: Accountant,
    /// By what chance units come into steps.
    pub sampled: Amplification,
    /// Sensitivity `γ` of the mechanism as deployed, for contributions of unit norm.
    pub sensitivity: f64,
    /// Clipping norm `ζ` of one contribution.
    pub clip: f64,
    /// Another release that ε and δ also cover.
    pub beside: Option<ExtraRelease>,
}

/// A calibrated mechanism: everything that ties its noise to its guarantee.
///
/// Guarantee: noise of standard deviation `noise_std` on the encoded stream gives (`epsilon`, `delta`) under
/// `adjacency`, together with what is released beside it.
#[derive(Clone, Debug, PartialEq)]
pub struct Calibration {
    terms: Terms,
    noise_multiplier: f64,
    epsilon: f64,
    delta: f64,
    curve: PrivacyCurve,
    noise_std: f64,
}

impl Terms {
    /// The privacy curve at a noise multiplier, of everything that (ε, δ) pays for. The δ of what is released beside comes on top.
    ///
    /// Composition is exact. Gaussian curves add their μ², beside sampled steps a Gaussian is one more phase, and units in bins
    /// keep a curve of their kind: see [`Allocation::beside`](super::Allocation::beside).
    ///
    /// Errors: those of [`Amplification::curve`].
    pub fn curve(&self, noise_multiplier: f64) -> Result<PrivacyCurve> {
        let curve = self.hidden()?.curve(noise_multiplier, self.adjacency, self.accountant)?;
        match &self.beside {
            Some(beside) if !self.sampled.is_bins() => {
                let other = PrivacyCurve::gaussian(beside.checked()?.mu, self.accountant)?;
                PrivacyCurve::compose(&[curve, other])
            }
            _ => Ok(curve),
        }
    }

    /// How sampling hides units; with bins, together with the extra release.
    ///
    /// Errors: μ of that not positive and finite.
    pub(crate) fn hidden(&self) -> Result<Amplification> {
        match &self.beside {
            Some(beside) if self.sampled.is_bins() => self.sampled.beside(beside.checked()?.mu),
            _ => Ok(self.sampled.clone()),
        }
    }

    /// The same without the extra release.
    pub fn alone(&self) -> Self {
        Self { beside: None, ..self.clone() }
    }

    /// The part of δ that is left for the curve.
    ///
    /// Errors: the other release uses up all of it.
    pub fn left(&self, delta: f64) -> Result<f64> {
        left(delta, self.beside.as_ref())
    }

    /// The least noise that gives (ε, δ).
    ///
    /// Guarantee: σ and the standard deviation are rounded up.
    /// Errors: sensitivity, clip or ε not positive and finite, δ outside (0, 1), a target out of the
    /// accountant's reach.
    pub fn calibrate_noise(&self, epsilon: f64, delta: f64) -> Result<Calibration> {
        self.check()?;
        let sigma = curve::calibrate(epsilon, self.left(delta)?, |sigma| self.curve(sigma))?;
        self.finish(sigma, epsilon, delta)
    }

    /// [`Terms::calibrate_noise`] with an observer, who sees the progress of long work and may stop it. `near` is a noise multiplier that is
    /// about right, if one is known.
    ///
    /// Errors: those of it; [`Error::Interrupted`].
    pub fn watched_calibration(
        &self,
        epsilon: f64,
        delta: f64,
        near: Option<f64>,
        watch: Watch<'_>,
    ) -> Result<Calibration> {
        match self.curve(1.0)? {
            PrivacyCurve::Allocation { allocation, .. } => {
                self.check()?;
                let sigma = allocation.watched_noise_multiplier(epsilon, self.left(delta)?, near, watch)?;
                self.finish(sigma, epsilon, delta)
            }
            PrivacyCurve::Reshuffled { reshuffled, .. } => {
                self.check()?;
                let sigma = reshuffled.watched_noise_multiplier(epsilon, self.left(delta)?, near, watch)?;
                self.finish(sigma, epsilon, delta)
            }
            _ => self.calibrate_noise(epsilon, delta),
        }
    }

    /// A calibration whose noise multiplier was proved before to give (ε, δ) under these terms.
    ///
    /// Guarantee: that of the earlier proof; nothing is proved here.
    /// Errors: sensitivity, clip, σ or ε not positive and finite, δ outside (0, 1).
    pub(crate) fn proved_before(
        &self,
        noise_multiplier: f64,
        epsilon: f64,
        delta: f64,
    ) -> Result<Calibration> {
        self.check()?;
        check_positive("noise multiplier", noise_multiplier)?;
        check_epsilon(epsilon)?;
        check_delta(delta)?;
        self.finish(noise_multiplier, epsilon, delta)
    }

    /// The ε that a noise multiplier gives at δ.
    ///
    /// Guarantee: ε is rounded up.
    /// Errors: sensitivity, clip or σ not positive and finite, δ outside (0, 1).
    pub fn account_epsilon(&self, noise_multiplier: f64, delta: f64) -> Result<Calibration> {
        self.check()?;
        let epsilon = self.curve(noise_multiplier)?.epsilon(self.left(delta)?)?;
        self.finish(noise_multiplier, epsilon, delta)
    }

    /// The δ that a noise multiplier gives at ε.
    ///
    /// Guarantee: δ is rounded up.
    /// Errors: sensitivity, clip, σ or ε not positive and finite; an ε at which the accountant proves no δ
    /// below 1.
    pub fn account_delta(&self, noise_multiplier: f64, epsilon: f64) -> Result<Calibration> {
        self.check()?;
        let beside = self.beside.map_or(0.0, |beside| beside.delta);
        let delta = match self.curve(noise_multiplier)?.delta(epsilon)? {
            delta if beside > 0.0 => (delta + beside).next_up().next_up(),
            delta => delta,
        };
        if delta >= 1.0 {
            return Err(Error::argument(
                "epsilon",
                epsilon,
                "no delta below 1 can be proved for it with this noise",
            ));
        }
        self.finish(noise_multiplier, epsilon, delta)
    }

    /// A calibration as it was stated, for example in a file.
    ///
    /// Errors: those of [`Terms::account_epsilon`]; an ε below what the noise proves, by however little.
    pub fn stated(&self, noise_multiplier: f64, epsilon: f64, delta: f64) -> Result<Calibration> {
        self.check()?;
        if epsilon != 0.0 {
            check_epsilon(epsilon)?;
        }
        check_delta(delta)?;
        if !self.curve(noise_multiplier)?.satisfies(epsilon, self.left(delta)?)? {
            let rule = match self.sampled {
                Amplification::BallsInBins(_) => {
                    "the stated noise is not enough to prove it (version 0.2 proved plans with public random numbers, which is no \
                     longer accepted: plan or calibrate again)"
                }
                _ => "the stated noise is not enough to prove it",
            };
            return Err(Error::argument("epsilon", epsilon, rule));
        }
        self.finish(noise_multiplier, epsilon, delta)
    }

    /// The largest clipping norm for which noise of a given standard deviation still gives (ε, δ);
    /// `self.clip` is ignored and replaced.
    ///
    /// Guarantee: the clip is rounded down.
    /// Errors: sensitivity, standard deviation or ε not positive and finite, δ outside (0, 1), a target out of
    /// the accountant's reach.
    pub fn calibrate_clip(&self, noise_std: f64, epsilon: f64, delta: f64) -> Result<Calibration> {
        check_positive("noise standard deviation", noise_std)?;
        check_positive("sensitivity", self.sensitivity)?;
        let sigma = curve::calibrate(epsilon, self.left(delta)?, |sigma| self.curve(sigma))?;
        let mut clip = (Interval::exact(noise_std) / (Interval::exact(sigma) * self.sensitivity)).lo;
        // Rounded down until the noise this clip asks for, itself rounded up, is not more than there is.
        let mut step = f64::EPSILON;
        while standard_deviation(sigma, self.sensitivity, clip) > noise_std && clip > 0.0 {
            clip *= 1.0 - step;
            step = (2.0 * step).min(0.5);
        }
        let terms = Self { clip, ..self.clone() };
        terms.check()?;
        terms.finish(sigma, epsilon, delta)
    }

    fn check(&self) -> Result<()> {
        check_positive("sensitivity", self.sensitivity)?;
        check_positive("clip", self.clip)
    }

    fn finish(&self, noise_multiplier: f64, epsilon: f64, delta: f64) -> Result<Calibration> {
        let noise_std = standard_deviation(noise_multiplier, self.sensitivity, self.clip);
        check_positive("noise standard deviation", noise_std)?;
        let curve = self.curve(noise_multiplier)?;
        if let Some(mu) = curve.mu() {
            zcdp::rho(mu)?;
        }
        Ok(Calibration { terms: self.clone(), noise_multiplier, epsilon, delta, curve, noise_std })
    }
}

/// `σγζ`, rounded up: more noise is safe, less is not.
fn standard_deviation(noise_multiplier: f64, sensitivity: f64, clip: f64) -> f64 {
    (Interval::exact(noise_multiplier) * sensitivity * clip).hi
}

impl Calibration {
    /// Adjacency, accountant, sensitivity and clip.
    pub fn terms(&self) -> &Terms {
        &self.terms
    }

    /// σ: the standard deviation in units of `γζ`.
    pub fn noise_multiplier(&self) -> f64 {
        self.noise_multiplier
    }

    /// `σγζ`: the standard deviation of every entry of `Z`.
    pub fn noise_std(&self) -> f64 {
        self.noise_std
    }

    /// ε.
    pub fn epsilon(&self) -> f64 {
        self.epsilon
    }

    /// δ.
    pub fn delta(&self) -> f64 {
        self.delta
    }

    /// δ as a function of ε, for everything that they cover; the δ of the extra release is added to it.
    pub fn curve(&self) -> &PrivacyCurve {
        &self.curve
    }

    /// μ of Gaussian differential privacy, where the mechanism is Gaussian.
    pub fn mu(&self) -> Option<f64> {
        self.curve.mu()
    }

    /// ρ of zero-concentrated differential privacy, `μ²/2` rounded up.
    pub fn rho(&self) -> Option<f64> {
        self.mu().map(|mu| (Interval::exact(mu).square() * 0.5).hi)
    }

    /// Every accountant's ε at this noise and δ.
    ///
    /// Errors: as [`Account::new`]; none that a calibration has not already passed but overflow of a weaker
    /// accountant.
    pub fn account(&self) -> Result<Account> {
        Account::new(self.noise_multiplier, self.delta, self.terms.adjacency)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn terms(adjacency: Adjacency, accountant: Accountant) -> Terms {
        Terms {
            adjacency,
            accountant,
            sampled: Amplification::None,
            sensitivity: 1.25,
            clip: 0.3,
            beside: None,
        }
    }

    #[test]
    fn account_of_the_papers_noise() {
        // golden/PROVENANCE.md, ε of the Gaussian mechanism.
        let account = Account::new(0.341, 1e-6, Adjacency::ReplaceWithZero).unwrap();
        for (accountant, expected) in Accountant::ALL.into_iter().zip([17.648, 18.688, 18.853, 20.303]) {
            assert!((account.epsilon(accountant) - expected).abs() < 6e-4, "{accountant}");
        }
        assert!(
            (account.mu - 1.0 / 0.341).abs() < 1e-14 && (account.rho - 0.5 / 0.341 / 0.341).abs() < 1e-14
        );
    }

    #[test]
    fn replacing_one_record_costs_twice_the_noise() {
        let zero = Account::new(1.5, 1e-6, Adjacency::ReplaceWithZero).unwrap();
        let added = Account::new(1.5, 1e-6, Adjacency::AddOrRemove).unwrap();
        let one = Account::new(3.0, 1e-6, Adjacency::ReplaceOne).unwrap();
        assert_eq!(zero.epsilon_exact, added.epsilon_exact);
        assert_eq!(zero.epsilon_exact, one.epsilon_exact);
        assert!(
            Account::new(1.5, 1e-6, Adjacency::ReplaceOne).unwrap().epsilon_exact > zero.epsilon_exact * 1.9
        );
    }

    #[test]
    fn composition_in_closed_form() {
        // 1/3² + 1/4² = (5/12)²; four equal ones halve the multiplier.
        assert!((compose(&[3.0, 4.0]).unwrap() - 2.4).abs() < 1e-14);
        assert!((compose(&[2.0; 4]).unwrap() - 1.0).abs() < 1e-14);
        assert!(compose(&[2.0; 4]).unwrap() <= 1.0);
        assert!((compose(&[1e-200, 1e200]).unwrap() / 1e-200 - 1.0).abs() < 1e-14);
        assert!(compose(&[]).is_err());
        assert!(compose(&[1.0, 0.0]).unwrap_err().to_string().starts_with("noise multipliers[1] is 0"));
        // ρ adds: 1/(2·9) + 1/(2·16).
        let account = Account::new(compose(&[3.0, 4.0]).unwrap(), 1e-6, Adjacency::ReplaceWithZero).unwrap();
        assert!(
            (account.rho - (1.0 / 18.0 + 1.0 / 32.0)).abs() < 1e-15 && account.rho >= 1.0 / 18.0 + 1.0 / 32.0
        );
    }

    proptest! {
        #[test]
        fn the_four_unknowns_agree(
            epsilon in 0.05..30.0_f64,
            exponent in -20.0..-1.0_f64,
            adjacency in prop::sample::select(Adjacency::ALL.to_vec()),
            accountant in prop::sample::select(Accountant::ALL.to_vec()),
        ) {
            let (delta, terms) = (10f64.powf(exponent), terms(adjacency, accountant));
            let Ok(calibration) = terms.calibrate_noise(epsilon, delta) else {
                // Only the grid of Rényi orders has unreachable targets.
                prop_assert_eq!(accountant, Accountant::Rdp);
                return Ok(());
            };
            let sigma = calibration.noise_multiplier();
            let back = terms.account_epsilon(sigma, delta).unwrap();
            prop_assert!(back.epsilon() <= epsilon && back.epsilon() > epsilon * (1.0 - 1e-8), "{}", back.epsilon());
            let less = terms.account_epsilon(sigma * 0.999, delta).unwrap();
            prop_assert!(less.epsilon() > epsilon);
            let back = terms.account_delta(sigma, epsilon).unwrap();
            prop_assert!((back.delta().ln() / delta.ln() - 1.0).abs() < 1e-8);
            let clip = terms.calibrate_clip(calibration.noise_std(), epsilon, delta).unwrap();
            prop_assert!(clip.terms().clip <= 0.3 * (1.0 + 1e-14) && clip.terms().clip > 0.3 * (1.0 - 1e-12));
            prop_assert!(clip.noise_std() <= calibration.noise_std());
            // The standard deviation covers σ Δ with Δ = γζ.
            prop_assert!(calibration.noise_std() >= sigma * 1.25 * 0.3);
            prop_assert_eq!(terms.stated(sigma, epsilon, delta).unwrap(), calibration);
        }
    }

    #[test]
    fn claims_beyond_the_proof_are_refused_however_small() {
        let terms = terms(Adjacency::ReplaceWithZero, Accountant::Exact);
        let honest = terms.calibrate_noise(2.0, 1e-6).unwrap();
        let sigma = honest.noise_multiplier();
        assert_eq!(terms.stated(sigma, 2.0, 1e-6).unwrap(), honest);
        assert!(terms.stated(sigma, 2.5, 1e-6).is_ok());
        let least = terms.account_epsilon(sigma, 1e-6).unwrap().epsilon();
        for (sigma, epsilon, delta) in [
            (sigma, least.next_down(), 1e-6),
            (sigma, least * (1.0 - 1e-10), 1e-6),
            (sigma * (1.0 - 1e-10), 2.0, 1e-6),
            (sigma, 2.0, 1e-7),
            (sigma, -1.0, 1e-6),
            (sigma, 2.0, 1.0),
            (sigma, f64::NAN, 1e-6),
        ] {
            assert!(terms.stated(sigma, epsilon, delta).is_err(), "{sigma} {epsilon} {delta}");
        }
        let replace = Terms { adjacency: Adjacency::ReplaceOne, ..terms.clone() };
        let rdp = Terms { accountant: Accountant::Rdp, ..terms.clone() };
        assert!(replace.stated(sigma, 2.0, 1e-6).is_err() && rdp.stated(sigma, 2.0, 1e-6).is_err());
        // Sampling needs less noise, and what was stated without it holds all the more.
        let poisson =
            Terms { sampled: Amplification::CyclicPoisson { bands: 1, rate: 0.5, rounds: 1 }, ..terms };
        assert!(poisson.stated(sigma, 2.0, 1e-6).is_ok() && poisson.stated(sigma, 0.5, 1e-6).is_err());
    }

    #[test]
    fn what_is_released_beside_is_paid_from_the_same_budget() {
        let beside = ExtraRelease { mu: 0.1, delta: 1e-7 };
        let alone = terms(Adjacency::ReplaceWithZero, Accountant::Exact);
        let both = Terms { beside: Some(beside), ..alone.clone() };
        // Gaussian: μ² add up to what ε and the rest of δ allow.
        let calibration = both.calibrate_noise(2.0, 1e-6).unwrap();
        let whole = super::super::gaussian::mu(2.0, 9e-7).unwrap();
        let left = (whole * whole - 0.01).sqrt();
        assert!((calibration.noise_multiplier() * left - 1.0).abs() < 1e-9);
        assert_eq!((calibration.epsilon(), calibration.delta()), (2.0, 1e-6));
        assert!((calibration.mu().unwrap() / whole - 1.0).abs() < 1e-9);
        // Amplification steps: one more phase. The noise is more than without it, and the statement is refused with that of alone.
        let sampled = Amplification::CyclicPoisson { bands: 1, rate: 0.05, rounds: 100 };
        let [alone, both] = [alone, both].map(|terms| Terms { sampled: sampled.clone(), ..terms });
        let [less, more] =
            [&alone, &both].map(|terms| terms.calibrate_noise(2.0, 1e-6).unwrap().noise_multiplier());
        assert!(more > less && more < 1.1 * less, "{less} {more}");
        assert!(both.stated(more, 2.0, 1e-6).is_ok() && both.stated(less, 2.0, 1e-6).is_err());
        let phases = PrivacyCurve::compose(&[
            alone.curve(more).unwrap(),
            PrivacyCurve::gaussian(0.1, Accountant::Exact).unwrap(),
        ]);
        assert_eq!(both.curve(more).unwrap(), phases.unwrap());
        // δ of what is beside comes on top, and must leave something.
        let delta = |terms: &Terms| terms.account_delta(more, 2.0).unwrap().delta();
        assert!(
            delta(&both)
                > delta(&Terms { beside: Some(ExtraRelease { delta: 0.0, ..beside }), ..both.clone() })
        );
        assert!(both.account_epsilon(more, 1e-7).unwrap_err().to_string().contains("uses up all of it"));
        assert_eq!(both.alone(), alone);
        for bad in [
            ExtraRelease { mu: 0.0, ..beside },
            ExtraRelease { mu: f64::NAN, ..beside },
            ExtraRelease { delta: 1.0, ..beside },
        ] {
            assert!(Terms { beside: Some(bad), ..alone.clone() }.calibrate_noise(2.0, 1e-6).is_err());
        }
    }

    #[test]
    fn bad_input_is_named() {
        let good = terms(Adjacency::ReplaceWithZero, Accountant::Exact);
        let message = |result: Result<Calibration>| result.unwrap_err().to_string();
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(message(good.calibrate_noise(bad, 1e-6)).starts_with("epsilon is"));
            assert!(message(good.account_epsilon(bad, 1e-6)).starts_with("noise multiplier is"));
            assert!(message(good.account_delta(1.0, bad)).starts_with("epsilon is"));
            assert!(
                message(Terms { clip: bad, ..good.clone() }.calibrate_noise(1.0, 1e-6))
                    .starts_with("clip is")
            );
            assert!(
                message(Terms { sensitivity: bad, ..good.clone() }.calibrate_noise(1.0, 1e-6))
                    .starts_with("sensitivity")
            );
            assert!(message(good.calibrate_clip(bad, 1.0, 1e-6)).starts_with("noise standard deviation is"));
        }
        for bad in [0.0, 1.0, 2.0, -0.1, f64::NAN] {
            assert!(message(good.calibrate_noise(1.0, bad)).starts_with("delta is"));
            assert!(
                Account::new(1.0, bad, Adjacency::ReplaceOne)
                    .unwrap_err()
                    .to_string()
                    .starts_with("delta is")
            );
        }
        assert!(
            Account::new(1e-320, 1e-6, Adjacency::ReplaceOne).unwrap_err().to_string().contains("too small")
        );
        assert!(
            Account::new(1e-200, 1e-6, Adjacency::ReplaceOne).unwrap_err().to_string().contains("too small")
        );
        let paper = Terms { accountant: Accountant::Paper, ..good };
        assert!(message(paper.account_delta(0.5, 1.0)).contains("no delta below 1"));
    }
}
