//! The page of a sweep: what was chosen, what came of it, and how the choice was made.

use super::Together;
use super::row::{Measure, Row};
use crate::page::Page;
use crate::plot::figure::{COLORS, Mark, Panel, Series};
use crate::report::{rounded, small};
use crate::train::html::capitalized;
use dpmf::accounting::statement::epsilon_for_people;
use dpmf_train::{MechanismChoice, Privacy, Task};

/// Columns of the table, with what they count in.
const HEAD: [(&str, &str); 12] = [
    ("mechanism", ""),
    ("test", "± 95 % interval"),
    ("ε", "of a single run"),
    ("σ", "noise multiplier"),
    ("server lr", "tuned"),
    ("client lr", "tuned"),
    ("clip", "tuned"),
    ("momentum", "tuned"),
    ("sampling", ""),
    ("schedule", ""),
    ("users", "a round"),
    ("runs", ""),
];

/// The page, also of a sweep that has not come to its end.
pub(super) fn page(task: &Task, rows: &[Row], tuning: usize, together: Option<&Together>) -> String {
    let ended = rows.iter().filter(|row| row.runs > 0).count();
    let users = task.users();
    let lead = format!(
        "{tuning} tuning runs on {} validation users; the best setting of each of {} rows was trained again and scored on {} test \
         users; {} users to train on, {} parameters.",
        users.1,
        rows.len(),
        users.2,
        users.0,
        task.parameters()
    );
    let mut page = Page::new(&format!("{}: a sweep of {} rows", task.name(), rows.len()), &lead);
    if ended < rows.len() {
        page.paragraph(&format!(
            "Not finished: {ended} of {} rows have results. Run the same command again to continue the sweep.",
            rows.len()
        ));
    }
    if let Some(Together { models, epsilon, delta }) = together {
        let all = format!(
            "All {models} private models together, tuning included: ε = {} at δ = {}.",
            epsilon_for_people(*epsilon),
            small(*delta)
        );
        page.promise(&["ε covers each run on its own, not the tuning.".into(), all], "");
    }

    page.heading("Chosen settings");
    let cells: Vec<Vec<String>> = rows.iter().map(cells).collect();
    let (differing, shared) = columns(&cells);
    let of = |row: &Vec<String>| differing.iter().map(|column| row[*column].clone()).collect();
    let measure = Measure::new(task);
    let test = format!("test {}", measure.name());
    let named = |column: &usize| if *column == 1 { (test.as_str(), HEAD[1].1) } else { HEAD[*column] };
    page.table(&differing.iter().map(named).collect::<Vec<_>>(), &cells.iter().map(of).collect::<Vec<_>>());
    page.note(&format!(
        "Chosen by {} on validation users; test users were used once, for this table.{shared}",
        measure.name()
    ));

    let scores = against_noise(rows, measure);
    if !scores.is_empty() {
        page.heading(&format!("{} against noise", capitalized(measure.name())));
        page.note("Mean over the repetitions, with 95 % intervals.");
        page.figures(&scores.into_iter().map(|panel| (panel, "")).collect::<Vec<_>>());
    }
    let tried = panels(rows, measure, "tuning", "Server learning rate", true, |row| {
        (row.tried.len() > 1).then(|| row.tried.clone())
    });
    if !tried.is_empty() {
        page.heading("Tuning");
        page.note("The best run at each rate, over everything else that was tuned.");
        page.figures(&tried.into_iter().map(|panel| (panel, "")).collect::<Vec<_>>());
    }
    let curves = panels(rows, measure, "learning curves", "Round", false, |row| {
        let points = row.curve.iter().map(|(round, score)| (*round as f64, *score));
        (!row.curve.is_empty()).then(|| points.collect())
    });
    if !curves.is_empty() {
        page.heading("Learning curves");
        page.note(
            "Of the chosen settings, mean over the repetitions, on validation users. Not covered by ε.",
        );
        page.figures(&curves.into_iter().map(|panel| (panel, "")).collect::<Vec<_>>());
    }
    page.finish()
}

/// Columns in which rows differ, the first two always; and a sentence on what the others share.
fn columns(cells: &[Vec<String>]) -> (Vec<usize>, String) {
    let differs = |column: &usize| *column < 2 || cells.iter().any(|row| row[*column] != cells[0][*column]);
    let (differing, same): (Vec<usize>, Vec<usize>) = (0..HEAD.len()).partition(differs);
    let named = same.iter().filter(|column| cells.first().is_some_and(|row| row[**column] != "–"));
    let words: Vec<String> =
        named.map(|column| format!("{} {}", HEAD[*column].0, cells[0][*column])).collect();
    let shared = if words.is_empty() { String::new() } else { format!(" All rows: {}.", words.join(", ")) };
    (differing, shared)
}

fn cells(row: &Row) -> Vec<String> {
    let number = |x: Option<f64>| x.map_or("–".into(), |x| format!("{x:.3}"));
    // Before a run has ended nothing is chosen.
    let chosen = |text: String| if row.runs > 0 { text } else { "–".into() };
    vec![
        row.choice_and_mechanism(),
        row.tested("\u{a0}±\u{a0}"),
        number(row.epsilon),
        number(row.noise_multiplier),
        chosen(row.best.server_learning_rate.to_string()),
        chosen(row.client_rate().map_or("–".into(), |rate| rate.to_string())),
        chosen(row.best.clip.to_string()),
        chosen(row.best.optimizer.momentum.to_string()),
        chosen(rounded(&row.sampling.to_string())),
        row.schedule().to_owned(),
        row.best.recipe.clients.to_string(),
        format!("{} ({} diverged)", row.runs, row.diverged),
    ]
}

