//! What a file of a stream belongs to: one run of one mechanism under one key, and one range of coordinates.

use super::key::RunId;
use super::stream::NoiseStream;
use crate::disk::{Fields, Layout};
use crate::engine::FIELD_FORMAT;
use crate::engine::exact::field::EXACT_FIELD_FORMAT;
use crate::error::{Error, Result};
use std::path::Path;

/// Bytes of a binding.
pub(crate) const BINDING: usize = 4 + 32 + 16 + 16 + 3 * 8 + 4 * 4;

/// Stands for no grid.
const NO_GRID: i32 = i32::MIN;

/// The public names under which a stream's files are kept; it holds no secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Binding {
    field_format: u32,
    mechanism: [u8; 32],
    run: [u8; 16],
    fingerprint: [u8; 16],
    start: u64,
    end: u64,
    steps: u64,
    /// Gradient or iterate.
    output: u32,
    buffers: u32,
    scale: u32,
    /// Exponent of the grid that releases are rounded to; none in single precision.
    grid: i32,
}

impl Binding {
    pub(crate) fn of(stream: &NoiseStream) -> Self {
        let (key, coordinates) = (stream.key(), stream.bound());
        Self {
            field_format: stream.field_format(),
            mechanism: key.mechanism().0,
            run: key.run().0,
            fingerprint: key.fingerprint().0,
            start: coordinates.start,
            end: coordinates.end,
            steps: stream.steps() as u64,
            output: stream.output().code(),
            buffers: stream.buffers() as u32,
            scale: stream.scale().to_bits(),
            grid: stream.grid_exponent().unwrap_or(NO_GRID),
        }
    }

    pub(crate) fn run(&self) -> RunId {
        RunId(self.run)
    }

    pub(crate) fn write(&self, layout: &mut Layout) {
        layout.push(&self.field_format.to_le_bytes());
        layout.push(&self.mechanism);
        layout.push(&self.run);
        layout.push(&self.fingerprint);
        [self.start, self.end, self.steps].into_iter().for_each(|number| layout.push_number(number));
        [self.output, self.buffers, self.scale].iter().for_each(|word| layout.push(&word.to_le_bytes()));
        layout.push(&self.grid.to_le_bytes());
    }

    pub(crate) fn read(fields: &mut Fields<'_>) -> Self {
        let word = |fields: &mut Fields<'_>| u32::from_le_bytes(fields.take());
        Self {
            field_format: word(fields),
            mechanism: fields.take(),
            run: fields.take(),
            fingerprint: fields.take(),
            start: fields.number(),
            end: fields.number(),
            steps: fields.number(),
            output: word(fields),
            buffers: word(fields),
            scale: word(fields),
            grid: i32::from_le_bytes(fields.take()),
        }
    }

    /// Refuses a file that belongs to another stream than `self`, and says in what they differ.
    pub(crate) fn check(&self, found: &Self, path: &Path) -> Result<()> {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let range = |binding: &Self| format!("{}..{}", binding.start, binding.end);
        let output = |binding: &Self| match binding.output {
            0 => "gradient".to_string(),
            _ => "iterate".to_string(),
        };
        let scale = |binding: &Self| f32::from_bits(binding.scale).to_string();
        let arithmetic = |binding: &Self| match binding.field_format {
            FIELD_FORMAT => "float".to_string(),
            EXACT_FIELD_FORMAT => "exact".to_string(),
            other => format!("of field format {other}"),
        };
        let grid = |binding: &Self| format!("2^{}", binding.grid);
        let fields: [(&'static str, String, String); 10] = [
            ("arithmetic", arithmetic(self), arithmetic(found)),
            ("key", hex(&self.fingerprint), hex(&found.fingerprint)),
            ("mechanism", hex(&self.mechanism), hex(&found.mechanism)),
            ("run", hex(&self.run), hex(&found.run)),
            ("range of coordinates", range(self), range(found)),
            ("number of steps", self.steps.to_string(), found.steps.to_string()),
            ("output", output(self), output(found)),
            ("number of buffers", self.buffers.to_string(), found.buffers.to_string()),
            ("scale", scale(self), scale(found)),
            ("grid", grid(self), grid(found)),
        ];
        match fields.into_iter().find(|(_, expected, found)| expected != found) {
            Some((what, expected, found)) => Err(Error::Binding { path: path.into(), what, expected, found }),
            None => Ok(()),
        }
    }
}
