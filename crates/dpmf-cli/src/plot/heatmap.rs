//! `dpmf plot heatmap`: the factors of a mechanism, as in the paper's appendix "Visualization".

use super::figure::{self, DrawRectangle, DrawText, Painter};
use crate::progress::Spinner;
use crate::report::Report;
use crate::workload::{SolverArgs, WorkloadArgs};
use anyhow::bail;
use dpmf::{Representation, Selector};
use plotters::prelude::RGBColor;
use serde_json::json;
use std::path::PathBuf;

/// The factors B and C of a mechanism: values, ranks, and a histogram.
///
/// First row: entries over the largest of both factors. Second row: the rank of each entry among the non-zero
/// ones of its factor, which shows the structure off the diagonal. Third row: histogram of the magnitudes of
/// the non-zero entries.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  dpmf plot heatmap --steps 512 -o factors.png")]
pub struct Args {
    #[command(flatten)]
    workload: WorkloadArgs,

    #[command(flatten)]
    solver: SolverArgs,

    /// The mechanism to show
    #[arg(long, value_name = "NAME", default_value = "optimal:dense")]
    mechanism: Selector,

    /// The picture, .svg or .png
    #[arg(long, short, value_name = "FILE")]
    out: PathBuf,
}

const SIDE: i32 = 380;
const MARGIN: i32 = 56;
const STEP: i32 = SIDE + MARGIN + 24;
const HISTOGRAM: i32 = 180;
const BINS: usize = 60;

pub fn run(args: &Args) -> anyhow::Result<Report> {
    let problem = args.workload.problem(&args.solver)?;
    let n = problem.steps();
    if n > 4096 {
        bail!(dpmf::Error::Unsupported {
            what: format!("a heat map of {n} × {n} entries"),
            hint: "heat maps are drawn for at most 4096 steps"
        });
    }
    let spinner = Spinner::new("plot heatmap");
    let mechanism = problem.mechanism(args.mechanism, &mut |progress| spinner.observe(progress))?;
    let form = mechanism.form();
    let m = form.noise_rows();
    let (columns, encoder) = (problem.workload().times(form.coloring()), form.encoder());
    let decoder = Factor::new("B", n, m, |i, j| columns[(i, j)]);
    let encoder = Factor::new("C", m, n, |i, j| encoder[(i, j)]);
    let title = format!("{} for {}, {n} steps", args.mechanism, args.workload.describe());
    // SVG draws every cell as an element: keep their number bounded.
    let cells = if args.out.extension().is_some_and(|e| e == "svg") { 96 } else { SIDE as usize };
    let picture = Picture { title, factors: [decoder, encoder], cells };
    let size = ((2 * STEP + MARGIN) as u32, (2 * STEP + HISTOGRAM + 2 * MARGIN + 20) as u32);
    figure::render(&args.out, size, |canvas| canvas.draw_with(&picture))?;
    let largest: Vec<f64> = picture.factors.iter().map(|factor| factor.largest).collect();
    let json = json!({ "out": args.out, "largest_entry": { "B": largest[0], "C": largest[1] } });
    Ok(Report::new(json, format!("drawn to {}", args.out.display())))
}

struct Factor {
    name: &'static str,
    rows: usize,
    columns: usize,
    /// Magnitudes, by rows.
    values: Vec<f64>,
    /// Non-zero magnitudes, ascending.
    sorted: Vec<f64>,
    largest: f64,
}

impl Factor {
    fn new(name: &'static str, rows: usize, columns: usize, at: impl Fn(usize, usize) -> f64) -> Self {
        let values: Vec<f64> =
            (0..rows).flat_map(|i| (0..columns).map(move |j| (i, j))).map(|(i, j)| at(i, j).abs()).collect();
        let mut sorted: Vec<f64> = values.iter().copied().filter(|x| *x > 0.0).collect();
        sorted.sort_by(f64::total_cmp);
        let largest = sorted.last().copied().unwrap_or(1.0);
        Self { name, rows, columns, values, sorted, largest }
    }

