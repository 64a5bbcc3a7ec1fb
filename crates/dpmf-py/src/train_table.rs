//! `dpmf.train_table`: a private model from a data frame.

use crate::arrays::vector;
use crate::error::value_error;
use crate::model::{Model, failed};
use crate::parallel;
use dpmf::planner::{FitCache, Planner, cache_folder};
use dpmf_train::data::{Columns, Frame, FrameColumn, Options, Predict, open_frame};
use dpmf_train::in_memory::{self, PlanningContext, TrainingRequest};
use dpmf_train::task::{ModelKind, ModelOptions};
use dpmf_train::{KeySource, RunPlanner};
use numpy::{PyArray1, PyArrayMethods};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};
use serde_json::json;
use std::ops::ControlFlow;
use std::path::PathBuf;

/// A column: whole numbers, numbers, or words of which some may be missing.
fn column(name: &str, values: &Bound<'_, PyAny>) -> PyResult<FrameColumn> {
    if let Ok(array) = values.cast::<PyArray1<i64>>() {
        return Ok(FrameColumn::Integers(array.readonly().as_array().iter().copied().collect()));
    }
    if let Ok(list) = values.cast::<PyList>() {
        return Ok(FrameColumn::Texts(list.extract()?));
    }
    vector(name, values).map(FrameColumn::Numbers)
}

/// Trains a model on columns by name; dpmf.train_table is what people call.
#[pyfunction]
#[pyo3(signature = (columns, *, name, label, user, features, exclude, task, classes, schema, schema_share, public_share, model, hidden, epsilon, delta,
                    learning_rate, epochs, clients, clip, examples_per_user, hold_out, seed))]
#[allow(clippy::too_many_arguments)] // keywords in Python
pub(crate) fn train_columns(
    py: Python<'_>,
    columns: &Bound<'_, PyList>,
    name: String,
    label: String,
    user: Option<String>,
    features: Option<Vec<String>>,
    exclude: Vec<String>,
    task: Option<&str>,
    classes: Option<Vec<String>>,
    schema: Option<PathBuf>,
    schema_share: Option<f64>,
    public_share: Option<f64>,
    model: Option<&str>,
    hidden: usize,
    epsilon: f64,
    delta: f64,
    learning_rate: Option<f64>,
    epochs: Option<usize>,
    clients: Option<usize>,
    clip: Option<f64>,
    examples_per_user: Option<usize>,
    hold_out: bool,
    seed: Option<u64>,
) -> PyResult<Model> {
    let mut frame = Frame { name, columns: Vec::new() };
    for pair in columns.iter() {
        let (name, values): (String, Bound<'_, PyAny>) = pair.cast::<PyTuple>()?.extract()?;
        let column = column(&name, &values)?;
        frame.columns.push((name, column));
    }
    let predict = match task {
        None => None,
        Some("classification") => Some(Predict::Classification),
        Some("regression") => Some(Predict::Regression),
        Some(other) => {
            return Err(value_error(format!(
                "task must be \"classification\" or \"regression\" (got {other:?})"
            )));
        }
    };
    let kind = match model {
        None => None,
        Some("logistic") => Some(ModelKind::Logistic),
        Some("linear") => Some(ModelKind::Linear),
        Some("mlp") => Some(ModelKind::Mlp),
        Some(other) => {
            return Err(value_error(format!(
                "model must be \"logistic\", \"linear\" or \"mlp\" (got {other:?})"
            )));
        }
    };
    if public_share.is_some_and(|share| !(0.0..=0.5).contains(&share)) {
        return Err(value_error("public_share must lie between 0 and 0.5"));
    }
    let options = Options {
        columns: Columns {
            rows_are_users: user.is_none(),
            user,
            label: Some(label),
            features,
            exclude,
            text: None,
        },
        predict,
        classes,
        schema,
        public_share: public_share.map(|share| (1000.0 * share).round() as u32),
        examples_per_user,
        train_all: !hold_out,
        ..Options::default()
    };
    let kinds = ModelOptions { kind, embedding: 1, hidden, projection: None };
    if schema_share.is_some_and(|share| !(0.001..=0.5).contains(&share)) {
        return Err(value_error("schema_share must lie between 0.001 and 0.5"));
    }
    let request = TrainingRequest { epsilon, delta, schema_share, learning_rate, epochs, clients, clip };
    let key = seed.map_or(KeySource::System, KeySource::Seed);
    let folder = cache_folder();
    let work = move |tell: &mut dyn FnMut(String) -> ControlFlow<()>| {
        let frame = open_frame(frame, &options)?;
        let cache = folder.clone().map_or_else(FitCache::default, FitCache::in_folder);
        let mut planner = RunPlanner::new(Planner::new(cache));
        let mut listen = |line: &str| tell(line.to_owned());
        let context =
            PlanningContext { planner: &mut planner, folder: folder.as_deref(), listen: &mut listen };
        let planned = in_memory::prepare(frame, &options, kinds, &request, &key, context)?;
        let scale = planned.task.scale();
        Ok::<_, dpmf_train::Error>((in_memory::train(planned, &key)?, scale))
    };
    let (trained, scale) = parallel::run_reporting(py, None, move |tell| Ok(work(tell)))?.map_err(failed)?;
    let scores = trained.scores.map(|(test, baseline)| {
        let rmse = scale.map(|scale| scale * (2.0 * test.loss).sqrt());
        let mut scores = json!({"baseline": baseline, "covered_by_epsilon": false});
        match test.accuracy {
            Some(accuracy) => scores["test_accuracy"] = json!(accuracy),
            None => scores["test_rmse"] = json!(rmse),
        }
        scores
    });
    Ok(Model::trained(trained.model, json!(trained.rehearsed), json!(scores)))
}
