//! `dpmf._core`: the library as a Python extension module.
//!
//! Everything here translates; nothing here computes. Long work leaves the interpreter ([`parallel`]), errors
//! become Python's ([`error`]), arrays are NumPy's.

mod arrays;
mod clip;
mod data;
mod error;
mod ledger;
mod mechanism;
mod model;
mod noise;
mod parallel;
mod picture;
mod plan;
mod privacy;
mod run;
mod sampler;
mod solve;
mod train_table;
mod workload;

use pyo3::prelude::*;

/// The library in Rust behind `dpmf`; import `dpmf` instead.
#[pymodule(name = "_core")]
mod core {
    #[pymodule_export]
    use crate::clip::Clip;
    #[pymodule_export]
    use crate::ledger::Ledger;
    #[pymodule_export]
    use crate::mechanism::{Mechanism, load_mechanism};
    #[pymodule_export]
    use crate::model::{Model, load_model};
    #[pymodule_export]
    use crate::noise::{DurableStream, NoiseKey, NoiseStream, new_run, white_noise};
    #[pymodule_export]
    use crate::plan::{Plan, cache_folder, make_plan, planned_steps};
    #[pymodule_export]
    use crate::privacy::{
        PrivacyStatement, account, audit, calibrate_noise, compose, phases_delta, phases_epsilon,
        poisson_delta, poisson_epsilon, poisson_noise_multiplier,
    };
    #[pymodule_export]
    use crate::run::{ComingRow, PrivateRun};
    #[pymodule_export]
    use crate::sampler::Sampler;
    #[pymodule_export]
    use crate::solve::{Certificate, Optimum, Progress, compare, factorize, make_mechanism};
    #[pymodule_export]
    use crate::train_table::train_columns;
    #[pymodule_export]
    use crate::workload::{Workload, load_workload};

    use super::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("_BUFFERS", dpmf::planner::BUFFERS)?;
        module.add("_PULL", dpmf::planner::PULL)?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
