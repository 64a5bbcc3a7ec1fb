//! `dpmf compare`.

use crate::progress::Spinner;
use crate::report::{Report, note, number, table};
use crate::value_parsers;
use crate::workload::{SolverArgs, WorkloadArgs, count};
use dpmf::Selector;
use dpmf::comparison::Row;
use dpmf::family;

/// Compare all mechanisms for a workload side by side.
///
/// Each mechanism is measured as it would be deployed. √loss is the root of the total squared error over all steps; max
/// and final are the root errors of the worst and of the last step; ratio is √loss divided by the certified lower
/// bound. Buffers are model-sized arrays that are kept from one step to the next (dense: none, but all earlier noise is
/// regenerated in each step). Recalls are earlier rows of noise that a step regenerates. Work is the average number of
/// model-sized multiply-adds in a step.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  dpmf compare --steps 512\n  dpmf compare --steps 512 --momentum 0.95 \
    --mechanism honaker-online,optimal-prefix,optimal")]
pub struct Args {
    #[command(flatten)]
    workload: WorkloadArgs,

    #[command(flatten)]
    solver: SolverArgs,

    /// Numbers of buffers of the state-space streams to compare, in addition to the one with a tolerance of 1e-4
    #[arg(long, value_name = "R,…", value_delimiter = ',', value_parser = count, default_value = "2,3,4,6,8")]
    buffers: Vec<usize>,

    /// Compare only these mechanisms, by name or with a choice such as optimal:buffers=3
    #[arg(
        long, value_name = "NAME,…", value_delimiter = ',',
        value_parser = value_parsers::mechanism::<Selector>(), hide_possible_values = true
    )]
    mechanism: Vec<Selector>,
}

pub fn run(args: &Args) -> anyhow::Result<Report> {
    let problem = args.workload.problem(&args.solver)?;
    let spinner = Spinner::new("compare").towards(args.solver.gap);
    let selectors = family::table(&args.mechanism, &args.buffers);
    let comparison = problem.compare(&selectors, &mut |progress| spinner.observe(progress))?;
    for (name, reason) in &comparison.left_out {
        note(&format!("{name} left out: {reason}"));
    }
    let mut json = serde_json::to_value(&comparison)?;
    json["participation"] = serde_json::to_value(problem.participation().pattern(problem.steps())?)?;
    let head = ["mechanism", "√loss", "max", "final", "ratio", "buffers", "recalls", "work"];
    let text = format!(
        "{}, {} steps; no mechanism has a √loss below {}\n\n{}",
        args.workload.describe(),
        problem.steps(),
        number(comparison.lower_bound.sqrt()),
        table(&head, &comparison.rows.iter().map(cells).collect::<Vec<_>>())
    );
    Ok(Report::new(json, text))
}

fn cells(row: &Row) -> Vec<String> {
    let ratio = row.ratio_to_bound;
    vec![
        row.mechanism.clone(),
        number(row.sqrt_loss),
        number(row.max_sqrt_loss),
        number(row.final_sqrt_loss),
        if ratio < 1.01 { format!("{ratio:.7}") } else { format!("{ratio:.4}") },
        buffers(row.buffers),
        row.recalls.map_or_else(String::new, |recalls| recalls.to_string()),
        number(row.work),
    ]
}

/// Buffers for people.
pub fn buffers(buffers: Option<usize>) -> String {
    buffers.map_or_else(|| "dense".into(), |buffers| buffers.to_string())
}
