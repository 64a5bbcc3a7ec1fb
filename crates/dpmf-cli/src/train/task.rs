//! The flags that say what is learned: which data, which model.

use crate::workload::count;
use anyhow::bail;
use dpmf::accounting::ExtraRelease;
use dpmf_train::KeySource;
use dpmf_train::data::{self, Columns, DatePart, Decimal, Options, Predict, Source, Tokens, VocabularyFrom};
use dpmf_train::task::{ModelKind, ModelOptions, Task};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf, absolute};

/// Which data, which model.
#[derive(clap::Args, Clone, Serialize, Deserialize)]
#[command(next_help_heading = "Task")]
pub struct TaskArgs {
    /// Your own table: a .csv, .tsv, .jsonl (also with .gz or .zst) or .parquet file, or - for standard input; or a
    /// data set: names, quotes[:FILE], fashion-mnist[:DIR],
    /// stackoverflow:FILE (if built with --features stackoverflow)
    #[arg(long, value_name = "DATA", default_value = "names")]
    data: String,

    /// Column with the user that a row belongs to [default: user]
    #[arg(long, value_name = "COLUMN")]
    user: Option<String>,

    /// Every row belongs to a different person, so the guarantee is for rows
    #[arg(long, conflicts_with = "user")]
    #[serde(default)]
    rows_are_users: bool,

    /// Column with a text. Without --label, a text model learns to write similar texts [default: text]; with --label,
    /// the label is predicted from the words of this text
    #[arg(long, value_name = "COLUMN")]
    text: Option<String>,

    /// Column to predict from the other columns
    #[arg(long, value_name = "COLUMN")]
    label: Option<String>,

    /// Columns to predict the label from; by default all others, or only the text if --text is given
    #[arg(long, value_name = "COLUMN,…", value_delimiter = ',', requires = "label")]
    features: Option<Vec<String>>,

    /// Columns to leave out of the prediction
    #[arg(long, value_name = "COLUMN,…", value_delimiter = ',', requires = "label")]
    #[serde(default)]
    exclude: Vec<String>,

