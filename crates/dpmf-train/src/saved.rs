//! A trained model in a file that says what it is: tensors by name, sizes, vocabulary or schema, and its privacy.

mod evaluation;

use crate::data::{Meaning, Tokens, Vocabulary};
use crate::error::{Error, Result};
use crate::hint::Hint;
use crate::model::{Lstm, Network};
use crate::plan::Plan;
use crate::summary::FinishedRun;
use chacha20::ChaCha20Rng;
use dpmf::disk::{self, Access, DiskPath};
use rand::{Rng, SeedableRng};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::io::Write;
use std::path::Path;

pub use evaluation::{Evaluation, likeliest};

/// Version of the file.
const FORMAT: &str = "dpmf-model-1";
/// The only metadata key; one key, since the order of several is not fixed in the container.
const KEY: &str = "dpmf";

/// What a model reads, and what it gives.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "reads")]
pub enum Input {
    /// Tokens of a text.
    Text {
        /// How a text falls into tokens.
        tokens: Tokens,
        /// The symbols, after the three special ones.
        symbols: Vec<String>,
        /// Largest number of tokens to predict in an example it was trained on.
        length: usize,
    },
    /// Features.
    Features {
        /// What they mean, and what is predicted.
        meaning: Meaning,
    },
}

/// What is known of a model before it is trained.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Card {
    /// Its kind and sizes.
    pub model: Network,
    /// What it reads.
    pub input: Input,
    /// Name of the data it learns from.
    pub data: String,
    /// What its privacy statement has to add about the data.
    pub notes: Vec<String>,
}

/// A trained model, with everything that is needed to use it.
///
/// The file is in the safetensors format: a tensor for each block of [`Network::layout`], and one entry of metadata,
/// `dpmf`, with
/// all the rest as JSON. Any reader of that format opens it.
#[derive(Debug, Clone, PartialEq)]
pub struct SavedModel {
    card: Card,
    parameters: Vec<f32>,
    privacy: Option<Value>,
    statement: String,
    plan: String,
}

/// The metadata.
#[derive(Serialize, Deserialize)]
struct Header {
    format: String,
    #[serde(flatten)]
    card: Card,
    /// The privacy statement as data; nothing without privacy.
    privacy: Option<Value>,
    /// The privacy statement as text.
    statement: String,
    /// SHA-256 of the file of the plan it was trained with.
    plan: String,
    /// SHA-256 of the parameters: finds damage, not malice.
    sha256: String,
    version: String,
}

/// How texts are written.
#[derive(Debug, Clone, PartialEq)]
pub struct SampleOptions {
    /// How many.
    pub count: usize,
    /// Maximum length of a text in tokens, beside those it begins with.
    pub length: usize,
    /// Text that every sample begins with.
    pub start: String,
    /// Sampling temperature: below 1 favours likely tokens, above 1 unlikely ones.
    pub temperature: f64,
    /// Seed of the random draws.
    pub seed: u64,
}

impl Default for SampleOptions {
    fn default() -> Self {
        Self { count: 10, length: 40, start: String::new(), temperature: 1.0, seed: 0 }
    }
}

/// What a model makes of features.
#[derive(Debug, Clone, PartialEq)]
pub enum Predictions {
    /// Probabilities of every class, a row each.
    Classes(Vec<Vec<f64>>),
    /// Numbers, in the unit of the label.
    Numbers(Vec<f64>),
}

impl SavedModel {
    /// A model as a run released it.
    ///
    /// Errors: parameters of another number than the model has.
    pub fn new(card: Card, parameters: Vec<f32>, ended: &FinishedRun) -> Result<Self> {
        if parameters.len() != card.model.parameters() {
            let rule = "it must be the number of parameters of the model";
            return Err(Error::argument("parameters", parameters.len(), rule));
        }
        let statement = ended.statement();
        let mut text = match &statement {
            Some(statement) => statement.to_string(),
            None => {
                "Trained without privacy: nothing bounds what the model reveals about the users.\n".into()
            }
        };
        card.notes.iter().for_each(|note| text += &format!("  - {note}\n"));
        Ok(Self {
            privacy: statement.map(|statement| serde_json::to_value(statement).unwrap_or_default()),
            statement: text,
            plan: hash_of(&ended.plan),
            card,
            parameters,
        })
    }

    /// Kind, sizes, input and data.
    pub fn card(&self) -> &Card {
        &self.card
    }

    /// The parameters, in the order of [`Network::layout`].
    pub fn parameters(&self) -> &[f32] {
        &self.parameters
    }

    /// The privacy statement as data; nothing without privacy.
    pub fn privacy(&self) -> Option<&Value> {
        self.privacy.as_ref()
    }

    /// The privacy statement as text.
    pub fn statement(&self) -> &str {
        &self.statement
    }

    /// SHA-256 of the plan it was trained with.
    pub fn plan(&self) -> &str {
        &self.plan
    }

