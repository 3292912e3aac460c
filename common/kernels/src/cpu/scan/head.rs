//! What decays of whole heads make of a chunk: one number per row, and the triangular factors.

use std::ops::Range;

use super::fold::{Factors, Scan, padded};
use super::keys::Keys;
use super::{Columns, floored, loops, room};
use crate::cpu::math;
use crate::{Decay, Write};

impl Scan<'_> {
    /// The gates of value head `h` and the triangular factors.
    pub(super) fn head_factors(&self, chunk: Range<usize>, h: usize, keys: &Keys, factors: &mut Factors) {
        let (rows, padded) = (chunk.len(), padded(chunk.len()));
        self.head_logs(chunk.clone(), h, factors);
        self.betas(chunk, h, factors);
        let log = &factors.log[..padded];
        let (decay, rest) = (room(&mut factors.decay, rows), room(&mut factors.rest, rows));
        loops::decays(self.isa, &log[..rows], decay, rest);
        let mix = room(&mut factors.mix, rows * padded);
        if rows == 1 {
            mix[0] = keys.dots[padded];
            return;
        }
        let dots = &keys.dots[..2 * rows * padded];
        if self.delta {
            let minus_a = room(&mut factors.minus_a, rows * padded);
            loops::factors(self.isa, log, &factors.beta[..rows], dots, minus_a, mix);
        } else {
            loops::mix_factors(self.isa, log, &dots[rows * padded..], mix);
        }
    }

    /// The cumulative log decays, and the steps.
    fn head_logs(&self, chunk: Range<usize>, h: usize, factors: &mut Factors) {
        let rows = chunk.len();
        let log = room(&mut factors.log, padded(rows));
        match &self.inputs.decay {
            Decay::None => log[..rows].fill(0.0),
            Decay::Fixed(fixed) => {
                let each = floored(f64::from(fixed.data()[h]));
                log[..rows].iter_mut().enumerate().for_each(|(i, log)| *log = (i + 1) as f64 * each);
            }
            Decay::Head { x, a_log, dt_bias, limit: (least, most) } => {
                let step = room(&mut factors.step, rows);
                let rate = f64::from(math::exp(a_log.data()[h]));
                let (x, bias) = (Columns::new(*x), dt_bias.data()[h]);
                let mut sum = 0.0;
                for (i, row) in chunk.enumerate() {
                    let dt = math::softplus(x.get(row, h, 1)[0] + bias);
                    let dt = if dt < *least { *least } else { dt };
                    let dt = if dt > *most { *most } else { dt };
                    sum += floored(-rate * f64::from(dt));
                    log[i] = sum;
                    step[i] = dt;
                }
            }
            Decay::Channel { .. } => unreachable!("these have factors of their own"),
        }
    }

    /// How far each row corrects what a delta rule predicts.
    pub(super) fn betas(&self, chunk: Range<usize>, h: usize, factors: &mut Factors) {
        let Write::Delta { b, scale } = &self.inputs.write else { return };
        let b = Columns::new(*b);
        let beta = room(&mut factors.beta, chunk.len());
        for (beta, row) in beta.iter_mut().zip(chunk) {
            *beta = scale * math::sigmoid(b.get(row, h, 1)[0]);
        }
    }
}