    /// Classes of the label; by default they are found privately, with noise
    #[arg(
        long,
        value_name = "CLASS,…",
        value_delimiter = ',',
        requires = "label",
        conflicts_with = "schema"
    )]
    #[serde(default)]
    classes: Option<Vec<String>>,

    /// Skip rows without a label instead of stopping
    #[arg(long, requires = "label")]
    #[serde(default)]
    drop_unlabelled: bool,

    /// Decimal sign of formatted numbers: . for 1,234.50 and , for 1.234,50; currency signs and % are then ignored
    /// [default: plain numbers such as 1234.5]
    #[arg(long, value_enum, requires = "label", conflicts_with = "schema")]
    #[serde(default)]
    decimal: Option<DecimalName>,

    /// Parts of dates to predict from, in addition to the day
    #[arg(
        long,
        value_name = "PART,…",
        value_delimiter = ',',
        value_enum,
        requires = "label",
        conflicts_with = "schema"
    )]
    #[serde(default)]
    date_parts: Vec<DatePartName>,

    /// Share of the budget (of μ²) for finding classes, categories and scales privately; training gets the rest [default: 0.05 to
    /// 0.4, enough to find a word that a fifth of the users have]
    #[arg(long, value_name = "SHARE", value_parser = schema_share, requires = "label",
        conflicts_with_all = ["schema", "vocabulary_from_training", "public_share"])]
    #[serde(default)]
    schema_share: Option<f64>,

    /// Whether the label is a class or a number; by default this is found privately
    #[arg(long, value_enum, requires = "label")]
    task: Option<TaskName>,

    /// JSON file that describes the columns (classes, categories, scales); by default they are found privately
    #[arg(long, value_name = "FILE", requires = "label")]
    schema: Option<PathBuf>,

    /// Skip rows that cannot be read, with a message, instead of stopping
    #[arg(long)]
    #[serde(default)]
    skip_malformed: bool,

    /// Largest number of users in each set (training, validation and test)
    #[arg(long, value_name = "k", value_parser = count)]
    users: Option<usize>,

    /// How texts are split into tokens
    #[arg(long, value_enum)]
    tokens: Option<TokenName>,

    /// Treat this share of the users as public: words, or classes and scales of a table, are taken from them. These
    /// users are chosen by a hash of their names, are never trained or tested on, and are not covered by ε [default: 0;
    /// for the quotations, which are public, 0.1]
    #[arg(long, value_name = "SHARE", value_parser = share, conflicts_with_all = ["vocabulary", "schema", "vocabulary_from_training"])]
    #[serde(default)]
    public_share: Option<f64>,

    /// File with a public list of words, one in each line
    #[arg(long, value_name = "FILE")]
    vocabulary: Option<PathBuf>,

    /// Take words, or classes and scales of a table, from the training users themselves; ε does not cover this
    #[arg(long, conflicts_with_all = ["vocabulary", "schema"], visible_alias = "schema-from-training")]
    vocabulary_from_training: bool,

    /// Largest size of the vocabulary
    #[arg(long, value_name = "k", value_parser = count)]
    vocabulary_size: Option<usize>,

    /// Largest number of examples of a user
    #[arg(long, value_name = "k", value_parser = count)]
    examples_per_user: Option<usize>,

    /// Largest number of tokens to predict in an example
    #[arg(long, value_name = "k", value_parser = count)]
    example_length: Option<usize>,

    /// Model: lstm for text; mlp or logistic for classes; mlp or linear for numbers [default: mlp for images; logistic
    /// or linear for tables]
    #[arg(long, value_enum)]
    model: Option<ModelName>,

    /// Width of the token embedding
    #[arg(long, value_name = "k", value_parser = count, default_value = "16")]
    embedding: usize,

    /// Width of the hidden layer
    #[arg(long, value_name = "k", value_parser = count, default_value = "64")]
    hidden: usize,

    /// Width of the lstm's projection before the softmax; 0 for none
    #[arg(long, value_name = "k", value_parser = count, default_value = "32")]
    projection: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum ModelName {
    /// Embedding, LSTM, projection, softmax
    Lstm,
    /// One hidden layer
    Mlp,
    /// Multinomial logistic regression
    Logistic,
    /// Linear regression
    Linear,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum TaskName {
    /// The label is one of several values
    Classification,
    /// The label is a number
    Regression,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum DecimalName {
    /// 1,234.50
    #[value(name = ".", alias = "point")]
    Point,
    /// 1.234,50
    #[value(name = ",", alias = "comma")]
    Comma,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum DatePartName {
    /// The hour of the day
    Hour,
    /// The day of the week
    Weekday,
}

/// A share of the budget: training must keep some of it.
fn schema_share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if (0.001..=0.5).contains(&share) => Ok(share),
        _ => Err("it must lie between 0.001 and 0.5".into()),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum TokenName {
    /// Every character
    Characters,
    /// Lower-case words and punctuation marks
    Words,
    /// Text between white space
    Separated,
}

/// A share of the users: below a thousandth it would be nobody, above a half too few are left.
fn share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if share == 0.0 || (0.001..=0.5).contains(&share) => Ok(share),
        _ => Err("it must be 0, or lie between 0.001 and 0.5".into()),
    }
}

impl TaskArgs {
    /// Whether the data is the user's own rather than one of the public sets that dpmf knows.
    pub fn is_own(&self) -> anyhow::Result<bool> {
        Ok(matches!(self.data.parse()?, Source::File(_)))
    }

    /// The same with paths that hold in every working directory.
    ///
    /// Errors: a path that the system cannot place.
    pub fn anchored(&self) -> anyhow::Result<Self> {
        let data = self.data.parse::<Source>()?.anchored()?;
        let vocabulary = self.vocabulary.as_ref().map(absolute).transpose()?;
        let schema = self.schema.as_ref().map(absolute).transpose()?;
        Ok(Self { data: data.to_string(), vocabulary, schema, ..self.clone() })
    }

    /// What finding the schema in private may cost; nothing where there is none to find. `mu` is that of the whole
    /// budget at a δ.
    pub fn beside(
        &self,
        mu: impl FnOnce(f64) -> dpmf_train::Result<f64>,
        delta: f64,
    ) -> anyhow::Result<Option<ExtraRelease>> {
        Ok(data::schema_cost(&self.data.parse()?, &self.options(), mu, delta, self.schema_share)?)
    }

    /// What is public of a table whose schema is to be found in private, with a model of its shape.
    pub fn outline(&self, beside: ExtraRelease) -> anyhow::Result<Task> {
        let options = self.options();
        let data = data::outline(&self.data.parse()?, &options, beside)?;
        Ok(Task::new(data, &options, self.model_options(true))?)
    }

    /// Finds the schema in private, keeps it in a directory, and opens the task with it.
    pub fn find(&self, beside: ExtraRelease, folder: &Path, key: &KeySource) -> anyhow::Result<Task> {
        let source: Source = self.data.parse()?;
        let mut options = self.options();
        data::find_schema(&source, &options, beside, folder, key)?;
        options.found = Some(folder.to_owned());
        Ok(Task::open(&source, &options, self.model_options(false))?)
    }

    /// Reads the data and sets up the model.
    pub fn open(&self) -> anyhow::Result<Task> {
        for (name, path) in [("--vocabulary", &self.vocabulary), ("--schema", &self.schema)] {
            if let Some(path) = path.as_ref().filter(|path| path.exists() && !path.is_file()) {
                bail!("{name} is {}, which is not a regular file", path.display());
            }
        }
        Ok(Task::open(&self.data.parse::<Source>()?, &self.options(), self.model_options(false))?)
    }

    /// The model; where it is not known yet whether the label is a class or a number, one that learns either.
    fn model_options(&self, outline: bool) -> ModelOptions {
        ModelOptions {
            kind: self.model.filter(|name| !outline || *name == ModelName::Mlp).map(|name| match name {
                ModelName::Lstm => ModelKind::Lstm,
                ModelName::Mlp => ModelKind::Mlp,
                ModelName::Logistic => ModelKind::Logistic,
                ModelName::Linear => ModelKind::Linear,
            }),
            embedding: self.embedding,
            hidden: self.hidden,
            projection: (self.projection > 0).then_some(self.projection),
        }
    }

    fn options(&self) -> Options {
        let vocabulary = match &self.vocabulary {
            Some(path) => Some(VocabularyFrom::List(path.clone())),
            None => self.vocabulary_from_training.then_some(VocabularyFrom::TrainingUsers),
        };
        Options {
            users: self.users,
            examples_per_user: self.examples_per_user,
            example_length: self.example_length,
            tokens: self.tokens.map(|name| match name {
                TokenName::Characters => Tokens::Characters,
                TokenName::Words => Tokens::Words,
                TokenName::Separated => Tokens::Separated,
            }),
            vocabulary,
            vocabulary_size: self.vocabulary_size,
            columns: Columns {
                user: self.user.clone(),
                rows_are_users: self.rows_are_users,
                text: self.text.clone(),
                label: self.label.clone(),
                features: self.features.clone(),
                exclude: self.exclude.clone(),
            },
            // A model that learns one kind of label says which.
            predict: match (self.task, self.model) {
                (Some(TaskName::Classification), _) | (None, Some(ModelName::Logistic)) => {
                    self.label.is_some().then_some(Predict::Classification)
                }
                (Some(TaskName::Regression), _) | (None, Some(ModelName::Linear)) => {
                    self.label.is_some().then_some(Predict::Regression)
                }
                _ => None,
            },
            schema: self.schema.clone(),
            public_share: self.public_share.map(|share| (1000.0 * share).round() as u32),
            skip_malformed: self.skip_malformed,
            drop_unlabelled: self.drop_unlabelled,
            classes: self.classes.clone(),
            decimal: match self.decimal {
                None => Decimal::Plain,
                Some(DecimalName::Point) => Decimal::Point,
                Some(DecimalName::Comma) => Decimal::Comma,
            },
            date_parts: self
                .date_parts
                .iter()
                .map(|part| match part {
                    DatePartName::Hour => DatePart::Hour,
                    DatePartName::Weekday => DatePart::Weekday,
                })
                .collect(),
            found: None,
            train_all: false,
        }
    }
}
