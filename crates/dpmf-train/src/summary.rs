//! What a training gave, as data: terminal, JSON and the report only render it.

use crate::baseline::Baseline;
use crate::plan::Plan;
use crate::rehearsal::Rehearsed;
use crate::run::Outcome;
use crate::stats::Estimate;
use crate::task::Task;
use dpmf::Representation;
use dpmf::accounting::{Amplification, PrivacyCurve, PrivacyStatement};
use dpmf::participation::Pattern;
use serde::{Serialize, Serializer};

/// A run that has ended.
pub struct FinishedRun {
    /// What was planned.
    pub plan: Plan,
    /// What came of it.
    pub outcome: Outcome,
}

impl FinishedRun {
    /// The statement of the run, for the key that it used; nothing without noise.
    pub fn statement(&self) -> Option<PrivacyStatement> {
        let statement = self.plan.mechanism()?.privacy()?.clone();
        let arithmetic = self.plan.recipe().arithmetic;
        let key = self.outcome.key.unwrap_or_default();
        Some(statement.with_key(key).with_arithmetic(arithmetic).of_training())
    }
}

/// Every run of a training, and what they mean together.
#[derive(Debug, Serialize)]
pub struct Summary {
    /// Name of the data.
    pub data: String,
    /// Users to train on.
    pub users: usize,
    /// Rounds.
    pub rounds: usize,
    /// Users in a round.
    pub clients: usize,
    /// How often a user may take part, in the first run.
    pub participation: Option<Pattern>,
    /// Parameters of the model.
    pub parameters: usize,
    /// ε of each private model alone; the largest where they differ.
    pub epsilon: Option<f64>,
    /// δ of each private model alone.
    pub delta: Option<f64>,
    /// The noise multiplier of the first private model.
    pub noise_multiplier: Option<f64>,
    /// Where the key came from: `none` without noise, `system`, or `seeded`.
    pub key: &'static str,
    /// What all private models say about a user together; nothing where there is one or none.
    pub together: Option<Together>,
    /// What ε pays for in the first private model; nothing without one.
    pub privacy: Option<Shares>,
    /// The runs.
    pub runs: Vec<RunRow>,
    /// The runs by mechanism.
    pub summary: Vec<MechanismRow>,
    /// The statement of the first private model.
    pub statement: Option<PrivacyStatement>,
    /// What the statement has to add about the data: who is taken for public, what a user is.
    pub notes: Vec<String>,
    /// What the best constant prediction scores on test users. As all scores, it is not covered by ε.
    pub baseline: Baseline,
    /// The settings that a rehearsal on made-up tables chose; nothing where all were given or none can be rehearsed.
    pub rehearsed: Option<Rehearsed>,
    /// What ε does not cover of what is written here.
    pub not_covered: &'static str,
}

/// What has to be said wherever held-out users are scored.
pub const NOT_COVERED: &str = "scores on held-out users, the trivial model's among them";

/// ε of the parts of one model at its δ.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Shares {
    /// The schema that was found in private, alone; nothing where there was none to find.
    pub schema: Option<f64>,
    /// The training alone.
    pub training: f64,
    /// Both together, composed exactly: what is stated.
    pub total: f64,
}

impl Shares {
    fn new(statement: &PrivacyStatement) -> dpmf::Result<Self> {
        let (calibration, terms) = (statement.calibration(), statement.calibration().terms());
        let (total, delta) = (calibration.epsilon(), calibration.delta());
        let Some(beside) = terms.beside else { return Ok(Self { schema: None, training: total, total }) };
        let training = terms.alone().account_epsilon(calibration.noise_multiplier(), delta)?.epsilon();
        Ok(Self { schema: Some(beside.epsilon(delta)?), training: training.min(total), total })
    }

    /// A sentence for people; nothing where all of it is for training.
    pub fn words(&self) -> Option<String> {
        let shown = dpmf::accounting::statement::epsilon_for_people;
        let schema = shown(self.schema?);
        Some(format!(
            "schema ε = {schema}, training ε = {}, together ε = {}",
            shown(self.training),
            shown(self.total)
        ))
    }
}

/// The guarantee of several models that were trained on the same users.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Together {
    /// Number of private models.
    pub models: usize,
    /// ε of each of them alone; the largest where they differ.
    pub epsilon_alone: f64,
    /// ε of all of them together, rounded up.
    pub epsilon: f64,
    /// δ of all of them together: that of one, or more where users hide in bins.
    pub delta: f64,
}

