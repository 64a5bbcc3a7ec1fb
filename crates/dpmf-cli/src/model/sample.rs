//! `dpmf sample`.

use super::{ModelArgs, about};
use crate::report::Report;
use crate::workload::count;
use dpmf_train::SampleOptions;
use serde_json::json;

/// Write new texts with a trained model.
///
/// Samples one token after another from a model that `dpmf train` trained on texts. Anything computed from a private
/// model is as private as the model, so ε covers the new texts too. The training data is not needed.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  dpmf sample run\n  dpmf sample run/planned-0/model.safetensors --count 20 --temperature 0.7 --start lib"
)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,

    /// Number of texts
    #[arg(long, value_name = "k", value_parser = count, default_value = "10")]
    count: usize,

    /// Maximum length of a text in tokens
    #[arg(long, value_name = "k", value_parser = count, default_value = "40")]
    length: usize,

    /// Text that every sample begins with
    #[arg(long, value_name = "TEXT", default_value = "")]
    start: String,

    /// Sampling temperature: below 1 favours likely tokens, above 1 unlikely ones
    #[arg(long, value_name = "T", default_value_t = 1.0)]
    temperature: f64,

    /// Seed of the random draws
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
}

pub fn run(args: &Args) -> anyhow::Result<Report> {
    let model = args.model.load()?;
    let texts = model.write(&SampleOptions {
        count: args.count,
        length: args.length,
        start: args.start.clone(),
        temperature: args.temperature,
        seed: args.seed,
    })?;
    Ok(Report::new(json!({ "model": about(&model), "texts": &texts }), texts.join("\n")))
}
