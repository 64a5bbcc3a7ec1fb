//! Differentially private training with optimally correlated noise.

pub mod error;
pub mod factorization;
pub mod factorize;
pub mod linalg;
pub mod workload;

pub use error::{Error, Result};
pub use workload::{Average, Optimizer, Schedule, Workload};
