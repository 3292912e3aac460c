//! The worker as the router sees it: a job is answered from the store, by joining a computation, or by one of its own.

use std::sync::Arc;
use std::thread::JoinHandle;

use futures::FutureExt;
use futures::future::BoxFuture;
use hypic_cache::{Claim, EntryKey, Flight, Source, Store};
use hypic_kernels::Backend;
use hypic_model::Model;
use hypic_state::Stored;
use hypic_transport::{Exchange, JobError, JobOutcome, JobSource, PrefillJob, Scatter};
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};

use crate::Interest;
use crate::device::{self, Command, Work};

/// Settings of a worker.
#[derive(Clone, Debug)]
pub struct WorkerConfig {
    /// Its name.
    pub id: String,
    /// Rows of a pass at most: bounds the memory of a prefill and how long a cancellation can take.
    pub chunk_rows: usize,
    /// Prefills under way at a time: bounds the memory of their states.
    pub concurrent: usize,
}

impl WorkerConfig {
    /// The defaults, for a worker of this name.
    pub fn named(id: impl Into<String>) -> Self {
        WorkerConfig { id: id.into(), chunk_rows: 1024, concurrent: 8 }
    }
}

/// A scatter worker in this process. `P` is what its store keeps beside entries; the worker does not look into it. Dropping it stops its thread after the pass at hand; jobs that it
/// has not done fail.
pub struct Worker<B: Backend, P: Stored> {
    id: String,
    store: Store<B, P>,
    exchange: Exchange<B>,
    commands: std::sync::mpsc::Sender<Command<B>>,
    interest: Interest,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl<B: Backend, P: Stored> Worker<B, P> {
    /// Start a worker on `backend`.
    ///
    /// # Errors
    /// If the system gives no thread.
    pub fn start(
        config: WorkerConfig,
        backend: B,
        model: Model<B>,
        store: Store<B, P>,
        exchange: Exchange<B>,
        interest: Interest,
    ) -> std::io::Result<Self> {
        let (commands, queue) = std::sync::mpsc::channel();
        let id = config.id.clone();
        let thread = std::thread::Builder::new()
            .name(id.clone())
            .spawn(move || device::Device::new(config, backend, model, queue).run())?;
        Ok(Worker { id, store, exchange, commands, interest, thread: Mutex::new(Some(thread)) })
    }

    fn begin(&self, job: PrefillJob) -> BoxFuture<'static, Result<JobOutcome, JobError>> {
        let PrefillJob { key, tokens, seam, anchor, transfer, cancel } = job;
        match self.store.claim(key, &tokens, seam) {
            Claim::Hit(entry) => {
                self.exchange.send(transfer, Source::Entry(entry));
                futures::future::ready(Ok(JobOutcome { source: JobSource::Held })).boxed()
            }
            Claim::Join(flight) => {
                let wanted = self.interest.add(key, cancel.clone());
                self.exchange.send(transfer, Source::Flight(flight.clone()));
                let worker = self.id.clone();
                async move {
                    let _wanted = wanted;
                    tokio::select! {
                        () = cancel.cancelled() => Err(JobError::Cancelled),
                        ended = landed(&flight) => match ended {
                            Ok(()) => Ok(JobOutcome { source: JobSource::Shared }),
                            Err(reason) => Err(JobError::Failed { worker, reason: reason.to_string() }),
                        },
                    }
                }
                .boxed()
            }
            Claim::Lead(lead) => {
                let wanted = self.interest.add(key, cancel);
                self.exchange.send(transfer, Source::Flight(lead.flight().clone()));
                let (reply, answer) = oneshot::channel();
                let gone = JobError::Gone(self.id.clone());
                let work = Work { lead, tokens, seam, anchor, wanted, reply };
                // If the thread has stopped the work is dropped, and with it its lead and its reply.
                _ = self.commands.send(Command::Prefill(work));
                async move { answer.await.unwrap_or(Err(gone)) }.boxed()
            }
        }
    }
}

impl<B: Backend, P: Stored> Scatter for Worker<B, P> {
    fn id(&self) -> &str {
        &self.id
    }

    fn is_running(&self) -> bool {
        self.thread.lock().as_ref().is_some_and(|t| !t.is_finished())
    }

    fn holds(&self, key: EntryKey, tokens: &[u32]) -> bool {
        self.store.contains(key, tokens)
    }

    fn prefill(&self, job: PrefillJob) -> BoxFuture<'static, Result<JobOutcome, JobError>> {
        self.begin(job)
    }
}

impl<B: Backend, P: Stored> Drop for Worker<B, P> {
    fn drop(&mut self) {
        _ = self.commands.send(Command::Stop);
        if let Some(thread) = self.thread.lock().take() {
            _ = thread.join();
        }
    }
}

/// Resolves when the flight has ended.
async fn landed<B: Backend>(flight: &Arc<Flight<B>>) -> Result<(), Arc<str>> {
    let news = Arc::new(Notify::new());
    let waker = news.clone();
    flight.subscribe(Arc::new(move || waker.notify_one()));
    loop {
        if flight.entry().is_some() {
            return Ok(());
        }
        if let Some(reason) = flight.failure() {
            return Err(reason);
        }
        news.notified().await;
    }
}
