//! From the argument of `--data` to a data set.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf, absolute};
use std::str::FromStr;

use super::images;
use super::labelled::FrameTable;
use super::rows::{self, Malformed};
#[cfg(feature = "stackoverflow")]
use super::stackoverflow;
use super::{
    DatePart, Decimal, Frame, Predict, SampleData, TextData, Tokens, VocabularyFrom, labelled, names, texts,
};
use crate::run::KeySource;
use crate::{Error, Hint, Remark, Result};
use dpmf::accounting::{ExtraRelease, PrivacyUnit};

/// Where data comes from.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Source {
    /// Names of packages by owner, part of the program ([`names`]).
    #[default]
    Names,
    /// Quotations by author, as `scripts/data/quotes` writes them; without a path at `data/cache/quotes.jsonl`.
    Quotes(Option<PathBuf>),
    /// Fashion-MNIST as IDX files in a directory; without one, where `scripts/data/fashion-mnist` or Debian's package
    /// `dataset-fashion-mnist` puts them.
    FashionMnist(Option<PathBuf>),
    /// The published federated StackOverflow data as an SQLite file.
    StackOverflow(PathBuf),
    /// Any table: `.csv`, `.tsv`, `.jsonl`, `.ndjson`, each also with `.gz` or `.zst`, or `.parquet`; `-` for standard
    /// input.
    File(PathBuf),
}

impl FromStr for Source {
    type Err = Error;

    /// Reads `names`, `quotes[:PATH]`, `fashion-mnist[:DIRECTORY]`, `stackoverflow:PATH` or the path of a table.
    fn from_str(text: &str) -> Result<Self> {
        let (name, path) = match text.split_once(':') {
            Some((name, path)) if !path.is_empty() => (name, Some(PathBuf::from(path))),
            _ => (text, None),
        };
        match (name, path) {
            ("names", None) => Ok(Self::Names),
            ("quotes", path) => Ok(Self::Quotes(path)),
            ("fashion-mnist", path) => Ok(Self::FashionMnist(path)),
            ("stackoverflow", Some(path)) => Ok(Self::StackOverflow(path)),
            _ if text == rows::STANDARD_INPUT || rows::Format::of(Path::new(text)).is_some() => {
                Ok(Self::File(text.into()))
            }
            _ => Err(Error::InvalidArgument {
                name: "data",
                value: format!("{text:?}"),
                rule: "it must be names, quotes[:PATH], fashion-mnist[:DIRECTORY], stackoverflow:PATH, a .csv, .tsv, .jsonl, \
                       .ndjson (also .gz or .zst) or .parquet file, or - for standard input",
            }),
        }
    }
}

impl Source {
    /// The same source by a path that holds in every working directory; one without a path, by the place where its data
    /// lies
    /// beside the present one.
    ///
    /// # Errors
    /// If the system does not know the working directory.
    pub fn anchored(self) -> io::Result<Self> {
        let beside = |path: Option<PathBuf>, usual: &str| match path {
            Some(path) => absolute(path).map(Some),
            None if Path::new(usual).exists() => absolute(usual).map(Some),
            None => Ok(None),
        };
        Ok(match self {
            Self::Names => Self::Names,
            Self::Quotes(path) => Self::Quotes(beside(path, texts::QUOTES)?),
            Self::FashionMnist(path) => Self::FashionMnist(beside(path, images::PLACES[0])?),
            Self::StackOverflow(path) => Self::StackOverflow(absolute(path)?),
            Self::File(path) if path == Path::new(rows::STANDARD_INPUT) => Self::File(path),
            Self::File(path) => Self::File(absolute(path)?),
        })
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Names => f.write_str("names"),
            Self::Quotes(None) => f.write_str("quotes"),
            Self::Quotes(Some(path)) => write!(f, "quotes:{}", path.display()),
            Self::FashionMnist(None) => f.write_str("fashion-mnist"),
            Self::FashionMnist(Some(path)) => write!(f, "fashion-mnist:{}", path.display()),
            Self::StackOverflow(path) => write!(f, "stackoverflow:{}", path.display()),
            Self::File(path) => write!(f, "{}", path.display()),
        }
    }
}

/// Which columns of a table mean what.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Columns {
    /// Whose the row is; `user` by default.
    pub user: Option<String>,
    /// Every row is of another user, and no column says so.
    pub rows_are_users: bool,
    /// A text; `text` by default where nothing is to be predicted but its next token.
    pub text: Option<String>,
    /// What is to be predicted from the other columns.
    pub label: Option<String>,
    /// What it is predicted from; by default all columns but the user's and the label, or the text where there is one.
    pub features: Option<Vec<String>>,
    /// What it is not predicted from.
    pub exclude: Vec<String>,
}

