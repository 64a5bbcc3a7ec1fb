//! Keys and noise streams.

use crate::arrays::{self, Writable};
use crate::error::{IntoPython, raise, type_error, value_error};
use crate::mechanism::Mechanism;
use crate::parallel::{pool, run};
use crate::privacy::PrivacyStatement;
use dpmf::Error;
use dpmf::accounting::KeyOrigin;
use dpmf::noise::exact::field::ExactField;
use dpmf::noise::{self, Arithmetic, Field, Output, RunId};
use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyRange, PyRangeMethods};
use std::ops::Range;
use std::path::PathBuf;

/// The secret from which all noise of a run is derived.
///
/// Anyone who has it can subtract the noise; without it a run cannot be resumed. It cannot be printed, copied or pickled.
#[pyclass(frozen, module = "dpmf")]
pub(crate) struct NoiseKey(pub(crate) noise::NoiseKey);

#[pymethods]
impl NoiseKey {
    /// A new key from the operating system, kept in memory only: the run cannot be resumed after this process.
    #[staticmethod]
    fn generate() -> PyResult<Self> {
        Ok(Self(noise::NoiseKey::generate().or_raise()?))
    }

    /// A key derived from a number, for experiments: private only while the number is secret. To repeat an experiment, also
    /// pass a name as run= to the stream; without a name, every stream has its own noise.
    #[staticmethod]
    fn from_seed(seed: u64) -> Self {
        Self(noise::NoiseKey::from_seed(seed))
    }

    /// A new key from the operating system, written to a new file that only its owner may read.
    #[staticmethod]
    fn create(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        py.detach(|| {
            let key = noise::NoiseKey::generate()?;
            key.create_file(&path)?;
            Ok(Self(key))
        })
        .or_raise()
    }

    /// Reads a key file; refuses one that others may read.
    #[staticmethod]
    fn read(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        match py.detach(|| noise::NoiseKey::read_file(&path)) {
            Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
                let message = format!(
                    "key file {} is missing: without its key a run cannot be resumed, and what it released stays \
                     private. For a new run make a new key with NoiseKey.create(path); to resume this one, restore the \
                     file from a backup",
                    path.display()
                );
                Err(raise(py, "key", message))
            }
            key => Ok(Self(key.or_raise()?)),
        }
    }

    /// A name for the key that is safe to publish.
    #[getter]
    fn fingerprint(&self) -> String {
        self.0.fingerprint().to_string()
    }

    /// "system" or "seeded".
    #[getter]
    fn origin(&self) -> &'static str {
        self.0.origin().name()
    }

    fn __repr__(&self) -> String {
        format!("<dpmf.NoiseKey: {}, fingerprint {}>", self.origin(), self.fingerprint())
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(type_error(
            "a NoiseKey is a secret and cannot be pickled or copied: write it with NoiseKey.create(path) and read it \
             with NoiseKey.read(path) in the process that needs it",
        ))
    }
}

/// A new name for a run, 32 hexadecimal digits from the operating system.
#[pyfunction]
pub(crate) fn new_run() -> PyResult<String> {
    Ok(RunId::generate().or_raise()?.to_string())
}

/// Row `row` of the white noise Z behind a stream, without scale, for those who check it.
#[pyfunction]
#[pyo3(name = "_white_noise")]
pub(crate) fn white_noise<'py>(
    py: Python<'py>,
    stream: &NoiseStream,
    row: u64,
) -> PyResult<Bound<'py, PyAny>> {
    let stream = stream.guarded.live(py)?;
    let coordinates = stream.coordinates();
    Ok(match stream.arithmetic() {
        Arithmetic::Float => {
            let mut values = vec![0.0_f32; length(&coordinates)];
            py.detach(|| Field::new(stream.key()).row(row).fill(coordinates.start, &mut values));
            PyArray1::from_vec(py, values).into_any()
        }
        Arithmetic::Exact => {
            let mut values = vec![0.0_f64; length(&coordinates)];
            py.detach(|| ExactField::new(stream.key()).row(row).fill(coordinates.start, &mut values));
            PyArray1::from_vec(py, values).into_any()
        }
    })
}

