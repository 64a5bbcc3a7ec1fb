//! Values that are words: read as their types read them, and known to shells that complete them.

use clap::builder::{PossibleValue, StringValueParser, TypedValueParser};
use clap::{Arg, Command};
use std::error::Error;
use std::ffi::OsStr;
use std::marker::PhantomData;
use std::str::FromStr;

pub const ADJACENCY: &[&str] = &["replace-with-zero", "add-or-remove", "replace-one"];
pub const UNIT: &[&str] = &["user", "record"];
pub const ACCOUNTANT: &[&str] = &["exact", "zcdp", "rdp", "paper"];
pub const ARITHMETIC: &[&str] = &["exact", "float"];
pub const OUTPUT: &[&str] = &["gradient", "iterate"];
pub const ADVERSARY: &[&str] = &["worst-column", "adaptive", "paper", "bits"];

/// Reads a `T`; what shells offer is not all that can be read.
#[derive(Clone)]
pub struct Words<T> {
    offered: Vec<&'static str>,
    read: PhantomData<fn() -> T>,
}

/// Some of these words.
pub fn of<T>(offered: &[&'static str]) -> Words<T> {
    Words { offered: offered.to_vec(), read: PhantomData }
}

/// A mechanism by its name.
pub fn mechanism<T>() -> Words<T> {
    Words { offered: dpmf::family::ALL.iter().map(|family| family.name()).collect(), read: PhantomData }
}

/// A mechanism to train with.
pub fn trained<T>() -> Words<T> {
    let mut words = mechanism();
    words.offered.extend(["planned", "dp-sgd", "none"]);
    words
}

impl<T> TypedValueParser for Words<T>
where
    T: FromStr<Err: Error + Send + Sync> + Clone + Send + Sync + 'static,
{
    type Value = T;

    fn parse_ref(&self, command: &Command, flag: Option<&Arg>, value: &OsStr) -> Result<T, clap::Error> {
        let read = StringValueParser::new().try_map(|text: String| text.parse::<T>());
        read.parse_ref(command, flag, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(self.offered.iter().map(PossibleValue::new)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::audit::Player;
    use dpmf::accounting::{Accountant, Adjacency, Arithmetic, PrivacyUnit};
    use dpmf::noise::Output;
    use dpmf_train::MechanismChoice;

    #[test]
    fn every_word_that_is_offered_is_read() {
        fn all<T: FromStr>(words: &[&str]) -> bool {
            words.iter().all(|word| word.parse::<T>().is_ok())
        }
        assert!(all::<Adjacency>(ADJACENCY) && all::<PrivacyUnit>(UNIT) && all::<Accountant>(ACCOUNTANT));
        assert!(all::<Arithmetic>(ARITHMETIC) && all::<Output>(OUTPUT) && all::<Player>(ADVERSARY));
        assert!(all::<MechanismChoice>(&trained::<MechanismChoice>().offered));
    }
}
