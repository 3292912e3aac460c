//! The operator of a body of one layer while its rows are being folded, and its end.
//!
//! Scalar and diagonal operators are sums of log decays, a dense one is carried as a block per head and dropped for
//! good once nothing is left of it. The zero-start state is the difference to the state before the body.

use hypic_state::{Dense, Transition};

use super::loops;
use crate::cpu::matmul::{Left, Right, Scale, matmul};
use crate::cpu::pool::{Pool, Shared};
use crate::cpu::{CpuTensor, Isa};
use crate::scan_checks::CarryOf;
use crate::{DeviceTensor, Form, ScanShape};

/// The operator of a body of one layer while its rows are being folded.
pub struct CpuCarry {
    pub(super) phases: Vec<Phase>,
    /// `[heads, d_k, d_v]`: the state before the body.
    pub(super) before: CpuTensor,
    pub(super) operator: Operator,
}

pub(super) enum Operator {
    /// Per head, the sum of the log decays.
    Scalar(Vec<f64>),
    /// Per head and key channel.
    Diagonal(Vec<f64>),
    /// `[heads, d_k, d_k]`.
    Dense(CpuTensor),
}

/// How far a head of a carry is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// No step yet; nothing is written.
    Fresh,
    /// No row yet; the operator is the identity.
    Begun,
    /// Its operator is kept up to date.
    Live,
    /// Its operator has become zero.
    Decayed,
}

impl CpuCarry {
    pub(in crate::cpu) fn new(shape: ScanShape, form: Form) -> Self {
        let ScanShape { heads, d_k, d_v, .. } = shape;
        CpuCarry {
            phases: vec![Phase::Fresh; heads],
            before: CpuTensor::zeros(&[heads, d_k, d_v]),
            operator: match form {
                Form::Scalar => Operator::Scalar(vec![0.0; heads]),
                Form::Diagonal => Operator::Diagonal(vec![0.0; heads * d_k]),
                Form::Dense => Operator::Dense(CpuTensor::zeros(&[heads, d_k, d_k])),
            },
        }
    }

    /// What it was made for.
    pub(super) fn of(&self) -> CarryOf {
        let [heads, d_k, d_v] = self.before.shape()[..] else { unreachable!("a state has three axes") };
        let form = match self.operator {
            Operator::Scalar(_) => Form::Scalar,
            Operator::Diagonal(_) => Form::Diagonal,
            Operator::Dense(_) => Form::Dense,
        };
        CarryOf { heads, d_k, d_v, form }
    }
}

pub(super) fn identity(matrix: &mut [f32], n: usize) {
    matrix.fill(0.0);
    matrix.iter_mut().step_by(n + 1).for_each(|x| *x = 1.0);
}

/// The operator of the body and its zero-start state.
pub(in crate::cpu) fn finish(
    isa: Isa,
    pool: &Pool,
    carry: CpuCarry,
    state: &CpuTensor,
) -> (Transition<CpuTensor>, CpuTensor) {
    let CarryOf { heads, d_k, d_v, .. } = carry.of();
    assert_eq!(state.shape(), [heads, d_k, d_v], "state of finish");
    let CpuCarry { phases, mut before, operator } = carry;
    let fresh = |h: &usize| phases[*h] == Phase::Fresh;
    for h in (0..heads).filter(fresh) {
        // A body without rows leaves the state as it was.
        let of_head = h * d_k * d_v..(h + 1) * d_k * d_v;
        before.data_mut()[of_head.clone()].copy_from_slice(&state.data()[of_head]);
    }
    match operator {
        Operator::Scalar(sums) => {
            let t = exp_all(&sums, &[heads]);
            // In place of the state before the body.
            subtract_scaled(isa, pool, &mut before, t.data(), d_k * d_v, state);
            (Transition::Scalar(t), before)
        }
        Operator::Diagonal(sums) => {
            let t = exp_all(&sums, &[heads, d_k]);
            subtract_scaled(isa, pool, &mut before, t.data(), d_v, state);
            (Transition::Diagonal(t), before)
        }
        Operator::Dense(mut blocks) => {
            for h in (0..heads).filter(fresh) {
                identity(&mut blocks.data_mut()[h * d_k * d_k..(h + 1) * d_k * d_k], d_k);
            }
            finish_dense(isa, pool, &phases, before, blocks, state)
        }
    }
}

fn exp_all(sums: &[f64], shape: &[usize]) -> CpuTensor {
    let mut t = CpuTensor::alloc(shape);
    t.data_mut().iter_mut().zip(sums).for_each(|(t, g)| *t = g.exp() as f32);
    t
}

/// `before <- state - t before`, each number of `t` serving `width` numbers.
fn subtract_scaled(isa: Isa, pool: &Pool, before: &mut CpuTensor, t: &[f32], width: usize, state: &CpuTensor) {
    let flops = 2 * before.data().len();
    let tasks = pool.split(flops).min(t.len());
    let shared = Shared::new(before.data_mut());
    pool.run(tasks, flops, |task| {
        let part = t.len() * task / tasks..t.len() * (task + 1) / tasks;
        for (i, t) in part.clone().zip(&t[part]) {
            let at = i * width..(i + 1) * width;
            // SAFETY: every task has stretches of its own.
            loops::scale_add(isa, unsafe { shared.part(at.clone()) }, -t, &state.data()[at]);
        }
    });
}

fn finish_dense(
    isa: Isa,
    pool: &Pool,
    phases: &[Phase],
    mut before: CpuTensor,
    operator: CpuTensor,
    state: &CpuTensor,
) -> (Transition<CpuTensor>, CpuTensor) {
    let [heads, d_k, d_v] = state.shape()[..] else { unreachable!("a state has three axes") };
    let kept: Vec<u32> = (0..heads as u32).filter(|h| phases[*h as usize] != Phase::Decayed).collect();
    let mut zero_start = state.clone();
    let (operators, before) = (operator.data(), Shared::new(before.data_mut()));
    let to_state = Shared::new(zero_start.data_mut());
    pool.run(kept.len(), kept.len() * 2 * d_k * d_k * d_v, |slot| {
        let h = kept[slot] as usize;
        let of_head = h * d_k * d_v..(h + 1) * d_k * d_v;
        // SAFETY: every task has a head of its own.
        let (before, end) = unsafe { (before.part(of_head.clone()), to_state.part(of_head)) };
        loops::scale_by(isa, before, -1.0);
        let left = Left { data: &operators[h * d_k * d_k..], row: d_k, col: 1 };
        matmul(isa, [d_k, d_v, d_k], left, Right::rows(&*before, d_v), Scale::All(1.0), end, d_v);
    });
    let blocks = if kept.len() == heads {
        operator
    } else {
        let mut blocks = CpuTensor::alloc(&[kept.len(), d_k, d_k]);
        for (block, h) in blocks.data_mut().chunks_exact_mut(d_k * d_k).zip(&kept) {
            block.copy_from_slice(&operator.data()[*h as usize * d_k * d_k..][..d_k * d_k]);
        }
        blocks
    };
    (Transition::Dense(Dense { heads, kept, blocks }), zero_start)
}
