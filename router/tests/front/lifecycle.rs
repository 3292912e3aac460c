use std::time::Duration;

use hypic_router::{FinishReason, FrontConfig, FrontLimits, bind};
use serde_json::json;

use crate::fake::{PATIENCE, Server, config, data, delta, failure, finished, hello, limited, report};

const COMPLETION: &str = "/v1/completions";

#[tokio::test]
async fn a_disconnect_cancels() {
    let server = Server::start().await;
    // In the middle of a stream.
    let (response, asked) = tokio::join!(server.post(COMPLETION, json!({"prompt": "p", "stream": true})), async {
        let asked = server.asked().await;
        asked.say([delta(0, "a")]).await;
        asked
    });
    assert!(!asked.events.is_closed());
    drop(response);
    asked.cancelled().await;
    // While waiting: for a whole answer, and for the first byte of a stream.
    for stream in [false, true] {
        let waiting = server.client.post(server.url(COMPLETION)).json(&json!({"prompt": "p", "stream": stream})).send();
        let waiting = tokio::spawn(waiting);
        let asked = server.asked().await;
        waiting.abort();
        asked.cancelled().await;
    }
}

#[tokio::test]
async fn readiness_follows_the_engine() {
    let server = Server::start().await;
    let ready = async || server.client.get(server.url("/ready")).send().await.expect("a response").status();
    assert_eq!(ready().await, 200);
    server.set_ready(false);
    assert_eq!(ready().await, 503);
    let response = server.post(COMPLETION, json!({"prompt": "p"})).await;
    assert_eq!(response.headers()["retry-after"], "1");
    assert_eq!(failure(response).await.0, 503);
    assert_eq!(server.client.get(server.url("/health")).send().await.expect("a response").status(), 200);
}

#[tokio::test]
async fn a_drain_lets_running_answers_finish() {
    let server = Server::start().await;
    let (response, asked) = tokio::join!(server.post(COMPLETION, json!({"prompt": "p", "stream": true})), async {
        let asked = server.asked().await;
        asked.say([delta(0, "a")]).await;
        asked
    });
    server.shutdown.cancel();
    let refused = async {
        // The listener closes as soon as the drain begins.
        while tokio::net::TcpStream::connect(server.http).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, refused).await.expect("no new connections");
    assert!(!server.serving.is_finished());
    asked.say([delta(0, "b"), finished(0, FinishReason::Stop), report()]).await;
    let text = response.text().await.expect("a body");
    assert!(text.contains("\"b\"") && text.ends_with("data: [DONE]\n\n"), "{text}");
    tokio::time::timeout(PATIENCE, server.serving).await.expect("drained").expect("no panic");
}

#[tokio::test]
async fn what_outlasts_the_grace_is_aborted() {
    let server = Server::with(config(), Duration::from_millis(50)).await;
    let (response, asked) = tokio::join!(server.post(COMPLETION, json!({"prompt": "p", "stream": true})), async {
        let asked = server.asked().await;
        asked.say([delta(0, "a")]).await;
        asked
    });
    server.shutdown.cancel();
    asked.cancelled().await;
    let text = response.text().await.expect("a body");
    let last = *data(&text).last().expect("events");
    assert!(last.contains("shutting down") && last.starts_with("{\"error\""), "{text}");
    tokio::time::timeout(PATIENCE, server.serving).await.expect("ended").expect("no panic");
}

#[tokio::test]
async fn a_client_that_does_not_read_cannot_hold_up_the_end() {
    let fast = limited(FrontLimits { abort_timeout: Duration::from_millis(50), ..FrontLimits::default() });
    let server = Server::with(fast, Duration::from_millis(50)).await;
    let stuck = server.post(COMPLETION, json!({"prompt": "p", "stream": true}));
    let (response, asked) = tokio::join!(stuck, async {
        let asked = server.asked().await;
        // Until no buffer on the way takes any more.
        let text = "x".repeat(1 << 20);
        while tokio::time::timeout(Duration::from_millis(200), asked.say([delta(0, &text)])).await.is_ok() {}
        asked
    });
    server.shutdown.cancel();
    tokio::time::timeout(PATIENCE, server.serving).await.expect("ended").expect("no panic");
    asked.cancelled().await;
    drop(response);
}

#[tokio::test]
async fn too_long_an_answer_fails() {
    let short = limited(FrontLimits { max_duration: Duration::from_millis(30), ..FrontLimits::default() });
    let server = Server::with(short, Duration::ZERO).await;
    let (response, asked) = tokio::join!(server.post(COMPLETION, json!({"prompt": "p"})), server.asked());
    assert_eq!(asked.request.deadline, Some(Duration::from_millis(30)));
    assert_eq!(failure(response).await.0, 504);
    asked.cancelled().await;
}

#[tokio::test]
async fn an_occupied_address_is_named_with_the_fix() {
    let server = Server::start().await;
    let taken = FrontConfig { http: server.http, ..config() };
    let error = bind(taken).await.expect_err("the port is taken").to_string();
    assert!(error.contains(&server.http.to_string()) && error.contains("another port"), "{error}");
    let taken = FrontConfig { grpc: Some(server.http), ..config() };
    assert!(bind(taken).await.expect_err("the port is taken").to_string().contains("gRPC"));
}

#[tokio::test]
async fn without_grpc_only_http_is_served() {
    let front = bind(FrontConfig { grpc: None, ..config() }).await.expect("a free port");
    assert_eq!(front.grpc_address(), None);
    let server = Server::start().await;
    let (response, _) = server.answered(COMPLETION, json!({"prompt": "p"}), hello()).await;
    assert_eq!(response.status(), 200);
}

#[tokio::test]
async fn a_connection_that_does_not_get_to_the_point_is_closed() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let impatient = limited(FrontLimits { read_timeout: Duration::from_millis(50), ..FrontLimits::default() });
    let server = Server::with(impatient, Duration::ZERO).await;
    for said in
        ["", "P", "PRI * HTTP/2.0", "GET /health HTTP/1.1\r\nhost: x\r\n", "GET /health HTTP/1.1\r\nhost: x\r\n\r\n"]
    {
        let mut stream = tokio::net::TcpStream::connect(server.http).await.expect("connected");
        stream.write_all(said.as_bytes()).await.expect("sent");
        let mut answer = Vec::new();
        let closed = stream.read_to_end(&mut answer);
        // What the server has not read makes it a reset.
        let _ended_or_reset = tokio::time::timeout(PATIENCE, closed).await.expect(said);
    }
}
