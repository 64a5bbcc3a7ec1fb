//! `dpmf bench`.

use crate::memory;
use crate::progress::{Bar, Spinner};
use crate::report::{Report, number, table};
use crate::workload::{BYTES_A_STEP, count};
use anyhow::{bail, ensure};
use dpmf::factorize::quiet;
use dpmf::family::{Budget, Knob, Selector};
use dpmf::noise::exact::field::ExactField;
use dpmf::noise::{Arithmetic, Field, NoiseKey, Output, RunId};
use dpmf::{Error, Mechanism, Participation, Problem, Representation, Workload, format};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::time::Instant;

/// Measure the noise engine on this machine.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    subject: Subject,
}

#[derive(clap::Subcommand)]
enum Subject {
    /// Time a step of every noise engine in both arithmetics, next to a loop that moves the same bytes
    ///
    /// A step checks the row, draws white noise, correlates it and adds it to the row. In exact arithmetic it also
    /// rounds correctly, and recomputes numbers that are too close to a tie with more digits. The comparison loop adds
    /// a constant in place to the row and to as many f32 buffers, on the same threads. It reads and writes every byte
    /// that a step must, once, so the ratio shows how far a step is from memory speed. Both arithmetics and the loop
    /// alternate; the first round is not counted, and medians are shown. The variance of the noise is checked.
    Noise(NoiseArgs),
}

#[derive(clap::Args)]
#[command(after_help = "Examples:\n  dpmf bench noise --dimension 1e7\n  dpmf bench noise --dimension 1e8 \
    --mechanism state-space --buffers 4\n  dpmf bench noise m.safetensors --threads 1")]
struct NoiseArgs {
    /// Mechanism files to time instead of the mechanisms for the prefix sum
    #[arg(value_name = "FILE", conflicts_with_all = ["steps", "mechanism", "buffers", "participation"])]
    files: Vec<PathBuf>,

    /// Number of model parameters
    #[arg(long, value_name = "d", value_parser = count, default_value = "1e7")]
    dimension: usize,

    /// Number of steps of the mechanism
    #[arg(long, value_name = "n", value_parser = count, default_value = "1024")]
    steps: usize,

    /// How often data takes part: mechanisms are fitted for this
    #[arg(long, value_name = "PATTERN", default_value = "single")]
    participation: Participation,

    /// First step to time; the steps before it fill buffers and leave noise to be regenerated
    #[arg(long, value_name = "STEP", default_value_t = 0)]
    from: usize,

    /// Time only these mechanisms; `none` times the white noise alone
    #[arg(
        long,
        value_name = "NAME,…",
        value_delimiter = ',',
        default_value = "independent,honaker-online,structured,state-space"
    )]
    mechanism: Vec<String>,

    /// Numbers of buffers of the state-space streams
    #[arg(long, value_name = "R,…", value_delimiter = ',', value_parser = count, default_value = "3,4,6,8")]
    buffers: Vec<usize>,

    /// Number of steps to time
    #[arg(long, value_parser = count, default_value = "7")]
    rounds: usize,

    /// Number of threads; all cores by default
    #[arg(long, value_parser = count)]
    threads: Option<usize>,
}

/// More are refused by many systems, and help nobody.
const MOST_THREADS: usize = 1024;

pub fn run(args: &Args) -> anyhow::Result<Report> {
    let Subject::Noise(args) = &args.subject;
    for (name, value) in
        [("dimension", Some(args.dimension)), ("rounds", Some(args.rounds)), ("threads", args.threads)]
    {
        if value == Some(0) {
            bail!(Error::InvalidArgument { name, value: "0".into(), rule: "at least one is needed" });
        }
    }
    if let Some(threads) = args.threads.filter(|threads| *threads > MOST_THREADS) {
        let (name, value, rule) = ("threads", threads.to_string(), "at most 1024 are allowed");
        bail!(Error::InvalidArgument { name, value, rule });
    }
    // Two rows, their copies, and buffers in both arithmetics, of which the exact one has wider numbers.
    let kept = |name: &String| !["none", "independent"].contains(&name.as_str());
    let buffers = match args.files.is_empty() && args.mechanism.iter().any(kept) {
        true => args.buffers.iter().copied().max().unwrap_or(0).min(64),
        false => 0,
    };
    memory::check("--dimension", args.dimension, args.dimension as f64 * (16 + 16 * buffers) as f64)?;
    memory::check("--steps", args.steps, args.steps as f64 * BYTES_A_STEP)?;
    // Zero means all cores, or what RAYON_NUM_THREADS says.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(args.threads.unwrap_or(0)).build()?;
    pool.install(|| noise(args))
}

