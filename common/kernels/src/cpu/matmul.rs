//! Small dense products on strided matrices: what the scan and attention are made of.
//!
//! `C = scale * C + A B`, A's elements broadcast, B's and C's columns across the lanes. An element of C
//! is its scaled start, then one fused (portable: unfused) addition per row of B, in order: its bits depend
//! on neither the number of rows nor on where a column lies. Offsets are checked against the slices once a
//! call; past that, the kernels trust them.

mod simd;

use std::ops::Range;

use super::Isa;

pub(super) use simd::Element;
use simd::{Plain, Simd};

/// Columns of B that lie together; the next ones are `Matrix::group` elements further.
pub(super) const GROUP: usize = 16;

/// What C is multiplied by before the product is added.
#[derive(Clone, Copy)]
pub(super) enum Scale<'a> {
    /// C is overwritten.
    Zero,
    /// One factor.
    All(f32),
    /// A factor per row.
    Rows(&'a [f32]),
}

/// The left matrix: element `(i, p)` at `i * row + p * col`.
#[derive(Clone, Copy)]
pub(super) struct Left<'a> {
    pub data: &'a [f32],
    pub row: usize,
    pub col: usize,
}

/// The right matrix: element `(p, j)` at `p * row + j / GROUP * group + j % GROUP`.
#[derive(Clone, Copy)]
pub(super) struct Right<'a, E> {
    pub data: &'a [E],
    pub row: usize,
    pub group: usize,
}

impl<'a, E> Right<'a, E> {
    /// A row-major matrix.
    pub fn rows(data: &'a [E], row: usize) -> Self {
        Right { data, row, group: GROUP }
    }
}

/// `c [m, n] = scale * c + a [m, k] b [k, n]`, rows of `c` being `c_row` apart.
#[inline]
#[allow(clippy::too_many_arguments)]
pub(super) fn matmul<E: Element>(
    isa: Isa,
    [m, n, k]: [usize; 3],
    a: Left<'_>,
    b: Right<'_, E>,
    scale: Scale<'_>,
    c: &mut [f32],
    c_row: usize,
) {
    if m == 0 || n == 0 {
        return;
    }
    assert!((m - 1) * c_row + n <= c.len(), "C is too short");
    if k > 0 {
        assert!((m - 1) * a.row + (k - 1) * a.col < a.data.len(), "A is too short");
        assert!((k - 1) * b.row + (n - 1) / GROUP * b.group + (n - 1) % GROUP < b.data.len(), "B is too short");
    }
    let (scales, scale_step): (&[f32], usize) = match &scale {
        Scale::Zero => (&[], 0),
        Scale::All(one) => (std::slice::from_ref(one), 0),
        Scale::Rows(rows) => {
            assert!(rows.len() >= m, "too few scales");
            (rows, 1)
        }
    };
    let p = Raw {
        m,
        n,
        k,
        a: a.data.as_ptr(),
        a_row: a.row,
        a_col: a.col,
        b: b.data.as_ptr(),
        b_row: b.row,
        b_group: b.group,
        scale: if scales.is_empty() { std::ptr::null() } else { scales.as_ptr() },
        scale_step,
        c: c.as_mut_ptr(),
        c_row,
    };
    match isa {
        // SAFETY: a backend is built only with an instruction set that the CPU has; bounds checked above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Bf16 | Isa::Avx512 => unsafe { avx512(&p) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { avx2(&p) },
        // SAFETY: as above.
        _ => unsafe { panels::<Plain, E, 1>(&p) },
    }
}

