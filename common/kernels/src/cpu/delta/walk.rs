//! The steps of a fold, taken apart so that tasks can each walk their heads, and the jump.

use std::ops::Range;

use hypic_state::{ComposeRule, RecurrentPart, Transition};

use super::scan::room;
use super::{Phase, loops};
use crate::cpu::matmul::{Left, Right, Scale, matmul};
use crate::cpu::pool::Shared;
use crate::cpu::{Cpu, Isa};
use crate::{DeviceTensor, Fold, Step};

/// A fold, taken apart by heads.
pub(super) struct Walk<'a> {
    pub state: Shared<'a, f32>,
    pub stages: Vec<Stage<'a>>,
}

pub(super) enum Stage<'a> {
    Rows(Range<usize>, Option<SharedCarry<'a>>),
    Jump(ComposeRule, &'a RecurrentPart<Cpu>),
    Save(Shared<'a, f32>),
}

pub(super) struct SharedCarry<'a> {
    pub phases: Shared<'a, Phase>,
    pub before: Shared<'a, f32>,
    pub operator: Shared<'a, f32>,
}

impl<'a> Walk<'a> {
    pub fn new(fold: &'a mut Fold<'_, Cpu>) -> Self {
        let shape = fold.state.shape().to_vec();
        let stages = fold.steps.iter_mut().map(|step| match step {
            Step::Rows { rows, carry } => {
                let carry = carry.as_deref_mut().map(|c| SharedCarry {
                    phases: Shared::new(&mut c.phases),
                    before: Shared::new(&mut c.before),
                    operator: Shared::new(c.operator.data_mut()),
                });
                Stage::Rows(rows.clone(), carry)
            }
            Step::Jump { rule, part } => Stage::Jump(*rule, part),
            Step::Save(to) => {
                to.resize(&shape);
                Stage::Save(Shared::new(to.data_mut()))
            }
        });
        Walk { stages: stages.collect(), state: Shared::new(fold.state.data_mut()) }
    }
}

/// Apply an entry to the state of head `h`.
pub(super) fn jump(
    isa: Isa,
    rule: ComposeRule,
    part: &RecurrentPart<Cpu>,
    h: usize,
    d_k: usize,
    state: &mut [f32],
    scratch: &mut Vec<f32>,
) {
    let d_v = state.len() / d_k;
    let body = &part.state.data()[h * state.len()..(h + 1) * state.len()];
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
                let new = room(scratch, state.len());
                new.copy_from_slice(body);
                let t = Left { data: &dense.blocks.data()[slot * d_k * d_k..], row: d_k, col: 1 };
                matmul(isa, [d_k, d_v, d_k], t, Right::rows(&*state, d_v), Scale::All(1.0), new, d_v);
                state.copy_from_slice(new);
            }
        },
    }
}
