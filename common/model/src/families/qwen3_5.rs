//! Qwen3.5, dense: gated delta nets and gated grouped-query attention, every norm zero-centred but that
//! inside the delta net. Plain (`model.`) and release (`model.language_model.`, beside a vision tower and
//! an MTP head) layout.

use hypic_kernels::{DeltaShape, RopeSpec};
use hypic_state::ComposeRule;
use serde_json::Value;

use super::rope::{RopeDefaults, rope};
use super::{bounded, divides, full_attention, layers, max_positions, norm_eps, only_silu, tied};
use crate::spec::{AttentionSpec, GatedDeltaSpec, LayerSpec, MixerSpec, MlpSpec, NormSpec, RowSource};
use crate::{Config, ModelError, ModelSpec};

/// The text model alone.
pub(super) fn plain(config: &Config) -> Result<ModelSpec, ModelError> {
    describe(config, "model.")
}

/// The text model of a release.
pub(super) fn release(config: &Config) -> Result<ModelSpec, ModelError> {
    describe(config, "model.language_model.")
}

fn describe(config: &Config, prefix: &str) -> Result<ModelSpec, ModelError> {
    let c = config.text()?;
    only_silu(&c)?;
    c.only("attention_bias", &Value::from(false))?;
    c.only("attn_output_gate", &Value::from(true))?;

    let (hidden, layers) = (c.size("hidden_size")?, layers(&c)?);
    let eps = norm_eps(&c, 1e-6)?;
    let norm = |name: String, width: usize| NormSpec { name, width, eps, zero_centred: true };
    let head_dim = head_dim(&c, hidden)?;
    let rope = rope(config, head_dim, &RopeDefaults { theta: 10_000_000.0, partial: 0.25 })?;
    let is_full = full_attention(&c, layers, 4)?;
    let layer = |l: usize| -> Result<LayerSpec, ModelError> {
        let at = format!("{prefix}layers.{l}.");
        Ok(LayerSpec {
            mixer_norm: norm(format!("{at}input_layernorm.weight"), hidden),
            mixer: if is_full[l] {
                MixerSpec::Attention(attention(&c, (hidden, head_dim), &rope, eps, &format!("{at}self_attn."))?)
            } else {
                MixerSpec::GatedDelta(gated_delta(&c, hidden, eps, &format!("{at}linear_attn."))?)
            },
            mlp_norm: norm(format!("{at}post_attention_layernorm.weight"), hidden),
            mlp: mlp(&c, hidden, &format!("{at}mlp."))?,
        })
    };
    let tied = tied(config, false)?;
    let head = "lm_head.weight".to_string();
    Ok(ModelSpec {
        family: "qwen3_5",
        vocab: c.size("vocab_size")?,
        hidden,
        max_positions: max_positions(&c, 32768)?,
        embed: format!("{prefix}embed_tokens.weight"),
        final_norm: norm(format!("{prefix}norm.weight"), hidden),
        head: (!tied).then(|| head.clone()),
        tied_head: tied.then_some(head),
        layers: (0..layers).map(layer).collect::<Result<_, _>>()?,
        ignored: vec!["model.visual.".to_string(), "mtp.".to_string()],
        compose: ComposeRule::Transition,
        eos: c.token_ids("eos_token_id")?,
    })
}

fn gated_delta(c: &Config, hidden: usize, eps: f32, at: &str) -> Result<GatedDeltaSpec, ModelError> {
    let (key_heads, heads) = ("linear_num_key_heads", "linear_num_value_heads");
    let shape = DeltaShape {
        key_heads: c.size(key_heads)?,
        heads: c.size(heads)?,
        d_k: c.size("linear_key_head_dim")?,
        d_v: c.size("linear_value_head_dim")?,
        beta_scale: 1.0,
    };
    divides(c, (heads, shape.heads), (key_heads, shape.key_heads))?;
    bounded(c, (key_heads, shape.key_heads), ("linear_key_head_dim", shape.d_k))?;
    bounded(c, (heads, shape.heads), ("linear_key_head_dim", shape.d_k))?;
    bounded(c, (heads, shape.heads), ("linear_value_head_dim", shape.d_v))?;
    let values = shape.heads * shape.d_v;
    let rows = |name: &str, rows: usize| RowSource::all(format!("{at}{name}.weight"), rows);
    Ok(GatedDeltaSpec {
        shape,
        kernel: c.opt_size("linear_conv_kernel_dim")?.unwrap_or(4),
        project: vec![
            rows("in_proj_qkv", shape.channels()),
            rows("in_proj_z", values),
            rows("in_proj_b", shape.heads),
            rows("in_proj_a", shape.heads),
        ],
        conv: format!("{at}conv1d.weight"),
        a_log: format!("{at}A_log"),
        dt_bias: format!("{at}dt_bias"),
        norm: NormSpec { name: format!("{at}norm.weight"), width: shape.d_v, eps, zero_centred: false },
        out: rows("out_proj", hidden),
    })
}

/// Width of an attention head; without `head_dim` the heads share the hidden size.
fn head_dim(c: &Config, hidden: usize) -> Result<usize, ModelError> {
    const HEADS: &str = "num_attention_heads";
    let heads = c.size(HEADS)?;
    let width = match c.opt_size("head_dim")? {
        Some(width) => width,
        None => {
            divides(c, ("hidden_size", hidden), (HEADS, heads))?;
            hidden / heads
        }
    };
    bounded(c, (HEADS, heads), ("head_dim", width))?;
    Ok(width)
}

fn attention(
    c: &Config,
    (hidden, head_dim): (usize, usize),
    rope: &RopeSpec,
    eps: f32,
    at: &str,
) -> Result<AttentionSpec, ModelError> {
    let heads = c.size("num_attention_heads")?;
    let kv_heads = c.opt_size("num_key_value_heads")?.unwrap_or(heads);
    divides(c, ("num_attention_heads", heads), ("num_key_value_heads", kv_heads))?;
    let norm =
        |name: &str| Some(NormSpec { name: format!("{at}{name}.weight"), width: head_dim, eps, zero_centred: true });
    // A head's rows of q_proj are [query | gate].
    let half = |skip: usize| RowSource {
        name: format!("{at}q_proj.weight"),
        blocks: heads,
        block_rows: 2 * head_dim,
        skip,
        take: head_dim,
    };
    let rows = |name: &str, rows: usize| RowSource::all(format!("{at}{name}.weight"), rows);
    Ok(AttentionSpec {
        heads,
        kv_heads,
        head_dim,
        scale: (head_dim as f32).powf(-0.5),
        rope: Some(rope.clone()),
        project: vec![
            half(0),
            half(head_dim),
            rows("k_proj", kv_heads * head_dim),
            rows("v_proj", kv_heads * head_dim),
        ],
        gated: true,
        q_norm: norm("q_norm"),
        k_norm: norm("k_norm"),
        out: rows("o_proj", hidden),
    })
}

fn mlp(c: &Config, hidden: usize, at: &str) -> Result<MlpSpec, ModelError> {
    let inner = c.size("intermediate_size")?;
    let rows = |name: &str, rows: usize| RowSource::all(format!("{at}{name}.weight"), rows);
    Ok(MlpSpec {
        inner,
        gate_up: vec![rows("gate_proj", inner), rows("up_proj", inner)],
        down: rows("down_proj", hidden),
    })
}
