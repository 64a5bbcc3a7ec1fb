//! One mechanism with its sampler, weighed.

use super::sealed::{Claim, Sealed};
use super::{Listener, Request, report};
use crate::accounting::{Amplification, curve};
use crate::error::{Error, Result};
use crate::family::Selector;
use crate::form::Representation;
use crate::mechanism::Mechanism;
use crate::participation::Sampling;
use crate::workload::Workload;
use serde::Serialize;
use std::ops::ControlFlow;
use std::time::Instant;

/// A mechanism and a sampler, with the noise that the budget requires.
#[derive(Clone, Debug)]
pub struct Candidate {
    mechanism: Mechanism,
    noise_multiplier: f64,
    rmse: f64,
    bound: Option<f64>,
    ratio: Option<f64>,
    excluded: Option<String>,
}

/// A candidate as a row of a table.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// The family.
    pub mechanism: String,
    /// The family with what was chosen of it.
    pub selector: String,
    /// The sampler.
    pub sampling: String,
    /// Diagonals of the encoder, where it is banded.
    pub bands: Option<usize>,
    /// Model-sized arrays kept from one step to the next.
    pub buffers: Option<usize>,
    /// Earlier rows of noise that a step draws again.
    pub recalls: Option<usize>,
    /// σ; nothing where there is no mechanism.
    pub noise_multiplier: Option<f64>,
    /// Root mean squared error of an iterate, `σγ‖A N‖_F/√n` at clip 1, with the noise decay of the request; `None` if there is no
    /// mechanism.
    pub rmse: Option<f64>,
    /// Against the least error of any mechanism under the same participation; nothing where no bound exists.
    pub ratio_to_bound: Option<f64>,
    /// Whether σ is an estimate: what loses is not proved.
    pub estimated: bool,
    /// Why it may not be chosen.
    pub excluded: Option<String>,
    /// Why there is no mechanism.
    pub reason: Option<String>,
    /// A description in a sentence.
    pub words: String,
}

/// A mechanism that was to be weighed and could not be made or proved.
#[derive(Clone, Debug)]
pub struct Unfitted {
    selector: Selector,
    sampling: Sampling,
    reason: String,
}

impl Unfitted {
    /// Errors: an interruption, which is no reason to go on without.
    pub(super) fn new(selector: Selector, sampling: Sampling, error: Error) -> Result<Self> {
        match error {
            Error::Interrupted { .. } => Err(error),
            _ => Ok(Self { selector, sampling, reason: error.to_string() }),
        }
    }

    /// The family with what was chosen of it.
    pub fn selector(&self) -> Selector {
        self.selector
    }

    /// Why there is no mechanism.
    pub fn reason(&self) -> &str {
        &self.reason
    }

    /// As a row of a table.
    pub fn row(&self) -> Row {
        let budget = self.selector.budget();
        Row {
            mechanism: self.selector.name().to_owned(),
            selector: self.selector.to_string(),
            sampling: self.sampling.to_string(),
            bands: budget.bands,
            buffers: budget.buffers,
            recalls: budget.recalls,
            noise_multiplier: None,
            rmse: None,
            ratio_to_bound: None,
            estimated: false,
            excluded: None,
            reason: Some(self.reason.clone()),
            words: format!("not weighed: {}", self.reason),
        }
    }
}

/// What a proof asks for beside an estimate.
const MORE: f64 = 1.003;

impl Candidate {
    /// With the noise that is proved to give the budget.
    pub(super) fn exact(
        mechanism: Mechanism,
        request: &Request,
        bound: Option<f64>,
        sealed: &mut Sealed,
    ) -> Result<Self> {
        let Request { epsilon, delta, clip, conditions, .. } = *request;
        let claim = Claim::noise("noise", &mechanism, request);
        let mechanism = match sealed.get(claim) {
            Some(sigma) => mechanism.proved_before(sigma, (epsilon, delta), clip, conditions)?,
            None => mechanism.calibrated(epsilon, delta, clip, conditions)?,
        };
        let noise_multiplier = calibrated(&mechanism);
        sealed.put(claim, noise_multiplier);
        Ok(Self::new(mechanism, noise_multiplier, request, bound))
    }

