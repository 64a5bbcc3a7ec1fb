//! `dpmf.factorize`, `dpmf.compare`, and what they return.

use crate::arrays;
use crate::error::{IntoPython, value_error};
use crate::mechanism::Mechanism;
use crate::parallel::{run, run_observed};
use crate::workload::{Workload, describe};
use dpmf::factorize::{self as solvers, Options, Solver, Target};
use dpmf::mechanism::Bound as LowerBound;
use dpmf::{Catalog, Error, Factorization, Method, Participation, Representation};
use faer::Mat;
use numpy::{PyArray1, PyArray2};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use serde::de::DeserializeOwned;
use std::sync::Arc;

/// Proof of near-optimality: no factorization of the workload has a loss below lower_bound.
#[pyclass(frozen, eq, module = "dpmf")]
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct Certificate(pub(crate) dpmf::Certificate);

#[pymethods]
impl Certificate {
    /// Total squared loss of the factorization at hand, at unit clip and unit noise multiplier.
    #[getter]
    fn loss(&self) -> f64 {
        self.0.loss
    }

    /// Lower bound on the loss of every factorization.
    #[getter]
    fn lower_bound(&self) -> f64 {
        self.0.lower_bound
    }

    /// loss / lower_bound - 1.
    #[getter]
    fn gap(&self) -> f64 {
        self.0.gap
    }

    /// sqrt(loss / lower_bound).
    #[getter]
    fn ratio_to_bound(&self) -> f64 {
        self.0.ratio_to_bound()
    }

    /// Evaluations that the solver spent.
    #[getter]
    fn iterations(&self) -> usize {
        self.0.iterations
    }

    fn __repr__(&self) -> String {
        format!(
            "<dpmf.Certificate: √loss {:.6}, at most {:.8} times that of any factorization>",
            self.0.loss.sqrt(),
            self.0.ratio_to_bound()
        )
    }
}

/// Where a solver stands; what a progress callback is given.
#[pyclass(frozen, module = "dpmf")]
#[derive(Clone, Copy)]
pub(crate) struct Progress(solvers::Progress);

impl From<solvers::Progress> for Progress {
    fn from(progress: solvers::Progress) -> Self {
        Self(progress)
    }
}

#[pymethods]
impl Progress {
    /// Evaluations so far.
    #[getter]
    fn iteration(&self) -> usize {
        self.0.iteration
    }

    /// Loss of the best iterate so far.
    #[getter]
    fn loss(&self) -> f64 {
        self.0.loss
    }

    /// Best lower bound so far.
    #[getter]
    fn lower_bound(&self) -> f64 {
        self.0.lower_bound
    }

    /// loss / lower_bound - 1.
    #[getter]
    fn gap(&self) -> f64 {
        self.0.gap
    }

    /// Time since the start.
    #[getter]
    fn seconds(&self) -> f64 {
        self.0.seconds
    }

    fn __repr__(&self) -> String {
        format!("<dpmf.Progress: iteration {}, gap {:.2e}>", self.0.iteration, self.0.gap)
    }
}

/// The factorization of least loss, in its dual form.
#[pyclass(frozen, module = "dpmf")]
pub(crate) struct Optimum {
    optimum: Arc<solvers::Optimum>,
    workload: Workload,
}

#[pymethods]
impl Optimum {
    /// The dual variable, which proves the lower bound.
    #[getter]
    fn v<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<f64>> {
        PyArray1::from_slice(py, &self.optimum.v)
    }

    /// Loss, lower bound and gap.
    #[getter]
    fn certificate(&self) -> Certificate {
        Certificate(self.optimum.certificate)
    }

    /// The workload.
    #[getter]
    fn workload(&self) -> Workload {
        self.workload.clone()
    }

    /// The solver that found it: "linear", "dense", "newton" or "gradient".
    #[getter]
    fn solver(&self) -> String {
        serde_json::to_value(self.optimum.solver)
            .ok()
            .and_then(|v| Some(v.as_str()?.to_owned()))
            .unwrap_or_default()
    }

    /// The canonical factorization A = B C in double precision, lower triangular, C of sensitivity 1, as (B, C).
    ///
    /// Cost: O(n^3) time; at most 16384 steps.
    #[allow(clippy::type_complexity)] // a pair of arrays
    fn dense<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<(Bound<'py, PyArray2<f64>>, Bound<'py, PyArray2<f64>>)> {
        let (b, c) = run(py, || {
            let (dense, _) = self.optimum.to_dense(&self.workload.0)?;
            Ok((decoder(&self.workload.0, dense.coloring().to_owned()), dense.encoder()))
        })?;
        Ok((arrays::from_matrix(py, b.as_ref())?, arrays::from_matrix(py, c.as_ref())?))
    }

