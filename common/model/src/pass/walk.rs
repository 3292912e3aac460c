//! One sequence in a pass: its rows among the batch's, and its walk through one layer.
//!
//! Here T is made (a captured sequence's body rows are folded with a carry) and applied (a jump is a step
//! of the fold, its K and V a span of the view).

use std::ops::Range;
use std::sync::Arc;

use hypic_kernels::{Backend, ConvFold, ConvStep, DeviceTensor, Fold, Step, Turn};
use hypic_state::{LayerPart, PartState, RecurrentPart};

use super::types::{Capture, Item, Jump, Logits, PassError, Sequence, SequenceOutput};
use crate::layers::AttentionSequence;
use crate::running::{FrozenLayer, FrozenState, HeldSpan, LayerState, RunningState, SharedKv};

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

pub(super) struct Walker<B: Backend> {
    state: RunningState<B>,
    stops: Vec<Stop>,
    jumps: Vec<Jump<B>>,
    /// Per jump, the sequence's first row behind it.
    seen_from: Vec<usize>,
    pub rows: Range<usize>,
    pub positions: Vec<i64>,
    save_points: Vec<SavePoint>,
    /// Per save, the layers so far.
    saved: Vec<Vec<FrozenLayer<B>>>,
    /// Spans per attention layer before this pass.
    spans_before: Option<usize>,
    capture: Option<Capture<B>>,
    pub logits: Logits,
}

impl<B: Backend> Walker<B> {
    pub fn new(sequence: Sequence<B>, first_row: usize, ids: &mut Vec<u32>) -> Self {
        let Sequence { state, items, capture, logits } = sequence;
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
                    walker.save_points.push(SavePoint { own_rows, jumps: walker.jumps.len(), position });
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
    pub fn parts(&self, layer: usize, sequence: usize) -> Result<Option<Vec<Arc<LayerPart<B>>>>, PassError> {
        let mut parts = Vec::with_capacity(self.jumps.len());
        for (jump, j) in self.jumps.iter().enumerate() {
            match j.source.part(layer) {
                PartState::Ready(part) => parts.push(part),
                PartState::Pending => return Ok(None),
                PartState::Failed(reason) => {
                    return Err(PassError::Part { sequence, jump, layer, reason });
                }
            }
        }
        Ok(Some(parts))
    }
}

fn recurrent_part<B: Backend>(part: &LayerPart<B>) -> &RecurrentPart<B> {
    match part {
        LayerPart::Recurrent(part) => part,
        LayerPart::Attention(_) => unreachable!("kinds were checked"),
    }
}

/// Every sequence's walk through a recurrent layer: its items in order. `rope` is the layer's, where it rotates; without a
/// convolution there are no walks of windows.
pub(super) fn recurrent_folds<'a, B: Backend>(
    backend: &B,
    walkers: &'a mut [Walker<B>],
    parts: &'a [Vec<Arc<LayerPart<B>>>],
    layer: usize,
    rope: Option<&'a B::Rope>,
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
            saved.push(FrozenLayer::Recurrent { state: like(state), window: window.as_ref().map(like) });
        }
        let mut slots = walker.saved.iter_mut().map(|layers| match layers.last_mut() {
            Some(FrozenLayer::Recurrent { state, window }) => (state, window),
            _ => unreachable!("just pushed"),
        });
        let mut carry = walker.capture.as_mut().and_then(|c| c.carries[layer].as_mut());
        let mut conv = Vec::with_capacity(walker.stops.len());
        let mut fold = Fold { state, steps: Vec::with_capacity(walker.stops.len() + 1) };
        for stop in &walker.stops {
            match stop {
                Stop::Rows(rows) => {
                    conv.push(ConvStep::Rows(rows.clone()));
                    let cut = body_from.map_or(rows.end, |b| b.clamp(rows.start, rows.end));
                    if rows.start < cut {
                        fold.steps.push(Step::Rows { rows: rows.start..cut, carry: None });
                    }
                    if cut < rows.end {
                        fold.steps.push(Step::Rows { rows: cut..rows.end, carry: carry.take() });
                    }
                }
                Stop::Jump(jump) => {
                    let part = recurrent_part(&parts[*jump]);
                    if let Some(tail) = &part.tail {
                        conv.push(ConvStep::Jump(tail));
                    }
                    let Jump { rule, origin, .. } = walker.jumps[*jump];
                    fold.steps.push(Step::Jump { rule, part, turn: rope.map(|rope| Turn { rope, by: origin }) });
                }
                Stop::Save => {
                    let (state, window) = slots.next().expect("a slot per save");
                    conv.extend(window.as_mut().map(ConvStep::Save));
                    fold.steps.push(Step::Save(state));
                }
            }
        }
        windows.extend(window.as_mut().map(|window| ConvFold { window, steps: conv }));
        folds.push(fold);
    }
    (windows, folds)
}

/// Every sequence's view in an attention layer; the bodies jumped over become part of it.
pub(super) fn attention_sequences<B: Backend>(
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
            spans.push(HeldSpan { kv: SharedKv::Body(part), range: 0..jump.tokens, origin: jump.origin });
        }
        let seen_from = |i: usize| if i < before { 0 } else { walker.seen_from[i - before] };
        sequences.push(AttentionSequence {
            rows: walker.rows.clone(),
            positions: &walker.positions,
            spans: spans.iter().enumerate().map(|(i, s)| s.seen_from(seen_from(i))).collect(),
            own,
        });
    }
    sequences
}

/// Hand out what this pass has made final in this layer of the body: K and V of its rows; the part, if the body ends here.
pub(super) fn emit_captured<B: Backend>(backend: &B, walker: &mut Walker<B>, layer: usize) {
    let before = walker.state.own_rows;
    let rows = before + walker.rows.len();
    let Some(capture) = walker.capture.as_mut() else {
        return;
    };
    if let LayerState::Attention { own, .. } = &walker.state.layers[layer] {
        let from = before.max(capture.body);
        if from < rows {
            let tokens = from - capture.body..rows - capture.body;
            capture.sink.kv(backend, layer, tokens, own, from..rows);
        }
    }
    if !capture.last {
        return;
    }
    let part = match &walker.state.layers[layer] {
        LayerState::Recurrent { state, window } => {
            let carry = capture.carries[layer].take().expect("a body ends once");
            let (transition, body) = backend.finish(carry, state);
            // A convolution over the present alone has no window to pass on either.
            let tail = window.as_ref().filter(|w| !w.shape().contains(&0)).map(|w| backend.duplicate(w));
            LayerPart::Recurrent(RecurrentPart { transition, state: body, tail })
        }
        LayerState::Attention { own, .. } => LayerPart::Attention(backend.kv_copy(own, capture.body..rows)),
    };
    capture.sink.part(layer, part);
}

pub(super) fn end_walk<B: Backend>(backend: &B, walker: Walker<B>, logits: Range<usize>) -> SequenceOutput<B> {
    let Walker { mut state, rows, save_points, mut saved, spans_before, capture, .. } = walker;
    state.own_rows += rows.len();
    if !save_points.is_empty() {
        for (layer, layer_state) in state.layers.iter_mut().enumerate() {
            let LayerState::Attention { spans, own } = layer_state else {
                continue;
            };
            let shape = backend.kv_shape(own);
            let frozen = Arc::new(std::mem::replace(own, backend.kv(shape)));
            let own_span = |rows: usize| HeldSpan { kv: SharedKv::Frozen(frozen.clone()), range: 0..rows, origin: 0 };
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
    let saved = saved.map(|(layers, point)| FrozenState { layers, position: point.position }).collect();
    SequenceOutput { state, saved, capture, logits }
}
