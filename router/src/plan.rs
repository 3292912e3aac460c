//! Planning one prompt: which prefix state it starts from, which segments come from entries, who makes
//! the missing ones, and which prefix states it leaves.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use hypic_cache::{EntryKey, KeySpace, PrefixChain, PrefixKey, PrefixKind};
use hypic_state::ComposeRule;
use hypic_text::Tokenized;
use hypic_transport::{Plan, PlanSegment, PrefillJob, PrefixHit, SavePoint, Scatter, SegmentBody, Transfer};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::api::Mode;
use crate::balance::{Balancer, Charge};
use crate::router::{Fleet, RouterConfig};

/// A prompt as token ids, with what its anchor may be.
pub(crate) struct PromptTokens {
    pub tokens: Tokenized,
    /// Ids of the anchor `turn`.
    pub turn: Vec<u32>,
    /// The anchor that the request gives as ids.
    pub anchor: Option<Vec<u32>>,
}

/// How a prompt is prefilled, every choice made.
pub(crate) struct Settings {
    pub mode: Mode,
    pub rule: ComposeRule,
    pub seam: usize,
    pub anchor: Arc<[u32]>,
    pub salt: Vec<u8>,
}

/// A planned prompt.
pub(crate) struct Planned {
    /// For the combiner; sampling and limits are still to be filled in.
    pub plan: Plan,
    /// Entries to be had, with who shall have them.
    pub jobs: Vec<PlannedJob>,
    /// Every segment of the prompt, in order.
    pub segments: Vec<PlannedSegment>,
    /// Tokens of the query.
    pub query: usize,
    /// Keeps the transfers open.
    pub transfers: Vec<Transfer>,
}

/// An entry to be had.
pub(crate) struct PlannedJob {
    /// Index of the segment in the prompt.
    pub segment: usize,
    pub job: PrefillJob,
    /// Index of the transfer in [`Planned::transfers`].
    pub transfer: usize,
    pub worker: Option<Arc<dyn Scatter>>,
    /// The worker's load, if it has to compute.
    pub charge: Option<Charge>,
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

pub(crate) struct Planner<'a> {
    pub config: &'a RouterConfig,
    pub space: &'a KeySpace,
    pub fleet: &'a Fleet,
    pub balancer: &'a Balancer,
}

