//! `dpmf train`.

pub mod html;
pub mod task;

use crate::clock;
use crate::failure::Failure;
use crate::hints;
use crate::interrupt::{self, Hold};
use crate::matrix::read_vector;
use crate::memory;
use crate::output;
use crate::plan::cache;
use crate::progress::{Bar, Spinner};
use crate::report::{Report, duration, note, table};
use crate::value_parsers;
use crate::warnings;
use crate::workload::{BYTES_A_STEP, OptimizerArgs, count};
use anyhow::{Context, bail};
use dpmf::accounting::statement::epsilon_for_people;
use dpmf::accounting::{Arithmetic, ExtraRelease, LedgerFile, Release, Terms, gaussian};
use dpmf::disk::{self, Access, DiskPath, Lock};
use dpmf::family::{Budget, Knob};
use dpmf::mechanism::Conditions;
use dpmf::noise::{NoiseKey, RunId};
use dpmf::planner::{self, Planner};
use dpmf::{Participation, Sampling};
use dpmf_train::run::{self, Run};
use dpmf_train::task::{self as usual, Length, Task};
use dpmf_train::{
    Card, FinishedRun, Given, KeySource, MechanismChoice, Model, Outcome, Pace, Plan, Privacy, Purpose,
    Rehearsed, RunPlanner, Settings, Steps, Summary, Users, rehearse, tempered_rate, with_task,
};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::fs;
use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use task::TaskArgs;

/// Train a model under differential privacy, for one epoch or several.
///
/// With --epochs K, each user takes part about K times, and the planner chooses the mechanism and sampler with the
/// least error for ε, δ, the batch size and the optimizer. On public data, DP-SGD at the same ε is trained too, for
/// comparison. --plan FILE trains with a file from `dpmf plan`.
///
/// Without options, it trains a character model of package names, private for every package owner at ε = 2, in one
/// pass. It uses the optimal mechanism and, for comparison, tree aggregation and DP-SGD at the same ε, and takes less
/// than two minutes on two cores. The run directory holds the models, keys, journals and a report.html.
///
/// On a table with --label, settings that you leave out are rehearsed: they are chosen on made-up tables with the same
/// number of users, columns and classes, which costs no privacy. Exit status 3 means that training finished, but that
/// on held-out users the model is no better than the trivial one (the mean, or the most common class). All files are
/// written even then.
///
/// After Ctrl-C or a crash, continue a run with --resume DIR.
#[derive(clap::Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "Examples:\n  dpmf train\n  dpmf train --data messages.csv --epochs 5 --epsilon 3 --out run\n  \
    dpmf train --data table.csv --user customer --label bought --public-share 0.1 --epsilon 3\n  \
    dpmf train --data fashion-mnist --epochs 10 --clients 600 --epsilon 3\n  dpmf train --mechanism optimal,none --epsilon 8 --momentum 0.9 \
    --schedule cooldown:0.25:0.05\n  dpmf train --data messages.csv --rounds 200 --clients 50 --out run\n  \
    dpmf train --resume run"
)]
pub struct Args {
    #[command(flatten)]
    task: TaskArgs,

    #[command(flatten)]
    recipe: RecipeArgs,

    /// Mechanisms to train with, one after another: planned, which needs --epochs; dp-sgd for independent noise and
    /// Poisson sampling; a name from `dpmf compare`, also with a choice such as optimal:dense or state-space:buffers=4;
    /// or none for no noise. By default planned with --epochs and optimal without; on the public data sets that come
    /// with dpmf, also others for comparison
    #[arg(
        long, value_name = "NAME,…", value_delimiter = ',',
        value_parser = value_parsers::trained::<MechanismChoice>(), hide_possible_values = true
    )]
    mechanism: Vec<MechanismChoice>,

    /// Train with the mechanism, sampler, optimizer and clip in this file from `dpmf plan --out`; its step sizes are
    /// multiplied by --server-lr
    #[arg(long, value_name = "FILE", conflicts_with_all = ["mechanism", "epsilon", "noise_multiplier", "epochs", "rounds",
        "clip", "delta", "momentum", "nesterov", "weight_decay", "coupled", "average", "schedule", "schedule_file", "dense",
        "buffers", "participation", "sampling", "noise_decay"])]
    plan: Option<PathBuf>,

    /// ε of the guarantee
    #[arg(long, value_name = "ε", default_value_t = usual::EPSILON, conflicts_with = "noise_multiplier")]
    epsilon: f64,

    /// Use this noise multiplier and state the ε that it gives
    #[arg(long, value_name = "σ")]
    noise_multiplier: Option<f64>,

    /// Number of runs of each mechanism, with different initial parameters, batches and noise
    #[arg(long, value_name = "K", value_parser = count, default_value = "1")]
    repeats: usize,

    /// Use the key in this file instead of a new one
    #[arg(long, value_name = "FILE", conflicts_with = "seed")]
    key_file: Option<PathBuf>,

    /// Derive the key from this number, for experiments; the guarantee then holds only if the number is secret
    #[arg(long, value_name = "S")]
    seed: Option<u64>,

    /// Record the private models in this ledger before anything is released, and refuse to start if they exceed its budget
    #[arg(long, value_name = "FILE", conflicts_with = "resume")]
    ledger: Option<PathBuf>,

    /// New directory for the run; runs/<date>-<time> by default
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,

    /// Continue the run in this directory with its original settings; only --burn can be added
    #[arg(long, value_name = "DIR", conflicts_with = "out")]
    resume: Option<PathBuf>,

    /// With --resume: give up rounds whose input differs from the one before the crash
    #[arg(long, requires = "resume")]
    burn: bool,
}

