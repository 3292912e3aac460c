//! Softmax attention over spans of keys, block by block.
//!
//! A task has the rows of a row block for the query heads of one key/value head; its rows are (row, head)
//! pairs. Keys come in blocks of [`GRID`], counted from the first key of each span, and every pair folds the
//! same blocks in the same order, whatever shares its task: online softmax with masked keys as exact zeros. Shared
//! values are laid out once a task and block, from the block's keys.

mod softmax;

use std::cell::RefCell;
use std::ops::Range;

use super::kv::{CpuKv, Plane, Planes};
use super::matmul::{Element, GROUP, Left, Right, Scale, matmul};
use super::pool::{Pool, Shared};
use super::rope::Turner;
use super::{Cpu, CpuRope, CpuTensor, Isa};
use crate::{AttentionRows, AttentionShape, Cols, DeviceTensor, GRID, KvShape};

use softmax::weights;

/// (row, head) pairs of a task, if a row has no more heads than that.
const TASK_PAIRS: usize = 64;
/// With more pairs than this, a block of narrow elements is widened once for all.
const WIDEN_PAIRS: usize = 8;
/// A block's scores, with room for a first key in the middle of a group.
const SCORE_COLS: usize = GRID + GROUP;

pub(super) fn attention(
    isa: Isa,
    pool: &Pool,
    shape: AttentionShape,
    rope: Option<&CpuRope>,
    q: Cols<'_, Cpu>,
    sequences: &[AttentionRows<'_, Cpu>],
    out: &mut CpuTensor,
) {
    check(&shape, rope, q, sequences);
    let AttentionShape { heads, kv, .. } = shape;
    let group = heads / kv.heads;
    out.resize(&[q.mat.rows(), heads * kv.d_v]);
    let per_block = (TASK_PAIRS / group).max(1);
    let mut blocks = Vec::new();
    let mut keys = 0;
    let mut turners = Vec::with_capacity(sequences.len());
    for (index, sequence) in sequences.iter().enumerate() {
        let rows = sequence.rows.len();
        blocks.extend((0..rows).step_by(per_block).map(|start| (index, start..rows.min(start + per_block))));
        keys += rows * (sequence.own.len() + sequence.spans.iter().map(|s| s.range.len()).sum::<usize>());
        let origins = sequence.spans.iter().map(|s| s.origin).chain([0]);
        let (low, high) = origins.fold((0, 0), |(low, high), o| (o.min(low), o.max(high)));
        let distances = sequence.positions.at.iter().map(|p| (p - low).unsigned_abs().max((p - high).unsigned_abs()));
        let farthest = distances.max().unwrap_or(0);
        turners.push(rope.map(|rope| rope.turner(farthest, sequence.positions.ntk_alpha)));
    }
    let pass = Pass { isa, shape, group, q, out: Shared::new(out.data_mut()) };
    let flops = 2 * keys * heads * (kv.d_k + kv.d_v);
    pool.run(blocks.len() * kv.heads, flops, |task| {
        let (index, rows) = &blocks[task / kv.heads];
        let (sequence, turner) = (&sequences[*index], turners[*index].as_ref());
        SCRATCH.with_borrow_mut(|scratch| pass.block(sequence, turner, rows.clone(), task % kv.heads, scratch));
    });
}

/// Check all shapes and that no row is in two sequences.
fn check(shape: &AttentionShape, rope: Option<&CpuRope>, q: Cols<'_, Cpu>, sequences: &[AttentionRows<'_, Cpu>]) {
    let AttentionShape { heads, kv, .. } = *shape;
    assert!(
        kv.heads > 0 && heads.is_multiple_of(kv.heads),
        "attention of {heads} heads over {} key/value heads",
        kv.heads
    );
    assert!(q.mat.cols() >= q.col + heads * kv.d_k, "columns of q in attention: {:?}", q.mat.shape());
    if let Some(rope) = rope {
        assert!(rope.needs() <= kv.d_k, "attention with rotary dimensions up to {} of {}", rope.needs(), kv.d_k);
    }
    assert!(!kv.shared || kv.d_v <= kv.d_k, "attention: values of {} numbers of keys of {}", kv.d_v, kv.d_k);
    // Rows of one task may see stores of different element types.
    let dims = |store: &CpuKv| KvShape { dtype: kv.dtype, ..store.shape() };
    let stored = kv.stored();
    for s in sequences {
        assert!(
            s.rows.start <= s.rows.end && s.rows.end <= q.mat.rows(),
            "attention of rows {:?} of {}",
            s.rows,
            q.mat.rows()
        );
        assert_eq!(s.positions.at.len(), s.rows.len(), "attention takes one position per row");
        assert!(s.own.len() >= s.rows.len(), "attention before the rows' own keys are appended");
        assert_eq!(dims(s.own), stored, "own keys and values in attention");
        for span in &s.spans {
            assert_eq!(dims(span.kv), stored, "keys and values of a span in attention");
            let (range, len) = (&span.range, span.kv.len());
            assert!(range.start <= range.end && range.end <= len, "attention to tokens {range:?} of {len}");
        }
    }
    let mut ranges: Vec<_> = sequences.iter().map(|s| s.rows.clone()).filter(|r| !r.is_empty()).collect();
    ranges.sort_by_key(|r| r.start);
    assert!(ranges.windows(2).all(|w| w[0].end <= w[1].start), "attention with a row in two sequences");
}

