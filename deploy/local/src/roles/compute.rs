//! Scatter worker and combiner as processes: the roles that hold a model. Owns their drain: what they were given is
//! finished while they still show signs of life, and only then their connections end.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use futures::FutureExt;
use futures::future::BoxFuture;
use hypic_cache::{EntryKey, Fingerprint, KeySpace, Store, StoreConfig};
use hypic_cluster::{
    Expected, MemberRecord, NodeLoad, NodeService, NodeState, NodeStatus, Protocols, Role, ServerConfig, serve_internal,
};
use hypic_combiner::{Combiner, CombinerConfig, PrefixState};
use hypic_kernels::{Backend, Cpu};
use hypic_model::Model;
use hypic_scatter_worker::{Interest, Worker, WorkerConfig};
use hypic_state::codec::FORMAT_VERSION;
use hypic_transport::grpc::{
    CombineService, DirectoryService, GrpcConfig, GrpcTransport, Receiver, ScatterService, Served,
};
use hypic_transport::{Exchange, JobError, JobOutcome, PrefillJob, Scatter, Transport};
use tokio::net::TcpListener;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

use super::{Process, common, gauges};
use crate::config::Config;
use crate::served::load_model;

/// Between two looks at whether the work is done.
const LOOK: Duration = Duration::from_millis(20);
/// Time for callers to hang up once the work is done.
const HANG_UP: Duration = Duration::from_millis(500);

type Kept = Store<Cpu, PrefixState<Cpu>>;

/// A device with a model on it.
struct Loaded {
    threads: usize,
    device: Cpu,
    model: Model<Cpu>,
}

