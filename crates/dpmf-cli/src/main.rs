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
mod failure;
mod hints;
mod inspect;
mod interrupt;
mod ledger;
mod manual;
mod matrix;
mod memory;
mod model;
mod noise;
mod output;
mod page;
mod plan;
mod plot;
mod progress;
mod report;
mod sweep;
mod train;
mod value_parsers;
mod warnings;
mod workload;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{ArgMatches, CommandFactory, FromArgMatches, Parser, Subcommand};
use report::Report;
use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: memory::Bounded = memory::Bounded;

/// Differentially private training with optimally correlated noise.
///
/// A run of SGD is a linear map A of the clipped gradients. dpmf factors A = BC so that the noise for a given
/// privacy level adds the least error to the iterates, proves how close it is to the optimum, and generates the
/// noise in a few model-sized buffers.
#[derive(Parser)]
#[command(name = "dpmf", version, propagate_version = true, max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,

    /// Print one JSON object on standard output and nothing else
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Subcommand)]
enum Command {
    Train(Box<train::Args>),
    Sample(model::sample::Args),
    Predict(model::predict::Args),
    Eval(model::eval::Args),
    Sweep(Box<sweep::Args>),
    Plan(Box<plan::Args>),
    Factorize(factorize::Args),
    Compare(compare::Args),
    Calibrate(account::CalibrateArgs),
    Account(account::Args),
    Audit(audit::Args),
    Ledger(ledger::Args),
    Key(noise::KeyArgs),
    Noise(noise::Args),
    Bench(bench::Args),
    Plot(plot::Args),
    Inspect(inspect::Args),
    Verify(inspect::VerifyArgs),
    Completions(manual::CompletionsArgs),
    Man(manual::Args),
}

/// Exit code of a training that ended with a model no better than the trivial one.
const NO_BETTER: u8 = 3;

fn main() -> ExitCode {
    report::tell_as_json(std::env::args_os().any(|argument| argument == "--json"));
    std::panic::set_hook(Box::new(panicked));
    interrupt::listen();
    let cli = match parsed() {
        Ok(cli) => cli,
        Err(error) => return unparsed(&error),
    };
    let result: anyhow::Result<Report> = match &cli.command {
        Command::Train(args) => train::run(args),
        Command::Sample(args) => model::sample::run(args),
        Command::Predict(args) => model::predict::run(args),
        Command::Eval(args) => model::eval::run(args),
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
        Command::Completions(args) => manual::completions(args),
        Command::Man(args) => manual::run(args),
    };
    let printed = result.and_then(|report| {
        report.print(cli.json)?;
        Ok(match report {
            Report { failed: true, .. } => ExitCode::FAILURE,
            Report { no_better: true, .. } => ExitCode::from(NO_BETTER),
            _ => ExitCode::SUCCESS,
        })
    });
    printed.unwrap_or_else(|error| {
        let kind = failure::kind(&error);
        report::fail(kind, &failure::error_chain(&error));
        if kind == "interrupted" { ExitCode::from(interrupt::CODE) } else { ExitCode::FAILURE }
    })
}

/// The definition of the program. Numbers may be negative everywhere: a rule explains what is wrong with one.
fn program() -> clap::Command {
    fn lenient(command: clap::Command) -> clap::Command {
        let names: Vec<String> = command.get_subcommands().map(|below| below.get_name().to_owned()).collect();
        let command = command.allow_negative_numbers(true);
        names.into_iter().fold(command, |command, name| command.mut_subcommand(name, lenient))
    }
    lenient(Cli::command())
}

fn parsed() -> Result<Cli, clap::Error> {
    let matches = program().try_get_matches().map_err(suggest_key)?;
    if let Some(("train", train)) = matches.subcommand() {
        check_resumed(train)?;
    }
    Cli::from_arg_matches(&matches)
}

/// A missing key: the message says how to make one.
fn suggest_key(mut error: clap::Error) -> clap::Error {
    let missing = matches!(error.get(ContextKind::InvalidArg), Some(ContextValue::Strings(names))
        if names.iter().any(|name| name.starts_with("--key-file")));
    if missing && error.kind() == ErrorKind::MissingRequiredArgument {
        let tip = "dpmf key new FILE makes a key".to_owned().into();
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip]));
    }
    error
}

/// A run that goes on takes nothing from the command line: a setting that came to nothing would be believed.
fn check_resumed(train: &ArgMatches) -> Result<(), clap::Error> {
    let given = |id: &str| train.value_source(id) == Some(ValueSource::CommandLine);
    if !given("resume") {
        return Ok(());
    }
    let mut program = program();
    program.build();
    let Some(command) = program.find_subcommand_mut("train") else { return Ok(()) };
    let settings = command.get_arguments().filter(|argument| {
        let name = argument.get_id().as_str();
        !["resume", "burn", "json", "help", "version"].contains(&name) && given(name)
    });
    let settings: Vec<String> =
        settings.map(|argument| format!("--{}", argument.get_long().unwrap_or_default())).collect();
    if settings.is_empty() {
        return Ok(());
    }
    let settings = settings.join(", ");
    let rule = format!("--resume keeps the original settings: remove {settings}");
    Err(command.error(ErrorKind::ArgumentConflict, rule))
}

/// Help, the version, or what is wrong with the command line.
fn unparsed(error: &clap::Error) -> ExitCode {
    if error.use_stderr() {
        // Words on standard error stay as clap writes them, colours and all.
        if report::as_json() {
            report::fail("usage", error.to_string().trim())
        } else {
            let _ = error.print();
        }
        return ExitCode::from(2);
    }
    let full = error.print().is_err_and(|cause| cause.kind() != std::io::ErrorKind::BrokenPipe);
    if full { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// What is left to say when the program is wrong.
fn panicked(panic: &std::panic::PanicHookInfo<'_>) {
    let payload = panic.payload();
    let what = payload.downcast_ref::<&str>().copied();
    let what = what.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("no words");
    let place = panic.location().map_or_else(String::new, |place| format!(" ({place})"));
    interrupt::abandon();
    report::fail(
        "defect",
        &format!("this is a bug in dpmf, please report it with the command that caused it: {what}{place}"),
    );
    std::process::exit(1)
}
