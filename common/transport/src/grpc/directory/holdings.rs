//! A router's copy of what one member holds: its entries in the [`Index`], its prefix states here.
//!
//! A copy follows a snapshot and every change behind it, by number. A gap or an unknown incarnation makes it worthless:
//! the caller empties it and watches anew.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use hypic_cache::{EntryKey, PrefixKey};
use hypic_proto::v1;
use hypic_proto::v1::directory_update::Update;
use parking_lot::RwLock;

use super::index::{Index, Stay};
use super::{PrefixNote, convert};
use crate::PrefixHit;

/// A copy of what one member holds.
pub struct Holdings {
    index: Arc<Index>,
    member: Arc<str>,
    copy: RwLock<Copy>,
}

struct Copy {
    /// Under which its entries stand in the index.
    stay: Stay,
    entries: usize,
    prefixes: HashMap<PrefixKey, PrefixNote>,
    /// How many prefix states there are of each length.
    lengths: HashMap<PrefixKey, BTreeMap<usize, usize>>,
    incarnation: u64,
    sequence: u64,
}

impl Copy {
    fn empty(stay: Stay) -> Self {
        let (prefixes, lengths) = (HashMap::new(), HashMap::new());
        Copy { stay, entries: 0, prefixes, lengths, incarnation: 0, sequence: 0 }
    }
}

impl Default for Holdings {
    /// A copy that is part of no other index.
    fn default() -> Self {
        Holdings::of(Arc::default(), "".into())
    }
}

impl Holdings {
    pub(super) fn of(index: Arc<Index>, member: Arc<str>) -> Self {
        index.follow(&member);
        let copy = RwLock::new(Copy::empty(index.begin(&member)));
        Holdings { index, member, copy }
    }

    /// Whether the entry is there.
    pub fn has(&self, key: EntryKey) -> bool {
        let stay = self.copy.read().stay;
        self.index.has(key, stay)
    }

    /// Number of entries.
    pub fn entries(&self) -> usize {
        self.copy.read().entries
    }

    /// Lengths of the prefix states under `root`, ascending.
    pub fn prefix_lengths(&self, root: PrefixKey) -> Vec<usize> {
        self.copy.read().lengths.get(&root).map(|counts| counts.keys().copied().collect()).unwrap_or_default()
    }

    /// The prefix state `key`.
    pub fn prefix(&self, key: PrefixKey) -> Option<PrefixHit> {
        let note = *self.copy.read().prefixes.get(&key)?;
        Some(PrefixHit { key, tokens: note.tokens, exact: note.exact })
    }

    /// Forget all of it.
    pub fn clear(&self) {
        let mut copy = self.copy.write();
        self.index.end(copy.stay);
        *copy = Copy::empty(self.index.begin(&self.member));
    }

    /// Take away, a little at a time, what [`clear`](Self::clear) left behind.
    pub(super) async fn sweep(&self) {
        let mut shard = 0;
        while self.index.sweep(shard) {
            shard += 1;
            tokio::task::yield_now().await;
        }
    }

    /// Take in an update.
    ///
    /// # Errors
    /// Why the copy is worthless now: it must be [cleared](Self::clear), and a snapshot must come.
    pub fn apply(&self, message: v1::DirectoryUpdate) -> Result<(), String> {
        let copy = &mut *self.copy.write();
        match message.update {
            Some(Update::Snapshot(snapshot)) => {
                copy.incarnation = message.incarnation;
                copy.sequence = message.sequence;
                snapshot.entries.iter().try_for_each(|entry| self.insert(copy, entry))?;
                snapshot.begun.iter().try_for_each(|key| self.begun(copy, key))?;
                return snapshot.prefixes.iter().try_for_each(|p| copy.insert_prefix(p));
            }
            _ if message.incarnation != copy.incarnation => return Err("another incarnation".to_string()),
            _ if message.sequence != copy.sequence + 1 => {
                return Err(format!("change {} after {}", message.sequence, copy.sequence));
            }
            Some(Update::Insert(entry)) => self.insert(copy, &entry)?,
            Some(Update::Evict(evict)) => {
                copy.entries -= usize::from(self.index.remove(entry_key(&evict.key)?, copy.stay));
            }
            Some(Update::PrefixInsert(prefix)) => copy.insert_prefix(&prefix)?,
            Some(Update::PrefixEvict(key)) => copy.remove_prefix(prefix_key(&key)?),
            Some(Update::Begun(key)) => self.begun(copy, &key)?,
            Some(Update::Ended(key)) => self.index.remove_maker(entry_key(&key)?, copy.stay),
            // What a later version may say.
            None => {}
        }
        copy.sequence = message.sequence;
        Ok(())
    }

