//! `dpmf factorize`.

use crate::output;
use crate::progress::Spinner;
use crate::report::{Report, duration, note, number};
use crate::workload::{SolverArgs, WorkloadArgs, count};
use dpmf::comparison::Row;
use dpmf::family::{Budget, Selector};
use serde_json::json;
use std::path::PathBuf;
use std::time::Instant;

/// Find the optimal factorization of a workload, with its certificate.
///
/// The loss is the total expected squared error of the released iterates for clip 1 and noise multiplier 1. The lower
/// bound holds for every factorization. The solver stops when the relative gap between them is certified to be below
/// --gap.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  dpmf factorize --steps 2048\n  dpmf factorize --steps 2048 --momentum 0.95 \
    --schedule cooldown:0.25:0.05 --out m.safetensors"
)]
pub struct Args {
    #[command(flatten)]
    workload: WorkloadArgs,

    #[command(flatten)]
    solver: SolverArgs,

    /// Also build the stream that training uses: the optimum in a few model-sized buffers
    #[arg(long)]
    streaming: bool,

    /// Number of buffers of the stream
    #[arg(long, value_name = "R", value_parser = count, requires = "streaming", conflicts_with = "tolerance")]
    buffers: Option<usize>,

    /// Number of earlier rows of noise to regenerate in each step, for data that takes part several times
    #[arg(long, value_name = "J", requires = "streaming", conflicts_with = "tolerance")]
    recalls: Option<usize>,

    /// Use the fewest buffers and recalls with a √loss within this relative distance of the lower bound [default: 1e-4,
    /// or 1e-2 for data that takes part several times]
    #[arg(long, value_name = "EXCESS", requires = "streaming")]
    tolerance: Option<f64>,

    /// Write the uncalibrated mechanism to this file, as it will be deployed: the stream, or the dense matrix
    #[arg(long, short, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Share of the error above which what is written is said to be worse than what was found.
const WORSE: f64 = 1e-4;

pub fn run(args: &Args) -> anyhow::Result<Report> {
    if let Some(path) = &args.out {
        output::check(path)?;
    }
    let problem = args.workload.problem(&args.solver)?;
    let spinner = Spinner::new("factorize").towards(args.solver.gap);
    let clock = Instant::now();
    let mut observe = |progress: &dpmf::factorize::Progress| spinner.observe(progress);
    let optimum = problem.optimum(&mut observe)?;
    let seconds = clock.elapsed().as_secs_f64();
    let certificate = optimum.certificate;
    let iteration = dpmf::factorize::Iteration::from(args.solver.iteration);
    let mut json = json!({
        "steps": problem.steps(),
        "participation": problem.participation().pattern(problem.steps())?,
        "solver": optimum.solver,
        "iteration": iteration,
        "sqrt_loss": certificate.loss.sqrt(),
        "loss": certificate.loss,
        "lower_bound": certificate.lower_bound,
        "gap": certificate.gap,
        "iterations": certificate.iterations,
        "seconds": seconds,
        "sensitivity": 1.0,
    });
    if let Some(reason) = optimum.stopped {
        json["stopped"] = json!(reason);
    }
    let mut text = format!(
        "{}, {} steps\n  √loss        {}\n  lower bound  {}   gap {:.1e}, certified\n  found in     {} iterations, {}\n",
        args.workload.describe(),
        problem.steps(),
        number(certificate.loss.sqrt()),
        number(certificate.lower_bound.sqrt()),
        certificate.gap,
        certificate.iterations,
        duration(seconds),
    );
    if let Some(reason) = optimum.stopped {
        text += &format!("  not reached  a gap of {:e}: {reason}\n", args.solver.gap);
    }
    let optimal: Selector = "optimal".parse()?;
    let mechanism = if args.streaming {
        spinner.say("streaming the optimum");
        let clock = Instant::now();
        problem.recurrence()?;
        let Args { buffers, recalls, tolerance, .. } = *args;
        let several = problem.participation().pattern(problem.steps())?.times > 1;
        let stream: Selector = if several { "recall".parse()? } else { optimal };
        let stream = stream.with(Budget { buffers, recalls, tolerance, ..Budget::default() })?;
        let mechanism = problem.mechanism(stream, &mut |progress| spinner.observe(progress))?;
        let row = Row::new(stream.name(), &mechanism, certificate.lower_bound);
        json["streaming"] = json!({
            "mechanism": row.mechanism,
            "buffers": row.buffers,
            "recalls": row.recalls,
            "work": row.work,
            "deployed_sqrt_loss": row.sqrt_loss,
            "deployed_ratio": row.ratio_to_bound,
            "deployed_sensitivity": mechanism.sensitivity(),
            "seconds": clock.elapsed().as_secs_f64(),
        });
        let drawn = match row.recalls.unwrap_or(0) {
            0 => String::new(),
            recalls => format!(" and {recalls} regenerated rows of noise"),
        };
        text += &format!(
            "  streamed in  {} buffers{drawn}, {} multiply-adds per coordinate and step, {:.8} times the bound as deployed; {}\n",
            row.buffers.unwrap_or(0),
            number(row.work),
            row.ratio_to_bound,
            duration(clock.elapsed().as_secs_f64()),
        );
        Some(mechanism)
    } else if args.out.is_some() {
        let dense = optimal.with(Budget { dense: true, ..Budget::default() })?;
        let mechanism = problem.mechanism(dense, &mut observe)?;
        let row = Row::new(dense.name(), &mechanism, certificate.lower_bound);
        json["deployed"] = json!({
            "sqrt_loss": row.sqrt_loss,
            "ratio": row.ratio_to_bound,
            "sensitivity": mechanism.sensitivity(),
        });
        text += &format!(
            "  deployed     {:.8} times the bound, with its coefficients in single precision\n",
            row.ratio_to_bound
        );
        let more = row.sqrt_loss / certificate.loss.sqrt() - 1.0;
        if more > WORSE {
            let sentence = format!(
                "the file has {:.3} % more error than the optimum that was found, because single precision cannot hold \
                 its coefficients; a stream (--streaming) may come closer",
                100.0 * more
            );
            json["deployed"]["warning"] = json!(sentence);
            note(&sentence);
        }
        Some(mechanism)
    } else {
        None
    };
    if let (Some(path), Some(mechanism)) = (&args.out, &mechanism) {
        spinner.say("writing the mechanism");
        output::save_mechanism(mechanism, path)?;
        json["out"] = json!(path);
        text += &format!("  written to   {}\n", path.display());
    }
    Ok(Report::new(json, text))
}
