//! The interfaces of scatter workers and combiners, as the router sees them, and their messages.
//!
//! The messages are those of proto/'s internal services; a remote role will implement the same traits.

use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use hypic_cache::{EntryKey, PrefixKey, PrefixKind};
use hypic_state::ComposeRule;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::{SamplingParams, TransferId};

/// A segment to prefill in isolation, or to fetch, and where its parts go.
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
    /// Where the parts go.
    pub transfer: TransferId,
    /// The request no longer wants it. The work goes on while another request does.
    pub cancel: CancellationToken,
}

/// How a job was done.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct JobOutcome {
    /// Where the entry came from.
    pub source: JobSource,
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
    /// The worker stops, or has stopped.
    #[error("worker {0} is gone")]
    Gone(String),
    /// The computation failed.
    #[error("prefill failed on worker {worker}: {reason}")]
    Failed {
        /// Which worker.
        worker: String,
        /// Why.
        reason: String,
    },
}

/// A scatter worker.
pub trait Scatter: Send + Sync {
    /// Its name.
    fn id(&self) -> &str;

    /// Whether it holds the entry `key` of these tokens now.
    fn holds(&self, key: EntryKey, tokens: &[u32]) -> bool;

    /// Whether it takes jobs.
    fn is_running(&self) -> bool;

    /// Have a segment's entry sent to the job's transfer. The parts begin to flow before this resolves; it
    /// resolves when the entry is complete, or will not come from here.
    fn prefill(&self, job: PrefillJob) -> BoxFuture<'static, Result<JobOutcome, JobError>>;
}

/// What a combiner shall do.
pub struct Plan {
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
    /// How tokens are chosen, per answer.
    pub choices: Vec<SamplingParams>,
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
    /// Single answers that are no longer wanted: one token per choice.
    pub cancel_choice: Vec<CancellationToken>,
    /// Where events go. Bounded by the number of tokens that may be generated.
    pub events: mpsc::UnboundedSender<GenerationEvent>,
}

/// One segment of a plan.
#[derive(Clone, Debug)]
pub struct PlanSegment {
    /// All its token ids.
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
        /// Where its parts come from.
        transfer: TransferId,
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

/// A prefix state that a combiner has.
#[derive(Clone)]
pub struct PrefixHit {
    /// Index of its key among those that were asked for.
    pub index: usize,
    /// Tokens it covers.
    pub tokens: usize,
    /// Of those, the leading ones of which every row was ordinary.
    pub exact: usize,
    /// Keeps it in place until the plan is carried out.
    pub hold: Hold,
}

/// Something of a combiner's that only it can look into.
pub type Hold = Arc<dyn Any + Send + Sync>;

/// What a combiner tells of a plan, in order, until [`Done`](GenerationEvent::Done) or [`Failed`](GenerationEvent::Failed).
#[derive(Clone, Debug)]
pub enum GenerationEvent {
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
    /// The combiner stops.
    #[error("the combiner is shutting down")]
    ShuttingDown,
    /// A segment's entry did not come.
    #[error("{0}")]
    Segment(String),
    /// A setting that only the model can judge.
    #[error("{field}: {message}")]
    Sampling {
        /// The setting.
        field: &'static str,
        /// What is wrong.
        message: String,
    },
    /// A fault in the program.
    #[error("internal error: {0}")]
    Internal(String),
}

/// A combiner.
pub trait Combine: Send + Sync {
    /// Its name.
    fn id(&self) -> &str;

    /// Whether it takes plans.
    fn is_running(&self) -> bool;

    /// Lengths of the prefix states that it has for prompts whose chain begins with `root`, ascending.
    fn prefix_lengths(&self, root: PrefixKey) -> Vec<usize>;

    /// The first of `keys` whose state it has.
    fn prefix(&self, keys: &[PrefixKey]) -> Option<PrefixHit>;

    /// Bytes that one more prefix state of `tokens` tokens would take, and bytes that prefix states may take.
    fn prefix_room(&self, tokens: usize) -> (usize, usize);

    /// Carry out a plan. What becomes of it is told in its events.
    fn generate(&self, plan: Plan);
}

/// What a panic said, for logs and errors.
pub fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("unknown panic")
}
