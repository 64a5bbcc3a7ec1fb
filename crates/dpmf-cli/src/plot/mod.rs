//! `dpmf plot`.

mod buffers;
mod convergence;
mod error;
pub mod figure;
mod heatmap;
mod png;
mod privacy;
mod scale;
mod svg;

use crate::report::Report;
use serde_json::{Value, json};
use std::path::Path;

/// Draw a figure to .svg.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    figure: Figure,
}

#[derive(clap::Subcommand)]
enum Figure {
    /// Squared error of every step, by mechanism; beside it the prefix sum
    Error(error::Args),
    /// The factors B and C: values, ranks, and a histogram
    Heatmap(heatmap::Args),
    /// Gap to the optimum against time, for the fixed point and its rivals
    Convergence(convergence::Args),
    /// Loss over the certified bound against model-sized buffers
    Buffers(buffers::Args),
    /// ε against δ, and the trade-off curve with the audited point on it
    Privacy(privacy::Args),
}

pub fn run(args: &Args) -> anyhow::Result<Report> {
    match &args.figure {
        Figure::Error(args) => error::run(args),
        Figure::Heatmap(args) => heatmap::run(args),
        Figure::Convergence(args) => convergence::run(args),
        Figure::Buffers(args) => buffers::run(args),
        Figure::Privacy(args) => privacy::run(args),
    }
}

/// What a figure shows, as data.
fn report(panels: &[figure::Panel], out: &Path) -> Report {
    let series = |panel: &figure::Panel| -> Value {
        panel.series.iter().map(|s| json!({ "label": s.label, "points": s.points })).collect()
    };
    let panels: Vec<Value> = panels
        .iter()
        .map(|panel| json!({ "title": panel.title, "x": panel.x_label, "y": panel.y_label, "series": series(panel) }))
        .collect();
    Report::new(json!({ "out": out, "panels": panels }), format!("drawn to {}", out.display()))
}
