use std::time::Duration;

use hypic_router::{Delta, Event, FinishReason, FrontLimits};
use serde_json::{Value, json};

use crate::fake::{Server, chunks, data, delta, finished, hello, limited, report, token};

fn ask() -> Value {
    json!({"model": "org/fake", "messages": [{"role": "user", "content": "hi"}]})
}

fn with(mut body: Value, more: Value) -> Value {
    body.as_object_mut().expect("object").extend(more.as_object().expect("object").clone());
    body
}

#[tokio::test]
async fn models_are_listed() {
    let server = Server::start().await;
    let get =
        async |path: &str| -> Value { server.client.get(server.url(path)).send().await.unwrap().json().await.unwrap() };
    let list = get("/v1/models").await;
    assert_eq!(list["object"], "list");
    let card = json!({
        "id": "org/fake", "object": "model", "created": 1_700_000_000, "owned_by": "hypic", "max_model_len": 4096,
    });
    assert_eq!(list["data"], json!([card]));
    assert_eq!(get("/v1/models/org/fake").await, card);
    assert_eq!(get("/v1/models/org%2Ffake").await, card);
    assert_eq!(get("/v1/models/other").await["error"]["code"], "model_not_found");
    assert_eq!(get("/health").await, json!({"status": "alive"}));
}

