//! A cluster whose roles are started one by one with static lists, so that a [`Proxy`] stands on every way between them:
//! from the routers to each worker and combiner, and from the workers to each combiner.
//!
//! What can go wrong: a role that is not ready in time; the logs of all roles are printed then.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

use crate::cluster::{Member, Options};
use crate::metrics::settled;
use crate::process::{Process, Signal, signal};
use crate::program::executable;
use crate::proxy::Proxy;

/// What a role gets to be there, on a busy machine.
const START: Duration = Duration::from_secs(60);

/// A running cluster with proxies in it.
#[derive(Debug)]
pub struct Roles {
    /// Routers, in the order of their start.
    pub routers: Vec<Member>,
    /// Scatter workers.
    pub workers: Vec<Member>,
    /// Combiners.
    pub combiners: Vec<Member>,
    /// From the routers to worker i.
    pub to_workers: Vec<Proxy>,
    /// From the routers to combiner i.
    pub to_combiners: Vec<Proxy>,
    /// From all workers to combiner i: the way of the parts.
    pub parts: Vec<Proxy>,
    processes: Vec<Process>,
}

impl Roles {
    /// Start them, each role with the further arguments and the environment of the options; the i-th worker serves the
    /// i-th of `models`, all others the demo model.
    ///
    /// # Panics
    /// If one does not get ready in time.
    pub async fn start(options: Options, models: &[PathBuf]) -> Roles {
        let mut roles = Roles {
            routers: Vec::new(),
            workers: Vec::new(),
            combiners: Vec::new(),
            to_workers: Vec::new(),
            to_combiners: Vec::new(),
            parts: Vec::new(),
            processes: Vec::new(),
        };
        for _ in 0..options.combiners {
            let member = roles.role("combiner", &options, &[], None).await;
            roles.to_combiners.push(Proxy::to(&member.address).await);
            roles.parts.push(Proxy::to(&member.address).await);
            roles.combiners.push(member);
        }
        let combiners = list("combiner", &roles.parts);
        for i in 0..options.workers {
            let model = models.get(i).map(PathBuf::as_path);
            let member = roles.role("scatter-worker", &options, &combiners, model).await;
            roles.to_workers.push(Proxy::to(&member.address).await);
            roles.workers.push(member);
        }
        let mut all = list("combiner", &roles.to_combiners);
        all.extend(list("scatter-worker", &roles.to_workers));
        for _ in 0..options.routers {
            let member = roles.role("router", &options, &all, None).await;
            roles.routers.push(member);
        }
        let usable = options.workers - models.len().min(options.workers);
        roles.wait_for_members(usable + options.combiners).await;
        roles
    }

    async fn role(&mut self, role: &str, options: &Options, members: &[String], model: Option<&Path>) -> Member {
        let mut arguments: Vec<String> = [role, "--json", "--listen", "127.0.0.1:0"].map(str::to_string).to_vec();
        arguments.extend(["--metrics-listen", "127.0.0.1:0"].map(str::to_string));
        if role == "router" {
            arguments.extend(["--grpc-listen", "127.0.0.1:0"].map(str::to_string));
        }
        if !members.is_empty() {
            arguments.extend(["--members".to_string(), members.join(",")]);
        }
        if let Some(model) = model {
            arguments.extend(["--model".to_string(), model.display().to_string()]);
        }
        if role != "router" {
            arguments.extend(options.cache.iter().flat_map(|size| ["--cache-bytes".to_string(), size.clone()]));
        }
        arguments.extend(options.arguments.iter().cloned());
        let mut process = Process::start(role, &executable(), &arguments, &options.environment);
        let line = process.line(START, "its first line", |line| line["role"] == role).await;
        self.processes.push(process);
        Member::read(&line)
    }

    /// Wait until every router uses so many members.
    async fn wait_for_members(&mut self, count: usize) {
        let routers: Vec<u32> = self.routers.iter().map(|router| router.pid).collect();
        for process in self.processes.iter_mut().filter(|process| routers.contains(&process.pid())) {
            let enough =
                |line: &Value| line["event"] == "members" && line["ids"].as_array().map(Vec::len) == Some(count);
            process.line(START, &format!("a view of {count} members"), enough).await;
        }
    }

    /// Router 1's base URL.
    pub fn base(&self) -> String {
        self.routers[0].base()
    }

    /// All members.
    pub fn members(&self) -> impl Iterator<Item = &Member> {
        self.routers.iter().chain(&self.workers).chain(&self.combiners)
    }

    /// Send a signal to a member.
    pub fn signal(&self, member: &Member, with: Signal) {
        signal(member.pid, with);
    }

    /// Wait until the members that are alive and not named in `without` have nothing under way.
    ///
    /// # Panics
    /// If they still have after `limit`.
    pub async fn settled(&self, limit: Duration, without: &[u32]) {
        settled(&Member::exporting(self.members(), without), limit).await;
    }

    /// What all of them have logged.
    pub fn log(&self) -> String {
        self.processes.iter().map(Process::log).collect::<Vec<_>>().join("\n")
    }
}

impl Drop for Roles {
    fn drop(&mut self) {
        // All at once, so that their ends overlap.
        for process in &self.processes {
            signal(process.pid(), Signal::CONT);
            signal(process.pid(), Signal::TERM);
        }
    }
}

fn list(role: &str, proxies: &[Proxy]) -> Vec<String> {
    proxies.iter().map(|proxy| format!("{role}={}", proxy.address())).collect()
}
