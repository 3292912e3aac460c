//! Workers that fail, are late or never answer, deadlines, cancellations at any moment, too many requests: the client
//! gets its answer or an error that says why, and everything is given back.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::join_all;
use hypic_combiner::CombinerConfig;
use hypic_router::{Engine, ErrorKind, Event, Request, SegmentSource};
use hypic_tests::Random;
use hypic_tests::ask::{ask, same_answer, tokens};
use hypic_tests::cluster::{Cluster, Setup};
use hypic_tests::doubles::{Failing, Failure};

const VOCAB: usize = 1746;
/// What is prompt enough for a test on a busy machine.
const SOON: Duration = Duration::from_secs(10);

fn request(seed: u64) -> Request {
    let mut random = Random(seed);
    let segments = [20, 40, 90, 40].map(|n| random.tokens(n, VOCAB)).to_vec();
    let mut request = tokens(segments, random.tokens(3, VOCAB), vec![5, 6]);
    request.max_tokens = Some(6);
    request
}

/// Long enough not to be done by itself within a test's patience.
fn endless(seed: u64) -> Request {
    let mut request = request(seed);
    request.max_tokens = Some(20_000);
    request
}

async fn want(request: &Request) -> hypic_tests::ask::Choice {
    let cluster = Cluster::start(Setup { workers: 1, cache_bytes: 0, ..Setup::default() });
    ask(&cluster.router, request.clone()).await.expect("an answer").choices.remove(0)
}

