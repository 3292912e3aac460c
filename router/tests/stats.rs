//! What telemetry is told of requests that come over HTTP and gRPC. One test: counters are the process's.

#[allow(dead_code, reason = "shared with the tests of the front, which use all of it")]
#[path = "front/fake.rs"]
mod fake;

use std::collections::BTreeSet;
use std::time::Duration;

use axum::body::{Body, to_bytes};
use hypic_proto::v1::inference_client::InferenceClient;
use hypic_proto::v1::{GenerateRequest, TextPrompt, generate_request};
use hypic_router::{Error, ErrorKind};
use hypic_telemetry::{Telemetry, TelemetryConfig};
use serde_json::json;
use tower::ServiceExt;

use fake::{Server, delta, hello};

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PARENT: &str = "b7ad6b7169203331";

async fn scrape(telemetry: &Telemetry) -> String {
    let request = axum::http::Request::get("/metrics").body(Body::empty()).expect("a request");
    let response = telemetry.prometheus_routes().oneshot(request).await.expect("infallible");
    let bytes = to_bytes(response.into_body(), usize::MAX).await.expect("a body");
    String::from_utf8(bytes.to_vec()).expect("text")
}

fn lines(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter(|line| !line.starts_with('#'))
}

/// The series, without their values.
fn series(text: &str) -> BTreeSet<&str> {
    lines(text).filter_map(|line| Some(line.rsplit_once(' ')?.0)).collect()
}

/// Value of the series whose line has all of `parts`; 0 if there is none.
fn value(text: &str, parts: &[&str]) -> f64 {
    let mut found = lines(text).filter(|line| parts.iter().all(|part| line.contains(part)));
    let line = found.next();
    assert_eq!(found.next(), None, "more than one series with {parts:?}");
    line.map_or(0.0, |line| line.rsplit(' ').next().expect("a value").parse().expect("a number"))
}

fn requests(text: &str, protocol: &str, outcome: &str) -> f64 {
    let (protocol, outcome) = (format!("protocol=\"{protocol}\""), format!("outcome=\"{outcome}\""));
    value(text, &["hypic_requests_total{", &protocol, &outcome])
}