/// What decides a run beside the mechanism and its noise; shared with `dpmf sweep`.
#[derive(clap::Args, Clone)]
#[command(next_help_heading = "Training")]
pub struct RecipeArgs {
    /// Passes over the users, of users / clients rounds each; each user takes part this many times, on average
    /// [default: 1; rehearsed for a table with a label]
    #[arg(long, value_name = "K", value_parser = count, conflicts_with_all = ["rounds", "participation"])]
    pub epochs: Option<usize>,

    /// Number of rounds; a user takes part in one of them at most, unless --participation allows more. By default one
    /// pass, but at most 1024
    #[arg(long, value_name = "n", value_parser = count)]
    pub rounds: Option<usize>,

    /// Users in a round (examples, for images), on average if they are sampled [default: 100, or a tenth of fewer than
    /// a thousand users; rehearsed for a table with a label, mostly all users]
    #[arg(long, value_name = "c", value_parser = count)]
    pub clients: Option<usize>,

    /// Norm ζ that each user's update is clipped to [default: 1; rehearsed for a table with a label]
    #[arg(long, value_name = "ζ")]
    pub clip: Option<f64>,

    /// δ of the guarantee
    #[arg(long, value_name = "δ", default_value_t = usual::DELTA)]
    pub delta: f64,

    /// exact: noise that is correct to the last bit; float: faster noise in single precision, whose lowest bits the
    /// proof does not cover
    #[arg(
        long, value_name = "exact|float", default_value = "exact",
        value_parser = value_parsers::of::<Arithmetic>(value_parsers::ARITHMETIC), hide_possible_values = true
    )]
    pub arithmetic: Arithmetic,

    /// Server momentum β [default: 0.9, or 0 for a table with a label]
    #[arg(long, value_name = "β")]
    pub momentum: Option<f64>,

    #[command(flatten)]
    pub optimizer: OptimizerArgs,

    /// Server step sizes relative to --server-lr: constant, cooldown:f:e, decay:f:c, cosine:e, warmup:s or exp:r
    #[arg(long, default_value = usual::SCHEDULE)]
    pub schedule: String,

    /// Read server step sizes from a file with one number for each round
    #[arg(long, value_name = "FILE", conflicts_with = "schedule")]
    pub schedule_file: Option<PathBuf>,

    /// Server learning rate [default: 0.25 for texts and 0.5 for images, less if there is much noise; rehearsed for a
    /// table with a label]
    #[arg(long, value_name = "η")]
    pub server_lr: Option<f64>,

    /// Learning rate of a user's local passes [default: 2 for texts; none for tables, where each user contributes one
    /// gradient]
    #[arg(long, value_name = "η")]
    pub client_lr: Option<f64>,

    /// Local passes of a user over their own examples
    #[arg(long, value_name = "k", value_parser = count, default_value_t = usual::CLIENT_PASSES)]
    pub client_passes: usize,

    /// Examples in a user's local batch
    #[arg(long, value_name = "b", value_parser = count, default_value_t = usual::CLIENT_BATCH)]
    pub client_batch: usize,

    /// Share of users that drop out of a round; the denominator stays the same
    #[arg(long, value_name = "p", default_value_t = 0.0)]
    pub dropout: f64,

    /// Use optimal mechanisms as dense rows instead of streams with a few buffers
    #[arg(long)]
    pub dense: bool,

    /// Largest number of model-sized buffers for the noise [default: 8 for a plan; for optimal streams, as few as stay
    /// within 1e-4 of the bound]
    #[arg(long, value_name = "R", value_parser = count)]
    pub buffers: Option<usize>,

    /// Fraction of past noise that later gradients undo at the largest step, for a plan: see `dpmf plan`
    #[arg(long, alias = "pull", value_name = "π", default_value_t = planner::PULL)]
    pub noise_decay: f64,

    /// How often a user takes part: single, epochs:K or min-separation:B[:K] [default: single, or the epochs]
    #[arg(long, value_name = "PATTERN")]
    pub participation: Option<Participation>,

    /// How users are sampled in secret: auto lets the planner choose; none does not rely on sampling; mechanisms by
    /// name also take cyclic-poisson:G:Q, balls-in-bins:B or reshuffled-bins:B
    #[arg(long, value_name = "SAMPLING", default_value = "auto")]
    pub sampling: SamplingArg,
}

