//! Prefix states beside entries in one budget.

use hypic_state::ComposeRule;

use super::*;
use crate::{PrefixChain, PrefixKey, PrefixKind};

fn prefix_key(n: u32) -> PrefixKey {
    let space = KeySpace::new(Fingerprint([0; 32]), DType::F32);
    PrefixChain::new(&space, 0, ComposeRule::Transition, SEAM, &[], b"").rows(&[n]).key()
}

fn put(store: &TestStore, n: u32, bytes: usize, kind: PrefixKind, cost: u64) -> bool {
    store.put_prefix(prefix_key(n), Arc::new(Block { bytes, mark: n }), kind, seconds(cost))
}

fn find(store: &TestStore, keys: &[u32]) -> Option<(usize, u32)> {
    store.longest_prefix(keys.iter().map(|n| prefix_key(*n))).map(|(index, value)| (index, value.mark))
}

/// Which prefix states are there. Counts as a use.
fn kept(store: &TestStore, among: std::ops::Range<u32>) -> Vec<u32> {
    among.filter(|n| find(store, &[*n]).is_some()).collect()
}

#[test]
fn the_first_key_with_a_state_wins() {
    let store = store(1000);
    assert!(put(&store, 1, 10, PrefixKind::Boundary, 1));
    assert!(put(&store, 2, 10, PrefixKind::End, 1));
    assert_eq!(find(&store, &[5, 2, 1]), Some((1, 2)));
    assert_eq!(find(&store, &[1, 2]), Some((0, 1)));
    assert_eq!(find(&store, &[6, 7]), None);
    assert_eq!(find(&store, &[]), None);
    let stats = store.stats();
    assert_eq!((stats.prefix_hits, stats.prefix_misses, stats.prefix_states, stats.prefix_bytes), (2, 2, 2, 20));
    store.audit();
}

#[test]
fn boundary_states_go_first_and_the_oldest_of_them_before_the_others() {
    let store = store(500);
    put(&store, 1, 100, PrefixKind::Boundary, 1_000_000);
    put(&store, 2, 100, PrefixKind::Boundary, 1);
    put(&store, 3, 100, PrefixKind::Query, 0);
    fill(&store, 0, 200, 0);
    // However little the newcomer is worth.
    fill(&store, 1, 50, 0);
    assert_eq!(kept(&store, 1..4), [2, 3]);
    fill(&store, 2, 60, 0);
    assert_eq!(kept(&store, 1..4), [3]);
    assert_eq!(resident(&store, 0..3), [0, 1, 2]);
    assert_eq!((store.stats().thinned_boundaries, store.stats().evicted_entries), (2, 0));
    store.audit();
}

#[test]
fn a_boundary_state_displaces_only_older_ones() {
    let store = store(300);
    fill(&store, 0, 150, 0);
    put(&store, 1, 50, PrefixKind::End, 0);
    assert!(put(&store, 2, 100, PrefixKind::Boundary, 1));
    assert!(put(&store, 3, 100, PrefixKind::Boundary, 1));
    assert!(!put(&store, 4, 101, PrefixKind::Boundary, 1_000_000));
    assert_eq!(kept(&store, 1..5), [1, 3]);
    assert_eq!(resident(&store, 0..1), [0]);
    assert_eq!((store.stats().rejected_no_room, store.stats().thinned_boundaries), (1, 1));
    assert!(!put(&store, 5, 301, PrefixKind::Boundary, 1));
    assert_eq!(store.stats().rejected_too_large, 1);
    store.audit();
}

#[test]
fn a_boundary_state_in_use_is_young() {
    let store = store(300);
    (1..4).for_each(|n| _ = put(&store, n, 100, PrefixKind::Boundary, 1));
    // One is found, one is put again.
    assert!(find(&store, &[1]).is_some());
    put(&store, 2, 100, PrefixKind::Boundary, 1);
    put(&store, 4, 100, PrefixKind::Boundary, 1);
    assert_eq!(kept(&store, 1..5), [1, 2, 4]);
}

#[test]
fn other_states_and_entries_go_by_one_measure() {
    let store = store(400);
    fill(&store, 0, 100, 10);
    put(&store, 1, 100, PrefixKind::End, 2);
    put(&store, 2, 100, PrefixKind::Query, 20);
    fill(&store, 3, 100, 5);
    // Worth less than all of them.
    assert!(!put(&store, 4, 100, PrefixKind::End, 1));
    assert_eq!(store.stats().rejected_low_value, 1);
    // The clock has advanced to 0.01.
    fill(&store, 5, 100, 6);
    assert_eq!(store.stats().evicted_prefix_states, 1);
    assert!(put(&store, 6, 100, PrefixKind::Query, 7));
    assert_eq!(resident(&store, 0..6), [0, 5]);
    assert_eq!(kept(&store, 1..7), [2, 6]);
    store.audit();
}

#[test]
fn a_state_put_again_stays_under_the_stronger_kind() {
    let store = store(300);
    put(&store, 1, 100, PrefixKind::Boundary, 10);
    assert!(put(&store, 1, 100, PrefixKind::End, 10));
    put(&store, 2, 100, PrefixKind::End, 10);
    put(&store, 2, 100, PrefixKind::Boundary, 10);
    assert_eq!((store.stats().prefix_states, store.stats().prefix_bytes), (2, 200));
    store.audit();
    // Neither is thinned for a boundary state's sake.
    assert!(put(&store, 3, 100, PrefixKind::Boundary, 1));
    assert!(put(&store, 4, 100, PrefixKind::Boundary, 1));
    assert_eq!(kept(&store, 1..5), [1, 2, 4]);
}

/// A prefix state that uses an entry.
struct Composed {
    bytes: usize,
    _entry: Pinned<Dummy>,
}

impl Stored for Composed {
    fn bytes(&self) -> usize {
        self.bytes
    }
}

#[test]
fn states_that_use_entries_let_them_go() {
    for kind in [PrefixKind::Boundary, PrefixKind::End] {
        let store: Store<Dummy, Composed> = Store::new(StoreConfig { capacity_bytes: 300 });
        for n in 0..2 {
            let entry = compute(lead(&store, n), n, 100, 1);
            let state = Arc::new(Composed { bytes: 50, _entry: entry });
            assert!(store.put_prefix(prefix_key(n), state, kind, seconds(1)));
        }
        assert_eq!((store.stats().bytes, store.stats().pinned), (300, 2));
        // Room for this needs an entry to go that only a prefix state uses.
        assert!(compute(lead(&store, 2), 2, 200, 1000).is_kept());
        store.audit();
        let stats = store.stats();
        assert_eq!((stats.bytes, stats.pinned), (300, 0));
        assert_eq!((stats.entries, stats.prefix_states), (2, 0));
    }
}
