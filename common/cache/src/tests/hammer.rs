//! Many threads that do everything at once.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;

use hypic_state::{ComposeRule, PartState};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::*;
use crate::{Flight, PrefixChain, PrefixKey, PrefixKind};

const SEGMENTS: u32 = 40;
const THREADS: u64 = 4;
const STEPS: usize = 4000;
/// A wake-up that takes this long is lost.
const PATIENCE: Duration = Duration::from_secs(20);

/// A prefix state that may use an entry.
struct State {
    bytes: usize,
    _entry: Option<Pinned<Dummy>>,
}

impl Stored for State {
    fn bytes(&self) -> usize {
        self.bytes
    }
}

fn bytes_of(n: u32) -> usize {
    20 + (n as usize * 37) % 150
}

fn prefix_key(n: u32) -> PrefixKey {
    let space = KeySpace::new(Fingerprint([0; 32]), DType::F32);
    PrefixChain::new(&space, 0, ComposeRule::Last, SEAM, &[], b"").segment(&[n]).key()
}

fn assert_is(entry: &Pinned<Dummy>, n: u32) {
    assert_eq!((entry.tokens(), entry.bytes()), (&tokens(n), bytes_of(n)));
    let LayerPart::Attention(block) = &**entry.part(1) else { panic!("layer 1 is attention") };
    assert_eq!(block.mark, n);
}

/// Follows a flight to its end, awake only when woken.
fn follow(flight: &Flight<Dummy>, n: u32) -> Option<Pinned<Dummy>> {
    let (news, inbox) = mpsc::channel();
    flight.subscribe(Arc::new(move || _ = news.send(())));
    for layer in 0..2 {
        loop {
            match flight.part(layer) {
                PartState::Ready(_) => break,
                PartState::Failed(_) => return None,
                PartState::Pending => inbox.recv_timeout(PATIENCE).expect("no wake-up is lost"),
            }
        }
    }
    // The parts are all a request needs; this one wants the guard too.
    while flight.entry().is_none() {
        assert_eq!(flight.failure(), None, "a flight with all parts completes");
        inbox.recv_timeout(PATIENCE).expect("no wake-up is lost");
    }
    let entry = flight.entry()?;
    assert_is(&entry, n);
    Some(entry)
}

struct Work<'a> {
    store: &'a Store<Dummy, State>,
    computing: &'a [AtomicUsize],
    claims: &'a AtomicUsize,
    rng: StdRng,
    held: Vec<Pinned<Dummy>>,
}

impl Work<'_> {
    fn step(&mut self) {
        // Some segments are wanted far more often than others.
        let n = self.rng.random_range(0..SEGMENTS).min(self.rng.random_range(0..SEGMENTS));
        match self.rng.random_range(0..10) {
            0..6 => self.claim(n),
            6 => self.held.clear(),
            7 => {
                let _entry = self.rng.random_bool(0.3).then(|| self.held.pop()).flatten();
                let kinds = [PrefixKind::Boundary, PrefixKind::Query, PrefixKind::End];
                let kind = kinds[self.rng.random_range(0..3)];
                let state = Arc::new(State { bytes: 10 + n as usize, _entry });
                self.store.put_prefix(prefix_key(n), state, kind, Duration::from_millis(n.into()));
            }
            8 => {
                let keys = [n, n / 2, n / 3].map(prefix_key);
                if let Some((index, state)) = self.store.longest_prefix(keys) {
                    assert_eq!(state.bytes, 10 + [n, n / 2, n / 3][index] as usize);
                }
            }
            _ => {
                let stats = self.store.stats();
                assert!(stats.bytes <= stats.capacity && stats.pinned_bytes <= stats.entry_bytes);
                self.store.audit();
            }
        }
    }

    fn claim(&mut self, n: u32) {
        self.claims.fetch_add(1, Ordering::Relaxed);
        let entry = match self.store.claim(key(n), &tokens(n), SEAM) {
            Claim::Hit(entry) => Some(entry),
            Claim::Join(flight) => follow(&flight, n),
            Claim::Lead(lead) => self.compute(lead, n),
        };
        if let Some(entry) = entry {
            assert_is(&entry, n);
            if self.rng.random_bool(0.5) {
                self.held.push(entry);
            }
        }
        if self.held.len() > 3 {
            let any = self.rng.random_range(0..self.held.len());
            drop(self.held.swap_remove(any));
        }
    }

    fn compute(&mut self, lead: Lead<Dummy>, n: u32) -> Option<Pinned<Dummy>> {
        let others = self.computing[n as usize].fetch_add(1, Ordering::SeqCst);
        assert_eq!(others, 0, "segment {n} is computed by two at once");
        let first = self.rng.random_range(0..2);
        for layer in [first, 1 - first] {
            if self.rng.random_bool(0.1) {
                self.computing[n as usize].fetch_sub(1, Ordering::SeqCst);
                if self.rng.random_bool(0.5) {
                    lead.fail("as planned");
                }
                return None;
            }
            thread::yield_now();
            let part = if layer == 0 { recurrent(n, 1) } else { attention(n, bytes_of(n) - TOKEN_BYTES - 1) };
            assert!(lead.publish(layer, part));
        }
        self.computing[n as usize].fetch_sub(1, Ordering::SeqCst);
        let cost = Duration::from_millis(self.rng.random_range(0..50));
        Some(lead.complete(&layout(), cost).unwrap())
    }
}

fn hammer(capacity_bytes: usize, seed: u64) {
    let store: Store<Dummy, State> = Store::new(StoreConfig { capacity_bytes });
    let computing: Vec<_> = (0..SEGMENTS).map(|_| AtomicUsize::new(0)).collect();
    let claims = AtomicUsize::new(0);
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let rng = StdRng::seed_from_u64(seed * THREADS + thread);
            let mut work = Work { store: &store, computing: &computing, claims: &claims, rng, held: Vec::new() };
            scope.spawn(move || (0..STEPS).for_each(|_| work.step()));
        }
    });

    store.audit();
    let stats = store.stats();
    assert_eq!(stats.flights, 0, "{stats:?}");
    assert!(stats.bytes <= capacity_bytes, "{stats:?}");
    assert_eq!(stats.hits + stats.misses + stats.joins, claims.into_inner() as u64, "{stats:?}");
    assert_eq!(stats.hash_mismatches, 0, "{stats:?}");
    if capacity_bytes == 0 {
        assert_eq!((stats.entries, stats.prefix_states, stats.hits), (0, 0, 0));
        return;
    }
    assert!(stats.hits > 0 && stats.failed_flights > 0 && stats.prefix_hits > 0, "{stats:?}");
    assert!(stats.evicted_entries > 0 && stats.thinned_boundaries > 0, "{stats:?}");

    // What only prefix states use is free once they are gone: a newcomer worth everything takes all.
    let rest = compute(lead(&store, SEGMENTS), SEGMENTS, capacity_bytes, 1_000_000_000);
    assert!(rest.is_kept());
    let stats = store.stats();
    assert_eq!((stats.bytes, stats.entries, stats.prefix_states), (capacity_bytes, 1, 0));
    drop(rest);
    assert_eq!(store.stats().pinned, 0);
    store.audit();
}

#[test]
fn books_balance_whatever_many_threads_do() {
    for (seed, capacity_bytes) in [0, 300, 1000, 2500].into_iter().enumerate() {
        hammer(capacity_bytes, seed as u64);
    }
}
