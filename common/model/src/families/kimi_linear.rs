//! Kimi-Linear: Kimi delta attention with low-rank gates, and latent attention without rotation. In the key set of the
//! release, whose lists number layers from 1, and in that of transformers.

use super::parts::layout::{either, layer_types, numbers};
use super::parts::mla::Latent;
use super::parts::moe::{NUMBERED, PROJ, SigmoidExperts, feed, sparse_layers};
use super::parts::read::only;
use super::parts::recurrent::{kimi_delta, shape};
use super::parts::{Defaults, Trunk};
use crate::spec::ProjectionSpec;
use crate::{Config, ModelError, ModelSpec};

/// Where the release has what is about linear layers.
const LINEAR: &str = "linear_attn_config";

/// The list of layers with full attention, in there.
const FULL: &str = "full_attn_layers";

const EXPERTS: SigmoidExperts = SigmoidExperts {
    module: "block_sparse_moe",
    experts: NUMBERED,
    shared: PROJ,
    bias: Some("gate.e_score_correction_bias"),
    default_shared: 0,
};

pub(super) fn describe(config: &Config) -> Result<ModelSpec, ModelError> {
    let trunk = Trunk::read(config, "model.", &Defaults { eps: 1e-5, positions: 1 << 20 })?;
    let c = &trunk.c;
    only(c, &["mla_use_nope"], true)?;
    let linear = c.object(LINEAR)?;
    let listed = linear.as_ref().map(|linear| full_layers(linear, trunk.layers)).transpose()?.flatten();
    let list = format!("{LINEAR}.{FULL}");
    let is_full = either(c, (&list, listed), ("layer_types", layer_types(c, trunk.layers)?))?;
    let is_sparse = sparse_layers(&trunk)?;
    let place = linear.as_ref().unwrap_or(c);
    let of_linear = |key: &'static str, flat| -> Result<Option<usize>, ModelError> {
        let nested = linear.as_ref().map(|linear| linear.opt_size(key)).transpose()?.flatten();
        match (nested, c.opt_size(flat)?) {
            (Some(nested), Some(other)) if nested != other => Err(place.wrong(key, format!("differs from {flat}"))),
            (nested, flat) => Ok(nested.or(flat)),
        }
    };
    let named = |key, flat| match of_linear(key, flat)? {
        Some(size) => Ok((key, size)),
        None => Err(place.wrong(key, format!("is missing, and so is {flat}"))),
    };
    let (heads, width) = (named("num_heads", "linear_num_heads")?, named("head_dim", "linear_head_dim")?);
    let shape = shape(place, heads, heads, width, width)?;
    let kernel = of_linear("short_conv_kernel_size", "linear_conv_kernel_dim")?.unwrap_or(4);
    let latent = Latent::read(c)?;
    trunk.model("kimi_linear", |l, at| {
        let module = at.sub("self_attn");
        let feed = feed(&trunk, at, is_sparse[l], &EXPERTS)?;
        if is_full[l] {
            return Ok(trunk.layer(at, latent.layer(&trunk, &module, "o_proj", None), feed));
        }
        let low_rank = |down, up| ProjectionSpec::LowRank {
            down: module.rows(down, shape.d_k),
            up: module.rows(up, shape.heads * shape.d_k),
        };
        let (forget, gate) = (low_rank("f_a_proj", "f_b_proj"), low_rank("g_a_proj", "g_b_proj"));
        Ok(trunk.layer(at, kimi_delta(&trunk, &module, shape, kernel, (forget, None), gate), feed))
    })
}

/// Which layers are full attention, if the lists are there: every layer must be in one of the two.
fn full_layers(linear: &Config, layers: usize) -> Result<Option<Vec<bool>>, ModelError> {
    const KDA: &str = "kda_layers";
    let (full, kda) = (numbers(linear, FULL, 1, layers)?, numbers(linear, KDA, 1, layers)?);
    let (full, kda) = match (full, kda) {
        (Some(full), Some(kda)) => (full, kda),
        (None, None) => return Ok(None),
        (None, _) => return Err(linear.wrong(FULL, "is missing")),
        (_, None) => return Err(linear.wrong(KDA, "is missing")),
    };
    match full.iter().zip(&kda).position(|(full, kda)| full == kda) {
        Some(l) if full[l] => Err(linear.wrong(KDA, format!("has layer {}, and so has {}", l + 1, linear.name(FULL)))),
        Some(l) => Err(linear.wrong(KDA, format!("lacks layer {}, and so does {}", l + 1, linear.name(FULL)))),
        None => Ok(Some(full)),
    }
}
