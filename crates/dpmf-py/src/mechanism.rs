//! `dpmf.Mechanism`: what is saved, loaded, calibrated and checked.

use crate::arrays;
use crate::error::{IntoPython, raise};
use crate::parallel::run_long;
use crate::picture;
use crate::privacy::{PrivacyStatement, unit_name};
use crate::solve::Certificate;
use crate::workload::Workload;
use dpmf::accounting::{Accountant, Adjacency, PrivacyUnit};
use dpmf::inspection::{Inspection, describe};
use dpmf::mechanism::Conditions;
use dpmf::{Average, Identity, Optimizer, Representation, Sampling, format};
use numpy::{PyArray1, PyArray2};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyTuple};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

/// Relative difference of step sizes that is none: schedules computed in single precision stay below it, mistakes do
/// not.
const RATE_SLACK: f64 = 1e-4;

/// A validated mechanism: its workload, its form as deployed, its participation, and what is known about them.
///
/// Made by dpmf.plan, dpmf.make_mechanism, Optimum.state_space or Mechanism.load. It never changes: calibrate and with_noise
/// return a new one. Two mechanisms are equal if their files are equal: the same noise (identity), name, certificate and privacy
/// statement.
#[pyclass(frozen, module = "dpmf")]
pub(crate) struct Mechanism {
    pub(crate) inner: Arc<dpmf::Mechanism>,
    /// A hash over all coefficients, computed when it is first asked for.
    identity: OnceLock<Identity>,
}

impl From<dpmf::Mechanism> for Mechanism {
    fn from(mechanism: dpmf::Mechanism) -> Self {
        Self { inner: Arc::new(mechanism), identity: OnceLock::new() }
    }
}

impl Mechanism {
    /// Whether the participation covers units that are drawn so, by whatever chance.
    fn covers(&self, drawn: Sampling) -> dpmf::Result<bool> {
        let parts = match drawn {
            Sampling::None => return Ok(true),
            Sampling::CyclicPoisson { bands, .. } => bands,
            Sampling::BallsInBins { bins } => bins,
            // Any two steps of neighbouring epochs.
            Sampling::ReshuffledBins { bins } => {
                let steps = self.inner.workload().steps();
                let pattern = self.inner.participation().pattern(steps)?;
                let once = bins >= steps;
                return Ok(once || (pattern.separation == Some(1) && pattern.times >= steps.div_ceil(bins)));
            }
        };
        self.inner.participation().allows(parts, self.inner.workload().steps())
    }

    /// Batches of an epoch, where units take part in several.
    fn bins(&self) -> Option<usize> {
        let steps = self.inner.workload().steps();
        self.inner.participation().spacing(steps).ok().filter(|spacing| *spacing < steps)
    }

    /// What its noise is bound to.
    pub(crate) fn bound_to(&self) -> Identity {
        *self.identity.get_or_init(|| self.inner.identity())
    }
}

#[pymethods]
impl Mechanism {
    /// Reads a mechanism file, or the mechanism of a plan, recomputes sensitivity and ε and refuses a file that
    /// understates them.
    #[staticmethod]
    fn load(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        Ok(run_long(py, move || format::load(&path))?.into())
    }

    /// Reads what to_bytes wrote, with the checks of load.
    #[staticmethod]
    fn from_bytes(py: Python<'_>, data: PyBackedBytes) -> PyResult<Self> {
        Ok(run_long(py, move || format::from_bytes(&data))?.into())
    }

    /// Writes a safetensors file, completely or not at all.
    fn save(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        py.detach(|| format::save(&self.inner, &path)).or_raise()
    }

    /// The bytes of the mechanism file.
    fn to_bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = py.detach(|| format::to_bytes(&self.inner)).or_raise()?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// What its noise is bound to, 64 hexadecimal digits: the SHA-256 of everything that determines the noise, and of nothing else.
    ///
    /// Streams of one key and run have the same noise if their mechanisms have the same identity.
    #[getter]
    fn identity(&self) -> String {
        self.bound_to().to_string()
    }

    /// The workload that it was made for.
    #[getter]
    fn workload(&self) -> Workload {
        self.inner.workload().clone().into()
    }

    /// Number of steps.
    #[getter]
    fn steps(&self) -> usize {
        self.inner.workload().steps()
    }

