//! Members that are killed or stopped while they are needed: the client gets its right answer, or an error that says
//! so.

use std::time::Duration;

use hypic_process_tests::{
    Answer, Cluster, Failure, Member, Options, Request, Signal, Streaming, ask, assert_idle, open, scrape, until,
};

const SETTLE: Duration = Duration::from_secs(5);
/// Bytes of text after which an answer is surely being decoded, and far from its end.
const DECODING: usize = 200;

/// An answer of seconds.
fn long(seed: u64) -> Request {
    Request::random(seed, &[100, 100, 100], 3000)
}

async fn whole(base: &str, request: &Request) -> Answer {
    open(base, request).await.expect("a stream").rest().await.expect("an answer")
}

async fn decoding(base: &str, request: &Request) -> Streaming {
    let mut stream = open(base, request).await.expect("a stream");
    stream.reach(DECODING).await.expect("text");
    stream
}

/// The combiner that decodes.
async fn busy(cluster: &Cluster) -> Member {
    for member in cluster.of("combiner") {
        let samples = scrape(&member.metrics).await.expect("metrics");
        if samples.sum("hypic_sequences", "").is_some_and(|n| n > 0.0) {
            return member.clone();
        }
    }
    panic!("no combiner has a sequence under way");
}

#[tokio::test]
async fn workers_that_die_or_hang_cost_time_only() {
    for with in [Signal::KILL, Signal::STOP] {
        let cluster = Cluster::start(Options { workers: 2, ..Options::default() }).await;
        // Computing: long segments, and the signal while they are.
        let request = Request::random(11, &[1500, 1500, 1500, 1500], 8);
        let base = cluster.base.clone();
        let (under_way, asked) = (request.clone(), base.clone());
        let answer = tokio::spawn(async move { ask(&asked, &under_way).await });
        tokio::time::sleep(Duration::from_millis(150)).await;
        let first = cluster.member("scatter-worker", 0);
        cluster.signal(first, with);
        let computing = answer.await.expect("no panic").expect("an answer");
        // Before dispatch: it is gone, or nobody knows yet.
        let before = ask(&base, &Request::first()).await.expect("an answer");
        assert!(before.text.contains("Felton"), "{before:?}");
        cluster.assert_idle(SETTLE, &[first.pid]).await;
        // None at all: the combiner computes.
        cluster.signal(cluster.member("scatter-worker", 1), with);
        let alone = Request::random(12, &[300, 80, 8], 16);
        let by_combiner = ask(&base, &alone).await.expect("an answer without workers");
        let combiner = &cluster.member("combiner", 0).id;
        assert!(by_combiner.workers().iter().all(|id| id == combiner), "{}", by_combiner.hypic);
        let stopped = [first.pid, cluster.member("scatter-worker", 1).pid];
        cluster.assert_idle(SETTLE, &stopped).await;

        let undisturbed = Cluster::start(Options { workers: 1, ..Options::default() }).await;
        for (request, answer) in [(&request, computing), (&alone, by_combiner)] {
            assert_eq!(ask(&undisturbed.base, request).await.expect("an answer").text, answer.text, "{with:?}");
        }
    }
}

#[tokio::test]
async fn a_combiner_lost_while_decoding_is_not_noticed() {
    for with in [Signal::KILL, Signal::STOP] {
        let cluster = Cluster::start(Options { combiners: 2, ..Options::default() }).await;
        let requests = [long(21), long(22).sampled(5)];
        let mut want = Vec::new();
        for request in &requests {
            want.push(whole(&cluster.base, request).await);
        }
        assert_ne!(want[0].text, want[1].text);
        for (i, request) in requests.iter().enumerate() {
            if i == 1 && with == Signal::KILL {
                break; // Killed ones do not come back; the sampled answer has a cluster of its own below.
            }
            let stream = decoding(&cluster.base, request).await;
            let lost = busy(&cluster).await;
            cluster.signal(&lost, with);
            let answer = stream.rest().await.expect("one uninterrupted answer");
            assert_eq!((&answer.text, &answer.finish), (&want[i].text, &want[i].finish), "{with:?} of {lost:?}");
            cluster.assert_idle(SETTLE, &[lost.pid]).await;
            cluster.signal(&lost, Signal::CONT);
            cluster.assert_idle(SETTLE, &[]).await;
        }
        if with == Signal::KILL {
            let cluster = Cluster::start(Options { combiners: 2, ..Options::default() }).await;
            let stream = decoding(&cluster.base, &requests[1]).await;
            let lost = busy(&cluster).await;
            cluster.signal(&lost, with);
            let answer = stream.rest().await.expect("one uninterrupted answer");
            assert_eq!(answer.text, want[1].text, "sampled, {with:?}");
            cluster.assert_idle(SETTLE, &[]).await;
        }
    }
}

#[tokio::test]
async fn without_another_combiner_the_stream_ends_with_an_error() {
    let cluster = Cluster::start(Options::default()).await;
    let stream = decoding(&cluster.base, &long(31)).await;
    cluster.signal(cluster.member("combiner", 0), Signal::KILL);
    match stream.rest().await {
        Err(Failure::Told { text, finish: None, .. }) => assert!(text.len() >= DECODING),
        other => panic!("not an error event: {other:?}"),
    }
    match ask(&cluster.base, &Request::first()).await {
        Err(Failure::Status(503, body)) => assert!(body["error"]["message"].is_string(), "{body}"),
        other => panic!("not refused: {other:?}"),
    }
}

#[tokio::test]
async fn a_lost_router_disturbs_no_other() {
    for with in [Signal::KILL, Signal::STOP] {
        let cluster = Cluster::start(Options { routers: 2, ..Options::default() }).await;
        let (first, second) = (cluster.member("router", 0), cluster.member("router", 1));
        let other = long(41);
        let want = whole(&second.base(), &other).await;
        let lost = decoding(&first.base(), &Request::random(42, &[100], 30_000)).await;
        let going_on = decoding(&second.base(), &other).await;
        cluster.signal(first, with);
        // Its work is released while the other router's goes on.
        let combiner = &cluster.member("combiner", 0).metrics;
        let released = async || (scrape(combiner).await?.sum("hypic_sequences", "")? <= 1.0).then_some(());
        until(SETTLE, "the work of a lost router is released", released).await;
        let undisturbed = going_on.rest().await.expect("an answer through the other router");
        assert_eq!(undisturbed.text, want.text, "{with:?}");
        cluster.assert_idle(SETTLE, &[first.pid]).await;
        let after = ask(&second.base(), &Request::first()).await.expect("an answer");
        assert!(after.text.contains("Felton"), "{after:?}");
        drop(lost);
    }
}

#[tokio::test]
async fn clients_that_vanish_leave_nothing_behind() {
    let cluster = Cluster::start(Options::default()).await;
    // Decoding.
    let stream = decoding(&cluster.base, &Request::random(51, &[100], 30_000)).await;
    let combiner = busy(&cluster).await;
    drop(stream);
    assert_idle(&[combiner], SETTLE).await;
    // Scattering and composing, at several moments.
    for (i, wait) in [0, 5, 20, 60, 150, 400].into_iter().enumerate() {
        let request = Request::random(52 + i as u64, &[1500, 1500, 1500], 2000);
        let asking = open(&cluster.base, &request);
        let _ = tokio::time::timeout(Duration::from_millis(wait), asking).await;
    }
    cluster.assert_idle(SETTLE, &[]).await;
    let after = ask(&cluster.base, &Request::first()).await.expect("an answer");
    assert!(after.text.contains("Felton"), "{after:?}");
}
