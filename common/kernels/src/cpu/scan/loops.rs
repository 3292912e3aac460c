//! Loops over the numbers of a chunk, compiled for each instruction set.

use crate::cpu::math;
use crate::cpu::matmul::GROUP;

/// Inside the root of the l2-norm of q and k.
const NORM_EPS: f32 = 1e-6;

/// Lanes of a sum: fixed, so that it has one order on every instruction set.
pub(super) const SUM_LANES: usize = 16;

#[inline(always)]
pub(super) fn sum_of_products(x: &[f32], y: &[f32]) -> f32 {
    let (xs, x_rest) = x.as_chunks::<SUM_LANES>();
    let (ys, y_rest) = y.as_chunks::<SUM_LANES>();
    let mut sums = [0.0; SUM_LANES];
    for (x, y) in xs.iter().zip(ys) {
        for lane in 0..SUM_LANES {
            sums[lane] += x[lane] * y[lane];
        }
    }
    for (lane, (x, y)) in x_rest.iter().zip(y_rest).enumerate() {
        sums[lane] += x * y;
    }
    lane_sum(sums)
}

#[inline(always)]
pub(super) fn lane_sum(mut sums: [f32; SUM_LANES]) -> f32 {
    let mut width = SUM_LANES;
    while width > 1 {
        width /= 2;
        for lane in 0..width {
            sums[lane] += sums[lane + width];
        }
    }
    sums[0]
}

math::per_isa! {
    pub(super) fn dot(x: &[f32], y: &[f32]) -> f32 {
        sum_of_products(x, y)
    }
}

math::per_isa! {
    /// `to = scale * x / |x|`.
    pub(super) fn normalise(x: &[f32], scale: f32, to: &mut [f32]) {
        let factor = scale / (sum_of_products(x, x) + NORM_EPS).sqrt();
        for (to, x) in to.iter_mut().zip(x) {
            *to = x * factor;
        }
    }
}

math::per_isa! {
    /// `to = scale * x`.
    pub(super) fn scaled(x: &[f32], scale: f32, to: &mut [f32]) {
        for (to, x) in to.iter_mut().zip(x) {
            *to = scale * x;
        }
    }
}

math::per_isa! {
    /// `to [width, padded]` is `from [rows, width]` transposed, with zeros behind the rows.
    pub(super) fn transpose(from: &[f32], width: usize, to: &mut [f32], padded: usize) {
        let rows = from.len() / width;
        for (c, to) in to.chunks_exact_mut(padded).enumerate() {
            for (r, to) in to[..rows].iter_mut().enumerate() {
                *to = from[r * width + c];
            }
            to[rows..].fill(0.0);
        }
    }
}

math::per_isa! {
    pub(super) fn decays(log: &[f64], decay: &mut [f32], rest: &mut [f32]) {
        let end = log[log.len() - 1];
        for ((log, decay), rest) in log.iter().zip(decay).zip(rest) {
            *decay = math::exp(*log as f32);
            *rest = math::exp((end - log) as f32);
        }
    }
}

math::per_isa! {
    /// The triangular factors of a chunk from `dots [2 rows, padded]`.
    pub(super) fn factors(log: &[f64], beta: &[f32], dots: &[f32], minus_a: &mut [f32], mix: &mut [f32]) {
        let (rows, padded) = (beta.len(), log.len());
        for i in 0..rows {
            for j in (0..=i).step_by(GROUP) {
                let at = i * padded + j;
                let logs: &[f64; GROUP] = log[j..j + GROUP].try_into().expect("whole groups");
                let k_dots: &[f32; GROUP] = dots[at..at + GROUP].try_into().expect("whole groups");
                let q_dots: &[f32; GROUP] =
                    dots[rows * padded + at..rows * padded + at + GROUP].try_into().expect("whole groups");
                let minus_a: &mut [f32; GROUP] = (&mut minus_a[at..at + GROUP]).try_into().expect("whole groups");
                let mix: &mut [f32; GROUP] = (&mut mix[at..at + GROUP]).try_into().expect("whole groups");
                for lane in 0..GROUP {
                    let decay = math::exp((log[i] - logs[lane]) as f32);
                    minus_a[lane] = if j + lane < i { -beta[i] * k_dots[lane] * decay } else { 0.0 };
                    mix[lane] = if j + lane <= i { q_dots[lane] * decay } else { 0.0 };
                }
            }
        }
    }
}

math::per_isa! {
    /// The factors of outputs alone, from the dots of q and k, `[rows, padded]`.
    pub(super) fn mix_factors(log: &[f64], dots: &[f32], mix: &mut [f32]) {
        let padded = log.len();
        for (i, (dots, mix)) in dots.chunks_exact(padded).zip(mix.chunks_exact_mut(padded)).enumerate() {
            for j in (0..=i).step_by(GROUP) {
                let logs: &[f64; GROUP] = log[j..j + GROUP].try_into().expect("whole groups");
                let dots: &[f32; GROUP] = dots[j..j + GROUP].try_into().expect("whole groups");
                let mix: &mut [f32; GROUP] = (&mut mix[j..j + GROUP]).try_into().expect("whole groups");
                for lane in 0..GROUP {
                    let decay = math::exp((log[i] - logs[lane]) as f32);
                    mix[lane] = if j + lane <= i { dots[lane] * decay } else { 0.0 };
                }
            }
        }
    }
}

math::per_isa! {
    /// `w <- beta (v - decay w)`.
    pub(super) fn start_w(w: &mut [f32], v: &[f32], decay: f32, beta: f32) {
        for (w, v) in w.iter_mut().zip(v) {
            *w = beta * (v - decay * *w);
        }
    }
}

math::per_isa! {
    pub(super) fn scale_by(x: &mut [f32], by: f32) {
        for x in x {
            *x *= by;
        }
    }
}

math::per_isa! {
    /// `x <- by x + plus`.
    pub(super) fn scale_add(x: &mut [f32], by: f32, plus: &[f32]) {
        for (x, plus) in x.iter_mut().zip(plus) {
            *x = by * *x + plus;
        }
    }
}

math::per_isa! {
    /// `x <- x + by plus`.
    pub(super) fn add_scaled(x: &mut [f32], plus: &[f32], by: f32) {
        for (x, plus) in x.iter_mut().zip(plus) {
            *x += by * plus;
        }
    }
}

math::per_isa! {
    /// Turn each pair of `x` and `y`.
    pub(super) fn turn(x: &mut [f32], y: &mut [f32], cos: f32, sin: f32) {
        for (x, y) in x.iter_mut().zip(y) {
            (*x, *y) = (*x * cos - *y * sin, *y * cos + *x * sin);
        }
    }
}
