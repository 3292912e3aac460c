//! Register tiles: a few rows of activations against a few columns of packed weights.
//!
//! Weights come in lines of [`PANEL`] 32-bit words, one line a step: f32, or two bf16 of consecutive k (the even one
//! in the low half). Every output is the sum, in order, of sums over [`CHUNK`] steps, each with one accumulator that
//! walks k upwards from zero, whatever the shape of the tile: a row's result never depends on the rows computed
//! beside it. Rows of activations may lie anywhere ([`Job::take`]), so that some of a batch need not be gathered.

use std::ops::Range;

use super::super::pool::Shared;
use super::PANEL;

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// Steps that are summed before they are added to the output: so many rows of activations, and the weights of a
/// panel, stay in the second-level cache.
pub(super) const CHUNK: usize = 1024;
/// Steps that weights are asked for ahead of their use.
const AHEAD: usize = 32;
/// Words of a cache line.
const CACHE_LINE: usize = 16;

/// What a tile needs to know of the whole product.
pub(super) struct Job<'a> {
    /// Packed weights: for each panel, `steps` lines of [`PANEL`] words.
    pub weights: *const u32,
    /// Lines of a panel.
    pub steps: usize,
    /// Activations, [`Product::WORDS`] words a step, `steps` steps a row.
    pub x: *const u32,
    /// Words from a row of activations to the next.
    pub x_row: usize,
    /// The row of activations that each row of the product takes; `None`: its own.
    pub take: Option<&'a [u32]>,
    /// Where the sums go.
    pub out: &'a Shared<'a, f32>,
    /// Where in `out` the column `first_col` of the first row is.
    pub out_at: usize,
    /// From a row of `out` to the next.
    pub out_row: usize,
    /// First column that is computed.
    pub first_col: usize,
    /// Columns of the weights.
    pub n: usize,
    /// Add to `out` instead of overwriting it.
    pub accumulate: bool,
}

/// A stretch of steps, and which weights a tile asks for while it walks it: at step i the line of its own weights at
/// i, moved by `offset` words, but with `stride` words from one step to the next.
pub(super) struct Walk {
    steps: Range<usize>,
    offset: usize,
    stride: usize,
}

impl Job<'_> {
    /// The row of activations of row `row` of the product.
    #[inline(always)]
    fn source(&self, row: usize) -> usize {
        self.take.map_or(row, |take| take[row] as usize)
    }
}

// SAFETY: weights and activations are only read; `out` is shared by its own rules.
unsafe impl Sync for Job<'_> {}

/// A vector of f32.
pub(super) trait Vector: Copy {
    const LANES: usize;
    unsafe fn zero() -> Self;
    unsafe fn load(from: *const f32) -> Self;
    unsafe fn store(self, to: *mut f32);
    unsafe fn add(self, other: Self) -> Self;
}

