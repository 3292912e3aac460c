//! `hypic up`: what it says, how it ends, and that the number of workers never changes an answer.

use std::time::{Duration, Instant};

use hypic_process_tests::{Cluster, Member, Options, Request, Signal, alive, ask, children, open, until};

const SETTLE: Duration = Duration::from_secs(5);
const SOON: Duration = Duration::from_secs(20);

/// Prompts of several shapes: cold segments of many lengths, shared ones, one sampled.
fn prompts() -> Vec<Request> {
    vec![
        Request::first(),
        Request::second(),
        Request::random(1, &[5, 40, 8, 300, 9, 64], 24),
        Request::random(2, &[200, 200, 200, 200], 24).sampled(7),
    ]
}

#[tokio::test]
async fn one_two_and_eight_workers_give_the_same_right_answers() {
    let mut want: Option<Vec<String>> = None;
    for workers in [1, 2, 8] {
        let cluster = Cluster::start(Options { workers, ..Options::default() }).await;
        let ids = |role: &str| cluster.of(role).map(|m| m.id.clone()).collect::<Vec<_>>();
        let (scatter, combiner) = (ids("scatter-worker"), &cluster.member("combiner", 0).id);
        let mut texts = Vec::new();
        for (i, request) in prompts().iter().enumerate() {
            let answer = ask(&cluster.base, request).await.expect("an answer");
            let told = answer.segments("worker");
            for (source, worker) in answer.sources().iter().zip(&told) {
                match source.as_str() {
                    "computed" => assert!(
                        scatter.iter().any(|id| worker == id) || worker == combiner,
                        "{worker} is none of {scatter:?}: {}",
                        answer.hypic
                    ),
                    "memory" | "prefix" => assert_eq!(worker, combiner, "{}", answer.hypic),
                    "remote" => assert!(scatter.iter().any(|id| worker == id), "{}", answer.hypic),
                    _ => assert!(source == "seam_only" && worker.is_null(), "{}", answer.hypic),
                }
            }
            if i == 0 {
                let computed = answer.workers().iter().filter(|id| scatter.contains(id)).count();
                assert!(computed >= 6, "workers compute what is cold: {}", answer.hypic);
            }
            if i == 1 {
                let warm = &answer.sources()[1..];
                assert!(warm.iter().all(|s| s == "memory" || s == "remote"), "{}", answer.hypic);
            }
            let streamed = open(&cluster.base, request).await.expect("a stream").rest().await.expect("an answer");
            assert_eq!((&streamed.text, &streamed.finish), (&answer.text, &answer.finish), "warm and streamed");
            texts.push(answer.text);
        }
        assert!(texts[0].contains("Felton"), "{texts:?}");
        assert!(texts[1].contains("turtle"), "{texts:?}");
        assert_eq!(want.get_or_insert(texts.clone()), &texts, "{workers} workers");
        cluster.assert_idle(SETTLE, &[]).await;
    }
}

#[tokio::test]
async fn lines_exits_and_an_orderly_end() {
    let mut cluster = Cluster::start(Options { workers: 2, combiners: 1, routers: 2, ..Options::default() }).await;
    assert!(cluster.of("router").any(|router| router.base() == cluster.base), "the first router has the address");
    for member in &cluster.members {
        assert!(alive(member.pid) && !member.id.is_empty() && !member.metrics.is_empty(), "{member:?}");
    }
    assert_eq!(cluster.up.lines().iter().filter(|line| !line["ready"].is_null()).count(), 1);
    for router in cluster.of("router") {
        let answer = ask(&router.base(), &Request::first()).await.expect("an answer from every router");
        assert!(answer.text.contains("Felton"), "{answer:?}");
    }
    let killed = cluster.member("scatter-worker", 0).clone();
    cluster.signal(&killed, Signal::KILL);
    let line = cluster.up.line(SOON, "the exit", |line| line["event"] == "exited").await;
    assert_eq!((&line["role"], &line["id"]), (&"scatter-worker".into(), &killed.id.clone().into()), "{line}");
    assert_eq!(line["pid"], killed.pid, "{line}");
    assert!(!line["status"].is_null(), "{line}");
    cluster.assert_idle(SETTLE, &[]).await;
    let began = Instant::now();
    hypic_process_tests::signal(cluster.up.pid(), Signal::TERM);
    let status = cluster.up.end(SOON).await;
    assert!(status.success(), "{status}");
    assert!(began.elapsed() < Duration::from_secs(2), "an idle cluster took {:?}", began.elapsed());
    gone(&cluster.members, Duration::ZERO).await;
}

