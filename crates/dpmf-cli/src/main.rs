//! The `dpmf` program.
//!
//! Every command builds one [`Report`]; it goes to standard output as text, or as one JSON object with
//! `--json`. Progress and words go to standard error.

mod account;
mod audit;
mod bench;
mod clock;
mod compare;
mod factorize;
mod inspect;
mod ledger;
mod matrix;
mod noise;
mod output;
mod page;
mod plan;
mod plot;
mod progress;
mod report;
mod sample;
mod sweep;
mod train;
mod workload;

use clap::{Parser, Subcommand};
use report::Report;
use std::process::ExitCode;

/// Differentially private training with optimally correlated noise.
///
/// A run of SGD is a linear map A of the clipped gradients. dpmf factors A = BC so that the noise of a given
/// privacy level does the least harm to the iterates, proves how close to optimal it came, and streams the
/// noise in a few model-sized buffers.
#[derive(Parser)]
#[command(name = "dpmf", version, about, propagate_version = true, max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,

    /// Print one JSON object on standard output and nothing else
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Subcommand)]
enum Command {
    /// Train a model under differential privacy, for one epoch or several
    Train(Box<train::Args>),
    /// Write new texts with a model that was trained
    Sample(sample::Args),
    /// Train over a grid of settings, choose on validation users, report on test users
    Sweep(Box<sweep::Args>),
    /// Find the mechanism and the sampler of least error for a budget
    Plan(Box<plan::Args>),
    /// Find the optimal factorization of a workload, with its certificate
    Factorize(factorize::Args),
    /// Put all mechanisms for a workload side by side
    Compare(compare::Args),
    /// Solve for the noise that gives (ε, δ)
    Calibrate(account::CalibrateArgs),
    /// What a noise multiplier is worth, by every accountant
    Account(account::Args),
    /// Attack a mechanism and bound its ε from below
    Audit(audit::Args),
    /// Keep account of what was released about the same people, and of the budget for it
    Ledger(ledger::Args),
    /// Make the secret key of a run
    Key(noise::KeyArgs),
    /// Write rows of a mechanism's noise to a NumPy file
    Noise(noise::Args),
    /// Measure the noise engine on this machine
    Bench(bench::Args),
    /// Draw a figure
    Plot(plot::Args),
    /// Say what a mechanism file holds
    Inspect(inspect::Args),
    /// Recompute everything that a mechanism file claims
    Verify(inspect::VerifyArgs),
}

fn main() -> ExitCode {
    let wants_json = std::env::args_os().any(|argument| argument == "--json");
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) if error.use_stderr() && wants_json => {
            report::print_error("usage", error.to_string().trim());
            return ExitCode::from(2);
        }
        Err(error) => error.exit(),
    };
    let result: anyhow::Result<Report> = match &cli.command {
        Command::Train(args) => train::run(args),
        Command::Sample(args) => sample::run(args),
        Command::Sweep(args) => sweep::run(args),
        Command::Plan(args) => plan::run(args),
        Command::Factorize(args) => factorize::run(args),
        Command::Compare(args) => compare::run(args),
        Command::Calibrate(args) => account::calibrate(args),
        Command::Account(args) => account::run(args),
        Command::Audit(args) => audit::run(args),
        Command::Ledger(args) => ledger::run(args),
        Command::Key(args) => noise::key(args),
        Command::Noise(args) => noise::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Plot(args) => plot::run(args),
        Command::Inspect(args) => inspect::run(args),
        Command::Verify(args) => inspect::verify(args),
    };
    match result {
        Ok(report) => {
            report.print(cli.json);
            if report.failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
        }
        Err(error) => {
            let kind = error_kind(&error);
            if cli.json {
                report::print_error(kind, &format!("{error:#}"));
            } else {
                eprintln!("error: {error:#}");
            }
            ExitCode::FAILURE
        }
    }
}

fn error_kind(error: &anyhow::Error) -> &'static str {
    let train = error.downcast_ref::<dpmf_train::Error>().map(dpmf_train::Error::kind);
    train.or_else(|| error.downcast_ref::<dpmf::Error>().map(dpmf::Error::kind)).unwrap_or("failure")
}
