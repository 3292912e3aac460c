//! The tokenizer: pieces to ids, ids to bytes and text.
//!
//! A piece is encoded as one string, cut only at the added tokens that count in it; the steps are those of the
//! `tokenizers` library (cut, normalize, pre-tokenize, model) without truncation, padding and post-processor, so no
//! BOS is added to a piece. What can go wrong: a malformed `tokenizer.json`.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use tokenizers::normalizer::Range as TextRange;
use tokenizers::{
    AddedToken, DecoderWrapper, Encoding, Model, NormalizedString, Normalizer, OffsetType, PreTokenizedString,
    PreTokenizer, Token,
};

use crate::added::{AddedMatcher, holds_barrier};
use crate::error::TextError;
use crate::files::{TextFiles, special_token_strings};
use crate::prompt::{AddedTokens, Piece};

/// A model's tokenizer.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    added: HashMap<u32, AddedToken>,
    special_ids: HashSet<u32>,
    /// Matched in the text as it is.
    verbatim: AddedMatcher,
    /// Matched in the normalized text, by their normalized form.
    normalized: AddedMatcher,
    /// All, by content: what client text must not become.
    pub(crate) contents: AddedMatcher,
    byte_level: bool,
    byte_fallback: bool,
    vocab_size: usize,
    special_tokens: Vec<(String, String)>,
    bos: Option<u32>,
    adds_bos: bool,
}

impl Tokenizer {
    /// Builds the tokenizer from a model's files.
    ///
    /// # Errors
    /// When `tokenizer.json` is malformed or of an unknown kind, or `tokenizer_config.json` is not a JSON object.
    pub fn new(files: &TextFiles) -> Result<Self, TextError> {
        let mut inner = tokenizers::Tokenizer::from_bytes(&files.tokenizer_json).map_err(|error| {
            TextError::file(format!(
                "{}/tokenizer.json is not a tokenizer this program can read: {error}; copy it anew from the release",
                files.origin
            ))
        })?;
        inner.with_padding(None);
        inner.with_truncation(None).map_err(TextError::tokenizer)?;

        let added: HashMap<u32, AddedToken> = inner.get_added_tokens_decoder().into_iter().collect();
        let entry = |(id, token): (&u32, &AddedToken)| (token.content.clone(), *id, token.clone());
        let verbatim = AddedMatcher::new(added.iter().filter(|(_, token)| !token.normalized).map(entry));
        let normalized = added
            .iter()
            .filter(|(_, token)| token.normalized)
            .map(|(id, token)| (inner.id_to_token(*id).unwrap_or_else(|| token.content.clone()), *id, token.clone()));
        let normalized = AddedMatcher::new(normalized);
        let contents = AddedMatcher::new(added.iter().map(entry));
        let special_ids = added.iter().filter(|(_, token)| token.special).map(|(id, _)| *id).collect();
        let vocab_size = inner.get_vocab(true).values().max().map_or(0, |largest| *largest as usize + 1);

        let config = files.config()?;
        let special_tokens = special_token_strings(&config);
        let id_of = |name: &str| {
            let (_, content) = special_tokens.iter().find(|(known, _)| known == name)?;
            inner.token_to_id(content)
        };
        let bos = id_of("bos_token");
        let processor_adds_bos = || {
            let first = inner.encode_fast("", true).ok().and_then(|encoding| encoding.get_ids().first().copied());
            first.is_some() && first == bos
        };
        let adds_bos = match config.get("add_bos_token").and_then(serde_json::Value::as_bool) {
            Some(adds) => adds && bos.is_some(),
            None => processor_adds_bos(),
        };
        Ok(Self {
            byte_level: inner.get_decoder().is_some_and(is_byte_level),
            byte_fallback: inner.get_decoder().is_some_and(is_byte_fallback),
            inner,
            added,
            special_ids,
            verbatim,
            normalized,
            contents,
            vocab_size,
            special_tokens,
            bos,
            adds_bos,
        })
    }

    /// One more than the largest token id. The model's own vocabulary may be padded beyond it.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The id of a token's string, added or not.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Whether the id is a special token, which produces no text.
    pub fn is_special(&self, id: u32) -> bool {
        self.special_ids.contains(&id)
    }

    /// The BOS token, if `tokenizer_config.json` names one.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The BOS token's text.
    pub(crate) fn bos_text(&self) -> Option<&str> {
        self.special_tokens.iter().find(|(name, _)| name == "bos_token").map(|(_, text)| text.as_str())
    }

    /// Whether prompts without a template begin with the BOS token: as `add_bos_token` says, else as the
    /// post-processor of `tokenizer.json` does.
    pub fn adds_bos(&self) -> bool {
        self.adds_bos
    }

    /// Special tokens by their names in `tokenizer_config.json`, for the chat template.
    pub(crate) fn special_tokens(&self) -> &[(String, String)] {
        &self.special_tokens
    }

