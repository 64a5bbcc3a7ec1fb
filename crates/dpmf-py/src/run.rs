//! `dpmf.PrivateRun`.

use crate::clip::Clip;
use crate::error::{IntoPython, raise, type_error, value_error};
use crate::mechanism::Mechanism;
use crate::noise::{Checkpoint, Guarded, NO_PICKLE, NoiseKey, check_calibrated, python_range, range, run_id};
use crate::parallel;
use crate::privacy::PrivacyStatement;
use crate::sampler::Sampler;
use dpmf::noise::{self, Arithmetic, DurableStream, Mark, RunId, default_threads};
use dpmf::run::Order;
use numpy::{PyArray1, PyArray2, PyArrayMethods, PyUntypedArrayMethods};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyRange};
use std::ops::Range;
use std::path::PathBuf;

/// An array of pairs of words.
type Pairs<'py> = Bound<'py, PyArray2<i64>>;

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
/// Anything that would let one example count more than the guarantee allows is refused with MismatchError, whose fault is a
/// word for programs: more contributions than members ("too-many"), a batch whose step is over, or no batch ("no-batch"), a
/// batch of another step ("other-step"), batches in another order than at first ("other-order"), a sampler of another run
/// ("sampler-in-use"), no sampler although the guarantee relies on one ("not-sampled"), another denominator
/// ("other-denominator"), nothing to release ("nothing").
///
/// Begins a run. dimension is that of the whole model; coordinates is the range whose sums are released here, or ranges has
/// several of them. ranks is the number of ranks, whose contributions are added up. With journal, a path where no file
/// exists, open() can continue the run.
///
/// ahead is the number of threads that make the noise of the coming step while its gradient is computed, which takes 8 bytes
/// per coordinate (4 in float arithmetic); by default half of the machine's, and none for fewer than 32,768 coordinates. With
/// 0, the noise is made when it is released, with the same bits.
///
/// part says that several ranks hold parts of the model, each with ranges of its own, and release every step together with
/// one digest: any of them can then open the journal of any other, also if the model is divided differently.
///
/// Where rows are data, like a batch, ship coming_row(), call hand_over() to record that it leaves, and settle(step, mark) to
/// say which sum it was used with. Contributions are counted for the step that is settled next.
#[pyclass(module = "dpmf")]
pub(crate) struct PrivateRun {
    guarded: Guarded<dpmf::PrivateRun>,
    mechanism: Py<Mechanism>,
}

