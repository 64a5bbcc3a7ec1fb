//! Programs put through many schedules of faults.

use super::{Event, Simulated};
use std::collections::BTreeMap;
use std::fmt;

/// What became of a program on disks that fail.
#[derive(Clone, Debug, Default)]
pub struct Trials {
    /// Schedules so far.
    pub schedules: u64,
    /// Lives of the program after its first.
    pub resumed: u64,
    /// How often each kind of event struck.
    pub events: BTreeMap<&'static str, u64>,
    /// How often the program refused to go on, by sentence.
    pub refusals: BTreeMap<String, u64>,
    /// Schedules after which the program could not go on though nothing failed any more.
    pub lost: Vec<String>,
    /// What a program did and must never do, such as to release a row twice, in the words of whoever watches it.
    pub wrong: Vec<String>,
}

impl Trials {
    /// Lets a program live on a disk until it is done, again and again after each failure, as its user would.
    ///
    /// A `session` is one life of it: it is done, or says why not. To say so in a life in which nothing failed is to
    /// have lost what was there.
    pub fn run(&mut self, disk: &Simulated, mut session: impl FnMut(&mut Self) -> Result<(), String>) {
        self.schedules += 1;
        let mut before = disk.counts();
        while let Err(refusal) = session(self) {
            let after = disk.counts();
            if after == before {
                self.lost.push(refusal);
                break;
            }
            self.refuse(&refusal);
            self.resumed += 1;
            before = after;
            if disk.is_stopped() {
                disk.restart();
            }
        }
        for (event, count) in disk.counts() {
            *self.events.entry(event).or_default() += count;
        }
    }

    /// Counts a refusal that did not end a life.
    pub fn refuse(&mut self, sentence: &str) {
        *self.refusals.entry(plain(sentence)).or_default() += 1;
    }
}

/// A sentence without its path and its numbers.
fn plain(sentence: &str) -> String {
    let sentence = match sentence.split_once(' ') {
        Some((path, rest)) if path.starts_with('/') => rest,
        _ => sentence,
    };
    let mut plain = String::new();
    for character in sentence.chars() {
        match character.is_ascii_digit() {
            false => plain.push(character),
            true if plain.ends_with('#') => {}
            true => plain.push('#'),
        }
    }
    plain
}

impl fmt::Display for Trials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} schedules, {} times resumed", self.schedules, self.resumed)?;
        self.events.iter().try_for_each(|(event, count)| writeln!(f, "  {count:6} {event}"))?;
        writeln!(f, "refusals")?;
        self.refusals.iter().try_for_each(|(sentence, count)| writeln!(f, "  {count:6} {sentence}"))?;
        write!(f, "lost: {}, wrong: {}", self.lost.len(), self.wrong.len())
    }
}

/// The schedules for a program of so many operations, one after the other: everything that can happen, once at each
/// operation; a failure at each, and a power loss soon after; then several events at random.
pub fn schedule(index: u64, operations: u64) -> Simulated {
    const KINDS: [Event; 5] = [Event::Fail, Event::Full(1), Event::Full(12), Event::Kill, Event::PowerLoss];
    const SOON: u64 = 32;
    let disk = Simulated::new(index);
    let (singles, pairs) = (operations * KINDS.len() as u64, operations * SOON);
    if index < singles {
        disk.schedule(index % operations, KINDS[(index / operations) as usize]);
    } else if index < singles + pairs {
        let (place, gap) = (index % operations, 1 + (index - singles) / operations);
        disk.schedule(place, Event::Fail);
        disk.schedule(place + gap, Event::PowerLoss);
    } else {
        let mut state = disk.state();
        for _ in 0..2 + state.random(4) {
            let place = state.random(2 * operations as usize) as u64;
            let event = KINDS[state.random(KINDS.len())];
            state.events.insert(place, event);
        }
    }
    disk
}
