//! Errors of the library as Python exceptions.

use dpmf::Error;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

/// `ValueError` for bad arguments, the class of `dpmf._errors` with the same `kind` for the rest.
pub(crate) fn to_python(error: Error) -> PyErr {
    match &error {
        Error::InvalidArgument { .. }
        | Error::Selector { .. }
        | Error::InvalidEntry { .. }
        | Error::InvalidMatrixEntry { .. }
        | Error::WrongLength { .. } => PyValueError::new_err(error.to_string()),
        _ => Python::attach(|py| build(py, &error).unwrap_or_else(|failed| failed)),
    }
}

fn build(py: Python<'_>, error: &Error) -> PyResult<PyErr> {
    let exception = raise(py, error.kind(), error.to_string());
    let value = exception.value(py);
    match error {
        Error::NotConverged { gap, target, iterations, dual, .. } => {
            value.setattr("gap", gap)?;
            value.setattr("target", target)?;
            value.setattr("iterations", iterations)?;
            value.setattr("v", numpy::PyArray1::from_slice(py, &dual.v))?;
        }
        Error::Interrupted { iterations, gap } => {
            value.setattr("iterations", iterations)?;
            value.setattr("gap", gap)?;
        }
        Error::Refused { refusal } => value.setattr("fault", refusal.name())?,
        Error::StepReused { step } => value.setattr("step", step)?,
        Error::Exhausted { steps } => value.setattr("steps", steps)?,
        _ => {}
    }
    Ok(exception)
}

/// An exception of the class with a given `kind`.
pub(crate) fn raise(py: Python<'_>, kind: &str, message: impl Into<String>) -> PyErr {
    static OF_KIND: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let class = OF_KIND
        .get_or_try_init(py, || Ok::<_, PyErr>(py.import("dpmf._errors")?.getattr("of_kind")?.unbind()))
        .and_then(|of_kind| of_kind.bind(py).call1((kind,)));
    let exception = class.and_then(|class| class.call1((message.into(),)));
    match exception {
        Ok(exception) => PyErr::from_value(exception),
        Err(failed) => failed,
    }
}

pub(crate) fn value_error(message: impl Into<String>) -> PyErr {
    PyValueError::new_err(message.into())
}

pub(crate) fn type_error(message: impl Into<String>) -> PyErr {
    PyTypeError::new_err(message.into())
}

/// `?` on results of the library.
pub(crate) trait IntoPython<T> {
    fn or_raise(self) -> PyResult<T>;
}

impl<T> IntoPython<T> for dpmf::Result<T> {
    fn or_raise(self) -> PyResult<T> {
        self.map_err(to_python)
    }
}
