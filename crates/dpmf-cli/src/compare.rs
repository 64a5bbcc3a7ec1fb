//! `dpmf compare`.

use crate::progress::Spinner;
use crate::report::{Report, number, table};
use crate::workload::{SolverArgs, WorkloadArgs, count};
use dpmf::factorize::{Progress, Target};
use dpmf::{Catalog, Error, Mechanism, Method, Representation};
use serde_json::{Value, json};

/// Put all mechanisms for a workload side by side, each as it would be deployed.
///
/// Columns: √loss is the root of the total squared error over all steps, max and final those of the worst and
/// the last step, ratio is √loss over the certified lower bound. Buffers are model-sized arrays kept from one
/// step to the next; work is the mean number of model-sized multiply-adds a step.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  dpmf compare --steps 512\n  dpmf compare --steps 512 --momentum 0.95 \
    --mechanism honaker-online,optimal-prefix,optimal")]
pub struct Args {
    #[command(flatten)]
    workload: WorkloadArgs,

    #[command(flatten)]
    solver: SolverArgs,

    /// State-space streams with these numbers of buffers, beside the one that a tolerance of 1e-4 asks for
    #[arg(long, value_name = "R,…", value_delimiter = ',', value_parser = count, default_value = "2,3,4,6,8")]
    buffers: Vec<usize>,

    /// Only these mechanisms
    #[arg(long, value_name = "NAME,…", value_delimiter = ',')]
    mechanism: Vec<Method>,
}

pub fn run(args: &Args) -> anyhow::Result<Report> {
    let catalog = Catalog::new(args.workload.build()?, args.solver.solver.into(), args.solver.options());
    let spinner = Spinner::new("compare");
    let optimum = catalog.optimum(&mut |progress| spinner.observe(progress))?;
    let lower_bound = optimum.certificate.lower_bound;
    let methods = if args.mechanism.is_empty() { Method::ALL.to_vec() } else { args.mechanism.clone() };
    let mut rows = Vec::new();
    for method in methods {
        spinner.say(method.name());
        let mut observe = |progress: &Progress| spinner.observe(progress);
        if method == Method::StateSpace {
            // Beyond the order of the filter, more buffers are not used: each number once.
            let mut streams = vec![catalog.mechanism(method, &mut observe)?];
            for &buffers in &args.buffers {
                let stream = catalog.state_space(Target::Buffers(buffers), &mut observe)?;
                streams.push(catalog.deploy(&stream, &mut observe)?);
            }
            streams.sort_by_key(|stream| stream.factorization().cost().buffers);
            streams.dedup_by_key(|stream| stream.factorization().cost().buffers);
            rows.extend(streams.into_iter().map(|stream| (method.name().to_owned(), stream)));
            continue;
        }
        match catalog.mechanism(method, &mut observe) {
            Ok(mechanism) => rows.push((method.name().to_owned(), mechanism)),
            // Dense matrices of so many steps do not fit; the others do.
            Err(Error::Unsupported { what, .. }) if args.mechanism.is_empty() => {
                eprintln!("{} left out: {what}", method.name());
            }
            Err(error) => return Err(error.into()),
        }
    }
    let json = json!({
        "steps": catalog.workload().steps(),
        "lower_bound": lower_bound,
        "rows": rows.iter().map(|(name, mechanism)| row_json(name, mechanism, lower_bound)).collect::<Vec<_>>(),
    });
    let head = ["mechanism", "√loss", "max", "final", "ratio", "buffers", "work"];
    let cells: Vec<_> =
        rows.iter().map(|(name, mechanism)| row_cells(name, mechanism, lower_bound)).collect();
    let text = format!(
        "{}, {} steps; no mechanism has a √loss below {}\n\n{}",
        args.workload.describe(),
        catalog.workload().steps(),
        number(lower_bound.sqrt()),
        table(&head, &cells)
    );
    Ok(Report::new(json, text))
}

fn row_json(name: &str, mechanism: &Mechanism, lower_bound: f64) -> Value {
    let (loss, cost) = (mechanism.loss(), mechanism.factorization().cost());
    json!({
        "mechanism": name,
        "sqrt_loss": loss.sqrt_total(),
        "max_sqrt_loss": loss.max_sqrt(),
        "final_sqrt_loss": loss.final_sqrt(),
        "ratio_to_bound": (loss.total() / lower_bound).sqrt(),
        "buffers": cost.buffers,
        "work": cost.work,
    })
}

fn row_cells(name: &str, mechanism: &Mechanism, lower_bound: f64) -> Vec<String> {
    let (loss, cost) = (mechanism.loss(), mechanism.factorization().cost());
    let ratio = (loss.total() / lower_bound).sqrt();
    vec![
        name.to_owned(),
        number(loss.sqrt_total()),
        number(loss.max_sqrt()),
        number(loss.final_sqrt()),
        if ratio < 1.01 { format!("{ratio:.7}") } else { format!("{ratio:.4}") },
        cost.buffers.to_string(),
        number(cost.work),
    ]
}
