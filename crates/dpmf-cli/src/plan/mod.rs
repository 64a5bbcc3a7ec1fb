//! `dpmf plan`.

mod page;
mod server;

use crate::memory;
use crate::output;
use crate::progress::Spinner;
use crate::report::{Report, duration, number, table};
use crate::value_parsers;
use crate::warnings;
use crate::workload::{BYTES_A_STEP, OptimizerArgs, count};
use dpmf::accounting::{Adjacency, PrivacyUnit};
use dpmf::mechanism::Conditions;
use dpmf::planner::{self, FitCache, Plan, Planner, Request};
use dpmf::{Schedule, Workload};
use serde_json::{Value, json};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Instant;

/// Find the mechanism and sampler with the least error for a budget.
///
/// Describe the run: the number of examples, the batch size, the epochs, the optimizer and (ε, δ). The planner compares
/// DP-SGD's independent noise, correlated noise with secret sampling, and correlated noise without sampling, and
/// chooses the one that adds the least error to the iterates. The column rmse is the root mean squared error of an
/// iterate at clip 1: half the rmse is half the noise.
///
/// Amplification by sampling holds only while the sampler's draws stay secret and do not depend on the data. If you
/// have no such sampler, pass --sampling none. Fits and proofs are kept in your cache folder, so the same request is
/// answered at once next time.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  dpmf plan --examples 60000 --batch 1000 --epochs 10 --epsilon 4 --delta 1e-5 \
    --out plan.safetensors\n  dpmf plan --examples 60000 --batch 1000 --epochs 10 --epsilon 4 --delta 1e-5 --momentum 0.9 \
    --schedule cosine:0 --buffers 2\n  dpmf plan --page"
)]
pub struct Args {
    #[command(flatten)]
    run: RunArgs,

    /// ε of the guarantee
    #[arg(long, value_name = "ε", required_unless_present = "page")]
    epsilon: Option<f64>,

    /// δ of the guarantee
    #[arg(long, value_name = "δ", required_unless_present = "page")]
    delta: Option<f64>,

    /// Write the calibrated mechanism with its sampler to this file
    #[arg(long, short, value_name = "FILE", conflicts_with = "page")]
    out: Option<PathBuf>,

    /// Neither read nor write cached fits and proofs
    #[arg(long)]
    no_cache: bool,

    /// Open a planning page in the browser, for this machine only; Ctrl-C stops it
    #[arg(long, conflicts_with_all = ["examples", "batch", "epochs", "epsilon", "delta"])]
    page: bool,

    /// Port of the page; 0 picks a free one
    #[arg(long, default_value_t = 0, requires = "page")]
    port: u16,

    /// Do not open the page in a browser
    #[arg(long, requires = "page")]
    no_open: bool,
}

/// The run that is planned, but for its budget.
#[derive(clap::Args, Clone)]
struct RunArgs {
    /// Number of examples in the data, or of users if users are protected (60000, 1e6, …)
    #[arg(long, value_name = "N", value_parser = count, required_unless_present = "page")]
    examples: Option<usize>,

    /// Average batch size
    #[arg(long, value_name = "B", value_parser = count, required_unless_present = "page")]
    batch: Option<usize>,

    /// Passes over the data
    #[arg(long, value_name = "K", value_parser = count, required_unless_present = "page")]
    epochs: Option<usize>,

    /// Heavy-ball momentum β: m ← βm + g, θ ← θ − ηm
    #[arg(long, value_name = "β", default_value_t = 0.0)]
    momentum: f64,

    #[command(flatten)]
    optimizer: OptimizerArgs,

    /// Step sizes: constant, cooldown:f:e, decay:f:c, cosine:e, warmup:s or exp:r; join several with + to multiply them
    #[arg(long, default_value = "constant")]
    schedule: String,

    /// Largest number of model-sized buffers for the noise
    #[arg(long, value_name = "R", value_parser = count, default_value_t = planner::BUFFERS)]
    buffers: usize,

