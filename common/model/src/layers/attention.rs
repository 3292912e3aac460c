//! Grouped-query softmax attention, and what it shares with latent attention: the rows' keys and values are appended to
//! their sequence's own before any row attends, so that rows of one pass see each other.

use std::ops::Range;
use std::sync::Arc;

use hypic_kernels::{Activation, AttentionRows, AttentionShape, Backend, Cols, KvShape, Positions, Span};
use hypic_state::DType;

use super::weights::Packing;
use super::{Loader, Norm, Scratch, Sum};
use crate::ModelError;
use crate::spec::AttentionSpec;

/// Grouped-query softmax attention.
pub(crate) struct Attention<B: Backend> {
    pub shape: AttentionShape,
    rope: Option<Arc<B::Rope>>,
    /// Rows `[q | gate, if gated | k | v]`.
    project: B::Linear,
    gated: bool,
    q_norm: Option<Norm<B>>,
    k_norm: Option<Norm<B>>,
    out: B::Linear,
}

/// One sequence in an attention layer.
pub(crate) struct AttentionSequence<'a, B: Backend> {
    /// Positions of its rows.
    pub positions: Positions<'a>,
    /// What rows see besides the store that they are appended to, in the order in which it came.
    pub seen: Vec<Seen<'a, B>>,
    /// Its rows, in order.
    pub stretches: Vec<Stretch<'a, B>>,
}

/// Something that a sequence's rows see from one of them on.
pub(crate) enum Seen<'a, B: Backend> {
    /// K and V that were there before.
    Span(Span<'a, B>),
    /// All of the sequence's stretch `index`, from row `from_row` on.
    Stretch { index: usize, from_row: usize },
}

/// Rows of a sequence with a store of their own. A stretch ends where the state is saved, so that blocks of keys are
/// counted from there whether the sequence went on or another one took up the saved state.
pub(crate) struct Stretch<'a, B: Backend> {
    /// Rows of the pass.
    pub rows: Range<usize>,
    /// To which they are appended.
    pub own: &'a mut B::Kv,
}

impl<B: Backend> AttentionSequence<'_, B> {
    /// Every stretch that has rows, as the attention op takes it.
    fn attending(&self, backend: &B) -> Vec<AttentionRows<'_, B>> {
        let mut first = 0;
        let mut attending = Vec::with_capacity(self.stretches.len());
        for Stretch { rows, own } in &self.stretches {
            let behind = first + rows.len();
            if !rows.is_empty() {
                let spans = self.seen.iter().filter_map(|seen| self.span(backend, seen));
                let spans = spans.filter(|span| span.from_row < behind);
                let spans = spans.map(|span| Span { from_row: span.from_row.saturating_sub(first), ..span });
                let positions = Positions { at: &self.positions.at[first..behind], ..self.positions };
                attending.push(AttentionRows { rows: rows.clone(), positions, spans: spans.collect(), own });
            }
            first = behind;
        }
        attending
    }

    fn span<'s>(&'s self, backend: &B, seen: &Seen<'s, B>) -> Option<Span<'s, B>> {
        let (kv, range, origin, from_row) = match seen {
            Seen::Span(span) => (span.kv, span.range.clone(), span.origin, span.from_row),
            Seen::Stretch { index, from_row } => {
                let own: &B::Kv = self.stretches[*index].own;
                (own, 0..backend.kv_len(own), 0, *from_row)
            }
        };
        (!range.is_empty()).then_some(Span { kv, range, origin, from_row })
    }
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
            rope: spec.rope.as_ref().map(|r| loader.rope(r)),
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
        attend(backend, self.shape, self.rope.as_deref(), (q, k, Some(v)), sequences, mixed);
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
    mut sequences: Vec<AttentionSequence<'_, B>>,
    out: &mut B::Tensor,
) {
    for sequence in &mut sequences {
        let Positions { mut at, ntk_alpha } = sequence.positions;
        for Stretch { rows, own } in sequence.stretches.iter_mut().filter(|stretch| !stretch.rows.is_empty()) {
            let (now, later) = at.split_at(rows.len());
            backend.kv_append(own, rows.clone(), k, v, Positions { at: now, ntk_alpha }, rope);
            at = later;
        }
    }
    let rows: Vec<AttentionRows<'_, B>> = sequences.iter().flat_map(|s| s.attending(backend)).collect();
    backend.attention(shape, rope, q, &rows, out);
}
