//! The online softmax of a block of scores.

use super::SCORE_COLS;
use crate::GRID;
use crate::cpu::math;

/// Lanes of a maximum or sum: fixed, so that it has one order on every instruction set.
const LANES: usize = 16;

math::per_isa! {
    /// Turn a block's scores, from column `lead` on, into weights relative to the new maximum; keys that a pair does
    /// not see get none.
    pub(super) fn weights(
        scores: &mut [f32],
        lead: usize,
        keys: usize,
        seen: usize,
        group: usize,
        max: &mut [f32],
        sum: &mut [f32],
        shrink: &mut [f32],
        added: &mut [f32],
    ) {
        for (pair, row) in scores.chunks_exact_mut(SCORE_COLS).enumerate() {
            let row: &mut [f32; GRID] = (&mut row[lead..lead + GRID]).try_into().expect("a block");
            row[keys.min(seen + pair / group)..].fill(f32::NEG_INFINITY);
            let mut tops = [f32::NEG_INFINITY; LANES];
            for part in row.as_chunks::<LANES>().0 {
                for lane in 0..LANES {
                    tops[lane] = larger(part[lane], tops[lane]);
                }
            }
            let top = larger(max[pair], across(tops, larger));
            let mut sums = [0.0; LANES];
            for part in row.as_chunks_mut::<LANES>().0 {
                for lane in 0..LANES {
                    part[lane] = math::exp(part[lane] - top);
                    sums[lane] += part[lane];
                }
            }
            added[pair] = across(sums, |x, y| x + y);
            shrink[pair] = max[pair] - top;
            max[pair] = top;
        }
        for ((shrink, added), sum) in shrink.iter_mut().zip(added).zip(sum) {
            *shrink = math::exp(*shrink);
            *sum = *sum * *shrink + *added;
        }
    }
}

#[inline(always)]
fn larger(x: f32, y: f32) -> f32 {
    if x > y { x } else { y }
}

/// All lanes as one, by halves.
#[inline(always)]
fn across(mut lanes: [f32; LANES], join: impl Fn(f32, f32) -> f32) -> f32 {
    let mut width = LANES;
    while width > 1 {
        width /= 2;
        for lane in 0..width {
            lanes[lane] = join(lanes[lane], lanes[lane + width]);
        }
    }
    lanes[0]
}