/// A cluster whose worker number i fails as `failures[i]` says, and its workers.
fn failing(failures: &[(Failure, usize)]) -> (Cluster, Vec<Arc<Failing>>) {
    let mut workers = Vec::new();
    let setup = Setup { workers: failures.len(), ..Setup::default() };
    let cluster = Cluster::with_doubles(setup, |i, worker, exchange| {
        let (failure, times) = failures[i];
        workers.push(Failing::new(worker, exchange, failure, times));
        workers[i].clone()
    });
    (cluster, workers)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_segment_is_computed_elsewhere() {
    let request = request(1);
    let want = want(&request).await;
    for failure in [Failure::AtOnce, Failure::Halfway, Failure::AfterAll] {
        let (cluster, workers) = failing(&[(failure, 100), (failure, 0)]);
        let answer = ask(&cluster.router, request.clone()).await.expect("the client notices only time");
        same_answer(&format!("{failure:?}"), answer.ids(), &want);
        assert!(workers[0].jobs() > 0, "the failing worker was asked");
        for told in &answer.report.segments {
            let by_failing = told.source == SegmentSource::Computed && told.worker.as_deref() == Some("worker-0");
            assert!(!by_failing, "{failure:?}: {:?}", answer.report);
        }
        cluster.settle().await;
    }
}

/// With a single worker the same one is asked again.
#[tokio::test(flavor = "multi_thread")]
async fn a_single_worker_gets_another_try() {
    let request = request(2);
    let want = want(&request).await;
    for failure in [Failure::AtOnce, Failure::Halfway] {
        let (cluster, workers) = failing(&[(failure, 1)]);
        let answer = ask(&cluster.router, request.clone()).await.expect("an answer");
        same_answer(&format!("{failure:?}"), answer.ids(), &want);
        assert_eq!(workers[0].jobs(), 5, "four segments and one again");
        cluster.settle().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_worker_costs_time_only() {
    let request = request(3);
    let want = want(&request).await;
    let (cluster, _) = failing(&[(Failure::Late(Duration::from_millis(150)), 2), (Failure::AtOnce, 0)]);
    let answer = ask(&cluster.router, request.clone()).await.expect("an answer");
    same_answer("late", answer.ids(), &want);
    cluster.settle().await;
}

/// The combiner computes what no worker can, at once and always.
#[tokio::test(flavor = "multi_thread")]
async fn when_all_workers_fail_the_combiner_computes() {
    let request = request(4);
    let want = want(&request).await;
    let (cluster, workers) = failing(&[(Failure::AtOnce, 1000), (Failure::AtOnce, 1000)]);
    let begun = Instant::now();
    let answer = ask(&cluster.router, request).await.expect("the last resort is refused by nothing");
    same_answer("last resort", answer.ids(), &want);
    assert!(begun.elapsed() < SOON, "nobody is waited for");
    assert!(workers.iter().all(|w| w.jobs() > 0), "both were tried");
    for told in &answer.report.segments {
        assert_eq!((told.source, told.worker.as_deref()), (SegmentSource::Computed, Some("combiner")));
    }
    cluster.settle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn silence_ends_with_the_deadline() {
    let (cluster, _) = failing(&[(Failure::Silence, 1000)]);
    let mut late = request(5);
    late.deadline = Some(Duration::from_millis(100));
    let begun = Instant::now();
    let error = ask(&cluster.router, late).await.expect_err("nothing comes");
    assert_eq!(error.kind, ErrorKind::Deadline, "{error}");
    let waited = begun.elapsed();
    assert!(waited >= Duration::from_millis(100) && waited < SOON, "{waited:?}");
    cluster.settle().await;

    // Without a deadline, the client's patience decides.
    let answer = cluster.router.generate(request(5)).await.expect("taken");
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(cluster.exchange.open_transfers() > 0 && cluster.load().sequences == 1, "it waits");
    drop(answer);
    cluster.settle().await;
}

/// A worker that does its job and never says so holds up the report, not beyond the deadline, and nothing else.
#[tokio::test(flavor = "multi_thread")]
async fn a_mute_worker_does_not_keep_the_answer() {
    let (cluster, _) = failing(&[(Failure::Mute, 1000)]);
    let asked = request(5);
    let want = want(&asked).await;
    let late = Request { deadline: Some(Duration::from_secs(4)), ..asked.clone() };
    let answer = ask(&cluster.router, late).await.expect("all tokens came");
    same_answer("mute", answer.ids(), &want);
    cluster.settle().await;

    let mut running = cluster.router.generate(asked).await.expect("taken");
    while let Some(event) = running.events.recv().await {
        if let Event::Finished { .. } = event {
            break;
        }
    }
    drop(running);
    cluster.settle().await;
}

/// One segment never comes; other requests are answered meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn a_waiting_request_holds_up_nobody() {
    let (cluster, _) = failing(&[(Failure::Silence, 4)]);
    let waiting = cluster.router.generate(request(6)).await.expect("taken");
    let mut asked = Vec::new();
    for seed in 7..12 {
        asked.push(ask(&cluster.router, request(seed)));
    }
    for answer in tokio::time::timeout(SOON, join_all(asked)).await.expect("they do not wait for it") {
        answer.expect("an answer");
    }
    drop(waiting);
    cluster.settle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deadline_ends_decoding() {
    let cluster = Cluster::start(Setup::default());
    let mut late = endless(8);
    late.deadline = Some(Duration::from_millis(500));
    let begun = Instant::now();
    let error = ask(&cluster.router, late).await.expect_err("it takes far longer");
    assert_eq!(error.kind, ErrorKind::Deadline, "{error}");
    assert!(begun.elapsed() < SOON);
    cluster.settle().await;
}

/// A prompt of many passes, alone at the combiner.
#[tokio::test(flavor = "multi_thread")]
async fn a_deadline_ends_a_long_prompt() {
    let cluster = Cluster::start(Setup::default());
    let query = Random(9).tokens(8_000, VOCAB);
    let mut long = tokens(Vec::new(), query, Vec::new());
    long.max_tokens = Some(1);
    let begun = Instant::now();
    let whole = ask(&cluster.router, long.clone()).await;
    let takes = begun.elapsed();
    whole.expect("an answer");

    long.options.salt = Some("nothing of it is kept".to_string());
    let deadline = takes / 10;
    long.deadline = Some(deadline);
    let begun = Instant::now();
    let error = ask(&cluster.router, long).await.expect_err("it takes longer");
    assert_eq!(error.kind, ErrorKind::Deadline, "{error}");
    assert!(begun.elapsed() < takes / 2, "{:?} for a deadline of {deadline:?}", begun.elapsed());
    cluster.settle().await;
}

/// A client that goes away during a long prompt frees the combiner for others.
#[tokio::test(flavor = "multi_thread")]
async fn cancelling_ends_a_long_prompt() {
    let cluster = Cluster::start(Setup::default());
    let query = Random(10).tokens(8_000, VOCAB);
    let long = tokens(Vec::new(), query, Vec::new());
    let begun = Instant::now();
    ask(&cluster.router, Request { max_tokens: Some(1), ..long.clone() }).await.expect("an answer");
    let takes = begun.elapsed();

    let mut again = long;
    again.options.salt = Some("nothing of it is kept".to_string());
    let begun = Instant::now();
    let answer = cluster.router.generate(again).await.expect("taken");
    tokio::time::sleep(takes / 10).await;
    drop(answer);
    cluster.settle().await;
    assert!(begun.elapsed() < takes / 2, "{:?} of {takes:?}", begun.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn cancelling_at_any_moment_gives_everything_back() {
    let mut random = Random(11);
    let cluster = Cluster::start(Setup { cache_bytes: 2 << 20, ..Setup::default() });
    let request = request(12);
    let whole = Instant::now();
    let want = ask(&cluster.router, request.clone()).await.expect("an answer").choices.remove(0);
    let micros = whole.elapsed().as_micros() as usize * 2;
    for round in 0..40 {
        let mut asked = request.clone();
        asked.options.salt = (round % 2 == 0).then(|| format!("cold {round}"));
        asked.n = 1 + (round % 3) as u32;
        let answer = cluster.router.generate(asked).await.expect("taken");
        tokio::time::sleep(Duration::from_micros(random.below(micros) as u64)).await;
        drop(answer);
        if round % 8 == 0 {
            cluster.settle().await;
        }
    }
    cluster.settle().await;
    let again = ask(&cluster.router, request).await.expect("an answer");
    same_answer("after all that", again.ids(), &want);
    cluster.settle().await;
}

/// A client that goes away after some tokens.
#[tokio::test(flavor = "multi_thread")]
async fn cancelling_while_decoding() {
    let cluster = Cluster::start(Setup::default());
    let mut answer = cluster.router.generate(endless(13)).await.expect("taken");
    for _ in 0..5 {
        let event = answer.events.recv().await.expect("it goes on");
        assert!(matches!(event, Event::Delta(_)), "{event:?}");
    }
    drop(answer);
    cluster.settle().await;
}

/// Two want the same cold segment; the one whose request has it computed goes away.
#[tokio::test(flavor = "multi_thread")]
async fn a_shared_computation_outlives_the_request_that_began_it() {
    let cluster = Cluster::start(Setup { workers: 1, worker_rows: 64, ..Setup::default() });
    let mut random = Random(14);
    for _ in 0..5 {
        let segment = random.tokens(3000, VOCAB);
        let ask_for = |query: u32| {
            let mut request = tokens(vec![vec![1; 4], segment.clone()], vec![query], vec![5]);
            request.max_tokens = Some(2);
            request
        };
        let first = cluster.router.generate(ask_for(1)).await.expect("taken");
        let second = cluster.router.generate(ask_for(2)).await.expect("taken");
        drop(first);
        let second = hypic_tests::ask::finish(second, 1).await.expect("an answer");
        assert_eq!(second.report.segments[1].tokens, 3000);
    }
    cluster.settle().await;
    assert_eq!(cluster.stats().failed_flights, 0, "none was given up");
}

#[tokio::test(flavor = "multi_thread")]
async fn too_many_requests_are_refused_at_once() {
    let combiner = CombinerConfig { max_sequences: 1, max_waiting: 2, ..CombinerConfig::named("combiner") };
    let cluster = Cluster::start(Setup { combiner, ..Setup::default() });
    let running = cluster.router.generate(endless(15)).await.expect("taken");
    while cluster.load().sequences == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let crowd = join_all((0..6).map(|seed| ask(&cluster.router, request(20 + seed))));
    let release = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        drop(running);
    };
    let (answers, ()) = tokio::join!(crowd, release);
    let refused: Vec<_> = answers.iter().filter_map(|a| a.as_ref().err()).collect();
    assert_eq!(refused.len(), 4, "two may wait: {refused:?}");
    assert!(refused.iter().all(|e| e.kind == ErrorKind::Overloaded), "{refused:?}");
    cluster.settle().await;
    ask(&cluster.router, request(30)).await.expect("there is room again");
    cluster.settle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_for_a_place_has_a_deadline_too() {
    let combiner = CombinerConfig { max_sequences: 1, ..CombinerConfig::named("combiner") };
    let cluster = Cluster::start(Setup { combiner, ..Setup::default() });
    let running = cluster.router.generate(endless(16)).await.expect("taken");
    while cluster.load().sequences == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let mut late = request(17);
    late.deadline = Some(Duration::from_millis(100));
    let error = ask(&cluster.router, late).await.expect_err("there is no place");
    assert_eq!(error.kind, ErrorKind::Deadline, "{error}");
    let waiting = cluster.router.generate(request(18)).await.expect("taken");
    tokio::time::sleep(Duration::from_millis(50)).await;
    drop((waiting, running));
    cluster.settle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_ids_are_refused_before_any_work() {
    let cluster = Cluster::start(Setup::default());
    for (segment, query, anchor) in [(VOCAB as u32, 1, 1), (1, VOCAB as u32, 1), (1, 1, VOCAB as u32)] {
        let wrong = tokens(vec![vec![1; 9], vec![segment; 20]], vec![query], vec![anchor]);
        let error = ask(&cluster.router, wrong).await.expect_err("1746 is not in the vocabulary");
        assert_eq!(error.kind, ErrorKind::Invalid);
        assert!(error.message.contains("1746"), "{error}");
    }
    let none = Request { n: 0, ..request(1) };
    assert_eq!(ask(&cluster.router, none).await.expect_err("no answer is asked for").kind, ErrorKind::Invalid);
    assert_eq!(cluster.stats().misses, 0);
    cluster.settle().await;
}