/// What of a source is read, and how; `None` is the default of the source.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Options {
    /// Largest number of users in each set (training, validation and test).
    pub users: Option<usize>,
    /// Largest number of examples of a user; the rest is left out. By default 256.
    pub examples_per_user: Option<usize>,
    /// Largest number of tokens to predict in an example; a longer text is cut. By default 20 words or 100 characters.
    pub example_length: Option<usize>,
    /// How text falls into tokens; characters by default for a table.
    pub tokens: Option<Tokens>,
    /// Where a vocabulary of words comes from.
    pub vocabulary: Option<VocabularyFrom>,
    /// Largest size of the vocabulary, special tokens not counted. By default 10,000.
    pub vocabulary_size: Option<usize>,
    /// Which columns of a table mean what.
    pub columns: Columns,
    /// What the label of a table is; guessed where nothing is said.
    pub predict: Option<Predict>,
    /// A file of a [`Schema`](super::Schema) for a table; without one it is made from the same users as a vocabulary.
    pub schema: Option<PathBuf>,
    /// Thousandths of the users that are taken for public where words, or the meaning of columns, are to come from
    /// users. By default
    /// none of a table, whose owner has to say so, and a tenth of the quotations, which are public data.
    pub public_share: Option<u32>,
    /// Rows that cannot be read are left out, and told of; by default they are an error.
    pub skip_malformed: bool,
    /// Rows without a label are left out; by default they are malformed.
    pub drop_unlabelled: bool,
    /// The classes of the label; found where nothing is said.
    pub classes: Option<Vec<String>>,
    /// How numbers are written.
    pub decimal: Decimal,
    /// Parts of dates that become features of their own.
    pub date_parts: Vec<DatePart>,
    /// A directory in which [`find_schema`] has found the schema of a table.
    pub found: Option<PathBuf>,
    /// All users of a table train, and nobody is held out to score the model.
    pub train_all: bool,
}

impl Options {
    /// Whether a schema is to be found in private: there is a label, and nothing else tells what columns mean.
    pub(super) fn is_found(&self) -> bool {
        self.columns.label.is_some()
            && self.schema.is_none()
            && self.vocabulary != Some(VocabularyFrom::TrainingUsers)
            && self.public_share.unwrap_or(0) == 0
    }

    pub(super) fn user_limit(&self) -> usize {
        self.users.unwrap_or(usize::MAX)
    }

    pub(super) fn example_limit(&self) -> usize {
        self.examples_per_user.unwrap_or(256)
    }

    /// Largest number of tokens to predict in an example of such tokens.
    pub fn length(&self, tokens: Tokens) -> usize {
        self.example_length.unwrap_or(if tokens == Tokens::Characters { 100 } else { 20 })
    }

    pub(super) fn word_limit(&self) -> usize {
        self.vocabulary_size.unwrap_or(10_000)
    }

    /// Whether a user of a table is one record or all records of somebody.
    pub(super) fn unit(&self) -> PrivacyUnit {
        if self.columns.rows_are_users { PrivacyUnit::Record } else { PrivacyUnit::User }
    }

    /// Tells of malformed rows: as an error, or as a remark where they may be left out.
    pub(super) fn judge(
        &self,
        table: &rows::Table,
        malformed: &Malformed,
        remarks: &mut Vec<Remark>,
    ) -> Result<()> {
        if self.skip_malformed {
            remarks.extend(malformed.examples().map(|some| format!("left out: {some}").into()));
            return Ok(());
        }
        match malformed.sentence() {
            None => Ok(()),
            Some(sentence) => Err(table.fault(sentence)),
        }
    }

