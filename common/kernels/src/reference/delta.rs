//! The gated delta rule, a token at a time, and the operators of bodies as products of the tokens' matrices.

use hypic_state::{ComposeRule, DECAYED, Dense, RecurrentPart, Transition};

use super::real::Real;
use super::tensor::RefTensor;
use super::{Reference, check};
use crate::{DeltaInputs, DeltaShape, DeviceTensor, Fold, Step};

/// Inside the root of the l2-norm of q and k.
const L2_EPS: f64 = 1e-6;

/// The operator of a body, and the state that its rows so far end in when they start from zero.
pub struct RefCarry<R> {
    /// `[heads, d_k, d_k]`.
    transition: RefTensor<R>,
    /// `[heads, d_k, d_v]`.
    zero_start: RefTensor<R>,
}

/// One token of one head, ready for the recurrence.
struct Token<R> {
    q: Vec<R>,
    k: Vec<R>,
    v: Vec<R>,
    decay: R,
    beta: R,
}

/// The inputs, checked and converted.
struct Inputs<'a, R: Real> {
    shape: DeltaShape,
    qkv: &'a RefTensor<R>,
    b: super::Columns<'a, R>,
    a: super::Columns<'a, R>,
    a_log: &'a RefTensor<R>,
    dt_bias: &'a RefTensor<R>,
}

impl<R: Real> Inputs<'_, R> {
    fn token(&self, row: usize, head: usize) -> Token<R> {
        let DeltaShape { key_heads, heads, d_k, d_v, beta_scale } = self.shape;
        let qkv = self.qkv.row(row);
        let (q, kv) = qkv.split_at(key_heads * d_k);
        let (k, v) = kv.split_at(key_heads * d_k);
        let key_head = head / (heads / key_heads);
        let keys = key_head * d_k..(key_head + 1) * d_k;

        let scale = R::ONE / R::from_f64(d_k as f64).sqrt();
        let g = -(self.a_log.data[head].exp() * (self.a.row(row)[head] + self.dt_bias.data[head]).softplus());
        Token {
            q: unit(&q[keys.clone()]).into_iter().map(|x| x * scale).collect(),
            k: unit(&k[keys]),
            v: v[head * d_v..(head + 1) * d_v].to_vec(),
            decay: g.exp(),
            beta: R::from_f64(f64::from(beta_scale)) * self.b.row(row)[head].sigmoid(),
        }
    }
}

/// `x / sqrt(sum x^2 + eps)`.
fn unit<R: Real>(x: &[R]) -> Vec<R> {
    let sum: R = x.iter().map(|v| *v * *v).sum();
    let root = (sum + R::from_f64(L2_EPS)).sqrt();
    x.iter().map(|v| *v / root).collect()
}

