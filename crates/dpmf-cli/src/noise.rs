//! `dpmf key` and `dpmf noise`.

use crate::memory;
use crate::output;
use crate::progress::Bar;
use crate::report::{Report, note};
use crate::value_parsers;
use crate::workload::count;
use anyhow::bail;
use dpmf::accounting::KeyOrigin;
use dpmf::disk::Access;
use dpmf::noise::{Arithmetic, NoiseKey, Output, RunId};
use dpmf::{Error, Representation, format};
use serde_json::json;
use std::io::Write;
use std::ops::Range;
use std::path::PathBuf;

/// Make the secret key of a run.
///
/// All noise is derived from the key: anyone who has it can subtract the noise, and without it a run cannot be resumed.
#[derive(clap::Args)]
pub struct KeyArgs {
    #[command(subcommand)]
    action: KeyAction,
}

#[derive(clap::Subcommand)]
enum KeyAction {
    /// Write a new key from the operating system to a file that only its owner can read
    ///
    /// An existing file is never overwritten. A key belongs to one run of one mechanism. Anyone who has it can
    /// subtract the noise, and without it a run cannot be resumed.
    New {
        /// The key file
        path: PathBuf,
    },
}

pub fn key(args: &KeyArgs) -> anyhow::Result<Report> {
    let KeyAction::New { path } = &args.action;
    let key = NoiseKey::generate()?;
    key.create_file(path)?;
    let fingerprint = key.fingerprint().to_string();
    let text = format!("written to {}, fingerprint {fingerprint}", path.display());
    Ok(Report::new(json!({ "path": path, "fingerprint": fingerprint }), text))
}

/// Write rows of a mechanism's noise to a NumPy file.
///
/// The scale is 1 for an uncalibrated mechanism, and σ times sensitivity times clip for a calibrated one. A row is a
/// function of key, mechanism, run and coordinate, so any range of rows and coordinates has the same bits as in the
/// whole. Every call starts a new run with new noise, unless --run names a run that an earlier call printed. Keep the
/// file as secret as the key, because anyone who has the noise can subtract it; only its owner can read it.
#[derive(clap::Args)]
#[command(
    after_help = "Example:\n  dpmf key new run.key\n  dpmf noise m8.safetensors --dimension 1e6 --key-file run.key \
    --rows 0..4 -o z.npy"
)]
pub struct Args {
    /// A mechanism file
    file: PathBuf,

    /// Number of model parameters
    #[arg(long, value_name = "d", value_parser = count)]
    dimension: usize,

    /// Key file of the run; `dpmf key new FILE` makes one
    #[arg(long, value_name = "FILE")]
    key_file: PathBuf,

    /// Steps a..b, counted from 0 and without b; all by default
    #[arg(long, value_name = "a..b", value_parser = range)]
    rows: Option<Range<usize>>,

    /// Coordinates a..b, counted from 0 and without b; all by default
    #[arg(long, value_name = "a..b", value_parser = range)]
    coordinates: Option<Range<usize>>,

    /// Noise for the gradients, or the noise that it causes in the iterates
    #[arg(
        long, value_name = "gradient|iterate", default_value = "gradient",
        value_parser = value_parsers::of::<Output>(value_parsers::OUTPUT), hide_possible_values = true
    )]
    output: Output,

    /// exact is ideal noise, correctly rounded to a grid; float is single precision. By default exact, and float for
    /// iterates
    #[arg(
        long, value_name = "exact|float",
        value_parser = value_parsers::of::<Arithmetic>(value_parsers::ARITHMETIC), hide_possible_values = true
    )]
    arithmetic: Option<Arithmetic>,

    /// Continue a run that an earlier call printed, for other rows or coordinates of the same noise; with a seeded key,
    /// any name
    #[arg(long, value_name = "RUN")]
    run: Option<String>,

    /// Output file: .npy, f32, one row for each step
    #[arg(long, short, value_name = "FILE")]
    out: PathBuf,
}

