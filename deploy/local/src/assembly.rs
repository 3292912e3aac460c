//! Router, scatter workers and combiner, joined in one process.

use std::sync::Arc;

use anyhow::{Context, Result, bail};
use hypic_cache::{Stats, Store, StoreConfig};
use hypic_combiner::{Combiner, CombinerConfig, CombinerLoad, PrefixState};
use hypic_kernels::{Backend, Cpu};
use hypic_model::{Checkpoint, Model};
use hypic_router::{Fleet, Router, RouterConfig, View};
use hypic_scatter_worker::{Interest, Worker, WorkerConfig};
use hypic_text::TextPipeline;
use hypic_transport::{Combine, Exchange, Scatter, Transport};

use crate::dtype::ComputeDType;
use crate::served::{check_tokenizer, load_model, served};

/// Settings of a process with all roles.
#[derive(Clone, Debug)]
pub struct LocalConfig {
    /// Name under which the model is served.
    pub name: String,
    /// Dtype in which it is computed.
    pub dtype: ComputeDType,
    /// Scatter workers.
    pub workers: usize,
    /// Threads of the combiner; the workers share as many.
    pub threads: usize,
    /// Bytes of entries and prefix states.
    pub cache_bytes: usize,
    /// Settings of the router.
    pub router: RouterConfig,
}

impl LocalConfig {
    /// The defaults on this machine.
    pub fn named(name: impl Into<String>) -> Self {
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
        LocalConfig {
            name: name.into(),
            dtype: ComputeDType::Auto,
            workers: threads.min(4),
            threads,
            cache_bytes: StoreConfig::default().capacity_bytes,
            router: RouterConfig::default(),
        }
    }
}

/// All roles, running. Dropping it stops them.
pub struct Local {
    // Dropped first: nothing new reaches the roles.
    router: Arc<Router>,
    combiner: Arc<Combiner<Cpu>>,
    store: Store<Cpu, PrefixState<Cpu>>,
    exchange: Exchange<Cpu>,
    model: Model<Cpu>,
    kernel_set: String,
}

impl Local {
    /// Load the model and start the roles. `progress` is told the name of each tensor that has been read.
    ///
    /// # Errors
    /// If the model cannot be loaded, or the system gives no threads.
    pub fn start(
        config: LocalConfig,
        checkpoint: &Checkpoint,
        text: Option<Arc<TextPipeline>>,
        progress: &dyn Fn(&str),
    ) -> Result<Self> {
        if config.workers == 0 {
            bail!("--workers 0: at least one scatter worker is needed");
        }
        let device = Cpu::new(config.threads);
        let model = load_model(&device, checkpoint, config.dtype, progress)?;
        check_tokenizer(text.as_deref(), model.spec())?;
        let store_config = StoreConfig { capacity_bytes: config.cache_bytes };
        let store: Store<Cpu, PrefixState<Cpu>> = Store::new(store_config);
        let exchange = Exchange::default();
        let interest = Interest::default();
        let transport: Arc<dyn Transport<Cpu>> = Arc::new(exchange.clone());
        let threads = (config.threads / config.workers).max(1);
        let mut scatter: Vec<Arc<dyn Scatter>> = Vec::with_capacity(config.workers);
        for i in 0..config.workers {
            let settings = WorkerConfig::named(format!("worker-{i}"));
            let (backend, model) = (Cpu::with_isa(threads, device.isa()), model.clone());
            let worker = Worker::start(settings, backend, model, store.clone(), transport.clone(), interest.clone());
            scatter.push(Arc::new(worker.context("cannot start a scatter worker")?));
        }
        let settings = CombinerConfig::named("combiner-0");
        let kernel_set = device.kernel_set();
        // In one process a worker is as good a last resort as any.
        let last_resort = scatter[0].clone();
        let (shared, arrivals) = (store.clone(), exchange.clone());
        let combiner = Combiner::start(settings, device, model.clone(), shared, store_config, arrivals, last_resort);
        let combiner = Arc::new(combiner.context("cannot start the combiner")?);
        let served = served(config.name, model.spec(), model.fingerprint(), model.dtype(), checkpoint)?;
        let combiners: Vec<Arc<dyn Combine>> = vec![combiner.clone()];
        let fleet = Arc::new(Fleet::new(View { scatter, combiners }));
        let router = Arc::new(Router::new(config.router, served, text, fleet));
        Ok(Local { router, combiner, store, exchange, model, kernel_set })
    }

    /// What answers requests.
    pub fn router(&self) -> &Arc<Router> {
        &self.router
    }

    /// The model.
    pub fn model(&self) -> &Model<Cpu> {
        &self.model
    }

    /// Name of the kernels in use.
    pub fn kernel_set(&self) -> &str {
        &self.kernel_set
    }

    /// What the cache holds.
    pub fn cache(&self) -> Stats {
        self.store.stats()
    }

    /// The entries and prefix states.
    pub fn store(&self) -> &Store<Cpu, PrefixState<Cpu>> {
        &self.store
    }

    /// What the combiner has to do.
    pub fn load(&self) -> CombinerLoad {
        self.combiner.load()
    }

    /// Transfers that are open.
    pub fn open_transfers(&self) -> usize {
        self.exchange.open_transfers()
    }
}