    /// With an estimate of the noise, where a proof takes longer.
    pub(super) fn estimated(mechanism: Mechanism, request: &Request, sealed: &mut Sealed) -> Result<Self> {
        let claim = Claim::noise("estimate", &mechanism, request);
        if let Some(noise_multiplier) = sealed.get(claim) {
            return Ok(Self::new(mechanism, noise_multiplier, request, None));
        }
        let terms = mechanism.terms(request.clip, request.conditions);
        let (epsilon, delta) = (request.epsilon, terms.left(request.delta)?);
        let noise_multiplier = match terms.hidden()? {
            Amplification::BallsInBins(allocation) => {
                MORE * allocation.estimated_noise_multiplier(epsilon, delta)?
            }
            Amplification::ReshuffledBins(reshuffled) => {
                MORE * reshuffled.estimated_noise_multiplier(epsilon, delta)?
            }
            _ => curve::calibrate(epsilon, delta, |sigma| terms.curve(sigma))?,
        };
        sealed.put(claim, noise_multiplier);
        Ok(Self::new(mechanism, noise_multiplier, request, None))
    }

    /// The same with a proof.
    pub(super) fn proved(self, request: &Request, sealed: &mut Sealed, listen: Listener<'_>) -> Result<Self> {
        let Request { epsilon, delta, clip, conditions, .. } = *request;
        let claim = Claim::noise("noise", &self.mechanism, request);
        if let Some(sigma) = sealed.get(claim) {
            let mechanism = self.mechanism.proved_before(sigma, (epsilon, delta), clip, conditions)?;
            return Ok(Self::new(mechanism, sigma, request, self.bound));
        }
        let words = self.words();
        report(listen, &format!("proving {words}"))?;
        let mut last_report = Instant::now();
        let mut watch = |share: f64| {
            if last_report.elapsed().as_millis() < 100 {
                return ControlFlow::Continue(());
            }
            last_report = Instant::now();
            listen(&format!("proving {words}, {:.0} % of a bound", 100.0 * share))
        };
        let near = Some(self.noise_multiplier / MORE);
        let mechanism =
            self.mechanism.calibrated_watched(epsilon, delta, clip, conditions, near, &mut watch)?;
        let noise_multiplier = calibrated(&mechanism);
        sealed.put(claim, noise_multiplier);
        Ok(Self::new(mechanism, noise_multiplier, request, self.bound))
    }

    fn new(mechanism: Mechanism, noise_multiplier: f64, request: &Request, bound: Option<f64>) -> Self {
        let rmse =
            noise_multiplier * mechanism.loss().sqrt_total() / (request.workload.steps() as f64).sqrt();
        let buffers = mechanism.form().cost().buffers;
        let excluded = match buffers {
            _ if !request.trusted && mechanism.sampling() != Sampling::None => {
                Some("the plan must not rely on sampling".into())
            }
            None => Some("dense rows regenerate all earlier noise in every step".into()),
            Some(buffers) if buffers > request.buffers => {
                Some(format!("it needs {buffers} buffers, but {} are allowed", request.buffers))
            }
            Some(_) => None,
        };
        let ratio = bound.map(|bound| (mechanism.loss().total() / bound).sqrt());
        Self { mechanism, noise_multiplier, rmse, bound, ratio, excluded }
    }

    /// The same noise for the optimizer as it is, weighed as if it were pulled back.
    pub(super) fn with_workload(self, workload: &Workload) -> Result<Self> {
        Ok(Self { mechanism: self.mechanism.with_workload(workload.clone())?, ..self })
    }

    /// The mechanism with its sampling; calibrated if it is proved.
    pub fn mechanism(&self) -> &Mechanism {
        &self.mechanism
    }

