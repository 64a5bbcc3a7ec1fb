//! The plan of a run: recipe and mechanism, made once, saved, and read back by whoever trains, resumes or reports.

use crate::cohort::Assignment;
use crate::error::{Error, Result};
use crate::recipe::{Choice, Privacy, Recipe};
use dpmf::disk::{self, Access, Place};
use dpmf::factorize::Observer;
use dpmf::mechanism::Conditions;
use dpmf::noise::{NoiseKey, RunId};
use dpmf::{Mechanism, PrivateRun, Problem, Sampler, Sampling, Workload, format};
use sha2::{Digest, Sha256};
use std::io::Write;

/// Everything that decides a run but data, model and key.
///
/// Guarantee: recipe and mechanism agree: the mechanism was made for the recipe's server, participation and sampling,
/// and calibrated for its clip, its unit and its privacy.
///
/// The file is that of the mechanism, with the recipe in it, so that everything which reads mechanisms reads plans.
#[derive(Clone, Debug)]
pub struct Plan {
    recipe: Recipe,
    mechanism: Option<Mechanism>,
    workload: Workload,
    bytes: Vec<u8>,
}

/// Relative difference of step sizes that other machines may compute from the same schedule.
const RATE_SLACK: f64 = 1e-12;

impl Plan {
    /// Makes the plan of a recipe.
    ///
    /// Errors: those of [`Plan::for_problem`] and [`Recipe::problem`].
    pub fn make(recipe: Recipe, observe: Observer<'_>) -> Result<Self> {
        let problem = recipe.problem()?;
        Self::for_problem(recipe, &problem, observe)
    }

    /// Makes the plan of a recipe for its [`Recipe::problem`], which several plans may share.
    ///
    /// Errors: those of the solver and of calibration; another problem.
    pub fn for_problem(recipe: Recipe, problem: &Problem, observe: Observer<'_>) -> Result<Self> {
        let mechanism = match recipe.mechanism {
            Choice::None => None,
            Choice::Private(selector) => {
                let mechanism = match recipe.sampling {
                    Sampling::None => problem.mechanism(selector, observe)?,
                    sampling => {
                        let form = selector.family().fit(problem, &selector.budget(), observe)?;
                        let workload = problem.workload().clone();
                        Mechanism::sampled(workload, &form, recipe.participation, sampling)?
                            .with_family(selector)
                    }
                };
                let conditions = Conditions { unit: recipe.unit, ..Default::default() };
                Some(match recipe.privacy {
                    Privacy::Epsilon { epsilon, delta } => {
                        mechanism.calibrated(epsilon, delta, recipe.clip, conditions)?
                    }
                    Privacy::NoiseMultiplier { noise_multiplier, delta } => {
                        mechanism.with_noise(noise_multiplier, delta, recipe.clip, conditions)?
                    }
                })
            }
        };
        Self::packed(recipe, mechanism)
    }

    /// The plan of a recipe with a calibrated mechanism that somebody else made, such as the planner. Mechanism,
    /// participation, sampling, clip and privacy of the recipe become those of the mechanism; the step sizes are the
    /// recipe's.
    ///
    /// Errors: a mechanism that is not calibrated, has no family, or is for another unit of privacy or another number of
    /// rounds.
    pub fn adopt(recipe: Recipe, mechanism: Mechanism) -> Result<Self> {
        let Some(statement) = mechanism.privacy() else {
            return Err(Error::plan("the mechanism is not calibrated: give it ε first".into()));
        };
        let Some(selector) = mechanism.family() else {
            return Err(Error::plan("the mechanism does not say of which family it is".into()));
        };
        if statement.unit() != recipe.unit {
            return Err(Error::plan(format!(
                "the mechanism is for every {}, but this data is protected for every {}: plan with that unit",
                statement.unit().name(),
                recipe.unit.name(),
            )));
        }
        let calibration = statement.calibration();
        let recipe = Recipe {
            mechanism: Choice::Private(selector),
            participation: mechanism.participation(),
            sampling: mechanism.sampling(),
            clip: calibration.terms().clip,
            privacy: Privacy::Epsilon { epsilon: calibration.epsilon(), delta: calibration.delta() },
            ..recipe
        };
        let workload = recipe.workload()?;
        Self::packed(recipe, Some(mechanism.serving(workload)?))
    }

