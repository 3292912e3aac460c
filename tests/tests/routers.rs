//! Several routers in front of the same roles, and what they know of each other through the roles' directories; and hot
//! entries, which a router spreads.

use std::sync::Arc;
use std::time::Duration;

use hypic_cache::EntryKey;
use hypic_kernels::Cpu;
use hypic_router::{FaultConfig, PlanCosts, ReplicateConfig, Request, RouterConfig, SegmentSource};
use hypic_tests::Random;
use hypic_tests::ask::{ask, tokens};
use hypic_tests::cluster::{entry_bytes, key_space};
use hypic_tests::remote::{RemoteSetup, Remotes};
use hypic_tests::tap::Hold;
use hypic_transport::grpc::Remote;

const VOCAB: usize = 1746;
const SEAM: usize = 8;

fn prompt(seed: u64, query: u64) -> (Vec<u32>, Request) {
    let segment = Random(seed).tokens(300, VOCAB);
    let mut request = tokens(vec![segment.clone()], Random(query).tokens(3, VOCAB), ANCHOR.to_vec());
    request.max_tokens = Some(4);
    (segment, request)
}

/// Tokens before a segment that is not the prompt's first, in its isolated prefill.
const ANCHOR: [u32; 2] = [5, 6];

/// A prompt with a segment that all of them have, behind one of its own: no two begin alike.
fn shared(query: u64) -> (Vec<u32>, Request) {
    let segment = Random(41).tokens(300, VOCAB);
    let first = Random(1000 + query).tokens(SEAM - 1, VOCAB);
    let mut request = tokens(vec![first, segment.clone()], Random(query).tokens(3, VOCAB), ANCHOR.to_vec());
    request.max_tokens = Some(4);
    (segment, request)
}

/// All the patience in the world.
fn patient() -> RouterConfig {
    let long = Duration::from_secs(3600);
    let faults = FaultConfig { hedge: false, late_floor: long, late_floor_unmeasured: long, ..FaultConfig::default() };
    RouterConfig { faults, ..RouterConfig::default() }
}

fn key(remotes: &Remotes, segment: &[u32]) -> EntryKey {
    EntryKey::new(&key_space(&remotes.model), SEAM, &[], b"", segment)
}

/// Resolves when `condition` holds.
async fn soon(what: &str, condition: impl Fn() -> bool) {
    let patience = tokio::time::Instant::now() + Duration::from_secs(20);
    while !condition() {
        assert!(tokio::time::Instant::now() < patience, "{what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// What one router is having computed, another one does not have computed at another worker.
#[tokio::test(flavor = "multi_thread")]
async fn two_routers_share_a_computation() {
    let hold = Arc::new(Hold::default());
    let setup =
        RemoteSetup { workers: 3, worker_rows: 64, router: patient(), hold: hold.clone(), ..RemoteSetup::default() };
    let remotes = Remotes::with(setup).await;
    let (second, index) = remotes.second_router(patient()).await;
    let (segment, first_request) = prompt(31, 1);
    let (_, second_request) = prompt(31, 2);
    let key = key(&remotes, &segment);
    let makers = || {
        let mut makers = Vec::new();
        index.makers(key, |member| makers.push(member.to_owned()));
        makers
    };
    assert!(makers().is_empty());
    let asked = async { ask(&remotes.router, first_request).await.expect("an answer") };
    let joined = async {
        hold.reached().await;
        soon("the second router knows", || makers().iter().any(|id| id.starts_with("worker"))).await;
        let computing = makers().into_iter().find(|id| id.starts_with("worker")).expect("one computes");
        let follows = || {
            let worker = remotes.workers.iter().find(|w| w.behind.id() == computing);
            worker.is_some_and(|w| w.store.stats().joins > 0)
        };
        let asked = ask(&second, second_request);
        let opened = async {
            soon("the second request follows", follows).await;
            hold.open();
        };
        (tokio::join!(asked, opened).0.expect("an answer"), computing)
    };
    let (first, (second, computing)) = tokio::join!(asked, joined);
    for answer in [&first, &second] {
        assert_eq!(answer.report.segments[0].worker.as_deref(), Some(&*computing));
    }
    let holders = remotes.workers.iter().filter(|w| w.store.contains(key)).count();
    assert_eq!(holders, 1, "computed once");
    remotes.settle().await;
    soon("nobody computes it any more", || makers().is_empty()).await;
}

/// An entry that is used again and again gets to the combiner that nobody has asked, and is not computed for it.
#[tokio::test(flavor = "multi_thread")]
async fn a_hot_entry_is_spread_in_the_background() {
    let replicate = ReplicateConfig { uses: 3, window: Duration::from_secs(3600), ..ReplicateConfig::default() };
    // Requests go to the combiner that holds the entry, whatever its load of a moment ago was.
    let costs = PlanCosts { waiting: Duration::ZERO, sequence: Duration::ZERO, ..PlanCosts::default() };
    let router = RouterConfig { replicate, costs, ..patient() };
    let setup = RemoteSetup { workers: 1, combiners: 2, router: router.clone(), ..RemoteSetup::default() };
    let remotes = Remotes::with(setup).await;
    let (segment, _) = shared(1);
    let key = EntryKey::new(&key_space(&remotes.model), SEAM, &ANCHOR, b"", &segment);
    let holders = || remotes.combiners.iter().filter(|c| c.store.contains(key)).count();
    for query in 0..2 {
        ask(&remotes.router, shared(query).1).await.expect("an answer");
        remotes.settle().await;
        remotes.directory_settled().await;
    }
    assert_eq!(holders(), 1, "it is not hot yet, and requests go where it is");
    let computed = remotes.workers[0].store.stats().misses;
    for query in 2..5 {
        let answer = ask(&remotes.router, shared(query).1).await.expect("an answer");
        assert_eq!(answer.report.segments[1].source, SegmentSource::Memory);
    }
    soon("the other combiner gets it", || holders() == 2).await;
    remotes.settle().await;
    assert_eq!(remotes.workers[0].store.stats().misses, computed, "it was sent, not computed");
    let bytes: Vec<_> = remotes
        .combiners
        .iter()
        .map(|c| entry_bytes(&Cpu::new(1), &c.store.get(key, &segment.as_slice().into()).expect("it is kept")))
        .collect();
    assert!(bytes[0] == bytes[1], "bit for bit");

    // Now either can answer from memory.
    remotes.directory_settled().await;
    remotes.combiners[0].behind.drain();
    let answer = ask(&remotes.router, shared(9).1).await.expect("an answer");
    assert_eq!(answer.report.segments[1].source, SegmentSource::Memory);
    remotes.settle().await;
}
