//! Answers: all of them decode in one batch.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};

use hypic_kernels::Backend;
use hypic_model::{Item, Logits, Pass, RunningState, Sequence, Workspace};
use hypic_transport::{ChoiceEnd, CombineError, GenerationEvent, TokenEvent};

use super::Device;
use crate::Sampler;

/// An answer that is being decoded.
pub(super) struct Decoding<B: Backend> {
    pub request: u64,
    pub choice: usize,
    pub state: Option<RunningState<B>>,
    pub sampler: Sampler,
    /// Tokens to come that were told already, by another combiner.
    pub told: VecDeque<u32>,
    /// The token to feed next.
    pub last: u32,
}

impl<B: Backend> Device<B> {
    /// Sample an answer's next token; false if it was the last one.
    pub(super) fn take_token(&mut self, answer: &mut Decoding<B>, logits: &[f32]) -> Result<bool, CombineError> {
        let (id, choice) = (answer.request, answer.choice);
        let plan = &self.requests[&id].plan;
        if let Some(told) = answer.told.pop_front() {
            answer.sampler.resume(&[told]);
            answer.last = told;
        } else {
            let sampled = answer.sampler.sample(logits);
            let sampled =
                sampled.map_err(|e| CombineError::Sampling { field: e.field.to_string(), message: e.message })?;
            answer.last = sampled.token;
            let (logprob, top) = sampled.logprobs.map_or((None, Vec::new()), |l| (Some(l.chosen), l.top));
            _ = plan.events.send(GenerationEvent::Token(TokenEvent { choice, token: sampled.token, logprob, top }));
        }
        let end = if plan.eos.contains(&answer.last) {
            ChoiceEnd::Eos
        } else if answer.sampler.generated() >= plan.max_tokens as u64 {
            ChoiceEnd::Length
        } else {
            return Ok(true);
        };
        self.end_choice(id, choice, end);
        Ok(false)
    }

    /// One step of every answer, in one pass.
    pub(super) fn decode(&mut self) {
        if self.answers.is_empty() {
            return;
        }
        let sequences: Vec<Sequence<B>> = self
            .answers
            .iter_mut()
            .map(|a| Sequence {
                state: a.state.take().expect("a state between steps"),
                items: vec![Item::Run(vec![a.last])],
                capture: None,
                logits: Logits::Last,
            })
            .collect();
        let (backend, model, ws) = (&self.setup.backend, &self.setup.model, &mut self.decode_ws);
        let stepped = catch_unwind(AssertUnwindSafe(|| Pass::new(sequences).run(backend, model, ws)));
        let output = match stepped {
            Ok(output) => output.expect("decoding needs no parts"),
            Err(panic) => {
                let why = self.panicked(&*panic);
                self.decode_ws = Workspace::new(&self.setup.backend);
                let ids: Vec<u64> = self.answers.iter().map(|a| a.request).collect();
                ids.into_iter().for_each(|id| self.fail(id, why.clone()));
                return;
            }
        };
        let vocab = self.setup.model.spec().vocab;
        let logits = self.setup.backend.download(&output.logits.expect("every answer wants logits")).to_f32();
        let mut failed = Vec::new();
        let answers = std::mem::take(&mut self.answers);
        for ((mut answer, sequence), logits) in answers.into_iter().zip(output.sequences).zip(logits.chunks(vocab)) {
            answer.state = Some(sequence.state);
            if failed.iter().any(|(id, _)| *id == answer.request) {
                continue;
            }
            match self.take_token(&mut answer, logits) {
                Ok(true) => self.answers.push(answer),
                Ok(false) => {}
                Err(why) => failed.push((answer.request, why)),
            }
        }
        failed.into_iter().for_each(|(id, why)| self.fail(id, why));
    }
}
