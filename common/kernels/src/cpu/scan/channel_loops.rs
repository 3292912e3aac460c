//! Loops over the key channels of a row, compiled for each instruction set.

use super::floored;
use super::loops::{SUM_LANES, lane_sum, sum_of_products};
use crate::cpu::math;

/// Move the sum of one channel on by the log decay `g`; the row's own decay.
#[inline(always)]
fn advance(g: f64, before: f64, to: &mut f64) -> f32 {
    let g = floored(g);
    *to = before + g;
    math::exp(g as f32)
}

math::per_isa! {
    /// Log decays as they are.
    pub(super) fn log(x: &[f32], before: &[f64], to: &mut [f64], decay: &mut [f32]) {
        for (((x, before), to), decay) in x.iter().zip(before).zip(to).zip(decay) {
            *decay = advance(f64::from(*x), *before, to);
        }
    }
}

math::per_isa! {
    /// `-rate softplus(x + bias)`.
    pub(super) fn softplus(x: &[f32], bias: &[f32], rate: f64, before: &[f64], to: &mut [f64], decay: &mut [f32]) {
        for ((((x, bias), before), to), decay) in x.iter().zip(bias).zip(before).zip(to).zip(decay) {
            *decay = advance(-rate * f64::from(math::softplus(x + bias)), *before, to);
        }
    }
}

math::per_isa! {
    /// `lower sigmoid(rate (x + bias))`.
    pub(super) fn bounded(
        x: &[f32],
        bias: &[f32],
        rate: f32,
        lower: f32,
        before: &[f64],
        to: &mut [f64],
        decay: &mut [f32],
    ) {
        for ((((x, bias), before), to), decay) in x.iter().zip(bias).zip(before).zip(to).zip(decay) {
            *decay = advance(f64::from(lower) * f64::from(math::sigmoid(rate * (x + bias))), *before, to);
        }
    }
}

math::per_isa! {
    /// `to = x y`.
    pub(super) fn multiply(x: &[f32], y: &[f32], to: &mut [f32]) {
        for ((x, y), to) in x.iter().zip(y).zip(to) {
            *to = x * y;
        }
    }
}

math::per_isa! {
    /// `to = exp(late - early)`.
    pub(super) fn decays(late: &[f64], early: &[f64], to: &mut [f32]) {
        for ((late, early), to) in late.iter().zip(early).zip(to) {
            *to = math::exp((late - early) as f32);
        }
    }
}

math::per_isa! {
    /// `to = x exp(late - early)`.
    pub(super) fn decayed(x: &[f32], late: &[f64], early: &[f64], to: &mut [f32]) {
        for (((x, late), early), to) in x.iter().zip(late).zip(early).zip(to) {
            *to = x * math::exp((late - early) as f32);
        }
    }
}

math::per_isa! {
    /// `to_k = factor k exp(late - early)`, `to_q = q exp(late - early)`.
    pub(super) fn decayed_pair(
        k: &[f32],
        q: &[f32],
        factor: f32,
        late: &[f64],
        early: &[f64],
        to_k: &mut [f32],
        to_q: &mut [f32],
    ) {
        for (((((k, q), late), early), to_k), to_q) in k.iter().zip(q).zip(late).zip(early).zip(to_k).zip(to_q) {
            let decay = math::exp((late - early) as f32);
            *to_k = factor * k * decay;
            *to_q = q * decay;
        }
    }
}

/// `moving <- decay moving`; its products with `k` and `q`.
#[inline(always)]
fn decay_and_multiply(moving: &mut [f32], decay: &[f32], k: &[f32], q: &[f32]) -> (f32, f32) {
    let (whole, rest) = moving.as_chunks_mut::<SUM_LANES>();
    let (decays, decay_rest) = decay.as_chunks::<SUM_LANES>();
    let (ks, k_rest) = k.as_chunks::<SUM_LANES>();
    let (qs, q_rest) = q.as_chunks::<SUM_LANES>();
    let (mut k_sums, mut q_sums) = ([0.0; SUM_LANES], [0.0; SUM_LANES]);
    for (((moving, decay), k), q) in whole.iter_mut().zip(decays).zip(ks).zip(qs) {
        for lane in 0..SUM_LANES {
            moving[lane] *= decay[lane];
            k_sums[lane] += moving[lane] * k[lane];
            q_sums[lane] += moving[lane] * q[lane];
        }
    }
    for (lane, (((moving, decay), k), q)) in rest.iter_mut().zip(decay_rest).zip(k_rest).zip(q_rest).enumerate() {
        *moving *= decay;
        k_sums[lane] += *moving * k;
        q_sums[lane] += *moving * q;
    }
    (lane_sum(k_sums), lane_sum(q_sums))
}

math::per_isa! {
    /// The factors within a short stretch of rows; `minus_a` and `mix` begin at its corner, their rows `padded` apart.
    pub(super) fn within(
        k: &[f32],
        q: &[f32],
        decay: &[f32],
        beta: &[f32],
        minus_a: &mut [f32],
        mix: &mut [f32],
        padded: usize,
        moving: &mut [f32],
    ) {
        let (rows, d_k) = (beta.len(), moving.len());
        let of = |row: usize| row * d_k..(row + 1) * d_k;
        for j in 0..rows {
            minus_a[j * padded + j..j * padded + rows].fill(0.0);
            mix[j * padded + j..j * padded + rows].fill(0.0);
            mix[j * padded + j] = sum_of_products(&q[of(j)], &k[of(j)]);
            moving.copy_from_slice(&k[of(j)]);
            for i in j + 1..rows {
                let (with_k, with_q) = decay_and_multiply(moving, &decay[of(i)], &k[of(i)], &q[of(i)]);
                minus_a[i * padded + j] = -beta[i] * with_k;
                mix[i * padded + j] = with_q;
            }
        }
    }
}
