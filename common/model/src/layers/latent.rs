//! Attention over a compressed latent (DeepSeek-V2, 2024) in its absorbed form: the up-projection of K is applied to
//! the queries and that of V to the outputs, so that what is cached, and read, is the latent and one rotary key.

use std::sync::Arc;

use hypic_kernels::{Activation, AttentionShape, Backend, Cols, DeviceTensor, HeadCols, KvShape, RopeSpec};
use hypic_state::{DType, HostTensor};

use super::attention::{AttentionSequence, attend};
use super::weights::{Packing, Projection};
use super::{Loader, Norm, Scratch, Sum};
use crate::ModelError;
use crate::spec::LatentSpec;

/// Multi-head latent attention.
pub(crate) struct Latent<B: Backend> {
    /// Keys are `[latent | rotary key]`, values the latent.
    pub shape: AttentionShape,
    nope: usize,
    d_v: usize,
    rope: Option<Arc<B::Rope>>,
    /// Rows `[latent | rotary key | gate, if any | query, where it is direct]`.
    project: B::Linear,
    latent_norm: Norm<B>,
    query: Projection<B>,
    /// Per head `[rank, nope]`.
    up_k: Vec<B::Linear>,
    /// Per head `[d_v, rank]`.
    up_v: Vec<B::Linear>,
    gate: Option<Gate>,
    out: B::Linear,
}

/// The output gate, among the common projection's columns.
struct Gate {
    col: usize,
    /// Columns of a gate number.
    width: usize,
}

impl<B: Backend> Latent<B> {
    pub fn load(
        loader: &mut Loader<'_, B>,
        spec: &LatentSpec,
        hidden: usize,
        kv_dtype: DType,
    ) -> Result<Self, ModelError> {
        let LatentSpec { heads, rank, nope, rotary, d_v, .. } = *spec;
        let kv = KvShape { heads: 1, d_k: rank + rotary, d_v: rank, shared: true, dtype: kv_dtype };
        let mut packing = Packing::new();
        packing.add([&spec.latent]);
        let gate = spec.gate.as_ref().map(|rows| {
            let numbers: usize = rows.iter().map(|source| source.rows()).sum();
            Gate { col: packing.add(rows), width: heads * d_v / numbers }
        });
        let query = packing.project(loader, &spec.query, spec.query_norm.as_ref(), hidden)?;
        // In a cached key the rotary part stands behind the latent.
        let rope = spec.rope.as_ref().map(|r| RopeSpec { offset: rank + r.offset, ..r.clone() });
        let (up_k, up_v) = up(loader, spec)?;
        Ok(Latent {
            shape: AttentionShape { heads, kv, scale: spec.scale },
            nope,
            d_v,
            rope: rope.as_ref().map(|r| loader.rope(r)),
            project: packing.load(loader, hidden)?,
            latent_norm: loader.norm(&spec.latent_norm)?,
            query,
            up_k,
            up_v,
            gate,
            out: loader.linear([&spec.out], heads * d_v)?,
        })
    }

    /// Add `out(values * sigmoid(gate))`.
    pub fn forward(
        &self,
        backend: &B,
        x: &B::Tensor,
        scratch: &mut Scratch<B>,
        sequences: Vec<AttentionSequence<'_, B>>,
        mut sum: Sum<'_, B>,
    ) {
        let AttentionShape { heads, kv, .. } = self.shape;
        let (rank, rotary) = (kv.d_v, kv.d_k - kv.d_v);
        let Scratch { projected, narrow, wide, query, mixed, gated, .. } = scratch;
        backend.linear(&self.project, x, projected);
        self.latent_norm.heads(backend, projected, 0, rank);

        let (queries, first): (&B::Tensor, usize) = match &self.query {
            Projection::Packed(first) => (projected, *first),
            Projection::LowRank(low_rank) => {
                low_rank.forward(backend, x, narrow, wide);
                (wide, 0)
            }
        };
        let stride = self.nope + rotary;
        backend.resize(query, &[x.rows(), heads * kv.d_k]);
        let at = |col: usize, stride: usize| HeadCols { col, stride };
        backend.head_linear(&self.up_k, queries, at(first, stride), query, at(0, kv.d_k));
        if rotary > 0 {
            backend.copy_heads(queries, at(first + self.nope, stride), heads, rotary, query, at(rank, kv.d_k));
        }

        let (q, k) = (Cols::new(query, 0), Cols::new(projected, 0));
        attend(backend, self.shape, self.rope.as_deref(), (q, k, None), sequences, mixed);
        backend.resize(gated, &[x.rows(), heads * self.d_v]);
        backend.head_linear(&self.up_v, mixed, at(0, rank), gated, at(0, self.d_v));
        if let Some(Gate { col, width }) = &self.gate {
            backend.gate(gated, Cols::new(projected, *col), *width, Activation::Sigmoid);
        }
        sum.linear(&self.out, gated);
    }
}

/// One matrix per head.
type PerHead<B> = Vec<<B as Backend>::Linear>;

/// The up-projections of K, transposed, and of V, a matrix per head.
fn up<B: Backend>(loader: &mut Loader<'_, B>, spec: &LatentSpec) -> Result<(PerHead<B>, PerHead<B>), ModelError> {
    let (mut up_k, mut up_v) = (Vec::with_capacity(spec.heads), Vec::with_capacity(spec.heads));
    for head in 0..spec.heads {
        let k = loader.rows(&spec.up_rows(head, 0, spec.nope), spec.rank)?;
        let v = loader.rows(&spec.up_rows(head, spec.nope, spec.d_v), spec.rank)?;
        up_k.push(loader.pack(&[transposed(&k)], loader.dtype));
        up_v.push(loader.pack(&[v], loader.dtype));
    }
    Ok((up_k, up_v))
}

/// `[n, m]` of `[m, n]`.
fn transposed(matrix: &HostTensor) -> HostTensor {
    let &[rows, columns] = matrix.shape() else { unreachable!("rows of a tensor are a matrix") };
    let size = matrix.dtype().size();
    let mut data = Vec::with_capacity(matrix.data().len());
    for column in 0..columns {
        for row in 0..rows {
            data.extend_from_slice(&matrix.data()[(row * columns + column) * size..][..size]);
        }
    }
    HostTensor::new(matrix.dtype(), [columns, rows], data.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transposing_moves_every_number() {
        let matrix = HostTensor::from_f32([2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let turned = transposed(&matrix);
        assert_eq!(turned.shape(), [3, 2]);
        assert_eq!(turned.to_f32(), [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
    }
}
