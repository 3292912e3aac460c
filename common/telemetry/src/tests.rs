use crate::*;
use axum::body::{Body, to_bytes};
use http::{HeaderMap, Request};
use opentelemetry::trace::TraceContextExt;
use opentelemetry_proto::tonic::collector::metrics::v1::metrics_service_server::{
    MetricsService, MetricsServiceServer,
};
use opentelemetry_proto::tonic::collector::metrics::v1::{ExportMetricsServiceRequest, ExportMetricsServiceResponse};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{TraceService, TraceServiceServer};
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use parking_lot::Mutex;
use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tonic::{Response, Status};
use tower::ServiceExt;
use tracing_subscriber::layer::SubscriberExt;

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PARENT: &str = "b7ad6b7169203331";

fn inbound() -> String {
    format!("00-{TRACE}-{PARENT}-01")
}

async fn scrape(telemetry: &Telemetry) -> String {
    let request = Request::get("/metrics").body(Body::empty()).unwrap();
    let response = telemetry.prometheus_routes().oneshot(request).await.unwrap();
    assert_eq!(response.status(), 200);
    String::from_utf8(to_bytes(response.into_body(), usize::MAX).await.unwrap().to_vec()).unwrap()
}

/// Value of the one series whose line has all of `parts`.
fn value(text: &str, parts: &[&str]) -> Option<f64> {
    let mut lines = text.lines().filter(|line| !line.starts_with('#') && parts.iter().all(|part| line.contains(part)));
    let line = lines.next()?;
    assert!(lines.next().is_none(), "more than one series with {parts:?} in\n{text}");
    line.rsplit(' ').next()?.parse().ok()
}

fn with_endpoint(endpoint: String) -> TelemetryConfig {
    let shutdown_timeout = Duration::from_millis(500);
    let otlp_timeout = Duration::from_secs(60);
    TelemetryConfig { otlp_endpoint: Some(endpoint), shutdown_timeout, otlp_timeout, ..Default::default() }
}

#[test]
fn the_reference_is_up_to_date() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/metrics.md");
    if std::env::var_os("HYPIC_UPDATE_DOCS").is_some() {
        std::fs::write(&path, document()).unwrap();
    }
    let stored = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        stored == document(),
        "deploy/metrics.md is out of date; run `HYPIC_UPDATE_DOCS=1 cargo test -p hypic-telemetry the_reference`"
    );
}

#[test]
fn names_are_unique_and_label_keys_have_closed_sets() {
    let names: HashSet<_> = names::METRICS.iter().map(|one| one.name).collect();
    assert_eq!(names.len(), names::METRICS.len());
    for one in names::METRICS {
        assert!(one.name.starts_with("hypic."), "{}", one.name);
        for key in one.labels {
            assert!(LABEL_SETS.iter().any(|(set, _)| set == key), "{}: no set for {key}", one.name);
        }
    }
    for (key, values) in LABEL_SETS {
        assert_eq!(values.iter().collect::<HashSet<_>>().len(), values.len(), "values of {key}");
    }
}

