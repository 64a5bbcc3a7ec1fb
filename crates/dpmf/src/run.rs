//! A run of private training: the state of its steps, in one place.
//!
//! A run knows which step comes next, whose batch was handed out for it, how many contributions it has, what a mean divides by,
//! and how to release a sum. The training code only moves gradients:
//!
//! ```text
//! follow ─► hand_out ─► contribute … ─► release ─► hand_out ─► …
//!            drawn        summed         committed and released
//! ```
//!
//! Every mistake that would let one unit count more than the guarantee allows is refused here, with one sentence: more
//! contributions than the batch has members, a batch of another step, a batch that has had its step, batches of another
//! sampler, a denominator that changes, a release of nothing.

use crate::accounting::{Arithmetic, KeyOrigin, PrivacyStatement};
use crate::clip::{Clip, MOST_CONTRIBUTIONS};
use crate::disk::DiskPath;
use crate::engine::Sum;
use crate::error::{Error, Refusal, Result};
use crate::mechanism::Mechanism;
use crate::noise::{DigestKeys, DurableStream, NoiseKey, NoiseStream, RunId, SumDigest};
use crate::participation::Sampling;
use handed::Handed;
use rayon::prelude::*;
use std::ops::Range;
use std::sync::OnceLock;

mod device;
mod handed;

pub use device::FixedRow;
pub use handed::SINGLE_DIGITS;

/// How the batches of a run come.
#[derive(Clone, Debug, PartialEq)]
pub struct Order {
    /// What decides which unit is in which batch, in public words: kept with the run, and compared when it is resumed.
    pub name: String,
    /// Whether each batch belongs to a step, so that the guarantee is for it in that step only. Otherwise each unit comes once,
    /// and a batch may serve any one step.
    pub by_step: bool,
    /// Whether a sampler draws them.
    pub sampled: bool,
}

/// The batch that was handed out last.
#[derive(Clone, Copy, Debug)]
struct Batch {
    /// The step that it is for, where batches belong to steps.
    step: Option<usize>,
    /// Units in it; `None` if the number is not known.
    members: Option<usize>,
    /// Contributions that were counted against it.
    counted: usize,
    /// Whether some of these were released.
    spent: bool,
}

/// Where the noise of a run comes from.
#[allow(clippy::large_enum_variant, reason = "a run has one")]
enum Noise {
    /// A stream in memory: the run ends with its process.
    Stream(NoiseStream),
    /// A stream with a journal, which survives crashes.
    Durable(DurableStream),
}

/// A run of private training over a range of coordinates, or over several.
///
/// Guarantee: what is released is the sum of the contributions that were counted, with the next row of noise, and nothing is
/// released that the methods here refuse. A row is released with one input, across crashes too if there is a journal.
///
/// ```
/// use dpmf::accounting::Arithmetic;
/// use dpmf::mechanism::Conditions;
/// use dpmf::noise::{NoiseKey, RunId};
/// use dpmf::run::{Order, PrivateRun};
/// use dpmf::{Participation, Problem, Workload};
///
/// let problem = Problem::new(Workload::prefix_sum(8)?, Participation::Single)?;
/// let mechanism = problem.mechanism("tree".parse()?, &mut dpmf::factorize::quiet)?;
/// let mechanism = mechanism.calibrated(8.0, 1e-6, 1.0, Conditions::default())?;
/// let (key, id) = (NoiseKey::generate()?, RunId::generate()?);
/// let mut run = PrivateRun::new(&mechanism, &key, id, 0..2, 2, Arithmetic::Exact)?;
/// run.follow(Order { name: "in order".into(), by_step: true, sampled: false })?;
/// run.set_denominator(4.0)?;
///
/// run.hand_out(0, Some(1))?;
/// let mut sum = [0; 2];
/// run.contribute(1)?;
/// run.clip().add(&[3.0_f32, 4.0], &mut sum);
/// let mut released = [0.0_f32; 2];
/// assert_eq!(run.release(&mut sum, &mut released)?, 0);
/// // The same batch again would count its members twice.
/// assert_eq!(run.contribute(1).unwrap_err().kind(), "mismatch");
/// # Ok::<(), dpmf::Error>(())
/// ```
pub struct PrivateRun {
    noise: Noise,
    clip: Clip,
    sampling: Sampling,
    statement: PrivacyStatement,
    order: Option<Order>,
    /// What decided the batches when the run began, as a state remembers it.
    begun_with: Option<String>,
    /// Ranks that add up their contributions to one step.
    ranks: usize,
    batch: Option<Batch>,
    /// Contributions to the coming step; nothing if none were added, not even those of an empty batch.
    contributions: Option<usize>,
    denominator: Option<f64>,
    /// As it was at the first release.
    fixed_denominator: Option<f64>,
    /// Rows that left before their sums were known.
    handed: Handed,
    /// Made when they are first needed.
    digest_keys: OnceLock<DigestKeys>,
}

