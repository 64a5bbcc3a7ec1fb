//! Parquet files, read row by row.

use std::fs::File;
use std::path::Path;

use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::Field;

use super::rows::{Cell, Fault};
use crate::{Error, Result};

/// What hears of a row: its number, and its fields or what is wrong with one.
pub(super) type Each<'a> = &'a mut dyn FnMut(u64, std::result::Result<&[Cell<'_>], Fault>);

/// Names of the columns.
pub(super) fn columns(path: &Path) -> Result<Vec<String>> {
    let reader = open(path)?;
    let fields = reader.metadata().file_metadata().schema().get_fields();
    Ok(fields.iter().map(|field| field.name().to_owned()).collect())
}

/// Hands the wanted fields of every row to `each`, with the number of the row, from 1 on.
pub(super) fn each(path: &Path, wanted: &[&str], each: Each<'_>) -> Result<()> {
    let reader = open(path)?;
    let rows = reader.get_row_iter(None).map_err(|error| fault(path, error))?;
    for (number, row) in (1..).zip(rows) {
        let row = row.map_err(|error| fault(path, error))?;
        let fields: std::result::Result<Vec<Option<String>>, Fault> = wanted
            .iter()
            .map(|name| match row.get_column_iter().find(|(column, _)| column == name) {
                None => Ok(None),
                Some((_, field)) => written(field)
                    .ok_or_else(|| format!("`{name}` must be a string, a number, true, false or a date")),
            })
            .collect();
        match fields {
            Ok(fields) => each(number, Ok(&fields.iter().map(Option::as_deref).collect::<Vec<_>>())),
            Err(fault) => each(number, Err(fault)),
        }
    }
    Ok(())
}

fn open(path: &Path) -> Result<SerializedFileReader<File>> {
    let file = File::open(path).map_err(|source| Error::Io { path: path.into(), source })?;
    SerializedFileReader::new(file).map_err(|error| fault(path, error))
}

fn fault(path: &Path, error: parquet::errors::ParquetError) -> Error {
    let message = match error.to_string() {
        text if text.contains("codec") || text.contains("Disabled feature at compile time") => format!(
            "it is compressed in a way that dpmf does not read ({text}): write it with snappy, gzip or no compression"
        ),
        text => format!("it cannot be read as Parquet: {text}"),
    };
    Error::Data { path: path.into(), message }
}

/// A field as text: nothing in it where it is null, nothing at all where it is no single value.
fn written(field: &Field) -> Option<Option<String>> {
    Some(match field {
        Field::Null => None,
        Field::Str(text) => Some(text.clone()),
        Field::Bool(truth) => Some(truth.to_string()),
        Field::Float(number) => Some(number.to_string()),
        Field::Double(number) => Some(number.to_string()),
        Field::Float16(number) => Some(number.to_f32().to_string()),
        Field::Bytes(bytes) => Some(bytes.as_utf8().ok()?.to_owned()),
        Field::Group(_) | Field::ListInternal(_) | Field::MapInternal(_) => return None,
        other => Some(other.to_string()),
    })
}
