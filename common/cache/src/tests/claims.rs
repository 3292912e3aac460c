//! Hits, flights and their ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use hypic_state::{EntryError, PartSource, PartState};

use super::*;
use crate::{Flight, Source};

fn join(store: &TestStore, n: u32) -> Arc<Flight<Dummy>> {
    match claim(store, n) {
        Claim::Join(flight) => flight,
        other => panic!("segment {n} should be in the making: {other:?}"),
    }
}

/// The mark of a part.
fn mark(part: PartState<Dummy>) -> Option<u32> {
    match part {
        PartState::Ready(part) => Some(match &*part {
            LayerPart::Recurrent(part) => part.state.mark,
            LayerPart::Attention(block) => block.mark,
        }),
        PartState::Pending => None,
        PartState::Failed(reason) => panic!("{reason}"),
    }
}

fn counting_waker() -> (Arc<AtomicUsize>, crate::Waker) {
    let calls = Arc::new(AtomicUsize::new(0));
    let counter = calls.clone();
    (calls, Arc::new(move || _ = counter.fetch_add(1, Ordering::SeqCst)))
}

#[test]
fn the_first_leads_the_others_follow_and_the_next_hits() {
    let store = store(1000);
    let lead = lead(&store, 1);
    let source = Source::Flight(join(&store, 1));
    let (calls, waker) = counting_waker();
    source.subscribe(waker);
    assert_eq!((source.tokens(), source.seam()), (&tokens(1), SEAM));
    assert_eq!(mark(source.part(0)), None);

    assert!(lead.publish(1, attention(11, 20)));
    assert_eq!((mark(source.part(0)), mark(source.part(1))), (None, Some(11)));
    assert!(!lead.publish(1, attention(99, 20)), "what followers have seen does not change");
    assert!(lead.publish(0, recurrent(12, 10)));
    assert_eq!(calls.load(Ordering::SeqCst), 2);
    assert_eq!(store.stats().flights, 1);
    assert!(resident(&store, 0..3).is_empty());

    let entry = lead.complete(&layout(), seconds(1)).unwrap();
    assert_eq!(calls.load(Ordering::SeqCst), 3);
    assert!(entry.is_kept());
    assert_eq!((mark(source.part(0)), mark(source.part(1))), (Some(12), Some(11)));
    assert!(matches!(source.part(2), PartState::Failed(_)));

    let hit = Source::Entry(hit(&store, 1));
    assert_eq!((mark(hit.part(0)), mark(hit.part(1))), (Some(12), Some(11)));
    let stats = store.stats();
    assert_eq!((stats.misses, stats.joins, stats.hits, stats.flights), (1, 1, 1, 0));
    assert_eq!((stats.bytes, stats.pinned_bytes, stats.pinned), (38, 38, 1));

    // Pinned by whoever uses it in whatever way, the follower included.
    drop((entry, hit));
    assert_eq!(store.stats().pinned, 1);
    let clone = source.clone();
    drop(source);
    assert_eq!(store.stats().pinned, 1);
    drop(clone);
    assert_eq!((store.stats().pinned, store.stats().pinned_bytes, store.stats().bytes), (0, 0, 38));
    store.audit();
}

#[test]
fn a_failure_is_told_at_once_and_frees_the_key() {
    for abandon in [false, true] {
        let store = store(1000);
        let first = lead(&store, 1);
        let flight = join(&store, 1);
        let again = store.clone();
        // The waker sees the failure; by then the key is free.
        let (calls, waker) = counting_waker();
        flight.subscribe(waker);
        assert!(first.publish(0, recurrent(5, 1)));
        if abandon {
            drop(first)
        } else {
            first.fail("out of memory")
        }
        assert_eq!(calls.load(Ordering::SeqCst), 2);

        let reason = flight.failure().expect("it has failed");
        assert_eq!(&*reason, if abandon { "the computation was abandoned" } else { "out of memory" });
        assert!(matches!(flight.part(1), PartState::Failed(why) if why == reason));
        assert_eq!(mark(flight.part(0)), Some(5), "what was ready stays so");
        assert!(flight.entry().is_none());
        fill(&again, 1, 100, 1);
        assert_eq!((store.stats().failed_flights, store.stats().entries), (1, 1));
        store.audit();
    }
}

#[test]
fn subscribing_after_the_end_is_harmless() {
    let store = store(1000);
    let lead = lead(&store, 1);
    let flight = lead.flight().clone();
    compute(lead, 1, 50, 1);
    let (calls, waker) = counting_waker();
    let weak = Arc::downgrade(&waker);
    flight.subscribe(waker);
    assert_eq!(calls.load(Ordering::SeqCst), 0);
    assert!(weak.upgrade().is_none(), "a waker that is never called is not kept");
    assert!(flight.entry().is_some());
}

