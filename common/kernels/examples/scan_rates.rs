//! Rates of the gated-delta scan and of attention, beside the peak that the machine reaches.
//!
//! `cargo run --release -p hypic-kernels --example scan_rates -- [threads]`

use std::hint::black_box;
use std::time::{Duration, Instant};

use hypic_kernels::{
    AttentionRows, AttentionShape, Backend, Cols, Cpu, DeltaInputs, DeltaShape, Fold, KvShape, RopeSpec, Span, Step,
};
use hypic_state::{DType, HostTensor};

/// Least runs of a measurement; the fastest counts.
const RUNS: usize = 5;
/// Hidden size of the model whose share of heads is measured.
const HIDDEN: f64 = 2048.0;
/// Least duration of a measurement.
const MEASURE: Duration = Duration::from_millis(800);

fn main() {
    let threads = std::env::args().nth(1).map_or(1, |n| n.parse().expect("a number of threads"));
    let cpu = Cpu::new(threads);
    let peak = peak() * threads as f64;
    println!("{}, {threads} threads, f32 peak {peak:.0} GFLOP/s", cpu.kernel_set());
    scan(&cpu, peak);
    prefill(&cpu, peak);
    decode(&cpu);
}

/// Seconds of the fastest run.
fn fastest(mut run: impl FnMut()) -> f64 {
    let begin = Instant::now();
    let mut best = f64::INFINITY;
    let mut runs = 0;
    while runs < RUNS || begin.elapsed() < MEASURE {
        let start = Instant::now();
        run();
        best = best.min(start.elapsed().as_secs_f64());
        runs += 1;
    }
    best
}

/// GFLOP/s of one thread with operands in registers.
fn peak() -> f64 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") {
        const STEPS: usize = 100_000;
        let seconds = fastest(|| {
            // SAFETY: the CPU has it.
            black_box(unsafe { fused_chains(STEPS) });
        });
        return (STEPS * 16 * 16 * 2) as f64 / seconds * 1e-9;
    }
    f64::NAN
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn fused_chains(steps: usize) -> [f32; 16] {
    use std::arch::x86_64::{_mm512_fmadd_ps, _mm512_reduce_add_ps, _mm512_set1_ps};
    let (x, y) = (_mm512_set1_ps(black_box(0.999)), _mm512_set1_ps(black_box(0.001)));
    let mut chains = [_mm512_set1_ps(0.5); 16];
    for _ in 0..steps {
        for chain in &mut chains {
            *chain = _mm512_fmadd_ps(*chain, x, y);
        }
    }
    chains.map(|c| _mm512_reduce_add_ps(c))
}

fn tensor(cpu: &Cpu, shape: &[usize], scale: f32) -> <Cpu as hypic_state::Storage>::Tensor {
    let len = shape.iter().product::<usize>();
    let values: Vec<f32> = (0..len).map(|i| ((i * 7919) as f32 * 0.0137).sin() * scale).collect();
    cpu.upload(&HostTensor::from_f32(shape, &values))
}

fn scan(cpu: &Cpu, peak: f64) {
    for (rows, heads, key_heads, d) in
        [(512, 2, 1, 128), (512, 4, 4, 64), (64, 2, 1, 128), (1, 32, 16, 128), (16, 32, 16, 128)]
    {
        let shape = DeltaShape { key_heads, heads, d_k: d, d_v: d, beta_scale: 1.0 };
        let qkv = tensor(cpu, &[rows, shape.channels()], 1.0);
        let gates = tensor(cpu, &[rows, 2 * heads], 1.0);
        // Slow decay: no operator dies.
        let a_log = cpu.upload(&HostTensor::from_f32([heads], &vec![-9.0; heads]));
        let dt_bias = cpu.zeros(&[heads]);
        let mut state = cpu.zeros(&[heads, d, d]);
        let mut out = cpu.alloc(&[rows, heads * d]);
        let mut run = |with_carry: bool| {
            let mut carry = with_carry.then(|| cpu.carry(heads, d, d));
            let steps = vec![Step::Rows { rows: 0..rows, carry: carry.as_mut() }];
            let (b, a) = (Cols::new(&gates, 0), Cols::new(&gates, heads));
            let inputs = DeltaInputs { qkv: &qkv, b, a, a_log: &a_log, dt_bias: &dt_bias };
            cpu.gated_delta(shape, inputs, &mut [Fold { state: &mut state, steps }], &mut out);
            carry.map(|c| cpu.finish(c, &state))
        };
        let plain = fastest(|| drop(run(false)));
        // Products per chunk of c rows: K S, Q S, K^T U, both triangles twice (per key head and per head).
        let chunk = rows.min(64) as f64;
        let (d_f, share) = (d as f64, key_heads as f64 / heads as f64);
        let per_row = 2.0 * heads as f64 * (3.0 * d_f * d_f + chunk * d_f + share * chunk * d_f);
        let rate = per_row * rows as f64 / plain * 1e-9;
        println!(
            "scan {rows:4} rows, {heads:2} heads of {d}: {:7.2} us a row, {rate:5.1} GFLOP/s ({:.0} % of the peak)",
            plain / rows as f64 * 1e6,
            rate / peak * 100.0,
        );
        if rows < 64 {
            continue;
        }
        let both = fastest(|| drop(run(true)));
        // The rows' projections to q, k, v and z and from the output, were they computed at the peak.
        let projections = 2.0 * HIDDEN * (shape.channels() + 2 * heads * d) as f64 * rows as f64 / peak * 1e-9;
        println!(
            "  with T {:7.2} us a row: {:.0} % of the scan, {:.1} % of scan and projections from {HIDDEN} at the peak",
            both / rows as f64 * 1e6,
            (both / plain - 1.0) * 100.0,
            (both - plain) / (plain + projections) * 100.0,
        );
    }
}

