//! A real etcd of its own, found on PATH, and what is done to it. What can go wrong: there is none on PATH, or another
//! program takes a port between its choice and its use; both fail the test.

use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use etcd_client::{Client, CompactionOptions, ConnectOptions, GetOptions, KeyValue, Permission};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::wait::until;

/// What the keys of members begin with.
pub const MEMBERS: &str = "/hypic/members/";
/// What it gets to answer.
const START: Duration = Duration::from_secs(20);
/// What one request of a test may take.
const REQUEST: Duration = Duration::from_secs(2);

/// A running etcd; killed when dropped.
#[derive(Debug)]
pub struct Etcd {
    child: Child,
    clients: SocketAddr,
    peers: SocketAddr,
    endpoint: String,
    user: Option<(String, String)>,
    data: TempDir,
}

impl Etcd {
    /// Start it, empty.
    ///
    /// # Panics
    /// If it does not answer in time.
    pub async fn start() -> Etcd {
        let data = tempfile::tempdir().expect("room on disk");
        let ports = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").expect("a free port"));
        let [clients, peers] = ports.map(|port| port.local_addr().expect("an address"));
        let child = spawn(data.path(), clients, peers);
        let etcd = Etcd { child, clients, peers, endpoint: clients.to_string(), user: None, data };
        etcd.wait_for_answers().await;
        etcd
    }

    /// Kill it. What it holds stays on disk.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Start it again where it was, with what it held; killed first if it still runs.
    ///
    /// # Panics
    /// If it does not answer in time.
    pub async fn restart(&mut self) {
        self.kill();
        self.child = spawn(self.data.path(), self.clients, self.peers);
        self.wait_for_answers().await;
    }

    /// HOST:PORT for clients.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Send it a signal while it runs.
    pub fn signal(&self, signal: Signal) {
        let _ = kill_process(Pid::from_child(&self.child), signal);
    }

    async fn wait_for_answers(&self) {
        until(START, "etcd answers", async || self.reach().await?.get("any", None).await.ok()).await;
    }

    async fn reach(&self) -> Option<Client> {
        let mut options = ConnectOptions::new().with_timeout(REQUEST);
        if let Some((name, password)) = &self.user {
            options = options.with_user(name, password);
        }
        Client::connect([&self.endpoint], Some(options)).await.ok()
    }

    /// A connection to it, as root if it is [protected](Self::protect).
    ///
    /// # Panics
    /// If it does not answer.
    pub async fn client(&self) -> Client {
        self.reach().await.expect("etcd answers")
    }

    /// From now on, only `user` may read and write where members stand, and a root of the same password everything.
    ///
    /// # Panics
    /// If it refuses.
    pub async fn protect(&mut self, user: &str, password: &str) {
        let mut client = self.client().await;
        client.user_add("root", password, None).await.expect("adds root");
        client.role_add("root").await.expect("adds the role of root");
        client.user_grant_role("root", "root").await.expect("grants it");
        client.user_add(user, password, None).await.expect("adds a user");
        client.role_add("member").await.expect("adds a role");
        let all = Permission::read_write(MEMBERS).with_prefix();
        client.role_grant_permission("member", all).await.expect("grants");
        client.user_grant_role(user, "member").await.expect("grants");
        client.auth_enable().await.expect("asks for users");
        self.user = Some(("root".to_string(), password.to_string()));
    }

    /// Ids of the members that stand in it, with their leases; `None` if it does not answer.
    pub async fn members(&self) -> Option<Vec<(String, i64)>> {
        let found = self.reach().await?.get(MEMBERS, Some(GetOptions::new().with_prefix())).await.ok()?;
        let member = |pair: &KeyValue| {
            let key = String::from_utf8_lossy(pair.key()).into_owned();
            (key.trim_start_matches(MEMBERS).to_string(), pair.lease())
        };
        Some(found.kvs().iter().map(member).collect())
    }

    /// As [`members`](Self::members), once they are so many.
    ///
    /// # Panics
    /// If they are not in time.
    pub async fn wait_for_members(&self, count: usize) -> Vec<(String, i64)> {
        let all = async || self.members().await.filter(|members| members.len() == count);
        until(START, &format!("{count} members stand in etcd"), all).await
    }

    /// Take a lease away.
    ///
    /// # Panics
    /// If it does not answer.
    pub async fn revoke(&self, lease: i64) {
        self.client().await.lease_revoke(lease).await.expect("revokes");
    }

    /// Write so often, and forget everything before the last time.
    ///
    /// # Panics
    /// If it does not answer.
    pub async fn write_and_compact(&self, times: usize) {
        let mut client = self.client().await;
        let mut revision = 0;
        for i in 0..times {
            let key = format!("{MEMBERS}nobody");
            let put = client.put(key.as_str(), format!("no record {i}"), None).await.expect("writes");
            revision = put.header().expect("a header").revision();
            client.delete(key.as_str(), None).await.expect("deletes");
        }
        self.compact(revision).await;
    }

    /// Forget, on disk too, everything before `revision`.
    ///
    /// # Panics
    /// If it does not answer.
    pub async fn compact(&self, revision: i64) {
        let physical = CompactionOptions::new().with_physical();
        self.client().await.compact(revision, Some(physical)).await.expect("compacts");
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.kill();
    }
}

fn spawn(data: &Path, clients: SocketAddr, peers: SocketAddr) -> Child {
    let (url, peer_url) = (format!("http://{clients}"), format!("http://{peers}"));
    Command::new("etcd")
        .args(["--name", "test", "--data-dir"])
        .arg(data)
        .args(["--listen-client-urls", &url, "--advertise-client-urls", &url, "--listen-peer-urls", &peer_url])
        .args(["--initial-advertise-peer-urls", &peer_url, "--initial-cluster", &format!("test={peer_url}")])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("no etcd on PATH: install Debian's package etcd-server")
}
