//! What the users of a round contribute: their clipped updates, summed.

use crate::error::{Error, Result};
use crate::model::{Model, Score};
use crate::{Domain, Users};
use dpmf::Clip;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// What a user computes from the parameters it receives.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub enum Local {
    /// Federated averaging: passes of SGD over its examples in batches; the contribution is how far the parameters
    /// went, `θ − θ_local`.
    Sgd {
        /// Step size of the user.
        learning_rate: f64,
        /// Passes over the examples.
        passes: usize,
        /// Examples in a batch.
        batch: usize,
    },
    /// The gradient of the mean loss over its examples: DP-SGD when every user is one example.
    Gradient,
}

/// The users' side of training: one model, the data, and what to do with them.
pub struct Clients<'a, M, D> {
    model: &'a M,
    data: &'a D,
    local: Local,
    clip: Clip,
}

/// Memory of one thread.
struct Scratch<'a, M: Model> {
    workspace: M::Workspace,
    examples: Vec<<M::Domain as Domain>::Example<'a>>,
    parameters: Vec<f32>,
    gradient: Vec<f32>,
    sum: Vec<i64>,
}

impl<'a, M, D> Clients<'a, M, D>
where
    M: Model,
    D: Users<Domain = M::Domain>,
{
    /// Errors: a step size that is not positive and finite, no passes, empty batches.
    pub fn new(model: &'a M, data: &'a D, local: Local, clip: Clip) -> Result<Self> {
        if let Local::Sgd { learning_rate, passes, batch } = local {
            if !(learning_rate > 0.0 && learning_rate.is_finite()) {
                let rule = "it must be positive and finite";
                return Err(Error::argument("client learning rate", learning_rate, rule));
            }
            for (name, value) in [("client passes", passes), ("client batch", batch)] {
                if value == 0 {
                    return Err(Error::argument(name, value, "it must be at least 1"));
                }
            }
        }
        Ok(Self { model, data, local, clip })
    }

    /// Sum of the clipped contributions of the users, in units of [`Clip::unit`].
    ///
    /// Guarantee: exact, hence the same for any number of threads; each user moves it by at most ζ.
    ///
    /// Cost: for each thread two model-sized buffers of f32 and one of i64.
    ///
    /// # Panics
    /// For a user that the data does not have, or parameters of another length than the model's.
    pub fn sum(&self, parameters: &[f32], users: &[u32]) -> Vec<i64> {
        assert_eq!(parameters.len(), self.model.parameters(), "one entry for each parameter");
        let size = users.len().div_ceil(rayon::current_num_threads()).max(1);
        let partial = |users: &[u32]| {
            let zeros = || vec![0.0; parameters.len()];
            let mut scratch = Scratch::<'a, M> {
                workspace: self.model.workspace(),
                examples: Vec::new(),
                parameters: zeros(),
                gradient: zeros(),
                sum: vec![0; parameters.len()],
            };
            users.iter().for_each(|user| self.contribute(*user as usize, parameters, &mut scratch));
            scratch.sum
        };
        let add = |mut a: Vec<i64>, b: Vec<i64>| {
            a.iter_mut().zip(&b).for_each(|(a, b)| *a += b);
            a
        };
        let sums = users.par_chunks(size).map(partial).reduce_with(add);
        sums.unwrap_or_else(|| vec![0; parameters.len()])
    }

    fn contribute(&self, user: usize, parameters: &[f32], scratch: &mut Scratch<'a, M>) {
        let Scratch { workspace, examples, parameters: local, gradient, sum } = scratch;
        examples.clear();
        self.data.examples(user, examples);
        if examples.is_empty() {
            return;
        }
        let update: &[f32] = match self.local {
            Local::Gradient => {
                gradient.fill(0.0);
                self.model.gradient(parameters, examples, workspace, gradient);
                gradient
            }
            Local::Sgd { learning_rate, passes, batch } => {
                local.copy_from_slice(parameters);
                let rate = learning_rate as f32;
                for _ in 0..passes {
                    for batch in examples.chunks(batch) {
                        gradient.fill(0.0);
                        self.model.gradient(local, batch, workspace, gradient);
                        local.iter_mut().zip(&*gradient).for_each(|(theta, g)| *theta -= rate * g);
                    }
                }
                local.iter_mut().zip(parameters).for_each(|(local, start)| *local = start - *local);
                local
            }
        };
        self.clip.add(update, sum);
    }
}

/// Score of parameters on the examples of a range of users, the same for any number of threads.
///
/// # Panics
/// For users that the data does not have.
pub fn evaluate<M, D>(model: &M, parameters: &[f32], data: &D, users: Range<usize>) -> Score
where
    M: Model,
    D: Users<Domain = M::Domain>,
{
    const USERS: usize = 64;
    let starts: Vec<usize> = users.clone().step_by(USERS).collect();
    let score = |workspace: &mut M::Workspace, start: usize| {
        let mut examples = Vec::new();
        (start..users.end.min(start + USERS)).for_each(|user| data.examples(user, &mut examples));
        model.score(parameters, &examples, workspace)
    };
    let scores: Vec<Score> = starts
        .into_par_iter()
        .map_init(|| model.workspace(), |workspace, start| score(workspace, start))
        .collect();
    scores.into_iter().fold(Score::default(), |a, b| Score {
        loss: a.loss + b.loss,
        correct: a.correct + b.correct,
        predictions: a.predictions + b.predictions,
    })
}
