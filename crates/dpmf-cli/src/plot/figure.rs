//! Figures: panels of line charts, drawn to SVG or PNG.

use anyhow::{Context, bail};
use plotters::coord::Shift;
use plotters::coord::ranged1d::{AsRangedCoord, Ranged, ValueFormatter};
use plotters::prelude::*;
use std::path::Path;
use std::sync::Once;

/// DejaVu Sans, reduced to the letters that labels use; see `assets/`.
static FONT: &[u8] = include_bytes!("../../assets/DejaVuSans.ttf");

/// Colours that stay apart in print and for colour-blind readers (Okabe and Ito).
pub const COLORS: [RGBColor; 8] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(110, 110, 110),
    RGBColor(0, 0, 0),
];

/// How a series is drawn.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Mark {
    Line,
    LineAndPoints,
    Points,
    /// A horizontal line at the first point's height.
    Level,
}

/// One curve.
pub struct Series {
    pub label: String,
    pub points: Vec<(f64, f64)>,
    pub mark: Mark,
    pub color: RGBColor,
}

/// One set of axes.
pub struct Panel {
    pub title: String,
    pub x_label: String,
    pub y_label: String,
    pub x_log: bool,
    pub y_log: bool,
    pub series: Vec<Series>,
}

/// Height of a figure, and width of the axes of its only panel or of one beside others.
const HEIGHT: u32 = 470;
const WIDTHS: [u32; 2] = [720, 600];

impl Panel {
    /// Width of the strip beside the axes that holds the labels: no curve runs under them.
    fn legend_width(&self) -> u32 {
        let longest = self.series.iter().map(|series| series.label.chars().count()).max().unwrap_or(0);
        44 + 7 * longest as u32
    }
}

/// Draws panels side by side.
pub fn draw(panels: &[Panel], path: &Path) -> anyhow::Result<()> {
    render(path, size(panels), |area| area.draw_panels(panels))
}

/// Panels side by side as an SVG element.
pub fn svg(panels: &[Panel]) -> anyhow::Result<String> {
    register_font();
    let mut text = String::new();
    let root = SVGBackend::with_string(&mut text, size(panels)).into_drawing_area();
    root.draw_panels(panels)?;
    root.present()?;
    drop(root);
    Ok(text)
}

fn size(panels: &[Panel]) -> (u32, u32) {
    let axes = WIDTHS[usize::from(panels.len() > 1)];
    (panels.iter().map(|panel| axes + panel.legend_width()).sum(), HEIGHT)
}

fn register_font() {
    static REGISTER: Once = Once::new();
    REGISTER.call_once(|| {
        // The font is part of the program; it parses.
        let _ = plotters::style::register_font("sans-serif", FontStyle::Normal, FONT);
    });
}

/// What can be drawn on any backend.
pub trait Canvas {
    fn draw_panels(&self, panels: &[Panel]) -> anyhow::Result<()>;
    fn draw_with(&self, painter: &dyn Painter) -> anyhow::Result<()>;
}

/// Draws a filled rectangle between two corners.
pub type DrawRectangle<'a> = &'a mut dyn FnMut([(i32, i32); 2], RGBColor) -> anyhow::Result<()>;

/// Draws text of a size at its upper left corner.
pub type DrawText<'a> = &'a mut dyn FnMut((i32, i32), i32, &str) -> anyhow::Result<()>;

/// A picture that draws rectangles and text in pixels.
pub trait Painter {
    /// Calls `rectangle(corners, color)` and `text(position, size, content)` for everything in the picture.
    fn paint(&self, rectangle: DrawRectangle<'_>, text: DrawText<'_>) -> anyhow::Result<()>;
}

