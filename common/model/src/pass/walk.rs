//! One sequence in a pass: its rows among the batch's, and its walk through one layer.
//!
//! Here T is made (a captured sequence's body rows are folded with a carry) and applied (a jump is a step
//! of the fold, its K and V a span of the view).

use std::ops::Range;
use std::sync::Arc;

use hypic_kernels::{Backend, ConvFold, ConvStep, DeviceTensor, Fold, Positions, Step, Turn};
use hypic_state::{LayerPart, PartState, RecurrentPart};

use super::types::{Capture, Item, Jump, Logits, PassError, Sequence, SequenceOutput};
use crate::layers::{AttentionSequence, Seen, Stretch, Walks};
use crate::running::{FrozenLayer, FrozenState, HeldSpan, LayerState, RunningState, SharedKv};
use crate::spec::DynamicNtk;

/// The same walk as the items, with rows numbered.
#[derive(Clone)]
enum Stop {
    /// Rows of the batch.
    Rows(Range<usize>),
    /// Index among the sequence's jumps.
    Jump(usize),
    Save,
}

pub(super) struct Walker<B: Backend> {
    state: RunningState<B>,
    stops: Vec<Stop>,
    jumps: Vec<Jump<B>>,
    pub rows: Range<usize>,
    positions: Vec<i64>,
    /// Per save, its position and the layers so far.
    saved: Vec<FrozenState<B>>,
    /// Of the attention layer under way: the stores of the rows behind each save.
    stores: Vec<B::Kv>,
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
            rows: first_row..first_row,
            positions: Vec::new(),
            saved: Vec::new(),
            stores: Vec::new(),
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
                    walker.jumps.push(jump);
                }
                Item::Save => {
                    walker.stops.push(Stop::Save);
                    walker.saved.push(FrozenState { layers: Vec::new(), position });
                }
            }
        }
        walker.state.position = position;
        walker
    }

    /// By how much embeddings that change so are stretched for its rows.
    pub fn ntk_alpha(&self, dynamic: Option<DynamicNtk>) -> f64 {
        let tokens = usize::try_from(self.state.position).unwrap_or(0).max(self.state.expected);
        let alpha = dynamic.map_or(1.0, |dynamic| dynamic.alpha(tokens));
        debug_assert!(alpha == 1.0 || self.jumps.is_empty(), "entries are of other lengths");
        alpha
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
pub(super) fn recurrent_walks<'a, B: Backend>(
    backend: &B,
    walkers: &'a mut [Walker<B>],
    parts: &'a [Vec<Arc<LayerPart<B>>>],
    layer: usize,
    rope: Option<&'a B::Rope>,
    dynamic: Option<DynamicNtk>,
) -> Walks<'a, B> {
    let mut walks = Walks { positions: Vec::new(), windows: Vec::new(), states: Vec::new() };
    for (walker, parts) in walkers.iter_mut().zip(parts) {
        walks.positions.push(Positions { at: &walker.positions, ntk_alpha: walker.ntk_alpha(dynamic) });
        let body_from = walker.body_from();
        let LayerState::Recurrent { state, window } = &mut walker.state.layers[layer] else {
            unreachable!("a running state has the layout of its model")
        };
        for saved in &mut walker.saved {
            let like = |t: &B::Tensor| backend.alloc(t.shape());
            saved.layers.push(FrozenLayer::Recurrent { state: like(state), window: window.as_ref().map(like) });
        }
        let mut slots = walker.saved.iter_mut().map(|saved| match saved.layers.last_mut() {
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
        walks.windows.extend(window.as_mut().map(|window| ConvFold { window, steps: conv }));
        walks.states.push(fold);
    }
    walks
}

/// Every sequence's view in an attention layer; the bodies jumped over become part of it. Behind the layer,
/// [`save_attention`] must be called.
pub(super) fn attention_sequences<'a, B: Backend>(
    backend: &B,
    walkers: &'a mut [Walker<B>],
    parts: Vec<Vec<Arc<LayerPart<B>>>>,
    layer: usize,
    dynamic: Option<DynamicNtk>,
) -> Vec<AttentionSequence<'a, B>> {
    let mut sequences = Vec::with_capacity(walkers.len());
    for (walker, parts) in walkers.iter_mut().zip(parts) {
        let ntk_alpha = walker.ntk_alpha(dynamic);
        let LayerState::Attention { spans, own } = &mut walker.state.layers[layer] else {
            unreachable!("a running state has the layout of its model")
        };
        let before = spans.len();
        for (part, jump) in parts.into_iter().zip(&walker.jumps) {
            spans.push(HeldSpan { kv: SharedKv::Body(part), range: 0..jump.tokens, origin: jump.origin });
        }
        let shape = backend.kv_shape(own);
        walker.stores = walker.saved.iter().map(|_| backend.kv(shape)).collect();

        let mut seen: Vec<_> = spans[..before].iter().map(|span| Seen::Span(span.seen_from(0))).collect();
        let mut stores = walker.stores.iter_mut();
        let mut stretches = vec![Stretch { rows: walker.rows.start..walker.rows.start, own }];
        for stop in &walker.stops {
            let index = stretches.len() - 1;
            let rows = &mut stretches[index].rows;
            match stop {
                Stop::Rows(run) => rows.end = run.end,
                Stop::Jump(jump) => {
                    seen.push(Seen::Span(spans[before + jump].seen_from(rows.end - walker.rows.start)));
                }
                Stop::Save => {
                    let end = rows.end;
                    seen.push(Seen::Stretch { index, from_row: end - walker.rows.start });
                    stretches.push(Stretch { rows: end..end, own: stores.next().expect("a store per save") });
                }
            }
        }
        let positions = Positions { at: &walker.positions, ntk_alpha };
        sequences.push(AttentionSequence { positions, seen, stretches });
    }
    sequences
}

