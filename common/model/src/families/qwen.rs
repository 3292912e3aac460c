//! What Qwen3.5 and Qwen3-Next share: gated delta nets and gated grouped-query attention, every norm zero-centred but
//! that inside the delta net, experts of a softmax router and one more behind a gate of its own.

use hypic_kernels::{MlpForm, RopeSpec, ScanShape};

use super::parts::layout::{every, listed_or_ruled};
use super::parts::moe::{FUSED, PROJ, fused, mlp, one_by_one, softmax};
use super::parts::read::only;
use super::parts::recurrent::{DeltaNet, delta_net_shape, gated_delta, kernel};
use super::parts::{Defaults, Heads, Module, Trunk, attention};
use super::rope::{RopeDefaults, rope};
use crate::spec::{AttentionSpec, ExpertsSpec, FeedSpec, NormSpec, RowSource, RowsSpec};
use crate::{Config, ModelError, ModelSpec};

/// The trunk of a family whose module is `root`.
///
/// # Errors
/// If a key is missing, wrong or asks for something that is not served.
pub(super) fn trunk<'a>(config: &'a Config, root: &str) -> Result<Trunk<'a>, ModelError> {
    let defaults = Defaults { eps: 1e-6, positions: 32768 };
    Ok(Trunk { zero_centred: true, ..Trunk::read(config, root, &defaults)? })
}

/// The stack of a family; `project` says where a delta net's inputs are, `feed` what follows a mixer.
///
/// # Errors
/// As [`trunk`].
pub(super) fn stack(
    trunk: &Trunk<'_>,
    family: &'static str,
    project: impl Fn(&Module, ScanShape) -> Projections,
    feed: impl Fn(usize, &Module) -> Result<FeedSpec, ModelError>,
) -> Result<ModelSpec, ModelError> {
    const INTERVAL: &str = "full_attention_interval";
    let c = &trunk.c;
    only(c, &["attn_output_gate"], true)?;
    let heads = Heads::read(c, trunk.hidden)?;
    let rope = rope(trunk.config, heads.width, &RopeDefaults { theta: 10_000.0, partial: 0.25 })?;
    let shape = delta_net_shape(c)?;
    let kernel = kernel(c, "linear_conv_kernel_dim")?;
    let ruled = c.opt_size(INTERVAL)?.map(|interval| every(interval, trunk.layers));
    let is_full = listed_or_ruled(c, trunk.layers, (INTERVAL, ruled))?.unwrap_or_else(|| every(4, trunk.layers));
    let model = trunk.model(family, |l, at| {
        let feed = feed(l, &at.sub("mlp"))?;
        if is_full[l] {
            return Ok(trunk.layer(at, gated_attention(trunk, &at.sub("self_attn"), heads, &rope), feed));
        }
        let module = at.sub("linear_attn");
        let net = delta_net(trunk, &module, shape, project(&module, shape));
        Ok(trunk.layer(at, gated_delta(&module, shape, kernel, 1.0, net), feed))
    })?;
    Ok(ModelSpec { ignored: vec!["model.visual.".to_string(), "mtp.".to_string()], ..model })
}

/// Where the inputs of a delta net are.
pub(super) struct Projections {
    /// Rows of q, k and v.
    pub channels: RowsSpec,
    /// Rows of the output gate.
    pub gate: RowSource,
    /// Rows of beta.
    pub b: RowSource,
    /// Rows of the step.
    pub a: RowSource,
}

fn delta_net(trunk: &Trunk<'_>, at: &Module, shape: ScanShape, inputs: Projections) -> DeltaNet {
    DeltaNet {
        channels: inputs.channels,
        conv: vec![at.rows("conv1d", 2 * shape.key_heads * shape.d_k + shape.heads * shape.d_v)],
        gate: inputs.gate,
        b: inputs.b,
        a: inputs.a,
        norm: at.norm("norm", shape.d_v, trunk.eps),
        out: at.rows("out_proj", trunk.hidden),
    }
}

fn gated_attention(trunk: &Trunk<'_>, at: &Module, heads: Heads, rope: &RopeSpec) -> AttentionSpec {
    // A head's rows of q_proj are [query | gate].
    let [queries, gates] = at.split("q_proj", heads.heads, [heads.width, heads.width]);
    let (keys, values) = (at.rows("k_proj", heads.keys()), at.rows("v_proj", heads.keys()));
    let norm = |name| Some(NormSpec { zero_centred: true, ..at.norm(name, heads.width, trunk.eps) });
    AttentionSpec {
        project: vec![queries, gates, keys, values],
        gated: true,
        q_norm: norm("q_norm"),
        k_norm: norm("k_norm"),
        ..attention(trunk, at, heads, Some(rope.clone()))
    }
}

/// Experts. Releases store them all in two tensors or each in tensors of its own, and only the files tell.
pub(super) fn experts(trunk: &Trunk<'_>, at: &Module, renormalise: bool) -> Result<FeedSpec, ModelError> {
    let (c, hidden) = (&trunk.c, trunk.hidden);
    let route = softmax(trunk, renormalise)?;
    let inner = c.size("moe_intermediate_size")?;
    let shared = c.size("shared_expert_intermediate_size")?;
    let experts = ExpertsSpec {
        fused: Some(fused(at, FUSED, MlpForm::SwiGlu, hidden, inner, route.experts)),
        shared: Some(mlp(&at.sub("shared_expert"), PROJ, hidden, shared)),
        shared_gate: Some(at.rows("shared_expert_gate", 1)),
        ..ExpertsSpec::new(route, at.rows("gate", route.experts), one_by_one(at, PROJ, hidden, inner, route.experts))
    };
    Ok(experts.into())
}
