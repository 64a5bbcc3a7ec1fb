//! Accounting, the privacy statement and the audit.

use crate::data::objects;
use crate::error::{IntoPython, raise, value_error};
use crate::mechanism::Mechanism;
use crate::parallel::run_long;
use dpmf::accounting::{self, Account, Accountant, Adjacency, Phase, PrivacyCurve, PrivacyUnit, Terms};
use dpmf::audit::{AdversaryKind, AuditOptions, Informed, MatrixMechanism, Neighbours, Promise};
use dpmf::{Representation, Sampling};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Multiplications that an audit may cost before it is refused.
const MOST_WORK: f64 = 2e13;

/// A guarantee with everything it depends on; str() gives it in words.
#[pyclass(frozen, eq, module = "dpmf")]
#[derive(Clone, PartialEq)]
pub(crate) struct PrivacyStatement(pub(crate) accounting::PrivacyStatement);

#[pymethods]
impl PrivacyStatement {
    /// ε.
    #[getter]
    fn epsilon(&self) -> f64 {
        self.0.calibration().epsilon()
    }

    /// δ.
    #[getter]
    fn delta(&self) -> f64 {
        self.0.calibration().delta()
    }

    /// μ of Gaussian differential privacy; None where the mechanism is not Gaussian.
    #[getter]
    fn mu(&self) -> Option<f64> {
        self.0.calibration().mu()
    }

    /// ρ of zero-concentrated differential privacy; None where the mechanism is not Gaussian.
    #[getter]
    fn rho(&self) -> Option<f64> {
        self.0.calibration().rho()
    }

    /// σ: standard deviation of the noise in units of sensitivity times clip.
    #[getter]
    fn noise_multiplier(&self) -> f64 {
        self.0.calibration().noise_multiplier()
    }

    /// Standard deviation of the white noise: noise multiplier times sensitivity times clip.
    #[getter]
    fn noise_std(&self) -> f64 {
        self.0.calibration().noise_std()
    }

    /// Sensitivity of the mechanism as deployed.
    #[getter]
    fn sensitivity(&self) -> f64 {
        self.0.calibration().terms().sensitivity
    }

    /// Clipping norm of one contribution.
    #[getter]
    fn clip(&self) -> f64 {
        self.0.calibration().terms().clip
    }

    /// Which data sets are neighbours.
    #[getter]
    fn adjacency(&self) -> &'static str {
        self.0.calibration().terms().adjacency.name()
    }

    /// How ε follows from the noise.
    #[getter]
    fn accountant(&self) -> &'static str {
        self.0.calibration().terms().accountant.name()
    }

    /// The unit of privacy: "user" or "record".
    #[getter]
    fn unit(&self) -> &'static str {
        unit_name(self.0.unit())
    }

    /// How often one unit takes part, in words; to_dict() has the numbers.
    #[getter]
    fn participation(&self) -> String {
        self.0.participation().words(self.0.steps())
    }

    /// Number of steps.
    #[getter]
    fn steps(&self) -> usize {
        self.0.steps()
    }

    /// "system", or "seeded" if the guarantee holds only while a seed is secret.
    #[getter]
    fn key(&self) -> &'static str {
        self.0.key().name()
    }

    /// What (ε, δ) covers, one sentence each.
    #[getter]
    fn covers(&self) -> Vec<String> {
        self.0.covers()
    }

    /// What (ε, δ) does not cover or assumes, one sentence each.
    #[getter]
    fn does_not_cover(&self) -> Vec<String> {
        self.0.does_not_cover()
    }

    /// Everything, as in the JSON of the command line.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        dictionary(py, &self.0)
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __repr__(&self) -> String {
        format!("<dpmf.PrivacyStatement: {}>", self.0.to_string().lines().next().unwrap_or_default())
    }
}

/// The word for a unit of privacy.
pub(crate) fn unit_name(unit: PrivacyUnit) -> &'static str {
    match unit {
        PrivacyUnit::Record => "record",
        PrivacyUnit::User => "user",
    }
}

/// What JSON calls an object.
fn dictionary<'py>(py: Python<'py>, value: &impl serde::Serialize) -> PyResult<Bound<'py, PyDict>> {
    Ok(objects(py, value)?.cast_into::<PyDict>()?)
}

