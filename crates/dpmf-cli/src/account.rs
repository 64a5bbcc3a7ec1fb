//! `dpmf account` and `dpmf calibrate`.

use crate::progress::Spinner;
use crate::report::{Report, table};
use crate::workload::{SolverArgs, WorkloadArgs};
use anyhow::bail;
use dpmf::accounting::{Account, Accountant, Adjacency, PrivacyUnit, compose};
use dpmf::mechanism::Conditions;
use dpmf::{Mechanism, Selector, format};
use serde_json::{Value, json};
use std::path::PathBuf;

/// What a noise multiplier is worth: ε at δ, by every accountant, each rounded up.
///
/// exact is the Gaussian mechanism's own curve; zcdp and rdp convert concentrated and Rényi privacy, the latter at
/// integer orders 2 to 512; paper is the closed form of the matrix mechanism's theorem. Several multipliers compose:
/// the result is that of all mechanisms together.
#[derive(clap::Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "Example:\n  dpmf account --noise-multiplier 0.341 --delta 1e-6"
)]
pub struct Args {
    /// Standard deviation of the noise over sensitivity times clip; several are composed
    #[arg(long, value_name = "σ,…", value_delimiter = ',', required = true)]
    noise_multiplier: Vec<f64>,

    /// δ of the guarantee
    #[arg(long, value_name = "δ")]
    delta: f64,

    /// Which data sets are neighbours: replace-with-zero, add-or-remove or replace-one
    #[arg(long, default_value = "replace-with-zero")]
    adjacency: Adjacency,
}

pub fn run(args: &Args) -> anyhow::Result<Report> {
    let sigma = compose(&args.noise_multiplier)?;
    // A single multiplier is itself; composition would round it.
    let sigma = if let [one] = args.noise_multiplier[..] { one } else { sigma };
    let account = Account::new(sigma, args.delta, args.adjacency)?;
    let rows: Vec<Vec<String>> = Accountant::ALL
        .iter()
        .map(|&accountant| vec![accountant.name().to_owned(), format!("{:.4}", account.epsilon(accountant))])
        .collect();
    let text = format!(
        "noise multiplier {sigma}, δ = {:e}, {}: μ = {:.6}, ρ = {:.6}\n\n{}",
        args.delta,
        args.adjacency,
        account.mu,
        account.rho,
        table(&["accountant", "ε"], &rows)
    );
    Ok(Report::new(serde_json::to_value(account)?, text))
}

/// Solve for the noise that gives (ε, δ), and write the calibrated mechanism with its privacy statement.
///
/// The mechanism comes from a file, or is made for a workload. The sensitivity is that of the coefficients as
/// deployed.
#[derive(clap::Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "Examples:\n  dpmf calibrate m.safetensors --epsilon 8 --delta 1e-6 --clip 1 --out m8.safetensors\n  \
    dpmf calibrate --steps 2048 --momentum 0.95 --epsilon 2 --delta 1e-6 --clip 1 --out m.safetensors"
)]
pub struct CalibrateArgs {
    /// An uncalibrated mechanism; without it, one is made for the workload
    file: Option<PathBuf>,

    #[command(flatten)]
    workload: WorkloadArgs,

    #[command(flatten)]
    solver: SolverArgs,

    /// The mechanism to make
    #[arg(long, value_name = "NAME", default_value = "optimal", conflicts_with = "file")]
    mechanism: Selector,

    /// ε of the guarantee
    #[arg(
        long,
        value_name = "ε",
        conflicts_with = "noise_multiplier",
        required_unless_present = "noise_multiplier"
    )]
    epsilon: Option<f64>,

    /// Take this noise multiplier and state the ε it gives
    #[arg(long, value_name = "σ")]
    noise_multiplier: Option<f64>,

    /// δ of the guarantee
    #[arg(long, value_name = "δ")]
    delta: f64,

    /// Clipping norm ζ of one contribution
    #[arg(long, value_name = "ζ")]
    clip: f64,

    /// Whose data is protected as one piece: user or record
    #[arg(long, default_value = "user")]
    unit: PrivacyUnit,

    /// Which data sets are neighbours: replace-with-zero, add-or-remove or replace-one
    #[arg(long, default_value = "replace-with-zero")]
    adjacency: Adjacency,

    /// How ε follows from the noise: exact, zcdp, rdp or paper
    #[arg(long, default_value = "exact")]
    accountant: Accountant,

    /// Write the calibrated mechanism to this file
    #[arg(long, short, value_name = "FILE")]
    out: Option<PathBuf>,
}

pub fn calibrate(args: &CalibrateArgs) -> anyhow::Result<Report> {
    let conditions = Conditions { unit: args.unit, adjacency: args.adjacency, accountant: args.accountant };
    let mechanism = load_or_make(args)?;
    let mechanism = match (args.epsilon, args.noise_multiplier) {
        (Some(epsilon), _) => mechanism.calibrated(epsilon, args.delta, args.clip, conditions)?,
        (None, Some(sigma)) => mechanism.with_noise(sigma, args.delta, args.clip, conditions)?,
        (None, None) => bail!("either --epsilon or --noise-multiplier is needed"),
    };
    if let Some(path) = &args.out {
        format::save(&mechanism, path)?;
    }
    let Some(statement) = mechanism.privacy() else { bail!("the mechanism was not calibrated") };
    let json = json!({
        "steps": mechanism.workload().steps(),
        "noise_multiplier": statement.calibration().noise_multiplier(),
        "noise_std": statement.calibration().noise_std(),
        "sensitivity": mechanism.sensitivity(),
        "epsilon": statement.calibration().epsilon(),
        "delta": statement.calibration().delta(),
        "sqrt_loss": mechanism.loss().sqrt_total(),
        "ratio_to_bound": mechanism.certificate().map(|c| c.ratio_to_bound()),
        "statement": statement,
        "out": args.out.as_ref().map_or(Value::Null, |path| json!(path)),
    });
    let mut text = statement.to_string();
    if let Some(path) = &args.out {
        text += &format!("\nwritten to {}\n", path.display());
    }
    Ok(Report::new(json, text))
}

fn load_or_make(args: &CalibrateArgs) -> anyhow::Result<Mechanism> {
    if let Some(path) = &args.file {
        if args.workload.is_given() {
            bail!("a mechanism file has its workload: leave out the workload flags");
        }
        return Ok(format::load(path)?);
    }
    let spinner = Spinner::new("calibrate");
    let problem = args.workload.problem(&args.solver)?;
    Ok(problem.mechanism(args.mechanism, &mut |progress| spinner.observe(progress))?)
}
