//! Ling-3.0: Kimi delta attention with a bounded gate, and latent attention with an output gate per head. In the key
//! set of the releases and in that of transformers, whose `head_dim` is the width of the rotary part.

use super::bailing::stack;
use super::parts::mla::Latent;
use super::parts::read::{factor, only, spelling};
use super::parts::recurrent::{kernel, kimi_delta, shape};
use super::parts::{Defaults, Trunk};
use crate::spec::{LatentSpec, ProjectionSpec};
use crate::{Config, ModelError, ModelSpec};

pub(super) fn describe(config: &Config) -> Result<ModelSpec, ModelError> {
    let trunk = Trunk::read(config, "model.", &Defaults { eps: 1e-6, positions: 262_144 })?;
    let c = &trunk.c;
    only(c, &["no_kda_lora", "use_qk_norm"], true)?;
    only(c, &["gated_attention_proj_granularity_type"], "head_wise")?;
    let first = |keys: [&'static str; 2]| keys.into_iter().find(|key| c.get(key).is_some()).unwrap_or(keys[1]);
    let (heads_key, width_key) =
        (first(["linear_num_heads", "num_attention_heads"]), first(["linear_head_dim", "head_dim"]));
    let heads = (heads_key, c.size(heads_key)?);
    let width = (width_key, c.size(width_key)?);
    let shape = shape(c, heads, heads, width, width)?;
    let kernel = kernel(c, spelling(c, &["short_conv_kernel_size", "linear_conv_kernel_dim"])?)?;
    let lower = lower_bound(c)?;
    let latent = Latent::read(c)?;
    if c.opt_size("head_dim")?.is_some_and(|other| other != width.1 && other != latent.rotary) {
        return Err(c.wrong("head_dim", format!("is neither {width_key} nor qk_rope_head_dim")));
    }
    let rotation = latent.rotation(&trunk, 6_000_000.0)?;
    let all = shape.heads * shape.d_v;
    stack(
        &trunk,
        "bailing_hybrid",
        |_, at| {
            let direct = |name| ProjectionSpec::Direct(vec![at.rows(name, all)]);
            kimi_delta(&trunk, at, shape, kernel, (direct("f_proj"), lower), direct("g_proj"))
        },
        |at| {
            let gate = Some(vec![at.rows("g_proj", latent.heads())]);
            LatentSpec { gate, ..latent.layer(&trunk, at, "dense", Some(&rotation)) }.into()
        },
    )
}

/// The least log decay of the bounded gate; `None` if the gate is the unbounded one.
fn lower_bound(c: &Config) -> Result<Option<f32>, ModelError> {
    const KEY: &str = "kda_lower_bound";
    if !c.opt_bool("kda_safe_gate")?.unwrap_or(true) {
        return Ok(None);
    }
    let lower = factor(c, KEY, Some(-5.0))?;
    if lower >= 0.0 {
        return Err(c.wrong(KEY, format!("must be below 0, is {lower}")));
    }
    Ok(Some(lower))
}
