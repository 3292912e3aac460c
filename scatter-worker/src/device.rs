//! The thread that owns a worker's device.
//!
//! A few prefills are under way at a time, begun in the order they came; as many of their pieces go into a pass
//! as fit, and the pieces of a long segment take turns with what comes behind it. Between two layers the thread looks whether anybody still wants what it computes.
//! A panic in a pass fails the prefills of that pass and nothing else.

use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use hypic_cache::Lead;
use hypic_kernels::Backend;
use hypic_model::{Model, PartSink, Pass, Prefill, Progress, Workspace};
use hypic_state::LayerPart;
use hypic_transport::{JobError, JobSource, KvAhead, panic_text};
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tracing::{debug, error};

use crate::WorkerConfig;
use crate::interest::Wanted;
use crate::worker::Jobs;

pub(crate) enum Command<B: Backend> {
    Prefill(Work<B>),
    Stop,
}

/// A segment that this worker computes.
pub(crate) struct Work<B: Backend> {
    pub lead: Lead<B>,
    /// Where K and V may leave from before their layer is done; gone with the transfer.
    pub ahead: Weak<KvAhead<B>>,
    pub tokens: Arc<[u32]>,
    pub seam: usize,
    pub anchor: Arc<[u32]>,
    pub wanted: Wanted,
    pub reply: oneshot::Sender<Result<JobSource, JobError>>,
}

/// Publishes parts as they become final, and offers the transfer K and V of passes before the last.
struct LeadSink<B: Backend> {
    lead: Mutex<Option<Lead<B>>>,
    ahead: Weak<KvAhead<B>>,
    /// Tokens of the body.
    body: usize,
}

impl<B: Backend> PartSink<B> for LeadSink<B> {
    fn kv(&self, backend: &B, layer: usize, tokens: Range<usize>, own: &B::Kv, rows: Range<usize>) {
        // The last pass's rows leave with the part, which is next.
        if tokens.end == self.body {
            return;
        }
        if let Some(ahead) = self.ahead.upgrade() {
            ahead.offer(layer, tokens, || backend.kv_copy(own, rows));
        }
    }

    fn part(&self, layer: usize, part: LayerPart<B>) {
        // First, or a sender could find a token in both.
        if let Some(ahead) = self.ahead.upgrade() {
            ahead.forget(layer);
        }
        if let Some(lead) = &*self.lead.lock() {
            lead.publish(layer, part);
        }
    }
}

struct Running<B: Backend> {
    prefill: Prefill<B>,
    sink: Arc<LeadSink<B>>,
    wanted: Wanted,
    reply: oneshot::Sender<Result<JobSource, JobError>>,
    started: Instant,
    busy: Duration,
}

impl<B: Backend> Running<B> {
    fn fail(self, error: JobError) {
        if let Some(lead) = self.sink.lead.lock().take() {
            lead.fail(error.to_string());
        }
        _ = self.reply.send(Err(error));
    }
}

pub(crate) struct Device<B: Backend> {
    config: WorkerConfig,
    backend: B,
    model: Model<B>,
    ws: Workspace<B>,
    queue: Receiver<Command<B>>,
    waiting: VecDeque<Work<B>>,
    running: VecDeque<Running<B>>,
    stopping: bool,
    jobs: Jobs,
}

impl<B: Backend> Device<B> {
    pub fn new(config: WorkerConfig, backend: B, model: Model<B>, queue: Receiver<Command<B>>, jobs: Jobs) -> Self {
        let ws = Workspace::new(&backend);
        Device {
            config,
            backend,
            model,
            ws,
            queue,
            waiting: VecDeque::new(),
            running: VecDeque::new(),
            stopping: false,
            jobs,
        }
    }

    pub fn run(mut self) {
        while self.receive() {
            self.drop_unwanted();
            let batch = self.take_batch();
            self.jobs.set(self.waiting.len(), self.running.len() + batch.len());
            if !batch.is_empty() {
                self.compute(batch);
            }
            self.jobs.set(self.waiting.len(), self.running.len());
        }
    }

