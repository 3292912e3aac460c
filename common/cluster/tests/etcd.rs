//! Membership kept by a real etcd, found on PATH.

mod support;

use std::time::Duration;

use hypic_cluster::{EtcdConfig, Membership, Role};
use hypic_test_support::{Etcd, MEMBERS};
use support::{record, until};
use tokio::time::sleep;

fn config(endpoint: &str) -> EtcdConfig {
    EtcdConfig { endpoints: vec![endpoint.to_owned()], lease_ttl: Duration::from_secs(2), ..Default::default() }
}

fn ids(membership: &Membership) -> Vec<String> {
    membership.view().borrow().iter().filter_map(|t| Some(t.record.as_ref()?.id.to_string())).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_come_stay_and_leave() {
    let etcd = Etcd::start().await;
    let own = record(Role::Combiner, "127.0.0.1:1");
    let member = Membership::etcd(config(etcd.endpoint()), Some(own.clone())).expect("starts");
    let watcher = Membership::etcd(config(etcd.endpoint()), None).expect("starts");
    until("it is listed", || ids(&watcher) == [own.id.to_string()]).await;
    until("it knows", || watcher.seen() && member.registered()).await;
    assert_eq!(watcher.view().borrow()[0].record.as_ref(), Some(&own));
    sleep(Duration::from_secs(4)).await;
    assert_eq!(ids(&watcher), [own.id.as_str()], "the lease is kept alive");

    let registered = etcd.wait_for_members(1).await;
    assert_eq!(registered[0].0, own.id.as_str());
    etcd.revoke(registered[0].1).await;
    until("its loss is seen", || ids(&watcher).is_empty()).await;
    until("it is registered again under its id", || ids(&watcher) == [own.id.to_string()]).await;
    let changed = hypic_cluster::MemberRecord { fingerprint: Some([9; 32]), ..own.clone() };
    member.update(changed.clone());
    until("its new record is seen", || watcher.view().borrow()[0].record.as_ref() == Some(&changed)).await;
    let again = etcd.wait_for_members(1).await;
    assert_eq!(again[0].0, registered[0].0);
    assert_ne!(again[0].1, registered[0].1, "another lease");

    member.leave().await;
    assert_eq!(etcd.members().await, Some(Vec::new()));
    until("its leave is seen", || ids(&watcher).is_empty()).await;

    let brief = Membership::etcd(config(etcd.endpoint()), Some(own.clone())).expect("starts");
    until("it is back", || ids(&watcher).len() == 1).await;
    drop(brief);
    until("a lease that lapses takes the member along", || ids(&watcher).is_empty()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_view_is_kept_while_etcd_is_away_and_right_after_compaction() {
    let mut etcd = Etcd::start().await;
    let own = record(Role::ScatterWorker, "127.0.0.1:2");
    let member = Membership::etcd(config(etcd.endpoint()), Some(own.clone())).expect("starts");
    // The watcher's way to etcd can be cut, etcd going on.
    let gate = Gate::start(etcd.endpoint()).await;
    let watcher = Membership::etcd(config(&gate.endpoint), None).expect("starts");
    until("both see it", || ids(&watcher).len() == 1 && ids(&member).len() == 1).await;

    etcd.kill();
    sleep(Duration::from_secs(4)).await;
    assert_eq!((ids(&watcher), ids(&member).len()), (vec![own.id.to_string()], 1), "the last view serves");
    until("it knows that it is not registered", || !member.registered()).await;
    etcd.restart().await;
    until("it is registered again", || member.registered()).await;

    gate.open.send_replace(false);
    let other = record(Role::Combiner, "127.0.0.1:3");
    let key = format!("{MEMBERS}{}", other.id);
    let mut client = etcd.client().await;
    client.put(key.as_str(), "not yet a record", None).await.expect("puts");
    let put = client.put(key.as_str(), other.encode(), None).await.expect("puts");
    let revision = put.header().expect("has a header").revision();
    etcd.compact(revision).await;
    assert_eq!(ids(&watcher).len(), 1, "it is cut off");
    gate.open.send_replace(true);
    until("it sees what it missed", || ids(&watcher).len() == 2).await;
    assert_eq!(ids(&watcher), [other.id.to_string(), own.id.to_string()]);
}

/// Passes connections on to an endpoint, unless it is shut: then they are cut.
struct Gate {
    endpoint: String,
    open: tokio::sync::watch::Sender<bool>,
}

impl Gate {
    async fn start(to: &str) -> Gate {
        let to = to.to_owned();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("binds");
        let endpoint = listener.local_addr().expect("has an address").to_string();
        let open = tokio::sync::watch::Sender::new(true);
        let state = open.subscribe();
        tokio::spawn(async move {
            loop {
                let (mut near, _) = listener.accept().await.expect("accepts");
                let (to, mut state) = (to.clone(), state.clone());
                tokio::spawn(async move {
                    if !*state.borrow() {
                        return;
                    }
                    let Ok(mut far) = tokio::net::TcpStream::connect(&to).await else { return };
                    tokio::select! {
                        _ = tokio::io::copy_bidirectional(&mut near, &mut far) => {}
                        _ = state.wait_for(|open| !open) => {}
                    }
                });
            }
        });
        Gate { endpoint, open }
    }
}
