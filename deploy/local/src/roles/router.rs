//! The router as a process. Owns the fleet's copy of the members: it follows who is there, and each member's directory.
//! It reads the model's configuration and tokenizer; its weights only for their fingerprint, unless that is configured.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use hypic_cluster::{Expected, MemberRecord, Peer, Protocols, Role};
use hypic_kernels::Cpu;
use hypic_model::families::describe;
use hypic_router::{Fleet, Front, Router, Served, View};
use hypic_state::codec::FORMAT_VERSION;
use hypic_text::TextPipeline;
use hypic_transport::grpc::{RemoteCombine, RemoteScatter, follow};
use hypic_transport::{Combine, Scatter};
use tokio::sync::watch;
use tokio::time::timeout;

use super::remote::Member;
use super::{Process, common, gauges};
use crate::config::Config;
use crate::served::{check_tokenizer, compute_dtype, served};

/// Between a directory stream that failed and the next one.
const FOLLOW_PAUSE: Duration = Duration::from_millis(200);

pub(super) async fn run(process: Process, front: Front) -> Result<()> {
    let tls = common::tls(&process.config)?;
    let config = process.config.clone();
    let Some((served, text)) = common::unless_stopped(&process.shutdown, move || load(&config)).await? else {
        return Ok(());
    };
    let expected = Expected {
        fingerprint: served.space.fingerprint.0,
        dtype: served.space.dtype.to_string(),
        kernel_set: process.config.model.kernel_set.clone(),
        format: u32::from(FORMAT_VERSION),
    };
    let own = MemberRecord {
        id: process.id.clone(),
        role: Role::Router,
        addresses: front.grpc_address().map(|address| address.to_string()).into_iter().collect(),
        fingerprint: Some(expected.fingerprint),
        dtype: expected.dtype.clone(),
        kernel_set: process.config.model.kernel_set.clone().unwrap_or_default(),
        format: expected.format,
        protocols: Protocols::OWN,
        prefix_fixed_bytes: 0,
        prefix_token_bytes: 0,
        prefix_budget_bytes: 0,
    };
    let joined = common::join(&process, Some(own))?;
    let peers = common::dial(&process, &joined, vec![Role::ScatterWorker, Role::Combiner], expected, tls);
    let fleet = Arc::new(Fleet::new(View::default()));
    let live = peers.live();
    let _gauges = [gauges::of_members(peers), gauges::of_mismatches(peers.mismatches())];
    let following = tokio::spawn(keep(live, joined.membership.view(), fleet.clone(), process.id.to_string()));
    let router = Arc::new(Router::new(process.config.router.config(), served, text, fleet));
    process.readiness.loaded();
    let leaving = process.shutdown.clone();
    let (joined_still, grace) = (joined.clone(), process.config.shutdown.grace);
    let left = tokio::spawn(async move {
        leaving.cancelled().await;
        if timeout(grace, joined_still.membership.leave()).await.is_err() {
            tracing::warn!("grace is over before the members were left: the record goes when its lease lapses");
        }
    });
    front.serve(router, process.shutdown.clone(), grace).await;
    left.await.context("leaving the members broke off")?;
    following.abort();
    Ok(())
}

fn load(config: &Config) -> Result<(Served, Option<Arc<TextPipeline>>)> {
    let source = common::source(config);
    let text = source.text()?;
    let checkpoint = source.checkpoint()?;
    let spec = describe(checkpoint.config())?;
    check_tokenizer(text.as_deref(), &spec)?;
    let dtype = compute_dtype(&Cpu::new(1), &checkpoint, config.model.dtype);
    let fingerprint = match config.fingerprint()? {
        Some(fingerprint) => fingerprint,
        None => checkpoint.fingerprint()?,
    };
    let served = served(common::name(config), &spec, fingerprint, dtype, &checkpoint)?;
    Ok((served, text))
}

/// A member in the fleet.
#[derive(Clone)]
enum Part {
    Scatter(Arc<dyn Scatter>),
    Combine(Arc<dyn Combine>),
}

/// Keep the fleet as the members are.
async fn keep(
    mut live: watch::Receiver<Arc<[Arc<Peer>]>>,
    mut listed: watch::Receiver<hypic_cluster::View>,
    fleet: Arc<Fleet>,
    own: String,
) {
    let mut known: HashMap<String, (Arc<Peer>, Part)> = HashMap::new();
    loop {
        let peers = live.borrow_and_update().clone();
        known.retain(|_, (peer, _)| peers.iter().any(|p| Arc::ptr_eq(p, peer)));
        let mut view = View::default();
        for peer in peers.iter().filter(|peer| peer.is_loaded()) {
            let new = || (peer.clone(), part(peer, &fleet, &own));
            let (_, part) = known.entry(peer.id().to_string()).or_insert_with(new);
            match part.clone() {
                Part::Scatter(scatter) => view.scatter.push(scatter),
                Part::Combine(combine) => view.combiners.push(combine),
            }
        }
        fleet.set(view);
        let targets = listed.borrow_and_update().clone();
        let combiners = targets.iter().filter(|target| target.role == Role::Combiner);
        let ids = combiners.map(|target| target.record.as_ref().map(|record| record.id.to_string()));
        fleet.set_listed_combiners(Some(ids.collect()));
        tokio::select! {
            changed = live.changed() => if changed.is_err() { return },
            // A fixed list never changes.
            Ok(()) = listed.changed() => {}
        }
    }
}

/// Follow a new member's directory. That ends when the member is down.
fn part(peer: &Arc<Peer>, fleet: &Fleet, own: &str) -> Part {
    let (remote, holdings) = (Arc::new(Member(peer.clone())), fleet.index().member(peer.id().as_str()));
    tokio::spawn(follow(remote.clone(), own.to_string(), holdings.clone(), FOLLOW_PAUSE));
    if peer.record().role == Role::Combiner {
        return Part::Combine(Arc::new(RemoteCombine::new(remote, holdings)));
    }
    Part::Scatter(Arc::new(RemoteScatter::new(remote, holdings)))
}
