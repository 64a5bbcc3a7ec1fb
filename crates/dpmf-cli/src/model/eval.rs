//! `dpmf eval`.

use super::{ModelArgs, about};
use crate::report::{Report, note, number, table};
use dpmf_train::Evaluation;
use dpmf_train::data::Tokens;
use serde_json::{Value, json};

/// Classes up to which a table of all confusions fits a screen.
const SHOWN: usize = 12;

/// Evaluate a trained model on other data.
///
/// Reads a table with the columns that the model was trained on, including the label, or the test images of a
/// directory. Prints accuracy, loss and a confusion matrix for classes, errors for numbers, and perplexity for texts.
/// These scores are computed from the given rows and are not covered by ε: take care before you publish scores on
/// private rows.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  dpmf eval run held-out.csv\n  dpmf eval run held-out.jsonl --text message"
)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,

    /// A .csv, .tsv, .jsonl or .parquet file; for a model of images fashion-mnist[:DIR]
    #[arg(value_name = "DATA")]
    data: String,

    /// Column with the texts, for a text model [default: text]
    #[arg(long, value_name = "COLUMN")]
    text: Option<String>,
}

pub fn run(args: &Args) -> anyhow::Result<Report> {
    let model = args.model.load()?;
    let (evaluation, remarks) = model.evaluate(&args.data, args.text.as_deref())?;
    remarks.iter().for_each(|remark| note(&format!("{}: {remark}", args.data)));
    let mut json = json!({ "model": about(&model), "data": args.data });
    if let (Value::Object(all), Value::Object(fields)) = (&mut json, serde_json::to_value(&evaluation)?) {
        all.extend(fields);
    }
    Ok(Report::new(json, words(&evaluation)))
}

fn words(evaluation: &Evaluation) -> String {
    match evaluation {
        Evaluation::Texts { tokens, token, accuracy, loss, perplexity } => {
            let what = if *token == Tokens::Characters { "characters" } else { "words" };
            format!(
                "{tokens} {what} to predict\naccuracy    {accuracy:.4}\nloss        {loss:.4} nats\nperplexity  {}",
                number(*perplexity)
            )
        }
        Evaluation::Classes { rows, accuracy, loss, classes, confusion } => {
            let mut text = format!("{rows} rows\naccuracy  {accuracy:.4}\nloss      {loss:.4} nats");
            if classes.len() <= SHOWN {
                let names = classes.iter().map(String::as_str);
                let head: Vec<&str> = ["class \\ predicted"].into_iter().chain(names).collect();
                let row = |(name, row): (&String, &Vec<u64>)| {
                    [name.clone()].into_iter().chain(row.iter().map(u64::to_string)).collect()
                };
                let cells: Vec<Vec<String>> = classes.iter().zip(confusion).map(row).collect();
                text += &format!("\n\n{}", table(&head, &cells));
            }
            text
        }
        Evaluation::Numbers { rows, rmse, mean_absolute_error, r2 } => format!(
            "{rows} rows\nroot mean squared error  {}\nmean absolute error      {}\nvariance explained (R²)  {}",
            number(*rmse),
            number(*mean_absolute_error),
            r2.map_or("–".into(), |share| format!("{share:.4}"))
        ),
    }
}
