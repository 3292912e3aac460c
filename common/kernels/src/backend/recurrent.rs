//! What recurrent layers take: the walk of a sequence, step by step, and the recurrence that it follows.
//!
//! Only descriptions and references live here; the backends check that shapes match.

use std::ops::Range;

use hypic_state::{ComposeRule, RecurrentPart};

use super::{Backend, Cols};

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
        /// How the entry's state is brought to its place, where keys are rotated inside the recurrence.
        turn: Option<Turn<'a, B>>,
    },
    /// Copy the state as it is now.
    Save(&'a mut B::Tensor),
}

/// A rotation of an entry's state on its key axis: the state was made of keys at segment-local positions, and
/// `R(p + i) k = R(p) R(i) k`. The operator is a multiple of the identity and needs none.
pub struct Turn<'a, B: Backend> {
    /// The rotation of a key head.
    pub rope: &'a B::Rope,
    /// By how many positions: the segment's start.
    pub by: i64,
}

impl<B: Backend> Clone for Turn<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for Turn<'_, B> {}

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

/// Heads and widths of a recurrent layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScanShape {
    /// Heads of q and k (groups of B and C in Mamba2). Key head `h / (heads / key_heads)` serves value head `h`.
    pub key_heads: usize,
    /// Heads of v, of the gates and of the state.
    pub heads: usize,
    /// Width of a key head.
    pub d_k: usize,
    /// Width of a value head.
    pub d_v: usize,
}

/// What a token does to the state before it is read: the decay, which is the whole of `A_t` but in delta rules.
/// Decays are applied first: a delta rule predicts with the decayed state.
pub enum Decay<'a, B: Backend> {
    /// None: plain linear attention, DeltaNet.
    None,
    /// `[heads]`: the log decay of every token (RetNet, lightning attention); none is above 0.
    Fixed(&'a B::Tensor),
    /// A log decay per token and head, `-exp(a_log) dt` with the step `dt = clamp(softplus(x + dt_bias), limit)`
    /// (gated delta net, Mamba2).
    Head {
        /// `heads` columns.
        x: Cols<'a, B>,
        /// `[heads]`.
        a_log: &'a B::Tensor,
        /// `[heads]`.
        dt_bias: &'a B::Tensor,
        /// Least and largest step: `(0, inf)` does nothing.
        limit: (f32, f32),
    },
    /// A log decay per token, head and key channel (GLA, Kimi delta attention). Then `key_heads == heads`.
    Channel {
        /// `heads * d_k` columns.
        x: Cols<'a, B>,
        /// What makes a log decay of a number.
        gate: ChannelGate<'a, B>,
    },
}

/// How a number becomes the log decay of a key channel.
pub enum ChannelGate<'a, B: Backend> {
    /// It is the log decay; none is above 0 (GLA).
    Log,
    /// `-exp(a_log) softplus(x + bias)` (Kimi-Linear).
    Softplus {
        /// `[heads]`.
        a_log: &'a B::Tensor,
        /// `[heads * d_k]`.
        bias: &'a B::Tensor,
    },
    /// `lower sigmoid(exp(a_log) (x + bias))` (Ling-3.0).
    Bounded {
        /// `[heads]`.
        a_log: &'a B::Tensor,
        /// `[heads * d_k]`.
        bias: &'a B::Tensor,
        /// The least log decay, below 0.
        lower: f32,
    },
}

/// What a token writes to the state.
pub enum Write<'a, B: Backend> {
    /// `k v^T`.
    Plain,
    /// `k (dt v)^T` with the step of [`Decay::Head`] (Mamba2).
    Step,
    /// `beta k (v - S^T k)^T` with `beta = scale sigmoid(b)`: the delta rule. `scale` is 1, or 2 where negative
    /// eigenvalues are allowed.
    Delta {
        /// `heads` columns.
        b: Cols<'a, B>,
        /// Largest beta.
        scale: f32,
    },
}

/// Inputs of a scan, a row a token.
pub struct ScanInputs<'a, B: Backend> {
    /// `key_heads * d_k` columns.
    pub q: Cols<'a, B>,
    /// `key_heads * d_k` columns.
    pub k: Cols<'a, B>,
    /// `heads * d_v` columns.
    pub v: Cols<'a, B>,
    /// Whether q and k are l2-normalised first (`x / sqrt(sum x^2 + 1e-6)`).
    pub unit: bool,
    /// Factor on q (after that).
    pub q_scale: f32,
    /// What happens to the state before a token writes.
    pub decay: Decay<'a, B>,
    /// What a token writes.
    pub write: Write<'a, B>,
    /// `[heads]`: adds `skip[h] v` to the output, v as it comes in (Mamba2's D).
    pub skip: Option<&'a B::Tensor>,
}

/// The smallest form that the operators of a layer have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// A number per head.
    Scalar,
    /// A number per head and key channel.
    Diagonal,
    /// A matrix per head.
    Dense,
}
