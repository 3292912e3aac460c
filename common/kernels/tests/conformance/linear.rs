//! Packed linear layers and embeddings.

use hypic_kernels::{Backend, DeviceTensor};
use hypic_state::{DType, HostTensor};

use crate::support::{Rng, cpu_thread_pairs, dirty, reference, same_bits, slice_rows, values};

/// Sizes that are no multiples of anything, and some that are.
const SIZES: [(usize, usize); 9] =
    [(1, 1), (3, 2), (7, 5), (16, 16), (33, 70), (50, 31), (100, 129), (130, 257), (64, 512)];
const ROWS: [usize; 8] = [0, 1, 2, 3, 8, 13, 64, 100];
const DTYPES: [DType; 2] = [DType::F32, DType::Bf16];

/// Rounding of a sum in f32, as a share of the sum of the terms' magnitudes.
const SUM_TOLERANCE: f64 = 2e-6;

/// A weight matrix in one to three parts.
fn parts(rng: &mut Rng, n: usize, k: usize) -> Vec<HostTensor> {
    let mut left = n;
    let mut parts = Vec::new();
    while left > 0 {
        let rows = if parts.len() == 2 { left } else { rng.between(1, left) };
        parts.push(rng.tensor(&[rows, k], 0.3));
        left -= rows;
    }
    parts
}

/// `parts` rounded to bf16, or made absolute.
fn mapped(parts: &[HostTensor], f: impl Fn(f32) -> f32) -> Vec<HostTensor> {
    let each = |p: &HostTensor| HostTensor::from_f32(p.shape(), &p.to_f32().into_iter().map(&f).collect::<Vec<_>>());
    parts.iter().map(each).collect()
}

fn apply<B: Backend>(b: &B, parts: &[HostTensor], dtype: DType, x: &HostTensor, acc: Option<&HostTensor>) -> Vec<f64> {
    let w = b.pack(parts, dtype);
    let x = b.upload(x);
    let out = match acc {
        Some(acc) => {
            let mut acc = b.upload(acc);
            b.linear_add(&w, &x, &mut acc);
            acc
        }
        None => {
            let mut out = dirty(b);
            b.linear(&w, &x, &mut out);
            out
        }
    };
    assert_eq!(out.shape(), [x.rows(), parts.iter().map(|p| p.shape()[0]).sum()]);
    values(b, &out)
}

fn check<B: Backend>(b: &B, add: bool) {
    let r = reference();
    for (seed, &(n, k)) in SIZES.iter().enumerate() {
        for dtype in DTYPES {
            let mut rng = Rng::new(seed as u64);
            let parts = parts(&mut rng, n, k);
            for rows in ROWS {
                let label = format!("{} linear add={add} {dtype} n={n} k={k} rows={rows} seed={seed}", b.kernel_set());
                let x = rng.tensor(&[rows, k], 1.0);
                let acc = add.then(|| rng.tensor(&[rows, n], 1.0));
                let got = apply(b, &parts, dtype, &x, acc.as_ref());

                let absolute = |t: &HostTensor| mapped(std::slice::from_ref(t), f32::abs).remove(0);
                let magnitude =
                    apply(&r, &mapped(&parts, f32::abs), dtype, &absolute(&x), acc.as_ref().map(absolute).as_ref());
                let mut wanted = vec![apply(&r, &parts, dtype, &x, acc.as_ref())];
                if dtype == DType::Bf16 && !b.supports(dtype) {
                    // Without instructions of its own for bf16 a backend may keep the activations in f32.
                    let rounded: Vec<_> =
                        parts.iter().map(|p| HostTensor::from_f32_as_bf16(p.shape(), &p.to_f32())).collect();
                    wanted.push(apply(&r, &rounded, DType::F32, &x, acc.as_ref()));
                }
                let off = |want: &Vec<f64>| {
                    let each = got.iter().zip(want).zip(&magnitude);
                    each.map(|((g, w), m)| (g - w).abs() / m.max(1e-30))
                        .fold(0.0, |a: f64, d| if d <= a { a } else { d })
                };
                assert_eq!(got.len(), rows * n, "{label}");
                let best = wanted.iter().map(off).fold(f64::INFINITY, f64::min);
                assert!(best <= SUM_TOLERANCE, "{label}: off by {best:e} of the terms' sum");
            }
        }
    }
}

pub fn linear_matches<B: Backend>(b: &B) {
    check(b, false);
}

pub fn linear_add_matches<B: Backend>(b: &B) {
    check(b, true);
}

/// Embedding rows are the stored weights, exactly.
pub fn embed_matches<B: Backend>(b: &B) {
    let r = reference();
    for (seed, &(n, k)) in SIZES.iter().enumerate() {
        for dtype in DTYPES {
            let mut rng = Rng::new(100 + seed as u64);
            let parts = parts(&mut rng, n, k);
            for count in [0, 1, 9] {
                let ids: Vec<u32> = (0..count).map(|_| rng.below(n) as u32).collect();
                let label = format!("{} embed {dtype} n={n} k={k} ids={ids:?}", b.kernel_set());
                let (mut out, mut want) = (dirty(b), dirty(&r));
                b.embed(&b.pack(&parts, dtype), &ids, &mut out);
                r.embed(&r.pack(&parts, dtype), &ids, &mut want);
                assert_eq!(out.shape(), [count, k], "{label}");
                same_bits(&label, &values(b, &out), &values(&r, &want));
            }
        }
    }
}

/// A row's result does not depend on the rows beside it.
pub fn rows_are_independent<B: Backend>(b: &B) {
    for (seed, &(n, k)) in SIZES.iter().enumerate() {
        for dtype in DTYPES {
            let mut rng = Rng::new(200 + seed as u64);
            let parts = parts(&mut rng, n, k);
            let rows = 71;
            let x = rng.tensor(&[rows, k], 1.0);
            let acc = rng.tensor(&[rows, n], 1.0);
            for acc in [None, Some(&acc)] {
                let whole = apply(b, &parts, dtype, &x, acc);
                for _ in 0..8 {
                    let start = rng.below(rows);
                    let end = rng.pick(&[start + 1, start + 2, start + 5, rng_end(rows, start)]).min(rows);
                    let label = format!("{} linear {dtype} n={n} k={k} rows {start}..{end}", b.kernel_set());
                    let part_acc = acc.map(|a| slice_rows(a, start..end));
                    let part = apply(b, &parts, dtype, &slice_rows(&x, start..end), part_acc.as_ref());
                    same_bits(&label, &part, &whole[start * n..end * n]);
                }
            }
        }
    }
}

fn rng_end(rows: usize, start: usize) -> usize {
    start + (rows - start) / 2 + 1
}

/// Sizes that are worth several threads give the same bits on any number of them.
pub fn threads_agree() {
    for (one, many) in cpu_thread_pairs() {
        for dtype in DTYPES {
            for (n, k, rows) in [(1000, 500, 1), (515, 300, 8), (257, 129, 100), (40, 64, 300)] {
                let mut rng = Rng::new(300);
                let parts = parts(&mut rng, n, k);
                let x = rng.tensor(&[rows, k], 1.0);
                let label = format!("{} threads linear {dtype} n={n} k={k} rows={rows}", one.kernel_set());
                let want = apply(&one, &parts, dtype, &x, None);
                same_bits(&label, &apply(&many, &parts, dtype, &x, None), &want);
            }
        }
    }
}
