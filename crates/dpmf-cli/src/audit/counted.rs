//! Counts games as they end, for the progress bar.

use crate::progress::Bar;
use dpmf::audit::{AuditRng, Session, StreamMechanism};

/// A mechanism, and where its games are counted.
pub(super) struct Counted<'a>(pub &'a dyn StreamMechanism, pub &'a Bar);

impl StreamMechanism for Counted<'_> {
    fn steps(&self) -> usize {
        self.0.steps()
    }

    fn dimension(&self) -> usize {
        self.0.dimension()
    }

    fn start(&self, games: usize, rng: &mut AuditRng) -> dpmf::Result<Box<dyn Session + '_>> {
        Ok(Box::new(Running { session: self.0.start(games, rng)?, games, bar: self.1 }))
    }
}

struct Running<'a> {
    session: Box<dyn Session + 'a>,
    games: usize,
    bar: &'a Bar,
}

impl Session for Running<'_> {
    fn answer(&mut self, rows: &mut [f64]) -> dpmf::Result<()> {
        self.session.answer(rows)
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.bar.add(self.games);
    }
}
