//! Members that do what a test tells them.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use hypic_cache::{EntryKey, Fingerprint, KeySpace, PrefixKey};
use hypic_state::DType;
use hypic_transport::{
    Combine, CombineLoad, JobError, JobOutcome, JobSource, Plan, PrefillJob, PrefixHit, Scatter, ToldBacklog,
};
use parking_lot::Mutex;
use tokio::sync::mpsc;

/// What a member does with a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Act {
    Compute(Duration),
    Send,
    Join,
    Fail,
    NotHere,
    Gone,
    Undelivered,
    Silence,
}

/// An outcome of a worker that is elsewhere.
fn sent(source: JobSource) -> JobOutcome {
    JobOutcome { sent_bytes: 1 << 20, ..JobOutcome::here(source) }
}

impl Act {
    fn run(self, worker: &str) -> BoxFuture<'static, Result<JobOutcome, JobError>> {
        let (worker, reason) = (worker.to_owned(), "a test wants it so".to_owned());
        let failed = match self {
            Act::Compute(takes) => {
                return async move {
                    let started = tokio::time::Instant::now().into_std();
                    tokio::time::sleep(takes).await;
                    let ended = tokio::time::Instant::now().into_std();
                    Ok(JobOutcome::here(JobSource::Computed { started, ended, busy: takes }))
                }
                .boxed();
            }
            Act::Send => return async { Ok(sent(JobSource::Held)) }.boxed(),
            Act::Join => return async { Ok(sent(JobSource::Shared)) }.boxed(),
            Act::Silence => return std::future::pending().boxed(),
            Act::Fail => JobError::Failed { worker, reason },
            Act::NotHere => JobError::NotHere(worker),
            Act::Gone => JobError::Gone(worker),
            Act::Undelivered => JobError::Undelivered { worker, reason },
        };
        async move { Err(failed) }.boxed()
    }
}

/// A worker.
pub(crate) struct TestWorker {
    pub id: String,
    pub running: AtomicBool,
    /// Tokens that it tells it has still to prefill.
    pub backlog: AtomicU64,
    pub holds: Mutex<HashSet<EntryKey>>,
    /// What it does with its next jobs; after that it computes in a millisecond.
    pub acts: Mutex<VecDeque<Act>>,
    pub jobs: Mutex<Vec<PrefillJob>>,
}

impl TestWorker {
    pub fn new(id: impl Into<String>, acts: &[Act]) -> Arc<Self> {
        Arc::new(TestWorker {
            id: id.into(),
            running: AtomicBool::new(true),
            backlog: AtomicU64::new(0),
            holds: Mutex::default(),
            acts: Mutex::new(acts.iter().copied().collect()),
            jobs: Mutex::default(),
        })
    }

    pub fn job_count(&self) -> usize {
        self.jobs.lock().len()
    }
}

fn next(acts: &Mutex<VecDeque<Act>>) -> Act {
    acts.lock().pop_front().unwrap_or(Act::Compute(Duration::from_millis(1)))
}

impl Scatter for TestWorker {
    fn id(&self) -> &str {
        &self.id
    }

    fn is_running(&self) -> bool {
        self.running.load(Ordering::SeqCst)
    }

    fn holds(&self, key: EntryKey) -> bool {
        self.holds.lock().contains(&key)
    }

    fn backlog(&self) -> Option<ToldBacklog> {
        let heard = tokio::time::Instant::now().into_std();
        Some(ToldBacklog { tokens: self.backlog.load(Ordering::SeqCst), heard })
    }

    fn prefill(&self, job: PrefillJob) -> BoxFuture<'static, Result<JobOutcome, JobError>> {
        self.jobs.lock().push(job);
        next(&self.acts).run(&self.id)
    }
}

/// A combiner: plans are handed to the test. It keeps every prefix state that it is told to, without computing any.
pub(crate) struct TestCombiner {
    pub id: String,
    pub running: AtomicBool,
    pub load: Mutex<CombineLoad>,
    pub holds: Mutex<HashSet<EntryKey>>,
    /// Root, length, exact tokens and key of each state.
    pub kept: Mutex<Vec<(PrefixKey, usize, usize, PrefixKey)>>,
    /// Bytes of a state, and the budget.
    pub room: (usize, usize),
    pub acts: Mutex<VecDeque<Act>>,
    pub jobs: Mutex<Vec<PrefillJob>>,
    plans: mpsc::UnboundedSender<Plan>,
    taken: tokio::sync::Mutex<mpsc::UnboundedReceiver<Plan>>,
}

impl TestCombiner {
    pub fn new(id: impl Into<String>) -> Arc<Self> {
        Self::with_room(id, (1, 1 << 20))
    }

    pub fn with_room(id: impl Into<String>, room: (usize, usize)) -> Arc<Self> {
        let (plans, taken) = mpsc::unbounded_channel();
        Arc::new(TestCombiner {
            id: id.into(),
            running: AtomicBool::new(true),
            load: Mutex::default(),
            holds: Mutex::default(),
            kept: Mutex::default(),
            room,
            acts: Mutex::default(),
            jobs: Mutex::default(),
            plans,
            taken: tokio::sync::Mutex::new(taken),
        })
    }

    pub fn keep(&self, plan: &Plan, exact: usize) {
        let states = plan.saves.iter().map(|s| (plan.root, s.position, exact.min(s.position), s.key));
        self.kept.lock().extend(states);
    }

    /// The next plan that it gets.
    pub async fn plan(&self) -> Plan {
        let next = async { self.taken.lock().await.recv().await };
        tokio::time::timeout(Duration::from_secs(600), next).await.expect("a plan").expect("open")
    }
}

impl Combine for TestCombiner {
    fn id(&self) -> &str {
        &self.id
    }

    fn is_running(&self) -> bool {
        self.running.load(Ordering::SeqCst)
    }

    fn load(&self) -> CombineLoad {
        *self.load.lock()
    }

    fn holds(&self, key: EntryKey) -> bool {
        self.holds.lock().contains(&key)
    }

    fn prefix_lengths(&self, root: PrefixKey) -> Vec<usize> {
        let mut lengths: Vec<usize> = self.kept.lock().iter().filter(|s| s.0 == root).map(|s| s.1).collect();
        lengths.sort_unstable();
        lengths.dedup();
        lengths
    }

    fn prefix(&self, keys: &[PrefixKey]) -> Option<PrefixHit> {
        let kept = self.kept.lock();
        let find = |key: &PrefixKey| kept.iter().find(|s| s.3 == *key);
        let &(_, tokens, exact, key) = keys.iter().find_map(find)?;
        Some(PrefixHit { key, tokens, exact })
    }

    fn prefix_room(&self, _: usize) -> (usize, usize) {
        self.room
    }

    fn generate(&self, plan: Plan) {
        self.plans.send(plan).expect("the test listens");
    }

    fn prefill(&self, job: PrefillJob) -> BoxFuture<'static, Result<JobOutcome, JobError>> {
        self.jobs.lock().push(job);
        next(&self.acts).run(&self.id)
    }
}

/// The keys of tests.
pub(crate) fn space() -> KeySpace {
    KeySpace::new(Fingerprint([0; 32]), DType::F32)
}
