//! The mechanism file: a safetensors container that other tools can open.
//!
//! Tensors hold the deployed coefficients (f32), the workload and the dual variable (f64); a JSON header holds
//! the rest. Reading builds everything through the same constructors as the library does, recomputes the
//! sensitivity, and refuses a file that understates it. The hash detects damage, not malice: whoever can write
//! the file can write its hash.

mod container;

use crate::accounting::PrivacyStatement;
use crate::error::{Error, Result};
use crate::factorization::state_space::Parts;
use crate::factorization::tree::{Decoder, Level};
use crate::factorization::{Dense, Factorization, Independent, StateSpace, Structured, Toeplitz, Tree};
use crate::linalg::banded::LowerBanded;
use crate::mechanism::{Bound, Mechanism, SENSITIVITY_SLACK};
use crate::participation::Participation;
use crate::workload::{Optimizer, Recurrence, Workload};
use container::Tensors;
use faer::Mat;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Version of the layout.
pub const FORMAT: u32 = 1;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    format: u32,
    steps: usize,
    workload: WorkloadHeader,
    factorization: FactorizationHeader,
    participation: Participation,
    sensitivity: f64,
    bound: Option<BoundHeader>,
    privacy: Option<PrivacyStatement>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
enum WorkloadHeader {
    Sgd(Optimizer),
    Matrix,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
enum FactorizationHeader {
    Independent,
    Dense,
    StateSpace { order: usize },
    Structured { rank: usize },
    Toeplitz,
    Tree { decoder: Decoder },
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct BoundHeader {
    lower_bound: f64,
    iterations: usize,
}

/// The file of a mechanism, as bytes.
pub fn to_bytes(mechanism: &Mechanism) -> Result<Vec<u8>> {
    let (header, tensors) = encode(mechanism)?;
    container::write(&header, &tensors)
}

/// SHA-256 over everything the file says.
pub fn hash(mechanism: &Mechanism) -> Result<[u8; 32]> {
    let (header, tensors) = encode(mechanism)?;
    Ok(container::digest(&header, &tensors))
}

/// Reads and validates a mechanism.
///
/// Errors: [`Error::Format`] for anything that is not a whole, consistent file, including one whose stated
/// sensitivity is below the true one.
pub fn from_bytes(bytes: &[u8]) -> Result<Mechanism> {
    let (header, tensors) = container::read(bytes)?;
    decode(&header, tensors)
}

/// Writes the file at once or not at all: a temporary file beside it is synced, then renamed.
pub fn save(mechanism: &Mechanism, path: &Path) -> Result<()> {
    use std::io::Write;
    let bytes = to_bytes(mechanism)?;
    let io = |source| Error::Io { path: path.to_owned(), source };
    let name = path
        .file_name()
        .ok_or_else(|| Error::Format { path: path.to_owned(), reason: "no file name".into() })?;
    let temporary = path.with_file_name(format!(".{}.{}", name.to_string_lossy(), std::process::id()));
    let written = std::fs::File::create(&temporary)
        .and_then(|mut file| file.write_all(&bytes).and_then(|()| file.sync_all()))
        .and_then(|()| std::fs::rename(&temporary, path));
    if written.is_err() {
        // The error that matters is the first one.
        let _ = std::fs::remove_file(&temporary);
    }
    written.map_err(io)
}

/// Reads a file; see [`from_bytes`].
pub fn load(path: &Path) -> Result<Mechanism> {
    let bytes = std::fs::read(path).map_err(|source| Error::Io { path: path.to_owned(), source })?;
    from_bytes(&bytes).map_err(|error| match error {
        Error::Format { reason, .. } => Error::Format { path: path.to_owned(), reason },
        other => Error::Format { path: path.to_owned(), reason: other.to_string() },
    })
}

pub(crate) fn damaged(reason: String) -> Error {
    Error::Format { path: "<memory>".into(), reason }
}

fn encode(mechanism: &Mechanism) -> Result<(String, Tensors)> {
    let n = mechanism.workload().steps();
    let mut tensors = Tensors::default();
    let workload = match mechanism.workload().optimizer() {
        Some((optimizer, learning_rates)) => {
            tensors.put_f64("workload.learning_rates", &[n], learning_rates.iter().copied());
            WorkloadHeader::Sgd(*optimizer)
        }
        None => {
            let a = mechanism.workload().to_dense();
            let by_rows = (0..n).flat_map(|i| (0..n).map(move |j| (i, j))).map(|(i, j)| a[(i, j)]);
            tensors.put_f64("workload.matrix", &[n, n], by_rows);
            WorkloadHeader::Matrix
        }
    };
    let factorization = match mechanism.factorization() {
        Factorization::Independent(_) => FactorizationHeader::Independent,
        Factorization::Dense(dense) => {
            let lower = (0..n).flat_map(|i| (0..=i).map(move |j| dense.coloring()[(i, j)]));
            tensors.put_f32("dense.lower_triangle", &[n * (n + 1) / 2], lower);
            FactorizationHeader::Dense
        }
        Factorization::StateSpace(filter) => {
            let (r, parts) = (filter.order(), filter.parts());
            tensors.put_f32("state_space.direct", &[n], parts.direct.iter().copied());
            tensors.put_f32("state_space.output", &[n, r], parts.output.iter().copied());
            tensors.put_f32("state_space.input", &[n, r], parts.input.iter().copied());
            tensors.put_f32("state_space.increment", &[n, r * (r + 1) / 2], parts.increment.iter().copied());
            FactorizationHeader::StateSpace { order: r }
        }
        Factorization::Structured(structured) => {
            let rank = structured.rank();
            let below = structured.left().len().checked_div(rank).unwrap_or(0);
            tensors.put_f32("structured.left", &[below, rank], structured.left().iter().copied());
            tensors.put_f32("structured.right", &[below, rank], structured.right().iter().copied());
            put_banded(&mut tensors, "structured.band", structured.band());
            let recurrence = structured.recurrence();
            put_banded(&mut tensors, "structured.recurrence.left", &recurrence.left);
            if let Some(right) = &recurrence.right {
                put_banded(&mut tensors, "structured.recurrence.right", right);
            }
            FactorizationHeader::Structured { rank }
        }
        Factorization::Toeplitz(toeplitz) => {
            tensors.put_f32("toeplitz.first_column", &[n], toeplitz.coloring().iter().copied());
            FactorizationHeader::Toeplitz
        }
        Factorization::Tree(tree) => {
            let levels = tree.levels();
            tensors.put_f32("tree.own", &[levels.len()], levels.iter().map(|level| level.own));
            tensors.put_f32("tree.below", &[levels.len()], levels.iter().map(|level| level.below));
            FactorizationHeader::Tree { decoder: tree.decoder() }
        }
    };
    let bound = mechanism.bound().map(|bound| {
        tensors.put_f64("bound.v", &[n], bound.v.iter().copied());
        BoundHeader { lower_bound: bound.lower_bound, iterations: bound.iterations }
    });
    let header = Header {
        format: FORMAT,
        steps: n,
        workload,
        factorization,
        participation: mechanism.participation(),
        sensitivity: mechanism.sensitivity(),
        bound,
        privacy: mechanism.privacy().cloned(),
    };
    let text = serde_json::to_string(&header).map_err(|error| damaged(error.to_string()))?;
    Ok((text, tensors))
}

fn decode(header: &str, mut tensors: Tensors) -> Result<Mechanism> {
    let header: Header =
        serde_json::from_str(header).map_err(|error| damaged(format!("bad header: {error}")))?;
    if header.format != FORMAT {
        return Err(damaged(format!(
            "it has format {}, but this program reads format {FORMAT}",
            header.format
        )));
    }
    // The workload comes first: its tensors, and so the size of the file, bound n for all that follows.
    let n = header.steps;
    let workload = match header.workload {
        WorkloadHeader::Sgd(optimizer) => {
            Workload::sgd(tensors.take("workload.learning_rates", &[Some(n)])?.1, optimizer)?
        }
        WorkloadHeader::Matrix => {
            let (_, a) = tensors.take("workload.matrix", &[Some(n), Some(n)])?;
            Workload::dense(Mat::from_fn(n, n, |i, j| a[i * n + j]))?
        }
    };
    let factorization = match header.factorization {
        FactorizationHeader::Independent => Factorization::Independent(Independent::new(n)),
        FactorizationHeader::Dense => {
            let length = n.checked_mul(n + 1).ok_or_else(|| damaged(format!("{n} steps are too many")))? / 2;
            let (_, lower) = tensors.take("dense.lower_triangle", &[Some(length)])?;
            let coloring = Mat::from_fn(n, n, |i, j| if j <= i { lower[i * (i + 1) / 2 + j] } else { 0.0 });
            Factorization::Dense(Dense::from_coloring(coloring)?)
        }
        FactorizationHeader::StateSpace { order: r } => {
            let triangle = r.checked_mul(r.saturating_add(1)).map(|twice| twice / 2);
            let triangle = triangle.ok_or_else(|| damaged(format!("{r} states are too many")))?;
            let mut take = |name: &str, width: Option<usize>| {
                let shape = [Some(n), width];
                tensors
                    .take(name, if width.is_some() { &shape } else { &shape[..1] })
                    .map(|(_, values)| values)
            };
            let parts = Parts {
                direct: take("state_space.direct", None)?,
                output: take("state_space.output", Some(r))?,
                input: take("state_space.input", Some(r))?,
                increment: take("state_space.increment", Some(triangle))?,
            };
            Factorization::StateSpace(StateSpace::from_parts(r, parts)?)
        }
        FactorizationHeader::Structured { rank } => {
            let (_, left) = tensors.take("structured.left", &[None, Some(rank)])?;
            let (_, right) = tensors.take("structured.right", &[None, Some(rank)])?;
            let band = take_banded(&mut tensors, "structured.band", n)?;
            let recurrence = Recurrence {
                left: take_banded(&mut tensors, "structured.recurrence.left", n)?,
                right: match tensors.contains("structured.recurrence.right") {
                    true => Some(take_banded(&mut tensors, "structured.recurrence.right", n)?),
                    false => None,
                },
            };
            Factorization::Structured(Structured::new(band, rank, left, right, recurrence)?)
        }
        FactorizationHeader::Toeplitz => {
            let (_, column) = tensors.take("toeplitz.first_column", &[Some(n)])?;
            Factorization::Toeplitz(Toeplitz::new(column)?)
        }
        FactorizationHeader::Tree { decoder } => {
            let (_, own) = tensors.take("tree.own", &[None])?;
            let (_, below) = tensors.take("tree.below", &[Some(own.len())])?;
            let levels = own.into_iter().zip(below).map(|(own, below)| Level { own, below }).collect();
            Factorization::Tree(Tree::from_levels(n, decoder, levels)?)
        }
    };
    let mut mechanism = Mechanism::new(workload, &factorization, header.participation)?;
    if header.sensitivity < mechanism.sensitivity() * (1.0 - SENSITIVITY_SLACK)
        || !header.sensitivity.is_finite()
    {
        return Err(damaged(format!(
            "it states a sensitivity of {}, but the coefficients have {}",
            header.sensitivity,
            mechanism.sensitivity()
        )));
    }
    if let Some(bound) = header.bound {
        let (_, v) = tensors.take("bound.v", &[Some(n)])?;
        let bound = Bound { v, lower_bound: bound.lower_bound, iterations: bound.iterations };
        mechanism = mechanism.with_bound(bound)?;
    }
    if let Some(privacy) = header.privacy {
        mechanism = mechanism.with_privacy(privacy)?;
    }
    tensors.finish()?;
    Ok(mechanism)
}

/// Rows from the diagonal leftwards, as the type itself holds them.
fn put_banded(tensors: &mut Tensors, name: &str, matrix: &LowerBanded) {
    let rows = (0..matrix.n()).flat_map(|i| matrix.row(i).iter().copied());
    tensors.put_f32(name, &[matrix.n(), matrix.bandwidth() + 1], rows);
}

fn take_banded(tensors: &mut Tensors, name: &str, n: usize) -> Result<LowerBanded> {
    let (shape, values) = tensors.take(name, &[Some(n), None])?;
    let width = shape[1];
    if width == 0 {
        return Err(damaged(format!("tensor {name} has no diagonal")));
    }
    Ok(LowerBanded::from_fn(n, width - 1, |i, k| values[i * width + k]))
}

#[cfg(test)]
mod tests;
