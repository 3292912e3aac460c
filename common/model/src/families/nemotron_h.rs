//! Nemotron-H: blocks of one function each, Mamba2, grouped-query attention without rotation, an MLP with a squared relu,
//! or experts that are such MLPs. A block without a mixer is taken as the second half of the layer whose mixer stands
//! before it.

use hypic_state::ComposeRule;

use super::parts::layout::{ATTENTION, MAMBA};
use super::parts::mamba2::{Keys, mamba2};
use super::parts::moe::{FUSED_UNGATED, SQUARED_RELU, SigmoidExperts, fused, mlp, sigmoid_experts};
use super::parts::read::{only, spelling};
use super::parts::{Defaults, Heads, Module, Trunk, attention};
use crate::spec::{Block, ExpertsSpec, FeedSpec, LayerSpec};
use crate::{Config, ModelError, ModelSpec};

const KEYS: Keys = Keys {
    heads: "mamba_num_heads",
    width: "mamba_head_dim",
    expand: None,
    groups: &["n_groups", "mamba_n_groups"],
    default_groups: 8,
    state: "ssm_state_size",
    kernel: &["conv_kernel", "mamba_d_conv"],
    conv_bias: &["use_conv_bias", "mamba_conv_bias"],
    // Not `time_step_min`, which initial weights are drawn by.
    limit: &["time_step_limit", "mamba_dt_limit"],
};

/// What a block does.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Mamba,
    Attention,
    Mlp,
    Experts,
}

pub(super) fn describe(config: &Config) -> Result<ModelSpec, ModelError> {
    let blocks = blocks(&config.text()?)?;
    let defaults = Defaults { eps: 1e-5, positions: 4096 };
    let trunk = Trunk::read_layers(config, "backbone.", &defaults, Some(blocks.len()))?;
    let c = &trunk.c;
    only(c, &["mlp_hidden_act"], "relu2")?;
    only(c, &["mamba_hidden_act"], "silu")?;
    let heads = Heads::read(c, trunk.hidden)?;
    let modules = trunk.root.sub("layers");
    let mut layers: Vec<LayerSpec> = Vec::new();
    for (block, (name, kind)) in blocks.into_iter().enumerate() {
        let at = modules.sub(block);
        let mixer_at = at.sub("mixer");
        let mixer = match kind {
            Kind::Mamba => mamba2(&trunk, &mixer_at, &KEYS)?.into(),
            Kind::Attention => attention(&trunk, &mixer_at, heads, None).into(),
            Kind::Mlp => {
                let feed = mlp(&mixer_at, SQUARED_RELU, trunk.hidden, c.size("intermediate_size")?);
                behind_mixer(&mut layers, &name, trunk.block(&at, "norm", FeedSpec::Dense(feed)))?;
                continue;
            }
            Kind::Experts => {
                behind_mixer(&mut layers, &name, trunk.block(&at, "norm", experts(&trunk, &mixer_at)?))?;
                continue;
            }
        };
        layers.push(LayerSpec { mixer: trunk.block(&at, "norm", mixer), feed: None });
    }
    let model = trunk.around("nemotron_h", layers)?;
    Ok(ModelSpec {
        embed: trunk.root.tensor("embeddings.weight"),
        final_norm: trunk.norm(&trunk.root, "norm_f"),
        ignored: vec!["mtp.".to_string()],
        compose: ComposeRule::Last,
        ..model
    })
}

/// Make the block `name`, `feed`, the second half of the last layer.
fn behind_mixer(layers: &mut [LayerSpec], name: &str, feed: Block<FeedSpec>) -> Result<(), ModelError> {
    match layers.last_mut() {
        Some(layer) if layer.feed.is_none() => layer.feed = Some(feed),
        _ => {
            let problem = format!("{name} stands behind no mixer (MLPs and experts behind one are served)");
            return Err(ModelError::Unsupported(problem));
        }
    }
    Ok(())
}

/// Experts, in the larger models on a projection of the rows; the router and the shared experts see the rows themselves.
fn experts(trunk: &Trunk<'_>, at: &Module) -> Result<FeedSpec, ModelError> {
    const EXPERTS: SigmoidExperts = SigmoidExperts {
        module: "mixer",
        experts: SQUARED_RELU,
        shared: SQUARED_RELU,
        bias: Some("gate.e_score_correction_bias"),
        default_shared: 1,
    };
    let narrow = trunk.c.opt_size("moe_latent_size")?;
    let width = narrow.unwrap_or(trunk.hidden);
    let described = sigmoid_experts(trunk, at, &EXPERTS, width)?;
    let (count, inner) = (described.route.experts, described.experts[0].inner);
    let spec = ExpertsSpec {
        narrow: narrow.map(|width| [at.rows("fc1_latent_proj", width), at.rows("fc2_latent_proj", trunk.hidden)]),
        fused: Some(fused(at, FUSED_UNGATED, SQUARED_RELU.form, width, inner, count)),
        ..described
    };
    Ok(spec.into())
}

/// What each block does, with the name of its entry: a letter of `hybrid_override_pattern`, or a word of
/// `layers_block_type`.
fn blocks(c: &Config) -> Result<Vec<(String, Kind)>, ModelError> {
    const PATTERN: &str = "hybrid_override_pattern";
    let types_key = spelling(c, &["layers_block_type", "layer_types"])?;
    let letters = c.opt_str(PATTERN)?.map(|pattern| pattern.chars().map(String::from).collect::<Vec<_>>());
    let letters = letters.map(|letters| kinds(c, PATTERN, letters)).transpose()?;
    let words = c.opt_strings(types_key)?.map(|words| kinds(c, types_key, words)).transpose()?;
    match (letters, words) {
        (Some(letters), Some(words))
            if !letters.iter().map(|(_, kind)| kind).eq(words.iter().map(|(_, kind)| kind)) =>
        {
            Err(c.wrong(PATTERN, format!("differs from {types_key}")))
        }
        (Some(blocks), _) | (None, Some(blocks)) => Ok(blocks),
        (None, None) => Err(c.wrong(PATTERN, format!("is missing, and so is {types_key}"))),
    }
}

/// What the entries of `key` say.
fn kinds(c: &Config, key: &str, words: Vec<String>) -> Result<Vec<(String, Kind)>, ModelError> {
    if words.is_empty() {
        return Err(c.wrong(key, "is empty"));
    }
    if c.opt_usize("num_hidden_layers")?.is_some_and(|layers| layers != words.len()) {
        return Err(c.wrong(key, format!("has {} entries, which num_hidden_layers is not", words.len())));
    }
    let kind = |(block, word): (usize, String)| {
        let name = format!("{}[{block}] = {word:?} in config.json", c.name(key));
        match word.as_str() {
            word if word == "M" || MAMBA.contains(&word) => Ok((name, Kind::Mamba)),
            word if word == "*" || ATTENTION.contains(&word) => Ok((name, Kind::Attention)),
            "-" | "mlp" => Ok((name, Kind::Mlp)),
            "E" | "moe" => Ok((name, Kind::Experts)),
            _ => Err(ModelError::Unsupported(format!("{name} (Mamba2, attention, MLPs and experts are served)"))),
        }
    };
    words.into_iter().enumerate().map(kind).collect()
}
