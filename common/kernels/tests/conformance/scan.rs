//! The recurrences: outputs, end states, operators and zero-start states of bodies.

use std::panic::{AssertUnwindSafe, catch_unwind};

use hypic_kernels::{Backend, Form, GRID, ScanShape};
use hypic_state::{ComposeRule, Dense, HostTensor, Transition};

use crate::scan_case::{Body, Case, Do, Entry, Outcome, decay_of_body, run};
use crate::scan_inputs::{
    BETAS, Beta, GDN, GLA, KDA, KEYS, KINDS, Keys, Kind, LIGHTNING, MAMBA2, ORDINARY, STRENGTHS, Strength, Writes,
    inputs,
};
use crate::scan_jumps::{RULES, entries, rope};
use crate::support::{Rng, close, cpu_thread_pairs, is_f64, largest, reference, same_bits, within};

/// Share of the largest value, as for the golden vectors.
pub const TOLERANCE: f64 = 2e-5;

/// The same, of a few roundings of f32.
const ROUNDINGS: f64 = 5e-7;

const SMALL: ScanShape = ScanShape { key_heads: 1, heads: 2, d_k: 5, d_v: 7 };
/// Lengths around the edges of chunks and of what they are divided into.
const EDGES: [usize; 11] = [0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 130];

/// The shape for a kind: decays of channels need keys for every head.
fn fit(shape: ScanShape, kind: Kind) -> ScanShape {
    if kind.decays.by_channel() { ScanShape { key_heads: shape.heads, ..shape } } else { shape }
}

pub fn compare(label: &str, got: &Outcome, want: &Outcome, case: &Case) {
    // An eigenvalue of -1 damps nothing: the roundings of |k|^2 of all tokens add up.
    let tolerance = if case.kind.writes == Writes::DeltaNegative { 3.0 * TOLERANCE } else { TOLERANCE };
    for seq in 0..case.states.len() {
        close(&format!("{label}: outputs of {seq}"), &got.outs[seq], &want.outs[seq], tolerance);
        close(&format!("{label}: state of {seq}"), &got.states[seq], &want.states[seq], tolerance);
        close(&format!("{label}: saves of {seq}"), &got.saves[seq], &want.saves[seq], tolerance);
        let (Some(got), Some(want)) = (&got.bodies[seq], &want.bodies[seq]) else {
            assert!(got.bodies[seq].is_none() && want.bodies[seq].is_none(), "{label}: bodies");
            continue;
        };
        assert_eq!(got.form, want.form, "{label}: form of the operator of {seq}");
        let operator = format!("{label}: T of {seq}");
        match got.form {
            // Numbers of their own, each good to what its exponent is good to.
            Form::Scalar | Form::Diagonal => {
                for (got, want) in got.transition.iter().zip(&want.transition) {
                    let bound = 1e-6 * want * (1.0 + want.ln().abs()) + 1e-30;
                    within(&operator, &[*got], &[*want], if *want > 0.0 { bound } else { 1e-30 });
                }
            }
            Form::Dense => {
                let scale = largest(&want.transition).max(decay_of_body(case, seq));
                within(&operator, &got.transition, &want.transition, tolerance * scale);
                // What is left of a head may be nothing but roundings, on both sides of the bound for omission.
                let size = got.transition.len() / case.shape.heads;
                for head in 0..case.shape.heads {
                    if got.kept.contains(&(head as u32)) != want.kept.contains(&(head as u32)) {
                        let of_head = head * size..(head + 1) * size;
                        let left = largest(&got.transition[of_head.clone()]).max(largest(&want.transition[of_head]));
                        assert!(left <= ROUNDINGS * scale, "{operator}: head {head}, of which {left:e} is left");
                    }
                }
            }
        }
        // It may come from the difference of two states.
        let scale = largest(&want.state).max(largest(&case.states[seq].to_f64()));
        within(&format!("{label}: zero-start state of {seq}"), &got.state, &want.state, tolerance * scale);
    }
}

fn same(label: &str, got: &Outcome, want: &Outcome, seq: usize) {
    same_bits(&format!("{label}: outputs"), &got.outs[seq], &want.outs[seq]);
    same_bits(&format!("{label}: state"), &got.states[seq], &want.states[seq]);
    if let (Some(got), Some(want)) = (&got.bodies[seq], &want.bodies[seq]) {
        assert_eq!(got.kept, want.kept, "{label}: heads with an operator");
        same_bits(&format!("{label}: T"), &got.transition, &want.transition);
        same_bits(&format!("{label}: zero-start state"), &got.state, &want.state);
    }
}

