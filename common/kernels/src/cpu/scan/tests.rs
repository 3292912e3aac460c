//! Closer than the conformance suite asks: the tolerances here are a few roundings of f32.

mod case;

use hypic_state::{Dense, HostTensor, Transition};

use crate::{Cpu, Isa, Reference, ScanShape};
use case::{Case, Kind, channels};

const SHAPE: ScanShape = ScanShape { key_heads: 2, heads: 4, d_k: 24, d_v: 20 };

fn backends(threads: usize) -> impl Iterator<Item = Cpu> {
    Isa::ALL.into_iter().filter(|isa| isa.available()).map(move |isa| Cpu::with_isa(threads, isa))
}

fn close(what: &str, got: &[f64], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    let largest = want.iter().fold(1.0, |m: f64, x| m.max(x.abs()));
    for (got, want) in got.iter().zip(want) {
        let off = (got - want).abs();
        assert!(off <= tolerance * largest, "{what}: off by {off:e} of {largest:e}");
    }
}

/// Numbers of all heads, zero where omitted.
fn all(t: &Transition<HostTensor>) -> Vec<f64> {
    let numbers = t.tensor().to_f64();
    let Transition::Dense(Dense { heads, kept, blocks }) = t else { return numbers };
    let size = blocks.shape()[1] * blocks.shape()[2];
    let mut all = vec![0.0; heads * size];
    for (block, h) in numbers.chunks(size).zip(kept) {
        all[*h as usize * size..][..size].copy_from_slice(block);
    }
    all
}

fn compare(case: &Case, cpu: &Cpu, tolerance: f64) {
    let before = case.state(3);
    let got = case.body(cpu, &before);
    let want = case.body(&Reference::<f64>::new(), &before);
    let label = format!("{:?} {:?}, {} rows", cpu.isa(), case.kind, case.rows);
    close(&format!("{label}: output"), &got.out, &want.out, tolerance);
    close(&format!("{label}: state"), &got.state, &want.state, tolerance);
    close(&format!("{label}: operator"), &all(&got.transition), &all(&want.transition), tolerance);
    close(&format!("{label}: zero start"), &got.zero_start, &want.zero_start, 2.0 * tolerance);
}

#[test]
fn every_length_around_two_chunks() {
    for cpu in backends(1) {
        for rows in 0..=130 {
            for kind in Kind::ALL {
                compare(&Case::new(kind, SHAPE, rows, rows as u64), &cpu, 2e-6);
            }
        }
    }
}

#[test]
fn other_widths() {
    for (d_k, d_v, key_heads, heads) in [(128, 128, 1, 2), (64, 128, 2, 2), (1, 1, 1, 1), (16, 33, 1, 3), (7, 64, 2, 8)]
    {
        let shape = ScanShape { key_heads, heads, d_k, d_v };
        for cpu in backends(2) {
            for kind in Kind::ALL {
                let mut case = Case::new(kind, shape, 100, 5);
                case.beta_scale = 2.0;
                compare(&case, &cpu, 4e-6);
            }
        }
    }
}

#[test]
fn strong_decay_hides_nothing_behind_it() {
    for kind in Kind::ALL {
        let mut case = Case::new(kind, SHAPE, 130, 7);
        case.a_log.fill(0.0);
        case.bias.fill(0.0);
        // Log decays of -1e3 in some rows, -1e-3 in the others.
        for (i, x) in case.x.iter_mut().enumerate() {
            let strong = i % 37 == 5;
            *x = match kind {
                Kind::Gla => {
                    if strong {
                        -1000.0
                    } else {
                        -1e-3
                    }
                }
                Kind::Gdn | Kind::Kda => {
                    if strong {
                        1000.0
                    } else {
                        -6.9
                    }
                }
            };
        }
        for cpu in backends(1) {
            compare(&case, &cpu, 2e-6);
        }
    }
}

#[test]
fn what_decays_at_once_leaves_no_nan() {
    for kind in Kind::ALL {
        let mut case = Case::new(kind, SHAPE, 70, 7);
        for x in case.x.iter_mut().step_by(3) {
            *x = if kind == Kind::Gla { f32::NEG_INFINITY } else { f32::MAX };
        }
        for cpu in backends(1) {
            compare(&case, &cpu, 2e-6);
        }
    }
}

#[test]
fn weak_decays_add_up() {
    let rows = 2000;
    let mut case = Case::new(Kind::Gla, ScanShape { key_heads: 1, heads: 1, d_k: 3, d_v: 2 }, rows, 7);
    case.x.fill(-1e-6);
    let want = (rows as f64 * f64::from(-1e-6f32)).exp();
    for cpu in backends(1) {
        let t = all(&case.body(&cpu, &case.state(3)).transition);
        close("diagonal operator", &t, &[want; 3], 6e-8);
        compare(&case, &cpu, 2e-6);
    }
}

#[test]
fn identical_keys_with_beta_of_one_are_stable() {
    for kind in [Kind::Gdn, Kind::Kda] {
        let mut case = Case::new(kind, SHAPE, 130, 8);
        let keys = case.shape.key_heads * case.shape.d_k;
        let first = case.qkv[keys..2 * keys].to_vec();
        for row in case.qkv.chunks_exact_mut(channels(&case.shape)) {
            row[keys..2 * keys].copy_from_slice(&first);
        }
        case.b.fill(14.0);
        case.a_log.fill(-9.0);
        for cpu in backends(1) {
            compare(&case, &cpu, 4e-6);
        }
    }
}

#[test]
fn a_decayed_head_is_omitted_for_good() {
    for kind in [Kind::Gdn, Kind::Kda] {
        let mut case = Case::new(kind, SHAPE, 130, 9);
        case.a_log.copy_from_slice(&[-6.0, 3.0, -6.0, 3.0]);
        let body = case.body(&Cpu::new(1), &case.state(1));
        let Transition::Dense(t) = &body.transition else { panic!("a dense operator") };
        assert_eq!(t.kept, [0, 2]);
        assert_eq!(t.blocks.shape(), [2, SHAPE.d_k, SHAPE.d_k]);
        let size = SHAPE.d_k * SHAPE.d_v;
        assert_eq!(body.zero_start[size..2 * size], body.state[size..2 * size]);
    }
}
