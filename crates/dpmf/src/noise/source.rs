//! What makes the rows of a stream: segments of coordinates that move on one by one, by whichever thread takes them.
//!
//! A segment is at the step of its stream, or one ahead of it with the row of that step kept. Which of the two changes the
//! time that a release takes and none of its bits.

use super::stream::Output;
use crate::engine::exact::engine::{ExactEngine, ExactStep, Packet as Double};
use crate::engine::{
    Engine, Field, IterateStage, Kernel, PACKET, Packet, Shard, Sink, StepOf, Target, Value,
};
use crate::error::{Error, Result};
use std::sync::{Mutex, MutexGuard};

/// How the numbers of a row are computed.
pub(super) enum Motion {
    Float(Box<Float>),
    Exact(Box<ExactEngine>),
}

/// Rows in single precision.
pub(super) struct Float {
    pub(super) engine: Box<dyn Engine>,
    /// What turns gradient noise into iterate noise, where that is asked for.
    pub(super) stage: Option<IterateStage>,
    pub(super) field: Field,
}

/// What all segments of a step share.
pub(super) struct Plan<'a> {
    pub(super) step: usize,
    kind: PlanKind<'a>,
}

enum PlanKind<'a> {
    Float(Box<dyn Kernel + 'a>),
    Exact(ExactStep),
}

/// Some coordinates with their state.
pub(super) struct Segment {
    shard: Shard,
    state: State,
    /// The row that the state makes next.
    next: usize,
    /// Whether the row before that is kept.
    kept: bool,
    /// Set while the state moves: still set afterwards, it was torn.
    torn: bool,
}

enum State {
    Float { state: Vec<Packet>, stage: Vec<Packet>, row: Vec<f32> },
    Exact { state: Vec<Double>, row: Vec<f64> },
}

