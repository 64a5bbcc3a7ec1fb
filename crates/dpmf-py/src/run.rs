//! `dpmf.PrivateRun`.

use crate::clip::Clip;
use crate::error::{IntoPython, raise, type_error, value_error};
use crate::mechanism::Mechanism;
use crate::noise::{Checkpoint, Guarded, NO_PICKLE, NoiseKey, check_calibrated, python_range, range, run_id};
use crate::parallel;
use crate::privacy::PrivacyStatement;
use crate::sampler::Sampler;
use dpmf::noise::{Arithmetic, DurableStream, RunId};
use dpmf::run::Order;
use numpy::{PyArray1, PyArrayMethods, PyUntypedArrayMethods};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyRange};
use std::ops::Range;
use std::path::PathBuf;

/// One run of private training: which step comes next, whose batch was handed out for it, how many contributions it has, what a
/// mean divides by, and its noise. The adapters for PyTorch, Opacus, JAX and Flower go through it.
///
///     run.follow("what decides the batches", by_step=True)
///     run.denominator = 256
///     run.hand_out(step, members=len(batch))
///     run.contribute(len(batch))              # as often as the batch comes in parts
///     run.clip.add_rows([gradients], [sum])   # int64, in units of run.clip.unit
///     run.release(sum, released)              # float32: the noisy sum, not divided
///
/// What would let one example count more than the guarantee allows is refused with MismatchError, whose fault is a word for
/// programs: more contributions than members ("too-many"), a batch that has had its step, or none ("no-batch"), a batch of another
/// step ("other-step"), batches that others decide than at first ("other-order"), a sampler of another run ("sampler-in-use"), none
/// where the guarantee counts on it ("not-sampled"), another denominator ("other-denominator"), nothing to release ("nothing").
///
/// Begins a run. dimension is that of the whole model; coordinates, a range, are those whose sums are released here. ranks add up
/// their contributions. journal, a path where nothing is, makes a run that open() can go on with.
#[pyclass(module = "dpmf")]
pub(crate) struct PrivateRun {
    guarded: Guarded<dpmf::PrivateRun>,
    mechanism: Py<Mechanism>,
}

#[pymethods]
impl PrivateRun {
    #[new]
    #[pyo3(signature = (mechanism, key, *, dimension, coordinates=None, run=None, journal=None, arithmetic="exact", ranks=1))]
    #[allow(clippy::too_many_arguments)] // keywords in Python
    fn new(
        py: Python<'_>,
        mechanism: &Bound<'_, Mechanism>,
        key: &Bound<'_, NoiseKey>,
        dimension: u64,
        coordinates: Option<&Bound<'_, PyRange>>,
        run: Option<&str>,
        journal: Option<PathBuf>,
        arithmetic: &str,
        ranks: usize,
    ) -> PyResult<Self> {
        let run = run_id(run, &key.get().0)?;
        Self::make(py, mechanism, key, dimension, coordinates, run, arithmetic, ranks, |begun, plan| {
            match &journal {
                Some(journal) => begun.with_journal(journal, plan),
                None => Ok(begun),
            }
        })
    }

    /// Goes on with the run of a journal, from a checkpoint (a path or bytes) or from the first step.
    ///
    /// Steps in the journal beyond the checkpoint come again for the same sum only; burn() passes over one.
    #[staticmethod]
    #[pyo3(signature = (mechanism, key, journal, *, dimension, coordinates=None, checkpoint=None, arithmetic="exact", ranks=1))]
    #[allow(clippy::too_many_arguments)] // keywords in Python
    fn open(
        py: Python<'_>,
        mechanism: &Bound<'_, Mechanism>,
        key: &Bound<'_, NoiseKey>,
        journal: PathBuf,
        dimension: u64,
        coordinates: Option<&Bound<'_, PyRange>>,
        checkpoint: Option<Checkpoint>,
        arithmetic: &str,
        ranks: usize,
    ) -> PyResult<Self> {
        let run = DurableStream::run_of(&journal).or_raise()?;
        let bytes = checkpoint.map(|checkpoint| checkpoint.bytes()).transpose()?;
        Self::make(py, mechanism, key, dimension, coordinates, run, arithmetic, ranks, |begun, plan| {
            begun.resumed(&journal, plan, bytes.as_deref())
        })
    }

    /// The name of the run that a journal belongs to.
    #[staticmethod]
    fn of_journal(journal: PathBuf) -> PyResult<String> {
        Ok(DurableStream::run_of(&journal).or_raise()?.to_string())
    }

    /// Takes up what a saved state kept of the run beside its noise: what decided its batches, and its denominator. Both stay as
    /// they were.
    #[pyo3(signature = (order=None, denominator=None))]
    fn recall(&mut self, py: Python<'_>, order: Option<String>, denominator: Option<f64>) -> PyResult<()> {
        self.guarded.live_mut(py)?.recall(order, denominator).or_raise()
    }