    /// Which sampler the plan may rely on: auto for the best one, or none
    #[arg(long, value_name = "auto|none", default_value = "auto", value_parser = ["auto", "none"])]
    sampling: String,

    /// Fraction of past noise that later gradients undo at the largest step. With 0, errors are those of the noise
    /// alone; `dpmf train` plans with 0.03
    #[arg(long, alias = "pull", value_name = "π", default_value_t = 0.0)]
    noise_decay: f64,

    /// Clipping norm
    #[arg(long, value_name = "ζ", default_value_t = 1.0)]
    clip: f64,

    /// Which data sets are neighbours: replace-with-zero or add-or-remove
    #[arg(
        long, default_value = "replace-with-zero",
        value_parser = value_parsers::of::<Adjacency>(value_parsers::ADJACENCY), hide_possible_values = true
    )]
    adjacency: Adjacency,

    /// Unit of privacy: record or user
    #[arg(long, value_name = "record|user", default_value = "record")]
    unit: Unit,
}

/// `--unit`.
#[derive(Clone, Copy, clap::ValueEnum)]
enum Unit {
    Record,
    User,
}

impl RunArgs {
    fn request(&self, epsilon: f64, delta: f64) -> anyhow::Result<Request> {
        let [examples, batch] = [self.examples, self.batch].map(|x| x.unwrap_or(0) as u64);
        let epochs = self.epochs.unwrap_or(0);
        let steps = Request::steps(examples, batch, epochs)?;
        memory::check(
            "the number of steps, --examples times --epochs over --batch,",
            steps,
            steps as f64 * BYTES_A_STEP,
        )?;
        let rates = self.schedule.parse::<Schedule>()?.values(steps);
        let workload = Workload::sgd(rates, self.optimizer.with_momentum(self.momentum))?;
        let unit = match self.unit {
            Unit::Record => PrivacyUnit::Record,
            Unit::User => PrivacyUnit::User,
        };
        let request = Request {
            clip: self.clip,
            buffers: self.buffers,
            trusted: self.sampling == "auto",
            pull: self.noise_decay,
            conditions: Conditions { unit, adjacency: self.adjacency, ..Conditions::default() },
            ..Request::new(workload, examples, batch, epochs, epsilon, delta)?
        };
        request.check()?;
        Ok(request)
    }

    /// A few words for titles.
    fn describe(&self) -> String {
        let mut words = Vec::new();
        if self.momentum > 0.0 {
            let nesterov = if self.optimizer.nesterov { "Nesterov momentum" } else { "momentum" };
            words.push(format!("{nesterov} {}", self.momentum));
        }
        if self.optimizer.weight_decay > 0.0 {
            words.push(format!("weight decay {}", self.optimizer.weight_decay));
        }
        if self.noise_decay > 0.0 {
            words.push(format!("noise decay {}", self.noise_decay));
        }
        if self.schedule != "constant" {
            words.push(format!("schedule {}", self.schedule));
        }
        if words.is_empty() { "plain SGD".into() } else { words.join(", ") }
    }
}

pub fn run(args: &Args) -> anyhow::Result<Report> {
    if args.page {
        return page::serve(args.port, !args.no_open, cache(args.no_cache));
    }
    let request = args.run.request(args.epsilon.unwrap_or(f64::NAN), args.delta.unwrap_or(f64::NAN))?;
    if let Some(path) = &args.out {
        output::check(path)?;
    }
    let (spinner, clock) = (Spinner::new("plan"), Instant::now());
    let mut listen = |line: &str| {
        spinner.say(line);
        ControlFlow::Continue(())
    };
    let plan = Planner::new(cache(args.no_cache)).plan(&request, &mut listen)?;
    let seconds = clock.elapsed().as_secs_f64();
    if let Some(path) = &args.out {
        output::save_mechanism(plan.chosen().mechanism(), path)?;
    }
    drop(spinner);
    let mut json = document(&args.run, &plan, seconds);
    if let Some(path) = &args.out {
        json["out"] = json!(path);
    }
    let warnings = warnings::about(args.epsilon, args.delta, args.run.examples);
    warnings::tell(&warnings);
    Ok(Report::new(json, text(args, &plan, seconds)).warned(warnings))
}

