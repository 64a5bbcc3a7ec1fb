//! Private training with correlated noise: data with users, models over one flat parameter slice, and the loops
//! that join them to a noise stream.

pub mod baseline;
pub mod checkpoint;
pub mod clients;
pub mod cohort;
pub mod data;
pub mod error;
pub mod hint;
pub mod in_memory;
pub mod model;
pub mod plan;
pub mod planner;
pub mod recipe;
pub mod rehearsal;
pub mod run;
pub mod saved;
pub mod server;
pub mod stats;
pub mod summary;
pub mod task;
pub mod training;

pub use baseline::Baseline;
pub use checkpoint::Checkpoints;
pub use clients::{Clients, Local, evaluate};
pub use cohort::Assignment;
pub use data::Users;
pub use error::{Error, Result};
pub use hint::{Hint, Remark};
pub use model::{Model, Score};
pub use plan::{Plan, Secret};
pub use planner::RunPlanner;
pub use recipe::{MechanismChoice, PlanLimits, Privacy, Recipe, Settings, Steps};
pub use rehearsal::{Given, Rehearsed, Shape, rehearse, tempered_rate};
pub use run::{KeySource, Outcome, Pace, Point, Purpose, Run};
pub use saved::{Card, Evaluation, Input, Predictions, SampleOptions, SavedModel};
pub use server::Server;
pub use stats::Estimate;
pub use summary::{FinishedRun, Summary};
pub use task::Task;
pub use training::Training;

/// What kind of example a data set holds and a model learns from.
pub trait Domain {
    /// One example, borrowed from the data set.
    type Example<'a>: Copy + Send + Sync;

    /// Shows an example as bytes, for digests.
    fn bytes(example: Self::Example<'_>, show: &mut dyn FnMut(&[u8]));
}

/// Sequences of tokens; the model predicts each token after the first from those before it.
#[derive(Debug, Clone, Copy)]
pub enum Text {}

impl Domain for Text {
    type Example<'a> = &'a [u16];

    fn bytes(example: &[u16], show: &mut dyn FnMut(&[u8])) {
        show(&(example.len() as u64).to_le_bytes());
        example.iter().for_each(|token| show(&token.to_le_bytes()));
    }
}

/// Feature vectors with a class.
#[derive(Debug, Clone, Copy)]
pub enum Labelled {}

impl Domain for Labelled {
    type Example<'a> = LabelledExample<'a>;

    fn bytes(example: LabelledExample<'_>, show: &mut dyn FnMut(&[u8])) {
        show(&(example.features.len() as u64).to_le_bytes());
        show(&example.label.to_le_bytes());
        example.features.iter().for_each(|x| show(&x.to_le_bytes()));
    }
}

/// A feature vector and the class it belongs to.
#[derive(Debug, Clone, Copy)]
pub struct LabelledExample<'a> {
    /// Features.
    pub features: &'a [f32],
    /// Class, counted from zero.
    pub label: u16,
}

/// Feature vectors with a number to predict.
#[derive(Debug, Clone, Copy)]
pub enum Valued {}

impl Domain for Valued {
    type Example<'a> = ValuedExample<'a>;

    fn bytes(example: ValuedExample<'_>, show: &mut dyn FnMut(&[u8])) {
        show(&(example.features.len() as u64).to_le_bytes());
        show(&example.value.to_le_bytes());
        example.features.iter().for_each(|x| show(&x.to_le_bytes()));
    }
}

/// A feature vector and the number that belongs to it.
#[derive(Debug, Clone, Copy)]
pub struct ValuedExample<'a> {
    /// Features.
    pub features: &'a [f32],
    /// The number, in its own scale: about 0 in the middle, about 1 away from it.
    pub value: f32,
}
