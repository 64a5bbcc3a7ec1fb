//! What the columns of a table mean to a model: numbers with a scale, categories, words, and what is to be predicted.

use std::collections::{BTreeSet, HashMap};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::Tokens;
use super::fields::{Decimal, Field, date, is_missing};
use super::part::digest;
use super::rows::{Cell, Fault};
use crate::{Error, Hint, Remark, Result};

/// Most different words that a column of categories may have.
const MOST_CATEGORIES: usize = 100;
/// Different values of a column that are counted.
const MOST_SEEN: usize = 1 << 16;
/// Different numbers up to which a label is taken for a class.
const FEW_NUMBERS: usize = 20;
/// Scales from the centre beyond which a number counts as that far: one wild entry must not drown a row.
const FARTHEST: f64 = 8.0;
/// The same where noise has told the scales: one that is too small puts every number of its column far out.
const FARTHEST_FOUND: f64 = 3.0;
/// Buckets that words are hashed into.
pub(super) const BUCKETS: usize = 1024;

/// How a row of a table becomes features and a target. Whatever is written in it is public.
///
/// ```
/// use dpmf_train::data::Schema;
///
/// let schema: Schema = serde_json::from_str(r#"{
///     "features": [
///         {"column": "age", "kind": "number", "center": 40, "scale": 12},
///         {"column": "city", "kind": "category", "values": ["Bonn", "Köln"]}
///     ],
///     "label": {"column": "bought", "kind": "class", "values": ["no", "yes"]}
/// }"#)?;
/// assert_eq!((schema.width(), schema.classes().map(|c| c.len())), (3, Some(2)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Schema {
    /// The features, in order.
    pub features: Vec<Feature>,
    /// What is predicted.
    pub label: Label,
    /// How numbers are written.
    #[serde(default, skip_serializing_if = "Decimal::is_plain")]
    pub decimal: Decimal,
    /// Noise has told what most rows of a column hold: what is of no such kind counts as missing, in training as in
    /// predictions.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub found: bool,
}

/// A column that a model reads.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "kind", deny_unknown_fields)]
pub enum Feature {
    /// One feature, `(x − center) / scale`, at most 8 from zero (3 in a schema that was found); 0 where there is none.
    Number {
        /// Name of the column.
        column: String,
        /// What becomes 0.
        center: f64,
        /// What becomes 1, from there.
        scale: f64,
    },
    /// A date as days since 1970-01-01, scaled as a number is, and as more features where parts of it are asked for.
    Date {
        /// Name of the column.
        column: String,
        /// The day that becomes 0.
        center: f64,
        /// Days from there that become 1.
        scale: f64,
        /// Parts that become categories of their own.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        parts: Vec<DatePart>,
    },
    /// One feature for each value, 1 for the one that is there; all 0 for any other.
    Category {
        /// Name of the column.
        column: String,
        /// The values.
        values: Vec<String>,
    },
    /// Words hashed into buckets, as a vector of length 1: a fixed hash, so no word of the data is kept.
    Words {
        /// Name of the column.
        column: String,
        /// Number of features.
        buckets: usize,
    },
}

/// A part of a date, as categories.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DatePart {
    /// The hour of the day, in Greenwich: 24 features.
    Hour,
    /// The day of the week: 7 features.
    Weekday,
}

impl DatePart {
    /// Number of features.
    pub fn width(self) -> usize {
        match self {
            Self::Hour => 24,
            Self::Weekday => 7,
        }
    }

    /// The feature that is 1.
    fn place(self, days: f64) -> usize {
        match self {
            Self::Hour => ((days - days.floor()) * 24.0 + 1e-9) as usize % 24,
            // 1970-01-01 was a Thursday, and weeks begin on Monday.
            Self::Weekday => (days.floor() as i64 + 3).rem_euclid(7) as usize,
        }
    }
}

