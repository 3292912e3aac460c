//! The process-wide start: it happens once, and `metrics()` records from then on.

use axum::body::{Body, to_bytes};
use hypic_telemetry::{LogFormat, Telemetry, TelemetryConfig, TelemetryError, metrics};
use tower::ServiceExt;

#[tokio::test]
async fn start_installs_the_metrics_once() {
    metrics().failover();
    let config = TelemetryConfig { log_format: LogFormat::Json, ..Default::default() };
    let bad = TelemetryConfig { log_filter: "=,=".into(), ..Default::default() };
    assert!(Telemetry::start(&bad).unwrap_err().to_string().contains("log_filter"));
    let telemetry = Telemetry::start(&config).unwrap();
    assert!(matches!(Telemetry::start(&config), Err(TelemetryError::AlreadyStarted)));
    metrics().failover();
    let request = http::Request::get("/metrics").body(Body::empty()).unwrap();
    let response = telemetry.prometheus_routes().oneshot(request).await.unwrap();
    let text = String::from_utf8(to_bytes(response.into_body(), usize::MAX).await.unwrap().to_vec()).unwrap();
    let series = text.lines().find(|line| line.starts_with("hypic_failovers_total")).expect("the series");
    assert!(series.ends_with(" 1"), "what was recorded before the start does not count: {series}");
    assert!(telemetry.shutdown());
}
