//! The published float64 vectors of the gated delta rule, on every backend: outputs, states, and the operators
//! of split sequences.

use std::collections::HashMap;
use std::path::PathBuf;

use hypic_kernels::{Backend, Cols, Cpu, DeltaInputs, DeltaShape, Fold, Isa, Reference, Step};
use hypic_state::{Dense, HostTensor, Transition};
use safetensors::SafeTensors;

const FILES: [(&str, f32); 2] = [("gated_delta_net", 1.0), ("gated_delta_net_neg", 2.0)];

struct Golden {
    tensors: HashMap<String, HostTensor>,
    shape: DeltaShape,
    segments: Vec<usize>,
}

impl Golden {
    fn load(name: &str, beta_scale: f32) -> Self {
        let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/recurrences");
        let text = std::fs::read_to_string(dir.join("recurrences.json")).expect("recurrences.json");
        let facts: serde_json::Value = serde_json::from_str(&text).expect("recurrences.json is JSON");
        let number = |v: &serde_json::Value| v.as_u64().expect("a number") as usize;
        let heads = number(&facts["heads"]);
        let shape =
            DeltaShape { key_heads: heads, heads, d_k: number(&facts["d_k"]), d_v: number(&facts["d_v"]), beta_scale };
        let segments = facts["segments"].as_array().expect("segments").iter().map(number).collect();

        let bytes = std::fs::read(dir.join(format!("{name}.safetensors"))).expect("the golden file");
        let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
        let tensor = |(key, view): (String, safetensors::tensor::TensorView<'_>)| {
            assert_eq!(view.dtype(), safetensors::Dtype::F64, "{key}");
            let (values, _) = view.data().as_chunks::<8>();
            let values: Vec<f64> = values.iter().map(|b| f64::from_le_bytes(*b)).collect();
            (key, HostTensor::from_f64(view.shape(), &values))
        };
        Golden { tensors: file.tensors().into_iter().map(tensor).collect(), shape, segments }
    }

    fn get(&self, key: &str) -> &HostTensor {
        self.tensors.get(key).unwrap_or_else(|| panic!("the golden file has no {key}"))
    }

    /// `[q | k | v]` of all tokens.
    fn qkv(&self) -> HostTensor {
        let parts = ["in.q", "in.k", "in.v"].map(|key| (self.get(key).to_f64(), self.get(key).len()));
        let rows = self.get("in.q").shape()[0];
        let row = |i: usize| parts.iter().flat_map(move |(x, n)| x[i * n / rows..(i + 1) * n / rows].to_vec());
        let values: Vec<f64> = (0..rows).flat_map(row).collect();
        HostTensor::from_f64([rows, self.shape.channels()], &values)
    }

    /// `b` before its sigmoid; the file has beta.
    fn b(&self) -> HostTensor {
        let beta = self.get("in.beta");
        let scale = f64::from(self.shape.beta_scale);
        let logit = |x: f64| (x / (scale - x)).ln();
        HostTensor::from_f64(beta.shape(), &beta.to_f64().into_iter().map(logit).collect::<Vec<_>>())
    }
}

fn close(label: &str, got: &HostTensor, want: &HostTensor, tolerance: f64) {
    let (got, want) = (got.to_f64(), want.to_f64());
    assert_eq!(got.len(), want.len(), "{label}");
    let largest = want.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
    for (i, (g, w)) in got.iter().zip(&want).enumerate() {
        let off = (g - w).abs() / largest;
        assert!(off <= tolerance, "{label}: element {i} is {g}, should be {w}: off by {off:e} of the largest");
    }
}

/// All heads of an operator; none of the golden ones has decayed.
fn blocks(label: &str, t: &Transition<HostTensor>, heads: usize) -> HostTensor {
    let Transition::Dense(Dense { kept, blocks, .. }) = t else { panic!("{label}: a dense operator") };
    assert_eq!(kept.len(), heads, "{label}: heads with an operator");
    blocks.clone()
}

