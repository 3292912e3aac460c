use std::time::Duration;

use futures::StreamExt;
use hypic_router::{Error, ErrorKind, Event, FinishReason, FrontConfig, FrontLimits};
use serde_json::{Value, json};

use crate::fake::{Server, config, data, delta, failure, finished, hello, limited, report};

const CHAT: &str = "/v1/chat/completions";
const COMPLETION: &str = "/v1/completions";

fn chat(more: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "hi"}]});
    body.as_object_mut().expect("object").extend(more.as_object().expect("object").clone());
    body
}

fn content(parts: Value) -> Value {
    json!({"messages": [{"role": "user", "content": parts}]})
}

#[tokio::test]
async fn wrong_fields_are_refused_by_name() {
    let server = Server::start().await;
    let cases = [
        (CHAT, chat(json!({"tools": [{"type": "function"}]})), "tools"),
        (CHAT, chat(json!({"tool_choice": "required"})), "tool_choice"),
        (CHAT, chat(json!({"functions": [{}]})), "functions"),
        (CHAT, chat(json!({"response_format": {"type": "json_object"}})), "response_format"),
        (CHAT, chat(json!({"modalities": ["text", "audio"]})), "modalities"),
        (CHAT, chat(json!({"min_tokens": 4})), "min_tokens"),
        (COMPLETION, json!({"prompt": "p", "echo": true}), "echo"),
        (COMPLETION, json!({"prompt": "p", "suffix": "s"}), "suffix"),
        (COMPLETION, json!({"prompt": "p", "best_of": 3}), "best_of"),
        (COMPLETION, json!({"prompt": "p", "logprobs": 21}), "logprobs"),
        (COMPLETION, json!({"prompt": "p", "logprobs": true}), "logprobs"),
        (COMPLETION, json!({}), "prompt"),
        (COMPLETION, json!({"prompt": ""}), "prompt"),
        (COMPLETION, json!({"prompt": []}), "prompt"),
        (COMPLETION, json!({"prompt": ["a", "b"]}), "prompt"),
        (COMPLETION, json!({"prompt": [1, -2]}), "prompt"),
        (COMPLETION, json!({"prompt": 5}), "prompt"),
        (COMPLETION, json!({"prompt": "p", "hypic": {"segments": ["a", [1]]}}), "hypic.segments[1]"),
        (COMPLETION, json!({"prompt": [1], "hypic": {"segments": ["a"]}}), "hypic.segments[0]"),
        (COMPLETION, json!({"prompt": "p", "hypic": {"segments": "parts"}}), "hypic.segments"),
        (COMPLETION, json!({"prompt": [1], "hypic": {"separator": "|"}}), "hypic.separator"),
        (CHAT, json!({}), "messages"),
        (CHAT, json!({"messages": []}), "messages"),
        (CHAT, json!({"messages": "hi"}), "messages"),
        (CHAT, json!({"messages": [{"content": "x"}]}), "messages[0].role"),
        (CHAT, json!({"messages": [{"role": "user", "content": 5}]}), "messages[0].content"),
        (CHAT, json!({"messages": [{"role": "assistant", "tool_calls": [{}]}]}), "messages[0].tool_calls"),
        (CHAT, content(json!(["a", {"type": "image_url", "image_url": {}}])), "messages[0].content[1].type"),
        (CHAT, content(json!([{"type": "text"}])), "messages[0].content[0].text"),
        (CHAT, content(json!([{"text": "a", "hypic": {"segmnt": true}}])), "messages[0].content[0].hypic.segmnt"),
        (CHAT, chat(json!({"hypic": {"segments": ["a"]}})), "hypic.segments"),
        (CHAT, chat(json!({"hypic": {"sepertor": "|"}})), "hypic.sepertor"),
        (CHAT, chat(json!({"hypic": {"separator": ""}})), "hypic.separator"),
        (CHAT, chat(json!({"hypic": {"mode": "fast"}})), "hypic.mode"),
        (CHAT, chat(json!({"hypic": {"compose": "sum"}})), "hypic.compose"),
        (CHAT, chat(json!({"hypic": {"anchor": [1]}})), "hypic.anchor"),
        (CHAT, chat(json!({"hypic": {"seam": -1}})), "hypic.seam"),
        (CHAT, chat(json!({"hypic": true})), "hypic"),
        (CHAT, chat(json!({"temperature": "hot"})), "temperature"),
        (CHAT, chat(json!({"temperature": -1})), "temperature"),
        (CHAT, chat(json!({"top_p": 0})), "top_p"),
        (CHAT, chat(json!({"top_k": -2})), "top_k"),
        (CHAT, chat(json!({"repetition_penalty": 0})), "repetition_penalty"),
        (CHAT, chat(json!({"presence_penalty": 3})), "presence_penalty"),
        (CHAT, chat(json!({"logit_bias": {"x": 1}})), "logit_bias.x"),
        (CHAT, chat(json!({"logit_bias": {"1": 101}})), "logit_bias"),
        (CHAT, chat(json!({"n": 0})), "n"),
        (CHAT, chat(json!({"n": 1000})), "n"),
        (CHAT, chat(json!({"max_tokens": 0})), "max_tokens"),
        (CHAT, chat(json!({"max_tokens": 0.5})), "max_tokens"),
        (CHAT, chat(json!({"max_completion_tokens": 0})), "max_completion_tokens"),
        (CHAT, chat(json!({"max_tokens": 1, "max_completion_tokens": 2})), "max_tokens"),
        (CHAT, chat(json!({"stop": ["a", ""]})), "stop"),
        (CHAT, chat(json!({"stop": 5})), "stop"),
        (CHAT, chat(json!({"top_logprobs": 2})), "top_logprobs"),
        (CHAT, chat(json!({"logprobs": true, "top_logprobs": 21})), "top_logprobs"),
        (CHAT, chat(json!({"stream": "yes"})), "stream"),
        (CHAT, chat(json!({"stream_options": {"include_usage": 1}})), "stream_options.include_usage"),
    ];
    for (path, body, param) in cases {
        let (status, error) = server.refused(path, body.clone()).await;
        assert_eq!((status, error["param"].as_str()), (400, Some(param)), "{body} gives {error}");
        assert_eq!(error["type"], "invalid_request_error");
        let last = param.rsplit('.').next().expect("a name");
        assert!(error["message"].as_str().expect("text").contains(last), "{error} does not name {last}");
    }
}

