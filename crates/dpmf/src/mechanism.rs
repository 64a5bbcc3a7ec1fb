//! A form as it will be deployed for a workload, with everything that was proved about it.

use crate::accounting::allocation::Watch;
use crate::accounting::{
    Accountant, Adjacency, Amplification, Calibration, ExtraRelease, KeyOrigin, PrivacyStatement,
    PrivacyUnit, Terms,
};
use crate::error::{Error, Result};
use crate::factorize::{Certificate, Dual, Observer, Optimum, lower_bound_at};
use crate::family::Selector;
use crate::form::{Form, Representation, StateSpace};
use crate::identity::Identity;
use crate::loss::Loss;
use crate::participation::{Participation, Sampling};
use crate::problem::Problem;
use crate::sensitivity;
use crate::workload::Workload;

/// A validated mechanism: workload, deployed form, participation, sampling, noise, and what is known of them.
///
/// Guarantee: [`Mechanism::sensitivity`] is not below the largest change that one unit of privacy can make to
/// `C G` at unit clip, where `C` is the encoder of the coefficients as they are deployed, after rounding to
/// f32.
#[derive(Clone, Debug)]
pub struct Mechanism {
    workload: Workload,
    form: Form,
    participation: Participation,
    sampled: Amplification,
    loss: Loss,
    family: Option<Selector>,
    bound: Option<Bound>,
    privacy: Option<PrivacyStatement>,
}

/// What a sensitivity is raised by, and a bound lowered, when it is first computed. Other machines may add the terms in
/// another order and come out a little apart; yet they must find what is stated to hold, or a file is refused.
const MARGIN: f64 = 1.0 / (1_u64 << 40) as f64;

/// What a guarantee is about.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Conditions {
    /// Whose data is protected as one piece.
    pub unit: PrivacyUnit,
    /// Which data sets are neighbours.
    pub adjacency: Adjacency,
    /// How ε and δ follow from the noise.
    pub accountant: Accountant,
    /// What else ε and δ pay for.
    pub beside: Option<ExtraRelease>,
}

/// A lower bound on the loss of every factorization, with the dual point that proves it.
#[derive(Clone, Debug, PartialEq)]
pub struct Bound {
    /// The dual point: the bound is `tr(X(D) D)² / Σ v_p`.
    pub dual: Dual,
    /// The bound.
    pub lower_bound: f64,
    /// Evaluations spent to find it.
    pub iterations: usize,
}

impl Mechanism {
    /// Rounds the form to what will be deployed and measures it.
    ///
    /// Errors: steps of workload and form that differ, coefficients outside the range of f32, a participation that no
    /// form covers.
    pub fn new(workload: Workload, form: &Form, participation: Participation) -> Result<Self> {
        Self::sampled(workload, form, participation, Sampling::None)
    }

    /// [`Mechanism::new`] that counts on units coming into steps by chance.
    ///
    /// The sensitivity is that of one participation where parts of the data take turns, and their number counts in the
    /// privacy curve; of all participations of a unit where units hide in bins.
    ///
    /// Errors: those of it; a participation other than [`Sampling::participation`]; an encoder with more diagonals than parts
    /// that take turns; for bins, one that is not seen to be non-negative.
    pub fn sampled(
        workload: Workload,
        form: &Form,
        participation: Participation,
        sampling: Sampling,
    ) -> Result<Self> {
        Self::with_sensitivity(workload, form, participation, sampling, None)
    }

