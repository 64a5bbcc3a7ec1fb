//! Differentially private training with optimally correlated noise.
//!
//! The iterates of SGD, with momentum and any schedule of step sizes, are a lower-triangular linear map `A` of the clipped gradients
//! `G`. Every factorization `A = BC` is a mechanism: it releases `A G + B Z`, where the Gaussian noise `Z` is scaled to the column
//! norms of `C`. All of them are equally private, also on adaptive streams, but they add different amounts of error to the iterates
//! \[DMRST22\]. This crate finds the one with the least error, proves it with a certificate, and streams its noise in a few buffers of
//! the model's size.
//!
//! Where to start:
//!
//! - [`planner`] chooses a mechanism and a sampler for an amount of data, a batch size, an optimizer and a budget. The example
//!   `plan_and_train` trains with its plan, and prints the guarantee.
//! - [`Problem`] and [`Mechanism`] take the same steps one by one, as below.
//! - [`accounting`] computes ε and δ, [`audit`] attacks a mechanism, [`noise`] has keys, streams and journals, and [`run`] combines them
//!   for training.
//!
//! The whole pipeline, without a planner:
//!
//! ```
//! use dpmf::factorize::quiet;
//! use dpmf::mechanism::Conditions;
//! use dpmf::noise::{Arithmetic, NoiseKey, Output, RunId};
//! use dpmf::{Optimizer, Participation, Problem, Schedule, Workload};
//!
//! // What the optimizer computes: heavy-ball momentum with a cooldown, 256 steps, every user in one of them.
//! let schedule: Schedule = "cooldown:0.25:0.05".parse()?;
//! let optimizer = Optimizer { momentum: 0.9, ..Default::default() };
//! let workload = Workload::sgd(schedule.values(256), optimizer)?;
//! let problem = Problem::new(workload, Participation::default())?;
//!
//! // The optimum, to a certified gap of one in a million; as a stream of a few states, rounded to what is deployed.
//! assert!(problem.optimum(&mut quiet)?.certificate.gap <= 1e-6);
//! let mechanism = problem.mechanism("optimal".parse()?, &mut quiet)?;
//! assert!(mechanism.certificate().unwrap().ratio_to_bound() <= 1.0001);
//!
//! // The noise that gives (8, 1e-6), in words and in numbers.
//! let mechanism = mechanism.calibrated(8.0, 1e-6, 1.0, Conditions::default())?;
//! println!("{}", mechanism.privacy().unwrap());
//! let (key, run) = (NoiseKey::generate()?, RunId::generate()?);
//! let mut noise = mechanism.stream(&key, run, 0..1000, Output::Gradient, Arithmetic::Exact)?;
//! let mut sum_of_clipped_gradients = vec![0.0_f32; 1000];
//! noise.add_next(&mut sum_of_clipped_gradients)?;
//! # Ok::<(), dpmf::Error>(())
//! ```
//!
//! `NOTATION.md` explains the letters, and which words they have in signatures.

pub mod accounting;
pub mod audit;
pub mod clip;
pub mod comparison;
pub mod disk;
pub mod engine;
pub mod error;
pub mod factorize;
pub mod family;
pub mod form;
pub mod format;
pub mod identity;
pub mod inspection;
pub mod linalg;
pub mod loss;
pub mod mechanism;
pub mod noise;
pub mod participation;
pub mod planner;
pub mod problem;
pub mod run;
pub mod sampler;
mod sensitivity;
#[doc(hidden)]
pub mod simd;
pub mod tensors;
pub mod workload;

pub use clip::Clip;
pub use comparison::Comparison;
pub use error::{Error, Result};
pub use factorize::{Certificate, optimal};
pub use family::Selector;
pub use form::{Form, Representation};
pub use identity::Identity;
pub use inspection::Inspection;
pub use loss::Loss;
pub use mechanism::Mechanism;
pub use participation::{Participation, Sampling};
pub use problem::Problem;
pub use run::PrivateRun;
pub use sampler::Sampler;
pub use workload::{Average, Optimizer, Schedule, Workload};
