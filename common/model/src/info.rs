//! Sizes of a model, from its description alone.

use hypic_kernels::KEY_BLOCK;
use hypic_state::DType;

use crate::spec::{MixerSpec, ModelSpec, RowSource};

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
    /// Number of parameters, a tied head counted once.
    pub parameters: usize,
    /// Positions that the model was made for.
    pub max_positions: usize,
    /// Kind of the transition operator.
    pub transition: String,
    /// Bytes of one sequence's recurrent states and convolution windows, whatever its length.
    pub sequence_bytes: usize,
    /// Bytes of K and V per token of a sequence or of a body.
    pub kv_bytes_per_token: usize,
    /// Of those, K.
    pub key_bytes_per_token: usize,
    /// Bytes of an entry's recurrent part (T of every head, S, convolution tail), whatever its length: the
    /// most it can be, since operators that have decayed are omitted.
    pub entry_recurrent_bytes: usize,
    /// Of those, T.
    pub entry_operator_bytes: usize,
}

impl ModelInfo {
    /// Of a model computed in `dtype`.
    pub fn of(spec: &ModelSpec, dtype: DType) -> Self {
        const STATE: usize = size_of::<f32>();
        let mut info = ModelInfo {
            family: spec.family.to_string(),
            layers: spec.layers.len(),
            linear_layers: 0,
            attention_layers: 0,
            parameters: spec.vocab * spec.hidden * (1 + usize::from(spec.head.is_some())) + spec.final_norm.width,
            max_positions: spec.max_positions,
            transition: "none".to_string(),
            sequence_bytes: 0,
            kv_bytes_per_token: 0,
            key_bytes_per_token: 0,
            entry_recurrent_bytes: 0,
            entry_operator_bytes: 0,
        };
        let rows = |sources: &[RowSource]| sources.iter().map(RowSource::rows).sum::<usize>();
        for layer in &spec.layers {
            info.parameters += layer.mixer_norm.width + layer.mlp_norm.width;
            info.parameters += rows(&layer.mlp.gate_up) * spec.hidden + layer.mlp.down.rows() * layer.mlp.inner;
            match &layer.mixer {
                MixerSpec::GatedDelta(m) => {
                    let s = m.shape;
                    info.linear_layers += 1;
                    info.transition = "dense".to_string();
                    info.parameters += rows(&m.project) * spec.hidden + s.channels() * m.kernel + 2 * s.heads;
                    info.parameters += m.norm.width + m.out.rows() * s.heads * s.d_v;
                    let state = (s.heads * s.d_k * s.d_v + (m.kernel - 1) * s.channels()) * STATE;
                    info.sequence_bytes += state;
                    info.entry_operator_bytes += s.heads * s.d_k * s.d_k * STATE;
                    info.entry_recurrent_bytes += state + s.heads * s.d_k * s.d_k * STATE;
                }
                MixerSpec::Attention(m) => {
                    info.attention_layers += 1;
                    info.parameters += rows(&m.project) * spec.hidden + m.out.rows() * m.heads * m.head_dim;
                    info.parameters += [&m.q_norm, &m.k_norm].into_iter().flatten().map(|n| n.width).sum::<usize>();
                    let key = m.kv_heads * m.head_dim * dtype.size();
                    info.key_bytes_per_token += key;
                    info.kv_bytes_per_token += 2 * key;
                }
            }
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
