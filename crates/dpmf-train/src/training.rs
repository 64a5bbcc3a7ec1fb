//! A run of private training: cohorts, clipped sums, noise, and the server's optimizer.

use crate::clients::Clients;
use crate::clip::Clip;
use crate::cohort::Assignment;
use crate::error::{Error, Result};
use crate::plan::Plan;
use crate::recipe::Recipe;
use crate::server::Server;
use crate::{Model, Users};
use chacha20::ChaCha20Rng;
use dpmf::noise::{DurableStream, NoiseStream};
use rand::{Rng, SeedableRng};

/// Where the noise of a run comes from.
#[allow(clippy::large_enum_variant, reason = "a run has one")]
pub enum Noise {
    /// None: no privacy.
    None,
    /// A stream in memory: training starts anew after a crash, with another key or run.
    Stream(NoiseStream),
    /// A stream with a journal, which survives crashes.
    Durable(DurableStream),
}

impl Noise {
    fn steps(&self) -> Option<usize> {
        match self {
            Noise::None => None,
            Noise::Stream(stream) => Some(stream.steps()),
            Noise::Durable(durable) => Some(durable.stream().steps()),
        }
    }

    /// The step that is released next, `done` without noise.
    fn next_step(&self, done: usize) -> usize {
        match self {
            Noise::None => done,
            Noise::Stream(stream) => stream.next_step(),
            Noise::Durable(durable) => durable.next_step(),
        }
    }

    fn release(&mut self, values: &mut [f32]) -> dpmf::Result<()> {
        match self {
            Noise::None => Ok(()),
            Noise::Stream(stream) => stream.add_next(values).map(drop),
            Noise::Durable(durable) => durable.release(values).map(drop),
        }
    }
}

/// A run of private training, one round at a time.
///
/// Guarantee: what it releases is a function of `C G + Z` for the clipped sums `G` of the cohorts of its assignment, with
/// the encoder `C` and the noise of the stream it was given.
///
/// Reference: Algorithm "DP Matrix Factorization SGD" of \[DMRST22\], with the federated averaging of its Section 5.
pub struct Training<'a, M, D> {
    recipe: Recipe,
    clients: Clients<'a, M, D>,
    assignment: Assignment,
    server: Server,
    noise: Noise,
}

impl<'a, M, D> Training<'a, M, D>
where
    M: Model,
    D: Users<Domain = M::Domain>,
{
    /// A run at its first round.
    ///
    /// `assignment` is what [`Plan::cohorts`] gives for the data.
    ///
    /// Errors: examples that the model does not admit, a recipe outside its ranges, a stream of another number of steps, or
    /// none for a plan with a mechanism.
    pub fn new(model: &'a M, data: &'a D, plan: &Plan, assignment: Assignment, noise: Noise) -> Result<Self> {
        let recipe = plan.recipe().clone();
        if let Some(actual) = noise.steps().filter(|steps| *steps != recipe.rounds) {
            return Err(
                dpmf::Error::WrongLength { name: "noise stream", actual, expected: recipe.rounds }.into()
            );
        }
        if plan.mechanism().is_some() && matches!(noise, Noise::None) {
            return Err(Error::argument("noise", "none", "the plan has a mechanism: give its stream"));
        }
        if !(0.0..1.0).contains(&recipe.dropout) {
            return Err(Error::argument("dropout", recipe.dropout, "it must be at least 0 and below 1"));
        }
        check_examples(model, data)?;
        let clip = Clip::new(recipe.clip, assignment.most())?;
        let clients = Clients::new(model, data, recipe.local, clip)?;
        let server = Server::new(plan.workload(), model.initial(recipe.seed))?;
        Ok(Self { recipe, clients, assignment, server, noise })
    }

    /// Rounds in all.
    pub fn rounds(&self) -> usize {
        self.recipe.rounds
    }

    /// Rounds that are done.
    pub fn done(&self) -> usize {
        self.server.step()
    }

    /// The server.
    pub fn server(&self) -> &Server {
        &self.server
    }

    /// The noise.
    pub fn noise(&self) -> &Noise {
        &self.noise
    }

    /// The parameters that are released: the last iterate, or its average.
    pub fn released(&self) -> &[f32] {
        self.server.released()
    }

    /// Takes up the server's state where a checkpoint left it.
    pub(crate) fn server_mut(&mut self) -> &mut Server {
        &mut self.server
    }

    /// Does one round; `false` when all are done.
    ///
    /// Errors: those of the noise stream, with nothing released and the parameters unmoved.
    pub fn advance(&mut self) -> Result<bool> {
        let round = self.noise.next_step(self.server.step());
        // Rounds that were burned are over without a release.
        while self.server.step() < round {
            self.server.idle();
        }
        if round >= self.recipe.rounds {
            return Ok(false);
        }
        let present = self.present(round);
        if present.len() > self.assignment.most() {
            // Sums of more would not be exact. Whoever is there moves this by a chance of e⁻⁵⁵.
            let most = self.assignment.most();
            return Err(Error::plan(format!(
                "round {round} drew {} users, and sums are exact for {most} only: begin a new run",
                present.len()
            )));
        }
        let mut sum = self.clients.sum(self.server.parameters(), &present);
        self.noise.release(&mut sum)?;
        self.server.apply(&sum, (1.0 / self.assignment.denominator()) as f32);
        Ok(true)
    }

    /// Gives up the next round, which a crash left journalled with another input.
    ///
    /// Errors: noise that has no journal; those of [`DurableStream::burn`].
    pub fn burn(&mut self) -> Result<usize> {
        match &mut self.noise {
            Noise::Durable(durable) => Ok(durable.burn()?),
            _ => Err(Error::argument("noise", "without a journal", "only a journalled step can be burned")),
        }
    }

    /// Who of the cohort turns up.
    fn present(&self, round: usize) -> Vec<u32> {
        let cohort = self.assignment.cohort(round);
        if self.recipe.dropout == 0.0 {
            return cohort.to_vec();
        }
        let mut turns_up = coins(self.recipe.seed, round, self.recipe.dropout);
        cohort.iter().copied().filter(|user| turns_up(*user)).collect()
    }
}

