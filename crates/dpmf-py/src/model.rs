//! `dpmf.Model`: a trained model out of its file.

use crate::data::objects;
use crate::error::{raise, to_python, type_error, value_error};
use dpmf_train::data::{Meaning, Schema};
use dpmf_train::saved::likeliest;
use dpmf_train::{Hint, Input, Predictions, SampleOptions, SavedModel};
use numpy::{PyArray1, PyArrayDyn, PyArrayMethods, PyReadonlyArray2};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyList};
use serde_json::Value;
use std::path::PathBuf;

/// A model that dpmf trained, with everything that is needed to use it; dpmf.load_model reads one.
///
/// The file is in the safetensors format: its tensors have names and shapes, and one entry of metadata, "dpmf", holds the rest as
/// JSON. Anything computed from a private model is as private as the model.
#[pyclass(frozen, module = "dpmf")]
pub(crate) struct Model(SavedModel, Value, Value);

/// Errors of training as Python's.
pub(crate) fn failed(error: dpmf_train::Error) -> PyErr {
    use dpmf_train::Error as E;
    let (error, hint) = match error {
        E::Hinted { error, hint } => (*error, Some(hint)),
        error => (error, None),
    };
    let message = match hint {
        Some(hint) => format!("{error}: {}", arguments(hint)),
        None => error.to_string(),
    };
    match error {
        E::Dpmf(error) => to_python(error),
        E::Run { .. } => Python::attach(|py| raise(py, "format", message)),
        E::Io { .. } => Python::attach(|py| raise(py, "io", message)),
        _ => value_error(message),
    }
}

/// What an error hints at, in methods and keyword arguments.
fn arguments(hint: Hint) -> String {
    match hint {
        Hint::TextColumn => "name it with text=".into(),
        Hint::Sample => "see Model.sample".into(),
        Hint::Predict => "see Model.predict".into(),
        other => other.to_string(),
    }
}

/// Reads a model that `dpmf train` made: its file model.safetensors, or the directory of its run.
///
/// Raises FormatError for a file that is something else or damaged, FileError for one that cannot be read.
#[pyfunction]
pub(crate) fn load_model(py: Python<'_>, path: PathBuf) -> PyResult<Model> {
    py.detach(|| {
        if path.is_dir() { dpmf_train::run::model(path.as_path()) } else { SavedModel::load(path.as_path()) }
    })
    .map(|model| Model(model, Value::Null, Value::Null))
    .map_err(failed)
}

impl Model {
    /// A model that was just trained, with what its training tells.
    pub(crate) fn trained(model: SavedModel, rehearsed: Value, scores: Value) -> Self {
        Self(model, rehearsed, scores)
    }

    fn schema(&self) -> Option<&Schema> {
        match &self.0.card().input {
            Input::Features { meaning: Meaning::Columns(schema) } => Some(schema),
            _ => None,
        }
    }