/// The ε of a noise multiplier at δ by every accountant, rounded up: a dictionary with "epsilon_exact",
/// "epsilon_zcdp", "epsilon_rdp", "epsilon_paper", "mu" and "rho", beside "noise_multiplier", "delta" and "adjacency".
/// adjacency is as for Mechanism.calibrate.
///
/// >>> import dpmf
/// >>> round(dpmf.account(0.341, 1e-6)["epsilon_exact"], 3)
/// 17.648
#[pyfunction]
#[pyo3(signature = (noise_multiplier, delta, *, adjacency="replace-with-zero"))]
pub(crate) fn account<'py>(
    py: Python<'py>,
    noise_multiplier: f64,
    delta: f64,
    adjacency: &str,
) -> PyResult<Bound<'py, PyDict>> {
    dictionary(py, &Account::new(noise_multiplier, delta, adjacency.parse().or_raise()?).or_raise()?)
}

/// The smallest noise multiplier that gives (ε, δ), rounded up. adjacency and accountant are as for Mechanism.calibrate.
#[pyfunction]
#[pyo3(signature = (epsilon, delta, *, adjacency="replace-with-zero", accountant="exact"))]
pub(crate) fn calibrate_noise(epsilon: f64, delta: f64, adjacency: &str, accountant: &str) -> PyResult<f64> {
    let (adjacency, accountant): (Adjacency, Accountant) =
        (adjacency.parse().or_raise()?, accountant.parse().or_raise()?);
    accounting::calibrate::noise_multiplier(epsilon, delta, adjacency, accountant).or_raise()
}

/// The noise multiplier of one mechanism that is as private as all the given ones together, rounded down.
#[pyfunction]
pub(crate) fn compose(noise_multipliers: Vec<f64>) -> PyResult<f64> {
    accounting::compose(&noise_multipliers).or_raise()
}

/// Phases from triples of noise multiplier, rate and rounds.
fn phases(given: Vec<(f64, f64, u64)>) -> Vec<Phase> {
    given
        .into_iter()
        .map(|(noise_multiplier, rate, rounds)| Phase { noise_multiplier, rate, rounds })
        .collect()
}

/// ε at δ of steps that draw each record in secret with probability rate, as in DP-SGD. Returns a pair (lower, upper), no further
/// apart than width if the arithmetic allows it; the upper end is the guarantee.
///
/// It holds for records added, removed, or replaced with zero. A rate of 1 is the Gaussian mechanism.
///
/// >>> import dpmf
/// >>> lower, upper = dpmf.poisson_epsilon(1.0, 0.01, 1000, 1e-5)
/// >>> round(upper, 2)
/// 1.83
#[pyfunction]
#[pyo3(signature = (noise_multiplier, rate, steps, delta, *, width=1e-3))]
pub(crate) fn poisson_epsilon(
    py: Python<'_>,
    noise_multiplier: f64,
    rate: f64,
    steps: u64,
    delta: f64,
    width: f64,
) -> PyResult<(f64, f64)> {
    phases_epsilon(py, vec![(noise_multiplier, rate, steps)], delta, width)
}

/// δ at ε of steps that draw each record in secret with probability rate: a pair (lower, upper), as narrow as a width in ε allows.
#[pyfunction]
#[pyo3(signature = (noise_multiplier, rate, steps, epsilon, *, width=1e-3))]
pub(crate) fn poisson_delta(
    py: Python<'_>,
    noise_multiplier: f64,
    rate: f64,
    steps: u64,
    epsilon: f64,
    width: f64,
) -> PyResult<(f64, f64)> {
    phases_delta(py, vec![(noise_multiplier, rate, steps)], epsilon, width)
}

/// The smallest noise multiplier that gives (ε, δ) in steps that draw each record in secret with probability rate, rounded up by
/// about 1e-5 of it.
///
/// >>> import dpmf
/// >>> round(dpmf.poisson_noise_multiplier(1.0, 1e-5, 1 / 60, 600), 3)
/// 1.738
#[pyfunction]
pub(crate) fn poisson_noise_multiplier(
    py: Python<'_>,
    epsilon: f64,
    delta: f64,
    rate: f64,
    steps: u64,
) -> PyResult<f64> {
    run_long(py, move || accounting::poisson_noise_multiplier(epsilon, delta, rate, steps))
}

/// ε at δ of phases of sampled steps together, each a triple of noise multiplier, rate and number of steps: a pair
/// (lower, upper) as of poisson_epsilon.
#[pyfunction]
#[pyo3(signature = (phases, delta, *, width=1e-3))]
pub(crate) fn phases_epsilon(
    py: Python<'_>,
    phases: Vec<(f64, f64, u64)>,
    delta: f64,
    width: f64,
) -> PyResult<(f64, f64)> {
    let phases = self::phases(phases);
    let found = run_long(py, move || {
        PrivacyCurve::poisson(&phases, Adjacency::AddOrRemove)?.epsilon_bracket(delta, width)
    })?;
    Ok((found.lower, found.upper))
}

