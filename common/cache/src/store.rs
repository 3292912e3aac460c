//! The in-memory store: entries and prefix states in one budget, and the computations under way.
//!
//! Owns which entries are resident and which are being computed, so that a segment is computed once
//! however many requests miss it at the same time. While there is room everything is kept; under
//! pressure the [policy](crate::policy) decides. Nothing that is in use goes, so the bound can make
//! a newcomer stay out: it is served all the same, an answer never depends on what is kept. What can
//! go wrong is a lead that vanishes; its flight then fails at once and the key is free again.
//! Entries in the making, and those that were not kept, are not part of the budget.
//!
//! `foyer`'s in-memory cache was weighed for this. Its policies (FIFO, LRU, w-TinyLFU, S3-FIFO,
//! SIEVE) are a closed set that orders by recency and frequency; a weigher gives the bytes, but there
//! is no place for what an entry cost, none for an admission that depends on what would have to go
//! (its filter sees the newcomer alone), and none for two classes of residents in one budget.

use std::collections::HashMap;
use std::collections::hash_map;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use hypic_state::{Entry, Storage, Stored};
use parking_lot::Mutex;
use tracing::{debug, warn};

use crate::lead::Books;
use crate::ledger::{Gone, Ledger, Lookup, Room, same_tokens};
use crate::pinned::Keeper;
use crate::policy::Worth;
use crate::{Change, EntryKey, Flight, Lead, Pinned, PrefixKey, PrefixKind, Stats, Watch};

/// Settings of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreConfig {
    /// Bound on the bytes of entries and prefix states together. At zero nothing is kept.
    pub capacity_bytes: usize,
}

impl Default for StoreConfig {
    /// One GiB.
    fn default() -> Self {
        StoreConfig { capacity_bytes: 1 << 30 }
    }
}

/// Entries in memory `S` and prefix states `P`. Clones share one store.
pub struct Store<S: Storage, P: Stored> {
    shared: Arc<Shared<S, P>>,
}

struct Shared<S: Storage, P> {
    state: Mutex<State<S, P>>,
}

struct State<S: Storage, P> {
    ledger: Ledger<S, P>,
    flights: HashMap<EntryKey, Arc<Flight<S>>>,
}

/// Answer to the request for an entry.
pub enum Claim<S: Storage> {
    /// It is there.
    Hit(Pinned<S>),
    /// Another request is computing it: follow.
    Join(Arc<Flight<S>>),
    /// It is yours to compute.
    Lead(Lead<S>),
}

impl<S: Storage, P: Stored> Store<S, P> {
    /// An empty store.
    pub fn new(config: StoreConfig) -> Self {
        let state = State { ledger: Ledger::new(config.capacity_bytes), flights: HashMap::new() };
        Store { shared: Arc::new(Shared { state: Mutex::new(state) }) }
    }

    /// The entry of the segment `tokens` with a seam of `seam` tokens, or its computation, or the
    /// duty to compute it. `key` must be the segment's key; tokens are compared all the same, and if
    /// others are found under it, the caller leads a computation that nobody shares.
    pub fn claim(&self, key: EntryKey, tokens: &Arc<[u32]>, seam: usize) -> Claim<S> {
        let mut state = self.shared.state.lock();
        let State { ledger, flights } = &mut *state;
        let shareable = match ledger.look_up(&key, tokens) {
            Lookup::Found(entry) => {
                ledger.stats.hits += 1;
                drop(state);
                return Claim::Hit(self.pinned(entry, key));
            }
            Lookup::Mismatch => false,
            Lookup::Absent => match flights.entry(key) {
                hash_map::Entry::Occupied(flight) => {
                    let flight = flight.get();
                    if same_tokens(flight.tokens(), tokens) {
                        ledger.stats.joins += 1;
                        flight.follow();
                        return Claim::Join(flight.clone());
                    }
                    false
                }
                hash_map::Entry::Vacant(_) => true,
            },
        };

        ledger.stats.misses += 1;
        let flight = Arc::new(Flight::new(tokens.clone(), seam));
        if shareable {
            flights.insert(key, flight.clone());
            ledger.stats.flights = flights.len();
            ledger.tell(Change::Begun(key));
        } else {
            ledger.stats.hash_mismatches += 1;
            warn!(entry = %key, "other tokens under the same key; computing without sharing");
        }
        drop(state);
        let shared: Arc<dyn Books<S>> = self.shared.clone();
        let books = shareable.then(|| Arc::downgrade(&shared));
        Claim::Lead(Lead::new(key, flight, books))
    }

    /// A computation of an entry that nobody shares and that is not kept: for one whose shared computation does not
    /// get on.
    pub fn lead_alone(&self, key: EntryKey, tokens: &Arc<[u32]>, seam: usize) -> Lead<S> {
        Lead::new(key, Arc::new(Flight::new(tokens.clone(), seam)), None)
    }

    /// The entry of the segment `tokens`, if it is there. Counts as a use, or as a miss.
    pub fn get(&self, key: EntryKey, tokens: &Arc<[u32]>) -> Option<Pinned<S>> {
        let mut state = self.shared.state.lock();
        let found = state.ledger.look_up(&key, tokens);
        let stats = &mut state.ledger.stats;
        match found {
            Lookup::Found(entry) => {
                stats.hits += 1;
                drop(state);
                return Some(self.pinned(entry, key));
            }
            Lookup::Mismatch => stats.hash_mismatches += 1,
            Lookup::Absent => {}
        }
        stats.misses += 1;
        None
    }