/// A row that is kept, before any scale.
pub(super) enum Kept<'a> {
    Float(&'a [f32]),
    Exact(&'a [f64]),
}

/// The segments of a stream.
pub(super) struct Source {
    pub(super) motion: Motion,
    scale: f32,
    segments: Vec<Mutex<Segment>>,
    /// How many coordinates each segment has.
    lengths: Vec<usize>,
}

impl Source {
    /// Segments of zeros at the first step.
    ///
    /// Errors: [`Error::Memory`].
    pub(super) fn new(motion: Motion, scale: f32, shards: &[Shard]) -> Result<Self> {
        let (buffers, stage) = (motion.buffers(), motion.stage_buffers());
        // Asked for at once, so that a state that does not fit is refused before any of it is written.
        let bytes: u128 = shards.iter().map(|shard| motion.bytes(shard)).sum();
        let whole = usize::try_from(bytes).ok().filter(|bytes| *bytes <= isize::MAX as usize);
        whole
            .and_then(|bytes| Vec::<u8>::new().try_reserve_exact(bytes).ok())
            .ok_or(Error::Memory { what: "the state of the noise stream", bytes })?;
        let mut segments = Vec::new();
        for shard in shards.iter().flat_map(Shard::segments) {
            let state = match &motion {
                Motion::Float(_) => State::Float {
                    state: shard.allocate(buffers - stage)?,
                    stage: shard.allocate(stage)?,
                    row: Vec::new(),
                },
                Motion::Exact(_) => State::Exact { state: shard.allocate(buffers)?, row: Vec::new() },
            };
            segments.push(Mutex::new(Segment { shard, state, next: 0, kept: false, torn: false }));
        }
        let lengths = segments.iter_mut().map(|segment| unpoisoned(segment).shard.len()).collect();
        Ok(Self { motion, scale, segments, lengths })
    }

    pub(super) fn plan(&self, step: usize) -> Plan<'_> {
        let kind = match &self.motion {
            Motion::Float(float) => PlanKind::Float(float.engine.kernel(&float.field, step)),
            Motion::Exact(exact) => PlanKind::Exact(exact.step(step)),
        };
        Plan { step, kind }
    }

    /// How many segments there are.
    pub(super) fn count(&self) -> usize {
        self.segments.len()
    }

    /// Takes a segment.
    ///
    /// Errors: [`Error::Halted`] where a thread that moved it has panicked.
    pub(super) fn lock(&self, index: usize) -> Result<MutexGuard<'_, Segment>> {
        match self.segments[index].lock() {
            Ok(segment) if !segment.torn => Ok(segment),
            _ => Err(torn()),
        }
    }

    /// Numbers cut into those of each segment.
    pub(super) fn cut<T: Target>(&self, values: T) -> Vec<T> {
        let mut rest = values;
        let mut parts = Vec::with_capacity(self.lengths.len());
        for length in &self.lengths {
            let (part, others) = rest.split_at(*length);
            parts.push(part);
            rest = others;
        }
        parts
    }

    /// How many coordinates each segment has.
    pub(super) fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// Moves a segment past the step of the plan, with or without a release.
    ///
    /// Errors: those of [`ExactEngine::advance`]; [`Error::Halted`]. Then nothing more comes of this segment.
    pub(super) fn advance<T: Target>(&self, index: usize, plan: &Plan<'_>, values: Option<T>) -> Result<()> {
        let mut segment = self.lock(index)?;
        let segment = &mut *segment;
        segment.torn = true;
        if segment.kept {
            assert_eq!(segment.next, plan.step + 1, "a row is kept for the coming step only");
            if let Some(mut values) = values {
                match (&self.motion, &segment.state) {
                    (Motion::Exact(exact), State::Exact { row, .. }) => {
                        exact.add_kept(plan.step, &segment.shard, row, &mut values)?;
                    }
                    (_, State::Float { row, .. }) => values.add_scaled(0, self.scale, row),
                    _ => unreachable!("a state is of its motion"),
                }
            }
            segment.kept = false;
        } else {
            assert_eq!(segment.next, plan.step, "a segment moves with its stream");
            match values {
                Some(values) => self.run(segment, plan, Taken::Values(values))?,
                None => self.run(segment, plan, Taken::<&mut [f32]>::Nothing)?,
            }
            segment.next = plan.step + 1;
        }
        segment.torn = false;
        Ok(())
    }

    /// Makes the row of the plan's step and keeps it, unless that was done; whether it is kept then.
    ///
    /// Errors: [`Error::Halted`].
    pub(super) fn keep(&self, index: usize, plan: &Plan<'_>) -> Result<bool> {
        let mut segment = self.lock(index)?;
        self.keep_in(&mut segment, plan)
    }

    /// Shows the row of the plan's step, made now if it was not; `false` where the stream has passed it, or memory is short.
    ///
    /// Errors: [`Error::Halted`].
    pub(super) fn show(&self, index: usize, plan: &Plan<'_>, show: impl FnOnce(Kept<'_>)) -> Result<bool> {
        let mut segment = self.lock(index)?;
        if !self.keep_in(&mut segment, plan)? {
            return Ok(false);
        }
        segment.kept().map(show).ok_or_else(torn)?;
        Ok(true)
    }

    fn keep_in(&self, segment: &mut Segment, plan: &Plan<'_>) -> Result<bool> {
        if segment.kept || segment.next != plan.step {
            return Ok(segment.kept && segment.next == plan.step + 1);
        }
        let length = segment.shard.len();
        let room = match &mut segment.state {
            State::Float { row, .. } => make_room(row, length),
            State::Exact { row, .. } => make_room(row, length),
        };
        if room {
            segment.torn = true;
            self.run(segment, plan, Taken::<&mut [f32]>::Row)?;
            (segment.next, segment.kept, segment.torn) = (plan.step + 1, true, false);
        }
        Ok(room)
    }

    fn run<T: Target>(&self, segment: &mut Segment, plan: &Plan<'_>, taken: Taken<T>) -> Result<()> {
        match (&self.motion, &plan.kind, &mut segment.state) {
            (Motion::Float(float), PlanKind::Float(kernel), State::Float { state, stage, row }) => {
                let work = StepOf {
                    index: plan.step,
                    kernel: &**kernel,
                    state,
                    buffers: float.engine.buffers(),
                    stage: float.stage.as_ref(),
                    stage_state: stage,
                    scale: self.scale,
                };
                segment.shard.run(work, taken.sink(row));
                Ok(())
            }
            (Motion::Exact(exact), PlanKind::Exact(step), State::Exact { state, row }) => {
                exact.advance(step, &segment.shard, state, taken.sink(row))
            }
            _ => unreachable!("a plan and a state are of their motion"),
        }
    }

    /// The states of all segments, for a stream that nobody else works on: where each stands is set too.
    pub(super) fn restore(
        &mut self,
        step: usize,
        ahead: bool,
        mut read: impl FnMut(&mut [u8]),
    ) -> Result<()> {
        let single = |bytes: &[u8]| f32::from_le_bytes(std::array::from_fn(|i| bytes[i]));
        let double = |bytes: &[u8]| f64::from_le_bytes(std::array::from_fn(|i| bytes[i]));
        let (buffers, stages) =
            (self.motion.buffers() - self.motion.stage_buffers(), self.motion.stage_buffers());
        let each = |segments: &mut [Mutex<Segment>], visit: &mut dyn FnMut(&mut Segment)| {
            segments.iter_mut().for_each(|segment| visit(unpoisoned(segment)));
        };
        for b in 0..buffers {
            each(&mut self.segments, &mut |Segment { shard, state, .. }| match state {
                State::Float { state, .. } => write_packets(shard, state, buffers, b, single, &mut read),
                State::Exact { state, .. } => write_packets(shard, state, buffers, b, double, &mut read),
            });
        }
        for b in 0..stages {
            each(&mut self.segments, &mut |Segment { shard, state, .. }| {
                if let State::Float { stage, .. } = state {
                    write_packets(shard, stage, stages, b, single, &mut read);
                }
            });
        }
        let mut room = true;
        each(&mut self.segments, &mut |segment| {
            let length = segment.shard.len();
            if ahead && room {
                match &mut segment.state {
                    State::Float { row, .. } => {
                        room = make_room(row, length);
                        write_row(row, single, &mut read);
                    }
                    State::Exact { row, .. } => {
                        room = make_room(row, length);
                        write_row(row, double, &mut read);
                    }
                }
            }
            (segment.next, segment.kept) = (step + usize::from(ahead), ahead);
        });
        if room { Ok(()) } else { Err(no_room(self.lengths.iter().sum())) }
    }

    /// Calls `visit` with the bytes of the state, little endian: buffer after buffer in the order of coordinates, the
    /// engine's, then the output's, then the row that is kept, if one is.
    ///
    /// Errors: [`Error::Halted`].
    pub(super) fn visit_state(&self, ahead: bool, mut visit: impl FnMut(&[u8])) -> Result<()> {
        let stages = self.motion.stage_buffers();
        let buffers = self.motion.buffers() - stages;
        for b in 0..buffers {
            for index in 0..self.count() {
                let segment = self.lock(index)?;
                match &segment.state {
                    State::Float { state, .. } => {
                        visit_packets(&segment.shard, state, buffers, b, &mut visit)
                    }
                    State::Exact { state, .. } => {
                        visit_packets(&segment.shard, state, buffers, b, &mut visit)
                    }
                }
            }
        }
        for b in 0..stages {
            for index in 0..self.count() {
                let segment = self.lock(index)?;
                if let State::Float { stage, .. } = &segment.state {
                    visit_packets(&segment.shard, stage, stages, b, &mut visit);
                }
            }
        }
        for index in 0..self.count() {
            if ahead {
                match self.lock(index)?.kept() {
                    Some(Kept::Float(row)) => visit_row(row, &mut visit),
                    Some(Kept::Exact(row)) => visit_row(row, &mut visit),
                    None => return Err(torn()),
                }
            }
        }
        Ok(())
    }
}

