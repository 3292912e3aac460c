//! Linear layers over weights packed at load.
//!
//! Weights stand in panels of [`PANEL`] output columns, k-major, so that the kernels ([`tile`]) read them as one
//! stream. With bf16 weights the activations are rounded to bf16 too, on every instruction set, and products are
//! summed in f32. A row's result has the same bits whatever else is in the batch and however it is split.

mod products;
mod tile;

use std::cell::Cell;
use std::ops::Range;

use half::{bf16, f16};
use hypic_state::{DType, HostTensor, Stored};

use super::math::per_isa;
use super::pool::{Pool, Shared};
use super::{CpuTensor, Isa};
use crate::DeviceTensor;
use products::{F32Portable, WidePortable};
use tile::{Job, block};

/// Output columns of a panel.
const PANEL: usize = 32;
/// Steps of k packed at a time, so that what is written stays in cache.
const PACK_STEPS: usize = 64;
/// Tasks for each thread: enough to even out threads that are held up.
const TASKS_PER_THREAD: usize = 4;
/// Rows of a task at least, where rows are split.
const TASK_ROWS: usize = 24;

/// One step of k in a panel: a word for each column, f32 or a pair of bf16.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u32; PANEL]);

/// The weights `[n, k]` of a linear layer, in the layout that the kernels read.
pub struct CpuLinear {
    n: usize,
    k: usize,
    dtype: DType,
    lines: Vec<Line>,
}

impl CpuLinear {
    /// Pack the rows of `parts`, each `[n_i, k]`, one below the other, for products in `dtype`.
    ///
    /// # Panics
    /// If `dtype` is neither f32 nor bf16, or the parts are no matrices of the same width.
    pub fn pack(parts: &[HostTensor], dtype: DType) -> Self {
        assert!(
            matches!(dtype, DType::F32 | DType::Bf16),
            "the CPU computes linear layers in f32 or bf16, not {dtype}"
        );
        assert!(!parts.is_empty(), "a linear layer has at least one part");
        let k = parts[0].shape().last().copied().unwrap_or(0);
        for part in parts {
            let shape = part.shape();
            assert!(shape.len() == 2 && shape[1] == k, "parts of a linear layer are [n, {k}], not {shape:?}");
        }
        let n = parts.iter().map(|part| part.shape()[0]).sum();
        let steps = steps(k, dtype);
        let mut lines = vec![Line([0; PANEL]); usize::div_ceil(n, PANEL) * steps];
        let mut first = 0;
        for part in parts {
            let target = Target { lines: &mut lines, steps, pairs: dtype == DType::Bf16, first, k };
            match part.dtype() {
                DType::F32 => target.fill(part, f32::from_le_bytes),
                DType::Bf16 => target.fill(part, |b| bf16::from_le_bytes(b).to_f32()),
                DType::F16 => target.fill(part, |b| f16::from_le_bytes(b).to_f32()),
                DType::F64 => target.fill(part, |b| f64::from_le_bytes(b) as f32),
            }
            first += part.shape()[0];
        }
        CpuLinear { n, k, dtype, lines }
    }

    /// Output width.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Input width.
    pub fn k(&self) -> usize {
        self.k
    }

    /// What products are computed in.
    pub fn dtype(&self) -> DType {
        self.dtype
    }
}

impl Stored for CpuLinear {
    fn bytes(&self) -> usize {
        self.lines.len() * size_of::<Line>()
    }
}

/// Lines of a panel.
fn steps(k: usize, dtype: DType) -> usize {
    if dtype == DType::Bf16 { k.div_ceil(2) } else { k }
}

/// Where a part's rows go.
struct Target<'a> {
    lines: &'a mut [Line],
    steps: usize,
    pairs: bool,
    first: usize,
    k: usize,
}

impl Target<'_> {
    fn fill<const SIZE: usize>(self, part: &HostTensor, read: impl Fn([u8; SIZE]) -> f32) {
        let values = part.data().as_chunks::<SIZE>().0;
        let rows = part.shape()[0];
        let mut row = 0;
        while row < rows {
            let column = self.first + row;
            let lane = column % PANEL;
            let lanes = (PANEL - lane).min(rows - row);
            let panel = &mut self.lines[column / PANEL * self.steps..][..self.steps];
            for (block, lines) in panel.chunks_mut(PACK_STEPS).enumerate() {
                for i in 0..lanes {
                    let values = &values[(row + i) * self.k..][..self.k];
                    for (step, line) in (block * PACK_STEPS..).zip(lines.iter_mut()) {
                        line.0[lane + i] = if self.pairs {
                            pair(read(values[2 * step]), values.get(2 * step + 1).map_or(0.0, |v| read(*v)))
                        } else {
                            read(values[step]).to_bits()
                        };
                    }
                }
            }
            row += lanes;
        }
    }
}

/// The bits of `x` rounded to bf16, to nearest, ties to even; NaN stays NaN.
#[inline(always)]
fn round_bf16(x: f32) -> u32 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    if x.is_nan() { bits >> 16 | 0x40 } else { rounded }
}

