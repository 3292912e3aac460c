//! The pass: one walk of a batch of rows through all layers.
//!
//! Isolated prefill, full recompute, continuing a prefix, composition and decoding are passes that
//! differ in their items only. A pass advances layer by layer and can stop between two of them: it asks for
//! an entry's part when it reaches that layer (and reports [`Progress::Waiting`] while the part is
//! still on its way), and hands a captured part out as soon as it is final. Dropping a pass drops the
//! sequences in it; nothing else holds them.

use std::ops::Range;
use std::sync::Arc;

use hypic_kernels::{Backend, ConvFold, ConvStep, DeviceTensor, Fold, Step};
use hypic_state::{ComposeRule, LayerKind, LayerPart, PartSource, PartState, RecurrentPart};

use crate::Model;
use crate::layers::{AttentionSequence, Layer, Mixer, Workspace};
use crate::running::{FrozenLayer, FrozenState, HeldSpan, LayerState, RunningState, SharedKv};

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
        Jump {
            source: self.source.clone(),
            tokens: self.tokens,
            origin: self.origin,
            rule: self.rule,
        }
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
    carries: Vec<Option<B::Carry>>,
}

impl<B: Backend> Capture<B> {
    /// Capture all rows from row `body` on.
    pub fn new(backend: &B, model: &Model<B>, body: usize, last: bool, sink: Arc<dyn PartSink<B>>) -> Self {
        let carry = |layer: &Layer<B>| match &layer.mixer {
            Mixer::GatedDelta(m) => Some(backend.carry(m.shape.heads, m.shape.d_k, m.shape.d_v)),
            Mixer::Attention(_) => None,
        };
        Capture {
            body,
            last,
            sink,
            carries: model.layers().iter().map(carry).collect(),
        }
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

/// How far a call of [`Pass::advance`] came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Through one more layer.
    Layer,
    /// Not at all: a part of this layer is on its way.
    Waiting {
        /// Index of the layer.
        layer: usize,
    },
    /// Through the last layer: [`Pass::finish`] may be called.
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

/// The same walk as the items, with rows numbered.
#[derive(Clone)]
enum Stop {
    /// Rows of the batch.
    Rows(Range<usize>),
    /// Index among the sequence's jumps.
    Jump(usize),
    Save,
}

struct SavePoint {
    /// Rows in the sequence's own stores.
    own_rows: usize,
    /// Jumps of this pass before it.
    jumps: usize,
    position: i64,
}

struct Walker<B: Backend> {
    state: RunningState<B>,
    stops: Vec<Stop>,
    jumps: Vec<Jump<B>>,
    /// Per jump, the sequence's first row behind it.
    seen_from: Vec<usize>,
    rows: Range<usize>,
    positions: Vec<i64>,
    save_points: Vec<SavePoint>,
    /// Per save, the layers so far.
    saved: Vec<Vec<FrozenLayer<B>>>,
    /// Spans per attention layer before this pass.
    spans_before: Option<usize>,
    capture: Option<Capture<B>>,
    logits: Logits,
}

impl<B: Backend> Walker<B> {
    fn new(sequence: Sequence<B>, first_row: usize, ids: &mut Vec<u32>) -> Self {
        let Sequence {
            state,
            items,
            capture,
            logits,
        } = sequence;
        debug_assert!(
            capture.is_none() || matches!(items.as_slice(), [Item::Run(_)]),
            "a captured sequence is a single run"
        );
        let mut walker = Walker {
            stops: Vec::with_capacity(items.len()),
            jumps: Vec::new(),
            seen_from: Vec::new(),
            rows: first_row..first_row,
            positions: Vec::new(),
            save_points: Vec::new(),
            saved: Vec::new(),
            spans_before: None,
            capture,
            logits,
            state,
        };
        let mut position = walker.state.position;
        for item in items {
            match item {
                Item::Run(run) => {
                    let from = walker.rows.end;
                    walker.rows.end += run.len();
                    walker.stops.push(Stop::Rows(from..walker.rows.end));
                    walker.positions.extend(position..position + run.len() as i64);
                    position += run.len() as i64;
                    ids.extend(run);
                }
                Item::Jump(jump) => {
                    position += jump.tokens as i64;
                    walker.stops.push(Stop::Jump(walker.jumps.len()));
                    walker.seen_from.push(walker.positions.len());
                    walker.jumps.push(jump);
                }
                Item::Save => {
                    walker.stops.push(Stop::Save);
                    walker.saved.push(Vec::new());
                    let own_rows = walker.state.own_rows + walker.positions.len();
                    walker.save_points.push(SavePoint {
                        own_rows,
                        jumps: walker.jumps.len(),
                        position,
                    });
                }
            }
        }
        walker.state.position = position;
        walker
    }

    /// First row of the batch that belongs to the body being captured, if any does.
    fn body_from(&self) -> Option<usize> {
        let capture = self.capture.as_ref()?;
        let from = self.rows.start + capture.body.saturating_sub(self.state.own_rows);
        (from < self.rows.end).then_some(from)
    }

    /// This layer's part of every jump, or `None` while one is on its way.
    fn parts(&self, layer: usize, sequence: usize) -> Result<Option<Vec<Arc<LayerPart<B>>>>, PassError> {
        let mut parts = Vec::with_capacity(self.jumps.len());
        for (jump, j) in self.jumps.iter().enumerate() {
            match j.source.part(layer) {
                PartState::Ready(part) => parts.push(part),
                PartState::Pending => return Ok(None),
                PartState::Failed(reason) => {
                    return Err(PassError::Part {
                        sequence,
                        jump,
                        layer,
                        reason,
                    });
                }
            }
        }
        Ok(Some(parts))
    }
}

/// A batch of sequences on its way through the layers.
pub struct Pass<B: Backend> {
    walkers: Vec<Walker<B>>,
    ids: Vec<u32>,
    /// `[rows, hidden]`: the residual stream; `None` before the embedding.
    x: Option<B::Tensor>,
    layer: usize,
}

impl<B: Backend> Pass<B> {
    /// A pass over these sequences.
    pub fn new(sequences: Vec<Sequence<B>>) -> Self {
        let mut ids = Vec::new();
        let mut walkers = Vec::with_capacity(sequences.len());
        for sequence in sequences {
            let walker = Walker::new(sequence, ids.len(), &mut ids);
            walkers.push(walker);
        }
        Pass {
            walkers,
            ids,
            x: None,
            layer: 0,
        }
    }

    /// Rows of the batch.
    pub fn rows(&self) -> usize {
        self.ids.len()
    }

    /// Layers it has been through.
    pub fn layers_done(&self) -> usize {
        self.layer
    }

    /// `[rows, hidden]`: the residual stream as it is now, once the pass has begun.
    pub fn hidden(&self) -> Option<&B::Tensor> {
        self.x.as_ref()
    }

    /// Compute the next layer.
    ///
    /// # Errors
    /// If a part of an entry will not come. The pass is then of no more use.
    pub fn advance(&mut self, backend: &B, model: &Model<B>, ws: &mut Workspace<B>) -> Result<Progress, PassError> {
        let layer = self.layer;
        if layer == model.layers().len() {
            return Ok(Progress::Done);
        }
        let mut parts = Vec::with_capacity(self.walkers.len());
        for (sequence, walker) in self.walkers.iter().enumerate() {
            match walker.parts(layer, sequence)? {
                Some(found) => parts.push(found),
                None => return Ok(Progress::Waiting { layer }),
            }
        }
        let weights = &model.layers()[layer];
        check_kinds(&parts, layer, model.layout()[layer])?;
        let x = self.x.get_or_insert_with(|| {
            let mut x = backend.alloc(&[self.ids.len(), model.spec().hidden]);
            backend.embed(model.embedding(), &self.ids, &mut x);
            x
        });
        match &weights.mixer {
            Mixer::GatedDelta(mixer) => {
                let (mut windows, mut folds) = recurrent_folds(backend, &mut self.walkers, &parts, layer);
                mixer.forward(backend, &weights.mixer_norm, ws, &mut windows, &mut folds, x);
            }
            Mixer::Attention(mixer) => {
                let sequences = attention_sequences(&mut self.walkers, parts, layer);
                mixer.forward(backend, &weights.mixer_norm, ws, sequences, x);
            }
        }
        for walker in &mut self.walkers {
            emit_captured(backend, walker, layer);
        }
        weights.mlp.forward(backend, &weights.mlp_norm, ws, x);
        self.layer += 1;
        Ok(if self.layer == model.layers().len() {
            Progress::Done
        } else {
            Progress::Layer
        })
    }

    /// The states, and the logits that were asked for.
    ///
    /// # Panics
    /// If the pass is not done.
    pub fn finish(self, backend: &B, model: &Model<B>, ws: &mut Workspace<B>) -> PassOutput<B> {
        assert_eq!(
            self.layer,
            model.layers().len(),
            "a pass is finished after its last layer"
        );
        let mut wanted = Vec::new();
        let mut sequences = Vec::with_capacity(self.walkers.len());
        for walker in self.walkers {
            let from = wanted.len();
            match walker.logits {
                Logits::None => {}
                Logits::Last => wanted.extend(walker.rows.clone().last()),
                Logits::All => wanted.extend(walker.rows.clone()),
            }
            sequences.push(end_walk(backend, walker, from..wanted.len()));
        }
        let logits = self.x.filter(|_| !wanted.is_empty()).map(|x| {
            let norm = model.final_norm();
            backend.gather(&x, &wanted, &mut ws.chosen);
            backend.rms_norm(&ws.chosen, &norm.weight, norm.eps, &mut ws.normed);
            let mut logits = backend.alloc(&[wanted.len(), model.spec().vocab]);
            backend.linear(model.head(), &ws.normed, &mut logits);
            logits
        });
        debug_assert!(logits.as_ref().is_none_or(|l| l.rows() == wanted.len()));
        PassOutput { sequences, logits }
    }

    /// Advance until done; no part may be on its way.
    ///
    /// # Errors
    /// As [`advance`](Self::advance).
    ///
    /// # Panics
    /// If a part is on its way.
    pub fn run(mut self, backend: &B, model: &Model<B>, ws: &mut Workspace<B>) -> Result<PassOutput<B>, PassError> {
        loop {
            match self.advance(backend, model, ws)? {
                Progress::Layer => {}
                Progress::Waiting { layer } => panic!("a part of layer {layer} is on its way"),
                Progress::Done => return Ok(self.finish(backend, model, ws)),
            }
        }
    }
}

fn check_kinds<B: Backend>(
    parts: &[Vec<Arc<LayerPart<B>>>],
    layer: usize,
    expected: LayerKind,
) -> Result<(), PassError> {
    for (sequence, of_sequence) in parts.iter().enumerate() {
        if let Some(jump) = of_sequence.iter().position(|p| p.kind() != expected) {
            return Err(PassError::Kind {
                sequence,
                jump,
                layer,
                expected,
            });
        }
    }
    Ok(())
}

fn recurrent_part<B: Backend>(part: &LayerPart<B>) -> &RecurrentPart<B> {
    match part {
        LayerPart::Recurrent(part) => part,
        LayerPart::Attention(_) => unreachable!("kinds were checked"),
    }
}

/// Every sequence's walk through a recurrent layer: its items in order.
fn recurrent_folds<'a, B: Backend>(
    backend: &B,
    walkers: &'a mut [Walker<B>],
    parts: &'a [Vec<Arc<LayerPart<B>>>],
    layer: usize,
) -> (Vec<ConvFold<'a, B>>, Vec<Fold<'a, B>>) {
    let mut windows = Vec::with_capacity(walkers.len());
    let mut folds = Vec::with_capacity(walkers.len());
    for (walker, parts) in walkers.iter_mut().zip(parts) {
        let body_from = walker.body_from();
        let LayerState::Recurrent { state, window } = &mut walker.state.layers[layer] else {
            unreachable!("a running state has the layout of its model")
        };
        for saved in &mut walker.saved {
            let like = |t: &B::Tensor| backend.alloc(t.shape());
            saved.push(FrozenLayer::Recurrent {
                state: like(state),
                window: like(window),
            });
        }
        let mut slots = walker.saved.iter_mut().map(|layers| match layers.last_mut() {
            Some(FrozenLayer::Recurrent { state, window }) => (state, window),
            _ => unreachable!("just pushed"),
        });
        let mut carry = walker.capture.as_mut().and_then(|c| c.carries[layer].as_mut());
        let mut conv = ConvFold {
            window,
            steps: Vec::with_capacity(walker.stops.len()),
        };
        let mut fold = Fold {
            state,
            steps: Vec::with_capacity(walker.stops.len() + 1),
        };
        for stop in &walker.stops {
            match stop {
                Stop::Rows(rows) => {
                    conv.steps.push(ConvStep::Rows(rows.clone()));
                    let cut = body_from.map_or(rows.end, |b| b.clamp(rows.start, rows.end));
                    if rows.start < cut {
                        fold.steps.push(Step::Rows {
                            rows: rows.start..cut,
                            carry: None,
                        });
                    }
                    if cut < rows.end {
                        fold.steps.push(Step::Rows {
                            rows: cut..rows.end,
                            carry: carry.take(),
                        });
                    }
                }
                Stop::Jump(jump) => {
                    let part = recurrent_part(&parts[*jump]);
                    if let Some(tail) = &part.tail {
                        conv.steps.push(ConvStep::Jump(tail));
                    }
                    fold.steps.push(Step::Jump {
                        rule: walker.jumps[*jump].rule,
                        part,
                    });
                }
                Stop::Save => {
                    let (state, window) = slots.next().expect("a slot per save");
                    conv.steps.push(ConvStep::Save(window));
                    fold.steps.push(Step::Save(state));
                }
            }
        }
        windows.push(conv);
        folds.push(fold);
    }
    (windows, folds)
}

/// Every sequence's view in an attention layer; the bodies jumped over become part of it.
fn attention_sequences<B: Backend>(
    walkers: &mut [Walker<B>],
    parts: Vec<Vec<Arc<LayerPart<B>>>>,
    layer: usize,
) -> Vec<AttentionSequence<'_, B>> {
    let mut sequences = Vec::with_capacity(walkers.len());
    for (walker, parts) in walkers.iter_mut().zip(parts) {
        let LayerState::Attention { spans, own } = &mut walker.state.layers[layer] else {
            unreachable!("a running state has the layout of its model")
        };
        let before = spans.len();
        walker.spans_before = Some(before);
        for (part, jump) in parts.into_iter().zip(&walker.jumps) {
            spans.push(HeldSpan {
                kv: SharedKv::Body(part),
                range: 0..jump.tokens,
                origin: jump.origin,
            });
        }
        let seen_from = |i: usize| if i < before { 0 } else { walker.seen_from[i - before] };
        sequences.push(AttentionSequence {
            rows: walker.rows.clone(),
            positions: &walker.positions,
            spans: spans
                .iter()
                .enumerate()
                .map(|(i, s)| s.seen_from(seen_from(i)))
                .collect(),
            own,
        });
    }
    sequences
}

