//! `dpmf sample`.

use crate::report::Report;
use crate::train::Experiment;
use crate::train::task::Task;
use crate::workload::count;
use anyhow::bail;
use chacha20::ChaCha20Rng;
use dpmf_train::data::Vocabulary;
use dpmf_train::model::Lstm;
use dpmf_train::{Model, run};
use rand::{Rng, SeedableRng};
use serde_json::json;
use std::path::PathBuf;

/// Write new texts with a model that was trained.
///
/// Takes the directory of a `dpmf train` on texts, and draws tokens one after the other from what the model gives them. What is
/// computed from a private model is as private as the model: ε covers the texts too. The data is read again, for the vocabulary.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  dpmf sample run\n  dpmf sample run --count 20 --temperature 0.7 --start lib"
)]
pub struct Args {
    /// Directory of a training
    #[arg(value_name = "DIR")]
    folder: PathBuf,

    /// Which of its runs, by the name of its directory; the first by default
    #[arg(long, value_name = "NAME")]
    run: Option<String>,

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
    if !(args.temperature > 0.0 && args.temperature.is_finite()) {
        bail!("--temperature is {}, but it must be positive and finite", args.temperature);
    }
    if args.length == 0 || args.length > 10_000 || args.count > 100_000 {
        bail!("--length must lie between 1 and 10000, and --count must be at most 100000");
    }
    let experiment = Experiment::read(&args.folder)?;
    let name = match &args.run {
        Some(name) if experiment.runs.contains(name) => name,
        Some(name) => bail!("there is no run {name}, but {}", experiment.runs.join(", ")),
        None => match experiment.runs.first() {
            Some(name) => name,
            None => bail!("{} has no runs", args.folder.display()),
        },
    };
    let place = args.folder.join(name);
    let parameters = run::model(place.as_path())?;
    let Task::Text { data, model } = Task::open(&experiment.task)? else {
        bail!("{} was trained on images, and there is no text to write", args.folder.display());
    };
    if parameters.len() != model.parameters() {
        bail!(
            "the model has {} parameters, but the data makes one of {}: the data has changed since",
            parameters.len(),
            model.parameters()
        );
    }
    let begin = beginning(&data.vocabulary, &args.start)?;
    let mut rng = ChaCha20Rng::seed_from_u64(args.seed);
    let texts: Vec<String> = (0..args.count)
        .map(|_| {
            let tokens = text(&model, &parameters, begin.clone(), args, &mut rng);
            data.vocabulary.decode(&tokens)
        })
        .collect();
    let plan = run::plan(place.as_path())?;
    let statement = plan.mechanism().and_then(|mechanism| mechanism.privacy());
    let json =
        json!({ "run": name, "texts": &texts, "epsilon": statement.map(|s| s.calibration().epsilon()) });
    Ok(Report::new(json, texts.join("\n")))
}

/// The tokens of what texts begin with.
fn beginning(vocabulary: &Vocabulary, start: &str) -> anyhow::Result<Vec<u16>> {
    let mut tokens = Vec::new();
    vocabulary.encode(start, start.len() + 1, &mut tokens);
    tokens.retain(|token| *token != Vocabulary::END);
    if tokens.is_empty() {
        tokens.push(Vocabulary::BEGIN);
    }
    if tokens.contains(&Vocabulary::UNKNOWN) {
        bail!("--start is {start:?}, which has symbols that the model does not know");
    }
    Ok(tokens)
}

/// One text, to its end or to the most tokens.
fn text(
    model: &Lstm,
    parameters: &[f32],
    mut tokens: Vec<u16>,
    args: &Args,
    rng: &mut ChaCha20Rng,
) -> Vec<u16> {
    let (mut space, first) = (model.workspace(), tokens.len());
    while tokens.len() - first < args.length {
        let probabilities = model.next(parameters, &tokens, &mut space);
        let weights = probabilities.iter().enumerate().map(|(token, p)| match token as u16 {
            Vocabulary::BEGIN | Vocabulary::UNKNOWN => 0.0,
            _ => f64::from(p.max(0.0)).powf(1.0 / args.temperature),
        });
        let weights: Vec<f64> = weights.collect();
        let mut left = rng.next_u64() as f64 / 2_f64.powi(64) * weights.iter().sum::<f64>();
        let drawn = weights.iter().position(|weight| {
            left -= weight;
            left < 0.0
        });
        let token = drawn.map_or(Vocabulary::END, |token| token as u16);
        if token == Vocabulary::END {
            break;
        }
        tokens.push(token);
    }
    tokens
}
