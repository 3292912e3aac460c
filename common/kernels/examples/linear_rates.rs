//! Rates of the packed linear layer with each instruction set, beside the machine's peak measured in the same run:
//! what [`Isa::best`] goes by.
//!
//! `cargo run --release -p hypic-kernels --example linear_rates [threads]`

mod timing;

use std::time::Duration;

use hypic_kernels::{Backend, Cpu, Isa};
use hypic_state::{DType, HostTensor};

/// Time to measure each rate for.
const SPAN: Duration = Duration::from_millis(300);

/// Operations a second of `work`, which does `flops`: the best of its repetitions.
fn rate(flops: f64, work: impl FnMut()) -> f64 {
    flops / timing::fastest(SPAN, work).as_secs_f64() / 1e9
}

#[cfg(target_arch = "x86_64")]
mod peak {
    use std::arch::x86_64::*;
    use std::hint::black_box;

    const SUMS: usize = 24;
    const ROUNDS: usize = 20_000;

    /// Operations of one call.
    pub const F32_FLOPS: f64 = (SUMS * ROUNDS * 16 * 2) as f64;
    pub const BF16_FLOPS: f64 = 2.0 * F32_FLOPS;

    #[target_feature(enable = "avx512f")]
    pub fn f32() {
        let factor = _mm512_set1_ps(black_box(0.5));
        let mut sums = [factor; SUMS];
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = _mm512_fmadd_ps(factor, factor, *sum);
            }
        }
        black_box(sums);
    }

    #[target_feature(enable = "avx512f,avx512bf16")]
    pub fn bf16() {
        // SAFETY: both types are 512 plain bits.
        let factor = unsafe { std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi32(black_box(0x3f00_3f00))) };
        let mut sums = [_mm512_setzero_ps(); SUMS];
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = _mm512_dpbf16_ps(*sum, factor, factor);
            }
        }
        black_box(sums);
    }
}

/// Peak of one thread in f32 and bf16, where the CPU has the instructions.
fn peaks() -> [Option<f64>; 2] {
    #[cfg(target_arch = "x86_64")]
    {
        // SAFETY: called only if the CPU has the instructions.
        let f32 = is_x86_feature_detected!("avx512f").then(|| rate(peak::F32_FLOPS, || unsafe { peak::f32() }));
        let bf16 = is_x86_feature_detected!("avx512bf16")
            // SAFETY: as above.
            .then(|| rate(peak::BF16_FLOPS, || unsafe { peak::bf16() }));
        [f32, bf16]
    }
    #[cfg(not(target_arch = "x86_64"))]
    [None, None]
}

fn main() {
    let threads: usize = std::env::args().nth(1).map_or(1, |arg| arg.parse().expect("a number of threads"));
    let peaks = peaks();
    for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
        let best = if isa == Isa::best() { ", used by default" } else { "" };
        let cpu = Cpu::with_isa(threads, isa);
        println!("{} on {threads} thread(s){best}", cpu.kernel_set());
        for (dtype, peak) in [DType::F32, DType::Bf16].into_iter().zip(peaks) {
            products(&cpu, dtype, peak);
        }
    }
}

fn products(cpu: &Cpu, dtype: DType, peak: Option<f64>) {
    for size in [1024, 4096] {
        let values: Vec<f32> = (0..size * size).map(|i| ((i * 7919) % 1000) as f32 / 1000.0 - 0.5).collect();
        let weights = HostTensor::from_f32([size, size], &values);
        let linear = cpu.pack(std::slice::from_ref(&weights), dtype);
        for rows in [1, 8, 64, 512] {
            let x = cpu.upload(&HostTensor::from_f32([rows, size], &values[..rows * size]));
            let mut out = cpu.alloc(&[rows, size]);
            let gflops = rate(2.0 * (rows * size * size) as f64, || cpu.linear(&linear, &x, &mut out));
            let share =
                peak.map_or(String::new(), |peak| format!(", {:.0} % of a thread's {peak:.0}", 100.0 * gflops / peak));
            println!("k = n = {size}, {dtype}, m = {rows}: {gflops:.0} GFLOP/s{share}");
        }
    }
}
