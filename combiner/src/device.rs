//! The thread that owns a combiner's device.
//!
//! One owner drives everything: prompts advance a pass at a time and take turns, answers decode in one
//! batch. While there are answers, prompts get a slice of time between two decoding steps; a prompt that
//! waits for a part holds up nobody. Whatever ends a request (its last token, an error, its deadline, a
//! cancellation, a panic) removes it from the books here, and with that everything it held.

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::time::Instant;

use hypic_cache::{Store, Waker};
use hypic_kernels::Backend;
use hypic_model::{Item, Logits, Model, Pass, Progress, RunningState, Sequence, SequenceOutput, Workspace};
use hypic_transport::{
    ChoiceEnd, CombineError, Exchange, GenerationEvent, Plan, SamplingParams, TokenEvent, panic_text,
};
use tracing::{debug, error};

use crate::combiner::Gauges;
use crate::prefix::{Lengths, PrefixState};
use crate::prompt::{Prompt, Save};
use crate::{CombinerConfig, Sampler};

pub(crate) enum Command {
    Generate(Box<Plan>),
    /// A part has arrived somewhere.
    Wake,
    Stop,
}

/// Wakes the thread, at most once until it has noticed.
#[derive(Clone)]
pub(crate) struct Waking {
    pub pending: Arc<AtomicBool>,
    pub commands: Sender<Command>,
}

impl Waking {
    fn waker(&self) -> Waker {
        let waking = self.clone();
        Arc::new(move || {
            if !waking.pending.swap(true, Ordering::AcqRel) {
                _ = waking.commands.send(Command::Wake);
            }
        })
    }
}

/// A request from admission to its end.
struct Request {
    plan: Plan,
    /// Answers that are not complete.
    open: usize,
}

impl Request {
    fn tell(&self, event: GenerationEvent) {
        // A receiver that has gone is noticed as a cancellation.
        _ = self.plan.events.send(event);
    }

    fn ending(&self, now: Instant) -> Option<CombineError> {
        if self.plan.cancel.is_cancelled() || self.plan.events.is_closed() {
            return Some(CombineError::Cancelled);
        }
        self.plan.deadline.filter(|&d| d <= now).map(|_| CombineError::Deadline)
    }
}

/// An answer that is being decoded.
struct Decoding<B: Backend> {
    request: u64,
    choice: usize,
    state: Option<RunningState<B>>,
    sampler: Sampler,
    /// The token to feed next.
    last: u32,
}

/// What a combiner works with.
pub(crate) struct Setup<B: Backend> {
    pub config: CombinerConfig,
    pub backend: B,
    pub model: Model<B>,
    pub store: Store<B, PrefixState<B>>,
    pub exchange: Exchange<B>,
    pub lengths: Lengths,
    pub gauges: Arc<Gauges>,
}

pub(crate) struct Device<B: Backend> {
    setup: Setup<B>,
    queue: Receiver<Command>,
    waking: Waking,
    waker: Waker,
    prompt_ws: Workspace<B>,
    decode_ws: Workspace<B>,
    next_id: u64,
    waiting: VecDeque<Plan>,
    requests: HashMap<u64, Request>,
    prompts: VecDeque<Prompt<B>>,
    answers: Vec<Decoding<B>>,
    stopping: bool,
}

impl<B: Backend> Device<B> {
    pub fn new(setup: Setup<B>, queue: Receiver<Command>, waking: Waking) -> Self {
        Device {
            prompt_ws: Workspace::new(&setup.backend),
            decode_ws: Workspace::new(&setup.backend),
            waker: waking.waker(),
            setup,
            queue,
            waking,
            next_id: 0,
            waiting: VecDeque::new(),
            requests: HashMap::new(),
            prompts: VecDeque::new(),
            answers: Vec::new(),
            stopping: false,
        }
    }

    pub fn run(mut self) {
        let mut idle = false;
        while self.receive(idle) {
            self.end_unwanted();
            self.admit();
            self.decode();
            idle = !self.advance_prompts() && self.answers.is_empty();
            self.publish_load();
        }
        for id in self.requests.keys().copied().collect::<Vec<_>>() {
            self.fail(id, CombineError::ShuttingDown);
        }
        for plan in std::mem::take(&mut self.waiting) {
            _ = plan.events.send(GenerationEvent::Failed(CombineError::ShuttingDown));
        }
        self.publish_load();
    }

