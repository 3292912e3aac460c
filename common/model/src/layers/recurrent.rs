//! The linear-attention layer of every family: projections, a short convolution or none, a recurrence, a gated norm.
//! What differs between families is in the description; what can go wrong is a column that is taken for another, so
//! the columns of the common projection are numbered where its rows are collected.

use std::sync::Arc;

use hypic_kernels::{
    Activation, Backend, ChannelGate, Cols, ConvFold, Decay, DeviceTensor, Fold, Form, GatedNorm, Positions,
    ScanInputs, ScanShape, Write,
};
use hypic_state::{DType, HostTensor};

use super::weights::{Packing, Projection};
use super::{Loader, Norm, Scratch, Sum};
use crate::ModelError;
use crate::spec::{ChannelOrder, ConvSpec, DecaySpec, RecurrentSpec, WriteSpec};

/// What all sequences of a pass do in a recurrent layer, in order.
pub(crate) struct Walks<'a, B: Backend> {
    /// Where their rows stand.
    pub positions: Vec<Positions<'a>>,
    /// Of the convolution's windows; empty where there is no convolution.
    pub windows: Vec<ConvFold<'a, B>>,
    /// Of the states.
    pub states: Vec<Fold<'a, B>>,
}

/// Linear attention.
pub(crate) struct Recurrent<B: Backend> {
    pub shape: ScanShape,
    /// The smallest form that its operators have.
    pub form: Form,
    /// The convolution over the channels.
    pub conv: Option<Conv<B>>,
    /// Rotation of queries and keys at their positions.
    pub rope: Option<Arc<B::Rope>>,
    /// Rows `[channels | b | decay | gate]`; of the last three, those that are there and direct.
    project: B::Linear,
    channels: Channels,
    /// Of the channels, where there is no convolution.
    activation: Option<Activation>,
    q_norm: Option<Norm<B>>,
    k_norm: Option<Norm<B>>,
    unit: bool,
    q_scale: f32,
    decay: Rates<B>,
    write: Kind,
    skip: Option<B::Tensor>,
    gate: Projection<B>,
    gated_norm: GatedNorm,
    norm: Norm<B>,
    out: B::Linear,
}

/// First columns of queries, keys and values, and the width of all of them.
struct Channels {
    q: usize,
    k: usize,
    v: usize,
    width: usize,
}

/// A causal depthwise convolution on the device.
pub(crate) struct Conv<B: Backend> {
    /// Rows of a window: the taps but one.
    pub history: usize,
    /// Columns of a window.
    pub channels: usize,
    weight: B::Tensor,
    bias: Option<B::Tensor>,
}

/// Where the decay comes from.
enum Rates<B: Backend> {
    Fixed(B::Tensor),
    Head { x: usize, a_log: B::Tensor, dt_bias: B::Tensor, limit: (f32, f32) },
    Channel { x: Projection<B>, a_log: B::Tensor, bias: B::Tensor, lower: Option<f32> },
}

/// What a token writes.
enum Kind {
    Plain,
    Step,
    Delta { b: usize, scale: f32 },
}

impl<B: Backend> Recurrent<B> {
    pub fn load(loader: &mut Loader<'_, B>, spec: &RecurrentSpec, hidden: usize) -> Result<Self, ModelError> {
        let shape = spec.shape;
        let mut packing = Packing::new();
        packing.add(&spec.channels);
        let write = match &spec.write {
            WriteSpec::Plain => Kind::Plain,
            WriteSpec::Step => Kind::Step,
            WriteSpec::Delta { b, scale } => Kind::Delta { b: packing.add(b), scale: *scale },
        };
        let decay = Rates::load(loader, &mut packing, spec, hidden)?;
        let gate = packing.project(loader, &spec.gate, None, hidden)?;
        Ok(Recurrent {
            shape,
            form: spec.form(),
            conv: spec.conv.as_ref().map(|c| Conv::load(loader, c, spec.channels())).transpose()?,
            rope: spec.rope.as_ref().map(|r| loader.rope(r)),
            project: packing.load(loader, hidden)?,
            channels: Channels::of(spec),
            activation: spec.activation,
            q_norm: spec.q_norm.as_ref().map(|n| loader.norm(n)).transpose()?,
            k_norm: spec.k_norm.as_ref().map(|n| loader.norm(n)).transpose()?,
            unit: spec.unit,
            q_scale: spec.q_scale,
            decay,
            write,
            skip: spec.skip.as_ref().map(|name| loader.tensor(name, &[shape.heads])).transpose()?,
            gate,
            gated_norm: GatedNorm {
                group: spec.norm_group,
                eps: spec.norm.eps,
                activation: spec.gate_activation,
                gate_first: spec.gate_first,
            },
            norm: loader.norm(&spec.norm)?,
            out: loader.linear([&spec.out], shape.heads * shape.d_v)?,
        })
    }

