//! The layers of a model: weights on the device, and what a layer does with the rows of a pass.

mod attention;
mod gated_delta;
mod mlp;
mod weights;

use hypic_kernels::Backend;

pub(crate) use attention::{Attention, AttentionSequence};
pub(crate) use gated_delta::GatedDelta;
pub(crate) use mlp::Mlp;
pub(crate) use weights::{Loader, Norm};

/// A token mixer.
pub(crate) enum Mixer<B: Backend> {
    /// Gated delta net.
    GatedDelta(GatedDelta<B>),
    /// Grouped-query softmax attention.
    Attention(Attention<B>),
}

/// One decoder layer.
pub(crate) struct Layer<B: Backend> {
    pub mixer_norm: Norm<B>,
    pub mixer: Mixer<B>,
    pub mlp_norm: Norm<B>,
    pub mlp: Mlp<B>,
}

/// Buffers for what lives only within a layer; they live as long as the device loop.
pub struct Workspace<B: Backend> {
    /// Normalised rows.
    pub(crate) normed: B::Tensor,
    /// Input projections.
    pub(crate) projected: B::Tensor,
    /// After the convolution.
    pub(crate) convolved: B::Tensor,
    /// Read-outs, or attention's output.
    pub(crate) mixed: B::Tensor,
    /// The same after norm and gate.
    pub(crate) gated: B::Tensor,
    /// Rows whose logits are wanted.
    pub(crate) chosen: B::Tensor,
}

impl<B: Backend> Workspace<B> {
    /// Empty buffers, which grow to what passes need.
    pub fn new(backend: &B) -> Self {
        let empty = || backend.zeros(&[0, 0]);
        Workspace {
            normed: empty(),
            projected: empty(),
            convolved: empty(),
            mixed: empty(),
            gated: empty(),
            chosen: empty(),
        }
    }
}
