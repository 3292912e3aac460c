//! Between messages and the roles' types. What a message says is checked here; a field that cannot be used is named.

use std::time::{Duration, Instant};

use bytes::Bytes;
use hypic_cache::{EntryKey, PrefixKey, PrefixKind};
use hypic_proto::v1;
use hypic_state::ComposeRule;
use tonic::metadata::MetadataValue;
use tonic::{Code, Status};

use crate::{
    ChoiceEnd, CombineError, GenerationEvent, JobError, JobOutcome, JobSource, SamplingParams, TokenEvent, TransferId,
};

/// Metadata key of the reason in a status of ours.
pub const REASON: &str = "hypic-reason";
/// Metadata key of what the reason is about.
const SUBJECT: &str = "hypic-subject";

pub(super) fn invalid(message: impl Into<String>) -> Status {
    Status::invalid_argument(message)
}

fn hash(what: &str, bytes: &[u8]) -> Result<[u8; 32], Status> {
    bytes.try_into().map_err(|_| invalid(format!("{what}: {} bytes, a key has 32", bytes.len())))
}

pub(super) fn entry_key(bytes: &[u8]) -> Result<EntryKey, Status> {
    hash("key", bytes).map(EntryKey::from_bytes)
}

pub(super) fn prefix_key(bytes: &[u8]) -> Result<PrefixKey, Status> {
    hash("prefix key", bytes).map(PrefixKey::from_bytes)
}

pub(super) fn key_bytes(key: &[u8; 32]) -> Bytes {
    Bytes::copy_from_slice(key)
}

pub(super) fn transfer_id(id: Option<v1::TransferId>) -> Result<TransferId, Status> {
    let id = id.ok_or_else(|| invalid("transfer: missing"))?;
    Ok(TransferId { id: id.id, generation: id.generation })
}

pub(super) fn transfer_message(id: TransferId) -> Option<v1::TransferId> {
    Some(v1::TransferId { id: id.id, generation: id.generation })
}

pub(super) fn rule_message(rule: ComposeRule) -> i32 {
    let rule = match rule {
        ComposeRule::Transition => v1::ComposeRule::Transition,
        ComposeRule::Last => v1::ComposeRule::Last,
        ComposeRule::Add => v1::ComposeRule::Add,
    };
    rule as i32
}

pub(super) fn rule(number: i32) -> Result<ComposeRule, Status> {
    match v1::ComposeRule::try_from(number) {
        Ok(v1::ComposeRule::Transition) => Ok(ComposeRule::Transition),
        Ok(v1::ComposeRule::Last) => Ok(ComposeRule::Last),
        Ok(v1::ComposeRule::Add) => Ok(ComposeRule::Add),
        Ok(v1::ComposeRule::Unspecified) | Err(_) => Err(invalid(format!("compose: {number} is no rule"))),
    }
}

pub(super) fn save_kind_message(kind: PrefixKind) -> i32 {
    let kind = match kind {
        PrefixKind::Query => v1::PrefixSaveKind::Query,
        PrefixKind::End => v1::PrefixSaveKind::End,
        PrefixKind::Boundary => v1::PrefixSaveKind::Boundary,
    };
    kind as i32
}

pub(super) fn save_kind(number: i32) -> Result<PrefixKind, Status> {
    match v1::PrefixSaveKind::try_from(number) {
        Ok(v1::PrefixSaveKind::Query) => Ok(PrefixKind::Query),
        Ok(v1::PrefixSaveKind::End) => Ok(PrefixKind::End),
        Ok(v1::PrefixSaveKind::Boundary) => Ok(PrefixKind::Boundary),
        Ok(v1::PrefixSaveKind::Unspecified) | Err(_) => Err(invalid(format!("saves: {number} is no kind"))),
    }
}

pub(super) fn sampling_message(s: &SamplingParams) -> v1::SamplingSettings {
    v1::SamplingSettings {
        temperature: s.temperature,
        top_k: s.top_k,
        top_p: s.top_p,
        min_p: s.min_p,
        presence_penalty: s.presence_penalty,
        frequency_penalty: s.frequency_penalty,
        repetition_penalty: s.repetition_penalty,
        bias_ids: s.logit_bias.iter().map(|b| b.0).collect(),
        bias_values: s.logit_bias.iter().map(|b| b.1).collect(),
        seed: s.seed,
        logprobs: s.logprobs.map(|n| n as u32),
    }
}

/// The settings of choice 0.
pub(super) fn sampling(s: v1::SamplingSettings) -> Result<SamplingParams, Status> {
    if s.bias_ids.len() != s.bias_values.len() {
        return Err(invalid("sampling: not one bias value for each bias id"));
    }
    let params = SamplingParams {
        temperature: s.temperature,
        top_k: s.top_k,
        top_p: s.top_p,
        min_p: s.min_p,
        presence_penalty: s.presence_penalty,
        frequency_penalty: s.frequency_penalty,
        repetition_penalty: s.repetition_penalty,
        logit_bias: s.bias_ids.into_iter().zip(s.bias_values).collect(),
        seed: s.seed,
        choice: 0,
        logprobs: s.logprobs.map(|n| n as usize),
    };
    params.validate().map_err(|e| invalid(format!("sampling: {}: {}", e.field, e.message)))?;
    Ok(params)
}

