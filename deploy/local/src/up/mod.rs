//! `hypic up`: a whole cluster as processes on loopback. Owns the processes, from start to reaping, and what is told
//! about them on standard output. A process that dies is told and not started again; when the cluster cannot become
//! ready any more, or nothing of it is left, `up` ends with an error.

mod etcd;
mod events;
mod process;

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use hypic_cluster::Role;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};

use events::Teller;
use process::{Change, Order, Process};

/// Of the grace, what is not for running work but for telling clients that it is over and for hanging up.
const HANG_UP: Duration = Duration::from_millis(1500);

/// What `up` starts.
#[derive(Clone, Debug)]
pub struct UpConfig {
    /// Scatter workers.
    pub workers: usize,
    /// Combiners.
    pub combiners: usize,
    /// Routers.
    pub routers: usize,
    /// Use an etcd of its own for the membership.
    pub etcd: bool,
    /// HTTP address of the first router.
    pub listen: SocketAddr,
    /// Model directory; none: the demo model.
    pub model: Option<PathBuf>,
    /// File with settings for all processes.
    pub config: Option<PathBuf>,
    /// Settings for all processes, as `section.key=value`.
    pub set: Vec<String>,
    /// Tell events as JSON.
    pub json: bool,
    /// Time for the processes to end by themselves.
    pub grace: Duration,
}

/// Start the cluster and keep it until a signal.
///
/// # Errors
/// If it cannot be started or become ready, or nothing of it is left.
pub fn run(config: UpConfig) -> Result<()> {
    // One thread: processes are tied to the life of the thread that starts them.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start")?;
    runtime.block_on(async {
        let mut stop = Signals::new()?;
        let (changes, news) = mpsc::unbounded_channel();
        let teller = Teller::new(config.json);
        let grace = config.grace;
        let mut up = Up { config, teller, processes: Vec::new(), changes, news, etcd: None, ready: false };
        let ended = tokio::select! {
            ended = up.live() => ended,
            () = stop.next() => Ok(()),
        };
        up.end(grace, &mut stop).await;
        ended
    })
}

/// Signals that end the cluster.
struct Signals([tokio::signal::unix::Signal; 3]);

impl Signals {
    fn new() -> Result<Self> {
        let listen = |kind| signal(kind).context("cannot listen for signals");
        Ok(Signals([listen(SignalKind::interrupt())?, listen(SignalKind::terminate())?, listen(SignalKind::hangup())?]))
    }

    async fn next(&mut self) {
        let [interrupt, terminate, hangup] = &mut self.0;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
        }
    }
}

struct Up {
    config: UpConfig,
    teller: Teller,
    processes: Vec<Process>,
    changes: mpsc::UnboundedSender<(usize, Change)>,
    news: mpsc::UnboundedReceiver<(usize, Change)>,
    etcd: Option<etcd::Etcd>,
    ready: bool,
}

impl Up {
    /// Start everything and tell what happens; ends when nothing more can come of it.
    async fn live(&mut self) -> Result<()> {
        let mut membership: Vec<OsString> = Vec::new();
        if self.config.etcd {
            let etcd = etcd::Etcd::start().await?;
            membership = vec!["--etcd".into(), etcd.endpoint().into()];
            self.etcd = Some(etcd);
        }
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let share = |processes: usize| (cores / processes.max(1)).max(1);
        let all = [
            (Role::Combiner, self.config.combiners, share(self.config.combiners)),
            (Role::ScatterWorker, self.config.workers, share(self.config.workers)),
            (Role::Router, self.config.routers, 0),
        ];
        for (role, count, threads) in all {
            for index in 0..count {
                self.start(role, index, threads, &membership)?;
            }
            // With a fixed list, those that follow are told where these are.
            if !self.config.etcd && role != Role::Router {
                self.listening().await?;
                membership = self.members();
            }
        }
        loop {
            self.next().await?;
        }
    }

