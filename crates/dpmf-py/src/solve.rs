//! `dpmf.factorize`, `dpmf.compare`, and what they return.

use crate::arrays;
use crate::data::objects;
use crate::error::{IntoPython, value_error};
use crate::mechanism::Mechanism;
use crate::parallel::{run_long, run_observed, with_progress};
use crate::workload::Workload;
use dpmf::factorize::{self as solvers, Options, Solver, Stage, quiet};
use dpmf::family::{self, Budget, Selector};
use dpmf::inspection::describe;
use dpmf::{Problem, Representation};
use numpy::{PyArray1, PyArray2};
use pyo3::exceptions::PyUserWarning;
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use serde::de::DeserializeOwned;
use std::ffi::CString;
use std::fmt;
use std::sync::{Mutex, PoisonError};

/// Proof of near-optimality: no factorization of the workload has a loss below lower_bound.
#[pyclass(frozen, eq, module = "dpmf")]
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct Certificate(pub(crate) dpmf::Certificate);

#[pymethods]
impl Certificate {
    /// Total squared loss of this factorization, at clip 1 and noise multiplier 1.
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

    /// Evaluations that the solver needed.
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

/// The state of a solver, which progress callbacks receive.
#[pyclass(frozen, module = "dpmf")]
#[derive(Clone, Copy)]
pub(crate) struct Progress(solvers::Progress);

impl From<solvers::Progress> for Progress {
    fn from(progress: solvers::Progress) -> Self {
        Self(progress)
    }
}

impl fmt::Display for Progress {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let solvers::Progress { stage, share, iteration, gap, .. } = self.0;
        match (stage, share) {
            (Stage::Solving, _) => write!(out, "solving, iteration {iteration}, gap {gap:.1e}"),
            (Stage::Fitting, Some(share)) => write!(out, "fitting, {:.0} % of a pass", 100.0 * share),
            (Stage::Fitting, None) => write!(out, "fitting, iteration {iteration}"),
        }
    }
}

#[pymethods]
impl Progress {
    /// What is being done: "solving" for the optimum, or "fitting" a mechanism of few coefficients.
    #[getter]
    fn stage<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        objects(py, &self.0.stage)
    }

    /// The completed share of the current pass over the steps, between 0 and 1; None if there is none.
    #[getter]
    fn share(&self) -> Option<f64> {
        self.0.share
    }

    /// Evaluations so far, of this stage.
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
        format!("<dpmf.Progress: {self}>")
    }

    fn __str__(&self) -> String {
        self.to_string()
    }
}

/// The factorization of least loss, in its dual form.
#[pyclass(frozen, module = "dpmf")]
pub(crate) struct Optimum {
    /// Solved. Never locked for long, nor by a thread of the pool, which would wait for itself.
    problem: Mutex<Problem>,
    workload: Workload,
    v: Vec<f64>,
    certificate: dpmf::Certificate,
    solver: Solver,
}

#[pymethods]
impl Optimum {
    /// The dual variable, which proves the lower bound. With several participations, this is one number for each phase, a part of
    /// the dual variable.
    #[getter]
    fn v<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<f64>> {
        PyArray1::from_slice(py, &self.v)
    }

    /// Loss, lower bound and gap.
    #[getter]
    fn certificate(&self) -> Certificate {
        Certificate(self.certificate)
    }

    /// The workload.
    #[getter]
    fn workload(&self) -> Workload {
        self.workload.clone()
    }

