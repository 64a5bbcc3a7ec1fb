//! `dpmf train`.

mod html;
pub mod task;

use crate::clock;
use crate::ledger::counted;
use crate::matrix::read_vector;
use crate::progress::Spinner;
use crate::report::{Report, duration, table};
use crate::workload::{OptimizerArgs, count};
use anyhow::{Context, bail};
use dpmf::accounting::statement::epsilon_for_people;
use dpmf::accounting::{Arithmetic, LedgerFile, Release};
use dpmf::disk::{self, Access, Lock, Place};
use dpmf::family::{Budget, Knob};
use dpmf::noise::RunId;
use dpmf::{Participation, Problem, Sampling};
use dpmf_train::run::{self, Run};
use dpmf_train::{
    Choice, Ended, KeySource, Local, Model, Outcome, Pace, Plan, Privacy, Purpose, Recipe, Steps, Summary,
    Users,
};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use task::{Task, TaskArgs, with_task};

/// Train a model under differential privacy, each user taking part once.
///
/// Without options: a character model of package names, private for every owner at ε = 2, trained with the optimal
/// mechanism and, beside it, tree aggregation and independent noise at the same ε; about three minutes on two cores. The
/// directory of the run holds the models, the keys, the journals and a report.html.
///
/// Interrupted by Ctrl-C or a crash, a run goes on with --resume DIR.
#[derive(clap::Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "Examples:\n  dpmf train\n  dpmf train --mechanism optimal,none --epsilon 8 --momentum 0.9 \
    --schedule cooldown:0.25:0.05\n  dpmf train --data messages.csv --rounds 200 --clients 50 --out run\n  \
    dpmf train --resume run"
)]
pub struct Args {
    #[command(flatten)]
    task: TaskArgs,

    #[command(flatten)]
    recipe: RecipeArgs,

    /// Mechanisms to train with, one after the other: a name of `dpmf compare`, also with a choice such as
    /// optimal:dense or state-space:buffers=4, or none for no noise. By default optimal; for the data sets that come with
    /// dpmf, which are public, also honaker-online and independent
    #[arg(long, value_name = "NAME,…", value_delimiter = ',')]
    mechanism: Vec<Choice>,

    /// ε of the guarantee
    #[arg(long, value_name = "ε", default_value_t = 2.0, conflicts_with = "noise_multiplier")]
    epsilon: f64,

    /// Take this noise multiplier and state the ε it gives
    #[arg(long, value_name = "σ")]
    noise_multiplier: Option<f64>,

    /// Runs of each mechanism, with other first parameters, other cohorts and other noise
    #[arg(long, value_name = "K", value_parser = count, default_value = "1")]
    repeats: usize,

    /// Take the noise from this key instead of a new one
    #[arg(long, value_name = "FILE", conflicts_with = "seed")]
    key_file: Option<PathBuf>,

    /// Derive the key from a number, for experiments: the guarantee then holds only if the number is secret
    #[arg(long, value_name = "S")]
    seed: Option<u64>,

    /// Record the private models in this ledger before anything is released, and refuse to begin if its budget does not
    /// hold them
    #[arg(long, value_name = "FILE", conflicts_with = "resume")]
    ledger: Option<PathBuf>,

    /// Directory of the run, new; runs/<date>-<time> by default
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,

    /// Go on with the run in this directory; all other settings are taken from it
    #[arg(long, value_name = "DIR", conflicts_with = "out")]
    resume: Option<PathBuf>,

    /// With --resume: give up a round whose input is not what it was before the crash
    #[arg(long, requires = "resume")]
    burn: bool,
}

/// What decides a run beside the mechanism and its noise; shared with `dpmf sweep`.
#[derive(clap::Args, Clone)]
#[command(next_help_heading = "Training")]
pub struct RecipeArgs {
    /// Rounds of training; by default 2048, or as many as the users allow
    #[arg(long, value_name = "n", value_parser = count)]
    pub rounds: Option<usize>,

    /// Users in a round (examples, for images)
    #[arg(long, value_name = "c", value_parser = count, default_value = "100")]
    pub clients: usize,

