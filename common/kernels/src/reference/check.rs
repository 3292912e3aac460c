//! Shape checks. A mismatch is a bug of the caller: it panics with the op, the argument and both shapes.

use std::ops::Range;

use super::real::Real;
use super::tensor::RefTensor;
use super::{Columns, Reference};
use crate::{Cols, DeviceTensor, HeadCols};

/// `t` must have exactly this shape.
pub(super) fn shape<R: Real>(op: &str, name: &str, t: &RefTensor<R>, want: &[usize]) {
    assert_eq!(t.shape(), want, "{op}: {name} has shape {:?}, needs {want:?}", t.shape());
}

/// `t` must be a matrix; returns its extents.
pub(super) fn matrix<R: Real>(op: &str, name: &str, t: &RefTensor<R>) -> (usize, usize) {
    match *t.shape() {
        [rows, cols] => (rows, cols),
        ref other => panic!("{op}: {name} must be a matrix, has shape {other:?}"),
    }
}

/// `c` must have `width` columns from its first on.
pub(super) fn cols<'a, R: Real>(op: &str, name: &str, c: Cols<'a, Reference<R>>, width: usize) -> Columns<'a, R> {
    let (_, all) = matrix(op, name, c.mat);
    let shape = c.mat.shape();
    assert!(c.col + width <= all, "{op}: {name} {shape:?} has no columns {}..{}", c.col, c.col + width);
    Columns { mat: c.mat, col: c.col, width }
}

/// `t` must have `heads` heads of `width` columns, which do not overlap.
pub(super) fn heads<R: Real>(op: &str, name: &str, t: &RefTensor<R>, at: HeadCols, heads: usize, width: usize) {
    let (_, all) = matrix(op, name, t);
    let Some(last) = heads.checked_sub(1) else { return };
    let (shape, end) = (t.shape(), at.col + last * at.stride + width);
    assert!(end <= all, "{op}: {name} {shape:?} has no columns up to {end}: {heads} heads of {width} at {at:?}");
    assert!(last == 0 || at.stride >= width, "{op}: heads of {width} columns of {name} overlap at {at:?}");
}

/// `range` must lie in `0..len`.
pub(super) fn range(op: &str, name: &str, range: &Range<usize>, len: usize) {
    assert!(range.start <= range.end && range.end <= len, "{op}: {name} {range:?} is not within 0..{len}");
}
