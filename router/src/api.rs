//! What a client asks and what it gets back, free of any protocol. HTTP, gRPC and the command line are translations of
//! these types. Owns how requests fail: one error for all protocols, with a kind that each maps to its status.

mod answer;
mod request;

pub use answer::{
    Answer, Delta, Event, FinishReason, Progress, Report, SegmentReport, SegmentSource, Timings, TokenLogprob,
    TokenLogprobs, Usage,
};
pub use request::{Anchor, Message, Mode, Part, Prompt, PromptOptions, Request, Sampling};

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
