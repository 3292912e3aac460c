//! The families: each file turns a `config.json` into a [`ModelSpec`].

mod qwen3_5;

use hypic_kernels::RopeSpec;
use serde_json::Value;

use crate::{Config, ModelError, ModelSpec};

type Describe = fn(&Config) -> Result<ModelSpec, ModelError>;

/// Architectures as `config.json` names them.
const FAMILIES: [(&str, Describe); 2] = [
    ("Qwen3_5ForCausalLM", qwen3_5::describe),
    ("Qwen3_5ForConditionalGeneration", qwen3_5::describe),
];

/// Describe the model of a `config.json`.
///
/// # Errors
/// If the architecture is unknown, or a key is missing, wrong or asks for something that is not served.
pub fn describe(config: &Config) -> Result<ModelSpec, ModelError> {
    let names = config.opt_strings("architectures")?.unwrap_or_default();
    let known = || FAMILIES.map(|(name, _)| name).join(", ");
    let Some(name) = names.first() else {
        return Err(ModelError::config(
            "architectures",
            format!("is missing; one of {} is needed", known()),
        ));
    };
    match FAMILIES.iter().find(|(known, _)| known == name) {
        Some((_, describe)) => describe(config),
        None => Err(ModelError::Unsupported(format!(
            "architecture {name} (served are {})",
            known()
        ))),
    }
}

/// The rotary embedding of a `config.json` for heads of `head_dim`, from each place where releases put
/// its parameters: `rope_parameters` (flat or per layer type), `rope_scaling`, or the config itself.
///
/// # Errors
/// If a parameter is wrong, or the type is one that is not served.
fn rope(config: &Config, head_dim: usize, theta: f64, partial: f64) -> Result<RopeSpec, ModelError> {
    let parameters = config.object("rope_parameters");
    let per_type = parameters.as_ref().and_then(|p| p.object("full_attention"));
    let places: Vec<Config> = [
        per_type,
        parameters,
        config.object("rope_scaling"),
        Some(config.clone()),
    ]
    .into_iter()
    .flatten()
    .collect();
    let first_f64 = |key: &str| -> Result<Option<f64>, ModelError> {
        for place in &places {
            if let Some(value) = place.opt_f64(key)? {
                return Ok(Some(value));
            }
        }
        Ok(None)
    };
    for place in &places[..places.len() - 1] {
        for key in ["rope_type", "type"] {
            let kind = place.opt_str(key)?;
            if kind.as_deref().is_some_and(|k| k != "default" && k != "mrope") {
                let name = place.name(key);
                return Err(ModelError::Unsupported(format!(
                    "{name} = {:?} in config.json",
                    kind.unwrap_or_default()
                )));
            }
        }
    }
    let theta = first_f64("rope_theta")?.unwrap_or(theta);
    let partial = first_f64("partial_rotary_factor")?.unwrap_or(partial);
    if theta <= 0.0 || !(0.0..=1.0).contains(&partial) {
        let problem = format!("rope_theta {theta} must be positive, partial_rotary_factor {partial} within 0..1");
        return Err(ModelError::config("rope_parameters", problem));
    }
    let rotated = (head_dim as f64 * partial) as usize / 2 * 2;
    let inv_freq = (0..rotated / 2)
        .map(|i| theta.powf(-2.0 * i as f64 / rotated as f64))
        .collect();
    Ok(RopeSpec {
        offset: 0,
        inv_freq,
        interleaved: false,
        scale: 1.0,
    })
}

/// Whether the head is the embedding. Either level of a nested config may say so; where both do and
/// disagree, the text model's word counts.
fn tied(config: &Config, default: bool) -> Result<bool, ModelError> {
    const KEY: &str = "tie_word_embeddings";
    Ok(config
        .text()
        .opt_bool(KEY)?
        .or(config.opt_bool(KEY)?)
        .unwrap_or(default))
}

/// Which layers are full attention: `layer_types`, else every `full_attention_interval`-th.
fn full_attention(config: &Config, layers: usize, interval: usize) -> Result<Vec<bool>, ModelError> {
    let Some(types) = config.opt_strings("layer_types")? else {
        let interval = config.opt_usize("full_attention_interval")?.unwrap_or(interval);
        if interval == 0 {
            return Err(ModelError::config(
                config.name("full_attention_interval"),
                "must be at least 1, is 0",
            ));
        }
        return Ok((1..=layers).map(|l| l % interval == 0).collect());
    };
    if types.len() != layers {
        let problem = format!("has {} entries for {layers} layers", types.len());
        return Err(ModelError::config(config.name("layer_types"), problem));
    }
    let kind = |t: &String| match t.as_str() {
        "full_attention" => Ok(true),
        "linear_attention" => Ok(false),
        other => Err(ModelError::Unsupported(format!("layer type {other:?} in config.json"))),
    };
    types.iter().map(kind).collect()
}

/// `whole` must be a multiple of `part`.
fn divides(config: &Config, whole: (&str, usize), part: (&str, usize)) -> Result<(), ModelError> {
    if whole.1 % part.1 != 0 {
        let problem = format!("is {}, which is no multiple of {} = {}", whole.1, part.0, part.1);
        return Err(ModelError::config(config.name(whole.0), problem));
    }
    Ok(())
}

/// The activation must be silu.
fn only_silu(config: &Config) -> Result<(), ModelError> {
    config.only("hidden_act", &Value::from("silu"))
}
