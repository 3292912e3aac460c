//! Qwen3.5, dense: gated delta nets and gated grouped-query attention, every norm zero-centred but that
//! inside the delta net. Plain (`model.`) and release (`model.language_model.`, beside a vision tower and
//! an MTP head) layout.

use hypic_kernels::DeltaShape;
use hypic_state::ComposeRule;
use serde_json::Value;

use super::{divides, full_attention, only_silu, rope, tied};
use crate::spec::{AttentionSpec, GatedDeltaSpec, LayerSpec, MixerSpec, MlpSpec, NormSpec, RowSource};
use crate::{Config, ModelError, ModelSpec};

pub(super) fn describe(config: &Config) -> Result<ModelSpec, ModelError> {
    let release = config.object("text_config").is_some();
    let c = config.text();
    only_silu(&c)?;
    c.only("attention_bias", &Value::from(false))?;
    c.only("attn_output_gate", &Value::from(true))?;

    let prefix = if release { "model.language_model." } else { "model." };
    let (hidden, layers) = (c.size("hidden_size")?, c.size("num_hidden_layers")?);
    let eps = c.opt_f64("rms_norm_eps")?.unwrap_or(1e-6) as f32;
    let norm = |name: String, width: usize| NormSpec {
        name,
        width,
        eps,
        zero_centred: true,
    };
    let is_full = full_attention(&c, layers, 4)?;
    let layer = |l: usize| -> Result<LayerSpec, ModelError> {
        let at = format!("{prefix}layers.{l}.");
        Ok(LayerSpec {
            mixer_norm: norm(format!("{at}input_layernorm.weight"), hidden),
            mixer: if is_full[l] {
                MixerSpec::Attention(attention(&c, hidden, eps, &format!("{at}self_attn."))?)
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
        max_positions: c.opt_usize("max_position_embeddings")?.unwrap_or(32768),
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
    let values = shape.heads * shape.d_v;
    let rows = |name: &str, rows: usize| RowSource::all(format!("{at}{name}.weight"), rows);
    Ok(GatedDeltaSpec {
        shape,
        kernel: c.opt_usize("linear_conv_kernel_dim")?.unwrap_or(4).max(1),
        project: vec![
            rows("in_proj_qkv", shape.channels()),
            rows("in_proj_z", values),
            rows("in_proj_b", shape.heads),
            rows("in_proj_a", shape.heads),
        ],
        conv: format!("{at}conv1d.weight"),
        a_log: format!("{at}A_log"),
        dt_bias: format!("{at}dt_bias"),
        norm: NormSpec {
            name: format!("{at}norm.weight"),
            width: shape.d_v,
            eps,
            zero_centred: false,
        },
        out: rows("out_proj", hidden),
    })
}

fn attention(c: &Config, hidden: usize, eps: f32, at: &str) -> Result<AttentionSpec, ModelError> {
    let heads = c.size("num_attention_heads")?;
    let kv_heads = c.opt_usize("num_key_value_heads")?.unwrap_or(heads).max(1);
    divides(c, ("num_attention_heads", heads), ("num_key_value_heads", kv_heads))?;
    let head_dim = c.opt_usize("head_dim")?.unwrap_or(hidden / heads);
    let norm = |name: &str| {
        Some(NormSpec {
            name: format!("{at}{name}.weight"),
            width: head_dim,
            eps,
            zero_centred: true,
        })
    };
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
        rope: Some(rope(c, head_dim, 10_000_000.0, 0.25)?),
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
