//! Backends to test on, and how near to the reference each must come (golden/README.md).

/// Largest distances from the reference.
#[derive(Clone, Copy, Debug)]
pub struct Tolerance {
    /// Of logits, absolute.
    pub logits: f64,
    /// Of hidden states, K, V and convolution inputs, absolute.
    pub hidden: f64,
    /// Of recurrent states, relative to the tensor's largest value.
    pub state: f64,
    /// Of an entry's tensors, relative to the tensor's largest value.
    pub entry: f64,
}

/// For a float64 implementation: what the float32 storage of the reference allows.
pub const F64: Tolerance = Tolerance { logits: 1e-6, hidden: 1e-6, state: 2e-7, entry: 2e-7 };
/// For a float32 implementation.
pub const F32: Tolerance = Tolerance { logits: 2e-4, hidden: 1e-4, state: 2e-5, entry: 2e-5 };

/// Run a check on the reference backend in float64 and float32, and on the CPU with every instruction set it has.
#[macro_export]
macro_rules! on_each_backend {
    ($checkpoint:expr, |$rig:ident, $tolerance:ident| $check:expr) => {{
        use $crate::drive::Rig;
        use $crate::tolerance::{F32, F64};
        let ($rig, $tolerance) =
            (Rig::load(hypic_kernels::Reference::<f64>::new(), $checkpoint, hypic_state::DType::F64), F64);
        $check;
        let ($rig, $tolerance) =
            (Rig::load(hypic_kernels::Reference::<f32>::new(), $checkpoint, hypic_state::DType::F32), F32);
        $check;
        for isa in hypic_kernels::Isa::ALL.into_iter().filter(|isa| isa.available()) {
            let cpu = hypic_kernels::Cpu::with_isa(2, isa);
            let ($rig, $tolerance) = (Rig::load(cpu, $checkpoint, hypic_state::DType::F32), F32);
            $check;
        }
    }};
}
