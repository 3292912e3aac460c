//! Ops on the heads that lie beside each other in a row: copies, rotations, and a linear layer for each.

use super::linear::{self, CpuLinear, Input, Output, PANEL, TASK_ROWS, TASKS_PER_THREAD};
use super::pool::{Pool, Shared};
use super::rope::Turner;
use super::rows::each_row;
use super::{CpuRope, CpuTensor, Isa};
use crate::{DeviceTensor, HeadCols, Positions};

/// About how many operations a copy costs an element.
const COPY_FLOPS: usize = 2;
/// About how many operations a rotation costs an element.
const ROTATE_FLOPS: usize = 4;

/// Check that `x` has `heads` heads of `width` columns that do not overlap.
fn check(op: &str, name: &str, x: &CpuTensor, at: HeadCols, heads: usize, width: usize) {
    let shape = x.shape();
    assert!(shape.len() == 2, "{op}: {name} {shape:?} is no matrix");
    let Some(last) = heads.checked_sub(1) else { return };
    let end = at.col + last * at.stride + width;
    assert!(end <= shape[1], "{op}: {heads} heads of {width} columns at {at:?} end behind those of {name} {shape:?}");
    assert!(last == 0 || at.stride >= width, "{op}: heads of {width} columns of {name} overlap at {at:?}");
}

/// `to[.., at_to.col + h at_to.stride + i] = from[.., at_from.col + h at_from.stride + i]`.
pub(super) fn copy(
    pool: &Pool,
    from: &CpuTensor,
    at_from: HeadCols,
    heads: usize,
    width: usize,
    to: &mut CpuTensor,
    at_to: HeadCols,
) {
    check("copy_heads", "from", from, at_from, heads, width);
    check("copy_heads", "to", to, at_to, heads, width);
    assert_eq!(from.rows(), to.rows(), "copy_heads between different numbers of rows");
    let (cols_from, cols_to) = (from.cols(), to.cols());
    if heads * width == 0 {
        return;
    }
    each_row(pool, to.data_mut(), cols_to, COPY_FLOPS, |row, to| {
        let from = &from.data()[row * cols_from..][..cols_from];
        for h in 0..heads {
            let head = &from[at_from.col + h * at_from.stride..][..width];
            to[at_to.col + h * at_to.stride..][..width].copy_from_slice(head);
        }
    });
}

/// Rotate `heads` heads of `d` columns from `col` on; `positions` has those of all rows, sequence behind sequence.
#[allow(clippy::too_many_arguments)]
pub(super) fn rotate(
    isa: Isa,
    pool: &Pool,
    x: &mut CpuTensor,
    col: usize,
    heads: usize,
    d: usize,
    positions: &[Positions<'_>],
    rope: &CpuRope,
) {
    check("rotate", "x", x, HeadCols { col, stride: d }, heads, d);
    let given: usize = positions.iter().map(|p| p.at.len()).sum();
    assert_eq!(given, x.rows(), "rotate takes one position per row");
    assert!(rope.needs() <= d, "rotate with rotary dimensions up to {} of {d}", rope.needs());
    if heads * d == 0 {
        return;
    }
    let turners: Vec<Turner<'_>> = positions.iter().map(|&p| rope.turner_for(p)).collect();
    let rows = turners.iter().zip(positions).flat_map(|(turner, p)| p.at.iter().map(move |&at| (turner, at)));
    let rows: Vec<(&Turner<'_>, i64)> = rows.collect();
    let cols = x.cols();
    each_row(pool, x.data_mut(), cols, ROTATE_FLOPS, |row, x| {
        let (turner, position) = rows[row];
        turner.turn(isa, position, 0, d, &mut x[col..col + heads * d]);
    });
}

/// `W_h` times columns of head h of `x`, to columns of head h of `out`.
pub(super) fn linear(
    isa: Isa,
    pool: &Pool,
    ws: &[CpuLinear],
    x: &CpuTensor,
    at_x: HeadCols,
    out: &mut CpuTensor,
    at_out: HeadCols,
) {
    let Some(first) = ws.first() else { return };
    let (n, k, dtype) = (first.n(), first.k(), first.dtype());
    for (h, w) in ws.iter().enumerate() {
        let same = (w.n(), w.k(), w.dtype()) == (n, k, dtype);
        assert!(
            same,
            "head_linear: weight of head {h} is {} [{}, {}], of head 0 {dtype} [{n}, {k}]",
            w.dtype(),
            w.n(),
            w.k()
        );
    }
    check("head_linear", "x", x, at_x, ws.len(), k);
    check("head_linear", "out", out, at_out, ws.len(), n);
    let (rows, cols_x, cols_out) = (x.rows(), x.cols(), out.cols());
    assert_eq!(out.rows(), rows, "head_linear between different numbers of rows");
    if rows == 0 || n == 0 {
        return;
    }
    let flops = 2 * rows * ws.len() * n * k;
    let tasks = pool.split(flops) * TASKS_PER_THREAD;
    let down = tasks.div_ceil(ws.len()).min(rows / TASK_ROWS).max(1);
    let words = linear::words(isa, dtype, k);
    let out = Shared::new(out.data_mut());
    pool.run(ws.len() * down, flops, |task| {
        let (h, rows) = (task / down, linear::share(rows, task % down, down));
        let (from, to) = (at_x.col + h * at_x.stride, at_out.col + h * at_out.stride);
        let output =
            Output { to: &out, at: rows.start * cols_out + to, row: cols_out, first_col: 0, accumulate: false };
        let panels = 0..n.div_ceil(PANEL);
        let head = |row: usize| &x.data()[row * cols_x + from..][..k];
        linear::with_buffer(rows.len() * words, |buffer| {
            for (row, words) in rows.clone().zip(buffer.chunks_exact_mut(words.max(1))) {
                linear::lay_out(isa, dtype, head(row), k, words);
            }
            let input = Input { x: buffer, row: words, take: None };
            // SAFETY: a task has its own rows of its own head, and heads do not overlap.
            unsafe { linear::block_of(isa, &ws[h], input, &output, 0..rows.len(), panels) };
        });
    });
}
