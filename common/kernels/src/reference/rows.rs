//! Steps that treat every row alone: norms, gates, gathers.

use super::real::Real;
use super::tensor::RefTensor;
use super::{Columns, check};
use crate::{DeviceTensor, Gate};

fn activate<R: Real>(gate: Gate, x: R) -> R {
    match gate {
        Gate::Silu => x.silu(),
        Gate::Sigmoid => x.sigmoid(),
    }
}

/// `x <- x / sqrt(mean(x^2) + eps) * weight`.
fn normalise<R: Real>(x: &mut [R], weight: &[R], eps: f32) {
    let sum: R = x.iter().map(|v| *v * *v).sum();
    let mean = sum / R::from_f64(x.len() as f64);
    let root = (mean + R::from_f64(f64::from(eps))).sqrt();
    for (x, w) in x.iter_mut().zip(weight) {
        *x = *x / root * *w;
    }
}

pub(super) fn gather<R: Real>(x: &RefTensor<R>, index: &[usize], out: &mut RefTensor<R>) {
    let (rows, k) = check::matrix("gather", "x", x);
    out.resize(&[index.len(), k]);
    for (i, &row) in index.iter().enumerate() {
        assert!(row < rows, "gather: {row} is no row of x {:?}", x.shape());
        out.row_mut(i).copy_from_slice(x.row(row));
    }
}

pub(super) fn rms_norm<R: Real>(x: &RefTensor<R>, weight: &RefTensor<R>, eps: f32, out: &mut RefTensor<R>) {
    let (rows, k) = check::matrix("rms_norm", "x", x);
    check::shape("rms_norm", "weight", weight, &[k]);
    out.copy_from(x);
    for i in 0..rows {
        normalise(out.row_mut(i), &weight.data, eps);
    }
}

pub(super) fn head_norm<R: Real>(x: &mut RefTensor<R>, col: usize, heads: usize, weight: &RefTensor<R>, eps: f32) {
    let (rows, k) = check::matrix("head_norm", "x", x);
    let d = weight.data.len();
    check::shape("head_norm", "weight", weight, &[d]);
    assert!(col + heads * d <= k, "head_norm: x {:?} has no columns {col}..{}", x.shape(), col + heads * d);
    for i in 0..rows {
        for head in x.row_mut(i)[col..col + heads * d].chunks_mut(d) {
            normalise(head, &weight.data, eps);
        }
    }
}

pub(super) fn silu_mul<R: Real>(x: &RefTensor<R>, out: &mut RefTensor<R>) {
    let (rows, two_f) = check::matrix("silu_mul", "x", x);
    assert!(two_f % 2 == 0, "silu_mul: x {:?} needs an even number of columns", x.shape());
    let f = two_f / 2;
    out.resize(&[rows, f]);
    for i in 0..rows {
        let (gate, up) = x.row(i).split_at(f);
        for (o, (g, u)) in out.row_mut(i).iter_mut().zip(gate.iter().zip(up)) {
            *o = g.silu() * *u;
        }
    }
}

pub(super) fn gate<R: Real>(x: &mut RefTensor<R>, g: Columns<'_, R>, gate: Gate) {
    let (rows, _) = check::matrix("gate", "x", x);
    check::shape("gate", "g", g.mat, &[rows, g.mat.cols()]);
    for i in 0..rows {
        for (x, g) in x.row_mut(i).iter_mut().zip(g.row(i)) {
            *x = *x * activate(gate, *g);
        }
    }
}

pub(super) fn gated_norm<R: Real>(
    o: &RefTensor<R>,
    weight: &RefTensor<R>,
    eps: f32,
    g: Columns<'_, R>,
    gate: Gate,
    out: &mut RefTensor<R>,
) {
    let (rows, k) = check::matrix("gated_norm", "o", o);
    let d = weight.data.len();
    check::shape("gated_norm", "weight", weight, &[d]);
    assert!(d > 0 && k % d == 0, "gated_norm: o {:?} is not made of heads of {d}", o.shape());
    check::shape("gated_norm", "g", g.mat, &[rows, g.mat.cols()]);
    out.copy_from(o);
    for i in 0..rows {
        for head in out.row_mut(i).chunks_mut(d) {
            normalise(head, &weight.data, eps);
        }
        for (x, g) in out.row_mut(i).iter_mut().zip(g.row(i)) {
            *x = *x * activate(gate, *g);
        }
    }
}
