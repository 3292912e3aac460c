//! A cluster as `hypic up` starts it. What can go wrong: it is not ready in time, or says something that is no line of
//! its own; both fail the test, with the log of all processes.

use std::time::Duration;

use serde_json::Value;

use crate::metrics::assert_idle;
use crate::process::{Process, Signal, alive, children, command, signal};
use crate::program::executable;

/// What a cluster gets to be ready, on a busy machine.
const START: Duration = Duration::from_secs(60);

/// What to start.
#[derive(Clone, Debug)]
pub struct Options {
    /// Scatter workers.
    pub workers: usize,
    /// Combiners.
    pub combiners: usize,
    /// Routers.
    pub routers: usize,
    /// With a real etcd instead of the static list.
    pub etcd: bool,
    /// Memory of each worker and combiner for entries and prefix states, such as `1MiB`; none: the default.
    pub cache: Option<String>,
    /// Whether routers have hot entries copied: work that shows in the gauges though nobody asks.
    pub replicate: bool,
    /// Further arguments.
    pub arguments: Vec<String>,
    /// Further variables of the environment.
    pub environment: Vec<(String, String)>,
    /// Of [`Roles`](crate::Roles): hosts of the workers, which then all have one port; the others are at 127.0.0.1.
    pub hosts: Vec<String>,
    /// Of [`Roles`](crate::Roles): HOST:PORT of the etcd that knows the members, and no proxies then.
    pub endpoint: Option<String>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            workers: 2,
            combiners: 1,
            routers: 1,
            etcd: false,
            cache: None,
            replicate: false,
            arguments: Vec::new(),
            environment: Vec::new(),
            hosts: Vec::new(),
            endpoint: None,
        }
    }
}

impl Options {
    /// Arguments of all roles that come from the fields here.
    pub(crate) fn settings(&self) -> [String; 2] {
        ["--set".to_string(), format!("router.replicate.enabled={}", self.replicate)]
    }
}

/// One process of a cluster, as it told itself.
#[derive(Clone, Debug)]
pub struct Member {
    /// `router`, `scatter-worker` or `combiner`.
    pub role: String,
    /// Its random id.
    pub id: String,
    /// Its process.
    pub pid: u32,
    /// HOST:PORT of its internal services; empty for a router.
    pub address: String,
    /// HOST:PORT of a router's HTTP API; else empty.
    pub http: String,
    /// HOST:PORT of its metrics.
    pub metrics: String,
}

impl Member {
    pub(crate) fn read(line: &Value) -> Member {
        let text = |field: &str| {
            let text = line[field].as_str().unwrap_or_default();
            text.strip_prefix("http://").unwrap_or(text).trim_end_matches("/metrics").to_string()
        };
        let pid = line["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok());
        Member {
            role: text("role"),
            id: text("id"),
            pid: pid.unwrap_or_else(|| panic!("no pid in {line}")),
            address: text("address"),
            http: text("http"),
            metrics: text("metrics"),
        }
    }

    /// A router's base URL.
    pub fn base(&self) -> String {
        assert!(!self.http.is_empty(), "{self:?} has no HTTP API");
        format!("http://{}", self.http)
    }

    /// Those that are alive and not in `without`.
    pub(crate) fn living<'a>(members: impl Iterator<Item = &'a Member>, without: &[u32]) -> Vec<Member> {
        members.filter(|member| alive(member.pid) && !without.contains(&member.pid)).cloned().collect()
    }
}

/// A running `hypic up`.
#[derive(Debug)]
pub struct Cluster {
    /// The process `hypic up` itself.
    pub up: Process,
    /// Its members, in the order in which it told them.
    pub members: Vec<Member>,
    /// The address that it said to use.
    pub base: String,
}

impl Cluster {
    /// Start it and wait until it is ready.
    ///
    /// # Panics
    /// If that takes too long, or it tells other members than it was asked for.
    pub async fn start(options: Options) -> Cluster {
        let mut arguments: Vec<String> = ["up", "--json", "--listen", "127.0.0.1:0"].map(str::to_string).to_vec();
        for (flag, count) in
            [("--workers", options.workers), ("--combiners", options.combiners), ("--routers", options.routers)]
        {
            arguments.extend([flag.to_string(), count.to_string()]);
        }
        if options.etcd {
            arguments.push("--etcd".to_string());
        }
        arguments.extend(options.settings());
        let mut environment = options.environment.clone();
        environment.extend(options.cache.iter().map(|size| ("HYPIC__CACHE__BYTES".to_string(), size.clone())));
        arguments.extend(options.arguments.iter().cloned());
        let mut up = Process::start("hypic up", &executable(), &arguments, &environment);
        let ready = up.line(START, "its ready line", |line| !line["ready"].is_null()).await;
        let members: Vec<Member> = up
            .lines()
            .iter()
            .filter(|line| line["role"].is_string() && line["event"].is_null())
            .map(Member::read)
            .collect();
        let base = ready["ready"].as_str().expect("an address").trim_end_matches('/').to_string();
        let cluster = Cluster { up, members, base };
        let counts = ["scatter-worker", "combiner", "router"].map(|role| cluster.of(role).count());
        assert_eq!(counts, [options.workers, options.combiners, options.routers], "{:?}", cluster.up.lines());
        cluster
    }

    /// Members of a role.
    pub fn of(&self, role: &str) -> impl Iterator<Item = &Member> {
        self.members.iter().filter(move |member| member.role == role)
    }

    /// The i-th member of a role.
    pub fn member(&self, role: &str, i: usize) -> &Member {
        self.of(role).nth(i).unwrap_or_else(|| panic!("no {role} number {i}"))
    }

    /// The member with an id.
    pub fn by_id(&self, id: &str) -> &Member {
        self.members.iter().find(|m| m.id == id).unwrap_or_else(|| panic!("{id} is none of {:?}", self.members))
    }

    /// The etcd that it started.
    ///
    /// # Panics
    /// If there is none.
    pub fn etcd(&self) -> u32 {
        let is_etcd = |pid: &u32| command(*pid).as_deref() == Some("etcd");
        children(self.up.pid()).into_iter().find(is_etcd).expect("an etcd among the children of hypic up")
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
        assert_idle(&Member::living(self.members.iter(), without), limit).await;
    }
}
