//! What unit tests of several kernels use.

use hypic_state::HostTensor;

use super::{CpuTensor, Isa};

/// The instruction sets of this CPU.
pub(super) fn isas() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.available())
}

/// Numbers in [-1, 1) that look random.
pub(super) fn numbers(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        })
        .collect()
}

/// A matrix.
pub(super) fn tensor(shape: [usize; 2], data: &[f32]) -> CpuTensor {
    CpuTensor::upload(&HostTensor::from_f32(shape, data))
}
