//! What would mend an error, named without the words of a front end.

use std::fmt;

/// A way out of an error, or of what a [`Remark`] tells.
///
/// Libraries say what can be changed; a front end says how, by its flags or keyword arguments. `Display` is for programs that have
/// neither.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Hint {
    /// Name the column of users, or declare that every row belongs to a different person.
    UserColumn,
    /// Name the column that is to be predicted.
    LabelColumn,
    /// Name the columns of features.
    FeatureColumns,
    /// Name the column of texts.
    TextColumn,
    /// Name the column of texts, or the one that is to be predicted.
    TextOrLabelColumn,
    /// Leave a column out of the features, take it for a text, or give a schema.
    LeaveOutOrDescribe,
    /// Give a schema.
    Schema,
    /// Take some users for public, give a public vocabulary or learn it from the training users, or do without words.
    PublicWords,
    /// Give a schema, treat some users as public, or take scales from the training users.
    PublicScales,
    /// Add the columns that the model was trained with.
    TrainedColumns,
    /// Allow a user more examples.
    ExamplesPerUser,
    /// Allow longer examples.
    ExampleLength,
    /// Say how many epochs there are, or name a mechanism.
    EpochsOrMechanism,
    /// Give a schema, treat some users as public, or spend more on the schema.
    FewUsers,
    /// Say how numbers are written.
    Decimal,
    /// Leave a column out.
    Exclude,
    /// Describe a column in a schema, or spend more on it.
    Describe,
    /// Name the classes.
    Classes,
    /// Leave out rows without a label.
    DropUnlabelled,
    /// Let the model write texts.
    Sample,
    /// Let the model predict rows.
    Predict,
}

impl Hint {
    /// Every hint.
    pub const ALL: [Hint; 21] = [
        Hint::UserColumn,
        Hint::LabelColumn,
        Hint::FeatureColumns,
        Hint::TextColumn,
        Hint::TextOrLabelColumn,
        Hint::LeaveOutOrDescribe,
        Hint::Schema,
        Hint::PublicWords,
        Hint::PublicScales,
        Hint::TrainedColumns,
        Hint::ExamplesPerUser,
        Hint::ExampleLength,
        Hint::EpochsOrMechanism,
        Hint::FewUsers,
        Hint::Decimal,
        Hint::Exclude,
        Hint::Describe,
        Hint::Classes,
        Hint::DropUnlabelled,
        Hint::Sample,
        Hint::Predict,
    ];
}

impl fmt::Display for Hint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Hint::UserColumn => "name the column of users, or declare that every row belongs to a different person",
            Hint::LabelColumn => "name the column that is to be predicted",
            Hint::FeatureColumns => "name the columns of features",
            Hint::TextColumn => "name the column of texts",
            Hint::TextOrLabelColumn => "name the column of texts, or the one that is to be predicted",
            Hint::LeaveOutOrDescribe => {
                "leave it out of the features, take it for a text, or give a schema that describes it"
            }
            Hint::Schema => "give a schema that describes the columns",
            Hint::PublicWords => {
                "treat some users as public, give a public list of words, or take the words of the training users, which ε does not \
                 cover; characters need no words"
            }
            Hint::PublicScales => {
                "give a schema, treat some users as public, or take them from the training users, which ε does not cover"
            }
            Hint::TrainedColumns => "the table needs every column that the model was trained with",
            Hint::ExamplesPerUser => "allow a user more examples",
            Hint::ExampleLength => "allow longer examples",
            Hint::EpochsOrMechanism => "say how many epochs there are, or name a mechanism",
            Hint::FewUsers => {
                "give a schema that describes the columns, treat some users as public, or spend more of the budget on the schema"
            }
            Hint::Decimal => "say how numbers are written",
            Hint::Exclude => "leave the column out",
            Hint::Describe => "describe the columns in a schema, or spend more of the budget on finding them",
            Hint::Classes => "name the classes",
            Hint::DropUnlabelled => "leave out the rows without a label",
            Hint::Sample => "write texts with it instead",
            Hint::Predict => "predict rows with it instead",
        })
    }
}

/// What was left out, cut or filled in, for whoever holds the data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Remark {
    /// What was done.
    pub text: String,
    /// What would have avoided it.
    pub hint: Option<Hint>,
}

impl Remark {
    pub(crate) fn hinted(text: impl Into<String>, hint: Hint) -> Self {
        Self { text: text.into(), hint: Some(hint) }
    }
}

impl From<String> for Remark {
    fn from(text: String) -> Self {
        Self { text, hint: None }
    }
}

impl fmt::Display for Remark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.hint {
            Some(hint) => write!(f, "{}: {hint}", self.text),
            None => f.write_str(&self.text),
        }
    }
}
