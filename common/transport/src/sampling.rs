//! The settings of a sampler, their ranges, and what is said when one is outside of its range.
//!
//! Owns the bounds, which are OpenAI's where OpenAI has the setting. What can go wrong is a value outside of them, NaN
//! included: it is refused with the name that the setting has in requests.

use std::ops::RangeInclusive;

/// OpenAI's range of `temperature`.
pub const TEMPERATURE: RangeInclusive<f32> = 0.0..=2.0;
/// OpenAI's range of `presence_penalty` and `frequency_penalty`.
pub const PENALTY: RangeInclusive<f32> = -2.0..=2.0;
/// OpenAI's range of a value in `logit_bias`.
pub const LOGIT_BIAS: RangeInclusive<f32> = -100.0..=100.0;

/// How tokens are chosen: every value resolved, none optional but `logprobs`.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Divides the logits, 0 to 2; 0 is greedy and ignores `top_k`, `top_p`, `min_p`, `seed` and `choice`.
    pub temperature: f32,
    /// Keep exactly the k likeliest tokens, of equals those with the lower id; 0 keeps all.
    pub top_k: u32,
    /// Keep the likeliest tokens until their mass (of what top-k kept) reaches this, in (0, 1]; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens that are at least this likely relative to the likeliest, 0 to 1; 0 keeps all.
    pub min_p: f32,
    /// Subtracted from the logits of tokens that the answer contains, -2 to 2.
    pub presence_penalty: f32,
    /// Subtracted from a token's logit once per occurrence in the answer, -2 to 2.
    pub frequency_penalty: f32,
    /// Divides positive and multiplies negative logits of tokens in prompt or answer, above 0; 1 does nothing
    /// (CTRL, Keskar et al. 2019, section 4.1, with the sign rule that Hugging Face added).
    pub repetition_penalty: f32,
    /// Added to the logits of these tokens, -100 to 100 each.
    pub logit_bias: Vec<(u32, f32)>,
    /// Same seed, same answer.
    pub seed: u64,
    /// Index of the answer among those to one prompt; answers to one prompt share the seed and differ by this.
    pub choice: u32,
    /// Report the chosen token's log-probability and those of this many most likely tokens; `None`: report nothing.
    pub logprobs: Option<usize>,
}

impl Default for SamplingParams {
    /// OpenAI's defaults: temperature 1, nothing else.
    fn default() -> Self {
        SamplingParams {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Vec::new(),
            seed: 0,
            choice: 0,
            logprobs: None,
        }
    }
}

/// A setting out of range, or logits that no token can be chosen from.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {message}")]
pub struct SamplingError {
    /// The setting, by its name in requests, or `logits`.
    pub field: &'static str,
    /// What is wrong and what would do.
    pub message: String,
}

impl SamplingError {
    /// About `field`.
    pub fn new(field: &'static str, message: String) -> Self {
        SamplingError { field, message }
    }
}

impl SamplingParams {
    /// Check every setting against its range.
    ///
    /// # Errors
    /// Names the first setting that is out of range, its value and its range.
    pub fn validate(&self) -> Result<(), SamplingError> {
        within("temperature", self.temperature, &TEMPERATURE)?;
        within("presence_penalty", self.presence_penalty, &PENALTY)?;
        within("frequency_penalty", self.frequency_penalty, &PENALTY)?;
        within("min_p", self.min_p, &(0.0..=1.0))?;
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            let message = format!("{} is out of range: use a number above 0 and up to 1", self.top_p);
            return Err(SamplingError::new("top_p", message));
        }
        if !(self.repetition_penalty > 0.0 && self.repetition_penalty.is_finite()) {
            let message = format!("{} is out of range: use a number above 0", self.repetition_penalty);
            return Err(SamplingError::new("repetition_penalty", message));
        }
        self.logit_bias.iter().try_for_each(|&(_, bias)| within("logit_bias", bias, &LOGIT_BIAS))
    }

    /// Check that every token id in `logit_bias` is below `vocabulary`, the number of logits.
    ///
    /// # Errors
    /// Names the first id that is not.
    pub fn validate_vocabulary(&self, vocabulary: usize) -> Result<(), SamplingError> {
        let unknown = self.logit_bias.iter().find(|&&(token, _)| token as usize >= vocabulary);
        unknown.map_or(Ok(()), |&(token, _)| {
            let message = format!("token {token} is not in the vocabulary: use ids below {vocabulary}");
            Err(SamplingError::new("logit_bias", message))
        })
    }
}

fn within(field: &'static str, value: f32, range: &RangeInclusive<f32>) -> Result<(), SamplingError> {
    if range.contains(&value) {
        return Ok(());
    }
    let message = format!("{value} is out of range: use a number from {} to {}", range.start(), range.end());
    Err(SamplingError::new(field, message))
}
