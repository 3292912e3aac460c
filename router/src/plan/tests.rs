use std::sync::atomic::{AtomicU64, Ordering};

use futures::FutureExt;
use futures::future::BoxFuture;
use hypic_cache::{Fingerprint, PrefixKey};
use hypic_state::DType;
use hypic_transport::{Combine, JobError, JobOutcome, TransferId, Transfers};
use parking_lot::Mutex;

use super::*;
use crate::balance::SpeedConfig;

const SEAM: usize = 4;

/// A worker that holds the segments of these tokens.
struct Holder {
    id: String,
    holds: Vec<Vec<u32>>,
}

impl Scatter for Holder {
    fn id(&self) -> &str {
        &self.id
    }

    fn is_running(&self) -> bool {
        true
    }

    fn holds(&self, _: EntryKey, tokens: &[u32]) -> bool {
        self.holds.iter().any(|held| held == tokens)
    }

    fn prefill(&self, _: PrefillJob) -> BoxFuture<'static, Result<JobOutcome, JobError>> {
        async { Err(JobError::Cancelled) }.boxed()
    }
}

/// A combiner that keeps every state that plans leave, without computing any.
#[derive(Default)]
struct States {
    /// Root, length, exact tokens and key of each.
    kept: Mutex<Vec<(PrefixKey, usize, usize, PrefixKey)>>,
    /// Bytes of a state, and the budget.
    room: (usize, usize),
}

impl States {
    fn keep(&self, plan: &Plan, exact: usize) {
        let states = plan.saves.iter().map(|s| (plan.root, s.position, exact.min(s.position), s.key));
        self.kept.lock().extend(states);
    }
}

impl Combine for States {
    fn id(&self) -> &str {
        "combiner"
    }

    fn is_running(&self) -> bool {
        true
    }

    fn prefix_lengths(&self, root: PrefixKey) -> Vec<usize> {
        let mut lengths: Vec<usize> = self.kept.lock().iter().filter(|s| s.0 == root).map(|s| s.1).collect();
        lengths.sort_unstable();
        lengths.dedup();
        lengths
    }

    fn prefix(&self, keys: &[PrefixKey]) -> Option<PrefixHit> {
        let kept = self.kept.lock();
        let find = |key: &PrefixKey| kept.iter().find(|s| s.3 == *key);
        let (index, &(_, tokens, exact, _)) = keys.iter().enumerate().find_map(|(i, k)| find(k).map(|s| (i, s)))?;
        Some(PrefixHit { index, tokens, exact, hold: Arc::new(()) })
    }

    fn prefix_room(&self, _: usize) -> (usize, usize) {
        self.room
    }

    fn generate(&self, _: Plan) {
        unreachable!("planning generates nothing")
    }
}

/// Counts what is open.
#[derive(Default)]
struct Open(AtomicU64);

impl Transfers for Open {
    fn open(&self) -> TransferId {
        self.0.fetch_add(1, Ordering::SeqCst);
        hypic_transport::Exchange::<hypic_state::Host>::default().open()
    }

    fn fail(&self, _: TransferId, _: &str) {}

    fn close(&self, _: TransferId) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

struct Bench {
    config: RouterConfig,
    space: KeySpace,
    fleet: Fleet,
    balancer: Balancer,
    states: Arc<States>,
    open: Arc<Open>,
}

impl Bench {
    fn new(workers: usize, holds: &[Vec<u32>]) -> Self {
        Self::with_room(workers, holds, (1, 1 << 20))
    }

