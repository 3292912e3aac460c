//! Where a model comes from: a directory, or the demo model inside the program.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use bytes::Bytes;
use hypic_model::{Checkpoint, Config};
use hypic_text::{TextFiles, TextPipeline};

macro_rules! demo {
    ($file:literal) => {
        include_bytes!(concat!("../../../tests/models/demo/", $file)).as_slice()
    };
}

/// A model that can be opened.
#[derive(Clone, Debug)]
pub enum ModelSource {
    /// The model that ships with the program.
    Demo,
    /// A Hugging Face checkpoint directory.
    Dir(PathBuf),
}

impl ModelSource {
    /// The directory, or the demo model if none is given.
    pub fn new(dir: Option<PathBuf>) -> Self {
        dir.map_or(ModelSource::Demo, ModelSource::Dir)
    }

    /// The name under which it is served: the directory's, or `hypic-demo`.
    pub fn name(&self) -> String {
        match self {
            ModelSource::Demo => "hypic-demo".to_string(),
            ModelSource::Dir(dir) => {
                let whole = dir.canonicalize().unwrap_or_else(|_| dir.clone());
                whole.file_name().map_or_else(|| "model".to_string(), |n| n.to_string_lossy().into_owned())
            }
        }
    }

    /// Open its weights and configuration.
    ///
    /// # Errors
    /// If a file is missing or damaged.
    pub fn checkpoint(&self) -> Result<Checkpoint> {
        match self {
            ModelSource::Demo => {
                let weights = Bytes::from_static(demo!("model.safetensors"));
                let generation = Some(demo!("generation_config.json"));
                Ok(Checkpoint::from_memory(demo!("config.json"), generation, weights)?)
            }
            ModelSource::Dir(dir) => {
                check_dir(dir)?;
                Checkpoint::open(dir).with_context(|| format!("cannot load the model in {}", dir.display()))
            }
        }
    }

    /// Its `config.json`.
    ///
    /// # Errors
    /// If it cannot be read or is no JSON object.
    pub fn config(&self) -> Result<Config> {
        const NAME: &str = "config.json";
        let bytes = match self {
            ModelSource::Demo => demo!("config.json").to_vec(),
            ModelSource::Dir(dir) => {
                check_dir(dir)?;
                let path = dir.join(NAME);
                std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?
            }
        };
        Ok(Config::parse_file(NAME, &bytes)?)
    }

    /// Its tokenizer and chat template; `None` if the directory has no tokenizer.
    ///
    /// # Errors
    /// If a file is damaged.
    pub fn text(&self) -> Result<Option<Arc<TextPipeline>>> {
        let pipeline = match self {
            ModelSource::Demo => TextPipeline::new(&TextFiles {
                origin: "the demo model".to_string(),
                tokenizer_json: demo!("tokenizer.json").into(),
                tokenizer_config: Some(demo!("tokenizer_config.json").into()),
                chat_template: None,
            })?,
            ModelSource::Dir(dir) if !dir.join("tokenizer.json").exists() => return Ok(None),
            ModelSource::Dir(dir) => TextPipeline::from_dir(dir)?,
        };
        Ok(Some(Arc::new(pipeline)))
    }
}

fn check_dir(dir: &Path) -> Result<()> {
    if dir.is_dir() {
        return Ok(());
    }
    let what = if dir.exists() { "is a file" } else { "does not exist" };
    anyhow::bail!("the model directory {} {what}: give one with config.json and safetensors weights", dir.display())
}