async fn gone(members: &[Member], limit: Duration) {
    for member in members {
        let what = format!("{} {} has ended", member.role, member.pid);
        until(limit.max(Duration::from_millis(200)), &what, async || (!alive(member.pid)).then_some(())).await;
    }
}

#[tokio::test]
async fn a_stopped_child_and_a_killed_parent_leave_nothing_behind() {
    let options = || Options { arguments: vec!["--grace".into(), "2".into()], etcd: true, ..Options::default() };
    let mut cluster = Cluster::start(options()).await;
    let all = children(cluster.up.pid());
    cluster.signal(cluster.member("combiner", 0), Signal::STOP);
    hypic_process_tests::signal(cluster.up.pid(), Signal::INT);
    cluster.up.end(SOON).await;
    assert_eq!(all.iter().filter(|pid| alive(**pid)).count(), 0, "children of an ended hypic up");

    let mut cluster = Cluster::start(options()).await;
    let all = children(cluster.up.pid());
    assert!(all.len() >= 5, "two workers, a combiner, a router, an etcd: {all:?}");
    cluster.signal(cluster.member("scatter-worker", 0), Signal::STOP);
    hypic_process_tests::signal(cluster.up.pid(), Signal::KILL);
    cluster.up.end(SOON).await;
    for pid in all {
        until(SOON, "a child of a killed hypic up ends", async || (!alive(pid)).then_some(())).await;
    }
}

#[tokio::test]
async fn requests_go_on_without_etcd() {
    let cluster = Cluster::start(Options { etcd: true, ..Options::default() }).await;
    let want = ask(&cluster.base, &Request::first()).await.expect("an answer");
    assert!(want.text.contains("Felton"), "{want:?}");
    let mut seed = 100;
    let mut fresh = async |when: &str| {
        seed += 1;
        let request = Request::random(seed, &[60, 60], 8);
        let cold = ask(&cluster.base, &request).await.unwrap_or_else(|why| panic!("{when}: {why:?}"));
        assert!(cold.sources().iter().all(|source| source == "computed"), "{when}: {}", cold.hypic);
        let again = ask(&cluster.base, &Request::first()).await.unwrap_or_else(|why| panic!("{when}: {why:?}"));
        assert_eq!(again.text, want.text, "{when}");
    };
    let etcd = cluster.etcd();
    hypic_process_tests::signal(etcd, Signal::KILL);
    for _ in 0..4 {
        fresh("etcd is dead").await;
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    for member in &cluster.members {
        assert!(alive(member.pid), "{member:?} has ended because etcd has");
    }
    cluster.assert_idle(SETTLE, &[]).await;
}

#[tokio::test]
async fn many_requests_on_a_cache_that_is_too_small() {
    const REQUESTS: usize = 200;
    /// After so many they are the same again.
    const DIFFERENT: usize = 12;
    let cluster = Cluster::start(Options { cache: Some("1MiB".into()), ..Options::default() }).await;
    // Few segments that many share, so that they are wanted while they are evicted.
    let request = |i: usize| {
        let i = (i % DIFFERENT) as u64;
        let segments: Vec<Vec<u32>> = (0..3)
            .map(|k| hypic_process_tests::tokens(500 + (i * 7 + k * 5) % 12, 40 + (i % 3) as usize * 30))
            .collect();
        Request::of_tokens(&segments, &hypic_process_tests::tokens(900 + i % 6, 4), 6)
    };
    let mut want = Vec::new();
    for i in 0..DIFFERENT {
        want.push(ask(&cluster.base, &request(i)).await.expect("a lone answer").text);
    }
    let all = (0..REQUESTS).map(|i| {
        let (base, request) = (cluster.base.clone(), request(i));
        async move { (i, ask(&base, &request).await) }
    });
    for (i, answer) in futures::future::join_all(all).await {
        let answer = answer.unwrap_or_else(|why| panic!("request {i}: {why:?}"));
        assert_eq!(answer.text, want[i % DIFFERENT], "request {i}");
    }
    cluster.assert_idle(SETTLE, &[]).await;
}
