//! A cluster whose roles are started one by one with static lists, so that a [`Proxy`] stands on every way between
//! them: from the first router to each worker and combiner, and from the workers to each combiner. Further routers have
//! ways of their own, which nothing disturbs. A role that has ended can be started anew at its address. With an etcd of
//! the test's the roles find each other, and there are no proxies.
//!
//! What can go wrong: a role that is not ready in time; the logs of all roles are printed then.

use std::path::{Path, PathBuf};
use std::time::Duration;

use hypic_test_support::until;

use crate::cluster::{Member, Options};
use crate::metrics::{assert_idle, members};
use crate::process::{Process, Signal, signal};
use crate::program::executable;
use crate::proxy::Proxy;

/// What a role gets to be there, on a busy machine.
const START: Duration = Duration::from_secs(60);
/// Any free port of loopback.
const FREE: &str = "127.0.0.1:0";

/// A running cluster with proxies in it.
#[derive(Debug)]
pub struct Roles {
    /// Routers, in the order of their start.
    pub routers: Vec<Member>,
    /// Scatter workers.
    pub workers: Vec<Member>,
    /// Combiners.
    pub combiners: Vec<Member>,
    /// From the first router to worker i.
    pub to_workers: Vec<Proxy>,
    /// From the first router to combiner i.
    pub to_combiners: Vec<Proxy>,
    /// From all workers to combiner i: the way of the parts.
    pub parts: Vec<Proxy>,
    options: Options,
    running: Vec<Running>,
}

/// A process, and how to start it again.
#[derive(Debug)]
struct Running {
    process: Process,
    /// All but where it listens.
    arguments: Vec<String>,
}

impl Roles {
    /// Start them, each role with the further arguments and the environment of the options; the i-th worker serves the
    /// i-th of `models`, all others the demo model.
    ///
    /// # Panics
    /// If one does not get ready in time.
    pub async fn start(options: Options, models: &[PathBuf]) -> Roles {
        let usable = options.workers - models.len().min(options.workers) + options.combiners;
        let roles = Roles::begin(options, models).await;
        roles.wait_for_members(usable).await;
        roles
    }

    /// As [`Roles::start`], but members may be missing.
    ///
    /// # Panics
    /// If one does not tell in time where it listens.
    pub async fn begin(options: Options, models: &[PathBuf]) -> Roles {
        let mut roles = Roles {
            routers: Vec::new(),
            workers: Vec::new(),
            combiners: Vec::new(),
            to_workers: Vec::new(),
            to_combiners: Vec::new(),
            parts: Vec::new(),
            options,
            running: Vec::new(),
        };
        let proxied = roles.options.endpoint.is_none();
        for _ in 0..roles.options.combiners {
            let member = roles.role("combiner", FREE, &[], None).await;
            if proxied {
                roles.to_combiners.push(Proxy::to(&member.address).await);
                roles.parts.push(Proxy::to(&member.address).await);
            }
            roles.combiners.push(member);
        }
        let combiners = list("combiner", &roles.parts);
        let mut port = "0".to_string();
        for i in 0..roles.options.workers {
            let model = models.get(i).map(PathBuf::as_path);
            let listen = match roles.options.hosts.get(i) {
                Some(host) => format!("{host}:{port}"),
                None => FREE.to_string(),
            };
            let member = roles.role("scatter-worker", &listen, &combiners, model).await;
            if !roles.options.hosts.is_empty() {
                port = member.address.rsplit_once(':').expect("HOST:PORT").1.to_string();
            }
            if proxied {
                roles.to_workers.push(Proxy::to(&member.address).await);
            }
            roles.workers.push(member);
        }
        let mut through = list("combiner", &roles.to_combiners);
        through.extend(list("scatter-worker", &roles.to_workers));
        let members = roles.members().filter(|_| proxied);
        let direct: Vec<String> = members.map(|member| format!("{}={}", member.role, member.address)).collect();
        for i in 0..roles.options.routers {
            let known = if i == 0 { &through } else { &direct };
            let member = roles.role("router", FREE, known, None).await;
            roles.routers.push(member);
        }
        roles
    }

    async fn role(&mut self, role: &str, listen: &str, members: &[String], model: Option<&Path>) -> Member {
        let mut arguments: Vec<String> =
            [role, "--json", "--metrics-listen", FREE].into_iter().map(str::to_string).collect();
        if role == "router" {
            arguments.extend(["--grpc-listen", FREE].map(str::to_string));
        }
        if !members.is_empty() {
            arguments.extend(["--members".to_string(), members.join(",")]);
        }
        if let Some(endpoint) = &self.options.endpoint {
            arguments.extend(["--etcd".to_string(), endpoint.clone()]);
        }
        if let Some(model) = model {
            arguments.extend(["--model".to_string(), model.display().to_string()]);
        }
        if role != "router" {
            arguments.extend(self.options.cache.iter().flat_map(|size| ["--cache-bytes".to_string(), size.clone()]));
        }
        arguments.extend(self.options.settings());
        arguments.extend(self.options.arguments.iter().cloned());
        self.launch(role, listen, arguments).await
    }

    async fn launch(&mut self, role: &str, listen: &str, arguments: Vec<String>) -> Member {
        let mut whole = arguments.clone();
        whole.extend(["--listen".to_string(), listen.to_string()]);
        let mut process = Process::start(role, &executable(), &whole, &self.options.environment);
        let line = process.line(START, "its first line", |line| line["role"] == role).await;
        self.running.push(Running { process, arguments });
        Member::read(&line)
    }

    /// Start a member that has ended, or is killed here, anew at its address, and wait until all routers use it. It is
    /// another one then: what it held is gone, and its id is new.
    ///
    /// # Panics
    /// If it does not get ready in time.
    pub async fn replace(&mut self, member: &Member) {
        signal(member.pid, Signal::KILL);
        let at = self.running.iter().position(|r| r.process.pid() == member.pid).expect("one of these roles");
        let mut old = self.running.swap_remove(at);
        old.process.end(START).await;
        let listen = if member.role == "router" { &member.http } else { &member.address };
        let new = self.launch(&member.role, listen, old.arguments).await;
        let places = self.routers.iter_mut().chain(&mut self.workers).chain(&mut self.combiners);
        *places.into_iter().find(|place| place.pid == member.pid).expect("one of these roles") = new;
        self.wait_for_members(self.workers.len() + self.combiners.len()).await;
    }

    /// Wait until every router uses so many members.
    ///
    /// # Panics
    /// If one does not in time.
    pub async fn wait_for_members(&self, count: usize) {
        for router in &self.routers {
            let enough = async || {
                let members = members(&router.metrics).await?;
                (members.iter().filter(|member| member["usable"] == true).count() == count).then_some(())
            };
            until(START, &format!("{} uses {count} members", router.id), enough).await;
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
    pub async fn assert_idle(&self, limit: Duration, without: &[u32]) {
        assert_idle(&Member::living(self.members(), without), limit).await;
    }

    /// What all of them have logged.
    pub fn log(&self) -> String {
        self.running.iter().map(|running| running.process.log()).collect::<Vec<_>>().join("\n")
    }
}

impl Drop for Roles {
    fn drop(&mut self) {
        // All at once, so that their ends overlap.
        for running in &self.running {
            signal(running.process.pid(), Signal::CONT);
            signal(running.process.pid(), Signal::TERM);
        }
    }
}

fn list(role: &str, proxies: &[Proxy]) -> Vec<String> {
    proxies.iter().map(|proxy| format!("{role}={}", proxy.address())).collect()
}
