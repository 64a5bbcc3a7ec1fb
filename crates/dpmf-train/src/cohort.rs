//! Which users take part in which round: decided before training, and never by data.

use crate::error::{Error, Result};
use chacha20::ChaCha20Rng;
use dpmf::noise::RunId;
use dpmf::run::Order;
use dpmf::{Participation, Sampler, Sampling};
use rand::{Rng, SeedableRng};
use std::borrow::Cow;

/// A random assignment of users to rounds, which never depends on data.
#[derive(Debug)]
pub struct Assignment {
    cohorts: Cohorts,
    rounds: usize,
}

#[derive(Debug)]
enum Cohorts {
    /// By a public seed: lists that take turns, one after the other.
    Listed { members: Vec<u32>, starts: Vec<usize>, clients: usize, seed: u64 },
    /// By chance, in secret.
    Sampled(Box<Sampler>),
}

impl Assignment {
    /// Draws cohorts of `clients` for each of `rounds`, such that nobody takes part more often, or sooner again, than
    /// `participation` allows.
    ///
    /// For epochs all users that fit are dealt into the rounds of one pass, and every pass has the same cohorts; the last
    /// cohort of a pass may be smaller. For a separation every cohort is drawn evenly from the users that may take part
    /// again.
    ///
    /// Guarantee: the steps of every user are those that the sensitivity of a mechanism under `participation` covers.
    /// Errors: no rounds, no clients, or fewer users than places.
    pub fn new(
        participation: Participation,
        users: usize,
        rounds: usize,
        clients: usize,
        seed: u64,
    ) -> Result<Self> {
        for (name, value) in [("rounds", rounds), ("clients", clients)] {
            if value == 0 {
                return Err(Error::argument(name, value, "it must be at least 1"));
            }
        }
        let Ok(population) = u32::try_from(users) else {
            return Err(Error::argument("users", users, "there must be fewer than 2³²"));
        };
        let mut rng = ChaCha20Rng::seed_from_u64(seed);
        let cohorts = match participation {
            Participation::MinSeparation { .. } => {
                let pattern = participation.pattern(rounds)?;
                let wait = pattern.separation.unwrap_or(rounds);
                separated(population, rounds, clients, wait, pattern.times, &mut rng)?
            }
            _ => dealt(population, participation.spacing(rounds)?, clients, &mut rng)?,
        };
        let (members, starts) = cohorts;
        Ok(Self { cohorts: Cohorts::Listed { members, starts, clients, seed }, rounds })
    }

    /// The cohorts of a sampler, for a mechanism whose privacy statement counts on `sampling` over so many rounds.
    ///
    /// Guarantee: who takes part is drawn as the statement says.
    /// Errors: a sampler that draws otherwise, or for another number of rounds.
    pub fn sampled(sampler: Sampler, sampling: Sampling, rounds: usize) -> Result<Self> {
        if sampler.sampling() != sampling {
            return Err(Error::plan(format!(
                "the sampler draws by {}, but the privacy statement of the mechanism relies on {sampling} and would not hold: make the \
                 sampler from the mechanism's own sampling",
                sampler.sampling()
            )));
        }
        if sampler.steps() != rounds {
            return Err(Error::plan(format!(
                "the sampler draws for {} rounds, but the mechanism has {rounds}",
                sampler.steps()
            )));
        }
        Ok(Self { cohorts: Cohorts::Sampled(Box::new(sampler)), rounds })
    }

