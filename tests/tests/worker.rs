//! The scatter worker alone: jobs that share a computation, are cancelled, are too many, or outlive the worker.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::join_all;
use hypic_cache::{EntryKey, Store, StoreConfig};
use hypic_combiner::PrefixState;
use hypic_kernels::Cpu;
use hypic_model::Model;
use hypic_scatter_worker::{Interest, Worker, WorkerConfig};
use hypic_state::{PartSource, PartState};
use hypic_tests::Random;
use hypic_tests::cluster::{TestStore, demo_model, key_space};
use hypic_transport::{Delivery, Exchange, Incoming, JobError, JobSource, PrefillJob, Scatter, TransferId};
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

const VOCAB: usize = 1746;
const SEAM: usize = 8;

struct Bench {
    model: Model<Cpu>,
    store: TestStore,
    exchange: Exchange<Cpu>,
    interest: Interest,
    /// The receiving ends of all jobs.
    open: Mutex<Vec<(TransferId, Incoming<Cpu>)>>,
}

impl Bench {
    fn new(cache_bytes: usize) -> Self {
        let store = Store::new(StoreConfig { capacity_bytes: cache_bytes });
        let (exchange, interest, open) = (Exchange::default(), Interest::default(), Mutex::default());
        Bench { model: demo_model(&Cpu::new(1)), store, exchange, interest, open }
    }

    fn worker(&self, id: &str, chunk_rows: usize) -> Worker<Cpu, PrefixState<Cpu>> {
        let config = WorkerConfig { chunk_rows, ..WorkerConfig::named(id) };
        let (store, exchange) = (self.store.clone(), Arc::new(self.exchange.clone()));
        let worker = Worker::start(config, Cpu::new(1), self.model.clone(), store, exchange, self.interest.clone());
        worker.expect("a thread")
    }

    fn job(&self, tokens: &[u32]) -> PrefillJob {
        let transfer = TransferId::random();
        self.open.lock().push((transfer, self.exchange.open(transfer.id)));
        PrefillJob {
            key: EntryKey::new(&key_space(&self.model), SEAM, &[], b"", tokens),
            tokens: tokens.into(),
            seam: SEAM,
            anchor: Arc::new([]),
            salt: Arc::new([]),
            to: Delivery { combiner: "combiner".into(), transfer },
            held_only: false,
            request: "test".into(),
            deadline: None,
            cancel: CancellationToken::new(),
        }
    }

    /// The receiving end of a job.
    fn incoming(&self, transfer: TransferId) -> Incoming<Cpu> {
        let mut open = self.open.lock();
        let at = open.iter().position(|(id, _)| *id == transfer).expect("it is open");
        open.swap_remove(at).1
    }

