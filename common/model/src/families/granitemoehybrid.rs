//! Granite 4: Mamba2 and grouped-query attention with factors on embedding, scores, residuals and logits, behind each an
//! MLP that serves every row, and in most sizes experts beside it.

use hypic_kernels::MlpForm;
use hypic_state::ComposeRule;

use super::parts::layout::mamba_types;
use super::parts::mamba2::{MAMBA, mamba2};
use super::parts::moe::{fused, softmax};
use super::parts::read::factor;
use super::parts::{Defaults, Heads, Module, Trunk, attention};
use super::rope::{RopeDefaults, rope};
use crate::spec::{AttentionSpec, Block, ExpertsSpec, FeedSpec, LayerSpec, MixerSpec, MlpSpec, Residual};
use crate::{Config, ModelError, ModelSpec};

/// Names of the two projections of experts and of the MLP.
const LINEAR: [&str; 2] = ["input_linear.weight", "output_linear.weight"];

pub(super) fn describe(config: &Config) -> Result<ModelSpec, ModelError> {
    let trunk = Trunk::read(config, "model.", &Defaults { eps: 1e-6, positions: 2048 })?;
    let c = &trunk.c;
    let heads = Heads::read(c, trunk.hidden)?;
    let rope = match c.opt_str("position_embedding_type")?.as_deref() {
        Some("rope") => Some(rope(config, heads.width, &RopeDefaults { theta: 10_000.0, partial: 1.0 })?),
        Some("nope") | None => None,
        Some(_) => return Err(c.unsupported("position_embedding_type", "\"rope\" and \"nope\" are served")),
    };
    let (types_key, types) = mamba_types(c, trunk.layers)?;
    let is_full = types.ok_or_else(|| c.wrong(types_key, "is missing"))?;
    let scale = factor(c, "attention_multiplier", Some(1.0))?;
    let residual = Residual::Pre { keep: 1.0, add: factor(c, "residual_multiplier", Some(1.0))? };
    let logits = factor(c, "logits_scaling", Some(1.0))?;
    if logits == 0.0 {
        return Err(c.wrong("logits_scaling", "is 0"));
    }
    let model = trunk.model("granitemoehybrid", |l, at| {
        let mixer: MixerSpec = if is_full[l] {
            AttentionSpec { scale, ..attention(&trunk, &at.sub("self_attn"), heads, rope.clone()) }.into()
        } else {
            mamba2(&trunk, &at.sub("mamba"), &MAMBA)?.into()
        };
        let layer = trunk.layer(at, mixer, feed(&trunk, at)?);
        Ok(LayerSpec {
            mixer: Block { residual, ..layer.mixer },
            feed: layer.feed.map(|feed| Block { residual, ..feed }),
        })
    })?;
    Ok(ModelSpec {
        embed_scale: factor(c, "embedding_multiplier", Some(1.0))?,
        logit_scale: 1.0 / logits,
        compose: ComposeRule::Last,
        ..model
    })
}

/// The MLP, and experts beside it unless there are none.
fn feed(trunk: &Trunk<'_>, at: &Module) -> Result<FeedSpec, ModelError> {
    let c = &trunk.c;
    let inner = c.size("shared_intermediate_size")?;
    let of_mlp = at.sub("shared_mlp");
    let shared = MlpSpec {
        inner,
        gate_up: vec![of_mlp.rows("input_linear", 2 * inner)],
        form: MlpForm::SwiGlu,
        down: of_mlp.rows("output_linear", trunk.hidden),
    };
    if c.opt_usize("num_local_experts")? == Some(0) {
        return Ok(FeedSpec::Dense(shared));
    }
    let at = at.sub("block_sparse_moe");
    let route = softmax(trunk, true)?;
    let experts = fused(&at, LINEAR, MlpForm::SwiGlu, trunk.hidden, c.size("intermediate_size")?, route.experts);
    let experts = ExpertsSpec::new(route, at.rows("router.layer", route.experts), experts);
    Ok(ExpertsSpec { shared: Some(shared), ..experts }.into())
}
