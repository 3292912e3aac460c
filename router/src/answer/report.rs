//! What a request cost, told of the round that answered it. Every token of the prompt is counted once.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hypic_transport::{JobOutcome, JobSource};
use tracing::debug;

use super::round::Round;
use crate::api::{Report, SegmentReport, SegmentSource, Timings, Usage};
use crate::plan::SegmentKind;

/// Moments of a request.
#[derive(Default)]
pub(super) struct Times {
    pub began: Option<Instant>,
    pub compose: Duration,
    pub first_token: Option<Instant>,
}

/// The report of a request that came at `arrived` and whose answers have `completion_tokens` tokens.
pub(super) fn report(round: &Round, times: &Times, arrived: Instant, completion_tokens: u64) -> Report {
    let (query, query_rows) = round.query;
    let prompt = query + round.segments.iter().map(|s| s.tokens).sum::<usize>();
    let resume = round.resume.map_or((0, 0), |hit| (hit.exact, hit.tokens - hit.exact));
    let mut usage = Usage {
        prompt_tokens: prompt as u64,
        exact_tokens: resume.0 as u64,
        composed_tokens: resume.1 as u64,
        seam_tokens: 0,
        computed_tokens: query_rows as u64,
        completion_tokens,
    };
    let combiner: Arc<str> = round.combiner.id().into();
    let mut segments = Vec::with_capacity(round.segments.len());
    let (mut first, mut last): (Option<Instant>, Option<Instant>) = (None, None);
    for (index, planned) in round.segments.iter().enumerate() {
        let (tokens, mut reused) = (planned.tokens as u64, planned.covered as u64);
        let (source, by) = match planned.kind {
            SegmentKind::Covered => (SegmentSource::Prefix, Some(combiner.clone())),
            SegmentKind::Ordinary => {
                usage.computed_tokens += tokens - reused;
                (SegmentSource::Computed, Some(combiner.clone()))
            }
            SegmentKind::SeamOnly => {
                usage.seam_tokens += tokens;
                (SegmentSource::SeamOnly, None)
            }
            SegmentKind::Composed { seam } => {
                usage.seam_tokens += seam as u64;
                let body = tokens - seam as u64;
                let (source, by) = match round.jobs.outcome(index) {
                    Some((JobOutcome { source: JobSource::Computed { started, ended, .. }, .. }, by)) => {
                        first = first.into_iter().chain([*started]).min();
                        last = last.max(Some(*ended));
                        (SegmentSource::Computed, by.clone())
                    }
                    // Of what was there already, or came from another request's computation, nothing is sent.
                    Some((JobOutcome { sent_bytes: 1.., .. }, by)) if *by != combiner => {
                        (SegmentSource::Remote, by.clone())
                    }
                    _ => (SegmentSource::Memory, combiner.clone()),
                };
                if source == SegmentSource::Computed {
                    usage.computed_tokens += body;
                } else {
                    usage.composed_tokens += body;
                    reused = body;
                }
                (source, Some(by))
            }
        };
        segments.push(SegmentReport { tokens, reused, source, worker: by.map(|id| id.to_string()) });
    }
    debug_assert_eq!(
        usage.exact_tokens + usage.composed_tokens + usage.seam_tokens + usage.computed_tokens,
        usage.prompt_tokens
    );
    // To the microsecond: more digits would be noise.
    let ms = |d: Duration| (d.as_secs_f64() * 1e6).round() / 1e3;
    let since = |t: Instant| ms(t.saturating_duration_since(arrived));
    let begun = first.into_iter().chain(times.began).min();
    let timings = Timings {
        queue: begun.map_or(0.0, since),
        prefill: first.zip(last).map_or(0.0, |(a, b)| ms(b.saturating_duration_since(a))),
        compose: ms(times.compose),
        first_token: times.first_token.map_or(0.0, since),
        total: ms(arrived.elapsed()),
    };
    debug!(?usage, ?timings, "request done");
    Report { usage, segments, timings_ms: timings }
}
