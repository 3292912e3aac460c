//! What the bailing families share: groups of linear layers that end with full attention, a tail of full attention,
//! experts of a sigmoid router, and (in the Ring models) lightning attention with rotation.

use hypic_kernels::{Activation, RopeSpec};

use super::parts::layout::listed_or_ruled;
use super::parts::lightning::{layer_factor, lightning};
use super::parts::moe::{GROUPS, LIMITS, PROJ, SigmoidExperts, feed, limits, sparse_layers};
use super::parts::read::{divides, only, size, spelling};
use super::parts::{Heads, Module, Trunk};
use super::rope::{RopeDefaults, rope};
use crate::spec::{MixerSpec, NormSpec, RecurrentSpec};
use crate::{ModelError, ModelSpec};

/// The stack of a family, of linear and full layers whose module is `attention`.
///
/// # Errors
/// If a key is missing, wrong or asks for something that is not served.
pub(super) fn stack(
    trunk: &Trunk<'_>,
    family: &'static str,
    linear: impl Fn(usize, &Module) -> RecurrentSpec,
    full: impl Fn(&Module) -> MixerSpec,
) -> Result<ModelSpec, ModelError> {
    only(&trunk.c, &["norm_head"], false)?;
    only(&trunk.c, &["use_rmsnorm"], true)?;
    let is_full = full_layers(trunk)?;
    let is_sparse = sparse_layers(trunk)?;
    // Their defaults are others in each publication.
    if is_sparse.contains(&true) {
        size(&trunk.c, &GROUPS)?;
    }
    let biased = trunk.c.opt_bool("moe_router_enable_expert_bias")?.unwrap_or(true);
    let [expert_limits, shared_limits] = LIMITS.map(|key| limits(&trunk.c, key, trunk.layers));
    let (expert_limits, shared_limits) = (expert_limits?, shared_limits?);
    let model = trunk.model(family, |l, at| {
        let module = at.sub("attention");
        let mixer = if is_full[l] { full(&module) } else { linear(l, &module).into() };
        let experts = SigmoidExperts {
            module: "mlp",
            experts: PROJ.bounded(expert_limits[l]),
            shared: PROJ.bounded(shared_limits[l]),
            bias: biased.then_some("gate.expert_bias"),
            default_shared: 0,
        };
        Ok(trunk.layer(at, mixer, feed(trunk, at, is_sparse[l], &experts)?))
    })?;
    Ok(ModelSpec { embed: trunk.root.tensor("word_embeddings.weight"), ..model })
}

/// `layer_types`, else the last layer of each group and all behind the last whole group.
fn full_layers(trunk: &Trunk<'_>) -> Result<Vec<bool>, ModelError> {
    const GROUP: &str = "layer_group_size";
    let (c, layers) = (&trunk.c, trunk.layers);
    let ruled = c.opt_size(GROUP)?.map(|group| {
        let grouped = layers / group * group;
        (0..layers).map(|l| (l + 1).is_multiple_of(group) || l >= grouped).collect()
    });
    let is_full = listed_or_ruled(c, layers, (GROUP, ruled))?;
    is_full.ok_or_else(|| c.wrong(GROUP, "is missing, and so is layer_types"))
}

/// Lightning attention of the Ring models, and what it has in common with their softmax attention.
pub(super) struct Ring {
    /// Heads of softmax layers; linear ones have as many key/value heads as query heads.
    pub heads: Heads,
    /// Rotation in layers of both kinds.
    pub rope: RopeSpec,
    normed: bool,
    groups: usize,
    activation: Option<Activation>,
}

impl Ring {
    /// Read the keys.
    ///
    /// # Errors
    /// If a key is missing, wrong or asks for something that is not served.
    pub(super) fn read(trunk: &Trunk<'_>) -> Result<Self, ModelError> {
        const GROUPS: &str = "group_norm_size";
        let c = &trunk.c;
        only(c, &["linear_rope"], true)?;
        let heads = Heads::read(c, trunk.hidden)?;
        let groups = c.size(GROUPS)?;
        divides(c, ("num_attention_heads * head_dim", heads.queries()), (GROUPS, groups))?;
        let silu = spelling(c, &["linear_silu", "use_linear_silu"])?;
        Ok(Ring {
            heads,
            rope: rope(trunk.config, heads.width, &RopeDefaults { theta: 600_000.0, partial: 0.5 })?,
            normed: c.opt_bool("use_qk_norm")?.unwrap_or(true),
            groups,
            activation: c.opt_bool(silu)?.unwrap_or(false).then_some(Activation::Silu),
        })
    }

    /// Norms of each head's queries and keys.
    pub(super) fn norms(&self, trunk: &Trunk<'_>, at: &Module) -> [Option<NormSpec>; 2] {
        ["query_layernorm", "key_layernorm"].map(|name| self.normed.then(|| at.norm(name, self.heads.width, trunk.eps)))
    }

    /// Layer `l`. `group_norm_size` is the number of groups of the output's norm.
    pub(super) fn linear(&self, trunk: &Trunk<'_>, l: usize, at: &Module) -> RecurrentSpec {
        let Heads { heads, width, .. } = self.heads;
        let all = heads * width;
        // The publisher counts layers from 1 here: the first layer decays faster than the slopes say.
        let factor = layer_factor(l, 1, trunk.layers, trunk.layers as f64 - 1.0);
        let [q_norm, k_norm] = self.norms(trunk, at);
        RecurrentSpec {
            activation: self.activation,
            q_norm,
            k_norm,
            rope: Some(self.rope.clone()),
            q_scale: (width as f32).powf(-0.5),
            norm_group: all / self.groups,
            ..lightning(
                heads,
                width,
                factor,
                vec![at.rows("query_key_value", 3 * all)],
                at.rows("g_proj", all),
                at.norm("g_norm", all, trunk.eps),
                at.rows("dense", trunk.hidden),
            )
        }
    }
}
