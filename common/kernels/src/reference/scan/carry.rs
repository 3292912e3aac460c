//! The operator of a body while its rows are being folded, in the form that its layer's operators have.
//!
//! Scalar and diagonal ones are sums of log decays; a dense one is the product of the tokens' matrices. The zero-start
//! state is a recurrence of its own beside the sequence's.

use hypic_state::{DECAYED, Dense, Transition};

use super::{LogDecay, Token, advance};
use crate::reference::check;
use crate::reference::real::Real;
use crate::reference::tensor::RefTensor;
use crate::scan_checks::CarryOf;
use crate::{Form, ScanShape};

/// The operator of a body, and the state that its rows so far end in when they start from zero.
pub struct RefCarry<R> {
    operator: Operator<R>,
    /// `[heads, d_k, d_v]`.
    zero_start: RefTensor<R>,
}

enum Operator<R> {
    /// Per head, the sum of the tokens' log decays.
    Scalar(Vec<f64>),
    /// Per head and key channel.
    Diagonal(Vec<f64>),
    /// `[heads, d_k, d_k]`.
    Dense(RefTensor<R>),
}

impl<R: Real> RefCarry<R> {
    pub(in crate::reference) fn new(shape: ScanShape, form: Form) -> Self {
        let ScanShape { heads, d_k, d_v, .. } = shape;
        let operator = match form {
            Form::Scalar => Operator::Scalar(vec![0.0; heads]),
            Form::Diagonal => Operator::Diagonal(vec![0.0; heads * d_k]),
            Form::Dense => {
                let mut identity = RefTensor::filled(&[heads, d_k, d_k], R::ZERO);
                for head in identity.data.chunks_mut(d_k * d_k) {
                    head.iter_mut().step_by(d_k + 1).for_each(|x| *x = R::ONE);
                }
                Operator::Dense(identity)
            }
        };
        RefCarry { operator, zero_start: RefTensor::filled(&[heads, d_k, d_v], R::ZERO) }
    }

    /// What it was made for.
    pub(super) fn of(&self) -> CarryOf {
        let [heads, d_k, d_v] = self.zero_start.shape[..] else { unreachable!("a state has three axes") };
        let form = match self.operator {
            Operator::Scalar(_) => Form::Scalar,
            Operator::Diagonal(_) => Form::Diagonal,
            Operator::Dense(_) => Form::Dense,
        };
        CarryOf { heads, d_k, d_v, form }
    }

    /// `T <- A T`, and the zero-start state like any state.
    pub(super) fn advance(&mut self, head: usize, token: &Token<R>) {
        let (d_k, d_v) = (token.k.len(), token.v.len());
        advance(&mut self.zero_start.data[head * d_k * d_v..(head + 1) * d_k * d_v], token, &token.v);
        match (&mut self.operator, &token.log) {
            (Operator::Scalar(sums), LogDecay::Head(log)) => sums[head] += log.to_f64(),
            (Operator::Diagonal(sums), LogDecay::Channel(logs)) => {
                for (sum, log) in sums[head * d_k..(head + 1) * d_k].iter_mut().zip(logs) {
                    *sum += log.to_f64();
                }
            }
            // A T is what the token makes of the columns of T when it writes nothing of its own.
            (Operator::Dense(t), _) => {
                advance(&mut t.data[head * d_k * d_k..(head + 1) * d_k * d_k], token, &vec![R::ZERO; d_k]);
            }
            (Operator::Scalar(_) | Operator::Diagonal(_), _) => unreachable!("the carry's form was checked"),
        }
    }

    /// The operator, a dense one without decayed heads, and the zero-start state.
    pub(in crate::reference) fn finish(self, state: &RefTensor<R>) -> (Transition<RefTensor<R>>, RefTensor<R>) {
        check::shape("finish", "state", state, &self.zero_start.shape);
        let [heads, d_k, _] = self.zero_start.shape[..] else { unreachable!("a state has three axes") };
        let exp = |sums: Vec<f64>| sums.into_iter().map(|g| R::from_f64(g.exp())).collect();
        let transition = match self.operator {
            Operator::Scalar(sums) => Transition::Scalar(RefTensor::new(&[heads], exp(sums))),
            Operator::Diagonal(sums) => Transition::Diagonal(RefTensor::new(&[heads, d_k], exp(sums))),
            Operator::Dense(t) => Transition::Dense(without_decayed(&t)),
        };
        (transition, self.zero_start)
    }
}

fn without_decayed<R: Real>(t: &RefTensor<R>) -> Dense<RefTensor<R>> {
    let [heads, d_k, _] = t.shape[..] else { unreachable!("an operator has three axes") };
    let mut kept = Vec::new();
    let mut blocks = Vec::new();
    for (head, block) in t.data.chunks(d_k * d_k).enumerate() {
        let square: f64 = block.iter().map(|x| x.to_f64() * x.to_f64()).sum();
        if (square / d_k as f64).sqrt() > DECAYED {
            kept.push(head as u32);
            blocks.extend_from_slice(block);
        }
    }
    let blocks = RefTensor::new(&[kept.len(), d_k, d_k], blocks);
    Dense { heads, kept, blocks }
}
