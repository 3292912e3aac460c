//! One fold, for the heads of a task: chunks of rows, jumps and copies, in order.

use std::cell::RefCell;
use std::ops::Range;

use hypic_state::DECAYED;

use super::walk::{SharedCarry, Stage, Walk, jump};
use super::{Phase, identity, loops};
use crate::cpu::matmul::{GROUP, Left, Right, Scale, matmul, tiles};
use crate::cpu::pool::Shared;
use crate::cpu::{Cpu, Isa, math};
use crate::{DeltaInputs, DeltaShape, DeviceTensor, GRID};

/// Buffers of a thread, as large as it has needed.
#[derive(Default)]
pub(super) struct Scratch {
    /// `[2 rows, d_k]`: k, then q.
    kq: Vec<f32>,
    /// `[d_k, padded rows]`: k transposed.
    k_columns: Vec<f32>,
    /// `[2 rows, padded rows]`: `k . k`, then `q . k`.
    dots: Vec<f32>,
    gates: Gates,
    /// `[2 rows, d_v]`: U, then O.
    uo: Vec<f32>,
    /// `[rows, d_k]`: U of the operator.
    operator_u: Vec<f32>,
    /// `[d_k, d_v]`.
    jumped: Vec<f32>,
}

/// What the gates of one head make of a chunk.
#[derive(Default)]
struct Gates {
    /// Cumulative log decay, the row's included.
    log: Vec<f64>,
    /// Its exponential.
    decay: Vec<f32>,
    /// Decay from behind the row to the end of the chunk.
    rest: Vec<f32>,
    beta: Vec<f32>,
    /// `[rows, padded rows]`: `-A`; zero from the diagonal to the end of the tile.
    minus_a: Vec<f32>,
    /// `[rows, padded rows]`: factors of U in O; zero behind the diagonal to the end of the tile.
    mix: Vec<f32>,
}

thread_local! {
    pub(super) static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// The first `len` elements of `buffer`, which grows but never shrinks; contents unspecified.
pub(super) fn room<T: Copy + Default>(buffer: &mut Vec<T>, len: usize) -> &mut [T] {
    if buffer.len() < len {
        buffer.resize(len, T::default());
    }
    &mut buffer[..len]
}

pub(super) struct Scan<'a> {
    pub isa: Isa,
    pub shape: DeltaShape,
    pub inputs: DeltaInputs<'a, Cpu>,
    /// `[rows, heads * d_v]`.
    pub out: Shared<'a, f32>,
}