struct Raw<E> {
    m: usize,
    n: usize,
    k: usize,
    a: *const f32,
    a_row: usize,
    a_col: usize,
    b: *const E,
    b_row: usize,
    b_group: usize,
    /// Null: overwrite.
    scale: *const f32,
    scale_step: usize,
    c: *mut f32,
    c_row: usize,
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn avx512<E: Element>(p: &Raw<E>) {
    // SAFETY: passed on.
    unsafe { panels::<std::arch::x86_64::__m512, E, 4>(p) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn avx2<E: Element>(p: &Raw<E>) {
    // SAFETY: passed on.
    unsafe { panels::<std::arch::x86_64::__m256, E, 2>(p) }
}

/// Rows of a tile.
const TILE_ROWS: usize = 4;

/// Elements of B, gaps within a row included, in a block: its panels fit a first-level cache and do not evict
/// themselves from one of few sets.
const BLOCK_ELEMENTS: usize = 8192;
/// Least steps of a block; C is read and written once a block.
const BLOCK_STEPS: usize = 16;
/// Fewer rows than this read B too few times for blocks to pay.
const BLOCK_ROWS: usize = 2 * TILE_ROWS;

/// Panels of `NV` vectors of columns, blocks of steps in each, so that B's part stays in the first-level cache for
/// all rows.
#[inline(always)]
unsafe fn panels<V: Simd, E: Element, const NV: usize>(p: &Raw<E>) {
    let steps = if p.m < BLOCK_ROWS { p.k } else { (BLOCK_ELEMENTS / p.b_row.max(NV * V::LANES)).max(BLOCK_STEPS) };
    // SAFETY: passed on; `lanes` keeps the last panel inside the matrices.
    unsafe {
        let mut j = 0;
        while p.n - j >= NV * V::LANES {
            column_blocks::<V, E, NV>(p, j, V::LANES, steps);
            j += NV * V::LANES;
        }
        // Narrow heads: with one vector of columns, a tile's few sums would wait for each other.
        while p.n - j >= 2 * V::LANES {
            column_blocks::<V, E, 2>(p, j, V::LANES, steps);
            j += 2 * V::LANES;
        }
        while p.n > j {
            column_blocks::<V, E, 1>(p, j, (p.n - j).min(V::LANES), steps);
            j += V::LANES;
        }
    }
}

#[inline(always)]
unsafe fn column_blocks<V: Simd, E: Element, const NV: usize>(p: &Raw<E>, j: usize, lanes: usize, steps: usize) {
    // SAFETY: passed on; the blocks are parts of the whole.
    unsafe {
        let mut block = Raw { k: p.k.min(steps), ..*p };
        column_tiles::<V, E, NV>(&block, j, lanes);
        let mut done = block.k;
        while done < p.k {
            block.k = steps.min(p.k - done);
            (block.a, block.b) = (p.a.add(done * p.a_col), p.b.add(done * p.b_row));
            (block.scale, block.scale_step) = (&1.0, 0);
            column_tiles::<V, E, NV>(&block, j, lanes);
            done += block.k;
        }
    }
}

#[inline(always)]
unsafe fn column_tiles<V: Simd, E: Element, const NV: usize>(p: &Raw<E>, j: usize, lanes: usize) {
    // SAFETY: passed on.
    unsafe {
        let mut i = 0;
        while p.m - i >= TILE_ROWS {
            tile::<V, E, TILE_ROWS, NV>(p, i, j, lanes);
            i += TILE_ROWS;
        }
        match p.m - i {
            3 => tile::<V, E, 3, NV>(p, i, j, lanes),
            2 => tile::<V, E, 2, NV>(p, i, j, lanes),
            1 => tile::<V, E, 1, NV>(p, i, j, lanes),
            _ => {}
        }
    }
}

/// Rows `i..i + MR`, columns of `NV` vectors from `j` on, only `lanes` of them if less than a vector.
#[inline(always)]
unsafe fn tile<V: Simd, E: Element, const MR: usize, const NV: usize>(p: &Raw<E>, i: usize, j: usize, lanes: usize) {
    // SAFETY: the caller of `matmul` has checked the bounds of all offsets below.
    unsafe {
        let partial = NV == 1 && lanes < V::LANES;
        let mut acc = [[V::splat(0.0); NV]; MR];
        if !p.scale.is_null() {
            for (r, row) in acc.iter_mut().enumerate() {
                let scale = V::splat(*p.scale.add((i + r) * p.scale_step));
                for (v, acc) in row.iter_mut().enumerate() {
                    let c = p.c.add((i + r) * p.c_row + j + v * V::LANES);
                    let old = if partial { load_part(c as *const f32, lanes) } else { V::load(c) };
                    *acc = old.mul(scale);
                }
            }
        }
        let a: [*const f32; MR] = std::array::from_fn(|r| p.a.wrapping_add((i + r) * p.a_row));
        let b: [*const E; NV] = std::array::from_fn(|v| {
            let column = j + v * V::LANES;
            p.b.wrapping_add(column / GROUP * p.b_group + column % GROUP)
        });
        for step in 0..p.k {
            let columns: [V; NV] = std::array::from_fn(|v| {
                let from = b[v].wrapping_add(step * p.b_row);
                if partial { load_part(from, lanes) } else { E::load(from) }
            });
            for r in 0..MR {
                let x = V::splat(*a[r].add(step * p.a_col));
                for v in 0..NV {
                    acc[r][v] = x.mul_add(columns[v], acc[r][v]);
                }
            }
        }
        for (r, row) in acc.iter().enumerate() {
            for (v, acc) in row.iter().enumerate() {
                let c = p.c.add((i + r) * p.c_row + j + v * V::LANES);
                if partial {
                    let mut whole = [0.0; GROUP];
                    acc.store(whole.as_mut_ptr());
                    std::ptr::copy_nonoverlapping(whole.as_ptr(), c, lanes);
                } else {
                    acc.store(c);
                }
            }
        }
    }
}

/// The first `lanes` elements from `from` on, and zeros.
#[inline(always)]
unsafe fn load_part<V: Simd, E: Element>(from: *const E, lanes: usize) -> V {
    let mut whole = [0.0; GROUP];
    for (lane, x) in whole.iter_mut().enumerate().take(lanes) {
        // SAFETY: the caller has that many.
        *x = unsafe { *from.add(lane) }.widen();
    }
    // SAFETY: the array is as long as the widest vector.
    unsafe { V::load(whole.as_ptr()) }
}

/// Rows of a triangular matrix, a tile at a time.
pub(super) fn tiles(rows: usize) -> impl Iterator<Item = Range<usize>> {
    (0..rows).step_by(TILE_ROWS).map(move |start| start..rows.min(start + TILE_ROWS))
}

#[cfg(test)]
mod tests;