    fn with_room(workers: usize, holds: &[Vec<u32>], room: (usize, usize)) -> Self {
        let balancer = Balancer::new(SpeedConfig::default());
        let holder = |i: usize| -> Arc<dyn Scatter> {
            let holds = if i == 0 { holds.to_vec() } else { Vec::new() };
            Arc::new(Holder { id: format!("worker-{i}"), holds })
        };
        let scatter: Vec<Arc<dyn Scatter>> = (0..workers).map(holder).collect();
        scatter.iter().for_each(|w| balancer.add_worker(w.id()).expect("a new name"));
        let states = Arc::new(States { room, ..States::default() });
        let open = Arc::new(Open::default());
        Bench {
            config: RouterConfig::default(),
            space: KeySpace::new(Fingerprint([0; 32]), DType::F32),
            fleet: Fleet { scatter, combine: states.clone(), transfers: open.clone() },
            balancer,
            states,
            open,
        }
    }

    fn plan(&self, settings: &Settings, segments: &[&[u32]], query: &[u32]) -> Planned {
        let tokens = tokenized(segments, query);
        self.planner().plan(settings, &tokens, &CancellationToken::new())
    }

    fn planner(&self) -> Planner<'_> {
        Planner { config: &self.config, space: &self.space, fleet: &self.fleet, balancer: &self.balancer }
    }

    fn backlog(&self) -> usize {
        self.balancer.loads().iter().map(|l| l.segments).sum()
    }
}

fn tokenized(segments: &[&[u32]], query: &[u32]) -> Tokenized {
    Tokenized {
        segments: segments.iter().map(|s| s.to_vec()).collect(),
        query: query.to_vec(),
        message_ends: Vec::new(),
    }
}

fn settings(mode: Mode) -> Settings {
    Settings { mode, rule: ComposeRule::Transition, seam: SEAM, anchor: Arc::new([100, 101]), salt: Vec::new() }
}

fn ids(from: u32, n: u32) -> Vec<u32> {
    (from..from + n).collect()
}

fn kinds(planned: &Planned) -> Vec<SegmentKind> {
    planned.segments.iter().map(|s| s.kind).collect()
}

fn positions(plan: &Plan) -> Vec<(usize, PrefixKind)> {
    plan.saves.iter().map(|s| (s.position, s.kind)).collect()
}

/// Rows and bodies of a plan behind its resumed state.
fn rows_and_bodies(plan: &Plan) -> (usize, usize) {
    let of = |s: &PlanSegment| match s.body {
        SegmentBody::Rows => (s.tokens.len(), 0),
        SegmentBody::Entry { seam, .. } => (seam, s.tokens.len() - seam),
    };
    let sum = |a: (usize, usize), b: (usize, usize)| (a.0 + b.0, a.1 + b.1);
    plan.segments.iter().map(of).fold((plan.query.len(), 0), sum)
}

#[test]
fn a_segment_has_a_body_when_it_is_longer_than_the_seam() {
    let bench = Bench::new(2, &[]);
    let lengths = [1, SEAM as u32 - 1, SEAM as u32, SEAM as u32 + 1, 20];
    let segments: Vec<Vec<u32>> = lengths.iter().map(|&n| ids(n * 30, n)).collect();
    let segments: Vec<&[u32]> = segments.iter().map(Vec::as_slice).collect();
    let planned = bench.plan(&settings(Mode::Hypic), &segments, &[1, 2]);
    use SegmentKind::{Composed, Ordinary, SeamOnly};
    let composed = Composed { seam: SEAM };
    assert_eq!(kinds(&planned), [SeamOnly, SeamOnly, SeamOnly, composed, composed]);
    assert_eq!(planned.jobs.len(), 2);
    assert_eq!(bench.open.0.load(Ordering::SeqCst), 2, "a transfer for each body");
    assert_eq!(rows_and_bodies(&planned.plan), (1 + 3 + 4 + 4 + 4 + 2, 1 + 16));
    drop(planned);
    assert_eq!(bench.open.0.load(Ordering::SeqCst), 0, "transfers go with the plan");
    assert_eq!(bench.backlog(), 0, "and so do the workers' charges");

    for mode in [Mode::Full, Mode::Prefix] {
        let planned = bench.plan(&settings(mode), &segments, &[1, 2]);
        assert_eq!(kinds(&planned), [Ordinary; 5]);
        assert!(planned.jobs.is_empty() && planned.plan.saves.is_empty() == (mode == Mode::Full));
    }
}

