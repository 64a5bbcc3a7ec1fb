//! Privacy accounting: ε, δ, μ and ρ of a mechanism, and the noise that they require.
//!
//! The matrix mechanism with noise `N(0, (σγζ)²)` is, against an adaptive adversary too, one Gaussian
//! mechanism of sensitivity `γζ` (Theorems 2.1 and 4.1 of \[DMRST22\]), so a single number describes it:
//! `μ = Δ/(σγζ)`, where `Δ` is `γζ` times the [`Adjacency`]'s factor. Its [`PrivacyCurve`], δ as a function of ε, is
//! computed by [`gaussian`], which is exact, or by [`zcdp`], [`rdp`] and [`paper`], which are weaker bounds that others report.
//! [`calibrate`] solves a curve for σ, ε, δ or the clipping norm, and [`PrivacyStatement`] states the result in words.
//!
//! Guarantee: a reported value is never better than the true one. Formulas are evaluated in interval arithmetic, and the
//! unfavourable end is returned: ε, δ, μ, ρ and σ are rounded up; a clipping norm, and a μ that may be spent, are rounded down.
//!
//! ```
//! use dpmf::accounting::{Accountant, Adjacency, KeyOrigin, PrivacyStatement, PrivacyUnit, Amplification, Terms};
//! use dpmf::Participation;
//!
//! let terms = Terms {
//!     adjacency: Adjacency::ReplaceWithZero,
//!     accountant: Accountant::Exact,
//!     sampled: Amplification::None,
//!     sensitivity: 1.0,
//!     clip: 0.3,
//!     beside: None,
//! };
//! let calibration = terms.calibrate_noise(8.0, 1e-6)?;
//! assert!((calibration.noise_multiplier() - 0.65294).abs() < 1e-5);
//! // The same noise by the route of the paper would be reported as a larger ε.
//! assert!(calibration.account()?.epsilon_rdp > 8.5);
//!
//! let statement =
//!     PrivacyStatement::new(calibration, PrivacyUnit::User, Participation::default(), 2048, KeyOrigin::System)?;
//! assert!(statement.to_string().starts_with("(8, 1e-6)-differential privacy for every user"));
//! # Ok::<(), dpmf::Error>(())
//! ```

pub mod allocation;
pub mod calibrate;
pub mod curve;
pub mod filter;
pub mod gaussian;
pub mod ledger;
pub mod paper;
pub mod pld;
pub mod rdp;
pub mod reshuffled;
pub mod sampled;
pub mod statement;
pub mod utility;
pub mod zcdp;

pub(crate) mod interval;
pub(crate) mod normal;
pub(crate) mod search;

pub use allocation::Allocation;
pub use calibrate::{Account, Calibration, ExtraRelease, Terms, compose};
pub use curve::{PrivacyCurve, poisson_noise_multiplier};
pub use filter::Filter;
pub use ledger::{Ledger, LedgerFile, Release};
pub use pld::{Bracket, Phase, PoissonCurve};
pub use reshuffled::Reshuffled;
pub use sampled::Amplification;
pub use statement::{Arithmetic, KeyOrigin, PrivacyStatement, PrivacyUnit};
pub use utility::RegretBound;

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// Which data sets the guarantee makes hard to tell apart.
///
/// | relation | neighbours | difference in one row | μ at noise multiplier σ |
/// |---|---|---|---|
/// | `ReplaceWithZero` | one record becomes "no data", contributing a zero vector | ζ | 1/σ |
/// | `AddOrRemove` | one record joins or leaves, the others keep their steps | ζ | 1/σ |
/// | `ReplaceOne` | one record becomes any other | 2ζ | 2/σ |
///
/// Adding a record costs what replacing it with zero does only because nothing else moves with it: the step of
/// every other record and the denominator of every mean are fixed before training. Replacing goes through zero,
/// so it costs twice the sensitivity: at the same noise, `(ε, δ)` of `ReplaceOne` is that of noise multiplier σ/2.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Adjacency {
    /// One record is replaced with "no data", which contributes zero: the paper's relation.
    #[default]
    ReplaceWithZero,
    /// One record is added or removed without moving any other to another step.
    AddOrRemove,
    /// One record is replaced with another one.
    ReplaceOne,
}

impl Adjacency {
    /// Every relation.
    pub const ALL: [Adjacency; 3] =
        [Adjacency::ReplaceWithZero, Adjacency::AddOrRemove, Adjacency::ReplaceOne];

    /// Largest distance between two neighbouring inputs, in units of the clipping norm.
    pub fn sensitivity_factor(self) -> f64 {
        match self {
            Adjacency::ReplaceWithZero | Adjacency::AddOrRemove => 1.0,
            Adjacency::ReplaceOne => 2.0,
        }
    }

    /// The name used on the command line and in files.
    pub fn name(self) -> &'static str {
        match self {
            Adjacency::ReplaceWithZero => "replace-with-zero",
            Adjacency::AddOrRemove => "add-or-remove",
            Adjacency::ReplaceOne => "replace-one",
        }
    }
}

impl std::fmt::Display for Adjacency {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Adjacency {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|a| a.name() == text).ok_or_else(|| {
            Error::argument("adjacency", text, "it must be replace-with-zero, add-or-remove or replace-one")
        })
    }
}

/// How ε and δ are derived from the noise, from tightest to loosest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Accountant {
    /// The Gaussian mechanism's own (ε, δ) curve: [`gaussian`].
    #[default]
    Exact,
    /// Zero-concentrated privacy, best real order: [`zcdp`].
    Zcdp,
    /// Rényi privacy, integer orders 2…512: [`rdp`].
    Rdp,
    /// The closed form of the paper's theorem: [`paper`].
    Paper,
}

