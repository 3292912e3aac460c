//! `hypic router`, `hypic scatter-worker`, `hypic combiner`: their flags, which are one layer of their settings.

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Args;
use hypic_cluster::Role;

use crate::config::{Config, Layers};
use crate::roles;

/// Flags of a role. Every setting can be given in the file, as HYPIC__SECTION__KEY in the environment, or by --set;
/// flags win over the environment, and that over the file.
#[derive(Debug, Args)]
pub struct RoleArgs {
    /// File with settings, in TOML (see --print-config)
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Any setting, such as shutdown.grace=5s [repeatable]
    #[arg(long, value_name = "SECTION.KEY=VALUE")]
    set: Vec<String>,
    /// Print the settings that result, in TOML, and exit
    #[arg(long)]
    print_config: bool,
    /// Tell events on standard output as one JSON object a line: {"role", "id", "pid", "address", "http", "metrics"} when
    /// it listens, {"event": "ready"}, and of a router {"event": "members", "ids": [...]} when those that it can use change
    #[arg(long)]
    json: bool,
    /// Hugging Face checkpoint directory [model.dir; default: the demo model in the program]
    #[arg(long, value_name = "DIR")]
    model: Option<String>,
    /// Name under which the model is served [model.name]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Compute dtype, the same in all roles [model.dtype]
    #[arg(long, value_name = "auto|f32|bf16")]
    dtype: Option<String>,
    /// Address: HTTP of a router [listen.http], internal services of the others [listen.internal]
    #[arg(long, value_name = "HOST:PORT")]
    listen: Option<String>,
    /// Address of a router's gRPC API [listen.grpc]
    #[arg(long, value_name = "HOST:PORT")]
    grpc_listen: Option<String>,
    /// Address of /metrics, /health, /ready and /members [listen.metrics]
    #[arg(long, value_name = "HOST:PORT")]
    metrics_listen: Option<String>,
    /// Address at which other members reach this one [listen.advertise]
    #[arg(long, value_name = "HOST:PORT")]
    advertise: Option<String>,
    /// Members of a fixed cluster, such as combiner=10.0.0.7:50071 [cluster.members]
    #[arg(long, value_name = "ROLE=HOST:PORT,...")]
    members: Option<String>,
    /// etcd, which knows the members [cluster.etcd.endpoints]
    #[arg(long, value_name = "HOST:PORT,...")]
    etcd: Option<String>,
    /// Seam of a router's requests [router.seam]
    #[arg(long, value_name = "N")]
    seam: Option<String>,
    /// Anchor of a router's requests [router.anchor]
    #[arg(long, value_name = "none|turn|system")]
    anchor: Option<String>,
    /// File with API keys of a router, one a line [router.api_key_file]
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<String>,
    /// Threads of a worker or combiner [worker.threads, combiner.threads]
    #[arg(long, value_name = "N")]
    threads: Option<String>,
    /// Memory of a worker or combiner for entries and prefix states [cache.bytes]
    #[arg(long, value_name = "SIZE")]
    cache_bytes: Option<String>,
    /// Seconds that running work gets to finish after SIGTERM [shutdown.grace]
    #[arg(long, value_name = "SECONDS")]
    grace: Option<u64>,
    /// Permit internal services, and credentials of etcd, without TLS beyond loopback [tls.insecure]
    #[arg(long)]
    insecure: bool,
}

impl RoleArgs {
    /// The settings: file, environment and flags put together.
    fn settings(&self, role: Role) -> Result<Config> {
        let mut layers = Layers::new(role)?;
        if let Some(file) = &self.config {
            layers.file(file)?;
        }
        layers.environment(std::env::vars_os())?;
        for given in &self.set {
            let Some((key, value)) = given.split_once('=') else {
                bail!("--set {given}: give SECTION.KEY=VALUE, such as --set router.seam=8");
            };
            layers.flag(&format!("--set {given}"), key.trim(), value)?;
        }
        let (listen, threads) = match role {
            Role::Router => ("listen.http", None),
            Role::ScatterWorker => ("listen.internal", Some("worker.threads")),
            Role::Combiner => ("listen.internal", Some("combiner.threads")),
        };
        let of_router = (role == Role::Router).then_some(());
        let grace = self.grace.map(|seconds| format!("{seconds}s"));
        let insecure = self.insecure.then(|| "true".to_string());
        for (flag, key, value) in [
            ("--model", Some("model.dir"), &self.model),
            ("--name", Some("model.name"), &self.name),
            ("--dtype", Some("model.dtype"), &self.dtype),
            ("--listen", Some(listen), &self.listen),
            ("--grpc-listen", of_router.map(|()| "listen.grpc"), &self.grpc_listen),
            ("--metrics-listen", Some("listen.metrics"), &self.metrics_listen),
            ("--advertise", Some("listen.advertise"), &self.advertise),
            ("--members", Some("cluster.members"), &self.members),
            ("--etcd", Some("cluster.etcd.endpoints"), &self.etcd),
            ("--seam", of_router.map(|()| "router.seam"), &self.seam),
            ("--anchor", of_router.map(|()| "router.anchor"), &self.anchor),
            ("--api-key-file", of_router.map(|()| "router.api_key_file"), &self.api_key_file),
            ("--threads", threads, &self.threads),
            ("--cache-bytes", Some("cache.bytes"), &self.cache_bytes),
            ("--grace", Some("shutdown.grace"), &grace),
            ("--insecure", Some("tls.insecure"), &insecure),
        ] {
            let Some(value) = value else {
                continue;
            };
            let Some(key) = key else {
                bail!("{flag}: a {role} has no such setting");
            };
            layers.flag(&format!("{flag} {value}"), key, value)?;
        }
        layers.finish()
    }
}

/// Run a role until it is told to stop.
pub(super) fn run(role: Role, args: RoleArgs) -> Result<()> {
    let config = args.settings(role)?;
    if args.print_config {
        print!("{}", toml::to_string(&config)?);
        return Ok(());
    }
    roles::run(role, config, args.json)
}
