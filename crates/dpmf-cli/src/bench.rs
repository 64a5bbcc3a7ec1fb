//! `dpmf bench`.

use crate::progress::Spinner;
use crate::report::{Report, number, table};
use crate::workload::count;
use dpmf::factorize::{Options, Solver, Target};
use dpmf::noise::engines::engine;
use dpmf::noise::{Field, NoiseKey, NoiseStream, Output, RunId};
use dpmf::{Catalog, Mechanism, Method, Representation, Workload};
use serde_json::{Value, json};
use std::ops::ControlFlow;
use std::time::Instant;

/// Measure the noise engine on this machine.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    subject: Subject,
}

#[derive(clap::Subcommand)]
enum Subject {
    /// Time a step of every engine beside a loop that moves the same bytes
    ///
    /// The loop adds to every number of the engine's buffers and of the output in place, on the same threads, so the
    /// ratio says how far from memory speed a step is. Both alternate; medians are shown.
    Noise(NoiseArgs),
}

#[derive(clap::Args)]
struct NoiseArgs {
    /// Coordinates of the model
    #[arg(long, value_name = "d", value_parser = count, default_value = "1e7")]
    dimension: usize,

    /// Steps of the mechanism
    #[arg(long, value_name = "n", value_parser = count, default_value = "1024")]
    steps: usize,

    /// Steps to time
    #[arg(long, value_parser = count, default_value = "7")]
    rounds: usize,
}

pub fn run(args: &Args) -> anyhow::Result<Report> {
    let Subject::Noise(args) = &args.subject;
    noise(args)
}

fn noise(args: &NoiseArgs) -> anyhow::Result<Report> {
    let spinner = Spinner::new("bench noise");
    let d = args.dimension;
    let mut observe = |_: &dpmf::factorize::Progress| ControlFlow::Continue(());
    let catalog = Catalog::new(Workload::prefix_sum(args.steps)?, Solver::Auto, Options::default());
    let bound = catalog.optimum(&mut observe)?.certificate.lower_bound;
    let mut subjects = vec![
        (Method::Independent.name().to_owned(), catalog.mechanism(Method::Independent, &mut observe)?),
        (Method::HonakerOnline.name().to_owned(), catalog.mechanism(Method::HonakerOnline, &mut observe)?),
    ];
    if args.steps <= 4096 {
        let structured = catalog.mechanism(Method::Structured, &mut observe)?;
        subjects.push((Method::Structured.name().to_owned(), structured));
    }
    for buffers in [3, 4, 6, 8] {
        let stream = catalog.state_space(Target::Buffers(buffers), &mut observe)?;
        subjects.push((Method::StateSpace.name().to_owned(), catalog.deploy(&stream, &mut observe)?));
    }

    let key = || NoiseKey::from_seed(0).stream([0; 32], RunId::from_label("bench"));
    let field = Field::new(&key());
    let mut row = vec![0.0_f32; d];
    let mut fills = Vec::new();
    for round in 0..args.rounds as u64 {
        let clock = Instant::now();
        fill(&field, round, &mut row);
        fills.push(clock.elapsed().as_secs_f64());
    }
    let field_seconds = median(&mut fills);
    let rate = d as f64 / field_seconds;

    let mut rows = Vec::new();
    for (name, mechanism) in &subjects {
        spinner.say(name);
        rows.push(measure(name, mechanism, bound, args, key(), &mut row)?);
    }
    let cells: Vec<Vec<String>> = rows
        .iter()
        .map(|row| {
            let float = |key: &str| row[key].as_f64().unwrap_or(f64::NAN);
            vec![
                row["mechanism"].as_str().unwrap_or_default().to_owned(),
                row["buffers"].to_string(),
                format!("{:.5}", float("ratio_to_bound")),
                format!("{:.2}", float("seconds") * 1e3),
                format!("{:.2}", float("copy_seconds") * 1e3),
                format!("{:.2}", float("ratio_to_copy")),
            ]
        })
        .collect();
    let text = format!(
        "d = {d}, n = {}, {} threads; white noise alone: {} million numbers a second\n\n{}",
        args.steps,
        rayon::current_num_threads(),
        number(rate / 1e6),
        table(&["mechanism", "buffers", "loss ratio", "step ms", "copy ms", "step/copy"], &cells)
    );
    let json = json!({
        "dimension": d,
        "steps": args.steps,
        "threads": rayon::current_num_threads(),
        "field_seconds": field_seconds,
        "field_per_second": rate,
        "rows": rows,
    });
    Ok(Report::new(json, text))
}

/// One row of the white field, tile by tile on all threads.
fn fill(field: &Field, step: u64, out: &mut [f32]) {
    use rayon::prelude::*;
    const TILE: usize = 4096;
    let row = field.row(step);
    out.par_chunks_mut(TILE).enumerate().for_each(|(i, chunk)| row.fill((i * TILE) as u64, chunk));
}

fn measure(
    name: &str,
    mechanism: &Mechanism,
    bound: f64,
    args: &NoiseArgs,
    key: dpmf::noise::StreamKey,
    row: &mut [f32],
) -> anyhow::Result<Value> {
    use rayon::prelude::*;
    let d = args.dimension;
    let buffers = mechanism.factorization().cost().buffers;
    let mut stream =
        NoiseStream::new(engine(mechanism.factorization())?, key, 0..d as u64, 1.0, Output::Gradient)?;
    let mut moved = vec![vec![0.0_f32; d]; buffers];
    let (mut steps, mut copies) = (Vec::new(), Vec::new());
    row.fill(0.0);
    for round in 0..=args.rounds.min(args.steps - 1) {
        let clock = Instant::now();
        stream.add_next(row)?;
        let step = clock.elapsed().as_secs_f64();
        let clock = Instant::now();
        for buffer in moved.iter_mut().map(Vec::as_mut_slice).chain([&mut *row]) {
            buffer.par_chunks_mut(1 << 14).for_each(|chunk| chunk.iter_mut().for_each(|x| *x += 1e-30));
        }
        let copy = clock.elapsed().as_secs_f64();
        // The first round pays for fresh pages.
        if round > 0 {
            steps.push(step);
            copies.push(copy);
        }
    }
    anyhow::ensure!(row.iter().all(|x| x.is_finite()), "the noise must be finite");
    let (seconds, copy_seconds) = (median(&mut steps), median(&mut copies));
    Ok(json!({
        "mechanism": name,
        "buffers": buffers,
        "ratio_to_bound": (mechanism.loss().total() / bound).sqrt(),
        "seconds": seconds,
        "copy_seconds": copy_seconds,
        "ratio_to_copy": seconds / copy_seconds,
    }))
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
