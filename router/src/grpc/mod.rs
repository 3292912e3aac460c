//! The gRPC service `hypic.v1.Inference` over an [`Engine`], with health and reflection. Owns the
//! translation in both directions (in [`convert`]) and the mapping of failures to statuses. The
//! call's deadline becomes the request's; a dropped call drops the answer, which cancels the work.

mod convert;
mod deadline;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use futures::stream::BoxStream;
use hypic_proto::FILE_DESCRIPTOR_SET;
use hypic_proto::v1::inference_server::{Inference, InferenceServer};
use hypic_proto::v1::{GenerateRequest, GenerateResponse, GetModelRequest, Model, ModelsRequest, ModelsResponse};
use hypic_telemetry::Protocol;
use tonic::metadata::{Ascii, MetadataMap, MetadataValue};
use tonic::service::Routes;
use tonic::service::interceptor::InterceptedService;
use tonic::{Code, Request, Response, Status};

use crate::api::{Engine, Error, ErrorKind, Event, ModelCard};
use crate::auth::{ApiKeys, Tenant};
use crate::front::FrontConfig;
use crate::running::Shared;
use crate::stats::{self, Asked};

/// How often the health service asks the engine how it is.
const HEALTH_INTERVAL: Duration = Duration::from_millis(200);
/// Trailing metadata that names the wrong field.
const PARAM_KEY: &str = "hypic-param";

/// Trailing metadata that says after how many seconds to try again, as HTTP's header does.
const RETRY_AFTER_KEY: &str = "retry-after";
const RETRY_AFTER_S: &str = "1";

/// All services, and the task that keeps the health service up to date.
pub(crate) fn routes<E: Engine>(
    config: &FrontConfig,
    shared: Arc<Shared<E>>,
) -> (Router, impl Future<Output = ()> + Send + 'static) {
    let inference = InferenceServer::new(Service { shared: shared.clone() })
        .max_decoding_message_size(config.limits.body_limit)
        .max_encoding_message_size(usize::MAX);
    let keys = config.api_keys.clone();
    let guarded = InterceptedService::new(inference, move |mut request: Request<()>| {
        if let Some(tenant) = authenticate(keys.as_ref(), request.metadata())? {
            request.extensions_mut().insert(tenant);
        }
        Ok(request)
    });
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            .with_service_name("hypic.v1.Inference")
            .with_service_name("grpc.health.v1.Health")
    };
    const DESCRIBED: &str = "the descriptors were made at build time";
    let (reporter, health) = tonic_health::server::health_reporter();
    let routes = Routes::new(guarded)
        .add_service(health)
        .add_service(reflection().build_v1().expect(DESCRIBED))
        // The older name of the same service, which most clients still ask for first.
        .add_service(reflection().build_v1alpha().expect(DESCRIBED))
        .prepare()
        .into_axum_router();
    (routes, report_health(reporter, shared))
}

async fn report_health<E: Engine>(reporter: tonic_health::server::HealthReporter, shared: Arc<Shared<E>>) {
    let mut last = None;
    loop {
        let ready = shared.ready();
        if last != Some(ready) {
            let status =
                if ready { tonic_health::ServingStatus::Serving } else { tonic_health::ServingStatus::NotServing };
            // The empty name stands for the whole server.
            for service in ["", "hypic.v1.Inference"] {
                reporter.set_service_status(service, status).await;
            }
            last = Some(ready);
        }
        if shared.drain.is_cancelled() {
            return;
        }
        tokio::select! {
            () = shared.drain.cancelled() => {}
            () = tokio::time::sleep(HEALTH_INTERVAL) => {}
        }
    }
}

fn authenticate(keys: Option<&ApiKeys>, metadata: &MetadataMap) -> Result<Option<Tenant>, Status> {
    let Some(keys) = keys else { return Ok(None) };
    let tenant = keys.check(metadata.get("authorization").map(|value| value.as_bytes()));
    let tenant = tenant.inspect_err(|error| stats::refused(Protocol::Grpc, error)).map_err(status)?;
    Ok(Some(Tenant(tenant)))
}

/// A failure as gRPC tells it.
fn status(error: Error) -> Status {
    let code = match error.kind {
        ErrorKind::Invalid => Code::InvalidArgument,
        ErrorKind::Unauthenticated => Code::Unauthenticated,
        ErrorKind::NotFound => Code::NotFound,
        ErrorKind::TooLarge | ErrorKind::Overloaded => Code::ResourceExhausted,
        ErrorKind::Deadline => Code::DeadlineExceeded,
        ErrorKind::Unavailable => Code::Unavailable,
        ErrorKind::Internal => Code::Internal,
    };
    let mut metadata = MetadataMap::new();
    // A name with characters that metadata cannot hold is in the message anyway.
    if let Some(value) = error.param.and_then(|param| param.parse().ok()) {
        metadata.insert(PARAM_KEY, value);
    }
    if matches!(error.kind, ErrorKind::Overloaded | ErrorKind::Unavailable) {
        let retry_after: MetadataValue<Ascii> = MetadataValue::from_static(RETRY_AFTER_S);
        metadata.insert(RETRY_AFTER_KEY, retry_after);
    }
    Status::with_metadata(code, error.message, metadata)
}

struct Service<E> {
    shared: Arc<Shared<E>>,
}

impl<E: Engine> Service<E> {
    fn check_model(&self, id: &str) -> Result<&ModelCard, Error> {
        let served = self.shared.engine.model();
        if id == served.id {
            return Ok(served);
        }
        let message = format!("the model '{id}' does not exist: this server has '{}'", served.id);
        Err(Error { param: Some("model".into()), ..Error::new(ErrorKind::NotFound, message) })
    }

    fn read(&self, request: Request<GenerateRequest>) -> Result<crate::Request, Error> {
        let deadline = deadline::of_call(request.metadata())?;
        let tenant = request.extensions().get::<Tenant>().map(|tenant| tenant.0.clone());
        let message = request.into_inner();
        if !message.model.is_empty() {
            self.check_model(&message.model)?;
        }
        Ok(crate::Request { tenant, ..convert::request(message, deadline)? })
    }
}

#[tonic::async_trait]
impl<E: Engine> Inference for Service<E> {
    type GenerateStream = BoxStream<'static, Result<GenerateResponse, Status>>;

    async fn generate(&self, request: Request<GenerateRequest>) -> Result<Response<Self::GenerateStream>, Status> {
        let mut asked = Asked::over_grpc(request.metadata());
        let request = self.read(request).inspect_err(|error| asked.failed(error, false)).map_err(status)?;
        let named = convert::named(&request.prompt);
        let running = self.shared.start(request, asked).await.map_err(named).map_err(status)?;
        // The answer is kept until its last event was sent on.
        let events = futures::stream::unfold((running, false), |(mut running, ended)| async move {
            if ended {
                return None;
            }
            let event = running.next().await;
            let ended = matches!(event, Event::Report(_) | Event::Failed(_));
            Some((convert::event(event).map_err(status), (running, ended)))
        });
        Ok(Response::new(Box::pin(events)))
    }

    async fn models(&self, _: Request<ModelsRequest>) -> Result<Response<ModelsResponse>, Status> {
        Ok(Response::new(ModelsResponse { models: vec![convert::model(self.shared.engine.model())] }))
    }

    async fn get_model(&self, request: Request<GetModelRequest>) -> Result<Response<Model>, Status> {
        let served = self.check_model(&request.get_ref().id).map_err(status)?;
        Ok(Response::new(convert::model(served)))
    }
}
