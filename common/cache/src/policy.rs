//! Which residents go first when room is needed.
//!
//! The policy is GreedyDual-Size-Frequency (L. Cherkasova, "Improving WWW Proxies Performance with
//! Greedy-Dual-Size-Frequency Caching Policy", HP Laboratories HPL-98-69R1, 1998). The priority of a
//! resident is `L + uses * cost / bytes`, where cost is the time that its computation took: the time
//! that it saves per byte, plus the clock `L` at its last use, which is the priority of what went
//! last. So what is not used again ages. A newcomer competes as if it were resident already: it gets
//! in if all that would have to go has a lower priority, else it is the one that goes, and the clock
//! advances to its priority, so that residents age while they keep others out.
//!
//! Prefix states at boundaries go before all others, the one unused for longest first.
//!
//! Owns the clock and the order of all residents that may go. Pinned residents are not in the order,
//! so they are never looked at.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::PrefixKey;

/// What decides a resident's priority.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Worth {
    /// Bytes it occupies.
    pub bytes: usize,
    /// Time that computing it again would take.
    pub cost: Duration,
    /// Times it was asked for, the first time included.
    pub uses: u64,
}

impl Worth {
    /// Seconds saved per byte.
    fn density(&self) -> f64 {
        self.uses as f64 * self.cost.as_secs_f64() / self.bytes.max(1) as f64
    }
}

/// Boundary states, the one unused for longest first.
#[derive(Default)]
pub(crate) struct Boundaries {
    by_age: BTreeMap<u64, PrefixKey>,
    next_age: u64,
    bytes: usize,
}

/// A priority; the lowest goes first.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Priority(f64);

/// A resident's place in the order. Of equal priorities the older goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank {
    priority: Priority,
    age: u64,
}

/// The order of all residents that may go, with their bytes.
pub(crate) struct Order<Id> {
    clock: f64,
    next_age: u64,
    ranks: BTreeMap<Rank, (Id, usize)>,
}

impl<Id: Copy> Order<Id> {
    pub fn new() -> Self {
        Order { clock: 0.0, next_age: 0, ranks: BTreeMap::new() }
    }

    /// The priority of something used now.
    pub fn priority(&self, worth: &Worth) -> Priority {
        Priority(self.clock + worth.density())
    }

    /// Enters `id` as used now.
    pub fn insert(&mut self, id: Id, worth: &Worth) -> Rank {
        let rank = Rank { priority: self.priority(worth), age: self.next_age };
        self.next_age += 1;
        self.ranks.insert(rank, (id, worth.bytes));
        rank
    }

    /// Takes a resident out of the order: it is used, or gone for another reason than its priority.
    pub fn remove(&mut self, rank: &Rank) {
        let removed = self.ranks.remove(rank);
        debug_assert!(removed.is_some(), "a rank is in the order until it is removed");
    }

    /// Takes out the resident at `rank` because others are worth more; the clock advances.
    pub fn evict(&mut self, rank: &Rank) {
        self.remove(rank);
        self.advance(rank.priority);
    }

    /// A newcomer of this priority was kept out.
    pub fn reject(&mut self, newcomer: Priority) {
        self.advance(newcomer);
    }

    fn advance(&mut self, priority: Priority) {
        self.clock = self.clock.max(priority.0);
    }

    /// Residents in the order in which they would go.
    pub fn ascending(&self) -> impl Iterator<Item = (Rank, Id, usize)> {
        self.ranks.iter().map(|(rank, (id, bytes))| (*rank, *id, *bytes))
    }

    pub fn len(&self) -> usize {
        self.ranks.len()
    }
}

impl Rank {
    /// Whether the resident goes before one of `priority`.
    pub fn is_below(&self, priority: Priority) -> bool {
        self.priority < priority
    }
}

impl Eq for Priority {}

impl PartialOrd for Priority {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Priority {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl Boundaries {
    /// Enters one as used now; its age.
    pub fn insert(&mut self, key: PrefixKey, bytes: usize) -> u64 {
        let age = self.next_age;
        self.next_age += 1;
        self.bytes += bytes;
        self.by_age.insert(age, key);
        age
    }

    /// Takes one out.
    pub fn remove(&mut self, age: u64, bytes: usize) {
        let removed = self.by_age.remove(&age);
        debug_assert!(removed.is_some(), "a boundary state is listed once");
        self.bytes -= bytes;
    }

    /// The one that goes next: its age and key.
    pub fn oldest(&self) -> Option<(u64, PrefixKey)> {
        self.by_age.first_key_value().map(|(age, key)| (*age, *key))
    }

    /// Bytes of all of them.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn len(&self) -> usize {
        self.by_age.len()
    }
}
