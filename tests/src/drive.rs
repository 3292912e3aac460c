//! Driving a model by hand: prefill, compose, decode, one pass at a time.

use std::path::Path;
use std::sync::{Arc, Mutex};

use hypic_kernels::Backend;
use hypic_model::{
    Checkpoint, FrozenState, Item, Jump, LoadOptions, Logits, Model, PartSink, Pass, Prefill, RunningState, Sequence,
    Workspace, split_items,
};
use hypic_state::{ComposeRule, DType, Entry, LayerPart};

/// A loaded model and what it needs to run.
pub struct Rig<B: Backend> {
    /// The device.
    pub backend: B,
    /// The model.
    pub model: Model<B>,
    /// Rows of a pass at most, in prefill and in composition.
    pub chunk: usize,
}

/// A segment in a composition.
pub struct Segment<B: Backend> {
    /// Its token ids.
    pub tokens: Vec<u32>,
    /// Its entry; `None` where it has no body.
    pub entry: Option<Arc<Entry<B>>>,
    /// Position, relative to the segment's, from which the entry's K is rotated: 0 but for entries captured elsewhere.
    pub captured_at: i64,
}

/// What a composition leaves.
pub struct Composed<B: Backend> {
    /// `[query rows][vocab]`.
    pub logits: Vec<Vec<f64>>,
    /// The state behind the query.
    pub state: RunningState<B>,
}

/// Collects the parts of an entry.
pub struct Collected<B: Backend>(Mutex<Vec<Arc<LayerPart<B>>>>);

impl<B: Backend> Default for Collected<B> {
    fn default() -> Self {
        Collected(Mutex::new(Vec::new()))
    }
}

impl<B: Backend> PartSink<B> for Collected<B> {
    fn part(&self, layer: usize, part: LayerPart<B>) {
        let mut parts = self.0.lock().expect("no test panics while holding it");
        assert_eq!(parts.len(), layer, "parts come once per layer, in order");
        parts.push(Arc::new(part));
    }
}

impl<B: Backend> Collected<B> {
    /// The entry, once all parts are there.
    pub fn entry(&self, model: &Model<B>, tokens: &[u32], seam: usize) -> Arc<Entry<B>> {
        let parts = std::mem::take(&mut *self.0.lock().expect("no test panics while holding it"));
        Arc::new(Entry::new(tokens.into(), seam, model.layout(), parts).expect("a complete entry"))
    }
}

impl<B: Backend> Rig<B> {
    /// Load the checkpoint in `relative` below this crate's folder; if that is a configuration, the weights beside it.
    pub fn load(backend: B, relative: &str, dtype: DType) -> Self {
        let path = crate::path(relative);
        if path.is_dir() {
            return Rig::of(backend, &Checkpoint::open(&path).expect("a good checkpoint"), dtype);
        }
        let config = std::fs::read(&path).expect("a configuration");
        Rig::with_config(backend, path.parent().expect("a file in a folder"), config, dtype)
    }

    /// Load the weights in `folder` as `config` describes them.
    pub fn with_config(backend: B, folder: &Path, config: Vec<u8>, dtype: DType) -> Self {
        let weights = std::fs::read(folder.join("model.safetensors")).expect("weights");
        let checkpoint = Checkpoint::from_memory(&config, None, weights.into()).expect("a good checkpoint");
        Rig::of(backend, &checkpoint, dtype)
    }

    fn of(backend: B, checkpoint: &Checkpoint, dtype: DType) -> Self {
        let options = LoadOptions { dtype, progress: &|_| {} };
        let model = Model::load(&backend, checkpoint, options).expect("a model that loads");
        Rig { backend, model, chunk: 512 }
    }

    /// Run one sequence's items and give its state and logits.
    pub fn run(&self, state: RunningState<B>, items: Vec<Item<B>>, logits: Logits) -> Composed<B> {
        let (composed, _) = self.run_saving(state, items, logits);
        composed
    }