/// Opens the backend that the file name asks for.
pub fn render(
    path: &Path,
    size: (u32, u32),
    picture: impl FnOnce(&dyn Canvas) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    register_font();
    let writable = || format!("cannot write {}", path.display());
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("svg") => {
            let root = SVGBackend::new(path, size).into_drawing_area();
            picture(&root)?;
            root.present().with_context(writable)
        }
        Some("png") => {
            let root = BitMapBackend::new(path, size).into_drawing_area();
            picture(&root)?;
            root.present().with_context(writable)
        }
        _ => bail!(dpmf::Error::Format {
            path: path.to_owned(),
            reason: "a picture's name must end in .svg or .png".into()
        }),
    }
}

impl<DB: DrawingBackend> Canvas for DrawingArea<DB, Shift>
where
    DB::ErrorType: 'static,
{
    fn draw_panels(&self, panels: &[Panel]) -> anyhow::Result<()> {
        self.fill(&WHITE)?;
        let axes = WIDTHS[usize::from(panels.len() > 1)];
        let mut rest = self.clone();
        for panel in panels {
            let (area, after) = rest.split_horizontally(axes);
            let (legend, after) = after.split_horizontally(panel.legend_width());
            rest = after;
            draw_legend(&legend, panel)?;
            let area = &area;
            let (x, y) = (extent(panel, panel.x_log, |p| p.0), extent(panel, panel.y_log, |p| p.1));
            match (panel.x_log, panel.y_log) {
                (false, false) => draw_axes(area, panel, x.0..x.1, y.0..y.1)?,
                (true, false) => draw_axes(area, panel, (x.0..x.1).log_scale(), y.0..y.1)?,
                (false, true) => draw_axes(area, panel, x.0..x.1, (y.0..y.1).log_scale())?,
                (true, true) => draw_axes(area, panel, (x.0..x.1).log_scale(), (y.0..y.1).log_scale())?,
            }
        }
        Ok(())
    }

    fn draw_with(&self, painter: &dyn Painter) -> anyhow::Result<()> {
        self.fill(&WHITE)?;
        painter.paint(
            &mut |corners, color| Ok(self.draw(&Rectangle::new(corners, color.filled()))?),
            &mut |position, size, content| {
                let style = ("sans-serif", size).into_font().color(&RGBColor(30, 30, 30));
                Ok(self.draw(&Text::new(content.to_owned(), position, style))?)
            },
        )
    }
}

/// Range of the data, with a margin; a log axis by a factor.
fn extent(panel: &Panel, log: bool, pick: impl Fn(&(f64, f64)) -> f64) -> (f64, f64) {
    let values = panel.series.iter().flat_map(|series| &series.points).map(pick);
    let (low, high) = values
        .filter(|x| x.is_finite() && (!log || *x > 0.0))
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), x| (low.min(x), high.max(x)));
    if low > high {
        return (0.1, 1.0);
    }
    if log {
        let margin = (high / low).powf(0.04).max(1.1);
        return (low / margin, high * margin);
    }
    let margin = 0.04 * (high - low).max(1e-12 * high.abs()).max(f64::MIN_POSITIVE);
    let low = if low >= 0.0 && low < 0.5 * high { 0.0 } else { low - margin };
    (low, high + margin)
}

