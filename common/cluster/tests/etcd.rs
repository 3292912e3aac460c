//! Membership kept by a real etcd, found on PATH.

mod support;

use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use etcd_client::{Client, CompactionOptions, GetOptions};
use hypic_cluster::{EtcdConfig, Membership, Role};
use support::{record, until};
use tokio::time::{sleep, timeout};

/// A running etcd; killed when dropped.
struct Etcd(Child);

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn free_ports() -> [u16; 2] {
    let listeners = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").expect("binds"));
    listeners.map(|listener| listener.local_addr().expect("has an address").port())
}

async fn start(data: &Path, [port, peer_port]: [u16; 2]) -> (Etcd, Client) {
    let (url, peer_url) = (format!("http://127.0.0.1:{port}"), format!("http://127.0.0.1:{peer_port}"));
    let child = Command::new("etcd")
        .args(["--name", "test", "--data-dir"])
        .arg(data)
        .args(["--listen-client-urls", &url, "--advertise-client-urls", &url, "--listen-peer-urls", &peer_url])
        .args(["--initial-advertise-peer-urls", &peer_url, "--initial-cluster", &format!("test={peer_url}")])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("no etcd on PATH: install Debian's package etcd-server");
    let etcd = Etcd(child);
    let answers = async {
        loop {
            let reached = async {
                let mut client = Client::connect([format!("127.0.0.1:{port}")], None).await?;
                client.get("any", None).await.map(|_| client)
            };
            match timeout(Duration::from_millis(500), reached).await {
                Ok(Ok(client)) => return client,
                _ => sleep(Duration::from_millis(50)).await,
            }
        }
    };
    let client = timeout(Duration::from_secs(20), answers).await.expect("etcd does not answer");
    (etcd, client)
}

fn config(port: u16) -> EtcdConfig {
    EtcdConfig { endpoints: vec![format!("127.0.0.1:{port}")], lease_ttl: Duration::from_secs(2), ..Default::default() }
}

fn ids(membership: &Membership) -> Vec<String> {
    membership.view().borrow().iter().filter_map(|t| Some(t.record.as_ref()?.id.to_string())).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_come_stay_and_leave() {
    let data = tempfile::tempdir().expect("a folder");
    let ports = free_ports();
    let (_etcd, mut client) = start(data.path(), ports).await;
    let own = record(Role::Combiner, "127.0.0.1:1");
    let member = Membership::etcd(config(ports[0]), Some(own.clone())).expect("starts");
    let watcher = Membership::etcd(config(ports[0]), None).expect("starts");
    until("it is listed", || ids(&watcher) == [own.id.to_string()]).await;
    until("it knows", || watcher.seen() && member.registered()).await;
    assert_eq!(watcher.view().borrow()[0].record.as_ref(), Some(&own));
    sleep(Duration::from_secs(4)).await;
    assert_eq!(ids(&watcher), [own.id.as_str()], "the lease is kept alive");

    let key = format!("/hypic/members/{}", own.id);
    let pairs = client.get(key.as_str(), None).await.expect("answers");
    let lease = pairs.kvs()[0].lease();
    client.lease_revoke(lease).await.expect("revokes");
    until("its loss is seen", || ids(&watcher).is_empty()).await;
    until("it is registered again under its id", || ids(&watcher) == [own.id.to_string()]).await;
    let changed = hypic_cluster::MemberRecord { fingerprint: Some([9; 32]), ..own.clone() };
    member.update(changed.clone());
    until("its new record is seen", || watcher.view().borrow()[0].record.as_ref() == Some(&changed)).await;
    let pairs = client.get(key.as_str(), None).await.expect("answers");
    assert_ne!(pairs.kvs()[0].lease(), lease);

    member.leave().await;
    let left = client.get("/hypic/members/", Some(GetOptions::new().with_prefix())).await.expect("answers");
    assert!(left.kvs().is_empty());
    until("its leave is seen", || ids(&watcher).is_empty()).await;

    let brief = Membership::etcd(config(ports[0]), Some(own.clone())).expect("starts");
    until("it is back", || ids(&watcher).len() == 1).await;
    drop(brief);
    until("a lease that lapses takes the member along", || ids(&watcher).is_empty()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_view_is_kept_while_etcd_is_away_and_right_after_compaction() {
    let data = tempfile::tempdir().expect("a folder");
    let ports = free_ports();
    let (etcd, _) = start(data.path(), ports).await;
    let own = record(Role::ScatterWorker, "127.0.0.1:2");
    let member = Membership::etcd(config(ports[0]), Some(own.clone())).expect("starts");
    // The watcher's way to etcd can be cut, etcd going on.
    let gate = Gate::start(ports[0]).await;
    let watcher = Membership::etcd(config(gate.port), None).expect("starts");
    until("both see it", || ids(&watcher).len() == 1 && ids(&member).len() == 1).await;

    drop(etcd);
    sleep(Duration::from_secs(4)).await;
    assert_eq!((ids(&watcher), ids(&member).len()), (vec![own.id.to_string()], 1), "the last view serves");
    until("it knows that it is not registered", || !member.registered()).await;
    let (_etcd, mut client) = start(data.path(), ports).await;
    until("it is registered again", || member.registered()).await;

    gate.open.send_replace(false);
    let other = record(Role::Combiner, "127.0.0.1:3");
    let key = format!("/hypic/members/{}", other.id);
    client.put(key.as_str(), "not yet a record", None).await.expect("puts");
    let put = client.put(key.as_str(), other.encode(), None).await.expect("puts");
    let revision = put.header().expect("has a header").revision();
    client.compact(revision, Some(CompactionOptions::new().with_physical())).await.expect("compacts");
    assert_eq!(ids(&watcher).len(), 1, "it is cut off");
    gate.open.send_replace(true);
    until("it sees what it missed", || ids(&watcher).len() == 2).await;
    assert_eq!(ids(&watcher), [other.id.to_string(), own.id.to_string()]);
}

/// Passes connections on to a port, unless it is shut: then they are cut.
struct Gate {
    port: u16,
    open: tokio::sync::watch::Sender<bool>,
}

impl Gate {
    async fn start(to: u16) -> Gate {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("binds");
        let port = listener.local_addr().expect("has an address").port();
        let open = tokio::sync::watch::Sender::new(true);
        let state = open.subscribe();
        tokio::spawn(async move {
            loop {
                let (mut near, _) = listener.accept().await.expect("accepts");
                let mut state = state.clone();
                tokio::spawn(async move {
                    if !*state.borrow() {
                        return;
                    }
                    let Ok(mut far) = tokio::net::TcpStream::connect(("127.0.0.1", to)).await else { return };
                    tokio::select! {
                        _ = tokio::io::copy_bidirectional(&mut near, &mut far) => {}
                        _ = state.wait_for(|open| !open) => {}
                    }
                });
            }
        });
        Gate { port, open }
    }
}
