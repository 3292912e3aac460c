//! What telemetry is told of requests as the front sees them: one span and one outcome each.
//!
//! Owns the translation from the API's sets to the closed label sets, so that nothing that a client says becomes a
//! series. Recording cannot fail and never waits.

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use axum::http::HeaderMap;
use hypic_telemetry::{
    DisconnectPhase, Mode, Observation, Open, OpenGuard, Outcome, Protocol, Rejection, SegmentSource, Stage,
    TokenClass, metrics, names,
};
use tonic::metadata::MetadataMap;
use tracing::Span;
use tracing::field::Empty;

use crate::api::{Error, ErrorKind, Progress, Report};

/// A request of the front. One that goes before its outcome is known is a client that went away; its span ends with it.
pub(crate) struct Asked {
    span: Span,
    protocol: Protocol,
    began: Instant,
    /// Answers that it has.
    choices: u32,
    /// How far its prompt is.
    progress: Progress,
    /// Whether any of an answer was made.
    answering: bool,
    ended: bool,
    _open: OpenGuard,
}

/// Requests of all fronts of this process.
static OPEN: LazyLock<Open> = LazyLock::new(Open::default);

/// Exports how many requests are open.
pub(crate) fn observe_open() -> Observation {
    hypic_telemetry::observe(&names::REQUESTS_OPEN, &[], || OPEN.count())
}

impl Asked {
    /// A request over HTTP.
    pub fn over_http(headers: &HeaderMap) -> Self {
        let asked = Asked::new(Protocol::Http);
        hypic_telemetry::adopt(&asked.span, headers);
        asked
    }

    /// A request over gRPC.
    pub fn over_grpc(metadata: &MetadataMap) -> Self {
        let asked = Asked::new(Protocol::Grpc);
        hypic_telemetry::adopt_metadata(&asked.span, metadata);
        asked
    }

    fn new(protocol: Protocol) -> Self {
        // Of what is around it, nothing is the client's.
        let span = tracing::info_span!(
            parent: None,
            names::SPAN_REQUEST,
            { names::ATTRIBUTE_REQUEST } = Empty,
            { names::ATTRIBUTE_MODE } = Empty
        );
        let (began, progress) = (Instant::now(), Progress::default());
        Asked { span, protocol, began, choices: 1, progress, answering: false, ended: false, _open: OPEN.enter() }
    }

    /// The request's span.
    pub fn span(&self) -> &Span {
        &self.span
    }

    /// So many answers are asked for.
    pub fn choices(&mut self, choices: u32) {
        self.choices = choices;
    }

    /// The engine has taken the request.
    pub fn taken(&mut self, progress: Progress) {
        self.progress = progress;
    }

    /// Some of an answer was made.
    pub fn answering(&mut self) {
        self.answering = true;
    }

    /// The request was answered. Only then is it known how it was prefilled.
    pub fn done(&mut self, report: &Report) {
        self.end(Outcome::Ok);
        let (usage, times, metrics) = (&report.usage, &report.timings_ms, metrics());
        let composed = usage.composed_tokens + usage.seam_tokens > 0;
        let mode = if composed { Mode::Composed } else { Mode::Exact };
        let ms = |ms: f64| Duration::try_from_secs_f64(ms / 1e3).unwrap_or_default();
        metrics.request_duration(mode, self.began.elapsed());
        metrics.first_token(mode, ms(times.first_token));
        metrics.stage(Stage::Queue, ms(times.queue));
        if times.prefill > 0.0 {
            metrics.stage(Stage::Scatter, ms(times.prefill));
        }
        metrics.stage(Stage::Compose, ms(times.compose));
        let decode = ms(times.total - times.first_token);
        metrics.stage(Stage::Decode, decode);
        // Answers are made side by side; of each, the first token is not waited for.
        let later = usage.completion_tokens.saturating_sub(self.choices.into());
        if later > 0 {
            metrics.output_token(decode.mul_f64(f64::from(self.choices) / later as f64));
        }
        let classes = [
            (TokenClass::Exact, usage.exact_tokens),
            (TokenClass::Composed, usage.composed_tokens),
            (TokenClass::Seam, usage.seam_tokens),
            (TokenClass::Computed, usage.computed_tokens),
            (TokenClass::Completion, usage.completion_tokens),
        ];
        classes.into_iter().for_each(|(class, tokens)| metrics.tokens(class, tokens));
        report.segments.iter().for_each(|segment| metrics.segments(source(segment.source), 1));
    }

    /// The request failed; `draining`: because the server shuts down.
    pub fn failed(&mut self, error: &Error, draining: bool) {
        if self.ended {
            return;
        }
        let reason = if draining { Some(Rejection::Draining) } else { rejection(error.kind) };
        if let Some(reason) = reason.filter(|_| !self.answering) {
            metrics().rejection(reason);
        }
        self.end(outcome(error.kind));
    }

    fn end(&mut self, outcome: Outcome) {
        debug_assert!(!self.ended, "a request ends once");
        self.ended = true;
        metrics().request(self.protocol, outcome);
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        let phase = match self.progress.tokens() {
            _ if self.answering => DisconnectPhase::Decode,
            0 => DisconnectPhase::Queued,
            _ => DisconnectPhase::Prefill,
        };
        metrics().disconnect(phase);
        self.end(Outcome::Disconnected);
    }
}

/// A request was refused before it was read.
pub(crate) fn refused(protocol: Protocol, error: &Error) {
    if let Some(reason) = rejection(error.kind) {
        metrics().rejection(reason);
    }
    metrics().request(protocol, outcome(error.kind));
}

fn outcome(kind: ErrorKind) -> Outcome {
    match kind {
        ErrorKind::Invalid | ErrorKind::Unauthenticated | ErrorKind::NotFound => Outcome::Invalid,
        ErrorKind::TooLarge | ErrorKind::Overloaded => Outcome::Rejected,
        ErrorKind::Deadline => Outcome::TimedOut,
        ErrorKind::Unavailable => Outcome::Unavailable,
        ErrorKind::Internal => Outcome::Failed,
    }
}

fn rejection(kind: ErrorKind) -> Option<Rejection> {
    match kind {
        ErrorKind::TooLarge => Some(Rejection::TooLong),
        ErrorKind::Overloaded => Some(Rejection::QueueFull),
        ErrorKind::Deadline => Some(Rejection::Deadline),
        ErrorKind::Unavailable => Some(Rejection::NoMember),
        ErrorKind::Unauthenticated => Some(Rejection::Unauthenticated),
        ErrorKind::Invalid | ErrorKind::NotFound | ErrorKind::Internal => None,
    }
}

fn source(source: crate::api::SegmentSource) -> SegmentSource {
    use crate::api::SegmentSource as Api;
    match source {
        Api::Computed => SegmentSource::Computed,
        Api::Memory => SegmentSource::Memory,
        Api::Remote => SegmentSource::Remote,
        Api::Prefix => SegmentSource::Prefix,
        Api::SeamOnly => SegmentSource::SeamOnly,
    }
}
