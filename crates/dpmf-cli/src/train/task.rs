//! What is learned: a data set and the model for it.

use crate::workload::count;
use anyhow::bail;
use dpmf::accounting::PrivacyUnit;
use dpmf_train::data::{
    self, Columns, Dataset, Meaning, Options, Predict, SampleData, Source, TextData, Tokens, VocabularyFrom,
};
use dpmf_train::model::{Logistic, Lstm, Mlp, Network, Regressor};
use dpmf_train::{Card, Input, Model, Remark};
use serde::{Deserialize, Serialize};
use std::path::{PathBuf, absolute};

/// Which data, which model.
#[derive(clap::Args, Clone, Serialize, Deserialize)]
#[command(next_help_heading = "Task")]
pub struct TaskArgs {
    /// A table of yours: a .csv, .tsv, .jsonl or .parquet file; or names, quotes[:FILE], fashion-mnist[:DIR],
    /// stackoverflow:FILE (if built with --features stackoverflow)
    #[arg(long, value_name = "DATA", default_value = "names")]
    data: String,

    /// Column of the table that says whose a row is [default: user]
    #[arg(long, value_name = "COLUMN")]
    user: Option<String>,

    /// Every row of the table is of another person: the guarantee is for rows
    #[arg(long, conflicts_with = "user")]
    #[serde(default)]
    rows_are_users: bool,

    /// Column with a text: without --label a model of texts learns to write such [default: text]; with it, the words of the
    /// text are what the label is predicted from
    #[arg(long, value_name = "COLUMN")]
    text: Option<String>,

    /// Column to predict from the others
    #[arg(long, value_name = "COLUMN")]
    label: Option<String>,

    /// Columns to predict the label from; all others by default, or the text alone where one is named
    #[arg(long, value_name = "COLUMN,…", value_delimiter = ',', requires = "label")]
    features: Option<Vec<String>>,

    /// Whether the label is a class or a number; guessed from it by default
    #[arg(long, value_enum, requires = "label")]
    task: Option<TaskName>,

    /// What the columns mean (classes, categories, scales), in a JSON file; by default it comes from a tenth of the users taken
    /// for public
    #[arg(long, value_name = "FILE", requires = "label")]
    schema: Option<PathBuf>,

    /// Leave out rows that cannot be read, and tell of each, instead of stopping
    #[arg(long)]
    #[serde(default)]
    skip_malformed: bool,

    /// Most users of each set
    #[arg(long, value_name = "k", value_parser = count)]
    users: Option<usize>,

    /// What a token of text is
    #[arg(long, value_enum)]
    tokens: Option<TokenName>,

    /// Words from a public list, one a line, instead of from a tenth of the users taken for public
    #[arg(long, value_name = "FILE")]
    vocabulary: Option<PathBuf>,

    /// Words, or classes and scales of a table, from the training users themselves, which ε does not cover
    #[arg(long, conflicts_with_all = ["vocabulary", "schema"], visible_alias = "schema-from-training")]
    vocabulary_from_training: bool,

    /// Most words of a vocabulary
    #[arg(long, value_name = "k", value_parser = count)]
    vocabulary_size: Option<usize>,

    /// Most examples of a user
    #[arg(long, value_name = "k", value_parser = count)]
    examples_per_user: Option<usize>,

    /// Most tokens to predict in an example
    #[arg(long, value_name = "k", value_parser = count)]
    example_length: Option<usize>,

    /// The model: lstm for text; mlp or logistic for classes, mlp or linear for numbers [default: mlp for images, without a
    /// hidden layer for tables]
    #[arg(long, value_enum)]
    model: Option<ModelName>,

    /// Width of the embedding of a token
    #[arg(long, value_name = "k", value_parser = count, default_value = "16")]
    embedding: usize,

    /// Width of the hidden layer
    #[arg(long, value_name = "k", value_parser = count, default_value = "64")]
    hidden: usize,

