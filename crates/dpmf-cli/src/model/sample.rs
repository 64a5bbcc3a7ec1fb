//! `dpmf sample`.

use super::{ModelArgs, about};
use crate::report::Report;
use crate::workload::count;
use dpmf_train::Writing;
use serde_json::json;

/// Write new texts with a model that was trained.
///
/// Takes the model of a `dpmf train` on texts, and draws tokens one after the other from what the model gives them. What is
/// computed from a private model is as private as the model: ε covers the texts too. The data is not needed.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  dpmf sample run\n  dpmf sample run/planned-0/model.safetensors --count 20 --temperature 0.7 --start lib"
)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,

    /// How many texts
    #[arg(long, value_name = "k", value_parser = count, default_value = "10")]
    count: usize,

    /// Most tokens of a text
    #[arg(long, value_name = "k", value_parser = count, default_value = "40")]
    length: usize,

    /// What every text begins with
    #[arg(long, value_name = "TEXT", default_value = "")]
    start: String,

    /// Below 1 likelier tokens are favoured, above 1 less likely ones
    #[arg(long, value_name = "T", default_value_t = 1.0)]
    temperature: f64,

    /// Number that the draws follow from
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
}

pub fn run(args: &Args) -> anyhow::Result<Report> {
    let model = args.model.load()?;
    let texts = model.write(&Writing {
        count: args.count,
        length: args.length,
        start: args.start.clone(),
        temperature: args.temperature,
        seed: args.seed,
    })?;
    Ok(Report::new(json!({ "model": about(&model), "texts": &texts }), texts.join("\n")))
}
