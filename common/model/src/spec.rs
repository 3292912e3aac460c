//! What a family file describes: the layers of a model, their dimensions and where their weights are.
//!
//! A description needs `config.json` alone, so that sizes can be told without weights.

mod tensors;

use std::sync::Arc;

use hypic_kernels::{Activation, Form, MlpForm, RopeSpec, RouteSpec, ScanShape};
use hypic_state::{ComposeRule, LayerKind};

/// A model, as its family describes it.
#[derive(Clone, Debug)]
pub struct ModelSpec {
    /// Name of the family.
    pub family: &'static str,
    /// Rows of the embedding.
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Positions that the model was made for.
    pub max_positions: usize,
    /// How its rotary embeddings change with the length of a prompt; `None`: they do not.
    pub dynamic: Option<DynamicNtk>,
    /// Tensor of the embedding `[vocab, hidden]`.
    pub embed: String,
    /// Factor on the embedding's rows.
    pub embed_scale: f32,
    /// Norm before the head.
    pub final_norm: NormSpec,
    /// Factor on the logits.
    pub logit_scale: f32,
    /// Tensor of the head `[vocab, hidden]`; `None`: the embedding's.
    pub head: Option<String>,
    /// A head tensor that may be there although the head is tied; it must then equal the embedding.
    pub tied_head: Option<String>,
    /// Layers, in order.
    pub layers: Vec<LayerSpec>,
    /// Prefixes of tensors that are known and not served; `*` in one stands for a number.
    pub ignored: Vec<String>,
    /// Rule of composition unless a request names one.
    pub compose: ComposeRule,
    /// End tokens that `config.json` names.
    pub eos: Vec<u32>,
}

impl ModelSpec {
    /// The kind of every layer, in order.
    pub fn layout(&self) -> Arc<[LayerKind]> {
        self.layers.iter().map(|l| l.mixer.body.kind()).collect()
    }

    /// Tokens of a prompt up to which entries and prefix states can be used; `None`: any number.
    pub fn reusable(&self) -> Option<usize> {
        self.dynamic.map(|dynamic| dynamic.reusable)
    }

    /// The rotary embeddings of a mixer of each layer that rotates.
    pub(crate) fn ropes(&self) -> impl Iterator<Item = &RopeSpec> {
        self.layers.iter().filter_map(|layer| match &layer.mixer.body {
            MixerSpec::Recurrent(m) => m.rope.as_ref(),
            MixerSpec::Attention(m) => m.rope.as_ref(),
            MixerSpec::Latent(m) => m.rope.as_ref(),
        })
    }
}

/// Dynamic NTK scaling (emozilla, 2023; as transformers computes it): up to `original` tokens embeddings are as they are,
/// for a longer sequence they are stretched by how much longer it is. Rows that were computed for one length are then no
/// use for another: neither entries nor prefix states can be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DynamicNtk {
    /// Tokens up to which nothing is stretched.
    pub original: usize,
    /// Tokens of a prompt up to which entries and prefix states are used; not above `original`.
    pub reusable: usize,
    /// How steeply, from there on.
    pub factor: f64,
}

impl DynamicNtk {
    /// The [`ntk_alpha`](hypic_kernels::Positions::ntk_alpha) of a sequence of `tokens` tokens:
    /// `factor * tokens / original - (factor - 1)`, and 1 up to `original`.
    pub fn alpha(&self, tokens: usize) -> f64 {
        if tokens <= self.original {
            return 1.0;
        }
        self.factor * tokens as f64 / self.original as f64 - (self.factor - 1.0)
    }
}

/// A root-mean-square norm.
#[derive(Clone, Debug)]
pub struct NormSpec {
    /// Tensor of the weight.
    pub name: String,
    /// Width.
    pub width: usize,
    /// Added to the mean square.
    pub eps: f32,
    /// The stored weight is the factor less one.
    pub zero_centred: bool,
}

/// One decoder layer.
#[derive(Clone, Debug)]
pub struct LayerSpec {
    /// The token mixer.
    pub mixer: Block<MixerSpec>,
    /// What works on rows alone; some layers of some stacks have none.
    pub feed: Option<Block<FeedSpec>>,
}