impl Planner<'_> {
    /// Plan a prompt whose query is not empty.
    pub fn plan(&self, settings: &Settings, tokens: &Tokenized, cancel: &CancellationToken) -> Planned {
        let prefix = self.prefix(settings, tokens);
        let resume = prefix.resume;
        let start = resume.as_ref().map_or(0, |hit| hit.tokens);
        let mut planned = Planned {
            plan: empty_plan(settings, prefix.root, prefix.saves, resume, cancel),
            jobs: Vec::new(),
            segments: Vec::with_capacity(tokens.segments.len()),
            query: tokens.query.len(),
            transfers: Vec::new(),
        };
        let mut at = 0;
        for (index, segment) in tokens.segments.iter().enumerate() {
            let covered = start.saturating_sub(at).min(segment.len());
            at += segment.len();
            self.add_segment(&mut planned, settings, index, segment, covered, cancel);
        }
        planned.plan.query = tokens.query[start.saturating_sub(at)..].to_vec();
        self.assign(&mut planned.jobs);
        planned
    }

    fn add_segment(
        &self,
        planned: &mut Planned,
        settings: &Settings,
        index: usize,
        segment: &[u32],
        covered: usize,
        cancel: &CancellationToken,
    ) {
        let kind = match settings.mode {
            _ if covered == segment.len() => SegmentKind::Covered,
            Mode::Full | Mode::Prefix => SegmentKind::Ordinary,
            Mode::Hypic if segment.len() <= settings.seam => SegmentKind::SeamOnly,
            Mode::Hypic => SegmentKind::Composed { seam: settings.seam },
        };
        planned.segments.push(PlannedSegment { tokens: segment.len(), covered, kind });
        let (tokens, body) = match kind {
            SegmentKind::Covered => return,
            SegmentKind::Ordinary | SegmentKind::SeamOnly => (segment[covered..].into(), SegmentBody::Rows),
            SegmentKind::Composed { seam } => {
                let transfer = Transfer::open(&self.fleet.transfers);
                let tokens: Arc<[u32]> = segment.into();
                let anchor: Arc<[u32]> = if index == 0 { Arc::new([]) } else { settings.anchor.clone() };
                let key = EntryKey::new(self.space, seam, &anchor, &settings.salt, segment);
                let body = SegmentBody::Entry { seam, transfer: transfer.id() };
                let (tokens, id, cancel) = (tokens.clone(), transfer.id(), cancel.clone());
                let job = PrefillJob { key, tokens: tokens.clone(), seam, anchor, transfer: id, cancel };
                let transfer_index = planned.transfers.len();
                planned.jobs.push(PlannedJob {
                    segment: index,
                    job,
                    transfer: transfer_index,
                    worker: None,
                    charge: None,
                });
                planned.transfers.push(transfer);
                (tokens, body)
            }
        };
        planned.plan.segments.push(PlanSegment { tokens, body });
    }

    /// Entries that a worker holds come from there; the rest is computed, longest first, where it is
    /// done first. The same segment twice in one prompt is computed once.
    fn assign(&self, jobs: &mut [PlannedJob]) {
        let mut cold: Vec<usize> = Vec::new();
        let mut first: HashMap<EntryKey, usize> = HashMap::new();
        for (i, job) in jobs.iter_mut().enumerate() {
            let PrefillJob { key, tokens, .. } = &job.job;
            job.worker = self.fleet.scatter.iter().find(|w| w.holds(*key, tokens)).cloned();
            if job.worker.is_none() && *first.entry(*key).or_insert(i) == i {
                cold.push(i);
            }
        }
        let rows: Vec<usize> = cold.iter().map(|&i| jobs[i].job.tokens.len() + jobs[i].job.anchor.len()).collect();
        // Without a worker the jobs stay unassigned, and fail as such.
        for assignment in self.balancer.assign(&rows).unwrap_or_default() {
            let job = &mut jobs[cold[assignment.segment]];
            job.worker = self.fleet.scatter.iter().find(|w| w.id() == assignment.worker.as_str()).cloned();
            job.charge = Some(assignment.charge);
        }
        for i in 0..jobs.len() {
            if jobs[i].worker.is_none() {
                jobs[i].worker = first.get(&jobs[i].job.key).and_then(|&f| jobs[f].worker.clone());
            }
        }
    }

    /// The longest prefix state there is for this prompt, and the states that it shall leave.
    fn prefix(&self, settings: &Settings, tokens: &Tokenized) -> Prefix {
        let anchor: &[u32] = if settings.mode == Mode::Hypic { &settings.anchor } else { &[] };
        let (rule, seam) = match settings.mode {
            Mode::Hypic => (settings.rule, settings.seam),
            Mode::Full | Mode::Prefix => (ComposeRule::default(), 0),
        };
        let tag = settings.mode.prefix_tag();
        let chain = PrefixChain::new(self.space, tag.unwrap_or_default(), rule, seam, anchor, &settings.salt);
        let root = chain.key();
        if tag.is_none() {
            return Prefix { root, resume: None, saves: Vec::new() };
        }
        let saves = self.save_points(tokens);
        let known = self.fleet.combine.prefix_lengths(root);
        let wanted = saves.iter().map(|s| s.position).chain(known.iter().copied());
        let keys = chain_keys(chain, settings.mode, tokens, wanted.collect());

        let mut candidates: Vec<(usize, PrefixKey)> =
            known.iter().filter_map(|n| keys.get(n).map(|key| (*n, *key))).collect();
        candidates.sort_unstable_by_key(|(n, _)| std::cmp::Reverse(*n));
        let hashes: Vec<PrefixKey> = candidates.iter().map(|(_, key)| *key).collect();
        let resume = if hashes.is_empty() { None } else { self.fleet.combine.prefix(&hashes) };
        let start = resume.as_ref().map_or(0, |hit| hit.tokens);
        let saves = saves
            .into_iter()
            .filter(|s| s.position > start)
            .filter_map(|s| keys.get(&s.position).map(|&key| SavePoint { position: s.position, key, kind: s.kind }))
            .collect();
        Prefix { root, resume, saves }
    }

    /// Points at which a prompt leaves states: before the query, at its end (but for its last token, so
    /// that a repeated prompt has a row to take logits from), and at as many of the latest earlier
    /// boundaries as fit a share of the cache.
    fn save_points(&self, tokens: &Tokenized) -> Vec<Point> {
        let mut at = 0;
        let mut points: Vec<Point> = Vec::new();
        for segment in &tokens.segments {
            at += segment.len();
            points.push(Point { position: at, kind: PrefixKind::Boundary });
        }
        if let Some(last) = points.last_mut() {
            last.kind = PrefixKind::Query;
        }
        points.extend(tokens.message_ends.iter().map(|end| Point { position: at + end, kind: PrefixKind::Boundary }));
        let end = at + tokens.query.len() - 1;
        points.retain(|p| p.position < end || p.kind == PrefixKind::Query);
        if end > 0 && points.last().is_none_or(|p| p.position < end) {
            points.push(Point { position: end, kind: PrefixKind::End });
        }
        let (bytes, budget) = self.fleet.combine.prefix_room(end);
        if bytes > budget {
            return Vec::new();
        }
        let room = (budget as f64 * self.config.boundary_share) as usize / bytes.max(1);
        let boundaries = points.iter().filter(|p| p.kind == PrefixKind::Boundary).count();
        let mut surplus = boundaries.saturating_sub(room);
        points.retain(|p| {
            let thinned = p.kind == PrefixKind::Boundary && surplus > 0;
            surplus -= usize::from(thinned);
            !thinned
        });
        points
    }
}

