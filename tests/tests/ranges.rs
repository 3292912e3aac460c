//! K and V on their way to a combiner while their segment is still being computed: in several ranges, each token once, and
//! what becomes of them when the transfer or the request ends in between.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use hypic_cache::EntryKey;
use hypic_kernels::Cpu;
use hypic_router::{Engine, Request};
use hypic_tests::Random;
use hypic_tests::ask::{Choice, ask, finish, same_answer, tokens};
use hypic_tests::cluster::{Cluster, Setup, entry_bytes, key_space};
use hypic_tests::remote::{Node, RemoteSetup, Remotes, patient};
use hypic_tests::tap::Hold;
use hypic_transport::grpc::GrpcConfig;

const VOCAB: usize = 1746;
const SEAM: usize = 8;

/// A segment that takes several passes, behind no other.
fn long(seed: u64) -> (Vec<u32>, Request) {
    let mut random = Random(seed);
    let segment = random.tokens(300, VOCAB);
    let mut request = tokens(vec![segment.clone()], random.tokens(3, VOCAB), vec![5, 6]);
    request.max_tokens = Some(6);
    (segment, request)
}

/// Passes of 64 rows: the seam, whole chunks of the body, and what is left.
const LONG_RANGES: [Range<usize>; 5] = [8..72, 72..136, 136..200, 200..264, 264..300];
const ATTENTION_LAYERS: [usize; 2] = [3, 7];

/// One worker, several passes a segment.
fn setup() -> RemoteSetup {
    RemoteSetup { workers: 1, worker_rows: 64, router: patient(), ..RemoteSetup::default() }
}

/// The worker stops in its last pass through the first segment.
fn held_setup() -> RemoteSetup {
    RemoteSetup { hold: Arc::new(Hold::default()), ..setup() }
}

fn key(remotes: &Remotes, segment: &[u32]) -> EntryKey {
    EntryKey::new(&key_space(&remotes.model), SEAM, &[], b"", segment)
}

/// What a cluster in one process answers, and its entry of `segment`.
async fn local(segment: &[u32], request: &Request) -> (Choice, Vec<u8>) {
    let local = Cluster::start(Setup::default());
    let answer = ask(&local.router, request.clone()).await.expect("an answer").choices.remove(0);
    (answer, local.entry(segment, SEAM, &[]).expect("it is kept"))
}

