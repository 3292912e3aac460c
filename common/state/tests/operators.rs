//! The operator algebra against hand-computed numbers and against its own laws.

use hypic_state::{DECAYED, DType, Dense, HostTensor, Transition, TransitionError};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

type Operator = Transition<HostTensor>;

fn dense(heads: usize, kept: &[u32], d_k: usize, blocks: &[f64]) -> Operator {
    let blocks = HostTensor::from_f64([kept.len(), d_k, d_k], blocks);
    Transition::Dense(Dense { heads, kept: kept.to_vec(), blocks })
}

fn random(rng: &mut StdRng, count: usize) -> Vec<f64> {
    (0..count).map(|_| rng.random_range(-1.0..1.0)).collect()
}

/// An operator of a random kind.
fn random_operator(rng: &mut StdRng, heads: usize, d_k: usize) -> Operator {
    match rng.random_range(0..3) {
        0 => Transition::Scalar(HostTensor::from_f64([heads], &random(rng, heads))),
        1 => Transition::Diagonal(HostTensor::from_f64([heads, d_k], &random(rng, heads * d_k))),
        _ => {
            let kept: Vec<u32> = (0..heads as u32).filter(|_| rng.random_bool(0.7)).collect();
            let blocks = random(rng, kept.len() * d_k * d_k);
            dense(heads, &kept, d_k, &blocks)
        }
    }
}

fn assert_close(a: &HostTensor, b: &HostTensor) {
    assert_eq!(a.shape(), b.shape());
    for (a, b) in a.to_f64().iter().zip(b.to_f64()) {
        assert!((a - b).abs() <= 1e-12 * (1.0 + a.abs()), "{a} is not {b}");
    }
}

#[test]
fn applies_each_kind_from_the_left() {
    // Two heads, d_k = 2, d_v = 3.
    let state = HostTensor::from_f64([2, 2, 3], &[1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12.]);
    let cases: [(Operator, [f64; 12]); 3] = [
        (
            Transition::Scalar(HostTensor::from_f64([2], &[2., -1.])),
            [2., 4., 6., 8., 10., 12., -7., -8., -9., -10., -11., -12.],
        ),
        (
            Transition::Diagonal(HostTensor::from_f64([2, 2], &[1., 10., 0., 0.5])),
            [1., 2., 3., 40., 50., 60., 0., 0., 0., 5., 5.5, 6.],
        ),
        // Head 0 has decayed; [[1, 2], [3, 4]] acts on head 1.
        (dense(2, &[1], 2, &[1., 2., 3., 4.]), [0., 0., 0., 0., 0., 0., 27., 30., 33., 61., 68., 75.]),
    ];
    for (operator, expected) in cases {
        assert_eq!(operator.apply(&state).unwrap().to_f64(), expected, "{operator:?}");
    }
}

#[test]
fn the_later_operator_stands_on_the_left() {
    let first = dense(1, &[0], 2, &[1., 2., 3., 4.]);
    let later = dense(1, &[0], 2, &[0., 1., 1., 1.]);
    // [[0, 1], [1, 1]] [[1, 2], [3, 4]]
    assert_eq!(first.then(&later).unwrap(), dense(1, &[0], 2, &[3., 4., 4., 6.]));

    let diagonal = Transition::Diagonal(HostTensor::from_f64([1, 2], &[10., 100.]));
    // Later: rows are scaled. Earlier: columns.
    assert_eq!(first.then(&diagonal).unwrap(), dense(1, &[0], 2, &[10., 20., 300., 400.]));
    assert_eq!(diagonal.then(&first).unwrap(), dense(1, &[0], 2, &[10., 200., 30., 400.]));
}

#[test]
fn following_is_applying_twice_and_associative_for_all_mixes_of_kinds() {
    let mut rng = StdRng::seed_from_u64(7);
    for _ in 0..300 {
        let (heads, d_k, d_v) = (rng.random_range(1..5), rng.random_range(1..6), rng.random_range(1..6));
        let [a, b, c] = [(); 3].map(|()| random_operator(&mut rng, heads, d_k));
        let state = HostTensor::from_f64([heads, d_k, d_v], &random(&mut rng, heads * d_k * d_v));

        let ab = a.then(&b).unwrap();
        assert_close(&ab.apply(&state).unwrap(), &b.apply(&a.apply(&state).unwrap()).unwrap());
        let left = ab.then(&c).unwrap();
        let right = a.then(&b.then(&c).unwrap()).unwrap();
        assert_close(&left.apply(&state).unwrap(), &right.apply(&state).unwrap());

        let identity = Operator::identity(heads);
        assert_eq!(identity.then(&a).unwrap().apply(&state).unwrap(), a.apply(&state).unwrap());
        assert_eq!(a.then(&identity).unwrap().apply(&state).unwrap(), a.apply(&state).unwrap());
        assert_eq!(identity.apply(&state).unwrap(), state);
    }
}