    /// Norm ζ that a user's update is clipped to
    #[arg(long, value_name = "ζ")]
    pub clip: Option<f64>,

    /// δ of the guarantee
    #[arg(long, value_name = "δ", default_value_t = 1e-6)]
    pub delta: f64,

    /// Noise that is correct to the last bit, or faster in single precision, whose lowest bits no proof covers
    #[arg(long, value_name = "exact|float", default_value = "exact")]
    pub arithmetic: Arithmetic,

    /// Server momentum β
    #[arg(long, value_name = "β", default_value_t = 0.9)]
    pub momentum: f64,

    #[command(flatten)]
    pub optimizer: OptimizerArgs,

    /// Server step sizes relative to --server-lr: constant, cooldown:f:e, decay:f:c, cosine:e, warmup:s, exp:r
    #[arg(long, default_value = "cooldown:0.25:0.05")]
    pub schedule: String,

    /// Server step sizes from a file, one number a round
    #[arg(long, value_name = "FILE", conflicts_with = "schedule")]
    pub schedule_file: Option<PathBuf>,

    /// Server learning rate
    #[arg(long, value_name = "η")]
    pub server_lr: Option<f64>,

    /// Learning rate of a user's own passes
    #[arg(long, value_name = "η")]
    pub client_lr: Option<f64>,

    /// Passes of a user over its examples
    #[arg(long, value_name = "k", value_parser = count, default_value = "1")]
    pub client_passes: usize,

    /// Examples in a user's batch
    #[arg(long, value_name = "b", value_parser = count, default_value = "16")]
    pub client_batch: usize,

    /// Share of users that fail to turn up; the denominator stays
    #[arg(long, value_name = "p", default_value_t = 0.0)]
    pub dropout: f64,

    /// Optimal mechanisms as dense rows instead of streams of a few buffers
    #[arg(long)]
    pub dense: bool,

    /// Buffers of the optimal streams; by default as many as stay within 1e-4 of the bound
    #[arg(long, value_name = "R", value_parser = count)]
    pub buffers: Option<usize>,

    /// How often a user takes part: single, epochs:K or min-separation:B[:K]
    #[arg(long, value_name = "PATTERN", default_value_t)]
    pub participation: Participation,

    /// By what secret chance users come into rounds: none, cyclic-poisson:G:Q or balls-in-bins:B
    #[arg(long, value_name = "SAMPLING", default_value_t)]
    pub sampling: Sampling,
}

/// A mechanism with --dense or --buffers, where it leaves that choice and has not made it.
pub fn budgeted(choice: Choice, dense: bool, buffers: Option<usize>) -> anyhow::Result<Choice> {
    let Choice::Private(selector) = choice else { return Ok(choice) };
    if selector.budget() != Budget::default() {
        return Ok(choice);
    }
    let budget = match (dense && selector.takes(Knob::Dense), buffers) {
        (true, _) => Budget { dense, ..Budget::default() },
        (false, Some(_)) if selector.takes(Knob::Buffers) => Budget { buffers, ..Budget::default() },
        _ => return Ok(choice),
    };
    Ok(Choice::Private(selector.with(budget)?))
}

impl RecipeArgs {
    /// The recipe for a task, with the mechanism and its noise still to be chosen.
    pub fn build(&self, task: &Task) -> anyhow::Result<Recipe> {
        let defaults = task.defaults();
        let rounds = match (self.rounds, &self.schedule_file) {
            (Some(rounds), _) => rounds,
            (None, Some(_)) => self.schedule_values()?.map_or(0, |values| values.len()),
            (None, None) => (task.users().0 / self.clients.max(1)).min(defaults.rounds),
        };
        let local = match defaults.client_learning_rate {
            Some(rate) => Local::Sgd {
                learning_rate: self.client_lr.unwrap_or(rate),
                passes: self.client_passes,
                batch: self.client_batch,
            },
            None if self.client_lr.is_some() => {
                bail!("--client-lr has no meaning where every user is one example")
            }
            None => Local::Gradient,
        };
        Ok(Recipe {
            mechanism: Choice::None,
            participation: self.participation,
            sampling: self.sampling,
            rounds,
            clients: self.clients,
            clip: self.clip.unwrap_or(defaults.clip),
            optimizer: self.optimizer.with_momentum(self.momentum),
            schedule: self
                .schedule_values()?
                .map_or_else(|| Steps::Schedule(self.schedule.clone()), Steps::Values),
            server_learning_rate: self.server_lr.unwrap_or(defaults.server_learning_rate),
            local,
            dropout: self.dropout,
            privacy: Privacy::Epsilon { epsilon: 1.0, delta: self.delta },
            arithmetic: self.arithmetic,
            seed: 0,
        })
    }

