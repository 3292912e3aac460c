//! The thread that owns a combiner's device.
//!
//! One owner drives everything: prompts advance a pass at a time and take turns, answers decode in one
//! batch. While there are answers, prompts get a slice of time between two decoding steps; a prompt that
//! waits for a part holds up nobody. Whatever ends a request (its last token, an error, its deadline, a
//! cancellation, a panic) removes it from the books here, and with that everything it held.

mod answers;
mod prompts;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::time::Instant;

use hypic_cache::{Store, Waker};
use hypic_kernels::Backend;
use hypic_model::{Model, RunningState, Workspace};
use hypic_transport::{ChoiceEnd, CombineError, GenerationEvent, Incoming, Plan, panic_text};
use tracing::{debug, error};

use answers::Decoding;

use crate::CombinerConfig;
use crate::combiner::Gauges;
use crate::prefix::{Lengths, PrefixState};
use crate::prompt::Prompt;

pub(crate) enum Command<B: Backend> {
    /// A plan, and its transfers by segment.
    Generate(Box<Plan>, Vec<Option<Incoming<B>>>),
    /// A part has arrived somewhere.
    Wake,
    Stop,
}

/// Wakes the thread, at most once until it has noticed.
pub(crate) struct Waking<B: Backend> {
    pub pending: Arc<AtomicBool>,
    pub commands: Sender<Command<B>>,
}

impl<B: Backend> Waking<B> {
    fn waker(&self) -> Waker {
        let (pending, commands) = (self.pending.clone(), self.commands.clone());
        Arc::new(move || {
            if !pending.swap(true, Ordering::AcqRel) {
                _ = commands.send(Command::Wake);
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

/// A request without a place.
struct Waiting<B: Backend> {
    plan: Plan,
    transfers: Vec<Option<Incoming<B>>>,
}

/// What a combiner works with.
pub(crate) struct Setup<B: Backend> {
    pub config: CombinerConfig,
    pub backend: B,
    pub model: Model<B>,
    pub store: Store<B, PrefixState<B>>,
    pub lengths: Lengths,
    pub gauges: Arc<Gauges>,
}

pub(crate) struct Device<B: Backend> {
    setup: Setup<B>,
    queue: Receiver<Command<B>>,
    waking: Waking<B>,
    waker: Waker,
    prompt_ws: Workspace<B>,
    decode_ws: Workspace<B>,
    next_id: u64,
    waiting: VecDeque<Waiting<B>>,
    requests: HashMap<u64, Request>,
    prompts: VecDeque<Prompt<B>>,
    answers: Vec<Decoding<B>>,
    stopping: bool,
}

impl<B: Backend> Device<B> {
    pub fn new(setup: Setup<B>, queue: Receiver<Command<B>>, waking: Waking<B>) -> Self {
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
        for Waiting { plan, .. } in std::mem::take(&mut self.waiting) {
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

    fn take(&mut self, command: Command<B>) {
        match command {
            Command::Generate(plan, _) if self.waiting.len() >= self.setup.config.max_waiting => {
                let waiting = self.waiting.len();
                _ = plan.events.send(GenerationEvent::Failed(CombineError::Overloaded { waiting }));
            }
            Command::Generate(plan, transfers) => self.waiting.push_back(Waiting { plan: *plan, transfers }),
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
        self.waiting.retain(|Waiting { plan, .. }| {
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
            .filter(|a| self.requests[&a.request].plan.choices[a.choice].cancel.is_cancelled())
            .map(|a| (a.request, a.choice))
            .collect();
        for (request, choice) in cancelled {
            self.answers.retain(|a| (a.request, a.choice) != (request, choice));
            self.end_choice(request, choice, ChoiceEnd::Cancelled);
        }
    }

    /// Begin as many waiting requests as there are places.
    fn admit(&mut self) {
        while let Some(next) = self.waiting.front() {
            let places = self.sequences() + next.plan.choices.len();
            if places > self.setup.config.max_sequences && self.sequences() > 0 {
                return;
            }
            let Waiting { plan, transfers } = self.waiting.pop_front().expect("just seen");
            let id = self.next_id;
            self.next_id += 1;
            let chunk = self.setup.config.chunk_rows;
            let prompt = Prompt::new(id, &plan, transfers, &self.setup, &self.waker, chunk);
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
        let prefilling = self.prompts.iter().filter_map(|p| self.requests.get(&p.request)).map(|r| r.open).sum();
        self.setup.gauges.prefilling.store(prefilling, Ordering::Relaxed);
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

    fn panicked(&self, panic: &(dyn std::any::Any + Send)) -> CombineError {
        let text = panic_text(panic);
        error!(combiner = %self.setup.config.id, reason = text, "a pass panicked");
        CombineError::Internal(text.to_string())
    }
}
