//! Connections to members that really listen on loopback: fit, loss, return, identity.

mod support;

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures::{Stream, StreamExt, stream};
use hypic_cluster::{
    BackoffConfig, Caller, ConnectionConfig, Dialer, Field, MemberId, MemberRecord, Membership, NodeState, Peers,
    PeersConfig, Role, ServerConfig, Target, View, serve_internal,
};
use hypic_proto::v1;
use hypic_proto::v1::node_server::{Node, NodeServer};
use support::{Member, expected, peers, record, until};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::{Request, Response, Status};

const FREE: &str = "127.0.0.1:0";

fn plain() -> Dialer {
    Dialer::new(ConnectionConfig::default(), None)
}

fn targets(members: &[&Member]) -> View {
    let target = |m: &&Member| Target { role: Role::Combiner, addresses: vec![m.address.to_string()], record: None };
    members.iter().map(target).collect()
}

#[tokio::test]
async fn members_that_fit_are_used_and_others_are_counted() {
    let began = Instant::now();
    let fits = Member::start(FREE, None, |_| {}).await;
    let other = Member::start(FREE, None, |record| record.dtype = "bf16".into()).await;
    let worker = Member::start(FREE, None, |record| record.role = Role::ScatterWorker).await;
    let members = [&fits, &other, &worker].map(|member| (Role::Combiner, member.address.to_string()));
    let peers = peers(plain(), Membership::fixed(members.into()).view());
    let counts = peers.mismatches().clone();
    until("one is up, two are counted", || {
        peers.live().borrow().len() == 1 && counts.get(Field::Dtype) == 1 && counts.get(Field::Role) == 1
    })
    .await;
    let peer = peers.find(fits.id().as_str()).expect("is live");
    assert_eq!((peer.record(), peer.state(), peer.protocol()), (fits.status.record(), NodeState::Serving, 1));
    assert_eq!((peer.load().backlog_tokens, peer.load().sequences, peer.load().waiting), (11, 2, 1));
    let (load, heard) = peer.load_heard();
    assert!(load == peer.load() && heard >= began && heard <= Instant::now());
    until("a later heartbeat is heard", || peer.load_heard().1 > heard).await;
    assert!(peer.takes_work() && peers.find(other.id().as_str()).is_none());
    let mut live = peers.live();
    live.mark_unchanged();
    fits.status.set_state(NodeState::Draining);
    timeout(Duration::from_secs(5), live.changed()).await.expect("is told in time").expect("is told");
    assert!(peer.state() == NodeState::Draining && !peer.takes_work() && !peer.down().is_cancelled());
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(counts.get(Field::Dtype), 1, "several attempts count once");
}

#[tokio::test]
async fn one_that_loads_is_listed_and_used_once_it_has_loaded_what_fits() {
    let load = async || {
        let member = Member::start(FREE, None, |record| record.fingerprint = None).await;
        member.status.set_state(NodeState::Loading);
        member
    };
    let (fits, other) = (load().await, load().await);
    let whole = |member: &Member, fingerprint| MemberRecord {
        fingerprint: Some(fingerprint),
        prefix_budget_bytes: 5,
        ..member.status.record().clone()
    };
    let members = [&fits, &other].map(|member| (Role::Combiner, member.address.to_string()));
    let peers = peers(plain(), Membership::fixed(members.into()).view());
    until("both are listed", || peers.live().borrow().len() == 2).await;
    let peer = peers.find(fits.id().as_str()).expect("is live");
    assert_eq!((peer.state(), peer.is_loaded(), peer.takes_work()), (NodeState::Loading, false, false));
    assert_eq!(peers.mismatches().get(Field::Fingerprint), 0);
    fits.status.loaded(whole(&fits, [7; 32]));
    other.status.loaded(whole(&other, [8; 32]));
    until("it takes work", || peer.takes_work()).await;
    assert_eq!(peer.record(), &whole(&fits, [7; 32]));
    until("the other one is refused", || peers.live().borrow().len() == 1).await;
    until("and counted", || peers.mismatches().get(Field::Fingerprint) == 1).await;
    assert!(!peer.down().is_cancelled(), "over the same connection");
}

/// A member that loads, with heartbeats as they are written down here; the last one is repeated.
struct Scripted {
    record: MemberRecord,
    beats: Vec<v1::Heartbeat>,
    greeted: Arc<AtomicUsize>,
}