    fn packed(recipe: Recipe, mechanism: Option<Mechanism>) -> Result<Self> {
        let value = serde_json::to_value(&recipe).map_err(|error| Error::plan(error.to_string()))?;
        let bytes = format::pack(mechanism.as_ref(), Some(&value))?;
        Self::new(recipe, mechanism, bytes)
    }

    fn new(recipe: Recipe, mechanism: Option<Mechanism>, bytes: Vec<u8>) -> Result<Self> {
        let workload = match &mechanism {
            Some(mechanism) => mechanism.workload().clone(),
            None => recipe.workload()?,
        };
        let plan = Self { recipe, mechanism, workload, bytes };
        plan.check()?;
        Ok(plan)
    }

    /// Refuses a mechanism that is not the recipe's.
    fn check(&self) -> Result<()> {
        let Self { recipe, mechanism, .. } = self;
        let differ = |what: &str| {
            Err(Error::plan(format!(
                "its recipe and its mechanism differ in {what}: one of them was exchanged"
            )))
        };
        let mechanism = match (recipe.mechanism, mechanism) {
            (Choice::None, None) if recipe.sampling == Sampling::None => return Ok(()),
            (Choice::None, None) => return differ("the sampling, which has no meaning without noise"),
            (Choice::Private(selector), Some(mechanism)) if mechanism.family() == Some(selector) => mechanism,
            _ => return differ("the mechanism's name"),
        };
        if !same(&recipe.workload()?, mechanism.workload()) {
            return differ("the optimizer or its step sizes");
        }
        if mechanism.participation() != recipe.participation || mechanism.sampling() != recipe.sampling {
            return differ("the participation");
        }
        let Some(statement) = mechanism.privacy() else { return differ("the calibration") };
        let calibration = statement.calibration();
        if calibration.terms().clip != recipe.clip || statement.unit() != recipe.unit {
            return differ("the clip or the unit of privacy");
        }
        let agrees = match recipe.privacy {
            Privacy::Epsilon { epsilon, delta } => {
                (calibration.epsilon(), calibration.delta()) == (epsilon, delta)
            }
            Privacy::NoiseMultiplier { noise_multiplier, delta } => {
                (calibration.noise_multiplier(), calibration.delta()) == (noise_multiplier, delta)
            }
        };
        if agrees { Ok(()) } else { differ("the privacy") }
    }

    /// Writes the plan at once or not at all.
    ///
    /// Errors: [`dpmf::Error::Io`].
    pub fn save(&self, place: impl Into<Place>) -> Result<()> {
        Ok(disk::replace(place, Access::Everyone, |file| file.write_all(&self.bytes))?)
    }

    /// Reads a plan.
    ///
    /// Errors: a file that is none, or whose parts do not agree.
    pub fn load(place: impl Into<Place>) -> Result<Self> {
        let place = place.into();
        let bad = |message: String| Error::Run { path: place.path().into(), message };
        let bytes = place.read()?;
        let format::File { mechanism, recipe, .. } =
            format::unpack(&bytes).map_err(|error| bad(error.to_string().replacen("<memory>: ", "", 1)))?;
        let recipe =
            recipe.ok_or_else(|| bad("it is a mechanism without a recipe, so no plan of a run".into()))?;
        let recipe = serde_json::from_value(recipe).map_err(|error| bad(format!("bad recipe: {error}")))?;
        Self::new(recipe, mechanism, bytes).map_err(|error| match error {
            Error::Run { message, .. } => bad(message),
            other => other,
        })
    }

    /// SHA-256 of the file.
    pub fn hash(&self) -> [u8; 32] {
        Sha256::digest(&self.bytes).into()
    }

    /// What was asked for.
    pub fn recipe(&self) -> &Recipe {
        &self.recipe
    }

    /// The mechanism, calibrated; nothing without noise.
    pub fn mechanism(&self) -> Option<&Mechanism> {
        self.mechanism.as_ref()
    }

    /// What the server computes from the sums of a mean: the mechanism's own workload where there is one.
    pub fn workload(&self) -> &Workload {
        &self.workload
    }

