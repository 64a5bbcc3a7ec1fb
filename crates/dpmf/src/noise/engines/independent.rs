//! `N = I`: independent noise.

use super::{Engine, Field, Kernel, Packet, Row, fill_packets};
use crate::factorization::{Independent, Representation};

/// Independent rows, as in DP-SGD; no state.
pub(super) struct IndependentEngine {
    steps: usize,
}

impl IndependentEngine {
    pub(super) fn new(independent: &Independent) -> Self {
        Self { steps: independent.steps() }
    }
}

impl Engine for IndependentEngine {
    fn steps(&self) -> usize {
        self.steps
    }

    fn buffers(&self) -> usize {
        0
    }

    fn kernel<'a>(&'a self, field: &'a Field, step: usize) -> Box<dyn Kernel + 'a> {
        Box::new(IndependentKernel { row: field.row(step as u64) })
    }
}

struct IndependentKernel {
    row: Row,
}

impl Kernel for IndependentKernel {
    fn run(&self, first: u64, _: &mut [Packet], noise: &mut [Packet]) {
        fill_packets(&self.row, first, noise);
    }
}
