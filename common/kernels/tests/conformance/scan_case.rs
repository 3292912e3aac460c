//! Cases of the recurrences: what they are made of and how they run on a backend.

use std::ops::Range;

use hypic_kernels::{
    Backend, ChannelGate, Cols, Decay, DeviceTensor, Fold, Form, RopeSpec, ScanInputs, ScanShape, Step, Turn, Write,
};
use hypic_state::{ComposeRule, HostTensor, RecurrentPart, Transition};

use crate::scan_inputs::{Decays, Kind, LOWER, Writes};
use crate::support::{dirty, values};

/// Bounds of limited steps.
const LIMIT: (f32, f32) = (0.05, 0.9);

#[derive(Clone, Debug)]
pub enum Do {
    Rows(Range<usize>),
    /// Rows that belong to the sequence's body.
    Body(Range<usize>),
    /// Over an entry, turned by so many positions.
    Jump(ComposeRule, usize, Option<i64>),
    Save,
}

/// An entry's part in portable form.
pub struct Entry {
    pub transition: Transition<HostTensor>,
    pub state: HostTensor,
}

/// Sequences over one batch of inputs. A call folds some rows of each.
pub struct Case {
    pub shape: ScanShape,
    pub kind: Kind,
    pub unit: bool,
    pub q_scale: f32,
    /// `[rows, q_col | q | k | v | more]`.
    pub qkv: HostTensor,
    pub q_col: usize,
    /// `[rows, b_col | b | x | more]`.
    pub gates: HostTensor,
    pub b_col: usize,
    pub a_log: HostTensor,
    pub bias: HostTensor,
    pub fixed: HostTensor,
    pub skip: Option<HostTensor>,
    pub states: Vec<HostTensor>,
    pub entries: Vec<Entry>,
    /// The rotation of turned jumps.
    pub rope: Option<RopeSpec>,
    /// Per call, per sequence.
    pub calls: Vec<Vec<Vec<Do>>>,
}

/// What a body became.
pub struct Body {
    pub form: Form,
    /// Heads with an operator.
    pub kept: Vec<u32>,
    /// Numbers of all heads, omitted operators being zero.
    pub transition: Vec<f64>,
    pub state: Vec<f64>,
}

/// Per sequence: outputs of its rows, states left and saved, the body.
pub struct Outcome {
    pub outs: Vec<Vec<f64>>,
    pub states: Vec<Vec<f64>>,
    pub saves: Vec<Vec<f64>>,
    pub bodies: Vec<Option<Body>>,
}

impl Case {
    /// The form of its operators.
    pub fn form(&self) -> Form {
        match (self.kind.writes.delta(), self.kind.decays.by_channel()) {
            (true, _) => Form::Dense,
            (false, true) => Form::Diagonal,
            (false, false) => Form::Scalar,
        }
    }
}

/// An operator with all heads, and which were kept.
fn expand(t: &Transition<HostTensor>, shape: ScanShape) -> (Form, Vec<u32>, Vec<f64>) {
    let ScanShape { heads, d_k, .. } = shape;
    let numbers = t.tensor().to_f64();
    match t {
        Transition::Scalar(t) => {
            assert_eq!(t.shape(), [heads], "shape of the operator");
            (Form::Scalar, (0..heads as u32).collect(), numbers)
        }
        Transition::Diagonal(t) => {
            assert_eq!(t.shape(), [heads, d_k], "shape of the operator");
            (Form::Diagonal, (0..heads as u32).collect(), numbers)
        }
        Transition::Dense(dense) => {
            assert_eq!(dense.heads, heads, "heads of the operator");
            assert_eq!(dense.blocks.shape(), [dense.kept.len(), d_k, d_k], "shape of the operator");
            let mut all = vec![0.0; heads * d_k * d_k];
            for (i, &head) in dense.kept.iter().enumerate() {
                all[head as usize * d_k * d_k..][..d_k * d_k].copy_from_slice(&numbers[i * d_k * d_k..][..d_k * d_k]);
            }
            (Form::Dense, dense.kept.clone(), all)
        }
    }
}

