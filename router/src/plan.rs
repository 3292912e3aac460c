//! Planning one prompt: which combiner takes it, which prefix state it starts from, which segments come from entries,
//! who has or makes those, and which prefix states it leaves.
//!
//! What members hold is known from a directory that may be stale; every choice made on it here has a way back when the
//! member says otherwise. The only thing that can go wrong is that no combiner is there.

mod place;
mod prefix;

use std::sync::Arc;
use std::time::{Duration, Instant};

use hypic_cache::{EntryKey, PrefixKey};
use hypic_state::ComposeRule;
use hypic_telemetry::metrics;
use hypic_text::Tokenized;
use hypic_transport::{
    Combine, Delivery, Plan, PlanSegment, PrefillJob, PrefixHit, SavePoint, SegmentBody, TransferId,
};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::api::Mode;
use crate::router::Core;
pub(crate) use place::{Placement, Placer, rows};
use prefix::Prefixes;

/// What work is reckoned to cost when a combiner and the workers are chosen. Times in seconds where they are read from a
/// file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PlanCosts {
    /// Of sending any entry.
    #[serde(with = "crate::seconds")]
    pub transfer: Duration,
    /// Of sending a token's share of an entry.
    #[serde(with = "crate::seconds")]
    pub transfer_per_token: Duration,
    /// A request that waits at a combiner, to one that comes after it.
    #[serde(with = "crate::seconds")]
    pub waiting: Duration,
    /// An answer that is under way at a combiner, to one that comes after it.
    #[serde(with = "crate::seconds")]
    pub sequence: Duration,
}

impl Default for PlanCosts {
    fn default() -> Self {
        PlanCosts {
            transfer: Duration::from_micros(500),
            transfer_per_token: Duration::from_micros(5),
            waiting: Duration::from_millis(250),
            sequence: Duration::from_millis(2),
        }
    }
}

impl PlanCosts {
    /// Of sending the entry of `tokens` tokens.
    pub(crate) fn sending(&self, tokens: usize) -> Duration {
        self.transfer + self.transfer_per_token.saturating_mul(u32::try_from(tokens).unwrap_or(u32::MAX))
    }
}

/// A prompt as token ids, with what its anchor may be.
pub(crate) struct PromptTokens {
    pub tokens: Tokenized,
    /// Ids of the anchor `turn`.
    pub turn: Vec<u32>,
    /// The anchor that the request gives as ids.
    pub anchor: Option<Vec<u32>>,
}

/// How a prompt is prefilled, every choice made.
#[derive(Clone)]
pub(crate) struct Settings {
    /// Names the request.
    pub request: Arc<str>,
    pub mode: Mode,
    pub rule: ComposeRule,
    pub seam: usize,
    pub anchor: Arc<[u32]>,
    pub salt: Arc<[u8]>,
    pub deadline: Option<Instant>,
}

/// What a plan must not use.
#[derive(Clone, Default)]
pub(crate) struct Avoid {
    /// Ids of combiners that are lost or refused the request.
    pub combiners: Vec<String>,
    /// States that turned out to be gone.
    pub states: Vec<PrefixKey>,
}

/// A planned prompt.
pub(crate) struct Planned {
    pub combiner: Arc<dyn Combine>,
    /// For the combiner; sampling and limits are still to be filled in.
    pub plan: Plan,
    /// Entries of the plan.
    pub wanted: Vec<Wanted>,
    /// Every segment of the prompt, in order.
    pub segments: Vec<PlannedSegment>,
    /// Tokens of the query.
    pub query: usize,
}

/// An entry that a plan needs.
pub(crate) struct Wanted {
    /// Index of the segment in the prompt.
    pub segment: usize,
    /// Index of the segment in the plan.
    pub index: usize,
    /// Its first attempt, as if nobody held it.
    pub job: PrefillJob,
    pub from: Origin,
}

/// Where an entry comes from.
pub(crate) enum Origin {
    /// The combiner should hold it.
    Combiner,
    Worker(Placement),
    /// No worker is usable: the combiner computes it.
    LastResort,
}

/// What becomes of one segment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlannedSegment {
    pub tokens: usize,
    /// Tokens that a prefix state covers.
    pub covered: usize,
    pub kind: SegmentKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SegmentKind {
    /// A prefix state covers it whole.
    Covered,
    /// All of its rows are ordinary because the mode composes nothing.
    Ordinary,
    /// It is no longer than the seam.
    SeamOnly,
    /// Seam and body.
    Composed { seam: usize },
}

impl SegmentKind {
    fn of(settings: &Settings, tokens: usize, covered: usize) -> Self {
        match settings.mode {
            _ if covered == tokens => SegmentKind::Covered,
            Mode::Full | Mode::Prefix => SegmentKind::Ordinary,
            Mode::Hypic if tokens <= settings.seam => SegmentKind::SeamOnly,
            Mode::Hypic => SegmentKind::Composed { seam: settings.seam },
        }
    }
}