/// Fold `rows` from `state` on: their outputs, their operator and zero-start state; `state` is moved.
fn fold<B: Backend>(
    b: &B,
    golden: &Golden,
    rows: std::ops::Range<usize>,
    state: &mut B::Tensor,
) -> (HostTensor, Transition<HostTensor>, HostTensor) {
    let DeltaShape { heads, d_k, d_v, .. } = golden.shape;
    let upload = |key: &str| b.upload(golden.get(key));
    let (qkv, gate_b, gate_a) = (b.upload(&golden.qkv()), b.upload(&golden.b()), upload("in.a"));
    let (a_log, dt_bias) = (upload("in.A_log"), upload("in.dt_bias"));
    let inputs =
        DeltaInputs { qkv: &qkv, b: Cols::new(&gate_b, 0), a: Cols::new(&gate_a, 0), a_log: &a_log, dt_bias: &dt_bias };
    let mut carry = b.carry(heads, d_k, d_v);
    let mut out = b.alloc(&[0, 0]);
    let steps = vec![Step::Rows { rows: rows.clone(), carry: Some(&mut carry) }];
    b.gated_delta(golden.shape, inputs, &mut [Fold { state, steps }], &mut out);
    let width = heads * d_v;
    let out = b.download(&out).to_f64()[rows.start * width..rows.end * width].to_vec();
    let (transition, zero_start) = b.finish(carry, state);
    let out = HostTensor::from_f64([rows.len(), heads, d_v], &out);
    (out, transition.map(|t| b.download(t)), b.download(&zero_start))
}

fn recurrences<B: Backend>(b: &B, tolerance: f64) {
    for (name, beta_scale) in FILES {
        let golden = Golden::load(name, beta_scale);
        let DeltaShape { heads, d_k, d_v, .. } = golden.shape;
        let tokens: usize = golden.segments.iter().sum();
        let label = |what: &str| format!("{} {name} {what}", b.kernel_set());

        // All tokens as one body from zero.
        let mut state = b.zeros(&[heads, d_k, d_v]);
        let (o, t_full, s_full) = fold(b, &golden, 0..tokens, &mut state);
        close(&label("o"), &o, golden.get("o"), tolerance);
        close(&label("S_final"), &b.download(&state), golden.get("S_final"), tolerance);
        close(&label("zero-start S"), &s_full, golden.get("S_final"), tolerance);
        close(&label("T_full"), &blocks("T_full", &t_full, heads), golden.get("T_full"), tolerance);

        // Segment after segment, each a body of its own behind the true state.
        let mut state = b.zeros(&[heads, d_k, d_v]);
        let mut composed: Option<(Transition<HostTensor>, HostTensor)> = None;
        let mut start = 0;
        for (i, length) in golden.segments.iter().enumerate() {
            let key = |what: &str| format!("seg{}.{what}", i + 1);
            let (_, t, s) = fold(b, &golden, start..start + length, &mut state);
            start += length;
            close(&label(&key("T")), &blocks("T", &t, heads), golden.get(&key("T")), tolerance);
            close(&label(&key("S")), &s, golden.get(&key("S")), tolerance);
            let after = format!("S_after_seg{}", i + 1);
            close(&label(&after), &b.download(&state), golden.get(&after), tolerance);

            // From zero the outputs are those of the segment alone.
            let (alone, ..) = fold(b, &golden, start - length..start, &mut b.zeros(&[heads, d_k, d_v]));
            close(&label(&key("o_local")), &alone, golden.get(&key("o_local")), tolerance);

            composed = Some(match composed {
                None => (t, s),
                Some((earlier, state)) => {
                    let moved = t.apply(&state).expect("an operator of the same layer");
                    let sum: Vec<f64> = moved.to_f64().iter().zip(s.to_f64()).map(|(a, b)| a + b).collect();
                    (earlier.then(&t).expect("operators of one layer"), HostTensor::from_f64(s.shape(), &sum))
                }
            });
        }
        let (t, s) = composed.expect("at least one segment");
        close(&label("T3 T2 T1"), &blocks("T3 T2 T1", &t, heads), golden.get("T_full"), tolerance);
        close(&label("composed S"), &s, golden.get("S_final"), tolerance);
    }
}

#[test]
fn reference_f64() {
    recurrences(&Reference::<f64>::new(), 1e-12);
}

#[test]
fn reference_f32() {
    recurrences(&Reference::<f32>::new(), 2e-5);
}

#[test]
fn cpu() {
    for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
        recurrences(&Cpu::with_isa(1, isa), 2e-5);
        recurrences(&Cpu::with_isa(2, isa), 2e-5);
    }
}