    /// Says what decides who is in which batch, in words that are kept with the run and compared when it goes on.
    ///
    /// by_step says that each batch belongs to a step, and the guarantee is for it in that step only; otherwise each example comes
    /// once in all. sampler is the one that draws them, for this run and no other.
    #[pyo3(signature = (order, *, by_step, sampler=None))]
    fn follow(
        &mut self,
        py: Python<'_>,
        order: String,
        by_step: bool,
        sampler: Option<&Bound<'_, Sampler>>,
    ) -> PyResult<()> {
        let run = self.guarded.live_mut(py)?;
        if let Some(sampler) = sampler {
            let mut sampler = sampler.borrow_mut();
            sampler.check_new(py, run.id(), run.order().is_none() && run.next_step() == 0)?;
            sampler.inner.bind(run.id()).or_raise()?;
        }
        run.follow(Order { name: order, by_step, sampled: sampler.is_some() }).or_raise()
    }

    /// What decides who is in which batch; None while nobody said.
    #[getter]
    fn order(&self, py: Python<'_>) -> PyResult<Option<String>> {
        Ok(self.guarded.live(py)?.order().map(|order| order.name.clone()))
    }

    /// Hands out the batch of a step, or this rank's part of it, of so many members; None where nobody knows how many.
    #[pyo3(signature = (step, members=None))]
    fn hand_out(&mut self, py: Python<'_>, step: usize, members: Option<usize>) -> PyResult<()> {
        self.guarded.live_mut(py)?.hand_out(step, members).or_raise()
    }

    /// Counts contributions of the batch that was handed out last to the coming step.
    fn contribute(&mut self, py: Python<'_>, count: usize) -> PyResult<()> {
        self.guarded.live_mut(py)?.contribute(count).or_raise()
    }

    /// Contributions to the coming step; None if none were counted since the last one.
    #[getter]
    fn contributions(&self, py: Python<'_>) -> PyResult<Option<usize>> {
        Ok(self.guarded.live(py)?.contributions())
    }

    /// Forgets the contributions to the coming step, whose sum must be forgotten too.
    fn clear(&mut self, py: Python<'_>) -> PyResult<()> {
        self.guarded.live_mut(py)?.clear();
        Ok(())
    }

    /// What a mean divides by, the planned size of a batch: fixed by the first release. None while nobody said.
    #[getter]
    fn denominator(&self, py: Python<'_>) -> PyResult<Option<f64>> {
        Ok(self.guarded.live(py)?.denominator())
    }

    #[setter]
    fn set_denominator(&mut self, py: Python<'_>, value: f64) -> PyResult<()> {
        self.guarded.live_mut(py)?.set_denominator(value).or_raise()
    }

    /// Refuses what release() would refuse, before ranks add up their sums.
    fn check_release(&self, py: Python<'_>) -> PyResult<()> {
        self.guarded.check_process(py)?;
        self.guarded.live(py)?.check_release().or_raise()
    }

    /// Adds the next row of noise to the sum of all contributions, int64 in units of clip.unit, and writes the noisy sum into
    /// released, float32. The sum becomes zero. Returns the step, zero-based.
    ///
    /// If it is refused, both are as they were.
    fn release(
        &mut self,
        py: Python<'_>,
        sum: &Bound<'_, PyAny>,
        released: &Bound<'_, PyAny>,
    ) -> PyResult<usize> {
        let run = self.guarded.live_mut(py)?;
        let sum = sum
            .cast::<PyArray1<i64>>()
            .map_err(|_| type_error("the sum must be a one-dimensional NumPy array of int64"))?;
        let released = released
            .cast::<PyArray1<f32>>()
            .map_err(|_| type_error("released must be a one-dimensional NumPy array of float32"))?;
        if !sum.is_c_contiguous() || !released.is_c_contiguous() {
            return Err(value_error("sum and released must be contiguous: numpy.ascontiguousarray"));
        }
        let busy = |_| value_error("sum or released is read-only or in use by another call");
        let (mut sum, mut released) =
            (sum.try_readwrite().map_err(busy)?, released.try_readwrite().map_err(busy)?);
        let (sum, released) = (sum.as_slice_mut()?, released.as_slice_mut()?);
        let pool = parallel::pool()?;
        py.detach(|| pool.install(|| run.release(sum, released))).or_raise()
    }

    /// Gives up the coming step, whose contributions are lost: its noise is never used. Returns the step.
    fn burn(&mut self, py: Python<'_>) -> PyResult<usize> {
        let run = self.guarded.live_mut(py)?;
        parallel::run(py, || run.burn())
    }

