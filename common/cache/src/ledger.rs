//! The store's books: what is resident, what it weighs, who goes when room is needed.
//!
//! Owns all residents and the sums over them; it is used under the store's lock. What can go wrong is
//! that the sums drift from what is there, or that something is dropped under the lock whose own
//! drop needs it: whatever goes is therefore handed out in [`Gone`] and dropped by the caller.

use std::collections::HashMap;
use std::sync::Arc;

use hypic_state::{Entry, Storage, Stored};
use tracing::debug;

use crate::changes::{Change, Journal, Watch};
use crate::policy::{Boundaries, Order, Rank, Worth};
use crate::{EntryKey, PrefixKey, PrefixKind, Stats};

/// The residents, in books that balance.
pub(crate) struct Ledger<S: Storage, P> {
    entries: HashMap<EntryKey, EntrySlot<S>>,
    prefixes: HashMap<PrefixKey, PrefixSlot<P>>,
    /// All that may go by its priority: entries that are not pinned, prefix states that are not at
    /// boundaries.
    order: Order<Resident>,
    boundaries: Boundaries,
    /// The sums, and counts of what happened.
    pub stats: Stats,
    /// Tells watchers what comes and goes.
    journal: Journal<P>,
}

#[derive(Clone, Copy, Debug)]
enum Resident {
    Entry(EntryKey),
    Prefix(PrefixKey),
}

struct EntrySlot<S: Storage> {
    entry: Arc<Entry<S>>,
    worth: Worth,
    hold: Hold,
}

/// Whether an entry is in use.
enum Hold {
    /// By this many guards, at least one.
    Pinned(usize),
    /// It is not.
    Free(Rank),
}

struct PrefixSlot<P> {
    value: Arc<P>,
    worth: Worth,
    place: Place,
}

/// Among what a prefix state waits to go.
enum Place {
    /// Among the boundary states, by its last use.
    Boundary(u64),
    /// Among all others.
    Ranked(Rank),
}

/// What is no longer resident. To be dropped without the lock.
#[must_use]
pub(crate) struct Gone<S: Storage, P> {
    entries: Vec<Arc<Entry<S>>>,
    prefixes: Vec<Arc<P>>,
}

/// Whether there is room for a newcomer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Room {
    /// Yes.
    Made,
    /// Prefix states had to go that may have held guards: drop them and ask again.
    AskAgain,
    /// No.
    Refused,
}

/// Result of looking for an entry.
pub(crate) enum Lookup<S: Storage> {
    /// Found, and pinned once more.
    Found(Arc<Entry<S>>),
    /// There is an entry under the key, of other tokens.
    Mismatch,
    /// There is none.
    Absent,
}

impl<S: Storage, P: Stored> Ledger<S, P> {
    pub fn new(capacity: usize) -> Self {
        Ledger {
            entries: HashMap::new(),
            prefixes: HashMap::new(),
            order: Order::new(),
            boundaries: Boundaries::default(),
            stats: Stats { capacity, ..Stats::default() },
            journal: Journal::new(),
        }
    }

    /// Whether there is an entry under `key`, of whatever tokens.
    pub fn contains(&self, key: &EntryKey) -> bool {
        self.entries.contains_key(key)
    }

    /// All residents, and every change from now on.
    pub fn watch(&self) -> (Vec<Change<P>>, Watch<P>) {
        let entries = self.entries.iter().map(|(key, slot)| Change::of_entry(*key, &slot.entry));
        let prefixes = self.prefixes.iter().map(|(key, slot)| Change::of_prefix(*key, &slot.value));
        (entries.chain(prefixes).collect(), self.journal.watch())
    }

    /// Tell watchers of something that is no resident's coming or going.
    pub fn tell(&self, change: Change<P>) {
        self.journal.tell(change);
    }

    /// Finds an entry; one that is found has been used and has one more pin.
    pub fn look_up(&mut self, key: &EntryKey, tokens: &Arc<[u32]>) -> Lookup<S> {
        let Some(slot) = self.entries.get_mut(key) else {
            return Lookup::Absent;
        };
        if !same_tokens(slot.entry.tokens(), tokens) {
            return Lookup::Mismatch;
        }
        slot.worth.uses += 1;
        match &mut slot.hold {
            Hold::Pinned(pins) => *pins += 1,
            Hold::Free(rank) => {
                self.order.remove(rank);
                slot.hold = Hold::Pinned(1);
                self.stats.pinned += 1;
                self.stats.pinned_bytes += slot.worth.bytes;
            }
        }
        Lookup::Found(slot.entry.clone())
    }

    /// Ends one pin. An entry that nobody uses any more takes its place in the order as used now.
    pub fn unpin(&mut self, key: &EntryKey) {
        let Some(slot) = self.entries.get_mut(key) else {
            debug_assert!(false, "a pinned entry is resident");
            return;
        };
        match &mut slot.hold {
            Hold::Pinned(1) => {
                slot.hold = Hold::Free(self.order.insert(Resident::Entry(*key), &slot.worth));
                self.stats.pinned -= 1;
                self.stats.pinned_bytes -= slot.worth.bytes;
            }
            Hold::Pinned(pins) => *pins -= 1,
            Hold::Free(_) => debug_assert!(false, "a pin ends once"),
        }
        self.check_sums();
    }

