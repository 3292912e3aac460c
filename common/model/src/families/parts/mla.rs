//! Multi-head latent attention (DeepSeek-V2, 2024).

use hypic_kernels::RopeSpec;

use super::read::bounded;
use super::trunk::{Module, Trunk};
use crate::families::rope::{rope_whole, softmax_factor};
use crate::spec::{LatentSpec, ProjectionSpec};
use crate::{Config, ModelError};

/// Added to the mean square in the norms of the latent and of a low-rank query, whatever `rms_norm_eps` says.
const LATENT_EPS: f32 = 1e-6;

/// Widths of a layer.
#[derive(Clone, Copy, Debug)]
pub struct Latent {
    heads: usize,
    rank: usize,
    query_rank: Option<usize>,
    nope: usize,
    /// Width of the part of a head that the rotary key serves.
    pub rotary: usize,
    d_v: usize,
}

/// The rotation of the rotary part.
pub struct Rotation {
    rope: RopeSpec,
    /// Factor on the softmax scale.
    stretched: f64,
}

impl Latent {
    /// Read them.
    ///
    /// # Errors
    /// If a key is missing or wrong, or heads are absurdly wide.
    pub fn read(c: &Config) -> Result<Self, ModelError> {
        const HEADS: &str = "num_attention_heads";
        let widths = Latent {
            heads: c.size(HEADS)?,
            rank: c.size("kv_lora_rank")?,
            query_rank: c.opt_size("q_lora_rank")?,
            nope: c.size("qk_nope_head_dim")?,
            rotary: c.size("qk_rope_head_dim")?,
            d_v: c.size("v_head_dim")?,
        };
        for (key, width) in
            [("qk_nope_head_dim", widths.nope), ("qk_rope_head_dim", widths.rotary), ("v_head_dim", widths.d_v)]
        {
            bounded(c, (HEADS, widths.heads), (key, width))?;
        }
        let whole = widths.nope + widths.rotary;
        if c.opt_size("qk_head_dim")?.is_some_and(|width| width != whole) {
            let problem = format!("is not qk_nope_head_dim + qk_rope_head_dim = {whole}");
            return Err(c.wrong("qk_head_dim", problem));
        }
        Ok(widths)
    }

    /// The rotation of the rotary part, all of which turns, in pairs of neighbours unless `rope_interleave` says
    /// otherwise.
    ///
    /// # Errors
    /// If a rope parameter is wrong or not served.
    pub fn rotation(&self, trunk: &Trunk<'_>, theta: f64) -> Result<Rotation, ModelError> {
        let interleaved = trunk.c.opt_bool("rope_interleave")?.unwrap_or(true);
        let rope = RopeSpec { interleaved, ..rope_whole(trunk.config, self.rotary, theta)? };
        Ok(Rotation { rope, stretched: softmax_factor(trunk.config)? })
    }

    /// A layer without output gate.
    pub fn layer(&self, trunk: &Trunk<'_>, at: &Module, out: &str, rotation: Option<&Rotation>) -> LatentSpec {
        let queries = self.heads * (self.nope + self.rotary);
        let query = match self.query_rank {
            Some(rank) => ProjectionSpec::LowRank { down: at.rows("q_a_proj", rank), up: at.rows("q_b_proj", queries) },
            None => ProjectionSpec::Direct(vec![at.rows("q_proj", queries)]),
        };
        let stretched = rotation.map_or(1.0, |rotation| rotation.stretched);
        LatentSpec {
            heads: self.heads,
            rank: self.rank,
            nope: self.nope,
            rotary: self.rotary,
            d_v: self.d_v,
            scale: (((self.nope + self.rotary) as f64).powf(-0.5) * stretched) as f32,
            rope: rotation.map(|rotation| rotation.rope.clone()),
            query,
            query_norm: self.query_rank.map(|rank| at.norm("q_a_layernorm", rank, LATENT_EPS)),
            latent: at.rows("kv_a_proj_with_mqa", self.rank + self.rotary),
            latent_norm: at.norm("kv_a_layernorm", self.rank, LATENT_EPS),
            up: at.tensor("kv_b_proj.weight"),
            gate: None,
            out: at.rows(out, trunk.hidden),
        }
    }

    /// Number of heads.
    pub fn heads(&self) -> usize {
        self.heads
    }
}
