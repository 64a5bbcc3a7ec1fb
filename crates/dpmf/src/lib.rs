//! Differentially private training with optimally correlated noise.
//!
//! The iterates of SGD, with momentum and any step-size schedule, are a lower-triangular linear map `A` of the
//! clipped gradients `G`. Factor `A = BC` and release `A G + B Z` with Gaussian `Z` scaled to the column norms of
//! `C`: the guarantee holds on adaptive streams for every factorization, and the best one does the least harm to
//! the iterates \[DMRST22\]. This crate finds the best one with a certificate, in linear time, and streams it in a
//! few model-sized buffers.
//!
//! The whole pipeline:
//!
//! ```
//! use dpmf::factorize::{Options, Solver, Target, optimal};
//! use dpmf::mechanism::{Bound, Conditions};
//! use dpmf::{Factorization, Mechanism, Optimizer, Participation, Schedule, Workload};
//! use std::ops::ControlFlow;
//!
//! // What the optimizer computes: heavy-ball momentum with a cooldown, 256 steps.
//! let schedule: Schedule = "cooldown:0.25:0.05".parse()?;
//! let optimizer = Optimizer { momentum: 0.9, ..Default::default() };
//! let workload = Workload::sgd(schedule.values(256), optimizer)?;
//!
//! // The optimal factorization, to a certified gap of one in a million.
//! let mut observe = |_: &dpmf::factorize::Progress| ControlFlow::Continue(());
//! let optimum = optimal(&workload, Solver::Auto, &Options::default(), &mut observe)?;
//! assert!(optimum.certificate.gap <= 1e-6);
//!
//! // As a stream, rounded to what is deployed, with its own certificate.
//! let stream = Factorization::StateSpace(optimum.to_state_space(&workload, Target::Tolerance(1e-4))?);
//! let mechanism = Mechanism::new(workload, &stream, Participation::Single)?
//!     .with_bound(Bound::from(&optimum))?
//!     .calibrated(8.0, 1e-6, 1.0, Conditions::default())?;
//! assert!(mechanism.certificate().unwrap().ratio_to_bound() <= 1.0001);
//! println!("{}", mechanism.privacy().unwrap());
//! # Ok::<(), dpmf::Error>(())
//! ```
//!
//! `NOTATION.md` joins the words of the signatures with the letters of the paper.

pub mod accounting;
pub mod audit;
pub mod catalog;
pub mod error;
pub mod factorization;
pub mod factorize;
pub mod format;
pub mod linalg;
pub mod loss;
pub mod mechanism;
pub mod noise;
pub mod participation;
#[doc(hidden)]
pub mod simd;
pub mod workload;

pub use catalog::{Catalog, Method};
pub use error::{Error, Result};
pub use factorization::{Factorization, Representation};
pub use factorize::{Certificate, optimal};
pub use loss::Loss;
pub use mechanism::Mechanism;
pub use participation::Participation;
pub use workload::{Average, Optimizer, Schedule, Workload};
