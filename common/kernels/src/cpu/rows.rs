//! Norms, gates and copies, a row at a time.
//!
//! A sum of squares has [`LANES`] partial sums added in a fixed order, so that it has the same bits on every
//! instruction set and however the rows are split.

use std::ops::Range;

use super::math::{per_isa, sigmoid, silu};
use super::pool::{Pool, Shared};
use super::{Cpu, CpuTensor, Isa};
use crate::{Activation, Cols, DeviceTensor, GatedNorm, MlpForm};

/// Partial sums of a reduction.
const LANES: usize = 16;
/// About how many operations a norm costs an element.
const NORM_FLOPS: usize = 4;
/// About how many operations a gate's exponential costs an element.
const GATE_FLOPS: usize = 24;
/// About how many operations a sum that comes from memory costs an element.
const MIX_FLOPS: usize = 4;

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
    fn swiglu_row(gate: &[f32], up: &[f32], out: &mut [f32]) {
        for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
            *out = silu(*gate) * up;
        }
    }
}

per_isa! {
    fn bounded_swiglu_row(gate: &[f32], up: &[f32], limit: f32, out: &mut [f32]) {
        for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
            let gate = silu(*gate);
            // Not `min`, which would take the limit for NaN.
            let gate = if gate > limit { limit } else { gate };
            *out = gate * up.clamp(-limit, limit);
        }
    }
}

/// What an MLP does between its projections, to a row; `gate` is empty where there is none.
pub(super) fn inner_row(isa: Isa, form: MlpForm, gate: &[f32], up: &[f32], out: &mut [f32]) {
    match form {
        MlpForm::SwiGlu => swiglu_row(isa, gate, up, out),
        MlpForm::BoundedSwiGlu { limit } => bounded_swiglu_row(isa, gate, up, limit, out),
        MlpForm::Plain(activation) => {
            out.copy_from_slice(up);
            activate_row(isa, out, activation);
        }
    }
}

/// `max(x, 0)^2`; NaN goes through.
#[inline(always)]
fn squared_relu(x: f32) -> f32 {
    let positive = if x < 0.0 { 0.0 } else { x };
    positive * positive
}

/// `to[i] <- join(to[i], activation(from[i]))`.
#[inline(always)]
fn activated(activation: Activation, to: &mut [f32], from: &[f32], join: impl Fn(f32, f32) -> f32) {
    let pairs = to.iter_mut().zip(from);
    match activation {
        Activation::Silu => pairs.for_each(|(to, x)| *to = join(*to, silu(*x))),
        Activation::Sigmoid => pairs.for_each(|(to, x)| *to = join(*to, sigmoid(*x))),
        Activation::SquaredRelu => pairs.for_each(|(to, x)| *to = join(*to, squared_relu(*x))),
    }
}

/// `x *= activation(g)`.
#[inline(always)]
fn gate_strip(x: &mut [f32], g: &[f32], activation: Activation) {
    activated(activation, x, g, |x, factor| x * factor);
}

per_isa! {
    /// `x *= activation(g)`, a number of `g` for `width` of `x`.
    fn gate_row(x: &mut [f32], g: &[f32], width: usize, activation: Activation) {
        if width == 1 {
            return gate_strip(x, g, activation);
        }
        for (x, g) in x.chunks_exact_mut(width).zip(g) {
            let mut factor = [0.0];
            activated(activation, &mut factor, std::slice::from_ref(g), |_, factor| factor);
            x.iter_mut().for_each(|x| *x *= factor[0]);
        }
    }
}

per_isa! {
    fn activate_row(x: &mut [f32], activation: Activation) {
        match activation {
            Activation::Silu => x.iter_mut().for_each(|x| *x = silu(*x)),
            Activation::Sigmoid => x.iter_mut().for_each(|x| *x = sigmoid(*x)),
            Activation::SquaredRelu => x.iter_mut().for_each(|x| *x = squared_relu(*x)),
        }
    }
}

per_isa! {
    fn mix_row(acc: &mut [f32], a: f32, x: &[f32], b: f32) {
        if a == 0.0 {
            // What is overwritten may be anything, NaN too.
            return acc.iter_mut().zip(x).for_each(|(acc, x)| *acc = b * x);
        }
        acc.iter_mut().zip(x).for_each(|(acc, x)| *acc = a * *acc + b * x);
    }
}