    /// Add `out(gated norm of the read-outs)`, walking every sequence's window and state.
    pub fn forward(
        &self,
        backend: &B,
        x: &B::Tensor,
        scratch: &mut Scratch<B>,
        walks: Walks<'_, B>,
        mut sum: Sum<'_, B>,
    ) {
        let Walks { positions, mut windows, mut states } = walks;
        let ScanShape { key_heads, d_k, .. } = self.shape;
        let Channels { q, k, v, width } = self.channels;
        let Scratch { projected, convolved, narrow, gate, decay, mixed, gated, .. } = scratch;
        backend.linear(&self.project, x, projected);
        if let Some(conv) = &self.conv {
            backend.conv(Cols::new(projected, 0), &conv.weight, conv.bias.as_ref(), &mut windows, convolved);
        } else if let Some(activation) = self.activation {
            backend.activate(projected, 0..width, activation);
        }
        let channels = if self.conv.is_some() { &mut *convolved } else { &mut *projected };
        for (norm, col) in [(&self.q_norm, q), (&self.k_norm, k)] {
            if let Some(norm) = norm {
                norm.heads(backend, channels, col, key_heads * d_k);
            }
        }
        if let Some(rope) = &self.rope {
            backend.rotate(channels, q, key_heads, d_k, &positions, rope);
            backend.rotate(channels, k, key_heads, d_k, &positions, rope);
        }
        let channels = if self.conv.is_some() { &*convolved } else { &*projected };
        let inputs = ScanInputs {
            q: Cols::new(channels, q),
            k: Cols::new(channels, k),
            v: Cols::new(channels, v),
            unit: self.unit,
            q_scale: self.q_scale,
            decay: self.decay.inputs(backend, x, projected, narrow, decay),
            write: match self.write {
                Kind::Plain => Write::Plain,
                Kind::Step => Write::Step,
                Kind::Delta { b, scale } => Write::Delta { b: Cols::new(projected, b), scale },
            },
            skip: self.skip.as_ref(),
        };
        backend.scan(self.shape, inputs, &mut states, mixed);
        let gate = match &self.gate {
            Projection::Packed(col) => Cols::new(projected, *col),
            Projection::LowRank(low_rank) => {
                low_rank.forward(backend, x, narrow, gate);
                Cols::new(gate, 0)
            }
        };
        backend.gated_norm(self.gated_norm, mixed, &self.norm.weight, gate, gated);
        sum.linear(&self.out, gated);
    }
}

impl Channels {
    fn of(spec: &RecurrentSpec) -> Self {
        let (keys, values) = (spec.shape.key_heads * spec.shape.d_k, spec.shape.heads * spec.shape.d_v);
        let width = spec.channels();
        match spec.order {
            ChannelOrder::QueryKeyValue => Channels { q: 0, k: keys, v: 2 * keys, width },
            ChannelOrder::ValueKeyQuery => Channels { q: values + keys, k: values, v: 0, width },
        }
    }
}

impl<B: Backend> Conv<B> {
    fn load(loader: &mut Loader<'_, B>, spec: &ConvSpec, channels: usize) -> Result<Self, ModelError> {
        let weight = loader.matrix(&spec.weight, spec.kernel)?;
        debug_assert_eq!(weight.rows(), channels, "a description has a filter for every channel");
        let bias = spec.bias.as_ref().map(|name| loader.tensor(name, &[channels])).transpose()?;
        Ok(Conv { history: spec.kernel - 1, channels, weight, bias })
    }
}

