//! The gated-delta scan: outputs, end states, operators and zero-start states of bodies, jumps.

use hypic_kernels::{Backend, DeltaShape, GRID};
use hypic_state::{ComposeRule, Dense, HostTensor, Transition};

use crate::delta_case::{
    BETAS, Beta, Body, Case, DECAYS, Decay, Do, Entry, KEYS, Keys, Outcome, decay_of_body, inputs, run,
};
use crate::support::{Rng, close, cpu_thread_pairs, is_f64, largest, reference, same_bits, within};

/// Share of the largest value, as for the golden vectors.
const TOLERANCE: f64 = 2e-5;

const SMALL: DeltaShape = DeltaShape { key_heads: 1, heads: 2, d_k: 5, d_v: 7, beta_scale: 1.0 };
const ORDINARY: (Decay, Beta, Keys) = (Decay::Mild, Beta::Any, Keys::Any);

fn compare(label: &str, got: &Outcome, want: &Outcome, case: &Case) {
    for seq in 0..case.states.len() {
        close(&format!("{label}: outputs of {seq}"), &got.outs[seq], &want.outs[seq], TOLERANCE);
        close(&format!("{label}: state of {seq}"), &got.states[seq], &want.states[seq], TOLERANCE);
        close(&format!("{label}: saves of {seq}"), &got.saves[seq], &want.saves[seq], TOLERANCE);
        let (Some(got), Some(want)) = (&got.bodies[seq], &want.bodies[seq]) else {
            assert!(got.bodies[seq].is_none() && want.bodies[seq].is_none(), "{label}: bodies");
            continue;
        };
        assert_eq!(got.kept, want.kept, "{label}: heads with an operator, of {seq}");
        let scale = largest(&want.transition).max(decay_of_body(case, seq));
        within(&format!("{label}: T of {seq}"), &got.transition, &want.transition, TOLERANCE * scale);
        // It may come from the difference of two states.
        let scale = largest(&want.state).max(largest(&case.states[seq].to_f64()));
        within(&format!("{label}: zero-start state of {seq}"), &got.state, &want.state, TOLERANCE * scale);
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

/// Every length modulo the chunk, as a body behind a seam.
pub fn every_length_matches<B: Backend>(b: &B) {
    let r = reference();
    for length in 0..=2 * GRID + 2 {
        let mut rng = Rng::new(2000 + length as u64);
        let seam = length % 4;
        let mut case = inputs(&mut rng, SMALL, seam + length, 1, ORDINARY);
        case.calls = vec![vec![vec![Do::Rows(0..seam), Do::Body(seam..seam + length)]]];
        let label = format!("{} delta length={length}", b.kernel_set());
        compare(&label, &run(b, &case), &run(&r, &case), &case);
    }
}

/// Strong and no decay, full corrections with and without negative eigenvalues, identical keys.
pub fn hard_inputs_match<B: Backend>(b: &B) {
    let r = reference();
    for (seed, beta_scale) in [(0, 1.0), (1, 2.0)] {
        for decay in DECAYS {
            for beta in BETAS {
                for keys in KEYS {
                    let mut rng = Rng::new(2200 + seed);
                    let shape = DeltaShape { key_heads: 2, heads: 4, d_k: 9, d_v: 6, beta_scale };
                    let mut case = inputs(&mut rng, shape, 140, 1, (decay, beta, keys));
                    case.calls = vec![vec![vec![Do::Rows(0..5), Do::Body(5..140)]]];
                    let label = format!("{} delta {decay:?} {beta:?}*{beta_scale} {keys:?}", b.kernel_set());
                    compare(&label, &run(b, &case), &run(&r, &case), &case);
                }
            }
        }
    }
}

/// An entry of each form of operator; dense ones omit some heads.
fn entries(rng: &mut Rng, shape: DeltaShape) -> Vec<Entry> {
    let DeltaShape { heads, d_k, d_v, .. } = shape;
    let mut forms =
        vec![Transition::Scalar(rng.tensor(&[heads], 0.5)), Transition::Diagonal(rng.tensor(&[heads, d_k], 0.5))];
    let some: Vec<u32> = (0..heads as u32).filter(|_| rng.chance(0.5)).collect();
    for kept in [Vec::new(), some, (0..heads as u32).collect()] {
        let blocks = rng.tensor(&[kept.len(), d_k, d_k], 0.3);
        forms.push(Transition::Dense(Dense { heads, kept, blocks }));
    }
    let entry = |transition| Entry { transition, state: rng.tensor(&[heads, d_k, d_v], 0.7) };
    forms.into_iter().map(entry).collect()
}

const RULES: [ComposeRule; 3] = [ComposeRule::Transition, ComposeRule::Last, ComposeRule::Add];

/// Every rule with every form of operator, and nothing else in the call.
pub fn jumps_match<B: Backend>(b: &B) {
    let r = reference();
    for (seed, d_k) in [3, 16, 33].into_iter().enumerate() {
        let shape = DeltaShape { key_heads: 3, heads: 3, d_k, d_v: 10, beta_scale: 1.0 };
        for rule in RULES {
            for entry in 0..5 {
                let mut rng = Rng::new(2300 + seed as u64);
                let mut case = inputs(&mut rng, shape, 0, 1, ORDINARY);
                case.entries = entries(&mut rng, shape);
                case.calls = vec![vec![vec![Do::Save, Do::Jump(rule, entry), Do::Save]]];
                let label = format!("{} jump {rule} entry={entry} d_k={d_k}", b.kernel_set());
                compare(&label, &run(b, &case), &run(&r, &case), &case);
            }
        }
    }
}

/// Random walks: several sequences, rows, jumps and saves in any order, over several calls; a body that
/// begins in one call and goes on in later ones.
pub fn walks_match<B: Backend>(b: &B) {
    let r = reference();
    for seed in 0..40 {
        let mut rng = Rng::new(2400 + seed);
        let key_heads = rng.between(1, 3);
        let shape = DeltaShape {
            key_heads,
            heads: key_heads * rng.between(1, 3),
            d_k: rng.pick(&[1, 4, 8, 16, 20]),
            d_v: rng.pick(&[1, 3, 8, 16, 24, 33]),
            beta_scale: rng.pick(&[1.0, 2.0]),
        };
        let kinds = (rng.pick(&DECAYS), rng.pick(&BETAS), rng.pick(&KEYS));
        let (sequences, rows) = (rng.between(1, 4), rng.between(1, 330));
        let mut case = inputs(&mut rng, shape, rows, sequences, kinds);
        case.entries = entries(&mut rng, shape);
        case.calls = walk(&mut rng, rows, sequences, case.entries.len());
        let label = format!("{} delta seed={seed} {shape:?} {kinds:?} {:?}", b.kernel_set(), case.calls);
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
                    0 => steps.push(Do::Jump(rng.pick(&RULES), rng.below(entries))),
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
        let mut rng = Rng::new(2500 + seed as u64);
        let shape = DeltaShape { key_heads: 1, heads: 2, d_k, d_v, beta_scale: 1.0 };
        let mut case = inputs(&mut rng, shape, 75, 1, ORDINARY);
        case.calls = vec![vec![vec![Do::Rows(0..3), Do::Body(3..75)]]];
        let label = format!("{} delta d_k={d_k} d_v={d_v}", b.kernel_set());
        compare(&label, &run(b, &case), &run(&r, &case), &case);
    }
}

/// A body in one step, or cut at multiples of the grid over several calls: the same bits.
pub fn delta_is_cut_on_the_grid<B: Backend>(b: &B) {
    for seed in 0..8 {
        let mut rng = Rng::new(2600 + seed);
        let shape = DeltaShape { key_heads: 1, heads: 3, d_k: 12, d_v: 17, beta_scale: 1.0 };
        let (seam, length) = (rng.below(9), rng.between(3 * GRID, 5 * GRID));
        let end = seam + length;
        let mut case = inputs(&mut rng, shape, end, 1, (rng_decay(seed), Beta::Any, Keys::Any));
        case.calls = vec![vec![vec![Do::Rows(0..seam), Do::Body(seam..end)]]];
        let whole = run(b, &case);

        let cuts = [seam + GRID, seam + GRID * rng.pick(&[2, 3])];
        case.calls = vec![
            vec![vec![Do::Rows(0..seam)]],
            vec![vec![Do::Body(seam..cuts[0])]],
            vec![vec![Do::Body(cuts[0]..cuts[1])]],
            vec![vec![Do::Body(cuts[1]..end)]],
        ];
        let label = format!("{} delta seed={seed} {seam}+{length} cut at {cuts:?}", b.kernel_set());
        same(&label, &run(b, &case), &whole, 0);

        // Without a carry, in one call, the outputs and the state stay the same as well.
        let rows = [seam..cuts[0], cuts[0]..cuts[1], cuts[1]..end].map(Do::Rows);
        let steps = [Do::Rows(0..seam)].into_iter().chain(rows);
        case.calls = vec![vec![steps.collect()]];
        same(&format!("{label}, no carry"), &run(b, &case), &whole, 0);
    }
}

fn rng_decay(seed: u64) -> Decay {
    DECAYS[seed as usize % DECAYS.len()]
}

/// A sequence alone, or between others in a batch: the same bits.
pub fn sequences_are_independent<B: Backend>(b: &B) {
    for seed in 0..8 {
        let mut rng = Rng::new(2700 + seed);
        let shape = DeltaShape { key_heads: 2, heads: 4, d_k: 8, d_v: 11, beta_scale: 2.0 };
        let mut case = inputs(&mut rng, shape, 210, 3, ORDINARY);
        case.entries = entries(&mut rng, shape);
        let (start, body, end) = (rng.between(0, 40), rng.between(41, 60), rng.between(100, 190));
        let tail = [Do::Jump(ComposeRule::Transition, 4), Do::Rows(end..end + 3)];
        let steps: Vec<Do> = [Do::Rows(start..body), Do::Body(body..end)].into_iter().chain(tail).collect();
        case.calls = vec![vec![vec![], steps.clone(), vec![]]];
        let alone = run(b, &case);
        case.calls = vec![vec![vec![Do::Rows(0..start)], steps, vec![Do::Body(end + 3..210)]]];
        same(&format!("{} delta seed={seed}", b.kernel_set()), &run(b, &case), &alone, 1);
    }
}

/// Jumping over a body is folding its rows, from any state.
pub fn body_composes<B: Backend>(b: &B) {
    let tolerance = if is_f64(b) { 1e-12 } else { TOLERANCE };
    for length in [1, 2, 63, 64, 65, 150] {
        let mut rng = Rng::new(2800 + length as u64);
        let shape = DeltaShape { key_heads: 1, heads: 2, d_k: 10, d_v: 6, beta_scale: 2.0 };
        let mut case = inputs(&mut rng, shape, length, 2, (Decay::None, Beta::Any, Keys::Any));
        case.calls = vec![vec![vec![Do::Body(0..length)], vec![]]];
        let Some(Body { kept, transition, state }) = run(b, &case).bodies.swap_remove(0) else {
            panic!("the first sequence has a body")
        };
        assert_eq!(kept, [0, 1], "nothing decays");
        let blocks = HostTensor::from_f64([2, 10, 10], &transition);
        case.entries = vec![Entry {
            transition: Transition::Dense(Dense { heads: 2, kept, blocks }),
            state: HostTensor::from_f64([2, 10, 6], &state),
        }];
        // The second sequence starts elsewhere than the body did.
        case.calls = vec![vec![vec![], vec![Do::Rows(0..length)]]];
        let rows = run(b, &case);
        case.calls = vec![vec![vec![], vec![Do::Jump(ComposeRule::Transition, 0)]]];
        let label = format!("{} body of {length}", b.kernel_set());
        close(&label, &run(b, &case).states[1], &rows.states[1], tolerance);
    }
}

/// A body of no rows: the identity and a zero state.
pub fn empty_body_is_the_identity<B: Backend>(b: &B) {
    let mut case = inputs(&mut Rng::new(2900), SMALL, 3, 1, ORDINARY);
    case.calls = vec![vec![vec![Do::Rows(0..3), Do::Body(3..3)]]];
    let Some(body) = run(b, &case).bodies.swap_remove(0) else { panic!("a body was begun") };
    let identity: Vec<f64> = (0..2 * 5 * 5).map(|i| if (i % 25) / 5 == i % 5 { 1.0 } else { 0.0 }).collect();
    same_bits("T", &body.transition, &identity);
    within("zero-start state", &body.state, &[0.0; 2 * 5 * 7], 0.0);
}

pub fn threads_agree() {
    for (one, many) in cpu_thread_pairs() {
        let mut rng = Rng::new(2950);
        let shape = DeltaShape { key_heads: 2, heads: 4, d_k: 32, d_v: 40, beta_scale: 1.0 };
        let mut case = inputs(&mut rng, shape, 400, 2, ORDINARY);
        case.entries = entries(&mut rng, shape);
        let first = vec![Do::Rows(0..8), Do::Body(8..200), Do::Jump(ComposeRule::Transition, 4)];
        case.calls = vec![vec![first, vec![Do::Body(200..400)]]];
        let (got, want) = (run(&many, &case), run(&one, &case));
        for seq in 0..2 {
            same(&format!("{} threads delta", one.kernel_set()), &got, &want, seq);
        }
    }
}