#[tokio::test]
async fn what_the_engine_refuses_is_named_as_it_was_sent() {
    let server = Server::start().await;
    let completion = |more: Value| {
        let mut body = json!({"prompt": "p"});
        body.as_object_mut().expect("object").extend(more.as_object().expect("object").clone());
        body
    };
    for (field, path, body, param) in [
        ("query", CHAT, chat(json!({})), "messages"),
        ("prompt", CHAT, chat(json!({})), "messages"),
        ("query", COMPLETION, completion(json!({})), "prompt"),
        ("prompt", COMPLETION, completion(json!({})), "prompt"),
        ("max_tokens", COMPLETION, completion(json!({"max_tokens": 9})), "max_tokens"),
        ("max_tokens", CHAT, chat(json!({"max_completion_tokens": 9})), "max_completion_tokens"),
        ("logit_bias", CHAT, chat(json!({"logit_bias": {"9": 1}})), "logit_bias"),
        ("mode", CHAT, chat(json!({})), "hypic.mode"),
    ] {
        server.refuse(Error::invalid(field, "why"));
        let (status, error) = server.refused(path, body).await;
        assert_eq!((status, error["param"].as_str()), (400, Some(param)), "{field}");
    }
}

#[tokio::test]
async fn bodies_paths_and_methods() {
    let small = limited(FrontLimits { body_limit: 200, ..FrontLimits::default() });
    let server = Server::with(small, Duration::ZERO).await;
    let post = async |kind: &str, body: &str| {
        let request = server.client.post(server.url(CHAT)).header("content-type", kind).body(body.to_owned());
        failure(request.send().await.expect("a response")).await
    };
    let (status, error) = post("application/json", "{\n\"messages\": [}").await;
    assert_eq!((status, error["code"].as_str()), (400, Some("invalid_json")));
    assert!(error["message"].as_str().expect("text").contains("line 2 column 14"), "{error}");
    assert_eq!(post("application/json; charset=utf-8", "[]").await.0, 400);
    assert_eq!(post("text/plain", "{}").await.0, 415);
    let form = "application/x-www-form-urlencoded";
    assert_eq!(post(form, "[]").await.0, 400, "what `curl -d` says of its data does not matter");
    let forged = server.client.post(server.url(CHAT)).header("content-type", form).header("origin", "http://elsewhere");
    assert_eq!(failure(forged.body("[]").send().await.expect("a response")).await.0, 415, "what a web page may send");
    assert_eq!(post("application/json", &format!("{{\"x\": \"{}\"}}", "x".repeat(300))).await.0, 413);

    let (status, error) = server.refused(CHAT, chat(json!({"model": "gpt"}))).await;
    assert_eq!(
        (status, error["code"].as_str(), error["param"].as_str()),
        (404, Some("model_not_found"), Some("model"))
    );
    let (status, error) = server.refused("/v1/embeddings", json!({})).await;
    assert_eq!((status, error["code"].as_str()), (404, Some("unknown_url")));
    let wrong = server.client.get(server.url(CHAT)).send().await.expect("a response");
    assert_eq!(wrong.headers()["allow"], "POST");
    assert_eq!(failure(wrong).await.0, 405);
    assert_eq!(failure(server.client.delete(server.url("/health")).send().await.expect("a response")).await.0, 405);
}

