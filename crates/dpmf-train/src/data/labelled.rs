//! Tables whose rows have features and something to predict.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use dpmf::accounting::ExtraRelease;

use super::fields::{Field, is_missing};
use super::found::{Column, Found, Search};
use super::part::{Split, digest};
use super::rows::{Cell, Fault, Malformed, Table};
use super::schema::{BUCKETS, Draft, Filled};
use super::texts::{ROWS, UserKey, filled, name_of, public_users};
use super::{
    Columns, Dataset, Feature, Frame, Label, Meaning, Options, Part, Predict, SampleData, Samples, Schema,
    Target, VocabularyFrom,
};
use crate::run::KeySource;
use crate::{Error, Hint, Remark, Result};

/// The name that keys the hashes: that of a table of texts, so that a user is in the same set of both.
const HASHED: &str = "file";

/// Reads a table with a label.
pub(super) fn file(path: &Path, options: &Options) -> Result<Dataset> {
    if options.tokens.is_some() || options.vocabulary_size.is_some() || options.example_length.is_some() {
        let rule = "tokens, lengths and sizes of a vocabulary are for texts whose next token is predicted, without a label";
        return Err(Error::argument("data", path.display(), rule));
    }
    read(Table::open(path)?, options, None)
}

/// A table in memory with a label, of which nothing has been read yet.
pub struct FrameTable {
    table: Table,
    options: Options,
}

impl FrameTable {
    pub(super) fn new(frame: Frame, options: &Options) -> Self {
        Self { table: Table::of(frame), options: options.clone() }
    }

    /// What finding its schema in private may cost; nothing where there is none to find. See
    /// [`schema_cost`](super::schema_cost).
    ///
    /// Errors: those of [`schema_cost`](super::schema_cost).
    pub fn schema_cost(
        &self,
        mu: impl FnOnce(f64) -> Result<f64>,
        delta: f64,
        share: Option<f64>,
    ) -> Result<Option<ExtraRelease>> {
        match self.options.is_found() {
            true => cost(&self.table, &self.options, mu, delta, share).map(Some),
            false => Ok(None),
        }
    }

    /// What is public of it: see [`outline`](super::outline).
    ///
    /// Errors: those of [`outline`](super::outline).
    pub fn outline(&self, beside: ExtraRelease) -> Result<Dataset> {
        outline_of(&self.table, &self.options, beside)
    }

    /// Finds its schema, a release that costs `beside`, and reads it with that. Nothing is kept: another call is
    /// another release.
    ///
    /// Errors: those of [`open`](super::open); what cannot be told from the noise.
    pub fn find(self, beside: ExtraRelease, key: &KeySource) -> Result<Dataset> {
        let (search, rows) = surveyed(&self.table, &self.options, beside)?;
        let found = search.find_once(key, &rows)?;
        read(self.table, &self.options, Some(found))
    }

    /// Reads it, with the schema that its options say.
    ///
    /// Errors: those of [`open`](super::open).
    pub fn read(self) -> Result<Dataset> {
        read(self.table, &self.options, None)
    }
}

fn read(table: Table, options: &Options, found: Option<Found>) -> Result<Dataset> {
    let who = UserKey::new(&table, options)?;
    let columns = Wanted::new(&table, &options.columns, who.column())?;
    let (Found { schema, mut notes, remarks }, public) = match found {
        Some(found) => (found, 0),
        None => {
            let from = SchemaFrom::new(&table, options)?;
            (from.schema(&table, &columns, options)?, from.public())
        }
    };
    for column in schema.columns().into_iter().chain([schema.label.column()]) {
        table.need(column, None)?;
    }
    notes.insert(0, whose(&who));
    // A row that is a user is known by the columns that were asked for, whatever was found in them.
    let known_by = match schema.found {
        true => columns.features.into_iter().map(|(name, _)| name).collect(),
        false => schema.columns().into_iter().map(str::to_owned).collect(),
    };
    let read = Read { table, schema, notes, remarks, public, options, known_by };
    let decimal = read.schema.decimal;
    match read.schema.label {
        Label::Class { .. } => read.samples(Label::class).map(Dataset::Classes),
        Label::Number { .. } => read.samples(|label, cell| label.value(cell, decimal)).map(Dataset::Numbers),
    }
}

/// What a privacy statement says of who a user is.
fn whose(who: &UserKey<'_>) -> String {
    match who.column() {
        Some(user) => {
            format!(
                "Each value of the column `{user}` counts as one user; a person with two values counts as two users."
            )
        }
        None => ROWS.to_owned(),
    }
}

/// Share of δ for words that one user alone may have.
const WORDS_SHARE: f64 = 0.1;

/// Whether a user is trained on where nobody is public.
fn trains(user: &str, options: &Options) -> bool {
    options.train_all || Part::of(HASHED, user, 0) == Part::Train
}

