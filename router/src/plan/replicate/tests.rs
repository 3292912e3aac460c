use std::sync::atomic::Ordering;

use hypic_transport::CombineLoad;

use super::*;
use crate::fleet::{Fleet, View};
use crate::router::RouterConfig;
use crate::testing::{Act, TestCombiner, TestWorker, space};

struct Bench {
    core: Arc<Core>,
    worker: Arc<TestWorker>,
    combiners: Vec<Arc<TestCombiner>>,
    job: PrefillJob,
}

impl Bench {
    fn new(acts: &[Act], combiners: usize) -> Self {
        let worker = TestWorker::new("worker", acts);
        let combiners: Vec<_> = (0..combiners).map(|i| TestCombiner::new(format!("combiner-{i}"))).collect();
        let view = View {
            scatter: vec![worker.clone()],
            combiners: combiners.iter().map(|c| c.clone() as Arc<dyn Combine>).collect(),
        };
        let core = Arc::new(Core::new(RouterConfig::default(), space(), Arc::new(Fleet::new(view))));
        let job = job(1);
        worker.holds.lock().insert(job.key);
        combiners[0].holds.lock().insert(job.key);
        Bench { core, worker, combiners, job }
    }

    fn uses(&self, n: u32) {
        (0..n).for_each(|_| replicate(&self.core, std::slice::from_ref(&self.job), "combiner-0"));
    }

    fn config(&self) -> &ReplicateConfig {
        &self.core.replicator.config
    }

    fn backlog(&self) -> usize {
        self.core.fleet.balancer().loads()[0].segments
    }
}

fn job(first: u32) -> PrefillJob {
    let tokens: Arc<[u32]> = (first..first + 30).collect();
    PrefillJob {
        key: EntryKey::new(&space(), 4, &[], b"", &tokens),
        tokens,
        seam: 4,
        anchor: Arc::new([]),
        salt: Arc::new([]),
        to: Delivery { combiner: "combiner-0".into(), transfer: TransferId::random() },
        held_only: false,
        request: "r".into(),
        deadline: None,
        cancel: CancellationToken::new(),
    }
}

#[tokio::test(start_paused = true)]
async fn an_entry_that_is_used_often_gets_one_more_holder() {
    let bench = Bench::new(&[Act::Send], 2);
    bench.uses(bench.config().uses - 1);
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert_eq!(bench.worker.job_count(), 0, "not hot yet");
    bench.uses(2);
    let plan = bench.combiners[1].plan().await;
    tokio::time::sleep(Duration::from_millis(1)).await;
    let sent = bench.worker.jobs.lock()[0].clone();
    assert!(sent.held_only, "nothing is computed for it");
    assert_eq!((sent.key, &*sent.to.combiner), (bench.job.key, "combiner-1"));
    let transfer = sent.to.transfer;
    assert!(matches!(plan.segments[0].body, SegmentBody::Entry { transfer: opened, .. } if opened == transfer));
    assert!(plan.cancel.is_cancelled(), "the transfer is closed once it is there");
    assert_eq!(bench.backlog(), 0);
    assert!(!bench.job.cancel.is_cancelled(), "the request goes on");

    // Now that there are enough of it, more uses do nothing.
    bench.combiners[1].holds.lock().insert(bench.job.key);
    tokio::time::sleep(bench.config().pause).await;
    bench.uses(3 * bench.config().uses);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(bench.worker.job_count(), 1);
}

#[tokio::test(start_paused = true)]
async fn with_one_combiner_nothing_is_counted() {
    let bench = Bench::new(&[], 2);
    bench.combiners[1].running.store(false, Ordering::SeqCst);
    bench.uses(3 * bench.config().uses);
    assert!(!may_replicate(&bench.core) && bench.core.replicator.heats.lock().is_none());
    bench.combiners[1].running.store(true, Ordering::SeqCst);
    bench.uses(1);
    assert!(may_replicate(&bench.core) && bench.core.replicator.heats.lock().is_some());
}

#[tokio::test(start_paused = true)]
async fn uses_that_are_long_ago_count_no_more() {
    let bench = Bench::new(&[], 2);
    for _ in 0..5 {
        bench.uses(bench.config().uses - 2);
        tokio::time::sleep(3 * bench.config().window).await;
    }
    assert_eq!(bench.worker.job_count(), 0);
}

#[tokio::test(start_paused = true)]
async fn the_budget_bounds_what_is_on_its_way() {
    let bench = Bench::new(&[Act::Silence, Act::Send], 3);
    bench.uses(bench.config().uses);
    let plan = bench.combiners[1].plan().await;
    // Another one is hot meanwhile.
    let other = job(50);
    bench.worker.holds.lock().insert(other.key);
    let use_other = || replicate(&bench.core, std::slice::from_ref(&other), "combiner-0");
    (0..3 * bench.config().uses).for_each(|_| use_other());
    tokio::time::sleep(bench.config().limit - Duration::from_millis(10)).await;
    assert_eq!((bench.worker.job_count(), bench.backlog()), (1, 1), "the first one's place is taken");
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert!(plan.cancel.is_cancelled(), "one that does not get there is given up");
    assert_eq!(bench.backlog(), 0);
    use_other();
    assert_eq!(bench.worker.job_count(), 1, "its place stays empty for a moment");
    tokio::time::sleep(bench.config().pause).await;
    (0..bench.config().uses).for_each(|_| use_other());
    bench.combiners[1].plan().await;
    assert_eq!(bench.worker.jobs.lock()[1].key, other.key);
}

#[tokio::test(start_paused = true)]
async fn nobody_who_waits_waits_longer() {
    let bench = Bench::new(&[], 2);
    *bench.combiners[1].load.lock() = CombineLoad { waiting: 1, sequences: 0 };
    bench.uses(3 * bench.config().uses);
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert_eq!(bench.worker.job_count(), 0, "the other combiner has too much to do");
    *bench.combiners[1].load.lock() = CombineLoad::default();
    bench.worker.running.store(false, Ordering::SeqCst);
    bench.uses(1);
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert_eq!(bench.worker.job_count(), 0, "no worker can send it");
    bench.worker.running.store(true, Ordering::SeqCst);
    bench.uses(1);
    bench.combiners[1].plan().await;
}

#[tokio::test(start_paused = true)]
async fn the_number_of_entries_that_are_counted_is_bounded() {
    let replicator = Replicator::new(ReplicateConfig { tracked: 10, ..ReplicateConfig::default() });
    let keys = |n: u32| (0..n).map(|i| job(100 * i).key).collect::<Vec<_>>();
    replicator.used(keys(50).into_iter());
    let tracked = || replicator.heats.lock().as_ref().map_or(0, |heats| heats.known.len());
    assert_eq!(tracked(), 10);
    tokio::time::sleep(2 * replicator.config.window).await;
    replicator.used(keys(50).into_iter().skip(40));
    assert_eq!(tracked(), 10, "those that have cooled down make room");
    assert!(replicator.heats.lock().as_ref().is_some_and(|heats| heats.known.contains_key(&keys(50)[49])));
}