/// `--sampling`: left to the planner, or fixed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SamplingArg {
    Auto,
    Fixed(Sampling),
}

impl FromStr for SamplingArg {
    type Err = dpmf::Error;

    fn from_str(text: &str) -> dpmf::Result<Self> {
        if text == "auto" { Ok(SamplingArg::Auto) } else { Ok(SamplingArg::Fixed(text.parse()?)) }
    }
}

impl SamplingArg {
    /// The sampling of mechanisms by name.
    pub fn sampling(self) -> Sampling {
        match self {
            SamplingArg::Auto => Sampling::None,
            SamplingArg::Fixed(sampling) => sampling,
        }
    }
}

/// A mechanism with --dense or --buffers, where it leaves that choice and has not made it.
pub fn budgeted(
    choice: MechanismChoice,
    dense: bool,
    buffers: Option<usize>,
) -> anyhow::Result<MechanismChoice> {
    let MechanismChoice::Named(selector) = choice else { return Ok(choice) };
    if selector.budget() != Budget::default() {
        return Ok(choice);
    }
    let budget = match (dense && selector.takes(Knob::Dense), buffers) {
        (true, _) => Budget { dense, ..Budget::default() },
        (false, Some(_)) if selector.takes(Knob::Buffers) => Budget { buffers, ..Budget::default() },
        _ => return Ok(choice),
    };
    Ok(MechanismChoice::Named(selector.with(budget)?))
}

impl RecipeArgs {
    /// What a rehearsal leaves as it is.
    fn given(&self) -> Given {
        let sampled = !matches!(self.sampling, SamplingArg::Auto | SamplingArg::Fixed(Sampling::None));
        let length = self.rounds.is_some()
            || self.epochs.is_some()
            || self.participation.is_some()
            || self.schedule_file.is_some();
        Given {
            learning_rate: self.server_lr.is_some(),
            length: length || sampled,
            clients: self.clients.is_some() || sampled,
            clip: self.clip.is_some(),
        }
    }

    /// The settings of a run on a task, with the mechanism and its noise still to be chosen.
    pub fn settings(&self, task: &Task) -> anyhow::Result<Settings> {
        let values = self.schedule_file.as_deref().map(read_vector).transpose()?;
        let length = match (self.rounds, self.epochs, &values) {
            (Some(rounds), _, _) => Length::Rounds(rounds),
            (None, Some(epochs), _) => Length::Epochs(epochs),
            (None, None, Some(values)) => Length::Rounds(values.len()),
            (None, None, None) => Length::Pass,
        };
        let mut settings =
            task.settings(length, self.clients, self.sampling.sampling(), self.participation)?;
        memory::check("--rounds", settings.rounds, settings.rounds as f64 * BYTES_A_STEP)?;
        settings.recipe.local = task.local(self.client_lr, self.client_passes, self.client_batch)?;
        settings.recipe.dropout = self.dropout;
        settings.recipe.arithmetic = self.arithmetic;
        settings.clip = self.clip.unwrap_or(settings.clip);
        let momentum = if task.shape().is_some() { 0.0 } else { usual::MOMENTUM };
        settings.optimizer = self.optimizer.with_momentum(self.momentum.unwrap_or(momentum));
        settings.schedule = values.map_or_else(|| Steps::Schedule(self.schedule.clone()), Steps::Values);
        settings.server_learning_rate = self.server_lr.unwrap_or(settings.server_learning_rate);
        settings.limits.buffers = self.buffers.unwrap_or(settings.limits.buffers);
        settings.limits.trusted = self.sampling != SamplingArg::Fixed(Sampling::None);
        settings.limits.pull = self.noise_decay;
        Ok(settings)
    }
}

/// What is written down when an experiment begins, for its owner alone: a seed is a secret. Each run has a directory
/// with its plan.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Experiment {
    schema: u32,
    pub task: TaskArgs,
    key_file: Option<PathBuf>,
    seed: Option<u64>,
    #[serde(default)]
    rehearsed: Option<Rehearsed>,
    pub runs: Vec<String>,
    /// What the schema of the table may cost, where it is found in private.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    beside: Option<ExtraRelease>,
}

/// Directory of a schema that is found in private.
const FOUND: &str = "schema";

