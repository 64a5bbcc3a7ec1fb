//! What is learned: a data set with a model for it, and settings that suit them.

use crate::baseline::Baseline;
use crate::clients::Local;
use crate::data::{self, Dataset, Feature, Meaning, Options, SampleData, Source, TextData, Users};
use crate::error::{Error, Result};
use crate::hint::Remark;
use crate::model::{Logistic, Lstm, Mlp, Model, Network, Regressor};
use crate::recipe::{MechanismChoice, PlanLimits, Privacy, Recipe, Settings, Steps};
use crate::rehearsal::Shape;
use crate::saved::{Card, Input};
use dpmf::accounting::{Arithmetic, PrivacyUnit};
use dpmf::planner::Request;
use dpmf::{Optimizer, Participation, Sampling};

/// A kind of model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelKind {
    /// Embedding, LSTM, projection, softmax.
    Lstm,
    /// One hidden layer.
    Mlp,
    /// Multinomial logistic regression.
    Logistic,
    /// Linear regression.
    Linear,
}

/// Which model, of what widths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelOptions {
    /// Its kind; by default an LSTM for text, one hidden layer for images, none for tables.
    pub kind: Option<ModelKind>,
    /// Width of the token embedding.
    pub embedding: usize,
    /// Width of the hidden layer.
    pub hidden: usize,
    /// Width of the projection before the softmax of an LSTM; nothing for none.
    pub projection: Option<usize>,
}

/// How long training goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Length {
    /// One pass over the users, or the rounds that suit the task if these are fewer.
    Pass,
    /// So many rounds.
    Rounds(usize),
    /// So many passes over the users.
    Epochs(usize),
}

/// Server step sizes where nothing is said.
pub const SCHEDULE: &str = "cooldown:0.25:0.05";
/// Server momentum where nothing is said.
pub const MOMENTUM: f64 = 0.9;
/// δ of the guarantee where nothing is said.
pub const DELTA: f64 = 1e-6;
/// ε of the guarantee where nothing is said.
pub const EPSILON: f64 = 2.0;
/// Local passes of a user over their own examples where nothing is said.
pub const CLIENT_PASSES: usize = 1;
/// Examples in a user's local batch where nothing is said.
pub const CLIENT_BATCH: usize = 16;
/// Users in a round where nothing is said.
const CLIENTS: usize = 100;

/// A data set with a model.
#[allow(clippy::large_enum_variant, reason = "there is one")]
pub enum Task {
    /// Texts of users, and a model that writes such.
    Text {
        /// The texts.
        data: TextData,
        /// The model.
        model: Lstm,
        /// Largest number of tokens to predict in an example.
        length: usize,
    },
    /// Classes, by a hidden layer.
    Mlp {
        /// Features with classes.
        data: SampleData<u16>,
        /// The model.
        model: Mlp,
    },
    /// Classes, by a linear model.
    Logistic {
        /// Features with classes.
        data: SampleData<u16>,
        /// The model.
        model: Logistic,
    },
    /// Numbers.
    Regressor {
        /// Features with numbers.
        data: SampleData<f32>,
        /// The model.
        model: Regressor,
    },
}

/// Runs a block with the model and the data of a [`Task`], whatever their types.
#[macro_export]
macro_rules! with_data {
    ($task:expr, |$model:ident, $data:ident| $body:expr) => {
        match $task {
            $crate::Task::Text { data: $data, model: $model, .. } => $body,
            $crate::Task::Mlp { data: $data, model: $model } => $body,
            $crate::Task::Logistic { data: $data, model: $model } => $body,
            $crate::Task::Regressor { data: $data, model: $model } => $body,
        }
    };
}

/// Runs a block with the model and the split of a [`Task`], whatever their types.
#[macro_export]
macro_rules! with_task {
    ($task:expr, |$model:ident, $split:ident| $body:expr) => {
        $crate::with_data!($task, |$model, data| {
            let $split = &data.split;
            $body
        })
    };
}

