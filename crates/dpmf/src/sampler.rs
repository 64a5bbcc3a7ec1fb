//! Samplers draw in secret who takes part in which step, as the privacy curve assumes.
//!
//! Format 1, which fixes every draw. Key, run and sampling give two secrets. Under the first, a unit `u` is dealt into one
//! of `g` parts by the first 8 bytes `w` of `AES(u ‖ i ‖ "part")`, `i = 0, 1, …`: the first `w` below the largest multiple
//! of `g` up to 2⁶⁴ counts, modulo `g`; into the bins of epoch `e` that are drawn anew, likewise by `AES(u ‖ e ‖ i ‖ "bins")`, of 4
//! bytes each. Under the second, every step has a key as the rows of [`noise::field`] have, and
//! the coin of `u` is the first 8 bytes of `AES(u)`. All integers are little endian.
//!
//! [`noise::field`]: crate::noise::field

use crate::accounting::KeyOrigin;
use crate::engine::field::{RowKeys, row_cipher};
use crate::error::{Error, Refusal, Result};
use crate::noise::{Fingerprint, NoiseKey, RunId};
use crate::participation::Sampling;
use aes::cipher::{Array, BlockCipherEncrypt, KeyInit};
use aes::{Aes256, Block};
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use zeroize::Zeroizing;

/// Version of the map from keys to draws; a change of any draw is a new version.
pub const SAMPLER_FORMAT: u32 = 1;

/// Blocks encrypted at a time: whole batches for ciphers that take 8 or 30 side by side.
const BATCH: usize = 120;

/// Draws the members of every step.
///
/// Its draws must stay as secret as the noise: against anyone who knows them, only the guarantee without sampling holds. It
/// is a pure function of key, run, sampling, unit and step, so that a run resumes at any step, a unit that joins or leaves
/// moves no other, and threads and platforms do not matter. It is wiped when dropped.
///
/// Guarantee: parts are exactly uniform and coins show a probability of `⌊q·2⁶⁴⌋/2⁶⁴ ≤ q`, all independent of one another and
/// of the noise under the same key, up to the advantage of breaking AES-256 and HMAC-SHA-256.
///
/// ```
/// use dpmf::noise::{NoiseKey, RunId};
/// use dpmf::Sampler;
///
/// // 10 epochs of 60 000 examples in 60 bins: batches of 1000, more or less, that keep their members.
/// let (key, run) = (NoiseKey::generate()?, RunId::generate()?);
/// let sampler = Sampler::new(&key, run, "balls-in-bins:60".parse()?, 60_000, 600)?;
/// assert_eq!(sampler.expected_batch(), 1000.0);
/// assert_eq!(sampler.members(7)?, sampler.members(67)?);
/// # Ok::<(), dpmf::Error>(())
/// ```
pub struct Sampler {
    coins: Coins,
    units: usize,
    steps: usize,
    /// The parts of the epoch that was asked for last: always the same but for bins that are drawn anew.
    deal: Mutex<Deal>,
    origin: KeyOrigin,
    fingerprint: Fingerprint,
    run: RunId,
    /// The run of training that it draws for, once there is one.
    bound: Option<RunId>,
}

impl Sampler {
    /// The sampler of one run.
    ///
    /// Cost: a block of AES and four bytes a unit, twelve while it is made.
    /// Errors: [`Sampling::None`], parameters outside their domain, no steps, no units or more than 2³² − 1;
    /// [`Error::Memory`].
    pub fn new(key: &NoiseKey, run: RunId, sampling: Sampling, units: usize, steps: usize) -> Result<Self> {
        let coins = Coins::new(key, run, sampling)?;
        if units == 0 || units > u32::MAX as usize {
            return Err(Error::argument("units", units, "it must lie between 1 and 2³² − 1"));
        }
        if steps == 0 {
            return Err(Error::argument("steps", 0, "at least one step is needed"));
        }
        let deal = Mutex::new(Deal::new(&coins, units as u32, steps, 0)?);
        let (origin, fingerprint) = (key.origin(), key.fingerprint());
        Ok(Self { coins, units, steps, deal, origin, fingerprint, run, bound: None })
    }

