//! `dpmf factorize`.

use crate::progress::Spinner;
use crate::report::{Report, duration, number};
use crate::workload::{SolverArgs, WorkloadArgs};
use dpmf::mechanism::Bound;
use dpmf::{Factorization, Mechanism, Participation, format};
use serde_json::json;
use std::path::PathBuf;
use std::time::Instant;

/// Find the optimal factorization of a workload, with its certificate.
///
/// The loss is the total expected squared error of the released iterates at unit clip and unit noise
/// multiplier; the lower bound holds for every factorization. The solver stops when their relative gap is
/// certified to be below --gap.
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

    /// Write the uncalibrated mechanism, as it will be deployed, to this file
    #[arg(long, short, value_name = "FILE")]
    out: Option<PathBuf>,
}

pub fn run(args: &Args) -> anyhow::Result<Report> {
    let workload = args.workload.build()?;
    let spinner = Spinner::new("factorize");
    let clock = Instant::now();
    let optimum =
        dpmf::optimal(&workload, args.solver.solver.into(), &args.solver.options(), &mut |progress| {
            spinner.observe(progress)
        })?;
    let seconds = clock.elapsed().as_secs_f64();
    let certificate = optimum.certificate;
    let iteration = dpmf::factorize::Iteration::from(args.solver.iteration);
    let mut json = json!({
        "steps": workload.steps(),
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
    let mut text = format!(
        "{}, {} steps\n  √loss        {}\n  lower bound  {}   gap {:.1e}, certified\n  found in     {} iterations, {}\n",
        args.workload.describe(),
        workload.steps(),
        number(certificate.loss.sqrt()),
        number(certificate.lower_bound.sqrt()),
        certificate.gap,
        certificate.iterations,
        duration(seconds),
    );
    if let Some(path) = &args.out {
        spinner.say("writing the mechanism");
        let (dense, _) = optimum.to_dense(&workload)?;
        let mechanism = Mechanism::new(workload, &Factorization::Dense(dense), Participation::Single)?
            .with_bound(Bound::from(&optimum))?;
        format::save(&mechanism, path)?;
        json["out"] = json!(path);
        text += &format!("  written to   {}\n", path.display());
    }
    Ok(Report::new(json, text))
}
