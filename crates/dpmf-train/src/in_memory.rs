//! A private model from data in memory: planned, rehearsed and trained in one call, without files.

use crate::error::Result;
use crate::plan::Plan;
use crate::planner::RunPlanner;
use crate::recipe::{MechanismChoice, Privacy, Settings};
use crate::rehearsal::{Given, Rehearsed, rehearse};
use crate::run::{KeySource, Outcome, Point, digest};
use crate::saved::SavedModel;
use crate::summary::Ended;
use crate::task::{Length, Task};
use crate::training::Training;
use crate::{Baseline, Model, Users, evaluate, with_task};
use dpmf::disk::Place;
use dpmf::planner::Listener;
use dpmf::{Optimizer, Sampling};
use std::path::Path;
use std::time::Instant;

/// What may be said of a training; what is not is rehearsed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Wishes {
    /// ε of the guarantee.
    pub epsilon: f64,
    /// δ of the guarantee.
    pub delta: f64,
    /// The server's learning rate.
    pub learning_rate: Option<f64>,
    /// Passes over the users.
    pub epochs: Option<usize>,
    /// Users in a round.
    pub clients: Option<usize>,
    /// Norm that a user's contribution is clipped to.
    pub clip: Option<f64>,
}

/// A model with what its training tells.
pub struct Trained {
    /// The model, with its privacy statement.
    pub model: SavedModel,
    /// What was rehearsed; nothing where everything was given.
    pub rehearsed: Option<Rehearsed>,
    /// Scores on held-out test users and those of the trivial model, which ε does not cover; nothing where nobody was held out.
    pub scores: Option<(Point, Baseline)>,
}

/// The plan of a training.
///
/// Errors: those of the planner; wishes outside their ranges.
pub fn plan(
    task: &Task,
    wishes: &Wishes,
    planner: &mut RunPlanner,
    folder: Option<&Path>,
    listen: Listener<'_>,
) -> Result<(Plan, Option<Rehearsed>)> {
    let length = Length::Epochs(wishes.epochs.unwrap_or(1));
    let base = task.settings(length, wishes.clients, Sampling::None, None)?;
    let mut settings = Settings {
        privacy: Privacy::Epsilon { epsilon: wishes.epsilon, delta: wishes.delta },
        clip: wishes.clip.unwrap_or(base.clip),
        server_learning_rate: wishes.learning_rate.unwrap_or(base.server_learning_rate),
        ..base
    };
    settings.recipe.mechanism = MechanismChoice::Planned;
    let given = Given {
        learning_rate: wishes.learning_rate.is_some(),
        length: wishes.epochs.is_some(),
        clients: wishes.clients.is_some(),
        clip: wishes.clip.is_some(),
    };
    let mut rehearsed = None;
    if let Some(shape) = task.shape() {
        settings.optimizer = Optimizer::default();
        if !given.everything() {
            let found = rehearse(&shape, &settings, given, planner, folder, listen)?;
            found.apply(&mut settings, given);
            rehearsed = Some(found);
        }
    }
    Ok((planner.plan(&settings, listen)?, rehearsed))
}

/// Trains as planned, in memory alone: what is released is the model at the end.
///
/// Errors: those of the key and of the noise stream.
pub fn train(task: &Task, plan: &Plan, rehearsed: Option<Rehearsed>, key: &KeySource) -> Result<Trained> {
    with_task!(task, |model, split| {
        let clock = Instant::now();
        let secret = key.secret(&Place::from("."), plan, &digest(&split.train), model)?;
        let cohorts = plan.cohorts(split.train.users(), &secret)?;
        let private = plan.private_run(&secret, model.parameters())?;
        let origin = private.as_ref().map(|run| run.origin());
        let mut training = Training::new(model, &split.train, plan, cohorts, private)?;
        while training.advance()? {}
        let users = split.test.users();
        let test = (users > 0).then(|| {
            Point::new(training.done(), model, evaluate(model, training.released(), &split.test, 0..users))
        });
        let nothing = Point { round: training.done(), loss: f64::NAN, accuracy: None };
        let outcome = Outcome {
            test,
            validation: nothing,
            curve: Vec::new(),
            diverged: false,
            burned: 0,
            seconds: clock.elapsed().as_secs_f64(),
            key: origin,
        };
        let ended = Ended { plan: plan.clone(), outcome };
        let model = SavedModel::new(task.card(), training.released().to_vec(), &ended)?;
        Ok(Trained { model, rehearsed, scores: test.map(|test| (test, task.baseline())) })
    })
}