    /// Its name with its options, such as "optimal" or "state-space:buffers=4"; None if it has none.
    #[getter]
    fn mechanism(&self) -> Option<String> {
        self.inner.family().map(|family| family.to_string())
    }

    /// How the noise is generated: "banded", "blt", "dense", "recall", "state-space", "structured", "toeplitz" or "tree".
    #[getter]
    fn form(&self) -> &'static str {
        self.inner.form().kind()
    }

    /// The participation that the sensitivity covers, as plan and make_mechanism take it: "single".
    #[getter]
    fn participation(&self) -> String {
        self.inner.participation().to_string()
    }

    /// The minimum distance between two steps of one unit, and the largest number of steps that it takes part in.
    #[getter]
    fn _participation(&self) -> PyResult<(usize, usize)> {
        let steps = self.inner.workload().steps();
        let pattern = self.inner.participation().pattern(steps).or_raise()?;
        Ok((pattern.separation.unwrap_or(steps), pattern.times))
    }

    /// The sampling that the guarantee relies on, in the format of dpmf.Sampler; "none" if it relies on none.
    #[getter]
    fn sampling(&self) -> String {
        self.inner.sampling().to_string()
    }

    /// Total squared loss over all steps, at clip 1 and noise multiplier 1.
    #[getter]
    fn loss(&self) -> f64 {
        self.inner.loss().total()
    }

    /// Root of the loss.
    #[getter]
    fn sqrt_loss(&self) -> f64 {
        self.inner.loss().sqrt_total()
    }

    /// Root of the largest step's loss.
    #[getter]
    fn max_sqrt_loss(&self) -> f64 {
        self.inner.loss().max_sqrt()
    }

    /// Root of the last step's loss.
    #[getter]
    fn final_sqrt_loss(&self) -> f64 {
        self.inner.loss().final_sqrt()
    }

    /// Sensitivity of the encoder as deployed, for contributions of unit norm.
    #[getter]
    fn sensitivity(&self) -> f64 {
        self.inner.sensitivity()
    }

    /// Model-sized float32 arrays that a stream keeps from one step to the next; None for dense rows, which regenerate all earlier noise.
    #[getter]
    fn buffers(&self) -> Option<usize> {
        self.inner.form().cost().buffers
    }

    /// Earlier rows of noise that a step regenerates; None for dense rows.
    #[getter]
    fn recalls(&self) -> Option<usize> {
        self.inner.form().cost().recalls
    }

    /// Mean number of model-sized multiply-adds a step.
    #[getter]
    fn work(&self) -> f64 {
        self.inner.form().cost().work
    }

    /// Loss as deployed against the lower bound for every factorization; None if none was proved.
    #[getter]
    fn certificate(&self) -> Option<Certificate> {
        self.inner.certificate().map(Certificate)
    }

    /// The privacy statement; None before calibration.
    #[getter]
    fn privacy(&self) -> Option<PrivacyStatement> {
        self.inner.privacy().cloned().map(PrivacyStatement)
    }

    /// Expected squared error of a coordinate in every step, at clip 1 and noise multiplier 1.
    fn per_step_error<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<f64>> {
        PyArray1::from_slice(py, self.inner.loss().per_step())
    }

    /// The factorization as deployed, A = B C, as (B, C). Cost: O(n^2) memory and more time.
    #[allow(clippy::type_complexity)] // a pair of arrays
    fn matrices<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<(Bound<'py, PyArray2<f64>>, Bound<'py, PyArray2<f64>>)> {
        let inner = self.inner.clone();
        let (b, c) = run_long(py, move || {
            let form = inner.form();
            Ok((inner.workload().times(form.coloring()), form.encoder()))
        })?;
        Ok((arrays::from_matrix(py, b.as_ref())?, arrays::from_matrix(py, c.as_ref())?))
    }

    /// N, the matrix that turns white noise into the noise of the gradients: N C = I and B = A N.
    fn coloring<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<f64>>> {
        let inner = self.inner.clone();
        let n = run_long(py, move || Ok(inner.form().coloring()))?;
        arrays::from_matrix(py, n.as_ref())
    }

    /// The mechanism with the least noise that gives (ε, δ) when every contribution is clipped to norm clip.
    ///
    /// unit is "user" or "record"; adjacency is "replace-with-zero", "add-or-remove" or "replace-one"; accountant is
    /// "exact", "zcdp", "rdp" or "paper".
    #[pyo3(signature = (epsilon, delta, clip=1.0, *, unit="record", adjacency="replace-with-zero", accountant="exact"))]
    #[allow(clippy::too_many_arguments)] // keywords in Python
    fn calibrate(
        &self,
        py: Python<'_>,
        epsilon: f64,
        delta: f64,
        clip: f64,
        unit: &str,
        adjacency: &str,
        accountant: &str,
    ) -> PyResult<Self> {
        let conditions = conditions(unit, adjacency, accountant)?;
        let mechanism = dpmf::Mechanism::clone(&self.inner);
        Ok(run_long(py, move || mechanism.calibrated(epsilon, delta, clip, conditions))?.into())
    }

    /// The mechanism with a given noise multiplier, and the ε that this gives at δ. Other arguments are as for calibrate.
    #[pyo3(signature = (noise_multiplier, delta, clip=1.0, *, unit="record", adjacency="replace-with-zero",
                        accountant="exact"))]
    #[allow(clippy::too_many_arguments)] // keywords in Python
    fn with_noise(
        &self,
        py: Python<'_>,
        noise_multiplier: f64,
        delta: f64,
        clip: f64,
        unit: &str,
        adjacency: &str,
        accountant: &str,
    ) -> PyResult<Self> {
        let conditions = conditions(unit, adjacency, accountant)?;
        let mechanism = dpmf::Mechanism::clone(&self.inner);
        Ok(run_long(py, move || mechanism.with_noise(noise_multiplier, delta, clip, conditions))?.into())
    }

    /// The mechanism for units that are sampled in secret: "cyclic-poisson:G:Q", "balls-in-bins:B",
    /// "reshuffled-bins:B" or "none".
    ///
    /// cyclic-poisson needs an encoder with at most G diagonals. Bins need an encoder that is known to be non-negative, such as
    /// those of banded, blt and banded-inverse mechanisms. The participation follows from the sampling. An earlier calibration
    /// and lower bound are dropped: calibrate the result.
    fn with_sampling(&self, py: Python<'_>, sampling: &str) -> PyResult<Self> {
        let sampling: Sampling = sampling.parse().or_raise()?;
        let known = self.inner.clone();
        let made = run_long(py, move || {
            let workload = known.workload().clone();
            let participation = sampling.participation(workload.steps())?.unwrap_or(known.participation());
            let made = dpmf::Mechanism::sampled(workload, known.form(), participation, sampling)?;
            Ok(match known.family() {
                Some(family) => made.with_family(family),
                None => made,
            })
        })?;
        Ok(made.into())
    }

    /// Evaluates the lower bound again from its dual variable, and returns the certificate with it.
    ///
    /// Raises FormatError if the stored bound claims more. None if the mechanism has no bound.
    fn verify(&self, py: Python<'_>) -> PyResult<Option<Certificate>> {
        let inner = self.inner.clone();
        let recomputed = run_long(py, move || inner.recompute_bound())?;
        let (Some(bound), Some(recomputed)) = (self.inner.bound(), recomputed) else { return Ok(None) };
        if bound.lower_bound > recomputed {
            let message = format!("the lower bound {} is overstated: it is {recomputed}", bound.lower_bound);
            return Err(raise(py, "format", message));
        }
        let loss = self.inner.loss().total();
        Ok(Some(Certificate(dpmf::Certificate::new(loss, recomputed, bound.iterations))))
    }

    /// Refuses an optimizer other than the one that this mechanism was made for.
    ///
    /// learning_rates are those of the first steps, as many as are known, up to a common factor unless there is weight
    /// decay. Privacy does not depend on the optimizer; the size of the noise in its iterates does.
    ///
    /// Raises MismatchError, which says how to plan for this optimizer.
    #[pyo3(signature = (*, momentum=0.0, nesterov=false, weight_decay=0.0, coupled=false, learning_rates=None))]
    fn check_optimizer(
        &self,
        py: Python<'_>,
        momentum: f64,
        nesterov: bool,
        weight_decay: f64,
        coupled: bool,
        learning_rates: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let Some((planned, rates)) = self.inner.workload().optimizer() else { return Ok(()) };
        let actual = Optimizer { momentum, nesterov, weight_decay, coupled, average: Average::None };
        let mut complaint = optimizer_mismatch(planned, &actual);
        if complaint.is_none()
            && let Some(learning_rates) = learning_rates
        {
            let learning_rates = arrays::vector("learning_rates", learning_rates)?;
            complaint = rate_mismatch(rates, &learning_rates, planned.weight_decay, weight_decay);
        }
        complaint.map_or(Ok(()), |complaint| {
            let message =
                format!("{complaint}. The guarantee would hold, but the noise would not be the best");
            Err(raise(py, "mismatch", message))
        })
    }

    /// Refuses a step after the last one, or a learning rate that does not follow the schedule. Steps are counted from zero;
    /// first_learning_rate is that of the first step.
    fn check_learning_rate(
        &self,
        py: Python<'_>,
        step: usize,
        learning_rate: f64,
        first_learning_rate: f64,
    ) -> PyResult<()> {
        if step >= self.steps() {
            return self.check_steps(py, step + 1);
        }
        let Some((_, rates)) = self.inner.workload().optimizer() else { return Ok(()) };
        if rates[0] == 0.0 {
            // A warm-up from 0: the scale of the optimizer is not known, only which of its steps are still.
            if (rates[step] == 0.0) == (learning_rate == 0.0) {
                return Ok(());
            }
            let message = format!(
                "step {step} has learning rate {learning_rate}, but the mechanism was planned for {} of its schedule: \
                 plan with schedule=[…] holding the learning rates of all steps",
                rates[step]
            );
            return Err(raise(py, "mismatch", message));
        }
        let (planned, actual) = (rates[step] / rates[0], learning_rate / first_learning_rate);
        if differs(planned, actual) {
            let message = format!(
                "step {step} has {actual} times the learning rate of the first step, but the mechanism was planned \
                 for {planned} times: plan with schedule=[…] holding the learning rates of all steps. The guarantee \
                 would hold, but the noise would not be the best"
            );
            return Err(raise(py, "mismatch", message));
        }
        Ok(())
    }

    /// Refuses a run of more steps than the mechanism has noise for; fewer are always allowed.
    fn check_steps(&self, py: Python<'_>, steps: usize) -> PyResult<()> {
        if steps <= self.steps() {
            return Ok(());
        }
        let message = format!(
            "the run has {steps} steps, but the mechanism was planned for {}, and no noise row is used twice: plan with \
             steps={steps} before training, or stop after step {}",
            self.steps(),
            self.steps()
        );
        Err(raise(py, "mismatch", message))
    }

    /// Refuses a sampler other than the one that the guarantee relies on. If it relies on none, refuses a sampler under which a
    /// user or record could take part more often than the mechanism covers.
    ///
    /// sampler is "single-epoch" (each takes part in at most one step), "epochs" (each takes part once in every epoch),
    /// "poisson", "with-replacement", or that of a dpmf.Sampler: "cyclic-poisson:G:Q", "balls-in-bins:B" or "reshuffled-bins:B".
    #[pyo3(signature = (sampler, *, epochs=1))]
    fn check_sampling(&self, py: Python<'_>, sampler: &str, epochs: usize) -> PyResult<()> {
        let (counted, drawn) = (self.inner.sampling(), sampler.parse::<Sampling>().unwrap_or_default());
        if drawn != Sampling::None && drawn == counted {
            return Ok(());
        }
        let offence = match (sampler, epochs) {
            _ if drawn != Sampling::None => {
                if counted == Sampling::None && self.covers(drawn).or_raise()? {
                    return Ok(());
                }
                format!("the sampler is {drawn}")
            }
            ("single-epoch" | "epochs", 1) if counted == Sampling::None => return Ok(()),
            ("single-epoch" | "epochs", 1) => "a pass over fixed batches is not sampled".into(),
            ("single-epoch" | "epochs", 0) => {
                return Err(crate::error::value_error("epochs is 0, but it must be at least 1"));
            }
            ("single-epoch" | "epochs", _) => {
                format!("in {epochs} epochs each example takes part in {epochs} steps")
            }
            ("poisson", _) => "Poisson sampling may draw the same example in any number of steps".into(),
            ("with-replacement", _) => {
                "sampling with replacement may draw the same example in any number of steps".into()
            }
            _ => {
                return Err(crate::error::value_error(format!(
                    "sampler is {sampler:?}, but it must be single-epoch, epochs, poisson, with-replacement, or that of a \
                     dpmf.Sampler"
                )));
            }
        };
        let message = match (counted, self.bins()) {
            (Sampling::None, None) => format!(
                "{offence}, but the guarantee of this mechanism is for data that takes part {}: shuffle once, cut the data \
                 into disjoint batches and go through them once (with PyTorch: DataLoader(…, shuffle=True) for one epoch; \
                 with Opacus: poisson_sampling=False)",
                self.inner.participation().words(self.steps())
            ),
            (Sampling::None, Some(bins)) => format!(
                "{offence}, but the guarantee of this mechanism is for data that takes part {}: use batches whose members \
                 stay the same in every epoch, such as those of dpmf.Sampler(\"balls-in-bins:{bins}\", …) do (with PyTorch: \
                 batch_sampler=dpmf.torch.SampledBatches(sampler))",
                self.inner.participation().words(self.steps())
            ),
            _ => format!(
                "{offence}, but the guarantee of this mechanism relies on sampling {counted} and holds under no other: draw \
                 with plan.sampler(key) or dpmf.Sampler(mechanism.sampling, key, …) (with PyTorch: \
                 batch_sampler=dpmf.torch.SampledBatches(sampler)), or plan with sampling=\"none\""
            ),
        };
        Err(raise(py, "mismatch", message))
    }

    /// Draws the standard deviation of every iterate's error with matplotlib and returns the axes.
    ///
    /// It is for one coordinate, the root of per_step_error, in units of noise multiplier times clip. Pass ax to draw several
    /// mechanisms into one figure; line goes to matplotlib's plot.
    #[pyo3(signature = (ax=None, **line))]
    fn plot_error<'py>(
        slf: &Bound<'py, Self>,
        ax: Option<&Bound<'py, PyAny>>,
        line: Option<&Bound<'py, pyo3::types::PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("dpmf._plot")?.getattr("plot_error")?.call((slf, ax), line)
    }

    fn __repr__(&self) -> PyResult<String> {
        let lines: Vec<String> =
            summary(&self.inner)?.into_iter().map(|(name, value)| format!("  {name:<13} {value}")).collect();
        Ok(format!("<dpmf.Mechanism\n{}>", lines.join("\n")))
    }

    /// A table of what is known and the curve of the error, for notebooks.
    fn _repr_html_(&self) -> PyResult<String> {
        picture::html(&self.inner)
    }

    fn __eq__(&self, py: Python<'_>, other: &Bound<'_, PyAny>) -> PyResult<bool> {
        let Ok(other) = other.cast::<Self>() else { return Ok(false) };
        let other = other.get();
        if self.bound_to() != other.bound_to() {
            return Ok(false);
        }
        py.detach(|| Ok(format::to_bytes(&self.inner)? == format::to_bytes(&other.inner)?)).or_raise()
    }

    fn __hash__(&self) -> u64 {
        self.bound_to().0[..8].iter().fold(0, |hash, byte| hash << 8 | u64::from(*byte))
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let load = py.import("dpmf._core")?.getattr("_load_mechanism")?;
        (load, (self.to_bytes(py)?,)).into_pyobject(py)
    }
}