fn noise(args: &NoiseArgs) -> anyhow::Result<Report> {
    let spinner = Spinner::new("bench noise");
    let d = args.dimension;
    let subjects =
        if args.files.is_empty() { prefix_sum_mechanisms(args, &spinner)? } else { read(&args.files)? };

    let (key, run) = (NoiseKey::from_seed(0), RunId::from_label("bench"));
    let white = Problem::new(Workload::prefix_sum(1)?, Participation::default())?
        .mechanism("independent".parse()?, &mut quiet)?
        .unit_stream(&key, run, 0..1, Output::Gradient, Arithmetic::Float)?;
    let (field, exact_field) = (Field::new(white.key()), ExactField::new(white.key()));
    let mut row = vec![0.0_f32; d];
    let (mut fills, mut exact_fills) = (Vec::new(), Vec::new());
    for round in 0..=args.rounds as u64 {
        let clock = Instant::now();
        fill(&field, round, &mut row);
        let float = clock.elapsed().as_secs_f64();
        let clock = Instant::now();
        draw_exact(&exact_field, round, d)?;
        // The first round pays for fresh pages.
        if round > 0 {
            fills.push(float);
            exact_fills.push(clock.elapsed().as_secs_f64());
        }
    }
    let variance_ratio = check_variance(&row, 1.0)?;
    let (field_seconds, exact_field_seconds) = (median(&mut fills), median(&mut exact_fills));
    let rate = |seconds: f64| d as f64 / seconds;

    drop(spinner);
    let bar = Bar::new("bench noise", subjects.len(), 0);
    let mut rows = Vec::new();
    for (done, (name, mechanism)) in subjects.iter().enumerate() {
        bar.reach(done);
        bar.say(name);
        rows.push(measure(name, mechanism, args, &key, &mut row)?);
    }
    let cells: Vec<Vec<String>> = rows
        .iter()
        .map(|row| {
            let float = |key: &str, digits: usize, scale: f64| {
                row[key].as_f64().map_or_else(|| "—".into(), |x| format!("{:.digits$}", x * scale))
            };
            vec![
                row["mechanism"].as_str().unwrap_or_default().to_owned(),
                row["steps"].to_string(),
                row["buffers"].to_string(),
                row["recalls"].to_string(),
                float("ratio_to_bound", 5, 1.0),
                float("seconds", 2, 1e3),
                float("copy_seconds", 2, 1e3),
                float("ratio_to_copy", 2, 1.0),
                float("exact_seconds", 2, 1e3),
                float("exact_ratio", 2, 1.0),
                row["exact_resolved"].to_string(),
                float("exact_memory_ratio", 2, 1.0),
            ]
        })
        .collect();
    let head = [
        "mechanism",
        "steps",
        "buffers",
        "recalls",
        "loss ratio",
        "float ms",
        "copy ms",
        "float/copy",
        "exact ms",
        "exact/float",
        "resolved",
        "memory ×",
    ];
    let shares: Vec<String> = rows
        .iter()
        .filter_map(|row| row["exact_resolved_share"].as_f64())
        .map(|share| if share == 0.0 { "0".into() } else { format!("{share:.1e}") })
        .collect();
    let text = format!(
        "d = {d}, {} threads; white noise alone: {} million numbers a second in float, {} in exact arithmetic\n\n{}",
        rayon::current_num_threads(),
        number(rate(field_seconds) / 1e6),
        number(rate(exact_field_seconds) / 1e6),
        if cells.is_empty() {
            String::new()
        } else {
            let legend = "resolved: coordinates, in all timed steps, that were too close to a tie for double precision and were \
                          recomputed with more digits; their share of all";
            format!("{}\n{legend}: {}", table(&head, &cells), shares.join(", "))
        }
    );
    let json = json!({
        "dimension": d,
        "threads": rayon::current_num_threads(),
        "field_seconds": field_seconds,
        "field_per_second": rate(field_seconds),
        "exact_field_seconds": exact_field_seconds,
        "exact_field_per_second": rate(exact_field_seconds),
        "field_variance_ratio": variance_ratio,
        "rows": rows,
    });
    Ok(Report::new(json, text))
}

/// The mechanisms of the prefix sum that stream in a few buffers.
fn prefix_sum_mechanisms(args: &NoiseArgs, spinner: &Spinner) -> anyhow::Result<Vec<(String, Mechanism)>> {
    let mut observe = |progress: &dpmf::factorize::Progress| spinner.observe(progress);
    let problem = Problem::new(Workload::prefix_sum(args.steps)?, args.participation)?;
    let mut subjects = Vec::new();
    for name in args.mechanism.iter().filter(|name| *name != "none") {
        spinner.say(name);
        let selector: Selector = name.parse()?;
        let mut selectors = vec![selector];
        if selector.takes(Knob::Buffers) && selector.budget() == Budget::default() {
            let of = |&buffers| selector.with(Budget { buffers: Some(buffers), ..Budget::default() });
            selectors = args.buffers.iter().map(of).collect::<dpmf::Result<_>>()?;
        }
        for selector in selectors {
            subjects.push((selector.name().to_owned(), problem.mechanism(selector, &mut observe)?));
        }
    }
    Ok(subjects)
}

fn read(files: &[PathBuf]) -> anyhow::Result<Vec<(String, Mechanism)>> {
    let mut subjects = Vec::new();
    for file in files {
        let name = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        subjects.push((name, format::load(file)?));
    }
    Ok(subjects)
}

