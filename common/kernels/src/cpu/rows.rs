//! Norms, gates and copies, a row at a time.
//!
//! A sum of squares has [`LANES`] partial sums added in a fixed order, so that it has the same bits on every
//! instruction set and however the rows are split.

use super::math::{per_isa, sigmoid, silu};
use super::pool::{Pool, Shared};
use super::{Cpu, CpuTensor, Isa};
use crate::{Cols, DeviceTensor, Gate};

/// Partial sums of a reduction.
const LANES: usize = 16;
/// About how many operations a norm costs an element.
const NORM_FLOPS: usize = 4;
/// About how many operations a gate's exponential costs an element.
const GATE_FLOPS: usize = 24;

/// Tasks for each thread: enough to even out threads that are held up.
const TASKS_PER_THREAD: usize = 2;

/// Run `task(row, its part of data)` for every row of `width` elements.
pub(super) fn each_row(
    pool: &Pool,
    data: &mut [f32],
    width: usize,
    flops_per_element: usize,
    task: impl Fn(usize, &mut [f32]) + Sync + Send,
) {
    if width == 0 || data.is_empty() {
        return;
    }
    let rows = data.len() / width;
    let flops = flops_per_element * data.len();
    let tasks = (pool.split(flops) * TASKS_PER_THREAD).min(rows);
    let shared = Shared::new(data);
    pool.run(tasks, flops, |i| {
        for row in rows * i / tasks..rows * (i + 1) / tasks {
            // SAFETY: each row belongs to one task.
            task(row, unsafe { shared.part(row * width..(row + 1) * width) });
        }
    });
}

#[inline(always)]
fn sum_of_squares(x: &[f32]) -> f32 {
    let mut sums = [0.0f32; LANES];
    let (whole, rest) = x.as_chunks::<LANES>();
    for x in whole {
        for i in 0..LANES {
            sums[i] += x[i] * x[i];
        }
    }
    for (sum, x) in sums.iter_mut().zip(rest) {
        *sum += x * x;
    }
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            sums[i] += sums[i + width];
        }
        width /= 2;
    }
    sums[0]
}

#[inline(always)]
fn norm_scale(x: &[f32], eps: f32) -> f32 {
    1.0 / (sum_of_squares(x) / x.len() as f32 + eps).sqrt()
}

per_isa! {
    fn norm_row(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        let scale = norm_scale(x, eps);
        for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
            *out = x * scale * weight;
        }
    }
}

per_isa! {
    fn norm_heads(x: &mut [f32], weight: &[f32], eps: f32) {
        for head in x.chunks_exact_mut(weight.len()) {
            let scale = norm_scale(head, eps);
            for (x, weight) in head.iter_mut().zip(weight) {
                *x = *x * scale * weight;
            }
        }
    }
}

per_isa! {
    fn silu_mul_row(x: &[f32], out: &mut [f32]) {
        let (gate, up) = x.split_at(out.len());
        for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
            *out = silu(*gate) * up;
        }
    }
}

/// `x *= gate(g)`.
#[inline(always)]
fn gate_strip(x: &mut [f32], g: &[f32], gate: Gate) {
    match gate {
        Gate::Silu => x.iter_mut().zip(g).for_each(|(x, g)| *x *= silu(*g)),
        Gate::Sigmoid => x.iter_mut().zip(g).for_each(|(x, g)| *x *= sigmoid(*g)),
    }
}

per_isa! {
    fn gate_row(x: &mut [f32], g: &[f32], gate: Gate) {
        gate_strip(x, g, gate);
    }
}

per_isa! {
    fn gated_norm_row(o: &[f32], weight: &[f32], eps: f32, g: &[f32], gate: Gate, out: &mut [f32]) {
        let width = weight.len();
        for ((out, o), g) in out.chunks_exact_mut(width).zip(o.chunks_exact(width)).zip(g.chunks_exact(width)) {
            let scale = norm_scale(o, eps);
            for ((out, o), weight) in out.iter_mut().zip(o).zip(weight) {
                *out = o * scale * weight;
            }
            gate_strip(out, g, gate);
        }
    }
}

/// `width` columns of a row of `cols`.
fn columns<'a>(cols: Cols<'a, Cpu>, row: usize, width: usize) -> &'a [f32] {
    &cols.mat.data()[row * cols.mat.cols() + cols.col..][..width]
}

