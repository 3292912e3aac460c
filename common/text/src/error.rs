//! The crate's error: a kind to map to a status, and a message that names the thing and the fix.

/// What went wrong, for mapping to a status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TextErrorKind {
    /// A model file is missing, unreadable or malformed: the operator's to fix.
    File,
    /// The chat template refused or could not render the request's messages: usually the client's to fix.
    Template,
    /// The request itself is wrong (for example an empty query or stop string): the client's to fix.
    Request,
    /// The tokenizer failed on well-formed input.
    Tokenizer,
}

/// An error of this crate.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct TextError {
    kind: TextErrorKind,
    message: String,
}

impl TextError {
    pub(crate) fn new(kind: TextErrorKind, message: impl Into<String>) -> Self {
        let message = message.into();
        Self { kind, message }
    }

    pub(crate) fn file(message: impl Into<String>) -> Self {
        Self::new(TextErrorKind::File, message)
    }

    pub(crate) fn template(message: impl Into<String>) -> Self {
        Self::new(TextErrorKind::Template, message)
    }

    pub(crate) fn request(message: impl Into<String>) -> Self {
        Self::new(TextErrorKind::Request, message)
    }

    pub(crate) fn tokenizer(message: impl std::fmt::Display) -> Self {
        Self::new(TextErrorKind::Tokenizer, format!("the tokenizer failed: {message}"))
    }

    /// What went wrong.
    pub fn kind(&self) -> TextErrorKind {
        self.kind
    }
}
