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

mod attention;
mod experts;
mod recurrent;
mod rows;

use std::ops::Range;

use hypic_state::{DType, HostKv, HostTensor, Storage, Stored, Transition};

pub use attention::{AttentionRows, AttentionShape, KvShape, Positions, RopeSpec, Span};
pub use experts::{Expert, MlpForm, RouteSpec, Score};
pub use recurrent::{ChannelGate, ConvFold, ConvStep, Decay, Fold, Form, ScanInputs, ScanShape, Step, Turn, Write};
pub use rows::{Activation, GatedNorm, HeadCols};

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

/// A device and its op set. Cloning gives another handle of the same device.
pub trait Backend: Storage<Tensor: DeviceTensor> + Clone {
    /// Weights of a linear layer in the layout that the device reads best.
    type Linear: Stored;
    /// A rotary embedding, ready to use.
    type Rope: Send + Sync + 'static;
    /// The operator of a body while its rows are being folded.
    type Carry: Send + 'static;
    /// Which rows go to which experts, with what weight. Reused from pass to pass.
    type Routing: Send + 'static;

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

    /// What an MLP of width f does between its projections: `out [rows, f]` of `x [rows, 2 f]`, the gate's columns first,
    /// or of `x [rows, f]` without a gate.
    fn mlp_inner(&self, form: MlpForm, x: &Self::Tensor, out: &mut Self::Tensor);

    /// `x [rows, k] *= activation(g)`, each of `g`'s `k / width` columns serving `width` columns of `x`.
    fn gate(&self, x: &mut Self::Tensor, g: Cols<'_, Self>, width: usize, activation: Activation);

    /// `x <- activation(x)` in the columns `cols`.
    fn activate(&self, x: &mut Self::Tensor, cols: Range<usize>, activation: Activation);

    /// `acc <- a acc + b x`, two matrices of one shape. With `a` = 0 `acc` is not read.
    fn mix(&self, acc: &mut Self::Tensor, a: f32, x: &Self::Tensor, b: f32);

    /// `to[.., at_to.col + h at_to.stride + i] = from[.., at_from.col + h at_from.stride + i]` for `heads` heads of
    /// `width` columns. The other columns of `to` stay.
    fn copy_heads(
        &self,
        from: &Self::Tensor,
        at_from: HeadCols,
        heads: usize,
        width: usize,
        to: &mut Self::Tensor,
        at_to: HeadCols,
    );

    /// A linear layer per head: columns `at_out` of head h of `out` become `W_h` times columns `at_x` of head h of `x`,
    /// `ws[h]` being `[n, k]`. The other columns of `out` stay.
    fn head_linear(
        &self,
        ws: &[Self::Linear],
        x: &Self::Tensor,
        at_x: HeadCols,
        out: &mut Self::Tensor,
        at_out: HeadCols,
    );

    /// Rotate `heads` heads of `d` columns from `col` on in place. `positions`: those of all rows of `x`, sequence behind
    /// sequence.
    fn rotate(
        &self,
        x: &mut Self::Tensor,
        col: usize,
        heads: usize,
        d: usize,
        positions: &[Positions<'_>],
        rope: &Self::Rope,
    );

    // ---- experts

    /// An empty routing.
    fn routing(&self) -> Self::Routing;

    /// Choose the experts of every row of `logits [rows, experts]`; `bias [experts]` is added to scores for the choice
    /// alone, not for the weights. Of equal scores the lower index wins; NaN counts as the largest, so that it shows in the
    /// weights. Panics if `spec` cannot be met (see [`RouteSpec::check`]).
    fn route(&self, spec: &RouteSpec, logits: &Self::Tensor, bias: Option<&Self::Tensor>, routing: &mut Self::Routing);

    /// `acc [rows, hidden] += sum over the row's experts of weight * down(inner(gate_up(x)))`, in ascending order of experts,
    /// all of which are of one `form` (see [`mlp_inner`](Self::mlp_inner)). Rows are grouped, so that the weights of each
    /// expert are read once.
    fn experts(
        &self,
        form: MlpForm,
        experts: &[Expert<Self>],
        routing: &Self::Routing,
        x: &Self::Tensor,
        acc: &mut Self::Tensor,
    );

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

    /// The recurrence of a layer, chunk-parallel (Yang et al., Gated Delta Networks, 2024; Kimi Team, Kimi Linear, 2025;
    /// Dao and Gu, Mamba2, 2024). Per token and head: the state decays, the token writes, `o = S^T q` is read.
    /// `out [rows of v, heads * d_v]`, rows in no step left unspecified.
    fn scan(
        &self,
        shape: ScanShape,
        inputs: ScanInputs<'_, Self>,
        folds: &mut [Fold<'_, Self>],
        out: &mut Self::Tensor,
    );

    /// A carry for a body of a layer of this shape whose operators have this form.
    fn carry(&self, shape: ScanShape, form: Form) -> Self::Carry;

    /// End a body whose last row left the state at `state`: its operator (decayed heads of dense ones omitted) and
    /// zero-start state, `state - T state_before_body`.
    fn finish(&self, carry: Self::Carry, state: &Self::Tensor) -> (Transition<Self::Tensor>, Self::Tensor);

    /// `out = norm(o) * weight * activation(g)`, or `norm(o * activation(g)) * weight`; `o [rows, k]`, `weight` one
    /// group's or all `k` numbers, `g` `k` columns.
    fn gated_norm(
        &self,
        spec: GatedNorm,
        o: &Self::Tensor,
        weight: &Self::Tensor,
        g: Cols<'_, Self>,
        out: &mut Self::Tensor,
    );

    // ---- attention layers

    /// A rotary embedding.
    fn rope(&self, spec: &RopeSpec) -> Self::Rope;

    /// An empty K/V store.
    fn kv(&self, shape: KvShape) -> Self::Kv;

    /// Dimensions of a K/V store, as [`KvShape::stored`] gives them.
    fn kv_shape(&self, kv: &Self::Kv) -> KvShape;

    /// Tokens in a K/V store.
    fn kv_len(&self, kv: &Self::Kv) -> usize;

    /// Append rows: K (`heads * d_k` columns of `k`, rotated here at `positions`) and V (`heads * d_v` columns of `v`;
    /// `None` where values are shared).
    fn kv_append(
        &self,
        kv: &mut Self::Kv,
        rows: Range<usize>,
        k: Cols<'_, Self>,
        v: Option<Cols<'_, Self>>,
        positions: Positions<'_>,
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
