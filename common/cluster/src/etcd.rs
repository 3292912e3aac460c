//! Membership kept by etcd. Owns this process's record there, under a lease that is kept alive on a thread of its own
//! so that busy threads do not let it lapse, and the view of all records. etcd may be away, forget the lease, or
//! compact what was not seen yet: the record is entered again under the same id, the list is read again, and until then
//! the last view serves. Everything is said in plain text, credentials too.

mod config;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use etcd_client::{Client, ConnectOptions, EventType, GetOptions, PutOptions, WatchOptions};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::backoff::Backoff;
use crate::dialer::causes;
use crate::membership::{MembershipError, Target, View};
use crate::record::MemberRecord;
pub use config::{EtcdConfig, EtcdCredentials};

/// The membership that etcd keeps. Dropping it lets this process's lease lapse.
#[derive(Debug)]
pub struct EtcdMembership {
    shared: Arc<Shared>,
    /// This process's record, if it has one.
    own: watch::Sender<Option<MemberRecord>>,
    request_timeout: Duration,
    _stop: DropGuard,
}

/// What the thread and the handle share.
#[derive(Debug)]
struct Shared {
    view: watch::Sender<View>,
    seen: AtomicBool,
    registered: AtomicBool,
    leaving: CancellationToken,
    left: CancellationToken,
}

impl EtcdMembership {
    pub(crate) fn start(config: EtcdConfig, own: Option<MemberRecord>) -> Result<EtcdMembership, MembershipError> {
        config.check()?;
        let failed = |error: std::io::Error| MembershipError::Etcd(format!("no thread for it: {error}"));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let shared = Arc::new(Shared {
            view: watch::Sender::new(Arc::new([])),
            seen: AtomicBool::new(false),
            registered: AtomicBool::new(false),
            leaving: CancellationToken::new(),
            left: CancellationToken::new(),
        });
        let (stop, request_timeout) = (CancellationToken::new(), config.request_timeout);
        let (stopped, used) = (stop.clone(), shared.clone());
        let own = watch::Sender::new(own);
        let record = own.subscribe();
        let work = async move {
            let session = Session { config, shared: used };
            stopped
                .run_until_cancelled(async { tokio::join!(session.keep_registered(record), session.keep_view()) })
                .await
        };
        let name = "hypic-etcd".to_owned();
        let run = move || {
            runtime.block_on(work);
            // Name look-ups may hang: they are not waited for.
            runtime.shutdown_background();
        };
        std::thread::Builder::new().name(name).spawn(run).map_err(failed)?;
        Ok(EtcdMembership { shared, own, request_timeout, _stop: stop.drop_guard() })
    }

    pub(crate) fn view(&self) -> watch::Receiver<View> {
        self.shared.view.subscribe()
    }

    pub(crate) fn seen(&self) -> bool {
        self.shared.seen.load(Ordering::Acquire)
    }

    pub(crate) fn registered(&self) -> bool {
        self.shared.registered.load(Ordering::Acquire)
    }

    pub(crate) fn update(&self, own: MemberRecord) {
        self.own.send_replace(Some(own));
    }

    pub(crate) async fn leave(&self) {
        self.shared.leaving.cancel();
        // Connecting, deleting and revoking have a request's time each.
        if timeout(self.request_timeout.saturating_mul(3), self.shared.left.cancelled()).await.is_err() {
            tracing::warn!("etcd does not answer: the record goes when its lease lapses");
        }
    }
}

/// Why work with etcd broke off.
#[derive(Debug, thiserror::Error)]
enum Trouble {
    #[error("{}", causes(.0))]
    Etcd(#[from] etcd_client::Error),
    #[error("no answer within {0:?}")]
    Silent(Duration),
    #[error("the lease is gone")]
    LeaseLost,
    #[error("the watch ended ({0})")]
    WatchEnded(String),
}

struct Session {
    config: EtcdConfig,
    shared: Arc<Shared>,
}

impl Session {
    async fn within<T>(&self, work: impl Future<Output = Result<T, etcd_client::Error>>) -> Result<T, Trouble> {
        let limit = self.config.request_timeout;
        Ok(timeout(limit, work).await.map_err(|_| Trouble::Silent(limit))??)
    }