impl PrivateRun {
    /// A run in memory at its first step, over some coordinates of a model of `dimension`.
    ///
    /// Errors: a mechanism that is not calibrated; those of [`Mechanism::stream`] and [`Clip::new`].
    pub fn new(
        mechanism: &Mechanism,
        key: &NoiseKey,
        run: RunId,
        coordinates: Range<u64>,
        dimension: u64,
        arithmetic: Arithmetic,
    ) -> Result<Self> {
        Self::over(mechanism, key, run, &[coordinates], dimension, arithmetic)
    }

    /// [`PrivateRun::new`] over several ranges of coordinates, in order: sums and what is released come range after range.
    ///
    /// Errors: those of it and of [`Mechanism::stream_over`].
    pub fn over(
        mechanism: &Mechanism,
        key: &NoiseKey,
        run: RunId,
        ranges: &[Range<u64>],
        dimension: u64,
        arithmetic: Arithmetic,
    ) -> Result<Self> {
        let stream = mechanism.stream_over(key, run, ranges, arithmetic)?;
        Self::assemble(mechanism, Noise::Stream(stream), dimension)
    }

    /// The same run as one of several ranks that hold parts of the model and release each step together, with one digest of all
    /// their sums: see [`PrivateRun::release_together`]. Their journals say the same, and each opens for any of them, also where the
    /// model is cut otherwise later.
    ///
    /// Errors: a run that has a journal.
    pub fn part_of(self, dimension: u64) -> Result<Self> {
        match self.noise {
            Noise::Stream(stream) => Ok(Self { noise: Noise::Stream(stream.part_of(dimension)), ..self }),
            Noise::Durable(_) => {
                Err(Error::argument("journal", "begun", "declare the parts before the journal is begun"))
            }
        }
    }

    /// The same run, whose coming row of noise is made by so many threads of its own while the gradient is computed: see
    /// [`NoiseStream::ahead`] and [`default_threads`](crate::noise::default_threads). What is released is the same.
    pub fn noise_ahead(self, threads: usize) -> Self {
        let noise = match self.noise {
            Noise::Stream(stream) => Noise::Stream(stream.ahead(threads)),
            Noise::Durable(durable) => Noise::Durable(durable.ahead(threads)),
        };
        Self { noise, ..self }
    }

    /// The same run with a journal that begins here, bound to `plan`, a hash of everything else that decides what is released.
    ///
    /// Errors: those of [`DurableStream::create`]; a run that has a journal.
    pub fn with_journal(self, place: impl Into<DiskPath>, plan: [u8; 32]) -> Result<Self> {
        self.journalled(plan, |stream, plan| DurableStream::create(stream, place, plan))
    }

    /// The same run as its journal and, if there is one, a checkpoint left it.
    ///
    /// Errors: those of [`NoiseStream::restore_bytes`] and [`DurableStream::open`]; a run that has a journal.
    pub fn resumed(
        self,
        place: impl Into<DiskPath>,
        plan: [u8; 32],
        checkpoint: Option<&[u8]>,
    ) -> Result<Self> {
        self.journalled(plan, |stream, plan| {
            let stream = match checkpoint {
                Some(bytes) => stream.restore_bytes(bytes)?,
                None => stream,
            };
            DurableStream::open(stream, place, plan)
        })
    }

    /// The same run as its journal and the file of a checkpoint left it.
    ///
    /// Errors: those of [`NoiseStream::restore`] and [`DurableStream::open`]; a run that has a journal.
    pub fn restored(
        self,
        place: impl Into<DiskPath>,
        plan: [u8; 32],
        checkpoint: impl Into<DiskPath>,
    ) -> Result<Self> {
        self.journalled(plan, |stream, plan| DurableStream::open(stream.restore(checkpoint)?, place, plan))
    }