#[tokio::test]
async fn a_body_that_is_too_large_or_never_ends() {
    let limits = limited(FrontLimits {
        body_limit: 8 << 20,
        read_timeout: Duration::from_millis(100),
        ..FrontLimits::default()
    });
    let server = Server::with(limits, Duration::ZERO).await;
    let post = || server.client.post(server.url(CHAT)).header("content-type", "application/json");
    // The client is still sending when the limit is passed, and hears of it all the same.
    let large = post().body(vec![b' '; 15 << 20]).send().await.expect("a response");
    assert_eq!(failure(large).await.0, 413);
    let asking = post().header("expect", "100-continue").body(vec![b' '; 100 << 20]).send().await.expect("a response");
    assert_eq!(failure(asking).await.0, 413);
    let silent = futures::stream::once(async { Ok::<_, std::io::Error>("{") }).chain(futures::stream::pending());
    let stalled = post().body(reqwest::Body::wrap_stream(silent)).send().await.expect("a response");
    assert_eq!(failure(stalled).await.0, 408);
}

#[tokio::test]
async fn the_engines_failures_have_their_status() {
    let server = Server::start().await;
    for (kind, status) in [(ErrorKind::Invalid, 400), (ErrorKind::Overloaded, 429), (ErrorKind::Internal, 500)] {
        server.refuse(Error { param: Some("prompt".into()), ..Error::new(kind, "why") });
        for stream in [false, true] {
            let (got, error) = server.refused(COMPLETION, json!({"prompt": "p", "stream": stream})).await;
            assert_eq!((got, &error["message"], &error["param"]), (status, &json!("why"), &json!("prompt")));
        }
    }
}

#[tokio::test]
async fn failures_before_the_first_byte_have_a_status() {
    let server = Server::start().await;
    for stream in [false, true] {
        let events = vec![Event::Failed(Error::new(ErrorKind::Deadline, "late"))];
        let (response, _) = server.answered(COMPLETION, json!({"prompt": "p", "stream": stream}), events).await;
        let (status, error) = failure(response).await;
        assert_eq!((status, error["type"].as_str()), (504, Some("timeout_error")));
    }
}