    /// Share of the non-zero entries that are not larger.
    fn rank(&self, x: f64) -> f64 {
        if x == 0.0 {
            0.0
        } else {
            self.sorted.partition_point(|y| *y <= x) as f64 / self.sorted.len() as f64
        }
    }
}

struct Picture {
    title: String,
    factors: [Factor; 2],
    cells: usize,
}

impl Painter for Picture {
    fn paint(&self, rectangle: DrawRectangle<'_>, text: DrawText<'_>) -> anyhow::Result<()> {
        text((MARGIN, 12), 20, &self.title)?;
        let scale = self.factors.iter().map(|factor| factor.largest).fold(0.0, f64::max);
        for (column, factor) in self.factors.iter().enumerate() {
            let left = MARGIN + column as i32 * STEP;
            for (row, caption) in ["over the largest entry", "rank of the magnitude"].into_iter().enumerate()
            {
                let top = MARGIN + 8 + row as i32 * STEP;
                text((left, top - 22), 15, &format!("{}, {caption}", factor.name))?;
                rectangle([(left - 1, top - 1), (left + SIDE + 1, top + SIDE + 1)], RGBColor(190, 190, 190))?;
                let (down, across) = (self.cells.min(factor.rows), self.cells.min(factor.columns));
                let edge =
                    |k: usize, cells: usize| (k as f64 * f64::from(SIDE) / cells as f64).round() as i32;
                for a in 0..down {
                    for b in 0..across {
                        let (i, j) = (a * factor.rows / down, b * factor.columns / across);
                        let x = factor.values[i * factor.columns + j];
                        let shade = if row == 0 { x / scale } else { factor.rank(x) };
                        let corners = [
                            (left + edge(b, across), top + edge(a, down)),
                            (left + edge(b + 1, across), top + edge(a + 1, down)),
                        ];
                        rectangle(corners, red(shade))?;
                    }
                }
            }
            let top = MARGIN + 8 + 2 * STEP;
            text(
                (left, top - 22),
                15,
                &format!("{}, magnitudes of its {} entries", factor.name, factor.sorted.len()),
            )?;
            let mut counts = [0_usize; BINS];
            for x in &factor.sorted {
                counts[((x / factor.largest * BINS as f64) as usize).min(BINS - 1)] += 1;
            }
            let tallest = counts.iter().copied().max().unwrap_or(1).max(2) as f64;
            for (k, &count) in counts.iter().enumerate() {
                // Logarithmic height, so that the few large entries can be seen beside the many small.
                let height = ((1.0 + count as f64).ln() / (1.0 + tallest).ln() * f64::from(HISTOGRAM)) as i32;
                let x = |k: usize| left + (k as i32 * SIDE) / BINS as i32;
                rectangle([(x(k), top + HISTOGRAM - height), (x(k + 1) - 1, top + HISTOGRAM)], red(0.7))?;
            }
            rectangle([(left, top + HISTOGRAM), (left + SIDE, top + HISTOGRAM + 1)], RGBColor(60, 60, 60))?;
            text((left, top + HISTOGRAM + 8), 14, "0")?;
            let largest = format!("{:.3}", factor.largest);
            text((left + SIDE - 8 * largest.len() as i32, top + HISTOGRAM + 8), 14, &largest)?;
        }
        text((MARGIN, MARGIN + 2 * STEP + HISTOGRAM + 38), 13, "Histogram heights are logarithmic.")
    }
}

/// White to dark red.
fn red(shade: f64) -> RGBColor {
    let s = shade.clamp(0.0, 1.0);
    let mix = |from: f64, to: f64, t: f64| (from + (to - from) * t).round() as u8;
    if s < 0.5 {
        let t = 2.0 * s;
        RGBColor(mix(255.0, 239.0, t), mix(255.0, 83.0, t), mix(255.0, 65.0, t))
    } else {
        let t = 2.0 * s - 1.0;
        RGBColor(mix(239.0, 95.0, t), mix(83.0, 0.0, t), mix(65.0, 13.0, t))
    }
}
