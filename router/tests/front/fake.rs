//! An engine whose answers the tests dictate, and a server in front of it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hypic_router::{
    Answer, Delta, Engine, Error, Event, FinishReason, Front, FrontConfig, FrontLimits, ModelCard, Progress, Report,
    Request, SegmentReport, SegmentSource, Timings, TokenLogprob, TokenLogprobs, Usage, bind,
};
use serde_json::Value;
use tokio::sync::{Mutex, mpsc};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

pub const PATIENCE: Duration = Duration::from_secs(10);

/// A request as it reached the engine, and the way to answer it.
pub struct Asked {
    pub request: Request,
    /// The trace context in which it was asked.
    #[allow(dead_code, reason = "not every test crate looks at it")]
    pub trace: Option<String>,
    pub events: mpsc::Sender<Event>,
}

impl Asked {
    pub async fn say(&self, events: impl IntoIterator<Item = Event>) {
        for event in events {
            self.events.send(event).await.expect("the front still listens");
        }
    }

    /// Wait until the front has dropped the answer.
    pub async fn cancelled(&self) {
        tokio::time::timeout(PATIENCE, self.events.closed()).await.expect("the answer is dropped");
    }
}

pub struct Fake {
    card: ModelCard,
    ready: AtomicBool,
    refuse: std::sync::Mutex<Option<Error>>,
    asked: mpsc::UnboundedSender<Asked>,
}

impl Engine for Fake {
    async fn generate(&self, request: Request) -> Result<Answer, Error> {
        if let Some(error) = self.refuse.lock().expect("no panic").clone() {
            return Err(error);
        }
        let (sender, events) = mpsc::channel(16);
        let _ = self.asked.send(Asked { request, trace: hypic_telemetry::traceparent(), events: sender });
        Ok(Answer { events, progress: Progress::default() })
    }

    fn model(&self) -> &ModelCard {
        &self.card
    }

    fn ready(&self) -> bool {
        self.ready.load(Ordering::SeqCst)
    }
}

/// A front that serves a [`Fake`].
pub struct Server {
    pub fake: Arc<Fake>,
    asked: Mutex<mpsc::UnboundedReceiver<Asked>>,
    pub http: SocketAddr,
    pub grpc: SocketAddr,
    pub shutdown: CancellationToken,
    pub serving: JoinHandle<()>,
    pub client: reqwest::Client,
}

pub fn config() -> FrontConfig {
    let free = SocketAddr::from(([127, 0, 0, 1], 0));
    FrontConfig { http: free, grpc: Some(free), ..FrontConfig::default() }
}

/// The same, but for these limits.
pub fn limited(limits: FrontLimits) -> FrontConfig {
    FrontConfig { limits, ..config() }
}

impl Server {
    pub async fn start() -> Self {
        Self::with(config(), Duration::from_secs(5)).await
    }

    pub async fn with(config: FrontConfig, grace: Duration) -> Self {
        let front: Front = bind(config).await.expect("free ports");
        let (sender, asked) = mpsc::unbounded_channel();
        let card = ModelCard { id: "org/fake".into(), created: 1_700_000_000, context: 4096 };
        let fake = Arc::new(Fake { card, ready: true.into(), refuse: None.into(), asked: sender });
        let shutdown = CancellationToken::new();
        Server {
            http: front.http_address(),
            grpc: front.grpc_address().expect("configured"),
            serving: tokio::spawn(front.serve(fake.clone(), shutdown.clone(), grace)),
            asked: Mutex::new(asked),
            client: reqwest::Client::new(),
            fake,
            shutdown,
        }
    }

    pub fn set_ready(&self, ready: bool) {
        self.fake.ready.store(ready, Ordering::SeqCst);
    }

    pub fn refuse(&self, error: Error) {
        *self.fake.refuse.lock().expect("no panic") = Some(error);
    }

    /// Refuse no more.
    #[allow(dead_code, reason = "not every test crate asks for it")]
    pub fn accept(&self) {
        *self.fake.refuse.lock().expect("no panic") = None;
    }

    /// The next request that reaches the engine.
    pub async fn asked(&self) -> Asked {
        let next = async { self.asked.lock().await.recv().await };
        tokio::time::timeout(PATIENCE, next).await.expect("a request reaches the engine").expect("open")
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.http)
    }

    pub async fn post(&self, path: &str, body: Value) -> reqwest::Response {
        self.client.post(self.url(path)).json(&body).send().await.expect("a response")
    }

    /// Post, and let the engine answer with `events`. Returns the response and the request as the engine saw it.
    pub async fn answered(&self, path: &str, body: Value, events: Vec<Event>) -> (reqwest::Response, Request) {
        let answering = async {
            let asked = self.asked().await;
            asked.say(events).await;
            asked.request
        };
        tokio::join!(self.post(path, body), answering)
    }

    /// Post what must be refused; status and error object.
    pub async fn refused(&self, path: &str, body: Value) -> (u16, Value) {
        let response = self.post(path, body).await;
        failure(response).await
    }
}

/// Status and error object.
pub async fn failure(response: reqwest::Response) -> (u16, Value) {
    let status = response.status().as_u16();
    let mut body: Value = response.json().await.expect("JSON");
    let error = body["error"].take();
    for field in ["message", "type", "param", "code"] {
        assert!(error.get(field).is_some(), "{field} is missing in {error}");
    }
    (status, error)
}

/// The data of all events of a stream.
pub fn data(text: &str) -> Vec<&str> {
    text.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect()
}

/// The same as JSON, less the closing mark, which must be there.
pub fn chunks(text: &str) -> Vec<Value> {
    let mut data = data(text);
    assert_eq!(data.pop(), Some("[DONE]"));
    data.into_iter().map(|d| serde_json::from_str(d).expect("JSON")).collect()
}

pub fn delta(choice: u32, text: &str) -> Event {
    Event::Delta(Delta { choice, text: Some(text.into()), token_ids: vec![1], logprobs: Vec::new() })
}

pub fn finished(choice: u32, reason: FinishReason) -> Event {
    Event::Finished { choice, reason }
}

pub fn report() -> Event {
    let usage = Usage {
        prompt_tokens: 100,
        exact_tokens: 10,
        composed_tokens: 60,
        seam_tokens: 16,
        computed_tokens: 14,
        completion_tokens: 3,
    };
    let segments = vec![
        SegmentReport { tokens: 40, reused: 32, source: SegmentSource::Memory, worker: None },
        SegmentReport { tokens: 5, reused: 0, source: SegmentSource::SeamOnly, worker: None },
    ];
    let timings_ms = Timings { queue: 0.5, prefill: 0.0, compose: 2.0, first_token: 3.0, total: 4.0 };
    Event::Report(Report { usage, segments, timings_ms })
}

/// `Hello`, in two deltas.
pub fn hello() -> Vec<Event> {
    vec![delta(0, "Hel"), delta(0, ""), delta(0, "lo"), finished(0, FinishReason::Stop), report()]
}

/// A delta of one token with two alternatives.
pub fn token(text: &str, bytes: &[u8], logprob: f32) -> Event {
    let chosen = TokenLogprob { token_id: 7, logprob, bytes: Some(bytes.to_vec()) };
    let other = TokenLogprob { token_id: 8, logprob: f32::NEG_INFINITY, bytes: Some(b"zz".to_vec()) };
    let logprobs = vec![TokenLogprobs { top: vec![chosen.clone(), other], chosen }];
    Event::Delta(Delta { choice: 0, text: Some(text.into()), token_ids: vec![7], logprobs })
}