#[tokio::test]
async fn a_whole_chat_answer() {
    let server = Server::start().await;
    let (response, _) = server.answered("/v1/chat/completions", ask(), hello()).await;
    assert_eq!(response.status(), 200);
    let body: Value = response.json().await.unwrap();
    assert!(body["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert_eq!(body["object"], "chat.completion");
    assert_eq!(body["model"], "org/fake");
    let choice = json!({
        "index": 0, "message": {"role": "assistant", "content": "Hello", "refusal": null},
        "logprobs": null, "finish_reason": "stop",
    });
    assert_eq!(body["choices"], json!([choice]));
    let usage = json!({
        "prompt_tokens": 100, "completion_tokens": 3, "total_tokens": 103,
        "prompt_tokens_details": {"cached_tokens": 70},
    });
    assert_eq!(body["usage"], usage);
    assert_eq!(body["hypic"]["usage"]["seam_tokens"], 16);
    let segment = json!({"tokens": 40, "reused": 32, "source": "memory", "worker": null});
    assert_eq!(body["hypic"]["segments"][0], segment);
    assert_eq!(body["hypic"]["segments"][1]["source"], "seam_only");
    assert_eq!(body["hypic"]["timings_ms"]["first_token"], 3.0);
}

#[tokio::test]
async fn a_chat_stream_with_usage() {
    let server = Server::start().await;
    let body = with(ask(), json!({"stream": true, "stream_options": {"include_usage": true}}));
    let (response, _) = server.answered("/v1/chat/completions", body, hello()).await;
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    let text = response.text().await.unwrap();
    let chunks = chunks(&text);
    let deltas: Vec<&Value> = chunks.iter().map(|c| &c["choices"][0]["delta"]).collect();
    assert_eq!(deltas[0], &json!({"role": "assistant", "content": ""}));
    assert_eq!(deltas[1], &json!({"content": "Hel"}));
    assert_eq!(deltas[2], &json!({"content": "lo"}));
    assert_eq!(deltas[3], &json!({}));
    assert_eq!(chunks.len(), 5, "no chunk for the empty delta");
    let reasons: Vec<&Value> = chunks[..4].iter().map(|c| &c["choices"][0]["finish_reason"]).collect();
    assert_eq!(reasons, [&Value::Null, &Value::Null, &Value::Null, &json!("stop")]);
    assert!(chunks[..4].iter().all(|c| c.get("usage") == Some(&Value::Null) && c.get("hypic").is_none()));
    assert_eq!(chunks[4]["choices"], json!([]));
    assert_eq!(chunks[4]["usage"]["total_tokens"], 103);
    assert_eq!(chunks[4]["hypic"]["usage"]["composed_tokens"], 60);
    assert!(chunks.iter().all(|c| c["id"] == chunks[0]["id"] && c["object"] == "chat.completion.chunk"));
}

#[tokio::test]
async fn without_usage_the_report_is_on_the_last_chunk() {
    let server = Server::start().await;
    let body = with(ask(), json!({"stream": true, "n": 2}));
    let events = vec![
        delta(1, "b"),
        finished(1, FinishReason::Length),
        delta(0, "a"),
        finished(0, FinishReason::Stop),
        report(),
    ];
    let (response, request) = server.answered("/v1/chat/completions", body, events).await;
    assert_eq!(request.n, 2);
    let text = response.text().await.unwrap();
    let chunks = chunks(&text);
    let order: Vec<(u64, bool, bool)> = chunks
        .iter()
        .map(|c| (&c["choices"][0], c.get("hypic").is_some()))
        .map(|(choice, hypic)| (choice["index"].as_u64().unwrap(), choice["finish_reason"].is_string(), hypic))
        .collect();
    let expected =
        [(0, false, false), (1, false, false), (1, false, false), (1, true, false), (0, false, false), (0, true, true)];
    assert_eq!(order, expected);
    assert!(chunks.iter().all(|c| c.get("usage").is_none()));
}

#[tokio::test]
async fn chat_logprobs() {
    let server = Server::start().await;
    // Half a character is held back; its log-probabilities come with the text they belong to.
    let events = || {
        let mut events = vec![token("", &[0xc3], -0.5), token("é", &[0xa9], f32::NAN), token("", b"!", -1.0)];
        events.extend([finished(0, FinishReason::Stop), report()]);
        events
    };
    let body = with(ask(), json!({"logprobs": true, "top_logprobs": 2}));
    let (response, request) = server.answered("/v1/chat/completions", body.clone(), events()).await;
    assert_eq!(request.logprobs, Some(2));
    let whole: Value = response.json().await.unwrap();
    let content = whole["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(content.len(), 3);
    let top = json!([
        {"token": "\u{fffd}", "bytes": [0xc3], "logprob": -0.5},
        {"token": "zz", "bytes": [122, 122], "logprob": -9999.0},
    ]);
    assert_eq!(content[0], json!({"token": "\u{fffd}", "bytes": [0xc3], "logprob": -0.5, "top_logprobs": top}));
    assert_eq!(content[1]["logprob"], -9999.0);

    let (response, _) = server.answered("/v1/chat/completions", with(body, json!({"stream": true})), events()).await;
    let text = response.text().await.unwrap();
    let counts: Vec<usize> =
        chunks(&text).iter().map(|c| c["choices"][0]["logprobs"]["content"].as_array().map_or(0, Vec::len)).collect();
    assert_eq!(counts, [0, 2, 1], "role, text, finish");
}

#[tokio::test]
async fn completion_logprobs() {
    let server = Server::start().await;
    let events =
        || vec![token("né", "né".as_bytes(), -0.5), token("x", b"x", -1.0), finished(0, FinishReason::Stop), report()];
    let body = json!({"prompt": "p", "logprobs": 1});
    let (response, request) = server.answered("/v1/completions", body, events()).await;
    assert_eq!(request.logprobs, Some(1));
    assert_eq!(request.max_tokens, Some(16));
    let whole: Value = response.json().await.unwrap();
    assert_eq!(whole["object"], "text_completion");
    assert_eq!(whole["choices"][0]["text"], "néx");
    let expected = json!({
        "tokens": ["né", "x"], "token_logprobs": [-0.5, -1.0],
        "top_logprobs": [{"né": -0.5, "zz": -9999.0}, {"x": -1.0, "zz": -9999.0}], "text_offset": [0, 2],
    });
    assert_eq!(whole["choices"][0]["logprobs"], expected);

    let body = json!({"prompt": "p", "logprobs": 1, "stream": true});
    let (response, _) = server.answered("/v1/completions", body, events()).await;
    let text = response.text().await.unwrap();
    let chunks = chunks(&text);
    assert_eq!(chunks[0]["choices"][0]["text"], "né");
    assert_eq!(chunks[1]["choices"][0]["logprobs"]["text_offset"], json!([2]));
    assert_eq!(chunks[2]["choices"][0]["finish_reason"], "stop");
}

#[tokio::test]
async fn a_model_without_a_tokenizer_answers_in_ids() {
    let server = Server::start().await;
    let events = || {
        let delta = |id| Event::Delta(Delta { token_ids: vec![id], ..Delta::default() });
        vec![delta(5), delta(6), finished(0, FinishReason::Length), report()]
    };
    let (response, _) = server.answered("/v1/completions", json!({"prompt": [1, 2]}), events()).await;
    let whole: Value = response.json().await.unwrap();
    assert_eq!(whole["choices"][0]["token_ids"], json!([5, 6]));
    let (response, _) = server.answered("/v1/completions", json!({"prompt": [1, 2], "stream": true}), events()).await;
    let text = response.text().await.unwrap();
    let ids: Vec<Value> = chunks(&text).iter().map(|c| c["choices"][0]["token_ids"].clone()).collect();
    assert_eq!(ids, [json!([5]), json!([6]), Value::Null]);
}

#[tokio::test]
async fn the_closing_mark_inside_an_answer_is_text() {
    let server = Server::start().await;
    let events = vec![delta(0, "[DONE]\n\ndata: [DONE]\n\n"), finished(0, FinishReason::Stop), report()];
    let (response, _) = server.answered("/v1/completions", json!({"prompt": "p", "stream": true}), events).await;
    let text = response.text().await.unwrap();
    assert_eq!(data(&text).iter().filter(|d| **d == "[DONE]").count(), 1);
    assert_eq!(chunks(&text)[0]["choices"][0]["text"], "[DONE]\n\ndata: [DONE]\n\n");
}

#[tokio::test]
async fn a_silent_stream_is_kept_alive() {
    let config = limited(FrontLimits { stream_keep_alive: Duration::from_millis(20), ..FrontLimits::default() });
    let server = Server::with(config, Duration::ZERO).await;
    let mut response = server.post("/v1/completions", json!({"prompt": "p", "stream": true})).await;
    let asked = server.asked().await;
    assert_eq!(response.chunk().await.unwrap().unwrap()[0], b':', "a comment comes before any event");
    asked.say(hello()).await;
    drop(asked);
    let text = response.text().await.unwrap();
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
}