#[inline(always)]
fn pair(even: f32, odd: f32) -> u32 {
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

/// `out [rows, n] = x [rows, k] W^T`, added to `out` if `accumulate`.
///
/// # Panics
/// If `x` is not `[rows, k]`, or `out` not `[rows, n]` where it is added to.
pub(super) fn linear(isa: Isa, pool: &Pool, w: &CpuLinear, x: &CpuTensor, out: &mut CpuTensor, accumulate: bool) {
    let rows = x.rows();
    assert_eq!(x.shape(), [rows, w.k], "input of a linear layer [{}, {}]", w.n, w.k);
    if accumulate {
        assert_eq!(out.shape(), [rows, w.n], "sum of a linear layer [{}, {}]", w.n, w.k);
    } else {
        out.resize(&[rows, w.n]);
    }
    if rows == 0 || w.n == 0 {
        return;
    }
    if w.dtype == DType::F32 {
        return product(isa, pool, w, x.data().as_ptr().cast(), rows, out, accumulate);
    }
    let mut rounded = ROUNDED.take();
    // The dot-product instruction takes pairs; without it there would be more to do to widen them each time.
    let pairs = isa == Isa::Avx512Bf16;
    let words = if pairs { w.k.div_ceil(2) } else { w.k.next_multiple_of(2) };
    rounded.resize(rounded.len().max(rows * words), 0);
    if w.k > 0 {
        let target = Shared::new(&mut rounded);
        // Rounding costs about as much as four operations an element.
        let flops = 4 * rows * w.k;
        let tasks = pool.split(flops).min(rows);
        pool.run(tasks, flops, |task| {
            let rows = share(rows, task, tasks);
            // SAFETY: the shares are disjoint.
            let out = unsafe { target.part(rows.start * words..rows.end * words) };
            let x = &x.data()[rows.start * w.k..rows.end * w.k];
            if pairs { round_to_pairs(isa, x, w.k, out) } else { round_in_f32(isa, x, w.k, out) }
        });
    }
    product(isa, pool, w, rounded.as_ptr(), rows, out, accumulate);
    ROUNDED.set(rounded);
}

/// Part `i` of `0..len` cut into `parts` parts of nearly the same length.
fn share(len: usize, i: usize, parts: usize) -> Range<usize> {
    len * i / parts..len * (i + 1) / parts
}

/// The product with `x`, `rows` rows of words as the weights' lines have them.
fn product(isa: Isa, pool: &Pool, w: &CpuLinear, x: *const u32, rows: usize, out: &mut CpuTensor, accumulate: bool) {
    let job = Job {
        weights: w.lines.as_ptr().cast(),
        steps: steps(w.k, w.dtype),
        x,
        out: Shared::new(out.data_mut()),
        n: w.n,
        accumulate,
    };
    let flops = 2 * rows * w.n * w.k;
    let panels = w.n.div_ceil(PANEL);
    let threads = pool.split(flops);
    let (mut across, mut down) = (1, 1);
    if threads > 1 {
        across = panels.min(threads * TASKS_PER_THREAD);
        down = (threads * TASKS_PER_THREAD / across).min(rows / TASK_ROWS).max(1);
    }
    pool.run(across * down, flops, |task| {
        let panels = share(panels, task / down, across);
        let rows = share(rows, task % down, down);
        run(isa, w.dtype, &job, rows, panels.start * PANEL..panels.end * PANEL);
    });
}

/// A block of the product with the kernel of this instruction set.
fn run(isa: Isa, dtype: DType, job: &Job<'_>, rows: Range<usize>, cols: Range<usize>) {
    // SAFETY: a backend is built only with an instruction set that the CPU has; `job` holds what it says; blocks of
    // different tasks are disjoint.
    unsafe {
        match (isa, dtype == DType::Bf16) {
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512Bf16, true) => x86::bf16_avx512(job, rows, cols),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512Bf16 | Isa::Avx512, false) => x86::f32_avx512(job, rows, cols),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512, true) => x86::wide_avx512(job, rows, cols),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx2, false) => x86::f32_avx2(job, rows, cols),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx2, true) => x86::wide_avx2(job, rows, cols),
            (_, false) => block::<F32Portable>(job, rows, cols),
            (_, true) => block::<WidePortable>(job, rows, cols),
        }
    }
}

/// [`block`] compiled for each instruction set.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::products::{Bf16Avx512, F32Avx2, F32Avx512, WideAvx2, WideAvx512};
    use super::{Job, Range, block};

    macro_rules! kernels {
        ($($name:ident: $product:ty, $features:literal;)*) => {$(
            #[target_feature(enable = $features)]
            pub(super) unsafe fn $name(job: &Job<'_>, rows: Range<usize>, cols: Range<usize>) {
                // SAFETY: the caller's promise.
                unsafe { block::<$product>(job, rows, cols) }
            }
        )*};
    }

    kernels! {
        f32_avx512: F32Avx512, "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma";
        bf16_avx512: Bf16Avx512, "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma";
        wide_avx512: WideAvx512, "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma";
        f32_avx2: F32Avx2, "avx2,fma";
        wide_avx2: WideAvx2, "avx2,fma";
    }
}

/// `out [ids, k]`: the rows `ids` of the matrix, as f32.
///
/// # Panics
/// If an id is not below n.
pub(super) fn embed(w: &CpuLinear, ids: &[u32], out: &mut CpuTensor) {
    out.resize(&[ids.len(), w.k]);
    if w.k == 0 {
        return;
    }
    let steps = steps(w.k, w.dtype);
    for (&id, out) in ids.iter().zip(out.data_mut().chunks_exact_mut(w.k)) {
        let id = id as usize;
        assert!(id < w.n, "token id {id} of an embedding of {} rows", w.n);
        let words = w.lines[id / PANEL * steps..][..steps].iter().map(|line| line.0[id % PANEL]);
        if w.dtype == DType::F32 {
            for (out, word) in out.iter_mut().zip(words) {
                *out = f32::from_bits(word);
            }
        } else {
            for (out, word) in out.chunks_mut(2).zip(words) {
                out[0] = f32::from_bits(word << 16);
                if let Some(odd) = out.get_mut(1) {
                    *odd = f32::from_bits(word & 0xffff_0000);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