impl Segment {
    /// The row that is kept.
    pub(super) fn kept(&self) -> Option<Kept<'_>> {
        self.kept.then_some(match &self.state {
            State::Float { row, .. } => Kept::Float(row),
            State::Exact { row, .. } => Kept::Exact(row),
        })
    }
}

impl Motion {
    /// Model-sized buffers in all.
    pub(super) fn buffers(&self) -> usize {
        match self {
            Motion::Float(float) => float.engine.buffers() + self.stage_buffers(),
            Motion::Exact(exact) => exact.buffers(),
        }
    }

    fn stage_buffers(&self) -> usize {
        match self {
            Motion::Float(float) => float.stage.as_ref().map_or(0, IterateStage::buffers),
            Motion::Exact(_) => 0,
        }
    }

    /// Bytes of state of a range.
    pub(super) fn bytes(&self, shard: &Shard) -> u128 {
        match self {
            Motion::Float(_) => shard.bytes::<Packet>(self.buffers()),
            Motion::Exact(_) => shard.bytes::<Double>(self.buffers()),
        }
    }

    /// Bytes of a number.
    pub(super) fn number(&self) -> usize {
        match self {
            Motion::Float(_) => f32::BYTES,
            Motion::Exact(_) => f64::BYTES,
        }
    }