    /// σ.
    pub fn noise_multiplier(&self) -> f64 {
        self.noise_multiplier
    }

    /// Root mean squared error of an iterate at clip 1.
    pub fn rmse(&self) -> f64 {
        self.rmse
    }

    /// The key by which candidates are ordered: the error, where bins that are drawn anew win ties, since an ordinary loader draws them and
    /// batches that change serve training.
    pub(super) fn rank(&self) -> f64 {
        /// Errors this close are the same.
        const TIE: f64 = 1e-3;
        match self.mechanism.sampling() {
            Sampling::ReshuffledBins { .. } => self.rmse * (1.0 - TIE),
            _ => self.rmse,
        }
    }

    /// Whether σ was proved to meet the budget.
    pub fn is_proved(&self) -> bool {
        self.mechanism.privacy().is_some()
    }

    /// Why it may not be chosen.
    pub fn excluded(&self) -> Option<&str> {
        self.excluded.as_deref()
    }

    /// Independent noise and Poisson sampling from all the data.
    pub fn is_dp_sgd(&self) -> bool {
        matches!(self.mechanism.sampling(), Sampling::CyclicPoisson { bands: 1, .. })
    }

    /// Noise of every step's iterate, as a standard deviation at clip 1.
    pub fn per_step(&self) -> Vec<f64> {
        self.mechanism.loss().per_step().iter().map(|loss| self.noise_multiplier * loss.sqrt()).collect()
    }

    /// A description in words.
    pub fn words(&self) -> String {
        let cost = self.mechanism.form().cost();
        let memory = match (cost.buffers, cost.recalls) {
            (Some(0), Some(0)) => "independent noise in every step".to_owned(),
            (Some(0), Some(recalls)) => format!("noise of {recalls} earlier steps regenerated from the key"),
            (Some(buffers), Some(0) | None) => format!("noise kept in {}", count(buffers, "buffer")),
            (Some(buffers), Some(recalls)) => {
                format!(
                    "noise kept in {} and regenerated for {}",
                    count(buffers, "buffer"),
                    count(recalls, "earlier step")
                )
            }
            (None, _) => "dense rows of noise".to_owned(),
        };
        let sampler = match self.mechanism.sampling() {
            Sampling::None => "any order of the data".to_owned(),
            Sampling::CyclicPoisson { bands: 1, rate } => {
                format!("every example drawn for each step with probability {rate:.3e}")
            }
            Sampling::CyclicPoisson { bands, rate } => {
                format!(
                    "{bands} parts of the data that take turns, examples drawn with probability {rate:.3e}"
                )
            }
            Sampling::BallsInBins { bins } => {
                format!("every example put once into one of {bins} batches, independently of the others")
            }
            Sampling::ReshuffledBins { bins } => {
                format!(
                    "every example put into one of {bins} batches anew in every epoch, independently of the others"
                )
            }
        };
        format!("{memory}, and {sampler}")
    }

    /// The candidate as a row.
    pub fn row(&self) -> Row {
        let (form, cost) = (self.mechanism.form(), self.mechanism.form().cost());
        let family = self.mechanism.family();
        let bands = form.encoder_bands();
        Row {
            mechanism: family.map_or_else(String::new, |family| family.name().to_owned()),
            selector: family.map_or_else(String::new, |family| family.to_string()),
            sampling: self.mechanism.sampling().to_string(),
            bands: (bands < form.steps() || form.steps() == 1).then_some(bands),
            buffers: cost.buffers,
            recalls: cost.recalls,
            noise_multiplier: Some(self.noise_multiplier),
            rmse: Some(self.rmse),
            ratio_to_bound: self.ratio,
            estimated: !self.is_proved(),
            excluded: self.excluded.clone(),
            reason: None,
            words: self.words(),
        }
    }
}

/// σ of a mechanism that has a statement.
fn calibrated(mechanism: &Mechanism) -> f64 {
    mechanism.privacy().map_or(f64::NAN, |privacy| privacy.calibration().noise_multiplier())
}

fn count(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}