#[test]
fn parts_that_make_no_entry_fail_the_flight() {
    let store = store(1000);
    let missing = lead(&store, 1);
    missing.publish(1, attention(1, 1));
    let flight = missing.flight().clone();
    let error = missing.complete(&layout(), seconds(1)).unwrap_err();
    assert_eq!(error, EntryError::Layers { expected: 2, got: 1 });
    assert_eq!(flight.failure().as_deref(), Some(&*error.to_string()));

    let stray = lead(&store, 1);
    stray.publish(0, recurrent(1, 1));
    stray.publish(4_000_000_000, attention(1, 1));
    assert_eq!(stray.complete(&layout(), seconds(1)).unwrap_err(), EntryError::Layers { expected: 2, got: 1 });

    let swapped = lead(&store, 1);
    swapped.publish(0, attention(1, 1));
    swapped.publish(1, attention(1, 1));
    assert!(matches!(swapped.complete(&layout(), seconds(1)), Err(EntryError::Kind { layer: 0, .. })));

    let all_seam = match store.claim(key(1), &tokens(1), 2) {
        Claim::Lead(lead) => lead,
        other => panic!("{other:?}"),
    };
    all_seam.publish(0, recurrent(1, 1));
    all_seam.publish(1, attention(1, 1));
    assert!(matches!(all_seam.complete(&layout(), seconds(1)), Err(EntryError::NoBody { .. })));
    assert_eq!((store.stats().failed_flights, store.stats().flights, store.stats().bytes), (4, 0, 0));
}

#[test]
fn other_tokens_under_a_key_are_a_miss_that_is_not_shared() {
    let store = store(1000);
    let other = |n| match store.claim(key(1), &tokens(n), SEAM) {
        Claim::Lead(lead) => lead,
        other => panic!("other tokens must lead: {other:?}"),
    };
    // Against a flight, which does not notice.
    let first = lead(&store, 1);
    drop(other(3));
    assert!(!compute(other(2), 2, 60, 1).is_kept());
    assert!(!store.contains(key(1)), "the flight's entry is not there yet, the other one not kept");
    assert_eq!(join(&store, 1).tokens(), &tokens(1));
    assert_eq!((store.stats().flights, store.stats().entries), (1, 0));
    // Against an entry.
    compute(first, 1, 50, 1);
    assert!(!compute(other(2), 2, 60, 1).is_kept());
    assert!(store.get(key(1), &tokens(2)).is_none());
    assert_eq!(store.get(key(1), &tokens(1)).unwrap().tokens(), &tokens(1));
    let stats = store.stats();
    assert_eq!((stats.entries, stats.bytes, stats.flights), (1, 50, 0));
    // Two leads against the flight, one against the entry, one lookup against the entry.
    assert_eq!(stats.hash_mismatches, 4);
    store.audit();
}

#[test]
fn equal_tokens_in_another_list_are_a_hit() {
    let store = store(1000);
    fill(&store, 1, 50, 1);
    assert!(store.get(key(1), &tokens(1).to_vec().into()).is_some());
    assert!(store.get(key(2), &tokens(2)).is_none());
    assert_eq!((store.stats().hits, store.stats().misses), (1, 2));
}

#[test]
fn without_capacity_every_claim_leads_or_joins() {
    let store = store(0);
    for _ in 0..3 {
        let lead = lead(&store, 1);
        let flight = join(&store, 1);
        let entry = compute(lead, 1, 50, 1);
        assert!(!entry.is_kept());
        assert_eq!(mark(flight.part(0)), Some(1));
        assert_eq!(flight.entry().unwrap().bytes(), 50);
    }
    let stats = store.stats();
    assert_eq!((stats.hits, stats.misses, stats.joins, stats.rejected_too_large), (0, 3, 3, 3));
    assert_eq!((stats.bytes, stats.entries, stats.pinned), (0, 0, 0));
}

#[test]
fn guards_and_leads_outlive_their_store() {
    let store = store(1000);
    let entry = compute(lead(&store, 1), 1, 50, 1);
    let late = lead(&store, 2);
    let failing = lead(&store, 3);
    drop(store);
    assert_eq!(entry.bytes(), 50);
    assert!(!compute(late, 2, 60, 1).is_kept());
    failing.fail("the store is gone");
}
