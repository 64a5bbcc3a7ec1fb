//! Matrices and vectors from files of other tools.

mod npy;
mod npz;

use dpmf::disk::DiskPath;
use dpmf::{Error, Result};
use faer::Mat;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::Path;

/// Most entries of a matrix: more are read from no file, whatever it claims.
///
/// 32,768 steps, far more than any dense factorization can serve.
const MOST_ENTRIES: u64 = 1 << 30;

/// Reads a matrix from `.npy`, `.npz` (with a single array) or `.csv` (numbers only, no header).
///
/// Errors: [`Error::Io`], or [`Error::Format`] with what is wrong and, in a table, where.
pub fn read_matrix(path: &Path) -> Result<Mat<f64>> {
    let open = || File::open(path).map(BufReader::new).map_err(Fault::Io);
    let matrix = match path.extension().and_then(|e| e.to_str()) {
        Some("npy") => open().and_then(npy::read),
        Some("npz") => open().and_then(npz::read),
        Some("csv") => open().and_then(from_csv),
        _ => Err(fault("the name must end in .npy, .npz or .csv")),
    };
    matrix.map_err(|fault| fault.at(path))
}

/// Reads one number a line.
pub fn read_vector(path: &Path) -> Result<Vec<f64>> {
    let text =
        String::from_utf8(DiskPath::from(path).read()?).map_err(|_| fault("it is not text").at(path))?;
    text.lines()
        .enumerate()
        .filter(|(_, line)| !line.trim().is_empty())
        .map(|(i, line)| {
            let line = line.trim();
            line.parse()
                .map_err(|_| fault(format!("line {} is {line:?}, but it must be a number", i + 1)).at(path))
        })
        .collect()
}

/// What is wrong with a file, whichever it is.
#[derive(Debug)]
enum Fault {
    Io(io::Error),
    Format(String),
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl Fault {
    fn at(self, path: &Path) -> Error {
        match self {
            Self::Io(source) => Error::Io { path: path.to_owned(), source },
            Self::Format(reason) => Error::Format { path: path.to_owned(), reason },
        }
    }
}

fn fault(reason: impl Into<String>) -> Fault {
    Fault::Format(reason.into())
}

/// Takes as many bytes; memory grows with what is there and not with what is asked for.
fn take(reader: &mut impl Read, count: u64) -> std::result::Result<Vec<u8>, Fault> {
    let mut bytes = Vec::new();
    reader.take(count).read_to_end(&mut bytes)?;
    if (bytes.len() as u64) < count {
        return Err(fault(format!("it is truncated: {count} bytes should follow, but {} do", bytes.len())));
    }
    Ok(bytes)
}

fn from_csv(reader: impl Read) -> std::result::Result<Mat<f64>, Fault> {
    let mut reader = csv::ReaderBuilder::new().has_headers(false).trim(csv::Trim::All).from_reader(reader);
    let mut rows: Vec<Vec<f64>> = Vec::new();
    for record in reader.records() {
        let record = record.map_err(|error| fault(error.to_string()))?;
        let i = rows.len();
        let number = |(j, field): (usize, &str)| {
            let bad = |_| fault(format!("entry [{i}, {j}] is {field:?}, but it must be a number"));
            field.parse().map_err(bad)
        };
        rows.push(record.iter().enumerate().map(number).collect::<std::result::Result<_, _>>()?);
    }
    let columns = rows.first().map_or(0, Vec::len);
    Ok(Mat::from_fn(rows.len(), columns, |i, j| rows[i][j]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_and_vectors_are_read_or_refused_with_the_place() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let a = read_matrix(&write("a.csv", "1, 0\n0.5, 2\n")).unwrap();
        assert_eq!([[a[(0, 0)], a[(0, 1)]], [a[(1, 0)], a[(1, 1)]]], [[1.0, 0.0], [0.5, 2.0]]);
        let refused = |path: &Path| read_matrix(path).unwrap_err().to_string();
        assert!(refused(&write("b.csv", "1,0\nx,1\n")).contains("entry [1, 0] is \"x\""));
        assert!(refused(&write("c.csv", "1,0\n1\n")).contains("c.csv"));
        assert!(refused(&write("d.txt", "1")).contains("must end in .npy, .npz or .csv"));
        assert!(refused(&folder.path().join("missing.npy")).contains("missing.npy"));

        assert_eq!(read_vector(&write("v", "1\n\n 2.5 \n")).unwrap(), [1.0, 2.5]);
        let error = read_vector(&write("w", "1\n\nx\n")).unwrap_err().to_string();
        assert!(error.contains("line 3 is \"x\""), "{error}");
    }
}