impl Scripted {
    /// Records of a member with the address that it gets, and its heartbeats.
    async fn start(records: impl FnOnce(&MemberRecord) -> Vec<Option<v1::MemberRecord>>) -> (String, Arc<AtomicUsize>) {
        let listener = TcpListener::bind(FREE).await.expect("binds");
        let address = listener.local_addr().expect("has an address").to_string();
        let record = MemberRecord { fingerprint: None, ..record(Role::Combiner, &address) };
        let beat = |told| v1::Heartbeat {
            id: record.id.as_str().to_owned(),
            state: v1::MemberState::Serving.into(),
            record: told,
            ..Default::default()
        };
        let beats = records(&record).into_iter().map(beat).collect();
        let greeted = Arc::new(AtomicUsize::new(0));
        let routes = Routes::new(NodeServer::new(Scripted { record, beats, greeted: greeted.clone() }));
        let grace = Duration::from_secs(1);
        let (config, forever) = (ServerConfig::default(), CancellationToken::new());
        tokio::spawn(serve_internal(listener, None, routes, config, forever, grace));
        (address, greeted)
    }
}

#[tonic::async_trait]
impl Node for Scripted {
    async fn hello(&self, _: Request<v1::HelloRequest>) -> Result<Response<v1::HelloResponse>, Status> {
        self.greeted.fetch_add(1, Ordering::SeqCst);
        Ok(Response::new(v1::HelloResponse { record: Some((&self.record).into()), protocol: 1 }))
    }

    type BeatStream = Pin<Box<dyn Stream<Item = Result<v1::Heartbeat, Status>> + Send>>;

    async fn beat(&self, _: Request<v1::BeatRequest>) -> Result<Response<Self::BeatStream>, Status> {
        let last = self.beats.last().cloned().expect("heartbeats");
        let on = stream::repeat(last).then(|beat| async move {
            sleep(Duration::from_millis(100)).await;
            beat
        });
        Ok(Response::new(Box::pin(stream::iter(self.beats.clone()).chain(on).map(Ok))))
    }
}

#[tokio::test]
async fn a_record_that_says_nothing_new_does_not_stand_in_the_way_of_the_whole_one() {
    let (address, _) = Scripted::start(|loading| {
        let whole = MemberRecord { fingerprint: Some([7; 32]), ..loading.clone() };
        vec![None, Some(loading.into()), Some((&whole).into())]
    })
    .await;
    let peers = peers(plain(), Membership::fixed(vec![(Role::Combiner, address)]).view());
    until("it takes work", || peers.live().borrow().iter().any(|peer| peer.takes_work())).await;
}

#[tokio::test]
async fn a_member_with_a_malformed_record_is_dialled_less_and_less_often() {
    let malformed = |loading: &MemberRecord| v1::MemberRecord { role: 77, ..loading.into() };
    let (address, greeted) = Scripted::start(|loading| vec![None, Some(malformed(loading))]).await;
    let caller = Caller { id: MemberId::random(Role::Router), role: Role::Router, dials: vec![Role::Combiner] };
    let reconnect = BackoffConfig { initial: Duration::from_millis(1), max: Duration::from_secs(60) };
    let config = PeersConfig { keep_alive: Duration::from_secs(2), reconnect };
    let view = Membership::fixed(vec![(Role::Combiner, address)]).view();
    let _peers = Peers::start(config, caller, expected(), plain(), view);
    until("it is asked again", || greeted.load(Ordering::SeqCst) > 1).await;
    sleep(Duration::from_secs(1)).await;
    // Waits that double from 1 ms on leave room for a dozen attempts or so, waits of 1 ms for hundreds.
    let attempts = greeted.load(Ordering::SeqCst);
    assert!(attempts < 40, "{attempts} attempts");
}

#[tokio::test]
async fn a_new_identity_at_the_same_address_is_another_member() {
    let first = Member::start(FREE, None, |_| {}).await;
    let address = first.address.to_string();
    let peers = peers(plain(), Membership::fixed(vec![(Role::Combiner, address.clone())]).view());
    until("the first is up", || !peers.live().borrow().is_empty()).await;
    let old = peers.live().borrow()[0].clone();
    first.end().await;
    timeout(Duration::from_secs(5), old.down().cancelled()).await.expect("is told in time");
    assert!(peers.find(old.id().as_str()).is_none());
    let second = Member::start(&address, None, |_| {}).await;
    until("the second is up", || peers.find(second.id().as_str()).is_some()).await;
    assert!(old.id() != second.id() && old.down().is_cancelled());
    let mut client = hypic_proto::v1::node_client::NodeClient::new(old.channel());
    let hello = hypic_proto::v1::HelloRequest { protocol_min: 1, protocol_max: 1, ..Default::default() };
    assert!(client.hello(hello).await.is_err(), "the old channel must not reach the new member");
}

