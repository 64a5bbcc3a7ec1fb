//! `dpmf plot convergence`: loss against time, for the fixed point and its rivals.

use super::figure::{self, COLORS, Mark, Panel, Series};
use crate::progress::Spinner;
use crate::report::Report;
use crate::workload::WorkloadArgs;
use dpmf::factorize::{Dual, Iteration, Options, Progress, Solver, lower_bound_at, optimal_for};
use dpmf::{Error, Participation, Workload};
use std::ops::ControlFlow;
use std::path::PathBuf;

/// Gap to the optimum against time, for the fixed point and its rivals.
///
/// All methods start from the same X(v₀). The gap is measured against the certified lower bound, so it is the
/// true distance of the loss from the optimum, up to that bound's own gap of 1e-9.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  dpmf plot convergence --steps 512 -o convergence.svg")]
pub struct Args {
    #[command(flatten)]
    workload: WorkloadArgs,

    /// Stop a method at this gap
    #[arg(long, default_value_t = 1e-6)]
    gap: f64,

    /// Stop a method after this many seconds
    #[arg(long, default_value_t = 60.0)]
    time_limit: f64,

    /// Output file, .svg
    #[arg(long, short, value_name = "FILE", value_parser = figure::picture)]
    pub(super) out: PathBuf,
}

pub fn run(args: &Args) -> anyhow::Result<Report> {
    let workload = args.workload.build()?;
    let methods = [
        ("linear time, Anderson", Solver::Linear, Iteration::Anderson),
        ("dense, Anderson", Solver::Dense, Iteration::Anderson),
        ("dense, relaxed", Solver::Dense, Iteration::Relaxed),
        ("dense, plain (the paper's)", Solver::Dense, Iteration::Plain),
        ("Newton directions", Solver::Newton, Iteration::Anderson),
        ("projected gradients", Solver::Gradient, Iteration::Anderson),
    ];
    let best = Options { gap: 1e-9, ..Options::default() };
    let participation = args.workload.participation;
    let best = optimal_for(&workload, participation, Solver::Auto, &best, &mut |_| ControlFlow::Continue(()));
    let several = participation.spacing(workload.steps())? < workload.steps();
    let bound = match best {
        Ok(optimum) => optimum.certificate.lower_bound,
        Err(Error::NotConverged { dual, .. }) => lower_bound_at(&workload, &Dual::try_from(*dual)?)?,
        Err(error) => return Err(error.into()),
    };
    let mut series = Vec::new();
    for ((label, solver, iteration), color) in methods.into_iter().zip(COLORS) {
        let rival = matches!(solver, Solver::Newton | Solver::Gradient);
        if solver == Solver::Linear && workload.recurrence().is_none() || several && rival {
            continue;
        }
        let options = Options { gap: args.gap, iteration, ..Options::default() };
        let trace = trace((&workload, participation), solver, &options, args.time_limit, label)?;
        let points = trace.iter().map(|p| (p.seconds, p.loss / bound - 1.0)).collect();
        let label = format!("{label}, {} iterations", trace.len());
        series.push(Series { label, points, mark: Mark::Line, color });
    }
    let panels = [Panel {
        title: format!("{}, {} steps", args.workload.describe(), workload.steps()),
        x_label: "time, seconds".into(),
        y_label: "loss over the lower bound − 1".into(),
        x_log: true,
        y_log: true,
        series,
    }];
    figure::draw(&panels, &args.out)?;
    Ok(super::report(&panels, &args.out))
}

fn trace(
    (workload, participation): (&Workload, Participation),
    solver: Solver,
    options: &Options,
    time_limit: f64,
    label: &str,
) -> anyhow::Result<Vec<Progress>> {
    let spinner = Spinner::new(label);
    let mut trace: Vec<Progress> = Vec::new();
    let result = optimal_for(workload, participation, solver, options, &mut |progress| {
        trace.push(*progress);
        let _ = spinner.observe(progress);
        if progress.seconds > time_limit { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    match result {
        // A method that runs out of time, or cannot go further, is part of the picture.
        Ok(_) | Err(Error::Interrupted { .. } | Error::NotConverged { .. }) => Ok(trace),
        Err(error) => Err(error.into()),
    }
}
