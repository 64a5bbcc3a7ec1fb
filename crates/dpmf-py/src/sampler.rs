//! `dpmf.Sampler`.

use crate::error::{IntoPython, raise, type_error, value_error};
use crate::noise::{NoiseKey, run_id};
use dpmf::Sampling;
use dpmf::accounting::KeyOrigin;
use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Draws in secret which units take part in which step.
///
/// sampling is "cyclic-poisson:G:Q" (units are put into G parts that take turns, and each unit of the current part takes part
/// with probability Q; G = 1 is Poisson sampling), "balls-in-bins:B" (each unit has one of B phases, and takes part at every B-th
/// step) or "reshuffled-bins:B" (each unit draws one of B phases anew in every epoch). Key and run are those of the noise; the
/// draws are independent of the noise, and must stay as secret. run is None for a new run, or a stream's .run. You can choose a
/// name only with a key from a seed.
///
/// The members of a step are a function of key, run, sampling, unit and step alone. So a run can resume at any step (start), and
/// a unit that joins or leaves does not affect the others. Iterating yields the members of each step once, from next_step on.
/// Divide a mean by expected_batch, never by the number of members.
///
/// >>> import dpmf
/// >>> key = dpmf.NoiseKey.generate()
/// >>> sampler = dpmf.Sampler("balls-in-bins:60", key, units=60_000, steps=600)
/// >>> sampler.expected_batch
/// 1000.0
/// >>> all(700 < len(members) < 1300 for members in sampler)  # nine deviations
/// True
#[pyclass(module = "dpmf")]
pub(crate) struct Sampler {
    pub(crate) inner: dpmf::Sampler,
    next_step: usize,
    /// Whether its run was named by the caller: another run may have used the name. Names under a seed are for experiments.
    pub(crate) named: bool,
}

#[pymethods]
impl Sampler {
    #[new]
    #[pyo3(signature = (sampling, key, *, units, steps, run=None, start=0))]
    fn new(
        py: Python<'_>,
        sampling: &str,
        key: &Bound<'_, NoiseKey>,
        units: usize,
        steps: usize,
        run: Option<&str>,
        start: usize,
    ) -> PyResult<Self> {
        Self::of(py, sampling.parse().or_raise()?, key, units, steps, run, start)
    }

    /// The members of a step, counted from zero: indices of units in order, perhaps none.
    fn members<'py>(&self, py: Python<'py>, step: usize) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let members = py.detach(|| self.inner.members(step)).or_raise()?;
        Ok(PyArray1::from_iter(py, members.into_iter().map(i64::from)))
    }

    /// The steps in which one unit takes part.
    fn turns(&self, unit: usize) -> PyResult<Vec<usize>> {
        self.inner.turns(unit).or_raise()
    }

    /// Mean number of members of a step: divide means by it.
    #[getter]
    fn expected_batch(&self) -> f64 {
        self.inner.expected_batch()
    }

    /// The sampling that it draws.
    #[getter]
    fn sampling(&self) -> String {
        self.inner.sampling().to_string()
    }

    /// Number of units.
    #[getter]
    fn units(&self) -> usize {
        self.inner.units()
    }

    /// Number of steps.
    #[getter]
    fn steps(&self) -> usize {
        self.inner.steps()
    }

    /// The next step to be drawn; equal to steps at the end.
    #[getter]
    fn next_step(&self) -> usize {
        self.next_step
    }

    /// The name of the run, 32 hexadecimal digits.
    #[getter]
    fn run(&self) -> String {
        self.inner.run().to_string()
    }

    /// What load_state_dict() needs to continue; nothing in it is secret.
    fn state_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let state = PyDict::new(py);
        for (name, value) in self.names() {
            state.set_item(name, value)?;
        }
        state.set_item("units", self.units())?;
        state.set_item("steps", self.steps())?;
        state.set_item("next_step", self.next_step)?;
        Ok(state)
    }

    /// Continues where another sampler with the same key, run, sampling, units and steps stopped.
    fn load_state_dict(&mut self, py: Python<'_>, state: &Bound<'_, PyDict>) -> PyResult<()> {
        let Some(next_step) = state.get_item("next_step")? else {
            return Err(value_error("the state has no next_step: it must come from state_dict()"));
        };
        let numbers = [("units", self.units().to_string()), ("steps", self.steps().to_string())];
        for (name, expected) in self.names().into_iter().chain(numbers) {
            let found = state.get_item(name)?.map(|value| value.to_string()).unwrap_or_default();
            if found != expected {
                let message = format!(
                    "the state belongs to another {name}: {found:?}, but this sampler has {expected:?}"
                );
                return Err(raise(py, "mismatch", message));
            }
        }
        let next_step: usize = next_step.extract()?;
        if next_step > self.steps() {
            return Err(value_error(format!(
                "next_step is {next_step}, but there are {} steps",
                self.steps()
            )));
        }
        self.next_step = next_step;
        Ok(())
    }

    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __next__<'py>(&mut self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyArray1<i64>>>> {
        if self.next_step == self.steps() {
            return Ok(None);
        }
        let members = self.members(py, self.next_step)?;
        self.next_step += 1;
        Ok(Some(members))
    }

    /// Number of steps from next_step to the end.
    fn __len__(&self) -> usize {
        self.steps() - self.next_step
    }

    fn __repr__(&self) -> String {
        format!(
            "<dpmf.Sampler: {}, step {} of {}, {} units, run {}>",
            self.sampling(),
            self.next_step,
            self.steps(),
            self.units(),
            self.run()
        )
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(type_error(
            "a Sampler holds a secret and cannot be pickled or copied: make a new one from its key and run in the process \
             that needs it",
        ))
    }
}

impl Sampler {
    /// The sampler of one run, which hands out from `start` on.
    pub(crate) fn of(
        py: Python<'_>,
        sampling: Sampling,
        key: &Bound<'_, NoiseKey>,
        units: usize,
        steps: usize,
        run: Option<&str>,
        start: usize,
    ) -> PyResult<Self> {
        let key = &key.get().0;
        let named = run.is_some() && key.origin() == KeyOrigin::System;
        let run = run_id(run, key)?;
        let inner = py.detach(|| dpmf::Sampler::new(key, run, sampling, units, steps)).or_raise()?;
        if start > steps {
            return Err(value_error(format!("start is {start}, but there are {steps} steps")));
        }
        Ok(Self { inner, next_step: start, named })
    }

    /// Whose draws these are.
    fn names(&self) -> [(&'static str, String); 3] {
        [("sampling", self.sampling()), ("run", self.run()), ("key", self.inner.fingerprint().to_string())]
    }
}
