//! Invariant 4 through the roles: the same answer cold and warm, with and without a cache, on one worker or four, alone
//! or in a crowd, from the start or from a prefix state; and entries that are the same bytes wherever they are made.

use futures::future::join_all;
use hypic_router::{Mode, Request};
use hypic_state::ComposeRule;
use hypic_tests::Random;
use hypic_tests::ask::{Choice, ask, examples_of, in_mode, same_answer, tokens};
use hypic_tests::cluster::{Cluster, Setup};

const VOCAB: usize = 1746;
const SEAM: usize = 8;
const RULES: [ComposeRule; 3] = [ComposeRule::Transition, ComposeRule::Last, ComposeRule::Add];

fn setup(workers: usize, worker_threads: usize, cache_bytes: usize) -> Setup {
    Setup { workers, worker_threads, cache_bytes, ..Setup::default() }
}

/// Segments around the widths that matter, some twice.
fn edge_segments(random: &mut Random, seam: usize) -> Vec<Vec<u32>> {
    let lengths = [0, 1, 2, 3, seam.saturating_sub(1), seam, seam + 1, 63, 64, 65, 64 + seam, 130];
    let mut segments: Vec<Vec<u32>> = Vec::new();
    for _ in 0..6 {
        if segments.len() > 1 && random.below(4) == 0 {
            segments.push(segments[random.below(segments.len())].clone());
        } else {
            let n = random.pick(&lengths);
            segments.push(random.tokens(n, VOCAB));
        }
    }
    segments
}

/// Requests of all modes, rules and widths.
fn requests() -> Vec<Request> {
    let mut random = Random(4);
    let mut requests = Vec::new();
    for (i, example) in [examples_of("short"), examples_of("medium")].concat().into_iter().step_by(13).enumerate() {
        let mut request = in_mode(example.request(), [Mode::Hypic, Mode::Hypic, Mode::Prefix, Mode::Full][i % 4]);
        request.options.compose = Some(ComposeRule::Transition);
        request.options.seam = Some([8, 0, 8, 32][i / 2 % 4]);
        requests.push(request);
    }
    for i in 0..12 {
        let seam = [SEAM, 0, 1, 3, 32][i % 5];
        let segments = edge_segments(&mut random, seam);
        let anchor = if i % 2 == 0 { random.tokens(5, VOCAB) } else { Vec::new() };
        let mut request = tokens(segments, random.tokens(1 + i % 4, VOCAB), anchor);
        request.options.compose = Some(RULES[i % 3]);
        request.options.seam = Some(seam as u32);
        request.max_tokens = Some(8);
        requests.push(request);
    }
    requests
}

/// Each request's answer on one worker of one thread, without a cache, alone.
async fn lone_answers(requests: &[Request]) -> Vec<Choice> {
    let cluster = Cluster::start(setup(1, 1, 0));
    let mut answers = Vec::new();
    for request in requests {
        answers.push(ask(&cluster.router, request.clone()).await.expect("an answer").choices.remove(0));
    }
    cluster.settle().await;
    assert_eq!(cluster.stats().bytes, 0, "a cache of no bytes keeps nothing");
    answers
}

