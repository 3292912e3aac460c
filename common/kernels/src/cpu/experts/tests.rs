use hypic_state::HostTensor;

use super::*;
use crate::cpu::testing::{isas, numbers, tensor};
use crate::{Activation, RouteSpec, Score};

fn spec(experts: usize, top_k: usize) -> RouteSpec {
    RouteSpec {
        experts,
        top_k,
        score: Score::Sigmoid,
        groups: 1,
        top_groups: 1,
        renormalise: false,
        renormalise_eps: 0.0,
        scale: 1.0,
    }
}

fn pack(n: usize, k: usize, seed: u64, dtype: DType) -> CpuLinear {
    CpuLinear::pack(&[HostTensor::from_f32([n, k], &numbers(seed, n * k))], dtype)
}

#[test]
fn rows_are_listed_by_expert() {
    let logits = tensor([3, 4], &[0.0, 3.0, 2.0, 1.0, 5.0, -1.0, -2.0, 4.0, 1.0, 1.0, 1.0, 1.0]);
    let mut routing = CpuRouting::default();
    for threads in [1, 2] {
        route(Isa::best(), &Pool::new(threads), &spec(4, 2), &logits, None, &mut routing);
        assert_eq!((routing.total, routing.experts()), (3, 4));
        assert_eq!(routing.starts, [0, 2, 4, 5, 6]);
        assert_eq!(routing.rows, [1, 2, 0, 2, 0, 1]);
    }
    // Reused for fewer rows.
    route(Isa::best(), &Pool::new(1), &spec(4, 2), &tensor([1, 4], &[0.0, 0.0, 9.0, 9.0]), None, &mut routing);
    assert_eq!((&routing.starts[..], &routing.rows[..]), (&[0, 0, 0, 1, 2][..], &[0, 0][..]));
}

#[test]
fn blocks_tasks_and_neighbours_change_no_bit() {
    // Wide enough for several tasks, many enough rows for several blocks, and no multiple of a panel.
    let (hidden, inner, count, rows) = (333, 283, 5, 300);
    let (x, before) = (numbers(1, rows * hidden), numbers(2, rows * hidden));
    let logits = numbers(3, rows * count);
    let plain = MlpForm::Plain(Activation::SquaredRelu);
    for (dtype, form) in [DType::F32, DType::Bf16].into_iter().flat_map(|d| [(d, MlpForm::SwiGlu), (d, plain)]) {
        let all: Vec<Expert<Cpu>> = (0..count as u64)
            .map(|e| Expert {
                gate_up: pack(form.rows(inner), hidden, 10 + e, dtype),
                down: pack(hidden, inner, 20 + e, dtype),
            })
            .collect();
        for isa in isas() {
            let run = |threads: usize, rows: Range<usize>| {
                let pool = Pool::new(threads);
                let part =
                    |values: &[f32], width| tensor([rows.len(), width], &values[rows.start * width..rows.end * width]);
                let mut routing = CpuRouting::default();
                route(isa, &pool, &spec(count, 3), &part(&logits, count), None, &mut routing);
                let mut acc = part(&before, hidden);
                experts(isa, &pool, form, &all, &routing, &part(&x, hidden), &mut acc);
                acc.data().to_vec()
            };
            let whole = run(1, 0..rows);
            assert!(whole == run(3, 0..rows), "{isa:?} {dtype} {form:?}: threads");
            for (start, end) in [(0, 1), (7, 20), (150, 300), (299, 300)] {
                assert!(
                    run(2, start..end) == whole[start * hidden..end * hidden],
                    "{isa:?} {dtype} {form:?}: {start}..{end}"
                );
            }
        }
    }
}

#[test]
#[should_panic(expected = "expert 1 is of another shape or dtype")]
fn experts_of_different_shapes_are_refused() {
    let all = [8, 6]
        .map(|inner| Expert::<Cpu> { gate_up: pack(2 * inner, 4, 1, DType::F32), down: pack(4, inner, 2, DType::F32) });
    let (isa, pool) = (Isa::best(), Pool::new(1));
    let mut routing = CpuRouting::default();
    route(isa, &pool, &spec(2, 1), &tensor([1, 2], &[0.0; 2]), None, &mut routing);
    experts(isa, &pool, MlpForm::SwiGlu, &all, &routing, &tensor([1, 4], &[0.0; 4]), &mut tensor([1, 4], &[0.0; 4]));
}
