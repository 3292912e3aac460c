//! The interfaces of scatter workers and combiners, as the router sees them, and their messages.
//!
//! The messages are those of proto/'s internal services: a role in this process and one behind a connection implement
//! the same traits. What a role holds is asked synchronously: a remote one answers from the router's directory, which
//! may be stale, so every use of an answer has a way back ([`JobError::NotHere`], [`GenerationEvent::Missing`],
//! [`CombineError::StalePrefix`]).

use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use hypic_cache::{EntryKey, PrefixKey, PrefixKind};
use hypic_state::ComposeRule;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::{SamplingParams, TransferId};

/// A segment whose entry is wanted, and where its parts go.
#[derive(Clone, Debug)]
pub struct PrefillJob {
    /// Key of its entry.
    pub key: EntryKey,
    /// All its token ids, seam included.
    pub tokens: Arc<[u32]>,
    /// Width of the seam.
    pub seam: usize,
    /// Context before it; empty for none.
    pub anchor: Arc<[u32]>,
    /// What its key is salted with; empty for nothing.
    pub salt: Arc<[u8]>,
    /// Where the parts go.
    pub to: Delivery,
    /// Only if it is held already.
    pub held_only: bool,
    /// Names the request, in logs and traces.
    pub request: Arc<str>,
    /// When the entry must be there.
    pub deadline: Option<Instant>,
    /// The request no longer wants it. The work goes on while another request does.
    pub cancel: CancellationToken,
}

/// Where the parts of an entry go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delivery {
    /// Id of the combiner.
    pub combiner: Arc<str>,
    /// The attempt.
    pub transfer: TransferId,
}

/// How a job was done.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct JobOutcome {
    /// Where the entry came from.
    pub source: JobSource,
    /// Bytes that were sent; 0 within one process.
    pub sent_bytes: u64,
    /// Those of them that were on their way before the last part was final.
    pub hidden_bytes: u64,
    /// From the last part's being final until the combiner had it.
    pub exposed: Duration,
}

impl JobOutcome {
    /// An outcome within one process, where nothing is sent.
    pub fn here(source: JobSource) -> Self {
        JobOutcome { source, sent_bytes: 0, hidden_bytes: 0, exposed: Duration::ZERO }
    }
}

/// Where a worker had an entry from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum JobSource {
    /// It computed it.
    Computed {
        /// When it began.
        started: Instant,
        /// When it was done.
        ended: Instant,
        /// Its share of the device's time.
        busy: Duration,
    },
    /// It held it.
    Held,
    /// Another request was having it computed already.
    Shared,
}

/// Why a job was not done.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JobError {
    /// Nobody wants it any more.
    #[error("cancelled")]
    Cancelled,
    /// It was asked for only if held, and is not.
    #[error("worker {0} does not hold the entry")]
    NotHere(String),
    /// The worker stops, or is gone.
    #[error("worker {0} is gone")]
    Gone(String),
    /// Its deadline has passed.
    #[error("worker {0} did not deliver in time")]
    Late(String),
    /// The computation failed.
    #[error("prefill failed on worker {worker}: {reason}")]
    Failed {
        /// Which worker.
        worker: String,
        /// Why.
        reason: String,
    },
    /// The entry is there, but did not get to the combiner.
    #[error("worker {worker} could not deliver to the combiner: {reason}")]
    Undelivered {
        /// Which worker.
        worker: String,
        /// Why.
        reason: String,
    },
}

/// What a scatter worker told of its backlog.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ToldBacklog {
    /// Tokens that it had still to prefill, for whichever router.
    pub tokens: u64,
    /// When that was heard. It was so a little earlier, by the time that a message takes, and may be out of date since.
    pub heard: Instant,
}

/// A scatter worker.
pub trait Scatter: Send + Sync {
    /// Its name: unique among all members, never reused.
    fn id(&self) -> &str;

    /// Whether it takes jobs.
    fn is_running(&self) -> bool;

