//! How good a model is on data that it was not trained on.

use super::{Input, Predictions, SavedModel};
use crate::clients::evaluate;
use crate::data::{self, Dataset, Meaning, Options, Rows, Schema, Source, Tokens, Vocabulary};
use crate::error::{Error, Result};
use crate::hint::Hint;
use crate::model::Network;
use serde::Serialize;
use std::path::Path;

/// What came of comparing a model with data. It is of those rows: no ε covers it.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Evaluation {
    /// Of texts.
    Texts {
        /// Tokens to guess.
        tokens: u64,
        /// What a token is.
        token: Tokens,
        /// Share of tokens guessed right.
        accuracy: f64,
        /// Mean cross-entropy of a token, in nats.
        loss: f64,
        /// `e` to the power of the loss.
        perplexity: f64,
    },
    /// Of classes.
    Classes {
        /// Number of rows.
        rows: usize,
        /// Share of rows whose likeliest class is the right one.
        accuracy: f64,
        /// Mean cross-entropy, in nats.
        loss: f64,
        /// Names of the classes.
        classes: Vec<String>,
        /// Rows of each class, by the class that was predicted.
        confusion: Vec<Vec<u64>>,
    },
    /// Of numbers, in the unit of the label.
    Numbers {
        /// Number of rows.
        rows: usize,
        /// Root of the mean squared error.
        rmse: f64,
        /// Mean absolute error.
        mean_absolute_error: f64,
        /// Share of the variance that is explained; nothing where all rows have one number.
        r2: Option<f64>,
    },
}

impl SavedModel {
    /// What the features mean that the model reads.
    ///
    /// Errors: a model of texts.
    pub fn meaning(&self) -> Result<&Meaning> {
        match &self.card.input {
            Input::Features { meaning } => Ok(meaning),
            Input::Text { .. } => {
                Err(Error::argument("model", "of text", "only a model of classes or numbers predicts rows")
                    .with_hint(Hint::Sample))
            }
        }
    }

    /// Features of the rows of a table, or of the test images of a directory, and what was filled in.
    ///
    /// Errors: a model of texts; a file or column that is not there; every malformed row, with its number.
    pub fn features(&self, data: &str) -> Result<(Vec<f32>, Vec<String>)> {
        match self.meaning()? {
            Meaning::Columns(schema) => {
                let Rows { features, remarks } = Rows::read(Path::new(data), schema)?;
                Ok((features, remarks))
            }
            meaning @ Meaning::Pixels { .. } => Ok((images(meaning, data)?.0, Vec::new())),
        }
    }

    /// Compares the model with the rows of a table, whose texts are in the column `text`, or with the test images of a directory;
    /// also gives what was filled in.
    ///
    /// Errors: those of [`features`](Self::features); a column of texts for a model that reads none.
    pub fn evaluate(&self, data: &str, text: Option<&str>) -> Result<(Evaluation, Vec<String>)> {
        let path = Path::new(data);
        if let (Input::Text { tokens, symbols, length }, Network::Lstm(model)) =
            (&self.card.input, &self.card.model)
        {
            let vocabulary = Vocabulary::new(*tokens, symbols.iter().cloned())?;
            let corpus = data::encoded(path, text, &vocabulary, *length)?;
            let score = evaluate(model, &self.parameters, &corpus, 0..corpus.len());
            let count = score.predictions as f64;
            let (loss, accuracy) = (score.loss / count, score.correct as f64 / count);
            let (tokens, token) = (score.predictions, *tokens);
            return Ok((
                Evaluation::Texts { tokens, token, accuracy, loss, perplexity: loss.exp() },
                Vec::new(),
            ));
        }
        if let Some(text) = text {
            let rule = "a text column is for text models, but this model reads features";
            return Err(Error::argument("text", text, rule));
        }
        match self.meaning()? {
            meaning @ Meaning::Pixels { .. } => {
                let (features, truth) = images(meaning, data)?;
                Ok((self.classified(meaning, &features, &truth)?, Vec::new()))
            }
            meaning @ Meaning::Columns(schema) if schema.classes().is_some() => {
                let (rows, truth) = Rows::with_classes(path, schema)?;
                Ok((self.classified(meaning, &rows.features, &truth)?, rows.remarks))
            }
            Meaning::Columns(schema) => {
                let (rows, truth) = Rows::with_values(path, schema)?;
                Ok((self.measured(schema, &rows.features, &truth)?, rows.remarks))
            }
        }
    }

    fn classified(&self, meaning: &Meaning, features: &[f32], truth: &[u16]) -> Result<Evaluation> {
        let Predictions::Classes(rows) = self.predict(features)? else { return Err(odd()) };
        let classes: Vec<String> =
            (0..meaning.classes().unwrap_or(0)).map(|class| meaning.class(class)).collect();
        let mut confusion = vec![vec![0_u64; classes.len()]; classes.len()];
        let mut loss = 0.0;
        for (row, class) in rows.iter().zip(truth.iter().copied().map(usize::from)) {
            confusion[class][likeliest(row)] += 1;
            loss -= row[class].max(f64::MIN_POSITIVE).ln();
        }
        let right: u64 = (0..classes.len()).map(|class| confusion[class][class]).sum();
        let count = rows.len() as f64;
        let (accuracy, loss) = (right as f64 / count, loss / count);
        Ok(Evaluation::Classes { rows: rows.len(), accuracy, loss, classes, confusion })
    }

    fn measured(&self, schema: &Schema, features: &[f32], truth: &[f32]) -> Result<Evaluation> {
        let Predictions::Numbers(numbers) = self.predict(features)? else { return Err(odd()) };
        let (center, scale) = schema.scale().unwrap_or((0.0, 1.0));
        let truth: Vec<f64> = truth.iter().map(|value| center + scale * f64::from(*value)).collect();
        let count = truth.len() as f64;
        let mean = truth.iter().sum::<f64>() / count;
        let errors = || numbers.iter().zip(&truth).map(|(y, t)| y - t);
        let squares: f64 = errors().map(|error| error * error).sum();
        let spread: f64 = truth.iter().map(|t| (t - mean).powi(2)).sum();
        Ok(Evaluation::Numbers {
            rows: truth.len(),
            rmse: (squares / count).sqrt(),
            mean_absolute_error: errors().map(f64::abs).sum::<f64>() / count,
            r2: (spread > 0.0).then_some(1.0 - squares / spread),
        })
    }
}

fn odd() -> Error {
    Error::argument("model", "of another kind", "it does not predict what its schema says")
}

/// The first of the likeliest classes.
pub fn likeliest(row: &[f64]) -> usize {
    let mut best = 0;
    for (class, p) in row.iter().enumerate() {
        if *p > row[best] {
            best = class;
        }
    }
    best
}

/// Pixels and classes of the test images.
fn images(meaning: &Meaning, data: &str) -> Result<(Vec<f32>, Vec<u16>)> {
    let rule = "the model is of images: give fashion-mnist[:DIRECTORY], with images of its size";
    let refused = || Error::argument("data", format!("{data:?}"), rule);
    let source: Source = data.parse().map_err(|_| refused())?;
    if !matches!(source, Source::FashionMnist(_)) {
        return Err(refused());
    }
    match data::open(&source, &Options::default())? {
        Dataset::Classes(found) if found.meaning == *meaning => {
            let test = found.split.test;
            Ok((test.features().to_vec(), test.targets().to_vec()))
        }
        _ => Err(refused()),
    }
}
