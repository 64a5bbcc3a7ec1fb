//! How often one unit of privacy takes part.

use serde::{Deserialize, Serialize};

/// The participation pattern that a sensitivity covers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Participation {
    /// Every user contributes to one step at most; neighbouring streams differ in one row.
    #[default]
    Single,
}

impl Participation {
    /// In words that complete "each user takes part …".
    pub fn words(self) -> &'static str {
        match self {
            Participation::Single => "in at most one step",
        }
    }

    /// The sensitivity `γ` of an encoder with the given squared column norms.
    ///
    /// Guarantee: `‖C(G − H)‖_F ≤ γ ζ` for all neighbouring streams whose rows differ by at most `ζ`; equality is
    /// attained.
    pub fn sensitivity(self, column_norms_sq: &[f64]) -> f64 {
        match self {
            // The square root may round down by half a unit in the last place.
            Participation::Single => column_norms_sq.iter().copied().fold(0.0, f64::max).sqrt().next_up(),
        }
    }
}