/// Resolves when `condition` holds.
async fn soon(what: &str, condition: impl Fn() -> bool) {
    let patience = tokio::time::Instant::now() + Duration::from_secs(20);
    while !condition() {
        assert!(tokio::time::Instant::now() < patience, "{what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

fn entry_at(node: &Node, key: EntryKey, segment: &[u32]) -> Vec<u8> {
    entry_bytes(&Cpu::new(1), &node.store.get(key, &segment.into()).expect("it is kept"))
}

/// The ranges cover the body, each token once.
fn assert_whole(ranges: &[Range<usize>], segment: &[u32]) {
    let mut sorted = ranges.to_vec();
    sorted.sort_by_key(|r| r.start);
    let ends = sorted.iter().scan(SEAM, |end, r| Some(std::mem::replace(end, r.end)));
    let meet = sorted.iter().zip(ends).all(|(r, end)| r.start == end && !r.is_empty());
    assert!(meet && sorted.last().is_some_and(|r| r.end == segment.len()), "{sorted:?}");
}

/// K and V of every pass but the last are at the combiner while the worker is at the last one; nothing is sent twice, and
/// the entry is what it is everywhere.
#[tokio::test(flavor = "multi_thread")]
async fn keys_and_values_leave_while_the_next_pass_is_computed() {
    let (segment, request) = long(20);
    let setup = held_setup();
    let hold = setup.hold.clone();
    let remotes = Remotes::with(setup).await;
    let key = key(&remotes, &segment);
    let tap = &remotes.taps[0];
    let asked = remotes.router.generate(request.clone()).await.expect("taken");
    hold.reached().await;
    let early = &LONG_RANGES[..4];
    tap.until("the ranges of the passes before", |tap| {
        let ranges = tap.ranges(key.as_bytes());
        ATTENTION_LAYERS.iter().all(|layer| ranges.get(layer).is_some_and(|r| r.len() == early.len()))
    })
    .await;
    // The worker is still held behind layer 0 of its last pass: no later layer has a part.
    assert!(
        ATTENTION_LAYERS.iter().all(|layer| tap.ranges(key.as_bytes())[layer] == early),
        "{tap:?}",
        tap = tap.passed(key.as_bytes())
    );
    assert_eq!((remotes.combiners[0].store.stats().entries, remotes.workers[0].store.stats().entries), (0, 0));
    let before: u64 = tap.passed(key.as_bytes()).iter().filter(|p| p.attention).map(|p| p.bytes).sum();
    hold.open();

    let answer = finish(asked, 1).await.expect("an answer");
    let (want, expected) = local(&segment, &request).await;
    same_answer("in ranges", answer.ids(), &want);
    for layer in ATTENTION_LAYERS {
        assert_eq!(tap.ranges(key.as_bytes())[&layer], LONG_RANGES, "layer {layer}");
    }
    let all: u64 = tap.passed(key.as_bytes()).iter().map(|p| p.bytes).sum();
    assert!(
        before * 3 > all,
        "{before} of {all} bytes left before the last pass, more than a third even of so short a segment"
    );
    assert!(entry_at(&remotes.combiners[0], key, &segment) == expected, "at the combiner");
    assert!(entry_at(&remotes.workers[0], key, &segment) == expected, "at the worker");
    remotes.settle().await;
}

/// Whatever room there is for K and V of unfinished layers, and however they are cut: every token once, one entry.
#[tokio::test(flavor = "multi_thread")]
async fn limits_change_ranges_and_nothing_else() {
    let (segment, request) = long(21);
    let (_, expected) = local(&segment, &request).await;
    let sender = |ahead_bytes, range_bytes, chunk_bytes| GrpcConfig {
        ahead_bytes,
        range_bytes,
        chunk_bytes,
        ..GrpcConfig::default()
    };
    // A token has 512 bytes of K and V in a layer.
    for (name, sender, most) in [
        ("nothing ahead", sender(0, usize::MAX, 4096), Some(1)),
        ("one range at a time", sender(1, usize::MAX, 1000), None),
        ("ranges of a few tokens", sender(1 << 20, 10 << 9, usize::MAX), None),
        ("nothing ahead, in ranges", sender(0, 100 << 9, usize::MAX), Some(3)),
        ("less than a token", sender(1, 1, 1 << 20), None),
    ] {
        let remotes = Remotes::with(RemoteSetup { sender, ..setup() }).await;
        let key = key(&remotes, &segment);
        ask(&remotes.router, request.clone()).await.expect("an answer");
        let ranges = remotes.taps[0].ranges(key.as_bytes());
        assert!(ranges.keys().eq(&ATTENTION_LAYERS), "{name}: {ranges:?}");
        for ranges in ranges.values() {
            assert_whole(ranges, &segment);
            assert!(most.is_none_or(|most| ranges.len() == most), "{name}: {ranges:?}");
        }
        assert!(entry_at(&remotes.combiners[0], key, &segment) == expected, "{name}");
        remotes.settle().await;
    }
}

/// A transfer that breaks off behind its first range: nothing of it stays, the combiner gets the entry in another attempt,
/// and nobody notices.
#[tokio::test(flavor = "multi_thread")]
async fn a_transfer_cut_between_ranges_is_begun_anew() {
    let (segment, request) = long(22);
    let setup = RemoteSetup { workers: 2, ..held_setup() };
    let hold = setup.hold.clone();
    let remotes = Remotes::with(setup).await;
    let key = key(&remotes, &segment);
    let (tap, combiner) = (&remotes.taps[0], &remotes.combiners[0]);
    tap.cut_next();
    let asked = remotes.router.generate(request.clone()).await.expect("taken");
    hold.reached().await;
    tap.until("a range, and the cut", |tap| tap.cuts() == 1).await;
    let first = tap.passed(key.as_bytes());
    assert_eq!(first.iter().filter(|p| p.attention).count(), 1, "{first:?}");
    assert_eq!(first.last().map(|p| p.tokens.clone()), Some(8..72));
    soon("the combiner gives it up", || combiner.store.stats().flights == 0).await;
    assert_eq!(combiner.exchange.open_transfers(), 1, "the request waits for another attempt");
    hold.open();

    let answer = finish(asked, 1).await.expect("an answer");
    let (want, expected) = local(&segment, &request).await;
    same_answer("cut", answer.ids(), &want);
    let passed = tap.passed(key.as_bytes());
    let again = &passed[first.len()..];
    assert!(again.iter().all(|p| p.generation > first[0].generation), "{passed:?}");
    for layer in ATTENTION_LAYERS {
        let ranges: Vec<_> = again.iter().filter(|p| p.layer == layer).map(|p| p.tokens.clone()).collect();
        assert_whole(&ranges, &segment);
    }
    assert!(entry_at(combiner, key, &segment) == expected);
    remotes.settle().await;
}

/// A request that ends while ranges of its entry are at the combiner, and others on their way.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_ends_between_ranges_leaves_nothing() {
    let (segment, request) = long(23);
    let setup = held_setup();
    let hold = setup.hold.clone();
    let remotes = Remotes::with(setup).await;
    let key = key(&remotes, &segment);
    let answer = remotes.router.generate(request.clone()).await.expect("taken");
    hold.reached().await;
    remotes.taps[0].until("some ranges", |tap| !tap.ranges(key.as_bytes()).is_empty()).await;
    drop(answer);
    let node = &remotes.combiners[0];
    soon("it is closed", || node.store.stats().flights == 0 && node.exchange.open_transfers() == 0).await;
    hold.open();
    remotes.settle().await;
    assert_eq!(node.store.stats().entries, 0, "half an entry is none");
    let answer = ask(&remotes.router, request.clone()).await.expect("an answer");
    same_answer("asked again", answer.ids(), &local(&segment, &request).await.0);
    remotes.settle().await;
}