    /// Keeps `entry`, pinned once, if there is room.
    pub fn admit_entry(&mut self, key: EntryKey, entry: &Arc<Entry<S>>, worth: Worth, gone: &mut Gone<S, P>) -> Room {
        let room = self.make_room(&worth, true, gone);
        if room != Room::Made {
            return room;
        }
        self.journal.tell(Change::of_entry(key, entry));
        let slot = EntrySlot { entry: entry.clone(), worth, hold: Hold::Pinned(1) };
        let replaced = self.entries.insert(key, slot);
        debug_assert!(replaced.is_none(), "an entry is computed once while it is resident");
        self.stats.entries += 1;
        self.stats.pinned += 1;
        self.stats.pinned_bytes += worth.bytes;
        self.stats.entry_bytes += worth.bytes;
        self.stats.bytes += worth.bytes;
        self.check_sums();
        room
    }

    /// Keeps a prefix state if there is room. One that is there already stays, as used now and under
    /// the stronger of the two kinds.
    pub fn admit_prefix(
        &mut self,
        key: PrefixKey,
        value: &Arc<P>,
        kind: PrefixKind,
        worth: Worth,
        gone: &mut Gone<S, P>,
    ) -> Room {
        let ranked = kind != PrefixKind::Boundary;
        if self.use_prefix(&key, ranked).is_some() {
            return Room::Made;
        }
        let room = self.make_room(&worth, ranked, gone);
        if room != Room::Made {
            return room;
        }
        let place = self.place(key, &worth, ranked);
        self.journal.tell(Change::of_prefix(key, value));
        self.prefixes.insert(key, PrefixSlot { value: value.clone(), worth, place });
        self.stats.prefix_states += 1;
        self.stats.prefix_bytes += worth.bytes;
        self.stats.bytes += worth.bytes;
        self.check_sums();
        room
    }

    /// A prefix state, as used now; `ranked` also moves it from the boundary states to the others.
    pub fn use_prefix(&mut self, key: &PrefixKey, ranked: bool) -> Option<Arc<P>> {
        let slot = self.prefixes.get_mut(key)?;
        slot.worth.uses += 1;
        let worth = slot.worth;
        let ranked = match slot.place {
            Place::Boundary(age) => {
                self.boundaries.remove(age, worth.bytes);
                ranked
            }
            Place::Ranked(rank) => {
                self.order.remove(&rank);
                true
            }
        };
        let place = self.place(*key, &worth, ranked);
        let slot = self.prefixes.get_mut(key)?;
        slot.place = place;
        Some(slot.value.clone())
    }

    fn place(&mut self, key: PrefixKey, worth: &Worth, ranked: bool) -> Place {
        if ranked {
            Place::Ranked(self.order.insert(Resident::Prefix(key), worth))
        } else {
            Place::Boundary(self.boundaries.insert(key, worth.bytes))
        }
    }

    /// Makes room for a newcomer, or changes nothing. Boundary states go first; a newcomer that is
    /// not `ranked`, being one itself, can ask for nothing else. Then go those of lower priority than
    /// the newcomer, lowest first.
    fn make_room(&mut self, newcomer: &Worth, ranked: bool, gone: &mut Gone<S, P>) -> Room {
        if newcomer.bytes > self.stats.capacity {
            self.stats.rejected_too_large += 1;
            return Room::Refused;
        }
        let free = self.stats.capacity - self.stats.bytes;
        let short = newcomer.bytes.saturating_sub(free);
        if short <= self.boundaries.bytes() {
            self.thin(short, gone);
            return Room::Made;
        }
        if !ranked {
            self.stats.rejected_no_room += 1;
            return Room::Refused;
        }

        let short_of_others = short - self.boundaries.bytes();
        let priority = self.order.priority(newcomer);
        let mut found = 0;
        let mut outranked = false;
        let mut victims = Vec::new();
        for (rank, resident, bytes) in self.order.ascending() {
            if found >= short_of_others {
                break;
            }
            if !rank.is_below(priority) {
                outranked = true;
                break;
            }
            found += bytes;
            victims.push((rank, resident));
        }
        if outranked {
            self.order.reject(priority);
            self.stats.rejected_low_value += 1;
            return Room::Refused;
        }
        if found >= short_of_others {
            self.thin(short, gone);
            victims.into_iter().for_each(|(rank, resident)| self.evict(rank, resident, gone));
            return Room::Made;
        }

        // All that is left is pinned. Some pins may be those of prefix states that are worth less.
        victims.retain(|(_, resident)| matches!(resident, Resident::Prefix(_)));
        if victims.is_empty() && self.boundaries.bytes() == 0 {
            self.stats.rejected_no_room += 1;
            return Room::Refused;
        }
        self.thin(short, gone);
        victims.into_iter().for_each(|(rank, resident)| self.evict(rank, resident, gone));
        Room::AskAgain
    }

