//! The combiner as the router sees it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;
use std::time::Duration;

use futures::future::BoxFuture;
use hypic_cache::{EntryKey, PrefixKey, Source, Store, StoreConfig};
use hypic_kernels::Backend;
use hypic_model::{Model, ModelInfo};
use hypic_transport::{
    Combine, CombineError, CombineLoad, Exchange, GenerationEvent, Incoming, JobError, JobOutcome, Plan, PrefillJob,
    PrefixHit, Scatter, SegmentBody,
};

use crate::device::{Command, Device, Setup, Waking};
use crate::prefix::{Lengths, PrefixState};

/// Settings of a combiner.
#[derive(Clone, Debug)]
pub struct CombinerConfig {
    /// Its name.
    pub id: String,
    /// Rows of a prompt's pass at most.
    pub chunk_rows: usize,
    /// Answers under way at a time, prompts included.
    pub max_sequences: usize,
    /// Requests that may wait for a place; more are refused.
    pub max_waiting: usize,
    /// Time for prompts until answers (which decode one step) and deadlines have their turn.
    pub prompt_slice: Duration,
    /// How often it looks for cancellations and deadlines while it waits for parts.
    pub poll: Duration,
}

impl CombinerConfig {
    /// The defaults, for a combiner of this name.
    pub fn named(id: impl Into<String>) -> Self {
        CombinerConfig {
            id: id.into(),
            chunk_rows: 1024,
            max_sequences: 256,
            max_waiting: 1024,
            prompt_slice: Duration::from_millis(20),
            poll: Duration::from_millis(10),
        }
    }
}

/// What a combiner has to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CombinerLoad {
    /// Requests that wait for a place.
    pub waiting: usize,
    /// Answers under way, prompts included.
    pub sequences: usize,
    /// Of those, the ones whose prompt is not done.
    pub prefilling: usize,
    /// Bytes of their running states.
    pub state_bytes: usize,
}

/// The load as the device's thread tells it.
#[derive(Default)]
pub(crate) struct Gauges {
    pub waiting: AtomicUsize,
    pub sequences: AtomicUsize,
    pub prefilling: AtomicUsize,
    pub state_bytes: AtomicUsize,
}

/// A combiner in this process. Dropping it stops its thread after the layer at hand; plans that it has
/// not carried out fail.
pub struct Combiner<B: Backend> {
    id: String,
    store: Store<B, PrefixState<B>>,
    lengths: Lengths,
    exchange: Exchange<B>,
    last_resort: Arc<dyn Scatter>,
    commands: Sender<Command<B>>,
    gauges: Arc<Gauges>,
    prefix_room: PrefixRoom,
    thread: Option<JoinHandle<()>>,
}

/// Sizes that decide how many prefix states a prompt may leave.
struct PrefixRoom {
    fixed: usize,
    per_token: usize,
    budget: usize,
}

impl<B: Backend> Combiner<B> {
    /// Start a combiner on `backend`. `store` is its entries and prefix states, with the settings it was made with;
    /// `last_resort` computes entries into that store, and delivers them to `exchange`, when no worker can.
    ///
    /// # Errors
    /// If the system gives no thread.
    pub fn start(
        config: CombinerConfig,
        backend: B,
        model: Model<B>,
        store: Store<B, PrefixState<B>>,
        store_config: StoreConfig,
        exchange: Exchange<B>,
        last_resort: Arc<dyn Scatter>,
    ) -> std::io::Result<Self> {
        let (commands, queue) = std::sync::mpsc::channel();
        let (lengths, gauges) = (Lengths::default(), Arc::new(Gauges::default()));
        let info = ModelInfo::of(model.spec(), model.dtype());
        let (fixed, per_token) = (info.sequence_bytes, info.kv_bytes_per_token);
        let prefix_room = PrefixRoom { fixed, per_token, budget: store_config.capacity_bytes };
        let waking = Waking { pending: Arc::new(AtomicBool::new(false)), commands: commands.clone() };
        let id = config.id.clone();
        let (shared, book, told) = (store.clone(), lengths.clone(), gauges.clone());
        let setup = Setup { config, backend, model, store: shared, lengths: book, gauges: told };
        let device = Device::new(setup, queue, waking);
        let thread = std::thread::Builder::new().name(id.clone()).spawn(move || device.run())?;
        let thread = Some(thread);
        Ok(Combiner { id, store, lengths, exchange, last_resort, commands, gauges, prefix_room, thread })
    }

