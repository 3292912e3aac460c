//! Cases of the gated-delta scan: what they are made of and how they run on a backend.

use std::ops::Range;

use hypic_kernels::{Backend, Cols, DeltaInputs, DeltaShape, DeviceTensor, Fold, Step};
use hypic_state::{ComposeRule, HostTensor, RecurrentPart, Transition};

use crate::support::{Rng, dirty, values};

#[derive(Clone, Debug)]
pub enum Do {
    Rows(Range<usize>),
    /// Rows that belong to the sequence's body.
    Body(Range<usize>),
    Jump(ComposeRule, usize),
    Save,
}

/// An entry's part in portable form.
pub struct Entry {
    pub transition: Transition<HostTensor>,
    pub state: HostTensor,
}

/// Sequences over one batch of inputs. A call folds some rows of each.
pub struct Case {
    pub shape: DeltaShape,
    pub qkv: HostTensor,
    /// `[rows, b_col | b | a | more]`.
    pub gates: HostTensor,
    pub b_col: usize,
    pub a_log: HostTensor,
    pub dt_bias: HostTensor,
    pub states: Vec<HostTensor>,
    pub entries: Vec<Entry>,
    /// Per call, per sequence.
    pub calls: Vec<Vec<Vec<Do>>>,
}

/// What a body became.
pub struct Body {
    pub kept: Vec<u32>,
    /// `[heads, d_k, d_k]`, omitted operators being zero.
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

/// An operator with all heads, and which were kept.
pub fn expand(t: &Transition<HostTensor>, d_k: usize) -> (Vec<u32>, Vec<f64>) {
    let Transition::Dense(dense) = t else { panic!("a gated-delta body has a dense operator") };
    assert_eq!(dense.blocks.shape(), [dense.kept.len(), d_k, d_k], "shape of the operator");
    let mut all = vec![0.0; dense.heads * d_k * d_k];
    let blocks = dense.blocks.to_f64();
    for (i, &head) in dense.kept.iter().enumerate() {
        all[head as usize * d_k * d_k..][..d_k * d_k].copy_from_slice(&blocks[i * d_k * d_k..][..d_k * d_k]);
    }
    (dense.kept.clone(), all)
}

pub fn run<B: Backend>(b: &B, case: &Case) -> Outcome {
    let DeltaShape { heads, d_k, d_v, .. } = case.shape;
    let (qkv, gates) = (b.upload(&case.qkv), b.upload(&case.gates));
    let (a_log, dt_bias) = (b.upload(&case.a_log), b.upload(&case.dt_bias));
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
                        let carry = carry.get_or_insert_with(|| b.carry(heads, d_k, d_v));
                        walk.push(Step::Rows { rows: rows.clone(), carry: Some(carry) });
                        walk.push(Step::Save(after));
                    }
                    Do::Jump(rule, entry) => walk.push(Step::Jump { rule: *rule, part: &parts[*entry] }),
                    Do::Save => walk.push(Step::Save(saves.next().expect("one tensor per save"))),
                }
            }
            folds.push(Fold { state, steps: walk });
        }
        let inputs = DeltaInputs {
            qkv: &qkv,
            b: Cols::new(&gates, case.b_col),
            a: Cols::new(&gates, case.b_col + heads),
            a_log: &a_log,
            dt_bias: &dt_bias,
        };
        let mut out = dirty(b);
        b.gated_delta(case.shape, inputs, &mut folds, &mut out);
        drop(folds);
        assert_eq!(out.shape(), [qkv.rows(), heads * d_v]);
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
        let (kept, transition) = expand(&transition.map(|t| b.download(t)), d_k);
        Some(Body { kept, transition, state: values(b, &state) })
    });
    Outcome { outs, bodies: bodies.collect(), states: states.iter().map(|t| values(b, t)).collect(), saves: saved }
}

