//! An entry that a plan needs, and the attempts to have it. Only kept and told here; what follows from it is decided by
//! [`Jobs`](super::Jobs).

use std::sync::Arc;
use std::time::Duration;

use hypic_telemetry::{OpenGuard, names};
use hypic_transport::{JobError, JobOutcome, PrefillJob, TransferId};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, info_span};

use crate::balance::Charge;
use crate::flights::Boarded;

/// Something that has come to pass.
pub(crate) enum Step {
    /// An attempt has ended.
    Ended { attempt: u64, result: Result<JobOutcome, JobError> },
    /// A wait before a retry is over.
    Again(usize),
    /// An attempt takes long.
    Slow { entry: usize, attempt: u64 },
}

/// Why the plan cannot be carried out.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// Nobody can make an entry.
    Failed(String),
    /// The combiner is gone.
    CombinerGone,
}

pub(super) struct Entry {
    pub segment: usize,
    pub index: usize,
    pub job: PrefillJob,
    /// Of the newest attempt.
    pub sent: Option<TransferId>,
    /// Attempts to have it computed, hedges not counted.
    pub tries: usize,
    /// Who failed, and how.
    pub failed: Vec<Arc<str>>,
    pub reasons: Vec<String>,
    /// Whether who failed last may do better.
    pub same_again: bool,
    pub hedged: bool,
    pub outcome: Option<(JobOutcome, Arc<str>)>,
}

pub(super) struct Attempt {
    pub entry: usize,
    pub worker: Arc<str>,
    pub transfer: TransferId,
    pub cancel: CancellationToken,
    pub charge: Option<Charge>,
    pub boarded: Option<Boarded>,
    pub last_resort: bool,
    pub begun: Instant,
    pub reckoned: Reckoned,
    pub _out: OpenGuard,
}

/// How long an attempt should take, as was thought when it began.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Reckoned {
    /// With all that the worker has to do before.
    pub whole: Duration,
    /// What of that is for others.
    pub others: Duration,
}

/// Give a job to a member, within a span of its own that the member's spans follow.
pub(super) fn ask<F: Future<Output = Result<JobOutcome, JobError>>>(
    member: &str,
    job: PrefillJob,
    give: impl FnOnce(PrefillJob) -> F,
) -> tracing::instrument::Instrumented<F> {
    let span = info_span!(
        names::SPAN_SCATTER,
        { names::ATTRIBUTE_MEMBER } = member,
        { names::ATTRIBUTE_TOKENS } = job.tokens.len() as u64
    );
    span.in_scope(|| give(job)).instrument(span)
}

impl Attempt {
    /// Nobody waits for it any more.
    pub fn give_up(&mut self) {
        self.cancel.cancel();
        (self.charge, self.boarded) = (None, None);
    }
}