    /// [`Mechanism::sampled`] with a stated sensitivity.
    ///
    /// Errors: those of it; a sensitivity below that of the coefficients, by however little.
    pub(crate) fn with_sensitivity(
        workload: Workload,
        form: &Form,
        participation: Participation,
        sampling: Sampling,
        stated: Option<f64>,
    ) -> Result<Self> {
        let (actual, expected) = (form.steps(), workload.steps());
        if actual != expected {
            return Err(Error::WrongLength { name: "form", actual, expected });
        }
        let form = form.deployed()?;
        let proved = sensitivity::under(participation, sampling, &form)?;
        let sensitivity = stated.unwrap_or(proved * (1.0 + MARGIN));
        if !proved.is_finite() || !sensitivity.is_finite() {
            return Err(Error::Numerical {
                what: "sensitivity of the mechanism",
                index: 0,
                reason: "rounding errors hide it, so no bound on it can be proved for these coefficients",
            });
        }
        if sensitivity < proved {
            let rule = "it must not be below the sensitivity of the deployed coefficients";
            return Err(Error::argument("sensitivity", sensitivity, rule));
        }
        let loss = measured(sensitivity, &form, &workload)?;
        let sampled = sensitivity::hidden(sampling, &form, sensitivity)?;
        let (family, bound, privacy) = (None, None, None);
        Ok(Self { workload, form, participation, sampled, loss, family, bound, privacy })
    }

    /// Says which family the form was taken from.
    pub fn with_family(mut self, family: Selector) -> Self {
        self.family = Some(family);
        self
    }

    /// Adds the lower bound that an optimum proved.
    ///
    /// Errors: a dual point for other steps, or for units that take part where this participation lets none; a bound that is
    /// not positive.
    pub fn with_bound(mut self, bound: Bound) -> Result<Self> {
        let (actual, expected) = (bound.dual.steps(), self.workload.steps());
        if actual != expected {
            return Err(Error::WrongLength { name: "dual variable", actual, expected });
        }
        let separation = bound.dual.separation();
        if !self.participation.allows(separation, expected)? {
            let rule = "it must be a separation that this participation allows";
            return Err(Error::argument("separation of the dual point", separation, rule));
        }
        let rule = "it must be positive and finite";
        if !(bound.lower_bound > 0.0 && bound.lower_bound.is_finite()) {
            return Err(Error::argument("lower bound", bound.lower_bound, rule));
        }
        self.bound = Some(bound);
        Ok(self)
    }

    /// Counts on units coming into steps by chance. A calibration made before it is dropped.
    ///
    /// So is a lower bound: it holds for what is not sampled.
    ///
    /// Errors: those of [`Mechanism::sampled`].
    pub fn with_sampling(self, sampling: Sampling) -> Result<Self> {
        if sampling == self.sampling() {
            return Ok(Self { privacy: None, ..self });
        }
        let family = self.family;
        let sampled = Self::sampled(self.workload, &self.form, self.participation, sampling)?;
        Ok(Self { family, ..sampled })
    }

    /// The same noise for another workload of as many steps, such as other step sizes.
    ///
    /// Sensitivity and privacy are the encoder's and stay. The loss is measured anew. A lower bound is dropped: it was for
    /// the workload before.
    ///
    /// Errors: another number of steps; a loss that is not finite.
    pub fn with_workload(self, workload: Workload) -> Result<Self> {
        let (actual, expected) = (workload.steps(), self.workload.steps());
        if actual != expected {
            return Err(Error::WrongLength { name: "workload", actual, expected });
        }
        let loss = measured(self.sensitivity(), &self.form, &workload)?;
        Ok(Self { workload, loss, bound: None, ..self })
    }

    /// Solves for the noise that gives (ε, δ) at a clipping norm, and states what that means.
    ///
    /// Errors: ε or clip not positive and finite, δ outside (0, 1).
    pub fn calibrated(self, epsilon: f64, delta: f64, clip: f64, conditions: Conditions) -> Result<Self> {
        let calibration = self.terms(clip, conditions).calibrate_noise(epsilon, delta)?;
        self.with_calibration(calibration, conditions.unit)
    }

    /// [`Mechanism::calibrated`] with an observer, who may stop it. `near` is a noise multiplier that is about right, if one is known.
    ///
    /// Errors: those of it; [`Error::Interrupted`].
    pub fn calibrated_watched(
        self,
        epsilon: f64,
        delta: f64,
        clip: f64,
        conditions: Conditions,
        near: Option<f64>,
        watch: Watch<'_>,
    ) -> Result<Self> {
        let calibration = self.terms(clip, conditions).watched_calibration(epsilon, delta, near, watch)?;
        self.with_calibration(calibration, conditions.unit)
    }

