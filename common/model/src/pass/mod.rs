//! The pass: one walk of a batch of rows through all layers.
//!
//! Isolated prefill, full recompute, continuing a prefix, composition and decoding are passes that
//! differ in their items only. A pass advances layer by layer and can stop between two of them: it asks for
//! an entry's part when it reaches that layer (and reports [`Progress::Waiting`] while the part is
//! still on its way), and hands a captured part out as soon as it is final, and in every pass K and V of the rows that
//! the pass adds to it. Dropping a pass drops the sequences in it; nothing else holds them.

mod types;
mod walk;

use std::sync::Arc;

use hypic_kernels::{Backend, DeviceTensor};
use hypic_state::{LayerKind, LayerPart};

use crate::Model;
use crate::layers::{Feed, Mixer, Workspace};

pub use types::{Capture, Item, Jump, Logits, PartSink, PassError, PassOutput, Progress, Sequence, SequenceOutput};
use walk::{Walker, attention_sequences, emit_captured, end_walk, recurrent_walks, save_attention};

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
        Pass { walkers, ids, x: None, layer: 0 }
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
            model.embed(backend, &self.ids, ws, &mut x);
            x
        });
        let (walkers, dynamic) = (&mut self.walkers, model.spec().dynamic);
        weights.mixer.forward(backend, ws, x, |mixer, rows, scratch, sum| match mixer {
            Mixer::Recurrent(mixer) => {
                let walks = recurrent_walks(backend, walkers, &parts, layer, mixer.rope.as_deref(), dynamic);
                mixer.forward(backend, rows, scratch, walks, sum);
            }
            Mixer::Attention(mixer) => {
                let sequences = attention_sequences(backend, walkers, parts, layer, dynamic);
                mixer.forward(backend, rows, scratch, sequences, sum);
                save_attention(backend, walkers, layer);
            }
            Mixer::Latent(mixer) => {
                let sequences = attention_sequences(backend, walkers, parts, layer, dynamic);
                mixer.forward(backend, rows, scratch, sequences, sum);
                save_attention(backend, walkers, layer);
            }
        });
        for walker in &mut self.walkers {
            emit_captured(backend, walker, layer);
        }
        if let Some(feed) = &weights.feed {
            feed.forward(backend, ws, x, |feed, rows, scratch, mut sum| match feed {
                Feed::Dense(mlp) => mlp.forward(backend, rows, scratch, None, &mut sum),
                Feed::Experts(experts) => experts.forward(backend, rows, scratch, sum),
            });
        }
        self.layer += 1;
        Ok(if self.layer == model.layers().len() { Progress::Done } else { Progress::Layer })
    }

    /// The states, and the logits that were asked for.
    ///
    /// # Panics
    /// If the pass is not done.
    pub fn finish(self, backend: &B, model: &Model<B>, ws: &mut Workspace<B>) -> PassOutput<B> {
        assert_eq!(self.layer, model.layers().len(), "a pass is finished after its last layer");
        let mut wanted = Vec::new();
        let mut sequences = Vec::with_capacity(self.walkers.len());
        for walker in self.walkers {
            let from = wanted.len();
            match walker.logits {
                Logits::None => {}
                Logits::Last => wanted.extend(walker.rows.clone().last()),
                Logits::All => wanted.extend(walker.rows.clone()),
            }
            sequences.push(end_walk(walker, from..wanted.len()));
        }
        let logits = self.x.filter(|_| !wanted.is_empty()).map(|x| {
            backend.gather(&x, &wanted, &mut ws.chosen);
            model.logits(backend, ws)
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
            return Err(PassError::Kind { sequence, jump, layer, expected });
        }
    }
    Ok(())
}
