//! Scatter workers that fail in one of the ways in which workers fail, around real ones.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use hypic_cache::{Claim, EntryKey, Lead, Source, Store, StoreConfig};
use hypic_combiner::PrefixState;
use hypic_kernels::Cpu;
use hypic_state::{PartSource, PartState};
use hypic_transport::{Delivery, Exchange, JobError, JobOutcome, PrefillJob, Scatter, TransferId};

/// How a job fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// At once, without a part.
    AtOnce,
    /// After the first layers' parts have been sent.
    Halfway,
    /// All parts are sent, and then it says that it failed.
    AfterAll,
    /// It never answers, and sends nothing.
    Silence,
    /// It sends everything, and never says that it has.
    Mute,
    /// It does its job, after a while.
    Late(Duration),
}

/// A worker whose first jobs fail.
pub struct Failing {
    inner: Arc<dyn Scatter>,
    exchange: Exchange<Cpu>,
    failure: Failure,
    failures_left: AtomicUsize,
    /// Jobs it was given.
    jobs: AtomicUsize,
}

impl Failing {
    /// `inner`, with its first `times` jobs failing.
    pub fn new(inner: Arc<dyn Scatter>, exchange: &Exchange<Cpu>, failure: Failure, times: usize) -> Arc<Self> {
        Arc::new(Failing {
            inner,
            exchange: exchange.clone(),
            failure,
            failures_left: AtomicUsize::new(times),
            jobs: AtomicUsize::new(0),
        })
    }

    /// Jobs that it was given.
    pub fn jobs(&self) -> usize {
        self.jobs.load(Ordering::SeqCst)
    }
}

impl Scatter for Failing {
    fn id(&self) -> &str {
        self.inner.id()
    }

    fn is_running(&self) -> bool {
        self.inner.is_running()
    }

    fn holds(&self, key: EntryKey) -> bool {
        self.inner.holds(key)
    }

    fn prefill(&self, job: PrefillJob) -> BoxFuture<'static, Result<JobOutcome, JobError>> {
        self.jobs.fetch_add(1, Ordering::SeqCst);
        let left = self.failures_left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1));
        if left.is_err() {
            return self.inner.prefill(job);
        }
        let failed = JobError::Failed { worker: self.id().to_string(), reason: "a test wants it so".to_string() };
        let (inner, exchange) = (self.inner.clone(), self.exchange.clone());
        match self.failure {
            Failure::AtOnce => async move { Err(failed) }.boxed(),
            Failure::Silence => std::future::pending().boxed(),
            Failure::Mute => async move {
                _ = inner.prefill(job).await;
                std::future::pending().await
            }
            .boxed(),
            Failure::Late(after) => async move {
                tokio::time::sleep(after).await;
                inner.prefill(job).await
            }
            .boxed(),
            Failure::Halfway | Failure::AfterAll => {
                let all = self.failure == Failure::AfterAll;
                async move {
                    send_some(&*inner, &exchange, job, all).await?;
                    Err(failed)
                }
                .boxed()
            }
        }
    }
}

/// Send the first half of the layers' parts, or all, in a flight that then fails.
async fn send_some(worker: &dyn Scatter, exchange: &Exchange<Cpu>, job: PrefillJob, all: bool) -> Result<(), JobError> {
    let own = TransferId::random();
    let incoming = exchange.open(own.id);
    let PrefillJob { key, tokens, seam, to, .. } = job.clone();
    worker.prefill(PrefillJob { to: Delivery { transfer: own, ..to.clone() }, ..job }).await?;
    let mut parts = Vec::new();
    while let PartState::Ready(part) = incoming.part(parts.len()) {
        parts.push(part);
    }
    assert!(parts.len() > 1, "a whole entry");
    let lead = lead(key, &tokens, seam);
    // A request that has ended meanwhile wants nothing.
    _ = exchange.send(to.transfer, Source::Flight(lead.flight().clone()));
    let count = if all { parts.len() } else { parts.len() / 2 };
    for (layer, part) in parts.into_iter().take(count).enumerate() {
        lead.publish(layer, part);
    }
    // Time for the combiner to take up what is there.
    tokio::time::sleep(Duration::from_millis(30)).await;
    lead.fail("a test wants it so");
    Ok(())
}

/// A computation that nobody else knows of.
fn lead(key: EntryKey, tokens: &Arc<[u32]>, seam: usize) -> Lead<Cpu> {
    let store: Store<Cpu, PrefixState<Cpu>> = Store::new(StoreConfig::default());
    match store.claim(key, tokens, seam) {
        Claim::Lead(lead) => lead,
        Claim::Hit(_) | Claim::Join(_) => unreachable!("the store is empty"),
    }
}
