//! What a family file describes: the layers of a model, their dimensions and where their weights are.
//!
//! A description needs `config.json` alone, so that sizes can be told without weights.

use std::sync::Arc;

use hypic_kernels::{DeltaShape, RopeSpec};
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
    /// Tensor of the embedding `[vocab, hidden]`.
    pub embed: String,
    /// Norm before the head.
    pub final_norm: NormSpec,
    /// Tensor of the head `[vocab, hidden]`; `None`: the embedding's.
    pub head: Option<String>,
    /// A head tensor that may be there although the head is tied; it must then equal the embedding.
    pub tied_head: Option<String>,
    /// Layers, in order.
    pub layers: Vec<LayerSpec>,
    /// Prefixes of tensors that are known and not served.
    pub ignored: Vec<String>,
    /// Rule of composition unless a request names one.
    pub compose: ComposeRule,
    /// End tokens that `config.json` names.
    pub eos: Vec<u32>,
}

impl ModelSpec {
    /// The kind of every layer, in order.
    pub fn layout(&self) -> Arc<[LayerKind]> {
        self.layers.iter().map(|l| l.mixer.kind()).collect()
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

/// One decoder layer: `x += mixer(norm(x)); x += mlp(norm(x))`.
#[derive(Clone, Debug)]
pub struct LayerSpec {
    /// Norm before the mixer.
    pub mixer_norm: NormSpec,
    /// Token mixer.
    pub mixer: MixerSpec,
    /// Norm before the MLP.
    pub mlp_norm: NormSpec,
    /// Rows only: the gated MLP.
    pub mlp: MlpSpec,
}

/// Token mixers.
#[derive(Clone, Debug)]
pub enum MixerSpec {
    /// Gated delta net.
    GatedDelta(GatedDeltaSpec),
    /// Grouped-query softmax attention.
    Attention(AttentionSpec),
}

impl MixerSpec {
    /// What the mixer keeps of a sequence.
    pub fn kind(&self) -> LayerKind {
        match self {
            MixerSpec::GatedDelta(_) => LayerKind::Recurrent,
            MixerSpec::Attention(_) => LayerKind::Attention,
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

/// A gated delta net (Qwen3-Next, Qwen3.5, OLMo hybrid).
#[derive(Clone, Debug)]
pub struct GatedDeltaSpec {
    /// Heads and widths.
    pub shape: DeltaShape,
    /// Taps of the causal convolution over `[q | k | v]`.
    pub kernel: usize,
    /// Input projection, rows `[q | k | v | z | b | a]`.
    pub project: RowsSpec,
    /// Tensor `[channels, 1, kernel]`.
    pub conv: String,
    /// Tensor `[heads]`.
    pub a_log: String,
    /// Tensor `[heads]`.
    pub dt_bias: String,
    /// Norm of a head's output, before the gate.
    pub norm: NormSpec,
    /// Output projection `[hidden, heads * d_v]`.
    pub out: RowSource,
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
    /// Norm of each query head.
    pub q_norm: Option<NormSpec>,
    /// Norm of each key head.
    pub k_norm: Option<NormSpec>,
    /// Output projection `[hidden, heads * head_dim]`.
    pub out: RowSource,
}

/// A gated MLP: `down(silu(gate(x)) * up(x))`.
#[derive(Clone, Debug)]
pub struct MlpSpec {
    /// Width between the projections.
    pub inner: usize,
    /// Rows `[gate | up]`.
    pub gate_up: RowsSpec,
    /// `[hidden, inner]`.
    pub down: RowSource,
}