    /// States a noise multiplier that was proved before to give (ε, δ).
    ///
    /// Guarantee: that of the earlier proof.
    /// Errors: those of [`Mechanism::calibrated`].
    pub(crate) fn proved_before(
        self,
        noise_multiplier: f64,
        (epsilon, delta): (f64, f64),
        clip: f64,
        conditions: Conditions,
    ) -> Result<Self> {
        let calibration = self.terms(clip, conditions).proved_before(noise_multiplier, epsilon, delta)?;
        self.with_calibration(calibration, conditions.unit)
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
        self.with_calibration(calibration, conditions.unit)
    }

    /// Sensitivity, sampling and clip under the conditions of a guarantee.
    pub fn terms(&self, clip: f64, conditions: Conditions) -> Terms {
        let Conditions { adjacency, accountant, beside, .. } = conditions;
        let sampled = self.sampled.clone();
        Terms { adjacency, accountant, sampled, sensitivity: self.sensitivity(), clip, beside }
    }

    pub(crate) fn with_calibration(mut self, calibration: Calibration, unit: PrivacyUnit) -> Result<Self> {
        let steps = self.workload.steps();
        let statement =
            PrivacyStatement::new(calibration, unit, self.participation, steps, KeyOrigin::default())?;
        self.privacy = Some(statement);
        Ok(self)
    }

    /// The workload `A`.
    pub fn workload(&self) -> &Workload {
        &self.workload
    }

    /// The form as deployed.
    pub fn form(&self) -> &Form {
        &self.form
    }

    /// The participation pattern that the sensitivity covers.
    pub fn participation(&self) -> Participation {
        self.participation
    }

    /// The sampling that the privacy curve counts on.
    pub fn sampling(&self) -> Sampling {
        self.sampled.sampling()
    }

    /// The sampling with what the form makes of it.
    pub fn hiding(&self) -> &Amplification {
        &self.sampled
    }

    /// The family that the form is said to be of; what is proved does not depend on it.
    pub fn family(&self) -> Option<Selector> {
        self.family
    }

    /// Sensitivity `γ` of the deployed encoder.
    pub fn sensitivity(&self) -> f64 {
        self.loss.sensitivity()
    }

    /// Loss of the deployed form.
    pub fn loss(&self) -> &Loss {
        &self.loss
    }

    /// The lower bound, if one was proved.
    pub fn bound(&self) -> Option<&Bound> {
        self.bound.as_ref()
    }

    /// The privacy statement of a calibrated mechanism, for a key from the operating system.
    pub fn privacy(&self) -> Option<&PrivacyStatement> {
        self.privacy.as_ref()
    }

    /// The lower bound proved anew at its dual point, without trusting the number that is stored, which holds if it is
    /// not larger.
    pub fn recompute_bound(&self) -> Result<Option<f64>> {
        self.bound.as_ref().map(|bound| lower_bound_at(&self.workload, &bound.dual)).transpose()
    }

    /// Loss as deployed against the lower bound.
    pub fn certificate(&self) -> Option<Certificate> {
        self.bound
            .as_ref()
            .map(|bound| Certificate::new(self.loss.total(), bound.lower_bound, bound.iterations))
    }

    /// What its noise is bound to.
    pub fn identity(&self) -> Identity {
        let noise = self.privacy.as_ref().map(|statement| {
            let (calibration, terms) = (statement.calibration(), statement.calibration().terms());
            [calibration.noise_multiplier(), terms.sensitivity, terms.clip]
        });
        Identity::new(&self.workload, &self.form, self.participation, self.sampling(), noise)
    }

