//! Live members. Owns the list of members that answer, and what each last said. A member leaves the list the moment
//! that its connection counts as lost; whoever still holds it learns that from [`Peer::down`].

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

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
    latest: Mutex<(NodeState, NodeLoad)>,
}

impl Peer {
    pub(crate) fn new(
        record: MemberRecord,
        protocol: u32,
        address: String,
        channel: Channel,
        first: &v1::Heartbeat,
    ) -> Peer {
        let latest = Mutex::new(read(first));
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
        self.latest.lock().0
    }

    /// What it has to do, by its last heartbeat.
    pub fn load(&self) -> NodeLoad {
        self.latest.lock().1
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

fn read(beat: &v1::Heartbeat) -> (NodeState, NodeLoad) {
    let load = NodeLoad { backlog_tokens: beat.backlog_tokens, sequences: beat.sequences, waiting: beat.waiting };
    (NodeState::from_proto(beat.state), load)
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
        let fresh = read(beat);
        let before = std::mem::replace(&mut *self.peer.latest.lock(), fresh);
        if before.0 != fresh.0 {
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
