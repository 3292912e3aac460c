//! One running answer as the front sees it. Owns the ways in which it can end: the engine's last
//! event, the deadline, the end of a drain, and an engine that goes away without a word (which must
//! never look like a complete answer). Dropping it cancels the work.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

use crate::api::{Answer, Engine, Error, ErrorKind, Event, Request};
use crate::stats::Asked;
use crate::validate::validate;

/// What all answers of a front share.
pub(crate) struct Shared<E> {
    pub(crate) engine: Arc<E>,
    /// Set when no more requests are taken.
    pub(crate) drain: CancellationToken,
    /// Set when running answers must end.
    pub(crate) abort: CancellationToken,
    /// Longest time that an answer may take.
    pub(crate) max_duration: Option<Duration>,
}

impl<E: Engine> Shared<E> {
    /// Whether a request would be taken now.
    pub(crate) fn ready(&self) -> bool {
        !self.drain.is_cancelled() && self.engine.ready()
    }

    /// Begin to answer.
    pub(crate) async fn start(&self, request: Request, mut asked: Asked) -> Result<Running, Error> {
        asked.choices(request.n);
        let span = asked.span().clone();
        match self.begin(request).instrument(span).await {
            Ok((answer, limits)) => {
                asked.taken(answer.progress);
                Ok(Running { events: answer.events, limits, asked, ended: false })
            }
            Err(error) => {
                asked.failed(&error, self.drain.is_cancelled() && error.kind == ErrorKind::Unavailable);
                Err(error)
            }
        }
    }

    async fn begin(&self, mut request: Request) -> Result<(Answer, Limits), Error> {
        if self.drain.is_cancelled() {
            return Err(shutting_down());
        }
        if !self.engine.ready() {
            return Err(Error::new(
                ErrorKind::Unavailable,
                "the model is not ready yet: try again when /ready says so",
            ));
        }
        validate(&request)?;
        request.deadline = [request.deadline, self.max_duration].into_iter().flatten().min();
        let limits = Limits {
            deadline: request.deadline.and_then(|d| Instant::now().checked_add(d)),
            abort: self.abort.clone(),
        };
        let answer = tokio::select! {
            biased;
            answer = self.engine.generate(request) => answer?,
            error = limits.reached() => return Err(error),
        };
        Ok((answer, limits))
    }
}

/// An answer that is being made.
pub(crate) struct Running {
    events: mpsc::Receiver<Event>,
    limits: Limits,
    asked: Asked,
    ended: bool,
}

impl Running {
    /// The next event; the last one is a report or a failure. Cancel-safe. Not to be called after the last event.
    pub(crate) async fn next(&mut self) -> Event {
        debug_assert!(!self.ended, "asked for more after the last event");
        let event = tokio::select! {
            biased;
            event = self.events.recv() => event.unwrap_or_else(lost),
            error = self.limits.reached() => Event::Failed(error),
        };
        if let Event::Failed(error) = &event {
            let _request = self.asked.span().enter();
            tracing::info!(kind = ?error.kind, param = error.param, error = error.message, "request failed");
        }
        match &event {
            Event::Delta(_) => self.asked.answering(),
            Event::Finished { .. } => {}
            Event::Report(report) => self.asked.done(report),
            Event::Failed(error) => {
                let draining = self.limits.abort.is_cancelled() && error.kind == ErrorKind::Unavailable;
                self.asked.failed(error, draining);
            }
        }
        self.ended = matches!(event, Event::Failed(_) | Event::Report(_));
        event
    }

    /// The next event, if it comes within `patience`.
    pub(crate) async fn next_within(&mut self, patience: Duration) -> Option<Event> {
        timeout(patience, self.next()).await.ok()
    }
}

struct Limits {
    deadline: Option<Instant>,
    abort: CancellationToken,
}

impl Limits {
    async fn reached(&self) -> Error {
        let deadline = async {
            match self.deadline {
                Some(at) => sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = deadline => Error::new(ErrorKind::Deadline, "the deadline passed before the answer was complete"),
            () = self.abort.cancelled() => shutting_down(),
        }
    }
}

fn shutting_down() -> Error {
    Error::new(ErrorKind::Unavailable, "the server is shutting down: ask again elsewhere or later")
}

fn lost() -> Event {
    Event::Failed(Error::new(ErrorKind::Internal, "the answer broke off inside the server: ask again"))
}
