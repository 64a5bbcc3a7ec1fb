//! Everything that decides a run of training, as data.

use crate::clients::Local;
use crate::error::{Error, Result};
use crate::training::Settings;
use dpmf::accounting::PrivacyUnit;
use dpmf::factorize::{Observer, Options, Solver, Target};
use dpmf::mechanism::Conditions;
use dpmf::{Catalog, Factorization, Mechanism, Method, Optimizer, Representation, Schedule, Workload};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A mechanism by name, or none at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Choice {
    /// No noise and no privacy: what the data could give.
    None,
    /// A private mechanism.
    Private(Method),
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Choice::None => "none",
            Choice::Private(method) => method.name(),
        })
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
    /// Optima as dense rows instead of streams of a few states.
    pub dense: bool,
    /// States of a stream; as many as stay within 1e-4 of the bound if not given.
    pub buffers: Option<usize>,
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
    /// Share of users that fail to turn up.
    pub dropout: f64,
    /// How much noise; without meaning for [`Choice::None`].
    pub privacy: Privacy,
    /// Public seed of first parameters, assignment and drop-outs.
    pub seed: u64,
}

/// Rows of dense noise matrices that are computed together, see [`dpmf::noise::engines::engine_ahead`].
pub const ROWS_AHEAD: usize = 16;

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

    /// The settings of the training loop.
    pub fn settings(&self) -> Settings {
        let Self { clients, clip, local, dropout, seed, .. } = *self;
        Settings { clients, clip, local, dropout, seed }
    }

    /// Whose data is protected as one piece.
    pub fn unit(&self) -> PrivacyUnit {
        match self.local {
            Local::Sgd { .. } => PrivacyUnit::User,
            Local::Gradient => PrivacyUnit::Record,
        }
    }

    /// The mechanism as deployed, calibrated; `None` without noise.
    ///
    /// Errors: those of the solver and of calibration.
    pub fn mechanism(&self, observe: Observer<'_>) -> Result<Option<Mechanism>> {
        let Choice::Private(method) = self.mechanism else { return Ok(None) };
        let catalog = Catalog::new(self.workload()?, Solver::Auto, Options::default());
        let factorization = self.factorization(&catalog, method, observe)?;
        let mechanism = catalog.deploy(&factorization, observe)?;
        let conditions = Conditions { unit: self.unit(), ..Default::default() };
        Ok(Some(match self.privacy {
            Privacy::Epsilon { epsilon, delta } => {
                mechanism.calibrated(epsilon, delta, self.clip, conditions)?
            }
            Privacy::NoiseMultiplier { noise_multiplier, delta } => {
                mechanism.with_noise(noise_multiplier, delta, self.clip, conditions)?
            }
        }))
    }

    fn factorization(
        &self,
        catalog: &Catalog,
        method: Method,
        observe: Observer<'_>,
    ) -> dpmf::Result<Factorization> {
        let target = self.buffers.map_or(Target::default(), Target::Buffers);
        match method {
            Method::StateSpace => catalog.state_space(target, observe),
            Method::Optimal if !self.dense => catalog.state_space(target, observe),
            Method::OptimalPrefix if !self.dense => {
                let prefix = Workload::prefix_sum(self.rounds)?;
                Catalog::new(prefix, Solver::Auto, Options::default()).state_space(target, observe)
            }
            _ => catalog.factorization(method, observe),
        }
    }
}