impl Scan<'_> {
    /// All steps of one fold, for `heads`, which share a key head.
    pub fn walk(&self, walk: &Walk<'_>, heads: Range<usize>, scratch: &mut Scratch) {
        let size = self.shape.d_k * self.shape.d_v;
        let of_head = |h: usize| h * size..(h + 1) * size;
        for stage in &walk.stages {
            match stage {
                Stage::Rows(rows, carry) => self.rows(rows.clone(), &walk.state, carry.as_ref(), &heads, scratch),
                Stage::Jump(rule, part) => {
                    for h in heads.clone() {
                        // SAFETY: a head's state belongs to the one task that walks it.
                        let state = unsafe { walk.state.part(of_head(h)) };
                        jump(self.isa, *rule, part, h, self.shape.d_k, state, &mut scratch.jumped);
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

    fn rows(
        &self,
        rows: Range<usize>,
        state: &Shared<'_, f32>,
        carry: Option<&SharedCarry<'_>>,
        heads: &Range<usize>,
        scratch: &mut Scratch,
    ) {
        let DeltaShape { d_k, d_v, .. } = self.shape;
        if let Some(carry) = carry {
            for h in heads.clone() {
                // SAFETY: a head's part of state and carry belongs to the one task that walks it.
                unsafe {
                    let phase = &mut carry.phases.part(h..h + 1)[0];
                    if *phase == Phase::Fresh {
                        let of_head = h * d_k * d_v..(h + 1) * d_k * d_v;
                        carry.before.part(of_head.clone()).copy_from_slice(state.part(of_head));
                        identity(carry.operator.part(h * d_k * d_k..(h + 1) * d_k * d_k), d_k);
                        *phase = Phase::Begun;
                    }
                }
            }
        }
        for start in rows.clone().step_by(GRID) {
            let chunk = start..rows.end.min(start + GRID);
            self.key_products(chunk.clone(), heads.start / (self.shape.heads / self.shape.key_heads), scratch);
            for h in heads.clone() {
                self.gates(chunk.clone(), h, scratch);
                // SAFETY: as above.
                let state = unsafe { state.part(h * d_k * d_v..(h + 1) * d_k * d_v) };
                self.fold_state(chunk.clone(), h, state, scratch);
                let Some(carry) = carry else { continue };
                // SAFETY: as above.
                let (phase, operator) =
                    unsafe { (carry.phases.part(h..h + 1), carry.operator.part(h * d_k * d_k..(h + 1) * d_k * d_k)) };
                if phase[0] == Phase::Decayed {
                    continue;
                }
                let decayed = self.fold_operator(chunk.len(), phase[0] == Phase::Begun, operator, scratch);
                phase[0] = if decayed { Phase::Decayed } else { Phase::Live };
                if decayed {
                    operator.fill(0.0);
                }
            }
        }
    }

    /// Normalised k and q of a chunk and their products with k.
    fn key_products(&self, chunk: Range<usize>, key_head: usize, scratch: &mut Scratch) {
        let DeltaShape { key_heads, d_k, .. } = self.shape;
        let (qkv, channels) = (self.inputs.qkv.data(), self.shape.channels());
        let (rows, padded) = (chunk.len(), padded(chunk.len()));
        let kq = room(&mut scratch.kq, 2 * rows * d_k);
        let dots = room(&mut scratch.dots, 2 * rows * padded);
        let q_scale = (d_k as f32).powf(-0.5);
        for (i, row) in chunk.enumerate() {
            let q = row * channels + key_head * d_k;
            let k = q + key_heads * d_k;
            loops::normalise(self.isa, &qkv[k..k + d_k], 1.0, &mut kq[i * d_k..(i + 1) * d_k]);
            loops::normalise(self.isa, &qkv[q..q + d_k], q_scale, &mut kq[(rows + i) * d_k..(rows + i + 1) * d_k]);
        }
        if rows == 1 {
            let (k, q) = kq.split_at(d_k);
            dots[padded] = loops::dot(self.isa, q, k);
            return;
        }
        let k_columns = room(&mut scratch.k_columns, d_k * padded);
        loops::transpose(self.isa, &kq[..rows * d_k], d_k, k_columns, padded);
        let columns = Right::rows(&*k_columns, padded);
        let left = Left { data: kq, row: d_k, col: 1 };
        matmul(self.isa, [2 * rows, padded, d_k], left, columns, Scale::Zero, dots, padded);
    }

    /// The gates of value head `h` and the triangular factors.
    fn gates(&self, chunk: Range<usize>, h: usize, scratch: &mut Scratch) {
        let DeltaInputs { a, b, a_log, dt_bias, .. } = &self.inputs;
        let (rows, padded) = (chunk.len(), padded(chunk.len()));
        let gates = &mut scratch.gates;
        let log = room(&mut gates.log, padded);
        let beta = room(&mut gates.beta, rows);
        let rate = f64::from(math::exp(a_log.data()[h]));
        let mut sum = 0.0;
        for (i, row) in chunk.enumerate() {
            let dt = math::softplus(a.mat.data()[row * a.mat.cols() + a.col + h] + dt_bias.data()[h]);
            sum -= rate * f64::from(dt);
            log[i] = sum;
            beta[i] = self.shape.beta_scale * math::sigmoid(b.mat.data()[row * b.mat.cols() + b.col + h]);
        }
        let (decay, rest) = (room(&mut gates.decay, rows), room(&mut gates.rest, rows));
        loops::decays(self.isa, &log[..rows], decay, rest);
        let (minus_a, mix) = (room(&mut gates.minus_a, rows * padded), room(&mut gates.mix, rows * padded));
        if rows == 1 {
            mix[0] = scratch.dots[padded];
            return;
        }
        loops::factors(self.isa, log, beta, &scratch.dots[..2 * rows * padded], minus_a, mix);
    }

    /// The rows' outputs, and the state behind them.
    fn fold_state(&self, chunk: Range<usize>, h: usize, state: &mut [f32], scratch: &mut Scratch) {
        let DeltaShape { key_heads, heads, d_k, d_v, .. } = self.shape;
        let (rows, padded, channels) = (chunk.len(), padded(chunk.len()), self.shape.channels());
        let gates = &scratch.gates;
        let uo = room(&mut scratch.uo, 2 * rows * d_v);
        let kq = Left { data: &scratch.kq, row: d_k, col: 1 };
        matmul(self.isa, [2 * rows, d_v, d_k], kq, Right::rows(&*state, d_v), Scale::Zero, uo, d_v);
        let (u, o) = uo.split_at_mut(rows * d_v);
        let v = 2 * key_heads * d_k + h * d_v;
        for (i, row) in chunk.clone().enumerate() {
            let v = &self.inputs.qkv.data()[row * channels + v..][..d_v];
            loops::start_u(self.isa, &mut u[i * d_v..(i + 1) * d_v], v, gates.decay[i], gates.beta[i]);
        }
        self.solve(rows, d_v, u, gates);
        for tile in tiles(rows) {
            let mix = Left { data: &gates.mix[tile.start * padded..], row: padded, col: 1 };
            let scale = Scale::Rows(&gates.decay[tile.clone()]);
            let size = [tile.len(), d_v, tile.end];
            matmul(self.isa, size, mix, Right::rows(&*u, d_v), scale, &mut o[tile.start * d_v..], d_v);
        }
        for (i, row) in chunk.enumerate() {
            let at = (row * heads + h) * d_v;
            // SAFETY: a row is in one step only, as checked, and a head's columns are written by one task.
            unsafe { self.out.part(at..at + d_v) }.copy_from_slice(&o[i * d_v..(i + 1) * d_v]);
        }
        self.update(rows, d_v, u, &scratch.kq, gates, state);
    }

    /// The operator behind the rows; whether it has decayed. At the `start` it is the identity.
    fn fold_operator(&self, rows: usize, start: bool, operator: &mut [f32], scratch: &mut Scratch) -> bool {
        let d_k = self.shape.d_k;
        let gates = &scratch.gates;
        let u = room(&mut scratch.operator_u, rows * d_k);
        if start {
            u.copy_from_slice(&scratch.kq[..rows * d_k]);
        } else {
            let k = Left { data: &scratch.kq, row: d_k, col: 1 };
            matmul(self.isa, [rows, d_k, d_k], k, Right::rows(&*operator, d_k), Scale::Zero, u, d_k);
        }
        for i in 0..rows {
            loops::scale_by(self.isa, &mut u[i * d_k..(i + 1) * d_k], -gates.beta[i] * gates.decay[i]);
        }
        self.solve(rows, d_k, u, gates);
        self.update(rows, d_k, u, &scratch.kq, gates, operator);
        loops::dot(self.isa, operator, operator) <= (DECAYED * DECAYED * d_k as f64) as f32
    }

    /// `(I + A)^-1` on `u [rows, width]`, in place.
    fn solve(&self, rows: usize, width: usize, u: &mut [f32], gates: &Gates) {
        let padded = padded(rows);
        let mut subtract = |i: Range<usize>, j: Range<usize>| {
            let a = Left { data: &gates.minus_a[i.start * padded + j.start..], row: padded, col: 1 };
            let (done, rest) = u.split_at_mut(i.start * width);
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

    /// `state [d_k, width] <- exp(G_C) state + sum_j exp(G_C - G_j) k_j u_j^T`; scales `u`.
    fn update(&self, rows: usize, width: usize, u: &mut [f32], k: &[f32], gates: &Gates, state: &mut [f32]) {
        let d_k = self.shape.d_k;
        // Behind the last row nothing decays.
        for i in 0..rows - 1 {
            loops::scale_by(self.isa, &mut u[i * width..(i + 1) * width], gates.rest[i]);
        }
        let k = Left { data: k, row: 1, col: d_k };
        let decay = Scale::All(gates.decay[rows - 1]);
        matmul(self.isa, [d_k, width, rows], k, Right::rows(&*u, width), decay, state, width);
    }
}

/// Rows of a chunk, rounded up to whole groups of columns.
fn padded(rows: usize) -> usize {
    rows.next_multiple_of(GROUP)
}
