//! `dpmf sweep`.

mod page;
mod row;

use crate::failure::{self, Failure};
use crate::interrupt::{self, Hold};
use crate::memory;
use crate::output;
use crate::plan::cache;
use crate::progress::Bar;
use crate::report::{Report, small, table};
use crate::train::task::TaskArgs;
use crate::train::{budgeted, fits, repeatable};
use crate::value_parsers;
use crate::warnings;
use crate::workload::{BYTES_A_STEP, count};
use anyhow::{Context, bail};
use dpmf::accounting::statement::epsilon_for_people;
use dpmf::accounting::{Accountant, Adjacency, calibrate, compose};
use dpmf::disk::{Access, DiskPath};
use dpmf::noise::NoiseKey;
use dpmf::planner::{self, Planner};
use dpmf::{Participation, Sampling};
use dpmf_train::run::{DataDigest, Run, digest};
use dpmf_train::task::{self as usual, Length, Task};
use dpmf_train::{
    KeySource, Local, MechanismChoice, Outcome, Pace, Privacy, Purpose, RunPlanner, Settings, Steps,
    with_task,
};
use row::{Measure, Row, head};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Train over a grid of settings, choose on validation users, report on test users.
///
/// Every combination of mechanism, noise, schedule and cohort is a row of the result. For each row, the learning rates,
/// clip and momentum are tuned on validation users (one run of --tune-rounds for each combination). The best settings
/// are then repeated with other seeds, and only these repetitions are scored on test users. Runs are independent and
/// run in parallel. Results are appended to DIR/runs.jsonl as they arrive, so an interrupted sweep continues when you
/// start it again. DIR/report.html shows what was chosen and how, even after an interruption.
///
/// With --epochs, every user takes part that many times, and mechanisms may also be planned or dp-sgd, each with its
/// own sampler.
///
/// ε covers each run on its own, not the tuning.
#[derive(clap::Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "Examples:\n  dpmf sweep --mechanism optimal,honaker-online,none --noise-multiplier 1.364,2.728 \
    --server-lr 0.25,0.5,1 --repeats 3 --out sweep\n  dpmf sweep --epochs 5 --clients 500 --mechanism planned,dp-sgd \
    --epsilon 1,2,4 --server-lr 0.25,0.5,1 --out epochs\n  dpmf sweep --config grid.toml --out sweep\n\nA grid.toml:\n  \
    mechanism = [\"optimal\", \"none\"]\n  noise_multiplier = [1.364]\n  server_lr = [0.25, 0.5]\n  schedule = \
    [\"constant\", \"cooldown:0.25:0.05\"]"
)]
pub struct Args {
    #[command(flatten)]
    task: TaskArgs,

    #[command(flatten)]
    grid: Grid,

    /// Settings that are not swept
    #[command(flatten)]
    fixed: FixedArgs,

    /// Read the grid from a TOML file with the same names; flags override it
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Repetitions of the best settings in each row
    #[arg(long, value_name = "K", value_parser = count, default_value = "3")]
    repeats: usize,

    /// Rounds of a tuning run; by default as many as in the other runs
    #[arg(long, value_name = "n", value_parser = count)]
    tune_rounds: Option<usize>,

    /// If the best server learning rate of a row is the smallest or largest one tried, try the next one beyond it
    #[arg(long)]
    widen: bool,

    /// Number of runs at the same time; by default one for each core
    #[arg(long, value_name = "J", value_parser = count)]
    jobs: Option<usize>,

    /// Seed of all noise in the sweep: for experiments only, never for a release
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,

