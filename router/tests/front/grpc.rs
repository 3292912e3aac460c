use std::time::Duration;

use hypic_proto::v1::inference_client::InferenceClient;
use hypic_proto::v1::{self, generate_request, generate_response};
use hypic_router::{Anchor, Error, ErrorKind, Event, FinishReason, FrontLimits, Mode, Prompt};
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

use crate::fake::{Server, delta, finished, limited, report, token};

pub async fn channel(server: &Server) -> Channel {
    Channel::from_shared(format!("http://{}", server.grpc)).expect("an address").connect().await.expect("connected")
}

pub async fn client(server: &Server) -> InferenceClient<Channel> {
    InferenceClient::new(channel(server).await)
}

pub fn text(query: &str) -> v1::GenerateRequest {
    let prompt = v1::TextPrompt { segments: vec!["a".into()], query: query.into() };
    v1::GenerateRequest { prompt: Some(generate_request::Prompt::Text(prompt)), ..Default::default() }
}

pub async fn refused(server: &Server, request: v1::GenerateRequest) -> Status {
    client(server).await.generate(request).await.expect_err("refused")
}

#[tokio::test]
async fn generate_streams_deltas_finish_and_report() {
    let server = Server::start().await;
    let mut client = client(&server).await;
    let request = v1::GenerateRequest {
        model: "org/fake".into(),
        options: Some(v1::PromptOptions {
            mode: v1::Mode::Prefix.into(),
            anchor: v1::Anchor::System.into(),
            seam: Some(0),
            ..Default::default()
        }),
        sampling: Some(v1::Sampling { temperature: Some(0.0), logit_bias: [(3, 1.0)].into(), ..Default::default() }),
        logprobs: Some(2),
        ..text("q")
    };
    let answering = async {
        let asked = server.asked().await;
        asked.say([token("hi", b"hi", -0.5), finished(0, FinishReason::Length), report()]).await;
        asked.request
    };
    let (stream, seen) = tokio::join!(client.generate(request), answering);
    assert!(matches!(seen.prompt, Prompt::Raw { segments, query } if segments == ["a"] && query == "q"));
    assert_eq!(
        (seen.options.mode, seen.options.anchor, seen.options.seam),
        (Some(Mode::Prefix), Some(Anchor::System), Some(0))
    );
    assert_eq!(seen.options.compose, None);
    assert_eq!((seen.sampling.temperature, seen.sampling.logit_bias), (Some(0.0), vec![(3, 1.0)]));
    assert_eq!((seen.n, seen.max_tokens, seen.logprobs, seen.stop_at_eos), (1, None, Some(2), true));

    let mut stream = stream.expect("a stream").into_inner();
    let mut events = Vec::new();
    while let Some(message) = stream.message().await.expect("no failure") {
        events.push(message.event.expect("an event"));
    }
    let [
        generate_response::Event::Delta(delta),
        generate_response::Event::Finished(finished),
        generate_response::Event::Report(report),
    ] = &events[..]
    else {
        panic!("{events:?}")
    };
    assert_eq!((delta.text.as_deref(), &delta.token_ids[..]), (Some("hi"), &[7][..]));
    let chosen = delta.logprobs[0].chosen.as_ref().expect("chosen");
    assert_eq!((chosen.logprob, chosen.bytes.as_deref()), (-0.5, Some(&b"hi"[..])));
    assert_eq!(finished.reason(), v1::FinishReason::Length);
    assert_eq!(report.usage.expect("usage").composed_tokens, 60);
    assert_eq!(report.segments[0].source(), v1::SegmentSource::Memory);
    assert_eq!(report.timings_ms.expect("timings").total, 4.0);
}

#[tokio::test]
async fn chats_and_token_prompts() {
    let server = Server::start().await;
    let mut client = client(&server).await;
    let part = |text: &str, segment| v1::Part { text: text.into(), segment };
    let messages = vec![
        v1::Message { role: "system".into(), parts: vec![part("s", false)] },
        v1::Message { role: "user".into(), parts: vec![part("d", true), part("q", false)] },
    ];
    let chat = generate_request::Prompt::Chat(v1::ChatPrompt { messages });
    let request = v1::GenerateRequest { prompt: Some(chat), ..Default::default() };
    let (_stream, asked) = tokio::join!(client.generate(request), server.asked());
    let Prompt::Chat(messages) = asked.request.prompt else { panic!("a chat") };
    assert!(!messages[0].parts && messages[1].parts);
    assert_eq!(messages[1].content.iter().map(|p| p.segment).collect::<Vec<_>>(), [true, false]);

    let ids = |ids: &[u32]| v1::TokenIds { ids: ids.to_vec() };
    let tokens = v1::TokenPrompt { segments: vec![ids(&[1, 2])], query: vec![3], anchor: Some(ids(&[])) };
    let prompt = Some(generate_request::Prompt::Tokens(tokens));
    let (_stream, asked) =
        tokio::join!(client.generate(v1::GenerateRequest { prompt, ..Default::default() }), server.asked());
    let Prompt::Tokens { segments, query, anchor } = asked.request.prompt else { panic!("tokens") };
    assert_eq!((segments, query, anchor), (vec![vec![1, 2]], vec![3], Some(vec![])));
}

