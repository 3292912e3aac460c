//! The families: each file turns a `config.json` into a [`ModelSpec`], with what several share in `parts`. Which
//! family a configuration belongs to is decided here, by `architectures` and not by keys that it happens to have: a
//! model that is taken for its neighbour loads, and answers nonsense.

mod bailing;
mod bailing_hybrid;
mod bailing_moe_linear;
mod bailing_moe_v2_5;
mod bamba;
mod granitemoehybrid;
mod kimi_linear;
mod minimax;
mod nemotron_h;
mod olmo_hybrid;
mod parts;
mod qwen;
mod qwen3_5;
mod qwen3_next;
mod rope;

use hypic_state::ComposeRule;

use crate::checkpoint::BlockScaled;
use crate::{Config, ModelError, ModelSpec};

type Describe = fn(&Config) -> Result<ModelSpec, ModelError>;

/// How a `config.json` names a family.
struct Family {
    /// One of `architectures`.
    architecture: &'static str,
    /// `model_type`, which tells where `architectures` is missing.
    model_type: &'static str,
    /// Keys that tell it from another family with the same model type.
    told_by: &'static [&'static str],
    /// Parts of tensors' names that some checkpoints have, each with what stands there in others.
    also_named: &'static [(&'static str, &'static str)],
    describe: Describe,
}

const fn family(architecture: &'static str, model_type: &'static str, describe: Describe) -> Family {
    Family { architecture, model_type, told_by: &[], also_named: &[], describe }
}

const fn told_by(told_by: &'static [&'static str], family: Family) -> Family {
    Family { told_by, ..family }
}

const fn with_names(also_named: &'static [(&'static str, &'static str)], family: Family) -> Family {
    Family { also_named, ..family }
}

/// A text model that was saved out of a release.
const QWEN: &[(&str, &str)] = &[("model.language_model.", "model.")];

/// How transformers saves the projections of layers without experts.
const KIMI: &[(&str, &str)] = &[
    (".block_sparse_moe.gate_proj.", ".mlp.gate_proj."),
    (".block_sparse_moe.up_proj.", ".mlp.up_proj."),
    (".block_sparse_moe.down_proj.", ".mlp.down_proj."),
];

/// How transformers saves the outputs of Ling's linear layers, by the name that its others have.
const LINEAR: &[(&str, &str)] = &[(".attention.dense.", ".attention.o_proj.")];

/// How transformers saves the norms of OLMo's layers with full attention, by the name that its others have.
const OLMO: &[(&str, &str)] = &[(".feedforward_layer_norm.", ".post_attention_layernorm.")];

/// How transformers calls Nemotron's module.
const NEMOTRON: &[(&str, &str)] = &[("model.", "backbone.")];

/// Keys of Ring-2.5 that Ling-3.0 has not.
const RING: &[&str] = &["group_norm_size", "linear_silu", "use_linear_silu"];

/// Keys of Ling-3.0 that Ring-2.5 has not.
const LING: &[&str] = &["kda_lower_bound", "kda_safe_gate", "no_kda_lora"];

const FAMILIES: [Family; 16] = [
    with_names(QWEN, family("Qwen3_5ForCausalLM", "qwen3_5_text", qwen3_5::plain)),
    family("Qwen3_5ForConditionalGeneration", "qwen3_5", qwen3_5::release),
    with_names(QWEN, family("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", qwen3_5::moe_plain)),
    family("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", qwen3_5::moe_release),
    family("Qwen3NextForCausalLM", "qwen3_next", qwen3_next::describe),
    family("BailingMoeLinearV2ForCausalLM", "bailing_moe_linear", bailing_moe_linear::describe),
    told_by(RING, family("BailingMoeV2_5ForCausalLM", "bailing_hybrid", bailing_moe_v2_5::describe)),
    with_names(LINEAR, told_by(LING, family("BailingMoeV3ForCausalLM", "bailing_hybrid", bailing_hybrid::describe))),
    with_names(KIMI, family("KimiLinearForCausalLM", "kimi_linear", kimi_linear::describe)),
    family("MiniMaxForCausalLM", "minimax", minimax::converted),
    family("MiniMaxText01ForCausalLM", "minimax_text_01", minimax::release),
    family("MiniMaxM1ForCausalLM", "minimax_m1", minimax::release),
    with_names(OLMO, family("OlmoHybridForCausalLM", "olmo_hybrid", olmo_hybrid::describe)),
    family("BambaForCausalLM", "bamba", bamba::describe),
    family("GraniteMoeHybridForCausalLM", "granitemoehybrid", granitemoehybrid::describe),
    with_names(NEMOTRON, family("NemotronHForCausalLM", "nemotron_h", nemotron_h::describe)),
];

