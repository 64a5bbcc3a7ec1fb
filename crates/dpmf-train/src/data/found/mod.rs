//! A schema that is found in private: classes, categories and scales with noise, as a part of the same budget as training.
//!
//! There are two looks at the data, each a Gaussian release ([`noise`]). The first counts users in the cells of a grid that is fixed
//! before anybody looks ([`survey`], with the argument for its sensitivity). It tells what a column holds, which words are
//! frequent, and roughly where numbers lie. The second adds up, for each column of numbers, how far along that range each user is, and
//! the square of it: two sums of norm at most 1 together, times weights whose squares add up to at most 1. With many users it is
//! repeated on a closer range. The μ² of all looks add up to that of the schema; what words add is a δ of its own. Everything else
//! ([`reading`]) is computed from what was released and from public numbers: columns, declared types, and how many users there
//! are.

mod noise;
mod reading;
mod survey;
mod templates;

#[cfg(test)]
mod audit;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

use dpmf::accounting::{ExtraRelease, PrivacyUnit, gaussian};
use dpmf::disk::{self, Access, DiskPath};
use serde::{Deserialize, Serialize};
use std::io::Write;

use super::fields::{Decimal, Field};
use super::rows::Declared;
use super::schema::BUCKETS;
use super::{DatePart, Feature, Label, Predict, Schema};
use crate::run::KeySource;
use crate::{Error, Hint, Remark, Result};
use noise::{Once, Releases};
use reading::{Classes, Kind, Meant, Range, Released, closer, moments, rough, scaled};
use survey::{Survey, WHOLE_CELLS, Wanted, Weights};
use templates::{COARSE_CELLS, Family};

/// What a label has of the first look, next to all features together.
const LABEL: f64 = 0.6;
/// Part of the μ² that the first look has.
const FIRST: f64 = 0.6;
/// Least and largest share of the budget for a schema where nothing is said.
const SHARES: (f64, f64) = (0.05, 0.4);
/// Share of the users that a word is to have in order to be revealed, if the budget allows.
const TOLD: f64 = 0.2;
/// What every look leaves of its μ, so that all of them together, each rounded up, stay within that of the schema.
const ROUNDED: f64 = 1.0 - 1e-12;
/// Users over the deviation of the noise from which a second look is repeated on a closer range.
const CLEAR: f64 = 60.0;
/// Noise of the second look, as a share of the users, beyond which it is not taken.
const UNCLEAR: f64 = 0.1;
/// Most users that are counted, the first ones: sums of more might not be exact.
const MOST_USERS: usize = 1 << 20;
/// Users over the noise in a cell of a feature below which its numbers are counted in coarse cells.
const FINE: f64 = 20.0;
/// Share of the users with one word from which it may be that of all.
const MOST: f64 = 0.9;
/// Words of a usual group of classes, mostly.
const GROUP_CELLS: usize = 2;

const FOUND: &str = "schema.json";
const NOTES: &str = "notes.json";

/// A column whose meaning is to be found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Column {
    pub(super) name: String,
    /// A text, whose words are hashed: nothing is to be found.
    pub(super) text: bool,
    pub(super) declared: Option<Declared>,
}

/// What is to be found, and what it may cost.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Search {
    pub(super) features: Vec<Column>,
    pub(super) label: String,
    pub(super) predict: Option<Predict>,
    pub(super) classes: Option<Vec<String>>,
    pub(super) decimal: Decimal,
    pub(super) date_parts: Vec<DatePart>,
    pub(super) unit: PrivacyUnit,
    pub(super) beside: ExtraRelease,
    /// The file, for messages.
    #[serde(skip)]
    pub(super) table: PathBuf,
}

/// A schema with what is to be said of it.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Found {
    pub(super) schema: Schema,
    pub(super) notes: Vec<String>,
    pub(super) remarks: Vec<Remark>,
}

/// What is kept beside a schema.
#[derive(Serialize, Deserialize)]
struct Notes {
    notes: Vec<String>,
    remarks: Vec<Kept>,
}

