//! Qwen3-Next: as Qwen3.5 with experts, but the delta net's inputs are in two tensors whose rows lie key head by key
//! head, and some layers may have an MLP instead of experts.

use hypic_kernels::ScanShape;

use super::parts::moe::dense;
use super::parts::{Module, layout};
use super::qwen::{Projections, experts, stack, trunk};
use crate::{Config, ModelError, ModelSpec};

pub(super) fn describe(config: &Config) -> Result<ModelSpec, ModelError> {
    let trunk = trunk(config, "model.")?;
    let c = &trunk.c;
    let renormalise = c.opt_bool("norm_topk_prob")?.unwrap_or(true);
    let step = c.opt_size("decoder_sparse_step")?.unwrap_or(1);
    let dense_layers = layout::numbers(c, "mlp_only_layers", 0, trunk.layers)?;
    stack(&trunk, "qwen3_next", by_key_head, |l, at| {
        let sparse = (l + 1).is_multiple_of(step) && !dense_layers.as_ref().is_some_and(|dense| dense[l]);
        if sparse { experts(&trunk, at, renormalise) } else { dense(&trunk, at) }
    })
}

/// A key head's rows are [q | k | v | z] in one tensor and [b | a] in the other, the last two of each for all value
/// heads that it serves.
fn by_key_head(at: &Module, shape: ScanShape) -> Projections {
    let served = shape.heads / shape.key_heads;
    let values = served * shape.d_v;
    let [q, k, v, gate] = at.split("in_proj_qkvz", shape.key_heads, [shape.d_k, shape.d_k, values, values]);
    let [b, a] = at.split("in_proj_ba", shape.key_heads, [served, served]);
    Projections { channels: vec![q, k, v], gate, b, a }
}
