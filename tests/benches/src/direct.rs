//! A model without roles around it: passes, one at a time.

use std::sync::{Arc, Mutex};

use anyhow::Result;
use hypic_kernels::{Backend, Cpu};
use hypic_model::{
    Checkpoint, Item, Jump, LoadOptions, Logits, Model, PartSink, Pass, Prefill, RunningState, Sequence, Workspace,
    split_items,
};
use hypic_state::{ComposeRule, DType, Entry, LayerPart, Transition};

/// Rows of a pass at most.
const CHUNK: usize = 512;

/// A loaded model.
pub struct Direct {
    backend: Cpu,
    model: Model<Cpu>,
    workspace: Mutex<Workspace<Cpu>>,
}

/// Collects the parts of an entry.
#[derive(Default)]
struct Collected(Mutex<Vec<Arc<LayerPart<Cpu>>>>);

impl PartSink<Cpu> for Collected {
    fn part(&self, layer: usize, part: LayerPart<Cpu>) {
        let mut parts = self.0.lock().expect("nobody panics while holding it");
        debug_assert_eq!(parts.len(), layer);
        parts.push(Arc::new(part));
    }
}

impl Direct {
    /// Load a model onto `threads` threads.
    ///
    /// # Errors
    /// If it cannot be loaded.
    pub fn load(threads: usize, checkpoint: &Checkpoint, dtype: DType) -> Result<Self> {
        let backend = Cpu::new(threads);
        let options = LoadOptions { dtype, progress: &|_| {} };
        let model = Model::load(&backend, checkpoint, options)?;
        let workspace = Mutex::new(Workspace::new(&backend));
        Ok(Direct { backend, model, workspace })
    }

    /// Name of the kernels.
    pub fn kernels(&self) -> String {
        self.backend.kernel_set()
    }

    /// Ids of the vocabulary.
    pub fn vocab(&self) -> usize {
        self.model.spec().vocab
    }

    /// The state before any token.
    pub fn empty(&self) -> RunningState<Cpu> {
        RunningState::new(&self.backend, &self.model, 0)
    }

    fn pass(&self, sequence: Sequence<Cpu>) -> hypic_model::PassOutput<Cpu> {
        let mut workspace = self.workspace.lock().expect("nobody panics while holding it");
        let pass = Pass::new(vec![sequence]);
        pass.run(&self.backend, &self.model, &mut workspace).expect("all parts are there")
    }

    /// Run items; the state behind them and the last row's logits.
    pub fn run(&self, mut state: RunningState<Cpu>, items: Vec<Item<Cpu>>) -> (RunningState<Cpu>, Option<Vec<f32>>) {
        let mut logits = None;
        let mut passes = split_items(items, CHUNK).into_iter().peekable();
        while let Some(items) = passes.next() {
            let wanted = if passes.peek().is_none() { Logits::Last } else { Logits::None };
            let mut output = self.pass(Sequence { state, items, capture: None, logits: wanted });
            logits = output.logits.map(|l| l.data().to_vec());
            state = output.sequences.pop().expect("one sequence").state;
        }
        (state, logits)
    }

    /// An ordinary forward of `ids` behind `state`.
    pub fn forward(&self, state: RunningState<Cpu>, ids: &[u32]) -> (RunningState<Cpu>, Option<Vec<f32>>) {
        self.run(state, vec![Item::Run(ids.to_vec())])
    }

    /// The entry of a segment.
    ///
    /// # Panics
    /// If it is no longer than the seam.
    pub fn entry(&self, ids: &[u32], seam: usize, anchor: &[u32]) -> Arc<Entry<Cpu>> {
        let sink = Arc::new(Collected::default());
        self.prefill(ids, seam, anchor, sink.clone(), true);
        let parts = std::mem::take(&mut *sink.0.lock().expect("nobody panics while holding it"));
        Arc::new(Entry::new(ids.into(), seam, self.model.layout(), parts).expect("a part for every layer"))
    }

    /// The rows of an isolated prefill, without making an entry of them.
    pub fn isolated_rows(&self, ids: &[u32], seam: usize, anchor: &[u32]) {
        self.prefill(ids, seam, anchor, Arc::new(Collected::default()), false);
    }

    fn prefill(&self, ids: &[u32], seam: usize, anchor: &[u32], sink: Arc<Collected>, captured: bool) {
        let mut prefill = Prefill::new(&self.backend, &self.model, ids, seam, anchor, CHUNK, sink);
        while !prefill.is_done() {
            let mut sequence = prefill.take();
            let aside = if captured { None } else { sequence.capture.take() };
            let mut output = self.pass(sequence).sequences.pop().expect("one sequence");
            output.capture = output.capture.or(aside);
            prefill.put_back(output);
        }
    }

    /// How many operators of an entry have not decayed, of how many.
    pub fn kept_operators(&self, entry: &Entry<Cpu>) -> (usize, usize) {
        let (mut kept, mut all) = (0, 0);
        for layer in 0..self.model.layout().len() {
            if let LayerPart::Recurrent(part) = &**entry.part(layer)
                && let Transition::Dense(dense) = &part.transition
            {
                kept += dense.kept.len();
                all += dense.heads;
            }
        }
        (kept, all)
    }

    /// The items of a composition of `entries`, all warm, and a query.
    pub fn composition(&self, entries: &[Arc<Entry<Cpu>>], query: &[u32]) -> Vec<Item<Cpu>> {
        let mut items = Vec::new();
        let mut at = 0;
        for entry in entries {
            let tokens = entry.tokens();
            items.push(Item::Run(tokens[..tokens.len() - entry.body_len()].to_vec()));
            items.push(Item::Jump(Jump {
                source: entry.clone(),
                tokens: entry.body_len(),
                origin: at,
                rule: ComposeRule::Transition,
            }));
            at += tokens.len() as i64;
        }
        items.push(Item::Run(query.to_vec()));
        items
    }
}