pub(crate) struct Planner<'a> {
    pub core: &'a Core,
}

impl Planner<'_> {
    /// Plan a prompt whose query is not empty; `None` if there is no combiner that may take it.
    pub fn plan(
        &self,
        settings: &Settings,
        tokens: &Tokenized,
        avoid: &Avoid,
        cancel: &CancellationToken,
    ) -> Option<Planned> {
        let view = self.core.fleet.view();
        let usable = |c: &&Arc<dyn Combine>| c.is_running() && !avoid.combiners.iter().any(|id| id == c.id());
        let combiners: Vec<Arc<dyn Combine>> = view.combiners.iter().filter(usable).cloned().collect();
        let placer = Placer::new(self.core, view);
        let prefixes = Prefixes::new(&self.core.space, settings, tokens, &combiners);
        let keys = self.keys(settings, tokens);
        let starts = combiners
            .into_iter()
            .enumerate()
            .map(|(i, combiner)| Start { resume: prefixes.resume(i, &*combiner, &avoid.states), combiner });
        let Start { combiner, resume } = self.choose(starts.collect(), &placer, settings, tokens, &keys)?;

        let start = resume.as_ref().map_or(0, |hit| hit.tokens);
        let saves = prefixes.saves(&*combiner, self.core.config.boundary_share, start);
        let mut planned = Planned {
            plan: empty_plan(settings, prefixes.root, saves, resume, cancel),
            wanted: Vec::new(),
            segments: Vec::with_capacity(tokens.segments.len()),
            query: tokens.query.len(),
            combiner,
        };
        let mut at = 0;
        for (index, segment) in tokens.segments.iter().enumerate() {
            let covered = start.saturating_sub(at).min(segment.len());
            at += segment.len();
            add_segment(&mut planned, settings, index, segment, covered, keys[index]);
        }
        planned.plan.query = tokens.query[start.saturating_sub(at)..].to_vec();
        place(&placer, &mut planned.wanted);
        let speed = self.core.fleet.balancer().speed();
        let bound = bound_alone(&computed(&planned.wanted, |rows| speed.time(rows)), placer.workers());
        (0..bound).for_each(|_| metrics().makespan_bound_segment());
        Some(planned)
    }

    /// Keys of the segments that have a body.
    fn keys(&self, settings: &Settings, tokens: &Tokenized) -> Vec<Option<EntryKey>> {
        let key = |(index, segment): (usize, &Vec<u32>)| {
            let anchor = anchor_of(settings, index);
            let composed = matches!(SegmentKind::of(settings, segment.len(), 0), SegmentKind::Composed { .. });
            composed.then(|| EntryKey::new(&self.core.space, settings.seam, &anchor, &settings.salt, segment))
        };
        tokens.segments.iter().enumerate().map(key).collect()
    }

    /// The start by which the prompt is done first, as far as can be told.
    fn choose(
        &self,
        mut starts: Vec<Start>,
        placer: &Placer<'_>,
        settings: &Settings,
        tokens: &Tokenized,
        keys: &[Option<EntryKey>],
    ) -> Option<Start> {
        if starts.len() <= 1 {
            return starts.pop();
        }
        // The same for all combiners: what each body costs that a combiner does not hold.
        let held: Vec<bool> = keys.iter().map(|key| key.is_some_and(|key| placer.is_held(key))).collect();
        let cost = |start: &Start| self.cost(start, placer, settings, tokens, keys, &held);
        let costs: Vec<Duration> = starts.iter().map(cost).collect();
        let best = (0..starts.len()).min_by_key(|&i| costs[i])?;
        Some(starts.swap_remove(best))
    }

    fn cost(
        &self,
        start: &Start,
        placer: &Placer<'_>,
        settings: &Settings,
        tokens: &Tokenized,
        keys: &[Option<EntryKey>],
        held: &[bool],
    ) -> Duration {
        let (costs, speed) = (&self.core.config.costs, self.core.fleet.balancer().speed());
        let load = start.combiner.load();
        // What it tells may be a little old: this router's own plans are known better.
        let sequences = load.sequences.max(self.core.fleet.plans(start.combiner.id()).saturating_sub(load.waiting));
        let times = |time: Duration, n: usize| time.saturating_mul(u32::try_from(n).unwrap_or(u32::MAX));
        let queue = times(costs.waiting, load.waiting) + times(costs.sequence, sequences);

        let from = start.resume.as_ref().map_or(0, |hit| hit.tokens);
        let (mut at, mut rows) = (0, 0);
        let (mut longest, mut work, mut sent) = (Duration::ZERO, Duration::ZERO, Duration::ZERO);
        for (index, segment) in tokens.segments.iter().enumerate() {
            let covered = from.saturating_sub(at).min(segment.len());
            at += segment.len();
            let key = match (SegmentKind::of(settings, segment.len(), covered), keys[index]) {
                (SegmentKind::Composed { seam }, Some(key)) => {
                    rows += seam;
                    key
                }
                _ => {
                    rows += segment.len() - covered;
                    continue;
                }
            };
            if start.combiner.holds(key) {
                continue;
            }
            sent += costs.sending(segment.len());
            if !held[index] {
                let time = speed.time(segment.len());
                work += time;
                longest = longest.max(time);
            }
        }
        rows += tokens.query.len() - from.saturating_sub(at);
        let makespan = longest.max(work / u32::try_from(placer.workers().max(1)).unwrap_or(u32::MAX));
        // Parts travel while others are computed.
        queue + speed.time(rows) + makespan.max(sent)
    }
}

