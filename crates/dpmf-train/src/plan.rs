//! The plan of a run: recipe and mechanism, made once, saved, and read back to train, resume or report.

use crate::cohort::Assignment;
use crate::error::{Error, Result};
use crate::recipe::{MechanismChoice, Recipe, Settings};
use dpmf::accounting::PrivacyUnit;
use dpmf::disk::{self, Access, DiskPath};
use dpmf::noise::{NoiseKey, RunId};
use dpmf::{Mechanism, Optimizer, Participation, PrivateRun, Sampler, Sampling, Workload, format};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::io::Write;

/// Everything that decides a run but data, model and key.
///
/// No fact stands twice: clip, participation, sampling, step sizes and privacy are the mechanism's, and the recipe
/// holds what the
/// mechanism does not.
///
/// The file is that of the mechanism, with the recipe in it, so that everything which reads mechanisms reads plans.
#[derive(Clone, Debug)]
pub struct Plan {
    recipe: Recipe,
    basis: Basis,
    bytes: Vec<u8>,
}

/// What the server's steps are made from.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant, reason = "a plan has one")]
enum Basis {
    /// Calibrated, and of a family.
    Private(Mechanism),
    Plain(Plain, Workload),
}

/// What a run without noise has in place of a mechanism.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Plain {
    participation: Participation,
    clip: f64,
    unit: PrivacyUnit,
    optimizer: Optimizer,
    learning_rates: Vec<f64>,
}

/// What the file holds beside the mechanism.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    version: u32,
    recipe: Recipe,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    plain: Option<Plain>,
}

const VERSION: u32 = 2;

impl Plan {
    /// A plan without noise.
    ///
    /// Errors: those of [`Settings::workload`].
    pub(crate) fn without_noise(settings: &Settings) -> Result<Self> {
        let Settings { participation, clip, unit, optimizer, .. } = *settings;
        let plain = Plain { participation, clip, unit, optimizer, learning_rates: settings.rates()? };
        let workload = settings.workload()?;
        Self::packed(settings.recipe.clone(), Basis::Plain(plain, workload))
    }

    /// The plan of a calibrated mechanism that somebody else made, such as the planner, for the step sizes of the
    /// settings. What
    /// else the mechanism holds is not the settings' to say.
    ///
    /// Errors: a mechanism that is not calibrated, has no family, or is for another unit of privacy or another number of
    /// rounds.
    pub fn adopt(settings: &Settings, mechanism: Mechanism) -> Result<Self> {
        let workload = settings.workload()?;
        let plan = Self::private(settings.recipe.clone(), mechanism.with_workload(workload)?)?;
        if plan.unit() != settings.unit {
            return Err(Error::plan(format!(
                "the mechanism is for every {}, but this data is protected for every {}: plan with that unit",
                plan.unit().name(),
                settings.unit.name(),
            )));
        }
        Ok(plan)
    }

    /// The same plan at the learning rate of the settings, which says nothing about privacy: noise, clip and all else stay.
    ///
    /// Errors: settings that make no workload, or one of other rounds.
    pub fn at_rate(&self, settings: &Settings) -> Result<Self> {
        match &self.basis {
            Basis::Private(mechanism) => {
                let mechanism = mechanism.clone().with_workload(settings.workload()?)?;
                Self::private(self.recipe.clone(), mechanism)
            }
            Basis::Plain(..) => {
                Self::without_noise(&Settings { recipe: self.recipe.clone(), ..settings.clone() })
            }
        }
    }

    /// The plan of a calibrated mechanism.
    ///
    /// Errors: a mechanism that is not calibrated, or has no family.
    pub(crate) fn private(recipe: Recipe, mechanism: Mechanism) -> Result<Self> {
        Self::packed(recipe, Basis::of(mechanism)?)
    }

    fn packed(recipe: Recipe, basis: Basis) -> Result<Self> {
        let (mechanism, plain) = match &basis {
            Basis::Private(mechanism) => (Some(mechanism), None),
            Basis::Plain(plain, _) => (None, Some(plain.clone())),
        };
        let written = Written { version: VERSION, recipe: recipe.clone(), plain };
        let value = serde_json::to_value(written).map_err(|error| Error::plan(error.to_string()))?;
        let bytes = format::pack(mechanism, Some(&value))?;
        Ok(Self { recipe, basis, bytes })
    }

