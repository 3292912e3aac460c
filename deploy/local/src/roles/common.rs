//! What roles share: the model that is named, TLS, joining the members and dialling them.

use std::sync::{Arc, OnceLock};

use anyhow::{Context, Result};
use hypic_cluster::{Caller, Dialer, Expected, MemberRecord, Membership, Peers, Role, Tls, parse_static};
use tokio_util::sync::CancellationToken;

use super::Process;
use super::admin::Joined;
use crate::config::Config;
use crate::source::ModelSource;

/// The model that the settings name.
pub(super) fn source(config: &Config) -> ModelSource {
    ModelSource::new(config.model.dir.clone())
}

/// The name under which it is served.
pub(super) fn name(config: &Config) -> String {
    config.model.name.clone().unwrap_or_else(|| source(config).name())
}

/// The TLS files, read.
pub(super) fn tls(config: &Config) -> Result<Option<Tls>> {
    config.tls.files.clone().map(Tls::load).transpose().context("tls.files")
}

/// Join the members: be listed as `own`.
pub(super) fn join(process: &Process, own: Option<MemberRecord>) -> Result<Arc<Joined>> {
    let cluster = &process.config.cluster;
    let membership = if cluster.etcd.endpoints.is_empty() {
        Membership::fixed(parse_static(&cluster.members)?)
    } else {
        Membership::etcd(cluster.etcd.clone(), own)?
    };
    let joined = Arc::new(Joined { membership, peers: OnceLock::new() });
    process.readiness.join(joined.clone());
    Ok(joined)
}

/// Dial the members of the roles `dials` that are as `expected`. A role dials once.
pub(super) fn dial<'a>(
    process: &Process,
    joined: &'a Joined,
    dials: Vec<Role>,
    expected: Expected,
    tls: Option<Tls>,
) -> &'a Peers {
    let cluster = &process.config.cluster;
    let dialer = Dialer::new(cluster.connection.clone(), tls);
    let caller = Caller { id: process.id.clone(), role: process.role, dials };
    let view = joined.membership.view();
    joined.peers.get_or_init(|| Peers::start(cluster.peers.clone(), caller, expected, dialer, view))
}

/// Do slow work that ends early at a signal: it is left behind then.
pub(super) async fn unless_stopped<T: Send + 'static>(
    shutdown: &CancellationToken,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<Option<T>> {
    tokio::select! {
        done = tokio::task::spawn_blocking(work) => done.context("loading broke off")?.map(Some),
        () = shutdown.cancelled() => Ok(None),
    }
}