/// What finding a schema may cost: see [`schema_cost`](super::schema_cost).
pub(super) fn cost(
    table: &Table,
    options: &Options,
    mu: impl FnOnce(f64) -> Result<f64>,
    delta: f64,
    share: Option<f64>,
) -> Result<ExtraRelease> {
    let words = WORDS_SHARE * delta;
    let whole = mu(delta - words)?;
    let mut who = UserKey::new(table, options)?;
    let columns = Wanted::new(table, &options.columns, who.column())?;
    let share = match share {
        Some(share) => share,
        None => {
            let mut users: HashSet<String> = HashSet::new();
            // What is malformed is told of when all rows are read.
            table.each(&columns.wanted(&who), |cells| {
                let user = who.of(cells)?;
                if trains(&user, options) {
                    users.insert(user);
                }
                Ok(())
            })?;
            let search = columns.search(table, options, ExtraRelease { mu: whole, delta: words });
            search.usual_share(users.len().min(options.user_limit()), whole)?
        }
    };
    Ok(ExtraRelease { mu: whole * share.sqrt(), delta: words }.checked()?)
}

/// The same of a file.
pub(super) fn cost_of(
    path: &Path,
    options: &Options,
    mu: impl FnOnce(f64) -> Result<f64>,
    delta: f64,
    share: Option<f64>,
) -> Result<ExtraRelease> {
    cost(&Table::open(path)?, options, mu, delta, share)
}

/// What is public of a table: see [`outline`](super::outline).
pub(super) fn outline(path: &Path, options: &Options, beside: ExtraRelease) -> Result<Dataset> {
    outline_of(&Table::open(path)?, options, beside)
}

fn outline_of(table: &Table, options: &Options, beside: ExtraRelease) -> Result<Dataset> {
    let mut who = UserKey::new(table, options)?;
    let columns = Wanted::new(table, &options.columns, who.column())?;
    let note = whose(&who);
    let mut users: HashSet<String> = HashSet::new();
    let mut unlabelled = false;
    let wanted = columns.wanted(&who);
    let malformed = table.each(&wanted, |cells| {
        let label = cells[cells.len() - 1];
        users.insert(who.of(cells)?);
        if is_missing(label) && !options.drop_unlabelled {
            unlabelled = true;
            return Err(format!("the label `{}` is missing", columns.label));
        }
        Ok(())
    })?;
    judged(options, table, &malformed, unlabelled)?;
    let search = columns.search(table, options, beside);
    let features: Vec<Feature> = columns
        .features
        .iter()
        .map(|(name, text)| match text {
            true => Feature::Words { column: name.clone(), buckets: BUCKETS },
            false => Feature::Number { column: name.clone(), center: 0.0, scale: 1.0 },
        })
        .collect();
    let column = columns.label.clone();
    let label = match options.predict {
        Some(Predict::Regression) => Label::Number { column, center: 0.0, scale: 1.0 },
        _ => {
            let values = options.classes.clone().unwrap_or_else(|| vec!["no".into(), "yes".into()]);
            Label::Class { column, values, other: None }
        }
    };
    let schema = Schema { features, label, decimal: options.decimal, found: true }.checked()?;
    let regression = options.predict == Some(Predict::Regression);
    let (name, unit, notes) = (name_of(table.path()), options.unit(), vec![note]);
    let count = |part: Part| {
        let own = |user: &&String| match options.train_all {
            true => part == Part::Train,
            false => Part::of(HASHED, user, 0) == part,
        };
        users.iter().filter(own).count().min(options.user_limit())
    };
    let sizes = [Part::Train, Part::Validation, Part::Test].map(count);
    fn empty<T: Target>(width: usize, sizes: [usize; 3]) -> Split<Samples<T>> {
        let [train, validation, test] = sizes.map(|users| {
            let mut samples = Samples::new(width);
            (0..users).for_each(|_| samples.finish_user());
            samples
        });
        Split { train, validation, test }
    }
    let needed = !options.train_all;
    let sets = [
        ("train", sizes[0] == 0),
        ("validation", needed && sizes[1] == 0),
        ("test", needed && sizes[2] == 0),
    ];
    filled(table, users.len(), sets)?;
    search.check(sizes[0])?;
    let (width, remarks) = (schema.width(), Vec::new());
    let meaning = Meaning::Columns(schema);
    Ok(match regression {
        true => {
            Dataset::Numbers(SampleData { name, meaning, split: empty(width, sizes), unit, notes, remarks })
        }
        false => {
            Dataset::Classes(SampleData { name, meaning, split: empty(width, sizes), unit, notes, remarks })
        }
    })
}

