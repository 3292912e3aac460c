//! Checkpoints to break: read whole, changed in memory, written to a temporary directory.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use hypic_kernels::{Backend, Cpu};
use hypic_model::{
    Checkpoint, Item, Jump, LoadOptions, Logits, Model, ModelError, PartSink, Pass, Prefill, RunningState, Sequence,
    Workspace,
};
use hypic_state::{ComposeRule, DType, Entry, LayerPart};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Token ids that every model here has.
pub const TOKENS: [u32; 20] = [0, 1, 2, 0, 1, 1, 2, 2, 0, 0, 1, 2, 1, 0, 2, 2, 1, 0, 1, 2];

pub fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name)
}

#[derive(Clone)]
pub struct Stored {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub data: Vec<u8>,
}

impl Stored {
    pub fn f32(shape: &[usize], values: &[f32]) -> Self {
        let data = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Stored { dtype: Dtype::F32, shape: shape.to_vec(), data }
    }

    pub fn values(&self) -> Vec<f32> {
        assert_eq!(self.dtype, Dtype::F32);
        self.data.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }
}

/// A checkpoint in memory.
#[derive(Clone)]
pub struct Files {
    pub config: Value,
    pub tensors: BTreeMap<String, Stored>,
}

impl Files {
    pub fn golden(name: &str) -> Self {
        let dir = golden(name);
        let config = std::fs::read(dir.join("config.json")).expect("reference data");
        let weights = std::fs::read(dir.join("model.safetensors")).expect("reference data");
        let weights = safetensors::SafeTensors::deserialize(&weights).expect("reference data");
        let stored =
            |t: TensorView<'_>| Stored { dtype: t.dtype(), shape: t.shape().to_vec(), data: t.data().to_vec() };
        let tensors = weights.tensors().into_iter().map(|(name, t)| (name, stored(t))).collect();
        Files { config: serde_json::from_slice(&config).expect("reference data"), tensors }
    }

    pub fn plain() -> Self {
        Self::golden("qwen3_5")
    }

    pub fn release() -> Self {
        Self::golden("qwen3_5_vlm")
    }

    /// The configuration with the value at `path` (dotted) replaced; null removes it.
    pub fn with(mut self, path: &str, value: Value) -> Self {
        let (parents, key) = path.rsplit_once('.').map_or((vec![], path), |(p, k)| (p.split('.').collect(), k));
        let mut at = &mut self.config;
        for parent in parents {
            at = &mut at[parent];
        }
        match value {
            Value::Null => _ = at.as_object_mut().expect("an object").remove(key),
            value => at[key] = value,
        }
        self
    }

    pub fn bytes(&self) -> Vec<u8> {
        bytes_of(self.tensors.iter())
    }

    pub fn write(&self) -> TempDir {
        let dir = self.write_config();
        std::fs::write(dir.path().join("model.safetensors"), self.bytes()).expect("room on disk");
        dir
    }

    pub fn write_config(&self) -> TempDir {
        let dir = tempfile::tempdir().expect("room on disk");
        std::fs::write(dir.path().join("config.json"), self.config.to_string()).expect("room on disk");
        dir
    }

    /// In two shards; `index` may change what the index says.
    pub fn write_sharded(&self, index: impl FnOnce(&mut Value)) -> TempDir {
        let dir = self.write_config();
        let half = self.tensors.len() / 2;
        let mut map = json!({});
        for (shard, name) in SHARDS.iter().enumerate() {
            let part: Vec<_> = self.tensors.iter().enumerate().filter(|(i, _)| (*i >= half) == (shard == 1)).collect();
            for (_, (tensor, _)) in &part {
                map[tensor.as_str()] = json!(name);
            }
            std::fs::write(dir.path().join(name), bytes_of(part.into_iter().map(|(_, t)| t))).expect("room on disk");
        }
        let mut whole = json!({"metadata": {"total_size": 0}, "weight_map": map});
        index(&mut whole);
        std::fs::write(dir.path().join("model.safetensors.index.json"), whole.to_string()).expect("room on disk");
        dir
    }
}

pub const SHARDS: [&str; 2] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];

