//! Sending answers, whole or as server-sent events. A whole answer is only sent when it is complete;
//! a stream that fails ends with an error object and without `[DONE]`, so that no client takes a
//! part of an answer for all of it.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::Json;
use axum::response::sse::{Event as SseEvent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use super::Shape;
use super::error::Failure;
use super::shape::{Identity, Piece, characters, role, usage};
use crate::api::{Delta, Error, ErrorKind, Event, FinishReason, Report};
use crate::running::Running;

/// The last event of a stream that went well.
const DONE: &str = "[DONE]";

/// Wait for the whole answer.
pub(super) async fn whole(mut running: Running, identity: Identity, choices: u32) -> Result<Response, Failure> {
    let mut pieces: Vec<Piece> = (0..choices).map(|_| Piece::default()).collect();
    loop {
        match running.next().await {
            Event::Delta(delta) => {
                let piece = pieces.get_mut(delta.choice as usize).ok_or_else(no_such_choice)?;
                if let Some(text) = delta.text {
                    piece.text.get_or_insert_default().push_str(&text);
                }
                piece.token_ids.extend(delta.token_ids);
                piece.logprobs.extend(delta.logprobs);
            }
            Event::Finished { choice, reason } => {
                pieces.get_mut(choice as usize).ok_or_else(no_such_choice)?.finish = Some(reason);
            }
            Event::Failed(error) => return Err(error.into()),
            Event::Report(report) => {
                if pieces.iter().any(|piece| piece.finish.is_none()) {
                    return Err(unfinished().into());
                }
                let choices = pieces.iter().enumerate().map(|(i, piece)| piece.whole(identity.shape, i)).collect();
                return Ok(Json(identity.whole(choices, &report)).into_response());
            }
        }
    }
}

/// Send the answer as it is made. A failure that comes before anything was sent has a status of its own; the wait for
/// that ends with the first keep-alive.
pub(super) async fn stream(
    mut running: Running,
    identity: Identity,
    choices: u32,
    include_usage: bool,
    keep_alive: Duration,
) -> Result<Response, Failure> {
    let first = match running.next_within(keep_alive).await {
        Some(Event::Failed(error)) => return Err(error.into()),
        first => first,
    };
    let mut chunks = Chunks::new(identity, choices, include_usage);
    if let Some(event) = first {
        chunks.take(event);
    }
    let events = futures::stream::unfold((running, chunks), |(mut running, mut chunks)| async move {
        loop {
            if let Some(data) = chunks.ready.pop_front() {
                return Some((Ok::<_, Infallible>(SseEvent::default().data(data)), (running, chunks)));
            }
            if chunks.ended {
                return None;
            }
            chunks.take(running.next().await);
        }
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::new().interval(keep_alive)).into_response())
}

/// Turns events into chunks.
struct Chunks {
    identity: Identity,
    include_usage: bool,
    choices: Vec<Progress>,
    /// The last finish, held until it is known whether the report goes with it.
    finish: Option<Map<String, Value>>,
    ready: VecDeque<String>,
    ended: bool,
}

#[derive(Default)]
struct Progress {
    /// What was not sent yet because it has no text.
    unsent: Piece,
    finished: bool,
}

impl Chunks {
    fn new(identity: Identity, choices: u32, include_usage: bool) -> Self {
        let mut chunks = Chunks {
            identity,
            include_usage,
            choices: (0..choices).map(|_| Progress::default()).collect(),
            finish: None,
            ready: VecDeque::new(),
            ended: false,
        };
        if chunks.identity.shape == Shape::Chat {
            for index in 0..chunks.choices.len() {
                let chunk = chunks.identity.chunk(vec![role(index)]);
                chunks.send(chunk);
            }
        }
        chunks
    }

    fn take(&mut self, event: Event) {
        debug_assert!(!self.ended, "an event after the last one");
        let result = match event {
            Event::Delta(delta) => self.delta(delta),
            Event::Finished { choice, reason } => self.finished(choice, reason),
            Event::Report(report) => self.report(&report),
            Event::Failed(error) => Err(error),
        };
        if let Err(error) = result {
            self.flush_finish();
            self.ready.push_back(Failure::from(error).body().to_string());
            self.ended = true;
        }
    }

    fn delta(&mut self, delta: Delta) -> Result<(), Error> {
        self.flush_finish();
        let index = delta.choice as usize;
        let progress = self.choices.get_mut(index).ok_or_else(no_such_choice)?;
        progress.unsent.text = delta.text;
        progress.unsent.token_ids.extend(delta.token_ids);
        progress.unsent.logprobs.extend(delta.logprobs);
        let worth_sending = match &progress.unsent.text {
            Some(text) => !text.is_empty(),
            None => !progress.unsent.token_ids.is_empty(),
        };
        if worth_sending {
            let choice = self.cut(index, None);
            let chunk = self.identity.chunk(vec![choice]);
            self.send(chunk);
        }
        Ok(())
    }

    fn finished(&mut self, choice: u32, reason: FinishReason) -> Result<(), Error> {
        self.flush_finish();
        let index = choice as usize;
        self.choices.get_mut(index).ok_or_else(no_such_choice)?.finished = true;
        let choice = self.cut(index, Some(reason));
        self.finish = Some(self.identity.chunk(vec![choice]));
        Ok(())
    }

    fn report(&mut self, report: &Report) -> Result<(), Error> {
        if self.choices.iter().any(|progress| !progress.finished) {
            return Err(unfinished());
        }
        if self.include_usage {
            self.flush_finish();
            let mut chunk = self.identity.chunk(Vec::new());
            chunk.insert("usage".into(), usage(&report.usage));
            chunk.insert("hypic".into(), json!(report));
            self.ready.push_back(Value::Object(chunk).to_string());
        } else if let Some(mut chunk) = self.finish.take() {
            chunk.insert("hypic".into(), json!(report));
            self.send(chunk);
        }
        self.ready.push_back(DONE.to_owned());
        self.ended = true;
        Ok(())
    }

    /// The choice's unsent piece, as a chunk's choice.
    fn cut(&mut self, index: usize, finish: Option<FinishReason>) -> Value {
        let unsent = &mut self.choices[index].unsent;
        unsent.finish = finish;
        let choice = unsent.chunk(self.identity.shape, index);
        // No text is not the same as empty text: only a model without a tokenizer shows its token ids.
        *unsent = Piece {
            text: unsent.text.as_ref().map(|_| String::new()),
            offset: unsent.offset + characters(&unsent.logprobs),
            ..Piece::default()
        };
        choice
    }

    fn flush_finish(&mut self) {
        if let Some(chunk) = self.finish.take() {
            self.send(chunk);
        }
    }

    fn send(&mut self, mut chunk: Map<String, Value>) {
        if self.include_usage {
            chunk.insert("usage".into(), Value::Null);
        }
        self.ready.push_back(Value::Object(chunk).to_string());
    }
}

fn no_such_choice() -> Error {
    Error::new(ErrorKind::Internal, "the server made an answer that was not asked for")
}

fn unfinished() -> Error {
    Error::new(ErrorKind::Internal, "the server reported an answer that was not complete")
}