#[tokio::test]
async fn models() {
    let server = Server::start().await;
    let mut client = client(&server).await;
    let list = client.models(v1::ModelsRequest {}).await.expect("a list").into_inner();
    assert_eq!(list.models, [v1::Model { id: "org/fake".into(), created: 1_700_000_000, context: 4096 }]);
    client.get_model(v1::GetModelRequest { id: "org/fake".into() }).await.expect("served");
    let missing = client.get_model(v1::GetModelRequest { id: "x".into() }).await.expect_err("not served");
    assert_eq!(missing.code(), Code::NotFound);
}

#[tokio::test]
async fn failures_have_their_code() {
    let server = Server::start().await;
    let param = |status: &Status| status.metadata().get("hypic-param").map(|p| p.to_str().expect("text").to_owned());
    for (request, name) in [
        (v1::GenerateRequest::default(), "prompt"),
        (text(""), "text.query"),
        (v1::GenerateRequest { n: Some(0), ..text("q") }, "n"),
        (
            v1::GenerateRequest { options: Some(v1::PromptOptions { mode: 9, ..Default::default() }), ..text("q") },
            "options.mode",
        ),
        (
            v1::GenerateRequest {
                options: Some(v1::PromptOptions { separator: Some(String::new()), ..Default::default() }),
                ..text("q")
            },
            "options.separator",
        ),
        (
            v1::GenerateRequest {
                sampling: Some(v1::Sampling { top_p: Some(f32::NAN), ..Default::default() }),
                ..text("q")
            },
            "sampling.top_p",
        ),
    ] {
        let status = refused(&server, request).await;
        assert_eq!((status.code(), param(&status).as_deref()), (Code::InvalidArgument, Some(name)));
    }
    let unknown = refused(&server, v1::GenerateRequest { model: "x".into(), ..text("q") }).await;
    assert_eq!(unknown.code(), Code::NotFound);
    server.refuse(Error::invalid("query", "why"));
    assert_eq!(param(&refused(&server, text("q")).await).as_deref(), Some("text.query"));
    for (kind, code) in [
        (ErrorKind::TooLarge, Code::ResourceExhausted),
        (ErrorKind::Overloaded, Code::ResourceExhausted),
        (ErrorKind::Unavailable, Code::Unavailable),
        (ErrorKind::Internal, Code::Internal),
    ] {
        server.refuse(Error::new(kind, "why"));
        let status = refused(&server, text("q")).await;
        assert_eq!((status.code(), status.message()), (code, "why"));
        let again = matches!(kind, ErrorKind::Overloaded | ErrorKind::Unavailable);
        assert_eq!(status.metadata().contains_key("retry-after"), again);
    }
}

#[tokio::test]
async fn a_stream_that_fails_ends_with_a_status() {
    let server = Server::start().await;
    let mut client = client(&server).await;
    for (last, code) in [
        (Some(Event::Failed(Error::new(ErrorKind::Overloaded, "full"))), Code::ResourceExhausted),
        (None, Code::Internal),
    ] {
        let answering = async { server.asked().await.say([delta(0, "a")].into_iter().chain(last)).await };
        let (stream, ()) = tokio::join!(client.generate(text("q")), answering);
        let mut stream = stream.expect("a stream").into_inner();
        assert!(stream.message().await.expect("a delta").is_some());
        assert_eq!(stream.message().await.expect_err("a failure").code(), code);
    }
}

#[tokio::test]
async fn the_calls_deadline_is_the_requests() {
    let server = Server::start().await;
    let mut client = client(&server).await;
    // Set as metadata, so that it is the server that keeps the time.
    let mut request = Request::new(text("q"));
    request.metadata_mut().insert("grpc-timeout", "80m".parse().expect("metadata"));
    let (stream, asked) = tokio::join!(client.generate(request), server.asked());
    assert_eq!(asked.request.deadline, Some(Duration::from_millis(80)));
    let status = match stream {
        Ok(stream) => stream.into_inner().message().await.expect_err("too late"),
        Err(status) => status,
    };
    assert_eq!(status.code(), Code::DeadlineExceeded);
    asked.cancelled().await;

    let mut request = Request::new(text("q"));
    request.metadata_mut().insert("grpc-timeout", "soon".parse().expect("metadata"));
    assert_eq!(client.generate(request).await.expect_err("malformed").code(), Code::InvalidArgument);
}

#[tokio::test]
async fn dropping_the_call_cancels() {
    let server = Server::start().await;
    let mut client = client(&server).await;
    let (stream, asked) = tokio::join!(client.generate(text("q")), async {
        let asked = server.asked().await;
        asked.say([delta(0, "a")]).await;
        asked
    });
    assert!(!asked.events.is_closed());
    drop(stream);
    asked.cancelled().await;
}

#[tokio::test]
async fn large_messages_pass_and_larger_ones_are_refused() {
    let server =
        Server::with(limited(FrontLimits { body_limit: 8 << 20, ..FrontLimits::default() }), Duration::ZERO).await;
    let mut client = client(&server).await;
    let (_stream, asked) = tokio::join!(client.generate(text(&"x".repeat(6 << 20))), server.asked());
    assert!(matches!(asked.request.prompt, Prompt::Raw { query, .. } if query.len() == 6 << 20));
    let status = client.generate(text(&"x".repeat(9 << 20))).await.expect_err("too large");
    assert!(matches!(status.code(), Code::OutOfRange | Code::ResourceExhausted), "{status}");
}
