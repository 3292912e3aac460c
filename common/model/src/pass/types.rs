//! What goes into a pass and what comes out.

use std::ops::Range;
use std::sync::Arc;

use hypic_kernels::Backend;
use hypic_state::{ComposeRule, LayerKind, LayerPart, PartSource};

use crate::Model;
use crate::layers::{Layer, Mixer};
use crate::running::{FrozenState, RunningState};

/// What a sequence does in a pass.
pub enum Item<B: Backend> {
    /// Rows: token ids at the next positions.
    Run(Vec<u32>),
    /// Apply an entry.
    Jump(Jump<B>),
    /// Keep the state as it is here.
    Save,
}

/// The application of an entry.
pub struct Jump<B: Backend> {
    /// The entry, whole or in the making.
    pub source: Arc<dyn PartSource<B>>,
    /// Tokens of its body.
    pub tokens: usize,
    /// Position, in the sequence, of the segment's first token (the seam's, not the body's).
    pub origin: i64,
    /// How S changes.
    pub rule: ComposeRule,
}

impl<B: Backend> Clone for Jump<B> {
    fn clone(&self) -> Self {
        Jump { source: self.source.clone(), tokens: self.tokens, origin: self.origin, rule: self.rule }
    }
}

/// Which rows' logits are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    /// None.
    None,
    /// The last row's.
    Last,
    /// Every row's.
    All,
}

/// Takes the parts of an entry in the making.
pub trait PartSink<B: Backend>: Send + Sync {
    /// K and V of the tokens `tokens` of the body are final in attention layer `layer`: they are the rows `rows` of `own`.
    /// Called in every pass that has rows of the body, the last one included, whose [`part`](Self::part) of the same
    /// layer follows at once. The ranges of a layer ascend and leave nothing out.
    fn kv(&self, _backend: &B, _layer: usize, _tokens: Range<usize>, _own: &B::Kv, _rows: Range<usize>) {}

    /// The part of layer `layer` is final. Called once per layer, in order.
    fn part(&self, layer: usize, part: LayerPart<B>);
}

/// The body of a sequence's rows, while it is made into an entry; goes along over passes.
pub struct Capture<B: Backend> {
    /// Index, among the sequence's own rows, of the body's first.
    pub body: usize,
    /// Whether this pass has the body's last row.
    pub last: bool,
    /// Where parts go.
    pub sink: Arc<dyn PartSink<B>>,
    pub(super) carries: Vec<Option<B::Carry>>,
}

impl<B: Backend> Capture<B> {
    /// Capture all rows from row `body` on.
    pub fn new(backend: &B, model: &Model<B>, body: usize, last: bool, sink: Arc<dyn PartSink<B>>) -> Self {
        let carry = |layer: &Layer<B>| match &layer.mixer.body {
            Mixer::Recurrent(m) => Some(backend.carry(m.shape, m.form)),
            Mixer::Attention(_) | Mixer::Latent(_) => None,
        };
        Capture { body, last, sink, carries: model.layers().iter().map(carry).collect() }
    }
}

/// One sequence of a pass.
pub struct Sequence<B: Backend> {
    /// Its state before the pass.
    pub state: RunningState<B>,
    /// What it does, in order.
    pub items: Vec<Item<B>>,
    /// Whether its rows become an entry. Then it has a single run and no jump.
    pub capture: Option<Capture<B>>,
    /// Which logits it wants.
    pub logits: Logits,
}

/// One sequence after a pass.
pub struct SequenceOutput<B: Backend> {
    /// Its state after the pass.
    pub state: RunningState<B>,
    /// One frozen state per [`Item::Save`], in order.
    pub saved: Vec<FrozenState<B>>,
    /// The capture, to go on with in the next pass.
    pub capture: Option<Capture<B>>,
    /// Its rows of the pass's logits.
    pub logits: Range<usize>,
}

/// What a pass leaves.
pub struct PassOutput<B: Backend> {
    /// The sequences, in the order they were given.
    pub sequences: Vec<SequenceOutput<B>>,
    /// `[rows, vocab]`: the logits that were asked for, if any.
    pub logits: Option<B::Tensor>,
}

/// How far a call of [`advance`](super::Pass::advance)(crate::Pass::advance) came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Through one more layer.
    Layer,
    /// Not at all: a part of this layer is on its way.
    Waiting {
        /// Index of the layer.
        layer: usize,
    },
    /// Through the last layer: [`finish`](super::Pass::finish)(crate::Pass::finish) may be called.
    Done,
}

/// Why a pass cannot go on.
#[derive(Clone, Debug, thiserror::Error)]
pub enum PassError {
    /// An entry's part will not come.
    #[error("sequence {sequence}: entry {jump}, layer {layer}: {reason}")]
    Part {
        /// Index of the sequence.
        sequence: usize,
        /// Index of the jump among the sequence's.
        jump: usize,
        /// Index of the layer.
        layer: usize,
        /// What its source says.
        reason: Arc<str>,
    },
    /// A source gave a part of the wrong kind.
    #[error("sequence {sequence}: entry {jump}, layer {layer}: expected a part of kind {expected:?}")]
    Kind {
        /// Index of the sequence.
        sequence: usize,
        /// Index of the jump among the sequence's.
        jump: usize,
        /// Index of the layer.
        layer: usize,
        /// What the layer needs.
        expected: LayerKind,
    },
}