/// One run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RunRow {
    /// What was asked for: `planned`, `dp-sgd`, or the mechanism.
    pub asked: String,
    /// The mechanism by name, with its choices.
    pub mechanism: String,
    /// By what chance users came into rounds.
    pub sampling: String,
    /// The noise multiplier; nothing without noise.
    pub noise_multiplier: Option<f64>,
    /// Seed of first parameters and cohorts.
    pub seed: u64,
    /// Share of right predictions on test users; nothing where numbers are predicted.
    pub test_accuracy: Option<f64>,
    /// Root of the mean squared error on test users, in the unit of the label; nothing where classes are predicted.
    pub test_rmse: Option<f64>,
    /// Loss on test users.
    pub test_loss: Option<f64>,
    /// Share of right predictions on validation users; nothing where numbers are predicted.
    pub validation_accuracy: Option<f64>,
    /// Loss on validation users.
    pub validation_loss: f64,
    /// The loss is above that of the untrained model.
    pub diverged: bool,
    /// Rounds given up after a crash.
    pub burned: usize,
    /// Buffers of the noise; nothing without noise or for dense rows.
    pub buffers: Option<usize>,
    /// Root loss of the mechanism over the lower bound.
    pub ratio_to_bound: Option<f64>,
    /// Time spent training.
    pub seconds: f64,
}

/// All runs of one mechanism.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MechanismRow {
    /// What was asked for: `planned`, `dp-sgd`, or the mechanism.
    pub asked: String,
    /// The mechanism by name, with its choices.
    pub mechanism: String,
    /// By what chance users came into rounds.
    pub sampling: String,
    /// Mean over the runs, with its confidence interval; nothing where numbers are predicted.
    #[serde(flatten, serialize_with = "accuracy")]
    pub test_accuracy: Option<Estimate>,
    /// Mean over the runs, with its confidence interval; nothing where classes are predicted.
    #[serde(flatten, serialize_with = "rmse")]
    pub test_rmse: Option<Estimate>,
    /// Mean loss on test users.
    pub test_loss: f64,
    /// Root loss of the mechanism over the lower bound.
    pub ratio_to_bound: Option<f64>,
    /// Buffers of the noise; nothing without noise or for dense rows.
    pub buffers: Option<usize>,
    /// Mean time of a run.
    pub seconds: f64,
}

impl Summary {
    /// Sums up the runs of one training on one task, in order; at least one.
    ///
    /// Errors: none for runs that have ended.
    pub fn new(task: &Task, rehearsed: Option<Rehearsed>, ended: &[FinishedRun]) -> crate::Result<Self> {
        let scale = task.scale();
        let statements: Vec<PrivacyStatement> = ended.iter().filter_map(FinishedRun::statement).collect();
        let statement = statements.first().cloned();
        let plan = ended.first().map(|run| &run.plan);
        let runs: Vec<RunRow> = ended.iter().map(|run| RunRow::new(run, scale)).collect();
        Ok(Self {
            data: task.name().to_owned(),
            users: task.users().0,
            rounds: plan.map_or(0, Plan::rounds),
            clients: plan.map_or(0, |plan| plan.recipe().clients),
            participation: plan.map(|plan| plan.participation().pattern(plan.rounds())).transpose()?,
            parameters: task.parameters(),
            epsilon: statements.iter().map(|s| s.calibration().epsilon()).reduce(f64::max),
            delta: statement.as_ref().map(|s| s.calibration().delta()),
            noise_multiplier: statement.as_ref().map(|s| s.calibration().noise_multiplier()),
            key: statement.as_ref().map_or("none", |s| s.key().name()),
            together: Together::new(&statements)?,
            privacy: statement.as_ref().map(Shares::new).transpose()?,
            summary: MechanismRow::all(&runs),
            runs,
            statement,
            notes: task.notes().to_vec(),
            baseline: task.baseline(),
            rehearsed,
            not_covered: NOT_COVERED,
        })
    }

    /// Whether the model of the first run is better than a constant on test users.
    pub fn beats_trivial(&self) -> bool {
        let first = self.summary.first();
        let mean = |pick: fn(&MechanismRow) -> Option<Estimate>| Some(first.and_then(pick)?.mean);
        self.baseline.is_beaten_by(mean(|row| row.test_accuracy), mean(|row| row.test_rmse))
    }

    /// The guarantee in one line: of each model alone, and of all together.
    pub fn guarantee(&self) -> Option<String> {
        let statement = self.statement.as_ref()?;
        let shown = |epsilon: f64| dpmf::accounting::statement::epsilon_for_people(epsilon);
        let alone = statement.calibration().epsilon();
        Some(match &self.together {
            Some(together) => format!(
                "each model alone ε = {}; all {} together, trained on the same {}s, ε = {} (δ = {:e})",
                shown(together.epsilon_alone),
                together.models,
                statement.unit().name(),
                shown(together.epsilon),
                together.delta
            ),
            None => format!("ε = {} (δ = {:e})", shown(alone), statement.calibration().delta()),
        })
    }
}