struct Prefix {
    root: PrefixKey,
    resume: Option<PrefixHit>,
    saves: Vec<SavePoint>,
}

#[derive(Clone, Copy)]
struct Point {
    position: usize,
    kind: PrefixKind,
}

/// The keys at the `wanted` positions at which the mode can have a state: in a composed prompt that is
/// between segments and within the query, else everywhere; and before the prompt's last token.
fn chain_keys(
    mut chain: PrefixChain,
    mode: Mode,
    tokens: &Tokenized,
    mut wanted: Vec<usize>,
) -> HashMap<usize, PrefixKey> {
    wanted.sort_unstable();
    wanted.dedup();
    let mut keys = HashMap::new();
    let mut wanted = wanted.into_iter().peekable();
    let mut at = 0;
    let mut rows = |chain: &mut PrefixChain, at: &mut usize, mut ids: &[u32], keep_end: bool| {
        let end = *at + ids.len();
        while let Some(position) = wanted.next_if(|p| *p < end || (keep_end && *p == end)) {
            if position < *at {
                continue;
            }
            let (before, behind) = ids.split_at(position - *at);
            chain.rows(before);
            keys.insert(position, chain.key());
            (ids, *at) = (behind, position);
        }
        chain.rows(ids);
        *at = end;
    };
    let mut composed = HashMap::new();
    for segment in &tokens.segments {
        match mode {
            Mode::Full | Mode::Prefix => rows(&mut chain, &mut at, segment, true),
            Mode::Hypic => {
                chain.segment(segment);
                at += segment.len();
                composed.insert(at, chain.key());
            }
        }
    }
    rows(&mut chain, &mut at, &tokens.query, false);
    keys.extend(composed);
    keys
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
        deadline: None,
        cancel: cancel.clone(),
        cancel_choice: Vec::new(),
        events,
    }
}

#[cfg(test)]
mod tests;
