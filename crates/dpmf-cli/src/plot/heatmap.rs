//! `dpmf plot heatmap`: the factors of a mechanism, as in the paper's appendix "Visualization".

use super::figure::{self, Frame, LABEL, TITLE};
use super::png;
use super::scale::Scale;
use super::svg::{AXIS, Anchor, Color, Ground, Svg};
use crate::progress::Spinner;
use crate::report::Report;
use crate::value_parsers;
use crate::workload::{SolverArgs, WorkloadArgs};
use anyhow::bail;
use dpmf::{Representation, Selector};
use serde_json::json;
use std::path::PathBuf;

/// The factors B and C of a mechanism: values, ranks, and a histogram.
///
/// With several participations: X = CᵀC, which shows how the steps of a unit interact, C, and N = C⁻¹.
///
/// First row: magnitudes of the entries. Second row: the rank of each entry among the non-zero ones of its factor,
/// which shows the structure off the diagonal. Third row: histogram of the magnitudes of the non-zero entries. Where
/// there are more entries than pixels, a pixel shows the largest entry that it covers.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  dpmf plot heatmap --steps 512 -o factors.svg")]
pub struct Args {
    #[command(flatten)]
    workload: WorkloadArgs,

    #[command(flatten)]
    solver: SolverArgs,

    /// The mechanism to show
    #[arg(
        long, value_name = "NAME", default_value = "optimal:dense",
        value_parser = value_parsers::mechanism::<Selector>(), hide_possible_values = true
    )]
    mechanism: Selector,

    /// Output file, .svg
    #[arg(long, short, value_name = "FILE", value_parser = figure::picture)]
    pub(super) out: PathBuf,
}

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
    let (coloring, c) = (form.coloring(), form.encoder());
    let encoder = Factor::new("C", m, n, |i, j| c[(i, j)]);
    let mut title = format!("{} for {}, {n} steps", args.mechanism, args.workload.describe());
    let factors = match problem.participation().pattern(n)?.separation {
        None => {
            let b = problem.workload().times(coloring);
            vec![Factor::new("B", n, m, |i, j| b[(i, j)]), encoder]
        }
        Some(_) => {
            title += &format!(", {}", problem.participation());
            let x = c.transpose() * &c;
            let gram = Factor::new("X", n, n, |i, j| x[(i, j)]);
            vec![gram, encoder, Factor::new("N", n, m, |i, j| coloring[(i, j)])]
        }
    };
    figure::write(&args.out, &picture(&title, &factors))?;
    let largest: serde_json::Map<String, serde_json::Value> =
        factors.iter().map(|factor| (factor.name.into(), factor.largest.into())).collect();
    let json = json!({ "out": args.out, "largest_entry": largest });
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

    /// The entries as an image, `shade` giving the place of each on the colour bar, 0 to 1.
    fn raster(&self, palette: &[Color; 256], shade: impl Fn(f64) -> f64) -> Vec<u8> {
        let (down, across) = (self.rows.min(MOST_PIXELS), self.columns.min(MOST_PIXELS));
        let under = |pixel: usize, pixels: usize, entries: usize| {
            pixel * entries / pixels..((pixel + 1) * entries).div_ceil(pixels)
        };
        let mut pixels = Vec::with_capacity(down * across);
        for a in 0..down {
            for b in 0..across {
                let rows = under(a, down, self.rows);
                let largest = rows
                    .flat_map(|i| &self.values[i * self.columns..][under(b, across, self.columns)])
                    .fold(0.0, |largest: f64, x| largest.max(*x));
                pixels.push((255.0 * shade(largest)).round() as u8);
            }
        }
        png::encode(across, palette, &pixels)
    }
}

/// Pixels of an image along a side: every entry of the usual sizes, and enough for a large screen.
const MOST_PIXELS: usize = 640;

const SIDE: f64 = 300.0;
const LEFT: f64 = 76.0;
const STEP: (f64, f64) = (SIDE + 96.0, SIDE + 92.0);
const TOP: f64 = 74.0;
const HISTOGRAM: f64 = 150.0;
const BINS: usize = 50;

