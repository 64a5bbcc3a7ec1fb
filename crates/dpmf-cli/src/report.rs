//! What a command says, for people and for programs.

use anyhow::Context;
use serde_json::{Value, json};
use std::io::{ErrorKind, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};

/// Version of the JSON layout.
const SCHEMA: u32 = 1;

/// The result of a command.
pub struct Report {
    json: Value,
    text: String,
    /// The command ran, but its answer is no.
    pub failed: bool,
    /// It ran and wrote everything, but what came of it is of no use.
    pub no_better: bool,
}

impl Report {
    /// Takes the JSON object (without `schema`) and the text.
    pub fn new(json: Value, text: String) -> Self {
        Self { json, text, failed: false, no_better: false }
    }

    /// What it says to programs.
    pub fn json(&self) -> &Value {
        &self.json
    }

    /// The same with what was warned of, for programs.
    pub fn warned(mut self, warnings: Vec<String>) -> Self {
        self.json["warnings"] = warnings.into();
        self
    }

    /// Prints one of the two to standard output.
    ///
    /// Errors: standard output took no more, but for a closed pipe (`dpmf … | head`), whose reader has seen enough.
    pub fn print(&self, as_json: bool) -> anyhow::Result<()> {
        let text = if as_json { object(self.json.clone()) } else { self.text.trim_end().to_owned() };
        SPOKEN.store(true, Ordering::SeqCst);
        write_out(&text)
    }
}

/// `--json`.
static AS_JSON: AtomicBool = AtomicBool::new(false);

/// Whether the one answer of the program has been given.
static SPOKEN: AtomicBool = AtomicBool::new(false);

/// Whether to report failures as JSON from now on.
pub fn tell_as_json(json: bool) {
    AS_JSON.store(json, Ordering::SeqCst);
}

/// Whether failures are reported as JSON.
pub fn as_json() -> bool {
    AS_JSON.load(Ordering::SeqCst)
}

/// Reports a failure: on standard output as JSON, unless that has been given its one object, otherwise on standard error.
pub fn fail(kind: &str, message: &str) {
    let first = !SPOKEN.swap(true, Ordering::SeqCst);
    if as_json() && first {
        let written = write_out(&object(json!({ "error": { "kind": kind, "message": message } })));
        if written.is_ok() {
            return;
        }
    }
    // Clears what was drawn of a progress bar.
    let clear = if std::io::stderr().is_terminal() { "\r\x1b[2K" } else { "" };
    let word = if kind == "interrupted" { "" } else { "error: " };
    note(&format!("{clear}{word}{message}"));
}

/// A line on standard error, or nothing if it is closed.
pub fn note(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// The text of an object with its schema.
fn object(mut value: Value) -> String {
    let mut object = serde_json::Map::new();
    object.insert("schema".into(), SCHEMA.into());
    if let Value::Object(fields) = &mut value {
        object.append(fields);
    }
    Value::Object(object).to_string()
}

/// Writes a line to standard output.
pub fn write_out(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => written.context("cannot write to standard output"),
    }
}

/// A table with right-aligned columns, the first left-aligned.
pub fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.chain([head[column].chars().count()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    let line = |cells: &[String]| {
        let padded = cells.iter().zip(&widths).enumerate().map(|(column, (cell, width))| {
            let padding = " ".repeat(width - cell.chars().count());
            if column == 0 { format!("{cell}{padding}") } else { format!("{padding}{cell}") }
        });
        padded.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    let head: Vec<String> = head.iter().map(|h| (*h).to_owned()).collect();
    let rule = widths.iter().map(|w| "─".repeat(*w)).collect::<Vec<_>>().join("  ");
    let lines = [line(&head), rule].into_iter().chain(rows.iter().map(|row| line(row)));
    lines.collect::<Vec<_>>().join("\n")
}

/// A number with as many decimals as six or so significant digits need.
pub fn number(x: f64) -> String {
    match x.abs() {
        0.0 => "0".into(),
        a if !(1e-3..1e7).contains(&a) => format!("{x:.3e}"),
        a if a >= 1000.0 => format!("{x:.2}"),
        a if a >= 10.0 => format!("{x:.3}"),
        _ => format!("{x:.5}"),
    }
}

/// Words such as `cyclic-poisson:1:0.0109090909` with their numbers to four digits.
pub fn rounded(words: &str) -> String {
    let four = |word: &str| match word.parse::<f64>() {
        Ok(x) if word.len() > 8 => format!("{x:.3e}").parse::<f64>().unwrap_or(x).to_string(),
        _ => word.to_owned(),
    };
    words.split(':').map(four).collect::<Vec<_>>().join(":")
}

/// A small number such as δ, to four digits.
pub fn small(x: f64) -> String {
    let four = format!("{x:.3e}").parse::<f64>().unwrap_or(x);
    format!("{four:e}")
}

/// A duration for people.
pub fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 1.0 => format!("{:.0} ms", s * 1e3),
        s if s < 120.0 => format!("{s:.1} s"),
        s => format!("{:.0} min {:02.0} s", (s / 60.0).floor(), s % 60.0),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn small_numbers_are_short() {
        assert_eq!(super::small(1.9999999999999998e-5), "2e-5");
        assert_eq!(super::small(1e-6), "1e-6");
    }

    use super::*;

    #[test]
    fn long_numbers_in_words_are_rounded_and_short_ones_stay() {
        assert_eq!(rounded("cyclic-poisson:1:0.0001129477673050098"), "cyclic-poisson:1:0.0001129");
        assert_eq!(rounded("balls-in-bins:92"), "balls-in-bins:92");
        assert_eq!(rounded("cyclic-poisson:64:0.015625"), "cyclic-poisson:64:0.015625");
        assert_eq!(rounded("none"), "none");
    }
}