/// Hand out this layer's part of the body that ends in this pass.
fn emit_captured<B: Backend>(backend: &B, walker: &mut Walker<B>, layer: usize) {
    let rows = walker.state.own_rows + walker.rows.len();
    let Some(capture) = walker.capture.as_mut().filter(|c| c.last) else {
        return;
    };
    let part = match &walker.state.layers[layer] {
        LayerState::Recurrent { state, window } => {
            let carry = capture.carries[layer].take().expect("a body ends once");
            let (transition, body) = backend.finish(carry, state);
            // A layer without a convolution has no window to pass on.
            let tail = (!window.shape().contains(&0)).then(|| backend.duplicate(window));
            LayerPart::Recurrent(RecurrentPart {
                transition,
                state: body,
                tail,
            })
        }
        LayerState::Attention { own, .. } => LayerPart::Attention(backend.kv_copy(own, capture.body..rows)),
    };
    capture.sink.part(layer, part);
}

fn end_walk<B: Backend>(backend: &B, walker: Walker<B>, logits: Range<usize>) -> SequenceOutput<B> {
    let Walker {
        mut state,
        rows,
        save_points,
        mut saved,
        spans_before,
        capture,
        ..
    } = walker;
    state.own_rows += rows.len();
    if !save_points.is_empty() {
        for (layer, layer_state) in state.layers.iter_mut().enumerate() {
            let LayerState::Attention { spans, own } = layer_state else {
                continue;
            };
            let shape = backend.kv_shape(own);
            let frozen = Arc::new(std::mem::replace(own, backend.kv(shape)));
            let own_span = |rows: usize| HeldSpan {
                kv: SharedKv::Frozen(frozen.clone()),
                range: 0..rows,
                origin: 0,
            };
            for (point, layers) in save_points.iter().zip(&mut saved) {
                let mut seen = spans[..spans_before.unwrap_or(0) + point.jumps].to_vec();
                if point.own_rows > 0 {
                    seen.push(own_span(point.own_rows));
                }
                layers.insert(layer, FrozenLayer::Attention { spans: seen });
            }
            if state.own_rows > 0 {
                spans.push(own_span(state.own_rows));
            }
        }
        state.own_rows = 0;
    }
    let saved = saved.into_iter().zip(save_points);
    let saved = saved
        .map(|(layers, point)| FrozenState {
            layers,
            position: point.position,
        })
        .collect();
    SequenceOutput {
        state,
        saved,
        capture,
        logits,
    }
}
