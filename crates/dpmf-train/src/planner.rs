//! From what is asked of a run to its plan.

use crate::error::{Error, Result};
use crate::hint::Hint;
use crate::plan::Plan;
use crate::recipe::{MechanismChoice, Privacy, Settings};
use dpmf::mechanism::Conditions;
use dpmf::planner::{Listener, Planner, Request, observer};
use dpmf::problem::Goal;
use dpmf::{Mechanism, Participation, Problem, Sampling, Selector};
use std::collections::HashMap;

/// Makes plans, and remembers what was fitted and chosen.
#[derive(Default)]
pub struct RunPlanner {
    planner: Planner,
    /// Mechanisms that the planner chose, by all that decides them.
    chosen: HashMap<String, Mechanism>,
    choice: Option<String>,
    /// What mechanisms by name were last made for: those of one training mostly share it.
    problem: Option<(String, Problem)>,
}

impl RunPlanner {
    /// Plans with what a planner remembers.
    pub fn new(planner: Planner) -> Self {
        Self { planner, ..Self::default() }
    }

    /// The plan of a run.
    ///
    /// Errors: those of the planner, the solver and calibration; a plan without a number of epochs or without ε.
    pub fn plan(&mut self, settings: &Settings, listen: Listener<'_>) -> Result<Plan> {
        match settings.recipe.mechanism {
            MechanismChoice::None => Plan::without_noise(settings),
            MechanismChoice::Planned => Plan::adopt(settings, self.planned(settings, listen)?),
            MechanismChoice::Named(selector) => {
                let Settings { participation, sampling, .. } = *settings;
                self.named(settings, selector, participation, sampling, listen)
            }
            MechanismChoice::DpSgd => {
                let rate = (settings.recipe.clients as f64 / settings.limits.users as f64).min(1.0);
                let sampling = Sampling::CyclicPoisson { bands: 1, rate };
                let participation = sampling.participation(settings.rounds)?.unwrap_or_default();
                self.named(settings, "independent".parse()?, participation, sampling, listen)
            }
        }
    }

    /// What the planner chose last, in a line.
    pub fn choice(&self) -> Option<&str> {
        self.choice.as_deref()
    }

    fn named(
        &mut self,
        settings: &Settings,
        selector: Selector,
        participation: Participation,
        sampling: Sampling,
        listen: Listener<'_>,
    ) -> Result<Plan> {
        let problem = self.problem(settings, participation, sampling)?;
        let observe = &mut observer(listen);
        let mechanism = match sampling {
            Sampling::None => problem.mechanism(selector, observe)?,
            sampling => {
                let form = selector.family().fit(problem, &selector.budget(), observe)?;
                let workload = problem.workload().clone();
                Mechanism::sampled(workload, &form, participation, sampling)?.with_family(selector)
            }
        };
        let conditions = Conditions { unit: settings.unit, beside: settings.beside, ..Default::default() };
        let mechanism = match settings.privacy {
            Privacy::Epsilon { epsilon, delta } => {
                mechanism.calibrated(epsilon, delta, settings.clip, conditions)?
            }
            Privacy::NoiseMultiplier { noise_multiplier, delta } => {
                mechanism.with_noise(noise_multiplier, delta, settings.clip, conditions)?
            }
        };
        Plan::private(settings.recipe.clone(), mechanism)
    }

    /// What a mechanism is made for.
    ///
    /// Errors: those of [`Settings::workload`]; a participation or sampling that does not fit the rounds; bins without an ε to
    /// fit noise to.
    fn problem(
        &mut self,
        settings: &Settings,
        participation: Participation,
        sampling: Sampling,
    ) -> Result<&Problem> {
        let Settings { rounds, optimizer, schedule, server_learning_rate, privacy, .. } = settings;
        let name =
            name(&(rounds, optimizer, schedule, server_learning_rate, privacy, participation, sampling))?;
        let made = match self.problem.take().filter(|(known, _)| *known == name) {
            Some(known) => known,
            None => {
                let workload = settings.workload()?;
                let problem = match (sampling, *privacy) {
                    (Sampling::None, _) => Problem::new(workload, participation)?,
                    // Columns of one user do not meet, so that each counts for itself.
                    (Sampling::CyclicPoisson { .. }, _) => Problem::new(workload, Participation::Single)?,
                    (sampling, Privacy::Epsilon { epsilon, delta }) => {
                        Problem::sampled(workload, Goal { sampling, epsilon, delta })?
                    }
                    (sampling, Privacy::NoiseMultiplier { noise_multiplier, .. }) => {
                        return Err(dpmf::Error::Unsupported {
                            what: format!("{sampling} with a noise multiplier of {noise_multiplier}"),
                            hint: "a mechanism for bins is fitted to ε: set ε instead of a noise multiplier",
                        }
                        .into());
                    }
                };
                (name, problem)
            }
        };
        Ok(&self.problem.insert(made).1)
    }