/// What pickle calls.
#[pyfunction]
#[pyo3(name = "_load_mechanism")]
pub(crate) fn load_mechanism(py: Python<'_>, data: PyBackedBytes) -> PyResult<Mechanism> {
    Mechanism::from_bytes(py, data)
}

pub(crate) fn conditions(unit: &str, adjacency: &str, accountant: &str) -> PyResult<Conditions> {
    let unit: PrivacyUnit = unit.parse().or_raise()?;
    let adjacency: Adjacency = adjacency.parse().or_raise()?;
    let accountant: Accountant = accountant.parse().or_raise()?;
    Ok(Conditions { unit, adjacency, accountant, beside: None })
}

/// What is known of a mechanism, for people.
pub(crate) fn summary(mechanism: &dpmf::Mechanism) -> PyResult<Vec<(&'static str, String)>> {
    let known = Inspection::of(mechanism).or_raise()?;
    let ratio = known.ratio_to_bound.map_or("no lower bound".into(), |ratio| {
        format!("{ratio:.6} times the lower bound for any mechanism")
    });
    let form = known.mechanism.map_or(known.form.into(), |name| format!("{name} ({})", known.form));
    let kept = known
        .buffers
        .map_or("all earlier noise regenerated".into(), |buffers| format!("{buffers} model-sized buffers"));
    let privacy = known.privacy.map_or("not calibrated".into(), |statement| {
        let calibration = statement.calibration();
        format!(
            "ε = {:.4}, δ = {:e}, each {} {}; noise multiplier {:.5}, clip {}",
            calibration.epsilon(),
            calibration.delta(),
            unit_name(statement.unit()),
            statement.participation().words(known.steps),
            calibration.noise_multiplier(),
            calibration.terms().clip
        )
    });
    let sampling = match mechanism.sampling() {
        Sampling::None => None,
        sampling => Some(("sampling", sampling.words())),
    };
    let mut lines = vec![
        ("workload", format!("{}, {} steps", describe(mechanism.workload()), known.steps)),
        ("noise", format!("{form}, {kept}, {:.1} multiply-adds per coordinate and step", known.work)),
        ("√loss", format!("{:.6}, {ratio}", known.sqrt_loss)),
        ("sensitivity", format!("{:.7}", known.sensitivity)),
    ];
    lines.extend(sampling);
    lines.push(("privacy", privacy));
    Ok(lines)
}

