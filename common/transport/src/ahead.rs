//! K and V that leave before their layer's part is final.
//!
//! A long body is computed in several passes, each of which adds K and V of some tokens to every attention layer. What
//! computes them offers them here, and what sends them takes them from here while the next pass is computed. Memory is
//! bounded: while as much waits as the limit says, an offer is declined without a copy; the tokens then travel with
//! the part, which the entry holds anyway. What can go wrong is a receiver that is slow or gone: the computing side
//! holds a [`KvAhead`] weakly and never waits for it, so what is queued goes with the transfer.

use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;

use hypic_state::{Storage, Stored};
use parking_lot::Mutex;
use tokio::sync::Notify;

/// K and V of some tokens of a body in one attention layer.
pub struct KvRange<S: Storage> {
    /// Index of the layer.
    pub layer: usize,
    /// Which tokens of the body, from 0.
    pub tokens: Range<usize>,
    /// Exactly these tokens.
    pub kv: S::Kv,
}

/// The queue of one transfer. A token is in it at most once per layer, and never after its layer's part is final.
pub struct KvAhead<S: Storage> {
    limit_bytes: usize,
    queue: Mutex<Queue<S>>,
    offered: Notify,
}

struct Queue<S: Storage> {
    ranges: VecDeque<KvRange<S>>,
    bytes: usize,
}

impl<S: Storage> KvAhead<S> {
    /// A queue that declines offers while `limit_bytes` or more wait in it: at most that and one range.
    pub fn new(limit_bytes: usize) -> Self {
        KvAhead { limit_bytes, queue: Mutex::new(Queue { ranges: VecDeque::new(), bytes: 0 }), offered: Notify::new() }
    }

    /// K and V of `tokens` of the body are final in `layer`. `copy` gives them and is called only if there is room; false
    /// if there is none: they are left for the part. For one caller at a time.
    pub fn offer(&self, layer: usize, tokens: Range<usize>, copy: impl FnOnce() -> S::Kv) -> bool {
        if self.bytes() >= self.limit_bytes {
            return false;
        }
        let kv = copy();
        let mut queue = self.queue.lock();
        queue.bytes += kv.bytes();
        queue.ranges.push_back(KvRange { layer, tokens, kv });
        drop(queue);
        self.offered.notify_one();
        true
    }

    /// The part of `layer` is about to be final: it has all that waits here of the layer.
    pub fn forget(&self, layer: usize) {
        let mut queue = self.queue.lock();
        queue.ranges.retain(|range| range.layer != layer);
        queue.bytes = queue.ranges.iter().map(|range| range.kv.bytes()).sum();
    }

    /// What has waited longest.
    pub fn take(&self) -> Option<KvRange<S>> {
        let mut queue = self.queue.lock();
        let range = queue.ranges.pop_front()?;
        queue.bytes -= range.kv.bytes();
        Some(range)
    }

    /// Resolves when something has been offered since this last resolved. For one taker at a time.
    pub async fn offered(&self) {
        self.offered.notified().await;
    }

    /// Bytes that wait.
    pub fn bytes(&self) -> usize {
        self.queue.lock().bytes
    }
}

impl<S: Storage> fmt::Debug for KvAhead<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let queue = self.queue.lock();
        write!(f, "KvAhead({} ranges, {} of {} bytes)", queue.ranges.len(), queue.bytes, self.limit_bytes)
    }
}

#[cfg(test)]
mod tests {
    use hypic_state::{Host, HostKv, HostTensor};

    use super::*;

    /// One head of one number: 8 bytes a token.
    fn kv(tokens: usize) -> HostKv {
        let tensor = || HostTensor::from_f32([tokens, 1, 1], &vec![1.0; tokens]);
        HostKv { k: tensor(), v: tensor() }
    }

    fn offer(ahead: &KvAhead<Host>, layer: usize, tokens: Range<usize>) -> bool {
        let count = tokens.len();
        ahead.offer(layer, tokens, || kv(count))
    }

    fn taken(ahead: &KvAhead<Host>) -> Option<(usize, Range<usize>)> {
        ahead.take().map(|range| (range.layer, range.tokens))
    }

    #[test]
    fn what_is_offered_is_taken_in_order_and_once() {
        let ahead = KvAhead::new(1 << 10);
        assert!(offer(&ahead, 3, 0..4) && offer(&ahead, 7, 0..4) && offer(&ahead, 3, 4..8));
        assert_eq!(ahead.bytes(), 12 * 8);
        assert_eq!(taken(&ahead), Some((3, 0..4)));
        assert_eq!(taken(&ahead), Some((7, 0..4)));
        assert_eq!(taken(&ahead), Some((3, 4..8)));
        assert_eq!((taken(&ahead), ahead.bytes()), (None, 0));
    }

    #[test]
    fn beyond_the_limit_nothing_is_copied() {
        let ahead = KvAhead::<Host>::new(64);
        assert!(offer(&ahead, 0, 0..4) && offer(&ahead, 0, 4..9));
        assert!(!ahead.offer(0, 9..10, || unreachable!("there is no room")));
        assert_eq!(ahead.bytes(), 9 * 8, "the limit and one range");
        assert!(ahead.take().is_some());
        assert!(offer(&ahead, 0, 10..12), "room again");
        assert!(!KvAhead::<Host>::new(0).offer(0, 0..1, || unreachable!("there is never room")));
    }

    #[test]
    fn a_final_part_takes_its_layer_away() {
        let ahead = KvAhead::new(1 << 10);
        assert!(offer(&ahead, 3, 0..4) && offer(&ahead, 7, 0..4) && offer(&ahead, 3, 4..8));
        ahead.forget(3);
        assert_eq!(ahead.bytes(), 4 * 8);
        assert_eq!(taken(&ahead), Some((7, 0..4)));
        assert_eq!(taken(&ahead), None);
    }

    #[tokio::test]
    async fn an_offer_wakes_its_taker_before_and_after_it_sleeps() {
        let ahead = std::sync::Arc::new(KvAhead::<Host>::new(1 << 10));
        offer(&ahead, 0, 0..1);
        ahead.offered().await;
        let sleeper = ahead.clone();
        let sleeping = tokio::spawn(async move { sleeper.offered().await });
        tokio::task::yield_now().await;
        assert!(!sleeping.is_finished());
        offer(&ahead, 0, 1..2);
        sleeping.await.expect("woken");
    }
}