    fn insert(&self, copy: &mut Copy, entry: &v1::DirectoryInsert) -> Result<(), String> {
        copy.entries += usize::from(self.index.insert(entry_key(&entry.key)?, entry.bytes, copy.stay));
        Ok(())
    }

    fn begun(&self, copy: &Copy, key: &[u8]) -> Result<(), String> {
        self.index.insert_maker(entry_key(key)?, copy.stay);
        Ok(())
    }
}

impl Drop for Holdings {
    fn drop(&mut self) {
        self.index.end(self.copy.get_mut().stay);
        self.index.unfollow(&self.member);
    }
}

impl Copy {
    fn insert_prefix(&mut self, p: &v1::DirectoryPrefix) -> Result<(), String> {
        let (root, key) = (prefix_key(&p.root)?, prefix_key(&p.key)?);
        self.remove_prefix(key);
        let note = PrefixNote { root, tokens: p.tokens as usize, exact: p.exact as usize };
        self.prefixes.insert(key, note);
        *self.lengths.entry(root).or_default().entry(note.tokens).or_default() += 1;
        Ok(())
    }

    fn remove_prefix(&mut self, key: PrefixKey) {
        let Some(note) = self.prefixes.remove(&key) else { return };
        let Some(counts) = self.lengths.get_mut(&note.root) else { return };
        if let Some(count) = counts.get_mut(&note.tokens) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&note.tokens);
            }
        }
        if counts.is_empty() {
            self.lengths.remove(&note.root);
        }
    }
}

fn entry_key(bytes: &[u8]) -> Result<EntryKey, String> {
    convert::entry_key(bytes).map_err(|status| status.message().to_string())
}

fn prefix_key(bytes: &[u8]) -> Result<PrefixKey, String> {
    convert::prefix_key(bytes).map_err(|status| status.message().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;

    fn bytes(n: u8) -> Bytes {
        Bytes::copy_from_slice(&[n; 32])
    }

    fn update(sequence: u64, update: Update) -> v1::DirectoryUpdate {
        v1::DirectoryUpdate { incarnation: 5, sequence, update: Some(update) }
    }

    fn insert(n: u8) -> v1::DirectoryInsert {
        v1::DirectoryInsert { key: bytes(n), tokens: 1, bytes: 100 }
    }

    fn told(index: &Index, n: u8) -> (Vec<String>, Vec<String>) {
        let (mut holders, mut makers) = (Vec::new(), Vec::new());
        let key = EntryKey::from_bytes([n; 32]);
        index.holders(key, |member| holders.push(member.to_owned()));
        index.makers(key, |member| makers.push(member.to_owned()));
        (holders, makers)
    }

    #[test]
    fn members_share_an_index_and_go_one_by_one() {
        let index = Arc::new(Index::default());
        let members = ["a", "b"].map(|id| index.member(id));
        for member in &members {
            let snapshot =
                v1::DirectorySnapshot { entries: vec![insert(1)], begun: vec![bytes(9)], ..Default::default() };
            member.apply(update(3, Update::Snapshot(snapshot))).expect("a snapshot");
            member.apply(update(4, Update::Insert(insert(2)))).expect("the next change");
            assert_eq!(member.entries(), 2);
        }
        let both = vec!["a".to_owned(), "b".to_owned()];
        assert_eq!(told(&index, 1), (both.clone(), vec![]));
        assert_eq!(told(&index, 9), (vec![], both.clone()));
        members[0].apply(update(5, Update::Evict(v1::DirectoryEvict { key: bytes(1) }))).expect("the next change");
        members[0].apply(update(6, Update::Ended(bytes(9)))).expect("the next change");
        // A later version says something that this one does not know.
        members[0].apply(v1::DirectoryUpdate { incarnation: 5, sequence: 7, update: None }).expect("ignored");
        members[0].apply(update(8, Update::Begun(bytes(8)))).expect("the next change");
        assert_eq!(told(&index, 1), (vec!["b".to_owned()], vec![]));
        assert_eq!(told(&index, 9), (vec![], vec!["b".to_owned()]));
        assert_eq!(told(&index, 8), (vec![], vec!["a".to_owned()]));
        assert!(!members[0].has(EntryKey::from_bytes([1; 32])) && members[1].has(EntryKey::from_bytes([1; 32])));

        members[0].apply(update(10, Update::Insert(insert(3)))).expect_err("a gap");
        members[0].clear();
        assert_eq!((members[0].entries(), told(&index, 2).0), (0, vec!["b".to_owned()]));
        members[0].apply(update(9, Update::Insert(insert(3)))).expect_err("no snapshot yet");
        assert!(index.follows("a"));
        let [a, b] = members;
        // It comes back before its old copy has gone.
        let again = index.member("a");
        drop((a, b));
        assert!(index.follows("a") && !index.follows("b"));
        drop(again);
        assert!(!index.follows("a") && told(&index, 2).0.is_empty());
    }
}