/// A remark on disk.
#[derive(Serialize, Deserialize)]
struct Kept {
    text: String,
    hint: Option<String>,
}

impl Found {
    /// The schema that was found in a directory, if it was.
    ///
    /// Errors: files that are damaged.
    pub(super) fn read(folder: &Path) -> Result<Option<Self>> {
        let place = DiskPath::from(folder);
        if !place.join(FOUND).exists()? {
            return Ok(None);
        }
        let damaged = |error: serde_json::Error| Error::Run {
            path: folder.into(),
            message: format!("what was found there is damaged: {error}"),
        };
        let schema: Schema = serde_json::from_slice(&place.join(FOUND).read()?).map_err(damaged)?;
        let Notes { notes, remarks } = serde_json::from_slice(&place.join(NOTES).read()?).map_err(damaged)?;
        let hint =
            |name: Option<String>| Hint::ALL.into_iter().find(|hint| Some(format!("{hint:?}")) == name);
        let remarks = remarks.into_iter().map(|Kept { text, hint: name }| Remark { text, hint: hint(name) });
        Ok(Some(Self { schema: schema.checked()?, notes, remarks: remarks.collect() }))
    }

    /// Writes it down, the schema last.
    fn save(&self, folder: &Path) -> Result<()> {
        let place = DiskPath::from(folder);
        let kept = |remark: &Remark| Kept {
            text: remark.text.clone(),
            hint: remark.hint.map(|hint| format!("{hint:?}")),
        };
        let notes = Notes { notes: self.notes.clone(), remarks: self.remarks.iter().map(kept).collect() };
        let fault = |error: serde_json::Error| Error::Run { path: folder.into(), message: error.to_string() };
        let notes = serde_json::to_vec_pretty(&notes).map_err(fault)?;
        disk::replace(place.join(NOTES), Access::Owner, |file| file.write_all(&notes))?;
        let schema = serde_json::to_vec_pretty(&self.schema).map_err(fault)?;
        Ok(disk::replace(place.join(FOUND), Access::Owner, |file| file.write_all(&schema))?)
    }
}

/// How the budget is spent: fixed by public numbers.
struct Spending {
    wanted: Vec<Wanted>,
    weights: Weights,
    /// μ of the first look.
    first: f64,
    /// μ of what follows it; nothing where noise would hide what it shows, and the first look has all.
    second: Option<f64>,
    /// Deviations that a word which nobody listed must exceed.
    threshold: f64,
    /// Cells of numbers that are counted as one in a feature.
    width: usize,
}

impl Search {
    fn spending(&self, users: usize) -> Result<Spending> {
        let features = self.features.iter().filter(|column| !column.text).count();
        let mut wanted = vec![Wanted::Feature; features];
        let many = features.max(1) as f64;
        let mut shares = vec![1.0; features];
        let label = match (&self.classes, self.predict) {
            (Some(_), _) => None,
            (None, Some(Predict::Classification)) => Some((Wanted::Classes, LABEL)),
            (None, Some(Predict::Regression)) => Some((Wanted::Scale, 0.5 * LABEL)),
            (None, None) => Some((Wanted::Label, LABEL)),
        };
        if let Some((label, share)) = label {
            wanted.push(label);
            shares.push((share * many).max(1.0));
        }
        shares.push(0.05 * many);
        let words = wanted.iter().filter(|wanted| **wanted != Wanted::Scale).count().max(1);
        // Rounded down, so that all columns together stay within δ.
        let each = (self.beside.delta / words as f64).next_down();
        // Where not all are counted, one that is added comes in place of another.
        let moved = if users >= MOST_USERS { 2.0 } else { 1.0 };
        let mu = self.beside.checked()?.mu * ROUNDED / moved;
        let (first, second) = (mu * FIRST.sqrt(), mu * (1.0 - FIRST).sqrt());
        // At worst all columns hold numbers.
        let noise = (2.0 * wanted.len() as f64).sqrt() / second;
        let looks = noise <= UNCLEAR * users as f64;
        let weights = Weights::new(&shares)?;
        let first = if looks { first } else { mu };
        let weight = weights.0[0] as f64 / Weights::UNITS;
        let width = if first * weight * (users as f64) < FINE { COARSE_CELLS } else { 1 };
        Ok(Spending {
            weights,
            wanted,
            width,
            first,
            second: looks.then_some(second),
            threshold: gaussian::tail_deviations(each)?,
        })
    }