/// What is left of the best-kept head's earlier state behind the body of sequence `seq` if nothing is corrected: the
/// size of the terms whose difference the body's operator is.
pub fn decay_of_body(case: &Case, seq: usize) -> f64 {
    let heads = case.shape.heads;
    let (gates, width) = (case.gates.to_f64(), case.gates.shape()[1]);
    let (a_log, dt_bias) = (case.a_log.to_f64(), case.dt_bias.to_f64());
    let mut g = vec![0.0; heads];
    for step in case.calls.iter().flat_map(|call| &call[seq]) {
        let Do::Body(rows) = step else { continue };
        for (row, head) in rows.clone().flat_map(|row| (0..heads).map(move |head| (row, head))) {
            let x = gates[row * width + case.b_col + heads + head] + dt_bias[head];
            g[head] -= a_log[head].exp() * (x.max(0.0) + (-x.abs()).exp().ln_1p());
        }
    }
    g.into_iter().map(f64::exp).fold(0.0, f64::max)
}

/// How strongly heads forget.
#[derive(Clone, Copy, Debug)]
pub enum Decay {
    /// Nothing at all.
    None,
    /// As trained models do.
    Mild,
    /// Everything within a few tokens.
    Strong,
    /// Every head and token something else, up to exp(-1000).
    Mixed,
}

/// How far a token is corrected.
#[derive(Clone, Copy, Debug)]
pub enum Beta {
    Any,
    /// The largest: 1, or 2 where that is allowed.
    Full,
    /// Half of the largest.
    Half,
}

/// How alike the keys are.
#[derive(Clone, Copy, Debug)]
pub enum Keys {
    Any,
    Alike,
    Identical,
}

pub const DECAYS: [Decay; 4] = [Decay::None, Decay::Mild, Decay::Strong, Decay::Mixed];
pub const BETAS: [Beta; 3] = [Beta::Any, Beta::Full, Beta::Half];
pub const KEYS: [Keys; 3] = [Keys::Any, Keys::Alike, Keys::Identical];

/// Inputs for `rows` rows and `sequences` sequences; no calls yet.
pub fn inputs(
    rng: &mut Rng,
    shape: DeltaShape,
    rows: usize,
    sequences: usize,
    (decay, beta, keys): (Decay, Beta, Keys),
) -> Case {
    let DeltaShape { key_heads, heads, d_k, d_v, .. } = shape;
    let channels = shape.channels();
    let mut qkv = rng.tensor(&[rows, channels], 1.0).to_f32();
    let common = rng.tensor(&[key_heads * d_k], 1.0).to_f32();
    for row in qkv.chunks_mut(channels) {
        for (k, same) in row[key_heads * d_k..2 * key_heads * d_k].iter_mut().zip(&common) {
            *k = match keys {
                Keys::Any => *k,
                Keys::Alike => same + 0.1 * *k,
                Keys::Identical => *same,
            };
        }
    }

    let (b_col, behind) = (rng.below(5), rng.below(3));
    let width = b_col + 2 * heads + behind;
    let mut gates = rng.tensor(&[rows, width], 1.0).to_f32();
    for row in gates.chunks_mut(width.max(1)) {
        for b in &mut row[b_col..b_col + heads] {
            *b = match beta {
                Beta::Any => 2.0 * *b,
                Beta::Full => 12.0 + b.abs(),
                Beta::Half => 0.01 * *b,
            };
        }
        for a in &mut row[b_col + heads..b_col + 2 * heads] {
            *a = match decay {
                Decay::Mixed => 12.0 * *a,
                _ => *a,
            };
        }
    }
    let mut a_log = |_| match decay {
        Decay::None => -90.0,
        Decay::Mild => rng.uniform(-3.5, -0.5) as f32,
        Decay::Strong => rng.uniform(1.0, 3.0) as f32,
        Decay::Mixed => rng.uniform(-6.0, 4.0) as f32,
    };
    let a_log: Vec<f32> = (0..heads).map(&mut a_log).collect();
    Case {
        shape,
        qkv: HostTensor::from_f32([rows, channels], &qkv),
        gates: HostTensor::from_f32([rows, width], &gates),
        b_col,
        a_log: HostTensor::from_f32([heads], &a_log),
        dt_bias: rng.tensor(&[heads], 0.5),
        states: (0..sequences).map(|_| rng.tensor(&[heads, d_k, d_v], 0.7)).collect(),
        entries: Vec::new(),
        calls: Vec::new(),
    }
}