fn body_behind_seam<B: Backend>(b: &B, kind: Kind, length: usize, seam: usize) {
    let mut rng = Rng::new(2000 + length as u64);
    let mut case = inputs(&mut rng, fit(SMALL, kind), kind, seam + length, 1, ORDINARY);
    case.calls = vec![vec![vec![Do::Rows(0..seam), Do::Body(seam..seam + length)]]];
    let label = format!("{} {kind:?} length={length}", b.kernel_set());
    compare(&label, &run(b, &case), &run(&reference(), &case), &case);
}

/// Every length modulo the chunk, as a body behind a seam.
pub fn every_length_matches<B: Backend>(b: &B) {
    for length in 0..=2 * GRID + 2 {
        for kind in [GDN, KDA, MAMBA2, GLA] {
            body_behind_seam(b, kind, length, length % 4);
        }
    }
}

/// Every kind of decay and write.
pub fn every_kind_matches<B: Backend>(b: &B) {
    for kind in KINDS {
        for length in EDGES {
            body_behind_seam(b, kind, length, 3);
        }
    }
}

/// Decays of every strength, full corrections with and without negative eigenvalues, identical keys.
pub fn hard_inputs_match<B: Backend>(b: &B) {
    let r = reference();
    for kind in KINDS {
        let betas = if kind.writes.delta() { &BETAS[..] } else { &BETAS[..1] };
        for strength in STRENGTHS {
            for beta in betas {
                for keys in KEYS {
                    let mut rng = Rng::new(2200);
                    let shape = fit(ScanShape { key_heads: 2, heads: 4, d_k: 9, d_v: 6 }, kind);
                    let mut case = inputs(&mut rng, shape, kind, 140, 1, (strength, *beta, keys));
                    case.unit |= kind.writes.delta();
                    case.calls = vec![vec![vec![Do::Rows(0..5), Do::Body(5..140)]]];
                    let label = format!("{} {kind:?} {strength:?} {beta:?} {keys:?}", b.kernel_set());
                    compare(&label, &run(b, &case), &run(&r, &case), &case);
                }
            }
        }
    }
}

/// Random walks: several sequences, rows, jumps and saves in any order, over several calls; a body that
/// begins in one call and goes on in later ones.
pub fn walks_match<B: Backend>(b: &B) {
    let r = reference();
    for seed in 0..80 {
        let mut rng = Rng::new(2400 + seed);
        let kind = rng.pick(&KINDS);
        let key_heads = rng.between(1, 3);
        let shape = ScanShape {
            key_heads,
            heads: key_heads * rng.between(1, 3),
            d_k: rng.pick(&[1, 4, 8, 16, 20]),
            d_v: rng.pick(&[1, 3, 8, 16, 24, 33]),
        };
        let shape = fit(shape, kind);
        let sort = (rng.pick(&STRENGTHS), rng.pick(&BETAS), rng.pick(&KEYS));
        let (sequences, rows) = (rng.between(1, 4), rng.between(1, 330));
        let mut case = inputs(&mut rng, shape, kind, rows, sequences, sort);
        case.entries = entries(&mut rng, shape);
        case.rope = Some(rope(&mut rng, shape.d_k));
        case.calls = walk(&mut rng, rows, sequences, case.entries.len());
        let label = format!("{} seed={seed} {shape:?} {kind:?} {sort:?} {:?}", b.kernel_set(), case.calls);
        compare(&label, &run(b, &case), &run(&r, &case), &case);
    }
}

/// Calls whose row steps tile `0..rows`.
fn walk(rng: &mut Rng, rows: usize, sequences: usize, entries: usize) -> Vec<Vec<Vec<Do>>> {
    let mut calls = Vec::new();
    let mut next = 0;
    // 0: before the body, 1: within, 2: behind.
    let mut phase = vec![0; sequences];
    while next < rows {
        let mut call = vec![Vec::new(); sequences];
        for (seq, steps) in call.iter_mut().enumerate() {
            if phase[seq] == 1 {
                let length = rng.pick(&[0, 1, GRID, 2 * GRID, 10]).min(rows - next);
                steps.push(Do::Body(next..next + length));
                next += length;
                phase[seq] = rng.pick(&[1, 2]);
                if phase[seq] == 1 {
                    continue;
                }
            }
            for _ in 0..rng.below(4) {
                let length = rng.pick(&[0, 1, 2, 5, 63, 64, 65, 100]).min(rows - next);
                let body = phase[seq] == 0 && rng.chance(0.3);
                match rng.below(4) {
                    0 => {
                        let entry = rng.below(entries);
                        // Only the first one's operator is a multiple of the identity.
                        let by = (entry == 0 && rng.chance(0.5)).then(|| rng.below(1000) as i64);
                        steps.push(Do::Jump(rng.pick(&RULES), entry, by));
                    }
                    1 => steps.push(Do::Save),
                    _ => {
                        steps.push(if body { Do::Body(next..next + length) } else { Do::Rows(next..next + length) });
                        next += length;
                    }
                }
                if matches!(steps.last(), Some(Do::Body(_))) {
                    phase[seq] = rng.pick(&[1, 2]);
                    if phase[seq] == 1 {
                        break;
                    }
                }
            }
        }
        calls.push(call);
    }
    calls
}