    /// Width of the projection before the softmax of the lstm; 0 for none
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
enum TokenName {
    /// Every character
    Characters,
    /// Lower-cased words and marks
    Words,
    /// Whatever stands between white space
    Separated,
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
            },
            predict: self.task.map(|task| match task {
                TaskName::Classification => Predict::Classification,
                TaskName::Regression => Predict::Regression,
            }),
            schema: self.schema.clone(),
            skip_malformed: self.skip_malformed,
        }
    }
}

/// Settings that suit a kind of data.
pub struct Defaults {
    pub rounds: usize,
    pub clip: f64,
    pub server_learning_rate: f64,
    /// Nothing where a contribution is a gradient.
    pub client_learning_rate: Option<f64>,
}

/// A data set with a model.
#[allow(clippy::large_enum_variant, reason = "there is one")]
pub enum Task {
    Text { data: TextData, model: Lstm, length: usize },
    Mlp { data: SampleData<u16>, model: Mlp },
    Logistic { data: SampleData<u16>, model: Logistic },
    Regressor { data: SampleData<f32>, model: Regressor },
}

/// Runs a block with the model and the data of a task, whatever their types.
macro_rules! with_data {
    ($task:expr, |$model:ident, $data:ident| $body:expr) => {
        match $task {
            $crate::train::task::Task::Text { data: $data, model: $model, .. } => $body,
            $crate::train::task::Task::Mlp { data: $data, model: $model } => $body,
            $crate::train::task::Task::Logistic { data: $data, model: $model } => $body,
            $crate::train::task::Task::Regressor { data: $data, model: $model } => $body,
        }
    };
}

/// Runs a block with the model and the split of a task, whatever their types.
macro_rules! with_task {
    ($task:expr, |$model:ident, $split:ident| $body:expr) => {
        $crate::train::task::with_data!($task, |$model, data| {
            let $split = &data.split;
            $body
        })
    };
}
pub(crate) use {with_data, with_task};

impl Task {
    /// Reads the data and sets up the model.
    pub fn open(args: &TaskArgs) -> anyhow::Result<Self> {
        for (name, width) in [("--embedding", args.embedding), ("--hidden", args.hidden)] {
            if width == 0 {
                bail!("{name} is 0, but it must be at least 1");
            }
        }
        for (name, path) in [("--vocabulary", &args.vocabulary), ("--schema", &args.schema)] {
            if let Some(path) = path.as_ref().filter(|path| path.exists() && !path.is_file()) {
                bail!("{name} is {}, which is not a regular file", path.display());
            }
        }
        let options = args.options();
        let task = match (data::open(&args.data.parse::<Source>()?, &options)?, args.model) {
            (Dataset::Text(data), None | Some(ModelName::Lstm)) => {
                let projection = (args.projection > 0).then_some(args.projection);
                let (vocabulary, embedding, hidden) = (data.vocabulary.len(), args.embedding, args.hidden);
                let model = Lstm { vocabulary, embedding, hidden, projection }.checked()?;
                Task::Text { model, length: options.length(data.vocabulary.tokens()), data }
            }
            (Dataset::Classes(data), model) => {
                let features = data.meaning.features();
                let classes = data.meaning.classes().unwrap_or(0);
                let images = matches!(data.meaning, Meaning::Pixels { .. });
                match model.unwrap_or(if images { ModelName::Mlp } else { ModelName::Logistic }) {
                    ModelName::Mlp => {
                        let model = Mlp { features, hidden: vec![args.hidden], classes }.checked()?;
                        Task::Mlp { model, data }
                    }
                    ModelName::Logistic => {
                        let model = Logistic { features, classes }.checked()?;
                        Task::Logistic { model, data }
                    }
                    _ => bail!("classes are learned by --model mlp or logistic"),
                }
            }
            (Dataset::Numbers(data), model) => {
                let hidden = match model.unwrap_or(ModelName::Linear) {
                    ModelName::Linear => Vec::new(),
                    ModelName::Mlp => vec![args.hidden],
                    _ => bail!("numbers are learned by --model linear or mlp"),
                };
                let model = Regressor { features: data.meaning.features(), hidden }.checked()?;
                Task::Regressor { model, data }
            }
            (Dataset::Text(_), Some(_)) => {
                bail!(
                    "texts are learned by --model lstm; to predict a column from them, name it with --label"
                )
            }
        };
        Ok(task)
    }