    /// The optimum as a stream of a few model-sized buffers: as many as given, or as few as keep the root loss within
    /// tolerance of the lower bound.
    #[pyo3(signature = (*, buffers=None, tolerance=1e-4))]
    fn state_space(&self, py: Python<'_>, buffers: Option<usize>, tolerance: f64) -> PyResult<Mechanism> {
        let target = target(buffers, tolerance);
        let mechanism = run(py, || {
            let filter = self.optimum.to_state_space(&self.workload.0, target)?;
            self.deploy(&Factorization::StateSpace(filter))
        })?;
        Ok(mechanism.into())
    }

    /// The optimum with its matrix kept whole: no buffers, but every step costs as much as all steps before it.
    ///
    /// Cost: O(n^3) time; at most 16384 steps.
    fn dense_mechanism(&self, py: Python<'_>) -> PyResult<Mechanism> {
        let mechanism = run(py, || {
            let (dense, _) = self.optimum.to_dense(&self.workload.0)?;
            self.deploy(&Factorization::Dense(dense))
        })?;
        Ok(mechanism.into())
    }

    fn __repr__(&self) -> String {
        let certificate = &self.optimum.certificate;
        format!(
            "<dpmf.Optimum: {}, {} steps, √loss {:.6}, gap {:.1e}>",
            describe(&self.workload.0),
            self.workload.0.steps(),
            certificate.loss.sqrt(),
            certificate.gap
        )
    }
}

impl Optimum {
    fn deploy(&self, factorization: &Factorization) -> dpmf::Result<dpmf::Mechanism> {
        let workload = dpmf::Workload::clone(&self.workload.0);
        dpmf::Mechanism::new(workload, factorization, Participation::Single)?
            .with_bound(LowerBound::from(&*self.optimum))
    }
}

/// B = A N.
pub(crate) fn decoder(workload: &dpmf::Workload, mut coloring: Mat<f64>) -> Mat<f64> {
    match workload.recurrence() {
        Some(_) => {
            (0..coloring.ncols()).for_each(|j| workload.apply(coloring.col_as_slice_mut(j)));
            coloring
        }
        None => workload.to_dense() * coloring,
    }
}

fn target(buffers: Option<usize>, tolerance: f64) -> Target {
    buffers.map_or(Target::Tolerance(tolerance), Target::Buffers)
}

/// A variant by its name in files and on the command line.
fn named<T: DeserializeOwned>(what: &str, name: &str, choices: &str) -> PyResult<T> {
    serde_json::from_value(name.into())
        .map_err(|_| value_error(format!("{what} is {name:?}, but it must be {choices}")))
}

fn solver(name: &str) -> PyResult<Solver> {
    named("solver", name, "auto, linear, dense, newton or gradient")
}

fn options(gap: f64, iteration: &str, max_iterations: usize) -> PyResult<Options> {
    let iteration = named("iteration", iteration, "anderson, relaxed or plain")?;
    Ok(Options { gap, iteration, max_iterations })
}

pub(crate) fn participation(name: &str) -> PyResult<Participation> {
    named("participation", name, "single (each user takes part in at most one step)")
}

/// Finds the factorization of least loss, to a certified relative gap.
///
/// progress is called with a Progress after every iteration, on the calling thread; returning False stops the solver
/// with StoppedError. Ctrl-C stops it too. Other Python threads go on meanwhile.
///
/// >>> import dpmf
/// >>> optimum = dpmf.factorize(dpmf.Workload.prefix_sum(512))
/// >>> optimum.certificate.gap <= 1e-6
/// True
#[pyfunction]
#[pyo3(signature = (workload, *, gap=1e-6, solver="auto", iteration="anderson", max_iterations=20_000, progress=None))]
pub(crate) fn factorize(
    py: Python<'_>,
    workload: &Bound<'_, Workload>,
    gap: f64,
    solver: &str,
    iteration: &str,
    max_iterations: usize,
    progress: Option<Py<PyAny>>,
) -> PyResult<Optimum> {
    let workload = workload.get().clone();
    let (solver, options) = (self::solver(solver)?, options(gap, iteration, max_iterations)?);
    let optimum = run_observed(py, progress.as_ref(), |observe| {
        solvers::optimal(&workload.0, solver, &options, observe)
    })?;
    Ok(Optimum { optimum: Arc::new(optimum), workload })
}

/// A mechanism by name, as deployed, with the lower bound for its workload; not calibrated yet.
///
/// "optimal" is the optimum as a stream of few buffers ("state-space"); a workload that is a matrix has no stream of
/// its own and gets its dense optimum. The names are those of `compare`, and "optimal-dense".
#[pyfunction]
#[pyo3(signature = (workload, mechanism="optimal", *, buffers=None, tolerance=1e-4, gap=1e-6, participation="single",
                    progress=None))]
