//! The worker as the router sees it: a job is answered from the store, by joining a computation, or by one of its own.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;

use futures::FutureExt;
use futures::future::{BoxFuture, ready};
use hypic_cache::{Claim, EntryKey, Flight, Lead, Source, Store};
use hypic_kernels::Backend;
use hypic_model::Model;
use hypic_state::Stored;
use hypic_transport::{
    Delivered, DeliveryError, JobError, JobOutcome, JobSource, KvAhead, Parcel, PrefillJob, Scatter, Transport,
};
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

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

/// A scatter worker in this process. `P` is what its store keeps beside entries; the worker does not look into it.
/// Dropping it stops its thread after the pass at hand; jobs that it has not done fail.
pub struct Worker<B: Backend, P: Stored> {
    desk: Arc<Desk<B, P>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Where jobs are taken.
struct Desk<B: Backend, P: Stored> {
    id: String,
    store: Store<B, P>,
    transport: Arc<dyn Transport<B>>,
    backlog: Backlog,
    commands: std::sync::mpsc::Sender<Command<B>>,
    interest: Interest,
    jobs: Jobs,
}

/// How many jobs a worker computes, as its thread tells it.
#[derive(Clone, Default)]
pub(crate) struct Jobs(Arc<[AtomicU64; 2]>);

impl Jobs {
    pub fn set(&self, waiting: usize, computing: usize) {
        self.0[0].store(waiting as u64, Ordering::Relaxed);
        self.0[1].store(computing as u64, Ordering::Relaxed);
    }
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
        transport: Arc<dyn Transport<B>>,
        interest: Interest,
    ) -> std::io::Result<Self> {
        let (commands, queue) = std::sync::mpsc::channel();
        let (id, jobs) = (config.id.clone(), Jobs::default());
        let told = jobs.clone();
        let thread = std::thread::Builder::new()
            .name(id.clone())
            .spawn(move || device::Device::new(config, backend, model, queue, told).run())?;
        let desk = Desk { id, store, transport, backlog: Backlog::default(), commands, interest, jobs };
        Ok(Worker { desk: Arc::new(desk), thread: Mutex::new(Some(thread)) })
    }

    /// Jobs that wait to be computed, and jobs that are computed now.
    pub fn jobs(&self) -> (u64, u64) {
        let [waiting, computing] = &*self.desk.jobs.0;
        (waiting.load(Ordering::Relaxed), computing.load(Ordering::Relaxed))
    }

    /// Tokens of the segments that it has still to prefill.
    pub fn backlog_tokens(&self) -> u64 {
        self.desk.backlog.tokens()
    }
}