impl Together {
    /// Composes the curves of several statements at the δ of the first. Where users hide in bins, a curve is known at one
    /// point only: ε and δ of these are added. A schema that was found in private is one for all of them: it counts once among the
    /// curves, and is part of each point.
    ///
    /// Errors: none for statements of one accountant.
    pub fn new(statements: &[PrivacyStatement]) -> dpmf::Result<Option<Self>> {
        let [first, _, ..] = statements else { return Ok(None) };
        let (points, curves): (Vec<_>, Vec<_>) =
            statements.iter().map(PrivacyStatement::calibration).partition(|calibration| {
                matches!(
                    calibration.terms().sampled,
                    Amplification::BallsInBins(_) | Amplification::ReshuffledBins(_)
                )
            });
        let mut epsilon: f64 = points.iter().map(|point| point.epsilon()).sum();
        let mut delta: f64 = points.iter().map(|point| point.delta()).sum();
        if !curves.is_empty() {
            let at = first.calibration().delta();
            let beside = curves[0].terms().beside.filter(|_| points.is_empty());
            let mut composed = curves
                .iter()
                .map(|of| of.terms().alone().curve(of.noise_multiplier()))
                .collect::<dpmf::Result<Vec<PrivacyCurve>>>()?;
            if let Some(beside) = beside {
                composed.push(PrivacyCurve::gaussian(beside.mu, curves[0].terms().accountant)?);
            }
            let left = beside.map_or(Ok(at), |_| curves[0].terms().left(at))?;
            epsilon += PrivacyCurve::compose(&composed)?.epsilon(left)?;
            delta += at;
        }
        let alone = statements.iter().map(|s| s.calibration().epsilon()).fold(0.0, f64::max);
        Ok(Some(Self { models: statements.len(), epsilon_alone: alone, epsilon, delta }))
    }
}

impl RunRow {
    fn new(run: &FinishedRun, scale: Option<f64>) -> Self {
        let (plan, outcome, mechanism) = (&run.plan, &run.outcome, run.plan.mechanism());
        Self {
            asked: plan.label(),
            mechanism: plan.mechanism_name(),
            sampling: plan.sampling().to_string(),
            noise_multiplier: mechanism
                .and_then(|mechanism| Some(mechanism.privacy()?.calibration().noise_multiplier())),
            seed: plan.recipe().seed,
            test_accuracy: outcome.test.and_then(|test| test.accuracy),
            test_rmse: outcome.test.and_then(|test| Some(scale? * (2.0 * test.loss).sqrt())),
            test_loss: outcome.test.map(|test| test.loss),
            validation_accuracy: outcome.validation.accuracy,
            validation_loss: outcome.validation.loss,
            diverged: outcome.diverged,
            burned: outcome.burned,
            buffers: mechanism.and_then(|mechanism| mechanism.form().cost().buffers),
            ratio_to_bound: mechanism.and_then(|mechanism| Some(mechanism.certificate()?.ratio_to_bound())),
            seconds: outcome.seconds,
        }
    }
}

impl MechanismRow {
    fn all(runs: &[RunRow]) -> Vec<Self> {
        let mut rows: Vec<Self> = Vec::new();
        for run in runs {
            if rows.iter().any(|row| row.asked == run.asked) {
                continue;
            }
            let same: Vec<&RunRow> = runs.iter().filter(|other| other.asked == run.asked).collect();
            let mean = |pick: fn(&RunRow) -> Option<f64>| {
                let values: Vec<f64> = same.iter().filter_map(|run| pick(run)).collect();
                Estimate::of(&values)
            };
            let plain = |pick| mean(pick).map_or(f64::NAN, |estimate: Estimate| estimate.mean);
            rows.push(Self {
                asked: run.asked.clone(),
                mechanism: run.mechanism.clone(),
                sampling: run.sampling.clone(),
                test_accuracy: mean(|run| run.test_accuracy),
                test_rmse: mean(|run| run.test_rmse),
                test_loss: plain(|run| run.test_loss),
                ratio_to_bound: run.ratio_to_bound,
                buffers: run.buffers,
                seconds: plain(|run| Some(run.seconds)),
            });
        }
        rows
    }
}

fn accuracy<S: Serializer>(estimate: &Option<Estimate>, serializer: S) -> Result<S::Ok, S::Error> {
    #[derive(Serialize)]
    struct Fields {
        test_accuracy_mean: Option<f64>,
        test_accuracy_ci: Option<[f64; 2]>,
    }
    let (mean, interval) = (estimate.map(|e| e.mean), estimate.and_then(|e| e.interval()));
    Fields { test_accuracy_mean: mean, test_accuracy_ci: interval }.serialize(serializer)
}

fn rmse<S: Serializer>(estimate: &Option<Estimate>, serializer: S) -> Result<S::Ok, S::Error> {
    #[derive(Serialize)]
    struct Fields {
        test_rmse_mean: Option<f64>,
        test_rmse_ci: Option<[f64; 2]>,
    }
    let (mean, interval) = (estimate.map(|e| e.mean), estimate.and_then(|e| e.interval()));
    Fields { test_rmse_mean: mean, test_rmse_ci: interval }.serialize(serializer)
}
