//! Norms, gates and gathers.

use std::ops::Range;

use hypic_kernels::{Activation, Backend, Cols, DeviceTensor, GatedNorm, MlpForm};
use hypic_state::HostTensor;

use crate::support::{Rng, close, dirty, reference, same_bits, slice_rows, values, within};

const TOLERANCE: f64 = 2e-6;
const ROWS: [usize; 5] = [0, 1, 2, 7, 65];
const WIDTHS: [usize; 7] = [1, 3, 8, 15, 16, 37, 128];

pub fn gather_matches<B: Backend>(b: &B) {
    let mut rng = Rng::new(1);
    for k in WIDTHS {
        let x = rng.tensor(&[11, k], 1.0);
        for count in [0, 1, 4, 30] {
            let index: Vec<usize> = (0..count).map(|_| rng.below(11)).collect();
            let mut out = dirty(b);
            b.gather(&b.upload(&x), &index, &mut out);
            assert_eq!(out.shape(), [count, k]);
            let want: Vec<f64> = index.iter().flat_map(|&i| slice_rows(&x, i..i + 1).to_f64()).collect();
            same_bits(&format!("{} gather k={k} index={index:?}", b.kernel_set()), &values(b, &out), &want);
        }
    }
}

fn rms<B: Backend>(b: &B, x: &HostTensor, weight: &HostTensor, eps: f32) -> Vec<f64> {
    let mut out = dirty(b);
    b.rms_norm(&b.upload(x), &b.upload(weight), eps, &mut out);
    assert_eq!(out.shape(), x.shape());
    values(b, &out)
}

fn head<B: Backend>(b: &B, x: &HostTensor, col: usize, heads: usize, weight: &HostTensor) -> Vec<f64> {
    let mut x = b.upload(x);
    b.head_norm(&mut x, col, heads, &b.upload(weight), 1e-6);
    values(b, &x)
}

const ACTIVATIONS: [Activation; 3] = [Activation::Silu, Activation::Sigmoid, Activation::SquaredRelu];

fn gated<B: Backend>(
    b: &B,
    spec: GatedNorm,
    o: &HostTensor,
    weight: &HostTensor,
    g: &HostTensor,
    col: usize,
) -> Vec<f64> {
    let (g, mut out) = (b.upload(g), dirty(b));
    b.gated_norm(spec, &b.upload(o), &b.upload(weight), Cols::new(&g, col), &mut out);
    assert_eq!(out.shape(), o.shape());
    values(b, &out)
}

pub fn norms_match<B: Backend>(b: &B) {
    let r = reference();
    for (seed, rows) in ROWS.into_iter().enumerate() {
        for k in WIDTHS {
            let mut rng = Rng::new(10 + seed as u64);
            let label = |op: &str| format!("{} {op} rows={rows} k={k}", b.kernel_set());
            let weight = rng.tensor(&[k], 1.0);
            for scale in [1e-6, 1e-3, 1.0, 1e4] {
                let x = rng.tensor(&[rows, k], scale);
                close(&label("rms_norm"), &rms(b, &x, &weight, 1e-6), &rms(&r, &x, &weight, 1e-6), TOLERANCE);
                // All zeros must stay zeros.
                let zeros = HostTensor::from_f32([rows, k], &vec![0.0; rows * k]);
                within(&label("rms_norm of zeros"), &rms(b, &zeros, &weight, 1e-6), &vec![0.0; rows * k], 0.0);
            }

            let (heads, col, behind) = (rng.between(1, 5), rng.below(9), rng.below(5));
            let x = rng.tensor(&[rows, col + heads * k + behind], 1.0);
            let (got, want) = (head(b, &x, col, heads, &weight), head(&r, &x, col, heads, &weight));
            close(&label("head_norm"), &got, &want, TOLERANCE);
            let (all, raw) = (x.shape()[1], x.to_f64());
            for (i, (g, x)) in got.iter().zip(&raw).enumerate() {
                let inside = (col..col + heads * k).contains(&(i % all));
                assert!(inside || g == x, "{}: column {} is not the op's", label("head_norm"), i % all);
            }

            for activation in ACTIVATIONS {
                for gate_first in [false, true] {
                    // Weights of a group, and of all columns.
                    let weights = if rng.chance(0.5) { k } else { heads * k };
                    let weight = rng.tensor(&[weights], 1.0);
                    let o = rng.tensor(&[rows, heads * k], 1.0);
                    let g = rng.tensor(&[rows, col + heads * k + behind], 3.0);
                    let spec = GatedNorm { group: k, eps: 1e-5, activation, gate_first };
                    let want = gated(&r, spec, &o, &weight, &g, col);
                    let label = label(&format!("gated_norm {spec:?} weights {:?}", weight.shape()));
                    close(&label, &gated(b, spec, &o, &weight, &g, col), &want, TOLERANCE);
                }
            }
        }
    }
}