    /// The step of the next release, zero-based; equal to steps at the end.
    #[getter]
    fn next_step(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.guarded.live(py)?.next_step())
    }

    /// Number of steps in all.
    #[getter]
    fn steps(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.guarded.live(py)?.steps())
    }

    /// Number of steps in the journal: below it, only the same sum again or a burn is possible.
    #[getter]
    fn recorded_steps(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.guarded.live(py)?.recorded_steps())
    }

    /// Steps that were burned, in order.
    #[getter]
    fn burned(&self, py: Python<'_>) -> PyResult<Vec<usize>> {
        Ok(self.guarded.live(py)?.burned())
    }

    /// Whether it has a journal, and can be resumed.
    #[getter]
    fn durable(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.guarded.live(py)?.is_durable())
    }

    /// The coordinates whose sums are released here.
    #[getter]
    fn coordinates<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyRange>> {
        python_range(py, &self.guarded.live(py)?.coordinates())
    }

    /// Clipping as the guarantee counts on it.
    #[getter]
    fn clip(&self, py: Python<'_>) -> PyResult<Clip> {
        Ok(Clip(*self.guarded.live(py)?.clip()))
    }

    /// "exact" or "float".
    #[getter]
    fn arithmetic(&self, py: Python<'_>) -> PyResult<&'static str> {
        Ok(self.guarded.live(py)?.stream().arithmetic().name())
    }

    /// The name of the run, 32 hexadecimal digits.
    #[getter]
    fn run(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.guarded.live(py)?.id().to_string())
    }

    /// The mechanism.
    #[getter]
    fn mechanism(&self, py: Python<'_>) -> Py<Mechanism> {
        self.mechanism.clone_ref(py)
    }

    /// The privacy statement, with the origin of the key in use.
    #[getter]
    fn privacy(&self, py: Python<'_>) -> PyResult<PrivacyStatement> {
        Ok(PrivacyStatement(self.guarded.live(py)?.privacy().clone()))
    }

    /// The state of the noise, encrypted under the key, for a state dictionary; open() goes on from it beside the journal.
    fn checkpoint_bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        self.guarded.check_process(py)?;
        let run = self.guarded.live(py)?;
        let bytes = py.detach(|| run.stream().checkpoint_bytes()).or_raise()?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// Closes the journal, so that another process may open it.
    fn close(&mut self) {
        self.guarded.close("it was closed; open its journal again");
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        self.guarded.live(py).map_or_else(
            |_| "<dpmf.PrivateRun: closed>".into(),
            |run| {
                let Range { start, end } = run.coordinates();
                let (step, steps, id) = (run.next_step(), run.steps(), run.id());
                format!("<dpmf.PrivateRun: step {step} of {steps}, coordinates {start}..{end}, run {id}>")
            },
        )
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(type_error(NO_PICKLE))
    }
}

impl PrivateRun {
    #[allow(clippy::too_many_arguments)] // keywords in Python
    fn make(
        py: Python<'_>,
        mechanism: &Bound<'_, Mechanism>,
        key: &Bound<'_, NoiseKey>,
        dimension: u64,
        coordinates: Option<&Bound<'_, PyRange>>,
        run: RunId,
        arithmetic: &str,
        ranks: usize,
        finish: impl FnOnce(dpmf::PrivateRun, [u8; 32]) -> dpmf::Result<dpmf::PrivateRun> + Send,
    ) -> PyResult<Self> {
        let (inner, identity, key) = (&mechanism.get().inner, mechanism.get().bound_to(), &key.get().0);
        let coordinates = match coordinates {
            None => 0..dimension,
            Some(_) => range(None, coordinates)?,
        };
        let arithmetic: Arithmetic = arithmetic.parse().or_raise()?;
        check_calibrated(inner)?;
        let made = parallel::run(py, || {
            let begun = dpmf::PrivateRun::new(inner, key, run, coordinates, dimension, arithmetic)?;
            finish(begun.with_ranks(ranks)?, identity.0)
        })?;
        Ok(Self { guarded: Guarded::new(made), mechanism: mechanism.clone().unbind() })
    }
}

impl Sampler {
    /// Refuses, for a run that begins, a sampler that was given the name of an earlier one: its secret batches may have been used.
    fn check_new(&self, py: Python<'_>, run: RunId, begins: bool) -> PyResult<()> {
        if !begins || !self.named || self.inner.run() == run {
            return Ok(());
        }
        let message = format!(
            "the sampler has the name of a run, {}, and this is the beginning of another, {run}: whoever used that name before had the \
             same secret batches. Leave run out of the sampler for a new run; to go on with one, load its state before",
            self.inner.run()
        );
        let error = raise(py, "mismatch", message);
        error.value(py).setattr("fault", "sampler-in-use")?;
        Err(error)
    }
}
