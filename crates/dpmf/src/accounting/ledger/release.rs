//! A release as a ledger records it.

use crate::accounting::interval::Interval;
use crate::accounting::{Accountant, Adjacency, Amplification, PrivacyCurve, PrivacyStatement};
use crate::accounting::{calibrate, gaussian};
use crate::error::{Error, Result};
use crate::participation::Sampling;
use serde::{Deserialize, Serialize};

/// Pairs that the curve of balls in bins is shown at, and how far below the stated δ.
const PAIRS: usize = 16;
const BELOW: f64 = 1e-3;

/// One mechanism that was, or may have been, run to its end.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Release {
    /// Its name, unlike that of any other.
    pub id: String,
    /// When it was recorded, in words for people.
    pub time: String,
    /// Description of the release for people.
    pub what: String,
    /// Standard deviation of the noise over sensitivity times clip; none for a release of which only a guarantee is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub noise_multiplier: Option<f64>,
    /// The sampling that its curve counts on.
    pub sampling: Sampling,
    /// Under Poisson sampling, how often one unit may be drawn.
    #[serde(default)]
    pub rounds: u64,
    /// Where no formula gives the curve, as for balls in bins: ε and δ as stated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guarantee: Option<[f64; 2]>,
    /// Further pairs (ε, δ) that it was shown to satisfy.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub curve: Vec<[f64; 2]>,
    /// The name of the releases that were decided together with it, before any of them was seen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
}

impl Release {
    /// The release that a privacy statement describes, with all its steps. What was released beside it is counted by [`Release::beside`]
    /// but, where
    /// units hide in bins, here.
    ///
    /// Cost: for balls in bins, some estimates of δ; nothing else takes time.
    /// Errors: none for a calibrated mechanism.
    pub fn new(
        id: impl Into<String>,
        time: impl Into<String>,
        what: impl Into<String>,
        statement: &PrivacyStatement,
    ) -> Result<Self> {
        let calibration = statement.calibration();
        let (sampled, beside) = (&calibration.terms().sampled, calibration.terms().beside);
        let mut sigma = calibration.noise_multiplier();
        let stated = [calibration.epsilon(), calibration.delta()];
        let (rounds, guarantee, curve) = match sampled {
            Amplification::None => (0, None, Vec::new()),
            Amplification::CyclicPoisson { rounds, .. } => (*rounds, None, Vec::new()),
            Amplification::BallsInBins(_) | Amplification::ReshuffledBins(_) => match beside {
                None => (0, Some(stated), pairs(sampled, sigma, stated)?),
                // No formula takes the two apart: the pairs are those of both, and so is the Gaussian that they are a function of.
                Some(other) => {
                    let mut pairs = pairs(&sampled.beside(other.mu)?, sigma, stated)?;
                    pairs.iter_mut().for_each(|[_, delta]| *delta = (*delta + other.delta).next_up());
                    pairs.retain(|[_, delta]| *delta < 1.0);
                    let mu_sq = (Interval::exact(1.0) / sigma).square() + Interval::exact(other.mu).square();
                    sigma = (Interval::exact(1.0) / mu_sq.sqrt()).lo;
                    (0, Some(stated), pairs)
                }
            },
        };
        Ok(Self {
            id: id.into(),
            time: time.into(),
            what: what.into(),
            noise_multiplier: Some(sigma),
            sampling: sampled.sampling(),
            rounds,
            guarantee,
            curve,
            group: None,
        })
    }

    /// What was released beside the mechanism of a statement: a Gaussian release and, where it may tell more with some
    /// probability, that. Empty if nothing was, and for balls in bins, whose release counts it already.
    ///
    /// Errors: none for a calibrated mechanism.
    pub fn beside(id: &str, time: &str, what: &str, statement: &PrivacyStatement) -> Result<Vec<Self>> {
        let terms = statement.calibration().terms();
        let Some(beside) = terms.beside else { return Ok(Vec::new()) };
        if terms.sampled.is_bins() {
            return Ok(Vec::new());
        }
        // Rounded down: a smaller noise multiplier costs more.
        let factor = terms.adjacency.sensitivity_factor();
        let mut gaussian = Self::stated(id, time, what, 0.0, 0.0)?;
        gaussian.guarantee = None;
        gaussian.noise_multiplier = Some((factor / beside.mu).next_down().next_down());
        let mut releases = vec![gaussian];
        if beside.delta > 0.0 {
            let what = format!("{what}: values that one unit alone may have");
            releases.push(Self::stated(format!("{id}/values"), time, what, 0.0, beside.delta)?);
        }
        Ok(releases)
    }

