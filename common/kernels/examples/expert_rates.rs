//! Rates of experts and of latent attention, each as a share of a plain product of as many operations measured beside
//! it: what grouping rows costs, and what it costs to read values from keys.
//!
//! `cargo run --release -p hypic-kernels --example expert_rates [threads]`

mod timing;

use std::time::Duration;

use hypic_kernels::{
    AttentionRows, AttentionShape, Backend, Cols, Cpu, Expert, KvShape, MlpForm, Positions, RouteSpec, Score,
};
use hypic_state::{DType, HostTensor};

/// Time to measure each rate for.
const SPAN: Duration = Duration::from_millis(400);

/// Seconds of `work`: the best of its repetitions.
fn seconds(work: impl FnMut()) -> f64 {
    timing::fastest(SPAN, work).as_secs_f64()
}

fn numbers(shape: &[usize]) -> HostTensor {
    let values: Vec<f32> = (0..shape.iter().product()).map(|i: usize| (i as f32 * 0.37).sin() * 0.1).collect();
    HostTensor::from_f32(shape, &values)
}

/// Experts as in Qwen3.5-35B-A3B, but fewer of them.
fn experts(cpu: &Cpu, dtype: DType) {
    let (hidden, inner, count, top_k) = (2048, 512, 64, 8);
    let pack = |n: usize, k: usize| cpu.pack(&[numbers(&[n, k])], dtype);
    let all: Vec<Expert<Cpu>> =
        (0..count).map(|_| Expert { gate_up: pack(2 * inner, hidden), down: pack(hidden, inner) }).collect();
    let spec = RouteSpec {
        experts: count,
        top_k,
        score: Score::Softmax,
        groups: 1,
        top_groups: 1,
        renormalise: true,
        renormalise_eps: 0.0,
        scale: 1.0,
    };
    for rows in [1, 8, 64, 512] {
        let x = cpu.upload(&numbers(&[rows, hidden]));
        // Spread: every row has other experts.
        let logits: Vec<f32> = (0..rows * count).map(|i| ((i * i % 8191) as f32 * 0.77).sin()).collect();
        let logits = cpu.upload(&HostTensor::from_f32([rows, count], &logits));
        let mut acc = cpu.zeros(&[rows, hidden]);
        let mut routing = cpu.routing();
        let route = seconds(|| cpu.route(&spec, &logits, None, &mut routing));
        let taken = seconds(|| cpu.experts(MlpForm::SwiGlu, &all, &routing, &x, &mut acc));
        let flops = (6 * rows * top_k * hidden * inner) as f64;

        // One dense layer with as many operations for each row, its weights as large as those of a row's experts.
        let (wide, back) = (pack(2 * inner * top_k, hidden), pack(hidden, inner * top_k));
        let (mut out, mut middle) = (cpu.zeros(&[0, 0]), cpu.zeros(&[0, 0]));
        let dense = seconds(|| {
            cpu.linear(&wide, &x, &mut out);
            cpu.mlp_inner(MlpForm::SwiGlu, &out, &mut middle);
            cpu.linear_add(&back, &middle, &mut acc);
        });
        println!(
            "experts {dtype}, {rows:3} rows: {:7.3} ms, {:5.1} GFLOP/s, {:.2} of a dense MLP's rate; routing {:.3} ms",
            taken * 1e3,
            flops / taken / 1e9,
            dense / taken,
            route * 1e3
        );
    }
}

/// One key of 576 numbers for all heads, of which 512 are the value; and the same with values stored.
fn latent(cpu: &Cpu, dtype: DType) {
    let (tokens, heads) = (2048, 16);
    for rows in [1, 8, 64] {
        let taken = [true, false].map(|shared| {
            let kv = KvShape { heads: 1, d_k: 576, d_v: 512, shared, dtype };
            let shape = AttentionShape { heads, kv, scale: 0.05 };
            let mut own = cpu.kv(kv);
            let k = cpu.upload(&numbers(&[tokens + rows, 576]));
            let positions: Vec<i64> = (0..(tokens + rows) as i64).collect();
            let v = (!shared).then(|| Cols::new(&k, 0));
            cpu.kv_append(&mut own, 0..tokens + rows, Cols::new(&k, 0), v, Positions::plain(&positions), None);
            let q = cpu.upload(&numbers(&[rows, heads * 576]));
            let mut out = cpu.zeros(&[0, 0]);
            seconds(|| {
                let positions = &positions[tokens..];
                let sequence = AttentionRows {
                    rows: 0..rows,
                    positions: Positions::plain(positions),
                    spans: Vec::new(),
                    own: &own,
                };
                cpu.attention(shape, None, Cols::new(&q, 0), &[sequence], &mut out);
            })
        });
        let flops = (2 * rows * heads * tokens * (576 + 512)) as f64;
        println!(
            "latent attention {dtype}, {rows:2} rows: {:7.3} ms, {:5.1} GFLOP/s, {:.2} of the rate with values stored",
            taken[0] * 1e3,
            flops / taken[0] / 1e9,
            taken[1] / taken[0]
        );
    }
}

fn main() {
    let threads = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(1);
    let cpu = Cpu::new(threads);
    println!("{:?}, {threads} threads", cpu.isa());
    for dtype in [DType::F32, DType::Bf16] {
        experts(&cpu, dtype);
        latent(&cpu, dtype);
    }
}
