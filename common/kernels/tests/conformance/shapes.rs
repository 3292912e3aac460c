//! Mismatched shapes are refused by a panic.

use std::panic::{AssertUnwindSafe, catch_unwind};

use hypic_kernels::{
    AttentionRows, AttentionShape, Backend, Cols, ConvFold, ConvStep, DeltaInputs, DeltaShape, Fold, Gate, KvShape,
    Step,
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
    refuses("silu_mul", &mut || b.silu_mul(&t(&[2, 3]), &mut out));
    refuses("gate", &mut || b.gate(&mut t(&[2, 3]), Cols::new(&t(&[2, 4]), 2), Gate::Silu));
    refuses("gated_norm", &mut || {
        b.gated_norm(&t(&[2, 8]), &t(&[4]), 1e-6, Cols::new(&t(&[2, 7]), 0), Gate::Silu, &mut out);
    });

    refuses("conv", &mut || {
        let mut window = t(&[2, 4]);
        let mut folds = [ConvFold { window: &mut window, steps: vec![ConvStep::Rows(0..2)] }];
        b.conv(Cols::new(&t(&[2, 4]), 0), &t(&[4, 4]), None, &mut folds, &mut out);
    });
    refuses("gated_delta", &mut || {
        let shape = DeltaShape { key_heads: 1, heads: 2, d_k: 3, d_v: 4, beta_scale: 1.0 };
        let (gates, per_head) = (t(&[2, 4]), t(&[2]));
        let inputs = DeltaInputs {
            qkv: &t(&[2, shape.channels()]),
            b: Cols::new(&gates, 0),
            a: Cols::new(&gates, 2),
            a_log: &per_head,
            dt_bias: &per_head,
        };
        let mut state = t(&[2, 4, 3]);
        let mut folds = [Fold { state: &mut state, steps: vec![Step::Rows { rows: 0..2, carry: None }] }];
        b.gated_delta(shape, inputs, &mut folds, &mut out);
    });

    let kv = KvShape { heads: 1, d_k: 4, d_v: 4, dtype: DType::F32 };
    let rows = t(&[2, 4]);
    refuses("kv_append", &mut || {
        b.kv_append(&mut b.kv(kv), 0..2, Cols::new(&rows, 1), Cols::new(&rows, 0), &[0, 1], None);
    });
    refuses("kv_append", &mut || {
        b.kv_append(&mut b.kv(kv), 0..2, Cols::new(&rows, 0), Cols::new(&rows, 0), &[0], None)
    });
    refuses("kv_copy", &mut || drop(b.kv_copy(&b.kv(kv), 0..1)));
    refuses("kv_truncate", &mut || b.kv_truncate(&mut b.kv(kv), 1));
    refuses("attention", &mut || {
        // The rows' own tokens were not appended.
        let own = b.kv(kv);
        let sequence = AttentionRows { rows: 0..2, positions: &[0, 1], spans: Vec::new(), own: &own };
        let shape = AttentionShape { heads: 1, kv, scale: 0.5 };
        b.attention(shape, None, Cols::new(&rows, 0), &[sequence], &mut out);
    });
}
