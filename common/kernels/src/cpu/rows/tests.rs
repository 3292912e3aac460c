use super::*;
use hypic_state::HostTensor;

fn tensor(shape: &[usize], value: impl Fn(usize) -> f32) -> CpuTensor {
    let values: Vec<f32> = (0..shape.iter().product()).map(value).collect();
    CpuTensor::upload(&HostTensor::from_f32(shape, &values))
}

/// Looks random, in [-4, 4].
fn wave(i: usize) -> f32 {
    4.0 * ((i * i + 3 * i) as f32 * 0.37).sin()
}

fn near(got: f32, want: f64) -> bool {
    (f64::from(got) - want).abs() <= 1e-6 * want.abs() + 1e-9
}

const ACTIVATIONS: [Activation; 3] = [Activation::Silu, Activation::Sigmoid, Activation::SquaredRelu];

fn activated_f64(x: f32, activation: Activation) -> f64 {
    let x = f64::from(x);
    let s = 1.0 / (1.0 + (-x).exp());
    match activation {
        Activation::Silu => x * s,
        Activation::Sigmoid => s,
        Activation::SquaredRelu => x.max(0.0).powi(2),
    }
}

fn scale_f64(x: &[f32], eps: f64) -> f64 {
    let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / x.len() as f64;
    1.0 / (mean + eps).sqrt()
}

fn each_isa(check: impl Fn(Isa, &Pool)) {
    for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
        for threads in [1, 2] {
            check(isa, &Pool::new(threads));
        }
    }
}

#[test]
fn norms_match_f64() {
    for (rows, width) in [(0, 4), (1, 1), (3, 15), (2, 16), (2100, 130)] {
        let x = tensor(&[rows, width], wave);
        let weight = tensor(&[width], |i| 1.0 + 0.1 * wave(i));
        each_isa(|isa, pool| {
            let mut out = tensor(&[1], |_| f32::NAN);
            rms_norm(isa, pool, &x, &weight, 1e-6, &mut out);
            assert_eq!(out.shape(), [rows, width]);
            for (out, x) in out.data().chunks(width).zip(x.data().chunks(width)) {
                let scale = scale_f64(x, 1e-6);
                for i in 0..width {
                    let want = f64::from(x[i]) * scale * f64::from(weight.data()[i]);
                    assert!(near(out[i], want), "{isa:?} [{rows}, {width}]: {} is not {want}", out[i]);
                }
            }
        });
    }
}

#[test]
fn head_norm_touches_its_columns_alone() {
    let (rows, cols, col, heads, width) = (4500, 60, 7, 3, 12);
    let weight = tensor(&[width], |i| 1.0 - 0.1 * wave(i));
    let before = tensor(&[rows, cols], wave);
    each_isa(|isa, pool| {
        let mut x = before.clone();
        head_norm(isa, pool, &mut x, col, heads, &weight, 1e-5);
        for (after, before) in x.data().chunks(cols).zip(before.data().chunks(cols)) {
            for c in 0..cols {
                if c < col || c >= col + heads * width {
                    assert_eq!(after[c], before[c], "column {c}");
                    continue;
                }
                let head = &before[c - (c - col) % width..][..width];
                let want = f64::from(before[c]) * scale_f64(head, 1e-5) * f64::from(weight.data()[(c - col) % width]);
                assert!(near(after[c], want), "column {c}: {} is not {want}", after[c]);
            }
        }
    });
}

#[test]
fn gates_match_f64() {
    let (rows, f, col) = (1301, 37, 5);
    let x = tensor(&[rows, 2 * f], wave);
    let wide = tensor(&[rows, f + col + 2], |i| wave(i + 11));
    each_isa(|isa, pool| {
        let mut out = tensor(&[1], |_| f32::NAN);
        mlp_inner(isa, pool, MlpForm::SwiGlu, &x, &mut out);
        assert_eq!(out.shape(), [rows, f]);
        for (i, got) in out.data().iter().enumerate() {
            let x = &x.data()[i / f * 2 * f..];
            let want = activated_f64(x[i % f], Activation::Silu) * f64::from(x[f + i % f]);
            assert!(near(*got, want), "{got} is not {want}");
        }
        for kind in ACTIVATIONS {
            for width in [1, f] {
                let mut y = out.clone();
                gate(isa, pool, &mut y, Cols::new(&wide, col), width, kind);
                for (i, got) in y.data().iter().enumerate() {
                    let g = wide.data()[i / f * wide.cols() + col + i % f / width];
                    let want = f64::from(out.data()[i]) * activated_f64(g, kind);
                    assert!(near(*got, want), "{kind:?} of {g}, width {width}");
                }
            }
            let mut y = wide.clone();
            activate(isa, pool, &mut y, col..col + f, kind);
            for (i, (got, x)) in y.data().iter().zip(wide.data()).enumerate() {
                let inside = (col..col + f).contains(&(i % wide.cols()));
                let want = if inside { activated_f64(*x, kind) } else { f64::from(*x) };
                assert!(near(*got, want), "{kind:?} of {x}, column {}", i % wide.cols());
            }
        }
    });
}

