//! Long work: outside the interpreter's lock, on threads that this process owns, open to Ctrl-C.

use crate::error::to_python;
use dpmf::factorize::{Observer, Progress};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

struct Pool {
    process: u32,
    threads: ThreadPool,
}

/// A pointer, not a lock: a lock could be held by a thread that a fork leaves behind.
static POOL: AtomicPtr<Pool> = AtomicPtr::new(ptr::null_mut());

/// How often a waiting thread looks for Ctrl-C.
const HEARTBEAT: Duration = Duration::from_millis(50);

/// How long work is waited for after Ctrl-C.
const PATIENCE: Duration = Duration::from_secs(1);

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
        let threads =
            ThreadPoolBuilder::new().thread_name(|i| format!("dpmf-{i}")).build().map_err(|cause| {
                PyRuntimeError::new_err(format!("the system could not start threads: {cause}"))
            })?;
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

/// Lets the next work have threads of its own: those of this pool are busy with what nobody waits for.
fn retire(pool: &'static ThreadPool) {
    let current = POOL.load(Ordering::Acquire);
    // SAFETY: what is stored here was leaked from a box and is never freed.
    let known = unsafe { current.as_ref::<'static>() };
    if known.is_some_and(|known| ptr::eq(&known.threads, pool)) {
        // Whoever has replaced it meanwhile has done the same.
        let _ = POOL.compare_exchange(current, ptr::null_mut(), Ordering::AcqRel, Ordering::Acquire);
    }
}

/// Runs work without the interpreter's lock, on all threads.
pub(crate) fn run<T: Send>(py: Python<'_>, work: impl FnOnce() -> dpmf::Result<T> + Send) -> PyResult<T> {
    let pool = pool()?;
    py.detach(|| pool.install(work)).map_err(to_python)
}

/// [`run`] for work that may be long: open to Ctrl-C, as [`run_reporting`] is.
pub(crate) fn run_long<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> dpmf::Result<T> + Send + 'static,
) -> PyResult<T> {
    run_reporting(py, None, |_: &mut dyn FnMut(()) -> ControlFlow<()>| work())
}

/// Calls work with whom to tell of progress: a callback, the line of `dpmf._progress`, or nobody.
pub(crate) fn with_progress<T>(
    py: Python<'_>,
    progress: Option<Py<PyAny>>,
    work: impl FnOnce(Option<&Py<PyAny>>) -> PyResult<T>,
) -> PyResult<T> {
    let line = py.import("dpmf._progress")?.call_method1("listener", (progress,))?;
    let callback: Option<Py<PyAny>> = line.getattr("callback")?.extract()?;
    let made = work(callback.as_ref());
    line.call_method0("close")?;
    made
}

/// Runs a solver without the interpreter's lock, on all threads, and stops it when the callback says so or on
/// Ctrl-C.
pub(crate) fn run_observed<T: Send + 'static>(
    py: Python<'_>,
    callback: Option<&Py<PyAny>>,
    work: impl FnOnce(Observer<'_>) -> dpmf::Result<T> + Send + 'static,
) -> PyResult<T> {
    run_reporting(py, callback, |tell| {
        work(&mut |progress: &Progress| tell(crate::solve::Progress::from(*progress)))
    })
}

/// What the thread that works says to the one that waits.
enum News<M, T> {
    Report(M),
    Done(thread::Result<dpmf::Result<T>>),
}

/// Runs work that reports, as [`run_observed`] does.
///
/// The callback runs on the calling thread, as Python's signal handlers must. On Ctrl-C work that does not report soon is left
/// to end unseen, and the caller goes on without it.
pub(crate) fn run_reporting<M, T>(
    py: Python<'_>,
    callback: Option<&Py<PyAny>>,
    work: impl FnOnce(&mut dyn FnMut(M) -> ControlFlow<()>) -> dpmf::Result<T> + Send + 'static,
) -> PyResult<T>
where
    M: Send + for<'py> IntoPyObject<'py> + 'static,
    T: Send + 'static,
{
    let pool = pool()?;
    let (report, news) = mpsc::channel::<News<M, T>>();
    let (answer, answers) = mpsc::channel::<ControlFlow<()>>();
    let listened = callback.is_some();
    let given_up = Arc::new(AtomicBool::new(false));
    let done = Arc::new(AtomicBool::new(false));
    let (stopped, ended) = (given_up.clone(), done.clone());
    pool.spawn(move || {
        let mut tell = |message: M| {
            if stopped.load(Ordering::Relaxed) {
                return ControlFlow::Break(());
            }
            if !listened {
                return ControlFlow::Continue(());
            }
            match report.send(News::Report(message)) {
                Ok(()) => wait(&answers),
                Err(_) => ControlFlow::Break(()),
            }
        };
        // A panic that left the closure would end the process.
        let outcome = catch_unwind(AssertUnwindSafe(|| work(&mut tell)));
        done.store(true, Ordering::Relaxed);
        // A caller that is gone needs no result.
        let _ = report.send(News::Done(outcome));
    });
    let outcome = py.detach(move || {
        loop {
            let received = match (news.recv_timeout(HEARTBEAT), callback) {
                (Ok(News::Done(outcome)), _) => return Ok(outcome),
                (Ok(News::Report(message)), Some(callback)) => call(callback, message).map(Some),
                (Err(RecvTimeoutError::Disconnected), _) => {
                    return Err(PyRuntimeError::new_err("the work ended without a result"));
                }
                (Ok(News::Report(_)), None) | (Err(RecvTimeoutError::Timeout), _) => {
                    Python::attach(|py| py.check_signals()).map(|()| None)
                }
            };
            match received {
                // A solver that is gone needs no answer.
                Ok(verdict) => drop(verdict.map(|verdict| answer.send(verdict))),
                Err(failure) => {
                    given_up.store(true, Ordering::Relaxed);
                    drop(answer);
                    let deadline = Instant::now() + PATIENCE;
                    while let Ok(News::Report(_)) = news.recv_timeout(deadline.duration_since(Instant::now()))
                    {
                    }
                    if !ended.load(Ordering::Relaxed) {
                        retire(pool);
                    }
                    return Err(failure);
                }
            }
        }
    })?;
    outcome.unwrap_or_else(|panic| resume_unwind(panic)).map_err(to_python)
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
fn call<M: for<'py> IntoPyObject<'py>>(callback: &Py<PyAny>, message: M) -> PyResult<ControlFlow<()>> {
    Python::attach(|py| {
        py.check_signals()?;
        let answer = callback.bind(py).call1((message,))?;
        // Only the word False stops: a callback without a return value goes on.
        let stops = answer.extract::<bool>().is_ok_and(|go_on| !go_on);
        Ok(if stops { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    })
}