#[test]
fn a_dense_product_leaves_out_decayed_heads() {
    let d_k = 4;
    let identity: Vec<f64> = (0..d_k * d_k).map(|i| if i % (d_k + 1) == 0 { 1.0 } else { 0.0 }).collect();
    let blocks: Vec<f64> = identity.iter().chain(&identity).chain(&identity).copied().collect();
    let operator = dense(4, &[0, 2, 3], d_k, &blocks);
    let decay = Transition::Scalar(HostTensor::from_f64([4], &[2.0 * DECAYED, 1.0, 0.5 * DECAYED, f64::NAN]));
    for product in [operator.then(&decay).unwrap(), decay.then(&operator).unwrap()] {
        let Transition::Dense(product) = product else { panic!("a dense product") };
        // Head 1 was zero, head 2 has decayed, NaN is not hidden.
        assert_eq!((product.heads, product.kept), (4, vec![0, 3]));
        assert_eq!(product.blocks.shape(), [2, d_k, d_k]);
    }
    let none = operator.then(&dense(4, &[1], d_k, &identity)).unwrap();
    assert_eq!(none, dense(4, &[], d_k, &[]));
    let state = HostTensor::from_f64([4, d_k, 1], &[1.0; 16]);
    assert_eq!(none.apply(&state).unwrap().to_f64(), [0.0; 16]);
}

#[test]
fn the_result_is_f64_only_if_an_input_is() {
    let wide = Transition::Scalar(HostTensor::from_f64([1], &[0.1]));
    let single = Transition::Scalar(HostTensor::from_f32([1], &[0.5]));
    let half = Transition::Scalar(HostTensor::from_f32_as_bf16([1], &[0.5]));
    assert_eq!(wide.then(&single).unwrap().tensor().dtype(), DType::F64);
    assert_eq!(single.then(&wide).unwrap().tensor().dtype(), DType::F64);
    assert_eq!(half.then(&single).unwrap().tensor().dtype(), DType::F32);
    assert_eq!(half.then(&half).unwrap().tensor().dtype(), DType::F32);
    let state = HostTensor::from_f32_as_bf16([1, 1, 1], &[3.0]);
    assert_eq!(half.apply(&state).unwrap(), HostTensor::from_f32([1, 1, 1], &[1.5]));
    assert_eq!(wide.apply(&state).unwrap().dtype(), DType::F64);
}

#[test]
fn mismatches_are_refused_by_name() {
    let scalar = |heads| Transition::Scalar(HostTensor::from_f64([heads], &vec![1.0; heads]));
    let diagonal = |d_k| Transition::Diagonal(HostTensor::from_f64([2, d_k], &vec![1.0; 2 * d_k]));
    let state = HostTensor::from_f64([2, 3, 1], &[0.0; 6]);
    let two_heads = Err(TransitionError::Heads { expected: 3, got: 2 });
    assert_eq!(scalar(3).apply(&state), two_heads);
    assert_eq!(scalar(2).then(&scalar(3)).map(|_| ()), Err(TransitionError::Heads { expected: 3, got: 2 }));
    assert_eq!(diagonal(4).apply(&state), Err(TransitionError::KeyWidth { expected: 4, got: 3 }));
    assert!(diagonal(4).then(&dense(2, &[], 3, &[])).is_err());
    assert!(scalar(2).apply(&HostTensor::from_f64([2, 3], &[0.0; 6])).is_err());

    assert!(Transition::Scalar(state.clone()).dims().is_err());
    assert!(Transition::Diagonal(state.clone()).dims().is_err());
    let blocks = HostTensor::from_f64([2, 1, 1], &[1.0; 2]);
    for kept in [vec![0, 0], vec![1, 0], vec![0, 2], vec![0], vec![0, 1, 2]] {
        let operator = Transition::Dense(Dense { heads: 2, kept: kept.clone(), blocks: blocks.clone() });
        assert!(operator.dims().is_err(), "kept heads {kept:?}");
    }
}
