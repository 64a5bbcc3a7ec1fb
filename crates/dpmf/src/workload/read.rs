//! Matrices and vectors from files of other tools.

use crate::error::{Error, Result};
use faer::Mat;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;

/// Reads a matrix from `.npy`, `.npz` (with a single array) or `.csv` (numbers only, no header).
///
/// Errors: [`Error::Io`], or [`Error::Format`] with the place of the first entry that is not a number.
pub fn read_matrix(path: &Path) -> Result<Mat<f64>> {
    match path.extension().and_then(|e| e.to_str()) {
        Some("npy") => {
            let file = File::open(path).map_err(|source| io(path, source))?;
            let npy = npyz::NpyFile::new(BufReader::new(file)).map_err(|source| io(path, source))?;
            from_npy(path, npy)
        }
        Some("npz") => {
            let mut npz = npyz::npz::NpzArchive::open(path).map_err(|source| io(path, source))?;
            let names: Vec<String> = npz.array_names().map(str::to_owned).collect();
            let [name] = names.as_slice() else {
                return Err(format(path, format!("it holds {} arrays, but one is needed", names.len())));
            };
            match npz.by_name(name).map_err(|source| io(path, source))? {
                Some(npy) => from_npy(path, npy),
                None => Err(format(path, format!("array {name} cannot be opened"))),
            }
        }
        Some("csv") => from_csv(path),
        _ => Err(format(path, "the name must end in .npy, .npz or .csv".into())),
    }
}

/// Reads one number a line.
pub fn read_vector(path: &Path) -> Result<Vec<f64>> {
    let text = std::fs::read_to_string(path).map_err(|source| io(path, source))?;
    text.lines()
        .enumerate()
        .filter(|(_, line)| !line.trim().is_empty())
        .map(|(i, line)| {
            line.trim().parse().map_err(|_| {
                format(path, format!("line {} is {:?}, but it must be a number", i + 1, line.trim()))
            })
        })
        .collect()
}

fn from_npy<R: std::io::Read>(path: &Path, npy: npyz::NpyFile<R>) -> Result<Mat<f64>> {
    let &[rows, columns] = npy.shape() else {
        return Err(format(
            path,
            format!("the array has {} dimensions, but 2 are needed", npy.shape().len()),
        ));
    };
    let by_rows = npy.order() == npyz::Order::C;
    let too_large = || format(path, format!("its {rows} × {columns} entries do not fit in memory"));
    let (rows, columns) = (to_usize(rows).ok_or_else(too_large)?, to_usize(columns).ok_or_else(too_large)?);
    let dtype = npy.dtype().descr();
    let values: Vec<f64> = if dtype.contains("f8") {
        npy.into_vec::<f64>().map_err(|source| io(path, source))?
    } else if dtype.contains("f4") {
        npy.into_vec::<f32>().map_err(|source| io(path, source))?.into_iter().map(f64::from).collect()
    } else if dtype.contains("i8") {
        npy.into_vec::<i64>().map_err(|source| io(path, source))?.into_iter().map(|x| x as f64).collect()
    } else {
        return Err(format(
            path,
            format!("entries of type {dtype} are not read: use float64, float32 or int64"),
        ));
    };
    if rows.checked_mul(columns) != Some(values.len()) {
        return Err(format(path, format!("{} entries do not fill {rows} × {columns}", values.len())));
    }
    Ok(Mat::from_fn(rows, columns, |i, j| values[if by_rows { i * columns + j } else { j * rows + i }]))
}

fn to_usize(x: u64) -> Option<usize> {
    usize::try_from(x).ok()
}

fn from_csv(path: &Path) -> Result<Mat<f64>> {
    let mut reader = csv::ReaderBuilder::new()
        .has_headers(false)
        .trim(csv::Trim::All)
        .from_path(path)
        .map_err(|error| format(path, error.to_string()))?;
    let mut rows: Vec<Vec<f64>> = Vec::new();
    for record in reader.records() {
        let record = record.map_err(|error| format(path, error.to_string()))?;
        let i = rows.len();
        let row = record
            .iter()
            .enumerate()
            .map(|(j, field)| {
                field.parse().map_err(|_| {
                    format(path, format!("entry [{i}, {j}] is {field:?}, but it must be a number"))
                })
            })
            .collect::<Result<Vec<f64>>>()?;
        rows.push(row);
    }
    let columns = rows.first().map_or(0, Vec::len);
    Ok(Mat::from_fn(rows.len(), columns, |i, j| rows[i][j]))
}

fn io(path: &Path, source: std::io::Error) -> Error {
    Error::Io { path: path.to_owned(), source }
}

fn format(path: &Path, reason: String) -> Error {
    Error::Format { path: path.to_owned(), reason }
}
