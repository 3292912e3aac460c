use hypic_kernels::{Backend, Cols, ConvFold, DeltaInputs, DeltaShape, Fold, Gate};

use super::{Loader, Norm, Workspace};
use crate::ModelError;
use crate::spec::GatedDeltaSpec;

/// Gated delta net (Yang et al., 2024) as in Qwen3-Next and Qwen3.5.
pub(crate) struct GatedDelta<B: Backend> {
    pub shape: DeltaShape,
    pub kernel: usize,
    /// Rows `[q | k | v | z | b | a]`.
    project: B::Linear,
    conv: B::Tensor,
    a_log: B::Tensor,
    dt_bias: B::Tensor,
    norm: Norm<B>,
    out: B::Linear,
}

impl<B: Backend> GatedDelta<B> {
    pub fn load(loader: &mut Loader<'_, B>, spec: &GatedDeltaSpec, hidden: usize) -> Result<Self, ModelError> {
        let shape = spec.shape;
        Ok(GatedDelta {
            shape,
            kernel: spec.kernel,
            project: loader.linear(&spec.project, hidden)?,
            conv: loader.tensor(&spec.conv, &[shape.channels(), spec.kernel])?,
            a_log: loader.tensor(&spec.a_log, &[shape.heads])?,
            dt_bias: loader.tensor(&spec.dt_bias, &[shape.heads])?,
            norm: loader.norm(&spec.norm)?,
            out: loader.linear(std::slice::from_ref(&spec.out), shape.heads * shape.d_v)?,
        })
    }

    /// `x += out(norm(read-outs) * silu(z))`, the folds walking every sequence's window and state.
    pub fn forward(
        &self,
        backend: &B,
        norm: &Norm<B>,
        ws: &mut Workspace<B>,
        windows: &mut [ConvFold<'_, B>],
        states: &mut [Fold<'_, B>],
        x: &mut B::Tensor,
    ) {
        let z = self.shape.channels();
        let b = z + self.shape.heads * self.shape.d_v;
        let a = b + self.shape.heads;
        backend.rms_norm(x, &norm.weight, norm.eps, &mut ws.normed);
        backend.linear(&self.project, &ws.normed, &mut ws.projected);
        backend.conv(Cols::new(&ws.projected, 0), &self.conv, None, windows, &mut ws.convolved);
        let inputs = DeltaInputs {
            qkv: &ws.convolved,
            b: Cols::new(&ws.projected, b),
            a: Cols::new(&ws.projected, a),
            a_log: &self.a_log,
            dt_bias: &self.dt_bias,
        };
        backend.gated_delta(self.shape, inputs, states, &mut ws.mixed);
        let z = Cols::new(&ws.projected, z);
        backend.gated_norm(&ws.mixed, &self.norm.weight, self.norm.eps, z, Gate::Silu, &mut ws.gated);
        backend.linear_add(&self.out, &ws.gated, x);
    }
}
