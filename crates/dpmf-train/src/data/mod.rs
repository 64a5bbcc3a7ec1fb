//! Data sets with users: the unit of privacy is a user, and no user is in two of the sets for training, validation and test.
//!
//! [`open`] turns a [`Source`], the argument of `--data`, into a [`Dataset`]. Membership in a set is a keyed hash of the user's
//! name ([`Part::of`]), never of a position, so adding or removing one user moves no other. Users come in the order of another
//! hash: neighbours have nothing in common, and the first `n` are a random sample.

use crate::{Domain, Remark, Text};
use dpmf::accounting::PrivacyUnit;

mod corpus;
mod fields;
mod found;
mod frame;
mod images;
mod labelled;
mod names;
mod parquet;
mod part;
mod rows;
mod samples;
mod schema;
mod source;
#[cfg(feature = "stackoverflow")]
mod stackoverflow;
mod texts;
mod vocabulary;

pub use corpus::Corpus;
pub use fields::Decimal;
pub use frame::{Frame, FrameColumn};
pub use labelled::{FrameTable, Rows};
pub use names::{NAMES_ALPHABET, names};
pub use part::{Part, Split};
pub use samples::{Meaning, SampleData, Samples, Target};
pub use schema::{DatePart, Feature, Label, Predict, Schema};
pub use source::{Columns, Dataset, Options, Source, find_schema, open, open_frame, outline, schema_cost};
pub use texts::encoded;
pub use vocabulary::{Tokens, Vocabulary, VocabularyFrom};

/// Examples grouped by user: the unit of privacy.
pub trait Users: Sync {
    /// Kind of example.
    type Domain: Domain;

    /// Number of users.
    fn users(&self) -> usize;

    /// Appends the examples of one user, always in the same order.
    fn examples<'a>(&'a self, user: usize, out: &mut Vec<<Self::Domain as Domain>::Example<'a>>);
}

/// Text by user in three sets, with the vocabulary its tokens index.
#[derive(Debug, Clone)]
pub struct TextData {
    /// Name for tables and reports.
    pub name: String,
    /// What the tokens mean.
    pub vocabulary: Vocabulary,
    /// The three sets of users.
    pub split: Split<Corpus>,
    /// Whether a user is one record or all records of somebody.
    pub unit: PrivacyUnit,
    /// What a privacy statement has to add: what a user is, where the vocabulary comes from.
    pub notes: Vec<String>,
    /// What was left out or cut, for whoever holds the data: counts that no ε covers.
    pub remarks: Vec<Remark>,
}

impl Users for Corpus {
    type Domain = Text;

    fn users(&self) -> usize {
        self.len()
    }

    fn examples<'a>(&'a self, user: usize, out: &mut Vec<&'a [u16]>) {
        out.extend(self.examples_of(user));
    }
}
