//! Weights on their way from a checkpoint to a device: which rows of which tensor make a matrix, and the projections of
//! one input that share a matrix. What can go wrong is a tensor that is not as described: the checkpoint's error.

use std::collections::BTreeSet;
use std::sync::Arc;

use hypic_kernels::{Backend, RopeSpec};
use hypic_state::{DType, HostTensor, Stored};

use crate::spec::{NormSpec, ProjectionSpec, RowSource};
use crate::{Checkpoint, ModelError};

/// A root-mean-square norm on the device.
pub(crate) struct Norm<B: Backend> {
    pub weight: B::Tensor,
    pub eps: f32,
    width: usize,
}

impl<B: Backend> Norm<B> {
    /// Normalise `columns` columns of `x` from `col` on in place: each head of the norm's width for itself.
    pub fn heads(&self, backend: &B, x: &mut B::Tensor, col: usize, columns: usize) {
        debug_assert!(columns.is_multiple_of(self.width), "{columns} columns are whole heads of {}", self.width);
        backend.head_norm(x, col, columns / self.width, &self.weight, self.eps);
    }
}

/// A projection through a narrow layer.
pub(crate) struct LowRank<B: Backend> {
    down: B::Linear,
    norm: Option<Norm<B>>,
    up: B::Linear,
    rank: usize,
}

impl<B: Backend> LowRank<B> {
    /// `out = up(norm(down(x)))`; `narrow` holds what stands between.
    pub fn forward(&self, backend: &B, x: &B::Tensor, narrow: &mut B::Tensor, out: &mut B::Tensor) {
        backend.linear(&self.down, x, narrow);
        if let Some(norm) = &self.norm {
            norm.heads(backend, narrow, 0, self.rank);
        }
        backend.linear(&self.up, narrow, out);
    }
}

/// A projection that is one of several of the same input.
pub(crate) enum Projection<B: Backend> {
    /// Its rows are in the common matrix; its first column there.
    Packed(usize),
    /// A matrix pair of its own.
    LowRank(LowRank<B>),
}

/// The rows of a common input projection, collected.
pub(crate) struct Packing<'a> {
    sources: Vec<&'a RowSource>,
    columns: usize,
}

impl<'a> Packing<'a> {
    pub fn new() -> Self {
        Packing { sources: Vec::new(), columns: 0 }
    }

    /// Add these rows; the first column of their values.
    pub fn add(&mut self, rows: impl IntoIterator<Item = &'a RowSource>) -> usize {
        let first = self.columns;
        for source in rows {
            self.columns += source.rows();
            self.sources.push(source);
        }
        first
    }

    /// Add a projection where it is a matrix, else load its two.
    pub fn project<B: Backend>(
        &mut self,
        loader: &mut Loader<'_, B>,
        spec: &'a ProjectionSpec,
        norm: Option<&NormSpec>,
        hidden: usize,
    ) -> Result<Projection<B>, ModelError> {
        let (down, up) = match spec {
            ProjectionSpec::Direct(rows) => return Ok(Projection::Packed(self.add(rows))),
            ProjectionSpec::LowRank { down, up } => (down, up),
        };
        Ok(Projection::LowRank(LowRank {
            down: loader.linear([down], hidden)?,
            norm: norm.map(|n| loader.norm(n)).transpose()?,
            up: loader.linear([up], down.rows())?,
            rank: down.rows(),
        }))
    }

    /// The matrix.
    pub fn load<B: Backend>(self, loader: &mut Loader<'_, B>, hidden: usize) -> Result<B::Linear, ModelError> {
        loader.linear(self.sources, hidden)
    }
}

/// Brings weights from a checkpoint to a device, counting them. A matrix is in main memory only until it is packed.
pub(crate) struct Loader<'a, B: Backend> {
    pub backend: &'a B,
    pub checkpoint: &'a Checkpoint,
    /// Dtype in which linear layers are computed.
    pub dtype: DType,
    /// Told the name of each tensor that has been read.
    pub progress: &'a dyn Fn(&str),
    /// Bytes on the device so far.
    pub bytes: usize,
    /// Tensors that have been told.
    pub told: BTreeSet<String>,
    /// Rotary embeddings so far: layers that rotate alike share one, and its table.
    pub ropes: Vec<(RopeSpec, Arc<B::Rope>)>,
    /// Whether a layer's stored decays were other than its description's, which is told once.
    pub other_decays: bool,
}