/// A combiner and the state that a prompt would start from there.
struct Start {
    combiner: Arc<dyn Combine>,
    resume: Option<PrefixHit>,
}

/// The first segment has no anchor.
fn anchor_of(settings: &Settings, index: usize) -> Arc<[u32]> {
    if index == 0 { Arc::new([]) } else { settings.anchor.clone() }
}

fn add_segment(
    planned: &mut Planned,
    settings: &Settings,
    index: usize,
    segment: &[u32],
    covered: usize,
    key: Option<EntryKey>,
) {
    let kind = SegmentKind::of(settings, segment.len(), covered);
    planned.segments.push(PlannedSegment { tokens: segment.len(), covered, kind });
    let (seam, key) = match (kind, key) {
        (SegmentKind::Covered, _) => return,
        (SegmentKind::Composed { seam }, Some(key)) => (seam, key),
        _ => {
            let rows = PlanSegment { tokens: segment[covered..].into(), body: SegmentBody::Rows };
            planned.plan.segments.push(rows);
            return;
        }
    };
    debug_assert!(covered == 0, "a composed prompt starts between segments or within the query");
    let (transfer, tokens): (_, Arc<[u32]>) = (TransferId::random(), segment.into());
    let held = planned.combiner.holds(key);
    planned.wanted.push(Wanted {
        segment: index,
        index: planned.plan.segments.len(),
        job: PrefillJob {
            key,
            tokens: tokens.clone(),
            seam,
            anchor: anchor_of(settings, index),
            salt: settings.salt.clone(),
            to: Delivery { combiner: planned.combiner.id().into(), transfer },
            held_only: false,
            request: planned.plan.request.clone(),
            deadline: settings.deadline,
            cancel: planned.plan.cancel.clone(),
        },
        from: if held { Origin::Combiner } else { Origin::LastResort },
    });
    planned.plan.segments.push(PlanSegment { tokens, body: SegmentBody::Entry { seam, key, transfer, held } });
}

/// Say who has or makes what the combiner does not hold.
fn place(placer: &Placer<'_>, wanted: &mut [Wanted]) {
    let mut cold = Vec::new();
    for (i, wanted) in wanted.iter_mut().enumerate() {
        if matches!(wanted.from, Origin::Combiner) {
            continue;
        }
        match placer.place_held(&wanted.job) {
            Some(placement) => wanted.from = Origin::Worker(placement),
            None => cold.push(i),
        }
    }
    let jobs: Vec<&PrefillJob> = cold.iter().map(|&i| &wanted[i].job).collect();
    let placements = placer.place_cold(&jobs, &[]);
    for (i, placement) in cold.into_iter().zip(placements) {
        if let Some(placement) = placement {
            wanted[i].from = Origin::Worker(placement);
        }
    }
}

/// Times of the segments that workers are to compute.
fn computed(wanted: &[Wanted], time: impl Fn(usize) -> Duration) -> Vec<Duration> {
    let is_computed = |wanted: &&Wanted| match &wanted.from {
        // One who joins a computation has no charge.
        Origin::Worker(placement) => !placement.held_only && placement.charge.is_some(),
        Origin::Combiner | Origin::LastResort => false,
    };
    wanted.iter().filter(is_computed).map(|wanted| time(rows(&wanted.job))).collect()
}

/// How many take longer alone than all others spread over `workers`: they bound the makespan.
fn bound_alone(times: &[Duration], workers: usize) -> usize {
    let all: Duration = times.iter().sum();
    let workers = u32::try_from(workers.max(1)).unwrap_or(u32::MAX);
    times.iter().filter(|&&time| time > (all - time) / workers).count()
}

fn empty_plan(
    settings: &Settings,
    root: PrefixKey,
    saves: Vec<SavePoint>,
    resume: Option<PrefixHit>,
    cancel: &CancellationToken,
) -> Plan {
    let (events, _) = mpsc::unbounded_channel();
    Plan {
        request: settings.request.clone(),
        arrived: Instant::now(),
        resume,
        segments: Vec::new(),
        query: Vec::new(),
        rule: settings.rule,
        root,
        saves,
        choices: Vec::new(),
        prompt_ids: Vec::new(),
        eos: Arc::new([]),
        max_tokens: 0,
        deadline: settings.deadline,
        cancel: cancel.clone(),
        events,
    }
}

#[cfg(test)]
mod tests;
