use bytes::Bytes;
use half::{bf16, f16};

use crate::{DType, Storage, Stored};

/// Main memory in its portable form: little-endian, row-major, shared by reference count.
#[derive(Clone, Copy, Debug)]
pub struct Host;

impl Storage for Host {
    type Tensor = HostTensor;
    type Kv = HostKv;
}

/// An immutable row-major tensor of little-endian elements.
#[derive(Clone, PartialEq)]
pub struct HostTensor {
    dtype: DType,
    shape: Vec<usize>,
    data: Bytes,
}

impl HostTensor {
    /// A tensor over `data`.
    ///
    /// # Panics
    /// If `data` is not exactly as long as `shape` and `dtype` say.
    pub fn new(dtype: DType, shape: impl Into<Vec<usize>>, data: Bytes) -> Self {
        let shape = shape.into();
        let need = shape.iter().product::<usize>() * dtype.size();
        assert_eq!(data.len(), need, "a {dtype} tensor {shape:?} has {need} bytes, not {}", data.len());
        HostTensor { dtype, shape, data }
    }

    /// An f32 tensor.
    ///
    /// # Panics
    /// If `values` does not fill `shape`.
    pub fn from_f32(shape: impl Into<Vec<usize>>, values: &[f32]) -> Self {
        let data: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Self::new(DType::F32, shape, data.into())
    }

    /// An f64 tensor.
    ///
    /// # Panics
    /// If `values` does not fill `shape`.
    pub fn from_f64(shape: impl Into<Vec<usize>>, values: &[f64]) -> Self {
        let data: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Self::new(DType::F64, shape, data.into())
    }

    /// A bf16 tensor from f32 values, rounded to nearest even.
    ///
    /// # Panics
    /// If `values` does not fill `shape`.
    pub fn from_f32_as_bf16(shape: impl Into<Vec<usize>>, values: &[f32]) -> Self {
        let data: Vec<u8> = values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect();
        Self::new(DType::Bf16, shape, data.into())
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Extent of each axis, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements' bytes.
    pub fn data(&self) -> &Bytes {
        &self.data
    }

    /// All elements as f32; f64 is rounded.
    pub fn to_f32(&self) -> Vec<f32> {
        match self.dtype {
            DType::F32 => self.elements(f32::from_le_bytes),
            DType::Bf16 => self.elements(|b| bf16::from_le_bytes(b).to_f32()),
            DType::F16 => self.elements(|b| f16::from_le_bytes(b).to_f32()),
            DType::F64 => self.elements(|b| f64::from_le_bytes(b) as f32),
        }
    }

    /// All elements as f64, exactly.
    pub fn to_f64(&self) -> Vec<f64> {
        match self.dtype {
            DType::F64 => self.elements(f64::from_le_bytes),
            _ => self.to_f32().into_iter().map(f64::from).collect(),
        }
    }

    fn elements<const N: usize, R>(&self, read: impl Fn([u8; N]) -> R) -> Vec<R> {
        self.data.as_chunks::<N>().0.iter().map(|b| read(*b)).collect()
    }
}

impl Stored for HostTensor {
    fn bytes(&self) -> usize {
        self.data.len()
    }
}

impl std::fmt::Debug for HostTensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "HostTensor({} {:?})", self.dtype, self.shape)
    }
}

/// K and V of a stretch of tokens in one full-attention layer.
#[derive(Clone, Debug, PartialEq)]
pub struct HostKv {
    /// `[tokens, kv heads, d_k]`, rotated at the positions that the owner of the stretch defines
    /// (an entry: the segment-local ones).
    pub k: HostTensor,
    /// `[tokens, kv heads, d_v]`; d_v is 0 where values are the first numbers of the keys (latent attention).
    pub v: HostTensor,
}

impl Stored for HostKv {
    fn bytes(&self) -> usize {
        self.k.bytes() + self.v.bytes()
    }
}