    fn schedule_values(&self) -> anyhow::Result<Option<Vec<f64>>> {
        Ok(self.schedule_file.as_deref().map(read_vector).transpose()?)
    }
}

/// What is written down when an experiment begins, for its owner alone: a seed is a secret. Each run has a directory
/// with its plan.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Experiment {
    schema: u32,
    task: TaskArgs,
    key_file: Option<PathBuf>,
    seed: Option<u64>,
    runs: Vec<String>,
}

const SCHEMA: u32 = 2;
const EXPERIMENT: &str = "experiment.json";
const RESULTS: &str = "results.json";
const REPORT: &str = "report.html";
const LOCK: &str = "lock";

pub fn run(args: &Args) -> anyhow::Result<Report> {
    let (folder, experiment, task, _lock) = match &args.resume {
        Some(folder) => {
            let experiment = Experiment::read(folder)?;
            let lock = hold(folder)?;
            let task = Task::open(&experiment.task)?;
            (folder.clone(), experiment, task, lock)
        }
        None => {
            let task = Task::open(&args.task)?;
            let folder =
                args.out.clone().unwrap_or_else(|| PathBuf::from(format!("runs/{}", clock::compact())));
            let (experiment, lock) = begin(args, &task, &folder)?;
            (folder, experiment, task, lock)
        }
    };
    eprintln!("{}", task.describe());
    let key = match (&experiment.key_file, experiment.seed) {
        (Some(path), _) => KeySource::File(path.clone()),
        (None, Some(seed)) => KeySource::Seed(seed),
        (None, None) => KeySource::System,
    };
    let mut ended = Vec::new();
    for (index, name) in experiment.runs.iter().enumerate() {
        let place = folder.join(name);
        let plan = run::plan(&place)?;
        let label = format!("[{}/{}] {}", index + 1, experiment.runs.len(), plan.recipe().mechanism);
        let outcome = match run::outcome(&place)? {
            Some(outcome) => outcome,
            None => with_task!(&task, |model, split| {
                train_one(&place, &folder, model, split, &plan, &key, &label, args.burn)?
            }),
        };
        ended.push(Ended { plan, outcome });
    }
    finish(&folder, &task, &ended)
}

/// Keeps other processes out of a directory as long as it lives.
fn hold(folder: &Path) -> dpmf::Result<Lock> {
    Place::from(folder.join(LOCK)).lock()
}

