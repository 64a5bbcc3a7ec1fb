//! `dpmf plot buffers`: what a model-sized buffer buys.

use super::figure::{self, COLORS, Mark, Panel, Series};
use crate::progress::Spinner;
use crate::report::Report;
use crate::workload::{SolverArgs, WorkloadArgs, count};
use dpmf::factorize::Target;
use dpmf::{Catalog, Factorization, Mechanism, Method, Participation, Representation};
use std::path::PathBuf;

/// Loss over the certified bound against model-sized buffers.
///
/// Trees, the paper's structured form with h = r, the square-root Toeplitz mechanism (a level: it keeps
/// no buffers but regenerates all earlier noise, O(n) work a step), and the optimum as a stream of few states,
/// each as deployed.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  dpmf plot buffers --steps 4096 -o buffers.svg")]
pub struct Args {
    #[command(flatten)]
    workload: WorkloadArgs,

    #[command(flatten)]
    solver: SolverArgs,

    /// Most buffers to draw
    #[arg(long, value_parser = count, default_value = "12")]
    most: usize,

    /// The picture, .svg
    #[arg(long, short, value_name = "FILE", value_parser = figure::picture)]
    out: PathBuf,
}

pub fn run(args: &Args) -> anyhow::Result<Report> {
    let catalog = Catalog::new(args.workload.build()?, args.solver.solver.into(), args.solver.options());
    let spinner = Spinner::new("plot buffers");
    let mut observe = |progress: &dpmf::factorize::Progress| spinner.observe(progress);
    let bound = catalog.optimum(&mut observe)?.certificate.lower_bound;
    let point = |factorization: &Factorization| -> anyhow::Result<(f64, f64)> {
        let mechanism = Mechanism::new(catalog.workload().clone(), factorization, Participation::Single)?;
        let excess = (mechanism.loss().total() / bound).sqrt() - 1.0;
        Ok((mechanism.factorization().cost().buffers as f64, excess))
    };
    let mut series = Vec::new();
    let mut add = |label: &str, points, mark| {
        series.push(Series { label: label.into(), points, mark, color: COLORS[series.len() % COLORS.len()] });
    };

    spinner.say("state space");
    let mut states = Vec::new();
    for buffers in 1..=args.most {
        let factorization = catalog.state_space(Target::Buffers(buffers), &mut observe)?;
        states.push(point(&factorization)?);
    }
    // Beyond the order of the filter, more buffers are not used.
    states.dedup_by_key(|p| p.0 as usize);
    add("optimal, state space (ours)", states, Mark::LineAndPoints);

    let mut structured: Vec<(f64, f64)> = Vec::new();
    for total in (2..=args.most).step_by(2) {
        spinner.say(&format!("structured, h + r = {total}"));
        let (h, r) = (total.div_ceil(2), total / 2);
        if let Ok(factorization) = catalog.structured(h, r, &mut observe) {
            structured.push(point(&factorization)?);
        }
    }
    add("structured (h, r) of the paper", structured, Mark::LineAndPoints);

    for method in [Method::HonakerOnline, Method::Tree] {
        add(method.name(), vec![point(&catalog.factorization(method, &mut observe)?)?], Mark::Points);
    }
    let (_, level) = point(&catalog.factorization(Method::SqrtToeplitz, &mut observe)?)?;
    add("sqrt-toeplitz (O(n) work a step)", vec![(1.0, level)], Mark::Level);

    let panels = [Panel {
        title: format!("{}, {} steps", args.workload.describe(), catalog.workload().steps()),
        x_label: "model-sized buffers".into(),
        y_label: "√loss over the certified bound − 1".into(),
        x_log: false,
        y_log: true,
        series,
    }];
    figure::draw(&panels, &args.out)?;
    Ok(super::report(&panels, &args.out))
}
