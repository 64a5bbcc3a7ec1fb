//! What a command says, for people and for programs.

use serde_json::{Value, json};
use std::io::Write;

/// Version of the JSON layout.
const SCHEMA: u32 = 1;

/// The result of a command.
pub struct Report {
    json: Value,
    text: String,
    /// The command ran, but its answer is no.
    pub failed: bool,
}

impl Report {
    /// Takes the JSON object (without `schema`) and the text.
    pub fn new(json: Value, text: String) -> Self {
        Self { json, text, failed: false }
    }

    /// Prints one of the two to standard output.
    pub fn print(&self, as_json: bool) {
        if as_json { print_json(self.json.clone()) } else { write_out(self.text.trim_end()) }
    }
}

/// Prints the JSON form of a failure.
pub fn print_error(kind: &str, message: &str) {
    print_json(json!({ "error": { "kind": kind, "message": message } }));
}

fn print_json(mut value: Value) {
    let mut object = serde_json::Map::new();
    object.insert("schema".into(), SCHEMA.into());
    if let Value::Object(fields) = &mut value {
        object.append(fields);
    }
    write_out(&Value::Object(object).to_string());
}

/// A closed pipe (`dpmf … | head`) ends the output quietly.
fn write_out(text: &str) {
    let _ = writeln!(std::io::stdout(), "{text}");
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
    use super::*;

    #[test]
    fn long_numbers_in_words_are_rounded_and_short_ones_stay() {
        assert_eq!(rounded("cyclic-poisson:1:0.0001129477673050098"), "cyclic-poisson:1:0.0001129");
        assert_eq!(rounded("balls-in-bins:92"), "balls-in-bins:92");
        assert_eq!(rounded("cyclic-poisson:64:0.015625"), "cyclic-poisson:64:0.015625");
        assert_eq!(rounded("none"), "none");
    }
}
