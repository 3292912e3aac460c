//! All roles in this process, joined by hand, so that tests can put something else in a worker's place and look into
//! what a user never sees.

use std::sync::Arc;
use std::time::Duration;

use hypic::source::ModelSource;
use hypic_cache::{EntryKey, Fingerprint, KeySpace, Stats, Store, StoreConfig};
use hypic_combiner::{Combiner, CombinerConfig, CombinerLoad, PrefixState};
use hypic_kernels::{Backend, Cpu, part_to_host};
use hypic_model::{LoadOptions, Model};
use hypic_router::{Fleet, ModelCard, Router, RouterConfig, Sampling, Served, View};
use hypic_scatter_worker::{Interest, Worker, WorkerConfig};
use hypic_state::codec::encode;
use hypic_state::{DType, Entry};
use hypic_transport::{Combine, Exchange, Scatter, Transport};
use tokio::time::Instant;

/// Longest time that roles may take to give back what a request held.
const SETTLING: Duration = Duration::from_secs(20);

/// The store that all roles of a cluster share.
pub type TestStore = Store<Cpu, PrefixState<Cpu>>;

/// What a cluster is made of.
#[derive(Clone)]
pub struct Setup {
    /// Scatter workers.
    pub workers: usize,
    /// Threads of each worker.
    pub worker_threads: usize,
    /// Bytes of entries and prefix states.
    pub cache_bytes: usize,
    /// Settings of the combiner.
    pub combiner: CombinerConfig,
    /// Settings of the router.
    pub router: RouterConfig,
    /// Rows of a worker's pass at most.
    pub worker_rows: usize,
}

impl Default for Setup {
    fn default() -> Self {
        Setup {
            workers: 2,
            worker_threads: 1,
            cache_bytes: 256 << 20,
            combiner: CombinerConfig::named("combiner"),
            router: RouterConfig::default(),
            worker_rows: 512,
        }
    }
}

/// Roles of the demo model in float32.
pub struct Cluster {
    /// What requests go to.
    pub router: Router,
    /// The combiner.
    pub combiner: Arc<Combiner<Cpu>>,
    /// Entries and prefix states.
    pub store: TestStore,
    /// The transfers.
    pub exchange: Exchange<Cpu>,
    /// The model.
    pub model: Model<Cpu>,
    backend: Cpu,
}

impl Cluster {
    /// Workers as they are.
    pub fn start(setup: Setup) -> Self {
        Self::with_doubles(setup, |_, worker, _| worker)
    }

    /// `double` may put something in each worker's place: it is given the worker's index, the worker, and the exchange.
    pub fn with_doubles(
        setup: Setup,
        mut double: impl FnMut(usize, Arc<dyn Scatter>, &Exchange<Cpu>) -> Arc<dyn Scatter>,
    ) -> Self {
        let backend = Cpu::new(2);
        let model = demo_model(&backend);
        let store_config = StoreConfig { capacity_bytes: setup.cache_bytes };
        let store = TestStore::new(store_config);
        let (exchange, interest) = (Exchange::default(), Interest::default());
        let transport: Arc<dyn Transport<Cpu>> = Arc::new(exchange.clone());
        let own = Worker::start(
            WorkerConfig::named(setup.combiner.id.clone()),
            Cpu::new(setup.worker_threads),
            model.clone(),
            store.clone(),
            transport.clone(),
            interest.clone(),
        );
        let last_resort: Arc<dyn Scatter> = Arc::new(own.expect("a thread"));
        let mut scatter: Vec<Arc<dyn Scatter>> = Vec::with_capacity(setup.workers);
        for i in 0..setup.workers {
            let mut config = WorkerConfig::named(format!("worker-{i}"));
            config.chunk_rows = setup.worker_rows;
            let cpu = Cpu::new(setup.worker_threads);
            let worker = Worker::start(config, cpu, model.clone(), store.clone(), transport.clone(), interest.clone());
            scatter.push(double(i, Arc::new(worker.expect("a thread")), &exchange));
        }
        let (cpu, config) = (backend.clone(), setup.combiner);
        let (kept, arrivals) = (store.clone(), exchange.clone());
        let combiner = Combiner::start(config, cpu, model.clone(), kept, store_config, arrivals, last_resort);
        let combiner = Arc::new(combiner.expect("a thread"));
        let text = ModelSource::Demo.text().expect("a good tokenizer");
        let combiners: Vec<Arc<dyn Combine>> = vec![combiner.clone()];
        let fleet = Arc::new(Fleet::new(View { scatter, combiners }));
        let router = Router::new(setup.router, served(&model), text, fleet);
        Cluster { router, combiner, store, exchange, model, backend }
    }

    /// What the combiner has to do.
    pub fn load(&self) -> CombinerLoad {
        self.combiner.load()
    }

    /// What the store holds.
    pub fn stats(&self) -> Stats {
        self.store.stats()
    }

    /// Fails unless everything that requests held is given back soon.
    pub async fn settle(&self) {
        let patience = Instant::now() + SETTLING;
        let at_rest = || {
            let stats = self.stats();
            let transfers = self.exchange.open_transfers();
            let idle = self.load() == CombinerLoad::default() && transfers == 0;
            (idle && stats.pinned == 0 && stats.flights == 0, transfers, stats)
        };
        while !at_rest().0 {
            let (_, transfers, stats) = at_rest();
            let late = Instant::now() >= patience;
            assert!(!late, "not at rest: {:?}, {transfers} transfers, {stats:?}", self.load());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let stats = self.stats();
        assert!(stats.bytes <= stats.capacity, "{stats:?}");
        assert_eq!(stats.bytes, stats.entry_bytes + stats.prefix_bytes, "{stats:?}");
        assert_eq!(stats.pinned_bytes, 0, "{stats:?}");
    }

    /// Bytes of the entry of `tokens`, if it is kept.
    pub fn entry(&self, tokens: &[u32], seam: usize, anchor: &[u32]) -> Option<Vec<u8>> {
        let key = EntryKey::new(&key_space(&self.model), seam, anchor, b"", tokens);
        let entry = self.store.get(key, &tokens.into())?;
        Some(entry_bytes(&self.backend, &entry))
    }
}

/// The demo model in float32.
pub fn demo_model(backend: &Cpu) -> Model<Cpu> {
    let checkpoint = ModelSource::Demo.checkpoint().expect("a good checkpoint");
    let options = LoadOptions { dtype: DType::F32, progress: &|_| {} };
    Model::load(backend, &checkpoint, options).expect("a model that loads")
}

/// What all keys of entries of `model` have in common.
pub fn key_space(model: &Model<Cpu>) -> KeySpace {
    KeySpace::new(Fingerprint(model.fingerprint()), model.dtype())
}

/// What a router is told of the model.
pub fn served(model: &Model<Cpu>) -> Served {
    let context = u32::try_from(model.spec().max_positions).expect("a sane context");
    Served {
        card: ModelCard { id: "demo".to_string(), created: 0, context },
        space: key_space(model),
        vocab: model.spec().vocab,
        reusable: model.spec().reusable(),
        compose: model.default_compose(),
        eos: model.spec().eos.clone().into(),
        sampling: Sampling::default(),
    }
}

/// All parts of an entry in the form in which they travel, which has a checksum of each.
pub fn entry_bytes<B: Backend>(backend: &B, entry: &Entry<B>) -> Vec<u8> {
    entry.parts().iter().flat_map(|part| encode(&part_to_host(backend, part)).to_vec()).collect()
}