    /// Directory of the results; an existing sweep continues, and rows of other grids, seeds and data are kept
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

/// The swept settings.
#[derive(clap::Args, Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[command(next_help_heading = "Grid (lists)")]
struct Grid {
    /// Mechanisms, or none for no noise; with --epochs also planned and dp-sgd
    #[arg(
        long, value_name = "NAME,…", value_delimiter = ',',
        value_parser = value_parsers::trained::<MechanismChoice>(), hide_possible_values = true
    )]
    mechanism: Vec<MechanismChoice>,

    /// ε of the guarantee
    #[arg(long, value_name = "ε,…", value_delimiter = ',', conflicts_with = "noise_multiplier")]
    epsilon: Vec<f64>,

    /// Noise multipliers
    #[arg(long, value_name = "σ,…", value_delimiter = ',')]
    noise_multiplier: Vec<f64>,

    /// Schedules; by default the one of `dpmf train`, so that learning rates carry over
    #[arg(long, value_name = "SCHEDULE,…", value_delimiter = ',')]
    schedule: Vec<String>,

    /// Users in a round
    #[arg(long, value_name = "c,…", value_delimiter = ',', value_parser = count)]
    clients: Vec<usize>,

    /// Server learning rates, tuned
    #[arg(long, value_name = "η,…", value_delimiter = ',')]
    server_lr: Vec<f64>,

    /// Client learning rates, tuned
    #[arg(long, value_name = "η,…", value_delimiter = ',')]
    client_lr: Vec<f64>,

    /// Clips, tuned
    #[arg(long, value_name = "ζ,…", value_delimiter = ',')]
    clip: Vec<f64>,

    /// Momenta, tuned
    #[arg(long, value_name = "β,…", value_delimiter = ',')]
    momentum: Vec<f64>,
}

/// Settings that every run shares.
#[derive(clap::Args, Clone)]
#[command(next_help_heading = "Training")]
struct FixedArgs {
    /// Passes over the users: each user takes part this many times, on average
    #[arg(
        long, value_name = "K",
        value_parser = count, conflicts_with_all = ["rounds", "tune_rounds", "participation"]
    )]
    epochs: Option<usize>,

    /// Rounds of training
    #[arg(long, value_name = "n", value_parser = count)]
    rounds: Option<usize>,

    /// How often a user takes part: single, epochs:K or min-separation:B[:K] [default: single, or the epochs]
    #[arg(long, value_name = "PATTERN")]
    participation: Option<Participation>,

    /// Fraction of past noise that later gradients undo at the largest step, for plans: see `dpmf plan`
    #[arg(long, alias = "pull", value_name = "π", default_value_t = planner::PULL)]
    noise_decay: f64,

    /// Whether plans may rely on a secret sampler: auto or none
    #[arg(long, value_name = "auto|none", default_value = "auto", value_parser = ["auto", "none"])]
    sampling: String,

    /// δ of the guarantee
    #[arg(long, value_name = "δ", default_value_t = usual::DELTA)]
    delta: f64,

    /// Examples in a user's local batch
    #[arg(long, value_name = "b", value_parser = count, default_value_t = usual::CLIENT_BATCH)]
    client_batch: usize,

    /// Use optimal mechanisms as dense rows instead of streams with a few buffers
    #[arg(long)]
    dense: bool,

    /// Largest number of model-sized buffers for the noise [default: 8 for a plan; for optimal streams, as few as stay
    /// within 1e-4 of the bound]
    #[arg(long, value_name = "R", value_parser = count)]
    buffers: Option<usize>,
}

impl FixedArgs {
    /// The settings that all runs with so many clients share.
    fn settings(&self, task: &Task, clients: Option<usize>) -> anyhow::Result<Settings> {
        let length = match (self.rounds, self.epochs) {
            (Some(rounds), _) => Length::Rounds(rounds),
            (None, Some(epochs)) => Length::Epochs(epochs),
            (None, None) => Length::Pass,
        };
        let mut settings = task.settings(length, clients, Sampling::None, self.participation)?;
        memory::check("--rounds", settings.rounds, settings.rounds as f64 * BYTES_A_STEP)?;
        settings.limits.buffers = self.buffers.unwrap_or(settings.limits.buffers);
        settings.limits.trusted = self.sampling == "auto";
        settings.limits.pull = self.noise_decay;
        Ok(settings)
    }
}