/// Finds the schema of a table in private: see [`find_schema`](super::find_schema).
pub(super) fn find_schema(
    path: &Path,
    options: &Options,
    beside: ExtraRelease,
    folder: &Path,
    key: &KeySource,
) -> Result<()> {
    let (search, rows) = surveyed(&Table::open(path)?, options, beside)?;
    search.find(folder, key, &rows)?;
    Ok(())
}

/// What is to be found in a table, and one row of each user that is trained on.
fn surveyed(table: &Table, options: &Options, beside: ExtraRelease) -> Result<(Search, Vec<Vec<Field>>)> {
    let mut who = UserKey::new(table, options)?;
    let columns = Wanted::new(table, &options.columns, who.column())?;
    let skipped = usize::from(who.column().is_some());
    let wanted = columns.wanted(&who);
    let search = columns.search(table, options, beside);
    // One row of each user, whichever has the smallest hash: no other user has a say in it, nor the order of rows.
    let mut chosen: HashMap<String, ([u8; 32], Vec<Field>)> = HashMap::new();
    let texts: Vec<bool> = columns.features.iter().map(|(_, text)| *text).collect();
    // What is malformed is told of when all rows are read.
    table.each(&wanted, |cells| {
        let user = who.of(cells)?;
        if !trains(&user, options) {
            return Ok(());
        }
        let row = cells.iter().map(|cell| cell.unwrap_or("")).collect::<Vec<_>>().join("\u{1f}");
        let hash = digest(HASHED, "schema", &row);
        if chosen.get(&user).is_none_or(|(least, _)| hash < *least) {
            let (label, features) = cells[skipped..].split_last().unwrap_or((&None, &[]));
            let read = features.iter().zip(&texts).filter(|(_, text)| !**text).map(|(cell, _)| *cell);
            let fields = read.chain([*label]).map(|cell| Field::read(cell, options.decimal)).collect();
            chosen.insert(user, (hash, fields));
        }
        Ok(())
    })?;
    let mut rows: Vec<([u8; 32], Vec<Field>)> =
        chosen.into_iter().map(|(user, (_, fields))| (digest(HASHED, "order", &user), fields)).collect();
    rows.sort_unstable_by_key(|(order, _)| *order);
    rows.truncate(options.user_limit());
    Ok((search, rows.into_iter().map(|(_, fields)| fields).collect()))
}

/// Tells of malformed rows, with a way out where some lack a label.
fn judged(options: &Options, table: &Table, malformed: &Malformed, unlabelled: bool) -> Result<Vec<Remark>> {
    let mut remarks = Vec::new();
    match options.judge(table, malformed, &mut remarks) {
        Err(error) if unlabelled => Err(error.with_hint(Hint::DropUnlabelled)),
        Err(error) => Err(error),
        Ok(()) => Ok(remarks),
    }
}

/// The columns of features, each of words or not, and of the label.
struct Wanted {
    features: Vec<(String, bool)>,
    label: String,
}

impl Wanted {
    fn new(table: &Table, columns: &Columns, user: Option<&str>) -> Result<Self> {
        let label = columns.label.clone().unwrap_or_default();
        table.need(&label, Some(Hint::LabelColumn))?;
        let text = columns.text.as_deref();
        let others = || {
            let mine = |name: &&String| Some(name.as_str()) != user && **name != label;
            table.columns().iter().filter(mine).cloned().collect::<Vec<_>>()
        };
        let mut features: Vec<(String, bool)> = match (&columns.features, text) {
            (Some(given), _) => given.iter().map(|name| (name.clone(), false)).collect(),
            (None, Some(_)) => Vec::new(),
            (None, None) => others().into_iter().map(|name| (name, false)).collect(),
        };
        if let Some(text) = text {
            features.retain(|(name, _)| name != text);
            features.push((text.to_owned(), true));
        }
        for name in &columns.exclude {
            if !table.columns().contains(name) {
                table.need(name, None)?;
            }
            features.retain(|(feature, _)| feature != name);
        }
        for (name, _) in &features {
            table.need(name, Some(Hint::FeatureColumns))?;
        }
        if features.is_empty() {
            return Err(table
                .fault("no column is left to predict from; at least one is needed")
                .with_hint(Hint::FeatureColumns));
        }
        Ok(Self { features, label })
    }

    /// All columns that are read: of the user, the features and the label.
    fn wanted<'a>(&'a self, who: &UserKey<'a>) -> Vec<&'a str> {
        let features = self.features.iter().map(|(name, _)| name.as_str());
        who.column().into_iter().chain(features).chain([self.label.as_str()]).collect()
    }

    /// What is to be found of them.
    fn search(&self, table: &Table, options: &Options, beside: ExtraRelease) -> Search {
        let column = |(name, text): &(String, bool)| Column {
            name: name.clone(),
            text: *text,
            declared: table.declared(name),
        };
        Search {
            features: self.features.iter().map(column).collect(),
            label: self.label.clone(),
            predict: options.predict,
            classes: options.classes.clone(),
            decimal: options.decimal,
            date_parts: options.date_parts.clone(),
            unit: options.unit(),
            beside,
            table: table.path().into(),
        }
    }
}

