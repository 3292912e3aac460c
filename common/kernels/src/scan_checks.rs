//! What the caller of a scan guarantees, checked once for all backends.
//!
//! It owns no data. A violation is a bug of the caller: it panics with the op, the argument and the shapes.

use hypic_state::{RecurrentPart, Transition};

use crate::{Backend, ChannelGate, Cols, Decay, DeviceTensor, Fold, Form, ScanInputs, ScanShape, Step, Write};

/// The smallest form of the operators that these inputs make.
pub(crate) fn form<B: Backend>(inputs: &ScanInputs<'_, B>) -> Form {
    match (&inputs.write, &inputs.decay) {
        (Write::Delta { .. }, _) => Form::Dense,
        (Write::Plain | Write::Step, Decay::Channel { .. }) => Form::Diagonal,
        (Write::Plain | Write::Step, Decay::None | Decay::Fixed(_) | Decay::Head { .. }) => Form::Scalar,
    }
}

/// What a carry was made for.
pub(crate) struct CarryOf {
    pub heads: usize,
    pub d_k: usize,
    pub d_v: usize,
    pub form: Form,
}

/// Check all shapes, that the kinds of decay, write and carry fit together, and that no row is in two steps; the
/// number of rows in steps.
pub(crate) fn check<B: Backend>(
    shape: &ScanShape,
    inputs: &ScanInputs<'_, B>,
    folds: &[Fold<'_, B>],
    carry_of: impl Fn(&B::Carry) -> CarryOf,
) -> usize {
    check_inputs(shape, inputs);
    let ScanShape { heads, d_k, d_v, .. } = *shape;
    let rows = inputs.v.mat.rows();
    let want = form(inputs);
    let mut ranges = Vec::new();
    for fold in folds {
        tensor("state", fold.state.shape(), &[heads, d_k, d_v]);
        for step in &fold.steps {
            match step {
                Step::Rows { rows: range, carry } => {
                    assert!(range.start <= range.end && range.end <= rows, "scan: rows {range:?} of {rows}");
                    if let Some(carry) = carry {
                        let of = carry_of(carry);
                        tensor("carry", &[of.heads, of.d_k, of.d_v], &[heads, d_k, d_v]);
                        assert_eq!(of.form, want, "scan: form of the carry, and of these inputs' operators");
                    }
                    ranges.push(range.clone());
                }
                Step::Jump { part, turn, .. } => check_jump(shape, part, turn.is_some()),
                Step::Save(_) => {}
            }
        }
    }
    ranges.retain(|r| !r.is_empty());
    ranges.sort_by_key(|r| r.start);
    assert!(ranges.windows(2).all(|w| w[0].end <= w[1].start), "scan: a row is in two steps");
    ranges.iter().map(|r| r.len()).sum()
}

fn check_inputs<B: Backend>(shape: &ScanShape, inputs: &ScanInputs<'_, B>) {
    let ScanShape { key_heads, heads, d_k, d_v } = *shape;
    assert!(key_heads > 0 && heads.is_multiple_of(key_heads), "scan: {heads} heads over {key_heads} key heads");
    assert!(d_k > 0 && d_v > 0, "scan: a head is [{d_k}, {d_v}]");
    let rows = inputs.v.mat.rows();
    cols("q", inputs.q, rows, key_heads * d_k);
    cols("k", inputs.k, rows, key_heads * d_k);
    cols("v", inputs.v, rows, heads * d_v);
    match &inputs.decay {
        Decay::None => {}
        Decay::Fixed(log) => tensor("log decays", log.shape(), &[heads]),
        Decay::Head { x, a_log, dt_bias, limit: (least, most) } => {
            cols("decay", *x, rows, heads);
            tensor("a_log", a_log.shape(), &[heads]);
            tensor("dt_bias", dt_bias.shape(), &[heads]);
            assert!(least <= most, "scan: steps from {least} to {most}");
        }
        Decay::Channel { x, gate } => {
            assert_eq!(key_heads, heads, "scan: with decays of channels every head has keys of its own");
            cols("decay", *x, rows, heads * d_k);
            if let ChannelGate::Softplus { a_log, bias } | ChannelGate::Bounded { a_log, bias, .. } = gate {
                tensor("a_log", a_log.shape(), &[heads]);
                tensor("bias of the decay", bias.shape(), &[heads * d_k]);
            }
            if let ChannelGate::Bounded { lower, .. } = gate {
                assert!(*lower < 0.0, "scan: the least log decay is {lower}");
            }
        }
    }
    match &inputs.write {
        Write::Plain => {}
        Write::Step => {
            let has_step = matches!(inputs.decay, Decay::Head { .. });
            assert!(has_step, "scan: only decays of heads have a step to write with");
        }
        Write::Delta { b, .. } => cols("b", *b, rows, heads),
    }
    if let Some(skip) = inputs.skip {
        tensor("skip", skip.shape(), &[heads]);
    }
}

fn check_jump<B: Backend>(shape: &ScanShape, part: &RecurrentPart<B>, turned: bool) {
    let ScanShape { heads, d_k, d_v, .. } = *shape;
    tensor("entry's state", part.state.shape(), &[heads, d_k, d_v]);
    let operator = part.transition.tensor().shape();
    match &part.transition {
        Transition::Scalar(_) => tensor("entry's scalar operator", operator, &[heads]),
        Transition::Diagonal(_) => tensor("entry's diagonal operator", operator, &[heads, d_k]),
        Transition::Dense(dense) => {
            tensor("entry's dense operator", operator, &[dense.kept.len(), d_k, d_k]);
            assert_eq!(dense.heads, heads, "scan: heads of an entry's operator");
        }
    }
    if turned {
        let commutes = matches!(part.transition, Transition::Scalar(_));
        assert!(commutes, "scan: an entry is turned only if its operator is a multiple of the identity");
    }
}

fn tensor(name: &str, got: &[usize], want: &[usize]) {
    assert_eq!(got, want, "scan: {name} has shape {got:?}, needs {want:?}");
}

fn cols<B: Backend>(name: &str, cols: Cols<'_, B>, rows: usize, width: usize) {
    let shape = cols.mat.shape();
    let fits = matches!(*shape, [has_rows, has] if has_rows == rows && cols.col + width <= has);
    assert!(fits, "scan: {name} has shape {shape:?}, needs {rows} rows and columns {}..{}", cols.col, cols.col + width);
}
