//! Cases of span attention: what they are made of and how they run on a backend.

use std::ops::Range;

use hypic_kernels::{AttentionRows, AttentionShape, Backend, Cols, DeviceTensor, KvShape, Positions, RopeSpec, Span};
use hypic_state::{DType, HostKv, HostTensor};

use crate::support::{Rng, dirty, values};

#[derive(Clone, Debug)]
pub struct SpanCase {
    pub store: usize,
    pub range: Range<usize>,
    pub origin: i64,
    pub from_row: usize,
}

#[derive(Clone, Debug)]
pub struct Sequence {
    pub rows: Range<usize>,
    pub positions: Vec<i64>,
    pub ntk_alpha: f64,
    pub spans: Vec<SpanCase>,
    /// Tokens of `own` before this batch's.
    pub earlier: usize,
}

pub struct Case {
    pub shape: AttentionShape,
    pub rope: Option<RopeSpec>,
    pub q: HostTensor,
    pub q_col: usize,
    pub stores: Vec<HostKv>,
    pub own: Vec<HostKv>,
    pub sequences: Vec<Sequence>,
}

/// The outputs of each sequence's rows.
pub fn run<B: Backend>(b: &B, case: &Case) -> Vec<Vec<f64>> {
    let kv = case.shape.kv;
    let stores: Vec<_> = case.stores.iter().map(|s| b.kv_upload(s, kv)).collect();
    let own: Vec<_> = case.own.iter().map(|s| b.kv_upload(s, kv)).collect();
    let rope = case.rope.as_ref().map(|spec| b.rope(spec));
    let q = b.upload(&case.q);
    let mut sequences = Vec::new();
    for (sequence, own) in case.sequences.iter().zip(&own) {
        let span = |s: &SpanCase| Span {
            kv: &stores[s.store],
            range: s.range.clone(),
            origin: s.origin,
            from_row: s.from_row,
        };
        sequences.push(AttentionRows {
            rows: sequence.rows.clone(),
            positions: Positions { at: &sequence.positions, ntk_alpha: sequence.ntk_alpha },
            spans: sequence.spans.iter().map(span).collect(),
            own,
        });
    }
    let mut out = dirty(b);
    b.attention(case.shape, rope.as_ref(), Cols::new(&q, case.q_col), &sequences, &mut out);
    let width = case.shape.heads * kv.d_v;
    assert_eq!(out.shape(), [q.rows(), width]);
    let out = values(b, &out);
    let rows = case.sequences.iter().map(|s| out[s.rows.start * width..s.rows.end * width].to_vec());
    rows.collect()
}

pub fn store(rng: &mut Rng, kv: KvShape, tokens: usize) -> HostKv {
    let d_v = kv.stored().d_v;
    HostKv { k: rng.tensor(&[tokens, kv.heads, kv.d_k], 1.0), v: rng.tensor(&[tokens, kv.heads, d_v], 1.0) }
}

/// Frequencies as models have them, over a part of the head.
pub fn rope_spec(rng: &mut Rng, d_k: usize) -> Option<RopeSpec> {
    let pairs = rng.below(d_k / 2 + 1);
    if pairs == 0 {
        return None;
    }
    let spec = RopeSpec {
        offset: rng.below(d_k - 2 * pairs + 1),
        inv_freq: (0..pairs).map(|i| 10000f64.powf(-(i as f64) / pairs as f64)).collect(),
        interleaved: rng.chance(0.5),
        scale: rng.pick(&[1.0, 1.0, 1.2]),
    };
    Some(spec)
}

pub fn random_shape(rng: &mut Rng) -> AttentionShape {
    let kv_heads = rng.between(1, 3);
    let d_k = rng.pick(&[2, 6, 16, 24, 64]);
    let (shared, d_v) = (rng.chance(0.3), rng.pick(&[1, 5, 16, 20, 64]));
    let d_v = if shared { d_v.min(d_k) } else { d_v };
    let kv = KvShape { heads: kv_heads, d_k, d_v, shared, dtype: rng.pick(&[DType::F32, DType::Bf16]) };
    AttentionShape { heads: kv_heads * rng.between(1, 4), kv, scale: (d_k as f32).powf(-0.5) }
}

pub fn queries(rng: &mut Rng, shape: AttentionShape, rows: usize) -> (HostTensor, usize) {
    let (col, behind) = (rng.below(7), rng.below(4));
    (rng.tensor(&[rows, col + shape.heads * shape.kv.d_k + behind], 1.0), col)
}

/// One sequence of `rows` rows from position `first` on, behind `earlier` own tokens.
pub fn simple(rng: &mut Rng, shape: AttentionShape, rows: usize, earlier: usize, first: i64) -> Case {
    let (q, q_col) = queries(rng, shape, rows);
    let positions = (first..first + rows as i64).collect();
    Case {
        shape,
        rope: rope_spec(rng, shape.kv.d_k),
        q,
        q_col,
        stores: Vec::new(),
        own: vec![store(rng, shape.kv, earlier + rows)],
        sequences: vec![Sequence { rows: 0..rows, positions, ntk_alpha: 1.0, spans: Vec::new(), earlier }],
    }
}
