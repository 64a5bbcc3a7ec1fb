//! Mechanisms side by side, as data.

use crate::error::{Error, Result};
use crate::factorize::Observer;
use crate::family::Selector;
use crate::form::Representation;
use crate::mechanism::Mechanism;
use crate::participation::Participation;
use crate::problem::Problem;
use serde::{Serialize, Serializer};

/// Mechanisms for one problem, each as it would be deployed.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// Number of steps.
    pub steps: usize,
    /// The participation that all of them cover.
    #[serde(skip)]
    pub participation: Participation,
    /// No mechanism has a loss below it.
    pub lower_bound: f64,
    /// The mechanisms.
    pub rows: Vec<Row>,
    /// Mechanisms that could not be made, and why.
    #[serde(serialize_with = "reasons", skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<(String, String)>,
}

/// One mechanism, at unit clip and unit noise multiplier.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Its name.
    pub mechanism: String,
    /// Root of the total squared error over all steps.
    pub sqrt_loss: f64,
    /// Root of the largest step's.
    pub max_sqrt_loss: f64,
    /// Root of the last step's.
    pub final_sqrt_loss: f64,
    /// Root loss over the root of the lower bound.
    pub ratio_to_bound: f64,
    /// Model-sized arrays kept from one step to the next; nothing for dense rows, which draw all earlier noise again.
    pub buffers: Option<usize>,
    /// Most earlier rows of noise that a step draws again; nothing for dense rows, which draw all.
    pub recalls: Option<usize>,
    /// Mean number of model-sized multiply-adds a step.
    pub work: f64,
}

impl Row {
    /// What a mechanism does, against a lower bound.
    pub fn new(name: &str, mechanism: &Mechanism, lower_bound: f64) -> Self {
        let (loss, cost) = (mechanism.loss(), mechanism.form().cost());
        Self {
            mechanism: name.to_owned(),
            sqrt_loss: loss.sqrt_total(),
            max_sqrt_loss: loss.max_sqrt(),
            final_sqrt_loss: loss.final_sqrt(),
            ratio_to_bound: (loss.total() / lower_bound).sqrt(),
            buffers: cost.buffers,
            recalls: cost.recalls,
            work: cost.work,
        }
    }
}

fn reasons<S: Serializer>(left_out: &[(String, String)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(left_out.iter().map(|(name, reason)| (name, reason)))
}

impl Problem {
    /// Puts mechanisms side by side, each as it would be deployed, in the order given; those of one family by their
    /// buffers and recalls, and of several with the same numbers the first.
    ///
    /// Errors: those of [`Problem::mechanism`]; where there are others, a mechanism that cannot be made is left out and named.
    pub fn compare(&self, selectors: &[Selector], observe: Observer<'_>) -> Result<Comparison> {
        let lower_bound = self.optimum(observe)?.certificate.lower_bound;
        let mut rows: Vec<Row> = Vec::new();
        let mut left_out = Vec::new();
        for selector in selectors {
            let mechanism = match self.mechanism(*selector, observe) {
                Err(error) if selectors.len() > 1 && !matches!(error, Error::Interrupted { .. }) => {
                    // One sentence for all sizes of a family.
                    let reason = error.to_string();
                    let is_listed = |(name, other): &(String, String)| {
                        other == &reason && name.split(':').next() == Some(selector.name())
                    };
                    if !left_out.iter().any(is_listed) {
                        left_out.push((selector.to_string(), reason));
                    }
                    continue;
                }
                made => made?,
            };
            let row = Row::new(selector.name(), &mechanism, lower_bound);
            let known = |other: &Row| {
                let size = |row: &Row| (row.mechanism.clone(), row.buffers, row.recalls);
                row.buffers.is_some() && size(other) == size(&row)
            };
            if !rows.iter().any(known) {
                rows.push(row);
            }
        }
        rows.chunk_by_mut(|a, b| a.mechanism == b.mechanism)
            .for_each(|same| same.sort_by_key(|row| (row.buffers, row.recalls)));
        Ok(Comparison {
            steps: self.steps(),
            participation: self.participation(),
            lower_bound,
            rows,
            left_out,
        })
    }
}