    /// Writes the plan at once or not at all.
    ///
    /// Errors: [`dpmf::Error::Io`].
    pub fn save(&self, place: impl Into<DiskPath>) -> Result<()> {
        Ok(disk::replace(place, Access::Everyone, |file| file.write_all(&self.bytes))?)
    }

    /// Reads a plan.
    ///
    /// Errors: a file that is none, or of a version before 0.3.
    pub fn load(place: impl Into<DiskPath>) -> Result<Self> {
        let place = place.into();
        let bytes = place.read()?;
        Self::parse(bytes).map_err(|error| match error {
            Error::Run { message, .. } => Error::Run { path: place.path().into(), message },
            Error::Dpmf(error) => {
                let message = error.to_string().replacen("<memory>: ", "", 1);
                Error::Run { path: place.path().into(), message }
            }
            other => other,
        })
    }

    fn parse(bytes: Vec<u8>) -> Result<Self> {
        let format::File { mechanism, recipe, .. } = format::unpack(&bytes)?;
        let Some(value) = recipe else {
            return Err(Error::plan(
                "it is a mechanism without training settings, so it is not the plan of a run".into(),
            ));
        };
        if value.get("version").and_then(|version| version.as_u64()) != Some(VERSION.into()) {
            return Err(Error::plan(
                "it is a plan from another version of dpmf: finish that run with the version that began it, or \
                 begin a new run"
                    .into(),
            ));
        }
        let Written { recipe, plain, .. } =
            serde_json::from_value(value).map_err(|error| Error::plan(format!("bad recipe: {error}")))?;
        let basis = match (mechanism, plain) {
            (Some(mechanism), None) => Basis::of(mechanism)?,
            (None, Some(plain)) => {
                let workload = Workload::sgd(plain.learning_rates.clone(), plain.optimizer)?;
                Basis::Plain(plain, workload)
            }
            _ => {
                return Err(Error::plan(
                    "it must hold either a mechanism or the settings of a run without noise".into(),
                ));
            }
        };
        if matches!(basis, Basis::Plain(..)) != (recipe.mechanism == MechanismChoice::None) {
            return Err(Error::plan("its mechanism was added or removed".into()));
        }
        Ok(Self { recipe, basis, bytes })
    }

    /// SHA-256 of the file.
    pub fn hash(&self) -> [u8; 32] {
        Sha256::digest(&self.bytes).into()
    }

    /// What the mechanism does not hold.
    pub fn recipe(&self) -> &Recipe {
        &self.recipe
    }

    /// The mechanism, calibrated; nothing without noise.
    pub fn mechanism(&self) -> Option<&Mechanism> {
        match &self.basis {
            Basis::Private(mechanism) => Some(mechanism),
            Basis::Plain(..) => None,
        }
    }

    /// What a person calls it: how its mechanism was asked for.
    pub fn label(&self) -> String {
        self.recipe.mechanism.to_string()
    }

    /// Name of its mechanism with its choices; `none` without one.
    pub fn mechanism_name(&self) -> String {
        let family = self.mechanism().and_then(Mechanism::family);
        family.map_or(MechanismChoice::None, MechanismChoice::Named).to_string()
    }

    /// What the server computes from the sums of a mean.
    pub fn workload(&self) -> &Workload {
        match &self.basis {
            Basis::Private(mechanism) => mechanism.workload(),
            Basis::Plain(_, workload) => workload,
        }
    }

    /// Rounds of training.
    pub fn rounds(&self) -> usize {
        self.workload().steps()
    }

    /// How often a user takes part.
    pub fn participation(&self) -> Participation {
        match &self.basis {
            Basis::Private(mechanism) => mechanism.participation(),
            Basis::Plain(plain, _) => plain.participation,
        }
    }

    /// By what chance users come into rounds.
    pub fn sampling(&self) -> Sampling {
        self.mechanism().map_or(Sampling::None, Mechanism::sampling)
    }

    /// Norm that a user's contribution is clipped to.
    pub fn clip(&self) -> f64 {
        match &self.basis {
            Basis::Private(mechanism) => {
                mechanism.privacy().map_or(f64::NAN, |statement| statement.calibration().terms().clip)
            }
            Basis::Plain(plain, _) => plain.clip,
        }
    }

    /// Whose data is protected as one piece.
    pub fn unit(&self) -> PrivacyUnit {
        match &self.basis {
            Basis::Private(mechanism) => {
                mechanism.privacy().map_or_else(PrivacyUnit::default, |statement| statement.unit())
            }
            Basis::Plain(plain, _) => plain.unit,
        }
    }

