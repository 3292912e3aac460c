//! Checkpoints of random weights, in memory: costs at any size without a download. What they say is noise.

use std::collections::BTreeMap;

use anyhow::Result;
use bytes::Bytes;
use half::bf16;
use hypic_model::Checkpoint;
use safetensors::tensor::{Dtype, TensorView, serialize};
use serde_json::json;

/// Every so many layers one has full attention.
const ATTENTION_INTERVAL: usize = 4;
/// Largest decay rate of a head, and range of its step: as the published initialisation of gated delta nets draws them.
const RATES: (f64, f64) = (1.0, 16.0);
const STEPS: (f64, f64) = (1e-3, 1e-1);

/// Dimensions of a dense Qwen3.5.
#[derive(Clone, Debug)]
pub struct Size {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Layers, three in four linear.
    pub layers: usize,
    /// Width of the MLP.
    pub inner: usize,
    /// Key heads of a linear layer.
    pub key_heads: usize,
    /// Value heads of a linear layer.
    pub value_heads: usize,
    /// Width of both.
    pub linear_dim: usize,
    /// Query heads of an attention layer.
    pub heads: usize,
    /// Its key/value heads.
    pub kv_heads: usize,
    /// Width of both.
    pub head_dim: usize,
    /// Rows of the (tied) embedding.
    pub vocab: usize,
    /// Factor on every head's decay rate: below 1, states forget more slowly and fewer operators vanish.
    pub decay: f64,
}

impl Size {
    /// So many layers of the size of Qwen3.5-0.8B's (which has 24), and a small vocabulary: 22 million parameters each.
    pub fn of_0_8b(layers: usize) -> Self {
        Size {
            hidden: 1024,
            layers,
            inner: 3584,
            key_heads: 16,
            value_heads: 16,
            linear_dim: 128,
            heads: 8,
            kv_heads: 2,
            head_dim: 256,
            vocab: 4096,
            decay: 1.0,
        }
    }

    /// A checkpoint of this size, bf16, the same every time.
    ///
    /// # Errors
    /// If the dimensions do not make a model.
    pub fn checkpoint(&self) -> Result<Checkpoint> {
        let tensors = self.tensors();
        let views = tensors
            .iter()
            .map(|(name, (shape, data))| Ok((name.as_str(), TensorView::new(Dtype::BF16, shape.clone(), data)?)))
            .collect::<Result<Vec<_>>>()?;
        let weights = serialize(views, None)?;
        Ok(Checkpoint::from_memory(&self.config(), None, Bytes::from(weights))?)
    }

    fn config(&self) -> Vec<u8> {
        let config = json!({
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "full_attention_interval": ATTENTION_INTERVAL,
            "intermediate_size": self.inner,
            "linear_num_key_heads": self.key_heads,
            "linear_num_value_heads": self.value_heads,
            "linear_key_head_dim": self.linear_dim,
            "linear_value_head_dim": self.linear_dim,
            "linear_conv_kernel_dim": 4,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": 1 << 18,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 1e7, "rope_type": "default"},
            "tie_word_embeddings": true,
            "vocab_size": self.vocab,
        });
        config.to_string().into_bytes()
    }

