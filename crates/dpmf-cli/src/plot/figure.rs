//! Figures: panels of line charts side by side, as SVG.

use super::scale::{Scale, Tick};
use super::svg::{AXIS, Anchor, GRID, Ground, Svg, text_width, wrapped};
use crate::output;
use dpmf::disk::Access;
use std::io::Write;
use std::path::{Path, PathBuf};

pub use super::svg::{COLORS, Color, escape, variables};

/// How a series is drawn.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Mark {
    Line,
    LineAndPoints,
    Points,
    /// A horizontal line at the first point's height.
    Level,
    /// An upright line for every two points, from one to the other: intervals of the series that follows, without a name.
    Bars,
}

/// One curve, its points from left to right.
pub struct Series {
    pub label: String,
    pub points: Vec<(f64, f64)>,
    pub mark: Mark,
    pub color: Color,
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

/// Draws panels to a file.
pub fn draw(panels: &[Panel], path: &Path) -> anyhow::Result<()> {
    write(path, &svg(panels))
}

/// Writes a picture to a file.
pub(super) fn write(path: &Path, picture: &str) -> anyhow::Result<()> {
    output::save(path, Access::Everyone, |file| file.write_all(picture.as_bytes()))
}

/// The name of a picture, from the command line.
pub fn picture(name: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(name);
    match path.extension() {
        Some(extension) if extension == "svg" => Ok(path),
        _ => Err(
            "figures are written as .svg; browsers, Inkscape and rsvg-convert convert them to other formats"
                .into(),
        ),
    }
}

/// Panels side by side as a picture of its own.
///
/// Curves are named at their ends where that has room in every panel. Otherwise a legend is beside the only panel or below
/// several: one for all if the curves of one panel name those of all.
///
/// Cost: at most two points a pixel column of each curve, however many it has.
pub fn svg(panels: &[Panel]) -> String {
    let single = panels.len() == 1;
    let size = if single { SINGLE } else { BESIDE_OTHERS };
    let lines = |panel: &Panel| wrapped(&panel.title, TITLE, size.0);
    let top = 22.0 + 20.0 * panels.iter().map(|panel| lines(panel).len()).max().unwrap_or(0) as f64;
    let below = top + size.1 + 60.0;
    let most = if single { LEGEND_WIDTH } else { 0.7 * LEGEND_WIDTH };
    let rooms: Option<Vec<f64>> = panels.iter().map(|panel| panel.room_for_names(size.1, most)).collect();
    let mut svg = Svg::new(Ground::White);
    let mut end = (0.0, below - 8.0);
    let mut lefts = Vec::new();
    for (k, panel) in panels.iter().enumerate() {
        let frame = Frame::of(panel, (end.0, top), size, Frame::left_margin);
        frame.draw(&mut svg, &lines(panel), [&panel.x_label, &panel.y_label]);
        panel.draw_curves(&mut svg, &frame);
        lefts.push(frame.corner.0);
        end.0 = frame.corner.0 + size.0 + 24.0;
        if let Some(rooms) = &rooms {
            panel.draw_names(&mut svg, &frame, rooms[k]);
            end.0 += rooms[k] - 8.0;
        }
    }
    let shared = panels.iter().find(|panel| panels.iter().all(|other| panel.names_all_of(other)));
    let mut legend = |panel: &Panel, corner, width| {
        let (right, bottom) = panel.draw_legend(&mut svg, corner, width);
        end = (end.0.max(right), end.1.max(bottom));
    };
    match (shared, lefts.as_slice()) {
        _ if rooms.is_some() => {}
        (Some(panel), [left]) => legend(panel, (left + size.0 + 24.0, top + 8.0), 0.0),
        (Some(panel), [first, .., last]) => legend(panel, (*first, below), last + size.0 - first),
        _ => panels.iter().zip(&lefts).for_each(|(panel, left)| legend(panel, (*left, below), size.0)),
    }
    let titles: Vec<String> = panels.iter().map(Panel::description).collect();
    svg.finish(end, &titles.join("; "))
}

/// A panel as an element of a page with [`variables`], without its title.
///
/// It is drawn for the width of a phone and can be shown at any: text stays as large as the curves.
///
/// Cost: as of [`svg`].
pub fn in_page(panel: &Panel) -> String {
    let words = wrapped(&panel.y_label, LABEL, IN_PAGE.0 - 8.0);
    let top = 14.0 + 17.0 * words.len() as f64;
    let names = panel.room_for_names(IN_PAGE.1, 0.3 * IN_PAGE.0);
    let right = names.map_or(12.0, |room| room + 4.0);
    let numbers = |frame: &Frame| frame.widest_number() + 12.0;
    let left = numbers(&Frame::of(panel, (0.0, top), IN_PAGE, numbers));
    let size = (IN_PAGE.0 - left - right, IN_PAGE.1);
    let frame = Frame::of(panel, (0.0, top), size, numbers);
    let mut svg = Svg::new(Ground::Page);
    for (k, line) in words.iter().enumerate() {
        svg.text((0.0, 9.0 + 17.0 * k as f64), LABEL, Anchor::Start, line);
    }
    frame.draw_axes(&mut svg);
    let bottom = top + size.1 + 34.0;
    svg.text((frame.corner.0 + size.0 / 2.0, bottom), LABEL, Anchor::Middle, &panel.x_label);
    panel.draw_curves(&mut svg, &frame);
    let mut end = bottom + 12.0;
    match names {
        Some(room) => panel.draw_names(&mut svg, &frame, room),
        None => end = panel.draw_legend(&mut svg, (2.0, bottom + 24.0), IN_PAGE.0 - 16.0).1,
    }
    svg.finish((IN_PAGE.0, end), &panel.description())
}

/// Sizes of the axes.
const SINGLE: (f64, f64) = (540.0, 340.0);
const BESIDE_OTHERS: (f64, f64) = (360.0, 300.0);

/// Width of the whole picture and height of the axes, in a page.
const IN_PAGE: (f64, f64) = (420.0, 230.0);

/// Width at which the labels of a legend beside the axes are broken.
const LEGEND_WIDTH: f64 = 200.0;

/// Most curves that are named at their ends.
const MOST_NAMED: usize = 6;

/// From the axes to the names of curves, and between lines of those.
const LEADER: f64 = 16.0;
const LINE: f64 = 15.0;

/// Sizes of text.
pub(super) const TITLE: f64 = 15.0;
pub(super) const LABEL: f64 = 13.0;
const TICK: f64 = 12.0;

/// How a curve is broken where earlier ones lie under it, by their number.
const DASHES: [&str; 3] = ["", "8 8", "4 6"];

/// A rectangle with an axis along its bottom and one up its left side.
pub(super) struct Frame {
    pub corner: (f64, f64),
    pub size: (f64, f64),
    pub x: Scale,
    pub y: Scale,
}

impl Frame {
    /// Axes around all that a panel shows, below `start.1`, and right of `start.0` by what `left` says that labels take.
    fn of(panel: &Panel, start: (f64, f64), size: (f64, f64), left: impl Fn(&Self) -> f64) -> Self {
        let (x, y) = panel.scales();
        let mut frame = Self { corner: start, size, x, y };
        frame.corner.0 += left(&frame);
        frame
    }

