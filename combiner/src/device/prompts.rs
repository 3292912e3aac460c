//! Prompts: they advance a pass at a time and take turns.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use hypic_kernels::Backend;
use hypic_model::{Model, Progress, RunningState, SequenceOutput, Workspace};
use hypic_transport::{ChoiceEnd, CombineError, GenerationEvent, PlanChoice};

use super::answers::Decoding;
use super::{Command, Device};
use crate::Sampler;
use crate::prefix::PrefixState;
use crate::prompt::{Prompt, Save};

impl<B: Backend> Device<B> {
    /// Advance prompts for a slice of time (as long as it takes to finish a layer at least). False if
    /// none could move.
    pub(super) fn advance_prompts(&mut self) -> bool {
        let begun = Instant::now();
        let mut moved = false;
        let mut blocked = 0;
        while blocked < self.prompts.len() {
            let Some(mut prompt) = self.prompts.pop_front() else {
                break;
            };
            match self.advance_prompt(&mut prompt) {
                Ok(Step::Waiting) => {
                    blocked += 1;
                    self.prompts.push_back(prompt);
                    continue;
                }
                Ok(Step::Layer) => self.prompts.push_front(prompt),
                Ok(Step::Pass) => self.prompts.push_back(prompt),
                Ok(Step::Prompt) => {}
                Err(why) => self.fail(prompt.request, why),
            }
            moved = true;
            blocked = 0;
            // Answers and deadlines wait for no more than a slice; cancellations and new requests for no more than a layer.
            if begun.elapsed() >= self.setup.config.prompt_slice || self.anything_new() {
                break;
            }
        }
        moved
    }

    fn anything_new(&mut self) -> bool {
        if self.requests.values().any(|r| r.plan.cancel.is_cancelled()) {
            return true;
        }
        let mut new = false;
        while let Ok(command) = self.queue.try_recv() {
            new |= !matches!(command, Command::Wake);
            self.take(command);
        }
        new
    }

    fn advance_prompt(&mut self, prompt: &mut Prompt<B>) -> Result<Step, CombineError> {
        let id = prompt.request;
        prompt.next_pass();
        let begun = Instant::now();
        let (backend, model, ws) = (&self.setup.backend, &self.setup.model, &mut self.prompt_ws);
        let computed = catch_unwind(AssertUnwindSafe(|| advance_pass(prompt, backend, model, ws)));
        let computed = computed.map_err(|panic| {
            self.prompt_ws = Workspace::new(&self.setup.backend);
            self.panicked(&*panic)
        })??;
        if let Computed::Nothing = computed {
            return Ok(Step::Waiting);
        }
        prompt.busy += begun.elapsed();
        if !prompt.begun {
            prompt.begun = true;
            self.requests[&id].tell(GenerationEvent::Started(begun));
        }
        let Computed::Pass { rows, sequence, logits } = computed else { return Ok(Step::Layer) };
        self.requests[&id].tell(GenerationEvent::Rows(rows));
        let last = prompt.is_last_pass();
        let sequence = self.keep_saved(prompt, sequence, last);
        match logits {
            Some(logits) if last => {
                self.begin_answers(id, prompt, sequence, &logits)?;
                Ok(Step::Prompt)
            }
            _ => {
                prompt.put_back(sequence.state);
                Ok(Step::Pass)
            }
        }
    }

    /// Keep the prefix states that a pass has left; what stays is for the answers to start from.
    fn keep_saved(&mut self, prompt: &mut Prompt<B>, mut sequence: SequenceOutput<B>, last: bool) -> SequenceOutput<B> {
        let request = &self.requests[&prompt.request];
        let fork = last && request.plan.choices.len() > 1;
        let states = sequence.saved.len() - usize::from(fork);
        for frozen in sequence.saved.drain(..states) {
            let Save { point, exact } = prompt.saves.pop_front().expect("a point for each state");
            debug_assert_eq!(frozen.position(), point.position as i64);
            let state = PrefixState::new(frozen, point.position, exact, &self.setup.lengths, request.plan.root);
            self.setup.store.put_prefix(point.key, Arc::new(state), point.kind, prompt.busy);
        }
        sequence
    }

    /// The prompt is done: its answers begin with the tokens that its last row gives.
    fn begin_answers(
        &mut self,
        id: u64,
        prompt: &Prompt<B>,
        mut sequence: SequenceOutput<B>,
        logits: &[f32],
    ) -> Result<(), CombineError> {
        let request = &self.requests[&id];
        request.tell(GenerationEvent::Composed(prompt.busy));
        let fork = sequence.saved.pop();
        let mut state = Some(sequence.state);
        let choices = request.plan.choices.clone();
        let ids = request.plan.prompt_ids.clone();
        for (choice, PlanChoice { sampling, told, cancel }) in choices.into_iter().enumerate() {
            if cancel.is_cancelled() {
                self.end_choice(id, choice, ChoiceEnd::Cancelled);
                continue;
            }
            let own = match &fork {
                Some(frozen) => RunningState::resume(&self.setup.backend, &self.setup.model, frozen),
                None => state.take().expect("one answer goes on from the state itself"),
            };
            let mut answer = Decoding {
                request: id,
                choice,
                state: Some(own),
                sampler: Sampler::new(sampling, ids.iter().copied()),
                told: told.into(),
                last: 0,
            };
            if self.take_token(&mut answer, logits)? {
                self.answers.push(answer);
            }
        }
        Ok(())
    }
}

/// What the device did for a prompt.
enum Computed<B: Backend> {
    /// A part is on its way.
    Nothing,
    /// One layer.
    Layer,
    /// The last layer of a pass.
    Pass { rows: usize, sequence: SequenceOutput<B>, logits: Option<Vec<f32>> },
}

fn advance_pass<B: Backend>(
    prompt: &mut Prompt<B>,
    backend: &B,
    model: &Model<B>,
    ws: &mut Workspace<B>,
) -> Result<Computed<B>, CombineError> {
    let mut pass = prompt.pass.take().expect("just begun");
    let progress = pass.advance(backend, model, ws).map_err(|e| CombineError::Segment(e.to_string()))?;
    if progress != Progress::Done {
        prompt.pass = Some(pass);
        let waiting = matches!(progress, Progress::Waiting { .. });
        return Ok(if waiting { Computed::Nothing } else { Computed::Layer });
    }
    let rows = pass.rows();
    let mut output = pass.finish(backend, model, ws);
    let sequence = output.sequences.pop().expect("one sequence");
    Ok(Computed::Pass { rows, sequence, logits: output.logits.map(|l| backend.download(&l).to_f32()) })
}

/// How far a prompt came.
enum Step {
    /// Nowhere: it waits for a part.
    Waiting,
    /// Through a layer.
    Layer,
    /// Through a pass.
    Pass,
    /// To its first token.
    Prompt,
}