struct Attention {
    shape: AttentionShape,
    rope: RopeSpec,
}

fn attention_layer(dtype: DType) -> Attention {
    let kv = KvShape { heads: 2, d_k: 128, d_v: 128, dtype };
    let inv_freq = (0..32).map(|i| 1e6f64.powf(-f64::from(i) / 32.0)).collect();
    Attention {
        shape: AttentionShape { heads: 16, kv, scale: 128f32.powf(-0.5) },
        rope: RopeSpec { offset: 0, inv_freq, interleaved: false, scale: 1.0 },
    }
}

fn prefill(cpu: &Cpu, peak: f64) {
    for dtype in [DType::F32, DType::Bf16] {
        let Attention { shape, rope } = attention_layer(dtype);
        let rope = cpu.rope(&rope);
        for (rows, before) in [(64, 0), (64, 1024), (8, 2048)] {
            let kv_cols = 2 * 128;
            let (k, v) = (tensor(cpu, &[before + rows, kv_cols], 1.0), tensor(cpu, &[before + rows, kv_cols], 1.0));
            let q = tensor(cpu, &[rows, 16 * 128], 1.0);
            let positions: Vec<i64> = (0..(before + rows) as i64).collect();
            let mut own = cpu.kv(shape.kv);
            let append = Instant::now();
            cpu.kv_append(&mut own, 0..before + rows, Cols::new(&k, 0), Cols::new(&v, 0), &positions, Some(&rope));
            let append = append.elapsed().as_secs_f64() / (before + rows) as f64;
            let mut out = cpu.alloc(&[rows, 16 * 128]);
            let seconds = fastest(|| {
                let positions = &positions[before..];
                let sequences = [AttentionRows { rows: 0..rows, positions, spans: Vec::new(), own: &own }];
                cpu.attention(shape, Some(&rope), Cols::new(&q, 0), &sequences, &mut out);
            });
            let keys = rows * before + rows * (rows + 1) / 2;
            let rate = (keys * 16 * 2 * 256) as f64 / seconds * 1e-9;
            println!(
                "attention {dtype}, {rows} rows behind {before}: {rate:5.1} GFLOP/s ({:.0} % of the peak); \
                 append {:.2} us a row",
                rate / peak * 100.0,
                append * 1e6
            );
        }
    }
}

fn decode(cpu: &Cpu) {
    // More than the nearer caches hold.
    let tokens = 8192;
    for dtype in [DType::F32, DType::Bf16] {
        let Attention { shape, rope } = attention_layer(dtype);
        let rope = cpu.rope(&rope);
        let mut store = cpu.kv(shape.kv);
        let block = tensor(cpu, &[1024, 256], 1.0);
        for start in (0..tokens).step_by(1024) {
            let positions: Vec<i64> = (start as i64..start as i64 + 1024).collect();
            cpu.kv_append(&mut store, 0..1024, Cols::new(&block, 0), Cols::new(&block, 0), &positions, Some(&rope));
        }
        let mut own = cpu.kv(shape.kv);
        let position = [tokens as i64];
        cpu.kv_append(&mut own, 0..1, Cols::new(&block, 0), Cols::new(&block, 0), &position, Some(&rope));
        let q = tensor(cpu, &[1, 16 * 128], 1.0);
        let mut out = cpu.alloc(&[1, 16 * 128]);
        let seconds = fastest(|| {
            let span = Span { kv: &store, range: 0..tokens, origin: 0, from_row: 0 };
            let sequences = [AttentionRows { rows: 0..1, positions: &position, spans: vec![span], own: &own }];
            cpu.attention(shape, Some(&rope), Cols::new(&q, 0), &sequences, &mut out);
        });
        let bytes = tokens * 2 * 256 * dtype.size();
        println!(
            "decode {dtype} behind {tokens}: {:.2} ms, {:.1} GB/s, {:.1} GFLOP/s",
            seconds * 1e3,
            bytes as f64 / seconds * 1e-9,
            (tokens * 16 * 2 * 256) as f64 / seconds * 1e-9
        );
    }
}
