//! A factorization as it will be deployed, with everything that was proved about it.

use crate::accounting::{
    Accountant, Adjacency, Calibration, KeyOrigin, PrivacyStatement, PrivacyUnit, Terms,
};
use crate::error::{Error, Result};
use crate::factorization::{Factorization, Representation};
use crate::factorize::{Certificate, Optimum, lower_bound_at};
use crate::loss::Loss;
use crate::participation::Participation;
use crate::workload::Workload;

/// A validated mechanism: workload, deployed factorization, participation, and what is known of them.
///
/// Guarantee: [`Mechanism::sensitivity`] is not below the largest change that one unit of privacy can make to
/// `C G` at unit clip, where `C` is the encoder of the coefficients as they are deployed, after rounding to
/// f32.
#[derive(Clone, Debug)]
pub struct Mechanism {
    workload: Workload,
    factorization: Factorization,
    participation: Participation,
    loss: Loss,
    bound: Option<Bound>,
    privacy: Option<PrivacyStatement>,
}

/// Relative difference below which two computations of a sensitivity on different machines agree.
pub(crate) const SENSITIVITY_SLACK: f64 = 1e-12;

/// What a guarantee is about.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Conditions {
    /// Whose data is protected as one piece.
    pub unit: PrivacyUnit,
    /// Which data sets are neighbours.
    pub adjacency: Adjacency,
    /// How ε and δ follow from the noise.
    pub accountant: Accountant,
}

/// A lower bound on the loss of every factorization, with the dual variable that proves it.
#[derive(Clone, Debug, PartialEq)]
pub struct Bound {
    /// The dual variable: the bound is `(Σ v_i x_i)² / Σ v_i` with `x = diag X(v)`.
    pub v: Vec<f64>,
    /// The bound.
    pub lower_bound: f64,
    /// Evaluations spent to find it.
    pub iterations: usize,
}

impl Mechanism {
    /// Rounds the factorization to what will be deployed and measures it.
    ///
    /// Errors: steps of workload and factorization that differ, coefficients outside the range of f32.
    pub fn new(
        workload: Workload,
        factorization: &Factorization,
        participation: Participation,
    ) -> Result<Self> {
        let (actual, expected) = (factorization.steps(), workload.steps());
        if actual != expected {
            return Err(Error::WrongLength { name: "factorization", actual, expected });
        }
        let factorization = factorization.deployed()?;
        let loss = Loss::of(&factorization, &workload, participation);
        if !loss.sensitivity().is_finite() {
            return Err(Error::Numerical {
                what: "sensitivity of the mechanism",
                index: 0,
                reason: "rounding hides it: no bound on it can be proved for these coefficients",
            });
        }
        if let Some(index) = loss.per_step().iter().position(|loss| !loss.is_finite()) {
            return Err(Error::Numerical {
                what: "loss of the mechanism",
                index,
                reason: "it is not finite",
            });
        }
        Ok(Self { workload, factorization, participation, loss, bound: None, privacy: None })
    }

    /// Adds the lower bound that an optimum proved.
    ///
    /// Errors: a dual variable of the wrong length or not positive; a bound that is not positive.
    pub fn with_bound(mut self, bound: Bound) -> Result<Self> {
        let (actual, expected) = (bound.v.len(), self.workload.steps());
        if actual != expected {
            return Err(Error::WrongLength { name: "dual variable", actual, expected });
        }
        let rule = "it must be positive and finite";
        if let Some(index) = bound.v.iter().position(|v| !(v.is_finite() && *v > 0.0)) {
            return Err(Error::InvalidEntry { name: "dual variable", index, value: bound.v[index], rule });
        }
        if !(bound.lower_bound > 0.0 && bound.lower_bound.is_finite()) {
            return Err(Error::argument("lower bound", bound.lower_bound, rule));
        }
        self.bound = Some(bound);
        Ok(self)
    }

