//! The optimum as a time-varying filter of low order: coefficients of a [`StateSpace`] from a dual variable.

mod assemble;
mod balance;
mod innovations;
mod modes;
mod observability;
mod plant;
mod processes;
mod sweep;
mod truncate;

pub use truncate::Order;

use crate::error::{Error, Result};
use crate::form::{Representation, StateSpace};
use crate::linalg::banded::LowerBanded;
use crate::workload::{Recurrence, Workload};
use plant::Plant;

/// Told how many streams were tried, and which share of the pass at hand is done; an error ends the fit.
pub(crate) type Tell<'a> = &'a mut dyn FnMut(usize, Option<f64>) -> Result<()>;

impl StateSpace {
    /// The optimal factorization for the dual variable `v`, not truncated, up to a relative error
    /// `tolerance` in `X(v)`.
    ///
    /// `N Nᵀ = X(v)⁻¹` with `X = D^{-1/2}(D^{1/2}AᵀAD^{1/2})^{1/2}D^{-1/2}`. The order, some tens, is the
    /// number of terms of the rational square root times the order of the workload: of use as a reference,
    /// not for streaming.
    ///
    /// Cost: O(n·order³).
    /// Errors: `v` not positive and finite or not of length `n`; `tolerance` outside `(0, 1)`.
    pub fn optimal(recurrence: &Recurrence, v: &[f64], tolerance: f64) -> Result<Self> {
        check_lengths(recurrence)?;
        truncate::optimal(Plant::new(recurrence)?, v, tolerance)
    }

    /// [`StateSpace::optimal`] for a workload that is a recurrence, from the states of its optimizer.
    pub(crate) fn optimal_for(workload: &Workload, v: &[f64], tolerance: f64) -> Result<Self> {
        truncate::optimal(plant(workload)?, v, tolerance)
    }

    /// The factorization for the dual variable `v`, truncated to few states and [deployed](Self::deployed):
    /// coefficients on the f32 grid, column norms of the encoder just below 1.
    ///
    /// Balanced truncation of [`StateSpace::optimal`], weighted by what an error does to the iterates: the
    /// observability Gramian is that of `A N`.
    ///
    /// Guarantee: the sensitivity is at most 1 up to its own rounding, see [`Self::deployed`]; with
    /// [`Order::Tolerance`] the loss of the result itself meets it.
    /// Cost: O(n·k²(r + w)) with `k` the order of [`StateSpace::optimal`]; the result's memory, k²/128
    /// numbers a step, and for a tolerance 169 f32 a step, of many steps 81.
    /// Errors: `v` not positive and finite or not of length `n`; [`Error::NotConverged`] when no order up
    /// to the given maximum reaches the tolerance.
    /// Reference: Shokoohi, Silverman and Van Dooren, "Linear time-variable systems: balancing and model
    /// reduction", IEEE Trans. Automatic Control 28 (1983).
    pub fn truncated(recurrence: &Recurrence, v: &[f64], order: Order) -> Result<Self> {
        check_lengths(recurrence)?;
        let measure = Plant::new(recurrence)?;
        let energy = |filter: &Self| filter.row_norms_sq_after_plant(&measure).iter().sum();
        truncate::truncated(Plant::new(recurrence)?, v, order, &energy, &mut |_, _| Ok(()))
    }

    /// [`StateSpace::truncated`] for a workload that is a recurrence, from the states of its optimizer; its own loss
    /// decides the order.
    ///
    /// Errors: those of it, and of `tell`.
    pub(crate) fn truncated_for(
        workload: &Workload,
        v: &[f64],
        order: Order,
        tell: Tell<'_>,
    ) -> Result<Self> {
        let energy = |filter: &Self| filter.decoder_row_norms_sq(workload).iter().sum();
        truncate::truncated(plant(workload)?, v, order, &energy, tell)
    }
}

fn plant(workload: &Workload) -> Result<Plant<'_>> {
    Plant::of(workload).unwrap_or_else(|| {
        Err(Error::Unsupported {
            what: "streaming the optimum of a matrix".into(),
            hint: "a dense workload has no recurrence; use its dense factorization",
        })
    })
}

fn check_lengths(Recurrence { left, right }: &Recurrence) -> Result<()> {
    match right.as_ref().map_or(left.n(), LowerBanded::n) {
        actual if actual != left.n() => {
            let (name, expected) = ("right side of the recurrence", left.n());
            Err(Error::WrongLength { name, actual, expected })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