/// Where classes, categories and scales come from.
enum SchemaFrom<'a> {
    /// What somebody has written down.
    File(&'a Path),
    /// What was found in private, in a directory.
    Found(&'a Path),
    /// Users who are taken for public, in thousandths of all.
    PublicUsers(u32),
    /// The users who are trained on: ε does not cover it.
    TrainingUsers,
}

impl<'a> SchemaFrom<'a> {
    /// Errors: none of them was asked for.
    fn new(table: &Table, options: &'a Options) -> Result<Self> {
        if let Some(folder) = &options.found {
            return Ok(Self::Found(folder));
        }
        match (&options.schema, &options.vocabulary, options.public_share.unwrap_or(0)) {
            (Some(path), _, _) => Ok(Self::File(path)),
            (None, Some(VocabularyFrom::TrainingUsers), _) => Ok(Self::TrainingUsers),
            (None, _, 0) => Err(table
                .fault(
                    "the columns are not described, and classes, categories and scales reveal something about the rows that they are \
                     taken from",
                )
                .with_hint(Hint::PublicScales)),
            (None, _, share) => Ok(Self::PublicUsers(share)),
        }
    }

    /// Thousandths of the users that are public.
    fn public(&self) -> u32 {
        match self {
            Self::PublicUsers(share) => *share,
            Self::File(_) | Self::Found(_) | Self::TrainingUsers => 0,
        }
    }

    /// The schema, with what a privacy statement has to say of it.
    fn schema(&self, table: &Table, columns: &Wanted, options: &Options) -> Result<Found> {
        let found = |schema, note| Ok(Found { schema, notes: vec![note], remarks: Vec::new() });
        const WHAT: &str = "Classes, categories and scales";
        match self {
            Self::File(path) => {
                let note = format!("{WHAT} come from a given schema; they cost no privacy if it is public.");
                found(Schema::read(path)?, note)
            }
            Self::Found(folder) => Found::read(folder)?.ok_or_else(|| Error::lost(folder, "the schema")),
            Self::PublicUsers(share) => {
                let (schema, users) = drafted(table, columns, options, Part::Public, *share)?;
                found(schema, public_users(WHAT, users, *share))
            }
            Self::TrainingUsers => {
                let (schema, _) = drafted(table, columns, options, Part::Train, 0)?;
                let note = format!(
                    "{WHAT} are taken from the training users' rows: ε does not cover what they reveal about them. Give a schema to \
                     avoid this."
                );
                found(schema, note)
            }
        }
    }
}

/// A schema from the users of one part, and how many these are.
fn drafted(
    table: &Table,
    columns: &Wanted,
    options: &Options,
    part: Part,
    public: u32,
) -> Result<(Schema, usize)> {
    let mut who = UserKey::new(table, options)?;
    let skipped = usize::from(who.column().is_some());
    let names: Vec<(&str, bool)> =
        columns.features.iter().map(|(name, words)| (name.as_str(), *words)).collect();
    let wanted = columns.wanted(&who);
    let mut draft = Draft::new(&names, &columns.label, options.decimal, &options.date_parts);
    let mut users: HashMap<String, usize> = HashMap::new();
    // What is malformed is told of when all rows are read.
    table.each(&wanted, |cells| {
        let user = who.of(cells)?;
        if Part::of(HASHED, &user, public) == part {
            let rows = users.entry(user).or_default();
            *rows += 1;
            if *rows <= options.example_limit() {
                draft.add(&cells[skipped..cells.len() - 1], cells[cells.len() - 1]);
            }
        }
        Ok(())
    })?;
    if users.is_empty() {
        return Err(table
            .fault("there are no users to take classes and scales from; more users are needed")
            .with_hint(Hint::Schema));
    }
    let schema =
        draft.finish(options.predict, options.classes.as_deref()).map_err(|fault| table.hinted(fault))?;
    Ok((schema, users.len()))
}

/// A table whose meaning is known.
struct Read<'a> {
    table: Table,
    schema: Schema,
    notes: Vec<String>,
    remarks: Vec<Remark>,
    public: u32,
    options: &'a Options,
    /// Columns that a row is known by where it is a user.
    known_by: Vec<String>,
}

