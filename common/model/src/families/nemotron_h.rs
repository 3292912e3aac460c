//! Nemotron-H: blocks of one function each, Mamba2, grouped-query attention without rotation, or an MLP with a squared
//! relu. An MLP is taken as the second half of the layer whose mixer stands before it.

use hypic_kernels::Activation;
use hypic_state::ComposeRule;

use super::parts::layout::{ATTENTION, MAMBA};
use super::parts::mamba2::{Keys, mamba2};
use super::parts::read::{only, spelling};
use super::parts::{Defaults, Heads, Module, Trunk, attention};
use crate::spec::{FeedSpec, LayerSpec, MlpSpec};
use crate::{Config, ModelError, ModelSpec};

const KEYS: Keys = Keys {
    heads: "mamba_num_heads",
    width: "mamba_head_dim",
    expand: None,
    groups: &["n_groups", "mamba_n_groups"],
    state: "ssm_state_size",
    kernel: &["conv_kernel", "mamba_d_conv"],
    conv_bias: &["use_conv_bias", "mamba_conv_bias"],
    limit: &["time_step_limit", "mamba_dt_limit"],
    least: Some(&["time_step_min", "mamba_dt_min"]),
};

/// What a block does.
#[derive(Clone, Copy)]
enum Kind {
    Mamba,
    Attention,
    Mlp,
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
                let feed = trunk.block(&at, "norm", squared_relu(&trunk, &mixer_at)?);
                match layers.last_mut() {
                    Some(layer) if layer.feed.is_none() => layer.feed = Some(feed),
                    _ => {
                        let problem = format!("{name} is an MLP behind no mixer (served are those behind one)");
                        return Err(ModelError::Unsupported(problem));
                    }
                }
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

fn squared_relu(trunk: &Trunk<'_>, at: &Module) -> Result<FeedSpec, ModelError> {
    let inner = trunk.c.size("intermediate_size")?;
    Ok(FeedSpec::Dense(MlpSpec {
        inner,
        gate_up: vec![at.rows("up_proj", inner)],
        ungated: Some(Activation::SquaredRelu),
        down: at.rows("down_proj", trunk.hidden),
    }))
}

/// What each block does, with the name of its entry: a letter of `hybrid_override_pattern`, or a word of
/// `layers_block_type`.
fn blocks(c: &Config) -> Result<Vec<(String, Kind)>, ModelError> {
    const PATTERN: &str = "hybrid_override_pattern";
    let types_key = spelling(c, &["layers_block_type", "layer_types"])?;
    let letters = c.opt_str(PATTERN)?.map(|pattern| pattern.chars().map(String::from).collect::<Vec<_>>());
    let (key, words) = match (letters, c.opt_strings(types_key)?) {
        (Some(_), Some(_)) => return Err(c.wrong(PATTERN, format!("is there, and so is {types_key}"))),
        (Some(letters), None) => (PATTERN, letters),
        (None, Some(words)) => (types_key, words),
        (None, None) => return Err(c.wrong(PATTERN, format!("is missing, and so is {types_key}"))),
    };
    if c.opt_usize("num_hidden_layers")?.is_some_and(|layers| layers != words.len()) {
        return Err(c.wrong(key, format!("has {} entries, which num_hidden_layers is not", words.len())));
    }
    let kind = |(block, word): (usize, String)| {
        let name = format!("{}[{block}] = {word:?} in config.json", c.name(key));
        match word.as_str() {
            word if word == "M" || MAMBA.contains(&word) => Ok((name, Kind::Mamba)),
            word if word == "*" || ATTENTION.contains(&word) => Ok((name, Kind::Attention)),
            "-" | "mlp" => Ok((name, Kind::Mlp)),
            _ => Err(ModelError::Unsupported(format!("{name} (Mamba2, attention and MLPs are served)"))),
        }
    };
    words.into_iter().enumerate().map(kind).collect()
}
