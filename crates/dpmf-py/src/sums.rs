//! The clipped sum of contributions, as `dpmf/_sums.py` states it, over the memory of a framework.
//!
//! The one thing that is computed here: it would take NumPy or PyTorch several copies of all contributions in f64.

use crate::error::{type_error, value_error};
use crate::parallel;
use numpy::{PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray2, PyReadwriteArray1, PyUntypedArrayMethods};
use pyo3::prelude::*;
use rayon::prelude::*;

/// Coordinates that are summed at once: their sums stay in the first cache.
const BLOCK: usize = 1024;

/// Below so many numbers, handing them to threads takes longer than they do.
const ALONE: usize = 1 << 16;

/// Adding and subtracting it rounds to a whole number, halves to even, for numbers of magnitude up to 2⁵¹.
const TO_WHOLE: f64 = 1.5 * (1u64 << 52) as f64;

/// Adds the clipped sum of contributions, in units of the grid, to sums in place; returns which were longer than target or
/// not finite.
///
/// rows has one array for each parameter: a contribution a row, float32. A contribution that is not finite counts as zero.
///
/// Guarantee: that of the module dpmf._sums. Norms are sums of squares in f64, each exact, in a fixed order, whatever the
/// number of threads.
/// Cost: all of rows is read twice, and nothing of its size is written.
#[pyfunction]
#[pyo3(name = "_clipped_sum")]
pub(crate) fn clipped_sum<'py>(
    py: Python<'py>,
    rows: Vec<Bound<'py, PyAny>>,
    sums: Vec<Bound<'py, PyAny>>,
    target: f64,
    spacing: f64,
) -> PyResult<Bound<'py, PyArray1<bool>>> {
    let borrowed = rows.iter().map(contributions).collect::<PyResult<Vec<_>>>()?;
    let mut written = sums.iter().map(total).collect::<PyResult<Vec<_>>>()?;
    let count = borrowed.first().map_or(0, |array| array.shape()[0]);
    let fits = borrowed.len() == written.len()
        && borrowed.iter().zip(&written).all(|(array, sum)| array.shape() == [count, sum.len()]);
    if !fits {
        return Err(value_error(
            "rows and sums must be of the same parameters, and all rows of as many contributions",
        ));
    }
    // Larger summands would not be added without error.
    if !(target > 0.0 && spacing > 0.0 && target / spacing <= (1u64 << 33) as f64) {
        return Err(value_error(format!(
            "target is {target} and spacing {spacing}, but the target must be positive and at most 2^33 spacings"
        )));
    }
    let rows: Vec<&[f32]> = borrowed.iter().map(|array| array.as_slice()).collect::<Result<_, _>>()?;
    let mut totals: Vec<&mut [f64]> =
        written.iter_mut().map(|array| array.as_slice_mut()).collect::<Result<_, _>>()?;
    let longer = if rows.iter().map(|row| row.len()).sum::<usize>() < ALONE {
        add_clipped(&rows, &mut totals, count, target, spacing)
    } else {
        parallel::run(py, || Ok(add_clipped(&rows, &mut totals, count, target, spacing)))?
    };
    Ok(PyArray1::from_vec(py, longer))
}

fn contributions<'py>(array: &Bound<'py, PyAny>) -> PyResult<PyReadonlyArray2<'py, f32>> {
    let array = array
        .cast::<PyArray2<f32>>()
        .map_err(|_| type_error("contributions must be two-dimensional NumPy arrays of float32"))?;
    if !array.is_c_contiguous() {
        return Err(value_error("contributions must be contiguous: numpy.ascontiguousarray"));
    }
    array.try_readonly().map_err(|_| value_error("contributions are being written by another call"))
}

fn total<'py>(array: &Bound<'py, PyAny>) -> PyResult<PyReadwriteArray1<'py, f64>> {
    let array = array
        .cast::<PyArray1<f64>>()
        .map_err(|_| type_error("sums must be one-dimensional NumPy arrays of float64"))?;
    if !array.is_c_contiguous() {
        return Err(value_error("sums must be contiguous: numpy.ascontiguousarray"));
    }
    array
        .try_readwrite()
        .map_err(|_| value_error("a sum comes twice, is read-only or in use by another call"))
}

/// Rows of `count` contributions to each parameter, summed into the totals of each; which were longer.
fn add_clipped(
    rows: &[&[f32]],
    totals: &mut [&mut [f64]],
    count: usize,
    target: f64,
    spacing: f64,
) -> Vec<bool> {
    let norms: Vec<f64> = (0..count)
        .into_par_iter()
        .map(|index| rows.iter().map(|row| norm_sq(part(row, index, count))).sum::<f64>().sqrt())
        .collect();
    // A scale of zero is for what is not finite, and for nothing else: such rows are left out, since 0·∞ is not 0.
    let scales: Vec<f64> = norms
        .iter()
        .map(|&norm| match norm.is_finite() {
            true => (if norm > target { target / norm } else { 1.0 }) / spacing,
            false => 0.0,
        })
        .collect();
    for (row, sums) in rows.iter().zip(totals.iter_mut()) {
        let width = sums.len();
        sums.par_chunks_mut(BLOCK).enumerate().for_each(|(block, sums)| {
            let first = block * BLOCK;
            for (index, &scale) in scales.iter().enumerate().filter(|(_, scale)| **scale != 0.0) {
                let start = index * width + first;
                let values = &row[start..start + sums.len()];
                for (sum, &value) in sums.iter_mut().zip(values) {
                    // In this order: the product is rounded to the grid before it is added.
                    *sum += (f64::from(value) * scale + TO_WHOLE) - TO_WHOLE;
                }
            }
        });
    }
    norms.iter().map(|norm| norm.is_nan() || *norm > target).collect()
}

/// One contribution to one parameter.
fn part(row: &[f32], index: usize, count: usize) -> &[f32] {
    let width = row.len() / count.max(1);
    &row[index * width..(index + 1) * width]
}

/// The sum of squares, each exact in f64, in eight sums side by side: the order is fixed, and the lanes of the processor are used.
fn norm_sq(values: &[f32]) -> f64 {
    let mut lanes = [0.0f64; 8];
    let chunks = values.chunks_exact(8);
    let rest: f64 = chunks.remainder().iter().map(|&value| f64::from(value) * f64::from(value)).sum();
    for chunk in chunks {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(value) * f64::from(value);
        }
    }
    lanes.iter().sum::<f64>() + rest
}
