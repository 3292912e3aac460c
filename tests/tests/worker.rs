//! The scatter worker alone: jobs that share a computation, are cancelled, are too many, or outlive the worker.

use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use futures::FutureExt;
use futures::future::{BoxFuture, join_all};
use hypic_cache::{EntryKey, Source, Store, StoreConfig};
use hypic_combiner::PrefixState;
use hypic_kernels::{Backend, Cpu};
use hypic_model::Model;
use hypic_scatter_worker::{Interest, Worker, WorkerConfig};
use hypic_state::{HostKv, LayerPart, PartSource, PartState, Stored};
use hypic_tests::Random;
use hypic_tests::cluster::{TestStore, demo_model, entry_bytes, key_space};
use hypic_transport::{
    Delivered, Delivery, DeliveryError, Exchange, Incoming, JobError, JobSource, KvAhead, Parcel, PrefillJob, Scatter,
    TransferId, Transport,
};
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
        self.worker_with(id, chunk_rows, Arc::new(self.exchange.clone()))
    }

    fn worker_with(
        &self,
        id: &str,
        chunk_rows: usize,
        transport: Arc<dyn Transport<Cpu>>,
    ) -> Worker<Cpu, PrefixState<Cpu>> {
        let config = WorkerConfig { chunk_rows, ..WorkerConfig::named(id) };
        let (store, interest) = (self.store.clone(), self.interest.clone());
        let worker = Worker::start(config, Cpu::new(1), self.model.clone(), store, transport, interest);
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

/// A transport that takes what is offered ahead only when the first part is final: a receiver as slow as can be.
struct Slow {
    exchange: Exchange<Cpu>,
    limit: usize,
    notes: Arc<Mutex<Notes>>,
}

#[derive(Default)]
struct Notes {
    /// Per parcel, what it was given for K and V.
    queues: Vec<Option<Weak<KvAhead<Cpu>>>>,
    taken: Vec<(usize, Range<usize>, HostKv)>,
    /// Bytes that waited in the end.
    waited: usize,
}

impl Slow {
    fn new(bench: &Bench, limit: usize) -> Arc<Self> {
        Arc::new(Slow { exchange: bench.exchange.clone(), limit, notes: Arc::default() })
    }

    /// Whether all queues are gone, soon.
    async fn all_gone(&self) {
        let begun = Instant::now();
        let alive = || self.notes.lock().queues.iter().flatten().any(|queue| queue.strong_count() > 0);
        while alive() {
            assert!(begun.elapsed() < Duration::from_secs(20), "a queue outlives its transfer");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
}

impl Transport<Cpu> for Slow {
    fn ahead(&self) -> Option<KvAhead<Cpu>> {
        Some(KvAhead::new(self.limit))
    }

    fn deliver(&self, parcel: Parcel<Cpu>) -> BoxFuture<'static, Result<Delivered, DeliveryError>> {
        let (ahead, source, notes) = (parcel.ahead.clone(), parcel.source.clone(), self.notes.clone());
        let offered = ahead.as_ref().map(Arc::downgrade);
        notes.lock().queues.push(offered.clone());
        let sent = self.exchange.deliver(parcel);
        let (Source::Flight(flight), Some(offered)) = (source, offered) else { return sent };
        let taken = notes.clone();
        // Called on the device's thread, between two layers of the last pass.
        flight.subscribe(Arc::new(move || {
            let Some(ahead) = offered.upgrade() else { return };
            let mut notes = taken.lock();
            notes.waited = notes.waited.max(ahead.bytes());
            let backend = Cpu::new(1);
            while let Some(range) = ahead.take() {
                notes.taken.push((range.layer, range.tokens, backend.kv_download(&range.kv)));
            }
        }));
        async move {
            let _until_landed = ahead;
            flight.landed().await.map_err(|reason| DeliveryError::Source(reason.to_string()))?;
            sent.await
        }
        .boxed()
    }
}

/// K and V of the passes before the last are handed out as they will be in the entry, each token once and in order; a
/// receiver that takes none of it holds up nothing and costs no more than the limit and one range; the entry is the same.
#[tokio::test(flavor = "multi_thread")]
async fn keys_and_values_of_every_pass_are_handed_out_as_they_are_in_the_entry() {
    let tokens = Random(8).tokens(700, VOCAB);
    let expected = {
        let bench = Bench::new(64 << 20);
        let job = bench.job(&tokens);
        let key = job.key;
        bench.worker("one", 1024).prefill(job).await.expect("done");
        entry_bytes(&Cpu::new(1), &bench.store.get(key, &tokens.as_slice().into()).expect("kept"))
    };
    let range_bytes = 64 * 512;
    // 10 passes of 64 tokens before the last one, in two attention layers.
    for (limit, ranges) in [(usize::MAX, 20), (5 * range_bytes, 5), (5 * range_bytes + 1, 6), (0, 0)] {
        let bench = Bench::new(64 << 20);
        let slow = Slow::new(&bench, limit);
        let worker = bench.worker_with("worker", 64, slow.clone());
        let job = bench.job(&tokens);
        let key = job.key;
        let outcome = worker.prefill(job).await.expect("done");
        assert!(computed(outcome.source));
        let backend = Cpu::new(1);
        let entry = bench.store.get(key, &tokens.as_slice().into()).expect("kept");
        assert!(entry_bytes(&backend, &entry) == expected, "limit {limit}");
        slow.all_gone().await;
        let notes = std::mem::take(&mut *slow.notes.lock());
        assert_eq!(notes.taken.len(), ranges, "limit {limit}");
        assert!(notes.waited < limit.saturating_add(range_bytes + 1), "{} bytes waited", notes.waited);
        let mut ends = vec![0; entry.parts().len()];
        for (layer, range, kv) in &notes.taken {
            assert!(ends[*layer] <= range.start && range.start < range.end, "layer {layer}: {range:?}");
            assert!(limit < usize::MAX || ends[*layer] == range.start, "layer {layer}: nothing is left out");
            ends[*layer] = range.end;
            assert_eq!(kv.bytes(), range.len() * 512, "as the limits above have it");
            let LayerPart::Attention(part) = &**entry.part(*layer) else { panic!("layer {layer} has K and V") };
            assert!(backend.kv_download(&backend.kv_copy(part, range.clone())) == *kv, "layer {layer}, {range:?}");
        }
        drop(entry);
        bench.at_rest().await;
    }
}

/// The job that leads has K and V sent ahead; one that follows it, and one that finds the entry, send it whole.
#[tokio::test(flavor = "multi_thread")]
async fn those_that_follow_send_whole_parts() {
    let bench = Bench::new(64 << 20);
    let slow = Slow::new(&bench, usize::MAX);
    let worker = bench.worker_with("worker", 64, slow.clone());
    let tokens = Random(9).tokens(1000, VOCAB);
    let jobs = [bench.job(&tokens), bench.job(&tokens)];
    let incoming = jobs.each_ref().map(|job| bench.incoming(job.to.transfer));
    let [first, second] = jobs.map(|job| worker.prefill(job));
    let (first, second) = tokio::join!(first, second);
    assert!(computed(first.expect("done").source));
    assert_eq!(second.expect("done").source, JobSource::Shared);
    let held = bench.job(&tokens);
    let late = bench.incoming(held.to.transfer);
    assert_eq!(worker.prefill(held).await.expect("done").source, JobSource::Held);
    let given: Vec<bool> = slow.notes.lock().queues.iter().map(Option::is_some).collect();
    assert_eq!(given, [true, false, false]);
    for layer in 0..bench.model.layout().len() {
        assert!(incoming.iter().chain([&late]).all(|i| matches!(i.part(layer), PartState::Ready(_))), "layer {layer}");
    }
    slow.all_gone().await;
    drop((incoming, late));
    bench.at_rest().await;
}

/// When the transfer ends what waits for it goes, though the computation goes on for another.
#[tokio::test(flavor = "multi_thread")]
async fn what_waits_goes_with_its_transfer() {
    let bench = Bench::new(64 << 20);
    let slow = Slow::new(&bench, usize::MAX);
    let worker = bench.worker_with("worker", 64, slow.clone());
    let tokens = Random(10).tokens(3_000, VOCAB);
    let (first, second) = (bench.job(&tokens), bench.job(&tokens));
    let cancel = first.cancel.clone();
    let (first, mut second) = (worker.prefill(first), worker.prefill(second));
    assert!((&mut second).now_or_never().is_none(), "it follows from now on");
    let queue = slow.notes.lock().queues[0].clone().expect("the first one leads");
    let begun = Instant::now();
    while queue.upgrade().is_none_or(|queue| queue.bytes() == 0) {
        assert!(begun.elapsed() < Duration::from_secs(20), "K and V are offered");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    cancel.cancel();
    assert_eq!(first.await, Err(JobError::Cancelled));
    slow.all_gone().await;
    assert!((&mut second).now_or_never().is_none(), "long before the computation ends");
    assert_eq!(second.await.expect("done").source, JobSource::Shared);
    assert!(slow.notes.lock().taken.is_empty(), "nothing is offered to a transfer that is gone");
    bench.at_rest().await;
}