/// Buffers of a thread, a row per pair.
#[derive(Default)]
struct Scratch {
    /// `[pairs, d_k]`, scaled.
    q: Vec<f32>,
    /// The same, turned for the span at hand.
    turned: Vec<f32>,
    /// `[pairs, SCORE_COLS]`.
    scores: Vec<f32>,
    /// Largest score so far.
    max: Vec<f32>,
    /// Sum of the weights so far, relative to `max`.
    sum: Vec<f32>,
    /// What the block at hand scales `sum` and `o` by.
    shrink: Vec<f32>,
    /// What the block at hand adds to `sum`.
    added: Vec<f32>,
    /// `[pairs, d_v]`.
    o: Vec<f32>,
    wide_k: Vec<f32>,
    wide_v: Vec<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

struct Pass<'a> {
    isa: Isa,
    shape: AttentionShape,
    /// Query heads of a key/value head.
    group: usize,
    q: Cols<'a, Cpu>,
    out: Shared<'a, f32>,
}

/// How the queries of a task are turned.
struct Queries<'a> {
    turner: Option<&'a Turner<'a>>,
    positions: &'a [i64],
    /// What the turned ones are turned for: an origin.
    turned_for: Option<i64>,
}

/// Keys of a store, as some of a task's rows see them.
struct Keys {
    /// Tokens of the store.
    range: Range<usize>,
    /// Row of the task from which on it is seen.
    from_row: usize,
    /// How many of the keys that row sees, each further row one more.
    seen: usize,
}