    /// Room that the label and the numbers of the vertical axis take.
    pub fn left_margin(&self) -> f64 {
        16.0 + LABEL + 8.0 + self.widest_number() + 8.0
    }

    fn widest_number(&self) -> f64 {
        self.y_ticks().iter().map(|tick| text_width(&tick.label, TICK)).fold(0.0, f64::max)
    }

    /// As many as have room for their labels.
    fn x_ticks(&self) -> Vec<Tick> {
        let room = |ticks: &Vec<Tick>| {
            let labelled: Vec<&Tick> = ticks.iter().filter(|tick| !tick.label.is_empty()).collect();
            labelled.windows(2).all(|pair| {
                let widths = text_width(&pair[0].label, TICK) + text_width(&pair[1].label, TICK);
                (pair[1].place - pair[0].place).abs() * self.size.0 > widths / 2.0 + 10.0
            })
        };
        let most = (self.size.0 / 60.0).min(7.0) as usize;
        (1..=most).rev().map(|wanted| self.x.ticks(wanted)).find(room).unwrap_or_default()
    }

    fn y_ticks(&self) -> Vec<Tick> {
        self.y.ticks((self.size.1 / 45.0) as usize)
    }

    /// Where values lie in the picture.
    pub fn place(&self, (x, y): (f64, f64)) -> (f64, f64) {
        (self.across(self.x.place(x)), self.down(self.y.place(y)))
    }

