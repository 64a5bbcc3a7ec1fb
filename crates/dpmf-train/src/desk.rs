//! From what a person asks for to the plan of a run: by name, or by the planner.

use crate::error::{Error, Result};
use crate::hint::Hint;
use crate::plan::Plan;
use crate::recipe::{Choice, Privacy, Recipe, Wish};
use dpmf::family::nearest;
use dpmf::mechanism::Conditions;
use dpmf::planner::{Listener, Planner, Request, observer};
use dpmf::{Mechanism, Problem, Sampling};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;

/// What a person asks for: `planned`, `dp-sgd`, or a mechanism by name.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Asked {
    /// Somebody else chooses mechanism and sampler.
    Wish(Wish),
    /// This mechanism, with the sampler of the recipe.
    Named(Choice),
}

impl fmt::Display for Asked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Asked::Wish(wish) => f.write_str(wish.name()),
            Asked::Named(choice) => choice.fmt(f),
        }
    }
}

impl FromStr for Asked {
    type Err = dpmf::Error;

    fn from_str(text: &str) -> dpmf::Result<Self> {
        let wishes = [Wish::Planned, Wish::DpSgd];
        match wishes.into_iter().find(|wish| wish.name() == text) {
            Some(wish) => Ok(Asked::Wish(wish)),
            None => text.parse().map(Asked::Named).map_err(|error| {
                let names = [Wish::Planned.name(), Wish::DpSgd.name(), "none"];
                match (nearest(text, &names), error) {
                    (Some(near), dpmf::Error::Selector { value, .. }) => dpmf::Error::Selector {
                        value,
                        reason: format!("there is no such (did you mean {near}?)"),
                    },
                    (_, error) => error,
                }
            }),
        }
    }
}

impl From<Asked> for String {
    fn from(asked: Asked) -> Self {
        asked.to_string()
    }
}

impl TryFrom<String> for Asked {
    type Error = dpmf::Error;

    fn try_from(text: String) -> dpmf::Result<Self> {
        text.parse()
    }
}

/// Whom a run is for, and what it may use.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Means {
    /// Users to train on.
    pub users: usize,
    /// Passes over them; needed for a plan.
    pub epochs: Option<usize>,
    /// Model-sized buffers that a planned mechanism may take.
    pub buffers: usize,
    /// Whether the sampler may be counted on.
    pub trusted: bool,
    /// Share of what noise has moved that training is supposed to take back: see [`Request::pull`].
    pub pull: f64,
}

/// Makes plans, and remembers what was fitted and chosen.
#[derive(Default)]
pub struct Desk {
    planner: Planner,
    chosen: HashMap<String, Mechanism>,
    choice: Option<String>,
    problem: Option<(String, Problem)>,
}

impl Desk {
    /// A desk beside a planner.
    pub fn new(planner: Planner) -> Self {
        Self { planner, ..Self::default() }
    }

    /// The plan of a recipe whose mechanism is still to be filled in by what was asked for.
    ///
    /// Errors: those of the planner, the solver and calibration; a plan without a number of epochs or without ε.
    pub fn plan(&mut self, asked: Asked, recipe: Recipe, means: Means, listen: Listener<'_>) -> Result<Plan> {
        match asked {
            Asked::Named(mechanism) => {
                // Without noise there is nothing to hide.
                let sampling = if mechanism == Choice::None { Sampling::None } else { recipe.sampling };
                self.named(Recipe { mechanism, sampling, wish: None, ..recipe }, listen)
            }
            Asked::Wish(Wish::DpSgd) => {
                let rate = (recipe.clients as f64 / means.users as f64).min(1.0);
                let sampling = Sampling::CyclicPoisson { bands: 1, rate };
                let participation = sampling.participation(recipe.rounds)?.unwrap_or_default();
                let (mechanism, wish) = ("independent".parse()?, Some(Wish::DpSgd));
                self.named(Recipe { mechanism, sampling, participation, wish, ..recipe }, listen)
            }
            Asked::Wish(Wish::Planned) => {
                let mechanism = self.planned(&recipe, means, listen)?;
                Plan::adopt(Recipe { wish: Some(Wish::Planned), ..recipe }, mechanism)
            }
        }
    }

    /// What the planner chose last, in a line.
    pub fn choice(&self) -> Option<&str> {
        self.choice.as_deref()
    }

    fn named(&mut self, recipe: Recipe, listen: Listener<'_>) -> Result<Plan> {
        if recipe.mechanism == Choice::None {
            return Plan::make(recipe, &mut observer(listen));
        }
        // Recipes of one training mostly share their problem.
        let bare = Recipe {
            mechanism: Choice::None,
            wish: None,
            seed: 0,
            clip: 1.0,
            dropout: 0.0,
            ..recipe.clone()
        };
        let name = serde_json::to_string(&bare).map_err(|error| Error::plan(error.to_string()))?;
        if self.problem.as_ref().is_none_or(|(known, _)| *known != name) {
            self.problem = Some((name, recipe.problem()?));
        }
        match &self.problem {
            Some((_, problem)) => Plan::for_problem(recipe, problem, &mut observer(listen)),
            None => Plan::make(recipe, &mut observer(listen)),
        }
    }

