use hypic_state::DType;

use super::*;
use crate::{KvShape, Positions, RopeSpec, Span};

const D_K: usize = 12;
const D_V: usize = 9;

fn numbers(rows: usize, cols: usize, seed: usize) -> CpuTensor {
    let mut t = CpuTensor::zeros(&[rows, cols]);
    for (i, x) in t.data_mut().iter_mut().enumerate() {
        let mut bits = (i as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ ((seed as u64 + 7) * 0xD1B5_4A32);
        bits ^= bits >> 29;
        bits = bits.wrapping_mul(0xBF58_476D_1CE4_E5B9);
        *x = (bits >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
    }
    t
}

fn shape(heads: usize, kv_heads: usize, dtype: DType) -> AttentionShape {
    let kv = KvShape { heads: kv_heads, d_k: D_K, d_v: D_V, shared: false, dtype };
    AttentionShape { heads, kv, scale: 1.3 }
}

fn rope() -> CpuRope {
    let inv_freq = (0..4).map(|i| 100f64.powf(-f64::from(i) / 4.0)).collect();
    CpuRope::new(&RopeSpec { offset: 1, inv_freq, interleaved: false, scale: 1.0 })
}

/// A store of `tokens` at positions `first..`.
fn store(kv: KvShape, tokens: usize, first: i64, rope: Option<&CpuRope>, seed: usize) -> CpuKv {
    let mut store = CpuKv::new(kv);
    let (k, v) = (numbers(tokens, kv.heads * D_K, seed), numbers(tokens, kv.heads * D_V, seed + 1));
    let positions: Vec<i64> = (first..first + tokens as i64).collect();
    let v = (!kv.shared).then(|| Cols::new(&v, 0));
    store.append(0..tokens, Cols::new(&k, 0), v, Positions::plain(&positions), rope);
    store
}

/// One sequence with spans before it.
struct Case {
    shape: AttentionShape,
    rope: Option<CpuRope>,
    q: CpuTensor,
    positions: Vec<i64>,
    /// Store, range, origin, first row.
    spans: Vec<(CpuKv, Range<usize>, i64, usize)>,
    own: CpuKv,
}

impl Case {
    fn new(shape: AttentionShape, rope: Option<CpuRope>, rows: usize, own_before: usize, spans: usize) -> Self {
        let own = store(shape.kv, own_before + rows, 500, rope.as_ref(), 5);
        let spans = (0..spans).map(|i| {
            let tokens = 30 + 67 * i;
            let kv = store(shape.kv, tokens, 8, rope.as_ref(), 10 + i);
            (kv, (i * 5) % 19..tokens - i % 3, 40 * i as i64 - 30, [0, 3, 40][i % 3])
        });
        Case {
            shape,
            q: numbers(rows + 3, shape.heads * D_K + 2, 1),
            positions: (0..rows).map(|i| (500 + own_before + i) as i64).collect(),
            spans: spans.collect(),
            own,
            rope,
        }
    }

    fn rows(&self) -> usize {
        self.positions.len()
    }

    fn sequence(&self) -> AttentionRows<'_, Cpu> {
        let spans = self.spans.iter();
        let spans = spans.map(|(kv, range, origin, from_row)| Span {
            kv,
            range: range.clone(),
            origin: *origin,
            from_row: *from_row,
        });
        AttentionRows {
            rows: 2..2 + self.rows(),
            positions: Positions::plain(&self.positions),
            spans: spans.collect(),
            own: &self.own,
        }
    }

    fn run(&self, isa: Isa, threads: usize) -> Vec<f32> {
        let mut out = CpuTensor::alloc(&[1, 1]);
        let q = Cols::new(&self.q, 1);
        attention(isa, &Pool::new(threads), self.shape, self.rope.as_ref(), q, &[self.sequence()], &mut out);
        let width = self.shape.heads * D_V;
        out.data()[2 * width..(2 + self.rows()) * width].to_vec()
    }

    fn naive(&self) -> Vec<f64> {
        let AttentionShape { heads, kv, scale } = self.shape;
        let mut out = Vec::new();
        let hosts: Vec<_> = self.spans.iter().map(|s| s.0.download()).chain([self.own.download()]).collect();
        let planes: Vec<_> = hosts.iter().map(|h| (h.k.to_f64(), h.v.to_f64())).collect();
        let value = |index: usize, token: usize, head: usize| {
            let (k, v): &(Vec<f64>, Vec<f64>) = &planes[index];
            let at = token * kv.heads + head;
            if kv.shared { &k[at * D_K..][..D_V] } else { &v[at * D_V..][..D_V] }
        };
        for row in 0..self.rows() {
            for h in 0..heads {
                let kv_head = h / (heads / kv.heads);
                let q = &self.q.data()[(row + 2) * self.q.cols() + 1 + h * D_K..][..D_K];
                let (mut weights, mut values) = (Vec::new(), Vec::new());
                let own_seen = self.own.len() - self.rows() + row + 1;
                let own = (0..own_seen, 0, 0);
                let spans = self.spans.iter().map(|s| (s.1.clone(), s.2, s.3)).chain([own]);
                for (index, (range, origin, from_row)) in spans.enumerate() {
                    if row < from_row {
                        continue;
                    }
                    let mut q = q.to_vec();
                    if let Some(rope) = &self.rope {
                        rope.turner(0, 1.0).turn(Isa::Portable, self.positions[row], origin, D_K, &mut q);
                    }
                    for token in range {
                        let k = &planes[index].0[(token * kv.heads + kv_head) * D_K..][..D_K];
                        let score: f64 = q.iter().zip(k).map(|(q, k)| f64::from(*q) * k).sum();
                        weights.push((score * f64::from(scale)).exp());
                        values.push(value(index, token, kv_head));
                    }
                }
                let sum: f64 = weights.iter().sum();
                for i in 0..D_V {
                    out.push(weights.iter().zip(&values).map(|(w, v)| w * v[i]).sum::<f64>() / sum);
                }
            }
        }
        out
    }

    fn compare(&self) {
        let want = self.naive();
        for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
            for (got, want) in self.run(isa, 2).iter().zip(&want) {
                let off = (f64::from(*got) - want).abs();
                assert!(off < 3e-6, "{isa:?}, {} rows: {got} is not {want}", self.rows());
            }
        }
    }
}

