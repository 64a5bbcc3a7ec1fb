//! `dpmf._core._Clip`: the core's clipping over the memory of a framework.

use crate::error::{IntoPython, type_error, value_error};
use crate::parallel;
use dpmf::clip::{self, MOST_CHARGED, MOST_CONTRIBUTIONS};
use dpmf::noise::Value;
use numpy::{
    Element, PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray2, PyReadwriteArray1, PyUntypedArray,
    PyUntypedArrayMethods,
};
use pyo3::prelude::*;

/// Contributions as whole numbers, in units of a power of two, whose norm is at most the clip.
///
/// Sums of up to most_contributions of them are the same in any order, and one contribution moves them by at most the clip, as
/// real numbers. One that is not finite counts as zero.
#[pyclass(frozen, eq, module = "dpmf", name = "_Clip")]
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct Clip(pub(crate) clip::Clip);

#[pymethods]
impl Clip {
    #[new]
    fn new(norm: f64, dimension: u64) -> PyResult<Self> {
        Ok(Self(clip::Clip::new(norm, dimension).or_raise()?))
    }

    /// The clip.
    #[getter]
    fn norm(&self) -> f64 {
        self.0.norm()
    }

    /// What one stands for in a sum, a power of two.
    #[getter]
    fn unit(&self) -> f64 {
        self.0.unit()
    }

    /// The norm that longer contributions are scaled to, slightly below the clip.
    #[getter]
    fn target(&self) -> f64 {
        self.0.target()
    }

    /// Contributions that are added without error.
    #[classattr]
    fn most_contributions() -> usize {
        MOST_CONTRIBUTIONS
    }

    /// Share of the clip that may be given up for the errors of a sum that was taken elsewhere.
    #[classattr]
    fn most_charged() -> f64 {
        MOST_CHARGED
    }

    /// Share of the clip by which to scale down a sum of this many contributions that was computed elsewhere, in arithmetic
    /// with this relative error, so that one contribution moves the sum by at most the clip.
    #[staticmethod]
    fn charge(contributions: usize, dimension: u64, unit: f64) -> f64 {
        clip::charge(contributions, dimension, unit)
    }

    /// Adds clipped contributions to sums in place; returns which were longer than target or not finite.
    ///
    /// rows has one array for each part of the model, of float32 or float64: a contribution a row. sums has one of int64 for each.
    /// share is the part of the target that these parts are scaled to, where groups of parts are clipped each by itself.
    #[pyo3(signature = (rows, sums, share=1.0))]
    fn add_rows<'py>(
        &self,
        py: Python<'py>,
        rows: Vec<Bound<'py, PyAny>>,
        sums: Vec<Bound<'py, PyAny>>,
        share: f64,
    ) -> PyResult<Bound<'py, PyArray1<bool>>> {
        let mut written = sums.iter().map(total).collect::<PyResult<Vec<_>>>()?;
        let double = match rows.first() {
            Some(row) => is_double(row)?,
            None => false,
        };
        let longer = match double {
            true => self.add::<f64>(py, &rows, &mut written, share)?,
            false => self.add::<f32>(py, &rows, &mut written, share)?,
        };
        Ok(PyArray1::from_vec(py, longer))
    }

    fn __repr__(&self) -> String {
        format!("<dpmf._Clip: {} in units of {:e}>", self.0.norm(), self.0.unit())
    }
}

impl Clip {
    fn add<V: Value + Element>(
        &self,
        py: Python<'_>,
        rows: &[Bound<'_, PyAny>],
        written: &mut [PyReadwriteArray1<'_, i64>],
        share: f64,
    ) -> PyResult<Vec<bool>> {
        let borrowed = rows.iter().map(contributions::<V>).collect::<PyResult<Vec<_>>>()?;
        let count = borrowed.first().map_or(0, |array| array.shape()[0]);
        if borrowed.iter().any(|array| array.shape()[0] != count) {
            return Err(value_error(
                "all parts need one row for each contribution, but their numbers of rows differ",
            ));
        }
        let rows: Vec<&[V]> = borrowed.iter().map(|array| array.as_slice()).collect::<Result<_, _>>()?;
        let mut totals: Vec<&mut [i64]> =
            written.iter_mut().map(|array| array.as_slice_mut()).collect::<Result<_, _>>()?;
        parallel::run(py, || self.0.add_rows(&rows, count, &mut totals, share))
    }
}

fn is_double(array: &Bound<'_, PyAny>) -> PyResult<bool> {
    let dtype = array.cast::<PyUntypedArray>().map_err(|_| wrong_rows())?.dtype();
    Ok(numpy::PyArrayDescrMethods::is_equiv_to(&dtype, &numpy::dtype::<f64>(array.py())))
}

fn wrong_rows() -> PyErr {
    type_error("contributions must be two-dimensional NumPy arrays, all of float32 or all of float64")
}

fn contributions<'py, V: Element>(array: &Bound<'py, PyAny>) -> PyResult<PyReadonlyArray2<'py, V>> {
    let array = array.cast::<PyArray2<V>>().map_err(|_| wrong_rows())?;
    if !array.is_c_contiguous() {
        return Err(value_error("contributions must be contiguous: numpy.ascontiguousarray"));
    }
    array.try_readonly().map_err(|_| value_error("contributions are being written by another call"))
}

fn total<'py>(array: &Bound<'py, PyAny>) -> PyResult<PyReadwriteArray1<'py, i64>> {
    let array = array
        .cast::<PyArray1<i64>>()
        .map_err(|_| type_error("sums must be one-dimensional NumPy arrays of int64"))?;
    if !array.is_c_contiguous() {
        return Err(value_error("sums must be contiguous: numpy.ascontiguousarray"));
    }
    array
        .try_readwrite()
        .map_err(|_| value_error("a sum is passed twice, is read-only or in use by another call"))
}