    /// Whether it holds the entry `key`, as far as is known.
    fn holds(&self, key: EntryKey) -> bool;

    /// What it told last of its backlog; `None` if it does not tell. Must not block.
    fn backlog(&self) -> Option<ToldBacklog> {
        None
    }

    /// Have a segment's entry sent to the job's destination. The parts begin to flow before this resolves; it
    /// resolves when the destination has the entry, or will not get it from here.
    fn prefill(&self, job: PrefillJob) -> BoxFuture<'static, Result<JobOutcome, JobError>>;
}

/// What a combiner shall do.
pub struct Plan {
    /// Names the request, in logs and traces; unique.
    pub request: Arc<str>,
    /// When the request came.
    pub arrived: Instant,
    /// The state to start from.
    pub resume: Option<PrefixHit>,
    /// The segments behind that state, in order.
    pub segments: Vec<PlanSegment>,
    /// The rows behind the last segment that the resumed state does not cover; at least one.
    pub query: Vec<u32>,
    /// Rule of composition.
    pub rule: ComposeRule,
    /// Key of the empty prompt under the settings of this one; see [`Combine::prefix_lengths`].
    pub root: PrefixKey,
    /// Where to keep prefix states, by ascending position, none at or before the resumed state.
    pub saves: Vec<SavePoint>,
    /// The answers.
    pub choices: Vec<PlanChoice>,
    /// All token ids of the prompt, for penalties; empty if no penalty asks for it.
    pub prompt_ids: Vec<u32>,
    /// Tokens that end an answer.
    pub eos: Arc<[u32]>,
    /// Tokens of an answer at most.
    pub max_tokens: usize,
    /// When the answer must be complete.
    pub deadline: Option<Instant>,
    /// The request is no longer wanted.
    pub cancel: CancellationToken,
    /// Where events go. Bounded by the number of tokens that may be generated.
    pub events: mpsc::UnboundedSender<GenerationEvent>,
}

/// One answer of a plan.
#[derive(Clone, Debug)]
pub struct PlanChoice {
    /// How tokens are chosen; its `choice` is the answer's index.
    pub sampling: SamplingParams,
    /// Tokens of it that were told already, by a combiner that is lost: they are replayed through decoding steps, and
    /// not told again, so that state, penalties and later tokens are those of an uninterrupted answer.
    pub told: Vec<u32>,
    /// This answer is no longer wanted.
    pub cancel: CancellationToken,
}

/// One segment of a plan.
#[derive(Clone, Debug)]
pub struct PlanSegment {
    /// All its token ids that the resumed state does not cover.
    pub tokens: Arc<[u32]>,
    /// What happens to them.
    pub body: SegmentBody,
}

/// What happens to a segment's tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SegmentBody {
    /// All are ordinary rows.
    Rows,
    /// The first `seam` tokens are rows, the rest comes from an entry.
    Entry {
        /// Width of the seam.
        seam: usize,
        /// Key of the entry.
        key: EntryKey,
        /// What brings its parts, unless it is held.
        transfer: TransferId,
        /// The combiner should hold it. If it does not, it tells so ([`GenerationEvent::Missing`]) and waits for the
        /// transfer.
        held: bool,
    },
}

/// A point of the prompt at which its prefix state is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SavePoint {
    /// Tokens of the prompt before it.
    pub position: usize,
    /// Key of the state.
    pub key: PrefixKey,
    /// How dear it is.
    pub kind: PrefixKind,
}

/// A prefix state that a combiner has, or had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefixHit {
    /// Its key.
    pub key: PrefixKey,
    /// Tokens it covers.
    pub tokens: usize,
    /// Of those, the leading ones of which every row was ordinary.
    pub exact: usize,
}

