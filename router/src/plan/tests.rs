mod known;
mod prefixes;

use std::collections::HashSet;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hypic_cache::PrefixKind;
use hypic_transport::{CombineLoad, Scatter};

use super::*;
use crate::fleet::{Fleet, View};
use crate::router::RouterConfig;
use crate::testing::{TestCombiner, TestWorker, space};

const SEAM: usize = 4;
const ANCHOR: [u32; 2] = [100, 101];

struct Bench {
    core: Core,
    workers: Vec<Arc<TestWorker>>,
    states: Arc<TestCombiner>,
}

impl Bench {
    fn new(workers: usize) -> Self {
        Self::with_room(workers, (1, 1 << 20))
    }

    fn with_room(workers: usize, room: (usize, usize)) -> Self {
        Self::with(workers, vec![TestCombiner::with_room("combiner", room)])
    }

    fn with(workers: usize, combiners: Vec<Arc<TestCombiner>>) -> Self {
        let workers: Vec<Arc<TestWorker>> = (0..workers).map(|i| TestWorker::new(format!("worker-{i}"), &[])).collect();
        let states = combiners[0].clone();
        let view = View {
            scatter: workers.iter().map(|w| w.clone() as Arc<dyn Scatter>).collect(),
            combiners: combiners.into_iter().map(|c| c as Arc<dyn Combine>).collect(),
        };
        let core = Core::new(RouterConfig::default(), space(), Arc::new(Fleet::new(view)));
        Bench { core, workers, states }
    }

    fn plan(&self, settings: &Settings, segments: &[&[u32]], query: &[u32]) -> Planned {
        self.plan_tokens(settings, &tokenized(segments, query))
    }

    fn plan_tokens(&self, settings: &Settings, tokens: &Tokenized) -> Planned {
        let plan = Planner { core: &self.core }.plan(settings, tokens, &Avoid::default(), &CancellationToken::new());
        plan.expect("a combiner is there")
    }

    fn backlog(&self) -> usize {
        self.core.fleet.balancer().loads().iter().map(|l| l.segments).sum()
    }
}

/// The key of a segment behind the anchor.
fn key(tokens: &[u32]) -> EntryKey {
    EntryKey::new(&space(), SEAM, &ANCHOR, b"", tokens)
}

/// Who brings each entry; the combiner's name in brackets if it holds it, `-` for the last resort.
fn origins(planned: &Planned) -> Vec<String> {
    let origin = |wanted: &Wanted| match &wanted.from {
        Origin::Combiner => "(combiner)".to_owned(),
        Origin::Worker(p) if p.held_only => format!("held {}", p.worker.id()),
        Origin::Worker(p) => p.worker.id().to_owned(),
        Origin::LastResort => "-".to_owned(),
    };
    planned.wanted.iter().map(origin).collect()
}

fn charged(planned: &Planned) -> Vec<bool> {
    let charge = |wanted: &Wanted| matches!(&wanted.from, Origin::Worker(p) if p.charge.is_some());
    planned.wanted.iter().map(charge).collect()
}

fn tokenized(segments: &[&[u32]], query: &[u32]) -> Tokenized {
    Tokenized {
        segments: segments.iter().map(|s| s.to_vec()).collect(),
        query: query.to_vec(),
        message_ends: Vec::new(),
    }
}