#[test]
fn only_the_first_segment_has_no_anchor() {
    let bench = Bench::new(1, &[]);
    let segment = ids(1, 10);
    let planned = bench.plan(&settings(Mode::Hypic), &[&segment, &segment, &segment], &[1]);
    let anchors: Vec<&[u32]> = planned.jobs.iter().map(|j| &*j.job.anchor).collect();
    assert_eq!(anchors, [&[][..], &[100, 101], &[100, 101]]);
    let keys: Vec<EntryKey> = planned.jobs.iter().map(|j| j.job.key).collect();
    assert!(keys[0] != keys[1] && keys[1] == keys[2], "the same segment twice is one entry under one anchor");
    let charged: Vec<bool> = planned.jobs.iter().map(|j| j.charge.is_some()).collect();
    assert_eq!(charged, [true, true, false], "and computed once");
    assert!(planned.jobs.iter().all(|j| j.worker.is_some()));
}

#[test]
fn held_entries_come_from_their_holder_and_cost_nothing() {
    let (held, cold) = (ids(1, 30), ids(50, 20));
    let bench = Bench::new(3, std::slice::from_ref(&held));
    let planned = bench.plan(&settings(Mode::Hypic), &[&cold, &held, &cold], &[1]);
    let workers: Vec<&str> = planned.jobs.iter().map(|j| j.worker.as_ref().expect("assigned").id()).collect();
    assert_eq!(workers[1], "worker-0");
    assert!(planned.jobs[1].charge.is_none());
    assert_eq!(bench.backlog(), 2, "with an anchor and without one are two entries");
}

#[test]
fn without_workers_jobs_stay_unassigned() {
    let bench = Bench::new(0, &[]);
    let planned = bench.plan(&settings(Mode::Hypic), &[&ids(1, 30)], &[1]);
    assert!(planned.jobs[0].worker.is_none() && planned.jobs[0].charge.is_none());
}

#[test]
fn states_are_left_at_boundaries_before_the_query_and_before_the_last_token() {
    let bench = Bench::new(1, &[]);
    let (a, b) = (ids(1, 10), ids(20, 3));
    use PrefixKind::{Boundary, End, Query};
    for mode in [Mode::Hypic, Mode::Prefix] {
        let planned = bench.plan(&settings(mode), &[&a, &b], &[1, 2, 3]);
        assert_eq!(positions(&planned.plan), [(10, Boundary), (13, Query), (15, End)]);
        let short = bench.plan(&settings(mode), &[&a, &b], &[1]);
        assert_eq!(positions(&short.plan), [(10, Boundary), (13, Query)], "the query's end is its beginning");
        let bare = bench.plan(&settings(mode), &[], &[1]);
        assert!(bare.plan.saves.is_empty(), "there is nothing before the last token");
    }
    let mut tokens = tokenized(&[], &ids(1, 20));
    tokens.message_ends = vec![5, 12, 20];
    let planned = bench.planner().plan(&settings(Mode::Hypic), &tokens, &CancellationToken::new());
    assert_eq!(positions(&planned.plan), [(5, Boundary), (12, Boundary), (19, End)]);
}

#[test]
fn the_oldest_boundaries_are_thinned_first() {
    let segments: Vec<Vec<u32>> = (0..6).map(|i| ids(i * 20, 10)).collect();
    let segments: Vec<&[u32]> = segments.iter().map(Vec::as_slice).collect();
    // Room for two of 100 bytes in the eighth of the budget that boundaries may take.
    let bench = Bench::with_room(1, &[], (100, 1600));
    let planned = bench.plan(&settings(Mode::Hypic), &segments, &[1, 2]);
    use PrefixKind::{Boundary, End, Query};
    assert_eq!(positions(&planned.plan), [(40, Boundary), (50, Boundary), (60, Query), (61, End)]);
    let none = Bench::with_room(1, &[], (100, 99));
    assert!(none.plan(&settings(Mode::Hypic), &segments, &[1, 2]).plan.saves.is_empty(), "no state fits");
}

