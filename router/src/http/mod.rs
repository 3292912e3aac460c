//! OpenAI's HTTP API over an [`Engine`](crate::Engine): paths, authentication, bodies, and how an
//! answer is sent. Every failure, wrong paths included, is an OpenAI error object. A client that
//! goes away drops the response and with it the answer, which cancels the work.

mod answer;
mod body;
mod error;
mod fields;
mod params;
mod prompt;
mod shape;

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, Request, State};
use axum::http::{StatusCode, Uri, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use hypic_telemetry::Protocol;
use serde_json::{Value, json};
use tower_http::trace::TraceLayer;

use self::error::Failure;
use self::shape::Identity;
use crate::api::{Engine, Error, ErrorKind, ModelCard};
use crate::auth::{ApiKeys, Tenant};
use crate::front::FrontConfig;
use crate::running::Shared;
use crate::stats::{self, Asked};

/// The two endpoints that answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completion,
}

struct Http<E> {
    shared: Arc<Shared<E>>,
    keep_alive: Duration,
    limits: body::Limits,
}

impl<E> Clone for Http<E> {
    fn clone(&self) -> Self {
        Http { shared: self.shared.clone(), keep_alive: self.keep_alive, limits: self.limits }
    }
}

/// All paths.
pub(crate) fn routes<E: Engine>(config: &FrontConfig, shared: Arc<Shared<E>>) -> Router {
    let state = Http {
        shared,
        keep_alive: config.limits.stream_keep_alive,
        limits: body::Limits { size: config.limits.body_limit, silence: config.limits.read_timeout },
    };
    let mut api = Router::new()
        .route("/v1/models", get(models::<E>))
        .route("/v1/models/{*id}", get(model::<E>))
        .route("/v1/chat/completions", post(chat::<E>))
        .route("/v1/completions", post(completion::<E>));
    if let Some(keys) = config.api_keys.clone() {
        api = api.route_layer(from_fn_with_state(Arc::new(keys), authenticate));
    }
    api.route("/health", get(health))
        .route("/ready", get(ready::<E>))
        .fallback(no_such_path)
        .method_not_allowed_fallback(wrong_method)
        .layer(TraceLayer::new_for_http())
        .with_state(state)
}

async fn authenticate(State(keys): State<Arc<ApiKeys>>, mut request: Request, next: Next) -> Response {
    let value = request.headers().get(header::AUTHORIZATION).map(|v| v.as_bytes());
    match keys.check(value) {
        Ok(tenant) => {
            request.extensions_mut().insert(Tenant(tenant));
            next.run(request).await
        }
        Err(error) => {
            stats::refused(Protocol::Http, &error);
            Failure::from(error).into_response()
        }
    }
}

async fn health() -> Json<Value> {
    Json(json!({"status": "alive"}))
}

async fn ready<E: Engine>(State(http): State<Http<E>>) -> (StatusCode, Json<Value>) {
    if http.shared.ready() {
        return (StatusCode::OK, Json(json!({"status": "ready"})));
    }
    let status = if http.shared.drain.is_cancelled() { "draining" } else { "loading" };
    (StatusCode::SERVICE_UNAVAILABLE, Json(json!({"status": status})))
}

async fn no_such_path(uri: Uri) -> Failure {
    let message = format!("there is no {}: see /v1/models, /v1/chat/completions, /v1/completions", uri.path());
    Failure::from(Error::new(ErrorKind::NotFound, message)).with_code("unknown_url")
}

async fn wrong_method(request: Request) -> Failure {
    let message = format!("{} does not take {}: see the header 'allow'", request.uri().path(), request.method());
    let failure = Failure::from(Error::new(ErrorKind::Invalid, message));
    failure.with_status(StatusCode::METHOD_NOT_ALLOWED).with_code("method_not_allowed")
}

fn card(model: &ModelCard) -> Value {
    json!({
        "id": model.id, "object": "model", "created": model.created, "owned_by": "hypic",
        "max_model_len": model.context,
    })
}

async fn models<E: Engine>(State(http): State<Http<E>>) -> Json<Value> {
    Json(json!({"object": "list", "data": [card(http.shared.engine.model())]}))
}

async fn model<E: Engine>(State(http): State<Http<E>>, Path(id): Path<String>) -> Result<Json<Value>, Failure> {
    let served = http.shared.engine.model();
    if id == served.id { Ok(Json(card(served))) } else { Err(params::unknown_model(&id, &served.id)) }
}

async fn chat<E: Engine>(State(http): State<Http<E>>, request: Request) -> Result<Response, Failure> {
    answer(http, Shape::Chat, request).await
}

async fn completion<E: Engine>(State(http): State<Http<E>>, request: Request) -> Result<Response, Failure> {
    answer(http, Shape::Completion, request).await
}

async fn answer<E: Engine>(http: Http<E>, shape: Shape, request: Request) -> Result<Response, Failure> {
    let served = http.shared.engine.model();
    let (parts, body) = request.into_parts();
    let mut asked = Asked::over_http(&parts.headers);
    let body = body::read_json(&parts.headers, body, http.limits).await;
    let call = body.and_then(|body| params::read_call(body, shape, &served.id));
    let mut call = call.inspect_err(|failure| asked.failed(failure.error(), false))?;
    call.request.tenant = parts.extensions.get::<Tenant>().map(|tenant| tenant.0.clone());
    let identity = Identity::new(shape, &served.id);
    let choices = call.request.n;
    let named = call.named();
    let running = http.shared.start(call.request, asked).await.map_err(named)?;
    if call.stream {
        answer::stream(running, identity, choices, call.include_usage, http.keep_alive).await
    } else {
        answer::whole(running, identity, choices).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::Answer;
    use axum::body::Body;
    use tokio_util::sync::CancellationToken;
    use tower::ServiceExt;

    struct Idle(ModelCard);

    impl Engine for Idle {
        async fn generate(&self, _: crate::Request) -> Result<Answer, Error> {
            Err(Error::new(ErrorKind::Internal, "must not be asked"))
        }

        fn model(&self) -> &ModelCard {
            &self.0
        }

        fn ready(&self) -> bool {
            true
        }
    }

    #[tokio::test]
    async fn a_draining_server_is_alive_but_takes_nothing() {
        let drain = CancellationToken::new();
        let shared = Shared {
            engine: Arc::new(Idle(ModelCard { id: "m".into(), created: 0, context: 1 })),
            drain: drain.clone(),
            abort: CancellationToken::new(),
            max_duration: None,
        };
        let routes = routes(&FrontConfig::default(), Arc::new(shared));
        let status = async |method: &str, path: &str| {
            let request = Request::builder().method(method).uri(path).body(Body::from(r#"{"prompt": "p"}"#));
            routes.clone().oneshot(request.expect("a request")).await.expect("infallible").status().as_u16()
        };
        assert_eq!(status("GET", "/ready").await, 200);
        drain.cancel();
        assert_eq!(status("GET", "/ready").await, 503);
        assert_eq!(status("GET", "/health").await, 200);
        assert_eq!(status("POST", "/v1/completions").await, 503);
    }
}