/// A new run, one by its 32 hexadecimal digits, or, with a seeded key, one by any words.
pub(crate) fn run_id(run: Option<&str>, key: &noise::NoiseKey) -> PyResult<RunId> {
    let Some(text) = run else { return RunId::generate().or_raise() };
    match text.parse() {
        Ok(run) => Ok(run),
        Err(_) if key.origin() == KeyOrigin::Seeded => Ok(RunId::from_label(text)),
        Err(_) => Err(value_error(format!(
            "run is {text:?}, but a named run begins again with the same noise at every start, so the difference between two starts \
             with different data would reveal the data. Leave run out for a new run, or pass another stream's .run (32 hexadecimal \
             digits) for its shards, a restored checkpoint or its journal. For experiments, pass a name together with \
             NoiseKey.from_seed(…)"
        ))),
    }
}

/// The range that either of two keywords gives.
pub(crate) fn range(
    dimension: Option<u64>,
    coordinates: Option<&Bound<'_, PyRange>>,
) -> PyResult<Range<u64>> {
    match (dimension, coordinates) {
        (Some(dimension), None) => Ok(0..dimension),
        (None, Some(range)) => {
            let (start, stop, step) = (range.start()?, range.stop()?, range.step()?);
            match (u64::try_from(start), u64::try_from(stop), step) {
                (Ok(start), Ok(stop), 1) => Ok(start..stop),
                _ => Err(value_error(format!(
                    "coordinates is range({start}, {stop}, {step}), but it must count up by one from 0 or more"
                ))),
            }
        }
        _ => Err(value_error(
            "pass either dimension, the number of parameters, or coordinates=range(a, b), a shard of them",
        )),
    }
}

/// Refuses a mechanism whose noise has no scale.
pub(crate) fn check_calibrated(mechanism: &dpmf::Mechanism) -> PyResult<()> {
    match mechanism.privacy() {
        Some(_) => Ok(()),
        None => Err(value_error(
            "the mechanism is not calibrated, so its noise has no scale: use mechanism.calibrate(epsilon, delta, clip), \
             or a NoiseStream with unit_noise=True for noise of unit multiplier before sensitivity and clip",
        )),
    }
}

/// The noise of a calibrated mechanism.
fn calibrated_stream(
    py: Python<'_>,
    mechanism: &dpmf::Mechanism,
    key: &noise::NoiseKey,
    run: RunId,
    coordinates: Range<u64>,
    output: &str,
    arithmetic: Option<&str>,
) -> PyResult<noise::NoiseStream> {
    check_calibrated(mechanism)?;
    let output: Output = output.parse().or_raise()?;
    let arithmetic = arithmetic_of(arithmetic, output)?;
    py.detach(|| mechanism.stream(key, run, coordinates, output, arithmetic)).or_raise()
}

/// The arithmetic that was asked for; else exact, but float for iterate noise, which comes in no other.
fn arithmetic_of(arithmetic: Option<&str>, output: Output) -> PyResult<Arithmetic> {
    match (arithmetic, output) {
        (Some(name), _) => name.parse().or_raise(),
        (None, Output::Gradient) => Ok(Arithmetic::Exact),
        (None, Output::Iterate) => Ok(Arithmetic::Float),
    }
}

/// A stream of one process: a fork copies its state, and both copies would emit the same rows.
pub(crate) struct Guarded<T> {
    stream: Option<T>,
    process: u32,
    gone: &'static str,
}

impl<T> Guarded<T> {
    pub(crate) fn new(stream: T) -> Self {
        let gone = "a restore failed half-way: make a new stream and restore it from an undamaged checkpoint";
        Self { stream: Some(stream), process: std::process::id(), gone }
    }

    pub(crate) fn check_process(&self, py: Python<'_>) -> PyResult<()> {
        if self.process == std::process::id() {
            return Ok(());
        }
        Err(raise(
            py,
            "halted",
            "this noise stream was copied into another process by a fork: two processes would release the same noise \
             with different data, and the difference would show the data. Make the stream in the process that uses it",
        ))
    }

    pub(crate) fn live(&self, py: Python<'_>) -> PyResult<&T> {
        self.stream.as_ref().ok_or_else(|| raise(py, "halted", self.gone))
    }

    pub(crate) fn live_mut(&mut self, py: Python<'_>) -> PyResult<&mut T> {
        self.check_process(py)?;
        let gone = self.gone;
        self.stream.as_mut().ok_or_else(|| raise(py, "halted", gone))
    }

    /// Drops the stream, with the reason why there is none any more.
    pub(crate) fn close(&mut self, gone: &'static str) {
        self.gone = gone;
        self.stream = None;
    }

    fn take(&mut self, py: Python<'_>) -> PyResult<T> {
        self.check_process(py)?;
        let gone = self.gone;
        self.stream.take().ok_or_else(|| raise(py, "halted", gone))
    }
}

