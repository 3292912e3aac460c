//! A role as a process of its own. Owns its life: ports are bound first, so that one that is taken is told at once; then
//! it tells where it listens, loads, joins the members and serves. At SIGTERM it leaves the members, finishes what runs
//! within the grace, and ends; a second signal ends it at once.

mod admin;
mod combiner;
mod common;
mod compute;
mod gauges;
mod late;
mod remote;
mod router;
mod worker;

use std::io::Write;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use hypic_cluster::{MemberId, Role, check_exposure};
use hypic_router::{ApiKeys, FrontConfig, bind};
use hypic_telemetry::Telemetry;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::cli::on_signal;
use crate::config::Config;
use admin::Readiness;

/// Between two looks at whether a role is ready and whom it can use.
const LOOK: Duration = Duration::from_millis(100);

/// Be `role` until a signal.
///
/// # Errors
/// If an address cannot be bound, the model cannot be loaded, or a file that is named cannot be used.
pub fn run(role: Role, mut config: Config, json: bool) -> Result<()> {
    let id = MemberId::random(role);
    config.telemetry.instance_id.get_or_insert_with(|| id.to_string());
    let telemetry = Telemetry::start(&config.telemetry)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("cannot start")?;
    let ended = runtime.block_on(live(role, id, config, json, telemetry.prometheus_routes()));
    // What is still open is not waited for.
    runtime.shutdown_background();
    telemetry.shutdown();
    ended
}

async fn live(role: Role, id: MemberId, config: Config, json: bool, metrics: axum::Router) -> Result<()> {
    let shutdown = on_signal()?;
    let admin = listen(config.listen.metrics, "metrics").await?;
    let readiness = Readiness::new(role, shutdown.clone());
    let teller = Teller { json, role, id: id.clone(), metrics: admin.local_addr()? };
    tokio::spawn(admin::serve(admin, readiness.clone(), metrics));
    let process = Process { role, id, config, readiness, shutdown };
    if role == Role::Router {
        let api_keys = process.config.router.api_key_file.as_deref().map(ApiKeys::from_file).transpose()?;
        let (http, grpc) = (process.config.listen.http, Some(process.config.listen.grpc));
        let limits = process.config.front.clone();
        let front = bind(FrontConfig { http, grpc, api_keys, limits }).await?;
        let address = front.grpc_address().context("gRPC is not bound")?;
        teller.hello(address.to_string(), Some(front.http_address()))?;
        tokio::spawn(teller.watch(process.readiness.clone()));
        return router::run(process, front).await;
    }
    let (files, insecure) = (process.config.tls.files.is_some(), process.config.tls.insecure);
    check_exposure(process.config.listen.internal, files, insecure)?;
    let internal = listen(process.config.listen.internal, "internal services").await?;
    let bound = internal.local_addr()?;
    let address = process.config.listen.advertise.clone().unwrap_or_else(|| bound.to_string());
    teller.hello(address.clone(), None)?;
    tokio::spawn(teller.watch(process.readiness.clone()));
    compute::run(process, internal, address).await
}

/// What a role has from the start.
struct Process {
    role: Role,
    id: MemberId,
    config: Config,
    readiness: Arc<Readiness>,
    shutdown: CancellationToken,
}

async fn listen(address: SocketAddr, what: &str) -> Result<TcpListener> {
    let bound = TcpListener::bind(address).await;
    bound.with_context(|| format!("cannot listen on {address} for {what}: choose another port (0 takes a free one)"))
}

/// Tells events on standard output.
struct Teller {
    json: bool,
    role: Role,
    id: MemberId,
    metrics: SocketAddr,
}

impl Teller {
    /// Where the role listens.
    fn hello(&self, address: String, http: Option<SocketAddr>) -> Result<()> {
        let hello = json!({
            "role": self.role.as_str(), "id": self.id.as_str(), "pid": std::process::id(), "address": address,
            "http": http.map(|http| http.to_string()), "metrics": self.metrics.to_string(),
        });
        let http = http.map(|http| format!(", http://{http}")).unwrap_or_default();
        self.line(&hello, &format!("{} listens on {address}{http}, metrics http://{}/metrics", self.id, self.metrics))
    }

    /// When the role is ready, and whom it can use, as that changes.
    async fn watch(self, readiness: Arc<Readiness>) {
        let (mut told_ready, mut told) = (false, Vec::new());
        let mut look = tokio::time::interval(LOOK);
        loop {
            look.tick().await;
            let usable = readiness.usable();
            if self.role == Role::Router && usable != told {
                let text = format!("{} uses {}", self.id, usable.join(", "));
                if self.line(&json!({ "event": "members", "ids": usable }), &text).is_err() {
                    return;
                }
                told = usable;
            }
            if !told_ready && readiness.missing().is_empty() {
                told_ready = true;
                if self.line(&json!({ "event": "ready" }), &format!("{} is ready", self.id)).is_err() {
                    return;
                }
            }
        }
    }

    fn line(&self, event: &Value, text: &str) -> Result<()> {
        let mut out = std::io::stdout().lock();
        let written = if self.json { writeln!(out, "{event}") } else { writeln!(out, "{text}") };
        written.and_then(|()| out.flush()).context("cannot write to standard output")
    }
}