/// What became of a job, in a message.
pub(super) fn done_message(outcome: &JobOutcome, accepted: Instant) -> v1::PrefillDone {
    let ms = |d: Duration| d.as_secs_f64() * 1e3;
    let mut done = v1::PrefillDone {
        sent_bytes: outcome.sent_bytes,
        exposed_ms: ms(outcome.exposed),
        hidden_bytes: outcome.hidden_bytes,
        ..v1::PrefillDone::default()
    };
    match outcome.source {
        JobSource::Computed { started, ended, busy } => {
            done.source = v1::PrefillSource::Computed as i32;
            done.queue_ms = ms(started.saturating_duration_since(accepted));
            done.wall_ms = ms(ended.saturating_duration_since(started));
            done.busy_ms = ms(busy);
        }
        JobSource::Held => done.source = v1::PrefillSource::Held as i32,
        JobSource::Shared => done.source = v1::PrefillSource::Shared as i32,
    }
    done
}

/// What a message says became of a job that was sent at `sent`. The clocks of two machines differ, so the times are
/// laid out between then and now.
pub(super) fn outcome(done: &v1::PrefillDone, sent: Instant) -> Result<JobOutcome, String> {
    let span = |ms: f64| Duration::try_from_secs_f64(ms / 1e3).unwrap_or_default();
    let source = match v1::PrefillSource::try_from(done.source) {
        Ok(v1::PrefillSource::Computed) => {
            let started = sent + span(done.queue_ms);
            JobSource::Computed { started, ended: started + span(done.wall_ms), busy: span(done.busy_ms) }
        }
        Ok(v1::PrefillSource::Held) => JobSource::Held,
        Ok(v1::PrefillSource::Shared) => JobSource::Shared,
        Ok(v1::PrefillSource::Unspecified) | Err(_) => return Err(format!("source {} is unknown", done.source)),
    };
    let (sent_bytes, hidden_bytes) = (done.sent_bytes, done.hidden_bytes);
    Ok(JobOutcome { source, sent_bytes, hidden_bytes, exposed: span(done.exposed_ms) })
}

/// A status of ours.
fn status(code: Code, message: String, reason: &'static str, subject: &str) -> Status {
    let mut status = Status::new(code, message);
    status.metadata_mut().insert(REASON, MetadataValue::from_static(reason));
    if let Ok(subject) = subject.parse() {
        status.metadata_mut().insert(SUBJECT, subject);
    }
    status
}

fn metadata<'a>(status: &'a Status, key: &str) -> Option<&'a str> {
    status.metadata().get(key).and_then(|value| value.to_str().ok())
}

pub(super) fn job_status(error: &JobError) -> Status {
    let (code, reason) = match error {
        JobError::Cancelled => (Code::Cancelled, "cancelled"),
        JobError::NotHere(_) => (Code::NotFound, "not_here"),
        JobError::Gone(_) => (Code::Unavailable, "gone"),
        JobError::Late(_) => (Code::DeadlineExceeded, "late"),
        JobError::Failed { .. } => (Code::Internal, "failed"),
        JobError::Undelivered { .. } => (Code::Aborted, "undelivered"),
    };
    let message = match error {
        JobError::Failed { reason, .. } | JobError::Undelivered { reason, .. } => reason.clone(),
        other => other.to_string(),
    };
    status(code, message, reason, "")
}

pub(super) fn job_error(worker: &str, status: &Status) -> JobError {
    let (worker, reason) = (worker.to_string(), status.message().to_string());
    match metadata(status, REASON) {
        Some("cancelled") => JobError::Cancelled,
        Some("not_here") => JobError::NotHere(worker),
        Some("late") => JobError::Late(worker),
        Some("failed") => JobError::Failed { worker, reason },
        Some("undelivered") => JobError::Undelivered { worker, reason },
        _ if status.code() == Code::InvalidArgument => JobError::Failed { worker, reason },
        _ => JobError::Gone(worker),
    }
}

pub(super) fn combine_status(error: &CombineError) -> Status {
    let (code, reason, subject) = match error {
        CombineError::Overloaded { waiting } => (Code::ResourceExhausted, "overloaded", waiting.to_string()),
        CombineError::Deadline => (Code::DeadlineExceeded, "deadline", String::new()),
        CombineError::Cancelled => (Code::Cancelled, "cancelled", String::new()),
        CombineError::ShuttingDown => (Code::Unavailable, "shutting_down", String::new()),
        CombineError::Gone(_) => (Code::Unavailable, "gone", String::new()),
        CombineError::StalePrefix => (Code::FailedPrecondition, "stale_prefix", String::new()),
        CombineError::Segment(_) => (Code::Aborted, "segment", String::new()),
        CombineError::Sampling { field, .. } => (Code::InvalidArgument, "sampling", field.clone()),
        CombineError::Internal(_) => (Code::Internal, "internal", String::new()),
    };
    let message = match error {
        CombineError::Segment(message) | CombineError::Internal(message) | CombineError::Sampling { message, .. } => {
            message.clone()
        }
        other => other.to_string(),
    };
    status(code, message, reason, &subject)
}

