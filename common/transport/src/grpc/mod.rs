//! Roles in other processes: the services behind which a role stands, and the clients that stand for one.
//!
//! A status that a service of ours gave carries its reason in metadata ([`REASON`]); one without it came from the
//! connection, and means that the other side is gone. What a remote role holds is known from its directory
//! ([`Holdings`]); a call ends at once when the member is taken for dead.

mod assembly;
mod combine;
mod convert;
mod directory;
mod plans;
mod receive;
mod scatter;
mod send;

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::Stream;
use hypic_cache::{EntryKey, KeySpace};
use hypic_proto::v1;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::transport::Channel;

pub use combine::{CombineService, RemoteCombine};
pub use convert::REASON;
pub use directory::{DirectoryService, Holdings, Index, PrefixNote, follow};
pub use receive::Receiver;
pub use scatter::{RemoteScatter, ScatterService};
pub use send::GrpcTransport;

use crate::{CombineLoad, ToldBacklog};

/// Bytes of a message at most: a plan of a million token ids has about five million.
pub const MESSAGE_LIMIT: usize = 64 << 20;

/// Settings of the transport between processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrpcConfig {
    /// Bytes of a part that travel in one message.
    pub chunk_bytes: usize,
    /// Messages that wait to be sent at most, per transfer.
    pub chunks_ahead: usize,
    /// Bytes of K and V that are encoded at a time; a layer that has more leaves in several ranges of tokens.
    pub range_bytes: usize,
    /// Bytes of K and V of unfinished layers that wait to be sent at most, per transfer, and one range more. What finds
    /// no room leaves with its layer.
    pub ahead_bytes: usize,
    /// Time in which the combiner must have opened a transfer that begins to arrive: the plan is on its way as well.
    pub open_wait: Duration,
    /// Time in which a combiner that the router names must have shown itself to the worker.
    pub member_wait: Duration,
    /// Encoded bytes of one layer at most.
    pub part_limit: u64,
}

impl Default for GrpcConfig {
    fn default() -> Self {
        GrpcConfig {
            chunk_bytes: 1 << 20,
            chunks_ahead: 4,
            range_bytes: 16 << 20,
            ahead_bytes: 64 << 20,
            open_wait: Duration::from_secs(5),
            member_wait: Duration::from_secs(2),
            part_limit: 8 << 30,
        }
    }
}

/// A member of the cluster behind a connection.
pub trait Remote: Send + Sync + 'static {
    /// Its id.
    fn id(&self) -> &str;
    /// The connection.
    fn channel(&self) -> Channel;
    /// Cancelled when it is taken for dead.
    fn down(&self) -> CancellationToken;
    /// Whether it takes work, as it said last.
    fn is_serving(&self) -> bool;
    /// Whether it is there and takes work.
    fn is_running(&self) -> bool {
        self.is_serving() && !self.down().is_cancelled()
    }
    /// What it has to do.
    fn load(&self) -> CombineLoad;
    /// Of a worker: what it told last of its backlog; `None` if it does not tell.
    fn backlog(&self) -> Option<ToldBacklog> {
        None
    }
    /// Of a combiner: bytes of a prefix state of no tokens, bytes that each token adds, and bytes that all may take.
    fn prefix_sizes(&self) -> (usize, usize, usize);
}

/// What a server checks entries against.
#[derive(Clone, Copy, Debug)]
pub struct Served {
    /// What all keys have in common.
    pub space: KeySpace,
    /// Rows of the embedding: token ids are below it.
    pub vocab: usize,
}

impl Served {
    /// The entry that a message names, if it is what it says.
    pub(crate) fn identity(&self, entry: Option<v1::EntryIdentity>) -> Result<Identity, tonic::Status> {
        let entry = entry.ok_or_else(|| tonic::Status::invalid_argument("entry: missing"))?;
        let told = convert::entry_key(&entry.key)?;
        let seam = entry.seam as usize;
        let ids = entry.token_ids.iter().chain(&entry.anchor_ids);
        if let Some(id) = ids.copied().find(|&id| id as usize >= self.vocab) {
            let message = format!("entry: token id {id} is not in the vocabulary of {}", self.vocab);
            return Err(tonic::Status::invalid_argument(message));
        }
        if entry.token_ids.len() <= seam {
            return Err(tonic::Status::invalid_argument("entry: no body behind its seam"));
        }
        let key = EntryKey::new(&self.space, seam, &entry.anchor_ids, &entry.salt_hash, &entry.token_ids);
        if key != told {
            let message = format!("entry: its key is {told}, its contents have {key}: another model, dtype or format?");
            return Err(tonic::Status::invalid_argument(message));
        }
        let (anchor, salt) = (entry.anchor_ids.into(), Arc::from(entry.salt_hash.as_ref()));
        Ok(Identity { key, tokens: entry.token_ids.into(), seam, anchor, salt })
    }
}

/// An entry by all that identifies it.
pub(crate) struct Identity {
    pub key: EntryKey,
    pub tokens: Arc<[u32]>,
    pub seam: usize,
    pub anchor: Arc<[u32]>,
    pub salt: Arc<[u8]>,
}

/// A stream of answers that cancels its work when it is dropped.
pub struct Guarded<S> {
    inner: S,
    _guard: DropGuard,
}

impl<S> Guarded<S> {
    fn new(inner: S, cancel: CancellationToken) -> Self {
        Guarded { inner, _guard: cancel.drop_guard() }
    }
}

impl<S: Stream + Unpin> Stream for Guarded<S> {
    type Item = S::Item;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<S::Item>> {
        Pin::new(&mut self.inner).poll_next(cx)
    }
}

/// The time that is left, in whole milliseconds for a message, at least one; 0 for no deadline.
pub(crate) fn left_ms(deadline: Option<std::time::Instant>) -> u64 {
    let left = |at: std::time::Instant| at.saturating_duration_since(std::time::Instant::now()).as_millis();
    deadline.map_or(0, |at| u64::try_from(left(at)).unwrap_or(u64::MAX).max(1))
}

/// The deadline that a message means.
pub(crate) fn deadline(ms: u64) -> Option<std::time::Instant> {
    if ms == 0 { None } else { std::time::Instant::now().checked_add(Duration::from_millis(ms)) }
}
