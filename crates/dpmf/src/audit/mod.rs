//! Audits: attacks that test a guarantee.
//!
//! [`game`] is the paper's adaptive privacy game: a referee with a secret bit, adversaries, mechanisms.
//! [`adversary`] holds the adversaries, [`mechanism`] the Gaussian matrix mechanism they play against, and
//! [`counterexample`] a mechanism that is private for fixed inputs only. [`bits`] looks at the bits of released numbers.
//! [`sampled`] is the game in which a sampler decides when the unit takes part. [`audit`] plays many games and computes a lower
//! bound on the true ε.
//!
//! An audit can refute a guarantee, but never prove one. It finds sensitivities that are too small, and noise that repeats or is
//! scaled wrongly, but nothing that no adversary here looks for.
//!
//! ```
//! use dpmf::accounting::{Accountant, Adjacency, Amplification, Terms};
//! use dpmf::audit::{AdversaryKind, AuditOptions, Informed, MatrixMechanism, Neighbours, audit};
//!
//! let adjacency = Adjacency::ReplaceWithZero;
//! let terms = Terms { adjacency, accountant: Accountant::Exact, sampled: Amplification::None, sensitivity: 1.0, clip: 1.0,
//! beside: None }; let promise = terms.calibrate_noise(2.0, 1e-5)?;
//!
//! // Independent noise on four steps, at half the deviation that the promise needs.
//! let mechanism = MatrixMechanism::new(faer::Mat::identity(4, 4), 0.5 * promise.noise_std(), 1)?;
//! let neighbours = Neighbours::single(adjacency, 1.0)?;
//! let model = mechanism.noise_model()?;
//! let adversary = Informed::of(AdversaryKind::WorstColumn, &model, &neighbours, 1);
//! let options = AuditOptions { trials: 20_000, ..Default::default() };
//! let report = audit(&mechanism, &adversary, &neighbours, (&promise).try_into()?, options)?;
//! assert!(report.refuted() && report.epsilon_lower > 3.0);
//! # Ok::<(), dpmf::Error>(())
//! ```

pub mod adversary;
pub mod binomial;
pub mod bits;
pub mod counterexample;
pub mod empirical;
pub mod game;
pub mod mechanism;
pub mod sampled;

pub use adversary::{AdversaryKind, Informed};
pub use bits::{BitsReport, audit_bits};
pub use counterexample::{Attack, CounterExample, CounterExampleRow};
pub use empirical::{AuditOptions, AuditReport, Promise, Test, audit};
pub use game::{Adversary, AuditRng, Draw, Lottery, Neighbours, Outcome, Player, Session, StreamMechanism};
pub use mechanism::{MatrixMechanism, NoiseModel};
pub use sampled::{
    CurvePoint, Deployed, SampledAdversary, SampledReport, audit_sampled, audit_sampled_form, promised_points,
};

#[cfg(test)]
mod tests;
