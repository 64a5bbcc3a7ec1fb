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

use crate::output;
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
    Error(error::Args),
    Heatmap(heatmap::Args),
    Convergence(convergence::Args),
    Buffers(buffers::Args),
    Privacy(privacy::Args),
}

pub fn run(args: &Args) -> anyhow::Result<Report> {
    output::check(match &args.figure {
        Figure::Error(args) => &args.out,
        Figure::Heatmap(args) => &args.out,
        Figure::Convergence(args) => &args.out,
        Figure::Buffers(args) => &args.out,
        Figure::Privacy(args) => &args.out,
    })?;
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