/// The column that a model predicts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "kind", deny_unknown_fields)]
pub enum Label {
    /// One of several values.
    Class {
        /// Name of the column.
        column: String,
        /// The values.
        values: Vec<String>,
        /// The one of them that stands for every other value.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        other: Option<String>,
    },
    /// A number, learned as `(y − center) / scale`.
    Number {
        /// Name of the column.
        column: String,
        /// What becomes 0.
        center: f64,
        /// What becomes 1, from there.
        scale: f64,
    },
}

/// What the label of a table is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Predict {
    /// One of several values.
    Classification,
    /// A number.
    Regression,
}

/// In which columns something was filled in while rows became features. In how many rows nobody needs to know, and ε
/// would not cover.
#[derive(Debug, Default)]
pub(super) struct Filled {
    odd: BTreeSet<String>,
    missing: BTreeSet<String>,
    unknown: BTreeSet<String>,
    far: BTreeSet<String>,
    /// How far a number may be from the centre, in scales.
    farthest: f64,
}

impl Filled {
    /// Sentences for whoever holds the data.
    pub(super) fn remarks(&self) -> Vec<String> {
        let Self { odd, missing, unknown, far, farthest } = self;
        let kinds: [(&BTreeSet<String>, String, String); 4] = [
            (odd, "a value of the wrong kind".into(), "counts as the middle".into()),
            (missing, "nothing".into(), "counts as the middle".into()),
            (unknown, "an unknown value".into(), "counts as none of them".into()),
            (
                far,
                format!("a number more than {farthest} scales from the centre"),
                format!("counts as {farthest}"),
            ),
        ];
        let of = |(columns, what, counts): &(&BTreeSet<String>, String, String)| {
            let sentence =
                move |column: &String| format!("column `{column}` has {what} in some rows, which {counts}");
            columns.iter().map(sentence).collect::<Vec<_>>()
        };
        kinds.iter().flat_map(of).collect()
    }
}

/// A finite number, if the field is one.
fn number(cell: Cell<'_>) -> Option<f64> {
    cell?.trim().parse().ok().filter(|value: &f64| value.is_finite())
}

/// Whether a field says a known value: the same text, or the same truth or number written otherwise, as other formats do.
fn same(value: &str, text: &str) -> bool {
    let truth = |text: &str| ["true", "false"].contains(&text.to_ascii_lowercase().as_str());
    let equal = |a: &str, b: &str| matches!((number(Some(a)), number(Some(b))), (Some(a), Some(b)) if a == b);
    value == text || (truth(text) && value.eq_ignore_ascii_case(text)) || equal(value, text)
}

/// Place of what a field says among known values.
fn place(values: &[String], text: &str) -> Option<usize> {
    let exact = values.iter().position(|value| value == text);
    exact.or_else(|| values.iter().position(|value| same(value, text)))
}

impl Feature {
    /// Name of the column.
    pub fn column(&self) -> &str {
        match self {
            Self::Number { column, .. }
            | Self::Date { column, .. }
            | Self::Category { column, .. }
            | Self::Words { column, .. } => column,
        }
    }

    /// Number of features it makes.
    pub fn width(&self) -> usize {
        match self {
            Self::Number { .. } => 1,
            Self::Date { parts, .. } => 1 + parts.iter().map(|part| part.width()).sum::<usize>(),
            Self::Category { values, .. } => values.len(),
            Self::Words { buckets, .. } => *buckets,
        }
    }

