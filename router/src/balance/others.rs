//! What a worker has to do for others: what it tells of its backlog, less what this router gave it.
//!
//! Owns how many tokens this router has given. What a worker tells is a little old: it lacks what it was given since, and
//! has what it finished since. So what was given back lately counts as given, or a worker that has just finished would
//! seem to be busy for somebody else. What can go wrong is an estimate that is too low for a moment: until the worker
//! tells of it, new work of others is not known.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

/// Tokens that a worker has still to prefill for whomever, as it said last. Must not block.
pub(super) type Told = Arc<dyn Fn() -> u64 + Send + Sync>;

/// What is known of a worker's backlog in tokens.
#[derive(Default)]
pub(super) struct Others {
    told: Option<Told>,
    /// Tokens that this router gave it and that are not given back.
    given: u64,
    /// Those that were given back, and when.
    returned: VecDeque<(Instant, u64)>,
}

impl Others {
    pub(super) fn ask(&mut self, told: Told) {
        self.told = Some(told);
    }

    pub(super) fn give(&mut self, tokens: usize) {
        self.given += tokens as u64;
    }

    /// `delay`: what it tells is no older.
    pub(super) fn give_back(&mut self, tokens: usize, delay: Duration) {
        self.given = self.given.saturating_sub(tokens as u64);
        // Nobody subtracts it from anything.
        if self.told.is_none() || tokens == 0 {
            return;
        }
        while self.returned.front().is_some_and(|(at, _)| at.elapsed() > delay) {
            self.returned.pop_front();
        }
        self.returned.push_back((Instant::now(), tokens as u64));
    }

    /// Tokens that it has to prefill for others.
    pub(super) fn tokens(&self, delay: Duration) -> u64 {
        let told = self.told.as_ref().map_or(0, |told| told());
        if told == 0 {
            return 0;
        }
        let lately = self.returned.iter().rev().take_while(|(at, _)| at.elapsed() <= delay);
        told.saturating_sub(self.given + lately.map(|(_, tokens)| tokens).sum::<u64>())
    }
}

impl fmt::Debug for Others {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Others").field("given", &self.given).finish_non_exhaustive()
    }
}
