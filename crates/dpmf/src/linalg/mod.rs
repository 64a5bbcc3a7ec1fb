//! Linear algebra that no crate offers: banded recurrences, the rational square root, Gramians.

pub mod banded;
mod dense;
pub(crate) mod double;
pub(crate) mod exponentials;
pub(crate) mod front;
pub(crate) mod gramian;
pub(crate) mod lanes;
pub(crate) mod lbfgs;
pub(crate) mod pencil;
pub(crate) mod phases;
pub(crate) mod product;
pub mod rational;
pub(crate) mod small;
pub mod udu;

pub use dense::DENSE_LIMIT;
pub(crate) use dense::within_dense_limit;

/// Widest band for which the array algorithms are compiled; momentum with averaged iterates needs 3.
pub const MAX_BANDWIDTH: usize = 4;

/// Runs `$body` with the constant `$n` equal to `bandwidth + 1`, at least 2.
///
/// The body has type `T`, the macro `Result<T>`: wider bands than [`MAX_BANDWIDTH`] are refused.
macro_rules! with_band {
    ($bandwidth:expr, $n:ident => $body:expr) => {{
        macro_rules! run {
            ($value:literal) => {{
                const $n: usize = $value;
                Ok($body)
            }};
        }
        match $bandwidth {
            0 | 1 => run!(2),
            2 => run!(3),
            3 => run!(4),
            MAX_BANDWIDTH => run!(5),
            wide => Err(crate::error::Error::Unsupported {
                what: format!("a recurrence of bandwidth {wide}"),
                hint: "only bandwidths up to 4 have a linear-time solver; pass the matrix itself to the dense solver",
            }),
        }
    }};
}
pub(crate) use with_band;
