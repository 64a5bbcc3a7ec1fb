//! Putting the guarantee to the test.
pub mod adversary;
pub mod binomial;
pub mod empirical;
pub mod game;
pub mod mechanism;

pub use empirical::{AuditOptions, AuditReport, Promise, Test, audit};
pub use game::{Adversary, Neighbours, Player, Session, StreamMechanism};
pub use mechanism::{MatrixMechanism, NoiseModel};
#[cfg(test)]
mod tests;
