//! The report of a training: one page that opens without a network.

use super::task::Task;
use crate::compare::buffers;
use crate::plot::figure::{COLORS, Color, Mark, Panel, Series, svg};
use crate::report::{duration, number};
use dpmf_train::{Choice, Ended, Local, Recipe, Steps, Summary};
use std::fmt::Write;

const STYLE: &str = "body{font:16px/1.5 system-ui,sans-serif;color:#1e1e1e;max-width:62rem;margin:2rem auto;padding:0 1rem}\
h1{font-size:1.7rem;margin-bottom:.2rem}h2{font-size:1.2rem;margin-top:2.2rem}\
.lead{color:#555;margin-top:0}table{border-collapse:collapse;margin:1rem 0}\
th,td{padding:.35rem .9rem;text-align:right;border-bottom:1px solid #ddd}\
th:first-child,td:first-child{text-align:left}thead th{border-bottom:2px solid #999}\
figure{margin:1rem 0}figure svg{max-width:100%;height:auto}figcaption{color:#555;font-size:.92rem}\
pre{background:#f6f6f4;padding:1rem;white-space:pre-wrap;border-radius:4px;font-size:.88rem}";

/// Columns of the table of results.
pub fn head(summary: &Summary) -> [&'static str; 7] {
    let numbers = summary.summary.iter().any(|row| row.test_rmse.is_some());
    let merit = if numbers { "test RMSE" } else { "test accuracy" };
    ["mechanism", "sampling", merit, "test loss", "error/bound", "buffers", "time"]
}

/// The table of results.
pub fn cells(summary: &Summary) -> Vec<Vec<String>> {
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
            match row.mechanism.to_string() {
                mechanism if mechanism == row.asked => mechanism,
                mechanism => format!("{} ({mechanism})", row.asked),
            },
            row.sampling.clone(),
            merit,
            number(row.test_loss),
            row.ratio_to_bound.map_or("–".into(), |ratio| format!("{ratio:.4}")),
            if row.mechanism == Choice::None { "–".into() } else { buffers(row.buffers) },
            duration(row.seconds),
        ]
    };
    summary.summary.iter().map(row).collect()
}

/// The page: what was planned and what came of it, as it was written down.
pub fn page(task: &Task, summary: &Summary, ended: &[Ended]) -> anyhow::Result<String> {
    let recipe = ended[0].plan.recipe();
    let statement = summary.statement.as_ref();
    let title = match statement {
        Some(statement) => format!(
            "{}: private training at ε = {:.3}, δ = {:e}",
            task.name(),
            statement.calibration().epsilon(),
            statement.calibration().delta()
        ),
        None => format!("{}: training without privacy", task.name()),
    };
    let mut page = String::new();
    let (train, validation, test) = task.users();
    write!(
        page,
        "<!doctype html><html lang=en><head><meta charset=utf-8><meta name=viewport content=\"width=device-width\">\
         <title>{title}</title><style>{STYLE}</style></head><body><h1>{title}</h1>\
         <p class=lead>{} rounds of {} users; {train} users to train on, {validation} for validation, {test} for the \
         test; {} parameters.</p>",
        recipe.rounds,
        recipe.clients,
        task.parameters(),
        title = escape(&title),
    )?;
    // What all models say about a user together comes first: the title is of each alone.
    if let (Some(_), Some(guarantee)) = (&summary.together, summary.guarantee()) {
        let _ = write!(page, "<p><strong>{}.</strong></p>", escape(&capitalized(&guarantee)));
    }
    page += "<h2>Results</h2><table><thead><tr>";
    head(summary).iter().for_each(|cell| page += &format!("<th>{cell}</th>"));
    page += "</tr></thead><tbody>";
    for row in cells(summary) {
        page += "<tr>";
        row.iter().for_each(|cell| page += &format!("<td>{}</td>", escape(cell)));
        page += "</tr>";
    }
    page += "</tbody></table><p class=lead>The test users were used once, for this table. Error / bound is the root of \
             the total squared error that the mechanism's noise does to the iterates, over the certified least of all \
             mechanisms. All rows share one learning rate; a sweep gives each its own, smaller where there is more \
             noise.</p>";

    page += "<h2>Learning curves</h2>";
    figure(
        &mut page,
        &curves(ended),
        "Accuracy and loss on validation users, who never train. These curves are \
        not covered by ε.",
    )?;
    let first = first_of_each(ended);
    let errors = errors(&first);
    if !errors.series.is_empty() {
        page += "<h2>Error of every round</h2>";
        figure(
            &mut page,
            &[errors],
            "Expected squared error that the noise leaves in a coordinate of the model.",
        )?;
    }
    if let Some(statement) = statement {
        page += "<h2>Privacy</h2>";
        let spending = spending(&first);
        if !spending.series.is_empty() {
            figure(&mut page, &[spending], "ε of everything released up to a round, at the same δ.")?;
        }
        let _ = write!(page, "<pre>{}</pre>", escape(&statement.to_string()));
        if !task.notes().is_empty() {
            page += "<p>About the data:</p><ul>";
            task.notes().iter().for_each(|note| page += &format!("<li>{}</li>", escape(note)));
            page += "</ul>";
        }
    }
    page += "<h2>Settings</h2><table><tbody>";
    for (name, value) in settings(recipe) {
        let _ = write!(page, "<tr><td>{name}</td><td>{}</td></tr>", escape(&value));
    }
    page += "</tbody></table></body></html>\n";
    Ok(page)
}

