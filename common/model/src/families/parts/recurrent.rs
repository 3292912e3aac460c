//! Recurrent layers: what all have, and the two delta rules.

use hypic_kernels::{Activation, ScanShape};

use super::read::{bounded, divides};
use super::trunk::{Module, Trunk};
use crate::spec::{
    ChannelOrder, ConvSpec, DecaySpec, NormSpec, ProjectionSpec, RecurrentSpec, RowSource, RowsSpec, WriteSpec,
};
use crate::{Config, ModelError};

/// A key and its value.
pub type Named<'k> = (&'k str, usize);

/// Heads and widths of a recurrent layer, checked.
///
/// # Errors
/// If key heads do not divide heads, or one side is absurdly wide.
pub fn shape(
    c: &Config,
    key_heads: Named<'_>,
    heads: Named<'_>,
    d_k: Named<'_>,
    d_v: Named<'_>,
) -> Result<ScanShape, ModelError> {
    divides(c, heads, key_heads)?;
    bounded(c, key_heads, d_k)?;
    bounded(c, heads, d_k)?;
    bounded(c, heads, d_v)?;
    Ok(ScanShape { key_heads: key_heads.1, heads: heads.1, d_k: d_k.1, d_v: d_v.1 })
}

/// The four keys of transformers' gated delta nets.
///
/// # Errors
/// If a key is missing or wrong; see [`shape`] too.
pub fn delta_net_shape(c: &Config) -> Result<ScanShape, ModelError> {
    let named = |key| Ok::<_, ModelError>((key, c.size(key)?));
    shape(
        c,
        named("linear_num_key_heads")?,
        named("linear_num_value_heads")?,
        named("linear_key_head_dim")?,
        named("linear_value_head_dim")?,
    )
}

/// Taps of a convolution.
///
/// # Errors
/// If the value at `key` is wrong.
pub fn kernel(c: &Config, key: &str) -> Result<usize, ModelError> {
    Ok(c.opt_size(key)?.unwrap_or(4))
}

/// What every recurrent layer has. As it comes from here it has no convolution, norms of q and k, rotation nor skip
/// connection, q is not scaled, and silu of the gate follows the norm.
pub fn recurrent(
    shape: ScanShape,
    channels: RowsSpec,
    decay: DecaySpec,
    write: WriteSpec,
    gate: ProjectionSpec,
    norm: NormSpec,
    out: RowSource,
) -> RecurrentSpec {
    RecurrentSpec {
        shape,
        channels,
        order: ChannelOrder::QueryKeyValue,
        conv: None,
        activation: None,
        q_norm: None,
        k_norm: None,
        rope: None,
        unit: false,
        q_scale: 1.0,
        decay,
        write,
        skip: None,
        gate,
        norm_group: norm.width,
        norm,
        gate_activation: Activation::Silu,
        gate_first: false,
        out,
    }
}

/// The inputs of a gated delta net, which families store in different ways.
pub struct DeltaNet {
    /// Rows of q, k and v.
    pub channels: RowsSpec,
    /// Weight of their convolution.
    pub conv: RowsSpec,
    /// Rows of the output gate, of beta and of the step.
    pub gate: RowSource,
    /// See `gate`.
    pub b: RowSource,
    /// See `gate`.
    pub a: RowSource,
    /// Norm of each head's output.
    pub norm: NormSpec,
    /// Output projection.
    pub out: RowSource,
}

/// A gated delta net with beta up to `beta` (Yang et al., Gated Delta Networks, 2024).
pub fn gated_delta(at: &Module, shape: ScanShape, kernel: usize, beta: f32, net: DeltaNet) -> RecurrentSpec {
    let decay = DecaySpec::Head {
        x: vec![net.a],
        a_log: at.tensor("A_log"),
        dt_bias: at.tensor("dt_bias"),
        limit: (0.0, f32::INFINITY),
    };
    let write = WriteSpec::Delta { b: vec![net.b], scale: beta };
    let base = recurrent(shape, net.channels, decay, write, ProjectionSpec::Direct(vec![net.gate]), net.norm, net.out);
    normalised(base, ConvSpec { kernel, weight: net.conv, bias: None })
}

/// Rows of q, k and v, and of their convolutions, where each has tensors of its own.
pub fn separate(at: &Module, shape: ScanShape) -> (RowsSpec, RowsSpec) {
    let keys = shape.key_heads * shape.d_k;
    let parts = [("q", keys), ("k", keys), ("v", shape.heads * shape.d_v)];
    let rows = |suffix: &str| parts.iter().map(|(part, rows)| at.rows(&format!("{part}_{suffix}"), *rows)).collect();
    (rows("proj"), rows("conv1d"))
}

/// Kimi delta attention with the gates `forget` (bounded by its second part, if that is there) and `gate` (Kimi Team,
/// Kimi Linear, 2025).
pub fn kimi_delta(
    trunk: &Trunk<'_>,
    at: &Module,
    shape: ScanShape,
    kernel: usize,
    (forget, lower): (ProjectionSpec, Option<f32>),
    gate: ProjectionSpec,
) -> RecurrentSpec {
    let (channels, weight) = separate(at, shape);
    let decay = DecaySpec::Channel { x: forget, a_log: at.tensor("A_log"), bias: at.tensor("dt_bias"), lower };
    let write = WriteSpec::Delta { b: vec![at.rows("b_proj", shape.heads)], scale: 1.0 };
    let norm = at.norm("o_norm", shape.d_v, trunk.eps);
    let base = recurrent(shape, channels, decay, write, gate, norm, at.rows("o_proj", trunk.hidden));
    let base = RecurrentSpec { gate_activation: Activation::Sigmoid, ..base };
    normalised(base, ConvSpec { kernel, weight, bias: None })
}

/// Delta rules read keys and queries of unit length.
fn normalised(base: RecurrentSpec, conv: ConvSpec) -> RecurrentSpec {
    let q_scale = (base.shape.d_k as f32).powf(-0.5);
    RecurrentSpec { conv: Some(conv), unit: true, q_scale, ..base }
}
