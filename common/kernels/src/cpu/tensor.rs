use hypic_state::{HostTensor, Stored};

use crate::DeviceTensor;

/// A row-major f32 tensor in main memory.
#[derive(Clone, Debug, PartialEq)]
pub struct CpuTensor {
    shape: Vec<usize>,
    data: Vec<f32>,
}

impl CpuTensor {
    pub(super) fn alloc(shape: &[usize]) -> Self {
        let mut t = CpuTensor { shape: Vec::new(), data: Vec::new() };
        t.resize(shape);
        t
    }

    pub(super) fn zeros(shape: &[usize]) -> Self {
        CpuTensor { shape: shape.to_vec(), data: vec![0.0; shape.iter().product()] }
    }

    /// Memory is never given back, so a workspace settles at its largest use.
    pub(super) fn resize(&mut self, shape: &[usize]) {
        self.shape.clear();
        self.shape.extend_from_slice(shape);
        let len = shape.iter().product();
        if cfg!(feature = "poison") {
            self.data.clear();
            self.data.resize(len, f32::NAN);
        } else {
            self.data.resize(len, 0.0);
        }
    }

    pub(super) fn upload(t: &HostTensor) -> Self {
        CpuTensor { shape: t.shape().to_vec(), data: t.to_f32() }
    }

    pub(super) fn download(&self) -> HostTensor {
        HostTensor::from_f32(self.shape.clone(), &self.data)
    }

    /// The numbers. For tests and for code that knows that it runs on the CPU.
    pub fn data(&self) -> &[f32] {
        &self.data
    }

    pub(super) fn data_mut(&mut self) -> &mut [f32] {
        &mut self.data
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
