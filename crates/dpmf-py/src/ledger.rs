//! The ledger of releases.

use crate::data::objects;
use crate::error::IntoPython;
use crate::parallel::run_long;
use crate::privacy::{PrivacyStatement, unit_name};
use dpmf::accounting::{self, Adjacency, LedgerFile, PrivacyUnit, Release};
use dpmf::noise::RunId;
use pyo3::prelude::*;
use pyo3::types::PyList;
use std::path::PathBuf;

/// A file that records all releases about the same people, and the (ε, δ) that they must not exceed together.
///
/// You may decide on each release after looking at the earlier ones: a privacy filter keeps to the budget even then.
/// record_together is for releases that are decided before any of them is seen, which cost less. Record a release before it is
/// made. The file is that of `dpmf ledger`; it is read again in every call, and locked only while it is written.
#[pyclass(frozen, module = "dpmf")]
pub(crate) struct Ledger {
    path: PathBuf,
}

#[pymethods]
impl Ledger {
    /// Opens a ledger that exists.
    #[new]
    fn new(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        let ledger = Self { path };
        ledger.read(py)?;
        Ok(ledger)
    }

    /// Creates a ledger in a new file. unit is "user" or "record"; adjacency is as for Mechanism.calibrate.
    #[staticmethod]
    #[pyo3(signature = (path, *, epsilon, delta, unit="user", adjacency="replace-with-zero"))]
    fn create(
        py: Python<'_>,
        path: PathBuf,
        epsilon: f64,
        delta: f64,
        unit: &str,
        adjacency: &str,
    ) -> PyResult<Self> {
        let unit: PrivacyUnit = unit.parse().or_raise()?;
        let adjacency: Adjacency = adjacency.parse().or_raise()?;
        let new = accounting::Ledger::new(epsilon, delta, unit, adjacency).or_raise()?;
        py.detach(|| LedgerFile::create(path.as_path(), new).map(drop)).or_raise()?;
        Ok(Self { path })
    }

    /// Records one release: a statement such as mechanism.privacy or plan.statement. id is its name, and recording the same id
    /// again does not count twice; without an id, it gets a name of its own. Raises BudgetError, and records nothing, if it
    /// exceeds the budget. Returns the ε spent so far.
    #[pyo3(signature = (statement, *, id=None, what=""))]
    fn record(
        &self,
        py: Python<'_>,
        statement: PyRef<'_, PrivacyStatement>,
        id: Option<String>,
        what: &str,
    ) -> PyResult<f64> {
        self.enter(py, vec![statement.0.clone()], id, what.into(), false)
    }

    /// Records releases that were decided together, before any of them was seen: they compose exactly. None of them may depend on
    /// another in any way. Their names are id/1, id/2, … Returns the ε spent so far.
    #[pyo3(signature = (statements, *, id=None, what=""))]
    fn record_together(
        &self,
        py: Python<'_>,
        statements: Vec<PyRef<'_, PrivacyStatement>>,
        id: Option<String>,
        what: &str,
    ) -> PyResult<f64> {
        let statements = statements.iter().map(|statement| statement.0.clone()).collect();
        self.enter(py, statements, id, what.into(), true)
    }

    /// Records a release that was made by other means, of which only ε and δ are known. Returns the ε spent so far.
    #[pyo3(signature = (epsilon, delta, *, id=None, what=""))]
    fn record_stated(
        &self,
        py: Python<'_>,
        epsilon: f64,
        delta: f64,
        id: Option<String>,
        what: &str,
    ) -> PyResult<f64> {
        let release = Release::stated(name(id)?, now(py)?, what, epsilon, delta).or_raise()?;
        let path = self.path.clone();
        run_long(py, move || {
            let mut file = LedgerFile::open(path)?;
            file.record(vec![release])?;
            file.ledger().spent()
        })
    }

    /// ε of the budget.
    #[getter]
    fn epsilon(&self, py: Python<'_>) -> PyResult<f64> {
        Ok(self.read(py)?.epsilon())
    }

    /// δ of the budget.
    #[getter]
    fn delta(&self, py: Python<'_>) -> PyResult<f64> {
        Ok(self.read(py)?.delta())
    }

    /// The unit of privacy: "user" or "record".
    #[getter]
    fn unit(&self, py: Python<'_>) -> PyResult<&'static str> {
        Ok(unit_name(self.read(py)?.unit()))
    }

    /// Which data sets are neighbours.
    #[getter]
    fn adjacency(&self, py: Python<'_>) -> PyResult<&'static str> {
        Ok(self.read(py)?.adjacency().name())
    }

    /// How much of the budget's ε is used.
    #[getter]
    fn spent(&self, py: Python<'_>) -> PyResult<f64> {
        self.read(py)?.spent().or_raise()
    }

    /// The ε that all releases would have cost if they had been decided beforehand, by exact composition. It does not hold for
    /// releases that were decided one after another.
    #[getter]
    fn spent_if_fixed(&self, py: Python<'_>) -> PyResult<f64> {
        self.read(py)?.spent_if_fixed().or_raise()
    }

    /// What was recorded, as in the file.
    #[getter]
    fn releases<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        Ok(objects(py, &self.read(py)?.releases())?.cast_into::<PyList>()?)
    }

    fn __repr__(&self) -> String {
        format!("<dpmf.Ledger: {}>", self.path.display())
    }
}

impl Ledger {
    fn read(&self, py: Python<'_>) -> PyResult<accounting::Ledger> {
        let path = self.path.clone();
        run_long(py, move || LedgerFile::read(path))
    }

    fn enter(
        &self,
        py: Python<'_>,
        statements: Vec<accounting::PrivacyStatement>,
        id: Option<String>,
        what: String,
        together: bool,
    ) -> PyResult<f64> {
        let (path, id, time) = (self.path.clone(), name(id)?, now(py)?);
        run_long(py, move || {
            let mut file = LedgerFile::open(path)?;
            let mut releases = Vec::new();
            for (index, statement) in statements.iter().enumerate() {
                file.ledger().check(statement)?;
                let id = if together { format!("{id}/{}", index + 1) } else { id.clone() };
                releases.push(Release::new(id, time.clone(), what.clone(), statement)?);
            }
            if together {
                file.record_together(releases)?;
            } else {
                file.record(releases)?;
            }
            file.ledger().spent()
        })
    }
}

fn name(id: Option<String>) -> PyResult<String> {
    match id {
        Some(id) => Ok(id),
        None => Ok(RunId::generate().or_raise()?.to_string()),
    }
}

/// The time in UTC, as `dpmf ledger` writes it.
fn now(py: Python<'_>) -> PyResult<String> {
    let time = py.import("time")?;
    time.call_method1("strftime", ("%Y-%m-%dT%H:%M:%SZ", time.call_method0("gmtime")?))?.extract()
}