    fn across(&self, share: f64) -> f64 {
        self.corner.0 + self.size.0 * share
    }

    fn down(&self, share: f64) -> f64 {
        self.corner.1 + self.size.1 * (1.0 - share)
    }

    /// Grid, axes, ticks and labels; the lines of the title stand above.
    pub fn draw(&self, svg: &mut Svg, title: &[String], [x_label, y_label]: [&str; 2]) {
        self.draw_axes(svg);
        let ((left, top), (width, height)) = (self.corner, self.size);
        for (k, line) in title.iter().rev().enumerate() {
            svg.text((left, top - 18.0 - 20.0 * k as f64), TITLE, Anchor::Start, line);
        }
        svg.text((left + width / 2.0, top + height + 37.0), LABEL, Anchor::Middle, x_label);
        let middle = left - self.left_margin() + 16.0 + LABEL / 2.0;
        svg.upright_text((middle, top + height / 2.0), LABEL, y_label);
    }

    /// Grid, axes and ticks with their numbers.
    fn draw_axes(&self, svg: &mut Svg) {
        let ((left, top), (width, height)) = (self.corner, self.size);
        let (right, bottom) = (left + width, top + height);
        let (mut grid, mut marks) = (Vec::new(), Vec::new());
        for tick in self.x_ticks() {
            let x = self.across(tick.place);
            if !tick.label.is_empty() {
                grid.push([(x, top), (x, bottom)]);
                svg.text((x, bottom + 15.0), TICK, Anchor::Middle, &tick.label);
            }
            marks.push([(x, bottom), (x, bottom + if tick.label.is_empty() { 3.0 } else { 6.0 })]);
        }
        for tick in self.y_ticks() {
            let y = self.down(tick.place);
            if !tick.label.is_empty() {
                grid.push([(left, y), (right, y)]);
                svg.text((left - 9.0, y), TICK, Anchor::End, &tick.label);
            }
            marks.push([(left - if tick.label.is_empty() { 3.0 } else { 6.0 }, y), (left, y)]);
        }
        marks.push([(left, top), (left, bottom)]);
        marks.push([(left, bottom), (right, bottom)]);
        svg.segments(&grid, GRID);
        svg.segments(&marks, AXIS);
    }
}

impl Panel {
    /// What the panel shows, in words.
    fn description(&self) -> String {
        format!("{}: {} against {}", self.title, self.y_label, self.x_label)
    }

    /// Series with a name.
    pub fn named(&self) -> impl Iterator<Item = &Series> {
        self.series.iter().filter(|series| series.mark != Mark::Bars)
    }

    /// Axes around all points.
    fn scales(&self) -> (Scale, Scale) {
        let points = || self.series.iter().flat_map(|series| &series.points);
        let x = Scale::covering(points().map(|p| p.0), self.x_log, 0.0);
        (x, Scale::covering(points().map(|p| p.1), self.y_log, 0.04))
    }

    /// Room right of axes of a height for the names of the curves, leaders included, if they are few, end there, and are no
    /// wider than `most`.
    fn room_for_names(&self, height: f64, most: f64) -> Option<f64> {
        let (x, y) = self.scales();
        let (mut room, mut lines) = (0.0_f64, 0);
        for series in self.named() {
            let last = series.points.iter().rfind(|p| x.shows(p.0) && y.shows(p.1))?;
            if series.mark != Mark::Level && x.place(last.0) < 0.85 {
                return None;
            }
            let name = wrapped(&series.label, TICK, most - LEADER);
            lines += name.len();
            room = name.iter().map(|line| text_width(line, TICK)).fold(room, f64::max);
        }
        let count = self.named().count();
        let fits = room + LEADER <= most && lines as f64 * LINE + count as f64 * 4.0 <= height;
        (fits && (1..=MOST_NAMED).contains(&count)).then_some(room + LEADER)
    }