pub(super) fn gated_delta<R: Real>(
    shape: DeltaShape,
    inputs: DeltaInputs<'_, Reference<R>>,
    folds: &mut [Fold<'_, Reference<R>>],
    out: &mut RefTensor<R>,
) {
    const OP: &str = "gated_delta";
    let DeltaShape { key_heads, heads, d_k, d_v, .. } = shape;
    assert!(key_heads > 0 && heads % key_heads == 0, "{OP}: {heads} heads are no multiple of {key_heads} key heads");
    let (rows, _) = check::matrix(OP, "qkv", inputs.qkv);
    check::shape(OP, "qkv", inputs.qkv, &[rows, shape.channels()]);
    check::shape(OP, "a_log", inputs.a_log, &[heads]);
    check::shape(OP, "dt_bias", inputs.dt_bias, &[heads]);
    let (a, b) = (check::cols(OP, "a", inputs.a, heads), check::cols(OP, "b", inputs.b, heads));
    check::shape(OP, "a", a.mat, &[rows, a.mat.cols()]);
    check::shape(OP, "b", b.mat, &[rows, b.mat.cols()]);
    let inputs = Inputs { shape, qkv: inputs.qkv, b, a, a_log: inputs.a_log, dt_bias: inputs.dt_bias };

    out.resize(&[rows, heads * d_v]);
    for fold in folds {
        check::shape(OP, "state", fold.state, &[heads, d_k, d_v]);
        for step in &mut fold.steps {
            match step {
                Step::Rows { rows: range, carry } => {
                    check::range(OP, "rows", range, rows);
                    if let Some(carry) = carry.as_deref() {
                        check::shape(OP, "carry", &carry.zero_start, &[heads, d_k, d_v]);
                    }
                    for row in range.clone() {
                        for head in 0..heads {
                            let token = inputs.token(row, head);
                            let state = &mut fold.state.data[head * d_k * d_v..(head + 1) * d_k * d_v];
                            advance(state, &token);
                            read(state, &token.q, &mut out.row_mut(row)[head * d_v..(head + 1) * d_v]);
                            if let Some(carry) = carry {
                                carry.advance(head, &token);
                            }
                        }
                    }
                }
                Step::Jump { rule, part } => jump(fold.state, *rule, part),
                Step::Save(to) => to.copy_from(fold.state),
            }
        }
    }
}

/// `S <- decay S; S <- S + beta k (v - S^T k)^T`.
fn advance<R: Real>(state: &mut [R], token: &Token<R>) {
    let d_v = token.v.len();
    for s in state.iter_mut() {
        *s = *s * token.decay;
    }
    for (j, v) in token.v.iter().enumerate() {
        let predicted: R = token.k.iter().enumerate().map(|(i, k)| *k * state[i * d_v + j]).sum();
        let correction = token.beta * (*v - predicted);
        for (i, k) in token.k.iter().enumerate() {
            state[i * d_v + j] += *k * correction;
        }
    }
}

/// `o = S^T q`.
fn read<R: Real>(state: &[R], q: &[R], out: &mut [R]) {
    let d_v = out.len();
    for (j, o) in out.iter_mut().enumerate() {
        *o = q.iter().enumerate().map(|(i, q)| *q * state[i * d_v + j]).sum();
    }
}

/// `a [n, m] b [m, p]`.
fn product<R: Real>(a: &[R], b: &[R], m: usize, p: usize) -> Vec<R> {
    let mut out = vec![R::ZERO; a.len() / m * p];
    for (a_row, out_row) in a.chunks(m).zip(out.chunks_mut(p)) {
        for (a, b_row) in a_row.iter().zip(b.chunks(p)) {
            for (o, b) in out_row.iter_mut().zip(b_row) {
                *o += *a * *b;
            }
        }
    }
    out
}

impl<R: Real> RefCarry<R> {
    pub(super) fn new(heads: usize, d_k: usize, d_v: usize) -> Self {
        let mut transition = RefTensor::filled(&[heads, d_k, d_k], R::ZERO);
        for head in transition.data.chunks_mut(d_k * d_k) {
            head.iter_mut().step_by(d_k + 1).for_each(|x| *x = R::ONE);
        }
        RefCarry { transition, zero_start: RefTensor::filled(&[heads, d_k, d_v], R::ZERO) }
    }

    /// `T <- A T` with `A = decay (I - beta k k^T)`, and the zero-start state like any state.
    fn advance(&mut self, head: usize, token: &Token<R>) {
        let (d_k, d_v) = (token.k.len(), token.v.len());
        advance(&mut self.zero_start.data[head * d_k * d_v..(head + 1) * d_k * d_v], token);

        let mut a = vec![R::ZERO; d_k * d_k];
        for i in 0..d_k {
            for j in 0..d_k {
                let identity = if i == j { R::ONE } else { R::ZERO };
                a[i * d_k + j] = token.decay * (identity - token.beta * token.k[i] * token.k[j]);
            }
        }
        let t = &mut self.transition.data[head * d_k * d_k..(head + 1) * d_k * d_k];
        t.copy_from_slice(&product(&a, t, d_k, d_k));
    }

    /// The operator without decayed heads, and the zero-start state.
    pub(super) fn finish(self, state: &RefTensor<R>) -> (Transition<RefTensor<R>>, RefTensor<R>) {
        check::shape("finish", "state", state, &self.zero_start.shape);
        let [heads, d_k, _] = self.transition.shape[..] else { unreachable!("an operator has three axes") };
        let mut kept = Vec::new();
        let mut blocks = Vec::new();
        for (head, block) in self.transition.data.chunks(d_k * d_k).enumerate() {
            let square: f64 = block.iter().map(|x| x.to_f64() * x.to_f64()).sum();
            if (square / d_k as f64).sqrt() > DECAYED {
                kept.push(head as u32);
                blocks.extend_from_slice(block);
            }
        }
        let blocks = RefTensor::new(&[kept.len(), d_k, d_k], blocks);
        (Transition::Dense(Dense { heads, kept, blocks }), self.zero_start)
    }
}

/// Apply an entry to a state.
fn jump<R: Real>(state: &mut RefTensor<R>, rule: ComposeRule, part: &RecurrentPart<Reference<R>>) {
    check::shape("jump", "entry's state", &part.state, &state.shape);
    match rule {
        ComposeRule::Last => state.copy_from(&part.state),
        ComposeRule::Add => add(state, &part.state),
        ComposeRule::Transition => {
            apply(&part.transition, state);
            add(state, &part.state);
        }
    }
}

fn add<R: Real>(state: &mut RefTensor<R>, other: &RefTensor<R>) {
    for (s, o) in state.data.iter_mut().zip(&other.data) {
        *s += *o;
    }
}

/// `S <- T S`, omitted operators being zero.
fn apply<R: Real>(transition: &Transition<RefTensor<R>>, state: &mut RefTensor<R>) {
    let [heads, d_k, d_v] = state.shape[..] else { unreachable!("a state has three axes") };
    match transition {
        Transition::Scalar(t) => {
            check::shape("jump", "scalar operator", t, &[heads]);
            for (i, s) in state.data.iter_mut().enumerate() {
                *s = *s * t.data[i / (d_k * d_v)];
            }
        }
        Transition::Diagonal(t) => {
            check::shape("jump", "diagonal operator", t, &[heads, d_k]);
            for (i, s) in state.data.iter_mut().enumerate() {
                *s = *s * t.data[i / d_v];
            }
        }
        Transition::Dense(dense) => {
            check::shape("jump", "dense operator", &dense.blocks, &[dense.kept.len(), d_k, d_k]);
            assert_eq!(dense.heads, heads, "jump: an operator of {} heads on a state {:?}", dense.heads, state.shape);
            for (head, s) in state.data.chunks_mut(d_k * d_v).enumerate() {
                match dense.kept.iter().position(|kept| *kept as usize == head) {
                    Some(i) => {
                        let block = &dense.blocks.data[i * d_k * d_k..(i + 1) * d_k * d_k];
                        s.copy_from_slice(&product(block, s, d_k, d_v));
                    }
                    None => s.fill(R::ZERO),
                }
            }
        }
    }
}