fn picture(title: &str, factors: &[Factor]) -> String {
    let palette: [Color; 256] = std::array::from_fn(|k| red(k as f64 / 255.0));
    let largest = factors.iter().map(|factor| factor.largest).fold(0.0, f64::max);
    let mut svg = Svg::new(Ground::White);
    svg.text((LEFT, 22.0), TITLE + 2.0, Anchor::Start, title);
    for (k, factor) in factors.iter().enumerate() {
        let left = LEFT + k as f64 * STEP.0;
        let images = [
            ("magnitude", factor.raster(&palette, |x| x / largest)),
            ("rank of the magnitude", factor.raster(&palette, |x| factor.rank(x))),
        ];
        for (row, (caption, image)) in images.into_iter().enumerate() {
            let frame = Frame {
                corner: (left, TOP + row as f64 * STEP.1),
                size: (SIDE, SIDE),
                x: Scale::linear(0.0, factor.columns as f64),
                y: Scale::linear(factor.rows as f64, 0.0),
            };
            frame.draw(&mut svg, &[format!("{}: {caption}", factor.name)], ["column", "row"]);
            svg.raster(frame.corner, frame.size, &image);
        }
        histogram(&mut svg, factor, (left, TOP + 2.0 * STEP.1));
    }
    let right = LEFT + (factors.len() - 1) as f64 * STEP.0 + SIDE + 20.0;
    color_bar(&mut svg, &palette, (right, TOP), Scale::linear(0.0, largest), "magnitude of an entry");
    let share = "share of entries not larger";
    color_bar(&mut svg, &palette, (right, TOP + STEP.1), Scale::linear(0.0, 1.0), share);
    svg.finish((right + 92.0, TOP + 2.0 * STEP.1 + HISTOGRAM + 56.0), title)
}

/// How often magnitudes occur, on a logarithmic axis, so that the few large are seen beside the many small.
fn histogram(svg: &mut Svg, factor: &Factor, corner: (f64, f64)) {
    let mut counts = [0_u32; BINS];
    for x in &factor.sorted {
        counts[((x / factor.largest * BINS as f64) as usize).min(BINS - 1)] += 1;
    }
    let tallest = counts.iter().copied().max().unwrap_or(1).max(10);
    let frame = Frame {
        corner,
        size: (SIDE, HISTOGRAM),
        x: Scale::linear(0.0, factor.largest),
        // From a half, so that a bar for one entry has a height.
        y: Scale::covering([0.5, f64::from(tallest)].into_iter(), true, 0.0),
    };
    let title = format!("{}: its {} entries", factor.name, factor.sorted.len());
    frame.draw(svg, &[title], ["magnitude", "entries"]);
    let edge = |bin: usize| factor.largest * bin as f64 / BINS as f64;
    for (bin, &count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
        let (left, top) = frame.place((edge(bin), f64::from(count)));
        let right = frame.place((edge(bin + 1), 1.0)).0;
        svg.rectangle((left, top), (right - left - 0.5, corner.1 + HISTOGRAM - top), red(0.7));
    }
}

/// Which colour stands for which number, as high as an image.
fn color_bar(svg: &mut Svg, palette: &[Color; 256], (left, top): (f64, f64), scale: Scale, label: &str) {
    let pixels: Vec<u8> = (0..=255).rev().collect();
    svg.raster((left, top), (16.0, SIDE), &png::encode(1, palette, &pixels));
    let right = left + 16.0;
    let mut marks = vec![[(right, top), (right, top + SIDE)]];
    for tick in scale.ticks(6) {
        let y = top + SIDE * (1.0 - tick.place);
        marks.push([(right, y), (right + 5.0, y)]);
        svg.text((right + 8.0, y), LABEL - 1.0, Anchor::Start, &tick.label);
    }
    svg.segments(&marks, AXIS);
    svg.upright_text((right + 58.0, top + SIDE / 2.0), LABEL, label);
}

/// White to dark red.
fn red(shade: f64) -> Color {
    let s = shade.clamp(0.0, 1.0);
    let mix = |from: f64, to: f64, t: f64| (from + (to - from) * t).round() as u8;
    if s < 0.5 {
        let t = 2.0 * s;
        Color(mix(255.0, 239.0, t), mix(255.0, 83.0, t), mix(255.0, 65.0, t))
    } else {
        let t = 2.0 * s - 1.0;
        Color(mix(239.0, 95.0, t), mix(83.0, 0.0, t), mix(65.0, 13.0, t))
    }
}
