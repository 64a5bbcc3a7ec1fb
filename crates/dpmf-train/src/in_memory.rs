//! A private model from data in memory: planned, rehearsed and trained in one call, without files.

use crate::data::{FrameTable, Options};
use crate::error::Result;
use crate::plan::Plan;
use crate::planner::RunPlanner;
use crate::recipe::{MechanismChoice, Privacy, Settings};
use crate::rehearsal::{Given, Rehearsed, rehearse};
use crate::run::{KeySource, Outcome, Point, digest};
use crate::saved::SavedModel;
use crate::summary::FinishedRun;
use crate::task::{Length, ModelKind, ModelOptions, Task};
use crate::training::Training;
use crate::{Baseline, Model, Users, evaluate, with_task};
use dpmf::accounting::{ExtraRelease, gaussian};
use dpmf::disk::DiskPath;
use dpmf::planner::Listener;
use dpmf::{Optimizer, Sampling};
use std::path::Path;
use std::time::Instant;

/// What a caller may set of a training; rehearsal chooses the rest.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TrainingRequest {
    /// ε of the guarantee.
    pub epsilon: f64,
    /// δ of the guarantee.
    pub delta: f64,
    /// Share of the budget that finding a schema may cost; without it, a share that follows from public numbers.
    pub schema_share: Option<f64>,
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

/// A task with the plan of its training.
pub struct Planned {
    /// What is learned.
    pub task: Task,
    /// The plan.
    pub plan: Plan,
    /// What was rehearsed for it; nothing where everything was given.
    pub rehearsed: Option<Rehearsed>,
}

/// What a planner and a rehearsal work with: what they remember, and who listens.
pub struct PlanningContext<'a> {
    /// The planner.
    pub planner: &'a mut RunPlanner,
    /// Where rehearsals are kept.
    pub folder: Option<&'a Path>,
    /// The listener, which is told of progress and may stop the work.
    pub listen: Listener<'a>,
}

/// Plans a training on a table in memory. Where nothing else says what the columns mean, that is found in private, with a share of the
/// budget, after the plan is made: nothing that was found has a say in it but for the learning rate.
///
/// Guarantee: what is found and the training together have the (ε, δ) of the request.
///
/// Errors: those of the planner; a request outside its ranges; tables that cannot be read, or with too few users.
pub fn prepare(
    frame: FrameTable,
    options: &Options,
    model: ModelOptions,
    request: &TrainingRequest,
    key: &KeySource,
    context: PlanningContext<'_>,
) -> Result<Planned> {
    let PlanningContext { planner, folder, listen } = context;
    let mu = |delta: f64| Ok(gaussian::mu(request.epsilon, delta)?);
    let Some(beside) = frame.schema_cost(mu, request.delta, request.schema_share)? else {
        let task = Task::new(frame.read()?, options, model)?;
        let (plan, rehearsed, _) = planned(&task, request, None, planner, folder, listen)?;
        return Ok(Planned { task, plan, rehearsed });
    };
    // A model for one kind of label may not be the one that the outline has.
    let outlined = ModelOptions { kind: model.kind.filter(|kind| *kind == ModelKind::Mlp), ..model };
    let outline = Task::new(frame.outline(beside)?, options, outlined)?;
    let (mut plan, mut rehearsed, mut settings) =
        planned(&outline, request, Some(beside), planner, folder, listen)?;
    let task = Task::new(frame.find(beside, key)?, options, model)?;
    if let (Some(shape), Some(rehearsed), None) = (task.shape(), &mut rehearsed, request.learning_rate) {
        let given = Given { learning_rate: false, length: true, clients: true, clip: true };
        let found = rehearse(&shape, &settings, given, planner, folder, listen)?;
        settings.server_learning_rate = found.learning_rate;
        rehearsed.suit(&found);
        plan = plan.at_rate(&settings)?;
    }
    Ok(Planned { task, plan, rehearsed })
}

/// The plan of a training.
///
/// Errors: those of the planner; a request outside its ranges.
fn planned(
    task: &Task,
    request: &TrainingRequest,
    beside: Option<ExtraRelease>,
    planner: &mut RunPlanner,
    folder: Option<&Path>,
    listen: Listener<'_>,
) -> Result<(Plan, Option<Rehearsed>, Settings)> {
    let length = Length::Epochs(request.epochs.unwrap_or(1));
    let base = task.settings(length, request.clients, Sampling::None, None)?;
    let mut settings = Settings {
        privacy: Privacy::Epsilon { epsilon: request.epsilon, delta: request.delta },
        beside,
        clip: request.clip.unwrap_or(base.clip),
        server_learning_rate: request.learning_rate.unwrap_or(base.server_learning_rate),
        ..base
    };
    settings.recipe.mechanism = MechanismChoice::Planned;
    let given = Given {
        learning_rate: request.learning_rate.is_some(),
        length: request.epochs.is_some(),
        clients: request.clients.is_some(),
        clip: request.clip.is_some(),
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
    let plan = planner.plan(&settings, listen)?;
    Ok((plan, rehearsed, settings))
}

/// Trains as planned, in memory alone: what is released is the model at the end.
///
/// Errors: those of the key and of the noise stream.
pub fn train(planned: Planned, key: &KeySource) -> Result<Trained> {
    let Planned { task, plan, rehearsed } = &planned;
    with_task!(task, |model, split| {
        let clock = Instant::now();
        let secret = key.secret(&DiskPath::from("."), plan, &digest(&split.train), model)?;
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
        let ended = FinishedRun { plan: plan.clone(), outcome };
        let model = SavedModel::new(task.card(), training.released().to_vec(), &ended)?;
        Ok(Trained { model, rehearsed: rehearsed.clone(), scores: test.map(|test| (test, task.baseline())) })
    })
}
