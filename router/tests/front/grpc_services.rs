use std::time::Duration;

use hypic_proto::v1;
use hypic_router::{ApiKeys, FrontConfig};
use tonic::{Code, Request};
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus};
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::{ServerReflectionRequest, server_reflection_request, server_reflection_response};

use crate::fake::{PATIENCE, Server, config};
use crate::grpc::{channel, client, refused, text};

#[tokio::test]
async fn keys_guard_inference_but_not_health() {
    let file = tempfile::NamedTempFile::new().expect("temporary file");
    std::fs::write(file.path(), "secret\n").expect("writable");
    let api_keys = Some(ApiKeys::from_file(file.path()).expect("a key"));
    let server = Server::with(FrontConfig { api_keys, ..config() }, Duration::ZERO).await;
    assert_eq!(refused(&server, text("q")).await.code(), Code::Unauthenticated);
    let mut request = Request::new(v1::ModelsRequest {});
    request.metadata_mut().insert("authorization", "Bearer secret".parse().expect("metadata"));
    client(&server).await.models(request).await.expect("the key is right");
    let mut health = HealthClient::new(channel(&server).await);
    health.check(HealthCheckRequest { service: String::new() }).await.expect("open");

    let mut request = Request::new(text("q"));
    request.metadata_mut().insert("authorization", "Bearer secret".parse().expect("metadata"));
    let mut client = client(&server).await;
    let (_, asked) = tokio::join!(client.generate(request), server.asked());
    assert!(asked.request.tenant.is_some_and(|tenant| tenant.len() == 64), "the key says who asks");
}

#[tokio::test]
async fn health_follows_the_engine() {
    let server = Server::start().await;
    let mut health = HealthClient::new(channel(&server).await);
    for (ready, expected) in
        [(true, ServingStatus::Serving), (false, ServingStatus::NotServing), (true, ServingStatus::Serving)]
    {
        server.set_ready(ready);
        for service in ["", "hypic.v1.Inference"] {
            let mut check = async || {
                let answer = health.check(HealthCheckRequest { service: service.into() }).await;
                answer.map(|a| a.into_inner().status())
            };
            let follows = async {
                while check().await.ok() != Some(expected) {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            };
            tokio::time::timeout(PATIENCE, follows).await.expect("the status follows");
        }
    }
}

#[tokio::test]
async fn reflection_lists_the_services() {
    let server = Server::start().await;
    let mut reflection = ServerReflectionClient::new(channel(&server).await);
    let ask = |message_request| ServerReflectionRequest { host: String::new(), message_request: Some(message_request) };
    let questions = vec![
        ask(server_reflection_request::MessageRequest::ListServices(String::new())),
        ask(server_reflection_request::MessageRequest::FileContainingSymbol("hypic.v1.Inference".into())),
    ];
    let mut answers =
        reflection.server_reflection_info(tokio_stream::iter(questions)).await.expect("a stream").into_inner();
    let first = answers.message().await.expect("an answer").expect("an answer").message_response;
    let Some(server_reflection_response::MessageResponse::ListServicesResponse(list)) = first else {
        panic!("{first:?}")
    };
    let names: Vec<&str> = list.service.iter().map(|s| s.name.as_str()).collect();
    assert!(names.contains(&"hypic.v1.Inference") && names.contains(&"grpc.health.v1.Health"), "{names:?}");
    let second = answers.message().await.expect("an answer").expect("an answer").message_response;
    assert!(matches!(second, Some(server_reflection_response::MessageResponse::FileDescriptorResponse(_))));
}
