//! What goes into segmentation and what comes out: messages with marked parts, pieces, token ids.

use chrono::NaiveDateTime;
use serde_json::{Map, Value};

/// One text part of a message's content.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Part {
    /// The text, byte for byte.
    pub text: String,
    /// Whether the part is a segment of its own.
    pub segment: bool,
}

/// A message's content, in the form in which the client sent it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// A plain string.
    Text(String),
    /// A list of text parts.
    Parts(Vec<Part>),
}

/// One chat message.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    /// The role, as sent by the client.
    pub role: String,
    /// The content; `None` renders as `null` (an assistant message that only calls tools).
    pub content: Option<Content>,
    /// Further fields for the template (`name`, `tool_calls`, `reasoning_content`, ...).
    pub extra: Map<String, Value>,
}

impl Message {
    /// A message whose content is a plain string.
    pub fn text(role: impl Into<String>, text: impl Into<String>) -> Self {
        Self { role: role.into(), content: Some(Content::Text(text.into())), extra: Map::new() }
    }

    /// A message whose content is a list of parts.
    pub fn parts(role: impl Into<String>, parts: Vec<Part>) -> Self {
        Self { role: role.into(), content: Some(Content::Parts(parts)), extra: Map::new() }
    }
}

/// A chat request, before the template.
#[derive(Clone, Debug)]
pub struct ChatPrompt {
    /// The messages in order.
    pub messages: Vec<Message>,
    /// Whether the template opens the assistant's turn at the end.
    pub add_generation_prompt: bool,
    /// When set, every occurrence in message text is a cut; the separator itself is removed.
    pub separator: Option<String>,
    /// Whether added tokens written in client text become these tokens. Otherwise they are ordinary text.
    pub special_tokens: bool,
    /// Further variables for the template (`chat_template_kwargs`, for example `enable_thinking`).
    pub template_variables: Map<String, Value>,
    /// The local time that `strftime_now` shows; the clock when `None`.
    pub now: Option<NaiveDateTime>,
}

impl ChatPrompt {
    /// A prompt with the usual settings: the assistant's turn opened, no separator, added tokens in text ordinary.
    pub fn new(messages: Vec<Message>) -> Self {
        Self {
            messages,
            add_generation_prompt: true,
            separator: None,
            special_tokens: false,
            template_variables: Map::new(),
            now: None,
        }
    }
}

/// A prompt without a template: segments, then the query.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RawPrompt {
    /// Segments before the query; each is tokenized alone. Never split by the separator.
    pub segments: Vec<String>,
    /// The query, or, with a separator, further segments and the query.
    pub query: String,
    /// When set, splits `query`; the separator itself is removed.
    pub separator: Option<String>,
    /// Whether added tokens written in the text become these tokens. Otherwise they are ordinary text.
    pub special_tokens: bool,
}

/// A stretch of the prompt that is tokenized alone.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Piece {
    /// The text.
    pub text: String,
    /// Which added tokens in the text count.
    pub(crate) added: AddedTokens,
    /// A token id written by a rule and not by text (BOS of a raw prompt).
    pub(crate) leading_token: Option<u32>,
}

/// Which added tokens of a piece become these tokens.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum AddedTokens {
    /// None: the whole text is the client's.
    Ordinary,
    /// Those that no barrier lies inside of. A barrier is a place in client text in half bytes, ascending: `2 p` is the
    /// place before byte `p`, `2 p + 1` lies inside the character that begins at byte `p`.
    Outside(Vec<usize>),
}

impl Default for AddedTokens {
    fn default() -> Self {
        AddedTokens::Outside(Vec::new())
    }
}

impl Piece {
    /// Client text: no added token, whatever it says.
    pub(crate) fn ordinary(text: impl Into<String>) -> Self {
        Self { text: text.into(), added: AddedTokens::Ordinary, leading_token: None }
    }

    /// Text in which every added token counts.
    pub(crate) fn trusted(text: impl Into<String>) -> Self {
        Self { text: text.into(), added: AddedTokens::Outside(Vec::new()), leading_token: None }
    }
}

/// A prompt cut into pieces. Pieces without text are still in; tokenization drops what has no tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Segmented {
    /// The segments in order, template text included.
    pub segments: Vec<Piece>,
    /// What follows the last mark.
    pub query: Piece,
    /// For prompts without marks: where each chat message ends, as byte offsets in the query's text, ascending.
    pub message_ends: Vec<usize>,
}

/// A prompt as token ids.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tokenized {
    /// The segments' ids; none is empty.
    pub segments: Vec<Vec<u32>>,
    /// The query's ids; never empty.
    pub query: Vec<u32>,
    /// For prompts without marks: where each chat message ends, as token offsets in `query`, ascending, each in
    /// `1..query.len()`. A place inside a token is rounded down.
    pub message_ends: Vec<usize>,
}
