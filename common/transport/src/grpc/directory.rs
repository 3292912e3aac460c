//! What members hold: the service that tells it, and the copies that a router keeps, all in one [`Index`].
//!
//! A copy is a hint: an entry may be gone when it is asked for. It follows a snapshot and every change behind it, by
//! number; a gap, an unknown incarnation or a broken stream empties it and watches anew, and it goes with its member.

mod holdings;
mod index;

use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use hypic_cache::{Change, EntryKey, PrefixKey, Store, Watch};
use hypic_kernels::Backend;
use hypic_proto::v1;
use hypic_proto::v1::directory_client::DirectoryClient;
use hypic_proto::v1::directory_server::{Directory as DirectoryRpc, DirectoryServer};
use hypic_proto::v1::directory_update::Update;
use hypic_state::Stored;
use tokio::time::sleep;
use tonic::{Request, Response, Status};
use tracing::debug;

use super::{MESSAGE_LIMIT, Remote, convert};
pub use holdings::Holdings;
pub use index::Index;

/// What a prefix state is known by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefixNote {
    /// Key of the empty prompt under its settings.
    pub root: PrefixKey,
    /// Tokens it covers.
    pub tokens: usize,
    /// Of those, the leading ones of which every row was ordinary.
    pub exact: usize,
}

/// Entries in one message of a snapshot.
const SNAPSHOT_ENTRIES: usize = 16_384;

/// Serves Directory for a store of this process.
pub struct DirectoryService<B: Backend, P: Stored> {
    store: Store<B, P>,
    note: fn(&P) -> PrefixNote,
    incarnation: u64,
}

impl<B: Backend, P: Stored> DirectoryService<B, P> {
    /// The service in front of `store`; `note` tells what a prefix state is known by.
    pub fn server(store: Store<B, P>, note: fn(&P) -> PrefixNote) -> DirectoryServer<Self> {
        DirectoryServer::new(DirectoryService { store, note, incarnation: rand::random() })
            .max_encoding_message_size(MESSAGE_LIMIT)
    }
}

type Updates = std::pin::Pin<Box<dyn Stream<Item = Result<v1::DirectoryUpdate, Status>> + Send>>;

#[tonic::async_trait]
impl<B: Backend, P: Stored> DirectoryRpc for DirectoryService<B, P> {
    type WatchStream = Updates;

    async fn watch(&self, _request: Request<v1::WatchRequest>) -> Result<Response<Updates>, Status> {
        let (held, changes) = self.store.watch();
        let (note, incarnation) = (self.note, self.incarnation);
        let first = snapshots(held, note).into_iter().map(move |snapshot| {
            Ok(v1::DirectoryUpdate { incarnation, sequence: 0, update: Some(Update::Snapshot(snapshot)) })
        });
        let state = Following { changes, note, incarnation, sequence: 0 };
        let later = futures::stream::unfold(Some(state), |state| async move {
            let mut state = state?;
            match state.next().await {
                Some(Ok(update)) => Some((Ok(update), Some(state))),
                Some(Err(status)) => Some((Err(status), None)),
                None => None,
            }
        });
        Ok(Response::new(Box::pin(futures::StreamExt::chain(futures::stream::iter(first), later))))
    }
}

struct Following<P> {
    changes: Watch<P>,
    note: fn(&P) -> PrefixNote,
    incarnation: u64,
    sequence: u64,
}

impl<P: Stored> Following<P> {
    async fn next(&mut self) -> Option<Result<v1::DirectoryUpdate, Status>> {
        loop {
            let change = match self.changes.next().await? {
                Ok(change) => change,
                Err(lagged) => return Some(Err(Status::data_loss(lagged.to_string()))),
            };
            let update = match change {
                Change::Entry { key, tokens, bytes } => Update::Insert(insert(key, tokens, bytes)),
                Change::EntryGone(key) => Update::Evict(v1::DirectoryEvict { key: convert::key_bytes(key.as_bytes()) }),
                Change::Prefix(key, state) => match state.upgrade() {
                    Some(state) => Update::PrefixInsert(prefix(key, (self.note)(&state))),
                    None => continue,
                },
                Change::PrefixGone(key) => Update::PrefixEvict(convert::key_bytes(key.as_bytes())),
                Change::Begun(key) => Update::Begun(convert::key_bytes(key.as_bytes())),
                Change::Ended(key) => Update::Ended(convert::key_bytes(key.as_bytes())),
            };
            self.sequence += 1;
            let (incarnation, sequence) = (self.incarnation, self.sequence);
            return Some(Ok(v1::DirectoryUpdate { incarnation, sequence, update: Some(update) }));
        }
    }
}

fn insert(key: EntryKey, tokens: usize, bytes: usize) -> v1::DirectoryInsert {
    v1::DirectoryInsert { key: convert::key_bytes(key.as_bytes()), tokens: tokens as u32, bytes: bytes as u64 }
}

fn prefix(key: PrefixKey, note: PrefixNote) -> v1::DirectoryPrefix {
    v1::DirectoryPrefix {
        root: convert::key_bytes(note.root.as_bytes()),
        key: convert::key_bytes(key.as_bytes()),
        tokens: note.tokens as u32,
        exact: note.exact as u32,
    }
}

/// All that is held, in messages of bounded size; the last one says so.
fn snapshots<P>(held: Vec<Change<P>>, note: fn(&P) -> PrefixNote) -> Vec<v1::DirectorySnapshot> {
    let mut all = vec![v1::DirectorySnapshot::default()];
    for change in held {
        let last = all.last_mut().expect("never empty");
        match change {
            Change::Entry { key, tokens, bytes } => last.entries.push(insert(key, tokens, bytes)),
            Change::Prefix(key, state) => last.prefixes.extend(state.upgrade().map(|s| prefix(key, note(&s)))),
            Change::Begun(key) => last.begun.push(convert::key_bytes(key.as_bytes())),
            Change::EntryGone(_) | Change::PrefixGone(_) | Change::Ended(_) => {}
        }
        if last.entries.len() + last.prefixes.len() + last.begun.len() >= SNAPSHOT_ENTRIES {
            last.more = true;
            all.push(v1::DirectorySnapshot::default());
        }
    }
    all
}

/// Keep `holdings` a copy of what `remote` holds, until it is taken for dead; it is empty then. `pause` lies between a
/// stream that failed and the next one.
pub async fn follow(remote: Arc<dyn Remote>, watcher: String, holdings: Arc<Holdings>, pause: Duration) {
    let down = remote.down();
    loop {
        let failed = tokio::select! {
            () = down.cancelled() => break,
            failed = watch(&*remote, &watcher, &holdings) => failed,
        };
        debug!(member = remote.id(), reason = failed, "watching its directory anew");
        holdings.clear();
        holdings.sweep().await;
        tokio::select! {
            () = down.cancelled() => break,
            () = sleep(pause) => {}
        }
    }
    holdings.clear();
    holdings.sweep().await;
}

async fn watch(remote: &dyn Remote, watcher: &str, holdings: &Holdings) -> String {
    let mut client = DirectoryClient::new(remote.channel()).max_decoding_message_size(MESSAGE_LIMIT);
    let mut stream = match client.watch(v1::WatchRequest { watcher: watcher.to_string() }).await {
        Ok(response) => response.into_inner(),
        Err(status) => return status.to_string(),
    };
    loop {
        let applied = match stream.message().await {
            Ok(Some(update)) => holdings.apply(update),
            Ok(None) => Err("it ended".to_string()),
            Err(status) => Err(status.to_string()),
        };
        if let Err(reason) = applied {
            return reason;
        }
    }
}