#[pymethods]
impl PrivateRun {
    #[new]
    #[pyo3(signature = (mechanism, key, *, dimension, coordinates=None, ranges=None, run=None, journal=None, arithmetic="exact",
                        ranks=1, ahead=None, part=false))]
    #[allow(clippy::too_many_arguments)] // keywords in Python
    fn new(
        py: Python<'_>,
        mechanism: &Bound<'_, Mechanism>,
        key: &Bound<'_, NoiseKey>,
        dimension: u64,
        coordinates: Option<Bound<'_, PyRange>>,
        ranges: Option<Vec<Bound<'_, PyRange>>>,
        run: Option<&str>,
        journal: Option<PathBuf>,
        arithmetic: &str,
        ranks: usize,
        ahead: Option<usize>,
        part: bool,
    ) -> PyResult<Self> {
        let run = run_id(run, &key.get().0)?;
        let held = Held { dimension, coordinates, ranges, arithmetic, ranks, ahead, part };
        Self::make(py, mechanism, key, run, held, |begun, plan| match &journal {
            Some(journal) => begun.with_journal(journal, plan),
            None => Ok(begun),
        })
    }

    /// Continues the run of a journal, from a checkpoint (a path or bytes), from the step at, or from the first step.
    ///
    /// Steps in the journal after the checkpoint are repeated with the same sum only; burn() skips one.
    #[staticmethod]
    #[pyo3(signature = (mechanism, key, journal, *, dimension, coordinates=None, ranges=None, checkpoint=None, at=None,
                        arithmetic="exact", ranks=1, ahead=None, part=false))]
    #[allow(clippy::too_many_arguments)] // keywords in Python
    fn open(
        py: Python<'_>,
        mechanism: &Bound<'_, Mechanism>,
        key: &Bound<'_, NoiseKey>,
        journal: PathBuf,
        dimension: u64,
        coordinates: Option<Bound<'_, PyRange>>,
        ranges: Option<Vec<Bound<'_, PyRange>>>,
        checkpoint: Option<Checkpoint>,
        at: Option<usize>,
        arithmetic: &str,
        ranks: usize,
        ahead: Option<usize>,
        part: bool,
    ) -> PyResult<Self> {
        let run = DurableStream::run_of(&journal).or_raise()?;
        let bytes = checkpoint.map(|checkpoint| checkpoint.bytes()).transpose()?;
        let held = Held { dimension, coordinates, ranges, arithmetic, ranks, ahead, part };
        match (bytes, at) {
            (Some(_), Some(_)) => {
                Err(value_error("checkpoint and at both determine where to continue: pass only one of them"))
            }
            (None, Some(step)) => Self::make(py, mechanism, key, run, held, |begun, plan| {
                begun.resumed_at(&journal, plan, step)
            }),
            (bytes, None) => Self::make(py, mechanism, key, run, held, |begun, plan| {
                begun.resumed(&journal, plan, bytes.as_deref())
            }),
        }
    }

    /// The name of the run that a journal belongs to.
    #[staticmethod]
    fn of_journal(journal: PathBuf) -> PyResult<String> {
        Ok(DurableStream::run_of(&journal).or_raise()?.to_string())
    }

    /// Restores what a saved state holds of the run besides its noise: what decides its batches, and its denominator. Both
    /// stay as they were.
    #[pyo3(signature = (order=None, denominator=None))]
    fn recall(&mut self, py: Python<'_>, order: Option<String>, denominator: Option<f64>) -> PyResult<()> {
        self.guarded.live_mut(py)?.recall(order, denominator).or_raise()
    }

    /// Declares what decides the batches, in words that are saved with the run and compared when it is resumed.
    ///
    /// by_step says that each batch belongs to a step, and the guarantee is for it in that step only; otherwise each example comes
    /// once in all. sampler is the one that draws them, for this run and no other; fresh says that nobody but the caller can have
    /// named it, so that no earlier run had its draws.
    #[pyo3(signature = (order, *, by_step, sampler=None, fresh=false))]
    fn follow(
        &mut self,
        py: Python<'_>,
        order: String,
        by_step: bool,
        sampler: Option<&Bound<'_, Sampler>>,
        fresh: bool,
    ) -> PyResult<()> {
        let run = self.guarded.live_mut(py)?;
        if let Some(sampler) = sampler {
            let mut sampler = sampler.borrow_mut();
            sampler.check_new(py, run.id(), !fresh && run.order().is_none() && run.next_step() == 0)?;
            sampler.inner.bind(run.id()).or_raise()?;
        }
        run.follow(Order { name: order, by_step, sampled: sampler.is_some() }).or_raise()
    }

    /// What decides the batches; None until it is declared.
    #[getter]
    fn order(&self, py: Python<'_>) -> PyResult<Option<String>> {
        Ok(self.guarded.live(py)?.order().map(|order| order.name.clone()))
    }

    /// Hands out the batch of a step, or this rank's part of it. members is its size; None if the size is not known.
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
    /// digest is that of the sums of all ranks, where each holds a part of the model: what digest() gives of each, added up modulo
    /// 2**61 - 1.
    ///
    /// If it is refused, both are as they were.
    #[pyo3(signature = (sum, released, digest=None))]
    fn release(
        &mut self,
        py: Python<'_>,
        sum: &Bound<'_, PyAny>,
        released: &Bound<'_, PyAny>,
        digest: Option<[u64; 2]>,
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
        py.detach(|| pool.install(|| run.release_together(sum, released, digest))).or_raise()
    }

    /// Two numbers that identify the sum, and reveal nothing about it without the key.
    fn digest(&self, py: Python<'_>, sum: &Bound<'_, PyAny>) -> PyResult<[u64; 2]> {
        let run = self.guarded.live(py)?;
        let sum = sum
            .cast::<PyArray1<i64>>()
            .map_err(|_| type_error("the sum must be a one-dimensional NumPy array of int64"))?;
        let sum = sum.try_readonly().map_err(|_| value_error("the sum is being written by another call"))?;
        let sum = sum.as_slice()?;
        if sum.len() != run.stream().len() {
            let (found, expected) = (sum.len(), run.stream().len());
            return Err(value_error(format!(
                "the sum has length {found}, but the run has {expected} coordinates"
            )));
        }
        parallel::run(py, || Ok(run.digest(sum)))
    }

    /// Takes the coming row out of the run: it is on record as handed over, and does not come again. Returns its step, and the mark that
    /// its sum must have, four words, where the journal has one. Ship it before, and pass it on afterwards.
    fn hand_over(&mut self, py: Python<'_>) -> PyResult<(usize, Option<[u32; 4]>)> {
        let run = self.guarded.live_mut(py)?;
        let (step, mark) = parallel::run(py, || run.hand_over())?;
        Ok((step, mark.map(words)))
    }

    /// Says which sum the row of a step was used with, by a mark of four words. Steps are settled in order; one that was settled with
    /// another mark ends the run.
    fn settle(&mut self, py: Python<'_>, step: usize, mark: [u32; 4]) -> PyResult<()> {
        let run = self.guarded.live_mut(py)?;
        let mut bytes = [0; 16];
        bytes.chunks_exact_mut(4).zip(mark).for_each(|(to, word)| to.copy_from_slice(&word.to_le_bytes()));
        parallel::run(py, || run.settle(step, bytes))
    }

    /// Burns the first step whose row is outstanding; returns it.
    fn give_up(&mut self, py: Python<'_>) -> PyResult<usize> {
        let run = self.guarded.live_mut(py)?;
        parallel::run(py, || run.give_up())
    }

    /// Steps whose rows were handed over and which are not settled.
    #[getter]
    fn outstanding(&self, py: Python<'_>) -> PyResult<Vec<usize>> {
        Ok(self.guarded.live(py)?.outstanding().collect())
    }

    /// How the coming row is added to a sum on a device of 32 bits: (unit, shift, grid). With S = G·2**shift + F and the words A and R of
    /// the row, what is released is (A + G + [F + R >= 2**(shift-1)])·grid; sums are in this unit.
    fn split_row(&self, py: Python<'_>) -> PyResult<(f64, u32, f64)> {
        let row = self.guarded.live(py)?.split_row().or_raise()?;
        let power = |exponent: i32| 2.0_f64.powi(exponent);
        Ok((power(row.exponent), row.shift, power(row.exponent + row.shift as i32)))
    }

    /// Four words of 32 bits by which devices mark their sums; as secret as the key.
    fn mark_salt(&self, py: Python<'_>) -> PyResult<[u32; 4]> {
        Ok(self.guarded.live(py)?.mark_salt())
    }

    /// How the coming row is added to a sum on a device, in integers: (lift, shift, doubt, grid). With T = S·2**lift + W, what is
    /// released is round(T / 2**shift)·grid, unless T is within doubt of a tie.
    fn fixed_row(&self, py: Python<'_>) -> PyResult<(u32, u32, i64, f64)> {
        let row = self.guarded.live(py)?.fixed_row().or_raise()?;
        Ok((row.lift, row.shift, row.doubt, row.grid))
    }

    /// The coming row of noise, to be shipped to devices by any thread. threads is the number of threads that ship it beside other
    /// work; without it, all threads of the machine do.
    #[pyo3(signature = (threads=None))]
    fn coming_row(&self, py: Python<'_>, threads: Option<usize>) -> PyResult<ComingRow> {
        self.guarded.check_process(py)?;
        let row = self.guarded.live(py)?.coming_row().or_raise()?;
        let row = match threads {
            Some(threads) => row.on_threads(threads),
            None => row,
        };
        Ok(ComingRow { row, beside: threads.is_some(), process: std::process::id() })
    }

    /// Makes all of the coming row that is not made yet.
    fn prepare(&self, py: Python<'_>) -> PyResult<()> {
        self.guarded.check_process(py)?;
        let run = self.guarded.live(py)?;
        parallel::run(py, || run.stream().prepare())
    }

    /// Releases a step whose sum lies on devices: digest is that of the sum, which a run with a journal needs, and doubtful has
    /// (coordinate, sum) of each that is in doubt. Returns the step, and what these become in units of the grid.
    ///
    /// Nothing of the step may leave the program before.
    #[pyo3(signature = (digest=None, doubtful=Vec::new()))]
    fn release_elsewhere(
        &mut self,
        py: Python<'_>,
        digest: Option<[u64; 2]>,
        doubtful: Vec<(u64, i64)>,
    ) -> PyResult<(usize, Vec<i64>)> {
        let run = self.guarded.live_mut(py)?;
        parallel::run(py, || run.release_elsewhere(digest, &doubtful))
    }

    /// Whether the coming step can be repeated only with the sum itself: a journal of version 0.2 has it.
    #[getter]
    fn needs_sum(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.guarded.live(py)?.needs_sum())
    }

    /// Keys of the digest of a sum: for the places of a block of coordinates, and for some blocks, two numbers below 2**61 each. As
    /// secret as the key.
    fn digest_keys<'py>(&self, py: Python<'py>, blocks: Vec<u64>) -> PyResult<(Pairs<'py>, Pairs<'py>)> {
        let run = self.guarded.live(py)?;
        let array = |pairs: Vec<[u64; 2]>| {
            let rows = pairs.len();
            let values = pairs.into_iter().flatten().map(|word| word as i64).collect();
            PyArray1::from_vec(py, values).reshape([rows, 2])
        };
        let places = array(run.digest_places().to_vec())?;
        Ok((places, array(blocks.into_iter().map(|block| run.digest_block(block)).collect())?))
    }

    /// Threads that make the noise of the coming step while its gradient is computed.
    #[getter]
    fn ahead(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.guarded.live(py)?.stream().threads_ahead())
    }

    /// What rows in float arithmetic are multiplied by.
    #[getter]
    fn scale(&self, py: Python<'_>) -> PyResult<f32> {
        Ok(self.guarded.live(py)?.stream().scale())
    }

    /// Bytes of noise that it keeps from one step to the next.
    #[getter]
    fn memory(&self, py: Python<'_>) -> PyResult<u128> {
        Ok(self.guarded.live(py)?.stream().memory())
    }

    /// Gives up the coming step, whose contributions are lost: its noise is never used. Returns the step.
    fn burn(&mut self, py: Python<'_>) -> PyResult<usize> {
        let run = self.guarded.live_mut(py)?;
        parallel::run(py, || run.burn())
    }

    /// The step of the next release, counted from zero; equal to steps at the end.
    #[getter]
    fn next_step(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.guarded.live(py)?.next_step())
    }

    /// Number of steps in all.
    #[getter]
    fn steps(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.guarded.live(py)?.steps())
    }

    /// Number of steps in the journal; an earlier step can only be repeated with the same sum, or burned.
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
        let bytes = parallel::run(py, || run.stream().checkpoint_bytes())?;
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

