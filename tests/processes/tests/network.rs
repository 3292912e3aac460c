//! A faulty network between the roles: held, cut, truncated, duplicated, dropped and flipped bytes never change an
//! answer.

use std::time::Duration;

use hypic_process_tests::{
    Answer, Direction, Failure, Fault, Options, Proxy, Request, Roles, Signal, ask, model_with_another_tensor, scrape,
    until,
};
use tokio::task::JoinHandle;

const SETTLE: Duration = Duration::from_secs(5);
const SOON: Duration = Duration::from_secs(20);
/// A member that says nothing is found out within this.
const NOTICED: Duration = Duration::from_secs(4);

fn request(seed: u64) -> Request {
    Request::random(seed, &[200, 90, 300, 40], 12)
}

fn asked(base: String, request: Request) -> JoinHandle<Result<Answer, Failure>> {
    tokio::spawn(async move { ask(&base, &request).await })
}

/// Wait until bytes are held.
async fn held(proxy: &Proxy, direction: Direction, before: u64) {
    let waiting = async || (proxy.received(direction) > before).then_some(());
    until(SOON, "bytes are held", waiting).await;
}

/// The same requests in a cluster that nothing disturbs.
async fn compare(answers: Vec<(Request, Answer, String)>) {
    let lone = Roles::start(Options { workers: 1, ..Options::default() }, &[]).await;
    for (request, answer, what) in answers {
        let want = ask(&lone.base(), &request).await.expect("an answer");
        assert_eq!((&answer.text, &answer.finish), (&want.text, &want.finish), "{what}");
    }
}

#[tokio::test]
async fn parts_that_are_damaged_late_or_lost_are_made_again() {
    let roles = Roles::start(Options::default(), &[]).await;
    let parts = &roles.parts[0];
    let mut answers = Vec::new();
    let faults = [
        Fault::FlipAfter(100),
        Fault::FlipAfter(40_000),
        Fault::FlipAfter(200_000),
        Fault::CutAfter(50),
        Fault::CutAfter(100_000),
        Fault::Delay(Duration::from_millis(5)),
        Fault::Duplicate,
        Fault::Drop,
        Fault::Hold,
        Fault::Cut,
    ];
    let mut seed = 1000;
    for (i, fault) in faults.into_iter().enumerate() {
        // A worker whose connection broke needs a while to dial again: parts come by before the next fault is set.
        let whole = async || {
            seed += 1;
            let before = parts.received(Direction::Forth);
            ask(&roles.base(), &Request::random(seed, &[50, 50], 1)).await.expect("an answer");
            (parts.received(Direction::Forth) > before + 10_000).then_some(())
        };
        until(SOON, "workers reach the combiner", whole).await;
        let before = parts.received(Direction::Forth);
        parts.set(Direction::Forth, fault);
        let request = request(100 + i as u64);
        let answer = ask(&roles.base(), &request).await.unwrap_or_else(|why| panic!("{fault:?}: {why:?}"));
        // A connection that broke before may not be there again yet.
        if !matches!(fault, Fault::Cut | Fault::Drop | Fault::Hold) {
            assert!(parts.received(Direction::Forth) > before, "{fault:?}: no part came by");
        }
        answers.push((request, answer, format!("{fault:?}")));
        parts.set(Direction::Forth, Fault::None);
        roles.assert_idle(SETTLE, &[]).await;
    }
    compare(answers).await;
}

