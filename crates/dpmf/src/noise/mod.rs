//! Keyed, correlated Gaussian noise: `u = N Z`, row by row, at memory speed.
//!
//! `Z[t, j]` is a pure function of a secret key and the address `(t, j)` ([`field`]), so a shard, a tile
//! size, a thread count or a restart never changes a bit. An engine ([`engines`]) turns it into the rows of
//! `N Z` with as little state as the factorization allows; a [`NoiseStream`] hands out each row once, and a
//! [`DurableStream`] keeps that promise across crashes.
//!
//! ```
//! use dpmf::factorization::{Factorization, Tree, tree::Decoder};
//! use dpmf::noise::{NoiseKey, NoiseStream, Output, RunId, engines};
//!
//! let tree = Factorization::Tree(Tree::new(100, Decoder::HonakerOnline)?).deployed()?;
//! let mechanism_hash = [0; 32]; // of the mechanism file, so that two mechanisms never share noise
//! let key = NoiseKey::generate()?.stream(mechanism_hash, RunId::generate()?);
//! let mut stream = NoiseStream::new(engines::engine(&tree)?, key, 0..1000, 1.5, Output::Gradient)?;
//!
//! let mut gradient = vec![0.0; 1000]; // a sum of clipped contributions
//! stream.add_next(&mut gradient)?;
//! assert_eq!(stream.next_step(), 1);
//! # Ok::<(), dpmf::Error>(())
//! ```
//!
//! Not covered: the guarantee of a mechanism is that of real Gaussian numbers. Here they are single-precision
//! numbers made from a cipher, and what can be learned from the grid that a rounded sum `g + u` lies on is
//! not accounted for.

mod binding;
mod checkpoint;
pub mod disk;
pub mod engines;
pub mod field;
mod gauss;
mod hmac;
pub mod journal;
pub mod key;
pub mod stream;

pub use field::{FIELD_FORMAT, Field, Row};
pub use journal::DurableStream;
pub use key::{Fingerprint, NoiseKey, RunId, StreamKey};
pub use stream::{NoiseStream, Output};
