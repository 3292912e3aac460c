//! Vectors of f32 and the elements that they are loaded from.
//!
//! Everything here trusts its caller with addresses and with the CPU's instructions.

use std::ops::Range;

use half::bf16;

use super::GROUP;
use crate::cpu::{Isa, math};

/// Elements that a kernel can read as f32.
pub(in crate::cpu) trait Element: Copy + Send + Sync + 'static {
    /// A vector of elements from `from` on.
    ///
    /// # Safety
    /// As many elements as `V` has lanes are readable there, and the CPU has V's instructions.
    unsafe fn load<V: Simd>(from: *const Self) -> V;

    /// Its value.
    fn widen(self) -> f32;

    /// The nearest element.
    fn narrow(x: f32) -> Self;

    /// The values of `from`.
    fn widen_all(isa: Isa, from: &[Self], to: &mut [f32]);

    /// `to [lanes, rows]` = the columns `lanes` of `from [rows, GROUP]`.
    fn transpose(isa: Isa, from: &[Self], lanes: Range<usize>, to: &mut [f32]);
}

impl Element for f32 {
    #[inline(always)]
    unsafe fn load<V: Simd>(from: *const f32) -> V {
        // SAFETY: passed on.
        unsafe { V::load(from) }
    }

    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    #[inline(always)]
    fn narrow(x: f32) -> f32 {
        x
    }

    fn widen_all(_: Isa, from: &[f32], to: &mut [f32]) {
        to.copy_from_slice(from);
    }

    fn transpose(isa: Isa, from: &[f32], lanes: Range<usize>, to: &mut [f32]) {
        transpose_f32(isa, from, lanes, to);
    }
}

impl Element for bf16 {
    #[inline(always)]
    unsafe fn load<V: Simd>(from: *const bf16) -> V {
        // SAFETY: passed on; a bf16 is its bits.
        unsafe { V::load_bf16(from.cast()) }
    }

    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn narrow(x: f32) -> bf16 {
        bf16::from_f32(x)
    }

    fn widen_all(isa: Isa, from: &[bf16], to: &mut [f32]) {
        widen_bf16(isa, from, to);
    }

    fn transpose(isa: Isa, from: &[bf16], lanes: Range<usize>, to: &mut [f32]) {
        transpose_bf16(isa, from, lanes, to);
    }
}

/// See [`Element::transpose`]. Whole squares are moved by constant indices, which compile to shuffles.
#[inline(always)]
fn transpose<E: Element>(from: &[E], lanes: Range<usize>, to: &mut [f32]) {
    let rows = from.len() / GROUP;
    let whole = if lanes.len() == GROUP { rows - rows % SQUARE } else { 0 };
    for row in (0..whole).step_by(SQUARE) {
        for lane in (0..GROUP).step_by(SQUARE) {
            let square: [[f32; SQUARE]; SQUARE] = std::array::from_fn(|i| {
                let from: &[E; SQUARE] = from[(row + i) * GROUP + lane..].first_chunk().expect("a row of the square");
                from.map(E::widen)
            });
            for j in 0..SQUARE {
                let column: [f32; SQUARE] = std::array::from_fn(|i| square[i][j]);
                to[(lane + j) * rows + row..][..SQUARE].copy_from_slice(&column);
            }
        }
    }
    for (to, lane) in to.chunks_exact_mut(rows.max(1)).zip(lanes) {
        for (row, to) in to.iter_mut().enumerate().skip(whole) {
            *to = from[row * GROUP + lane].widen();
        }
    }
}

/// Side of the squares of a transposition.
const SQUARE: usize = 8;

math::per_isa! {
    fn transpose_f32(from: &[f32], lanes: Range<usize>, to: &mut [f32]) {
        transpose(from, lanes, to);
    }
}

math::per_isa! {
    fn transpose_bf16(from: &[bf16], lanes: Range<usize>, to: &mut [f32]) {
        transpose(from, lanes, to);
    }
}

math::per_isa! {
    fn widen_bf16(from: &[bf16], to: &mut [f32]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = from.widen();
        }
    }
}

/// A vector of f32.
///
/// # Safety
/// All methods need a CPU with the vector's instructions; loads and stores need `LANES` elements there.
pub(in crate::cpu) trait Simd: Copy {
    /// Numbers in a vector; divides [`GROUP`](super::GROUP).
    const LANES: usize;

    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    unsafe fn load_bf16(from: *const u16) -> Self;
    unsafe fn store(self, to: *mut f32);
    unsafe fn mul(self, by: Self) -> Self;
    /// `self * by + plus`.
    unsafe fn mul_add(self, by: Self, plus: Self) -> Self;
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::Simd;

    // SAFETY of the blocks in both: as the trait says.

    impl Simd for __m512 {
        const LANES: usize = 16;

        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            // SAFETY: see above.
            unsafe { _mm512_set1_ps(x) }
        }

        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: see above.
            unsafe { _mm512_loadu_ps(from) }
        }

        #[inline(always)]
        unsafe fn load_bf16(from: *const u16) -> Self {
            // SAFETY: see above.
            unsafe {
                let halves = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(halves))
            }
        }

        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: see above.
            unsafe { _mm512_storeu_ps(to, self) }
        }

        #[inline(always)]
        unsafe fn mul(self, by: Self) -> Self {
            // SAFETY: see above.
            unsafe { _mm512_mul_ps(self, by) }
        }

        #[inline(always)]
        unsafe fn mul_add(self, by: Self, plus: Self) -> Self {
            // SAFETY: see above.
            unsafe { _mm512_fmadd_ps(self, by, plus) }
        }
    }

    impl Simd for __m256 {
        const LANES: usize = 8;

        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            // SAFETY: see above.
            unsafe { _mm256_set1_ps(x) }
        }

        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: see above.
            unsafe { _mm256_loadu_ps(from) }
        }

        #[inline(always)]
        unsafe fn load_bf16(from: *const u16) -> Self {
            // SAFETY: see above.
            unsafe {
                let halves = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(halves))
            }
        }

        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: see above.
            unsafe { _mm256_storeu_ps(to, self) }
        }

        #[inline(always)]
        unsafe fn mul(self, by: Self) -> Self {
            // SAFETY: see above.
            unsafe { _mm256_mul_ps(self, by) }
        }

        #[inline(always)]
        unsafe fn mul_add(self, by: Self, plus: Self) -> Self {
            // SAFETY: see above.
            unsafe { _mm256_fmadd_ps(self, by, plus) }
        }
    }
}

/// The vector of the portable kernels.
#[derive(Clone, Copy)]
pub(super) struct Plain([f32; 8]);

impl Simd for Plain {
    const LANES: usize = 8;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Plain([x; 8])
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: eight elements are there, says the trait.
        Plain(unsafe { from.cast::<[f32; 8]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        // SAFETY: eight elements are there, says the trait.
        let bits = unsafe { from.cast::<[u16; 8]>().read_unaligned() };
        Plain(bits.map(|b| f32::from_bits(u32::from(b) << 16)))
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: eight elements are there, says the trait.
        unsafe { to.cast::<[f32; 8]>().write_unaligned(self.0) }
    }

    #[inline(always)]
    unsafe fn mul(self, by: Self) -> Self {
        Plain(std::array::from_fn(|i| self.0[i] * by.0[i]))
    }

    #[inline(always)]
    unsafe fn mul_add(self, by: Self, plus: Self) -> Self {
        Plain(std::array::from_fn(|i| self.0[i] * by.0[i] + plus.0[i]))
    }
}
