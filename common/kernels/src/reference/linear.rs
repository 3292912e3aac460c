//! Linear layers and embeddings as plain dot products. A 16-bit layer rounds its weights once and the activations
//! on every use; sums are in working precision.

use hypic_state::{DType, HostTensor, Stored};

use super::check;
use super::real::Real;
use super::tensor::RefTensor;
use crate::{DeviceTensor, HeadCols};

/// A weight matrix, row-major as on disk, its values rounded to the dtype it is computed in.
#[derive(Clone, Debug)]
pub struct RefLinear<R> {
    weight: RefTensor<R>,
    dtype: DType,
}

impl<R: Real> RefLinear<R> {
    pub(super) fn pack(parts: &[HostTensor], dtype: DType) -> Self {
        let k = parts.first().expect("pack: at least one part").shape().last().copied().unwrap_or(0);
        let mut data = Vec::new();
        let mut n = 0;
        for part in parts {
            let shape = part.shape();
            assert!(shape.len() == 2 && shape[1] == k, "pack: a part has shape {shape:?}, needs [n, {k}]");
            n += shape[0];
            data.extend(R::read(part).into_iter().map(|w| w.round_to(dtype)));
        }
        RefLinear { weight: RefTensor::new(&[n, k], data), dtype }
    }

    /// `[n, k]`.
    pub(super) fn shape(&self) -> [usize; 2] {
        let [n, k] = self.weight.shape[..] else { unreachable!("a packed weight is a matrix") };
        [n, k]
    }

    /// `sum_k x[k] W[j, k]` for every j; a 16-bit dtype rounds the activations as well.
    pub(super) fn product(&self, x: &[R], mut each: impl FnMut(usize, R)) {
        let x: Vec<R> = x.iter().map(|v| if self.dtype.size() == 2 { v.round_to(self.dtype) } else { *v }).collect();
        for j in 0..self.weight.shape[0] {
            each(j, x.iter().zip(self.weight.row(j)).map(|(x, w)| *x * *w).sum());
        }
    }

    pub(super) fn linear(&self, x: &RefTensor<R>, out: &mut RefTensor<R>) {
        let (rows, k) = check::matrix("linear", "x", x);
        let [n, want] = self.shape();
        assert_eq!(k, want, "linear: x {:?} against weight [{n}, {want}]", x.shape);
        out.resize(&[rows, n]);
        for i in 0..rows {
            let row = out.row_mut(i);
            self.product(x.row(i), |j, y| row[j] = y);
        }
    }

    pub(super) fn linear_add(&self, x: &RefTensor<R>, acc: &mut RefTensor<R>) {
        let (rows, k) = check::matrix("linear_add", "x", x);
        let [n, want] = self.shape();
        assert_eq!(k, want, "linear_add: x {:?} against weight [{n}, {want}]", x.shape);
        check::shape("linear_add", "acc", acc, &[rows, n]);
        for i in 0..rows {
            let row = acc.row_mut(i);
            self.product(x.row(i), |j, y| row[j] += y);
        }
    }

    pub(super) fn embed(&self, ids: &[u32], out: &mut RefTensor<R>) {
        let [n, k] = self.shape();
        out.resize(&[ids.len(), k]);
        for (i, &id) in ids.iter().enumerate() {
            assert!((id as usize) < n, "embed: id {id} is no row of weight [{n}, {k}]");
            out.row_mut(i).copy_from_slice(self.weight.row(id as usize));
        }
    }
}

pub(super) fn head_linear<R: Real>(
    ws: &[RefLinear<R>],
    x: &RefTensor<R>,
    at_x: HeadCols,
    out: &mut RefTensor<R>,
    at_out: HeadCols,
) {
    let (rows, _) = check::matrix("head_linear", "x", x);
    check::shape("head_linear", "out", out, &[rows, out.cols()]);
    let Some(first) = ws.first() else { return };
    let [n, k] = first.shape();
    check::heads("head_linear", "x", x, at_x, ws.len(), k);
    check::heads("head_linear", "out", out, at_out, ws.len(), n);
    for (h, w) in ws.iter().enumerate() {
        assert_eq!(w.shape(), [n, k], "head_linear: weight of head {h} is {:?}, of head 0 [{n}, {k}]", w.shape());
        for i in 0..rows {
            let to = &mut out.row_mut(i)[at_out.col + h * at_out.stride..][..n];
            w.product(&x.row(i)[at_x.col + h * at_x.stride..][..k], |j, y| to[j] = y);
        }
    }
}

impl<R: Real> Stored for RefLinear<R> {
    fn bytes(&self) -> usize {
        self.weight.bytes()
    }
}
