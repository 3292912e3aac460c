//! What a client gets back: events, and at last a report or an error. An answer that is dropped cancels its work.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::mpsc;

use super::Error;

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