    /// Names of the curves in a column right of the axes, each as near to the end of its curve as the others let it.
    fn draw_names(&self, svg: &mut Svg, frame: &Frame, room: f64) {
        let edge = frame.corner.0 + frame.size.0;
        let mut ends: Vec<((f64, f64), Vec<String>, Color)> = Vec::new();
        for series in self.named() {
            let shown = |p: &&(f64, f64)| frame.x.shows(p.0) && frame.y.shows(p.1);
            let Some(last) = series.points.iter().rfind(shown) else { continue };
            let (x, y) = frame.place(*last);
            let end =
                (if series.mark == Mark::Level { edge } else { x }, settled(series, frame).unwrap_or(y));
            ends.push((end, wrapped(&series.label, TICK, room - LEADER), series.color));
        }
        ends.sort_by(|a, b| a.0.1.total_cmp(&b.0.1));
        let wanted: Vec<(f64, f64)> =
            ends.iter().map(|(end, lines, _)| (end.1, lines.len() as f64 * LINE + 4.0)).collect();
        let places = spread(&wanted, frame.corner.1, frame.corner.1 + frame.size.1);
        for ((end, lines, color), middle) in ends.iter().zip(places) {
            svg.segments(&[[(end.0 + 2.0, end.1), (edge + LEADER - 4.0, middle)]], *color);
            for (k, line) in lines.iter().enumerate() {
                let y = middle + LINE * (k as f64 - (lines.len() - 1) as f64 / 2.0);
                svg.text((edge + LEADER, y), TICK, Anchor::Start, line);
            }
        }
    }

    /// Whether this panel's legend serves the other as well.
    fn names_all_of(&self, other: &Self) -> bool {
        let same = |a: &Series, b: &Series| (&a.label, a.color, a.mark) == (&b.label, b.color, b.mark);
        other.series.iter().all(|theirs| self.series.iter().any(|ours| same(ours, theirs)))
    }

    fn draw_curves(&self, svg: &mut Svg, frame: &Frame) {
        let mut drawn: Vec<Vec<(f64, f64)>> = Vec::new();
        for series in &self.series {
            let shown = |p: &&(f64, f64)| frame.x.shows(p.0) && frame.y.shows(p.1);
            let points: Vec<(f64, f64)> =
                series.points.iter().filter(shown).map(|point| frame.place(*point)).collect();
            // A line through one point would not be seen.
            if series.mark.has_dots() || (series.mark == Mark::Line && points.len() == 1) {
                points.iter().for_each(|point| svg.dot(*point, series.color));
            }
            let line = match (series.mark, points.first()) {
                (Mark::Level, Some((_, y))) => {
                    vec![(frame.corner.0, *y), (frame.corner.0 + frame.size.0, *y)]
                }
                (Mark::Points, _) => Vec::new(),
                (Mark::Bars, _) => {
                    let bars: Vec<_> = points.chunks_exact(2).map(|pair| [pair[0], pair[1]]).collect();
                    svg.segments(&bars, series.color);
                    Vec::new()
                }
                _ => thinned(&points),
            };
            if line.len() > 1 {
                let hidden = drawn.iter().filter(|earlier| coincide(earlier, &line)).count();
                svg.curve(&line, series.color, DASHES[hidden.min(DASHES.len() - 1)]);
            }
            drawn.push(line);
        }
    }