    fn fault(&self, message: String, hint: Hint) -> Error {
        Error::Data { path: self.table.clone(), message }.with_hint(hint)
    }

    /// Refuses a search that noise would hide all of, before anything is spent.
    ///
    /// Errors: too few users.
    pub(super) fn check(&self, users: usize) -> Result<()> {
        let spending = self.spending(users)?;
        let largest = spending.weights.0.iter().max().copied().unwrap_or(1) as f64 / Weights::UNITS;
        let noise = noise::mechanism(spending.first, self.unit)?;
        let deviation = noise.privacy().map_or(f64::INFINITY, |s| s.calibration().noise_std());
        if !spending.wanted.is_empty() && (users as f64) < 3.0 * deviation / largest {
            let unit = self.unit.name();
            let text = format!(
                "{users} {unit}s to train on are too few to find classes and scales in private: the noise alone is as large as {:.0} \
                 of them",
                deviation / largest
            );
            return Err(self.fault(text, Hint::FewUsers));
        }
        Ok(())
    }

    /// Finds the schema from one row of each user, in the order of the features and the label, and keeps it in a directory; or takes what
    /// was found there before.
    ///
    /// Guarantee: a release of [`Search::beside`] about the users, for users added, removed or replaced with none; never made
    /// twice with other rows.
    ///
    /// Errors: those of the disk and the key; other rows than before; too few classes.
    pub(super) fn find(&self, folder: &Path, key: &KeySource, rows: &[Vec<Field>]) -> Result<Found> {
        if let Some(found) = Found::read(folder)? {
            return Ok(found);
        }
        let releases = Releases::open(folder, key, &self.subject(rows)?)?;
        let found = self.look(rows, &|name, mu, sum| releases.release(name, mu, self.unit, sum))?;
        found.save(folder)?;
        Ok(found)
    }

    /// Finds the schema for a process that keeps nothing: the same release, without a directory.
    ///
    /// Guarantee: that of [`find`](Self::find), but for a second call, which is a second release.
    ///
    /// Errors: those of the key and the noise; too few classes.
    pub(super) fn find_once(&self, key: &KeySource, rows: &[Vec<Field>]) -> Result<Found> {
        let once = Once::new(key, &self.subject(rows)?)?;
        self.look(rows, &|name, mu, sum| once.release(name, mu, self.unit, sum))
    }

    /// What a search may cost where nothing is said, as a share of the budget, by public numbers alone: as much as lets a word that
    /// [`TOLD`] of the users have stand out of the noise, within [`SHARES`].
    pub(super) fn usual_share(&self, users: usize, whole_mu: f64) -> Result<f64> {
        let Spending { weights, threshold, .. } = self.spending(users)?;
        let weight = weights.0.first().map_or(1.0, |units| *units as f64 / Weights::UNITS);
        let mu = threshold / (TOLD * users.max(1) as f64 * weight * FIRST.sqrt());
        Ok((mu / whole_mu).powi(2).clamp(SHARES.0, SHARES.1))
    }

    /// Everything that decides what is released.
    fn subject(&self, rows: &[Vec<Field>]) -> Result<Vec<u8>> {
        let fault = |error: serde_json::Error| Error::argument("schema", error, "it cannot be written down");
        let mut bytes = serde_json::to_vec(self).map_err(fault)?;
        for row in rows {
            for field in row {
                let (kind, value): (u8, &[u8]) = match field {
                    Field::Missing => (0, &[]),
                    Field::Number(value) => (1, &value.to_le_bytes()),
                    Field::Date(value) => (2, &value.to_le_bytes()),
                    Field::Formatted => (3, &[]),
                    Field::Word(word) => (4, word.as_bytes()),
                };
                bytes.push(kind);
                bytes.extend((value.len() as u64).to_le_bytes());
                bytes.extend(value);
            }
        }
        Ok(bytes)
    }

