//! Who takes part in which round: decided before training, once for every user.

use crate::error::{Error, Result};
use chacha20::ChaCha20Rng;
use dpmf::{Participation, Sampler, Sampling};
use rand::{Rng, SeedableRng};
use std::borrow::Cow;

/// A random assignment of users to rounds, which never depends on data.
#[derive(Debug)]
pub struct Assignment {
    cohorts: Cohorts,
}

#[derive(Debug)]
enum Cohorts {
    /// Nobody takes part twice; by a public seed.
    Disjoint { order: Vec<u32>, rounds: usize, clients: usize },
    /// By chance, in secret.
    Sampled(Box<Sampler>),
}

impl Assignment {
    /// Draws cohorts of `clients` for each of `rounds`, such that nobody takes part more often than `participation`
    /// allows.
    ///
    /// Guarantee: cohorts of different rounds are disjoint, which is the single participation that the sensitivity of a
    /// mechanism rests on.
    /// Errors: no rounds, no clients, or fewer users than places; a participation that is not there yet.
    pub fn new(
        participation: Participation,
        users: usize,
        rounds: usize,
        clients: usize,
        seed: u64,
    ) -> Result<Self> {
        if participation != Participation::Single {
            return Err(dpmf::Error::Unsupported {
                what: format!("cohorts for participation {participation}"),
                hint: "training draws cohorts in which nobody takes part twice: use single",
            }
            .into());
        }
        for (name, value) in [("rounds", rounds), ("clients", clients)] {
            if value == 0 {
                return Err(Error::argument(name, value, "it must be at least 1"));
            }
        }
        let places = rounds.checked_mul(clients).filter(|places| *places <= users);
        let (Some(places), Ok(population)) = (places, u32::try_from(users)) else {
            return Err(Error::TooFewUsers { users, rounds, clients });
        };
        let mut order: Vec<u32> = (0..population).collect();
        let mut rng = ChaCha20Rng::seed_from_u64(seed);
        for i in 0..places {
            let j = i + below(&mut rng, users - i);
            order.swap(i, j);
        }
        order.truncate(places);
        Ok(Self { cohorts: Cohorts::Disjoint { order, rounds, clients } })
    }

    /// The cohorts of a sampler, for a mechanism whose privacy statement counts on `sampling` over so many rounds.
    ///
    /// Guarantee: who takes part is drawn as the statement says.
    /// Errors: a sampler that draws otherwise, or for another number of rounds.
    pub fn sampled(sampler: Sampler, sampling: Sampling, rounds: usize) -> Result<Self> {
        if sampler.sampling() != sampling {
            return Err(Error::plan(format!(
                "the sampler draws by {}, but the privacy statement of the mechanism counts on {sampling}: it would not \
                 hold; make the sampler from the mechanism's own sampling",
                sampler.sampling()
            )));
        }
        if sampler.steps() != rounds {
            return Err(Error::plan(format!(
                "the sampler draws for {} rounds, but the mechanism has {rounds}",
                sampler.steps()
            )));
        }
        Ok(Self { cohorts: Cohorts::Sampled(Box::new(sampler)) })
    }

    /// The cohort of a round, zero-based; empty past the last.
    pub fn cohort(&self, round: usize) -> Cow<'_, [u32]> {
        match &self.cohorts {
            Cohorts::Disjoint { order, rounds, clients } if round < *rounds => {
                Cow::Borrowed(&order[round * clients..][..*clients])
            }
            Cohorts::Disjoint { .. } => Cow::Borrowed(&[]),
            Cohorts::Sampled(sampler) => Cow::Owned(sampler.members(round).unwrap_or_default()),
        }
    }

    /// What a mean over a cohort divides by, whoever turns up: its size, where that is fixed, or its expectation.
    pub fn denominator(&self) -> f64 {
        match &self.cohorts {
            Cohorts::Disjoint { clients, .. } => *clients as f64,
            Cohorts::Sampled(sampler) => sampler.expected_batch(),
        }
    }
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
        let error = Assignment::new(Participation::default(), 99, 10, 10, 0).unwrap_err();
        assert_eq!(error.kind(), "too-few-users");
        assert!(error.to_string().contains("99") && error.to_string().contains("100"), "{error}");
        assert!(
            Assignment::new(Participation::default(), 10, 0, 1, 0).is_err()
                && Assignment::new(Participation::default(), 10, 1, 0, 0).is_err()
        );
        assert!(Assignment::new(Participation::default(), 10, usize::MAX, 2, 0).is_err());
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
}
