//! What the steps that treat every row alone take: activations, gated norms, and where heads lie in a matrix.

/// Activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// `1 / (1 + exp(-x))`.
    Sigmoid,
    /// `max(x, 0)^2`.
    SquaredRelu,
}

/// How the outputs of a recurrent layer are normalised and gated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GatedNorm {
    /// Columns that are normalised together; divides the width.
    pub group: usize,
    /// Added to the mean square.
    pub eps: f32,
    /// Activation of the gate.
    pub activation: Activation,
    /// The gate is applied before the norm (Mamba2) instead of after it.
    pub gate_first: bool,
}

/// Some columns of each of several heads, in a matrix whose heads lie `stride` columns apart from `col` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadCols {
    /// First column of the first head.
    pub col: usize,
    /// Columns from a head's first to the next one's.
    pub stride: usize,
}
