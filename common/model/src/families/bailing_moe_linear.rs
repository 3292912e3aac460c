//! Ring-mini-linear-2.0 and Ring-flash-linear-2.0: lightning attention with rotation, and grouped-query attention.

use super::bailing::{Ring, stack};
use super::parts::{Defaults, Trunk, attention};
use crate::spec::AttentionSpec;
use crate::{Config, ModelError, ModelSpec};

pub(super) fn describe(config: &Config) -> Result<ModelSpec, ModelError> {
    let trunk = Trunk::read(config, "model.", &Defaults { eps: 1e-6, positions: 32768 })?;
    let ring = Ring::read(&trunk)?;
    let heads = ring.heads;
    stack(
        &trunk,
        "bailing_moe_linear",
        |l, at| ring.linear(&trunk, l, at),
        |at| {
            let [q_norm, k_norm] = ring.norms(&trunk, at);
            AttentionSpec {
                project: vec![at.rows("query_key_value", heads.queries() + 2 * heads.keys())],
                q_norm,
                k_norm,
                out: at.rows("dense", trunk.hidden),
                ..attention(&trunk, at, heads, Some(ring.rope.clone()))
            }
            .into()
        },
    )
}
