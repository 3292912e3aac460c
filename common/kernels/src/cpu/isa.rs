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

    /// The best one that this CPU has.
    pub fn best() -> Self {
        Self::ALL.into_iter().find(|isa| isa.available()).expect("the portable one is always there")
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
