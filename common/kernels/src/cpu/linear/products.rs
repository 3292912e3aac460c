//! The products that tiles are made of: one for each instruction set and dtype.

use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use super::tile::{Job, Product, Vector, Walk, sweep};

/// `ROWS` and `sweep` of a product from a table: tiles of so many rows are so many vectors wide.
macro_rules! shapes {
    ($max:literal rows, panel of $panel:literal, $($rows:literal => $vectors:literal),* $(,)?) => {
        const ROWS: usize = $max;
        #[inline(always)]
        unsafe fn sweep(job: &Job<'_>, row: usize, rows: usize, cols: Range<usize>, walk: &Walk) {
            match rows {
                // SAFETY: the caller's promise.
                $($rows => unsafe { sweep::<Self, $rows, $vectors, $panel>(job, row, cols, walk) },)*
                _ => debug_assert_eq!(rows, 0),
            }
        }
    };
}

/// Enough independent sums to hide the latency of the multiplication, few enough for 32 registers.
#[cfg(target_arch = "x86_64")]
macro_rules! shapes_avx512 {
    () => {
        shapes!(12 rows, panel of 2, 1 => 8, 2 => 8, 3 => 4, 4 => 4, 5 => 4, 6 => 4, 7 => 2, 8 => 2, 9 => 2, 10 => 2,
            11 => 2, 12 => 2);
    };
}

/// The same for 16 registers.
#[cfg(target_arch = "x86_64")]
macro_rules! shapes_avx2 {
    () => {
        shapes!(6 rows, panel of 4, 1 => 8, 2 => 4, 3 => 4, 4 => 2, 5 => 2, 6 => 2);
    };
}

/// Upper half of a pair of bf16, as f32 bits.
const ODD: u32 = 0xffff_0000;

#[cfg(target_arch = "x86_64")]
impl Vector for __m512 {
    const LANES: usize = 16;
    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: the caller has AVX-512.
        unsafe { _mm512_setzero_ps() }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller has AVX-512 and a vector there.
        unsafe { _mm512_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller has AVX-512 and room there.
        unsafe { _mm512_storeu_ps(to, self) }
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: the caller has AVX-512.
        unsafe { _mm512_add_ps(self, other) }
    }
}

#[cfg(target_arch = "x86_64")]
impl Vector for __m256 {
    const LANES: usize = 8;
    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: the caller has AVX2.
        unsafe { _mm256_setzero_ps() }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller has AVX2 and a vector there.
        unsafe { _mm256_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller has AVX2 and room there.
        unsafe { _mm256_storeu_ps(to, self) }
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: the caller has AVX2.
        unsafe { _mm256_add_ps(self, other) }
    }
}

/// The portable vector.
type Four = [f32; 4];

impl Vector for Four {
    const LANES: usize = 4;
    #[inline(always)]
    unsafe fn zero() -> Self {
        [0.0; 4]
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller has a vector there.
        unsafe { from.cast::<Self>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller has room there.
        unsafe { to.cast::<Self>().write_unaligned(self) }
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        [self[0] + other[0], self[1] + other[1], self[2] + other[2], self[3] + other[3]]
    }
}

/// f32 with AVX-512.
#[cfg(target_arch = "x86_64")]
pub(super) struct F32Avx512;

#[cfg(target_arch = "x86_64")]
impl Product for F32Avx512 {
    type Sum = __m512;
    type Weights = __m512;
    type Activation = __m512;
    const WORDS: usize = 1;
    shapes_avx512!();
    #[inline(always)]
    unsafe fn weights(from: *const u32) -> __m512 {
        // SAFETY: the caller has AVX-512 and a vector there.
        unsafe { _mm512_loadu_ps(from.cast()) }
    }
    #[inline(always)]
    unsafe fn activation(from: *const u32) -> __m512 {
        // SAFETY: the caller has AVX-512 and a word there.
        unsafe { _mm512_set1_ps(from.cast::<f32>().read()) }
    }
    #[inline(always)]
    unsafe fn step(sum: __m512, w: __m512, x: __m512) -> __m512 {
        // SAFETY: the caller has AVX-512.
        unsafe { _mm512_fmadd_ps(w, x, sum) }
    }
}

/// bf16 with `vdpbf16ps`.
#[cfg(target_arch = "x86_64")]
pub(super) struct Bf16Avx512;

#[cfg(target_arch = "x86_64")]
impl Product for Bf16Avx512 {
    type Sum = __m512;
    type Weights = __m512i;
    type Activation = __m512i;
    const WORDS: usize = 1;
    shapes_avx512!();
    #[inline(always)]
    unsafe fn weights(from: *const u32) -> __m512i {
        // SAFETY: the caller has AVX-512 and a vector there.
        unsafe { _mm512_loadu_si512(from.cast()) }
    }
    #[inline(always)]
    unsafe fn activation(from: *const u32) -> __m512i {
        // SAFETY: the caller has AVX-512 and a word there.
        unsafe { _mm512_set1_epi32(from.cast::<i32>().read()) }
    }
    #[inline(always)]
    unsafe fn step(sum: __m512, w: __m512i, x: __m512i) -> __m512 {
        // SAFETY: the caller has AVX-512 BF16; both types are 512 plain bits.
        unsafe {
            _mm512_dpbf16_ps(
                sum,
                std::mem::transmute::<__m512i, __m512bh>(w),
                std::mem::transmute::<__m512i, __m512bh>(x),
            )
        }
    }
}

/// bf16 widened to f32, with AVX-512.
#[cfg(target_arch = "x86_64")]
pub(super) struct WideAvx512;

#[cfg(target_arch = "x86_64")]
impl Product for WideAvx512 {
    type Sum = __m512;
    type Weights = [__m512; 2];
    type Activation = [__m512; 2];
    const WORDS: usize = 2;
    shapes_avx512!();
    #[inline(always)]
    unsafe fn weights(from: *const u32) -> [__m512; 2] {
        // SAFETY: the caller has AVX-512 and a vector there.
        unsafe {
            let pairs = _mm512_loadu_si512(from.cast());
            let odd = _mm512_and_si512(pairs, _mm512_set1_epi32(ODD as i32));
            [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)), _mm512_castsi512_ps(odd)]
        }
    }
    #[inline(always)]
    unsafe fn activation(from: *const u32) -> [__m512; 2] {
        // SAFETY: the caller has AVX-512 and a word there.
        unsafe {
            let pair = from.cast::<f32>();
            [_mm512_set1_ps(pair.read()), _mm512_set1_ps(pair.add(1).read())]
        }
    }
    #[inline(always)]
    unsafe fn step(sum: __m512, w: [__m512; 2], x: [__m512; 2]) -> __m512 {
        // SAFETY: the caller has AVX-512.
        unsafe { _mm512_fmadd_ps(w[1], x[1], _mm512_fmadd_ps(w[0], x[0], sum)) }
    }
}