    fn encode(
        &self,
        cell: Cell<'_>,
        of: &Schema,
        out: &mut Vec<f32>,
        filled: &mut Filled,
    ) -> std::result::Result<(), Fault> {
        let (decimal, lenient) = (of.decimal, of.found);
        let farthest = if of.found { FARTHEST_FOUND } else { FARTHEST };
        filled.farthest = farthest;
        let count = |columns: &mut BTreeSet<String>| {
            if !columns.contains(self.column()) {
                columns.insert(self.column().to_owned());
            }
        };
        match self {
            Self::Number { center, scale, column } => {
                if is_missing(cell) {
                    count(&mut filled.missing);
                    out.push(0.0);
                    return Ok(());
                }
                let Some(value) = decimal.number(cell.unwrap_or("")) else {
                    if lenient {
                        count(&mut filled.odd);
                        out.push(0.0);
                        return Ok(());
                    }
                    return Err(not_a_number(&format!("`{column}`"), cell, decimal));
                };
                let scaled = (value - center) / scale;
                if scaled.abs() > farthest {
                    count(&mut filled.far);
                }
                out.push(scaled.clamp(-farthest, farthest) as f32);
            }
            Self::Date { center, scale, column, parts } => {
                let start = out.len();
                out.resize(start + self.width(), 0.0);
                if is_missing(cell) {
                    count(&mut filled.missing);
                    return Ok(());
                }
                let Some(days) = date(cell.unwrap_or("")) else {
                    if lenient {
                        count(&mut filled.odd);
                        return Ok(());
                    }
                    let text = cell.unwrap_or("");
                    return Err(format!(
                        "`{column}` is {text:?}, which is not a date such as 2024-05-31 or 2024-05-31T12:00:00Z"
                    ));
                };
                let scaled = (days - center) / scale;
                if scaled.abs() > farthest {
                    count(&mut filled.far);
                }
                out[start] = scaled.clamp(-farthest, farthest) as f32;
                let mut at = start + 1;
                for part in parts {
                    out[at + part.place(days)] = 1.0;
                    at += part.width();
                }
            }
            Self::Category { values, .. } => {
                let found = cell.and_then(|text| place(values, text.trim()));
                match found {
                    None if is_missing(cell) => count(&mut filled.missing),
                    None => count(&mut filled.unknown),
                    Some(_) => (),
                }
                out.extend((0..values.len()).map(|at| if found == Some(at) { 1.0 } else { 0.0 }));
            }
            Self::Words { buckets, .. } => {
                let start = out.len();
                out.resize(start + buckets, 0.0);
                let counts = &mut out[start..];
                Tokens::Words.split(cell.unwrap_or(""), |word| counts[bucket(word, *buckets)] += 1.0);
                let length = counts.iter().map(|x| x * x).sum::<f32>().sqrt();
                if length > 0.0 {
                    counts.iter_mut().for_each(|x| *x /= length);
                } else {
                    count(&mut filled.missing);
                }
            }
        }
        Ok(())
    }
}

/// What is said of a field that should be a number.
fn not_a_number(name: &str, cell: Cell<'_>, decimal: Decimal) -> Fault {
    let text = cell.unwrap_or("");
    match Field::read(cell, decimal) {
        Field::Formatted => format!("{name} is {text:?}, a number that is written in another way"),
        _ => format!("{name} is {text:?}, which is not a number"),
    }
}

/// The bucket of a word.
fn bucket(word: &str, buckets: usize) -> usize {
    let mut leading = [0; 8];
    leading.copy_from_slice(&digest("words", "bucket", word)[..8]);
    (u64::from_be_bytes(leading) % buckets.max(1) as u64) as usize
}

impl Label {
    /// Name of the column.
    pub fn column(&self) -> &str {
        match self {
            Self::Class { column, .. } | Self::Number { column, .. } => column,
        }
    }

    /// The class of a field.
    pub(super) fn class(&self, cell: Cell<'_>) -> std::result::Result<u16, Fault> {
        let Self::Class { column, values, other } = self else { return Err("the label is a number".into()) };
        let text = cell.unwrap_or("").trim();
        let missing = is_missing(cell);
        let rest = || other.as_ref().filter(|_| !missing).and_then(|other| place(values, other));
        place(values, text).or_else(rest).map(|at| at as u16).ok_or_else(|| {
            if missing {
                return format!("the label `{column}` is missing");
            }
            let known = if values.len() <= 10 { format!(" {values:?}") } else { String::new() };
            format!(
                "the label `{column}` is {text:?}, which is not among the {} classes{known}",
                values.len()
            )
        })
    }