impl Grid {
    /// The lists of a file where no flag gave one.
    fn or(self, file: Grid) -> Self {
        fn either<T>(flag: Vec<T>, file: Vec<T>) -> Vec<T> {
            if flag.is_empty() { file } else { flag }
        }
        let noise_given = !self.epsilon.is_empty() || !self.noise_multiplier.is_empty();
        let noise = |flag: Vec<f64>, file: Vec<f64>| if noise_given { flag } else { either(flag, file) };
        Self {
            mechanism: either(self.mechanism, file.mechanism),
            epsilon: noise(self.epsilon, file.epsilon),
            noise_multiplier: noise(self.noise_multiplier, file.noise_multiplier),
            schedule: either(self.schedule, file.schedule),
            clients: either(self.clients, file.clients),
            server_lr: either(self.server_lr, file.server_lr),
            client_lr: either(self.client_lr, file.client_lr),
            clip: either(self.clip, file.clip),
            momentum: either(self.momentum, file.momentum),
        }
    }
}

/// One row of the result: settings that differ in what is tuned.
struct Group {
    candidates: Vec<Settings>,
}

/// How often a row's server learning rates are widened at most.
const WIDENINGS: usize = 8;

impl Group {
    /// A run on validation users for each candidate, or none where there is no choice.
    fn tuning(&self, args: &Args, task: &str) -> anyhow::Result<Vec<Job>> {
        let open = if self.candidates.len() > 1 { &self.candidates[..] } else { &[] };
        open.iter()
            .map(|settings| {
                let rounds = args.tune_rounds.unwrap_or(settings.rounds).min(settings.rounds);
                Job::new(Settings { rounds, ..settings.clone() }, Purpose::Tuning, task)
            })
            .collect()
    }

    /// Index of the candidate that is best on validation users; of equals, the one with the smaller steps.
    fn best(&self, args: &Args, task: &str, sweep: &Sweep<'_>) -> anyhow::Result<usize> {
        let mut best = (0, f64::NEG_INFINITY);
        for (index, job) in self.tuning(args, task)?.iter().enumerate() {
            let line = sweep.line(&job.id).context("a tuning run has no result")?;
            let score =
                if line.outcome.diverged { f64::NEG_INFINITY } else { line.outcome.validation.merit() };
            let rate = |index: usize| self.candidates[index].server_learning_rate;
            if score > best.1 || score == best.1 && rate(index) < rate(best.0) {
                best = (index, score);
            }
        }
        Ok(best.0)
    }

    /// A name of the row: of all that decides it but what is tuned.
    fn id(&self, task: &str) -> anyhow::Result<String> {
        let Some(mut row) = self.candidates.first().cloned() else {
            bail!("a row of the grid has no settings")
        };
        if let Local::Sgd { learning_rate, .. } = &mut row.recipe.local {
            *learning_rate = 0.0;
        }
        (row.optimizer.momentum, row.clip, row.server_learning_rate) = (0.0, 0.0, 0.0);
        hash(&(row, task))
    }

    /// The runs on test users.
    fn repetitions(&self, args: &Args, best: usize, task: &str) -> anyhow::Result<Vec<Job>> {
        (1..=args.repeats as u64)
            .map(|seed| {
                let mut settings = self.candidates[best].clone();
                settings.recipe.seed = seed;
                Job::new(settings, Purpose::Report, task)
            })
            .collect()
    }

    /// Server learning rates that have been tried, each with the best merit on validation users that it gave.
    fn tried(&self, args: &Args, task: &str, sweep: &Sweep<'_>) -> anyhow::Result<Vec<(f64, f64)>> {
        let (mut tried, measure): (Vec<(f64, f64)>, _) = (Vec::new(), Measure::new(sweep.task));
        for line in self.tuning(args, task)?.iter().filter_map(|job| sweep.line(&job.id)) {
            let rate = line.settings.server_learning_rate;
            let Some(merit) = measure.of(&line.outcome.validation) else { continue };
            match tried.iter_mut().find(|known| known.0 == rate) {
                Some(known) => known.1 = measure.better(known.1, merit),
                None => tried.push((rate, merit)),
            }
        }
        tried.sort_by(|a, b| a.0.total_cmp(&b.0));
        Ok(tried)
    }