#[test]
fn rows_without_spans() {
    for rows in (1..=70).chain([127, 128, 129, 200]) {
        Case::new(shape(4, 2, DType::F32), Some(rope()), rows, 0, 0).compare();
    }
}

#[test]
fn rows_behind_spans_and_own_tokens() {
    for (heads, kv_heads) in [(1, 1), (6, 2), (8, 1), (100, 1)] {
        for dtype in [DType::F32, DType::Bf16] {
            for (rows, before) in [(1, 0), (1, 63), (1, 64), (5, 130), (41, 0), (90, 35)] {
                Case::new(shape(heads, kv_heads, dtype), Some(rope()), rows, before, 4).compare();
                Case::new(shape(heads, kv_heads, dtype), None, rows, before, 2).compare();
            }
        }
    }
}

#[test]
fn values_are_the_beginning_of_keys_where_they_are_shared() {
    for (heads, kv_heads) in [(1, 1), (6, 2), (16, 1), (100, 1)] {
        for dtype in [DType::F32, DType::Bf16] {
            for (rows, before) in [(1, 0), (1, 64), (5, 130), (90, 35)] {
                let mut shape = shape(heads, kv_heads, dtype);
                shape.kv.shared = true;
                Case::new(shape, Some(rope()), rows, before, 4).compare();
            }
        }
    }
}

#[test]
fn large_scores_do_not_overflow() {
    let mut case = Case::new(shape(2, 1, DType::F32), Some(rope()), 30, 70, 3);
    case.shape.scale = 100.0;
    let (got, want) = (case.run(Isa::best(), 1), case.naive());
    for (got, want) in got.iter().zip(&want) {
        assert!((f64::from(*got) - want).abs() < 2e-4, "{got} is not {want}");
    }
}

#[test]
fn passes_threads_and_neighbours_change_no_bit() {
    for dtype in [DType::F32, DType::Bf16] {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
            let case = Case::new(shape(6, 2, dtype), Some(rope()), 150, 20, 3);
            let width = 6 * D_V;
            let whole = case.run(isa, 1);
            assert!(case.run(isa, 3) == whole, "{isa:?}: threads");
            for cut in [1, 17, 64, 149] {
                // The rows before the cut in one sequence, the rest in another: as two passes.
                let early = case.own.copy(0..20 + cut);
                let (mut first, mut rest) = (case.sequence(), case.sequence());
                first.own = &early;
                first.rows = 2..2 + cut;
                first.positions = Positions::plain(&case.positions[..cut]);
                rest.rows = 2 + cut..152;
                rest.positions = Positions::plain(&case.positions[cut..]);
                rest.spans.iter_mut().for_each(|s| s.from_row = s.from_row.saturating_sub(cut));
                let mut out = CpuTensor::alloc(&[1, 1]);
                let q = Cols::new(&case.q, 1);
                attention(isa, &Pool::new(2), case.shape, case.rope.as_ref(), q, &[rest, first], &mut out);
                assert!(out.data()[2 * width..152 * width] == whole, "{isa:?}: cut at {cut}");
            }
        }
    }
}
