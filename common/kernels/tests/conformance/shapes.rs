//! Mismatched shapes are refused by a panic.

use std::panic::{AssertUnwindSafe, catch_unwind};

use hypic_kernels::{
    Activation, AttentionRows, AttentionShape, Backend, Cols, ConvFold, ConvStep, Decay, Expert, Fold, GatedNorm,
    HeadCols, KvShape, MlpForm, Positions, RopeSpec, RouteSpec, ScanInputs, ScanShape, Score, Step, Write,
};
use hypic_state::{DType, HostTensor};

/// The message of the panic that `call` must end in: that of a check, not of an index gone wrong.
fn refusal(op: &str, call: impl FnOnce()) -> String {
    let Err(panic) = catch_unwind(AssertUnwindSafe(call)) else { panic!("{op} accepted mismatched shapes") };
    let literal = panic.downcast_ref::<&str>().map(ToString::to_string);
    let message = panic.downcast_ref::<String>().cloned().or(literal).unwrap_or_default();
    let accident = message.is_empty() || message.contains("out of range") || message.contains("out of bounds");
    assert!(!accident, "{op} does not check its shapes: '{message}'");
    message
}

pub fn mismatches_panic<B: Backend>(b: &B) {
    refuse_all(b, |op, call| drop(refusal(op, call)));
}

/// The message also says which op was called.
pub fn mismatches_name_the_op<B: Backend>(b: &B) {
    refuse_all(b, |op, call| {
        let message = refusal(op, call);
        assert!(message.contains(op), "{op} was refused without its name: '{message}'");
    });
}

