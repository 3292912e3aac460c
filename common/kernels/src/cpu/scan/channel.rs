//! What decays of key channels make of a chunk: decayed keys and queries, and the triangular factors.
//!
//! `exp(G_i - G_j)` differs from channel to channel, so the factors are sums over channels of three numbers. Rows are
//! halved until a stretch is short: between two neighbouring halves the decay is that from the border to row i times
//! that from row j to the border, neither above 1, and the factors are a plain product of decayed keys and queries.
//! Within a short stretch the keys of row j decay from row to row.

use std::ops::Range;

use super::channel_loops as each;
use super::fold::{Factors, Scan, padded};
use super::keys::Keys;
use super::{Columns, loops, room};
use crate::cpu::math;
use crate::cpu::matmul::{GROUP, Left, Right, Scale, matmul};
use crate::{ChannelGate, Decay, GRID};

/// Rows of a short stretch.
const SHORT: usize = GROUP;

/// Buffers for a chunk of one head.
#[derive(Default)]
pub(super) struct Channels {
    /// `[1 + rows, d_k]`: cumulative log decay before the chunk, which is zero, and behind each row.
    pub log: Vec<f64>,
    /// `[rows, d_k]`: each row's own decay.
    decay: Vec<f32>,
    /// `[2 rows, d_k]`: k, then q, decayed from the start of the chunk.
    pub reads: Vec<f32>,
    /// `[rows, d_k]`: k, decayed to the end of the chunk.
    pub writes: Vec<f32>,
    /// Decay of the whole chunk.
    pub end: Vec<f32>,
    /// `[2 rows of a half, d_k]`: k, then q, decayed from the border.
    behind: Vec<f32>,
    /// `[rows of a half, d_k]`: k, decayed to the border.
    before: Vec<f32>,
    /// `[d_k, rows of a half]`: the same, transposed.
    columns: Vec<f32>,
    /// Keys of one row on their way.
    moving: Vec<f32>,
}