const SCHEMA: u32 = 3;
const EXPERIMENT: &str = "experiment.json";
const RESULTS: &str = "results.json";
const REPORT: &str = "report.html";
const LOCK: &str = "lock";

pub fn run(args: &Args) -> anyhow::Result<Report> {
    let (folder, mut experiment, opened, _lock, _hold) = match &args.resume {
        Some(folder) => {
            let experiment = Experiment::read(folder)?;
            let lock = hold(folder)?;
            (folder.clone(), experiment, Err(None), lock, Hold::new())
        }
        None => {
            let folder =
                args.out.clone().unwrap_or_else(|| PathBuf::from(format!("runs/{}", clock::compact())));
            check_unused(&folder)?;
            output::check_folder(&folder)?;
            if let Some(path) = &args.key_file {
                NoiseKey::read_file(path)?;
            }
            if let Some(path) = &args.ledger {
                LedgerFile::read(path)?;
            }
            // What is planned must not depend on a schema that is found in private: composition counts on that.
            let beside = beside(args)?;
            let task = beside.map_or_else(|| args.task.open(), |beside| args.task.outline(beside))?;
            fits(&task)?;
            let Planned { plans, rehearsed, settings } = plans(args, &task, beside)?;
            warnings::tell(&plan_warnings(plans.iter().map(|(_, plan)| plan), &task));
            // From here on there is something to lose.
            let kept = Hold::new();
            let (experiment, lock) = begin(args, &task, &folder, plans, beside, rehearsed)?;
            (folder, experiment, beside.is_none().then_some(task).ok_or(settings), lock, kept)
        }
    };
    let task = match (opened, experiment.beside) {
        (Ok(task), _) => task,
        (Err(settings), Some(beside)) => {
            let named = folder.display();
            let task =
                experiment.task.find(beside, &folder.join(FOUND), &experiment.key()).with_context(|| {
                    format!("the run {named} has begun and its private schema is released; a new run would release another one, which \
                        costs privacy again")
                })?;
            if let Some(settings) = settings {
                experiment.suit(&folder, &task, settings)?;
            }
            task
        }
        (Err(_), None) => experiment.task.open()?,
    };
    fits(&task)?;
    note(&task.describe());
    task.remarks().iter().for_each(|remark| note(&format!("{}: {}", task.name(), hints::remark(remark))));
    let card = task.card();
    let key = experiment.key();
    let mut ended = Vec::new();
    for (index, name) in experiment.runs.iter().enumerate() {
        let place = folder.join(name);
        let plan = run::plan(&place)?;
        let label = format!("[{}/{}] {}", index + 1, experiment.runs.len(), plan.label());
        let outcome = match run::outcome(&place)? {
            Some(outcome) => outcome,
            None => with_task!(&task, |model, split| {
                train_one(&place, &folder, model, split, &plan, &key, &label, args.burn, &card)?
            }),
        };
        ended.push(FinishedRun { plan, outcome });
    }
    finish(&folder, &task, experiment.rehearsed, &ended)
}

/// What finding the schema may cost: a share of the whole budget, or of what the noise of a mechanism is worth.
fn beside(args: &Args) -> anyhow::Result<Option<ExtraRelease>> {
    let (epsilon, delta) = match &args.plan {
        Some(path) => {
            let mechanism = dpmf::format::load(path)?;
            let stated = mechanism.privacy().map(|statement| statement.calibration());
            stated.map_or((args.epsilon, args.recipe.delta), |stated| (stated.epsilon(), stated.delta()))
        }
        None => (args.epsilon, args.recipe.delta),
    };
    let mu = |delta: f64| match args.noise_multiplier {
        Some(sigma) if sigma > 0.0 && sigma.is_finite() => Ok(1.0 / sigma),
        _ => Ok(gaussian::mu(epsilon, delta)?),
    };
    args.task.beside(mu, delta)
}

/// What is to be warned of in any of these plans.
fn plan_warnings<'a>(plans: impl Iterator<Item = &'a Plan>, task: &Task) -> Vec<String> {
    let statements = plans.filter_map(|plan| plan.mechanism()?.privacy());
    let budgets =
        statements.map(|statement| (statement.calibration().epsilon(), statement.calibration().delta()));
    let largest = budgets.reduce(|a, b| (a.0.max(b.0), a.1.max(b.1)));
    let (epsilon, delta) = largest.unzip();
    warnings::about(epsilon, delta, Some(task.users().0))
}

/// Refuses a model that does not fit in memory with what training keeps of it: parameters, gradients of every thread,
/// noise.
pub fn fits(task: &Task) -> Result<(), Failure> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    // A thread's parameters and gradient, and its sum of integers that are twice as long.
    let copies = 12 + 4 * threads;
    let parameters = task.parameters();
    let widths = "the model's number of parameters (--hidden, --embedding, --projection, --vocabulary-size)";
    memory::check(widths, parameters, parameters as f64 * 4.0 * copies as f64)
}

