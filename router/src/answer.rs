//! A request under way: its jobs at the workers, its tokens from the combiner, its text to the client.
//!
//! One task owns all of it. A job that fails goes to another worker, until it has been tried often enough;
//! then the combiner is told, and the request fails. A client that goes away cancels everything.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use futures::stream::{FuturesUnordered, StreamExt};
use hypic_text::{Detokenizer, StopMatcher, TextError, TextPipeline};
use hypic_transport::{
    ChoiceEnd, CombineError, GenerationEvent, JobError, JobOutcome, JobSource, TokenEvent, Transfer,
};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use crate::api::{
    Delta, Error, ErrorKind, Event, FinishReason, Progress, Report, SegmentReport, SegmentSource, Timings,
    TokenLogprob, TokenLogprobs, Usage,
};
use crate::balance::{Balancer, WorkerId};
use crate::plan::{Planned, PlannedJob, PlannedSegment, SegmentKind};
use crate::router::{Fleet, text_error};

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
    fn push(&mut self, token: &TokenEvent) -> Result<(Delta, bool), TextError> {
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
    fn finish(&mut self, choice: usize) -> Result<(Option<Delta>, bool), TextError> {
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

    fn named(&self, token_id: u32, logprob: f32) -> TokenLogprob {
        let bytes = self.text.as_ref().map(|t| t.tokenizer().token_bytes(token_id));
        TokenLogprob { token_id, logprob, bytes }
    }
}

type JobResult = (PlannedJob, String, Result<JobOutcome, JobError>);

/// A request under way.
pub(crate) struct Running {
    jobs: FuturesUnordered<BoxFuture<'static, JobResult>>,
    tries: Vec<usize>,
    attempts: usize,
    segments: Vec<PlannedSegment>,
    outcomes: Vec<Option<(JobOutcome, String)>>,
    transfers: Vec<Transfer>,
    fleet: Arc<Fleet>,
    balancer: Balancer,
    text: TextSide,
    /// Ends single choices at the combiner.
    cancel_choice: Vec<CancellationToken>,
    arrived: Instant,
    deadline: Option<Instant>,
    usage: Usage,
    times: Times,
    progress: Progress,
}

#[derive(Default)]
struct Times {
    began: Option<Instant>,
    compose: Duration,
    first_token: Option<Instant>,
}

impl Running {
    /// Hand the plan to the combiner and the jobs to their workers.
    pub fn start(
        planned: Planned,
        events: mpsc::UnboundedSender<GenerationEvent>,
        fleet: &Arc<Fleet>,
        balancer: &Balancer,
        attempts: usize,
        text: TextSide,
        progress: Progress,
    ) -> Self {
        let Planned { mut plan, jobs, segments, query, transfers } = planned;
        plan.events = events;
        let mut usage = Usage { prompt_tokens: query as u64, ..Usage::default() };
        usage.prompt_tokens += segments.iter().map(|s| s.tokens as u64).sum::<u64>();
        if let Some(hit) = &plan.resume {
            usage.exact_tokens = hit.exact as u64;
            usage.composed_tokens = (hit.tokens - hit.exact) as u64;
        }
        usage.computed_tokens = plan.query.len() as u64;
        progress.add(plan.resume.as_ref().map_or(0, |hit| hit.tokens));
        let mut running = Running {
            jobs: FuturesUnordered::new(),
            tries: vec![0; transfers.len()],
            attempts,
            outcomes: vec![None; segments.len()],
            segments,
            transfers,
            fleet: fleet.clone(),
            balancer: balancer.clone(),
            text,
            cancel_choice: plan.cancel_choice.clone(),
            arrived: plan.arrived,
            deadline: plan.deadline,
            usage,
            times: Times::default(),
            progress,
        };
        running.fleet.combine.generate(plan);
        for job in jobs {
            running.dispatch(job);
        }
        running
    }

    fn dispatch(&mut self, job: PlannedJob) {
        self.tries[job.transfer] += 1;
        let Some(worker) = job.worker.clone() else {
            return self.transfers[job.transfer].fail("no scatter worker is there to prefill it");
        };
        let (id, answer) = (worker.id().to_string(), worker.prefill(job.job.clone()));
        self.jobs.push(Box::pin(async move { (job, id, answer.await) }));
    }

    /// See the request through to its last event.
    pub async fn drive(
        mut self,
        mut generation: mpsc::UnboundedReceiver<GenerationEvent>,
        client: mpsc::Sender<Event>,
        cancel: CancellationToken,
    ) {
        let _gone = cancel.clone().drop_guard();
        loop {
            let told = tokio::select! {
                biased;
                () = client.closed() => return,
                Some(result) = self.jobs.next() => {
                    self.job_done(result);
                    continue;
                }
                event = generation.recv() => match event {
                    Some(event) => self.generated(event, &client).await,
                    None => Err(Error::new(ErrorKind::Internal, "the combiner is gone")),
                },
            };
            match told {
                Ok(false) => {}
                Ok(true) => break,
                Err(error) => {
                    _ = client.send(Event::Failed(error)).await;
                    return;
                }
            }
        }
        // Every part has arrived. What the workers say of it follows at once; one that says nothing holds up
        // the report no longer than the request may take, and one that says it failed is not asked again.
        let deadline = self.deadline;
        let late = async move {
            match deadline {
                Some(at) => tokio::time::sleep_until(at.into()).await,
                None => std::future::pending().await,
            }
        };
        tokio::pin!(late);
        loop {
            let (job, worker, result) = tokio::select! {
                biased;
                () = client.closed() => return,
                result = self.jobs.next() => match result {
                    Some(result) => result,
                    None => break,
                },
                () = &mut late => break,
            };
            if let Ok(outcome) = result {
                self.job_succeeded(job, worker, outcome);
            }
        }
        _ = client.send(Event::Report(self.report())).await;
    }

    fn job_succeeded(&mut self, mut job: PlannedJob, worker: String, outcome: JobOutcome) {
        if let (JobSource::Computed { busy, .. }, Some(charge)) = (outcome.source, job.charge.take()) {
            charge.complete(busy);
        }
        self.outcomes[job.segment] = Some((outcome, worker));
        self.progress.add(job.job.tokens.len() - job.job.seam);
    }

    fn job_done(&mut self, (mut job, worker, result): JobResult) {
        let error = match result {
            Ok(outcome) => return self.job_succeeded(job, worker, outcome),
            Err(error) => error,
        };
        if job.job.cancel.is_cancelled() {
            return;
        }
        warn!(%worker, key = %job.job.key, %error, "a segment was not prefilled");
        if self.tries[job.transfer] >= self.attempts {
            let reason = format!("segment {} could not be prefilled: {error}", job.segment);
            return self.transfers[job.transfer].fail(&reason);
        }
        let rows = [job.job.tokens.len() + job.job.anchor.len()];
        let elsewhere = self.balancer.assign_excluding(&rows, &[WorkerId::from(worker.as_str())]);
        // With no other worker the same one may do better.
        let assignment = elsewhere.or_else(|_| self.balancer.assign(&rows)).ok().and_then(|mut a| a.pop());
        if let Some(assignment) = assignment {
            job.worker = self.fleet.scatter.iter().find(|w| w.id() == assignment.worker.as_str()).cloned();
            job.charge = Some(assignment.charge);
        }
        self.dispatch(job);
    }

    /// Pass on what the combiner tells; true if that was all.
    async fn generated(&mut self, event: GenerationEvent, client: &mpsc::Sender<Event>) -> Result<bool, Error> {
        match event {
            GenerationEvent::Started(at) => self.times.began = Some(at),
            GenerationEvent::Rows(rows) => self.progress.add(rows),
            GenerationEvent::Composed(busy) => self.times.compose = busy,
            GenerationEvent::Token(token) => {
                self.times.first_token.get_or_insert_with(Instant::now);
                if self.text.choices[token.choice].finished {
                    return Ok(false);
                }
                self.usage.completion_tokens += 1;
                let (delta, stopped) = self.text.push(&token).map_err(text_error)?;
                _ = client.send(Event::Delta(delta)).await;
                if stopped {
                    self.cancel_choice[token.choice].cancel();
                    self.finish(token.choice, FinishReason::Stop, client).await;
                }
            }
            GenerationEvent::ChoiceDone { choice, end } => {
                if self.text.choices[choice].finished {
                    return Ok(false);
                }
                let (rest, stopped) = self.text.finish(choice).map_err(text_error)?;
                if let Some(delta) = rest {
                    _ = client.send(Event::Delta(delta)).await;
                }
                let reason = match end {
                    ChoiceEnd::Length if !stopped => FinishReason::Length,
                    ChoiceEnd::Length | ChoiceEnd::Eos | ChoiceEnd::Cancelled => FinishReason::Stop,
                };
                self.finish(choice, reason, client).await;
            }
            GenerationEvent::Done => return Ok(true),
            GenerationEvent::Failed(why) => return Err(combine_error(why)),
        }
        Ok(false)
    }

    async fn finish(&mut self, choice: usize, reason: FinishReason, client: &mpsc::Sender<Event>) {
        self.text.choices[choice].finished = true;
        _ = client.send(Event::Finished { choice: choice as u32, reason }).await;
    }

    fn report(&mut self) -> Report {
        let mut usage = self.usage;
        let mut segments = Vec::with_capacity(self.segments.len());
        let (mut first, mut last): (Option<Instant>, Option<Instant>) = (None, None);
        for (planned, outcome) in self.segments.iter().zip(&self.outcomes) {
            let (tokens, mut reused) = (planned.tokens as u64, planned.covered as u64);
            let mut worker = None;
            let source = match planned.kind {
                SegmentKind::Covered => SegmentSource::Prefix,
                SegmentKind::Ordinary => {
                    usage.computed_tokens += tokens - reused;
                    SegmentSource::Computed
                }
                SegmentKind::SeamOnly => {
                    usage.seam_tokens += tokens;
                    SegmentSource::SeamOnly
                }
                SegmentKind::Composed { seam } => {
                    usage.seam_tokens += seam as u64;
                    let body = tokens - seam as u64;
                    match outcome {
                        Some((JobOutcome { source: JobSource::Computed { started, ended, .. } }, by)) => {
                            first = first.into_iter().chain([*started]).min();
                            last = last.max(Some(*ended));
                            usage.computed_tokens += body;
                            worker = Some(by.clone());
                            SegmentSource::Computed
                        }
                        _ => {
                            usage.composed_tokens += body;
                            reused = body;
                            SegmentSource::Memory
                        }
                    }
                }
            };
            segments.push(SegmentReport { tokens, reused, source, worker });
        }
        debug_assert_eq!(
            usage.exact_tokens + usage.composed_tokens + usage.seam_tokens + usage.computed_tokens,
            usage.prompt_tokens
        );
        // To the microsecond: more digits would be noise.
        let ms = |d: Duration| (d.as_secs_f64() * 1e6).round() / 1e3;
        let since = |t: Instant| ms(t.saturating_duration_since(self.arrived));
        let begun = first.into_iter().chain(self.times.began).min();
        let timings = Timings {
            queue: begun.map_or(0.0, since),
            prefill: first.zip(last).map_or(0.0, |(a, b)| ms(b.saturating_duration_since(a))),
            compose: ms(self.times.compose),
            first_token: self.times.first_token.map_or(0.0, since),
            total: ms(self.arrived.elapsed()),
        };
        debug!(?usage, ?timings, "request done");
        Report { usage, segments, timings_ms: timings }
    }
}

fn combine_error(why: CombineError) -> Error {
    let kind = match &why {
        CombineError::Overloaded { .. } => ErrorKind::Overloaded,
        CombineError::Deadline => ErrorKind::Deadline,
        CombineError::Cancelled | CombineError::ShuttingDown => ErrorKind::Unavailable,
        CombineError::Sampling { field, message } => return Error::invalid(*field, message.clone()),
        CombineError::Segment(_) | CombineError::Internal(_) => ErrorKind::Internal,
    };
    Error::new(kind, why.to_string())
}