    /// The parts of an epoch.
    fn dealt(&self, epoch: u32) -> Result<MutexGuard<'_, Deal>> {
        // What a thread that panicked left behind is whole: it is replaced in one piece.
        let mut deal = self.deal.lock().unwrap_or_else(PoisonError::into_inner);
        if deal.epoch != epoch {
            *deal = Deal::new(&self.coins, self.units as u32, self.steps, epoch)?;
        }
        Ok(deal)
    }

    /// The units that take part in a step, in order; there may be none.
    ///
    /// Cost: a block of AES for each unit of the part whose turn it is; a copy for balls in bins; a block for each unit at the
    /// first step of an epoch that is asked for, where bins are drawn anew.
    /// Errors: a step past the last; [`Error::Memory`].
    pub fn members(&self, step: usize) -> Result<Vec<u32>> {
        if step >= self.steps {
            return Err(Error::argument("step", step, "it must be below the number of steps"));
        }
        let part = self.coins.part_at(step) as usize;
        let deal = self.dealt(self.coins.epoch_at(step))?;
        let candidates = &deal.units[deal.starts[part]..deal.starts[part + 1]];
        Ok(self.coins.taken(step, candidates))
    }

    /// The steps in which one unit takes part, in order.
    ///
    /// Errors: a unit past the last.
    pub fn turns(&self, unit: usize) -> Result<Vec<usize>> {
        if unit >= self.units {
            return Err(Error::argument("unit", unit, "it must be below the number of units"));
        }
        Ok(self.coins.turns(unit as u32, self.steps))
    }

    /// Draws for one run of training, and for no other: two that share their secret batches are not independent, which is what
    /// composing their guarantees supposes.
    ///
    /// Errors: [`Refusal::SamplerInUse`].
    pub fn bind(&mut self, run: RunId) -> Result<()> {
        match self.bound {
            Some(bound) if bound != run => {
                Err(Refusal::SamplerInUse { bound: bound.to_string(), run: run.to_string() }.into())
            }
            _ => {
                self.bound = Some(run);
                Ok(())
            }
        }
    }

    /// Mean number of members of a step, what a mean divides by: `N q/g` or `N/b`, fixed in advance and public.
    pub fn expected_batch(&self) -> f64 {
        expected_batch(self.coins.sampling, self.units)
    }

    /// How it samples.
    pub fn sampling(&self) -> Sampling {
        self.coins.sampling
    }

    /// Number of units.
    pub fn units(&self) -> usize {
        self.units
    }

    /// Number of steps.
    pub fn steps(&self) -> usize {
        self.steps
    }

    /// Where the key came from.
    pub fn origin(&self) -> KeyOrigin {
        self.origin
    }

    /// Fingerprint of the key.
    pub fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    /// The run that it belongs to.
    pub fn run(&self) -> RunId {
        self.run
    }
}

/// What is public of it.
impl fmt::Debug for Sampler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { units, steps, run, .. } = self;
        write!(f, "Sampler({}, {units} units, {steps} steps, run {run})", self.sampling())
    }
}

/// Mean number of members of a step among so many units; all of them without sampling.
pub fn expected_batch(sampling: Sampling, units: usize) -> f64 {
    let units = units as f64;
    match sampling {
        Sampling::None => units,
        Sampling::CyclicPoisson { bands, rate } => units * rate / bands as f64,
        Sampling::BallsInBins { bins } | Sampling::ReshuffledBins { bins } => units / bins as f64,
    }
}

/// Units by parts, in an epoch.
struct Deal {
    epoch: u32,
    /// Units of the first part in order, then of the second, and so on; of parts whose turn comes.
    units: Zeroizing<Vec<u32>>,
    /// Where each of these parts begins, and where the last ends.
    starts: Vec<usize>,
}