/// One row of the white field, tile by tile on all threads.
fn fill(field: &Field, step: u64, out: &mut [f32]) {
    use rayon::prelude::*;
    const TILE: usize = 4096;
    let row = field.row(step);
    out.par_chunks_mut(TILE).enumerate().for_each(|(i, chunk)| row.fill((i * TILE) as u64, chunk));
}

/// One row of the exact field, whose numbers are not kept.
fn draw_exact(field: &ExactField, step: u64, count: usize) -> anyhow::Result<()> {
    use rayon::prelude::*;
    const TILE: usize = 4096;
    let row = field.row(step);
    let squares: f64 = (0..count.div_ceil(TILE))
        .into_par_iter()
        .map_init(
            || vec![0.0; TILE],
            |tile, i| {
                let tile = &mut tile[..TILE.min(count - i * TILE)];
                row.fill((i * TILE) as u64, tile);
                tile.iter().map(|x| x * x).sum::<f64>()
            },
        )
        .sum();
    variance_ratio(squares, count, 1.0)?;
    Ok(())
}

fn measure(
    name: &str,
    mechanism: &Mechanism,
    args: &NoiseArgs,
    key: &NoiseKey,
    row: &mut [f32],
) -> anyhow::Result<Value> {
    use rayon::prelude::*;
    let d = args.dimension;
    let form = mechanism.form();
    let run = RunId::from_label("bench");
    let of = |arithmetic| mechanism.unit_stream(key, run, 0..d as u64, Output::Gradient, arithmetic);
    let (mut stream, mut exact) = (of(Arithmetic::Float)?, of(Arithmetic::Exact)?);
    let mut exact_row = vec![0.0_f32; d];
    let mut moved = vec![vec![0.0_f32; d]; form.cost().buffers.unwrap_or(0)];
    let (mut steps, mut copies, mut exacts, mut ratios) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    row.fill(0.0);
    let last = args.from.saturating_add(args.rounds).min(form.steps() - 1);
    for round in 0..=last {
        let clock = Instant::now();
        stream.add_next(row)?;
        let step = clock.elapsed().as_secs_f64();
        if round < args.from {
            continue;
        }
        let clock = Instant::now();
        // The constant is far below the rounding of any noise: the row keeps its bits.
        for buffer in moved.iter_mut().map(Vec::as_mut_slice).chain([&mut *row]) {
            buffer.par_chunks_mut(1 << 14).for_each(|chunk| chunk.iter_mut().for_each(|x| *x += 1e-30));
        }
        let copy = clock.elapsed().as_secs_f64();
        let clock = Instant::now();
        exact.add_next(&mut exact_row)?;
        let exactly = clock.elapsed().as_secs_f64();
        // The first round pays for fresh pages, unless it is the only one.
        if round > args.from || last == round {
            steps.push(step);
            copies.push(copy);
            exacts.push(exactly);
            ratios.push(exactly / step);
        }
    }
    // The row holds the sum of all rows so far, which is what the prefix sum releases.
    let released = form.decoder_row_norms_sq(&Workload::prefix_sum(form.steps())?)[last];
    let variance_ratio = check_variance(row, released)?;
    // Every row was rounded, which adds q²/12 to each of the gradients.
    let rounding = exact.grid().unwrap_or(0.0).powi(2) / 12.0 * (last + 1) as f64;
    check_variance(&exact_row, released + rounding)?;
    let (seconds, copy_seconds) = (median(&mut steps), median(&mut copies));
    let (exact_ratio, spread) = (median(&mut ratios), [ratios[0], ratios[ratios.len() - 1]]);
    Ok(json!({
        "mechanism": name,
        "steps": form.steps(),
        "buffers": form.cost().buffers,
        "recalls": form.cost().recalls,
        "ratio_to_bound": mechanism.bound().map(|bound| (mechanism.loss().total() / bound.lower_bound).sqrt()),
        "seconds": seconds,
        "copy_seconds": copy_seconds,
        "ratio_to_copy": seconds / copy_seconds,
        "variance_ratio": variance_ratio,
        "memory": stream.memory(),
        "exact_seconds": median(&mut exacts),
        "exact_ratio": exact_ratio,
        "exact_ratio_spread": spread,
        "exact_resolved": exact.resolved(),
        "exact_resolved_share": exact.resolved() as f64 / (d as f64 * (last + 1) as f64),
        "exact_expected_share": exact.expected_resolved(last),
        "exact_memory": exact.memory(),
        "exact_memory_ratio": (stream.memory() > 0).then(|| exact.memory() as f64 / stream.memory() as f64),
    }))
}

/// Mean square over its expectation; an error seven standard deviations from 1.
fn check_variance(row: &[f32], expected: f64) -> anyhow::Result<f64> {
    variance_ratio(row.iter().map(|x| f64::from(*x).powi(2)).sum(), row.len(), expected)
}

fn variance_ratio(sum: f64, count: usize, expected: f64) -> anyhow::Result<f64> {
    let ratio = sum / count as f64 / expected;
    let allowed = 7.0 * (2.0 / count as f64).sqrt() + 1e-5;
    ensure!(
        (ratio - 1.0).abs() <= allowed,
        "the variance of the noise is {ratio} times what it should be, more than {allowed:.1e} from 1"
    );
    Ok(ratio)
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