/// Makes all plans, once, and writes them down with the experiment. The directory is made when nothing can fail any more
/// but the disk and the ledger.
fn begin(args: &Args, task: &Task, folder: &Path) -> anyhow::Result<(Experiment, Lock)> {
    let vacant = || -> anyhow::Result<()> {
        if folder.join(EXPERIMENT).exists() {
            let name = folder.display();
            bail!("{name} holds a run: go on with --resume {name}, or choose another --out");
        }
        Ok(())
    };
    vacant()?;
    let recipes = recipes(args, task)?;
    let spinner = Spinner::new("planning");
    let problem: Problem = recipes[0].problem()?;
    let mut plans = Vec::new();
    for recipe in recipes {
        spinner.say(&recipe.mechanism.to_string());
        let name = format!("{}-{}", recipe.mechanism.to_string().replace([':', '='], "-"), recipe.seed);
        plans.push((name, Plan::for_problem(recipe, &problem, &mut |p| spinner.observe(p))?));
    }
    let fresh = !folder.exists();
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let lock = hold(folder)?;
    // Another process may have been first while this one was planning.
    vacant()?;
    if let Some(path) = &args.ledger
        && let Err(refused) = enter(path, task, &plans)
    {
        if fresh {
            // The refusal is what counts.
            let _ = fs::remove_dir_all(folder);
        }
        return Err(refused);
    }
    for (name, plan) in &plans {
        let place = folder.join(name);
        run::save_plan(&place, plan)?;
    }
    let experiment = Experiment {
        schema: SCHEMA,
        task: args.task.clone(),
        key_file: args.key_file.clone(),
        seed: args.seed,
        runs: plans.into_iter().map(|(name, _)| name).collect(),
    };
    let text = serde_json::to_vec_pretty(&experiment)?;
    disk::replace(folder.join(EXPERIMENT), Access::Owner, |file| file.write_all(&text))?;
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
        let (rounds, guarantee) = counted(statement.calibration());
        releases.push(Release {
            id: format!("{training}/{name}"),
            time: clock::now(),
            what: format!("train {name} on {}", task.name()),
            noise_multiplier: statement.calibration().noise_multiplier(),
            sampling: plan.recipe().sampling,
            rounds,
            guarantee,
        });
    }
    ledger.record(releases)?;
    let (spent, budget) = (ledger.ledger().spent()?, ledger.ledger().epsilon());
    eprintln!(
        "{}: ε = {} of {} spent with this training",
        path.display(),
        epsilon_for_people(spent),
        epsilon_for_people(budget)
    );
    Ok(())
}

impl Experiment {
    fn read(folder: &Path) -> anyhow::Result<Self> {
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
                "{} is of another version of dpmf: end the run with the version that began it",
                path.display()
            );
        }
        let experiment: Self = serde_json::from_slice(&text).with_context(cannot)?;
        // A name with a path in it would lead out of the directory, key and all.
        if let Some(name) =
            experiment.runs.iter().find(|name| Path::new(name).file_name() != Some(name.as_ref()))
        {
            bail!("{} names the run {name:?}, which is no directory in it", path.display());
        }
        Ok(experiment)
    }
}

fn recipes(args: &Args, task: &Task) -> anyhow::Result<Vec<Recipe>> {
    if args.repeats == 0 {
        bail!("--repeats is 0, but at least one run is needed");
    }
    // Several models of the same users add up: on somebody's own data there is one unless more are asked for.
    let names: &[&str] =
        if args.task.is_own()? { &["optimal"] } else { &["optimal", "honaker-online", "independent"] };
    let wanted = match args.mechanism.is_empty() {
        true => names.iter().map(|name| name.parse()).collect::<dpmf::Result<Vec<Choice>>>()?,
        false => args.mechanism.clone(),
    };
    let base = args.recipe.build(task)?;
    let delta = args.recipe.delta;
    let privacy = match args.noise_multiplier {
        Some(noise_multiplier) => Privacy::NoiseMultiplier { noise_multiplier, delta },
        None => Privacy::Epsilon { epsilon: args.epsilon, delta },
    };
    let mut mechanisms: Vec<Choice> = Vec::new();
    for choice in wanted {
        let mechanism = budgeted(choice, args.recipe.dense, args.recipe.buffers)?;
        if mechanisms.contains(&mechanism) {
            bail!("--mechanism names {mechanism} twice");
        }
        mechanisms.push(mechanism);
    }
    let all = (0..args.repeats as u64).flat_map(|seed| {
        let base = &base;
        mechanisms.iter().map(move |&mechanism| Recipe { mechanism, privacy, seed, ..base.clone() })
    });
    Ok(all.collect())
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
    let bar = bar(run.rounds(), label);
    let mut burned = false;
    loop {
        bar.set_position(run.done() as u64);
        bar.set_message(state(&run));
        if interrupted() {
            run.checkpoint()?;
            bar.finish_and_clear();
            let name = folder.display();
            bail!("interrupted after {} rounds; go on with dpmf train --resume {name}", run.done());
        }
        match run.advance() {
            Ok(true) => {}
            Ok(false) => break,
            Err(dpmf_train::Error::Dpmf(dpmf::Error::StepReused { .. })) if burn && !burned => {
                let step = run.burn()?;
                burned = true;
                bar.println(format!("round {step} burned: its noise is never used"));
            }
            Err(error @ dpmf_train::Error::Dpmf(dpmf::Error::StepReused { .. })) => {
                bar.finish_and_clear();
                return Err(anyhow::Error::new(error)
                    .context("the round was released before the crash, and now comes out differently; --burn gives it up"));
            }
            Err(error) => return Err(error.into()),
        }
    }
    bar.finish_and_clear();
    let outcome = run.finish(Purpose::Report)?;
    if let Some(test) = outcome.test {
        let time = duration(outcome.seconds);
        eprintln!("{label}: test accuracy {:.4}, loss {:.4}, {time}", test.accuracy, test.loss);
    }
    Ok(outcome)
}

