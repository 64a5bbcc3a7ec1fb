//! Progress of long work, on standard error, where a person can see it.

use dpmf::factorize::Progress;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::ops::ControlFlow;
use std::time::Duration;

/// A line with iteration, gap and time that appears only at a terminal and goes away when done.
pub struct Spinner {
    bar: ProgressBar,
    label: String,
}

impl Spinner {
    /// Starts the line.
    pub fn new(label: impl Into<String>) -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} [{elapsed}]") {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(120));
        Self { bar, label: label.into() }
    }

    /// Shows one evaluation of the solver.
    pub fn observe(&self, progress: &Progress) -> ControlFlow<()> {
        let Progress { iteration, gap, loss, .. } = progress;
        self.bar.set_message(format!(
            "{}: iteration {iteration}, √loss {:.4}, gap {gap:.1e}",
            self.label,
            loss.sqrt()
        ));
        ControlFlow::Continue(())
    }

    /// Shows any other state.
    pub fn say(&self, message: &str) {
        self.bar.set_message(format!("{}: {message}", self.label));
    }
}

/// A line with how much of something is done and how long the rest will take; at a terminal only, and gone when done.
pub struct Bar(ProgressBar);

impl Bar {
    /// Starts the line: `count` things, such as games, are to be done.
    pub fn new(label: &str, count: u64, things: &str) -> Self {
        let bar = ProgressBar::with_draw_target(Some(count), ProgressDrawTarget::stderr());
        let template = "{prefix} {wide_bar} {percent} % of {msg}, {eta} left";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.set_prefix(label.to_owned());
        bar.set_message(format!("{count} {things}"));
        bar.enable_steady_tick(Duration::from_millis(250));
        Self(bar)
    }

    /// So many more are done.
    pub fn advance(&self, by: u64) {
        self.0.inc(by);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

impl Drop for Spinner {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