async fn until(telemetry: &Telemetry, done: impl Fn(&str) -> bool) -> String {
    let waiting = async {
        loop {
            let text = scrape(telemetry).await;
            if done(&text) {
                return text;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(fake::PATIENCE, waiting).await.expect("it is counted in time")
}

#[tokio::test]
async fn requests_are_counted_and_traced() {
    // Spans are made whether or not somebody receives them.
    let nobody = Some("http://127.0.0.1:9".to_owned());
    let config = TelemetryConfig { otlp_endpoint: nobody, trace_sampling: 1.0, ..TelemetryConfig::default() };
    let telemetry = Telemetry::start(&config).expect("started once");
    let server = Server::start().await;
    let inbound = format!("00-{TRACE}-{PARENT}-01");
    let continues = |trace: Option<String>| {
        let trace = trace.expect("a trace");
        assert!(trace.contains(TRACE) && !trace.contains(PARENT), "a span of its own in the client's trace: {trace}");
    };

    // HTTP, streamed.
    let body = json!({"prompt": "p", "stream": true});
    let post = server.client.post(server.url("/v1/completions")).header("traceparent", &inbound).json(&body).send();
    let answering = async {
        let asked = server.asked().await;
        asked.say(hello()).await;
        asked.trace
    };
    let (response, trace) = tokio::join!(post, answering);
    assert!(response.expect("a response").text().await.expect("a body").contains("[DONE]"));
    continues(trace);
    let text = scrape(&telemetry).await;
    assert_eq!((requests(&text, "http", "ok"), requests(&text, "grpc", "ok")), (1.0, 0.0));
    for (class, tokens) in
        [("exact", 10.0), ("composed", 60.0), ("seam", 16.0), ("computed", 14.0), ("completion", 3.0)]
    {
        assert_eq!(value(&text, &["hypic_tokens_total{", &format!("class=\"{class}\"")]), tokens, "{class}");
    }
    assert_eq!(value(&text, &["hypic_segments_total{", "source=\"memory\""]), 1.0);
    assert_eq!(value(&text, &["hypic_segments_total{", "source=\"seam_only\""]), 1.0);
    // The scripted report has 3 tokens: the first after 3 ms, the last after 4.
    let sum = |text: &str, stage: &str| value(text, &["hypic_stage_duration_seconds_sum{", stage]);
    assert!((sum(&text, "stage=\"compose\"") - 0.002).abs() < 1e-9);
    assert!((sum(&text, "stage=\"decode\"") - 0.001).abs() < 1e-9);
    assert_eq!(sum(&text, "stage=\"scatter\""), 0.0, "nothing was prefilled in isolation");
    let output = value(&text, &["hypic_request_time_per_output_token_seconds_sum"]);
    assert!((output - 0.0005).abs() < 1e-9, "{text}");
    for name in ["hypic_request_time_to_first_token_seconds_count{", "hypic_request_duration_seconds_count{"] {
        assert_eq!(value(&text, &[name, "mode=\"composed\""]), 1.0, "{name}");
        assert_eq!(value(&text, &[name, "mode=\"exact\""]), 0.0, "{name}");
    }

    // gRPC.
    let mut client = InferenceClient::connect(format!("http://{}", server.grpc)).await.expect("connected");
    let prompt = generate_request::Prompt::Text(TextPrompt { segments: vec!["a".into()], query: "q".into() });
    let ask = GenerateRequest { prompt: Some(prompt), ..GenerateRequest::default() };
    let mut request = tonic::Request::new(ask.clone());
    request.metadata_mut().insert("traceparent", inbound.parse().expect("metadata"));
    let (stream, trace) = tokio::join!(client.generate(request), async {
        let asked = server.asked().await;
        asked.say(hello()).await;
        asked.trace
    });
    let mut stream = stream.expect("a stream").into_inner();
    while stream.message().await.expect("no failure").is_some() {}
    continues(trace);
    let text = scrape(&telemetry).await;
    assert_eq!((requests(&text, "http", "ok"), requests(&text, "grpc", "ok")), (1.0, 1.0));
    assert_eq!(value(&text, &["hypic_tokens_total{", "class=\"completion\""]), 6.0);

    // Refusals and clients that go away.
    server.refuse(Error::new(ErrorKind::Overloaded, "full"));
    assert_eq!(server.refused("/v1/completions", json!({"prompt": "p"})).await.0, 429);
    client.generate(ask.clone()).await.expect_err("refused");
    server.accept();
    let (stream, asked) = tokio::join!(client.generate(ask), async {
        let asked = server.asked().await;
        asked.say([delta(0, "a")]).await;
        asked
    });
    let mut stream = stream.expect("a stream").into_inner();
    assert!(stream.message().await.expect("a delta").is_some());
    drop(stream);
    asked.cancelled().await;
    let text = until(&telemetry, |text| requests(text, "grpc", "disconnected") == 1.0).await;
    assert_eq!(value(&text, &["hypic_disconnects_total{", "phase=\"decode\""]), 1.0);
    assert_eq!((requests(&text, "http", "rejected"), requests(&text, "grpc", "rejected")), (1.0, 1.0));
    assert_eq!(value(&text, &["hypic_rejections_total{", "reason=\"queue_full\""]), 2.0);

    // Strangers.
    let file = tempfile::NamedTempFile::new().expect("temporary file");
    std::fs::write(file.path(), "secret\n").expect("writable");
    let api_keys = Some(hypic_router::ApiKeys::from_file(file.path()).expect("a key"));
    let guarded = Server::with(hypic_router::FrontConfig { api_keys, ..fake::config() }, Duration::ZERO).await;
    assert_eq!(guarded.refused("/v1/completions", json!({"prompt": "p"})).await.0, 401);
    let text = scrape(&telemetry).await;
    assert_eq!(value(&text, &["hypic_rejections_total{", "reason=\"unauthenticated\""]), 1.0);

    // Whatever clients invent is no series.
    let invented = |i: usize| json!({"prompt": "p", "model": format!("invented-{i}")});
    assert_eq!(server.refused("/v1/completions", invented(0)).await.0, 404);
    let before = scrape(&telemetry).await;
    for i in 1..=100 {
        assert_eq!(server.refused("/v1/completions", invented(i)).await.0, 404);
    }
    let after = scrape(&telemetry).await;
    assert_eq!(series(&before), series(&after));
    assert_eq!(requests(&after, "http", "invalid") - requests(&before, "http", "invalid"), 100.0);
    assert_eq!(
        value(&after, &["hypic_rejections_total{", "reason=\"queue_full\""]),
        2.0,
        "what is wrong is no rejection"
    );
    assert!(!after.contains("invented"));
}
