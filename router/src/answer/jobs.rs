//! The entries that one plan needs: who was asked for each, and what is done when they fail, are late, or slow.
//!
//! An attempt that fails is followed by one at another worker, of the next generation, until that was tried often
//! enough, the budget is spent or no worker is usable; then the combiner computes the entry itself, which nothing
//! refuses. Only the newest attempt's failure matters: an earlier one's place at the combiner is taken. What can go
//! wrong in the end: the combiner cannot compute it either, or is gone.

mod attempt;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use futures::stream::{FuturesUnordered, StreamExt};
use hypic_telemetry::{AttemptKind, TransferFailure, metrics};
use hypic_transport::{Combine, Delivery, JobError, JobOutcome, JobSource, PrefillJob, TransferId};
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::balance::Charge;
use crate::breaker::Verdict;
use crate::flights::Boarded;
use crate::plan::{Origin, Placement, Placer, Wanted, rows};
use crate::router::Core;
use attempt::{Attempt, Entry, Reckoned, ask};
pub(crate) use attempt::{Step, Trouble};

/// The entries of one plan.
pub(crate) struct Jobs {
    core: Arc<Core>,
    combiner: Arc<dyn Combine>,
    cancel: CancellationToken,
    entries: Vec<Entry>,
    steps: FuturesUnordered<BoxFuture<'static, Step>>,
    attempts: HashMap<u64, Attempt>,
    next_attempt: u64,
    /// The combiner has all it needs.
    composed: bool,
}

impl Jobs {
    /// Ask for everything that the combiner does not hold. `cancel` ends all of it.
    pub fn start(core: Arc<Core>, combiner: Arc<dyn Combine>, wanted: Vec<Wanted>, cancel: CancellationToken) -> Self {
        let mut jobs = Jobs {
            core,
            combiner,
            cancel,
            entries: Vec::with_capacity(wanted.len()),
            steps: FuturesUnordered::new(),
            attempts: HashMap::new(),
            next_attempt: 0,
            composed: false,
        };
        for (i, wanted) in wanted.into_iter().enumerate() {
            let Wanted { segment, index, job, from } = wanted;
            jobs.entries.push(Entry {
                segment,
                index,
                job,
                sent: None,
                tries: 0,
                failed: Vec::new(),
                reasons: Vec::new(),
                same_again: false,
                hedged: false,
                outcome: None,
            });
            match from {
                Origin::Combiner => {}
                Origin::Worker(placement) => {
                    jobs.core.budget.earn();
                    jobs.send(i, placement);
                }
                Origin::LastResort => jobs.last_resort(i),
            }
        }
        jobs
    }

    /// The combiner does not hold the entry of the plan's segment `index`.
    pub fn missing(&mut self, index: usize) {
        let Some(i) = self.entries.iter().position(|entry| entry.index == index && entry.sent.is_none()) else {
            warn!(index, "the combiner misses an entry that it need not hold");
            return;
        };
        let job = self.entries[i].job.clone();
        let placer = Placer::new(&self.core, self.core.fleet.directory());
        let held = placer.place_held(&job, &placer.directory().holders(job.key));
        let placement = held.or_else(|| placer.place_cold(&[&job], &[]).pop().flatten());
        match placement {
            Some(placement) => {
                self.core.budget.earn();
                self.send(i, placement);
            }
            None => self.last_resort(i),
        }
    }

    /// The combiner has all parts: nothing is asked for any more.
    pub fn composed(&mut self) {
        self.composed = true;
        for attempt in self.attempts.values_mut() {
            if self.entries[attempt.entry].outcome.is_some() {
                attempt.give_up();
            }
        }
    }

    /// The next thing that comes to pass; never, if nothing is under way. Cancel-safe.
    pub async fn next(&mut self) -> Step {
        match self.steps.next().await {
            Some(step) => step,
            None => std::future::pending().await,
        }
    }

