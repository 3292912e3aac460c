//! Choosing the next token of one answer from its logits.
//!
//! Owns the order in which settings act, the counts that the penalties need, and the randomness. The uniform number
//! behind token `i` of choice `c` under seed `s` is a pure function of `(s, c, i)`: an answer does not depend on what
//! else is in the batch, and a sequence that is taken up again elsewhere (see [`Sampler::resume`]) goes on as it would
//! have. What can go wrong: logits that are NaN or infinite, which are an error and never a token, and a
//! configuration outside its ranges, which [`SamplingParams::validate`] refuses by field.
//!
//! Order: log-probabilities of the unmodified logits; `logit_bias`; repetition penalty; presence and frequency penalty;
//! then, at temperature 0, the largest logit (the lowest id of equals), else temperature, top-k, top-p, min-p, draw.

use std::cmp::Ordering;
use std::collections::HashMap;

use hypic_transport::{SamplingError, SamplingParams};

/// Candidates that top-p looks at first; four times as many when their mass does not suffice.
const FIRST_NUCLEUS: usize = 64;

/// A chosen token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// Token id: index of its logit.
    pub token: u32,
    /// Present if the configuration asks for them.
    pub logprobs: Option<SampledLogprobs>,
}

/// Natural logarithms of the softmax of the unmodified logits.
#[derive(Clone, Debug, PartialEq)]
pub struct SampledLogprobs {
    /// Of the chosen token.
    pub chosen: f32,
    /// The most likely tokens, best first, of equals the lower id first; impossible tokens (logit -inf) are left out.
    pub top: Vec<(u32, f32)>,
}

/// Chooses the tokens of one answer.
#[derive(Clone, Debug)]
pub struct Sampler {
    config: SamplingParams,
    /// Tokens of prompt and answer, with their count in the answer. Empty while no penalty asks for it.
    seen: HashMap<u32, u32>,
    /// Index of the next token in the answer.
    index: u64,
    /// Modified logits; reused.
    modified: Vec<f32>,
    /// Token ids that are left; reused.
    candidates: Vec<u32>,
    /// Unnormalised probabilities, one per candidate; reused.
    weights: Vec<f64>,
}

impl Sampler {
    /// A sampler at the answer's first token. `config` must have passed [`SamplingParams::validate`].
    pub fn new(config: SamplingParams, prompt_token_ids: impl Iterator<Item = u32>) -> Self {
        debug_assert_eq!(config.validate(), Ok(()), "a configuration is validated before use");
        let seen = match config.repetition_penalty {
            1.0 => HashMap::new(),
            _ => prompt_token_ids.map(|token| (token, 0)).collect(),
        };
        Sampler { config, seen, index: 0, modified: Vec::new(), candidates: Vec::new(), weights: Vec::new() }
    }

    /// Take up an answer that already has these further tokens: what follows is what would have followed.
    pub fn resume(&mut self, tokens: &[u32]) {
        tokens.iter().for_each(|&token| self.record(token));
    }

    /// Number of tokens that the answer has.
    pub fn generated(&self) -> u64 {
        self.index
    }

    /// Choose the next token. `logits` is `[vocabulary]`.
    ///
    /// # Errors
    /// If a logit is NaN or +inf, if all are -inf, or if `logit_bias` names a token outside the vocabulary. The sampler
    /// is then as it was before.
    pub fn sample(&mut self, logits: &[f32]) -> Result<Sampled, SamplingError> {
        let likeliest = largest_finite(logits)?;
        let mut modified = std::mem::take(&mut self.modified);
        let chosen = self.modify(logits, &mut modified).and_then(|changed| {
            let (logits, likeliest) = match changed {
                true => (modified.as_slice(), largest_finite(&modified)?),
                false => (logits, likeliest),
            };
            let greedy = self.config.temperature == 0.0;
            Ok(if greedy { likeliest.0 } else { self.draw(logits, likeliest.1) })
        });
        self.modified = modified;
        let token = chosen?;
        let logprobs = self.config.logprobs.map(|top| self.logprobs(logits, token, top));
        self.record(token);
        Ok(Sampled { token, logprobs })
    }

    fn record(&mut self, token: u32) {
        self.index += 1;
        let SamplingParams { presence_penalty, frequency_penalty, repetition_penalty, .. } = self.config;
        if presence_penalty != 0.0 || frequency_penalty != 0.0 || repetition_penalty != 1.0 {
            *self.seen.entry(token).or_default() += 1;
        }
    }

    /// Write biased and penalised logits to `modified`; false, and nothing written, if nothing would change.
    fn modify(&self, logits: &[f32], modified: &mut Vec<f32>) -> Result<bool, SamplingError> {
        self.config.validate_vocabulary(logits.len())?;
        if self.config.logit_bias.is_empty() && self.seen.is_empty() {
            return Ok(false);
        }
        modified.clear();
        modified.extend_from_slice(logits);
        for &(token, bias) in &self.config.logit_bias {
            modified[token as usize] += bias;
        }
        let SamplingParams { presence_penalty, frequency_penalty, repetition_penalty, .. } = self.config;
        for (&token, &count) in &self.seen {
            // A prompt may hold ids beyond the logits (padding of the embedding); they cannot be chosen anyway.
            let Some(logit) = modified.get_mut(token as usize) else {
                continue;
            };
            *logit = if *logit > 0.0 { *logit / repetition_penalty } else { *logit * repetition_penalty };
            if count > 0 {
                *logit -= presence_penalty + frequency_penalty * count as f32;
            }
        }
        Ok(true)
    }