    /// Take in what has come; when `idle`, sleep until something comes. False when it is time to stop.
    fn receive(&mut self, idle: bool) -> bool {
        if idle && !self.stopping {
            let nothing = self.requests.is_empty() && self.waiting.is_empty();
            let command = match nothing {
                true => self.queue.recv().map_err(|_| RecvTimeoutError::Disconnected),
                false => self.queue.recv_timeout(self.setup.config.poll),
            };
            match command {
                Ok(command) => self.take(command),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return false,
            }
        }
        loop {
            match self.queue.try_recv() {
                Ok(command) => self.take(command),
                Err(TryRecvError::Empty) => return !self.stopping,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
    }

    fn take(&mut self, command: Command) {
        match command {
            Command::Generate(plan) if self.waiting.len() >= self.setup.config.max_waiting => {
                let waiting = self.waiting.len();
                _ = plan.events.send(GenerationEvent::Failed(CombineError::Overloaded { waiting }));
            }
            Command::Generate(plan) => self.waiting.push_back(*plan),
            Command::Wake => self.waking.pending.store(false, Ordering::Release),
            Command::Stop => self.stopping = true,
        }
    }

    /// End what was cancelled, or is too late.
    fn end_unwanted(&mut self) {
        let now = Instant::now();
        let ended: Vec<(u64, CombineError)> =
            self.requests.iter().filter_map(|(&id, r)| r.ending(now).map(|why| (id, why))).collect();
        for (id, why) in ended {
            self.fail(id, why);
        }
        self.waiting.retain(|plan| {
            let late = plan.deadline.is_some_and(|d| d <= now);
            let why = if late { CombineError::Deadline } else { CombineError::Cancelled };
            let unwanted = late || plan.cancel.is_cancelled() || plan.events.is_closed();
            if unwanted {
                _ = plan.events.send(GenerationEvent::Failed(why));
            }
            !unwanted
        });
        let cancelled: Vec<(u64, usize)> = self
            .answers
            .iter()
            .filter(|a| self.requests[&a.request].plan.cancel_choice[a.choice].is_cancelled())
            .map(|a| (a.request, a.choice))
            .collect();
        for (request, choice) in cancelled {
            self.answers.retain(|a| (a.request, a.choice) != (request, choice));
            self.end_choice(request, choice, ChoiceEnd::Cancelled);
        }
    }

    /// Begin as many waiting requests as there are places.
    fn admit(&mut self) {
        while let Some(plan) = self.waiting.front() {
            let places = self.sequences() + plan.choices.len();
            if places > self.setup.config.max_sequences && self.sequences() > 0 {
                return;
            }
            let plan = self.waiting.pop_front().expect("just seen");
            let id = self.next_id;
            self.next_id += 1;
            let chunk = self.setup.config.chunk_rows;
            let prompt = Prompt::new(
                id,
                &plan,
                &self.setup.backend,
                &self.setup.model,
                &self.setup.exchange,
                &self.waker,
                chunk,
            );
            let open = plan.choices.len();
            let request = Request { plan, open };
            match prompt {
                Ok(prompt) => {
                    self.prompts.push_back(prompt);
                    self.requests.insert(id, request);
                }
                Err(why) => request.tell(GenerationEvent::Failed(why)),
            }
        }
    }

    fn sequences(&self) -> usize {
        self.requests.values().map(|r| r.open).sum()
    }

    fn publish_load(&self) {
        self.setup.gauges.waiting.store(self.waiting.len(), Ordering::Relaxed);
        self.setup.gauges.sequences.store(self.sequences(), Ordering::Relaxed);
        let answers = self.answers.iter().filter_map(|a| a.state.as_ref()).map(RunningState::bytes);
        let bytes = answers.chain(self.prompts.iter().map(Prompt::state_bytes)).sum();
        self.setup.gauges.state_bytes.store(bytes, Ordering::Relaxed);
    }

    fn fail(&mut self, id: u64, why: CombineError) {
        if let Some(request) = self.requests.remove(&id) {
            debug!(combiner = %self.setup.config.id, request = id, %why, "request ends early");
            request.tell(GenerationEvent::Failed(why));
        }
        self.prompts.retain(|p| p.request != id);
        self.answers.retain(|a| a.request != id);
    }

    fn end_choice(&mut self, id: u64, choice: usize, end: ChoiceEnd) {
        let Some(request) = self.requests.get_mut(&id) else {
            return;
        };
        request.open -= 1;
        request.tell(GenerationEvent::ChoiceDone { choice, end });
        if request.open == 0 {
            request.tell(GenerationEvent::Done);
            self.requests.remove(&id);
        }
    }

    // ---- prompts

    /// Advance prompts for a slice of time (as long as it takes to finish a layer at least). False if
    /// none could move.
    fn advance_prompts(&mut self) -> bool {
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
        let choices: Vec<SamplingParams> = request.plan.choices.clone();
        let ids = request.plan.prompt_ids.clone();
        for (choice, params) in choices.into_iter().enumerate() {
            let own = match &fork {
                Some(frozen) => RunningState::resume(&self.setup.backend, &self.setup.model, frozen),
                None => state.take().expect("one answer goes on from the state itself"),
            };
            let mut answer = Decoding {
                request: id,
                choice,
                state: Some(own),
                sampler: Sampler::new(params, ids.iter().copied()),
                last: 0,
            };
            if self.take_token(&mut answer, logits)? {
                self.answers.push(answer);
            }
        }
        Ok(())
    }

    // ---- answers

    /// Sample an answer's next token; false if it was the last one.
    fn take_token(&mut self, answer: &mut Decoding<B>, logits: &[f32]) -> Result<bool, CombineError> {
        let sampled = answer.sampler.sample(logits);
        let sampled = sampled.map_err(|e| CombineError::Sampling { field: e.field, message: e.message })?;
        let (id, choice) = (answer.request, answer.choice);
        answer.last = sampled.token;
        let plan = &self.requests[&id].plan;
        let (logprob, top) = sampled.logprobs.map_or((None, Vec::new()), |l| (Some(l.chosen), l.top));
        _ = plan.events.send(GenerationEvent::Token(TokenEvent { choice, token: sampled.token, logprob, top }));
        let end = if plan.eos.contains(&sampled.token) {
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
    fn decode(&mut self) {
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

    fn panicked(&self, panic: &(dyn std::any::Any + Send)) -> CombineError {
        let text = panic_text(panic);
        error!(combiner = %self.setup.config.id, reason = text, "a pass panicked");
        CombineError::Internal(text.to_string())
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
