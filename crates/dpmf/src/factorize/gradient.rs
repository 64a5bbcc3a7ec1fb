//! Projected gradient descent.

use crate::factorize::primal::{Direction, Point};
use faer::Mat;

/// Steepest descent within unit diagonals: the negative gradient with its diagonal set to zero.
pub(crate) struct Gradient;

impl Direction for Gradient {
    fn direction(&mut self, point: &Point) -> Mat<f64> {
        let n = point.x.nrows();
        Mat::from_fn(n, n, |i, j| if i == j { 0.0 } else { point.descent[(i, j)] })
    }

    /// Four times the last accepted step, so that the search can recover from a narrow passage.
    fn first_step(&self, last: Option<f64>) -> f64 {
        last.map_or(1.0, |step| 4.0 * step)
    }
}
