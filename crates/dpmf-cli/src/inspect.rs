//! `dpmf inspect` and `dpmf verify`.

use crate::report::{Report, number};
use crate::workload::count;
use anyhow::bail;
use dpmf::accounting::RegretBound;
use dpmf::accounting::statement::epsilon_for_people;
use dpmf::accounting::utility::RegretSetting;
use dpmf::inspection::{Inspection, describe};
use dpmf::{Error, Mechanism, format};
use dpmf_train::data::Meaning;
use dpmf_train::{Input, SavedModel};
use serde_json::json;
use std::fmt::Write;
use std::path::PathBuf;

/// Show what is in a mechanism or model file.
///
/// For a mechanism: its workload, factorization, loss, certificate and privacy, all recomputed from the coefficients in
/// the file. For a trained model: its kind, tensors, input and privacy statement.
#[derive(clap::Args)]
pub struct Args {
    /// A mechanism or model file
    file: PathBuf,

    /// Also bound the regret for convex losses with this Lipschitz constant (calibrated prefix sums only)
    #[arg(long, value_name = "L", requires = "distance")]
    lipschitz: Option<f64>,

    /// Distance from the initial model to the best one, for the regret bound
    #[arg(long, value_name = "‖θ*‖", requires = "lipschitz")]
    distance: Option<f64>,

    /// Number of model parameters, for the regret bound
    #[arg(long, value_name = "d", value_parser = count, default_value = "1")]
    dimension: usize,
}

/// Recompute everything that a mechanism file claims.
///
/// Recomputes hash, sensitivity and loss, and shows the privacy that follows from them. The lower bound is evaluated
/// again from the dual variable in the file, so the certificate is checked without trusting the solver that found it.
/// The hash detects damage, not malice.
#[derive(clap::Args)]
pub struct VerifyArgs {
    /// A mechanism file
    file: PathBuf,
}

pub fn run(args: &Args) -> anyhow::Result<Report> {
    if let Ok(model) = SavedModel::load(args.file.as_path()) {
        return trained(&model);
    }
    let file = format::open(&args.file)?;
    let Some(mechanism) = &file.mechanism else {
        let json = json!({ "format": format::FORMAT, "mechanism": null, "recipe": file.recipe });
        return Ok(Report::new(json, "the plan of a run without noise".into()));
    };
    let inspection = Inspection::of(mechanism)?;
    let hash: String = file.sha256.iter().map(|byte| format!("{byte:02x}")).collect();
    let mut json = serde_json::to_value(&inspection)?;
    json["format"] = format::FORMAT.into();
    json["hash"] = hash.clone().into();
    json["recipe"] = json!(file.recipe);
    let mut text = words(mechanism, &inspection, &hash)?;
    if let (Some(lipschitz), Some(distance)) = (args.lipschitz, args.distance) {
        let bound = regret(mechanism, lipschitz, distance, args.dimension)?;
        json["regret"] = json!(bound);
        write!(
            text,
            "\nregret        at most {} a step, at the best step size {}\n",
            number(bound.total),
            number(bound.learning_rate)
        )?;
    }
    Ok(Report::new(json, text))
}

/// What a model file says of itself.
fn trained(model: &SavedModel) -> anyhow::Result<Report> {
    let card = model.card();
    let tensors: Vec<_> = card.model.layout().into_iter().map(|block| (block.name, block.shape)).collect();
    let mut json = serde_json::to_value(card)?;
    json["parameters"] = json!(model.parameters().len());
    json["tensors"] = tensors.iter().map(|(name, shape)| json!({ "name": name, "shape": shape })).collect();
    json["privacy"] = json!(model.privacy());
    json["plan"] = json!(model.plan());
    let input = match &card.input {
        Input::Text { symbols, length, .. } => {
            format!("texts of {} symbols, {length} tokens at most", symbols.len())
        }
        Input::Features { meaning: Meaning::Pixels { rows, columns, classes } } => {
            format!("images of {rows} × {columns} pixels, for {classes} classes")
        }
        Input::Features { meaning: Meaning::Columns(schema) } => {
            let what = match schema.classes() {
                Some(classes) => format!("{} classes", classes.len()),
                None => "a number".into(),
            };
            format!("columns {}, for `{}`: {what}", schema.columns().join(", "), schema.label.column())
        }
    };
    let mut text = format!(
        "model         {}, {} parameters, trained on {}\nreads         {input}\nplan          {}\n",
        json["model"]["kind"].as_str().unwrap_or_default(),
        model.parameters().len(),
        card.data,
        model.plan(),
    );
    for (name, shape) in &tensors {
        writeln!(text, "tensor        {name} {shape:?}")?;
    }
    write!(text, "\n{}", model.statement())?;
    Ok(Report::new(json, text))
}

