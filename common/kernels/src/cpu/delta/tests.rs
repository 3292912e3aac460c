mod case;

use hypic_state::{ComposeRule, RecurrentPart};

use super::*;
use case::{Case, Rng, SHAPE, all_blocks, close, naive};

fn compare(case: &Case, isa: Isa, pool: &Pool, tolerance: f64) {
    let before = case.state(3);
    let mut state = before.clone();
    let (out, t, zero_start) = case.body(isa, pool, &mut state);
    let want = naive(case, before.data());
    let label = format!("{isa:?}, {} rows", case.qkv.rows());
    close(&format!("{label}: output"), out.data(), &want.out, tolerance);
    close(&format!("{label}: state"), state.data(), &want.state, tolerance);
    close(&format!("{label}: operator"), &all_blocks(&t, case.shape.d_k), &want.operator, tolerance);
    let zeros = vec![0.0; before.data().len()];
    close(&format!("{label}: zero start"), zero_start.data(), &naive(case, &zeros).state, 2.0 * tolerance);
}

fn isas() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.available())
}

#[test]
fn every_length_around_two_chunks() {
    let pool = Pool::new(1);
    for isa in isas() {
        for rows in 0..=130 {
            compare(&Case::new(SHAPE, rows, rows as u64), isa, &pool, 2e-6);
        }
    }
}

#[test]
fn other_widths() {
    for (d_k, d_v, key_heads, heads) in [(128, 128, 1, 2), (64, 128, 2, 2), (1, 1, 1, 1), (16, 33, 1, 3), (7, 64, 2, 8)]
    {
        let shape = DeltaShape { key_heads, heads, d_k, d_v, beta_scale: 2.0 };
        for isa in isas() {
            compare(&Case::new(shape, 100, 5), isa, &Pool::new(2), 4e-6);
        }
    }
}

#[test]
fn strong_decay_hides_nothing_behind_it() {
    let mut case = Case::new(SHAPE, 130, 7);
    case.a_log.data_mut().fill(0.0);
    case.dt_bias.data_mut().fill(0.0);
    // softplus: -1e3 in some rows, -1e-3 in the others.
    for (i, a) in case.a.data_mut().iter_mut().enumerate() {
        *a = if i % 37 == 5 { 1000.0 } else { -6.9 };
    }
    for isa in isas() {
        compare(&case, isa, &Pool::new(1), 2e-6);
    }
}

#[test]
fn identical_keys_with_beta_of_one_are_stable() {
    let mut case = Case::new(SHAPE, 130, 8);
    let channels = SHAPE.channels();
    let first = case.qkv.data()[..channels].to_vec();
    let keys = SHAPE.key_heads * SHAPE.d_k;
    for row in case.qkv.data_mut().chunks_exact_mut(channels) {
        row[keys..2 * keys].copy_from_slice(&first[keys..2 * keys]);
    }
    case.b.data_mut().fill(14.0);
    case.a_log.data_mut().fill(-9.0);
    for isa in isas() {
        compare(&case, isa, &Pool::new(1), 4e-6);
    }
}

#[test]
fn a_decayed_head_is_omitted_for_good() {
    let mut case = Case::new(SHAPE, 130, 9);
    case.a_log.data_mut().copy_from_slice(&[-6.0, 3.0, -6.0, 3.0]);
    let mut state = case.state(1);
    let (_, t, zero_start) = case.body(Isa::best(), &Pool::new(1), &mut state);
    assert_eq!(t.kept, [0, 2]);
    assert_eq!(t.blocks.shape(), [2, SHAPE.d_k, SHAPE.d_k]);
    let size = SHAPE.d_k * SHAPE.d_v;
    assert_eq!(zero_start.data()[size..2 * size], state.data()[size..2 * size]);
}

#[test]
fn a_body_without_rows_is_the_identity() {
    let case = Case::new(SHAPE, 0, 9);
    let (_, t, zero_start) = case.body(Isa::best(), &Pool::new(1), &mut case.state(1));
    assert_eq!(t.kept, [0, 1, 2, 3]);
    assert!(zero_start.data().iter().all(|x| *x == 0.0));
}

