//! A request under way: its plan at a combiner, its jobs at the workers, its text to the client.
//!
//! One task owns all of it. A combiner that is lost is replaced by another one, which is told the tokens that the client
//! has; the client notices only time. If none comes soon enough, or a segment cannot be had from anybody, the request
//! fails with what happened, and never with a reason to finish. A client that goes away cancels everything.

mod jobs;
mod report;
mod round;
#[cfg(test)]
mod tests;
mod text;

use std::sync::Arc;
use std::time::Instant;

use hypic_telemetry::{AttemptKind, metrics};
use hypic_transport::{ChoiceEnd, CombineError, GenerationEvent, TokenEvent};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::api::{Error, ErrorKind, Event, FinishReason, Progress};
use crate::plan::Avoid;
use crate::router::{Core, text_error};
use jobs::Trouble;
use report::{Times, report};
pub(crate) use round::Ask;
use round::Round;
pub(crate) use text::TextSide;

/// How a request goes on.
enum Turn {
    On,
    Done,
    /// The client has gone.
    Away,
    /// The plan must be made again.
    Lost(CombineError),
    Failed(Error),
}

/// A request under way.
pub(crate) struct Running {
    core: Arc<Core>,
    ask: Ask,
    text: TextSide,
    /// Tokens of each choice that the client has.
    told: Vec<Vec<u32>>,
    round: Round,
    avoid: Avoid,
    /// Combiners that have too much to do at the moment.
    busy: Vec<String>,
    /// Since when no combiner has taken the request up, once one was lost.
    lost_at: Option<tokio::time::Instant>,
    completion_tokens: u64,
    times: Times,
    progress: Progress,
    cancel: CancellationToken,
}

impl Running {
    /// Plan and hand out a request.
    ///
    /// # Errors
    /// If there is no combiner.
    pub fn start(core: Arc<Core>, ask: Ask, text: TextSide, progress: Progress) -> Result<Self, Error> {
        let (cancel, avoid) = (CancellationToken::new(), Avoid::default());
        let told = vec![Vec::new(); ask.choices.len()];
        let round = Round::start(&core, &ask, &avoid, &told, &text, &cancel);
        let round = round.ok_or_else(|| Error::new(ErrorKind::Unavailable, "no combiner is there: try again later"))?;
        progress.reached(round.done);
        Ok(Running {
            core,
            ask,
            text,
            told,
            round,
            avoid,
            busy: Vec::new(),
            lost_at: None,
            completion_tokens: 0,
            times: Times::default(),
            progress,
            cancel,
        })
    }

    /// See the request through to its last event.
    pub async fn drive(mut self, client: mpsc::Sender<Event>) {
        let _gone = self.cancel.clone().drop_guard();
        loop {
            let mut turn = self.turn(&client).await;
            if let Turn::Lost(why) = turn {
                turn = self.recover(why, &client).await;
            }
            match turn {
                Turn::On | Turn::Lost(_) => {}
                Turn::Done => break,
                Turn::Away => return,
                Turn::Failed(error) => {
                    _ = client.send(Event::Failed(error)).await;
                    return;
                }
            }
        }
        if self.settle(&client).await {
            let report = report(&self.round, &self.times, self.ask.arrived, self.completion_tokens);
            _ = client.send(Event::Report(report)).await;
        }
    }

    async fn turn(&mut self, client: &mpsc::Sender<Event>) -> Turn {
        let deadline = self.ask.settings.deadline;
        tokio::select! {
            biased;
            () = client.closed() => Turn::Away,
            step = self.round.jobs.next() => match self.round.jobs.handle(step) {
                Ok(tokens) => {
                    self.advance(tokens);
                    Turn::On
                }
                Err(Trouble::CombinerGone) => Turn::Lost(self.gone()),
                Err(Trouble::Failed(message)) => Turn::Failed(Error::new(ErrorKind::Internal, message)),
            },
            event = self.round.events.recv() => match event {
                Some(event) => self.generated(event, client).await,
                None => Turn::Lost(self.gone()),
            },
            () = at(deadline) => Turn::Failed(combine_error(CombineError::Deadline)),
        }
    }

    fn gone(&self) -> CombineError {
        CombineError::Gone(self.round.combiner.id().to_owned())
    }

    fn advance(&mut self, tokens: usize) {
        self.round.done += tokens;
        self.progress.reached(self.round.done);
    }

    /// Pass on what the combiner tells.
    async fn generated(&mut self, event: GenerationEvent, client: &mpsc::Sender<Event>) -> Turn {
        match event {
            GenerationEvent::Missing(index) => self.round.jobs.missing(index),
            GenerationEvent::Started(at) => {
                self.lost_at = None;
                self.times.began.get_or_insert(at);
            }
            GenerationEvent::Rows(rows) => self.advance(rows),
            GenerationEvent::Composed(busy) => {
                self.round.jobs.composed();
                self.times.compose = busy;
            }
            GenerationEvent::Token(token) => {
                if let Err(error) = self.token(token, client).await {
                    return Turn::Failed(error);
                }
            }
            GenerationEvent::ChoiceDone { choice, end } => {
                if let Err(error) = self.choice_done(choice, end, client).await {
                    return Turn::Failed(error);
                }
            }
            GenerationEvent::Done => return Turn::Done,
            GenerationEvent::Failed(why) => {
                return match why {
                    CombineError::Gone(_)
                    | CombineError::ShuttingDown
                    | CombineError::StalePrefix
                    | CombineError::Overloaded { .. } => Turn::Lost(why),
                    _ => Turn::Failed(combine_error(why)),
                };
            }
        }
        Turn::On
    }