    /// Draw from the softmax of `logits` / temperature, filtered. Weights are relative to the likeliest token's, which
    /// makes the normaliser irrelevant and keeps tiny temperatures from overflowing.
    fn draw(&mut self, logits: &[f32], largest: f32) -> u32 {
        let SamplingParams { temperature, top_k, top_p, min_p, seed, choice, .. } = self.config;
        let weight = |token: u32| ((logits[token as usize] as f64 - largest as f64) / temperature as f64).exp();
        let likelier = |a: &u32, b: &u32| likelier(logits, *a, *b);
        let candidates = &mut self.candidates;
        candidates.clear();
        candidates.extend(0..logits.len() as u32);

        let keep = top_k as usize;
        if keep > 0 && keep < candidates.len() {
            candidates.select_nth_unstable_by(keep - 1, likelier);
            candidates.truncate(keep);
            // One order whatever the selection algorithm does, so that the same number draws the same token.
            candidates.sort_unstable();
        }
        if top_p < 1.0 {
            let mass: f64 = candidates.iter().map(|&token| weight(token)).sum();
            let nucleus = nucleus(candidates, mass * top_p as f64, weight, likelier);
            candidates.truncate(nucleus);
        }
        if min_p > 0.0 {
            // The likeliest token has weight 1 and always stays.
            candidates.retain(|&token| weight(token) >= min_p as f64);
        }
        debug_assert!(!candidates.is_empty(), "every filter keeps the likeliest token");

        self.weights.clear();
        self.weights.extend(candidates.iter().map(|&token| weight(token)));
        let total: f64 = self.weights.iter().sum();
        let target = uniform(seed, choice, self.index) * total;
        let mut mass = 0.0;
        let hit = self.weights.iter().position(|weight| {
            mass += weight;
            mass > target
        });
        // `uniform` is below 1 but its product with the total may round up to the total.
        let hit = hit.or_else(|| self.weights.iter().rposition(|&weight| weight > 0.0));
        candidates[hit.expect("the likeliest token has weight 1")]
    }

    fn logprobs(&mut self, logits: &[f32], token: u32, top: usize) -> SampledLogprobs {
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max) as f64;
        let total: f64 = logits.iter().map(|&logit| (logit as f64 - largest).exp()).sum();
        let normaliser = largest + total.ln();
        let logprob = |token: u32| (logits[token as usize] as f64 - normaliser) as f32;
        let likelier = |a: &u32, b: &u32| likelier(logits, *a, *b);

        let candidates = &mut self.candidates;
        candidates.clear();
        candidates.extend(0..logits.len() as u32);
        if top > 0 && top < candidates.len() {
            candidates.select_nth_unstable_by(top - 1, likelier);
        }
        candidates.truncate(top);
        candidates.sort_unstable_by(likelier);
        let possible = candidates.iter().map(|&token| (token, logprob(token))).filter(|(_, p)| p.is_finite());
        SampledLogprobs { chosen: logprob(token), top: possible.collect() }
    }
}

/// Order by likelihood, likeliest first, of equals the lower id first. Logits must not be NaN.
fn likelier(logits: &[f32], a: u32, b: u32) -> Ordering {
    let (left, right) = (logits[a as usize], logits[b as usize]);
    right.partial_cmp(&left).unwrap_or(Ordering::Equal).then(a.cmp(&b))
}

/// Index and value of the largest logit, of equals the lowest index.
fn largest_finite(logits: &[f32]) -> Result<(u32, f32), SamplingError> {
    let mut best = (0, f32::NEG_INFINITY);
    for (token, &logit) in logits.iter().enumerate() {
        if logit.is_nan() || logit == f32::INFINITY {
            return Err(SamplingError::new("logits", format!("the logit of token {token} is {logit}")));
        }
        if logit > best.1 {
            best = (token as u32, logit);
        }
    }
    if best.1 == f32::NEG_INFINITY {
        let message = format!("none of {} tokens is possible", logits.len());
        return Err(SamplingError::new("logits", message));
    }
    Ok(best)
}

/// Move the likeliest candidates to the front, likeliest first, until their weight reaches `mass`, the token that crosses
/// it included; return how many these are, at least one. Sorts only as many as it needs.
fn nucleus(
    candidates: &mut [u32],
    mass: f64,
    weight: impl Fn(u32) -> f64,
    likelier: impl Fn(&u32, &u32) -> Ordering,
) -> usize {
    let mut reached = 0.0;
    let mut sorted = 0;
    while sorted < candidates.len() {
        let rest = &mut candidates[sorted..];
        let look = (sorted * 3).max(FIRST_NUCLEUS).min(rest.len());
        if look < rest.len() {
            rest.select_nth_unstable_by(look - 1, &likelier);
        }
        rest[..look].sort_unstable_by(&likelier);
        for &token in &rest[..look] {
            sorted += 1;
            reached += weight(token);
            if reached >= mass {
                return sorted;
            }
        }
    }
    sorted
}

/// A number in [0, 1) that depends on its arguments alone, with 53 random bits: a chain of SplitMix64 steps
/// (Steele, Lea, Flood 2014), each a bijection that spreads one bit of its input over all of its output.
fn uniform(seed: u64, choice: u32, index: u64) -> f64 {
    const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;
    let mix = |value: u64| {
        let value = value.wrapping_add(GAMMA);
        let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        value ^ (value >> 31)
    };
    let bits = mix(mix(mix(seed).wrapping_add(choice as u64)).wrapping_add(index));
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests;
