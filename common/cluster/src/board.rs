//! Live members. Owns the list of members that answer, and what each last said. A member leaves the list the moment
//! that its connection counts as lost; whoever still holds it learns that from [`Peer::down`].

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use hypic_proto::v1;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

use crate::node::{NodeLoad, NodeState};
use crate::record::{MemberId, MemberRecord};

/// A live member and the connection to it. When the connection is lost this one stays dead: the member comes back as
/// another `Peer`.
#[derive(Debug)]
pub struct Peer {
    record: MemberRecord,
    /// The record of one that was loading when it was greeted, once its model is loaded.
    whole: OnceLock<MemberRecord>,
    protocol: u32,
    address: String,
    channel: Channel,
    down: CancellationToken,
    listed: AtomicBool,
    latest: Mutex<Latest>,
}

impl Peer {
    pub(crate) fn new(
        record: MemberRecord,
        protocol: u32,
        address: String,
        channel: Channel,
        first: &v1::Heartbeat,
    ) -> Peer {
        let latest = Mutex::new(Latest::of(first));
        let (listed, whole) = (AtomicBool::new(true), OnceLock::new());
        Peer { record, whole, protocol, address, channel, down: CancellationToken::new(), listed, latest }
    }

    /// Who it is, as far as it has said.
    pub fn record(&self) -> &MemberRecord {
        self.whole.get().unwrap_or(&self.record)
    }

    /// Whether its model is loaded, so that its record is whole and was found to fit.
    pub fn is_loaded(&self) -> bool {
        self.record().fingerprint.is_some()
    }

    /// Its id.
    pub fn id(&self) -> &MemberId {
        &self.record.id
    }

    /// The protocol version to speak with it.
    pub fn protocol(&self) -> u32 {
        self.protocol
    }

    /// Where it answers: HOST:PORT.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The connection; calls fail once it is lost.
    pub fn channel(&self) -> Channel {
        self.channel.clone()
    }

    /// What it is able to do, by its last heartbeat.
    pub fn state(&self) -> NodeState {
        self.latest.lock().state
    }

    /// What it has to do, by its last heartbeat.
    pub fn load(&self) -> NodeLoad {
        self.latest.lock().load
    }

    /// As [`load`](Self::load), and when that heartbeat came.
    pub fn load_heard(&self) -> (NodeLoad, Instant) {
        let latest = *self.latest.lock();
        (latest.load, latest.heard)
    }

    /// Whether the membership still lists it. If not, it is not dialled again once its connection is lost.
    pub fn listed(&self) -> bool {
        self.listed.load(Ordering::Acquire)
    }

    /// Whether it may be given new work: alive and serving by its own word. A lease that lapsed while the membership's
    /// store was away says nothing about that; a member that leaves says that it drains.
    pub fn takes_work(&self) -> bool {
        self.state() == NodeState::Serving && self.is_loaded() && !self.down.is_cancelled()
    }

    /// Cancelled when the member is lost: its connection broke, its heartbeats stopped, or somebody else answers.
    pub fn down(&self) -> &CancellationToken {
        &self.down
    }
}

/// What a heartbeat that came just now says.
#[derive(Clone, Copy, Debug)]
struct Latest {
    state: NodeState,
    load: NodeLoad,
    heard: Instant,
}

impl Latest {
    fn of(beat: &v1::Heartbeat) -> Latest {
        let load = NodeLoad { backlog_tokens: beat.backlog_tokens, sequences: beat.sequences, waiting: beat.waiting };
        Latest { state: NodeState::from_proto(beat.state), load, heard: tokio::time::Instant::now().into_std() }
    }
}

/// The live members, ordered by id.
pub(crate) type Live = Arc<[Arc<Peer>]>;

/// The list of live members.
#[derive(Debug)]
pub(crate) struct Board {
    peers: Mutex<BTreeMap<MemberId, Arc<Peer>>>,
    live: watch::Sender<Live>,
}