impl Task {
    /// Reads the data and sets up the model.
    ///
    /// Errors: those of [`data::open`]; widths of zero; a model that does not learn what the data holds.
    pub fn open(source: &Source, options: &Options, model: ModelOptions) -> Result<Self> {
        Self::new(data::open(source, options)?, options, model)
    }

    /// Sets up the model of a data set that was read with these options.
    ///
    /// Errors: widths of zero; a model that does not learn what the data holds.
    pub fn new(dataset: Dataset, options: &Options, model: ModelOptions) -> Result<Self> {
        let ModelOptions { kind, embedding, hidden, projection } = model;
        for (name, width) in [("embedding", embedding), ("hidden", hidden)] {
            if width == 0 {
                return Err(Error::argument(name, 0, "a width must be at least 1"));
            }
        }
        let unfit = |rule| {
            let named = kind.map_or_else(String::new, |kind| format!("{kind:?}").to_lowercase());
            Err(Error::argument("model", named, rule))
        };
        Ok(match (dataset, kind) {
            (Dataset::Text(data), None | Some(ModelKind::Lstm)) => {
                let vocabulary = data.vocabulary.len();
                let model = Lstm { vocabulary, embedding, hidden, projection }.checked()?;
                Task::Text { model, length: options.length(data.vocabulary.tokens()), data }
            }
            (Dataset::Text(_), Some(_)) => {
                return unfit(
                    "texts are learned by lstm; to predict a column from them, name it as the label",
                );
            }
            (Dataset::Classes(data), kind) => {
                let features = data.meaning.features();
                let classes = data.meaning.classes().unwrap_or(0);
                let images = matches!(data.meaning, Meaning::Pixels { .. });
                match kind.unwrap_or(if images { ModelKind::Mlp } else { ModelKind::Logistic }) {
                    ModelKind::Mlp => {
                        let model = Mlp { features, hidden: vec![hidden], classes }.checked()?;
                        Task::Mlp { model, data }
                    }
                    ModelKind::Logistic => {
                        let model = Logistic { features, classes }.checked()?;
                        Task::Logistic { model, data }
                    }
                    _ => return unfit("classes are learned by mlp or logistic"),
                }
            }
            (Dataset::Numbers(data), kind) => {
                let hidden = match kind.unwrap_or(ModelKind::Linear) {
                    ModelKind::Linear => Vec::new(),
                    ModelKind::Mlp => vec![hidden],
                    _ => return unfit("numbers are learned by linear or mlp"),
                };
                let model = Regressor { features: data.meaning.features(), hidden }.checked()?;
                Task::Regressor { model, data }
            }
        })
    }

    /// Settings that suit it, of the optimal mechanism: what is not said is as it does well.
    ///
    /// Errors: no rounds to train in, or more clients than users; clients that a sampler does not draw.
    pub fn settings(
        &self,
        length: Length,
        clients: Option<usize>,
        sampling: Sampling,
        participation: Option<Participation>,
    ) -> Result<Settings> {
        let users = self.users().0;
        let clients = self.drawn(clients, sampling)?.unwrap_or(CLIENTS.min(users / 10).max(1));
        let (most, server_learning_rate) = match self {
            Task::Text { .. } => (1024, 0.25),
            _ => (550, 0.5),
        };
        let rounds = match length {
            Length::Rounds(rounds) => rounds,
            Length::Epochs(epochs) => Request::steps(users as u64, clients as u64, epochs)?,
            Length::Pass => match users / clients.max(1) {
                0 => {
                    return Err(Error::argument(
                        "clients",
                        clients,
                        "there must be as many users to train on",
                    ));
                }
                rounds => rounds.min(most),
            },
        };
        let epochs = match length {
            Length::Epochs(epochs) => Some(epochs),
            _ => None,
        };
        let participation = match (sampling.participation(rounds)?, participation, epochs) {
            (Some(meant), None, _) => meant,
            (_, Some(participation), _) => participation,
            (None, None, None | Some(1)) => Participation::Single,
            (None, None, Some(times)) => Participation::Epochs { times },
        };
        Ok(Settings {
            recipe: Recipe {
                mechanism: MechanismChoice::Named("optimal".parse()?),
                clients,
                local: self.local(None, CLIENT_PASSES, CLIENT_BATCH)?,
                dropout: 0.0,
                arithmetic: Arithmetic::default(),
                seed: 0,
            },
            participation,
            sampling,
            rounds,
            clip: 1.0,
            optimizer: Optimizer { momentum: MOMENTUM, ..Default::default() },
            schedule: Steps::Schedule(SCHEDULE.into()),
            server_learning_rate,
            unit: self.unit(),
            privacy: Privacy::Epsilon { epsilon: EPSILON, delta: DELTA },
            beside: None,
            limits: PlanLimits { epochs, ..PlanLimits::new(users) },
        })
    }