    /// Nothing is in use, soon: a job that is given up ends before its computation does.
    async fn at_rest(&self) {
        self.open.lock().clear();
        let begun = Instant::now();
        loop {
            let stats = self.store.stats();
            if (stats.pinned, stats.flights) == (0, 0) {
                return;
            }
            assert!(begun.elapsed() < Duration::from_secs(20), "{stats:?}");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
}

fn computed(source: JobSource) -> bool {
    matches!(source, JobSource::Computed { .. })
}

#[tokio::test(flavor = "multi_thread")]
async fn one_computation_for_all_who_want_it() {
    let bench = Bench::new(64 << 20);
    let (a, b) = (bench.worker("a", 64), bench.worker("b", 64));
    let tokens = Random(1).tokens(2000, VOCAB);
    let jobs = (0..6).map(|i| if i % 2 == 0 { a.prefill(bench.job(&tokens)) } else { b.prefill(bench.job(&tokens)) });
    let outcomes: Vec<JobSource> = join_all(jobs).await.into_iter().map(|o| o.expect("done").source).collect();
    assert_eq!(outcomes.iter().filter(|s| computed(**s)).count(), 1, "{outcomes:?}");
    assert_eq!(outcomes.iter().filter(|s| **s == JobSource::Shared).count(), 5, "{outcomes:?}");
    assert!(b.holds(bench.job(&tokens).key));
    assert_eq!(b.prefill(bench.job(&tokens)).await.expect("done").source, JobSource::Held);
}

/// With no room for entries the parts arrive all the same, before the job is done.
#[tokio::test(flavor = "multi_thread")]
async fn an_entry_that_is_not_kept_is_sent() {
    let bench = Bench::new(0);
    let worker = bench.worker("worker", 512);
    let job = bench.job(&Random(2).tokens(100, VOCAB));
    let key = job.key;
    let incoming = bench.incoming(job.to.transfer);
    let outcome = worker.prefill(job).await.expect("done");
    assert!(computed(outcome.source));
    assert!(!worker.holds(key));
    for layer in 0..bench.model.layout().len() {
        assert!(matches!(incoming.part(layer), PartState::Ready(_)), "layer {layer}");
    }
    drop(incoming);
    bench.at_rest().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn work_that_nobody_wants_is_given_up() {
    let bench = Bench::new(64 << 20);
    let worker = bench.worker("worker", 64);
    let mut random = Random(3);
    let (long, behind) = (random.tokens(6_000, VOCAB), random.tokens(20_000, VOCAB));
    let (running, queued) = (bench.job(&long), bench.job(&behind));
    let cancels = [running.cancel.clone(), queued.cancel.clone()];
    let begun = Instant::now();
    let (running, queued) = (worker.prefill(running), worker.prefill(queued));
    tokio::time::sleep(Duration::from_millis(30)).await;
    cancels.iter().for_each(CancellationToken::cancel);
    assert_eq!(running.await, Err(JobError::Cancelled));
    assert_eq!(queued.await, Err(JobError::Cancelled));
    bench.at_rest().await;
    let given_up = begun.elapsed();

    let begun = Instant::now();
    let again = bench.job(&long);
    assert!(computed(worker.prefill(again).await.expect("it can be had again").source));
    assert!(given_up < begun.elapsed(), "{given_up:?} to give up, {:?} to do it", begun.elapsed());
    bench.at_rest().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn work_that_another_wants_goes_on() {
    let bench = Bench::new(64 << 20);
    let worker = bench.worker("worker", 64);
    let tokens = Random(4).tokens(3000, VOCAB);
    let (first, second) = (bench.job(&tokens), bench.job(&tokens));
    let cancel = first.cancel.clone();
    let (first, second) = (worker.prefill(first), worker.prefill(second));
    cancel.cancel();
    assert_eq!(second.await.expect("done").source, JobSource::Shared);
    let first = first.await;
    assert!(matches!(first, Ok(_) | Err(JobError::Cancelled)), "done after all, or given up: {first:?}");
    assert_eq!(bench.store.stats().failed_flights, 0);
}

/// The pieces of a long segment take turns with what comes behind it.
#[tokio::test(flavor = "multi_thread")]
async fn a_short_segment_does_not_wait_for_a_long_one() {
    let bench = Bench::new(64 << 20);
    let worker = bench.worker("worker", 128);
    let mut random = Random(5);
    let mut long = worker.prefill(bench.job(&random.tokens(6_000, VOCAB)));
    let short = worker.prefill(bench.job(&random.tokens(40, VOCAB)));
    tokio::select! {
        biased;
        _ = &mut long => panic!("the long one was done first"),
        done = short => assert!(computed(done.expect("done").source)),
    }
    long.await.expect("done");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_goes_fails_its_jobs() {
    let bench = Bench::new(64 << 20);
    let worker = bench.worker("worker", 64);
    let mut random = Random(6);
    let shared = random.tokens(6_000, VOCAB);
    let jobs = [bench.job(&shared), bench.job(&random.tokens(500, VOCAB)), bench.job(&shared)];
    let incoming = bench.incoming(jobs[0].to.transfer);
    let answers = jobs.map(|job| worker.prefill(job));
    tokio::task::spawn_blocking(move || drop(worker)).await.expect("it stops");
    let [first, _, joined] = join_all(answers).await.try_into().expect("three");
    assert_eq!(first, Err(JobError::Gone("worker".to_string())));
    assert_eq!(joined, Err(JobError::Gone("worker".to_string())), "it is begun anew, by nobody");
    let last = bench.model.layout().len() - 1;
    assert!(matches!(incoming.part(last), PartState::Pending), "another sender may take the transfer up");
    drop(incoming);
    bench.at_rest().await;

    let heir = bench.worker("heir", 512);
    let job = bench.job(&random.tokens(50, VOCAB));
    heir.prefill(job).await.expect("the store is as good as before");
}

/// What is asked for only if held is never computed.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_held_is_told_at_once() {
    let bench = Bench::new(64 << 20);
    let worker = bench.worker("worker", 512);
    let tokens = Random(7).tokens(100, VOCAB);
    let held = || PrefillJob { held_only: true, ..bench.job(&tokens) };
    assert_eq!(worker.prefill(held()).await, Err(JobError::NotHere("worker".to_string())));
    worker.prefill(bench.job(&tokens)).await.expect("computed");
    assert_eq!(worker.prefill(held()).await.expect("held").source, JobSource::Held);
    assert_eq!(worker.backlog_tokens(), 0);
    bench.at_rest().await;
}
