//! The one error type of the library.

use std::path::PathBuf;

/// Result with [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Where a solver stopped, as numbers alone; a [`Dual`](crate::factorize::Dual) is made of it by `TryFrom`.
#[derive(Clone, Debug, PartialEq)]
pub struct DualPoint {
    /// Number of steps.
    pub steps: usize,
    /// Distance of two participations of one user; the number of steps for one participation.
    pub separation: usize,
    /// One number for each phase; for one participation, one for each step.
    pub v: Vec<f64>,
    /// Directions, step after step; none for one participation.
    pub directions: Vec<f64>,
}

/// Everything that can go wrong, with the value, the place and the rule that was broken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument is outside its domain.
    #[error("{name} is {value}, but {rule}")]
    InvalidArgument {
        /// What was given, in the words of the signature.
        name: &'static str,
        /// The offending value.
        value: String,
        /// What it must satisfy.
        rule: &'static str,
    },
    /// A mechanism is asked for by a name, or with a choice, that does not exist.
    #[error("mechanism {value:?} {reason}")]
    Selector {
        /// What was given.
        value: String,
        /// What is wrong with it, to be read after the value, and what there is.
        reason: String,
    },
    /// One entry of a vector is outside its domain.
    #[error("{name}[{index}] is {value}, but {rule}")]
    InvalidEntry {
        /// The vector.
        name: &'static str,
        /// First bad index, zero-based.
        index: usize,
        /// The offending value.
        value: f64,
        /// What it must satisfy.
        rule: &'static str,
    },
    /// One entry of a matrix is outside its domain.
    #[error("{name}[{row}, {column}] is {value}, but {rule}")]
    InvalidMatrixEntry {
        /// The matrix.
        name: &'static str,
        /// Row of the first bad entry, zero-based.
        row: usize,
        /// Column of the first bad entry, zero-based.
        column: usize,
        /// The offending value.
        value: f64,
        /// What it must satisfy.
        rule: &'static str,
    },
    /// Two lengths that must agree do not.
    #[error("{name} has length {actual}, but {expected} is needed")]
    WrongLength {
        /// What has the wrong length.
        name: &'static str,
        /// The length it has.
        actual: usize,
        /// The length it must have.
        expected: usize,
    },
    /// The request is well formed but this combination has no implementation, or is too large for memory.
    #[error("{what}: {hint}")]
    Unsupported {
        /// What was asked for.
        what: String,
        /// What to do instead.
        hint: &'static str,
    },
    /// A solver stopped before its certified gap reached the target.
    #[error(
        "the solver stopped after {iterations} iterations at a certified gap of {gap:.3e}, above the target of {target:.1e}: {reason}"
    )]
    NotConverged {
        /// The gap that was reached and certified.
        gap: f64,
        /// The gap that was asked for.
        target: f64,
        /// Iterations spent.
        iterations: usize,
        /// Why it stopped there.
        reason: &'static str,
        /// The dual point reached; a certificate can be rebuilt from it.
        dual: Box<DualPoint>,
    },
    /// No stream with as many states as allowed comes as close to the bound as asked for.
    #[error(
        "no stream of up to {states} states has a √loss within {target:.1e} of the lower bound; the best is \
         {excess:.3e} above it: {reason}"
    )]
    TooFewStates {
        /// The most states that were tried.
        states: usize,
        /// Relative excess of √loss over the bound, of the best.
        excess: f64,
        /// The excess that was asked for.
        target: f64,
        /// What limits it.
        reason: &'static str,
    },
    /// Numbers left the range in which the computation means anything.
    #[error("{what} broke down at index {index}: {reason}")]
    Numerical {
        /// The computation.
        what: &'static str,
        /// Where, zero-based.
        index: usize,
        /// What was found there.
        reason: &'static str,
    },
    /// The caller's progress callback asked to stop.
    #[error("interrupted after {iterations} iterations at gap {gap:.3e}")]
    Interrupted {
        /// Iterations done.
        iterations: usize,
        /// Gap reached.
        gap: f64,
    },
    /// A ledger has not enough left for a release.
    #[error(
        "the ledger's budget is ε = {epsilon} at δ = {delta:e}, of which ε = {spent} is spent; this release would bring the total to \
         ε = {together}. Nothing was recorded or released"
    )]
    Budget {
        /// ε of the budget, for people.
        epsilon: String,
        /// δ of the budget.
        delta: f64,
        /// ε of what is recorded, for people.
        spent: String,
        /// ε with the release that is refused, for people.
        together: String,
    },
    /// A key file is refused.
    #[error("key file {path}: {reason}")]
    Key {
        /// The file.
        path: PathBuf,
        /// Why it is refused.
        reason: String,
    },
    /// The operating system gave no random bytes.
    #[error("the operating system gave no random bytes: {reason}")]
    Randomness {
        /// What it answered.
        reason: String,
    },
    /// A stream has no more rows.
    #[error(
        "all {steps} rows of noise have been used, and no row may be used twice: plan a mechanism for more steps"
    )]
    Exhausted {
        /// Rows of the mechanism.
        steps: usize,
    },
    /// A stream stopped for good after a failure, because what it may have released is no longer known.
    #[error("the noise stream is halted: {reason}")]
    Halted {
        /// What failed and what to do.
        reason: String,
    },
    /// A noise row was used with one input and is asked for with another.
    #[error(
        "step {step} is already in the journal with a different input: a second release with the same noise would reveal the exact \
         difference between the two inputs. Pass the original input again, or burn the step and continue with the next one"
    )]
    StepReused {
        /// The step, zero-based.
        step: usize,
    },
    /// What a program does in a step is not what the guarantee is for.
    #[error("{refusal}")]
    Refused {
        /// What it does.
        refusal: Refusal,
    },
    /// A checkpoint or journal belongs to another stream.
    #[error("{path} belongs to another {what}: it has {found}, but this stream has {expected}")]
    Binding {
        /// The file.
        path: PathBuf,
        /// In what the two differ.
        what: &'static str,
        /// What the stream has.
        expected: String,
        /// What the file has.
        found: String,
    },
    /// The same stream is open elsewhere.
    #[error(
        "{path} is locked: this stream is already open, in another process or in this one, and two open streams would use the same \
         row of noise twice. Close the other one first"
    )]
    Locked {
        /// The journal.
        path: PathBuf,
    },
    /// The system does not have enough memory.
    #[error("{what} needs {bytes} bytes, but the system has no memory left for it")]
    Memory {
        /// What it is for.
        what: &'static str,
        /// How much was asked for.
        bytes: u128,
    },
    /// A file could not be read or written.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// A file is not what it should be.
    #[error("{path}: {reason}")]
    Format {
        /// The file, or `<memory>`.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
}