per_isa! {
    fn gated_norm_row(spec: GatedNorm, o: &[f32], weight: &[f32], g: &[f32], out: &mut [f32]) {
        let GatedNorm { group, eps, activation, gate_first } = spec;
        let weights = weight.chunks_exact(group).cycle();
        let parts = o.chunks_exact(group).zip(g.chunks_exact(group)).zip(weights);
        for (out, ((o, g), weight)) in out.chunks_exact_mut(group).zip(parts) {
            if gate_first {
                out.copy_from_slice(o);
                gate_strip(out, g, activation);
                let scale = norm_scale(out, eps);
                out.iter_mut().zip(weight).for_each(|(out, weight)| *out = *out * scale * weight);
            } else {
                let scale = norm_scale(o, eps);
                for ((out, o), weight) in out.iter_mut().zip(o).zip(weight) {
                    *out = o * scale * weight;
                }
                gate_strip(out, g, activation);
            }
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

/// What an MLP does between its projections, to every row of `x`.
pub(super) fn mlp_inner(isa: Isa, pool: &Pool, form: MlpForm, x: &CpuTensor, out: &mut CpuTensor) {
    let (rows, cols) = (x.rows(), x.cols());
    assert!(!form.is_gated() || cols.is_multiple_of(2), "mlp_inner of an odd number of columns, {cols}");
    let width = if form.is_gated() { cols / 2 } else { cols };
    out.resize(&[rows, width]);
    each_row(pool, out.data_mut(), width, GATE_FLOPS, |row, out| {
        let (gate, up) = x.data()[row * cols..][..cols].split_at(cols - width);
        inner_row(isa, form, gate, up, out);
    });
}

/// `x [rows, k] *= activation(g)`, each of `g`'s `k / width` columns serving `width` columns of `x`.
pub(super) fn gate(isa: Isa, pool: &Pool, x: &mut CpuTensor, g: Cols<'_, Cpu>, width: usize, activation: Activation) {
    let (rows, cols) = (x.rows(), x.cols());
    assert!(width > 0 && cols.is_multiple_of(width), "gate of {cols} columns in stretches of {width}");
    let gates = cols / width;
    check_columns("gate", g, rows, gates);
    each_row(pool, x.data_mut(), cols, GATE_FLOPS, |row, x| {
        gate_row(isa, x, columns(g, row, gates), width, activation)
    });
}

/// `x <- activation(x)` in the columns `cols`.
pub(super) fn activate(isa: Isa, pool: &Pool, x: &mut CpuTensor, cols: Range<usize>, activation: Activation) {
    let all = x.cols();
    assert!(cols.start <= cols.end && cols.end <= all, "activate of columns {cols:?} of {all}");
    each_row(pool, x.data_mut(), all, GATE_FLOPS, |_, row| activate_row(isa, &mut row[cols.clone()], activation));
}

/// `acc <- a acc + b x`; `acc` is not read if `a` is 0.
pub(super) fn mix(isa: Isa, pool: &Pool, acc: &mut CpuTensor, a: f32, x: &CpuTensor, b: f32) {
    assert_eq!(acc.shape(), x.shape(), "mix of matrices of different shapes");
    let width = x.cols();
    each_row(pool, acc.data_mut(), width, MIX_FLOPS, |row, acc| {
        mix_row(isa, acc, a, &x.data()[row * width..][..width], b)
    });
}

/// `out = norm(o) * weight * activation(g)`, or `norm(o * activation(g)) * weight`, the norm over each group of columns.
pub(super) fn gated_norm(
    isa: Isa,
    pool: &Pool,
    spec: GatedNorm,
    o: &CpuTensor,
    weight: &CpuTensor,
    g: Cols<'_, Cpu>,
    out: &mut CpuTensor,
) {
    let (rows, width) = (o.rows(), o.cols());
    check_columns("gated_norm", g, rows, width);
    assert!(
        spec.group > 0 && width.is_multiple_of(spec.group),
        "gated_norm of {width} columns in groups of {}",
        spec.group
    );
    let weights = weight.shape();
    assert!(
        weights == [spec.group] || weights == [width],
        "gated_norm: weight {weights:?} for {width} columns in groups of {}",
        spec.group
    );
    out.resize(&[rows, width]);
    each_row(pool, out.data_mut(), width, NORM_FLOPS + GATE_FLOPS, |row, out| {
        let o = &o.data()[row * width..][..width];
        gated_norm_row(isa, spec, o, weight.data(), columns(g, row, width), out);
    });
}

#[cfg(test)]
mod tests;
