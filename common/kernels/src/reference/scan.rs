//! Recurrences, a token at a time by their definition, and jumps over entries.
//!
//! Per token and head: the state decays, the token writes, the output is read. It owns no state; operators of bodies
//! are its [`RefCarry`]'s. Shapes and kinds that do not fit together panic, see [`scan_checks`].

mod carry;
mod jump;

use super::real::Real;
use super::tensor::RefTensor;
use super::{Columns, Reference, check};
use crate::scan_checks;
use crate::{ChannelGate, Cols, Decay, DeviceTensor, Fold, ScanInputs, ScanShape, Step, Write};

pub use carry::RefCarry;
use jump::jump;

/// Inside the root of the l2-norm of q and k.
const L2_EPS: f64 = 1e-6;

/// The log decay of a token.
enum LogDecay<R> {
    /// One for all of a head.
    Head(R),
    /// One per key channel.
    Channel(Vec<R>),
}

/// One token of one head, ready for the recurrence.
struct Token<R> {
    q: Vec<R>,
    k: Vec<R>,
    /// What is written: v, or v times the step.
    v: Vec<R>,
    log: LogDecay<R>,
    /// Of a delta rule.
    beta: Option<R>,
}

/// The inputs, checked, as columns.
struct Inputs<'a, R: Real> {
    shape: ScanShape,
    given: &'a ScanInputs<'a, Reference<R>>,
    q: Columns<'a, R>,
    k: Columns<'a, R>,
    v: Columns<'a, R>,
    /// The numbers that decays are made of.
    x: Option<Columns<'a, R>>,
    /// The numbers that beta is made of.
    b: Option<Columns<'a, R>>,
}

impl<'a, R: Real> Inputs<'a, R> {
    fn new(shape: ScanShape, given: &'a ScanInputs<'a, Reference<R>>) -> Self {
        let ScanShape { key_heads, heads, d_k, d_v } = shape;
        let cols = |name: &str, cols: Cols<'a, Reference<R>>, width: usize| check::cols("scan", name, cols, width);
        Inputs {
            shape,
            given,
            q: cols("q", given.q, key_heads * d_k),
            k: cols("k", given.k, key_heads * d_k),
            v: cols("v", given.v, heads * d_v),
            x: match given.decay {
                Decay::None | Decay::Fixed(_) => None,
                Decay::Head { x, .. } => Some(cols("decay", x, heads)),
                Decay::Channel { x, .. } => Some(cols("decay", x, heads * d_k)),
            },
            b: match given.write {
                Write::Plain | Write::Step => None,
                Write::Delta { b, .. } => Some(cols("b", b, heads)),
            },
        }
    }

    /// v of a token as it comes in.
    fn value(&self, row: usize, head: usize) -> &'a [R] {
        let d_v = self.shape.d_v;
        &self.v.row(row)[head * d_v..(head + 1) * d_v]
    }

    fn token(&self, row: usize, head: usize) -> Token<R> {
        let ScanShape { key_heads, heads, d_k, .. } = self.shape;
        let key_head = head / (heads / key_heads);
        let key = |from: &Columns<'a, R>| {
            let x = &from.row(row)[key_head * d_k..(key_head + 1) * d_k];
            if self.given.unit { unit(x) } else { x.to_vec() }
        };
        let q_scale = R::from_f64(f64::from(self.given.q_scale));
        let step = self.step(row, head);
        let factor = if matches!(self.given.write, Write::Step) { step } else { R::ONE };
        Token {
            q: key(&self.q).into_iter().map(|x| x * q_scale).collect(),
            k: key(&self.k),
            v: self.value(row, head).iter().map(|v| *v * factor).collect(),
            log: self.log_decay(row, head, step),
            beta: self.beta(row, head),
        }
    }

    /// The step of [`Decay::Head`]; 1 where there is none.
    fn step(&self, row: usize, head: usize) -> R {
        let (Decay::Head { dt_bias, limit, .. }, Some(x)) = (&self.given.decay, &self.x) else { return R::ONE };
        let (least, most) = (R::from_f64(f64::from(limit.0)), R::from_f64(f64::from(limit.1)));
        let step = (x.row(row)[head] + dt_bias.data[head]).softplus();
        if step < least {
            least
        } else if step > most {
            most
        } else {
            step
        }
    }

    fn log_decay(&self, row: usize, head: usize, step: R) -> LogDecay<R> {
        match &self.given.decay {
            Decay::None => LogDecay::Head(R::ZERO),
            Decay::Fixed(log) => LogDecay::Head(log.data[head]),
            Decay::Head { a_log, .. } => LogDecay::Head(-(a_log.data[head].exp() * step)),
            Decay::Channel { gate, .. } => {
                let x = self.x.as_ref().expect("decays of channels are made of numbers").row(row);
                let d_k = self.shape.d_k;
                let channels = head * d_k..(head + 1) * d_k;
                LogDecay::Channel(channels.map(|c| channel_log(gate, x[c], head, c)).collect())
            }
        }
    }

    fn beta(&self, row: usize, head: usize) -> Option<R> {
        let (Write::Delta { scale, .. }, Some(b)) = (&self.given.write, &self.b) else { return None };
        Some(R::from_f64(f64::from(*scale)) * b.row(row)[head].sigmoid())
    }
}

