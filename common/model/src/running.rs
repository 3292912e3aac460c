//! What a sequence carries through a request: its running state, and frozen copies of it.
//!
//! A running state belongs to one sequence. In a recurrent layer it is S and the convolution window;
//! in an attention layer a view: spans of immutable stores that others may share (bodies of entries,
//! stretches that were frozen), and the sequence's own growing store.

use std::ops::Range;
use std::sync::Arc;

use hypic_kernels::{Backend, Span};
use hypic_state::{LayerPart, Stored};

use crate::Model;
use crate::layers::{Layer, Mixer};

/// Immutable K and V, shared by reference count.
pub(crate) enum SharedKv<B: Backend> {
    /// Of an entry's body.
    Body(Arc<LayerPart<B>>),
    /// Of a sequence's own rows, at their true positions.
    Frozen(Arc<B::Kv>),
}

impl<B: Backend> Clone for SharedKv<B> {
    fn clone(&self) -> Self {
        match self {
            SharedKv::Body(part) => SharedKv::Body(part.clone()),
            SharedKv::Frozen(kv) => SharedKv::Frozen(kv.clone()),
        }
    }
}

impl<B: Backend> SharedKv<B> {
    fn kv(&self) -> &B::Kv {
        match self {
            SharedKv::Frozen(kv) => kv,
            SharedKv::Body(part) => match &**part {
                LayerPart::Attention(kv) => kv,
                LayerPart::Recurrent(_) => unreachable!("a body in an attention layer has K and V"),
            },
        }
    }
}

/// A span of shared K and V in a sequence's view.
pub(crate) struct HeldSpan<B: Backend> {
    pub kv: SharedKv<B>,
    pub range: Range<usize>,
    /// Position, in the sequence, of what the store calls position 0.
    pub origin: i64,
}

impl<B: Backend> Clone for HeldSpan<B> {
    fn clone(&self) -> Self {
        HeldSpan { kv: self.kv.clone(), range: self.range.clone(), origin: self.origin }
    }
}

impl<B: Backend> HeldSpan<B> {
    /// The span as the attention op takes it, seen from row `from_row` on.
    pub fn seen_from(&self, from_row: usize) -> Span<'_, B> {
        Span { kv: self.kv.kv(), range: self.range.clone(), origin: self.origin, from_row }
    }
}

/// One layer of a running state.
pub(crate) enum LayerState<B: Backend> {
    Recurrent {
        /// `[heads, d_k, d_v]`.
        state: B::Tensor,
        /// `[kernel - 1, channels]`; `None` where there is no convolution.
        window: Option<B::Tensor>,
    },
    Attention {
        spans: Vec<HeldSpan<B>>,
        own: B::Kv,
    },
}

/// One sequence's state.
pub struct RunningState<B: Backend> {
    pub(crate) layers: Vec<LayerState<B>>,
    pub(crate) position: i64,
    /// Rows in the sequence's own stores.
    pub(crate) own_rows: usize,
    /// Tokens that the sequence has at least; 0 if nobody told. Where embeddings depend on the length of a sequence, it is
    /// this one that counts as long as there are fewer.
    pub(crate) expected: usize,
}

impl<B: Backend> RunningState<B> {
    /// The state before any token; the first row stands at `position` (0, or minus the length of an anchor).
    pub fn new(backend: &B, model: &Model<B>, position: i64) -> Self {
        let layers = model.layers().iter().map(|layer| empty_layer(backend, layer)).collect();
        RunningState { layers, position, own_rows: 0, expected: 0 }
    }

    /// The same, of a prompt of `tokens` tokens: however it is cut into passes, all its rows are those of one sequence of
    /// this length. Rows behind it are those of a sequence that ends with their pass, as transformers decodes.
    pub fn of_prompt(self, tokens: usize) -> Self {
        RunningState { expected: tokens, ..self }
    }

    /// Position of the next token.
    pub fn position(&self) -> i64 {
        self.position
    }