    async fn connect(&self) -> Result<Client, Trouble> {
        let limit = self.config.request_timeout;
        let mut options = ConnectOptions::new()
            .with_connect_timeout(limit)
            .with_keep_alive(limit, limit)
            .with_keep_alive_while_idle(true)
            .with_require_leader(true);
        if let Some(EtcdCredentials { user, password }) = &self.config.credentials {
            options = options.with_user(user, password);
        }
        self.within(Client::connect(&self.config.endpoints, Some(options))).await
    }

    /// Keep the own record entered until this process leaves.
    async fn keep_registered(&self, mut own: watch::Receiver<Option<MemberRecord>>) {
        let first = own.borrow().clone();
        if let Some(record) = first {
            let key = format!("{}{}", self.config.prefix, record.id);
            let mut backoff = Backoff::new(self.config.reconnect.clone());
            let mut lease = None;
            let registering = async {
                loop {
                    let trouble = self.register(&key, &mut own, &mut lease, &mut backoff).await;
                    self.shared.registered.store(false, Ordering::Release);
                    tracing::warn!(id = %record.id, error = %trouble, "not registered in etcd, trying again");
                    sleep(backoff.next_wait()).await;
                }
            };
            tokio::select! {
                () = registering => {}
                () = self.shared.leaving.cancelled() => {}
            }
            if let Err(trouble) = self.unregister(&key, lease).await {
                tracing::warn!(id = %record.id, error = %trouble, "cannot leave etcd: the record goes with its lease");
            }
            self.shared.registered.store(false, Ordering::Release);
        }
        self.shared.left.cancel();
    }

    /// Enter the record, again when it changes, and keep its lease alive; returns when that fails.
    async fn register(
        &self,
        key: &str,
        own: &mut watch::Receiver<Option<MemberRecord>>,
        lease: &mut Option<i64>,
        backoff: &mut Backoff,
    ) -> Trouble {
        let endless = async {
            let mut client = self.connect().await?;
            let ttl = i64::try_from(self.config.lease_ttl.as_secs()).unwrap_or(i64::MAX);
            let id = self.within(client.lease_grant(ttl, None)).await?.id();
            *lease = Some(id);
            let value = |own: &mut watch::Receiver<Option<MemberRecord>>| {
                own.borrow_and_update().as_ref().map(MemberRecord::encode).unwrap_or_default()
            };
            let options = PutOptions::new().with_lease(id);
            self.within(client.put(key, value(own), Some(options.clone()))).await?;
            let (mut keeper, mut answers) = self.within(client.lease_keep_alive(id)).await?;
            self.shared.registered.store(true, Ordering::Release);
            tracing::info!(key, lease = id, "registered in etcd");
            backoff.reset();
            loop {
                tokio::select! {
                    () = sleep(self.config.lease_ttl / 3) => {}
                    // The sender lives in the handle: without it this ends as well.
                    Ok(()) = own.changed() => {
                        self.within(client.put(key, value(own), Some(options.clone()))).await?;
                    }
                }
                self.within(keeper.keep_alive()).await?;
                match self.within(answers.message()).await? {
                    Some(answer) if answer.ttl() > 0 => {}
                    Some(_) => return Err(Trouble::LeaseLost),
                    None => return Err(Trouble::WatchEnded("keep-alives of the lease".to_owned())),
                }
            }
        };
        let ended: Result<std::convert::Infallible, Trouble> = endless.await;
        match ended {
            Err(trouble) => trouble,
        }
    }

    async fn unregister(&self, key: &str, lease: Option<i64>) -> Result<(), Trouble> {
        let mut client = self.connect().await?;
        self.within(client.delete(key, None)).await?;
        if let Some(id) = lease {
            self.within(client.lease_revoke(id)).await?;
        }
        tracing::info!(key, "left etcd");
        Ok(())
    }