/// f32 with AVX2.
#[cfg(target_arch = "x86_64")]
pub(super) struct F32Avx2;

#[cfg(target_arch = "x86_64")]
impl Product for F32Avx2 {
    type Sum = __m256;
    type Weights = __m256;
    type Activation = __m256;
    const WORDS: usize = 1;
    shapes_avx2!();
    #[inline(always)]
    unsafe fn weights(from: *const u32) -> __m256 {
        // SAFETY: the caller has AVX2 and a vector there.
        unsafe { _mm256_loadu_ps(from.cast()) }
    }
    #[inline(always)]
    unsafe fn activation(from: *const u32) -> __m256 {
        // SAFETY: the caller has AVX2 and a word there.
        unsafe { _mm256_set1_ps(from.cast::<f32>().read()) }
    }
    #[inline(always)]
    unsafe fn step(sum: __m256, w: __m256, x: __m256) -> __m256 {
        // SAFETY: the caller has FMA.
        unsafe { _mm256_fmadd_ps(w, x, sum) }
    }
}

/// bf16 widened to f32, with AVX2.
#[cfg(target_arch = "x86_64")]
pub(super) struct WideAvx2;

#[cfg(target_arch = "x86_64")]
impl Product for WideAvx2 {
    type Sum = __m256;
    type Weights = [__m256; 2];
    type Activation = [__m256; 2];
    const WORDS: usize = 2;
    shapes_avx2!();
    #[inline(always)]
    unsafe fn weights(from: *const u32) -> [__m256; 2] {
        // SAFETY: the caller has AVX2 and a vector there.
        unsafe {
            let pairs = _mm256_loadu_si256(from.cast());
            let odd = _mm256_and_si256(pairs, _mm256_set1_epi32(ODD as i32));
            [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs)), _mm256_castsi256_ps(odd)]
        }
    }
    #[inline(always)]
    unsafe fn activation(from: *const u32) -> [__m256; 2] {
        // SAFETY: the caller has AVX2 and a word there.
        unsafe {
            let pair = from.cast::<f32>();
            [_mm256_set1_ps(pair.read()), _mm256_set1_ps(pair.add(1).read())]
        }
    }
    #[inline(always)]
    unsafe fn step(sum: __m256, w: [__m256; 2], x: [__m256; 2]) -> __m256 {
        // SAFETY: the caller has FMA.
        unsafe { _mm256_fmadd_ps(w[1], x[1], _mm256_fmadd_ps(w[0], x[0], sum)) }
    }
}

/// f32 in plain Rust.
pub(super) struct F32Portable;

impl Product for F32Portable {
    type Sum = Four;
    type Weights = Four;
    type Activation = f32;
    const WORDS: usize = 1;
    shapes!(3 rows, panel of 8, 1 => 8, 2 => 4, 3 => 4);
    #[inline(always)]
    unsafe fn weights(from: *const u32) -> Four {
        // SAFETY: the caller has a vector there.
        unsafe { Four::load(from.cast()) }
    }
    #[inline(always)]
    unsafe fn activation(from: *const u32) -> f32 {
        // SAFETY: the caller has a word there.
        f32::from_bits(unsafe { from.read() })
    }
    #[inline(always)]
    unsafe fn step(mut sum: Four, w: Four, x: f32) -> Four {
        for i in 0..4 {
            sum[i] += w[i] * x;
        }
        sum
    }
}

/// bf16 in plain Rust.
pub(super) struct WidePortable;

impl Product for WidePortable {
    type Sum = Four;
    type Weights = [u32; 4];
    type Activation = [f32; 2];
    const WORDS: usize = 2;
    shapes!(3 rows, panel of 8, 1 => 8, 2 => 4, 3 => 4);
    #[inline(always)]
    unsafe fn weights(from: *const u32) -> [u32; 4] {
        // SAFETY: the caller has a vector there.
        unsafe { from.cast::<[u32; 4]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn activation(from: *const u32) -> [f32; 2] {
        // SAFETY: the caller has a word there.
        unsafe { from.cast::<[f32; 2]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn step(mut sum: Four, w: [u32; 4], x: [f32; 2]) -> Four {
        for i in 0..4 {
            sum[i] += f32::from_bits(w[i] << 16) * x[0];
            sum[i] += f32::from_bits(w[i] & ODD) * x[1];
        }
        sum
    }
}
