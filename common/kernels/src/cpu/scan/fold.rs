//! One fold, for the heads of a task: chunks of rows, jumps and copies, in order.

use std::cell::RefCell;
use std::ops::Range;

use hypic_state::DECAYED;

use super::carry::{Phase, identity};
use super::channel::Channels;
use super::jump::{JumpScratch, jump};
use super::keys::Keys;
use super::walk::{SharedCarry, SharedOperator, Stage, Walk};
use super::{Columns, loops, room};
use crate::cpu::matmul::{GROUP, Left, Right, Scale, matmul, tiles};
use crate::cpu::pool::Shared;
use crate::cpu::{Cpu, Isa};
use crate::{Decay, GRID, ScanInputs, ScanShape, Write};

/// Buffers of a thread, as large as it has needed.
#[derive(Default)]
pub(super) struct Scratch {
    keys: Keys,
    factors: Factors,
    channels: Channels,
    /// `[2 rows, d_v]`: what is written, then the outputs.
    wo: Vec<f32>,
    /// `[rows, d_k]`: what the operator's columns are corrected by.
    operator_w: Vec<f32>,
    jump: JumpScratch,
}

/// What gates and keys make of a chunk of one head.
#[derive(Default)]
pub(super) struct Factors {
    /// Cumulative log decay of the head, the row's included.
    pub log: Vec<f64>,
    /// Its exponential.
    pub decay: Vec<f32>,
    /// Decay from behind the row to the end of the chunk.
    pub rest: Vec<f32>,
    pub step: Vec<f32>,
    pub beta: Vec<f32>,
    /// `[rows, padded rows]`: `-A`; zero from the diagonal to the end of the tile.
    pub minus_a: Vec<f32>,
    /// `[rows, padded rows]`: `P`; zero behind the diagonal to the end of the tile.
    pub mix: Vec<f32>,
}

/// A chunk of one head, ready to be folded.
struct Chunk<'a> {
    rows: usize,
    /// `[2 rows, d_k]`: k, then q, to be multiplied with the state before the chunk.
    reads: &'a [f32],
    /// `[rows, d_k]`: k, to be written to the state behind it.
    writes: &'a [f32],
    /// Factors on the rows of products with the state before, and on what is written; decays of channels are in
    /// `reads` and `writes`.
    row_decays: Option<(&'a [f32], &'a [f32])>,
    /// What is left of the state before the chunk.
    end: Scale<'a>,
    /// The logarithm of that: one number, or one per channel.
    log: &'a [f64],
    factors: &'a Factors,
}

thread_local! {
    pub(super) static SCRATCH: RefCell<Scratch> = RefCell::default();
}

pub(super) struct Scan<'a> {
    pub isa: Isa,
    pub shape: ScanShape,
    pub inputs: ScanInputs<'a, Cpu>,
    pub q: Columns<'a>,
    pub k: Columns<'a>,
    v: Columns<'a>,
    /// Whether tokens write what they predict wrongly.
    pub delta: bool,
    /// `[rows, heads * d_v]`.
    out: Shared<'a, f32>,
}

impl<'a> Scan<'a> {
    pub fn new(isa: Isa, shape: ScanShape, inputs: ScanInputs<'a, Cpu>, out: Shared<'a, f32>) -> Self {
        let [q, k, v] = [inputs.q, inputs.k, inputs.v].map(Columns::new);
        let delta = matches!(inputs.write, Write::Delta { .. });
        Scan { isa, shape, inputs, q, k, v, delta, out }
    }

    /// All steps of one fold, for `heads`, which share a key head.
    pub fn walk(&self, walk: &Walk<'_>, heads: Range<usize>, scratch: &mut Scratch) {
        let size = self.shape.d_k * self.shape.d_v;
        let of_head = |h: usize| h * size..(h + 1) * size;
        for stage in &walk.stages {
            match stage {
                Stage::Rows(rows, carry) => {
                    if let Some(carry) = carry {
                        self.begin(&walk.state, carry, &heads);
                    }
                    self.rows(rows.clone(), &walk.state, carry.as_ref(), &heads, scratch);
                }
                Stage::Jump(rule, part, rotation) => {
                    for h in heads.clone() {
                        // SAFETY: a head's state belongs to the one task that walks it.
                        let state = unsafe { walk.state.part(of_head(h)) };
                        let (d_k, rotation) = (self.shape.d_k, rotation.as_ref());
                        jump(self.isa, *rule, part, rotation, h, d_k, state, &mut scratch.jump);
                    }
                }
                Stage::Save(to) => {
                    for h in heads.clone() {
                        // SAFETY: as above; so does its part of the copy.
                        unsafe { to.part(of_head(h)).copy_from_slice(walk.state.part(of_head(h))) }
                    }
                }
            }
        }
    }

