//! Qwen3.5, dense and with experts. Plain (`model.`) and release (`model.language_model.`, beside a vision tower and
//! an MTP head) layout.

use hypic_kernels::ScanShape;

use super::parts::Module;
use super::parts::moe::dense;
use super::parts::read::only;
use super::qwen::{Projections, experts, stack, trunk};
use crate::{Config, ModelError, ModelSpec};

const PLAIN: &str = "model.";
const RELEASE: &str = "model.language_model.";

/// The text model alone.
pub(super) fn plain(config: &Config) -> Result<ModelSpec, ModelError> {
    dense_stack(config, PLAIN)
}

/// The text model of a release.
pub(super) fn release(config: &Config) -> Result<ModelSpec, ModelError> {
    dense_stack(config, RELEASE)
}

/// The text model alone, with experts.
pub(super) fn moe_plain(config: &Config) -> Result<ModelSpec, ModelError> {
    expert_stack(config, PLAIN)
}

/// The text model of a release, with experts.
pub(super) fn moe_release(config: &Config) -> Result<ModelSpec, ModelError> {
    expert_stack(config, RELEASE)
}

fn dense_stack(config: &Config, root: &str) -> Result<ModelSpec, ModelError> {
    let trunk = trunk(config, root)?;
    stack(&trunk, "qwen3_5", flat, |_, at| dense(&trunk, at))
}

fn expert_stack(config: &Config, root: &str) -> Result<ModelSpec, ModelError> {
    let trunk = trunk(config, root)?;
    let c = &trunk.c;
    only(c, &["norm_topk_prob"], true)?;
    if c.get("mlp_only_layers").is_some_and(|v| v.as_array().is_none_or(|layers| !layers.is_empty())) {
        return Err(c.unsupported("mlp_only_layers", "experts in every layer are served"));
    }
    stack(&trunk, "qwen3_5_moe", flat, |_, at| experts(&trunk, at, true))
}

/// A tensor for q, k and v, and one for each other input.
fn flat(at: &Module, shape: ScanShape) -> Projections {
    let values = shape.heads * shape.d_v;
    Projections {
        channels: vec![at.rows("in_proj_qkv", 2 * shape.key_heads * shape.d_k + values)],
        gate: at.rows("in_proj_z", values),
        b: at.rows("in_proj_b", shape.heads),
        a: at.rows("in_proj_a", shape.heads),
    }
}
