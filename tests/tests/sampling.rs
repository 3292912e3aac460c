//! Choosing tokens, through the roles: several answers to one prompt, seeds, limits, stop texts, penalties,
//! log-probabilities.

use futures::future::join_all;
use hypic_router::{FinishReason, Request};
use hypic_tests::Random;
use hypic_tests::ask::{Complete, ask, examples_of, tokens};
use hypic_tests::cluster::{Cluster, Setup};

const VOCAB: usize = 1746;

async fn answer(cluster: &Cluster, request: &Request) -> Complete {
    ask(&cluster.router, request.clone()).await.expect("an answer")
}

fn prompt(seed: u64) -> Request {
    let mut random = Random(seed);
    let segments = [40, 12, 70].map(|n| random.tokens(n, VOCAB)).to_vec();
    let mut request = tokens(segments, random.tokens(4, VOCAB), vec![5, 6]);
    request.max_tokens = Some(12);
    request
}

fn drawn(seed: u64) -> Request {
    let mut request = prompt(seed);
    request.sampling.temperature = Some(1.5);
    request.sampling.seed = Some(seed);
    request
}

fn ids(complete: &Complete) -> Vec<Vec<u32>> {
    complete.choices.iter().map(|c| c.token_ids.clone()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_seed_gives_the_same_answer_alone_and_in_a_crowd() {
    let requests: Vec<Request> = (0..10).map(drawn).collect();
    let cluster = Cluster::start(Setup { cache_bytes: 0, ..Setup::default() });
    let mut alone = Vec::new();
    for request in &requests {
        alone.push(ids(&answer(&cluster, request).await));
        assert_eq!(ids(&answer(&cluster, request).await), alone[alone.len() - 1], "the same seed again");
    }
    let together = join_all(requests.iter().map(|r| answer(&cluster, r))).await;
    let together: Vec<_> = together.iter().map(ids).collect();
    assert_eq!(together, alone);

    let mut other = requests[0].clone();
    other.sampling.seed = Some(77);
    assert_ne!(ids(&answer(&cluster, &other).await), alone[0], "another seed");
    other.sampling.seed = None;
    let (a, b) = (answer(&cluster, &other).await, answer(&cluster, &other).await);
    assert_ne!(ids(&a), ids(&b), "no seed: drawn at random");
    cluster.settle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn several_answers_to_one_prompt() {
    let cluster = Cluster::start(Setup::default());
    let one = drawn(3);
    let mut three = one.clone();
    three.n = 3;
    let (one, three) = (answer(&cluster, &one).await, answer(&cluster, &three).await);
    assert_eq!(three.choices.len(), 3);
    assert_eq!(ids(&three)[0], ids(&one)[0], "the first answer does not depend on how many there are");
    assert!(ids(&three)[0] != ids(&three)[1] && ids(&three)[1] != ids(&three)[2], "each draws for itself");
    assert!(three.choices.iter().all(|c| c.finish == Some(FinishReason::Length) && c.token_ids.len() == 12));

    let mut greedy = prompt(4);
    let want = ids(&answer(&cluster, &greedy).await).remove(0);
    greedy.n = 4;
    assert_eq!(ids(&answer(&cluster, &greedy).await), vec![want; 4], "greedy answers are one");
    cluster.settle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn log_probabilities() {
    let cluster = Cluster::start(Setup::default());
    for (mut request, greedy) in [(prompt(1), true), (drawn(1), false)] {
        request.logprobs = Some(5);
        let complete = answer(&cluster, &request).await;
        let choice = &complete.choices[0];
        assert_eq!(choice.logprobs.len(), choice.token_ids.len());
        for (told, &id) in choice.logprobs.iter().zip(&choice.token_ids) {
            assert_eq!(told.chosen.token_id, id);
            assert_eq!(told.top.len(), 5);
            assert!(told.top.iter().all(|t| t.logprob.is_finite() && t.logprob <= 0.0), "{told:?}");
            assert!(told.top.is_sorted_by(|a, b| a.logprob >= b.logprob), "best first: {told:?}");
            let mass: f32 = told.top.iter().map(|t| t.logprob.exp()).sum();
            assert!(mass <= 1.0 + 1e-4, "{told:?}");
            assert!(told.chosen.logprob <= told.top[0].logprob, "{told:?}");
            if greedy {
                assert_eq!(told.top[0].token_id, id, "the likeliest is chosen");
            }
            if let Some(listed) = told.top.iter().find(|t| t.token_id == id) {
                assert_eq!(listed.logprob, told.chosen.logprob);
            }
        }
    }
    let mut none = prompt(1);
    none.logprobs = None;
    assert!(answer(&cluster, &none).await.choices[0].logprobs.is_empty(), "only when asked for");
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_and_stop_texts() {
    let cluster = Cluster::start(Setup::default());
    let example = examples_of("short").remove(2);
    let mut request = example.request();
    let whole = answer(&cluster, &request).await.choices.remove(0);
    assert_eq!(whole.finish, Some(FinishReason::Stop), "an end token: {whole:?}");
    for limit in 1..whole.token_ids.len() {
        request.max_tokens = Some(limit as u32);
        let short = answer(&cluster, &request).await.choices.remove(0);
        assert_eq!(short.finish, Some(FinishReason::Length));
        assert_eq!(short.token_ids, whole.token_ids[..limit]);
        assert!(whole.text.starts_with(&short.text), "{:?} of {:?}", short.text, whole.text);
    }
    request.max_tokens = None;
    assert_eq!(answer(&cluster, &request).await.choices[0].token_ids, whole.token_ids, "as long as there is room");

    // Every stretch of the answer, across the edges of its tokens.
    let text = whole.text.clone();
    for (from, to) in [(1, 2), (0, 3), (3, 9), (text.len() - 2, text.len()), (2, text.len())] {
        let stop = &text[from..to];
        request.stop = vec!["nowhere".to_string(), stop.to_string()];
        let stopped = answer(&cluster, &request).await.choices.remove(0);
        assert_eq!(stopped.text, text[..text.find(stop).expect("it is in the text")], "stop {stop:?}");
        assert_eq!(stopped.finish, Some(FinishReason::Stop));
    }
    request.stop = vec!["not in it".to_string()];
    assert_eq!(answer(&cluster, &request).await.choices[0].text, text);
    cluster.settle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_answer_that_stops_leaves_the_others_alone() {
    let cluster = Cluster::start(Setup::default());
    let example = examples_of("short").remove(3);
    let mut request = example.request();
    (request.n, request.sampling.temperature, request.sampling.seed) = (4, Some(2.0), Some(11));
    let free = answer(&cluster, &request).await;
    let cut = free.choices.iter().find(|c| c.text.len() > 8).expect("one is long enough").text[2..6].to_string();
    request.stop = vec![cut.clone()];
    let stopped = answer(&cluster, &request).await;
    for (got, whole) in stopped.choices.iter().zip(&free.choices) {
        let want = whole.text.find(&cut).map_or(whole.text.as_str(), |at| &whole.text[..at]);
        assert_eq!(got.text, want);
    }
    cluster.settle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn penalties_and_biases_act() {
    let cluster = Cluster::start(Setup::default());
    let plain = ids(&answer(&cluster, &prompt(6)).await).remove(0);

    let mut biased = prompt(6);
    biased.sampling.logit_bias = vec![(plain[0], -100.0)];
    assert!(!ids(&answer(&cluster, &biased).await)[0].contains(&plain[0]), "a token that is forbidden");
    biased.sampling.logit_bias = vec![(9, 100.0)];
    assert_eq!(ids(&answer(&cluster, &biased).await)[0], [9; 12], "a token that is imposed");

    // With any score that is positive divided by this, only tokens that were not there before remain.
    let mut repetition = prompt(6);
    repetition.sampling.repetition_penalty = Some(1e9);
    let unlike = ids(&answer(&cluster, &repetition).await).remove(0);
    let hypic_router::Prompt::Tokens { segments, query, .. } = &repetition.prompt else { unreachable!("ids") };
    let seen = [segments.concat(), query.clone()].concat();
    let mut distinct = unlike.clone();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!(distinct.len(), unlike.len(), "nothing twice: {unlike:?}");
    assert!(unlike.iter().all(|id| !seen.contains(id)), "nothing of the prompt: {unlike:?}");

    // Warm, the ids of the prompt that a prefix state covers still count.
    assert_eq!(ids(&answer(&cluster, &repetition).await)[0], unlike);

    let mut frequency = prompt(6);
    frequency.sampling.logit_bias = vec![(9, 50.0), (10, 49.0)];
    frequency.sampling.frequency_penalty = Some(2.0);
    frequency.sampling.presence_penalty = Some(2.0);
    let answer = ids(&answer(&cluster, &frequency).await).remove(0);
    assert!(answer.contains(&9) && answer.contains(&10), "each makes the other likelier: {answer:?}");
}
