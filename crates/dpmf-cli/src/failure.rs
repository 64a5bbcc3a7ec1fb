//! Failures of the program itself, each with the word that JSON has for its kind.

use crate::hints;
use std::fmt;

/// What went wrong, for errors that the libraries do not know.
#[derive(Debug)]
pub struct Failure {
    kind: &'static str,
    message: String,
}

impl Failure {
    /// Memory that the machine does not have.
    pub fn memory(message: impl Into<String>) -> Self {
        Self { kind: "memory", message: message.into() }
    }

    /// Ctrl-C, or a request of the system to end.
    pub fn interrupted(message: impl Into<String>) -> Self {
        Self { kind: "interrupted", message: message.into() }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Failure {}

/// `error.kind` of JSON.
pub fn kind(error: &anyhow::Error) -> &'static str {
    let own = error.downcast_ref::<Failure>().map(|failure| failure.kind);
    let train = || error.downcast_ref::<dpmf_train::Error>().map(dpmf_train::Error::kind);
    let library = || error.downcast_ref::<dpmf::Error>().map(dpmf::Error::kind);
    own.or_else(train).or_else(library).unwrap_or("failure")
}

/// The whole chain of an error. A cause that the previous message already contains is not repeated.
pub fn error_chain(error: &anyhow::Error) -> String {
    let mut story = String::new();
    for cause in error.chain().map(hints::error) {
        if story.is_empty() {
            story = cause;
        } else if !story.ends_with(&cause) {
            story += &format!(": {cause}");
        }
    }
    story
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn a_cause_is_told_once() {
        let io = || std::io::Error::from(std::io::ErrorKind::NotFound);
        let library = dpmf::Error::Io { path: "m".into(), source: io() };
        assert_eq!(error_chain(&library.into()), "m: entity not found");
        let plain = Err::<(), _>(io()).context("cannot read m").unwrap_err();
        assert_eq!(error_chain(&plain), "cannot read m: entity not found");
    }

    #[test]
    fn kinds_survive_what_is_added_to_a_failure() {
        let error = Err::<(), _>(Failure::interrupted("stopped")).context("while training").unwrap_err();
        assert_eq!((kind(&error), error_chain(&error).as_str()), ("interrupted", "while training: stopped"));
        assert_eq!(kind(&anyhow::anyhow!("words")), "failure");
    }
}
