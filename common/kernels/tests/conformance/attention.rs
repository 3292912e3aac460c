//! Attention over spans: visibility, per-span turning of queries, grouped heads, block edges.

use hypic_kernels::{AttentionRows, AttentionShape, Backend, Cols, GRID, KvShape, Positions, RopeSpec, Span};
use hypic_state::{DType, HostKv, HostTensor};

use crate::attention_case::{Case, Sequence, SpanCase, queries, random_shape, rope_spec, run, simple, store};
use crate::support::{Rng, close, cpu_thread_pairs, dirty, is_f64, reference, same_bits, slice_rows, stack, values};

/// Share of the largest value. K and V are uploaded, so that bf16 stores hold the same numbers everywhere.
const TOLERANCE: f64 = 1e-5;

pub fn attention_matches<B: Backend>(b: &B) {
    let r = reference();
    for seed in 0..60 {
        let mut rng = Rng::new(3000 + seed);
        let shape = random_shape(&mut rng);
        let rope = rope_spec(&mut rng, shape.kv.d_k);
        let lengths = [0; 3].map(|_| rng.between(1, 150));
        let stores: Vec<_> = lengths.iter().map(|&n| store(&mut rng, shape.kv, n)).collect();
        let (mut own, mut sequences, mut next) = (Vec::new(), Vec::new(), 0);
        for _ in 0..rng.between(1, 3) {
            let gap = rng.below(3);
            let rows = next + gap..next + gap + rng.pick(&[0, 1, 1, 2, 7, 33, 70]);
            next = rows.end;
            let earlier = rng.pick(&[0, 1, 40, 64, 100]);
            own.push(store(&mut rng, shape.kv, earlier + rows.len()));
            let mut position = rng.below(300) as i64 - 100;
            let mut positions = Vec::new();
            for _ in rows.clone() {
                positions.push(position);
                position += rng.pick(&[1, 1, 1, 50]);
            }
            let mut spans = Vec::new();
            for _ in 0..rng.below(5) {
                let store = rng.below(3);
                let tokens = stores[store].k.shape()[0];
                let (x, y) = (rng.between(0, tokens), rng.between(0, tokens));
                let from_row = rng.between(0, rows.len());
                spans.push(SpanCase {
                    store,
                    range: x.min(y)..x.max(y),
                    origin: rng.below(500) as i64 - 200,
                    from_row,
                });
            }
            let ntk_alpha = rng.pick(&[1.0, 1.0, 4.5]);
            sequences.push(Sequence { rows, positions, ntk_alpha, spans, earlier });
        }
        let rows = next + rng.below(3);
        let (q, q_col) = queries(&mut rng, shape, rows);
        let label = format!("{} attention seed={seed} {shape:?} {rope:?} {sequences:?}", b.kernel_set());
        let case = Case { shape, rope, q, q_col, stores, own, sequences };
        for (got, want) in run(b, &case).iter().zip(&run(&r, &case)) {
            close(&label, got, want, TOLERANCE);
        }
    }
}

/// Numbers of keys around the block, in the own store and in a span.
pub fn block_edges_match<B: Backend>(b: &B) {
    let r = reference();
    for keys in [1, 62, 63, 64, 65, 66, 127, 128, 129] {
        for rows in [1, 2, 3, 9] {
            for dtype in [DType::F32, DType::Bf16] {
                let mut rng = Rng::new(3100 + keys as u64);
                let kv = KvShape { heads: 2, d_k: 16, d_v: 24, shared: false, dtype };
                let shape = AttentionShape { heads: 4, kv, scale: 0.25 };
                let mut case = simple(&mut rng, shape, rows, keys - 1, 500);
                case.stores = vec![store(&mut rng, kv, keys + 3)];
                let span = SpanCase { store: 0, range: 2..2 + keys, origin: 77, from_row: rows / 2 };
                case.sequences[0].spans = vec![span];
                let label = format!("{} attention keys={keys} rows={rows} {dtype}", b.kernel_set());
                close(&label, &run(b, &case)[0], &run(&r, &case)[0], TOLERANCE);
            }
        }
    }
}