    /// The looks and what they show; `release` adds noise of a μ to a sum, under a name.
    fn look(&self, rows: &[Vec<Field>], release: Release<'_>) -> Result<Found> {
        let counted = &rows[..rows.len().min(MOST_USERS)];
        let Spending { wanted, weights, first, second, threshold, width } = self.spending(counted.len())?;
        let users = counted.len() as f64;
        let mut survey = Survey::new(&wanted, &weights, width);
        counted.iter().for_each(|row| survey.add(row));
        let (sum, words) = survey.finish(counted.len());
        let deviation = |mu: f64| -> Result<f64> {
            let noise = noise::mechanism(mu, self.unit)?;
            Ok(noise.privacy().map_or(f64::INFINITY, |statement| statement.calibration().noise_std()))
        };
        let values = release("survey", first, sum)?;
        let (_, least) = Survey::room(counted.len(), wanted.len());
        let released = Released {
            wanted: &wanted,
            weights: &weights,
            values: &values,
            words: &words,
            deviation: deviation(first)?,
            threshold: (threshold, least as f64),
            users,
            width,
        };
        let mut reading = Reading { released: &released, users, remarks: Vec::new() };
        let features: Vec<Option<Kind>> = reading.features(&self.features);
        let label = reading.label(self, wanted.last().copied())?;
        let Reading { mut remarks, .. } = reading;

        // The second look, over the columns of numbers.
        let mut ranges: Vec<(usize, Range)> = Vec::new();
        let at = |index: usize| self.features[..index].iter().filter(|column| !column.text).count();
        for (index, kind) in features.iter().enumerate() {
            if let Some(Kind::Numbers(range) | Kind::Dates(range)) = kind {
                ranges.push((at(index), *range));
            }
        }
        if let LabelKind::Number(range) = &label {
            ranges.push((wanted.len() - 1, *range));
        }
        let scales = match second {
            Some(mu) => self.scales(counted, &ranges, mu, &deviation, release, &released)?,
            None => Vec::new(),
        };
        let scale = |column: usize, range: &Range| {
            scales.iter().find(|(of, _)| *of == column).map_or_else(|| rough(range), |(_, scale)| *scale)
        };

        let mut schema_features = Vec::new();
        for (index, (column, kind)) in self.features.iter().zip(&features).enumerate() {
            let name = column.name.clone();
            schema_features.push(match kind {
                None if column.text => Feature::Words { column: name, buckets: BUCKETS },
                Some(Kind::Numbers(range)) => {
                    let (center, scale) = scale(at(index), range);
                    Feature::Number { column: name, center, scale }
                }
                Some(Kind::Dates(range)) => {
                    let (center, scale) = scale(at(index), range);
                    Feature::Date { column: name, center, scale, parts: self.date_parts.clone() }
                }
                Some(Kind::Words(values)) => Feature::Category { column: name, values: values.clone() },
                _ => continue,
            });
        }
        let column = self.label.clone();
        let label = match label {
            LabelKind::Class(values, other) => Label::Class { column, values, other },
            LabelKind::Number(range) => {
                let (center, scale) = scale(wanted.len() - 1, &range);
                Label::Number { column, center, scale }
            }
        };
        if schema_features.is_empty() {
            let text = "the noise hides every column: there are too few users to find scales and categories in private";
            return Err(self.fault(text.into(), Hint::FewUsers));
        }
        remarks.sort_by(|a, b| a.text.cmp(&b.text));
        let schema =
            Schema { features: schema_features, label, decimal: self.decimal, found: true }.checked()?;
        let unit = self.unit.name();
        let note = format!(
            "Classes, categories and scales were found with noise, from one row of each {unit} that is trained on: they are a part \
             of what ε covers."
        );
        Ok(Found { schema, notes: vec![note], remarks })
    }

