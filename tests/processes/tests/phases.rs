//! Every role killed and stopped, and every client gone, in every phase of a request. The phases are reached by holding
//! bytes between the roles and by looking at what the members export; what is held keeps the request from ending before
//! the looks are done.

use std::time::Duration;

use hypic_process_tests::{
    Answer, Direction, Failure, Fault, Member, Options, Proxy, Request, Roles, Signal, ask, open, scrape, status,
    tokens, until,
};
use serde_json::json;
use tokio::task::JoinHandle;

const SETTLE: Duration = Duration::from_secs(5);
const SOON: Duration = Duration::from_secs(20);
/// More than signs of life, and less than a plan or a job with its token ids.
const AN_ORDER: u64 = 600;
/// Text that shows that an answer is on its way, and far from its end.
const SOME_TEXT: usize = 50;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Planned; nothing has reached a member.
    Dispatch,
    /// A worker computes a segment; what is ready is held.
    Computing,
    /// Parts are on their way, and held.
    Transfer,
    /// All entries are there; the combiner computes the prompt's own rows.
    Composing,
    /// The answer is being told; the rest of it is held.
    Decoding,
    /// The member that is going to be lost was told to end.
    Draining,
}

const PHASES: [Phase; 6] =
    [Phase::Dispatch, Phase::Computing, Phase::Transfer, Phase::Composing, Phase::Decoding, Phase::Draining];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lost {
    Worker,
    Combiner,
    Router,
    Client,
}

/// A request that stays in the phase for a while. The same text for every `salt`, of which each is cold.
fn request(phase: Phase, salt: &str) -> Request {
    let (segments, query, answer): (&[usize], usize, u32) = match phase {
        Phase::Dispatch | Phase::Transfer => (&[200, 90, 300], 5, 12),
        Phase::Computing => (&[2500, 2500, 2500], 5, 12),
        Phase::Composing => (&[100], 8000, 12),
        Phase::Decoding | Phase::Draining => (&[100, 100], 5, 1200),
    };
    let seed = 7000 + 100 * phase as u64;
    let drawn: Vec<_> = segments.iter().enumerate().map(|(i, n)| tokens(seed + i as u64, *n)).collect();
    let request = Request::of_tokens(&drawn, &tokens(seed + 99, query), answer);
    let hypic = json!({"segments": drawn, "salt": salt});
    request.with("hypic", hypic)
}

/// A request under way. Its task hands out the answer; aborting it is a client that vanishes.
type UnderWay = JoinHandle<Result<Answer, Failure>>;

fn asked(base: String, request: Request) -> UnderWay {
    tokio::spawn(async move { ask(&base, &request).await })
}

fn streamed(base: String, request: Request, begun: tokio::sync::oneshot::Sender<()>) -> UnderWay {
    tokio::spawn(async move {
        let mut stream = open(&base, &request).await?;
        stream.reach(SOME_TEXT).await?;
        let _ = begun.send(());
        stream.rest().await
    })
}

async fn gauge(member: &Member, name: &str, label: &str) -> f64 {
    scrape(&member.metrics).await.and_then(|samples| samples.sum(name, label)).unwrap_or_default()
}

/// A worker that has computed, or still computes, for a request whose parts are held.
async fn computing(roles: &Roles) -> Member {
    let found = async || {
        for member in &roles.workers {
            let samples = scrape(&member.metrics).await?;
            let some = |name: &str, label: &str| samples.sum(name, label) > Some(0.0);
            // One that was quicker than this look still has its parts.
            let done = some("hypic_deliveries_open", "") && !some("hypic_jobs", "");
            if some("hypic_jobs", "computing") || done {
                return Some(member.clone());
            }
        }
        None
    };
    until(SOON, "a worker computes", found).await
}

/// The combiner that has all entries of a request and still computes, where it held `before` entries.
async fn composing(roles: &Roles, before: &[f64]) -> Member {
    let found = async || {
        for (member, before) in roles.combiners.iter().zip(before) {
            let samples = scrape(&member.metrics).await?;
            let arrived = samples.sum("hypic_cache_entries", "") > Some(*before)
                && samples.sum("hypic_cache_flights", "") == Some(0.0);
            if arrived && samples.sum("hypic_sequences", "prefilling") > Some(0.0) {
                return Some(member.clone());
            }
        }
        None
    };
    until(SOON, "a combiner composes", found).await
}

