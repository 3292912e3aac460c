//! Internal services of a role that answers before it has loaded its model. Owns who answers a call: Node from the start,
//! everything else once it is there; until then it is refused as unavailable. Counts the calls that are open.

use std::sync::{Arc, OnceLock};

use axum::body::Body;
use axum::extract::Request;
use axum::response::Response;
use http_body_util::BodyExt;
use hypic_cluster::{NodeService, NodeStatus};
use hypic_telemetry::Open;
use tonic::Status;
use tonic::service::Routes;
use tower::ServiceExt;

/// Calls that stand for as long as the caller does.
const STANDING: &str = "/hypic.v1.Directory/";

/// Services that come later. Clones are the same.
#[derive(Clone, Default)]
pub(super) struct Late {
    services: Arc<OnceLock<axum::Router>>,
    calls: Open,
}

impl Late {
    /// Routes to the Node service, and to what comes later.
    pub fn routes(&self, status: Arc<NodeStatus>) -> Routes {
        let late = self.clone();
        let node = Routes::new(NodeService::server(status)).into_axum_router();
        node.fallback(move |request: Request| late.clone().answer(request)).into()
    }

    /// These are the services.
    pub fn serve(&self, services: Routes) {
        let first = self.services.set(services.prepare().into_axum_router()).is_ok();
        debug_assert!(first, "services come once");
    }

    /// Calls that are open, heartbeats and directories aside. One counts until its last byte is handed over.
    pub fn calls(&self) -> &Open {
        &self.calls
    }

    async fn answer(self, request: Request) -> Response {
        let Some(services) = self.services.get() else {
            return Status::unavailable("the model is still being loaded").into_http();
        };
        let open = (!request.uri().path().starts_with(STANDING)).then(|| self.calls.enter());
        let answer = services.clone().oneshot(request).await.unwrap_or_else(|never| match never {});
        answer.map(|body| {
            Body::new(body.map_frame(move |frame| {
                // Here for its end.
                let _ = &open;
                frame
            }))
        })
    }
}
