//! The families: each file turns a `config.json` into a [`ModelSpec`].

mod qwen3_5;
mod rope;

use serde_json::Value;

use crate::config::MAX_SIZE;
use crate::{Config, ModelError, ModelSpec};

type Describe = fn(&Config) -> Result<ModelSpec, ModelError>;

/// How a `config.json` names a family.
struct Family {
    /// One of `architectures`.
    architecture: &'static str,
    /// `model_type`, which tells where `architectures` is missing.
    model_type: &'static str,
    describe: Describe,
}

const FAMILIES: [Family; 2] = [
    Family { architecture: "Qwen3_5ForCausalLM", model_type: "qwen3_5_text", describe: qwen3_5::plain },
    Family { architecture: "Qwen3_5ForConditionalGeneration", model_type: "qwen3_5", describe: qwen3_5::release },
];

/// Most layers that a model may have: far above any.
const MAX_LAYERS: usize = 1 << 12;

/// Describe the model of a `config.json`.
///
/// # Errors
/// If the architecture is unknown, or a key is missing, wrong or asks for something that is not served.
pub fn describe(config: &Config) -> Result<ModelSpec, ModelError> {
    let family = family(config)?;
    for level in [config.clone(), config.text()?] {
        if level.get("quantization_config").is_some() {
            return Err(level.unsupported("quantization_config", "weights in f32, bf16 or f16 are served"));
        }
    }
    (family.describe)(config)
}

fn family(config: &Config) -> Result<&'static Family, ModelError> {
    let served = || FAMILIES.map(|f| f.architecture).join(", ");
    let names = config.opt_strings("architectures")?.unwrap_or_default();
    if let Some(family) = FAMILIES.iter().find(|f| names.iter().any(|name| name == f.architecture)) {
        return Ok(family);
    }
    if let Some(name) = names.first() {
        return Err(ModelError::Unsupported(format!("architecture {name} (served are {})", served())));
    }
    let Some(model_type) = config.opt_str("model_type")? else {
        return Err(config.wrong("architectures", format!("is missing; one of {} is needed", served())));
    };
    FAMILIES
        .iter()
        .find(|f| f.model_type == model_type)
        .ok_or_else(|| ModelError::Unsupported(format!("model type {model_type} (served are {})", served())))
}

/// Whether the head is the embedding. Either level of a nested config may say so; where both do and
/// disagree, the text model's word counts.
fn tied(config: &Config, default: bool) -> Result<bool, ModelError> {
    const KEY: &str = "tie_word_embeddings";
    Ok(config.text()?.opt_bool(KEY)?.or(config.opt_bool(KEY)?).unwrap_or(default))
}

/// Which layers are full attention: `layer_types`, else every `full_attention_interval`-th.
fn full_attention(config: &Config, layers: usize, interval: usize) -> Result<Vec<bool>, ModelError> {
    const KEY: &str = "layer_types";
    let Some(types) = config.opt_strings(KEY)? else {
        let interval = config.opt_size("full_attention_interval")?.unwrap_or(interval);
        return Ok((1..=layers).map(|l| l % interval == 0).collect());
    };
    if types.len() != layers {
        return Err(config.wrong(KEY, format!("has {} entries, num_hidden_layers is {layers}", types.len())));
    }
    let kind = |(layer, name): (usize, &String)| match name.as_str() {
        "full_attention" => Ok(true),
        "linear_attention" => Ok(false),
        other => {
            let key = config.name(KEY);
            Err(ModelError::Unsupported(format!(
                "{key}[{layer}] = {other:?} in config.json (linear_attention and full_attention are served)"
            )))
        }
    };
    types.iter().enumerate().map(kind).collect()
}

/// The number of layers.
fn layers(config: &Config) -> Result<usize, ModelError> {
    const KEY: &str = "num_hidden_layers";
    config.opt_size_within(KEY, MAX_LAYERS)?.ok_or_else(|| config.wrong(KEY, "is missing"))
}

/// The positions that the model was made for.
fn max_positions(config: &Config, default: usize) -> Result<usize, ModelError> {
    Ok(config.opt_size_within("max_position_embeddings", u32::MAX as usize)?.unwrap_or(default))
}

/// What is added to the mean square in norms.
fn norm_eps(config: &Config, default: f64) -> Result<f32, ModelError> {
    const KEY: &str = "rms_norm_eps";
    let eps = config.opt_f64(KEY)?.unwrap_or(default);
    // Not above 0 as f32: rows of zeros would become NaN.
    if eps as f32 <= 0.0 || eps >= 1.0 {
        return Err(config.wrong(KEY, format!("must be above 0 and below 1, is {eps}")));
    }
    Ok(eps as f32)
}

/// `whole` must be a multiple of `part`.
fn divides(config: &Config, whole: (&str, usize), part: (&str, usize)) -> Result<(), ModelError> {
    if !whole.1.is_multiple_of(part.1) {
        let problem = format!("is {}, which is no multiple of {} = {}", whole.1, part.0, part.1);
        return Err(config.wrong(whole.0, problem));
    }
    Ok(())
}

/// `heads` heads of `width` must not be wider than any model is.
fn bounded(config: &Config, heads: (&str, usize), width: (&str, usize)) -> Result<(), ModelError> {
    if heads.1 * width.1 > MAX_SIZE {
        let problem = format!("{} heads of {} = {} are wider than {MAX_SIZE}", heads.1, width.0, width.1);
        return Err(config.wrong(heads.0, problem));
    }
    Ok(())
}

/// The activation must be silu.
fn only_silu(config: &Config) -> Result<(), ModelError> {
    config.only("hidden_act", &Value::from("silu"))
}