/// The row of noise of one step, as it is shipped to devices.
#[pyclass(frozen, module = "dpmf", name = "_ComingRow")]
pub(crate) struct ComingRow {
    row: noise::ComingRow,
    /// Whether it has threads of its own: those of the pool are for those who wait.
    beside: bool,
    process: u32,
}

impl ComingRow {
    fn work(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&noise::ComingRow) -> dpmf::Result<()> + Send,
    ) -> PyResult<()> {
        match self.beside {
            true => py.detach(|| work(&self.row)).or_raise(),
            false => parallel::run(py, || work(&self.row)),
        }
    }
}

#[pymethods]
impl ComingRow {
    /// The step that it is for.
    #[getter]
    fn step(&self) -> usize {
        self.row.step()
    }

    /// Writes numbers of the row from a place on as the two words of split_row(), int32 and uint32. Every tie is decided here, with as
    /// many digits as it takes.
    fn ship_split(
        &self,
        py: Python<'_>,
        place: usize,
        whole: &Bound<'_, PyAny>,
        rest: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        if self.process != std::process::id() {
            return Err(raise(py, "halted", "this row of noise was copied into another process by a fork"));
        }
        let busy = |_| value_error("an array is read-only or in use by another call");
        let other = |_| type_error("a row is split into one-dimensional NumPy arrays of int32 and uint32");
        let mut whole = whole.cast::<PyArray1<i32>>().map_err(other)?.try_readwrite().map_err(busy)?;
        let mut rest = rest.cast::<PyArray1<u32>>().map_err(other)?.try_readwrite().map_err(busy)?;
        let (whole, rest) = (whole.as_slice_mut()?, rest.as_slice_mut()?);
        self.work(py, |row| row.ship_split(place, whole, rest))
    }