    /// Centre and scale of each column of numbers.
    fn scales(
        &self,
        rows: &[Vec<Field>],
        ranges: &[(usize, Range)],
        mu: f64,
        deviation: &dyn Fn(f64) -> Result<f64>,
        release: Release<'_>,
        released: &Released<'_>,
    ) -> Result<Vec<(usize, (f64, f64))>> {
        if ranges.is_empty() {
            return Ok(Vec::new());
        }
        let weights = Weights::new(&vec![1.0; ranges.len()])?;
        let weight = weights.0[0] as f64 / Weights::UNITS;
        let once = deviation(mu)? / weight;
        let looks: usize = if rows.len() as f64 > CLEAR * once { 2 } else { 1 };
        let each = mu / (looks as f64).sqrt();
        let noise = deviation(each)? / weight;
        let mut ranges = ranges.to_vec();
        let mut scales = Vec::new();
        for look in 0..looks {
            let mut sum = vec![0; 2 * ranges.len()];
            for row in rows {
                for (place, (column, range)) in ranges.iter().enumerate() {
                    for (part, moment) in moments(&row[*column], range).into_iter().enumerate() {
                        // Towards zero, so that the norm stays within the weight.
                        sum[2 * place + part] += (moment * weights.0[place] as f64 * (1.0 - 1e-12)) as i64;
                    }
                }
            }
            let values = release(&format!("scales-{look}"), each, sum)?;
            scales.clear();
            for (place, (column, range)) in ranges.iter_mut().enumerate() {
                let sums = [0, 1].map(|part| f64::from(values[2 * place + part]) / weight);
                let present = rows.len() as f64 - released.column(*column).missing().max(0.0);
                let found = scaled(sums, noise, present.max(0.1 * rows.len() as f64), range);
                scales.push((*column, found));
                *range = closer(found.0, found.1, range);
            }
        }
        Ok(scales)
    }
}

/// Adds noise of a μ to a sum, under a name.
type Release<'a> = &'a dyn Fn(&str, f64, Vec<i64>) -> Result<Vec<f32>>;

/// What a label was found to be.
enum LabelKind {
    Class(Vec<String>, Option<String>),
    Number(Range),
}

/// What the first look shows.
struct Reading<'a> {
    released: &'a Released<'a>,
    users: f64,
    remarks: Vec<Remark>,
}

