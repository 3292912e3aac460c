//! The text files of a model: read from a directory or embedded in the program.
//!
//! What can go wrong: a missing `tokenizer.json`, unreadable files, JSON of the wrong shape.

use std::borrow::Cow;
use std::io::ErrorKind;
use std::path::Path;

use serde_json::{Map, Value};

use crate::error::TextError;

/// The files that this crate reads, as bytes. `Cow` so that embedded files need no copy.
#[derive(Clone, Debug, Default)]
pub struct TextFiles {
    /// Where the files come from, for error messages (a directory, or a model's name).
    pub origin: String,
    /// `tokenizer.json`.
    pub tokenizer_json: Cow<'static, [u8]>,
    /// `tokenizer_config.json`: names of special tokens, and often the chat template.
    pub tokenizer_config: Option<Cow<'static, [u8]>>,
    /// `chat_template.jinja` (or the template in `chat_template.json`); wins over the one in the configuration.
    pub chat_template: Option<Cow<'static, str>>,
}

impl TextFiles {
    /// Reads the files of a checkpoint directory.
    ///
    /// # Errors
    /// When `tokenizer.json` is missing, or any of the files cannot be read.
    pub fn from_dir(directory: &Path) -> Result<Self, TextError> {
        let origin = directory.display().to_string();
        let Some(tokenizer_json) = read_optional(&directory.join("tokenizer.json"))? else {
            return Err(TextError::file(format!(
                "{origin} has no tokenizer.json: copy it from the model's release, or save a fast tokenizer there \
                 (`AutoTokenizer.from_pretrained(...).save_pretrained(...)`)"
            )));
        };
        let tokenizer_config = read_optional(&directory.join("tokenizer_config.json"))?;
        let chat_template = match read_optional(&directory.join("chat_template.jinja"))? {
            Some(bytes) => Some(utf8(bytes, &format!("{origin}/chat_template.jinja"))?),
            None => template_of_processor(directory)?,
        };
        Ok(Self {
            origin,
            tokenizer_json: Cow::Owned(tokenizer_json),
            tokenizer_config: tokenizer_config.map(Cow::Owned),
            chat_template: chat_template.map(Cow::Owned),
        })
    }

    /// The parsed `tokenizer_config.json`; empty when there is none.
    pub(crate) fn config(&self) -> Result<Map<String, Value>, TextError> {
        let Some(bytes) = &self.tokenizer_config else {
            return Ok(Map::new());
        };
        serde_json::from_slice(bytes).map_err(|error| {
            TextError::file(format!("{}/tokenizer_config.json is not a JSON object: {error}", self.origin))
        })
    }

    /// The chat template's source, if the model has one. In a list of named templates it is the one named `default`.
    pub(crate) fn template_source(&self, config: &Map<String, Value>) -> Result<Option<String>, TextError> {
        if let Some(template) = &self.chat_template {
            return Ok(Some(template.to_string()));
        }
        let file = format!("{}/tokenizer_config.json", self.origin);
        match config.get("chat_template") {
            None | Some(Value::Null) => Ok(None),
            Some(value) => named_or_single(value, &file).map(Some),
        }
    }
}

/// Special tokens by the names templates use (`bos_token`, `eos_token`, ...): a string, or an object with `content`.
pub(crate) fn special_token_strings(config: &Map<String, Value>) -> Vec<(String, String)> {
    let text_of = |value: &Value| match value {
        Value::String(text) => Some(text.clone()),
        Value::Object(object) => object.get("content")?.as_str().map(str::to_owned),
        _ => None,
    };
    config
        .iter()
        .filter(|(name, _)| name.ends_with("_token"))
        .filter_map(|(name, value)| Some((name.clone(), text_of(value)?)))
        .collect()
}

fn named_or_single(value: &Value, file: &str) -> Result<String, TextError> {
    let wrong_shape = || {
        TextError::file(format!(
            "{file}: `chat_template` must be a string or a list of objects with `name` and `template`"
        ))
    };
    let list = match value {
        Value::String(source) => return Ok(source.clone()),
        Value::Array(list) => list,
        _ => return Err(wrong_shape()),
    };
    let mut named = Vec::with_capacity(list.len());
    for entry in list {
        let name = entry.get("name").and_then(Value::as_str).ok_or_else(wrong_shape)?;
        let template = entry.get("template").and_then(Value::as_str).ok_or_else(wrong_shape)?;
        named.push((name, template));
    }
    if let Some((_, template)) = named.iter().find(|(name, _)| *name == "default") {
        return Ok((*template).to_owned());
    }
    match named.as_slice() {
        [(_, only)] => Ok((*only).to_owned()),
        _ => Err(TextError::file(format!(
            "{file}: none of the chat templates is named `default`; rename one, or put it into chat_template.jinja"
        ))),
    }
}

/// Releases with a processor keep the template in `chat_template.json`.
fn template_of_processor(directory: &Path) -> Result<Option<String>, TextError> {
    let path = directory.join("chat_template.json");
    let Some(bytes) = read_optional(&path)? else {
        return Ok(None);
    };
    let file = path.display().to_string();
    let object: Map<String, Value> = serde_json::from_slice(&bytes)
        .map_err(|error| TextError::file(format!("{file} is not a JSON object: {error}")))?;
    let value = object
        .get("chat_template")
        .ok_or_else(|| TextError::file(format!("{file} has no `chat_template`: add it, or remove the file")))?;
    named_or_single(value, &file).map(Some)
}

fn read_optional(path: &Path) -> Result<Option<Vec<u8>>, TextError> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(TextError::file(format!("cannot read {}: {error}", path.display()))),
    }
}

fn utf8(bytes: Vec<u8>, file: &str) -> Result<String, TextError> {
    String::from_utf8(bytes).map_err(|error| TextError::file(format!("{file} is not UTF-8: {error}")))
}
