//! Ctrl-C, and the system's request to end.
//!
//! A command that has nothing to lose ends at once. One that has, holds: it is told, and ends when its state is on disk; a
//! second Ctrl-C ends it at once all the same. Either way the program exits with 130 and, with `--json`, an error object.

#[cfg(unix)]
use crate::report;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// The exit code of an interrupted program.
pub const CODE: u8 = 130;

static REQUESTED: AtomicBool = AtomicBool::new(false);
static HOLDING: AtomicUsize = AtomicUsize::new(0);
static UNFINISHED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Listens from now on.
pub fn listen() {
    #[cfg(unix)]
    {
        use signal_hook::consts::{SIGINT, SIGTERM};
        // Where no handler can be set, the system ends the program, and the journal keeps a run safe.
        let Ok(mut signals) = signal_hook::iterator::Signals::new([SIGINT, SIGTERM]) else { return };
        let waiting = move || signals.forever().for_each(|_| end_requested());
        let _ = std::thread::Builder::new().name("signals".into()).spawn(waiting);
    }
}

#[cfg(unix)]
fn end_requested() {
    let again = REQUESTED.swap(true, Ordering::SeqCst);
    if again || HOLDING.load(Ordering::SeqCst) == 0 {
        abandon();
        report::fail("interrupted", "interrupted");
        std::process::exit(CODE.into());
    }
    // After two seconds of waiting, say what it waits for.
    std::thread::spawn(|| {
        std::thread::sleep(std::time::Duration::from_secs(2));
        report::note("stopping after this round; press Ctrl-C again to stop at once");
    });
}

/// Removes what is not finished.
pub fn abandon() {
    for path in UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner).iter() {
        let _ = std::fs::remove_file(path);
    }
}

/// Whether the program was asked to end.
pub fn requested() -> bool {
    REQUESTED.load(Ordering::SeqCst)
}

/// As long as it lives, the program ends only by its own will, which is to ask [`requested`] often.
pub struct Hold(());

impl Hold {
    pub fn new() -> Self {
        HOLDING.fetch_add(1, Ordering::SeqCst);
        Self(())
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        HOLDING.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A file that is removed if the program is interrupted while this lives.
pub struct Unfinished(PathBuf);

impl Unfinished {
    pub fn new(path: &Path) -> Self {
        UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner).push(path.to_owned());
        Self(path.to_owned())
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner).retain(|path| *path != self.0);
    }
}
