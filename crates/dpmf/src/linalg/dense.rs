//! How large a matrix may be that is formed whole.

use crate::error::{Error, Result};

/// Largest number of steps for which n × n matrices are formed.
pub const DENSE_LIMIT: usize = 16_384;

pub(crate) fn within_dense_limit(n: usize) -> Result<()> {
    if n > DENSE_LIMIT {
        return Err(Error::Unsupported {
            what: format!("a dense matrix of {n} × {n} entries"),
            hint: "matrices are formed for at most 16384 steps; use the linear solver and a streaming factorization",
        });
    }
    Ok(())
}
