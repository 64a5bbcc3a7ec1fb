//! Any of the models, by its sizes: what a file of a trained model names.

use super::{Block, Logistic, Lstm, Mlp, Model, Regressor};
use crate::Result;
use serde::{Deserialize, Serialize};

/// A model of any kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub enum Network {
    /// The next token of a text.
    Lstm(Lstm),
    /// A class, by one hidden layer or several.
    Mlp(Mlp),
    /// A class, by logistic regression.
    Logistic(Logistic),
    /// A number.
    Regressor(Regressor),
}

/// Runs a block with the model inside, whatever its type.
macro_rules! any {
    ($network:expr, |$model:ident| $body:expr) => {
        match $network {
            Network::Lstm($model) => $body,
            Network::Mlp($model) => $body,
            Network::Logistic($model) => $body,
            Network::Regressor($model) => $body,
        }
    };
}

impl Network {
    /// The model itself if its sizes make sense.
    ///
    /// Errors: those of the model.
    pub fn checked(self) -> Result<Self> {
        Ok(match self {
            Network::Lstm(model) => Network::Lstm(model.checked()?),
            Network::Mlp(model) => Network::Mlp(model.checked()?),
            Network::Logistic(model) => Network::Logistic(model.checked()?),
            Network::Regressor(model) => Network::Regressor(model.checked()?),
        })
    }

    /// Number of parameters.
    pub fn parameters(&self) -> usize {
        any!(self, |model| model.parameters())
    }

    /// Names, places and shapes of the blocks, in order; they cover the parameters.
    pub fn layout(&self) -> Vec<Block> {
        any!(self, |model| model.layout())
    }
}

impl From<Lstm> for Network {
    fn from(model: Lstm) -> Self {
        Network::Lstm(model)
    }
}

impl From<Mlp> for Network {
    fn from(model: Mlp) -> Self {
        Network::Mlp(model)
    }
}

impl From<Logistic> for Network {
    fn from(model: Logistic) -> Self {
        Network::Logistic(model)
    }
}

impl From<Regressor> for Network {
    fn from(model: Regressor) -> Self {
        Network::Regressor(model)
    }
}