fn check_columns(what: &str, cols: Cols<'_, Cpu>, rows: usize, width: usize) {
    let shape = cols.mat.shape();
    let fits = shape.len() == 2 && shape[0] == rows && cols.col + width <= shape[1];
    assert!(fits, "{what} of {rows} rows reads columns {}..{} of {shape:?}", cols.col, cols.col + width);
}

/// `out [index, k]`: the rows `index` of `x [rows, k]`.
pub(super) fn gather(x: &CpuTensor, index: &[usize], out: &mut CpuTensor) {
    let (rows, width) = (x.rows(), x.cols());
    out.resize(&[index.len(), width]);
    if width == 0 {
        return;
    }
    for (&row, out) in index.iter().zip(out.data_mut().chunks_exact_mut(width)) {
        assert!(row < rows, "gather of row {row} of {rows}");
        out.copy_from_slice(&x.data()[row * width..][..width]);
    }
}

/// `out = x / sqrt(mean(x^2) + eps) * weight`, a row at a time.
pub(super) fn rms_norm(isa: Isa, pool: &Pool, x: &CpuTensor, weight: &CpuTensor, eps: f32, out: &mut CpuTensor) {
    let (rows, width) = (x.rows(), x.cols());
    assert_eq!(weight.shape(), [width], "weight of rms_norm");
    out.resize(&[rows, width]);
    each_row(pool, out.data_mut(), width, NORM_FLOPS, |row, out| {
        norm_row(isa, &x.data()[row * width..][..width], weight.data(), eps, out);
    });
}

/// The same in place over each of `heads` stretches of `weight.len()` columns from `col` on.
pub(super) fn head_norm(
    isa: Isa,
    pool: &Pool,
    x: &mut CpuTensor,
    col: usize,
    heads: usize,
    weight: &CpuTensor,
    eps: f32,
) {
    let (width, cols) = (heads * weight.cols(), x.cols());
    assert!(col + width <= cols, "head_norm of columns {col}..{} of {cols}", col + width);
    if width == 0 {
        return;
    }
    each_row(pool, x.data_mut(), cols, NORM_FLOPS, |_, row| {
        norm_heads(isa, &mut row[col..col + width], weight.data(), eps);
    });
}

/// `out [rows, f] = silu(x[.., ..f]) * x[.., f..]` for `x [rows, 2 f]`.
pub(super) fn silu_mul(isa: Isa, pool: &Pool, x: &CpuTensor, out: &mut CpuTensor) {
    let (rows, cols) = (x.rows(), x.cols());
    assert!(cols.is_multiple_of(2), "silu_mul of an odd number of columns, {cols}");
    out.resize(&[rows, cols / 2]);
    each_row(pool, out.data_mut(), cols / 2, GATE_FLOPS, |row, out| {
        silu_mul_row(isa, &x.data()[row * cols..][..cols], out);
    });
}

/// `x [rows, k] *= gate(g)`, `g` being `k` columns.
pub(super) fn gate(isa: Isa, pool: &Pool, x: &mut CpuTensor, g: Cols<'_, Cpu>, gate: Gate) {
    let (rows, width) = (x.rows(), x.cols());
    check_columns("gate", g, rows, width);
    each_row(pool, x.data_mut(), width, GATE_FLOPS, |row, x| gate_row(isa, x, columns(g, row, width), gate));
}

/// `out = norm(o) * weight * gate(g)`, the norm over each `weight.len()` columns.
#[allow(clippy::too_many_arguments)]
pub(super) fn gated_norm(
    isa: Isa,
    pool: &Pool,
    o: &CpuTensor,
    weight: &CpuTensor,
    eps: f32,
    g: Cols<'_, Cpu>,
    gate: Gate,
    out: &mut CpuTensor,
) {
    let (rows, width) = (o.rows(), o.cols());
    check_columns("gated_norm", g, rows, width);
    out.resize(&[rows, width]);
    if width == 0 {
        return;
    }
    let head = weight.cols();
    assert!(head > 0 && width.is_multiple_of(head), "gated_norm of {width} columns in heads of {head}");
    each_row(pool, out.data_mut(), width, NORM_FLOPS + GATE_FLOPS, |row, out| {
        let o = &o.data()[row * width..][..width];
        gated_norm_row(isa, o, weight.data(), eps, columns(g, row, width), gate, out);
    });
}

#[cfg(test)]
mod tests;