    /// The cohort of a round, zero-based; empty past the last.
    pub fn cohort(&self, round: usize) -> Cow<'_, [u32]> {
        match &self.cohorts {
            _ if round >= self.rounds => Cow::Borrowed(&[]),
            Cohorts::Listed { members, starts, .. } => {
                let turn = round % (starts.len() - 1);
                Cow::Borrowed(&members[starts[turn]..starts[turn + 1]])
            }
            Cohorts::Sampled(sampler) => Cow::Owned(sampler.members(round).unwrap_or_default()),
        }
    }

    /// What a mean over a cohort divides by, whoever turns up: its size, where that is fixed, or its expectation.
    pub fn denominator(&self) -> f64 {
        match &self.cohorts {
            Cohorts::Listed { clients, .. } => *clients as f64,
            Cohorts::Sampled(sampler) => sampler.expected_batch(),
        }
    }

    /// Gives the cohorts to one run, and says how they come. A sampler draws for one run alone.
    ///
    /// Errors: [`dpmf::error::Refusal::SamplerInUse`].
    pub fn bind(&mut self, run: RunId) -> Result<Order> {
        let name = match &mut self.cohorts {
            Cohorts::Listed { seed, .. } => format!("cohorts by the public seed {seed}"),
            Cohorts::Sampled(sampler) => {
                sampler.bind(run)?;
                format!("{sampler:?}")
            }
        };
        Ok(Order { name, by_step: true, sampled: matches!(self.cohorts, Cohorts::Sampled(_)) })
    }
}

/// Cohorts that take turns: all members, and where each cohort begins and the last one ends.
type Lists = (Vec<u32>, Vec<usize>);

/// Users dealt into the rounds of one pass.
fn dealt(users: u32, rounds: usize, clients: usize, rng: &mut ChaCha20Rng) -> Result<Lists> {
    let count = users as usize;
    let places = rounds.checked_mul(clients).filter(|places| places - clients < count);
    let Some(places) = places else { return Err(Error::TooFewUsers { users: count, rounds, clients }) };
    let places = places.min(count);
    let mut members: Vec<u32> = (0..users).collect();
    for i in 0..places {
        let j = i + below(rng, count - i);
        members.swap(i, j);
    }
    members.truncate(places);
    let starts = (0..=rounds).map(|round| (round * clients).min(places)).collect();
    Ok((members, starts))
}

/// Cohorts drawn evenly from those who have not taken part in the last `wait` rounds, nor `times` times.
fn separated(
    users: u32,
    rounds: usize,
    clients: usize,
    wait: usize,
    times: usize,
    rng: &mut ChaCha20Rng,
) -> Result<Lists> {
    let too_few = |round: usize| {
        Error::plan(format!(
            "by round {round} fewer than {clients} of {users} users may take part again: use fewer clients, fewer rounds, \
             or a smaller separation"
        ))
    };
    let places = rounds.checked_mul(clients).ok_or_else(|| too_few(0))?;
    // The first round that cannot be filled is known before anything is allocated.
    if places > (users as usize).saturating_mul(times) {
        return Err(too_few((users as usize).saturating_mul(times) / clients));
    }
    let mut free: Vec<u32> = (0..users).collect();
    let mut taken = vec![0_u32; users as usize];
    let mut members: Vec<u32> = Vec::with_capacity(places);
    for round in 0..rounds {
        if let Some(back) = round.checked_sub(wait) {
            let again = &members[back * clients..][..clients];
            free.extend(again.iter().filter(|user| (taken[**user as usize] as usize) < times));
        }
        if free.len() < clients {
            return Err(too_few(round));
        }
        for _ in 0..clients {
            let user = free.swap_remove(below(rng, free.len()));
            taken[user as usize] += 1;
            members.push(user);
        }
    }
    let starts = (0..=rounds).map(|round| round * clients).collect();
    Ok((members, starts))
}

