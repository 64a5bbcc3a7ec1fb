//! Exact noise: what is proved of real numbers holds for the bits.
//!
//! The guarantee of a mechanism is that of `g + w` for a real vector `g`, the clipped sum, and ideal Gaussian noise
//! `w = scale · N z`. A computer that rounds as it goes releases something else, and the grid that its sums lie on can tell
//! neighbours apart. Here the ideal mechanism is run, and only what it releases is rounded, which is post-processing:
//!
//! `y = q ⌊(g + w)/q⌉`, correctly rounded to the nearest multiple of a power of two `q`, coordinate by coordinate.
//!
//! - The numbers `z[t, j]` are real: their infinitely many digits are functions of the key ([`field`]). The coefficients of
//!   `N`, the scale, and the inputs `g` are the f32 or f64 numbers that are deployed, taken for what they are.
//! - The fast path computes `w` in double precision, with a bound on its error that holds for all coordinates: the error of
//!   a Gaussian number (`normal.rs`), and the rounding of every operation since the first step, from the coefficients
//!   alone (`program.rs`). Where no tie lies within the bound, the rounding is certain.
//! - The others, one in some 10⁸, are computed again from the first step on that they depend on, with 128 digits behind the
//!   point, then 256, then 512, until their rounding is certain (`engine.rs`).
//!
//! So the bits of a release do not depend on vector widths, fused instructions, threads, tiles, shards or restarts, though
//! those of the states in between may.
//!
//! *Guarantee.* The released vectors are a function of the ideal mechanism's, but for two things: that AES-256 takes the
//! place of random digits ([`field`]), and an event of probability below 2⁻¹²⁰ for any stream that fits a computer: that a
//! number which the error bound takes to lie within 16.5 standard deviations does not, or that 127 first digits are
//! alike. A sum that is not exact before it is handed over is not mended here; see `Clip` of `dpmf-train` and the Python
//! adapters for sums that are.
//!
//! *Time.* A step takes longer when coordinates are close to a tie. How close a coordinate of the ideal `g + w` is to one is a
//! function of what is covered anyway; which of those within twice the error bound are looked at again depends on rounding
//! errors too. An observer who can count them, by time, learns at most that such a coordinate was there, and nothing in the
//! proof is about that.

mod elementary;
pub(crate) mod engine;
pub mod field;
mod fixed;
pub(crate) mod fused;
mod normal;
pub mod program;

#[cfg(test)]
mod tests;