#[test]
fn cuts_on_the_grid_and_calls_and_threads_change_no_bit() {
    for isa in isas() {
        let shape = DeltaShape { key_heads: 2, heads: 6, d_k: 32, d_v: 48, beta_scale: 1.0 };
        let case = Case::new(shape, 300, 11);
        let mut whole_state = case.state(2);
        let (whole, t, zero_start) = case.body(isa, &Pool::new(1), &mut whole_state);
        for cut in [64, 128, 256] {
            // In one call, on other threads, beside another sequence.
            let pool = Pool::new(3);
            let (mut state, mut other) = (case.state(2), case.state(4));
            let mut carry = CpuCarry::new(6, 32, 48);
            let mut part = case.clone();
            part.qkv.resize(&[cut, shape.channels()]);
            part.qkv.data_mut().copy_from_slice(&case.qkv.data()[..cut * shape.channels()]);
            let steps = vec![Step::Rows { rows: 0..cut, carry: Some(&mut carry) }];
            let first = part.run(isa, &pool, &mut [Fold { state: &mut state, steps }]);
            let steps = vec![Step::Rows { rows: cut..300, carry: Some(&mut carry) }];
            let beside = vec![Step::Rows { rows: 0..cut - 1, carry: None }];
            let rest = case.run(
                isa,
                &pool,
                &mut [Fold { state: &mut other, steps: beside }, Fold { state: &mut state, steps }],
            );
            let row = 6 * 48;
            assert!(first.data() == &whole.data()[..cut * row], "{isa:?}: rows before {cut}");
            assert!(rest.data()[cut * row..] == whole.data()[cut * row..], "{isa:?}: rows behind {cut}");
            assert!(state == whole_state, "{isa:?}: state");
            let (Transition::Dense(again), zero_again) = finish(isa, &pool, carry, &state) else { panic!("dense") };
            assert!(again == t && zero_again == zero_start, "{isa:?}: operator");
        }
    }
}

#[test]
fn a_jump_is_what_its_body_does() {
    let (isa, pool) = (Isa::best(), Pool::new(2));
    let case = Case::new(SHAPE, 90, 13);
    let (before, mut after) = (case.state(6), case.state(6));
    let mut anywhere = case.state(7);
    let (_, t, zero_start) = case.body(isa, &pool, &mut anywhere);
    case.body(isa, &pool, &mut after);
    let part = RecurrentPart { transition: Transition::Dense(t), state: zero_start, tail: None };

    let jumped = |rule, part: &RecurrentPart<Cpu>| {
        let (mut state, mut saved) = (before.clone(), CpuTensor::zeros(&[1]));
        let steps = vec![Step::Jump { rule, part }, Step::Save(&mut saved), Step::Rows { rows: 0..3, carry: None }];
        case.run(isa, &pool, &mut [Fold { state: &mut state, steps }]);
        assert!(saved != state);
        saved
    };
    let to_f64 = |t: &CpuTensor| t.data().iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
    let body = to_f64(&part.state);
    close("transition", jumped(ComposeRule::Transition, &part).data(), &to_f64(&after), 2e-6);
    close("last", jumped(ComposeRule::Last, &part).data(), &body, 0.0);
    let sum = |factor: &dyn Fn(usize) -> f64| {
        let pairs = before.data().iter().zip(&body).enumerate();
        pairs.map(|(i, (x, y))| factor(i) * f64::from(*x) + y).collect::<Vec<_>>()
    };
    close("add", jumped(ComposeRule::Add, &part).data(), &sum(&|_| 1.0), 1e-7);

    let mut factors = CpuTensor::zeros(&[4]);
    factors.data_mut().copy_from_slice(&[0.0, 0.5, 1.0, -2.0]);
    let (size, rows) = (SHAPE.d_k * SHAPE.d_v, Rng(3).tensor(&[4, SHAPE.d_k], 1.0));
    let want = sum(&|i| [0.0, 0.5, 1.0, -2.0][i / size]);
    let scalar = RecurrentPart { transition: Transition::Scalar(factors), state: part.state.clone(), tail: None };
    close("scalar", jumped(ComposeRule::Transition, &scalar).data(), &want, 3e-7);
    let want = sum(&|i| f64::from(rows.data()[i / SHAPE.d_v]));
    let diagonal = RecurrentPart { transition: Transition::Diagonal(rows.clone()), state: part.state, tail: None };
    close("diagonal", jumped(ComposeRule::Transition, &diagonal).data(), &want, 3e-7);
}

#[test]
#[should_panic(expected = "a row is in two steps")]
fn overlapping_steps_are_refused() {
    let case = Case::new(SHAPE, 4, 1);
    let mut state = case.state(1);
    let steps = vec![Step::Rows { rows: 0..3, carry: None }, Step::Rows { rows: 2..4, carry: None }];
    case.run(Isa::best(), &Pool::new(1), &mut [Fold { state: &mut state, steps }]);
}