    fn tensors(&self) -> BTreeMap<String, (Vec<usize>, Vec<u8>)> {
        let mut draw = Draw { bits: 1, tensors: BTreeMap::new() };
        let hidden = self.hidden;
        let branch = (2.0 * self.layers as f64).powf(-0.5);
        draw.matrix("model.embed_tokens.weight", self.vocab, hidden, 1.0);
        draw.each("model.norm.weight", &[hidden], |_| 0.0);
        for layer in 0..self.layers {
            let at = format!("model.layers.{layer}.");
            draw.each(&format!("{at}input_layernorm.weight"), &[hidden], |_| 0.0);
            draw.each(&format!("{at}post_attention_layernorm.weight"), &[hidden], |_| 0.0);
            draw.matrix(&format!("{at}mlp.gate_proj.weight"), self.inner, hidden, 1.0);
            draw.matrix(&format!("{at}mlp.up_proj.weight"), self.inner, hidden, 1.0);
            draw.matrix(&format!("{at}mlp.down_proj.weight"), hidden, self.inner, branch);
            if (layer + 1) % ATTENTION_INTERVAL == 0 {
                let at = format!("{at}self_attn.");
                let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
                draw.matrix(&format!("{at}q_proj.weight"), 2 * q, hidden, 1.0);
                draw.matrix(&format!("{at}k_proj.weight"), kv, hidden, 1.0);
                draw.matrix(&format!("{at}v_proj.weight"), kv, hidden, 1.0);
                draw.matrix(&format!("{at}o_proj.weight"), hidden, q, branch);
                draw.each(&format!("{at}q_norm.weight"), &[self.head_dim], |_| 0.0);
                draw.each(&format!("{at}k_norm.weight"), &[self.head_dim], |_| 0.0);
                continue;
            }
            let at = format!("{at}linear_attn.");
            let values = self.value_heads * self.linear_dim;
            let channels = 2 * self.key_heads * self.linear_dim + values;
            draw.matrix(&format!("{at}in_proj_qkv.weight"), channels, hidden, 1.0);
            draw.matrix(&format!("{at}in_proj_z.weight"), values, hidden, 1.0);
            draw.matrix(&format!("{at}in_proj_b.weight"), self.value_heads, hidden, 1.0);
            draw.matrix(&format!("{at}in_proj_a.weight"), self.value_heads, hidden, 1.0);
            draw.matrix(&format!("{at}out_proj.weight"), hidden, values, branch);
            draw.each(&format!("{at}conv1d.weight"), &[channels, 1, 4], |u| u - 0.5);
            let (low, high) = RATES;
            draw.each(&format!("{at}A_log"), &[self.value_heads], |u| (self.decay * (low + u * (high - low))).ln());
            let (low, high) = STEPS;
            // softplus(dt_bias) is the step, drawn evenly in its logarithm.
            draw.each(&format!("{at}dt_bias"), &[self.value_heads], |u| (low * (high / low).powf(u)).exp_m1().ln());
            draw.each(&format!("{at}norm.weight"), &[self.linear_dim], |_| 1.0);
        }
        draw.tensors
    }
}

/// Draws tensors, in bf16.
struct Draw {
    bits: u64,
    tensors: BTreeMap<String, (Vec<usize>, Vec<u8>)>,
}

impl Draw {
    /// `[rows, cols]`, of a variance that keeps the size of what it is multiplied with, times `gain`.
    fn matrix(&mut self, name: &str, rows: usize, cols: usize, gain: f64) {
        let width = gain * (12.0 / cols as f64).sqrt();
        self.each(name, &[rows, cols], |u| (u - 0.5) * width);
    }

    /// Of numbers made from ones drawn evenly from 0..1.
    fn each(&mut self, name: &str, shape: &[usize], make: impl Fn(f64) -> f64) {
        let count = shape.iter().product();
        let mut data = Vec::with_capacity(2 * count);
        for _ in 0..count {
            // xorshift64 (Marsaglia, 2003).
            self.bits ^= self.bits << 13;
            self.bits ^= self.bits >> 7;
            self.bits ^= self.bits << 17;
            let even = ((self.bits >> 40) as f64 + 0.5) / (1u64 << 24) as f64;
            data.extend(bf16::from_f64(make(even)).to_le_bytes());
        }
        self.tensors.insert(name.to_string(), (shape.to_vec(), data));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Direct;
    use hypic_state::DType;

    fn tiny() -> Size {
        Size {
            hidden: 64,
            layers: 4,
            inner: 96,
            key_heads: 2,
            value_heads: 4,
            linear_dim: 16,
            heads: 4,
            kv_heads: 2,
            head_dim: 32,
            vocab: 100,
            decay: 1.0,
        }
    }

    #[test]
    fn a_synthetic_model_runs_and_keeps_its_numbers_in_bounds() {
        let direct = Direct::load(1, &tiny().checkpoint().unwrap(), DType::F32).unwrap();
        let ids: Vec<u32> = (0..300).map(|i| i * 7 % 100).collect();
        let (_, logits) = direct.forward(direct.empty(), &ids);
        let logits = logits.expect("logits of the last row");
        assert_eq!(logits.len(), 100);
        let size = (logits.iter().map(|l| f64::from(l * l)).sum::<f64>() / 100.0).sqrt();
        assert!((0.1..10.0).contains(&size), "logits of size {size}");
    }

    #[test]
    fn slow_decay_keeps_operators_that_fast_decay_drops() {
        let kept = |decay: f64| {
            let size = Size { decay, ..tiny() };
            let direct = Direct::load(1, &size.checkpoint().unwrap(), DType::F32).unwrap();
            let ids: Vec<u32> = (0..600).map(|i| i * 13 % 100).collect();
            direct.kept_operators(&direct.entry(&ids, 8, &[]))
        };
        let (slow, fast) = (kept(1e-3), kept(30.0));
        assert_eq!(slow, (12, 12));
        assert!(fast.0 < 6, "{fast:?}");
    }
}