fn differs(planned: f64, actual: f64) -> bool {
    let apart = (planned - actual).abs();
    apart.is_nan() || apart > RATE_SLACK * planned.abs().max(actual.abs())
}

fn optimizer_mismatch(planned: &Optimizer, actual: &Optimizer) -> Option<String> {
    if differs(planned.momentum, actual.momentum) {
        return Some(format!(
            "the optimizer has momentum {}, but the mechanism was planned for {}: plan with momentum={}, or set the \
             optimizer's",
            actual.momentum, planned.momentum, actual.momentum
        ));
    }
    if planned.nesterov != actual.nesterov {
        let (has, plan) = if actual.nesterov { ("Nesterov", "True") } else { ("plain", "False") };
        return Some(format!(
            "the optimizer has {has} momentum, but the mechanism was planned for the other form: plan with \
             nesterov={plan}"
        ));
    }
    if (planned.weight_decay == 0.0) != (actual.weight_decay == 0.0) {
        let coupled = if actual.coupled { ", coupled=True" } else { "" };
        return Some(format!(
            "the optimizer has weight decay {}, but the mechanism was planned for {}: plan with \
             weight_decay={}{coupled} and the learning rates of the optimizer (schedule=[…] or learning_rate=…), \
             which matter beside weight decay",
            actual.weight_decay, planned.weight_decay, actual.weight_decay
        ));
    }
    if planned.weight_decay > 0.0 && planned.coupled != actual.coupled {
        let (has, plan) = if actual.coupled {
            ("couples weight decay with the gradient, as torch.optim.SGD does", "True")
        } else {
            ("decouples weight decay from the gradient", "False")
        };
        return Some(format!(
            "the optimizer {has}, but the mechanism was planned for the other form: plan with coupled={plan}"
        ));
    }
    None
}