/// A case's inputs on a backend.
struct Uploaded<B: Backend> {
    qkv: B::Tensor,
    gates: B::Tensor,
    a_log: B::Tensor,
    bias: B::Tensor,
    fixed: B::Tensor,
    skip: Option<B::Tensor>,
}

impl<B: Backend> Uploaded<B> {
    fn new(b: &B, case: &Case) -> Self {
        let [qkv, gates, a_log, bias, fixed] =
            [&case.qkv, &case.gates, &case.a_log, &case.bias, &case.fixed].map(|t| b.upload(t));
        Uploaded { qkv, gates, a_log, bias, fixed, skip: case.skip.as_ref().map(|t| b.upload(t)) }
    }

    fn inputs(&self, case: &Case) -> ScanInputs<'_, B> {
        let keys = case.shape.key_heads * case.shape.d_k;
        let qkv = |col: usize| Cols::new(&self.qkv, case.q_col + col);
        let (a_log, bias) = (&self.a_log, &self.bias);
        let x = Cols::new(&self.gates, case.b_col + case.shape.heads);
        let head = |limit| Decay::Head { x, a_log, dt_bias: bias, limit };
        ScanInputs {
            q: qkv(0),
            k: qkv(keys),
            v: qkv(2 * keys),
            unit: case.unit,
            q_scale: case.q_scale,
            decay: match case.kind.decays {
                Decays::None => Decay::None,
                Decays::Fixed => Decay::Fixed(&self.fixed),
                Decays::Head => head((0.0, f32::INFINITY)),
                Decays::HeadLimited => head(LIMIT),
                Decays::Channel => Decay::Channel { x, gate: ChannelGate::Log },
                Decays::ChannelSoftplus => Decay::Channel { x, gate: ChannelGate::Softplus { a_log, bias } },
                Decays::ChannelBounded => {
                    Decay::Channel { x, gate: ChannelGate::Bounded { a_log, bias, lower: LOWER } }
                }
            },
            write: match case.kind.writes {
                Writes::Plain => Write::Plain,
                Writes::Step => Write::Step,
                Writes::Delta | Writes::DeltaNegative => {
                    Write::Delta { b: Cols::new(&self.gates, case.b_col), scale: case.kind.writes.scale() }
                }
            },
            skip: self.skip.as_ref(),
        }
    }
}

