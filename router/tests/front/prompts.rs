use hypic_router::{Anchor, Message, Mode, Part, Prompt, Request};
use serde_json::{Value, json};

use crate::fake::{Server, hello};

async fn seen(path: &str, body: Value) -> Request {
    let server = Server::start().await;
    let (response, request) = server.answered(path, body, hello()).await;
    assert_eq!(response.status(), 200);
    request
}

/// Role, whether in parts, and each part's text with its mark.
type Seen = (String, bool, Vec<(String, bool)>);

async fn messages(body: Value) -> Vec<Seen> {
    let Prompt::Chat(messages) = seen("/v1/chat/completions", body).await.prompt else { panic!("a chat") };
    let part = |Part { text, segment }| (text, segment);
    let message = |Message { role, content, parts }| (role, parts, content.into_iter().map(part).collect());
    messages.into_iter().map(message).collect()
}

fn text(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

#[tokio::test]
async fn contents_of_every_form() {
    let body = json!({"messages": [
        {"role": "developer", "content": "s"},
        {"role": "assistant", "content": null, "tool_calls": []},
        {"role": "assistant"},
        {"role": "user", "content": ["a", {"type": "text", "text": "b", "hypic": {"segment": true}}, {"text": "c"}]},
    ]});
    let part = |text: &str, segment| (text.to_owned(), segment);
    let expected = [
        ("system".into(), false, vec![part("s", false)]),
        ("assistant".into(), false, vec![]),
        ("assistant".into(), false, vec![]),
        ("user".into(), true, vec![part("a", false), part("b", true), part("c", false)]),
    ];
    assert_eq!(messages(body).await, expected);
}

#[tokio::test]
async fn segments_parts_marks_all_but_the_query() {
    let body = json!({"hypic": {"segments": "parts"}, "messages": [
        {"role": "system", "content": "plain text is no part"},
        {"role": "user", "content": [text("a"), text("b")]},
        {"role": "user", "content": [
            text("c"), {"type": "text", "text": "d", "hypic": {"segment": false}}, text("e"), text("query"),
        ]},
    ]});
    let marks: Vec<Vec<bool>> = messages(body)
        .await
        .into_iter()
        .map(|(_, _, parts)| parts.into_iter().map(|(_, mark)| mark).collect())
        .collect();
    assert_eq!(marks, [vec![false], vec![true, true], vec![true, false, true, false]]);
}

#[tokio::test]
async fn completions_with_segments() {
    let body = json!({"prompt": "q", "hypic": {"segments": ["a", ""]}});
    match seen("/v1/completions", body).await.prompt {
        Prompt::Raw { segments, query } => assert_eq!((segments, query), (vec!["a".into(), String::new()], "q".into())),
        other => panic!("{other:?}"),
    }
    let body = json!({"prompt": [9, 8], "hypic": {"segments": [[1, 2], []]}});
    match seen("/v1/completions", body).await.prompt {
        Prompt::Tokens { segments, query, anchor } => {
            assert_eq!((segments, query, anchor), (vec![vec![1, 2], vec![]], vec![9, 8], None));
        }
        other => panic!("{other:?}"),
    }
    let single = seen("/v1/completions", json!({"prompt": ["q"]})).await.prompt;
    assert!(matches!(single, Prompt::Raw { segments, query } if segments.is_empty() && query == "q"));
}

#[tokio::test]
async fn options_and_sampling_reach_the_engine() {
    let request = seen(
        "/v1/completions",
        json!({
            "prompt": "a|q", "max_tokens": 5, "max_completion_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": -1,
            "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.5, "seed": -1,
            "logit_bias": {"17": 3, "4": -100}, "stop": ["x", "y"], "ignore_eos": true,
            "hypic": {"separator": "|", "mode": "prefix", "compose": "last", "seam": 3, "anchor": "none", "salt": "s",
                      "special_tokens": true},
        }),
    )
    .await;
    let s = request.sampling;
    assert_eq!((s.temperature, s.top_p, s.top_k, s.min_p), (Some(0.5), Some(0.9), Some(0), Some(0.1)));
    assert_eq!((s.presence_penalty, s.frequency_penalty, s.repetition_penalty), (Some(1.0), Some(-1.0), Some(1.5)));
    assert_eq!((s.logit_bias, s.seed), (vec![(17, 3.0), (4, -100.0)], Some(u64::MAX)));
    assert_eq!((request.max_tokens, request.stop, request.stop_at_eos), (Some(5), vec!["x".into(), "y".into()], false));
    let o = request.options;
    assert_eq!((o.mode, o.anchor, o.seam), (Some(Mode::Prefix), Some(Anchor::None), Some(3)));
    assert_eq!(o.compose.map(|c| c.to_string()).as_deref(), Some("last"));
    assert_eq!((o.separator.as_deref(), o.salt.as_deref(), o.special_tokens), (Some("|"), Some("s"), true));
}

#[tokio::test]
async fn absent_null_neutral_and_unknown_fields_change_nothing() {
    let request = seen(
        "/v1/chat/completions",
        json!({
            "messages": [{"role": "user", "content": "hi", "name": "me"}], "model": null, "temperature": null, "n": null,
            "stop": null, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"],
            "echo": false, "suffix": "", "best_of": 1, "length_penalty": 1.0, "logprobs": false, "top_logprobs": 0,
            "user": "u", "store": true, "metadata": {"a": "b"}, "service_tier": "auto", "parallel_tool_calls": true,
            "from_the_future": {"x": [1]}, "hypic": {}, "stream": null, "stream_options": null,
        }),
    )
    .await;
    assert_eq!((request.n, request.max_tokens, request.logprobs, request.stop_at_eos), (1, None, None, true));
    assert!(request.stop.is_empty() && request.sampling.temperature.is_none() && request.options.mode.is_none());
}
