//! Expected squared error of a mechanism, at clip 1 and noise multiplier 1.

/// Loss of a form on a workload, by step.
///
/// The noise that gives a fixed level of privacy has standard deviation `γ`, so step `i` is released with an
/// expected squared error of `γ²‖B_i‖²` a coordinate.
#[derive(Clone, Debug, PartialEq)]
pub struct Loss {
    sensitivity: f64,
    per_step: Vec<f64>,
}

impl Loss {
    /// The loss of a decoder with the given squared row norms at sensitivity `γ`.
    pub(crate) fn new(sensitivity: f64, mut row_norms_sq: Vec<f64>) -> Self {
        row_norms_sq.iter_mut().for_each(|norm_sq| *norm_sq *= sensitivity * sensitivity);
        Self { sensitivity, per_step: row_norms_sq }
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
