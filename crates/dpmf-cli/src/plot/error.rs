//! `dpmf plot error`: the paper's first figure, for any workload.

use super::figure::{self, COLORS, Mark, Panel, Series};
use crate::progress::Spinner;
use crate::report::Report;
use crate::workload::{SolverArgs, WorkloadArgs};
use dpmf::{Problem, Selector};
use std::path::PathBuf;

/// Squared error of every step, by mechanism.
///
/// Draws two panels: the prefix sum with the same number of steps, and the workload itself, to which prefix-sum
/// mechanisms apply by post-processing. If the workload is the prefix sum, there is one panel.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  dpmf plot error --steps 512 --momentum 0.95 -o error.svg")]
pub struct Args {
    #[command(flatten)]
    workload: WorkloadArgs,

    #[command(flatten)]
    solver: SolverArgs,

    /// Only these mechanisms
    #[arg(
        long,
        value_name = "NAME,…",
        value_delimiter = ',',
        default_value = "honaker-online,honaker-full,optimal-prefix,optimal"
    )]
    mechanism: Vec<Selector>,

    /// Logarithmic error axis
    #[arg(long)]
    log: bool,

    /// Output file, .svg
    #[arg(long, short, value_name = "FILE", value_parser = figure::picture)]
    pub(super) out: PathBuf,
}

pub fn run(args: &Args) -> anyhow::Result<Report> {
    let problem = args.workload.problem(&args.solver)?;
    let mut panels = Vec::new();
    if !problem.workload().is_prefix_sum() {
        let title = format!("prefix sum, {} steps", problem.steps());
        panels.push(panel(args, problem.prefix_sum()?, title)?);
    }
    let title = format!("{}, {} steps", args.workload.describe(), problem.steps());
    panels.push(panel(args, &problem, title)?);
    figure::draw(&panels, &args.out)?;
    Ok(super::report(&panels, &args.out))
}

fn panel(args: &Args, problem: &Problem, title: String) -> anyhow::Result<Panel> {
    let spinner = Spinner::new("plot error");
    let mut series = Vec::new();
    for (selector, &color) in args.mechanism.iter().zip(COLORS.iter().cycle()) {
        // For the prefix sum its own optimum is the optimum: one curve.
        let twice =
            selector.name() == "optimal-prefix" && args.mechanism.iter().any(|s| s.name() == "optimal");
        if problem.workload().is_prefix_sum() && twice {
            continue;
        }
        let mechanism = problem.mechanism(*selector, &mut |progress| spinner.observe(progress))?;
        let losses = mechanism.loss().per_step().iter().enumerate();
        let points = losses.map(|(i, loss)| (i as f64 + 1.0, *loss)).collect();
        series.push(Series { label: selector.to_string(), points, mark: Mark::Line, color });
    }
    Ok(Panel {
        title,
        x_label: "step".into(),
        y_label: "expected squared error / (σζ)²".into(),
        x_log: false,
        y_log: args.log,
        series,
    })
}