    fn planned(&mut self, settings: &Settings, listen: Listener<'_>) -> Result<Mechanism> {
        let limits = settings.limits;
        let Some(epochs) = limits.epochs else {
            let message = "the planner needs to know how many epochs there are";
            return Err(Error::plan(message.into()).with_hint(Hint::EpochsOrMechanism));
        };
        let Privacy::Epsilon { epsilon, delta } = settings.privacy else {
            return Err(Error::plan(
                "the planner chooses the noise itself: set ε instead of a noise multiplier, or name a mechanism".into(),
            ));
        };
        // The best noise does not depend on the scale of the steps, unless weight decay does.
        let scaled = match settings.optimizer.weight_decay == 0.0 {
            true => Settings { server_learning_rate: 1.0, ..settings.clone() },
            false => settings.clone(),
        };
        let Settings { recipe, rounds, optimizer, schedule, server_learning_rate, .. } = &scaled;
        let (clients, clip, unit, beside) = (recipe.clients, settings.clip, settings.unit, settings.beside);
        let served = (rounds, optimizer, schedule, server_learning_rate);
        let name = name(&(served, clients, clip, unit, epsilon, delta, limits, beside))?;
        if let Some(known) = self.chosen.get(&name) {
            return Ok(known.clone());
        }
        let request = Request {
            clip,
            buffers: limits.buffers,
            trusted: limits.trusted,
            pull: limits.pull,
            conditions: Conditions { unit, beside, ..Conditions::default() },
            ..Request::new(scaled.workload()?, limits.users as u64, clients as u64, epochs, epsilon, delta)?
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

/// A name for whatever decides something.
fn name(parts: &impl serde::Serialize) -> Result<String> {
    serde_json::to_string(parts).map_err(|error| Error::plan(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::PlanLimits;
    use crate::recipe::tests::settings;
    use dpmf::planner::silent;

    fn plan(mechanism: &str, change: impl FnOnce(&mut PlanLimits)) -> Result<Plan> {
        let mut settings =
            Settings { participation: Participation::Epochs { times: 4 }, ..settings(mechanism) };
        change(&mut settings.limits);
        RunPlanner::default().plan(&settings, &mut silent)
    }

    #[test]
    fn the_planner_is_no_worse_than_dp_sgd_and_keeps_the_step_sizes_that_were_asked_for() {
        let (planned, dp_sgd) = (plan("planned", |_| ()).unwrap(), plan("dp-sgd", |_| ()).unwrap());
        let error = |plan: &Plan| {
            let mechanism = plan.mechanism().unwrap();
            let calibration = mechanism.privacy().unwrap().calibration().clone();
            assert_eq!((calibration.epsilon(), calibration.delta()), (2.0, 1e-6));
            calibration.noise_multiplier() * mechanism.loss().sqrt_total()
        };
        assert!(error(&planned) < error(&dp_sgd));
        assert_eq!((planned.label(), dp_sgd.label()), ("planned".into(), "dp-sgd".into()));
        assert_ne!(planned.sampling(), Sampling::None);
        assert_eq!(dp_sgd.sampling(), Sampling::CyclicPoisson { bands: 1, rate: 10.0 / 160.0 });
        let rates = planned.workload().optimizer().unwrap().1.to_vec();
        assert_eq!(rates[0], 0.5);
        // What was saved is read back, with its sampler.
        let folder = tempfile::tempdir().unwrap();
        for plan in [&planned, &dp_sgd] {
            let path = folder.path().join("plan.safetensors");
            plan.save(path.as_path()).unwrap();
            let back = Plan::load(path.as_path()).unwrap();
            assert_eq!((back.recipe(), back.hash()), (plan.recipe(), plan.hash()));
            assert_eq!(back.sampling(), plan.sampling());
        }
    }

    #[test]
    fn without_trust_the_plan_counts_on_no_sampling() {
        let plan = plan("planned", |limits| limits.trusted = false).unwrap();
        assert_eq!(plan.sampling(), Sampling::None);
        assert_eq!(plan.participation(), Participation::Epochs { times: 4 });
    }

    #[test]
    fn what_cannot_be_planned_is_said() {
        let message = |epochs| plan("planned", |limits| limits.epochs = epochs).unwrap_err().to_string();
        assert!(message(None).contains("how many epochs"));
        let other = message(Some(3));
        assert!(other.contains("64") && other.contains("48"), "{other}");
        let sigma = Privacy::NoiseMultiplier { noise_multiplier: 1.0, delta: 1e-6 };
        let by_noise = Settings { privacy: sigma, ..settings("planned") };
        let refused = RunPlanner::default().plan(&by_noise, &mut silent);
        assert!(refused.unwrap_err().to_string().contains("noise multiplier"));
        assert!("plan".parse::<MechanismChoice>().is_err());
        let epochs = Participation::Epochs { times: 20_000 };
        let refused = RunPlanner::default()
            .plan(&Settings { participation: epochs, ..settings("optimal") }, &mut silent);
        assert_eq!(refused.unwrap_err().kind(), "invalid-argument");
    }

    /// Plans of one training share what was fitted; what differs in anything that decides it does not.
    #[test]
    fn what_is_remembered_is_what_was_asked_for() {
        let mut planner = RunPlanner::default();
        let base = settings("optimal");
        let faster = Settings { server_learning_rate: 1.0, ..base.clone() };
        let mut seeded = base.clone();
        seeded.recipe.seed = 7;
        let plans = [&base, &seeded, &faster, &base].map(|one| planner.plan(one, &mut silent).unwrap());
        let rate = |plan: &Plan| plan.workload().optimizer().unwrap().1[0];
        assert_eq!(plans.each_ref().map(rate), [0.5, 0.5, 1.0, 0.5]);
        assert_eq!(plans[0].hash(), plans[3].hash());
        assert_ne!(plans[0].hash(), plans[1].hash());
    }
}