/// Half a decoder layer: a function of the residual stream, its norm, and how its result is joined.
#[derive(Clone, Debug)]
pub struct Block<F> {
    /// The block's norm.
    pub norm: NormSpec,
    /// Where the norm stands, and how the result is joined.
    pub residual: Residual,
    /// The function.
    pub body: F,
}

/// How the residual stream x, a norm n and a function f make the next residual stream.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Residual {
    /// `keep x + add f(n(x))`; almost everywhere both are 1.
    Pre {
        /// Factor on x.
        keep: f32,
        /// Factor on f.
        add: f32,
    },
    /// `x + n(f(x))` (OLMo).
    Post,
    /// `keep n(x) + add f(n(x))` (MiniMax).
    Normed {
        /// Factor on n(x).
        keep: f32,
        /// Factor on f.
        add: f32,
    },
}

impl Residual {
    /// `x + f(n(x))`.
    pub const PLAIN: Residual = Residual::Pre { keep: 1.0, add: 1.0 };
}

/// Token mixers.
#[derive(Clone, Debug)]
pub enum MixerSpec {
    /// A linear-attention layer.
    Recurrent(Box<RecurrentSpec>),
    /// Grouped-query softmax attention.
    Attention(Box<AttentionSpec>),
    /// Softmax attention over a compressed latent (MLA).
    Latent(Box<LatentSpec>),
}

impl MixerSpec {
    /// What the mixer keeps of a sequence.
    pub fn kind(&self) -> LayerKind {
        match self {
            MixerSpec::Recurrent(_) => LayerKind::Recurrent,
            MixerSpec::Attention(_) | MixerSpec::Latent(_) => LayerKind::Attention,
        }
    }
}

/// Rows of a weight matrix `[rows, columns]`, stacked from tensors or parts of them.
pub type RowsSpec = Vec<RowSource>;

/// Some rows of a tensor: `take` rows from `skip` on of each of `blocks` equal blocks.
#[derive(Clone, Debug)]
pub struct RowSource {
    /// Tensor `[blocks * block_rows, columns]`.
    pub name: String,
    /// Number of blocks (heads, usually).
    pub blocks: usize,
    /// Rows of a block.
    pub block_rows: usize,
    /// Rows of a block before those that are taken.
    pub skip: usize,
    /// Rows of a block that are taken.
    pub take: usize,
}

impl RowSource {
    /// All `rows` of a tensor.
    pub fn all(name: impl Into<String>, rows: usize) -> Self {
        RowSource { name: name.into(), blocks: 1, block_rows: rows, skip: 0, take: rows }
    }

    /// Number of rows taken.
    pub fn rows(&self) -> usize {
        self.blocks * self.take
    }
}

/// A projection of a block's input.
#[derive(Clone, Debug)]
pub enum ProjectionSpec {
    /// One matrix.
    Direct(RowsSpec),
    /// Through a narrow layer: `up(down(x))`.
    LowRank {
        /// `[rank, hidden]`.
        down: RowSource,
        /// `[rows, rank]`.
        up: RowSource,
    },
}

/// A linear-attention layer of any family: projections, a short convolution or none, a recurrence, a gated norm.
#[derive(Clone, Debug)]
pub struct RecurrentSpec {
    /// Heads and widths.
    pub shape: ScanShape,
    /// Rows of q, k and v, in the order of `order`.
    pub channels: RowsSpec,
    /// How they lie.
    pub order: ChannelOrder,
    /// The causal convolution over them (with its silu); `None`: there is none.
    pub conv: Option<ConvSpec>,
    /// Activation of q, k and v where there is no convolution.
    pub activation: Option<Activation>,
    /// Norm of each query head.
    pub q_norm: Option<NormSpec>,
    /// Norm of each key head.
    pub k_norm: Option<NormSpec>,
    /// Rotation of queries and keys, at their positions: the state then depends on them (see
    /// [`Turn`](hypic_kernels::Turn)).
    pub rope: Option<RopeSpec>,
    /// Whether q and k are l2-normalised.
    pub unit: bool,
    /// Factor on q.
    pub q_scale: f32,
    /// Decay of the state.
    pub decay: DecaySpec,
    /// What a token writes.
    pub write: WriteSpec,
    /// Tensor `[heads]` of the skip connection from v.
    pub skip: Option<String>,
    /// The output gate, `heads * d_v` rows.
    pub gate: ProjectionSpec,
    /// Norm of the output: its width is that of a group, or of all heads.
    pub norm: NormSpec,
    /// Columns that are normalised together.
    pub norm_group: usize,
    /// Activation of the gate.
    pub gate_activation: Activation,
    /// The gate is applied before the norm.
    pub gate_first: bool,
    /// Output projection `[hidden, heads * d_v]`.
    pub out: RowSource,
}

