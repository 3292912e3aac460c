//! Stores of keys and values, and transfers.

use hypic_kernels::{Backend, Cols, DeviceTensor, KvShape, Positions};
use hypic_state::{DType, HostKv, HostTensor, Stored};

use crate::attention_case::rope_spec;
use crate::support::{Rng, dirty, reference, same_bits, within};

const SHAPES: [(usize, usize, usize); 4] = [(1, 2, 3), (2, 16, 16), (3, 24, 40), (1, 64, 5)];
const DTYPES: [DType; 2] = [DType::F32, DType::Bf16];

/// One token of a portable K or V.
fn tokens(t: &HostTensor, range: std::ops::Range<usize>) -> Vec<f64> {
    let n = t.shape()[1] * t.shape()[2];
    t.to_f64()[range.start * n..range.end * n].to_vec()
}

/// Appended keys are rotated at their positions, values are not; both are rounded to the store's dtype.
pub fn append_matches<B: Backend>(b: &B) {
    let r = reference();
    for seed in 0..4 * SHAPES.len() {
        let (heads, d_k, d_v) = SHAPES[seed % SHAPES.len()];
        for dtype in DTYPES {
            let mut rng = Rng::new(4000 + seed as u64);
            let shape = KvShape { heads, d_k, d_v, shared: seed % 3 == 2, dtype };
            let spec = rope_spec(&mut rng, d_k);
            let (k_col, v_col) = (rng.below(5), rng.below(5));
            let rows = 90;
            let k = rng.tensor(&[rows, k_col + heads * d_k + 2], 1.0);
            let v = rng.tensor(&[rows, v_col + heads * d_v], 1.0);
            // Far positions take a large table.
            let farthest = if seed % 7 == 0 { 200_000 } else { 3000 };
            let positions: Vec<i64> = (0..rows).map(|_| rng.below(farthest) as i64 - 1000).collect();
            let label = format!("{} kv_append {shape:?} {spec:?}", b.kernel_set());

            let positions = Positions { at: &positions, ntk_alpha: rng.pick(&[1.0, 1.0, 1.8]) };
            let got = appended(b, shape, &spec, (&k, k_col), (&v, v_col), positions);
            let want = appended(&r, shape, &spec, (&k, k_col), (&v, v_col), positions);
            assert_eq!(got.k.shape(), want.k.shape(), "{label}");
            // A rotated key may fall on the other side of a rounding edge.
            let ulp = if dtype == DType::Bf16 { 1.0 / 128.0 } else { 2e-6 };
            for (g, w) in got.k.to_f64().iter().zip(want.k.to_f64()) {
                within(&label, &[*g], &[w], ulp * w.abs() + 2e-6);
            }
            assert_eq!(got.v.shape(), [rows, heads, shape.stored().d_v], "{label}");
            same_bits(&label, &got.v.to_f64(), &want.v.to_f64());
        }
    }
}

/// Rows in three appends, one of them empty.
fn appended<B: Backend>(
    b: &B,
    shape: KvShape,
    spec: &Option<hypic_kernels::RopeSpec>,
    k: (&HostTensor, usize),
    v: (&HostTensor, usize),
    positions: Positions<'_>,
) -> HostKv {
    let rope = spec.as_ref().map(|s| b.rope(s));
    let (k_mat, v_mat) = (b.upload(k.0), b.upload(v.0));
    let (k, v) = (Cols::new(&k_mat, k.1), (!shape.shared).then(|| Cols::new(&v_mat, v.1)));
    let mut kv = b.kv(shape);
    for rows in [0..33, 33..33, 33..positions.at.len()] {
        let positions = Positions { at: &positions.at[rows.clone()], ..positions };
        b.kv_append(&mut kv, rows.clone(), k, v, positions, rope.as_ref());
        assert_eq!(b.kv_len(&kv), rows.end, "tokens after an append");
    }
    b.kv_download(&kv)
}