fn regret(
    mechanism: &Mechanism,
    lipschitz: f64,
    distance: f64,
    dimension: usize,
) -> anyhow::Result<RegretBound> {
    let Some(statement) = mechanism.privacy() else {
        bail!(Error::Unsupported {
            what: "the regret of an uncalibrated mechanism".into(),
            hint: "its noise has no scale yet; run `dpmf calibrate` first",
        });
    };
    if !mechanism.workload().is_prefix_sum() {
        bail!(Error::Unsupported {
            what: "a regret bound for momentum or a schedule".into(),
            hint: "the bound is proved for prefix sums, plain SGD with a constant step size",
        });
    }
    let setting = RegretSetting {
        steps: mechanism.workload().steps(),
        dimension,
        lipschitz,
        distance,
        noise_std: statement.calibration().noise_std(),
        decoder_norm: mechanism.loss().sqrt_total() / mechanism.sensitivity(),
    };
    Ok(setting.best()?)
}

fn words(mechanism: &Mechanism, seen: &Inspection<'_>, hash: &str) -> anyhow::Result<String> {
    let mut text = String::new();
    let name = seen.mechanism.as_ref().map_or(String::new(), |name| format!("{name}, as "));
    writeln!(text, "mechanism     {name}{} for {} steps", seen.form, seen.steps)?;
    writeln!(text, "workload      {}", describe(mechanism.workload()))?;
    writeln!(text, "takes part    {}", mechanism.participation().words(seen.steps))?;
    writeln!(text, "sensitivity   {} (after rounding to f32)", seen.sensitivity)?;
    writeln!(
        text,
        "√loss         {}   worst step {}, last step {}",
        number(seen.sqrt_loss),
        number(seen.max_sqrt_loss),
        number(seen.final_sqrt_loss)
    )?;
    match &seen.certificate {
        Some(c) => writeln!(
            text,
            "certificate   {:.7} times the lower bound {}",
            c.ratio_to_bound(),
            number(c.lower_bound.sqrt())
        )?,
        None => writeln!(text, "certificate   none")?,
    }
    let kept = match seen.buffers {
        Some(buffers) => format!("{buffers} buffers"),
        None => "dense rows, no buffers".into(),
    };
    writeln!(text, "streaming     {kept}, {} multiply-adds per coordinate and step", number(seen.work))?;
    writeln!(text, "identity      {}   of the noise", seen.identity)?;
    writeln!(text, "hash          {hash}   of the file")?;
    match seen.privacy {
        Some(statement) => write!(text, "\n{statement}")?,
        None => writeln!(text, "privacy       not calibrated")?,
    }
    Ok(text)
}

pub fn verify(args: &VerifyArgs) -> anyhow::Result<Report> {
    // Loading checks the hash and recomputes sensitivity and loss from the coefficients.
    let mechanism = format::load(&args.file)?;
    let recomputed = mechanism.recompute_bound()?;
    let stated = mechanism.bound().map(|bound| bound.lower_bound);
    // A bound may be understated without harm; it must not be overstated, by however little.
    let holds = match (stated, recomputed) {
        (Some(stated), Some(recomputed)) => stated <= recomputed,
        _ => true,
    };
    let json = json!({
        "ok": holds,
        "sensitivity": mechanism.sensitivity(),
        "sqrt_loss": mechanism.loss().sqrt_total(),
        "lower_bound": stated,
        "recomputed_lower_bound": recomputed,
        "ratio_to_bound": recomputed.map(|bound| (mechanism.loss().total() / bound).sqrt()),
        "privacy": mechanism.privacy(),
    });
    let mut text = String::new();
    writeln!(text, "hash          matches")?;
    writeln!(text, "sensitivity   {} recomputed, not understated", mechanism.sensitivity())?;
    writeln!(text, "√loss         {} recomputed", number(mechanism.loss().sqrt_total()))?;
    match (stated, recomputed) {
        (Some(stated), Some(recomputed)) => {
            let verdict = if holds { "holds" } else { "is OVERSTATED" };
            let (stated, recomputed_root) = (number(stated.sqrt()), number(recomputed.sqrt()));
            writeln!(text, "lower bound   {stated} {verdict}; recomputed {recomputed_root}")?;
            writeln!(text, "ratio         {:.7}", (mechanism.loss().total() / recomputed).sqrt())?;
        }
        _ => writeln!(text, "lower bound   none in the file")?,
    }
    text += &match mechanism.privacy() {
        Some(statement) => {
            let (calibration, steps) = (statement.calibration(), mechanism.workload().steps());
            format!(
                "privacy       ε = {}, δ = {:e} for every {} ({}), each taking part {}\n",
                epsilon_for_people(calibration.epsilon()),
                calibration.delta(),
                statement.unit().name(),
                calibration.terms().adjacency,
                mechanism.participation().words(steps),
            )
        }
        None => "privacy       not calibrated, so no guarantee yet\n".to_owned(),
    };
    let mut report = Report::new(json, text);
    report.failed = !holds;
    Ok(report)
}
