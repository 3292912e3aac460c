//! Mamba2 (Dao and Gu, 2024): keys are B, queries C, values x; one rate of decay per head.

use serde_json::Value;

use super::read::{divides, only};
use super::recurrent::{kernel, recurrent, shape};
use super::trunk::{Module, Trunk};
use crate::spec::{ChannelOrder, ConvSpec, DecaySpec, ProjectionSpec, RecurrentSpec, WriteSpec};
use crate::{Config, ModelError};

/// Names of a layer's keys.
pub struct Keys {
    /// Heads.
    pub heads: &'static str,
    /// Width of a head, or "auto".
    pub width: &'static str,
    /// Width of all heads, as a multiple of the hidden size; `None`: it does not matter.
    pub expand: Option<&'static str>,
    /// Groups of B and C.
    pub groups: &'static str,
    /// Width of B and of C.
    pub state: &'static str,
    /// Taps of the convolution.
    pub kernel: &'static str,
    /// Whether the convolution has a bias.
    pub conv_bias: &'static str,
}

/// The keys of Bamba and Granite.
pub const MAMBA: Keys = Keys {
    heads: "mamba_n_heads",
    width: "mamba_d_head",
    expand: Some("mamba_expand"),
    groups: "mamba_n_groups",
    state: "mamba_d_state",
    kernel: "mamba_d_conv",
    conv_bias: "mamba_conv_bias",
};

/// A layer of a Mamba2 stack.
///
/// # Errors
/// If a key is missing, wrong or asks for something that is not served.
pub fn mamba2(trunk: &Trunk<'_>, at: &Module, keys: &Keys) -> Result<RecurrentSpec, ModelError> {
    let c = &trunk.c;
    only(c, &["mamba_proj_bias"], false)?;
    let (heads, groups) = (c.size(keys.heads)?, c.opt_size(keys.groups)?.unwrap_or(1));
    let width = head_width(trunk, keys, heads)?;
    let state = c.size(keys.state)?;
    let shape = shape(c, (keys.groups, groups), (keys.heads, heads), (keys.state, state), (keys.width, width))?;
    let values = heads * width;
    let [gate, channels, dt] = at.split("in_proj", 1, [values, values + 2 * groups * state, heads]);
    let decay = DecaySpec::Head {
        x: vec![dt],
        a_log: at.tensor("A_log"),
        dt_bias: at.tensor("dt_bias"),
        limit: step_limit(c)?,
    };
    let bias = c.opt_bool(keys.conv_bias)?.unwrap_or(true);
    let conv = ConvSpec {
        kernel: kernel(c, keys.kernel)?,
        weight: vec![at.rows("conv1d", channels.take)],
        bias: bias.then(|| at.tensor("conv1d.bias")),
    };
    let norm = at.norm("norm", values, trunk.eps);
    let gate = ProjectionSpec::Direct(vec![gate]);
    let out = at.rows("out_proj", trunk.hidden);
    Ok(RecurrentSpec {
        order: ChannelOrder::ValueKeyQuery,
        conv: Some(conv),
        skip: Some(at.tensor("D")),
        norm_group: values / groups,
        gate_first: true,
        ..recurrent(shape, vec![channels], decay, WriteSpec::Step, gate, norm, out)
    })
}

/// Width of a head: as it is named, or the head's share of all.
fn head_width(trunk: &Trunk<'_>, keys: &Keys, heads: usize) -> Result<usize, ModelError> {
    let c = &trunk.c;
    let Some(expand) = keys.expand else { return c.size(keys.width) };
    let inner = c.opt_size(expand)?.unwrap_or(2) * trunk.hidden;
    if c.get(keys.width).is_none_or(|width| width == &Value::from("auto")) {
        let what = format!("{expand} * hidden_size");
        divides(c, (&what, inner), (keys.heads, heads))?;
        return Ok(inner / heads);
    }
    let width = c.size(keys.width)?;
    if inner != heads * width {
        return Err(c.wrong(keys.width, format!("{heads} heads of {width} are not {expand} * hidden_size = {inner}")));
    }
    Ok(width)
}

/// Least and largest step, `time_step_limit`. An infinite one is written in two ways, since JSON has none. (The keys
/// `time_step_min` and `time_step_max` are about initial weights.)
fn step_limit(c: &Config) -> Result<(f32, f32), ModelError> {
    const KEY: &str = "time_step_limit";
    let Some(value) = c.get(KEY) else { return Ok((0.0, f32::INFINITY)) };
    let number = |v: &Value| match v.get("__float__").unwrap_or(v) {
        Value::String(text) if text == "Infinity" => Some(f32::INFINITY),
        v => v.as_f64().map(|n| n as f32),
    };
    let limits = match value.as_array().map(Vec::as_slice) {
        Some([least, most]) => number(least).zip(number(most)),
        _ => None,
    };
    match limits {
        Some((least, most)) if (0.0..=most).contains(&least) => Ok((least, most)),
        _ => Err(c.wrong(KEY, format!("must be two numbers, from 0 and in order, is {value}"))),
    }
}
