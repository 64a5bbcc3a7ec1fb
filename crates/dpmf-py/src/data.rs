//! Results of the library as dictionaries and lists.

use crate::error::value_error;
use pyo3::prelude::*;
use serde::Serialize;

/// A serialisable value as Python's own types, with the names that it has in JSON.
pub(crate) fn objects<'py>(py: Python<'py>, value: &impl Serialize) -> PyResult<Bound<'py, PyAny>> {
    let text = serde_json::to_string(value).map_err(|error| value_error(error.to_string()))?;
    py.import("json")?.call_method1("loads", (text,))
}