/// Refuses a directory that holds a run.
fn check_unused(folder: &Path) -> anyhow::Result<()> {
    if folder.join(EXPERIMENT).exists() {
        let name = folder.display();
        bail!("{name} already holds a run: continue it with --resume {name}, or choose another --out");
    }
    Ok(())
}

/// Keeps other processes out of a directory as long as it lives.
fn hold(folder: &Path) -> dpmf::Result<Lock> {
    DiskPath::from(folder.join(LOCK)).lock()
}

/// Writes the plans down with the experiment. A start that fails leaves the disk as it was.
fn begin(
    args: &Args,
    task: &Task,
    folder: &Path,
    plans: Vec<(String, Plan)>,
    beside: Option<ExtraRelease>,
    rehearsed: Option<Rehearsed>,
) -> anyhow::Result<(Experiment, Lock)> {
    let new = folder.ancestors().take_while(|above| !above.as_os_str().is_empty() && !above.exists()).last();
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let begun = write_down(args, task, folder, &plans, beside, rehearsed);
    if begun.is_err() {
        // The first error is what counts.
        match new {
            Some(new) => drop(fs::remove_dir_all(new)),
            None => plans.iter().for_each(|(name, _)| drop(fs::remove_dir_all(folder.join(name)))),
        }
    }
    begun
}

fn write_down(
    args: &Args,
    task: &Task,
    folder: &Path,
    plans: &[(String, Plan)],
    beside: Option<ExtraRelease>,
    rehearsed: Option<Rehearsed>,
) -> anyhow::Result<(Experiment, Lock)> {
    let lock = hold(folder)?;
    // Another process may have been first while this one was planning.
    check_unused(folder)?;
    for (name, plan) in plans {
        run::save_plan(folder.join(name), plan)?;
    }
    // Before the experiment, without which there is no run to go on with: nothing is released that is not recorded.
    if let Some(path) = &args.ledger {
        enter(path, task, plans)?;
    }
    let key_file = args.key_file.as_deref().map(std::path::absolute).transpose();
    let experiment = Experiment {
        schema: SCHEMA,
        task: args.task.anchored()?,
        key_file: key_file.context("the key file has no name")?,
        seed: args.seed,
        rehearsed,
        runs: plans.iter().map(|(name, _)| name.clone()).collect(),
        beside,
    };
    experiment.save(folder)?;
    Ok((experiment, lock))
}

/// Records every private model of a training in a ledger. From then on it counts, whether the run comes to its end or not.
fn enter(path: &Path, task: &Task, plans: &[(String, Plan)]) -> anyhow::Result<()> {
    let mut ledger = LedgerFile::open(path)?;
    let training = RunId::generate()?;
    let mut releases = Vec::new();
    for (name, plan) in plans {
        let Some(statement) = plan.mechanism().and_then(|mechanism| mechanism.privacy()) else { continue };
        ledger.ledger().check(statement)?;
        // One schema serves all models.
        let id = format!("{training}/schema");
        if !releases.iter().any(|release: &Release| release.id == id) {
            let what = format!("find the schema of {}", task.name());
            releases.extend(Release::beside(&id, &clock::now(), &what, statement)?);
        }
        let what = format!("train {name} on {}", task.name());
        releases.push(Release::new(format!("{training}/{name}"), clock::now(), what, statement)?);
    }
    // One command plans all its models before it trains the first.
    ledger.record_together(releases)?;
    let (spent, budget) = (ledger.ledger().spent()?, ledger.ledger().epsilon());
    let (name, spent, budget) = (path.display(), epsilon_for_people(spent), epsilon_for_people(budget));
    note(&format!("{name}: ε = {spent} of {budget} spent with this training"));
    Ok(())
}

impl Experiment {
    /// Gives the plans the learning rate that suits what was found in private: whether the label is a class or a
    /// number, how many
    /// classes and categories there are. Mechanisms, noise and clip stay: a rate is no part of the guarantee.
    fn suit(&mut self, folder: &Path, task: &Task, mut settings: Settings) -> anyhow::Result<()> {
        let (Some(shape), Some(rehearsed)) = (task.shape(), &mut self.rehearsed) else { return Ok(()) };
        let given = Given { learning_rate: false, length: true, clients: true, clip: true };
        let mut planner = RunPlanner::new(Planner::new(cache(false)));
        let spinner = Spinner::new("rehearsing with the schema that was found");
        let mut listen = |line: &str| {
            spinner.say(line);
            ControlFlow::Continue(())
        };
        let cache = planner::cache_folder();
        let found = rehearse(&shape, &settings, given, &mut planner, cache.as_deref(), &mut listen)?;
        drop(spinner);
        settings.server_learning_rate = found.learning_rate;
        rehearsed.suit(&found);
        for name in &self.runs {
            let place = folder.join(name);
            let plan = run::plan(&place)?.at_rate(&settings)?;
            run::save_plan(&place, &plan)?;
        }
        note(&rehearsed.describe());
        self.save(folder)
    }

