//! Feature vectors by user, in one allocation.

use super::{Schema, Split, Users};
use dpmf::accounting::PrivacyUnit;

use crate::{Domain, Labelled, LabelledExample, Remark, Valued, ValuedExample};

/// What belongs to a feature vector: a class, or a number.
pub trait Target: Copy + Send + Sync + 'static {
    /// Kind of example it makes.
    type Domain: Domain;

    /// Whether it is a class.
    const IS_CLASS: bool;

    /// The example of features and their target.
    fn example(features: &[f32], target: Self) -> <Self::Domain as Domain>::Example<'_>;
}

impl Target for u16 {
    type Domain = Labelled;

    const IS_CLASS: bool = true;

    fn example(features: &[f32], label: u16) -> LabelledExample<'_> {
        LabelledExample { features, label }
    }
}

impl Target for f32 {
    type Domain = Valued;

    const IS_CLASS: bool = false;

    fn example(features: &[f32], value: f32) -> ValuedExample<'_> {
        ValuedExample { features, value }
    }
}

/// Feature vectors with their targets, grouped by user.
#[derive(Debug, Clone, PartialEq)]
pub struct Samples<T> {
    width: usize,
    features: Vec<f32>,
    targets: Vec<T>,
    /// Where the examples of each user end.
    ends: Vec<usize>,
}

impl<T: Target> Samples<T> {
    /// No users yet, for vectors of so many features.
    pub fn new(width: usize) -> Self {
        Self { width, features: Vec::new(), targets: Vec::new(), ends: Vec::new() }
    }

    /// Adds an example of the user at hand.
    ///
    /// # Panics
    /// For another number of features than the others have.
    pub fn push(&mut self, features: &[f32], target: T) {
        assert_eq!(features.len(), self.width, "features of one width");
        self.features.extend_from_slice(features);
        self.targets.push(target);
    }

    /// Ends the user at hand, who may have no examples.
    pub fn finish_user(&mut self) {
        self.ends.push(self.targets.len());
    }

    /// Number of users.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there are no users.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Number of examples of all users.
    pub fn example_count(&self) -> usize {
        self.targets.len()
    }

    /// All feature vectors, one after the other.
    pub fn features(&self) -> &[f32] {
        &self.features
    }

    /// All targets, in the order of the feature vectors.
    pub fn targets(&self) -> &[T] {
        &self.targets
    }
}

impl<T: Target> Users for Samples<T> {
    type Domain = T::Domain;

    fn users(&self) -> usize {
        self.len()
    }

    fn examples<'a>(&'a self, user: usize, out: &mut Vec<<T::Domain as Domain>::Example<'a>>) {
        let start = user.checked_sub(1).map_or(0, |before| self.ends[before]);
        for example in start..self.ends[user] {
            let features = &self.features[example * self.width..][..self.width];
            out.push(T::example(features, self.targets[example]));
        }
    }
}

/// Feature vectors by user in three sets.
#[derive(Debug, Clone)]
pub struct SampleData<T> {
    /// Name for tables and reports.
    pub name: String,
    /// What the features and targets mean.
    pub meaning: Meaning,
    /// The three sets of users.
    pub split: Split<Samples<T>>,
    /// Whether a user is one record or all records of somebody.
    pub unit: PrivacyUnit,
    /// What a privacy statement has to add: what a user is, where classes and scales come from.
    pub notes: Vec<String>,
    /// What was left out or filled in, for whoever holds the data: counts that no ε covers.
    pub remarks: Vec<Remark>,
}

/// What features and targets mean.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub enum Meaning {
    /// Pixels row by row in \[0, 1\], and the number of classes.
    Pixels {
        /// Rows of an image.
        rows: usize,
        /// Columns of an image.
        columns: usize,
        /// Number of classes.
        classes: usize,
    },
    /// Columns of a table.
    Columns(Schema),
}

impl Meaning {
    /// Number of features.
    pub fn features(&self) -> usize {
        match self {
            Meaning::Pixels { rows, columns, .. } => rows * columns,
            Meaning::Columns(schema) => schema.width(),
        }
    }

    /// Number of classes; nothing where numbers are predicted.
    pub fn classes(&self) -> Option<usize> {
        match self {
            Meaning::Pixels { classes, .. } => Some(*classes),
            Meaning::Columns(schema) => schema.classes().map(<[String]>::len),
        }
    }

    /// What a class is called.
    pub fn class(&self, class: usize) -> String {
        match self {
            Meaning::Pixels { .. } => class.to_string(),
            Meaning::Columns(schema) => {
                schema.classes().and_then(|names| names.get(class)).cloned().unwrap_or_default()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_have_their_own_examples_and_may_have_none() {
        let mut samples = Samples::<u16>::new(2);
        samples.push(&[1.0, 2.0], 3);
        samples.push(&[4.0, 5.0], 6);
        samples.finish_user();
        samples.finish_user();
        samples.push(&[7.0, 8.0], 9);
        samples.finish_user();
        let of = |user| {
            let mut examples = Vec::new();
            samples.examples(user, &mut examples);
            examples.iter().map(|e| (e.features.to_vec(), e.label)).collect::<Vec<_>>()
        };
        assert_eq!((samples.len(), samples.example_count()), (3, 3));
        assert_eq!(of(0), [(vec![1.0, 2.0], 3), (vec![4.0, 5.0], 6)]);
        assert!(of(1).is_empty());
        assert_eq!(of(2), [(vec![7.0, 8.0], 9)]);
    }
}
