//! `dpmf.Workload`.

use crate::arrays;
use crate::error::{IntoPython, type_error, value_error};
use dpmf::inspection::describe;
use dpmf::{Average, Optimizer, Schedule};
use faer::Mat;
use numpy::{AllowTypeChange, PyArray1, PyArray2, PyArrayLike2, PyUntypedArrayMethods};
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::sync::Arc;

/// The linear map A from clipped gradients to released iterates.
///
/// >>> import dpmf
/// >>> dpmf.Workload.sgd(100, momentum=0.9).steps
/// 100
#[pyclass(frozen, module = "dpmf")]
#[derive(Clone)]
pub(crate) struct Workload(pub(crate) Arc<dpmf::Workload>);

#[pymethods]
impl Workload {
    /// Running sums: SGD with unit step size, or counts over time.
    #[staticmethod]
    fn prefix_sum(steps: usize) -> PyResult<Self> {
        Ok(dpmf::Workload::prefix_sum(steps).or_raise()?.into())
    }

    /// The iterates of SGD.
    ///
    /// m = momentum * m + g, theta = theta - rate * m; nesterov looks ahead; weight_decay is decoupled, or as in
    /// torch.optim.SGD with coupled=True. schedule is text ("constant", "cooldown:0.25:0.05", "warmup:100+cosine:0.1",
    /// ...), or one step size for every step, and then steps may be None. Every step size is multiplied by
    /// learning_rate, which matters only beside weight decay. average is None, "uniform" or "ema:decay".
    #[staticmethod]
    #[pyo3(signature = (steps=None, *, momentum=0.0, nesterov=false, weight_decay=0.0, coupled=false,
                        schedule=None, learning_rate=1.0, average=None))]
    #[allow(clippy::too_many_arguments)] // keywords in Python
    fn sgd(
        steps: Option<usize>,
        momentum: f64,
        nesterov: bool,
        weight_decay: f64,
        coupled: bool,
        schedule: Option<&Bound<'_, PyAny>>,
        learning_rate: f64,
        average: Option<&str>,
    ) -> PyResult<Self> {
        let mut rates = step_sizes(steps, schedule)?;
        rates.iter_mut().for_each(|rate| *rate *= learning_rate);
        let average: Average = average.unwrap_or("none").parse().or_raise()?;
        let optimizer = Optimizer { momentum, nesterov, weight_decay, coupled, average };
        Ok(dpmf::Workload::sgd(rates, optimizer).or_raise()?.into())
    }

    /// Any lower-triangular matrix whose diagonal has no zeros.
    #[staticmethod]
    fn from_matrix(matrix: &Bound<'_, PyAny>) -> PyResult<Self> {
        let array: PyArrayLike2<'_, f64, AllowTypeChange> = matrix
            .extract()
            .map_err(|_| type_error("a workload matrix must be a two-dimensional array of numbers"))?;
        let view = array.as_array();
        let (rows, columns) = (array.shape()[0], array.shape()[1]);
        let matrix = Mat::from_fn(rows, columns, |i, j| view[[i, j]]);
        Ok(dpmf::Workload::dense(matrix).or_raise()?.into())
    }

    /// Number of steps n.
    #[getter]
    fn steps(&self) -> usize {
        self.0.steps()
    }

    /// Whether A is the prefix sum.
    #[getter]
    fn is_prefix_sum(&self) -> bool {
        self.0.is_prefix_sum()
    }

    /// Momentum; None for a matrix.
    #[getter]
    fn momentum(&self) -> Option<f64> {
        self.0.optimizer().map(|(optimizer, _)| optimizer.momentum)
    }

    /// Whether momentum looks ahead; None for a matrix.
    #[getter]
    fn nesterov(&self) -> Option<bool> {
        self.0.optimizer().map(|(optimizer, _)| optimizer.nesterov)
    }

    /// Weight decay; None for a matrix.
    #[getter]
    fn weight_decay(&self) -> Option<f64> {
        self.0.optimizer().map(|(optimizer, _)| optimizer.weight_decay)
    }

    /// Whether weight decay joins the gradient, as in torch.optim.SGD; None for a matrix.
    #[getter]
    fn coupled(&self) -> Option<bool> {
        self.0.optimizer().map(|(optimizer, _)| optimizer.coupled)
    }

    /// "none", "uniform" or "ema:decay"; None for a matrix.
    #[getter]
    fn average(&self) -> Option<String> {
        self.0.optimizer().map(|(optimizer, _)| optimizer.average.to_string())
    }

    /// The step size of every step; None for a matrix.
    #[getter]
    fn learning_rates<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyArray1<f64>>> {
        self.0.optimizer().map(|(_, rates)| PyArray1::from_slice(py, rates))
    }

    /// A as an array. Cost: n^2 numbers.
    fn matrix<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<f64>>> {
        let a = py.detach(|| self.0.to_dense());
        arrays::from_matrix(py, a.as_ref())
    }

    /// A x: the optimizer run on scalar gradients x.
    fn apply<'py>(&self, py: Python<'py>, x: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyArray1<f64>>> {
        let mut x = arrays::vector("x", x)?;
        if x.len() != self.0.steps() {
            return Err(value_error(format!("x has length {}, but {} is needed", x.len(), self.0.steps())));
        }
        py.detach(|| self.0.apply(&mut x));
        Ok(PyArray1::from_vec(py, x))
    }

    fn __repr__(&self) -> String {
        format!("<dpmf.Workload: {}, {} steps>", describe(&self.0), self.0.steps())
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        let Ok(other) = other.cast::<Self>() else { return false };
        same(&self.0, &other.get().0)
    }

    fn __hash__(&self) -> u64 {
        self.0.steps() as u64
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let load = py.import("dpmf._core")?.getattr("_load_workload")?;
        let arguments = match self.0.optimizer() {
            Some((optimizer, rates)) => {
                let text =
                    serde_json::to_string(optimizer).map_err(|error| value_error(error.to_string()))?;
                (text, PyArray1::from_slice(py, rates)).into_pyobject(py)?
            }
            None => (py.None(), self.matrix(py)?).into_pyobject(py)?,
        };
        (load, arguments).into_pyobject(py)
    }
}

