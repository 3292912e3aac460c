use hypic_kernels::Backend;

use super::{Loader, Norm, Workspace};
use crate::ModelError;
use crate::spec::MlpSpec;

/// `x += down(silu(gate(norm(x))) * up(norm(x)))`.
pub(crate) struct Mlp<B: Backend> {
    gate_up: B::Linear,
    down: B::Linear,
}

impl<B: Backend> Mlp<B> {
    pub fn load(loader: &mut Loader<'_, B>, spec: &MlpSpec, hidden: usize) -> Result<Self, ModelError> {
        let gate_up = loader.linear(&spec.gate_up, hidden)?;
        let down = loader.linear(std::slice::from_ref(&spec.down), spec.inner)?;
        Ok(Mlp { gate_up, down })
    }

    pub fn forward(&self, backend: &B, norm: &Norm<B>, ws: &mut Workspace<B>, x: &mut B::Tensor) {
        backend.rms_norm(x, &norm.weight, norm.eps, &mut ws.normed);
        backend.linear(&self.gate_up, &ws.normed, &mut ws.projected);
        backend.silu_mul(&ws.projected, &mut ws.mixed);
        backend.linear_add(&self.down, &ws.mixed, x);
    }
}