impl<B: Backend> Rates<B> {
    fn load<'s>(
        loader: &mut Loader<'_, B>,
        packing: &mut Packing<'s>,
        spec: &'s RecurrentSpec,
        hidden: usize,
    ) -> Result<Self, ModelError> {
        let ScanShape { heads, d_k, .. } = spec.shape;
        Ok(match &spec.decay {
            DecaySpec::Fixed { log, stored } => {
                debug_assert_eq!(log.len(), heads, "a description has a decay for every head");
                let stored = stored.as_ref().map(|name| stored_decays(loader, name, log)).transpose()?.flatten();
                let log = HostTensor::from_f64([heads], stored.as_ref().unwrap_or(log));
                Rates::Fixed(loader.upload(&log))
            }
            DecaySpec::Head { x, a_log, dt_bias, limit } => Rates::Head {
                x: packing.add(x),
                a_log: loader.tensor(a_log, &[heads])?,
                dt_bias: loader.tensor(dt_bias, &[heads])?,
                limit: *limit,
            },
            DecaySpec::Channel { x, a_log, bias, lower } => Rates::Channel {
                x: packing.project(loader, x, None, hidden)?,
                a_log: loader.tensor(a_log, &[heads])?,
                bias: loader.tensor(bias, &[heads * d_k])?,
                lower: *lower,
            },
        })
    }

    /// The decay as the scan takes it, from the common projection or through `narrow` and `own`.
    fn inputs<'a>(
        &'a self,
        backend: &B,
        x: &B::Tensor,
        projected: &'a B::Tensor,
        narrow: &mut B::Tensor,
        own: &'a mut B::Tensor,
    ) -> Decay<'a, B> {
        match self {
            Rates::Fixed(log_decay) => Decay::Fixed(log_decay),
            Rates::Head { x, a_log, dt_bias, limit } => {
                Decay::Head { x: Cols::new(projected, *x), a_log, dt_bias, limit: *limit }
            }
            Rates::Channel { x: projection, a_log, bias, lower } => {
                let x = match projection {
                    Projection::Packed(col) => Cols::new(projected, *col),
                    Projection::LowRank(low_rank) => {
                        low_rank.forward(backend, x, narrow, own);
                        Cols::new(own, 0)
                    }
                };
                let gate = match *lower {
                    None => ChannelGate::Softplus { a_log, bias },
                    Some(lower) => ChannelGate::Bounded { a_log, bias, lower },
                };
                Decay::Channel { x, gate }
            }
        }
    }
}

/// The log decays that the checkpoint has in tensor `name`, if it has one with other numbers than `log`, up to rounding.
fn stored_decays<B: Backend>(
    loader: &mut Loader<'_, B>,
    name: &str,
    log: &[f64],
) -> Result<Option<Vec<f64>>, ModelError> {
    let checkpoint = loader.checkpoint;
    let Some(file) = checkpoint.file_of(name) else { return Ok(None) };
    let tensor = checkpoint.tensor(name, &[log.len()])?;
    // Values may have been rounded twice: a factor, and its product.
    let tolerance = match tensor.dtype() {
        DType::Bf16 => 2f64.powi(-7),
        DType::F16 => 2f64.powi(-10),
        _ => 1e-4,
    };
    let rates = tensor.to_f64();
    if let Some(head) = rates.iter().position(|rate| !(rate.is_finite() && *rate > 0.0)) {
        let problem = format!("tensor {name} has {} at {head}: a decay must be a finite number above 0", rates[head]);
        return Err(ModelError::checkpoint(file, problem));
    }
    let Some(head) = (0..rates.len()).find(|&h| (rates[h] + log[h]).abs() > tolerance * -log[h]) else {
        return Ok(None);
    };
    if !std::mem::replace(&mut loader.other_decays, true) {
        let (stored, described) = (rates[head], -log[head]);
        tracing::warn!(
            tensor = name,
            head,
            stored,
            described,
            "decays in the checkpoint are not those that follow from config.json: those in the checkpoint count"
        );
    }
    Ok(Some(rates.into_iter().map(|rate| -rate).collect()))
}
