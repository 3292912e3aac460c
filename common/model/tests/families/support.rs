//! Configurations to describe and to change.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use hypic_model::spec::{
    AttentionSpec, ExpertsSpec, FeedSpec, LatentSpec, MixerSpec, ModelSpec, RecurrentSpec, RowSource,
};
use hypic_model::{Config, families};
use serde_json::Value;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// The reference models, by directory.
pub const FIXTURES: [&str; 17] = [
    "qwen3_5",
    "qwen3_5_vlm",
    "qwen3_5_moe",
    "qwen3_5_moe_vlm",
    "qwen3_next",
    "bailing_moe_linear",
    "bailing_moe_v2_5",
    "bailing_hybrid",
    "kimi_linear",
    "minimax",
    "minimax_m1",
    "olmo_hybrid",
    "bamba",
    "granitemoehybrid",
    "nemotron_h",
    "nemotron_h_moe",
    "nemotron_h_latent_moe",
];

pub fn golden(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(path)
}

pub fn json(path: &str) -> Value {
    let text = std::fs::read_to_string(golden(path)).expect("reference data");
    serde_json::from_str(&text).expect("reference data")
}

/// The configuration of a reference model.
pub fn fixture(name: &str) -> Value {
    json(&format!("{name}/config.json"))
}

/// `config` with the value at `path` (dotted) replaced; null removes it.
#[must_use]
pub fn with(config: &Value, path: &str, value: impl Into<Value>) -> Value {
    let mut config = config.clone();
    let (parents, key) = path.rsplit_once('.').map_or((vec![], path), |(p, k)| (p.split('.').collect(), k));
    let at = parents.into_iter().fold(&mut config, |at, parent| &mut at[parent]);
    match value.into() {
        Value::Null => _ = at.as_object_mut().expect("an object").remove(key),
        value => at[key] = value,
    }
    config
}

pub fn try_describe(config: &Value) -> Result<ModelSpec, String> {
    let config = Config::parse(&config.to_string()).map_err(|e| e.to_string())?;
    families::describe(&config).map_err(|e| e.to_string())
}

#[track_caller]
pub fn describe(config: &Value) -> ModelSpec {
    try_describe(config).unwrap_or_else(|e| panic!("{e}"))
}

/// The configuration is refused with a message that has all of `words`.
#[track_caller]
pub fn assert_refused(config: &Value, words: &[&str]) {
    let message = match try_describe(config) {
        Ok(spec) => panic!("{} was described; {words:?} expected", spec.family),
        Err(message) => message,
    };
    for word in words {
        assert!(message.contains(word), "{word:?} is not in: {message}");
    }
}

/// Two configurations describe one model.
#[track_caller]
pub fn assert_same(what: &str, config: &Value, other: &Value) {
    let (got, want) = (format!("{:#?}", describe(config)), format!("{:#?}", describe(other)));
    for (g, w) in got.lines().zip(want.lines()) {
        assert_eq!(g, w, "{what}");
    }
    assert_eq!(got.len(), want.len(), "{what}");
}

pub fn recurrent(spec: &ModelSpec, layer: usize) -> &RecurrentSpec {
    match &spec.layers[layer].mixer.body {
        MixerSpec::Recurrent(m) => m,
        other => panic!("layer {layer} is {other:?}"),
    }
}

pub fn attention(spec: &ModelSpec, layer: usize) -> &AttentionSpec {
    match &spec.layers[layer].mixer.body {
        MixerSpec::Attention(m) => m,
        other => panic!("layer {layer} is {other:?}"),
    }
}

pub fn latent(spec: &ModelSpec, layer: usize) -> &LatentSpec {
    match &spec.layers[layer].mixer.body {
        MixerSpec::Latent(m) => m,
        other => panic!("layer {layer} is {other:?}"),
    }
}

pub fn experts(spec: &ModelSpec, layer: usize) -> &ExpertsSpec {
    match &spec.layers[layer].feed.as_ref().expect("a layer that has both").body {
        FeedSpec::Experts(e) => e,
        other => panic!("layer {layer} has {other:?}"),
    }
}

/// The rows of its tensor that a source takes, in order.
pub fn taken(source: &RowSource) -> Vec<usize> {
    (0..source.blocks).flat_map(|b| (0..source.take).map(move |r| b * source.block_rows + source.skip + r)).collect()
}

/// `L` for each linear layer, `F` for each with full attention.
pub fn pattern(spec: &ModelSpec) -> String {
    let letter = |mixer: &MixerSpec| if matches!(mixer, MixerSpec::Recurrent(_)) { 'L' } else { 'F' };
    spec.layers.iter().map(|l| letter(&l.mixer.body)).collect()
}

/// `E` for each layer with experts, `d` for each with one MLP, `-` for each with neither.
pub fn feeds(spec: &ModelSpec) -> String {
    let letter = |feed: &FeedSpec| if matches!(feed, FeedSpec::Experts(_)) { 'E' } else { 'd' };
    spec.layers.iter().map(|l| l.feed.as_ref().map_or('-', |feed| letter(&feed.body))).collect()
}

/// Counts warnings.
struct Warnings(Arc<AtomicUsize>);

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() == Level::WARN
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// What `run` returns, and how many warnings it gave.
pub fn with_warnings<T>(run: impl FnOnce() -> T) -> (T, usize) {
    let count = Arc::new(AtomicUsize::new(0));
    let result = tracing::subscriber::with_default(Warnings(count.clone()), run);
    (result, count.load(Ordering::Relaxed))
}