    /// Begin a body if this is its first step.
    fn begin(&self, state: &Shared<'_, f32>, carry: &SharedCarry<'_>, heads: &Range<usize>) {
        let ScanShape { d_k, d_v, .. } = self.shape;
        for h in heads.clone() {
            // SAFETY: a head's part of state and carry belongs to the one task that walks it.
            unsafe {
                let phase = &mut carry.phases.part(h..h + 1)[0];
                if *phase != Phase::Fresh {
                    continue;
                }
                let of_head = h * d_k * d_v..(h + 1) * d_k * d_v;
                carry.before.part(of_head.clone()).copy_from_slice(state.part(of_head));
                if let SharedOperator::Dense(blocks) = &carry.operator {
                    identity(blocks.part(h * d_k * d_k..(h + 1) * d_k * d_k), d_k);
                }
                *phase = Phase::Begun;
            }
        }
    }

    fn rows(
        &self,
        rows: Range<usize>,
        state: &Shared<'_, f32>,
        carry: Option<&SharedCarry<'_>>,
        heads: &Range<usize>,
        scratch: &mut Scratch,
    ) {
        let ScanShape { key_heads, heads: all_heads, d_k, d_v } = self.shape;
        let by_channel = matches!(self.inputs.decay, Decay::Channel { .. });
        let Scratch { keys, factors, channels, wo, operator_w, .. } = scratch;
        for start in rows.clone().step_by(GRID) {
            let chunk = start..rows.end.min(start + GRID);
            self.load_keys(chunk.clone(), heads.start / (all_heads / key_heads), keys);
            if !by_channel {
                self.key_products(chunk.len(), keys);
            }
            for h in heads.clone() {
                let ready = if by_channel {
                    self.channel_factors(chunk.clone(), h, keys, factors, channels);
                    self.channel_chunk(chunk.len(), factors, channels)
                } else {
                    self.head_factors(chunk.clone(), h, keys, factors);
                    self.head_chunk(chunk.len(), keys, factors)
                };
                // SAFETY: a head's part of state and carry belongs to the one task that walks it.
                let state = unsafe { state.part(h * d_k * d_v..(h + 1) * d_k * d_v) };
                self.fold_state(&ready, chunk.clone(), h, state, wo);
                if let Some(carry) = carry {
                    self.fold_carry(&ready, h, carry, operator_w);
                }
            }
        }
    }

    fn head_chunk<'s>(&self, rows: usize, keys: &'s Keys, factors: &'s Factors) -> Chunk<'s> {
        let d_k = self.shape.d_k;
        Chunk {
            rows,
            reads: &keys.kq[..2 * rows * d_k],
            writes: &keys.kq[..rows * d_k],
            row_decays: Some((&factors.decay[..rows], &factors.rest[..rows])),
            end: Scale::All(factors.decay[rows - 1]),
            log: &factors.log[rows - 1..rows],
            factors,
        }
    }

    fn channel_chunk<'s>(&self, rows: usize, factors: &'s Factors, channels: &'s Channels) -> Chunk<'s> {
        let d_k = self.shape.d_k;
        Chunk {
            rows,
            reads: &channels.reads[..2 * rows * d_k],
            writes: &channels.writes[..rows * d_k],
            row_decays: None,
            end: Scale::Rows(&channels.end[..d_k]),
            log: &channels.log[rows * d_k..(rows + 1) * d_k],
            factors,
        }
    }

    /// The rows' outputs, and the state behind them.
    fn fold_state(&self, ready: &Chunk<'_>, chunk: Range<usize>, h: usize, state: &mut [f32], wo: &mut Vec<f32>) {
        let ScanShape { heads, d_k, d_v, .. } = self.shape;
        let (rows, factors) = (ready.rows, ready.factors);
        let padded = padded(rows);
        let wo = room(wo, 2 * rows * d_v);
        // Only delta rules predict.
        let first = if self.delta { 0 } else { rows };
        let reads = Left { data: &ready.reads[first * d_k..], row: d_k, col: 1 };
        let size = [2 * rows - first, d_v, d_k];
        matmul(self.isa, size, reads, Right::rows(&*state, d_v), Scale::Zero, &mut wo[first * d_v..], d_v);
        let (w, o) = wo.split_at_mut(rows * d_v);
        for (i, row) in chunk.clone().enumerate() {
            let (w, v) = (&mut w[i * d_v..(i + 1) * d_v], self.v.get(row, h * d_v, d_v));
            match self.inputs.write {
                Write::Plain => w.copy_from_slice(v),
                Write::Step => loops::scaled(self.isa, v, factors.step[i], w),
                Write::Delta { .. } => {
                    let decay = ready.row_decays.map_or(1.0, |(decay, _)| decay[i]);
                    loops::start_w(self.isa, w, v, decay, factors.beta[i]);
                }
            }
        }
        if self.delta {
            self.solve(rows, d_v, w, factors);
        }
        for tile in tiles(rows) {
            let mix = Left { data: &factors.mix[tile.start * padded..], row: padded, col: 1 };
            let scale = match ready.row_decays {
                Some((decay, _)) => Scale::Rows(&decay[tile.clone()]),
                None => Scale::All(1.0),
            };
            let size = [tile.len(), d_v, tile.end];
            matmul(self.isa, size, mix, Right::rows(&*w, d_v), scale, &mut o[tile.start * d_v..], d_v);
        }
        for (i, row) in chunk.enumerate() {
            let at = (row * heads + h) * d_v;
            // SAFETY: a row is in one step only, as checked, and a head's columns are written by one task.
            let out = unsafe { self.out.part(at..at + d_v) };
            out.copy_from_slice(&o[i * d_v..(i + 1) * d_v]);
            if let Some(skip) = self.inputs.skip {
                loops::add_scaled(self.isa, out, self.v.get(row, h * d_v, d_v), skip.data()[h]);
            }
        }
        self.update(ready, d_v, w, state);
    }