impl<B: Backend, P: Stored> Desk<B, P> {
    fn begin(self: Arc<Self>, job: PrefillJob) -> BoxFuture<'static, Result<JobOutcome, JobError>> {
        if job.held_only && !self.store.contains(job.key) {
            return ready(Err(JobError::NotHere(self.id.clone()))).boxed();
        }
        match self.store.claim(job.key, &job.tokens, job.seam) {
            Claim::Hit(entry) => {
                let delivery = self.deliver(&job, Source::Entry(entry), None);
                finish(self.id.clone(), job.cancel, delivery, ready(Ok(JobSource::Held)).boxed()).boxed()
            }
            Claim::Join(flight) => self.follow(job, flight).boxed(),
            // It was there a moment ago.
            Claim::Lead(lead) if job.held_only => {
                lead.fail("evicted while it was asked for");
                ready(Err(JobError::NotHere(self.id.clone()))).boxed()
            }
            Claim::Lead(lead) => self.lead(job, lead),
        }
    }

    fn deliver(
        &self,
        job: &PrefillJob,
        source: Source<B>,
        ahead: Option<Arc<KvAhead<B>>>,
    ) -> BoxFuture<'static, Result<Delivered, DeliveryError>> {
        let PrefillJob { key, anchor, salt, to, deadline, .. } = job.clone();
        self.transport.deliver(Parcel { to, key, anchor, salt, source, ahead, deadline })
    }

    /// Follow the making of an entry by another: a computation here, or a transfer to this store. One that fails is no
    /// answer: the job is begun anew.
    async fn follow(self: Arc<Self>, job: PrefillJob, flight: Arc<Flight<B>>) -> Result<JobOutcome, JobError> {
        let wanted = self.interest.add(job.key, job.cancel.clone());
        let delivery = self.deliver(&job, Source::Flight(flight.clone()), None);
        let worker = self.id.clone();
        let made =
            async move { flight.landed().await.map(|()| JobSource::Shared).map_err(|reason| reason.to_string()) };
        let failed = |reason| JobError::Failed { worker, reason };
        let made = made.map(|made| made.map_err(failed)).boxed();
        let done = finish(self.id.clone(), job.cancel.clone(), delivery, made).await;
        drop(wanted);
        match done {
            Err(JobError::Failed { .. }) => self.begin(job).await,
            done => done,
        }
    }

    fn lead(self: Arc<Self>, job: PrefillJob, lead: Lead<B>) -> BoxFuture<'static, Result<JobOutcome, JobError>> {
        let wanted = self.interest.add(job.key, job.cancel.clone());
        // The transfer alone keeps it: what is computed does not wait for a transfer that is slow or gone.
        let ahead = self.transport.ahead().map(Arc::new);
        let offered = ahead.as_ref().map_or_else(Weak::new, Arc::downgrade);
        let delivery = self.deliver(&job, Source::Flight(lead.flight().clone()), ahead);
        let (reply, answer) = oneshot::channel();
        let gone = JobError::Gone(self.id.clone());
        let PrefillJob { tokens, seam, anchor, cancel, .. } = job;
        let charge = self.backlog.charge(anchor.len() + tokens.len());
        let work = Work { lead, ahead: offered, tokens, seam, anchor, wanted, reply };
        // If the thread has stopped the work is dropped, and with it its lead and its reply.
        _ = self.commands.send(Command::Prefill(work));
        let computed = async move {
            let _charge = charge;
            answer.await.unwrap_or(Err(gone))
        };
        finish(self.id.clone(), cancel, delivery, computed.boxed()).boxed()
    }
}

/// Waits for an entry's being made and for its being delivered. What is computed goes on while another request wants it;
/// the delivery is this job's alone.
async fn finish(
    worker: String,
    cancel: CancellationToken,
    delivery: BoxFuture<'static, Result<Delivered, DeliveryError>>,
    made: BoxFuture<'static, Result<JobSource, JobError>>,
) -> Result<JobOutcome, JobError> {
    let both = futures::future::join(delivery, made);
    let (delivered, made) = tokio::select! {
        // Looked at last: what is done is done.
        biased;
        both = both => both,
        () = cancel.cancelled() => return Err(JobError::Cancelled),
    };
    // Why the entry was not made explains why it was not delivered.
    let source = made?;
    match delivered {
        Ok(Delivered { bytes: sent_bytes, hidden_bytes, exposed }) => {
            Ok(JobOutcome { source, sent_bytes, hidden_bytes, exposed })
        }
        Err(error) => Err(JobError::Undelivered { worker, reason: error.to_string() }),
    }
}

/// Tokens that a worker has still to prefill.
#[derive(Clone, Default)]
struct Backlog(Arc<AtomicU64>);

impl Backlog {
    fn tokens(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn charge(&self, tokens: usize) -> BacklogCharge {
        self.0.fetch_add(tokens as u64, Ordering::Relaxed);
        BacklogCharge { backlog: self.clone(), tokens: tokens as u64 }
    }
}

/// One job's share; gives it back when dropped.
struct BacklogCharge {
    backlog: Backlog,
    tokens: u64,
}

impl Drop for BacklogCharge {
    fn drop(&mut self) {
        self.backlog.0.fetch_sub(self.tokens, Ordering::Relaxed);
    }
}

impl<B: Backend, P: Stored> Scatter for Worker<B, P> {
    fn id(&self) -> &str {
        &self.desk.id
    }

    fn is_running(&self) -> bool {
        self.thread.lock().as_ref().is_some_and(|t| !t.is_finished())
    }

    fn holds(&self, key: EntryKey) -> bool {
        self.desk.store.contains(key)
    }

    fn prefill(&self, job: PrefillJob) -> BoxFuture<'static, Result<JobOutcome, JobError>> {
        self.desk.clone().begin(job)
    }
}

impl<B: Backend, P: Stored> Drop for Worker<B, P> {
    fn drop(&mut self) {
        _ = self.desk.commands.send(Command::Stop);
        if let Some(thread) = self.thread.lock().take() {
            _ = thread.join();
        }
    }
}