    /// Do what follows from a step. Tokens of the body that is there now, if one is.
    ///
    /// # Errors
    /// If an entry cannot be had at all.
    pub fn handle(&mut self, step: Step) -> Result<usize, Trouble> {
        match step {
            Step::Ended { attempt, result } => return self.ended(attempt, result),
            Step::Again(entry) if !self.composed => self.again(entry),
            Step::Slow { entry, attempt } if !self.composed => self.slow(entry, attempt),
            Step::Again(_) | Step::Slow { .. } => {}
        }
        Ok(0)
    }

    /// Whether somebody has still to say how it went.
    pub fn unsettled(&self) -> bool {
        self.attempts.values().any(|attempt| self.entries[attempt.entry].outcome.is_none())
    }

    /// Who brought the entry of the prompt's segment `segment`, and how; `None` if the combiner had it.
    pub fn outcome(&self, segment: usize) -> Option<&(JobOutcome, Arc<str>)> {
        self.entries.iter().find(|entry| entry.segment == segment)?.outcome.as_ref()
    }

    fn send(&mut self, i: usize, placement: Placement) {
        let Placement { worker, held_only, charge, boarded } = placement;
        let id: Arc<str> = worker.id().into();
        let (balancer, faults) = (self.core.fleet.balancer(), &self.core.config.faults);
        let entry = &mut self.entries[i];
        let own = match &charge {
            Some(_) => Duration::ZERO,
            None => balancer.estimate(&id, rows(&entry.job)).unwrap_or_default(),
        };
        let others = balancer.others(&id).unwrap_or_default();
        let expected = balancer.backlog(&id).unwrap_or_default().saturating_add(own);
        let until = Instant::now() + faults.late_after(expected, balancer.is_measured());
        let slow = (faults.hedge && !held_only && !entry.hedged).then(|| faults.hedge_after(expected));

        self.core.breakers.begin(&id);
        let deadline = entry.job.deadline.into_iter().chain([until.into_std()]).min();
        let (attempt, job) = self.attempt(i, id.clone(), held_only, deadline, charge, boarded);
        if let Some(attempt) = self.attempts.get_mut(&attempt) {
            attempt.reckoned = Reckoned { whole: expected, others };
        }
        let answer = ask(&id, job, |job| worker.prefill(job));
        self.steps.push(Box::pin(async move {
            let result = tokio::select! {
                biased;
                result = answer => result,
                () = sleep_until(until) => Err(JobError::Late(id.to_string())),
            };
            Step::Ended { attempt, result }
        }));
        if let Some(after) = slow {
            self.watch(i, attempt, after);
        }
    }

    /// Have the combiner compute an entry.
    fn last_resort(&mut self, i: usize) {
        let entry = &self.entries[i];
        info!(request = %entry.job.request, key = %entry.job.key, "the combiner computes a segment itself");
        let deadline = entry.job.deadline;
        let (attempt, job) = self.attempt(i, self.combiner.id().into(), false, deadline, None, None);
        if let Some(attempt) = self.attempts.get_mut(&attempt) {
            attempt.last_resort = true;
        }
        metrics().last_resort_prefill();
        let answer = ask(self.combiner.id(), job, |job| self.combiner.prefill(job));
        self.steps.push(Box::pin(async move { Step::Ended { attempt, result: answer.await } }));
    }

    fn attempt(
        &mut self,
        i: usize,
        worker: Arc<str>,
        held_only: bool,
        deadline: Option<std::time::Instant>,
        charge: Option<Charge>,
        boarded: Option<Boarded>,
    ) -> (u64, PrefillJob) {
        let entry = &mut self.entries[i];
        let transfer = entry.sent.map_or(entry.job.to.transfer, TransferId::next);
        entry.sent = Some(transfer);
        entry.tries += usize::from(!held_only && !entry.hedged);
        let cancel = self.cancel.child_token();
        let to = Delivery { transfer, ..entry.job.to.clone() };
        let job = PrefillJob { to, held_only, deadline, cancel: cancel.clone(), ..entry.job.clone() };
        let (begun, out) = (Instant::now(), self.core.jobs_out.enter());
        let reckoned = Reckoned::default();
        let attempt = Attempt {
            entry: i,
            worker,
            transfer,
            cancel,
            charge,
            boarded,
            last_resort: false,
            begun,
            reckoned,
            _out: out,
        };
        self.next_attempt += 1;
        self.attempts.insert(self.next_attempt, attempt);
        (self.next_attempt, job)
    }

