//! Putting the guarantee to the test.
//!
//! [`game`] is the paper's adaptive privacy game: a referee with a secret bit, adversaries, mechanisms.
//! [`adversary`] holds the adversaries, [`mechanism`] the Gaussian matrix mechanism they play against, and
//! [`counterexample`] the mechanism that only a Gaussian would have survived. [`audit`] plays many games and bounds
//! from below what a mechanism can truthfully promise.
//!
//! An audit can refute a guarantee and never prove one: it finds sensitivities that are too small, noise that
//! repeats or is scaled wrongly, and nothing of what no adversary here looks for.

pub mod adversary;
pub mod binomial;
pub mod counterexample;
pub mod empirical;
pub mod game;
pub mod mechanism;

pub use adversary::{AdversaryKind, Informed};
pub use counterexample::{Attack, CounterExample, CounterExampleRow};
pub use empirical::{AuditOptions, AuditReport, Promise, Test, audit};
pub use game::{Adversary, AuditRng, Neighbours, Outcome, Player, Session, StreamMechanism};
pub use mechanism::{MatrixMechanism, NoiseModel};

#[cfg(test)]
mod tests;
