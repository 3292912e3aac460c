//! Messages of `hypic.v1` to and from the API's own types. What a message leaves unset stays unset;
//! enum values that this version does not know are refused by name.

use std::time::Duration;

use hypic_proto::v1::{self, generate_request, generate_response};
use hypic_state::ComposeRule;

use crate::api::{
    Anchor, Delta, Error, Event, FinishReason, Message, Mode, ModelCard, Part, Prompt, PromptOptions, Report, Request,
    Sampling, SegmentReport, SegmentSource, TokenLogprob, TokenLogprobs,
};

/// A request; `deadline` is that of the call.
///
/// # Errors
/// If it has no prompt, or a value that is not known.
pub(super) fn request(message: v1::GenerateRequest, deadline: Option<Duration>) -> Result<Request, Error> {
    let options = message.options.unwrap_or_default();
    Ok(Request {
        prompt: prompt(message.prompt, options.separator.is_some())?,
        options: prompt_options(options)?,
        sampling: message.sampling.map(sampling).unwrap_or_default(),
        n: message.n.unwrap_or(1),
        max_tokens: message.max_tokens,
        stop: message.stop,
        stop_at_eos: !message.ignore_eos,
        logprobs: message.logprobs,
        deadline,
        tenant: None,
    })
}

/// What is wrong with a field of a request with this prompt, under the field's path in the message.
pub(super) fn named(prompt: &Prompt) -> impl Fn(Error) -> Error + use<> {
    let (prompt, query) = match prompt {
        Prompt::Chat(_) => ("chat", "chat"),
        Prompt::Raw { .. } => ("text", "text.query"),
        Prompt::Tokens { .. } => ("tokens", "tokens.query"),
    };
    move |mut error| {
        error.param = error.param.map(|name| match name.as_str() {
            "prompt" => prompt.to_owned(),
            "query" => query.to_owned(),
            "separator" => format!("options.{name}"),
            "temperature" | "top_k" | "top_p" | "min_p" | "presence_penalty" | "frequency_penalty"
            | "repetition_penalty" | "logit_bias" => format!("sampling.{name}"),
            name if name.starts_with("messages") => format!("chat.{name}"),
            _ => name,
        });
        error
    }
}

fn prompt(prompt: Option<generate_request::Prompt>, separated: bool) -> Result<Prompt, Error> {
    match prompt {
        None => Err(Error::invalid("prompt", "the request has no prompt: set chat, text or tokens")),
        Some(generate_request::Prompt::Chat(chat)) => {
            Ok(Prompt::Chat(chat.messages.into_iter().map(chat_message).collect()))
        }
        Some(generate_request::Prompt::Text(text)) => {
            if text.query.is_empty() && !separated {
                return Err(Error::invalid("text.query", "the query is empty: it needs at least one token"));
            }
            Ok(Prompt::Raw { segments: text.segments, query: text.query })
        }
        Some(generate_request::Prompt::Tokens(tokens)) => {
            if tokens.query.is_empty() {
                return Err(Error::invalid("tokens.query", "the query is empty: it needs at least one token"));
            }
            Ok(Prompt::Tokens {
                segments: tokens.segments.into_iter().map(|s| s.ids).collect(),
                query: tokens.query,
                anchor: tokens.anchor.map(|a| a.ids),
            })
        }
    }
}

fn chat_message(message: v1::Message) -> Message {
    let content: Vec<Part> = message.parts.into_iter().map(|p| Part { text: p.text, segment: p.segment }).collect();
    // A lone unmarked part is what a plain string is over HTTP; templates may treat lists differently.
    let parts = content.len() > 1 || content.iter().any(|p| p.segment);
    Message { role: message.role, content, parts }
}

