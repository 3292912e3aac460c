//! The published float64 vectors of every recurrence, on every backend: outputs, states, the operators of split
//! sequences and their composition.

use std::collections::HashMap;
use std::ops::Range;
use std::path::PathBuf;

use hypic_kernels::{
    Backend, ChannelGate, Cols, Cpu, Decay, Fold, Form, Isa, Positions, Reference, RopeSpec, ScanInputs, ScanShape,
    Step, Turn, Write,
};
use hypic_state::{ComposeRule, HostTensor, RecurrentPart, Transition};
use safetensors::SafeTensors;

/// How a file's tokens decay the state, from the file's raw inputs.
#[derive(Clone, Copy, PartialEq)]
enum Gate {
    None,
    /// The decay factor of a head.
    Factor(&'static str),
    /// Minus the log decay of a head.
    Slope(&'static str),
    Head(&'static str),
    Log(&'static str),
    Softplus(&'static str),
}

/// What a file holds.
#[derive(Clone, Copy)]
struct Family {
    name: &'static str,
    /// Names of q, k, v.
    qkv: [&'static str; 3],
    gate: Gate,
    /// Largest beta of a delta rule.
    beta: Option<f32>,
    form: Form,
}

const QKV: [&str; 3] = ["in.q", "in.k", "in.v"];
const SIMPLE: Family = Family { name: "simple", qkv: QKV, gate: Gate::None, beta: None, form: Form::Scalar };
const DELTA: Family = Family { name: "delta_net", beta: Some(1.0), form: Form::Dense, ..SIMPLE };
const LIGHTNING_ROPE: Family = Family {
    name: "lightning_rope",
    qkv: ["in.q_rotated", "in.k_rotated", "in.v"],
    gate: Gate::Slope("in.slope"),
    ..SIMPLE
};
const MAMBA2: Family =
    Family { name: "mamba2", qkv: ["in.C", "in.B", "in.x"], gate: Gate::Head("in.dt_raw"), ..SIMPLE };

const FAMILIES: [Family; 10] = [
    SIMPLE,
    Family { name: "retnet", gate: Gate::Factor("in.decay"), ..SIMPLE },
    Family { name: "lightning", gate: Gate::Slope("in.slope"), ..SIMPLE },
    LIGHTNING_ROPE,
    MAMBA2,
    Family { name: "gla", gate: Gate::Log("in.log_gate"), form: Form::Diagonal, ..SIMPLE },
    DELTA,
    Family { name: "gated_delta_net", gate: Gate::Head("in.a"), ..DELTA },
    Family { name: "gated_delta_net_neg", gate: Gate::Head("in.a"), beta: Some(2.0), ..DELTA },
    Family { name: "kda", gate: Gate::Softplus("in.f"), ..DELTA },
];

struct Golden {
    family: Family,
    tensors: HashMap<String, HostTensor>,
    shape: ScanShape,
    q_scale: f32,
    segments: Vec<Range<usize>>,
}

impl Golden {
    fn load(family: Family) -> Self {
        let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/recurrences");
        let text = std::fs::read_to_string(dir.join("recurrences.json")).expect("recurrences.json");
        let facts: serde_json::Value = serde_json::from_str(&text).expect("recurrences.json is JSON");
        let number = |v: &serde_json::Value| v.as_u64().expect("a number") as usize;
        let heads = number(&facts["heads"]);
        let shape = ScanShape { key_heads: heads, heads, d_k: number(&facts["d_k"]), d_v: number(&facts["d_v"]) };
        let q_scale = facts["families"][family.name]["q_scale"].as_f64().expect("q_scale") as f32;
        let mut start = 0;
        let segment = |length: &serde_json::Value| {
            let rows = start..start + number(length);
            start = rows.end;
            rows
        };
        let segments = facts["segments"].as_array().expect("segments").iter().map(segment).collect();

        let bytes = std::fs::read(dir.join(format!("{}.safetensors", family.name))).expect("the golden file");
        let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
        let tensor = |(key, view): (String, safetensors::tensor::TensorView<'_>)| {
            assert_eq!(view.dtype(), safetensors::Dtype::F64, "{key}");
            let (values, _) = view.data().as_chunks::<8>();
            let values: Vec<f64> = values.iter().map(|b| f64::from_le_bytes(*b)).collect();
            (key, HostTensor::from_f64(view.shape(), &values))
        };
        Golden { family, tensors: file.tensors().into_iter().map(tensor).collect(), shape, q_scale, segments }
    }

    fn get(&self, key: &str) -> &HostTensor {
        self.tensors.get(key).unwrap_or_else(|| panic!("{} has no {key}", self.family.name))
    }

    fn tokens(&self) -> usize {
        self.segments.last().expect("at least one segment").end
    }

    /// A row a token.
    fn matrix(&self, key: &str) -> HostTensor {
        let values = self.get(key).to_f64();
        HostTensor::from_f64([self.tokens(), values.len() / self.tokens()], &values)
    }

    /// A parameter as one axis.
    fn vector(&self, key: &str, f: impl Fn(f64) -> f64) -> HostTensor {
        let values: Vec<f64> = self.get(key).to_f64().into_iter().map(f).collect();
        HostTensor::from_f64([values.len()], &values)
    }
}

/// A file's inputs on a backend.
struct Layer<'a, B: Backend> {
    golden: &'a Golden,
    q: B::Tensor,
    k: B::Tensor,
    v: B::Tensor,
    gate: Option<B::Tensor>,
    fixed: Option<B::Tensor>,
    a_log: Option<B::Tensor>,
    bias: Option<B::Tensor>,
    b: Option<B::Tensor>,
    skip: Option<B::Tensor>,
}

impl<'a, B: Backend> Layer<'a, B> {
    fn new(backend: &B, golden: &'a Golden) -> Self {
        let [q, k, v] = golden.family.qkv.map(|key| backend.upload(&golden.matrix(key)));
        let optional = |key: Option<&str>| key.map(|key| backend.upload(&golden.matrix(key)));
        let vector = |key: &str| golden.tensors.contains_key(key).then(|| backend.upload(&golden.vector(key, |x| x)));
        // The file has beta; the scan wants what its sigmoid is taken of.
        let logit = |scale: f32| {
            let beta = golden.matrix("in.beta");
            let values: Vec<f64> = beta.to_f64().iter().map(|x| (x / (f64::from(scale) - x)).ln()).collect();
            backend.upload(&HostTensor::from_f64(beta.shape(), &values))
        };
        Layer {
            golden,
            q,
            k,
            v,
            gate: optional(match golden.family.gate {
                Gate::Head(x) | Gate::Log(x) | Gate::Softplus(x) => Some(x),
                Gate::None | Gate::Factor(_) | Gate::Slope(_) => None,
            }),
            fixed: match golden.family.gate {
                Gate::Factor(key) => Some(backend.upload(&golden.vector(key, f64::ln))),
                Gate::Slope(key) => Some(backend.upload(&golden.vector(key, |x| -x))),
                _ => None,
            },
            a_log: vector("in.A_log"),
            bias: vector("in.dt_bias"),
            b: golden.family.beta.map(logit),
            skip: None,
        }
    }

    fn inputs(&self) -> ScanInputs<'_, B> {
        fn there<T>(t: &Option<T>) -> &T {
            t.as_ref().expect("the file has it")
        }
        let gate = || Cols::new(there(&self.gate), 0);
        ScanInputs {
            q: Cols::new(&self.q, 0),
            k: Cols::new(&self.k, 0),
            v: Cols::new(&self.v, 0),
            unit: self.golden.family.form == Form::Dense,
            q_scale: self.golden.q_scale,
            decay: match self.golden.family.gate {
                Gate::None => Decay::None,
                Gate::Factor(_) | Gate::Slope(_) => Decay::Fixed(there(&self.fixed)),
                Gate::Head(_) => Decay::Head {
                    x: gate(),
                    a_log: there(&self.a_log),
                    dt_bias: there(&self.bias),
                    limit: (0.0, f32::INFINITY),
                },
                Gate::Log(_) => Decay::Channel { x: gate(), gate: ChannelGate::Log },
                Gate::Softplus(_) => Decay::Channel {
                    x: gate(),
                    gate: ChannelGate::Softplus { a_log: there(&self.a_log), bias: there(&self.bias) },
                },
            },
            write: match self.golden.family.beta {
                Some(scale) => Write::Delta { b: Cols::new(there(&self.b), 0), scale },
                None if self.golden.family.name == MAMBA2.name => Write::Step,
                None => Write::Plain,
            },
            skip: self.skip.as_ref(),
        }
    }

    /// Fold the body `rows` from `state` on: the rows' outputs and the entry; `state` is moved.
    fn fold(&self, b: &B, rows: Range<usize>, state: &mut B::Tensor) -> (HostTensor, RecurrentPart<B>) {
        let ScanShape { heads, d_v, .. } = self.golden.shape;
        let mut carry = b.carry(self.golden.shape, self.golden.family.form);
        let mut out = b.alloc(&[0, 0]);
        let steps = vec![Step::Rows { rows: rows.clone(), carry: Some(&mut carry) }];
        b.scan(self.golden.shape, self.inputs(), &mut [Fold { state, steps }], &mut out);
        let width = heads * d_v;
        let out = b.download(&out).to_f64()[rows.start * width..rows.end * width].to_vec();
        let (transition, zero_start) = b.finish(carry, state);
        let part = RecurrentPart { transition, state: zero_start, tail: None };
        (HostTensor::from_f64([rows.len(), heads, d_v], &out), part)
    }

    /// Apply an entry to `state`.
    fn jump(&self, b: &B, part: &RecurrentPart<B>, turn: Option<Turn<'_, B>>, state: &mut B::Tensor) {
        let steps = vec![Step::Jump { rule: ComposeRule::Transition, part, turn }];
        b.scan(self.golden.shape, self.inputs(), &mut [Fold { state, steps }], &mut b.alloc(&[0, 0]));
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

/// The matrices of all heads; none of the golden ones has decayed.
fn matrices(label: &str, t: &Transition<HostTensor>, shape: ScanShape) -> HostTensor {
    let ScanShape { heads, d_k, .. } = shape;
    let diagonal = |of: &dyn Fn(usize, usize) -> f64| {
        let element = |i: usize| if i / d_k % d_k == i % d_k { of(i / d_k / d_k, i % d_k) } else { 0.0 };
        HostTensor::from_f64([heads, d_k, d_k], &(0..heads * d_k * d_k).map(element).collect::<Vec<_>>())
    };
    let numbers = t.tensor().to_f64();
    match t {
        Transition::Scalar(_) => diagonal(&|h, _| numbers[h]),
        Transition::Diagonal(_) => diagonal(&|h, c| numbers[h * d_k + c]),
        Transition::Dense(dense) => {
            assert_eq!(dense.kept.len(), heads, "{label}: heads with an operator");
            dense.blocks.clone()
        }
    }
}

fn family<B: Backend>(b: &B, golden: &Golden, tolerance: f64) {
    let shape = golden.shape;
    let zeros = || b.zeros(&[shape.heads, shape.d_k, shape.d_v]);
    let label = |what: &str| format!("{} {} {what}", b.kernel_set(), golden.family.name);
    let check = |what: &str, got: &HostTensor, want: &str| close(&label(what), got, golden.get(want), tolerance);
    let host = |part: &RecurrentPart<B>| (part.transition.map(|t| b.download(t)), b.download(&part.state));
    let layer = Layer::new(b, golden);

    // All tokens as one body from zero.
    let mut state = zeros();
    let (o, part) = layer.fold(b, 0..golden.tokens(), &mut state);
    let (t, s) = host(&part);
    check("o", &o, "o");
    check("S_final", &b.download(&state), "S_final");
    check("zero-start S", &s, "S_final");
    check("T_full", &matrices(&label("T_full"), &t, shape), "T_full");

    // Segment after segment, each a body of its own behind the true state.
    let mut state = zeros();
    let mut jumped = zeros();
    let mut composed: Option<(Transition<HostTensor>, HostTensor)> = None;
    for (i, rows) in golden.segments.iter().enumerate() {
        let key = |what: &str| format!("seg{}.{what}", i + 1);
        let (_, part) = layer.fold(b, rows.clone(), &mut state);
        let (t, s) = host(&part);
        check(&key("T"), &matrices(&label("T"), &t, shape), &key("T"));
        match &t {
            Transition::Scalar(t) => check("T_scalar", t, &key("T_scalar")),
            Transition::Diagonal(t) => check("T_diag", t, &key("T_diag")),
            Transition::Dense(_) => {}
        }
        check(&key("S"), &s, &key("S"));
        let after = format!("S_after_seg{}", i + 1);
        check(&after, &b.download(&state), &after);

        // From zero the outputs are those of the segment alone.
        let (alone, _) = layer.fold(b, rows.clone(), &mut zeros());
        check(&key("o_local"), &alone, &key("o_local"));

        layer.jump(b, &part, None, &mut jumped);
        check(&format!("{after} by a jump"), &b.download(&jumped), &after);
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
    check("T3 T2 T1", &matrices(&label("T3 T2 T1"), &t, shape), "T_full");
    check("composed S", &s, "S_final");
}

/// With its skip, Mamba2 adds D x to the outputs and nothing else.
fn skip<B: Backend>(b: &B, tolerance: f64) {
    let golden = Golden::load(MAMBA2);
    let ScanShape { heads, d_k, d_v, .. } = golden.shape;
    let mut layer = Layer::new(b, &golden);
    layer.skip = Some(b.upload(&golden.vector("in.D", |x| x)));
    let mut state = b.zeros(&[heads, d_k, d_v]);
    let (o, _) = layer.fold(b, 0..golden.tokens(), &mut state);
    close("o_with_skip", &o, golden.get("o_with_skip"), tolerance);
    close("S_final", &b.download(&state), golden.get("S_final"), tolerance);
}

/// Bodies made of keys at positions from zero on, turned to their places.
fn turned_bodies<B: Backend>(b: &B, tolerance: f64) {
    let golden = Golden::load(LIGHTNING_ROPE);
    let ScanShape { heads, d_k, d_v, .. } = golden.shape;
    let inv_freq = golden.get("in.inv_freq").to_f64();
    let rope = b.rope(&RopeSpec { offset: 0, inv_freq, interleaved: false, scale: 1.0 });
    let rotated = |key: &str, positions: &[i64]| {
        let mut x = b.upload(&golden.matrix(key));
        b.rotate(&mut x, 0, heads, d_k, &[Positions::plain(positions)], &rope);
        x
    };
    let true_positions: Vec<i64> = (0..golden.tokens() as i64).collect();
    for (raw, key) in [("in.q", "in.q_rotated"), ("in.k", "in.k_rotated")] {
        close(key, &b.download(&rotated(raw, &true_positions)), golden.get(key), tolerance);
    }

    let local: Vec<i64> = golden.segments.iter().flat_map(|rows| 0..rows.len() as i64).collect();
    let mut layer = Layer::new(b, &golden);
    (layer.q, layer.k) = (rotated("in.q", &local), rotated("in.k", &local));
    let mut state = b.zeros(&[heads, d_k, d_v]);
    for (i, rows) in golden.segments.iter().enumerate() {
        let label = |what: &str| format!("{} turned seg{}.{what}", b.kernel_set(), i + 1);
        let (_, part) = layer.fold(b, rows.clone(), &mut b.zeros(&[heads, d_k, d_v]));
        let want = golden.get(&format!("seg{}.S_at_zero", i + 1));
        close(&label("S_at_zero"), &b.download(&part.state), want, tolerance);

        let turn = Some(Turn { rope: &rope, by: rows.start as i64 });
        let mut alone = b.zeros(&[heads, d_k, d_v]);
        layer.jump(b, &part, turn, &mut alone);
        close(&label("S"), &b.download(&alone), golden.get(&format!("seg{}.S", i + 1)), tolerance);
        layer.jump(b, &part, turn, &mut state);
        let after = format!("S_after_seg{}", i + 1);
        close(&label(&after), &b.download(&state), golden.get(&after), tolerance);
    }
}

fn recurrences<B: Backend>(b: &B, tolerance: f64) {
    for of in FAMILIES {
        family(b, &Golden::load(of), tolerance);
    }
    skip(b, tolerance);
    turned_bodies(b, tolerance);
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
