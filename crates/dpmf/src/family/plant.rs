//! The optimizer that noise goes into, as fits see it.

use crate::error::{Error, Result};
use crate::workload::Workload;

/// The optimizer, `a ← F a + g u` at each step, whose last state is released; by rows, step after step.
pub(super) struct Plant {
    pub states: usize,
    pub transition: Vec<f64>,
    pub input: Vec<f64>,
}

impl Plant {
    /// With the step sizes that designs see.
    ///
    /// Errors: a workload that is a matrix.
    pub fn new(workload: &Workload) -> Result<Self> {
        let realisation = workload.design_realisation().ok_or_else(|| Error::Unsupported {
            what: "a stream for a matrix".into(),
            hint: "a dense workload has no recurrence; use its dense optimum",
        })?;
        let (mut transition, mut input) = (Vec::new(), Vec::new());
        let (mut f, mut g) = (Vec::new(), Vec::new());
        for t in 0..workload.steps() {
            realisation.write(t, &mut f, &mut g);
            transition.extend_from_slice(&f);
            input.extend_from_slice(&g);
        }
        Ok(Self { states: realisation.states(), transition, input })
    }
}
