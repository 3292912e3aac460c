//! The duty to compute an entry.
//!
//! Owns the end of a flight: a lead completes it, fails it, or fails it by going away, so that nobody
//! follows a computation that will never end.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use hypic_state::{Entry, EntryError, EntryLayout, LayerPart, Storage};

use crate::{EntryKey, Flight, Pinned};

/// What a lead needs of a store, whatever its prefix states are.
pub(crate) trait Books<S: Storage>: Send + Sync {
    /// The flight ends with `entry`, which is kept if there is room.
    fn admit(self: Arc<Self>, key: EntryKey, flight: &Arc<Flight<S>>, entry: Entry<S>, cost: Duration) -> Pinned<S>;
    /// The flight ends without an entry.
    fn give_up(&self, key: &EntryKey, flight: &Arc<Flight<S>>, reason: &str);
}

/// The duty to compute an entry. Dropped without [`complete`](Lead::complete), it fails the flight:
/// followers are told at once, and the next request for the entry leads again.
#[must_use = "dropping a lead fails its flight"]
pub struct Lead<S: Storage> {
    key: EntryKey,
    flight: Arc<Flight<S>>,
    /// `None` if nobody else can find the flight and its entry is not to be kept.
    books: Option<Weak<dyn Books<S>>>,
    ended: bool,
}

impl<S: Storage> Lead<S> {
    pub(crate) fn new(key: EntryKey, flight: Arc<Flight<S>>, books: Option<Weak<dyn Books<S>>>) -> Self {
        Lead { key, flight, books, ended: false }
    }

    /// Key of the entry.
    pub fn key(&self) -> EntryKey {
        self.key
    }

    /// The flight that this leads.
    pub fn flight(&self) -> &Arc<Flight<S>> {
        &self.flight
    }

    /// Hands out the finished part of a layer. False if the layer has one already, which stays: what
    /// followers have seen does not change.
    pub fn publish(&self, layer: usize, part: impl Into<Arc<LayerPart<S>>>) -> bool {
        self.flight.publish(layer, part.into())
    }

    /// All parts are published: the entry is whole. `cost` is the time that computing it took. An
    /// entry that the store does not keep is returned and served to followers all the same.
    ///
    /// # Errors
    /// If the parts make no entry of this layout; the flight has then failed.
    pub fn complete(mut self, layout: &EntryLayout, cost: Duration) -> Result<Pinned<S>, EntryError> {
        let entry = match self.flight.assemble(layout) {
            Ok(entry) => entry,
            Err(error) => {
                self.give_up(error.to_string().into());
                return Err(error);
            }
        };
        self.ended = true;
        let pinned = match self.books.as_ref().and_then(Weak::upgrade) {
            Some(books) => books.admit(self.key, &self.flight, entry, cost),
            None => Pinned::unkept(Arc::new(entry)),
        };
        self.flight.complete(pinned.clone());
        Ok(pinned)
    }

    /// The entry cannot be computed.
    pub fn fail(mut self, reason: impl Into<Arc<str>>) {
        self.give_up(reason.into());
    }

    fn give_up(&mut self, reason: Arc<str>) {
        self.ended = true;
        // The key is free before followers are told, so that one that asks again leads.
        if let Some(books) = self.books.as_ref().and_then(Weak::upgrade) {
            books.give_up(&self.key, &self.flight, &reason);
        }
        self.flight.fail(reason);
    }
}

impl<S: Storage> Drop for Lead<S> {
    fn drop(&mut self) {
        if !self.ended {
            self.give_up("the computation was abandoned".into());
        }
    }
}

impl<S: Storage> fmt::Debug for Lead<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lead").field("key", &self.key).field("flight", &self.flight).finish()
    }
}
