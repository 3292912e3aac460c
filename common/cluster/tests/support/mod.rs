//! What the tests of this folder share: records, members that really listen on loopback, and waiting.
#![allow(dead_code, reason = "no test file uses all of it")]

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hypic_cluster::{
    Backoff, BackoffConfig, Caller, Dialer, Expected, MemberId, MemberRecord, NodeLoad, NodeService, NodeState,
    NodeStatus, Peers, PeersConfig, Role, ServerConfig, Tls, View, serve_internal,
};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

pub fn record(role: Role, address: &str) -> MemberRecord {
    MemberRecord {
        fingerprint: Some([7; 32]),
        dtype: "f32".into(),
        kernel_set: "portable-v1".into(),
        ..MemberRecord::loading(MemberId::random(role), role, vec![address.to_owned()], 1)
    }
}

pub fn expected() -> Expected {
    Expected { fingerprint: [7; 32], dtype: "f32".into(), kernel_set: None, format: 1 }
}

/// A member that serves Node.
pub struct Member {
    pub address: SocketAddr,
    pub status: Arc<NodeStatus>,
    pub stop: CancellationToken,
    pub served: JoinHandle<()>,
}

impl Member {
    pub async fn start(listen: &str, tls: Option<Tls>, change: impl FnOnce(&mut MemberRecord)) -> Member {
        let listener = TcpListener::bind(listen).await.expect("the address is free");
        let address = listener.local_addr().expect("has an address");
        let mut record = record(Role::Combiner, &address.to_string());
        change(&mut record);
        let stop = CancellationToken::new();
        let load = Arc::new(|| NodeLoad { backlog_tokens: 11, sequences: 2, waiting: 1 });
        let status = NodeStatus::new(record, load, stop.clone());
        status.set_state(NodeState::Serving);
        let routes = Routes::new(NodeService::server(status.clone()));
        let grace = Duration::from_secs(2);
        let served = tokio::spawn(serve_internal(listener, tls, routes, ServerConfig::default(), stop.clone(), grace));
        Member { address, status, stop, served }
    }

    pub fn id(&self) -> &MemberId {
        &self.status.record().id
    }

    /// End it and free its address.
    pub async fn end(self) {
        self.stop.cancel();
        self.served.await.expect("ends");
    }
}

pub fn peers(dialer: Dialer, view: watch::Receiver<View>) -> Peers {
    let caller = Caller { id: MemberId::random(Role::Router), role: Role::Router, dials: vec![Role::Combiner] };
    let reconnect = BackoffConfig { initial: Duration::from_millis(20), max: Duration::from_millis(100) };
    let config = PeersConfig { keep_alive: Duration::from_millis(900), reconnect };
    Peers::start(config, caller, expected(), dialer, view)
}

/// Wait until `condition` holds.
pub async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let mut pauses = Backoff::new(BackoffConfig { initial: Duration::from_millis(5), max: Duration::from_millis(50) });
    let waited = async {
        while !condition() {
            tokio::time::sleep(pauses.next_wait()).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), waited).await.unwrap_or_else(|_| panic!("in vain: {what}"));
}