/// Heads as wide as production models'.
pub fn wide_heads_match<B: Backend>(b: &B) {
    let r = reference();
    for (seed, (d_k, d_v)) in [(128, 128), (64, 96), (100, 20)].into_iter().enumerate() {
        for kind in [GDN, KDA, LIGHTNING, MAMBA2] {
            let mut rng = Rng::new(2500 + seed as u64);
            let shape = fit(ScanShape { key_heads: 1, heads: 2, d_k, d_v }, kind);
            let mut case = inputs(&mut rng, shape, kind, 75, 1, ORDINARY);
            case.calls = vec![vec![vec![Do::Rows(0..3), Do::Body(3..75)]]];
            let label = format!("{} {kind:?} d_k={d_k} d_v={d_v}", b.kernel_set());
            compare(&label, &run(b, &case), &run(&r, &case), &case);
        }
    }
}

/// A body in one step, or cut at multiples of the grid over several calls: the same bits.
pub fn bodies_are_cut_on_the_grid<B: Backend>(b: &B) {
    for (seed, kind) in KINDS.into_iter().enumerate() {
        let mut rng = Rng::new(2600 + seed as u64);
        let shape = fit(ScanShape { key_heads: 1, heads: 3, d_k: 12, d_v: 17 }, kind);
        let (seam, length) = (rng.below(9), rng.between(3 * GRID, 5 * GRID));
        let end = seam + length;
        let strength = STRENGTHS[seed % STRENGTHS.len()];
        let mut case = inputs(&mut rng, shape, kind, end, 1, (strength, Beta::Any, Keys::Any));
        case.calls = vec![vec![vec![Do::Rows(0..seam), Do::Body(seam..end)]]];
        let whole = run(b, &case);

        let cuts = [seam + GRID, seam + GRID * rng.pick(&[2, 3])];
        case.calls = vec![
            vec![vec![Do::Rows(0..seam)]],
            vec![vec![Do::Body(seam..cuts[0])]],
            vec![vec![Do::Body(cuts[0]..cuts[1])]],
            vec![vec![Do::Body(cuts[1]..end)]],
        ];
        let label = format!("{} {kind:?} {strength:?} {seam}+{length} cut at {cuts:?}", b.kernel_set());
        same(&label, &run(b, &case), &whole, 0);

        // Without a carry, in one call, the outputs and the state stay the same as well.
        let rows = [seam..cuts[0], cuts[0]..cuts[1], cuts[1]..end].map(Do::Rows);
        let steps = [Do::Rows(0..seam)].into_iter().chain(rows);
        case.calls = vec![vec![steps.collect()]];
        same(&format!("{label}, no carry"), &run(b, &case), &whole, 0);
    }
}

/// A sequence alone, or between others in a batch: the same bits.
pub fn sequences_are_independent<B: Backend>(b: &B) {
    for (seed, kind) in KINDS.into_iter().enumerate() {
        let mut rng = Rng::new(2700 + seed as u64);
        let shape = fit(ScanShape { key_heads: 2, heads: 4, d_k: 8, d_v: 11 }, kind);
        let mut case = inputs(&mut rng, shape, kind, 210, 3, ORDINARY);
        case.entries = entries(&mut rng, shape);
        let (start, body, end) = (rng.between(0, 40), rng.between(41, 60), rng.between(100, 190));
        let tail = [Do::Jump(ComposeRule::Transition, 4, None), Do::Rows(end..end + 3)];
        let steps: Vec<Do> = [Do::Rows(start..body), Do::Body(body..end)].into_iter().chain(tail).collect();
        case.calls = vec![vec![vec![], steps.clone(), vec![]]];
        let alone = run(b, &case);
        case.calls = vec![vec![vec![Do::Rows(0..start)], steps, vec![Do::Body(end + 3..210)]]];
        same(&format!("{} {kind:?}", b.kernel_set()), &run(b, &case), &alone, 1);
    }
}