impl Accountant {
    /// Every accountant, tightest first.
    pub const ALL: [Accountant; 4] =
        [Accountant::Exact, Accountant::Zcdp, Accountant::Rdp, Accountant::Paper];

    /// The name used on the command line and in files.
    pub fn name(self) -> &'static str {
        match self {
            Accountant::Exact => "exact",
            Accountant::Zcdp => "zcdp",
            Accountant::Rdp => "rdp",
            Accountant::Paper => "paper",
        }
    }

    /// ε of a μ-Gaussian mechanism at δ.
    ///
    /// Guarantee: rounded up.
    /// Errors: `μ` not positive and finite, or so large that ε overflows; δ outside (0, 1).
    pub fn epsilon(self, mu: f64, delta: f64) -> Result<f64> {
        match self {
            Accountant::Exact => gaussian::epsilon(mu, delta),
            Accountant::Zcdp => zcdp::epsilon(zcdp::rho(mu)?, delta),
            Accountant::Rdp => rdp::epsilon(mu, delta),
            Accountant::Paper => paper::epsilon(mu, delta),
        }
    }

    /// δ of a μ-Gaussian mechanism at ε; 1 where the accountant proves nothing.
    ///
    /// Guarantee: rounded up.
    /// Errors: `μ` or ε not positive and finite.
    pub fn delta(self, mu: f64, epsilon: f64) -> Result<f64> {
        match self {
            Accountant::Exact => gaussian::delta(mu, epsilon),
            Accountant::Zcdp => zcdp::delta(zcdp::rho(mu)?, epsilon),
            Accountant::Rdp => rdp::delta(mu, epsilon),
            Accountant::Paper => paper::delta(mu, epsilon),
        }
    }

    /// Largest μ that (ε, δ) allows.
    ///
    /// Guarantee: rounded down.
    /// Errors: ε not positive and finite, δ outside (0, 1), a target out of the accountant's reach.
    pub fn mu(self, epsilon: f64, delta: f64) -> Result<f64> {
        match self {
            Accountant::Exact => gaussian::mu(epsilon, delta),
            Accountant::Zcdp => {
                // √ rounded down, then once more, so that squaring back stays below ρ.
                let rho = zcdp::rho_for(epsilon, delta)?;
                Ok((interval::Interval::exact(rho) * 2.0).sqrt().lo.next_down().next_down())
            }
            Accountant::Rdp => rdp::mu(epsilon, delta),
            Accountant::Paper => paper::mu(epsilon, delta),
        }
    }
}

impl std::fmt::Display for Accountant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Accountant {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL
            .into_iter()
            .find(|a| a.name() == text)
            .ok_or_else(|| Error::argument("accountant", text, "it must be exact, zcdp, rdp or paper"))
    }
}

/// A number for an error message, without hundreds of zeros.
pub(crate) fn shown(x: f64) -> String {
    let magnitude = x.abs();
    if x == 0.0 || (1e-4..1e9).contains(&magnitude) || !x.is_finite() {
        x.to_string()
    } else {
        format!("{x:e}")
    }
}

pub(crate) fn check_positive(name: &'static str, value: f64) -> Result<()> {
    if value > 0.0 && value.is_finite() {
        return Ok(());
    }
    Err(Error::argument(name, shown(value), "it must be positive and finite"))
}

pub(crate) fn check_epsilon(epsilon: f64) -> Result<()> {
    check_positive("epsilon", epsilon)
}

pub(crate) fn check_delta(delta: f64) -> Result<()> {
    if delta > 0.0 && delta < 1.0 {
        return Ok(());
    }
    Err(Error::argument("delta", shown(delta), "it must lie strictly between 0 and 1"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for adjacency in Adjacency::ALL {
            assert_eq!(adjacency.name().parse::<Adjacency>().unwrap(), adjacency);
            assert_eq!(serde_json::to_value(adjacency).unwrap(), adjacency.name());
        }
        for accountant in Accountant::ALL {
            assert_eq!(accountant.name().parse::<Accountant>().unwrap(), accountant);
            assert_eq!(serde_json::to_value(accountant).unwrap(), accountant.name());
        }
        assert!("swap".parse::<Adjacency>().unwrap_err().to_string().starts_with("adjacency is swap, but"));
        assert!("pld".parse::<Accountant>().unwrap_err().to_string().starts_with("accountant is pld, but"));
    }

    #[test]
    fn tiny_values_are_named_briefly() {
        assert!(check_delta(-1e-300).unwrap_err().to_string().starts_with("delta is -1e-300, but"));
        assert!(check_epsilon(-0.5).unwrap_err().to_string().starts_with("epsilon is -0.5, but"));
        assert!(check_epsilon(f64::INFINITY).unwrap_err().to_string().starts_with("epsilon is inf, but"));
    }

    #[test]
    fn accountants_are_listed_tightest_first() {
        for (mu, delta) in [(0.01, 1e-6), (0.4, 1e-3), (1.0, 1e-10), (3.0, 1e-6), (10.0, 1e-30)] {
            let all = Accountant::ALL.map(|a| a.epsilon(mu, delta).unwrap());
            assert!(all[0] < all[1] && all[1] <= all[2], "{mu} {delta}: {all:?}");
            // The grid of Rényi orders stops at 512, so at small μ the closed form passes it.
            assert!(all[1] < all[3], "{mu} {delta}: {all:?}");
            for (accountant, epsilon) in Accountant::ALL.into_iter().zip(all) {
                assert!((accountant.mu(epsilon, delta).unwrap() / mu - 1.0).abs() < 1e-9, "{accountant}");
                let back = accountant.delta(mu, epsilon).unwrap();
                assert!((back.ln() / delta.ln() - 1.0).abs() < 1e-9, "{accountant}: {back} {delta}");
            }
        }
    }
}
