//! What a worker has to do for others: what it told of its backlog, less what this router had given it by then.
//!
//! Owns how much this router has given, back to the moment that the worker spoke of. What can go wrong is an estimate that
//! is too low: that moment is not known to the instant, so the most that the worker had from here about then is taken off,
//! or work that it had just finished would seem to be somebody else's. And an estimate is as old as what was told: what
//! others have given or got back since is not known.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use hypic_transport::ToldBacklog;
use tokio::time::Instant;

/// The longest that anything is under way between a worker and this router, or waits to be noticed: what a worker tells,
/// that a job has ended, that one is cancelled. Heartbeats may be much further apart.
const UNDER_WAY: Duration = Duration::from_millis(500);

/// What a worker told last, if it tells at all. Must not block.
pub(super) type Ask = Arc<dyn Fn() -> Option<ToldBacklog> + Send + Sync>;

/// What is known of a worker's backlog in tokens.
#[derive(Default)]
pub(super) struct Others {
    ask: Option<Ask>,
    /// Tokens that this router had given and not got back, from each change on; none before the first. Goes as far back as
    /// what was told may.
    given: VecDeque<(Instant, u64)>,
}

impl Others {
    pub(super) fn ask(&mut self, ask: Ask) {
        self.ask = Some(ask);
    }

    pub(super) fn give(&mut self, tokens: usize) {
        self.change(|given| given + tokens as u64);
    }

    pub(super) fn give_back(&mut self, tokens: usize) {
        self.change(|given| given.saturating_sub(tokens as u64));
    }

    fn change(&mut self, by: impl FnOnce(u64) -> u64) {
        let before = self.given.back().map_or(0, |(_, given)| *given);
        let after = by(before);
        if after == before {
            return;
        }
        // Whatever is told later is of later moments.
        let now = Instant::now();
        let heard = self.told().map_or(now.into_std(), |told| told.heard);
        self.given.drain(..self.about(heard).0);
        self.given.push_back((now, after));
    }

    /// Tokens that it has to prefill for others.
    pub(super) fn tokens(&self) -> u64 {
        let Some(told) = self.told().filter(|told| told.tokens > 0) else {
            return 0;
        };
        let (first, end) = self.about(told.heard);
        let own = self.given.range(first..end).map(|(_, given)| *given).max();
        told.tokens.saturating_sub(own.unwrap_or(0))
    }

    fn told(&self) -> Option<ToldBacklog> {
        self.ask.as_ref().and_then(|ask| ask())
    }

    /// Of what was given, the first that may have been so at the moment that a worker spoke of, if that was `heard` then,
    /// and the first that was not yet.
    fn about(&self, heard: std::time::Instant) -> (usize, usize) {
        let before = self.given.partition_point(|(from, _)| from.into_std() + UNDER_WAY < heard);
        let end = self.given.partition_point(|(from, _)| from.into_std() <= heard);
        // Until the next change it stays as it was.
        (before.saturating_sub(1), end)
    }
}

impl fmt::Debug for Others {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Others").field("given", &self.given.back()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;
    use tokio::time::advance;

    use super::*;

    const SOON: Duration = Duration::from_millis(1);
    /// Pauses between heartbeats, of keep-alives from 30 ms to 10 minutes.
    const PAUSES: [Duration; 4] =
        [Duration::from_millis(10), Duration::from_secs(1), Duration::from_secs(2), Duration::from_secs(200)];

    /// A worker that tells what it is bidden to.
    struct Bench {
        others: Others,
        told: Arc<Mutex<Option<ToldBacklog>>>,
    }

    impl Bench {
        fn new() -> Bench {
            let (mut others, told) = (Others::default(), Arc::new(Mutex::new(None)));
            let last = told.clone();
            others.ask(Arc::new(move || *last.lock()));
            Bench { others, told }
        }

        /// A heartbeat comes.
        fn hear(&self, tokens: u64) {
            *self.told.lock() = Some(ToldBacklog { tokens, heard: Instant::now().into_std() });
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_done_since_is_nobody_elses_for_as_long_as_nothing_newer_is_told() {
        for pause in PAUSES {
            let mut bench = Bench::new();
            bench.others.give(400);
            advance(2 * UNDER_WAY).await;
            bench.hear(400);
            advance(SOON).await;
            bench.others.give_back(400);
            assert_eq!(bench.others.tokens(), 0, "{pause:?}");
            advance(pause - SOON).await;
            assert_eq!(bench.others.tokens(), 0, "{pause:?}");
            // It may have said so before it was done, or before this router knew.
            bench.hear(400);
            let new = if pause > UNDER_WAY + SOON { 400 } else { 0 };
            assert_eq!(bench.others.tokens(), new, "{pause:?}");
            advance(2 * UNDER_WAY).await;
            assert_eq!(bench.others.tokens(), new, "time alone changes nothing: {pause:?}");
            bench.hear(300);
            assert_eq!(bench.others.tokens(), 300, "{pause:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_it_is_given_since_is_no_part_of_what_it_told() {
        for pause in PAUSES {
            let mut bench = Bench::new();
            bench.hear(1_000);
            advance(SOON).await;
            bench.others.give(600);
            assert_eq!(bench.others.tokens(), 1_000);
            advance(pause).await;
            assert_eq!(bench.others.tokens(), 1_000, "{pause:?}");
            bench.hear(1_600);
            assert_eq!(bench.others.tokens(), 1_000, "{pause:?}");
            advance(SOON).await;
            bench.others.give(50);
            bench.others.give_back(600);
            bench.others.give_back(50);
            advance(pause).await;
            assert_eq!(bench.others.tokens(), 1_000, "{pause:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn jobs_one_after_another_are_not_taken_for_jobs_at_once() {
        let mut bench = Bench::new();
        for _ in 0..10 {
            bench.others.give(100);
            advance(UNDER_WAY / 10 - SOON).await;
            bench.others.give_back(100);
            advance(SOON).await;
        }
        bench.hear(500);
        assert_eq!(bench.others.tokens(), 400);
    }

    #[tokio::test(start_paused = true)]
    async fn no_more_is_remembered_than_may_be_looked_up() {
        let mut bench = Bench::new();
        for i in 0..1_000 {
            advance(UNDER_WAY / 10).await;
            // It is some time before it tells anything.
            if i > 500 {
                bench.hear(1_000);
            }
            bench.others.give(2);
            bench.others.give_back(1);
            // Two changes in each tenth of the time, both ends included, and what was before.
            assert!(bench.others.given.len() <= 2 * 11 + 1, "{i}: {:?}", bench.others.given);
        }
        assert_eq!(bench.others.given.back().map(|(_, given)| *given), Some(1_000));
        advance(2 * UNDER_WAY).await;
        bench.hear(2_000);
        assert_eq!(bench.others.tokens(), 1_000);
    }
}
