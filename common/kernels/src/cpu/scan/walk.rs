//! The steps of a fold, taken apart so that tasks can each walk their heads.

use std::ops::Range;

use hypic_state::{ComposeRule, RecurrentPart};

use super::carry::{CpuCarry, Operator, Phase};
use super::jump::Rotation;
use crate::cpu::Cpu;
use crate::cpu::pool::Shared;
use crate::{DeviceTensor, Fold, Step};

/// A fold, taken apart by heads.
pub(super) struct Walk<'a> {
    pub state: Shared<'a, f32>,
    pub stages: Vec<Stage<'a>>,
}

pub(super) enum Stage<'a> {
    Rows(Range<usize>, Option<SharedCarry<'a>>),
    Jump(ComposeRule, &'a RecurrentPart<Cpu>, Option<Rotation>),
    Save(Shared<'a, f32>),
}

pub(super) struct SharedCarry<'a> {
    pub phases: Shared<'a, Phase>,
    pub before: Shared<'a, f32>,
    pub operator: SharedOperator<'a>,
}

pub(super) enum SharedOperator<'a> {
    /// Sums of log decays, so many per head.
    Logs(Shared<'a, f64>, usize),
    /// A matrix per head.
    Dense(Shared<'a, f32>),
}

impl<'a> SharedCarry<'a> {
    fn new(carry: &'a mut CpuCarry, d_k: usize) -> Self {
        SharedCarry {
            phases: Shared::new(&mut carry.phases),
            before: Shared::new(carry.before.data_mut()),
            operator: match &mut carry.operator {
                Operator::Scalar(sums) => SharedOperator::Logs(Shared::new(sums), 1),
                Operator::Diagonal(sums) => SharedOperator::Logs(Shared::new(sums), d_k),
                Operator::Dense(blocks) => SharedOperator::Dense(Shared::new(blocks.data_mut())),
            },
        }
    }
}

impl<'a> Walk<'a> {
    pub fn new(fold: &'a mut Fold<'_, Cpu>) -> Self {
        let shape = fold.state.shape().to_vec();
        let d_k = shape[1];
        let stages = fold.steps.iter_mut().map(|step| match step {
            Step::Rows { rows, carry } => {
                Stage::Rows(rows.clone(), carry.as_deref_mut().map(|carry| SharedCarry::new(carry, d_k)))
            }
            Step::Jump { rule, part, turn } => {
                Stage::Jump(*rule, part, turn.as_ref().map(|turn| Rotation::new(turn.rope, turn.by, d_k)))
            }
            Step::Save(to) => {
                to.resize(&shape);
                Stage::Save(Shared::new(to.data_mut()))
            }
        });
        Walk { stages: stages.collect(), state: Shared::new(fold.state.data_mut()) }
    }
}