/// Where fits are kept between calls: the user's cache folder, if there is one.
pub fn cache(without: bool) -> FitCache {
    match planner::cache_folder() {
        Some(folder) if !without => FitCache::in_folder(folder),
        _ => FitCache::default(),
    }
}

/// The plan for programs.
fn document(run: &RunArgs, plan: &Plan, seconds: f64) -> Value {
    let request = plan.request();
    json!({
        "examples": request.examples,
        "batch": request.batch,
        "epochs": request.epochs,
        "steps": request.workload.steps(),
        "epsilon": request.epsilon,
        "delta": request.delta,
        "workload": run.describe(),
        "chosen": plan.chosen().row(),
        "dp_sgd": plan.dp_sgd().row(),
        "rows": plan.rows(),
        "lower_bound_rmse": plan.lower_bound_rmse(),
        "statement": plan.chosen().mechanism().privacy(),
        "seconds": seconds,
    })
}

fn text(args: &Args, plan: &Plan, seconds: f64) -> String {
    let (request, chosen) = (plan.request(), plan.chosen());
    let dp_sgd = plan.dp_sgd().row();
    let rows: Vec<Vec<String>> = plan
        .rows()
        .into_iter()
        .map(|row| {
            let fitted = row.reason.is_none();
            let whole = |x: Option<usize>| match (x, fitted) {
                (Some(x), _) => x.to_string(),
                (None, true) => "dense".into(),
                (None, false) => "–".into(),
            };
            let shown = |x: Option<f64>| x.map_or_else(|| "–".into(), number);
            let name = if row == dp_sgd { "independent (DP-SGD)".into() } else { row.selector };
            vec![
                name,
                row.sampling,
                whole(row.buffers),
                whole(row.recalls),
                format!("{}{}", if row.estimated { "~" } else { "" }, shown(row.noise_multiplier)),
                shown(row.rmse),
                row.ratio_to_bound.map_or_else(|| "–".into(), |ratio| format!("{ratio:.4}")),
                row.excluded.or(row.reason).unwrap_or_default(),
            ]
        })
        .collect();
    let head = ["mechanism", "sampling", "buffers", "recalls", "σ", "rmse", "to bound", ""];
    let less = 100.0 * (1.0 - chosen.rmse() / plan.dp_sgd().rmse());
    let against = match chosen.is_dp_sgd() {
        true => "which is DP-SGD".to_owned(),
        false => format!("{less:.1} % less noise in the model than DP-SGD"),
    };
    let mut text = format!(
        "{} steps, {}, ε = {}, δ = {:e}: {}\n  use  {} with sampling {}, {against}\n  that is  {}\n",
        request.workload.steps(),
        args.run.describe(),
        request.epsilon,
        request.delta,
        duration(seconds),
        chosen.row().selector,
        chosen.row().sampling,
        chosen.words(),
    );
    text += &format!("\n{}\n\n", table(&head, &rows));
    text += "rmse: root mean squared error of an iterate at clip 1; buffers: model-sized arrays; recalls: earlier rows of noise that a \
        step regenerates; \
             to bound: rmse divided by the least possible without sampling; ~: an estimate, because only the chosen mechanism is \
             proved.\n";
    if let Some(bound) = plan.lower_bound_rmse() {
        text += &format!("Without sampling no mechanism has an rmse below {}.\n", number(bound));
    }
    if let Some(statement) = chosen.mechanism().privacy() {
        text += &format!("\n{statement}");
    }
    if let Some(path) = &args.out {
        text += &format!("\nwritten to {}\n", path.display());
    }
    text
}
