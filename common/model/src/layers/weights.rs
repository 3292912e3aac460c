use hypic_kernels::Backend;
use hypic_state::{DType, HostTensor, Stored};

use crate::spec::{NormSpec, RowSource};
use crate::{Checkpoint, ModelError};

/// A root-mean-square norm on the device.
pub(crate) struct Norm<B: Backend> {
    pub weight: B::Tensor,
    pub eps: f32,
}

/// Brings weights from a checkpoint to a device, counting them.
pub(crate) struct Loader<'a, B: Backend> {
    pub backend: &'a B,
    pub checkpoint: &'a Checkpoint,
    /// Dtype in which linear layers are computed.
    pub dtype: DType,
    /// Told the name of each tensor that has been read.
    pub progress: &'a dyn Fn(&str),
    /// Bytes on the device so far.
    pub bytes: usize,
}

impl<B: Backend> Loader<'_, B> {
    fn read(&self, name: &str, shape: &[usize]) -> Result<HostTensor, ModelError> {
        let tensor = self.checkpoint.tensor(name, shape)?;
        (self.progress)(name);
        Ok(tensor)
    }

    /// A small tensor in working precision.
    pub fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<B::Tensor, ModelError> {
        let tensor = self.backend.upload(&self.read(name, shape)?);
        self.bytes += tensor.bytes();
        Ok(tensor)
    }

    /// A norm.
    pub fn norm(&mut self, spec: &NormSpec) -> Result<Norm<B>, ModelError> {
        let mut host = self.read(&spec.name, &[spec.width])?;
        if spec.zero_centred {
            let factor: Vec<f64> = host.to_f64().iter().map(|w| 1.0 + w).collect();
            host = HostTensor::from_f64([spec.width], &factor);
        }
        let weight = self.backend.upload(&host);
        self.bytes += weight.bytes();
        Ok(Norm { weight, eps: spec.eps })
    }

    /// A linear layer of `columns` inputs whose rows come from `sources`.
    pub fn linear(&mut self, sources: &[RowSource], columns: usize) -> Result<B::Linear, ModelError> {
        let parts = sources.iter().map(|s| self.rows(s, columns)).collect::<Result<Vec<_>, _>>()?;
        let packed = self.backend.pack(&parts, self.dtype);
        self.bytes += packed.bytes();
        Ok(packed)
    }

    fn rows(&self, source: &RowSource, columns: usize) -> Result<HostTensor, ModelError> {
        let whole = self.read(&source.name, &[source.blocks * source.block_rows, columns])?;
        if source.take == source.block_rows {
            return Ok(whole);
        }
        let row = columns * whole.dtype().size();
        let taken: Vec<u8> = (0..source.blocks)
            .flat_map(|block| {
                let first = (block * source.block_rows + source.skip) * row;
                whole.data()[first..first + source.take * row].iter().copied()
            })
            .collect();
        Ok(HostTensor::new(whole.dtype(), [source.rows(), columns], taken.into()))
    }
}