/// A checkpoint: a path, or bytes.
#[derive(FromPyObject)]
pub(crate) enum Checkpoint {
    Bytes(Vec<u8>),
    Path(PathBuf),
}

impl Checkpoint {
    pub(crate) fn bytes(self) -> PyResult<Vec<u8>> {
        match self {
            Checkpoint::Bytes(bytes) => Ok(bytes),
            Checkpoint::Path(path) => {
                std::fs::read(&path).map_err(|source| Error::Io { path, source }).or_raise()
            }
        }
    }

    fn restore(&self, stream: noise::NoiseStream) -> dpmf::Result<noise::NoiseStream> {
        match self {
            Checkpoint::Bytes(bytes) => stream.restore_bytes(bytes),
            Checkpoint::Path(path) => stream.restore(path),
        }
    }
}

fn length(coordinates: &Range<u64>) -> usize {
    (coordinates.end - coordinates.start) as usize
}

pub(crate) fn python_range<'py>(py: Python<'py>, coordinates: &Range<u64>) -> PyResult<Bound<'py, PyRange>> {
    PyRange::new(py, coordinates.start as isize, coordinates.end as isize)
}

pub(crate) const NO_PICKLE: &str = "a noise stream cannot be pickled or copied, because two copies would release the same noise \
                         twice: save checkpoint_bytes() and restore it into a new stream";

/// Generates the rows of noise for a model, or for a shard of its coordinates: each row once, in order.
///
/// Row i of coordinate j depends on key, run, mechanism, i and j alone, so shards of any size have the noise that one process
/// would have. run is the name of the run: None for a new one, or 32 hexadecimal digits (another stream's .run) for its
/// shards or a restored checkpoint. Never use one key and run for two sets of data. With a key from a seed, run may be any
/// words, for experiments: every start then has the same noise. output is "gradient" for noise to add to clipped, summed
/// gradients, or "iterate" for the noise that results in the iterates. unit_noise=True leaves out the scale.
///
/// arithmetic is "exact", the default for gradient noise, or "float". With "exact", a release is the given sum plus ideal,
/// real-valued noise, correctly rounded to a multiple of grid, so the guarantee covers every bit. With "float", noise is made
/// and added in single precision, which is faster, but the guarantee does not cover the lowest bits of a release.
///
/// A stream alone does not survive a crash safely; a DurableStream does.
///
/// >>> import dpmf, numpy
/// >>> mechanism = dpmf.mechanism(steps=10, epsilon=8, delta=1e-6)
/// >>> stream = dpmf.NoiseStream(mechanism, dpmf.NoiseKey.generate(), dimension=1000)
/// >>> gradient = numpy.zeros(1000, numpy.float32)
/// >>> stream.add_to(gradient)
/// 0
#[pyclass(module = "dpmf")]
pub(crate) struct NoiseStream {
    guarded: Guarded<noise::NoiseStream>,
    mechanism: Py<Mechanism>,
}