    /// Binds a journal to the plan, and to the ranges where there are several: its header names one.
    fn journalled(
        self,
        plan: [u8; 32],
        open: impl FnOnce(NoiseStream, [u8; 32]) -> Result<DurableStream>,
    ) -> Result<Self> {
        let plan = self.stream().bound_plan(plan);
        match self.noise {
            Noise::Stream(stream) => Ok(Self { noise: Noise::Durable(open(stream, plan)?), ..self }),
            Noise::Durable(_) => Err(Error::argument("journal", "a second one", "a run has one journal")),
        }
    }

    fn assemble(mechanism: &Mechanism, noise: Noise, dimension: u64) -> Result<Self> {
        let statement =
            mechanism.privacy().expect("a stream was made, so the mechanism is calibrated").clone();
        let clip = Clip::new(statement.calibration().terms().clip, dimension)?;
        let mut run = Self {
            noise,
            clip,
            sampling: mechanism.sampling(),
            statement,
            order: None,
            begun_with: None,
            ranks: 1,
            batch: None,
            contributions: None,
            denominator: None,
            fixed_denominator: None,
            handed: Handed::default(),
            digest_keys: OnceLock::new(),
        };
        let (origin, arithmetic) = (run.stream().key().origin(), run.stream().arithmetic());
        run.statement = run.statement.with_key(origin).with_arithmetic(arithmetic);
        Ok(run)
    }

    /// Shares the contributions of a step with other ranks, so many in all with this one.
    ///
    /// Errors: no ranks.
    pub fn with_ranks(mut self, ranks: usize) -> Result<Self> {
        if ranks == 0 {
            return Err(Error::argument("ranks", 0, "there must be at least one rank"));
        }
        self.ranks = ranks;
        Ok(self)
    }

    /// Says how batches come: before the first is handed out, and again, with the same name, when the run goes on.
    ///
    /// Errors: [`Refusal::OtherOrder`] for batches that others decide than at first; [`Refusal::NotSampled`] where the guarantee
    /// relies on sampling, and they are not drawn.
    pub fn follow(&mut self, order: Order) -> Result<()> {
        if self.sampling != Sampling::None && !order.sampled {
            return Err(self.not_sampled());
        }
        let begun = self.order.as_ref().map(|begun| &begun.name).or(self.begun_with.as_ref());
        if let Some(begun) = begun.filter(|begun| **begun != order.name) {
            return Err(Refusal::OtherOrder { given: order.name, begun: begun.clone() }.into());
        }
        self.order = Some(order);
        Ok(())
    }

    /// Takes up what a saved state kept of the run beside its noise: what decided its batches, and its denominator. Both stay as
    /// they were.
    ///
    /// Errors: those of [`PrivateRun::set_denominator`].
    pub fn recall(&mut self, order: Option<String>, denominator: Option<f64>) -> Result<()> {
        if let Some(denominator) = denominator {
            self.set_denominator(denominator)?;
            self.fixed_denominator = self.denominator;
        }
        self.begun_with = order;
        Ok(())
    }

    /// How batches are made; `None` until it is declared.
    pub fn order(&self) -> Option<&Order> {
        self.order.as_ref()
    }

    /// Hands out a batch of so many units, this rank's part. `step` is the one that it is for, and counts where batches belong to
    /// steps. Contributions that were counted before stay as they are.
    ///
    /// Errors: the order of the batches was not declared.
    pub fn hand_out(&mut self, step: usize, members: Option<usize>) -> Result<()> {
        let Some(order) = &self.order else {
            return Err(Error::argument(
                "order",
                "unknown",
                "declare the order of the batches before handing one out",
            ));
        };
        let step = order.by_step.then_some(step);
        self.batch = Some(Batch { step, members, counted: 0, spent: false });
        Ok(())
    }