pub fn run(args: &Args) -> anyhow::Result<Report> {
    match args.out.extension().and_then(|extension| extension.to_str()) {
        Some("npy") => output::check(&args.out)?,
        _ => bail!(Error::InvalidArgument {
            name: "out",
            value: args.out.display().to_string(),
            rule: "noise is written in NumPy format, to a file whose name ends in .npy",
        }),
    }
    let mechanism = format::load(&args.file)?;
    let key = NoiseKey::read_file(&args.key_file)?;
    let steps = mechanism.workload().steps();
    let rows = within("rows", args.rows.clone(), steps)?;
    let coordinates = within("coordinates", args.coordinates.clone(), args.dimension)?;
    let buffers = mechanism.form().cost().buffers.unwrap_or(0);
    let bytes = coordinates.len() as f64 * (8 + 16 * buffers) as f64;
    memory::check("the number of coordinates (--dimension, --coordinates)", coordinates.len(), bytes)?;
    let run = run_id(args.run.as_deref(), &key)?;
    let range = coordinates.start as u64..coordinates.end as u64;
    // Iterate noise is made in single precision alone.
    let default = match args.output {
        Output::Gradient => Arithmetic::Exact,
        Output::Iterate => Arithmetic::Float,
    };
    let arithmetic = args.arithmetic.unwrap_or(default);
    let mut stream = if mechanism.privacy().is_some() {
        mechanism.stream(&key, run, range, args.output, arithmetic)?
    } else {
        let name = args.file.display();
        note(&format!(
            "warning: {name} is not calibrated, so this is unit noise, not multiplied by σ, sensitivity and clip, and \
             protects nobody. Calibrate it first: dpmf calibrate {name} --epsilon ε --delta δ --clip ζ --out FILE"
        ));
        mechanism.unit_stream(&key, run, range, args.output, arithmetic)?
    };

    let bar = Bar::new("noise", rows.len(), 0);
    stream.skip_to(rows.start)?;
    // An error of the stream would be told as one of the disk.
    let mut failed = None;
    let written = output::save(&args.out, Access::Owner, |file| {
        file.write_all(&npy_header(rows.len(), coordinates.len()))?;
        let mut row = Vec::new();
        for step in rows.clone() {
            bar.reach(step - rows.start);
            bar.say(&format!("row {step} of {rows:?}"));
            row.clear();
            row.resize(coordinates.len(), 0.0_f32);
            if let Err(error) = stream.add_next(&mut row) {
                failed = Some(error);
                return Err(std::io::Error::other("the noise ended"));
            }
            for value in &row {
                file.write_all(&value.to_le_bytes())?;
            }
        }
        Ok(())
    });
    match failed {
        Some(error) => return Err(error.into()),
        None => written?,
    }
    let json = json!({
        "out": args.out,
        "rows": [rows.start, rows.end],
        "coordinates": [coordinates.start, coordinates.end],
        "noise_std": mechanism.privacy().map_or(1.0, |statement| statement.calibration().noise_std()),
        "run": run.to_string(),
        "arithmetic": arithmetic,
        "grid": stream.grid(),
        "calibrated": mechanism.privacy().is_some(),
    });
    let text = format!("{} × {} written to {}, run {run}", rows.len(), coordinates.len(), args.out.display());
    Ok(Report::new(json, text))
}

/// A new run, or one that was named before. Words would name the same run at every call, and two sets of data would
/// meet the same noise: they are for seeded keys, whose noise is no secret.
fn run_id(name: Option<&str>, key: &NoiseKey) -> anyhow::Result<RunId> {
    match name {
        None => Ok(RunId::generate()?),
        Some(text) => match text.parse() {
            Ok(run) => Ok(run),
            Err(_) if key.origin() == KeyOrigin::Seeded => Ok(RunId::from_label(text)),
            Err(error) => Err(error.into()),
        },
    }
}

fn within(name: &'static str, range: Option<Range<usize>>, length: usize) -> anyhow::Result<Range<usize>> {
    let range = range.unwrap_or(0..length);
    if range.start >= range.end || range.end > length {
        bail!(Error::InvalidArgument {
            name,
            value: format!("{}..{}", range.start, range.end),
            rule: "it must be a non-empty range within the mechanism's steps or --dimension",
        });
    }
    Ok(range)
}

fn range(text: &str) -> Result<Range<usize>, String> {
    let bad = || format!("{text:?} is not a range a..b");
    let (start, end) = text.split_once("..").ok_or_else(bad)?;
    Ok(count(start)?..count(end)?)
}

/// Version 1.0 of NumPy's format: magic, length, a Python literal padded to 64 bytes.
fn npy_header(rows: usize, columns: usize) -> Vec<u8> {
    let literal = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {columns}), }}");
    let padding = 64 - (10 + literal.len() + 1) % 64;
    let text = format!("{literal}{}\n", " ".repeat(padding % 64));
    let mut header = b"\x93NUMPY\x01\x00".to_vec();
    header.extend((text.len() as u16).to_le_bytes());
    header.extend(text.as_bytes());
    header
}