impl RecurrentSpec {
    /// Columns of q, k and v.
    pub fn channels(&self) -> usize {
        2 * self.shape.key_heads * self.shape.d_k + self.shape.heads * self.shape.d_v
    }

    /// The smallest form that the layer's operators have.
    pub fn form(&self) -> Form {
        match (&self.write, &self.decay) {
            (WriteSpec::Delta { .. }, _) => Form::Dense,
            (_, DecaySpec::Channel { .. }) => Form::Diagonal,
            _ => Form::Scalar,
        }
    }
}

/// How q, k and v lie beside each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChannelOrder {
    /// `[q | k | v]`.
    QueryKeyValue,
    /// `[v | k | q]` (Mamba2: `[x | B | C]`).
    ValueKeyQuery,
}

/// A causal depthwise convolution.
#[derive(Clone, Debug)]
pub struct ConvSpec {
    /// Taps.
    pub kernel: usize,
    /// Tensors `[channels_i, 1, kernel]`, stacked in the order of the channels.
    pub weight: RowsSpec,
    /// Tensor `[channels]`.
    pub bias: Option<String>,
}

/// Decay of a recurrent layer: see [`Decay`](hypic_kernels::Decay).
#[derive(Clone, Debug)]
pub enum DecaySpec {
    /// The same for every token.
    Fixed {
        /// The log decay of each head, below 0, as it follows from the configuration.
        log: Vec<f64>,
        /// Tensor with `heads` numbers, less the log decays, that a checkpoint may have: its numbers then count.
        stored: Option<String>,
    },
    /// Per token and head.
    Head {
        /// `heads` rows.
        x: RowsSpec,
        /// Tensor with `heads` numbers.
        a_log: String,
        /// Tensor `[heads]`.
        dt_bias: String,
        /// Least and largest step.
        limit: (f32, f32),
    },
    /// Per token, head and key channel.
    Channel {
        /// `heads * d_k` rows.
        x: ProjectionSpec,
        /// Tensor with `heads` numbers.
        a_log: String,
        /// Tensor `[heads * d_k]`.
        bias: String,
        /// The least log decay of a bounded gate; `None`: the unbounded, softplus gate.
        lower: Option<f32>,
    },
}

/// What a token of a recurrent layer writes: see [`Write`](hypic_kernels::Write).
#[derive(Clone, Debug)]
pub enum WriteSpec {
    /// `k v^T`.
    Plain,
    /// `k (dt v)^T`.
    Step,
    /// The delta rule.
    Delta {
        /// `heads` rows.
        b: RowsSpec,
        /// Largest beta.
        scale: f32,
    },
}

/// Grouped-query attention.
#[derive(Clone, Debug)]
pub struct AttentionSpec {
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Factor on `q . k`.
    pub scale: f32,
    /// Rotary embedding; `None`: none.
    pub rope: Option<RopeSpec>,
    /// Input projection, rows `[q | gate, if gated | k | v]`.
    pub project: RowsSpec,
    /// Whether the output is multiplied by the sigmoid of a gate.
    pub gated: bool,
    /// Norm of the queries: of each head, or of all of them together, as its width says.
    pub q_norm: Option<NormSpec>,
    /// Norm of the keys, likewise.
    pub k_norm: Option<NormSpec>,
    /// Output projection `[hidden, heads * head_dim]`.
    pub out: RowSource,
}