#[allow(clippy::too_many_arguments)] // keywords in Python
pub(crate) fn make_mechanism(
    py: Python<'_>,
    workload: &Bound<'_, Workload>,
    mechanism: &str,
    buffers: Option<usize>,
    tolerance: f64,
    gap: f64,
    participation: &str,
    progress: Option<Py<PyAny>>,
) -> PyResult<Mechanism> {
    self::participation(participation)?;
    let workload = workload.get().0.clone();
    let method = match mechanism {
        "optimal" if workload.recurrence().is_some() => Method::StateSpace,
        "optimal-dense" => Method::Optimal,
        name => name.parse().or_raise()?,
    };
    if buffers.is_some() && method != Method::StateSpace {
        return Err(value_error(format!(
            "buffers is given, but mechanism {mechanism:?} has no number of buffers to choose: only optimal has"
        )));
    }
    let options = Options { gap, ..Options::default() };
    let made = run_observed(py, progress.as_ref(), move |observe| {
        let catalog = Catalog::new(dpmf::Workload::clone(&workload), Solver::Auto, options);
        if method == Method::StateSpace {
            let stream = catalog.state_space(target(buffers, tolerance), observe)?;
            return catalog.deploy(&stream, observe);
        }
        catalog.mechanism(method, observe)
    })?;
    Ok(made.into())
}

/// Puts mechanisms for a workload side by side, each as it would be deployed: a list of dictionaries with
/// "mechanism", "sqrt_loss", "max_sqrt_loss", "final_sqrt_loss", "ratio_to_bound", "buffers" and "work".
///
/// mechanisms are names; all of them by default, save those too large for dense matrices. buffers are the streams
/// shown beside the one that a tolerance of 1e-4 asks for.
#[pyfunction]
#[pyo3(signature = (workload, mechanisms=None, *, buffers=vec![2, 3, 4, 6, 8], gap=1e-6, progress=None),
       text_signature = "(workload, mechanisms=None, *, buffers=[2, 3, 4, 6, 8], gap=1e-6, progress=None)")]
pub(crate) fn compare<'py>(
    py: Python<'py>,
    workload: &Bound<'_, Workload>,
    mechanisms: Option<Vec<String>>,
    buffers: Vec<usize>,
    gap: f64,
    progress: Option<Py<PyAny>>,
) -> PyResult<Bound<'py, PyList>> {
    let all = mechanisms.is_none();
    let methods = match mechanisms {
        None => Method::ALL.to_vec(),
        Some(names) => names.iter().map(|name| name.parse()).collect::<dpmf::Result<_>>().or_raise()?,
    };
    let workload = workload.get().0.clone();
    let options = Options { gap, ..Options::default() };
    let (lower_bound, rows) = run_observed(py, progress.as_ref(), move |observe| {
        let catalog = Catalog::new(dpmf::Workload::clone(&workload), Solver::Auto, options);
        let lower_bound = catalog.optimum(observe)?.certificate.lower_bound;
        let mut rows: Vec<(&'static str, dpmf::Mechanism)> = Vec::new();
        for method in methods {
            if method == Method::StateSpace {
                // Beyond the order of the filter, more buffers are not used: each number once.
                let mut streams = vec![catalog.mechanism(method, observe)?];
                for &buffers in &buffers {
                    let stream = catalog.state_space(Target::Buffers(buffers), observe)?;
                    streams.push(catalog.deploy(&stream, observe)?);
                }
                streams.sort_by_key(|stream| stream.factorization().cost().buffers);
                streams.dedup_by_key(|stream| stream.factorization().cost().buffers);
                rows.extend(streams.into_iter().map(|stream| (method.name(), stream)));
                continue;
            }
            match catalog.mechanism(method, observe) {
                Ok(mechanism) => rows.push((method.name(), mechanism)),
                Err(Error::Unsupported { .. }) if all => {}
                Err(error) => return Err(error),
            }
        }
        Ok((lower_bound, rows))
    })?;
    let list = PyList::empty(py);
    for (name, mechanism) in rows {
        let (loss, cost) = (mechanism.loss(), mechanism.factorization().cost());
        let row = PyDict::new(py);
        row.set_item("mechanism", name)?;
        row.set_item("sqrt_loss", loss.sqrt_total())?;
        row.set_item("max_sqrt_loss", loss.max_sqrt())?;
        row.set_item("final_sqrt_loss", loss.final_sqrt())?;
        row.set_item("ratio_to_bound", (loss.total() / lower_bound).sqrt())?;
        row.set_item("buffers", cost.buffers)?;
        row.set_item("work", cost.work)?;
        list.append(row)?;
    }
    Ok(list)
}
