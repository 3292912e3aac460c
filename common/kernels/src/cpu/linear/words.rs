//! Activations as the kernels read them: f32, or rounded to bf16, in pairs or one by one.

use std::cell::Cell;

use hypic_state::DType;

use super::share;
use crate::cpu::Isa;
use crate::cpu::math::per_isa;
use crate::cpu::pool::{Pool, Shared};

/// The bits of `x` rounded to bf16, to nearest, ties to even; NaN stays NaN.
#[inline(always)]
pub(super) fn round_bf16(x: f32) -> u32 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    if x.is_nan() { bits >> 16 | 0x40 } else { rounded }
}

#[inline(always)]
pub(super) fn pair(even: f32, odd: f32) -> u32 {
    round_bf16(even) | round_bf16(odd) << 16
}

per_isa! {
    /// Rows `[.., k]` rounded to pairs of bf16 `[.., ceil(k / 2)]`.
    fn round_to_pairs(x: &[f32], k: usize, out: &mut [u32]) {
        for (x, out) in x.chunks_exact(k).zip(out.chunks_exact_mut(k.div_ceil(2))) {
            let (pairs, rest) = x.as_chunks::<2>();
            for (out, [even, odd]) in out.iter_mut().zip(pairs) {
                *out = pair(*even, *odd);
            }
            if let ([last], Some(out)) = (rest, out.last_mut()) {
                *out = pair(*last, 0.0);
            }
        }
    }
}

per_isa! {
    /// Rows `[.., k]` rounded to bf16, but kept as f32 `[.., k rounded up to even]`.
    fn round_in_f32(x: &[f32], k: usize, out: &mut [u32]) {
        for (x, out) in x.chunks_exact(k).zip(out.chunks_exact_mut(k.next_multiple_of(2))) {
            for (out, x) in out.iter_mut().zip(x) {
                *out = round_bf16(*x) << 16;
            }
            out[k..].fill(0);
        }
    }
}

thread_local! {
    /// Rounded activations, kept for reuse.
    static ROUNDED: Cell<Vec<u32>> = const { Cell::new(Vec::new()) };
}

/// Whether the kernels of `isa` take bf16 in pairs. Without an instruction for their products there would be more to
/// do to widen them each time.
fn in_pairs(isa: Isa) -> bool {
    isa == Isa::Avx512Bf16
}

/// Words of a row of `k` activations for products in `dtype`.
pub(in crate::cpu) fn words(isa: Isa, dtype: DType, k: usize) -> usize {
    match dtype {
        DType::Bf16 if in_pairs(isa) => k.div_ceil(2),
        DType::Bf16 => k.next_multiple_of(2),
        _ => k,
    }
}

/// Write rows `[.., k]` of activations as the kernels of `dtype` read them, [`words`] words each.
pub(in crate::cpu) fn lay_out(isa: Isa, dtype: DType, x: &[f32], k: usize, out: &mut [u32]) {
    if k == 0 {
        return;
    }
    match dtype {
        DType::Bf16 if in_pairs(isa) => round_to_pairs(isa, x, k, out),
        DType::Bf16 => round_in_f32(isa, x, k, out),
        _ => out.copy_from_slice(bits(x)),
    }
}

/// Numbers as words.
fn bits(x: &[f32]) -> &[u32] {
    // SAFETY: both types have the same size and alignment, and every pattern is a u32.
    unsafe { std::slice::from_raw_parts(x.as_ptr().cast(), x.len()) }
}

/// Call `with` with `len` words that are kept for reuse; their contents are unspecified.
pub(in crate::cpu) fn with_buffer(len: usize, with: impl FnOnce(&mut [u32])) {
    let mut buffer = ROUNDED.take();
    buffer.resize(buffer.len().max(len), 0);
    with(&mut buffer[..len]);
    ROUNDED.set(buffer);
}

/// Call `then` with rows `[rows, k]` of activations as the kernels of `dtype` read them.
pub(in crate::cpu) fn with_words(isa: Isa, pool: &Pool, dtype: DType, x: &[f32], k: usize, then: impl FnOnce(&[u32])) {
    if dtype == DType::F32 || k == 0 {
        return then(bits(x));
    }
    let (rows, words) = (x.len() / k, words(isa, dtype, k));
    with_buffer(rows * words, |rounded| {
        let target = Shared::new(rounded);
        // Rounding costs about as much as four operations an element.
        let flops = 4 * x.len();
        let tasks = pool.split(flops).min(rows);
        pool.run(tasks, flops, |task| {
            let rows = share(rows, task, tasks);
            // SAFETY: the shares are disjoint.
            let out = unsafe { target.part(rows.start * words..rows.end * words) };
            lay_out(isa, dtype, &x[rows.start * k..rows.end * k], k, out);
        });
        then(rounded);
    });
}