    /// Keep the view as etcd has it.
    async fn keep_view(&self) {
        let mut backoff = Backoff::new(self.config.reconnect.clone());
        loop {
            if let Err(trouble) = self.follow(&mut backoff).await {
                let members = self.shared.view.borrow().len();
                tracing::warn!(error = %trouble, members, "etcd lost, the last view serves");
            }
            sleep(backoff.next_wait()).await;
        }
    }

    /// List the members, then follow changes from the list's revision on; returns when that breaks off, for whatever
    /// reason: changes that were missed or compacted meanwhile show in the next list.
    async fn follow(&self, backoff: &mut Backoff) -> Result<(), Trouble> {
        let mut client = self.connect().await?;
        let prefix = self.config.prefix.as_str();
        let list = self.within(client.get(prefix, Some(GetOptions::new().with_prefix()))).await?;
        let revision = list.header().map_or(0, |header| header.revision());
        let mut members = Members::default();
        for pair in list.kvs() {
            members.set(prefix, pair.key(), pair.value());
        }
        self.publish(&members);
        self.shared.seen.store(true, Ordering::Release);
        let options = WatchOptions::new().with_prefix().with_start_revision(revision + 1);
        let mut changes = self.within(client.watch(prefix, Some(options))).await?;
        backoff.reset();
        loop {
            let Some(change) = changes.message().await? else {
                return Err(Trouble::WatchEnded("closed".to_owned()));
            };
            if change.canceled() {
                let (reason, compacted) = (change.cancel_reason(), change.compact_revision());
                return Err(Trouble::WatchEnded(format!("{reason}; compacted up to {compacted}")));
            }
            for event in change.events() {
                let Some(pair) = event.kv() else { continue };
                match event.event_type() {
                    EventType::Put => members.set(prefix, pair.key(), pair.value()),
                    EventType::Delete => members.remove(pair.key()),
                }
            }
            self.publish(&members);
        }
    }

    fn publish(&self, members: &Members) {
        let view: View = members.0.values().cloned().collect();
        self.shared.view.send_if_modified(|current| {
            let changed = *current != view;
            *current = view;
            changed
        });
    }
}

/// The records as etcd has them, by key.
#[derive(Debug, Default)]
struct Members(BTreeMap<Vec<u8>, Target>);

impl Members {
    fn set(&mut self, prefix: &str, key: &[u8], value: &[u8]) {
        let shown = || String::from_utf8_lossy(key).into_owned();
        let record = match MemberRecord::decode(value) {
            Ok(record) => record,
            Err(error) => {
                tracing::warn!(key = shown(), %error, "a record in etcd is left out");
                return self.remove(key);
            }
        };
        if key.strip_prefix(prefix.as_bytes()) != Some(record.id.as_str().as_bytes()) {
            tracing::warn!(key = shown(), id = %record.id, "a record in etcd under another id's key is left out");
            return self.remove(key);
        }
        let target = Target { role: record.role, addresses: record.addresses.clone(), record: Some(record) };
        self.0.insert(key.to_owned(), target);
    }

    fn remove(&mut self, key: &[u8]) {
        self.0.remove(key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Role;

    #[test]
    fn records_that_make_no_sense_are_left_out() {
        let record = MemberRecord {
            fingerprint: Some([0; 32]),
            dtype: "f32".into(),
            kernel_set: "portable-v1".into(),
            ..MemberRecord::loading("combiner-1".into(), Role::Combiner, vec!["h:1".into()], 1)
        };
        let mut members = Members::default();
        members.set("/m/", b"/m/combiner-2", &record.encode());
        assert!(members.0.is_empty());
        members.set("/m/", b"/m/combiner-1", &record.encode());
        assert_eq!(members.0.len(), 1);
        members.set("/m/", b"/m/combiner-1", b"garbage");
        assert!(members.0.is_empty());
    }
}
