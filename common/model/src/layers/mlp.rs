//! The feed-forward layer that serves every row, also as the shared one beside experts.

use hypic_kernels::{Activation, Backend, Cols, MlpForm};

use super::{Loader, Scratch, Sum};
use crate::ModelError;
use crate::spec::MlpSpec;

/// Two projections, and what stands between them.
pub(crate) struct Mlp<B: Backend> {
    inner: usize,
    form: MlpForm,
    /// Rows `[gate | up]`, or `[up]`.
    gate_up: B::Linear,
    down: B::Linear,
}

impl<B: Backend> Mlp<B> {
    pub fn load(loader: &mut Loader<'_, B>, spec: &MlpSpec, hidden: usize) -> Result<Self, ModelError> {
        Ok(Mlp {
            inner: spec.inner,
            gate_up: loader.linear(&spec.gate_up, hidden)?,
            form: spec.form,
            down: loader.linear([&spec.down], spec.inner)?,
        })
    }

    /// Add its value, times the sigmoid of `gate x` (one number a row) where there is one.
    pub fn forward(
        &self,
        backend: &B,
        x: &B::Tensor,
        scratch: &mut Scratch<B>,
        gate: Option<&B::Linear>,
        sum: &mut Sum<'_, B>,
    ) {
        let Scratch { projected, mixed, logits, .. } = scratch;
        backend.linear(&self.gate_up, x, projected);
        backend.mlp_inner(self.form, projected, mixed);
        if let Some(gate) = gate {
            // The down projection is linear: the factor may as well stand before it.
            backend.linear(gate, x, logits);
            backend.gate(mixed, Cols::new(logits, 0), self.inner, Activation::Sigmoid);
        }
        sum.linear(&self.down, mixed);
    }
}