/// Jumping over a body is folding its rows, from any state.
pub fn body_composes<B: Backend>(b: &B) {
    let tolerance = if is_f64(b) { 1e-12 } else { TOLERANCE };
    for kind in KINDS {
        for length in [1, 2, 63, 64, 65, 150] {
            let mut rng = Rng::new(2800 + length as u64);
            let shape = fit(ScanShape { key_heads: 1, heads: 2, d_k: 10, d_v: 6 }, kind);
            let mut case = inputs(&mut rng, shape, kind, length, 2, (Strength::None, Beta::Any, Keys::Any));
            case.calls = vec![vec![vec![Do::Body(0..length)], vec![]]];
            let Some(Body { form, kept, transition, state }) = run(b, &case).bodies.swap_remove(0) else {
                panic!("the first sequence has a body")
            };
            assert_eq!(kept, [0, 1], "nothing decays");
            let transition = match form {
                Form::Scalar => Transition::Scalar(HostTensor::from_f64([2], &transition)),
                Form::Diagonal => Transition::Diagonal(HostTensor::from_f64([2, 10], &transition)),
                Form::Dense => {
                    let blocks = HostTensor::from_f64([2, 10, 10], &transition);
                    Transition::Dense(Dense { heads: 2, kept, blocks })
                }
            };
            case.entries = vec![Entry { transition, state: HostTensor::from_f64([2, 10, 6], &state) }];
            // The second sequence starts elsewhere than the body did.
            case.calls = vec![vec![vec![], vec![Do::Rows(0..length)]]];
            let rows = run(b, &case);
            case.calls = vec![vec![vec![], vec![Do::Jump(ComposeRule::Transition, 0, None)]]];
            let label = format!("{} {kind:?} body of {length}", b.kernel_set());
            close(&label, &run(b, &case).states[1], &rows.states[1], tolerance);
        }
    }
}

/// A body of no rows: the identity and a zero state.
pub fn empty_body_is_the_identity<B: Backend>(b: &B) {
    for kind in [LIGHTNING, GLA, GDN] {
        let mut case = inputs(&mut Rng::new(2900), fit(SMALL, kind), kind, 3, 1, ORDINARY);
        case.calls = vec![vec![vec![Do::Rows(0..3), Do::Body(3..3)]]];
        let Some(body) = run(b, &case).bodies.swap_remove(0) else { panic!("a body was begun") };
        let want: Vec<f64> = match body.form {
            Form::Scalar => vec![1.0; 2],
            Form::Diagonal => vec![1.0; 2 * 5],
            Form::Dense => (0..2 * 5 * 5).map(|i| if (i % 25) / 5 == i % 5 { 1.0 } else { 0.0 }).collect(),
        };
        same_bits("T", &body.transition, &want);
        within("zero-start state", &body.state, &[0.0; 2 * 5 * 7], 0.0);
    }
}

pub fn threads_agree() {
    for (one, many) in cpu_thread_pairs() {
        for kind in [GDN, KDA, LIGHTNING, MAMBA2, GLA] {
            let mut rng = Rng::new(2950);
            let shape = fit(ScanShape { key_heads: 2, heads: 6, d_k: 32, d_v: 40 }, kind);
            let mut case = inputs(&mut rng, shape, kind, 400, 2, ORDINARY);
            case.entries = entries(&mut rng, shape);
            let first = vec![Do::Rows(0..8), Do::Body(8..200), Do::Jump(ComposeRule::Transition, 4, None)];
            case.calls = vec![vec![first, vec![Do::Body(200..400)]]];
            let (got, want) = (run(&many, &case), run(&one, &case));
            for seq in 0..2 {
                same(&format!("{} threads {kind:?}", one.kernel_set()), &got, &want, seq);
            }
        }
    }
}

/// No row is folded twice.
pub fn overlapping_rows_are_refused<B: Backend>(b: &B) {
    let mut case = inputs(&mut Rng::new(2960), SMALL, GDN, 4, 2, ORDINARY);
    for calls in [vec![vec![Do::Rows(0..3), Do::Rows(2..4)], vec![]], vec![vec![Do::Rows(0..3)], vec![Do::Rows(2..3)]]]
    {
        case.calls = vec![calls];
        let refused = catch_unwind(AssertUnwindSafe(|| run(b, &case))).err();
        let message = refused.and_then(|e| e.downcast::<&str>().ok());
        assert!(message.is_some_and(|m| m.contains("a row is in two steps")), "{:?} was accepted", case.calls);
    }
}
