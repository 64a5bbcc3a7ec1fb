//! Checkpoints of a run, so that it survives a crash.

use crate::error::{Error, Result};
use crate::server::Server;
use crate::training::Training;
use crate::{Model, Users};
use dpmf::disk::{self, Access, DiskPath};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use std::collections::HashMap;
use std::ffi::OsStr;
use std::io::Write;
use std::path::Path;

/// Checkpoints in a directory: for each, the state of the server and that of the noise.
///
/// The server's is a safetensors file of f32 vectors (`parameters`, `momentum`, `average`) that other tools open; the
/// noise's is encrypted. A checkpoint counts when both are whole; the newest stays, older ones go.
pub struct Checkpoints {
    directory: DiskPath,
}

impl Checkpoints {
    /// Checkpoints in a directory that exists.
    pub fn new(directory: impl Into<DiskPath>) -> Self {
        Self { directory: directory.into() }
    }

    fn server_place(&self, round: usize) -> DiskPath {
        self.directory.join(format!("server-{round:08}.safetensors"))
    }

    fn stream_place(&self, round: usize) -> DiskPath {
        self.directory.join(format!("stream-{round:08}.checkpoint"))
    }

    /// Writes a checkpoint of a run and removes older ones, with all that a crash left of them. A run without a journal
    /// leaves none of its noise.
    ///
    /// Errors: [`dpmf::Error::Io`], with the newest checkpoint as it was.
    pub fn save<M, D>(&self, training: &Training<'_, M, D>) -> Result<()>
    where
        M: Model,
        D: Users<Domain = M::Domain>,
    {
        let round = training.done();
        // The stream first: the server's file completes the pair.
        if let Some(run) = training.private_run().filter(|run| run.is_durable()) {
            run.stream().checkpoint(self.stream_place(round))?;
        }
        let bytes = encode(training.server());
        disk::replace(self.server_place(round), Access::Owner, |file| file.write_all(&bytes))?;
        for name in self.directory.list()? {
            if file_of(&name).is_some_and(|(_, old)| old != round) {
                self.directory.join(name).remove()?;
            }
        }
        Ok(())
    }

    /// The round of the newest checkpoint.
    ///
    /// Errors: a directory that cannot be read.
    pub fn newest(&self) -> Result<Option<usize>> {
        let names = self.directory.list()?;
        let rounds = names.iter().filter_map(|name| file_of(name));
        Ok(rounds.filter(|(half, _)| *half == Half::Server).map(|(_, round)| round).max())
    }

    /// The file of the noise of the newest checkpoint.
    ///
    /// Errors: no checkpoint, or one without this half.
    pub fn noise(&self) -> Result<DiskPath> {
        let Some(round) = self.newest()? else {
            return Err(Error::lost(self.directory.path(), "the checkpoint"));
        };
        let place = self.stream_place(round);
        if !place.exists()? {
            return Err(Error::lost(place.path(), "the checkpoint of the noise"));
        }
        Ok(place)
    }

    /// Takes the server of a run to the newest checkpoint; leaves it if there is none.
    ///
    /// Errors: a file that is damaged or of another run.
    pub fn restore_server<M, D>(&self, training: &mut Training<'_, M, D>) -> Result<()>
    where
        M: Model,
        D: Users<Domain = M::Domain>,
    {
        let Some(round) = self.newest()? else { return Ok(()) };
        let place = self.server_place(round);
        let buffers = decode(&place.read()?, place.path())?;
        if !training.server_mut().restore(round, buffers) {
            let message = "it belongs to another model or optimizer".into();
            return Err(Error::Run { path: place.path().into(), message });
        }
        Ok(())
    }
}

/// A half of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Half {
    Server,
    Stream,
    /// One that a crash left unfinished.
    Partial,
}

/// Which half of the checkpoint of which round a file is.
fn file_of(name: &OsStr) -> Option<(Half, usize)> {
    let name = name.to_str()?;
    let (name, partial) = name.strip_suffix(".partial").map_or((name, false), |name| (name, true));
    let (half, round) = match name.strip_prefix("server-") {
        Some(rest) => (Half::Server, rest.strip_suffix(".safetensors")?),
        None => (Half::Stream, name.strip_prefix("stream-")?.strip_suffix(".checkpoint")?),
    };
    Some((if partial { Half::Partial } else { half }, round.parse().ok()?))
}

fn encode(server: &Server) -> Vec<u8> {
    encode_buffers(&server.buffers())
}

fn encode_buffers(buffers: &[(&'static str, &[f32])]) -> Vec<u8> {
    let raw: Vec<(&str, usize, Vec<u8>)> = buffers
        .iter()
        .map(|(name, values)| (*name, values.len(), values.iter().flat_map(|x| x.to_le_bytes()).collect()))
        .collect();
    let views = raw.iter().map(|(name, length, bytes)| {
        let view = TensorView::new(Dtype::F32, vec![*length], bytes).expect("four bytes for each number");
        (*name, view)
    });
    let format = HashMap::from([("format".to_owned(), "dpmf-server-1".to_owned())]);
    safetensors::serialize(views, Some(format)).expect("names and shapes are valid")
}

fn decode(bytes: &[u8], path: &Path) -> Result<[Vec<f32>; 3]> {
    vectors(bytes, path, ["parameters", "momentum", "average"])
}

/// Vectors of a safetensors file by name.
fn vectors<const N: usize>(bytes: &[u8], path: &Path, names: [&str; N]) -> Result<[Vec<f32>; N]> {
    let bad = |message: String| Error::Run { path: path.to_owned(), message };
    let tensors = SafeTensors::deserialize(bytes).map_err(|error| bad(format!("it is damaged: {error}")))?;
    let vector = |name: &str| {
        let view = tensors.tensor(name).map_err(|_| bad(format!("it has no tensor {name}")))?;
        if view.dtype() != Dtype::F32 {
            return Err(bad(format!("its tensor {name} is not of f32")));
        }
        let numbers = view.data().as_chunks::<4>().0;
        Ok(numbers.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect::<Vec<f32>>())
    };
    let found: Vec<Vec<f32>> = names.into_iter().map(vector).collect::<Result<_>>()?;
    found.try_into().map_err(|_| bad("it is damaged".into()))
}
