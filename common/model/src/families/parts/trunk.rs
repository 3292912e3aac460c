//! What is around a family's layers: embedding, norms, head; and the names of tensors.

use hypic_kernels::MlpForm;
use hypic_state::ComposeRule;

use super::moe::{LIMITS, limits};
use super::read::{factor, only, spelling};
use crate::spec::{
    AttentionSpec, Block, ExpertsSpec, FeedSpec, LatentSpec, LayerSpec, MixerSpec, NormSpec, RecurrentSpec, Residual,
    RowSource,
};
use crate::{Config, ModelError, ModelSpec};

/// Most layers that a model may have: far above any.
const MAX_LAYERS: usize = 1 << 12;

/// Names of the tensors of a module.
#[derive(Clone, Debug)]
pub struct Module(String);

impl Module {
    /// The module whose tensors begin with `prefix`.
    pub fn new(prefix: impl Into<String>) -> Self {
        Module(prefix.into())
    }

    /// The module `name` in this one.
    pub fn sub(&self, name: impl std::fmt::Display) -> Self {
        Module(format!("{}{name}.", self.0))
    }

    /// The tensor `name`.
    pub fn tensor(&self, name: &str) -> String {
        format!("{}{name}", self.0)
    }

    /// All `rows` of the weight of `layer`.
    pub fn rows(&self, layer: &str, rows: usize) -> RowSource {
        RowSource::all(self.tensor(&format!("{layer}.weight")), rows)
    }

    /// The weight of `layer`, `blocks` equal blocks, cut into the parts that lie one after the other in every block.
    pub fn split<const N: usize>(&self, layer: &str, blocks: usize, parts: [usize; N]) -> [RowSource; N] {
        let block_rows = parts.iter().sum();
        let mut skip = 0;
        parts.map(|take| {
            let source = RowSource { name: self.tensor(&format!("{layer}.weight")), blocks, block_rows, skip, take };
            skip += take;
            source
        })
    }

    /// The norm `name`.
    pub fn norm(&self, name: &str, width: usize, eps: f32) -> NormSpec {
        NormSpec { name: self.tensor(&format!("{name}.weight")), width, eps, zero_centred: false }
    }
}

/// What a family takes for what the configuration does not name.
pub struct Defaults {
    /// Added to the mean square in norms.
    pub eps: f64,
    /// Positions that the model was made for.
    pub positions: usize,
}

/// A model without its layers.
pub struct Trunk<'a> {
    /// The whole configuration.
    pub config: &'a Config,
    /// The text model's configuration.
    pub c: Config,
    /// The model's module.
    pub root: Module,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Number of layers.
    pub layers: usize,
    /// Added to the mean square in norms.
    pub eps: f32,
    /// Weights of norms over the residual stream are stored less one.
    pub zero_centred: bool,
    /// Positions that the model was made for.
    pub max_positions: usize,
}

impl<'a> Trunk<'a> {
    /// Read what all layers share, and refuse what no family here serves.
    ///
    /// # Errors
    /// If a key is missing, wrong or asks for something that is not served.
    pub fn read(config: &'a Config, root: &str, defaults: &Defaults) -> Result<Self, ModelError> {
        Self::read_layers(config, root, defaults, None)
    }

