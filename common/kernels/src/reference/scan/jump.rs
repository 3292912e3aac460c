//! Jumps: the application of an entry to a state, by every rule and with every form of operator.

use hypic_state::{ComposeRule, RecurrentPart, Transition};

use crate::reference::Reference;
use crate::reference::kv::RefRope;
use crate::reference::real::Real;
use crate::reference::tensor::RefTensor;
use crate::{RopeSpec, Turn};

/// Apply an entry to a state.
pub(super) fn jump<R: Real>(
    state: &mut RefTensor<R>,
    rule: ComposeRule,
    part: &RecurrentPart<Reference<R>>,
    turn: Option<Turn<'_, Reference<R>>>,
) {
    let turned = turn.map(|turn| turned(&part.state, turn));
    let body = turned.as_ref().unwrap_or(&part.state);
    match rule {
        ComposeRule::Last => state.copy_from(body),
        ComposeRule::Add => add(state, body),
        ComposeRule::Transition => {
            apply(&part.transition, state);
            add(state, body);
        }
    }
}

/// `state [heads, d_k, d_v]` with every column turned like a key.
fn turned<R: Real>(state: &RefTensor<R>, turn: Turn<'_, Reference<R>>) -> RefTensor<R> {
    let [_, d_k, d_v] = state.shape[..] else { unreachable!("a state has three axes") };
    // The keys in the state have the factor on cosine and sine already.
    let rotation = RefRope::<R>::new(&RopeSpec { scale: 1.0, ..turn.rope.spec.clone() });
    let mut turned = state.clone();
    for head in turned.data.chunks_mut(d_k * d_v) {
        for j in 0..d_v {
            let mut column: Vec<R> = head.iter().skip(j).step_by(d_v).copied().collect();
            rotation.rotate(&mut column, turn.by);
            head.iter_mut().skip(j).step_by(d_v).zip(column).for_each(|(to, x)| *to = x);
        }
    }
    turned
}

fn add<R: Real>(state: &mut RefTensor<R>, other: &RefTensor<R>) {
    for (s, o) in state.data.iter_mut().zip(&other.data) {
        *s += *o;
    }
}

/// `S <- T S`, omitted operators being zero.
fn apply<R: Real>(transition: &Transition<RefTensor<R>>, state: &mut RefTensor<R>) {
    let [_, d_k, d_v] = state.shape[..] else { unreachable!("a state has three axes") };
    match transition {
        Transition::Scalar(t) => {
            for (i, s) in state.data.iter_mut().enumerate() {
                *s = *s * t.data[i / (d_k * d_v)];
            }
        }
        Transition::Diagonal(t) => {
            for (i, s) in state.data.iter_mut().enumerate() {
                *s = *s * t.data[i / d_v];
            }
        }
        Transition::Dense(dense) => {
            for (head, s) in state.data.chunks_mut(d_k * d_v).enumerate() {
                match dense.kept.iter().position(|kept| *kept as usize == head) {
                    Some(i) => {
                        let block = &dense.blocks.data[i * d_k * d_k..(i + 1) * d_k * d_k];
                        s.copy_from_slice(&product(block, s, d_k, d_v));
                    }
                    None => s.fill(R::ZERO),
                }
            }
        }
    }
}

/// `a [n, m] b [m, p]`.
fn product<R: Real>(a: &[R], b: &[R], m: usize, p: usize) -> Vec<R> {
    let mut out = vec![R::ZERO; a.len() / m * p];
    for (a_row, out_row) in a.chunks(m).zip(out.chunks_mut(p)) {
        for (a, b_row) in a_row.iter().zip(b.chunks(p)) {
            for (o, b) in out_row.iter_mut().zip(b_row) {
                *o += *a * *b;
            }
        }
    }
    out
}
