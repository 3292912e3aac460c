//! Roles that are joined by gRPC over loopback, each with a store of its own, as in a cluster; in one process, so that tests
//! can look into all of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hypic::source::ModelSource;
use hypic_cache::{Store, StoreConfig};
use hypic_combiner::{Combiner, CombinerConfig, PrefixState};
use hypic_kernels::Cpu;
use hypic_model::Model;
use hypic_router::{FaultConfig, Fleet, Router, RouterConfig, View};
use hypic_scatter_worker::{Interest, Worker, WorkerConfig};
use hypic_transport::grpc::{
    CombineService, DirectoryService, GrpcConfig, GrpcTransport, Holdings, Index, Receiver, Remote, RemoteCombine,
    RemoteScatter, ScatterService, Served, follow,
};
use hypic_transport::{Combine, CombineLoad, Exchange, Scatter, Transport};
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint, Server};

use crate::cluster::{TestStore, demo_model, key_space, served};
use crate::tap::{Held, Hold, Tap};

/// A member behind a connection, whose end tests decide.
pub struct Behind {
    id: String,
    channel: Channel,
    down: CancellationToken,
    serving: AtomicBool,
}

impl Behind {
    /// Take it for dead, as a missed sign of life would.
    pub fn kill(&self) {
        self.down.cancel();
    }

    /// It takes no more work.
    pub fn drain(&self) {
        self.serving.store(false, Ordering::SeqCst);
    }
}

impl Remote for Behind {
    fn id(&self) -> &str {
        &self.id
    }

    fn channel(&self) -> Channel {
        self.channel.clone()
    }

    fn down(&self) -> CancellationToken {
        self.down.clone()
    }

    fn is_serving(&self) -> bool {
        self.serving.load(Ordering::SeqCst)
    }

    fn load(&self) -> CombineLoad {
        CombineLoad::default()
    }

    fn prefix_sizes(&self) -> (usize, usize, usize) {
        (1 << 16, 1 << 10, 64 << 20)
    }
}

/// A role, and what it keeps.
pub struct Node {
    /// Its end of the connection, as the router has it.
    pub behind: Arc<Behind>,
    /// What the router believes that it holds.
    pub holdings: Arc<Holdings>,
    /// What it holds.
    pub store: TestStore,
    /// A combiner's transfers.
    pub exchange: Exchange<Cpu>,
}

/// A router in front of roles that are reached by gRPC.
pub struct Remotes {
    /// What requests go to.
    pub router: Router,
    /// The scatter workers.
    pub workers: Vec<Node>,
    /// The combiners.
    pub combiners: Vec<Node>,
    /// What stands in front of each combiner for the workers.
    pub taps: Vec<Tap>,
    /// The model.
    pub model: Model<Cpu>,
}

/// Settings of a router that takes nobody for slow or late: what fails is tried again, and nothing else.
pub fn patient() -> RouterConfig {
    let long = Duration::from_secs(3600);
    let faults = FaultConfig { hedge: false, late_floor: long, late_floor_unmeasured: long, ..FaultConfig::default() };
    RouterConfig { faults, ..RouterConfig::default() }
}

/// What roles are started with.
#[derive(Clone)]
pub struct RemoteSetup {
    /// Scatter workers.
    pub workers: usize,
    /// Combiners.
    pub combiners: usize,
    /// Settings of the router.
    pub router: RouterConfig,
    /// Rows of a worker's pass at most.
    pub worker_rows: usize,
    /// Settings of the workers' transport.
    pub sender: GrpcConfig,
    /// Where the workers are held; open: nowhere.
    pub hold: Arc<Hold>,
}

impl Default for RemoteSetup {
    fn default() -> Self {
        let hold = Arc::new(Hold::default());
        hold.open();
        RemoteSetup {
            workers: 2,
            combiners: 1,
            router: RouterConfig::default(),
            worker_rows: 1024,
            sender: GrpcConfig { chunk_bytes: 4096, ..GrpcConfig::default() },
            hold,
        }
    }
}

const CACHE: usize = 256 << 20;

impl Remotes {
    /// So many of each role, of the demo model in float32.
    pub async fn start(workers: usize, combiners: usize, router: RouterConfig) -> Self {
        Self::with(RemoteSetup { workers, combiners, router, ..RemoteSetup::default() }).await
    }

    /// Roles of the demo model in float32.
    pub async fn with(setup: RemoteSetup) -> Self {
        let model = demo_model(&Cpu::new(1));
        let mut view = View { scatter: Vec::new(), combiners: Vec::new() };
        let mut combiner_nodes = Vec::new();
        let (mut taps, mut known) = (Vec::new(), Vec::new());
        for i in 0..setup.combiners {
            let node = combiner(format!("combiner-{i}"), &model).await;
            view.combiners.push(Arc::new(RemoteCombine::new(node.behind.clone(), node.holdings.clone())));
            let (tap, channel) = Tap::start(node.behind.channel.clone()).await;
            known.push((node.behind.id.clone(), channel));
            taps.push(tap);
            combiner_nodes.push(node);
        }
        let mut worker_nodes = Vec::new();
        for i in 0..setup.workers {
            let node = worker(format!("worker-{i}"), &model, known.clone(), &setup).await;
            view.scatter.push(Arc::new(RemoteScatter::new(node.behind.clone(), node.holdings.clone())));
            worker_nodes.push(node);
        }
        let text = ModelSource::Demo.text().expect("a good tokenizer");
        let router = Router::new(setup.router, served(&model), text, Arc::new(Fleet::new(view)));
        Remotes { router, workers: worker_nodes, combiners: combiner_nodes, taps, model }
    }

