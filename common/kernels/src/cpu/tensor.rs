use hypic_state::{HostTensor, Stored};

use crate::DeviceTensor;

/// A row-major f32 tensor in main memory.
#[derive(Debug)]
pub struct CpuTensor {
    shape: Vec<usize>,
    len: usize,
    /// Longer than `len` once it has been larger: what lies behind is kept for reuse.
    data: Vec<f32>,
}

impl CpuTensor {
    pub(super) fn alloc(shape: &[usize]) -> Self {
        let mut t = Self::zeros(shape);
        if cfg!(feature = "poison") {
            t.data.fill(f32::NAN);
        }
        t
    }

    pub(super) fn zeros(shape: &[usize]) -> Self {
        let len = shape.iter().product();
        CpuTensor { shape: shape.to_vec(), len, data: vec![0.0; len] }
    }

    /// Memory is never given back, so a workspace settles at its largest use.
    pub(super) fn resize(&mut self, shape: &[usize]) {
        self.shape.clear();
        self.shape.extend_from_slice(shape);
        self.len = shape.iter().product();
        if self.data.len() < self.len {
            self.data.resize(self.len, 0.0);
        }
        if cfg!(feature = "poison") {
            self.data_mut().fill(f32::NAN);
        }
    }

    pub(super) fn upload(t: &HostTensor) -> Self {
        let data = t.to_f32();
        CpuTensor { shape: t.shape().to_vec(), len: data.len(), data }
    }

    pub(super) fn download(&self) -> HostTensor {
        HostTensor::from_f32(self.shape.clone(), self.data())
    }

    /// The numbers. For tests and for code that knows that it runs on the CPU.
    pub fn data(&self) -> &[f32] {
        &self.data[..self.len]
    }

    pub(super) fn data_mut(&mut self) -> &mut [f32] {
        &mut self.data[..self.len]
    }
}

impl Clone for CpuTensor {
    fn clone(&self) -> Self {
        CpuTensor { shape: self.shape.clone(), len: self.len, data: self.data().to_vec() }
    }
}

impl PartialEq for CpuTensor {
    fn eq(&self, other: &Self) -> bool {
        self.shape == other.shape && self.data() == other.data()
    }
}

impl Stored for CpuTensor {
    fn bytes(&self) -> usize {
        self.data.len() * size_of::<f32>()
    }
}

impl DeviceTensor for CpuTensor {
    fn shape(&self) -> &[usize] {
        &self.shape
    }
}
