//! The settings of a role. Owns their names, defaults and layers: a TOML file, then the environment, then flags. A key
//! that is unknown or a value of the wrong kind is refused, with the layer that it came from; nothing is guessed.

mod layers;
mod limits;
#[cfg(test)]
mod tests;
mod text;
mod transfer;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail};
use bytesize::ByteSize;
use hypic_cluster::{ConnectionConfig, EtcdConfig, PeersConfig, Role, TlsConfig, parse_static};
use hypic_router::{Anchor, FaultConfig, FrontLimits, PlanCosts, ReplicateConfig, RouterConfig};
use hypic_telemetry::TelemetryConfig;
use serde::{Deserialize, Serialize};

use crate::dtype::ComputeDType;
pub use layers::{ENV_PREFIX, Layers};
pub use transfer::TransferSection;

/// All settings of a role. One file may serve all roles; each reads what concerns it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The model.
    pub model: ModelConfig,
    /// Where it listens.
    pub listen: ListenConfig,
    /// How others find it, and it them.
    pub cluster: ClusterConfig,
    /// What secures connections between roles.
    pub tls: SecurityConfig,
    /// Of a router.
    pub router: RouterSection,
    /// Of a router: what clients may take up.
    pub front: FrontLimits,
    /// Of a worker or combiner: how entries travel.
    pub transfer: TransferSection,
    /// Of a scatter worker.
    pub worker: WorkerSection,
    /// Of a combiner.
    pub combiner: CombinerSection,
    /// Entries and prefix states that a worker or combiner keeps.
    pub cache: CacheConfig,
    /// Logs, traces and metrics.
    pub telemetry: TelemetryConfig,
    /// The end of the process.
    pub shutdown: ShutdownConfig,
}

/// The model.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ModelConfig {
    /// Hugging Face checkpoint directory; none: the demo model in the program. A router reads the tokenizer, and the
    /// weights only for their fingerprint.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dir: Option<PathBuf>,
    /// Name under which it is served; none: the directory's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Compute dtype: `auto`, `f32` or `bf16`. The same in all roles.
    #[serde(with = "text")]
    pub dtype: ComputeDType,
    /// Of a router: the fingerprint that members must have, 64 hex digits; none: that of the weights in the directory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<String>,
    /// The kernel set that members must have; none: a router takes any, other roles take their own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernel_set: Option<String>,
}

impl Default for ModelConfig {
    fn default() -> Self {
        ModelConfig { dir: None, name: None, dtype: ComputeDType::Auto, fingerprint: None, kernel_set: None }
    }
}

/// Where a role listens; port 0 takes a free one.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ListenConfig {
    /// Of a router: HTTP for clients.
    pub http: SocketAddr,
    /// Of a router: gRPC for clients.
    pub grpc: SocketAddr,
    /// Of a worker or combiner: internal services.
    pub internal: SocketAddr,
    /// /metrics, /health, /ready and /members.
    pub metrics: SocketAddr,
    /// HOST:PORT at which others reach the internal services; none: the address that is listened on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advertise: Option<String>,
}

impl Default for ListenConfig {
    fn default() -> Self {
        ListenConfig {
            http: loopback(8080),
            grpc: loopback(50051),
            internal: loopback(50061),
            metrics: loopback(9090),
            advertise: None,
        }
    }
}

fn loopback(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}

/// How members find each other: etcd if it has endpoints, else the static list.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ClusterConfig {
    /// Members as `ROLE=HOST:PORT`, such as `combiner=10.0.0.7:50071`.
    pub members: Vec<String>,
    /// etcd.
    pub etcd: EtcdConfig,
    /// Signs of life and new attempts.
    pub peers: PeersConfig,
    /// HTTP/2 between members.
    pub connection: ConnectionConfig,
}

/// What secures connections between roles.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SecurityConfig {
    /// Permit internal services without TLS, and etcd's credentials in plain text, beyond loopback.
    pub insecure: bool,
    /// Files for mutual TLS; none: plain text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub files: Option<TlsConfig>,
}

/// Settings of a router.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RouterSection {
    /// Leading tokens of each segment that are recomputed behind the true prefix.
    pub seam: usize,
    /// What stands before a segment in its isolated prefill: `none`, `turn` or `system`.
    #[serde(with = "text")]
    pub anchor: Anchor,
    /// File with API keys, one a line; none: everybody may ask.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api_key_file: Option<PathBuf>,
    /// Memory for the token ids of texts that were encoded before.
    pub memo: ByteSize,
    /// Share of the cache that the states of one prompt's earlier boundaries may take, 0 to 1.
    pub boundary_share: f64,
    /// Events that a slow client may lag behind.
    pub event_buffer: usize,
    /// What work is reckoned to cost until it was measured.
    pub costs: PlanCosts,
    /// What is done about failures.
    pub faults: FaultConfig,
    /// When hot entries get more holders.
    pub replicate: ReplicateConfig,
}

impl Default for RouterSection {
    fn default() -> Self {
        let RouterConfig { seam, anchor, boundary_share, memo_bytes, event_buffer, costs, faults, replicate } =
            RouterConfig::default();
        let memo = ByteSize::b(memo_bytes as u64);
        let api_key_file = None;
        RouterSection { seam, anchor, api_key_file, memo, boundary_share, event_buffer, costs, faults, replicate }
    }
}

impl RouterSection {
    /// What the router takes.
    pub fn config(&self) -> RouterConfig {
        RouterConfig {
            seam: self.seam,
            anchor: self.anchor,
            boundary_share: self.boundary_share,
            memo_bytes: usize::try_from(self.memo.as_u64()).unwrap_or(usize::MAX),
            event_buffer: self.event_buffer,
            costs: self.costs.clone(),
            faults: self.faults.clone(),
            replicate: self.replicate.clone(),
        }
    }

