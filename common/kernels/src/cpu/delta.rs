//! The gated delta rule, chunk by chunk, and the operator of a body beside it.
//!
//! A task walks all steps of one fold for the heads of one key head (or some of them), so the states
//! stay in its caches. In a chunk of C rows, with G the cumulative log decay, `K` and `Q` normalised and
//! `A[i][j] = beta_i (k_i . k_j) exp(G_i - G_j)` for j < i:
//!
//! - `(I + A) U = diag(beta) (V - diag(exp G) K S)`, solved row by row: an inverse of `I + A` may overflow;
//! - `O_i = exp(G_i) S^T q_i + sum_(j <= i) exp(G_i - G_j) (q_i . k_j) u_j`;
//! - `S <- exp(G_C) S + sum_j exp(G_C - G_j) k_j u_j^T`.
//!
//! The operator T of a body goes the same way with V = 0, from the identity on. G is summed and subtracted
//! in f64, so no exponent loses the small decays beside a large one, and none is positive.

mod loops;
mod scan;
mod walk;

use hypic_state::{Dense, Transition};

use super::matmul::{Left, Right, Scale, matmul};
use super::pool::{Pool, Shared};
use super::{Cpu, CpuTensor, Isa};
use crate::{DeltaInputs, DeltaShape, DeviceTensor, Fold, GRID, Step};

use scan::{SCRATCH, Scan};
use walk::Walk;

/// The operator of a body of one layer while its rows are being folded.
pub struct CpuCarry {
    heads: usize,
    d_k: usize,
    d_v: usize,
    phases: Vec<Phase>,
    /// `[heads, d_k, d_v]`: the state before the body.
    before: Vec<f32>,
    /// `[heads, d_k, d_k]`.
    operator: CpuTensor,
}

/// How far a head of a carry is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
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
    pub(super) fn new(heads: usize, d_k: usize, d_v: usize) -> Self {
        CpuCarry {
            heads,
            d_k,
            d_v,
            phases: vec![Phase::Fresh; heads],
            before: vec![0.0; heads * d_k * d_v],
            operator: CpuTensor::zeros(&[heads, d_k, d_k]),
        }
    }
}