fn settings(mode: Mode) -> Settings {
    Settings {
        request: "r".into(),
        mode,
        rule: ComposeRule::Transition,
        seam: SEAM,
        anchor: Arc::new(ANCHOR),
        salt: Arc::new([]),
        deadline: None,
    }
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
    let bench = Bench::new(2);
    let lengths = [1, SEAM as u32 - 1, SEAM as u32, SEAM as u32 + 1, 20];
    let segments: Vec<Vec<u32>> = lengths.iter().map(|&n| ids(n * 30, n)).collect();
    let segments: Vec<&[u32]> = segments.iter().map(Vec::as_slice).collect();
    let planned = bench.plan(&settings(Mode::Hypic), &segments, &[1, 2]);
    use SegmentKind::{Composed, Ordinary, SeamOnly};
    let composed = Composed { seam: SEAM };
    assert_eq!(kinds(&planned), [SeamOnly, SeamOnly, SeamOnly, composed, composed]);
    let transfers: HashSet<TransferId> = planned.wanted.iter().map(|w| w.job.to.transfer).collect();
    assert_eq!(transfers.len(), 2, "a transfer for each body");
    assert_eq!(rows_and_bodies(&planned.plan), (1 + 3 + 4 + 4 + 4 + 2, 1 + 16));
    assert_eq!((bench.backlog(), bench.core.flights.len()), (2, 2));
    drop(planned);
    assert_eq!((bench.backlog(), bench.core.flights.len()), (0, 0), "charges and flights go with the plan");

    for mode in [Mode::Full, Mode::Prefix] {
        let planned = bench.plan(&settings(mode), &segments, &[1, 2]);
        assert_eq!(kinds(&planned), [Ordinary; 5]);
        assert!(planned.wanted.is_empty() && planned.plan.saves.is_empty() == (mode == Mode::Full));
    }
}

#[test]
fn only_the_first_segment_has_no_anchor() {
    let bench = Bench::new(1);
    let segment = ids(1, 10);
    let planned = bench.plan(&settings(Mode::Hypic), &[&segment, &segment, &segment], &[1]);
    let anchors: Vec<&[u32]> = planned.wanted.iter().map(|j| &*j.job.anchor).collect();
    assert_eq!(anchors, [&[][..], &[100, 101], &[100, 101]]);
    let keys: Vec<EntryKey> = planned.wanted.iter().map(|j| j.job.key).collect();
    assert!(keys[0] != keys[1] && keys[1] == keys[2], "the same segment twice is one entry under one anchor");
    assert_eq!(charged(&planned), [true, true, false], "and computed once");
    assert_eq!(origins(&planned)[1], origins(&planned)[2], "the second joins the first");
}

#[test]
fn held_entries_come_from_the_least_loaded_holder() {
    let (held, cold) = (ids(1, 30), ids(50, 20));
    let bench = Bench::new(3);
    for worker in &bench.workers[1..] {
        worker.holds.lock().insert(key(&held));
    }
    let planned = bench.plan(&settings(Mode::Hypic), &[&cold, &held, &cold], &[1]);
    assert_eq!(origins(&planned), ["worker-2", "held worker-1", "worker-0"], "the longest, with its anchor, first");
    assert_eq!(charged(&planned), [true; 3], "what is sent is charged too");
    let again = bench.plan(&settings(Mode::Hypic), &[&cold, &held], &[1]);
    assert_eq!(origins(&again)[1], "held worker-1", "sending is less than computing");
    assert!(again.wanted[1].job.salt.is_empty() && !again.wanted[1].job.held_only, "retries compute");

    bench.workers[1].running.store(false, Ordering::SeqCst);
    let other = bench.plan(&settings(Mode::Hypic), &[&cold, &held], &[1]);
    assert_eq!(origins(&other)[1], "held worker-2");
}

#[test]
fn a_holder_with_much_to_do_is_not_waited_for() {
    let held = ids(1, 30);
    let bench = Bench::new(2);
    bench.workers[0].holds.lock().insert(key(&held));
    let busy = bench.core.fleet.balancer().charge_time("worker-0", Duration::from_secs(60));
    let planned = bench.plan(&settings(Mode::Hypic), &[&ids(90, 2), &held], &[1]);
    assert_eq!(origins(&planned), ["worker-1"], "computing it elsewhere is quicker: now two hold it");
    drop((busy, planned));
    let planned = bench.plan(&settings(Mode::Hypic), &[&ids(90, 2), &held], &[1]);
    assert_eq!(origins(&planned), ["held worker-0"]);
}