    /// The number of a field, in its own scale.
    pub(super) fn value(&self, cell: Cell<'_>, decimal: Decimal) -> std::result::Result<f32, Fault> {
        let Self::Number { column, center, scale } = self else { return Err("the label is a class".into()) };
        if is_missing(cell) {
            return Err(format!("the label `{column}` is missing"));
        }
        let Some(value) = decimal.number(cell.unwrap_or("")) else {
            return Err(not_a_number(&format!("the label `{column}`"), cell, decimal));
        };
        match ((value - center) / scale) as f32 {
            scaled if scaled.is_finite() => Ok(scaled),
            _ => Err(format!(
                "the label `{column}` is {value:e}, which is too far from {center:e} to be learned"
            )),
        }
    }
}

impl Schema {
    /// Reads a schema from a JSON file.
    ///
    /// Errors: a file that cannot be read, or whose schema makes no sense.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(|source| Error::Io { path: path.into(), source })?;
        let schema: Self = serde_json::from_str(&text).map_err(|error| Error::Data {
            path: path.into(),
            message: format!("it is not a valid schema: {error}"),
        })?;
        schema.checked().map_err(|error| Error::Data { path: path.into(), message: error.to_string() })
    }

    /// The schema itself if it makes sense.
    ///
    /// Errors: no features, or too many; a scale that is not positive and finite; a value given twice; fewer than two
    /// classes;
    /// a label among the features.
    pub fn checked(self) -> Result<Self> {
        let refuse = |name: &str, rule| Err(Error::argument("schema", format!("{name:?}"), rule));
        let distinct = |values: &[String]| {
            let mut sorted: Vec<&String> = values.iter().collect();
            sorted.sort_unstable();
            sorted.windows(2).all(|pair| pair[0] != pair[1])
        };
        let scaled = |center: f64, scale: f64| center.is_finite() && scale.is_finite() && scale > 0.0;
        for (at, feature) in self.features.iter().enumerate() {
            let name = feature.column();
            if name == self.label.column() {
                return refuse(name, "the label cannot be a feature");
            }
            if self.features[..at].iter().any(|other| other.column() == name) {
                return refuse(name, "a column can be a feature only once");
            }
            match feature {
                Feature::Number { center, scale, .. } | Feature::Date { center, scale, .. }
                    if !scaled(*center, *scale) =>
                {
                    return refuse(name, "its centre must be finite, and its scale positive and finite");
                }
                Feature::Category { values, .. } if values.is_empty() || !distinct(values) => {
                    return refuse(name, "it needs at least one value, and none twice");
                }
                Feature::Words { buckets, .. } if !(1..=1 << 20).contains(buckets) => {
                    return refuse(name, "it needs between 1 and 2²⁰ buckets");
                }
                _ => (),
            }
        }
        if self.features.is_empty() || self.width() > 1 << 24 {
            return refuse("features", "there must be at least one, and at most 2²⁴ of them");
        }
        match &self.label {
            Label::Number { column, center, scale } if !scaled(*center, *scale) => {
                refuse(column, "its centre must be finite, and its scale positive and finite")
            }
            Label::Class { column, values, other: Some(other) } if !values.contains(other) => {
                refuse(column, "the class that stands for others must be one of the classes")
            }
            Label::Class { column, values, .. }
                if !(2..=1 << 16).contains(&values.len()) || !distinct(values) =>
            {
                refuse(column, "a label needs at least two classes, none of them twice")
            }
            _ => Ok(self),
        }
    }

    /// Number of features that a row becomes.
    pub fn width(&self) -> usize {
        self.features.iter().map(Feature::width).sum()
    }

    /// The classes; nothing where a number is predicted.
    pub fn classes(&self) -> Option<&[String]> {
        match &self.label {
            Label::Class { values, .. } => Some(values),
            Label::Number { .. } => None,
        }
    }

    /// Centre and scale of a number that is predicted.
    pub fn scale(&self) -> Option<(f64, f64)> {
        match self.label {
            Label::Class { .. } => None,
            Label::Number { center, scale, .. } => Some((center, scale)),
        }
    }

    /// Columns of the features.
    pub fn columns(&self) -> Vec<&str> {
        self.features.iter().map(Feature::column).collect()
    }

    /// The features of a row, whose fields `cell` gives by column.
    ///
    /// Errors: what is wrong with the row.
    pub fn row(&self, cell: impl Fn(&str) -> Option<String>) -> std::result::Result<Vec<f32>, String> {
        let cells: Vec<Option<String>> = self.features.iter().map(|feature| cell(feature.column())).collect();
        let mut features = Vec::with_capacity(self.width());
        let cells: Vec<Cell<'_>> = cells.iter().map(Option::as_deref).collect();
        self.encode(&cells, &mut features, &mut Filled::default())?;
        Ok(features)
    }

    /// Appends the features of a row, whose fields are those of [`columns`](Self::columns); nothing if one is refused.
    pub(super) fn encode(
        &self,
        cells: &[Cell<'_>],
        out: &mut Vec<f32>,
        filled: &mut Filled,
    ) -> std::result::Result<(), Fault> {
        let start = out.len();
        for (feature, cell) in self.features.iter().zip(cells) {
            if let Err(fault) = feature.encode(*cell, self, out, filled) {
                out.truncate(start);
                return Err(fault);
            }
        }
        Ok(())
    }
}

