//! Bamba: Mamba2 and grouped-query attention, each with an MLP behind it.

use hypic_state::ComposeRule;

use super::parts::layout::{either, mamba_types, numbers};
use super::parts::mamba2::{MAMBA, mamba2};
use super::parts::moe::dense;
use super::parts::{Defaults, Heads, Trunk, attention};
use super::rope::{RopeDefaults, rope};
use crate::spec::LayerSpec;
use crate::{Config, ModelError, ModelSpec};

pub(super) fn describe(config: &Config) -> Result<ModelSpec, ModelError> {
    const INDICES: &str = "attn_layer_indices";
    let trunk = Trunk::read(config, "model.", &Defaults { eps: 1e-5, positions: 262_144 })?;
    let c = &trunk.c;
    let heads = Heads::read(c, trunk.hidden)?;
    let rope = rope(config, heads.width, &RopeDefaults { theta: 10_000.0, partial: 0.5 })?;
    let indices = (INDICES, numbers(c, INDICES, 0, trunk.layers)?);
    let is_full = either(c, indices, mamba_types(c, trunk.layers)?)?;
    let model = trunk.model("bamba", |l, at| {
        let mixer = if is_full[l] {
            attention(&trunk, &at.sub("self_attn"), heads, Some(rope.clone())).into()
        } else {
            mamba2(&trunk, &at.sub("mamba"), &MAMBA)?.into()
        };
        let feed = dense(&trunk, &at.sub("feed_forward"))?;
        Ok(LayerSpec {
            mixer: trunk.block(at, "input_layernorm", mixer),
            feed: Some(trunk.block(at, "pre_ff_layernorm", feed)),
        })
    })?;
    Ok(ModelSpec {
        final_norm: trunk.norm(&trunk.root, "final_layernorm"),
        // Operators of independent bodies do not compose in deep Mamba2 layers (LinearKV).
        compose: ComposeRule::Last,
        ..model
    })
}