    /// Another router in front of the same roles, which looks up what they hold in one index, as a router process does;
    /// and that index, filled.
    pub async fn second_router(&self, config: RouterConfig) -> (Router, Arc<Index>) {
        let fleet = Arc::new(Fleet::new(View::default()));
        let mut view = View::default();
        let mut copies = Vec::new();
        for (i, node) in self.workers.iter().chain(&self.combiners).enumerate() {
            let holdings = fleet.index().member(&node.behind.id);
            let (remote, pause) = (node.behind.clone(), Duration::from_millis(20));
            tokio::spawn(follow(remote.clone(), "second-router".to_string(), holdings.clone(), pause));
            copies.push((holdings.clone(), node.store.clone()));
            if i < self.workers.len() {
                view.scatter.push(Arc::new(RemoteScatter::new(remote, holdings)));
            } else {
                view.combiners.push(Arc::new(RemoteCombine::new(remote, holdings)));
            }
        }
        fleet.set(view);
        let patience = tokio::time::Instant::now() + Duration::from_secs(20);
        while copies.iter().any(|(holdings, store)| holdings.entries() != store.stats().entries) {
            assert!(tokio::time::Instant::now() < patience, "the directory does not follow");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let text = ModelSource::Demo.text().expect("a good tokenizer");
        let index = fleet.index().clone();
        (Router::new(config, served(&self.model), text, fleet), index)
    }

    /// Waits until the router's copies of what members hold are true.
    pub async fn directory_settled(&self) {
        let nodes = || self.workers.iter().chain(&self.combiners);
        let patience = tokio::time::Instant::now() + Duration::from_secs(20);
        while nodes().any(|n| n.holdings.entries() != n.store.stats().entries) {
            assert!(tokio::time::Instant::now() < patience, "the directory does not follow");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Fails unless everything that requests held is given back soon.
    pub async fn settle(&self) {
        let nodes = || self.workers.iter().chain(&self.combiners);
        let patience = tokio::time::Instant::now() + Duration::from_secs(20);
        loop {
            let at_rest = nodes().all(|n| {
                let stats = n.store.stats();
                stats.pinned == 0 && stats.flights == 0 && n.exchange.open_transfers() == 0
            });
            if at_rest {
                return;
            }
            let stats: Vec<_> = nodes().map(|n| (n.exchange.open_transfers(), n.store.stats())).collect();
            assert!(tokio::time::Instant::now() < patience, "not at rest: {stats:?}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

fn grpc_served(model: &Model<Cpu>) -> Served {
    Served { space: key_space(model), vocab: model.spec().vocab }
}

async fn worker(id: String, model: &Model<Cpu>, known: Vec<(String, Channel)>, setup: &RemoteSetup) -> Node {
    let store: TestStore = Store::new(StoreConfig { capacity_bytes: CACHE });
    let resolve = move |id: &str| known.iter().find(|(known, _)| known == id).map(|(_, channel)| channel.clone());
    let served = grpc_served(model);
    let inner = GrpcTransport::new(setup.sender, Cpu::new(1), model.layout().clone(), served, Arc::new(resolve));
    let transport: Arc<dyn Transport<Cpu>> = Arc::new(Held { inner, hold: setup.hold.clone() });
    let settings = WorkerConfig { chunk_rows: setup.worker_rows, ..WorkerConfig::named(id.clone()) };
    let worker = Worker::start(settings, Cpu::new(1), model.clone(), store.clone(), transport, Interest::default());
    let scatter: Arc<dyn Scatter> = Arc::new(worker.expect("a thread"));
    let server = Server::builder()
        .add_service(ScatterService::server(scatter, served))
        .add_service(DirectoryService::server(store.clone(), PrefixState::note));
    serve(id, server, store, Exchange::default()).await
}

async fn combiner(id: String, model: &Model<Cpu>) -> Node {
    let store_config = StoreConfig { capacity_bytes: CACHE };
    let store: TestStore = Store::new(store_config);
    let (exchange, served) = (Exchange::default(), grpc_served(model));
    let transport: Arc<dyn Transport<Cpu>> = Arc::new(exchange.clone());
    let settings = WorkerConfig::named(id.clone());
    let own = Worker::start(settings, Cpu::new(1), model.clone(), store.clone(), transport, Interest::default());
    let own: Arc<dyn Scatter> = Arc::new(own.expect("a thread"));
    let (kept, arrivals) = (store.clone(), exchange.clone());
    let config = CombinerConfig::named(id.clone());
    let combiner = Combiner::start(config, Cpu::new(1), model.clone(), kept, store_config, arrivals, own.clone());
    let combine: Arc<dyn Combine> = Arc::new(combiner.expect("a thread"));
    let (kept, arrivals) = (store.clone(), exchange.clone());
    let receiver = Receiver::new(GrpcConfig::default(), Cpu::new(1), model.layout().clone(), served, kept, arrivals);
    let server = Server::builder()
        .add_service(ScatterService::server(own, served))
        .add_service(CombineService::server(combine, receiver, served))
        .add_service(DirectoryService::server(store.clone(), PrefixState::note));
    serve(id, server, store, exchange).await
}

async fn serve(
    id: String,
    server: tonic::transport::server::Router,
    store: TestStore,
    exchange: Exchange<Cpu>,
) -> Node {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    let channel = Endpoint::from_shared(format!("http://{address}")).expect("a good address").connect_lazy();
    let (down, serving) = (CancellationToken::new(), AtomicBool::new(true));
    let behind = Arc::new(Behind { id, channel, down, serving });
    let holdings = Arc::new(Holdings::default());
    tokio::spawn(follow(behind.clone(), "router".to_string(), holdings.clone(), Duration::from_millis(20)));
    Node { behind, holdings, store, exchange }
}
