//! What a run of training is asked to do, as data.

use crate::clients::Local;
use crate::error::{Error, Result};
use dpmf::accounting::{Arithmetic, ExtraRelease, PrivacyUnit};
use dpmf::family::nearest;
use dpmf::planner;
use dpmf::{Optimizer, Participation, Sampling, Schedule, Selector, Workload};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// How a mechanism is asked for: `none`, `planned`, `dp-sgd`, or the name of one.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum MechanismChoice {
    /// No noise and no privacy: what the data could give.
    None,
    /// The mechanism and the sampler that the planner finds best.
    Planned,
    /// Independent noise and Poisson sampling.
    DpSgd,
    /// This mechanism, with the sampler of the settings.
    Named(Selector),
}

impl MechanismChoice {
    /// Those that are no mechanism by name.
    const WORDS: [(&'static str, Self); 3] =
        [("none", Self::None), ("planned", Self::Planned), ("dp-sgd", Self::DpSgd)];

    /// Its name, without the choices that a mechanism leaves.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Named(selector) => selector.name(),
            word => Self::WORDS.iter().find(|(_, choice)| choice == word).map_or("none", |(name, _)| name),
        }
    }
}

impl fmt::Display for MechanismChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Named(selector) => selector.fmt(f),
            word => f.write_str(word.name()),
        }
    }
}

impl FromStr for MechanismChoice {
    type Err = dpmf::Error;

    fn from_str(text: &str) -> dpmf::Result<Self> {
        if let Some((_, choice)) = Self::WORDS.iter().find(|(name, _)| *name == text) {
            return Ok(*choice);
        }
        text.parse().map(Self::Named).map_err(|error| {
            let names = Self::WORDS.map(|(name, _)| name);
            match (nearest(text, &names), error) {
                (Some(near), dpmf::Error::Selector { value, .. }) => {
                    dpmf::Error::Selector { value, reason: format!("does not exist; did you mean {near:?}?") }
                }
                (_, error) => error,
            }
        })
    }
}

impl From<MechanismChoice> for String {
    fn from(choice: MechanismChoice) -> Self {
        choice.to_string()
    }
}

impl TryFrom<String> for MechanismChoice {
    type Error = dpmf::Error;

    fn try_from(text: String) -> dpmf::Result<Self> {
        text.parse()
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

/// What a planned mechanism may use.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlanLimits {
    /// Users to train on.
    pub users: usize,
    /// Passes over them; needed for a plan.
    pub epochs: Option<usize>,
    /// Model-sized buffers that its noise may take.
    pub buffers: usize,
    /// Whether the sampler may be counted on.
    pub trusted: bool,
    /// Fraction of past noise that later gradients undo: see [`planner::Request::pull`].
    pub pull: f64,
}

impl PlanLimits {
    /// The usual ones for so many users.
    pub fn new(users: usize) -> Self {
        Self { users, epochs: None, buffers: planner::BUFFERS, trusted: true, pull: planner::PULL }
    }
}

/// What decides a run beside its mechanism, its data, its model and its key.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// How the mechanism was asked for.
    pub mechanism: MechanismChoice,
    /// Users in a round.
    pub clients: usize,
    /// What a user computes.
    pub local: Local,
    /// Share of users that fail to turn up.
    pub dropout: f64,
    /// In what numbers noise is made and added.
    pub arithmetic: Arithmetic,
    /// Public seed of first parameters, assignment and drop-outs.
    pub seed: u64,
}

/// Everything that is asked of a run: what its [`Plan`](crate::Plan) is made from.
///
/// The plan keeps the recipe. The rest is how its mechanism is to be made, and what came of it is read from the mechanism.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// What the mechanism does not hold.
    pub recipe: Recipe,
    /// How often a user takes part.
    pub participation: Participation,
    /// By what chance users come into rounds, for mechanisms by name.
    pub sampling: Sampling,
    /// Rounds of training.
    pub rounds: usize,
    /// Norm that a user's contribution is clipped to.
    pub clip: f64,
    /// The server's optimizer.
    pub optimizer: Optimizer,
    /// The server's step sizes are these times [`Settings::server_learning_rate`].
    pub schedule: Steps,
    /// The server's learning rate.
    pub server_learning_rate: f64,
    /// Whose data is protected as one piece: what a user of the data is.
    pub unit: PrivacyUnit,
    /// How much noise; without meaning for [`MechanismChoice::None`].
    pub privacy: Privacy,
    /// What else ε and δ pay for: the private schema of a table.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub beside: Option<ExtraRelease>,
    /// What a planned mechanism may use.
    pub limits: PlanLimits,
}

impl Settings {
    /// The server's step sizes.
    ///
    /// Errors: a learning rate that is not positive and finite; a schedule that cannot be read or has the wrong length.
    pub fn rates(&self) -> Result<Vec<f64>> {
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
        Ok(values.into_iter().map(|value| rate * value).collect())
    }

    /// The workload: what the server's optimizer computes from the sums of a mean.
    ///
    /// Errors: those of [`Settings::rates`] and [`Workload::sgd`].
    pub fn workload(&self) -> Result<Workload> {
        Ok(Workload::sgd(self.rates()?, self.optimizer)?)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn settings(mechanism: &str) -> Settings {
        Settings {
            recipe: Recipe {
                mechanism: mechanism.parse().unwrap(),
                clients: 10,
                local: Local::Sgd { learning_rate: 0.1, passes: 1, batch: 16 },
                dropout: 0.0,
                arithmetic: Arithmetic::default(),
                seed: 0,
            },
            participation: Participation::default(),
            sampling: Sampling::default(),
            rounds: 64,
            clip: 0.5,
            optimizer: Optimizer { momentum: 0.9, ..Default::default() },
            schedule: Steps::Schedule("cooldown:0.25:0.05".into()),
            server_learning_rate: 0.5,
            unit: PrivacyUnit::User,
            privacy: Privacy::Epsilon { epsilon: 2.0, delta: 1e-6 },
            beside: None,
            limits: PlanLimits { epochs: Some(4), pull: 0.0, ..PlanLimits::new(160) },
        }
    }

    #[test]
    fn settings_survive_json() {
        for name in ["none", "planned", "dp-sgd", "optimal", "optimal:buffers=3", "honaker-full"] {
            let settings = settings(name);
            let text = serde_json::to_string(&settings).unwrap();
            assert_eq!(serde_json::from_str::<Settings>(&text).unwrap(), settings, "{text}");
            assert_eq!(settings.recipe.mechanism.to_string(), name);
        }
        assert!(serde_json::from_str::<MechanismChoice>("\"best\"").is_err());
        let near = "planed".parse::<MechanismChoice>().unwrap_err().to_string();
        assert!(near.contains("planned"), "{near}");
    }

    #[test]
    fn bad_schedules_and_rates_are_refused() {
        let kind = |settings: Settings| settings.workload().unwrap_err().kind();
        assert_eq!(
            kind(Settings { schedule: Steps::Values(vec![1.0; 3]), ..settings("none") }),
            "wrong-length"
        );
        for rate in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert_eq!(kind(Settings { server_learning_rate: rate, ..settings("none") }), "invalid-argument");
        }
    }
}