    /// Who takes part in which round: by the public seed of the recipe or, where the guarantee relies on sampling, by the
    /// secret of the run.
    ///
    /// Errors: too few users.
    pub fn cohorts(&self, users: usize, secret: &Secret) -> Result<Assignment> {
        let rounds = self.rounds();
        match self.sampling() {
            Sampling::None => {
                let Recipe { clients, seed, .. } = self.recipe;
                Assignment::new(self.participation(), users, rounds, clients, seed)
            }
            sampling => {
                let sampler = Sampler::new(&secret.key, secret.run, sampling, users, rounds)?;
                Assignment::sampled(sampler, sampling, rounds)
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
        Ok(self.mechanism().map(begin).transpose()?)
    }
}

impl Basis {
    fn of(mechanism: Mechanism) -> Result<Self> {
        if mechanism.privacy().is_none() {
            return Err(Error::plan("the mechanism is not calibrated: calibrate it first".into()));
        }
        if mechanism.family().is_none() {
            return Err(Error::plan("the mechanism does not name its family".into()));
        }
        Ok(Basis::Private(mechanism))
    }
}

/// What a run draws from: its noise, its cohorts where chance hides them, and the marks of what it is bound to.
pub struct Secret {
    /// The key.
    pub key: NoiseKey,
    /// The run under it.
    pub run: RunId,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RunPlanner;
    use crate::recipe::tests::settings;
    use dpmf::planner::silent;
    use dpmf::{Form, Representation, family};

    fn plan(settings: &Settings) -> Plan {
        RunPlanner::default().plan(settings, &mut silent).unwrap()
    }

    #[test]
    fn every_mechanism_gives_the_epsilon_asked_for_and_none_is_below_the_bound() {
        let mut planner = RunPlanner::default();
        for selector in family::all() {
            let plan = planner.plan(&settings(selector.name()), &mut silent).unwrap();
            let mechanism = plan.mechanism().unwrap();
            let epsilon = mechanism.privacy().unwrap().calibration().epsilon();
            assert_eq!(epsilon, 2.0, "{selector}");
            assert!(mechanism.certificate().unwrap().ratio_to_bound() >= 1.0, "{selector}");
        }
        assert!(plan(&settings("none")).mechanism().is_none());
    }

    #[test]
    fn streams_and_dense_rows_of_an_optimum_have_the_same_loss() {
        for name in ["optimal", "optimal-prefix"] {
            let (stream, dense) = (plan(&settings(name)), plan(&settings(&format!("{name}:dense"))));
            let (stream, dense) = (stream.mechanism().unwrap(), dense.mechanism().unwrap());
            assert!(matches!(stream.form(), Form::StateSpace(_)));
            assert!(matches!(dense.form(), Form::Dense(_)) && dense.form().cost().buffers.is_none());
            let ratio = stream.loss().sqrt_total() / dense.loss().sqrt_total();
            assert!((ratio - 1.0).abs() < 2e-3, "{name}: {ratio}");
        }
    }

    #[test]
    fn epsilon_is_spent_step_by_step() {
        let optimal = plan(&settings("optimal"));
        let spent = optimal.mechanism().unwrap().spent();
        assert_eq!(spent.len(), 64);
        assert!(spent.windows(2).all(|pair| pair[0] <= pair[1]));
        assert!(spent[0] > 0.0 && spent[0] < 0.9 * spent[63], "{spent:?}");
        assert_eq!(spent[63], 2.0);
        // Independent noise: a user's round is over at once, so everything is spent at its round.
        assert!(plan(&settings("independent")).mechanism().unwrap().spent().iter().all(|e| *e > 1.99));
    }

    #[test]
    fn plans_survive_the_disk_and_are_read_as_mechanisms_too() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("plan.safetensors");
        for name in ["none", "optimal", "tree"] {
            let settings = settings(name);
            let plan = plan(&settings);
            plan.save(&path).unwrap();
            let back = Plan::load(&path).unwrap();
            assert_eq!((back.recipe(), back.hash()), (plan.recipe(), plan.hash()));
            // What was asked for is what the plan says, wherever it holds it.
            assert_eq!((back.rounds(), back.clip(), back.unit()), (64, 0.5, PrivacyUnit::User), "{name}");
            assert_eq!(back.workload().optimizer(), settings.workload().unwrap().optimizer());
            assert_eq!((back.participation(), back.sampling()), (settings.participation, settings.sampling));
            assert_eq!((back.label(), back.mechanism_name()), (name.to_owned(), name.to_owned()));
            match plan.mechanism() {
                Some(mechanism) => {
                    assert_eq!(format::load(&path).unwrap().identity(), mechanism.identity());
                    assert_eq!(back.mechanism().unwrap().identity(), mechanism.identity());
                }
                None => assert!(format::load(&path).unwrap_err().to_string().contains("without noise")),
            }
        }
    }

    /// A file that is whole and whose hash fits, and yet no plan.
    #[test]
    fn what_is_no_plan_of_this_version_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("plan.safetensors");
        let (private, plain) = (plan(&settings("optimal")), plan(&settings("none")));
        let write = |recipe: &serde_json::Value, mechanism: Option<&Mechanism>| {
            std::fs::write(&path, format::pack(mechanism, Some(recipe)).unwrap()).unwrap();
            Plan::load(&path).map(drop).map_err(|error| error.to_string())
        };
        let recipe_of = |plan: &Plan| format::unpack(&plan.bytes).unwrap().recipe.unwrap();
        let (with, without) = (recipe_of(&private), recipe_of(&plain));
        write(&with, private.mechanism()).unwrap();
        write(&without, None).unwrap();
        assert!(write(&with, None).unwrap_err().contains("either a mechanism or"));
        assert!(write(&without, private.mechanism()).unwrap_err().contains("either a mechanism or"));
        let mut named = without.clone();
        named["recipe"]["mechanism"] = "tree".into();
        assert!(write(&named, None).unwrap_err().contains("added or removed"));
        // As 0.2 wrote it: the recipe beside the mechanism, with a copy of what that holds.
        let old = serde_json::json!({"mechanism": "optimal", "clip": 0.5, "rounds": 64});
        assert!(write(&old, private.mechanism()).unwrap_err().contains("finish that run with the version"));
        let bare = settings("optimal");
        let problem = dpmf::Problem::new(bare.workload().unwrap(), bare.participation).unwrap();
        let bare = problem.mechanism("tree".parse().unwrap(), &mut dpmf::factorize::quiet).unwrap();
        assert!(write(&with, Some(&bare)).unwrap_err().contains("not calibrated"));
        format::save(private.mechanism().unwrap(), &path).unwrap();
        assert!(Plan::load(&path).unwrap_err().to_string().contains("without training settings"));
        let other = Settings { unit: PrivacyUnit::Record, ..settings("optimal") };
        let message = Plan::adopt(&other, private.mechanism().unwrap().clone()).unwrap_err().to_string();
        assert!(message.contains("for every user") && message.contains("for every record"), "{message}");
    }