/// Upload, download, copy, truncate and append keep every other token's bits.
pub fn stores_keep_their_tokens<B: Backend>(b: &B) {
    for (seed, (heads, d_k, d_v)) in SHAPES.into_iter().enumerate() {
        for (dtype, shared) in [(DType::F32, false), (DType::Bf16, false), (DType::F32, true), (DType::Bf16, true)] {
            let mut rng = Rng::new(4100 + seed as u64);
            let shape = KvShape { heads, d_k, d_v: d_v.min(d_k), shared, dtype };
            let d_v = shape.stored().d_v;
            let label = format!("{} kv {shape:?}", b.kernel_set());
            assert_eq!(b.kv_len(&b.kv(shape)), 0, "{label}: a new store");
            let empty = b.kv_download(&b.kv(shape));
            assert_eq!((empty.k.shape(), empty.v.shape()), (&[0, heads, d_k][..], &[0, heads, d_v][..]), "{label}");

            let count = 131;
            let host = HostKv {
                k: stored(&mut rng, &[count, heads, d_k], dtype),
                v: stored(&mut rng, &[count, heads, d_v], dtype),
            };
            let mut kv = b.kv_upload(&host, shape);
            assert_eq!(b.kv_shape(&kv), shape.stored(), "{label}");
            assert_eq!(b.kv_len(&kv), count, "{label}");
            let check = |what: &str, kv: &B::Kv, from: &HostKv, range: std::ops::Range<usize>| {
                let got = b.kv_download(kv);
                assert_eq!(b.kv_len(kv), range.len(), "{label}: {what}");
                assert_eq!(got.k.shape(), [range.len(), heads, d_k], "{label}: {what}");
                assert_eq!(got.v.shape(), [range.len(), heads, d_v], "{label}: {what}");
                same_bits(&format!("{label}: k {what}"), &got.k.to_f64(), &tokens(&from.k, range.clone()));
                same_bits(&format!("{label}: v {what}"), &got.v.to_f64(), &tokens(&from.v, range));
            };
            check("round trip", &kv, &host, 0..count);
            for range in [0..0, 0..1, 63..65, 64..128, 5..count] {
                check("copy", &b.kv_copy(&kv, range.clone()), &host, range);
            }

            let copy = b.kv_copy(&kv, 0..count);
            b.kv_truncate(&mut kv, 70);
            check("truncate", &kv, &host, 0..70);
            check("copy of a truncated store", &copy, &host, 0..count);

            let (k, v) = (rng.tensor(&[2, heads * d_k], 1.0), rng.tensor(&[2, heads * d_v], 1.0));
            let (k, v) = (b.upload(&k), b.upload(&v));
            b.kv_append(
                &mut kv,
                1..2,
                Cols::new(&k, 0),
                (!shared).then(|| Cols::new(&v, 0)),
                Positions::plain(&[3]),
                None,
            );
            assert_eq!(b.kv_len(&kv), 71, "{label}: append after truncate");
            check("tokens before an append", &b.kv_copy(&kv, 0..70), &host, 0..70);
            let last = b.kv_download(&b.kv_copy(&kv, 70..71));
            for (got, written, width) in [(&last.k, &k, heads * d_k), (&last.v, &v, heads * d_v)] {
                let written = &b.download(written).to_f64()[width..];
                for (g, w) in got.to_f64().iter().zip(written) {
                    within(&format!("{label}: appended numbers"), &[*g], &[*w], w.abs() / 256.0);
                }
            }
            assert!(kv.bytes() >= 71 * heads * (d_k + d_v) * dtype.size(), "{label}: bytes");
            b.kv_truncate(&mut kv, 0);
            assert_eq!(b.kv_len(&kv), 0, "{label}");
        }
    }
}

/// Random values that a store of `dtype` holds exactly.
fn stored(rng: &mut Rng, shape: &[usize], dtype: DType) -> HostTensor {
    let values = rng.tensor(shape, 1.0);
    match dtype {
        DType::Bf16 => HostTensor::from_f32_as_bf16(shape, &values.to_f32()),
        _ => values,
    }
}

/// Tensors come back as they went, of any rank and dtype; resizing gives the shape asked for.
pub fn tensors_keep_their_values<B: Backend>(b: &B) {
    let mut rng = Rng::new(4200);
    for shape in [&[0][..], &[7], &[3, 0], &[4, 5], &[2, 3, 4]] {
        for dtype in DTYPES {
            let host = stored(&mut rng, shape, dtype);
            let t = b.upload(&host);
            let label = format!("{} tensor {shape:?} {dtype}", b.kernel_set());
            assert_eq!(t.shape(), shape, "{label}");
            let copy = b.duplicate(&t);
            for t in [&t, &copy] {
                assert_eq!(b.download(t).shape(), shape, "{label}");
                same_bits(&label, &b.download(t).to_f64(), &host.to_f64());
            }
        }
        let mut t = dirty(b);
        b.resize(&mut t, shape);
        assert_eq!(t.shape(), shape);
        assert_eq!(b.alloc(shape).shape(), shape);
        let elements = shape.iter().product();
        same_bits("zeros", &b.download(&b.zeros(shape)).to_f64(), &vec![0.0; elements]);
        if cfg!(feature = "poison") {
            for t in [&t, &b.alloc(shape)] {
                assert!(b.download(t).to_f64().iter().all(|x| x.is_nan()), "poisoned memory {shape:?}");
            }
        }
    }
}
