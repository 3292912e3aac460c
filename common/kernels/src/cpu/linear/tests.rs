use super::words::round_bf16;
use super::*;
use crate::cpu::testing::{isas, numbers, tensor};

/// As bf16 rounds it.
fn in_dtype(x: f32, dtype: DType) -> f64 {
    f64::from(if dtype == DType::Bf16 { bf16::from_f32(x).to_f32() } else { x })
}

/// The product in f64, and the sum of magnitudes that its rounding errors are measured by.
fn exact(w: &[f32], x: &[f32], n: usize, k: usize, dtype: DType) -> Vec<(f64, f64)> {
    let dot = |x: &[f32], w: &[f32]| {
        let terms = x.iter().zip(w).map(|(x, w)| in_dtype(*x, dtype) * in_dtype(*w, dtype));
        terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()))
    };
    x.chunks(k).flat_map(|x| (0..n).map(move |j| dot(x, &w[j * k..][..k]))).collect()
}

#[test]
fn products_match_f64_at_every_edge() {
    for (n, k) in [(1, 1), (5, 3), (31, 7), (32, 64), (33, 65), (95, 129), (128, 32), (161, 130), (300, 17)] {
        let weights = numbers(n as u64, n * k);
        let split = n / 3;
        let parts = [
            HostTensor::from_f32([split, k], &weights[..split * k]),
            HostTensor::from_f32([n - split, k], &weights[split * k..]),
        ];
        for dtype in [DType::F32, DType::Bf16] {
            let packed = CpuLinear::pack(&parts, dtype);
            for rows in [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 25] {
                let input = numbers(rows as u64 + 7, rows * k);
                let want = exact(&weights, &input, n, k, dtype);
                let before = numbers(99, rows * n);
                for isa in isas() {
                    let pool = Pool::new(2);
                    let x = tensor([rows, k], &input);
                    let mut out = tensor([1, 1], &[f32::NAN]);
                    linear(isa, &pool, &packed, &x, &mut out, false);
                    assert_eq!(out.shape(), [rows, n]);
                    let mut sum = tensor([rows, n], &before);
                    linear(isa, &pool, &packed, &x, &mut sum, true);
                    for (i, (want, size)) in want.iter().enumerate() {
                        let (got, off) = (out.data()[i], f64::from(out.data()[i]) - want);
                        let bound = (k as f64).sqrt().max(2.0) * 1.2e-7 * size + 1e-30;
                        assert!(off.abs() <= bound, "{isa:?} {dtype} {rows}x{n}x{k}: element {i} is {got}, not {want}");
                        assert_eq!(sum.data()[i], before[i] + got, "{isa:?} {dtype} {rows}x{n}x{k}: sum {i}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_in_any_batch_on_any_number_of_threads() {
    let (n, k, rows) = (417, 2359, 37);
    let weights = HostTensor::from_f32([n, k], &numbers(1, n * k));
    let input = numbers(2, rows * k);
    for dtype in [DType::F32, DType::Bf16] {
        let packed = CpuLinear::pack(std::slice::from_ref(&weights), dtype);
        for isa in isas() {
            let product = |threads: usize, rows: Range<usize>| {
                let x = tensor([rows.len(), k], &input[rows.start * k..rows.end * k]);
                let mut out = tensor([0, 0], &[]);
                linear(isa, &Pool::new(threads), &packed, &x, &mut out, false);
                out.data().iter().map(|v| v.to_bits()).collect::<Vec<_>>()
            };
            let all = product(1, 0..rows);
            assert_eq!(all, product(2, 0..rows), "{isa:?} {dtype}: two threads");
            for len in 1..=14 {
                for from in (0..rows - len).step_by(9) {
                    let some = product(1, from..from + len);
                    assert_eq!(some, all[from * n..(from + len) * n], "{isa:?} {dtype}: rows {from}, {len} of them");
                }
            }
        }
    }
}

#[test]
fn rows_are_split_where_columns_are_few() {
    let (n, k, rows) = (20, 700, 300);
    let packed = CpuLinear::pack(&[HostTensor::from_f32([n, k], &numbers(1, n * k))], DType::F32);
    let x = tensor([rows, k], &numbers(2, rows * k));
    for isa in isas() {
        let [one, three] = [1, 3].map(|threads| {
            let mut out = tensor([0, 0], &[]);
            linear(isa, &Pool::new(threads), &packed, &x, &mut out, false);
            out
        });
        assert_eq!(one, three, "{isa:?}");
    }
}

#[test]
fn packing_keeps_values_of_every_checkpoint_dtype() {
    let (n, k) = (70, 9);
    let values: Vec<f32> = numbers(3, n * k).iter().map(|v| bf16::from_f32(*v).to_f32()).collect();
    let halves: Vec<u8> = values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect();
    let ids = [69, 0, 31, 32, 33, 0];
    let want: Vec<f32> = ids.iter().flat_map(|id| values[*id as usize * k..][..k].to_vec()).collect();
    for part in [
        HostTensor::from_f32([n, k], &values),
        HostTensor::from_f64([n, k], &values.iter().map(|v| f64::from(*v)).collect::<Vec<_>>()),
        HostTensor::from_f32_as_bf16([n, k], &values),
        HostTensor::new(DType::F16, [n, k], halves.into()),
    ] {
        for dtype in [DType::F32, DType::Bf16] {
            let packed = CpuLinear::pack(std::slice::from_ref(&part), dtype);
            let mut out = tensor([0, 0], &[]);
            embed(&packed, &ids, &mut out);
            assert_eq!(out.shape(), [ids.len(), k]);
            assert_eq!(out.data(), want, "{part:?} as {dtype}");
        }
    }
}

#[test]
fn rounding_to_bf16_is_that_of_half() {
    let special = [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN_POSITIVE, 1e-40, 1.003_906_3];
    for x in numbers(5, 10_000).into_iter().chain(special) {
        assert_eq!(round_bf16(x), u32::from(bf16::from_f32(x).to_bits()), "{x}");
    }
    assert!(bf16::from_bits(round_bf16(f32::NAN) as u16).is_nan());
}

#[test]
#[should_panic(expected = "f32 or bf16, not f16")]
fn other_dtypes_are_refused() {
    CpuLinear::pack(&[HostTensor::from_f32([1, 1], &[1.0])], DType::F16);
}

#[test]
#[should_panic(expected = "token id 3 of an embedding of 3 rows")]
fn ids_outside_the_vocabulary_are_refused() {
    let packed = CpuLinear::pack(&[HostTensor::from_f32([3, 2], &[0.0; 6])], DType::F32);
    embed(&packed, &[3], &mut tensor([0, 0], &[]));
}
