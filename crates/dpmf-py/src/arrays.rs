//! NumPy arrays in and out.

use crate::error::{type_error, value_error};
use faer::MatRef;
use numpy::{
    AllowTypeChange, PyArray1, PyArray2, PyArrayDescrMethods, PyArrayLike1, PyArrayMethods,
    PyReadwriteArray1, PyUntypedArray, PyUntypedArrayMethods,
};
use pyo3::prelude::*;

/// A matrix as a C-contiguous array.
pub(crate) fn from_matrix<'py>(
    py: Python<'py>,
    matrix: MatRef<'_, f64>,
) -> PyResult<Bound<'py, PyArray2<f64>>> {
    let (rows, columns) = matrix.shape();
    let values: Vec<f64> = (0..rows).flat_map(|i| (0..columns).map(move |j| matrix[(i, j)])).collect();
    PyArray1::from_vec(py, values).reshape([rows, columns])
}

/// Numbers from anything that NumPy makes a vector of.
pub(crate) fn vector(name: &str, values: &Bound<'_, PyAny>) -> PyResult<Vec<f64>> {
    let array: PyArrayLike1<'_, f64, AllowTypeChange> = values
        .extract()
        .map_err(|_| type_error(format!("{name} must be a one-dimensional array of numbers")))?;
    Ok(array.as_array().iter().copied().collect())
}

/// The memory of a vector, to be written in place.
pub(crate) enum Writable<'py> {
    Single(PyReadwriteArray1<'py, f32>),
    Double(PyReadwriteArray1<'py, f64>),
}

/// The memory of a float32 or float64 vector, to be written in place.
///
/// Errors: anything that would need a copy, each with what to do about it.
pub(crate) fn writable<'py>(array: &Bound<'py, PyAny>, length: usize) -> PyResult<Writable<'py>> {
    let Ok(untyped) = array.cast::<PyUntypedArray>() else {
        let class = array.get_type();
        return Err(type_error(format!(
            "noise is added in place to a NumPy array, but this is a {}; for a CPU torch tensor, pass \
             tensor.numpy(), which shares its memory",
            class.qualname()?
        )));
    };
    let dtype = untyped.dtype();
    let double = dtype.is_equiv_to(&numpy::dtype::<f64>(array.py()));
    if !double && !dtype.is_equiv_to(&numpy::dtype::<f32>(array.py())) {
        let hint = match dtype.to_string().as_str() {
            "float16" | "bfloat16" => {
                "half precision cannot hold the noise: sum and clip in float32, add the noise, then cast"
            }
            _ => "cast the clipped sum with .astype(numpy.float32) first",
        };
        return Err(type_error(format!(
            "noise is added in place to float32 or float64, but this array is {dtype}; {hint}"
        )));
    }
    if untyped.ndim() != 1 {
        return Err(value_error(format!(
            "noise is added to a vector, but this array has {} dimensions; .reshape(-1) of a contiguous array is \
             a view on the same memory",
            untyped.ndim()
        )));
    }
    if untyped.len() != length {
        return Err(value_error(format!(
            "the array has length {}, but this stream has {length} coordinates; a stream makes the noise \
             for the flattened parameters of one model, or of one shard of it",
            untyped.len()
        )));
    }
    if !untyped.is_c_contiguous() {
        return Err(value_error(
            "the array is not contiguous, so noise cannot be added in place; copy it with \
             numpy.ascontiguousarray(array), add the noise to the copy and use that",
        ));
    }
    let busy = |cause| match cause {
        numpy::BorrowError::NotWriteable => value_error(
            "the array is read-only (arrays of JAX and of broadcasts are); add the noise to a copy: \
             numpy.array(array)",
        ),
        _ => value_error("the array is in use by another call; each call needs an array of its own"),
    };
    Ok(match double {
        true => Writable::Double(array.cast::<PyArray1<f64>>()?.try_readwrite().map_err(busy)?),
        false => Writable::Single(array.cast::<PyArray1<f32>>()?.try_readwrite().map_err(busy)?),
    })
}