    /// Counts contributions to the coming step, of the batch that was handed out last. Nothing is counted if it is refused.
    ///
    /// Errors: [`Error::Refused`], with the reason; [`Error::Exhausted`].
    pub fn contribute(&mut self, count: usize) -> Result<()> {
        let step = self.due();
        if step >= self.steps() {
            return Err(Error::Exhausted { steps: self.steps() });
        }
        let contributions = self.contributions.unwrap_or(0).saturating_add(count);
        let most = MOST_CONTRIBUTIONS / self.ranks;
        if contributions > most {
            return Err(Refusal::Overflow { contributions, most }.into());
        }
        // A step without contributions needs no batch: it releases noise alone.
        if count > 0 {
            match (&self.order, &mut self.batch) {
                (None, _) if self.sampling != Sampling::None => return Err(self.not_sampled()),
                (None, _) => {}
                (Some(_), None) => return Err(Refusal::NoBatch { step }.into()),
                (Some(_), Some(batch)) => {
                    if batch.spent {
                        return Err(Refusal::NoBatch { step }.into());
                    }
                    if let Some(drawn) = batch.step
                        && drawn != step
                    {
                        return Err(Refusal::OtherStep { drawn, step }.into());
                    }
                    let counted = batch.counted.saturating_add(count);
                    if let Some(members) = batch.members
                        && counted > members
                    {
                        return Err(Refusal::TooMany { step, contributions: counted, members }.into());
                    }
                    batch.counted = counted;
                }
            }
        }
        self.contributions = Some(contributions);
        Ok(())
    }

    fn not_sampled(&self) -> Error {
        Refusal::NotSampled { sampling: self.sampling.to_string() }.into()
    }

    /// Contributions to the coming step; nothing if none were counted since the last one.
    pub fn contributions(&self) -> Option<usize> {
        self.contributions
    }

    /// Forgets the contributions to the coming step, whose sum is forgotten too.
    pub fn clear(&mut self) {
        self.contributions = None;
        if let Some(batch) = &mut self.batch
            && !batch.spent
        {
            batch.counted = 0;
        }
    }

    /// What a mean divides by, once it is set.
    pub fn denominator(&self) -> Option<f64> {
        self.denominator
    }

    /// Says what a mean divides by: the planned size of a batch, never one that was seen.
    ///
    /// Errors: a number that is not positive and finite; [`Refusal::OtherDenominator`] after the first release.
    pub fn set_denominator(&mut self, denominator: f64) -> Result<()> {
        if !(denominator > 0.0 && denominator.is_finite()) {
            let rule = "it must be positive; use the planned batch size";
            return Err(Error::argument("denominator", denominator, rule));
        }
        if let Some(fixed) = self.fixed_denominator.filter(|fixed| *fixed != denominator) {
            return Err(Refusal::OtherDenominator { fixed, given: denominator }.into());
        }
        self.denominator = Some(denominator);
        Ok(())
    }

    /// Refuses a release that [`PrivateRun::release`] would refuse: what it can say before ranks add up their sums.
    ///
    /// Errors: [`Error::Refused`]; [`Error::Exhausted`].
    pub fn check_release(&self) -> Result<()> {
        if self.due() >= self.steps() {
            return Err(Error::Exhausted { steps: self.steps() });
        }
        if self.contributions.is_none() {
            return Err(Refusal::Nothing { step: self.due() }.into());
        }
        if self.denominator.is_none() {
            return Err(Refusal::NoDenominator.into());
        }
        if self.sampling != Sampling::None && self.order.is_none() {
            return Err(self.not_sampled());
        }
        Ok(())
    }

    /// Adds the next row of noise to the sum of the contributions, in units of [`Clip::unit`], and writes what is released: the noisy
    /// sum, not divided. The sum becomes zero. Returns the step.
    ///
    /// Cost: that of the stream, or one pass over sum, released and row where it is made ahead; one pass over the sum to check
    /// it, and one for its digest where there is a journal.
    /// Errors: those of [`PrivateRun::check_release`], and of [`DurableStream::release`]; then the sum is as it was.
    pub fn release(&mut self, sum: &mut [i64], released: &mut [f32]) -> Result<usize> {
        self.release_together(sum, released, None)
    }