    /// Features of rows in whatever form they come.
    fn features(&self, rows: &Bound<'_, PyAny>) -> PyResult<Vec<f32>> {
        let py = rows.py();
        let meaning = self.0.meaning().map_err(failed)?;
        let array = match rows.extract::<PyReadonlyArray2<'_, f32>>() {
            Ok(array) => Some((array.as_array().ncols(), array.as_array().iter().copied().collect())),
            Err(_) => rows.extract::<PyReadonlyArray2<'_, f64>>().ok().map(|array| {
                (array.as_array().ncols(), array.as_array().iter().map(|x| *x as f32).collect::<Vec<f32>>())
            }),
        };
        if let Some((width, features)) = array {
            if width != meaning.features() {
                let expected = meaning.features();
                return Err(value_error(format!(
                    "rows have {width} features, but the model reads {expected}"
                )));
            }
            return Ok(features);
        }
        if let Ok(path) = rows.extract::<PathBuf>() {
            let data = path.to_string_lossy().into_owned();
            return py.detach(|| self.0.features(&data)).map(|(features, _)| features).map_err(failed);
        }
        let Some(schema) = self.schema() else {
            return Err(type_error("a model of images reads an array with a row for each image"));
        };
        if let Ok(list) = rows.cast::<PyList>() {
            let mut features = Vec::new();
            for (number, row) in list.iter().enumerate() {
                let row = row
                    .cast::<PyDict>()
                    .map_err(|_| type_error("each row must be a dictionary of columns"))?;
                let fields = fields(schema, |column| row.get_item(column))?;
                features.extend(encoded(schema, number, &fields)?);
            }
            return Ok(features);
        }
        // Columns: a dictionary, or anything with columns by name, as data frames have them.
        let columns: Vec<(&str, Vec<Option<String>>)> = schema
            .columns()
            .into_iter()
            .map(|name| {
                let missing =
                    |_| value_error(format!("there is no column {name:?}, which the model was trained with"));
                let column = rows.get_item(name).map_err(missing)?;
                let cells = column.try_iter()?.map(|cell| written(&cell?)).collect::<PyResult<Vec<_>>>()?;
                Ok((name, cells))
            })
            .collect::<PyResult<_>>()?;
        let count = columns.first().map_or(0, |(_, cells)| cells.len());
        if let Some((name, cells)) = columns.iter().find(|(_, cells)| cells.len() != count) {
            return Err(value_error(format!(
                "column {name:?} has {} rows, but other columns have {count}",
                cells.len()
            )));
        }
        let mut features = Vec::with_capacity(count * schema.width());
        for number in 0..count {
            let fields: Vec<Option<String>> =
                columns.iter().map(|(_, cells)| cells[number].clone()).collect();
            features.extend(encoded(schema, number, &fields)?);
        }
        Ok(features)
    }

    fn predictions(&self, rows: &Bound<'_, PyAny>) -> PyResult<Predictions> {
        let features = self.features(rows)?;
        rows.py().detach(|| self.0.predict(&features)).map_err(failed)
    }
}

/// The fields of a row that the schema names.
fn fields<'py>(
    schema: &Schema,
    cell: impl Fn(&str) -> PyResult<Option<Bound<'py, PyAny>>>,
) -> PyResult<Vec<Option<String>>> {
    schema.columns().into_iter().map(|name| cell(name)?.map_or(Ok(None), |value| written(&value))).collect()
}

fn encoded(schema: &Schema, number: usize, fields: &[Option<String>]) -> PyResult<Vec<f32>> {
    let columns = schema.columns();
    let cell = |name: &str| fields[columns.iter().position(|column| *column == name)?].clone();
    schema.row(cell).map_err(|fault| value_error(format!("row {number}: {fault}")))
}

/// A value as a table would have it; nothing for None and NaN.
fn written(value: &Bound<'_, PyAny>) -> PyResult<Option<String>> {
    if value.is_none() {
        return Ok(None);
    }
    if let Ok(truth) = value.cast::<PyBool>() {
        return Ok(Some(truth.is_true().to_string()));
    }
    if let Ok(number) = value.cast::<PyFloat>()
        && number.value().is_nan()
    {
        return Ok(None);
    }
    Ok(Some(value.str()?.to_string()))
}

