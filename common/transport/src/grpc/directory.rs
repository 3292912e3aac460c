//! What members hold: the service that tells it, and the copy that a router keeps.
//!
//! A copy is a hint: an entry may be gone when it is asked for. It follows a snapshot and every change behind it, by
//! number; a gap, an unknown incarnation or a broken stream empties it and watches anew, and it goes with its member.

use std::collections::{BTreeMap, HashMap};
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
use parking_lot::RwLock;
use tokio::time::sleep;
use tonic::{Request, Response, Status};
use tracing::debug;

use super::{MESSAGE_LIMIT, Remote, convert};
use crate::PrefixHit;

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
            Change::EntryGone(_) | Change::PrefixGone(_) => {}
        }
        if last.entries.len() + last.prefixes.len() >= SNAPSHOT_ENTRIES {
            last.more = true;
            all.push(v1::DirectorySnapshot::default());
        }
    }
    all
}

fn entry_key(bytes: &[u8]) -> Result<EntryKey, String> {
    convert::entry_key(bytes).map_err(|status| status.message().to_string())
}

fn prefix_key(bytes: &[u8]) -> Result<PrefixKey, String> {
    convert::prefix_key(bytes).map_err(|status| status.message().to_string())
}

/// A copy of what one member holds.
#[derive(Default)]
pub struct Holdings {
    held: RwLock<Held>,
}

#[derive(Default)]
struct Held {
    entries: HashMap<EntryKey, u32>,
    prefixes: HashMap<PrefixKey, PrefixNote>,
    /// How many prefix states there are of each length.
    lengths: HashMap<PrefixKey, BTreeMap<usize, usize>>,
    incarnation: u64,
    sequence: u64,
}

impl Holdings {
    /// Whether the entry is there.
    pub fn has(&self, key: EntryKey) -> bool {
        self.held.read().entries.contains_key(&key)
    }

    /// Number of entries.
    pub fn entries(&self) -> usize {
        self.held.read().entries.len()
    }

    /// Lengths of the prefix states under `root`, ascending.
    pub fn prefix_lengths(&self, root: PrefixKey) -> Vec<usize> {
        self.held.read().lengths.get(&root).map(|counts| counts.keys().copied().collect()).unwrap_or_default()
    }

    /// The prefix state `key`.
    pub fn prefix(&self, key: PrefixKey) -> Option<PrefixHit> {
        let note = *self.held.read().prefixes.get(&key)?;
        Some(PrefixHit { key, tokens: note.tokens, exact: note.exact })
    }

    fn clear(&self) {
        *self.held.write() = Held::default();
    }

    /// Take in an update; an error means that the copy is worthless now.
    fn apply(&self, message: v1::DirectoryUpdate) -> Result<(), String> {
        let mut held = self.held.write();
        match message.update {
            Some(Update::Snapshot(snapshot)) => {
                held.incarnation = message.incarnation;
                held.sequence = message.sequence;
                for entry in snapshot.entries {
                    held.insert(&entry)?;
                }
                return snapshot.prefixes.iter().try_for_each(|p| held.insert_prefix(p));
            }
            _ if message.incarnation != held.incarnation => return Err("another incarnation".to_string()),
            _ if message.sequence != held.sequence + 1 => {
                return Err(format!("change {} after {}", message.sequence, held.sequence));
            }
            Some(Update::Insert(entry)) => held.insert(&entry)?,
            Some(Update::Evict(evict)) => {
                held.entries.remove(&entry_key(&evict.key)?);
            }
            Some(Update::PrefixInsert(prefix)) => held.insert_prefix(&prefix)?,
            Some(Update::PrefixEvict(key)) => {
                held.remove_prefix(prefix_key(&key)?);
            }
            // What a later version may say.
            None => {}
        }
        held.sequence = message.sequence;
        Ok(())
    }
}

impl Held {
    fn insert(&mut self, entry: &v1::DirectoryInsert) -> Result<(), String> {
        self.entries.insert(entry_key(&entry.key)?, entry.tokens);
        Ok(())
    }

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
        tokio::select! {
            () = down.cancelled() => break,
            () = sleep(pause) => {}
        }
    }
    holdings.clear();
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
