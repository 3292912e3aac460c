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

fn gate_f64(g: f32, gate: Gate) -> f64 {
    let s = 1.0 / (1.0 + (-f64::from(g)).exp());
    if gate == Gate::Silu { f64::from(g) * s } else { s }
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
        silu_mul(isa, pool, &x, &mut out);
        assert_eq!(out.shape(), [rows, f]);
        for (i, got) in out.data().iter().enumerate() {
            let x = &x.data()[i / f * 2 * f..];
            let want = gate_f64(x[i % f], Gate::Silu) * f64::from(x[f + i % f]);
            assert!(near(*got, want), "{got} is not {want}");
        }
        for kind in [Gate::Silu, Gate::Sigmoid] {
            let mut y = out.clone();
            gate(isa, pool, &mut y, Cols::new(&wide, col), kind);
            for (i, got) in y.data().iter().enumerate() {
                let g = wide.data()[i / f * wide.cols() + col + i % f];
                assert!(near(*got, f64::from(out.data()[i]) * gate_f64(g, kind)), "{kind:?} of {g}");
            }
        }
    });
}

#[test]
fn gated_norm_is_the_norm_of_each_head_times_its_gate() {
    let (rows, heads, width, col) = (757, 3, 20, 4);
    let o = tensor(&[rows, heads * width], wave);
    let g = tensor(&[rows, col + heads * width], |i| wave(i + 5));
    let weight = tensor(&[width], |i| 1.0 + 0.2 * wave(i));
    each_isa(|isa, pool| {
        for kind in [Gate::Silu, Gate::Sigmoid] {
            let mut out = tensor(&[1], |_| f32::NAN);
            gated_norm(isa, pool, &o, &weight, 1e-6, Cols::new(&g, col), kind, &mut out);
            for (i, got) in out.data().iter().enumerate() {
                let (row, c) = (i / (heads * width), i % (heads * width));
                let head = &o.data()[i - c % width..][..width];
                let gate = gate_f64(g.data()[row * g.cols() + col + c], kind);
                let want = f64::from(o.data()[i]) * scale_f64(head, 1e-6) * f64::from(weight.data()[c % width]) * gate;
                assert!(near(*got, want), "{kind:?}: {got} is not {want}");
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
        gated_norm(isa, &Pool::new(1), &x, &weight, 1e-6, Cols::new(&x, 0), Gate::Silu, &mut out);
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
