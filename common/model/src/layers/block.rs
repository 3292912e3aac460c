//! Half a layer around its function: where the norm stands and how the result joins the residual stream. The usual
//! join, a plain sum, is made in place by the function's last matrix; the others need the result by itself.

use hypic_kernels::{Backend, DeviceTensor};

use super::{Loader, Norm, Scratch, Workspace};
use crate::ModelError;
use crate::spec::{self, Residual};

/// Half a decoder layer: its norm, how its result is joined to the residual stream, and the function.
pub(crate) struct Block<B: Backend, F> {
    norm: Norm<B>,
    residual: Residual,
    /// The function.
    pub body: F,
}

impl<B: Backend, F> Block<B, F> {
    pub fn load<S>(
        loader: &mut Loader<'_, B>,
        spec: &spec::Block<S>,
        body: impl FnOnce(&mut Loader<'_, B>, &S) -> Result<F, ModelError>,
    ) -> Result<Self, ModelError> {
        Ok(Block { norm: loader.norm(&spec.norm)?, residual: spec.residual, body: body(loader, &spec.body)? })
    }

    /// Make `x` the next residual stream. `add` adds the function's value at its second argument to the sum.
    pub fn forward(
        &self,
        backend: &B,
        ws: &mut Workspace<B>,
        x: &mut B::Tensor,
        add: impl FnOnce(&F, &B::Tensor, &mut Scratch<B>, Sum<'_, B>),
    ) {
        let Workspace { normed, branch, scratch, .. } = ws;
        let normalise = |x: &B::Tensor, out: &mut B::Tensor| {
            backend.rms_norm(x, &self.norm.weight, self.norm.eps, out);
        };
        match self.residual {
            Residual::Pre { keep, add: factor } => {
                normalise(x, normed);
                if keep == 1.0 && factor == 1.0 {
                    return add(&self.body, normed, scratch, Sum { backend, acc: x, begun: true });
                }
                add(&self.body, normed, scratch, Sum { backend, acc: branch, begun: false });
                backend.mix(x, keep, branch, factor);
            }
            Residual::Post => {
                add(&self.body, x, scratch, Sum { backend, acc: branch, begun: false });
                normalise(branch, normed);
                backend.mix(x, 1.0, normed, 1.0);
            }
            Residual::Normed { keep, add: factor } => {
                normalise(x, normed);
                add(&self.body, normed, scratch, Sum { backend, acc: branch, begun: false });
                std::mem::swap(x, normed);
                backend.mix(x, keep, branch, factor);
            }
        }
    }
}

/// Where a function's value is added: to the residual stream itself, or to nothing yet.
pub(crate) struct Sum<'a, B: Backend> {
    backend: &'a B,
    acc: &'a mut B::Tensor,
    begun: bool,
}

impl<B: Backend> Sum<'_, B> {
    /// Add `w x`.
    pub fn linear(&mut self, w: &B::Linear, x: &B::Tensor) {
        match self.begun {
            true => self.backend.linear_add(w, x, self.acc),
            false => self.backend.linear(w, x, self.acc),
        }
        self.begun = true;
    }

    /// The sum so far, `[rows, hidden]`, to add to; `like` is a tensor of its shape.
    pub fn so_far(&mut self, like: &B::Tensor) -> &mut B::Tensor {
        if !self.begun {
            *self.acc = self.backend.zeros(like.shape());
            self.begun = true;
        }
        self.acc
    }
}