    /// `k` of the grid `2^k` that noise of a scale is rounded to in exact arithmetic.
    ///
    /// Rounding to a grid `q` adds an error of variance `q²/12` to every gradient, and so `‖A‖_F² q²/12` to the iterates.
    /// The grid is the coarsest for which that is at most 2⁻¹³ of what the noise itself adds: 0.006 % of the root loss.
    ///
    /// Errors: a grid outside of 2⁻⁵⁰⁰ … 2⁵⁰⁰.
    pub(crate) fn grid_exponent(&self, scale: f64) -> Result<i32> {
        const SHARE: f64 = 1.0 / 8192.0;
        let noise = self.loss.total() / self.sensitivity().powi(2);
        let unit = StateSpace::independent(self.workload.steps())?.decoder_row_norms_sq(&self.workload);
        let grid = scale * (12.0 * SHARE * noise / unit.iter().sum::<f64>()).sqrt();
        let exponent = grid.log2().floor();
        match exponent.abs() <= 500.0 {
            true => Ok(exponent as i32),
            false => Err(Error::Unsupported {
                what: format!("exact noise on a grid of {grid:e}"),
                hint: "the noise is too large or too small for this workload; use float arithmetic",
            }),
        }
    }

    /// What has been spent after each step: ε at the δ of the calibration, for everything released so far.
    ///
    /// After `i` steps a unit can be told apart by the first `i` rows of `C G + Z` only.
    ///
    /// Guarantee: non-decreasing, and at the end the ε of the privacy statement. For trees, and where `C` would be a
    /// large matrix (more than 4096 steps), that ε is given for every step. Empty without a calibration.
    /// Cost: O(n²).
    pub fn spent(&self) -> Vec<f64> {
        const LIMIT: usize = 4096;
        /// Points at which the accountant is asked; in between the next one holds.
        const POINTS: usize = 64;
        let Some(statement) = &self.privacy else { return Vec::new() };
        let (steps, calibration) = (self.workload.steps(), statement.calibration());
        let total = calibration.epsilon();
        if steps > LIMIT || self.sampled != Amplification::None {
            return vec![total; steps];
        }
        let Ok(sensitivities) = self.participation.sensitivities(&self.form) else {
            return vec![total; steps];
        };
        let terms = calibration.terms();
        let epsilon = |gamma: f64| {
            // Less sensitivity under the same noise is as good as more noise.
            let share = (gamma / terms.sensitivity).min(1.0);
            let curve = terms.curve(calibration.noise_multiplier() / share);
            curve
                .and_then(|curve| curve.epsilon(terms.left(calibration.delta())?))
                .map_or(total, |e| e.min(total))
        };
        let stride = steps.div_ceil(POINTS);
        let mut spent = Vec::with_capacity(steps);
        while spent.len() < steps {
            let end = (spent.len() + stride).min(steps);
            let value = if end == steps { total } else { epsilon(sensitivities[end - 1]) };
            spent.resize(end, value);
        }
        spent
    }
}

impl Problem {
    /// A mechanism by name, as deployed, with the lower bound for its workload; not calibrated yet.
    ///
    /// Errors: those of [`Family::fit`](crate::family::Family::fit) and [`Mechanism::new`].
    pub fn mechanism(&self, selector: Selector, observe: Observer<'_>) -> Result<Mechanism> {
        let form = selector.family().fit(self, &selector.budget(), observe)?;
        Ok(self.deploy(&form, observe)?.with_family(selector))
    }

    /// Any form as deployed for the workload, with its lower bound.
    ///
    /// Errors: those of the solver and of [`Mechanism::new`].
    pub fn deploy(&self, form: &Form, observe: Observer<'_>) -> Result<Mechanism> {
        let bound = Bound::from(self.optimum(observe)?);
        Mechanism::new(self.workload().clone(), form, self.participation())?.with_bound(bound)
    }
}

/// The loss of a deployed form for a workload.
fn measured(sensitivity: f64, form: &Form, workload: &Workload) -> Result<Loss> {
    let loss = Loss::new(sensitivity, form.decoder_row_norms_sq(workload));
    match loss.per_step().iter().position(|loss| !loss.is_finite()) {
        Some(index) => {
            Err(Error::Numerical { what: "loss of the mechanism", index, reason: "it is not finite" })
        }
        None => Ok(loss),
    }
}

impl From<&Optimum> for Bound {
    fn from(optimum: &Optimum) -> Self {
        Self {
            dual: optimum.dual.clone(),
            lower_bound: optimum.certificate.lower_bound * (1.0 - MARGIN),
            iterations: optimum.certificate.iterations,
        }
    }
}