    /// Writes numbers of the row from a place on, as many as array has: int64 for a run in exact arithmetic, float32 in float.
    ///
    /// Raises StepReusedError where the run has passed the step.
    fn ship(&self, py: Python<'_>, place: usize, array: &Bound<'_, PyAny>) -> PyResult<()> {
        if self.process != std::process::id() {
            return Err(raise(py, "halted", "this row of noise was copied into another process by a fork"));
        }
        let busy = |_| value_error("the array is read-only or in use by another call");
        if let Ok(array) = array.cast::<PyArray1<i64>>() {
            let mut array = array.try_readwrite().map_err(busy)?;
            let to = array.as_slice_mut()?;
            return self.work(py, |row| row.ship_fixed(place, to));
        }
        let array = array.cast::<PyArray1<f32>>().map_err(|_| {
            type_error("a row is shipped to a one-dimensional NumPy array of int64 or float32")
        })?;
        let mut array = array.try_readwrite().map_err(busy)?;
        let to = array.as_slice_mut()?;
        self.work(py, |row| row.ship_float(place, to))
    }
}

fn words(mark: Mark) -> [u32; 4] {
    std::array::from_fn(|word| u32::from_le_bytes(std::array::from_fn(|byte| mark[4 * word + byte])))
}

/// What a run holds of a model, and how.
struct Held<'a, 'py> {
    dimension: u64,
    coordinates: Option<Bound<'py, PyRange>>,
    ranges: Option<Vec<Bound<'py, PyRange>>>,
    arithmetic: &'a str,
    ranks: usize,
    ahead: Option<usize>,
    part: bool,
}