    /// The same for a family that counts its layers, or what it has instead, in another way.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn read_layers(
        config: &'a Config,
        root: &str,
        defaults: &Defaults,
        counted: Option<usize>,
    ) -> Result<Self, ModelError> {
        let c = config.text()?;
        only(&c, &["hidden_act"], "silu")?;
        only(&c, &["attention_bias", "use_bias", "use_qkv_bias", "mlp_bias", "use_sliding_window"], false)?;
        if c.get("sliding_window").is_some() && c.opt_bool("use_sliding_window")? != Some(false) {
            return Err(c.unsupported("sliding_window", "attention without a window is served"));
        }
        if c.get("swiglu_limit").is_some() {
            return Err(c.unsupported("swiglu_limit", "limits are served per layer, of Ling's experts"));
        }
        Ok(Trunk {
            config,
            root: Module::new(root),
            hidden: c.size("hidden_size")?,
            layers: layers(&c, counted)?,
            eps: norm_eps(&c, defaults.eps)?,
            zero_centred: false,
            max_positions: max_positions(&c, defaults.positions)?,
            c,
        })
    }

    /// A norm over the residual stream.
    pub fn norm(&self, at: &Module, name: &str) -> NormSpec {
        NormSpec { zero_centred: self.zero_centred, ..at.norm(name, self.hidden, self.eps) }
    }

    /// `x + f(n(x))`, with the norm `name`.
    pub fn block<F>(&self, at: &Module, name: &str, body: F) -> Block<F> {
        Block { norm: self.norm(at, name), residual: Residual::PLAIN, body }
    }

    /// A layer with the names and the place of norms that most families have.
    pub fn layer(&self, at: &Module, mixer: impl Into<MixerSpec>, feed: FeedSpec) -> LayerSpec {
        LayerSpec {
            mixer: self.block(at, "input_layernorm", mixer.into()),
            feed: Some(self.block(at, "post_attention_layernorm", feed)),
        }
    }

    /// The model with a layer of each module, and everything else as most families have it; families replace what
    /// differs.
    ///
    /// # Errors
    /// Those of `layer`; or if a key is missing or wrong.
    pub fn model(
        &self,
        family: &'static str,
        layer: impl Fn(usize, &Module) -> Result<LayerSpec, ModelError>,
    ) -> Result<ModelSpec, ModelError> {
        let modules = self.root.sub("layers");
        let layers = (0..self.layers).map(|l| layer(l, &modules.sub(l))).collect::<Result<_, _>>()?;
        self.around(family, layers)
    }

    /// The model with these layers.
    ///
    /// # Errors
    /// If a key is missing or wrong.
    pub fn around(&self, family: &'static str, layers: Vec<LayerSpec>) -> Result<ModelSpec, ModelError> {
        self.check_limits(&layers)?;
        let tied = tied(self.config)?;
        let head = "lm_head.weight".to_string();
        Ok(ModelSpec {
            family,
            vocab: self.c.size("vocab_size")?,
            hidden: self.hidden,
            max_positions: self.max_positions,
            dynamic: None,
            embed: self.root.tensor("embed_tokens.weight"),
            embed_scale: 1.0,
            final_norm: self.norm(&self.root, "norm"),
            logit_scale: 1.0,
            head: (!tied).then(|| head.clone()),
            tied_head: tied.then_some(head),
            layers,
            ignored: self.predictors()?,
            compose: ComposeRule::Transition,
            eos: self.c.token_ids("eos_token_id")?,
        })
    }

    /// Limits that the configuration names must have been read: only some families have them.
    fn check_limits(&self, layers: &[LayerSpec]) -> Result<(), ModelError> {
        for key in LIMITS {
            for (l, limit) in limits(&self.c, key, self.layers)?.into_iter().enumerate() {
                let Some(limit) = limit else { continue };
                let experts = layers.get(l).and_then(|layer| match layer.feed.as_ref().map(|feed| &feed.body) {
                    Some(FeedSpec::Experts(experts)) => Some(experts),
                    _ => None,
                });
                let mlp = experts.and_then(|e| if key == LIMITS[0] { e.experts.first() } else { e.shared.as_ref() });
                if mlp.is_none_or(|mlp| mlp.form != MlpForm::BoundedSwiGlu { limit }) {
                    let served =
                        format_args!("layer {l} is served without a limit; those of Ling experts may have one");
                    return Err(self.c.unsupported(key, served));
                }
            }
        }
        Ok(())
    }

    /// Modules of layers that predict several tokens ahead: they are stored behind the last layer.
    fn predictors(&self) -> Result<Vec<String>, ModelError> {
        let key = spelling(&self.c, &["num_nextn_predict_layers", "num_mtp_layers"])?;
        let count = self.c.opt_usize(key)?.unwrap_or(0);
        if count > MAX_LAYERS {
            return Err(self.c.wrong(key, format!("must be at most {MAX_LAYERS}, is {count}")));
        }
        let modules = self.root.sub("layers");
        Ok((self.layers..self.layers + count).map(|l| modules.sub(l).0).collect())
    }
}

impl From<RecurrentSpec> for MixerSpec {
    fn from(spec: RecurrentSpec) -> Self {
        MixerSpec::Recurrent(Box::new(spec))
    }
}

impl From<AttentionSpec> for MixerSpec {
    fn from(spec: AttentionSpec) -> Self {
        MixerSpec::Attention(Box::new(spec))
    }
}

impl From<LatentSpec> for MixerSpec {
    fn from(spec: LatentSpec) -> Self {
        MixerSpec::Latent(Box::new(spec))
    }
}

impl From<ExpertsSpec> for FeedSpec {
    fn from(spec: ExpertsSpec) -> Self {
        FeedSpec::Experts(Box::new(spec))
    }
}

fn layers(c: &Config, counted: Option<usize>) -> Result<usize, ModelError> {
    const KEY: &str = "num_hidden_layers";
    let named = c.opt_size_within(KEY, MAX_LAYERS)?;
    match counted {
        Some(layers) if (1..=MAX_LAYERS).contains(&layers) => Ok(layers),
        Some(layers) => {
            Err(ModelError::Unsupported(format!("a model of {layers} layers (1 to {MAX_LAYERS} are served)")))
        }
        None => named.ok_or_else(|| c.wrong(KEY, "is missing")),
    }
}

/// Whether the head is the embedding. Either level of a nested config may say so; where both do and disagree, the
/// text model's word counts.
fn tied(config: &Config) -> Result<bool, ModelError> {
    const KEY: &str = "tie_word_embeddings";
    Ok(config.text()?.opt_bool(KEY)?.or(config.opt_bool(KEY)?).unwrap_or(false))
}

fn max_positions(c: &Config, default: usize) -> Result<usize, ModelError> {
    for key in ["max_position_embeddings", "model_max_length"] {
        if let Some(positions) = c.opt_size_within(key, u32::MAX as usize)? {
            return Ok(positions);
        }
    }
    Ok(default)
}

fn norm_eps(c: &Config, default: f64) -> Result<f32, ModelError> {
    let key = spelling(c, &["rms_norm_eps", "layer_norm_epsilon", "norm_eps"])?;
    let eps = factor(c, key, Some(default))?;
    // Not above 0 as f32: rows of zeros would become NaN.
    if eps <= 0.0 || eps >= 1.0 {
        return Err(c.wrong(key, format!("must be above 0 and below 1, is {eps}")));
    }
    Ok(eps)
}
