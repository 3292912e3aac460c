//! The recurrences, chunk by chunk, and the operators of bodies beside them.
//!
//! A task walks all steps of one fold for the heads of one key head (or some of them), so the states stay in its
//! caches. In a chunk of C rows let G be the cumulative log decay (a number per row, or per row and key channel; the
//! products below are then taken channel by channel) and, for j <= i, `P_ij = sum over channels of
//! q_i k_j exp(G_i - G_j)`:
//!
//! - what is written, W, is v, or v times its step, or in a delta rule the solution of
//!   `(I + A) W = diag(beta) (V - (exp(G) K) S)` with `A_ij = beta_i (k_i . exp(G_i - G_j) k_j)` for j < i, solved row by
//!   row: an inverse of `I + A` may overflow;
//! - `O_i = (exp(G_i) q_i) S + sum_(j <= i) P_ij w_j`;
//! - `S <- exp(G_C) S + sum_j (exp(G_C - G_j) k_j) w_j^T`.
//!
//! The operator T of a delta rule's body goes the same way with V = 0, from the identity on; where nothing is
//! predicted it is `exp` of all log decays. G is summed and subtracted in f64, so no exponent loses the small decays
//! beside a large one, and none is positive.

mod carry;
mod channel;
mod channel_loops;
mod fold;
mod head;
mod jump;
mod keys;
mod loops;
mod walk;

use super::pool::{Pool, Shared};
use super::{Cpu, CpuTensor, Isa};
use crate::scan_checks;
use crate::{Cols, DeviceTensor, Fold, GRID, ScanInputs, ScanShape};

pub use carry::CpuCarry;
pub(super) use carry::finish;
use fold::{SCRATCH, Scan};
use walk::Walk;

/// Least log decay of a token that is told apart: `exp` of it is zero, and sums of it are finite.
const FLOOR: f64 = -1e4;

/// `log`, bounded; NaN stays.
#[inline(always)]
fn floored(log: f64) -> f64 {
    if log < FLOOR { FLOOR } else { log }
}

/// Some columns of a matrix.
#[derive(Clone, Copy)]
struct Columns<'a> {
    data: &'a [f32],
    stride: usize,
    col: usize,
}

impl<'a> Columns<'a> {
    fn new(cols: Cols<'a, Cpu>) -> Self {
        Columns { data: cols.mat.data(), stride: cols.mat.cols(), col: cols.col }
    }

    /// `width` numbers of a row, from column `at` on.
    fn get(&self, row: usize, at: usize, width: usize) -> &'a [f32] {
        &self.data[row * self.stride + self.col + at..][..width]
    }
}

/// The first `len` elements of `buffer`, which grows but never shrinks; contents unspecified.
fn room<T: Copy + Default>(buffer: &mut Vec<T>, len: usize) -> &mut [T] {
    if buffer.len() < len {
        buffer.resize(len, T::default());
    }
    &mut buffer[..len]
}

pub(super) fn scan(
    isa: Isa,
    pool: &Pool,
    shape: ScanShape,
    inputs: ScanInputs<'_, Cpu>,
    folds: &mut [Fold<'_, Cpu>],
    out: &mut CpuTensor,
) {
    let ScanShape { key_heads, heads, d_k, d_v } = shape;
    let rows = scan_checks::check(&shape, &inputs, folds, CpuCarry::of);
    out.resize(&[inputs.v.mat.rows(), heads * d_v]);
    let steps: usize = folds.iter().map(|f| f.steps.len()).sum();
    let flops = heads * d_k * (rows * (8 * d_v + 4 * GRID) + steps * 2 * d_k * d_v);
    let walks: Vec<Walk<'_>> = folds.iter_mut().map(Walk::new).collect();
    // Heads of one key head share its products, unless that leaves threads idle.
    let group = heads / key_heads;
    let parts = pool.split(flops).div_ceil((walks.len() * key_heads).max(1)).clamp(1, group);
    let per_task = group.div_ceil(parts);
    let parts = group.div_ceil(per_task);
    let scan = Scan::new(isa, shape, inputs, Shared::new(out.data_mut()));
    pool.run(walks.len() * key_heads * parts, flops, |task| {
        let (walk, key_head, part) = (task / (key_heads * parts), task / parts % key_heads, task % parts);
        let first = key_head * group + part * per_task;
        let behind = (first + per_task).min((key_head + 1) * group);
        SCRATCH.with_borrow_mut(|scratch| scan.walk(&walks[walk], first..behind, scratch));
    });
}

#[cfg(test)]
mod tests;
