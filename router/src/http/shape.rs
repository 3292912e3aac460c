//! The JSON objects of answers: OpenAI's, plus `hypic` beside the usage. Numbers that JSON cannot
//! hold never get here: a log-probability that is not finite is sent as the lowest that OpenAI uses.

use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};

use super::Shape;
use crate::api::{FinishReason, Report, TokenLogprob, TokenLogprobs, Usage};

const FINGERPRINT: &str = concat!("hypic-", env!("CARGO_PKG_VERSION"));
/// Stands for minus infinity in log-probabilities.
const LOWEST_LOGPROB: f32 = -9999.0;

/// What all objects of one answer share.
pub(super) struct Identity {
    pub(super) shape: Shape,
    id: String,
    created: u64,
    model: String,
}

impl Identity {
    pub(super) fn new(shape: Shape, model: &str) -> Self {
        let prefix = match shape {
            Shape::Chat => "chatcmpl",
            Shape::Completion => "cmpl",
        };
        Identity {
            shape,
            id: format!("{prefix}-{:032x}", rand::random::<u128>()),
            created: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs(),
            model: model.to_owned(),
        }
    }

    fn object(&self, object: &str, choices: Vec<Value>) -> Map<String, Value> {
        let mut map = Map::new();
        map.insert("id".into(), json!(self.id));
        map.insert("object".into(), json!(object));
        map.insert("created".into(), json!(self.created));
        map.insert("model".into(), json!(self.model));
        map.insert("system_fingerprint".into(), json!(FINGERPRINT));
        map.insert("choices".into(), Value::Array(choices));
        map
    }

    /// A complete answer.
    pub(super) fn whole(&self, choices: Vec<Value>, report: &Report) -> Value {
        let object = match self.shape {
            Shape::Chat => "chat.completion",
            Shape::Completion => "text_completion",
        };
        let mut map = self.object(object, choices);
        map.insert("usage".into(), usage(&report.usage));
        map.insert("hypic".into(), json!(report));
        Value::Object(map)
    }

    /// A chunk of a stream.
    pub(super) fn chunk(&self, choices: Vec<Value>) -> Map<String, Value> {
        let object = match self.shape {
            Shape::Chat => "chat.completion.chunk",
            Shape::Completion => "text_completion",
        };
        self.object(object, choices)
    }
}

/// OpenAI's usage object. Tokens are cached whether they came exactly or composed.
pub(super) fn usage(usage: &Usage) -> Value {
    json!({
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.exact_tokens + usage.composed_tokens},
    })
}

/// What one choice has to say, in a chunk or in full.
#[derive(Default)]
pub(super) struct Piece {
    /// `None`: the model has no tokenizer.
    pub(super) text: Option<String>,
    pub(super) token_ids: Vec<u32>,
    pub(super) logprobs: Vec<TokenLogprobs>,
    /// Characters of the choice's tokens before this piece, for `text_offset`.
    pub(super) offset: usize,
    pub(super) finish: Option<FinishReason>,
}

impl Piece {
    /// As a choice of a complete answer.
    pub(super) fn whole(&self, shape: Shape, index: usize) -> Value {
        let text = self.text.as_deref().unwrap_or_default();
        self.choice(shape, index, ("message", json!({"role": "assistant", "content": text, "refusal": null})))
    }

    /// As a choice of a chunk.
    pub(super) fn chunk(&self, shape: Shape, index: usize) -> Value {
        let delta = match self.text.as_deref() {
            Some(text) if !text.is_empty() => json!({"content": text}),
            _ => json!({}),
        };
        self.choice(shape, index, ("delta", delta))
    }

    fn choice(&self, shape: Shape, index: usize, chat: (&str, Value)) -> Value {
        let (field, value) = match shape {
            Shape::Chat => chat,
            Shape::Completion => ("text", json!(self.text.as_deref().unwrap_or_default())),
        };
        let mut choice = json!({
            "index": index,
            field: value,
            "logprobs": self.logprobs(shape),
            "finish_reason": self.finish.map(FinishReason::as_str),
        });
        if self.text.is_none() && !self.token_ids.is_empty() {
            choice["token_ids"] = json!(self.token_ids);
        }
        choice
    }

    fn logprobs(&self, shape: Shape) -> Value {
        if self.logprobs.is_empty() {
            return Value::Null;
        }
        match shape {
            Shape::Chat => {
                let content: Vec<Value> = self.logprobs.iter().map(chat_logprob).collect();
                json!({"content": content, "refusal": null})
            }
            Shape::Completion => completion_logprobs(&self.logprobs, self.offset),
        }
    }
}

/// The first chunk of a choice.
pub(super) fn role(index: usize) -> Value {
    json!({
        "index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": null, "finish_reason": null,
    })
}

/// Characters of the tokens, as `text_offset` counts them.
pub(super) fn characters(logprobs: &[TokenLogprobs]) -> usize {
    logprobs.iter().map(|l| token_text(&l.chosen).chars().count()).sum()
}

fn token_text(token: &TokenLogprob) -> String {
    match &token.bytes {
        Some(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        None => format!("token_id:{}", token.token_id),
    }
}

fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { LOWEST_LOGPROB }
}

fn chat_token(token: &TokenLogprob) -> Value {
    json!({"token": token_text(token), "bytes": token.bytes, "logprob": finite(token.logprob)})
}

fn chat_logprob(logprobs: &TokenLogprobs) -> Value {
    let mut value = chat_token(&logprobs.chosen);
    value["top_logprobs"] = logprobs.top.iter().map(chat_token).collect();
    value
}

fn completion_logprobs(logprobs: &[TokenLogprobs], mut offset: usize) -> Value {
    let mut tokens = Vec::with_capacity(logprobs.len());
    let mut chosen = Vec::with_capacity(logprobs.len());
    let mut tops = Vec::with_capacity(logprobs.len());
    let mut offsets = Vec::with_capacity(logprobs.len());
    for token in logprobs {
        let text = token_text(&token.chosen);
        let mut top = Map::new();
        // The chosen token belongs to the map even when it is not among the most likely.
        for one in token.top.iter().chain([&token.chosen]) {
            // Several tokens can look alike as text; the likeliest comes first.
            top.entry(token_text(one)).or_insert(json!(finite(one.logprob)));
        }
        offsets.push(offset);
        offset += text.chars().count();
        tokens.push(text);
        chosen.push(finite(token.chosen.logprob));
        tops.push(Value::Object(top));
    }
    json!({"tokens": tokens, "token_logprobs": chosen, "top_logprobs": tops, "text_offset": offsets})
}
