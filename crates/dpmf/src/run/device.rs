//! A step whose sum stays on the devices that made it: they are given the row of noise, add it and round with integers, and
//! hand back a digest of the sum and the few coordinates that are too close to a tie.

use super::{Noise, PrivateRun, SINGLE_DIGITS};
use crate::error::{Error, Result};
use crate::noise::{ComingRow, DIGEST_BLOCK, DigestKeys, SumDigest};

/// How a row of whole numbers `W` is added to a sum `S`: `T = S·2^lift + W`, and what is released is `⌊T/2^shift⌉` times the grid.
///
/// Where `T` is within `doubt` of an odd multiple of `2^(shift−1)`, only the run can tell:
/// [`PrivateRun::release_elsewhere`].
///
/// Guarantee: nothing overflows in 64 bits for `|S| ≤ 2⁵³`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FixedRow {
    /// Binary digits of the row below the unit of a sum.
    pub lift: u32,
    /// Binary digits of the row below the grid.
    pub shift: u32,
    /// Distance from a tie that needs more digits.
    pub doubt: i64,
    /// What one stands for in a release.
    pub grid: f64,
}

impl PrivateRun {
    /// How the coming row of noise is added on a device.
    ///
    /// Errors: [`Error::Unsupported`] in float arithmetic, and for noise so small or so large beside the clip that integers of 64
    /// bits do not hold both; [`Error::Exhausted`].
    pub fn fixed_row(&self) -> Result<FixedRow> {
        let step = self.next_step();
        if step >= self.steps() {
            return Err(Error::Exhausted { steps: self.steps() });
        }
        let stream = self.stream();
        match (stream.fixed_point(self.sum_exponent()), stream.grid()) {
            (Some(fixed), Some(grid)) => {
                let (lift, shift, doubt) = (fixed.lift, fixed.shift, fixed.doubt(step));
                Ok(FixedRow { lift, shift, doubt, grid })
            }
            _ => Err(Error::Unsupported {
                what: "noise of this size in 64-bit integers".into(),
                hint: "it is too small or too large relative to the clip, or not exact; release the sum itself",
            }),
        }
    }

    /// The coming row of noise, to be shipped to devices, possibly by another thread.
    ///
    /// Errors: [`Error::Exhausted`]; [`Error::Halted`].
    pub fn coming_row(&self) -> Result<ComingRow> {
        let unit = self.sum_exponent();
        self.stream().coming_row(unit, unit + SINGLE_DIGITS)
    }

    /// Releases a step whose sum lies elsewhere: `digest` is that of the sum, which a run with a journal needs, and `doubtful` are
    /// coordinates with their sums that are in doubt. Returns the step, and what each of these becomes in units of the grid.
    ///
    /// Nothing of the step may leave the program before.
    ///
    /// Errors: those of [`PrivateRun::check_release`] and of [`DurableStream::release`](crate::noise::DurableStream::release); a
    /// digest that is missing; a step that [needs its sum](PrivateRun::needs_sum).
    pub fn release_elsewhere(
        &mut self,
        digest: Option<SumDigest>,
        doubtful: &[(u64, i64)],
    ) -> Result<(usize, Vec<i64>)> {
        self.check_release()?;
        self.check_settled()?;
        if self.needs_sum() {
            return Err(Error::argument(
                "sum",
                "elsewhere",
                "the journal has a digest of this step that only the sum itself can confirm",
            ));
        }
        let (step, unit) = (self.next_step(), self.clip.unit());
        let resolve =
            |(coordinate, sum): &(u64, i64)| self.stream().resolve_sum(step, *coordinate, *sum, unit);
        let resolved = doubtful.iter().map(resolve).collect::<Result<_>>()?;
        let step = match (&mut self.noise, digest) {
            (Noise::Stream(stream), _) => stream.skip(),
            (Noise::Durable(durable), Some(digest)) => durable.commit_sum(digest),
            (Noise::Durable(_), None) => {
                Err(Error::argument("digest", "none", "a run with a journal needs a digest of every sum"))
            }
        }?;
        self.advance();
        Ok((step, resolved))
    }

    /// Whether the coming step can be repeated only with the sum itself: a journal of version 0.2 has it.
    pub fn needs_sum(&self) -> bool {
        match &self.noise {
            Noise::Stream(_) => false,
            Noise::Durable(durable) => durable.begun_by_values(),
        }
    }

    /// The digest of sums at the coordinates of this run.
    pub fn digest(&self, sum: &[i64]) -> SumDigest {
        self.digest_keys().digest(self.stream().ranges(), sum)
    }

    /// Keys of the two hashes of a digest for every place of a block of coordinates, for devices; as secret as the key.
    pub fn digest_places(&self) -> &[[u64; 2]] {
        self.digest_keys().places()
    }

    /// Keys of the two hashes for a block: coordinates `2¹⁴b` to `2¹⁴(b + 1)`.
    pub fn digest_block(&self, b: u64) -> [u64; 2] {
        self.digest_keys().block(b)
    }

    /// Coordinates of a block.
    pub const DIGEST_BLOCK: usize = DIGEST_BLOCK;

    fn digest_keys(&self) -> &DigestKeys {
        self.digest_keys.get_or_init(|| DigestKeys::new(self.stream().key()))
    }

    /// The unit of sums is this power of two.
    pub(super) fn sum_exponent(&self) -> i32 {
        self.clip.unit().log2().round() as i32
    }
}