impl Reading<'_> {
    /// The kinds of the features; nothing for texts, and for what is left out.
    fn features(&mut self, columns: &[Column]) -> Vec<Option<Kind>> {
        let together = self.released.together();
        let looked = columns.iter().filter(|column| !column.text).count();
        let faint: Vec<Vec<f64>> = (0..looked)
            .map(|place| self.released.column(place))
            .filter(|counts| counts.clear_kind().is_none())
            .map(|counts| counts.numbers_by_cell())
            .collect();
        let noise = if looked > 0 { self.released.column(0).noise } else { 0.0 };
        let prior = Family::fixed(self.released.width).learned(&faint, noise, self.users);
        let mut place = 0;
        let (mut shared, mut guessed) = (Vec::new(), Vec::new());
        let mut kinds = Vec::new();
        for column in columns {
            if column.text {
                kinds.push(None);
                continue;
            }
            let counts = self.released.column(place);
            let least = self.released.least(place);
            place += 1;
            let name = &column.name;
            let missing = counts.missing();
            if missing > (4.0 * counts.noise).max(0.02 * self.users) {
                let percent = (100.0 * missing / self.users).min(100.0);
                self.remarks.push(
                    format!("column `{name}` has nothing in about {percent:.0} % of the rows, which counts as the middle").into(),
                );
            }
            let is_number = column.declared == Some(Declared::Number);
            let kind = match counts.clear_kind() {
                Some(Kind::Numbers(range)) => Kind::Numbers(range),
                Some(kind) if !is_number => kind,
                _ => {
                    guessed.push(name.as_str());
                    counts.probable_kind(&prior, is_number, together.is_some(), faint.len())
                }
            };
            kinds.push(match kind {
                Kind::Formatted => {
                    self.remarks.push(Remark::hinted(
                        format!("column `{name}` is left out: its numbers seem to be written as in \"1,234.50\", \"€ 3,20\" or \"12 %\""),
                        Hint::Decimal,
                    ));
                    None
                }
                Kind::Unseen => match together {
                    Some(range) => {
                        shared.push(name.as_str());
                        Some(Kind::Numbers(range))
                    }
                    None => {
                        self.remarks.push(Remark::hinted(
                            format!(
                                "column `{name}` is left out: the noise hides its scale, and none of its words has the \
                                 {least:.0} users that are needed to find it privately"
                            ),
                            Hint::Describe,
                        ));
                        None
                    }
                },
                kind => Some(kind),
            });
        }
        let listed = |columns: &[&str]| match columns.len() {
            0..=5 => columns.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", "),
            many => format!("{many} columns"),
        };
        guessed.retain(|name| !shared.contains(name));
        if !guessed.is_empty() {
            self.remarks.push(Remark::hinted(
                format!("there are few users for the noise: the kinds and scales of {} are the most probable ones", listed(&guessed)),
                Hint::Describe,
            ));
        }
        if !shared.is_empty() {
            self.remarks.push(Remark::hinted(
                format!(
                    "the noise hides the scales of {}, which get that of all numbers together",
                    listed(&shared)
                ),
                Hint::Describe,
            ));
        }
        kinds
    }

    /// What the label is; the last column that is looked at, if its meaning is wanted.
    fn label(&mut self, search: &Search, wanted: Option<Wanted>) -> Result<LabelKind> {
        if let Some(classes) = &search.classes {
            return Ok(LabelKind::Class(classes.clone(), None));
        }
        let column = self.released.wanted.len() - 1;
        let counts = self.released.column(column);
        let (name, noise, least) = (&search.label, counts.noise, self.released.least(column));
        let refuse = |text: String, hint| Err(search.fault(text, hint));
        let revealed = counts.revealed();
        let named: f64 = revealed.iter().map(|(_, users)| users).sum();
        let numeric = revealed.iter().all(|(word, _)| word.parse::<f64>().is_ok());
        let (whole, group) = (counts.whole(), counts.group());
        let is_number = match wanted {
            Some(Wanted::Scale) => true,
            Some(Wanted::Classes) => false,
            _ => counts.meant(&revealed, &whole, &group) == Meant::Number,
        };
        if is_number {
            return Ok(LabelKind::Number(counts.scale()));
        }
        let revealed = Classes {
            names: revealed.into_iter().map(|(word, _)| word).collect(),
            users: named,
            evidence: 0.0,
        };
        let cells = revealed.names.len();
        let from_whole = numeric && whole.is_probable() && whole.evidence >= group.evidence;
        // Each cell that was added up has brought its noise, and so has that of missing ones.
        let (Classes { names: mut classes, users: named, .. }, cells) = match cells {
            _ if from_whole && whole.names.len() >= cells.max(2) => (whole, WHOLE_CELLS),
            0 if group.is_probable() => (group, GROUP_CELLS),
            // The other of two usual words may hide; that nobody has it is no less probable where one has nearly all users.
            1 if group.is_probable()
                && named < MOST * self.users
                && group.names.contains(&revealed.names[0]) =>
            {
                (group, GROUP_CELLS)
            }
            cells => (revealed, cells),
        };
        let rest = self.users - counts.missing().max(0.0) - named;
        let other = (rest > 3.0 * noise * (cells as f64 + 1.0).sqrt()).then(|| "other".to_owned());
        if let Some(other) = other.clone().filter(|_| !classes.is_empty()) {
            self.remarks.push(Remark::hinted(
                format!(
                    "labels `{name}` that fewer than about {least:.0} users have count as the class \"other\""
                ),
                Hint::Classes,
            ));
            if !classes.contains(&other) {
                classes.push(other);
            }
        }
        match &classes[..] {
            [] => refuse(
                format!(
                    "no class of the label `{name}` has the {least:.0} users that are needed to find it privately"
                ),
                Hint::Classes,
            ),
            [only] => refuse(
                format!("the label `{name}` is {only:?} in all rows, or the noise hides its other values"),
                Hint::Classes,
            ),
            _ => Ok(LabelKind::Class(classes, other)),
        }
    }
}