    /// Adds the privacy statement of a calibration.
    ///
    /// Errors: a statement about other steps, or one that rests on a smaller sensitivity than the mechanism has.
    pub fn with_privacy(mut self, statement: PrivacyStatement) -> Result<Self> {
        let (actual, expected) = (statement.steps(), self.workload.steps());
        if actual != expected {
            return Err(Error::WrongLength { name: "privacy statement", actual, expected });
        }
        let stated = statement.calibration().terms().sensitivity;
        if stated < self.sensitivity() * (1.0 - SENSITIVITY_SLACK) {
            let rule = "the privacy statement must not rest on less than the sensitivity as deployed";
            return Err(Error::argument("sensitivity", stated, rule));
        }
        self.privacy = Some(statement);
        Ok(self)
    }

    /// Solves for the noise that gives (ε, δ) at a clipping norm, and states what that means.
    ///
    /// Errors: ε or clip not positive and finite, δ outside (0, 1).
    pub fn calibrated(self, epsilon: f64, delta: f64, clip: f64, conditions: Conditions) -> Result<Self> {
        let calibration = self.terms(clip, conditions).calibrate_noise(epsilon, delta)?;
        self.with_calibration(calibration, conditions)
    }

    /// Takes a noise multiplier as given, and states the ε that it gives at δ.
    ///
    /// Errors: σ or clip not positive and finite, δ outside (0, 1).
    pub fn with_noise(
        self,
        noise_multiplier: f64,
        delta: f64,
        clip: f64,
        conditions: Conditions,
    ) -> Result<Self> {
        let calibration = self.terms(clip, conditions).account_epsilon(noise_multiplier, delta)?;
        self.with_calibration(calibration, conditions)
    }

    fn terms(&self, clip: f64, conditions: Conditions) -> Terms {
        let Conditions { adjacency, accountant, .. } = conditions;
        Terms { adjacency, accountant, sensitivity: self.sensitivity(), clip }
    }

    fn with_calibration(self, calibration: Calibration, conditions: Conditions) -> Result<Self> {
        let (steps, participation) = (self.workload.steps(), self.participation.words());
        let statement =
            PrivacyStatement::new(calibration, conditions.unit, participation, steps, KeyOrigin::System)?;
        self.with_privacy(statement)
    }

    /// The workload `A`.
    pub fn workload(&self) -> &Workload {
        &self.workload
    }

    /// The factorization as deployed.
    pub fn factorization(&self) -> &Factorization {
        &self.factorization
    }

    /// The participation pattern that the sensitivity covers.
    pub fn participation(&self) -> Participation {
        self.participation
    }

    /// Sensitivity `γ` of the deployed encoder.
    pub fn sensitivity(&self) -> f64 {
        self.loss.sensitivity()
    }

    /// Loss of the deployed factorization.
    pub fn loss(&self) -> &Loss {
        &self.loss
    }

    /// The lower bound, if one was proved.
    pub fn bound(&self) -> Option<&Bound> {
        self.bound.as_ref()
    }

    /// The privacy statement of a calibrated mechanism.
    pub fn privacy(&self) -> Option<&PrivacyStatement> {
        self.privacy.as_ref()
    }

    /// The lower bound evaluated anew at its dual variable, without trusting the number that is stored.
    ///
    /// Cost: one evaluation of `diag X(v)`.
    pub fn recompute_bound(&self) -> Result<Option<f64>> {
        self.bound.as_ref().map(|bound| lower_bound_at(&self.workload, &bound.v)).transpose()
    }

    /// Loss as deployed against the lower bound.
    pub fn certificate(&self) -> Option<Certificate> {
        self.bound
            .as_ref()
            .map(|bound| Certificate::new(self.loss.total(), bound.lower_bound, bound.iterations))
    }
}

impl From<&Optimum> for Bound {
    fn from(optimum: &Optimum) -> Self {
        Self {
            v: optimum.v.clone(),
            lower_bound: optimum.certificate.lower_bound,
            iterations: optimum.certificate.iterations,
        }
    }
}