    /// Writes the file.
    ///
    /// Errors: [`dpmf::Error::Io`].
    pub fn save(&self, place: impl Into<DiskPath>) -> Result<()> {
        let bytes: Vec<u8> = self.parameters.iter().flat_map(|x| x.to_le_bytes()).collect();
        let header = Header {
            format: FORMAT.into(),
            card: self.card.clone(),
            privacy: self.privacy.clone(),
            statement: self.statement.clone(),
            plan: self.plan.clone(),
            sha256: digest(&bytes),
            version: env!("CARGO_PKG_VERSION").into(),
        };
        let place = place.into();
        let fault = |message: String| Error::Run { path: place.path().into(), message };
        let header = serde_json::to_string(&header).map_err(|error| fault(error.to_string()))?;
        let blocks = self.card.model.layout();
        let views = blocks.iter().map(|block| {
            let bytes = &bytes[4 * block.range.start..4 * block.range.end];
            let view = TensorView::new(Dtype::F32, block.shape.clone(), bytes)
                .map_err(|error| fault(error.to_string()))?;
            Ok((block.name.clone(), view))
        });
        let views = views.collect::<Result<Vec<_>>>()?;
        let metadata = HashMap::from([(KEY.to_owned(), header)]);
        let file = safetensors::serialize(views, Some(metadata)).map_err(|error| fault(error.to_string()))?;
        Ok(disk::replace(place, Access::Everyone, |out| out.write_all(&file))?)
    }

    /// Reads a file.
    ///
    /// Errors: [`dpmf::Error::Io`]; a file that is something else, of another version, or damaged.
    pub fn load(place: impl Into<DiskPath>) -> Result<Self> {
        let place = place.into();
        Self::parse(&place.read()?, place.path())
    }

    fn parse(bytes: &[u8], path: &Path) -> Result<Self> {
        let fault = |message: String| Error::Run { path: path.to_owned(), message };
        let damaged = |what: String| fault(format!("it is damaged: {what}"));
        let Ok((_, metadata)) = SafeTensors::read_metadata(bytes) else {
            return Err(fault("it is not a safetensors file".into()));
        };
        let entry = metadata.metadata().as_ref().and_then(|entries| entries.get(KEY));
        let Some(entry) = entry else {
            return Err(fault("it is not a model that dpmf trained: it has no dpmf metadata".into()));
        };
        #[derive(Deserialize)]
        struct Format {
            format: String,
        }
        match serde_json::from_str(entry) {
            Ok(Format { format }) if format == FORMAT => (),
            Ok(Format { format }) => {
                return Err(fault(format!(
                    "its format is {format}, but this version of dpmf reads {FORMAT}"
                )));
            }
            Err(_) => return Err(fault("it is a dpmf file, but a mechanism or a plan, not a model".into())),
        }
        let header: Header = serde_json::from_str(entry).map_err(|error| damaged(error.to_string()))?;
        let card = Card { model: header.card.model.checked()?, ..header.card };
        card.check().map_err(damaged)?;
        let tensors = SafeTensors::deserialize(bytes).map_err(|error| damaged(error.to_string()))?;
        let mut raw = Vec::with_capacity(4 * card.model.parameters().min(bytes.len()));
        for block in card.model.layout() {
            let view = tensors
                .tensor(&block.name)
                .map_err(|_| damaged(format!("it has no tensor {}", block.name)))?;
            if view.dtype() != Dtype::F32 || view.shape() != block.shape {
                return Err(damaged(format!(
                    "tensor {} has another type or shape than its model",
                    block.name
                )));
            }
            raw.extend_from_slice(view.data());
        }
        if digest(&raw) != header.sha256 {
            return Err(damaged("its numbers were changed after it was written".into()));
        }
        let parameters = raw.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        let Header { privacy, statement, plan, .. } = header;
        Ok(Self { card, parameters, privacy, statement, plan })
    }

    /// Texts drawn token by token from what the model gives them.
    ///
    /// Guarantee: computed from the model alone, so as private as it is.
    ///
    /// Errors: a model that does not read text; a beginning with symbols that it does not know; limits out of range.
    pub fn write(&self, options: &SampleOptions) -> Result<Vec<String>> {
        let (Input::Text { tokens, symbols, .. }, Network::Lstm(model)) =
            (&self.card.input, &self.card.model)
        else {
            return Err(Error::argument("model", "of features", "only a text model can write texts")
                .with_hint(Hint::Predict));
        };
        let SampleOptions { count, length, start, temperature, seed } = options;
        if !(*temperature > 0.0 && temperature.is_finite()) {
            return Err(Error::argument("temperature", temperature, "it must be positive and finite"));
        }
        if !(1..=10_000).contains(length) || *count > 100_000 {
            let rule = "a text has between 1 and 10000 tokens, and at most 100000 are written";
            return Err(Error::argument("length, count", format!("{length}, {count}"), rule));
        }
        let vocabulary = Vocabulary::new(*tokens, symbols.iter().cloned())?;
        let mut begin = Vec::new();
        vocabulary.encode(start, start.len() + 1, &mut begin);
        begin.retain(|token| *token != Vocabulary::END);
        if begin.is_empty() {
            begin.push(Vocabulary::BEGIN);
        }
        if begin.contains(&Vocabulary::UNKNOWN) {
            let rule = "it has symbols that the model does not know";
            return Err(Error::argument("start", format!("{start:?}"), rule));
        }
        let mut rng = ChaCha20Rng::seed_from_u64(*seed);
        let texts = (0..*count).map(|_| {
            let tokens = self.text(model, begin.clone(), *length, *temperature, &mut rng);
            vocabulary.decode(&tokens)
        });
        Ok(texts.collect())
    }