    /// The operator behind the rows.
    fn fold_carry(&self, ready: &Chunk<'_>, h: usize, carry: &SharedCarry<'_>, w: &mut Vec<f32>) {
        let d_k = self.shape.d_k;
        // SAFETY: a head's part of a carry belongs to the one task that walks it.
        let phase = unsafe { &mut carry.phases.part(h..h + 1)[0] };
        match &carry.operator {
            SharedOperator::Logs(sums, per_head) => {
                // SAFETY: as above.
                let sums = unsafe { sums.part(h * per_head..(h + 1) * per_head) };
                sums.iter_mut().zip(ready.log).for_each(|(sum, log)| *sum += log);
                *phase = Phase::Live;
            }
            SharedOperator::Dense(_) if *phase == Phase::Decayed => {}
            SharedOperator::Dense(blocks) => {
                // SAFETY: as above.
                let operator = unsafe { blocks.part(h * d_k * d_k..(h + 1) * d_k * d_k) };
                let decayed = self.fold_operator(ready, *phase == Phase::Begun, operator, w);
                *phase = if decayed { Phase::Decayed } else { Phase::Live };
                if decayed {
                    operator.fill(0.0);
                }
            }
        }
    }

    /// The matrix behind the rows; whether it has decayed. At the `start` it is the identity.
    fn fold_operator(&self, ready: &Chunk<'_>, start: bool, operator: &mut [f32], w: &mut Vec<f32>) -> bool {
        let (d_k, rows) = (self.shape.d_k, ready.rows);
        let w = room(w, rows * d_k);
        if start {
            w.copy_from_slice(&ready.reads[..rows * d_k]);
        } else {
            let k = Left { data: ready.reads, row: d_k, col: 1 };
            matmul(self.isa, [rows, d_k, d_k], k, Right::rows(&*operator, d_k), Scale::Zero, w, d_k);
        }
        for i in 0..rows {
            let decay = ready.row_decays.map_or(1.0, |(decay, _)| decay[i]);
            loops::scale_by(self.isa, &mut w[i * d_k..(i + 1) * d_k], -ready.factors.beta[i] * decay);
        }
        self.solve(rows, d_k, w, ready.factors);
        self.update(ready, d_k, w, operator);
        loops::dot(self.isa, operator, operator) <= (DECAYED * DECAYED * d_k as f64) as f32
    }

    /// `(I + A)^-1` on `w [rows, width]`, in place.
    fn solve(&self, rows: usize, width: usize, w: &mut [f32], factors: &Factors) {
        let padded = padded(rows);
        let mut subtract = |i: Range<usize>, j: Range<usize>| {
            let a = Left { data: &factors.minus_a[i.start * padded + j.start..], row: padded, col: 1 };
            let (done, rest) = w.split_at_mut(i.start * width);
            let done = Right::rows(&done[j.start * width..], width);
            matmul(self.isa, [i.len(), width, j.len()], a, done, Scale::All(1.0), rest, width);
        };
        for tile in tiles(rows) {
            if tile.start > 0 {
                subtract(tile.clone(), 0..tile.start);
            }
            for i in tile.start + 1..tile.end {
                subtract(i..i + 1, tile.start..i);
            }
        }
    }

    /// `state [d_k, width] <- exp(G_C) state + sum_j exp(G_C - G_j) k_j w_j^T`; may scale `w`.
    fn update(&self, ready: &Chunk<'_>, width: usize, w: &mut [f32], state: &mut [f32]) {
        let (d_k, rows) = (self.shape.d_k, ready.rows);
        if let Some((_, rest)) = ready.row_decays {
            // Behind the last row nothing decays.
            for (w, rest) in w.chunks_exact_mut(width).zip(&rest[..rows - 1]) {
                loops::scale_by(self.isa, w, *rest);
            }
        }
        let k = Left { data: ready.writes, row: 1, col: d_k };
        matmul(self.isa, [d_k, width, rows], k, Right::rows(&*w, width), ready.end, state, width);
    }
}

/// Rows of a chunk, rounded up to whole groups of columns.
pub(super) fn padded(rows: usize) -> usize {
    rows.next_multiple_of(GROUP)
}
