//! Keyed, correlated Gaussian noise: `u = N Z`, row by row, at memory speed.
//!
//! `Z[t, j]` is a pure function of a secret key and the address `(t, j)` ([`field`]), so a shard, a tile
//! size, a thread count or a restart never changes a bit. An engine ([`engine`]) turns it into the rows of
//! `N Z` with as little state as its form allows; a [`NoiseStream`] uses each row once, and a [`DurableStream`] guarantees this
//! across crashes too.
//!
//! [`Mechanism::stream`](crate::Mechanism::stream) makes them, and nothing else does.
//!
//! The guarantee of a mechanism is that of real Gaussian numbers. In exact arithmetic, the default, a release is the ideal `g +
//! u`, correctly rounded, and the guarantee holds for every bit ([`exact`]). In float arithmetic both are made and added in
//! single precision, and the guarantee does not cover the lowest bits of the sum.

mod ahead;
mod binding;
mod checkpoint;
mod digest;
mod hmac;
pub mod journal;
pub mod key;
mod source;
pub mod stream;

pub use crate::accounting::Arithmetic;
pub use crate::engine::exact::engine::SplitRow;
pub use crate::engine::{self, FIELD_FORMAT, Field, Row, Value, exact, field};
pub use ahead::default_threads;
pub use digest::SumDigest;
pub(crate) use digest::{BLOCK as DIGEST_BLOCK, DigestKeys};
pub use journal::{DurableStream, Mark};
pub use key::{Fingerprint, NoiseKey, RunId, StreamKey};
pub use stream::{ComingRow, NoiseStream, Output};