impl PrivateRun {
    fn make(
        py: Python<'_>,
        mechanism: &Bound<'_, Mechanism>,
        key: &Bound<'_, NoiseKey>,
        run: RunId,
        held: Held<'_, '_>,
        finish: impl FnOnce(dpmf::PrivateRun, [u8; 32]) -> dpmf::Result<dpmf::PrivateRun> + Send,
    ) -> PyResult<Self> {
        let (inner, identity, key) = (&mechanism.get().inner, mechanism.get().bound_to(), &key.get().0);
        let Held { dimension, ranks, ahead, part, .. } = held;
        let arithmetic: Arithmetic = held.arithmetic.parse().or_raise()?;
        check_calibrated(inner)?;
        let ranges = match (held.coordinates, held.ranges) {
            (Some(_), Some(_)) => {
                return Err(value_error("coordinates and ranges are both given: remove one of them"));
            }
            (None, Some(several)) => {
                several.iter().map(|part| range(None, Some(part))).collect::<PyResult<Vec<_>>>()?
            }
            (None, None) => std::iter::once(0..dimension).collect(),
            (Some(one), None) => vec![range(None, Some(&one))?],
        };
        let made = parallel::run(py, || {
            let mut begun = dpmf::PrivateRun::over(inner, key, run, &ranges, dimension, arithmetic)?;
            if part {
                begun = begun.part_of(dimension)?;
            }
            let made = finish(begun.with_ranks(ranks)?, identity.0)?;
            let threads = ahead.unwrap_or_else(|| default_threads(made.stream().len() as u64));
            Ok(made.noise_ahead(threads))
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
            "the sampler was made for run {}, but a new run begins here, {run}: if that name was used before, the same secret batches \
             would be drawn again. Leave run out of the sampler for a new run; to resume one, load its state first",
            self.inner.run()
        );
        let error = raise(py, "mismatch", message);
        error.value(py).setattr("fault", "sampler-in-use")?;
        Err(error)
    }
}