#[pymethods]
impl NoiseStream {
    #[new]
    #[pyo3(signature = (mechanism, key, *, run=None, dimension=None, coordinates=None, output="gradient",
                        arithmetic=None, unit_noise=false))]
    #[allow(clippy::too_many_arguments)] // keywords in Python
    fn new(
        py: Python<'_>,
        mechanism: &Bound<'_, Mechanism>,
        key: &Bound<'_, NoiseKey>,
        run: Option<&str>,
        dimension: Option<u64>,
        coordinates: Option<&Bound<'_, PyRange>>,
        output: &str,
        arithmetic: Option<&str>,
        unit_noise: bool,
    ) -> PyResult<Self> {
        let (inner, key) = (&mechanism.get().inner, &key.get().0);
        let (run, coordinates) = (run_id(run, key)?, range(dimension, coordinates)?);
        let stream = if unit_noise {
            let output: Output = output.parse().or_raise()?;
            let arithmetic = arithmetic_of(arithmetic, output)?;
            py.detach(|| inner.unit_stream(key, run, coordinates, output, arithmetic)).or_raise()?
        } else {
            calibrated_stream(py, inner, key, run, coordinates, output, arithmetic)?
        };
        Ok(Self { guarded: Guarded::new(stream), mechanism: mechanism.clone().unbind() })
    }

    /// Adds the next row of noise in place and returns its number, zero-based.
    ///
    /// array is a C-contiguous, writable vector of float32 or float64, as long as the stream has coordinates; it is not
    /// copied. In exact arithmetic it is taken as the sum that it is, and becomes sum plus noise, correctly rounded to grid.
    fn add_to(&mut self, py: Python<'_>, array: &Bound<'_, PyAny>) -> PyResult<usize> {
        let stream = self.guarded.live_mut(py)?;
        let array = arrays::writable(array, length(&stream.coordinates()))?;
        let pool = pool()?;
        match array {
            Writable::Single(mut array) => {
                let values = array.as_slice_mut()?;
                py.detach(|| pool.install(|| stream.add_next(values))).or_raise()
            }
            Writable::Double(mut array) => {
                let values = array.as_slice_mut()?;
                py.detach(|| pool.install(|| stream.add_next(values))).or_raise()
            }
        }
    }

    /// The next row of noise as a new array.
    fn next_row<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<f32>>> {
        let stream = self.guarded.live_mut(py)?;
        let row = PyArray1::<f32>::zeros(py, [length(&stream.coordinates())], false);
        self.add_to(py, row.as_any())?;
        Ok(row)
    }

    /// Skips the next row without releasing it, and returns its number.
    fn skip(&mut self, py: Python<'_>) -> PyResult<usize> {
        let stream = self.guarded.live_mut(py)?;
        run(py, || stream.skip())
    }

    /// Moves forward to a later row; the rows between are never released.
    fn skip_to(&mut self, py: Python<'_>, step: usize) -> PyResult<()> {
        let stream = self.guarded.live_mut(py)?;
        run(py, || stream.skip_to(step))
    }

    /// The next row, zero-based; equal to steps at the end.
    #[getter]
    fn next_step(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.guarded.live(py)?.next_step())
    }

    /// Number of rows in all.
    #[getter]
    fn steps(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.guarded.live(py)?.steps())
    }

    /// The coordinates that it makes noise for.
    #[getter]
    fn coordinates<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyRange>> {
        python_range(py, &self.guarded.live(py)?.coordinates())
    }

    /// Bytes of state that it keeps from one step to the next.
    #[getter]
    fn memory(&self, py: Python<'_>) -> PyResult<u128> {
        Ok(self.guarded.live(py)?.memory())
    }

    /// The factor of every row: noise multiplier times sensitivity times clip, or 1.
    #[getter]
    fn scale(&self, py: Python<'_>) -> PyResult<f32> {
        Ok(self.guarded.live(py)?.scale())
    }

    /// "exact" or "float".
    #[getter]
    fn arithmetic(&self, py: Python<'_>) -> PyResult<&'static str> {
        Ok(self.guarded.live(py)?.arithmetic().name())
    }

    /// Releases are multiples of it; None in float arithmetic.
    #[getter]
    fn grid(&self, py: Python<'_>) -> PyResult<Option<f64>> {
        Ok(self.guarded.live(py)?.grid())
    }

    /// The name of the run, 32 hexadecimal digits.
    #[getter]
    fn run(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.guarded.live(py)?.key().run().to_string())
    }

    /// The mechanism.
    #[getter]
    fn mechanism(&self, py: Python<'_>) -> Py<Mechanism> {
        self.mechanism.clone_ref(py)
    }

    /// The privacy statement, with the origin of the key in use; None for unit noise, which promises nothing.
    #[getter]
    fn privacy(&self, py: Python<'_>) -> PyResult<Option<PrivacyStatement>> {
        Ok(statement(py, &self.mechanism, self.guarded.live(py)?))
    }

    /// Writes the state, encrypted under the key, to a file, completely or not at all.
    fn checkpoint(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        self.guarded.check_process(py)?;
        let stream = self.guarded.live(py)?;
        py.detach(|| stream.checkpoint(&path)).or_raise()
    }

    /// The bytes of a checkpoint, for a state dictionary.
    fn checkpoint_bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        self.guarded.check_process(py)?;
        let stream = self.guarded.live(py)?;
        let bytes = py.detach(|| stream.checkpoint_bytes()).or_raise()?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// Continues from a checkpoint, a path or bytes, of the same mechanism, key, run, coordinates and output.
    ///
    /// Only a stream at its first step can be restored: one that has moved would release rows twice.
    fn restore(&mut self, py: Python<'_>, checkpoint: Checkpoint) -> PyResult<()> {
        let step = self.guarded.live_mut(py)?.next_step();
        if step != 0 {
            return Err(value_error(format!(
                "this stream is at step {step}, and going back would release noise twice: make a new stream and \
                 restore that"
            )));
        }
        let stream = self.guarded.take(py)?;
        self.guarded.stream = Some(py.detach(|| checkpoint.restore(stream)).or_raise()?);
        Ok(())
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        self.guarded
            .live(py)
            .map_or_else(|_| "<dpmf.NoiseStream: halted>".into(), |s| describe("NoiseStream", s))
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(type_error(NO_PICKLE))
    }
}

