//! Keys and queries of a chunk, and their products with the keys where these serve several heads.

use std::ops::Range;

use super::fold::{Scan, padded};
use super::{loops, room};
use crate::cpu::matmul::{Left, Right, Scale, matmul};

/// Keys and queries of a chunk of one key head.
#[derive(Default)]
pub(super) struct Keys {
    /// `[2 rows, d_k]`: k, then q, normalised and scaled.
    pub kq: Vec<f32>,
    /// `[d_k, padded rows]`: k transposed.
    columns: Vec<f32>,
    /// `[2 rows, padded rows]`: `k . k` (of delta rules only), then `q . k`.
    pub dots: Vec<f32>,
}

impl Scan<'_> {
    /// Read keys and queries.
    pub(super) fn load_keys(&self, chunk: Range<usize>, key_head: usize, keys: &mut Keys) {
        let (rows, d_k) = (chunk.len(), self.shape.d_k);
        let kq = room(&mut keys.kq, 2 * rows * d_k);
        for (i, row) in chunk.enumerate() {
            for (from, scale, to) in [(&self.k, 1.0, i), (&self.q, self.inputs.q_scale, rows + i)] {
                let x = from.get(row, key_head * d_k, d_k);
                let to = &mut kq[to * d_k..(to + 1) * d_k];
                if self.inputs.unit {
                    loops::normalise(self.isa, x, scale, to);
                } else {
                    loops::scaled(self.isa, x, scale, to);
                }
            }
        }
    }

    /// Multiply them with the keys.
    pub(super) fn key_products(&self, rows: usize, keys: &mut Keys) {
        let d_k = self.shape.d_k;
        let padded = padded(rows);
        let dots = room(&mut keys.dots, 2 * rows * padded);
        let kq = &keys.kq[..2 * rows * d_k];
        if rows == 1 {
            let (k, q) = kq.split_at(d_k);
            dots[padded] = loops::dot(self.isa, q, k);
            return;
        }
        let columns = room(&mut keys.columns, d_k * padded);
        loops::transpose(self.isa, &kq[..rows * d_k], d_k, columns, padded);
        let columns = Right::rows(&*columns, padded);
        let first = if self.delta { 0 } else { rows };
        let left = Left { data: &kq[first * d_k..], row: d_k, col: 1 };
        let size = [2 * rows - first, padded, d_k];
        matmul(self.isa, size, left, columns, Scale::Zero, &mut dots[first * padded..], padded);
    }
}
