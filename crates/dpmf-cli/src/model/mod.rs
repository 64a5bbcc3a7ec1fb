//! `dpmf sample`, `dpmf predict` and `dpmf eval`: what a trained model is good for.

pub mod eval;
pub mod predict;
pub mod sample;

use crate::train::Experiment;
use anyhow::bail;
use dpmf_train::{SavedModel, run};
use serde_json::{Value, json};
use std::path::PathBuf;

/// Which model.
#[derive(clap::Args)]
pub struct ModelArgs {
    /// A model.safetensors file, or the directory of a `dpmf train`
    #[arg(value_name = "MODEL")]
    model: PathBuf,

    /// Which run to use, by the name of its directory; the first one by default
    #[arg(long, value_name = "NAME")]
    run: Option<String>,
}

impl ModelArgs {
    /// Reads the model.
    fn load(&self) -> anyhow::Result<SavedModel> {
        if !self.model.is_dir() {
            if self.run.is_some() {
                bail!(
                    "--run chooses one run of a training directory, but {} is not a directory",
                    self.model.display()
                );
            }
            return Ok(SavedModel::load(self.model.as_path())?);
        }
        // The directory of one run has its model in it.
        if run::exists(self.model.as_path())? && self.run.is_none() {
            return Ok(run::model(self.model.as_path())?);
        }
        let experiment = Experiment::read(&self.model)?;
        let name = match (&self.run, experiment.runs.first()) {
            (Some(name), _) if experiment.runs.contains(name) => name,
            (Some(name), _) => bail!("there is no run {name}; the runs are {}", experiment.runs.join(", ")),
            (None, Some(first)) => first,
            (None, None) => bail!("{} has no runs", self.model.display()),
        };
        Ok(run::model(self.model.join(name))?)
    }
}

/// What every answer says of the model behind it.
fn about(model: &SavedModel) -> Value {
    let privacy = model.privacy();
    json!({
        "data": model.card().data,
        "kind": kind(model),
        "parameters": model.parameters().len(),
        "epsilon": privacy.and_then(|privacy| privacy.get("epsilon")),
        "delta": privacy.and_then(|privacy| privacy.get("delta")),
        "plan": model.plan(),
    })
}

fn kind(model: &SavedModel) -> Value {
    serde_json::to_value(&model.card().model).map_or(Value::Null, |value| value["kind"].clone())
}
