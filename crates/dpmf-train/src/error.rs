//! What can go wrong in training.

use crate::hint::Hint;
use std::path::PathBuf;

/// Result of a training operation.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of training: data, models, runs on disk, or the library beneath.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An error of the `dpmf` library.
    #[error(transparent)]
    Dpmf(#[from] dpmf::Error),
    /// An argument outside its range.
    #[error("{name} is {value}, but {rule}")]
    InvalidArgument {
        /// Name of the argument.
        name: &'static str,
        /// Value given.
        value: String,
        /// The rule it breaks.
        rule: &'static str,
    },
    /// A single pass needs more users than there are.
    #[error(
        "{rounds} rounds of {clients} clients need {} users for a single pass, but there are {users}: use fewer \
         rounds or clients",
        rounds.saturating_mul(*clients)
    )]
    TooFewUsers {
        /// Users there are.
        users: usize,
        /// Rounds asked for.
        rounds: usize,
        /// Users in each.
        clients: usize,
    },
    /// A run directory that cannot be begun or resumed.
    #[error("{path}: {message}")]
    Run {
        /// The directory.
        path: PathBuf,
        /// Why, and what to do.
        message: String,
    },
    /// A data file that is not as it should be.
    #[error("{path}: {message}")]
    Data {
        /// The file.
        path: PathBuf,
        /// What is wrong, and where in the file.
        message: String,
    },
    /// An error with a way out of it, which front ends put into words of their own.
    #[error("{error}: {hint}")]
    Hinted {
        /// What is wrong.
        error: Box<Error>,
        /// What to do.
        hint: Hint,
    },
    /// A file that cannot be read or written.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

impl Error {
    pub(crate) fn argument(name: &'static str, value: impl std::fmt::Display, rule: &'static str) -> Self {
        Self::InvalidArgument { name, value: value.to_string(), rule }
    }

    /// The same error with a way out of it.
    pub(crate) fn with_hint(self, hint: Hint) -> Self {
        Self::Hinted { error: Box::new(self), hint }
    }

    /// A file that a run cannot go on without.
    pub(crate) fn lost(path: &std::path::Path, what: &str) -> Self {
        let message = format!(
            "{what} of the run is gone: it cannot be resumed. What was released stays private; begin a new run with a \
             new key"
        );
        Self::Run { path: path.into(), message }
    }

    /// A plan whose file is not known yet.
    pub(crate) fn plan(message: String) -> Self {
        Self::Run { path: "plan".into(), message }
    }

    /// Short name of the kind of error, stable across versions.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Dpmf(error) => error.kind(),
            Self::InvalidArgument { .. } => "invalid-argument",
            Self::TooFewUsers { .. } => "too-few-users",
            Self::Run { .. } => "run",
            Self::Data { .. } => "data",
            Self::Hinted { error, .. } => error.kind(),
            Self::Io { .. } => "io",
        }
    }
}
