//! Differentially private training with optimally correlated noise.

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
pub mod participation;
pub mod workload;

pub use catalog::{Catalog, Method};
pub use error::{Error, Result};
pub use factorization::{Factorization, Representation};
pub use factorize::{Certificate, optimal};
pub use loss::Loss;
pub use mechanism::Mechanism;
pub use participation::Participation;
pub use workload::{Average, Optimizer, Schedule, Workload};
