//! How the processes of a cluster find and reach each other. Owns who is a member ([`Membership`]), the connections to
//! them ([`Peers`]), how connections are made, secured and served ([`Dialer`], [`Tls`], [`accept`],
//! [`serve_internal`]), and what a member says about itself ([`NodeService`]).
//!
//! Everything here expects the other side to die, hang, come back as somebody else or lie about what it serves: a
//! connection ends, its [`Peer`] is told through [`Peer::down`], and dialling goes on. Nothing here retries a request.
#![forbid(unsafe_code)]

mod accept;
mod backoff;
mod board;
mod dialer;
mod etcd;
mod expected;
mod membership;
mod node;
mod peers;
mod record;
mod serve;
mod tls;

pub use accept::{AcceptConfig, accept};
pub use backoff::{Backoff, BackoffConfig};
pub use board::Peer;
pub use dialer::{ConnectionConfig, DialError, Dialer};
pub use etcd::{EtcdConfig, EtcdCredentials};
pub use expected::{Expected, Field, Mismatch, Mismatches};
pub use membership::{Membership, MembershipError, Target, View, parse_static};
pub use node::{NodeLoad, NodeService, NodeState, NodeStatus};
pub use peers::{Caller, Peers, PeersConfig};
pub use record::{MemberId, MemberRecord, PROTOCOL_MAX, PROTOCOL_MIN, Protocols, RecordError, Role, UnknownRole};
pub use serve::{ExposureError, ServerConfig, check_exposure, serve_internal};
pub use tls::{Tls, TlsConfig, TlsError};