    /// Whether there is an entry under `key`. Counts as nothing, and compares no tokens: whoever takes the entry does.
    pub fn contains(&self, key: EntryKey) -> bool {
        self.shared.state.lock().ledger.contains(&key)
    }

    /// All that the store holds and all that is in the making, and every change from now on, in order.
    pub fn watch(&self) -> (Vec<Change<P>>, Watch<P>) {
        let state = self.shared.state.lock();
        let (mut held, changes) = state.ledger.watch();
        held.extend(state.flights.keys().map(|&key| Change::Begun(key)));
        (held, changes)
    }

    /// Keeps a prefix state, if there is room, whose computation took `cost`; says whether it is
    /// there now. One that is there already stays, as used now, under the stronger of both kinds.
    /// A state that goes later lives on with those who use it.
    pub fn put_prefix(&self, key: PrefixKey, value: Arc<P>, kind: PrefixKind, cost: Duration) -> bool {
        let worth = Worth { bytes: value.bytes(), cost, uses: 1 };
        self.shared.with_room(|state, gone| {
            let room = state.ledger.admit_prefix(key, &value, kind, worth, gone);
            (room, room == Room::Made)
        })
    }

    /// The first of `keys` (longest prefix first) under which there is a state: its index, and the
    /// state.
    pub fn longest_prefix(&self, keys: impl IntoIterator<Item = PrefixKey>) -> Option<(usize, Arc<P>)> {
        // One lock per key, so that the caller's iterator never runs under it.
        for (index, key) in keys.into_iter().enumerate() {
            let mut state = self.shared.state.lock();
            if let Some(value) = state.ledger.use_prefix(&key, false) {
                state.ledger.stats.prefix_hits += 1;
                return Some((index, value));
            }
        }
        self.shared.state.lock().ledger.stats.prefix_misses += 1;
        None
    }

    /// What the store holds and has done.
    pub fn stats(&self) -> Stats {
        self.shared.state.lock().ledger.stats
    }

    /// Counts everything anew and compares.
    #[cfg(test)]
    pub(crate) fn audit(&self) {
        let state = self.shared.state.lock();
        state.ledger.audit();
        assert_eq!(state.ledger.stats.flights, state.flights.len());
    }

    fn pinned(&self, entry: Arc<Entry<S>>, key: EntryKey) -> Pinned<S> {
        self.shared.pinned(entry, key)
    }
}

impl<S: Storage, P: Stored> Shared<S, P> {
    /// A guard for a pin that has been counted.
    fn pinned(self: &Arc<Self>, entry: Arc<Entry<S>>, key: EntryKey) -> Pinned<S> {
        let keeper: Arc<dyn Keeper> = self.clone();
        Pinned::kept(entry, Arc::downgrade(&keeper), key)
    }

    /// Runs `admit` until it has an answer, dropping between two tries, without the lock, what it let
    /// go. Each try that asks for another has let something go, so they end.
    fn with_room<R>(&self, mut admit: impl FnMut(&mut State<S, P>, &mut Gone<S, P>) -> (Room, R)) -> R {
        loop {
            let mut gone = Gone::default();
            let (room, result) = admit(&mut self.state.lock(), &mut gone);
            drop(gone);
            if room != Room::AskAgain {
                return result;
            }
        }
    }
}

impl<S: Storage, P: Stored> State<S, P> {
    /// Takes `flight` off the list: it ends.
    fn land(&mut self, key: &EntryKey, flight: &Arc<Flight<S>>) {
        let landed = self.flights.remove(key);
        debug_assert!(landed.is_some_and(|landed| Arc::ptr_eq(&landed, flight)), "a flight is listed until it ends");
        self.ledger.stats.flights = self.flights.len();
        self.ledger.tell(Change::Ended(*key));
    }
}

impl<S: Storage, P: Stored> Keeper for Shared<S, P> {
    fn unpin(&self, key: &EntryKey) {
        self.state.lock().ledger.unpin(key);
    }
}

impl<S: Storage, P: Stored> Books<S> for Shared<S, P> {
    fn admit(self: Arc<Self>, key: EntryKey, flight: &Arc<Flight<S>>, entry: Entry<S>, cost: Duration) -> Pinned<S> {
        let entry = Arc::new(entry);
        let room = self.with_room(|state, gone| {
            let worth = Worth { bytes: entry.bytes(), cost, uses: flight.uses() };
            let room = state.ledger.admit_entry(key, &entry, worth, gone);
            if room != Room::AskAgain {
                state.land(&key, flight);
            }
            (room, room)
        });
        if room == Room::Made {
            return self.pinned(entry, key);
        }
        debug!(entry = %key, bytes = entry.bytes(), "entry not kept");
        Pinned::unkept(entry)
    }

    fn give_up(&self, key: &EntryKey, flight: &Arc<Flight<S>>, reason: &str) {
        debug!(entry = %key, reason, "computation failed");
        let mut state = self.state.lock();
        state.land(key, flight);
        state.ledger.stats.failed_flights += 1;
    }
}

impl<S: Storage, P: Stored> Clone for Store<S, P> {
    fn clone(&self) -> Self {
        Store { shared: self.shared.clone() }
    }
}

impl<S: Storage, P: Stored> fmt::Debug for Store<S, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Store").field(&self.stats()).finish()
    }
}

impl<S: Storage> fmt::Debug for Claim<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Claim::Hit(entry) => f.debug_tuple("Hit").field(entry).finish(),
            Claim::Join(flight) => f.debug_tuple("Join").field(flight).finish(),
            Claim::Lead(lead) => f.debug_tuple("Lead").field(lead).finish(),
        }
    }
}
