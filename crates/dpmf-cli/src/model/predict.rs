//! `dpmf predict`.

use super::{ModelArgs, about};
use crate::output;
use crate::report::{Report, note};
use anyhow::bail;
use dpmf::disk::Access;
use dpmf_train::Predictions;
use dpmf_train::data::Meaning;
use dpmf_train::saved::likeliest;
use serde_json::{Value, json};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Predict classes or numbers with a trained model.
///
/// Reads a table with the columns that the model was trained on (no label needed), or the test images of a directory,
/// and prints one prediction for each row, in order: the class with all probabilities, or the number in the unit of the
/// label. A prediction depends on the row that it is for; for everybody else it is as private as the model.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  dpmf predict run new.csv\n  dpmf predict run/planned-0/model.safetensors new.parquet --out predictions.csv"
)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,

    /// A .csv, .tsv, .jsonl or .parquet file; for a model of images fashion-mnist[:DIR]
    #[arg(value_name = "DATA")]
    data: String,

    /// Write the predictions to this .csv or .jsonl file instead of to standard output
    #[arg(long, short, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// How predictions are written.
#[derive(Clone, Copy, PartialEq)]
enum Format {
    Csv,
    JsonLines,
}

pub fn run(args: &Args) -> anyhow::Result<Report> {
    let format = match &args.out {
        None => Format::Csv,
        Some(path) => {
            output::check(path)?;
            format_of(path)?
        }
    };
    let model = args.model.load()?;
    let meaning = model.meaning()?;
    let (features, remarks) = model.features(&args.data)?;
    remarks.iter().for_each(|remark| note(&format!("{}: {remark}", args.data)));
    let predictions = model.predict(&features)?;
    let label = match meaning {
        Meaning::Pixels { .. } => "class",
        Meaning::Columns(schema) => schema.label.column(),
    };
    let mut json = json!({ "model": about(&model), "label": label });
    match &predictions {
        Predictions::Classes(rows) => {
            let classes: Vec<String> =
                (0..meaning.classes().unwrap_or(0)).map(|class| meaning.class(class)).collect();
            json["rows"] = json!(rows.len());
            json["predictions"] =
                rows.iter().map(|row| Value::from(classes[likeliest(row)].clone())).collect();
            json["classes"] = json!(classes);
            json["probabilities"] = json!(rows);
        }
        Predictions::Numbers(numbers) => {
            json["rows"] = json!(numbers.len());
            json["predictions"] = json!(numbers);
        }
    }
    let text = match &args.out {
        None => String::from_utf8(written(format, label, meaning, &predictions)?)?,
        Some(path) => {
            let bytes = written(format, label, meaning, &predictions)?;
            output::save(path, Access::Everyone, |file| file.write_all(&bytes))?;
            json["out"] = json!(path);
            format!("{} predictions of `{label}` in {}", json["rows"], path.display())
        }
    };
    Ok(Report::new(json, text))
}

fn format_of(path: &Path) -> anyhow::Result<Format> {
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("csv") => Ok(Format::Csv),
        Some("jsonl" | "ndjson") => Ok(Format::JsonLines),
        _ => bail!(
            "{}: the name must end in .csv or .jsonl, which is the format of the predictions",
            path.display()
        ),
    }
}

fn written(
    format: Format,
    label: &str,
    meaning: &Meaning,
    predictions: &Predictions,
) -> anyhow::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    match (format, predictions) {
        (Format::Csv, Predictions::Classes(rows)) => {
            let classes = meaning.classes().unwrap_or(0);
            let mut out = csv::Writer::from_writer(&mut bytes);
            let names = (0..classes).map(|class| format!("p({})", meaning.class(class)));
            out.write_record([label.to_owned()].into_iter().chain(names))?;
            for row in rows {
                let numbers = row.iter().map(f64::to_string);
                out.write_record([meaning.class(likeliest(row))].into_iter().chain(numbers))?;
            }
            out.flush()?;
        }
        (Format::Csv, Predictions::Numbers(numbers)) => {
            let mut out = csv::Writer::from_writer(&mut bytes);
            out.write_record([label])?;
            numbers.iter().try_for_each(|number| out.write_record([number.to_string()]))?;
            out.flush()?;
        }
        (Format::JsonLines, Predictions::Classes(rows)) => {
            for row in rows {
                let named: serde_json::Map<String, Value> =
                    row.iter().enumerate().map(|(class, p)| (meaning.class(class), json!(p))).collect();
                writeln!(
                    bytes,
                    "{}",
                    json!({ label: meaning.class(likeliest(row)), "probabilities": named })
                )?;
            }
        }
        (Format::JsonLines, Predictions::Numbers(numbers)) => {
            for number in numbers {
                writeln!(bytes, "{}", json!({ label: number }))?;
            }
        }
    }
    Ok(bytes)
}
