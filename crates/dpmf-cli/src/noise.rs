//! `dpmf key` and `dpmf noise`.

use crate::progress::Bar;
use crate::report::Report;
use crate::workload::count;
use anyhow::{Context, bail};
use dpmf::accounting::KeyOrigin;
use dpmf::noise::{Arithmetic, NoiseKey, Output, RunId};
use dpmf::{Error, format};
use serde_json::json;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Make and keep the secret from which noise is derived.
#[derive(clap::Args)]
pub struct KeyArgs {
    #[command(subcommand)]
    action: KeyAction,
}

#[derive(clap::Subcommand)]
enum KeyAction {
    /// Write a new key from the operating system to a file that only its owner can read
    ///
    /// An existing file is never overwritten. A key belongs to one run of one mechanism; whoever has it can
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
/// Unit noise for an uncalibrated mechanism, σ times sensitivity times clip for a calibrated one. A row is a
/// function of key, mechanism, run and coordinate: any range of rows and coordinates gives the same bits as the
/// whole. Every call has a run of its own, and so noise of its own, unless --run names one that was printed before. The
/// file is as secret as the key, because whoever has the noise can subtract it; a new one is owner-only.
#[derive(clap::Args)]
#[command(
    after_help = "Example:\n  dpmf key new run.key\n  dpmf noise m8.safetensors --dimension 1e6 --key-file run.key \
    --rows 0..4 -o z.npy"
)]
pub struct Args {
    /// A mechanism file
    file: PathBuf,

    /// Coordinates of the model
    #[arg(long, value_name = "d", value_parser = count)]
    dimension: usize,

    /// The key of the run
    #[arg(long, value_name = "FILE")]
    key_file: PathBuf,

    /// Steps a..b, zero-based, half open; all by default
    #[arg(long, value_name = "a..b", value_parser = range)]
    rows: Option<Range<usize>>,

    /// Coordinates a..b; all by default
    #[arg(long, value_name = "a..b", value_parser = range)]
    coordinates: Option<Range<usize>>,

    /// Noise to add to gradients, or what it leaves in the iterates
    #[arg(long, value_name = "gradient|iterate", default_value = "gradient")]
    output: Output,

    /// Ideal noise correctly rounded to a grid, or noise in single precision; exact by default, float for iterates
    #[arg(long, value_name = "exact|float")]
    arithmetic: Option<Arithmetic>,

    /// Go on with the run that an earlier call printed, for other rows or coordinates of the same noise; with a seeded
    /// key, any words
    #[arg(long, value_name = "RUN")]
    run: Option<String>,

    /// The file, .npy, f32, one row a step
    #[arg(long, short, value_name = "FILE")]
    out: PathBuf,
}

pub fn run(args: &Args) -> anyhow::Result<Report> {
    let mechanism = format::load(&args.file)?;
    let key = NoiseKey::read_file(&args.key_file)?;
    let steps = mechanism.workload().steps();
    let rows = within("rows", args.rows.clone(), steps)?;
    let coordinates = within("coordinates", args.coordinates.clone(), args.dimension)?;
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
        eprintln!("the mechanism is not calibrated: this is unit noise, before σ, sensitivity and clip");
        mechanism.unit_stream(&key, run, range, args.output, arithmetic)?
    };

    let bar = Bar::new("noise", rows.len(), 0);
    let writable = || format!("cannot write {}", args.out.display());
    let mut file = BufWriter::new(create_owner_only(&args.out).with_context(writable)?);
    file.write_all(&npy_header(rows.len(), coordinates.len())).with_context(writable)?;
    stream.skip_to(rows.start)?;
    let mut row = Vec::new();
    for step in rows.clone() {
        bar.reach(step - rows.start);
        bar.say(&format!("row {step} of {rows:?}"));
        row.clear();
        row.resize(coordinates.len(), 0.0_f32);
        stream.add_next(&mut row)?;
        for value in &row {
            file.write_all(&value.to_le_bytes()).with_context(writable)?;
        }
    }
    file.flush().with_context(writable)?;
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

/// Opens a file for writing; one that is new, for its owner alone.
fn create_owner_only(path: &Path) -> std::io::Result<File> {
    let mut options = File::options();
    options.write(true).create(true).truncate(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path)
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
            rule: "it must be a non-empty range within what the mechanism and --dimension offer",
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