#[tokio::test]
async fn the_same_member_comes_back_as_another_peer() {
    let first = Member::start(FREE, None, |_| {}).await;
    let (address, id) = (first.address.to_string(), first.id().clone());
    let peers = peers(plain(), Membership::fixed(vec![(Role::Combiner, address.clone())]).view());
    until("it is up", || peers.find(id.as_str()).is_some()).await;
    let old = peers.find(id.as_str()).expect("is live");
    first.end().await;
    until("it is gone", || peers.find(id.as_str()).is_none()).await;
    let _again = Member::start(&address, None, |record| record.id = id.clone()).await;
    until("it is up again", || peers.find(id.as_str()).is_some()).await;
    assert!(old.down().is_cancelled() && !peers.find(id.as_str()).expect("is live").down().is_cancelled());
}

#[tokio::test]
async fn one_port_at_two_addresses_is_two_members_and_one_id_at_two_is_one() {
    let a = Member::start(FREE, None, |_| {}).await;
    let port = a.address.port();
    let b = Member::start(&format!("127.0.0.2:{port}"), None, |_| {}).await;
    let twin = Member::start(FREE, None, |record| record.id = a.id().clone()).await;
    let view = watch::Sender::new(targets(&[&a, &b, &twin]));
    let peers = peers(plain(), view.subscribe());
    until("both are up", || peers.live().borrow().len() == 2).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(peers.live().borrow().len(), 2);
    let first = peers.find(a.id().as_str()).expect("is live");
    let (id, lost) = (a.id().clone(), if first.address() == a.address.to_string() { a } else { twin });
    lost.end().await;
    until("the other address takes over", || {
        peers.find(id.as_str()).is_some_and(|peer| peer.address() != first.address())
    })
    .await;
}

#[tokio::test]
async fn a_member_off_the_list_stays_while_its_connection_lives() {
    let member = Member::start(FREE, None, |_| {}).await;
    let (address, id) = (member.address.to_string(), member.id().clone());
    let view = watch::Sender::new(targets(&[&member]));
    let peers = peers(plain(), view.subscribe());
    until("it is up", || peers.find(id.as_str()).is_some()).await;
    let peer = peers.find(id.as_str()).expect("is live");
    view.send_replace(Arc::new([]));
    until("it is unlisted", || !peer.listed()).await;
    assert!(!peer.down().is_cancelled() && peer.takes_work(), "a lapsed lease takes no work from a member that lives");
    view.send_replace(targets(&[&member]));
    until("it is listed again", || peer.listed()).await;
    view.send_replace(Arc::new([]));
    member.end().await;
    until("it is gone", || peers.live().borrow().is_empty()).await;
    let _again = Member::start(&address, None, |_| {}).await;
    tokio::time::sleep(Duration::from_millis(400)).await;
    assert!(peers.live().borrow().is_empty(), "nobody dials what is not listed");
}

#[tokio::test]
async fn a_member_that_falls_silent_is_down() {
    let member = Member::start(FREE, None, |_| {}).await;
    let between = TcpListener::bind(FREE).await.expect("binds");
    let address = between.local_addr().expect("has an address").to_string();
    let target = member.address;
    // Bytes pass until the hold; then nothing moves and nothing is closed.
    let hold = tokio_util::sync::CancellationToken::new();
    let held = hold.clone();
    tokio::spawn(async move {
        let (mut near, _) = between.accept().await.expect("accepts");
        let mut far = tokio::net::TcpStream::connect(target).await.expect("connects");
        tokio::select! {
            _ = tokio::io::copy_bidirectional(&mut near, &mut far) => {}
            () = held.cancelled() => std::future::pending().await,
        }
    });
    let peers = peers(plain(), Membership::fixed(vec![(Role::Combiner, address)]).view());
    until("it is up", || !peers.live().borrow().is_empty()).await;
    let peer = peers.live().borrow()[0].clone();
    hold.cancel();
    timeout(Duration::from_millis(2500), peer.down().cancelled()).await.expect("is told within the keep-alive");
    assert!(peers.live().borrow().is_empty());
}

#[tokio::test]
async fn dropping_the_connections_takes_all_peers_down() {
    let member = Member::start(FREE, None, |_| {}).await;
    let view = watch::Sender::new(targets(&[&member]));
    let peers = peers(plain(), view.subscribe());
    until("it is up", || !peers.live().borrow().is_empty()).await;
    let peer = peers.live().borrow()[0].clone();
    drop(peers);
    timeout(Duration::from_secs(5), peer.down().cancelled()).await.expect("is told in time");
}
