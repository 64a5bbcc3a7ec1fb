//! The filter as it is deployed: on the f32 grid, with a sensitivity of 1.

use super::measure::ColumnNorms;
use super::{Parts, StateSpace};
use crate::error::Result;
use crate::form::Representation;

impl StateSpace {
    /// Scales the columns of the encoder to norm 1 and rounds the coefficients to f32, no norm above 1.
    ///
    /// `C ← C·diag(e)` is `N ← diag(1/e)·N`: a factor for `d_i` and `h_i`, free of charge. At the optimum
    /// the loss is stationary under all changes of `X = CᵀC` that keep its diagonal, so after this it
    /// differs from the optimum only in second order of what truncation and quadrature did to `X`.
    ///
    /// Guarantee: all column norms of the encoder of the result, as f64 computes them, are at most 1. Column `i`
    /// depends on `d_i`, `g_i` and later steps only, so going backward each `d_i` is chosen for the rounded
    /// coefficients that follow, and rounded up. The sensitivity that is stated, and that noise is scaled to, is
    /// rounded up once more and may be an ulp above 1.
    pub fn deployed(self) -> Result<Self> {
        let targets = vec![1.0; self.steps()];
        self.deployed_to(&targets)
    }

    /// Squared column norms to deploy to if those far from the largest keep their ratio to it; `None` if there are none.
    ///
    /// Such a column is one whose constraint does not bind: the optimum wants it short, and to stretch it would cost
    /// in first order.
    pub(crate) fn slack(&self) -> Option<Vec<f64>> {
        let norms = self.encoder_column_norms_sq();
        let largest = norms.iter().copied().fold(0.0, f64::max);
        let target = |norm: &f64| if *norm < BINDING * largest { norm / largest } else { 1.0 };
        let targets: Vec<f64> = norms.iter().map(target).collect();
        targets.iter().any(|&target| target < 1.0).then_some(targets)
    }

    /// Coefficients on the f32 grid, squared column norms at most the targets.
    pub(crate) fn deployed_to(mut self, targets: &[f64]) -> Result<Self> {
        let r = self.order;
        let Parts { input, increment, .. } = &mut self.parts;
        for values in [input, increment] {
            values.iter_mut().for_each(|x| *x = f64::from(*x as f32));
        }
        let mut norms = ColumnNorms::new(r);
        for i in (0..self.steps()).rev() {
            let scaled = direct_for(norms.with_unit_direct(self.step(i)), targets[i]);
            let scale = scaled / self.parts.direct[i];
            self.parts.direct[i] = scaled;
            self.parts.output[i * r..][..r].iter_mut().for_each(|h| *h = f64::from((*h * scale) as f32));
            norms.pull_back(self.step(i));
        }
        Self::from_parts(r, self.parts)
    }
}

/// Squared column norms, relative to the largest, from which a constraint counts as binding.
const BINDING: f64 = 0.999;

/// The smallest f32 for which a column, of squared norm `unit` for 1, has a squared norm of at most `target`.
fn direct_for(unit: f64, target: f64) -> f64 {
    let mut d = (unit / target).sqrt() as f32;
    while d.is_finite() && ColumnNorms::with_direct(unit, f64::from(d)) > target {
        d = d.next_up();
    }
    f64::from(d)
}