    fn start(&mut self, role: Role, index: usize, threads: usize, membership: &[OsString]) -> Result<()> {
        let mut args: Vec<OsString> = vec![role.as_str().into(), "--json".into()];
        let own = self.config.grace.saturating_sub(HANG_UP);
        args.extend(["--set".into(), format!("shutdown.grace={}ms", own.as_millis()).into()]);
        let free = "127.0.0.1:0";
        let first = role == Role::Router && index == 0;
        let listen = if first { self.config.listen.to_string() } else { free.to_string() };
        args.extend(["--listen".into(), listen.into(), "--metrics-listen".into(), free.into()]);
        if role == Role::Router {
            args.extend(["--grpc-listen".into(), free.into()]);
        } else {
            args.extend(["--threads".into(), threads.to_string().into()]);
        }
        if let Some(model) = &self.config.model {
            args.extend(["--model".into(), model.into()]);
        }
        if let Some(file) = &self.config.config {
            args.extend(["--config".into(), file.into()]);
        }
        for setting in &self.config.set {
            args.extend(["--set".into(), setting.into()]);
        }
        args.extend_from_slice(membership);
        let process = Process::start(role, self.processes.len(), &args, self.changes.clone())?;
        self.processes.push(process);
        Ok(())
    }

    /// Wait until every process that lives tells where it listens.
    async fn listening(&mut self) -> Result<()> {
        while self.processes.iter().any(|p| p.alive() && p.address().is_none()) {
            self.next().await?;
        }
        Ok(())
    }

    fn members(&self) -> Vec<OsString> {
        let listed = self.processes.iter().filter(|p| p.alive());
        let members = listed.filter_map(|p| Some(format!("{}={}", p.role(), p.address()?)));
        let members: Vec<String> = members.collect();
        if members.is_empty() { Vec::new() } else { vec!["--members".into(), members.join(",").into()] }
    }

    /// Take in one change.
    async fn next(&mut self) -> Result<()> {
        let Some((index, change)) = self.news.recv().await else {
            bail!("nothing is left of the cluster");
        };
        let process = &mut self.processes[index];
        let exited = matches!(change, Change::Exited(_));
        process.take_in(change, &mut self.teller)?;
        if exited && !self.ready {
            let alive = |role| self.processes.iter().any(|p| p.role() == role && p.alive());
            // What is not started yet is not missing.
            let started = |role| self.processes.iter().any(|p| p.role() == role);
            for role in [Role::Combiner, Role::Router] {
                if started(role) && !alive(role) {
                    bail!("no {role} is left: the cluster cannot become ready (see the log above)");
                }
            }
            let first = self.processes.iter().find(|p| p.role() == Role::Router);
            if first.is_some_and(|router| !router.alive()) {
                bail!("the router at {} has ended: the cluster cannot become ready", self.config.listen);
            }
        }
        if exited && self.processes.iter().all(|p| !p.alive()) {
            bail!("nothing is left of the cluster");
        }
        self.tell_ready()
    }

    /// Tell once when every router can use every member.
    fn tell_ready(&mut self) -> Result<()> {
        let routers = || self.processes.iter().filter(|p| p.role() == Role::Router);
        if self.ready || routers().count() < self.config.routers {
            return Ok(());
        }
        if self.processes.iter().any(|p| p.alive() && !p.is_ready()) {
            return Ok(());
        }
        let members = self.processes.iter().filter(|p| p.role() != Role::Router && p.alive());
        let members: BTreeSet<&str> = members.filter_map(Process::id).collect();
        if !routers().filter(|p| p.alive()).all(|router| router.can_use(&members)) {
            return Ok(());
        }
        let http = routers().find_map(|router| router.http().map(str::to_string));
        self.ready = true;
        self.teller.ready(&http.context("the first router did not tell its address")?)
    }

    /// Terminate what lives, kill it after the grace or at another signal, and reap it. etcd goes last, so that members
    /// can leave it.
    async fn end(&mut self, grace: Duration, again: &mut Signals) {
        let deadline = Instant::now() + grace;
        self.order(Order::Terminate);
        tokio::select! {
            _ = timeout_at(deadline, self.reaped()) => {}
            () = again.next() => {}
        }
        if self.processes.iter().any(Process::alive) {
            self.order(Order::Kill);
            self.reaped().await;
        }
        if let Some(etcd) = self.etcd.take() {
            etcd.end(deadline).await;
        }
    }

    fn order(&self, order: Order) {
        self.processes.iter().for_each(|process| process.order(order));
    }

    async fn reaped(&mut self) {
        while self.processes.iter().any(Process::alive) {
            let Some((index, change)) = self.news.recv().await else {
                return;
            };
            // Whether anybody reads what is told no longer matters.
            let _ = self.processes[index].take_in(change, &mut self.teller);
        }
    }
}