pub(super) async fn run(process: Process, listener: TcpListener, address: String) -> Result<()> {
    let tls = common::tls(&process.config)?;
    let (config, role) = (process.config.clone(), process.role);
    let Some(loaded) = common::unless_stopped(&process.shutdown, move || load(&config, role)).await? else {
        return Ok(());
    };
    let Loaded { threads, device, model } = loaded;
    let served =
        Served { space: KeySpace::new(Fingerprint(model.fingerprint()), model.dtype()), vocab: model.spec().vocab };
    let kernel_set = device.kernel_set();
    let mut record = MemberRecord {
        id: process.id.clone(),
        role,
        addresses: vec![address],
        fingerprint: model.fingerprint(),
        dtype: model.dtype().to_string(),
        kernel_set: kernel_set.clone(),
        format: u32::from(FORMAT_VERSION),
        protocols: Protocols::OWN,
        prefix_fixed_bytes: 0,
        prefix_token_bytes: 0,
        prefix_budget_bytes: 0,
    };
    let expected = Expected {
        fingerprint: record.fingerprint,
        dtype: record.dtype.clone(),
        kernel_set: Some(process.config.model.kernel_set.clone().unwrap_or(kernel_set)),
        format: record.format,
    };
    let store_config = StoreConfig { capacity_bytes: usize::try_from(process.config.cache.bytes.as_u64())? };
    let store = Kept::new(store_config);
    let (interest, jobs) = (Interest::default(), Arc::new(AtomicUsize::new(0)));
    let section = &process.config.worker;
    let settings = WorkerConfig {
        chunk_rows: section.chunk_rows,
        concurrent: section.concurrent,
        ..WorkerConfig::named(process.id.as_str())
    };
    let mut gauges = gauges::of_store(&store);
    tokio::spawn(gauges::count_evictions(store.clone()));
    let directory = DirectoryService::server(store.clone(), PrefixState::note);
    let closed = CancellationToken::new();
    let (routes, joined, status, load) = if role == Role::ScatterWorker {
        let joined_late = Arc::new(std::sync::OnceLock::<Arc<super::admin::Joined>>::new());
        let found = joined_late.clone();
        let resolve = Arc::new(move |id: &str| {
            let peer = found.get()?.peers.as_ref()?.find(id)?;
            (peer.record().role == Role::Combiner).then(|| peer.channel())
        });
        let layout = model.layout().clone();
        let transport: Arc<dyn Transport<Cpu>> =
            Arc::new(GrpcTransport::new(GrpcConfig::default(), device.clone(), layout, served, resolve));
        let worker = Worker::start(settings, device, model, store, transport, interest);
        let worker = Arc::new(worker.context("cannot start the worker")?);
        let scatter: Arc<dyn Scatter> = Arc::new(Counted { inner: worker.clone(), jobs: jobs.clone() });
        let load: Arc<dyn Fn() -> NodeLoad + Send + Sync> =
            Arc::new(move || NodeLoad { backlog_tokens: worker.backlog_tokens(), ..NodeLoad::default() });
        let status = NodeStatus::new(record.clone(), load.clone(), closed.clone());
        let routes = Routes::new(ScatterService::server(scatter, served));
        let joined = common::join(&process, Some(record), vec![Role::Combiner], expected, tls.clone())?;
        let _ = joined_late.set(joined.clone());
        (routes, joined, status, load)
    } else {
        let exchange = Exchange::default();
        let (cpu, own) = (Cpu::with_isa(threads, device.isa()), Arc::new(exchange.clone()));
        let last = Worker::start(settings, cpu, model.clone(), store.clone(), own, interest);
        let last: Arc<dyn Scatter> = Arc::new(last.context("cannot start the last resort")?);
        let last: Arc<dyn Scatter> = Arc::new(Counted { inner: last, jobs: jobs.clone() });
        let section = &process.config.combiner;
        let settings = CombinerConfig {
            chunk_rows: section.chunk_rows,
            max_sequences: section.max_sequences,
            max_waiting: section.max_waiting,
            ..CombinerConfig::named(process.id.as_str())
        };
        gauges.extend(gauges::of_exchange(&exchange));
        let layout = model.layout().clone();
        let receiver =
            Receiver::new(GrpcConfig::default(), device.clone(), layout, served, store.clone(), exchange.clone());
        let combiner = Combiner::start(settings, device, model, store, store_config, exchange, last.clone());
        let combiner = Arc::new(combiner.context("cannot start the combiner")?);
        let (fixed, per_token, budget) = combiner.prefix_sizes();
        record.prefix_fixed_bytes = fixed as u64;
        record.prefix_token_bytes = per_token as u64;
        record.prefix_budget_bytes = budget as u64;
        gauges.extend(gauges::of_combiner(&combiner));
        let loads = combiner.clone();
        let load: Arc<dyn Fn() -> NodeLoad + Send + Sync> = Arc::new(move || {
            let load = loads.load();
            let count = |n| u32::try_from(n).unwrap_or(u32::MAX);
            NodeLoad { backlog_tokens: 0, sequences: count(load.sequences), waiting: count(load.waiting) }
        });
        let status = NodeStatus::new(record.clone(), load.clone(), closed.clone());
        let routes = Routes::new(CombineService::server(combiner, receiver, served))
            .add_service(ScatterService::server(last, served));
        let joined = common::join(&process, Some(record), Vec::new(), expected, tls.clone())?;
        (routes, joined, status, load)
    };
    let routes = routes.add_service(directory).add_service(NodeService::server(status.clone()));
    status.set_state(NodeState::Serving);
    process.readiness.loaded();
    let server = ServerConfig { connection: process.config.cluster.connection.clone() };
    let serving = tokio::spawn(serve_internal(listener, tls, routes, server, closed.clone(), HANG_UP));
    process.shutdown.cancelled().await;
    let deadline = Instant::now() + process.config.shutdown.grace;
    status.set_state(NodeState::Draining);
    joined.membership.leave().await;
    let busy = || {
        let load = load();
        jobs.load(Ordering::Acquire) > 0 || load.sequences > 0 || load.waiting > 0
    };
    while busy() && Instant::now() < deadline {
        sleep(LOOK).await;
    }
    if busy() {
        tracing::warn!("grace is over, running work is given up");
    }
    closed.cancel();
    let served = serving.await.context("the server broke off");
    drop(gauges);
    served
}

fn load(config: &Config, role: Role) -> Result<Loaded> {
    let asked = if role == Role::Combiner { config.combiner.threads } else { config.worker.threads };
    let cores = || std::thread::available_parallelism().map_or(1, |n| n.get());
    let threads = if asked == 0 { cores() } else { asked };
    let device = Cpu::new(threads);
    let checkpoint = common::source(config).checkpoint()?;
    let model = load_model(&device, &checkpoint, common::dtype(config), &|_| {})?;
    Ok(Loaded { threads, device, model })
}

/// A worker whose jobs under way are counted, deliveries included.
struct Counted<S: ?Sized> {
    jobs: Arc<AtomicUsize>,
    inner: Arc<S>,
}

/// One job of the count, given back however it ends.
struct Job(Arc<AtomicUsize>);

impl Drop for Job {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl<S: Scatter + ?Sized> Scatter for Counted<S> {
    fn id(&self) -> &str {
        self.inner.id()
    }

    fn is_running(&self) -> bool {
        self.inner.is_running()
    }

    fn holds(&self, key: EntryKey) -> bool {
        self.inner.holds(key)
    }

    fn prefill(&self, job: PrefillJob) -> BoxFuture<'static, Result<JobOutcome, JobError>> {
        self.jobs.fetch_add(1, Ordering::AcqRel);
        let (counted, work) = (Job(self.jobs.clone()), self.inner.prefill(job));
        async move {
            let _counted = counted;
            work.await
        }
        .boxed()
    }
}
