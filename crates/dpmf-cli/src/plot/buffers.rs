//! `dpmf plot buffers`: what a model-sized buffer buys.

use super::figure::{self, COLORS, Mark, Panel, Series};
use crate::progress::Spinner;
use crate::report::Report;
use crate::workload::{SolverArgs, WorkloadArgs, count};
use anyhow::bail;
use dpmf::family::{Budget, Selector};
use std::path::PathBuf;

/// Loss over the certified bound against model-sized buffers.
///
/// Shows trees, the paper's structured form with h = r, the square-root Toeplitz mechanism (a horizontal line: it keeps
/// no buffers but regenerates all earlier noise, O(n) work in each step), and the optimum as a stream with few states,
/// each as deployed.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  dpmf plot buffers --steps 4096 -o buffers.svg")]
pub struct Args {
    #[command(flatten)]
    workload: WorkloadArgs,

    #[command(flatten)]
    solver: SolverArgs,

    /// Largest number of buffers to draw
    #[arg(long, value_parser = count, default_value = "12")]
    most: usize,

    /// Output file, .svg
    #[arg(long, short, value_name = "FILE", value_parser = figure::picture)]
    pub(super) out: PathBuf,
}

/// Streams need far fewer for any accuracy.
const MOST: usize = 64;

pub fn run(args: &Args) -> anyhow::Result<Report> {
    if args.most > MOST {
        bail!("--most is {}, but at most {MOST} buffers are drawn", args.most);
    }
    let problem = args.workload.problem(&args.solver)?;
    let spinner = Spinner::new("plot buffers");
    let mut observe = |progress: &dpmf::factorize::Progress| spinner.observe(progress);
    // Number of buffers and excess of each, as deployed.
    let mut points = |selectors: &[Selector]| -> anyhow::Result<Vec<(f64, f64)>> {
        let rows = problem.compare(selectors, &mut observe)?.rows;
        Ok(rows.iter().map(|row| (row.buffers.unwrap_or(1) as f64, row.ratio_to_bound - 1.0)).collect())
    };
    let mut series = Vec::new();
    let mut add = |label: &str, points, mark| {
        series.push(Series { label: label.into(), points, mark, color: COLORS[series.len() % COLORS.len()] });
    };

    spinner.say("state space");
    let states: Selector = "state-space".parse()?;
    let of = |buffers| states.with(Budget { buffers: Some(buffers), ..Budget::default() });
    let streams = (1..=args.most).map(of).collect::<dpmf::Result<Vec<_>>>()?;
    add("optimal, state space (ours)", points(&streams)?, Mark::LineAndPoints);

    let structured: Selector = "structured".parse()?;
    let mut fits = Vec::new();
    for total in (2..=args.most.min(problem.steps())).step_by(2) {
        spinner.say(&format!("structured, h + r = {total}"));
        let (diagonals, rank) = (Some(total.div_ceil(2)), Some(total / 2));
        // A fit may be singular; the others are shown.
        let fit = structured.with(Budget { diagonals, rank, ..Budget::default() })?;
        fits.extend(points(&[fit]).unwrap_or_default());
    }
    add("structured (h, r) of the paper", fits, Mark::LineAndPoints);

    for name in ["honaker-online", "tree"] {
        add(name, points(&[name.parse()?])?, Mark::Points);
    }
    add("sqrt-toeplitz (O(n) work a step)", points(&["sqrt-toeplitz".parse()?])?, Mark::Level);

    let panels = [Panel {
        title: format!("{}, {} steps", args.workload.describe(), problem.steps()),
        x_label: "model-sized buffers".into(),
        y_label: "√loss over the certified bound − 1".into(),
        x_log: false,
        y_log: true,
        series,
    }];
    figure::draw(&panels, &args.out)?;
    Ok(super::report(&panels, &args.out))
}