    /// Marks and labels in rows no wider than `width`, if 0 one under the other; the lower right end of them.
    fn draw_legend(&self, svg: &mut Svg, (left, top): (f64, f64), width: f64) -> (f64, f64) {
        let (mut x, mut y, mut right, mut bottom) = (left, top, left, top);
        for series in self.named() {
            let lines = wrapped(&series.label, LABEL, LEGEND_WIDTH.max(width - 32.0));
            let text = lines.iter().map(|line| text_width(line, LABEL)).fold(0.0, f64::max);
            if x > left && x + 32.0 + text > left + width {
                (x, y) = (left, bottom + 8.0);
            }
            if series.mark.has_line() {
                svg.curve(&[(x, y), (x + 24.0, y)], series.color, "");
            }
            if series.mark.has_dots() {
                svg.dot((x + 12.0, y), series.color);
            }
            for (k, line) in lines.iter().enumerate() {
                svg.text((x + 32.0, y + 17.0 * k as f64), LABEL, Anchor::Start, line);
            }
            x += 32.0 + text;
            (right, bottom) = (right.max(x), bottom.max(y + 17.0 * lines.len() as f64));
            x += 20.0;
        }
        (right + 14.0, bottom + 6.0)
    }
}

/// The middle of a curve near its end, where it goes up and down there: the last point alone would be far from what is seen.
fn settled(series: &Series, frame: &Frame) -> Option<f64> {
    let shown = |p: &&(f64, f64)| frame.x.shows(p.0) && frame.y.shows(p.1);
    let places = series.points.iter().filter(shown).map(|point| frame.place(*point));
    let near: Vec<f64> =
        places.filter(|(x, _)| *x >= frame.corner.0 + 0.95 * frame.size.0).map(|(_, y)| y).collect();
    let turns = near.windows(3).filter(|y| (y[1] - y[0]) * (y[2] - y[1]) < 0.0).count();
    let (low, high) =
        near.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), y| (low.min(*y), high.max(*y)));
    (turns >= 3 && high - low > 2.0 * LINE).then_some((low + high) / 2.0)
}

/// Middles of intervals with given heights, in their order, none over another, between `low` and `high` if they fit, and
/// together as near to where they are wanted as that allows.
fn spread(wanted: &[(f64, f64)], low: f64, high: f64) -> Vec<f64> {
    // With the heights before it taken away, a start only has to be no less than the one before: neighbours that are not
    // share their mean.
    let mut blocks: Vec<(f64, usize)> = Vec::new();
    let mut before = 0.0;
    for (middle, height) in wanted {
        let mut block = (middle - height / 2.0 - before, 1);
        before += height;
        while let Some(&(mean, count)) = blocks.last().filter(|last| last.0 > block.0) {
            let total = count + block.1;
            block = ((mean * count as f64 + block.0 * block.1 as f64) / total as f64, total);
            blocks.pop();
        }
        blocks.push(block);
    }
    let starts = blocks.iter().flat_map(|(start, count)| std::iter::repeat_n(*start, *count));
    let mut below = 0.0;
    let middle = |(start, (_, height)): (f64, &(f64, f64))| {
        let middle = start.min(high - before).max(low) + below + height / 2.0;
        below += height;
        middle
    };
    starts.zip(wanted).map(middle).collect()
}

impl Mark {
    fn has_line(self) -> bool {
        self != Self::Points
    }

    fn has_dots(self) -> bool {
        matches!(self, Self::Points | Self::LineAndPoints)
    }
}

/// The points without which a curve would look different: the lowest and highest of every pixel column and the ends, and of
/// those the ones that keep it within a tenth of a pixel.
fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let mut extremes: Vec<(f64, f64)> = points.first().copied().into_iter().collect();
    for column in points.chunk_by(|a, b| a.0.floor() == b.0.floor()) {
        let order = |a: &usize, b: &usize| column[*a].1.total_cmp(&column[*b].1);
        let low = (0..column.len()).min_by(order).unwrap_or(0);
        let high = (0..column.len()).max_by(order).unwrap_or(0);
        extremes.extend([low.min(high), low.max(high)].map(|index| column[index]));
    }
    extremes.extend(points.last());
    extremes.dedup();
    simplified(&extremes, 0.1)
}

