//! `hypic serve`: HTTP and gRPC over all roles in this process.

use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use hypic_router::{ApiKeys, FrontConfig, bind};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use super::ModelArgs;

/// Options of `hypic serve`.
#[derive(Debug, Args)]
pub(super) struct ServeArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Address of the HTTP API; port 0 takes a free one
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:8080", value_parser = parse_address)]
    listen: SocketAddr,
    /// Address of the gRPC API; port 0 takes a free one
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:50051", value_parser = parse_address)]
    grpc_listen: SocketAddr,
    /// File with API keys, one a line; without it everybody may ask
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Seconds that running answers get to finish after SIGTERM
    #[arg(long, allow_negative_numbers = true, value_name = "SECONDS", default_value_t = 30)]
    grace: u64,
}

pub(super) fn run(args: ServeArgs) -> Result<()> {
    let api_keys = args.api_key_file.as_deref().map(ApiKeys::from_file).transpose()?;
    if api_keys.is_none() && !(args.listen.ip().is_loopback() && args.grpc_listen.ip().is_loopback()) {
        tracing::warn!(
            "listening beyond loopback without API keys: anybody who reaches this machine may ask (--api-key-file)"
        );
    }
    let runtime =
        tokio::runtime::Builder::new_multi_thread().enable_all().build().context("cannot start the runtime")?;
    runtime.block_on(async {
        // Before the model is loaded: a port that is taken is told at once.
        let config =
            FrontConfig { http: args.listen, grpc: Some(args.grpc_listen), api_keys, ..FrontConfig::default() };
        let front = bind(config).await?;
        let shutdown = on_signal()?;
        let local = tokio::task::block_in_place(|| args.model.start(true))?;
        let (http, grpc) = (front.http_address(), front.grpc_address());
        let spec = local.model().spec();
        let name = &local.router().served().card.id;
        println!("model {name}: {} in {} on {}", spec.family, local.model().dtype(), local.kernel_set());
        println!("http  http://{http}");
        if let Some(grpc) = grpc {
            println!("grpc  {grpc}");
        }
        println!("try   curl -s http://{http}/v1/chat/completions -d '{}'", example(name));
        front.serve(local.router().clone(), shutdown, Duration::from_secs(args.grace)).await;
        Ok(())
    })
}

pub(super) fn parse_address(text: &str) -> Result<SocketAddr, String> {
    let found = text.to_socket_addrs().map_err(|e| format!("{e}: use HOST:PORT, such as 127.0.0.1:8080"))?.next();
    found.ok_or_else(|| format!("{text} names no address: use HOST:PORT, such as 127.0.0.1:8080"))
}

/// A request that shows the point: a document as a segment, and a question.
fn example(model: &str) -> String {
    let document = "Document: Alma Berg. Alma Berg lives in Dover. She keeps a parrot.\\n";
    let question = "Question: Where does Alma Berg live?";
    format!(
        r#"{{"model": "{model}", "messages": [{{"role": "user", "content": [{{"type": "text", "text": "{document}"}}, {{"type": "text", "text": "{question}"}}]}}], "hypic": {{"segments": "parts"}}}}"#
    )
}

/// Cancelled at the first SIGTERM or interrupt; a second one ends the process at once.
pub(crate) fn on_signal() -> Result<CancellationToken> {
    let shutdown = CancellationToken::new();
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for interrupts")?;
    let token = shutdown.clone();
    tokio::spawn(async move {
        loop {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            if token.is_cancelled() {
                std::process::exit(130);
            }
            tracing::info!("shutting down: running answers finish first");
            token.cancel();
        }
    });
    Ok(shutdown)
}