    fn planned(&mut self, recipe: &Recipe, means: Means, listen: Listener<'_>) -> Result<Mechanism> {
        let Some(epochs) = means.epochs else {
            return Err(Error::plan("the planner needs to know how many epochs there are".into())
                .with_hint(Hint::EpochsOrMechanism));
        };
        let Privacy::Epsilon { epsilon, delta } = recipe.privacy else {
            return Err(Error::plan(
                "the planner chooses the noise itself: give ε instead of a noise multiplier, or name a mechanism".into(),
            ));
        };
        // The best noise does not depend on the scale of the steps, unless weight decay does.
        let server_learning_rate =
            if recipe.optimizer.weight_decay == 0.0 { 1.0 } else { recipe.server_learning_rate };
        let bare = Recipe {
            mechanism: Choice::None,
            wish: None,
            seed: 0,
            dropout: 0.0,
            server_learning_rate,
            ..recipe.clone()
        };
        let name = serde_json::to_string(&(&bare, means)).map_err(|error| Error::plan(error.to_string()))?;
        if let Some(known) = self.chosen.get(&name) {
            return Ok(known.clone());
        }
        let (users, clients) = (means.users as u64, recipe.clients as u64);
        let request = Request {
            clip: recipe.clip,
            buffers: means.buffers,
            trusted: means.trusted,
            pull: means.pull,
            conditions: Conditions { unit: recipe.unit, ..Conditions::default() },
            ..Request::new(bare.workload()?, users, clients, epochs, epsilon, delta)?
        };
        let plan = self.planner.plan(&request, listen)?;
        let mechanism = plan.chosen().mechanism().clone();
        let against = match plan.chosen().is_dp_sgd() {
            true => "which is DP-SGD".to_owned(),
            false => format!("{:.2} times the error of DP-SGD", plan.chosen().rmse() / plan.dp_sgd().rmse()),
        };
        let row = plan.chosen().row();
        self.choice = Some(format!("{} with sampling {}, {against}", row.selector, row.sampling));
        self.chosen.insert(name, mechanism.clone());
        Ok(mechanism)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::tests::recipe;
    use dpmf::Participation;
    use dpmf::planner::silent;

    const MEANS: Means = Means { users: 160, epochs: Some(4), buffers: 8, trusted: true, pull: 0.0 };

    fn plan(asked: &str, means: Means) -> Result<Plan> {
        let base = Recipe { participation: Participation::Epochs { times: 4 }, ..recipe("none") };
        Desk::default().plan(asked.parse().unwrap(), base, means, &mut silent)
    }

    #[test]
    fn the_planner_is_no_worse_than_dp_sgd_and_keeps_the_step_sizes_of_the_recipe() {
        let (planned, dp_sgd) = (plan("planned", MEANS).unwrap(), plan("dp-sgd", MEANS).unwrap());
        let error = |plan: &Plan| {
            let mechanism = plan.mechanism().unwrap();
            let calibration = mechanism.privacy().unwrap().calibration().clone();
            assert_eq!((calibration.epsilon(), calibration.delta()), (2.0, 1e-6));
            calibration.noise_multiplier() * mechanism.loss().sqrt_total()
        };
        assert!(error(&planned) < error(&dp_sgd));
        assert_eq!((planned.recipe().label(), dp_sgd.recipe().label()), ("planned".into(), "dp-sgd".into()));
        assert_ne!(planned.recipe().sampling, Sampling::None);
        assert_eq!(dp_sgd.recipe().sampling, Sampling::CyclicPoisson { bands: 1, rate: 10.0 / 160.0 });
        let rates = planned.workload().optimizer().unwrap().1.to_vec();
        assert_eq!(rates[0], 0.5);
        // What was saved is read back, with its sampler.
        let folder = tempfile::tempdir().unwrap();
        for plan in [&planned, &dp_sgd] {
            let path = folder.path().join("plan.safetensors");
            plan.save(path.as_path()).unwrap();
            let back = Plan::load(path.as_path()).unwrap();
            assert_eq!((back.recipe(), back.hash()), (plan.recipe(), plan.hash()));
        }
    }

    #[test]
    fn without_trust_the_plan_counts_on_no_sampling() {
        let plan = plan("planned", Means { trusted: false, ..MEANS }).unwrap();
        assert_eq!(plan.recipe().sampling, Sampling::None);
        assert_eq!(plan.recipe().participation, Participation::Epochs { times: 4 });
    }

    #[test]
    fn what_cannot_be_planned_is_said() {
        let message = |means| plan("planned", means).unwrap_err().to_string();
        assert!(message(Means { epochs: None, ..MEANS }).contains("say how many epochs"));
        let other = message(Means { epochs: Some(3), ..MEANS });
        assert!(other.contains("64") && other.contains("48"), "{other}");
        let sigma = Privacy::NoiseMultiplier { noise_multiplier: 1.0, delta: 1e-6 };
        let asked = "planned".parse().unwrap();
        let refused =
            Desk::default().plan(asked, Recipe { privacy: sigma, ..recipe("none") }, MEANS, &mut silent);
        assert!(refused.unwrap_err().to_string().contains("noise multiplier"));
        assert!("plan".parse::<Asked>().is_err());
    }
}
