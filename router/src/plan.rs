//! Planning one prompt: which combiner takes it, which prefix state it starts from, which segments come from entries,
//! who has or makes those, and which prefix states it leaves.
//!
//! What members hold is known from a directory that may be stale; every choice made on it here has a way back when the
//! member says otherwise. The only thing that can go wrong is that no combiner is there.

mod choose;
mod costs;
mod place;
mod prefix;
mod replicate;

use std::sync::Arc;
use std::time::{Duration, Instant};

use hypic_cache::{EntryKey, PrefixKey};
use hypic_state::ComposeRule;
use hypic_telemetry::metrics;
use hypic_text::Tokenized;
use hypic_transport::{
    Combine, Delivery, Plan, PlanSegment, PrefillJob, PrefixHit, SavePoint, SegmentBody, TransferId,
};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::api::Mode;
use crate::directory::Holders;
use crate::router::Core;
use choose::{Choice, Start};
pub use costs::PlanCosts;
pub(crate) use place::{Placement, Placer, rows};
use place::{bound_alone, computed, place};
use prefix::Prefixes;
pub use replicate::ReplicateConfig;
pub(crate) use replicate::{Replicator, may_replicate, replicate};

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
    pub times: PlanTimes,
}

/// How long a plan took.
#[derive(Clone, Copy, Debug, Default)]
pub struct PlanTimes {
    /// Hashing the prompt's token ids into the keys of its segments and prefix states.
    pub keying: Duration,
    /// All else: looking them up, choosing a combiner and workers, and writing the plan.
    pub planning: Duration,
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
        let before = Instant::now();
        let placer = Placer::new(self.core, self.core.fleet.directory());
        let usable = |c: &Arc<dyn Combine>| c.is_running() && !avoid.combiners.iter().any(|id| id == c.id());
        let combiners = placer.directory().view.combiners.iter().enumerate();
        let combiners: Vec<(usize, Arc<dyn Combine>)> =
            combiners.filter(|(_, c)| usable(c)).map(|(place, c)| (place, c.clone())).collect();
        let prefixes = Prefixes::new(&self.core.space, settings, tokens, combiners.iter().map(|(_, c)| &**c));
        let keys = self.keys(settings, tokens);
        let keying = before.elapsed();

        let before = Instant::now();
        let holders: Vec<Option<Holders>> =
            keys.iter().map(|key| key.map(|key| placer.directory().holders(key))).collect();
        let starts = combiners.into_iter().enumerate().map(|(i, (place, combiner))| Start {
            resume: prefixes.resume(i, &*combiner, &avoid.states),
            place,
            combiner,
        });
        let choice = Choice { core: self.core, placer: &placer, settings, tokens, holders: &holders };
        let Start { combiner, place: chosen, resume } = choice.choose(starts.collect())?;

        let start = resume.as_ref().map_or(0, |hit| hit.tokens);
        let saves = prefixes.saves(&*combiner, self.core.config.boundary_share, start);
        let mut planned = Planned {
            plan: empty_plan(settings, prefixes.root, saves, resume, cancel),
            wanted: Vec::new(),
            segments: Vec::with_capacity(tokens.segments.len()),
            query: tokens.query.len(),
            combiner,
            times: PlanTimes { keying, ..PlanTimes::default() },
        };
        let mut at = 0;
        for (index, segment) in tokens.segments.iter().enumerate() {
            let covered = start.saturating_sub(at).min(segment.len());
            at += segment.len();
            let held = holders[index].as_ref().is_some_and(|holders| holders.combiners.contains(&chosen));
            add_segment(&mut planned, settings, index, segment, covered, keys[index].map(|key| (key, held)));
        }
        planned.plan.query = tokens.query[start.saturating_sub(at)..].to_vec();
        place(&placer, &mut planned.wanted, &holders);
        let speed = self.core.fleet.balancer().speed();
        let bound = bound_alone(&computed(&planned.wanted, |rows| speed.time(rows)), placer.workers());
        (0..bound).for_each(|_| metrics().makespan_bound_segment());
        planned.times.planning = before.elapsed();
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
    key: Option<(EntryKey, bool)>,
) {
    let kind = SegmentKind::of(settings, segment.len(), covered);
    planned.segments.push(PlannedSegment { tokens: segment.len(), covered, kind });
    let (seam, key, held) = match (kind, key) {
        (SegmentKind::Covered, _) => return,
        (SegmentKind::Composed { seam }, Some((key, held))) => (seam, key, held),
        _ => {
            let rows = PlanSegment { tokens: segment[covered..].into(), body: SegmentBody::Rows };
            planned.plan.segments.push(rows);
            return;
        }
    };
    debug_assert!(covered == 0, "a composed prompt starts between segments or within the query");
    let (transfer, tokens): (_, Arc<[u32]>) = (TransferId::random(), segment.into());
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