fn settings(recipe: &Recipe) -> Vec<(&'static str, String)> {
    let mut rows = vec![
        ("clip ζ", recipe.clip.to_string()),
        ("server learning rate", recipe.server_learning_rate.to_string()),
        ("server momentum", recipe.optimizer.momentum.to_string()),
        (
            "schedule",
            match &recipe.schedule {
                Steps::Schedule(words) => words.clone(),
                Steps::Values(values) => format!("{} numbers", values.len()),
            },
        ),
    ];
    match recipe.local {
        Local::Sgd { learning_rate, passes, batch } => {
            rows.push(("client learning rate", learning_rate.to_string()));
            rows.push(("client passes, batch", format!("{passes}, {batch}")));
        }
        Local::Gradient => rows.push(("contribution", "the gradient of one example".into())),
    }
    if recipe.optimizer.weight_decay > 0.0 {
        rows.push(("weight decay", recipe.optimizer.weight_decay.to_string()));
    }
    if recipe.dropout > 0.0 {
        rows.push(("drop-outs", recipe.dropout.to_string()));
    }
    rows
}

fn color(index: usize) -> Color {
    COLORS[index % COLORS.len()]
}

/// One run of each mechanism.
fn first_of_each(ended: &[Ended]) -> Vec<&Ended> {
    let mut first: Vec<&Ended> = Vec::new();
    for run in ended {
        if !first.iter().any(|known| name(known) == name(run)) {
            first.push(run);
        }
    }
    first
}

fn name(run: &Ended) -> String {
    run.plan.recipe().label()
}

/// Accuracy and loss, the mean over the repetitions.
fn curves(ended: &[Ended]) -> Vec<Panel> {
    let first = first_of_each(ended);
    let panel = |title: &str, y_label: &str, pick: fn(&dpmf_train::Point) -> f64| {
        let series = first.iter().enumerate().map(|(index, run)| {
            let same = || ended.iter().filter(|other| name(other) == name(run));
            let points = run.outcome.curve.iter().enumerate().map(|(k, point)| {
                let values: Vec<f64> = same().filter_map(|o| o.outcome.curve.get(k)).map(pick).collect();
                (point.round as f64, values.iter().sum::<f64>() / values.len().max(1) as f64)
            });
            let label = name(run);
            Series { label, points: points.collect(), mark: Mark::Line, color: color(index) }
        });
        Panel {
            title: title.into(),
            x_label: "round".into(),
            y_label: y_label.into(),
            x_log: false,
            y_log: false,
            series: series.collect(),
        }
    };
    let classes = ended.iter().any(|run| run.outcome.validation.accuracy.is_some());
    let unit = if classes { "cross-entropy, nats" } else { "half the squared error, scaled" };
    let mut panels = vec![panel("validation loss", unit, |point| point.loss)];
    if classes {
        panels
            .insert(0, panel("validation accuracy", "accuracy", |point| point.accuracy.unwrap_or(f64::NAN)));
    }
    panels
}

/// A curve for each private mechanism, from what its plan holds.
fn of_plans(
    first: &[&Ended],
    title: &str,
    y_label: &str,
    y_log: bool,
    of: fn(&Ended) -> Option<Vec<f64>>,
) -> Panel {
    let series = first.iter().enumerate().filter_map(|(index, run)| {
        let values = of(run)?.into_iter().enumerate();
        let points = values.map(|(i, y)| (i as f64 + 1.0, y)).collect();
        Some(Series { label: name(run), points, mark: Mark::Line, color: color(index) })
    });
    let series = series.collect();
    Panel {
        title: title.into(),
        x_label: "round".into(),
        y_label: y_label.into(),
        x_log: false,
        y_log,
        series,
    }
}

fn errors(first: &[&Ended]) -> Panel {
    of_plans(first, "error of every round", "expected squared error", true, |run| {
        let mechanism = run.plan.mechanism()?;
        let std = mechanism.privacy()?.calibration().noise_std();
        let scale = (std / (mechanism.sensitivity() * run.plan.recipe().clients as f64)).powi(2);
        Some(mechanism.loss().per_step().iter().map(|loss| scale * loss).collect())
    })
}

fn spending(first: &[&Ended]) -> Panel {
    // Where units hide, ε is that of the whole run from the first round on, and no curve to look at.
    let moving =
        |run: &Ended| Some(run.plan.mechanism()?.spent()).filter(|spent| spent.first() != spent.last());
    of_plans(first, "privacy spent", "ε", false, moving)
}

/// The first letter as a capital.
pub fn capitalized(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}

fn figure(page: &mut String, panels: &[Panel], caption: &str) -> anyhow::Result<()> {
    write!(page, "<figure>{}<figcaption>{}</figcaption></figure>", svg(panels), escape(caption))?;
    Ok(())
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