    async fn token(&mut self, token: TokenEvent, client: &mpsc::Sender<Event>) -> Result<(), Error> {
        self.times.first_token.get_or_insert_with(Instant::now);
        let choice = token.choice;
        if self.text.is_finished(choice) {
            return Ok(());
        }
        self.completion_tokens += 1;
        self.told[choice].push(token.token);
        let (delta, stopped) = self.text.push(&token).map_err(text_error)?;
        _ = client.send(Event::Delta(delta)).await;
        if stopped {
            self.round.cancel_choice[choice].cancel();
            self.finish(choice, FinishReason::Stop, client).await;
        }
        Ok(())
    }

    async fn choice_done(&mut self, choice: usize, end: ChoiceEnd, client: &mpsc::Sender<Event>) -> Result<(), Error> {
        if self.text.is_finished(choice) {
            return Ok(());
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
        Ok(())
    }

    async fn finish(&mut self, choice: usize, reason: FinishReason, client: &mpsc::Sender<Event>) {
        self.text.set_finished(choice);
        _ = client.send(Event::Finished { choice: choice as u32, reason }).await;
    }

    /// Choices whose last token was told end without a combiner.
    async fn finish_told(&mut self, client: &mpsc::Sender<Event>) -> Result<(), Error> {
        for choice in 0..self.told.len() {
            let end = match self.told[choice].last() {
                Some(token) if self.ask.eos.contains(token) => ChoiceEnd::Eos,
                Some(_) if self.told[choice].len() >= self.ask.max_tokens => ChoiceEnd::Length,
                _ => continue,
            };
            self.choice_done(choice, end, client).await?;
        }
        Ok(())
    }

    /// Hand the request to another combiner, or plan it anew.
    async fn recover(&mut self, why: CombineError, client: &mpsc::Sender<Event>) -> Turn {
        if let Err(error) = self.finish_told(client).await {
            return Turn::Failed(error);
        }
        if self.text.all_finished() {
            return Turn::Done;
        }
        let combiner = self.round.combiner.id().to_owned();
        warn!(request = %self.ask.settings.request, combiner, %why, "a plan is made again");
        let begun = self.told.iter().any(|told| !told.is_empty());
        match (&why, self.round.resume) {
            (CombineError::StalePrefix, Some(hit)) if !self.avoid.states.contains(&hit.key) => {
                self.avoid.states.push(hit.key);
            }
            (CombineError::Overloaded { .. }, _) => {
                // Another one is tried once; an answer that has begun is not refused.
                if !self.busy.is_empty() && !begun {
                    return Turn::Failed(combine_error(why));
                }
                self.busy.push(combiner);
            }
            _ => self.avoid.combiners.push(combiner),
        }
        self.round.cancel.cancel();
        let faults = &self.core.config.faults;
        let (patience, interval) = (faults.failover_wait, faults.failover_interval);
        let until = *self.lost_at.get_or_insert_with(tokio::time::Instant::now) + patience;
        loop {
            let avoid = Avoid {
                combiners: self.avoid.combiners.iter().chain(&self.busy).cloned().collect(),
                states: self.avoid.states.clone(),
            };
            let round = Round::start(&self.core, &self.ask, &avoid, &self.told, &self.text, &self.cancel);
            if let Some(round) = round {
                match why {
                    CombineError::Gone(_) | CombineError::ShuttingDown => metrics().failover(),
                    _ => metrics().retry(AttemptKind::Compose),
                }
                self.round = round;
                return Turn::On;
            }
            if matches!(why, CombineError::Overloaded { .. }) && !begun {
                return Turn::Failed(combine_error(why));
            }
            if !self.core.fleet.may_have_another(&self.avoid.combiners) {
                let message = format!("{why}, and there is no other combiner: ask again");
                return Turn::Failed(Error::new(ErrorKind::Unavailable, message));
            }
            if tokio::time::Instant::now() >= until {
                let message = format!(
                    "{why}, and no other combiner took the request up within {} s: ask again",
                    patience.as_secs_f64()
                );
                return Turn::Failed(Error::new(ErrorKind::Unavailable, message));
            }
            tokio::select! {
                () = client.closed() => return Turn::Away,
                () = at(self.ask.settings.deadline) => return Turn::Failed(combine_error(CombineError::Deadline)),
                () = tokio::time::sleep(interval) => {}
            }
            // One that had too much to do may have room by now.
            self.busy.clear();
        }
    }

    /// Every part has arrived. What the workers say of it follows at once; one that says nothing holds up the report
    /// for a moment only. False if the client has gone.
    async fn settle(&mut self, client: &mpsc::Sender<Event>) -> bool {
        self.round.jobs.composed();
        let late = tokio::time::sleep(self.core.config.faults.report_wait);
        tokio::pin!(late);
        while self.round.jobs.unsettled() {
            tokio::select! {
                biased;
                () = client.closed() => return false,
                step = self.round.jobs.next() => if let Ok(tokens) = self.round.jobs.handle(step) {
                    self.advance(tokens);
                },
                () = &mut late => break,
                () = at(self.ask.settings.deadline) => break,
            }
        }
        true
    }
}

/// Resolves at `deadline`; without one never.
async fn at(deadline: Option<Instant>) {
    match deadline {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}

fn combine_error(why: CombineError) -> Error {
    let kind = match &why {
        CombineError::Overloaded { .. } => ErrorKind::Overloaded,
        CombineError::Deadline => ErrorKind::Deadline,
        CombineError::Cancelled | CombineError::ShuttingDown | CombineError::Gone(_) | CombineError::StalePrefix => {
            ErrorKind::Unavailable
        }
        CombineError::Sampling { field, message } => return Error::invalid(field.clone(), message.clone()),
        CombineError::Segment(_) | CombineError::Internal(_) => ErrorKind::Internal,
    };
    Error::new(kind, why.to_string())
}