    /// Who takes part in which round: by the public seed of the recipe or, where the guarantee counts on chance, by the
    /// secret of the run.
    ///
    /// Errors: too few users; no secret where one is needed.
    pub fn cohorts(&self, users: usize, secret: Option<&Secret>) -> Result<Assignment> {
        let Recipe { participation, rounds, clients, seed, sampling, .. } = self.recipe;
        match (sampling, secret) {
            (Sampling::None, _) => Assignment::new(participation, users, rounds, clients, seed),
            (sampling, Some(Secret { key, run })) => {
                let sampler = Sampler::new(key, *run, sampling, users, rounds)?;
                Assignment::sampled(sampler, sampling, rounds)
            }
            (sampling, None) => {
                Err(Error::plan(format!("{sampling} draws in secret, but there is no key to draw from")))
            }
        }
    }

    /// The private run of a model with so many parameters, in memory at its first step; nothing without a mechanism.
    ///
    /// Errors: those of [`PrivateRun::new`].
    pub fn private_run(&self, secret: &Secret, parameters: usize) -> Result<Option<PrivateRun>> {
        let Secret { key, run } = secret;
        let dimension = parameters as u64;
        let begin = |mechanism: &Mechanism| {
            PrivateRun::new(mechanism, key, *run, 0..dimension, dimension, self.recipe.arithmetic)
        };
        Ok(self.mechanism.as_ref().map(begin).transpose()?)
    }
}

/// What a run draws from: its noise, and its cohorts where chance hides them.
pub struct Secret {
    /// The key.
    pub key: NoiseKey,
    /// The run under it.
    pub run: RunId,
}

