//! Attention by its definition: all scores of a row, their softmax, the weighted sum of the values.

use super::kv::{RefKv, RefRope};
use super::real::Real;
use super::tensor::RefTensor;
use super::{Columns, Reference, check};
use crate::{AttentionRows, AttentionShape};

pub(super) fn attention<R: Real>(
    shape: AttentionShape,
    rope: Option<&RefRope<R>>,
    q: Columns<'_, R>,
    sequences: &[AttentionRows<'_, Reference<R>>],
    out: &mut RefTensor<R>,
) {
    let AttentionShape { heads, kv, .. } = shape;
    assert!(kv.heads > 0 && heads % kv.heads == 0, "attention: {heads} heads are no multiple of {}", kv.heads);
    assert!(!kv.shared || kv.d_v <= kv.d_k, "attention: values of {} numbers of keys of {}", kv.d_v, kv.d_k);
    let rows = q.mat.shape[0];
    out.resize(&[rows, heads * kv.d_v]);
    for sequence in sequences {
        check_sequence(shape, sequence, rows);
        let rope = rope.map(|rope| rope.ntk(sequence.positions.ntk_alpha));
        for (index, row) in sequence.rows.clone().enumerate() {
            for head in 0..heads {
                let query = &q.row(row)[head * kv.d_k..(head + 1) * kv.d_k];
                let (scores, values) = visible(shape, rope.as_ref(), query, head, sequence, index);
                let o = &mut out.row_mut(row)[head * kv.d_v..(head + 1) * kv.d_v];
                weigh(&scores, &values, o);
            }
        }
    }
}

fn check_sequence<R: Real>(shape: AttentionShape, sequence: &AttentionRows<'_, Reference<R>>, rows: usize) {
    const OP: &str = "attention";
    let AttentionRows { rows: range, positions, spans, own } = sequence;
    check::range(OP, "rows", range, rows);
    assert_eq!(positions.at.len(), range.len(), "{OP}: {} positions for rows {range:?}", positions.at.len());
    let stored = shape.kv.stored();
    assert_eq!(own.shape, stored, "{OP}: own K/V are {:?}, the layer's {:?}", own.shape, shape.kv);
    assert!(own.len() >= range.len(), "{OP}: {} own tokens for rows {range:?}: append them first", own.len());
    for span in spans {
        assert_eq!(span.kv.shape, stored, "{OP}: a span's K/V are {:?}, the layer's {:?}", span.kv.shape, shape.kv);
        check::range(OP, "span", &span.range, span.kv.len());
    }
}

/// The scores of all keys that row `index` of a sequence sees, and their values.
fn visible<'a, R: Real>(
    shape: AttentionShape,
    rope: Option<&RefRope<R>>,
    query: &[R],
    head: usize,
    sequence: &'a AttentionRows<'_, Reference<R>>,
    index: usize,
) -> (Vec<R>, Vec<&'a [R]>) {
    let kv_head = head / (shape.heads / shape.kv.heads);
    let scale = R::from_f64(f64::from(shape.scale));
    let position = sequence.positions.at[index];
    let (mut scores, mut values) = (Vec::new(), Vec::new());
    let mut see = |kv: &'a RefKv<R>, range: std::ops::Range<usize>, origin: i64| {
        let mut query = query.to_vec();
        if let Some(rope) = rope {
            rope.rotate_from(&mut query, position, origin);
        }
        for token in range {
            let dot: R = query.iter().zip(kv.key(token, kv_head)).map(|(q, k)| *q * *k).sum();
            scores.push(dot * scale);
            values.push(kv.value(token, kv_head, shape.kv.d_v));
        }
    };
    for span in sequence.spans.iter().filter(|span| index >= span.from_row) {
        see(span.kv, span.range.clone(), span.origin);
    }
    let behind = sequence.rows.len() - 1 - index;
    see(sequence.own, 0..sequence.own.len() - behind, 0);
    (scores, values)
}

/// `sum softmax(scores) values`.
fn weigh<R: Real>(scores: &[R], values: &[&[R]], out: &mut [R]) {
    let largest = scores.iter().copied().fold(scores[0], |a, b| if b > a { b } else { a });
    let weights: Vec<R> = scores.iter().map(|s| (*s - largest).exp()).collect();
    let total: R = weights.iter().copied().sum();
    out.fill(R::ZERO);
    for (w, value) in weights.iter().zip(values) {
        for (o, v) in out.iter_mut().zip(*value) {
            *o += *w / total * *v;
        }
    }
}
