//! Keyed, correlated Gaussian noise: `u = N Z`, row by row, at memory speed.
//!
//! `Z[t, j]` is a pure function of a secret key and the address `(t, j)` ([`field`]), so a shard, a tile
//! size, a thread count or a restart never changes a bit.

mod checkpoint;
pub mod engines;
pub mod field;
pub mod journal;
pub mod key;
pub mod stream;

pub use field::{FIELD_FORMAT, Field, Row};
pub use journal::DurableStream;
pub use key::{Fingerprint, KeyOrigin, NoiseKey, RunId, StreamKey};
pub use stream::{NoiseStream, Output};

mod binding;
mod disk;
mod gauss;
mod hmac;
mod simd;