pub(super) fn gated_delta(
    isa: Isa,
    pool: &Pool,
    shape: DeltaShape,
    inputs: DeltaInputs<'_, Cpu>,
    folds: &mut [Fold<'_, Cpu>],
    out: &mut CpuTensor,
) {
    let DeltaShape { key_heads, heads, d_k, d_v, .. } = shape;
    let rows = check(&shape, &inputs, folds);
    out.resize(&[inputs.qkv.rows(), heads * d_v]);
    let steps: usize = folds.iter().map(|f| f.steps.len()).sum();
    let flops = heads * d_k * (rows * (8 * d_v + 4 * GRID) + steps * 2 * d_k * d_v);
    let walks: Vec<Walk<'_>> = folds.iter_mut().map(Walk::new).collect();
    // Heads of one key head share its products, unless that leaves threads idle.
    let shared = walks.len() * key_heads >= pool.split(flops);
    let per_task = if shared { heads / key_heads } else { 1 };
    let tasks_per_walk = heads / per_task;
    let scan = Scan { isa, shape, inputs, out: Shared::new(out.data_mut()) };
    pool.run(walks.len() * tasks_per_walk, flops, |task| {
        let first = task % tasks_per_walk * per_task;
        SCRATCH.with_borrow_mut(|scratch| {
            scan.walk(&walks[task / tasks_per_walk], first..first + per_task, scratch);
        });
    });
}

/// Check all shapes and that no row is in two steps; the number of rows in steps.
fn check(shape: &DeltaShape, inputs: &DeltaInputs<'_, Cpu>, folds: &[Fold<'_, Cpu>]) -> usize {
    let DeltaShape { key_heads, heads, d_k, d_v, .. } = *shape;
    assert!(
        key_heads > 0 && heads.is_multiple_of(key_heads),
        "gated_delta of {heads} heads over {key_heads} key heads"
    );
    let (rows, channels) = (inputs.qkv.rows(), shape.channels());
    assert_eq!(inputs.qkv.shape(), [rows, channels], "q, k and v of gated_delta");
    for (name, gate) in [("a", inputs.a), ("b", inputs.b)] {
        assert!(
            gate.mat.rows() >= rows && gate.mat.cols() >= gate.col + heads,
            "gate {name} of gated_delta: {:?}",
            gate.mat.shape()
        );
    }
    assert_eq!(inputs.a_log.data().len(), heads, "a_log of gated_delta");
    assert_eq!(inputs.dt_bias.data().len(), heads, "dt_bias of gated_delta");
    let state_shape = [heads, d_k, d_v];
    let mut ranges = Vec::new();
    for fold in folds {
        assert_eq!(fold.state.shape(), state_shape, "state of gated_delta");
        for step in &fold.steps {
            match step {
                Step::Rows { rows: range, carry } => {
                    assert!(range.start <= range.end && range.end <= rows, "gated_delta over rows {range:?} of {rows}");
                    if let Some(c) = carry {
                        assert_eq!([c.heads, c.d_k, c.d_v], state_shape, "carry of gated_delta");
                    }
                    ranges.push(range.clone());
                }
                Step::Jump { part, .. } => {
                    assert_eq!(part.state.shape(), state_shape, "state of an entry in gated_delta");
                    let want = match &part.transition {
                        Transition::Scalar(_) => vec![heads],
                        Transition::Diagonal(_) => vec![heads, d_k],
                        Transition::Dense(d) => vec![d.kept.len(), d_k, d_k],
                    };
                    assert_eq!(part.transition.tensor().shape(), want, "operator of an entry in gated_delta");
                }
                Step::Save(_) => {}
            }
        }
    }
    ranges.retain(|r| !r.is_empty());
    ranges.sort_by_key(|r| r.start);
    assert!(ranges.windows(2).all(|w| w[0].end <= w[1].start), "gated_delta: a row is in two steps");
    ranges.iter().map(|r| r.len()).sum()
}

fn identity(matrix: &mut [f32], n: usize) {
    matrix.fill(0.0);
    matrix.iter_mut().step_by(n + 1).for_each(|x| *x = 1.0);
}

/// The operator of the body and its zero-start state.
pub(super) fn finish(
    isa: Isa,
    pool: &Pool,
    mut carry: CpuCarry,
    state: &CpuTensor,
) -> (Transition<CpuTensor>, CpuTensor) {
    let CpuCarry { heads, d_k, d_v, .. } = carry;
    assert_eq!(state.shape(), [heads, d_k, d_v], "state of finish");
    for h in (0..heads).filter(|h| carry.phases[*h] == Phase::Fresh) {
        // A body without rows.
        identity(&mut carry.operator.data_mut()[h * d_k * d_k..(h + 1) * d_k * d_k], d_k);
        let of_head = h * d_k * d_v..(h + 1) * d_k * d_v;
        carry.before[of_head.clone()].copy_from_slice(&state.data()[of_head]);
    }
    let kept: Vec<u32> = (0..heads as u32).filter(|h| carry.phases[*h as usize] != Phase::Decayed).collect();
    let mut zero_start = state.clone();
    let (operators, before) = (carry.operator.data(), Shared::new(&mut carry.before));
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
        carry.operator
    } else {
        let mut blocks = CpuTensor::alloc(&[kept.len(), d_k, d_k]);
        for (block, h) in blocks.data_mut().chunks_exact_mut(d_k * d_k).zip(&kept) {
            block.copy_from_slice(&carry.operator.data()[*h as usize * d_k * d_k..][..d_k * d_k]);
        }
        blocks
    };
    (Transition::Dense(Dense { heads, kept, blocks }), zero_start)
}

#[cfg(test)]
mod tests;
