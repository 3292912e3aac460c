//! What moves an entry's layer parts to a combiner, whatever the wire.
//!
//! A transport sends each part as it becomes final, in layer order, and before them K and V of the passes that are done,
//! and says when the combiner has all of it. What can go wrong is told at once to both ends: a sender that fails tells
//! the receiver, a receiver that wants no more tells the sender.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use hypic_cache::{EntryKey, Source};
use hypic_state::Storage;

use crate::{Delivery, KvAhead};

/// An entry on its way to a combiner.
pub struct Parcel<S: Storage> {
    /// Where to.
    pub to: Delivery,
    /// Key of the entry.
    pub key: EntryKey,
    /// Context before the segment in its isolated prefill.
    pub anchor: Arc<[u32]>,
    /// What the key is salted with.
    pub salt: Arc<[u8]>,
    /// The entry, or its computation.
    pub source: Source<S>,
    /// K and V that may leave before their part is final; it is what [`Transport::ahead`] gave. `None` for an entry that
    /// is not computed for this parcel: its parts go whole.
    pub ahead: Option<Arc<KvAhead<S>>>,
    /// When it must be there.
    pub deadline: Option<Instant>,
}

/// An entry that has arrived.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Delivered {
    /// Bytes that were sent.
    pub bytes: u64,
    /// Those of them that were on their way before the last part was final.
    pub hidden_bytes: u64,
    /// From the last part's being final until the combiner had all.
    pub exposed: Duration,
}

/// Why an entry did not arrive.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeliveryError {
    /// The combiner wants it no more: its request has ended, or a later attempt is on its way.
    #[error("{0}")]
    Unwanted(String),
    /// The sender does not know the combiner.
    #[error("combiner {0} is not a member that this worker knows, or has not shown itself yet")]
    Unknown(String),
    /// The computation failed; nothing is wrong with the way.
    #[error("{0}")]
    Source(String),
    /// The way failed.
    #[error("{0}")]
    Failed(String),
}

/// Moves entries to combiners.
pub trait Transport<S: Storage>: Send + Sync {
    /// Room for K and V of one parcel that leave before their part is final. `None` where nothing is gained by it: parts
    /// that are shared by reference need no way.
    fn ahead(&self) -> Option<KvAhead<S>>;

    /// Send the parts of an entry as they become final. Resolves when the combiner has all of them, or will not get
    /// them from here. Dropping the future gives up the transfer; the combiner is told.
    fn deliver(&self, parcel: Parcel<S>) -> BoxFuture<'static, Result<Delivered, DeliveryError>>;
}