/// Give every op shapes that do not match.
fn refuse_all<B: Backend>(b: &B, refuses: impl Fn(&str, &mut dyn FnMut())) {
    let t = |shape: &[usize]| b.zeros(shape);
    let mut out = t(&[1, 1]);
    let weight = HostTensor::from_f32([4, 3], &[0.0; 12]);
    let w = b.pack(&[weight], DType::F32);
    refuses("linear", &mut || b.linear(&w, &t(&[2, 5]), &mut out));
    refuses("linear", &mut || b.linear_add(&w, &t(&[2, 3]), &mut t(&[2, 5])));
    refuses("embed", &mut || b.embed(&w, &[4], &mut out));
    refuses("gather", &mut || b.gather(&t(&[2, 3]), &[2], &mut out));
    refuses("rms_norm", &mut || b.rms_norm(&t(&[2, 3]), &t(&[4]), 1e-6, &mut out));
    refuses("head_norm", &mut || b.head_norm(&mut t(&[2, 7]), 0, 2, &t(&[4]), 1e-6));
    refuses("mlp_inner", &mut || b.mlp_inner(MlpForm::SwiGlu, &t(&[2, 3]), &mut out));
    refuses("gate", &mut || b.gate(&mut t(&[2, 3]), Cols::new(&t(&[2, 4]), 2), 1, Activation::Silu));
    refuses("gate", &mut || b.gate(&mut t(&[2, 3]), Cols::new(&t(&[2, 4]), 0), 2, Activation::Silu));
    refuses("activate", &mut || b.activate(&mut t(&[2, 3]), 1..4, Activation::Silu));
    refuses("mix", &mut || b.mix(&mut t(&[2, 3]), 1.0, &t(&[2, 4]), 1.0));
    let norm = |group| GatedNorm { group, eps: 1e-6, activation: Activation::Silu, gate_first: false };
    let gates = t(&[2, 8]);
    refuses("gated_norm", &mut || b.gated_norm(norm(4), &t(&[2, 8]), &t(&[4]), Cols::new(&gates, 1), &mut out));
    refuses("gated_norm", &mut || b.gated_norm(norm(3), &t(&[2, 8]), &t(&[3]), Cols::new(&gates, 0), &mut out));
    refuses("gated_norm", &mut || b.gated_norm(norm(4), &t(&[2, 8]), &t(&[2]), Cols::new(&gates, 0), &mut out));

    let at = |col, stride| HeadCols { col, stride };
    let heads = t(&[2, 8]);
    refuses("copy_heads", &mut || b.copy_heads(&heads, at(1, 4), 2, 4, &mut t(&[2, 8]), at(0, 4)));
    refuses("copy_heads", &mut || b.copy_heads(&heads, at(0, 4), 2, 4, &mut t(&[2, 8]), at(0, 3)));
    refuses("copy_heads", &mut || b.copy_heads(&heads, at(0, 4), 2, 4, &mut t(&[3, 8]), at(0, 4)));
    let per_head = [0; 2].map(|_| b.pack(&[HostTensor::from_f32([4, 3], &[0.0; 12])], DType::F32));
    refuses("head_linear", &mut || b.head_linear(&per_head, &heads, at(3, 3), &mut t(&[2, 8]), at(0, 4)));
    refuses("head_linear", &mut || b.head_linear(&per_head, &heads, at(0, 3), &mut t(&[2, 7]), at(0, 4)));
    let rope = b.rope(&RopeSpec { offset: 1, inv_freq: vec![1.0, 0.1], interleaved: false, scale: 1.0 });
    refuses("rotate", &mut || b.rotate(&mut t(&[2, 8]), 1, 1, 8, &[Positions::plain(&[0, 1])], &rope));
    refuses("rotate", &mut || b.rotate(&mut t(&[2, 8]), 0, 1, 8, &[Positions::plain(&[0])], &rope));
    refuses("rotate", &mut || b.rotate(&mut t(&[2, 8]), 0, 2, 4, &[Positions::plain(&[0, 1])], &rope));

    let spec = RouteSpec {
        experts: 4,
        top_k: 2,
        score: Score::Softmax,
        groups: 1,
        top_groups: 1,
        renormalise: true,
        renormalise_eps: 0.0,
        scale: 1.0,
    };
    let logits = t(&[2, 4]);
    for wrong in [
        RouteSpec { experts: 5, ..spec },
        RouteSpec { top_k: 0, ..spec },
        RouteSpec { top_k: 5, ..spec },
        RouteSpec { groups: 3, ..spec },
        RouteSpec { groups: 0, ..spec },
        RouteSpec { groups: 2, top_groups: 3, ..spec },
        RouteSpec { groups: 4, top_groups: 1, ..spec },
    ] {
        refuses("route", &mut || b.route(&wrong, &logits, None, &mut b.routing()));
    }
    refuses("route", &mut || b.route(&spec, &logits, Some(&t(&[3])), &mut b.routing()));
    let mlp = |n: usize| Expert::<B> {
        gate_up: b.pack(&[HostTensor::from_f32([2 * n, 3], &vec![0.0; 6 * n])], DType::F32),
        down: b.pack(&[HostTensor::from_f32([3, n], &vec![0.0; 3 * n])], DType::F32),
    };
    let mut routing = b.routing();
    b.route(&spec, &logits, None, &mut routing);
    let four = [0; 4].map(|_| mlp(2));
    refuses("experts", &mut || b.experts(MlpForm::SwiGlu, &four[..3], &routing, &t(&[2, 3]), &mut t(&[2, 3])));
    refuses("experts", &mut || b.experts(MlpForm::SwiGlu, &four, &routing, &t(&[3, 3]), &mut t(&[3, 3])));
    refuses("experts", &mut || b.experts(MlpForm::SwiGlu, &four, &routing, &t(&[2, 4]), &mut t(&[2, 4])));
    let plain = MlpForm::Plain(Activation::Silu);
    refuses("experts", &mut || b.experts(plain, &four, &routing, &t(&[2, 3]), &mut t(&[2, 3])));
    refuses("experts", &mut || b.experts(MlpForm::SwiGlu, &four, &routing, &t(&[2, 3]), &mut t(&[2, 4])));

    refuses("conv", &mut || {
        let mut window = t(&[2, 4]);
        let mut folds = [ConvFold { window: &mut window, steps: vec![ConvStep::Rows(0..2)] }];
        b.conv(Cols::new(&t(&[2, 4]), 0), &t(&[4, 4]), None, &mut folds, &mut out);
    });
    refuses("scan", &mut || {
        let shape = ScanShape { key_heads: 1, heads: 2, d_k: 3, d_v: 4 };
        let (qkv, gates, per_head) = (t(&[2, 14]), t(&[2, 4]), t(&[2]));
        let inputs = ScanInputs {
            q: Cols::new(&qkv, 0),
            k: Cols::new(&qkv, 3),
            v: Cols::new(&qkv, 6),
            unit: true,
            q_scale: 1.0,
            decay: Decay::Head {
                x: Cols::new(&gates, 2),
                a_log: &per_head,
                dt_bias: &per_head,
                limit: (0.0, f32::INFINITY),
            },
            write: Write::Delta { b: Cols::new(&gates, 0), scale: 1.0 },
            skip: None,
        };
        let mut state = t(&[2, 4, 3]);
        let mut folds = [Fold { state: &mut state, steps: vec![Step::Rows { rows: 0..2, carry: None }] }];
        b.scan(shape, inputs, &mut folds, &mut out);
    });

    let kv = KvShape { heads: 1, d_k: 4, d_v: 4, shared: false, dtype: DType::F32 };
    let shared = KvShape { shared: true, ..kv };
    let rows = t(&[2, 4]);
    let whole = Cols::new(&rows, 0);
    refuses("kv_append", &mut || {
        b.kv_append(&mut b.kv(kv), 0..2, Cols::new(&rows, 1), Some(whole), Positions::plain(&[0, 1]), None);
    });
    refuses("kv_append", &mut || b.kv_append(&mut b.kv(kv), 0..2, whole, Some(whole), Positions::plain(&[0]), None));
    refuses("kv_append", &mut || b.kv_append(&mut b.kv(kv), 0..2, whole, None, Positions::plain(&[0, 1]), None));
    refuses("kv_append", &mut || {
        b.kv_append(&mut b.kv(shared), 0..2, whole, Some(whole), Positions::plain(&[0, 1]), None)
    });
    refuses("kv_copy", &mut || drop(b.kv_copy(&b.kv(kv), 0..1)));
    refuses("kv_truncate", &mut || b.kv_truncate(&mut b.kv(kv), 1));
    let mut attend = |kv: KvShape, own: &B::Kv| {
        let sequence = AttentionRows { rows: 0..2, positions: Positions::plain(&[0, 1]), spans: Vec::new(), own };
        b.attention(AttentionShape { heads: 1, kv, scale: 0.5 }, None, whole, &[sequence], &mut out);
    };
    // The rows' own tokens were not appended.
    refuses("attention", &mut || attend(kv, &b.kv(kv)));
    let mut own = b.kv(shared);
    b.kv_append(&mut own, 0..2, whole, None, Positions::plain(&[0, 1]), None);
    refuses("attention", &mut || attend(kv, &own));
    refuses("attention", &mut || attend(KvShape { d_v: 5, ..shared }, &own));
}