/// δ at ε of phases of sampled steps together: a pair (lower, upper) as of poisson_delta.
#[pyfunction]
#[pyo3(signature = (phases, epsilon, *, width=1e-3))]
pub(crate) fn phases_delta(
    py: Python<'_>,
    phases: Vec<(f64, f64, u64)>,
    epsilon: f64,
    width: f64,
) -> PyResult<(f64, f64)> {
    let phases = self::phases(phases);
    let found = run_long(py, move || {
        PrivacyCurve::poisson(&phases, Adjacency::AddOrRemove)?.delta_bracket(epsilon, width)
    })?;
    Ok((found.lower, found.upper))
}

/// Plays the adaptive privacy game against a calibrated mechanism and bounds its ε from below.
///
/// Returns a dictionary with "epsilon_lower" (for a Gaussian trade-off), "epsilon_assumption_free", "promise",
/// "refuted" and more. An audit can refute a guarantee, but never prove one.
///
/// adversary is "worst-column", "adaptive" or "paper".
///
/// If a mechanism relies on sampling, several points of the promised curve are tested with the deployed sampler: "rows" has
/// "epsilon", "delta" and "delta_lower" of each. adversary, delta and dimension are then not used.
#[pyfunction]
#[pyo3(signature = (mechanism, *, trials=100_000, adversary="worst-column", delta=None, dimension=2, confidence=0.999,
                    seed=0))]
#[allow(clippy::too_many_arguments)] // keywords in Python
pub(crate) fn audit<'py>(
    py: Python<'py>,
    mechanism: &Bound<'_, Mechanism>,
    trials: u64,
    adversary: &str,
    delta: Option<f64>,
    dimension: usize,
    confidence: f64,
    seed: u64,
) -> PyResult<Bound<'py, PyDict>> {
    let mechanism = mechanism.get().inner.clone();
    let Some(statement) = mechanism.privacy().cloned() else {
        return Err(value_error(
            "the mechanism is not calibrated and has no guarantee yet: audit mechanism.calibrate(epsilon, delta, clip)",
        ));
    };
    let adversary: AdversaryKind = adversary.parse().or_raise()?;
    let calibration = statement.calibration();
    let (n, m) = (mechanism.workload().steps(), mechanism.form().noise_rows());
    if trials as f64 * n as f64 * m as f64 * dimension as f64 > MOST_WORK {
        let message =
            format!("{trials} games of {n} steps would take hours: lower trials, or audit fewer steps");
        return Err(raise(py, "unsupported", message));
    }
    let options = AuditOptions { trials, confidence, seed };
    if mechanism.sampling() != Sampling::None {
        let report = run_long(py, move || {
            let calibration = statement.calibration();
            let (terms, curve) = (calibration.terms(), calibration.curve());
            let points = dpmf::audit::promised_points(calibration.epsilon(), |epsilon| curve.delta(epsilon))?;
            let (form, sampling, noise) = (mechanism.form(), mechanism.sampling(), calibration.noise_std());
            let Terms { adjacency, clip, .. } = *terms;
            dpmf::audit::audit_sampled_form(form, noise, sampling, adjacency, clip, &points, options)
        })?;
        let result = dictionary(py, &report)?;
        result.set_item("refuted", report.refuted())?;
        return Ok(result);
    }
    let mut promise = Promise::try_from(calibration).or_raise()?;
    if let Some(delta) = delta {
        let epsilon = calibration.curve().epsilon(delta).or_raise()?;
        promise = Promise { epsilon, delta, ..promise };
    }
    let report = run_long(py, move || {
        let calibration = statement.calibration();
        let subject = MatrixMechanism::of(mechanism.form(), calibration.noise_std(), dimension)?;
        let model = subject.noise_model()?;
        let terms = calibration.terms();
        let neighbours = Neighbours::new(mechanism.participation(), n, terms.adjacency, terms.clip)?;
        let player = Informed::of(adversary, &model, &neighbours, dimension);
        dpmf::audit::audit(&subject, &player, &neighbours, promise, options)
    })?;
    let result = dictionary(py, &report)?;
    result.set_item("refuted", report.refuted())?;
    Ok(result)
}