    /// What it has to do now.
    pub fn load(&self) -> CombinerLoad {
        CombinerLoad {
            waiting: self.gauges.waiting.load(Ordering::Relaxed),
            sequences: self.gauges.sequences.load(Ordering::Relaxed),
            prefilling: self.gauges.prefilling.load(Ordering::Relaxed),
            state_bytes: self.gauges.state_bytes.load(Ordering::Relaxed),
        }
    }

    /// Bytes of a prefix state of no tokens, bytes that each token adds, and bytes that all may take.
    pub fn prefix_sizes(&self) -> (usize, usize, usize) {
        (self.prefix_room.fixed, self.prefix_room.per_token, self.prefix_room.budget)
    }

    /// Open the plan's transfers, connect those whose entries are here, and tell which should be and are not.
    fn connect(&self, plan: &Plan) -> Vec<Option<Incoming<B>>> {
        let mut transfers = Vec::with_capacity(plan.segments.len());
        for (index, segment) in plan.segments.iter().enumerate() {
            let SegmentBody::Entry { key, transfer, held, .. } = segment.body else {
                transfers.push(None);
                continue;
            };
            transfers.push(Some(self.exchange.open(transfer.id)));
            if !held {
                continue;
            }
            match self.store.get(key, &segment.tokens) {
                Some(entry) => {
                    // A transfer that was opened a moment ago takes its first source.
                    _ = self.exchange.send(transfer, Source::Entry(entry));
                }
                None => _ = plan.events.send(GenerationEvent::Missing(index)),
            }
        }
        transfers
    }
}

impl<B: Backend> Combine for Combiner<B> {
    fn id(&self) -> &str {
        &self.id
    }

    fn is_running(&self) -> bool {
        self.thread.as_ref().is_some_and(|t| !t.is_finished())
    }

    fn prefix_lengths(&self, root: PrefixKey) -> Vec<usize> {
        self.lengths.of(root)
    }

    fn load(&self) -> CombineLoad {
        let CombinerLoad { waiting, sequences, .. } = Combiner::load(self);
        CombineLoad { waiting, sequences }
    }

    fn holds(&self, key: EntryKey) -> bool {
        self.store.contains(key)
    }

    fn prefix(&self, keys: &[PrefixKey]) -> Option<PrefixHit> {
        let (index, state) = self.store.longest_prefix(keys.iter().copied())?;
        Some(PrefixHit { key: keys[index], tokens: state.tokens, exact: state.exact })
    }

    fn prefix_room(&self, tokens: usize) -> (usize, usize) {
        (self.prefix_room.fixed + tokens * self.prefix_room.per_token, self.prefix_room.budget)
    }

    fn generate(&self, plan: Plan) {
        let events = plan.events.clone();
        let transfers = self.connect(&plan);
        if self.commands.send(Command::Generate(Box::new(plan), transfers)).is_err() {
            _ = events.send(GenerationEvent::Failed(CombineError::ShuttingDown));
        }
    }

    fn prefill(&self, job: PrefillJob) -> BoxFuture<'static, Result<JobOutcome, JobError>> {
        self.last_resort.prefill(job)
    }
}

impl<B: Backend> Drop for Combiner<B> {
    fn drop(&mut self) {
        _ = self.commands.send(Command::Stop);
        if let Some(thread) = self.thread.take() {
            _ = thread.join();
        }
    }
}
