//! The op set: what the model and the pass ask of a device.
//!
//! Tensors are row-major and live in the backend's memory; transfers are the explicit [`Backend::upload`]
//! and [`Backend::download`]. Activations, states and operators have the backend's working precision
//! (f32 on devices; f64 or f32 in the reference). Packed weights and K/V have their own dtype.
//!
//! What every implementation guarantees:
//! - the result for a row depends on that row and its sequence alone, not on what else is in the
//!   batch nor on the number of threads, bit for bit, on one instruction set;
//! - recurrences walk chunks of [`GRID`] rows counted from the first row of each [`Step::Rows`], and
//!   attention walks blocks of [`GRID`] keys counted from the first key of each span, so cutting a
//!   stretch at a multiple of [`GRID`] changes no bit;
//! - an op with zero rows does nothing and is no error.
//!
//! What every caller guarantees: shapes match what the op documents (checked; a mismatch is a bug
//! and panics), outputs are tensors of the same backend and are resized by the op.

use std::ops::Range;

use hypic_state::{ComposeRule, DType, HostKv, HostTensor, RecurrentPart, Storage, Stored, Transition};

/// Rows of a scan chunk and keys of an attention block.
pub const GRID: usize = 64;

/// A tensor in a backend's memory.
pub trait DeviceTensor: Stored {
    /// Extent of each axis, outermost first.
    fn shape(&self) -> &[usize];

    /// Extent of the first axis of a matrix.
    fn rows(&self) -> usize {
        self.shape()[0]
    }

    /// Extent of the last axis.
    fn cols(&self) -> usize {
        *self.shape().last().expect("a tensor has at least one axis")
    }
}

/// The columns of a matrix from `col` on; the op says how many it reads.
pub struct Cols<'a, B: Backend> {
    /// The matrix `[rows, cols]`.
    pub mat: &'a B::Tensor,
    /// First column.
    pub col: usize,
}

impl<B: Backend> Clone for Cols<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<B: Backend> Copy for Cols<'_, B> {}

impl<'a, B: Backend> Cols<'a, B> {
    /// Columns of `mat` from `col` on.
    pub fn new(mat: &'a B::Tensor, col: usize) -> Self {
        Cols { mat, col }
    }
}

/// One step in the walk of a recurrent layer over one sequence.
pub enum Step<'a, B: Backend> {
    /// Fold these rows of the batch into the state.
    Rows {
        /// Rows of the batch.
        rows: Range<usize>,
        /// Where the operator of the stretch is accumulated, if its rows belong to a body. The first
        /// step with a carry begins the body; later steps, in later passes too, continue it.
        carry: Option<&'a mut B::Carry>,
    },
    /// Apply an entry.
    Jump {
        /// How.
        rule: ComposeRule,
        /// The entry's part of this layer.
        part: &'a RecurrentPart<B>,
    },
    /// Copy the state as it is now.
    Save(&'a mut B::Tensor),
}

/// The walk of a recurrent layer over one sequence.
pub struct Fold<'a, B: Backend> {
    /// `[heads, d_k, d_v]`, updated in place.
    pub state: &'a mut B::Tensor,
    /// In order. Rows of different steps are disjoint.
    pub steps: Vec<Step<'a, B>>,
}

/// One step in the walk of a causal convolution over one sequence.
pub enum ConvStep<'a, B: Backend> {
    /// Convolve these rows of the batch and move the window over them.
    Rows(Range<usize>),
    /// Replace the window by an entry's tail `[kernel - 1, channels]`.
    Jump(&'a B::Tensor),
    /// Copy the window as it is now.
    Save(&'a mut B::Tensor),
}

/// The walk of a causal convolution over one sequence.
pub struct ConvFold<'a, B: Backend> {
    /// `[kernel - 1, channels]`: the raw inputs before the first row, oldest first; updated in place.
    pub window: &'a mut B::Tensor,
    /// In order.
    pub steps: Vec<ConvStep<'a, B>>,
}

/// Dimensions of a gated-delta layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeltaShape {
    /// Heads of q and k. Key head `h / (heads / key_heads)` serves value head `h`.
    pub key_heads: usize,
    /// Heads of v, of the gates and of the state.
    pub heads: usize,
    /// Width of a key head.
    pub d_k: usize,
    /// Width of a value head.
    pub d_v: usize,
    /// `beta = beta_scale * sigmoid(b)`: 1, or 2 where negative eigenvalues are allowed.
    pub beta_scale: f32,
}

impl DeltaShape {
    /// Columns of `[q | k | v]`.
    pub fn channels(&self) -> usize {
        2 * self.key_heads * self.d_k + self.heads * self.d_v
    }
}

