//! Random layers and what they do, token by token in f64.

use super::*;
use crate::Cols;

/// Random numbers without a dependency: xorshift, scaled to -1..1.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> f32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub fn tensor(&mut self, shape: &[usize], scale: f32) -> CpuTensor {
        let mut t = CpuTensor::zeros(shape);
        t.data_mut().iter_mut().for_each(|x| *x = self.next() * scale);
        t
    }
}

pub const SHAPE: DeltaShape = DeltaShape { key_heads: 2, heads: 4, d_k: 24, d_v: 20, beta_scale: 1.0 };

/// A layer's inputs; `a` and `b` stand in the middle of wider matrices.
#[derive(Clone)]
pub struct Case {
    pub shape: DeltaShape,
    pub qkv: CpuTensor,
    pub b: CpuTensor,
    pub a: CpuTensor,
    pub a_log: CpuTensor,
    pub dt_bias: CpuTensor,
}

impl Case {
    pub fn new(shape: DeltaShape, rows: usize, seed: u64) -> Self {
        let mut rng = Rng(seed * 0x9E37_79B9 + 1);
        let mut a_log = rng.tensor(&[shape.heads], 1.0);
        // Heads from slow to fast decay.
        a_log.data_mut().iter_mut().enumerate().for_each(|(h, x)| *x += 2.0 * h as f32 - 4.0);
        Case {
            shape,
            qkv: rng.tensor(&[rows, shape.channels()], 1.0),
            b: rng.tensor(&[rows, shape.heads + 3], 3.0),
            a: rng.tensor(&[rows, shape.heads + 2], 2.0),
            a_log,
            dt_bias: rng.tensor(&[shape.heads], 1.0),
        }
    }

    pub fn run(&self, isa: Isa, pool: &Pool, folds: &mut [Fold<'_, Cpu>]) -> CpuTensor {
        let (b, a) = (Cols::new(&self.b, 3), Cols::new(&self.a, 1));
        let inputs = DeltaInputs { qkv: &self.qkv, b, a, a_log: &self.a_log, dt_bias: &self.dt_bias };
        let mut out = CpuTensor::alloc(&[1, 1]);
        gated_delta(isa, pool, self.shape, inputs, folds, &mut out);
        out
    }

    pub fn state(&self, seed: u64) -> CpuTensor {
        Rng(seed + 99).tensor(&[self.shape.heads, self.shape.d_k, self.shape.d_v], 1.0)
    }

    /// All rows after `state`, with the carry of all.
    pub fn body(&self, isa: Isa, pool: &Pool, state: &mut CpuTensor) -> (CpuTensor, Dense<CpuTensor>, CpuTensor) {
        let mut carry = CpuCarry::new(self.shape.heads, self.shape.d_k, self.shape.d_v);
        let steps = vec![Step::Rows { rows: 0..self.qkv.rows(), carry: Some(&mut carry) }];
        let out = self.run(isa, pool, &mut [Fold { state, steps }]);
        let (Transition::Dense(t), zero_start) = finish(isa, pool, carry, state) else { panic!("dense") };
        (out, t, zero_start)
    }
}

/// Token by token in f64: outputs, state and operator.
pub struct Naive {
    pub out: Vec<f64>,
    pub state: Vec<f64>,
    pub operator: Vec<f64>,
}

pub fn naive(case: &Case, start: &[f32]) -> Naive {
    let DeltaShape { key_heads, heads, d_k, d_v, beta_scale } = case.shape;
    let rows = case.qkv.rows();
    let mut out = vec![0.0; rows * heads * d_v];
    let mut state: Vec<f64> = start.iter().map(|x| f64::from(*x)).collect();
    let mut operator = vec![0.0; heads * d_k * d_k];
    for h in 0..heads {
        let s = &mut state[h * d_k * d_v..(h + 1) * d_k * d_v];
        let t = &mut operator[h * d_k * d_k..(h + 1) * d_k * d_k];
        (0..d_k).for_each(|i| t[i * d_k + i] = 1.0);
        for row in 0..rows {
            let x: Vec<f64> = case.qkv.data()[row * case.shape.channels()..][..case.shape.channels()]
                .iter()
                .map(|x| f64::from(*x))
                .collect();
            let unit = |x: &[f64]| {
                let norm = (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
                x.iter().map(|x| x / norm).collect::<Vec<_>>()
            };
            let key_head = h / (heads / key_heads);
            let q = unit(&x[key_head * d_k..(key_head + 1) * d_k]);
            let k = unit(&x[(key_heads + key_head) * d_k..(key_heads + key_head + 1) * d_k]);
            let v = &x[2 * key_heads * d_k + h * d_v..][..d_v];
            let b = f64::from(case.b.data()[row * case.b.cols() + 3 + h]);
            let beta = f64::from(beta_scale) / (1.0 + (-b).exp());
            let a = f64::from(case.a.data()[row * case.a.cols() + 1 + h]) + f64::from(case.dt_bias.data()[h]);
            let softplus = if a > 30.0 { a } else { a.exp().ln_1p() };
            let decay = (-f64::from(case.a_log.data()[h]).exp() * softplus).exp();
            for (m, width, v) in [(&mut *s, d_v, Some(v)), (&mut *t, d_k, None)] {
                m.iter_mut().for_each(|x| *x *= decay);
                for c in 0..width {
                    let seen: f64 = (0..d_k).map(|i| k[i] * m[i * width + c]).sum();
                    let u = beta * (v.map_or(0.0, |v| v[c]) - seen);
                    (0..d_k).for_each(|i| m[i * width + c] += k[i] * u);
                }
            }
            for c in 0..d_v {
                let o: f64 = (0..d_k).map(|i| q[i] * s[i * d_v + c]).sum();
                out[(row * heads + h) * d_v + c] = o / (d_k as f64).sqrt();
            }
        }
    }
    Naive { out, state, operator }
}

pub fn close(what: &str, got: &[f32], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    let largest = want.iter().fold(1.0, |m: f64, x| m.max(x.abs()));
    let off = got.iter().zip(want).map(|(g, w)| (f64::from(*g) - w).abs()).fold(0.0, |m: f64, d| {
        assert!(!d.is_nan(), "{what} has a NaN");
        m.max(d)
    });
    assert!(off <= tolerance * largest, "{what}: off by {off:e} of {largest:e}");
}

/// Blocks of all heads, zero where omitted.
pub fn all_blocks(t: &Dense<CpuTensor>, d_k: usize) -> Vec<f32> {
    let mut all = vec![0.0; t.heads * d_k * d_k];
    for (block, h) in t.blocks.data().chunks(d_k * d_k).zip(&t.kept) {
        all[*h as usize * d_k * d_k..][..d_k * d_k].copy_from_slice(block);
    }
    all
}
