//! Which prefix states prompts leave, and which they start from.

use super::*;

#[test]
fn states_are_left_at_boundaries_before_the_query_and_before_the_last_token() {
    let bench = Bench::new(1);
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
    let planned = bench.plan_tokens(&settings(Mode::Hypic), &tokens);
    assert_eq!(positions(&planned.plan), [(5, Boundary), (12, Boundary), (19, End)]);
}

#[test]
fn the_oldest_boundaries_are_thinned_first() {
    let segments: Vec<Vec<u32>> = (0..6).map(|i| ids(i * 20, 10)).collect();
    let segments: Vec<&[u32]> = segments.iter().map(Vec::as_slice).collect();
    // Room for two of 100 bytes in the eighth of the budget that boundaries may take.
    let bench = Bench::with_room(1, (100, 1600));
    let planned = bench.plan(&settings(Mode::Hypic), &segments, &[1, 2]);
    use PrefixKind::{Boundary, End, Query};
    assert_eq!(positions(&planned.plan), [(40, Boundary), (50, Boundary), (60, Query), (61, End)]);
    let none = Bench::with_room(1, (100, 99));
    assert!(none.plan(&settings(Mode::Hypic), &segments, &[1, 2]).plan.saves.is_empty(), "no state fits");
}

/// Each token is covered, a row, or in a body, whatever the state that the prompt starts from.
#[test]
fn a_prompt_starts_from_the_longest_state_there_is() {
    for mode in [Mode::Hypic, Mode::Prefix] {
        let bench = Bench::new(1);
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
        let bench = Bench::new(1);
        let first = bench.plan(&settings(mode), &[], &whole);
        bench.states.keep(&first.plan, 20);
        let planned = bench.plan(&settings(mode), &[&longer], &[9]);
        assert_eq!(planned.plan.resume.as_ref().map_or(0, |hit| hit.tokens), covered, "{mode}");
        assert_eq!(planned.segments[0].covered, covered);
    }
}

#[test]
fn states_are_not_shared_across_settings() {
    let bench = Bench::new(1);
    let segment = ids(1, 10);
    let first = bench.plan(&settings(Mode::Hypic), &[&segment], &[1, 2]);
    bench.states.keep(&first.plan, SEAM);
    let others = [
        settings(Mode::Prefix),
        settings(Mode::Full),
        Settings { rule: ComposeRule::Add, ..settings(Mode::Hypic) },
        Settings { seam: 5, ..settings(Mode::Hypic) },
        Settings { anchor: Arc::new([]), ..settings(Mode::Hypic) },
        Settings { salt: Arc::new(*b"tenant"), ..settings(Mode::Hypic) },
    ];
    for (i, other) in others.iter().enumerate() {
        assert!(bench.plan(other, &[&segment], &[1, 2]).plan.resume.is_none(), "settings {i}");
    }
    assert!(bench.plan(&settings(Mode::Hypic), &[&segment], &[1, 2]).plan.resume.is_some());
}
