//! Causal depthwise convolution with history, and silu.
//!
//! A sequence's window holds the raw inputs before its first row; the steps read it for their first rows and move
//! it over what they read. Channels are independent, so tasks are blocks of channels of one sequence. Taps are
//! summed oldest first from the bias on, so a row has the same bits wherever the steps are cut.

use std::ops::Range;

use super::math::{per_isa, silu};
use super::pool::{Pool, Shared};
use super::{Cpu, CpuTensor, Isa};
use crate::{Cols, ConvFold, ConvStep, DeviceTensor};

/// Channels of a task: enough of a row to be read well, few enough to stay in cache with their taps.
const STRIP: usize = 128;
/// Channels whose sums are kept in registers.
const LANES: usize = 16;
/// About how many operations an output's silu costs.
const SILU_FLOPS: usize = 24;

/// What all tasks share.
struct Layer<'a> {
    isa: Isa,
    x: &'a [f32],
    stride: usize,
    /// `[channels, kernel]`.
    weight: &'a [f32],
    bias: Option<&'a [f32]>,
    kernel: usize,
    channels: usize,
    out: Shared<'a, f32>,
}

/// A step whose writable memory is shared between the tasks of its sequence.
enum SharedStep<'a> {
    Rows(Range<usize>),
    Jump(&'a [f32]),
    Save(Shared<'a, f32>),
}

/// See [`Backend::conv`](crate::Backend::conv).
pub(super) fn conv(
    isa: Isa,
    pool: &Pool,
    x: Cols<'_, Cpu>,
    weight: &CpuTensor,
    bias: Option<&CpuTensor>,
    folds: &mut [ConvFold<'_, Cpu>],
    out: &mut CpuTensor,
) {
    let (rows, stride) = (x.mat.rows(), x.mat.cols());
    let (channels, kernel) = (weight.rows(), weight.cols());
    assert!(kernel > 0, "a convolution has at least one tap");
    assert!(x.col + channels <= stride, "convolution of columns {}..{} of {stride}", x.col, x.col + channels);
    if let Some(bias) = bias {
        assert_eq!(bias.shape(), [channels], "bias of a convolution");
    }
    out.resize(&[rows, channels]);
    let window = [kernel - 1, channels];
    for fold in folds.iter_mut() {
        assert_eq!(fold.window.shape(), window, "window of a convolution");
        for step in &mut fold.steps {
            match step {
                ConvStep::Rows(range) => assert!(range.end <= rows, "convolution of rows {range:?} of {rows}"),
                ConvStep::Jump(tail) => assert_eq!(tail.shape(), window, "tail for a convolution's window"),
                ConvStep::Save(to) => to.resize(&window),
            }
        }
    }
    if channels == 0 {
        return;
    }
    let layer = Layer {
        isa,
        x: x.mat.data().get(x.col..).unwrap_or(&[]),
        stride,
        weight: weight.data(),
        bias: bias.map(CpuTensor::data),
        kernel,
        channels,
        out: Shared::new(out.data_mut()),
    };
    let walked: usize = folds.iter().map(|fold| walked(&fold.steps)).sum();
    let flops = walked * channels * (2 * kernel + SILU_FLOPS);
    let shared: Vec<(Shared<'_, f32>, Vec<SharedStep<'_>>)> = folds
        .iter_mut()
        .map(|fold| (Shared::new(fold.window.data_mut()), fold.steps.iter_mut().map(share).collect()))
        .collect();
    let strips = channels.div_ceil(STRIP);
    pool.run(shared.len() * strips, flops, |task| {
        let (window, steps) = &shared[task / strips];
        let from = task % strips * STRIP;
        walk(&layer, window, steps, from..channels.min(from + STRIP));
    });
}

fn walked(steps: &[ConvStep<'_, Cpu>]) -> usize {
    let rows = |step: &ConvStep<'_, Cpu>| if let ConvStep::Rows(rows) = step { rows.len() } else { 0 };
    steps.iter().map(rows).sum()
}

fn share<'a>(step: &'a mut ConvStep<'_, Cpu>) -> SharedStep<'a> {
    match step {
        ConvStep::Rows(rows) => SharedStep::Rows(rows.clone()),
        ConvStep::Jump(tail) => SharedStep::Jump(tail.data()),
        ConvStep::Save(to) => SharedStep::Save(Shared::new(to.data_mut())),
    }
}

/// The steps of one sequence, over the channels of a strip.
fn walk(layer: &Layer<'_>, window: &Shared<'_, f32>, steps: &[SharedStep<'_>], strip: Range<usize>) {
    let (width, history) = (strip.len(), layer.kernel - 1);
    let taps = taps(layer, &strip);
    // What the window holds of this strip, with room for the rows that are read with it.
    let mut recent = vec![0.0; 2 * history * width];
    for i in 0..history {
        // SAFETY: each strip of each window belongs to one task.
        recent[i * width..][..width].copy_from_slice(unsafe { window.part(at(layer, i, &strip)) });
    }
    for step in steps {
        match step {
            SharedStep::Rows(rows) => convolve(layer, rows.clone(), &taps, &mut recent, &strip),
            SharedStep::Jump(tail) => {
                for i in 0..history {
                    recent[i * width..][..width].copy_from_slice(&tail[at(layer, i, &strip)]);
                }
            }
            SharedStep::Save(to) => save(layer, to, &recent, &strip),
        }
    }
    save(layer, window, &recent, &strip);
}

/// The bias and the taps of a strip, `[1 + kernel, channels]`, so that a tap's weights lie side by side.
fn taps(layer: &Layer<'_>, strip: &Range<usize>) -> Vec<f32> {
    let width = strip.len();
    let mut taps = vec![0.0; (1 + layer.kernel) * width];
    if let Some(bias) = layer.bias {
        taps[..width].copy_from_slice(&bias[strip.clone()]);
    }
    let weight = &layer.weight[strip.start * layer.kernel..strip.end * layer.kernel];
    for (c, weight) in weight.chunks_exact(layer.kernel).enumerate() {
        for (i, weight) in weight.iter().enumerate() {
            taps[(1 + i) * width + c] = *weight;
        }
    }
    taps
}

/// Where row `row` of a `[.., channels]` tensor has a strip.
fn at(layer: &Layer<'_>, row: usize, strip: &Range<usize>) -> Range<usize> {
    row * layer.channels + strip.start..row * layer.channels + strip.end
}

fn save(layer: &Layer<'_>, to: &Shared<'_, f32>, recent: &[f32], strip: &Range<usize>) {
    for i in 0..layer.kernel - 1 {
        // SAFETY: each strip of each tensor belongs to one task.
        unsafe { to.part(at(layer, i, strip)) }.copy_from_slice(&recent[i * strip.len()..][..strip.len()]);
    }
}

/// Convolve `rows` and leave the window behind them at the front of `recent`.
fn convolve(layer: &Layer<'_>, rows: Range<usize>, taps: &[f32], recent: &mut [f32], strip: &Range<usize>) {
    let (width, history) = (strip.len(), layer.kernel - 1);
    let input = |row: usize| &layer.x[row * layer.stride + strip.start..];
    // The first rows reach into the window: they are read behind it.
    let first = rows.len().min(history);
    for i in 0..first {
        recent[(history + i) * width..][..width].copy_from_slice(&input(rows.start + i)[..width]);
    }
    for (i, row) in rows.clone().enumerate() {
        let (source, stride) =
            if i < first { (&recent[i * width..], width) } else { (input(row - history), layer.stride) };
        // SAFETY: each strip of each row belongs to one task.
        let out = unsafe { layer.out.part(at(layer, row, strip)) };
        convolve_row(layer.isa, source, stride, taps, out);
    }
    if rows.len() >= history {
        for i in 0..history {
            recent[i * width..][..width].copy_from_slice(&input(rows.end - history + i)[..width]);
        }
    } else {
        recent.copy_within(first * width..(first + history) * width, 0);
    }
}

per_isa! {
    /// `out[c] = silu(taps[0, c] + sum_i taps[1 + i, c] x[i, c])`, the rows of `x` being `stride` apart.
    fn convolve_row(x: &[f32], stride: usize, taps: &[f32], out: &mut [f32]) {
        let width = out.len();
        let (whole, rest) = out.as_chunks_mut::<LANES>();
        let (bias, taps) = taps.split_at(width);
        for (block, out) in whole.iter_mut().enumerate() {
            let c = block * LANES;
            let mut sums = *bias[c..].first_chunk::<LANES>().expect("a bias for each channel");
            for (i, taps) in taps.chunks_exact(width).enumerate() {
                let (x, taps) = (&x[i * stride + c..][..LANES], &taps[c..][..LANES]);
                for lane in 0..LANES {
                    sums[lane] += x[lane] * taps[lane];
                }
            }
            for lane in 0..LANES {
                out[lane] = silu(sums[lane]);
            }
        }
        for (c, out) in (width - rest.len()..).zip(rest) {
            let mut sum = bias[c];
            for (i, taps) in taps.chunks_exact(width).enumerate() {
                sum += x[i * stride + c] * taps[c];
            }
            *out = silu(sum);
        }
    }
}

#[cfg(test)]
mod tests;
