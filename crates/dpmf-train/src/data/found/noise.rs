//! Noise for the sums: runs of one step each under one key, journalled, so that a sum is released once.

use std::path::Path;

use dpmf::PrivateRun;
use dpmf::accounting::{Arithmetic, PrivacyUnit};
use dpmf::disk::{self, Access, DiskPath, Lock};
use dpmf::mechanism::Conditions;
use dpmf::noise::{NoiseKey, RunId};
use dpmf::{Mechanism, Participation, Problem, Workload};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::io::Write;

use crate::run::KeySource;
use crate::{Error, Result};

const KEY: &str = "key";
const MANIFEST: &str = "release.json";

/// What is written down before the first sum is released.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Manifest {
    schema: u32,
    /// Name of the runs under the key.
    run: String,
    /// Mark, under the key, of everything that decides what is released.
    bound: String,
}

const SCHEMA: u32 = 1;

/// A directory in which one schema is found: its key, what it is bound to, and the journals of its sums.
pub(super) struct Releases {
    place: DiskPath,
    key: NoiseKey,
    run: RunId,
    bound: [u8; 32],
    _lock: Lock,
}

/// The mechanism of one sum: Gaussian noise on contributions of norm 1, of a μ that is not exceeded.
///
/// Errors: μ not positive and finite.
pub(super) fn mechanism(mu: f64, unit: PrivacyUnit) -> Result<Mechanism> {
    let problem = Problem::new(Workload::prefix_sum(1)?, Participation::Single)?;
    let mechanism = problem.mechanism("independent".parse()?, &mut dpmf::factorize::quiet)?;
    let conditions = Conditions { unit, ..Conditions::default() };
    // The δ at which ε is stated plays no part in the noise.
    Ok(mechanism.with_noise((1.0 / mu).next_up().next_up(), 1e-6, 1.0, conditions)?)
}

impl Releases {
    /// Begins in a directory, or goes on with what was begun there. `subject` is everything that decides what is released but the
    /// key: it is known to files by a mark under the key alone.
    ///
    /// Errors: another subject than it began with; a key that is lost; a directory in which another process works.
    pub(super) fn open(folder: &Path, source: &KeySource, subject: &[u8]) -> Result<Self> {
        let place = DiskPath::from(folder);
        place.create_folders()?;
        let lock = place.join("lock").lock()?;
        let (kept, manifest) = (place.join(KEY), place.join(MANIFEST));
        let refused = |message: &str| Error::Run { path: folder.into(), message: message.into() };
        let begun: Option<Manifest> = match manifest.exists()? {
            true => Some(
                serde_json::from_slice(&manifest.read()?)
                    .map_err(|error| refused(&format!("{MANIFEST} is damaged: {error}")))?,
            ),
            false => None,
        };
        if begun.as_ref().is_some_and(|begun| begun.schema != SCHEMA) {
            return Err(refused(
                "it is from another version of dpmf: finish the run with the version that began it",
            ));
        }
        let key = match (source, &begun) {
            (KeySource::File(path), _) => NoiseKey::read_file(place.at(path))?,
            (KeySource::Seed(seed), _) => NoiseKey::from_seed(*seed),
            (KeySource::System, Some(_)) => NoiseKey::read_file(&kept)?,
            (KeySource::System, None) => {
                // Without a manifest nothing was released under it.
                kept.remove()?;
                let key = NoiseKey::generate()?;
                key.create_file(&kept)?;
                key
            }
        };
        let bound = key.mark("schema", &[subject]);
        let hex = hex(&bound);
        let run = match begun {
            Some(begun) if begun.bound != hex => {
                return Err(refused(
                    "the table, its columns or the key differ from what the schema was found with, and the same noise must not be \
                     released for both: begin a new run",
                ));
            }
            Some(begun) => begun.run.parse()?,
            None => {
                let run = run_of(source, &hex)?;
                let text =
                    serde_json::to_vec_pretty(&Manifest { schema: SCHEMA, run: run.to_string(), bound: hex })
                        .map_err(|error| refused(&error.to_string()))?;
                disk::replace(manifest, Access::Owner, |file| file.write_all(&text))?;
                run
            }
        };
        Ok(Self { place, key, run, bound, _lock: lock })
    }

    /// Releases a sum of contributions of norm at most 1, in units of `2⁻³²`, with noise of this μ. The same sum under the same name
    /// comes out the same; another one is refused.
    ///
    /// Errors: those of the journal and the noise.
    pub(super) fn release(
        &self,
        name: &str,
        mu: f64,
        unit: PrivacyUnit,
        mut sum: Vec<i64>,
    ) -> Result<Vec<f32>> {
        let mechanism = mechanism(mu, unit)?;
        let run = begun(&mechanism, &self.key, self.run, name, &sum)?;
        let journal = self.place.join(format!("{name}.journal"));
        let mut run = match journal.exists()? {
            true => run.resumed(journal, self.bound, None)?,
            false => run.with_journal(journal, self.bound)?,
        };
        released(&mut run, &mut sum)
    }
}

/// The releases of one schema that is found in memory: each name is released once.
pub(super) struct Once {
    key: NoiseKey,
    run: RunId,
}

impl Once {
    /// `subject` is everything that decides what is released but the key: under a repeatable key, other sums meet other noise.
    ///
    /// Errors: a key that cannot be read or drawn.
    pub(super) fn new(source: &KeySource, subject: &[u8]) -> Result<Self> {
        let key = match source {
            KeySource::File(path) => NoiseKey::read_file(path)?,
            KeySource::Seed(seed) => NoiseKey::from_seed(*seed),
            KeySource::System => NoiseKey::generate()?,
        };
        let run = run_of(source, &hex(&key.mark("schema", &[subject])))?;
        Ok(Self { key, run })
    }

    /// Releases a sum of contributions of norm at most 1, in units of `2⁻³²`, with noise of this μ.
    ///
    /// Errors: those of the noise.
    pub(super) fn release(
        &self,
        name: &str,
        mu: f64,
        unit: PrivacyUnit,
        mut sum: Vec<i64>,
    ) -> Result<Vec<f32>> {
        let mechanism = mechanism(mu, unit)?;
        let mut run = begun(&mechanism, &self.key, self.run, name, &sum)?;
        released(&mut run, &mut sum)
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The name of the runs under a key: new, unless the key is a repeatable one. Then it follows from what is released.
fn run_of(source: &KeySource, bound: &str) -> Result<RunId> {
    Ok(match source {
        KeySource::Seed(_) => RunId::from_label(&format!("{} schema {bound}", env!("CARGO_PKG_VERSION"))),
        _ => RunId::generate()?,
    })
}

/// The run that releases a sum: every sum has a name of its own under the run.
fn begun(mechanism: &Mechanism, key: &NoiseKey, run: RunId, name: &str, sum: &[i64]) -> Result<PrivateRun> {
    let dimension = sum.len() as u64;
    let mut hash = Sha256::new();
    hash.update(run.0);
    hash.update(name.as_bytes());
    let mut id = [0; 16];
    id.copy_from_slice(&hash.finalize()[..16]);
    Ok(PrivateRun::new(mechanism, key, RunId(id), 0..dimension, dimension, Arithmetic::Exact)?)
}

fn released(run: &mut PrivateRun, sum: &mut [i64]) -> Result<Vec<f32>> {
    run.set_denominator(1.0)?;
    run.contribute(1)?;
    let mut released = vec![0.0; sum.len()];
    run.release(sum, &mut released)?;
    Ok(released)
}
