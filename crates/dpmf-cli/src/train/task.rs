//! What is learned: a data set and the model for it.

use crate::workload::count;
use anyhow::bail;
use dpmf_train::Model;
use dpmf_train::data::{self, Dataset, ImageData, Options, Source, TextData, Tokens, VocabularyFrom};
use dpmf_train::model::{Logistic, Lstm, Mlp};
use serde::{Deserialize, Serialize};
use std::path::{PathBuf, absolute};

/// Which data, which model.
#[derive(clap::Args, Clone, Serialize, Deserialize)]
#[command(next_help_heading = "Task")]
pub struct TaskArgs {
    /// names, quotes[:FILE], fashion-mnist[:DIR], stackoverflow:FILE (if built with --features stackoverflow), or a
    /// .csv, .tsv or .jsonl file with columns user and text
    #[arg(long, value_name = "DATA", default_value = "names")]
    data: String,

    /// Most users of each set
    #[arg(long, value_name = "k", value_parser = count)]
    users: Option<usize>,

    /// What a token of text is
    #[arg(long, value_enum)]
    tokens: Option<TokenName>,

    /// Words from a public list, one a line, instead of from a tenth of the users taken for public
    #[arg(long, value_name = "FILE")]
    vocabulary: Option<PathBuf>,

    /// Words from the training users themselves, which ε does not cover
    #[arg(long, conflicts_with = "vocabulary")]
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

    /// The model: lstm for text; mlp or logistic for images
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
        Ok(Self { data: data.to_string(), vocabulary, ..self.clone() })
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
        }
    }
}

/// Settings that suit a kind of data.
pub struct Defaults {
    pub rounds: usize,
    pub clip: f64,
    pub server_learning_rate: f64,
    /// Nothing where a user is one example.
    pub client_learning_rate: Option<f64>,
}

/// A data set with a model.
#[allow(clippy::large_enum_variant, reason = "there is one")]
pub enum Task {
    Text { data: TextData, model: Lstm },
    Mlp { data: ImageData, model: Mlp },
    Logistic { data: ImageData, model: Logistic },
}

/// Runs a block with the model and the split of a task, whatever their types.
macro_rules! with_task {
    ($task:expr, |$model:ident, $split:ident| $body:expr) => {
        match $task {
            $crate::train::task::Task::Text { data, model: $model } => {
                let $split = &data.split;
                $body
            }
            $crate::train::task::Task::Mlp { data, model: $model } => {
                let $split = &data.split;
                $body
            }
            $crate::train::task::Task::Logistic { data, model: $model } => {
                let $split = &data.split;
                $body
            }
        }
    };
}
pub(crate) use with_task;

impl Task {
    /// Reads the data and sets up the model.
    pub fn open(args: &TaskArgs) -> anyhow::Result<Self> {
        for (name, width) in [("--embedding", args.embedding), ("--hidden", args.hidden)] {
            if width == 0 {
                bail!("{name} is 0, but it must be at least 1");
            }
        }
        if let Some(path) = args.vocabulary.as_ref().filter(|path| path.exists() && !path.is_file()) {
            bail!("--vocabulary is {}, which is not a file of words", path.display());
        }
        Ok(match (data::open(&args.data.parse::<Source>()?, &args.options())?, args.model) {
            (Dataset::Text(data), None | Some(ModelName::Lstm)) => {
                let projection = (args.projection > 0).then_some(args.projection);
                let (vocabulary, embedding, hidden) = (data.vocabulary.len(), args.embedding, args.hidden);
                let model = Lstm { vocabulary, embedding, hidden, projection }.checked()?;
                Task::Text { model, data }
            }
            (Dataset::Images(data), None | Some(ModelName::Mlp)) => {
                let (features, hidden, classes) = (data.features, vec![args.hidden], data.classes);
                let model = Mlp { features, hidden, classes }.checked()?;
                Task::Mlp { model, data }
            }
            (Dataset::Images(data), Some(ModelName::Logistic)) => {
                let model = Logistic { features: data.features, classes: data.classes }.checked()?;
                Task::Logistic { model, data }
            }
            (Dataset::Text(_), Some(_)) => bail!("text is learned by --model lstm"),
            (Dataset::Images(_), Some(ModelName::Lstm)) => {
                bail!("images are learned by --model mlp or logistic")
            }
        })
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

    /// Name of the data.
    pub fn name(&self) -> &str {
        match self {
            Task::Text { data, .. } => &data.name,
            Task::Mlp { data, .. } | Task::Logistic { data, .. } => &data.name,
        }
    }

    /// What the privacy statement has to add about the data.
    pub fn notes(&self) -> &[String] {
        match self {
            Task::Text { data, .. } => &data.notes,
            Task::Mlp { data, .. } | Task::Logistic { data, .. } => &data.notes,
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

    /// A line for people.
    pub fn describe(&self) -> String {
        let (train, validation, test) = self.users();
        let (name, parameters) = (self.name(), self.parameters());
        format!(
            "{name}: {train} users to train on, {validation} to validate, {test} to test; {parameters} parameters"
        )
    }
}