/// A uniform index below `n`, by rejection: no index is favoured.
fn below(rng: &mut ChaCha20Rng, n: usize) -> usize {
    let n = n as u64;
    let limit = u64::MAX - u64::MAX % n;
    loop {
        let x = rng.next_u64();
        if x < limit {
            return (x % n) as usize;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_takes_part_twice() {
        let assignment = Assignment::new(Participation::default(), 1000, 99, 10, 7).unwrap();
        let mut seen = std::collections::BTreeSet::new();
        for round in 0..99 {
            assert_eq!(assignment.cohort(round).len(), 10);
            for user in assignment.cohort(round).iter() {
                assert!(*user < 1000 && seen.insert(*user), "user {user} in round {round}");
            }
        }
        assert_eq!(seen.len(), 990);
        assert!(assignment.cohort(99).is_empty());
    }

    #[test]
    fn another_seed_gives_another_assignment_and_the_same_seed_the_same() {
        let first =
            |seed| Assignment::new(Participation::default(), 1000, 10, 10, seed).unwrap().cohort(0).to_vec();
        assert_eq!(first(1), first(1));
        assert_ne!(first(1), first(2));
    }

    #[test]
    fn every_user_is_as_likely_as_any_other() {
        // 20 users, 10 places, 4000 seeds: 2000 ± 32 each; 6 deviations, α = 4e-8 for all.
        let mut counts = [0_u32; 20];
        for seed in 0..4000 {
            let assignment = Assignment::new(Participation::default(), 20, 2, 5, seed).unwrap();
            (0..2).for_each(|round| assignment.cohort(round).iter().for_each(|u| counts[*u as usize] += 1));
        }
        assert!(counts.iter().all(|count| count.abs_diff(2000) < 190), "{counts:?}");
    }

    #[test]
    fn too_few_users_are_refused() {
        let error = Assignment::new(Participation::default(), 90, 10, 10, 0).unwrap_err();
        assert_eq!(error.kind(), "too-few-users");
        assert!(error.to_string().contains("90") && error.to_string().contains("100"), "{error}");
        assert!(
            Assignment::new(Participation::default(), 10, 0, 1, 0).is_err()
                && Assignment::new(Participation::default(), 10, 1, 0, 0).is_err()
        );
        assert!(Assignment::new(Participation::default(), 10, usize::MAX, 2, 0).is_err());
    }

    /// The rounds of every user.
    fn turns(assignment: &Assignment, users: usize, rounds: usize) -> Vec<Vec<usize>> {
        let mut turns = vec![Vec::new(); users];
        for round in 0..rounds {
            assignment.cohort(round).iter().for_each(|user| turns[*user as usize].push(round));
        }
        turns
    }

    #[test]
    fn epochs_repeat_their_cohorts_and_the_last_of_a_pass_may_be_smaller() {
        // 14 rounds of 4 epochs: passes of 4, the last of them cut short; 35 users in cohorts of 10.
        let assignment = Assignment::new(Participation::Epochs { times: 4 }, 35, 14, 10, 3).unwrap();
        let turns = turns(&assignment, 35, 14);
        for rounds in &turns {
            let expected: Vec<usize> = (rounds[0]..14).step_by(4).collect();
            assert_eq!(*rounds, expected);
        }
        let sizes: Vec<usize> = (0..14).map(|round| assignment.cohort(round).len()).collect();
        assert_eq!(sizes[..4], [10, 10, 10, 5]);
        assert_eq!(assignment.denominator(), 10.0);
        let few = Assignment::new(Participation::Epochs { times: 4 }, 30, 14, 10, 3).unwrap_err();
        assert!(few.to_string().contains("4 rounds of 10 clients"), "{few}");
    }

    #[test]
    fn a_separation_is_kept_and_everybody_is_drawn_alike() {
        let participation: Participation = "min-separation:5:3".parse().unwrap();
        let mut counts = [0_u32; 60];
        for seed in 0..300 {
            let assignment = Assignment::new(participation, 60, 20, 8, seed).unwrap();
            for (user, rounds) in turns(&assignment, 60, 20).iter().enumerate() {
                assert!(
                    rounds.len() <= 3 && rounds.windows(2).all(|pair| pair[1] - pair[0] >= 5),
                    "{rounds:?}"
                );
                counts[user] += rounds.len() as u32;
            }
        }
        // 160 places for 60 users, 300 seeds: 800 each; a user's count varies by less than 1 a seed, so 17 and 6 of it.
        assert!(counts.iter().all(|count| count.abs_diff(800) < 104), "{counts:?}");
        // Drawn anew, not in the order of the first pass: somebody waits longer than needed, somebody does not.
        let assignment = Assignment::new(participation, 60, 20, 8, 0).unwrap();
        let gaps: Vec<usize> = turns(&assignment, 60, 20)
            .iter()
            .flat_map(|rounds| rounds.windows(2).map(|pair| pair[1] - pair[0]).collect::<Vec<_>>())
            .collect();
        assert!(gaps.contains(&5) && gaps.iter().any(|gap| *gap > 8), "{gaps:?}");
        for (text, users, rounds, what) in [
            ("min-separation:8:2", 60, 9, "by round 7"),
            ("min-separation:5:3", 20, 20, "fewer than 8 of 20"),
        ] {
            let message =
                Assignment::new(text.parse().unwrap(), users, rounds, 8, 0).unwrap_err().to_string();
            assert!(message.contains(what), "{message}");
        }
    }

    fn sampler(sampling: &str, rounds: usize) -> Sampler {
        let (key, run) = (dpmf::noise::NoiseKey::from_seed(1), dpmf::noise::RunId::from_label("test"));
        Sampler::new(&key, run, sampling.parse().unwrap(), 1000, rounds).unwrap()
    }

    #[test]
    fn sampled_cohorts_are_those_of_the_sampler_from_any_round_on() {
        for (text, denominator) in [("cyclic-poisson:4:0.1", 25.0), ("balls-in-bins:8", 125.0)] {
            let sampling = text.parse().unwrap();
            let assignment = Assignment::sampled(sampler(text, 20), sampling, 20).unwrap();
            assert_eq!(assignment.denominator(), denominator);
            let resumed = Assignment::sampled(sampler(text, 20), sampling, 20).unwrap();
            for round in (0..20).rev() {
                assert_eq!(*resumed.cohort(round), sampler(text, 20).members(round).unwrap());
                assert_eq!(assignment.cohort(round), resumed.cohort(round));
            }
            assert!(assignment.cohort(20).is_empty());
        }
        assert_eq!(Assignment::new(Participation::default(), 20, 2, 5, 0).unwrap().denominator(), 5.0);
    }

    #[test]
    fn a_sampler_that_is_not_the_one_of_the_statement_is_refused() {
        let message = |drawn: &str, stated: &str, rounds| {
            let stated = stated.parse().unwrap();
            Assignment::sampled(sampler(drawn, 20), stated, rounds).unwrap_err().to_string()
        };
        for stated in ["none", "cyclic-poisson:4:0.05", "cyclic-poisson:3:0.1", "balls-in-bins:4"] {
            let message = message("cyclic-poisson:4:0.1", stated, 20);
            assert!(message.contains("cyclic-poisson:4:0.1") && message.contains(stated), "{message}");
        }
        assert!(message("balls-in-bins:4", "balls-in-bins:5", 20).contains("would not hold"));
        assert!(message("balls-in-bins:4", "balls-in-bins:4", 21).contains("20 rounds"));
    }

    #[test]
    fn a_sampler_draws_for_one_run() {
        let sampling = "cyclic-poisson:4:0.1";
        let mut drawn = Assignment::sampled(sampler(sampling, 20), sampling.parse().unwrap(), 20).unwrap();
        let [one, other] = ["test", "another"].map(RunId::from_label);
        assert!(drawn.bind(one).unwrap().sampled);
        assert_eq!(drawn.bind(one).unwrap(), drawn.bind(one).unwrap());
        assert!(drawn.bind(other).unwrap_err().to_string().contains("each run needs a sampler of its own"));
        let mut listed = Assignment::new(Participation::default(), 20, 2, 5, 0).unwrap();
        assert!(!listed.bind(one).unwrap().sampled);
        assert_eq!(listed.bind(other).unwrap(), listed.bind(one).unwrap());
    }
}
