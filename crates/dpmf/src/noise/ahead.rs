//! Threads that make the next row of a stream while its owner computes a gradient.
//!
//! Noise does not depend on the data, so the row of the coming step can be made before its sum is there. The threads take
//! segment after segment and keep its row; a release adds what is kept, and makes for itself what is not. So it never waits
//! for more than a segment, and a row that nobody had time to make ahead costs what it costs without these threads.

use super::source::Source;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

/// Most threads that draw for one stream by default: beyond that memory is the limit.
const MOST_THREADS: usize = 16;

/// Coordinates from which on a row ahead is worth a thread by default: half a millisecond of drawing.
const WORTH_A_THREAD: u64 = 1 << 15;

/// How many threads draw noise ahead by default: half of the machine's, since the others compute gradients; none where a row
/// takes less time than to wake a thread.
///
/// ```
/// assert_eq!(dpmf::noise::default_threads(1000), 0);
/// assert!((1..=16).contains(&dpmf::noise::default_threads(1 << 20)));
/// ```
pub fn default_threads(coordinates: u64) -> usize {
    match coordinates < WORTH_A_THREAD {
        true => 0,
        false => thread::available_parallelism().map_or(1, |count| count.get() / 2).clamp(1, MOST_THREADS),
    }
}

/// The threads of one stream; they end when it is dropped.
pub(super) struct Workers {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// Threads do not survive a fork, and nobody can wait for them in the child.
    process: u32,
}

#[derive(Default)]
struct Shared {
    control: Mutex<Control>,
    wake: Condvar,
}

#[derive(Default)]
struct Control {
    stopped: bool,
    round: Option<Arc<Round>>,
}

/// The segments of one step, to be taken one after the other.
struct Round {
    step: usize,
    cursor: AtomicUsize,
    over: AtomicBool,
}

impl Workers {
    /// So many threads, or as many of them as the system grants.
    pub(super) fn start(source: &Arc<Source>, count: usize) -> Self {
        let shared = Arc::new(Shared::default());
        let threads = (0..count)
            .map_while(|index| {
                let (source, shared) = (source.clone(), shared.clone());
                let thread = thread::Builder::new().name(format!("dpmf-ahead-{index}"));
                thread.spawn(move || work(&source, &shared)).ok()
            })
            .collect();
        Self { shared, threads, process: std::process::id() }
    }

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.threads.len()
    }

    /// Makes the row of a step from now on, or none.
    pub(super) fn make(&self, step: Option<usize>) {
        let round = step
            .map(|step| Arc::new(Round { step, cursor: AtomicUsize::new(0), over: AtomicBool::new(false) }));
        let mut control = self.shared.control.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(before) = std::mem::replace(&mut control.round, round) {
            before.over.store(true, Relaxed);
        }
        drop(control);
        self.shared.wake.notify_all();
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            self.threads.drain(..).for_each(std::mem::forget);
            return;
        }
        let mut control = self.shared.control.lock().unwrap_or_else(PoisonError::into_inner);
        control.stopped = true;
        if let Some(round) = &control.round {
            round.over.store(true, Relaxed);
        }
        drop(control);
        self.shared.wake.notify_all();
        // A thread that panicked has said so, and left a segment that is refused from then on.
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

fn work(source: &Source, shared: &Shared) {
    let mut done: Option<Arc<Round>> = None;
    loop {
        let mut control = shared.control.lock().unwrap_or_else(PoisonError::into_inner);
        let round = loop {
            if control.stopped {
                return;
            }
            match &control.round {
                Some(round) if !done.as_ref().is_some_and(|done| Arc::ptr_eq(done, round)) => {
                    break round.clone();
                }
                _ => control = shared.wake.wait(control).unwrap_or_else(PoisonError::into_inner),
            }
        };
        drop(control);
        let plan = source.plan(round.step);
        while !round.over.load(Relaxed) {
            let index = round.cursor.fetch_add(1, Relaxed);
            if index >= source.count() {
                break;
            }
            // What fails here is made, or refused, by the release.
            if source.keep(index, &plan).is_err() {
                return;
            }
        }
        done = Some(round);
    }
}