    /// A release by other means, of which (ε, δ) is known and nothing else.
    ///
    /// Errors: a negative or infinite ε, a δ outside [0, 1).
    pub fn stated(
        id: impl Into<String>,
        time: impl Into<String>,
        what: impl Into<String>,
        epsilon: f64,
        delta: f64,
    ) -> Result<Self> {
        let release = Self {
            id: id.into(),
            time: time.into(),
            what: what.into(),
            noise_multiplier: None,
            sampling: Sampling::None,
            rounds: 0,
            guarantee: Some([epsilon, delta]),
            curve: Vec::new(),
            group: None,
        };
        release.check()?;
        Ok(release)
    }

    /// Refuses pairs outside ε ≥ 0, 0 ≤ δ < 1, since a negative one would give budget back, and a release of which
    /// nothing is
    /// known.
    pub(super) fn check(&self) -> Result<()> {
        for [epsilon, delta] in self.pairs() {
            if !(epsilon >= 0.0 && epsilon.is_finite() && (0.0..1.0).contains(&delta)) {
                let rule =
                    "its guarantee must have a finite ε of at least 0 and a δ of at least 0 and below 1";
                return Err(Error::argument("release", self.id.clone(), rule));
            }
        }
        if self.guarantee.is_none()
            && matches!(self.sampling, Sampling::BallsInBins { .. } | Sampling::ReshuffledBins { .. })
        {
            let rule = "a release by balls in bins must state ε and δ";
            return Err(Error::argument("release", self.id.clone(), rule));
        }
        match self.noise_multiplier {
            Some(sigma) => calibrate::mu(sigma, Adjacency::ReplaceOne).map(drop),
            None if self.guarantee.is_some() => Ok(()),
            None => {
                let rule = "it must have a noise multiplier or a guarantee";
                Err(Error::argument("release", self.id.clone(), rule))
            }
        }
    }

    pub(super) fn pairs(&self) -> Vec<[f64; 2]> {
        self.guarantee.iter().chain(&self.curve).copied().collect()
    }

    /// Whether another one is the same mechanism. How much of its curve was looked at does not matter.
    pub(super) fn same(&self, other: &Self) -> bool {
        let key = |r: &Self| (r.noise_multiplier, r.sampling, r.rounds, r.guarantee);
        key(self) == key(other)
    }

    /// Whether another release costs as much of every budget.
    pub(super) fn alike(&self, other: &Self) -> bool {
        self.same(other) && self.curve == other.curve
    }

    /// Its privacy curve, where a formula gives one.
    pub(super) fn curve(&self, adjacency: Adjacency) -> Result<Option<PrivacyCurve>> {
        let Some(sigma) = self.noise_multiplier else { return Ok(None) };
        let sampled = match self.sampling {
            Sampling::None => Amplification::None,
            Sampling::CyclicPoisson { bands, rate } => {
                Amplification::CyclicPoisson { bands, rate, rounds: self.rounds }
            }
            Sampling::BallsInBins { .. } | Sampling::ReshuffledBins { .. } => return Ok(None),
        };
        sampled.curve(sigma, adjacency, Accountant::Exact).map(Some)
    }
}

/// Pairs (ε, δ) that units in bins satisfy, on both sides of a stated one.
///
/// Guarantee: all of them hold but for a probability of [`FAILURE`](crate::accounting::allocation::FAILURE).
pub(super) fn pairs(
    sampled: &Amplification,
    noise_multiplier: f64,
    [epsilon, delta]: [f64; 2],
) -> Result<Vec<[f64; 2]>> {
    // Its tail is nearly that of a unit whose bin is known: as far as that one reaches, and more of them where ε is small.
    let end = match sampled {
        Amplification::BallsInBins(allocation) => {
            gaussian::epsilon(allocation.mu(noise_multiplier), BELOW * delta)?
        }
        // Its patterns are many, and a unit is found out by none: the curve ends sooner.
        Amplification::ReshuffledBins(_) => 4.0 * epsilon,
        Amplification::None | Amplification::CyclicPoisson { .. } => return Ok(vec![]),
    };
    let end = end.max(epsilon);
    let curve = sampled.curve(noise_multiplier, Adjacency::default(), Accountant::Exact)?;
    let mut pairs = Vec::new();
    for j in 1..=PAIRS {
        let at = end * (j as f64 / PAIRS as f64).powf(1.5);
        pairs.push([at, curve.delta(at)?]);
    }
    pairs.retain(|pair| pair[1] < 1.0);
    Ok(pairs)
}