/// What a combiner tells of a plan, in order, until [`Done`](GenerationEvent::Done) or [`Failed`](GenerationEvent::Failed).
#[derive(Clone, Debug)]
pub enum GenerationEvent {
    /// The entry of a segment (index in [`Plan::segments`]) that should have been held is not there: somebody has to
    /// send it to the segment's transfer.
    Missing(usize),
    /// The prompt's first work has begun.
    Started(Instant),
    /// So many more of the plan's own rows are done.
    Rows(usize),
    /// The prompt is done: the device's time that its own rows took.
    Composed(Duration),
    /// A token of one answer.
    Token(TokenEvent),
    /// An answer is complete.
    ChoiceDone {
        /// Index of the choice.
        choice: usize,
        /// Why.
        end: ChoiceEnd,
    },
    /// All answers are complete.
    Done,
    /// The plan was not carried out.
    Failed(CombineError),
}

/// A generated token.
#[derive(Clone, Debug)]
pub struct TokenEvent {
    /// Index of the choice.
    pub choice: usize,
    /// Its id.
    pub token: u32,
    /// Its log-probability, if asked for.
    pub logprob: Option<f32>,
    /// The most likely tokens and their log-probabilities, best first, if asked for.
    pub top: Vec<(u32, f32)>,
}

/// Why an answer is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChoiceEnd {
    /// An end token; it is the last token event.
    Eos,
    /// The token limit.
    Length,
    /// Its cancellation token.
    Cancelled,
}

/// Why a plan was not carried out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CombineError {
    /// Too many requests wait already.
    #[error("{waiting} requests are waiting already; try again later")]
    Overloaded {
        /// How many.
        waiting: usize,
    },
    /// Its deadline has passed.
    #[error("the deadline has passed")]
    Deadline,
    /// It is no longer wanted.
    #[error("cancelled")]
    Cancelled,
    /// The combiner stops: another one may take the plan.
    #[error("the combiner is shutting down")]
    ShuttingDown,
    /// The combiner is gone, or the connection to it: another one may take the plan.
    #[error("combiner {0} is gone")]
    Gone(String),
    /// The prefix state to start from is no longer there: the prompt is to be planned anew.
    #[error("the prefix state to start from is gone")]
    StalePrefix,
    /// A segment's entry cannot be used.
    #[error("{0}")]
    Segment(String),
    /// A setting that only the model can judge.
    #[error("{field}: {message}")]
    Sampling {
        /// The setting.
        field: String,
        /// What is wrong.
        message: String,
    },
    /// A fault in the program.
    #[error("internal error: {0}")]
    Internal(String),
}

/// What a combiner has to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CombineLoad {
    /// Requests that wait for a place.
    pub waiting: usize,
    /// Answers under way, prompts included.
    pub sequences: usize,
}

/// A combiner.
pub trait Combine: Send + Sync {
    /// Its name: unique among all members, never reused.
    fn id(&self) -> &str;

    /// Whether it takes plans.
    fn is_running(&self) -> bool;

    /// What it has to do, as far as is known.
    fn load(&self) -> CombineLoad;

    /// Whether it holds the entry `key`, as far as is known.
    fn holds(&self, key: EntryKey) -> bool;

    /// Lengths of the prefix states that it has for prompts whose chain begins with `root`, ascending, as far as is known.
    fn prefix_lengths(&self, root: PrefixKey) -> Vec<usize>;

    /// The first of `keys` whose state it has, as far as is known.
    fn prefix(&self, keys: &[PrefixKey]) -> Option<PrefixHit>;

    /// Bytes that one more prefix state of `tokens` tokens would take, and bytes that prefix states may take.
    fn prefix_room(&self, tokens: usize) -> (usize, usize);

    /// Carry out a plan. What becomes of it is told in its events. Its transfers are open when this returns.
    fn generate(&self, plan: Plan);

    /// The last resort: have it compute an entry itself. As [`Scatter::prefill`].
    fn prefill(&self, job: PrefillJob) -> BoxFuture<'static, Result<JobOutcome, JobError>>;
}

/// What a panic said, for logs and errors.
pub fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("unknown panic")
}
