//! Tensors in main memory. Under the feature `poison` memory whose contents are unspecified holds NaN.

use hypic_state::{HostTensor, Stored};

use super::real::Real;
use crate::DeviceTensor;

/// A row-major tensor in working precision.
#[derive(Clone, Debug, PartialEq)]
pub struct RefTensor<R> {
    pub(super) shape: Vec<usize>,
    pub(super) data: Vec<R>,
}

impl<R: Real> RefTensor<R> {
    /// A tensor over `data`.
    pub(super) fn new(shape: &[usize], data: Vec<R>) -> Self {
        assert_eq!(data.len(), shape.iter().product::<usize>(), "a tensor {shape:?} of {} elements", data.len());
        RefTensor { shape: shape.to_vec(), data }
    }

    pub(super) fn filled(shape: &[usize], value: R) -> Self {
        RefTensor { shape: shape.to_vec(), data: vec![value; shape.iter().product()] }
    }

    pub(super) fn alloc(shape: &[usize]) -> Self {
        Self::filled(shape, if cfg!(feature = "poison") { R::NAN } else { R::ZERO })
    }

    pub(super) fn resize(&mut self, shape: &[usize]) {
        if cfg!(feature = "poison") {
            self.data.clear();
        }
        let fill = if cfg!(feature = "poison") { R::NAN } else { R::ZERO };
        self.shape.clear();
        self.shape.extend_from_slice(shape);
        self.data.resize(shape.iter().product(), fill);
    }

    pub(super) fn copy_from(&mut self, other: &Self) {
        self.shape.clone_from(&other.shape);
        self.data.clone_from(&other.data);
    }

    pub(super) fn upload(t: &HostTensor) -> Self {
        RefTensor { shape: t.shape().to_vec(), data: R::read(t) }
    }

    pub(super) fn download(&self) -> HostTensor {
        R::host(&self.shape, &self.data)
    }

    /// Row `i` of a matrix.
    pub(super) fn row(&self, i: usize) -> &[R] {
        let n = self.cols();
        &self.data[i * n..(i + 1) * n]
    }

    /// Row `i` of a matrix.
    pub(super) fn row_mut(&mut self, i: usize) -> &mut [R] {
        let n = self.cols();
        &mut self.data[i * n..(i + 1) * n]
    }
}

impl<R: Real> Stored for RefTensor<R> {
    fn bytes(&self) -> usize {
        size_of_val(self.data.as_slice())
    }
}

impl<R: Real> DeviceTensor for RefTensor<R> {
    fn shape(&self) -> &[usize] {
        &self.shape
    }
}