impl<B: Backend> Loader<'_, B> {
    /// A rotary embedding.
    pub fn rope(&mut self, spec: &RopeSpec) -> Arc<B::Rope> {
        if let Some((_, rope)) = self.ropes.iter().find(|(known, _)| known == spec) {
            return rope.clone();
        }
        let rope = Arc::new(self.backend.rope(spec));
        self.ropes.push((spec.clone(), rope.clone()));
        rope
    }

    fn tell(&mut self, name: &str) {
        if !self.told.contains(name) {
            self.told.insert(name.to_string());
            (self.progress)(name);
        }
    }

    fn read(&mut self, name: &str, shape: &[usize]) -> Result<HostTensor, ModelError> {
        let tensor = self.checkpoint.tensor(name, shape)?;
        self.tell(name);
        Ok(tensor)
    }

    /// A small tensor in working precision.
    pub fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<B::Tensor, ModelError> {
        let host = self.read(name, shape)?;
        Ok(self.upload(&host))
    }

    /// A small matrix in working precision, stacked from `sources`. Whole tensors may be cut elsewhere: transformers saves
    /// in equal parts what it holds in one.
    pub fn matrix(&mut self, sources: &[RowSource], columns: usize) -> Result<B::Tensor, ModelError> {
        let whole = sources.iter().all(|source| source.skip == 0 && source.take == source.block_rows);
        let stored = sources.iter().map(|source| self.checkpoint.rows_of(&source.name, columns));
        let sources: Vec<RowSource> = match stored.collect::<Option<Vec<usize>>>() {
            Some(rows) if whole && rows.iter().sum::<usize>() == sources.iter().map(RowSource::rows).sum::<usize>() => {
                sources.iter().zip(rows).map(|(source, rows)| RowSource::all(source.name.clone(), rows)).collect()
            }
            _ => sources.to_vec(),
        };
        let parts = sources.iter().map(|s| self.rows(s, columns)).collect::<Result<Vec<_>, _>>()?;
        let values: Vec<f64> = parts.iter().flat_map(HostTensor::to_f64).collect();
        Ok(self.upload(&HostTensor::from_f64([values.len() / columns, columns], &values)))
    }

    /// A tensor that is in main memory.
    pub fn upload(&mut self, host: &HostTensor) -> B::Tensor {
        let tensor = self.backend.upload(host);
        self.bytes += tensor.bytes();
        tensor
    }

    /// A norm.
    pub fn norm(&mut self, spec: &NormSpec) -> Result<Norm<B>, ModelError> {
        let mut host = self.read(&spec.name, &[spec.width])?;
        if spec.zero_centred {
            let factor: Vec<f64> = host.to_f64().iter().map(|w| 1.0 + w).collect();
            host = HostTensor::from_f64([spec.width], &factor);
        }
        Ok(Norm { weight: self.upload(&host), eps: spec.eps, width: spec.width })
    }

    /// A linear layer of `columns` inputs whose rows come from `sources`.
    pub fn linear<'s>(
        &mut self,
        sources: impl IntoIterator<Item = &'s RowSource>,
        columns: usize,
    ) -> Result<B::Linear, ModelError> {
        self.linear_in(sources, columns, self.dtype)
    }

    /// The same, computed in `dtype`.
    pub fn linear_in<'s>(
        &mut self,
        sources: impl IntoIterator<Item = &'s RowSource>,
        columns: usize,
        dtype: DType,
    ) -> Result<B::Linear, ModelError> {
        let parts = sources.into_iter().map(|s| self.rows(s, columns)).collect::<Result<Vec<_>, _>>()?;
        Ok(self.pack(&parts, dtype))
    }

    /// A linear layer whose rows are in main memory.
    pub fn pack(&mut self, parts: &[HostTensor], dtype: DType) -> B::Linear {
        let packed = self.backend.pack(parts, dtype);
        self.bytes += packed.bytes();
        packed
    }

    /// The rows that `source` names.
    pub fn rows(&mut self, source: &RowSource, columns: usize) -> Result<HostTensor, ModelError> {
        let RowSource { blocks, block_rows, skip, take, .. } = *source;
        let whole = [blocks * block_rows, columns];
        // Blocks that are taken whole are one block.
        let (blocks, block_rows, take) =
            if take == block_rows { (1, whole[0], whole[0]) } else { (blocks, block_rows, take) };
        let read = |block: usize| {
            let first = block * block_rows + skip;
            self.checkpoint.rows(&source.name, whole, first..first + take)
        };
        let first = read(0)?;
        let rows = match blocks {
            1 => first,
            _ => {
                let mut data = first.data().to_vec();
                for block in 1..blocks {
                    data.extend_from_slice(read(block)?.data());
                }
                HostTensor::new(first.dtype(), [blocks * take, columns], data.into())
            }
        };
        self.tell(&source.name);
        Ok(rows)
    }
}