/// Inputs of a gated-delta scan, a row a token.
pub struct DeltaInputs<'a, B: Backend> {
    /// `[rows, q | k | v]` after convolution and silu; q and k before their l2-norm.
    pub qkv: &'a B::Tensor,
    /// `[heads]` columns before the sigmoid.
    pub b: Cols<'a, B>,
    /// `[heads]` columns before the softplus.
    pub a: Cols<'a, B>,
    /// `[heads]`.
    pub a_log: &'a B::Tensor,
    /// `[heads]`.
    pub dt_bias: &'a B::Tensor,
}

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

/// Dimensions of K and V of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Key/value heads.
    pub heads: usize,
    /// Width of a key.
    pub d_k: usize,
    /// Width of a value.
    pub d_v: usize,
    /// Element type of the stored values.
    pub dtype: DType,
}

/// K and V that earlier rows left, as rows of one sequence see them.
pub struct Span<'a, B: Backend> {
    /// The keys and values.
    pub kv: &'a B::Kv,
    /// The tokens of `kv` that are seen.
    pub range: Range<usize>,
    /// The position, in the sequence, of what `kv` calls position 0: a row at position p turns its
    /// query by `p - origin` for this span.
    pub origin: i64,
    /// Index, in the sequence's rows, of the first row that sees the span.
    pub from_row: usize,
}

/// Attention of the rows of one sequence.
pub struct AttentionRows<'a, B: Backend> {
    /// Rows of the batch.
    pub rows: Range<usize>,
    /// Position of each row.
    pub positions: &'a [i64],
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

/// Gate activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// `x * sigmoid(x)`.
    Silu,
    /// `1 / (1 + exp(-x))`.
    Sigmoid,
}

/// A device and its op set. Cloning gives another handle of the same device.
pub trait Backend: Storage<Tensor: DeviceTensor> + Clone {
    /// Weights of a linear layer in the layout that the device reads best.
    type Linear: Stored;
    /// A rotary embedding, ready to use.
    type Rope: Send + Sync + 'static;
    /// The operator of a body while its rows are being folded.
    type Carry: Send + 'static;

    /// Name of the kernel set: entries are bit-identical within one (for example `avx512bf16-v1`).
    fn kernel_set(&self) -> String;

    /// Whether weights of this dtype are computed in it by instructions of their own.
    fn supports(&self, dtype: DType) -> bool;

    // ---- memory

    /// A tensor of unspecified contents (poisoned with NaN under the feature `poison`).
    fn alloc(&self, shape: &[usize]) -> Self::Tensor;

    /// A tensor of zeros.
    fn zeros(&self, shape: &[usize]) -> Self::Tensor;

    /// Give `t` a new shape; its contents become unspecified (poisoned under the feature `poison`).
    /// Memory is kept for reuse.
    fn resize(&self, t: &mut Self::Tensor, shape: &[usize]);

    /// A tensor with the values of `t`, in working precision.
    fn upload(&self, t: &HostTensor) -> Self::Tensor;

    /// The values of `t`, in working precision.
    fn download(&self, t: &Self::Tensor) -> HostTensor;

    /// A copy.
    fn duplicate(&self, t: &Self::Tensor) -> Self::Tensor;

    // ---- rows

    /// Pack a weight matrix whose rows are those of `parts`, each `[n_i, k]`, one below the other,
    /// to be computed in `dtype`.
    fn pack(&self, parts: &[HostTensor], dtype: DType) -> Self::Linear;

    /// `out [rows, n] = x [rows, k] W^T`.
    fn linear(&self, w: &Self::Linear, x: &Self::Tensor, out: &mut Self::Tensor);

    /// `acc [rows, n] += x [rows, k] W^T`.
    fn linear_add(&self, w: &Self::Linear, x: &Self::Tensor, acc: &mut Self::Tensor);

    /// `out [ids, k]`: the rows `ids` of `w [n, k]`.
    fn embed(&self, w: &Self::Linear, ids: &[u32], out: &mut Self::Tensor);

    /// `out [index, k]`: the rows `index` of `x [rows, k]`.
    fn gather(&self, x: &Self::Tensor, index: &[usize], out: &mut Self::Tensor);

    /// `out = x / sqrt(mean(x^2) + eps) * weight`, a row at a time; `weight [k]`.
    fn rms_norm(&self, x: &Self::Tensor, weight: &Self::Tensor, eps: f32, out: &mut Self::Tensor);

