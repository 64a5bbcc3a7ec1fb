//! Checkpoints of a run, so that it survives a crash.

use crate::error::{Error, Result};
use crate::server::Server;
use crate::training::{Noise, Training};
use crate::{Model, Users};
use dpmf::disk::{self, Access};
use dpmf::noise::NoiseStream;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use std::collections::HashMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Checkpoints in a directory: for each, the state of the server and that of the noise.
///
/// The server's is a safetensors file of f32 vectors (`parameters`, `momentum`, `average`) that other tools open; the
/// noise's is encrypted. A checkpoint counts when both are whole; the newest stays, older ones go.
pub struct Checkpoints {
    directory: PathBuf,
}

impl Checkpoints {
    /// Checkpoints in a directory that exists.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self { directory: directory.into() }
    }

    fn server_path(&self, round: usize) -> PathBuf {
        self.directory.join(format!("server-{round:08}.safetensors"))
    }

    fn stream_path(&self, round: usize) -> PathBuf {
        self.directory.join(format!("stream-{round:08}.checkpoint"))
    }

    /// Writes a checkpoint of a run and removes older ones. A run without a journal leaves none of its noise.
    ///
    /// Errors: [`dpmf::Error::Io`], with older checkpoints as they were.
    pub fn save<M, D>(&self, training: &Training<'_, M, D>) -> Result<()>
    where
        M: Model,
        D: Users<Domain = M::Domain>,
    {
        let round = training.done();
        // The stream first: the server's file completes the pair.
        if let Noise::Durable(durable) = training.noise() {
            durable.checkpoint(self.stream_path(round))?;
        }
        let bytes = encode(training.server());
        disk::replace(&self.server_path(round), Access::Owner, |file| file.write_all(&bytes))?;
        for old in self.rounds()?.into_iter().filter(|old| *old != round) {
            for path in [self.server_path(old), self.stream_path(old)] {
                match fs::remove_file(&path) {
                    Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
                        return Err(Error::Io { path, source });
                    }
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// The round of the newest checkpoint.
    ///
    /// Errors: a directory that cannot be read.
    pub fn newest(&self) -> Result<Option<usize>> {
        Ok(self.rounds()?.into_iter().max())
    }

    /// Takes a stream to the newest checkpoint; as it is if there is none.
    ///
    /// Errors: those of [`NoiseStream::restore`].
    pub fn restore_stream(&self, stream: NoiseStream) -> Result<NoiseStream> {
        match self.newest()? {
            Some(round) => Ok(stream.restore(self.stream_path(round))?),
            None => Ok(stream),
        }
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
        let path = self.server_path(round);
        let bytes = fs::read(&path).map_err(|source| Error::Io { path: path.clone(), source })?;
        let buffers = decode(&bytes, &path)?;
        if !training.server_mut().restore(round, buffers) {
            return Err(Error::Run { path, message: "it belongs to another model or optimizer".into() });
        }
        Ok(())
    }

    /// Rounds whose server file is there.
    fn rounds(&self) -> Result<Vec<usize>> {
        let io = |source| Error::Io { path: self.directory.clone(), source };
        let mut rounds = Vec::new();
        for entry in fs::read_dir(&self.directory).map_err(io)? {
            let name = entry.map_err(io)?.file_name();
            let round =
                name.to_str().and_then(|name| name.strip_prefix("server-")?.strip_suffix(".safetensors"));
            rounds.extend(round.and_then(|round| round.parse::<usize>().ok()));
        }
        Ok(rounds)
    }
}

/// Writes parameters to a safetensors file, as one vector `parameters`.
///
/// Errors: [`dpmf::Error::Io`].
pub fn write_parameters(path: &Path, parameters: &[f32]) -> Result<()> {
    let bytes = encode_buffers(&[("parameters", parameters)]);
    Ok(disk::replace(path, Access::Everyone, |file| file.write_all(&bytes))?)
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
    Ok([vector("parameters")?, vector("momentum")?, vector("average")?])
}
