//! What attention layers take: keys and values as rows see them, and the rotation of heads.
//!
//! Only descriptions and references live here; the backends check that shapes match.

use std::ops::Range;

use hypic_state::DType;

use super::Backend;

/// Rotary embedding: which dimensions of a head turn, and how fast.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeSpec {
    /// First rotated dimension of a head.
    pub offset: usize,
    /// One angular frequency (radians a position) per pair; twice as many dimensions rotate.
    pub inv_freq: Vec<f64>,
    /// Pairs are `(2i, 2i + 1)` instead of `(i, i + n)`.
    pub interleaved: bool,
    /// Factor on cosine and sine (YaRN's attention factor); 1 otherwise.
    pub scale: f64,
}

impl RopeSpec {
    /// The same with the base `base * alpha^(d / (d - 2))`, d being the rotated dimensions (NTK-aware scaling, bloc97,
    /// 2023): the fastest pair stays as it is, the slowest turns `alpha` times slower.
    pub fn ntk(&self, alpha: f64) -> RopeSpec {
        // With a single pair there is nothing to stretch.
        let slowest = self.inv_freq.len().saturating_sub(1).max(1) as f64;
        let stretched = |(i, freq): (usize, &f64)| freq * alpha.powf(-(i as f64) / slowest);
        RopeSpec { inv_freq: self.inv_freq.iter().enumerate().map(stretched).collect(), ..self.clone() }
    }
}

/// Where rows of one sequence stand, for their rotation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Positions<'a> {
    /// One per row.
    pub at: &'a [i64],
    /// By how much the rotary embedding is stretched for them (see [`RopeSpec::ntk`]); 1: not at all.
    pub ntk_alpha: f64,
}

impl<'a> Positions<'a> {
    /// Of rows that turn by the embedding as it is.
    pub fn plain(at: &'a [i64]) -> Self {
        Positions { at, ntk_alpha: 1.0 }
    }
}

/// Dimensions of K and V of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Key/value heads.
    pub heads: usize,
    /// Width of a key.
    pub d_k: usize,
    /// Width of a value.
    pub d_v: usize,
    /// Values are the first `d_v <= d_k` numbers of the keys, and none are stored (latent attention: K is
    /// `[latent | rotary key]`, V the latent).
    pub shared: bool,
    /// Element type of the stored values.
    pub dtype: DType,
}

impl KvShape {
    /// What a store knows of its shape: all of it, but for `d_v` of shared values, which is then 0. A store holds the
    /// keys alone; how much of them is a value is the layer's business.
    pub fn stored(self) -> KvShape {
        if self.shared { KvShape { d_v: 0, ..self } } else { self }
    }
}

/// K and V that earlier rows left, as rows of one sequence see them.
pub struct Span<'a, B: Backend> {
    /// The keys and values.
    pub kv: &'a B::Kv,
    /// The tokens of `kv` that are seen.
    pub range: Range<usize>,
    /// The position, in the sequence, of what `kv` calls position 0: a row at position p turns its
    /// query by `p - origin` for this span. Keys in it are not stretched: a row that is turns by p stretched and by
    /// `-origin` as the embedding is.
    pub origin: i64,
    /// Index, in the sequence's rows, of the first row that sees the span.
    pub from_row: usize,
}

/// Attention of the rows of one sequence.
pub struct AttentionRows<'a, B: Backend> {
    /// Rows of the batch.
    pub rows: Range<usize>,
    /// Position of each row.
    pub positions: Positions<'a>,
    /// What was there before, wholly visible from its `from_row` on.
    pub spans: Vec<Span<'a, B>>,
    /// The sequence's own tokens, the rows of this batch (already appended) last; row i sees all but
    /// those of the rows behind it. Keys are rotated at their true positions.
    pub own: &'a B::Kv,
}

/// Dimensions of an attention layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// Query heads; head `h` reads key/value head `h / (heads / kv.heads)`.
    pub heads: usize,
    /// Keys and values.
    pub kv: KvShape,
    /// Factor on `q . k`.
    pub scale: f32,
}