impl Pass<'_> {
    /// `rows` of a sequence, turned by `turner`, for the query heads of `kv_head`.
    fn block(
        &self,
        sequence: &AttentionRows<'_, Cpu>,
        turner: Option<&Turner<'_>>,
        rows: Range<usize>,
        kv_head: usize,
        scratch: &mut Scratch,
    ) {
        let AttentionShape { heads, kv, scale } = self.shape;
        let pairs = rows.len() * self.group;
        let first_head = kv_head * self.group;
        scratch.q.clear();
        for row in rows.clone() {
            let at = (sequence.rows.start + row) * self.q.mat.cols() + self.q.col + first_head * kv.d_k;
            scratch.q.extend(self.q.mat.data()[at..at + self.group * kv.d_k].iter().map(|x| x * scale));
        }
        let Scratch { max, sum, shrink, added, o, .. } = scratch;
        for (buffer, len, start) in [
            (max, pairs, f32::NEG_INFINITY),
            (sum, pairs, 0.0),
            (shrink, pairs, 0.0),
            (added, pairs, 0.0),
            (o, pairs * kv.d_v, 0.0),
        ] {
            buffer.clear();
            buffer.resize(len, start);
        }
        scratch.scores.resize(scratch.scores.len().max(pairs * SCORE_COLS), 0.0);

        let mut queries = Queries { turner, positions: &sequence.positions.at[rows.clone()], turned_for: None };
        for span in &sequence.spans {
            let from_row = span.from_row.saturating_sub(rows.start);
            if from_row >= rows.len() || span.range.is_empty() {
                continue;
            }
            self.turn(&mut queries, span.origin, scratch);
            let keys = Keys { range: span.range.clone(), from_row, seen: span.range.len() };
            self.fold_store(span.kv, kv_head, keys, scratch);
        }
        self.turn(&mut queries, 0, scratch);
        let seen = sequence.own.len() - sequence.rows.len() + rows.start + 1;
        let keys = Keys { range: 0..seen + rows.len() - 1, from_row: 0, seen };
        self.fold_store(sequence.own, kv_head, keys, scratch);

        for (i, row) in rows.enumerate() {
            let at = ((sequence.rows.start + row) * heads + first_head) * kv.d_v;
            // SAFETY: a row is in one sequence only, as checked, and its heads are in one task each.
            let out = unsafe { self.out.part(at..at + self.group * kv.d_v) };
            for (g, out) in out.chunks_exact_mut(kv.d_v).enumerate() {
                let pair = i * self.group + g;
                let o = &scratch.o[pair * kv.d_v..(pair + 1) * kv.d_v];
                let share = 1.0 / scratch.sum[pair];
                out.iter_mut().zip(o).for_each(|(out, o)| *out = o * share);
            }
        }
    }

    /// Turn the queries for keys whose position 0 is at `origin`, unless they are.
    fn turn(&self, queries: &mut Queries<'_>, origin: i64, scratch: &mut Scratch) {
        let Queries { turner, positions, turned_for } = queries;
        if *turned_for == Some(origin) || (turner.is_none() && turned_for.is_some()) {
            return;
        }
        scratch.turned.clear();
        scratch.turned.extend_from_slice(&scratch.q);
        if let Some(turner) = turner {
            let d_k = self.shape.kv.d_k;
            for (position, heads) in positions.iter().zip(scratch.turned.chunks_exact_mut(self.group * d_k)) {
                turner.turn(self.isa, *position, origin, d_k, heads);
            }
        }
        *turned_for = Some(origin);
    }

    fn fold_store(&self, store: &CpuKv, kv_head: usize, keys: Keys, scratch: &mut Scratch) {
        match store.planes() {
            Planes::F32(planes) => self.fold_plane(&planes[kv_head], keys, scratch),
            Planes::Bf16(planes) => self.fold_plane(&planes[kv_head], keys, scratch),
        }
    }

    fn fold_plane<E: Element>(&self, plane: &Plane<E>, keys: Keys, scratch: &mut Scratch) {
        let Keys { range, from_row, seen } = keys;
        let rows = scratch.max.len() / self.group;
        for start in range.clone().step_by(GRID) {
            let block = start..range.end.min(start + GRID);
            let before = start - range.start;
            // Rows see one key more each: the first to see this block, and how much of it.
            let late = (before + 1).saturating_sub(seen);
            let first = from_row + late;
            if first >= rows {
                break;
            }
            self.fold_block(plane, block, first, seen + late - before, scratch);
        }
    }

    /// Fold a block of keys into the rows from `first` on; that one sees `seen` of them, each further row one more.
    fn fold_block<E: Element>(
        &self,
        plane: &Plane<E>,
        block: Range<usize>,
        first: usize,
        seen: usize,
        scratch: &mut Scratch,
    ) {
        let KvShape { d_k, d_v, shared, .. } = self.shape.kv;
        let first = first * self.group;
        let pairs = scratch.max.len() - first;
        let lead = block.start % GROUP;
        let columns = (lead + block.len()).next_multiple_of(GROUP);
        let k = &plane.k[(block.start - lead) * d_k..][..columns * d_k];
        let q = Left { data: &scratch.turned[first * d_k..], row: d_k, col: 1 };
        let scores = &mut scratch.scores[..pairs * SCORE_COLS];
        let widen = size_of::<E>() < size_of::<f32>() && pairs > WIDEN_PAIRS;
        let size = [pairs, columns, d_k];
        if widen {
            let k = Right { data: widened(self.isa, k, &mut scratch.wide_k), row: GROUP, group: GROUP * d_k };
            matmul(self.isa, size, q, k, Scale::Zero, scores, SCORE_COLS);
        } else {
            let k = Right { data: k, row: GROUP, group: GROUP * d_k };
            matmul(self.isa, size, q, k, Scale::Zero, scores, SCORE_COLS);
        }
        let (max, sum) = (&mut scratch.max[first..], &mut scratch.sum[first..]);
        let (shrink, added) = (&mut scratch.shrink[first..], &mut scratch.added[first..]);
        weights(self.isa, scores, lead, block.len(), seen, self.group, max, sum, shrink, added);
        let weights = Left { data: &scores[lead..], row: SCORE_COLS, col: 1 };
        let (size, scale, o) = ([pairs, d_v, block.len()], Scale::Rows(shrink), &mut scratch.o[first * d_v..]);
        if shared {
            plane.values(self.isa, block, d_k, d_v, &mut scratch.wide_v);
            return matmul(self.isa, size, weights, Right::rows(&scratch.wide_v, d_v), scale, o, d_v);
        }
        let v = &plane.v[block.start * d_v..block.end * d_v];
        if widen {
            let v = Right::rows(widened(self.isa, v, &mut scratch.wide_v), d_v);
            matmul(self.isa, size, weights, v, scale, o, d_v);
        } else {
            matmul(self.isa, size, weights, Right::rows(v, d_v), scale, o, d_v);
        }
    }
}

/// The numbers of `from` in f32.
fn widened<'a, E: Element>(isa: Isa, from: &[E], to: &'a mut Vec<f32>) -> &'a [f32] {
    if to.len() < from.len() {
        to.resize(from.len(), 0.0);
    }
    E::widen_all(isa, from, &mut to[..from.len()]);
    &to[..from.len()]
}

#[cfg(test)]
mod tests;
