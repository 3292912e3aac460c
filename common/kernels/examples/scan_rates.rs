//! Rates of the recurrences and of attention at the head sizes of production models, beside the peak that the machine reaches.
//!
//! `cargo run --release -p hypic-kernels --example scan_rates -- [threads]`

use std::hint::black_box;
use std::time::{Duration, Instant};

use hypic_kernels::{
    AttentionRows, AttentionShape, Backend, ChannelGate, Cols, Cpu, Decay, Fold, Form, KvShape, Positions, RopeSpec,
    ScanInputs, ScanShape, Span, Step, Write,
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

/// A recurrence of production models.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Gdn,
    Kda,
    Lightning,
    Mamba2,
}

impl Kind {
    fn form(self) -> Form {
        if matches!(self, Kind::Gdn | Kind::Kda) { Form::Dense } else { Form::Scalar }
    }

    /// Operations of a row: products with the state, and the triangles of a chunk of so many rows.
    fn flops(self, shape: ScanShape, chunk: f64) -> f64 {
        let ScanShape { key_heads, heads, d_k, d_v } = shape;
        let (key_heads, heads, d_k, d_v) = (key_heads as f64, heads as f64, d_k as f64, d_v as f64);
        match self {
            // K S, Q S, K^T W; K K^T and Q K^T of a key head; the solution and the outputs of each head.
            Kind::Gdn | Kind::Kda => 2.0 * (heads * (3.0 * d_k * d_v + chunk * d_v) + key_heads * chunk * d_k),
            Kind::Lightning | Kind::Mamba2 => heads * (4.0 * d_k * d_v + chunk * d_v) + key_heads * chunk * d_k,
        }
    }
}

/// Inputs of a recurrence; nothing decays so fast that its operator dies.
struct Layer {
    kind: Kind,
    shape: ScanShape,
    qkv: <Cpu as hypic_state::Storage>::Tensor,
    gates: <Cpu as hypic_state::Storage>::Tensor,
    a_log: <Cpu as hypic_state::Storage>::Tensor,
    fixed: <Cpu as hypic_state::Storage>::Tensor,
    bias: <Cpu as hypic_state::Storage>::Tensor,
}

impl Layer {
    fn new(cpu: &Cpu, kind: Kind, shape: ScanShape, rows: usize) -> Self {
        let ScanShape { heads, d_k, .. } = shape;
        let channels = if kind == Kind::Kda { heads * d_k } else { heads };
        Layer {
            kind,
            shape,
            qkv: tensor(cpu, &[rows, channels_of(shape)], 1.0),
            gates: tensor(cpu, &[rows, heads + channels], 1.0),
            a_log: cpu.upload(&HostTensor::from_f32([heads], &vec![-9.0; heads])),
            fixed: cpu.upload(&HostTensor::from_f32([heads], &vec![-1e-3; heads])),
            bias: cpu.zeros(&[channels]),
        }
    }

    fn inputs(&self) -> ScanInputs<'_, Cpu> {
        let ScanShape { key_heads, heads, d_k, .. } = self.shape;
        let (keys, x) = (key_heads * d_k, Cols::new(&self.gates, heads));
        let (a_log, bias) = (&self.a_log, &self.bias);
        let delta = self.kind.form() == Form::Dense;
        ScanInputs {
            q: Cols::new(&self.qkv, 0),
            k: Cols::new(&self.qkv, keys),
            v: Cols::new(&self.qkv, 2 * keys),
            unit: delta,
            q_scale: (d_k as f32).powf(-0.5),
            decay: match self.kind {
                Kind::Gdn | Kind::Mamba2 => Decay::Head { x, a_log, dt_bias: bias, limit: (0.0, f32::INFINITY) },
                Kind::Kda => Decay::Channel { x, gate: ChannelGate::Softplus { a_log, bias } },
                Kind::Lightning => Decay::Fixed(&self.fixed),
            },
            write: match self.kind {
                Kind::Gdn | Kind::Kda => Write::Delta { b: Cols::new(&self.gates, 0), scale: 1.0 },
                Kind::Lightning => Write::Plain,
                Kind::Mamba2 => Write::Step,
            },
            skip: (self.kind == Kind::Mamba2).then_some(&self.fixed),
        }
    }
}