impl Board {
    pub(crate) fn new() -> Arc<Board> {
        Arc::new(Board { peers: Mutex::default(), live: watch::Sender::new(Arc::new([])) })
    }

    pub(crate) fn live(&self) -> watch::Receiver<Live> {
        self.live.subscribe()
    }

    pub(crate) fn find(&self, id: &str) -> Option<Arc<Peer>> {
        self.peers.lock().get(id).cloned()
    }

    /// Enter a member. If one of that id is live, it is returned instead: they are one and the same.
    pub(crate) fn enter(self: &Arc<Board>, peer: Peer) -> Result<Entry, Arc<Peer>> {
        let mut peers = self.peers.lock();
        if let Some(same) = peers.get(peer.id()) {
            return Err(same.clone());
        }
        let peer = Arc::new(peer);
        peers.insert(peer.id().clone(), peer.clone());
        self.publish(&peers);
        Ok(Entry { board: self.clone(), peer })
    }

    /// Tell everyone; under the lock, so that lists come in order.
    fn publish(&self, peers: &BTreeMap<MemberId, Arc<Peer>>) {
        self.live.send_replace(peers.values().cloned().collect());
    }

    /// The list is the same, but something about a member changed.
    fn touch(&self) {
        self.live.send_modify(|_| {});
    }
}

/// A member's place on the board; dropping it takes the member down.
#[derive(Debug)]
pub(crate) struct Entry {
    board: Arc<Board>,
    peer: Arc<Peer>,
}

impl Entry {
    pub(crate) fn peer(&self) -> &Peer {
        &self.peer
    }

    pub(crate) fn set_listed(&self, listed: bool) {
        if self.peer.listed.swap(listed, Ordering::AcqRel) != listed {
            self.board.touch();
        }
    }

    /// The member has loaded its model, and fits.
    pub(crate) fn loaded(&self, record: MemberRecord) {
        debug_assert!(record.fingerprint.is_some(), "{record:?}");
        if self.peer.whole.set(record).is_ok() {
            self.board.touch();
        }
    }

    pub(crate) fn beat(&self, beat: &v1::Heartbeat) {
        let fresh = Latest::of(beat);
        let before = std::mem::replace(&mut *self.peer.latest.lock(), fresh);
        if before.state != fresh.state {
            self.board.touch();
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        // Off the list first: who is told that it is down must not find it there.
        let mut peers = self.board.peers.lock();
        peers.remove(self.peer.id());
        self.board.publish(&peers);
        drop(peers);
        self.peer.down.cancel();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::advance;
    use tonic::transport::Endpoint;

    use super::*;
    use crate::record::Role;

    #[tokio::test(start_paused = true)]
    async fn a_load_is_as_old_as_the_heartbeat_that_told_it() {
        let record = MemberRecord {
            fingerprint: Some([7; 32]),
            dtype: "f32".into(),
            kernel_set: "portable-v1".into(),
            ..MemberRecord::loading("worker-1".into(), Role::ScatterWorker, Vec::new(), 1)
        };
        let beat = |backlog_tokens| v1::Heartbeat { backlog_tokens, ..Default::default() };
        let channel = Endpoint::from_static("http://127.0.0.1:1").connect_lazy();
        let began = tokio::time::Instant::now().into_std();
        let entry = Board::new().enter(Peer::new(record, 1, String::new(), channel, &beat(5))).expect("is new");
        let load = |backlog_tokens| NodeLoad { backlog_tokens, ..NodeLoad::default() };
        let pause = Duration::from_secs(200);
        advance(pause).await;
        assert_eq!(entry.peer().load_heard(), (load(5), began));
        // Also one that says the same.
        entry.beat(&beat(5));
        assert_eq!(entry.peer().load_heard(), (load(5), began + pause));
        advance(pause).await;
        entry.beat(&beat(4));
        assert_eq!(entry.peer().load_heard(), (load(4), began + 2 * pause));
    }
}
