//! What operators and probes ask a role: /metrics, /health, /ready and /members, on an address of its own. Owns the
//! conditions of readiness. Health says only that the process answers; readiness names everything that is missing.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::get;
use axum::{Json, Router};
use hypic_cluster::{Membership, NodeState, Peer, Peers, Role};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::OnceCell;
use tokio_util::sync::CancellationToken;

/// What is known of the members once the role has joined them.
pub(super) struct Joined {
    pub membership: Membership,
    /// Absent before the model is loaded, and where a role dials nobody.
    pub peers: OnceLock<Peers>,
}

/// What a role is able to do now.
pub(super) struct Readiness {
    role: Role,
    loaded: AtomicBool,
    draining: CancellationToken,
    joined: OnceCell<Arc<Joined>>,
    /// It stood in the membership once: that it may lose when etcd is away is no reason to take it out of service.
    listed: AtomicBool,
}

impl Readiness {
    pub fn new(role: Role, draining: CancellationToken) -> Arc<Self> {
        Arc::new(Readiness {
            role,
            loaded: AtomicBool::new(false),
            draining,
            joined: OnceCell::new(),
            listed: AtomicBool::new(false),
        })
    }

    /// The model is there and the role serves.
    pub fn loaded(&self) {
        self.loaded.store(true, Ordering::Release);
    }

    /// The role has joined the members.
    pub fn join(&self, joined: Arc<Joined>) {
        let first = self.joined.set(joined).is_ok();
        debug_assert!(first, "a role joins once");
    }

    /// What keeps it from being ready.
    pub fn missing(&self) -> Vec<&'static str> {
        let mut missing = Vec::new();
        if self.draining.is_cancelled() {
            missing.push("draining");
        }
        if !self.loaded.load(Ordering::Acquire) {
            missing.push("the model is being loaded");
        }
        match self.joined.get() {
            Some(_) if self.listed.load(Ordering::Acquire) => {}
            Some(joined) if joined.membership.seen() && joined.membership.registered() => {
                self.listed.store(true, Ordering::Release);
            }
            _ => missing.push("the membership has not been seen"),
        }
        let usable = |peer: &Arc<Peer>| peer.record().role == Role::Combiner && peer.takes_work();
        if self.role == Role::Router && !self.live().iter().any(usable) {
            missing.push("no combiner that serves this model takes work");
        }
        missing
    }

    /// Ids of the members that take work from here.
    pub fn usable(&self) -> Vec<String> {
        self.live().iter().filter(|peer| peer.takes_work()).map(|peer| peer.id().to_string()).collect()
    }

    fn live(&self) -> Arc<[Arc<Peer>]> {
        let peers = self.joined.get().and_then(|joined| joined.peers.get());
        peers.map_or_else(|| Arc::new([]) as Arc<[Arc<Peer>]>, |peers| peers.live().borrow().clone())
    }
}

/// Answer until the process ends.
pub(super) async fn serve(listener: TcpListener, readiness: Arc<Readiness>, metrics: Router) {
    let routes = Router::new()
        .route("/health", get(async || "ok\n"))
        .route("/ready", get(ready))
        .route("/members", get(members))
        .with_state(readiness)
        .merge(metrics);
    if let Err(error) = axum::serve(listener, routes).await {
        tracing::error!(%error, "the address for metrics and probes is no longer served");
    }
}

async fn ready(State(readiness): State<Arc<Readiness>>) -> (StatusCode, String) {
    let missing = readiness.missing();
    if missing.is_empty() {
        return (StatusCode::OK, "ready\n".to_string());
    }
    (StatusCode::SERVICE_UNAVAILABLE, format!("not ready: {}\n", missing.join("; ")))
}

async fn members(State(readiness): State<Arc<Readiness>>) -> Json<Value> {
    let state = |peer: &Peer| match peer.state() {
        NodeState::Loading => "loading",
        NodeState::Serving => "serving",
        NodeState::Draining => "draining",
    };
    let members: Vec<Value> = (readiness.live().iter())
        .map(|peer| {
            json!({
                "id": peer.id().as_str(), "role": peer.record().role.as_str(), "address": peer.address(),
                "state": state(peer), "usable": peer.takes_work(),
            })
        })
        .collect();
    Json(json!({ "members": members }))
}
