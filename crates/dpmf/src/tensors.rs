//! Named tensors, and a header beside them in one safetensors file, sealed by a hash.

use crate::error::{Error, Result};
use safetensors::SafeTensorError;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, HashMap};

/// The only metadata key; one key, since the order of several is not fixed in the container.
const KEY: &str = "dpmf";

/// Numbers with a shape.
#[derive(Clone, Debug, PartialEq)]
struct Tensor {
    shape: Vec<usize>,
    dtype: Dtype,
    bytes: Vec<u8>,
}

/// Tensors by name.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tensors(BTreeMap<String, Tensor>);

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sealed {
    sha256: String,
    header: Box<RawValue>,
}

impl Tensors {
    pub(crate) fn put_f64(&mut self, name: &str, shape: &[usize], values: impl IntoIterator<Item = f64>) {
        let bytes = values.into_iter().flat_map(f64::to_le_bytes).collect();
        self.0.insert(name.to_owned(), Tensor { shape: shape.to_vec(), dtype: Dtype::F64, bytes });
    }

    /// Stores values that are on the f32 grid already.
    pub(crate) fn put_f32(&mut self, name: &str, shape: &[usize], values: impl IntoIterator<Item = f64>) {
        let bytes = values.into_iter().flat_map(|x| (x as f32).to_le_bytes()).collect();
        self.0.insert(name.to_owned(), Tensor { shape: shape.to_vec(), dtype: Dtype::F32, bytes });
    }

    /// Removes a tensor, of either precision, and checks its shape; `None` in `shape` fits any length.
    pub(crate) fn take(&mut self, name: &str, shape: &[Option<usize>]) -> Result<(Vec<usize>, Vec<f64>)> {
        let tensor = self.0.remove(name).ok_or_else(|| damaged(format!("tensor {name} is missing")))?;
        let fits = tensor.shape.len() == shape.len()
            && tensor.shape.iter().zip(shape).all(|(actual, wanted)| wanted.is_none_or(|w| w == *actual));
        if !fits {
            return Err(damaged(format!("tensor {name} has shape {:?}, which does not fit", tensor.shape)));
        }
        let values = match tensor.dtype {
            Dtype::F64 => tensor.bytes.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b)).collect(),
            Dtype::F32 => {
                tensor.bytes.as_chunks().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect()
            }
            other => {
                return Err(damaged(format!("tensor {name} has type {other:?}, but f32 or f64 is needed")));
            }
        };
        Ok((tensor.shape, values))
    }

    /// Shows name, type, shape and content of every tensor, in the order of names: one layout for all hashes.
    pub(crate) fn fields(&self, show: &mut dyn FnMut(&[u8])) {
        for (name, tensor) in &self.0 {
            show(name.as_bytes());
            show(tensor.dtype.to_string().as_bytes());
            let shape: Vec<u8> = tensor.shape.iter().flat_map(|&n| (n as u64).to_le_bytes()).collect();
            show(&shape);
            show(&tensor.bytes);
        }
    }

    /// Changes the numbers of one tensor, for tests of what a forged file can do.
    #[cfg(test)]
    pub(crate) fn tamper(&mut self, which: usize, change: &mut dyn FnMut(&mut [f64])) {
        let names: Vec<String> =
            self.0.iter().filter(|(_, t)| !t.bytes.is_empty()).map(|(name, _)| name.clone()).collect();
        let name = &names[which % names.len()];
        let tensor = self.0[name].clone();
        let dimensions: Vec<Option<usize>> = tensor.shape.iter().map(|_| None).collect();
        if let Ok((shape, mut values)) = self.take(name, &dimensions) {
            change(&mut values);
            match tensor.dtype {
                Dtype::F32 => self.put_f32(name, &shape, values),
                _ => self.put_f64(name, &shape, values),
            }
        }
    }

    /// Keeps the first rows of every tensor that has a row for each of some steps, for tests of shorter runs.
    #[cfg(test)]
    pub(crate) fn shorten(&mut self, steps: usize, to: usize) {
        for tensor in self.0.values_mut().filter(|tensor| tensor.shape.first() == Some(&steps)) {
            tensor.bytes.truncate(tensor.bytes.len() / steps * to);
            tensor.shape[0] = to;
        }
    }

    pub(crate) fn contains(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// Refuses what nobody asked for.
    pub(crate) fn finish(self) -> Result<()> {
        match self.0.keys().next() {
            Some(name) => Err(damaged(format!("tensor {name} is not expected here"))),
            None => Ok(()),
        }
    }
}