    /// Encodes one piece alone.
    ///
    /// # Errors
    /// When the tokenizer's model fails.
    pub fn encode(&self, piece: &Piece) -> Result<Vec<u32>, TextError> {
        let encoding = self.encoding(piece, OffsetType::None)?;
        let ids = encoding.get_ids();
        Ok(piece.leading_token.iter().chain(ids).copied().collect())
    }

    /// Encodes client text alone: no added token, whatever it says.
    ///
    /// # Errors
    /// When the tokenizer's model fails.
    pub fn encode_text(&self, text: &str) -> Result<Vec<u32>, TextError> {
        self.encode(&Piece::ordinary(text))
    }

    /// Encodes one piece and finds the token offsets of byte offsets in its text; a place inside a token is rounded
    /// down to the token's start.
    pub(crate) fn encode_with_offsets(
        &self,
        piece: &Piece,
        bytes: &[usize],
    ) -> Result<(Vec<u32>, Vec<usize>), TextError> {
        if bytes.is_empty() {
            return Ok((self.encode(piece)?, Vec::new()));
        }
        let encoding = self.encoding(piece, OffsetType::Byte)?;
        let lead = usize::from(piece.leading_token.is_some());
        let ends: Vec<usize> = encoding.get_offsets().iter().map(|(_, end)| *end).collect();
        // Ends ascend: tokens that end at or before the place lie before it.
        let offsets = bytes.iter().map(|byte| lead + ends.partition_point(|end| end <= byte)).collect();
        let ids = piece.leading_token.iter().chain(encoding.get_ids()).copied().collect();
        Ok((ids, offsets))
    }

    /// Every place where text spells an added token out, as it is or once normalized.
    pub(crate) fn added_in(&self, text: &str) -> Vec<Range<usize>> {
        let mut places = self.contents.occurrences(text);
        let Some(normalizer) = self.inner.get_normalizer().filter(|_| !self.normalized.is_empty()) else {
            return places;
        };
        let mut normalized = NormalizedString::from(text);
        if normalizer.normalize(&mut normalized).is_ok() {
            let found = self.normalized.occurrences(normalized.get()).into_iter();
            places.extend(found.filter_map(|range| normalized.convert_offsets(TextRange::Normalized(range))));
        }
        places
    }

    fn encoding(&self, piece: &Piece, offsets: OffsetType) -> Result<Encoding, TextError> {
        self.try_encoding(piece, offsets).map_err(TextError::tokenizer)
    }

    fn try_encoding(&self, piece: &Piece, offsets: OffsetType) -> tokenizers::Result<Encoding> {
        let mut text = PreTokenizedString::from(piece.text.as_str());
        let barriers = match &piece.added {
            AddedTokens::Ordinary => None,
            AddedTokens::Outside(barriers) => Some(barriers.as_slice()),
        };
        if let Some(barriers) = barriers {
            text.split(|_, stretch| {
                let found = self.verbatim.matches(stretch.get(), |range| !holds_barrier(&range, barriers));
                Ok(cut(&stretch, &found))
            })?;
        }
        text.split(|_, mut stretch| {
            if let Some(normalizer) = self.inner.get_normalizer() {
                normalizer.normalize(&mut stretch)?;
            }
            let Some(barriers) = barriers else {
                return Ok(vec![(stretch, None)]);
            };
            let shift = stretch.offsets_original().0;
            let found = self.normalized.matches(stretch.get(), |range| {
                let Some(original) = stretch.convert_offsets(TextRange::Normalized(range)) else {
                    return false;
                };
                !holds_barrier(&(original.start + shift..original.end + shift), barriers)
            });
            Ok(cut(&stretch, &found))
        })?;
        if let Some(pre_tokenizer) = self.inner.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut text)?;
        }
        text.tokenize(|stretch| self.ordinary_tokens(stretch.get()))?;
        text.into_encoding(None, 0, offsets)
    }

    /// The model's tokens of a word, none of them an added token spelled out: models whose vocabulary holds the added
    /// tokens (unigram) may choose one, and the word is then cut inside it.
    fn ordinary_tokens(&self, word: &str) -> tokenizers::Result<Vec<Token>> {
        let tokens = self.inner.get_model().tokenize(word)?;
        let cuts: Vec<usize> = tokens.iter().filter_map(|token| self.place_inside_added(word, token)).collect();
        if cuts.is_empty() {
            return Ok(tokens);
        }
        let mut ordinary = Vec::with_capacity(tokens.len() + cuts.len());
        let starts = std::iter::once(0).chain(cuts.iter().copied());
        let ends = cuts.iter().copied().chain(std::iter::once(word.len()));
        for (start, end) in starts.zip(ends) {
            let part = self.ordinary_tokens(&word[start..end])?;
            ordinary.extend(part.into_iter().map(|token| {
                let (from, to) = token.offsets;
                Token { offsets: (from + start, to + start), ..token }
            }));
        }
        Ok(ordinary)
    }

    /// A place inside a token that spells an added token out; `None` for all other tokens.
    fn place_inside_added(&self, word: &str, token: &Token) -> Option<usize> {
        let added = self.added.get(&token.id)?;
        let surface = word.get(token.offsets.0..token.offsets.1)?;
        let content = added.content.trim_start_matches(SPACE_MARK);
        if surface.trim_start_matches(SPACE_MARK) != content {
            return None;
        }
        // Runs of white space and single letters are ordinary words of a vocabulary.
        let is_filler = |character: char| character.is_whitespace() || character == SPACE_MARK;
        let (second_letter, _) = content.char_indices().nth(1)?;
        if content.chars().all(is_filler) {
            return None;
        }
        let mark_length = surface.len() - content.len();
        Some(token.offsets.0 + mark_length + second_letter)
    }

    /// The bytes a token stands for, special tokens included; empty for an unknown id. They may be part of a character.
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        let Some(token) = self.inner.id_to_token(id) else {
            return Vec::new();
        };
        if self.byte_level {
            return byte_level_bytes(&token);
        }
        if let Some(added) = self.added.get(&id) {
            return added.content.clone().into_bytes();
        }
        if self.byte_fallback
            && let Some(byte) = fallback_byte(&token)
        {
            return vec![byte];
        }
        token.replace(SPACE_MARK, " ").into_bytes()
    }

    /// Decodes ids to text; special tokens give none unless `keep_special`.
    ///
    /// # Errors
    /// When the tokenizer's decoder fails.
    pub fn decode(&self, ids: &[u32], keep_special: bool) -> Result<String, TextError> {
        self.inner.decode(ids, !keep_special).map_err(TextError::tokenizer)
    }

    /// Whether the text of ids is the text of their bytes put together.
    pub(crate) fn is_byte_level(&self) -> bool {
        self.byte_level
    }

    /// Whether the decoder joins runs of byte tokens, and this token is one.
    pub(crate) fn is_fallback_byte(&self, id: u32) -> bool {
        self.byte_fallback && self.inner.id_to_token(id).is_some_and(|token| fallback_byte(&token).is_some())
    }

    /// Whether the id has a token.
    pub(crate) fn knows(&self, id: u32) -> bool {
        self.inner.id_to_token(id).is_some()
    }
}