fn inner<B: Backend>(b: &B, form: MlpForm, x: &HostTensor) -> Vec<f64> {
    let mut out = dirty(b);
    b.mlp_inner(form, &b.upload(x), &mut out);
    assert_eq!(form.rows(out.cols()), x.shape()[1]);
    assert_eq!(out.rows(), x.shape()[0]);
    values(b, &out)
}

/// Every kind of MLP; the limit is one that some numbers reach.
const FORMS: [MlpForm; 3] =
    [MlpForm::SwiGlu, MlpForm::BoundedSwiGlu { limit: 1.5 }, MlpForm::Plain(Activation::SquaredRelu)];

/// Bounds by hand: the gate from above behind its silu, `up` from both sides; NaN goes through.
pub fn bounded_mlps_are_as_written<B: Backend>(b: &B) {
    let (gate, up) = ([9f32, 9.0, -9.0, 1.0, 3.0, f32::NAN, 1.0], [0.5f32, -7.0, 7.0, 1.0, f32::NAN, 1.0, 2.5]);
    let x = HostTensor::from_f32([1, 14], &[gate, up].concat());
    let got = inner(b, MlpForm::BoundedSwiGlu { limit: 2.0 }, &x);
    let silu = |x: f64| x / (1.0 + (-x).exp());
    let want = [2.0 * 0.5, 2.0 * -2.0, silu(-9.0) * 2.0, silu(1.0), f64::NAN, f64::NAN, silu(1.0) * 2.0];
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!((got - want).abs() < 1e-6 || (got.is_nan() && want.is_nan()), "{}: {i} is {got}", b.kernel_set());
    }
    // A limit that is not reached is none.
    let small = HostTensor::from_f32([1, 4], &[0.3, -2.0, 1.0, -1.9]);
    let bounded = inner(b, MlpForm::BoundedSwiGlu { limit: 2.0 }, &small);
    same_bits("an unreached limit", &bounded, &inner(b, MlpForm::SwiGlu, &small));
}

fn gate<B: Backend>(b: &B, x: &HostTensor, g: &HostTensor, col: usize, width: usize, gate: Activation) -> Vec<f64> {
    let (mut x, g) = (b.upload(x), b.upload(g));
    b.gate(&mut x, Cols::new(&g, col), width, gate);
    values(b, &x)
}

fn activate<B: Backend>(b: &B, x: &HostTensor, cols: Range<usize>, activation: Activation) -> Vec<f64> {
    let mut x = b.upload(x);
    b.activate(&mut x, cols, activation);
    values(b, &x)
}

fn mix<B: Backend>(b: &B, acc: &HostTensor, factors: (f32, f32), x: &HostTensor) -> Vec<f64> {
    let mut acc = b.upload(acc);
    b.mix(&mut acc, factors.0, &b.upload(x), factors.1);
    values(b, &acc)
}

/// Gate inputs from the flat ends of the sigmoid to its middle.
const GATE_SCALES: [f64; 4] = [0.1, 2.0, 30.0, 200.0];

