//! A run from the first round to its result, in memory or in a directory that survives crashes.

mod folder;

use crate::checkpoint::Checkpoints;
use crate::clients::evaluate;
use crate::data::Split;
use crate::error::{Error, Result};
use crate::plan::{Plan, Secret};
use crate::saved::{Card, SavedModel};
use crate::summary::FinishedRun;
use crate::training::Training;
use crate::{Domain, Model, Score, Users};
use dpmf::PrivateRun;
use dpmf::accounting::KeyOrigin;
use dpmf::disk::DiskPath;
use dpmf::noise::{NoiseKey, RunId};
use folder::{CURVE, Folder, JOURNAL, KEY, MANIFEST, MODEL, Manifest, OUTCOME, PLAN, read_json, write_json};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::path::PathBuf;
use std::time::Instant;

/// A digest of everything that users hold, to tell data sets apart.
///
/// It tells neighbours apart too, so it is not to be seen or written: only its marks under a key are.
pub struct DataDigest([u8; 32]);

impl DataDigest {
    /// A mark of the data under a key, for one purpose.
    pub fn mark(&self, key: &NoiseKey, purpose: &str) -> String {
        hex_of(&key.mark("training data", &[purpose.as_bytes(), &self.0]))
    }
}

/// The digest of a data set.
pub fn digest<D: Users>(data: &D) -> DataDigest {
    let mut hash = Sha256::new();
    let mut bytes = Vec::new();
    let mut examples = Vec::new();
    for user in 0..data.users() {
        examples.clear();
        data.examples(user, &mut examples);
        bytes.clear();
        bytes.extend((examples.len() as u64).to_le_bytes());
        for example in &examples {
            D::Domain::bytes(*example, &mut |part| bytes.extend_from_slice(part));
        }
        hash.update(&bytes);
    }
    DataDigest(hash.finalize().into())
}

/// Where the key of a run comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KeySource {
    /// A new one from the operating system.
    System,
    /// A key file.
    File(PathBuf),
    /// A number, for experiments that must be repeatable.
    Seed(u64),
}

impl KeySource {
    /// The key; its file is on the disk of `place`.
    fn key(&self, place: &DiskPath) -> dpmf::Result<NoiseKey> {
        match self {
            KeySource::System => NoiseKey::generate(),
            KeySource::File(path) => NoiseKey::read_file(place.at(path)),
            KeySource::Seed(seed) => Ok(NoiseKey::from_seed(*seed)),
        }
    }

    /// The key with a name of the run under it: new, unless the key is a repeatable one. Then the name is a function of the
    /// program's version and of what the run is bound to, so that other gradients never meet the same noise.
    pub(crate) fn secret<M: Model>(
        &self,
        place: &DiskPath,
        plan: &Plan,
        data: &DataDigest,
        model: &M,
    ) -> Result<Secret> {
        let mut secret = Secret { key: self.key(place)?, run: RunId([0; 16]) };
        secret.run = match self {
            KeySource::Seed(_) => {
                let bound = hex_of(&Binding::new(plan, data, model, &secret).hash());
                RunId::from_label(&format!("{} {bound}", env!("CARGO_PKG_VERSION")))
            }
            _ => RunId::generate()?,
        };
        Ok(secret)
    }
}

/// Everything that decides what a run releases: what its journal opens for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Binding {
    /// SHA-256 of the plan.
    plan: String,
    /// Public name of the key.
    key: String,
    /// Mark of the training data under the key, for this run alone.
    data: String,
    /// SHA-256 over the kind of the model and its first parameters.
    model: String,
}

impl Binding {
    fn new<M: Model>(plan: &Plan, data: &DataDigest, model: &M, secret: &Secret) -> Self {
        let mut hash = Sha256::new();
        hash.update(model.kind());
        model.initial(plan.recipe().seed).iter().for_each(|value| hash.update(value.to_le_bytes()));
        Self {
            plan: hex_of(&plan.hash()),
            key: secret.key.fingerprint().to_string(),
            data: data.mark(&secret.key, &secret.run.to_string()),
            model: hex_of(&hash.finalize()),
        }
    }

