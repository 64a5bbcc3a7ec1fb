//! What is known about a mechanism, as data.

use crate::accounting::PrivacyStatement;
use crate::factorize::Certificate;
use crate::form::Representation;
use crate::mechanism::Mechanism;
use crate::participation::{Pattern, Sampling};
use crate::workload::{Average, Optimizer, Workload};
use serde::Serialize;

/// Everything that is known of a mechanism: what `dpmf inspect` prints and Python shows.
#[derive(Clone, Debug, Serialize)]
pub struct Inspection<'a> {
    /// Number of steps.
    pub steps: usize,
    /// The family that it is said to be of.
    pub mechanism: Option<String>,
    /// The kind of its form.
    pub form: &'static str,
    /// What its noise is bound to.
    pub identity: String,
    /// The workload.
    pub workload: WorkloadSummary<'a>,
    /// How often one unit takes part.
    pub participation: Pattern,
    /// By what chance units come into steps.
    pub sampling: Sampling,
    /// Sensitivity as deployed.
    pub sensitivity: f64,
    /// Root of the total squared error over all steps.
    pub sqrt_loss: f64,
    /// Root of the largest step's.
    pub max_sqrt_loss: f64,
    /// Root of the last step's.
    pub final_sqrt_loss: f64,
    /// Loss against the lower bound.
    pub certificate: Option<Certificate>,
    /// Root loss over the root of the lower bound.
    pub ratio_to_bound: Option<f64>,
    /// Model-sized buffers; nothing for dense rows.
    pub buffers: Option<usize>,
    /// Most earlier rows of noise that a step draws again; nothing for dense rows.
    pub recalls: Option<usize>,
    /// Mean number of model-sized multiply-adds a step.
    pub work: f64,
    /// The privacy statement of a calibrated mechanism.
    pub privacy: Option<&'a PrivacyStatement>,
}

/// A workload, for programs.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub enum WorkloadSummary<'a> {
    /// An optimizer with its step sizes.
    Sgd {
        /// The optimizer.
        optimizer: &'a Optimizer,
        /// Step sizes.
        learning_rates: &'a [f64],
    },
    /// A matrix.
    Matrix(&'static str),
}

impl<'a> Inspection<'a> {
    /// Looks at a mechanism.
    ///
    /// Errors: none for a mechanism that was built; a participation always fits its steps.
    pub fn of(mechanism: &'a Mechanism) -> crate::Result<Self> {
        let (workload, loss, cost) = (mechanism.workload(), mechanism.loss(), mechanism.form().cost());
        let certificate = mechanism.certificate();
        Ok(Self {
            steps: workload.steps(),
            mechanism: mechanism.family().map(|family| family.to_string()),
            form: mechanism.form().kind(),
            identity: mechanism.identity().to_string(),
            workload: match workload.optimizer() {
                Some((optimizer, learning_rates)) => WorkloadSummary::Sgd { optimizer, learning_rates },
                None => WorkloadSummary::Matrix("matrix"),
            },
            participation: mechanism.participation().pattern(workload.steps())?,
            sampling: mechanism.sampling(),
            sensitivity: mechanism.sensitivity(),
            sqrt_loss: loss.sqrt_total(),
            max_sqrt_loss: loss.max_sqrt(),
            final_sqrt_loss: loss.final_sqrt(),
            certificate,
            ratio_to_bound: certificate.map(|certificate| certificate.ratio_to_bound()),
            buffers: cost.buffers,
            recalls: cost.recalls,
            work: cost.work,
            privacy: mechanism.privacy(),
        })
    }
}

/// A workload in a few words, for people.
pub fn describe(workload: &Workload) -> String {
    let Some((optimizer, rates)) = workload.optimizer() else { return "a matrix".into() };
    let mut words = Vec::new();
    match (optimizer.momentum, optimizer.nesterov) {
        (0.0, _) => {}
        (beta, false) => words.push(format!("momentum {beta}")),
        (beta, true) => words.push(format!("Nesterov momentum {beta}")),
    }
    if optimizer.weight_decay > 0.0 {
        let form = if optimizer.coupled { "coupled " } else { "" };
        words.push(format!("{form}weight decay {}", optimizer.weight_decay));
    }
    if rates.iter().any(|rate| *rate != rates[0]) {
        words.push("a step-size schedule".into());
    }
    if optimizer.average != Average::None {
        words.push(format!("average {}", optimizer.average));
    }
    match words.is_empty() {
        true if workload.is_prefix_sum() => "prefix sum".into(),
        true => "SGD".into(),
        false => words.join(", "),
    }
}
