//! The sampling that a privacy curve relies on, in addition to the sensitivity.

use super::{Accountant, Adjacency, Allocation, Phase, PrivacyCurve, Reshuffled, calibrate};
use crate::error::{Error, Result};
use crate::participation::Sampling;
use std::sync::Arc;

/// A [`Sampling`] with what a mechanism makes of it: all that its privacy curve needs to know.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Amplification {
    /// Nothing.
    #[default]
    None,
    /// Parts of the data take turns, and each unit of a part comes with a probability: as many sampled Gaussians as a part has
    /// turns.
    CyclicPoisson {
        /// Number of parts `G`.
        bands: usize,
        /// Probability `Q`.
        rate: f64,
        /// Turns of one part.
        rounds: u64,
    },
    /// Every unit hides in one of some bins.
    BallsInBins(Arc<Allocation>),
    /// Every unit hides in one of some bins, another one in every epoch.
    ReshuffledBins(Arc<Reshuffled>),
}

impl Amplification {
    /// The scheme alone.
    pub fn sampling(&self) -> Sampling {
        match *self {
            Amplification::None => Sampling::None,
            Amplification::CyclicPoisson { bands, rate, .. } => Sampling::CyclicPoisson { bands, rate },
            Amplification::BallsInBins(ref allocation) => Sampling::BallsInBins { bins: allocation.bins() },
            Amplification::ReshuffledBins(ref reshuffled) => {
                Sampling::ReshuffledBins { bins: reshuffled.bins() }
            }
        }
    }

    /// Whether units hide in bins.
    pub(crate) fn is_bins(&self) -> bool {
        matches!(self, Amplification::BallsInBins(_) | Amplification::ReshuffledBins(_))
    }

    /// Bins beside a Gaussian release of μ: their curve is that of bins again. Nothing else changes.
    ///
    /// Errors: μ not positive and finite, or so large that its square is not.
    pub(crate) fn beside(&self, mu: f64) -> Result<Self> {
        Ok(match self {
            Amplification::None | Amplification::CyclicPoisson { .. } => self.clone(),
            Amplification::BallsInBins(allocation) => {
                Amplification::BallsInBins(Arc::new(allocation.beside(mu)?))
            }
            Amplification::ReshuffledBins(reshuffled) => {
                Amplification::ReshuffledBins(Arc::new(reshuffled.beside(mu)?))
            }
        })
    }

    /// The privacy curve at a noise multiplier: the one place where noise becomes privacy.
    ///
    /// Errors: σ not positive and finite, or too small for any guarantee; under sampling, an accountant other than the exact one
    /// and records that are replaced with others.
    pub fn curve(
        &self,
        noise_multiplier: f64,
        adjacency: Adjacency,
        accountant: Accountant,
    ) -> Result<PrivacyCurve> {
        if *self != Amplification::None {
            self.check(adjacency, accountant)?;
        }
        match self {
            Amplification::None => {
                PrivacyCurve::gaussian(calibrate::mu(noise_multiplier, adjacency)?, accountant)
            }
            &Amplification::CyclicPoisson { rate, rounds, .. } => {
                PrivacyCurve::poisson(&[Phase { noise_multiplier, rate, rounds }], adjacency)
            }
            Amplification::BallsInBins(allocation) => {
                super::check_positive("noise multiplier", noise_multiplier)?;
                Ok(PrivacyCurve::Allocation { allocation: allocation.clone(), noise_multiplier })
            }
            Amplification::ReshuffledBins(reshuffled) => {
                super::check_positive("noise multiplier", noise_multiplier)?;
                Ok(PrivacyCurve::Reshuffled { reshuffled: reshuffled.clone(), noise_multiplier })
            }
        }
    }

    fn check(&self, adjacency: Adjacency, accountant: Accountant) -> Result<()> {
        if accountant != Accountant::Exact {
            let rule = "for sampled steps, only the exact accountant can be used";
            return Err(Error::argument("accountant", accountant, rule));
        }
        if adjacency == Adjacency::ReplaceOne {
            return Err(Error::Unsupported {
                what: "the relation replace-one with sampling".into(),
                hint: "with sampling, use add-or-remove or replace-with-zero",
            });
        }
        Ok(())
    }
}
