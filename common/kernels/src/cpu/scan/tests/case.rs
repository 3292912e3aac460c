//! Random layers, and what they do on any backend.

use hypic_state::{HostTensor, Transition};

use crate::scan_checks::form;
use crate::{Backend, ChannelGate, Cols, Decay, Fold, ScanInputs, ScanShape, Step, Write};

/// Random numbers without a dependency: xorshift, scaled to -1..1.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> f32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub fn numbers(&mut self, len: usize, scale: f32) -> Vec<f32> {
        (0..len).map(|_| self.next() * scale).collect()
    }
}

/// What tokens do.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    Gdn,
    Kda,
    Gla,
}

impl Kind {
    pub const ALL: [Kind; 3] = [Kind::Gdn, Kind::Kda, Kind::Gla];
}

/// A layer's inputs; `b` and `x` stand in the middle of wider matrices.
#[derive(Clone)]
pub struct Case {
    pub kind: Kind,
    pub shape: ScanShape,
    pub beta_scale: f32,
    pub rows: usize,
    /// `[rows, q | k | v]`.
    pub qkv: Vec<f32>,
    /// `[rows, 3 + heads]`, the last ones count.
    pub b: Vec<f32>,
    /// `[rows, 1 + heads or heads * d_k]`, the last ones count.
    pub x: Vec<f32>,
    pub a_log: Vec<f32>,
    pub bias: Vec<f32>,
}

/// What a body made of a state.
pub struct Outcome {
    pub out: Vec<f64>,
    pub state: Vec<f64>,
    pub transition: Transition<HostTensor>,
    pub zero_start: Vec<f64>,
}

impl Case {
    pub fn new(kind: Kind, shape: ScanShape, rows: usize, seed: u64) -> Self {
        let ScanShape { heads, d_k, .. } = shape;
        let shape = if kind == Kind::Gdn { shape } else { ScanShape { key_heads: heads, ..shape } };
        let mut rng = Rng(seed * 0x9E37_79B9 + 1);
        let gates = if kind == Kind::Gdn { heads } else { heads * d_k };
        let mut a_log = rng.numbers(heads, 1.0);
        // Heads from slow to fast decay.
        a_log.iter_mut().enumerate().for_each(|(h, x)| *x += 2.0 * h as f32 - 4.0);
        let mut x = rng.numbers(rows * (1 + gates), 2.0);
        if kind == Kind::Gla {
            x.iter_mut().for_each(|x| *x = -0.5 * x.abs());
        }
        Case {
            kind,
            shape,
            beta_scale: 1.0,
            rows,
            qkv: rng.numbers(rows * channels(&shape), 1.0),
            b: rng.numbers(rows * (3 + heads), 3.0),
            x,
            a_log,
            bias: rng.numbers(gates, 1.0),
        }
    }

    pub fn state(&self, seed: u64) -> Vec<f32> {
        Rng(seed + 99).numbers(self.shape.heads * self.shape.d_k * self.shape.d_v, 1.0)
    }

    /// All rows as one body behind `before`.
    pub fn body<B: Backend>(&self, backend: &B, before: &[f32]) -> Outcome {
        let ScanShape { key_heads, heads, d_k, d_v } = self.shape;
        let matrix = |x: &[f32], cols: usize| backend.upload(&HostTensor::from_f32([self.rows, cols], x));
        let vector = |x: &[f32]| backend.upload(&HostTensor::from_f32([x.len()], x));
        let qkv = matrix(&self.qkv, channels(&self.shape));
        let (b, x) = (matrix(&self.b, 3 + heads), matrix(&self.x, 1 + self.bias.len()));
        let (a_log, bias) = (vector(&self.a_log), vector(&self.bias));
        let (keys, x) = (key_heads * d_k, Cols::new(&x, 1));
        let inputs = ScanInputs {
            q: Cols::new(&qkv, 0),
            k: Cols::new(&qkv, keys),
            v: Cols::new(&qkv, 2 * keys),
            unit: self.kind != Kind::Gla,
            q_scale: (d_k as f32).powf(-0.5),
            decay: match self.kind {
                Kind::Gdn => Decay::Head { x, a_log: &a_log, dt_bias: &bias, limit: (0.0, f32::INFINITY) },
                Kind::Kda => Decay::Channel { x, gate: ChannelGate::Softplus { a_log: &a_log, bias: &bias } },
                Kind::Gla => Decay::Channel { x, gate: ChannelGate::Log },
            },
            write: match self.kind {
                Kind::Gdn | Kind::Kda => Write::Delta { b: Cols::new(&b, 3), scale: self.beta_scale },
                Kind::Gla => Write::Plain,
            },
            skip: None,
        };
        let mut state = backend.upload(&HostTensor::from_f32([heads, d_k, d_v], before));
        let mut out = backend.alloc(&[1, 1]);
        let mut carry = backend.carry(self.shape, form(&inputs));
        let steps = vec![Step::Rows { rows: 0..self.rows, carry: Some(&mut carry) }];
        backend.scan(self.shape, inputs, &mut [Fold { state: &mut state, steps }], &mut out);
        let (transition, zero_start) = backend.finish(carry, &state);
        let numbers = |t: &B::Tensor| backend.download(t).to_f64();
        Outcome {
            out: numbers(&out),
            state: numbers(&state),
            transition: transition.map(|t| backend.download(t)),
            zero_start: numbers(&zero_start),
        }
    }
}

/// Columns of q, k and v.
pub fn channels(shape: &ScanShape) -> usize {
    2 * shape.key_heads * shape.d_k + shape.heads * shape.d_v
}
