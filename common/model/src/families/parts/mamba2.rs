//! Mamba2 (Dao and Gu, 2024): keys are B, queries C, values x; one rate of decay per head.

use serde_json::Value;

use super::read::{divides, only, spelled, spelling};
use super::recurrent::{kernel, recurrent, shape};
use super::trunk::{Module, Trunk};
use crate::spec::{ChannelOrder, ConvSpec, DecaySpec, ProjectionSpec, RecurrentSpec, WriteSpec};
use crate::{Config, ModelError};

/// Names of a layer's keys; of a list, those that releases use for one parameter.
pub struct Keys {
    /// Heads.
    pub heads: &'static str,
    /// Width of a head, or "auto".
    pub width: &'static str,
    /// Width of all heads, as a multiple of the hidden size; `None`: it does not matter.
    pub expand: Option<&'static str>,
    /// Groups of B and C.
    pub groups: &'static [&'static str],
    /// How many there are if no key says.
    pub default_groups: usize,
    /// Width of B and of C.
    pub state: &'static str,
    /// Taps of the convolution.
    pub kernel: &'static [&'static str],
    /// Whether the convolution has a bias.
    pub conv_bias: &'static [&'static str],
    /// Least and largest step.
    pub limit: &'static [&'static str],
}

/// The keys of Bamba and Granite.
pub const MAMBA: Keys = Keys {
    heads: "mamba_n_heads",
    width: "mamba_d_head",
    expand: Some("mamba_expand"),
    groups: &["mamba_n_groups"],
    default_groups: 1,
    state: "mamba_d_state",
    kernel: &["mamba_d_conv"],
    conv_bias: &["mamba_conv_bias"],
    limit: &["time_step_limit"],
};

/// A layer of a Mamba2 stack.
///
/// # Errors
/// If a key is missing, wrong or asks for something that is not served.
pub fn mamba2(trunk: &Trunk<'_>, at: &Module, keys: &Keys) -> Result<RecurrentSpec, ModelError> {
    let c = &trunk.c;
    only(c, &["mamba_proj_bias"], false)?;
    let groups_key = spelling(c, keys.groups)?;
    let (heads, groups) = (c.size(keys.heads)?, c.opt_size(groups_key)?.unwrap_or(keys.default_groups));
    let width = head_width(trunk, keys, heads)?;
    let state = c.size(keys.state)?;
    let shape = shape(c, (groups_key, groups), (keys.heads, heads), (keys.state, state), (keys.width, width))?;
    let values = heads * width;
    let [gate, channels, dt] = at.split("in_proj", 1, [values, values + 2 * groups * state, heads]);
    let decay = DecaySpec::Head {
        x: vec![dt],
        a_log: at.tensor("A_log"),
        dt_bias: at.tensor("dt_bias"),
        limit: step_limit(c, keys.limit)?,
    };
    let bias = c.opt_bool(spelling(c, keys.conv_bias)?)?.unwrap_or(true);
    let conv = ConvSpec {
        kernel: kernel(c, spelling(c, keys.kernel)?)?,
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

/// A layer's least and largest step, which may be named twice: an infinite one is written in two ways.
fn step_limit(c: &Config, keys: &[&str]) -> Result<(f32, f32), ModelError> {
    let named = spelled(c, keys, |key| limits(c, key))?;
    Ok(named.map_or((0.0, f32::INFINITY), |(_, limit)| limit))
}

/// Two numbers in order; JSON has no infinite one.
fn limits(c: &Config, key: &str) -> Result<Option<(f32, f32)>, ModelError> {
    let Some(value) = c.get(key) else { return Ok(None) };
    let number = |v: &Value| match v.get("__float__").unwrap_or(v) {
        Value::String(text) if text == "Infinity" => Some(f32::INFINITY),
        v => v.as_f64().map(|n| n as f32),
    };
    let limits = match value.as_array().map(Vec::as_slice) {
        Some([least, most]) => number(least).zip(number(most)),
        _ => None,
    };
    match limits {
        Some((least, most)) if (0.0..=most).contains(&least) => Ok(Some((least, most))),
        _ => Err(c.wrong(key, format!("must be two numbers, from 0 and in order, is {value}"))),
    }
}
