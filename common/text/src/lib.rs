//! Text to token ids and back: tokenizer, chat template, segmentation, incremental detokenizer, stop strings.
//!
//! The crate owns every rule about where a prompt is cut and which strings may become added tokens, so that all roles
//! see one list of token ids. What can go wrong: files that are missing or malformed, a chat template that refuses or
//! rewrites the messages, and a prompt without a query; each is a [`TextError`] that names the thing and the fix.
#![forbid(unsafe_code)]

mod added;
mod anchor;
mod conversation;
mod detokenize;
mod disguise;
mod error;
mod files;
mod memo;
mod pipeline;
mod prompt;
mod pyjson;
mod segment;
mod sentinel;
mod stop;
mod template;
mod tokenizer;

pub use detokenize::Detokenizer;
pub use error::{TextError, TextErrorKind};
pub use files::TextFiles;
pub use memo::TokenMemo;
pub use pipeline::TextPipeline;
pub use prompt::{ChatPrompt, Content, Message, Part, Piece, RawPrompt, Segmented, Tokenized};
pub use stop::{StopMatch, StopMatcher};
pub use template::{ChatTemplate, RenderInput};
pub use tokenizer::Tokenizer;
