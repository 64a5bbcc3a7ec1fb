//! Which set a user belongs to.

use sha2::{Digest, Sha256};

/// The set a user belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Part {
    /// Public users, from whom a vocabulary is made and who are in none of the other sets.
    Public,
    /// Users trained on.
    Train,
    /// Users on whom hyperparameters are chosen.
    Validation,
    /// Users on whom the result is reported, touched by nothing else.
    Test,
}

impl Part {
    /// The set of the user called `user` in the data set called `data`: a keyed hash, so no other user has a say in it.
    ///
    /// The shares are `public`/1000 for [`Public`](Self::Public) and, of the others, 5 % for validation, 10 % for test and the
    /// rest for training.
    pub fn of(data: &str, user: &str, public: u32) -> Self {
        if share(&digest(data, "vocabulary", user)) < u64::from(public) {
            return Self::Public;
        }
        match share(&digest(data, "set", user)) {
            0..50 => Self::Validation,
            50..150 => Self::Test,
            _ => Self::Train,
        }
    }
}

/// SHA-256 of a fixed label, the data set, the purpose and a name, which no two triples share.
pub(super) fn digest(data: &str, purpose: &str, name: &str) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update(b"dpmf data 1");
    for part in [data, purpose, name] {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part.as_bytes());
    }
    hash.finalize().into()
}

/// The thousandth of all hash values that a digest lies in.
fn share(digest: &[u8; 32]) -> u64 {
    let mut leading = [0; 8];
    leading.copy_from_slice(&digest[..8]);
    ((u128::from(u64::from_be_bytes(leading)) * 1000) >> 64) as u64
}

/// Three data sets with disjoint users.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Split<D> {
    /// Users trained on.
    pub train: D,
    /// Users on whom hyperparameters are chosen.
    pub validation: D,
    /// Users on whom the result is reported.
    pub test: D,
}

impl<D> Split<D> {
    /// The set for `part`, if it is one of the three.
    pub(super) fn part_mut(&mut self, part: Part) -> Option<&mut D> {
        match part {
            Part::Public => None,
            Part::Train => Some(&mut self.train),
            Part::Validation => Some(&mut self.validation),
            Part::Test => Some(&mut self.test),
        }
    }

    /// The three sets with their names.
    pub fn parts(&self) -> [(&'static str, &D); 3] {
        [("train", &self.train), ("validation", &self.validation), ("test", &self.test)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_as_promised_and_public_users_are_taken_from_all_sets_alike() {
        let parts = |public| {
            let mut counts = [0_u32; 4];
            for user in 0..20_000 {
                counts[Part::of("made-up", &user.to_string(), public) as usize] += 1;
            }
            counts
        };
        // Five standard deviations of a binomial with 20,000 draws are at most 354.
        let close = |count: u32, expected: u32| count.abs_diff(expected) < 354;
        let [public, train, validation, test] = parts(0);
        assert!(public == 0 && close(train, 17_000) && close(validation, 1000) && close(test, 2000));
        let [public, train, validation, test] = parts(100);
        assert!(close(public, 2000) && close(train, 15_300) && close(validation, 900) && close(test, 1800));
    }

    #[test]
    fn assignment_is_stable_across_versions() {
        let others: Vec<_> = (0..72)
            .map(|user| (user, Part::of("file", &format!("user{user}"), 100)))
            .filter(|&(_, part)| part != Part::Train)
            .collect();
        // From an implementation in Python.
        let public = [1, 6, 15, 19, 25, 28, 57].map(|user| (user, Part::Public));
        let test = [0, 50, 52, 58, 66].map(|user| (user, Part::Test));
        let validation = [60, 71].map(|user| (user, Part::Validation));
        let mut expected = [&public[..], &test, &validation].concat();
        expected.sort_by_key(|&(user, _)| user);
        assert_eq!(others, expected);
    }

    #[test]
    fn names_that_run_together_are_told_apart() {
        assert_ne!(digest("ab", "c", "d"), digest("a", "bc", "d"));
        assert_ne!(digest("a", "bc", "d"), digest("a", "b", "cd"));
    }
}
