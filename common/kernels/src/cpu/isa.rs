/// Instruction sets with kernels of their own, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// AVX-512 with `vdpbf16ps`.
    Avx512Bf16,
    /// AVX-512 F, BW, DQ, VL.
    Avx512,
    /// AVX2 and FMA.
    Avx2,
    /// Whatever the compiler makes of plain Rust.
    Portable,
}

impl Isa {
    /// All of them, best first.
    pub const ALL: [Isa; 4] = [Isa::Avx512Bf16, Isa::Avx512, Isa::Avx2, Isa::Portable];

    /// The fastest one on this CPU: the first that it has, but for `vdpbf16ps` on Intel's. There it runs at half the rate
    /// of f32 multiplications (measured on a Xeon of the fifth generation: 89 GFLOP/s against 179 of one core), and bf16
    /// weights widened to f32 are faster (155). On AMD's it has their rate, and so twice their throughput.
    /// `cargo run --release -p hypic-kernels --example linear_rates` shows both on the machine at hand.
    pub fn best() -> Self {
        let slow = |isa: &Isa| *isa == Isa::Avx512Bf16 && is_intel();
        let mut faster_first = Self::ALL.into_iter().filter(|isa| !slow(isa));
        faster_first.find(|isa| isa.available()).expect("the portable one is always there")
    }

    /// Whether this CPU has it.
    pub fn available(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => Isa::Avx512.available() && is_x86_feature_detected!("avx512bf16"),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                Isa::Avx2.available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx512Bf16 | Isa::Avx512 | Isa::Avx2 => false,
            Isa::Portable => true,
        }
    }

    /// Name of the set of kernels; changes when a kernel's rounding does.
    pub fn kernel_set(self) -> &'static str {
        match self {
            Isa::Avx512Bf16 => "avx512bf16-v1",
            Isa::Avx512 => "avx512-v1",
            Isa::Avx2 => "avx2-v1",
            Isa::Portable => "portable-v1",
        }
    }
}

/// Whether Intel made this CPU.
#[cfg(target_arch = "x86_64")]
fn is_intel() -> bool {
    let id = std::arch::x86_64::__cpuid(0);
    [id.ebx, id.edx, id.ecx].map(u32::to_le_bytes).as_flattened() == b"GenuineIntel"
}

#[cfg(not(target_arch = "x86_64"))]
fn is_intel() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_is_the_first_available_but_for_slow_bf16() {
        let best = Isa::best();
        assert!(best.available());
        let first = Isa::ALL.into_iter().find(|isa| isa.available()).expect("the portable one");
        if first == Isa::Avx512Bf16 && is_intel() {
            assert_eq!(best, Isa::Avx512);
        } else {
            assert_eq!(best, first);
        }
    }
}