fn prompt_options(options: v1::PromptOptions) -> Result<PromptOptions, Error> {
    let unknown = |name: &str, value: i32| {
        Error::invalid(format!("options.{name}"), format!("options.{name} is {value}, which this server does not know"))
    };
    let mode = match v1::Mode::try_from(options.mode).map_err(|_| unknown("mode", options.mode))? {
        v1::Mode::Unspecified => None,
        v1::Mode::Full => Some(Mode::Full),
        v1::Mode::Prefix => Some(Mode::Prefix),
        v1::Mode::Hypic => Some(Mode::Hypic),
    };
    let compose = match v1::ComposeRule::try_from(options.compose).map_err(|_| unknown("compose", options.compose))? {
        v1::ComposeRule::Unspecified => None,
        v1::ComposeRule::Transition => Some(ComposeRule::Transition),
        v1::ComposeRule::Last => Some(ComposeRule::Last),
        v1::ComposeRule::Add => Some(ComposeRule::Add),
    };
    let anchor = match v1::Anchor::try_from(options.anchor).map_err(|_| unknown("anchor", options.anchor))? {
        v1::Anchor::Unspecified => None,
        v1::Anchor::None => Some(Anchor::None),
        v1::Anchor::Turn => Some(Anchor::Turn),
        v1::Anchor::System => Some(Anchor::System),
    };
    Ok(PromptOptions {
        mode,
        compose,
        seam: options.seam,
        anchor,
        salt: options.salt,
        separator: options.separator,
        special_tokens: options.special_tokens,
    })
}

fn sampling(message: v1::Sampling) -> Sampling {
    let mut logit_bias: Vec<(u32, f32)> = message.logit_bias.into_iter().collect();
    logit_bias.sort_unstable_by_key(|&(id, _)| id);
    Sampling {
        temperature: message.temperature,
        top_k: message.top_k,
        top_p: message.top_p,
        min_p: message.min_p,
        presence_penalty: message.presence_penalty,
        frequency_penalty: message.frequency_penalty,
        repetition_penalty: message.repetition_penalty,
        logit_bias,
        seed: message.seed,
    }
}

/// An event of the stream.
///
/// # Errors
/// If it is a failure.
pub(super) fn event(event: Event) -> Result<v1::GenerateResponse, Error> {
    let event = match event {
        Event::Delta(delta) => generate_response::Event::Delta(self::delta(delta)),
        Event::Finished { choice, reason } => {
            let reason = match reason {
                FinishReason::Stop => v1::FinishReason::Stop,
                FinishReason::Length => v1::FinishReason::Length,
            };
            generate_response::Event::Finished(v1::Finished { choice, reason: reason.into() })
        }
        Event::Report(report) => generate_response::Event::Report(self::report(report)),
        Event::Failed(error) => return Err(error),
    };
    Ok(v1::GenerateResponse { event: Some(event) })
}

fn delta(delta: Delta) -> v1::Delta {
    v1::Delta {
        choice: delta.choice,
        text: delta.text,
        token_ids: delta.token_ids,
        logprobs: delta.logprobs.into_iter().map(token_logprobs).collect(),
    }
}

fn token_logprobs(logprobs: TokenLogprobs) -> v1::TokenLogprobs {
    v1::TokenLogprobs {
        chosen: Some(token_logprob(logprobs.chosen)),
        top: logprobs.top.into_iter().map(token_logprob).collect(),
    }
}

fn token_logprob(token: TokenLogprob) -> v1::TokenLogprob {
    v1::TokenLogprob { token_id: token.token_id, logprob: token.logprob, bytes: token.bytes.map(Into::into) }
}

fn report(report: Report) -> v1::Report {
    let (usage, timings) = (report.usage, report.timings_ms);
    v1::Report {
        usage: Some(v1::Usage {
            prompt_tokens: usage.prompt_tokens,
            exact_tokens: usage.exact_tokens,
            composed_tokens: usage.composed_tokens,
            seam_tokens: usage.seam_tokens,
            computed_tokens: usage.computed_tokens,
            completion_tokens: usage.completion_tokens,
        }),
        segments: report.segments.into_iter().map(segment_report).collect(),
        timings_ms: Some(v1::Timings {
            queue: timings.queue,
            prefill: timings.prefill,
            compose: timings.compose,
            first_token: timings.first_token,
            total: timings.total,
        }),
    }
}

fn segment_report(segment: SegmentReport) -> v1::SegmentReport {
    let source = match segment.source {
        SegmentSource::Computed => v1::SegmentSource::Computed,
        SegmentSource::Memory => v1::SegmentSource::Memory,
        SegmentSource::Prefix => v1::SegmentSource::Prefix,
        SegmentSource::SeamOnly => v1::SegmentSource::SeamOnly,
        SegmentSource::Remote => v1::SegmentSource::Remote,
    };
    v1::SegmentReport { tokens: segment.tokens, reused: segment.reused, source: source.into(), worker: segment.worker }
}

/// What clients are told of the model.
pub(super) fn model(card: &ModelCard) -> v1::Model {
    v1::Model { id: card.id.clone(), created: card.created, context: card.context }
}