pub(super) fn combine_error(combiner: &str, status: &Status) -> CombineError {
    let (message, subject) = (status.message().to_string(), metadata(status, SUBJECT).unwrap_or_default());
    match metadata(status, REASON) {
        Some("overloaded") => CombineError::Overloaded { waiting: subject.parse().unwrap_or_default() },
        Some("deadline") => CombineError::Deadline,
        Some("cancelled") => CombineError::Cancelled,
        Some("shutting_down") => CombineError::ShuttingDown,
        Some("stale_prefix") => CombineError::StalePrefix,
        Some("segment") => CombineError::Segment(message),
        Some("sampling") => CombineError::Sampling { field: subject.to_string(), message },
        Some("internal") => CombineError::Internal(message),
        _ if status.code() == Code::InvalidArgument => CombineError::Internal(message),
        _ => CombineError::Gone(combiner.to_string()),
    }
}

/// An event as a message; a failure is the call's status instead.
pub(super) fn event_message(event: GenerationEvent) -> Result<v1::CombineEvent, Status> {
    use v1::combine_event::Event;
    let event = match event {
        GenerationEvent::Missing(index) => Event::Missing(index as u32),
        GenerationEvent::Started(_) => Event::Started(v1::CombineStarted {}),
        GenerationEvent::Rows(rows) => Event::Rows(rows as u64),
        GenerationEvent::Composed(busy) => Event::ComposedUs(u64::try_from(busy.as_micros()).unwrap_or(u64::MAX)),
        GenerationEvent::Token(TokenEvent { choice, token, logprob, top }) => {
            let (top_ids, top_logprobs) = top.into_iter().unzip();
            Event::Token(v1::CombineToken { choice: choice as u32, token, logprob, top_ids, top_logprobs })
        }
        GenerationEvent::ChoiceDone { choice, end } => {
            let end = match end {
                ChoiceEnd::Eos => v1::CombineEnd::Eos,
                ChoiceEnd::Length => v1::CombineEnd::Length,
                ChoiceEnd::Cancelled => v1::CombineEnd::Cancelled,
            };
            Event::ChoiceDone(v1::CombineChoiceDone { choice: choice as u32, end: end as i32 })
        }
        GenerationEvent::Done => Event::Done(v1::CombineDone {}),
        GenerationEvent::Failed(error) => return Err(combine_status(&error)),
    };
    Ok(v1::CombineEvent { event: Some(event) })
}

/// The event of a message about a plan of so many segments and choices; `None` for one that says nothing (yet).
pub(super) fn event(
    message: v1::CombineEvent,
    segments: usize,
    choices: usize,
) -> Result<Option<GenerationEvent>, String> {
    use v1::combine_event::Event;
    let choice = |n: u32| match (n as usize) < choices {
        true => Ok(n as usize),
        false => Err(format!("an event of choice {n} of {choices}")),
    };
    Ok(Some(match message.event {
        // What a later version may say.
        None | Some(Event::Accepted(_)) => return Ok(None),
        Some(Event::Started(_)) => GenerationEvent::Started(Instant::now()),
        Some(Event::Rows(rows)) => GenerationEvent::Rows(rows as usize),
        Some(Event::Missing(index)) if (index as usize) < segments => GenerationEvent::Missing(index as usize),
        Some(Event::Missing(index)) => return Err(format!("segment {index} of {segments} is missing")),
        Some(Event::ComposedUs(us)) => GenerationEvent::Composed(Duration::from_micros(us)),
        Some(Event::Token(t)) => GenerationEvent::Token(TokenEvent {
            choice: choice(t.choice)?,
            token: t.token,
            logprob: t.logprob,
            top: t.top_ids.into_iter().zip(t.top_logprobs).collect(),
        }),
        Some(Event::ChoiceDone(done)) => {
            let end = match v1::CombineEnd::try_from(done.end) {
                Ok(v1::CombineEnd::Eos) => ChoiceEnd::Eos,
                Ok(v1::CombineEnd::Length) => ChoiceEnd::Length,
                Ok(v1::CombineEnd::Cancelled) => ChoiceEnd::Cancelled,
                Ok(v1::CombineEnd::Unspecified) | Err(_) => return Err(format!("end {} is unknown", done.end)),
            };
            GenerationEvent::ChoiceDone { choice: choice(done.choice)?, end }
        }
        Some(Event::Done(_)) => GenerationEvent::Done,
    }))
}