#[pymethods]
impl Model {
    /// Kind of the model: "lstm", "mlp", "logistic" or "regressor".
    #[getter]
    fn kind<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        objects(py, &self.0.card().model)?.get_item("kind")
    }

    /// Sizes, input and data of the model, as the file has them.
    #[getter]
    fn card<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        objects(py, self.0.card())
    }

    /// The tensors by name, as arrays of float32.
    #[getter]
    fn tensors<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let tensors = PyDict::new(py);
        for block in self.0.card().model.layout() {
            let flat = PyArray1::from_slice(py, &self.0.parameters()[block.range]);
            let shaped: Bound<'py, PyArrayDyn<f32>> = flat.reshape(&block.shape[..])?;
            tensors.set_item(block.name, shaped)?;
        }
        Ok(tensors)
    }

    /// Its classes, in the order of predicted probabilities; None for texts and numbers.
    #[getter]
    fn classes(&self) -> Option<Vec<String>> {
        let meaning = self.0.meaning().ok()?;
        Some((0..meaning.classes()?).map(|class| meaning.class(class)).collect())
    }

    /// The symbols of a text model; None for others.
    #[getter]
    fn vocabulary(&self) -> Option<Vec<String>> {
        match &self.0.card().input {
            Input::Text { symbols, .. } => Some(symbols.clone()),
            Input::Features { .. } => None,
        }
    }

    /// The privacy statement as a dictionary; None if the model was trained without privacy.
    #[getter]
    fn privacy<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.0.privacy().map(|privacy| objects(py, privacy)).transpose()
    }

    /// The settings that the rehearsal on made-up tables chose, as a dictionary; None for a model that was read from a file, or
    /// if all settings were given.
    #[getter]
    fn rehearsed<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        objects(py, &self.1)
    }

    /// Scores on the rows that train_table held out, and the trivial model's, as a dictionary; ε does not cover them, and they are
    /// not saved with the model. None for a model that was read from a file, or if no row was held out.
    #[getter]
    fn scores<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        objects(py, &self.2)
    }

    /// Writes the model to a file, which load_model reads.
    fn save(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        py.detach(|| self.0.save(path.as_path())).map_err(failed)
    }

    /// The privacy statement as text.
    #[getter]
    fn statement(&self) -> &str {
        self.0.statement()
    }

    /// SHA-256 of the plan it was trained with.
    #[getter]
    fn plan(&self) -> &str {
        self.0.plan()
    }

    /// New texts, drawn token by token; the same for the same seed.
    #[pyo3(signature = (count=10, *, length=40, start="", temperature=1.0, seed=0))]
    fn sample(
        &self,
        py: Python<'_>,
        count: usize,
        length: usize,
        start: &str,
        temperature: f64,
        seed: u64,
    ) -> PyResult<Vec<String>> {
        let options = SampleOptions { count, length, start: start.to_owned(), temperature, seed };
        py.detach(|| self.0.write(&options)).map_err(failed)
    }

    /// The class of every row, or the number as an array.
    ///
    /// `rows` is a data frame or a dictionary of columns, a list of dictionaries, the path of a table, or an array with the
    /// features as the model reads them.
    fn predict<'py>(&self, rows: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = rows.py();
        match self.predictions(rows)? {
            Predictions::Classes(found) => {
                let meaning = self.0.meaning().map_err(failed)?;
                let names = found.iter().map(|row| meaning.class(likeliest(row)));
                Ok(PyList::new(py, names)?.into_any())
            }
            Predictions::Numbers(numbers) => Ok(PyArray1::from_vec(py, numbers).into_any()),
        }
    }

    /// Probabilities of every class, a row each, in the order of `classes`; `rows` as for `predict`.
    fn probabilities<'py>(&self, rows: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        match self.predictions(rows)? {
            Predictions::Classes(found) => Ok(numpy::PyArray2::from_vec2(rows.py(), &found)?.into_any()),
            Predictions::Numbers(_) => {
                Err(value_error("the model predicts a number, which has no probabilities"))
            }
        }
    }

    /// How good the model is on a table with its label, as a dictionary: accuracy, loss and confusions of classes, errors of
    /// numbers, or the perplexity of texts, whose column is `text`.
    ///
    /// The figures are of those rows: ε does not cover them.
    #[pyo3(signature = (data, *, text=None))]
    fn evaluate<'py>(
        &self,
        py: Python<'py>,
        data: PathBuf,
        text: Option<&str>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let data = data.to_string_lossy().into_owned();
        let (evaluation, _) = py.detach(|| self.0.evaluate(&data, text)).map_err(failed)?;
        objects(py, &evaluation)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let (card, kind) = (self.0.card(), self.kind(py)?);
        Ok(format!("<dpmf.Model {kind} of {:?}, {} parameters>", card.data, self.0.parameters().len()))
    }
}
