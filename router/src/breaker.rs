//! Breakers: a worker that fails again and again gets no work for a while, then one job to show that it is well.
//!
//! Only real failures count. What is cancelled, or not held, or wrong in the request says nothing of a worker and only
//! ends its probe. A worker without failures has no breaker here, so nothing is kept of members that are gone.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::faults::FaultConfig;

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    /// So many failures in a row.
    Closed(u32),
    /// No work until then.
    Open(Instant),
    /// One job is under way.
    Probing,
}

/// How a job ended, for the breaker of its worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Good,
    Bad,
    /// It says nothing of the worker.
    Neutral,
}

/// The breakers of all workers.
#[derive(Default)]
pub(crate) struct Breakers(Mutex<HashMap<Arc<str>, State>>);

impl Breakers {
    /// Whether `worker` may get work now.
    pub fn allows(&self, worker: &str) -> bool {
        match self.0.lock().get(worker) {
            None | Some(State::Closed(_)) => true,
            Some(State::Open(until)) => Instant::now() >= *until,
            Some(State::Probing) => false,
        }
    }

    /// `worker` gets a job: a probe, if its cool-down is over.
    pub fn begin(&self, worker: &str) {
        if let Some(state @ State::Open(_)) = self.0.lock().get_mut(worker) {
            *state = State::Probing;
        }
    }

    /// A job of `worker` has ended.
    pub fn end(&self, worker: &str, verdict: Verdict, config: &FaultConfig) {
        let mut states = self.0.lock();
        let open = || State::Open(Instant::now() + config.breaker_cool_down);
        let next = match (states.get(worker), verdict) {
            (Some(_), Verdict::Good) => None,
            (Some(State::Probing), Verdict::Bad) => Some(open()),
            // The next job is the probe.
            (Some(State::Probing), Verdict::Neutral) => Some(State::Open(Instant::now())),
            (Some(State::Open(until)), Verdict::Bad | Verdict::Neutral) => Some(State::Open(*until)),
            (Some(State::Closed(failures)), Verdict::Bad) if failures + 1 >= config.breaker_failures => Some(open()),
            (Some(State::Closed(failures)), Verdict::Bad) => Some(State::Closed(failures + 1)),
            (None, Verdict::Bad) if config.breaker_failures <= 1 => Some(open()),
            (None, Verdict::Bad) => Some(State::Closed(1)),
            (known, _) => known.copied(),
        };
        match next {
            Some(State::Open(_)) if !matches!(states.get(worker), Some(State::Open(_))) => {
                tracing::warn!(worker, "worker fails: it gets no work for a while");
                states.insert(worker.into(), next.expect("matched"));
            }
            Some(state) => {
                states.insert(worker.into(), state);
            }
            None => {
                states.remove(worker);
            }
        }
    }

    /// How many of `workers` get no work at all, and how many are on trial.
    pub fn open_and_trying<'a>(&self, workers: impl Iterator<Item = &'a str>) -> (u64, u64) {
        let (states, now) = (self.0.lock(), Instant::now());
        workers.fold((0, 0), |(open, trying), worker| match states.get(worker) {
            None | Some(State::Closed(_)) => (open, trying),
            Some(State::Open(until)) if now < *until => (open + 1, trying),
            Some(State::Open(_) | State::Probing) => (open, trying + 1),
        })
    }

    /// Forget workers that are not members.
    pub fn retain(&self, is_member: impl Fn(&str) -> bool) {
        self.0.lock().retain(|worker, _| is_member(worker));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_breaker_opens_after_failures_in_a_row_and_closes_after_a_good_probe() {
        let config = FaultConfig { breaker_failures: 3, ..FaultConfig::default() };
        let breakers = Breakers::default();
        let end = |verdict| breakers.end("w", verdict, &config);
        for verdict in [Verdict::Bad, Verdict::Bad, Verdict::Good, Verdict::Bad, Verdict::Bad, Verdict::Neutral] {
            end(verdict);
            assert!(breakers.allows("w"), "{verdict:?}: never three in a row");
        }
        let counts = || breakers.open_and_trying(["w", "other"].into_iter());
        assert_eq!(counts(), (0, 0));
        end(Verdict::Bad);
        assert!(!breakers.allows("w") && breakers.allows("other"));
        assert_eq!(counts(), (1, 0));

        tokio::time::advance(config.breaker_cool_down - Duration::from_millis(1)).await;
        assert!(!breakers.allows("w"));
        tokio::time::advance(Duration::from_millis(1)).await;
        assert!(breakers.allows("w"));
        breakers.begin("w");
        assert!(!breakers.allows("w"), "one probe at a time");
        assert_eq!(counts(), (0, 1));
        end(Verdict::Neutral);
        assert!(breakers.allows("w"), "a probe that says nothing is repeated");
        breakers.begin("w");
        end(Verdict::Bad);
        assert!(!breakers.allows("w"), "one failure opens it again");
        tokio::time::advance(config.breaker_cool_down).await;
        breakers.begin("w");
        end(Verdict::Good);
        end(Verdict::Bad);
        assert!(breakers.allows("w"), "closed, with a clean record");
        breakers.retain(|_| false);
        assert!(breakers.0.lock().is_empty());
    }
}
