//! Steps that treat every row alone: norms, gates, rotations, copies.

use std::ops::Range;

use super::kv::RefRope;
use super::real::Real;
use super::tensor::RefTensor;
use super::{Columns, check};
use crate::{Activation, DeviceTensor, GatedNorm, HeadCols, MlpForm, Positions};

fn activated<R: Real>(activation: Activation, x: R) -> R {
    match activation {
        Activation::Silu => x.silu(),
        Activation::Sigmoid => x.sigmoid(),
        Activation::SquaredRelu if x < R::ZERO => R::ZERO,
        Activation::SquaredRelu => x * x,
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

pub(super) fn mlp_inner<R: Real>(form: MlpForm, x: &RefTensor<R>, out: &mut RefTensor<R>) {
    let (rows, columns) = check::matrix("mlp_inner", "x", x);
    assert!(!form.is_gated() || columns % 2 == 0, "mlp_inner: x {:?} needs an even number of columns", x.shape());
    out.resize(&[rows, if form.is_gated() { columns / 2 } else { columns }]);
    for i in 0..rows {
        inner_row(form, x.row(i), out.row_mut(i));
    }
}

/// What stands between the projections of an MLP, of a row `[gate | up]` or `[up]`.
pub(super) fn inner_row<R: Real>(form: MlpForm, x: &[R], out: &mut [R]) {
    let (gate, up) = x.split_at(x.len() - out.len());
    for (i, (o, u)) in out.iter_mut().zip(up).enumerate() {
        *o = match form {
            MlpForm::SwiGlu => gate[i].silu() * *u,
            MlpForm::BoundedSwiGlu { limit } => {
                let limit = R::from_f64(f64::from(limit));
                at_most(gate[i].silu(), limit) * -at_most(-at_most(*u, limit), limit)
            }
            MlpForm::Plain(activation) => activated(activation, *u),
        };
    }
}

/// The smaller of the two; NaN of `x` stays.
fn at_most<R: Real>(x: R, limit: R) -> R {
    if x > limit { limit } else { x }
}

pub(super) fn gate<R: Real>(x: &mut RefTensor<R>, g: Columns<'_, R>, width: usize, activation: Activation) {
    let (rows, _) = check::matrix("gate", "x", x);
    check::shape("gate", "g", g.mat, &[rows, g.mat.cols()]);
    for i in 0..rows {
        for (x, g) in x.row_mut(i).chunks_mut(width).zip(g.row(i)) {
            let factor = activated(activation, *g);
            x.iter_mut().for_each(|x| *x = *x * factor);
        }
    }
}

pub(super) fn activate<R: Real>(x: &mut RefTensor<R>, cols: Range<usize>, activation: Activation) {
    let (rows, k) = check::matrix("activate", "x", x);
    check::range("activate", "cols", &cols, k);
    for i in 0..rows {
        x.row_mut(i)[cols.clone()].iter_mut().for_each(|x| *x = activated(activation, *x));
    }
}

pub(super) fn mix<R: Real>(acc: &mut RefTensor<R>, a: f32, x: &RefTensor<R>, b: f32) {
    check::shape("mix", "x", x, acc.shape());
    let (a, b) = (R::from_f64(f64::from(a)), R::from_f64(f64::from(b)));
    for (acc, x) in acc.data.iter_mut().zip(&x.data) {
        // Memory that is overwritten may hold anything.
        *acc = if a == R::ZERO { b * *x } else { a * *acc + b * *x };
    }
}

pub(super) fn copy_heads<R: Real>(
    from: &RefTensor<R>,
    at_from: HeadCols,
    heads: usize,
    width: usize,
    to: &mut RefTensor<R>,
    at_to: HeadCols,
) {
    let (rows, _) = check::matrix("copy_heads", "from", from);
    check::shape("copy_heads", "to", to, &[rows, to.cols()]);
    check::heads("copy_heads", "from", from, at_from, heads, width);
    check::heads("copy_heads", "to", to, at_to, heads, width);
    for i in 0..rows {
        for h in 0..heads {
            let head = &from.row(i)[at_from.col + h * at_from.stride..][..width];
            to.row_mut(i)[at_to.col + h * at_to.stride..][..width].copy_from_slice(head);
        }
    }
}

pub(super) fn rotate<R: Real>(
    x: &mut RefTensor<R>,
    col: usize,
    heads: usize,
    d: usize,
    positions: &[Positions<'_>],
    rope: &RefRope<R>,
) {
    let (rows, _) = check::matrix("rotate", "x", x);
    check::heads("rotate", "x", x, HeadCols { col, stride: d }, heads, d);
    let given: usize = positions.iter().map(|p| p.at.len()).sum();
    assert_eq!(given, rows, "rotate: {given} positions for {rows} rows");
    rope.check("rotate", d);
    let mut row = 0;
    for of_sequence in positions {
        let rope = rope.ntk(of_sequence.ntk_alpha);
        for &position in of_sequence.at {
            for h in 0..heads {
                rope.rotate(&mut x.row_mut(row)[col + h * d..][..d], position);
            }
            row += 1;
        }
    }
}

pub(super) fn gated_norm<R: Real>(
    spec: GatedNorm,
    o: &RefTensor<R>,
    weight: &RefTensor<R>,
    g: Columns<'_, R>,
    out: &mut RefTensor<R>,
) {
    let GatedNorm { group, eps, activation, gate_first } = spec;
    let (rows, k) = check::matrix("gated_norm", "o", o);
    assert!(group > 0 && k % group == 0, "gated_norm: o {:?} is not made of groups of {group}", o.shape());
    let weights = weight.data.len();
    assert!(weights == group || weights == k, "gated_norm: {weights} weights for {k} columns in groups of {group}");
    check::shape("gated_norm", "weight", weight, &[weights]);
    check::shape("gated_norm", "g", g.mat, &[rows, g.mat.cols()]);
    out.copy_from(o);
    for i in 0..rows {
        let row = out.row_mut(i);
        let gate = |row: &mut [R]| {
            row.iter_mut().zip(g.row(i)).for_each(|(x, g)| *x = *x * activated(activation, *g));
        };
        if gate_first {
            gate(row);
        }
        for (part, weight) in row.chunks_mut(group).zip(weight.data.chunks(group).cycle()) {
            normalise(part, weight, eps);
        }
        if !gate_first {
            gate(row);
        }
    }
}