    /// Writes it down, for its owner alone.
    fn save(&self, folder: &Path) -> anyhow::Result<()> {
        let text = serde_json::to_vec_pretty(self)?;
        Ok(disk::replace(folder.join(EXPERIMENT), Access::Owner, |file| file.write_all(&text))?)
    }

    fn key(&self) -> KeySource {
        match (&self.key_file, self.seed) {
            (Some(path), _) => KeySource::File(path.clone()),
            (None, Some(seed)) => KeySource::Seed(seed),
            (None, None) => KeySource::System,
        }
    }

    pub fn read(folder: &Path) -> anyhow::Result<Self> {
        #[derive(Deserialize)]
        struct Version {
            schema: u32,
        }
        let path = folder.join(EXPERIMENT);
        let cannot = || format!("cannot read {}", path.display());
        let text = fs::read(&path).with_context(|| format!("{} holds no run", folder.display()))?;
        let Version { schema } = serde_json::from_slice(&text).with_context(cannot)?;
        if schema != SCHEMA {
            bail!(
                "{} was written by another version of dpmf: finish the run with the version that began it",
                path.display()
            );
        }
        let experiment: Self = serde_json::from_slice(&text).with_context(cannot)?;
        // A name with a path in it would lead out of the directory, key and all.
        if let Some(name) =
            experiment.runs.iter().find(|name| Path::new(name).file_name() != Some(name.as_ref()))
        {
            bail!("{} lists the run {name:?}, but has no directory with that name", path.display());
        }
        Ok(experiment)
    }
}

/// Plans with the names of their directories.
type Named = Vec<(String, Plan)>;

/// What runs begin with.
struct Planned {
    plans: Named,
    rehearsed: Option<Rehearsed>,
    /// The settings that all have in common, where a rehearsal chose their learning rate.
    settings: Option<Settings>,
}

/// The plans of all runs, and what was rehearsed for them.
fn plans(args: &Args, task: &Task, beside: Option<ExtraRelease>) -> anyhow::Result<Planned> {
    repeatable(args.repeats)?;
    let seeds = 0..args.repeats as u64;
    if let Some(path) = &args.plan {
        let of = |seed| Ok((format!("plan-{seed}"), planned(args, task, path, seed, beside)?));
        let plans = seeds.map(of).collect::<anyhow::Result<_>>()?;
        return Ok(Planned { plans, rehearsed: None, settings: None });
    }
    let recipe_args = RecipeArgs { epochs: epochs(args)?, ..args.recipe.clone() };
    let mut settings = recipe_args.settings(task)?;
    let delta = args.recipe.delta;
    settings.beside = beside;
    settings.privacy = match args.noise_multiplier {
        Some(noise_multiplier) => Privacy::NoiseMultiplier { noise_multiplier, delta },
        None => Privacy::Epsilon { epsilon: args.epsilon, delta },
    };
    let mut planner = RunPlanner::new(Planner::new(cache(false)));
    let spinner = Spinner::new("planning");
    let mut listen = |line: &str| {
        spinner.say(line);
        ControlFlow::Continue(())
    };
    let choices = choices(args, recipe_args.epochs)?;
    let given = args.recipe.given();
    let mut rehearsed = None;
    if let Some(shape) = task.shape().filter(|_| !given.everything()) {
        // Several mechanisms share the settings of the first that is private.
        let private = choices.iter().find(|choice| **choice != MechanismChoice::None);
        settings.recipe.mechanism = *private.unwrap_or(&MechanismChoice::None);
        let folder = planner::cache_folder();
        let found = rehearse(&shape, &settings, given, &mut planner, folder.as_deref(), &mut listen)?;
        found.apply(&mut settings, given);
        rehearsed = Some(found);
    }
    let rehearsed_with = (rehearsed.is_some() && !given.learning_rate).then(|| settings.clone());
    let (usual, tempered) = (settings.server_learning_rate, task.shape().is_none() && !given.learning_rate);
    let mut plans = Vec::new();
    for seed in seeds {
        for &mechanism in &choices {
            (settings.recipe.mechanism, settings.recipe.seed) = (mechanism, seed);
            settings.server_learning_rate = usual;
            if tempered {
                // Without noise the usual rate serves.
                settings.server_learning_rate = tempered_rate(&settings, task.parameters())?;
            }
            let name = format!("{}-{seed}", mechanism.to_string().replace([':', '='], "-"));
            plans.push((name, planner.plan(&settings, &mut listen)?));
        }
    }
    drop(spinner);
    // Where a schema is to be found, its sizes still have a say in the rate.
    if let Some(rehearsed) = rehearsed.as_ref().filter(|_| beside.is_none() || given.learning_rate) {
        note(&rehearsed.describe());
    }
    if let Some(choice) = planner.choice() {
        note(&format!("planned: {choice}"));
    }
    Ok(Planned { plans, rehearsed, settings: rehearsed_with })
}

