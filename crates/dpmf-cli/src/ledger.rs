//! `dpmf ledger`.

use crate::clock;
use crate::output;
use crate::report::{Report, number, table};
use crate::words;
use anyhow::bail;
use dpmf::accounting::statement::epsilon_for_people;
use dpmf::accounting::{Adjacency, Ledger, LedgerFile, PrivacyUnit, Release};
use dpmf::noise::RunId;
use dpmf::{Error, format};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Keep account of what was released about the same people, and of the budget for it.
///
/// Every release on a data set adds to what can be learned about the people in it. A ledger records them with their
/// noise, composes them exactly, and refuses one that would take all together above its budget. `dpmf train --ledger
/// FILE` records its models before it begins; a release that was made elsewhere is added by its mechanism file.
#[derive(clap::Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "Examples:\n  dpmf ledger new people.ledger --epsilon 8 --delta 1e-6\n  dpmf train --data messages.csv \
    --epsilon 2 --ledger people.ledger\n  dpmf ledger add people.ledger m8.safetensors --what \"survey of May\"\n  \
    dpmf ledger show people.ledger"
)]
pub struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Begin a ledger in a new file
    New {
        /// The ledger
        file: PathBuf,

        /// ε that all releases together must not exceed
        #[arg(long, value_name = "ε")]
        epsilon: f64,

        /// δ at which it is counted
        #[arg(long, value_name = "δ")]
        delta: f64,

        /// Whose data is protected as one piece: user or record
        #[arg(
            long, default_value = "user",
            value_parser = words::of::<PrivacyUnit>(words::UNIT), hide_possible_values = true
        )]
        unit: PrivacyUnit,

        /// Which data sets are neighbours: replace-with-zero, add-or-remove or replace-one
        #[arg(
            long, default_value = "replace-with-zero",
            value_parser = words::of::<Adjacency>(words::ADJACENCY), hide_possible_values = true
        )]
        adjacency: Adjacency,
    },
    /// Show what was recorded and what is left
    Show {
        /// The ledger
        file: PathBuf,
    },
    /// Record the release of a calibrated mechanism
    Add {
        /// The ledger
        file: PathBuf,

        /// The calibrated mechanism, or plan, that was or will be run
        mechanism: PathBuf,

        /// A name of the release, unlike that of any other; a second record of the same name does not count again
        #[arg(long, value_name = "NAME")]
        id: Option<String>,

        /// What it is, in words
        #[arg(long, value_name = "WORDS")]
        what: Option<String>,
    },
}

pub fn run(args: &Args) -> anyhow::Result<Report> {
    match &args.action {
        Action::New { file, epsilon, delta, unit, adjacency } => {
            if !file.exists() {
                output::check(file)?;
            }
            let ledger = Ledger::new(*epsilon, *delta, *unit, *adjacency)?;
            show(file, LedgerFile::create(file, ledger)?.ledger())
        }
        Action::Show { file } => show(file, &LedgerFile::read(file)?),
        Action::Add { file, mechanism, id, what } => {
            let path = mechanism;
            let mechanism = format::load(path)?;
            let Some(statement) = mechanism.privacy() else {
                bail!(Error::Unsupported {
                    what: "recording a mechanism that is not calibrated".into(),
                    hint: "its noise is not known yet; run `dpmf calibrate` first",
                });
            };
            let mut ledger = LedgerFile::open(file)?;
            ledger.ledger().check(statement)?;
            let id = match id {
                Some(id) => id.clone(),
                None => RunId::generate()?.to_string(),
            };
            let what = what.clone().unwrap_or_else(|| path.display().to_string());
            let release = Release::new(id, clock::now(), what, statement);
            ledger.record(vec![release])?;
            show(file, ledger.ledger())
        }
    }
}

fn show(path: &Path, ledger: &Ledger) -> anyhow::Result<Report> {
    let spent = ledger.spent()?;
    let alone =
        ledger.releases().iter().map(|release| ledger.alone(release)).collect::<dpmf::Result<Vec<_>>>()?;
    let releases = ledger.releases().iter().zip(&alone);
    let json = json!({
        "ledger": path,
        "unit": ledger.unit().name(),
        "adjacency": ledger.adjacency(),
        "epsilon": ledger.epsilon(),
        "delta": ledger.delta(),
        "epsilon_spent": spent,
        "releases": releases.clone().map(|(release, alone)| json!({
            "id": release.id,
            "time": release.time,
            "what": release.what,
            "noise_multiplier": release.noise_multiplier,
            "sampling": release.sampling,
            "epsilon_alone": alone,
        })).collect::<Vec<Value>>(),
    });
    let rows: Vec<Vec<String>> = releases
        .map(|(release, alone)| {
            vec![
                release.time.clone(),
                release.what.clone(),
                number(release.noise_multiplier),
                epsilon_for_people(*alone),
            ]
        })
        .collect();
    let mut text = format!(
        "{}: ε = {} of {} spent at δ = {:e}, for every {} ({})",
        path.display(),
        epsilon_for_people(spent),
        epsilon_for_people(ledger.epsilon()),
        ledger.delta(),
        ledger.unit().name(),
        ledger.adjacency()
    );
    if !rows.is_empty() {
        text += &format!("\n\n{}", table(&["recorded", "what", "σ", "ε alone"], &rows));
    }
    Ok(Report::new(json, text))
}
