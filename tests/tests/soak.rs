//! Many requests of all kinds at once, random cancellations, a cache far too small: every answer is that of a lone run
//! without a cache, everything is given back, and no entry has changed.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::stream;
use hypic_combiner::CombinerConfig;
use hypic_router::{Engine, Error, Mode, Request};
use hypic_state::ComposeRule;
use hypic_tests::Random;
use hypic_tests::ask::{Choice, Example, ask, documents, examples_of, finish, same_answer, tokens};
use hypic_tests::cluster::{Cluster, Setup};

const VOCAB: usize = 1746;
/// Distinct requests; each is asked many times.
const KINDS: usize = 48;
/// Wall time of the part with many requests.
const LASTS: Duration = Duration::from_secs(12);
/// Requests at a time.
const AT_ONCE: usize = 12;
/// A few entries of the demo model, which take 400 kB or more each.
const CACHE_BYTES: usize = 4 << 20;
const SEAM: usize = 8;

/// A prompt of documents of many examples, so that prompts share some.
fn of_documents(random: &mut Random, examples: &[Example]) -> Request {
    let pool = &examples[..6];
    let asked = &pool[random.below(pool.len())];
    let mut chosen: Vec<String> = vec![asked.documents[random.below(asked.documents.len())].clone()];
    while chosen.len() < 2 + random.below(4) {
        let other = &pool[random.below(pool.len())];
        chosen.push(other.documents[random.below(other.documents.len())].clone());
    }
    documents(&pool[random.below(3)].system, &chosen, &asked.question)
}

/// A prompt of token ids with segments of all lengths, some shared, some twice.
fn of_tokens(random: &mut Random, pool: &[Vec<u32>]) -> Request {
    let segments = (0..1 + random.below(5)).map(|_| pool[random.below(pool.len())].clone()).collect();
    let n = 1 + random.below(4);
    let mut request = tokens(segments, random.tokens(n, VOCAB), vec![5, 6]);
    request.max_tokens = Some(1 + random.below(12) as u32);
    request
}

fn requests(random: &mut Random, pool: &[Vec<u32>]) -> Vec<Request> {
    let examples = examples_of("short");
    (0..KINDS)
        .map(|i| {
            let mut request = if i % 2 == 0 { of_documents(random, &examples) } else { of_tokens(random, pool) };
            request.options.mode =
                Some(random.pick(&[Mode::Hypic, Mode::Hypic, Mode::Hypic, Mode::Prefix, Mode::Full]));
            request.options.seam = Some(random.pick(&[SEAM, SEAM, 0, 3, 40]) as u32);
            let rules = [ComposeRule::Transition, ComposeRule::Transition, ComposeRule::Last, ComposeRule::Add];
            request.options.compose = Some(random.pick(&rules));
            request.n = random.pick(&[1, 1, 1, 2]);
            request
        })
        .collect()
}

/// What one go at a request came to.
enum Outcome {
    Answered { ties: usize },
    Cancelled,
    Failed(Error),
}

/// The bytes of entries when they were first seen.
#[derive(Default)]
struct Seen(Mutex<HashMap<Vec<u32>, Vec<u8>>>);

impl Seen {
    /// Look at the entries of `pool` that are kept now; how many there are.
    fn look(&self, cluster: &Cluster, pool: &[Vec<u32>]) -> usize {
        let mut kept = 0;
        for tokens in pool {
            let Some(bytes) = cluster.entry(tokens, SEAM, &[5, 6]) else { continue };
            kept += 1;
            let mut seen = self.0.lock().expect("no test panics while holding it");
            let before = seen.entry(tokens.clone()).or_insert_with(|| bytes.clone());
            assert!(*before == bytes, "the entry of {} tokens has changed", tokens.len());
        }
        kept
    }
}

async fn one_go(cluster: &Cluster, request: &Request, want: &Choice, patience: Option<Duration>) -> Outcome {
    let answer = match cluster.router.generate(request.clone()).await {
        Ok(answer) => answer,
        Err(error) => return Outcome::Failed(error),
    };
    let finished = finish(answer, request.n as usize);
    let finished = match patience {
        Some(patience) => match tokio::time::timeout(patience, finished).await {
            Ok(finished) => finished,
            Err(_) => return Outcome::Cancelled,
        },
        None => finished.await,
    };
    match finished {
        Ok(complete) => {
            let what = format!("{:?}", request.options);
            let same = |c: &&Choice| !same_answer(&what, &c.token_ids, want);
            Outcome::Answered { ties: complete.choices.iter().filter(same).count() }
        }
        Err(error) => Outcome::Failed(error),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_never_depend_on_the_crowd_or_the_cache() {
    let mut random = Random(2024);
    let lengths = [1, 2, 3, 7, 8, 9, 20, 63, 64, 65, 72, 73, 150];
    let pool: Vec<Vec<u32>> = lengths.iter().map(|&n| random.tokens(n, VOCAB)).collect();
    let requests = requests(&mut random, &pool);
    let lone = Cluster::start(Setup { workers: 1, cache_bytes: 0, ..Setup::default() });
    let mut want = Vec::new();
    for request in &requests {
        let alone = Request { n: 1, ..request.clone() };
        want.push(ask(&lone.router, alone).await.expect("an answer").choices.remove(0));
    }
    drop(lone);

    let combiner = CombinerConfig { max_sequences: 10, ..CombinerConfig::named("combiner") };
    let cluster =
        Cluster::start(Setup { workers: 3, cache_bytes: CACHE_BYTES, combiner, worker_rows: 64, ..Setup::default() });
    let seen = Seen::default();
    let begun = Instant::now();
    let goes = std::iter::from_fn(|| {
        (begun.elapsed() < LASTS).then(|| {
            let patience = (random.below(3) == 0).then(|| Duration::from_micros(random.below(60_000) as u64));
            (random.below(KINDS), patience)
        })
    });
    let (mut answered, mut cancelled, mut ties, mut kept) = (0, 0, 0, 0);
    let (cluster_ref, requests_ref, want_ref) = (&cluster, &requests, &want);
    let mut outcomes = stream::iter(goes)
        .map(|(i, patience)| one_go(cluster_ref, &requests_ref[i], &want_ref[i], patience))
        .buffer_unordered(AT_ONCE);
    while let Some(outcome) = outcomes.next().await {
        match outcome {
            Outcome::Answered { ties: parted } => {
                answered += 1;
                ties += parted;
            }
            Outcome::Cancelled => cancelled += 1,
            Outcome::Failed(error) => panic!("no request may fail: {error}"),
        }
        if answered % 10 == 0 {
            kept = kept.max(seen.look(&cluster, &pool));
        }
    }
    drop(outcomes);
    cluster.settle().await;
    seen.look(&cluster, &pool);

    let stats = cluster.stats();
    assert!(answered >= KINDS && cancelled > 0, "{answered} answered, {cancelled} cancelled");
    assert!(ties * 50 <= answered, "{ties} of {answered} answers part at a tie");
    assert!(kept > 0, "some entries were looked at twice or more");
    assert!(stats.evicted_entries + stats.rejected_low_value > 0, "the cache is too small: {stats:?}");
    assert!(stats.hits > 0 && stats.prefix_hits > 0, "and of use: {stats:?}");
}