/// The first of `members` whose gauge is not zero.
async fn first_with(members: &[Member], name: &str, label: &str) -> Member {
    let found = async || {
        for member in members {
            if gauge(member, name, label).await > 0.0 {
                return Some(member.clone());
            }
        }
        None
    };
    until(SOON, &format!("a member with {name} {label}"), found).await
}

/// A request brought to a phase through the first router, and the members that it is at.
struct Held {
    under_way: UnderWay,
    worker: Member,
    combiner: Member,
}

async fn reach(roles: &Roles, phase: Phase, salt: &str) -> Held {
    let request = request(phase, salt);
    let orders = || roles.to_workers.iter().chain(&roles.to_combiners);
    let received =
        |proxies: &[Proxy], direction| -> Vec<u64> { proxies.iter().map(|proxy| proxy.received(direction)).collect() };
    let forth = |proxies: &[Proxy]| received(proxies, Direction::Forth);
    let before = (forth(&roles.to_combiners), forth(&roles.parts), forth(&roles.to_workers));
    let grown = |proxies: &[Proxy], before: &[u64], by: u64| {
        (0..proxies.len()).find(|&i| proxies[i].received(Direction::Forth) > before[i] + by)
    };
    let mut entries = Vec::new();
    for combiner in &roles.combiners {
        entries.push(gauge(combiner, "hypic_cache_entries", "").await);
    }
    match phase {
        Phase::Dispatch => orders().for_each(|proxy| proxy.set(Direction::Forth, Fault::Hold)),
        Phase::Computing | Phase::Transfer => {
            roles.parts.iter().for_each(|proxy| proxy.set(Direction::Forth, Fault::Hold));
        }
        _ => {}
    }
    if matches!(phase, Phase::Decoding | Phase::Draining) {
        let (begun, told) = tokio::sync::oneshot::channel();
        let before = received(&roles.to_combiners, Direction::Back);
        let under_way = streamed(roles.base(), request, begun);
        told.await.expect("text");
        // The other one has said that it lives, and no more.
        let said = |i: &usize| roles.to_combiners[*i].received(Direction::Back) - before[*i];
        let i = (0..roles.combiners.len()).max_by_key(said).expect("combiners");
        roles.to_combiners[i].set(Direction::Back, Fault::Hold);
        return Held { under_way, worker: roles.workers[0].clone(), combiner: roles.combiners[i].clone() };
    }
    let under_way = asked(roles.base(), request);
    let mut worker = roles.workers[0].clone();
    let combiner;
    match phase {
        Phase::Dispatch => {
            let dispatched = async || {
                let combiner = grown(&roles.to_combiners, &before.0, AN_ORDER)?;
                let worker = grown(&roles.to_workers, &before.2, AN_ORDER)?;
                Some((combiner, worker))
            };
            let (i, j) = until(SOON, "orders are held", dispatched).await;
            (combiner, worker) = (roles.combiners[i].clone(), roles.workers[j].clone());
        }
        Phase::Computing => {
            worker = computing(roles).await;
            combiner = first_with(&roles.combiners, "hypic_calls_open", "").await;
        }
        Phase::Transfer => {
            let sent = async || grown(&roles.parts, &before.1, AN_ORDER);
            let i = until(SOON, "parts are held", sent).await;
            combiner = roles.combiners[i].clone();
            worker = first_with(&roles.workers, "hypic_deliveries_open", "").await;
        }
        Phase::Composing => combiner = composing(roles, &entries).await,
        Phase::Decoding | Phase::Draining => unreachable!("returned above"),
    }
    Held { under_way, worker, combiner }
}

fn release(roles: &Roles) {
    for proxy in roles.to_workers.iter().chain(&roles.to_combiners).chain(&roles.parts) {
        for direction in [Direction::Forth, Direction::Back] {
            proxy.set(direction, Fault::None);
        }
    }
}