    /// Settings that suit it.
    pub fn defaults(&self) -> Defaults {
        match self {
            Task::Text { .. } => Defaults {
                rounds: 1024,
                clip: 1.0,
                server_learning_rate: 0.25,
                client_learning_rate: Some(2.0),
            },
            _ => Defaults { rounds: 550, clip: 1.0, server_learning_rate: 0.5, client_learning_rate: None },
        }
    }

    /// Whether every user is one example.
    pub fn is_images(&self) -> bool {
        match self {
            Task::Mlp { data, .. } | Task::Logistic { data, .. } => {
                matches!(data.meaning, Meaning::Pixels { .. })
            }
            _ => false,
        }
    }

    /// Name of the data.
    pub fn name(&self) -> &str {
        with_data!(self, |_model, data| &data.name)
    }

    /// What the privacy statement has to add about the data.
    pub fn notes(&self) -> &[String] {
        with_data!(self, |_model, data| &data.notes)
    }

    /// What was left out, cut or filled in, for whoever holds the data.
    pub fn remarks(&self) -> &[Remark] {
        with_data!(self, |_model, data| &data.remarks)
    }

    /// Whose data is protected as one piece.
    pub fn unit(&self) -> PrivacyUnit {
        with_data!(self, |_model, data| data.unit)
    }

    /// Scale of a number that is predicted, in its unit.
    pub fn scale(&self) -> Option<f64> {
        match self {
            Task::Regressor { data: SampleData { meaning: Meaning::Columns(schema), .. }, .. } => {
                schema.scale().map(|(_, scale)| scale)
            }
            _ => None,
        }
    }

    /// Users for training, validation and test.
    pub fn users(&self) -> (usize, usize, usize) {
        use dpmf_train::Users;
        with_task!(self, |_model, split| (split.train.users(), split.validation.users(), split.test.users()))
    }

    /// Parameters of the model.
    pub fn parameters(&self) -> usize {
        with_task!(self, |model, _split| model.parameters())
    }

    /// What its model says of itself.
    pub fn card(&self) -> Card {
        let (model, input) = match self {
            Task::Text { data, model, length } => {
                let (tokens, symbols) = (data.vocabulary.tokens(), data.vocabulary.symbols().to_vec());
                (Network::from(*model), Input::Text { tokens, symbols, length: *length })
            }
            Task::Mlp { data, model } => {
                (model.clone().into(), Input::Features { meaning: data.meaning.clone() })
            }
            Task::Logistic { data, model } => {
                ((*model).into(), Input::Features { meaning: data.meaning.clone() })
            }
            Task::Regressor { data, model } => {
                (model.clone().into(), Input::Features { meaning: data.meaning.clone() })
            }
        };
        Card { model, input, data: self.name().to_owned(), notes: self.notes().to_vec() }
    }

    /// A line for people.
    pub fn describe(&self) -> String {
        let (train, validation, test) = self.users();
        let (name, parameters) = (self.name(), self.parameters());
        let predicts = match self.card().input {
            Input::Features { meaning: Meaning::Columns(schema) } => {
                let what =
                    schema.classes().map_or("a number".into(), |c| format!("one of {} classes", c.len()));
                format!("; predicts `{}`, {what}", schema.label.column())
            }
            _ => String::new(),
        };
        format!(
            "{name}: {train} users to train on, {validation} to validate, {test} to test{predicts}; {parameters} parameters"
        )
    }
}