impl From<dpmf::Workload> for Workload {
    fn from(workload: dpmf::Workload) -> Self {
        Self(Arc::new(workload))
    }
}

/// What pickle calls.
#[pyfunction]
#[pyo3(name = "_load_workload")]
pub(crate) fn load_workload(optimizer: Option<&str>, values: &Bound<'_, PyAny>) -> PyResult<Workload> {
    let Some(text) = optimizer else { return Workload::from_matrix(values) };
    let optimizer: Optimizer = serde_json::from_str(text).map_err(|error| value_error(error.to_string()))?;
    Ok(dpmf::Workload::sgd(arrays::vector("learning rates", values)?, optimizer).or_raise()?.into())
}

/// Step sizes from text or numbers.
fn step_sizes(steps: Option<usize>, schedule: Option<&Bound<'_, PyAny>>) -> PyResult<Vec<f64>> {
    let text = match schedule {
        None => "constant".to_owned(),
        Some(schedule) => match schedule.extract::<String>() {
            Ok(text) => text,
            Err(_) => {
                let rates = arrays::vector("schedule", schedule)?;
                return match steps {
                    Some(steps) if steps != rates.len() => Err(value_error(format!(
                        "schedule has {} step sizes, but steps is {steps}: pass one for every step",
                        rates.len()
                    ))),
                    _ => Ok(rates),
                };
            }
        },
    };
    let schedule: Schedule = text.parse().or_raise()?;
    let steps =
        steps.ok_or_else(|| value_error("steps is None, but a schedule by name needs their number"))?;
    Ok(schedule.values(steps))
}

fn same(a: &dpmf::Workload, b: &dpmf::Workload) -> bool {
    match (a.optimizer(), b.optimizer()) {
        (None, None) => a.to_dense() == b.to_dense(),
        (a, b) => a == b,
    }
}