    /// Adds the next server learning rate beyond the best one, where that is the smallest or the largest tried.
    fn widen(&mut self, best: usize) -> anyhow::Result<bool> {
        let mut rates: Vec<f64> =
            self.candidates.iter().map(|settings| settings.server_learning_rate).collect();
        rates.sort_by(f64::total_cmp);
        rates.dedup();
        let best = self.candidates[best].clone();
        let rate = best.server_learning_rate;
        let neighbour = match rates[..] {
            [first, second, ..] if rate == first => second,
            [.., second, last] if rate == last => second,
            _ => return Ok(false),
        };
        let settings = Settings { server_learning_rate: rate * (rate / neighbour), ..best };
        settings.workload()?;
        self.candidates.push(settings);
        Ok(true)
    }
}

/// A run to be done.
struct Job {
    settings: Settings,
    purpose: Purpose,
    id: String,
}

impl Job {
    fn new(settings: Settings, purpose: Purpose, task: &str) -> anyhow::Result<Self> {
        let id = hash(&(&settings, purpose, task))?;
        Ok(Self { settings, purpose, id })
    }
}

/// A name for whatever decides something.
fn hash(parts: &impl Serialize) -> anyhow::Result<String> {
    let text = serde_json::to_string(parts)?;
    Ok(Sha256::digest(text).iter().take(12).map(|byte| format!("{byte:02x}")).collect())
}

/// A line of runs.jsonl.
#[derive(Serialize, Deserialize, Clone)]
struct Line {
    id: String,
    purpose: Purpose,
    /// What was asked for.
    settings: Settings,
    /// The mechanism, the sampling and the participation that were planned.
    mechanism: String,
    sampling: Sampling,
    participation: Participation,
    /// σ and ε of the plan; nothing without noise.
    noise_multiplier: Option<f64>,
    epsilon: Option<f64>,
    outcome: Outcome,
}

pub fn run(args: &Args) -> anyhow::Result<Report> {
    let file = match &args.config {
        Some(path) => {
            let bytes = DiskPath::from(path).read()?;
            basic_toml::from_slice(&bytes).with_context(|| format!("cannot read {}", path.display()))?
        }
        None => Grid::default(),
    };
    let grid = args.grid.clone().or(file);
    output::check_folder(&args.out)?;
    if args.out.is_dir() {
        for name in [RUNS, SUMMARY, RESULTS] {
            output::check(&args.out.join(name))?;
        }
    }
    let task = args.task.open()?;
    fits(&task)?;
    let mut groups = groups(args, &grid, &task)?;
    let _hold = Hold::new();
    fs::create_dir_all(&args.out).with_context(|| format!("cannot create {}", args.out.display()))?;
    let digest = with_task!(&task, |_model, split| digest(&split.train));
    // All that decides a run beside its settings.
    let data = digest.mark(&marking_key(&args.out)?, "sweep");
    let name = format!("{} {data} seed {}", serde_json::to_string(&args.task)?, args.seed);
    let sweep = Sweep::open(args, &task, digest)?;

    let mut tuning = 0;
    for _ in 0..=WIDENINGS {
        let mut jobs = Vec::new();
        for group in &groups {
            jobs.extend(group.tuning(args, &name)?);
        }
        tuning = jobs.len();
        let done = sweep.all(&jobs, "tuning");
        write_page(args, &sweep, &rows(args, &groups, &name, &sweep)?, tuning)?;
        done?;
        let mut widened = false;
        for group in groups.iter_mut().filter(|_| args.widen) {
            let best = group.best(args, &name, &sweep)?;
            widened |= group.widen(best)?;
        }
        if !widened {
            break;
        }
    }
    let mut jobs = Vec::new();
    for group in &groups {
        jobs.extend(group.repetitions(args, group.best(args, &name, &sweep)?, &name)?);
    }
    let done = sweep.all(&jobs, "repetitions");
    let rows = rows(args, &groups, &name, &sweep)?;
    write_page(args, &sweep, &rows, tuning)?;
    done?;
    report(args, &sweep, &rows, tuning)
}

