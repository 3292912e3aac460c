//! Asking a router over HTTP. An answer counts as one only if it is complete; everything else is a [`Failure`] that
//! holds what the client has seen. Dropping a [`Streaming`] is a client that vanishes.

use std::time::Duration;

use futures::{Stream, StreamExt};
use reqwest::{Client, Response};
use serde_json::{Value, json};

use crate::request::Request;

/// What a client waits between two pieces of an answer at most.
const PATIENCE: Duration = Duration::from_secs(60);

/// A complete answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// Its text.
    pub text: String,
    /// Why it ended.
    pub finish: String,
    /// The object `hypic`: usage, segments, times.
    pub hypic: Value,
}

impl Answer {
    /// A field of every segment's report.
    pub fn segments(&self, field: &str) -> Vec<Value> {
        let segments = self.hypic["segments"].as_array().expect("a report of segments");
        segments.iter().map(|segment| segment[field].clone()).collect()
    }

    /// Sources of the segments.
    pub fn sources(&self) -> Vec<String> {
        self.segments("source").iter().map(|s| s.as_str().expect("a source").to_string()).collect()
    }

    /// Ids of those that the segments came from, without those that came from nobody.
    pub fn workers(&self) -> Vec<String> {
        self.segments("worker").iter().filter_map(|w| w.as_str().map(str::to_string)).collect()
    }
}

/// No complete answer.
#[derive(Clone, Debug)]
pub enum Failure {
    /// An error with a status: the body of it.
    Status(u16, Value),
    /// The stream ended with this error object, after `text`.
    Told {
        /// What came before.
        text: String,
        /// The error.
        error: Value,
        /// Why it ended; anything but `None` is wrong.
        finish: Option<String>,
    },
    /// The connection broke or ended without a last event.
    Broken(String),
}

/// Ask and wait for the whole answer.
///
/// # Errors
/// Whatever came instead of one.
pub async fn ask(base: &str, request: &Request) -> Result<Answer, Failure> {
    let response = send(base, request.path, &request.body).await?;
    let body: Value = response.json().await.map_err(broken)?;
    let choice = &body["choices"][0];
    let text = choice["message"]["content"].as_str().or(choice["text"].as_str());
    let (Some(text), Some(finish)) = (text, choice["finish_reason"].as_str()) else {
        return Err(Failure::Broken(format!("not an answer: {body}")));
    };
    Ok(Answer { text: text.to_string(), finish: finish.to_string(), hypic: body["hypic"].clone() })
}

/// Ask and get the answer as it is made.
///
/// # Errors
/// An error with a status, or no connection.
pub async fn open(base: &str, request: &Request) -> Result<Streaming, Failure> {
    let mut body = request.body.clone();
    body["stream"] = json!(true);
    let response = send(base, request.path, &body).await?;
    let bytes = response.bytes_stream().map(|piece| piece.map(|b| b.to_vec()).map_err(|why| why.to_string()));
    Ok(Streaming { bytes: Box::pin(bytes), unread: Vec::new(), text: String::new(), finish: None, hypic: Value::Null })
}

async fn send(base: &str, path: &str, body: &Value) -> Result<Response, Failure> {
    // A client of its own has connections of its own: a request never meets one to a process that is gone.
    let client = Client::builder().no_proxy().read_timeout(PATIENCE).build().expect("a client");
    let response = client.post(format!("{base}{path}")).json(body).send().await.map_err(broken)?;
    let status = response.status().as_u16();
    if status == 200 {
        return Ok(response);
    }
    let text = response.text().await.map_err(broken)?;
    Err(Failure::Status(status, serde_json::from_str(&text).unwrap_or(Value::String(text))))
}

fn broken(why: reqwest::Error) -> Failure {
    Failure::Broken(format!("{why:?}"))
}

/// An answer that is being made. Dropping it disconnects.
pub struct Streaming {
    bytes: std::pin::Pin<Box<dyn Stream<Item = Result<Vec<u8>, String>> + Send>>,
    unread: Vec<u8>,
    text: String,
    finish: Option<String>,
    hypic: Value,
}

impl Streaming {
    /// What has come so far.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Wait until at least `n` bytes of text are there.
    ///
    /// # Errors
    /// The stream's failure.
    ///
    /// # Panics
    /// If the answer is complete before.
    pub async fn reach(&mut self, n: usize) -> Result<(), Failure> {
        while self.text.len() < n {
            assert!(!self.step().await?, "the answer is complete after {} bytes: ask for more", self.text.len());
        }
        Ok(())
    }

    /// The complete answer.
    ///
    /// # Errors
    /// The stream's failure.
    pub async fn rest(mut self) -> Result<Answer, Failure> {
        while !self.step().await? {}
        let Some(finish) = self.finish else {
            return Err(Failure::Broken(format!("[DONE] without a finish_reason after {:?}", self.text)));
        };
        Ok(Answer { text: self.text, finish, hypic: self.hypic })
    }

    /// Take one event; true after the last one.
    async fn step(&mut self) -> Result<bool, Failure> {
        let event = loop {
            if let Some(at) = self.unread.windows(2).position(|two| two == b"\n\n") {
                let event: Vec<u8> = self.unread.drain(..at + 2).collect();
                break String::from_utf8(event).map_err(|why| Failure::Broken(why.to_string()))?;
            }
            match self.bytes.next().await {
                Some(Ok(bytes)) => self.unread.extend(bytes),
                Some(Err(why)) => return Err(Failure::Broken(why)),
                None => return Err(Failure::Broken(format!("the stream just ended, after {:?}", self.text))),
            }
        };
        let Some(data) = event.trim_end().strip_prefix("data: ") else {
            return Ok(false); // A comment that keeps the connection alive.
        };
        if data == "[DONE]" {
            return Ok(true);
        }
        let chunk: Value = serde_json::from_str(data).map_err(|why| Failure::Broken(format!("{why}: {data}")))?;
        if !chunk["error"].is_null() {
            let (text, finish) = (self.text.clone(), self.finish.clone());
            return Err(Failure::Told { text, error: chunk["error"].clone(), finish });
        }
        let choice = &chunk["choices"][0];
        if let Some(text) = choice["delta"]["content"].as_str().or(choice["text"].as_str()) {
            self.text.push_str(text);
        }
        if let Some(finish) = choice["finish_reason"].as_str() {
            self.finish = Some(finish.to_string());
        }
        if !chunk["hypic"].is_null() {
            self.hypic = chunk["hypic"].clone();
        }
        Ok(false)
    }
}