impl Deal {
    /// Errors: [`Error::Memory`].
    fn new(coins: &Coins, units: u32, steps: usize, epoch: u32) -> Result<Self> {
        let turns = usize::try_from(coins.parts).unwrap_or(usize::MAX).min(steps);
        let (mut parts, mut dealt, mut starts) = (Zeroizing::new(vec![]), Zeroizing::new(vec![]), vec![]);
        reserve(&mut parts, units as usize)?;
        reserve(&mut starts, turns.saturating_add(1))?;
        starts.resize(turns + 1, 0_usize);
        coins.parts_of(units, epoch, &mut |part| {
            // A part whose turn never comes is one more, and forgotten.
            let part = usize::try_from(part).unwrap_or(usize::MAX).min(turns);
            parts.push(part);
            if part < turns {
                starts[part + 1] += 1;
            }
        });
        for part in 0..turns {
            starts[part + 1] += starts[part];
        }
        reserve(&mut dealt, starts[turns])?;
        dealt.resize(starts[turns], 0);
        let mut next = starts.clone();
        for (unit, &part) in parts.iter().enumerate().filter(|(_, part)| **part < turns) {
            dealt[next[part]] = unit as u32;
            next[part] += 1;
        }
        Ok(Self { epoch, units: dealt, starts })
    }
}

/// The draws themselves, for any unit and step.
pub(crate) struct Coins {
    sampling: Sampling,
    parts: u64,
    /// Coins below it say yes; nothing where they all do.
    limit: Option<u64>,
    dealer: Aes256,
    steps: RowKeys,
}

impl Coins {
    /// Errors: [`Sampling::None`]; parameters outside their domain.
    pub(crate) fn new(key: &NoiseKey, run: RunId, sampling: Sampling) -> Result<Self> {
        let (name, parts, rate) = match sampling {
            Sampling::None => {
                return Err(Error::argument(
                    "sampling",
                    sampling,
                    "without sampling there is nothing to draw; the order is up to you",
                ));
            }
            Sampling::CyclicPoisson { bands, rate } => ("bands", bands, rate),
            Sampling::BallsInBins { bins } | Sampling::ReshuffledBins { bins } => ("bins", bins, 1.0),
        };
        if parts == 0 {
            return Err(Error::argument(name, parts, "it must be at least 1"));
        }
        if !(rate > 0.0 && rate <= 1.0) {
            return Err(Error::argument("rate", rate, "it must be a probability in (0, 1]"));
        }
        // Times a power of two is exact; the cast rounds down, and so towards more privacy.
        let limit = (rate < 1.0).then_some((rate * 2.0_f64.powi(64)) as u64);
        let dealer = Aes256::new((&*key.sampling(sampling, run, "parts")).into());
        let steps = RowKeys::of(&key.sampling(sampling, run, "coins"));
        Ok(Self { sampling, parts: parts as u64, limit, dealer, steps })
    }

    /// The part whose turn it is.
    fn part_at(&self, step: usize) -> u64 {
        step as u64 % self.parts
    }

    /// The epoch that a step is in, where parts are drawn anew in every epoch; else they are those of the first.
    fn epoch_at(&self, step: usize) -> u32 {
        match self.sampling {
            // Beyond 2³² epochs draws would repeat, far beyond what any run has steps for.
            Sampling::ReshuffledBins { .. } => u32::try_from(step as u64 / self.parts).unwrap_or(u32::MAX),
            _ => 0,
        }
    }

    /// The part of one unit in an epoch.
    pub(crate) fn part(&self, unit: u32, epoch: u32) -> u64 {
        let mut block = self.dealing(unit, epoch, 0);
        self.dealer.encrypt_block(&mut block);
        self.accepted(unit, epoch, &block)
    }