#[tokio::test]
async fn a_worker_lost_while_its_parts_are_held() {
    let mut answers = Vec::new();
    for with in [Signal::KILL, Signal::STOP] {
        let roles = Roles::start(Options::default(), &[]).await;
        let parts = &roles.parts[0];
        let before = parts.received(Direction::Forth);
        parts.set(Direction::Forth, Fault::Hold);
        let request = request(200 + with.as_raw() as u64);
        let answer = asked(roles.base(), request.clone());
        held(parts, Direction::Forth, before).await;
        let lost = &roles.workers[0];
        roles.signal(lost, with);
        parts.set(Direction::Forth, Fault::None);
        let answer = answer.await.expect("no panic").expect("an answer");
        answers.push((request, answer, format!("{with:?}")));
        roles.assert_idle(SETTLE, &[lost.pid]).await;
        roles.signal(lost, Signal::CONT);
        roles.assert_idle(SETTLE, &[]).await;
    }
    compare(answers).await;
}

#[tokio::test]
async fn a_combiner_lost_while_it_waits_for_parts() {
    let mut answers = Vec::new();
    for with in [Signal::KILL, Signal::STOP] {
        let roles = Roles::start(Options { combiners: 2, ..Options::default() }, &[]).await;
        let before = roles.parts.iter().map(|p| p.received(Direction::Forth)).collect::<Vec<_>>();
        for parts in &roles.parts {
            parts.set(Direction::Forth, Fault::Hold);
        }
        let request = request(300 + with.as_raw() as u64).sampled(3);
        let answer = asked(roles.base(), request.clone());
        let chosen = async || (0..2).find(|&i| roles.parts[i].received(Direction::Forth) > before[i]);
        let chosen = until(SOON, "parts on their way", chosen).await;
        let lost = &roles.combiners[chosen];
        roles.signal(lost, with);
        for parts in &roles.parts {
            parts.set(Direction::Forth, Fault::None);
        }
        let answer = answer.await.expect("no panic").expect("an answer of the other combiner");
        answers.push((request, answer, format!("{with:?}")));
        roles.assert_idle(SETTLE, &[lost.pid]).await;
        roles.signal(lost, Signal::CONT);
        roles.assert_idle(SETTLE, &[]).await;
    }
    compare(answers).await;
}

#[tokio::test]
async fn members_behind_a_silent_network() {
    let roles = Roles::start(Options { combiners: 2, ..Options::default() }, &[]).await;
    let mut answers = Vec::new();
    // Orders to a worker, then everything to a combiner.
    for (i, proxies) in [&roles.to_workers, &roles.to_combiners].into_iter().enumerate() {
        let proxy = &proxies[0];
        for direction in [Direction::Forth, Direction::Back] {
            proxy.set(direction, Fault::Hold);
            // Two at a time, so that each combiner has one.
            let pair = [0, 1].map(|k| request(400 + 4 * i as u64 + 2 * u64::from(direction == Direction::Back) + k));
            let under_way = pair.clone().map(|request| asked(roles.base(), request));
            for (request, answer) in pair.into_iter().zip(under_way) {
                let answer = answer.await.expect("no panic").unwrap_or_else(|why| panic!("{i} {direction:?}: {why:?}"));
                answers.push((request, answer, format!("{i} {direction:?}")));
            }
            proxy.set(direction, Fault::None);
            roles.assert_idle(NOTICED + SETTLE, &[]).await;
        }
    }
    compare(answers).await;
}

#[tokio::test]
async fn a_worker_with_another_model_is_not_used() {
    let folder = tempfile::tempdir().expect("room on disk");
    let other = model_with_another_tensor(folder.path());
    let roles = Roles::start(Options::default(), &[other]).await;
    let (wrong, right) = (&roles.workers[0].id, &roles.workers[1].id);
    let answer = ask(&roles.base(), &Request::first()).await.expect("an answer");
    assert!(answer.text.contains("Felton"), "{answer:?}");
    assert!(answer.workers().contains(right) && !answer.workers().contains(wrong), "{}", answer.hypic);
    let samples = scrape(&roles.routers[0].metrics).await.expect("metrics");
    let counted = samples.sum("hypic_members_mismatches", "fingerprint").unwrap_or_default();
    assert!(counted >= 1.0, "{samples:?}");
    assert!(roles.log().contains(wrong.as_str()), "logged with its id");
}
