//! An etcd for one run: on free loopback ports, with its data in a temporary folder. Ports are chosen before etcd binds
//! them, so another program may take one in between: then etcd ends, and other ports are tried.

use std::ffi::{OsStr, OsString};
use std::net::TcpListener;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tempfile::TempDir;
use tokio::net::TcpStream;
use tokio::process::Child;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::process::{Order, bound, signal};

/// Time for etcd to answer.
const START: Duration = Duration::from_secs(20);
/// Between two looks.
const LOOK: Duration = Duration::from_millis(50);
/// Starts with other ports at most.
const ATTEMPTS: usize = 3;

/// A running etcd.
pub(super) struct Etcd {
    child: Child,
    endpoint: String,
    _data: TempDir,
}

impl Etcd {
    pub async fn start() -> Result<Self> {
        let paths = std::env::var_os("PATH").unwrap_or_default();
        let Some(program) = std::env::split_paths(&paths).map(|dir| dir.join("etcd")).find(|file| file.is_file())
        else {
            bail!("--etcd: there is no etcd on the PATH: install it (Debian: etcd-server), or leave --etcd out");
        };
        for _ in 0..ATTEMPTS {
            if let Some(etcd) = Self::attempt(program.as_os_str()).await? {
                return Ok(etcd);
            }
        }
        bail!("{} does not start (see the log above)", program.display())
    }

    /// `None` if it ended.
    async fn attempt(program: &OsStr) -> Result<Option<Self>> {
        let data = tempfile::Builder::new().prefix("hypic-etcd-").tempdir().context("no room for etcd's data")?;
        // Held together, so that they differ.
        let free = || TcpListener::bind("127.0.0.1:0").and_then(|l| Ok((l.local_addr()?, l)));
        let (client, peer) = (free().context("no free port")?, free().context("no free port")?);
        let (client, peer) = (client.0, peer.0);
        let (client_url, peer_url) = (format!("http://{client}"), format!("http://{peer}"));
        let mut args: Vec<OsString> = vec!["--data-dir".into(), data.path().into()];
        for (flag, value) in [
            ("--name", "hypic"),
            ("--listen-client-urls", &client_url),
            ("--advertise-client-urls", &client_url),
            ("--listen-peer-urls", &peer_url),
            ("--initial-advertise-peer-urls", &peer_url),
            ("--initial-cluster", &format!("hypic={peer_url}")),
        ] {
            args.extend([flag.into(), value.into()]);
        }
        let mut child = bound(program, &args)?.stdout(Stdio::null()).spawn().context("cannot start etcd")?;
        let answers = async {
            loop {
                if child.try_wait()?.is_some() {
                    return Ok::<bool, std::io::Error>(false);
                }
                if TcpStream::connect(client).await.is_ok() {
                    return Ok(true);
                }
                sleep(LOOK).await;
            }
        };
        let Ok(answers) = timeout(START, answers).await else {
            bail!("etcd does not answer at {client} within {START:?}");
        };
        Ok(answers?.then(|| Etcd { child, endpoint: client.to_string(), _data: data }))
    }

    /// HOST:PORT for clients.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// End it, by force at the deadline.
    pub async fn end(mut self, deadline: Instant) {
        signal(&self.child, Order::Terminate);
        if timeout_at(deadline, self.child.wait()).await.is_err() {
            signal(&self.child, Order::Kill);
            let _ = self.child.wait().await;
        }
    }
}