/// What is seen of a column among the users that a schema is made of.
#[derive(Debug, Default)]
struct Seen {
    numbers: usize,
    dates: usize,
    formatted: usize,
    whole: bool,
    sum: f64,
    sum_sq: f64,
    values: HashMap<String, u64>,
}

impl Seen {
    fn add(&mut self, cell: Cell<'_>, decimal: Decimal) {
        let text = cell.unwrap_or("").trim();
        match Field::read(cell, decimal) {
            Field::Missing => return,
            Field::Number(value) => {
                self.whole = (self.numbers == 0 || self.whole) && value.fract() == 0.0;
                self.numbers += 1;
                self.sum += value;
                self.sum_sq += value * value;
            }
            // A column of dates has no numbers, so both may share the sums.
            Field::Date(days) => {
                self.dates += 1;
                self.sum += days;
                self.sum_sq += days * days;
            }
            Field::Formatted => self.formatted += 1,
            Field::Word(_) => (),
        }
        if let Some(count) = self.values.get_mut(text) {
            *count += 1;
        } else if self.values.len() <= MOST_SEEN {
            self.values.insert(text.into(), 1);
        }
    }

    fn rows(&self) -> usize {
        self.values.values().sum::<u64>() as usize
    }

    fn is_numeric(&self) -> bool {
        self.numbers > 0 && self.numbers >= self.rows()
    }

    fn is_dated(&self) -> bool {
        self.dates > 0 && self.dates >= self.rows()
    }

    /// Mean and standard deviation, or 1 where all are the same.
    fn scale(&self) -> (f64, f64) {
        let count = self.numbers.max(self.dates).max(1) as f64;
        let center = self.sum / count;
        let variance = (self.sum_sq / count - center * center).max(0.0);
        let scale = variance.sqrt();
        (center, if scale > 1e-12 * center.abs().max(1e-300) { scale } else { 1.0 })
    }

    /// The values in the order of code points.
    fn sorted(&self) -> Vec<String> {
        let mut values: Vec<String> = self.values.keys().cloned().collect();
        values.sort_unstable();
        values
    }
}

