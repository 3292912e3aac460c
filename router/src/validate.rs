//! What every request must satisfy, whichever way it came: limits and ranges that need neither the
//! model nor its tokenizer. What depends on those (context, vocabulary, empty queries after
//! tokenizing) is the engine's to check.

use hypic_transport::SamplingError;

use crate::api::{Error, Prompt, Request, Sampling};
use crate::router::sampling_params;

/// Most answers to one prompt.
pub const MAX_ANSWERS: u32 = 128;
/// Most stop texts.
pub const MAX_STOPS: usize = 64;
/// Most alternatives reported per token.
pub const MAX_LOGPROBS: u32 = 20;

/// Check ranges and limits.
///
/// # Errors
/// Of kind [`crate::ErrorKind::Invalid`], naming the first field that is wrong.
pub fn validate(request: &Request) -> Result<(), Error> {
    if !(1..=MAX_ANSWERS).contains(&request.n) {
        return Err(Error::invalid("n", format!("n is {}: ask for 1 to {MAX_ANSWERS} answers", request.n)));
    }
    if request.max_tokens == Some(0) {
        return Err(Error::invalid("max_tokens", "max_tokens is 0: allow at least 1 token or leave it out"));
    }
    if request.stop.len() > MAX_STOPS {
        let count = request.stop.len();
        return Err(Error::invalid("stop", format!("{count} stop texts: give at most {MAX_STOPS}")));
    }
    if request.stop.iter().any(String::is_empty) {
        return Err(Error::invalid("stop", "an empty stop text would end every answer: leave it out"));
    }
    if let Some(k) = request.logprobs.filter(|&k| k > MAX_LOGPROBS) {
        return Err(Error::invalid(
            "logprobs",
            format!("{k} log-probabilities per token: ask for at most {MAX_LOGPROBS}"),
        ));
    }
    prompt(request)?;
    sampling_params(&request.sampling, &Sampling::default()).validate().map_err(sampling_error)
}

fn prompt(request: &Request) -> Result<(), Error> {
    if let Prompt::Chat(messages) = &request.prompt {
        if messages.is_empty() {
            return Err(Error::invalid("messages", "messages is empty: send at least one message"));
        }
        if let Some(index) = messages.iter().position(|m| m.role.is_empty()) {
            return Err(Error::invalid(format!("messages[{index}].role"), "a message needs a role, such as 'user'"));
        }
    }
    let Some(separator) = &request.options.separator else {
        return Ok(());
    };
    if separator.is_empty() {
        return Err(Error::invalid("separator", "the separator is empty: leave it out, or give a text"));
    }
    if matches!(request.prompt, Prompt::Tokens { .. }) {
        return Err(Error::invalid("separator", "a separator splits text, and the prompt is token ids: list segments"));
    }
    Ok(())
}

/// A setting of the sampler that is out of range.
pub(crate) fn sampling_error(error: SamplingError) -> Error {
    Error::invalid(error.field, error.to_string())
}