/// Most repetitions of a run: beyond them a mean gains nothing.
const MOST_REPEATS: usize = 1000;

/// Refuses no repetition, and more than anybody can want.
pub fn repeatable(repeats: usize) -> anyhow::Result<()> {
    if !(1..=MOST_REPEATS).contains(&repeats) {
        bail!("--repeats is {repeats}, but it must lie between 1 and {MOST_REPEATS}");
    }
    Ok(())
}

/// Passes over the data: on somebody's own one is planned, unless something else is said.
fn epochs(args: &Args) -> anyhow::Result<Option<usize>> {
    let recipe = &args.recipe;
    let open = recipe.rounds.is_none()
        && recipe.participation.is_none()
        && recipe.schedule_file.is_none()
        && args.noise_multiplier.is_none()
        && args.mechanism.is_empty();
    Ok(match recipe.epochs {
        None if open && args.task.is_own()? => Some(1),
        epochs => epochs,
    })
}

/// What to train with. Several models of the same users add up: on somebody's own data there is one unless more are asked
/// for.
fn choices(args: &Args, epochs: Option<usize>) -> anyhow::Result<Vec<MechanismChoice>> {
    let names: &[&str] = match (epochs, args.task.is_own()?) {
        (Some(_), true) => &["planned"],
        (Some(_), false) => &["planned", "dp-sgd"],
        (None, true) => &["optimal"],
        (None, false) => &["optimal", "honaker-online", "dp-sgd"],
    };
    let wanted = match args.mechanism.is_empty() {
        true => names.iter().map(|name| name.parse()).collect::<dpmf::Result<Vec<MechanismChoice>>>()?,
        false => args.mechanism.clone(),
    };
    let mut choices: Vec<MechanismChoice> = Vec::new();
    for choice in wanted {
        let choice = budgeted(choice, args.recipe.dense, args.recipe.buffers)?;
        if choices.contains(&choice) {
            bail!("--mechanism names {choice} twice");
        }
        choices.push(choice);
    }
    Ok(choices)
}

/// A run by a file of `dpmf plan`: mechanism, sampler, optimizer, clip and ε are the file's.
fn planned(
    args: &Args,
    task: &Task,
    path: &Path,
    seed: u64,
    beside: Option<ExtraRelease>,
) -> anyhow::Result<Plan> {
    let mut mechanism = dpmf::format::load(path)?;
    if let (Some(beside), Some(statement)) = (beside, mechanism.privacy().cloned()) {
        // ε and δ stay, and pay for the schema too: the noise grows.
        let (calibration, unit) = (statement.calibration(), statement.unit());
        let &Terms { adjacency, accountant, clip, .. } = calibration.terms();
        let conditions = Conditions { unit, adjacency, accountant, beside: Some(beside) };
        mechanism = mechanism.calibrated(calibration.epsilon(), calibration.delta(), clip, conditions)?;
    }
    let Some((optimizer, rates)) = mechanism.workload().optimizer() else {
        bail!("{} is a plan for a matrix, but training needs an optimizer with step sizes", path.display());
    };
    let Some(selector) = mechanism.family() else {
        bail!("{} does not name the family of its mechanism", path.display());
    };
    let (users, rounds) = (task.users().0, mechanism.workload().steps());
    let phases = mechanism.participation().spacing(rounds)?.max(1);
    let clients = task.drawn(args.recipe.clients, mechanism.sampling())?.unwrap_or((users / phases).max(1));
    let mut settings =
        RecipeArgs { rounds: Some(rounds), clients: Some(clients), ..args.recipe.clone() }.settings(task)?;
    settings.optimizer = *optimizer;
    settings.schedule = Steps::Values(rates.to_vec());
    settings.recipe.mechanism = MechanismChoice::Named(selector);
    settings.recipe.seed = seed;
    Plan::adopt(&settings, mechanism).with_context(|| format!("cannot train with {}", path.display()))
}