/// Makes a schema from rows of some users.
pub(super) struct Draft<'a> {
    decimal: Decimal,
    parts: &'a [DatePart],
    features: Vec<(&'a str, bool, Seen)>,
    label: (&'a str, Seen),
    rows: usize,
}

impl<'a> Draft<'a> {
    /// For these columns of features, each of words or not, and this label.
    pub(super) fn new(
        features: &[(&'a str, bool)],
        label: &'a str,
        decimal: Decimal,
        parts: &'a [DatePart],
    ) -> Self {
        let features = features.iter().map(|&(column, words)| (column, words, Seen::default()));
        Self { decimal, parts, features: features.collect(), label: (label, Seen::default()), rows: 0 }
    }

    /// Looks at a row: the fields of the features, and of the label.
    pub(super) fn add(&mut self, features: &[Cell<'_>], label: Cell<'_>) {
        self.rows += 1;
        for ((_, words, seen), cell) in self.features.iter_mut().zip(features) {
            if !*words {
                seen.add(*cell, self.decimal);
            }
        }
        self.label.1.add(label, self.decimal);
    }

    /// The schema; `predict` says what the label is, and `classes` which ones it has. Both are guessed where they do not.
    pub(super) fn finish(
        self,
        predict: Option<Predict>,
        classes: Option<&[String]>,
    ) -> std::result::Result<Schema, Remark> {
        let (rows, decimal, parts) = (self.rows, self.decimal, self.parts);
        let of = |(column, words, seen): (&str, bool, Seen)| {
            let column = column.to_owned();
            if words {
                return Ok(Feature::Words { column, buckets: BUCKETS });
            }
            if seen.is_numeric() {
                let (center, scale) = seen.scale();
                return Ok(Feature::Number { column, center, scale });
            }
            if seen.is_dated() {
                let (center, scale) = seen.scale();
                return Ok(Feature::Date { column, center, scale, parts: parts.to_vec() });
            }
            if 2 * seen.formatted > seen.rows() {
                return Err(Remark::hinted(
                    format!(
                        "column `{column}` holds numbers that are written as in \"1,234.50\", \"€ 3,20\" or \"12 %\""
                    ),
                    Hint::Decimal,
                ));
            }
            match seen.values.len() {
                0 => Err(Remark::from(format!(
                    "column `{column}` has no value in any of the {rows} rows that scales come from"
                ))),
                many if many > MOST_CATEGORIES => Err(Remark::hinted(
                    format!("column `{column}` has {many} different values, too many for categories"),
                    Hint::LeaveOutOrDescribe,
                )),
                _ => Ok(Feature::Category { column, values: seen.sorted() }),
            }
        };
        let features = self.features.into_iter().map(of).collect::<std::result::Result<Vec<_>, Remark>>()?;
        let (column, seen) = self.label;
        let column = column.to_owned();
        let predict =
            predict.unwrap_or(if seen.is_numeric() && (!seen.whole || seen.values.len() > FEW_NUMBERS) {
                Predict::Regression
            } else {
                Predict::Classification
            });
        let label = match predict {
            _ if classes.is_some() => {
                Label::Class { column, values: classes.unwrap_or_default().to_vec(), other: None }
            }
            Predict::Regression if seen.is_numeric() => {
                let (center, scale) = seen.scale();
                Label::Number { column, center, scale }
            }
            Predict::Regression => {
                let other = seen.sorted().into_iter().find(|value| number(Some(value)).is_none());
                let fault = match other {
                    Some(value) => {
                        format!("the label `{column}` is {value:?} in a row, which is not a number")
                    }
                    None => format!("the label `{column}` has no value in any of {rows} rows"),
                };
                return Err(fault.into());
            }
            Predict::Classification if seen.values.len() == 1 => {
                let only = seen.sorted().remove(0);
                return Err(Remark::hinted(
                    format!(
                        "the label `{column}` is {only:?} in all rows that were examined, so there is nothing to learn"
                    ),
                    Hint::Classes,
                ));
            }
            Predict::Classification => Label::Class { column, values: seen.sorted(), other: None },
        };
        Schema { features, label, decimal, found: false }.checked().map_err(|error| error.to_string().into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draft(rows: &[[&str; 4]], predict: Option<Predict>) -> std::result::Result<Schema, String> {
        let mut draft = Draft::new(&[("a", false), ("b", false), ("c", true)], "y", Decimal::Plain, &[]);
        for [a, b, c, y] in rows {
            draft.add(&[Some(a), Some(b), Some(c)], Some(y));
        }
        draft.finish(predict, None).map_err(|fault| fault.to_string())
    }

    #[test]
    fn columns_become_numbers_categories_and_words() {
        let schema =
            draft(&[["1", "x", "hello you", "no"], ["3", "y", "", "yes"], ["", "x", "you", "no"]], None)
                .unwrap();
        assert_eq!(schema.features[0], Feature::Number { column: "a".into(), center: 2.0, scale: 1.0 });
        assert_eq!(
            schema.features[1],
            Feature::Category { column: "b".into(), values: vec!["x".into(), "y".into()] }
        );
        assert_eq!(schema.classes().unwrap(), ["no", "yes"]);
        let (mut out, mut filled) = (Vec::new(), Filled::default());
        schema.encode(&[Some(" 4 "), Some("z"), Some("You you are")], &mut out, &mut filled).unwrap();
        assert_eq!((out.len(), &out[..3]), (3 + BUCKETS, &[2.0, 0.0, 0.0][..]));
        let mut words: Vec<f32> = out[3..].iter().copied().filter(|x| *x > 0.0).collect();
        words.sort_unstable_by(f32::total_cmp);
        assert_eq!(words, [1.0 / 5_f32.sqrt(), 2.0 / 5_f32.sqrt()]);
        schema.encode(&[Some("1e9"), Some("y"), None], &mut out, &mut filled).unwrap();
        assert_eq!(out[3 + BUCKETS..][..3], [8.0, 0.0, 1.0]);
        let remarks = filled.remarks().join("\n");
        for part in [
            "`c` has nothing in some rows, which",
            "`b` has an unknown value in some rows",
            "`a` has a number more than 8 scales",
        ] {
            assert!(remarks.contains(part), "{remarks}");
        }
        // Where noise has told the scale, a number is not let as far out.
        let found = Schema { found: true, ..schema.clone() };
        let mut filled = Filled::default();
        found.encode(&[Some("1e9"), Some("y"), None], &mut out, &mut filled).unwrap();
        assert_eq!(out[2 * (3 + BUCKETS)..][..3], [3.0, 0.0, 1.0]);
        assert!(filled.remarks().join("\n").contains("`a` has a number more than 3 scales"));
        let before = out.len();
        let fault = schema.encode(&[Some("old"), Some("y"), None], &mut out, &mut filled).unwrap_err();
        assert_eq!((fault.as_str(), out.len()), ("`a` is \"old\", which is not a number", before));
    }

    #[test]
    fn truths_and_numbers_are_known_however_they_are_written() {
        let values = ["False", "True", "1", "10"].map(String::from);
        let at = |text| place(&values, text);
        assert_eq!(
            [at("true"), at("FALSE"), at("1.0"), at("1e1"), at("yes"), at("")],
            [Some(1), Some(0), Some(2), Some(3), None, None]
        );
        // The text itself comes first.
        assert_eq!(place(&["1.0", "1"].map(String::from), "1"), Some(1));
    }

    #[test]
    fn labels_are_guessed_and_can_be_said() {
        let numbers = |label: fn(i32) -> String| -> Vec<[String; 4]> {
            (0..40).map(|i| [i.to_string(), "x".into(), "w".into(), label(i)]).collect()
        };
        let schema = |rows: Vec<[String; 4]>, predict| {
            let rows: Vec<[&str; 4]> = rows.iter().map(|row| row.each_ref().map(String::as_str)).collect();
            draft(&rows, predict)
        };
        assert_eq!(
            schema(numbers(|i| (i % 3).to_string()), None).unwrap().classes().unwrap(),
            ["0", "1", "2"]
        );
        assert!(schema(numbers(|i| i.to_string()), None).unwrap().classes().is_none());
        assert!(schema(numbers(|i| format!("{}.5", i % 3)), None).unwrap().classes().is_none());
        let chosen = schema(numbers(|i| (i % 3).to_string()), Some(Predict::Regression)).unwrap();
        let (center, scale) = chosen.scale().unwrap();
        assert!(
            (center - 0.975).abs() < 1e-12 && (scale - 0.674375_f64.sqrt()).abs() < 1e-12,
            "{center} {scale}"
        );
        let fault = schema(numbers(|i| format!("n{i}")), Some(Predict::Regression)).unwrap_err();
        assert!(fault.contains("which is not a number"), "{fault}");
        let fault = schema(numbers(|_| "same".into()), None).unwrap_err();
        assert!(fault.contains("nothing to learn"), "{fault}");
    }

    #[test]
    fn a_label_beyond_single_precision_is_refused() {
        let label = Label::Number { column: "y".into(), center: 0.0, scale: 1e-3 };
        let value = |text| label.value(Some(text), Decimal::Plain);
        assert_eq!(value("2"), Ok(2000.0));
        assert!(value("1e300").unwrap_err().contains("too far"));
        assert!(value("inf").unwrap_err().contains("not a number"));
        assert!(value("1,5").unwrap_err().contains("written in another way"));
        assert_eq!(label.value(Some("1,5"), Decimal::Comma), Ok(1500.0));
    }

    #[test]
    fn dates_become_days_and_parts_of_them() {
        let text = r#"{"features": [{"column": "d", "kind": "date", "center": 19844, "scale": 2, "parts": ["hour", "weekday"]}],
            "label": {"column": "y", "kind": "class", "values": ["a", "b", "rest"], "other": "rest"}}"#;
        let schema: Schema = serde_json::from_str::<Schema>(text).unwrap().checked().unwrap();
        assert_eq!(schema.width(), 32);
        // 2024-05-01 is day 19844, a Wednesday.
        let row = schema.row(|_| Some("2024-05-01T18:00:00Z".into())).unwrap();
        let ones: Vec<usize> = (1..32).filter(|at| row[*at] == 1.0).collect();
        assert_eq!((row[0], ones), (0.375, vec![1 + 18, 25 + 2]));
        assert_eq!(schema.row(|_| None).unwrap(), [0.0; 32]);
        assert!(schema.row(|_| Some("yesterday".into())).unwrap_err().contains("not a date"));
        let class = |text| schema.label.class(Some(text));
        assert_eq!((class("b"), class("zzz")), (Ok(1), Ok(2)));
        assert!(class("").unwrap_err().contains("missing"));
        assert!(
            serde_json::from_str::<Schema>(&text.replace("\"other\": \"rest\"", "\"other\": \"c\""))
                .unwrap()
                .checked()
                .is_err()
        );
    }

    #[test]
    fn columns_without_meaning_are_refused() {
        let many: Vec<[String; 4]> =
            (0..200).map(|i| ["1".into(), format!("name {i}"), String::new(), (i % 2).to_string()]).collect();
        let many: Vec<[&str; 4]> = many.iter().map(|row| row.each_ref().map(String::as_str)).collect();
        assert!(draft(&many, None).unwrap_err().contains("`b` has 200 different values"));
        assert!(
            draft(&[["", "x", "", "a"], ["NA", "y", "", "b"]], None)
                .unwrap_err()
                .contains("`a` has no value")
        );
    }

    #[test]
    fn schemas_that_make_no_sense_are_refused() {
        let label = r#""label": {"column": "y", "kind": "class", "values": ["a", "b"]}"#;
        let read = |text: &str| {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("schema.json");
            std::fs::write(&path, text).unwrap();
            Schema::read(&path).map_err(|error| error.to_string())
        };
        let number = r#"{"column": "a", "kind": "number", "center": 0, "scale": 1}"#;
        assert!(read(&format!("{{\"features\": [{number}], {label}}}")).is_ok());
        for (features, message) in [
            ("[]".to_owned(), "at least one"),
            (format!("[{number}, {number}]"), "once"),
            (number.replace("\"a\"", "\"y\"").replacen('{', "[{", 1) + "]", "cannot be a feature"),
            (format!("[{}]", number.replace("1}", "0}")), "positive and finite"),
            (r#"[{"column": "a", "kind": "category", "values": ["u", "u"]}]"#.into(), "none twice"),
            (r#"[{"column": "a", "kind": "words", "buckets": 0}]"#.into(), "buckets"),
            (r#"[{"column": "a", "kind": "word"}]"#.into(), "it is not a valid schema"),
        ] {
            let error = read(&format!("{{\"features\": {features}, {label}}}")).unwrap_err();
            assert!(error.contains(message) && error.contains("schema.json"), "{error}");
        }
    }
}
