//! Independent noise at every step: `N = C = I`, the mechanism of DP-SGD.

use crate::factorization::{Cost, Representation, Rows};
use faer::Mat;

/// `B = A`, `C = I`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Independent {
    steps: usize,
}

impl Independent {
    /// Independent noise for `steps` steps.
    pub fn new(steps: usize) -> Self {
        Self { steps }
    }
}

impl Representation for Independent {
    fn steps(&self) -> usize {
        self.steps
    }

    fn coloring_rows(&self) -> Rows<'_> {
        let mut i = 0;
        Box::new(move |out| {
            out[i] = 1.0;
            i += 1;
        })
    }

    fn encoder(&self) -> Mat<f64> {
        Mat::identity(self.steps, self.steps)
    }

    fn encoder_column_norms_sq(&self) -> Vec<f64> {
        vec![1.0; self.steps]
    }

    fn cost(&self) -> Cost {
        Cost { buffers: 0, work: 1.0 }
    }
}