#[test]
fn settings_are_read_and_checked() {
    let read = serde_json::from_str::<TelemetryConfig>(r#"{"log_format": "json", "export_interval": "3s"}"#).unwrap();
    assert_eq!((read.log_format, read.export_interval), (LogFormat::Json, Duration::from_secs(3)));
    assert_eq!(
        (read.shutdown_timeout, read.log_filter.as_str()),
        (Duration::from_secs(2), "info,opentelemetry=warn,opentelemetry_sdk=warn")
    );
    assert!(serde_json::from_str::<TelemetryConfig>(r#"{"otlp": "x"}"#).unwrap_err().to_string().contains("otlp"));
    let bad = TelemetryConfig { trace_sampling: 1.5, ..Default::default() };
    assert!(Telemetry::build(&bad).unwrap_err().to_string().contains("trace_sampling"));
    let bad = with_endpoint("not an address".into());
    assert!(Telemetry::build(&bad).unwrap_err().to_string().contains("otlp_endpoint"));
}

#[tokio::test]
async fn prometheus_text_has_each_recorded_series() {
    let telemetry = Telemetry::build(&TelemetryConfig::default()).unwrap();
    let metrics = telemetry.metrics();
    metrics.request(Protocol::Grpc, Outcome::Ok);
    metrics.request(Protocol::Grpc, Outcome::Ok);
    metrics.stage(Stage::Compose, Duration::from_millis(30));
    metrics.transfer_hidden(7.0);
    metrics.transfer_hidden(f64::NAN);
    metrics.transfer_bytes(4096);
    let text = scrape(&telemetry).await;
    assert_eq!(value(&text, &["hypic_requests_total{", "outcome=\"ok\"", "protocol=\"grpc\""]), Some(2.0));
    assert_eq!(value(&text, &["hypic_stage_duration_seconds_sum{", "stage=\"compose\""]), Some(0.03));
    assert_eq!(value(&text, &["hypic_transfer_hidden_ratio_sum"]), Some(1.0), "{text}");
    assert_eq!(value(&text, &["hypic_transfer_io_bytes_total"]), Some(4096.0));
    assert!(telemetry.shutdown());
}

#[tokio::test]
async fn a_gauge_reads_the_truth_until_its_guard_is_dropped() {
    let telemetry = Telemetry::build(&TelemetryConfig::default()).unwrap();
    let _metrics = telemetry.metrics();
    let count = Arc::new(AtomicU64::new(3));
    let read = count.clone();
    let role = [MemberRole::Combiner.into()];
    let first = observe(&names::MEMBERS, &role, move || read.load(Ordering::SeqCst));
    let second = observe(&names::MEMBERS, &role, || 10);
    let series = ["hypic_members_up", "role=\"combiner\""];
    assert_eq!(value(&scrape(&telemetry).await, &series), Some(13.0));
    count.store(5, Ordering::SeqCst);
    assert_eq!(value(&scrape(&telemetry).await, &series), Some(15.0));
    drop(second);
    assert_eq!(value(&scrape(&telemetry).await, &series), Some(5.0));
    drop(first);
    assert_eq!(value(&scrape(&telemetry).await, &series), None);
    assert_eq!(Arc::strong_count(&count), 1, "the function is gone");
}

#[derive(Clone, Default)]
struct Receiver {
    spans: Arc<Mutex<Vec<ExportTraceServiceRequest>>>,
    points: Arc<Mutex<Vec<ExportMetricsServiceRequest>>>,
}

#[tonic::async_trait]
impl TraceService for Receiver {
    async fn export(
        &self,
        request: tonic::Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.spans.lock().push(request.into_inner());
        Ok(Response::new(Default::default()))
    }
}

#[tonic::async_trait]
impl MetricsService for Receiver {
    async fn export(
        &self,
        request: tonic::Request<ExportMetricsServiceRequest>,
    ) -> Result<Response<ExportMetricsServiceResponse>, Status> {
        self.points.lock().push(request.into_inner());
        Ok(Response::new(Default::default()))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_receiver_gets_spans_below_the_inbound_parent_and_metrics() {
    let receiver = Receiver::default();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = tonic::transport::Server::builder()
        .add_service(TraceServiceServer::new(receiver.clone()))
        .add_service(MetricsServiceServer::new(receiver.clone()));
    tokio::spawn(server.serve_with_incoming(tokio_stream::wrappers::TcpListenerStream::new(listener)));
    let config =
        TelemetryConfig { shutdown_timeout: Duration::from_secs(20), ..with_endpoint(format!("http://{address}")) };
    let telemetry = Telemetry::build(&config).unwrap();
    telemetry.metrics().failover();
    let subscriber = tracing_subscriber::registry().with(telemetry.trace_layer());
    tracing::subscriber::with_default(subscriber, || {
        let headers = HeaderMap::from_iter([("traceparent".parse().unwrap(), inbound().parse().unwrap())]);
        let request = tracing::info_span!("request");
        adopt(&request, &headers);
        let mut metadata = tonic::metadata::MetadataMap::new();
        request.in_scope(|| {
            inject_current(&mut metadata);
            let text = traceparent().unwrap();
            assert_eq!(metadata.get("traceparent").unwrap().to_str().unwrap(), text);
            assert!(text.contains(TRACE) && !text.contains(PARENT), "{text}");
        });
        let scatter = tracing::info_span!("scatter");
        adopt_metadata(&scatter, &metadata);
        scatter.in_scope(|| ());
        let compose = tracing::info_span!("compose");
        adopt_text(&compose, &inbound());
        compose.in_scope(|| ());
    });
    assert!(telemetry.shutdown(), "all exported");

    let exported = receiver.spans.lock();
    let spans: Vec<_> = exported
        .iter()
        .flat_map(|one| &one.resource_spans)
        .flat_map(|one| &one.scope_spans)
        .flat_map(|one| &one.spans)
        .collect();
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let named = |name: &str| *spans.iter().find(|one| one.name == name).unwrap_or_else(|| panic!("no span {name}"));
    for span in &spans {
        assert_eq!(hex(&span.trace_id), TRACE, "{}", span.name);
    }
    assert_eq!(hex(&named("request").parent_span_id), PARENT);
    assert_eq!(hex(&named("compose").parent_span_id), PARENT);
    assert_eq!(named("scatter").parent_span_id, named("request").span_id);
    let exported = receiver.points.lock();
    let mut points = exported.iter().flat_map(|one| &one.resource_metrics).flat_map(|one| &one.scope_metrics);
    assert!(points.any(|scope| scope.metrics.iter().any(|one| one.name == names::FAILOVERS.name)));
}

#[test]
fn a_malformed_context_is_ignored() {
    let headers = HeaderMap::from_iter([("traceparent".parse().unwrap(), "00-zz-1-01".parse().unwrap())]);
    assert!(!extract(&headers).span().span_context().is_valid());
    assert_eq!(traceparent(), None);
}

/// Records more than the queues hold, and shuts down; both must be quick though nothing can be exported.
fn assert_no_delay(endpoint: String) {
    let telemetry = Telemetry::build(&with_endpoint(endpoint)).unwrap();
    let metrics = telemetry.metrics();
    let subscriber = tracing_subscriber::registry().with(telemetry.trace_layer());
    let mut took = Duration::ZERO;
    tracing::subscriber::with_default(subscriber, || {
        let began = Instant::now();
        for _ in 0..5000 {
            tracing::info_span!("request").in_scope(|| metrics.request(Protocol::Http, Outcome::Ok));
        }
        took = began.elapsed();
    });
    assert!(took < Duration::from_secs(5), "recording took {took:?}");
    let began = Instant::now();
    assert!(!telemetry.shutdown(), "nothing could be exported");
    assert!(began.elapsed() < Duration::from_millis(1500), "shutdown took {:?}", began.elapsed());
}

#[test]
fn a_dead_receiver_delays_nothing() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    assert_no_delay(format!("http://{address}"));
}

#[test]
fn a_silent_receiver_delays_nothing() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let accepted = Arc::new(AtomicU64::new(0));
    let count = accepted.clone();
    std::thread::spawn(move || {
        let mut held = Vec::new();
        while let Ok((connection, _)) = listener.accept() {
            held.push(connection);
            count.fetch_add(1, Ordering::SeqCst);
        }
    });
    assert_no_delay(format!("http://{address}"));
    assert!(accepted.load(Ordering::SeqCst) > 0, "the exporter reached the receiver");
}

#[test]
fn recording_before_start_is_harmless() {
    metrics().tokens(TokenClass::Seam, 4);
}