    /// The same in place over each of `heads` stretches of `weight.len()` columns from `col` on.
    fn head_norm(&self, x: &mut Self::Tensor, col: usize, heads: usize, weight: &Self::Tensor, eps: f32);

    /// `out [rows, f] = silu(x[.., ..f]) * x[.., f..]` for `x [rows, 2 f]`.
    fn silu_mul(&self, x: &Self::Tensor, out: &mut Self::Tensor);

    /// `x [rows, k] *= gate(g)`, `g` being `k` columns.
    fn gate(&self, x: &mut Self::Tensor, g: Cols<'_, Self>, gate: Gate);

    // ---- recurrent layers

    /// Causal depthwise convolution and silu: `out[t, c] = silu(bias[c] + sum_i weight[c, i] x[t - (kernel-1) + i, c])`,
    /// rows before a sequence's first being its window. `x`: `channels` columns; `weight [channels, kernel]`;
    /// `bias [channels]`; `out [rows of x, channels]`, rows in no step left unspecified.
    fn conv(
        &self,
        x: Cols<'_, Self>,
        weight: &Self::Tensor,
        bias: Option<&Self::Tensor>,
        folds: &mut [ConvFold<'_, Self>],
        out: &mut Self::Tensor,
    );

    /// Gated delta rule, chunk-parallel (Yang et al., Gated Delta Networks, 2024). Per token and head, with q and k
    /// l2-normalised (eps 1e-6 inside the root), q scaled by `d_k^-0.5`, `g = -exp(a_log) softplus(a + dt_bias)`:
    /// `S <- exp(g) S; S <- S + beta k (v - S^T k)^T; o = S^T q`. `out [rows of qkv, heads * d_v]`, rows in no
    /// step left unspecified.
    fn gated_delta(
        &self,
        shape: DeltaShape,
        inputs: DeltaInputs<'_, Self>,
        folds: &mut [Fold<'_, Self>],
        out: &mut Self::Tensor,
    );

    /// A carry for a body of a layer with `heads` states `[d_k, d_v]`.
    fn carry(&self, heads: usize, d_k: usize, d_v: usize) -> Self::Carry;

    /// End a body whose last row left the state at `state`: its operator (decayed heads omitted) and zero-start
    /// state, `state - T state_before_body`.
    fn finish(&self, carry: Self::Carry, state: &Self::Tensor) -> (Transition<Self::Tensor>, Self::Tensor);

    /// `out = norm(o) * weight * gate(g)`: per head rms-norm of `o [rows, heads * d_v]`, `weight [d_v]`, `g` as
    /// many columns as `o`.
    fn gated_norm(
        &self,
        o: &Self::Tensor,
        weight: &Self::Tensor,
        eps: f32,
        g: Cols<'_, Self>,
        gate: Gate,
        out: &mut Self::Tensor,
    );

    // ---- attention layers

    /// A rotary embedding.
    fn rope(&self, spec: &RopeSpec) -> Self::Rope;

    /// An empty K/V store.
    fn kv(&self, shape: KvShape) -> Self::Kv;

    /// Dimensions of a K/V store.
    fn kv_shape(&self, kv: &Self::Kv) -> KvShape;

    /// Tokens in a K/V store.
    fn kv_len(&self, kv: &Self::Kv) -> usize;

    /// Append rows: K (`heads * d_k` columns of `k`, rotated here at `positions`) and V (`heads * d_v` columns of `v`).
    fn kv_append(
        &self,
        kv: &mut Self::Kv,
        rows: Range<usize>,
        k: Cols<'_, Self>,
        v: Cols<'_, Self>,
        positions: &[i64],
        rope: Option<&Self::Rope>,
    );

    /// A store of exactly the tokens `range`.
    fn kv_copy(&self, kv: &Self::Kv, range: Range<usize>) -> Self::Kv;

    /// Drop all tokens from `len` on.
    fn kv_truncate(&self, kv: &mut Self::Kv, len: usize);

    /// The tokens in portable form.
    fn kv_download(&self, kv: &Self::Kv) -> HostKv;

    /// A store with the tokens of `kv`.
    fn kv_upload(&self, kv: &HostKv, shape: KvShape) -> Self::Kv;

    /// Softmax attention of rows over spans (online softmax; queries are turned per span, never the keys).
    /// `q`: `heads * d_k` columns, not rotated; `out [rows of q, heads * d_v]`, rows of no sequence left unspecified.
    fn attention(
        &self,
        shape: AttentionShape,
        rope: Option<&Self::Rope>,
        q: Cols<'_, Self>,
        sequences: &[AttentionRows<'_, Self>],
        out: &mut Self::Tensor,
    );
}
