//! What a run of training is asked to do, as data.

use crate::clients::Local;
use crate::error::{Error, Result};
use dpmf::accounting::{Arithmetic, PrivacyUnit};
use dpmf::problem::Goal;
use dpmf::{Optimizer, Participation, Problem, Sampling, Schedule, Selector, Workload};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A mechanism by name, or none at all.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Choice {
    /// No noise and no privacy: what the data could give.
    None,
    /// A private mechanism.
    Private(Selector),
}

impl Choice {
    /// The name of the mechanism, without what was chosen of it.
    pub fn name(&self) -> &'static str {
        match self {
            Choice::None => "none",
            Choice::Private(selector) => selector.name(),
        }
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Choice::None => f.write_str("none"),
            Choice::Private(selector) => selector.fmt(f),
        }
    }
}

impl FromStr for Choice {
    type Err = dpmf::Error;

    fn from_str(text: &str) -> dpmf::Result<Self> {
        if text == "none" { Ok(Choice::None) } else { Ok(Choice::Private(text.parse()?)) }
    }
}

impl From<Choice> for String {
    fn from(choice: Choice) -> Self {
        choice.to_string()
    }
}

impl TryFrom<String> for Choice {
    type Error = dpmf::Error;

    fn try_from(text: String) -> dpmf::Result<Self> {
        text.parse()
    }
}

/// How a mechanism and a sampler were asked for, where that was not by their names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Wish {
    /// As the planner finds best.
    Planned,
    /// Independent noise and Poisson sampling.
    DpSgd,
}

impl Wish {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Wish::Planned => "planned",
            Wish::DpSgd => "dp-sgd",
        }
    }
}

/// How much noise.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Privacy {
    /// As much as (ε, δ) needs.
    Epsilon {
        /// ε of the guarantee.
        epsilon: f64,
        /// δ of the guarantee.
        delta: f64,
    },
    /// As much as a noise multiplier says.
    NoiseMultiplier {
        /// Standard deviation of the noise over sensitivity times clip.
        noise_multiplier: f64,
        /// δ at which ε is stated.
        delta: f64,
    },
}

/// Step sizes relative to the server's learning rate.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Steps {
    /// A schedule in words, such as `cooldown:0.25:0.05`.
    Schedule(String),
    /// One number for each round.
    Values(Vec<f64>),
}

/// Everything that decides a run beside model, data and key.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// The mechanism.
    pub mechanism: Choice,
    /// What was asked for, where it was not this mechanism by name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wish: Option<Wish>,
    /// How often a user takes part.
    pub participation: Participation,
    /// By what chance users come into rounds.
    pub sampling: Sampling,
    /// Rounds of training.
    pub rounds: usize,
    /// Users in a round.
    pub clients: usize,
    /// Norm that a user's contribution is clipped to.
    pub clip: f64,
    /// The server's optimizer.
    pub optimizer: Optimizer,
    /// The server's step sizes are these times [`Recipe::server_learning_rate`].
    pub schedule: Steps,
    /// The server's learning rate.
    pub server_learning_rate: f64,
    /// What a user computes.
    pub local: Local,
    /// Whose data is protected as one piece: what a user of the data is.
    pub unit: PrivacyUnit,
    /// Share of users that fail to turn up.
    pub dropout: f64,
    /// How much noise; without meaning for [`Choice::None`].
    pub privacy: Privacy,
    /// In what numbers noise is made and added.
    #[serde(default)]
    pub arithmetic: Arithmetic,
    /// Public seed of first parameters, assignment and drop-outs.
    pub seed: u64,
}

impl Recipe {
    /// The workload: what the server's optimizer computes from the sums of a mean.
    ///
    /// Errors: a schedule that cannot be read or has the wrong length; those of [`Workload::sgd`].
    pub fn workload(&self) -> Result<Workload> {
        let rate = self.server_learning_rate;
        if !(rate > 0.0 && rate.is_finite()) {
            return Err(Error::argument("server learning rate", rate, "it must be positive and finite"));
        }
        let values = match &self.schedule {
            Steps::Schedule(words) => words.parse::<Schedule>()?.values(self.rounds),
            Steps::Values(values) if values.len() == self.rounds => values.clone(),
            Steps::Values(values) => {
                let (actual, expected) = (values.len(), self.rounds);
                return Err(dpmf::Error::WrongLength { name: "schedule", actual, expected }.into());
            }
        };
        let rates = values.into_iter().map(|value| rate * value).collect();
        Ok(Workload::sgd(rates, self.optimizer)?)
    }

    /// What its mechanisms are made for: shared by all recipes with the same server, participation and sampling.
    ///
    /// Errors: those of [`Recipe::workload`]; a participation or sampling that does not fit the rounds; bins without an ε
    /// to fit noise to.
    pub fn problem(&self) -> Result<Problem> {
        let workload = self.workload()?;
        Ok(match (self.sampling, self.privacy) {
            (Sampling::None, _) => Problem::new(workload, self.participation)?,
            // Columns of one user do not meet, so that each counts for itself.
            (Sampling::CyclicPoisson { .. }, _) => Problem::new(workload, Participation::Single)?,
            (sampling, Privacy::Epsilon { epsilon, delta }) => {
                Problem::sampled(workload, Goal { sampling, epsilon, delta })?
            }
            (sampling, Privacy::NoiseMultiplier { noise_multiplier, .. }) => {
                return Err(dpmf::Error::Unsupported {
                    what: format!("{sampling} with a noise multiplier of {noise_multiplier}"),
                    hint: "for bins a mechanism is fitted to ε: give ε instead",
                }
                .into());
            }
        })
    }

    /// What a person calls it: what was asked for, or the mechanism.
    pub fn label(&self) -> String {
        self.wish.map_or_else(|| self.mechanism.to_string(), |wish| wish.name().to_owned())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn recipe(mechanism: &str) -> Recipe {
        Recipe {
            mechanism: mechanism.parse().unwrap(),
            wish: None,
            participation: Participation::default(),
            sampling: Sampling::default(),
            rounds: 64,
            clients: 10,
            clip: 0.5,
            optimizer: Optimizer { momentum: 0.9, ..Default::default() },
            schedule: Steps::Schedule("cooldown:0.25:0.05".into()),
            server_learning_rate: 0.5,
            local: Local::Sgd { learning_rate: 0.1, passes: 1, batch: 16 },
            unit: PrivacyUnit::User,
            dropout: 0.0,
            privacy: Privacy::Epsilon { epsilon: 2.0, delta: 1e-6 },
            arithmetic: Arithmetic::default(),
            seed: 0,
        }
    }

    #[test]
    fn recipes_survive_json() {
        for name in ["none", "optimal", "optimal:buffers=3", "honaker-full"] {
            let recipe = recipe(name);
            let text = serde_json::to_string(&recipe).unwrap();
            assert_eq!(serde_json::from_str::<Recipe>(&text).unwrap(), recipe, "{text}");
        }
        assert!(serde_json::from_str::<Choice>("\"best\"").is_err());
    }

    #[test]
    fn bad_schedules_and_rates_are_refused() {
        let kind = |recipe: Recipe| recipe.workload().unwrap_err().kind();
        assert_eq!(kind(Recipe { schedule: Steps::Values(vec![1.0; 3]), ..recipe("none") }), "wrong-length");
        for rate in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert_eq!(kind(Recipe { server_learning_rate: rate, ..recipe("none") }), "invalid-argument");
        }
        let epochs = Recipe { participation: Participation::Epochs { times: 20_000 }, ..recipe("optimal") };
        assert_eq!(epochs.problem().err().unwrap().kind(), "invalid-argument");
    }
}
