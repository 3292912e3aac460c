//! Entries and the layer parts that they are made of.
//!
//! An [`Entry`] can only be built whole: its constructor takes one part per layer and refuses a set
//! in which a layer is missing or of the wrong kind, and nothing can be taken out of it but shared
//! references. So K and V of an entry cannot be held without the recurrent parts.

use std::fmt::Debug;
use std::sync::Arc;

use crate::Transition;

/// A memory in which tensors live.
pub trait Storage: Send + Sync + 'static {
    /// A dense tensor of numbers.
    type Tensor: Stored;
    /// K and V of a stretch of tokens in one full-attention layer.
    type Kv: Stored;
}

/// Something that occupies memory.
pub trait Stored: Send + Sync + 'static {
    /// Bytes it occupies.
    fn bytes(&self) -> usize;
}

/// What an entry holds of one linear-attention layer.
pub struct RecurrentPart<S: Storage> {
    /// Product of all token transitions of the body, per head.
    pub transition: Transition<S::Tensor>,
    /// `[heads, d_k, d_v]`: the state the body ends in when it starts from zero.
    pub state: S::Tensor,
    /// `[kernel - 1, channels]`: the last raw convolution inputs, oldest first; `None` where the
    /// layer has no convolution.
    pub tail: Option<S::Tensor>,
}

/// What an entry holds of one layer.
pub enum LayerPart<S: Storage> {
    /// Of a linear-attention layer.
    Recurrent(RecurrentPart<S>),
    /// Of a full-attention layer: K (rotated at segment-local positions) and V of the body.
    Attention(S::Kv),
}

impl<S: Storage> LayerPart<S> {
    /// Which kind of layer the part belongs to.
    pub fn kind(&self) -> LayerKind {
        match self {
            LayerPart::Recurrent(_) => LayerKind::Recurrent,
            LayerPart::Attention(_) => LayerKind::Attention,
        }
    }

    /// Bytes it occupies.
    pub fn bytes(&self) -> usize {
        match self {
            LayerPart::Recurrent(p) => {
                p.transition.tensor().bytes() + p.state.bytes() + p.tail.as_ref().map_or(0, Stored::bytes)
            }
            LayerPart::Attention(kv) => kv.bytes(),
        }
    }
}

/// The two kinds of layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerKind {
    /// Keeps one recurrent state per sequence.
    Recurrent,
    /// Keeps K and V of every token.
    Attention,
}

/// Which parts an entry of a model has: the kind of every layer, in order.
pub type EntryLayout = Arc<[LayerKind]>;

/// Why a set of parts is no entry.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EntryError {
    /// Wrong number of parts.
    #[error("an entry of this model has {expected} layer parts, got {got}")]
    Layers {
        /// Layers of the model.
        expected: usize,
        /// Parts given.
        got: usize,
    },
    /// A part of the wrong kind.
    #[error("layer {layer} needs a part of kind {expected:?}, got {got:?}")]
    Kind {
        /// Index of the layer.
        layer: usize,
        /// What the layout says.
        expected: LayerKind,
        /// What was given.
        got: LayerKind,
    },
    /// The segment has no body.
    #[error("a segment of {tokens} tokens has no body behind a seam of {seam}")]
    NoBody {
        /// Tokens of the segment.
        tokens: usize,
        /// Width of the seam.
        seam: usize,
    },
}

/// All that is cached of one segment: immutable, shared by reference count.
pub struct Entry<S: Storage> {
    tokens: Arc<[u32]>,
    seam: usize,
    parts: Vec<Arc<LayerPart<S>>>,
    bytes: usize,
}

impl<S: Storage> Entry<S> {
    /// An entry of the segment `tokens`, whose first `seam` tokens are not part of the body.
    ///
    /// # Errors
    /// If the parts do not match `layout`, or the segment has no body.
    pub fn new(
        tokens: Arc<[u32]>,
        seam: usize,
        layout: &EntryLayout,
        parts: Vec<Arc<LayerPart<S>>>,
    ) -> Result<Self, EntryError> {
        if tokens.len() <= seam {
            return Err(EntryError::NoBody { tokens: tokens.len(), seam });
        }
        if parts.len() != layout.len() {
            return Err(EntryError::Layers { expected: layout.len(), got: parts.len() });
        }
        for (layer, (part, &expected)) in parts.iter().zip(layout.iter()).enumerate() {
            let got = part.kind();
            if got != expected {
                return Err(EntryError::Kind { layer, expected, got });
            }
        }
        let bytes = parts.iter().map(|p| p.bytes()).sum::<usize>() + tokens.len() * size_of::<u32>();
        Ok(Entry { tokens, seam, parts, bytes })
    }

    /// All token ids of the segment, seam included.
    pub fn tokens(&self) -> &Arc<[u32]> {
        &self.tokens
    }

    /// Width of the seam in tokens.
    pub fn seam(&self) -> usize {
        self.seam
    }

    /// Tokens of the body.
    pub fn body_len(&self) -> usize {
        self.tokens.len() - self.seam
    }

    /// The part of layer `layer`.
    pub fn part(&self, layer: usize) -> &Arc<LayerPart<S>> {
        &self.parts[layer]
    }

    /// All parts, in layer order.
    pub fn parts(&self) -> &[Arc<LayerPart<S>>] {
        &self.parts
    }

    /// Bytes it occupies.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl<S: Storage> Debug for Entry<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Entry({} tokens, seam {}, {} layers, {} bytes)",
            self.tokens.len(),
            self.seam,
            self.parts.len(),
            self.bytes
        )
    }
}

/// Whether a layer part can be had yet.
pub enum PartState<S: Storage> {
    /// It is there.
    Ready(Arc<LayerPart<S>>),
    /// It is being made or on its way.
    Pending,
    /// It will not come; the reason, for logs.
    Failed(Arc<str>),
}

impl<S: Storage> Clone for PartState<S> {
    fn clone(&self) -> Self {
        match self {
            PartState::Ready(part) => PartState::Ready(part.clone()),
            PartState::Pending => PartState::Pending,
            PartState::Failed(reason) => PartState::Failed(reason.clone()),
        }
    }
}

impl<S: Storage> Debug for PartState<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            PartState::Ready(part) => write!(f, "Ready({:?})", part.kind()),
            PartState::Pending => f.write_str("Pending"),
            PartState::Failed(reason) => write!(f, "Failed({reason})"),
        }
    }
}

/// Where a composition gets an entry's parts from: a whole entry, or one in the making.
pub trait PartSource<S: Storage>: Send + Sync {
    /// The part of layer `layer`, without waiting.
    fn part(&self, layer: usize) -> PartState<S>;
}

impl<S: Storage> PartSource<S> for Entry<S> {
    fn part(&self, layer: usize) -> PartState<S> {
        PartState::Ready(self.parts[layer].clone())
    }
}