/// Why a run refuses a batch, a contribution or a release.
///
/// The sentences stand here once, for every framework. What to do about it depends on the front end, which adds it by the
/// [`Refusal::name`].
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// A mechanism that relies on sampling gets contributions of batches that no sampler drew.
    #[error(
        "the guarantee of this mechanism relies on sampling {sampling}, and nothing here shows that the examples were drawn \
         that way"
    )]
    NotSampled {
        /// The sampling that the guarantee counts on.
        sampling: String,
    },
    /// The batches are of another sampler, or in another order, than those that the run began with.
    #[error(
        "the batches come from {given}, but the run began with {begun}: examples that already took part could take part again"
    )]
    OtherOrder {
        /// What decides the batches now.
        given: String,
        /// What decided them at first.
        begun: String,
    },
    /// A sampler that draws for one run is given to another.
    #[error(
        "this sampler draws for run {bound}. Run {run} would get the same secret batches, which neither run's guarantee covers: each run \
         needs a sampler of its own"
    )]
    SamplerInUse {
        /// The run that it draws for.
        bound: String,
        /// The run that asks for it.
        run: String,
    },
    /// No batch was handed out for the coming step, or the last one has had its step.
    #[error(
        "step {step} has no batch of its own: none was handed out for it, and the examples of any other batch would count twice"
    )]
    NoBatch {
        /// The coming step, zero-based.
        step: usize,
    },
    /// A batch that belongs to one step is used in another.
    #[error(
        "the batch was drawn for step {drawn}, but this is step {step}: the guarantee covers each batch in its own step only"
    )]
    OtherStep {
        /// The step of the batch.
        drawn: usize,
        /// The coming step.
        step: usize,
    },
    /// More contributions than examples.
    #[error(
        "step {step} would have {contributions} contributions, but only {members} examples were handed out for it, and the guarantee \
         allows each example one contribution"
    )]
    TooMany {
        /// The coming step.
        step: usize,
        /// Contributions with those that are refused.
        contributions: usize,
        /// Examples of the batch.
        members: usize,
    },
    /// More contributions than a sum holds without error.
    #[error(
        "a step has {contributions} contributions, but at most {most} can be added exactly: use smaller batches"
    )]
    Overflow {
        /// Contributions with those that are refused.
        contributions: usize,
        /// The most that there may be.
        most: usize,
    },
    /// A release without contributions.
    #[error("there is nothing to release in step {step}")]
    Nothing {
        /// The coming step.
        step: usize,
    },
    /// Nobody said what a mean divides by.
    #[error("the denominator is not known; it must be the planned batch size, set before training starts")]
    NoDenominator,
    /// The denominator changes during a run.
    #[error(
        "the denominator was {fixed} in the first step, but it is {given} now; it must stay the planned batch size, because the \
         size of an actual batch can reveal who is in it"
    )]
    OtherDenominator {
        /// As it was at the first step.
        fixed: f64,
        /// As it is given now.
        given: f64,
    },
}

