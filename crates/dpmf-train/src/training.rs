//! Private training round by round: cohorts, clipped sums, noise, and the server's optimizer.

use crate::clients::Clients;
use crate::cohort::Assignment;
use crate::error::{Error, Result};
use crate::plan::Plan;
use crate::recipe::Recipe;
use crate::server::Server;
use crate::{Model, Users};
use chacha20::ChaCha20Rng;
use dpmf::noise::default_threads;
use dpmf::{Clip, PrivateRun};
use rand::{Rng, SeedableRng};

/// What turns the clipped sum of a round into what the server steps with.
#[allow(clippy::large_enum_variant, reason = "a training has one")]
enum Release {
    /// Counted, journalled if the run has a journal, and noisy.
    Private(PrivateRun),
    /// As it is: no privacy.
    Plain(Clip),
}

/// Private training, one round at a time.
///
/// Guarantee: what it releases is a function of `C G + Z` for the clipped sums `G` of the cohorts of its assignment, with
/// the encoder `C` and the noise of the [`PrivateRun`] it was given, which every round goes through.
///
/// Reference: Algorithm "DP Matrix Factorization SGD" of \[DMRST22\], with the federated averaging of its Section 5.
pub struct Training<'a, M, D> {
    recipe: Recipe,
    clients: Clients<'a, M, D>,
    assignment: Assignment,
    server: Server,
    release: Release,
    /// What the server steps with.
    released: Vec<f32>,
}

impl<'a, M, D> Training<'a, M, D>
where
    M: Model,
    D: Users<Domain = M::Domain>,
{
    /// Training at its first round, or where `run` is.
    ///
    /// `assignment` is what [`Plan::cohorts`] gives for the data, `run` what [`Plan::private_run`] gives for the model.
    ///
    /// Errors: examples that the model does not admit, a recipe outside its ranges; a run of another number of steps or
    /// parameters, or none for a plan with a mechanism; cohorts that another run draws, or that nobody draws where the
    /// guarantee relies on sampling.
    pub fn new(
        model: &'a M,
        data: &'a D,
        plan: &Plan,
        mut assignment: Assignment,
        run: Option<PrivateRun>,
    ) -> Result<Self> {
        let recipe = plan.recipe().clone();
        if !(0.0..1.0).contains(&recipe.dropout) {
            return Err(Error::argument("dropout", recipe.dropout, "it must be at least 0 and below 1"));
        }
        check_examples(model, data)?;
        let parameters = model.parameters();
        let release = match run {
            Some(mut run) => {
                let coordinates = run.coordinates();
                for (name, actual, expected) in [
                    ("noise stream", run.steps(), plan.rounds()),
                    ("released row", (coordinates.end - coordinates.start) as usize, parameters),
                ] {
                    if actual != expected {
                        return Err(dpmf::Error::WrongLength { name, actual, expected }.into());
                    }
                }
                run.follow(assignment.bind(run.id())?)?;
                run.set_denominator(assignment.denominator())?;
                Release::Private(run)
            }
            None if plan.mechanism().is_some() => {
                return Err(Error::argument("run", "none", "the plan has a mechanism: give its private run"));
            }
            None => Release::Plain(Clip::new(plan.clip(), parameters as u64)?),
        };
        let clip = match &release {
            Release::Private(run) => *run.clip(),
            Release::Plain(clip) => *clip,
        };
        let clients = Clients::new(model, data, recipe.local, clip)?;
        let server = Server::new(plan.workload(), model.initial(recipe.seed))?;
        let made = Self { recipe, clients, assignment, server, release, released: vec![0.0; parameters] };
        Ok(made.noise_ahead(default_threads(parameters as u64)))
    }

    /// The same training, whose noise is made by so many threads while clients compute; by default
    /// [`default_threads`]. What is released is the same.
    pub fn noise_ahead(self, threads: usize) -> Self {
        let release = match self.release {
            Release::Private(run) => Release::Private(run.noise_ahead(threads)),
            plain => plain,
        };
        Self { release, ..self }
    }

    /// Rounds in all.
    pub fn rounds(&self) -> usize {
        self.server.steps()
    }

    /// Rounds that the server has taken up.
    pub fn done(&self) -> usize {
        self.server.step()
    }

    /// The round that comes next: behind [`Training::done`] where rounds were burned.
    fn next_round(&self) -> usize {
        match &self.release {
            Release::Private(run) => run.next_step(),
            Release::Plain(_) => self.server.step(),
        }
    }

    /// The server.
    pub fn server(&self) -> &Server {
        &self.server
    }

    /// The run that every round goes through; nothing without noise.
    pub fn private_run(&self) -> Option<&PrivateRun> {
        match &self.release {
            Release::Private(run) => Some(run),
            Release::Plain(_) => None,
        }
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
    /// Errors: those of [`PrivateRun::release`], with nothing released and the parameters unmoved.
    pub fn advance(&mut self) -> Result<bool> {
        let round = self.next_round();
        // Rounds that were burned are over without a release.
        while self.server.step() < round {
            self.server.idle();
        }
        if round >= self.rounds() {
            return Ok(false);
        }
        let (drawn, present) = self.cohort(round);
        if let Release::Private(run) = &mut self.release {
            // What an attempt that failed had counted.
            run.clear();
            run.hand_out(round, Some(drawn))?;
            run.contribute(present.len())?;
        }
        let mut sum = self.clients.sum(self.server.parameters(), &present);
        let denominator = match &mut self.release {
            Release::Private(run) => {
                run.release(&mut sum, &mut self.released)?;
                run.denominator()
            }
            Release::Plain(clip) => {
                let unit = clip.unit();
                self.released.iter_mut().zip(&sum).for_each(|(x, whole)| *x = (*whole as f64 * unit) as f32);
                None
            }
        };
        let denominator = denominator.unwrap_or_else(|| self.assignment.denominator());
        self.server.apply(&self.released, (1.0 / denominator) as f32);
        Ok(true)
    }

    /// Gives up the next round, which a crash left journalled with another input.
    ///
    /// Errors: a run that has no journal; those of [`PrivateRun::burn`].
    pub fn burn(&mut self) -> Result<usize> {
        match &mut self.release {
            Release::Private(run) if run.is_durable() => Ok(run.burn()?),
            _ => Err(Error::argument("noise", "without a journal", "only a journalled step can be burned")),
        }
    }

    /// Members of the cohort of a round, and who of them turns up.
    fn cohort(&self, round: usize) -> (usize, Vec<u32>) {
        let cohort = self.assignment.cohort(round);
        if self.recipe.dropout == 0.0 {
            return (cohort.len(), cohort.into_owned());
        }
        let mut turns_up = coins(self.recipe.seed, round, self.recipe.dropout);
        (cohort.len(), cohort.iter().copied().filter(|user| turns_up(*user)).collect())
    }
}

/// Which users turn up in a round: a random draw for every user.
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
