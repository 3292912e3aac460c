//! Jumps: the application of an entry to the state of a head, by every rule and with every form of operator.

use hypic_state::{ComposeRule, RecurrentPart, Transition};

use super::{loops, room};
use crate::RopeSpec;
use crate::cpu::matmul::{Left, Right, Scale, matmul};
use crate::cpu::{Cpu, CpuRope, Isa};

/// A rotation of the key axis of states.
pub(super) struct Rotation {
    /// Two channels, the cosine and the sine of their angle.
    pairs: Vec<(usize, usize, f32, f32)>,
}

impl Rotation {
    /// By `by` positions of `rope`, whose factor the keys in a state have already.
    ///
    /// # Panics
    /// If heads of width `d_k` are too narrow for it.
    pub fn new(rope: &CpuRope, by: i64, d_k: usize) -> Self {
        assert!(rope.needs() <= d_k, "scan: a turn of {} dimensions in keys of {d_k}", rope.needs());
        let RopeSpec { offset, inv_freq, interleaved, .. } = rope.spec();
        let pair = |(i, freq): (usize, &f64)| {
            let (sin, cos) = (by as f64 * freq).sin_cos();
            let (first, second) = if *interleaved { (2 * i, 2 * i + 1) } else { (i, i + inv_freq.len()) };
            (offset + first, offset + second, cos as f32, sin as f32)
        };
        Rotation { pairs: inv_freq.iter().enumerate().map(pair).collect() }
    }

    /// Turn the columns of `state [d_k, d_v]`.
    fn turn(&self, isa: Isa, state: &mut [f32], d_v: usize) {
        for &(first, second, cos, sin) in &self.pairs {
            let (left, right) = state.split_at_mut(second * d_v);
            loops::turn(isa, &mut left[first * d_v..(first + 1) * d_v], &mut right[..d_v], cos, sin);
        }
    }
}

/// Buffers of a jump.
#[derive(Default)]
pub(super) struct JumpScratch {
    /// `[d_k, d_v]`: an entry's state at its place.
    turned: Vec<f32>,
    /// `[d_k, d_v]`: the new state.
    jumped: Vec<f32>,
}

/// Apply an entry to the state of head `h`.
#[allow(clippy::too_many_arguments)]
pub(super) fn jump(
    isa: Isa,
    rule: ComposeRule,
    part: &RecurrentPart<Cpu>,
    rotation: Option<&Rotation>,
    h: usize,
    d_k: usize,
    state: &mut [f32],
    scratch: &mut JumpScratch,
) {
    let d_v = state.len() / d_k;
    let mut body = &part.state.data()[h * state.len()..(h + 1) * state.len()];
    if let Some(rotation) = rotation {
        let turned = room(&mut scratch.turned, state.len());
        turned.copy_from_slice(body);
        rotation.turn(isa, turned, d_v);
        body = turned;
    }
    match rule {
        ComposeRule::Last => state.copy_from_slice(body),
        ComposeRule::Add => loops::scale_add(isa, state, 1.0, body),
        ComposeRule::Transition => match &part.transition {
            Transition::Scalar(t) => loops::scale_add(isa, state, t.data()[h], body),
            Transition::Diagonal(t) => {
                let factors = &t.data()[h * d_k..(h + 1) * d_k];
                for (i, factor) in factors.iter().enumerate() {
                    let row = i * d_v..(i + 1) * d_v;
                    loops::scale_add(isa, &mut state[row.clone()], *factor, &body[row]);
                }
            }
            Transition::Dense(dense) => {
                let Ok(slot) = dense.kept.binary_search(&(h as u32)) else {
                    return state.copy_from_slice(body);
                };
                let new = room(&mut scratch.jumped, state.len());
                new.copy_from_slice(body);
                let t = Left { data: &dense.blocks.data()[slot * d_k * d_k..], row: d_k, col: 1 };
                matmul(isa, [d_k, d_v, d_k], t, Right::rows(&*state, d_v), Scale::All(1.0), new, d_v);
                state.copy_from_slice(new);
            }
        },
    }
}