    /// What is encrypted to deal a unit.
    fn dealing(&self, unit: u32, epoch: u32, attempt: u32) -> Block {
        let mut block = Block::default();
        block[..4].copy_from_slice(&unit.to_le_bytes());
        block[4..8].copy_from_slice(&epoch.to_le_bytes());
        block[8..12].copy_from_slice(&attempt.to_le_bytes());
        let anew = matches!(self.sampling, Sampling::ReshuffledBins { .. });
        block[12..].copy_from_slice(if anew { b"bins" } else { b"part" });
        block
    }

    /// The parts of the first `units` in an epoch, in order.
    fn parts_of(&self, units: u32, epoch: u32, take: &mut dyn FnMut(u64)) {
        let mut first = 0;
        while first < units {
            let count = (units - first).min(BATCH as u32);
            let mut blocks: [Block; BATCH] =
                std::array::from_fn(|i| self.dealing(first.wrapping_add(i as u32), epoch, 0));
            let blocks = &mut blocks[..count as usize];
            self.dealer.encrypt_blocks(blocks);
            for (unit, block) in (first..).zip(blocks.iter()) {
                take(self.accepted(unit, epoch, block));
            }
            first += count;
        }
    }

    /// The part that a unit's first block names, or the next that is accepted.
    fn accepted(&self, unit: u32, epoch: u32, first: &Block) -> u64 {
        // 2⁶⁴ mod g words too many would favour the first parts.
        let excess = (u64::MAX % self.parts + 1) % self.parts;
        let mut word = word(first);
        let mut attempt = 0_u32;
        while word > u64::MAX - excess {
            attempt += 1;
            let mut block = self.dealing(unit, epoch, attempt);
            self.dealer.encrypt_block(&mut block);
            word = self::word(&block);
        }
        word % self.parts
    }

    /// Those of the candidates, in order, whose coins say yes.
    fn taken(&self, step: usize, candidates: &[u32]) -> Vec<u32> {
        let Some(limit) = self.limit else { return candidates.to_vec() };
        let cipher = row_cipher(&self.steps, step as u64);
        let mut taken = Vec::new();
        for units in candidates.chunks(BATCH) {
            let mut blocks = [Block::default(); BATCH];
            let blocks = &mut blocks[..units.len()];
            for (block, unit) in blocks.iter_mut().zip(units) {
                *block = Array(u128::from(*unit).to_le_bytes());
            }
            cipher.encrypt_blocks(blocks);
            let drawn = units.iter().zip(blocks.iter()).filter(|(_, block)| word(block) < limit);
            taken.extend(drawn.map(|(unit, _)| *unit));
        }
        taken
    }

    /// The steps in which one unit takes part, in order.
    pub(crate) fn turns(&self, unit: u32, steps: usize) -> Vec<usize> {
        if let Sampling::ReshuffledBins { .. } = self.sampling {
            let mut turns = Vec::new();
            for start in (0..steps).step_by(usize::try_from(self.parts).unwrap_or(usize::MAX)) {
                let part = usize::try_from(self.part(unit, self.epoch_at(start))).unwrap_or(usize::MAX);
                turns.extend(start.checked_add(part).filter(|step| *step < steps));
            }
            return turns;
        }
        let Ok(part) = usize::try_from(self.part(unit, 0)) else { return vec![] };
        let stride = usize::try_from(self.parts).unwrap_or(usize::MAX);
        (part..steps).step_by(stride).filter(|&step| !self.taken(step, &[unit]).is_empty()).collect()
    }
}

fn word(block: &Block) -> u64 {
    let (low, _) = block.split_at(8);
    low.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte))
}

fn reserve<T>(vector: &mut Vec<T>, length: usize) -> Result<()> {
    let bytes = length as u128 * size_of::<T>() as u128;
    vector.try_reserve_exact(length).map_err(|_| Error::Memory { what: "a sampler", bytes })
}

#[cfg(test)]
mod tests;
