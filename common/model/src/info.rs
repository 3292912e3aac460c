//! Sizes of a model, from its description alone: nothing here reads a weight. What can go wrong is a description that
//! asks for more than it can count; then sizes stop at the largest number instead of wrapping.

use hypic_kernels::{Form, KEY_BLOCK};
use hypic_state::DType;

use crate::spec::{FeedSpec, LatentSpec, MixerSpec, ModelSpec, RecurrentSpec};

/// Bytes of a number of a state or an operator.
const STATE: usize = size_of::<f32>();

/// What `hypic model info` tells.
#[derive(Clone, Debug, serde::Serialize)]
pub struct ModelInfo {
    /// Name of the family.
    pub family: String,
    /// Number of layers.
    pub layers: usize,
    /// Of those, with recurrent states.
    pub linear_layers: usize,
    /// Of those, with full attention.
    pub attention_layers: usize,
    /// Of the layers with full attention, those over a compressed latent (MLA).
    pub latent_layers: usize,
    /// Of all layers, those with experts.
    pub expert_layers: usize,
    /// Number of parameters, a tied head counted once.
    pub parameters: usize,
    /// Positions that the model was made for.
    pub max_positions: usize,
    /// Tokens of a prompt up to which entries and prefix states can be used (see [`ModelSpec::reusable`]); `None`: any
    /// number.
    pub reusable_positions: Option<usize>,
    /// Kind of the transition operator: `scalar`, `diagonal` or `dense`, the largest of its layers'; `none` without linear
    /// layers.
    pub transition: String,
    /// Bytes of one sequence's recurrent states and convolution windows, whatever its length.
    pub sequence_bytes: usize,
    /// Bytes of K and V, or of the latent and the rotary key, per token of a sequence or of a body.
    pub kv_bytes_per_token: usize,
    /// Of those, what attention reads as keys: all of a latent.
    pub key_bytes_per_token: usize,
    /// Bytes of an entry's recurrent part (T of every head, S, convolution tail), whatever its length: the
    /// most it can be, since dense operators that have decayed are omitted.
    pub entry_recurrent_bytes: usize,
    /// Of those, T.
    pub entry_operator_bytes: usize,
}

impl ModelInfo {
    /// Of a model computed in `dtype`.
    pub fn of(spec: &ModelSpec, dtype: DType) -> Self {
        let extents = |shape: &Vec<usize>| shape.iter().fold(1, |n: usize, extent| n.saturating_mul(*extent));
        let mut info = ModelInfo {
            family: spec.family.to_string(),
            layers: spec.layers.len(),
            linear_layers: 0,
            attention_layers: 0,
            latent_layers: 0,
            expert_layers: 0,
            parameters: spec.tensors(false).values().map(extents).fold(0, usize::saturating_add),
            max_positions: spec.max_positions,
            reusable_positions: spec.reusable(),
            transition: "none".to_string(),
            sequence_bytes: 0,
            kv_bytes_per_token: 0,
            key_bytes_per_token: 0,
            entry_recurrent_bytes: 0,
            entry_operator_bytes: 0,
        };
        let mut largest = None;
        for layer in &spec.layers {
            if matches!(&layer.feed, Some(feed) if matches!(feed.body, FeedSpec::Experts(_))) {
                info.expert_layers += 1;
            }
            match &layer.mixer.body {
                MixerSpec::Recurrent(m) => {
                    let (state, operator) = (state_bytes(m), operator_bytes(m));
                    info.linear_layers += 1;
                    info.sequence_bytes += state;
                    info.entry_operator_bytes += operator;
                    info.entry_recurrent_bytes += state + operator;
                    if largest.is_none_or(|known| rank(known) < rank(m.form())) {
                        largest = Some(m.form());
                    }
                }
                MixerSpec::Attention(m) => {
                    let key = m.kv_heads * m.head_dim * dtype.size();
                    info.attention_layers += 1;
                    info.key_bytes_per_token += key;
                    info.kv_bytes_per_token += 2 * key;
                }
                MixerSpec::Latent(m) => {
                    info.attention_layers += 1;
                    info.latent_layers += 1;
                    info.key_bytes_per_token += latent_width(m) * dtype.size();
                    info.kv_bytes_per_token += latent_width(m) * dtype.size();
                }
            }
        }
        if let Some(form) = largest {
            info.transition = name(form).to_string();
        }
        info
    }

    /// Bytes of the entry of a segment of `tokens` tokens with a seam of `seam`, its token ids included: exact as
    /// long as no operator has decayed, else the most it can be. 0 where the segment has no body.
    pub fn entry_bytes(&self, tokens: usize, seam: usize) -> usize {
        let body = tokens.saturating_sub(seam);
        if body == 0 {
            return 0;
        }
        let keys = body.next_multiple_of(KEY_BLOCK) * self.key_bytes_per_token;
        let values = body * (self.kv_bytes_per_token - self.key_bytes_per_token);
        self.entry_recurrent_bytes + keys + values + tokens * size_of::<u32>()
    }
}

/// S and the convolution's window.
fn state_bytes(m: &RecurrentSpec) -> usize {
    let shape = m.shape;
    let window = m.conv.as_ref().map_or(0, |conv| (conv.kernel - 1) * m.channels());
    (shape.heads * shape.d_k * shape.d_v + window) * STATE
}

/// T of every head.
fn operator_bytes(m: &RecurrentSpec) -> usize {
    let per_head = match m.form() {
        Form::Scalar => 1,
        Form::Diagonal => m.shape.d_k,
        Form::Dense => m.shape.d_k * m.shape.d_k,
    };
    m.shape.heads * per_head * STATE
}

/// Numbers that latent attention keeps of a token.
fn latent_width(m: &LatentSpec) -> usize {
    m.rank + m.rotary
}

fn rank(form: Form) -> usize {
    match form {
        Form::Scalar => 0,
        Form::Diagonal => 1,
        Form::Dense => 2,
    }
}

fn name(form: Form) -> &'static str {
    match form {
        Form::Scalar => "scalar",
        Form::Diagonal => "diagonal",
        Form::Dense => "dense",
    }
}