fn without_noise(row: &Row) -> bool {
    row.best.recipe.mechanism == MechanismChoice::None
}

/// The amount of noise that was asked for, and its name.
fn noise(row: &Row) -> (f64, &'static str) {
    match row.best.privacy {
        Privacy::Epsilon { epsilon, .. } => (epsilon, "ε"),
        Privacy::NoiseMultiplier { noise_multiplier, .. } => (noise_multiplier, "σ"),
    }
}

/// Schedule and cohort, as far as rows differ in them.
fn circumstances(row: &Row, rows: &[Row]) -> String {
    let mut words = String::new();
    if rows.iter().any(|other| other.schedule() != row.schedule()) {
        words += &format!(", {}", row.schedule());
    }
    if rows.iter().any(|other| other.best.recipe.clients != row.best.recipe.clients) {
        words += &format!(", {} users a round", row.best.recipe.clients);
    }
    words
}

/// Distinct values in the order in which they come.
fn distinct<T: PartialEq>(values: impl Iterator<Item = T>) -> Vec<T> {
    let mut found = Vec::new();
    values.for_each(|value| {
        if !found.contains(&value) {
            found.push(value);
        }
    });
    found
}

/// Every mechanism has one colour on the whole page.
fn color(row: &Row, rows: &[Row]) -> crate::plot::figure::Color {
    let names = distinct(rows.iter().map(|row| row.choice()));
    COLORS[names.iter().position(|name| *name == row.choice()).unwrap_or(0) % COLORS.len()]
}

/// A panel for each amount of noise, schedule and cohort, with a curve for each mechanism that has one.
fn panels(
    rows: &[Row],
    measure: Measure,
    title: &str,
    x_label: &str,
    x_log: bool,
    points: impl Fn(&Row) -> Option<Vec<(f64, f64)>>,
) -> Vec<Panel> {
    let private: Vec<&Row> = rows.iter().filter(|row| !without_noise(row)).collect();
    let shown = if private.is_empty() { rows.iter().collect() } else { private };
    let kinds = distinct(shown.iter().map(|row| (noise(row), circumstances(row, rows))));
    let panel = |(noise_of, around): ((f64, &'static str), String)| {
        // Rows without noise stand beside every amount of it.
        let belongs =
            |row: &&Row| circumstances(row, rows) == around && (without_noise(row) || noise(row) == noise_of);
        let series = rows.iter().filter(belongs).filter_map(|row| {
            let mark = if x_log { Mark::LineAndPoints } else { Mark::Line };
            Some(Series {
                label: row.choice().to_string(),
                points: points(row)?,
                mark,
                color: color(row, rows),
            })
        });
        Panel {
            title: format!("{title}, {} = {}{around}", noise_of.1, noise_of.0),
            x_label: x_label.into(),
            y_label: format!("Validation {}, {}", measure.name(), measure.unit()),
            x_log,
            y_log: false,
            series: series.collect(),
        }
    };
    kinds.into_iter().map(panel).filter(|panel| !panel.series.is_empty()).collect()
}

/// Test scores by the amount of noise, where there are several.
fn against_noise(rows: &[Row], measure: Measure) -> Vec<Panel> {
    let scored = || rows.iter().filter(|row| row.test.is_some());
    let panel = |around: String| {
        let here: Vec<&Row> = scored().filter(|row| circumstances(row, rows) == around).collect();
        let (mut series, mut amounts) = (Vec::new(), Vec::new());
        for asked in distinct(here.iter().map(|row| row.choice())) {
            let mut same: Vec<&&Row> = here.iter().filter(|row| row.choice() == asked).collect();
            same.sort_by(|a, b| noise(a).0.total_cmp(&noise(b).0));
            let mean = |row: &Row| row.test.map_or(f64::NAN, |test| test.mean);
            let color = color(same[0], rows);
            let points = same.iter().map(|row| (noise(row).0, mean(row))).collect();
            let bars = same.iter().filter_map(|row| {
                let [low, high] = row.test?.interval()?;
                Some([(noise(row).0, low), (noise(row).0, high)])
            });
            let mark = if without_noise(same[0]) { Mark::Level } else { Mark::LineAndPoints };
            if mark == Mark::LineAndPoints {
                amounts.extend(same.iter().map(|row| noise(row).0));
                let points = bars.flatten().collect();
                series.push(Series { label: String::new(), points, mark: Mark::Bars, color });
            }
            series.push(Series { label: asked.to_string(), points, mark, color });
        }
        let title = format!("test {}{around}", measure.name());
        let name = here.first().map_or("ε", |row| noise(row).1);
        let x_label = if name == "ε" { "ε" } else { "Noise multiplier σ" }.to_owned();
        let y_label = format!("Test {}, {}", measure.name(), measure.unit());
        let several = distinct(amounts.into_iter()).len() > 1;
        several.then_some(Panel { title, x_label, y_label, x_log: true, y_log: false, series })
    };
    distinct(rows.iter().map(|row| circumstances(row, rows))).into_iter().filter_map(panel).collect()
}