/// Latent attention as models have it: one wide key for many heads, of which the latent is the value and the rest, which
/// rotates, is not.
pub fn latent_heads_match<B: Backend>(b: &B) {
    let r = reference();
    let kv = KvShape { heads: 1, d_k: 144, d_v: 128, shared: true, dtype: DType::F32 };
    for (seed, (rows, earlier)) in [(1, 90), (5, 0), (9, 70)].into_iter().enumerate() {
        for dtype in [DType::F32, DType::Bf16] {
            for interleaved in [false, true] {
                let mut rng = Rng::new(3150 + seed as u64);
                let shape = AttentionShape { heads: 20, kv: KvShape { dtype, ..kv }, scale: 0.1 };
                let mut case = simple(&mut rng, shape, rows, earlier, 900);
                let inv_freq = (0..8).map(|i| 10000f64.powf(-f64::from(i) / 8.0)).collect();
                case.rope = Some(RopeSpec { offset: 128, inv_freq, interleaved, scale: 1.0 });
                case.stores = vec![store(&mut rng, shape.kv, 150)];
                case.sequences[0].spans = vec![SpanCase { store: 0, range: 8..150, origin: 700, from_row: 0 }];
                let label = format!("{} latent rows={rows} {dtype} {interleaved}", b.kernel_set());
                close(&label, &run(b, &case)[0], &run(&r, &case)[0], TOLERANCE);
            }
        }
    }
}

/// Shared values give what the same values give when they are stored.
pub fn shared_values_are_the_keys<B: Backend>(b: &B) {
    for seed in 0..12 {
        let mut rng = Rng::new(3160 + seed);
        let mut shape = random_shape(&mut rng);
        shape.kv = KvShape { shared: true, d_v: rng.between(1, shape.kv.d_k), ..shape.kv };
        let rows = rng.pick(&[1, 5, 70]);
        let mut case = simple(&mut rng, shape, rows, 75, 100);
        case.stores = vec![store(&mut rng, shape.kv, 140)];
        let start = rng.below(40);
        case.sequences[0].spans = vec![SpanCase { store: 0, range: start..140, origin: -9, from_row: 0 }];
        let shared = run(b, &case);
        let KvShape { heads, d_k, d_v, .. } = shape.kv;
        case.shape.kv.shared = false;
        for kv in case.stores.iter_mut().chain(&mut case.own) {
            let v: Vec<f32> = kv.k.to_f32().chunks(d_k).flat_map(|key| key[..d_v].to_vec()).collect();
            kv.v = HostTensor::from_f32([kv.k.shape()[0], heads, d_v], &v);
        }
        let label = format!("{} shared values seed={seed} {shape:?}", b.kernel_set());
        same_bits(&label, &shared[0], &run(b, &case)[0]);
    }
}

/// Angles come from exact distances: rows far out, before the origin, and scores far apart.
pub fn far_positions_match<B: Backend>(b: &B) {
    let r = reference();
    for (seed, first) in [1_000_000, 99_991, -4_000, 0].into_iter().enumerate() {
        let mut rng = Rng::new(3200 + seed as u64);
        let kv = KvShape { heads: 1, d_k: 32, d_v: 8, shared: false, dtype: DType::F32 };
        for scale in [0.2, 20.0] {
            let shape = AttentionShape { heads: 2, kv, scale };
            let mut case = simple(&mut rng, shape, 5, 90, first);
            case.rope = Some(RopeSpec {
                offset: 0,
                inv_freq: (0..16).map(|i| 10000f64.powf(-f64::from(i) / 16.0)).collect(),
                interleaved: false,
                scale: 1.0,
            });
            case.stores = vec![store(&mut rng, kv, 100)];
            case.sequences[0].spans = vec![SpanCase { store: 0, range: 0..100, origin: -first, from_row: 0 }];
            // Scores of some tens lose that many times more of their last digits.
            let tolerance = TOLERANCE * f64::from(scale).max(1.0);
            let label = format!("{} attention first={first} scale={scale}", b.kernel_set());
            close(&label, &run(b, &case)[0], &run(&r, &case)[0], tolerance);
        }
    }
}