/// Each token is covered, a row, or in a body, whatever the state that the prompt starts from.
#[test]
fn a_prompt_starts_from_the_longest_state_there_is() {
    for mode in [Mode::Hypic, Mode::Prefix] {
        let bench = Bench::new(1, &[]);
        let (a, b, c) = (ids(1, 10), ids(20, 3), ids(40, 15));
        let first = bench.plan(&settings(mode), &[&a, &b, &c], &[1, 2, 3, 4]);
        assert!(first.plan.resume.is_none());
        bench.states.keep(&first.plan, SEAM);

        type Case<'a> = (&'a [&'a [u32]], &'a [u32], usize);
        let cases: [Case; 5] = [
            (&[&a, &b, &c], &[1, 2, 3, 4], 31),
            (&[&a, &b, &c], &[9], 28),
            (&[&a, &b, &a], &[9], 13),
            (&[&a], &[9], 10),
            (&[&b, &a, &c], &[9], 0),
        ];
        for (segments, query, covered) in cases {
            let planned = bench.plan(&settings(mode), segments, query);
            let hit = planned.plan.resume.as_ref().map_or(0, |hit| hit.tokens);
            assert_eq!(hit, covered, "{mode}: {segments:?}");
            let total = segments.iter().map(|s| s.len()).sum::<usize>() + query.len();
            let (rows, bodies) = rows_and_bodies(&planned.plan);
            assert_eq!(covered + rows + bodies, total, "{mode}: {segments:?}");
            assert!(!planned.plan.query.is_empty(), "a row to take logits from");
            let told: usize = planned.segments.iter().map(|s| s.covered).sum();
            assert_eq!(told, covered.min(total - query.len()));
            assert!(planned.plan.saves.iter().all(|s| s.position > covered), "no state twice");
        }
    }
}

/// An ordinary prompt may start inside a segment; a composed one only between segments or within the query.
#[test]
fn a_state_inside_a_segment_serves_ordinary_prompts_only() {
    let (whole, longer) = (ids(1, 20), ids(1, 30));
    for (mode, covered) in [(Mode::Prefix, 19), (Mode::Hypic, 0)] {
        let bench = Bench::new(1, &[]);
        let first = bench.plan(&settings(mode), &[], &whole);
        bench.states.keep(&first.plan, 20);
        let planned = bench.plan(&settings(mode), &[&longer], &[9]);
        assert_eq!(planned.plan.resume.as_ref().map_or(0, |hit| hit.tokens), covered, "{mode}");
        assert_eq!(planned.segments[0].covered, covered);
    }
}

#[test]
fn states_are_not_shared_across_settings() {
    let bench = Bench::new(1, &[]);
    let segment = ids(1, 10);
    let first = bench.plan(&settings(Mode::Hypic), &[&segment], &[1, 2]);
    bench.states.keep(&first.plan, SEAM);
    let others = [
        settings(Mode::Prefix),
        settings(Mode::Full),
        Settings { rule: ComposeRule::Add, ..settings(Mode::Hypic) },
        Settings { seam: 5, ..settings(Mode::Hypic) },
        Settings { anchor: Arc::new([]), ..settings(Mode::Hypic) },
        Settings { salt: b"tenant".to_vec(), ..settings(Mode::Hypic) },
    ];
    for (i, other) in others.iter().enumerate() {
        assert!(bench.plan(other, &[&segment], &[1, 2]).plan.resume.is_none(), "settings {i}");
    }
    assert!(bench.plan(&settings(Mode::Hypic), &[&segment], &[1, 2]).plan.resume.is_some());
}
