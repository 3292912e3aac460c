//! What roles share: the model that is named, TLS, and joining the members.

use std::sync::Arc;

use anyhow::{Context, Result};
use hypic_cluster::{Caller, Dialer, Expected, MemberRecord, Membership, Peers, Role, Tls, parse_static};
use hypic_state::DType;
use tokio_util::sync::CancellationToken;

use super::admin::Joined;
use super::{Process, gauges};
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

/// The dtype that is asked for; the settings were checked.
pub(super) fn dtype(config: &Config) -> Option<DType> {
    match config.model.dtype.as_str() {
        "f32" => Some(DType::F32),
        "bf16" => Some(DType::Bf16),
        _ => None,
    }
}

/// The TLS files, read.
pub(super) fn tls(config: &Config) -> Result<Option<Tls>> {
    config.tls.files.clone().map(Tls::load).transpose().context("tls.files")
}

/// Join the members: be listed as `own`, and dial those of the roles `dials` that are as `expected`.
pub(super) fn join(
    process: &Process,
    own: Option<MemberRecord>,
    dials: Vec<Role>,
    expected: Expected,
    tls: Option<Tls>,
) -> Result<Arc<Joined>> {
    let cluster = &process.config.cluster;
    let membership = if cluster.etcd.endpoints.is_empty() {
        Membership::fixed(parse_static(&cluster.members)?)
    } else {
        Membership::etcd(cluster.etcd.clone(), own)?
    };
    let dialer = Dialer::new(cluster.connection.clone(), tls);
    let peers = (!dials.is_empty()).then(|| {
        let caller = Caller { id: process.id.clone(), role: process.role, dials };
        Peers::start(cluster.peers.clone(), caller, expected, dialer, membership.view())
    });
    if let Some(peers) = &peers {
        tokio::spawn(gauges::count_mismatches(peers.mismatches().clone()));
    }
    let joined = Arc::new(Joined { membership, peers });
    process.readiness.join(joined.clone());
    Ok(joined)
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