    fn hash(&self) -> [u8; 32] {
        let mut hash = Sha256::new();
        for part in ["dpmf run 2", &self.plan, &self.key, &self.data, &self.model] {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        hash.finalize().into()
    }

    /// Says in what a run that is resumed differs from the one that began.
    fn check(&self, now: &Self) -> std::result::Result<(), String> {
        let what = match now {
            now if now.plan != self.plan => "plan",
            now if now.key != self.key => "key",
            now if now.data != self.data => "training data",
            now if now.model != self.model => "model",
            _ => return Ok(()),
        };
        Err(format!(
            "the {what} differs from what the run began with, and the same noise must not be released for both: begin a new run"
        ))
    }
}

fn hex_of(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A point of a learning curve, on users that never train.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// Rounds done.
    pub round: usize,
    /// Mean loss of a prediction: cross-entropy in nats, or half the squared error of a number in its own scale.
    pub loss: f64,
    /// Share of predictions that are right; nothing for numbers.
    pub accuracy: Option<f64>,
}

impl Point {
    pub(crate) fn new<M: Model>(round: usize, model: &M, score: Score) -> Self {
        let count = (score.predictions as f64).max(1.0);
        let accuracy = model.classifies().then_some(score.correct as f64 / count);
        Self { round, loss: score.loss / count, accuracy }
    }

    /// What a run is chosen by, larger for better: the accuracy, or without one the loss below zero.
    pub fn merit(&self) -> f64 {
        self.accuracy.unwrap_or(-self.loss)
    }
}

/// What a run is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Purpose {
    /// To choose settings: the test users stay out of it.
    Tuning,
    /// To report how good the settings are.
    Report,
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// Score on the test users, who were seen by nothing before; not taken while tuning.
    pub test: Option<Point>,
    /// Score on all validation users.
    pub validation: Point,
    /// The learning curve on validation users.
    pub curve: Vec<Point>,
    /// The loss is not finite, or above that of the untrained model.
    pub diverged: bool,
    /// Rounds that were given up after a crash.
    pub burned: usize,
    /// Time spent training, of all processes that took part.
    pub seconds: f64,
    /// Where the key came from; nothing without noise.
    pub key: Option<KeyOrigin>,
}

/// How often a run looks at itself.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Pace {
    /// Points of the learning curve.
    pub points: usize,
    /// Validation users for a point of the curve.
    pub users: usize,
    /// Rounds between checkpoints.
    pub checkpoint: usize,
}

impl Default for Pace {
    fn default() -> Self {
        Self { points: 32, users: 1000, checkpoint: 64 }
    }
}

/// A run under way.
pub struct Run<'a, M, D> {
    model: &'a M,
    data: &'a Split<D>,
    plan: Plan,
    pace: Pace,
    training: Training<'a, M, D>,
    spent: Vec<f64>,
    folder: Option<Folder>,
    curve: Vec<Point>,
    untrained: f64,
    earlier_seconds: f64,
    started: Instant,
}

/// The learning curve so far, and what it cost.
#[derive(Serialize, Deserialize, Default)]
struct Record {
    curve: Vec<Point>,
    untrained: f64,
    seconds: f64,
}

