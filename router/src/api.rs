//! What a client asks and what it gets back, free of any protocol. HTTP, gRPC and the command line
//! are translations of these types.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hypic_state::ComposeRule;
use tokio::sync::mpsc;

/// One prompt to answer, `n` times.
#[derive(Clone, Debug)]
pub struct Request {
    /// The prompt.
    pub prompt: Prompt,
    /// How the prompt is prefilled.
    pub options: PromptOptions,
    /// How tokens are chosen; unset fields take the model's defaults.
    pub sampling: Sampling,
    /// Number of answers.
    pub n: u32,
    /// Tokens an answer may have at most; `None`: as many as the context has room for.
    pub max_tokens: Option<u32>,
    /// An answer ends before the first of these texts.
    pub stop: Vec<String>,
    /// Whether an end token ends an answer.
    pub stop_at_eos: bool,
    /// Report this many most likely tokens for every generated one.
    pub logprobs: Option<u32>,
    /// The request fails when its answer is not complete by then.
    pub deadline: Option<Duration>,
    /// Whose request it is, as the front found out; nothing that a client says sets it. Tenants share no cached work.
    pub tenant: Option<String>,
}

/// What a prompt consists of.
#[derive(Clone, Debug)]
pub enum Prompt {
    /// Chat messages, to be rendered through the model's chat template.
    Chat(Vec<Message>),
    /// Text without a template: segments, then the query.
    Raw {
        /// The segments, in order.
        segments: Vec<String>,
        /// The query.
        query: String,
    },
    /// Token ids.
    Tokens {
        /// The segments, in order.
        segments: Vec<Vec<u32>>,
        /// The query.
        query: Vec<u32>,
        /// The anchor of every segment but the first; `None`: the one that the options name.
        anchor: Option<Vec<u32>>,
    },
}

/// A chat message.
#[derive(Clone, Debug)]
pub struct Message {
    /// `system`, `user`, `assistant`, ...
    pub role: String,
    /// Its text, in parts.
    pub content: Vec<Part>,
    /// Whether the client sent a list of parts rather than a string.
    pub parts: bool,
}

/// A stretch of a message's text.
#[derive(Clone, Debug)]
pub struct Part {
    /// The text.
    pub text: String,
    /// Whether it is a segment of its own.
    pub segment: bool,
}

/// How a prompt is split and prefilled.
#[derive(Clone, Debug, Default)]
pub struct PromptOptions {
    /// How cached work is used; `None`: the server's default.
    pub mode: Option<Mode>,
    /// Rule of composition; `None`: the model's default.
    pub compose: Option<ComposeRule>,
    /// Width of the seam; `None`: the server's default.
    pub seam: Option<u32>,
    /// Which anchor; `None`: the server's default.
    pub anchor: Option<Anchor>,
    /// Narrows sharing of cached entries to the tenant's requests with the same salt.
    pub salt: Option<String>,
    /// Split text at this separator.
    pub separator: Option<String>,
    /// Read added tokens in the user's text as such instead of as ordinary text.
    pub special_tokens: bool,
}

/// How cached work is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Ordinary forward of the whole prompt; nothing is reused.
    Full,
    /// Exact reuse of a prefix only.
    Prefix,
    /// Cached segments composed at any position.
    #[default]
    Hypic,
}

/// What stands before a segment in its isolated prefill.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Anchor {
    /// Nothing.
    None,
    /// What the chat template puts before a user's content.
    #[default]
    Turn,
    /// The prompt's first piece.
    System,
}

macro_rules! named {
    ($type:ty, $what:literal, $($name:literal => $value:expr),+) => {
        impl std::str::FromStr for $type {
            type Err = String;
            fn from_str(s: &str) -> Result<Self, String> {
                match s {
                    $($name => Ok($value),)+
                    _ => Err(format!(concat!("unknown ", $what, " '{}': use one of {}"), s, [$($name),+].join(", "))),
                }
            }
        }
        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                $(if *self == $value { return f.write_str($name); })+
                unreachable!("every value has a name")
            }
        }
    };
}
named!(Mode, "mode", "full" => Mode::Full, "prefix" => Mode::Prefix, "hypic" => Mode::Hypic);
named!(Anchor, "anchor", "none" => Anchor::None, "turn" => Anchor::Turn, "system" => Anchor::System);