    fn watch(&mut self, entry: usize, attempt: u64, after: Duration) {
        self.steps.push(Box::pin(async move {
            sleep(after).await;
            Step::Slow { entry, attempt }
        }));
    }

    fn ended(&mut self, attempt: u64, result: Result<JobOutcome, JobError>) -> Result<usize, Trouble> {
        let Some(mut attempt) = self.attempts.remove(&attempt) else {
            return Ok(0);
        };
        if !attempt.last_resort {
            let verdict = self.verdict(&attempt, &result);
            self.core.breakers.end(&attempt.worker, verdict, &self.core.config.faults);
        }
        let outcome = match result {
            Ok(outcome) => outcome,
            Err(error) => {
                if let JobError::Undelivered { .. } = error {
                    metrics().transfer_failure(self.undelivered(&attempt));
                }
                return self.failed(attempt, error);
            }
        };
        self.learn(&attempt, &outcome);
        if let (JobSource::Computed { busy, .. }, Some(charge)) = (outcome.source, attempt.charge.take()) {
            charge.complete(busy);
        }
        let entry = &mut self.entries[attempt.entry];
        // A later one may have taken this one's place at the combiner: that one has to be seen through.
        if entry.sent == Some(attempt.transfer) {
            let others = self.attempts.values_mut().filter(|other| other.entry == attempt.entry);
            others.for_each(Attempt::give_up);
        }
        if entry.outcome.is_some() {
            return Ok(0);
        }
        entry.outcome = Some((outcome, attempt.worker.clone()));
        Ok(entry.job.tokens.len() - entry.job.seam)
    }

    /// What a transfer says of the links.
    fn learn(&self, attempt: &Attempt, outcome: &JobOutcome) {
        if outcome.sent_bytes == 0 {
            return;
        }
        let wall = attempt.begun.elapsed();
        metrics().transfer_bytes(outcome.sent_bytes);
        let (balancer, tokens) = (self.core.fleet.balancer(), self.entries[attempt.entry].job.tokens.len());
        match outcome.source {
            JobSource::Held => match &attempt.charge {
                Some(charge) => charge.sent(tokens, outcome.sent_bytes, wall),
                None => balancer.sized(tokens, outcome.sent_bytes),
            },
            // It was sent while it was computed: its time says nothing of the link.
            JobSource::Computed { .. } | JobSource::Shared => {
                metrics().transfer_hidden(outcome.hidden_bytes as f64 / outcome.sent_bytes as f64);
                balancer.sized(tokens, outcome.sent_bytes);
            }
        }
    }

    fn verdict(&self, attempt: &Attempt, result: &Result<JobOutcome, JobError>) -> Verdict {
        match result {
            Ok(_) => Verdict::Good,
            Err(_) if attempt.cancel.is_cancelled() => Verdict::Neutral,
            Err(JobError::Cancelled | JobError::NotHere(_)) => Verdict::Neutral,
            // The combiner's fault, more likely.
            Err(JobError::Undelivered { .. }) if !self.combiner.is_running() => Verdict::Neutral,
            Err(JobError::Late(_)) if self.is_busy_for_others(attempt) => Verdict::Neutral,
            Err(_) => Verdict::Bad,
        }
    }

    /// Whether a worker that is late tells of more work for others than was reckoned with, which is reason enough. Work
    /// that was known of is none: it had time for that, several times over.
    fn is_busy_for_others(&self, attempt: &Attempt) -> bool {
        let (balancer, view) = (self.core.fleet.balancer(), self.core.fleet.view());
        let serving = view.worker(&attempt.worker).is_some_and(|worker| worker.is_running());
        let more = balancer.others(&attempt.worker).unwrap_or_default().saturating_sub(attempt.reckoned.others);
        let faults = &self.core.config.faults;
        let enough = faults.late_after(attempt.reckoned.whole.saturating_add(more), balancer.is_measured());
        serving && !more.is_zero() && attempt.begun.elapsed() < enough
    }

