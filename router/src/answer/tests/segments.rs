//! Entries that are late, failed, not there, or slow.

use std::sync::atomic::Ordering;

use hypic_cache::EntryKey;
use hypic_transport::{PrefillJob, SegmentBody, TransferId};

use super::*;
use crate::api::SegmentSource;

fn no_hedge() -> FaultConfig {
    FaultConfig { hedge: false, ..FaultConfig::default() }
}

fn key(tokens: &[u32]) -> EntryKey {
    EntryKey::new(&space(), SEAM, &[], b"", tokens)
}

fn job(jobs: &parking_lot::Mutex<Vec<PrefillJob>>, n: usize) -> PrefillJob {
    jobs.lock()[n].clone()
}

/// Source and member of the prompt's only segment.
fn only(report: &Report) -> (SegmentSource, &str) {
    (report.segments[0].source, report.segments[0].worker.as_deref().expect("a member"))
}

#[tokio::test(start_paused = true)]
async fn a_failed_segment_goes_to_another_worker_under_the_next_generation() {
    for failure in [Act::Fail, Act::Gone, Act::Undelivered] {
        let bench = Bench::new(&[&[failure], &[]], 1, no_hedge());
        let mut client = bench.ask(ask(&[ids(1, 30)]));
        let plan = bench.combiners[0].plan().await;
        until(|| bench.workers[1].job_count() == 1).await;
        let (first, second) = (job(&bench.workers[0].jobs, 0), job(&bench.workers[1].jobs, 0));
        let SegmentBody::Entry { transfer, .. } = plan.segments[0].body else { panic!("an entry") };
        assert_eq!((first.to.transfer, second.to.transfer), (transfer, transfer.next()));
        assert!(first.cancel.is_cancelled() && !second.cancel.is_cancelled());
        assert!(client.elapsed() <= bench.core.config.faults.backoff_limit, "{:?}", client.elapsed());
        tokio::time::sleep(Duration::from_millis(5)).await;
        complete(&plan);
        assert_eq!(only(&client.report().await), (SegmentSource::Computed, "worker-1"), "{failure:?}");
        assert!(bench.combiners[0].jobs.lock().is_empty());
        bench.settled().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_silent_worker_costs_the_segments_deadline() {
    let bench = Bench::new(&[&[Act::Silence], &[]], 1, no_hedge());
    let faults = &bench.core.config.faults;
    let mut client = bench.ask(ask(&[ids(1, 30)]));
    let plan = bench.combiners[0].plan().await;
    until(|| bench.workers[1].job_count() == 1).await;
    let first = job(&bench.workers[0].jobs, 0);
    assert!(first.cancel.is_cancelled());
    assert!(client.elapsed() >= faults.late_floor_unmeasured, "nothing was measured yet");
    assert!(client.elapsed() <= faults.late_floor_unmeasured + faults.backoff_limit);
    tokio::time::sleep(Duration::from_millis(5)).await;
    complete(&plan);
    client.report().await;
    bench.settled().await;

    // Now that speeds are known.
    bench.workers[0].acts.lock().push_back(Act::Silence);
    let mut client = bench.ask(ask(&[ids(50, 30)]));
    let plan = bench.combiners[0].plan().await;
    until(|| bench.workers[1].job_count() == 2).await;
    assert!(client.elapsed() >= faults.late_floor && client.elapsed() <= faults.late_floor + faults.backoff_limit);
    tokio::time::sleep(Duration::from_millis(5)).await;
    complete(&plan);
    client.report().await;
    bench.settled().await;
}

#[tokio::test(start_paused = true)]
async fn after_so_many_attempts_the_combiner_computes() {
    let bench = Bench::new(&[&[Act::Fail; 9], &[Act::Undelivered; 9]], 1, no_hedge());
    let mut client = bench.ask(ask(&[ids(1, 30)]));
    let plan = bench.combiners[0].plan().await;
    until(|| bench.combiners[0].jobs.lock().len() == 1).await;
    assert_eq!(bench.workers[0].job_count() + bench.workers[1].job_count(), 3);
    assert_eq!(job(&bench.combiners[0].jobs, 0).to.transfer.generation, 3);
    tokio::time::sleep(Duration::from_millis(5)).await;
    complete(&plan);
    assert_eq!(only(&client.report().await), (SegmentSource::Computed, "combiner-0"));
    bench.settled().await;
}

#[tokio::test(start_paused = true)]
async fn a_request_fails_when_the_last_resort_does() {
    let bench = Bench::new(&[&[Act::Fail; 9]], 1, no_hedge());
    bench.combiners[0].acts.lock().push_back(Act::Fail);
    let mut client = bench.ask(ask(&[ids(1, 30)]));
    let plan = bench.combiners[0].plan().await;
    let error = client.error().await;
    assert_eq!(error.kind, ErrorKind::Internal);
    assert!(error.message.contains("worker-0") && error.message.contains("combiner-0"), "{error}");
    assert!(plan.cancel.is_cancelled());
    bench.settled().await;
}

#[tokio::test(start_paused = true)]
async fn without_workers_or_budget_the_combiner_computes_at_once() {
    let bench = Bench::new(&[], 1, no_hedge());
    let mut client = bench.ask(ask(&[ids(1, 30)]));
    let plan = bench.combiners[0].plan().await;
    tokio::time::sleep(Duration::from_millis(5)).await;
    complete(&plan);
    assert_eq!(only(&client.report().await), (SegmentSource::Computed, "combiner-0"));
    bench.settled().await;

    let poor = FaultConfig { budget_burst: 0.0, ..no_hedge() };
    let bench = Bench::new(&[&[Act::Fail], &[]], 1, poor);
    let mut client = bench.ask(ask(&[ids(1, 30)]));
    let plan = bench.combiners[0].plan().await;
    until(|| bench.combiners[0].jobs.lock().len() == 1).await;
    assert_eq!((bench.workers[1].job_count(), client.elapsed().as_millis() < 5), (0, true));
    tokio::time::sleep(Duration::from_millis(5)).await;
    complete(&plan);
    client.report().await;
    bench.settled().await;
}

/// A holder that does not hold it costs neither a wait nor the budget.
#[tokio::test(start_paused = true)]
async fn an_entry_that_is_not_there_is_computed_at_once() {
    let poor = FaultConfig { budget_burst: 0.0, breaker_failures: 1, ..no_hedge() };
    let bench = Bench::new(&[&[Act::NotHere]], 1, poor);
    bench.workers[0].holds.lock().insert(key(&ids(1, 30)));
    let mut client = bench.ask(ask(&[ids(1, 30)]));
    let plan = bench.combiners[0].plan().await;
    until(|| bench.workers[0].job_count() == 2).await;
    let held: Vec<bool> = bench.workers[0].jobs.lock().iter().map(|j| j.held_only).collect();
    assert_eq!(held, [true, false]);
    assert!(client.elapsed() < Duration::from_millis(5), "{:?}", client.elapsed());
    tokio::time::sleep(Duration::from_millis(5)).await;
    complete(&plan);
    assert_eq!(only(&client.report().await), (SegmentSource::Computed, "worker-0"));
    bench.settled().await;
}

#[tokio::test(start_paused = true)]
async fn what_others_hold_is_reported_with_the_holder() {
    let bench = Bench::new(&[&[Act::Send, Act::Join]], 1, no_hedge());
    bench.workers[0].holds.lock().insert(key(&ids(1, 30)));
    for _ in 0..2 {
        let mut client = bench.ask(ask(&[ids(1, 30)]));
        let plan = bench.combiners[0].plan().await;
        tokio::time::sleep(Duration::from_millis(5)).await;
        complete(&plan);
        let report = client.report().await;
        assert_eq!(only(&report), (SegmentSource::Remote, "worker-0"));
        assert_eq!((report.segments[0].reused, report.usage.composed_tokens), (26, 26));
        bench.settled().await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_entry_that_the_combiner_misses_is_computed() {
    for missing in [false, true] {
        let bench = Bench::new(&[&[]], 1, no_hedge());
        bench.combiners[0].holds.lock().insert(key(&ids(1, 30)));
        let mut client = bench.ask(ask(&[ids(1, 30)]));
        let plan = bench.combiners[0].plan().await;
        assert!(matches!(plan.segments[0].body, SegmentBody::Entry { held: true, .. }));
        let want = if missing {
            tell(&plan, GenerationEvent::Missing(0));
            // Said twice, it is one.
            tell(&plan, GenerationEvent::Missing(0));
            until(|| bench.workers[0].job_count() == 1).await;
            (SegmentSource::Computed, "worker-0")
        } else {
            (SegmentSource::Memory, "combiner-0")
        };
        tokio::time::sleep(Duration::from_millis(5)).await;
        complete(&plan);
        assert_eq!(only(&client.report().await), want);
        assert_eq!(bench.workers[0].job_count(), usize::from(missing));
        bench.settled().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_always_fails_gets_no_work_for_a_while() {
    let faults = FaultConfig { breaker_failures: 2, attempts: 1, ..no_hedge() };
    let bench = Bench::new(&[&[Act::Fail, Act::Fail]], 1, faults);
    let answer = async |n: u32| {
        let mut client = bench.ask(ask(&[ids(n * 40, 30)]));
        let plan = bench.combiners[0].plan().await;
        tokio::time::sleep(Duration::from_millis(5)).await;
        complete(&plan);
        let by = only(&client.report().await).1.to_owned();
        (by, bench.workers[0].job_count())
    };
    assert_eq!(answer(0).await, ("combiner-0".to_owned(), 1));
    assert_eq!(answer(1).await, ("combiner-0".to_owned(), 2));
    assert_eq!(answer(2).await, ("combiner-0".to_owned(), 2), "not asked");
    tokio::time::sleep(bench.core.config.faults.breaker_cool_down).await;
    assert_eq!(answer(3).await, ("worker-0".to_owned(), 3), "it is well again");
    bench.settled().await;
}

/// What a worker does for another router is no failure of it, unless it was known of and is not done by far.
#[tokio::test(start_paused = true)]
async fn a_worker_that_is_busy_for_others_is_late_and_well() {
    const MUCH: u64 = 100_000;
    for (busy, runs, well) in [(MUCH, true, true), (MUCH, false, false), (0, true, false), (30, true, false)] {
        let faults = FaultConfig { breaker_failures: 1, ..no_hedge() };
        let bench = Bench::new(&[&[Act::Silence], &[]], 1, faults);
        let mut client = bench.ask(ask(&[ids(1, 30)]));
        let plan = bench.combiners[0].plan().await;
        // It has more to do than was known when it got the job; of that, 30 tokens are the job's.
        bench.workers[0].backlog.store(busy, Ordering::SeqCst);
        bench.workers[0].running.store(runs, Ordering::SeqCst);
        until(|| bench.workers[1].job_count() == 1).await;
        assert_eq!(bench.core.breakers.allows("worker-0"), well, "{busy} tokens, runs: {runs}");
        tokio::time::sleep(Duration::from_millis(5)).await;
        complete(&plan);
        assert_eq!(only(&client.report().await), (SegmentSource::Computed, "worker-1"));
        bench.settled().await;
    }

    // Now it is known before: it is waited for, and then it is late indeed.
    let faults = FaultConfig { breaker_failures: 1, ..no_hedge() };
    let bench = Bench::new(&[&[Act::Silence]], 1, faults);
    bench.workers[0].backlog.store(MUCH, Ordering::SeqCst);
    let client = bench.ask(ask(&[ids(1, 30)]));
    let _plan = bench.combiners[0].plan().await;
    until(|| bench.combiners[0].jobs.lock().len() == 1).await;
    assert!(client.elapsed() > 2 * bench.core.config.faults.late_floor_unmeasured, "{:?}", client.elapsed());
    assert!(!bench.core.breakers.allows("worker-0"));
    drop(client);
    bench.settled().await;
}

#[tokio::test(start_paused = true)]
async fn the_last_missing_segment_is_hedged() {
    let bench = Bench::new(&[&[Act::Silence], &[]], 1, FaultConfig::default());
    let mut client = bench.ask(ask(&[ids(1, 300), ids(400, 20)]));
    let plan = bench.combiners[0].plan().await;
    until(|| bench.workers[1].job_count() == 2).await;
    let (slow, hedge) = (job(&bench.workers[0].jobs, 0), job(&bench.workers[1].jobs, 1));
    assert_eq!((slow.key, TransferId::next(slow.to.transfer)), (hedge.key, hedge.to.transfer));
    let faults = &bench.core.config.faults;
    assert!(client.elapsed() >= faults.hedge_floor && client.elapsed() < faults.late_floor);
    until(|| slow.cancel.is_cancelled()).await;
    complete(&plan);
    let report = client.report().await;
    let by: Vec<_> = report.segments.iter().map(|s| s.worker.as_deref()).collect();
    assert_eq!(by, [Some("worker-1"), Some("worker-1")]);
    bench.settled().await;

    // Not while two are missing, and not without a worker that is idle.
    for (acts, segments) in [(vec![&[Act::Silence; 2][..]; 3], 2), (vec![&[Act::Silence; 2][..]], 1)] {
        let bench = Bench::new(&acts, 1, FaultConfig::default());
        let segments: Vec<Vec<u32>> = (0..segments).map(|n| ids(n * 500, 300)).collect();
        let client = bench.ask(ask(&segments));
        tokio::time::sleep(faults.hedge_floor * 3).await;
        assert_eq!(bench.workers.iter().map(|w| w.job_count()).sum::<usize>(), segments.len());
        drop(client);
        bench.settled().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_that_goes_away_frees_everything() {
    let bench = Bench::new(&[&[Act::Silence], &[Act::Fail]], 1, no_hedge());
    let client = bench.ask(ask(&[ids(1, 30), ids(50, 20)]));
    let plan = bench.combiners[0].plan().await;
    until(|| bench.workers[0].job_count() == 1 && bench.workers[1].job_count() == 1).await;
    drop(client);
    bench.settled().await;
    assert!(plan.cancel.is_cancelled() && job(&bench.workers[0].jobs, 0).cancel.is_cancelled());
}