    /// [`PrivateRun::release`] for one of several ranks, with the digest of the sums of all of them: [`PrivateRun::digest`] of
    /// each, added up.
    ///
    /// Errors: those of it.
    pub fn release_together(
        &mut self,
        sum: &mut [i64],
        released: &mut [f32],
        digest: Option<SumDigest>,
    ) -> Result<usize> {
        self.check_release()?;
        self.check_settled()?;
        let length = self.stream().len();
        for (name, actual) in [("sum", sum.len()), ("released", released.len())] {
            if actual != length {
                return Err(Error::WrongLength { name, actual, expected: length });
            }
        }
        // Integers below 2⁵³ times a power of two: nothing is rounded.
        let beyond = |whole: &i64| whole.unsigned_abs() > 1 << 53;
        let largest = |part: &[i64]| part.iter().fold(0, |largest, whole| whole.unsigned_abs().max(largest));
        if sum.par_chunks(CHUNK).any(|part| largest(part) > 1 << 53)
            && let Some(index) = sum.iter().position(beyond)
        {
            let rule = "it is larger than the counted contributions can add up to";
            return Err(Error::InvalidEntry { name: "sum", index, value: sum[index] as f64, rule });
        }
        let digest = match digest {
            Some(digest) => digest,
            None if self.is_durable() => self.digest(sum),
            None => [0; 2],
        };
        let whole = Sum { whole: sum, released, unit: self.clip.unit() };
        let step = match &mut self.noise {
            Noise::Stream(stream) => stream.add_sum(whole),
            Noise::Durable(durable) => durable.release_sum(whole, digest),
        }?;
        self.advance();
        Ok(step)
    }

    /// Refuses a release while rows are outstanding, whose sums come before.
    fn check_settled(&self) -> Result<()> {
        match self.outstanding().next() {
            None => Ok(()),
            Some(step) => {
                Err(Error::argument("sum", step, "the row of this step was handed over: settle it"))
            }
        }
    }

    /// Takes up that a step was released or given up.
    fn advance(&mut self) {
        self.contributions = None;
        self.fixed_denominator = self.denominator;
        if let Some(batch) = &mut self.batch {
            batch.spent |= batch.counted > 0;
        }
    }

    /// Gives up the coming step, whose contributions are lost: its noise is never used. Returns the step.
    ///
    /// Errors: those of [`DurableStream::burn`] and [`NoiseStream::skip`].
    pub fn burn(&mut self) -> Result<usize> {
        self.clear();
        match &mut self.noise {
            Noise::Stream(stream) => stream.skip(),
            Noise::Durable(durable) => durable.burn(),
        }
    }

    /// The step of the next release, zero-based; equal to [`PrivateRun::steps`] at the end.
    pub fn next_step(&self) -> usize {
        self.stream().next_step()
    }

    /// Steps in all.
    pub fn steps(&self) -> usize {
        self.stream().steps()
    }

    /// Steps in the journal, below which only a repetition or a burn is possible; those that are done without one.
    pub fn recorded_steps(&self) -> usize {
        match &self.noise {
            Noise::Stream(stream) => stream.next_step(),
            Noise::Durable(durable) => durable.recorded_steps(),
        }
    }

    /// Steps that were burned, in order; nothing is remembered of them without a journal.
    pub fn burned(&self) -> Vec<usize> {
        match &self.noise {
            Noise::Stream(_) => Vec::new(),
            Noise::Durable(durable) => durable.burned().collect(),
        }
    }

    /// Whether it has a journal, and can be resumed.
    pub fn is_durable(&self) -> bool {
        matches!(self.noise, Noise::Durable(_))
    }

    /// The noise.
    pub fn stream(&self) -> &NoiseStream {
        match &self.noise {
            Noise::Stream(stream) => stream,
            Noise::Durable(durable) => durable.stream(),
        }
    }

    /// The coordinates whose sums are released here.
    pub fn coordinates(&self) -> Range<u64> {
        self.stream().coordinates()
    }

    /// Clipping as the guarantee counts on it.
    pub fn clip(&self) -> &Clip {
        &self.clip
    }

    /// How units are sampled, as the guarantee counts on it.
    pub fn sampling(&self) -> Sampling {
        self.sampling
    }

    /// What is guaranteed, with the origin of the key and the arithmetic in use.
    pub fn privacy(&self) -> &PrivacyStatement {
        &self.statement
    }

    /// Where the key came from.
    pub fn origin(&self) -> KeyOrigin {
        self.stream().key().origin()
    }

    /// The name of the run.
    pub fn id(&self) -> RunId {
        self.stream().key().run()
    }
}

/// Numbers that a thread works on at a time: one by one they would cost more to hand out than to check.
const CHUNK: usize = 1 << 14;

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "runs take lists of ranges")]
mod tests;