#[test]
fn what_the_combiner_holds_is_not_asked_for() {
    let (held, cold) = (ids(1, 30), ids(50, 20));
    let bench = Bench::new(1);
    bench.states.holds.lock().insert(key(&held));
    let planned = bench.plan(&settings(Mode::Hypic), &[&cold, &held], &[1]);
    assert_eq!(origins(&planned), ["worker-0", "(combiner)"]);
    let held: Vec<bool> =
        planned.plan.segments.iter().map(|s| matches!(s.body, SegmentBody::Entry { held: true, .. })).collect();
    assert_eq!(held, [false, true]);
    assert_eq!(bench.backlog(), 1);
}

/// Of two requests that miss the same entry at the same time the second joins the first one's worker.
#[test]
fn concurrent_misses_share_a_computation() {
    let bench = Bench::new(4);
    let (a, b) = (ids(1, 30), ids(50, 40));
    let first = bench.plan(&settings(Mode::Hypic), &[&ids(90, 2), &a, &b], &[1]);
    let second = bench.plan(&settings(Mode::Hypic), &[&ids(90, 2), &b, &a], &[2]);
    let (one, two) = (origins(&first), origins(&second));
    assert_eq!((&one[0], &one[1]), (&two[1], &two[0]));
    assert_ne!(one[0], one[1]);
    assert_eq!(charged(&second), [false, false]);
    drop(first);
    assert_eq!(bench.core.flights.len(), 2, "the second still wants them");
    let salted = Settings { salt: Arc::new([1; 32]), ..settings(Mode::Hypic) };
    let other = bench.plan(&salted, &[&ids(90, 2), &a], &[1]);
    assert_eq!(charged(&other), [true], "another tenant's is another one");
    drop((second, other));
    assert_eq!((bench.backlog(), bench.core.flights.len()), (0, 0));

    // A worker that is gone is not joined.
    let first = bench.plan(&settings(Mode::Hypic), &[&ids(90, 2), &a], &[1]);
    let gone = bench.workers.iter().find(|w| w.id == origins(&first)[0]).expect("a worker");
    gone.running.store(false, Ordering::SeqCst);
    let second = bench.plan(&settings(Mode::Hypic), &[&ids(90, 2), &a], &[1]);
    assert_ne!(origins(&first), origins(&second));
}

#[test]
fn without_workers_the_combiner_computes() {
    let bench = Bench::new(0);
    let planned = bench.plan(&settings(Mode::Hypic), &[&ids(1, 30)], &[1]);
    assert_eq!(origins(&planned), ["-"]);
}

#[test]
fn the_combiner_that_is_done_first_is_chosen() {
    let combiners: Vec<Arc<TestCombiner>> = (0..3).map(|i| TestCombiner::new(format!("combiner-{i}"))).collect();
    let bench = Bench::with(2, combiners.clone());
    let (a, b) = (ids(1, 30), ids(50, 400));
    let segments: [&[u32]; 3] = [&ids(90, 2), &a, &b];
    let chosen = |bench: &Bench| bench.plan(&settings(Mode::Hypic), &segments, &[1, 2, 3]).combiner.id().to_owned();
    assert_eq!(chosen(&bench), "combiner-0", "all alike");

    combiners[0].load.lock().waiting = 1;
    assert_eq!(chosen(&bench), "combiner-1");
    combiners[2].holds.lock().insert(key(&b));
    assert_eq!(chosen(&bench), "combiner-2", "holds the longest");
    *combiners[2].load.lock() = CombineLoad { waiting: 3, sequences: 8 };
    assert_eq!(chosen(&bench), "combiner-1", "what it holds is not worth the wait");
    let at_1 = bench.plan(&settings(Mode::Hypic), &segments, &[1, 2, 3]);
    combiners[2].load.lock().waiting = 0;
    combiners[0].load.lock().waiting = 0;
    combiners[0].keep(&at_1.plan, SEAM);
    drop(at_1);
    let at_0 = bench.plan(&settings(Mode::Hypic), &segments, &[1, 2, 3]);
    assert_eq!(at_0.combiner.id(), "combiner-0", "it has a state of nearly all");
    assert_eq!(at_0.plan.resume.expect("a state").tokens, 434);
    assert!(at_0.wanted.is_empty());

    for combiner in &combiners[..2] {
        combiner.running.store(false, Ordering::SeqCst);
    }
    assert_eq!(chosen(&bench), "combiner-2");
    let avoid = Avoid { combiners: vec!["combiner-2".to_owned()], states: Vec::new() };
    let tokens = tokenized(&segments, &[1]);
    let none = Planner { core: &bench.core }.plan(&settings(Mode::Hypic), &tokens, &avoid, &CancellationToken::new());
    assert!(none.is_none());
}

