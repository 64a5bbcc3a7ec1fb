//! Rows of a table file, whatever its format.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{BufRead, BufReader, Cursor, Read};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use serde_json::Value;

use super::Frame;
use crate::{Error, Hint, Remark, Result};

/// Columns that a message names.
const NAMED: usize = 30;
/// The path that stands for standard input.
pub(super) const STANDARD_INPUT: &str = "-";

/// Malformed rows that a message tells of one by one.
const SHOWN: usize = 20;

/// How the rows of a table are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    /// Fields parted by commas or semicolons, with a line of column names.
    Csv,
    /// Fields parted by tabs, with a line of column names.
    Tsv,
    /// One JSON object a line.
    JsonLines,
    /// Apache Parquet.
    Parquet,
}

impl Format {
    /// The format a file name stands for, compressed or not.
    pub(super) fn of(path: &Path) -> Option<Self> {
        let extension = path.extension()?.to_str()?.to_ascii_lowercase();
        if ["gz", "zst", "zstd"].contains(&extension.as_str()) {
            // A Parquet file is compressed inside.
            return Self::of(Path::new(path.file_stem()?)).filter(|format| *format != Self::Parquet);
        }
        match path.extension()?.to_str()?.to_ascii_lowercase().as_str() {
            "csv" => Some(Self::Csv),
            "tsv" | "tab" => Some(Self::Tsv),
            "jsonl" | "ndjson" => Some(Self::JsonLines),
            "parquet" => Some(Self::Parquet),
            _ => None,
        }
    }
}

/// What a file says of the kind of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub(super) enum Declared {
    Number,
    Date,
    /// Lists or structures, which no model reads.
    Nested,
}

/// A table: its columns are known, its rows are read as often as they are wanted.
#[derive(Debug)]
pub(super) struct Table {
    path: PathBuf,
    /// The whole of standard input.
    bytes: Option<Arc<[u8]>>,
    format: Format,
    delimiter: u8,
    columns: Vec<String>,
    /// A table in memory: there is no file.
    frame: Option<Frame>,
    /// What a Parquet file declares of its columns.
    declared: Vec<Option<Declared>>,
    /// Where the columns of a name are.
    places: HashMap<String, Vec<usize>>,
}

/// Where the columns of each name are.
fn places(columns: &[String]) -> HashMap<String, Vec<usize>> {
    let mut places: HashMap<String, Vec<usize>> = HashMap::new();
    for (place, name) in columns.iter().enumerate() {
        places.entry(name.clone()).or_default().push(place);
    }
    places
}

/// Standard input, which is read once in a process.
fn standard_input() -> Result<Arc<[u8]>> {
    static READ: OnceLock<Arc<[u8]>> = OnceLock::new();
    if let Some(bytes) = READ.get() {
        return Ok(bytes.clone());
    }
    let mut bytes = Vec::new();
    std::io::stdin()
        .lock()
        .read_to_end(&mut bytes)
        .map_err(|source| Error::Io { path: STANDARD_INPUT.into(), source })?;
    Ok(READ.get_or_init(|| bytes.into()).clone())
}

/// What is in a compressed stream, or the stream itself.
fn decompressed<'a>(mut stream: impl BufRead + 'a) -> std::io::Result<Box<dyn BufRead + 'a>> {
    const GZIP: [u8; 2] = [0x1f, 0x8b];
    const ZSTD: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
    let head = stream.fill_buf()?;
    Ok(match head {
        head if head.starts_with(&GZIP) => {
            Box::new(BufReader::new(flate2::bufread::MultiGzDecoder::new(stream)))
        }
        head if head.starts_with(&ZSTD) => {
            Box::new(BufReader::new(zstd::stream::read::Decoder::with_buffer(stream)?))
        }
        _ => Box::new(stream),
    })
}

/// A field as it is written; nothing where there is none.
pub(super) type Cell<'a> = Option<&'a str>;

/// What is wrong with a row.
pub(super) type Fault = String;

/// Rows that could not be read.
#[derive(Debug, Default)]
pub(super) struct Malformed {
    count: usize,
    shown: Vec<String>,
}

impl Malformed {
    fn add(&mut self, sentence: impl FnOnce() -> String) {
        self.count += 1;
        if self.shown.len() < SHOWN {
            self.shown.push(sentence());
        }
    }

    /// Some of them, without telling how many there are.
    pub(super) fn examples(&self) -> Option<String> {
        (self.count > 0).then(|| format!("some rows are malformed, such as\n  {}", self.shown.join("\n  ")))
    }

