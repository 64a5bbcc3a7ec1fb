//! Linear algebra that no crate offers: banded recurrences, the rational square root, Gramians.

pub mod banded;
pub mod rational;