/// Points split at the farthest one until none is farther than `tolerance` from its line (Ramer, Douglas and Peucker).
fn simplified(points: &[(f64, f64)], tolerance: f64) -> Vec<(f64, f64)> {
    let mut kept = vec![false; points.len()];
    let mut open = vec![(0, points.len().saturating_sub(1))];
    while let Some((start, end)) = open.pop() {
        let Some((a, b)) = points.get(start).zip(points.get(end)) else { break };
        (kept[start], kept[end]) = (true, true);
        let (dx, dy) = (b.0 - a.0, b.1 - a.1);
        let length = dx.hypot(dy);
        let distance = |k: usize| {
            let (x, y) = (points[k].0 - a.0, points[k].1 - a.1);
            if length == 0.0 { x.hypot(y) } else { (x * dy - y * dx).abs() / length }
        };
        let farthest = (start + 1..end).max_by(|i, j| distance(*i).total_cmp(&distance(*j)));
        if let Some(k) = farthest.filter(|k| distance(*k) > tolerance) {
            open.extend([(start, k), (k, end)]);
        }
    }
    points.iter().zip(kept).filter(|(_, kept)| *kept).map(|(point, _)| *point).collect()
}

/// Whether a curve runs within a pixel and a half of an earlier one along a quarter of the way, and so would hide it.
fn coincide(earlier: &[(f64, f64)], later: &[(f64, f64)]) -> bool {
    let (Some(first), Some(last)) = (later.first(), later.last()) else { return false };
    const PLACES: usize = 200;
    let near = |k: usize| {
        let x = first.0 + (last.0 - first.0) * k as f64 / PLACES as f64;
        matches!((height(earlier, x), height(later, x)), (Some(a), Some(b)) if (a - b).abs() < 1.5)
    };
    4 * (0..=PLACES).filter(|k| near(*k)).count() > PLACES
}