#[test]
fn gated_norm_is_the_norm_of_each_group_beside_its_gate() {
    let (rows, heads, width, col) = (757, 3, 20, 4);
    let cols = heads * width;
    let o = tensor(&[rows, cols], wave);
    let g = tensor(&[rows, col + cols], |i| wave(i + 5));
    each_isa(|isa, pool| {
        for (activation, gate_first, weights) in [
            (Activation::Silu, false, width),
            (Activation::Sigmoid, false, cols),
            (Activation::Silu, true, cols),
            (Activation::SquaredRelu, true, width),
        ] {
            let weight = tensor(&[weights], |i| 1.0 + 0.2 * wave(i));
            let spec = GatedNorm { group: width, eps: 1e-6, activation, gate_first };
            let mut out = tensor(&[1], |_| f32::NAN);
            gated_norm(isa, pool, spec, &o, &weight, Cols::new(&g, col), &mut out);
            for (i, got) in out.data().iter().enumerate() {
                let (row, c) = (i / cols, i % cols);
                let gate = |c: usize| activated_f64(g.data()[row * g.cols() + col + c], activation);
                let start = c - c % width;
                let group: Vec<f64> = (start..start + width)
                    .map(|c| f64::from(o.data()[row * cols + c]) * if gate_first { gate(c) } else { 1.0 })
                    .collect();
                let mean = group.iter().map(|x| x * x).sum::<f64>() / width as f64;
                let normed = group[c % width] / (mean + 1e-6).sqrt() * f64::from(weight.data()[c % weights]);
                let want = if gate_first { normed } else { normed * gate(c) };
                assert!(near(*got, want), "{spec:?}: {got} is not {want}");
            }
        }
    });
}

#[test]
fn every_instruction_set_has_the_same_bits() {
    let x = tensor(&[5, 77], wave);
    let weight = tensor(&[77], wave);
    let mut first: Option<CpuTensor> = None;
    for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
        let mut out = CpuTensor::zeros(&[0]);
        let spec = GatedNorm { group: 7, eps: 1e-6, activation: Activation::Silu, gate_first: true };
        gated_norm(isa, &Pool::new(1), spec, &x, &weight, Cols::new(&x, 0), &mut out);
        assert_eq!(*first.get_or_insert(out.clone()), out, "{isa:?}");
    }
}

#[test]
fn gather_takes_rows_in_any_order() {
    let x = tensor(&[4, 3], |i| i as f32);
    let mut out = tensor(&[1], |_| f32::NAN);
    gather(&x, &[3, 0, 3], &mut out);
    assert_eq!(out.shape(), [3, 3]);
    assert_eq!(out.data(), [9.0, 10.0, 11.0, 0.0, 1.0, 2.0, 9.0, 10.0, 11.0]);
    gather(&x, &[], &mut out);
    assert_eq!(out.shape(), [0, 3]);
}

#[test]
fn mix_reads_nothing_that_it_overwrites() {
    let x = tensor(&[700, 37], wave);
    each_isa(|isa, pool| {
        let mut acc = tensor(&[700, 37], |_| f32::NAN);
        mix(isa, pool, &mut acc, 0.0, &x, 2.0);
        mix(isa, pool, &mut acc, 0.5, &x, -3.0);
        for (got, x) in acc.data().iter().zip(x.data()) {
            assert_eq!(*got, 0.5 * (2.0 * x) + -3.0 * x);
        }
    });
}
