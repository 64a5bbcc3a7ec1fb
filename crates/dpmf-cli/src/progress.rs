//! Progress of long work, on standard error: a line that fits the terminal, or now and then a line of a log.

use crate::report::{note, number};
use dpmf::factorize::{Progress, Stage};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use std::fmt::Write;
use std::io::IsTerminal;
use std::ops::ControlFlow;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// How often a log hears of work that goes on.
const LOGGED: Duration = Duration::from_secs(30);

/// Work without a known end: what it does, and for how long. Goes away when dropped.
pub struct Spinner {
    line: Line,
    /// The gap at which a solver stops.
    target: Option<f64>,
}

impl Spinner {
    /// Starts the line.
    pub fn new(label: impl Into<String>) -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        Self { line: Line::new(bar, "{spinner} {elapsed} {wide_msg}", label.into(), 0), target: None }
    }

    /// Of a solver that stops at a gap.
    pub fn towards(self, gap: f64) -> Self {
        Self { target: Some(gap), ..self }
    }

    /// Shows one evaluation of the solver.
    pub fn observe(&self, progress: &Progress) -> ControlFlow<()> {
        let Progress { iteration, gap, loss, stage, share, .. } = progress;
        if *stage == Stage::Fitting {
            let done = share.map_or(String::new(), |share| format!(", {:.0} % of a pass", 100.0 * share));
            self.say(&format!("fitting a stream, attempt {}{done}", iteration + 1));
            return ControlFlow::Continue(());
        }
        let target = self.target.map_or(String::new(), |target| format!(" → {target:.0e}"));
        let root = number(loss.sqrt());
        self.say(&format!("gap {gap:.1e}{target}, iteration {iteration}, √loss {root}"));
        ControlFlow::Continue(())
    }

    /// Shows any other state.
    pub fn say(&self, message: &str) {
        self.line.say(message);
    }
}

/// Work of which it is known how much there is: the share that is done, and the time left. Goes away when dropped.
pub struct Bar(Line);

impl Bar {
    /// Starts the line for `total` pieces of work, of which `done` were there before.
    pub fn new(label: impl Into<String>, total: usize, done: usize) -> Self {
        let bar = ProgressBar::with_draw_target(Some(total as u64), ProgressDrawTarget::stderr());
        // The rest in at most 34 columns, so that a message has room on the narrowest terminals.
        Self(Line::new(bar, "{bar:12} {percent:>3} % {left:<10} {wide_msg}", label.into(), done as u64))
    }

    /// So many pieces are done.
    pub fn reach(&self, done: usize) {
        self.0.bar.set_position(done as u64);
    }

    /// So many more pieces are done.
    pub fn add(&self, pieces: usize) {
        self.0.bar.inc(pieces as u64);
    }

    /// Shows a state.
    pub fn say(&self, message: &str) {
        self.0.say(message);
    }

    /// A line of its own, which stays.
    pub fn println(&self, text: &str) {
        // A hidden bar would swallow it.
        self.0.bar.suspend(|| note(text));
    }
}

/// What both have: a line at a terminal, a log elsewhere.
struct Line {
    bar: ProgressBar,
    label: String,
    log: Option<Log>,
}

impl Line {
    fn new(bar: ProgressBar, template: &str, label: String, begun: u64) -> Self {
        let left = move |state: &ProgressState, out: &mut dyn Write| {
            // Writing to a terminal's line cannot fail.
            let _ = out.write_str(&time_left(state.pos(), begun, state.len(), state.elapsed()));
        };
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.with_key("left", left));
        }
        bar.set_position(begun);
        bar.set_message(label.clone());
        let log = match std::io::stderr().is_terminal() {
            true => {
                bar.enable_steady_tick(Duration::from_millis(120));
                None
            }
            false => {
                let bar = bar.clone();
                Some(Log::every(LOGGED, move || note(&log_line(&bar, begun))))
            }
        };
        Self { bar, label, log }
    }

    fn say(&self, message: &str) {
        self.bar.set_message(format!("{}: {message}", self.label));
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.log = None;
        self.bar.finish_and_clear();
    }
}

/// The state of a line, for a log.
fn log_line(bar: &ProgressBar, begun: u64) -> String {
    let (pos, elapsed) = (bar.position(), bar.elapsed());
    let share = match bar.length() {
        Some(total) if total > 0 => {
            format!(", {} % done, {}", 100 * pos / total, time_left(pos, begun, Some(total), elapsed))
        }
        _ => String::new(),
    };
    format!("{} [{}{share}]", bar.message(), time(elapsed))
}

/// Time that is left if the rest goes on as the work since the start did.
fn time_left(pos: u64, begun: u64, total: Option<u64>, elapsed: Duration) -> String {
    let (Some(total), done) = (total, pos.saturating_sub(begun)) else { return String::new() };
    if done == 0 {
        return "? left".into();
    }
    let left = elapsed.as_secs_f64() * total.saturating_sub(pos) as f64 / done as f64;
    format!("{} left", time(Duration::from_secs_f64(left.min(1e9))))
}

/// A time in at most six letters.
fn time(time: Duration) -> String {
    match time.as_secs_f64().ceil() as u64 {
        seconds @ ..100 => format!("{seconds} s"),
        seconds @ ..6000 => format!("{} min", seconds.div_ceil(60)),
        seconds @ ..360_000 => format!("{} h", seconds.div_ceil(3600)),
        seconds => format!("{} d", (seconds / 86_400).min(9999)),
    }
}

/// Something said at intervals as long as this lives.
struct Log {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Log {
    fn every(interval: Duration, say: impl Fn() + Send + 'static) -> Self {
        let (stop, stopped) = channel();
        // Without a thread there is no log, and the work goes on.
        let thread = std::thread::Builder::new().spawn(move || {
            while stopped.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
                say();
            }
        });
        Self { stop: Some(stop), thread: thread.ok() }
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // It has nothing to tell.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_left_goes_by_the_work_since_the_start() {
        let left = |pos, begun, seconds| time_left(pos, begun, Some(100), Duration::from_secs(seconds));
        assert_eq!(left(25, 0, 10), "30 s left");
        assert_eq!(left(75, 50, 10), "10 s left");
        assert_eq!(left(50, 50, 10), "? left");
        assert_eq!(left(1, 0, 10), "17 min left");
        assert_eq!(left(100, 0, 10), "0 s left");
        assert_eq!(time_left(5, 0, None, Duration::from_secs(3)), "");
        assert_eq!(time(Duration::from_secs(7200)), "2 h");
        assert_eq!(time(Duration::from_secs(u64::MAX / 2)), "9999 d");
    }

    #[test]
    fn a_log_says_what_is_done_until_it_is_dropped() {
        let bar = ProgressBar::hidden();
        bar.set_length(8);
        bar.set_position(2);
        bar.set_message("tuning: optimal");
        let (tell, heard) = channel();
        let log = Log::every(Duration::from_millis(5), move || {
            // The listener may be gone.
            let _ = tell.send(log_line(&bar, 0));
        });
        let first = heard.recv().unwrap();
        assert!(first.starts_with("tuning: optimal [") && first.contains("25 % done"), "{first}");
        heard.recv().unwrap();
        drop(log);
        while heard.try_recv().is_ok() {}
        assert!(heard.recv().is_err(), "nobody is left to tell");
    }
}