/// The height of a curve at a place along the axis, if it has one there.
fn height(curve: &[(f64, f64)], x: f64) -> Option<f64> {
    let after = curve.partition_point(|point| point.0 < x);
    let b = curve.get(after)?;
    if b.0 == x {
        return Some(b.1);
    }
    let a = curve.get(after.checked_sub(1)?)?;
    Some(a.1 + (b.1 - a.1) * (x - a.0) / (b.0 - a.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::f64::consts::PI;

    fn series(label: &str, points: Vec<(f64, f64)>) -> Series {
        Series { label: label.into(), points, mark: Mark::Line, color: COLORS[0] }
    }

    fn panel(series: Vec<Series>) -> Panel {
        let (title, x_label, y_label) = ("a title".into(), "step".into(), "error".into());
        Panel { title, x_label, y_label, x_log: false, y_log: false, series }
    }

    fn polylines(svg: &str) -> Vec<Vec<(f64, f64)>> {
        let number = |text: &str| text.parse::<f64>().unwrap();
        let point = |text: &str| text.split_once(',').map(|(x, y)| (number(x), number(y))).unwrap();
        let lists = svg.split("<polyline points=\"").skip(1).map(|rest| rest.split('"').next().unwrap());
        lists.map(|list| list.split(' ').map(point).collect()).collect()
    }

    #[test]
    fn a_curve_is_one_element_of_few_points_that_keeps_its_extremes() {
        let mut points: Vec<(f64, f64)> =
            (0..100_000).map(|i| (f64::from(i), f64::from(i * 7919 % 1000))).collect();
        points[31_400].1 = 5000.0;
        let text = svg(&[panel(vec![series("jagged", points)])]);
        let curves = polylines(&text);
        assert_eq!(curves.len(), 1);
        assert!(curves[0].len() <= 2 * SINGLE.0 as usize + 4, "{}", curves[0].len());
        let peak = curves[0].iter().min_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
        let (first, last) = (curves[0][0].0, curves[0].last().unwrap().0);
        assert!(((peak.0 - first) / (last - first) - 0.314).abs() < 2e-3, "{peak:?}");
        assert!(text.len() < 20_000, "{}", text.len());
    }

    #[test]
    fn a_curve_stays_within_a_tenth_of_a_pixel_of_its_points() {
        let circle: Vec<(f64, f64)> = (0..=3000)
            .map(|i| (f64::from(i) / 3000.0 * PI).sin_cos())
            .map(|(sin, cos)| (200.0 - 200.0 * cos, 200.0 * sin))
            .collect();
        let few = simplified(&circle, 0.1);
        assert!((20..80).contains(&few.len()), "{}", few.len());
        for (x, y) in circle {
            // The distance to the circle itself.
            let off = (x - 200.0).hypot(height(&few, x).unwrap()) - 200.0;
            assert!(off.abs() <= 0.11, "{off} at {x}, {y}");
        }
        assert_eq!(simplified(&[(0.0, 0.0), (1.0, 1.0), (2.0, 2.0)], 0.1).len(), 2);
        assert_eq!(simplified(&[], 0.1).len(), 0);
    }

    #[test]
    fn every_dot_is_drawn() {
        let mut dots = series("dots", (0..9).map(|i| (f64::from(i), 1.0)).collect());
        dots.mark = Mark::Points;
        assert_eq!(svg(&[panel(vec![dots])]).matches("<circle").count(), 9);
    }

    #[test]
    fn a_hidden_curve_shows_between_the_dashes_of_the_one_above() {
        let flat = |y: f64| (0..100).map(|i| (f64::from(i), y)).collect::<Vec<_>>();
        let dashed = |a: f64, b: f64| {
            let text =
                svg(&[panel(vec![series("a", flat(a)), series("b", flat(b)), series("c", flat(0.0))])]);
            text.matches("stroke-dasharray").count()
        };
        assert_eq!((dashed(5.0, 5.0), dashed(5.0, 4.0), dashed(0.0, 0.0)), (1, 0, 2));
    }

    #[test]
    fn one_legend_serves_panels_that_it_names() {
        // Too long to stand at the end of a curve.
        let line = |label: &str| series(&label.repeat(60), vec![(0.0, 1.0), (1.0, 2.0)]);
        let count = |a: &[&str], b: &[&str]| {
            let panels = [a, b].map(|labels| panel(labels.iter().map(|label| line(label)).collect()));
            polylines(&svg(&panels)).len() - a.len() - b.len()
        };
        assert_eq!((count(&["x"], &["x", "y"]), count(&["x"], &["y"])), (2, 2));
        assert_eq!(count(&["x", "y"], &["x", "y"]), 2);
    }

    /// Corners of every text of a picture: left, top, right, bottom.
    fn boxes(svg: &str) -> Vec<(String, [f64; 4])> {
        let number = |element: &str, name: &str| -> f64 {
            let rest = element.split(&format!(" {name}=\"")).nth(1).unwrap();
            rest.split('"').next().unwrap().parse().unwrap()
        };
        let texts = svg.split("<text").skip(1).map(|rest| rest.split("</text>").next().unwrap());
        texts
            .map(|element| {
                let (content, size) = (element.rsplit('>').next().unwrap(), number(element, "font-size"));
                let width = text_width(content, size);
                let (x, y, along) = match element.split("translate(").nth(1) {
                    None => (number(element, "x"), number(element, "y") - 0.35 * size, true),
                    Some(rest) => {
                        let (x, y) = rest.split(')').next().unwrap().split_once(' ').unwrap();
                        (x.parse::<f64>().unwrap() - 0.35 * size, y.parse().unwrap(), false)
                    }
                };
                let left = match element {
                    element if element.contains("\"middle\"") => x - width / 2.0,
                    element if element.contains("\"end\"") => x - width,
                    _ => x,
                };
                let sides = match along {
                    true => [left, y - 0.45 * size, left + width, y + 0.45 * size],
                    false => [x - 0.45 * size, y - width / 2.0, x + 0.45 * size, y + width / 2.0],
                };
                (content.to_owned(), sides)
            })
            .collect()
    }

    fn overlapping(svg: &str) -> Option<[String; 2]> {
        let all = boxes(svg);
        for (k, (name, a)) in all.iter().enumerate() {
            for (other, b) in &all[..k] {
                if a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3] {
                    return Some([other.clone(), name.clone()]);
                }
            }
        }
        None
    }

    fn ending_at(heights: &[f64]) -> Panel {
        let names =
            ["optimal", "honaker-online", "state-space:buffers=4", "tree", "blt", "banded", "dp-sgd", "none"];
        let curve = |(k, y): (usize, &f64)| series(names[k % 8], vec![(0.0, 1.0), (100.0, *y)]);
        panel(heights.iter().enumerate().map(curve).collect())
    }

    #[test]
    fn few_curves_are_named_at_their_ends_and_many_in_a_legend() {
        for count in [1, 6, 7] {
            let panel = ending_at(&vec![5.0; count]);
            for text in [svg(&[ending_at(&vec![5.0; count])]), in_page(&panel)] {
                let legend = if count > 6 { count } else { 0 };
                assert_eq!(polylines(&text).len(), count + legend);
                let names = boxes(&text).iter().filter(|(name, _)| name == "optimal").count();
                assert_eq!((names, overlapping(&text)), (1, None));
            }
        }
    }

    #[test]
    fn a_jagged_curve_is_named_where_it_is_seen() {
        let jagged: Vec<(f64, f64)> =
            (0..=400).map(|i| (f64::from(i), if i % 2 == 0 { 0.1 } else { 9.9 })).collect();
        let text =
            svg(&[panel(vec![series("jagged", jagged), series("low", vec![(0.0, 1.0), (400.0, 1.0)])])]);
        let middle = |name: &str| boxes(&text).into_iter().find(|(text, _)| text == name).unwrap().1[1];
        assert!(middle("jagged") < middle("low") - 100.0, "{text}");
    }

    #[test]
    fn names_move_no_farther_than_they_must() {
        assert_eq!(spread(&[(10.0, 4.0), (30.0, 4.0)], 0.0, 100.0), [10.0, 30.0]);
        assert_eq!(spread(&[(20.0, 4.0), (20.0, 4.0)], 0.0, 100.0), [18.0, 22.0]);
        assert_eq!(spread(&[(0.0, 4.0), (1.0, 4.0), (50.0, 4.0)], 0.0, 100.0), [2.0, 6.0, 50.0]);
        assert_eq!(spread(&[(99.0, 4.0), (100.0, 4.0)], 0.0, 100.0), [94.0, 98.0]);
    }

    #[test]
    fn labels_and_units_are_there_and_names_are_checked() {
        let text = svg(&[panel(vec![series("x < y", vec![(1.0, 1.0)])])]);
        for expected in
            [">step<", ">error<", ">a title<", ">x &lt; y<", "<circle", "<title>a title: error against step"]
        {
            assert!(text.contains(expected), "{expected}: {text}");
        }
        assert!(picture("a/b.svg").is_ok());
        for name in ["a.png", "a", "svg"] {
            assert!(picture(name).unwrap_err().contains(".svg"));
        }
    }

    proptest! {
        /// Wherever curves end, however large the numbers.
        #[test]
        fn no_text_is_over_another(
            heights in proptest::collection::vec(0.1_f64..10.0, 1..9), power in -12..12_i32, x_log: bool, y_log: bool,
        ) {
            let heights: Vec<f64> = heights.iter().map(|y| y * 10_f64.powi(power)).collect();
            let make = || Panel { x_log, y_log, ..ending_at(&heights) };
            for text in [svg(&[make()]), svg(&[make(), make()]), in_page(&make())] {
                prop_assert_eq!(overlapping(&text), None);
            }
        }

        /// Any numbers, on any axes: every place in the picture is finite and inside it.
        #[test]
        fn any_points_stay_in_the_picture(
            points in proptest::collection::vec((proptest::num::f64::ANY, proptest::num::f64::ANY), 0..20),
            x_log: bool, y_log: bool,
        ) {
            let mut panel = panel(vec![series("any", points)]);
            (panel.x_log, panel.y_log) = (x_log, y_log);
            panel.series[0].points.sort_by(|a, b| a.0.total_cmp(&b.0));
            for text in [in_page(&panel), svg(&[panel])] {
                prop_assert!(!text.contains("NaN") && !text.contains("inf"));
                for (x, y) in polylines(&text).concat() {
                    prop_assert!((0.0..1000.0).contains(&x) && (0.0..500.0).contains(&y), "{x} {y}");
                }
            }
        }
    }
}