impl Refusal {
    /// A short stable word for the variant.
    pub fn name(&self) -> &'static str {
        match self {
            Refusal::NotSampled { .. } => "not-sampled",
            Refusal::OtherOrder { .. } => "other-order",
            Refusal::SamplerInUse { .. } => "sampler-in-use",
            Refusal::NoBatch { .. } => "no-batch",
            Refusal::OtherStep { .. } => "other-step",
            Refusal::TooMany { .. } => "too-many",
            Refusal::Overflow { .. } => "overflow",
            Refusal::Nothing { .. } => "nothing",
            Refusal::NoDenominator => "no-denominator",
            Refusal::OtherDenominator { .. } => "other-denominator",
        }
    }
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Self {
        Error::Refused { refusal }
    }
}

impl Error {
    /// A short stable word for the variant, used as `error.kind` in JSON.
    pub fn kind(&self) -> &'static str {
        match self {
            Error::InvalidArgument { .. }
            | Error::Selector { .. }
            | Error::InvalidEntry { .. }
            | Error::InvalidMatrixEntry { .. } => "invalid-argument",
            Error::WrongLength { .. } => "wrong-length",
            Error::Unsupported { .. } => "unsupported",
            Error::NotConverged { .. } | Error::TooFewStates { .. } => "not-converged",
            Error::Numerical { .. } => "numerical",
            Error::Interrupted { .. } => "interrupted",
            Error::Budget { .. } => "budget",
            Error::Key { .. } => "key",
            Error::Randomness { .. } => "randomness",
            Error::Exhausted { .. } => "exhausted",
            Error::Halted { .. } => "halted",
            Error::StepReused { .. } => "step-reused",
            Error::Refused { .. } => "mismatch",
            Error::Binding { .. } => "binding",
            Error::Locked { .. } => "locked",
            Error::Memory { .. } => "memory",
            Error::Io { .. } => "io",
            Error::Format { .. } => "format",
        }
    }

    pub(crate) fn argument(name: &'static str, value: impl std::fmt::Display, rule: &'static str) -> Self {
        Error::InvalidArgument { name, value: value.to_string(), rule }
    }
}