    /// The same, with what was saved on the way.
    pub fn run_saving(
        &self,
        mut state: RunningState<B>,
        items: Vec<Item<B>>,
        logits: Logits,
    ) -> (Composed<B>, Vec<FrozenState<B>>) {
        let mut ws = Workspace::new(&self.backend);
        let (mut rows, mut saved) = (Vec::new(), Vec::new());
        for items in split_items(items, self.chunk) {
            let pass = Pass::new(vec![Sequence { state, items, capture: None, logits }]);
            let mut output = pass.run(&self.backend, &self.model, &mut ws).expect("parts are there");
            rows.extend(output.logits.map(|l| self.matrix(&l)).unwrap_or_default());
            let sequence = output.sequences.pop().expect("one sequence");
            saved.extend(sequence.saved);
            state = sequence.state;
        }
        (Composed { logits: rows, state }, saved)
    }

    /// A state before any token.
    pub fn empty(&self) -> RunningState<B> {
        RunningState::new(&self.backend, &self.model, 0)
    }

    /// An ordinary forward of `tokens`, with every row's logits.
    pub fn forward(&self, tokens: &[u32]) -> Composed<B> {
        self.run(self.empty().of_prompt(tokens.len()), vec![Item::Run(tokens.to_vec())], Logits::All)
    }

    /// The entry of a segment; `None` where it has no body.
    pub fn entry(&self, tokens: &[u32], seam: usize, anchor: &[u32]) -> Option<Arc<Entry<B>>> {
        if tokens.len() <= seam {
            return None;
        }
        let sink = Arc::new(Collected::default());
        let mut ws = Workspace::new(&self.backend);
        let mut prefill = Prefill::new(&self.backend, &self.model, tokens, seam, anchor, self.chunk, sink.clone());
        while !prefill.is_done() {
            let pass = Pass::new(vec![prefill.take()]);
            let mut output = pass.run(&self.backend, &self.model, &mut ws).expect("a prefill needs no parts");
            prefill.put_back(output.sequences.pop().expect("one sequence"));
        }
        Some(sink.entry(&self.model, tokens, seam))
    }

    /// Segments with their entries; the first has no anchor.
    pub fn segments(&self, segments: &[Vec<u32>], seam: usize, anchor: &[u32]) -> Vec<Segment<B>> {
        let one = |(i, tokens): (usize, &Vec<u32>)| Segment {
            tokens: tokens.clone(),
            entry: self.entry(tokens, seam, if i == 0 { &[] } else { anchor }),
            captured_at: 0,
        };
        segments.iter().enumerate().map(one).collect()
    }

    /// The items of a composition.
    pub fn items(&self, segments: &[Segment<B>], seam: usize, rule: ComposeRule, query: &[u32]) -> Vec<Item<B>> {
        let mut items = Vec::new();
        let mut at = 0;
        for segment in segments {
            items.push(Item::Run(segment.tokens[..seam.min(segment.tokens.len())].to_vec()));
            if let Some(entry) = &segment.entry {
                let source = entry.clone();
                items.push(Item::Jump(Jump {
                    source,
                    tokens: entry.body_len(),
                    origin: at - segment.captured_at,
                    rule,
                }));
            }
            at += segment.tokens.len() as i64;
        }
        items.push(Item::Run(query.to_vec()));
        items
    }

    /// Compose segments and a query; the logits are the query's.
    pub fn compose(&self, segments: &[Segment<B>], seam: usize, rule: ComposeRule, query: &[u32]) -> Composed<B> {
        let items = self.items(segments, seam, rule, query);
        let mut composed = self.run(self.empty(), items, Logits::All);
        composed.logits.drain(..composed.logits.len() - query.len());
        composed
    }

    /// Greedy tokens and their logits, going on from `from`.
    pub fn greedy(&self, from: Composed<B>, steps: usize) -> (Vec<u32>, Vec<Vec<f64>>) {
        let Composed { mut logits, mut state } = from;
        let (mut tokens, mut rows) = (Vec::new(), Vec::new());
        while tokens.len() < steps {
            let row = logits.pop().expect("logits of the last row");
            let token = crate::golden::argmax(&row);
            tokens.push(token);
            rows.push(row);
            Composed { logits, state } = self.run(state, vec![Item::Run(vec![token])], Logits::Last);
        }
        (tokens, rows)
    }

    /// A device tensor's numbers.
    pub fn numbers(&self, t: &B::Tensor) -> Vec<f64> {
        self.backend.download(t).to_f64()
    }

    /// A device matrix by rows.
    pub fn matrix(&self, t: &B::Tensor) -> Vec<Vec<f64>> {
        let host = self.backend.download(t);
        let columns = host.shape()[1];
        host.to_f64().chunks(columns).map(<[f64]>::to_vec).collect()
    }
}