/// Attention over a compressed latent (DeepSeek-V2, 2024). Cached are the latent and one rotary key for all heads; the
/// up-projections of K and V are absorbed into queries and outputs.
#[derive(Clone, Debug)]
pub struct LatentSpec {
    /// Heads.
    pub heads: usize,
    /// Width of the latent.
    pub rank: usize,
    /// Width of a head's part that is made of the latent.
    pub nope: usize,
    /// Width of the part that the rotary key serves.
    pub rotary: usize,
    /// Width of a value head.
    pub d_v: usize,
    /// Factor on `q . k`.
    pub scale: f32,
    /// Rotary embedding of the rotary part (offset 0 there); `None`: it is not rotated.
    pub rope: Option<RopeSpec>,
    /// Queries `[heads * (nope + rotary)]`, per head `[nope | rotary]`.
    pub query: ProjectionSpec,
    /// Norm between the two steps of a low-rank query.
    pub query_norm: Option<NormSpec>,
    /// Rows `[latent | rotary key]`.
    pub latent: RowSource,
    /// Norm of the latent.
    pub latent_norm: NormSpec,
    /// `[heads * (nope + d_v), rank]`, per head `[nope | value]`.
    pub up: String,
    /// Output gate: one row per head, or `heads * d_v` rows; `None`: none.
    pub gate: Option<RowsSpec>,
    /// Output projection `[hidden, heads * d_v]`.
    pub out: RowSource,
}

impl LatentSpec {
    /// Of head `head`'s rows of [`up`](Self::up): `take` from the `skip`th on.
    pub fn up_rows(&self, head: usize, skip: usize, take: usize) -> RowSource {
        let of_head = self.nope + self.d_v;
        let (block_rows, skip) = (self.heads * of_head, head * of_head + skip);
        RowSource { name: self.up.clone(), blocks: 1, block_rows, skip, take }
    }
}

/// What works on rows alone.
#[derive(Clone, Debug)]
pub enum FeedSpec {
    /// One MLP for all rows.
    Dense(MlpSpec),
    /// Experts.
    Experts(Box<ExpertsSpec>),
}

/// Experts, a few of which serve a row.
#[derive(Clone, Debug)]
pub struct ExpertsSpec {
    /// How they are chosen.
    pub route: RouteSpec,
    /// `[experts, hidden]`; computed in f32 whatever the dtype.
    pub router: RowSource,
    /// Tensor `[experts]` that is added to the scores for the choice.
    pub bias: Option<String>,
    /// `[narrow, hidden]` and `[hidden, narrow]`: the experts work on a projection of the rows, and what they add is
    /// projected back; `None`: on the rows themselves.
    pub narrow: Option<[RowSource; 2]>,
    /// Their weights.
    pub experts: Vec<MlpSpec>,
    /// The same experts in the other layout, a tensor for all of them (`gate_up_proj [experts, 2 inner, hidden]`,
    /// `down_proj [experts, hidden, inner]`), read where the checkpoint has it; `None`: there is no other.
    pub fused: Option<Vec<MlpSpec>>,
    /// An expert that serves every row.
    pub shared: Option<MlpSpec>,
    /// `[1, hidden]`: the sigmoid of this gates the shared expert.
    pub shared_gate: Option<RowSource>,
}

impl ExpertsSpec {
    /// Experts that work on the rows themselves, without more.
    pub(crate) fn new(route: RouteSpec, router: RowSource, experts: Vec<MlpSpec>) -> Self {
        ExpertsSpec { route, router, bias: None, narrow: None, experts, fused: None, shared: None, shared_gate: None }
    }
}

/// An MLP: two projections, and what stands between them.
#[derive(Clone, Debug)]
pub struct MlpSpec {
    /// Width between the projections.
    pub inner: usize,
    /// What stands between.
    pub form: MlpForm,
    /// Rows `[gate | up]`, or `[up]` alone.
    pub gate_up: RowsSpec,
    /// `[hidden, inner]`.
    pub down: RowSource,
}
