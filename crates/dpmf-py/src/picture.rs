//! What a notebook shows of a mechanism, and of a plan.

use crate::mechanism::summary;
use crate::plan::summary as plan_summary;
use dpmf::Mechanism;
use dpmf::planner::Plan;
use pyo3::PyResult;
use std::fmt::Write;

const WIDTH: f64 = 420.0;
const HEIGHT: f64 = 120.0;
const MARGIN: f64 = 28.0;

/// Most points of the curve: more than pixels would show nothing.
const POINTS: usize = 400;

/// A table of what is known, and the curve of the error over the steps, as `plot_error` draws it.
pub(crate) fn html(mechanism: &Mechanism) -> PyResult<String> {
    let mut table = String::new();
    for (name, value) in summary(mechanism)? {
        let _ = write!(
            table,
            "<tr><th style=\"text-align:left\">{}</th><td style=\"text-align:left\">{}</td></tr>",
            escape(name),
            escape(&value)
        );
    }
    Ok(format!("<div class=\"dpmf-mechanism\"><table>{table}</table>{}</div>", curve(mechanism)))
}

/// A table of what is known of a plan, the candidates that may be chosen, and the curve of the chosen one.
pub(crate) fn plan_html(plan: &Plan) -> String {
    let mut table = String::new();
    for (name, value) in plan_summary(plan) {
        let _ = write!(
            table,
            "<tr><th style=\"text-align:left\">{}</th><td style=\"text-align:left\">{}</td></tr>",
            escape(name),
            escape(&value)
        );
    }
    let mut rows = String::new();
    for candidate in plan.candidates().iter().filter(|candidate| candidate.excluded().is_none()) {
        let row = candidate.row();
        let _ = write!(
            rows,
            "<tr><td style=\"text-align:left\">{}</td><td style=\"text-align:left\">{}</td><td>{}</td><td>{}</td></tr>",
            escape(&row.selector),
            escape(&row.sampling),
            row.noise_multiplier.map_or_else(String::new, |multiplier| format!("{multiplier:.4}")),
            row.rmse.map_or_else(String::new, |rmse| format!("{rmse:.4}"))
        );
    }
    let head = "<tr><th>mechanism</th><th>sampling</th><th>noise multiplier</th><th>error</th></tr>";
    let drawn = curve(plan.chosen().mechanism());
    format!("<div class=\"dpmf-plan\"><table>{table}</table><table>{head}{rows}</table>{drawn}</div>")
}

fn curve(mechanism: &Mechanism) -> String {
    let errors: Vec<f64> = mechanism.loss().per_step().iter().map(|loss| loss.sqrt()).collect();
    let n = errors.len();
    let top = errors.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
    let (inner_width, inner_height) = (WIDTH - 2.0 * MARGIN, HEIGHT - 2.0 * MARGIN);
    let mut points = String::new();
    for k in 0..n.min(POINTS) {
        let i = k * (n - 1) / (n.min(POINTS) - 1).max(1);
        let x = MARGIN + inner_width * i as f64 / (n - 1).max(1) as f64;
        let y = HEIGHT - MARGIN - inner_height * errors[i] / top;
        let _ = write!(points, "{x:.1},{y:.1} ");
    }
    let (left, right, base) = (MARGIN, WIDTH - MARGIN, HEIGHT - MARGIN);
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{HEIGHT}\" role=\"img\" \
         aria-label=\"standard deviation of the error by step\" font-family=\"sans-serif\" font-size=\"10\">\
         <line x1=\"{left}\" y1=\"{base}\" x2=\"{right}\" y2=\"{base}\" stroke=\"currentColor\"/>\
         <line x1=\"{left}\" y1=\"{base}\" x2=\"{left}\" y2=\"{MARGIN}\" stroke=\"currentColor\"/>\
         <polyline fill=\"none\" stroke=\"#0072b2\" stroke-width=\"1.5\" points=\"{}\"/>\
         <text x=\"{left}\" y=\"{}\" fill=\"currentColor\">standard deviation of the error, at most {top:.4} × noise multiplier × clip</text>\
         <text x=\"{left}\" y=\"{}\" fill=\"currentColor\">step 1</text>\
         <text x=\"{right}\" y=\"{}\" fill=\"currentColor\" text-anchor=\"end\">{n}</text></svg>",
        points.trim_end(),
        MARGIN - 8.0,
        base + 14.0,
        base + 14.0,
    )
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
