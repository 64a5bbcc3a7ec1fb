//! `dpmf ledger`.

use crate::clock;
use crate::output;
use crate::report::{Report, number, table};
use crate::value_parsers;
use anyhow::bail;
use dpmf::accounting::statement::epsilon_for_people;
use dpmf::accounting::{Adjacency, Ledger, LedgerFile, PrivacyStatement, PrivacyUnit, Release};
use dpmf::noise::RunId;
use dpmf::{Error, format};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Keep a privacy budget for all releases about the same people.
///
/// Every release about a data set adds to what can be learned about the people in it. A ledger records each release
/// with its noise, and refuses a release that exceeds the budget, even if you decide on each one after looking at the
/// earlier ones. Releases that are decided together, before any of them is seen, cost less: record them in one command
/// with --together. `dpmf train --ledger FILE` records its models before training begins. Add other releases by their
/// mechanism file, or by their ε and δ.
#[derive(clap::Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "Examples:\n  dpmf ledger new people.ledger --epsilon 8 --delta 1e-6\n  dpmf train --data messages.csv \
    --epsilon 2 --ledger people.ledger\n  dpmf ledger add people.ledger m8.safetensors --what \"survey of May\"\n  \
    dpmf ledger add people.ledger may.safetensors june.safetensors --together\n  dpmf ledger add people.ledger \
    --epsilon 0.5 --delta 0 --what \"noisy counts\"\n  dpmf ledger show people.ledger"
)]
pub struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Create a ledger in a new file
    New {
        /// The ledger
        file: PathBuf,

        /// Largest ε of all releases together
        #[arg(long, value_name = "ε")]
        epsilon: f64,

        /// δ at which ε is counted
        #[arg(long, value_name = "δ")]
        delta: f64,

        /// Unit of privacy: user or record
        #[arg(
            long, default_value = "user",
            value_parser = value_parsers::of::<PrivacyUnit>(value_parsers::UNIT), hide_possible_values = true
        )]
        unit: PrivacyUnit,

        /// Which data sets are neighbours: replace-with-zero, add-or-remove or replace-one
        #[arg(
            long, default_value = "replace-with-zero",
            value_parser = value_parsers::of::<Adjacency>(value_parsers::ADJACENCY), hide_possible_values = true
        )]
        adjacency: Adjacency,
    },
    /// Show what has been recorded and how much is left
    Show {
        /// The ledger
        file: PathBuf,
    },
    /// Record releases of calibrated mechanisms, or one release by its ε and δ
    Add {
        /// The ledger
        file: PathBuf,

        /// Calibrated mechanism or plan files that have been run or will be run
        #[arg(value_name = "MECHANISM", required_unless_present = "epsilon")]
        mechanisms: Vec<PathBuf>,

        /// The mechanisms were decided on together, before any result was seen, so they compose exactly
        #[arg(long)]
        together: bool,

        /// ε of a release that was not made with dpmf
        #[arg(long, value_name = "ε", requires = "delta", conflicts_with_all = ["mechanisms", "together"])]
        epsilon: Option<f64>,

        /// δ of that release; 0 for pure differential privacy
        #[arg(long, value_name = "δ", requires = "epsilon")]
        delta: Option<f64>,

        /// Unique name of the release; recording the same name again does not count twice. Several mechanisms are numbered
        #[arg(long, value_name = "NAME")]
        id: Option<String>,

        /// Description of the release
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
        Action::Add { file, mechanisms, together, epsilon, delta, id, what } => {
            let id = match id {
                Some(id) => id.clone(),
                None => RunId::generate()?.to_string(),
            };
            let statements =
                mechanisms.iter().map(|path| statement(path)).collect::<anyhow::Result<Vec<_>>>()?;
            let mut ledger = LedgerFile::open(file)?;
            let mut releases = Vec::new();
            for (index, (path, statement)) in mechanisms.iter().zip(&statements).enumerate() {
                ledger.ledger().check(statement)?;
                let id = if mechanisms.len() == 1 { id.clone() } else { format!("{id}/{}", index + 1) };
                let what = what.clone().unwrap_or_else(|| path.display().to_string());
                releases.push(Release::new(id, clock::now(), what, statement)?);
            }
            if let (Some(epsilon), Some(delta)) = (epsilon, delta) {
                let what = what.as_deref().unwrap_or("a release by other means");
                releases.push(Release::stated(id, clock::now(), what, *epsilon, *delta)?);
            }
            if *together {
                ledger.record_together(releases)?;
            } else {
                ledger.record(releases)?;
            }
            show(file, ledger.ledger())
        }
    }
}

/// The guarantee of a calibrated mechanism in a file.
fn statement(path: &Path) -> anyhow::Result<PrivacyStatement> {
    match format::load(path)?.privacy() {
        Some(statement) => Ok(statement.clone()),
        None => bail!(Error::Unsupported {
            what: "recording a mechanism that is not calibrated".into(),
            hint: "its noise has no scale yet; run `dpmf calibrate` first",
        }),
    }
}

fn show(path: &Path, ledger: &Ledger) -> anyhow::Result<Report> {
    let (spent, fixed) = (ledger.spent()?, ledger.spent_if_fixed()?);
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
        "epsilon_if_fixed": fixed.is_finite().then_some(fixed),
        "decisions": ledger.decisions(),
        "releases": releases.clone().map(|(release, alone)| json!({
            "id": release.id,
            "time": release.time,
            "what": release.what,
            "noise_multiplier": release.noise_multiplier,
            "sampling": release.sampling,
            "guarantee": release.guarantee,
            "group": release.group,
            "epsilon_alone": alone,
        })).collect::<Vec<Value>>(),
    });
    let rows: Vec<Vec<String>> = releases
        .map(|(release, alone)| {
            vec![
                release.time.clone(),
                release.what.clone(),
                release.noise_multiplier.map_or_else(String::new, number),
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
    if ledger.decisions() > 1 && spent > fixed {
        text += &format!(
            "\nIf all releases had been decided beforehand, they would cost ε = {} together. Decided one after another they cost more, because each may depend on what the earlier ones showed.",
            epsilon_for_people(fixed)
        );
    }
    if spent > ledger.epsilon() {
        text += "\nVersion 0.2 undercounted and recorded more than the budget allows. Nothing further can be recorded.";
    }
    if !rows.is_empty() {
        text += &format!("\n\n{}", table(&["recorded", "what", "σ", "ε alone"], &rows));
    }
    Ok(Report::new(json, text))
}