/// What a calibrated mechanism has spent after each of its steps: ε at its δ, for everything released so far.
///
/// After `i` steps a user can be told apart by the first `i` rows of `C G + Z` only, whose sensitivity is the largest
/// norm of a column of the first `i` rows of `C`.
///
/// Guarantee: non-decreasing, and at the end the ε of the privacy statement. For trees, and where `C` would be a large
/// matrix (more than 4096 steps), that ε is given for every step.
///
/// Cost: O(n²).
pub fn spent(mechanism: &Mechanism) -> Vec<f64> {
    const LIMIT: usize = 4096;
    /// Points at which the accountant is asked; in between the next one holds.
    const POINTS: usize = 64;
    let Some(statement) = mechanism.privacy() else { return Vec::new() };
    let (steps, calibration) = (mechanism.workload().steps(), statement.calibration());
    let total = calibration.epsilon();
    let factorization = mechanism.factorization();
    // Rows of a tree's encoder are nodes, not steps.
    if steps > LIMIT || factorization.noise_rows() != steps {
        return vec![total; steps];
    }
    let encoder = factorization.encoder();
    let mut norms_sq = vec![0.0_f64; encoder.ncols()];
    let sensitivities: Vec<f64> = (0..encoder.nrows())
        .map(|i| {
            norms_sq.iter_mut().enumerate().for_each(|(j, norm)| *norm += encoder[(i, j)].powi(2));
            norms_sq.iter().copied().fold(0.0, f64::max).sqrt()
        })
        .collect();
    let terms = calibration.terms();
    let epsilon = |sensitivity: f64| {
        let share = (sensitivity / terms.sensitivity).min(1.0);
        terms
            .accountant
            .epsilon(calibration.mu() * share, calibration.delta())
            .map_or(total, |e| e.min(total))
    };
    let stride = steps.div_ceil(POINTS);
    let ends = (0..steps).map(|i| ((i / stride + 1) * stride).min(steps) - 1);
    let mut known = (usize::MAX, total);
    ends.map(|end| {
        if end + 1 == steps {
            return total;
        }
        if known.0 != end {
            known = (end, epsilon(sensitivities[end]));
        }
        known.1
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ops::ControlFlow;

    fn recipe(mechanism: &str) -> Recipe {
        Recipe {
            mechanism: mechanism.parse().unwrap(),
            dense: false,
            buffers: None,
            rounds: 64,
            clients: 10,
            clip: 0.5,
            optimizer: Optimizer { momentum: 0.9, ..Default::default() },
            schedule: Steps::Schedule("cooldown:0.25:0.05".into()),
            server_learning_rate: 0.5,
            local: Local::Sgd { learning_rate: 0.1, passes: 1, batch: 16 },
            dropout: 0.0,
            privacy: Privacy::Epsilon { epsilon: 2.0, delta: 1e-6 },
            seed: 0,
        }
    }

    fn mechanism(recipe: &Recipe) -> Mechanism {
        recipe.mechanism(&mut |_| ControlFlow::Continue(())).unwrap().unwrap()
    }

    #[test]
    fn every_mechanism_gives_the_epsilon_asked_for_and_none_is_below_the_bound() {
        for method in Method::ALL {
            let mechanism = mechanism(&recipe(method.name()));
            let epsilon = mechanism.privacy().unwrap().calibration().epsilon();
            assert!(epsilon <= 2.0 && epsilon > 1.99, "{}: {epsilon}", method.name());
            assert!(mechanism.certificate().unwrap().ratio_to_bound() >= 1.0, "{}", method.name());
        }
        let none = recipe("none").mechanism(&mut |_| ControlFlow::Continue(())).unwrap();
        assert!(none.is_none());
    }

    #[test]
    fn streams_and_dense_rows_of_an_optimum_have_the_same_loss() {
        for name in ["optimal", "optimal-prefix"] {
            let stream = mechanism(&recipe(name));
            let dense = mechanism(&Recipe { dense: true, ..recipe(name) });
            assert!(matches!(stream.factorization(), Factorization::StateSpace(_)));
            assert!(matches!(dense.factorization(), Factorization::Dense(_)));
            let ratio = stream.loss().sqrt_total() / dense.loss().sqrt_total();
            assert!((ratio - 1.0).abs() < 2e-3, "{name}: {ratio}");
        }
    }

    #[test]
    fn epsilon_is_spent_step_by_step() {
        let mechanism = mechanism(&recipe("optimal"));
        let spent = spent(&mechanism);
        assert_eq!(spent.len(), 64);
        assert!(spent.windows(2).all(|pair| pair[0] <= pair[1]));
        assert!(spent[0] > 0.0 && spent[0] < 0.9 * spent[63], "{spent:?}");
        assert_eq!(spent[63], mechanism.privacy().unwrap().calibration().epsilon());
        // Independent noise: a user's round is over at once, so everything is spent at its round.
        let independent = super::tests::mechanism(&recipe("independent"));
        assert!(super::spent(&independent).iter().all(|e| *e > 1.99));
    }

    #[test]
    fn recipes_survive_json() {
        for name in ["none", "optimal", "honaker-full"] {
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
    }
}
