//! One process of the cluster. Owns the child from start to reaping; only its own task signals it, so that no signal goes
//! to a process that has been reaped. Reads the events that a role tells on standard output, and drops other lines.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitStatus, Stdio};

use anyhow::{Context, Result};
use hypic_cluster::Role;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::mpsc;

use super::events::Teller;

/// Something that happened to a process.
pub(super) enum Change {
    /// It told an event.
    Told(Value),
    /// It has ended and is reaped.
    Exited(ExitStatus),
}

/// What a process is made to do.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// End soon.
    Terminate,
    /// End at once.
    Kill,
}

/// A process, as far as is known.
pub(super) struct Process {
    role: Role,
    pid: u32,
    hello: Option<Value>,
    ready: bool,
    usable: BTreeSet<String>,
    alive: bool,
    orders: mpsc::UnboundedSender<Order>,
}

impl Process {
    /// Start this program with `args`; what happens to it is told under `index`.
    pub fn start(
        role: Role,
        index: usize,
        args: &[OsString],
        changes: mpsc::UnboundedSender<(usize, Change)>,
    ) -> Result<Self> {
        let program = std::env::current_exe().context("cannot find the own program")?;
        let mut command = bound(program.as_os_str(), args)?;
        let mut child = command.stdout(Stdio::piped()).spawn().with_context(|| format!("cannot start a {role}"))?;
        let pid = child.id().context("the process has ended at once")?;
        let stdout = child.stdout.take().context("the process has no standard output")?;
        let (orders, mut todo) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            let mut lines = BufReader::new(stdout).lines();
            let mut reading = true;
            let status = loop {
                tokio::select! {
                    line = lines.next_line(), if reading => match line {
                        Ok(Some(line)) => {
                            if let Ok(event) = serde_json::from_str(&line) {
                                let _ = changes.send((index, Change::Told(event)));
                            }
                        }
                        _ => reading = false,
                    },
                    Some(order) = todo.recv() => signal(&child, order),
                    status = child.wait() => break status,
                }
            };
            let status = status.unwrap_or_else(|_| ExitStatus::from_raw(0));
            let _ = changes.send((index, Change::Exited(status)));
        });
        Ok(Process { role, pid, hello: None, ready: false, usable: BTreeSet::new(), alive: true, orders })
    }

    pub fn role(&self) -> Role {
        self.role
    }

    pub fn alive(&self) -> bool {
        self.alive
    }

    pub fn is_ready(&self) -> bool {
        self.ready
    }

    pub fn id(&self) -> Option<&str> {
        self.told("id")
    }

    /// Where its internal services are, or a router's gRPC API.
    pub fn address(&self) -> Option<&str> {
        self.told("address")
    }

    pub fn http(&self) -> Option<&str> {
        self.told("http")
    }

    fn told(&self, key: &str) -> Option<&str> {
        self.hello.as_ref()?[key].as_str()
    }

    /// Of a router: whether it can use all of `members`.
    pub fn can_use(&self, members: &BTreeSet<&str>) -> bool {
        members.iter().all(|id| self.usable.contains(*id))
    }

    pub fn order(&self, order: Order) {
        // Its task has ended if it has.
        let _ = self.orders.send(order);
    }

    /// Remember what happened, and tell it.
    pub fn take_in(&mut self, change: Change, teller: &mut Teller) -> Result<()> {
        let event = match change {
            Change::Told(event) => event,
            Change::Exited(status) => {
                self.alive = false;
                let code = status.code().or(status.signal().map(|signal| -signal)).unwrap_or(-1);
                return teller.exited(self.role.as_str(), self.id(), self.pid, code);
            }
        };
        match event["event"].as_str() {
            Some("ready") => {
                let first = !std::mem::replace(&mut self.ready, true);
                if first && let Some(hello) = &self.hello {
                    return teller.started(hello);
                }
            }
            Some("members") => {
                let ids = event["ids"].as_array().into_iter().flatten();
                self.usable = ids.filter_map(|id| id.as_str().map(str::to_string)).collect();
            }
            _ if event["role"].is_string() => self.hello = Some(event),
            _ => {}
        }
        Ok(())
    }
}

/// A command for a program that ends with this process, in a group of its own: an interrupt at the terminal reaches `up`
/// alone.
pub(super) fn bound(program: &std::ffi::OsStr, args: &[OsString]) -> Result<Command> {
    let own = std::env::current_exe().context("cannot find the own program")?;
    let mut command = Command::new(own);
    command.arg("with-parent").arg(std::process::id().to_string()).arg("--").arg(program).args(args);
    command.stdin(Stdio::null()).process_group(0).kill_on_drop(true);
    Ok(command)
}

/// Signal a child that is not reaped; a stopped one is woken to hear it.
pub(super) fn signal(child: &Child, order: Order) {
    let pid = child.id().and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw);
    let Some(pid) = pid else {
        return;
    };
    let signals: &[Signal] = match order {
        Order::Terminate => &[Signal::TERM, Signal::CONT],
        Order::Kill => &[Signal::KILL],
    };
    for &signal in signals {
        if let Err(error) = kill_process(pid, signal) {
            tracing::debug!(%error, "a process could not be signalled");
        }
    }
}
