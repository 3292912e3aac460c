//! Causal depthwise convolution by its definition. The window is moved a token at a time, so it is right after
//! runs of any length.

use super::real::Real;
use super::tensor::RefTensor;
use super::{Columns, Reference, check};
use crate::{ConvFold, ConvStep, DeviceTensor};

pub(super) fn conv<R: Real>(
    x: Columns<'_, R>,
    weight: &RefTensor<R>,
    bias: Option<&RefTensor<R>>,
    folds: &mut [ConvFold<'_, Reference<R>>],
    out: &mut RefTensor<R>,
) {
    let (channels, kernel) = check::matrix("conv", "weight", weight);
    assert!(kernel > 0, "conv: weight {:?} has no taps", weight.shape());
    if let Some(bias) = bias {
        check::shape("conv", "bias", bias, &[channels]);
    }
    let rows = x.mat.rows();
    let window = [kernel - 1, channels];
    out.resize(&[rows, channels]);

    for fold in folds {
        check::shape("conv", "window", fold.window, &window);
        for step in &mut fold.steps {
            match step {
                ConvStep::Rows(range) => {
                    check::range("conv", "rows", range, rows);
                    for t in range.clone() {
                        token(x.row(t), weight, bias, fold.window, out.row_mut(t));
                    }
                }
                ConvStep::Jump(tail) => {
                    check::shape("conv", "tail", tail, &window);
                    fold.window.copy_from(tail);
                }
                ConvStep::Save(to) => to.copy_from(fold.window),
            }
        }
    }
}

/// One token: its output, and the window moved over it.
fn token<R: Real>(
    x: &[R],
    weight: &RefTensor<R>,
    bias: Option<&RefTensor<R>>,
    window: &mut RefTensor<R>,
    out: &mut [R],
) {
    let channels = x.len();
    window.data.extend_from_slice(x);
    for (c, out) in out.iter_mut().enumerate() {
        let taps = weight.row(c).iter().enumerate();
        let sum: R = taps.map(|(i, w)| *w * window.data[i * channels + c]).sum();
        *out = (sum + bias.map_or(R::ZERO, |b| b.data[c])).silu();
    }
    window.data.drain(..channels);
}