    /// Refuses limits of zero, and choices that a source whose form is fixed does not have.
    fn check(&self, source: &Source) -> Result<()> {
        if self.public_share.is_some_and(|share| share > 500) {
            let value = format!("{} thousandths", self.public_share.unwrap_or(0));
            return Err(Error::InvalidArgument {
                name: "public share",
                value,
                rule: "it must be at most half",
            });
        }
        for (name, limit) in [
            ("users", self.users),
            ("examples per user", self.examples_per_user),
            ("example length", self.example_length),
            ("vocabulary size", self.vocabulary_size),
        ] {
            if limit == Some(0) {
                return Err(Error::InvalidArgument {
                    name,
                    value: "0".into(),
                    rule: "a limit must be positive",
                });
            }
        }
        let fixed = matches!(source, Source::Names | Source::FashionMnist(_));
        let textual = self.tokens.is_some()
            || self.vocabulary.is_some()
            || self.vocabulary_size.is_some()
            || self.examples_per_user.is_some()
            || self.example_length.is_some();
        if fixed && textual {
            return Err(Error::InvalidArgument {
                name: "data",
                value: source.to_string(),
                rule: "its tokens, examples and vocabulary are fixed; remove these options",
            });
        }
        let tabular = self.columns != Columns::default()
            || self.schema.is_some()
            || self.predict.is_some()
            || self.drop_unlabelled
            || self.classes.is_some()
            || !self.decimal.is_plain()
            || !self.date_parts.is_empty();
        if tabular && !matches!(source, Source::File(_)) {
            return Err(Error::InvalidArgument {
                name: "data",
                value: source.to_string(),
                rule: "columns can be named only for a table of your own",
            });
        }
        if self.columns.label.is_none() {
            let given = [
                ("features", self.columns.features.is_some()),
                ("exclude", !self.columns.exclude.is_empty()),
                ("schema", self.schema.is_some()),
                ("predict", self.predict.is_some()),
                ("classes", self.classes.is_some()),
            ];
            if let Some((name, _)) = given.into_iter().find(|(_, given)| *given) {
                let rule = "it needs a column to predict";
                return Err(Error::argument(name, "given", rule).with_hint(Hint::LabelColumn));
            }
        }
        if matches!(source, Source::StackOverflow(_))
            && self.tokens.is_some_and(|tokens| tokens != Tokens::Separated)
        {
            return Err(Error::InvalidArgument {
                name: "data",
                value: source.to_string(),
                rule: "its text is tokenised already: tokens can only be separated by spaces",
            });
        }
        Ok(())
    }
}

/// A data set of one of the three kinds.
#[allow(clippy::large_enum_variant, reason = "a program opens one")]
#[derive(Debug, Clone)]
pub enum Dataset {
    /// Text by user.
    Text(TextData),
    /// Features and classes by user: of images, each a user of its own, or of a table.
    Classes(SampleData<u16>),
    /// Features and numbers by user.
    Numbers(SampleData<f32>),
}

/// Reads a data set.
///
/// Guarantee: the users of the three sets are disjoint, and no set is empty.
///
/// # Errors
/// If a file is missing or malformed (the message names the line or record), or an option does not fit the source.
///
/// ```
/// use dpmf_train::data::{self, Dataset, Options, Source};
///
/// let options = Options { users: Some(1000), ..Options::default() };
/// let Dataset::Text(data) = data::open(&"names".parse::<Source>()?, &options)? else { unreachable!() };
/// assert_eq!(data.split.train.len(), 1000);
/// # Ok::<(), dpmf_train::Error>(())
/// ```
pub fn open(source: &Source, options: &Options) -> Result<Dataset> {
    options.check(source)?;
    match source {
        Source::Names => {
            let mut data = names()?;
            for corpus in [&mut data.split.train, &mut data.split.validation, &mut data.split.test] {
                corpus.truncate(options.user_limit());
            }
            Ok(Dataset::Text(data))
        }
        Source::Quotes(path) => texts::quotes(path.as_deref(), options).map(Dataset::Text),
        Source::FashionMnist(path) => {
            images::fashion_mnist(path.as_deref(), options.user_limit()).map(Dataset::Classes)
        }
        #[cfg(feature = "stackoverflow")]
        Source::StackOverflow(path) => stackoverflow::read(path, options).map(Dataset::Text),
        #[cfg(not(feature = "stackoverflow"))]
        Source::StackOverflow(_) => Err(Error::argument(
            "data",
            source,
            "this program was built without SQLite; build it with the feature `stackoverflow`",
        )),
        Source::File(path) if options.columns.label.is_some() => labelled::file(path, options),
        Source::File(path) => texts::file(path, options).map(Dataset::Text),
    }
}

/// What finding the classes, categories and scales of a table in private may cost, as a part of a budget; nothing where
/// there is none to
/// find: neither a schema nor public users nor the training users are to tell them.
///
/// `mu` is that of the whole budget at a δ, of which a tenth goes into words that one user alone may have. `share` is
/// the part of μ² that
/// is spent; without it, as much as lets a word that a tenth of the users have stand out of the noise, from 5 to 25 %.
/// It follows
/// from public numbers alone: users, columns and the budget.
///
/// # Errors
/// Those of [`open`] and of `mu`.
pub fn schema_cost(
    source: &Source,
    options: &Options,
    mu: impl FnOnce(f64) -> Result<f64>,
    delta: f64,
    share: Option<f64>,
) -> Result<Option<ExtraRelease>> {
    options.check(source)?;
    match source {
        Source::File(path) if options.is_found() => {
            labelled::cost_of(path, options, mu, delta, share).map(Some)
        }
        _ => Ok(None),
    }
}