    /// The solver that found it: "linear", "dense", "newton" or "gradient".
    #[getter]
    fn solver<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        objects(py, &self.solver)
    }

    /// The canonical factorization A = B C in double precision, lower triangular, C of sensitivity 1, as (B, C).
    ///
    /// Cost: O(n^3) time; at most 16384 steps.
    #[allow(clippy::type_complexity)] // a pair of arrays
    fn dense<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<(Bound<'py, PyArray2<f64>>, Bound<'py, PyArray2<f64>>)> {
        let problem = self.problem(py);
        let (b, c) = run_long(py, move || {
            let (dense, _) = problem.optimum(&mut quiet)?.to_dense(problem.workload())?;
            Ok((problem.workload().times(dense.coloring().to_owned()), dense.encoder()))
        })?;
        Ok((arrays::from_matrix(py, b.as_ref())?, arrays::from_matrix(py, c.as_ref())?))
    }

    /// The optimum as a stream of a few model-sized buffers: as many as given, or as few as keep the root loss within
    /// tolerance of the lower bound, 1e-4 by default. progress is as for factorize.
    #[pyo3(signature = (*, buffers=None, tolerance=None, progress=None))]
    fn state_space(
        &self,
        py: Python<'_>,
        buffers: Option<usize>,
        tolerance: Option<f64>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Mechanism> {
        let selector = selector("optimal", buffers, tolerance, false)?;
        let problem = self.problem(py);
        let made = with_progress(py, progress, |callback| {
            run_observed(py, callback, move |observe| {
                problem.recurrence()?;
                problem.mechanism(selector, observe)
            })
        })?;
        Ok(made.into())
    }

    /// The optimum as a dense matrix: no buffers, but every step costs as much as all steps before it.
    ///
    /// Cost: O(n^3) time; at most 16384 steps.
    fn dense_mechanism(&self, py: Python<'_>) -> PyResult<Mechanism> {
        let selector = selector("optimal", None, None, true)?;
        let problem = self.problem(py);
        Ok(run_long(py, move || problem.mechanism(selector, &mut quiet))?.into())
    }

    fn __repr__(&self) -> String {
        format!(
            "<dpmf.Optimum: {}, {} steps, √loss {:.6}, gap {:.1e}>",
            describe(&self.workload.0),
            self.workload.0.steps(),
            self.certificate.loss.sqrt(),
            self.certificate.gap
        )
    }
}

impl Optimum {
    /// The solved problem, for a thread of its own.
    fn problem(&self, py: Python<'_>) -> Problem {
        self.problem.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// A mechanism by name, with what the keywords choose of it.
fn selector(name: &str, buffers: Option<usize>, tolerance: Option<f64>, dense: bool) -> PyResult<Selector> {
    let selector: Selector = name.parse().or_raise()?;
    let chosen = selector.budget();
    let budget = Budget {
        dense: dense || chosen.dense,
        buffers: buffers.or(chosen.buffers),
        tolerance: tolerance.or(chosen.tolerance),
        ..chosen
    };
    selector.with(budget).or_raise()
}

fn problem(workload: &Workload, participation: &str, solver: Solver, options: Options) -> PyResult<Problem> {
    let participation = participation.parse().or_raise()?;
    Problem::with_solver(dpmf::Workload::clone(&workload.0), participation, solver, options).or_raise()
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

/// Finds the factorization with the least loss, to a certified relative gap.
///
/// solver is "linear" (in the number of steps), "dense" (cubic, for any matrix), "newton" or "gradient" (rivals), or "auto" for the one
/// that suits the workload; iteration is "anderson" (accelerated), "relaxed" or "plain". participation says in which steps one user
/// or record may take part: "single" for at most one, "epochs:K" for one in each of K epochs, "min-separation:B:K" for at most
/// K, any two of them B or more apart.
///
/// progress is called with a Progress after every iteration, on the calling thread; returning False stops the solver
/// with StoppedError. Ctrl-C stops it too. Other Python threads continue meanwhile. By default, work of more than two seconds
/// shows a line on standard error in a terminal or notebook; True shows it everywhere, False nowhere.
///
/// >>> import dpmf
/// >>> optimum = dpmf.factorize(dpmf.Workload.prefix_sum(512))
/// >>> optimum.certificate.gap <= 1e-6
/// True
#[pyfunction]
#[pyo3(signature = (workload, *, gap=1e-6, solver="auto", iteration="anderson", max_iterations=20_000,
                    participation="single", progress=None))]
