//! The report of a training: one page that opens without a network.

use crate::compare::buffers;
use crate::page::{Page, word};
use crate::plot::figure::{COLORS, Color, Mark, Panel, Series};
use crate::report::{duration, number, rounded};
use dpmf::accounting::PrivacyUnit;
use dpmf::accounting::statement::epsilon_for_people;
use dpmf_train::{Baseline, FinishedRun, Local, Plan, Summary, Task};
use std::path::Path;

/// Columns of the table of results.
pub fn head(summary: &Summary) -> [&'static str; 7] {
    let numbers = summary.summary.iter().any(|row| row.test_rmse.is_some());
    let merit = if numbers { "test RMSE" } else { "test accuracy" };
    ["mechanism", "sampling", merit, "test loss", "error/bound", "buffers", "time"]
}

/// What the trivial model predicts.
fn constant(task: &Task) -> &'static str {
    match task {
        Task::Text { .. } => "the commonest token",
        Task::Regressor { .. } => "the mean",
        _ => "the commonest class",
    }
}

/// What to try when the first model is no better than the trivial one; nothing where it is.
pub fn worse_than_trivial(task: &Task, summary: &Summary) -> Option<String> {
    if summary.beats_trivial() {
        return None;
    }
    let (row, baseline) = (summary.summary.first()?, &summary.baseline);
    let (measure, model, trivial) = match (row.test_rmse, baseline.test_rmse) {
        (Some(model), Some(trivial)) => ("RMSE", number(model.mean), number(trivial)),
        _ => {
            let model = row.test_accuracy.map_or(f64::NAN, |accuracy| accuracy.mean);
            ("accuracy", format!("{model:.4}"), format!("{:.4}", baseline.test_accuracy.unwrap_or(f64::NAN)))
        }
    };
    let settings = match &summary.rehearsed {
        Some(_) => "fewer columns (--features)",
        None => "a smaller --server-lr or more --clients in a round",
    };
    let budget =
        if summary.epsilon.is_some() { "more data, a larger --epsilon, or " } else { "more data, or " };
    Some(format!(
        "The model is no better than always predicting {} (test {measure} {model}, trivial {trivial}): do not use it. Try \
         {budget}{settings}.",
        constant(task)
    ))
}

/// The table of results, the trivial model last.
pub fn cells(task: &Task, summary: &Summary) -> Vec<Vec<String>> {
    let row = |row: &dpmf_train::summary::MechanismRow| {
        let shown = |x: f64| if row.test_rmse.is_some() { number(x) } else { format!("{x:.4}") };
        let merit = match row.test_rmse.or(row.test_accuracy) {
            Some(merit) => match merit.half_width {
                Some(half) => format!("{} ± {}", shown(merit.mean), shown(half)),
                None => shown(merit.mean),
            },
            None => "–".into(),
        };
        vec![
            match &row.mechanism {
                mechanism if *mechanism == row.asked => mechanism.clone(),
                mechanism => format!("{} ({mechanism})", row.asked),
            },
            rounded(&row.sampling),
            merit,
            number(row.test_loss),
            row.ratio_to_bound.map_or("–".into(), |ratio| format!("{ratio:.4}")),
            if row.mechanism == "none" { "–".into() } else { buffers(row.buffers) },
            duration(row.seconds),
        ]
    };
    let mut rows: Vec<Vec<String>> = summary.summary.iter().map(row).collect();
    let baseline = &summary.baseline;
    let merit = baseline.test_rmse.map(number).or(baseline.test_accuracy.map(|share| format!("{share:.4}")));
    let name = format!("trivial ({})", constant(task));
    let none = || "–".to_owned();
    rows.push(vec![name, none(), merit.unwrap_or_else(none), none(), none(), none(), none()]);
    rows
}

