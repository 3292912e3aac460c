//! Scatter worker and combiner as processes: the roles that hold a model. Owns their life: they answer who they are
//! while they load, then serve over the same connections, and in the end finish what they were given while they still
//! show signs of life; only then their connections end. A model that cannot be loaded ends the process with the reason.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::{Context, Result};
use hypic_cache::{Fingerprint, KeySpace, Store, StoreConfig};
use hypic_cluster::{Expected, MemberRecord, NodeLoad, NodeState, NodeStatus, Role, ServerConfig, Tls, serve_internal};
use hypic_combiner::PrefixState;
use hypic_kernels::{Backend, Cpu};
use hypic_model::Model;
use hypic_scatter_worker::WorkerConfig;
use hypic_state::codec::FORMAT_VERSION;
use hypic_telemetry::Observation;
use hypic_transport::grpc::{DirectoryService, Served};
use tokio::net::TcpListener;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

use super::admin::Joined;
use super::late::Late;
use super::{Process, combiner, common, gauges, worker};
use crate::config::Config;
use crate::served::load_model;

/// Between two looks at whether the work is done.
const LOOK: Duration = Duration::from_millis(20);
/// Time for callers to hang up once the work is done.
const HANG_UP: Duration = Duration::from_millis(500);

pub(super) type Kept = Store<Cpu, PrefixState<Cpu>>;
pub(super) type Load = Arc<dyn Fn() -> NodeLoad + Send + Sync>;

/// A device with a model on it, and what is kept beside it.
pub(super) struct Loaded {
    pub threads: usize,
    pub device: Cpu,
    pub model: Model<Cpu>,
    pub served: Served,
    pub store: Kept,
    pub store_config: StoreConfig,
}

/// What a role adds when it begins to serve.
pub(super) struct Begun {
    pub routes: Routes,
    /// With all that is known now.
    pub record: MemberRecord,
    pub load: Load,
    pub gauges: Vec<Observation>,
}

pub(super) async fn run(process: Process, listener: TcpListener, address: String) -> Result<()> {
    let tls = common::tls(&process.config)?;
    let record = MemberRecord::loading(process.id.clone(), process.role, vec![address], u32::from(FORMAT_VERSION));
    let load: Arc<OnceLock<Load>> = Arc::default();
    let asked = load.clone();
    let told: Load = Arc::new(move || asked.get().map(|load| load()).unwrap_or_default());
    let (closed, late) = (CancellationToken::new(), Late::default());
    let status = NodeStatus::new(record.clone(), told.clone(), closed.clone());
    let server = ServerConfig { connection: process.config.cluster.connection.clone() };
    let routes = late.routes(status.clone());
    let serving = tokio::spawn(serve_internal(listener, tls.clone(), routes, server, closed.clone(), HANG_UP));
    let joined = common::join(&process, Some(record.clone()))?;

    let begun = begin(&process, &joined, record, tls).await;
    let gauges = match begun {
        Ok(Some(begun)) => {
            _ = load.set(begun.load);
            late.serve(begun.routes);
            joined.membership.update(begun.record.clone());
            // Ready before anybody is told so and may look.
            process.readiness.loaded();
            status.loaded(begun.record);
            let gauges = (begun.gauges, gauges::of_calls(late.calls()));
            process.shutdown.cancelled().await;
            Ok(Some(gauges))
        }
        Ok(None) => Ok(None),
        Err(error) => Err(error),
    };

    status.set_state(NodeState::Draining);
    let busy = || late.calls().count() > 0 || told().sequences > 0 || told().waiting > 0;
    // Running work goes on meanwhile; work that came before all had heard counts too, so leaving comes first.
    let finished = async {
        joined.membership.leave().await;
        while busy() {
            sleep(LOOK).await;
        }
    };
    if timeout(process.config.shutdown.grace, finished).await.is_err() && busy() {
        tracing::warn!("grace is over, running work is given up");
    }
    closed.cancel();
    serving.await.context("the server broke off")?;
    gauges.map(drop)
}

/// Load the model and start the role; `None` if it is stopped before.
async fn begin(
    process: &Process,
    joined: &Arc<Joined>,
    mut record: MemberRecord,
    tls: Option<Tls>,
) -> Result<Option<Begun>> {
    let (config, role) = (process.config.clone(), process.role);
    let Some(loaded) = common::unless_stopped(&process.shutdown, move || load(&config, role)).await? else {
        return Ok(None);
    };
    let (fingerprint, model) = (loaded.model.fingerprint(), &loaded.model);
    record.fingerprint = Some(fingerprint);
    record.dtype = model.dtype().to_string();
    record.kernel_set = loaded.device.kernel_set();
    let (store, directory) = (loaded.store.clone(), DirectoryService::server(loaded.store.clone(), PrefixState::note));
    let mut begun = if role == Role::ScatterWorker {
        let expected = Expected {
            fingerprint,
            dtype: record.dtype.clone(),
            kernel_set: Some(process.config.model.kernel_set.clone().unwrap_or_else(|| record.kernel_set.clone())),
            format: record.format,
        };
        let peers = common::dial(process, joined, vec![Role::Combiner], expected, tls);
        let mismatches = gauges::of_mismatches(peers.mismatches());
        let mut begun = worker::begin(process, joined, record, loaded)?;
        begun.gauges.extend(mismatches);
        begun
    } else {
        combiner::begin(process, record, loaded)?
    };
    begun.routes = begun.routes.add_service(directory);
    begun.gauges.extend(gauges::of_store(&store));
    Ok(Some(begun))
}

/// Settings of the worker in a process: a worker itself, or a combiner's last resort.
pub(super) fn worker_config(process: &Process) -> WorkerConfig {
    let section = &process.config.worker;
    WorkerConfig {
        chunk_rows: section.chunk_rows,
        concurrent: section.concurrent,
        ..WorkerConfig::named(process.id.as_str())
    }
}

fn load(config: &Config, role: Role) -> Result<Loaded> {
    let asked = if role == Role::Combiner { config.combiner.threads } else { config.worker.threads };
    let cores = || std::thread::available_parallelism().map_or(1, |n| n.get());
    let threads = if asked == 0 { cores() } else { asked };
    let device = Cpu::new(threads);
    let checkpoint = common::source(config).checkpoint()?;
    let model = load_model(&device, &checkpoint, config.model.dtype, &|_| {})?;
    let space = KeySpace::new(Fingerprint(model.fingerprint()), model.dtype());
    let served = Served { space, vocab: model.spec().vocab };
    let store_config = StoreConfig { capacity_bytes: usize::try_from(config.cache.bytes.as_u64())? };
    Ok(Loaded { threads, device, model, served, store: Kept::new(store_config), store_config })
}
