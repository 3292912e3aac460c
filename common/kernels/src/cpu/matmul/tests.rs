use half::bf16;

use super::*;

fn number(i: usize) -> f32 {
    (i as f32 * 0.71).sin()
}

/// All shapes around the tiles' edges, the right matrix in groups with gaps between them.
fn compare<E: Element>(isa: Isa, exact: f64) {
    for m in [1, 2, 3, 4, 5, 7, 16, 18] {
        for n in [1usize, 7, 8, 15, 16, 17, 33, 64, 70, 130] {
            for k in [0, 1, 2, 17, 200] {
                let (row, group, c_row) = (GROUP + 1, k * (GROUP + 1) + 3, n + 2);
                let a: Vec<f32> = (0..m * (k + 1)).map(number).collect();
                let b: Vec<E> = (0..n.div_ceil(GROUP) * group).map(|i| E::narrow(number(i + 5))).collect();
                let scales: Vec<f32> = (0..m).map(|i| number(i + 9)).collect();
                for scale in [Scale::Zero, Scale::All(0.5), Scale::Rows(&scales)] {
                    let before: Vec<f32> = (0..m * c_row).map(|i| number(i + 3)).collect();
                    let mut c = before.clone();
                    let left = Left { data: &a, row: 1, col: m };
                    matmul(isa, [m, n, k], left, Right { data: &b[..], row, group }, scale, &mut c, c_row);
                    for (at, got) in c.iter().enumerate() {
                        let (i, j) = (at / c_row, at % c_row);
                        if j >= n {
                            assert_eq!(*got, before[at], "{isa:?} {m} {n} {k}: written beside C");
                            continue;
                        }
                        let factor = match scale {
                            Scale::Zero => 0.0,
                            Scale::All(x) => x,
                            Scale::Rows(rows) => rows[i],
                        };
                        let b = |p: usize| f64::from(b[p * row + j / GROUP * group + j % GROUP].widen());
                        let sum: f64 = (0..k).map(|p| f64::from(a[p * m + i]) * b(p)).sum();
                        let want = f64::from(factor) * f64::from(before[at]) + sum;
                        assert!((f64::from(*got) - want).abs() < exact, "{isa:?} {m} {n} {k}: {got} is not {want}");
                    }
                }
            }
        }
    }
}

#[test]
fn every_shape_of_tile() {
    for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
        compare::<f32>(isa, 2e-5);
        compare::<bf16>(isa, 2e-5);
    }
}

#[test]
fn an_element_does_not_depend_on_its_neighbours() {
    let (m, n, k) = (40, 70, 300);
    let (a, b): (Vec<f32>, Vec<f32>) = ((0..m * k).map(number).collect(), (0..k * n).map(number).collect());
    for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
        let mut all = vec![0.0; m * n];
        matmul(isa, [m, n, k], Left { data: &a, row: k, col: 1 }, Right::rows(&b[..], n), Scale::Zero, &mut all, n);
        for i in [0, 3, 39] {
            let mut one = vec![0.0; n - 16];
            let left = Left { data: &a[i * k..], row: k, col: 1 };
            matmul(isa, [1, n - 16, k], left, Right::rows(&b[16..], n), Scale::Zero, &mut one, n);
            assert!(one == all[i * n + 16..(i + 1) * n], "{isa:?}: row {i}");
        }
    }
}

#[test]
#[should_panic(expected = "B is too short")]
fn short_matrices_are_refused() {
    let left = Left { data: &[0.0; 4], row: 2, col: 1 };
    matmul(Isa::Portable, [2, 3, 2], left, Right::rows(&[0f32; 5][..], 3), Scale::Zero, &mut [0.0; 6], 3);
}
