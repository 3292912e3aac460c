//! Who wants the entries that are being computed: a computation is given up when nobody is left.

use std::collections::HashMap;
use std::sync::Arc;

use hypic_cache::EntryKey;
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

/// The interest in the computations of one store; the workers that share a store share it.
#[derive(Clone, Default)]
pub struct Interest {
    book: Arc<Mutex<Book>>,
}

#[derive(Default)]
struct Book {
    next: u64,
    wanted: HashMap<EntryKey, HashMap<u64, CancellationToken>>,
}

impl Interest {
    /// Somebody wants the entry `key`, until `cancel` or until the guard is dropped.
    pub(crate) fn add(&self, key: EntryKey, cancel: CancellationToken) -> Wanted {
        let mut book = self.book.lock();
        book.next += 1;
        let id = book.next;
        book.wanted.entry(key).or_default().insert(id, cancel);
        Wanted { interest: self.clone(), key, id }
    }
}

/// One request's interest in one entry.
pub(crate) struct Wanted {
    interest: Interest,
    key: EntryKey,
    id: u64,
}

impl Wanted {
    /// Whether this request or another one still wants the entry.
    pub fn by_anyone(&self) -> bool {
        let book = self.interest.book.lock();
        book.wanted.get(&self.key).is_some_and(|who| who.values().any(|cancel| !cancel.is_cancelled()))
    }
}

impl Drop for Wanted {
    fn drop(&mut self) {
        let mut book = self.interest.book.lock();
        if let Some(who) = book.wanted.get_mut(&self.key) {
            who.remove(&self.id);
            if who.is_empty() {
                book.wanted.remove(&self.key);
            }
        }
    }
}