/// A NoiseStream with a journal, for training that may crash.
///
/// Before a row is released, its step and a keyed digest of the clipped input are synced to the journal. After a crash, a step in
/// the journal is released again only for exactly the same input; burn() gives up a step whose input is lost.
///
/// create() begins a journal, open() continues one.
#[pyclass(module = "dpmf")]
pub(crate) struct DurableStream {
    guarded: Guarded<noise::DurableStream>,
    mechanism: Py<Mechanism>,
}

#[pymethods]
impl DurableStream {
    /// Begins a journal at a path where none exists.
    #[staticmethod]
    #[pyo3(signature = (mechanism, key, journal, *, run=None, dimension=None, coordinates=None, output="gradient",
                        arithmetic=None))]
    #[allow(clippy::too_many_arguments)] // keywords in Python
    fn create(
        py: Python<'_>,
        mechanism: &Bound<'_, Mechanism>,
        key: &Bound<'_, NoiseKey>,
        journal: PathBuf,
        run: Option<&str>,
        dimension: Option<u64>,
        coordinates: Option<&Bound<'_, PyRange>>,
        output: &str,
        arithmetic: Option<&str>,
    ) -> PyResult<Self> {
        let (inner, identity) = (&mechanism.get().inner, mechanism.get().bound_to());
        let coordinates = range(dimension, coordinates)?;
        let (key, run) = (&key.get().0, run_id(run, &key.get().0)?);
        let stream = calibrated_stream(py, inner, key, run, coordinates, output, arithmetic)?;
        let durable = py.detach(|| noise::DurableStream::create(stream, &journal, identity.0)).or_raise()?;
        Ok(Self::guarded(durable, mechanism))
    }

    /// Continues a journal, from a checkpoint (a path or bytes) or from the first step.
    ///
    /// The run is the one in the journal. Steps in the journal after the checkpoint are repeated with the same input only; burn()
    /// skips one.
    #[staticmethod]
    #[pyo3(signature = (mechanism, key, journal, *, checkpoint=None, dimension=None, coordinates=None,
                        output="gradient", arithmetic=None))]
    #[allow(clippy::too_many_arguments)] // keywords in Python
    fn open(
        py: Python<'_>,
        mechanism: &Bound<'_, Mechanism>,
        key: &Bound<'_, NoiseKey>,
        journal: PathBuf,
        checkpoint: Option<Checkpoint>,
        dimension: Option<u64>,
        coordinates: Option<&Bound<'_, PyRange>>,
        output: &str,
        arithmetic: Option<&str>,
    ) -> PyResult<Self> {
        let (inner, identity) = (&mechanism.get().inner, mechanism.get().bound_to());
        let coordinates = range(dimension, coordinates)?;
        let begun = noise::DurableStream::run_of(&journal).or_raise()?;
        let stream = calibrated_stream(py, inner, &key.get().0, begun, coordinates, output, arithmetic)?;
        let durable = run(py, || {
            let stream = match &checkpoint {
                Some(checkpoint) => checkpoint.restore(stream)?,
                None => stream,
            };
            noise::DurableStream::open(stream, &journal, identity.0)
        })?;
        Ok(Self::guarded(durable, mechanism))
    }

    /// Journals the clipped sum, then adds the next row of noise to it in place; returns the step, zero-based.
    ///
    /// The array is as for NoiseStream.add_to. A step that is repeated after a crash needs the sum as it was before the noise,
    /// bit for bit.
    fn release(&mut self, py: Python<'_>, array: &Bound<'_, PyAny>) -> PyResult<usize> {
        let stream = self.guarded.live_mut(py)?;
        let array = arrays::writable(array, length(&stream.stream().coordinates()))?;
        let pool = pool()?;
        match array {
            Writable::Single(mut array) => {
                let values = array.as_slice_mut()?;
                py.detach(|| pool.install(|| stream.release(values))).or_raise()
            }
            Writable::Double(mut array) => {
                let values = array.as_slice_mut()?;
                py.detach(|| pool.install(|| stream.release(values))).or_raise()
            }
        }
    }

    /// Gives up the next step: its noise is never used, and the stream continues with the step after it.
    fn burn(&mut self, py: Python<'_>) -> PyResult<usize> {
        let stream = self.guarded.live_mut(py)?;
        run(py, || stream.burn())
    }

    /// The step of the next release, counted from zero.
    #[getter]
    fn next_step(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.guarded.live(py)?.next_step())
    }

    /// Number of steps in the journal; an earlier step can only be repeated with the same input, or burned.
    #[getter]
    fn recorded_steps(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.guarded.live(py)?.recorded_steps())
    }

    /// Steps that were burned, in order.
    #[getter]
    fn burned(&self, py: Python<'_>) -> PyResult<Vec<usize>> {
        Ok(self.guarded.live(py)?.burned().collect())
    }

    /// Number of rows in all.
    #[getter]
    fn steps(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.guarded.live(py)?.stream().steps())
    }

    /// The coordinates that it makes noise for.
    #[getter]
    fn coordinates<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyRange>> {
        python_range(py, &self.guarded.live(py)?.stream().coordinates())
    }

    /// Bytes of state that it keeps from one step to the next.
    #[getter]
    fn memory(&self, py: Python<'_>) -> PyResult<u128> {
        Ok(self.guarded.live(py)?.stream().memory())
    }

    /// The factor of every row: noise multiplier times sensitivity times clip.
    #[getter]
    fn scale(&self, py: Python<'_>) -> PyResult<f32> {
        Ok(self.guarded.live(py)?.stream().scale())
    }

    /// "exact" or "float".
    #[getter]
    fn arithmetic(&self, py: Python<'_>) -> PyResult<&'static str> {
        Ok(self.guarded.live(py)?.stream().arithmetic().name())
    }

    /// Releases are multiples of it; None in float arithmetic.
    #[getter]
    fn grid(&self, py: Python<'_>) -> PyResult<Option<f64>> {
        Ok(self.guarded.live(py)?.stream().grid())
    }

    /// The name of the run, 32 hexadecimal digits.
    #[getter]
    fn run(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.guarded.live(py)?.stream().key().run().to_string())
    }

    /// The mechanism.
    #[getter]
    fn mechanism(&self, py: Python<'_>) -> Py<Mechanism> {
        self.mechanism.clone_ref(py)
    }

    /// The privacy statement, with the origin of the key in use.
    #[getter]
    fn privacy(&self, py: Python<'_>) -> PyResult<Option<PrivacyStatement>> {
        Ok(statement(py, &self.mechanism, self.guarded.live(py)?.stream()))
    }

    /// Writes the state, encrypted under the key, to a file, completely or not at all.
    fn checkpoint(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        self.guarded.check_process(py)?;
        let stream = self.guarded.live(py)?;
        py.detach(|| stream.checkpoint(&path)).or_raise()
    }

    /// The bytes of a checkpoint, for a state dictionary.
    fn checkpoint_bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        self.guarded.check_process(py)?;
        let stream = self.guarded.live(py)?;
        let bytes = py.detach(|| stream.stream().checkpoint_bytes()).or_raise()?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// Closes the journal, so that another process may open it.
    fn close(&mut self) {
        self.guarded.close("it was closed; open its journal again");
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&mut self, _exception: &Bound<'_, pyo3::types::PyTuple>) {
        self.close();
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let open = self.guarded.live(py);
        open.map_or_else(|_| "<dpmf.DurableStream: closed>".into(), |s| describe("DurableStream", s.stream()))
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(type_error(NO_PICKLE))
    }
}

impl DurableStream {
    fn guarded(stream: noise::DurableStream, mechanism: &Bound<'_, Mechanism>) -> Self {
        Self { guarded: Guarded::new(stream), mechanism: mechanism.clone().unbind() }
    }
}

fn describe(class: &str, stream: &noise::NoiseStream) -> String {
    let coordinates = stream.coordinates();
    format!(
        "<dpmf.{class}: step {} of {}, coordinates {}..{}, run {}>",
        stream.next_step(),
        stream.steps(),
        coordinates.start,
        coordinates.end,
        stream.key().run()
    )
}

fn statement(
    py: Python<'_>,
    mechanism: &Py<Mechanism>,
    stream: &noise::NoiseStream,
) -> Option<PrivacyStatement> {
    let (mechanism, key) = (mechanism.bind(py).get(), stream.key());
    // Unit noise has an identity of its own.
    let statement = mechanism.inner.privacy().filter(|_| key.mechanism() == mechanism.bound_to())?;
    let statement = statement.clone().with_key(key.origin());
    Some(PrivacyStatement(statement.with_arithmetic(stream.arithmetic())))
}
