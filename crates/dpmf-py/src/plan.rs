//! `dpmf.Plan`, and the call behind `dpmf.plan`.

use crate::data::objects;
use crate::error::{IntoPython, raise};
use crate::mechanism::{Mechanism, conditions};
use crate::noise::NoiseKey;
use crate::parallel::{run_reporting, with_progress};
use crate::picture;
use crate::privacy::PrivacyStatement;
use crate::sampler::Sampler;
use crate::workload::Workload;
use dpmf::inspection::describe;
use dpmf::planner::{self, FitCache, Planner, Request};
use dpmf::{Sampling, format};
use numpy::PyArray1;
use pyo3::prelude::*;
use std::path::PathBuf;

/// The mechanism and the sampler with the least error for a budget, and all candidates; made by dpmf.plan.
///
/// Errors are root mean squared errors of an iterate at clip 1: noise multiplier times sensitivity times ‖A N‖_F/√n.
#[pyclass(frozen, module = "dpmf")]
pub(crate) struct Plan {
    inner: planner::Plan,
    mechanism: Py<Mechanism>,
    statement: PrivacyStatement,
}

#[pymethods]
impl Plan {
    /// The mechanism to train with, calibrated, with its sampling.
    #[getter]
    fn mechanism(&self, py: Python<'_>) -> Py<Mechanism> {
        self.mechanism.clone_ref(py)
    }

    /// The sampling that the guarantee relies on, in the format of dpmf.Sampler; "none" if it relies on none.
    #[getter]
    fn sampling(&self) -> String {
        self.inner.chosen().mechanism().sampling().to_string()
    }

    /// What was chosen, as a row: a dictionary with "mechanism", "sampling", "bands", "buffers", "recalls",
    /// "noise_multiplier", "rmse", "ratio_to_bound" (None where no bound exists), "selector", "estimated", "excluded",
    /// "reason" and "words".
    #[getter]
    fn chosen<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        objects(py, &self.inner.chosen().row())
    }

    /// All candidates by error, then those that could not be compared: their "rmse" is None, and "reason" says why.
    ///
    /// "excluded" says why a row may not be chosen. The noise of a row with "estimated" is not proved, because the row was not chosen.
    #[getter]
    fn rows<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        objects(py, &self.inner.rows())
    }

    /// DP-SGD, independent noise under Poisson sampling, as a row.
    #[getter]
    fn dp_sgd<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        objects(py, &self.inner.dp_sgd().row())
    }

    /// Root mean squared error of an iterate at clip 1.
    #[getter]
    fn rmse(&self) -> f64 {
        self.inner.chosen().rmse()
    }

    /// A lower bound on the error of every mechanism without sampling; None if no bound is known.
    #[getter]
    fn lower_bound_rmse(&self) -> Option<f64> {
        self.inner.lower_bound_rmse()
    }

    /// The privacy statement.
    #[getter]
    fn statement(&self) -> PrivacyStatement {
        self.statement.clone()
    }

    /// Number of steps of all epochs.
    #[getter]
    fn steps(&self) -> usize {
        self.inner.request().workload.steps()
    }

    /// Number of examples, or users, that it was made for.
    #[getter]
    fn examples(&self) -> u64 {
        self.inner.request().examples
    }

    /// Examples, or users, in a batch, on average.
    #[getter]
    fn batch(&self) -> u64 {
        self.inner.request().batch
    }

    /// Passes over the data.
    #[getter]
    fn epochs(&self) -> usize {
        self.inner.request().epochs
    }

    /// Noise of every step's iterate, as a standard deviation at clip 1.
    fn per_step<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<f64>> {
        PyArray1::from_vec(py, self.inner.chosen().per_step())
    }

    /// Writes the mechanism with its sampling to a safetensors file, completely or not at all; Mechanism.load reads it.
    fn save(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        py.detach(|| format::save(self.inner.chosen().mechanism(), &path)).or_raise()
    }

    /// The sampler that the guarantee relies on.
    ///
    /// key and run are those of the noise. units is the number of examples by default; start is the first step that it yields.
    ///
    /// Raises MismatchError if the plan does not rely on sampling.
    #[pyo3(signature = (key, *, units=None, run=None, start=0))]
    fn sampler(
        &self,
        py: Python<'_>,
        key: &Bound<'_, NoiseKey>,
        units: Option<usize>,
        run: Option<&str>,
        start: usize,
    ) -> PyResult<Sampler> {
        let sampling = self.inner.chosen().mechanism().sampling();
        if sampling == Sampling::None {
            let bins = self.steps() / self.epochs().max(1);
            let message = format!(
                "the plan does not rely on sampling, so it has no sampler: use each example once in every epoch, always in the same \
                 batch of the epoch, as dpmf.Sampler(\"balls-in-bins:{bins}\", key, …) does"
            );
            return Err(raise(py, "mismatch", message));
        }
        let examples = usize::try_from(self.examples()).unwrap_or(usize::MAX);
        Sampler::of(py, sampling, key, units.unwrap_or(examples), self.steps(), run, start)
    }

    fn __repr__(&self) -> String {
        let lines: Vec<String> =
            summary(&self.inner).into_iter().map(|(name, value)| format!("  {name:<13} {value}")).collect();
        format!("<dpmf.Plan\n{}>", lines.join("\n"))
    }

    /// Tables of the chosen mechanism and all candidates, and the curve of the error, for notebooks.
    fn _repr_html_(&self) -> String {
        picture::plan_html(&self.inner)
    }
}

