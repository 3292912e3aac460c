//! Random inputs, comparisons and the backends under test.

use hypic_kernels::{Backend, Cpu, Isa, Reference};
use hypic_state::HostTensor;

/// Where f32 runs out of exponents, nothing is expected of it.
const AS_GOOD_AS_ZERO: f64 = 1e-30;

/// The backend that the others are compared with.
pub fn reference() -> Reference<f64> {
    Reference::new()
}

/// The CPU backend with every instruction set that this machine has, on one and two threads.
pub fn cpus() -> Vec<Cpu> {
    let isas = Isa::ALL.into_iter().filter(|isa| isa.available());
    isas.flat_map(|isa| [1, 2].map(|threads| Cpu::with_isa(threads, isa))).collect()
}

/// The CPU backend with every instruction set, on one thread and on several.
pub fn cpu_thread_pairs() -> Vec<(Cpu, Cpu)> {
    let isas = Isa::ALL.into_iter().filter(|isa| isa.available());
    isas.flat_map(|isa| [2, 3].map(|threads| (Cpu::with_isa(1, isa), Cpu::with_isa(threads, isa)))).collect()
}

/// SplitMix64 (Steele, Lea, Flood, 2014): small, and the same everywhere.
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Rng(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// In `0..n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// In `low..=high`.
    pub fn between(&mut self, low: usize, high: usize) -> usize {
        low + self.below(high - low + 1)
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    pub fn chance(&mut self, p: f64) -> bool {
        self.uniform(0.0, 1.0) < p
    }

    pub fn uniform(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * ((self.next() >> 11) as f64 / (1u64 << 53) as f64)
    }

    /// Nearly a standard normal.
    pub fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.uniform(0.0, 1.0)).sum::<f64>() - 6.0
    }

    /// Normal values times `scale`, each exact in f32.
    pub fn tensor(&mut self, shape: &[usize], scale: f64) -> HostTensor {
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| (self.normal() * scale) as f32).collect();
        HostTensor::from_f32(shape, &values)
    }
}

/// The values of a tensor.
pub fn values<B: Backend>(b: &B, t: &B::Tensor) -> Vec<f64> {
    b.download(t).to_f64()
}

/// Whether a backend computes in f64.
pub fn is_f64<B: Backend>(b: &B) -> bool {
    let third = 1.0 / 3.0;
    values(b, &b.upload(&HostTensor::from_f64([1], &[third])))[0] == third
}

/// An output tensor before its op: of another shape and full of NaN, so that stale values show.
pub fn dirty<B: Backend>(b: &B) -> B::Tensor {
    b.upload(&HostTensor::from_f32([3, 5], &[f32::NAN; 15]))
}

/// The largest magnitude.
pub fn largest(x: &[f64]) -> f64 {
    x.iter().fold(0.0, |m, v| m.max(v.abs()))
}

/// No element may be further than `bound` from what it should be; NaN is.
pub fn within(label: &str, got: &[f64], want: &[f64], bound: f64) {
    assert_eq!(got.len(), want.len(), "{label}: number of elements");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let distance = (g - w).abs();
        assert!(distance <= bound, "{label}: element {i} is {g}, should be {w} (off by {distance:e}, bound {bound:e})");
    }
}

/// No element may be off by more than `tolerance` times the largest of `want`.
pub fn close(label: &str, got: &[f64], want: &[f64], tolerance: f64) {
    within(label, got, want, tolerance * largest(want) + AS_GOOD_AS_ZERO);
}

/// Every bit must be the same.
pub fn same_bits(label: &str, got: &[f64], want: &[f64]) {
    assert_eq!(got.len(), want.len(), "{label}: number of elements");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!(g.to_bits() == w.to_bits(), "{label}: element {i} is {g:e} in one and {w:e} in the other");
    }
}

/// The rows `rows` of a matrix in portable form.
pub fn slice_rows(t: &HostTensor, rows: std::ops::Range<usize>) -> HostTensor {
    let n = t.shape()[1];
    HostTensor::from_f32([rows.len(), n], &t.to_f32()[rows.start * n..rows.end * n])
}

/// Matrices of equal width, one below the other.
pub fn stack(parts: &[HostTensor]) -> HostTensor {
    let data: Vec<f32> = parts.iter().flat_map(HostTensor::to_f32).collect();
    HostTensor::from_f32([parts.iter().map(|p| p.shape()[0]).sum(), parts[0].shape()[1]], &data)
}