/// Asks `requests` in this order, one after the other or at once, and compares.
async fn compare(what: &str, cluster: &Cluster, requests: &[Request], want: &[Choice], at_once: bool) {
    let one = |i: usize| async move {
        let got = ask(&cluster.router, requests[i].clone()).await.expect("an answer");
        same_answer(&format!("{what}, request {i}"), got.ids(), &want[i])
    };
    let same = if at_once {
        join_all((0..requests.len()).map(one)).await
    } else {
        let mut same = Vec::new();
        for i in 0..requests.len() {
            same.push(one(i).await);
        }
        same
    };
    let ties = same.iter().filter(|same| !**same).count();
    assert!(ties <= 1, "{what}: {ties} of {} answers part at a tie", requests.len());
    cluster.settle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_answers_however_they_are_served() {
    let requests = requests();
    let want = lone_answers(&requests).await;

    let uncached = Cluster::start(setup(4, 1, 0));
    compare("four workers, no cache, at once", &uncached, &requests, &want, true).await;
    drop(uncached);

    let four = Cluster::start(setup(4, 1, 256 << 20));
    compare("four workers, cold", &four, &requests, &want, false).await;
    compare("four workers, warm: prefix states", &four, &requests, &want, false).await;
    compare("four workers, warm, at once", &four, &requests, &want, true).await;
    drop(four);

    let one = Cluster::start(setup(1, 2, 256 << 20));
    compare("one worker, cold, at once", &one, &requests, &want, true).await;
    compare("one worker, warm", &one, &requests, &want, false).await;
}

/// Repeated prompts start from prefix states; here every entry is used again, by prompts that have none.
#[tokio::test(flavor = "multi_thread")]
async fn the_same_answers_from_entries_of_others() {
    let mut random = Random(5);
    let pool: Vec<Vec<u32>> = [9, 20, 64, 65, 72, 73, 130].iter().map(|&n| random.tokens(n, VOCAB)).collect();
    let anchor = random.tokens(5, VOCAB);
    let requests: Vec<Request> = (0..16)
        .map(|i| {
            // The first segment has no anchor; a fresh one keeps prefix states out of it.
            let mut segments = vec![random.tokens(4 + i, VOCAB)];
            segments.extend((0..4).map(|_| pool[random.below(pool.len())].clone()));
            let mut request = tokens(segments, random.tokens(3, VOCAB), anchor.clone());
            request.options.compose = Some(RULES[i % 3]);
            request.max_tokens = Some(6);
            request
        })
        .collect();
    let want = lone_answers(&requests).await;
    for (workers, at_once) in [(1, true), (3, true), (2, false)] {
        let cluster = Cluster::start(setup(workers, 1, 256 << 20));
        compare(&format!("{workers} workers, at once: {at_once}"), &cluster, &requests, &want, at_once).await;
        let stats = cluster.stats();
        let expected = pool.len() + requests.iter().enumerate().filter(|(i, _)| 4 + i > SEAM).count();
        assert!(stats.entries <= expected, "a segment is one entry wherever it stands: {stats:?}");
        assert_eq!(stats.misses, stats.entries as u64, "each was computed once: {stats:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn entries_are_the_same_bytes_wherever_they_are_made() {
    let mut random = Random(6);
    let segments: Vec<Vec<u32>> = [9, 63, 64, 72, 73, 200, 700].iter().map(|&n| random.tokens(n, VOCAB)).collect();
    let (anchor, query) = (random.tokens(5, VOCAB), random.tokens(3, VOCAB));
    let mut of_each: Vec<Vec<Vec<u8>>> = Vec::new();
    let shapes = [(1, 1, 512), (1, 2, 64), (4, 1, 1024), (3, 2, 100)];
    for (i, (workers, threads, worker_rows)) in shapes.into_iter().enumerate() {
        let cluster = Cluster::start(Setup { worker_rows, ..setup(workers, threads, 256 << 20) });
        let mut order = segments.clone();
        order.rotate_left(i);
        // Others want them too, and the first of a prompt has another context.
        let asked = (0..3).map(|n| {
            let first = random.tokens(20 + n, VOCAB);
            let prompt = [vec![first], order.clone()].concat();
            ask(&cluster.router, tokens(prompt, query.clone(), anchor.clone()))
        });
        for answer in join_all(asked).await {
            answer.expect("an answer");
        }
        let entries = segments.iter().map(|s| cluster.entry(s, SEAM, &anchor).expect("it is kept"));
        of_each.push(entries.collect());
        cluster.settle().await;
    }
    for (made, shape) in of_each.iter().zip(shapes).skip(1) {
        for (i, (got, want)) in made.iter().zip(&of_each[0]).enumerate() {
            assert!(got == want, "the entry of {} tokens differs on {shape:?}", segments[i].len());
        }
    }
}