impl Read<'_> {
    fn samples<T: Target>(
        self,
        target: impl Fn(&Label, Cell<'_>) -> std::result::Result<T, Fault>,
    ) -> Result<SampleData<T>> {
        let Self { table, schema, notes, mut remarks, public, options, known_by } = self;
        let mut who = UserKey::new(&table, options)?;
        let known = known_by.iter().map(String::as_str);
        let wanted: Vec<&str> =
            who.column().into_iter().chain(known).chain([schema.label.column()]).collect();
        let at: HashMap<&str, usize> =
            wanted.iter().enumerate().map(|(place, name)| (*name, place)).collect();
        let places: Vec<usize> = schema.columns().iter().filter_map(|name| at.get(name).copied()).collect();
        let mut users: HashMap<String, (Vec<f32>, Vec<T>)> = HashMap::new();
        let mut replaced = Filled::default();
        let mut beyond = false;
        let (mut unlabelled, mut dropped, mut unknown) = (false, false, false);
        let malformed = table.each(&wanted, |cells| {
            let user = who.of(cells)?;
            let label = cells[cells.len() - 1];
            // Whoever loses a row stays a user, perhaps without any.
            let (features, targets) = users.entry(user).or_default();
            let value = match target(&schema.label, label) {
                Ok(value) => value,
                Err(_) if is_missing(label) && options.drop_unlabelled => {
                    dropped = true;
                    return Ok(());
                }
                // A class that the noise has hidden is no fault of the row.
                Err(_) if schema.found && options.classes.is_none() && !is_missing(label) && T::IS_CLASS => {
                    unknown = true;
                    return Ok(());
                }
                Err(fault) => {
                    unlabelled |= is_missing(label);
                    return Err(fault);
                }
            };
            if targets.len() >= options.example_limit() {
                beyond = true;
                return Ok(());
            }
            let read: Vec<Cell<'_>> = places.iter().map(|place| cells[*place]).collect();
            schema.encode(&read, features, &mut replaced)?;
            targets.push(value);
            Ok(())
        })?;
        remarks.extend(judged(options, &table, &malformed, unlabelled)?);
        if dropped {
            remarks.push("some rows have no label and are skipped".to_owned().into());
        }
        if unknown {
            let text = "some rows have a label that too few users share to reveal it; these rows are skipped";
            remarks.push(Remark::hinted(text, Hint::Classes));
        }
        if beyond {
            let left_out = "some rows exceed the largest number of rows for a user and are skipped";
            remarks.push(Remark::hinted(left_out, Hint::ExamplesPerUser));
        }
        remarks.extend(replaced.remarks().into_iter().map(Remark::from));

        let mut order: Vec<_> =
            users.into_iter().map(|(user, rows)| (digest(HASHED, "order", &user), user, rows)).collect();
        order.sort_unstable_by_key(|(order, ..)| *order);
        let count = order.len();
        let width = schema.width();
        let empty = || Samples::new(width);
        let mut split = Split { train: empty(), validation: empty(), test: empty() };
        for (_, user, (features, targets)) in order {
            let part = match Part::of(HASHED, &user, public) {
                Part::Public => continue,
                _ if options.train_all => Part::Train,
                part => part,
            };
            let Some(set) = split.part_mut(part) else { continue };
            if set.len() < options.user_limit() {
                for (features, target) in features.chunks_exact(width).zip(targets) {
                    set.push(features, target);
                }
                set.finish_user();
            }
        }
        let needed = |set: &str| set == "train" || !options.train_all;
        filled(&table, count, split.parts().map(|(set, samples)| (set, needed(set) && samples.is_empty())))?;
        Ok(SampleData {
            name: name_of(table.path()),
            meaning: Meaning::Columns(schema),
            split,
            unit: options.unit(),
            notes,
            remarks,
        })
    }
}

/// Rows of a table for a model whose schema is known, whoever they are of, in order.
#[derive(Debug, Clone, PartialEq)]
pub struct Rows {
    /// Features, one vector after the other.
    pub features: Vec<f32>,
    /// What was filled in, for whoever holds the data.
    pub remarks: Vec<String>,
}

impl Rows {
    /// Reads the columns of the features; a label is not needed.
    ///
    /// Errors: a file or column that is not there; every malformed row, with its number.
    pub fn read(path: &Path, schema: &Schema) -> Result<Self> {
        let (rows, _) = Self::with(path, schema, &[], |_| Ok(()))?;
        Ok(rows)
    }

    /// Reads features and classes.
    ///
    /// Errors: those of [`read`](Self::read).
    pub fn with_classes(path: &Path, schema: &Schema) -> Result<(Self, Vec<u16>)> {
        Self::with(path, schema, &[schema.label.column()], |cells| schema.label.class(cells[0]))
    }

    /// Reads features and numbers, in their own scale.
    ///
    /// Errors: those of [`read`](Self::read).
    pub fn with_values(path: &Path, schema: &Schema) -> Result<(Self, Vec<f32>)> {
        Self::with(path, schema, &[schema.label.column()], |cells| {
            schema.label.value(cells[0], schema.decimal)
        })
    }