    /// A state of its own that goes on where `frozen` stopped.
    pub fn resume(backend: &B, model: &Model<B>, frozen: &FrozenState<B>) -> Self {
        let layers = model.layers().iter().zip(&frozen.layers).map(|(layer, state)| match state {
            FrozenLayer::Recurrent { state, window } => {
                let window = window.as_ref().map(|w| backend.duplicate(w));
                LayerState::Recurrent { state: backend.duplicate(state), window }
            }
            FrozenLayer::Attention { spans } => {
                let LayerState::Attention { own, .. } = empty_layer(backend, layer) else {
                    unreachable!("a frozen state has the layout of its model")
                };
                LayerState::Attention { spans: spans.clone(), own }
            }
        });
        RunningState { layers: layers.collect(), position: frozen.position, own_rows: 0, expected: 0 }
    }

    /// The recurrent state of layer `layer`, `[heads, d_k, d_v]`, and its convolution window
    /// `[kernel - 1, channels]`, if it has a convolution; `None` for an attention layer.
    pub fn recurrent(&self, layer: usize) -> Option<(&B::Tensor, Option<&B::Tensor>)> {
        match &self.layers[layer] {
            LayerState::Recurrent { state, window } => Some((state, window.as_ref())),
            LayerState::Attention { .. } => None,
        }
    }

    /// K and V of the sequence's own rows in layer `layer`; `None` for a recurrent layer.
    pub fn own_kv(&self, layer: usize) -> Option<&B::Kv> {
        match &self.layers[layer] {
            LayerState::Attention { own, .. } => Some(own),
            LayerState::Recurrent { .. } => None,
        }
    }

    /// Bytes that belong to this sequence alone.
    pub fn bytes(&self) -> usize {
        let layer = |l: &LayerState<B>| match l {
            LayerState::Recurrent { state, window } => recurrent_bytes::<B>(state, window),
            LayerState::Attention { own, .. } => own.bytes(),
        };
        self.layers.iter().map(layer).sum()
    }
}

fn empty_layer<B: Backend>(backend: &B, layer: &Layer<B>) -> LayerState<B> {
    let kv = match &layer.mixer.body {
        Mixer::Recurrent(m) => {
            let state = backend.zeros(&[m.shape.heads, m.shape.d_k, m.shape.d_v]);
            let window = m.conv.as_ref().map(|conv| backend.zeros(&[conv.history, conv.channels]));
            return LayerState::Recurrent { state, window };
        }
        Mixer::Attention(m) => m.shape.kv,
        Mixer::Latent(m) => m.shape.kv,
    };
    LayerState::Attention { spans: Vec::new(), own: backend.kv(kv) }
}

fn recurrent_bytes<B: Backend>(state: &B::Tensor, window: &Option<B::Tensor>) -> usize {
    state.bytes() + window.as_ref().map_or(0, Stored::bytes)
}

/// One layer of a frozen state.
pub(crate) enum FrozenLayer<B: Backend> {
    Recurrent { state: B::Tensor, window: Option<B::Tensor> },
    Attention { spans: Vec<HeldSpan<B>> },
}

/// A running state as it was at one point: immutable, from which any number of sequences can go on.
pub struct FrozenState<B: Backend> {
    pub(crate) layers: Vec<FrozenLayer<B>>,
    pub(crate) position: i64,
}

impl<B: Backend> FrozenState<B> {
    /// Position of the next token.
    pub fn position(&self) -> i64 {
        self.position
    }

    /// Bytes that it keeps alive. Stores that it shares with entries or other states count in full.
    pub fn bytes(&self) -> usize {
        let layer = |l: &FrozenLayer<B>| match l {
            FrozenLayer::Recurrent { state, window } => recurrent_bytes::<B>(state, window),
            FrozenLayer::Attention { spans } => spans.iter().map(|s| s.kv.kv().bytes()).sum(),
        };
        self.layers.iter().map(layer).sum()
    }
}
