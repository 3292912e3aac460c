//! Token ids to text, one at a time.
//!
//! Never emits part of a character; all that is emitted, with the rest from [`Detokenizer::finish`], equals the decode
//! of all ids at once, and the work per token does not grow with the text. Byte-level tokenizers go by bytes. For other
//! decoders the new text is what a decode of the last few ids shows beyond the decode of the ones emitted before; a run
//! of byte tokens is held until it ends, since its decode is all or nothing. What can go wrong: the decoder fails.

use std::sync::Arc;

use crate::error::TextError;
use crate::tokenizer::Tokenizer;

/// Longest window of ids that waits for a character to complete (decoders of unknown kind only): beyond it the bytes
/// are not going to be one.
const LONGEST_WAIT: usize = 64;

/// Incremental decoder of one sequence.
#[derive(Clone, Debug)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    keep_special: bool,
    /// Byte level: bytes of a character that is not complete yet.
    bytes: Vec<u8>,
    /// Other decoders: ids of the last emitted text (the context), then ids not emitted yet.
    window: Vec<u32>,
    context: usize,
}

impl Detokenizer {
    /// A decoder at the start of a text, in which special tokens produce nothing unless `keep_special`.
    pub fn new(tokenizer: Arc<Tokenizer>, keep_special: bool) -> Self {
        Self { tokenizer, keep_special, bytes: Vec::new(), window: Vec::new(), context: 0 }
    }

    /// Takes the next id and returns the text that is complete now, often all of the token's, sometimes none.
    ///
    /// # Errors
    /// When the tokenizer's decoder fails.
    pub fn push(&mut self, id: u32) -> Result<String, TextError> {
        let silent = !self.keep_special && self.tokenizer.is_special(id);
        if silent || !self.tokenizer.knows(id) {
            return Ok(String::new());
        }
        if self.tokenizer.is_byte_level() {
            self.bytes.extend(self.tokenizer.token_bytes(id));
            return Ok(self.complete_characters());
        }
        self.window.push(id);
        if self.tokenizer.is_fallback_byte(id) {
            return Ok(String::new());
        }
        self.window_text(false)
    }

    /// The end of the text: what was held back; an incomplete character becomes U+FFFD.
    ///
    /// # Errors
    /// When the tokenizer's decoder fails.
    pub fn finish(&mut self) -> Result<String, TextError> {
        if self.tokenizer.is_byte_level() {
            let rest = std::mem::take(&mut self.bytes);
            return Ok(String::from_utf8_lossy(&rest).into_owned());
        }
        self.window_text(true)
    }

    /// Takes the complete characters off the front of `bytes`; invalid bytes become U+FFFD as in
    /// [`String::from_utf8_lossy`].
    fn complete_characters(&mut self) -> String {
        let mut text = String::new();
        let mut used = 0;
        for chunk in self.bytes.utf8_chunks() {
            text.push_str(chunk.valid());
            used += chunk.valid().len();
            let invalid = chunk.invalid();
            let is_last = used + invalid.len() == self.bytes.len();
            if invalid.is_empty() || (is_last && is_unfinished(invalid)) {
                break;
            }
            text.push(char::REPLACEMENT_CHARACTER);
            used += invalid.len();
        }
        self.bytes.drain(..used);
        debug_assert!(self.bytes.len() < 4, "at most the beginning of one character is held");
        text
    }

    fn window_text(&mut self, at_end: bool) -> Result<String, TextError> {
        if self.window.len() == self.context {
            return Ok(String::new());
        }
        let known = self.tokenizer.decode(&self.window[..self.context], self.keep_special)?;
        let whole = self.tokenizer.decode(&self.window, self.keep_special)?;
        let waiting = self.window.len() - self.context;
        let may_complete = whole.ends_with(char::REPLACEMENT_CHARACTER) && waiting <= LONGEST_WAIT;
        if !at_end && may_complete {
            return Ok(String::new());
        }
        let new = whole.get(known.len()..).unwrap_or_default().to_owned();
        // Ids without text stay in the window only behind ids with text: a decoder may treat the first one apart.
        if !new.is_empty() || self.context == 0 {
            self.window.drain(..self.context);
            self.context = self.window.len();
        }
        Ok(new)
    }
}

/// Whether the bytes are the beginning of a character (and not bytes that no continuation makes valid).
fn is_unfinished(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}