    fn with<T>(
        path: &Path,
        schema: &Schema,
        beside: &[&str],
        target: impl Fn(&[Cell<'_>]) -> std::result::Result<T, Fault>,
    ) -> Result<(Self, Vec<T>)> {
        let table = Table::open(path)?;
        let wanted: Vec<&str> = beside.iter().copied().chain(schema.columns()).collect();
        for column in &wanted {
            table.need(column, Some(Hint::TrainedColumns))?;
        }
        let (mut features, mut targets, mut replaced) = (Vec::new(), Vec::new(), Filled::default());
        let malformed = table.each(&wanted, |cells| {
            let (beside, read) = cells.split_at(beside.len());
            let value = target(beside)?;
            schema.encode(read, &mut features, &mut replaced)?;
            targets.push(value);
            Ok(())
        })?;
        if let Some(sentence) = malformed.sentence() {
            return Err(table.fault(sentence));
        }
        if targets.is_empty() {
            return Err(table.fault("it has no rows"));
        }
        Ok((Self { features, remarks: replaced.remarks() }, targets))
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write;

    use super::*;
    use crate::Users;

    const PUBLIC: u32 = 100;

    fn write(name: &str, content: impl AsRef<[u8]>) -> (tempfile::TempDir, std::path::PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(name);
        std::fs::write(&path, content).unwrap();
        (directory, path)
    }

    fn options(label: &str) -> Options {
        let columns = Columns { user: Some("who".into()), label: Some(label.into()), ..Columns::default() };
        Options { columns, public_share: Some(PUBLIC), ..Options::default() }
    }

    /// Two rows for each of 400 people: age, city, a class and a price that follow from them.
    fn table() -> String {
        let mut table = String::from("who,age,city,bought,price\n");
        for person in 0..400 {
            for row in 0..2 {
                let age = 20 + (person * 7 + row) % 50;
                let city = ["Bonn", "Köln", "Ulm"][person % 3];
                let bought = if age > 45 { "yes" } else { "no" };
                writeln!(table, "p{person},{age},{city},{bought},{}.5", 3 * age).unwrap();
            }
        }
        table
    }

    #[test]
    fn classes_and_numbers_are_read_from_the_same_table() {
        let (_folder, path) = write("shop.csv", table());
        let mut chosen = options("bought");
        chosen.columns.features = Some(vec!["city".into(), "age".into()]);
        let Dataset::Classes(data) = file(&path, &chosen).unwrap() else { panic!("classes") };
        let Meaning::Columns(schema) = &data.meaning else { panic!("columns") };
        assert_eq!(schema.classes().unwrap(), ["no", "yes"]);
        assert_eq!(schema.columns(), ["city", "age"]);
        assert_eq!((data.meaning.features(), data.meaning.classes()), (4, Some(2)));
        let (center, scale) = match schema.features[1] {
            crate::data::Feature::Number { center, scale, .. } => (center, scale),
            _ => panic!("a number"),
        };
        // A person is in one set with all rows, in the set that a table of texts would put it into.
        let mut seen = 0;
        let expected: Vec<_> = (0..400).map(|p| Part::of("file", &format!("p{p}"), PUBLIC)).collect();
        for ((_, set), part) in
            data.split.parts().into_iter().zip([Part::Train, Part::Validation, Part::Test])
        {
            assert_eq!(set.len(), expected.iter().filter(|of| **of == part).count());
            assert_eq!(set.example_count(), 2 * set.len());
            for user in 0..set.len() {
                let mut examples = Vec::new();
                set.examples(user, &mut examples);
                for example in examples {
                    let age = center + scale * f64::from(example.features[3]);
                    assert_eq!(example.label, u16::from(age.round() > 45.0));
                    assert_eq!(example.features[..3].iter().sum::<f32>(), 1.0);
                }
                seen += 1;
            }
        }
        let public = expected.iter().filter(|part| **part == Part::Public).count();
        assert_eq!(seen + public, 400);
        assert!(data.notes[1].contains(&format!("{public} users")), "{:?}", data.notes);
        assert!(data.remarks.is_empty(), "{:?}", data.remarks);

        let Dataset::Numbers(data) = file(&path, &options("price")).unwrap() else { panic!("numbers") };
        assert_eq!((data.meaning.features(), data.meaning.classes()), (1 + 3 + 2, None));
        let forced = Options { predict: Some(Predict::Classification), ..options("price") };
        assert!(
            matches!(file(&path, &forced).unwrap_err(), Error::Data { message, .. } if message.contains("which is not among"))
        );
    }

    #[test]
    fn formats_read_alike() {
        let csv = table();
        let rows: Vec<Vec<&str>> = csv.lines().map(|line| line.split(',').collect()).collect();
        let (_a, comma) = write("t.csv", format!("\u{feff}{csv}"));
        let (_b, semicolon) = write("t.csv", csv.replace(',', ";"));
        let (_c, tab) = write("t.tsv", csv.replace(',', "\t"));
        let json: String = rows[1..]
            .iter()
            .map(|row| {
                format!(
                    "{{\"who\":\"{}\",\"age\":{},\"city\":\"{}\",\"bought\":\"{}\",\"price\":{}}}\n",
                    row[0], row[1], row[2], row[3], row[4]
                )
            })
            .collect();
        let (_d, json) = write("t.jsonl", json);
        let (_e, parquet) = write("t.parquet", parquet_of(&rows));
        let mut chosen = options("bought");
        chosen.columns.features = Some(vec!["age".into(), "city".into(), "price".into()]);
        let read = |path: &Path| match file(path, &chosen).unwrap() {
            Dataset::Classes(data) => data,
            _ => panic!("classes"),
        };
        let first = read(&comma);
        for path in [&semicolon, &tab, &json, &parquet] {
            let other = read(path);
            assert_eq!(
                (other.split, other.meaning),
                (first.split.clone(), first.meaning.clone()),
                "{}",
                path.display()
            );
        }
    }

    /// The rows as a Parquet file of strings, a whole number and a float.
    fn parquet_of(rows: &[Vec<&str>]) -> Vec<u8> {
        use parquet::basic::Compression;
        use parquet::data_type::{ByteArray, ByteArrayType, DoubleType, Int64Type};
        use parquet::file::properties::WriterProperties;
        use parquet::file::writer::SerializedFileWriter;
        let schema =
            "message rows { required binary who (UTF8); required int64 age; optional binary city (UTF8);
            required binary bought (UTF8); required double price; }";
        let schema = parquet::schema::parser::parse_message_type(schema).unwrap();
        let settings = WriterProperties::builder().set_compression(Compression::SNAPPY).build();
        let mut bytes = Vec::new();
        let mut writer = SerializedFileWriter::new(&mut bytes, schema.into(), settings.into()).unwrap();
        let mut group = writer.next_row_group().unwrap();
        for column in 0..5 {
            let texts: Vec<&str> = rows[1..].iter().map(|row| row[column]).collect();
            let mut out = group.next_column().unwrap().unwrap();
            match column {
                1 => {
                    let values: Vec<i64> = texts.iter().map(|text| text.parse().unwrap()).collect();
                    out.typed::<Int64Type>().write_batch(&values, None, None).unwrap();
                }
                4 => {
                    let values: Vec<f64> = texts.iter().map(|text| text.parse().unwrap()).collect();
                    out.typed::<DoubleType>().write_batch(&values, None, None).unwrap();
                }
                _ => {
                    let values: Vec<ByteArray> = texts.iter().map(|text| ByteArray::from(*text)).collect();
                    let levels = vec![1; values.len()];
                    let levels = (column == 2).then_some(&levels[..]);
                    out.typed::<ByteArrayType>().write_batch(&values, levels, None).unwrap();
                }
            }
            out.close().unwrap();
        }
        group.close().unwrap();
        writer.close().unwrap();
        bytes
    }

    #[test]
    fn damaged_parquet_files_are_errors() {
        let csv = table();
        let rows: Vec<Vec<&str>> = csv.lines().map(|line| line.split(',').collect()).collect();
        let bytes = parquet_of(&rows);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.parquet");
        let mut refused = 0;
        for at in (0..bytes.len()).step_by(bytes.len() / 400) {
            let mut mutated = bytes.clone();
            mutated[at] ^= 0x2a;
            std::fs::write(&path, mutated).unwrap();
            refused += usize::from(file(&path, &options("bought")).is_err());
        }
        assert!(refused > 50, "{refused}");
        std::fs::write(&path, "who,bought\n").unwrap();
        assert!(
            file(&path, &options("bought")).unwrap_err().to_string().contains("cannot be read as Parquet")
        );
    }

    #[test]
    fn every_malformed_row_is_told_of_with_its_number() {
        let mut lines: Vec<String> = table().lines().map(str::to_owned).collect();
        lines[10] = "p4,old,Bonn,yes,1".into();
        lines[20] = "p9,30,Bonn".into();
        lines[30] = ",30,Bonn,yes,1".into();
        lines[40] = "p19,30,Bonn,,1".into();
        lines[50] = "p24,30,Bonn,maybe,1".into();
        let (_folder, path) = write("t.csv", lines.join("\n"));
        let expected = "5 rows are malformed:\n  \
            line 11: `age` is \"old\", which is not a number\n  \
            line 21: there are 3 fields, but 5 columns\n  \
            line 31: the user (column `who`) is empty\n  \
            line 41: the label `bought` is missing\n  \
            line 51: the label `bought` is \"maybe\", which is not among the 2 classes [\"no\", \"yes\"]";
        // Row 50 is of a public user in this table or not; the schema must not learn its class from it.
        assert_ne!(Part::of("file", "p24", PUBLIC), Part::Public);
        let error = file(&path, &options("bought")).unwrap_err().to_string();
        assert!(error.contains(expected) && error.ends_with("leave out the rows without a label"), "{error}");
        let Dataset::Classes(data) =
            file(&path, &Options { skip_malformed: true, ..options("bought") }).unwrap()
        else {
            panic!("classes")
        };
        // How many they are is not told.
        let shown = expected.split_once('\n').unwrap().1;
        assert_eq!(data.remarks, [format!("left out: some rows are malformed, such as\n{shown}").into()]);

        lines.truncate(1);
        lines.extend((0..60).map(|_| "p,x,y,z,w".to_owned()));
        lines.extend(table().lines().skip(1).map(str::to_owned));
        let (_folder, path) = write("t.csv", lines.join("\n"));
        let error = file(&path, &options("bought")).unwrap_err().to_string();
        assert!(error.contains("60 rows are malformed") && error.ends_with("and 40 more"), "{error}");
    }

    #[test]
    fn columns_that_are_not_there_are_named() {
        let (_folder, path) = write("t.csv", table());
        let said = |change: fn(&mut Columns)| {
            let mut options = options("bought");
            change(&mut options.columns);
            file(&path, &options).unwrap_err().to_string()
        };
        for (error, part) in [
            (
                said(|c| c.user = None),
                "no column `user` among [\"who\", \"age\", \"city\", \"bought\", \"price\"]: name the column of users",
            ),
            (said(|c| c.label = Some("y".into())), "no column `y`"),
            (said(|c| c.features = Some(vec!["height".into()])), "no column `height`"),
            (said(|c| c.features = Some(vec!["bought".into()])), "the label cannot be a feature"),
            (said(|c| c.features = Some(vec![])), "no column is left to predict from"),
        ] {
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn rows_can_be_users_and_the_place_of_a_row_does_not_matter() {
        let mut chosen = options("bought");
        chosen.columns = Columns {
            user: None,
            rows_are_users: true,
            features: Some(vec!["age".into(), "city".into()]),
            ..chosen.columns
        };
        chosen.schema = None;
        let all = table();
        let (_a, whole) = write("t.csv", &all);
        let lines: Vec<&str> = all.lines().collect();
        let without = [&lines[..1], &lines[2..]].concat().join("\n");
        let (_b, without) = write("t.csv", without);
        let read = |path: &Path| match file(path, &chosen).unwrap() {
            Dataset::Classes(data) => data,
            _ => panic!("classes"),
        };
        let (whole, without) = (read(&whole), read(&without));
        let users = |data: &SampleData<u16>| data.split.parts().map(|(_, set)| set.len());
        let moved: usize = users(&whole).iter().zip(users(&without)).map(|(a, b)| a.abs_diff(b)).sum();
        assert!(moved <= 1, "{:?} {:?}", users(&whole), users(&without));
        assert!(whole.notes[0].contains("Each row counts as one user"));

        // Rows that are the same are of different people all the same.
        let same = std::iter::once("age,city,bought")
            .chain((0..300).map(|i| if i < 40 { "30,Ulm,no" } else { "50,Bonn,yes" }));
        let (_c, same) = write("t.csv", same.collect::<Vec<_>>().join("\n"));
        let schema = r#"{"features": [{"column": "age", "kind": "number", "center": 40, "scale": 10}],
            "label": {"column": "bought", "kind": "class", "values": ["no", "yes"]}}"#;
        let (_d, schema) = write("schema.json", schema);
        chosen.schema = Some(schema);
        let Dataset::Classes(same) = file(&same, &chosen).unwrap() else { panic!("classes") };
        let counts = same.split.parts().map(|(_, set)| (set.len(), set.example_count()));
        assert_eq!(counts.iter().map(|(users, _)| users).sum::<usize>(), 300);
        assert!(counts.iter().all(|(users, examples)| users == examples), "{counts:?}");
    }

    #[test]
    fn texts_are_classified_by_their_words() {
        let mut content = String::from("who,message,spam\n");
        for person in 0..300 {
            let (text, spam) = if person % 2 == 0 { ("win money now", 1) } else { ("see you at lunch", 0) };
            writeln!(content, "p{person},{text},{spam}").unwrap();
        }
        let (_folder, path) = write("t.csv", content);
        let mut chosen = options("spam");
        chosen.columns.text = Some("message".into());
        let Dataset::Classes(data) = file(&path, &chosen).unwrap() else { panic!("classes") };
        assert_eq!((data.meaning.features(), data.meaning.classes()), (1024, Some(2)));
        let norm = data.split.train.features()[..1024].iter().map(|x| x * x).sum::<f32>();
        assert!((norm - 1.0).abs() < 1e-6);
    }
}