#[allow(clippy::too_many_arguments)] // keywords in Python
pub(crate) fn factorize(
    py: Python<'_>,
    workload: &Bound<'_, Workload>,
    gap: f64,
    solver: &str,
    iteration: &str,
    max_iterations: usize,
    participation: &str,
    progress: Option<Py<PyAny>>,
) -> PyResult<Optimum> {
    let workload = workload.get().clone();
    let (solver, options) = (self::solver(solver)?, options(gap, iteration, max_iterations)?);
    let problem = problem(&workload, participation, solver, options)?;
    let (problem, v, certificate, solver) = with_progress(py, progress, |callback| {
        run_observed(py, callback, move |observe| {
            let optimum = problem.optimum(observe)?;
            let (v, certificate, solver) = (optimum.dual.v().to_vec(), optimum.certificate, optimum.solver);
            Ok((problem, v, certificate, solver))
        })
    })?;
    Ok(Optimum { problem: Mutex::new(problem), workload, v, certificate, solver })
}

/// The mechanism with this name, as deployed, with the lower bound for its workload; not calibrated yet.
///
/// mechanism is a name, or a name with options: "optimal", "optimal:dense", "state-space:buffers=4", "tree". "optimal" is
/// the optimum as a stream of few buffers, or dense rows where the workload is a matrix.
///
/// For mechanisms that leave the choice, pass one of: buffers, the number of model-sized buffers; tolerance, to use as few as
/// keep the root loss within this relative distance of the lower bound (1e-4 by default); or dense, for dense rows that keep no
/// buffers but regenerate all earlier noise in every step.
///
/// participation and progress are as for factorize; the stage of a Progress is "solving" and then "fitting".
#[pyfunction]
#[pyo3(signature = (workload, mechanism="optimal", *, buffers=None, tolerance=None, dense=false, gap=1e-6,
                    participation="single", progress=None))]
#[allow(clippy::too_many_arguments)] // keywords in Python
pub(crate) fn make_mechanism(
    py: Python<'_>,
    workload: &Bound<'_, Workload>,
    mechanism: &str,
    buffers: Option<usize>,
    tolerance: Option<f64>,
    dense: bool,
    gap: f64,
    participation: &str,
    progress: Option<Py<PyAny>>,
) -> PyResult<Mechanism> {
    let selector = selector(mechanism, buffers, tolerance, dense)?;
    let options = Options { gap, ..Options::default() };
    let problem = problem(workload.get(), participation, Solver::default(), options)?;
    let made = with_progress(py, progress, |callback| {
        run_observed(py, callback, move |observe| problem.mechanism(selector, observe))
    })?;
    Ok(made.into())
}

/// Compares mechanisms for a workload, each as it would be deployed: a list of dictionaries with
/// "mechanism", "sqrt_loss", "max_sqrt_loss", "final_sqrt_loss", "ratio_to_bound", "buffers" (None for dense rows) and
/// "work".
///
/// mechanisms are names as for make_mechanism; by default, all of them. Without options, "optimal" and "optimal-prefix" are dense
/// rows, and "state-space" is shown with the given numbers of buffers, and with as many as a tolerance of 1e-4 needs. If a
/// mechanism cannot be made, such as dense rows for very many steps, it is left out with a warning. participation and progress
/// are as for factorize.
#[pyfunction]
#[pyo3(signature = (workload, mechanisms=None, *, buffers=vec![2, 3, 4, 6, 8], gap=1e-6, participation="single",
                    progress=None),
       text_signature = "(workload, mechanisms=None, *, buffers=[2, 3, 4, 6, 8], gap=1e-6, participation=\"single\", \
                         progress=None)")]
pub(crate) fn compare<'py>(
    py: Python<'py>,
    workload: &Bound<'_, Workload>,
    mechanisms: Option<Vec<String>>,
    buffers: Vec<usize>,
    gap: f64,
    participation: &str,
    progress: Option<Py<PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let named: dpmf::Result<Vec<Selector>> =
        mechanisms.unwrap_or_default().iter().map(|name| name.parse()).collect();
    let selectors = family::table(&named.or_raise()?, &buffers);
    let options = Options { gap, ..Options::default() };
    let problem = problem(workload.get(), participation, Solver::default(), options)?;
    let comparison = with_progress(py, progress, |callback| {
        run_observed(py, callback, move |observe| problem.compare(&selectors, observe))
    })?;
    for (name, reason) in &comparison.left_out {
        let message = CString::new(format!("{name} is left out: {reason}"))?;
        PyErr::warn(py, &py.get_type::<PyUserWarning>(), &message, 1)?;
    }
    objects(py, &comparison.rows)
}