/// The key under which the names of runs hide what data they are of: made once, for the owner of the directory alone.
fn marking_key(folder: &Path) -> anyhow::Result<NoiseKey> {
    let place = DiskPath::from(folder.join(KEY));
    if !place.exists()? {
        NoiseKey::generate()?.create_file(&place)?;
    }
    Ok(NoiseKey::read_file(place)?)
}

/// The rows of the result, with what there is of them so far.
fn rows(args: &Args, groups: &[Group], task: &str, sweep: &Sweep<'_>) -> anyhow::Result<Vec<Row>> {
    let mut rows = Vec::new();
    for group in groups {
        let best = group.best(args, task, sweep).unwrap_or(0);
        let repetitions = group.repetitions(args, best, task)?;
        let lines: Vec<Line> = repetitions.iter().filter_map(|job| sweep.line(&job.id)).collect();
        let tried = group.tried(args, task, sweep)?;
        let id = group.id(task)?;
        let row =
            Row::new(id, Measure::new(sweep.task), &group.candidates[best], group.candidates.len(), &lines);
        rows.push(Row { tried, ..row });
    }
    Ok(rows)
}

fn write_page(args: &Args, sweep: &Sweep<'_>, rows: &[Row], tuning: usize) -> anyhow::Result<()> {
    let text = page::page(sweep.task, rows, tuning, sweep.together(args.fixed.delta)?.as_ref());
    let path = args.out.join(REPORT);
    write(&path, text.as_bytes())
}

fn groups(args: &Args, grid: &Grid, task: &Task) -> anyhow::Result<Vec<Group>> {
    repeatable(args.repeats)?;
    let or = |list: &[f64], default: f64| if list.is_empty() { vec![default] } else { list.to_vec() };
    let delta = args.fixed.delta;
    let noises: Vec<Privacy> = match (grid.epsilon.is_empty(), grid.noise_multiplier.is_empty()) {
        (false, false) => bail!("give either epsilon or noise_multiplier, not both"),
        (true, true) => vec![Privacy::Epsilon { epsilon: 2.0, delta }],
        (false, true) => grid.epsilon.iter().map(|&epsilon| Privacy::Epsilon { epsilon, delta }).collect(),
        (true, false) => {
            let multiplier = |&noise_multiplier| Privacy::NoiseMultiplier { noise_multiplier, delta };
            grid.noise_multiplier.iter().map(multiplier).collect()
        }
    };
    let names: &[&str] = match args.fixed.epochs {
        Some(_) => &["planned", "dp-sgd", "none"],
        None => &["optimal", "honaker-online", "independent", "none"],
    };
    let mechanisms = match grid.mechanism.is_empty() {
        true => names.iter().map(|name| name.parse()).collect::<Result<Vec<MechanismChoice>, _>>()?,
        false => grid.mechanism.clone(),
    };
    let optional = |list: &[f64]| match list.is_empty() {
        true => vec![None],
        false => list.iter().copied().map(Some).collect(),
    };
    let cohorts: Vec<Option<usize>> = match grid.clients.is_empty() {
        true => vec![None],
        false => grid.clients.iter().copied().map(Some).collect(),
    };
    let mut groups = Vec::new();
    for &clients in &cohorts {
        let base = args.fixed.settings(task, clients)?;
        let schedules: Vec<Steps> = match grid.schedule.is_empty() {
            true => vec![base.schedule.clone()],
            false => grid.schedule.iter().cloned().map(Steps::Schedule).collect(),
        };
        let mut tuned = Vec::new();
        for momentum in or(&grid.momentum, base.optimizer.momentum) {
            for clip in or(&grid.clip, base.clip) {
                for client_rate in optional(&grid.client_lr) {
                    for server_learning_rate in or(&grid.server_lr, base.server_learning_rate) {
                        let mut settings = Settings { clip, server_learning_rate, ..base.clone() };
                        settings.optimizer.momentum = momentum;
                        settings.recipe.local =
                            task.local(client_rate, usual::CLIENT_PASSES, args.fixed.client_batch)?;
                        tuned.push(settings);
                    }
                }
            }
        }
        for schedule in &schedules {
            for &mechanism in &mechanisms {
                let mechanism = budgeted(mechanism, args.fixed.dense, args.fixed.buffers)?;
                // Without noise there is nothing to vary in it.
                let none = mechanism == MechanismChoice::None;
                let noises = if none { &noises[..1] } else { &noises[..] };
                for &privacy in noises {
                    let mut candidates = tuned.clone();
                    for settings in &mut candidates {
                        (settings.schedule, settings.privacy) = (schedule.clone(), privacy);
                        settings.recipe.mechanism = mechanism;
                        settings.workload()?;
                    }
                    groups.push(Group { candidates });
                }
            }
        }
    }
    Ok(groups)
}