#[tokio::test]
async fn a_stream_that_fails_says_so_and_does_not_look_complete() {
    let server = Server::start().await;
    let body = json!({"prompt": "p", "stream": true});
    let failed = || Event::Failed(Error::new(ErrorKind::Internal, "broken"));
    let scripts = [
        (vec![delta(0, "a"), failed()], 1, "broken"),
        (vec![delta(0, "a"), finished(0, FinishReason::Stop), failed()], 2, "broken"),
        // An engine that goes away, reports too early, or answers what was not asked.
        (vec![delta(0, "a")], 1, "broke off"),
        (vec![delta(0, "a"), report()], 1, "not complete"),
        (vec![delta(0, "a"), delta(7, "b")], 1, "not asked for"),
    ];
    for (events, before, message) in scripts {
        let (response, _) = server.answered(COMPLETION, body.clone(), events).await;
        assert_eq!(response.status(), 200);
        let text = response.text().await.expect("a body");
        let data = data(&text);
        assert_eq!(data.len(), before + 1, "{text}");
        let error: Value = serde_json::from_str(data[before]).expect("JSON");
        assert!(error["error"]["message"].as_str().expect("text").contains(message), "{text}");
        assert!(!text.contains("[DONE]"));
    }
    let (response, _) = server.answered(COMPLETION, json!({"prompt": "p"}), vec![delta(0, "a"), report()]).await;
    assert_eq!(failure(response).await.0, 500, "nor does a whole answer");
}

#[tokio::test]
async fn keys_guard_the_api() {
    let file = tempfile::NamedTempFile::new().expect("temporary file");
    std::fs::write(file.path(), "# one\nsecret\nother\n").expect("writable");
    let api_keys = Some(hypic_router::ApiKeys::from_file(file.path()).expect("a key"));
    let server = Server::with(FrontConfig { api_keys, ..config() }, Duration::ZERO).await;
    for key in [None, Some("wrong"), Some("secrets")] {
        for request in [server.client.get(server.url("/v1/models")), server.client.post(server.url(CHAT)).body("{")] {
            let request = key.iter().fold(request, |request, key| request.bearer_auth(key));
            let response = request.send().await.expect("a response");
            assert_eq!(response.headers()["www-authenticate"], "Bearer");
            let (status, error) = failure(response).await;
            assert_eq!((status, error["code"].as_str()), (401, Some("invalid_api_key")));
        }
    }
    let right = server.client.get(server.url("/v1/models")).bearer_auth("secret").send().await.expect("a response");
    assert_eq!(right.status(), 200);
    for open in ["/health", "/ready"] {
        assert_eq!(server.client.get(server.url(open)).send().await.expect("a response").status(), 200);
    }
    let asking = server.client.post(server.url(CHAT)).bearer_auth("secret").json(&chat(json!({}))).send();
    let answering = async { server.asked().await.say(hello()).await };
    assert_eq!(tokio::join!(asking, answering).0.expect("a response").status(), 200);

    // The key says who asks; the body does not.
    let mut tenants = Vec::new();
    for (key, salt) in [("secret", "a"), ("other", "a"), ("secret", "b")] {
        let body = chat(json!({"hypic": {"salt": salt}}));
        let asking = server.client.post(server.url(CHAT)).bearer_auth(key).json(&body).send();
        let answering = async {
            let asked = server.asked().await;
            asked.say(hello()).await;
            asked.request.tenant.expect("a tenant")
        };
        tenants.push(tokio::join!(asking, answering).1);
    }
    assert_eq!(tenants[0], tenants[2]);
    assert_ne!(tenants[0], tenants[1]);
    assert!(tenants.iter().all(|tenant| !tenant.contains("secret")));
}