fn draw_axes<DB, X, Y>(area: &DrawingArea<DB, Shift>, panel: &Panel, x: X, y: Y) -> anyhow::Result<()>
where
    DB: DrawingBackend,
    DB::ErrorType: 'static,
    X: AsRangedCoord<Value = f64>,
    Y: AsRangedCoord<Value = f64>,
    X::CoordDescType: Ranged<ValueType = f64> + ValueFormatter<f64>,
    Y::CoordDescType: Ranged<ValueType = f64> + ValueFormatter<f64>,
{
    let mut chart = ChartBuilder::on(area)
        .caption(&panel.title, ("sans-serif", 19))
        .margin(14)
        .x_label_area_size(46)
        .y_label_area_size(76)
        .build_cartesian_2d(x, y)?;
    chart
        .configure_mesh()
        .x_desc(&panel.x_label)
        .y_desc(&panel.y_label)
        .axis_desc_style(("sans-serif", 16))
        .label_style(("sans-serif", 14))
        .x_label_formatter(&|value| tick(*value, panel.x_log))
        .y_label_formatter(&|value| tick(*value, panel.y_log))
        .x_labels(8)
        .y_labels(8)
        .light_line_style(WHITE.mix(0.0))
        .bold_line_style(RGBColor(225, 225, 225))
        .draw()?;
    let width = chart.plotting_area().get_x_range();
    for series in &panel.series {
        let color = series.color;
        let visible = |p: &(f64, f64)| (!panel.x_log || p.0 > 0.0) && (!panel.y_log || p.1 > 0.0);
        let points: Vec<(f64, f64)> = match (series.mark, series.points.first()) {
            (Mark::Level, Some(&(_, level))) => vec![(width.start, level), (width.end, level)],
            _ => series.points.iter().copied().filter(visible).collect(),
        };
        let stroke = color.stroke_width(2);
        if series.mark != Mark::Points {
            // Segment by segment: the joints of a jagged polyline would be drawn as spikes.
            chart.draw_series(
                thinned(&points).windows(2).map(|ends| PathElement::new(ends.to_vec(), stroke)),
            )?;
        }
        if matches!(series.mark, Mark::Points | Mark::LineAndPoints) {
            chart.draw_series(points.iter().map(|p| Circle::new(*p, 4, color.filled())))?;
        }
    }
    Ok(())
}

/// The marks and labels of a panel's series, one under the other.
fn draw_legend<DB>(area: &DrawingArea<DB, Shift>, panel: &Panel) -> anyhow::Result<()>
where
    DB: DrawingBackend,
    DB::ErrorType: 'static,
{
    let style = ("sans-serif", 14).into_font().color(&RGBColor(30, 30, 30));
    for (k, series) in panel.series.iter().enumerate() {
        let y = 56 + 24 * k as i32;
        if series.mark != Mark::Points {
            area.draw(&PathElement::new([(4, y), (24, y)], series.color.stroke_width(2)))?;
        }
        if matches!(series.mark, Mark::Points | Mark::LineAndPoints) {
            area.draw(&Circle::new((14, y), 4, series.color.filled()))?;
        }
        area.draw(&Text::new(series.label.clone(), (32, y - 7), style.clone()))?;
    }
    Ok(())
}

/// At most some two thousand points, the lowest and highest of every bucket, so that nothing visible is lost.
fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    const BUCKETS: usize = 1000;
    if points.len() <= 2 * BUCKETS {
        return points.to_vec();
    }
    let extremes = |bucket: &[(f64, f64)]| {
        let order = |a: &&(f64, f64), b: &&(f64, f64)| a.1.total_cmp(&b.1);
        let (low, high) = (bucket.iter().min_by(order), bucket.iter().max_by(order));
        let mut pair: Vec<(f64, f64)> = low.into_iter().chain(high).copied().collect();
        pair.sort_by(|a, b| a.0.total_cmp(&b.0));
        pair
    };
    points.chunks(points.len().div_ceil(BUCKETS)).flat_map(extremes).collect()
}

fn tick(value: f64, log: bool) -> String {
    if log && (value.abs() < 0.05 || value.abs() >= 1e4) {
        let exponent = value.abs().log10();
        if (exponent - exponent.round()).abs() < 1e-9 {
            return format!("10{}", superscript(exponent.round() as i32));
        }
        return format!("{value:.0e}");
    }
    if value.abs() >= 1e6 {
        return format!("{value:.1e}");
    }
    format!("{}", (value * 1e6).round() / 1e6)
}

fn superscript(exponent: i32) -> String {
    let digit = |c: char| match c {
        '-' => '⁻',
        '1' => '¹',
        '2' => '²',
        '3' => '³',
        '0' => '⁰',
        other => char::from_u32(0x2070 + (other as u32 - '0' as u32)).unwrap_or(other),
    };
    exponent.to_string().chars().map(digit).collect()
}
