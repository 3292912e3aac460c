//! Who stays when not all have room.

use super::*;

#[test]
fn everything_is_kept_while_there_is_room() {
    let store = store(1000);
    (0..10).for_each(|n| fill(&store, n, 100, 0));
    assert_eq!(resident(&store, 0..10).len(), 10);
    assert_eq!((store.stats().bytes, store.stats().pinned), (1000, 0));
    store.audit();
}

#[test]
fn what_saves_the_least_time_per_byte_goes_first() {
    let store = store(400);
    // Seconds per byte: 0.1, 0.02, 0.05, 0.04.
    for (n, bytes, cost) in [(0, 100, 10), (1, 100, 2), (2, 100, 5), (3, 100, 4)] {
        fill(&store, n, bytes, cost);
    }
    fill(&store, 4, 100, 3);
    assert_eq!(resident(&store, 0..5), [0, 2, 3, 4]);
    // The clock stands at 0.02 now, so 4 has 0.03 + 0.02. 200 bytes at 0.05 + 0.02 beat the 0.04 of 3
    // and the 0.05 of 2, which is older than 4.
    fill(&store, 5, 200, 10);
    assert_eq!(resident(&store, 0..6), [0, 4, 5]);
    assert_eq!(store.stats().evicted_entries, 3);
    store.audit();
}

#[test]
fn a_newcomer_worth_less_stays_out_and_is_served() {
    let store = store(200);
    fill(&store, 0, 100, 10);
    fill(&store, 1, 100, 10);
    let entry = compute(lead(&store, 2), 2, 100, 9);
    assert!(!entry.is_kept());
    assert_eq!(entry.bytes(), 100);
    assert_eq!(resident(&store, 0..3), [0, 1]);
    assert_eq!((store.stats().rejected_low_value, store.stats().bytes), (1, 200));
    store.audit();
}

#[test]
fn nothing_goes_for_a_newcomer_that_stays_out() {
    let store = store(300);
    for (n, cost) in [(0, 1), (1, 10), (2, 10)] {
        fill(&store, n, 100, cost);
    }
    // Needs the room of 0, which is worth less than it, and of 1, which is worth more.
    fill(&store, 3, 200, 10);
    assert_eq!(resident(&store, 0..4), [0, 1, 2]);
    assert_eq!((store.stats().rejected_low_value, store.stats().evicted_entries), (1, 0));
    store.audit();
}

#[test]
fn use_makes_an_entry_stay() {
    let store = store(300);
    (0..3).for_each(|n| fill(&store, n, 100, 10));
    drop(hit(&store, 0));
    drop(hit(&store, 2));
    fill(&store, 3, 100, 11);
    assert_eq!(resident(&store, 0..4), [0, 2, 3]);
    // Following a computation is a use too.
    let lead = lead(&store, 4);
    let followers: Vec<_> = (0..3).map(|_| claim(&store, 4)).collect();
    compute(lead, 4, 100, 10);
    drop(followers);
    drop(hit(&store, 2));
    fill(&store, 5, 100, 12);
    assert!(resident(&store, 0..6).contains(&4));
}

#[test]
fn what_is_not_used_again_ages() {
    let store = store(200);
    fill(&store, 0, 100, 10);
    (0..20).for_each(|_| drop(hit(&store, 0)));
    fill(&store, 1, 100, 10);
    // A stream of newcomers that nobody asks for twice; each is worth as much as 0 once was.
    let mut streamed = 0;
    while store.contains(key(0)) {
        streamed += 1;
        assert!(streamed < 100, "an entry that nobody wants must go at last");
        fill(&store, 100 + streamed, 100, 10);
    }
    assert!(streamed >= 10, "21 uses outlast {streamed} newcomers only");
    store.audit();
}

#[test]
fn pinned_entries_stay_and_count() {
    let store = store(300);
    let pins: Vec<_> = (0..3).map(|n| compute(lead(&store, n), n, 100, 1)).collect();
    let entry = compute(lead(&store, 3), 3, 100, 1000);
    assert!(!entry.is_kept());
    assert_eq!((store.stats().rejected_no_room, store.stats().pinned_bytes), (1, 300));

    // One is let go, by its last guard only.
    let clone = pins[1].clone();
    let mut pins = pins;
    drop(pins.remove(1));
    assert!(!compute(lead(&store, 3), 3, 100, 1000).is_kept());
    drop(clone);
    assert!(compute(lead(&store, 3), 3, 100, 1000).is_kept());
    assert_eq!(resident(&store, 0..4), [0, 2, 3]);
    // An entry in use does not lose its bytes: it is still the one that was handed out.
    assert_eq!(pins[0].bytes(), 100);
    store.audit();
}

#[test]
fn an_entry_larger_than_the_bound_is_served_and_evicts_nothing() {
    let store = store(300);
    fill(&store, 0, 100, 1);
    assert!(!compute(lead(&store, 1), 1, 301, 1000).is_kept());
    assert_eq!(resident(&store, 0..2), [0]);
    assert_eq!(store.stats().rejected_too_large, 1);
    assert!(compute(lead(&store, 1), 1, 300, 1000).is_kept());
    assert_eq!((store.stats().bytes, store.stats().evicted_entries), (300, 1));
}
