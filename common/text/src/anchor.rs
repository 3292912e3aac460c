//! The anchor `turn`: what the chat template puts right before the content of a user message.
//!
//! It is what the renderings of [user] and of [user, assistant, user] share, as token ids, right before the (last)
//! user's content: fixed per model. What can go wrong: a template that refuses these conversations.

use crate::conversation::{TemplateView, Turn};
use crate::error::TextError;
use crate::prompt::Piece;
use crate::tokenizer::Tokenizer;

/// Stands for the content whose surroundings are asked for: a private-use character that no template writes.
const CONTENT: &str = "\u{F0000}";

/// The ids of the anchor `turn`.
///
/// # Errors
/// When the template cannot render the two conversations or loses the user's text.
pub(crate) fn turn_anchor(view: &TemplateView<'_>, tokenizer: &Tokenizer) -> Result<Vec<u32>, TextError> {
    let turn = |role, content| Turn::of_text(role, content, view.strings_as_parts);
    let before_last = |turns: &[Turn]| {
        let rendering = view.render_turns(turns)?;
        let Some((before, _)) = rendering.split_once(CONTENT) else {
            return Err(TextError::template("the chat template loses the text of a user message"));
        };
        tokenizer.encode(&Piece::trusted(before))
    };
    let alone = before_last(&[turn("user", CONTENT)])?;
    let later = before_last(&[turn("user", "x"), turn("assistant", "y"), turn("user", CONTENT)])?;
    let shared = alone.iter().rev().zip(later.iter().rev()).take_while(|(a, b)| a == b).count();
    Ok(alone[alone.len() - shared..].to_vec())
}
