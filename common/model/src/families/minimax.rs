//! MiniMax-Text-01 and M1: lightning attention without rotation, grouped-query attention with rotation of a part of
//! each head, experts, and a residual that is the normalised input. In the key set of the releases and in that of
//! transformers, which also stores the decays: where the number of heads is no power of two, they are others than the
//! releases have, and those that are stored count.

use hypic_kernels::Activation;

use super::parts::layout::{either, flags, layer_types};
use super::parts::lightning::{layer_factor, lightning};
use super::parts::moe::{NUMBERED, one_by_one, softmax};
use super::parts::read::{factor, spelling};
use super::parts::{Defaults, Heads, Module, Trunk, attention};
use super::rope::{RopeDefaults, rope};
use crate::spec::{Block, DecaySpec, ExpertsSpec, FeedSpec, LayerSpec, RecurrentSpec, Residual};
use crate::{Config, ModelError, ModelSpec};

/// Added to the mean square in the norm of a linear layer's output, whatever `rms_norm_eps` says.
const OUTPUT_EPS: f32 = 1e-6;

/// A linear layer's tensor of its decays.
const SLOPES: &str = "slope_rate";

/// Tensors of a linear layer that follow from that one.
const DECAYS: [&str; 3] = ["query_decay", "key_decay", "diagonal_decay"];

/// As the releases have it.
pub(super) fn release(config: &Config) -> Result<ModelSpec, ModelError> {
    let c = config.text()?;
    let normed = c.opt_bool("postnorm")?.ok_or_else(|| c.wrong("postnorm", "is missing"))?;
    describe(config, "minimax_m1", normed, 0.0)
}

/// As transformers has it: it divides by a little more where the decay's dependence on the layer is computed.
pub(super) fn converted(config: &Config) -> Result<ModelSpec, ModelError> {
    describe(config, "minimax", config.text()?.opt_bool("postnorm")?.unwrap_or(true), 1e-5)
}

fn describe(config: &Config, family: &'static str, normed: bool, more: f64) -> Result<ModelSpec, ModelError> {
    let trunk = Trunk::read(config, "model.", &Defaults { eps: 1e-5, positions: 4096 * 32 })?;
    let c = &trunk.c;
    if c.opt_usize("shared_intermediate_size")?.unwrap_or(0) != 0 {
        return Err(c.unsupported("shared_intermediate_size", "only 0 is served: no shared expert"));
    }
    let heads = Heads::read(c, trunk.hidden)?;
    let rope = rope(config, heads.width, &RopeDefaults { theta: 1_000_000.0, partial: 1.0 })?;
    let types = ("layer_types", layer_types(c, trunk.layers)?);
    let is_full = either(c, ("attn_type_list", flags(c, "attn_type_list", trunk.layers)?), types)?;
    let residuals = Residuals::read(c, normed)?;
    let span = trunk.layers as f64 - 1.0 + more;
    let model = trunk.model(family, |l, at| {
        let module = at.sub("self_attn");
        let feed = experts(&trunk, &at.sub("block_sparse_moe"))?;
        let (layer, residual) = if is_full[l] {
            (trunk.layer(at, attention(&trunk, &module, heads, Some(rope.clone())), feed), residuals.full)
        } else {
            let factor = layer_factor(l, 0, trunk.layers, span);
            (trunk.layer(at, linear(&trunk, &module, heads, factor), feed), residuals.linear)
        };
        Ok(LayerSpec {
            mixer: Block { residual, ..layer.mixer },
            feed: layer.feed.map(|feed| Block { residual: residuals.mlp, ..feed }),
        })
    })?;
    let decays = DECAYS.map(|name| trunk.root.sub("layers").sub('*').sub("self_attn").tensor(name));
    Ok(ModelSpec { ignored: model.ignored.into_iter().chain(decays).collect(), ..model })
}

fn linear(trunk: &Trunk<'_>, at: &Module, heads: Heads, factor: f64) -> RecurrentSpec {
    let all = heads.queries();
    let mut layer = RecurrentSpec {
        activation: Some(Activation::Silu),
        ..lightning(
            heads.heads,
            heads.width,
            factor,
            at.split("qkv_proj", heads.heads, [heads.width; 3]).into(),
            at.rows("output_gate", all),
            at.norm("norm", all, OUTPUT_EPS),
            at.rows("out_proj", trunk.hidden),
        )
    };
    if let DecaySpec::Fixed { stored, .. } = &mut layer.decay {
        *stored = Some(at.tensor(SLOPES));
    }
    layer
}

fn experts(trunk: &Trunk<'_>, at: &Module) -> Result<FeedSpec, ModelError> {
    let route = softmax(trunk, true)?;
    let inner = trunk.c.size("intermediate_size")?;
    let experts = one_by_one(at, NUMBERED, trunk.hidden, inner, route.experts);
    Ok(ExpertsSpec::new(route, at.rows("gate", route.experts), experts).into())
}

/// How results are joined to the residual stream.
struct Residuals {
    full: Residual,
    linear: Residual,
    mlp: Residual,
}

impl Residuals {
    fn read(c: &Config, normed: bool) -> Result<Self, ModelError> {
        let read = |release: &str, converted: &str| -> Result<Residual, ModelError> {
            let one = |part: &str| {
                let names = [format!("layernorm_{release}_{part}"), format!("{converted}_{part}_factor")];
                factor(c, spelling(c, &[&names[0], &names[1]])?, Some(1.0))
            };
            let (keep, add) = (one("alpha")?, one("beta")?);
            Ok(if normed { Residual::Normed { keep, add } } else { Residual::Pre { keep, add } })
        };
        Ok(Residuals {
            full: read("full_attention", "full_attn")?,
            linear: read("linear_attention", "linear_attn")?,
            mlp: read("mlp", "mlp")?,
        })
    }
}
