//! The layers of a model: weights on the device, and what a layer does with the rows of a pass.
//!
//! A layer kind adds its function's value to a [`Sum`] and knows nothing of the residual stream: how the
//! two are joined, and where the norm stands, is [`Block`]'s alone. What can go wrong here is a weight that
//! does not fit its description, found while loading.

mod attention;
mod block;
mod experts;
mod latent;
mod mlp;
mod recurrent;
mod weights;

use hypic_kernels::Backend;
use hypic_state::DType;

use crate::ModelError;
use crate::spec::{FeedSpec, LayerSpec, MixerSpec};

pub(crate) use attention::{Attention, AttentionSequence, Seen, Stretch};
pub(crate) use block::{Block, Sum};
pub(crate) use experts::Experts;
pub(crate) use latent::Latent;
pub(crate) use mlp::Mlp;
pub(crate) use recurrent::{Recurrent, Walks};
pub(crate) use weights::{Loader, Norm};

/// A token mixer.
pub(crate) enum Mixer<B: Backend> {
    /// Linear attention.
    Recurrent(Recurrent<B>),
    /// Grouped-query softmax attention.
    Attention(Attention<B>),
    /// Softmax attention over a latent.
    Latent(Latent<B>),
}

/// What works on rows alone.
pub(crate) enum Feed<B: Backend> {
    /// One MLP.
    Dense(Mlp<B>),
    /// Experts.
    Experts(Experts<B>),
}

/// One decoder layer.
pub(crate) struct Layer<B: Backend> {
    pub mixer: Block<B, Mixer<B>>,
    pub feed: Option<Block<B, Feed<B>>>,
}

impl<B: Backend> Layer<B> {
    /// Load a layer of a model of width `hidden`; K and V are kept in `kv_dtype`.
    pub fn load(
        loader: &mut Loader<'_, B>,
        spec: &LayerSpec,
        hidden: usize,
        kv_dtype: DType,
    ) -> Result<Self, ModelError> {
        let mixer = Block::load(loader, &spec.mixer, |loader, mixer| {
            Ok(match mixer {
                MixerSpec::Recurrent(s) => Mixer::Recurrent(Recurrent::load(loader, s, hidden)?),
                MixerSpec::Attention(s) => Mixer::Attention(Attention::load(loader, s, hidden, kv_dtype)?),
                MixerSpec::Latent(s) => Mixer::Latent(Latent::load(loader, s, hidden, kv_dtype)?),
            })
        })?;
        let load_feed = |loader: &mut Loader<'_, B>, feed: &FeedSpec| {
            Ok(match feed {
                FeedSpec::Dense(s) => Feed::Dense(Mlp::load(loader, s, hidden)?),
                FeedSpec::Experts(s) => Feed::Experts(Experts::load(loader, s, hidden)?),
            })
        };
        let feed = spec.feed.as_ref().map(|block| Block::load(loader, block, load_feed)).transpose()?;
        Ok(Layer { mixer, feed })
    }
}

/// Buffers for what lives only within a layer; they live as long as the device loop.
pub struct Workspace<B: Backend> {
    /// Normalised rows.
    pub(crate) normed: B::Tensor,
    /// A block's result before it is joined to the residual stream.
    pub(crate) branch: B::Tensor,
    /// Rows whose logits are wanted.
    pub(crate) chosen: B::Tensor,
    /// What layers use while they work.
    pub(crate) scratch: Scratch<B>,
}

/// A layer's buffers; each layer kind uses some.
pub(crate) struct Scratch<B: Backend> {
    /// Input projections.
    pub projected: B::Tensor,
    /// After the convolution.
    pub convolved: B::Tensor,
    /// Between the two steps of a low-rank projection.
    pub narrow: B::Tensor,
    /// A low-rank output gate.
    pub gate: B::Tensor,
    /// A low-rank decay.
    pub decay: B::Tensor,
    /// Queries of latent attention, as projected.
    pub wide: B::Tensor,
    /// The same in the space of the latent.
    pub query: B::Tensor,
    /// Read-outs, attention's output, or what stands between the projections of an MLP.
    pub mixed: B::Tensor,
    /// The same after norm and gate, or out of the latent's space.
    pub gated: B::Tensor,
    /// Of a router.
    pub logits: B::Tensor,
    /// Which rows go to which experts.
    pub routing: B::Routing,
}

impl<B: Backend> Workspace<B> {
    /// Empty buffers, which grow to what passes need.
    pub fn new(backend: &B) -> Self {
        let empty = || backend.zeros(&[0, 0]);
        let scratch = Scratch {
            projected: empty(),
            convolved: empty(),
            narrow: empty(),
            gate: empty(),
            decay: empty(),
            wide: empty(),
            query: empty(),
            mixed: empty(),
            gated: empty(),
            logits: empty(),
            routing: backend.routing(),
        };
        Workspace { normed: empty(), branch: empty(), chosen: empty(), scratch }
    }
}