/// What is public of a table whose schema is to be found in private: its users in their sets, without examples, and one
/// feature for each
/// of its columns.
///
/// Settings and plans are made from it, so that none of them depends on what is found: only then do the two releases
/// compose as if
/// both had been decided beforehand.
///
/// # Errors
/// Those of [`open`]; too few users for the noise.
pub fn outline(source: &Source, options: &Options, beside: ExtraRelease) -> Result<Dataset> {
    options.check(source)?;
    match source {
        Source::File(path) => labelled::outline(path, options, beside),
        _ => Err(Error::argument("data", source, "a schema can be found in a table only")),
    }
}

/// Finds the schema of a table in private, a release that costs [`ExtraRelease`], and keeps it in a directory; nothing is
/// done if it is there.
///
/// # Errors
/// Those of [`open`]; other rows than those it was begun with there; what cannot be told from the noise.
pub fn find_schema(
    source: &Source,
    options: &Options,
    beside: ExtraRelease,
    folder: &Path,
    key: &KeySource,
) -> Result<()> {
    options.check(source)?;
    match source {
        Source::File(path) => labelled::find_schema(path, options, beside, folder, key),
        _ => Err(Error::argument("data", source, "a schema can be found in a table only")),
    }
}

/// Takes a table in memory, whose label is named, for a data set.
///
/// Errors: columns of different lengths; no label; options that do not fit.
pub fn open_frame(frame: Frame, options: &Options) -> Result<FrameTable> {
    let rows = frame.rows();
    if let Some((name, column)) = frame.columns.iter().find(|(_, column)| column.len() != rows) {
        let value = format!("{} rows in {name:?}", column.len());
        return Err(Error::InvalidArgument {
            name: "column",
            value,
            rule: "all columns must have as many rows",
        });
    }
    options.check(&Source::File(frame.name.clone().into()))?;
    Ok(FrameTable::new(frame, options))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_come_back() {
        for text in [
            "names",
            "quotes",
            "quotes:q.jsonl",
            "fashion-mnist",
            "fashion-mnist:/a/b",
            "stackoverflow:so.sqlite",
            "a/b.csv",
            "notes.JSONL",
            "c:d.tsv",
            "x.parquet",
            "x.csv.gz",
            "x.jsonl.zst",
            "-",
        ] {
            let source: Source = text.parse().unwrap();
            assert_eq!(source.to_string(), text);
        }
        assert_eq!(Source::default(), Source::Names);
        for text in
            ["", "name", "names:x", "stackoverflow", "stackoverflow:", "x.xlsx", "x.parquet.gz", "x.gz"]
        {
            let error = text.parse::<Source>().unwrap_err().to_string();
            assert!(error.contains(&format!("{text:?}")) && error.contains("fashion-mnist"), "{error}");
        }
    }

    #[test]
    fn an_anchored_path_holds_everywhere() {
        let here = std::env::current_dir().unwrap();
        let anchored = |text: &str| text.parse::<Source>().unwrap().anchored().unwrap();
        assert_eq!(anchored("a/b.csv"), Source::File(here.join("a/b.csv")));
        assert_eq!(anchored("quotes:q.jsonl"), Source::Quotes(Some(here.join("q.jsonl"))));
        assert_eq!(anchored("/a/b.csv"), Source::File("/a/b.csv".into()));
        assert_eq!(anchored("names"), Source::Names);
    }

    #[cfg(not(feature = "stackoverflow"))]
    #[test]
    fn a_source_left_out_of_the_build_says_how_to_have_it() {
        let error =
            open(&Source::StackOverflow("so.sqlite".into()), &Options::default()).unwrap_err().to_string();
        assert!(
            error.contains("stackoverflow:so.sqlite") && error.contains("feature `stackoverflow`"),
            "{error}"
        );
    }

    #[test]
    fn options_that_do_not_fit_are_refused() {
        let words = Options { tokens: Some(Tokens::Words), ..Options::default() };
        let none = Options { users: Some(0), ..Options::default() };
        for (source, options) in
            [(Source::Names, &words), (Source::StackOverflow("x".into()), &words), (Source::Names, &none)]
        {
            let error = open(&source, options).unwrap_err();
            assert_eq!(error.kind(), "invalid-argument", "{error}");
        }
    }
}