/// How one step of k is multiplied.
pub(super) trait Product {
    type Sum: Vector;
    /// Weights of as many columns as a sum has lanes.
    type Weights: Copy;
    /// One row's activation, in all lanes.
    type Activation: Copy;
    /// Words of a step's activation.
    const WORDS: usize;
    /// Rows of the largest tile.
    const ROWS: usize;
    unsafe fn weights(from: *const u32) -> Self::Weights;
    unsafe fn activation(from: *const u32) -> Self::Activation;
    unsafe fn step(sum: Self::Sum, w: Self::Weights, x: Self::Activation) -> Self::Sum;
    /// Compute `rows <= ROWS` rows from `row` on over the columns `cols`, of whole panels.
    unsafe fn sweep(job: &Job<'_>, row: usize, rows: usize, cols: Range<usize>, walk: &Walk);
}

/// All rows and columns of a block, `cols` from and to a multiple of [`PANEL`].
///
/// # Safety
/// The CPU has the instructions of `P`, `job` points to what it says, and nobody else writes the block.
#[inline(always)]
pub(super) unsafe fn block<P: Product>(job: &Job<'_>, rows: Range<usize>, cols: Range<usize>) {
    let tiles = rows.len().div_ceil(P::ROWS);
    if tiles <= 1 {
        // All weights are read once, in order.
        let walk = Walk { steps: 0..job.steps, offset: AHEAD * PANEL, stride: PANEL };
        // SAFETY: the caller's promise.
        return unsafe { P::sweep(job, rows.start, rows.len(), cols, &walk) };
    }
    let panel = job.steps * PANEL;
    for start in (0..job.steps.max(1)).step_by(CHUNK) {
        let steps = start..job.steps.min(start + CHUNK);
        for col in cols.clone().step_by(PANEL) {
            // A chunk of a panel stays in cache for all rows; tiles of nearly the same height keep the last from
            // being slow. Each asks for its share of what is read next.
            let next = if col + PANEL < cols.end {
                panel
            } else {
                (CHUNK * PANEL).wrapping_sub((col - cols.start) / PANEL * panel)
            };
            let stride = PANEL / tiles.min(PANEL);
            for tile in 0..tiles {
                let from = rows.len() * tile / tiles;
                let to = rows.len() * (tile + 1) / tiles;
                let offset = next.wrapping_add(tile * steps.len() * stride);
                let walk = Walk { steps: steps.clone(), offset, stride };
                // SAFETY: the caller's promise.
                unsafe { P::sweep(job, rows.start + from, to - from, col..col + PANEL, &walk) };
            }
        }
    }
}

/// `R` rows over `cols`, `C` vectors of columns at a time, what is left a panel (`D` vectors) at a time.
///
/// # Safety
/// As of [`block`].
#[inline(always)]
pub(super) unsafe fn sweep<P: Product, const R: usize, const C: usize, const D: usize>(
    job: &Job<'_>,
    row: usize,
    cols: Range<usize>,
    walk: &Walk,
) {
    let mut col = cols.start;
    while col + C * P::Sum::LANES <= cols.end {
        // SAFETY: the caller's promise.
        unsafe { tile::<P, R, C>(job, row, col, walk) };
        col += C * P::Sum::LANES;
    }
    while col < cols.end {
        // SAFETY: the caller's promise.
        unsafe { tile::<P, R, D>(job, row, col, walk) };
        col += D * P::Sum::LANES;
    }
}

/// `R` rows from `row` on, `C` vectors of columns from `col` on, over the steps of `walk`.
#[inline(always)]
unsafe fn tile<P: Product, const R: usize, const C: usize>(job: &Job<'_>, row: usize, col: usize, walk: &Walk) {
    let mut start = walk.steps.start;
    loop {
        let end = walk.steps.end.min(start + CHUNK);
        // SAFETY: the caller's promise.
        unsafe {
            let sums = chunk::<P, R, C>(job, row, col, start..end, walk);
            finish::<P::Sum, R, C>(job, row, col, &sums, job.accumulate || start > 0);
        }
        if end == walk.steps.end {
            return;
        }
        start = end;
    }
}

/// The sums over a chunk.
#[inline(always)]
#[allow(clippy::needless_range_loop)] // Counted loops, to be unrolled.
unsafe fn chunk<P: Product, const R: usize, const C: usize>(
    job: &Job<'_>,
    row: usize,
    col: usize,
    steps: Range<usize>,
    walk: &Walk,
) -> [[P::Sum; C]; R] {
    let lanes = P::Sum::LANES;
    let panel = job.steps * PANEL;
    // SAFETY: `weights` has `steps` lines for each panel below n, `x` has `steps` steps for each row that is taken.
    unsafe {
        let w = job.weights.add(col / PANEL * panel + col % PANEL + steps.start * PANEL);
        let ask = w.wrapping_add(walk.offset);
        let mut x = [job.x; R];
        for (r, x) in x.iter_mut().enumerate() {
            *x = job.x.add(job.source(row + r) * job.x_row + steps.start * P::WORDS);
        }
        let mut sums = [[P::Sum::zero(); C]; R];
        for step in 0..steps.len() {
            let (line, ask) = (w.add(step * PANEL), ask.wrapping_add(step * walk.stride));
            let mut weights = [P::weights(line); C];
            fetch(ask);
            for c in 1..C {
                let offset = c * lanes / PANEL * panel + c * lanes % PANEL;
                weights[c] = P::weights(line.add(offset));
                if (c * lanes).is_multiple_of(CACHE_LINE) {
                    fetch(ask.wrapping_add(offset));
                }
            }
            for r in 0..R {
                let activation = P::activation(x[r].add(step * P::WORDS));
                for c in 0..C {
                    sums[r][c] = P::step(sums[r][c], weights[c], activation);
                }
            }
        }
        sums
    }
}

/// Ask for the cache line at `at`, which need not exist.
#[inline(always)]
fn fetch(at: *const u32) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint; it never faults.
    unsafe {
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Write the sums of a tile, or add them, to the columns that there are.
#[inline(always)]
unsafe fn finish<V: Vector, const R: usize, const C: usize>(
    job: &Job<'_>,
    row: usize,
    col: usize,
    sums: &[[V; C]; R],
    add: bool,
) {
    let width = C * V::LANES;
    let valid = width.min(job.n.saturating_sub(col));
    for (r, sums) in sums.iter().enumerate() {
        let at = job.out_at + (row + r) * job.out_row + (col - job.first_col);
        if valid == width {
            // SAFETY: the block is this task's own, and `out` as wide as what is stored.
            unsafe { write::<V, C>(job.out.part(at..at + width), sums, add) };
        } else if valid > 0 {
            // SAFETY: as above; what lies beyond the last column goes through a buffer.
            unsafe {
                let out = job.out.part(at..at + valid);
                let mut edge = [0.0; 4 * PANEL];
                edge[..valid].copy_from_slice(out);
                write::<V, C>(&mut edge[..width], sums, add);
                out.copy_from_slice(&edge[..valid]);
            }
        }
    }
}

#[inline(always)]
unsafe fn write<V: Vector, const C: usize>(out: &mut [f32], sums: &[V; C], accumulate: bool) {
    debug_assert_eq!(out.len(), C * V::LANES);
    for (c, sum) in sums.iter().enumerate() {
        // SAFETY: `out` has room for all vectors.
        unsafe {
            let to = out.as_mut_ptr().add(c * V::LANES);
            if accumulate { V::load(to).add(*sum).store(to) } else { sum.store(to) }
        }
    }
}