/// Other names of an architecture.
const ALIASES: [(&str, &str); 1] = [("BailingHybridForCausalLM", "BailingMoeV3ForCausalLM")];

/// Describe the model of a `config.json`.
///
/// # Errors
/// If the architecture is unknown, or a key is missing, wrong or asks for something that is not served.
pub fn describe(config: &Config) -> Result<ModelSpec, ModelError> {
    let family = family_of(config)?;
    BlockScaled::of(config)?;
    let mut spec = (family.describe)(config)?;
    spec.compose = compose_rule(config)?.unwrap_or(spec.compose);
    if spec.ropes().next().is_some() {
        (spec.dynamic, spec.max_positions) = rope::reach(config, spec.max_positions)?;
    }
    Ok(spec)
}

/// Parts of tensors' names that checkpoints of this configuration may have, each with what a description has instead.
pub(crate) fn also_named(config: &Config) -> &'static [(&'static str, &'static str)] {
    family_of(config).map_or(&[], |family| family.also_named)
}

fn family_of(config: &Config) -> Result<&'static Family, ModelError> {
    let served = || FAMILIES.map(|f| f.architecture).join(", ");
    let names = config.opt_strings("architectures")?.unwrap_or_default();
    let of_name = |name: &String| {
        let alias = ALIASES.iter().find(|(alias, _)| alias == name);
        let name = alias.map_or(name.as_str(), |(_, name)| name);
        FAMILIES.iter().find(|f| f.architecture == name)
    };
    if let Some(family) = names.iter().find_map(of_name) {
        return Ok(family);
    }
    if let Some(name) = names.first() {
        return Err(ModelError::Unsupported(format!("architecture {name} (served are {})", served())));
    }
    let Some(model_type) = config.opt_str("model_type")? else {
        return Err(config.wrong("architectures", format!("is missing; one of {} is needed", served())));
    };
    let of_type: Vec<&Family> = FAMILIES.iter().filter(|f| f.model_type == model_type).collect();
    match of_type[..] {
        [] => Err(ModelError::Unsupported(format!("model type {model_type} (served are {})", served()))),
        [family] => Ok(family),
        _ => told_apart(config, &model_type, &of_type),
    }
}

/// Which of several families of one model type, by the keys that only one of them has.
fn told_apart(config: &Config, model_type: &str, families: &[&'static Family]) -> Result<&'static Family, ModelError> {
    let has_key = |family: &&&Family| family.told_by.iter().any(|key| config.get(key).is_some());
    match families.iter().filter(has_key).collect::<Vec<_>>()[..] {
        [family] => {
            let architecture = family.architecture;
            tracing::warn!(model_type, architecture, "no architectures in config.json: told by the keys that it has");
            Ok(family)
        }
        _ => {
            let names: Vec<&str> = families.iter().map(|f| f.architecture).collect();
            let problem = format!("is missing, and model type {model_type} may be {}", names.join(" or "));
            Err(config.wrong("architectures", problem))
        }
    }
}

/// The rule of composition that a configuration asks for: `"hypic": {"compose": "last"}`.
fn compose_rule(config: &Config) -> Result<Option<ComposeRule>, ModelError> {
    const KEY: &str = "compose";
    let Some(hypic) = config.object("hypic")? else { return Ok(None) };
    if let Some(unknown) = hypic.keys().find(|key| *key != KEY) {
        return Err(hypic.unsupported(unknown, format_args!("only {KEY} is read here")));
    }
    let rule = hypic.opt_str(KEY)?.map(|name| name.parse::<ComposeRule>());
    rule.transpose().map_err(|problem| hypic.wrong(KEY, problem))
}
