use std::ops::Range;

use hypic_kernels::{AttentionRows, AttentionShape, Backend, Cols, Gate, KvShape, Span};
use hypic_state::DType;

use super::{Loader, Norm, Workspace};
use crate::ModelError;
use crate::spec::AttentionSpec;

/// Grouped-query softmax attention, with optional head norms and output gate.
pub(crate) struct Attention<B: Backend> {
    pub shape: AttentionShape,
    rope: Option<B::Rope>,
    /// Rows `[q | gate, if gated | k | v]`.
    project: B::Linear,
    gated: bool,
    q_norm: Option<Norm<B>>,
    k_norm: Option<Norm<B>>,
    out: B::Linear,
}

/// One sequence in an attention layer.
pub(crate) struct AttentionSequence<'a, B: Backend> {
    /// Rows of the pass.
    pub rows: Range<usize>,
    /// Their positions.
    pub positions: &'a [i64],
    /// What was there before.
    pub spans: Vec<Span<'a, B>>,
    /// The sequence's own tokens, to which the rows are appended.
    pub own: &'a mut B::Kv,
}

impl<B: Backend> Attention<B> {
    pub fn load(
        loader: &mut Loader<'_, B>,
        spec: &AttentionSpec,
        hidden: usize,
        kv_dtype: DType,
    ) -> Result<Self, ModelError> {
        let kv = KvShape { heads: spec.kv_heads, d_k: spec.head_dim, d_v: spec.head_dim, dtype: kv_dtype };
        Ok(Attention {
            shape: AttentionShape { heads: spec.heads, kv, scale: spec.scale },
            rope: spec.rope.as_ref().map(|r| loader.backend.rope(r)),
            project: loader.linear(&spec.project, hidden)?,
            gated: spec.gated,
            q_norm: spec.q_norm.as_ref().map(|n| loader.norm(n)).transpose()?,
            k_norm: spec.k_norm.as_ref().map(|n| loader.norm(n)).transpose()?,
            out: loader.linear(std::slice::from_ref(&spec.out), spec.heads * spec.head_dim)?,
        })
    }

    /// `x += out(attention * sigmoid(gate))`.
    pub fn forward(
        &self,
        backend: &B,
        norm: &Norm<B>,
        ws: &mut Workspace<B>,
        sequences: Vec<AttentionSequence<'_, B>>,
        x: &mut B::Tensor,
    ) {
        let AttentionShape { heads, kv, .. } = self.shape;
        let gate = heads * kv.d_k;
        let k = if self.gated { gate + heads * kv.d_v } else { gate };
        let v = k + kv.heads * kv.d_k;
        backend.rms_norm(x, &norm.weight, norm.eps, &mut ws.normed);
        backend.linear(&self.project, &ws.normed, &mut ws.projected);
        if let Some(n) = &self.q_norm {
            backend.head_norm(&mut ws.projected, 0, heads, &n.weight, n.eps);
        }
        if let Some(n) = &self.k_norm {
            backend.head_norm(&mut ws.projected, k, kv.heads, &n.weight, n.eps);
        }
        let projected = &ws.projected;
        let rope = self.rope.as_ref();
        let rows: Vec<AttentionRows<'_, B>> = sequences
            .into_iter()
            .map(|s| {
                let (keys, values) = (Cols::new(projected, k), Cols::new(projected, v));
                backend.kv_append(s.own, s.rows.clone(), keys, values, s.positions, rope);
                AttentionRows { rows: s.rows, positions: s.positions, spans: s.spans, own: s.own }
            })
            .collect();
        backend.attention(self.shape, rope, Cols::new(projected, 0), &rows, &mut ws.mixed);
        if self.gated {
            backend.gate(&mut ws.mixed, Cols::new(projected, gate), Gate::Sigmoid);
        }
        backend.linear_add(&self.out, &ws.mixed, x);
    }
}
