//! Who holds what: one table for all members that a router follows.
//!
//! A key leads to its holders in one step, however many members there are. What a member holds is noted under its
//! present stay, the time in which its changes are followed without a gap. A stay that ends takes all that is noted
//! under it away at once: nothing is searched, the notes are merely no longer believed, and are swept out shard by
//! shard, so that nobody waits for it. What is told here is a hint; the member may say otherwise.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use hypic_cache::EntryKey;
use parking_lot::RwLock;
use smallvec::SmallVec;

use super::Holdings;

/// Parts of the table, by a key's first byte: a part that grows or is swept is locked for a moment only.
const SHARDS: usize = 256;

/// The stays of members that have, or make, one entry. Most have one or two holders.
type Stays = SmallVec<[Stay; 4]>;

/// One stay of a member; never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Stay(u32);

/// Which members hold, and which compute, which entries.
pub struct Index {
    shards: Box<[RwLock<Shard>]>,
    members: RwLock<Members>,
    /// Stays that have ended: a shard that has seen fewer has something to sweep.
    ended: AtomicU64,
}

#[derive(Default)]
struct Members {
    /// Those whose stay lasts.
    staying: HashMap<Stay, Arc<str>>,
    /// And how many copies of each there are: one that comes back may come before its old copy has gone.
    followed: HashMap<Arc<str>, usize>,
    next: u32,
}

#[derive(Default)]
struct Shard {
    entries: HashMap<EntryKey, Known>,
    making: HashMap<EntryKey, Stays>,
    /// Ended stays that it was swept after.
    swept: u64,
}

/// What is known of an entry.
struct Known {
    /// Its bytes.
    bytes: u64,
    holders: Stays,
}

impl Default for Index {
    fn default() -> Self {
        let shards = (0..SHARDS).map(|_| RwLock::default()).collect();
        Index { shards, members: RwLock::default(), ended: AtomicU64::new(0) }
    }
}

impl Index {
    /// A copy of what `member` holds that is part of this index, until it is dropped.
    pub fn member(self: &Arc<Self>, member: &str) -> Arc<Holdings> {
        Arc::new(Holdings::of(self.clone(), member.into()))
    }

    /// Whether what `member` holds is noted here.
    pub fn follows(&self, member: &str) -> bool {
        self.members.read().followed.contains_key(member)
    }

    /// Tell `each` member that holds the entry `key`. Returns the entry's bytes, if anybody does.
    pub fn holders(&self, key: EntryKey, mut each: impl FnMut(&str)) -> Option<u64> {
        let shard = self.shard(key).read();
        let known = shard.entries.get(&key)?;
        let members = self.members.read();
        let mut holders = known.holders.iter().filter_map(|stay| members.staying.get(stay)).peekable();
        holders.peek()?;
        holders.for_each(|member| each(member));
        Some(known.bytes)
    }

    /// Tell `each` member that has the entry `key` in the making.
    pub fn makers(&self, key: EntryKey, mut each: impl FnMut(&str)) {
        let shard = self.shard(key).read();
        let Some(makers) = shard.making.get(&key) else { return };
        let members = self.members.read();
        makers.iter().filter_map(|stay| members.staying.get(stay)).for_each(|member| each(member));
    }

    /// Entries that are known, those not counted twice that several members hold. For a while after a member has gone
    /// its entries count.
    pub fn entries(&self) -> usize {
        self.shards.iter().map(|shard| shard.read().entries.len()).sum()
    }

    /// Drop what is noted under stays that have ended from shard number `shard`. False if there is no such shard.
    pub(super) fn sweep(&self, shard: usize) -> bool {
        let Some(shard) = self.shards.get(shard) else { return false };
        if shard.read().swept != self.ended.load(Ordering::Acquire) {
            self.swept(&mut shard.write());
        }
        true
    }

    pub(super) fn follow(&self, member: &Arc<str>) {
        *self.members.write().followed.entry(member.clone()).or_default() += 1;
    }

    pub(super) fn unfollow(&self, member: &Arc<str>) {
        let mut members = self.members.write();
        let Some(copies) = members.followed.get_mut(member) else { return };
        *copies -= 1;
        if *copies == 0 {
            members.followed.remove(member);
        }
    }

    /// From now on `member` is followed without a gap.
    pub(super) fn begin(&self, member: &Arc<str>) -> Stay {
        let mut members = self.members.write();
        members.next += 1;
        let stay = Stay(members.next);
        members.staying.insert(stay, member.clone());
        stay
    }

    /// All that was noted under `stay` is void.
    pub(super) fn end(&self, stay: Stay) {
        let ended = self.members.write().staying.remove(&stay);
        debug_assert!(ended.is_some(), "a stay ends once");
        self.ended.fetch_add(1, Ordering::AcqRel);
    }