    /// Lets boundary states of at least `bytes` bytes go, or all.
    fn thin(&mut self, bytes: usize, gone: &mut Gone<S, P>) {
        let keep = self.boundaries.bytes().saturating_sub(bytes);
        while self.boundaries.bytes() > keep {
            let Some((age, key)) = self.boundaries.oldest() else {
                break;
            };
            let Some(slot) = self.prefixes.remove(&key) else { break };
            debug!(prefix = %key, bytes = slot.worth.bytes, "boundary state thinned");
            self.boundaries.remove(age, slot.worth.bytes);
            self.stats.thinned_boundaries += 1;
            self.journal.tell(Change::PrefixGone(key));
            self.forget_prefix(slot, gone);
        }
    }

    fn evict(&mut self, rank: Rank, resident: Resident, gone: &mut Gone<S, P>) {
        self.order.evict(&rank);
        match resident {
            Resident::Entry(key) => {
                let Some(slot) = self.entries.remove(&key) else { return };
                debug_assert!(matches!(slot.hold, Hold::Free(_)), "pinned entries are not evicted");
                debug!(entry = %key, bytes = slot.worth.bytes, uses = slot.worth.uses, "entry evicted");
                self.stats.evicted_entries += 1;
                self.journal.tell(Change::EntryGone(key));
                self.stats.entries -= 1;
                self.stats.entry_bytes -= slot.worth.bytes;
                self.stats.bytes -= slot.worth.bytes;
                gone.entries.push(slot.entry);
            }
            Resident::Prefix(key) => {
                let Some(slot) = self.prefixes.remove(&key) else { return };
                debug!(prefix = %key, bytes = slot.worth.bytes, uses = slot.worth.uses, "prefix state evicted");
                self.stats.evicted_prefix_states += 1;
                self.journal.tell(Change::PrefixGone(key));
                self.forget_prefix(slot, gone);
            }
        }
    }

    fn forget_prefix(&mut self, slot: PrefixSlot<P>, gone: &mut Gone<S, P>) {
        self.stats.prefix_states -= 1;
        self.stats.prefix_bytes -= slot.worth.bytes;
        self.stats.bytes -= slot.worth.bytes;
        gone.prefixes.push(slot.value);
    }

    fn check_sums(&self) {
        let stats = &self.stats;
        debug_assert!(stats.bytes <= stats.capacity, "the bound holds: {stats:?}");
        debug_assert_eq!(stats.bytes, stats.entry_bytes + stats.prefix_bytes);
        debug_assert!(stats.pinned_bytes <= stats.entry_bytes, "{stats:?}");
        debug_assert_eq!(stats.entries, self.entries.len());
        debug_assert_eq!(stats.prefix_states, self.prefixes.len());
        let waiting = self.order.len() + self.boundaries.len();
        debug_assert_eq!(waiting + stats.pinned, self.entries.len() + self.prefixes.len());
    }

    /// Counts everything anew and compares.
    #[cfg(test)]
    pub fn audit(&self) {
        self.check_sums();
        let is_pinned = |slot: &&EntrySlot<S>| matches!(slot.hold, Hold::Pinned(_));
        let entry_bytes: usize = self.entries.values().map(|slot| slot.entry.bytes()).sum();
        let pinned_bytes: usize = self.entries.values().filter(is_pinned).map(|slot| slot.entry.bytes()).sum();
        let prefix_bytes: usize = self.prefixes.values().map(|slot| slot.value.bytes()).sum();
        let stats = &self.stats;
        assert_eq!((stats.entry_bytes, stats.prefix_bytes), (entry_bytes, prefix_bytes));
        assert_eq!((stats.pinned, stats.pinned_bytes), (self.entries.values().filter(is_pinned).count(), pinned_bytes));
        let boundary = |slot: &&PrefixSlot<P>| matches!(slot.place, Place::Boundary(_));
        let boundary_bytes: usize = self.prefixes.values().filter(boundary).map(|slot| slot.worth.bytes).sum();
        assert_eq!(self.boundaries.bytes(), boundary_bytes);
        for (rank, resident, bytes) in self.order.ascending() {
            let slot_bytes = match resident {
                Resident::Entry(key) => {
                    let slot = &self.entries[&key];
                    assert!(matches!(slot.hold, Hold::Free(free) if free == rank));
                    slot.worth.bytes
                }
                Resident::Prefix(key) => {
                    let slot = &self.prefixes[&key];
                    assert!(matches!(slot.place, Place::Ranked(at) if at == rank));
                    slot.worth.bytes
                }
            };
            assert_eq!(bytes, slot_bytes);
        }
    }
}

impl<S: Storage, P> Default for Gone<S, P> {
    fn default() -> Self {
        Gone { entries: Vec::new(), prefixes: Vec::new() }
    }
}

/// Whether two lists of tokens are equal; usually they are one list.
pub(crate) fn same_tokens(a: &Arc<[u32]>, b: &Arc<[u32]>) -> bool {
    Arc::ptr_eq(a, b) || a == b
}
