//! The rows of a sweep's result, and what its models are judged by.

use super::Line;
use crate::report::number;
use dpmf::{Participation, Sampling};
use dpmf_train::{Estimate, Local, MechanismChoice, Outcome, Point, Settings, Steps, Task};
use serde_json::{Value, json};

/// A row of the result.
pub(super) struct Row {
    pub(super) id: String,
    pub(super) measure: Measure,
    /// The best of what was asked for.
    pub(super) best: Settings,
    /// Mechanism, sampling and participation as planned, where a run has ended; else as asked for.
    pub(super) mechanism: String,
    pub(super) sampling: Sampling,
    pub(super) participation: Participation,
    pub(super) tuned_over: usize,
    pub(super) epsilon: Option<f64>,
    pub(super) noise_multiplier: Option<f64>,
    /// On test users, by the measure.
    pub(super) test: Option<Estimate>,
    pub(super) loss: Option<Estimate>,
    pub(super) validation: Option<Estimate>,
    pub(super) diverged: usize,
    pub(super) runs: usize,
    pub(super) curve: Vec<(usize, f64)>,
    /// Server learning rates that were tried, with the best that each gave on validation users.
    pub(super) tried: Vec<(f64, f64)>,
}

/// What models are judged by.
#[derive(Clone, Copy)]
pub(super) enum Measure {
    /// The share of right predictions.
    Accuracy,
    /// The root of the mean squared error of a number with this scale.
    Rmse(f64),
}

impl Measure {
    pub(super) fn new(task: &Task) -> Self {
        task.scale().map_or(Measure::Accuracy, Measure::Rmse)
    }

    pub(super) fn of(self, point: &Point) -> Option<f64> {
        match self {
            Measure::Accuracy => point.accuracy,
            Measure::Rmse(scale) => Some(scale * (2.0 * point.loss).sqrt()),
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Measure::Accuracy => "accuracy",
            Measure::Rmse(_) => "RMSE",
        }
    }

    /// What it counts.
    pub(super) fn unit(self) -> &'static str {
        match self {
            Measure::Accuracy => "share named rightly",
            Measure::Rmse(_) => "in the unit of the label",
        }
    }

    pub(super) fn better(self, a: f64, b: f64) -> f64 {
        match self {
            Measure::Accuracy => a.max(b),
            Measure::Rmse(_) => a.min(b),
        }
    }

    pub(super) fn shown(self, x: f64) -> String {
        match self {
            Measure::Accuracy => format!("{x:.4}"),
            Measure::Rmse(_) => number(x),
        }
    }

    /// The estimate, if it is the share of right predictions.
    pub(super) fn accuracy(self, estimate: Option<Estimate>) -> Option<Estimate> {
        estimate.filter(|_| matches!(self, Measure::Accuracy))
    }

    /// The estimate, if it is an error.
    pub(super) fn error(self, estimate: Option<Estimate>) -> Option<Estimate> {
        estimate.filter(|_| matches!(self, Measure::Rmse(_)))
    }
}

impl Row {
    pub(super) fn new(
        id: String,
        measure: Measure,
        best: &Settings,
        tuned_over: usize,
        lines: &[Line],
    ) -> Self {
        let of = |pick: &dyn Fn(&Outcome) -> Option<f64>| {
            Estimate::of(&lines.iter().filter_map(|line| pick(&line.outcome)).collect::<Vec<f64>>())
        };
        let curve = lines.first().map_or_else(Vec::new, |first| {
            first
                .outcome
                .curve
                .iter()
                .enumerate()
                .map(|(k, point)| {
                    let values: Vec<f64> =
                        lines.iter().filter_map(|line| measure.of(line.outcome.curve.get(k)?)).collect();
                    (point.round, values.iter().sum::<f64>() / values.len() as f64)
                })
                .collect()
        });
        Self {
            id,
            measure,
            best: best.clone(),
            mechanism: lines
                .first()
                .map_or_else(|| best.recipe.mechanism.to_string(), |line| line.mechanism.clone()),
            sampling: lines.first().map_or(best.sampling, |line| line.sampling),
            participation: lines.first().map_or(best.participation, |line| line.participation),
            tuned_over,
            epsilon: lines.iter().find_map(|line| line.epsilon),
            noise_multiplier: lines.iter().find_map(|line| line.noise_multiplier),
            test: of(&|outcome| measure.of(&outcome.test?)),
            loss: of(&|outcome| Some(outcome.test?.loss)),
            validation: of(&|outcome| measure.of(&outcome.validation)),
            diverged: lines.iter().filter(|line| line.outcome.diverged).count(),
            runs: lines.len(),
            curve,
            tried: Vec::new(),
        }
    }

