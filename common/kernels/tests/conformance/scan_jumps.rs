//! Jumps over entries: every rule, every form of operator, turned or not.

use std::panic::{AssertUnwindSafe, catch_unwind};

use hypic_kernels::{Backend, RopeSpec, ScanShape};
use hypic_state::{ComposeRule, Dense, Transition};

use crate::scan::compare;
use crate::scan_case::{Case, Do, Entry, run};
use crate::scan_inputs::{GDN, ORDINARY, inputs};
use crate::support::{Rng, close, reference, same_bits};

pub const RULES: [ComposeRule; 3] = [ComposeRule::Transition, ComposeRule::Last, ComposeRule::Add];

/// An entry of each form of operator, the scalar one first; dense ones omit some heads.
pub fn entries(rng: &mut Rng, shape: ScanShape) -> Vec<Entry> {
    let ScanShape { heads, d_k, d_v, .. } = shape;
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

/// A rotation of some of the dimensions of keys; its factor must not show.
pub fn rope(rng: &mut Rng, d_k: usize) -> RopeSpec {
    let pairs = rng.between(0, d_k / 2);
    RopeSpec {
        offset: rng.between(0, d_k - 2 * pairs),
        inv_freq: (0..pairs).map(|_| rng.uniform(-7.0, 0.0).exp()).collect(),
        interleaved: rng.chance(0.5),
        scale: rng.uniform(0.5, 1.5),
    }
}

fn only_jumps(rng: &mut Rng, d_k: usize) -> Case {
    let shape = ScanShape { key_heads: 3, heads: 3, d_k, d_v: 10 };
    let mut case = inputs(rng, shape, GDN, 0, 1, ORDINARY);
    case.entries = entries(rng, shape);
    case.rope = Some(rope(rng, d_k));
    case
}

/// Every rule with every form of operator, and nothing else in the call.
pub fn jumps_match<B: Backend>(b: &B) {
    let r = reference();
    for (seed, d_k) in [3, 16, 33].into_iter().enumerate() {
        for rule in RULES {
            for (entry, by) in [(0, None), (1, None), (2, None), (3, None), (4, None), (0, Some(77)), (0, Some(90_001))]
            {
                let mut case = only_jumps(&mut Rng::new(2300 + seed as u64), d_k);
                case.calls = vec![vec![vec![Do::Save, Do::Jump(rule, entry, by), Do::Save]]];
                let label = format!("{} jump {rule} entry={entry} by={by:?} d_k={d_k}", b.kernel_set());
                compare(&label, &run(b, &case), &run(&r, &case), &case);
            }
        }
    }
}

/// What jumps are, written out for numbers of heads: `S <- t S + R S_body`, and by the other rules.
pub fn turned_jumps_do_what_they_say<B: Backend>(b: &B) {
    for seed in 0..6 {
        let (d_k, d_v, by) = (12, 10, 41 * seed as i64 - 60);
        let mut case = only_jumps(&mut Rng::new(2350 + seed), d_k);
        let spec = case.rope.clone().expect("a rotation");
        let before = case.states[0].to_f64();
        let mut body = case.entries[0].state.to_f64();
        for head in body.chunks_mut(d_k * d_v) {
            for (i, freq) in spec.inv_freq.iter().enumerate() {
                let pair = if spec.interleaved { (2 * i, 2 * i + 1) } else { (i, i + spec.inv_freq.len()) };
                let (first, second) = ((spec.offset + pair.0) * d_v, (spec.offset + pair.1) * d_v);
                let (sin, cos) = (by as f64 * freq).sin_cos();
                for j in 0..d_v {
                    let (x, y) = (head[first + j], head[second + j]);
                    (head[first + j], head[second + j]) = (x * cos - y * sin, y * cos + x * sin);
                }
            }
        }
        let factors = case.entries[0].transition.tensor().to_f64();
        for rule in RULES {
            case.calls = vec![vec![vec![Do::Jump(rule, 0, Some(by))]]];
            let want = body.iter().zip(&before).enumerate().map(|(i, (body, before))| match rule {
                ComposeRule::Transition => factors[i / (d_k * d_v)] * before + body,
                ComposeRule::Last => *body,
                ComposeRule::Add => before + body,
            });
            let label = format!("{} jump {rule} turned by {by}", b.kernel_set());
            close(&label, &run(b, &case).states[0], &want.collect::<Vec<_>>(), 1e-6);
        }
    }
}

/// A turn by nothing is no turn.
pub fn turning_by_nothing_changes_nothing<B: Backend>(b: &B) {
    for rule in RULES {
        let mut case = only_jumps(&mut Rng::new(2360), 12);
        case.calls = vec![vec![vec![Do::Jump(rule, 0, None)]]];
        let plain = run(b, &case);
        case.calls = vec![vec![vec![Do::Jump(rule, 0, Some(0))]]];
        same_bits("turned by nothing", &run(b, &case).states[0], &plain.states[0]);
    }
}

/// Operators that do not commute with rotations are not turned, by no rule.
pub fn turns_of_matrices_are_refused<B: Backend>(b: &B) {
    for rule in RULES {
        for entry in 1..5 {
            let mut case = only_jumps(&mut Rng::new(2370), 12);
            case.calls = vec![vec![vec![Do::Jump(rule, entry, Some(5))]]];
            let refused = catch_unwind(AssertUnwindSafe(|| run(b, &case))).err();
            let message = refused.and_then(|e| e.downcast::<&str>().map(|m| m.to_string()).ok());
            let message = message.expect("a turn of a matrix is refused");
            assert!(message.contains("multiple of the identity"), "{message}");
        }
    }
}