fn rate_mismatch(planned: &[f64], actual: &[f64], planned_decay: f64, actual_decay: f64) -> Option<String> {
    if actual.len() > planned.len() {
        return Some(format!(
            "there are {} learning rates, but the mechanism was planned for {} steps: plan with steps={}",
            actual.len(),
            planned.len(),
            actual.len()
        ));
    }
    // Up to a common factor, known from the largest step that is planned: the first may be 0.
    let known = planned.iter().zip(actual).enumerate();
    let (largest, (&planned_first, &first)) = known.reduce(|a, b| if b.1.0 > a.1.0 { b } else { a })?;
    if planned_first == 0.0 {
        return actual.iter().any(|rate| *rate != 0.0).then(|| {
            "the first learning rates are not 0, but the mechanism was planned for 0 there: plan with schedule=[…] \
             holding the learning rates of all steps"
                .into()
        });
    }
    let step = planned.iter().zip(actual).position(|(p, a)| differs(p / planned_first, a / first));
    if let Some(step) = step {
        return Some(format!(
            "step {step} has {} times the learning rate of {}, but the mechanism was planned for {} times: plan with \
             schedule=[…] holding the learning rates of all steps",
            actual[step] / first,
            if largest == 0 { "the first step".into() } else { format!("step {largest}") },
            planned[step] / planned_first
        ));
    }
    if differs(planned_first * planned_decay, first * actual_decay) {
        return Some(format!(
            "learning rate times weight decay is {} in the optimizer, but the mechanism was planned for {}: plan with \
             weight_decay={actual_decay} and learning_rate={first}",
            first * actual_decay,
            planned_first * planned_decay
        ));
    }
    None
}