/// Columns of q, k and v.
fn channels_of(shape: ScanShape) -> usize {
    2 * shape.key_heads * shape.d_k + shape.heads * shape.d_v
}

fn scan(cpu: &Cpu, peak: f64) {
    let shape = |key_heads, heads, d_k, d_v| ScanShape { key_heads, heads, d_k, d_v };
    for (kind, shape, rows) in [
        (Kind::Gdn, shape(1, 2, 128, 128), 512),
        (Kind::Gdn, shape(4, 4, 64, 64), 512),
        (Kind::Gdn, shape(1, 2, 128, 128), 64),
        (Kind::Gdn, shape(16, 32, 128, 128), 1),
        (Kind::Gdn, shape(16, 32, 128, 128), 16),
        (Kind::Kda, shape(2, 2, 128, 128), 512),
        (Kind::Kda, shape(32, 32, 128, 128), 1),
        (Kind::Lightning, shape(2, 2, 128, 128), 512),
        (Kind::Lightning, shape(16, 16, 128, 128), 1),
        (Kind::Mamba2, shape(1, 8, 128, 64), 512),
        (Kind::Mamba2, shape(1, 128, 128, 64), 1),
    ] {
        let ScanShape { heads, d_k, d_v, .. } = shape;
        let layer = Layer::new(cpu, kind, shape, rows);
        let mut state = cpu.zeros(&[heads, d_k, d_v]);
        let mut out = cpu.alloc(&[rows, heads * d_v]);
        let mut run = |with_carry: bool| {
            let mut carry = with_carry.then(|| cpu.carry(shape, kind.form()));
            let steps = vec![Step::Rows { rows: 0..rows, carry: carry.as_mut() }];
            cpu.scan(shape, layer.inputs(), &mut [Fold { state: &mut state, steps }], &mut out);
            carry.map(|c| cpu.finish(c, &state))
        };
        let plain = fastest(|| drop(run(false)));
        let rate = kind.flops(shape, rows.min(64) as f64) * rows as f64 / plain * 1e-9;
        println!(
            "{kind:?} {rows:4} rows, {heads:3} heads of {d_k} x {d_v}: {:7.2} us a row, {rate:5.1} GFLOP/s \
             ({:.0} % of the peak)",
            plain / rows as f64 * 1e6,
            rate / peak * 100.0,
        );
        if rows < 64 {
            continue;
        }
        let both = fastest(|| drop(run(true)));
        // The rows' projections to q, k, v and z and from the output, were they computed at the peak.
        let projections = 2.0 * HIDDEN * (channels_of(shape) + 2 * heads * d_v) as f64 * rows as f64 / peak * 1e-9;
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
    let kv = KvShape { heads: 2, d_k: 128, d_v: 128, shared: false, dtype };
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
            cpu.kv_append(
                &mut own,
                0..before + rows,
                Cols::new(&k, 0),
                Some(Cols::new(&v, 0)),
                Positions::plain(&positions),
                Some(&rope),
            );
            let append = append.elapsed().as_secs_f64() / (before + rows) as f64;
            let mut out = cpu.alloc(&[rows, 16 * 128]);
            let seconds = fastest(|| {
                let positions = &positions[before..];
                let sequences = [AttentionRows {
                    rows: 0..rows,
                    positions: Positions::plain(positions),
                    spans: Vec::new(),
                    own: &own,
                }];
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
            cpu.kv_append(
                &mut store,
                0..1024,
                Cols::new(&block, 0),
                Some(Cols::new(&block, 0)),
                Positions::plain(&positions),
                Some(&rope),
            );
        }
        let mut own = cpu.kv(shape.kv);
        let position = [tokens as i64];
        cpu.kv_append(
            &mut own,
            0..1,
            Cols::new(&block, 0),
            Some(Cols::new(&block, 0)),
            Positions::plain(&position),
            Some(&rope),
        );
        let q = tensor(cpu, &[1, 16 * 128], 1.0);
        let mut out = cpu.alloc(&[1, 16 * 128]);
        let seconds = fastest(|| {
            let span = Span { kv: &store, range: 0..tokens, origin: 0, from_row: 0 };
            let sequences =
                [AttentionRows { rows: 0..1, positions: Positions::plain(&position), spans: vec![span], own: &own }];
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