/// Whether two optimizers are the same but for rounding of their step sizes.
fn same(a: &Workload, b: &Workload) -> bool {
    let (Some((a, a_rates)), Some((b, b_rates))) = (a.optimizer(), b.optimizer()) else { return false };
    let close = |(a, b): (&f64, &f64)| (a - b).abs() <= RATE_SLACK * a.abs();
    a == b && a_rates.len() == b_rates.len() && a_rates.iter().zip(b_rates).all(close)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::tests::recipe;
    use dpmf::factorize::quiet;
    use dpmf::{Form, Representation, family};

    fn plan(recipe: Recipe) -> Plan {
        Plan::make(recipe, &mut quiet).unwrap()
    }

    #[test]
    fn every_mechanism_gives_the_epsilon_asked_for_and_none_is_below_the_bound() {
        let problem = recipe("none").problem().unwrap();
        for selector in family::all() {
            let plan = Plan::for_problem(recipe(selector.name()), &problem, &mut quiet).unwrap();
            let mechanism = plan.mechanism().unwrap();
            let epsilon = mechanism.privacy().unwrap().calibration().epsilon();
            assert_eq!(epsilon, 2.0, "{selector}");
            assert!(mechanism.certificate().unwrap().ratio_to_bound() >= 1.0, "{selector}");
        }
        assert!(plan(recipe("none")).mechanism().is_none());
    }

    #[test]
    fn streams_and_dense_rows_of_an_optimum_have_the_same_loss() {
        for name in ["optimal", "optimal-prefix"] {
            let (stream, dense) = (plan(recipe(name)), plan(recipe(&format!("{name}:dense"))));
            let (stream, dense) = (stream.mechanism().unwrap(), dense.mechanism().unwrap());
            assert!(matches!(stream.form(), Form::StateSpace(_)));
            assert!(matches!(dense.form(), Form::Dense(_)) && dense.form().cost().buffers.is_none());
            let ratio = stream.loss().sqrt_total() / dense.loss().sqrt_total();
            assert!((ratio - 1.0).abs() < 2e-3, "{name}: {ratio}");
        }
    }

    #[test]
    fn epsilon_is_spent_step_by_step() {
        let optimal = plan(recipe("optimal"));
        let spent = optimal.mechanism().unwrap().spent();
        assert_eq!(spent.len(), 64);
        assert!(spent.windows(2).all(|pair| pair[0] <= pair[1]));
        assert!(spent[0] > 0.0 && spent[0] < 0.9 * spent[63], "{spent:?}");
        assert_eq!(spent[63], 2.0);
        // Independent noise: a user's round is over at once, so everything is spent at its round.
        assert!(plan(recipe("independent")).mechanism().unwrap().spent().iter().all(|e| *e > 1.99));
    }

    #[test]
    fn plans_survive_the_disk_and_are_read_as_mechanisms_too() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("plan.safetensors");
        for name in ["none", "optimal", "tree"] {
            let plan = plan(recipe(name));
            plan.save(&path).unwrap();
            let back = Plan::load(&path).unwrap();
            assert_eq!((back.recipe(), back.hash()), (plan.recipe(), plan.hash()));
            match plan.mechanism() {
                Some(mechanism) => {
                    assert_eq!(format::load(&path).unwrap().identity(), mechanism.identity());
                    assert_eq!(back.mechanism().unwrap().identity(), mechanism.identity());
                }
                None => assert!(format::load(&path).unwrap_err().to_string().contains("without noise")),
            }
        }
    }

    /// A recipe beside the mechanism of another one is refused, though the file is whole and its hash fits.
    #[test]
    fn an_exchanged_recipe_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("plan.safetensors");
        let base = recipe("optimal");
        let honest = plan(base.clone());
        let write = |recipe: &Recipe, mechanism: Option<&Mechanism>| {
            let value = serde_json::to_value(recipe).unwrap();
            std::fs::write(&path, format::pack(mechanism, Some(&value)).unwrap()).unwrap();
            Plan::load(&path).map(drop).map_err(|error| error.to_string())
        };
        write(&base, honest.mechanism()).unwrap();
        for (recipe, part) in [
            (Recipe { clip: 1000.0, ..base.clone() }, "clip"),
            (Recipe { server_learning_rate: 0.6, ..base.clone() }, "step sizes"),
            (
                Recipe { optimizer: Optimizer { momentum: 0.8, ..Default::default() }, ..base.clone() },
                "optimizer",
            ),
            (Recipe { privacy: Privacy::Epsilon { epsilon: 1.0, delta: 1e-6 }, ..base.clone() }, "privacy"),
            (Recipe { privacy: Privacy::Epsilon { epsilon: 2.0, delta: 1e-7 }, ..base.clone() }, "privacy"),
            (Recipe { unit: dpmf::accounting::PrivacyUnit::Record, ..base.clone() }, "unit"),
            (Recipe { mechanism: "tree".parse().unwrap(), ..base.clone() }, "name"),
            (Recipe { mechanism: Choice::None, ..base.clone() }, "name"),
        ] {
            let message = write(&recipe, honest.mechanism()).unwrap_err();
            assert!(message.contains("differ in") && message.contains(part), "{part}: {message}");
        }
        assert!(write(&base, None).unwrap_err().contains("name"));
        format::save(honest.mechanism().unwrap(), &path).unwrap();
        assert!(Plan::load(&path).unwrap_err().to_string().contains("without a recipe"));
    }

    /// What a guarantee counts on is drawn from the key, and nothing else will do.
    #[test]
    fn sampled_cohorts_come_from_the_secret_and_others_from_the_seed() {
        for (mechanism, text) in
            [("independent", "cyclic-poisson:1:0.2"), ("blt:buffers=1", "balls-in-bins:16")]
        {
            let sampling: Sampling = text.parse().unwrap();
            let participation = sampling.participation(64).unwrap().unwrap();
            let plan = plan(Recipe { participation, sampling, ..recipe(mechanism) });
            let secret =
                |key, run: &str| Secret { key: NoiseKey::from_seed(key), run: RunId::from_label(run) };
            let drawn = |secret: &Secret| -> Vec<Vec<u32>> {
                let cohorts = plan.cohorts(300, Some(secret)).unwrap();
                (0..64).map(|round| cohorts.cohort(round).to_vec()).collect()
            };
            let first = drawn(&secret(1, "a"));
            let sampler =
                Sampler::new(&NoiseKey::from_seed(1), RunId::from_label("a"), sampling, 300, 64).unwrap();
            assert!((0..64).all(|round| first[round] == sampler.members(round).unwrap()), "{text}");
            assert!(first != drawn(&secret(2, "a")) && first != drawn(&secret(1, "b")), "{text}");
            assert!(plan.cohorts(300, None).unwrap_err().to_string().contains("in secret"));
            assert_eq!(
                plan.cohorts(300, Some(&secret(1, "a"))).unwrap().denominator(),
                sampler.expected_batch()
            );
        }
        let public = plan(recipe("optimal"));
        let (one, other) = (public.cohorts(700, None).unwrap(), public.cohorts(700, None).unwrap());
        assert!((0..64).all(|round| one.cohort(round) == other.cohort(round)));
    }

    use dpmf::Optimizer;
}