/// Runs on disk, done and to be done.
struct Sweep<'a> {
    task: &'a Task,
    digest: DataDigest,
    jobs: usize,
    key: KeySource,
    /// Plans are made one at a time, and kept.
    planner: Mutex<RunPlanner>,
    lines: Mutex<(File, HashMap<String, Line>)>,
}

/// Most runs at a time: each is a thread.
const MOST_JOBS: usize = 256;

const RUNS: &str = "runs.jsonl";
const KEY: &str = "key";
const SUMMARY: &str = "summary.csv";
const RESULTS: &str = "results.json";
const REPORT: &str = "report.html";

impl<'a> Sweep<'a> {
    fn open(args: &Args, task: &'a Task, digest: DataDigest) -> anyhow::Result<Self> {
        let path = args.out.join(RUNS);
        let mut known = HashMap::new();
        let mut whole = 0;
        if path.exists() {
            let text =
                fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
            for line in text.split_inclusive('\n') {
                let Ok(parsed) = serde_json::from_str::<Line>(line) else {
                    // A torn last line is what a crash leaves: that run is done again.
                    if whole + (line.len() as u64) < text.len() as u64 || line.ends_with('\n') {
                        bail!(
                            "{} holds lines that this version did not write: choose another --out",
                            path.display()
                        );
                    }
                    break;
                };
                whole += line.len() as u64;
                known.insert(parsed.id.clone(), parsed);
            }
        }
        let writable = || format!("cannot write {}", path.display());
        let mut options = OpenOptions::new();
        options.create(true).append(true);
        // Scores of held-out users in full: nobody but the owner needs them.
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let file = options.open(&path).with_context(writable)?;
        file.set_len(whole).with_context(writable)?;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let jobs = args.jobs.unwrap_or(cores).clamp(1, MOST_JOBS);
        let planner = Mutex::new(RunPlanner::new(Planner::new(cache(false))));
        let (key, lines) = (KeySource::Seed(args.seed), Mutex::new((file, known)));
        Ok(Self { task, digest, jobs, key, planner, lines })
    }

    fn line(&self, id: &str) -> Option<Line> {
        self.lines.lock().ok()?.1.get(id).cloned()
    }

