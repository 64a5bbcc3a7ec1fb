//! Parquet files, read row by row.

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use parquet::basic::{ConvertedType, LogicalType, Repetition, TimeUnit, Type as PhysicalType};
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::Field;
use parquet::schema::types::Type;

use super::fields::moment;
use super::rows::{Cell, Declared, Fault};
use crate::{Error, Result};

/// What hears of a row: its number, and its fields or what is wrong with one.
pub(super) type Each<'a> = &'a mut dyn FnMut(u64, std::result::Result<&[Cell<'_>], Fault>);

/// Names of the columns, with what is declared of them.
pub(super) fn columns(path: &Path, bytes: Option<&Arc<[u8]>>) -> Result<Vec<(String, Option<Declared>)>> {
    let reader = open(path, bytes)?;
    let fields = reader.metadata().file_metadata().schema().get_fields();
    Ok(fields.iter().map(|field| (field.name().to_owned(), declared(field))).collect())
}

/// What a file declares of a column; nothing of words and truths.
fn declared(field: &Type) -> Option<Declared> {
    if !field.is_primitive() || field.get_basic_info().repetition() == Repetition::REPEATED {
        return Some(Declared::Nested);
    }
    match (field.get_basic_info().converted_type(), field.get_physical_type()) {
        (ConvertedType::DATE | ConvertedType::TIMESTAMP_MILLIS | ConvertedType::TIMESTAMP_MICROS, _) => {
            Some(Declared::Date)
        }
        _ if ticks(field).is_some() => Some(Declared::Date),
        (ConvertedType::DECIMAL, _) => Some(Declared::Number),
        (_, PhysicalType::INT96) => Some(Declared::Date),
        (_, PhysicalType::INT32 | PhysicalType::INT64 | PhysicalType::FLOAT | PhysicalType::DOUBLE) => {
            Some(Declared::Number)
        }
        _ => None,
    }
}

/// Ticks a second of times that are written as whole numbers.
fn ticks(field: &Type) -> Option<i64> {
    match field.get_basic_info().logical_type_ref()? {
        LogicalType::Timestamp(time) => Some(match time.unit {
            TimeUnit::MILLIS => 1_000,
            TimeUnit::MICROS => 1_000_000,
            TimeUnit::NANOS => 1_000_000_000,
        }),
        _ => None,
    }
}

/// Hands the wanted fields of every row to `each`, with the number of the row, from 1 on.
pub(super) fn each(path: &Path, bytes: Option<&Arc<[u8]>>, wanted: &[&str], each: Each<'_>) -> Result<()> {
    let reader = open(path, bytes)?;
    let schema = reader.metadata().file_metadata().schema_descr_ptr().root_schema_ptr();
    let fields = schema.get_fields();
    let known: HashMap<&str, usize> =
        fields.iter().enumerate().rev().map(|(place, field)| (field.name(), place)).collect();
    let places: Vec<Option<usize>> = wanted.iter().map(|name| known.get(name).copied()).collect();
    let rows = reader.get_row_iter(None).map_err(|error| fault(path, error))?;
    for (number, row) in (1..).zip(rows) {
        let row = row.map_err(|error| fault(path, error))?;
        let columns: Vec<&Field> = row.get_column_iter().map(|(_, field)| field).collect();
        let read: std::result::Result<Vec<Option<String>>, Fault> = places
            .iter()
            .zip(wanted)
            .map(|(place, name)| match place.and_then(|at| Some((columns.get(at)?, &fields[at]))) {
                None => Ok(None),
                Some((Field::Long(count), field)) => Ok(Some(match ticks(field) {
                    Some(ticks) => moment(*count, ticks),
                    None => count.to_string(),
                })),
                Some((field, _)) => written(field)
                    .ok_or_else(|| format!("`{name}` must be a string, a number, true, false or a date")),
            })
            .collect();
        match read {
            Ok(fields) => each(number, Ok(&fields.iter().map(Option::as_deref).collect::<Vec<_>>())),
            Err(fault) => each(number, Err(fault)),
        }
    }
    Ok(())
}

fn open(path: &Path, bytes: Option<&Arc<[u8]>>) -> Result<Box<dyn FileReader>> {
    Ok(match bytes {
        Some(bytes) => {
            let bytes = Bytes::from_owner(bytes.clone());
            Box::new(SerializedFileReader::new(bytes).map_err(|error| fault(path, error))?)
        }
        None => {
            let file = File::open(path).map_err(|source| Error::Io { path: path.into(), source })?;
            Box::new(SerializedFileReader::new(file).map_err(|error| fault(path, error))?)
        }
    })
}

fn fault(path: &Path, error: parquet::errors::ParquetError) -> Error {
    let message = match error.to_string() {
        text if text.contains("codec") || text.contains("Disabled feature at compile time") => format!(
            "its compression is not supported ({text}): write it with zstd, snappy, gzip, brotli or no compression"
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
