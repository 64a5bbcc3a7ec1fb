//! Long work: outside the interpreter's lock, on threads that this process owns, open to Ctrl-C.

use crate::error::to_python;
use dpmf::factorize::{Observer, Progress};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::ops::ControlFlow;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

struct Pool {
    process: u32,
    threads: ThreadPool,
}

/// A pointer, not a lock: a lock could be held by a thread that a fork leaves behind.
static POOL: AtomicPtr<Pool> = AtomicPtr::new(ptr::null_mut());

/// How often a waiting thread looks for Ctrl-C.
const HEARTBEAT: Duration = Duration::from_millis(50);

/// The threads of this process.
///
/// Threads do not survive a fork, and work handed to those of the parent would wait for ever; so a child makes
/// its own. `RAYON_NUM_THREADS` sets their number.
pub(crate) fn pool() -> PyResult<&'static ThreadPool> {
    let process = std::process::id();
    let mut current = POOL.load(Ordering::Acquire);
    loop {
        // SAFETY: what is stored here was leaked from a box and is never freed.
        let known = unsafe { current.as_ref::<'static>() };
        if let Some(pool) = known.filter(|pool| pool.process == process) {
            return Ok(&pool.threads);
        }
        let threads = ThreadPoolBuilder::new()
            .thread_name(|i| format!("dpmf-{i}"))
            .build()
            .map_err(|cause| PyRuntimeError::new_err(format!("the system gave no threads: {cause}")))?;
        let fresh = Box::into_raw(Box::new(Pool { process, threads }));
        match POOL.compare_exchange(current, fresh, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: just leaked. The parent's pool stays leaked: it has no threads here to be joined.
            Ok(_) => return Ok(unsafe { &(*fresh).threads }),
            Err(found) => {
                // SAFETY: it was never shared.
                drop(unsafe { Box::from_raw(fresh) });
                current = found;
            }
        }
    }
}

/// Runs work without the interpreter's lock, on all threads.
pub(crate) fn run<T: Send>(py: Python<'_>, work: impl FnOnce() -> dpmf::Result<T> + Send) -> PyResult<T> {
    let pool = pool()?;
    py.detach(|| pool.install(work)).map_err(to_python)
}

/// Runs a solver without the interpreter's lock, on all threads, and stops it when the callback says so or on
/// Ctrl-C.
pub(crate) fn run_observed<T: Send>(
    py: Python<'_>,
    callback: Option<&Py<PyAny>>,
    work: impl FnOnce(Observer<'_>) -> dpmf::Result<T> + Send,
) -> PyResult<T> {
    run_told(py, callback, |tell| {
        work(&mut |progress: &Progress| tell(crate::solve::Progress::from(*progress)))
    })
}

/// Runs work that reports, as [`run_observed`] does.
///
/// The callback runs on the calling thread, as Python's signal handlers must.
pub(crate) fn run_told<M, T: Send>(
    py: Python<'_>,
    callback: Option<&Py<PyAny>>,
    work: impl FnOnce(&mut dyn FnMut(M) -> ControlFlow<()>) -> dpmf::Result<T> + Send,
) -> PyResult<T>
where
    M: Send + for<'py> IntoPyObject<'py>,
{
    let pool = pool()?;
    let (report, reports) = mpsc::channel::<M>();
    let (answer, answers) = mpsc::channel::<ControlFlow<()>>();
    let stopped = AtomicBool::new(false);
    let (result, failure) = py.detach(move || {
        let mut result = None;
        let mut failure = None;
        pool.in_place_scope(|scope| {
            let (stopped, result) = (&stopped, &mut result);
            scope.spawn(move |_| {
                let mut tell = |message: M| {
                    if stopped.load(Ordering::Relaxed) {
                        return ControlFlow::Break(());
                    }
                    if callback.is_none() {
                        return ControlFlow::Continue(());
                    }
                    match report.send(message) {
                        Ok(()) => wait(&answers),
                        Err(_) => ControlFlow::Break(()),
                    }
                };
                *result = Some(work(&mut tell));
                // Its end is the end of the loop below.
                drop(report);
            });
            loop {
                let (reported, told) = match (reports.recv_timeout(HEARTBEAT), callback) {
                    (Ok(message), Some(callback)) => (true, call(callback, message)),
                    (Err(RecvTimeoutError::Disconnected), _) => break,
                    (received, _) => {
                        (received.is_ok(), Python::attach(|py| py.check_signals()).map(|()| true))
                    }
                };
                let go_on = told.unwrap_or_else(|error| {
                    failure = Some(error);
                    false
                });
                if !go_on {
                    stopped.store(true, Ordering::Relaxed);
                }
                if reported {
                    let verdict = if go_on { ControlFlow::Continue(()) } else { ControlFlow::Break(()) };
                    // A solver that is gone needs no answer.
                    let _ = answer.send(verdict);
                }
            }
        });
        (result, failure)
    });
    if let Some(failure) = failure {
        return Err(failure);
    }
    match result {
        Some(result) => result.map_err(to_python),
        None => Err(PyRuntimeError::new_err("the solver ended without a result")),
    }
}

/// Waits for the verdict on a report and works for others meanwhile: a callback may itself call this library, which
/// would otherwise wait for the thread that waits for the callback.
fn wait(answers: &mpsc::Receiver<ControlFlow<()>>) -> ControlFlow<()> {
    loop {
        match answers.recv_timeout(Duration::from_micros(200)) {
            Ok(verdict) => return verdict,
            Err(RecvTimeoutError::Disconnected) => return ControlFlow::Break(()),
            Err(RecvTimeoutError::Timeout) => while rayon::yield_now() == Some(rayon::Yield::Executed) {},
        }
    }
}

/// Calls the callback and looks for Ctrl-C; whether to go on.
fn call<M: for<'py> IntoPyObject<'py>>(callback: &Py<PyAny>, message: M) -> PyResult<bool> {
    Python::attach(|py| {
        py.check_signals()?;
        let answer = callback.bind(py).call1((message,))?;
        // Only the word False stops: a callback without a return value goes on.
        Ok(!answer.extract::<bool>().is_ok_and(|go_on| !go_on))
    })
}