pub fn run<B: Backend>(b: &B, case: &Case) -> Outcome {
    let ScanShape { heads, d_k, d_v, .. } = case.shape;
    let uploaded = Uploaded::new(b, case);
    let rope = case.rope.as_ref().map(|spec| b.rope(spec));
    let part = |e: &Entry| RecurrentPart::<B> {
        transition: e.transition.map(|t| b.upload(t)),
        state: b.upload(&e.state),
        tail: None,
    };
    let parts: Vec<_> = case.entries.iter().map(part).collect();
    let mut states: Vec<_> = case.states.iter().map(|s| b.upload(s)).collect();
    let sequences = states.len();
    let mut carries: Vec<Option<B::Carry>> = (0..sequences).map(|_| None).collect();
    let mut after_body: Vec<_> = (0..sequences).map(|_| dirty(b)).collect();
    let mut outs = vec![Vec::new(); sequences];
    let mut saved = vec![Vec::new(); sequences];
    for call in &case.calls {
        let count = |steps: &Vec<Do>| steps.iter().filter(|s| matches!(s, Do::Save)).count();
        let mut saves: Vec<Vec<_>> = call.iter().map(|s| (0..count(s)).map(|_| dirty(b)).collect()).collect();
        let mut folds = Vec::new();
        let memory = states.iter_mut().zip(&mut carries).zip(&mut after_body).zip(&mut saves);
        for (steps, (((state, carry), after), saves)) in call.iter().zip(memory) {
            let mut saves = saves.iter_mut();
            let mut body = Some((carry, after));
            let mut walk = Vec::new();
            for step in steps {
                match step {
                    Do::Rows(rows) => walk.push(Step::Rows { rows: rows.clone(), carry: None }),
                    Do::Body(rows) => {
                        let (carry, after) = body.take().expect("one stretch of a body in a call");
                        let carry = carry.get_or_insert_with(|| b.carry(case.shape, case.form()));
                        walk.push(Step::Rows { rows: rows.clone(), carry: Some(carry) });
                        walk.push(Step::Save(after));
                    }
                    Do::Jump(rule, entry, by) => {
                        let turn = by.map(|by| Turn { rope: rope.as_ref().expect("a case with a rotation"), by });
                        walk.push(Step::Jump { rule: *rule, part: &parts[*entry], turn });
                    }
                    Do::Save => walk.push(Step::Save(saves.next().expect("one tensor per save"))),
                }
            }
            folds.push(Fold { state, steps: walk });
        }
        let mut out = dirty(b);
        b.scan(case.shape, uploaded.inputs(case), &mut folds, &mut out);
        drop(folds);
        assert_eq!(out.shape(), [uploaded.qkv.rows(), heads * d_v]);
        let (out, width) = (values(b, &out), heads * d_v);
        for (seq, steps) in call.iter().enumerate() {
            for step in steps {
                if let Do::Rows(rows) | Do::Body(rows) = step {
                    outs[seq].extend_from_slice(&out[rows.start * width..rows.end * width]);
                }
            }
            saved[seq].extend(saves[seq].iter().flat_map(|t| values(b, t)));
        }
    }
    let bodies = carries.into_iter().zip(&after_body).map(|(carry, after)| {
        let (transition, state) = b.finish(carry?, after);
        assert_eq!(state.shape(), [heads, d_k, d_v], "shape of the zero-start state");
        let (form, kept, transition) = expand(&transition.map(|t| b.download(t)), case.shape);
        Some(Body { form, kept, transition, state: values(b, &state) })
    });
    Outcome { outs, bodies: bodies.collect(), states: states.iter().map(|t| values(b, t)).collect(), saves: saved }
}

/// What is left of the best-kept channel's earlier state behind the body of sequence `seq` if nothing is corrected: the
/// size of the terms whose difference the body's operator is.
pub fn decay_of_body(case: &Case, seq: usize) -> f64 {
    let ScanShape { heads, d_k, .. } = case.shape;
    let per_head = if case.kind.decays.by_channel() { d_k } else { 1 };
    let (gates, width) = (case.gates.to_f64(), case.gates.shape()[1]);
    let (a_log, bias, fixed) = (case.a_log.to_f64(), case.bias.to_f64(), case.fixed.to_f64());
    let softplus = |x: f64| x.max(0.0) + (-x.abs()).exp().ln_1p();
    let mut g = vec![0.0; heads * per_head];
    for step in case.calls.iter().flat_map(|call| &call[seq]) {
        let Do::Body(rows) = step else { continue };
        for (row, i) in rows.clone().flat_map(|row| (0..heads * per_head).map(move |i| (row, i))) {
            let (x, rate) = (gates[row * width + case.b_col + heads + i], a_log[i / per_head].exp());
            let (least, most) = (f64::from(LIMIT.0), f64::from(LIMIT.1));
            g[i] += match case.kind.decays {
                Decays::None => 0.0,
                Decays::Fixed => fixed[i],
                Decays::HeadLimited => -rate * softplus(x + bias[i]).clamp(least, most),
                Decays::Head | Decays::ChannelSoftplus => -rate * softplus(x + bias[i]),
                Decays::Channel => x,
                Decays::ChannelBounded => f64::from(LOWER) / (1.0 + (-rate * (x + bias[i])).exp()),
            };
        }
    }
    g.into_iter().map(f64::exp).fold(0.0, f64::max)
}
