//! OLMo hybrid: gated delta nets whose beta may reach 2, before which a norm stands, and attention behind which it
//! stands, with queries and keys normalised over all heads together. Attention rotates if a theta is configured.

use hypic_kernels::ScanShape;

use super::parts::layout::{every, layer_types};
use super::parts::moe::dense;
use super::parts::recurrent::{DeltaNet, delta_net_shape, gated_delta, kernel, separate};
use super::parts::{Defaults, Heads, Module, Trunk, attention};
use super::rope::{RopeDefaults, rope_if_theta};
use crate::spec::{AttentionSpec, Block, LayerSpec, Residual};
use crate::{Config, ModelError, ModelSpec};

/// Added to the mean square in the norm of a delta net's output, whatever `rms_norm_eps` says.
const OUTPUT_EPS: f32 = 1e-5;

pub(super) fn describe(config: &Config) -> Result<ModelSpec, ModelError> {
    let trunk = Trunk::read(config, "model.", &Defaults { eps: 1e-6, positions: 65536 })?;
    let c = &trunk.c;
    let heads = Heads::read(c, trunk.hidden)?;
    let rope = rope_if_theta(config, heads.width, &RopeDefaults { theta: 10_000.0, partial: 1.0 })?;
    let shape = delta_net_shape(c)?;
    let kernel = kernel(c, "linear_conv_kernel_dim")?;
    let beta = if c.opt_bool("linear_allow_neg_eigval")?.unwrap_or(true) { 2.0 } else { 1.0 };
    let is_full = layer_types(c, trunk.layers)?.unwrap_or_else(|| by_default(trunk.layers));
    trunk.model("olmo_hybrid", |l, at| {
        let feed = dense(&trunk, &at.sub("mlp"))?;
        if is_full[l] {
            let module = at.sub("self_attn");
            let norm = |name, width| Some(module.norm(name, width, trunk.eps));
            let mixer = AttentionSpec {
                q_norm: norm("q_norm", heads.queries()),
                k_norm: norm("k_norm", heads.keys()),
                ..attention(&trunk, &module, heads, rope.clone())
            };
            return Ok(LayerSpec {
                mixer: behind(trunk.block(at, "post_attention_layernorm", mixer.into())),
                feed: Some(behind(trunk.block(at, "post_feedforward_layernorm", feed))),
            });
        }
        let module = at.sub("linear_attn");
        let mixer = gated_delta(&module, shape, kernel, beta, delta_net(&trunk, &module, shape));
        Ok(LayerSpec {
            mixer: trunk.block(at, "attention_layer_norm", mixer.into()),
            feed: Some(trunk.block(at, "feedforward_layer_norm", feed)),
        })
    })
}

fn delta_net(trunk: &Trunk<'_>, at: &Module, shape: ScanShape) -> DeltaNet {
    let (channels, conv) = separate(at, shape);
    DeltaNet {
        channels,
        conv,
        gate: at.rows("g_proj", shape.heads * shape.d_v),
        b: at.rows("b_proj", shape.heads),
        a: at.rows("a_proj", shape.heads),
        norm: at.norm("o_norm", shape.d_v, OUTPUT_EPS),
        out: at.rows("o_proj", trunk.hidden),
    }
}

/// `x + n(f(x))`.
fn behind<F>(block: Block<F>) -> Block<F> {
    Block { residual: Residual::Post, ..block }
}

/// Every fourth layer is full attention; of fewer than four, the last one.
fn by_default(layers: usize) -> Vec<bool> {
    every(layers.min(4), layers)
}