    /// One text, to its end or to the most tokens.
    fn text(
        &self,
        model: &Lstm,
        mut tokens: Vec<u16>,
        length: usize,
        temperature: f64,
        rng: &mut ChaCha20Rng,
    ) -> Vec<u16> {
        let (mut state, first) = (model.state(), tokens.len());
        let mut next = Vec::new();
        tokens.iter().for_each(|token| next = model.read(&self.parameters, *token, &mut state));
        while tokens.len() - first < length {
            let weights: Vec<f64> = (0..)
                .zip(&next)
                .map(|(token, p)| match token {
                    Vocabulary::BEGIN | Vocabulary::UNKNOWN => 0.0,
                    _ => f64::from(p.max(0.0)).powf(1.0 / temperature),
                })
                .collect();
            let mut left = rng.next_u64() as f64 / 2_f64.powi(64) * weights.iter().sum::<f64>();
            let drawn = weights.iter().position(|weight| {
                left -= weight;
                left < 0.0
            });
            let token = drawn.map_or(Vocabulary::END, |token| token as u16);
            if token == Vocabulary::END {
                break;
            }
            tokens.push(token);
            next = model.read(&self.parameters, token, &mut state);
        }
        tokens
    }

    /// Predictions for feature vectors that lie one after the other.
    ///
    /// Errors: a model that reads text; features that are no whole number of vectors.
    pub fn predict(&self, features: &[f32]) -> Result<Predictions> {
        let Input::Features { meaning } = &self.card.input else {
            return Err(
                Error::argument("model", "of text", "it predicts the next token").with_hint(Hint::Sample)
            );
        };
        if !features.len().is_multiple_of(meaning.features().max(1)) {
            return Err(Error::argument(
                "features",
                features.len(),
                "they must be a whole number of vectors",
            ));
        }
        let classes = |logits: Vec<f32>, classes: usize| {
            Predictions::Classes(logits.chunks_exact(classes).map(probabilities).collect())
        };
        Ok(match (&self.card.model, meaning) {
            (Network::Mlp(model), _) => classes(model.logits(&self.parameters, features), model.classes),
            (Network::Logistic(model), _) => classes(model.logits(&self.parameters, features), model.classes),
            (Network::Regressor(model), Meaning::Columns(schema)) => {
                let (center, scale) = schema.scale().unwrap_or((0.0, 1.0));
                let values = model.values(&self.parameters, features).into_iter();
                Predictions::Numbers(values.map(|value| center + scale * f64::from(value)).collect())
            }
            _ => return Err(Error::argument("model", "of text", "it does not read features")),
        })
    }
}

impl Card {
    /// Whether the model fits what it is said to read.
    fn check(&self) -> std::result::Result<(), String> {
        let fits = match (&self.input, &self.model) {
            (Input::Text { tokens, symbols, .. }, Network::Lstm(model)) => {
                let vocabulary = Vocabulary::new(*tokens, symbols.iter().cloned());
                vocabulary.map_err(|error| error.to_string())?.len() == model.vocabulary
            }
            (Input::Features { meaning }, model) => {
                if let Meaning::Columns(schema) = meaning {
                    schema.clone().checked().map_err(|error| error.to_string())?;
                }
                let sizes = (meaning.features(), meaning.classes());
                match model {
                    Network::Mlp(model) => sizes == (model.features, Some(model.classes)),
                    Network::Logistic(model) => sizes == (model.features, Some(model.classes)),
                    Network::Regressor(model) => sizes == (model.features, None),
                    Network::Lstm(_) => false,
                }
            }
            _ => false,
        };
        if fits { Ok(()) } else { Err("the model does not fit the input that the file describes".into()) }
    }
}

/// Softmax in double precision.
fn probabilities(logits: &[f32]) -> Vec<f64> {
    let largest = logits.iter().fold(f64::NEG_INFINITY, |most, &x| most.max(f64::from(x)));
    let raised: Vec<f64> = logits.iter().map(|&x| libm::exp(f64::from(x) - largest)).collect();
    let sum: f64 = raised.iter().sum();
    raised.into_iter().map(|x| x / sum).collect()
}

fn hash_of(plan: &Plan) -> String {
    plan.hash().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests;
