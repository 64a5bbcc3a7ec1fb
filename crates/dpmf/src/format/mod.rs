//! The mechanism file: a safetensors container that other tools can open.
//!
//! Tensors hold the deployed coefficients (f32), the workload and the dual variable (f64); a JSON header holds
//! the rest as data, and no sentence. Reading builds everything through the same constructors as the library does,
//! recomputes the sensitivity and the privacy curve, and refuses a file that claims more than they prove. The hash detects
//! damage, not malice: anyone who can write the file can also write its hash.
//!
//! A training program may add its settings to the file, which then is a plan: everything that determines a run except data, model and key.

use crate::accounting::{Accountant, Adjacency, ExtraRelease, PrivacyStatement, PrivacyUnit};
use crate::disk::{self, Access, DiskPath};
use crate::error::{Error, Result};
use crate::factorize::Dual;
use crate::family::Selector;
use crate::form::{Form, Representation};
use crate::mechanism::{Bound, Conditions, Mechanism};
use crate::participation::{Participation, Sampling};
use crate::tensors::{self, Contents, Tensors, damaged};
use crate::workload::{Optimizer, Workload};
use faer::Mat;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::io::Write;
use std::path::Path;

/// Version of the layout.
pub const FORMAT: u32 = 2;

/// What a file holds.
#[derive(Clone, Debug)]
pub struct File {
    /// The mechanism; nothing in the plan of a run without noise.
    pub mechanism: Option<Mechanism>,
    /// What a training program keeps beside it.
    pub recipe: Option<Value>,
    /// SHA-256 over everything the file says.
    pub sha256: [u8; 32],
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    format: u32,
    mechanism: Option<MechanismHeader>,
    recipe: Option<Value>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct MechanismHeader {
    steps: usize,
    workload: WorkloadHeader,
    family: Option<Selector>,
    form: String,
    participation: Participation,
    sampling: Sampling,
    sensitivity: f64,
    bound: Option<BoundHeader>,
    privacy: Option<PrivacyHeader>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
enum WorkloadHeader {
    Sgd(Optimizer),
    Matrix,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct BoundHeader {
    lower_bound: f64,
    iterations: usize,
}

/// A calibration: what cannot be computed from the rest.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PrivacyHeader {
    unit: PrivacyUnit,
    adjacency: Adjacency,
    accountant: Accountant,
    noise_multiplier: f64,
    clip: f64,
    epsilon: f64,
    delta: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    beside: Option<ExtraRelease>,
}

/// The file of a mechanism, as bytes.
pub fn to_bytes(mechanism: &Mechanism) -> Result<Vec<u8>> {
    pack(Some(mechanism), None)
}

/// The file of a plan: a mechanism, or none, with what a training program keeps beside it.
///
/// The same input gives the same bytes.
pub fn pack(mechanism: Option<&Mechanism>, recipe: Option<&Value>) -> Result<Vec<u8>> {
    let mut tensors = Tensors::default();
    let mechanism = mechanism.map(|mechanism| encode(mechanism, &mut tensors));
    let header = Header { format: FORMAT, mechanism, recipe: recipe.cloned() };
    let text = serde_json::to_string(&header).map_err(|error| damaged(error.to_string()))?;
    tensors::write(&text, &tensors)
}

/// Reads and validates a file.
///
/// Errors: [`Error::Format`] for anything that is not a whole, consistent file, including one whose sensitivity or ε is
/// below what its coefficients and noise prove.
pub fn unpack(bytes: &[u8]) -> Result<File> {
    let Contents { header, mut tensors, sha256, intact } = tensors::read(bytes)?;
    let bad = |error: serde_json::Error| damaged(format!("bad header: {error}"));
    let value: Value = serde_json::from_str(&header).map_err(bad)?;
    match value.get("format").and_then(Value::as_u64) {
        Some(2) => {}
        Some(1) => {
            return Err(damaged(
                "it has format 1, from version 0.1, whose noise depends on the text in the file: make it again with \
                 `dpmf factorize` and `dpmf calibrate`; finish a run that was begun with it with version 0.1"
                    .into(),
            ));
        }
        Some(other) => {
            return Err(damaged(format!(
                "it has format {other}, but this version of dpmf reads format {FORMAT}: it was written by a newer version"
            )));
        }
        None => return Err(damaged("its header states no format".into())),
    }
    if !intact {
        return Err(damaged("the hash does not match: the file is damaged or was edited".into()));
    }
    // From the text once more: a JSON value would lose the digits of numbers, and unknown fields.
    let Header { mechanism, recipe, .. } = serde_json::from_str(&header).map_err(bad)?;
    let mechanism = mechanism.map(|header| decode(header, &mut tensors)).transpose()?;
    tensors.finish()?;
    Ok(File { mechanism, recipe, sha256 })
}

/// Reads and validates a mechanism; see [`unpack`].
///
/// Errors: those of it; a plan without a mechanism.
pub fn from_bytes(bytes: &[u8]) -> Result<Mechanism> {
    unpack(bytes)?.mechanism.ok_or_else(|| damaged("it is the plan of a run without noise".into()))
}

/// Writes the file at once or not at all.
///
/// Errors: [`Error::Io`], with the file as it was before; a path that is no regular file.
pub fn save(mechanism: &Mechanism, path: &Path) -> Result<()> {
    let bytes = to_bytes(mechanism)?;
    disk::replace(path, Access::Everyone, |file| file.write_all(&bytes))
}

/// Reads a file; see [`unpack`].
///
/// Errors: those of it, with the path; [`Error::Io`].
pub fn open(path: &Path) -> Result<File> {
    let bytes = DiskPath::from(path).read()?;
    unpack(&bytes).map_err(|error| at(path, error))
}

/// Reads the mechanism of a file; see [`from_bytes`].
///
/// Errors: those of it, with the path; [`Error::Io`].
pub fn load(path: &Path) -> Result<Mechanism> {
    open(path)?.mechanism.ok_or_else(|| at(path, damaged("it is the plan of a run without noise".into())))
}

fn at(path: &Path, error: Error) -> Error {
    match error {
        Error::Format { reason, .. } => Error::Format { path: path.to_owned(), reason },
        other => Error::Format { path: path.to_owned(), reason: other.to_string() },
    }
}

const LEARNING_RATES: &str = "workload.learning_rates";
const MATRIX: &str = "workload.matrix";
const DUAL: &str = "bound.v";
/// The directions of several participations, `K` numbers a step; not there for one.
const DIRECTIONS: &str = "bound.directions";

fn encode(mechanism: &Mechanism, tensors: &mut Tensors) -> MechanismHeader {
    let n = mechanism.workload().steps();
    let workload = match mechanism.workload().optimizer() {
        Some((optimizer, learning_rates)) => {
            tensors.put_f64(LEARNING_RATES, &[n], learning_rates.iter().copied());
            WorkloadHeader::Sgd(*optimizer)
        }
        None => {
            let a = mechanism.workload().to_dense();
            let by_rows = (0..n).flat_map(|i| (0..n).map(move |j| (i, j))).map(|(i, j)| a[(i, j)]);
            tensors.put_f64(MATRIX, &[n, n], by_rows);
            WorkloadHeader::Matrix
        }
    };
    mechanism.form().write(tensors);
    let bound = mechanism.bound().map(|bound| {
        let dual = &bound.dual;
        tensors.put_f64(DUAL, &[dual.separation()], dual.v().iter().copied());
        if dual.times() > 1 {
            tensors.put_f64(DIRECTIONS, &[n, dual.times()], dual.directions().iter().copied());
        }
        BoundHeader { lower_bound: bound.lower_bound, iterations: bound.iterations }
    });
    MechanismHeader {
        steps: n,
        workload,
        family: mechanism.family(),
        form: mechanism.form().kind().to_owned(),
        participation: mechanism.participation(),
        sampling: mechanism.sampling(),
        sensitivity: mechanism.sensitivity(),
        bound,
        privacy: mechanism.privacy().map(calibration),
    }
}

fn calibration(statement: &PrivacyStatement) -> PrivacyHeader {
    let calibration = statement.calibration();
    let terms = calibration.terms();
    PrivacyHeader {
        unit: statement.unit(),
        adjacency: terms.adjacency,
        accountant: terms.accountant,
        noise_multiplier: calibration.noise_multiplier(),
        clip: terms.clip,
        epsilon: calibration.epsilon(),
        delta: calibration.delta(),
        beside: terms.beside,
    }
}

fn decode(header: MechanismHeader, tensors: &mut Tensors) -> Result<Mechanism> {
    // The workload comes first: its tensors, and so the size of the file, bound n for all that follows.
    let n = header.steps;
    let workload = match header.workload {
        WorkloadHeader::Sgd(optimizer) => {
            Workload::sgd(tensors.take(LEARNING_RATES, &[Some(n)])?.1, optimizer)?
        }
        WorkloadHeader::Matrix => {
            let (_, a) = tensors.take(MATRIX, &[Some(n), Some(n)])?;
            Workload::dense(Mat::from_fn(n, n, |i, j| a[i * n + j]))?
        }
    };
    let form = Form::read(&header.form, n, tensors)?;
    let stated = Some(header.sensitivity);
    let mut mechanism =
        Mechanism::with_sensitivity(workload, &form, header.participation, header.sampling, stated)?;
    if let Some(family) = header.family {
        mechanism = mechanism.with_family(family);
    }
    if let Some(bound) = header.bound {
        let (_, v) = tensors.take(DUAL, &[None])?;
        let several = tensors.contains(DIRECTIONS);
        let directions = several.then(|| tensors.take(DIRECTIONS, &[Some(n), None])).transpose()?;
        let dual = Dual::new(n, v.len(), v, directions.map(|(_, values)| values).unwrap_or_default())?;
        let bound = Bound { dual, lower_bound: bound.lower_bound, iterations: bound.iterations };
        mechanism = mechanism.with_bound(bound)?;
    }
    if let Some(privacy) = header.privacy {
        let PrivacyHeader { unit, adjacency, accountant, noise_multiplier, clip, epsilon, delta, beside } =
            privacy;
        let conditions = Conditions { unit, adjacency, accountant, beside };
        let calibration = mechanism.terms(clip, conditions).stated(noise_multiplier, epsilon, delta)?;
        mechanism = mechanism.with_calibration(calibration, unit)?;
    }
    Ok(mechanism)
}

#[cfg(test)]
mod forgery_tests;
#[cfg(test)]
mod tests;