/// The page: what was planned and what came of it, as it was written down.
pub fn page(task: &Task, summary: &Summary, ended: &[FinishedRun], folder: &Path) -> String {
    let plan = &ended[0].plan;
    let statement = summary.statement.as_ref();
    let title = match statement {
        Some(statement) => format!(
            "{}: private training at ε = {}, δ = {:e}",
            task.name(),
            epsilon_for_people(statement.calibration().epsilon()),
            statement.calibration().delta()
        ),
        None => format!("{}: training without privacy", task.name()),
    };
    let ((train, validation, test), unit) = (task.users(), plan.unit().name());
    let lead = format!(
        "{} rounds of {} {unit}s; {train} {unit}s to train on, {validation} for validation, {test} for the test; {} parameters.",
        plan.rounds(),
        plan.recipe().clients,
        task.parameters(),
    );
    let mut page = Page::new(&title, &lead);
    if let Some(statement) = statement {
        let text = statement.to_string();
        let mut sentences: Vec<String> = text.lines().take(1).map(str::to_owned).collect();
        // What all models say about a user together: the first sentence is of one alone.
        if let (Some(_), Some(guarantee)) = (&summary.together, summary.guarantee()) {
            sentences.push(format!("{}.", capitalized(&guarantee)));
        }
        page.promise(&sentences, &text);
        if !task.notes().is_empty() {
            page.note("About the data:");
            page.list(task.notes());
        }
    } else {
        page.paragraph(
            "No noise was added: the model may reveal anything that it has learned about its users.",
        );
    }

    let [right, lost] = scores(task);
    if let Some(sentence) = worse_than_trivial(task, summary) {
        page.paragraph(&sentence);
    }
    page.heading("Results");
    let units = ["", "", right, lost, "√ of total squared error", "model-sized", ""];
    let head: Vec<(&str, &str)> = head(summary).into_iter().zip(units).collect();
    page.table(&head, &cells(task, summary));
    page.note(
        "The test data was used once, for this table; ε does not cover its scores. Error/bound is the root of the total squared error \
         that the \
         mechanism's noise adds to the iterates, divided by the certified minimum over all mechanisms. All private rows share one \
         learning rate; a sweep gives each its own, smaller where there is more noise.",
    );

    page.heading("Learning curves");
    let words = "On validation data, which is never trained on. Not covered by ε.";
    let curves: Vec<_> =
        curves(ended, &summary.baseline, scores(task)).into_iter().map(|panel| (panel, words)).collect();
    page.figures(&curves);
    let first = first_of_each(ended);
    let mut figures = Vec::new();
    let errors = errors(&first);
    if !errors.series.is_empty() {
        let words = "Expected squared error that the noise leaves in a coordinate of the model, computed before training; lower is better.";
        figures.push((errors, words));
    }
    let spending = spending(&first);
    if !spending.series.is_empty() {
        let words = "ε of everything released up to a round, at the same δ. With sampling, for trees, and above 4096 \
                     rounds, only the ε of the whole run is known, drawn as a level line.";
        figures.push((spending, words));
    }
    if !figures.is_empty() {
        page.heading("Noise and privacy, round by round");
        page.figures(&figures);
    }
    page.heading("Use the model");
    let place = word(folder);
    match task {
        Task::Text { .. } => {
            page.commands(&[format!("dpmf sample {place}"), format!("dpmf eval {place} other.csv")])
        }
        _ => {
            page.commands(&[format!("dpmf predict {place} new.csv"), format!("dpmf eval {place} other.csv")])
        }
    }
    page.note(
        "These commands use the first run; --run names another. Anything computed from a private model is as private as the model. Every \
         run has its own directory with model.safetensors and its mechanism, plan.safetensors.",
    );
    page.heading("Settings");
    if let Some(rehearsed) = &summary.rehearsed {
        page.note(&format!(
            "{}. Only the sizes of the table were used, so this cost no privacy. On the made-up tables these settings came {:.0} % of \
             the way from the trivial model to the best possible one.",
            capitalized(&rehearsed.describe()),
            100.0 * rehearsed.closed_gap
        ));
    }
    page.pairs(&settings(plan));
    page.finish()
}

/// What the scores of a task count, by unit: accuracy and loss.
fn scores(task: &Task) -> [&'static str; 2] {
    match task {
        Task::Text { .. } => ["share of tokens predicted correctly", "cross-entropy, nats per token"],
        Task::Regressor { .. } => {
            ["in the unit of the label", "half the squared error, in squares of the scale"]
        }
        _ => ["share of examples predicted correctly", "cross-entropy, nats per example"],
    }
}

fn settings(plan: &Plan) -> Vec<(&'static str, String)> {
    let recipe = plan.recipe();
    let mut rows = vec![("clip ζ", plan.clip().to_string())];
    let optimizer = plan.workload().optimizer();
    if let Some((optimizer, rates)) = optimizer {
        rows.push(("server learning rates", range(rates)));
        rows.push(("server momentum", optimizer.momentum.to_string()));
    }
    match recipe.local {
        Local::Sgd { learning_rate, passes, batch } => {
            rows.push(("client learning rate", learning_rate.to_string()));
            rows.push(("client passes, batch", format!("{passes}, {batch}")));
        }
        Local::Gradient => {
            let whose = match plan.unit() {
                PrivacyUnit::Record => "the gradient of a record",
                PrivacyUnit::User => "the mean gradient of a user's rows",
            };
            rows.push(("contribution", whose.into()));
        }
    }
    if let Some((optimizer, _)) = optimizer.filter(|(optimizer, _)| optimizer.weight_decay > 0.0) {
        rows.push(("weight decay", optimizer.weight_decay.to_string()));
    }
    if recipe.dropout > 0.0 {
        rows.push(("drop-outs", recipe.dropout.to_string()));
    }
    rows
}

