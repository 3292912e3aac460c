//! The text of a request's answers: one decoder and one stop matcher per choice. It outlives the combiner that generates
//! the tokens. What can go wrong: a token that the tokenizer cannot decode.

use std::sync::Arc;

use hypic_text::{Detokenizer, StopMatcher, TextError, TextPipeline};
use hypic_transport::TokenEvent;

use crate::api::{Delta, TokenLogprob, TokenLogprobs};

/// The text of a request's answers: one decoder and one stop matcher per choice.
pub(crate) struct TextSide {
    text: Option<Arc<TextPipeline>>,
    choices: Vec<ChoiceText>,
}

struct ChoiceText {
    detokenizer: Option<Detokenizer>,
    stops: StopMatcher,
    /// Nothing more is to be told of this choice.
    finished: bool,
}

impl TextSide {
    pub fn new(text: Option<&Arc<TextPipeline>>, stops: &StopMatcher, choices: usize) -> Self {
        let choice =
            || ChoiceText { detokenizer: text.map(|t| t.detokenizer()), stops: stops.clone(), finished: false };
        TextSide { text: text.cloned(), choices: (0..choices).map(|_| choice()).collect() }
    }

    /// What a token adds, and whether a stop text is complete.
    pub fn push(&mut self, token: &TokenEvent) -> Result<(Delta, bool), TextError> {
        let choice = &mut self.choices[token.choice];
        let mut stopped = false;
        let text = match &mut choice.detokenizer {
            Some(detokenizer) => {
                let found = choice.stops.push(&detokenizer.push(token.token)?);
                stopped = found.stop.is_some();
                Some(found.text)
            }
            None => None,
        };
        let logprobs = token.logprob.map(|logprob| TokenLogprobs {
            chosen: self.named(token.token, logprob),
            top: token.top.iter().map(|&(id, logprob)| self.named(id, logprob)).collect(),
        });
        let choice = token.choice as u32;
        let delta = Delta { choice, text, token_ids: vec![token.token], logprobs: logprobs.into_iter().collect() };
        Ok((delta, stopped))
    }

    /// The text that was held back when choice `choice` ended, and whether a stop text is in it.
    pub fn finish(&mut self, choice: usize) -> Result<(Option<Delta>, bool), TextError> {
        let state = &mut self.choices[choice];
        let Some(detokenizer) = &mut state.detokenizer else {
            return Ok((None, false));
        };
        let rest = state.stops.push(&detokenizer.finish()?);
        let mut text = rest.text;
        if rest.stop.is_none() {
            text.push_str(&state.stops.finish().text);
        }
        let delta = Delta { choice: choice as u32, text: Some(text), ..Delta::default() };
        Ok((delta.text.as_ref().is_some_and(|t| !t.is_empty()).then_some(delta), rest.stop.is_some()))
    }

    /// Whether nothing more is to be told of choice `choice`.
    pub fn is_finished(&self, choice: usize) -> bool {
        self.choices[choice].finished
    }

    /// Nothing more is to be told of choice `choice`.
    pub fn set_finished(&mut self, choice: usize) {
        self.choices[choice].finished = true;
    }

    /// Whether nothing more is to be told at all.
    pub fn all_finished(&self) -> bool {
        self.choices.iter().all(|choice| choice.finished)
    }

    fn named(&self, token_id: u32, logprob: f32) -> TokenLogprob {
        let bytes = self.text.as_ref().map(|t| t.tokenizer().token_bytes(token_id));
        TokenLogprob { token_id, logprob, bytes }
    }
}