/// How tokens are chosen. Unset fields take the model's `generation_config.json`, else OpenAI's defaults.
#[derive(Clone, Debug, Default)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: Option<f32>,
    /// Keep the k most likely tokens; 0 keeps all.
    pub top_k: Option<u32>,
    /// Keep the most likely tokens up to this mass.
    pub top_p: Option<f32>,
    /// Keep tokens at least this likely relative to the likeliest.
    pub min_p: Option<f32>,
    /// Subtracted from logits of tokens that the answer has.
    pub presence_penalty: Option<f32>,
    /// Subtracted per occurrence in the answer.
    pub frequency_penalty: Option<f32>,
    /// Divides (multiplies, if negative) logits of tokens in prompt or answer.
    pub repetition_penalty: Option<f32>,
    /// Added to the logits of given tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// Same seed, same answer; `None`: drawn at random.
    pub seed: Option<u64>,
}

/// A running answer: events until [`Event::Report`] or [`Event::Failed`]. Dropping it cancels the work.
pub struct Answer {
    /// The events, in order.
    pub events: mpsc::Receiver<Event>,
    /// How far the prompt is.
    pub progress: Progress,
}

/// How much of a prompt is prefilled: a view that goes on being updated.
#[derive(Clone, Debug, Default)]
pub struct Progress(Arc<AtomicU64>);

impl Progress {
    /// Tokens of the prompt that are done, reused ones included.
    pub fn tokens(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// At least so many are done: what is done again after a loss does not count twice.
    pub(crate) fn reached(&self, tokens: usize) {
        self.0.fetch_max(tokens as u64, Ordering::Relaxed);
    }
}

/// Something that a client may want to hear of.
#[derive(Clone, Debug)]
pub enum Event {
    /// More of one answer.
    Delta(Delta),
    /// One answer is complete. Every choice gets exactly one.
    Finished {
        /// Index of the choice.
        choice: u32,
        /// Why it ended.
        reason: FinishReason,
    },
    /// All answers are complete: the last event of a request that went well.
    Report(Report),
    /// The request failed: the last event.
    Failed(Error),
}

/// A piece of an answer.
#[derive(Clone, Debug, Default)]
pub struct Delta {
    /// Index of the choice.
    pub choice: u32,
    /// New text, whole characters only; `None` for a model without a tokenizer. May be empty while text is held back.
    pub text: Option<String>,
    /// New token ids.
    pub token_ids: Vec<u32>,
    /// Per new token the chosen one and the most likely ones, if asked for.
    pub logprobs: Vec<TokenLogprobs>,
}

/// Log-probabilities (natural, softmax of the unmodified logits) at one generated token.
#[derive(Clone, Debug)]
pub struct TokenLogprobs {
    /// The token that was chosen.
    pub chosen: TokenLogprob,
    /// The most likely tokens, best first.
    pub top: Vec<TokenLogprob>,
}

/// A token and its log-probability.
#[derive(Clone, Debug)]
pub struct TokenLogprob {
    /// Token id.
    pub token_id: u32,
    /// Natural logarithm of its probability.
    pub logprob: f32,
    /// The bytes it stands for; `None` for a model without a tokenizer.
    pub bytes: Option<Vec<u8>>,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// An end token or a stop text.
    Stop,
    /// The token limit.
    Length,
}

impl FinishReason {
    /// OpenAI's name.
    pub fn as_str(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
        }
    }
}

/// What a request cost.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct Report {
    /// Tokens.
    pub usage: Usage,
    /// Every segment, in prompt order.
    pub segments: Vec<SegmentReport>,
    /// Times.
    pub timings_ms: Timings,
}