/// Who turns up in a round, a coin for every user.
///
/// Guarantee: the coin of a user is a function of the seed, the round and the user. Whether one user was drawn into a cohort, which
/// amplification takes for a secret, decides nothing about the others.
fn coins(seed: u64, round: usize, dropout: f64) -> impl FnMut(u32) -> bool {
    let mut rng = ChaCha20Rng::seed_from_u64(seed);
    rng.set_stream(round as u64 + 1);
    let limit = (dropout * 2_f64.powi(64)) as u64;
    move |user| {
        rng.set_word_pos(2 * u128::from(user));
        rng.next_u64() >= limit
    }
}

/// Refuses data that a model would pass over.
fn check_examples<M, D>(model: &M, data: &D) -> Result<()>
where
    M: Model,
    D: Users<Domain = M::Domain>,
{
    let mut examples = Vec::new();
    for user in 0..data.users() {
        examples.clear();
        data.examples(user, &mut examples);
        if let Some(example) = examples.iter().position(|example| !model.admits(*example)) {
            let rule =
                "it must have the form that the model takes: tokens, labels and features within its sizes";
            return Err(Error::argument("data", format!("example {example} of user {user}"), rule));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::coins;

    #[test]
    fn coins_are_fair_and_differ_between_rounds_and_users() {
        let (users, rounds, dropout) = (1000, 20, 0.3);
        let tossed: Vec<Vec<bool>> = (0..rounds)
            .map(|round| {
                let turns_up = coins(7, round, dropout);
                (0..users).map(turns_up).collect()
            })
            .collect();
        // Five standard deviations of 20,000 coins; a dropout of 0.28 would be six off.
        let share =
            tossed.iter().flatten().filter(|up| !**up).count() as f64 / (rounds * users as usize) as f64;
        assert!((share - dropout).abs() < 5.0 * (0.21_f64 / 20_000.0).sqrt(), "{share}");
        assert!((1..rounds).all(|round| tossed[round] != tossed[0]));
        assert_ne!((0..users).map(coins(8, 0, dropout)).collect::<Vec<_>>(), tossed[0]);
    }

    #[test]
    fn a_user_who_was_not_drawn_changes_nobody_elses_coin() {
        let mut turns_up = coins(7, 3, 0.5);
        let mut present =
            |cohort: &[u32]| cohort.iter().copied().filter(|user| turns_up(*user)).collect::<Vec<_>>();
        let cohort: Vec<u32> = (0..60).map(|k| 7 * k + 3).collect();
        for absent in 0..cohort.len() {
            let mut others = cohort.clone();
            let user = others.remove(absent);
            let without: Vec<u32> = present(&cohort).into_iter().filter(|other| *other != user).collect();
            assert_eq!(present(&others), without);
        }
    }
}
