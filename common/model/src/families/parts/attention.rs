//! Grouped-query attention.

use hypic_kernels::RopeSpec;

use super::read::{bounded, divides, spelling};
use super::trunk::{Module, Trunk};
use crate::spec::AttentionSpec;
use crate::{Config, ModelError};

/// Heads of an attention layer.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub width: usize,
}

impl Heads {
    /// Read them; without `head_dim` the heads share the hidden size, without `num_key_value_heads` each query head has
    /// its own keys.
    ///
    /// # Errors
    /// If a key is missing or wrong, or numbers do not divide.
    pub fn read(c: &Config, hidden: usize) -> Result<Self, ModelError> {
        const HEADS: &str = "num_attention_heads";
        const KV_HEADS: &str = "num_key_value_heads";
        let heads = c.size(HEADS)?;
        let kv_heads = c.opt_size(KV_HEADS)?.unwrap_or(heads);
        divides(c, (HEADS, heads), (KV_HEADS, kv_heads))?;
        let width_key = spelling(c, &["head_dim", "attention_head_dim"])?;
        let width = match c.opt_size(width_key)? {
            Some(width) => width,
            None => {
                divides(c, ("hidden_size", hidden), (HEADS, heads))?;
                hidden / heads
            }
        };
        bounded(c, (HEADS, heads), (width_key, width))?;
        Ok(Heads { heads, kv_heads, width })
    }

    /// Columns of all queries.
    pub fn queries(&self) -> usize {
        self.heads * self.width
    }

    /// Columns of all keys, and of all values.
    pub fn keys(&self) -> usize {
        self.kv_heads * self.width
    }
}

/// A layer with `q_proj`, `k_proj`, `v_proj` and `o_proj`, without gate and norms.
pub fn attention(trunk: &Trunk<'_>, at: &Module, heads: Heads, rope: Option<RopeSpec>) -> AttentionSpec {
    AttentionSpec {
        heads: heads.heads,
        kv_heads: heads.kv_heads,
        head_dim: heads.width,
        scale: (heads.width as f32).powf(-0.5),
        rope,
        project: vec![
            at.rows("q_proj", heads.queries()),
            at.rows("k_proj", heads.keys()),
            at.rows("v_proj", heads.keys()),
        ],
        gated: false,
        q_norm: None,
        k_norm: None,
        out: at.rows("o_proj", trunk.hidden),
    }
}