/// The load that combiners tell is a little old; a router's own plans count at once.
#[test]
fn requests_of_one_moment_are_spread() {
    let combiners: Vec<Arc<TestCombiner>> = (0..2).map(|i| TestCombiner::new(format!("combiner-{i}"))).collect();
    let bench = Bench::with(1, combiners);
    let chosen = || bench.plan(&settings(Mode::Hypic), &[], &[1]).combiner.id().to_owned();
    let first = bench.core.fleet.occupy(&chosen());
    let second = bench.core.fleet.occupy(&chosen());
    assert_eq!((bench.core.fleet.plans("combiner-0"), bench.core.fleet.plans("combiner-1")), (1, 1));
    drop((first, second));
    assert_eq!(chosen(), "combiner-0");
}

#[test]
fn a_state_that_was_gone_is_not_used_again() {
    let bench = Bench::new(1);
    let (a, b) = (ids(1, 10), ids(20, 13));
    let first = bench.plan(&settings(Mode::Hypic), &[&a, &b], &[1, 2]);
    bench.states.keep(&first.plan, SEAM);
    let tokens = tokenized(&[&a, &b], &[9]);
    let mut avoid = Avoid::default();
    for covered in [23, 10, 0] {
        let plan =
            Planner { core: &bench.core }.plan(&settings(Mode::Hypic), &tokens, &avoid, &CancellationToken::new());
        let resume = plan.expect("a combiner").plan.resume;
        assert_eq!(resume.map_or(0, |hit| hit.tokens), covered);
        avoid.states.extend(resume.map(|hit| hit.key));
    }
}

#[test]
fn a_fleet_changes() {
    let bench = Bench::new(2);
    let charge = bench.core.fleet.balancer().charge("worker-1", 10).expect("known");
    let new = TestWorker::new("worker-9", &[]);
    let view = bench.core.fleet.view();
    let scatter: Vec<Arc<dyn Scatter>> = vec![view.scatter[1].clone(), new.clone(), new];
    bench.core.fleet.set(View { scatter, combiners: Vec::new() });
    let loads = bench.core.fleet.balancer().loads();
    let names: Vec<(&str, usize)> = loads.iter().map(|l| (l.worker.as_str(), l.segments)).collect();
    assert_eq!(names, [("worker-1", 1), ("worker-9", 0)], "who stays keeps its load; the second of one id is not used");
    drop(charge);
    assert_eq!(bench.core.fleet.view().scatter.len(), 2);
    let tokens = tokenized(&[], &[1]);
    let plan = Planner { core: &bench.core }.plan(
        &settings(Mode::Full),
        &tokens,
        &Avoid::default(),
        &CancellationToken::new(),
    );
    assert!(plan.is_none());
}

#[test]
fn a_segment_bounds_the_makespan_if_the_others_are_done_before_it() {
    let times = |times: &[u64]| times.iter().map(|&ms| Duration::from_millis(ms)).collect::<Vec<_>>();
    assert_eq!(bound_alone(&times(&[]), 4), 0);
    assert_eq!(bound_alone(&times(&[100, 10, 10, 10]), 2), 1);
    assert_eq!(bound_alone(&times(&[20, 20, 20, 20]), 2), 0, "30 for the others");
    assert_eq!(bound_alone(&times(&[100, 200]), 1), 1, "one worker does them in turn");
    assert_eq!(bound_alone(&times(&[100]), 4), 0, "a lone segment could not be split better");
}