/// A span whole, or in pieces cut at multiples of the grid: the same bits.
pub fn spans_are_cut_on_the_grid<B: Backend>(b: &B) {
    for seed in 0..8 {
        let mut rng = Rng::new(3300 + seed);
        let shape = random_shape(&mut rng);
        let mut case = simple(&mut rng, shape, 6, 10, 300);
        case.stores = vec![store(&mut rng, shape.kv, 260)];
        let (start, end) = (rng.below(30), rng.between(230, 260));
        let piece = |range| SpanCase { store: 0, range, origin: 31, from_row: 2 };
        case.sequences[0].spans = vec![piece(start..end)];
        let whole = run(b, &case);
        let cuts = [start + GRID, start + 3 * GRID];
        case.sequences[0].spans = vec![piece(start..cuts[0]), piece(cuts[0]..cuts[1]), piece(cuts[1]..end)];
        same_bits(&format!("{} span cut, seed={seed} {shape:?}", b.kernel_set()), &run(b, &case)[0], &whole[0]);
    }
}

/// A row's result does not depend on the rows and sequences beside it: a prefill cut anywhere.
pub fn attention_rows_are_independent<B: Backend>(b: &B) {
    for seed in 0..12 {
        let mut rng = Rng::new(3400 + seed);
        let shape = random_shape(&mut rng);
        let rows = rng.between(2, 100);
        let earlier = rng.below(80);
        let mut case = simple(&mut rng, shape, rows, earlier, 200);
        case.stores = vec![store(&mut rng, shape.kv, 100)];
        let from_row = rng.below(rows);
        case.sequences[0].spans = vec![SpanCase { store: 0, range: 5..95, origin: 13, from_row }];
        let whole = run(b, &case).remove(0);

        let width = shape.heads * shape.kv.d_v;
        let (start, end) = match rng.below(3) {
            0 => (0, rng.between(1, rows)),
            1 => (rng.below(rows), rows),
            _ => (rows - 1, rows),
        };
        // Only the rows start..end, and another sequence behind them.
        let own = &case.own[0];
        let visible = earlier + end;
        let head = |t: &HostTensor, tokens: usize| {
            let shape = t.shape();
            let n = shape[1] * shape[2];
            HostTensor::from_f32([tokens, shape[1], shape[2]], &t.to_f32()[..tokens * n])
        };
        let own = HostKv { k: head(&own.k, visible), v: head(&own.v, visible) };
        let other = store(&mut rng, shape.kv, 70);
        let other_rows = rng.between(1, 5);
        let others = rng.tensor(&[other_rows, case.q.shape()[1]], 1.0);
        case.q = stack(&[slice_rows(&case.q, start..end), others]);
        case.own = vec![own, other];
        let first = &mut case.sequences[0];
        first.rows = 0..end - start;
        first.positions = first.positions[start..end].to_vec();
        first.earlier = earlier + start;
        first.spans[0].from_row = from_row.saturating_sub(start);
        case.sequences.push(Sequence {
            rows: end - start..end - start + other_rows,
            positions: (0..other_rows as i64).collect(),
            ntk_alpha: 2.0,
            spans: Vec::new(),
            earlier: 70 - other_rows,
        });
        let label = format!("{} attention seed={seed} {shape:?} rows {start}..{end} of {rows}", b.kernel_set());
        same_bits(&label, &run(b, &case)[0], &whole[start * width..end * width]);
    }
}