/// The log decay of channel `c`, counted through all heads.
fn channel_log<R: Real>(gate: &ChannelGate<'_, Reference<R>>, x: R, head: usize, c: usize) -> R {
    match gate {
        ChannelGate::Log => x,
        ChannelGate::Softplus { a_log, bias } => -(a_log.data[head].exp() * (x + bias.data[c]).softplus()),
        ChannelGate::Bounded { a_log, bias, lower } => {
            R::from_f64(f64::from(*lower)) * (a_log.data[head].exp() * (x + bias.data[c])).sigmoid()
        }
    }
}

/// `x / sqrt(sum x^2 + eps)`.
fn unit<R: Real>(x: &[R]) -> Vec<R> {
    let sum: R = x.iter().map(|v| *v * *v).sum();
    let root = (sum + R::from_f64(L2_EPS)).sqrt();
    x.iter().map(|v| *v / root).collect()
}

pub(super) fn scan<R: Real>(
    shape: ScanShape,
    inputs: ScanInputs<'_, Reference<R>>,
    folds: &mut [Fold<'_, Reference<R>>],
    out: &mut RefTensor<R>,
) {
    let ScanShape { heads, d_k, d_v, .. } = shape;
    scan_checks::check(&shape, &inputs, folds, RefCarry::of);
    let skip = inputs.skip;
    out.resize(&[inputs.v.mat.rows(), heads * d_v]);
    let inputs = Inputs::new(shape, &inputs);
    for fold in folds {
        for step in &mut fold.steps {
            match step {
                Step::Rows { rows, carry } => {
                    for row in rows.clone() {
                        for head in 0..heads {
                            let token = inputs.token(row, head);
                            let state = &mut fold.state.data[head * d_k * d_v..(head + 1) * d_k * d_v];
                            advance(state, &token, &token.v);
                            let out = &mut out.row_mut(row)[head * d_v..(head + 1) * d_v];
                            read(state, &token.q, out);
                            if let Some(skip) = skip {
                                for (o, v) in out.iter_mut().zip(inputs.value(row, head)) {
                                    *o += skip.data[head] * *v;
                                }
                            }
                            if let Some(carry) = carry {
                                carry.advance(head, &token);
                            }
                        }
                    }
                }
                Step::Jump { rule, part, turn } => jump(fold.state, *rule, part, *turn),
                Step::Save(to) => to.copy_from(fold.state),
            }
        }
    }
}

/// `S <- decay S`, then `S <- S + k v^T`, or `S <- S + beta k (v - S^T k)^T`.
fn advance<R: Real>(state: &mut [R], token: &Token<R>, v: &[R]) {
    let width = v.len();
    let scale = |part: &mut [R], decay: R| part.iter_mut().for_each(|s| *s = *s * decay);
    match &token.log {
        LogDecay::Head(log) => scale(state, log.exp()),
        LogDecay::Channel(logs) => {
            for (row, log) in state.chunks_mut(width).zip(logs) {
                scale(row, log.exp());
            }
        }
    }
    for (j, v) in v.iter().enumerate() {
        let written = match token.beta {
            None => *v,
            Some(beta) => {
                let predicted: R = token.k.iter().enumerate().map(|(i, k)| *k * state[i * width + j]).sum();
                beta * (*v - predicted)
            }
        };
        for (i, k) in token.k.iter().enumerate() {
            state[i * width + j] += *k * written;
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