/// Tokens of a request. `exact + composed + seam + computed = prompt`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Usage {
    /// Of the prompt.
    pub prompt_tokens: u64,
    /// Covered by a prefix state in which every row was ordinary.
    pub exact_tokens: u64,
    /// Bodies of cached entries, or covered by a prefix state that has some.
    pub composed_tokens: u64,
    /// Seams recomputed by this request.
    pub seam_tokens: u64,
    /// Prefilled by this request, in isolation or as ordinary rows.
    pub computed_tokens: u64,
    /// Of all answers.
    pub completion_tokens: u64,
}

/// What became of one segment.
#[derive(Clone, Debug, serde::Serialize)]
pub struct SegmentReport {
    /// Its tokens.
    pub tokens: u64,
    /// Of those, not computed by this request.
    pub reused: u64,
    /// Where its body came from.
    pub source: SegmentSource,
    /// Who computed it or had it: a worker or the combiner. `None` only if it has no body.
    pub worker: Option<String>,
}

/// Where a segment's body came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SegmentSource {
    /// Computed for this request.
    Computed,
    /// A cached entry that the combiner held.
    Memory,
    /// A cached entry that a worker held, or was computing for somebody else.
    Remote,
    /// Covered by a prefix state.
    Prefix,
    /// It has no body.
    SeamOnly,
}

impl SegmentSource {
    /// The name that users see.
    pub fn as_str(self) -> &'static str {
        match self {
            SegmentSource::Computed => "computed",
            SegmentSource::Memory => "memory",
            SegmentSource::Remote => "remote",
            SegmentSource::Prefix => "prefix",
            SegmentSource::SeamOnly => "seam_only",
        }
    }
}

/// Times of a request, in milliseconds.
#[derive(Clone, Copy, Debug, Default, serde::Serialize)]
pub struct Timings {
    /// From arrival until its first work was begun.
    pub queue: f64,
    /// Isolated prefill of its cold segments, first start to last end.
    pub prefill: f64,
    /// The rows of its own: composition, or ordinary prefill.
    pub compose: f64,
    /// From arrival to the first token.
    pub first_token: f64,
    /// From arrival to the last token.
    pub total: f64,
}

/// Why a request failed, with one kind for HTTP and gRPC alike.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    /// What kind of failure.
    pub kind: ErrorKind,
    /// What is wrong and how to mend it.
    pub message: String,
    /// The request's field that is wrong.
    pub param: Option<String>,
}

/// Kinds of failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The request is wrong: 400, INVALID_ARGUMENT.
    Invalid,
    /// No or a wrong API key: 401, UNAUTHENTICATED.
    Unauthenticated,
    /// No such model or path: 404, NOT_FOUND.
    NotFound,
    /// The body is too large: 413, RESOURCE_EXHAUSTED.
    TooLarge,
    /// Too much to do: 429, RESOURCE_EXHAUSTED.
    Overloaded,
    /// The deadline passed: 504, DEADLINE_EXCEEDED.
    Deadline,
    /// Shutting down or not ready: 503, UNAVAILABLE.
    Unavailable,
    /// A fault of ours: 500, INTERNAL.
    Internal,
}

impl Error {
    /// A failure of the given kind.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Error { kind, message: message.into(), param: None }
    }

    /// A wrong field.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Error { kind: ErrorKind::Invalid, message: message.into(), param: Some(param.into()) }
    }
}

/// What stands behind the front: answers requests.
pub trait Engine: Send + Sync + 'static {
    /// Begin to answer.
    ///
    /// # Errors
    /// If the request is wrong or cannot be taken now; later failures are [`Event::Failed`].
    fn generate(&self, request: Request) -> impl Future<Output = Result<Answer, Error>> + Send;

    /// The model that is served.
    fn model(&self) -> &ModelCard;

    /// Whether requests can be answered now.
    fn ready(&self) -> bool;
}

/// What clients are told of the model.
#[derive(Clone, Debug)]
pub struct ModelCard {
    /// The name that clients use.
    pub id: String,
    /// Unix time at which it was loaded.
    pub created: u64,
    /// Positions that a sequence may have.
    pub context: u32,
}