/// The first and the last of the learning rates, and the largest where it is another.
fn range(rates: &[f64]) -> String {
    let largest = rates.iter().copied().fold(0.0, f64::max);
    match rates {
        [first, .., last] if first == last && *first == largest => number(*first),
        [first, .., last] if largest > first.max(*last) => {
            format!("{} to {}, at most {}", number(*first), number(*last), number(largest))
        }
        [first, .., last] => format!("{} to {}", number(*first), number(*last)),
        _ => number(largest),
    }
}

fn color(index: usize) -> Color {
    COLORS[index % COLORS.len()]
}

/// One run of each mechanism.
fn first_of_each(ended: &[FinishedRun]) -> Vec<&FinishedRun> {
    let mut first: Vec<&FinishedRun> = Vec::new();
    for run in ended {
        if !first.iter().any(|known| name(known) == name(run)) {
            first.push(run);
        }
    }
    first
}

fn name(run: &FinishedRun) -> String {
    run.plan.label()
}

/// Accuracy and loss, the mean over the repetitions.
fn curves(ended: &[FinishedRun], baseline: &Baseline, [right, lost]: [&str; 2]) -> Vec<Panel> {
    let first = first_of_each(ended);
    let last = ended.iter().map(|run| run.plan.rounds()).max().unwrap_or(0) as f64;
    let panel = |title: &str, y_label: &str, level: f64, pick: fn(&dpmf_train::Point) -> f64| {
        let series = first.iter().enumerate().map(|(index, run)| {
            let same = || ended.iter().filter(|other| name(other) == name(run));
            let points = run.outcome.curve.iter().enumerate().map(|(k, point)| {
                let values: Vec<f64> = same().filter_map(|o| o.outcome.curve.get(k)).map(pick).collect();
                (point.round as f64, values.iter().sum::<f64>() / values.len().max(1) as f64)
            });
            let label = name(run);
            Series { label, points: points.collect(), mark: Mark::Line, color: color(index) }
        });
        let trivial = Series {
            label: "trivial model".into(),
            points: vec![(0.0, level), (last, level)],
            mark: Mark::Line,
            color: color(first.len()),
        };
        let series = series.chain([trivial]);
        Panel {
            title: title.into(),
            x_label: "round".into(),
            y_label: y_label.into(),
            x_log: false,
            y_log: false,
            series: series.collect(),
        }
    };
    let mut panels =
        vec![panel("validation loss", &capitalized(lost), baseline.validation.1, |point| point.loss)];
    if ended.iter().any(|run| run.outcome.validation.accuracy.is_some()) {
        let level = baseline.validation.0.unwrap_or(f64::NAN);
        let accuracy = panel("validation accuracy", &capitalized(right), level, |point| {
            point.accuracy.unwrap_or(f64::NAN)
        });
        panels.insert(0, accuracy);
    }
    panels
}

/// A curve for each private mechanism, from what its plan holds.
fn of_plans(
    first: &[&FinishedRun],
    title: &str,
    y_label: &str,
    of: fn(&FinishedRun) -> Option<Vec<f64>>,
) -> Panel {
    let series = first.iter().enumerate().filter_map(|(index, run)| {
        let values = of(run)?.into_iter().enumerate();
        let points = values.map(|(i, y)| (i as f64 + 1.0, y)).collect();
        Some(Series { label: name(run), points, mark: Mark::Line, color: color(index) })
    });
    let (series, x_label) = (series.collect(), "round".into());
    Panel { title: title.into(), x_label, y_label: y_label.into(), x_log: false, y_log: false, series }
}

fn errors(first: &[&FinishedRun]) -> Panel {
    let clip = first.first().map_or(1.0, |run| run.plan.clip());
    let unit = format!("Expected squared error of a coordinate (clip {clip}, learning rate 1)");
    let panel = of_plans(first, "error of every round", &unit, |run| {
        let mechanism = run.plan.mechanism()?;
        let std = mechanism.privacy()?.calibration().noise_std();
        let scale = (std / (mechanism.sensitivity() * run.plan.recipe().clients as f64)).powi(2);
        Some(mechanism.loss().per_step().iter().map(|loss| scale * loss).collect())
    });
    Panel { y_log: true, ..panel }
}

fn spending(first: &[&FinishedRun]) -> Panel {
    let mut panel = of_plans(first, "privacy spent", "ε", |run| Some(run.plan.mechanism()?.spent()));
    // Level lines are seen beside a curve; alone they show nothing.
    let level = |series: &Series| series.points.windows(2).all(|pair| pair[0].1 == pair[1].1);
    if panel.series.iter().all(level) {
        panel.series.clear();
    }
    panel
}

/// The first letter as a capital.
pub fn capitalized(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}