    pub(super) fn has(&self, key: EntryKey, stay: Stay) -> bool {
        self.shard(key).read().entries.get(&key).is_some_and(|known| known.holders.contains(&stay))
    }

    /// Note a holder; false if it is noted already.
    pub(super) fn insert(&self, key: EntryKey, bytes: u64, stay: Stay) -> bool {
        let mut shard = self.shard(key).write();
        self.swept(&mut shard);
        let known = shard.entries.entry(key).or_insert_with(|| Known { bytes, holders: Stays::new() });
        note(&mut known.holders, stay)
    }

    /// Strike a holder out; false if it is not noted.
    pub(super) fn remove(&self, key: EntryKey, stay: Stay) -> bool {
        let mut shard = self.shard(key).write();
        self.swept(&mut shard);
        let Some(known) = shard.entries.get_mut(&key) else { return false };
        let struck = strike(&mut known.holders, stay);
        if known.holders.is_empty() {
            shard.entries.remove(&key);
        }
        struck
    }

    pub(super) fn insert_maker(&self, key: EntryKey, stay: Stay) {
        let mut shard = self.shard(key).write();
        self.swept(&mut shard);
        note(shard.making.entry(key).or_default(), stay);
    }

    pub(super) fn remove_maker(&self, key: EntryKey, stay: Stay) {
        let mut shard = self.shard(key).write();
        let Some(makers) = shard.making.get_mut(&key) else { return };
        strike(makers, stay);
        if makers.is_empty() {
            shard.making.remove(&key);
        }
    }

    fn shard(&self, key: EntryKey) -> &RwLock<Shard> {
        &self.shards[usize::from(key.as_bytes()[0])]
    }

    fn swept(&self, shard: &mut Shard) {
        let ended = self.ended.load(Ordering::Acquire);
        if shard.swept == ended {
            return;
        }
        let members = self.members.read();
        let lasts = |stay: &mut Stay| members.staying.contains_key(stay);
        shard.entries.retain(|_, known| {
            known.holders.retain(lasts);
            !known.holders.is_empty()
        });
        shard.making.retain(|_, makers| {
            makers.retain(lasts);
            !makers.is_empty()
        });
        shard.swept = ended;
    }
}

fn note(stays: &mut Stays, stay: Stay) -> bool {
    let new = !stays.contains(&stay);
    if new {
        stays.push(stay);
    }
    new
}

fn strike(stays: &mut Stays, stay: Stay) -> bool {
    let at = stays.iter().position(|known| *known == stay);
    at.map(|at| stays.swap_remove(at)).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(n: u32) -> EntryKey {
        let mut bytes = [0; 32];
        bytes[0] = (n % 251) as u8;
        bytes[1..5].copy_from_slice(&n.to_le_bytes());
        EntryKey::from_bytes(bytes)
    }

    fn holders(index: &Index, n: u32) -> Vec<String> {
        let mut found = Vec::new();
        let bytes = index.holders(key(n), |member| found.push(member.to_owned()));
        assert_eq!(bytes.is_some(), !found.is_empty());
        found.sort();
        found
    }

    #[test]
    fn a_stay_that_ends_takes_its_notes_away_and_nobody_elses() {
        let index = Index::default();
        let (a, b): (Arc<str>, Arc<str>) = ("a".into(), "b".into());
        let (first, other) = (index.begin(&a), index.begin(&b));
        for n in 0..2_000 {
            assert!(index.insert(key(n), 7, first));
            assert!(!index.insert(key(n), 7, first), "noted already");
        }
        (0..10).for_each(|n| assert!(index.insert(key(n), 7, other)));
        index.insert_maker(key(5_000), first);
        assert_eq!(holders(&index, 3), ["a", "b"]);
        index.end(first);
        assert_eq!(holders(&index, 3), ["b"]);
        assert!(holders(&index, 30).is_empty());
        index.makers(key(5_000), |member| panic!("{member} is gone"));
        assert_eq!(index.entries(), 2_000, "not swept yet");

        // The same member again, as somebody new.
        let second = index.begin(&a);
        assert!(index.insert(key(30), 9, second));
        assert_eq!((holders(&index, 30), holders(&index, 31)), (vec!["a".to_owned()], vec![]));
        assert_eq!(index.holders(key(30), |_| {}), Some(9));
        assert!(index.entries() < 2_000, "what is written to is swept");
        (0..).take_while(|&shard| index.sweep(shard)).for_each(drop);
        assert_eq!(index.entries(), 11);
        assert!(index.remove(key(30), second) && !index.remove(key(30), second));
        assert_eq!(index.entries(), 10, "an entry that nobody holds is forgotten");
    }
}