    /// Take in what has come; sleep if there is nothing to do. False when it is time to stop.
    fn receive(&mut self) -> bool {
        if self.waiting.is_empty() && self.running.is_empty() && !self.stopping {
            match self.queue.recv() {
                Ok(command) => self.take(command),
                Err(_) => return false,
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
            Command::Prefill(work) => self.waiting.push_back(work),
            Command::Stop => self.stopping = true,
        }
    }

    fn drop_unwanted(&mut self) {
        let (lost, wanted) = std::mem::take(&mut self.running).into_iter().partition(|r| !r.wanted.by_anyone());
        let lost: VecDeque<Running<B>> = lost;
        self.running = wanted;
        lost.into_iter().for_each(|running| running.fail(JobError::Cancelled));
        for work in std::mem::take(&mut self.waiting) {
            if !work.wanted.by_anyone() {
                work.lead.fail(JobError::Cancelled.to_string());
                _ = work.reply.send(Err(JobError::Cancelled));
            } else {
                self.waiting.push_back(work);
            }
        }
    }

    /// The prefills whose next pieces make the next pass, those that have waited longest first.
    fn take_batch(&mut self) -> Vec<Running<B>> {
        while self.running.len() < self.config.concurrent.max(1) {
            let Some(work) = self.waiting.pop_front() else { break };
            let started = self.start(work);
            self.running.push_back(started);
        }
        let (mut batch, mut rows) = (Vec::new(), 0);
        while let Some(next) = self.running.pop_front() {
            let more = next.prefill.next_rows();
            if !batch.is_empty() && rows + more > self.config.chunk_rows {
                self.running.push_front(next);
                break;
            }
            rows += more;
            batch.push(next);
        }
        batch
    }

    fn start(&self, work: Work<B>) -> Running<B> {
        let Work { lead, ahead, tokens, seam, anchor, wanted, reply } = work;
        debug!(worker = %self.config.id, key = %lead.key(), tokens = tokens.len(), "prefill begins");
        let body = tokens.len() - seam;
        let sink = Arc::new(LeadSink { lead: Mutex::new(Some(lead)), ahead, body });
        let chunk = self.config.chunk_rows;
        let prefill = Prefill::new(&self.backend, &self.model, &tokens, seam, &anchor, chunk, sink.clone());
        Running { prefill, sink, wanted, reply, started: Instant::now(), busy: Duration::ZERO }
    }

    fn compute(&mut self, mut batch: Vec<Running<B>>) {
        let begun = Instant::now();
        let rows: Vec<usize> = batch.iter().map(|r| r.prefill.next_rows()).collect();
        let walked = catch_unwind(AssertUnwindSafe(|| self.walk(&mut batch)));
        let finished = match walked {
            Ok(finished) => finished,
            Err(panic) => {
                let reason = panic_text(&*panic);
                error!(worker = %self.config.id, reason, "a prefill pass panicked");
                self.ws = Workspace::new(&self.backend);
                let failed = || JobError::Failed { worker: self.config.id.clone(), reason: reason.to_string() };
                batch.into_iter().for_each(|running| running.fail(failed()));
                return;
            }
        };
        if !finished {
            batch.into_iter().for_each(|running| running.fail(JobError::Cancelled));
            return;
        }
        let (elapsed, all_rows) = (begun.elapsed(), rows.iter().sum::<usize>());
        for (mut running, rows) in batch.into_iter().zip(rows) {
            running.busy += elapsed.mul_f64(rows as f64 / all_rows as f64);
            if running.prefill.is_done() {
                self.complete(running);
            } else {
                self.running.push_back(running);
            }
        }
    }

    /// One pass over the next pieces of `batch`; false if it was given up because nobody wants any of them.
    fn walk(&mut self, batch: &mut [Running<B>]) -> bool {
        let mut pass = Pass::new(batch.iter_mut().map(|r| r.prefill.take()).collect());
        loop {
            let progress = pass.advance(&self.backend, &self.model, &mut self.ws);
            if progress.expect("a prefill needs no parts") == Progress::Done {
                break;
            }
            if batch.iter().all(|r| !r.wanted.by_anyone()) {
                return false;
            }
        }
        let output = pass.finish(&self.backend, &self.model, &mut self.ws);
        for (running, sequence) in batch.iter_mut().zip(output.sequences) {
            running.prefill.put_back(sequence);
        }
        true
    }

    fn complete(&self, running: Running<B>) {
        let Running { sink, reply, started, busy, .. } = running;
        let lead = sink.lead.lock().take().expect("a prefill completes once");
        let key = lead.key();
        let done = lead.complete(self.model.layout(), busy);
        let outcome = match done {
            Ok(entry) => {
                debug!(worker = %self.config.id, %key, bytes = entry.bytes(), busy = ?busy, "prefill done");
                Ok(JobSource::Computed { started, ended: Instant::now(), busy })
            }
            Err(e) => Err(JobError::Failed { worker: self.config.id.clone(), reason: e.to_string() }),
        };
        _ = reply.send(outcome);
    }
}