impl<'a, M, D> Run<'a, M, D>
where
    M: Model,
    D: Users<Domain = M::Domain>,
{
    /// A run that lives in memory alone.
    ///
    /// Errors: those of the key and the data.
    pub fn in_memory(
        model: &'a M,
        data: &'a Split<D>,
        digest: &DataDigest,
        plan: &Plan,
        pace: Pace,
        key: &KeySource,
    ) -> Result<Self> {
        let secret = key.secret(&DiskPath::from("."), plan, digest, model)?;
        let private = plan.private_run(&secret, model.parameters())?;
        Self::assemble(model, data, plan.clone(), pace, &secret, private, None)
    }

    /// Begins a run in a new directory: plan, key, journal, first checkpoint.
    ///
    /// Guarantee: once this has returned, the run can be resumed after any crash or power loss, as long as the disk keeps
    /// what it has synced. Nothing is released before.
    ///
    /// Errors: a directory that holds a run, or in which another process works; those of the key and the data;
    /// [`Error::Io`], after which the run can be begun again, or resumed if it [`exists`].
    pub fn begin(
        folder: impl Into<DiskPath>,
        model: &'a M,
        data: &'a Split<D>,
        plan: &Plan,
        pace: Pace,
        key: &KeySource,
    ) -> Result<Self> {
        let folder = Folder::create(&folder.into())?;
        folder.discard_unfinished()?;
        let digest = digest(&data.train);
        let secret = key.secret(folder.place(), plan, &digest, model)?;
        let binding = Binding::new(plan, &digest, model, &secret);
        plan.save(folder.file(PLAN))?;
        // A run without noise has a key too: what it is bound to is marked under it.
        if !matches!(key, KeySource::File(_)) {
            secret.key.create_file(folder.file(KEY))?;
        }
        let private = match plan.private_run(&secret, model.parameters())? {
            Some(begun) => Some(begun.with_journal(folder.file(JOURNAL), binding.hash())?),
            None => None,
        };
        let key_file = match key {
            KeySource::File(path) => Some(folder.place().at(path).resolved()?.path().to_owned()),
            _ => None,
        };
        let manifest_place = folder.file(MANIFEST);
        let run = Self::assemble(model, data, plan.clone(), pace, &secret, private, Some(folder))?;
        run.checkpoint()?;
        // The manifest last: a directory with one can be resumed.
        write_json(&manifest_place, &Manifest::new(binding, secret.run, key_file, pace))?;
        Ok(run)
    }

    /// Takes up a run where its newest checkpoint is. Rounds after it that the journal holds are computed again, and
    /// released only if they come out the same.
    ///
    /// Errors: no run there; a file of it that is lost or damaged; another plan, other data or another model than the run
    /// began with; a directory in which another process works.
    pub fn resume(folder: impl Into<DiskPath>, model: &'a M, data: &'a Split<D>) -> Result<Self> {
        let folder = Folder::hold(&folder.into())?;
        // Of a process that was killed, there may be files here whose names are not on disk yet.
        folder.place().sync_names()?;
        let manifest = folder.manifest()?;
        let plan = Plan::load(folder.needed(PLAN, "the plan")?)?;
        let key = match &manifest.key_file {
            Some(path) => folder.place().at(path),
            None => folder.file(KEY),
        };
        let key = NoiseKey::read_file(folder::needed(key, "the key")?)?;
        let secret = Secret { key, run: manifest.run.parse()? };
        let binding = Binding::new(&plan, &digest(&data.train), model, &secret);
        if let Err(message) = manifest.binding.check(&binding) {
            return Err(Error::Run { path: folder.place().path().into(), message });
        }
        let checkpoints = Checkpoints::new(folder.place());
        if checkpoints.newest()?.is_none() {
            return Err(Error::lost(folder.place().path(), "the checkpoint"));
        }
        let private = match plan.private_run(&secret, model.parameters())? {
            Some(begun) => {
                let checkpoint = checkpoints.noise()?;
                let journal = folder.needed(JOURNAL, "the journal")?;
                // It opens for the plan, the data and the model that it was begun with, whatever a manifest says.
                Some(begun.restored(journal, binding.hash(), checkpoint)?)
            }
            None => None,
        };
        let record: Record = read_json(&folder.needed(CURVE, "the learning curve")?)?;
        let mut run = Self::assemble(model, data, plan, manifest.pace, &secret, private, Some(folder))?;
        checkpoints.restore_server(&mut run.training)?;
        run.curve = record.curve;
        run.curve.retain(|point| point.round <= run.training.done());
        (run.untrained, run.earlier_seconds) = (record.untrained, record.seconds);
        Ok(run)
    }

    fn assemble(
        model: &'a M,
        data: &'a Split<D>,
        plan: Plan,
        pace: Pace,
        secret: &Secret,
        private: Option<PrivateRun>,
        folder: Option<Folder>,
    ) -> Result<Self> {
        if data.validation.users() == 0 || data.test.users() == 0 {
            let rule = "there must be users for validation and for the test";
            return Err(Error::argument("data", "no held-out users", rule));
        }
        let assignment = plan.cohorts(data.train.users(), secret)?;
        let training = Training::new(model, &data.train, &plan, assignment, private)?;
        let spent = plan.mechanism().map_or_else(Vec::new, |mechanism| mechanism.spent());
        let mut run = Self {
            model,
            data,
            plan,
            pace,
            training,
            spent,
            folder,
            curve: Vec::new(),
            untrained: f64::NAN,
            earlier_seconds: 0.0,
            started: Instant::now(),
        };
        run.look();
        run.untrained = run.curve[0].loss;
        Ok(run)
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Rounds in all.
    pub fn rounds(&self) -> usize {
        self.training.rounds()
    }

    /// Rounds that are done.
    pub fn done(&self) -> usize {
        self.training.done()
    }

    /// ε of everything released so far; 0 before the first release, `None` without noise.
    pub fn epsilon_spent(&self) -> Option<f64> {
        self.plan.mechanism()?;
        Some(self.training.done().checked_sub(1).and_then(|i| self.spent.get(i)).copied().unwrap_or(0.0))
    }

    /// The learning curve so far, on validation users.
    pub fn curve(&self) -> &[Point] {
        &self.curve
    }

    /// The parameters that are released.
    pub fn released(&self) -> &[f32] {
        self.training.released()
    }

    /// Does one round, with what is due after it: a point of the curve, a checkpoint. `false` when all are done.
    ///
    /// Errors: those of the noise stream and the disk.
    pub fn advance(&mut self) -> Result<bool> {
        if !self.training.advance()? {
            return Ok(false);
        }
        let (done, rounds) = (self.training.done(), self.training.rounds());
        if (done * self.pace.points) / rounds > ((done - 1) * self.pace.points) / rounds {
            self.look();
        }
        if done % self.pace.checkpoint.max(1) == 0 && done < rounds {
            self.checkpoint()?;
        }
        Ok(true)
    }

    /// Gives up the next round: see [`Training::burn`].
    ///
    /// Errors: those of it.
    pub fn burn(&mut self) -> Result<usize> {
        self.training.burn()
    }

    /// Writes a checkpoint, if the run has a directory.
    ///
    /// Errors: [`Error::Io`].
    pub fn checkpoint(&self) -> Result<()> {
        if let Some(folder) = &self.folder {
            let (curve, untrained, seconds) = (self.curve.clone(), self.untrained, self.seconds());
            write_json(&folder.file(CURVE), &Record { curve, untrained, seconds })?;
            Checkpoints::new(folder.place()).save(&self.training)?;
        }
        Ok(())
    }

    /// Ends the run: scores the released parameters on all validation users and, if this is no tuning, on the test users,
    /// whom nothing before has touched. With a card, a run in a directory leaves its model there.
    ///
    /// Errors: [`Error::Io`]; a card of another model.
    pub fn finish(self, purpose: Purpose, card: Option<&Card>) -> Result<Outcome> {
        let score = |data: &D| {
            let score = evaluate(self.model, self.released(), data, 0..data.users());
            Point::new(self.done(), self.model, score)
        };
        let validation = score(&self.data.validation);
        let test = (purpose == Purpose::Report).then(|| score(&self.data.test));
        let private = self.training.private_run();
        let burned = private.map_or(0, |run| run.burned().len());
        let diverged = !validation.loss.is_finite() || validation.loss > self.untrained;
        let key = private.map(PrivateRun::origin);
        let (seconds, curve) = (self.seconds(), self.curve.clone());
        let outcome = Outcome { test, validation, curve, diverged, burned, seconds, key };
        if let Some(folder) = &self.folder {
            self.checkpoint()?;
            if let Some(card) = card {
                let ended = FinishedRun { plan: self.plan.clone(), outcome: outcome.clone() };
                SavedModel::new(card.clone(), self.released().to_vec(), &ended)?.save(folder.file(MODEL))?;
            }
            write_json(&folder.file(OUTCOME), &outcome)?;
        }
        Ok(outcome)
    }

    fn seconds(&self) -> f64 {
        self.earlier_seconds + self.started.elapsed().as_secs_f64()
    }

    fn look(&mut self) {
        let users = self.pace.users.min(self.data.validation.users());
        let score = evaluate(self.model, self.training.released(), &self.data.validation, 0..users);
        self.curve.push(Point::new(self.training.done(), self.model, score));
    }
}

/// How a run in a directory stands: its outcome if it has ended.
///
/// Errors: an outcome that cannot be read.
pub fn outcome(folder: impl Into<DiskPath>) -> Result<Option<Outcome>> {
    let place = folder.into().join(OUTCOME);
    if place.exists()? { read_json(&place).map(Some) } else { Ok(None) }
}

/// The model that a run in a directory released at its end.
///
/// Errors: a run that has not ended; a file that is damaged.
pub fn model(folder: impl Into<DiskPath>) -> Result<SavedModel> {
    let folder = folder.into();
    let place = folder.join(MODEL);
    if !place.exists()? {
        let message = "the run has not finished, so it has no model yet: continue it first".into();
        return Err(Error::Run { path: folder.path().into(), message });
    }
    SavedModel::load(place)
}

/// Whether a directory holds a run that can be resumed.
///
/// Errors: a directory that cannot be read.
pub fn exists(folder: impl Into<DiskPath>) -> Result<bool> {
    Ok(folder.into().join(MANIFEST).exists()?)
}

/// Puts the plan of a run that is to begin into its directory, which is made if there is none.
///
/// Errors: a directory that holds a run, or in which another process works; [`dpmf::Error::Io`].
pub fn save_plan(folder: impl Into<DiskPath>, plan: &Plan) -> Result<()> {
    plan.save(Folder::create(&folder.into())?.file(PLAN))
}

/// The plan of a run in a directory.
///
/// Errors: a plan that cannot be read.
pub fn plan(folder: impl Into<DiskPath>) -> Result<Plan> {
    Plan::load(folder.into().join(PLAN))
}

#[cfg(test)]
mod fault_injection;
#[cfg(test)]
mod tests;