#[allow(clippy::too_many_arguments)]
fn train_one<M, D>(
    place: &Path,
    folder: &Path,
    model: &M,
    split: &dpmf_train::data::Split<D>,
    plan: &Plan,
    key: &KeySource,
    label: &str,
    burn: bool,
    card: &Card,
) -> anyhow::Result<Outcome>
where
    M: Model,
    D: Users<Domain = M::Domain>,
{
    let mut run = if run::exists(place)? {
        Run::resume(place, model, split)?
    } else {
        Run::begin(place, model, split, plan, Pace::default(), key)?
    };
    let bar = Bar::new(label, run.rounds(), run.done());
    loop {
        bar.reach(run.done());
        bar.say(&state(&run));
        if interrupt::requested() {
            run.checkpoint()?;
            drop(bar);
            let (done, name) = (run.done(), folder.display());
            let how = format!("interrupted after {done} rounds; continue with dpmf train --resume {name}");
            bail!(Failure::interrupted(how));
        }
        match run.advance() {
            Ok(true) => {}
            Ok(false) => break,
            Err(dpmf_train::Error::Dpmf(dpmf::Error::StepReused { .. })) if burn => {
                let step = run.burn()?;
                bar.println(&format!("round {step} given up: its noise is never used"));
            }
            Err(error @ dpmf_train::Error::Dpmf(dpmf::Error::StepReused { .. })) => {
                drop(bar);
                return Err(anyhow::Error::new(error)
                    .context("the round was released before the crash, but its result differs now; pass --burn to give up all rounds of \
                        this kind"));
            }
            Err(error) => return Err(error.into()),
        }
    }
    drop(bar);
    let outcome = run.finish(Purpose::Report, Some(card))?;
    if let Some(test) = outcome.test {
        let time = duration(outcome.seconds);
        let accuracy = test.accuracy.map_or_else(String::new, |accuracy| format!("accuracy {accuracy:.4}, "));
        note(&format!("{label}: test {accuracy}loss {:.4}, {time}", test.loss));
    }
    Ok(outcome)
}

fn state<M, D>(run: &Run<'_, M, D>) -> String
where
    M: Model,
    D: Users<Domain = M::Domain>,
{
    let loss = run.curve().last().map_or(f64::NAN, |point| point.loss);
    let rounds = format!("{}/{} rounds", run.done(), run.rounds());
    match run.epsilon_spent() {
        Some(epsilon) => format!("loss {loss:.4}, ε {epsilon:.3} spent, {rounds}"),
        None => format!("loss {loss:.4}, no privacy, {rounds}"),
    }
}

fn finish(
    folder: &Path,
    task: &Task,
    rehearsed: Option<Rehearsed>,
    ended: &[FinishedRun],
) -> anyhow::Result<Report> {
    let summary = Summary::new(task, rehearsed, ended)?;
    let report = folder.join(REPORT);
    let mut json = serde_json::to_value(&summary)?;
    json["report"] = json!(report);
    write(&folder.join(RESULTS), &serde_json::to_vec_pretty(&json)?)?;
    write(&report, html::page(task, &summary, ended, folder).as_bytes())?;
    let mut text = String::new();
    let no_better = html::worse_than_trivial(task, &summary);
    if let Some(sentence) = &no_better {
        text += &format!("{sentence}\n\n");
    }
    if let (Some(statement), Some(guarantee)) = (&summary.statement, summary.guarantee()) {
        text += &statement.to_string();
        if !summary.notes.is_empty() {
            text += "About the data:\n";
            summary.notes.iter().for_each(|note| text += &format!("  - {note}\n"));
        }
        if let Some(words) = summary.privacy.and_then(|privacy| privacy.words()) {
            text += &format!("Budget: {words} (δ = {:e}).\n", statement.calibration().delta());
        }
        text += "\n";
        if summary.together.is_some() {
            text += &format!("{}.\n\n", html::capitalized(&guarantee));
        }
    }
    text += &format!(
        "{}\nScores are on held-out {}s; ε does not cover them.\n\nreport: {}",
        table(&html::head(&summary), &html::cells(task, &summary)),
        task.unit().name(),
        report.display()
    );
    let diverged: Vec<String> = summary
        .runs
        .iter()
        .filter(|run| run.diverged)
        .map(|run| format!("{} (seed {})", run.asked, run.seed))
        .collect();
    if !diverged.is_empty() {
        text += &format!(
            "\n\na loss above that of the untrained model: {}. The steps are too large for the noise: use a smaller \
             --server-lr, or more --clients in a round, whose mean has less noise",
            diverged.join(", ")
        );
    }
    let mut warnings = plan_warnings(ended.iter().map(|ended| &ended.plan), task);
    let is_no_better = no_better.is_some();
    warnings.extend(no_better);
    let mut report = Report::new(json, text).warned(warnings);
    report.no_better = is_no_better;
    Ok(report)
}

fn write(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    Ok(disk::replace(path, Access::Everyone, |file| file.write_all(bytes))?)
}