/// Keys stored at local positions and a query turned by its distance give what keys at true positions give; also if the
/// query is stretched, and the keys, which are older, are not.
pub fn turning_queries_is_turning_keys<B: Backend>(b: &B) {
    let tolerance = if is_f64(b) { 1e-11 } else { 5e-5 };
    for seed in 0..10 {
        let mut rng = Rng::new(3500 + seed);
        let dtype = if is_f64(b) { DType::F64 } else { DType::F32 };
        let mut kv = KvShape { dtype, ..random_shape(&mut rng).kv };
        let spec = rope_spec(&mut rng, kv.d_k);
        if kv.shared {
            // Values that turn with the keys depend on where the keys are.
            let still = spec.as_ref().map_or(kv.d_k, |spec| spec.offset);
            kv = KvShape { shared: still > 0, d_v: kv.d_v.min(still.max(1)), ..kv };
        }
        let shape = AttentionShape { heads: 2 * kv.heads, kv, scale: 0.3 };
        let rope = spec.as_ref().map(|s| b.rope(s));
        let (tokens, rows, origin, first) = (40, 3, 1234, 1300);
        let (k, v) = (rng.tensor(&[tokens, kv.heads * kv.d_k], 1.0), rng.tensor(&[tokens, kv.heads * kv.d_v], 1.0));
        let (own_k, own_v) = (rng.tensor(&[rows, kv.heads * kv.d_k], 1.0), rng.tensor(&[rows, kv.heads * kv.d_v], 1.0));
        let q = b.upload(&rng.tensor(&[rows, shape.heads * kv.d_k], 1.0));
        let append = |store: &mut B::Kv, k: &HostTensor, v: &HostTensor, first: i64| {
            let positions: Vec<i64> = (first..).take(k.shape()[0]).collect();
            let (k, v) = (b.upload(k), b.upload(v));
            let v = (!kv.shared).then(|| Cols::new(&v, 0));
            b.kv_append(store, 0..positions.len(), Cols::new(&k, 0), v, Positions::plain(&positions), rope.as_ref());
        };
        let (mut entry, mut own, mut all) = (b.kv(kv), b.kv(kv), b.kv(kv));
        append(&mut entry, &k, &v, 0);
        append(&mut all, &k, &v, origin);
        for store in [&mut own, &mut all] {
            append(store, &own_k, &own_v, first);
        }
        let positions: Vec<i64> = (first..first + rows as i64).collect();
        let ntk_alpha = if seed % 2 == 0 { 1.0 } else { 2.5 };
        let attend = |spans: Vec<Span<'_, B>>, own: &B::Kv| {
            let positions = Positions { at: &positions, ntk_alpha };
            let rows = [AttentionRows { rows: 0..rows, positions, spans, own }];
            let mut out = dirty(b);
            b.attention(shape, rope.as_ref(), Cols::new(&q, 0), &rows, &mut out);
            values(b, &out)
        };
        let span = Span { kv: &entry, range: 0..tokens, origin, from_row: 0 };
        let (got, want) = (attend(vec![span], &own), attend(Vec::new(), &all));
        close(&format!("{} turning seed={seed} {spec:?} {kv:?}", b.kernel_set()), &got, &want, tolerance);
    }
}

pub fn threads_agree() {
    for (one, many) in cpu_thread_pairs() {
        for dtype in [DType::F32, DType::Bf16] {
            for (rows, earlier) in [(1, 3000), (150, 100)] {
                let mut rng = Rng::new(3600);
                let kv = KvShape { heads: 2, d_k: 32, d_v: 32, shared: rows > 1, dtype };
                let shape = AttentionShape { heads: 6, kv, scale: 0.2 };
                let mut case = simple(&mut rng, shape, rows, earlier, 0);
                case.stores = vec![store(&mut rng, kv, 700)];
                case.sequences[0].spans = vec![SpanCase { store: 0, range: 0..700, origin: -900, from_row: 0 }];
                let label = format!("{} threads attention rows={rows} {dtype}", one.kernel_set());
                same_bits(&label, &run(&many, &case)[0], &run(&one, &case)[0]);
            }
        }
    }
}
