//! The guard through which entries are used.
//!
//! Owns the promise that an entry in use is not evicted. What can go wrong is an entry that is still
//! pinned when nobody uses it; the guard releases on drop, in whatever way its owner goes.

use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, Weak};

use hypic_state::{Entry, Storage};

use crate::EntryKey;

/// What keeps entries and is told when a pin ends.
pub(crate) trait Keeper: Send + Sync {
    /// One pin on the resident entry `key` ends.
    fn unpin(&self, key: &EntryKey);
}

/// An entry in use. The store neither evicts the entry nor forgets its bytes while a guard lives; an
/// entry that the store did not keep lives as long as its guards.
pub struct Pinned<S: Storage> {
    entry: Arc<Entry<S>>,
    /// `None` if the store does not keep the entry.
    pin: Option<Arc<Pin>>,
}

/// One pin, shared by the clones of a guard.
struct Pin {
    // Weak, because what the store keeps (a prefix state) may itself hold guards.
    keeper: Weak<dyn Keeper>,
    key: EntryKey,
}

impl<S: Storage> Pinned<S> {
    /// A guard for an entry on which `keeper` has counted a pin.
    pub(crate) fn kept(entry: Arc<Entry<S>>, keeper: Weak<dyn Keeper>, key: EntryKey) -> Self {
        Pinned { entry, pin: Some(Arc::new(Pin { keeper, key })) }
    }

    /// A guard for an entry that no store keeps.
    pub(crate) fn unkept(entry: Arc<Entry<S>>) -> Self {
        Pinned { entry, pin: None }
    }

    /// Whether the store kept the entry, so that later requests can find it.
    pub fn is_kept(&self) -> bool {
        self.pin.is_some()
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        if let Some(keeper) = self.keeper.upgrade() {
            keeper.unpin(&self.key);
        }
    }
}

impl<S: Storage> Deref for Pinned<S> {
    type Target = Entry<S>;

    fn deref(&self) -> &Entry<S> {
        &self.entry
    }
}

impl<S: Storage> Clone for Pinned<S> {
    fn clone(&self) -> Self {
        Pinned { entry: self.entry.clone(), pin: self.pin.clone() }
    }
}

impl<S: Storage> fmt::Debug for Pinned<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pinned").field("entry", &self.entry).field("kept", &self.is_kept()).finish()
    }
}