pub fn gates_match<B: Backend>(b: &B) {
    let r = reference();
    for (seed, rows) in ROWS.into_iter().enumerate() {
        for k in WIDTHS {
            let mut rng = Rng::new(20 + seed as u64);
            for scale in GATE_SCALES {
                let label = |op: &str| format!("{} {op} rows={rows} k={k} scale={scale}", b.kernel_set());
                let x = rng.tensor(&[rows, 2 * k], scale);
                for form in FORMS {
                    close(&label(&format!("{form:?}")), &inner(b, form, &x), &inner(&r, form, &x), TOLERANCE);
                }
                let (col, behind) = (rng.below(9), rng.below(5));
                let x = rng.tensor(&[rows, k], 1.0);
                let g = rng.tensor(&[rows, col + k + behind], scale);
                for kind in ACTIVATIONS {
                    let want = gate(&r, &x, &g, col, 1, kind);
                    close(&label("gate"), &gate(b, &x, &g, col, 1, kind), &want, TOLERANCE);
                    let width = rng.pick(&[2, 3, 16, 17]);
                    let wide = rng.tensor(&[rows, k * width], 1.0);
                    let want = gate(&r, &wide, &g, col, width, kind);
                    close(&label("wide gate"), &gate(b, &wide, &g, col, width, kind), &want, TOLERANCE);

                    let (got, want) = (activate(b, &g, col..col + k, kind), activate(&r, &g, col..col + k, kind));
                    close(&label("activate"), &got, &want, TOLERANCE);
                    let all = g.shape()[1];
                    for (i, (got, x)) in got.iter().zip(g.to_f64()).enumerate() {
                        let inside = (col..col + k).contains(&(i % all));
                        assert!(inside || *got == x, "{}: column {} is not the op's", label("activate"), i % all);
                    }
                }
            }
        }
    }
}

/// Sums of two matrices; what is overwritten is not read.
pub fn mixes_match<B: Backend>(b: &B) {
    let r = reference();
    for (seed, rows) in ROWS.into_iter().enumerate() {
        for k in WIDTHS {
            let mut rng = Rng::new(25 + seed as u64);
            let (acc, x) = (rng.tensor(&[rows, k], 1.0), rng.tensor(&[rows, k], 2.0));
            for factors in [(1.0, 1.0), (3.5, -0.25), (1.0, 0.0), (0.0, 1.5)] {
                let label = format!("{} mix rows={rows} k={k} {factors:?}", b.kernel_set());
                close(&label, &mix(b, &acc, factors, &x), &mix(&r, &acc, factors, &x), TOLERANCE);
            }
            let stale = HostTensor::from_f32([rows, k], &vec![f32::NAN; rows * k]);
            let want: Vec<f64> = x.to_f64().iter().map(|x| 0.5 * x).collect();
            same_bits(&format!("{} mix over NaN", b.kernel_set()), &mix(b, &stale, (0.0, 0.5), &x), &want);
        }
    }
}

/// A row's norm and gate do not depend on the rows beside it.
pub fn rows_steps_are_independent<B: Backend>(b: &B) {
    for (seed, k) in WIDTHS.into_iter().enumerate() {
        let mut rng = Rng::new(30 + seed as u64);
        let rows = 67;
        let weight = rng.tensor(&[k], 1.0);
        let (x, g) = (rng.tensor(&[rows, 2 * k], 1.0), rng.tensor(&[rows, 2 * k + 3], 2.0));
        let weight2 = rng.tensor(&[2 * k], 1.0);
        let spec = GatedNorm { group: k, eps: 1e-6, activation: Activation::Silu, gate_first: false };
        let run = |rows: Range<usize>| {
            let (x, g) = (slice_rows(&x, rows.clone()), slice_rows(&g, rows));
            [
                rms(b, &x, &weight2, 1e-6),
                head(b, &x, 0, 2, &weight),
                gated(b, spec, &x, &weight, &g, 3),
                gated(b, GatedNorm { gate_first: true, ..spec }, &x, &weight2, &g, 3),
                inner(b, MlpForm::SwiGlu, &x),
                inner(b, MlpForm::BoundedSwiGlu { limit: 0.5 }, &x),
                gate(b, &x, &g, 3, 1, Activation::Sigmoid),
                gate(b, &x, &g, 3, k, Activation::Silu),
                activate(b, &x, k..2 * k, Activation::SquaredRelu),
                mix(b, &x, (0.3, 1.7), &x),
            ]
        };
        let whole = run(0..rows);
        for (start, end) in [(0, 1), (5, 6), (3, 20), (66, 67)] {
            for (op, (part, whole)) in run(start..end).iter().zip(&whole).enumerate() {
                let width = whole.len() / rows;
                let label = format!("{} row op {op} k={k} rows {start}..{end}", b.kernel_set());
                same_bits(&label, part, &whole[start * width..end * width]);
            }
        }
    }
}