fn bytes_of<'a>(tensors: impl Iterator<Item = (&'a String, &'a Stored)>) -> Vec<u8> {
    let views: Vec<(&String, TensorView<'_>)> = tensors
        .map(|(name, t)| (name, TensorView::new(t.dtype, t.shape.clone(), &t.data).expect("a whole tensor")))
        .collect();
    safetensors::serialize(views, None).expect("tensors can be written")
}

/// A model and what it needs to run.
pub struct Rig<B: Backend> {
    pub backend: B,
    pub model: Model<B>,
}

pub fn load<B: Backend>(backend: B, dir: &Path, dtype: DType) -> Result<Rig<B>, ModelError> {
    let checkpoint = Checkpoint::open(dir)?;
    let model = Model::load(&backend, &checkpoint, LoadOptions { dtype, progress: &|_| {} })?;
    Ok(Rig { backend, model })
}

/// Logits of [`TOKENS`] on one thread of the CPU.
pub fn logits(dir: &Path) -> Vec<f64> {
    let rig = load(Cpu::new(1), dir, DType::F32).unwrap_or_else(|e| panic!("{e}"));
    rig.run(vec![Item::Run(TOKENS.to_vec())])
}

/// Why the checkpoint is refused.
pub fn refusal(dir: &Path) -> String {
    match load(Cpu::new(1), dir, DType::F32) {
        Ok(_) => panic!("a bad checkpoint was loaded"),
        Err(error) => error.to_string(),
    }
}

/// The checkpoint is refused with a message that has all of `words`.
#[track_caller]
pub fn assert_refused(dir: &Path, words: &[&str]) {
    let message = refusal(dir);
    for word in words {
        assert!(message.contains(word), "{word:?} is not in: {message}");
    }
}

struct Parts<B: Backend>(Mutex<Vec<Arc<LayerPart<B>>>>);

impl<B: Backend> PartSink<B> for Parts<B> {
    fn part(&self, _layer: usize, part: LayerPart<B>) {
        self.0.lock().expect("nobody panics").push(Arc::new(part));
    }
}

impl<B: Backend> Rig<B> {
    /// All logits of a sequence's rows.
    pub fn run(&self, items: Vec<Item<B>>) -> Vec<f64> {
        let state = RunningState::new(&self.backend, &self.model, 0);
        let pass = Pass::new(vec![Sequence { state, items, capture: None, logits: Logits::All }]);
        let mut ws = Workspace::new(&self.backend);
        let output = pass.run(&self.backend, &self.model, &mut ws).expect("parts are there");
        self.backend.download(&output.logits.expect("logits")).to_f64()
    }

    pub fn entry(&self, tokens: &[u32], seam: usize, anchor: &[u32]) -> Arc<Entry<B>> {
        let sink = Arc::new(Parts(Mutex::default()));
        let mut prefill = Prefill::new(&self.backend, &self.model, tokens, seam, anchor, usize::MAX / 2, sink.clone());
        let mut ws = Workspace::new(&self.backend);
        while !prefill.is_done() {
            let pass = Pass::new(vec![prefill.take()]);
            let mut output = pass.run(&self.backend, &self.model, &mut ws).expect("no parts are needed");
            prefill.put_back(output.sequences.pop().expect("one sequence"));
        }
        let parts = std::mem::take(&mut *sink.0.lock().expect("nobody panics"));
        Arc::new(Entry::new(tokens.into(), seam, self.model.layout(), parts).expect("a whole entry"))
    }

    /// Logits of seams and query behind two composed segments.
    pub fn compose(&self, segments: [&[u32]; 2], seam: usize, query: &[u32]) -> Vec<f64> {
        let mut items = Vec::new();
        let mut at = 0;
        for tokens in segments {
            items.push(Item::Run(tokens[..seam].to_vec()));
            let source = self.entry(tokens, seam, &[]);
            let tokens_of_body = source.body_len();
            items.push(Item::Jump(Jump { source, tokens: tokens_of_body, origin: at, rule: ComposeRule::Transition }));
            at += tokens.len() as i64;
        }
        items.push(Item::Run(query.to_vec()));
        self.run(items)
    }
}

#[track_caller]
pub fn assert_close(what: &str, got: &[f64], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        // Written so that NaN fails.
        let close = (g - w).abs() <= tolerance;
        assert!(close, "{what}: value {i} is {g} instead of {w}");
    }
}