fn bar(rounds: usize, label: &str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(rounds as u64), ProgressDrawTarget::stderr());
    let template = "{prefix} {bar:24} {pos}/{len} rounds, {msg}, {eta} left";
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.set_prefix(label.to_owned());
    bar
}

fn state<M, D>(run: &Run<'_, M, D>) -> String
where
    M: Model,
    D: Users<Domain = M::Domain>,
{
    let loss = run.curve().last().map_or(f64::NAN, |point| point.loss);
    match run.epsilon_spent() {
        Some(epsilon) => format!("validation loss {loss:.4}, ε spent {epsilon:.3}"),
        None => format!("validation loss {loss:.4}, no privacy"),
    }
}

/// Whether Ctrl-C was pressed; a second one ends the program at once.
pub fn interrupted() -> bool {
    static PRESSED: OnceLock<&'static AtomicBool> = OnceLock::new();
    static FLAG: AtomicBool = AtomicBool::new(false);
    let flag = PRESSED.get_or_init(|| {
        // Where no handler can be set, Ctrl-C ends the program, and the journal keeps the run safe.
        let _ = ctrlc::set_handler(|| {
            if FLAG.swap(true, Ordering::SeqCst) {
                std::process::exit(130);
            }
        });
        &FLAG
    });
    flag.load(Ordering::SeqCst)
}

fn finish(folder: &Path, task: &Task, ended: &[Ended]) -> anyhow::Result<Report> {
    let summary = Summary::new(task.name(), task.notes(), task.users().0, task.parameters(), ended)?;
    let report = folder.join(REPORT);
    let mut json = serde_json::to_value(&summary)?;
    json["report"] = json!(report);
    write(&folder.join(RESULTS), &serde_json::to_vec_pretty(&json)?)?;
    write(&report, html::page(task, &summary, ended)?.as_bytes())?;
    let mut text = String::new();
    if let (Some(statement), Some(guarantee)) = (&summary.statement, summary.guarantee()) {
        text += &statement.to_string();
        if !summary.notes.is_empty() {
            text += "About the data:\n";
            summary.notes.iter().for_each(|note| text += &format!("  - {note}\n"));
        }
        text += "\n";
        if summary.together.is_some() {
            text += &format!("{}.\n\n", html::capitalized(&guarantee));
        }
    }
    text += &format!("{}\n\nreport: {}", table(&html::HEAD, &html::cells(&summary)), report.display());
    let diverged: Vec<String> = summary
        .runs
        .iter()
        .filter(|run| run.diverged)
        .map(|run| format!("{} (seed {})", run.mechanism, run.seed))
        .collect();
    if !diverged.is_empty() {
        text += &format!(
            "\n\na loss above that of the untrained model: {}. The steps are too large for the noise: take a smaller \
             --server-lr, or more --clients a round, whose mean has less noise",
            diverged.join(", ")
        );
    }
    Ok(Report::new(json, text))
}

fn write(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    Ok(disk::replace(path, Access::Everyone, |file| file.write_all(bytes))?)
}