/// What is known of a plan, for people.
pub(crate) fn summary(plan: &planner::Plan) -> Vec<(&'static str, String)> {
    let (request, chosen) = (plan.request(), plan.chosen());
    let Request { examples, batch, epochs, epsilon, delta, .. } = request;
    let bound = plan
        .lower_bound_rmse()
        .map_or(String::new(), |bound| format!("; without sampling none is below {bound:.6}"));
    vec![
        ("budget", format!("ε = {epsilon}, δ = {delta:e}")),
        (
            "data",
            format!(
                "{} in batches of {batch}, {}",
                count(*examples, "example"),
                count(*epochs as u64, "epoch")
            ),
        ),
        ("workload", format!("{}, {} steps", describe(&request.workload), request.workload.steps())),
        ("mechanism", chosen.row().selector),
        ("sampling", chosen.mechanism().sampling().to_string()),
        ("in words", chosen.words()),
        (
            "error",
            format!(
                "{:.6}, {:.4} times that of DP-SGD{bound}",
                chosen.rmse(),
                chosen.rmse() / plan.dp_sgd().rmse()
            ),
        ),
    ]
}

fn count(number: u64, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

/// The user's folder for the fits of plans; None where neither XDG_CACHE_HOME nor HOME names one.
#[pyfunction]
#[pyo3(name = "_cache_folder")]
pub(crate) fn cache_folder() -> Option<PathBuf> {
    planner::cache_folder()
}

/// Steps of all epochs.
#[pyfunction]
#[pyo3(name = "_planned_steps")]
pub(crate) fn planned_steps(examples: u64, batch: u64, epochs: usize) -> PyResult<usize> {
    Request::steps(examples, batch, epochs).or_raise()
}

/// The call behind dpmf.plan.
#[pyfunction]
#[pyo3(name = "_make_plan", signature = (workload, *, examples, batch, epochs, epsilon, delta, clip, buffers, trusted, unit,
                                         adjacency, pull=0.0, folder=None, progress=None))]
#[allow(clippy::too_many_arguments)] // keywords in Python
pub(crate) fn make_plan(
    py: Python<'_>,
    workload: &Bound<'_, Workload>,
    examples: u64,
    batch: u64,
    epochs: usize,
    epsilon: f64,
    delta: f64,
    clip: f64,
    buffers: usize,
    trusted: bool,
    unit: &str,
    adjacency: &str,
    pull: f64,
    folder: Option<PathBuf>,
    progress: Option<Py<PyAny>>,
) -> PyResult<Plan> {
    let workload = dpmf::Workload::clone(&workload.get().0);
    let conditions = conditions(unit, adjacency, "exact")?;
    let plain = Request::new(workload, examples, batch, epochs, epsilon, delta).or_raise()?;
    let request = Request { clip, buffers, trusted, conditions, pull, ..plain };
    let inner = with_progress(py, progress, |callback| {
        run_reporting(py, callback, move |tell| {
            let mut planner = Planner::new(folder.map_or_else(FitCache::default, FitCache::in_folder));
            planner.plan(&request, &mut |line: &str| tell(line.to_owned()))
        })
    })?;
    let chosen = inner.chosen().mechanism();
    let Some(statement) = chosen.privacy().cloned().map(PrivacyStatement) else {
        return Err(raise(
            py,
            "unsupported",
            "the plan has no guarantee: no mechanism was proved to meet the budget",
        ));
    };
    let mechanism = Py::new(py, Mechanism::from(chosen.clone()))?;
    Ok(Plan { inner, mechanism, statement })
}