    /// The mechanism without its choices, or what was asked for.
    pub(super) fn name(&self) -> &'static str {
        self.choice().name()
    }

    /// How the mechanism was asked for.
    pub(super) fn choice(&self) -> MechanismChoice {
        self.best.recipe.mechanism
    }

    /// The same, with the mechanism that came of it.
    pub(super) fn choice_and_mechanism(&self) -> String {
        match self.choice() {
            asked @ (MechanismChoice::Planned | MechanismChoice::DpSgd) if self.runs > 0 => {
                format!("{asked} ({})", self.mechanism)
            }
            asked => asked.to_string(),
        }
    }

    pub(super) fn schedule(&self) -> &str {
        match &self.best.schedule {
            Steps::Schedule(words) => words,
            Steps::Values(_) => "file",
        }
    }

    pub(super) fn client_rate(&self) -> Option<f64> {
        match self.best.recipe.local {
            Local::Sgd { learning_rate, .. } => Some(learning_rate),
            Local::Gradient => None,
        }
    }

    pub(super) fn json(&self) -> Value {
        let (accuracy, error) = (self.measure.accuracy(self.test), self.measure.error(self.test));
        json!({
            "mechanism": self.name(),
            "sampling": self.sampling.to_string(),
            "participation": self.participation,
            "selector": self.mechanism,
            "schedule": self.schedule(),
            "clients": self.best.recipe.clients,
            "rounds": self.best.rounds,
            "noise_multiplier": self.noise_multiplier,
            "epsilon": self.epsilon,
            "momentum": self.best.optimizer.momentum,
            "clip": self.best.clip,
            "server_lr": self.best.server_learning_rate,
            "client_lr": self.client_rate(),
            "tuned_over": self.tuned_over,
            "runs": self.runs,
            "diverged": self.diverged,
            "test_accuracy_mean": accuracy.map(|e| e.mean),
            "test_accuracy_ci": accuracy.and_then(|e| e.interval()),
            "test_rmse_mean": error.map(|e| e.mean),
            "test_rmse_ci": error.and_then(|e| e.interval()),
            "test_loss_mean": self.loss.map(|e| e.mean),
            "validation_accuracy_mean": self.measure.accuracy(self.validation).map(|e| e.mean),
            "curve": self.curve,
        })
    }

    /// What it was on test users, with its interval.
    pub(super) fn tested(&self, between: &str) -> String {
        let shown = |x| self.measure.shown(x);
        match self.test {
            Some(Estimate { mean, half_width: Some(half) }) => {
                format!("{}{between}{}", shown(mean), shown(half))
            }
            Some(Estimate { mean, half_width: None }) => shown(mean),
            None => "–".into(),
        }
    }

    pub(super) fn cells(&self) -> Vec<String> {
        let optional = |x: Option<f64>, digits: usize| x.map_or("–".into(), |x| format!("{x:.digits$}"));
        vec![
            self.choice_and_mechanism(),
            self.sampling.to_string(),
            optional(self.noise_multiplier, 3),
            optional(self.epsilon, 3),
            self.schedule().to_owned(),
            self.best.recipe.clients.to_string(),
            self.tested(" ± "),
            format!("{} of {}", self.diverged, self.runs),
            self.best.server_learning_rate.to_string(),
            self.client_rate().map_or("–".into(), |rate| rate.to_string()),
            self.best.clip.to_string(),
            self.best.optimizer.momentum.to_string(),
        ]
    }
}

pub(super) fn head(measure: Measure) -> [&'static str; 12] {
    let test = match measure {
        Measure::Accuracy => "test accuracy",
        Measure::Rmse(_) => "test RMSE",
    };
    [
        "mechanism",
        "sampling",
        "σ",
        "ε",
        "schedule",
        "clients",
        test,
        "diverged",
        "server lr",
        "client lr",
        "clip",
        "momentum",
    ]
}