fn options() -> Options {
    // Silence is noticed sooner, so that the tests are.
    let arguments = ["cluster.peers.keep_alive=2s"];
    let arguments = arguments.iter().flat_map(|set| ["--set".to_string(), set.to_string()]).collect();
    Options { combiners: 2, routers: 2, arguments, ..Options::default() }
}

/// Lose what is to be lost in every phase; whatever it is, every client gets its right answer or an error, in time,
/// and nothing is left of the request anywhere.
async fn lose(what: Lost, with: Signal) {
    let mut roles = Roles::start(options(), &[]).await;
    let mut want = Vec::new();
    for phase in PHASES {
        let answer = ask(&roles.routers[1].base(), &request(phase, "undisturbed")).await.expect("an answer");
        want.push(answer.text);
    }
    roles.assert_idle(SETTLE, &[]).await;
    for (phase, want) in PHASES.into_iter().zip(&want) {
        let case = format!("{what:?} {with:?} {phase:?}");
        let Held { under_way, worker, combiner } = reach(&roles, phase, &case).await;
        let lost = match what {
            Lost::Worker => worker,
            Lost::Combiner => combiner,
            Lost::Router => roles.routers[0].clone(),
            Lost::Client => {
                under_way.abort();
                without_client(&roles, phase).await;
                continue;
            }
        };
        if phase == Phase::Draining {
            roles.signal(&lost, Signal::TERM);
            let draining = async || (status(&lost.metrics, "/ready").await != Some(200)).then_some(());
            until(SOON, "it drains", draining).await;
        }
        roles.signal(&lost, with);
        release(&roles);
        // Another router has its own ways and is not disturbed: it is asked while the first one's client waits.
        let other = ask(&roles.routers[1].base(), &Request::first()).await;
        assert!(other.as_ref().is_ok_and(|answer| answer.text.contains("Felton")), "{case}: {other:?}");
        if what == Lost::Router {
            roles.assert_idle(SETTLE, &[lost.pid]).await;
            under_way.abort();
        } else {
            let answer = under_way.await.expect("no panic").unwrap_or_else(|why| panic!("{case}: {why:?}"));
            assert_eq!(&answer.text, want, "{case}");
            roles.assert_idle(SETTLE, &[lost.pid]).await;
        }
        if with == Signal::STOP && phase != Phase::Draining {
            roles.signal(&lost, Signal::CONT);
            roles.wait_for_members(4).await;
            roles.assert_idle(SETTLE, &[]).await;
        } else {
            roles.replace(&lost).await;
        }
    }
    let after = ask(&roles.base(), &Request::first()).await.expect("an answer");
    assert!(after.text.contains("Felton"), "{after:?}");
}

/// The client has gone. What held bytes ask for is unwanted by then: it arrives late and changes nothing.
async fn without_client(roles: &Roles, phase: Phase) {
    if phase != Phase::Composing {
        // Long enough for the request to be gone everywhere, and short enough for the connections to live.
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    release(roles);
    roles.assert_idle(SETTLE, &[]).await;
    let after = ask(&roles.base(), &Request::first()).await.expect("an answer");
    assert!(after.text.contains("Felton"), "{after:?}");
}

#[tokio::test]
async fn a_worker_killed_in_each_phase() {
    lose(Lost::Worker, Signal::KILL).await;
}

#[tokio::test]
async fn a_worker_stopped_in_each_phase() {
    lose(Lost::Worker, Signal::STOP).await;
}

#[tokio::test]
async fn a_combiner_killed_in_each_phase() {
    lose(Lost::Combiner, Signal::KILL).await;
}

#[tokio::test]
async fn a_combiner_stopped_in_each_phase() {
    lose(Lost::Combiner, Signal::STOP).await;
}

#[tokio::test]
async fn a_router_killed_in_each_phase() {
    lose(Lost::Router, Signal::KILL).await;
}

#[tokio::test]
async fn a_router_stopped_in_each_phase() {
    lose(Lost::Router, Signal::STOP).await;
}

#[tokio::test]
async fn a_client_gone_in_each_phase() {
    lose(Lost::Client, Signal::KILL).await;
}