    /// Why an entry did not arrive, as far as can be told from here.
    fn undelivered(&self, attempt: &Attempt) -> TransferFailure {
        if attempt.cancel.is_cancelled() {
            return TransferFailure::Cancelled;
        }
        if self.combiner.is_running() { TransferFailure::Other } else { TransferFailure::Disconnected }
    }

    fn failed(&mut self, attempt: Attempt, error: JobError) -> Result<usize, Trouble> {
        let i = attempt.entry;
        attempt.cancel.cancel();
        let entry = &mut self.entries[i];
        if self.composed || self.cancel.is_cancelled() || entry.sent != Some(attempt.transfer) {
            return Ok(0);
        }
        if let JobError::NotHere(_) = error {
            drop(attempt);
            self.again(i);
            return Ok(0);
        }
        warn!(request = %entry.job.request, worker = %attempt.worker, key = %entry.job.key, %error, "a segment was not prefilled");
        entry.reasons.push(error.to_string());
        if attempt.last_resort {
            return Err(match error {
                JobError::Gone(_) => Trouble::CombinerGone,
                _ => {
                    let reasons = entry.reasons.join("; ");
                    Trouble::Failed(format!("segment {} could not be prefilled: {reasons}", entry.segment))
                }
            });
        }
        let kind = match error {
            JobError::Undelivered { .. } => AttemptKind::Transfer,
            _ => AttemptKind::Scatter,
        };
        entry.same_again = !matches!(error, JobError::Late(_) | JobError::Gone(_));
        entry.failed.push(attempt.worker.clone());
        // Its flight and charge are given back before somebody else is looked for.
        drop(attempt);
        let faults = &self.core.config.faults;
        if entry.tries >= faults.attempts || !self.core.budget.spend() {
            self.last_resort(i);
            return Ok(0);
        }
        metrics().retry(kind);
        let wait = faults.backoff(entry.failed.len(), rand::random());
        self.steps.push(Box::pin(async move {
            sleep(wait).await;
            Step::Again(i)
        }));
        let view = self.core.fleet.view();
        self.core.breakers.retain(|id| view.worker(id).is_some());
        Ok(0)
    }

    fn again(&mut self, i: usize) {
        let entry = &self.entries[i];
        let placer = Placer::new(&self.core, self.core.fleet.directory());
        let place = |except: &[Arc<str>]| placer.place_cold(&[&entry.job], except).pop().flatten();
        // With no other worker the same one may do better.
        let placement = place(&entry.failed).or_else(|| entry.same_again.then(|| place(&[])).flatten());
        match placement {
            Some(placement) => self.send(i, placement),
            None => self.last_resort(i),
        }
    }

    /// Hedge the only entry that is missing.
    fn slow(&mut self, i: usize, attempt: u64) {
        let entry = &self.entries[i];
        let Some(slow) = self.attempts.get(&attempt).filter(|_| entry.outcome.is_none() && !entry.hedged) else {
            return;
        };
        let missing = self.entries.iter().filter(|e| e.sent.is_some() && e.outcome.is_none()).count();
        let placer = Placer::new(&self.core, self.core.fleet.directory());
        let except: Vec<Arc<str>> = entry.failed.iter().chain([&slow.worker]).cloned().collect();
        let placement = if missing == 1 { placer.place_idle(&entry.job, &except) } else { None };
        match placement {
            Some(placement) if self.core.budget.spend() => {
                info!(request = %entry.job.request, slow = %slow.worker, hedge = placement.worker.id(), "a segment is hedged");
                metrics().hedge(AttemptKind::Scatter);
                self.entries[i].hedged = true;
                self.send(i, placement);
            }
            _ => self.watch(i, attempt, self.core.config.faults.hedge_floor),
        }
    }
}

impl Drop for Jobs {
    fn drop(&mut self) {
        // A probe that nobody waits for any more says nothing, and another one may follow.
        for attempt in self.attempts.values().filter(|attempt| !attempt.last_resort) {
            attempt.cancel.cancel();
            self.core.breakers.end(&attempt.worker, Verdict::Neutral, &self.core.config.faults);
        }
    }
}
