//! A model's text side in one object: prompts in, token ids out, and the fixed ids that serving needs.
//!
//! Built once per model and shared. What can go wrong: malformed files, requests that the template refuses, prompts
//! whose query has no tokens.

use std::path::Path;
use std::sync::Arc;

use serde_json::Map;

use crate::anchor::turn_anchor;
use crate::conversation::TemplateView;
use crate::detokenize::Detokenizer;
use crate::error::TextError;
use crate::files::TextFiles;
use crate::memo::TokenMemo;
use crate::prompt::{ChatPrompt, Piece, RawPrompt, Segmented, Tokenized};
use crate::segment::{segment_chat, segment_raw};
use crate::template::ChatTemplate;
use crate::tokenizer::Tokenizer;

/// Tokenizer and chat template of a model.
#[derive(Debug)]
pub struct TextPipeline {
    tokenizer: Arc<Tokenizer>,
    template: Option<ChatTemplate>,
    strings_as_parts: bool,
    turn_anchor: Vec<u32>,
    origin: String,
}

impl TextPipeline {
    /// Builds the pipeline from a model's files.
    ///
    /// # Errors
    /// When a file is malformed, or the chat template does not parse.
    pub fn new(files: &TextFiles) -> Result<Self, TextError> {
        let tokenizer = Arc::new(Tokenizer::new(files)?);
        let source = files.template_source(&files.config()?)?;
        let template =
            source.map(|source| ChatTemplate::new(&source, tokenizer.special_tokens(), &files.origin)).transpose()?;
        let mut pipeline = Self {
            turn_anchor: tokenizer.bos().into_iter().collect(),
            tokenizer,
            template,
            strings_as_parts: false,
            origin: files.origin.clone(),
        };
        if let Some(template) = &pipeline.template {
            let variables = Map::new();
            let now = chrono::Local::now().naive_local();
            let mut view = TemplateView {
                template,
                strings_as_parts: false,
                variables: &variables,
                add_generation_prompt: false,
                now,
            };
            view.strings_as_parts = view.loses_strings();
            let anchor = turn_anchor(&view, &pipeline.tokenizer).unwrap_or_else(|error| {
                tracing::warn!(%error, "the chat template gives no turn anchor; segments get none");
                Vec::new()
            });
            pipeline.strings_as_parts = view.strings_as_parts;
            pipeline.turn_anchor = anchor;
        }
        Ok(pipeline)
    }

    /// Builds the pipeline from a checkpoint directory.
    ///
    /// # Errors
    /// As [`TextFiles::from_dir`] and [`TextPipeline::new`].
    pub fn from_dir(directory: &Path) -> Result<Self, TextError> {
        Self::new(&TextFiles::from_dir(directory)?)
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// The chat template, if the model has one.
    pub fn template(&self) -> Option<&ChatTemplate> {
        self.template.as_ref()
    }

    /// Ids of the anchor `turn` for chat prompts: what the template puts right before a user's content. Without a
    /// template it is the BOS token; empty when there is nothing of the kind.
    pub fn turn_anchor(&self) -> &[u32] {
        &self.turn_anchor
    }

    /// Ids of the anchor `turn` for prompts without a template: the BOS token if there is one.
    pub fn raw_turn_anchor(&self) -> Vec<u32> {
        self.bos().into_iter().collect()
    }

    /// The BOS token, if `tokenizer_config.json` names one.
    pub fn bos(&self) -> Option<u32> {
        self.tokenizer.bos()
    }

    /// A decoder at the start of a text; special tokens produce no text.
    pub fn detokenizer(&self) -> Detokenizer {
        Detokenizer::new(Arc::clone(&self.tokenizer), false)
    }

    /// Renders a chat prompt and cuts it into pieces.
    ///
    /// # Errors
    /// When the model has no chat template, or it refuses the messages, or a marked part cannot be found.
    pub fn segment_chat(&self, prompt: &ChatPrompt) -> Result<Segmented, TextError> {
        let Some(template) = &self.template else {
            return Err(TextError::template(format!(
                "{} has no chat template: add chat_template.jinja to the model's directory, or send a raw prompt",
                self.origin
            )));
        };
        let view = TemplateView {
            template,
            strings_as_parts: self.strings_as_parts,
            variables: &prompt.template_variables,
            add_generation_prompt: prompt.add_generation_prompt,
            now: prompt.now.unwrap_or_else(|| chrono::Local::now().naive_local()),
        };
        segment_chat(&view, &self.tokenizer, prompt)
    }

    /// Cuts a prompt without a template into pieces. If the tokenizer adds a BOS token, it begins the prompt: a piece
    /// of its own before segments, else the query's first token. With `special_tokens` the text may write it itself.
    ///
    /// # Errors
    /// When the separator is empty.
    pub fn segment_raw(&self, prompt: &RawPrompt) -> Result<Segmented, TextError> {
        let first = prompt.segments.first().unwrap_or(&prompt.query);
        let wrote_bos = prompt.special_tokens && self.tokenizer.bos_text().is_some_and(|bos| first.starts_with(bos));
        let adds_bos = self.tokenizer.adds_bos() && !wrote_bos;
        segment_raw(prompt, self.bos().filter(|_| adds_bos))
    }

    /// Encodes each piece alone. Segments without tokens are dropped, here and nowhere else.
    ///
    /// # Errors
    /// When the query has no tokens.
    pub fn tokenize(&self, segmented: &Segmented) -> Result<Tokenized, TextError> {
        self.tokenize_by(segmented, |piece| self.tokenizer.encode(piece))
    }

    /// The same, with the ids of segments that were encoded before taken from `memo`. What one `scope` has
    /// encoded another does not see.
    ///
    /// # Errors
    /// When the query has no tokens.
    pub fn tokenize_with(&self, segmented: &Segmented, memo: &TokenMemo, scope: &[u8]) -> Result<Tokenized, TextError> {
        self.tokenize_by(segmented, |piece| memo.get_or(scope, piece, || self.tokenizer.encode(piece)))
    }

    fn tokenize_by(
        &self,
        segmented: &Segmented,
        encode: impl Fn(&Piece) -> Result<Vec<u32>, TextError>,
    ) -> Result<Tokenized, TextError> {
        let mut segments = Vec::with_capacity(segmented.segments.len());
        for piece in &segmented.segments {
            let ids = encode(piece)?;
            if !ids.is_empty() {
                segments.push(ids);
            }
        }
        let (query, mut message_ends) =
            self.tokenizer.encode_with_offsets(&segmented.query, &segmented.message_ends)?;
        if query.is_empty() {
            return Err(TextError::request(
                "the query has no tokens: text must follow the last segment, for it is what the model answers to",
            ));
        }
        message_ends.dedup();
        message_ends.retain(|end| (1..query.len()).contains(end));
        Ok(Tokenized { segments, query, message_ends })
    }

    /// A chat prompt as token ids.
    ///
    /// # Errors
    /// As [`TextPipeline::segment_chat`] and [`TextPipeline::tokenize`].
    pub fn chat(&self, prompt: &ChatPrompt) -> Result<Tokenized, TextError> {
        self.tokenize(&self.segment_chat(prompt)?)
    }

    /// A prompt without a template as token ids.
    ///
    /// # Errors
    /// As [`TextPipeline::segment_raw`] and [`TextPipeline::tokenize`].
    pub fn raw(&self, prompt: &RawPrompt) -> Result<Tokenized, TextError> {
        self.tokenize(&self.segment_raw(prompt)?)
    }
}
