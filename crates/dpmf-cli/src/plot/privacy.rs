//! `dpmf plot privacy`: ε against δ, and the trade-off curve with what an audit found.

use super::figure::{self, COLORS, Mark, Panel, Series};
use crate::audit::play;
use crate::report::Report;
use crate::workload::count;
use anyhow::bail;
use dpmf::accounting::{Accountant, Adjacency, calibrate, gaussian};
use dpmf::audit::{AdversaryKind, AuditOptions, Promise};
use dpmf::format;
use std::path::PathBuf;

/// ε against δ by every accountant, and the trade-off of the best test.
///
/// The trade-off is between false positives and false negatives. For a calibrated mechanism file, the trade-off panel
/// also shows the errors that the strongest adversary reached in an audit: on the curve if the promise is tight, below
/// it if the promise is false.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  dpmf plot privacy --noise-multiplier 0.682 -o privacy.svg\n  \
    dpmf plot privacy m8.safetensors -o privacy.svg")]
pub struct Args {
    /// A calibrated mechanism file, to be audited
    file: Option<PathBuf>,

    /// A noise multiplier, instead of a mechanism file
    #[arg(long, value_name = "σ", conflicts_with = "file", required_unless_present = "file")]
    noise_multiplier: Option<f64>,

    /// Number of games in the audit
    #[arg(long, value_parser = count, default_value = "1e5")]
    trials: usize,

    /// Output file, .svg
    #[arg(long, short, value_name = "FILE", value_parser = figure::picture)]
    pub(super) out: PathBuf,
}

pub fn run(args: &Args) -> anyhow::Result<Report> {
    let (mu, title) = match (&args.file, args.noise_multiplier) {
        (Some(path), _) => {
            let mechanism = format::load(path)?;
            let Some(statement) = mechanism.privacy() else {
                bail!(dpmf::Error::Unsupported {
                    what: "the privacy of an uncalibrated mechanism".into(),
                    hint: "run `dpmf calibrate` first"
                });
            };
            let c = statement.calibration();
            let promise = Promise::try_from(c)?;
            (promise.mu, format!("ε = {:.4}, δ = {:e}", c.epsilon(), c.delta()))
        }
        (None, Some(sigma)) => {
            (calibrate::mu(sigma, Adjacency::ReplaceWithZero)?, format!("noise multiplier {sigma}"))
        }
        (None, None) => bail!("a mechanism file or --noise-multiplier is needed"),
    };

    let deltas: Vec<f64> =
        (0..=96).map(|k| 10f64.powf(-12.0 + k as f64 / 8.0)).filter(|d| *d < 0.5).collect();
    let mut curves = Vec::new();
    for (accountant, color) in Accountant::ALL.into_iter().zip(COLORS) {
        // An accountant may prove nothing at a large δ: its curve ends there.
        let points = deltas.iter().filter_map(|&d| Some((d, accountant.epsilon(mu, d).ok()?))).collect();
        curves.push(Series { label: accountant.name().into(), points, mark: Mark::Line, color });
    }
    let rates = (0..=400).map(|k| k as f64 / 400.0);
    let curve =
        rates.map(|alpha| Ok((alpha, gaussian::trade_off(mu, alpha)?))).collect::<dpmf::Result<Vec<_>>>()?;
    let mut trade_off = vec![
        Series {
            label: format!("promised, μ = {mu:.4}"), points: curve, mark: Mark::Line, color: COLORS[0]
        },
        Series {
            label: "perfect privacy".into(),
            points: vec![(0.0, 1.0), (1.0, 0.0)],
            mark: Mark::Line,
            color: COLORS[6],
        },
    ];
    if let Some(path) = &args.file {
        let options = AuditOptions { trials: args.trials as u64, ..Default::default() };
        let found = play(&format::load(path)?, AdversaryKind::WorstColumn, None, 2, options)?;
        let point = (found.test.false_positive_rate(), found.test.false_negative_rate());
        let label = format!("audited, μ ≥ {:.4}", found.mu_lower);
        trade_off.push(Series { label, points: vec![point], mark: Mark::Points, color: COLORS[1] });
    }
    let panels = [
        Panel {
            title: title.clone(),
            x_label: "δ".into(),
            y_label: "ε".into(),
            x_log: true,
            y_log: false,
            series: curves,
        },
        Panel {
            title: "trade-off of the best test".into(),
            x_label: "false positive rate".into(),
            y_label: "false negative rate".into(),
            x_log: false,
            y_log: false,
            series: trade_off,
        },
    ];
    figure::draw(&panels, &args.out)?;
    Ok(super::report(&panels, &args.out))
}