    /// What a user computes: passes of its own at a learning rate or, where that is neither given nor usual, a gradient.
    ///
    /// Errors: a learning rate where every user is one example.
    pub fn local(&self, learning_rate: Option<f64>, passes: usize, batch: usize) -> Result<Local> {
        let usual = matches!(self, Task::Text { .. }).then_some(2.0);
        match learning_rate {
            Some(rate) if self.is_images() => {
                let rule = "it has no meaning where every user is one example";
                Err(Error::argument("client learning rate", rate, rule))
            }
            given => Ok(match given.or(usual) {
                Some(learning_rate) => Local::Sgd { learning_rate, passes, batch },
                None => Local::Gradient,
            }),
        }
    }

    /// Users in a round: those asked for, or those that a sampler draws on average; nothing where neither says.
    ///
    /// Errors: clients that the sampler does not draw.
    pub fn drawn(&self, clients: Option<usize>, sampling: Sampling) -> Result<Option<usize>> {
        if sampling == Sampling::None {
            return Ok(clients);
        }
        let users = self.users().0;
        let expected = (dpmf::sampler::expected_batch(sampling, users).round() as usize).max(1);
        match clients {
            Some(clients) if clients != expected => Err(Error::InvalidArgument {
                name: "clients",
                value: clients.to_string(),
                rule: "the sampling determines the average number of users in a round: remove it",
            }),
            _ => Ok(Some(expected)),
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

    /// The sizes of a table whose settings can be rehearsed; nothing for texts, images, and models too large to try.
    pub fn shape(&self) -> Option<Shape> {
        /// Parameters up to which a rehearsal takes seconds.
        const LARGEST: usize = 1 << 16;
        let (meaning, hidden) = match self {
            Task::Text { .. } => return None,
            Task::Mlp { data, model } => (&data.meaning, model.hidden.clone()),
            Task::Logistic { data, .. } => (&data.meaning, Vec::new()),
            Task::Regressor { data, model } => (&data.meaning, model.hidden.clone()),
        };
        let Meaning::Columns(schema) = meaning else { return None };
        let mut shape = Shape {
            users: self.users().0,
            numbers: 0,
            categories: Vec::new(),
            words: Vec::new(),
            classes: meaning.classes(),
            hidden,
        };
        for feature in &schema.features {
            match feature {
                Feature::Number { .. } => shape.numbers += 1,
                Feature::Date { parts, .. } => {
                    shape.numbers += 1;
                    shape.categories.extend(parts.iter().map(|part| part.width()));
                }
                Feature::Category { values, .. } => shape.categories.push(values.len()),
                Feature::Words { buckets, .. } => shape.words.push(*buckets),
            }
        }
        (self.parameters() <= LARGEST).then_some(shape)
    }

    /// What the best constant scores on held-out users, whom no ε covers.
    pub fn baseline(&self) -> Baseline {
        match self {
            Task::Text { data, .. } => Baseline::of_texts(&data.split),
            Task::Mlp { data, .. } | Task::Logistic { data, .. } => Baseline::of_classes(&data.split),
            Task::Regressor { data, .. } => Baseline::of_numbers(&data.split, self.scale()),
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
        let unit = self.unit().name();
        format!(
            "{name}: {train} {unit}s to train on, {validation} to validate, {test} to test{predicts}; {parameters} parameters"
        )
    }
}