/// SHA-256 over the header and every tensor with its name, type and shape.
fn digest(header: &str, tensors: &Tensors) -> [u8; 32] {
    let mut hash = Sha256::new();
    let mut field = |bytes: &[u8]| {
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    field(header.as_bytes());
    tensors.fields(&mut field);
    hash.finalize().into()
}

/// Writes header and tensors; the same input gives the same bytes.
pub(crate) fn write(header: &str, tensors: &Tensors) -> Result<Vec<u8>> {
    let raw = RawValue::from_string(header.to_owned()).map_err(|error| damaged(error.to_string()))?;
    let sealed = Sealed { sha256: hex(&digest(header, tensors)), header: raw };
    let text = serde_json::to_string(&sealed).map_err(|error| damaged(error.to_string()))?;
    let views = tensors
        .0
        .iter()
        .map(|(name, t)| Ok((name, TensorView::new(t.dtype, t.shape.clone(), &t.bytes)?)))
        .collect::<Result<Vec<_>, SafeTensorError>>()
        .map_err(|error| damaged(error.to_string()))?;
    safetensors::serialize(views, Some(HashMap::from([(KEY.to_owned(), text)])))
        .map_err(|error| damaged(error.to_string()))
}

/// What a file holds.
pub(crate) struct Contents {
    pub(crate) header: String,
    pub(crate) tensors: Tensors,
    /// The hash over both.
    pub(crate) sha256: [u8; 32],
    /// Whether that is what the file states.
    pub(crate) intact: bool,
}

/// What is wrong with bytes that are no safetensors file, or a part of one.
fn unread(error: SafeTensorError) -> Error {
    use SafeTensorError::{
        HeaderTooLarge, HeaderTooSmall, InvalidHeader, InvalidHeaderDeserialization, InvalidHeaderLength,
    };
    damaged(match error {
        HeaderTooSmall
        | HeaderTooLarge
        | InvalidHeader(_)
        | InvalidHeaderLength
        | InvalidHeaderDeserialization(_) => "it is not a complete safetensors file".into(),
        other => format!("it is damaged: {other}"),
    })
}

/// Reads header text and tensors. Whether they are intact is for the caller to ask, who knows the version.
pub(crate) fn read(bytes: &[u8]) -> Result<Contents> {
    let (_, metadata) = SafeTensors::read_metadata(bytes).map_err(unread)?;
    let text = metadata
        .metadata()
        .as_ref()
        .and_then(|entries| entries.get(KEY))
        .ok_or_else(|| damaged("it is a safetensors file, but dpmf did not write it".into()))?;
    let sealed: Sealed =
        serde_json::from_str(text).map_err(|error| damaged(format!("bad header: {error}")))?;
    let file = SafeTensors::deserialize(bytes).map_err(unread)?;
    let tensors = Tensors(
        file.iter()
            .map(|(name, view)| {
                let tensor =
                    Tensor { shape: view.shape().to_vec(), dtype: view.dtype(), bytes: view.data().to_vec() };
                (name.to_owned(), tensor)
            })
            .collect(),
    );
    let header = sealed.header.get().to_owned();
    let sha256 = digest(&header, &tensors);
    Ok(Contents { header, tensors, sha256, intact: hex(&sha256) == sealed.sha256 })
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// A file, or bytes in memory, that is not what it should be.
pub(crate) fn damaged(reason: String) -> Error {
    Error::Format { path: "<memory>".into(), reason }
}