/// Stands for a space in sentencepiece vocabularies.
const SPACE_MARK: char = '▁';

type Stretch = (NormalizedString, Option<Vec<Token>>);

/// Cuts a stretch at matches, which become their ids.
fn cut(stretch: &NormalizedString, found: &[(Range<usize>, u32)]) -> Vec<Stretch> {
    let slice = |range: Range<usize>| stretch.slice(TextRange::Normalized(range));
    if found.is_empty() {
        return vec![(stretch.clone(), None)];
    }
    let mut parts = Vec::with_capacity(2 * found.len() + 1);
    let mut from = 0;
    for (range, id) in found {
        parts.extend(slice(from..range.start).map(|before| (before, None)));
        parts.extend(slice(range.clone()).map(|token| {
            let value = token.get().to_owned();
            let length = value.len();
            (token, Some(vec![Token::new(*id, value, (0, length))]))
        }));
        from = range.end;
    }
    parts.extend(slice(from..stretch.len()).map(|rest| (rest, None)));
    parts
}

fn is_byte_level(decoder: &DecoderWrapper) -> bool {
    match decoder {
        DecoderWrapper::ByteLevel(_) => true,
        DecoderWrapper::Sequence(sequence) => {
            let steps = sequence.get_decoders();
            let harmless =
                |step: &DecoderWrapper| matches!(step, DecoderWrapper::ByteLevel(_) | DecoderWrapper::Fuse(_));
            steps.first().is_some_and(is_byte_level) && steps.iter().all(harmless)
        }
        _ => false,
    }
}

fn is_byte_fallback(decoder: &DecoderWrapper) -> bool {
    match decoder {
        DecoderWrapper::ByteFallback(_) => true,
        DecoderWrapper::Sequence(sequence) => sequence.get_decoders().iter().any(is_byte_fallback),
        _ => false,
    }
}

/// `<0xNN>`.
fn fallback_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2).then(|| u8::from_str_radix(digits, 16).ok())?
}

/// Bytes of a token of byte-level BPE: each character stands for a byte (GPT-2's table: printable Latin-1 for itself,
/// the rest from U+0100 on); a token with any other character stands for its own UTF-8.
fn byte_level_bytes(token: &str) -> Vec<u8> {
    let bytes: Option<Vec<u8>> = token.chars().map(byte_of_character).collect();
    bytes.unwrap_or_else(|| token.as_bytes().to_vec())
}

fn byte_of_character(character: char) -> Option<u8> {
    let code = u32::from(character);
    match code {
        0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF => Some(code as u8),
        // The 68 other bytes in ascending order: 0..=0x20, 0x7F..=0xA0, 0xAD.
        0x100..=0x120 => Some((code - 0x100) as u8),
        0x121..=0x142 => Some((code - 0x121 + 0x7F) as u8),
        0x143 => Some(0xAD),
        _ => None,
    }
}