    /// All of them in one text; nothing where there are none.
    pub(super) fn sentence(&self) -> Option<String> {
        if self.count == 0 {
            return None;
        }
        let mut text = match &*self.shown {
            [one] if self.count == 1 => return Some(one.clone()),
            shown => format!("{} rows are malformed:\n  {}", self.count, shown.join("\n  ")),
        };
        if self.count > SHOWN {
            text += &format!("\n  and {} more", self.count - SHOWN);
        }
        Some(text)
    }
}

impl Table {
    /// Opens a table and reads the names of its columns: of a file of JSON lines, those of all its rows.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let bytes = (path == Path::new(STANDARD_INPUT)).then(standard_input).transpose()?;
        let format = match &bytes {
            Some(bytes) => {
                Some(guessed_format(bytes).map_err(|source| Error::Io { path: path.into(), source })?)
            }
            None => Format::of(path),
        };
        let Some(format) = format else {
            return Err(Error::Data {
                path: path.into(),
                message: "the name must end in .csv, .tsv, .jsonl, .ndjson or .parquet, all but the last also with .gz or .zst"
                    .into(),
            });
        };
        // It is read more than once.
        if bytes.is_none() && std::fs::metadata(path).is_ok_and(|found| !found.is_file()) {
            let message = "it is not a regular file; pass - to read standard input".into();
            return Err(Error::Data { path: path.into(), message });
        }
        let mut table = Self {
            path: path.into(),
            bytes,
            format,
            delimiter: b'\t',
            columns: Vec::new(),
            declared: Vec::new(),
            places: HashMap::new(),
            frame: None,
        };
        match format {
            Format::Csv => {
                table.delimiter = table.guess()?;
                table.columns = table.head()?;
            }
            Format::Tsv => table.columns = table.head()?,
            Format::JsonLines => {
                let (mut columns, mut known): (Vec<String>, HashSet<String>) = Default::default();
                table.lines(&mut |_, line| {
                    // What is malformed is told of when rows are read.
                    let Ok(Value::Object(row)) = serde_json::from_str(line) else { return };
                    for (name, _) in row {
                        if known.insert(name.clone()) {
                            columns.push(name);
                        }
                    }
                })?;
                table.columns = columns;
            }
            Format::Parquet => {
                (table.columns, table.declared) =
                    super::parquet::columns(path, table.bytes.as_ref())?.into_iter().unzip();
            }
        }
        table.places = places(&table.columns);
        Ok(table)
    }

    /// A table in memory.
    pub(super) fn of(frame: Frame) -> Self {
        let columns: Vec<String> = frame.columns.iter().map(|(name, _)| name.clone()).collect();
        Self {
            path: PathBuf::from(&frame.name),
            bytes: None,
            format: Format::Csv,
            delimiter: b',',
            places: places(&columns),
            columns,
            declared: Vec::new(),
            frame: Some(frame),
        }
    }

    /// Names of the columns.
    pub(super) fn columns(&self) -> &[String] {
        &self.columns
    }

    /// What the file declares of a column.
    pub(super) fn declared(&self, column: &str) -> Option<Declared> {
        *self.declared.get(*self.places.get(column)?.first()?)?
    }

    /// The path, for messages.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// An error of the table as a whole.
    pub(super) fn fault(&self, message: impl Into<String>) -> Error {
        Error::Data { path: self.path.clone(), message: message.into() }
    }

    /// An error of this file, with a way out of it if there is one.
    pub(super) fn hinted(&self, Remark { text, hint }: Remark) -> Error {
        let fault = self.fault(text);
        match hint {
            Some(hint) => fault.with_hint(hint),
            None => fault,
        }
    }

    /// Refuses a column that is not there, there twice, or of lists.
    pub(super) fn need(&self, column: &str, hint: Option<Hint>) -> Result<()> {
        match self.places.get(column).map_or(0, Vec::len) {
            1 if self.declared(column) == Some(Declared::Nested) => {
                let text = format!("column `{column}` holds lists or structures, which cannot be read");
                Err(self.hinted(Remark::hinted(text, Hint::Exclude)))
            }
            1 => Ok(()),
            0 => {
                let mut text = format!(
                    "there is no column `{column}` among {:?}",
                    &self.columns[..self.columns.len().min(NAMED)]
                );
                if self.columns.len() > NAMED {
                    text += &format!(" and {} more", self.columns.len() - NAMED);
                }
                Err(self.hinted(Remark { text, hint }))
            }
            more => Err(self.fault(format!("there are {more} columns `{column}`: rename all but one"))),
        }
    }

    /// Hands the wanted fields of every row to `each`, and gathers the rows that it or the format refuses.
    pub(super) fn each(
        &self,
        wanted: &[&str],
        mut each: impl FnMut(&[Cell<'_>]) -> std::result::Result<(), Fault>,
    ) -> Result<Malformed> {
        let mut malformed = Malformed::default();
        if let Some(frame) = &self.frame {
            frame.each(wanted, &mut |number, cells| {
                if let Err(fault) = each(cells) {
                    malformed.add(|| format!("row {number}: {fault}"));
                }
            });
            return Ok(malformed);
        }
        match self.format {
            Format::Csv | Format::Tsv => {
                let places: Vec<Option<usize>> =
                    wanted.iter().map(|name| self.places.get(*name)?.first().copied()).collect();
                let mut reader = self.reader()?;
                let mut record = csv::StringRecord::new();
                loop {
                    let fault = match reader.read_record(&mut record) {
                        Ok(false) => break,
                        Ok(true) => {
                            let cells: Vec<Cell<'_>> =
                                places.iter().map(|place| place.and_then(|at| record.get(at))).collect();
                            each(&cells).err().map(|fault| (record.position().cloned(), fault))
                        }
                        Err(error) => match error.kind() {
                            csv::ErrorKind::UnequalLengths { expected_len, len, .. } => Some((
                                error.position().cloned(),
                                format!("there are {len} fields, but {expected_len} columns"),
                            )),
                            csv::ErrorKind::Utf8 { .. } => {
                                Some((error.position().cloned(), "it is not UTF-8".into()))
                            }
                            _ => return Err(self.fault(error.to_string())),
                        },
                    };
                    if let Some((position, fault)) = fault {
                        malformed.add(|| {
                            let line = position.map_or(0, |position| self.filled_line(&position));
                            format!("line {line}: {fault}")
                        });
                    }
                }
            }
            Format::JsonLines => self.lines(&mut |number, line| {
                if let Err(fault) = object(line, wanted, &mut each) {
                    malformed.add(|| format!("line {number}: {fault}"));
                }
            })?,
            Format::Parquet => {
                super::parquet::each(&self.path, self.bytes.as_ref(), wanted, &mut |number, cells| {
                    if let Err(fault) = cells.and_then(&mut each) {
                        malformed.add(|| format!("row {number}: {fault}"));
                    }
                })?
            }
        }
        Ok(malformed)
    }

    /// The text of the table from its beginning.
    fn text(&self) -> Result<Box<dyn BufRead>> {
        let io = |source| Error::Io { path: self.path.clone(), source };
        match &self.bytes {
            Some(bytes) => decompressed(Cursor::new(bytes.clone())).map_err(io),
            None => decompressed(BufReader::new(File::open(&self.path).map_err(io)?)).map_err(io),
        }
    }

    /// Line on which a record begins: the reader reports where it began to look, before lines that are empty.
    fn filled_line(&self, position: &csv::Position) -> u64 {
        let skipped = || -> Option<u64> {
            let mut text = self.text().ok()?;
            std::io::copy(&mut text.by_ref().take(position.byte()), &mut std::io::sink()).ok()?;
            let mut skipped = 0;
            for byte in text.bytes() {
                match byte.ok()? {
                    b'\n' => skipped += 1,
                    b'\r' => (),
                    _ => break,
                }
            }
            Some(skipped)
        };
        position.line() + skipped().unwrap_or(0)
    }

    /// A reader after the line of names: before it, the positions of errors are not right.
    fn reader(&self) -> Result<csv::Reader<Box<dyn BufRead>>> {
        let mut reader = csv::ReaderBuilder::new().delimiter(self.delimiter).from_reader(self.text()?);
        match reader.headers() {
            Ok(_) => Ok(reader),
            Err(error) => Err(match error.kind() {
                csv::ErrorKind::Utf8 { .. } => self.fault("line 1: it is not UTF-8"),
                _ => self.fault(error.to_string()),
            }),
        }
    }

    fn head(&self) -> Result<Vec<String>> {
        let mut reader = self.reader()?;
        let head = reader.headers().map_err(|error| self.fault(error.to_string()))?;
        Ok(head.iter().map(|name| name.trim().to_owned()).collect())
    }

    /// Spreadsheets of half the world write semicolons between the fields of a file that is named for commas.
    fn guess(&self) -> Result<u8> {
        let mut head = Vec::new();
        // Column names of more than a mebibyte are no column names.
        let mut start = self.text()?.take(1 << 20);
        start.read_until(b'\n', &mut head).map_err(|source| Error::Io { path: self.path.clone(), source })?;
        let count = |byte| head.iter().filter(|&&b| b == byte).count();
        Ok(if count(b',') == 0 && count(b';') > 0 { b';' } else { b',' })
    }

    /// Hands every line that is not blank to `each`, with its number.
    fn lines(&self, each: &mut dyn FnMut(u64, &str)) -> Result<()> {
        for (number, line) in (1..).zip(self.text()?.lines()) {
            let line = line.map_err(|source| match source.kind() {
                std::io::ErrorKind::InvalidData => self.fault(format!("line {number}: it is not UTF-8")),
                _ => Error::Io { path: self.path.clone(), source },
            })?;
            let line = line.trim_start_matches('\u{feff}').trim();
            if !line.is_empty() {
                each(number, line);
            }
        }
        Ok(())
    }
}

/// The wanted fields of a JSON object.
fn object(
    line: &str,
    wanted: &[&str],
    each: &mut impl FnMut(&[Cell<'_>]) -> std::result::Result<(), Fault>,
) -> std::result::Result<(), Fault> {
    let row: Value = serde_json::from_str(line).map_err(|error| error.to_string())?;
    let Value::Object(row) = row else { return Err("it is not a JSON object".into()) };
    let mut fields = Vec::with_capacity(wanted.len());
    for name in wanted {
        fields.push(match row.get(*name) {
            None | Some(Value::Null) => None,
            Some(Value::String(text)) => Some(text.clone()),
            Some(Value::Number(number)) => Some(written(number)),
            Some(Value::Bool(truth)) => Some(truth.to_string()),
            Some(Value::Array(_) | Value::Object(_)) => {
                return Err(format!(
                    "`{name}` must be a string, a number, true or false, but it is a list or a structure"
                ));
            }
        });
    }
    each(&fields.iter().map(Option::as_deref).collect::<Vec<_>>())
}

/// A number as it is written plainly: 7, 7.0 and 7e0 are one number, hence one user. The text "7" is the same user,
/// since programs
/// write one identifier both ways, and two people taken for one are both protected; the text "7.0" is another.
fn written(number: &serde_json::Number) -> String {
    match number.as_f64() {
        // Beyond, a whole number is as long as it is meaningless; and those without a fraction keep all their digits.
        Some(value) if number.is_f64() && value.fract() == 0.0 && value.abs() < 1e21 => {
            format!("{:.0}", value + 0.0)
        }
        _ => number.to_string(),
    }
}

/// The format of bytes that have no name.
fn guessed_format(bytes: &[u8]) -> std::io::Result<Format> {
    if bytes.starts_with(b"PAR1") {
        return Ok(Format::Parquet);
    }
    let mut head = String::new();
    let mut text = decompressed(bytes)?.take(1 << 20);
    let mut line = Vec::new();
    while head.trim().is_empty() && text.read_until(b'\n', &mut line)? > 0 {
        head = String::from_utf8_lossy(&line).trim_start_matches('\u{feff}').trim().to_owned();
        line.clear();
    }
    Ok(match head {
        head if head.starts_with('{') => Format::JsonLines,
        head if head.contains('\t') && !head.contains([',', ';']) => Format::Tsv,
        _ => Format::Csv,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_number_is_one_user_however_json_writes_it() {
        let users = |ids: &[&str]| {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("t.jsonl");
            let lines: String = ids.iter().map(|id| format!("{{\"user\": {id}}}\n")).collect();
            std::fs::write(&path, lines).unwrap();
            let mut users = Vec::new();
            let take = |cells: &[Cell<'_>]| {
                users.push(cells[0].unwrap().to_owned());
                Ok(())
            };
            assert!(Table::open(&path).unwrap().each(&["user"], take).unwrap().sentence().is_none());
            users
        };
        let mut same = users(&["7", "7.0", "7e0", "0.7e1", "70E-1", "\"7\""]);
        same.dedup();
        assert_eq!(same, ["7"]);
        assert_eq!(users(&["0", "-0.0", "0e5"]), ["0"; 3]);
        assert_eq!(users(&["-3.0", "2.5", "\"7.0\"", "true"]), ["-3", "2.5", "7.0", "true"]);
        assert_eq!(
            users(&["9007199254740993", "18446744073709551615"]),
            ["9007199254740993", "18446744073709551615"]
        );
        assert_eq!(users(&["1e20", "100000000000000000000"]), ["100000000000000000000"; 2]);
        assert_eq!(users(&["1e300", "10e299"]), ["1e+300", "1e+300"]);
    }
}
