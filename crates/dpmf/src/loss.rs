//! Expected squared error of a mechanism, at unit clip and unit noise multiplier.

use crate::factorization::Representation;
use crate::participation::Participation;
use crate::workload::Workload;

/// Loss of a factorization on a workload, by step.
///
/// The noise that gives a fixed level of privacy has standard deviation `γ`, so step `i` is released with an
/// expected squared error of `γ²‖B_i‖²` a coordinate.
#[derive(Clone, Debug, PartialEq)]
pub struct Loss {
    sensitivity: f64,
    per_step: Vec<f64>,
}

impl Loss {
    /// Measures the loss.
    ///
    /// Cost: that of [`Representation::decoder_row_norms_sq`].
    pub fn of(factorization: &dyn Representation, workload: &Workload, participation: Participation) -> Self {
        let sensitivity = participation.sensitivity(&factorization.encoder_column_norms_sq());
        let mut per_step = factorization.decoder_row_norms_sq(workload);
        per_step.iter_mut().for_each(|norm_sq| *norm_sq *= sensitivity * sensitivity);
        Self { sensitivity, per_step }
    }

    /// The sensitivity `γ`.
    pub fn sensitivity(&self) -> f64 {
        self.sensitivity
    }

    /// Squared error of every step, `γ²‖B_i‖²`.
    pub fn per_step(&self) -> &[f64] {
        &self.per_step
    }

    /// Total squared loss, `γ²‖B‖_F²`.
    pub fn total(&self) -> f64 {
        self.per_step.iter().sum()
    }

    /// Root of the total.
    pub fn sqrt_total(&self) -> f64 {
        self.total().sqrt()
    }

    /// Root of the largest step's loss.
    pub fn max_sqrt(&self) -> f64 {
        self.per_step.iter().copied().fold(0.0, f64::max).sqrt()
    }

    /// Root of the last step's loss.
    pub fn final_sqrt(&self) -> f64 {
        self.per_step.last().copied().unwrap_or(0.0).sqrt()
    }
}
