//! Linear layers over weights packed at load.
//!
//! Weights stand in panels of [`PANEL`] output columns, k-major, so that the kernels ([`tile`]) read them as one
//! stream. With bf16 weights the activations are rounded to bf16 too, on every instruction set, and products are
//! summed in f32. A row's result has the same bits whatever else is in the batch and however it is split.

mod products;
mod tile;
mod words;

use std::ops::Range;

use half::{bf16, f16};
use hypic_state::{DType, HostTensor, Stored};

use super::pool::{Pool, Shared};
use super::{CpuTensor, Isa};
use crate::DeviceTensor;
use products::{F32Portable, WidePortable};
use tile::{Job, block};
use words::pair;

pub(super) use words::{lay_out, with_buffer, with_words, words};

/// Output columns of a panel.
pub(super) const PANEL: usize = 32;
/// Steps of k packed at a time, so that what is written stays in cache.
const PACK_STEPS: usize = 64;
/// Tasks for each thread: enough to even out threads that are held up.
pub(super) const TASKS_PER_THREAD: usize = 4;
/// Rows of a task at least, where rows are split.
pub(super) const TASK_ROWS: usize = 24;

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
    with_words(isa, pool, w.dtype, x.data(), w.k, |x| product(isa, pool, w, x, rows, out, accumulate));
}

/// Part `i` of `0..len` cut into `parts` parts of nearly the same length.
pub(super) fn share(len: usize, i: usize, parts: usize) -> Range<usize> {
    len * i / parts..len * (i + 1) / parts
}

/// The product with `x`, `rows` rows of words as the weights' lines have them.
fn product(isa: Isa, pool: &Pool, w: &CpuLinear, x: &[u32], rows: usize, out: &mut CpuTensor, accumulate: bool) {
    let x_row = words(isa, w.dtype, w.k);
    let out = Shared::new(out.data_mut());
    let flops = 2 * rows * w.n * w.k;
    let panels = w.n.div_ceil(PANEL);
    let threads = pool.split(flops);
    let (mut across, mut down) = (1, 1);
    if threads > 1 {
        across = panels.min(threads * TASKS_PER_THREAD);
        down = (threads * TASKS_PER_THREAD / across).min(rows / TASK_ROWS).max(1);
    }
    let output = Output { to: &out, at: 0, row: w.n, first_col: 0, accumulate };
    pool.run(across * down, flops, |task| {
        let panels = share(panels, task / down, across);
        let input = Input { x, row: x_row, take: None };
        // SAFETY: blocks of different tasks are disjoint.
        unsafe { block_of(isa, w, input, &output, share(rows, task % down, down), panels) };
    });
}

/// Activations as [`lay_out`] writes them.
#[derive(Clone, Copy)]
pub(super) struct Input<'a> {
    /// The rows.
    pub x: &'a [u32],
    /// Words from a row to the next.
    pub row: usize,
    /// The row of `x` that each row of the product takes; `None`: its own.
    pub take: Option<&'a [u32]>,
}

/// Where a product goes.
pub(super) struct Output<'a> {
    /// Numbers of which the product is a part.
    pub to: &'a Shared<'a, f32>,
    /// Where the column `first_col` of the first row is.
    pub at: usize,
    /// From a row to the next.
    pub row: usize,
    /// First column that is computed.
    pub first_col: usize,
    /// Add to what is there.
    pub accumulate: bool,
}

/// The `rows` of a product in the columns of `panels`, as far as there are columns.
///
/// # Safety
/// Nobody else uses that part of the output meanwhile.
///
/// # Panics
/// If a row of the input or of the output lies outside.
pub(super) unsafe fn block_of(
    isa: Isa,
    w: &CpuLinear,
    input: Input<'_>,
    output: &Output<'_>,
    rows: Range<usize>,
    panels: Range<usize>,
) {
    if rows.is_empty() || panels.is_empty() {
        return;
    }
    let need = words(isa, w.dtype, w.k);
    let last = match input.take {
        Some(take) => take[rows.clone()].iter().copied().max().map_or(0, |row| row as usize),
        None => rows.end - 1,
    };
    assert!(last * input.row + need <= input.x.len(), "activations of a linear layer end before row {last}");
    debug_assert!(panels.end <= w.n.div_ceil(PANEL) && output.first_col <= panels.start * PANEL);
    let job = Job {
        weights: w.lines.as_ptr().cast(),
        steps: steps(w.k, w.dtype),
        x: input.x.as_ptr(),
        x_row: input.row,
        take: input.take,
        out: output.to,
        out_at: output.at,
        out_row: output.row,
        first_col: output.first_col,
        n: w.n,
        accumulate: output.accumulate,
    };
    run(isa, w.dtype, &job, rows, panels.start * PANEL..panels.end * PANEL);
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