    pub(super) fn steps(&self) -> usize {
        match self {
            Motion::Float(float) => float.engine.steps(),
            Motion::Exact(exact) => exact.steps(),
        }
    }

    pub(super) fn output(&self) -> Output {
        match self {
            Motion::Float(float) if float.stage.is_some() => Output::Iterate,
            _ => Output::Gradient,
        }
    }
}

/// Where the noise of a segment goes.
enum Taken<T> {
    Nothing,
    Values(T),
    Row,
}

impl<T> Taken<T> {
    fn sink<N>(self, row: &mut [N]) -> Sink<'_, T, N> {
        match self {
            Taken::Nothing => Sink::Skip,
            Taken::Values(values) => Sink::Add(values),
            Taken::Row => Sink::Keep(row),
        }
    }
}

pub(super) fn torn() -> Error {
    Error::Halted { reason: "a panic interrupted a step; restore a checkpoint".into() }
}

pub(super) fn no_room(length: usize) -> Error {
    Error::Memory { what: "a row of noise", bytes: length as u128 * 8 }
}

fn unpoisoned(segment: &mut Mutex<Segment>) -> &mut Segment {
    segment.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn make_room<N: Copy + Default>(row: &mut Vec<N>, length: usize) -> bool {
    let room = row.len() == length || row.try_reserve_exact(length).is_ok();
    if room {
        row.resize(length, N::default());
    }
    room
}

/// Shows the numbers of a buffer, packet by packet.
fn visit_packets<V: Value>(
    shard: &Shard,
    state: &[[V; PACKET]],
    buffers: usize,
    b: usize,
    visit: &mut impl FnMut(&[u8]),
) {
    shard.places(buffers, b).for_each(|(packet, lanes)| visit_row(&state[packet][lanes], visit));
}

fn visit_row<V: Value>(row: &[V], visit: &mut impl FnMut(&[u8])) {
    let mut bytes = [0; PACKET * 8];
    for part in row.chunks(PACKET) {
        let used = &mut bytes[..part.len() * V::BYTES];
        used.chunks_exact_mut(V::BYTES).zip(part).for_each(|(to, value)| value.write(to));
        visit(used);
    }
}

/// Takes the numbers of a buffer in the order of [`visit_packets`].
fn write_packets<V: Value>(
    shard: &Shard,
    state: &mut [[V; PACKET]],
    buffers: usize,
    b: usize,
    number: impl Fn(&[u8]) -> V,
    read: &mut impl FnMut(&mut [u8]),
) {
    shard.places(buffers, b).for_each(|(packet, lanes)| write_row(&mut state[packet][lanes], &number, read));
}

fn write_row<V: Value>(row: &mut [V], number: impl Fn(&[u8]) -> V, read: &mut impl FnMut(&mut [u8])) {
    let mut bytes = [0; PACKET * 8];
    for part in row.chunks_mut(PACKET) {
        let used = &mut bytes[..part.len() * V::BYTES];
        read(used);
        part.iter_mut().zip(used.chunks_exact(V::BYTES)).for_each(|(to, bytes)| *to = number(bytes));
    }
}