impl Scan<'_> {
    /// The decays of head `h`, decayed keys and queries, and the triangular factors.
    pub(super) fn channel_factors(
        &self,
        chunk: Range<usize>,
        h: usize,
        keys: &Keys,
        factors: &mut Factors,
        channels: &mut Channels,
    ) {
        let (rows, padded, d_k) = (chunk.len(), padded(chunk.len()), self.shape.d_k);
        self.betas(chunk.clone(), h, factors);
        if !self.delta {
            room(&mut factors.beta, rows).fill(0.0);
        }
        self.channel_logs(chunk, h, channels);
        self.decayed_keys(rows, keys, channels);
        let (minus_a, mix) = (room(&mut factors.minus_a, rows * padded), room(&mut factors.mix, rows * padded));
        let (k, q) = keys.kq[..2 * rows * d_k].split_at(rows * d_k);
        if rows == 1 {
            mix[0] = loops::dot(self.isa, q, k);
            return;
        }
        let beta = &factors.beta[..rows];
        let mut half = GRID / 2;
        while half >= SHORT {
            for start in (0..rows).step_by(2 * half) {
                let border = start + half;
                if border < rows {
                    let behind = border..rows.min(border + half);
                    self.between_halves(start, behind, (k, q), beta, (&mut *minus_a, &mut *mix), channels);
                }
            }
            half /= 2;
        }
        let moving = room(&mut channels.moving, d_k);
        for start in (0..rows).step_by(SHORT) {
            let short = start..rows.min(start + SHORT);
            let at = short.start * d_k..short.end * d_k;
            let (k, q, decay) = (&k[at.clone()], &q[at.clone()], &channels.decay[at]);
            let corner = start * padded + start;
            let to = (&mut minus_a[corner..], &mut mix[corner..]);
            each::within(self.isa, k, q, decay, &beta[short], to.0, to.1, padded, moving);
        }
    }

    /// The rows' decays and the cumulative log decays.
    fn channel_logs(&self, chunk: Range<usize>, h: usize, channels: &mut Channels) {
        let Decay::Channel { x, gate } = &self.inputs.decay else { unreachable!("only decays of channels come here") };
        let (x, d_k) = (Columns::new(*x), self.shape.d_k);
        let log = room(&mut channels.log, (1 + chunk.len()) * d_k);
        let decay = room(&mut channels.decay, chunk.len() * d_k);
        log[..d_k].fill(0.0);
        let of_head = h * d_k..(h + 1) * d_k;
        for (i, row) in chunk.enumerate() {
            let x = x.get(row, h * d_k, d_k);
            let (before, to) = log[i * d_k..(i + 2) * d_k].split_at_mut(d_k);
            let decay = &mut decay[i * d_k..(i + 1) * d_k];
            match gate {
                ChannelGate::Log => each::log(self.isa, x, before, to, decay),
                ChannelGate::Softplus { a_log, bias } => {
                    let rate = f64::from(math::exp(a_log.data()[h]));
                    each::softplus(self.isa, x, &bias.data()[of_head.clone()], rate, before, to, decay);
                }
                ChannelGate::Bounded { a_log, bias, lower } => {
                    let rate = math::exp(a_log.data()[h]);
                    each::bounded(self.isa, x, &bias.data()[of_head.clone()], rate, *lower, before, to, decay);
                }
            }
        }
    }

    /// Keys and queries as they meet the state before the chunk and behind it.
    fn decayed_keys(&self, rows: usize, keys: &Keys, channels: &mut Channels) {
        let d_k = self.shape.d_k;
        let (k, q) = keys.kq[..2 * rows * d_k].split_at(rows * d_k);
        let Channels { log, decay, reads, writes, end, .. } = channels;
        let (reads, writes) = (room(reads, 2 * rows * d_k), room(writes, rows * d_k));
        let end = room(end, d_k);
        let (reads_k, reads_q) = reads.split_at_mut(rows * d_k);
        if rows == 1 {
            let decay = &decay[..d_k];
            each::multiply(self.isa, k, decay, reads_k);
            each::multiply(self.isa, q, decay, reads_q);
            end.copy_from_slice(decay);
            writes.copy_from_slice(k);
            return;
        }
        let (before, log) = log[..(1 + rows) * d_k].split_at(d_k);
        let behind = &log[(rows - 1) * d_k..];
        for (i, log) in log.chunks_exact(d_k).enumerate() {
            let at = i * d_k..(i + 1) * d_k;
            let to = (&mut reads_k[at.clone()], &mut reads_q[at.clone()]);
            each::decayed_pair(self.isa, &k[at.clone()], &q[at.clone()], 1.0, log, before, to.0, to.1);
            each::decayed(self.isa, &k[at.clone()], behind, log, &mut writes[at]);
        }
        each::decays(self.isa, behind, before, end);
    }

    /// The factors of the rows `behind` with those from `start` up to them.
    fn between_halves(
        &self,
        start: usize,
        behind: Range<usize>,
        (k, q): (&[f32], &[f32]),
        beta: &[f32],
        (minus_a, mix): (&mut [f32], &mut [f32]),
        channels: &mut Channels,
    ) {
        let d_k = self.shape.d_k;
        let padded = padded(beta.len());
        let (border, half) = (behind.start, behind.start - start);
        let Channels { log, behind: left, before: right, columns, .. } = channels;
        // Row i of the keys has its log decay in row i + 1.
        let log_of = |row: usize| &log[(row + 1) * d_k..(row + 2) * d_k];
        let of = |row: usize| row * d_k..(row + 1) * d_k;
        let at_border = log_of(border - 1);

        let left = room(left, 2 * behind.len() * d_k);
        let (left_k, left_q) = left.split_at_mut(behind.len() * d_k);
        for (i, row) in behind.clone().enumerate() {
            let to = (&mut left_k[of(i)], &mut left_q[of(i)]);
            each::decayed_pair(self.isa, &k[of(row)], &q[of(row)], -beta[row], log_of(row), at_border, to.0, to.1);
        }
        let right = room(right, half * d_k);
        for (j, row) in (start..border).enumerate() {
            each::decayed(self.isa, &k[of(row)], at_border, log_of(row), &mut right[of(j)]);
        }
        let columns = room(columns, half * d_k);
        loops::transpose(self.isa, right, d_k, columns, half);
        let columns = Right::rows(&*columns, half);
        let (size, corner) = ([behind.len(), half, d_k], border * padded + start);
        let left = |data| Left { data, row: d_k, col: 1 };
        if self.delta {
            matmul(self.isa, size, left(&*left_k), columns, Scale::Zero, &mut minus_a[corner..], padded);
        }
        matmul(self.isa, size, left(&*left_q), columns, Scale::Zero, &mut mix[corner..], padded);
    }
}