    /// Does the jobs that are not done yet, several at a time.
    fn all(&self, jobs: &[Job], label: &str) -> anyhow::Result<()> {
        let open: Vec<&Job> = jobs.iter().filter(|job| self.line(&job.id).is_none()).collect();
        let bar = Bar::new(format!("{label}, {} runs", jobs.len()), jobs.len(), jobs.len() - open.len());
        let next = AtomicUsize::new(0);
        let work = || -> anyhow::Result<()> {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build()?;
            while let Some(job) = open.get(next.fetch_add(1, Ordering::Relaxed)) {
                let line = pool.install(|| self.one(job))?;
                bar.say(&format!("{} {:.4}", job.settings.recipe.mechanism, line.outcome.validation.merit()));
                bar.add(1);
                self.record(line)?;
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..self.jobs).map(|_| scope.spawn(work)).collect();
            let joined = workers.into_iter().map(|worker| {
                worker.join().unwrap_or_else(|_| Err(anyhow::anyhow!("a run failed without a message")))
            });
            joined.collect::<Vec<_>>().into_iter().collect::<anyhow::Result<Vec<()>>>()
        })
        .map_err(|error| match failure::kind(&error) {
            "interrupted" => {
                let how = "interrupted; run the same command again to continue the sweep";
                Failure::interrupted(how).into()
            }
            _ => error,
        })?;
        Ok(())
    }

    fn one(&self, job: &Job) -> anyhow::Result<Line> {
        with_task!(self.task, |model, split| {
            let pace = Pace::default();
            let plan = {
                let mut planner =
                    self.planner.lock().map_err(|_| anyhow::anyhow!("a run failed while it was planned"))?;
                planner.plan(&job.settings, &mut |_| match interrupt::requested() {
                    true => ControlFlow::Break(()),
                    false => ControlFlow::Continue(()),
                })?
            };
            let mut run = Run::in_memory(model, split, &self.digest, &plan, pace, &self.key)?;
            while run.advance()? {
                if interrupt::requested() {
                    bail!(Failure::interrupted("interrupted"));
                }
            }
            let statement = plan.mechanism().and_then(|mechanism| mechanism.privacy());
            Ok(Line {
                id: job.id.clone(),
                purpose: job.purpose,
                settings: job.settings.clone(),
                mechanism: plan.mechanism_name(),
                sampling: plan.sampling(),
                participation: plan.participation(),
                noise_multiplier: statement.map(|statement| statement.calibration().noise_multiplier()),
                epsilon: statement.map(|statement| statement.calibration().epsilon()),
                outcome: run.finish(job.purpose, None)?,
            })
        })
    }

    /// All private runs of the sweep together, tuning included: they saw the same users. Those without sampling compose as
    /// Gaussians; ε and δ of the others are added, which is more than they cost. Tuning decides what is trained next,
    /// but not
    /// how much noise it gets: multipliers, ε and δ follow from the grid alone, and for such both rules hold.
    fn together(&self, delta: f64) -> anyhow::Result<Option<Together>> {
        let lines =
            self.lines.lock().map_err(|_| anyhow::anyhow!("a run failed while writing its result"))?;
        let (mut noise, mut sampled) = (Vec::new(), Vec::new());
        for line in lines.1.values() {
            match (line.noise_multiplier, line.epsilon) {
                (Some(sigma), _) if line.sampling == Sampling::None => noise.push(sigma),
                (Some(_), Some(epsilon)) => sampled.push(epsilon),
                _ => {}
            }
        }
        let models = noise.len() + sampled.len();
        if models == 0 {
            return Ok(None);
        }
        let (mut epsilon, mut total) = (sampled.iter().sum::<f64>(), delta * sampled.len() as f64);
        if !noise.is_empty() {
            let mu = calibrate::mu(compose(&noise)?, Adjacency::default())?;
            epsilon += Accountant::Exact.epsilon(mu, delta)?;
            total += delta;
        }
        Ok(Some(Together { models, epsilon, delta: total }))
    }

    fn record(&self, line: Line) -> anyhow::Result<()> {
        let text = format!("{}\n", serde_json::to_string(&line)?);
        let mut lines =
            self.lines.lock().map_err(|_| anyhow::anyhow!("a run failed while writing its result"))?;
        lines.0.write_all(text.as_bytes()).context("cannot append to runs.jsonl")?;
        lines.1.insert(line.id.clone(), line);
        Ok(())
    }
}

/// What all private runs say about a user together.
#[derive(Serialize)]
struct Together {
    models: usize,
    epsilon: f64,
    delta: f64,
}

