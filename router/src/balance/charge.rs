//! A worker's load by one piece of work, as a guard, and what is learned when the work is done. Nothing can go wrong but
//! that the worker is forgotten meanwhile: then a guard does nothing.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::{Fleet, Incarnation};

/// The load of one segment on one worker. Dropping it gives the load back; so does [`Charge::complete`], which also
/// tells the balancer how long the work took. Inert once the worker has been removed.
#[must_use = "dropping a charge gives the load back at once"]
pub struct Charge {
    fleet: Arc<Mutex<Fleet>>,
    incarnation: Incarnation,
    tokens: usize,
    nanos: u64,
    /// Which of the worker's charges it is, if the worker had no other one.
    alone: Option<u64>,
}

impl Charge {
    /// Charge a worker of `fleet`, which is what `shared` guards.
    pub(super) fn begin(
        shared: &Arc<Mutex<Fleet>>,
        fleet: &mut Fleet,
        incarnation: Incarnation,
        tokens: usize,
        nanos: u64,
    ) -> Self {
        let worker = fleet.workers.get_mut(&incarnation).expect("found under the same lock");
        worker.backlog += nanos as u128;
        worker.segments += 1;
        worker.charges += 1;
        worker.others.give(tokens);
        let alone = (worker.segments == 1).then_some(worker.charges);
        if tokens > 0 {
            let keep = (-1.0 / fleet.config.memory_jobs).exp();
            let usual = if fleet.usual > 0.0 { fleet.usual } else { tokens as f64 };
            fleet.usual = usual * keep + tokens as f64 * (1.0 - keep);
        }
        Charge { fleet: shared.clone(), incarnation, tokens, nanos, alone }
    }

    /// The time that the worker is charged with.
    pub fn estimate(&self) -> Duration {
        Duration::from_nanos(self.nanos)
    }

    /// The prefill is done and took `measured`, waiting in the worker's queue not included.
    pub fn complete(self, measured: Duration) {
        let mut guard = self.fleet.lock();
        let fleet = &mut *guard;
        if let Some(worker) = fleet.workers.get_mut(&self.incarnation) {
            worker.model.learn(self.tokens, measured, &fleet.config);
            fleet.pooled.learn(self.tokens, measured, &fleet.config);
        }
        // Unlocked before `self` is dropped, which locks again to give the load back.
        drop(guard);
    }

    /// The worker has sent an entry of `tokens` that it held, all of whose `bytes` took `time`. Says nothing of the link if
    /// the worker had anything else to do meanwhile, which shares it; no bytes, as within a process, say nothing at all.
    pub fn sent(&self, tokens: usize, bytes: u64, time: Duration) {
        if bytes == 0 {
            return;
        }
        let fleet = &mut *self.fleet.lock();
        fleet.sizes.learn(tokens, bytes, &fleet.links);
        let pooled = fleet.pooled_rate();
        let Some(worker) = fleet.workers.get_mut(&self.incarnation) else {
            return;
        };
        if self.alone == Some(worker.charges) {
            worker.link.learn(bytes, time, pooled, &fleet.links);
            fleet.pooled_link.learn_lasting(bytes, time, &fleet.links);
        }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        let fleet = &mut *self.fleet.lock();
        let Some(worker) = fleet.workers.get_mut(&self.incarnation) else {
            return;
        };
        debug_assert!(worker.backlog >= self.nanos as u128 && worker.segments > 0, "charged before it is given back");
        worker.backlog = worker.backlog.saturating_sub(self.nanos as u128);
        worker.segments = worker.segments.saturating_sub(1);
        worker.others.give_back(self.tokens);
    }
}

impl fmt::Debug for Charge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("Charge");
        debug.field("tokens", &self.tokens).field("estimate", &self.estimate()).finish_non_exhaustive()
    }
}