    fn check(&self) -> Result<()> {
        if !(0.0..=1.0).contains(&self.boundary_share) {
            bail!("router.boundary_share is {}: it is a share, 0 to 1", self.boundary_share);
        }
        let (faults, costs, replicate) = (&self.faults, &self.costs, &self.replicate);
        for (name, value) in [
            ("router.event_buffer", self.event_buffer),
            ("router.faults.attempts", faults.attempts),
            ("router.faults.breaker_failures", faults.breaker_failures as usize),
            ("router.replicate.uses", replicate.uses as usize),
            ("router.costs.bytes_per_second", usize::try_from(costs.bytes_per_second).unwrap_or(usize::MAX)),
        ] {
            if value == 0 {
                bail!("{name} is 0: it must be at least 1");
            }
        }
        for (name, value) in [
            ("router.faults.late_factor", faults.late_factor),
            ("router.faults.hedge_factor", faults.hedge_factor),
            ("router.faults.budget_burst", faults.budget_burst),
            ("router.faults.budget_per_segment", faults.budget_per_segment),
        ] {
            if !value.is_finite() || value < 0.0 {
                bail!("{name} is {value}: it must be a number, at least 0");
            }
        }
        Ok(())
    }
}

/// Settings of a scatter worker.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WorkerSection {
    /// Threads; 0: all cores.
    pub threads: usize,
    /// Rows of a pass at most.
    pub chunk_rows: usize,
    /// Prefills under way at a time.
    pub concurrent: usize,
}

impl Default for WorkerSection {
    fn default() -> Self {
        let worker = hypic_scatter_worker::WorkerConfig::named("");
        WorkerSection { threads: 0, chunk_rows: worker.chunk_rows, concurrent: worker.concurrent }
    }
}

/// Settings of a combiner.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CombinerSection {
    /// Threads; 0: all cores.
    pub threads: usize,
    /// Rows of a prompt's pass at most.
    pub chunk_rows: usize,
    /// Answers under way at a time, prompts included.
    pub max_sequences: usize,
    /// Requests that may wait for a place; more are refused.
    pub max_waiting: usize,
}

impl Default for CombinerSection {
    fn default() -> Self {
        let combiner = hypic_combiner::CombinerConfig::named("");
        CombinerSection {
            threads: 0,
            chunk_rows: combiner.chunk_rows,
            max_sequences: combiner.max_sequences,
            max_waiting: combiner.max_waiting,
        }
    }
}

/// Entries and prefix states that a worker or combiner keeps.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CacheConfig {
    /// Memory for them, such as `1GiB`.
    pub bytes: ByteSize,
}

impl Default for CacheConfig {
    fn default() -> Self {
        CacheConfig { bytes: ByteSize::b(hypic_cache::StoreConfig::default().capacity_bytes as u64) }
    }
}

/// The end of the process.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ShutdownConfig {
    /// Time for running work to finish after SIGTERM.
    #[serde(with = "humantime_serde")]
    pub grace: Duration,
}

impl Default for ShutdownConfig {
    fn default() -> Self {
        ShutdownConfig { grace: Duration::from_secs(30) }
    }
}

impl Config {
    /// The defaults of a role: its ports differ from those of the other roles, so that one of each fits on a machine.
    pub fn of(role: Role) -> Self {
        let mut config = Config::default();
        let (internal, metrics) = match role {
            Role::Router => (50061, 9090),
            Role::ScatterWorker => (50061, 9091),
            Role::Combiner => (50071, 9092),
        };
        (config.listen.internal, config.listen.metrics) = (loopback(internal), loopback(metrics));
        config
    }

    /// What no single value shows.
    ///
    /// # Errors
    /// If settings contradict each other, or one cannot work.
    pub fn check(&self, role: Role) -> Result<()> {
        parse_static(&self.cluster.members)?;
        if !self.cluster.members.is_empty() && !self.cluster.etcd.endpoints.is_empty() {
            bail!("cluster.members and cluster.etcd.endpoints are both given: use a static list or etcd");
        }
        if let Some(endpoint) = self.cluster.etcd.exposed_to().filter(|_| !self.tls.insecure) {
            bail!(
                "cluster.etcd.credentials are sent unencrypted to {endpoint}: use a loopback endpoint, or --insecure"
            );
        }
        self.fingerprint()?;
        self.router.check()?;
        self.transfer.check()?;
        limits::check(self)?;
        for (name, value) in [
            ("worker.chunk_rows", self.worker.chunk_rows),
            ("worker.concurrent", self.worker.concurrent),
            ("combiner.chunk_rows", self.combiner.chunk_rows),
            ("combiner.max_sequences", self.combiner.max_sequences),
        ] {
            if value == 0 {
                bail!("{name} is 0: it must be at least 1");
            }
        }
        if role == Role::Router && self.cluster.members.is_empty() && self.cluster.etcd.endpoints.is_empty() {
            bail!("a router needs members: give --members combiner=HOST:PORT,... or --etcd HOST:PORT");
        }
        Ok(())
    }

    /// The configured fingerprint.
    ///
    /// # Errors
    /// If it is not 64 hex digits.
    pub fn fingerprint(&self) -> Result<Option<[u8; 32]>> {
        let Some(text) = &self.model.fingerprint else {
            return Ok(None);
        };
        match blake3::Hash::from_hex(text) {
            Ok(hash) => Ok(Some(*hash.as_bytes())),
            Err(_) => bail!("model.fingerprint '{text}': it must be 64 hex digits"),
        }
    }
}
