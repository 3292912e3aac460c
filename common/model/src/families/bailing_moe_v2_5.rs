//! Ring-2.5 and Ling-2.5: lightning attention with rotation, and latent attention.

use super::bailing::{Ring, stack};
use super::parts::mla::Latent;
use super::parts::{Defaults, Trunk};
use crate::{Config, ModelError, ModelSpec};

pub(super) fn describe(config: &Config) -> Result<ModelSpec, ModelError> {
    let trunk = Trunk::read(config, "model.", &Defaults { eps: 1e-6, positions: 32768 })?;
    let ring = Ring::read(&trunk)?;
    let latent = Latent::read(&trunk.c)?;
    // One rotation serves both kinds of layer, but for the order of the pairs.
    let rotated = 2 * ring.rope.inv_freq.len();
    if rotated != latent.rotary {
        let problem = format!("is {}, but {rotated} dimensions of a linear layer's head rotate", latent.rotary);
        return Err(trunk.c.wrong("qk_rope_head_dim", problem));
    }
    let rotation = latent.rotation(&trunk, 600_000.0)?;
    stack(
        &trunk,
        "bailing_moe_v2_5",
        |l, at| ring.linear(&trunk, l, at),
        |at| latent.layer(&trunk, at, "dense", Some(&rotation)).into(),
    )
}