fn report(args: &Args, sweep: &Sweep<'_>, rows: &[Row], tuning: usize) -> anyhow::Result<Report> {
    let (csv, results) = (args.out.join(SUMMARY), args.out.join(RESULTS));
    let together = sweep.together(args.fixed.delta)?;
    let own: Vec<Value> = rows
        .iter()
        .map(|row| {
            let mut json = row.json();
            json["id"] = json!(row.id);
            json["data"] = json!(sweep.task.name());
            json["seed"] = json!(args.seed);
            json
        })
        .collect();
    let mut json = json!({
        "data": sweep.task.name(),
        "users": sweep.task.users().0,
        "tuning_runs": tuning,
        "together": &together,
        "rows": &own,
        "runs": args.out.join(RUNS),
        "summary": csv,
        "report": args.out.join(REPORT),
    });
    // What other grids found in this directory stays.
    let kept = kept(&results, rows)?;
    let others = kept.len();
    let all: Vec<Value> = kept.into_iter().chain(own.clone()).collect();
    write(&csv, summary(&all).as_bytes())?;
    json["rows"] = json!(all);
    write(&results, &serde_json::to_vec_pretty(&json)?)?;
    json["rows"] = json!(own);
    let cells: Vec<Vec<String>> = rows.iter().map(Row::cells).collect();
    let budget = together.map_or(String::new(), |Together { models, epsilon, delta }| {
        let epsilon = epsilon_for_people(epsilon);
        format!("ε is for each model alone; for all {models} private models together, tuning included: ε = {epsilon} at δ = {}\n\n", small(delta))
    });
    let also = if others > 0 { format!(", with {others} rows of other grids") } else { String::new() };
    let epsilon = rows.iter().filter_map(|row| row.epsilon).reduce(f64::max);
    let warnings = warnings::about(epsilon, Some(args.fixed.delta), Some(sweep.task.users().0));
    warnings::tell(&warnings);
    let text = format!(
        "{}\n\n{budget}{tuning} tuning runs; all runs: {}\nsummary: {}{also}\nreport: {}",
        table(&head(Measure::new(sweep.task)), &cells),
        args.out.join(RUNS).display(),
        csv.display(),
        args.out.join(REPORT).display()
    );
    Ok(Report::new(json, text).warned(warnings))
}

/// Rows of an earlier sweep in the directory that are none of these.
fn kept(results: &Path, rows: &[Row]) -> anyhow::Result<Vec<Value>> {
    let Some(bytes) = DiskPath::from(results).read_if_any()? else { return Ok(Vec::new()) };
    let cannot = || format!("{} is not a result of a sweep: move it away", results.display());
    let mut earlier: Value = serde_json::from_slice(&bytes).with_context(cannot)?;
    let Value::Array(earlier) = earlier["rows"].take() else { bail!(cannot()) };
    let new = |row: &Value| rows.iter().any(|ours| row["id"] == ours.id.as_str());
    Ok(earlier.into_iter().filter(|row| !new(row)).collect())
}

/// The rows as CSV.
fn summary(rows: &[Value]) -> String {
    const COLUMNS: [&str; 21] = [
        "mechanism",
        "sampling",
        "noise_multiplier",
        "epsilon",
        "schedule",
        "clients",
        "rounds",
        "momentum",
        "clip",
        "server_lr",
        "client_lr",
        "runs",
        "diverged",
        "test_accuracy_mean",
        "test_accuracy_low",
        "test_accuracy_high",
        "test_rmse_mean",
        "test_loss_mean",
        "validation_accuracy_mean",
        "data",
        "seed",
    ];
    let cell = |row: &Value, column: &str| {
        let value = match column {
            "test_accuracy_low" => &row["test_accuracy_ci"][0],
            "test_accuracy_high" => &row["test_accuracy_ci"][1],
            _ => &row[column],
        };
        match value {
            Value::Null => String::new(),
            Value::String(text) if text.contains([',', '"', '\n']) => {
                format!("\"{}\"", text.replace('"', "\"\""))
            }
            Value::String(text) => text.clone(),
            other => other.to_string(),
        }
    };
    let line = |row: &Value| COLUMNS.map(|column| cell(row, column)).join(",");
    let lines = [COLUMNS.join(",")].into_iter().chain(rows.iter().map(line));
    lines.map(|line| line + "\n").collect()
}

fn write(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    output::save(path, Access::Everyone, |file| file.write_all(bytes))
}
