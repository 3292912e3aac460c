//! What comes to a store, what goes and what is in the making, for those who keep a copy of that.
//!
//! Changes are told under the store's lock, in order, to a channel of bounded length: a watcher that cannot keep up
//! loses the thread, is told so ([`Lagged`]) and has to watch anew. Nobody waits for a watcher.

use std::sync::{Arc, Weak};

use hypic_state::{Entry, Storage};
use tokio::sync::broadcast;

use crate::{EntryKey, PrefixKey};

/// Changes that a watcher may lag behind.
const LAG: usize = 1 << 14;

/// Something that a store has, or has no longer.
#[derive(Debug)]
pub enum Change<P> {
    /// An entry came.
    Entry {
        /// Its key.
        key: EntryKey,
        /// Tokens of its segment.
        tokens: usize,
        /// Its bytes.
        bytes: usize,
    },
    /// An entry went.
    EntryGone(EntryKey),
    /// A prefix state came. Not kept alive by this: if it is gone, a later change says so.
    Prefix(PrefixKey, Weak<P>),
    /// A prefix state went.
    PrefixGone(PrefixKey),
    /// An entry is in the making from now on.
    Begun(EntryKey),
    /// It is no longer: it is there, was not kept, or failed.
    Ended(EntryKey),
}

impl<P> Change<P> {
    pub(crate) fn of_prefix(key: PrefixKey, state: &Arc<P>) -> Self {
        Change::Prefix(key, Arc::downgrade(state))
    }

    pub(crate) fn of_entry<S: Storage>(key: EntryKey, entry: &Entry<S>) -> Self {
        Change::Entry { key, tokens: entry.tokens().len(), bytes: entry.bytes() }
    }
}

impl<P> Clone for Change<P> {
    fn clone(&self) -> Self {
        match self {
            Change::Entry { key, tokens, bytes } => Change::Entry { key: *key, tokens: *tokens, bytes: *bytes },
            Change::EntryGone(key) => Change::EntryGone(*key),
            Change::Prefix(key, state) => Change::Prefix(*key, state.clone()),
            Change::PrefixGone(key) => Change::PrefixGone(*key),
            Change::Begun(key) => Change::Begun(*key),
            Change::Ended(key) => Change::Ended(*key),
        }
    }
}

/// The watcher was too slow: some changes are lost to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("changes came faster than they were taken: watch anew")]
pub struct Lagged;

/// The telling side.
pub(crate) struct Journal<P>(broadcast::Sender<Change<P>>);

impl<P> Journal<P> {
    pub fn new() -> Self {
        Journal(broadcast::Sender::new(LAG))
    }

    pub fn tell(&self, change: Change<P>) {
        // Without a watcher there is nobody to tell.
        _ = self.0.send(change);
    }

    pub fn watch(&self) -> Watch<P> {
        Watch(self.0.subscribe())
    }
}

/// The changes of a store from some moment on.
pub struct Watch<P>(broadcast::Receiver<Change<P>>);

impl<P> Watch<P> {
    /// The next change; `None` when the store is gone.
    ///
    /// # Errors
    /// If changes were lost.
    pub async fn next(&mut self) -> Option<Result<Change<P>, Lagged>> {
        match self.0.recv().await {
            Ok(change) => Some(Ok(change)),
            Err(broadcast::error::RecvError::Lagged(_)) => Some(Err(Lagged)),
            Err(broadcast::error::RecvError::Closed) => None,
        }
    }
}
