//! `hypic up`: its flags; and `hypic with-parent`, by which its processes end with it.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use rustix::process::{Signal, getppid, set_parent_process_death_signal};

use super::serve::parse_address;
use crate::up::{self, UpConfig};

/// Options of `hypic up`.
#[derive(Debug, Args)]
pub(super) struct UpArgs {
    /// Scatter workers, which share the cores
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(0..=256))]
    workers: u16,
    /// Combiners
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    combiners: u16,
    /// Routers
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    routers: u16,
    /// Keep the membership in an etcd, which is found on the PATH and started beside the others
    #[arg(long)]
    etcd: bool,
    /// HTTP address of the first router; port 0 takes a free one
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:8080", value_parser = parse_address)]
    listen: SocketAddr,
    /// Hugging Face checkpoint directory [default: the demo model in the program]
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// File with settings for all processes, in TOML
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Any setting for all processes, such as router.seam=16 [repeatable]
    #[arg(long, value_name = "SECTION.KEY=VALUE")]
    set: Vec<String>,
    /// Tell events as one JSON object a line: {"role", "id", "pid", "address", "http", "metrics"} for each process as it gets
    /// ready, {"ready": URL} once, {"event": "exited", "role", "id", "pid", "status"} (minus the signal, if one ended it)
    #[arg(long)]
    json: bool,
    /// Seconds that processes get to end by themselves
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    grace: u64,
}

pub(super) fn run(args: UpArgs) -> Result<()> {
    up::run(UpConfig {
        workers: args.workers.into(),
        combiners: args.combiners.into(),
        routers: args.routers.into(),
        etcd: args.etcd,
        listen: args.listen,
        model: args.model,
        config: args.config,
        set: args.set,
        json: args.json,
        grace: Duration::from_secs(args.grace),
    })
}

/// Options of `hypic with-parent`.
#[derive(Debug, Args)]
pub(super) struct WithParentArgs {
    /// The process with which the program ends
    parent: i32,
    /// The program and its arguments
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

/// Become another program, which is killed when the parent ends.
pub(super) fn with_parent(args: WithParentArgs) -> Result<()> {
    // It outlives the change of program.
    set_parent_process_death_signal(Some(Signal::KILL)).context("cannot ask to end with the parent")?;
    if getppid().is_none_or(|parent| parent.as_raw_nonzero().get() != args.parent) {
        bail!("the parent {} has ended already", args.parent);
    }
    let Some((program, rest)) = args.command.split_first() else {
        bail!("no program is given");
    };
    let error = Command::new(program).args(rest).exec();
    Err(error).with_context(|| format!("cannot start {}", program.display()))
}
