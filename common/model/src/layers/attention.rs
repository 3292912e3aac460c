//! Grouped-query softmax attention, and what it shares with latent attention: the rows' keys and values are appended to
//! their sequence's own before any row attends, so that rows of one pass see each other.

use std::ops::Range;

use hypic_kernels::{Activation, AttentionRows, AttentionShape, Backend, Cols, KvShape, Span};
use hypic_state::DType;

use super::weights::Packing;
use super::{Loader, Norm, Scratch, Sum};
use crate::ModelError;
use crate::spec::AttentionSpec;

/// Grouped-query softmax attention.
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
        let d = spec.head_dim;
        let kv = KvShape { heads: spec.kv_heads, d_k: d, d_v: d, shared: false, dtype: kv_dtype };
        let mut packing = Packing::new();
        packing.add(&spec.project);
        Ok(Attention {
            shape: AttentionShape { heads: spec.heads, kv, scale: spec.scale },
            rope: spec.rope.as_ref().map(|r| loader.backend.rope(r)),
            project: packing.load(loader, hidden)?,
            gated: spec.gated,
            q_norm: spec.q_norm.as_ref().map(|n| loader.norm(n)).transpose()?,
            k_norm: spec.k_norm.as_ref().map(|n| loader.norm(n)).transpose()?,
            out: loader.linear([&spec.out], spec.heads * d)?,
        })
    }

    /// Add `out(attention * sigmoid(gate))`.
    pub fn forward(
        &self,
        backend: &B,
        x: &B::Tensor,
        scratch: &mut Scratch<B>,
        sequences: Vec<AttentionSequence<'_, B>>,
        mut sum: Sum<'_, B>,
    ) {
        let AttentionShape { heads, kv, .. } = self.shape;
        let (queries, keys) = (heads * kv.d_k, kv.heads * kv.d_k);
        let gate = queries;
        let k = if self.gated { gate + heads * kv.d_v } else { gate };
        let v = k + keys;
        let Scratch { projected, mixed, .. } = scratch;
        backend.linear(&self.project, x, projected);
        if let Some(norm) = &self.q_norm {
            norm.heads(backend, projected, 0, queries);
        }
        if let Some(norm) = &self.k_norm {
            norm.heads(backend, projected, k, keys);
        }
        let (q, k, v) = (Cols::new(projected, 0), Cols::new(projected, k), Cols::new(projected, v));
        attend(backend, self.shape, self.rope.as_ref(), (q, k, Some(v)), sequences, mixed);
        if self.gated {
            backend.gate(mixed, Cols::new(projected, gate), 1, Activation::Sigmoid);
        }
        sum.linear(&self.out, mixed);
    }
}

/// Append the rows' keys and values (`None`: they are part of the keys) to the sequences' own, and attend to all that
/// the rows see.
pub(super) fn attend<B: Backend>(
    backend: &B,
    shape: AttentionShape,
    rope: Option<&B::Rope>,
    (q, k, v): (Cols<'_, B>, Cols<'_, B>, Option<Cols<'_, B>>),
    sequences: Vec<AttentionSequence<'_, B>>,
    out: &mut B::Tensor,
) {
    let rows: Vec<AttentionRows<'_, B>> = sequences
        .into_iter()
        .map(|s| {
            backend.kv_append(s.own, s.rows.clone(), k, v, s.positions, rope);
            AttentionRows { rows: s.rows, positions: s.positions, spans: s.spans, own: s.own }
        })
        .collect();
    backend.attention(shape, rope, q, &rows, out);
}