/// Keep the view of an attention layer at every save, and go on with the rows behind the last one.
pub(super) fn save_attention<B: Backend>(backend: &B, walkers: &mut [Walker<B>], layer: usize) {
    for walker in walkers.iter_mut().filter(|walker| !walker.saved.is_empty()) {
        let LayerState::Attention { spans, own } = &mut walker.state.layers[layer] else {
            unreachable!("a running state has the layout of its model")
        };
        let mut bodies = spans.split_off(spans.len() - walker.jumps.len()).into_iter();
        let (mut stores, mut saved) = (walker.stores.drain(..), walker.saved.iter_mut());
        for stop in &walker.stops {
            match stop {
                Stop::Rows(_) => {}
                Stop::Jump(_) => spans.extend(bodies.next()),
                Stop::Save => {
                    let stretch = std::mem::replace(own, stores.next().expect("a store per save"));
                    let tokens = backend.kv_len(&stretch);
                    if tokens > 0 {
                        spans.push(HeldSpan { kv: SharedKv::Frozen(Arc::new(stretch)), range: 0..tokens, origin: 0 });
                    }
                    let saved = saved.next().expect("a state per save");
                    saved.layers.push(FrozenLayer::Attention { spans: spans.clone() });
                }
            }
        }
    }
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

pub(super) fn end_walk<B: Backend>(walker: Walker<B>, logits: Range<usize>) -> SequenceOutput<B> {
    let Walker { mut state, rows, stops, saved, capture, .. } = walker;
    let behind_last_save = stops.iter().rposition(|stop| matches!(stop, Stop::Save)).map(|save| {
        let rows = stops[save..].iter().map(|stop| if let Stop::Rows(rows) = stop { rows.len() } else { 0 });
        rows.sum::<usize>()
    });
    state.own_rows = behind_last_save.unwrap_or(state.own_rows + rows.len());
    SequenceOutput { state, saved, capture, logits }
}