    /// What a guarantee counts on is drawn from the key, and nothing else will do.
    #[test]
    fn sampled_cohorts_come_from_the_secret_and_others_from_the_seed() {
        let secret = |key, run: &str| Secret { key: NoiseKey::from_seed(key), run: RunId::from_label(run) };
        for (mechanism, text) in
            [("independent", "cyclic-poisson:1:0.2"), ("blt:buffers=1", "balls-in-bins:16")]
        {
            let sampling: Sampling = text.parse().unwrap();
            let participation = sampling.participation(64).unwrap().unwrap();
            let plan = plan(&Settings { participation, sampling, ..settings(mechanism) });
            let drawn = |secret: &Secret| -> Vec<Vec<u32>> {
                let cohorts = plan.cohorts(300, secret).unwrap();
                (0..64).map(|round| cohorts.cohort(round).to_vec()).collect()
            };
            let first = drawn(&secret(1, "a"));
            let sampler =
                Sampler::new(&NoiseKey::from_seed(1), RunId::from_label("a"), sampling, 300, 64).unwrap();
            assert!((0..64).all(|round| first[round] == sampler.members(round).unwrap()), "{text}");
            assert!(first != drawn(&secret(2, "a")) && first != drawn(&secret(1, "b")), "{text}");
            assert_eq!(plan.cohorts(300, &secret(1, "a")).unwrap().denominator(), sampler.expected_batch());
        }
        let public = plan(&settings("optimal"));
        let [one, other] = [1, 2].map(|key| public.cohorts(700, &secret(key, "a")).unwrap());
        assert!((0..64).all(|round| one.cohort(round) == other.cohort(round)));
    }
}
