//! The prompt of `hypic generate`, from its options.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;
use hypic_router::{Message, Part, Prompt};
use serde::Deserialize;

/// What the prompt consists of.
#[derive(Debug, Args)]
pub(super) struct PromptArgs {
    /// System message
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Files with documents; the bytes of each are a segment of their own [repeatable]
    #[arg(long = "document", value_name = "FILE", num_args = 1..)]
    documents: Vec<PathBuf>,
    /// The question, behind the documents
    #[arg(long, value_name = "TEXT")]
    query: Option<String>,
    /// No chat template: system text and documents are segments, the query follows as it is
    #[arg(long)]
    raw: bool,
    /// Token ids instead of text: a JSON file {"segments": [[ids]], "query": [ids], "anchor": [ids]}
    #[arg(long, value_name = "FILE", conflicts_with_all = ["system", "documents", "query", "raw", "separator"])]
    token_segments: Option<PathBuf>,
    /// Split text at this separator; what follows the last one is the query
    #[arg(long, value_name = "TEXT")]
    pub separator: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TokenSegments {
    #[serde(default)]
    segments: Vec<Vec<u32>>,
    query: Vec<u32>,
    #[serde(default)]
    anchor: Vec<u32>,
}

impl PromptArgs {
    /// Whether it is token ids, for which a model needs no tokenizer.
    pub fn is_tokens(&self) -> bool {
        self.token_segments.is_some()
    }

    pub fn prompt(&self) -> Result<Prompt> {
        if let Some(file) = &self.token_segments {
            let parsed = serde_json::from_str(&read(file, "--token-segments")?);
            let TokenSegments { segments, query, anchor } = parsed.with_context(|| {
                format!(r#"--token-segments {}: expected {{"segments": [[ids]], "query": [ids]}}"#, file.display())
            })?;
            return Ok(Prompt::Tokens { segments, query, anchor: Some(anchor) });
        }
        let documents = self.documents.iter().map(|file| read(file, "--document")).collect::<Result<Vec<String>>>()?;
        if documents.is_empty() && self.query.is_none() {
            bail!("nothing to answer: give --query TEXT, and --document FILE for each document");
        }
        if self.raw {
            let segments = self.system.iter().cloned().chain(documents).collect();
            return Ok(Prompt::Raw { segments, query: self.query.clone().unwrap_or_default() });
        }
        let part = |segment: bool| move |text: String| Part { text, segment };
        let mut content: Vec<Part> = documents.into_iter().map(part(true)).collect();
        content.extend(self.query.clone().map(part(false)));
        let message = |role: &str, content: Vec<Part>| Message { role: role.to_string(), content, parts: true };
        let system = self
            .system
            .clone()
            .map(|text| Message { parts: false, ..message("system", vec![Part { text, segment: false }]) });
        let user = message("user", content);
        Ok(Prompt::Chat(system.into_iter().chain([user]).collect()))
    }
}

fn read(file: &Path, option: &str) -> Result<String> {
    let bytes = std::fs::read(file).with_context(|| format!("{option} {}", file.display()))?;
    String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        anyhow::anyhow!("{option} {}: not UTF-8 text (byte {at} is wrong): convert it first", file.display())
    })
}
